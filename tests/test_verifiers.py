"""rewards/verifiers.py: environments of verifiers and OpenEnv in a process of their own, and what that process may do
wrong."""

import json
import socket
import subprocess
import sys
import threading
from functools import partial
from itertools import islice

import pytest

from verl_tasks.data.prepare import prepare
from verl_tasks.rewards import verifiers
from verl_tasks.rewards.answers import RewardError
from verl_tasks.rewards.environment import begun, replayed, retold, stepped
from verl_tasks.rewards.tool_calls import render_calls
from verl_tasks.rewards.verifiers import Package, Process, environment_of, examples, process_of
from verl_tasks.rows import DataError, chat, read_rows, rl_row
from verl_tasks.settings import load_settings

READY = 'import json, os, sys, time\nprint(json.dumps({"n": 0}), flush=True)\n'
# A package of other people: a guessing game, one with a tool, and what cannot be played.
GAMES = '''
import verifiers as vf
from datasets import Dataset


class Guess(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        print("this is not a reply")
        guess, truth = int(messages[-1].content), int(state["answer"])
        if guess == truth:
            state["right"], state["final_env_response"] = True, [{"role": "user", "content": "right"}]
        return [{"role": "user", "content": "more" if guess < truth else "less"}]


class Forgets(Guess):
    async def get_prompt_messages(self, state):
        return [{"role": "user", "content": f"turn {len(state['trajectory'])}"}]


def right(state):
    return float(state.get("right", False))


def five(completion):
    return float(completion[-1].content == "5")


def groups(completions):
    return [0.0 for _ in completions]


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def load_environment(kind: str = "guess"):
    rows = Dataset.from_list([{"question": "A number up to 9?", "answer": str(i)} for i in range(150)])
    if kind == "tools":
        return vf.ToolEnv(tools=[add], dataset=rows, eval_dataset=rows, rubric=vf.Rubric(funcs=[five]))
    made = {"guess": Guess, "forgets": Forgets}.get(kind, Guess)
    return made(dataset=rows, rubric=vf.Rubric(funcs=[groups if kind == "groups" else right]), max_turns=4)
'''


# The same for verifiers 0.4, with a turn of an Env, with a tool server, and with a shell.
GAMES_V1 = """
import itertools

import verifiers.v1 as vf

from games_v1.tool import Adder

__all__ = ["Numbers", "Guesses"]


class Data(vf.TaskData):
    answer: int


class Config(vf.TasksetConfig):
    tools: bool = False
    endless: bool = False
    messages: bool = False


class Number(vf.Task[Data]):
    @vf.reward
    async def right(self, trace) -> float:
        return float(trace.last_reply == str(self.data.answer))


class Numbers(vf.Taskset[Number, Config]):
    @property
    def bounded(self):
        return not self.config.endless

    def load(self):
        for number in itertools.count() if self.config.endless else range(150):
            prompt = "A number up to 9?"
            if self.config.messages:
                prompt = [vf.SystemMessage(content="Guess."), vf.UserMessage(content=prompt)]
            yield Number(Data(prompt=prompt, answer=number), self.config.task)

    @classmethod
    def toolsets(cls, config):
        return [Adder(vf.ToolsetConfig())] if config.tools else []


class GuessesConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class Guesses(vf.Env[GuessesConfig]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as talk:
            said = await talk.turn()
            while not said.terminated and int(said.last_reply) != task.data.answer:
                said = await talk.turn("more" if int(said.last_reply) < task.data.answer else "less")
"""
TOOL_V1 = '''
import verifiers.v1 as vf


class Adder(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = None

    @vf.tool
    def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        return a + b


if __name__ == "__main__":
    Adder.run()
'''
# What `openenv init` writes, but with an end.
SERVER_OF_OPENENV = """
from openenv.core.env_server import Action, Environment, Observation, State, create_app


class Guess(Action):
    number: int


class Answer(Observation):
    text: str


class Guessing(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.truth, self.turns = (seed or 0) % 10, 0
        return Answer(text="A number up to 9?")

    def step(self, action):
        if action.number > 99:
            raise RuntimeError("it broke")
        self.turns += 1
        right = action.number == self.truth
        return Answer(text="right" if right else "wrong", done=right, reward=0.75 if right else 0.25)

    @property
    def state(self):
        return State(step_count=self.turns)


app = create_app(Guessing, Guess, Answer, max_concurrent_envs=8)
"""


