"""DPO: pairs of every form as tokens, the order of training, checkpoints, and a training held against the formula."""

import json
import math
import os
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.helpers import ROOT
from tests.test_chat_template import CHAT, TOOLS
from tests.test_settings import VALUES
from tests.wheels import found_with
from verl_tasks.data.pairs import pair_set, read_pairs, steps, token_pairs
from verl_tasks.launch import train
from verl_tasks.launch.plan import ONE_WORKER
from verl_tasks.machine.hardware import cpu_dtype
from verl_tasks.models.chat_template import answer_ids, prompt_ids
from verl_tasks.models.merge import merge
from verl_tasks.rows import DataError, Example, dpo_row, dpo_schema, write_parquet
from verl_tasks.runs.run import Run, export, read_metrics, tracker
from verl_tasks.settings import SettingsError, load_settings
from verl_tasks.training.methods import dpo

USER = [{"role": "user", "content": "2+2?"}]
GOOD, BAD = [{"role": "assistant", "content": "4"}], [{"role": "assistant", "content": "5"}]


@pytest.fixture
def tokenizer(small_model):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(small_model)


def written(path: Path, records: list[dict]) -> Path:
    if path.suffix == ".parquet":
        write_parquet(records, path, dpo_schema())
    else:
        path.write_text("\n".join(map(json.dumps, records)))
    return path


# ---- rows


@pytest.mark.parametrize("name", ["pairs.jsonl", "pairs.json", "pairs.parquet"])
def test_a_pair_is_read_from_any_file(tmp_path, name):
    """Of the forms that a record may have: test_formats.py."""
    pair = {"prompt": "2+2?", "chosen": "4", "rejected": "5"}
    if name == "pairs.parquet":  # of plain columns, not ours
        pq.write_table(pa.Table.from_pylist([pair]), tmp_path / name)
    else:
        written(tmp_path / name, [pair])
    ((_, found),) = read_pairs(tmp_path / name)
    assert (found.messages(), found.ground_truth, found.tools) == (USER, {"chosen": "4", "rejected": "5"}, None)


def test_tools_of_our_own_parquet_are_taken_as_they_are(tmp_path):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "dict", "default": None}}}]
    example = Example(CHAT, {"chosen": "a", "rejected": ""}, tools=tools)
    write_parquet([dpo_row(example)], tmp_path / "pairs.parquet", dpo_schema(tools=True))
    ((_, pair),) = read_pairs(tmp_path / "pairs.parquet")
    assert (pair.messages(), pair.ground_truth, pair.tools) == (CHAT, {"chosen": "a", "rejected": ""}, tools)


def test_columns_can_be_named(tmp_path, tokenizer):
    path = written(
        tmp_path / "pairs.jsonl", [{"asked": f"{n}+2?", "good": "4", "bad": "5", "by": "me"} for n in range(9)]
    )
    s = replace(load_settings(VALUES), PAIRS_FILE=str(path), TRAIN_BATCH_SIZE=4, MAX_PROMPT_LENGTH=64)
    with pytest.raises(DataError, match=r"pairs.jsonl: line 1: has no known form"):
        pair_set(s, path, tokenizer)
    found = pair_set(replace(s, PAIRS_COLUMNS="prompt=asked, chosen=good,rejected=bad"), path, tokenizer)
    assert len(found.train) == 9 and found.said.endswith("; not used: by)")
    with pytest.raises(DataError, match="PAIRS_COLUMNS=answer=x: must be FIELD=COLUMN,"):
        pair_set(replace(s, PAIRS_COLUMNS="answer=x"), path, tokenizer)


def test_twins_of_a_prompt_are_held_out_together(tmp_path, tokenizer):
    twins = [{"prompt": f"{n}{space}+ 2?", "chosen": "4", "rejected": "5"} for n in range(40) for space in (" ", " \n")]
    s = replace(load_settings(VALUES), TRAIN_BATCH_SIZE=4, MAX_PROMPT_LENGTH=64)
    found = pair_set(s, written(tmp_path / "pairs.jsonl", twins), tokenizer)
    assert len(found.held_out) == 8 and len({pair.problem for pair in found.held_out}) == 4


