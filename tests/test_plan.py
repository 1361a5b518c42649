"""A training's plan: what the launcher and the trainer do follows from it; how long it says that stages take."""

import json
import os
import struct
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.helpers import SMALL, make, task_settings, write_checkpoint
from tests.test_runs import make_run, write_checkpoints
from tests.test_settings import VALUES
from verl_tasks import process
from verl_tasks.files import write_json
from verl_tasks.launch import main, minutes, train
from verl_tasks.launch.plan import pairs_plan, rl_plan, sft_plan
from verl_tasks.launch.rounds import train_rounds
from verl_tasks.launch.task import exported
from verl_tasks.machine.memory import shapes_of
from verl_tasks.process import Progress, StageFailed
from verl_tasks.runs import folder, launches
from verl_tasks.runs.folder import lineage
from verl_tasks.runs.health import Health
from verl_tasks.runs.run import Run, export, read_metrics
from verl_tasks.settings import load_settings


@pytest.fixture
def settings(tmp_path, monkeypatch):
    monkeypatch.setenv("ARTIFACTS", str(tmp_path / "artifacts"))
    return load_settings(VALUES)


def test_a_warm_up_a_round_of_rl_and_one_of_dpo_are_planned_alike(settings):
    run, data = Run.read(settings.runs_dir / "mine"), Path("/data/rows.parquet")
    sft = sft_plan(settings, run, "some/model", data)
    rl = rl_plan(settings, run, "some/model", ["trainer.total_epochs=3"])
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
    rl = rl_plan(s, run, "some/model", number=3)
    dpo = pairs_plan(replace(s, METHOD="dpo"), run, "some/model", Path("/pairs.parquet"), number=3)
    for plan in (rl, dpo):
        assert plan.environment["SEED"] == "9"  # what the trainer's processes read
        assert (plan.settings.SEED, plan.settings.TRAIN_SEED) == (5, 9)  # what the record says
    assert rl.config["data"]["seed"] == 9
    sft = sft_plan(s, run, "some/model", Path("/rows.parquet"))  # the warm-up is of the data
    assert sft.settings == s and sft.environment["SEED"] == "5"


def test_a_launch_after_others_goes_on_from_the_last_checkpoint(settings):
    plan = rl_plan(settings, Run.read(make_run(settings, "mine", steps=(2, 4))), "some/model")
    assert plan.run.last == 4 and (plan.metrics.name, plan.log.name) == ("001.jsonl", "grpo-001.log")
    assert "# resumes from step: 4" in plan.comments().splitlines()
    odd = replace(plan, start="a\nb").comments()
    assert all(line.startswith("# ") for line in odd.splitlines())


def test_verls_processes_learn_what_verl_has_no_key_for(settings):
    s, run = replace(settings, KEEP=3, PATIENCE=2), Run.read(settings.runs_dir / "mine")
    plan = rl_plan(s, run, "some/model")
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
    seen, asked, findings = [], [], Health.findings
    monkeypatch.setattr(Health, "findings", lambda self, step, row: asked.append(step) or findings(self, step, row))

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
    assert sorted(read_metrics(first)) == [4, 6] and asked == [4, 4, 4, 6]  # the rules once in each training


@pytest.mark.parametrize("steps", [(), (2, 4)])
def test_a_stop_says_where_the_same_command_goes_on(settings, monkeypatch, steps):
    run_dir = make_run(settings, "mine", steps=steps) if steps else settings.runs_dir / "mine"
    plan = rl_plan(settings, Run.read(run_dir), "some/model")
    goes_on = "continues from the checkpoint of step 4" if steps else "begins at step 1, as there is no checkpoint yet"

    def run(*_, **__):
        raise stop

    monkeypatch.setattr(train, "run", run)
    for stop in (KeyboardInterrupt(), StageFailed("no memory; free some, then the same command continues\n  log: x")):
        with pytest.raises(type(stop), match=f"the same command {goes_on}"):
            train.execute(plan)


def test_a_warm_up_without_signal_ends_before_rl_and_all_asks_on_a_terminal(settings, monkeypatch, capsys):
    plan = rl_plan(settings, Run.read(settings.runs_dir / "mine"), "some/model", anyway=False)
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


def test_a_training_is_told_what_its_stages_took_with_the_same_sizes(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("ARTIFACTS", str(tmp_path))
    passes = {}
    monkeypatch.setattr(minutes, "timed", lambda s: passes)

    def told(seconds: float = 0, **changes: str) -> str:
        """What a command says that trains for ``seconds``."""
        now = iter((0, 30, 100, 100 + seconds, 2000, 2060))  # of sft, train and eval
        monkeypatch.setattr(minutes.time, "monotonic", lambda: next(now))
        s = task_settings("countdown", {"INIT": "sft", **changes})
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
    s = task_settings("countdown", {"INIT": "sft"})
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
    s = task_settings("countdown", variables)
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
    s = task_settings("countdown", variables)
    assert minutes.timed(s) == {}  # it samples too little
    found = minutes.timed(replace(s, STEPS=64))
    assert 0 < found["sft"] < found["train"] and minutes.timed(replace(s, STEPS=64, STACK="current")) == {}
    told = json.loads((s.runs_dir / ".passes.json").read_text())["passes"]
    assert all(told[name] > 0 for name in ("start", "weights", "optimize", "decode")) and len(told) == 6