@pytest.fixture(autouse=True)
def own_artifacts(monkeypatch, tmp_path_factory):
    """All tests of this file share what they install."""
    monkeypatch.setenv("ARTIFACTS", str(tmp_path_factory.getbasetemp() / "verifiers"))


def row_of(example) -> dict:
    return rl_row("test", example.messages(), example.ground_truth, "test", 0)


# ---- the process, without verifiers


def served(monkeypatch, tmp_path, code: str) -> Package:
    """A package that counts as installed, whose server is ``code``."""
    (tmp_path / "server.py").write_text(code)
    monkeypatch.setattr(verifiers, "SERVER", tmp_path / "server.py")
    package = Package(f"package-{tmp_path.name}", {})
    (package.folder / "bin").mkdir(parents=True)
    (package.folder / "bin/python").symlink_to(sys.executable)
    package.installed.touch()
    return package


@pytest.mark.parametrize(
    ("env", "requirement", "name"),
    [
        ("reverse-text", "reverse-text", "reverse_text"),
        ("reverse-text==0.1.4", "reverse-text==0.1.4", "reverse_text"),
        ("reverse-text[a,b]", "reverse-text[a,b]", "reverse_text"),
        ("reasoning-gym:verifiers.ReasoningGymEnv", "reasoning-gym", "verifiers.ReasoningGymEnv"),
        ("http://127.0.0.1:8000", verifiers.OPENENV, "http://127.0.0.1:8000"),
    ],
)
def test_a_package_says_what_is_installed_and_loaded(env, requirement, name):
    package = Package(env, {})
    assert package.requirement == requirement and package.name == name
    assert package.folder != Package("another", {}).folder


def test_without_make_data_it_is_one_line():
    with pytest.raises(RewardError, match=r"is not installed in .*: run make data"):
        begun(environment_of(Package("not-there", {})), {"reward_model": {"ground_truth": "{}"}})


@pytest.mark.parametrize(
    ("printed", "said"),
    [
        ("WARNING: slow\\nERROR: No matching distribution found for x\\nWARNING: old pip", "No matching distribution"),
        (
            "ERROR: Ignored the following versions: 1.0 Requires-Python >=3.99\nERROR: Could not find a version\n"
            "ERROR: No matching distribution found for x",
            f"Ignored the following versions: 1.0 Requires-Python >=3.99; this is Python {sys.version.split()[0]}",
        ),
        ("ERROR: Ignored the following versions: 1.0 Requires-Python >=3.99\nERROR: no space", "no space"),
        ("Killed", "Killed"),
        ("", "no output"),
    ],
)
def test_a_package_that_cannot_be_installed_is_one_line(printed, said, monkeypatch, tmp_path):
    package = Package(f"missing-{said[:2]}", {})
    monkeypatch.setattr(verifiers.sys, "executable", str(tmp_path / "python"))
    (tmp_path / "python").write_text(f"#!/bin/sh\nprintf '{printed}'\nexit 1\n")
    (tmp_path / "python").chmod(0o755)
    with pytest.raises(DataError) as raised:
        package.install()
    wanted = f"{package.env}: cannot be installed: "
    assert str(raised.value).removeprefix(wanted).removeprefix("ERROR: ").startswith(said)
    assert "\n" not in str(raised.value) and "WARNING" not in str(raised.value) and not package.installed.exists()


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("raise SystemExit(3)", "its process has ended"),
        ("print('hello', flush=True)\nimport time\ntime.sleep(60)", "its process has ended: JSONDecodeError"),
        ("print('[' * 100000, flush=True)\nimport time\ntime.sleep(60)", "its process has ended: RecursionError"),
        (READY.replace('"n": 0', '"n": 0, "error": "no"'), "no; log: "),
        ("import time\ntime.sleep(60)", "no reply in 0.5 s"),
    ],
)
def test_a_process_that_does_not_start_is_one_line(code, said, monkeypatch, tmp_path):
    monkeypatch.setattr(verifiers, "START_SECONDS", 0.5 if "no reply" in said else 30)
    with pytest.raises(RewardError, match=said) as raised:
        Process(served(monkeypatch, tmp_path, code))
    assert "\n" not in str(raised.value)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("sys.exit(1)", "its process has ended"),
        ("sys.stdin.readline()\nprint('x' * 2**21, flush=True)\ntime.sleep(60)", "its process has ended: JSON"),
        ("sys.stdin.readline()\nprint('{}', flush=True)\ntime.sleep(60)", "its process has ended: KeyError"),
        ("time.sleep(60)", "no reply in 0.5 s"),
    ],
)
def test_a_process_that_stops_answering_is_one_line_and_stays_gone(code, said, monkeypatch, tmp_path):
    monkeypatch.setattr(verifiers, "MAX_LINE", 2**20)
    process = Process(served(monkeypatch, tmp_path, READY + code))
    monkeypatch.setattr(verifiers, "SECONDS", 0.5 if "no reply" in said else 60)
    for _ in range(2):
        with pytest.raises(RewardError, match=said):
            process.ask(episode=1, row=None)
    process.child.kill()


