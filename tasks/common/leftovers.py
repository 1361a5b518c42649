"""The processes of a stage, and what they leave: daemons, shared memory, the folder of temporary files.

Ray and vLLM start daemons that outlive their parent. So a keeper, a small process in a session of its own, starts the
stage's process. Once that has ended, or the launcher has, by whatever signal, the keeper ends and removes the rest.
"""

import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from verl_tasks.places import PYTHON_PATH

# Ctrl-C, a kill, and a terminal or an ssh connection that closes: each ends a command in order.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LOGS = "VERL_TASK_LOGS"  # in the environment of all processes of a stage: the folder of its logs
LAUNCH = "VERL_TASK_LAUNCH"  # and the folder of temporary files, which each launch has for itself
SHARED_MEMORY = Path("/dev/shm")
NAMES = ("psm_", "verl_weights_", "sem.mp-")  # Python's shared memory and semaphores; verl's weights
TERMINATE_SECONDS, KILL_SECONDS = 3, 5
LOOK_SECONDS = 0.5  # between two looks at processes, and at who has mapped what
LOOKS = 10  # at a new file: it is made before it is mapped
KEEPER = (
    f"import sys; sys.path[:0] = {PYTHON_PATH.split(':')}; "
    "from verl_tasks import leftovers; leftovers.keep(*sys.argv[1:])"
)


def interrupt_on_sigterm() -> None:
    """Let SIGTERM and SIGHUP end this process as Ctrl-C does, with all clean-up. `nohup` keeps SIGHUP ignored."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)


class Interrupts:
    """Within the block the first signal of ENDING raises KeyboardInterrupt, and further ones do nothing.

    So a second Ctrl-C does not break off the clean-up that the first began. Signals that this process ignores stay
    ignored; outside of the main thread, where Python handles no signal, the block changes nothing.
    """

    def __init__(self):
        self._heard = self._held = False
        self._before = {}

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():
            heeded = [number for number in ENDING if signal.getsignal(number) != signal.SIG_IGN]
            self._before = {number: signal.signal(number, self._hear) for number in heeded}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _hear(self, number, frame) -> None:
        first, self._heard = not self._heard, True
        if first and not self._held:
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Within this block no signal raises; at its end the first one does."""
        heard, self._held = self._heard, True
        try:
            yield
        finally:
            self._held = False
        if self._heard and not heard:
            raise KeyboardInterrupt


class Launch:
    """One run of a stage's ``command``, with ``more`` in its environment, or of a program in place of this process:
    its keeper, its folder of temporary files, and the ``environment`` that is the launch's own."""

    def __init__(self, logs: Path, command: Sequence[str] = (), output=None, more: Mapping[str, str] | None = None):
        end_marked(LOGS, str(logs))  # of a killed launcher; the caller holds the task's lock, so none is of a live run
        # Ray gives its path to a shell unquoted, and adds up to 78 bytes for a socket, of which 107 fit.
        fits = re.fullmatch(r"[\w./+@%,=-]{1,29}", tempfile.gettempdir(), re.ASCII)
        self.folder = Path(tempfile.mkdtemp(prefix="verl-", dir=None if fits else "/tmp"))
        marks = {LOGS: str(logs), LAUNCH: str(self.folder)}
        self.environment = marks | {"TMPDIR": str(self.folder)}  # vLLM's sockets too
        # What torch compiled is for the next launches as well.
        cache = f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}"
        self.environment["TORCHINDUCTOR_CACHE_DIR"] = os.environ.get("TORCHINDUCTOR_CACHE_DIR", cache)
        if not os.environ.get("RAY_ADDRESS"):
            self.environment["RAY_TMPDIR"] = str(self.folder)
        given = os.environ | self.environment | dict(more or {})
        self.keeper = subprocess.Popen(
            [sys.executable, "-c", KEEPER, str(os.getpid()), *marks.values(), *command],
            env={name: value for name, value in given.items() if name not in marks},
            stdin=subprocess.DEVNULL,
            stdout=output or subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C, and a signal to the launcher's group, do not reach it
        )

    def processes(self) -> list[psutil.Process]:
        """Those of the stage."""
        return _below(self.keeper.pid)

    def end(self) -> None:
        """End the stage, unless it has ended; returns when nothing is left."""
        self.keeper.terminate()
        self.keeper.wait()
        if self.keeper.returncode == -signal.SIGKILL:  # of the stage, or of the keeper itself
            end_marked(LAUNCH, str(self.folder))
        shutil.rmtree(self.folder, ignore_errors=True)


