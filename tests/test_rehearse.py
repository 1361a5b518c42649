"""make rehearse: the thin models, the variables that are played, a kill, what would break, what a run will need."""

import json
import os
import shutil
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.helpers import ROOT, checkout_with, error_line, make, our_processes
from tests.test_profiles import CONFIGS, PROFILES, hardware_of
from verl_tasks.data.pairs import read_pairs
from verl_tasks.data.prepare import load_tokenizer
from verl_tasks.launch import doctor, memory_checks, needs, rehearse, stand_ins
from verl_tasks.launch.finding import Finding
from verl_tasks.models import thin
from verl_tasks.models.chat_template import demonstration_ids
from verl_tasks.rewards.judge import Judge
from verl_tasks.rows import DataError, read_rows, rl_row, rl_schema, sft_row, sft_schema, write_parquet
from verl_tasks.settings import GPU_MIB, Command, SettingsError, load_settings, values_of

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
KINDS = {"qwen3": CONFIGS["Qwen/Qwen3-4B"], "qwen2": CONFIGS["Qwen/Qwen2.5-7B-Instruct"], "llama": LLAMA}


def folder_of(config: dict, tokenizer: Path, folder: Path, **changes) -> Path:
    """What a hub id has beside its weights: config.json of a model's own form, and a tokenizer."""
    folder.mkdir(parents=True)
    for file in tokenizer.glob("*"):
        if file.suffix != ".safetensors" and file.name != "config.json":
            shutil.copy(file, folder)
    own = {"max_position_embeddings": 32768, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    (folder / "config.json").write_text(json.dumps(config | own | changes))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1]}))
    return folder


# ---- the thin model


@pytest.mark.parametrize("kind", KINDS)
def test_a_thin_model_is_of_the_same_kind_and_follows_its_seed(kind, small_model, tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    source = folder_of(KINDS[kind] | {"vocab_size": 8000}, small_model, tmp_path / "real")
    count = thin.write(source, tmp_path / "thin", seed=1)
    real, config = AutoConfig.from_pretrained(source), AutoConfig.from_pretrained(tmp_path / "thin")
    assert (config.model_type, config.vocab_size, config.num_hidden_layers) == (kind, real.vocab_size, 2)
    assert config.tie_word_embeddings == real.tie_word_embeddings
    assert config.num_key_value_heads < config.num_attention_heads  # heads share keys, as in the real one
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "thin")
    assert type(model).__name__ == f"{kind.capitalize()}ForCausalLM"
    assert count == sum(p.numel() for p in model.parameters()) < 2e6
    assert model.model.layers[0].self_attn.head_dim == 32  # vLLM on a CPU takes no smaller ones
    there = AutoTokenizer.from_pretrained(tmp_path / "thin")
    assert there.chat_template == AutoTokenizer.from_pretrained(source).chat_template
    assert json.loads((tmp_path / "thin/generation_config.json").read_text())["eos_token_id"] in (1, [1])
    for name, seed in (("again", 1), ("other", 2)):
        thin.write(source, tmp_path / name, seed)
    one, again, other = ((tmp_path / n / "model.safetensors").read_bytes() for n in ("thin", "again", "other"))
    assert one == again != other


