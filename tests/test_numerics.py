"""What verl computes in a real training, against the same formulas written out here in NumPy.

tests/dump.py, loaded into every process of a real run, records the batches and every call of the policy loss. Several
mini-batches a step make the ratios differ from 1, and a high learning rate drives them out of the clip range.
Before that: each method's advantages and loss by verl's own functions under its composed config, on made numbers.
"""

import json
import os
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from tests.helpers import change_reward, checkout_with, make
from tests.test_verl_config import settings_of
from verl_tasks.machine.hardware import cpu_dtype
from verl_tasks.training import verl_config

TASK = "numerics"
LAMBDA, ALPHA = 0.4, 0.1
CAP = 1.0  # of the tokens' weights: met by about half of them, however close engine and trainer are
SMALL = {
    "TASK": TASK,
    "STACK": "cpu",
    "INIT": "base",
    "TRAIN_SIZE": "16",
    "TEST_SIZE": "2",
    "STEPS": "1",
    "TRAIN_BATCH_SIZE": "8",
    "MINI_BATCH_SIZE": "2",
    "ROLLOUT_N": "4",
    "MICRO_BATCH_SIZE": "4",  # two micro-batches a mini-batch
    "LR": "0.01",
    "MAX_PROMPT_LENGTH": "256",  # a byte is a token
    "MAX_RESPONSE_LENGTH": "128",
    "N": "1",
    "SAVE_FREQ": "1",
    "ARGS": f"algorithm.rollout_correction.rollout_is_threshold={CAP}",
    "VERL_USE_EXTERNAL_MODULES": "tests.dump",
}


@pytest.fixture(scope="module")
def thinking_model(small_model, tmp_path_factory) -> Path:
    """The small model with two tokens more, the tags, and a template that opens ``<think>`` for half of the prompts.

    Larger embeddings make its distributions, and so their entropies, differ from token to token.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("thinking-model")
    tokenizer = AutoTokenizer.from_pretrained(small_model)
    tokenizer.add_tokens(["<think>", "</think>"], special_tokens=True)
    end = "<|im_start|>assistant\n{% endif %}"
    assert end in tokenizer.chat_template
    opened = "{% if messages[-1]['content'] | length % 2 == 0 %}<think>\n{% endif %}{% endif %}"
    tokenizer.chat_template = tokenizer.chat_template.replace(end, end.removesuffix("{% endif %}") + opened)
    tokenizer.save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(small_model)
    torch.manual_seed(0)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    with torch.no_grad():
        model.get_input_embeddings().weight *= 4
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A copy of the checkout with a task whose reward, which counts characters, differs between random responses."""
    checkout = checkout_with(TASK, tmp_path_factory.mktemp("numerics"))
    # Without the <think> of the prompt, which a reward is given too.
    own = "solution_str[len('<think>') if (extra_info or {}).get('think_opened') else 0 :]"
    counted = f"float(sum(c.isascii() and c.isalnum() for c in {own}))"
    counted = f"0.0 if __import__('os').environ['METHOD'] == 'dapo' and int(ground_truth) % 2 else {counted}"
    change_reward(
        checkout / "tasks" / TASK, f"return {{'score': {counted}, 'acc': float(len(solution_str) > 9), 'format': 0.0}}"
    )
    table = checkout / "tasks/common/stages.py"  # without the evaluation, a third of the time
    stages = table.read_text()
    assert '"sft", "train", "eval")' in stages
    table.write_text(stages.replace('"sft", "train", "eval")', '"sft", "train")'))
    return checkout


def train(
    method: str, model: Path, checkout: Path, folder: Path, **changes: str
) -> tuple[list[dict], list[dict], dict]:
    """The recorded batches and policy losses, in order, and verl's metrics of the only step."""
    variables = {"METHOD": method, "MODEL": str(model), "ARTIFACTS": str(folder)}
    with mock.patch.dict(os.environ, DUMP_FOLDER=str(folder / "dump")):
        result = make("train", cwd=checkout, **{**SMALL, **variables, **changes})
    assert result.returncode == 0, result.stdout
    updates, losses = (
        [dict(np.load(file)) for file in sorted((folder / "dump").glob(f"{kind}-*.npz"))] for kind in ("update", "loss")
    )
    (metrics,) = folder.glob(f"runs/{TASK}/{method}-*/metrics/000.jsonl")
    (step,) = (json.loads(line)["data"] for line in metrics.read_text().splitlines())
    assert all(np.isfinite(step[name]) for name in ("actor/pg_loss", "actor/grad_norm", "actor/entropy"))
    assert len(updates) == 1 and len(losses) == (16 if method == "distill" else 8)
    assert updates[0]["rm_scores"].shape[0] == 32
    # In bfloat16 a log-probability of -3 has steps of 0.016, and GSPO clips ratios that differ from 1 by 0.0003.
    assert {str(updates[0][f"{name}_dtype"]) for name in ("old_log_probs", "entropy")} == {"torch.float32"}
    assert {str(call[f"{name}_dtype"]) for call in losses for name in ("log_prob", "loss")} == {"torch.float32"}
    return updates, losses, step


