"""A multi-turn task that a program solves, which asks an OpenAI endpoint for the model's turns: docs/MULTI_TURN.md.

The endpoint stands on 127.0.0.1, one for each process of ours; each episode has a key. The program reads ``row.json``
in its working folder and writes ``score.json`` there. Its requests become the steps of an Environment, so that training
and evaluation play it as they play others (rewards/episode.py). A request whose history begins with that of an earlier
one and its answer goes on with that one's tokens; any other begins a sequence of tokens.
"""

import contextlib
import itertools
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Empty, SimpleQueue
from socketserver import ThreadingUnixStreamServer

from verl_tasks import errors
from verl_tasks.places import PYTHON_PATH
from verl_tasks.rewards import completions, container
from verl_tasks.rewards.answers import RewardError, number, read_ground_truth
from verl_tasks.rewards.environment import Environment, Start, Step, Turn
from verl_tasks.rewards.tool_calls import render_calls
from verl_tasks.rows import decoded, tools_of
from verl_tasks.settings import artifacts
from verl_tasks.text import one_line

__all__ = ["environment_of"]  # for tasks

STARTER = Path(__file__).with_name("starter.py")
# What a program gets of our environment variables: no key and no token.
VARIABLES = ("PATH", "HOME", "LANG", "TMPDIR", "VERL_TASK_LOGS", "VERL_TASK_LAUNCH")
MEMORY = 8 * 2**30  # of what each process of a program can write
AT_ONCE, CONTAINERS = 16, 4  # programs of a process of ours, for each core: a container imports anew
MAX_BODY = 16 * 2**20  # bytes of a request
TOLD = 10_000  # bytes of a program's output in the log
MAX_SCORE = 4096  # bytes of score.json that are read
ENDED = None  # in an episode's inbox: the program has


@dataclass
class Call:
    """A request that waits for the model: ``reply`` gets the Turn and the message made of it, or None at the end.
    ``given_up``: whether the program waits no more."""

    request: completions.Request
    given_up: Callable[[], bool]
    reply: SimpleQueue = field(default_factory=SimpleQueue)


class _OfStarter:
    """The inbox of the starter, which asks before any episode (starter.ask): it is answered at once, with a call."""

    def put(self, call: Call) -> None:
        turn = Turn(render_calls([{"name": "tool", "arguments": {}}]))
        call.reply.put((turn, completions.answer(turn, call.request)[0]))


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_) -> None:
        pass

    def do_GET(self) -> None:
        if self._inbox() and self.path == "/v1/models":
            self._send(200, {"object": "list", "data": [{"id": completions.MODEL, "object": "model"}]})
        else:
            self._refuse(404 if self._inbox() else 401, f"{self.path[:80]}: is not served")

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit() and int(length) <= MAX_BODY):
            self.close_connection = True
            return self._refuse(400, f"the body must have a Content-Length of at most {MAX_BODY}")
        body, inbox = self.rfile.read(int(length)), self._inbox()
        if inbox is None:
            return self._refuse(401, "the key is of no live episode")
        if self.path != "/v1/chat/completions":
            return self._refuse(404, f"{self.path[:80]}: only chat completions are served")
        try:
            call = Call(completions.read(body), self._closed)
        except completions.Refused as error:
            return self._refuse(400, str(error))
        inbox.put(call)
        found = call.reply.get()
        if not found or found[0].refused:
            return self._refuse(400, found[0].refused if found else "the episode is over")
        whole = completions.reply(*found, call.request)
        if not call.request.stream:
            return self._send(200, whole)
        self._send(200, "".join(completions.chunks(whole, call.request.usage)), "text/event-stream")

    def _closed(self) -> bool:
        """Whether the program has closed the connection, as a client does whose time is over."""
        try:
            return not self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def _inbox(self) -> SimpleQueue | None:
        return self.server.inboxes.get(self.headers.get("Authorization", "").removeprefix("Bearer "))

    def _refuse(self, status: int, why: str) -> None:
        code = "context_length_exceeded" if why.startswith("context_length_exceeded") else None
        error = {"message": why, "type": "invalid_request_error", "param": None, "code": code}
        self._send(status, {"error": error})

    def _send(self, status: int, content: dict | str, kind: str = "application/json") -> None:
        data = (content if isinstance(content, str) else json.dumps(content)).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class _Server(ThreadingHTTPServer):
    daemon_threads, request_queue_size = True, 1024

    def handle_error(self, *_) -> None:
        """A program that was ended while it waited: nothing to tell."""


