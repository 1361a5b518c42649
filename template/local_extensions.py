"""Filters of the template's own; cookiecutter finds them by `_extensions` in cookiecutter.json."""

import contextlib
import filecmp
import json
import keyword
import re
import shutil
import sys
from itertools import islice
from pathlib import Path
from typing import NoReturn

import click
from cookiecutter.utils import simple_filter

WIDTH = 120
ENTRIES = 16
USUAL = (512, 128)
# About what a tokenizer of 50,000 tokens makes of text, rather too many; of other scripts a token a byte.
_TOKEN = re.compile(r" ?[A-Za-z]{1,6}|\s+|.")
_FRAME = 32  # tokens of a chat template


@simple_filter
def lengths(env: str, config: str) -> tuple[int, int]:
    """Tokens, about, of the longest prompt and of the longest answer among some entries of a reasoning-gym environment,
    in steps of 64; 0 for the answer where the entries have none, USUAL where reasoning-gym is not installed."""
    sys.path.append(str(Path(__file__).resolve().parents[1]))
    try:
        from verl_tasks import gym

        found = list(islice(gym.examples(env, json.loads(config), seed=0), ENTRIES))
    except (ImportError, ValueError):
        return USUAL
    finally:
        sys.path.pop()
    answers = [_tokens(e.demonstration) for e in found if e.demonstration]
    return _rounded(max(_tokens(e.prompt) for e in found)), _rounded(max(answers)) if answers else 0


def _rounded(tokens: int) -> int:
    return 64 * ((tokens + _FRAME) * 5 // 4 // 64 + 1)


def _tokens(text: str) -> int:
    return sum(len(token.encode()) if not token.isascii() else 1 for token in _TOKEN.findall(text))


@simple_filter
def literal(text: str) -> str:
    """JSON text as Python source, as `ruff format` would write it behind ``CONFIG = ``."""
    return _source(json.loads(text), 0, len("CONFIG = "))


def _source(value, indent: int, before: int) -> str:
    """``value`` on one line if that fits behind ``before`` characters, else an item a line."""
    line = _line(value)
    if before + len(line) <= WIDTH or not value or not isinstance(value, dict | list):
        return line
    inner = " " * (indent + 4)
    if isinstance(value, dict):
        heads, items = [f"{inner}{_line(key)}: " for key in value], value.values()
    else:
        heads, items = [inner] * len(value), value
    body = [f"{head}{_source(item, indent + 4, len(head) + 1)},\n" for head, item in zip(heads, items, strict=True)]
    opened, closed = "{}" if isinstance(value, dict) else "[]"
    return f"{opened}\n{''.join(body)}{' ' * indent}{closed}"


def _line(value) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_line(key)}: {_line(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_line, value)) + "]"
    if isinstance(value, str) and '"' not in value:
        return '"' + repr(value + '"')[1:-2].replace("\\'", "'") + '"'  # repr takes ' where the text has a "
    return repr(value).replace("e+", "e") if isinstance(value, float) else repr(value)


# What the problems of `generate` and `file` ask, by the reward that scores them (templates/REWARD.jinja).
_ASKED = {
    "math": "Add two numbers",
    "exact": "Sort words",
    "regex": "Write a date as day/month/year",
    "expression": "Reach a target with the given numbers",
    "json": "Read name, age and city from a sentence",
    "tool_call": "Set a timer",
    "judge": "Write a sentence with the given words",
}


@simple_filter
def described(answers: dict) -> str:
    """The description of a task that nobody described, from the answers before it."""
    others = {"verifiers": "An environment of verifiers", "openenv": "An environment of OpenEnv"}
    others |= {"hub": "Problems of a data set", "reasoning_gym": f"{answers['env']} of reasoning-gym"}
    asked = _ASKED.get(answers["reward"], "An environment") if answers["turns"] == "single" else "Look up a number"
    return others.get(answers["source"], asked)


# ---- answers that cannot be a task


class Refused(click.ClickException):
    """cookiecutter's command ends with this one line, before anything is written."""

    def show(self, file=None) -> None:
        click.echo(f"error: {self.message}", err=True)


def refuse(problem: str) -> NoReturn:
    raise Refused(problem)


def _read_config(text: str) -> dict:
    try:
        value = json.loads(text)
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError) as error:
        refuse(f"config {text[:80]!r}: must be a JSON object ({str(error)[:80]})")
    if not isinstance(value, dict):
        refuse(f"config {text[:80]!r}: must be a JSON object")
    return value


def _check_environment(env: str, config: dict) -> None:
    """With reasoning-gym itself, where that is at hand; else `make data` says what is wrong."""
    sys.path.append(str(Path(__file__).resolve().parents[1]))
    try:
        from verl_tasks import gym

        gym.dataset(env, config)
    except ImportError:
        pass
    except ValueError as error:
        refuse(" ".join(str(error).split()))
    finally:
        sys.path.pop()


@simple_filter
def checked(answers: dict) -> str:
    """Empty text for answers (cookiecutter's dict) that make a task. Raises Refused for the first that does not.

    cookiecutter.json asks for it before anything is written. A replay has no answers then: for it the hook asks, with
    the task's folder made, which goes again if it is empty.
    """
    if "task" not in answers:
        return ""
    try:
        _check(answers)
    except Refused:
        if "_output_dir" in answers:
            _remove_empty(Path(answers["_output_dir"]), answers["task"])
        raise
    return ""


