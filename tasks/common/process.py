"""Run one engine process: output to a log file, progress on the screen, and no process left behind."""

import contextlib
import gc
import os
import re
import select
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from tqdm import tqdm

from verl_tasks import alive
from verl_tasks.errors import own_place, said
from verl_tasks.files import NO_SPACE
from verl_tasks.leftovers import Launch, die_with_parent, kept
from verl_tasks.text import printable

POLL_SECONDS = 0.5
# How long a process may take to end by itself after
GRACE_SECONDS = 20  # its log reports a dead engine: verl may wait minutes for it
SAVING_SECONDS = 1800  # it says that it saves the last step before the end (tasks/common/alive.py)
NOTICE_SECONDS = 60  # it tells the error that ends it: the trainer then saves or ends
REPORT_SECONDS = 15  # between two lines of progress without a terminal
FULL_BYTES = 2**20  # a disk with less free is full

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
# Prefixes of Ray, vLLM and torch before a line: "(WorkerDict pid=1) ", "(EngineCore pid=2) ERROR 11-21 02:57:31
# [core.py:9] ", "[rank0]: ".
_PREFIX = re.compile(r"^(\([^()]*pid=\d+[^()]*\)\s*)*([A-Z]+ \d\d-\d\d [\d:]+ \[[^\]]*\]\s*)?(\[rank\d+\]: ?)?")
_ERROR = re.compile(r"^(?:[A-Za-z_][\w.]*\.)?([A-Z]\w*(?:Error|Exception|Exit)): \S")
_FOR_PEOPLE = re.compile(r"^verl_tasks\.[\w.]+\.(?:SettingsError|DataError): (.+)")  # with its cause in its words
# These wrap or hide the first error; a BufferError comes from closing shared memory while unwinding.
_NOT_THE_CAUSE = re.compile(
    r"RayTaskError|RayActorError|ActorDiedError|BufferError|cannot close exported pointers|ChildFailedError"
)
# C++ frames of workers that Ray ends, markers below a line of a traceback, Hydra's advice.
_NOISE = re.compile(
    r"^(\[[^]]* E \d+ \d+\] logging\.cc:\d+: )?(\*\*\* SIG[A-Z]+ received|(PC: )?\s*@ )"
    r"|^[\s^~]*$|^Set the environment variable HYDRA_FULL_ERROR"
)
_ENGINE = re.compile(r"EngineDeadError|EngineCore encountered a fatal error|Worker failed with error")
# A worker of a local Ray, or one whose loss is raised to the driver. On a cluster Ray's own count is of all jobs.
_MEMORY = re.compile(
    r"killed due to the node running low on memory|[1-9]\d* Workers \(tasks / actors\) killed due to mem"
)
_MEMORY_USED = re.compile(r"Memory on the node \(IP: ([^,]+), .*? was (\S+) used / (\S+) limit")
# Of Python, C++ and OpenBLAS where the kernel starts no further thread.
_THREADS = re.compile(r"can't start new thread|what\(\):\s+Resource temporarily unavailable|pthread_create failed")
# Ray tells every driver of every node: the node was ours if our log has lines from it, "(WorkerDict ip=...)".
_NODE = re.compile(r"address: (\S+) and node name: \S+ has been marked dead")
_FROM = re.compile(r"^(?:\x1b\[[0-9;]*m)?\([^()]*pid=\d+, ip=([^()\s]+)\)", re.MULTILINE)
_FREE_SOME = "free some, then the same command continues"


class StageFailed(RuntimeError):
    """A stage's process failed; the message is for the user."""


@dataclass(frozen=True)
class Progress:
    """What a progress bar shows: ``done`` of the stage's total, a note such as the reward, and the seconds that a step
    takes (0: as the bar sees them end)."""

    done: int = 0
    note: str = ""
    seconds: float = 0


def node_lost(address: str) -> str:
    """The message for a node of the Ray cluster that was lost."""
    return (
        f"node {address} of the Ray cluster was lost; run `ray start` there again (docs/MULTI_NODE.md), then the same "
        "command continues"
    )


def _known(text: str) -> str:
    """The cause of all errors of a log, if Ray reports it; else empty."""
    ours = set(_FROM.findall(text))
    if gone := next((address for address in _NODE.findall(text) if address in ours), ""):
        return node_lost(gone)
    if _out_of_memory(text):
        used = _MEMORY_USED.search(text)
        where = " (node {}: {} of {} used)".format(*used.groups()) if used else ""
        return (
            f"out of memory{where}: Ray ended a worker; lower MICRO_BATCH_SIZE or N_GPUS, or free memory on the "
            "machine, then the same command continues"
        )
    if _THREADS.search(text):
        return (
            "the machine allows no more threads: lower JOBS, or raise `sysctl kernel.pid_max`, `ulimit -u` or the "
            "container's pids limit, then the same command continues"
        )
    return ""