def test_it_gets_no_secret_and_many_threads_get_their_own_replies(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_TOKEN", "secret")
    echo = "for line in sys.stdin:\n    print(json.dumps(json.loads(line) | {'env': dict(os.environ)}), flush=True)"
    process, found = Process(served(monkeypatch, tmp_path, READY + echo)), {}

    def ask(number: int) -> None:
        found[number] = process.ask(episode=number)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(found[number]["episode"] == number for number in range(50))
    assert "secret" not in json.dumps(found[0]) and "PATH" in found[0]["env"]
    process.child.stdin.close()
    assert process.child.wait(30) == 0  # it ends where we do


@pytest.mark.parametrize("said", [[], ["5"]], ids=["before its first turn", "in its first step"])
def test_an_error_of_an_episode_is_a_failed_episode_with_its_reason_in_the_log(said, monkeypatch, tmp_path, capsys):
    broken = {"done": True, "broke": "EnvError: no such file"}
    first = {"messages": [{"role": "user", "content": "A number?"}], "tools": []} if said else broken
    code = "for request in map(json.loads, sys.stdin):\n"
    code += f"    reply = {broken!r} if 'message' in request else {first!r}\n"
    code += "    print(json.dumps({'n': request['n']} | reply), flush=True)"
    package = served(monkeypatch, tmp_path, READY + code)
    row = rl_row("t", chat("The row's prompt"), {"answer": "5"}, "test", 0)
    (start, ((_, step, _),)) = retold(environment_of(package), row, ["5"])
    assert start.messages[-1]["content"] == ("A number?" if said else "The row's prompt")
    assert (step.done, bool(step.broke), step.readable, step.reward) == (True, True, False, 0)
    assert f"{package.name}: an episode failed: EnvError: no such file; log: " in capsys.readouterr().err


ROWS = (
    READY
    + """
rows = [{"prompt": [{"role": "user", "content": f"p {i % PROMPTS}"}], "answer": str(i)} for i in range(90)]
for request in map(json.loads, sys.stdin):
    side = rows if request["split"] == "train" else []
    found = side[request["first"] :][: request["count"]]
    print(json.dumps({"n": request["n"], "rows": found, "endless": False}), flush=True)
"""
)


@pytest.mark.parametrize("prompts", [45, 9, 1])
def test_rows_of_one_prompt_are_on_one_side_unless_it_is_that_of_many(prompts, small_model, monkeypatch, tmp_path):
    package = served(monkeypatch, tmp_path, f"PROMPTS = {prompts}\n{ROWS}")
    sizes = {"TRAIN_SIZE": "80", "TEST_SIZE": "20", "DEV_SIZE": "8"}
    settings = load_settings({"TASK": "countdown", "STACK": "cpu", "MODEL": str(small_model), **sizes})
    manifest = prepare(settings, {"generate": lambda _: examples(package)})
    sides = {name: list(read_rows(settings.data_dir / f"{name}.parquet")) for name in ("train", "dev", "test")}
    truths, texts = ({n: {what(row) for row in rows} for n, rows in sides.items()} for what in (truth_of, prompt_of))
    shared = [texts[one] & texts[two] for one, two in (("train", "test"), ("train", "dev"), ("dev", "test"))]
    assert not any(truths[one] & truths[two] for one, two in (("train", "test"), ("train", "dev"), ("dev", "test")))
    assert not any(shared) if prompts == 45 else all(shared)
    assert len(truths["train"]) == manifest["rows"]["train"] >= 50  # no row is lost for its prompt
    assert not manifest["groups"]  # they are no conversations


def truth_of(row) -> str:
    return json.loads(row["reward_model"]["ground_truth"])["answer"]


def prompt_of(row) -> str:
    return row["prompt"][0]["content"]


# ---- real environments, installed from the registry


@pytest.fixture(scope="module")
def games(tmp_path_factory):
    """The folder of a package that pip can install."""
    folder = tmp_path_factory.mktemp("games")
    (folder / "pyproject.toml").write_text('[project]\nname = "games"\nversion = "1"\n')
    (folder / "games.py").write_text(GAMES)
    return folder


@pytest.fixture(scope="module")
def games_v1(tmp_path_factory):
    """One of verifiers 0.4."""
    folder = tmp_path_factory.mktemp("games_v1")
    (folder / "pyproject.toml").write_text('[project]\nname = "games-v1"\nversion = "1"\n')
    (folder / "games_v1").mkdir()
    (folder / "games_v1/__init__.py").write_text(GAMES_V1)
    (folder / "games_v1/tool.py").write_text(TOOL_V1)
    (folder / "games_v1/once.py").write_text('from games_v1 import Numbers\n\n__all__ = ["Numbers"]\n')
    return folder


@pytest.mark.long
def test_the_episodes_are_the_environments(games):
    guess, tools = Package(f"{games}:games", {}), Package(f"{games}:games", {"kind": "tools"})
    found = examples(guess)
    assert len(found) == len({example.key for example in found}) == 150  # one prompt for all
    environment = environment_of(guess)
    play = partial(replayed, environment, row_of(found[7]))
    assert play(["5", "9", "7"]) == (1.0, 0, True)
    assert play(["1", "2"]) == (0.0, 0, False)
    assert play(["1", "2", "3", "4"]) == (0.0, 0, True)  # its own max_turns
    played, start = begun(environment, row_of(found[3]))
    assert [message["content"] for message in start.messages] == ["A number up to 9?"]
    assert stepped(played, row_of(found[3]), [], "5")[0].messages == [{"role": "user", "content": "less"}]

    found = examples(tools)
    assert [example.split for example in found] == ["train"] * 150 + ["test"] * 150
    environment = environment_of(tools)
    played, start = begun(environment, row_of(found[0]))
    call = render_calls([{"name": "add", "arguments": {"a": 2, "b": 3}}])
    step, failed = stepped(played, row_of(found[0]), start.tools, call)
    assert (step.messages, step.done, failed) == ([{"role": "tool", "content": "5"}], False, 0)
    assert stepped(played, row_of(found[0]), start.tools, "5")[0].reward == 1.0
    assert replayed(environment, row_of(found[0]), [call.replace("add", "pay"), call, "5"]) == (1.0, 1, True)


@pytest.mark.long
def test_what_an_environment_cannot_do_is_one_line(games, capsys):
    package = Package(f"{games}:games", {})
    row = row_of(examples(package)[0])
    assert replayed(environment_of(package), row, ["five"]) == (0.0, 0, True)
    assert "ValueError: invalid literal for int" in capsys.readouterr().err
    assert replayed(environment_of(package), row, ["0"]) == (1.0, 0, True)  # the next episode is played
    for kind, said in (("forgets", "rewrites earlier messages"), ("groups", "several episodes together")):
        with pytest.raises(RewardError, match=said):
            replayed(environment_of(Package(package.env, {"kind": kind})), row, ["5", "6"])
    with pytest.raises(DataError, match="kinds"):
        examples(Package(package.env, {"kinds": 1}))
    with pytest.raises(DataError, match="no_such_module"):
        examples(Package(f"{games}:no_such_module", {}))
    with pytest.raises(DataError, match="cannot be installed: "):
        examples(Package("/no/such/folder", {}))
    process_of(package).child.kill()
    with pytest.raises(RewardError, match="its process has ended"):
        replayed(environment_of(package), row, ["0"])


@pytest.mark.long
def test_the_episodes_are_those_of_verifiers_v1(games_v1, capsys):
    guess = Package(f"{games_v1}:games_v1", {})
    once = Package(f"{games_v1}:games_v1.once", {})
    found = examples(guess)
    assert len(found) == len({example.key for example in found}) == 150  # one prompt for all
    environment = environment_of(guess)
    play = partial(replayed, environment, row_of(found[7]))
    assert play(["5", "9", "7"]) == (1.0, 0, True)
    assert play(["1", "2"]) == (0.0, 0, False)
    played, start = begun(environment, row_of(found[3]))
    assert start.messages == [{"role": "user", "content": "A number up to 9?"}]
    assert stepped(played, row_of(found[3]), [], "5")[0].messages == [{"role": "user", "content": "less"}]
    assert play(["five"]) == (0.0, 0, True)  # it broke
    assert "EnvError: " in (said := capsys.readouterr().err) and "invalid literal for int" in said
    assert play(["7"]) == (1.0, 0, True)  # the next episode is played

    assert [replayed(environment_of(once), row_of(found[7]), [answer]) for answer in ("7", "8")] == [
        (1.0, 0, True),
        (0.0, 0, True),
    ]
    endless = examples(Package(once.env, {"taskset": {"endless": True}}))
    assert len({example.key for example in islice(endless, 250)}) == 250
    said = Package(once.env, {"taskset": {"messages": True}})
    row, *_ = examples(said)
    messages = [{"role": "system", "content": "Guess."}, {"role": "user", "content": "A number up to 9?"}]
    assert row.prompt == messages and begun(environment_of(said), row_of(row))[1].messages == messages
    assert replayed(environment_of(said), row_of(row), ["0"]) == (1.0, 0, True)

    tools = environment_of(Package(once.env, {"taskset": {"tools": True}}))
    played, start = begun(tools, row_of(found[5]))
    call = render_calls([{"name": "add", "arguments": {"a": 2, "b": 3}}])
    assert stepped(played, row_of(found[5]), start.tools, call)[0].messages == [{"role": "tool", "content": "5"}]
    assert stepped(played, row_of(found[5]), start.tools, "5")[0].reward == 1.0
    assert replayed(tools, row_of(found[5]), [call.replace("add", "pay"), call, "5"]) == (1.0, 1, True)
    shell = Package(once.env, {"agent": {"max_turns": 1}, "taskset": {"tools": True}})
    assert replayed(environment_of(shell), row_of(found[5]), [call]) == (0.0, 0, True)  # its own limit of turns


@pytest.mark.long
def test_an_environment_of_openenv_is_played_behind_its_server(tmp_path, capsys):
    (tmp_path / "server.py").write_text(SERVER_OF_OPENENV)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    package = Package(f"http://127.0.0.1:{port}", {})
    package.install()
    with pytest.raises(DataError, match="Connect"):
        examples(package)
    command = [package.folder / "bin/python", "-m", "uvicorn", "server:app", "--port", str(port)]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
        try:
            next(line for line in server.stdout if "Uvicorn running" in line)
            found = list(islice(examples(package), 12))
            assert [example.ground_truth["reset"]["seed"] for example in found] == list(range(12))
            environment = environment_of(package)
            assert replayed(environment, row_of(found[7]), ["5", "a number", "7"]) == (1.0, 1, True)
            assert replayed(environment, row_of(found[7]), ["5", "6"]) == (0.5, 0, False)
            assert replayed(environment, row_of(found[7]), ["5", "100"]) == (0.25, 0, True)
            assert "it broke" in capsys.readouterr().err
            some = Package(package.env, {"resets": [{"seed": 3}, {"seed": 4}]})
            assert [replayed(environment, row_of(example), ["4"])[0] for example in examples(some)] == [0.25, 0.75]
        finally:
            server.kill()
