"""What several tests call: make, cookiecutter, and the environment that a train.sh exports."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# With the interpreter that runs the tests, so that a test never installs anything.
MAKE = ["make", f"PYTHON={sys.executable}"]


def exported(train_sh: Path, changes: dict[str, str]) -> dict[str, str]:
    """Environment that ``train_sh`` hands to the launcher on the cpu stack: `env` runs in place of Python."""
    clean = {k: v for k, v in os.environ.items() if k in ("PATH", "HOME", "LANG", "TMPDIR")}
    with tempfile.TemporaryDirectory() as folder:
        python = Path(folder) / "python"
        python.write_text("#!/bin/sh\nexec env -0\n")
        python.chmod(0o755)
        environment = {**clean, "STACK": "cpu", "PYTHON": str(python), **changes}
        result = subprocess.run(["bash", str(train_sh)], env=environment, capture_output=True, text=True, check=True)
    return dict(line.split("=", 1) for line in result.stdout.split("\0") if "=" in line)


def outside_make() -> dict[str, str]:
    """The environment without what the make that runs the tests put into it."""
    return {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "STACK", "STARTED")}


def make(*arguments: str, cwd: Path = ROOT, **variables: str) -> subprocess.CompletedProcess:
    """Run make; standard output and error in one text."""
    return subprocess.run(
        [*MAKE, *arguments, *(f"{k}={v}" for k, v in variables.items())],
        cwd=cwd,
        env=outside_make(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def cookiecutter(*arguments: str, cwd: Path) -> subprocess.CompletedProcess:
    """Run cookiecutter's command as a user does."""
    return subprocess.run(
        [sys.executable, "-m", "cookiecutter", *arguments],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