def _full_disk(folder: Path) -> str:
    """The message for a ``folder`` without space, whose log may lack the cause for that very reason; else empty."""
    try:
        full = shutil.disk_usage(folder).free < FULL_BYTES
    except OSError:
        return ""
    return f"no space left on the disk of {folder}; {_FREE_SOME}" if full else ""


def _out_of_memory(text: str) -> bool:
    found = {match.group() for match in _MEMORY.finditer(text)}
    return any("running low" in words for words in found) or bool(found and not os.environ.get("RAY_ADDRESS"))


def report(log: Path, status: str, told: str = "") -> str:
    """Why a process failed: what Ray or the disk says of it, the error that it ``told``, one of ours in its ``log``,
    the first one there, or its ``status``; then the lines of the log before that, which one of ours does not need."""
    text = log.read_text(errors="replace") if log.exists() else ""
    lines = [_PREFIX.sub("", _ANSI.sub("", line)).rstrip() for line in text.splitlines()]
    lines = [line for line in lines if not _NOISE.match(line)]
    errors = [line for line in lines if _ERROR.match(line) and not _NOT_THE_CAUSE.search(line)]
    first = next((line for line in errors if told and told[:200] in line), errors[0] if errors else "")
    if (ours := next(filter(None, map(_FOR_PEOPLE.match, lines)), None)) and not told:
        return f"{ours[1][:600]}\n  log: {log}"
    end = lines.index(first) + 1 if first else len(lines)  # later lines only follow from the cause
    tail = "\n".join(f"  | {line[:200]}" for line in lines[max(0, end - 12) : end])
    return f"{_known(text) or _full_disk(log.parent) or told[:400] or first[:400] or status}\n{tail}\n  log: {log}"


def _deadline(text: str, life: alive.Watch, due: dict[str, float], ours: set[str]) -> float:
    """When the process must have ended.

    ``text``: the new part of its log. Kept between calls: ``due``, the deadline for each reason so far; ``ours``, the
    nodes that the log has lines from.
    """
    ours.update(_FROM.findall(text))
    reasons = {
        "node": (ours.intersection(_NODE.findall(text)), GRACE_SECONDS),
        "memory": (_out_of_memory(text), GRACE_SECONDS),
        "engine": (_ENGINE.search(text), GRACE_SECONDS),
        "saves": (life.saves, SAVING_SECONDS),
        "error": (life.error, NOTICE_SECONDS),
    }
    for reason, (given, seconds) in reasons.items():
        if given:
            due.setdefault(reason, time.monotonic() + seconds)
    return next((due[reason] for reason in reasons if reason in due), float("inf"))


def _stalled(name: str, life: alive.Watch, launch: Launch) -> str:
    """Why a process that stands still is ended; its stacks are in the log then."""
    asked = alive.ask_for_stacks(launch.processes())
    time.sleep(alive.STACKS_SECONDS if asked else 0)
    what = f"it waits for {waits}" if (waits := life.waits) else "none of its processes says what it waits for"
    stacks = (
        f"the stacks of {asked} process{'es' * (asked > 1)} are in the log" if asked else "no process told its stacks"
    )
    return f"{name} stood still for START_MINUTES={life.minutes:g}: {what}; {stacks}"


