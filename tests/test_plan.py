"""A training's plan: what the launcher and the trainer do follows from it."""

import json
import os
import struct
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.test_runs import make_run, write_checkpoints
from tests.test_settings import VALUES
from verl_tasks.files import write_json
from verl_tasks.launch import main, train
from verl_tasks.launch.plan import pairs_plan, rl_plan, sft_plan
from verl_tasks.launch.rounds import train_rounds
from verl_tasks.launch.task import exported
from verl_tasks.process import StageFailed
from verl_tasks.runs import launches
from verl_tasks.runs.folder import lineage
from verl_tasks.runs.run import Run, export, read_metrics
from verl_tasks.settings import load_settings


@pytest.fixture
def settings(tmp_path, monkeypatch):
    monkeypatch.setenv("ARTIFACTS", str(tmp_path / "artifacts"))
    return load_settings(VALUES)


def test_a_warm_up_a_round_of_rl_and_one_of_dpo_are_planned_alike(settings):
    run, data = Run.read(settings.runs_dir / "mine"), Path("/data/rows.parquet")
    sft = sft_plan(settings, run, "some/model", data, None)
    rl = rl_plan(settings, run, "some/model", None, ["trainer.total_epochs=3"])
    dpo = pairs_plan(replace(settings, METHOD="dpo"), run, "some/model", data)
    assert [plan.steps for plan in (sft, rl, dpo)] == [settings.SFT_STEPS, settings.STEPS, settings.STEPS]
    assert [plan.log.name for plan in (sft, rl, dpo)] == ["sft-000.log", "grpo-000.log", "dpo-000.log"]
    assert [plan.shown[0] for plan in (sft, rl, dpo)] == ["loss", "reward", "loss"]
    for plan in (sft, rl, dpo):
        assert plan.metrics == run.folder / "metrics/000.jsonl" and plan.command[:2] == [sys.executable, "-m"]
        assert plan.environment["VERL_FILE_LOGGER_PATH"] == str(plan.metrics)
    assert sft.config["data"]["train_files"] == str(data) and sft.config["model"]["path"] == "some/model"
    assert rl.config["trainer"]["total_epochs"] == 3 and rl.command[-1] == "trainer.total_epochs=3"
    assert dpo.command[-3:] == ["some/model", str(data), str(run.folder)] and dpo.config is None
    assert not run.folder.exists()


def test_each_round_has_a_seed_of_its_own_and_the_data_keep_theirs(settings):
    s, run = replace(settings, SEED=5, TRAIN_SEED=7), Run.read(settings.runs_dir / "x")
    rl = rl_plan(s, run, "some/model", None, number=3)
    dpo = pairs_plan(replace(s, METHOD="dpo"), run, "some/model", Path("/pairs.parquet"), number=3)
    for plan in (rl, dpo):
        assert plan.environment["SEED"] == "9"  # what the trainer's processes read
        assert (plan.settings.SEED, plan.settings.TRAIN_SEED) == (5, 9)  # what the record says
    assert rl.config["data"]["seed"] == 9
    sft = sft_plan(s, run, "some/model", Path("/rows.parquet"), None)  # the warm-up is of the data
    assert sft.settings == s and sft.environment["SEED"] == "5"


def test_a_launch_after_others_goes_on_from_the_last_checkpoint(settings):
    plan = rl_plan(settings, Run.read(make_run(settings, "mine", steps=(2, 4))), "some/model", None)
    assert plan.run.last == 4 and (plan.metrics.name, plan.log.name) == ("001.jsonl", "grpo-001.log")
    assert "# resumes from step: 4" in plan.comments().splitlines()
    odd = replace(plan, start="a\nb").comments()
    assert all(line.startswith("# ") for line in odd.splitlines())


def test_verls_processes_learn_what_verl_has_no_key_for(settings):
    s, run = replace(settings, KEEP=3, PATIENCE=2), Run.read(settings.runs_dir / "mine")
    plan = rl_plan(s, run, "some/model", None)
    assert (plan.environment["KEEP"], plan.environment["PATIENCE"]) == ("3", "2")
    by_pairs = replace(s, METHOD="dpo", STEPS=6)
    assert pairs_plan(by_pairs, run, "some/model", Path("/p")).environment.items() >= exported(by_pairs).items()


