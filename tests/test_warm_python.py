"""warm_python.py: a command in a fork does what it does in a fresh Python; what a fork cannot do gets a fresh one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import PYTHON, ROOT, exported, outside_make
from tests.warm_python import install

TELLS = """import os, signal, sys
print(sys.argv, sys.path[0], __name__, __file__, os.getcwd())
print(sorted(item for item in os.environ.items() if item[0] not in ("PWD", "OLDPWD", "SHLVL", "_")))  # a shell's
print(sys.stdin.read(), os.umask(0), os.getpgrp(), signal.getsignal(signal.SIGINT))
print("error", file=sys.stderr)
sys.exit(int(sys.argv[1]) if sys.argv[1].isdigit() else sys.argv[1])
"""
FORKED = "import sys\nprint('pandas' in sys.modules)\n"


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> Path:
    return install(tmp_path_factory.mktemp("warm") / "bin", ["pandas"])


@pytest.fixture
def script(tmp_path):
    def write(text: str) -> Path:
        (tmp_path / "tasks").mkdir(exist_ok=True)
        (tmp_path / "tasks/script.py").write_text(text)
        return tmp_path / "tasks/script.py"

    return write


@pytest.fixture
def environment():
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "FRESH_PYTHON")}


@pytest.mark.parametrize("status", ["0", "3", "one line of error"])
def test_a_fork_inherits_what_a_fresh_python_does(status, python, script, environment, tmp_path):
    tells = script(TELLS)
    given = environment | {"OWN": "a\nb", "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "PYTHON": "x"}
    run = {"cwd": tmp_path, "env": given, "input": "typed", "capture_output": True, "text": True}
    fork, fresh = (subprocess.run([each, tells, status, "é"], **run) for each in (python, sys.executable))
    assert (fork.returncode, fork.stdout, fork.stderr) == (fresh.returncode, fresh.stdout, fresh.stderr)
    assert "typed" in fork.stdout and "error" in fork.stderr


def test_what_is_compiled_of_ours_is_kept_beside_the_python_and_of_packages_where_they_are(
    python, script, environment, tmp_path
):
    (tmp_path / "tasks/own.py").parent.mkdir()
    (tmp_path / "tasks/own.py").touch()
    tells = script("import pandas, tasks.own\nprint(pandas.__cached__, tasks.own.__cached__)\n")
    given = {"env": environment | {"PYTHONPATH": str(tmp_path)}, "capture_output": True, "text": True, "check": True}
    package, own = subprocess.run([python, tells], **given).stdout.split()
    assert Path(package).is_relative_to(sys.prefix) and Path(own).is_relative_to(python.parent / "pycache")


def test_commands_are_forked_also_those_that_a_command_starts(python, script, environment, tmp_path):
    forked = script(FORKED)
    outer = tmp_path / "tasks/outer.py"
    outer.write_text(f"import subprocess, sys\nsubprocess.run([sys.executable, {str(forked)!r}], check=True)\n")
    for file in (forked, outer):
        assert subprocess.run([python, file], env=environment, capture_output=True, text=True).stdout == "True\n"


@pytest.mark.parametrize("environment_of", ["this process", "make", "a stage"])
def test_the_tests_own_commands_are_forked(environment_of, script, tmp_path):
    """Whatever the imports of all test files have set by now, and whatever the tests before this one did."""
    environments = {
        "this process": os.environ | {"PYTHONPATH": str(ROOT)},
        "make": outside_make(),
        "a stage": exported(ROOT / "tasks/countdown/train.sh", {}),
    }
    environment = {k: v for k, v in environments[environment_of].items() if k != "FRESH_PYTHON"}
    result = subprocess.run([PYTHON, script(FORKED)], env=environment, capture_output=True, text=True)
    assert result.stdout == "True\n", result.stderr


def test_the_leader_of_a_session_is_a_fork_with_a_session_of_its_own(python, script, environment):
    told = script(FORKED + "import os\nprint(os.getsid(0) == os.getpid() == os.getpgrp())\n")
    result = subprocess.run([python, told], env=environment, capture_output=True, text=True, start_new_session=True)
    assert result.stdout == "True\nTrue\n", result.stderr
    within = ["bash", "-c", f"'{python}' '{script(FORKED)}'; true"]  # its group is that of the shell
    result = subprocess.run(within, env=environment, capture_output=True, text=True, start_new_session=True)
    assert result.stdout == "False\n", result.stderr


def test_a_fresh_python_where_a_fork_could_differ(python, script, environment, tmp_path):
    # The modules of a PYTHONPATH could stand in for those that are imported already.
    differing = {"OMP_NUM_THREADS": "1234", "PYTHONHASHSEED": "1", "PYTHONPATH": "/tmp", "FRESH_PYTHON": "1"}
    differing |= {"VERL_TASK_LAUNCH": "/tmp"}  # its keeper would not see the fork
    for name, value in differing.items():
        run = [python, script(FORKED)]
        result = subprocess.run(run, env=environment | {name: value}, capture_output=True, text=True)
        assert result.stdout == "False\n", (name, result.stderr)
    (tmp_path / "hook.py").write_text(FORKED)  # of no task: cookiecutter's hooks look at their parent
    result = subprocess.run([python, tmp_path / "hook.py"], env=environment, capture_output=True, text=True)
    assert result.stdout == "False\n", result.stderr


def test_an_uncaught_error_has_its_traceback_and_its_status(python, script, environment):
    result = subprocess.run([python, script("1 / 0")], env=environment, capture_output=True, text=True)
    assert result.returncode == 1 and result.stderr.splitlines()[-1] == "ZeroDivisionError: division by zero"