def test_a_bad_row_is_named(tmp_path):
    lines = [{"prompt": "a", "chosen": "b", "rejected": "c"}, {"prompt": "a", "chosen": "b", "rejected": 7}]
    with pytest.raises(DataError, match=r"pairs.jsonl: line 2: column `rejected`: message 0"):
        list(read_pairs(written(tmp_path / "pairs.jsonl", lines)))
    with pytest.raises(DataError, match=r"pairs.jsonl: line 1: has no chosen and rejected answers"):
        list(read_pairs(written(tmp_path / "pairs.jsonl", [{"prompt": "a", "answer": "b"}])))


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"prompt": []}, "row 1: column prompt: must be a non-empty list"),
        ({"chosen": None}, "row 1: column chosen: must be a non-empty list"),
        ({"rejected": [{"role": "assistant", "content": None}]}, "row 1: column rejected: each message needs a text"),
        ({"rejected": USER}, "row 1: columns chosen and rejected: must be one message of the assistant"),
        ({"rejected": BAD + BAD}, "row 1: columns chosen and rejected: must be one message of the assistant"),
    ],
)
def test_a_bad_row_of_our_own_parquet_is_named(tmp_path, changes, said):
    good = {"prompt": USER, "chosen": GOOD, "rejected": BAD}
    with pytest.raises(DataError, match=said):
        list(read_pairs(written(tmp_path / "pairs.parquet", [good, {**good, **changes}])))


def test_tools_that_are_no_json_are_named(tmp_path):
    row = {"prompt": USER, "chosen": GOOD, "rejected": BAD, "tools": "[{"}
    write_parquet([row], tmp_path / "pairs.parquet", dpo_schema(tools=True))
    with pytest.raises(DataError, match="row 0: column tools: is not JSON"):
        list(read_pairs(tmp_path / "pairs.parquet"))


@pytest.mark.parametrize("content, said", [(b"PAR1 and no more", "not readable parquet"), (None, "no such file")])
def test_a_file_that_is_not_parquet_gives_a_one_line_error(tmp_path, content, said):
    path = tmp_path / "pairs.parquet"
    if content:
        path.write_bytes(content)
    with pytest.raises(DataError, match=said):
        list(read_pairs(path))


# ---- tokens


@pytest.mark.parametrize("thinks", [False, True])
def test_tokens_are_those_of_evaluation_and_sft(tmp_path, tokenizer, thinks):
    if thinks:
        tokenizer.chat_template = tokenizer.chat_template.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")
    example = Example(CHAT, {"chosen": "<think>hm</think> 4", "rejected": "5"}, tools=TOOLS)
    write_parquet([dpo_row(example)], tmp_path / "pairs.parquet", dpo_schema(tools=True))
    ((pair,), left_out) = token_pairs(tmp_path / "pairs.parquet", tokenizer, 10**6)
    assert pair.prompt.tolist() == prompt_ids(tokenizer, CHAT, TOOLS) and not left_out
    assert pair.chosen.tolist() == answer_ids(tokenizer, "<think>hm</think> 4", thinks)
    assert pair.rejected.tolist() == answer_ids(tokenizer, "5", thinks)
    text = tokenizer.decode(pair.prompt.tolist() + pair.rejected.tolist())
    assert text.endswith("<think>\n\n</think>\n\n5<|im_end|>" if thinks else "assistant\n5<|im_end|>")


def test_what_is_left_out_is_counted_by_reason(tmp_path, tokenizer):
    tokenizer.chat_template = (
        "{% if messages[0].role == 'assistant' %}{{ raise_exception('no') }}{% endif %}" + tokenizer.chat_template
    )
    rows = [{"prompt": "2+2?", "chosen": "4", "rejected": text} for text in ("5", "4", "5" * 60)]
    rows.append({"prompt": [{"role": "assistant", "content": "s"}, *USER], "chosen": "4", "rejected": "5"})
    path = written(tmp_path / "pairs.jsonl", rows)
    prompt = len(prompt_ids(tokenizer, USER))
    kept, left_out = token_pairs(path, tokenizer, prompt + 60)  # "5" * 60 and <|im_end|> are 61 tokens
    assert len(kept) == 1 and len(kept[0]) == prompt + 2
    assert left_out == Counter(same_answers=1, refused_by_chat_template=1, too_long=1)
    assert len(token_pairs(path, tokenizer, prompt + 61)[0]) == 2


