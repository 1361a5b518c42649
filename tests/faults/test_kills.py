"""SIGKILL at random moments of a real chain: nothing is left after ten seconds, and the same command completes it.

Two commands at once: of one task the second is refused in one line, two tasks share ARTIFACTS.
"""

import random
import re
import shutil
import time
from pathlib import Path

import pytest

from tests.faults.chain import CHAIN, Watched, half_files, result_of, table_of

pytestmark = pytest.mark.long

SEED = 23
MOMENTS = [("data", "launcher"), ("model", "group"), ("sft", "launcher"), ("train", "group"), ("train", "launcher")]
MOMENTS += [("eval", "group")]
CLEAN_SECONDS = 10
LIMIT_SECONDS = 1800  # of one launch


def seconds_of_stages(said: str) -> dict[str, float]:
    """How long each stage took, by the lines that they print at their end."""
    found, stage = {}, ""
    for line in said.splitlines():
        if begins := re.match(r"\[\d/\d\] (\w+)$", line):
            stage = begins[1]
        elif ends := re.match(r"  .*\((\d+) s\)$", line):
            found[stage] = float(ends[1])
    return found


def finished(variables: dict[str, str]) -> tuple[str, float]:
    """`make train` to its end: what it said, and its seconds."""
    started, run = time.monotonic(), Watched.make("train", **variables)
    try:
        assert run.wait(LIMIT_SECONDS) and run.process.returncode == 0, run.said()
        assert run.left_after(CLEAN_SECONDS)[0] == []
        return run.said(), time.monotonic() - started
    finally:
        run.close()


def test_a_killed_chain_leaves_nothing_and_its_resume_completes_it(small_model, tmp_path):
    """A moment in each stage, for the launcher alone or for its whole process group; in the training one for each. Each
    resume is killed in its turn; where one ends before its moment, it is complete, and the next chain begins."""
    variables = CHAIN | {"MODEL": str(small_model), "ARTIFACTS": str(tmp_path / "undisturbed")}
    said, seconds = finished(variables)
    wanted, table, lasts = result_of(tmp_path / "undisturbed"), table_of(said), seconds_of_stages(said)
    rng, artifacts = random.Random(SEED), tmp_path / "killed"
    print(f"\nseed {SEED}, undisturbed {seconds:.0f} s: {lasts}")
    variables["ARTIFACTS"] = str(artifacts)
    for number, (stage, whose) in enumerate(MOMENTS, 1):
        moment = rng.random() * max(1, lasts[stage])
        while ended_before(run := Watched.make("train", **variables), stage, moment):
            said, code = run.said(), run.process.returncode
            run.close()
            assert code == 0, said
            assert (result_of(artifacts), table_of(said)) == (wanted, table)
            shutil.rmtree(artifacts)
        try:
            run.look()
            assert run.open_to_others() == []
            run.kill(of_group=whose == "group")
            left, after = run.left_after(CLEAN_SECONDS)
            print(
                f"kill {number}: {whose}, {moment:.1f} s after the start of {stage}; clean after {after:.1f} s {left}"
            )
            assert left == []
            assert half_files(artifacts) == []
        finally:
            run.close()
    said, _ = finished(variables)
    assert (result_of(artifacts), table_of(said)) == (wanted, table)


def ended_before(run: Watched, stage: str, seconds: float) -> bool:
    """Wait for ``seconds`` after the start of ``stage``; whether the command ended before."""
    while f"] {stage}\n" not in run.said():
        if run.wait(0.2):
            return True
    return run.wait(seconds)


# ---- two commands at once --------------------------------------------------------------------------------------------

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
    assert run.wait(LIMIT_SECONDS) and run.process.returncode == 0, run.said()
    assert run.left_after(10)[0] == [] and half_files(artifacts) == []
    assert "pass@1" in table_of(run.said())
    found = result_of(artifacts, task)
    assert found["left over"] == []
    trained = [value for value in found.values() if "checkpoints" in value]
    assert [(value["steps"], value["checkpoints"]) for value in trained] == [([1], [1])]
