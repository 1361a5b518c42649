"""SIGKILL at random moments of a real chain: nothing is left after ten seconds, and the same command completes it."""

import random
import re
import shutil
import time

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
