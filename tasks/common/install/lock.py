"""`make lock`: compile the package list of each stack from pyproject.toml.

A list names every package of its stack with version and no index, and the hashes of the files that its Pythons take on
Linux x86_64: an install resolves nothing, and any index works. Versions of the current list stay if pyproject.toml
allows them, unless --upgrade is given.
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

from packaging.tags import Tag
from packaging.utils import parse_wheel_filename

from verl_tasks.files import write_text
from verl_tasks.places import PACKAGE
from verl_tasks.settings import ROOT

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
    return PACKAGE / "stacks" / stack / "requirements.txt"


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


def run_uv(stack: str, *arguments: str) -> None:
    """Run `uv pip compile`. Raises LockError with uv's reason."""
    command = [uv(), "pip", "compile", "--quiet", "--python-version", STACKS[stack][0], "--generate-hashes", *arguments]
    environment = {**os.environ, "UV_PYTHON_DOWNLOADS": "never"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if result.returncode:
        raise LockError(f"STACK={stack}: uv finds no versions that fit\n{result.stderr.strip()}")


def fits(tag: Tag, pythons: tuple[str, ...]) -> bool:
    """Whether one of ``pythons`` takes wheels of ``tag`` on Linux x86_64 with glibc."""
    here = tag.platform == "any" or re.fullmatch(r"(manylinux.*|linux)_x86_64", tag.platform)
    if tag.abi in ("none", "abi3"):
        since = re.fullmatch(r"(py3|cp3)(\d*)", tag.interpreter)
        return bool(here and since and int(since[2] or 0) <= max(int(version[2:]) for version in pythons))
    return bool(here and tag.interpreter == tag.abi in {f"cp{version.replace('.', '')}" for version in pythons})


def needed(stack: str, text: str) -> str:
    """The list ``text`` without the hashes of files that no Python of ``stack`` takes: those of other systems and
    Pythons, and the sources of packages that have a wheel."""
    with tempfile.TemporaryDirectory() as folder:
        pins, output = Path(folder) / "pins.txt", Path(folder) / "pylock.toml"
        pins.write_text("\n".join(line.rstrip("\\") for line in text.splitlines() if not line.startswith(" ")))
        run_uv(stack, "--universal", "--no-deps", "--format", "pylock.toml", "--output-file", str(output), str(pins))
        packages = tomllib.loads(output.read_text())["packages"]
    hashes = set()
    for package in packages:
        wheels = {wheel["hashes"]["sha256"]: Path(wheel["url"]).name for wheel in package.get("wheels", ())}
        tags = {digest: parse_wheel_filename(name)[3] for digest, name in wheels.items()}
        own = {digest for digest, each in tags.items() if any(fits(tag, STACKS[stack]) for tag in each)}
        hashes |= own or {package["sdist"]["hashes"]["sha256"]}
    kept: list[str] = []
    for line in text.splitlines():
        if not line.startswith(" "):
            kept.append(line)
        elif line.strip(" \\").removeprefix("--hash=sha256:") in hashes:
            kept[-1] = kept[-1].rstrip(" \\") + " \\"
            kept.append(line.rstrip(" \\"))
    return "".join(f"{line}\n" for line in kept)


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
        platform = ["--universal"] if len(pythons) > 1 else ["--python-platform", "x86_64-manylinux_2_28"]
        group = ["--group", f"{ROOT / 'pyproject.toml'}:{stack}", "--excludes", str(excludes)]
        run_uv(stack, *platform, *group, "--no-annotate", "--no-header", "--output-file", str(output))
        text = needed(stack, output.read_text())
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
