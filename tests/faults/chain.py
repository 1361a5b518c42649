"""A command as a user starts it, watched: its processes, its shared memory, and the files that it leaves."""

import contextlib
import ctypes
import hashlib
import ipaddress
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import yaml

from tests.helpers import MAKE, ROOT, SMALL, outside_make
from verl_tasks.runs.launches import launches
from verl_tasks.runs.run import Run, read_metrics

STEPS = "2"
CHAIN = SMALL | {"STEPS": STEPS}
LOOK_SECONDS = 0.5
MAPPED = re.compile(r"(\d+) +/dev/shm/")


class Watched:
    """A command in a session of its own. Its orphans become our children, so that none of its processes is missed.

    Of two at once, the processes are told apart by TMPDIR in their environment.
    """

    running = 0  # how many there are

    def __init__(self, command: list[str], environment: dict[str, str]):
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
        self.before = {child.pid for child in psutil.Process().children(recursive=True)}
        self.temporary = Path(tempfile.mkdtemp(prefix="f-", dir="/tmp"))  # short: Ray's sockets lie below it
        Watched.running += 1
        self.memory: set[int] = set()  # inodes of the shared memory that its processes had mapped
        self.output = tempfile.TemporaryFile("w+")  # noqa: SIM115  (until ``close``)
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment | {"TMPDIR": str(self.temporary)},
            stdin=subprocess.DEVNULL,
            stdout=self.output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    @classmethod
    def make(cls, *arguments: str, **variables: str) -> "Watched":
        return cls([*MAKE, *arguments, *(f"{name}={value}" for name, value in variables.items())], outside_make())

    def said(self) -> str:
        self.output.seek(0)
        return self.output.read()

    def processes(self) -> list[psutil.Process]:
        """Its processes that are alive; those that ended are reaped where they became our children."""
        alive = []
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error, ChildProcessError):
                if child.pid in self.before:
                    continue
                if child.status() == psutil.STATUS_ZOMBIE:
                    if child.pid != self.process.pid and child.ppid() == os.getpid():
                        os.waitpid(child.pid, os.WNOHANG)
                elif self._is_own(child):
                    alive.append(child)
        return alive

    def _is_own(self, process: psutil.Process) -> bool:
        return Watched.running == 1 or process.environ().get("TMPDIR") == str(self.temporary)

    def launcher(self) -> int:
        """The id of the process that runs the stages; make's before there is one."""
        named = [p.pid for p in self.processes() if "verl_tasks.launch.main" in _command(p)]
        return (named or [self.process.pid])[0]

    def look(self) -> None:
        """Note the shared memory that its processes have mapped now."""
        for process in self.processes():
            with contextlib.suppress(OSError):
                self.memory.update(map(int, MAPPED.findall(Path(f"/proc/{process.pid}/maps").read_text())))

    def wait(self, seconds: float) -> bool:
        """Wait for its end, at most ``seconds``; whether it ended."""
        deadline = time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < deadline:
            self.look()
            time.sleep(LOOK_SECONDS)
        return self.process.poll() is not None

    def kill(self, of_group: bool) -> None:
        """SIGKILL for the launcher (for make before there is one), or for its whole process group, make's too."""
        if of_group:
            os.killpg(self.process.pid, signal.SIGKILL)
        else:
            os.kill(self.launcher(), signal.SIGKILL)
        self.process.wait(60)

    def left(self) -> list[str]:
        """What there still is of it: processes, shared memory, folders of temporary files."""
        shared = [f"/dev/shm/{file.name}" for file in os.scandir("/dev/shm") if file.inode() in self.memory]
        ours = ("verl-", "vllm_dist_")
        temporary = [str(p) for p in self.temporary.iterdir() if p.name.startswith(ours) or p.is_socket()]
        return [*(f"{p.pid} {' '.join(_command(p))[:150]}" for p in self.processes()), *shared, *temporary]

    def open_to_others(self) -> list[str]:
        """What of it listens on another address than this machine's own."""
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                for each in process.net_connections("inet"):
                    ip = ipaddress.ip_address(each.laddr.ip)
                    own = (getattr(ip, "ipv4_mapped", None) or ip).is_loopback
                    if each.status == psutil.CONN_LISTEN and not own:
                        found.append(f"{each.laddr.ip}:{each.laddr.port} {' '.join(_command(process))[:150]}")
        return found

    def left_after(self, seconds: float) -> tuple[list[str], float]:
        """What is still left after ``seconds``, and how long it took until nothing was."""
        started = time.monotonic()
        while (left := self.left()) and time.monotonic() < started + seconds:
            time.sleep(LOOK_SECONDS)
        return left, time.monotonic() - started

    def close(self) -> None:
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.process.wait(60)
        Watched.running -= 1
        self.output.close()
        shutil.rmtree(self.temporary, ignore_errors=True)


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline() or [process.name()]
    except psutil.Error:
        return []


