"""Running an engine process: what is said when it fails, and that nothing of it is left."""

import errno
import os
import shutil
import subprocess
import sys
import time

import psutil
import pytest

from verl_tasks import alive, leftovers, process
from verl_tasks.process import Progress, StageFailed, run


def run_python(code, tmp_path, **kwargs):
    return run(
        [sys.executable, "-c", code],
        name="stage",
        log=tmp_path / "logs/stage.log",
        total=2,
        watch=kwargs.pop("watch", lambda: Progress()),
        **kwargs,
    )


def waits_for(file) -> str:
    """Python that goes on once there is ``file``, or after a minute."""
    return f"import os, time\nfor _ in range(1200): os.path.exists({str(file)!r}) or time.sleep(0.05)\n"


@pytest.mark.medium
def test_output_goes_to_the_log_and_progress_to_the_screen(tmp_path, capfd):
    steps = iter([Progress(0, " starting"), Progress(1, " reward 0.5")])

    def watch() -> Progress:
        if (step := next(steps, None)) is None:
            (tmp_path / "watched").touch()
        return step or Progress(2, " end")

    run_python(f"print('noise')\n{waits_for(tmp_path / 'watched')}", tmp_path, watch=watch)
    screen = capfd.readouterr().out
    assert "noise" not in screen and "logs/stage.log" in screen
    assert "reward 0.5" in screen and "2/2" in screen
    assert (tmp_path / "logs/stage.log").read_text() == "noise\n"


def test_failure_names_the_first_real_error_and_the_log(tmp_path):
    code = """
print("(WorkerDict pid=7) ValueError: the cause")
print("BufferError: cannot close exported pointers exist")
print("ray.exceptions.RayTaskError(ValueError): ray::f()")
raise SystemExit(3)
"""
    with pytest.raises(StageFailed) as failure:
        run_python(code, tmp_path)
    first, *rest = str(failure.value).splitlines()
    assert first == "ValueError: the cause"
    assert rest[-2] == "  | ValueError: the cause" and rest[-1].endswith("logs/stage.log")


FRAMES = """\
(WorkerDict pid=7) *** SIGTERM received at time=1795386071 on cpu 3 ***
(WorkerDict pid=7) PC: @     0x7f1e5a3f1e26  (unknown)  epoll_wait
(WorkerDict pid=7)     @     0x7f1e5a30f520       3600  (unknown)
(WorkerDict pid=7)     @ ... and at least 3 more frames
(WorkerDict pid=7) [2026-11-22 22:31:11,001 E 7 7] logging.cc:501: *** SIGTERM received at time=1795386071 on cpu 3 ***
(WorkerDict pid=7) [2026-11-22 22:31:11,002 E 7 7] logging.cc:501:     @     0x7f1e5a30f520       3600  (unknown)
"""


@pytest.mark.parametrize("cause", ["RuntimeError: The size of tensor a (192) must match", ""])
def test_frames_of_workers_that_ray_ended_are_not_shown_in_place_of_the_cause(tmp_path, cause):
    code = f"""
print('  File "/verl/core.py", line 9, in step\\n    return f(x)\\n           ^^^^')
print({cause!r})
print({FRAMES!r})
raise SystemExit(3)
"""
    with pytest.raises(StageFailed) as failure:
        run_python(code, tmp_path)
    first, *rest = str(failure.value).splitlines()
    assert first == (cause or "stage ended with exit code 3")
    shown = ['File "/verl/core.py", line 9, in step', "return f(x)", *([cause] if cause else [])]
    assert [line.removeprefix("  | ").strip() for line in rest[:-1]] == shown


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["[rank0]:   File x", "[rank0]: IndexError: out of range"], "IndexError: out of range\n  |   File x"),
        (["ValueError: no kind", "verl_tasks.errors.SettingsError: MODEL=m: vLLM: no"], "MODEL=m: vLLM: no\n  log:"),
    ],
)
def test_torchs_prefix_hides_no_error_and_one_of_ours_needs_no_traceback(lines, said, tmp_path):
    log = tmp_path / "log"
    log.write_text("\n".join(lines) + "\n")
    assert process.report(log, "exit code 1").startswith(said)


def test_failure_without_an_error_line_names_the_exit_code(tmp_path):
    with pytest.raises(StageFailed, match="stage ended with exit code 5"):
        run_python("raise SystemExit(5)", tmp_path)


@pytest.mark.medium
def test_a_process_that_hangs_after_its_engine_died_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(process, "GRACE_SECONDS", 1)
    started = time.monotonic()
    with pytest.raises(StageFailed, match="EngineDeadError: gone"):
        run_python("print('EngineDeadError: gone', flush=True); import time; time.sleep(60)", tmp_path)
    assert time.monotonic() - started < 30


