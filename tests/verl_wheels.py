"""The packages of both generations of verl, unpacked and not imported: for their config files."""

import importlib.util
import subprocess
import sys
from pathlib import Path

from tests.helpers import ROOT

# Of the wheels on PyPI.
SHA256 = {
    "0.6.1": "a67dd50fb99b402db0c990d4c92710be9a728cb18607515daa0f1e8552e47983",
    "0.9.1": "db6e6f2a8d9d5808d9ec32d357a42319fdc6967df688ff9d9810050f49bfdd14",
}


def verl_package(version: str) -> Path:
    """The folder ``verl`` of that version's wheel, fetched once (1 to 2 MB) into artifacts/verl."""
    folder = ROOT / "artifacts/verl" / version
    if not folder.is_dir():
        partial = folder.with_name(f".{version}.partial")
        partial.mkdir(parents=True, exist_ok=True)
        wanted = partial / "wanted.txt"
        wanted.write_text(f"verl=={version} --hash=sha256:{SHA256[version]}\n")
        pip = [sys.executable, "-m", "pip"] if importlib.util.find_spec("pip") else ["uv", "pip"]
        install = [*pip, "install", "-q", "--no-deps", "--require-hashes", "--target", partial, "-r", wanted]
        result = subprocess.run(install, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        partial.rename(folder)
    return folder / "verl"