class _HandlerOfSocket(_Handler):
    disable_nagle_algorithm = False  # it is of TCP


class _ServerOfSocket(ThreadingUnixStreamServer):
    daemon_threads, request_queue_size, handle_error = True, 1024, _Server.handle_error


class Endpoint:
    """This process's endpoint, and the starter of one command's programs; safe for threads. ``image``: of containers
    for them, which read the folders ``read``; empty: there are none."""

    def __init__(self, command: tuple[str, ...], python: str, image: str, read: tuple[Path, ...]):
        self.image, self.read, self.runtime = image, read, container.runtime_of(image) if image else ""
        self.server = _Server(("127.0.0.1", 0), _Handler)
        key = secrets.token_urlsafe(24)
        self.server.inboxes = self.inboxes = {key: _OfStarter()}
        self.address = f"http://127.0.0.1:{self.server.server_port}/v1"
        self.command, self.numbers, self.live, self.lock = command, itertools.count(1), {}, threading.Lock()
        self.logs = Path(os.environ.get("VERL_TASK_LOGS") or artifacts() / "programs")
        self.logs.mkdir(parents=True, exist_ok=True)
        self.log = self.logs / f"programs-{os.getpid()}.log"
        loaded = command[0] if not image and len(command) == 1 and command[0].endswith(".py") else ""
        self.loading = bool(loaded)
        names = VARIABLES + (container.VARIABLES if image else ())
        self.environment = {name: os.environ[name] for name in names if name in os.environ}
        self.environment |= {"PYTHONPATH": PYTHON_PATH, "OPENAI_BASE_URL": self.address}
        place = tempfile.mkdtemp(prefix="endpoint-") if image else ""  # short enough for a socket
        with self.log.open("ab") as log:
            self.starter = subprocess.Popen(
                [python, STARTER, loaded, place],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=self.environment | {"OPENAI_API_KEY": key},
                cwd=self.logs,
                start_new_session=True,
            )
        servers = [self.server]
        if image:
            self.socket = Path(place) / "socket"
            servers.append(_ServerOfSocket(str(self.socket), _HandlerOfSocket))
            servers[-1].inboxes = self.inboxes
        for work in (self._read, *(server.serve_forever for server in servers)):
            threading.Thread(target=work, daemon=True).start()

    def start(self, row: dict) -> "Live":
        """A program for ``row``. Raises RewardError where none can be started."""
        live = Live(next(self.numbers), self, Path(tempfile.mkdtemp(prefix="episode-")))
        truth = read_ground_truth(row["reward_model"]["ground_truth"])
        told = {"prompt": decoded(row["prompt"]), "ground_truth": truth, "extra_info": row["extra_info"]}
        (live.folder / "row.json").write_text(json.dumps(told, default=str))
        self.inboxes[live.key], self.live[live.number] = live.inbox, live
        request = {"number": live.number, "folder": str(live.folder), "command": self.command, "memory": MEMORY}
        request |= {"ends": [], "environment": self.environment | {"OPENAI_API_KEY": live.key}}
        if self.image:
            there = self.image, live.folder, self.socket, self.read
            request["command"] = container.command(self.runtime, *there, self.command)
            # A container has limits of its own, and podman would take over ours.
            request |= {"memory": 0, "ends": container.end(self.runtime, live.folder)}
        self.send(request)
        return live

    def send(self, request: dict) -> None:
        """Send ``request`` to the starter. Raises RewardError where that has ended."""
        try:
            with self.lock:
                self.starter.stdin.write(json.dumps(request).encode() + b"\n")
                self.starter.stdin.flush()
        except OSError as error:
            raise RewardError(f"the process that starts {self.command[0]} has ended; log: {self.log}") from error

    def _read(self) -> None:
        for line in self.starter.stdout:
            reply = json.loads(line)
            self.loading = False
            if live := self.live.get(reply["number"]):  # 0: the starter has loaded the program
                live.code = reply["code"]
                live.inbox.put(ENDED)
        for live in list(self.live.values()):
            live.inbox.put(ENDED)


