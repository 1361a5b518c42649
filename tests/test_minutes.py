"""launch/minutes.py: stages take as long as the last time with the same sizes, else as timed passes say. The
progress line before a step and after one."""

import json
import time
from dataclasses import replace

import pytest

from tests.helpers import ROOT, SMALL, exported, make, write_checkpoint
from verl_tasks import process
from verl_tasks.launch import minutes
from verl_tasks.machine.memory import shapes_of
from verl_tasks.process import Progress
from verl_tasks.runs import folder
from verl_tasks.runs.run import Run
from verl_tasks.settings import load_settings


def test_a_training_is_told_what_its_stages_took_with_the_same_sizes(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("ARTIFACTS", str(tmp_path))
    passes = {}
    monkeypatch.setattr(minutes, "timed", lambda s: passes)

    def told(seconds: float = 0, **changes: str) -> str:
        """What a command says that trains for ``seconds``."""
        now = iter((0, 30, 100, 100 + seconds, 2000, 2060))  # of sft, train and eval
        monkeypatch.setattr(minutes.time, "monotonic", lambda: next(now))
        s = load_settings(exported(ROOT / "tasks/countdown/train.sh", {"STACK": "cpu", "INIT": "sft", **changes}))
        expected = {}
        stages = minutes.kept(s, [], dict.fromkeys(("data", "sft", "train", "eval"), lambda: "done"), expected)
        assert [stage() for stage in stages.values()] == ["done"] * 4
        said = capsys.readouterr().out
        assert said.count("minutes") == bool(expected)
        return said

    assert told(600) == ""  # the first time nothing is known
    assert (
        told(660, LR="1e-5")
        == "  about 11.5 minutes, as the last time with these sizes: sft 0.5, train 10.0, eval 1.0\n"
    )
    passes = {"sft": 60.0, "train": 300.0, "eval": 30.0}
    said = told(5, STEPS="9", SFT_LOSS="0.1")
    assert said == "  about 6.5 minutes, by timed passes: sft at most 1.0, train 5.0, eval 0.5\n"
    passes = {}
    assert "train 11.0" in told(660) and told(660, ROLLOUT_N="16") == ""
    s = load_settings(exported(ROOT / "tasks/countdown/train.sh", {"STACK": "cpu", "INIT": "sft"}))
    run_dir = folder.sft_dir(s)
    write_checkpoint(run_dir / "checkpoints/global_step_1")
    (run_dir / "checkpoints/latest_checkpointed_iteration.txt").write_text("1")
    monkeypatch.setattr(folder, "rounds", lambda s, arguments: [Run.read(run_dir)])
    assert told(5) == ""  # what goes on with a checkpoint is no measure, and has none
    assert json.loads((s.runs_dir / ".minutes.json").read_text())[minutes.sizes_of(s)]["train"] == 660


def test_the_time_left_is_known_before_the_first_step_and_after_it(capsys):
    screen = process._Screen("training", 10, seconds=600.9)
    screen.look(lambda: Progress(0))
    assert "<10:00" in capsys.readouterr().out
    screen.look(lambda: Progress(1, seconds=60))
    assert screen.ends_at - time.time() == pytest.approx(9 * 60, abs=1)
    screen.close()


def test_the_seconds_of_a_stage_follow_from_timed_passes_and_the_lengths_of_demonstrations():
    from verl_tasks.launch import passes

    variables = {"STACK": "cpu", "INIT": "sft", "SFT_STEPS": "4", "SFT_BATCH_SIZE": "8", "MICRO_BATCH_SIZE": "2"}
    variables |= {"MAX_NEW_TOKENS": "100", "MAX_TURN_LENGTH": "80", "MAX_RESPONSE_LENGTH": "90"}
    s = load_settings(exported(ROOT / "tasks/countdown/train.sh", variables))
    ids = [[row, *range(length - 1)] for row, length in enumerate((60, 80, 100))]
    rows = passes.Lengths([30, 30, 30], [60, 80, 100], [24, 40, 56], ids)
    model = replace(shapes_of("embedded"), layer=1, queries=0)  # an operation a token

    nothing = dict.fromkeys(passes.Timed.__dataclass_fields__, 0.0)

    def found(model=model, rows=rows, timed: dict | None = None, **changes) -> dict:
        return passes.seconds(replace(s, **changes), model, rows, 10, passes.Timed(**nothing | (timed or {})))

    assert found(timed={"start": 2}) == {stage: 2 * starts for stage, starts in passes.STARTS.items()}
    learn = {"learn": 0.3}
    learned = found(timed=learn)
    assert learned["sft"] == pytest.approx(4 * 8 * ((60 + 80) / 2 + 100) / 2 * 0.3)
    shared = found(timed=learn, rows=replace(rows, ids=[each[1:] for each in ids]))
    assert shared["sft"] == pytest.approx(4 * 8 * (79 / 2 + 99) / 2 * 0.3)  # what they begin with in common, once
    update = 4 * (30 + 2 * 50 / 2) * 0.3  # two responses after their prompt, half of each as in others
    step = 30 * 0.1 + 8 * 10 * 0.1 + update  # read, heard
    assert learned["train"] == pytest.approx(s.STEPS * 8 * step)
    alone = found(replace(model, layer=0, queries=1), timed=learn)  # where attention is all, each stands alone
    assert alone["train"] == pytest.approx(s.STEPS * 8 * 8 * 2 * 55**2 * 0.3)
    again = found(timed=learn, MINI_BATCH_SIZE=2, KL_COEF=0.1)  # log-probs before the step, and of the reference
    assert again["train"] - learned["train"] == pytest.approx(s.STEPS * 8 * update * 2 / 3)
    moved = found(timed={"weights": 0.5})
    assert (moved["sft"], moved["train"]) == (4 * 4 * 0.5, s.STEPS * (64 / 2 + 1) * 0.5)  # a pass has two; the engine
    assert found(timed={"optimize": 0.5}, MINI_BATCH_SIZE=2) == {"sft": 4 * 0.5, "train": s.STEPS * 4 * 0.5, "eval": 0}
    sampled = found(timed={"sample": 0.1})
    assert sampled["sft"] == 0 and sampled["train"] == pytest.approx(s.STEPS * 64 * 40 * 0.1)
    assert sampled["eval"] == pytest.approx(10 * (2 + 1) * (80 + 40 + 40) * 0.1)
    assert found(timed={"sample": 0.1}, INIT="base")["eval"] == pytest.approx(10 * 3 * (80 + 40) * 0.1)
    last = found(timed={"decode": 0.64})  # of a step's last response, and of an evaluation's 64 at once
    assert last["train"] == pytest.approx(s.STEPS * 90 * 0.64)
    assert last["eval"] == pytest.approx(10 * 3 * (80 + 40 + 40) * 0.01)


@pytest.mark.slow
def test_passes_of_a_small_model_are_timed(small_model, tmp_path, monkeypatch):
    monkeypatch.setenv("ARTIFACTS", str(tmp_path))
    variables = SMALL | {"INIT": "sft", "MODEL": str(small_model)}
    assert make("data", **variables, ARTIFACTS=str(tmp_path)).returncode == 0
    s = load_settings(exported(ROOT / "tasks/countdown/train.sh", variables))
    assert minutes.timed(s) == {}  # it samples too little
    found = minutes.timed(replace(s, STEPS=64))
    assert 0 < found["sft"] < found["train"] and minutes.timed(replace(s, STEPS=64, STACK="current")) == {}
    told = json.loads((s.runs_dir / ".passes.json").read_text())["passes"]
    assert all(told[name] > 0 for name in ("start", "weights", "optimize", "decode")) and len(told) == 6
