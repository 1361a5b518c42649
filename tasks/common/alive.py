"""What a training's processes tell its launcher: files in the launch's folder.

Signs of life (new tokens, a finished micro-batch, files that grow), what a process waits for, the error that ends the
training, and that the last step is saved before the end. A training that stands still ends after START_MINUTES.
"""

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from verl_tasks.leftovers import LAUNCH

BEAT, WAITS, ERROR, SAVES = "alive", "waits-for", "error", "saves"
BEAT_SECONDS = 1  # between two signs of life of a process
LOOK_SECONDS = 5  # between two looks at the files that grow
SHOW_SECONDS = 10  # without a sign of life, before the screen says what is waited for
STACKS_SECONDS = 10  # for Ray to bring the stacks from other processes to the log
STACKS = signal.SIGUSR1  # what verl_plugins/waits.py answers with the stacks of its process
# What Ray repeats while it waits.
_REPEATED = re.compile(r"cannot be scheduled|autoscaler|infeasible|insufficient resources", re.IGNORECASE)
_last_beat = 0.0


def launch_folder() -> Path | None:
    """The launch's folder; None outside a launch, and on another node of a cluster."""
    folder = os.environ.get(LAUNCH)
    return Path(folder) if folder and os.path.isdir(folder) else None


def beat() -> None:
    """Say that this process got on: called for new tokens and for a finished micro-batch."""
    global _last_beat
    now = time.monotonic()
    if now - _last_beat > BEAT_SECONDS and (folder := launch_folder()):
        _last_beat = now
        with contextlib.suppress(OSError):  # a full disk must not end a training
            (folder / BEAT).touch()


def waits_for(what: str, source: str = "trainer") -> None:
    """Say what this process waits for; an empty text: nothing any more."""
    if folder := launch_folder():
        with contextlib.suppress(OSError):
            (folder / f"{WAITS}-{source}").write_text(what)


def failed(error: BaseException) -> None:
    """Say that ``error`` ends the training; the first one counts."""
    if folder := launch_folder():
        with contextlib.suppress(OSError), (folder / ERROR).open("x") as file:
            file.write(f"{type(error).__name__}: {' '.join(str(error).split())}")


def saves() -> None:
    """Say that the last step is saved before the end, which takes its time."""
    if folder := launch_folder():
        with contextlib.suppress(OSError):
            (folder / SAVES).touch()


@dataclass
class Watch:
    """The launcher's look at a training. ``minutes``: without a sign of life, until ``stalled``; 0: for ever.

    ``files``: a folder whose files grow, and ``log``, of which what Ray repeats does not count.
    """

    launch: Path
    files: Path
    log: Path
    minutes: float
    _signs: tuple = ()
    _since: float = field(default_factory=time.monotonic)
    _looked: float = 0.0
    _read: int = 0
    _lines: int = 0

    def look(self, done: int) -> None:
        """Note signs of life; ``done``: steps so far."""
        now = time.monotonic()
        if now - self._looked < LOOK_SECONDS:
            return
        self._looked = now
        signs = done, _changed(self.launch / BEAT), _bytes(self.files, self.log), self._new_lines()
        if signs != self._signs:
            self._signs, self._since = signs, now

    @property
    def still(self) -> float:
        """Seconds without a sign of life."""
        return time.monotonic() - self._since

    @property
    def stalled(self) -> bool:
        return bool(self.minutes) and self.still > 60 * self.minutes

    @property
    def error(self) -> str:
        """The error that ends the training, in one line, if a process told one."""
        with contextlib.suppress(OSError):
            return (self.launch / ERROR).read_text()
        return ""

    @property
    def saves(self) -> bool:
        return (self.launch / SAVES).exists()

    @property
    def waits(self) -> str:
        """What is waited for, by what the processes say; empty where they do not."""
        found = []
        for file in sorted(self.launch.glob(f"{WAITS}-*")):
            with contextlib.suppress(OSError):
                found.append(file.read_text())
        return "; ".join(filter(None, found))

    @property
    def note(self) -> str:
        """For the progress bar, once there was no sign of life for a while."""
        if (still := self.still) <= SHOW_SECONDS:
            return ""
        return f" waits {still:.0f} s{f' for {what}' if (what := self.waits) else ''}"

    def _new_lines(self) -> int:
        """Lines of the log that say something new."""
        with contextlib.suppress(OSError), self.log.open("rb") as log:
            log.seek(self._read)
            new = log.read()
            self._read += len(new)
            self._lines += sum(not _REPEATED.search(line.decode(errors="replace")) for line in new.splitlines())
        return self._lines


def _changed(file: Path) -> float:
    with contextlib.suppress(OSError):
        return file.stat().st_mtime
    return 0.0


def _bytes(folder: Path, without: Path) -> int:
    """Bytes of all files below ``folder``, except ``without`` and what the launcher itself writes."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(place, name)
            if path != str(without) and name != "gpu.jsonl":
                with contextlib.suppress(OSError):
                    total += os.stat(path).st_size
    return total


def ask_for_stacks(processes: Iterable[psutil.Process]) -> int:
    """Ask those of ``processes`` that answer STACKS for their stacks, which go to their standard error; how many."""
    asked = 0
    for process in processes:
        with contextlib.suppress(psutil.Error, OSError, ValueError):
            status = Path(f"/proc/{process.pid}/status").read_text()
            caught = int(re.search(r"^SigCgt:\s*(\w+)", status, re.MULTILINE)[1], 16)
            if caught >> (STACKS - 1) & 1:  # another process would end by it
                process.send_signal(STACKS)
                asked += 1
    return asked