def by_group(update: dict, advantage) -> np.ndarray:
    """``advantage`` of the scores of each group of a prompt, at every token; shape (responses, tokens)."""
    scores = update["rm_scores"].astype(np.float64).sum(1)
    values = np.empty_like(scores)
    for uid in set(update["uid"]):
        group = update["uid"] == uid
        assert group.sum() == 4
        values[group] = advantage(scores[group])
    return values[:, None] * update["response_mask"]


def grpo_advantages(update: dict) -> np.ndarray:
    """(score - mean) / (std + 1e-6) in the group of a prompt, at every token; shape (responses, tokens)."""
    return by_group(update, lambda scores: (scores - scores.mean()) / (scores.std(ddof=1) + 1e-6))


def check_the_batches(update: dict, losses: list[dict], mode: str, aggregation: str) -> None:
    """Every response was trained on once, with the batch's advantages, log-probs and weights, min(ratio, CAP) of the
    trainer's to the engine's probability; counts are of a mini-batch."""
    ratio = np.exp(update["old_log_probs"].astype(np.float64) - update["rollout_log_probs"])
    capped = (ratio > CAP)[update["response_mask"] > 0].mean()
    assert 0 < capped < 1
    weights = np.minimum(ratio, CAP) * update["response_mask"]

    def rows(call: dict, old: str) -> list[tuple]:
        mask = call["response_mask"] > 0
        return sorted((*call["advantages"][i][m], *call[old][i][m]) for i, m in enumerate(mask))

    def by_old(call: dict, old: str, name: str) -> dict:
        return {call[old][i][m].tobytes(): call[name][i][m] for i, m in enumerate(call["response_mask"] > 0)}

    trained = sorted(row for call in losses for row in rows(call, "old_log_prob"))
    assert trained == rows(update, "old_log_probs")
    wanted = by_old(update | {"weights": weights}, "old_log_probs", "weights")
    used = [by_old(call, "old_log_prob", "rollout_is_weights") for call in losses]
    assert all(np.allclose(values, wanted[row], atol=1e-5) for call in used for row, values in call.items())
    for pair in zip(losses[::2], losses[1::2], strict=True):
        tokens = sum(call["response_mask"].sum() for call in pair)
        for call in pair:
            assert (call["loss_mode"], call["loss_agg_mode"]) == (mode, aggregation)
            assert (call["batch_num_tokens"], call["global_batch_size"], call["dp_size"]) == (tokens, 8, 1)


def parts(call: dict) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Advantages, log-ratios and mask of a policy loss, in double precision."""
    log_ratio = call["log_prob"].astype(np.float64) - call["old_log_prob"]
    return call["advantages"].astype(np.float64), log_ratio, call["response_mask"].astype(np.float64)


def clipped_sum(call: dict, low: float = 0.2, high: float = 0.2) -> float:
    """Minus the sum of min(r A, clip(r) A), and of 3 A where that is less than 3 A < 0 (dual clip), times the weight
    of a token."""
    advantages, log_ratio, mask = parts(call)
    ratio = np.exp(log_ratio)
    objective = np.minimum(ratio * advantages, np.clip(ratio, 1 - low, 1 + high) * advantages)
    objective = np.where(advantages < 0, np.maximum(objective, 3 * advantages), objective)
    return -(objective * call["rollout_is_weights"] * mask).sum()


def vanilla_loss(call: dict) -> float:
    """PPO's, token-mean."""
    return clipped_sum(call) / call["batch_num_tokens"]


def gspo_loss(call: dict) -> float:
    """Minus the mean over sequences of min(s A, clip(s) A), s the geometric mean of a sequence's token ratios, times
    the mean of its tokens' weights."""
    advantages, log_ratio, mask = parts(call)
    length = mask.sum(1)
    advantage = (advantages * mask).sum(1) / length
    ratio = np.exp((log_ratio * mask).sum(1) / length)
    objective = np.minimum(ratio * advantage, np.clip(ratio, 1 - 3e-4, 1 + 4e-4) * advantage)
    weight = (call["rollout_is_weights"].astype(np.float64) * mask).sum(1) / length
    return -(objective * weight).sum() / call["global_batch_size"]


def largest(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).max())


