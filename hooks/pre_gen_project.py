"""Refuse answers that cannot be a task, in one line, before anything is written."""

import contextlib
import json
import keyword
import os
import re
import signal
import sys

task = {{ cookiecutter.task | jsonify }}  # fmt: skip
description = {{ cookiecutter.description | jsonify }}  # fmt: skip
reward = {{ cookiecutter.reward | jsonify }}  # fmt: skip
source = {{ cookiecutter.source | jsonify }}  # fmt: skip
model = {{ cookiecutter.model | jsonify }}  # fmt: skip
gpus = {{ cookiecutter.gpus | jsonify }}  # fmt: skip
env = {{ cookiecutter.env | jsonify }}  # fmt: skip
config = {{ cookiecutter.config | jsonify }}  # fmt: skip
output_dir = {{ cookiecutter._output_dir | jsonify }}  # fmt: skip


def refuse(problem):
    print(f"error: {problem}", file=sys.stderr)
    # Where this hook just fails, cookiecutter prints a traceback, and for a name like a/b it leaves the folder a.
    with open(f"/proc/{os.getppid()}/cmdline") as f:
        called = f.read().split("\0")[:3]
    from_command_line = "cookiecutter" in map(os.path.basename, called) or "import cookiecutter" in called[-1]
    if from_command_line:
        folder = os.getcwd()
        os.chdir("/")
        with contextlib.suppress(OSError):  # not empty: it was there before
            os.rmdir(folder)
            while (folder := os.path.dirname(folder)).startswith(os.path.realpath(output_dir) + os.sep):
                os.rmdir(folder)
        os.kill(os.getppid(), signal.SIGINT)  # click says "Aborted!" and exits with 1
    sys.exit(1)


def read_config(text):
    try:
        value = json.loads(text)
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError) as error:
        refuse(f"config {text[:80]!r}: must be a JSON object ({str(error)[:80]})")
    if not isinstance(value, dict):
        refuse(f"config {text[:80]!r}: must be a JSON object")
    return value


def check_environment(env, config):
    """With reasoning-gym itself, where that and a checkout are at hand; else `make data` says what is wrong."""
    folder = os.readlink(f"/proc/{os.getppid()}/cwd")  # cookiecutter is in the template's folder
    while folder != "/" and not os.path.isfile(os.path.join(folder, "tasks/common/gym.py")):
        folder = os.path.dirname(folder)
    sys.path.insert(0, folder)
    sys.dont_write_bytecode = True
    try:
        from tasks.common.gym import dataset

        dataset(env, config)
    except ImportError:
        pass
    except ValueError as error:
        refuse(" ".join(str(error).split()))


if not re.fullmatch(r"[a-z][a-z0-9_]{0,39}", task):
    refuse(f"task {task!r}: must be lower-case letters, digits and _, start with a letter and have at most 40 characters")
if keyword.iskeyword(task) or task == "common":
    refuse(f"task {task!r}: this name is taken (Python's own word, or tasks/common)")
if not description.strip() or not re.fullmatch(r"[^\n\"\\`$]{1,120}", description):
    refuse("description: must be one line of at most 120 characters, without quotes, backslash, ` and $")
if not re.fullmatch(r"embedded|[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9._-]+|[~.]{0,2}/[A-Za-z0-9._/+@=,-]+", model):
    refuse(f"model {model[:80]!r}: must be a hub id owner/name, the path of a folder, or embedded")
if not re.fullmatch(r"all|1|2|4|8|16|32|64", gpus):
    refuse(f"gpus {gpus[:80]!r}: must be all, or 1, 2, 4, 8, 16, 32 or 64, by which the batches can be divided")
if source != "reasoning_gym":
    if reward == "environment":
        refuse("reward environment: needs source=reasoning_gym, or take another reward")
    if env or config != "{}":
        refuse(f"{'env' if env else 'config'}: only for source=reasoning_gym")
elif reward not in ("environment", "math", "exact", "judge"):
    refuse(f"reward {reward}: with source=reasoning_gym it must be environment, math, exact or judge")
elif not re.fullmatch(r"[a-z0-9_]{1,60}", env):
    refuse(f"env {env[:80]!r}: must be the name of a reasoning-gym environment")
else:
    check_environment(env, read_config(config))
