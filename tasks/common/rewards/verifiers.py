"""An environment of `verifiers` or OpenEnv as a multi-turn task: its rows as examples, its rollouts as episodes.

Their packages clash with those of the stacks, and an environment is code of other people. All are installed into a
folder of their own and run in a process of their own (rewards/verifiers_server/), one for each process of ours. See
docs/MULTI_TURN.md.
"""

import hashlib
import itertools
import json
import os
import re
import subprocess
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Empty, SimpleQueue

from verl_tasks import errors
from verl_tasks.rewards.answers import RewardError, read_ground_truth
from verl_tasks.rewards.environment import Environment, Start, Step
from verl_tasks.rewards.tool_calls import Response
from verl_tasks.rows import DataError, Example, chat, decoded
from verl_tasks.settings import artifacts
from verl_tasks.text import one_line

__all__ = ["Package", "environment_of", "examples"]  # for tasks

SERVER = Path(__file__).with_name("verifiers_server")
V1, OLD = "verifiers>=0.4,<0.5", "verifiers>=0.1.14,<0.4"  # 0.4 has no environments of the old form
OPENENV = "openenv>=0.10,<0.11"
MAX_LINE = 16 * 2**20  # bytes of a reply
MEMORY = 32 * 2**30  # of the process's address space
START_SECONDS, SECONDS = 600, 120  # to load an environment and its data, to reply
ROWS = 100  # in a reply
# What the process gets of our environment variables: no key and no token.
VARIABLES = ("PATH", "HOME", "LANG", "TMPDIR", "HF_HOME", "HF_HUB_OFFLINE", "VERL_TASK_LOGS", "VERL_TASK_LAUNCH")


@dataclass(frozen=True)
class Package:
    """``env``: what pip installs beside verifiers, and after a colon the module of the environment (default: the
    package's) or a class: ``reasoning-gym:verifiers.ReasoningGymEnv``; or the URL of an OpenEnv server. ``config``: its
    arguments, as JSON has them."""

    env: str
    config: dict

    @property
    def requirement(self) -> str:
        """Of pip."""
        return OPENENV if "://" in self.env else self.env.partition(":")[0]

    @property
    def name(self) -> str:
        """The module, class or URL."""
        if "://" in self.env:
            return self.env
        package, _, name = self.env.partition(":")
        return name or re.split(r"[=\[]", package)[0].replace("-", "_")

    @property
    def folder(self) -> Path:
        """Of its Python environment."""
        key = json.dumps([sys.version_info[:2], V1, OLD, self.requirement]).encode()
        return artifacts() / "verifiers" / hashlib.blake2b(key, digest_size=6).hexdigest()

    @property
    def installed(self) -> Path:
        """A file that is there once all is installed."""
        return self.folder / "installed"

    def install(self) -> None:
        """Install it, unless it is: with the verifiers that its code imports. Raises DataError with what pip says."""
        if self.installed.exists():
            return
        print(f"  installing {self.requirement} into {self.folder}", flush=True)
        pip = [self.folder / "bin/python", "-m", "pip", "install", "-q", "--no-compile"]
        self._run(sys.executable, "-m", "venv", "--clear", self.folder)
        self._run(*pip, "--no-deps", self.requirement)
        sources = b"".join(path.read_bytes() for path in self.folder.glob("lib/*/site-packages/**/*.py"))
        of_v1 = b"verifiers.v1" in sources and b"import verifiers as" not in sources
        verifiers = [] if "://" in self.env else [V1 if of_v1 else OLD]
        self._run(*pip, *verifiers, self.requirement)
        self.installed.touch()

    def _run(self, *command) -> None:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        if done.returncode:
            problem = _last_error(done.stdout.decode(errors="replace"))
            raise DataError(f"{self.requirement}: cannot be installed: {problem}")


def _last_error(said: str) -> str:
    """The line of pip's output that says what went wrong: the last error, else the last line. Where nothing matches
    because of this Python's version, pip says so before."""
    lines = list(filter(None, map(str.strip, said.splitlines()))) or ["no output"]
    wrong = [line for line in lines if line.startswith("ERROR:")] or lines[-1:]
    version = [f"{line}; this is Python {sys.version.split()[0]}" for line in wrong if "Requires-Python" in line]
    return one_line((version if "No matching distribution" in wrong[-1] and version else wrong)[-1], 300)


