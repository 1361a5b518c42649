"""verl_plugins/forked.py: a fork does what a fresh Python would, and ends with its client and with the trainer.

warm_python.py, the server of tests' commands: what a fork cannot do gets a fresh Python.
"""

import contextlib
import functools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.helpers import PYTHON, ROOT, exported, has_ended, outside_make, until
from tests.warm_python import install
from verl_tasks.leftovers import LAUNCH
from verl_tasks.verl_plugins import fork_server, forked

# The server of a training, with imports that take little time; `owner` plays the trainer.
SERVER = """import sys
from pathlib import Path
from verl_tasks.verl_plugins import fork_server, forked
forked.without_cuda = forked.contextlib.nullcontext  # it imports vLLM
forked.IMPORTS = ("numpy", "actors")
folder = Path(sys.argv[1])
listener = fork_server.listening(folder)
(folder / "listens").touch()
forked.serve(listener, folder, int(sys.argv[2]), "email")"""


@pytest.fixture
def owner():
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


@contextlib.contextmanager
def serving(tmp_path: Path, owner: subprocess.Popen, code: str):
    """The `python` that asks a server, and that server."""
    fork_server.write_python(tmp_path)
    (tmp_path / "actors.py").write_text("import ray\nray.remote(type('Actor', (), {}))\n")
    environment = {name: value for name, value in os.environ.items() if name != "RAY_AUTH_MODE"}
    environment["PYTHONPATH"] = str(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path), str(owner.pid)], cwd=ROOT, env=environment
    ) as server:
        try:
            until(lambda: (tmp_path / "listens").exists())
            yield str(tmp_path / "python"), server
        finally:
            server.kill()


@pytest.fixture
def python(tmp_path, owner):
    with serving(tmp_path, owner, SERVER) as (python, _):
        yield python


def script(tmp_path: Path, text: str) -> str:
    (tmp_path / "script.py").write_text(text)
    return str(tmp_path / "script.py")


def is_fork(process: psutil.Process) -> bool:
    return "forked.serve" in " ".join(process.parent().cmdline())


def ask(client: socket.socket, arguments: list[str], environment: dict[str, str], length: int | None = None) -> None:
    """Send the first ``length`` bytes of what fork_client.py sends."""
    asked = {"arguments": arguments, "environment": environment, "folder": "/", "files": [0, 1, 2]}
    body = json.dumps({**asked, "mask": 0o22, "group": 0, "ignored": []}).encode()
    socket.send_fds(client, [len(body).to_bytes(8, "little")], [0, 1, 2])
    client.sendall(body[:length])


def connected(client: socket.socket, path: str) -> bool:
    return client.connect_ex(path) == 0


def test_a_fork_has_the_arguments_environment_folder_and_files_of_its_client(python, tmp_path):
    tells = """import json, os, sys
print(json.dumps([sys.argv[1:], os.environ["OWN"], os.getcwd(), __name__, "numpy" in sys.modules]))
os.write(int(sys.argv[1]), b"through the pipe")
print(sys.stdin.read(), file=sys.stderr)
sys.exit(3)"""
    (tmp_path / "folder").mkdir()
    read, write = os.pipe()
    run = {"capture_output": True, "text": True, "input": "typed", "cwd": tmp_path / "folder", "pass_fds": [write]}
    given = {**os.environ, "OWN": "a\nb"}
    result = subprocess.run([python, script(tmp_path, tells), str(write), "é"], env=given, **run)
    folder = str(tmp_path / "folder")
    assert json.loads(result.stdout) == [[str(write), "é"], "a\nb", folder, "__main__", True], result
    assert (result.returncode, result.stderr) == (3, "typed\n") and os.read(read, 100) == b"through the pipe"


