"""tasks/common/alive.py: a training that stands still ends and says what it waited for; a slow one goes on."""

import os
import sys
import time

import pytest

from tasks.common import alive, process
from tasks.common.process import Progress, StageFailed, run


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(alive, "LOOK_SECONDS", 0.1)
    monkeypatch.setattr(alive, "SHOW_SECONDS", 0.5)
    monkeypatch.setattr(alive, "STACKS_SECONDS", 1)
    monkeypatch.setattr(process, "REPORT_SECONDS", 0.3)


def run_python(code, tmp_path, minutes, watch=Progress):
    command = [sys.executable, "-c", code]
    environment = {"PYTHONPATH": os.getcwd()}
    run(
        command,
        name="GRPO",
        log=tmp_path / "logs/g.log",
        total=2,
        watch=watch,
        environment=environment,
        minutes=minutes,
    )


WAITING = """
import faulthandler, time
from tasks.common.alive import STACKS, beat, waits_for
faulthandler.register(STACKS, file=2)
beat()
waits_for("the weights of step 0 to reach vLLM")
def stands_here():
    time.sleep(60)
stands_here()
"""


@pytest.mark.medium
def test_a_process_that_stands_still_ends_with_what_it_waited_for_and_its_stacks(tmp_path, capfd):
    started = time.monotonic()
    with pytest.raises(StageFailed) as failure:
        run_python(WAITING, tmp_path, minutes=0.05)
    assert time.monotonic() - started < 30
    said = str(failure.value).splitlines()[0]
    assert "stood still for START_MINUTES=0.05" in said and "it waits for the weights of step 0 to reach vLLM" in said
    assert (
        "the stacks of 1 process are in the log" in said and "in stands_here" in (tmp_path / "logs/g.log").read_text()
    )
    assert "waits" in capfd.readouterr().out


@pytest.mark.medium
@pytest.mark.parametrize(
    "sign",
    ["alive.beat()", "print('a new line', flush=True)", "open(sys.argv[0] + 'x', 'a').write('x')"],
    ids=["tokens", "log", "file"],
)
def test_a_slow_process_that_gets_on_is_not_ended(tmp_path, sign):
    file = tmp_path / "grows"
    code = f"""
import sys, time
from tasks.common import alive
sys.argv[0] = {str(file)!r}
alive.BEAT_SECONDS = 0
for _ in range(8):
    time.sleep(1)
    {sign}
"""
    run_python(code, tmp_path, minutes=0.05)  # three seconds, of eight


@pytest.mark.medium
def test_what_ray_repeats_while_it_waits_is_no_sign_of_life(tmp_path):
    code = """
import time
while True:
    print("(autoscaler) Warning: The following resource request cannot be scheduled right now: 1 CPU", flush=True)
    time.sleep(0.2)
"""
    with pytest.raises(StageFailed, match="none of its processes says what it waits for; no process told its stacks"):
        run_python(code, tmp_path, minutes=0.05)


@pytest.mark.medium
def test_0_minutes_wait_for_ever(tmp_path):
    run_python("import time; time.sleep(3)", tmp_path, minutes=0)


# A Ray with one CPU, and more actors than that.
RAY = """
import ray
ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
from tasks.common.verl_plugins import waits
@ray.remote(num_cpus=1)
class SimpleStorageUnit:
    def ready(self): pass
units = [SimpleStorageUnit.remote() for _ in range(3)]
group = ray.util.placement_group([{"CPU": 3}])
ray.get([unit.ready.remote() for unit in units])
"""


@pytest.mark.long
def test_what_ray_has_no_room_for_is_named(tmp_path):
    with pytest.raises(StageFailed) as failure:
        run_python(RAY, tmp_path, minutes=0.6)
    said = str(failure.value).splitlines()[0]
    assert "Ray to start 2 x SimpleStorageUnit" in said and "Ray to find room for 3 CPU" in said
