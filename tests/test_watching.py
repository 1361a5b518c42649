"""What watches a training must never end it (a full disk, a damaged line, a step with a validation alone), but one that
stands still ends and says what it waited for; a slow one goes on (tasks/common/alive.py).
"""

import json
import os
import re
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from tests.helpers import until
from tests.test_keep_best import row, write_whole
from tests.test_settings import VALUES
from verl_tasks import alive, process
from verl_tasks.launch import main, train
from verl_tasks.launch.plan import rl_plan
from verl_tasks.leftovers import LAUNCH
from verl_tasks.machine import gpus
from verl_tasks.process import Progress, StageFailed, _Screen, run
from verl_tasks.runs import health, keep
from verl_tasks.runs.run import Run, read_metrics, whole_steps
from verl_tasks.settings import SettingsError, load_settings

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
    return train._progress(plan, plan.metrics.stat().st_size)


def test_the_bar_shows_a_step_that_logged_a_validation_alone(settings, tmp_path):
    plan = rl_plan(settings, Run.read(tmp_path / "run"), "some/model", None)
    validation = json.dumps({"step": 2, "data": row(0.5)}).replace('"critic/score/mean": 9.0', '"x": 1')
    logged(tmp_path / "run", validation)
    assert shown(plan) == Progress(2, " reward -, dev 0.500")
    plan.metrics.write_text(f"{line(1, **{'critic/score/mean': 0.25})}\n{validation}\n")
    assert shown(plan) == Progress(2, " reward 0.250, dev 0.500")
    main.closing(settings, [Run.read(tmp_path / "run")])  # adds the times of steps that have none
    assert not health.findings(read_metrics(tmp_path / "run"), settings)


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
    assert "the table is of the checkpoint of step 1, the best of its validations (STEP=latest: 4)\n" in out
    main.closing(replace(settings, **changes), [Run.read(run_dir)], "latest")
    assert "the table is of" not in capsys.readouterr().out


@pytest.mark.parametrize("damaged", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_line_ends_a_report_and_no_training(damaged, settings, tmp_path):
    run_dir = tmp_path / "run"
    plan = rl_plan(settings, Run.read(run_dir), "some/model", None)
    write_whole(run_dir, [1, 2, 3, 4])
    scores = [json.dumps({"step": step, "data": row(acc)}) for step, acc in ((1, 0.1), (3, 0.9), (4, 0.2))]
    logged(run_dir, scores[0], damaged, *scores[1:])
    with pytest.raises(SettingsError, match=r"line 2 .*; remove that line"):
        read_metrics(run_dir)
    assert shown(plan).done == 4 and "best 0.900 (step 3)" in shown(plan).note
    assert Run.read(run_dir).step() == 3 and Run.read(run_dir).ended_early(1)
    assert keep.ends_run(run_dir, 5, row(0.3), 2)
    keep.prune(run_dir, 1)
    assert [*whole_steps(run_dir)] == [3, 4]


def test_a_full_disk_under_the_state_of_the_gpus_is_passed_over(tmp_path, monkeypatch):
    fake = tmp_path / "nvidia-smi"
    fake.write_text("#!/bin/sh\nprintf '0, 61952, 97, 612.40\\n'\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(gpus, "SECONDS", 0)
    file = tmp_path / "gpu.jsonl"
    file.symlink_to("/dev/full")
    sampler = gpus.Sampler(file)
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