def test_multiprocessing_spawns_forks(python, tmp_path):
    work = """import multiprocessing, os, sys

def work(queue):
    queue.put((os.getpid(), "numpy" in sys.modules))
    sys.exit(5)

if __name__ == "__main__":
    spawn = multiprocessing.get_context("spawn")
    queue = spawn.Queue()
    process = spawn.Process(target=work, args=(queue,))
    process.start()
    print(*queue.get(timeout=20), process.pid)
    process.join()
    print(process.exitcode)
"""
    result = subprocess.run([python, script(tmp_path, work)], capture_output=True, text=True, timeout=60)
    (child, imported, client), (code,) = (line.split() for line in result.stdout.splitlines())
    assert imported == "True" and child != client and code == "5", result  # the client stands in for the fork


def test_the_trainer_is_a_fork_before_all_is_imported(tmp_path, owner):
    """The first client needs the first of IMPORTS alone; the second waits for the others."""
    tells = script(tmp_path, "import sys\nprint('numpy' in sys.modules, 'slow' in sys.modules)")
    (tmp_path / "slow.py").touch()
    code = SERVER.replace('"actors")', '"slow")').replace('"email")', '"email", trainer=True)')
    with serving(tmp_path, owner, code) as (python, _):
        said = [subprocess.check_output([python, tells], text=True, timeout=60) for _ in range(2)]
    assert said == ["True False\n", "True True\n"]


@pytest.mark.medium
def test_vllm_looks_at_a_model_in_a_fork(tmp_path, owner):
    look = """import os, sys
from vllm.model_executor.models import registry
print(*registry._run_in_subprocess(lambda: (os.getppid(), "actors" in sys.modules)))"""
    imports = ", 'vllm.model_executor.models.registry'"
    with serving(tmp_path, owner, SERVER.replace(', "actors"', ', "actors"' + imports)) as (python, server):
        result = subprocess.run([python, script(tmp_path, look)], capture_output=True, text=True, timeout=120)
        assert result.stdout.split() == [str(server.pid), "True"], result


def test_a_signal_reaches_the_fork_and_its_end_is_the_clients(python, tmp_path):
    waits = script(tmp_path, "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)")
    with subprocess.Popen([python, waits], stdout=subprocess.PIPE, text=True) as client:
        assert int(client.stdout.readline()) != client.pid
        client.terminate()
        assert client.wait(20) == -signal.SIGTERM


@pytest.mark.parametrize("ended", ["client", "trainer"])
def test_a_fork_ends_with_its_client_and_with_the_trainer(ended, python, tmp_path, owner):
    waits = script(tmp_path, "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)")
    with subprocess.Popen([python, waits], stdout=subprocess.PIPE, text=True) as client:
        fork = psutil.Process(int(client.stdout.readline()))
        assert is_fork(fork)
        (client if ended == "client" else owner).kill()
        until(lambda: has_ended(fork.pid))
        assert client.wait(20) == -signal.SIGKILL


def test_a_client_that_is_gone_ends_only_its_fork(tmp_path, owner):
    """It ends before it is accepted: the server stands still meanwhile. It sent nothing, half, and all."""
    sleeps, tells = "import time; time.sleep(600)", script(tmp_path, "import sys\nprint('numpy' in sys.modules)")
    with serving(tmp_path, owner, SERVER) as (python, server):
        for length, environment in ((None, None), (20, {}), (None, {"RAY_JOB_ID": "02000000"}), (None, {})):
            server.send_signal(signal.SIGSTOP)
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(tmp_path / "fork"))
                if environment is not None:
                    ask(client, ["-c", sleeps], environment, length)
            server.send_signal(signal.SIGCONT)
            assert subprocess.check_output([python, tells], text=True) == "True\n", (length, environment)
            until(lambda: not psutil.Process(server.pid).children())


def test_a_client_that_says_nothing_holds_up_the_others_for_a_while_alone(tmp_path, owner):
    tells = script(tmp_path, "import sys\nprint('numpy' in sys.modules)")
    once = """start = fork_server.Server._start
def once(*given):
    start(*given)
    fork_server.SECONDS_TO_ASK = 20  # the next one has time
fork_server.SECONDS_TO_ASK, fork_server.Server._start = 1, once
forked.serve("""
    with (
        serving(tmp_path, owner, SERVER.replace("forked.serve(", once)) as (python, _),
        socket.socket(socket.AF_UNIX) as client,
    ):
        client.connect(str(tmp_path / "fork"))
        assert subprocess.check_output([python, tells], text=True, timeout=60) == "True\n"


