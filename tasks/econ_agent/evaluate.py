"""econ_agent's evaluation: the shared one, and whether the policy has collapsed. Beside it: simulate.py."""

import functools

import numpy as np

from tasks.econ_agent.reward import INVALID, compute_score
from verl_tasks import answers, evaluate, json_answer


def metrics(scored: list[dict]) -> dict[str, float]:
    """Of the sampled completions. ``json``: share with exactly one JSON object, other text around it or not (``format``
    of the reward: share with a decision). ``minus_one``: share with a score of -1. The rest over completions with a
    decision, 0 without any: mean and standard deviation, over all prompts, of work and consumption. A policy that has
    collapsed to one decision has a deviation near 0; that of the targets stands in README.md."""
    decided = [row["reward"] for row in scored if row["reward"]["format"]]
    values = {
        "json": np.mean(
            [_is_json(answers.with_opened_thinking(row["response"], row.get("extra_info"))) for row in scored]
        ),
        "minus_one": np.mean([row["reward"]["score"] <= INVALID for row in scored]),
    }
    for name in ("work", "consumption"):
        decisions = [reward[name] for reward in decided] or [0.0]
        values |= {f"{name}_mean": np.mean(decisions), f"{name}_std": np.std(decisions)}
    return {name: float(value) for name, value in values.items()}


@functools.lru_cache(maxsize=1 << 16)
def _is_json(response: str) -> bool:
    return json_answer.read_object(response, strict=False) is not None


if __name__ == "__main__":
    evaluate(compute_score, metrics)
