"""A disk that fills: each write point in turn gets "no space left", on a small tmpfs in place of ARTIFACTS.

Each time: one line that says so, an exit code other than 0, nothing half-written under a final name, what was there
before stays; with space again the same command finishes.
"""

import functools
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from tests.adapters import saved as saved_adapter
from tests.faults.chain import CHAIN, STEPS, Watched, half_files, partial_files, result_of, table_of, texts
from tests.helpers import ROOT, exported, outside_make
from tests.test_evaluate import GREEDY, RIGHT, TRUTH, table
from tests.test_records import make_run
from tests.test_settings import VALUES
from verl_tasks.models.merge import has_weights
from verl_tasks.rows import chat, rl_row, rl_schema, write_parquet
from verl_tasks.runs.run import Run
from verl_tasks.settings import load_settings

pytestmark = pytest.mark.long

PAGE = 4096  # bytes; tmpfs gives whole pages
KIB, MIB = 2**10, 2**20
ENOUGH = 64 * MIB
SECONDS = 400
NAMES = ("train", "dev", "test", "sft")
# What a failed attempt may change: it is appended to, says how the attempt went, what it asks for, or how long it took.
CHANGES = (".lock", ".log", "metrics/000.jsonl", "metrics/001.jsonl", "rollouts.jsonl")
CHANGES += ("sampling.json", ".minutes.json")


class Disk:
    """A tmpfs at ``path`` with as much free space as ``leave`` says."""

    def __init__(self, path: Path):
        self.path, self.artifacts = path, path / "artifacts"
        path.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={PAGE}", "verl-task-faults", path]
        mounted = subprocess.run(command, capture_output=True, text=True)
        if mounted.returncode:
            pytest.skip(f"a tmpfs cannot be mounted here: {mounted.stderr.strip()}")
        (path / "ballast").write_bytes(b"0" * PAGE)  # size=0 would be no limit

    def leave(self, free: int) -> None:
        """Let ``free`` bytes be free, a multiple of PAGE.

        A size below what is used is refused, and a running command may write after it was read: then read again.
        """
        for _ in range(20):
            found = os.statvfs(self.path)
            used = (found.f_blocks - found.f_bfree) * found.f_frsize
            resized = subprocess.run(["mount", "-o", f"remount,size={used + free}", self.path], capture_output=True)
            if resized.returncode == 0:
                return
        raise AssertionError(resized.stderr.decode())

    def close(self) -> None:
        subprocess.run(["umount", "-l", self.path], check=True)


@pytest.fixture(scope="module")
def disk(tmp_path_factory):
    found = Disk(tmp_path_factory.mktemp("disk") / "full")
    yield found
    found.close()


@pytest.fixture(scope="module")
def variables(disk, small_model) -> dict[str, str]:
    return CHAIN | {"MODEL": str(small_model), "ARTIFACTS": str(disk.artifacts)}


def lasting(artifacts: Path) -> dict[str, str]:
    """Digests of the files that a failed attempt must leave as they were."""
    found = {name: digest for name, digest in texts(artifacts).items() if not name.endswith(CHANGES)}
    return {name: digest for name, digest in found.items() if "partial" not in name and "/checkpoints/" not in name}


def saved(artifacts: Path) -> dict[str, int]:
    """The last whole checkpoint of each run. Half of one may be written again, an old one removed."""
    return {str(run): Run.read(run).last for run in artifacts.glob("runs/*/*") if run.is_dir()}


def attempt(disk: Disk, room: int, start: Callable[[], Watched], after: str = "") -> str:
    """Run a command with ``room`` bytes free, once it has said ``after``: what it said if it ended well, else empty.

    Where it did not, it must have said so in one line, and have left everything as it was.
    """
    before, steps = lasting(disk.artifacts), saved(disk.artifacts)
    disk.leave(ENOUGH if after else room)
    run = start()
    try:
        if after:
            while after not in run.said() and not run.wait(0.2):
                pass
            disk.leave(room)
        assert run.wait(SECONDS), run.said()
        said, code = run.said(), run.process.returncode
        errors = [line for line in said.splitlines() if line.startswith("error:")]
        print(f"\n{room // KIB} KiB free {after}: exit code {code} {errors}", flush=True)
        assert run.left_after(10)[0] == [] and half_files(disk.artifacts) == []
        if code == 0:
            return said
        left = lasting(disk.artifacts)
        assert len(errors) == 1 and re.search("no space left|free some", errors[0], re.IGNORECASE), said
        assert "Traceback" not in "\n".join(line for line in said.splitlines() if not line.startswith("  | "))
        assert {name: left.get(name) for name in before} == before
        assert all(step <= saved(disk.artifacts)[name] for name, step in steps.items())
        return ""
    finally:
        run.close()


def until_it_fits(disk: Disk, rooms: Iterable[int], start: Callable[[], Watched]) -> tuple[str, int]:
    """Try with each free space of ``rooms`` until the command ends well: what it said, and how often it did not."""
    for number, room in enumerate(rooms):
        if said := attempt(disk, room, start):
            return said, number
    raise AssertionError(f"does not fit in {room} bytes")


# ---- data


def test_data_fits_page_by_page(disk, variables):
    """First where there is none, then in place of the data that is there."""
    for size in ("16", "20"):
        start = functools.partial(Watched.make, "data", **variables | {"TRAIN_SIZE": size})
        said, failed = until_it_fits(disk, itertools.count(0, PAGE), start)
        assert failed > 3 and f"8 test, 4 dev, {size} train, 8 sft" in said
        assert {file.stem for file in disk.artifacts.glob("data/countdown/*")} == {*NAMES, "manifest"}


