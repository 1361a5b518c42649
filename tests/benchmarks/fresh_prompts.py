"""Pass@1 by step of a training, of the prompts that no step before had: what a policy can do on what it never saw.

    PYTHONPATH=. python tests/benchmarks/fresh_prompts.py RUN_DIR [--without sft.parquet] [--out FILE.json]

A step's rollouts are sampled before it trains on them; with more training prompts than all steps take, each has prompts
of its own. RUN_DIR is a folder of artifacts/runs/<task>, with rollouts/<step>.jsonl; a response of score 1 is right.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pandas as pd

from tasks.common.evaluation.statistics import bootstrap_mean

LAST = 4  # steps taken together at the end


def demonstrated(parquet: Path) -> set[str]:
    """The users' messages of a file of demonstrations."""
    chats = pd.read_parquet(parquet)["messages"]
    return {message["content"] for chat in chats for message in chat if message["role"] == "user"}


def by_step(folder: Path, known: set[str] = frozenset()) -> list[tuple[int, dict[str, list[float]]]]:
    """Of each step its number, and prompt → 1.0 or 0.0 of each response; less prompts of earlier steps, and those with
    a line of ``known``."""
    seen, steps = set(), []
    for file in sorted(folder.glob("*.jsonl"), key=lambda file: int(file.stem)):
        right = {}
        for row in map(json.loads, file.read_text().splitlines()):
            if row["input"] not in seen and known.isdisjoint(row["input"].splitlines()):
                right.setdefault(row["input"], []).append(float(row["score"] == 1))
        seen |= right.keys()
        steps.append((int(file.stem), right))
    return steps


def figures(steps: list[dict[str, list[float]]]) -> dict:
    """Number of prompts and responses, and pass@1 (an Estimate) with its interval over prompts."""
    prompts = [right for step in steps for right in step.values()]
    pass_1 = bootstrap_mean(np.array([np.mean(right) for right in prompts]))
    return {"prompts": len(prompts), "responses": sum(map(len, prompts)), "pass@1": pass_1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, metavar="RUN_DIR")
    parser.add_argument("--without", type=Path, help="demonstrations whose prompts are left out")
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    arguments = parser.parse_args()
    steps = by_step(arguments.run / "rollouts", demonstrated(arguments.without) if arguments.without else frozenset())
    result = {str(number): figures([right]) for number, right in steps}
    last = steps[-LAST:]
    result[f"{last[0][0]} to {last[-1][0]}"] = figures([right for _, right in last])
    for name, found in result.items():
        print(f"{name}: {found['prompts']} prompts, {found['pass@1']}")
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1, default=asdict) + "\n")


if __name__ == "__main__":
    main()