@pytest.mark.parametrize("changed", [{"RAY_JOB_ID": "02000000"}, {"RAY_AUTH_MODE": "disabled"}])
def test_what_ray_read_when_it_was_imported_must_be_the_same(changed, python, tmp_path):
    tells = script(tmp_path, "import sys\nprint('numpy' in sys.modules)")
    for given, said in (({"RAY_JOB_ID": "01000000", "RAY_AUTH_MODE": "token"}, "True\n"), (changed, "False\n")):
        run = subprocess.run([python, tells], env={**os.environ, **given}, capture_output=True, text=True)
        assert run.stdout == said, run


def test_without_a_server_the_client_is_a_fresh_python(python, tmp_path, owner):
    owner.kill()
    tells = script(tmp_path, "import sys\nprint(sys.argv[1:], 'numpy' in sys.modules)")
    until(lambda: subprocess.run([python, tells, "a"], capture_output=True, text=True).stdout == "['a'] False\n")


@pytest.mark.parametrize("named", ["sp ace", "it's $HOME", "é", "long" * 60])
def test_the_python_of_a_training_works_in_a_checkout_of_any_path(named, tmp_path, monkeypatch):
    """A #! line ends at a space, and after 127 or 255 characters."""
    launch, checkout = tmp_path / "launch", tmp_path / named
    launch.mkdir()
    checkout.mkdir()
    for name in ("fork_client.py", "fork_server.py"):
        shutil.copy(Path(fork_server.__file__).with_name(name), checkout)
    (checkout / "python").symlink_to(sys.executable)
    executed = []
    with monkeypatch.context() as patched:
        patched.setattr(sys, "executable", str(checkout / "python"))
        patched.setattr(fork_server, "__file__", str(checkout / "fork_server.py"))
        patched.setenv(LAUNCH, str(launch))
        patched.delenv("RAY_ADDRESS", raising=False)
        patched.setattr(subprocess, "Popen", lambda *_, **__: None)  # no server: the client is a fresh Python
        patched.setattr(os, "execv", lambda *given: executed.append(given))
        forked.main(["--trainer", "a_module", "verl.trainer.main_ppo", "an=argument"])
    ((python, words),) = executed
    given = f"+ray_kwargs.ray_init.runtime_env.py_executable={python}"
    assert words == [python, "-m", "verl.trainer.main_ppo", "an=argument", given]
    given = ["", "a b", "$HOME 'é\n", "-c"]
    tells = script(tmp_path, "import json, sys\nprint(json.dumps([sys.executable, *sys.argv[1:]]))")
    result = subprocess.run([python, tells, *given], capture_output=True, text=True)
    assert result.returncode == 0 and json.loads(result.stdout) == [str(checkout / "python"), *given], result


def test_a_forks_collections_leave_out_what_the_server_imported(python):
    counted = subprocess.check_output([python, "-c", "import gc; print(gc.get_freeze_count())"], text=True)
    assert int(counted) > 10_000


def test_a_fork_has_the_threads_of_rays_workers(monkeypatch, tmp_path, owner):
    """All cores' threads in each process made a step last 35 s where twelve trainings had 32 cores."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    code = "import ray._private.utils as u, torch; u.set_omp_num_threads_if_unset(); print(torch.get_num_threads())"
    with serving(tmp_path, owner, SERVER.replace('"actors"', '"actors", "torch"')) as (python, _):
        assert int(subprocess.check_output([python, "-c", code], text=True, timeout=100)) == 1


DRAW = "import ray._raylet as ray; print(ray.TaskID.for_fake_task(ray.JobID.from_int(1)).hex())"


def test_two_forks_draw_other_ids_of_ray(python):
    """Ray gives the IDs of tasks and objects: with the same, agent loops ended vLLM's server."""
    ids = [subprocess.check_output([python, "-c", DRAW], text=True) for _ in range(2)]
    assert len(ids[0].strip()) == 48 and ids[0] != ids[1]