def test_pairs_that_contradict_each_other_are_left_out_and_counted(tmp_path, tokenizer):
    """A over B and B over A for one prompt teach nothing; of another prompt, or A over C, they do."""
    rows = [("2+2?", "4", "5"), ("2+2?", "5", "4"), ("2 +  2?", "4", "5"), ("2+2?", "4", "6"), ("3+2?", "5", "4")]
    rows += [("2+2?\n", "4", "5")]
    path = written(
        tmp_path / "pairs.jsonl", [dict(zip(("prompt", "chosen", "rejected"), r, strict=True)) for r in rows]
    )
    kept, left_out = token_pairs(path, tokenizer, 10**6)
    assert left_out == Counter(contradicting=3) and len(kept) == 3
    s = replace(load_settings(VALUES), TRAIN_BATCH_SIZE=2, MAX_PROMPT_LENGTH=64)
    assert pair_set(s, path, tokenizer).said == "3 pairs, 0 held out (3 contradicting)"


def test_a_response_that_was_cut_off_is_read_back_without_an_end(tmp_path, tokenizer):
    example = Example(CHAT, {"chosen": "yes", "rejected": "no and", "truncated": ["rejected"]})
    write_parquet([dpo_row(example)], tmp_path / "pairs.parquet", dpo_schema(truncated=True))
    ((pair,), _) = token_pairs(tmp_path / "pairs.parquet", tokenizer, 10**6)
    assert tokenizer.decode(pair.chosen.tolist()) == "yes<|im_end|>"
    assert tokenizer.decode(pair.rejected.tolist()) == "no and"


def test_an_answer_of_special_tokens_that_was_cut_off_is_left_out(tmp_path, tokenizer):
    example = Example(CHAT, {"chosen": "yes", "rejected": "", "truncated": ["rejected"]})
    write_parquet([dpo_row(example)], tmp_path / "pairs.parquet", dpo_schema(truncated=True))
    assert token_pairs(tmp_path / "pairs.parquet", tokenizer, 10**6) == ([], Counter(empty_answer=1))


# ---- what is held out, epochs


def many_pairs(tmp_path: Path, prompts: int, each: int = 1) -> Path:
    answers = {"chosen": "yes"}
    records = [{"prompt": f"q {i}", "rejected": f"no {n}", **answers} for i in range(prompts) for n in range(each)]
    return written(tmp_path / f"{prompts}-{each}.jsonl", records)


def test_a_tenth_of_the_prompts_is_held_out_with_all_of_their_pairs(tmp_path, tokenizer):
    s = replace(load_settings(VALUES), TRAIN_BATCH_SIZE=4)
    found = pair_set(s, many_pairs(tmp_path, prompts=40, each=2), tokenizer)
    held_out, trained = ({pair.prompt.tobytes() for pair in pairs} for pairs in (found.held_out, found.train))
    assert (len(held_out), len(trained), len(found.held_out), len(found.train)) == (4, 36, 8, 72)
    assert not held_out & trained and found.said == "72 pairs, 8 held out (none left out)"
    other = pair_set(replace(s, SEED=s.SEED + 1), tmp_path / "40-2.jsonl", tokenizer)
    assert {pair.prompt.tobytes() for pair in other.held_out} != held_out
    # Each of several processes has as many of them.
    assert len(pair_set(replace(s, N_GPUS=3), tmp_path / "40-2.jsonl", tokenizer).held_out) == 6
    assert pair_set(s, many_pairs(tmp_path, prompts=9), tokenizer).held_out == []


def test_of_many_pairs_256_are_held_out_and_all_others_are_trained_on(tmp_path, tokenizer):
    s = replace(load_settings(VALUES), TRAIN_BATCH_SIZE=4)
    found = pair_set(s, many_pairs(tmp_path, prompts=2700), tokenizer)
    assert (len(found.held_out), len(found.train)) == (256, 2700 - 256)
    found = pair_set(s, many_pairs(tmp_path, prompts=60, each=50), tokenizer)  # 6 prompts that have 256 pairs together
    held_out, trained = ({pair.prompt.tobytes() for pair in pairs} for pairs in (found.held_out, found.train))
    assert (len(found.held_out), len(found.train)) == (300, 2700) and not held_out & trained


def test_the_default_batch_makes_sixteen_steps_of_570_pairs_and_epochs_multiply_them(tmp_path, tokenizer):
    given = {"TASK": "countdown", "STACK": "current", "METHOD": "dpo", "N_GPUS": "1", "MAX_RESPONSE_LENGTH": "256"}
    s = load_settings(given)
    found = pair_set(s, many_pairs(tmp_path, prompts=570), tokenizer)
    assert len(found.train) == 513 and steps(s, found) == 16
    assert steps(replace(s, DPO_EPOCHS=3), found) == 48


