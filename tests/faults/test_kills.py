"""SIGKILL at random moments of a real chain: nothing is left after ten seconds, and the same command completes it."""

import random
import re
import shutil
import time

import pytest

from tests.faults.chain import CHAIN, Watched, half_files, result_of, table_of

pytestmark = pytest.mark.long

SEED = 23
MOMENTS = 10
CLEAN_SECONDS = 10
LIMIT_SECONDS = 1800  # of one launch


@pytest.fixture(scope="module")
def undisturbed(small_model, tmp_path_factory) -> tuple[dict, list[str], float]:
    """The result of a chain that nothing disturbs, its closing table, and its seconds."""
    artifacts = tmp_path_factory.mktemp("undisturbed")
    run, seconds = finished(CHAIN | {"MODEL": str(small_model), "ARTIFACTS": str(artifacts)})
    return result_of(artifacts), table_of(run), seconds


def finished(variables: dict[str, str]) -> tuple[str, float]:
    """`make train` to its end: what it said, and its seconds."""
    started, run = time.monotonic(), Watched.make("train", **variables)
    try:
        assert run.wait(LIMIT_SECONDS) and run.process.returncode == 0, run.said()
        assert run.left_after(CLEAN_SECONDS)[0] == []
        return run.said(), time.monotonic() - started
    finally:
        run.close()


def test_a_killed_chain_leaves_nothing_and_its_resume_completes_it(undisturbed, small_model, tmp_path):
    """One moment in each tenth of the chain, in turn for the launcher alone and for its whole group. A resume is killed
    in its turn; one that ends before its moment is checked, and the next chain begins."""
    wanted, table, seconds = undisturbed
    rng = random.Random(SEED)
    moments = [seconds * (tenth + rng.random()) / MOMENTS for tenth in range(MOMENTS)]
    rng.shuffle(moments)
    print(f"\nseed {SEED}, the undisturbed chain takes {seconds:.0f} s")
    artifacts = tmp_path / "artifacts"
    variables = CHAIN | {"MODEL": str(small_model), "ARTIFACTS": str(artifacts)}
    for number, moment in enumerate(moments, 1):
        while (run := Watched.make("train", **variables)).wait(moment):
            said, code = run.said(), run.process.returncode
            run.close()
            print(f"ended before {moment:.1f} s with exit code {code}")
            assert code == 0, said
            assert (result_of(artifacts), table_of(said)) == (wanted, table)
            shutil.rmtree(artifacts)
        try:
            whose = ("launcher", "group")[number % 2]
            stage = (re.findall(r"^\[\d/\d\] \w+", run.said(), re.M) or ["before the first stage"])[-1]
            run.look()
            run.kill(of_group=whose == "group")
            left, after = run.left_after(CLEAN_SECONDS)
            print(
                f"kill {number} of {MOMENTS}: {whose} after {moment:.1f} s, {stage}; clean after {after:.1f} s {left}"
            )
            assert left == []
            assert half_files(artifacts) == []
        finally:
            run.close()
    said, _ = finished(variables)
    assert (result_of(artifacts), table_of(said)) == (wanted, table)
