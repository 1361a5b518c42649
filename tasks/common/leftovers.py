"""What the processes of a stage leave, and its removal: daemons, shared memory, the folder of temporary files.

Ray and vLLM start daemons that outlive their parent. ``Launch.clean_up`` ends them on every way out of a stage. A
guard, a small process in a session of its own, does it where the launcher is killed and cannot.
"""

import contextlib
import ctypes
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil

from tasks.common.interrupts import ENDING

LOGS = "VERL_TASK_LOGS"  # in the environment of all processes of a stage: the folder of its logs
LAUNCH = "VERL_TASK_LAUNCH"  # and the folder of temporary files, which each launch has for itself
SHARED_MEMORY = Path("/dev/shm")
NAMES = ("psm_", "verl_weights_", "sem.mp-")  # Python's shared memory and semaphores; verl's weights
TERMINATE_SECONDS, KILL_SECONDS = 3, 5
DONE = "done"


class Launch:
    """One run of a stage's process: its temporary files, and the shared memory that its processes made.

    Shared memory counts as made here once a process of this launch has mapped it: with `--ipc=host` other containers
    have theirs in the same folder, and their processes cannot be seen.
    """

    def __init__(self, logs: Path):
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: orphans become children of this process
        end_marked(LOGS, str(logs))  # of a killed launcher; the caller holds the task's lock, so none is of a live run
        self.folder = Path(tempfile.mkdtemp(prefix="verl-"))  # short: Ray's socket paths must fit in 107 bytes
        self.environment = {LOGS: str(logs), LAUNCH: str(self.folder), "TMPDIR": str(self.folder)}  # vLLM's sockets too
        # What torch compiled is for the next launches as well.
        cache = f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}"
        self.environment["TORCHINDUCTOR_CACHE_DIR"] = os.environ.get("TORCHINDUCTOR_CACHE_DIR", cache)
        self._seen = set(_files())  # of others, made before
        self._ours: dict[int, Path] = {}  # by inode
        self._guard = subprocess.Popen(
            [sys.executable, "-m", "tasks.common.leftovers", str(os.getpid()), str(self.folder)],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2]), LOGS: "", LAUNCH: ""},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a signal to the launcher's group does not reach it
        )

    def started(self, process: int) -> None:
        """Tell the guard of the stage's process, which begins a session."""
        self._tell(f"session {process}")

    def outlives_exec(self) -> None:
        """Let the program that replaces this process keep the guard, which then cleans up at that program's end."""
        os.set_inheritable(self._guard.stdin.fileno(), True)

    def _tell(self, line: str) -> None:
        with contextlib.suppress(OSError):  # a guard that somebody killed
            os.write(self._guard.stdin.fileno(), f"{line}\n".encode())

    def processes(self) -> list[psutil.Process]:
        """Every descendant of this process but the guard."""
        children = psutil.Process().children(recursive=True)
        return [child for child in children if child.pid != self._guard.pid]

    def look(self) -> None:
        """Note the shared memory that is new and that our processes have mapped, also for the guard."""
        with contextlib.suppress(psutil.Error):
            new = _files()
            fresh, self._seen = {inode: file for inode, file in new.items() if inode not in self._seen}, set(new)
            for inode in fresh.keys() & (_mapped(self.processes()) if fresh else set()):
                self._ours[inode] = fresh[inode]
                self._tell(f"file {inode} {fresh[inode].name}")

    def clean_up(self) -> None:
        """End every descendant of this process, and remove what they left."""
        self.look()
        for wait in (TERMINATE_SECONDS, 0):
            children = self.processes()
            for child in children:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.terminate() if wait else child.kill()
            psutil.wait_procs(children, timeout=wait or KILL_SECONDS)
        _remove(self._ours)
        shutil.rmtree(self.folder, ignore_errors=True)
        self._tell(DONE)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._guard.wait(KILL_SECONDS)
        self._guard.stdin.close()


def _files() -> dict[int, Path]:
    """The files of NAMES in shared memory that belong to this user, by inode."""
    found = {}
    for file in SHARED_MEMORY.glob("*"):
        if file.name.startswith(NAMES):
            with contextlib.suppress(OSError):  # it is gone again
                status = file.lstat()
                if status.st_uid == os.getuid():
                    found[status.st_ino] = file
    return found


def _mapped(processes: Iterable[psutil.Process]) -> set[int]:
    """Inodes of the shared memory that ``processes`` have mapped. glibc renames a semaphore's file after mapping it."""
    found = set()
    for process in processes:
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{process.pid}/maps").read_text()
            found.update(map(int, re.findall(r"(\d+) +/dev/shm/", maps)))
    return found


def _remove(ours: dict[int, Path]) -> None:
    """Remove the shared memory ``ours`` (by inode), except what a process still has mapped."""
    left = {inode: file for inode, file in _files().items() if ours.get(inode) == file}
    used = _mapped(psutil.process_iter()) if left else set()
    for inode in left.keys() - used:
        left[inode].unlink(missing_ok=True)


def marked(name: str, value: str, session: int = 0) -> Iterator[psutil.Process]:
    """The processes with ``name=value`` in their environment, or of ``session``, except this one.

    Ray's agents have no environment to read: they write their title over it.
    """
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            of_session = session and os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE
            if process.pid != os.getpid() and (of_session or process.environ().get(name) == value):
                yield process


def end_marked(name: str, value: str, session: int = 0) -> None:
    """Kill the processes that are ``marked``, and those that they start meanwhile."""
    deadline = time.monotonic() + 2 * KILL_SECONDS
    while (found := list(marked(name, value, session))) and time.monotonic() < deadline:
        for process in found:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(found, timeout=1)


def _alive(process: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    return False


def _guard(launcher: int, folder: Path) -> None:
    """Wait for the end of the process ``launcher``; clean up unless it says that it did.

    Its lines on standard input: "session ID", "file INODE NAME" for shared memory, and DONE in the end.
    """
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)
    told = b""
    # A process that the launcher forked may hold the pipe open after the launcher's end.
    while _alive(launcher) and not told.endswith(f"{DONE}\n".encode()):
        if select.select([0], [], [], 1)[0]:
            new = os.read(0, 65536)
            if not new:
                break
            told += new
    lines = told.decode().splitlines()
    if DONE in lines:
        return
    files = [line.split(" ", 2)[1:] for line in lines if line.startswith("file ")]
    ours = {int(inode): SHARED_MEMORY / name for inode, name in files}
    session = next((int(line.split()[1]) for line in lines if line.startswith("session ")), 0)
    mapped = _mapped(marked(LAUNCH, str(folder), session))
    ours |= {inode: file for inode, file in _files().items() if inode in mapped}
    for _ in range(2):  # the second time for what was just being started
        end_marked(LAUNCH, str(folder), session)
        time.sleep(0.5)
    _remove(ours)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    _guard(int(sys.argv[1]), Path(sys.argv[2]))