@pytest.mark.parametrize("epochs", [3, 4])
def test_more_than_three_epochs_are_warned_of(epochs, monkeypatch, tmp_path, capsys):
    from verl_tasks.launch.rounds import check_training

    monkeypatch.setenv("ARTIFACTS", str(tmp_path))
    check_training(replace(load_settings(VALUES), METHOD="dpo", DPO_EPOCHS=epochs), [])
    assert ("warning: DPO_EPOCHS=4: more than 3 epochs" in capsys.readouterr().out) == (epochs == 4)


# ---- order, batches, checkpoints


@pytest.mark.medium
def test_more_steps_begin_as_fewer_do_and_an_epoch_has_no_pair_twice():
    from verl_tasks.training.trl_dpo import training_order

    order = training_order(pairs=11, batch=4, steps=5, seed=1)
    assert order.shape == (20,) and set(order.tolist()) <= set(range(11))
    assert len(set(order[:8].tolist())) == len(set(order[8:16].tolist())) == 8
    assert order[:8].tolist() != order[8:16].tolist()
    assert np.array_equal(order, training_order(11, 4, 9, 1)[:20])
    assert not np.array_equal(order, training_order(11, 4, 5, 2))
    assert training_order(4, 4, 1, 0).shape == (4,)


@pytest.mark.parametrize(
    "batch, sequences, gpus, micro, accumulation",
    [(8, 32, 1, 8, 1), (8, 4, 1, 2, 4), (6, 8, 1, 3, 2), (8, 4, 2, 2, 2), (8, 1, 1, 1, 8), (8, 7, 1, 2, 4)],
)
def test_a_step_has_the_whole_batch_in_micro_batches_of_two_sequences_a_pair(
    tmp_path, batch, sequences, gpus, micro, accumulation
):
    from verl_tasks.training.trl_dpo import arguments

    s = replace(load_settings(VALUES), TRAIN_BATCH_SIZE=batch, MICRO_BATCH_SIZE=sequences, N_GPUS=gpus)
    config = arguments(s, tmp_path, 0)
    assert (config.per_device_train_batch_size, config.gradient_accumulation_steps) == (micro, accumulation)
    assert config.report_to == [] and config.use_cpu


@pytest.mark.parametrize("dtype, bf16", [("float32", False), ("bfloat16", True)])
def test_dpo_computes_in_what_the_cpu_multiplies(tmp_path, monkeypatch, dtype, bf16):
    from verl_tasks.training import trl_dpo

    monkeypatch.setattr(trl_dpo, "cpu_dtype", lambda: dtype)
    s = replace(load_settings(VALUES), TRAIN_BATCH_SIZE=8, MICRO_BATCH_SIZE=8)
    assert trl_dpo.arguments(s, tmp_path, 0).bf16 is bf16


@pytest.mark.parametrize("keep, left", [(1, [4, 10]), (0, [10]), (3, [2, 4, 10])])
def test_keep_checkpoints_stay_and_what_a_killed_run_left_is_removed(tmp_path, keep, left):
    from verl_tasks.training.trl_dpo import publish, remove_unfinished

    folder = tmp_path / "checkpoints"
    for step in (2, 4, 10):
        (folder / f"checkpoint-{step}").mkdir(parents=True)
        (folder / f"checkpoint-{step}/model.safetensors").touch()
        (folder / f"checkpoint-{step}/config.json").touch()
        publish(tmp_path, step, keep)
        assert Run.read(tmp_path).last == step
    assert [*Run.read(tmp_path).steps] == left and tracker(tmp_path).read_text() == "10"
    for name in ("checkpoint-12", "global_step_11", "removed_global_step_2"):
        (folder / name).mkdir()
    remove_unfinished(tmp_path, keep)
    assert {f.name for f in folder.iterdir()} == {tracker(tmp_path).name, *(f"global_step_{step}" for step in left)}


# ---- a training

