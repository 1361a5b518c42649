"""`make eval`: models on the same held-out prompts, one greedy and EVAL_N sampled completions each, scored.

A task's evaluate.py calls ``main`` with its own ``compute_score``: the reward that trains is the reward that reports.
"""

import argparse
import gc
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np

from tasks.common.data import read_rows, written_beside
from tasks.common.metrics import Estimate, bootstrap_mean, by_prompt, proportion
from tasks.common.sample import GREEDY, SAMPLED, Completion, sample
from tasks.common.settings import Settings, fingerprint, load_settings

Metrics = Callable[[list[dict]], dict[str, float]]


def score_completions(completions: list[Completion], rows: list[dict], compute_score: Callable) -> list[dict]:
    """Each completion as a dict with the keys of the reward beside it, ground truth included."""
    scored = []
    for completion in completions:
        row = rows[completion.index]
        truth = row["reward_model"]["ground_truth"]
        reward = compute_score(row["data_source"], completion.response, truth, row["extra_info"])
        scored.append({**asdict(completion), "ground_truth": truth, "reward": reward})
    return scored


def sampled_by_prompt(scored: list[dict], key: str) -> np.ndarray:
    """``key`` of the reward, mean over the sampled completions of each prompt; shape (prompts,)."""
    sampled = [row for row in scored if row["mode"] == SAMPLED]
    return by_prompt(np.array([row["reward"][key] for row in sampled]), np.array([row["index"] for row in sampled]))


def summarize(scored: list[dict], own_metrics: Metrics | None = None) -> dict:
    """Metrics of one model over its scored completions.

    ``accuracy``: share of prompts whose greedy response is right, Wilson interval. ``pass@1`` and ``score``: mean over
    prompts of the mean over sampled completions, bootstrap over prompts. ``truncated``: share of sampled completions
    that hit the length limit. ``own``: the task's metrics of the sampled completions.
    """
    greedy = [row for row in scored if row["mode"] == GREEDY]
    sampled = [row for row in scored if row["mode"] == SAMPLED]
    return {
        "prompts": len(greedy),
        "accuracy": asdict(proportion(int(sum(row["reward"]["acc"] for row in greedy)), len(greedy))),
        "pass@1": asdict(bootstrap_mean(sampled_by_prompt(scored, "acc"))),
        "score": asdict(bootstrap_mean(sampled_by_prompt(scored, "score"))),
        "tokens": float(np.mean([row["tokens"] for row in sampled])),
        "truncated": float(np.mean([row["finish_reason"] == "length" for row in sampled])),
        "own": own_metrics(sampled) if own_metrics else {},
    }


def paired_difference(base: list[dict], model: list[dict], key: str) -> Estimate:
    """Mean over prompts of ``key`` of ``model`` less that of ``base``, with the paired bootstrap interval."""
    return bootstrap_mean(sampled_by_prompt(model, key) - sampled_by_prompt(base, key))


def evaluation_fingerprint(settings: Settings, model: str) -> str:
    """Changes when the completions would: model, its weights' time stamps, prompts, sampling."""
    names = ("TEST_SIZE", "EVAL_N", "TEMPERATURE", "MAX_PROMPT_LENGTH", "MAX_RESPONSE_LENGTH", "SEED", "STACK")
    values = {name: getattr(settings, name) for name in names}
    weights = sorted(Path(model).glob("*.safetensors")) if Path(model).is_dir() else []
    values |= {"model": model, "weights": [w.stat().st_mtime_ns for w in weights], "data": settings.data_fingerprint()}
    return fingerprint(values)


def evaluate(settings: Settings, models: dict[str, str], out: Path, compute_score, own_metrics: Metrics | None) -> None:
    """Sample, score and summarize each of ``models`` (label to path), writing ``out/<label>.jsonl`` and ``.json``."""
    rows = list(read_rows(settings.data_dir / "test.parquet"))
    for label, model in models.items():
        mark = evaluation_fingerprint(settings, model)
        completions = sample(
            model,
            [row["prompt"] for row in rows],
            out / f"{label}-{mark}.jsonl",
            n=settings.EVAL_N,
            temperature=settings.TEMPERATURE,
            max_tokens=settings.MAX_RESPONSE_LENGTH,
            max_model_len=settings.MAX_PROMPT_LENGTH + settings.MAX_RESPONSE_LENGTH,
            seed=settings.SEED,
            gpu_memory_utilization=settings.GPU_MEMORY_UTILIZATION,
        )
        gc.collect()  # the engine before the next one starts
        scored = score_completions(completions, rows, compute_score)
        with written_beside(out / f"{label}.jsonl") as partial:
            partial.write_text("".join(json.dumps(row) + "\n" for row in scored))
        with written_beside(out / f"{label}.json") as partial:
            partial.write_text(json.dumps({"model": model, "mark": mark, **summarize(scored, own_metrics)}, indent=2))


def main(compute_score: Callable, own_metrics: Metrics | None = None) -> None:
    """Command line of a task's evaluate.py: ``--out DIR label=model [label=model ...]``."""
    parser = argparse.ArgumentParser(description="Evaluate models on the task's held-out prompts.")
    parser.add_argument("--out", type=Path, required=True, help="folder for completions and summaries")
    parser.add_argument("models", nargs="+", metavar="LABEL=MODEL")
    arguments = parser.parse_args()
    models = dict(pair.split("=", 1) for pair in arguments.models)
    evaluate(load_settings(), models, arguments.out, compute_score, own_metrics)
