"""Running an engine process: what is said when it fails, and that nothing of it is left.

What watches a training must never end it (a full disk, a damaged line, a step with a validation alone), but one that
stands still ends and says what it waited for (tasks/common/alive.py).
"""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tests.helpers import PYTHON, ROOT, until
from tests.test_keep_best import row, write_whole
from tests.test_settings import VALUES
from verl_tasks import alive, leftovers, process
from verl_tasks.files import LONGEST_LINE, NewLines
from verl_tasks.launch import main, train
from verl_tasks.launch.plan import rl_plan
from verl_tasks.leftovers import LAUNCH
from verl_tasks.process import Progress, StageFailed, _Screen, run
from verl_tasks.runs import health
from verl_tasks.runs.run import Followed, Run, ends_run, prune, read_metrics
from verl_tasks.settings import SettingsError, load_settings


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


def test_a_command_that_nothing_reads_says_so():
    code = "from verl_tasks.process import errors_in_one_line\nwith errors_in_one_line():\n    print('x', flush=True)"
    screen, end = os.pipe()
    os.close(screen)
    result = subprocess.run([PYTHON, "-c", code], cwd=ROOT, stdout=end, stderr=subprocess.PIPE, text=True)
    said = "error: stopped, for nothing reads its output any more; write it to a file: >FILE\n"
    assert (result.returncode, result.stderr) == (1, said)


def test_a_full_disk_ends_a_command_in_one_line_with_what_to_do(capsys):
    with pytest.raises(SystemExit) as ended, process.errors_in_one_line():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "file")
    said = "error: [Errno 28] No space left on device: 'file'; free some, then the same command continues"
    assert ended.value.code == said


DAMAGED = ["\0\0\0", "{", '{"step": 2}', "[]", '{"step": [], "data": {}}', "[" * 100_000]


@pytest.fixture
def settings(tmp_path, monkeypatch):
    monkeypatch.setenv("ARTIFACTS", str(tmp_path))
    return replace(load_settings(VALUES), STEPS=9)


def logged(run_dir: Path, *lines: str) -> Path:
    file = run_dir / "metrics/000.jsonl"
    file.parent.mkdir(parents=True)
    file.write_text("".join(f"{line}\n" for line in lines))
    return file


def line(step: int, **data) -> str:
    return json.dumps({"step": step, "data": data})


def shown(plan) -> Progress:
    return train.Bar(plan).progress()


def test_the_bar_shows_a_step_that_logged_a_validation_alone(settings, tmp_path):
    plan = rl_plan(settings, Run.read(tmp_path / "run"), "some/model")
    validation = json.dumps({"step": 2, "data": row(0.5)}).replace('"critic/score/mean": 9.0', '"x": 1')
    logged(tmp_path / "run", validation)
    assert shown(plan) == Progress(2, " reward -, dev 0.500")
    plan.metrics.write_text(f"{line(1, **{'critic/score/mean': 0.25})}\n{validation}\n")
    assert shown(plan) == Progress(2, " reward 0.250, dev 0.500")
    main.closing(settings, [Run.read(tmp_path / "run")])  # adds the times of steps that have none
    assert not health.Health(settings).all(read_metrics(tmp_path / "run"))


def test_each_line_of_the_metrics_is_read_once_by_launcher_and_trainer(settings, tmp_path, monkeypatch):
    """A training of thousands of steps had read all of them again at each step."""
    run_dir = tmp_path / "run"
    plan = rl_plan(settings, Run.read(run_dir), "some/model")
    file = logged(run_dir, *(json.dumps({"step": step, "data": row(step / 1000)}) for step in range(1, 501)))
    write_whole(run_dir, [500])
    bar, followed, read, loads = train.Bar(plan), Followed(run_dir), [], json.loads
    assert bar.progress().note.startswith(" reward 9.000, dev 0.500")
    assert not ends_run(run_dir, 501, row(0.9), 1, followed.scores())
    monkeypatch.setattr(json, "loads", lambda text, **how: read.append(text) or loads(text, **how))
    with file.open("a") as stream:
        stream.write((new := json.dumps({"step": 501, "data": row(0.4)}) + "\n") + '{"step": 502, "da')
    assert "dev 0.400, best 0.500 (step 500)" in bar.progress().note and bar.progress().done == 501
    prune(run_dir, 1, followed.scores())
    assert ends_run(run_dir, 502, row(0.3), 2, followed.scores())
    assert [text for text in read if '"data"' in text] == [new, new]  # the launcher's and the trainer's