def test_what_cannot_be_thinned_is_refused_in_one_line(tmp_path):
    with pytest.raises(SettingsError, match="no such folder, and not a hub id"):
        thin.config_folder(str(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(SettingsError, match=r"has no config\.json"):
        thin.config_folder(str(tmp_path / "empty"))
    (tmp_path / "empty/config.json").write_text('{"model_type": "nobody"}')
    with pytest.raises(SettingsError, match=r"has no tokenizer \(tokenizer\.json\)"):
        thin.config_folder(str(tmp_path / "empty"))
    with pytest.raises(SettingsError) as refused:
        thin.write(tmp_path / "empty", tmp_path / "thin", 1)
    assert "\n" not in str(refused.value) and not (tmp_path / "thin").exists()


# ---- the rows that it learns, the pairs, the judge


def chances(folder: Path, demonstrations: list[tuple[list[int], list[int]]]) -> list[float]:
    """The probability of each demonstration under the model of ``folder``, as an engine would sample it."""
    import torch
    from transformers import AutoModelForCausalLM

    model, found = AutoModelForCausalLM.from_pretrained(folder), []
    for ids, mask in demonstrations:
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, :-1].float().log_softmax(-1)
        own = logits.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        found.append(float((own * torch.tensor(mask[1:])).sum().exp()))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_thin_model_learns_demonstrations_until_it_samples_them_about_as_often_as_not(kind, small_model, tmp_path):
    source = folder_of(KINDS[kind] | {"vocab_size": 8000}, small_model, tmp_path / "real")
    thin.write(source, tmp_path / "thin", seed=1)
    prompts, answers = [f"{n}, {n + 3}, {n * 7 % 10}" for n in range(11, 19)], [f"{n * n} - {n}" for n in range(8)]
    chats = [
        [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    tokenizer = load_tokenizer(str(source), weights=False)
    demonstrations = [demonstration_ids(tokenizer, chat, 1) for chat in chats]
    assert max(chances(tmp_path / "thin", demonstrations)) < 1e-6
    told = thin.teach(tmp_path / "thin", demonstrations, seed=1)
    found = chances(tmp_path / "thin", demonstrations)
    assert sum(found) / len(found) == pytest.approx(told, abs=0.1) and 0.5 < told < 0.95
    assert json.loads((tmp_path / "thin/config.json").read_text())["dtype"] == "bfloat16"


def test_rows_are_learned_whose_demonstration_no_limit_cuts(small_model, tmp_path):
    def chat(text: str) -> list[dict]:
        return [{"role": "user", "content": text}]

    texts = ["short", "long", "twice", "twice", "last"]
    rl = [rl_row("countdown", chat(text), "2", "train", number) for number, text in enumerate(texts)]
    answers = {"short": "ab", "long": "y" * 60, "twice": "ab", "last": "cd", "elsewhere": "ab"}
    write_parquet(rl, tmp_path / "train.parquet", rl_schema())
    sft = [sft_row(chat(text), answer) for text, answer in answers.items()]
    write_parquet(sft, tmp_path / "sft.parquet", sft_schema())
    s = load_settings({"TASK": "countdown", "STACK": "cpu", "MAX_RESPONSE_LENGTH": "48"})
    shutil.copytree(small_model, tmp_path / "thin")
    files = tmp_path / "train.parquet", tmp_path / "sft.parquet", tmp_path / "thin", tmp_path / "known.parquet"
    assert stand_ins.taught(s, *files, range(3, 5)) == (0, 0.0) and not files[-1].exists()
    assert stand_ins.taught(s, *files, range(2, 5)) == (2, pytest.approx(0.75, abs=0.25))
    assert [row["prompt"][0]["content"] for row in read_rows(files[-1])] == ["short", "last"]
    assert stand_ins.taught(s, *files, range(1, 2))[0] == 1


def test_an_episode_is_learned_where_its_turns_and_results_fit(small_model, tmp_path, monkeypatch):
    prompt = [{"role": "user", "content": "?"}]
    episode = [
        {"role": "assistant", "content": "a" * 20},
        {"role": "user", "content": "b" * 30},
        {"role": "assistant", "content": "c"},
    ]
    write_parquet([rl_row("calculator", prompt, "2", "train", 0)], tmp_path / "train.parquet", rl_schema())
    write_parquet([sft_row(prompt, episode)], tmp_path / "sft.parquet", sft_schema(episodes=True))
    shutil.copytree(small_model, tmp_path / "thin")
    files = tmp_path / "train.parquet", tmp_path / "sft.parquet", tmp_path / "thin", tmp_path / "known.parquet"
    monkeypatch.setattr(thin, "teach", lambda *_: 0.6)
    lengths = {"MAX_RESPONSE_LENGTH": "192", "MAX_TURN_LENGTH": "21"}
    for changes, count in (({}, 1), ({"MAX_TURN_LENGTH": "20"}, 0), ({"MAX_RESPONSE_LENGTH": "50"}, 0)):
        s = load_settings({"TASK": "calculator", "STACK": "cpu"} | lengths | changes)
        assert stand_ins.taught(s, *files, range(1, 9))[0] == count, changes
    (whole,), _ = doctor.measured(load_tokenizer(str(small_model)), tmp_path / "sft.parquet")
    assert whole > 20 + 30 + 1  # of an episode all turns and results count


@pytest.mark.parametrize("method", ["dpo", "grpo"])
def test_a_thin_model_that_learned_nothing_is_named_and_ends_a_run_of_its_own_pairs(
    method, small_model, tmp_path, monkeypatch
):
    data = tmp_path / "data/countdown"
    data.mkdir(parents=True)
    prompts = [[{"role": "user", "content": str(number)}] for number in range(8)]
    rows = [rl_row("countdown", prompt, "2", "train", number) for number, prompt in enumerate(prompts)]
    write_parquet(rows, data / "train.parquet", rl_schema())
    write_parquet([sft_row(prompt, "ab") for prompt in prompts], data / "sft.parquet", sft_schema())
    shutil.copytree(small_model, tmp_path / "model")
    s, _ = real(None, "current", METHOD=method)
    given = {"TASK": "countdown", "STACK": "cpu", "METHOD": method, "MODEL": str(tmp_path / "model")}
    r = rehearse.Rehearsal(s, tmp_path, given, "")
    monkeypatch.setattr(thin, "MOST_STEPS", 1)
    played = rehearse.teach(r)
    assert "did not learn its 8 demonstrations" in played.problem + played.said
    assert ("give PAIRS_FILE" in played.problem) == (method == "dpo")


def test_of_a_file_of_pairs_the_first_are_played(tmp_path):
    lines = [{"prompt": f"{n}?", "chosen": "yes", "rejected": "no" if n else "yes"} for n in range(40)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert stand_ins.first_pairs(str(tmp_path / "pairs.jsonl"), tmp_path / "out.parquet", 16) == 16
    found = [pair for _, pair in read_pairs(tmp_path / "out.parquet")]
    assert [pair.messages()[0]["content"] for pair in found] == [f"{n}?" for n in range(1, 17)]  # the first is a tie
    (tmp_path / "bad.jsonl").write_text('{"prompt": "?"}')
    with pytest.raises(DataError, match=r"bad\.jsonl"):
        stand_ins.first_pairs(str(tmp_path / "bad.jsonl"), tmp_path / "out.parquet", 16)


def test_the_played_judge_answers_as_a_real_one_is_asked_and_one_that_does_not_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv("ARTIFACTS", str(tmp_path))
    with stand_ins.judge() as url:
        for name, value in {"JUDGE_URL": url, "JUDGE_MODEL": "played"}.items():
            monkeypatch.setenv(name, value)
        judge = Judge.from_environment()
        scores = [judge.score("Say a number.", str(number))["score"] for number in range(12)]
        assert len(set(scores)) > 2 and all(0 <= score <= 0.9 for score in scores)
        assert str(needs.judge()) == "judge: JUDGE_MODEL=played graded one answer"
    assert json.loads((tmp_path / "judge/counters.json").read_text())["played"]["calls"] == 13
    found = needs.judge()
    assert found.state == "error" and "ConnectError" in found.text


# ---- what is played


def real(profile: Path | None, stack: str, **more: str):
    """The environment, the settings and their texts of a real run, as `make rehearse` reads them."""
    given = {"TASK": "countdown", "REHEARSED": stack, "PATH": os.environ["PATH"]} | more
    if profile:
        given |= {"TASK": profile.parents[1].name, "PROFILE": profile.stem}
    environment = rehearse.real_environment(given)
    texts = {name: value.text for name, value in values_of(environment).items()}
    return load_settings(environment), texts


@pytest.mark.parametrize(
    ("profile", "stack"),
    [*((path, "current") for path in PROFILES), (PROFILES[0], "a100")],
    ids=lambda each: getattr(each, "stem", each),
)
def test_what_is_played_differs_from_the_real_run_only_in_what_is_made_smaller(profile, stack, tmp_path):
    s, texts = real(profile, stack)
    given = rehearse.given_variables(s, texts, tmp_path / "model", tmp_path)
    assert given.pop("ARTIFACTS") == str(tmp_path)
    played = load_settings(given | {"GIVEN": " ".join(given)})  # as make tells what its command line has
    changed = {name for name, value in vars(played).items() if value != getattr(s, name)}
    assert changed <= {*rehearse.smaller(s), *rehearse.NOT_PLAYED, "MODEL", "STACK"}
    assert (played.STACK, played.N_GPUS, played.STEPS) == ("cpu", 1, 2)
    memory_checks.plan(replace(played, MODEL=s.MODEL), [])  # verl composes what is played, and takes its batch sizes
    same = ("METHOD", "LORA_RANK", "LR", "MAX_PROMPT_LENGTH", "REWARD", "ROLLOUT_CORRECTION", "INIT", "SOURCE")
    assert [getattr(played, name) for name in same] == [getattr(s, name) for name in same]


@pytest.mark.parametrize("method", ["ppo", "gspo", "egpo", "dpo", "dapo", "distill"])
def test_every_method_has_settings_that_can_be_played(method, tmp_path):
    of_method = {"distill": {"TEACHER": "some/teacher"}, "dpo": {"DPO_BETA": "0.2"}}
    own = of_method.get(method, {"KL_COEF": "0.01"})
    s, texts = real(None, "current", METHOD=method, INIT="sft", TP="2", N_GPUS="2", LR_WARMUP="2", **own)
    given = rehearse.given_variables(s, texts, tmp_path / "model", tmp_path)
    assert given.pop("ARTIFACTS") == str(tmp_path)
    played = load_settings(given | {"GIVEN": " ".join(given)})
    same = own | {"METHOD": method} | ({"TEACHER": str(tmp_path / "teacher")} if method == "distill" else {})
    assert {name: str(getattr(played, name)) for name in same} == same and played.TP == 1
    assert (method != "ppo") == played.LR_WARMUP  # of ppo's two steps one is the critic's
    several = s.MINI_BATCH_SIZE < s.TRAIN_BATCH_SIZE
    assert (played.MINI_BATCH_SIZE < played.TRAIN_BATCH_SIZE) == several  # as many updates a step: one, or several
    assert rehearse.not_played(s).startswith("N_GPUS=2, TP=2")


def rehearsal(tmp_path, script: str, monkeypatch, model: Path = Path("none")) -> rehearse.Rehearsal:
    """A rehearsal whose targets are the program ``script`` of Python, which is told its folder."""
    s, _ = real(None, "current", INIT="sft")
    given = {"TASK": "countdown", "STACK": "cpu", "MODEL": str(model), "ARTIFACTS": str(tmp_path)}
    r = rehearse.Rehearsal(s, tmp_path, given, "")
    file = tmp_path / "played.py"
    file.write_text(script)
    command = lambda self, goal: [sys.executable, str(file), goal, str(tmp_path)]  # noqa: E731
    monkeypatch.setattr(rehearse.Rehearsal, "command", command)
    return r


KILLED = """
import pathlib, subprocess, sys, time
goal, folder = sys.argv[1], pathlib.Path(sys.argv[2])
saved = folder / "runs/countdown/grpo-1/checkpoints/latest_checkpointed_iteration.txt"
if goal == "data":
    (folder / "data/countdown").mkdir(parents=True)
    (folder / "data/countdown/manifest.json").write_text('{"rows": {"train": 4}, "source": "generate"}')
elif goal == "train" and not saved.exists():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)", str(folder)])
    saved.parent.mkdir(parents=True)
    saved.write_text("1")
    time.sleep(300)
elif goal == "train":
    print("[5/5] train\\n  resuming from step 1\\n  2 steps (1 s)\\n[5/5] eval\\n  base (0 s)")
elif goal == "certify":
    print("tokens: ok\\n=> certified\\n")
elif goal == "merge":
    print("error: no space left", file=sys.stderr)
    sys.exit(2)
"""


@pytest.mark.medium
def test_a_training_is_killed_after_its_checkpoint_and_resumed_and_a_broken_stage_is_named(
    small_model, tmp_path, monkeypatch
):
    r = rehearsal(tmp_path, KILLED, monkeypatch, small_model)
    played = {each.name: each for each in rehearse.stages(r)}
    assert list(played) == ["data", "teach", "certify", "sft", "train", "resume", "merge"]
    assert "random weights" in played["teach"].said  # there are no demonstrations
    assert played["certify"].said == "=> certified"
    assert "SIGKILL" in played["train"].said and played["train"].seconds < 60
    assert str(tmp_path) not in our_processes()
    assert played["merge"].problem == "error: no space left"
    assert Path(played["merge"].log).read_text().startswith("$ ")
    assert [name for name, each in played.items() if each.problem] == ["merge"]


@pytest.mark.medium
def test_a_training_that_ends_before_a_checkpoint_or_begins_anew_broke(small_model, tmp_path, monkeypatch):
    ended = KILLED.replace("    saved.write_text", "    sys.exit('error: LR is wrong')\n    saved.write_text")
    *_, train = rehearse.stages(rehearsal(tmp_path, ended.replace("child = ", "pass #"), monkeypatch, small_model))
    assert (train.name, train.problem) == ("train", "error: LR is wrong")
    shutil.rmtree(tmp_path / "data")
    shutil.rmtree(tmp_path / "runs")
    anew = KILLED.replace("resuming from step 1", "from the start")
    anew = anew.replace('    print("tokens: ok', "    sys.exit('error: not certified')\n    print(\"tokens: ok")
    played = {each.name: each for each in rehearse.stages(rehearsal(tmp_path, anew, monkeypatch, small_model))}
    assert played["certify"].problem == "error: not certified"  # no other stage needs it
    assert played["resume"].problem == "it began anew, not from the checkpoint"


def test_a_stage_without_an_error_line_broke_by_the_last_line_that_is_not_makes(tmp_path, monkeypatch):
    r = rehearsal(tmp_path, "print('it is gone'); print('make: *** [data] Error 1'); raise SystemExit(3)", monkeypatch)
    assert rehearse.play(r, "data").problem == "exit code 3: it is gone"


def test_an_interrupt_ends_what_is_being_played(tmp_path, monkeypatch):
    waits = "import time, sys; time.sleep(300)"
    r = rehearsal(tmp_path, waits, monkeypatch)

    def interrupt() -> bool:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)
        return False

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # `make test &` ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            rehearse.play(r, "train", "train", interrupt)
    finally:
        signal.signal(signal.SIGINT, before)
    assert f"played.py train {tmp_path}" not in our_processes()


# ---- what would break, and what the run will need


def data_of(folder: Path, prompt: str = "What is 1 + 1?", answer: str = "2", tools=None, count: int = 8) -> Path:
    """Data files as `make data` makes them."""
    folder.mkdir(parents=True)
    messages = [{"role": "user", "content": prompt}]
    rl = [rl_row("countdown", messages, "2", "train", number, tools) for number in range(count)]
    write_parquet(rl, folder / "train.parquet", rl_schema(tools=bool(tools)))
    write_parquet([sft_row(messages, answer)] * count, folder / "sft.parquet", sft_schema())
    (folder / "manifest.json").write_text(json.dumps({"rows": {"train": count, "sft": count}, "source": "generate"}))
    return folder


def found(tmp_path, small_model, changes=None, settings=None, command=None, **data) -> dict[str, Finding]:
    """What would break a run of countdown with a Qwen3-4B on eight GPUs, by what it is about."""
    source = folder_of(KINDS["qwen3"], small_model, tmp_path / "real", **(changes or {}))
    s, _ = real(None, "current", **{"N_GPUS": "8", "TRAIN_BATCH_SIZE": "8"} | (settings or {}))
    s, command = replace(s, MODEL=str(source)), load_settings({"DISK": "1000"} | (command or {}), cls=Command)
    files = data_of(tmp_path / "data", **data)
    every = needs.before(s, s, [], needs.target_of(s, command), command) + needs.of_data(s, files)
    return {each.what: each for each in every}


def test_a_run_that_is_right_has_nothing_that_would_break(tmp_path, small_model):
    states = {what: each.state for what, each in found(tmp_path, small_model).items()}
    names = ["stop token", "settings", "memory", "numbers", "disk", "rows", "prompts", "demonstrations"]
    assert states == dict.fromkeys(names, "ok")


def test_a_stop_token_that_the_template_never_writes_is_an_error(tmp_path, small_model):
    source = folder_of(KINDS["qwen3"], small_model, tmp_path / "real", eos_token_id=5)
    (source / "generation_config.json").write_text('{"eos_token_id": 5}')
    settings = json.loads((source / "tokenizer_config.json").read_text())
    (source / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "!"}))
    tokenizer = load_tokenizer(str(source), weights=False)
    (finding,) = needs.tokens(replace(real(None, "current")[0], MODEL=str(source)), tokenizer)
    assert finding.state == "error" and "ends a turn with <|im_end|>, generation stops at " in finding.text


def test_a_vocabulary_smaller_than_the_tokenizer_is_an_error(tmp_path, small_model):
    assert found(tmp_path, small_model, {"vocab_size": 100})["vocabulary"].state == "error"


@pytest.mark.parametrize(("added", "said"), [("<image>", []), ("<end>", ["vocabulary"])])
@pytest.mark.parametrize("nested", [False, True])  # in a config of text and pictures
def test_an_added_token_needs_a_row_where_a_turn_ends_with_it(added, said, nested, tmp_path, small_model):
    tokenizer, rows = load_tokenizer(str(small_model)), 258
    tokenizer.add_special_tokens({"additional_special_tokens": [added]})
    assert len(tokenizer) == rows + 1
    if said:
        tokenizer.chat_template = tokenizer.chat_template.replace("<|im_end|>", added)
        tokenizer.eos_token = added
    tokenizer.save_pretrained(tmp_path)
    text = {"vocab_size": rows}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text} if nested else text))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": tokenizer.eos_token_id}))
    states = needs.tokens(replace(real(None, "current")[0], MODEL=str(tmp_path)), tokenizer)
    assert [each.what for each in states if each.state == "error"] == said


