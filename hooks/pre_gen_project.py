"""Refuse answers that cannot be a task, in one line, before anything is written."""

import contextlib
import keyword
import os
import re
import signal
import sys

task = {{ cookiecutter.task | jsonify }}  # fmt: skip
description = {{ cookiecutter.description | jsonify }}  # fmt: skip
output_dir = {{ cookiecutter._output_dir | jsonify }}  # fmt: skip


def refuse(problem):
    print(f"error: {problem}", file=sys.stderr)
    # Where this hook just fails, cookiecutter prints a traceback, and for a name like a/b it leaves the folder a.
    with open(f"/proc/{os.getppid()}/cmdline") as f:
        from_command_line = "cookiecutter" in map(os.path.basename, f.read().split("\0")[:3])
    if from_command_line:
        folder = os.getcwd()
        os.chdir("/")
        with contextlib.suppress(OSError):  # not empty: it was there before
            os.rmdir(folder)
            while (folder := os.path.dirname(folder)).startswith(os.path.realpath(output_dir) + os.sep):
                os.rmdir(folder)
        os.kill(os.getppid(), signal.SIGINT)  # click says "Aborted!" and exits with 1
    sys.exit(1)


if not re.fullmatch(r"[a-z][a-z0-9_]{0,39}", task):
    refuse(f"task {task!r}: must be lower-case letters, digits and _, start with a letter and have at most 40 characters")
if keyword.iskeyword(task) or task == "common":
    refuse(f"task {task!r}: this name is taken (Python's own word, or tasks/common)")
if not description.strip() or not re.fullmatch(r"[^\n\"\\`$]{1,120}", description):
    refuse("description: must be one line of at most 120 characters, without quotes, backslash, ` and $")