@pytest.mark.parametrize("own", [True, False])
def test_only_own_ids_keep_an_actor_class_from_giving_forks_the_same(own):
    """What own_ids is for. If Ray comes to seed each fork, the second case says so."""
    drawn = f"""import os, sys
from contextlib import nullcontext
from verl_tasks.verl_plugins import forked
import ray
with {"forked.own_ids()" if own else "nullcontext()"}:
    ray.remote(type("Actor", (), {{}}))
for _ in range(2):
    if not os.fork():
        {DRAW}
        sys.stdout.flush()
        os._exit(0)
    os.wait()
"""
    ids = subprocess.check_output([sys.executable, "-c", drawn], cwd=ROOT, text=True).split()
    assert len(ids) == 2 and (ids[0] != ids[1]) is own


def test_where_an_import_started_cuda_each_process_imports_by_itself(tmp_path, owner):
    """The driver answers cuDeviceGetCount with 3 until something starts it: then no fork could use a GPU."""
    driver = "SimpleNamespace(cuDeviceGetCount=lambda count: {})"
    ctypes = f"SimpleNamespace(CDLL=lambda name: {driver}, byref=id, c_int=int)"
    given = f"from types import SimpleNamespace\nforked.ctypes = {ctypes}\nforked.serve"
    started = SERVER.replace(', "actors"', ",").replace("forked.serve", given)
    for answer, fresh in ((0, True), (100, True), (3, False)):
        folder = tmp_path / str(answer)
        folder.mkdir()
        command = [sys.executable, "-c", started.format(answer), str(folder), str(owner.pid)]
        with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as server:
            with socket.socket(socket.AF_UNIX) as client:
                until(functools.partial(connected, client, str(folder / "fork")))
                ask(client, ["-c", ""], {})
                line = client.makefile().readline()
            assert (line == "fresh\n") is fresh and (fresh or line.strip().isdigit())
            server.kill()
            assert ("an import started CUDA" in server.stderr.read()) is fresh


