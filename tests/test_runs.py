"""Which run and which checkpoint `make eval`, compare, merge, chat and batch take."""

import contextlib
import errno
import json
import os
import resource
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.test_settings import VALUES
from verl_tasks.digest import fingerprint
from verl_tasks.evaluation.sample import episode_limits, model_name, sampling
from verl_tasks.launch import main
from verl_tasks.launch.main import _locked
from verl_tasks.launch.rounds import check_training
from verl_tasks.models.merge import merge, whole_folder
from verl_tasks.process import StageFailed
from verl_tasks.runs import launches
from verl_tasks.runs.folder import find_run, lineage, named, record, rl_run, rounds, settings_of, sft_dir
from verl_tasks.runs.run import Run, ends_run, export
from verl_tasks.runs.validation import WHOLE, learned
from verl_tasks.settings import Command, SettingsError, artifacts, load_settings


@pytest.fixture
def settings(tmp_path, monkeypatch):
    monkeypatch.setenv("ARTIFACTS", str(tmp_path))
    return load_settings(VALUES)


def write_checkpoints(run_dir, steps):
    for step in steps:
        folder = run_dir / f"checkpoints/global_step_{step}/actor/huggingface"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_text("")
    (run_dir / "checkpoints/latest_checkpointed_iteration.txt").write_text(str(max(steps)))


def make_run(s, name=None, steps=(2, 4), metrics=None, age=0, kind="rl"):
    run_dir = rl_run(s, []).folder if name is None else s.runs_dir / name
    write_checkpoints(run_dir, steps)
    record(run_dir, kind, fingerprint(s.rl_parts([])), s, "start", [])
    (run_dir / "metrics").mkdir()
    lines = [json.dumps({"step": step, "data": data}) + "\n" for step, data in (metrics or {}).items()]
    (run_dir / "metrics/000.jsonl").write_text("".join(lines))
    os.utime(run_dir / "checkpoints/latest_checkpointed_iteration.txt", (1e9 - age, 1e9 - age))
    return run_dir


def folders(runs):
    return [run.folder for run in runs]


def begun(run_dir, start, settings, mark=None, steps=(4,), reads=None):
    """A round with a checkpoint."""
    write_checkpoints(run_dir, steps)
    record(run_dir, "rl", mark or "x", settings, start, [], reads=reads)
    return run_dir


def test_a_warm_up_is_complete_with_its_steps_or_its_loss(settings):
    s = replace(settings, SFT_STEPS=20, SFT_LOSS=0.1)
    losses = dict(enumerate(({WHOLE: loss} for loss in (0.9, 0.3, 0.12, 0.1, 0.08, 0.06)), 1))
    run = Run.read(make_run(s, "sft-x", steps=(6,), metrics=losses, kind="sft"))
    assert run.warmed(s) and not run.warmed(replace(s, SFT_LOSS=0.0))  # the last four: 0.09
    assert not run.warmed(replace(s, SFT_LOSS=0.09)) and run.warmed(replace(s, SFT_STEPS=6, SFT_LOSS=0.0))
    assert not learned([0.0] * 3, 0.1) and learned([9.0, *[0.0] * 4], 0.1) and not learned([0.0] * 9, 0.0)
    assert learned([0.0, 9.0, 0.0, 0.0], 0.1) and not learned([0.0, 9.0, 9.0, 0.0], 0.1)


def test_rounds_are_those_that_began_each_from_the_last_step_of_the_one_before(settings):
    s = replace(settings, SELF_PLAY_ROUNDS=3, STEPS=4)
    assert folders(rounds(s, [])) == [rl_run(s, []).folder]
    first = begun(rl_run(s, []).folder, "start", s, fingerprint(s.rl_parts([])))
    assert folders(rounds(s, [])) == [first]
    start = str(export(Run.read(first)))
    second = begun(rl_run(s, [], 2, start).folder, start, s, fingerprint(s.rl_parts([], 2, start)), steps=(2,))
    assert second.name.endswith("-round2")
    assert folders(rounds(s, [])) == [first, second] == folders(lineage(Run.read(second)))
    assert folders(lineage(Run.read(first))) == [first]
    assert find_run(s, []).folder == second
    assert folders(rounds(replace(s, SELF_PLAY_ROUNDS=1), [])) == [first]
    assert folders(rounds(replace(s, STEPS=5), [])) == [first]  # to be continued before another round can begin