class Live:
    """A live episode's program: its ``key``, its ``folder``, what it asks, and its exit ``code`` once it has ended."""

    def __init__(self, number: int, endpoint: Endpoint, folder: Path):
        self.number, self.endpoint, self.folder = number, endpoint, folder
        self.key, self.inbox, self.code = secrets.token_urlsafe(24), SimpleQueue(), None

    def score(self) -> float | None:
        """What it wrote into score.json, a number or an object with ``score``; None after a crash, or without one."""
        try:
            found = json.loads(_bytes(self.folder / "score.json", 0, MAX_SCORE))
        except (OSError, ValueError, RecursionError):
            return None
        return number(found.get("score") if isinstance(found, dict) else found) if self.code == 0 else None

    def problem(self) -> str:
        """Why there is no score: what a program of Python raised, and the line of its own file, else what it printed
        last, and what its score.json has."""
        if self.code is None and self.endpoint.loading:
            file = Path(self.endpoint.command[0]).name
            return f'the import of {file} has not ended: its work must stand under `if __name__ == "__main__":`'
        if self.code is None:
            return "the program has not ended"
        *_, last = ["no output", *filter(None, map(str.strip, self._printed().splitlines()))]
        place = errors.printed_place(self._printed(), self.endpoint.read) if self.code else ""
        if not self.code:
            without = f"the program ended without a number in score.json, {self._written()}"
            return f"{without}; the last that it printed: {one_line(last, 200)}"
        return f"the program failed with exit code {self.code}: {one_line(last, 300)}{f' ({place})' if place else ''}"

    def _written(self) -> str:
        """What is in score.json."""
        try:
            written = _bytes(self.folder / "score.json", 0, MAX_SCORE + 1)
        except OSError:
            return "which is not in its working folder"
        longer = f" in more than {MAX_SCORE} bytes" if len(written) > MAX_SCORE else ""
        return f"which has {one_line(written.decode(errors='replace'), 100)!r}{longer}".replace(self.key, "(key)")

    def _printed(self) -> str:
        """The end of its output."""
        try:
            log = self.folder / "log.txt"
            printed = _bytes(log, max(0, log.stat().st_size - TOLD), TOLD).decode(errors="replace")
        except OSError:
            return ""
        return printed.replace(self.key, "(key)")

    def close(self, told: str) -> None:
        """End the program, and leave what it printed in the log, under ``told``. A later call does nothing."""
        if self.endpoint.live.pop(self.number, None) is None:
            return
        self.endpoint.inboxes.pop(self.key)
        while not self.inbox.empty():
            if call := self.inbox.get():
                call.reply.put(None)
        if self.code is None:
            self.endpoint.send({"end": self.number})
        self.inbox.put(ENDED)  # for a step that nobody waits for any more
        printed = self._printed()
        self.endpoint.logs.mkdir(parents=True, exist_ok=True)  # `make clean` may have removed it
        with self.endpoint.log.open("a") as log:
            log.write(f"episode {self.number}, {told}\n{printed}")
        shutil.rmtree(self.folder, ignore_errors=True)


def _bytes(file: Path, start: int, most: int) -> bytes:
    """Up to ``most`` bytes of ``file``, of a program, from ``start``; a pipe in its place is not
    waited for, a link not followed: a container could name any file of ours."""
    with open(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW), "rb", buffering=0) as found:
        found.seek(start)
        return found.read(most) or b""


_STARTING, _STARTED = threading.Lock(), {}


def _endpoint(command: tuple[str | Path, ...], python: str) -> Endpoint:
    """This process's one; a fork has its own. Raises RewardError where AGENT_IMAGE cannot be used."""
    read = tuple(dict.fromkeys(each.absolute().parent for each in command if isinstance(each, Path)))
    with _STARTING:
        key = os.getpid(), command, python
        if key not in _STARTED:
            image = os.environ.get("AGENT_IMAGE", "")
            _STARTED[key] = Endpoint(tuple(map(str, command)), python, image, read)
        return _STARTED[key]


