"""tasks/common/alive.py: a training that stands still ends and says what it waited for; a slow one goes on."""

import os
import re
import subprocess
import sys
import time

import pytest

from tests.helpers import until
from verl_tasks import alive, process
from verl_tasks.leftovers import LAUNCH
from verl_tasks.process import Progress, StageFailed, run

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