def test_a_round_of_dpo_is_complete_with_the_steps_that_its_pairs_made(settings):
    s = replace(settings, METHOD="dpo", SELF_PLAY_ROUNDS=2, STEPS=4)
    first = begun(rl_run(s, []).folder, "start", replace(s, STEPS=9), fingerprint(s.rl_parts([])), steps=(4,))
    assert not Run.read(first).complete(s) and not Run.read(rl_run(s, [], 2, "x").folder).complete(s)
    write_checkpoints(first, (9,))
    assert Run.read(first).complete(s) and not Run.read(first).complete(replace(s, METHOD="grpo", STEPS=10))


def test_a_run_from_another_runs_checkpoint_as_MODEL_is_no_round_of_it(settings):
    first = begun(settings.runs_dir / "one", "start", settings)
    start = str(export(Run.read(first)))
    own = begun(settings.runs_dir / "two", start, replace(settings, MODEL=start))
    assert folders(lineage(Run.read(own))) == [own]


def test_rounds_of_a_named_run_have_its_name(settings):
    s = replace(settings, RUN="mine")
    assert rl_run(s, [], 2, "a").folder.name == "mine-round2"
    begun(rl_run(s, [], 2, "a").folder, "a", s, fingerprint(s.rl_parts([], 2, "a")), reads=s.rl_parts([], 2, "a"))
    with pytest.raises(SettingsError, match=r"RUN=mine-round2: exists with other settings \(start\); take another"):
        rl_run(s, [], 2, "b")


def test_a_checkpoint_is_found_by_latest_best_and_number(settings):
    metrics = {2: {"critic/score/mean": 0.9}, 3: {"critic/score/mean": 0.95}, 4: {"critic/score/mean": 0.1}}
    run_dir = make_run(settings, metrics=metrics)
    assert [Run.read(run_dir).step(step) for step in ("latest", "best", "2")] == [4, 2, 2]
    assert export(Run.read(run_dir), "best") == run_dir / "checkpoints/global_step_2/actor/huggingface"


def test_a_run_without_validation_and_reward_has_no_best_checkpoint(settings):
    run_dir = make_run(settings, metrics={2: {"train/loss": 0.1}, 4: {"train/loss": 0.2}})
    with pytest.raises(SettingsError, match=r"^STEP=best: .* has neither validations nor rewards; take STEP=latest$"):
        Run.read(run_dir).step("best")
    assert Run.read(run_dir).step() == 4


def test_patience_begins_after_the_steps_of_ppos_critic_alone(settings):
    same = {step: {"val-core/t/acc/mean@1": 0.3} for step in (1, 2, 3, 4)}
    s = replace(settings, METHOD="ppo", STEPS=10, PATIENCE=2, CRITIC_WARMUP=3)
    run_dir = make_run(s, metrics=same)
    assert not Run.read(run_dir).complete(s) and Run.read(run_dir).complete(replace(s, PATIENCE=1))
    scores = Run.read(run_dir).scores
    assert not ends_run(run_dir, 4, same[4], 2, scores) and ends_run(run_dir, 5, same[4], 2, scores)
    s = replace(s, METHOD="grpo")  # it has no critic
    assert Run.read(make_run(s, "other", metrics=same)).complete(s)


def test_more_steps_of_a_round_that_another_started_from_are_refused_before_they_are_trained(settings):
    s = replace(settings, RUN="mine", SELF_PLAY_ROUNDS=2, STEPS=4)
    first = begun(rl_run(s, []).folder, "start", s, fingerprint(s.rl_parts([])))
    start = str(export(Run.read(first)))
    begun(rl_run(s, [], 2, start).folder, start, s, fingerprint(s.rl_parts([], 2, start)))
    check_training(s, [])
    with pytest.raises(SettingsError, match=r"^RUN=mine: mine-round2 started from mine as it is; take another name$"):
        check_training(replace(s, STEPS=8), [])


