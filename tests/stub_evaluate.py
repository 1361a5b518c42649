"""The evaluation's commands with an engine that answers from a table: in this process, or as a program.

The model is a folder with table.json: for each prompt (in the order of the rows) ``{"greedy": answer, "sampled":
[answer, ...]}``, and null for a prompt that is too long. An answer is ``[text, finish_reason, tokens, entropy]``; of an
episode it is the texts of its turns, where one that ends in "..." is cut off. The folder then has a tokenizer.
asked.jsonl gets a line for each request; of turns for each batch.
"""

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

from tasks.calculator.environment import Environment as Calculator
from verl_tasks import process
from verl_tasks.evaluation import engines, episodes, main, sample, sampler
from verl_tasks.evaluation.rollouts import TOO_LONG, Completion
from verl_tasks.models.chat_template import answer_ids
from verl_tasks.rewards.answers import reward_function
from verl_tasks.rewards.environment import Step


class TableEngine:
    def __init__(self, model, *how):
        self.folder = Path(model)
        self.table = json.loads((self.folder / "table.json").read_text())
        if (self.folder / "tokenizer.json").exists() or (self.folder / "tokenizer_config.json").exists():
            from transformers import AutoTokenizer

            self.tokenizer = AutoTokenizer.from_pretrained(model)

    def generate(self, requests, sampling, more=list):
        turns = isinstance(requests[0], engines.TurnRequest)
        if turns:
            self._asked([[r.index, r.mode, r.sample, r.turn] for r in requests])
        if (self.folder / "die").exists() and turns and any(request.turn for request in requests):
            raise RuntimeError("the engine died")
        for request in sorted(requests, key=lambda r: -r.index):  # not in order, as an engine answers
            yield request, self._turn(request) if turns else self._responses(request, sampling.n)
            if (self.folder / "die").exists() and not turns:
                raise RuntimeError("the engine died")

    def _asked(self, what: list) -> None:
        with (self.folder / "asked.jsonl").open("a") as asked:
            asked.write(json.dumps(what) + "\n")

    def _responses(self, request, n: int) -> list[Completion]:
        self._asked([request.index, request.mode])
        if (entry := self.table[request.index]) is None:
            return [Completion("", TOO_LONG, 0, 0.0)]
        answers = [entry["greedy"]] if request.mode == "greedy" else entry["sampled"][:n]
        return [Completion(*answer) for answer in answers]

    def _turn(self, request) -> list[Completion]:
        entry = self.table[request.index]
        texts = entry["greedy"] if request.mode == "greedy" else entry["sampled"][request.sample]
        text, cut = texts[request.turn].removesuffix("..."), texts[request.turn].endswith("...")
        ids = answer_ids(self.tokenizer, text, ended=not cut)
        return [Completion(text, "length" if cut else "stop", len(ids), 0.5, False, tuple(ids))]

    def load(self, model):
        self.__init__(model)
        return True

    def close(self):
        pass


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


class Environment(Calculator):
    def step(self, action):
        if action.text == "raise":
            raise ZeroDivisionError("the environment broke")
        if action.text == "fail":
            return Step(done=True, readable=False, broke="it failed")
        return super().step(action)


def here(command: list[str], *, log: Path, **_) -> None:
    """In place of process.run: what samples, in this process."""
    print(f"  log: {log}")
    with log.open("w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        sampler.main(command[-1])


def beside(command: list[str], **how) -> None:
    """In place of process.run: what samples, in a process of its own that has the engine."""
    code = "import sys; from tests import stub_evaluate; stub_evaluate.complete(sys.argv[1])"
    process.run([sys.executable, "-c", code, command[-1]], **how)


def complete(file: str) -> None:
    with mock.patch.object(engines, "VLLMEngine", TableEngine):
        sampler.main(file)


@contextlib.contextmanager
def answering(run: Callable = here, engine: type = TableEngine) -> Iterator[None]:
    """Within the block evaluations have this file's reward or environment and ``engine``; ``run``: what samples."""
    of, names = sample.Scoring.of, {None: "compute_score", Environment: "Environment"}
    ours = classmethod(lambda cls, *given: replace(of(*given), source=f"tests.stub_evaluate:{names[given[3]]}"))
    with (
        mock.patch.object(engines, "VLLMEngine", engine),
        mock.patch.object(sample, "run", run),
        mock.patch.object(sample.Scoring, "of", ours),
        mock.patch.object(episodes, "GRACE", 10),  # the batches are the turns, also on a busy machine
    ):
        yield


def called(program: Callable[[], None], arguments: tuple[str, ...], environment: dict[str, str]):
    """``program`` in this process as if it had been started with these ``arguments`` and this ``environment``."""
    said, code = io.StringIO(), 0
    with (
        mock.patch.dict(os.environ, environment, clear=True),
        mock.patch.object(sys, "argv", ["evaluate.py", *arguments]),
        contextlib.redirect_stdout(said),
        contextlib.redirect_stderr(said),
    ):
        try:
            program()
        except SystemExit as ended:
            code = 1 if isinstance(ended.code, str) else ended.code
            print(ended.code if isinstance(ended.code, str) else "")
    return subprocess.CompletedProcess(arguments, code, said.getvalue())


def asked(model: Path) -> list[list]:
    """What the engine of ``model`` was asked, in order."""
    return [json.loads(line) for line in (model / "asked.jsonl").read_text().splitlines()]


class Workplace:
    """A folder with artifacts, and models with a table each."""

    def __init__(self, folder: Path):
        self.folder, self.artifacts = folder, folder / "artifacts"

    def model(self, name: str, table: list) -> Path:
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        (folder / "table.json").write_text(json.dumps(table))
        return folder

    def only(self, pattern: str) -> Path:
        (path,) = self.artifacts.glob(pattern)
        return path


def evaluate() -> None:
    """As a single-turn task's evaluate.py."""
    main.evaluate(compute_score, metrics)


def evaluate_episodes() -> None:
    """As a multi-turn task's evaluate.py."""
    main.evaluate(environment=Environment)


if __name__ == "__main__":
    with answering(beside):
        evaluate()