def check_losses(losses: list[dict], reference, distinct: int = 5) -> float:
    """The largest difference from ``reference``; at least ``distinct`` losses must differ from one another."""
    difference = max(abs(float(call["loss"]) - reference(call)) for call in losses)
    assert difference < 1e-5
    assert len({round(float(call["loss"]), 4) for call in losses}) >= distinct  # not all of them nothing
    return difference


@pytest.mark.long
def test_grpo(thinking_model, checkout, tmp_path):
    (update,), losses, metrics = train("grpo", thinking_model, checkout, tmp_path)
    reference = grpo_advantages(update)
    assert largest(update["advantages"], reference) < 1e-6 and np.abs(reference).max() > 0.5
    check_the_batches(update, losses, "vanilla", "token-mean")
    print("advantages", largest(update["advantages"], reference), "losses", check_losses(losses, vanilla_loss))
    clips = {(float(c["clip_ratio_low"]), float(c["clip_ratio_high"]), float(c["clip_ratio_c"])) for c in losses}
    assert clips == {(0.2, 0.2, 3.0)}
    ratios = [(np.exp(parts(call)[1])[call["response_mask"] > 0], call) for call in losses]
    assert all(((r > 0.95) & (r < 1.05)).mean() > 0.95 for r, _ in ratios[:2])  # the first mini-batch is on-policy
    assert all(((r < 0.8) | (r > 1.2)).any() for r, _ in ratios[2:])
    assert any((r[call["advantages"][call["response_mask"] > 0] < 0] > 3).any() for r, call in ratios)
    total = sum(float(call["loss"]) for call in losses) / 4  # of four mini-batches
    assert metrics["actor/pg_loss"] == pytest.approx(total, abs=1e-5)