def test_the_best_is_the_default_where_a_checkpoint_was_validated(settings):
    validated = {step: {"val-core/t/acc/mean@1": acc} for step, acc in ((2, 0.3), (3, 0.9), (4, 0.2))}
    run_dir = make_run(settings, metrics=validated)
    assert Run.read(run_dir).step() == Run.read(run_dir).step("best") == 2  # of step 3 there is no checkpoint
    assert export(Run.read(run_dir)) == run_dir / "checkpoints/global_step_2/actor/huggingface"
    assert Run.read(make_run(settings, "other", metrics={2: {"critic/score/mean": 0.9}})).step() == 4


def test_a_run_that_patience_ended_is_complete_and_the_next_round_begins_with_its_best(settings):
    validated = {step: {"val-core/t/acc/mean@1": acc} for step, acc in ((2, 0.3), (4, 0.2))}
    s = replace(settings, SELF_PLAY_ROUNDS=2, STEPS=10, PATIENCE=1)
    first = make_run(s, metrics=validated | {6: {"val-core/t/acc/mean@1": 0.9}})  # 6: of a launch that was lost
    run = Run.read(first)
    assert run.complete(s) and not run.complete(replace(s, PATIENCE=2))
    assert not run.complete(replace(s, PATIENCE=0)) and run.complete(replace(s, PATIENCE=0, STEPS=4))
    start = str(export(run, "2"))
    second = begun(rl_run(s, [], 2, start).folder, start, s, fingerprint(s.rl_parts([], 2, start)))
    assert folders(rounds(s, [])) == [first, second]


@pytest.mark.parametrize("step", ["3", "first", "-2", "2.0", "../x"])
def test_an_unknown_checkpoint_is_refused_with_those_there_are(settings, step):
    run_dir = make_run(settings)
    with pytest.raises(SettingsError, match=r"has the checkpoints 2, 4; take one of them, latest or best"):
        Run.read(run_dir).step(step)


@pytest.mark.parametrize("said", ["", "\0\0", "7", "4\ufffd", "-1", None])
def test_a_damaged_tracker_hides_no_checkpoint(settings, said):
    run_dir = make_run(settings)
    tracker = run_dir / "checkpoints/latest_checkpointed_iteration.txt"
    tracker.unlink() if said is None else tracker.write_text(said)
    assert find_run(settings, []).folder == run_dir and Run.read(run_dir).step("latest") == 4
    assert export(Run.read(run_dir)) == run_dir / "checkpoints/global_step_4/actor/huggingface"


def test_a_checkpoint_that_was_not_finished_does_not_count(settings):
    run_dir = make_run(settings)
    (run_dir / "checkpoints/global_step_6").mkdir()
    assert Run.read(run_dir).step("latest") == 4


def test_the_run_of_these_settings_comes_before_the_newest(settings):
    other = make_run(replace(settings, LR=1.0), age=0)
    assert find_run(settings, []).folder == other
    mine = make_run(settings, age=100)
    assert find_run(settings, []).folder == mine
    assert find_run(replace(settings, LR=2.0), []).folder == other
    assert find_run(replace(settings, RUN=mine.name), []).folder == mine


def test_rl_comes_before_a_newer_warm_up_and_a_warm_up_before_nothing(settings):
    warm_up = make_run(replace(settings, LR=1.0), "sft-1", kind="sft")
    assert find_run(settings, []).folder == warm_up
    rl = make_run(replace(settings, LR=2.0), age=100)
    assert find_run(settings, []).folder == rl
    assert find_run(replace(settings, RUN="sft-1"), []).folder == warm_up


def test_a_model_that_no_run_started_from_stands_for_itself(settings):
    run_dir = make_run(replace(settings, MODEL="a/b"))
    assert find_run(replace(settings, MODEL="c/d"), [], "c/d") is None
    assert find_run(replace(settings, MODEL="a/b", LR=9.0), [], "a/b").folder == run_dir


