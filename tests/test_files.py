"""Nothing half-written has a final name, two processes may write one target, and what a killed one left goes."""

import errno
import os
import subprocess
import sys

import pytest

from verl_tasks.evaluation import batch
from verl_tasks.files import check_writable, folder_beside, partial_of, written_beside
from verl_tasks.settings import ROOT, Command, SettingsError, load_settings

HOLDER = """
import sys, time
from pathlib import Path
from verl_tasks import files
with getattr(files, sys.argv[2])(Path(sys.argv[1])) as partial:
    (partial / "a" if partial.is_dir() else partial).write_text("theirs")
    print(partial, flush=True)
    sys.stdin.readline()
"""


class Writer:
    """Another process that writes ``target``, until it is told to end or killed."""

    def __init__(self, target, how):
        command = [sys.executable, "-c", HOLDER, str(target), how]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.partial = target.parent / self.process.stdout.readline().strip()

    def end(self):
        said, _ = self.process.communicate("\n", timeout=30)
        assert self.process.returncode == 0, said


@pytest.mark.parametrize("how", ["written_beside", "folder_beside"])
def test_what_a_killed_writer_left_goes_and_what_a_living_one_writes_stays(how, tmp_path):
    target = tmp_path / "a [1]*"
    killed, living = Writer(target, how), Writer(target, how)
    killed.process.kill()
    killed.process.wait()
    assert killed.partial.exists() and killed.partial != living.partial
    with (written_beside if how == "written_beside" else folder_beside)(target) as mine:
        assert not killed.partial.exists() and living.partial.exists()
        (mine / "a" if mine.is_dir() else mine).write_text("mine")
    assert (target / "a" if target.is_dir() else target).read_text() == "mine"
    living.end()
    # A file is replaced by the later one, a folder stays the first one's.
    assert (target / "a" if target.is_dir() else target).read_text() == ("mine" if target.is_dir() else "theirs")
    assert list(tmp_path.iterdir()) == [target]


def test_a_link_to_nothing_is_replaced(tmp_path):
    (tmp_path / "model").symlink_to(tmp_path / "gone")
    with folder_beside(tmp_path / "model") as partial:
        (partial / "config.json").touch()
    assert (tmp_path / "model/config.json").is_file() and not (tmp_path / "model").is_symlink()


def test_a_folder_that_is_there_and_lacks_a_file_is_not_taken_for_the_result(tmp_path):
    (tmp_path / "merged").mkdir()
    (tmp_path / "merged/config.json").touch()
    with pytest.raises(OSError), folder_beside(tmp_path / "merged") as partial:
        (partial / "model.safetensors").touch()
    assert [path.name for path in tmp_path.iterdir()] == ["merged"]


def test_an_error_leaves_nothing_and_the_target_as_it_was(tmp_path):
    (tmp_path / "file").write_text("before")
    for how in (written_beside, folder_beside, partial_of):
        with pytest.raises(ZeroDivisionError), how(tmp_path / "file"):
            raise ZeroDivisionError
    assert [path.name for path in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_text() == "before"


def test_the_partial_files_of_other_targets_stay(tmp_path):
    for name in (".merged.4711.partial", ".other.4711.partial"):
        (tmp_path / name).mkdir()
    with folder_beside(tmp_path / "merged"):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == [".other.4711.partial", "merged"]


@pytest.mark.parametrize("output", ["folder.jsonl", "missing/out.jsonl", "file/out.jsonl", f"{'x' * 255}.jsonl"])
def test_an_output_that_cannot_be_written_is_said_before_anything_else(output, tmp_path):
    """As root too, to whom os.access says that everything can be written."""
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "in.jsonl").touch()
    command = load_settings({"INPUT": str(tmp_path / "in.jsonl"), "OUTPUT": str(tmp_path / output)}, cls=Command)
    with pytest.raises(SettingsError, match=r"OUTPUT=.*: cannot be written: "):
        batch.paths(command)


def test_an_output_that_can_be_written_is_left_as_it_is(tmp_path):
    (tmp_path / "out.jsonl").write_text("before")
    for name in ("out.jsonl", "new.jsonl"):
        check_writable(tmp_path / name)
    assert os.listdir(tmp_path) == ["out.jsonl"] and (tmp_path / "out.jsonl").read_text() == "before"


@pytest.mark.parametrize("how", [written_beside, folder_beside])
@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),  # of a write, which knows no name
        RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"),  # as safetensors
    ],
)
def test_a_full_disk_is_said_with_the_file_that_was_written(error, how, tmp_path):
    with pytest.raises(OSError, match=rf"No space left on device: '{tmp_path}/target'"), how(tmp_path / "target"):
        raise error
    assert os.listdir(tmp_path) == []
