"""launch/minutes.py: stages take as long as the last time with the same sizes. The progress line after one step."""

import json
import time

import pytest

from tests.helpers import ROOT, exported, write_checkpoint
from verl_tasks import process
from verl_tasks.launch import minutes
from verl_tasks.process import Progress
from verl_tasks.runs import folder
from verl_tasks.runs.run import Run
from verl_tasks.settings import load_settings


def test_a_training_is_told_what_its_stages_took_with_the_same_sizes(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("ARTIFACTS", str(tmp_path))

    def told(seconds: float = 0, **changes: str) -> str:
        """What a command says that trains for ``seconds``."""
        now = iter((0, 30, 100, 100 + seconds, 2000, 2060))  # of sft, train and eval
        monkeypatch.setattr(minutes.time, "monotonic", lambda: next(now))
        s = load_settings(exported(ROOT / "tasks/countdown/train.sh", {"STACK": "cpu", "INIT": "sft", **changes}))
        stages = minutes.kept(s, [], dict.fromkeys(("data", "sft", "train", "eval"), lambda: "done"))
        said = capsys.readouterr().out
        assert [stage() for stage in stages.values()] == ["done"] * 4
        return said

    assert told(600) == ""  # the first time nothing is known
    assert (
        told(660, LR="1e-5") == "about 11.5 minutes, as the last time with these sizes: sft 0.5, train 10.0, eval 1.0\n"
    )
    assert "train 11.0" in told(660) and told(660, ROLLOUT_N="16") == ""
    s = load_settings(exported(ROOT / "tasks/countdown/train.sh", {"STACK": "cpu", "INIT": "sft"}))
    run_dir = folder.sft_dir(s)
    write_checkpoint(run_dir / "checkpoints/global_step_1")
    (run_dir / "checkpoints/latest_checkpointed_iteration.txt").write_text("1")
    monkeypatch.setattr(folder, "rounds", lambda s, arguments: [Run.read(run_dir)])
    assert told(5) == ""  # what goes on with a checkpoint is no measure, and has none
    assert json.loads((s.runs_dir / ".minutes.json").read_text())[minutes.sizes_of(s)]["train"] == 660


def test_the_time_left_is_known_from_the_first_step_on(capsys):
    screen = process._Screen("training", 10)
    screen.look(lambda: Progress(0))
    screen.look(lambda: Progress(1, seconds=60))
    assert screen.ends_at - time.time() == pytest.approx(9 * 60, abs=1)
    screen.close()