def test_a_value_that_the_run_does_not_take_is_told(settings, monkeypatch, capsys):
    make_run(replace(settings, TEST_SIZE=9, RUN="mine"), "mine")
    monkeypatch.setenv("GIVEN", "RUN TEST_SIZE N TASK")
    for size, told in ((8, "  the run's TEST_SIZE=9, not what is given"), (9, "")):
        given = replace(settings, RUN="mine", TEST_SIZE=size, N=7)
        job = main.about(main.Job("chat", given, load_settings(VALUES, Command), []))
        assert (job.s.TEST_SIZE, job.s.N) == (9, 7)
        out = capsys.readouterr().out
        assert told in out if told else "not what is given" not in out


@pytest.mark.parametrize("goal", ["chat", "eval"])
@pytest.mark.parametrize(
    ("given", "limits", "told"),
    [
        ({}, (64, 64, 2), ""),  # the run's, not today's of the task
        ({"MAX_TURNS": 5}, (64, 64, 5), "MAX_TURNS=5 (trained with 2)"),
        ({"MAX_TURNS": 2}, (64, 64, 2), ""),
        ({"MAX_TURN_LENGTH": 48}, (64, 48, 2), "MAX_TURN_LENGTH=48 (trained with 64)"),
        ({"MAX_RESPONSE_LENGTH": 256}, (256, 256, 2), "MAX_RESPONSE_LENGTH=256 (trained with 64)"),
        ({"MAX_RESPONSE_LENGTH": 256, "MAX_TURN_LENGTH": 32}, (256, 32, 2), "MAX_TURN_LENGTH=32 (trained with 64)"),
    ],
)
def test_the_limits_of_an_episode_are_those_given_with_a_run_and_a_line_says_so(
    settings, monkeypatch, capsys, goal, given, limits, told
):
    own = {"MAX_RESPONSE_LENGTH": 64, "MAX_TURN_LENGTH": 64, "MAX_TURNS": 2, "MAX_NEW_TOKENS": 64}
    make_run(replace(settings, RUN="mine", **own), "mine")
    today = VALUES | {"RUN": "mine", "MAX_RESPONSE_LENGTH": "128", "MAX_NEW_TOKENS": "", "MAX_TURN_LENGTH": ""}
    texts = {name: str(value) for name, value in given.items()}
    for name, text in texts.items():
        monkeypatch.setenv(name, text)
    monkeypatch.setenv("GIVEN", " ".join(["RUN", *given]))
    job = main.about(main.Job(goal, load_settings(today | texts), load_settings(VALUES, Command), []))
    found = episode_limits(job.s, sampling(job.s))
    assert (found.response_length, found.turn_length, found.turns) == limits
    out = capsys.readouterr().out
    assert ("  as given: " in out) == bool(told) and told in out and "not what is given" not in out


def test_an_unknown_run_is_refused_with_those_there_are(settings):
    make_run(settings, "mine")
    with pytest.raises(SettingsError, match=r"RUN=yours: no such run with a checkpoint in .*; there are: mine"):
        find_run(replace(settings, RUN="yours"), [])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (lambda whole: whole[:-9], "holds no JSON object"),
        (lambda whole: f"[{whole}]", "holds no JSON object"),
        (lambda whole: "[" * 100_000, "holds no JSON object"),
        (lambda whole: whole.replace('"kind": "rl"', '"kind": 7'), "needs the texts"),
        (lambda whole: whole.replace('"SEED": ', '"SEED": "x", "S": '), "SEED=x: has a wrong type"),
    ],
)
def test_a_run_whose_record_is_broken_is_told_from_one_that_is_not_there(settings, text, why):
    make_run(settings, "mine")
    file = make_run(settings, "broken") / "settings.json"
    file.write_text(text(file.read_text()))
    for find in (lambda: find_run(replace(settings, RUN="broken"), []), lambda: named("broken", settings.TASK)):
        with pytest.raises(SettingsError, match=f"RUN=broken: {file} is no record of a run: .*{why}"):
            find()


def test_a_run_without_a_checkpoint_is_none(settings):
    shutil.rmtree(make_run(settings, "mine") / "checkpoints")
    assert find_run(settings, []) is None


