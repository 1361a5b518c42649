"""Starts the programs of episodes for another process: a line of JSON a request, one for each program that ended.

It runs alone (rewards/program.py), with the standard library: its Python may be another one than ours. A Python program
is loaded once, and forked for each episode: its imports take longer than many an episode. All programs end with it, and
it ends with its standard input, and removes their folders. Arguments: that program's file, or empty; a folder to remove
too, or empty: then no program has a container.
"""

import asyncio
import contextlib
import ctypes
import functools
import gc
import glob
import json
import os
import resource
import runpy
import select
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator

FILE_BYTES = 2**30  # of a file that a program writes, its log too
SECONDS = 30  # for the endpoint's answer to the starter
LOOK_MS = 50  # between two looks at who started us, during the import
TOOL = {"type": "function", "function": {"name": "tool", "description": "", "parameters": {"type": "object"}}}


def run(request: dict, loaded: str) -> None:
    """Become the program of ``request``: in a session and a folder of its own, with its output in a log."""
    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.chdir(request["folder"])
    log = os.open("log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if request["memory"]:
        # Of what it can write: Node.js reserves more addresses than it uses.
        resource.setrlimit(resource.RLIMIT_DATA, (request["memory"], request["memory"]))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
    os.environ.clear()
    os.environ.update(request["environment"])
    os.closerange(3, 256)
    if not request["ends"]:
        adopt()
    if not loaded:
        try:
            os.execvp(request["command"][0], request["command"])
        except OSError as error:
            raise SystemExit(f"{request['command'][0]}: {error.strerror}") from None
    sys.argv = [loaded]
    with contextlib.suppress(AttributeError, ValueError):  # an import may have replaced it
        # What it printed stands before its traceback, and is there if it is killed.
        sys.stdout.reconfigure(line_buffering=True)
    runpy.run_path(loaded, run_name="__main__")


def child(request: dict, loaded: str) -> None:
    """``run``, and the end of the process with Python's exit code."""
    code = 1
    try:
        run(request, loaded)
        code = 0
    except SystemExit as ends:
        code = ends.code if isinstance(ends.code, int) else int(ends.code is not None)
        if isinstance(ends.code, str):
            print(ends.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def adopt() -> None:
    """Orphans below this process become its children. A program adopts its own: they become ours as it ends."""
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def kill(leader: int) -> None:
    """End a program's process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def children() -> set[int]:
    """Of this process."""
    return {int(child) for file in glob.glob("/proc/self/task/*/children") for child in open(file).read().split()}


def kill_left(kept: set[int]) -> bool:
    """End the children but those ``kept``: what programs have left in sessions of their own; whether there are any."""
    left = children() - kept
    for child in left:
        os.kill(child, signal.SIGKILL)  # until it is waited for, its number is its own
    return bool(left)


def end_with(requests: int, imported: threading.Event) -> None:
    """End this process where ``requests`` end before the program is ``imported``: an import may never return."""
    poll = select.poll()
    poll.register(requests, 0)  # it tells a hang-up alone
    while not imported.is_set():
        if poll.poll(LOOK_MS):
            kill_left(set())
            os._exit(1)


def end_container(request: dict) -> None:
    """Start what ends the container of a program, where it has one: that is no child of the program."""
    silent = [(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDWR, 0), (os.POSIX_SPAWN_DUP2, 0, 1)]
    silent += [(os.POSIX_SPAWN_DUP2, 0, 2)]
    if ends := request["ends"]:
        os.posix_spawnp(ends[0], ends, request["environment"], file_actions=silent, setpgroup=0)


def ended() -> Iterator[tuple[int, int]]:
    """The children that have ended, and their exit codes."""
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            yield found[0], os.waitstatus_to_exitcode(found[1])


def programs_ended(live: dict[int, dict]) -> Iterator[tuple[int, int]]:
    """The numbers and exit codes of the programs that have ended; takes them out of ``live``, and ends what is left."""
    for leader, code in ended():
        if request := live.pop(leader, None):  # else it ended a container
            kill(leader)  # what it left in its group
            if code:
                end_container(request)
            yield request["number"], code


def end(number: int, live: dict[int, dict]) -> None:
    """End the program of that number, where it still runs."""
    for leader in [leader for leader, request in live.items() if request["number"] == number]:
        kill(leader)
        os.kill(leader, signal.SIGKILL)  # it has not come as far as its group


def woken_by_ends() -> int:
    """A pipe that can be read when a child has ended."""
    wakes, wake = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return wakes


def load(file: str) -> None:
    """Import what the program ``file`` imports, that no fork has to; also what `openai` imports and builds with its
    first requests, which takes longer than many an episode."""
    sys.path.insert(0, os.path.dirname(file))
    key = os.environ.pop("OPENAI_API_KEY")  # a client that an import makes must not keep it
    tried(lambda: runpy.run_path(file, run_name="loaded"))
    if openai := sys.modules.get("openai"):
        tried(read_certificates_once)
        tried(lambda: ask(openai, key))
    gc.freeze()  # its collector would copy the pages of a fork


def tried(act: Callable[[], object]) -> None:
    """``act``; what it raises goes to the log, and each program will say it too."""
    try:
        act()
    except BaseException:
        traceback.print_exc()


def ask(openai, key: str) -> None:
    """A request of each client of `openai`; the endpoint answers the starter's ``key`` with a call of ``TOOL``."""
    said = {"model": "policy", "messages": [{"role": "user", "content": ""}], "tools": [TOOL]}
    how = {"api_key": key, "max_retries": 0, "timeout": SECONDS}
    openai.OpenAI(**how).chat.completions.create(**said)

    async def again() -> None:
        await openai.AsyncOpenAI(**how).chat.completions.create(**said)

    asyncio.run(again())


def read_certificates_once() -> None:
    """Each client of httpx reads a file of certificates, a third of an episode's work; the forks have what is read."""
    for name in ("httpx", "httpx2"):  # which of them depends on the version of openai
        if default := sys.modules.get(f"{name}._transports.default"):
            default.create_ssl_context = functools.cache(default.create_ssl_context)


def main(loaded: str, place: str) -> None:
    """Serve standard input until its end."""
    # What a program's imports print or read is not of our pipes.
    requests, replies = os.dup(0), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    if not place:
        adopt()
    if loaded:
        watch = threading.Thread(target=end_with, args=(requests, done := threading.Event()))
        watch.start()
        load(loaded)
        done.set()
        watch.join()  # no fork has a thread
        sys.stdout.flush()  # else each fork says it again
        print(json.dumps({"number": 0}), file=replies, flush=True)
    imported = children()  # what an import started serves all programs
    wakes = woken_by_ends()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: whoever started us ends us
    live, waiting = {}, b""  # requests by the process that leads the program's group
    while True:
        ready, _, _ = select.select([requests, wakes], [], [])
        if wakes in ready:
            os.read(wakes, 4096)
            for number, code in programs_ended(live):
                print(json.dumps({"number": number, "code": code}), file=replies, flush=True)
            if not place:
                kill_left(live.keys() | imported)
        if requests in ready:
            new = os.read(requests, 2**20)
            if not new:
                break
            *lines, waiting = (waiting + new).split(b"\n")
            for request in map(json.loads, lines):
                if "end" in request:
                    end(request["end"], live)
                elif leader := os.fork():
                    live[leader] = request
                else:
                    child(request, loaded)
    for leader, request in live.items():
        kill(leader)
        end_container(request)
    while not place and kill_left(set()):
        os.waitpid(-1, 0)
    for folder in filter(None, [place, *(request["folder"] for request in live.values())]):
        shutil.rmtree(folder, ignore_errors=True)  # whoever started us may have been killed


if __name__ == "__main__":
    main(*sys.argv[1:])