def side_by_side(update: dict, losses: list[dict]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The log-probs of all trained tokens: those that the update used, those of verl's own pass, the engine's."""
    used = [call["old_log_prob"][i][mask] for call in losses for i, mask in enumerate(call["response_mask"] > 0)]
    verls, engines = (
        [row[mask > 0] for row, mask in zip(update[name], update["response_mask"], strict=True)]
        for name in ("old_log_probs", "rollout_log_probs")
    )

    def closest(row: np.ndarray) -> int:
        return min((i for i in range(32) if len(verls[i]) == len(row)), key=lambda i: np.abs(verls[i] - row).max())

    order = [closest(row) for row in used]
    assert sorted(order) == list(range(32))
    rows = (used, [verls[i] for i in order], [engines[i] for i in order])
    return tuple(np.concatenate(each).astype(np.float64) for each in rows)


@pytest.mark.long
def test_grpo_with_one_update_a_step(thinking_model, checkout, tmp_path):
    """No pass for the old log-probs; what verl's own pass finds on the same batch is what the update used, and says."""
    (update,), losses, metrics = train(
        "grpo", thinking_model, checkout, tmp_path, MINI_BATCH_SIZE="8", MAX_RESPONSE_LENGTH="256"
    )
    assert metrics["timing_s/old_log_prob"] < 0.1 and metrics["actor/ppo_kl"] == 0
    assert all((call["old_log_prob"] == call["log_prob"])[call["response_mask"] > 0].all() for call in losses)
    print("losses", check_losses(losses, vanilla_loss))
    assert metrics["actor/pg_loss"] == pytest.approx(sum(float(call["loss"]) for call in losses), abs=1e-5)
    total = sum(float((call["old_log_prob"] * (call["response_mask"] > 0)).sum()) for call in losses)
    assert total == pytest.approx(float((update["old_log_probs"] * update["response_mask"]).sum()), rel=1e-5)
    rounding = cpu_dtype() == "float32"  # nothing else is between engine and trainer
    for name, tolerance in {
        "actor/entropy": 1e-5,
        "rollout_corr/rollout_is_mean": 1e-5,
        "training/rollout_actor_probs_pearson_corr": 1e-4,
    }.items():
        assert metrics[name] == pytest.approx(float(update[name.replace("/", "_")]), rel=tolerance), name
    used, verls, engines = side_by_side(update, losses)
    log_ratio, apart, between = used - engines, np.abs(used - verls), np.abs(np.exp(used) - np.exp(engines))
    # What it must be by the log-probs that the update used, and how far that may be from verl's pass.
    for name, wanted, bound in (
        ("training/rollout_probs_diff_max", between.max(), (np.exp(used) * apart).max()),
        ("training/rollout_probs_diff_mean", between.mean(), (np.exp(used) * apart).mean()),
        ("rollout_corr/k3_kl", (np.expm1(log_ratio) - log_ratio).mean(), (np.abs(np.expm1(log_ratio)) * apart).mean()),
    ):
        assert metrics[name] == pytest.approx(wanted, rel=1e-3, abs=3e-7), name  # computed in float32
        assert abs(metrics[name] - float(update[name.replace("/", "_")])) <= bound * 1.01 + 3e-7, name
        assert not rounding or metrics[name] < 1e-5
    ratio = np.exp(log_ratio)
    at_limit = int((np.abs(ratio - CAP) < 1e-6).sum())  # rounding puts such a token on either side
    other_side = int(((ratio > CAP) != (np.exp(verls - engines) > CAP)).sum())  # by verl's pass
    name = "rollout_corr/rollout_is_ratio_fraction_high"
    for wanted, tokens in (((ratio > CAP).mean(), 0), (float(update[name.replace("/", "_")]), other_side)):
        assert abs(metrics[name] - wanted) < (tokens + at_limit + 0.5) / len(ratio)
    weights = np.minimum(ratio, CAP)
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(weights.mean(), rel=1e-5)
    weighed = sum(float((call["rollout_is_weights"] * (call["response_mask"] > 0)).sum()) for call in losses)
    assert weighed == pytest.approx(weights.sum(), rel=1e-5)


@pytest.mark.long
def test_gspo(thinking_model, checkout, tmp_path):
    (update,), losses, _ = train("gspo", thinking_model, checkout, tmp_path, LR="0.0005")  # ratios on both sides of 1
    reference = grpo_advantages(update)
    assert largest(update["advantages"], reference) < 1e-6
    check_the_batches(update, losses, "gspo", "seq-mean-token-mean")
    print("advantages", largest(update["advantages"], reference), "losses", check_losses(losses, gspo_loss))
    ratio = np.concatenate([np.exp((p[1] * p[2]).sum(1) / p[2].sum(1)) for p in map(parts, losses[2:])])
    assert (ratio < 1 - 3e-4).any() and (ratio > 1 + 4e-4).any()


def reasoning(tokenizer, prompt: list[int], response: list[int]) -> tuple[str, slice]:
    """Which kind of block there is, and its tokens. Each token's own text tells where it begins, with no decoding of
    more than one: in the byte alphabet of this tokenizer a token's text stands whatever comes before and after."""
    before = "".join(tokenizer.convert_ids_to_tokens(prompt))
    tokens = tokenizer.convert_ids_to_tokens(response)
    text, starts = "".join(tokens), np.cumsum([0, *map(len, tokens)])
    at, opener = text.find("<think>"), "prompt"
    if before.endswith("<think>Ċ"):
        repeated = at >= 0 and not tokenizer.decode(response[: int((starts < at).sum())]).strip()
        start = at + len("<think>") if repeated else 0
    elif at >= 0 and not 0 <= text.find("</think>") < at:
        start, opener = at + len("<think>"), "response"
    elif "</think>" in text:
        start, opener = 0, "nothing"
    else:
        return "none", slice(0, None)
    end = text.find("</think>", start)
    kind = opener + (" closed" if end >= 0 else "")
    stop = end if end >= 0 else len(text)
    inside = [i for i, begin in enumerate(starts[:-1]) if start <= begin < stop]
    return kind, slice(inside[0], inside[-1] + 1) if inside else slice(0, 0)


@pytest.mark.slow
def test_egpo(thinking_model, checkout, tmp_path):
    from transformers import AutoTokenizer

    # Entropies up to ln 260 = 5.6 are then both above and below |A| / α.
    own = {"EGPO_LAMBDA": str(LAMBDA), "EGPO_ALPHA": str(ALPHA)}
    (update,), losses, metrics = train("egpo", thinking_model, checkout, tmp_path, **own)
    tokenizer = AutoTokenizer.from_pretrained(thinking_model)
    grpo, mask = grpo_advantages(update), update["response_mask"] > 0
    assert largest(update["grpo"], grpo) < 1e-6
    assert update["lambda_0"].tobytes() == update["grpo"].tobytes()
    assert update["repeated"].tobytes() == update["advantages"].tobytes()

    kinds, entropies = [], []
    for row, (prompt, response) in enumerate(zip(update["prompts"], update["responses"], strict=True)):
        length = update["responses_length"][row]
        prompt, response = prompt[: update["prompts_length"][row]].tolist(), response[:length].tolist()
        kind, span = reasoning(tokenizer, prompt, response)
        values = update["entropy"][row, :length][span].astype(np.float64)
        kinds.append(kind)
        entropies.append(values.mean() if len(values) else 0.0)
    assert {"none", "prompt", "prompt closed"} < set(kinds)  # and of those that the response opens one or both
    # From verl's own rounding of the advantages, which 1 / α would make larger.
    grpo = update["grpo"].astype(np.float64)
    entropy, limit = np.array(entropies)[:, None], np.abs(grpo) / ALPHA
    term = LAMBDA * np.clip(entropy, -limit, limit) * mask
    assert ((entropy < limit) & mask).any() and ((entropy > limit) & mask).any()
    assert largest(update["advantages"], grpo + term) < 1e-6
    closed = ["closed" in kind for kind in kinds]  # there the whole response has another mean
    whole = (update["entropy"] * mask).sum(1) / mask.sum(1)
    assert largest(whole[closed], entropy[closed, 0]) > 0.01

    check_the_batches(update, losses, "vanilla", "token-mean")
    print("advantages", largest(update["advantages"], grpo + term), "losses", check_losses(losses, vanilla_loss))
    assert metrics["egpo/entropy_reasoning"] == pytest.approx(np.mean(entropies), abs=1e-5)
    assert metrics["egpo/term"] == pytest.approx((term.sum(1) / mask.sum(1)).mean(), abs=1e-5)
    assert metrics["egpo/no_reasoning_block"] == pytest.approx(kinds.count("none") / len(kinds))
    (log,) = tmp_path.glob(f"runs/{TASK}/egpo-*/logs/egpo-000.log")
    assert log.read_text().count(f"EGPO: {kinds.count('none')} of 32 responses have no <think> block;") == 1


@pytest.mark.long
def test_dapo(thinking_model, checkout, tmp_path):
    """Groups with an odd answer have no variance (the fixture's reward); long responses lose up to 1."""
    from transformers import AutoTokenizer

    buffer = "reward.reward_kwargs.overlong_buffer_cfg.len=100"  # so that some responses surely end in it
    (update,), losses, metrics = train("dapo", thinking_model, checkout, tmp_path, ARGS=f"{SMALL['ARGS']} {buffer}")
    tokenizer = AutoTokenizer.from_pretrained(thinking_model)
    lengths = update["responses_length"]
    rows = [ids[:length].tolist() for ids, length in zip(update["responses"], lengths, strict=True)]
    texts = tokenizer.batch_decode(rows, skip_special_tokens=True)
    scores = np.array([sum(c.isascii() and c.isalnum() for c in text) for text in texts], dtype=np.float64)
    limit, buffer = 128, 100
    penalty = np.minimum(-(lengths - (limit - buffer)) / buffer, 0)
    assert set(penalty) - {0, -1} and largest(update["rm_scores"].sum(1), scores + penalty) < 1e-5
    assert all(len(set(scores[update["uid"] == uid])) > 1 for uid in set(update["uid"]))
    assert metrics["dapo/dropped"] > 0 and metrics["dapo/bound_hit"] == 0
    assert metrics["dapo/sampled"] == metrics["dapo/dropped"] + metrics["dapo/surplus"] + 8

    reference = grpo_advantages(update)
    assert largest(update["advantages"], reference) < 1e-6
    check_the_batches(update, losses, "vanilla", "token-mean")
    difference = check_losses(losses, lambda call: clipped_sum(call, 0.2, 0.28) / call["batch_num_tokens"])
    print("advantages", largest(update["advantages"], reference), "losses", difference)
    assert abs(clipped_sum(losses[2], 0.2, 0.28) - clipped_sum(losses[2])) > 1e-3  # some ratios are in between


@pytest.mark.long
def test_dr_grpo(thinking_model, checkout, tmp_path):
    (update,), losses, metrics = train("dr_grpo", thinking_model, checkout, tmp_path)
    reference = by_group(update, lambda scores: scores - scores.mean())
    assert largest(update["advantages"], reference) < 1e-5 and np.abs(reference).max() > 2
    check_the_batches(update, losses, "vanilla", "seq-mean-token-sum-norm")
    assert {int(call["loss_scale_factor"]) for call in losses} == {128}
    difference = check_losses(losses, lambda call: clipped_sum(call) / 128 / call["global_batch_size"])
    print("advantages", largest(update["advantages"], reference), "losses", difference)
    mask = update["response_mask"]
    assert metrics["actor/entropy"] == pytest.approx((update["entropy"] * mask).sum() / mask.sum(), rel=1e-4)


@pytest.mark.long
def test_cispo(thinking_model, checkout, tmp_path):
    (update,), losses, _ = train("cispo", thinking_model, checkout, tmp_path, LR="0.03")
    reference = grpo_advantages(update)
    assert largest(update["advantages"], reference) < 1e-6
    check_the_batches(update, losses, "cispo", "token-mean")

    def loss(call: dict) -> float:
        advantages, log_ratio, mask = parts(call)
        weight = np.clip(np.exp(log_ratio), 0, 5)
        objective = weight * advantages * call["log_prob"] * call["rollout_is_weights"]
        return -(objective * mask).sum() / call["batch_num_tokens"]

    print("advantages", largest(update["advantages"], reference), "losses", check_losses(losses, loss))
    assert any((np.exp(parts(call)[1])[call["response_mask"] > 0] > 5).any() for call in losses)


@pytest.mark.long
def test_rloo_with_truncated_responses_masked(thinking_model, checkout, tmp_path):
    longest = 256  # at 128 seven of eight responses are cut off
    changes = {"TRUNCATED": "masked", "MAX_RESPONSE_LENGTH": str(longest)}
    (update,), losses, _ = train("rloo", thinking_model, checkout, tmp_path, **changes)
    last = update["responses"][np.arange(32), update["responses_length"] - 1]
    cut = (update["responses_length"] == longest) & (last != 1)  # the token that ends a response
    assert 4 < cut.sum() < 28, cut.sum()
    mask = np.arange(update["responses"].shape[1]) < update["responses_length"][:, None]
    assert (update["response_mask"] == mask * ~cut[:, None]).all()
    others = by_group(update, lambda scores: scores - (scores.sum() - scores) / 3)  # all count in the mean
    assert largest(update["advantages"], others) < 1e-5 and np.abs(others).max() > 2
    tokens = sum(call["response_mask"].sum() for call in losses)
    assert tokens == mask[~cut].sum()
    # A micro-batch may have no token left.
    print("advantages", largest(update["advantages"], others), "losses", check_losses(losses, vanilla_loss, 3))


@pytest.mark.long
def test_distill(thinking_model, checkout, tmp_path):
    """The teacher is the same model with other weights; the engine computes in bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    teacher = AutoModelForCausalLM.from_pretrained(thinking_model, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    teacher.to(torch.bfloat16).save_pretrained(tmp_path / "teacher")
    AutoTokenizer.from_pretrained(thinking_model).save_pretrained(tmp_path / "teacher")
    (update,), calls, metrics = train(
        "distill", thinking_model, checkout, tmp_path, TEACHER=str(tmp_path / "teacher"), MINI_BATCH_SIZE="2"
    )
    # What the engine says of the teacher, against transformers.
    mask, scored = update["response_mask"] > 0, update["teacher_logprobs"][..., 0]
    difference = []
    for row in range(4):
        prompt, length = int(update["prompts_length"][row]), int(update["responses_length"][row])
        ids = np.concatenate([update["prompts"][row, :prompt], update["responses"][row, :length]])
        with torch.no_grad():
            logits = teacher(torch.tensor(ids[None])).logits[0].float()
        wanted = torch.log_softmax(logits, -1)[:-1].gather(1, torch.tensor(ids[1:, None]))[:, 0].numpy()
        difference.append(np.abs(scored[row, : len(wanted)] - wanted)[prompt - 1 :].mean())
    assert max(difference) < 0.05
    losses = calls[::2]  # the others are of the task's reward, which is not learned
    check_losses(losses, vanilla_loss)
    first = losses[0]["response_mask"] > 0
    assert losses[0]["advantages"][first].std() > 0.1
    # Each token's advantage is that difference, of the weights of this moment.
    taught = {}
    for row in range(32):
        prompt, length = int(update["prompts_length"][row]), int(update["responses_length"][row])
        taught[tuple(np.round(update["old_log_probs"][row, :length], 4))] = scored[
            row, prompt - 1 : prompt - 1 + length
        ]
    for call in losses:
        for row, inside in enumerate(call["response_mask"] > 0):
            reference = taught[tuple(np.round(call["old_log_prob"][row][inside], 4))] - call["log_prob"][row][inside]
            assert largest(call["advantages"][row][inside], reference) < 1e-4
    assert metrics["actor/distillation/loss"] == pytest.approx(
        sum(float(call["loss"]) for call in losses) / 4, abs=1e-4
    )
    assert mask.any()


GROUPS, N, TOKENS, LIMIT = 3, 4, 6, 20


@pytest.fixture(scope="module")
def made() -> dict[str, np.ndarray]:
    """Scores, log-probs before and now, and the mask of 12 responses of 1 to 6 tokens; one has none that counts."""
    rng = np.random.default_rng(0)
    rows = GROUPS * N
    lengths = rng.integers(1, TOKENS + 1, rows)
    mask = np.arange(TOKENS) < lengths[:, None]
    mask[5] = False  # TRUNCATED=masked
    old = -rng.random((rows, TOKENS)) - 3
    return {
        "scores": rng.random(rows),
        "old": old,
        "new": old + rng.normal(0, 1.2, old.shape),
        "mask": mask,
        "uid": np.repeat([f"p{i}" for i in range(GROUPS)], N),
    }


def of_verl(method: str, made: dict) -> tuple[np.ndarray, float]:
    """Advantages and loss as verl computes them under the config of ``method``."""
    from verl import DataProto
    from verl.trainer.ppo import core_algos
    from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories
    from verl.utils.config import omega_conf_to_dataclass

    s = settings_of("countdown", METHOD=method, MAX_RESPONSE_LENGTH=str(LIMIT))
    config = verl_config.compose("ppo_trainer", verl_config.rl_overrides(s, "some/model", Path("/r")))
    mask = torch.tensor(made["mask"], dtype=torch.float64)
    rewards = torch.zeros_like(mask)
    rewards[:, -1] = torch.tensor(made["scores"])  # verl sums over the tokens
    data = DataProto.from_dict(
        {"token_level_rewards": rewards, "response_mask": mask}, non_tensors={"uid": made["uid"].astype(object)}
    )
    found = compute_advantage_for_multi_trajectories(
        data,
        batch_keys=[f"{uid}_{row}_0" for row, uid in enumerate(made["uid"])],
        adv_estimator=config.algorithm.adv_estimator,
        norm_adv_by_std_in_grpo=config.algorithm.norm_adv_by_std_in_grpo,
        config=config.algorithm,
    )
    advantages = found.batch["advantages"]
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    tokens, rows = int(mask.sum()), len(mask)
    actor.global_batch_info.update(
        dp_size=1, batch_num_tokens=tokens, global_batch_size=rows, loss_scale_factor=actor.loss_scale_factor
    )
    loss, _ = core_algos.get_policy_loss_fn(actor.policy_loss.loss_mode)(
        old_log_prob=torch.tensor(made["old"]),
        log_prob=torch.tensor(made["new"]),
        advantages=advantages,
        response_mask=mask,
        loss_agg_mode=actor.loss_agg_mode,
        config=actor,
    )
    return advantages.numpy(), float(loss)


def per_group(made: dict, advantage) -> np.ndarray:
    groups = made["scores"].reshape(GROUPS, N)
    return np.concatenate([advantage(group) for group in groups])[:, None] * made["mask"]


def clipped(made: dict, a: np.ndarray, low: float = 0.2, high: float = 0.2) -> np.ndarray:
    """Minus PPO's objective of each token, with the dual clip."""
    ratio = np.exp(made["new"] - made["old"])
    objective = np.minimum(ratio * a, np.clip(ratio, 1 - low, 1 + high) * a)
    return -np.where(a < 0, np.maximum(objective, 3 * a), objective) * made["mask"]


def normed(scores: np.ndarray) -> np.ndarray:
    return (scores - scores.mean()) / (scores.std(ddof=1) + 1e-6)


def centred(scores: np.ndarray) -> np.ndarray:
    return scores - scores.mean()


def whitened(made: dict) -> np.ndarray:
    """Minus the group's mean, then by mean and standard deviation of the batch's tokens."""
    values, mask = per_group(made, centred), made["mask"]
    return (values - values[mask].mean()) / np.sqrt(values[mask].var(ddof=1) + 1e-8) * mask


def references(method: str, made: dict) -> tuple[np.ndarray, float]:
    """The same by the formulas of the papers."""
    mask, rows = made["mask"], len(made["mask"])
    tokens = mask.sum()
    a = {
        "dr_grpo": lambda: per_group(made, centred),
        "rloo": lambda: per_group(made, lambda r: r - (r.sum() - r) / (N - 1)),
        "reinforce_pp": lambda: whitened(made),
    }.get(method, lambda: per_group(made, normed))()
    if method == "dapo":
        return a, clipped(made, a, 0.2, 0.28).sum() / tokens
    if method == "dr_grpo":
        return a, clipped(made, a).sum() / LIMIT / rows
    if method == "cispo":
        return a, -(np.clip(np.exp(made["new"] - made["old"]), 0, 5) * a * made["new"] * mask).sum() / tokens
    return a, clipped(made, a).sum() / tokens


@pytest.mark.parametrize("method", ["grpo", "dapo", "dr_grpo", "cispo", "rloo", "reinforce_pp"])
def test_advantages_and_loss_are_those_of_the_papers(method, made):
    ratio = np.exp(made["new"] - made["old"])[made["mask"]]
    assert (ratio < 0.8).any() and ((ratio > 1.2) & (ratio < 1.28)).any() and (ratio > 5).any()
    advantages, loss = of_verl(method, made)
    wanted, wanted_loss = references(method, made)
    assert np.abs(advantages - wanted).max() < 1e-5 and np.abs(wanted).max() > 0.1
    assert loss == pytest.approx(wanted_loss, rel=1e-4) and abs(loss) > 1e-3


@pytest.mark.parametrize("method", ["grpo", "dr_grpo", "rloo"])
@pytest.mark.parametrize("n", [7, 8])
def test_equal_rewards_teach_nothing(method, n):
    """Also where the mean of their float32 is another number than each; a group of others keeps its advantages."""
    from verl.trainer.ppo import core_algos

    import verl_tasks.verl_plugins.patches  # noqa: F401

    name = {"dr_grpo": "grpo"}.get(method, method)
    options = {"norm_adv_by_std_in_grpo": False} if method == "dr_grpo" else {}
    estimate = core_algos.get_adv_estimator_fn(name)
    verls_own, rounded = estimate.__wrapped__, 0
    assert core_algos.compute_grpo_outcome_advantage is core_algos.get_adv_estimator_fn("grpo")  # verl calls both
    for reward in torch.arange(1, 10) / 10:
        rewards, mask = torch.zeros(2 * n + 1, 3), torch.ones(2 * n + 1, 3)
        rewards[:n, 1], rewards[n : 2 * n, 2] = reward, torch.arange(n) / 10
        rewards[-1, 0] = 0.3  # a group of one
        prompts = np.array(["equal"] * n + ["other"] * n + ["alone"], dtype=object)
        before, _ = verls_own(rewards, mask, index=prompts, **options)
        after, _ = estimate(rewards, mask, index=prompts, **options)
        assert not after[:n].any() and torch.equal(after[n:], before[n:]) and after[n:].abs().max() > 0.2
        rounded += bool(before[:n].any())
    assert rounded


@pytest.mark.parametrize("n", [1, 7, 8])
def test_whitening_does_not_enlarge_the_rounding_of_equal_rewards(n):
    """REINFORCE++: of groups with one reward each, and of groups of one with the same reward; others keep theirs."""
    from verl.trainer.ppo import core_algos
    from verl.utils import torch_functional

    from verl_tasks.verl_plugins import advantages

    estimate, rounded = core_algos.get_adv_estimator_fn("reinforce_plus_plus_baseline"), 0
    prompts = np.repeat([f"p{i}" for i in range(24 // n)], n).astype(object)
    mask = torch.arange(5) < 1 + torch.arange(len(prompts))[:, None] % 5
    for first in torch.arange(1, 9) / 10:
        rewards = torch.zeros(mask.shape)
        rewards[:, 0] = torch.tensor([first + (0.1 if n > 1 and prompt == "p1" else 0) for prompt in prompts])
        with mock.patch.object(torch_functional, "masked_whiten", advantages._masked_whiten):
            before, _ = getattr(estimate, "__wrapped__", estimate)(rewards, mask, index=prompts)
        assert not estimate(rewards, mask, index=prompts)[0].any()
        rounded += bool(before.any())
        rewards[0, 0] = 0.95
        after, _ = estimate(rewards, mask, index=prompts)
        scores = rewards.double().sum(1)
        means = torch.stack([scores[torch.tensor(prompts == prompt)].mean() for prompt in prompts])
        values = (scores - means * (n > 1))[:, None].expand(mask.shape)
        wanted = (values - values[mask].mean()) / (values[mask].var() + 1e-8).sqrt() * mask
        assert torch.allclose(after.double(), wanted, atol=1e-4) and after.abs().max() > 1
    assert rounded


@pytest.mark.parametrize("normed_by_std", [True, False])
def test_an_episode_keeps_its_advantage_where_its_last_sequence_is_left_out(normed_by_std):
    """A program's sequences have the advantage of their episode; ROLLOUT_CORRECTION=sequence leaves out single ones."""
    from verl import DataProto
    from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

    import verl_tasks.verl_plugins.trainer  # noqa: F401

    keys = ["p_0_0", "p_0_1", "p_1_0", "p_2_0"]
    mask = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 1, 1], [0, 1, 1]])
    rewards = torch.tensor([[0, 1.0, 0], [0, 0, 1.0], [0, 0, 0.5], [0, 0, 0]])
    data = DataProto.from_dict(
        {"token_level_rewards": rewards, "response_mask": mask}, non_tensors={"uid": np.array(["p"] * 4, dtype=object)}
    )
    found = compute_advantage_for_multi_trajectories(data, keys, "grpo", norm_adv_by_std_in_grpo=normed_by_std)
    wanted = torch.tensor([0.5, 0.5, 0, -0.5])[:, None] * mask / (0.5 if normed_by_std else 1)
    assert torch.allclose(found.batch["advantages"], wanted, atol=1e-5)