def test_lines_that_are_half_written_too_long_or_begun_anew_are_read_as_they_come(tmp_path):
    file = tmp_path / "000.jsonl"
    new = NewLines(file)
    assert [*new.read()] == []
    file.write_text("one\ntwo\nthr")
    assert [*new.read()] == [(1, "one\n"), (2, "two\n")] and [*new.read()] == []
    file.write_text("one\ntwo\nthree\n")
    assert [*new.read()] == [(3, "three\n")]
    file.write_text("one\n")  # cut
    assert [*new.read()] == [(1, "one\n")]
    file.write_text("ONE\nTWO\n")
    assert [*new.read()] == [(1, "ONE\n"), (2, "TWO\n")]
    file.write_text("x" * (2 * LONGEST_LINE + 1) + "\nend\n")
    assert [len(text) for _, text in new.read()] == [LONGEST_LINE, LONGEST_LINE, 2, 4]
    file.unlink()
    assert [*new.read()] == []


def test_the_time_of_a_resumed_training_is_no_part_of_this_commands(settings, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("STARTED", str(time.time() - 60))
    (first := tmp_path / "run/metrics/000.jsonl").parent.mkdir(parents=True)
    first.write_text(line(1, **{"timing_s/step": 50.0}) + "\n")
    main.closing(settings, [Run.read(tmp_path / "run")])
    assert "50 s of training, 60 s in all" in capsys.readouterr().out
    first.with_name("001.jsonl").write_text(line(2, **{"timing_s/step": 40.0}) + "\n")
    main.closing(settings, [Run.read(tmp_path / "run")])
    assert "90 s of training in 2 launches, 60 s in this command" in capsys.readouterr().out


CLOSED = [
    ({"STEPS": 4, "PATIENCE": 0}, "STEPS=8    # more steps"),
    ({"STEPS": 9, "PATIENCE": 1}, "PATIENCE=0    # more steps"),
    ({"STEPS": 4, "PATIENCE": 1}, "STEPS=8 PATIENCE=0    # more steps"),
    ({"STEPS": 4, "SELF_PLAY_ROUNDS": 2}, "SELF_PLAY_ROUNDS=3    # another round"),
    ({"METHOD": "dpo"}, "SELF_PLAY_ROUNDS=2    # another round"),
    ({"METHOD": "dpo", "PAIRS_FILE": "pairs.parquet"}, "DPO_EPOCHS=2    # another run, with more"),
    ({"METHOD": "dpo", "PAIRS_FILE": "pairs.parquet", "RUN": "mine"}, "DPO_EPOCHS=2 RUN=mine-2    # another run"),
]


@pytest.mark.parametrize(("changes", "said"), CLOSED)
def test_the_next_command_continues_the_run(changes, said, settings, tmp_path, capsys):
    run_dir = tmp_path / "run"
    write_whole(run_dir, [1, 2, 3, 4])
    logged(run_dir, *(json.dumps({"step": step, "data": row(acc)}) for step, acc in ((1, 0.9), (2, 0.1), (4, 0.2))))
    main.closing(replace(settings, **changes), [Run.read(run_dir)])
    out = capsys.readouterr().out
    assert f"  the same command with {said}" in out
    assert all(f"  make {stage} TASK={settings.TASK} RUN=run  " in out for stage in ("compare", "chat"))
    assert "the table is of the checkpoint of step 1, the best of its validations (STEP=latest: 4)\n" in out
    main.closing(replace(settings, **changes), [Run.read(run_dir)], "latest")
    assert "the table is of" not in capsys.readouterr().out


@pytest.mark.parametrize("damaged", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_line_ends_a_report_and_no_training(damaged, settings, tmp_path):
    run_dir = tmp_path / "run"
    plan = rl_plan(settings, Run.read(run_dir), "some/model")
    write_whole(run_dir, [1, 2, 3, 4])
    scores = [json.dumps({"step": step, "data": row(acc)}) for step, acc in ((1, 0.1), (3, 0.9), (4, 0.2))]
    logged(run_dir, scores[0], damaged, *scores[1:])
    with pytest.raises(SettingsError, match=r"line 2 .*; remove that line"):
        read_metrics(run_dir)
    assert shown(plan).done == 4 and "best 0.900 (step 3)" in shown(plan).note
    assert Run.read(run_dir).step() == 3 and Run.read(run_dir).ended_early(1)
    scores = Followed(run_dir).scores()
    assert ends_run(run_dir, 5, row(0.3), 2, scores)
    prune(run_dir, 1, scores)
    assert [*Run.read(run_dir).steps] == [3, 4]


def test_a_full_disk_under_the_state_of_the_gpus_is_passed_over(tmp_path, monkeypatch):
    fake = tmp_path / "nvidia-smi"
    fake.write_text("#!/bin/sh\nprintf '0, 61952, 97, 612.40\\n'\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(train, "GPU_SECONDS", 0)
    file = tmp_path / "gpu.jsonl"
    file.symlink_to("/dev/full")
    sampler = train.GPUSampler(file)
    sampler.sample()
    file.unlink()
    sampler.sample()  # there is room again
    assert len(file.read_text().splitlines()) == 1


@pytest.mark.medium
def test_a_watch_that_fails_is_told_once_and_the_process_goes_on(tmp_path, capfd):
    def broken():
        raise KeyError("critic/score/mean")

    code = "import time; time.sleep(1.2); open('ended', 'w')"
    command = [sys.executable, "-c", f"import os; os.chdir({str(tmp_path)!r}); {code}"]
    run(command, name="stage", log=tmp_path / "logs/stage.log", total=2, watch=broken)
    assert (tmp_path / "ended").exists()
    assert capfd.readouterr().err.count("the progress cannot be shown: KeyError: 'critic/score/mean'") == 1


def test_the_time_left_is_not_reckoned_from_the_first_step_which_has_no_start(capsys):
    screen = _Screen("stage", 8)
    for done in (0, 1):
        screen.look(lambda done=done: Progress(done))
    assert "1/8" in (line := capsys.readouterr().out.splitlines()[-1]) and "<?" in line
    screen.began -= 20  # seconds
    screen.look(lambda: Progress(3))
    assert "00:20<00:50" in capsys.readouterr().out  # two steps of 10 s, five to go


def test_the_time_left_falls_within_a_step(capsys, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 1e9)  # a busy machine may stand still for a second
    screen = _Screen("stage", 8)
    for done in (0, 1):
        screen.look(lambda done=done: Progress(done))
    screen.began -= 20
    screen.look(lambda: Progress(3))
    screen.began -= 15  # half a step and more later
    screen.ends_at -= 15
    screen.printed = 0.0
    screen.look(lambda: Progress(3, "news"))
    assert "00:35<00:35" in capsys.readouterr().out.splitlines()[-1]
    screen.ends_at -= 100  # a step that takes longer than all before
    screen.printed = 0.0
    screen.look(lambda: Progress(3, "more"))
    assert "<00:00" in capsys.readouterr().out.splitlines()[-1]


def test_a_screen_that_cannot_be_written_to_ends_nothing(monkeypatch):
    full = open("/dev/full", "w")  # noqa: SIM115  (its end fails)
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", full)
        patched.setattr(sys, "stderr", full)
        _Screen("stage", 2).look(lambda: Progress(1))
    with suppress(OSError):
        full.close()


def test_samples_that_cannot_be_written_end_no_step(tmp_path, capsys):
    from verl_tasks.verl_plugins.trainer import TaskTrainer

    trainer = object.__new__(TaskTrainer)
    trainer._init_dump_executor()
    (tmp_path / "file").touch()
    for trainer.global_steps, where in ((3, tmp_path / "file/rollouts"), (4, tmp_path)):
        trainer._dump_generations(["question"], ["answer"], ["gt"], [1.0], {}, str(where))
    trainer._shutdown_dump_executor()
    assert "the samples of step 3 were not written: " in capsys.readouterr().out
    assert json.loads((tmp_path / "4.jsonl").read_text())["output"] == "answer"


# ---- signs of life


WAITING = """
import faulthandler, time
from verl_tasks.alive import STACKS, beat, waits_for
faulthandler.register(STACKS, file=2)
beat()
waits_for("the weights of step 0 to reach vLLM")
def stands_here():
    time.sleep(60)
stands_here()
"""


@pytest.mark.medium
def test_a_process_that_stands_still_ends_with_what_it_waited_for_and_its_stacks(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(alive, "LOOK_SECONDS", 0.1)
    monkeypatch.setattr(alive, "SHOW_SECONDS", 0.5)
    monkeypatch.setattr(alive, "STACKS_SECONDS", 1)
    monkeypatch.setattr(process, "REPORT_SECONDS", 0.3)
    log, environment = tmp_path / "logs/g.log", {"PYTHONPATH": os.getcwd()}
    command, started = [sys.executable, "-c", WAITING], time.monotonic()
    with pytest.raises(StageFailed) as failure:
        run(command, name="GRPO", log=log, total=2, watch=Progress, environment=environment, minutes=0.05)
    assert time.monotonic() - started < 30
    said = str(failure.value).splitlines()[0]
    assert "stood still for START_MINUTES=0.05" in said and "it waits for the weights of step 0 to reach vLLM" in said
    assert "the stacks of 1 process are in the log" in said and "in stands_here" in log.read_text()
    shown = capfd.readouterr().out
    assert " waits for the" in shown and re.search(r" waits \d+ s for the weights of step 0", shown)


@pytest.fixture
def life(tmp_path, monkeypatch):
    """A function: three minutes pass before a sign; is the process stalled after it? It may stand still for two."""
    (tmp_path / "launch").mkdir()
    (tmp_path / "x.log").touch()
    monkeypatch.setenv(LAUNCH, str(tmp_path / "launch"))
    monkeypatch.setattr(alive, "BEAT_SECONDS", -1)
    now = 1000.0
    monkeypatch.setattr(alive.time, "monotonic", lambda: now)
    watch = alive.Watch(tmp_path / "launch", tmp_path, tmp_path / "x.log", minutes=2)

    def stalls(sign, done: int = 0) -> bool:
        nonlocal now
        watch.look(0)
        now += 180
        sign(tmp_path)
        watch.look(done)
        return watch.stalled

    stalls.watch = watch
    return stalls


def says(line: str):
    def sign(folder):
        with (folder / "x.log").open("a") as log:
            log.write(line)

    return sign


REPEATED = "(autoscaler) Warning: The following resource request cannot be scheduled right now: 1 CPU\n"


@pytest.mark.parametrize(
    ("sign", "done", "stalled"),
    [
        (lambda folder: alive.beat(), 0, False),
        (says("a new line\n"), 0, False),
        (lambda folder: (folder / "grows").write_text("x"), 0, False),
        (lambda folder: None, 1, False),  # a step
        (lambda folder: None, 0, True),
        (says(REPEATED), 0, True),
        (lambda folder: (folder / "gpu.jsonl").write_text("x"), 0, True),  # the launcher's own
    ],
)
def test_a_sign_of_life_is_what_gets_on(life, sign, done, stalled):
    assert life(sign, done) is stalled


def test_0_minutes_wait_for_ever(life):
    life.watch.minutes = 0
    assert not life(lambda folder: None) and life.watch.still >= 180


# A Ray with one CPU, and more actors than that.
RAY = """
import ray
ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
from verl_tasks.verl_plugins import waits
@ray.remote(num_cpus=1)
class SimpleStorageUnit:
    def ready(self): pass
units = [SimpleStorageUnit.remote() for _ in range(3)]
group = ray.util.placement_group([{"CPU": 3}])
ray.get([unit.ready.remote() for unit in units])
"""


@pytest.mark.medium
def test_what_ray_has_no_room_for_is_named(tmp_path):
    environment = os.environ | {"PYTHONPATH": os.getcwd(), LAUNCH: str(tmp_path)}
    watch = alive.Watch(tmp_path, tmp_path, tmp_path / "x.log", minutes=0)
    with subprocess.Popen([sys.executable, "-c", RAY], env=environment, stdin=subprocess.DEVNULL) as training:
        try:
            until(lambda: "Ray to find room for 3 CPU" in watch.waits and "2 x" in watch.waits, 60)
        finally:
            training.terminate()
    assert "Ray to start 2 x SimpleStorageUnit" in watch.waits
