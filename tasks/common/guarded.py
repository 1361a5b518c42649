"""A reward in its own process, for answers and data that may break it: time limit per call, no network."""

import contextlib
import functools
import gc
import json
import multiprocessing
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from verl_tasks.errors import said, whole
from verl_tasks.process import die_with_parent

CALL_SECONDS = 30.0  # longer than a sandbox allows for an answer and for its new process
FIRST_SECONDS = 150.0  # a reward may load libraries at its first call
MEMORY = 4 * 2**30  # bytes that a call may add


@dataclass(frozen=True)
class Result:
    """A call: ``score``; ``acc`` and ``format``, None where the reward has none; ``honest``, what the task's
    ``is_right`` says, None without one; ``problem``, why there is no score, else empty; ``fatal``, whether that was an
    error of Guarded's ``fatal``; ``trace``, its traceback. ``needs``: what the call found beside its scores."""

    score: float = 0.0
    acc: float | None = None
    format: float | None = None
    honest: bool | None = None
    problem: str = ""
    fatal: bool = False
    trace: str = ""
    needs: list | None = None

    @property
    def right(self) -> bool:
        """``acc`` is 1; for a reward without ``acc``, the score is 1 or more."""
        return not self.problem and (self.score if self.acc is None else self.acc) >= 1


@functools.lru_cache(4096)
def _result(line: bytes) -> Result:
    return Result(**json.loads(line))


class Guarded:
    """``compute_score`` over ``rows`` in a forked process, which is replaced when a call takes longer than ``seconds``.
    The reward may start processes of its own, as verl's math_verify does; they end with this one.

    ``rows``: each has what the reward gets besides the response, ``source``, ``truth`` and ``extra``, and a right
    ``demonstration`` or None. ``network``: let it connect, for a judge, which limits its own time. ``fatal``: an error
    of the reward to raise here, with its message. ``calls`` counts. ``known``: the row whose demonstration a new
    process scores first, in up to FIRST_SECONDS.
    """

    def __init__(
        self,
        compute_score: Callable,
        rows: Sequence,
        network: bool = False,
        seconds: float = CALL_SECONDS,
        fatal: type[Exception] | tuple = (),
    ):
        self.compute_score, self.rows, self.network, self.fatal = compute_score, rows, network, fatal
        self.seconds, self.first = (None, None) if network else (seconds, FIRST_SECONDS)
        self.calls = self.known = 0
        self._process = None

    def scores(self, text: str, indices: list[int]) -> list[Result]:
        """The results of ``text`` for the rows ``indices``, up to the first that has a problem."""
        if not self._process:
            self._start()
            loaded = self._exchange(self.rows[self.known].demonstration or "", [self.known], self.first)
            if not self._process:
                return loaded
        return self._exchange(text, indices, self.seconds)

    def _exchange(self, text: str, indices: list[int], seconds: float | None) -> list[Result]:
        results: list[Result] = []
        self._pipe.send_bytes(json.dumps([text, indices]).encode())
        for _ in indices:
            self.calls += 1
            try:
                if not self._pipe.poll(seconds):
                    raise OSError(f"took longer than {seconds:g} s")
                results.append(_result(self._pipe.recv_bytes()))
            except (EOFError, OSError) as error:
                results.append(Result(problem=str(error) or "the process died"))
                self.close()
            if results[-1].fatal:
                self.close()
                raise self.fatal(results[-1].problem)
            if results[-1].problem:
                break
        return results

    def _start(self) -> None:
        fork = multiprocessing.get_context("fork")
        self._pipe, theirs = fork.Pipe()
        self._process = fork.Process(target=self._serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def close(self) -> None:
        """End the process; a later call starts a new one."""
        if self._process:
            with contextlib.suppress(ProcessLookupError):  # it has not come as far as its group
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.kill()
            self._process.join()
            self._pipe.close()
            self._process = None

    # ---- in the process

    def _serve(self, pipe) -> None:
        die_with_parent()
        gc.freeze()  # else a collection copies all pages
        os.setpgid(0, 0)
        multiprocessing.current_process().daemon = False  # a daemon may start no process
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, resource.RLIM_INFINITY))
        if not self.network:
            sys.addaudithook(_no_network)
        is_right = getattr(_module(self.compute_score), "is_right", None)  # (response, truth)
        while True:
            text, indices = json.loads(pipe.recv_bytes())
            for index in indices:
                result = self._scored(text, self.rows[index], is_right)
                pipe.send_bytes(json.dumps(result).encode())
                if "problem" in result:
                    break

    def _scored(self, text: str, row, is_right: Callable | None) -> dict:
        try:
            result = self.compute_score(row.source, text, row.truth, row.extra)
            result = result if isinstance(result, dict) else {"score": result}
            honest = None if is_right is None else bool(is_right(text, row.truth))
            parts = {name: float(result[name]) for name in ("acc", "format") if result.get(name) is not None}
            return {"score": float(result["score"]), "honest": honest, "needs": result.get("needs"), **parts}
        except self.fatal as error:
            return {"problem": str(error), "fatal": True}
        except BaseException as error:  # SystemExit and RecursionError too: the answer caused it
            return {"problem": said(error, 400), "trace": whole(error)}


def asks_judge(compute_score: Callable) -> bool:
    """Whether the reward's module uses verl_tasks.rewards.judge."""
    judge = "verl_tasks.rewards.judge"
    named = vars(_module(compute_score)).values() if _module(compute_score) else ()
    return any(judge in (getattr(value, "__module__", ""), getattr(value, "__name__", "")) for value in named)


def _module(compute_score: Callable):
    return sys.modules.get(getattr(compute_score, "func", compute_score).__module__)


def _no_network(event: str, arguments: tuple) -> None:
    used = event in ("socket.connect", "socket.bind") and arguments[0].family in (socket.AF_INET, socket.AF_INET6)
    if used or event == "socket.getaddrinfo":
        raise PermissionError("no network for a reward that asks no judge")
