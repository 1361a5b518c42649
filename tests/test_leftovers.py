"""Nothing of a stage outlives its launcher, however that ends: signals, a second Ctrl-C, SIGKILL of it or its group.

In place of Ray: daemons that hear no signal, one of them without an environment, shared memory, and a temporary file.
"""

import functools
import os
import signal
import subprocess
import sys
import tempfile
import time
from itertools import filterfalse
from pathlib import Path

import psutil
import pytest

from tests.helpers import has_ended, until
from verl_tasks.leftovers import ENDING, Interrupts, Launch, interrupt_on_sigterm
from verl_tasks.settings import ROOT

STUBBORN = """
import os, signal, sys, time
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
"""
DAEMON = f"""{STUBBORN}
import multiprocessing.resource_tracker as tracker, socket, tempfile
from multiprocessing import shared_memory
tracker.register = lambda *a: None
memory = shared_memory.SharedMemory(create=True, size=64)
address = f"{{tempfile.gettempdir()}}/leftover-{{os.getpid()}}"  # vLLM makes sockets there
socket.socket(socket.AF_UNIX).bind(address)
open(sys.argv[1], "w").write(f"{{os.getpid()}} {{memory.name}} {{os.environ['RAY_TMPDIR']}} {{address}}")
time.sleep(600)
"""
AGENT = f"{STUBBORN}\nopen(sys.argv[1], 'w').write(str(os.getpid()))\ntime.sleep(600)"
STAGE = f"""{STUBBORN}
import subprocess
from pathlib import Path
folder = Path(sys.argv[1])
Path(os.environ["RAY_TMPDIR"], "session").mkdir()
daemon = {{"start_new_session": True}}
subprocess.Popen([sys.executable, "-c", {DAEMON!r}, folder / "daemon"], **daemon)
subprocess.Popen([sys.executable, "-c", {AGENT!r}, folder / "agent"], env={{}})
open(folder / "stage", "w").write(str(os.getpid()))
for _ in range(12000):
    (folder / "end").exists() or time.sleep(0.05)
"""
LAUNCHER = f"""
import sys, time
from pathlib import Path
from verl_tasks.leftovers import interrupt_on_sigterm
from verl_tasks.process import Progress, errors_in_one_line, run
interrupt_on_sigterm()
folder = Path(sys.argv[1])
with errors_in_one_line(stopped="stopped"):
    command = [sys.executable, "-c", {STAGE!r}, str(folder)]
    run(command, name="stage", log=folder / "logs/stage.log", total=1, watch=Progress)
    print("went on", flush=True)
"""


@pytest.fixture(autouse=True)
def interrupt_as_in_a_terminal():
    """A script's background job, and all that it starts, ignores SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Tree:
    """A launcher with its stage and daemons; ``left`` says what of them there is. Its clean-up waits TERMINATE_SECONDS
    for the daemons, which hear no signal."""

    def __init__(self, folder: Path):
        self.folder = folder
        command = [sys.executable, "-c", LAUNCHER, str(folder)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        heard = functools.partial(signal.signal, signal.SIGHUP, signal.SIG_DFL)  # where pytest itself runs by nohup
        self.launcher = subprocess.Popen(command, cwd=ROOT, **pipes, start_new_session=True, preexec_fn=heard)
        said = [(folder / name) for name in ("daemon", "agent", "stage")]
        until(lambda: all(file.exists() and file.read_text() for file in said), 60)
        daemon, memory, *temporary = said[0].read_text().split()
        self.processes = [int(daemon), *(int(file.read_text()) for file in said[1:])]
        self.files = [Path("/dev/shm") / memory, *map(Path, temporary)]
        time.sleep(1.2)  # the keeper looks every half second who has mapped what
        assert len(self.left()) == 6

    def left(self) -> list:
        return [*filterfalse(has_ended, self.processes), *(file for file in self.files if file.exists())]

    def end_stage(self) -> None:
        (self.folder / "end").touch()

    def output(self) -> str:
        return self.launcher.communicate(timeout=30)[0]


@pytest.mark.medium
@pytest.mark.parametrize("number", [pytest.param(signal.SIGHUP, marks=pytest.mark.slow), signal.SIGINT])
def test_signals_during_the_clean_up_do_not_break_it_off(number, tmp_path):
    tree = Tree(tmp_path)
    os.kill(tree.launcher.pid, number)
    for again in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
        os.killpg(tree.launcher.pid, again)
        time.sleep(0.2)
        assert tree.launcher.poll() is None
    said = tree.output()
    assert tree.launcher.returncode == 130 and said.endswith("\nstopped\n"), said
    assert tree.left() == []


@pytest.mark.slow
def test_a_signal_in_the_clean_up_of_a_stage_that_ended_waits_for_it(tmp_path):
    tree = Tree(tmp_path)
    tree.end_stage()
    until(lambda: has_ended(tree.processes[2]), 30)
    os.kill(tree.launcher.pid, signal.SIGINT)
    said = tree.output()
    assert tree.launcher.returncode == 130 and "went on" not in said
    assert tree.left() == []


@pytest.mark.medium
@pytest.mark.parametrize("kill", [os.kill, pytest.param(os.killpg, marks=pytest.mark.slow)], ids=["launcher", "group"])
def test_ten_seconds_after_a_kill_nothing_is_left(kill, tmp_path):
    tree = Tree(tmp_path)
    (keeper,) = psutil.Process(tree.launcher.pid).children()
    kill(tree.launcher.pid, signal.SIGKILL)
    tree.launcher.wait()
    until(lambda: tree.left() == [], 10)
    until(lambda: has_ended(keeper.pid), 10)


@pytest.mark.medium
def test_shared_memory_that_no_process_of_ours_has_mapped_stays(tmp_path):
    """With --ipc=host another container's: its processes cannot be seen, so nobody seems to use the file."""
    tree = Tree(tmp_path)
    theirs = Path(f"/dev/shm/psm_test{os.getpid()}")
    theirs.write_bytes(b"theirs")
    try:
        time.sleep(1)
        tree.launcher.terminate()
        tree.output()
        assert tree.left() == [] and theirs.read_bytes() == b"theirs"
    finally:
        theirs.unlink()