@pytest.mark.medium
def test_rounds_are_trained_as_planned_skipped_when_done_and_continued_with_more_steps(
    settings, tmp_path, monkeypatch, capsys
):
    """The trainer here logs one line and saves its last step."""
    (tmp_path / "model").mkdir()
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / "model" / name).write_text("{}")
    (tmp_path / "model/model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")  # no tensors
    s = replace(settings, INIT="base", MODEL=str(tmp_path / "model"), SELF_PLAY_ROUNDS=2, STEPS=4, TRAIN_SEED=7)
    seen = []

    def run(command, *, name, log, total, watch, environment, minutes, seconds):
        assert watch().note == ""
        row = {"critic/score/mean": 0.5, "actor/entropy": 0.001}
        Path(environment["VERL_FILE_LOGGER_PATH"]).write_text(json.dumps({"step": total, "data": row}) + "\n")
        assert watch().note == f" reward 0.500, collapse (step {total})" and watch().done == total
        write_checkpoints(log.parents[1], [total])
        assert environment.get("ANYWAY", "1") == "1"  # INIT=base
        seen.append((name, total, log.name, environment["SEED"], command))

    monkeypatch.setattr(train, "run", run)
    said = train_rounds(s, ["trainer.total_epochs=3"])
    assert [each[:4] for each in seen] == [("GRPO", 4, "grpo-000.log", "7"), ("GRPO", 4, "grpo-000.log", "8")]
    first, second = sorted(s.runs_dir.iterdir(), key=lambda run: run.name.endswith("-round2"))
    assert said == f"4 steps in {second}" and [each.folder for each in lineage(Run.read(second))] == [first, second]
    start = f"actor_rollout_ref.model.path='{export(Run.read(first))}'"
    assert start in seen[1][4] and all(command[-1] == "trainer.total_epochs=3" for *_, command in seen)
    assert "warning: step 4: entropy" in capsys.readouterr().out
    noted = launches.read(second / "launches/000")
    assert noted["command"] == seen[1][4] and noted["settings"]["TRAIN_SEED"] == 8
    assert train_rounds(s, ["trainer.total_epochs=3"]) == f"up to date: {said}" and len(seen) == 2
    assert train_rounds(replace(s, SELF_PLAY_ROUNDS=1, STEPS=6), ["trainer.total_epochs=3"]) == f"6 steps in {first}"
    assert "resuming from step 4" in capsys.readouterr().out and seen[2][1:4] == (6, "grpo-001.log", "7")
    assert sorted(read_metrics(first)) == [4, 6]


@pytest.mark.parametrize("steps", [(), (2, 4)])
def test_a_stop_says_where_the_same_command_goes_on(settings, monkeypatch, steps):
    run_dir = make_run(settings, "mine", steps=steps) if steps else settings.runs_dir / "mine"
    plan = rl_plan(settings, Run.read(run_dir), "some/model", None)
    goes_on = "continues from the checkpoint of step 4" if steps else "begins at step 1, as there is no checkpoint yet"

    def run(*_, **__):
        raise stop

    monkeypatch.setattr(train, "run", run)
    for stop in (KeyboardInterrupt(), StageFailed("no memory; free some, then the same command continues\n  log: x")):
        with pytest.raises(type(stop), match=f"the same command {goes_on}"):
            train.execute(plan)


def test_a_warm_up_without_signal_ends_before_rl_and_all_asks_on_a_terminal(settings, monkeypatch, capsys):
    plan = rl_plan(settings, Run.read(settings.runs_dir / "mine"), "some/model", None, anyway=False)
    assert plan.environment["ANYWAY"] == "0"

    def run(*_, **__):
        write_json(
            plan.run.folder / "outcome.json", {"outcome": "no signal", "reason": "none of 64 is right; ANYWAY=1"}
        )
        raise StageFailed("AbortedError: none of 64")

    monkeypatch.setattr(train, "run", run)
    with pytest.raises(train.WithoutSignal, match=r"^none of 64 is right; ANYWAY=1\n  log: "):
        train.execute(plan)
    asked, tried = [], []

    def trained(s, arguments, seconds=0):
        tried.append(os.environ.get("ANYWAY"))
        if len(tried) % 2:
            raise train.WithoutSignal("none is right")
        return "trained"

    monkeypatch.setattr(main, "train_rounds", trained)
    monkeypatch.setattr("builtins.input", lambda text: asked.append(text) or answer)
    monkeypatch.setenv("ANYWAY", "")
    for goal, terminal, answer in (("train", True, "y"), ("all", False, "y"), ("all", True, "n"), ("all", True, "y")):
        monkeypatch.setattr(sys.stdin, "isatty", lambda terminal=terminal: terminal, raising=False)
        job = main.Job(goal, settings, None, [])
        if answer == "y" and goal == "all" and terminal:
            assert main.PARTS["train"](job) == "trained"
        else:
            with pytest.raises(train.WithoutSignal):
                main.PARTS["train"](job)
            tried.append(None)
    assert len(asked) == 2 and tried[-1] == "1"


def test_a_complete_training_by_dpo_is_up_to_date_with_the_steps_of_its_pairs(
    settings, small_model, tmp_path, monkeypatch
):
    pairs = [{"prompt": f"What is {i}?", "chosen": f"It is {i}.", "rejected": "no idea"} for i in range(20)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    s = replace(settings, METHOD="dpo", INIT="base", MODEL=str(small_model), PAIRS_FILE=str(tmp_path / "pairs.jsonl"))
    seen = []

    def run(command, *, name, log, total, watch, environment, minutes, seconds):
        Path(environment["VERL_FILE_LOGGER_PATH"]).write_text('{"step": 2, "data": {"train/loss": 0.7}}\n')
        assert watch().note == " loss 0.700"
        write_checkpoints(log.parents[1], [total])
        assert environment.get("ANYWAY", "1") == "1"  # INIT=base
        seen.append((name, total, log.name, environment["STEPS"], command[-3:-1]))

    monkeypatch.setattr(train, "run", run)
    said = train_rounds(s, [])
    assert seen == [("DPO", 2, "dpo-000.log", "2", [str(small_model), s.PAIRS_FILE])]  # a tenth is held out
    assert said.startswith("2 steps in ") and train_rounds(s, []) == f"up to date: {said}" and len(seen) == 1