@contextlib.contextmanager
def kept(command: Sequence[str], log: Path, more: Mapping[str, str] | None = None) -> Iterator[Launch]:
    """Within the block ``command`` runs, its output in ``log``; the launch's ``keeper`` ends as it does. After the
    block, on every way out, and after a SIGKILL, nothing of it is left."""
    log.parent.mkdir(parents=True, exist_ok=True)
    print(f"  log: {log}", flush=True)
    with Interrupts() as interrupts, log.open("wb") as output:
        launch = Launch(log.parent, command, output, more)
        try:
            yield launch
        finally:
            with interrupts.held():
                launch.end()


def die_with_parent() -> None:
    """For ``preexec_fn``: the child is killed when the process that started it ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a killed launcher leaves no training behind


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


def _below(process: int) -> list[psutil.Process]:
    """The descendants of ``process``."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(process).children(recursive=True)
    return []


def _marked(name: str, value: str) -> list[psutil.Process]:
    """The processes with ``name=value`` in their environment, except this one."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and process.environ().get(name) == value:
                found.append(process)
    return found


def end_marked(name: str, value: str) -> None:
    """Kill the processes with ``name=value`` in their environment."""
    _end(lambda: _marked(name, value), signal.SIGKILL, 2 * KILL_SECONDS)


def _end(processes: Callable[[], list[psutil.Process]], number: int, seconds: float) -> None:
    """Send signal ``number`` once to each of ``processes``, and to those that they start meanwhile, until none is left,
    for at most ``seconds``."""
    deadline, told = time.monotonic() + seconds, set()
    while (there := processes()) and time.monotonic() < deadline:
        for process in set(there) - told:
            with contextlib.suppress(psutil.Error):
                process.send_signal(number)
        told.update(there)
        psutil.wait_procs(there, timeout=LOOK_SECONDS)


def keep(launcher: str, logs: str, folder: str, *command: str) -> None:
    """The keeper: start ``command`` and end as it does; without one, wait for the end of the program that takes the
    place of the process ``launcher``. SIGTERM ends it before. In the end nothing is left.

    Shared memory counts as the stage's once a process of it has mapped it: with `--ipc=host` other containers have
    theirs in the same folder, and their processes cannot be seen.
    """
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: orphans become children of this process
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*ENDING, signal.SIGCHLD})

    def begins() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        die_with_parent()

    def there() -> list[psutil.Process]:
        return _below(os.getpid()) if command else _marked(LAUNCH, folder)

    looks, ours, child, code, heard = dict.fromkeys(_files(), LOOKS), {}, None, None, None
    if command:
        environment = os.environ | {LOGS: logs, LAUNCH: folder}
        child = subprocess.Popen(command, env=environment, start_new_session=True, preexec_fn=begins)
    while code is None and heard != signal.SIGTERM and os.getppid() == int(launcher):
        told = signal.sigtimedwait({signal.SIGTERM, signal.SIGCHLD}, LOOK_SECONDS)
        heard, code = told and told.si_signo, child and child.poll()
        files = _files()
        looks = {inode: looks.get(inode, 0) + 1 for inode in files}
        new = {inode for inode in files.keys() - ours.keys() if looks[inode] <= LOOKS}
        ours |= {inode: files[inode] for inode in new & _mapped(there() if new else ())}
    alone = os.getppid() != int(launcher)
    _end(there, signal.SIGTERM, 0 if alone else TERMINATE_SECONDS)
    _end(there, signal.SIGKILL, KILL_SECONDS)
    _remove(ours)
    if alone:  # else the launcher reads what the stage has left there
        shutil.rmtree(folder, ignore_errors=True)
    if code and code < 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.kill(os.getpid(), -code)
    sys.exit(code)