def test_a_run_is_evaluated_on_its_own_data_with_todays_sampling(settings):
    run_dir = make_run(replace(settings, TEST_SIZE=77, SEED=5, N=1))
    found = settings_of(Run.read(run_dir), replace(settings, N=9, LIMIT=3))
    assert (found.TEST_SIZE, found.SEED, found.N, found.LIMIT) == (77, 5, 9, 3)


def test_length_and_temperature_follow_the_run_unless_they_were_given(settings):
    run_dir = make_run(replace(settings, MAX_RESPONSE_LENGTH=512, TEMPERATURE=0.7))
    found = settings_of(Run.read(run_dir), settings)
    assert (found.MAX_NEW_TOKENS, found.EVAL_TEMPERATURE) == (512, 0.7)
    found = settings_of(Run.read(run_dir), replace(settings, MAX_NEW_TOKENS=99, EVAL_TEMPERATURE=0.2))
    assert (found.MAX_NEW_TOKENS, found.EVAL_TEMPERATURE) == (99, 0.2)


@pytest.mark.parametrize(("gpus", "tp"), [(8, 4), (4, 4), (6, 2), (1, 1)])
def test_a_run_is_evaluated_on_the_gpus_that_are_here_which_share_its_model_as_in_the_training(gpus, tp, settings):
    run_dir = make_run(replace(settings, N_GPUS=8, TP=4, GPU_MEMORY_UTILIZATION=0.8))
    found = settings_of(Run.read(run_dir), replace(settings, N_GPUS=gpus))
    assert found == replace(settings, N_GPUS=gpus, TP=tp, GPU_MEMORY_UTILIZATION=0.8)


def test_how_gpus_share_a_model_is_what_is_given(settings, monkeypatch):
    run_dir = make_run(replace(settings, N_GPUS=8, TP=4, GPU_MEMORY_UTILIZATION=0.8))
    part = make_run(replace(settings, SEED=7, GPU_MEMORY_UTILIZATION=0.04))  # of trainings that shared a GPU
    assert settings_of(Run.read(part), settings).GPU_MEMORY_UTILIZATION == settings.GPU_MEMORY_UTILIZATION == 0.5
    monkeypatch.setenv("TP", "2")
    monkeypatch.setenv("GPU_MEMORY_UTILIZATION", "0.6")
    found = settings_of(Run.read(run_dir), replace(settings, N_GPUS=8, TP=2, GPU_MEMORY_UTILIZATION=0.6))
    assert (found.TP, found.GPU_MEMORY_UTILIZATION) == (2, 0.6)


def job_of(goal, s, run_dir=None, **command):
    return main.Job(goal, s, load_settings(command, cls=Command), [], run=run_dir and Run.read(run_dir))


def test_a_start_that_is_gone_is_named_before_the_evaluation_begins(settings, monkeypatch):
    s, called = replace(settings, MODEL="some/model", INIT="sft"), []
    monkeypatch.setattr(main, "script", lambda *arguments: called.append(arguments))
    make_run(s, sft_dir(s).name, kind="sft")
    start = str(export(Run.read(sft_dir(s))))
    rl = begun(s.runs_dir / "rl", start, s)
    second = begun(s.runs_dir / "rl-round2", str(export(Run.read(rl))), s)
    for goal, stage in (("eval", main.evaluate), ("compare", main.compare)):
        stage(job_of(goal, s, second))
    assert len(called) == 2
    shutil.rmtree(sft_dir(s))
    again = f"`make sft TASK={s.TASK}` with the settings of that run makes it again"
    for goal, stage, more in (("eval", main.evaluate, ""), ("compare", main.compare, ", or give BASE")):
        with pytest.raises(SettingsError) as error:
            stage(job_of(goal, s, second))
        assert str(error.value) == f"RUN=rl: the model that it began with, {start}, is gone; {again}{more}"
    main.compare(job_of("compare", s, second, BASE="some/other"))
    assert len(called) == 3
    start = str(export(Run.read(rl)))
    shutil.rmtree(rl)  # of this no stage makes the same again
    with pytest.raises(SettingsError, match=f"^RUN=rl-round2: .* {start}, is gone; put it back$"):
        main.evaluate(job_of("eval", s, second))