PAIRS = [{"prompt": f"What is {i}?", "chosen": f"It is {i}.", "rejected": f"no idea {i * i}"} for i in range(4)]


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"PAIRS_FILE": "x"}, "raise MAX_PROMPT_LENGTH or MAX_RESPONSE_LENGTH, or lower TRAIN_BATCH_SIZE"),
        ({"PAIRS_FILE": "x", "MAX_PROMPT_LENGTH": 999}, "PAIRS_FILE needs more pairs, or lower"),
        ({"MAX_PROMPT_LENGTH": 999}, "raise SAMPLED_PROMPTS, or lower"),
    ],
)
def test_too_few_pairs_are_refused_with_what_to_raise(small_model, tmp_path, changes, said):
    from verl_tasks.training.trl_dpo import train

    pairs = written(tmp_path / "pairs.jsonl", [*PAIRS[:3], {**PAIRS[3], "chosen": "x" * 300}])
    s = replace(load_settings(VALUES), TRAIN_BATCH_SIZE=5, **changes)
    with pytest.raises(DataError, match=said) as error:
        train(s, str(small_model), str(pairs), tmp_path / "run", tmp_path / "metrics.jsonl")
    assert "are less than TRAIN_BATCH_SIZE=5" in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def launch(
    start: Path, pairs: Path, run_dir: Path, module: str = "verl_tasks.training.trl_dpo", **changes
) -> subprocess.CompletedProcess:
    """The command of the launcher; every launch has a file of metrics of its own."""
    metrics = run_dir / "metrics"
    metrics.mkdir(parents=True, exist_ok=True)
    inherited = {name: os.environ[name] for name in ("PATH", "HOME")}
    small = {"METHOD": "dpo", "INIT": "base", "TRAIN_BATCH_SIZE": "4", "MICRO_BATCH_SIZE": "4", "LR": "1e-3"}
    own = {"PYTHONPATH": str(ROOT), "VERL_FILE_LOGGER_PATH": str(metrics / f"{len(list(metrics.iterdir())):03}.jsonl")}
    several, alone = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={changes.get('N_GPUS')}"], {}
    if "N_GPUS" not in changes:
        several, alone = [], ONE_WORKER
    return subprocess.run(
        [sys.executable, *several, "-m", module, start, pairs, run_dir],
        cwd=ROOT,
        env=inherited | VALUES | small | own | alone | changes,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def losses(run_dir: Path) -> list[float]:
    """By step, which must be 1, 2 and on."""
    metrics = read_metrics(run_dir)
    assert list(metrics) == list(range(1, len(metrics) + 1))
    return [step["train/loss"] for step in metrics.values()]


def log_prob(model, pair, answer: np.ndarray) -> float:
    """Of the answer's tokens, one sequence without padding, from the logits."""
    import torch

    ids = torch.tensor(np.concatenate([pair.prompt, answer])).long()[None]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=cpu_dtype() == "bfloat16"):
        logits = model(ids).logits[0, :-1].float()
    rows = torch.arange(len(pair.prompt) - 1, ids.shape[1] - 1)
    return float(logits.log_softmax(-1)[rows, ids[0, rows + 1]].sum())


def dpo_loss(policy: Path, reference: Path, pairs, beta: float) -> float:
    """The mean over ``pairs`` of -log sigmoid(beta ((log p_chosen - ref_chosen) - (log p_rejected - ref_rejected)))."""
    from transformers import AutoModelForCausalLM

    p, r = (AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval() for folder in (policy, reference))
    margins = [
        beta
        * (
            log_prob(p, x, x.chosen)
            - log_prob(r, x, x.chosen)
            - log_prob(p, x, x.rejected)
            + log_prob(r, x, x.rejected)
        )
        for x in pairs
    ]
    return float(np.mean([math.log1p(math.exp(-margin)) for margin in margins]))


def weights(folder: Path) -> dict:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype="float32").state_dict()