# ---- files ---------------------------------------------------------------------------------------------------------


def _lines(file: Path) -> None:
    """JSON in every line except an unfinished last one: these files are appended to."""
    for line in file.read_text().split("\n")[:-1]:
        json.loads(line)


def _whole_zip(file: Path) -> None:
    with zipfile.ZipFile(file) as archive:
        assert archive.testzip() is None


def _ends_with(end: bytes) -> Callable[[Path], None]:
    def check(file: Path) -> None:
        assert file.read_bytes().rstrip().endswith(end), f"does not end with {end!r}"

    return check


READERS: dict[str, Callable] = {
    ".parquet": pq.read_table,
    ".json": lambda file: json.loads(file.read_text()),
    ".jsonl": _lines,
    ".yaml": lambda file: yaml.safe_load(file.read_text()).keys(),
    ".xlsx": _whole_zip,
    ".png": _ends_with(b"IEND\xaeB`\x82"),
    ".html": _ends_with(b"</html>"),
}


def half_files(artifacts: Path) -> list[str]:
    """The files that cannot be read under their final names. A checkpoint is whole or does not count
    (runs/checkpoint.py), a partial file has a hidden name."""
    found = []
    for file in sorted(artifacts.rglob("*")):
        parts = file.relative_to(artifacts).parts
        if (
            not file.is_file()
            or "checkpoints" in parts
            or "logs" in parts
            or any(p.endswith(".partial") for p in parts)
        ):
            continue
        try:
            READERS.get(file.suffix, lambda file: None)(file)
        except Exception as error:
            found.append(f"{file}: {type(error).__name__}: {error}"[:300])
    return found


def partial_files(artifacts: Path) -> list[str]:
    return [str(path) for path in artifacts.rglob("*partial*")]


def texts(folder: Path) -> dict[str, str]:
    """Digest of every file in ``folder``, by its path there."""
    files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


# ---- results -------------------------------------------------------------------------------------------------------


def table_of(said: str) -> list[str]:
    """The names of the metrics in the last table on the screen."""
    table = said[said.rindex("┏") :]
    return [line.split("│")[1].strip() for line in table.splitlines() if line.startswith("│")]


def result_of(artifacts: Path, task: str = "countdown") -> dict:
    """What a finished chain has, as far as two runs of the same settings must agree: all except sampled texts."""
    found: dict = {"data": texts(artifacts / "data" / task), "left over": partial_files(artifacts)}
    for run in sorted(file.parent for file in (artifacts / "runs" / task).glob("*/settings.json")):
        rollouts = {file.name: len(file.read_text().splitlines()) for file in sorted(run.glob("rollouts/*.jsonl"))}
        found[run.name] = {
            "steps": list(read_metrics(run)),
            "checkpoints": [*Run.read(run).steps],
            "rollouts": rollouts,
            "a record": len(launches(run)) > 0,
        }
    for file in sorted((artifacts / "eval" / task).glob("*/summary.json")):
        summary, lines = json.loads(file.read_text()), (file.parent / "rollouts.jsonl").read_text().splitlines()
        keys = ("prompts", "samples", "errors", "left_out")
        name = file.parent.name.rpartition("-")[0]
        found[name] = {key: summary[key] for key in keys} | {"lines": len(lines), "metrics": sorted(summary["metrics"])}
    return found
