"""`make lock`: compile the package list of each stack from pyproject.toml.

A list names every package of its stack with version and hashes and no index: an install resolves nothing, and any index
works. Versions of the current list stay if pyproject.toml allows them, unless --upgrade is given.
"""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from tasks.common.files import write_text
from tasks.common.settings import ROOT

STACKS = {"a100": ("3.12",), "current": ("3.12",), "cpu": ("3.11", "3.12")}  # with their Pythons
# install.sh finds torch's CPU build for the cpu stack: its hash differs between indexes, and PyPI's build requires CUDA
# packages. triton, which xgrammar requires, is for GPUs.
LEFT_OUT = {"cpu": ("torch", "triton")}
HEADER = """\
# The {stack} stack for Python {pythons}, Linux x86_64: everything that is installed.
# Made by `make lock` from pyproject.toml; change that, then run `make lock`.
"""


class LockError(Exception):
    """The lists cannot be compiled; the message says why."""


def list_of(stack: str) -> Path:
    """The committed list of ``stack``."""
    return ROOT / "tasks/common/stacks" / stack / "requirements.txt"


def uv() -> str:
    """The uv beside this Python, which is pinned, else the one of PATH."""
    beside = Path(sys.executable).with_name("uv")
    found = str(beside) if beside.exists() else shutil.which("uv")
    if not found:
        raise LockError("no uv here; `pip install uv`, or run `make lock` without PYTHON=")
    return found


def direct(stack: str) -> list[str]:
    """The requirements of ``stack`` in pyproject.toml, included groups first."""
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    own = [entry for entry in groups[stack] if isinstance(entry, str)]
    included = [entry["include-group"] for entry in groups[stack] if not isinstance(entry, str)]
    return [line for group in included for line in direct(group)] + own


def compiled(stack: str, preferred: Path | None) -> str:
    """The list of ``stack`` as text, with the versions of the list ``preferred`` where they fit.

    Raises LockError with uv's reason.
    """
    pythons = STACKS[stack]
    left_out = LEFT_OUT.get(stack, ())
    with tempfile.TemporaryDirectory() as folder:
        output, excludes = Path(folder) / "requirements.txt", Path(folder) / "excludes.txt"
        if preferred and preferred.exists():
            shutil.copy(preferred, output)
        excludes.write_text("\n".join(left_out))
        command = [uv(), "pip", "compile", "--quiet", "--generate-hashes", "--no-annotate", "--no-header"]
        command += ["--group", f"{ROOT / 'pyproject.toml'}:{stack}", "--python-version", pythons[0]]
        command += ["--universal"] if len(pythons) > 1 else ["--python-platform", "x86_64-manylinux_2_28"]
        command += ["--excludes", str(excludes), "--output-file", str(output)]
        environment = {**os.environ, "UV_PYTHON_DOWNLOADS": "never"}
        result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        if result.returncode:
            raise LockError(f"STACK={stack}: uv finds no versions that fit\n{result.stderr.strip()}")
        text = output.read_text()
    # `environments` of pyproject.toml puts this marker on every line.
    everywhere = r"python_full_version < '3.13' and platform_machine == 'x86_64' and sys_platform == 'linux'"
    text = text.replace(f" ; {everywhere}", "")
    pins = [line for line in direct(stack) if re.split("[=<>]", line)[0] in left_out]
    return HEADER.format(stack=stack, pythons=" or ".join(pythons)) + "".join(f"{pin}\n" for pin in pins) + text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stacks", nargs="*", metavar="STACK", help=f"of {', '.join(STACKS)}; default: all")
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions")
    options = parser.parse_args([*sys.argv[1:], *shlex.split(os.environ.get("ARGS", ""))])
    for stack in options.stacks or STACKS:
        if stack not in STACKS:
            raise LockError(f"STACK={stack}: no such stack; there are: {' '.join(STACKS)}")
        path = list_of(stack)
        text = compiled(stack, None if options.upgrade else path)
        changed = not path.exists() or path.read_text() != text
        write_text(path, text)
        print(f"{path.relative_to(ROOT)}: {text.count('==')} packages{'' if changed else ', unchanged'}")


if __name__ == "__main__":
    try:
        main()
    except LockError as error:
        sys.exit(f"error: {error}")