class _OfProgram:
    """The episodes of a program; ``environment_of`` gives the attributes that have no value here."""

    command: tuple[str | Path, ...]
    python: str
    failed: float
    at_once: int
    contained = True  # AGENT_IMAGE is heeded
    patience = None  # seconds for a step; None: whoever plays it limits them

    def reset(self, row: dict) -> Start:
        self.live = _endpoint(self.command, self.python).start(row)
        self.histories: list[tuple[list, list]] = []  # of each sequence: its tools, its messages
        self.unread: list[tuple[completions.Request, Turn, dict]] = []  # turns whose request was given up
        self.call, self.place, self.calls, self.index = None, 0, 0, row["extra_info"].get("index")
        self.given_up, self.why = 0, ""
        return Start(decoded(row["prompt"]), tools_of(row) or [], of_program=True)

    def step_turn(self, turn: Turn | None) -> Step:
        """Answer the program with ``turn``; what it asks next, or its score."""
        malformed = self._answer(turn) if turn else False
        with contextlib.suppress(Empty):
            while (call := self.live.inbox.get(timeout=self.patience)) is not ENDED:
                if call.given_up():
                    self.given_up += 1
                    call.reply.put(None)
                elif not self._answered_before(call):
                    self.call, self.calls = call, self.calls + 1
                    return self._asks(call.request, int(malformed))
        score = self.live.score()
        if score is None:
            self.why = self.live.problem()
            return Step(reward=self.failed, done=True, readable=False, broke=self.why, failed=int(malformed))
        return Step(reward=score, done=True, failed=int(malformed))

    def _answered_before(self, call: Call) -> bool:
        """Whether ``call`` repeats a request that was given up while the model answered it: this is the answer."""
        for unread in self.unread:
            request, turn, told = unread
            asks, asked = ((each.messages, each.tools, each.asked) for each in (call.request, request))
            if asks == asked:
                self.unread.remove(unread)
                call.reply.put((turn, told))
                return True
        return False

    def _answer(self, turn: Turn) -> bool:
        if turn.refused:
            self.histories.pop()
            self.call, call = None, self.call
            call.reply.put((turn, {}))
            return False
        told, malformed = completions.answer(turn, self.call.request)
        tools, messages = self.histories[self.place]
        self.histories[self.place] = tools, [*messages, completions.message(**told)]
        if self.call.given_up():
            self.given_up += 1
            self.unread.append((self.call.request, turn, told))
        self.call.reply.put((turn, told))
        self.call = None
        return malformed

    def _asks(self, request: completions.Request, malformed: int) -> Step:
        for place in reversed(range(len(self.histories))):
            tools, messages = self.histories[place]
            new = request.messages[len(messages) :]
            read = new and all(message["role"] in ("user", "tool") for message in new)
            if read and (tools, messages) == (request.tools, request.messages[: len(messages)]):
                self.place, self.histories[place] = place, (tools, request.messages)
                return Step(new, onto=place, asked=request.asked, failed=malformed)
        self.histories.append((request.tools, request.messages))
        self.place = len(self.histories) - 1
        return Step(start=Start(request.messages, request.tools), asked=request.asked, failed=malformed)

    def close(self) -> None:
        if self.call:
            self.call.reply.put(None)
        code = "was ended" if self.live.code is None else f"exit code {self.live.code}"
        told = f"row {self.index}: {code}, {self.calls} turns, {len(self.histories)} sequences"
        if self.given_up:  # of a client with a time limit
            told += f", {self.given_up} requests that the program gave up before their answer"
        why = self.live.problem() if self.live.endpoint.loading else self.why
        self.live.close(f"{told}; {why}" if why else told)


def environment_of(*command: str | Path, python: str = sys.executable, failed: float = 0.0) -> type[Environment]:
    """The class of the episodes of a program: one file of Python, which ``python`` loads once and forks for each (it
    does its work under ``if __name__ == "__main__":``), or any command. ``failed``: the reward of an episode without a
    score. Nothing is started before the first one. With AGENT_IMAGE the command runs in a container of that image, that
    reads the folder of each file given as a Path."""
    most = (CONTAINERS if os.environ.get("AGENT_IMAGE") else AT_ONCE) * (os.cpu_count() or 1)
    given = {"command": command, "python": python, "failed": failed, "at_once": most}
    return type("OfProgram", (_OfProgram,), given)
