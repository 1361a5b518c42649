"""machine/speed.py: the prediction of a step's seconds, and its errors on the runs in docs/results."""

import json
import re
from dataclasses import replace

import pytest

from tasks.common.machine import memory, speed
from tests.benchmarks import rehearse_errors
from tests.helpers import ROOT

STEP = speed.Step(memory.shapes(speed.QWEN25_3B), 1, 1024, 68, 256, 256)
H200 = speed.GPUS["h200"]


def seconds(step: speed.Step, gpu: speed.GPU = H200) -> float:
    return sum(speed.predicted(step, gpu).values())


def test_a_recorded_run_is_read_as_its_summary_says():
    run = next(run for run in speed.recorded() if run.run.name == "h200-3b-1gpu")
    assert run.step.rollouts == 1024 and run.step.response == pytest.approx(255.7, abs=0.1)
    assert run.total == pytest.approx(37.5, abs=0.2)  # docs/results/speed.json
    assert run.memory == pytest.approx(57.5457 * 2**30, rel=1e-5)


def test_leave_one_out_leaves_out_all_runs_that_are_alike():
    """The factors of a run do not know it: made ten times as slow, it is predicted as before."""
    runs = list(speed.recorded())
    name = "h200-countdown-lr-1e-5"
    before = speed.left_out(runs)
    slower = [
        replace(run, seconds={phase: 10 * value for phase, value in run.seconds.items()})
        if run.run.like == "countdown"
        else run
        for run in runs
    ]
    after = speed.left_out(slower)
    assert 1 + after[name] == pytest.approx((1 + before[name]) / 10)
    assert after["h200-step-ours"] != before["h200-step-ours"]  # of another kind: it does learn from them


def test_the_errors_are_those_that_the_document_states():
    text = (ROOT / "docs/REHEARSE.md").read_text()
    for what, (average, most, runs) in (("a step", speed.error()), ("memory", speed.memory_error())):
        row = f"| {what} | {average:.0%} | {most:.0%} | {runs} |".replace("%", " %")
        assert row in text
    written = json.loads(rehearse_errors.FILE.read_text())
    assert written == {name: pytest.approx(row, abs=0.002) for name, row in rehearse_errors.errors().items()}


def test_most_steps_are_predicted_within_a_third_and_memory_within_a_tenth():
    errors = [abs(value) for value in speed.left_out(speed.recorded()).values()]
    assert sum(value <= 0.3 for value in errors) >= len(errors) - 1 and max(errors) < 0.35
    memories = [abs(speed.memory_off(run)) for run in speed.recorded()]
    assert sum(value <= 0.1 for value in memories) >= len(memories) - 1


def test_more_work_takes_longer_and_more_or_faster_gpus_less():
    base = seconds(STEP)
    for change in ({"response": 512, "longest": 512}, {"rollouts": 2048}, {"forward": 2}, {"critic": True}):
        assert seconds(replace(STEP, **change)) > base, change
    assert seconds(replace(STEP, gpus=4)) < base
    assert seconds(replace(STEP, lora=True)) < base
    assert seconds(STEP, speed.GPUS["h100"]) > base and seconds(STEP, speed.GPUS["a100"]) > 1.5 * base


def test_gpus_are_those_that_the_variable_takes():
    from tasks.common.settings import GPUS

    assert tuple(speed.GPUS) == GPUS


def test_a_copy_without_recorded_runs_has_none(tmp_path, monkeypatch):
    with pytest.raises(OSError, match=re.escape("metrics.jsonl")):
        speed.measured(speed.RECORDED[0], tmp_path)
