"""warm_python.py: a command in a fork does what it does in a fresh Python; what a fork cannot do gets a fresh one."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers import PYTHON, ROOT, exported, outside_make
from tests.warm_python import install

TELLS = """import os, signal, sys
print(sys.argv, sys.path[0], __name__, __file__, os.getcwd(), sorted(os.environ.items()))
print(sys.stdin.read(), sys.stdout.line_buffering, os.umask(0), os.getpgrp(), signal.getsignal(signal.SIGINT))
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
        (tmp_path / "script.py").write_text(text)
        return tmp_path / "script.py"

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


def test_commands_are_forked_also_those_that_a_command_starts(python, script, environment, tmp_path):
    forked = script(FORKED)
    (tmp_path / "outer.py").write_text(
        f"import subprocess, sys\nsubprocess.run([sys.executable, {str(forked)!r}], check=True)\n"
    )
    for file in (forked, tmp_path / "outer.py"):
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


def test_a_fork_finds_the_folder_of_its_parent(python, script, environment, tmp_path):
    tells = script("import os, sys\nprint(os.readlink(f'/proc/{os.getppid()}/cwd'), 'pandas' in sys.modules)\n")
    result = subprocess.run([python, tells], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.stdout == f"{os.getcwd()} True\n", result.stderr


def test_the_leader_of_a_session_is_a_fork_with_a_session_of_its_own(python, script, environment):
    told = script(FORKED + "import os\nprint(os.getsid(0) == os.getpid() == os.getpgrp())\n")
    result = subprocess.run([python, told], env=environment, capture_output=True, text=True, start_new_session=True)
    assert result.stdout == "True\nTrue\n", result.stderr
    within = ["bash", "-c", f"'{python}' '{script(FORKED)}'; true"]  # its group is that of the shell
    result = subprocess.run(within, env=environment, capture_output=True, text=True, start_new_session=True)
    assert result.stdout == "False\n", result.stderr


@pytest.mark.parametrize(
    ("variables", "options"),
    [
        ({"OMP_NUM_THREADS": "1234"}, {}),
        ({"PYTHONHASHSEED": "1"}, {}),
        ({"PYTHONPATH": "/tmp"}, {}),  # its modules could stand in for those that are imported already
        ({"FRESH_PYTHON": "1"}, {}),
        ({}, {"pass_fds": [2, 7]}),
    ],
)
def test_a_fresh_python_where_a_fork_could_differ(variables, options, python, script, environment):
    if "pass_fds" in options:
        os.dup2(2, 7)
    result = subprocess.run(
        [python, script(FORKED)], env=environment | variables, capture_output=True, text=True, **options
    )
    assert result.stdout == "False\n", result.stderr


def test_an_uncaught_error_has_its_traceback_and_its_status(python, script, environment):
    result = subprocess.run([python, script("1 / 0")], env=environment, capture_output=True, text=True)
    assert result.returncode == 1 and result.stderr.splitlines()[-1] == "ZeroDivisionError: division by zero"


WAITS = "import time\nprint('waits', __import__('os').getpid(), flush=True)\ntime.sleep(60)\n"


@pytest.fixture
def waiting(python, script, environment):
    """A command that waits in a fork, and the fork's process id."""
    heard = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}  # `make test &` ignores it
    with subprocess.Popen(
        [python, script(WAITS)], env=environment, stdout=subprocess.PIPE, text=True, **heard
    ) as command:
        yield command, int(command.stdout.readline().split()[1])
        command.kill()


def gone(pid: int) -> bool:
    for _ in range(200):
        try:
            if " Z " in Path(f"/proc/{pid}/stat").read_text():  # dead; its new parent has not yet noticed
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_reaches_the_fork_and_the_status_says_so(number, waiting):
    command, fork = waiting
    assert fork != command.pid
    command.send_signal(number)
    assert command.wait(20) == -number and gone(fork)


def test_a_server_that_was_killed_takes_its_forks_along_and_the_next_command_starts_another(
    waiting, python, script, environment
):
    command, fork = waiting
    handler = int(Path(f"/proc/{fork}/stat").read_text().rpartition(")")[2].split()[1])
    server = int(Path(f"/proc/{handler}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(server, signal.SIGKILL)
    assert command.wait(20) == -signal.SIGKILL and gone(fork)
    assert subprocess.run([python, script(FORKED)], env=environment, capture_output=True, text=True).stdout == "True\n"
