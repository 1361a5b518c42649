"""An evaluation/main.py whose engine answers from a table; run by test_evaluate.py as the whole command line.

The model is a folder with table.json: for each prompt (in the order of the rows) ``{"greedy": answer, "sampled":
[answer, ...]}``; an answer is ``[text, finish_reason, tokens, entropy]``, and null for a prompt that is too long.
"""

import json
import os
from pathlib import Path

from tasks.common.evaluation import engines, main
from tasks.common.evaluation.rollouts import TOO_LONG, Completion
from tasks.common.rewards.answers import reward_function


class TableEngine:
    def __init__(self, model, *how, tensor_parallel=1):
        self.folder = Path(model)
        self.table = json.loads((self.folder / "table.json").read_text())

    def generate(self, requests, sampling):
        with (self.folder / "asked.jsonl").open("a") as asked:
            for request in sorted(requests, key=lambda r: -r.index):  # not in order, as an engine answers
                entry = self.table[request.index]
                asked.write(json.dumps([request.index, request.mode]) + "\n")
                if entry is None:
                    yield request, [Completion("", TOO_LONG, 0, 0.0)]
                    continue
                answers = [entry["greedy"]] if request.mode == "greedy" else entry["sampled"][: sampling.n]
                yield request, [Completion(*answer) for answer in answers]
                if (self.folder / "die").exists():
                    raise RuntimeError("the engine died")

    def load(self, model):
        self.__init__(model)
        return True

    def close(self):
        pass


engines.ENGINES["vllm"] = TableEngine


@reward_function
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """1 for the ground truth, 0.5 for any number; raises on "raise"."""
    if solution_str.startswith("raise"):
        raise ValueError(f"cannot score this: {solution_str}")
    right = solution_str == ground_truth
    odd = {"accuracy": 0.25, "tokens": -3, "index": 9, "mode": 1} if os.environ.get("ODD_KEYS") else {}
    return {
        **odd,
        "score": 1.0 if right else 0.5 if solution_str.isdigit() else 0.0,
        "acc": right,
        "format": solution_str.isdigit(),
    }


def metrics(scored):
    if any(row["response"] == "break the metrics" for row in scored):
        raise KeyError("broken")
    return {"different": len({row["response"] for row in scored}) / len(scored)}


if __name__ == "__main__":
    main.main(compute_score, metrics)