# ---- a training

# `make train` refuses a disk that is too small for its checkpoints, so it fills while a stage runs.
FILLS = [
    ("[3/5] sft", [0, 128 * KIB, MIB]),  # the record; the log; the first checkpoint
    ("[4/5] train", [0, 128 * KIB, MIB]),
    ("[5/5] eval", [0, 32 * KIB]),
]


def test_a_chain_whose_disk_fills_goes_on_when_there_is_space(disk, variables):
    """The trainers' writes: records, logs, metrics, samples, checkpoints, evaluation."""
    shutil.rmtree(disk.artifacts, ignore_errors=True)  # data of other settings would be made anew
    start = functools.partial(Watched.make, "train", **variables)
    failed = [after for after, rooms in FILLS for room in rooms if not attempt(disk, room, start, after)]
    assert set(failed) == {after for after, _ in FILLS}
    assert "pass@1" in table_of(attempt(disk, ENOUGH, start))
    found = result_of(disk.artifacts)
    assert found["left over"] == []
    (run,) = (value for name, value in found.items() if name.startswith("grpo-") and "checkpoints" in value)
    assert run["checkpoints"][-1] == int(STEPS)
    assert run["steps"] == list(range(1, int(STEPS) + 1))


# ---- what comes after it, page by page, with an engine that answers from a table

ROOMS = [0, *(PAGE * 2**power for power in range(13))]


@pytest.fixture
def answering(disk, tmp_path):
    """``start(*arguments, **variables)`` of the evaluation's command line, with two models and their test prompts."""
    shutil.rmtree(disk.artifacts, ignore_errors=True)
    disk.leave(ENOUGH)
    for name in ("test", "train"):
        rows = [rl_row("countdown", chat(f"{name} {i}"), TRUTH, name, i) for i in range(len(RIGHT))]
        write_parquet(rows, disk.artifacts / f"data/countdown/{name}.parquet", rl_schema())
    for name, right in (("before", [0] * len(RIGHT)), ("after", RIGHT)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "table.json").write_text(json.dumps(table(right, 16, GREEDY)))
        (tmp_path / name / "config.json").write_text('{"model_type": "llama", "max_position_embeddings": 4096}')
    (tmp_path / "in.jsonl").write_text(json.dumps({"prompt": "Say 7.", "ground_truth": TRUTH}) + "\n")

    def start(*arguments: str) -> Callable[[], Watched]:
        output = {"INPUT": str(tmp_path / "in.jsonl"), "OUTPUT": str(disk.artifacts / "out.xlsx")}
        given = {"ARTIFACTS": str(disk.artifacts), "N": "16", "DEV_SIZE": "0", **output}
        environment = exported(ROOT / "tasks/countdown/train.sh", given) | {"PYTHONPATH": str(ROOT)}
        words = [word.replace("@", f"{tmp_path}/") for word in arguments]
        return lambda: Watched([sys.executable, str(ROOT / "tests/stub_evaluate.py"), *words], environment)

    return start


@pytest.mark.parametrize(
    ("arguments", "files"),
    [
        (["eval", "base=@before", "new=@after"], ["eval/countdown/*/summary.json"] * 2),
        (
            ["compare", "@before", "@after"],
            [f"compare/countdown/*/compare.{kind}" for kind in ("json", "md", "png", "xlsx")],
        ),
        (["probe", "@after"], ["probe/countdown/*/probe.json"]),
        (["batch", "@after"], ["out.xlsx"]),
    ],
    ids=lambda value: value[0],
)
def test_an_evaluation_is_whole_or_not_there(arguments, files, answering, disk):
    _, failed = until_it_fits(disk, ROOMS, answering(*arguments))
    assert failed > 1
    assert all(list(disk.artifacts.glob(pattern)) for pattern in files)
    assert not partial_files(disk.artifacts)


def test_a_report_is_whole_or_as_before(disk, monkeypatch):
    shutil.rmtree(disk.artifacts, ignore_errors=True)
    monkeypatch.setenv("ARTIFACTS", str(disk.artifacts))
    settings = load_settings(VALUES | {"INIT": "base", "MODEL": "/models/start"})
    where = {"TASK": settings.TASK, "RUN": "run", "ARTIFACTS": str(disk.artifacts)}
    for score in (0.25, 0.75):  # the second report replaces the first
        disk.leave(ENOUGH)
        shutil.rmtree(disk.artifacts / "runs", ignore_errors=True)
        make_run(settings, "run", metrics={1: {"critic/score/mean": score}})
        _, failed = until_it_fits(disk, ROOMS, functools.partial(Watched.make, "report", **where))
        assert failed > 1
        assert f"{score}" in (disk.artifacts / f"reports/{settings.TASK}/run/report.html").read_text()


MERGE = """
import sys
from pathlib import Path
from verl_tasks.models.merge import merge_adapter
from verl_tasks.process import errors_in_one_line
with errors_in_one_line():
    print(merge_adapter(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])))
"""


def test_a_merged_model_is_whole_or_not_there(disk, small_model, tmp_path):
    saved_adapter(small_model, tmp_path / "adapter")
    target = disk.artifacts / "models/merged"
    command = [sys.executable, "-c", MERGE, str(tmp_path / "adapter"), str(small_model), str(target)]
    rooms = [0, 64 * KIB, 256 * KIB, MIB, 8 * MIB]
    _, failed = until_it_fits(disk, rooms, lambda: Watched(command, outside_make()))
    assert failed > 2 and has_weights(target) and not partial_files(disk.artifacts)