@pytest.mark.parametrize(
    ("told", "seconds"),
    [
        (["error"], process.NOTICE_SECONDS),
        (["error", "saves"], process.SAVING_SECONDS),
        (["error", "saves", "EngineDeadError: gone"], process.GRACE_SECONDS),
        (["EngineDeadError: gone", "saves"], process.GRACE_SECONDS),
        (["all is well"], float("inf")),
    ],
)
def test_what_is_told_decides_how_long_the_end_may_take(told, seconds, tmp_path, monkeypatch):
    now, due, ours = 1000.0, {}, set()
    life = alive.Watch(tmp_path, tmp_path, tmp_path / "x.log", 0)
    monkeypatch.setenv(leftovers.LAUNCH, str(tmp_path))
    monkeypatch.setattr(process.time, "monotonic", lambda: now)
    deadlines = []
    for each in told:
        {"error": lambda: alive.failed(ValueError("x")), "saves": alive.saves}.get(each, lambda: None)()
        deadlines.append(process._deadline(each, life, due, ours))
    now += 5
    assert process._deadline("", life, due, ours) == deadlines[-1] == 1000 + seconds


TELLS = """
from verl_tasks.alive import failed
print("ValueError: an engine is aborted")
print("verl_tasks.rewards.answers.RewardError: the task's\\n  own")
failed(RuntimeError("the task's\\n  own"))
failed(RuntimeError("what follows from it"))
raise SystemExit(3)
"""


def test_the_first_error_that_a_process_tells_is_the_cause(tmp_path):
    with pytest.raises(StageFailed) as failure:
        run_python(TELLS, tmp_path, environment={"PYTHONPATH": os.getcwd()})
    assert str(failure.value).splitlines()[0] == "RuntimeError: the task's own"


@pytest.mark.medium
def test_daemons_and_shared_memory_of_the_process_do_not_outlive_it(tmp_path):
    code = """
import subprocess, sys, multiprocessing.resource_tracker as tracker
from multiprocessing import shared_memory
tracker.register = lambda *a: None
memory = shared_memory.SharedMemory(create=True, size=64)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(child.pid, memory.name, flush=True)
"""
    log, said = tmp_path / "logs/stage.log", []

    def watch() -> Progress:
        """After each call the launcher looks who has mapped what."""
        said.append(log.read_text())
        if [text.endswith("\n") for text in said[-2:]] == [True, True]:  # it has looked since
            (tmp_path / "looked").touch()
        return Progress()

    run_python(f"{code}{waits_for(tmp_path / 'looked')}", tmp_path, watch=watch)
    pid, name = log.read_text().split()
    assert name.startswith("psm_")
    assert not psutil.pid_exists(int(pid)) and not os.path.exists(f"/dev/shm/{name}")


@pytest.mark.parametrize(
    "code",
    [
        "from multiprocessing import shared_memory\n"
        "memory = shared_memory.SharedMemory(create=True, size=64)\n"
        "print(memory.name, flush=True)\n",
        "import multiprocessing\n"
        "lock = multiprocessing.get_context('spawn').Lock()\n"
        "print('sem.' + lock._semlock.name[1:], flush=True)\n",
    ],
    ids=["memory", "semaphore"],
)
def test_shared_memory_that_another_process_uses_is_kept(code):
    with subprocess.Popen(
        [sys.executable, "-c", code + "input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        file = process.Path("/dev/shm") / other.stdout.readline().strip()
        try:
            leftovers._remove({file.stat().st_ino: file})
            assert file.exists()
        finally:
            other.communicate("\n")


def test_interruption_ends_the_process(tmp_path):
    def interrupt():
        raise KeyboardInterrupt

    before = psutil.Process().children(recursive=True)  # the server of the tests' own Python
    with pytest.raises(KeyboardInterrupt):
        run_python("import time; print('x', flush=True); time.sleep(600)", tmp_path, watch=interrupt)
    assert psutil.Process().children(recursive=True) == before


def test_what_a_killed_launcher_left_is_ended_before_the_next_start(tmp_path):
    environment = {**os.environ, leftovers.LOGS: str(tmp_path / "logs")}
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env=environment) as leftover:
        run_python("pass", tmp_path)
        leftover.wait(timeout=10)  # raises if it still runs


ABORTED = "terminate called after throwing 'std::system_error'\n  what():  Resource temporarily unavailable"
NO_THREAD = "import threading; threading.stack_size(2**46); threading.Thread(target=print).start()"


@pytest.mark.parametrize("code", [NO_THREAD, f"import os\nos.write(2, {ABORTED!r}.encode())\nos.abort()"])
def test_a_thread_that_the_machine_refuses_ends_the_run_with_what_to_do(code, tmp_path):
    with pytest.raises(StageFailed, match=r"\Athe machine allows no more threads: lower JOBS, or raise `sysctl kernel"):
        run_python(code, tmp_path)


def test_a_full_disk_is_the_cause_also_where_the_log_could_not_be_written(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    said = rf"\Ano space left on the disk of {tmp_path}/logs; free some, then the same command continues\n"
    with pytest.raises(StageFailed, match=said):
        run_python("raise SystemExit(3)", tmp_path)


def test_an_os_error_of_the_users_code_has_its_type_and_place(capsys):
    with pytest.raises(SystemExit) as ended, process.errors_in_one_line():
        raise ConnectionError("db down")
    assert ended.value.code.startswith("error: ConnectionError: db down (tests/test_process.py:")


def test_a_full_disk_ends_a_command_in_one_line_with_what_to_do(capsys):
    with pytest.raises(SystemExit) as ended, process.errors_in_one_line():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "file")
    said = "error: [Errno 28] No space left on device: 'file'; free some, then the same command continues"
    assert ended.value.code == said