CHAT = """
import os, sys
from pathlib import Path
from verl_tasks.leftovers import Launch
launch = Launch(Path(sys.argv[1]))
socket = "import os, socket, sys, tempfile; name = tempfile.gettempdir() + '/socket'\\n"
socket += "socket.socket(socket.AF_UNIX).bind(name); print(name, flush=True); sys.stdin.read()"
os.execve(sys.executable, [sys.executable, "-c", socket], os.environ | launch.environment)
"""


@pytest.mark.medium
@pytest.mark.parametrize("kill", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["killed", "ended"])
def test_the_sockets_of_a_program_in_place_of_the_launcher_go_with_it(kill, tmp_path):
    """`make chat`: vLLM makes sockets in the folder of temporary files."""
    command = [sys.executable, "-c", CHAT, str(tmp_path)]
    chat = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    made = Path(chat.stdout.readline().strip())
    time.sleep(1.5)
    assert made.exists() and chat.poll() is None  # the keeper waits
    chat.kill() if kill else chat.stdin.close()
    assert chat.wait(30) == (-signal.SIGKILL if kill else 0)
    until(lambda: not made.parent.exists(), 10)


@pytest.mark.parametrize(("name", "used"), [("a", True), ("a b", False), ("a" * 30, False)])
def test_a_launchs_folder_is_one_in_which_ray_can_start_workers(name, used, monkeypatch):
    """It gives the path to a shell as it is, and makes sockets in it."""
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as short:
        (Path(short) / name).mkdir()
        monkeypatch.setattr(tempfile, "tempdir", f"{short}/{name}")
        launch = Launch(Path(short) / "logs")
        launch.end()
        assert launch.folder.parent == (Path(short, name) if used else Path("/tmp"))


@pytest.fixture
def heeded():
    """Under nohup, or in the background, a process ignores some of these signals."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in ENDING}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_what_nohup_has_ignored_stays_ignored(heeded):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    interrupt_on_sigterm()
    with Interrupts():
        try:
            signal.raise_signal(signal.SIGHUP)
        except KeyboardInterrupt:
            pytest.fail("it was heard")
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)


def test_only_the_first_signal_of_a_block_is_an_interrupt(heeded):
    before = signal.getsignal(signal.SIGHUP)
    with pytest.raises(KeyboardInterrupt), Interrupts() as interrupts:
        try:
            signal.raise_signal(signal.SIGHUP)
        finally:
            with interrupts.held():
                signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGTERM)
            held = True
    assert held and signal.getsignal(signal.SIGHUP) == before
    with pytest.raises(KeyboardInterrupt), Interrupts() as interrupts, interrupts.held():
        signal.raise_signal(signal.SIGINT)
        held = "to the end"
    assert held == "to the end"