def test_a_start_is_found_where_the_artifacts_were_moved_to(settings, monkeypatch, tmp_path):
    s, called = replace(settings, MODEL="some/model", INIT="sft"), []
    monkeypatch.setattr(main, "script", lambda *arguments: called.append(arguments))
    make_run(s, sft_dir(s).name, kind="sft")
    rl = begun(s.runs_dir / "rl", str(export(Run.read(sft_dir(s)))), s)
    second = begun(s.runs_dir / "rl-round2", str(export(Run.read(rl))), s)
    (tmp_path / "moved").mkdir()
    (before := artifacts() / "runs").rename(tmp_path / "moved/runs")
    monkeypatch.setenv("ARTIFACTS", str(tmp_path / "moved"))
    second = tmp_path / "moved/runs" / second.relative_to(before)
    main.evaluate(job_of("eval", s, second))
    (words,) = called
    models = dict(word.split("=", 1) for word in words[2:])
    assert [*models] == ["base", "sft", "round1", "round2"]
    assert all(Path(path).is_dir() for label, path in models.items() if label != "base")


def test_a_base_that_is_not_there_is_named_by_its_variable(settings, monkeypatch, tmp_path):
    monkeypatch.setattr(main, "script", lambda *arguments: None)
    job = replace(job_of("compare", replace(settings, MODEL="some/model"), BASE="/nonexistent"), model="some/model")
    with pytest.raises(SettingsError, match=r"^BASE=/nonexistent: no such folder, and not a hub id \(owner/name\)$"):
        main.compare(job)
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/adapter_model.safetensors").write_text("")
    for config, said in (({}, "names no base model"), ({"base_model_name_or_path": "/gone"}, "/gone is not there")):
        (tmp_path / "adapter/adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 8} | config))
        job = replace(job, command=replace(job.command, BASE=str(tmp_path / "adapter")))
        fix = "correct its adapter_config.json"
        with pytest.raises(SettingsError, match=f"^BASE={tmp_path}/adapter: .*{said}; {fix}$"):
            main.compare(job)
    gone = job_of("compare", replace(settings, MODEL="/nonexistent", INIT="base"), make_run(settings))
    with pytest.raises(SettingsError, match=r"^MODEL=/nonexistent: no such folder"):
        main.compare(gone)


def test_a_model_is_named_after_its_run_and_step(settings):
    run_dir = make_run(settings, "my-run")
    assert model_name(str(export(Run.read(run_dir)))) == "my-run-step4"
    assert model_name("Qwen/Qwen2.5-1.5B") == "Qwen2.5-1.5B" and model_name("/models/x") == "x"
    assert model_name("/data/checkpoints") == "checkpoints" and model_name("me/checkpoints") == "checkpoints"


def test_a_whole_checkpoint_is_not_merged(settings):
    whole = make_run(settings) / "checkpoints/global_step_4/actor"
    assert merge(whole) == whole_folder(whole) == whole / "huggingface"


@pytest.mark.slow  # verl's merger imports verl
def test_a_broken_checkpoint_leaves_nothing(settings):
    run_dir = make_run(settings)
    broken = run_dir / "checkpoints/global_step_2/actor"
    (broken / "huggingface/model.safetensors").unlink()
    with pytest.raises(StageFailed, match=r"verl\.model_merger failed"):
        merge(broken)
    assert {f.name for f in broken.iterdir()} == {"huggingface"}


def test_a_record_that_cannot_be_written_leaves_nothing(settings, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(launches, "write_json", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*/launches/000'"):
        launches.begin(tmp_path / "run", settings, ["python"])
    assert os.listdir(tmp_path / "run/launches") == []


def test_the_lock_of_a_task_holds_without_its_number_on_a_full_disk(settings):
    """A limit of 0 bytes for files stands for the disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with contextlib.ExitStack() as first:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
        try:
            first.enter_context(_locked(settings))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        with (
            pytest.raises(SettingsError, match=r"is already running \(process unknown\); wait for it"),
            _locked(settings),
        ):
            pass