class Process:
    """The process of ``package``; safe for threads. It ends with ours, whose end closes its input."""

    def __init__(self, package: Package):
        if not package.installed.exists():
            raise RewardError(f"{package.name}: is not installed in {package.folder}: run make data")
        self.name, self.log, self.numbers = package.name, package.folder / f"{os.getpid()}.log", itertools.count(1)
        self.waiting: dict[int, SimpleQueue] = {0: SimpleQueue()}
        self.outbox, self.gone = SimpleQueue(), ""  # a finalizer may put into such a queue, whatever its thread holds
        with self.log.open("ab") as log:
            self.child = subprocess.Popen(
                [package.folder / "bin/python", "-I", SERVER, package.name, json.dumps(package.config), str(MEMORY)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={name: os.environ[name] for name in VARIABLES if name in os.environ},
                start_new_session=True,
            )
        for work in (self._read, self._write):
            threading.Thread(target=self._until_its_end, args=(work,), daemon=True).start()
        self._reply(0, START_SECONDS)

    def send(self, number: int, **request) -> None:
        """Send ``request``, whose reply gets the ``number``; 0: nobody reads it."""
        self.outbox.put(json.dumps({"n": number, **request}).encode() + b"\n")

    def ask(self, **request) -> dict:
        """The reply to ``request``. Raises RewardError: what the environment raised, or that its process is gone or too
        slow."""
        number = next(self.numbers)
        self.waiting[number] = SimpleQueue()
        self.send(number, **request)
        return self._reply(number, SECONDS)

    def _reply(self, number: int, seconds: float) -> dict:
        try:
            reply = {"error": self.gone} if self.gone else self.waiting[number].get(timeout=seconds)
        except Empty:
            reply = {"error": f"no reply in {seconds} s"}
        del self.waiting[number]
        if "error" in reply:
            raise RewardError(f"{self.name}: {str(reply['error'])[:500]}; log: {self.log}")
        return reply

    def _until_its_end(self, work: Callable[[], None]) -> None:
        problem = "its process has ended"
        try:
            work()
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            problem = f"{problem}: {type(error).__name__}: {error}"
        self.child.kill()
        self.gone = self.gone or problem
        for waiting in list(self.waiting.values()):
            waiting.put({"error": self.gone})

    def _read(self) -> None:
        while line := self.child.stdout.readline(MAX_LINE):
            reply = json.loads(line)
            if waiting := self.waiting.get(reply["n"]):
                waiting.put(reply)

    def _write(self) -> None:
        while True:
            self.child.stdin.write(self.outbox.get())
            self.child.stdin.flush()


_STARTING, _STARTED = threading.Lock(), {}


def process_of(package: Package) -> Process:
    """This process's one for ``package``; a fork has its own. Raises RewardError."""
    with _STARTING:
        key = os.getpid(), package.env, json.dumps(package.config)
        if key not in _STARTED:
            _STARTED[key] = Process(package)
        return _STARTED[key]


def examples(package: Package) -> Iterable[Example]:
    """The environment's rows; its own evaluation rows are the test split. Rows of one prompt stay on one side of a
    split, unless the prompt cannot tell problems apart: more than a tenth of all rows have the commonest one. Two rows
    are equal when all but their number is. Of rows without an end it is a generator. Installs the environment first.
    Raises DataError."""
    package.install()
    if _page(package, "train", 0)["endless"]:
        return (_example(row) for row in _rows(package, "train"))
    found = [(split, row) for split in ("train", "test") for row in _rows(package, split)]
    prompts = [json.dumps(row.get("prompt"), sort_keys=True) for _, row in found]
    alike = 10 * max(Counter(prompts).values(), default=0) > len(prompts)
    return [
        replace(_example(row), split=split, group=None if alike else prompt)
        for (split, row), prompt in zip(found, prompts, strict=True)
    ]


def _rows(package: Package, split: str) -> Iterator[dict]:
    first = 0
    while rows := _page(package, split, first)["rows"]:
        yield from rows
        first += len(rows)


def _page(package: Package, split: str, first: int) -> dict:
    """The next rows of the side ``split``, and whether they are endless. Raises DataError."""
    try:
        return process_of(package).ask(split=split, first=first, count=ROWS)
    except RewardError as error:
        raise DataError(str(error)) from error


def _example(row: dict) -> Example:
    prompt = row.get("prompt") or "The environment begins."
    parts = chat(prompt, row.get("system_prompt")) if isinstance(prompt, str) else prompt
    return Example(parts, row, key=json.dumps(row | {"example_id": 0, "idx": 0}, sort_keys=True))


def environment_of(package: Package) -> type[Environment]:
    """The class of the package's episodes; nothing is started before the first one."""

    class Verifiers:
        numbers = itertools.count()

        def reset(self, row: dict) -> Start:
            """Without a ground truth (`make batch`) it is the environment's first row, with the prompt of ``row``."""
            self.process, self.number = process_of(package), next(self.numbers)
            truth = read_ground_truth(row["reward_model"]["ground_truth"])
            begun = self.process.ask(episode=self.number, row=truth or None)
            weakref.finalize(self, self.process.send, 0, episode=self.number, end=True)  # also of one that is cut off
            self.over = begun if begun.get("done") else None  # before its first turn
            shown = begun["messages"] if truth and not self.over else decoded(row["prompt"])
            return Start(shown, begun.get("tools", []))

        def step(self, action: Response) -> Step:
            message = {"content": action.text, "thinking": action.thinking, "calls": action.calls}
            found = self.over or self.process.ask(episode=self.number, message=message)
            done, broke = found.get("done", False), found.get("broke", "")
            if broke:
                errors.log(RewardError(f"{package.name}: an episode failed: {broke}; log: {self.process.log}"))
            news = found.get("messages", []), found.get("reward", 0.0), done, found.get("failed", 0)
            return Step(*news, readable=not broke, broke=broke)

    return Verifiers