@pytest.mark.long
def test_a_continued_training_follows_the_formula_and_is_the_uninterrupted_one(small_model, tokenizer, tmp_path):
    pairs = written(tmp_path / "pairs.jsonl", PAIRS)
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    assert launch(small_model, pairs, whole, STEPS="3", SAVE_FREQ="2").returncode == 0
    assert [*Run.read(whole).steps] == [2, 3]
    # As if a launch had been killed while it saved its third step.
    shutil.copytree(whole, run_dir)
    folder = run_dir / "checkpoints"
    (folder / "global_step_3").rename(folder / "checkpoint-3")
    tracker(run_dir).write_text("2")
    resumed = launch(small_model, pairs, run_dir, STEPS="3", SAVE_FREQ="9")
    assert resumed.returncode == 0, resumed.stdout
    assert [len(f.read_text().splitlines()) for f in sorted((run_dir / "metrics").iterdir())] == [3, 1]
    assert [*Run.read(run_dir).steps] == [2, 3] and losses(whole) == losses(run_dir)

    # Every batch has all four pairs.
    after_two = dpo_loss(export(Run.read(run_dir), "2"), small_model, token_pairs(pairs, tokenizer, 192)[0], beta=0.1)
    assert losses(run_dir)[0] == pytest.approx(math.log(2), abs=1e-6)
    assert 0.3 < after_two < 0.68 and losses(run_dir)[2] == pytest.approx(after_two, abs=1e-3)
    metrics = read_metrics(run_dir)
    assert metrics[2]["dpo/rewards/margins"] > 0.05 and metrics[2]["timing_s/step"] > 0
    # It decays to 0 after the last step.
    rates = [metrics[step]["train/learning_rate"] for step in (1, 2, 3)]
    assert rates == pytest.approx([1e-3, 2e-3 / 3, 1e-3 / 3]) and metrics[3]["train/grad_norm"] > 0
    start, ours, theirs = weights(small_model), weights(export(Run.read(run_dir))), weights(export(Run.read(whole)))
    assert all(ours[name].equal(theirs[name]) for name in ours)
    assert not any(ours[name].equal(start[name]) for name in ours)


@pytest.mark.parametrize(
    ("kind", "values", "wanted"),
    [
        ("llama", {"attn_implementation": "varlen"}, "sdpa"),
        ("gemma2", {}, "eager"),
        ("gemma2", {"attn_logit_softcapping": None}, "sdpa"),
        ("gpt_oss", {}, "eager"),
    ],
)
def test_a_soft_cap_and_sinks_are_not_left_out(tmp_path, kind, values, wanted):
    """transformers' sdpa takes a soft cap, and does nothing with it."""
    from verl_tasks.models.attention import attention

    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind} | values))
    assert attention(str(tmp_path)) == wanted