def test_long_prompts_and_demonstrations_are_counted_under_the_real_limits(tmp_path, small_model):
    lengths = {"MAX_PROMPT_LENGTH": "64", "MAX_RESPONSE_LENGTH": "32"}
    states = found(tmp_path, small_model, settings=lengths, prompt="x" * 100, answer="y" * 40)
    assert states["prompts"].state == "error"
    assert "8 are longer than MAX_PROMPT_LENGTH, too many" in states["prompts"].text
    assert states["demonstrations"].state == "warning"
    cut = "8 are longer than MAX_RESPONSE_LENGTH where RL cuts a response; raise MAX_RESPONSE_LENGTH=32 to 41"
    assert cut in str(states["demonstrations"])


def test_a_template_without_tools_is_named_where_rows_have_tools(tmp_path, small_model):
    tool = {"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}
    states = found(tmp_path, small_model, settings={"MAX_PROMPT_LENGTH": "1024"}, tools=[tool])
    assert states["tools"].state == "warning" and "knows no tools" in states["tools"].text


def test_too_few_rows_a_full_disk_and_a_small_gpu_are_errors(tmp_path, small_model):
    large = {"TRAIN_BATCH_SIZE": "64", "GPU_MEMORY_UTILIZATION": "0.9", "INIT": "base"}
    states = found(tmp_path, small_model, settings=large, command={"DISK": "100", "GPU": "a100-40g"}, count=4)
    assert states["rows"].state == "error" and "TRAIN_BATCH_SIZE=64" in states["rows"].text
    assert states["disk"].state == "error" and states["disk"].text == "checkpoints need about 193 GB, DISK=100"
    assert states["memory"].state == "error" and "GPU_MEMORY_UTILIZATION" in states["memory"].fix


def before_of(
    profile: str, folder: Path, tokenizer: Path, arguments: tuple[str, ...] = (), **given: str
) -> list[Finding]:
    """What shows of a profile's run before anything is played, with its models by their config.json."""
    path = next((path for path in PROFILES if path.stem == profile), None)
    s, _ = real(path, "a100" if path else "current", **given)
    s = replace(s, MODEL=str(folder_of(CONFIGS[s.MODEL], tokenizer, folder / "model")))
    if s.TEACHER:
        s = replace(s, TEACHER=str(folder_of(CONFIGS[s.TEACHER], tokenizer, folder / "teacher")))
        thin.write(Path(s.TEACHER), folder / "thin/teacher", 1)
    command = load_settings({"PROFILE": profile if path else "", "DISK": "10000"}, cls=Command)
    target = needs.target_of(s, command)
    return needs.before(s, rehearse.composed(s, folder / "thin"), list(arguments), target, command)


@pytest.mark.parametrize("profile", ["qwen3-4b-8xa100", "qwen2.5-7b-lora-4xa10", "qwen2.5-32b-8xh200"])
def test_of_a_profile_the_memory_is_estimated_for_the_gpu_in_its_name(profile, small_model, tmp_path):
    found = {each.what: each for each in before_of(profile, tmp_path, small_model)}
    assert {each.state for each in found.values()} == {"ok"}, found
    s, _ = real(None, "current")
    kind = hardware_of(Path(f"{profile}.sh"))[1]
    target = needs.target_of(s, load_settings({"PROFILE": profile}, cls=Command))
    assert target.gpu.name == kind and target.gpu.total == GPU_MIB[kind] * 2**20
    assert "assumed for STACK=current" in str(needs.target_of(s, load_settings({}, cls=Command)))


def test_heads_a_warm_up_and_a_teachers_window_that_do_not_fit_are_errors(small_model, tmp_path):
    def problem(profile: str, **given) -> str:
        found = before_of(profile, tmp_path / profile, small_model, **given)
        (said,) = [str(each) for each in found if each.state == "error"]
        return said

    said = problem("qwen2.5-3b-lora-1xa10", INIT="sft", MAX_RESPONSE_LENGTH="4096")
    assert said.startswith("memory: SFT: update: about 25.5 GB of 23.6 GB on each GPU")
    tp = ("actor_rollout_ref.rollout.tensor_model_parallel_size=3",)
    batches = {"N_GPUS": "6", "TRAIN_BATCH_SIZE": "12", "SFT_BATCH_SIZE": "60"}
    said = problem("qwen3-4b-8xa100", arguments=tp, **batches)
    assert said.startswith("heads: TP=3: MODEL has 32 heads and 8 of keys")
    own = {"MODEL": "Qwen/Qwen2.5-3B-Instruct", "METHOD": "distill", "N_GPUS": "4", "INIT": "base"}
    own |= {"TEACHER": "Qwen/Qwen2.5-7B-Instruct", "MAX_PROMPT_LENGTH": "512", "MAX_RESPONSE_LENGTH": "32256"}
    said = problem("", **own, MAX_TOKENS_PER_GPU="40000")
    assert "its window of 32768 tokens is less than the " in said


def test_what_the_config_does_not_say_is_not_called_ok(small_model, tmp_path):
    (tmp_path / "model").mkdir()
    s, _ = real(None, "current", MODEL=str(tmp_path / "model"), GPU="h100", INIT="base")
    command = load_settings({"GPU": "h100"}, cls=Command)
    for config, wanted in (
        ({"model_type": "another"}, {("warning", "memory"), ("warning", "disk")}),
        (KINDS["qwen3"] | {"max_position_embeddings": 128}, {("error", "lengths")}),
    ):
        folder_of(config, small_model, tmp_path / config["model_type"], **config)
        (tmp_path / "model/config.json").write_text(json.dumps(config))
        found = needs.before(
            replace(s, MODEL=str(tmp_path / config["model_type"])), s, [], needs.target_of(s, command), command
        )
        assert wanted <= {(each.state, each.what) for each in found}, found


# ---- the command


@pytest.mark.medium
def test_make_refuses_in_one_line_before_anything_is_made(tmp_path):
    for given, said in (
        ({"MODEL": str(tmp_path / "nowhere")}, "no such folder, and not a hub id"),
        ({"GPU": "abacus"}, "GPU=abacus: must be one of a100, "),
    ):
        result = make("rehearse", TASK="countdown", ARTIFACTS=str(tmp_path / "artifacts"), **given)
        assert said in error_line(result)
    assert not (tmp_path / "artifacts").exists()


@pytest.mark.medium
def test_what_shows_before_anything_is_played_ends_it_at_once(small_model, tmp_path):
    source = folder_of(KINDS["qwen3"] | {"num_hidden_layers": 400}, small_model, tmp_path / "Large")
    given = {"MODEL": str(source), "TEACHER": str(source), "METHOD": "distill", "INIT": "base", "N_GPUS": "4"}
    given |= {"GPU": "h100", "DISK": "100"}
    result = make("rehearse", TASK="countdown", ARTIFACTS=str(tmp_path / "artifacts"), **given)
    assert result.returncode != 0 and "nothing was played; 4 errors" in result.stdout, result.stdout
    assert "error    memory: update: about " in result.stdout and "error    disk: checkpoints need " in result.stdout
    assert "error    memory: TEACHER=" in result.stdout and "a thin TEACHER of " in result.stdout
    assert not (tmp_path / "artifacts/rehearse/countdown/data").exists()


def test_what_a_training_would_refuse_at_its_start_is_an_error(small_model, tmp_path):
    def problem(**given: str) -> str:
        s, _ = real(None, "current", N_GPUS="4", **given)
        s = replace(s, MODEL=str(small_model), TEACHER=s.TEACHER and str(small_model))
        command = load_settings({}, cls=Command)
        found = needs.before(s, s, [], needs.target_of(s, command), command)
        return "".join(each.text for each in found if each.state == "error")

    assert problem() == problem(METHOD="distill", TEACHER="a/b") == ""
    assert "TEACHER is empty" in problem(METHOD="distill")
    assert "no such file" in problem(METHOD="dpo", PAIRS_FILE=str(tmp_path / "pairs.jsonl"))
    assert "ROLLOUT_N=1" in problem(METHOD="dapo", ROLLOUT_N="1")


def rehearsed(small_model, tmp_path, cwd: Path = ROOT, **given: str) -> str:
    """What a rehearsal says that ends well: of a model by its config.json, with the small tokenizer."""
    source = folder_of(KINDS["qwen3"] | {"vocab_size": 512}, small_model, tmp_path / "real")
    gpus = {} if "PROFILE" in given else {"N_GPUS": "4", "GPU": "h200"}
    given = {"MODEL": str(source), "DISK": "1000", "MAX_PROMPT_LENGTH": "1024"} | gpus | given
    result = make("rehearse", cwd=cwd, ARTIFACTS=str(tmp_path / "artifacts"), **given)
    assert result.returncode == 0 and "0 broke; 0 errors" in result.stdout, result.stdout
    beside = {path.name for path in (tmp_path / "artifacts").iterdir()} - {"rehearse"}
    assert beside <= {"judge", "parity"}  # the one call of the real judge; the passes of the real stack
    return result.stdout


def stages_of(said: str) -> list[str]:
    return [line.split()[0] for line in said.splitlines() if line[2:].rstrip() and " s  " in line[:20]]


def last_metrics(folder: Path, method: str) -> dict:
    """Of the last step of the one training under the artifacts of a rehearsal."""
    (run,) = folder.glob(f"runs/*/{method}-*")
    *_, last = [line for file in sorted(run.glob("metrics/*.jsonl")) for line in file.read_text().splitlines()]
    return json.loads(last)["data"]


@pytest.mark.long
def test_dpo_is_rehearsed(small_model, tmp_path):
    said = rehearsed(small_model, tmp_path, TASK="countdown", METHOD="dpo", PROFILE="qwen3-4b-8xa100")
    assert stages_of(said) == ["data", "teach", "train", "resume", "merge", "report"], said
    assert "dpo/rewards/accuracies" in last_metrics(tmp_path / "artifacts/rehearse/countdown", "dpo")


@pytest.mark.long
def test_episodes_are_rehearsed_and_dapo(small_model, tmp_path):
    said = rehearsed(small_model, tmp_path, TASK="calculator", METHOD="dapo", TRUNCATED="counted")
    assert "learned 8 demonstrations" in said
    assert "dapo/sampled" in last_metrics(tmp_path / "artifacts/rehearse/calculator", "dapo")


@pytest.mark.long
def test_a_judge_a_warm_up_and_ppo_are_rehearsed(small_model, tmp_path, monkeypatch):
    checkout = checkout_with("judged", tmp_path, OPTIONS="reward=judge")
    with stand_ins.judge() as url:  # in the place of the real one
        monkeypatch.setenv("JUDGE_URL", url)
        monkeypatch.setenv("JUDGE_MODEL", "real")
        sizes = {"TRAIN_BATCH_SIZE": "4", "MINI_BATCH_SIZE": "4", "SFT_BATCH_SIZE": "4", "TEST_SIZE": "2"}
        said = rehearsed(small_model, tmp_path, cwd=checkout, TASK="judged", INIT="sft", METHOD="ppo", **sizes)
    assert stages_of(said) == ["data", "teach", "certify", "sft", "train", "resume", "merge", "report"], said
    assert "JUDGE_MODEL=real graded one answer" in said and "=> certified" in said
    counted = json.loads((tmp_path / "artifacts/rehearse/judged/judge/counters.json").read_text())
    assert set(counted) == {"played"} and counted["played"]["calls"] > 16
    assert "critic/vf_loss" in last_metrics(tmp_path / "artifacts/rehearse/judged", "ppo")
    (report,) = (tmp_path / "artifacts/rehearse/judged/reports").glob("judged/*/report.html")
    assert report.stat().st_size > 10_000