ASIDE = ".before"  # in the task's folder, while cookiecutter writes


@simple_filter
def set_aside(answers: dict) -> str:
    """Empty text. With -f the task's folder may have files: they are copied aside for ``keep_edited``."""
    home = Path(answers["_output_dir"], answers["task"])
    if files := [path for path in home.iterdir() if path.is_file()]:
        if (home / ASIDE).exists():
            refuse(f"{home / ASIDE}: has the files from before an interrupted command; move them back, or remove it")
        (home / ASIDE).mkdir()
        for path in files:
            shutil.copy2(path, home / ASIDE)
    return ""


@simple_filter
def keep_edited(answers: dict) -> str:
    """Empty text; when files that differ were overwritten, all files are put back, and Refused is raised."""
    home = Path(answers["_output_dir"], answers["task"])
    if not (home / ASIDE).is_dir():
        return ""
    before = {path.name: path for path in (home / ASIDE).iterdir()}
    if edited := sorted(name for name, path in before.items() if not filecmp.cmp(path, home / name, shallow=False)):
        for path in [path for path in home.iterdir() if path.is_file() and path.name not in before]:
            path.unlink()
        for name, path in before.items():
            path.replace(home / name)
    shutil.rmtree(home / ASIDE)
    if edited:
        refuse(f"{home}: edited since: {', '.join(edited)}; nothing was written. Remove a file to get it again, or add -s")
    return ""


def _remove_empty(output: Path, task: str) -> None:
    folder = (output / task).resolve()
    with contextlib.suppress(OSError):  # not empty: it was there before
        folder.rmdir()
        while output.resolve() in (folder := folder.parent).parents:
            folder.rmdir()


def _check_multi(answers: dict) -> None:
    """Refuse what a task with episodes cannot have; reward and source stay at their defaults."""
    turns = answers["turns"]
    maker = "agent.py" if turns == "endpoint" else "environment.py"
    if answers["reward"] != "math":
        refuse(f"reward {answers['reward']}: with turns={turns} {maker} makes the rewards; leave reward out")
    if answers["source"] not in (("generate",) if turns == "endpoint" else ("generate", *OTHERS)):
        refuse(f"source {answers['source']}: with turns={turns} it must be generate; then write prepare_data.py as you like")
    if answers["method"] in ("dpo", "distill"):
        refuse(f"method {answers['method']}: is for single-turn tasks; leave it out, or take turns=single")


# Environments of other people: what ENV must be, and in words.
_PACKAGE = r"[A-Za-z0-9][\w.-]{0,60}(\[[\w,-]{1,60}\])?(==[0-9][\w.]{0,20})?(:[A-Za-z_][\w.]{0,80})?"
OTHERS = {
    "verifiers": (_PACKAGE, "a package, package==version, or package:module of an environment"),
    "openenv": (r"https?://[\w.:-]{1,200}(/[\w./-]{0,200})?", "the URL of an OpenEnv server, such as http://127.0.0.1:8000"),
}


def _check_other(source: str, turns: str, env: str, config: str) -> None:
    if turns != "multi":
        refuse(f"source {source}: needs turns=multi, also where the environment takes one")
    form, words = OTHERS[source]
    if not re.fullmatch(form, env, re.ASCII):
        refuse(f"env {env[:80]!r}: must be {words}")
    _read_config(config)


def _check(answers: dict) -> None:
    task, description, reward, source = (answers[name] for name in ("task", "description", "reward", "source"))
    model, gpus, env, config = (answers[name] for name in ("model", "gpus", "env", "config"))
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,39}", task):
        refuse(
            f"task {task!r}: must be lower-case letters, digits and _, start with a letter and have at most 40 characters"
        )
    if keyword.iskeyword(task) or task in ("common", "tasks"):
        refuse(f"task {task!r}: this name is taken (Python's own word, common or tasks)")
    if not description.strip() or not re.fullmatch(r"[^\n\"\\`$]{1,120}", description):
        refuse("description: must be one line of at most 120 characters, without quotes, backslash, ` and $")
    if not re.fullmatch(r"embedded|[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9._-]+|[~.]{0,2}/[A-Za-z0-9._/+@=,-]+", model):
        refuse(f"model {model[:80]!r}: must be a hub id owner/name, the path of a folder, or embedded")
    if not re.fullmatch(r"all|1|2|4|8|16|32|64", gpus):
        refuse(f"gpus {gpus[:80]!r}: must be all, or 1, 2, 4, 8, 16, 32 or 64, by which the batches can be divided")
    if answers["turns"] != "single":
        _check_multi(answers)
    if source in OTHERS:
        _check_other(source, answers["turns"], env, config)
    elif source != "reasoning_gym":
        if reward == "environment":
            refuse("reward environment: needs source=reasoning_gym, or take another reward")
        if env or config != "{}":
            refuse(f"{'env' if env else 'config'}: only for source=reasoning_gym, verifiers or openenv")
    elif reward not in ("environment", "math", "exact", "judge"):
        refuse(f"reward {reward}: with source=reasoning_gym it must be environment, math, exact or judge")
    elif not re.fullmatch(r"[a-z0-9_]{1,60}", env):
        refuse(f"env {env[:80]!r}: must be the name of a reasoning-gym environment")
    else:
        _check_environment(env, _read_config(config))
