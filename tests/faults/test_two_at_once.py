"""Two commands at once: of one task the second is refused in one line, two tasks share ARTIFACTS."""

import time
from pathlib import Path

import pytest

from tests.faults.chain import CHAIN, Watched, half_files, result_of, table_of

pytestmark = pytest.mark.long

SECONDS = 1800
# A byte is a token: the prompts of gsm8k are longer than those of countdown.
GSM8K = {"TASK": "gsm8k", "SOURCE": "generate", "MAX_PROMPT_LENGTH": "1024", "TEST_SIZE": "8"}


def wait_for(run: Watched, text: str) -> None:
    while text not in run.said():
        assert not run.wait(0.2), run.said()


def test_a_second_run_of_a_task_is_refused_in_one_line_and_the_first_goes_on(small_model, tmp_path):
    variables = CHAIN | {"MODEL": str(small_model), "ARTIFACTS": str(tmp_path), "INIT": "base", "STEPS": "1"}
    first = Watched.make("train", **variables)
    try:
        for marker in ("[1/4] data", "[3/4] train", "waits for", "[4/4] eval"):
            wait_for(first, marker)
            started, second = time.monotonic(), Watched.make("train", **variables)
            try:
                assert second.wait(60) and second.process.returncode != 0
                errors = [line for line in second.said().splitlines() if line.startswith("error:")]
                print(f"\n{marker}: refused after {time.monotonic() - started:.1f} s: {errors}")
                running = f"error: TASK=countdown: is already running (process {first.launcher()}); wait for it, or"
                assert errors == [f"{running} give this one other ARTIFACTS"]
                assert first.process.poll() is None
            finally:
                second.close()
        complete(first, tmp_path, "countdown")
    finally:
        first.close()


def test_two_tasks_share_a_folder_of_artifacts(small_model, tmp_path):
    """Their data, their runs and their evaluation of the same model, at once."""
    variables = CHAIN | {"MODEL": str(small_model), "ARTIFACTS": str(tmp_path), "INIT": "base", "STEPS": "1"}
    runs = {task: Watched.make("train", **variables | own) for task, own in (("countdown", {}), ("gsm8k", GSM8K))}
    try:
        while not all([run.wait(0.2) for run in runs.values()]):
            pass
        for task, run in runs.items():
            assert run.process.returncode == 0, run.said()
            complete(run, tmp_path, task)
    finally:
        for run in runs.values():
            run.close()


def complete(run: Watched, artifacts: Path, task: str) -> None:
    assert run.wait(SECONDS) and run.process.returncode == 0, run.said()
    assert run.left_after(10)[0] == [] and half_files(artifacts) == []
    assert "pass@1" in table_of(run.said())
    found = result_of(artifacts, task)
    assert found["left over"] == []
    trained = [value for value in found.values() if "checkpoints" in value]
    assert [(value["steps"], value["checkpoints"]) for value in trained] == [([1], [1])]