def die_with_torchrun() -> None:
    """In a worker of torchrun: end with torchrun, which leaves its workers training when it is killed."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent()


@contextlib.contextmanager
def imports() -> Iterator[None]:
    """The imports of a large library: without Python's collector, which is a fifth of their time and looks at nothing
    that they made afterwards."""
    gc.disable()
    yield
    gc.freeze()
    gc.enable()


@contextlib.contextmanager
def errors_in_one_line(*kinds: type[Exception], stopped: str = "") -> Iterator[None]:
    """An error of ``kinds``, of a stage or of a file ends the command with one line, one more for each note of the
    error, and exit code 1; Ctrl-C prints its own text or ``stopped``, and ends it with exit code 130."""
    try:
        yield
    except (StageFailed, OSError, *kinds) as error:
        of_task = isinstance(error, OSError) and error.errno not in NO_SPACE and own_place(error)
        first = said(error) if of_task else str(error)
        lines = [printable(" ".join(text.split())) for text in (first, *getattr(error, "__notes__", ()))]
        text = str(error) if isinstance(error, StageFailed) else "\n  ".join(lines)
        advice = f"; {_FREE_SOME}" if isinstance(error, OSError) and error.errno in NO_SPACE else ""
        if isinstance(error, BrokenPipeError) and not _read():
            text = "stopped, for nothing reads its output any more; write it to a file: >FILE"
        sys.exit(f"error: {text}{advice}")
    except KeyboardInterrupt as error:
        if text := str(error) or stopped:
            print(f"\n{text}", file=sys.stderr)
        sys.exit(130)


def _read() -> bool:
    """Whether a process may read what this one prints."""
    screen = select.poll()
    screen.register(1, 0)
    return not any(event & select.POLLERR for _, event in screen.poll(0))


class _Screen:
    """A progress bar on a terminal; elsewhere the same bar as a line, every 2 % or 15 seconds.

    The time left follows from the mean of the steps that ended, before that from ``seconds`` in all (0: unknown), and
    only falls while a step is under way. The time that passed counts from the first step on, not from the engines'
    start-up.
    """

    def __init__(self, name: str, total: int, seconds: float = 0):
        self.name, self.total, self.live = name, total, sys.stdout.isatty()
        self.began, self.first = time.time(), 0
        self.ends_at = self.began + seconds if seconds else 0.0  # by the clock; 0: unknown
        self.shown, self.printed, self.lines_at, self.told = Progress(), 0.0, 0, False

    def look(self, watch: Callable[[], Progress], last: bool = False) -> None:
        """Show what ``watch`` says. No error of it, nor of a terminal or file to print to, may end the process."""
        try:
            self._show(watch(), last)
        except Exception as error:
            if not self.told:
                self.told = True
                with contextlib.suppress(OSError):
                    print(f"  warning: the progress cannot be shown: {type(error).__name__}: {error}", file=sys.stderr)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # a terminal that is gone
            print(end="\n" if self.live else "", flush=True)

    def _show(self, progress: Progress, last: bool) -> None:
        now, done = time.time(), progress.done
        if self.shown.done == 0 < done:
            self.began, self.first = now, done
        if done != self.shown.done and ((steps := done - self.first) or progress.seconds):
            self.ends_at = now + (progress.seconds or (now - self.began) / steps) * (self.total - done)
        self.shown = progress
        percent_since = 100 * (done - self.lines_at) / max(1, self.total)
        due = percent_since >= 2 or time.monotonic() - self.printed > REPORT_SECONDS or (last and percent_since)
        if self.live:
            print(f"\r\x1b[K{self._line(now, shutil.get_terminal_size().columns - 1)}", end="", flush=True)
        elif due:
            print(self._line(now), flush=True)
            self.printed, self.lines_at = time.monotonic(), done

    def _line(self, now: float, columns: int | None = None) -> str:
        done = self.shown.done
        return tqdm.format_meter(
            done,
            self.total,
            now - self.began,
            ncols=columns,
            prefix=f"  {self.name}",
            rate=(self.total - done) / max(self.ends_at - now, 1e-9) if self.ends_at else 0.0,
            bar_format="{desc} {n_fmt}/{total_fmt} |{bar:20}| {elapsed}<{remaining}{postfix}",
            postfix=self.shown.note,
        )


def run(
    command: list[str],
    *,
    name: str,
    log: Path,
    total: int,
    watch: Callable[[], Progress],
    environment: dict[str, str] | None = None,
    minutes: float = 0,
    seconds: float = 0,
) -> None:
    """Run ``command`` until it ends; its output goes to ``log``.

    ``watch`` is asked twice a second for the Progress towards ``total``; ``seconds``: of all, as far as is known before
    it starts. ``minutes`` without a sign of life (alive.py) end it; 0: it may wait for ever. Raises StageFailed with
    the first real error and the last lines of the log when the process fails, stands still, or hangs after its log
    reports a dead engine. Nothing is left then (leftovers.py).
    """
    screen, stalled, due, ours = _Screen(name, total, seconds), "", {}, set()
    with kept(command, log, environment) as launch, log.open(errors="replace") as new:
        life = alive.Watch(launch.folder, log.parent.parent, log, minutes)

        def watched() -> Progress:
            progress = watch()
            life.look(progress.done)
            note = progress.note + life.note or f" waits for {life.waits or 'the model to load'}"
            return replace(progress, note=note) if minutes else progress

        try:
            while launch.keeper.poll() is None:
                screen.look(watched)
                if life.stalled:
                    stalled = _stalled(name, life, launch)
                    break
                if time.monotonic() > _deadline(new.read(), life, due, ours):
                    break
                time.sleep(POLL_SECONDS)
            code, told = launch.keeper.poll(), life.error
            if code == 0:
                screen.look(watch, last=True)
        finally:
            screen.close()
    if stalled:
        raise StageFailed(f"{stalled}\n  log: {log}")
    if code != 0:
        status = f"{name} ended with exit code {code}" if code else f"{name}: an engine died"
        raise StageFailed(report(log, status, told))