@pytest.mark.medium
def test_what_a_gpu_training_imports_without_cuda_leaves_no_trace_of_how():
    code = """
import sys, torch
from verl_tasks.verl_plugins import forked
asked = torch.cuda.get_device_capability
with forked.without_cuda():
    assert torch.cuda.get_device_capability is not asked and sys.modules[forked.KERNELS] is None
assert forked.KERNELS not in sys.modules and torch.cuda.get_device_capability is asked
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


TELLS = """import os, signal, sys
print(sys.argv, sys.path[0], __name__, __file__, os.getcwd())
print(sorted(item for item in os.environ.items() if item[0] not in ("PWD", "OLDPWD", "SHLVL", "_")))  # a shell's
print(sys.stdin.read(), os.umask(0), os.getpgrp(), signal.getsignal(signal.SIGINT))
print("error", file=sys.stderr)
sys.exit(int(sys.argv[1]) if sys.argv[1].isdigit() else sys.argv[1])
"""
FORKED = "import sys\nprint('pandas' in sys.modules)\n"


@pytest.fixture(scope="module")
def warm(tmp_path_factory) -> Path:
    return install(tmp_path_factory.mktemp("warm") / "bin", ["pandas"])


@pytest.fixture
def written(tmp_path):
    def write(text: str) -> Path:
        (tmp_path / "tasks").mkdir(exist_ok=True)
        (tmp_path / "tasks/script.py").write_text(text)
        return tmp_path / "tasks/script.py"

    return write


@pytest.fixture
def environment():
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "FRESH_PYTHON")}


@pytest.mark.parametrize("status", ["0", "3", "one line of error"])
def test_a_fork_inherits_what_a_fresh_python_does(status, warm, written, environment, tmp_path):
    tells = written(TELLS)
    given = environment | {"OWN": "a\nb", "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "PYTHON": "x"}
    run = {"cwd": tmp_path, "env": given, "input": "typed", "capture_output": True, "text": True}
    fork, fresh = (subprocess.run([each, tells, status, "é"], **run) for each in (warm, sys.executable))
    assert (fork.returncode, fork.stdout, fork.stderr) == (fresh.returncode, fresh.stdout, fresh.stderr)
    assert "typed" in fork.stdout and "error" in fork.stderr


def test_what_is_compiled_of_ours_is_kept_beside_the_python_and_of_packages_where_they_are(
    warm, written, environment, tmp_path
):
    (tmp_path / "tasks/own.py").parent.mkdir()
    (tmp_path / "tasks/own.py").touch()
    tells = written("import pandas, tasks.own\nprint(pandas.__cached__, tasks.own.__cached__)\n")
    given = {"env": environment | {"PYTHONPATH": str(tmp_path)}, "capture_output": True, "text": True, "check": True}
    package, own = subprocess.run([warm, tells], **given).stdout.split()
    assert Path(package).is_relative_to(sys.prefix) and Path(own).is_relative_to(warm.parent / "pycache")


def test_commands_are_forked_also_those_that_a_command_starts(warm, written, environment, tmp_path):
    forked = written(FORKED)
    outer = tmp_path / "tasks/outer.py"
    outer.write_text(f"import subprocess, sys\nsubprocess.run([sys.executable, {str(forked)!r}], check=True)\n")
    for file in (forked, outer):
        assert subprocess.run([warm, file], env=environment, capture_output=True, text=True).stdout == "True\n"


@pytest.mark.parametrize("environment_of", ["this process", "make", "a stage"])
def test_the_tests_own_commands_are_forked(environment_of, written, tmp_path):
    """Whatever the imports of all test files have set by now, and whatever the tests before this one did."""
    environments = {
        "this process": os.environ | {"PYTHONPATH": str(ROOT)},
        "make": outside_make(),
        "a stage": exported(ROOT / "tasks/countdown/train.sh", {}),
    }
    environment = {k: v for k, v in environments[environment_of].items() if k != "FRESH_PYTHON"}
    result = subprocess.run([PYTHON, written(FORKED)], env=environment, capture_output=True, text=True)
    assert result.stdout == "True\n", result.stderr


def test_the_leader_of_a_session_is_a_fork_with_a_session_of_its_own(warm, written, environment):
    told = written(FORKED + "import os\nprint(os.getsid(0) == os.getpid() == os.getpgrp())\n")
    result = subprocess.run([warm, told], env=environment, capture_output=True, text=True, start_new_session=True)
    assert result.stdout == "True\nTrue\n", result.stderr
    within = ["bash", "-c", f"'{warm}' '{written(FORKED)}'; true"]  # its group is that of the shell
    result = subprocess.run(within, env=environment, capture_output=True, text=True, start_new_session=True)
    assert result.stdout == "False\n", result.stderr


def test_a_fresh_python_where_a_fork_could_differ(warm, written, environment, tmp_path):
    # The modules of a PYTHONPATH could stand in for those that are imported already.
    differing = {"OMP_NUM_THREADS": "1234", "PYTHONHASHSEED": "1", "PYTHONPATH": "/tmp", "FRESH_PYTHON": "1"}
    differing |= {"VERL_TASK_LAUNCH": "/tmp"}  # its keeper would not see the fork
    for name, value in differing.items():
        run = [warm, written(FORKED)]
        result = subprocess.run(run, env=environment | {name: value}, capture_output=True, text=True)
        assert result.stdout == "False\n", (name, result.stderr)
    (tmp_path / "hook.py").write_text(FORKED)  # of no task: cookiecutter's hooks look at their parent
    result = subprocess.run([warm, tmp_path / "hook.py"], env=environment, capture_output=True, text=True)
    assert result.stdout == "False\n", result.stderr


def test_an_uncaught_error_has_its_traceback_and_its_status(warm, written, environment):
    result = subprocess.run([warm, written("1 / 0")], env=environment, capture_output=True, text=True)
    assert result.returncode == 1 and result.stderr.splitlines()[-1] == "ZeroDivisionError: division by zero"
