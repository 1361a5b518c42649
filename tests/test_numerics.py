"""What verl computes in a real training, against the same formulas written out here in NumPy.

tests/dump.py, loaded into every process of a real run, records the batches and every call of the policy loss. Several
mini-batches a step make the ratios differ from 1, and a high learning rate drives them out of the clip range.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.helpers import change_reward, checkout_with, make

pytestmark = pytest.mark.slow

TASK = "numerics"
LAMBDA, ALPHA = 0.4, 0.1
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
    "EGPO_LAMBDA": str(LAMBDA),
    "EGPO_ALPHA": str(ALPHA),  # entropies up to ln 260 = 5.6 are then both above and below |A| / α
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
    counted = "float(sum(c.isascii() and c.isalnum() for c in solution_str))"
    change_reward(checkout / "tasks" / TASK, f"return {{'score': {counted}, 'acc': 0.0, 'format': 0.0}}")
    return checkout


def train(
    method: str, model: Path, checkout: Path, folder: Path, **changes: str
) -> tuple[list[dict], list[dict], dict]:
    """The recorded batches and policy losses, in order, and verl's metrics of the only step."""
    variables = {"METHOD": method, "MODEL": str(model), "ARTIFACTS": str(folder), "DUMP_FOLDER": str(folder / "dump")}
    result = make("train", cwd=checkout, **{**SMALL, **variables, **changes})
    assert result.returncode == 0, result.stdout
    updates, losses = (
        [dict(np.load(file)) for file in sorted((folder / "dump").glob(f"{kind}-*.npz"))] for kind in ("update", "loss")
    )
    (metrics,) = folder.glob(f"runs/{TASK}/{method}-*/metrics/000.jsonl")
    (step,) = (json.loads(line)["data"] for line in metrics.read_text().splitlines())
    assert all(np.isfinite(step[name]) for name in ("actor/pg_loss", "actor/grad_norm", "actor/entropy"))
    assert len(updates) == 1 and len(losses) == 8
    assert updates[0]["rm_scores"].shape[0] == 32
    # In bfloat16 a log-probability of -3 has steps of 0.016, and GSPO clips ratios that differ from 1 by 0.0003.
    assert {str(updates[0][f"{name}_dtype"]) for name in ("old_log_probs", "entropy")} == {"torch.float32"}
    assert {str(call[f"{name}_dtype"]) for call in losses for name in ("log_prob", "loss")} == {"torch.float32"}
    return updates, losses, step


def grpo_advantages(update: dict) -> np.ndarray:
    """(score - mean) / (std + 1e-6) in the group of a prompt, at every token; shape (responses, tokens)."""
    scores = update["rm_scores"].astype(np.float64).sum(1)
    values = np.empty_like(scores)
    for uid in set(update["uid"]):
        group = update["uid"] == uid
        assert group.sum() == 4
        values[group] = (scores[group] - scores[group].mean()) / (scores[group].std(ddof=1) + 1e-6)
    return values[:, None] * update["response_mask"]


def check_the_batches(update: dict, losses: list[dict], mode: str, aggregation: str) -> None:
    """Every response was trained on once, with the batch's advantages and log-probs; counts are of a mini-batch."""

    def rows(call: dict, old: str) -> list[tuple]:
        mask = call["response_mask"] > 0
        return sorted((*call["advantages"][i][m], *call[old][i][m]) for i, m in enumerate(mask))

    trained = sorted(row for call in losses for row in rows(call, "old_log_prob"))
    assert trained == rows(update, "old_log_probs")
    for pair in zip(losses[::2], losses[1::2], strict=True):
        tokens = sum(call["response_mask"].sum() for call in pair)
        for call in pair:
            assert (call["loss_mode"], call["loss_agg_mode"]) == (mode, aggregation)
            assert (call["batch_num_tokens"], call["global_batch_size"], call["dp_size"]) == (tokens, 8, 1)


def parts(call: dict) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Advantages, log-ratios and mask of a policy loss, in double precision."""
    log_ratio = call["log_prob"].astype(np.float64) - call["old_log_prob"]
    return call["advantages"].astype(np.float64), log_ratio, call["response_mask"].astype(np.float64)


def vanilla_loss(call: dict) -> float:
    """Minus the mean of min(r A, clip(r) A), and of 3 A where that is less than 3 A < 0 (dual clip); token-mean."""
    advantages, log_ratio, mask = parts(call)
    ratio = np.exp(log_ratio)
    objective = np.minimum(ratio * advantages, np.clip(ratio, 0.8, 1.2) * advantages)
    objective = np.where(advantages < 0, np.maximum(objective, 3 * advantages), objective)
    return -(objective * mask).sum() / call["batch_num_tokens"]


def gspo_loss(call: dict) -> float:
    """Minus the mean over sequences of min(s A, clip(s) A), s the geometric mean of a sequence's token ratios."""
    advantages, log_ratio, mask = parts(call)
    length = mask.sum(1)
    advantage = (advantages * mask).sum(1) / length
    ratio = np.exp((log_ratio * mask).sum(1) / length)
    objective = np.minimum(ratio * advantage, np.clip(ratio, 1 - 3e-4, 1 + 4e-4) * advantage)
    return -objective.sum() / call["global_batch_size"]


def largest(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).max())


def check_losses(losses: list[dict], reference) -> float:
    """The largest difference from ``reference``."""
    difference = max(abs(float(call["loss"]) - reference(call)) for call in losses)
    assert difference < 1e-5
    assert len({round(float(call["loss"]), 4) for call in losses}) > 4  # not all of them nothing
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


@pytest.mark.long
def test_grpo_with_one_update_a_step(thinking_model, checkout, tmp_path):
    """No pass for the old log-probs; what verl's own pass finds on the same batch is what the update used, and says."""
    (update,), losses, metrics = train("grpo", thinking_model, checkout, tmp_path, MINI_BATCH_SIZE="8")
    assert metrics["timing_s/old_log_prob"] < 0.1 and metrics["actor/ppo_kl"] == 0
    assert all((call["old_log_prob"] == call["log_prob"])[call["response_mask"] > 0].all() for call in losses)
    print("losses", check_losses(losses, vanilla_loss))
    assert metrics["actor/pg_loss"] == pytest.approx(sum(float(call["loss"]) for call in losses), abs=1e-5)
    total = sum(float((call["old_log_prob"] * (call["response_mask"] > 0)).sum()) for call in losses)
    assert total == pytest.approx(float((update["old_log_probs"] * update["response_mask"]).sum()), rel=1e-5)
    for name, tolerance in {
        "actor/entropy": 1e-5,
        "training/rollout_probs_diff_max": 1e-3,
        "training/rollout_probs_diff_mean": 0.3,  # of micro-batches of 4, whatever their numbers of tokens
        "training/rollout_actor_probs_pearson_corr": 1e-4,
    }.items():
        assert metrics[name] == pytest.approx(float(update[name.replace("/", "_")]), rel=tolerance), name
    assert "rollout_corr/kl" in metrics


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


def test_egpo(thinking_model, checkout, tmp_path):
    from transformers import AutoTokenizer

    (update,), losses, metrics = train("egpo", thinking_model, checkout, tmp_path)
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