@pytest.mark.long
def test_shards_in_two_processes_train_as_one_process_and_go_on_from_a_checkpoint(small_model, tmp_path):
    """From a checkpoint whose config names an attention that only verl's processes know, as older ones do."""
    pairs, start = many_pairs(tmp_path, prompts=40), shutil.copytree(small_model, tmp_path / "start")
    config = json.loads((start / "config.json").read_text())
    (start / "config.json").write_text(json.dumps(config | {"attn_implementation": "varlen"}))

    def trained(name: str, **changes) -> Path:
        result = launch(start, pairs, tmp_path / name, "tests.sharded_dpo", STEPS="3", SAVE_FREQ="2", **changes)
        assert result.returncode == 0, result.stdout
        return tmp_path / name

    two = {"N_GPUS": "2", "MICRO_BATCH_SIZE": "2"}  # two micro-batches a step on each
    whole, shards = trained("whole"), trained("shards", **two)
    assert not list(whole.glob("checkpoints/*/pytorch_model_fsdp.bin"))
    assert len(list(shards.glob("checkpoints/*/pytorch_model_fsdp.bin"))) == 2
    shutil.copytree(shards, tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed/checkpoints/global_step_3")
    tracker(tmp_path / "resumed").write_text("2")
    resumed = trained("resumed", **two)
    assert [len(file.read_text().splitlines()) for file in sorted((resumed / "metrics").iterdir())] == [3, 1]
    wanted, metrics = weights(export(Run.read(whole))), read_metrics(whole)
    for run_dir in (shards, resumed):
        found = read_metrics(run_dir)
        for name in ("train/loss", "train/grad_norm", "val/loss", "val/margin"):
            steps = [step for step in metrics if name in metrics[step]]
            assert steps and [found[step][name] for step in steps] == pytest.approx(
                [metrics[step][name] for step in steps], rel=1e-4
            )
        ours = weights(export(Run.read(run_dir)))
        assert ours.keys() == wanted.keys()
        assert max(float((ours[name] - wanted[name]).abs().max()) for name in wanted) < 1e-4  # of steps of 1e-3


def test_dpo_is_in_shards_on_several_gpus_with_all_weights():
    s = replace(load_settings(VALUES), STACK="current", N_GPUS=8)
    assert dpo.sharded(s)
    for changes in ({"LORA_RANK": 8}, {"STACK": "cpu"}):
        assert not dpo.sharded(replace(s, **changes))


@pytest.fixture(scope="module", params=["1.16.0", "0.29.1"])
def trained_on(request, small_model, tmp_path_factory) -> dict:
    """What tests/trl_dpo.py found with that version of TRL."""
    return found_with(f"trl=={request.param}", "trl_dpo", small_model, tmp_path_factory.mktemp("dpo"))


@pytest.mark.slow
def test_a_response_that_was_cut_off_has_no_end_token(trained_on):
    texts = trained_on["texts"]
    assert len(texts) == 16 and sum("cut" in text for text in texts) == 8
    for text in texts:
        cut = "cut" in text and int(text.removesuffix("<|im_end|>").rsplit(maxsplit=1)[1]) % 2
        assert text.endswith("<|im_end|>") == (not cut), text


@pytest.mark.slow
def test_held_out_pairs_give_margin_and_accuracy_at_the_last_step(trained_on):
    metrics = trained_on["metrics"]
    assert list(metrics) == ["1", "2"]
    values = [metrics["2"][f"val/{name}"] for name in ("loss", "margin", "accuracy")]
    assert values[0] != math.log(2) and values[1] != 0 and values[2] in (0, 1)  # of one pair
    assert values[0] == pytest.approx(math.log1p(math.exp(-values[1])), abs=1e-3)


@pytest.mark.slow
def test_a_training_goes_on_with_an_adapter_whose_copy_is_its_reference(trained_on):
    assert trained_on["metrics"]["1"]["train/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert trained_on["same"] and len(trained_on["changed"]) == trained_on["parameters"] > 0


@pytest.mark.long
def test_lora_in_two_processes_starts_from_its_base_and_changes_the_projections_alone(small_model, tmp_path):
    pairs, run_dir = written(tmp_path / "pairs.jsonl", PAIRS), tmp_path / "run"
    lora = {"LORA_RANK": "8", "LORA_ALPHA": "16", "N_GPUS": "2"}
    result = launch(small_model, pairs, run_dir, STEPS="2", **lora)
    assert result.returncode == 0, result.stdout
    one, two = losses(run_dir)
    assert one == pytest.approx(math.log(2), abs=1e-6) and 0.3 < two < 0.69
    assert export(Run.read(run_dir)) == run_dir / "checkpoints/global_step_2"
    folder = merge((trained_run := Run.read(run_dir)).checkpoint(), trained_run.base)
    assert folder == run_dir / "checkpoints/global_step_2/merged"
    start, merged = weights(small_model), weights(folder)
    changed = {name for name in start if not start[name].equal(merged[name])}
    assert changed == {name for name in start if "_proj." in name} and len(changed) == 14


@pytest.mark.long
def test_abort_on_ends_a_training_whose_loss_is_not_finite_and_saves_no_checkpoint(small_model, tmp_path):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(small_model)
    model.model.norm.weight.data.fill_(math.nan)
    broken = shutil.copytree(small_model, tmp_path / "model")
    model.save_pretrained(broken)
    pairs, run_dir = written(tmp_path / "pairs.jsonl", PAIRS), tmp_path / "run"
    ended = launch(broken, pairs, run_dir, STEPS="9", SAVE_FREQ="1", ABORT_ON="nan", N_GPUS="2")
    assert ended.returncode != 0 and "AbortedError: ABORT_ON=nan: step 1: train/loss" in ended.stdout, ended.stdout
    outcome = json.loads((run_dir / "outcome.json").read_text())
    assert outcome["outcome"] == "aborted" and outcome["reason"].startswith("ABORT_ON=nan: step 1: train/loss")
    assert [math.isnan(loss) for loss in losses(run_dir)] == [True] and [*Run.read(run_dir).steps] == []


def test_a_warm_up_of_the_rate_as_long_as_the_training_is_refused(tmp_path, monkeypatch):
    """Its steps follow from the pairs, which the first checks do not have."""
    monkeypatch.setenv("ARTIFACTS", str(tmp_path))
    found = SimpleNamespace(train=[None] * 40, said="40 pairs")
    monkeypatch.setattr(train, "pair_set", lambda *_: found)
    monkeypatch.setattr(train, "load_tokenizer", lambda *_: None)
    s = replace(load_settings(VALUES), METHOD="dpo", PAIRS_FILE="pairs.jsonl", DPO_EPOCHS=1, LR_WARMUP=5)
    with pytest.raises(SettingsError, match=r"^LR_WARMUP=5: the rate reaches LR in none of 5 steps; set it lower$"):
        train.train_on_pairs(s, [], 1, "start", Run.read(tmp_path / "run"))
