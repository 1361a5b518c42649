"""Validation, the best checkpoints and PATIENCE in verl's own training loop, where only workers and engines are stand-
ins; which folders are whole checkpoints, and that verl resumes from the last of them whatever its tracker says.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.helpers import write_checkpoint, write_shards
from tests.test_settings import VALUES
from verl_tasks.launch import train
from verl_tasks.models.merge import has_weights
from verl_tasks.runs import checkpoint, folder, validation
from verl_tasks.runs.checkpoint import ranks, whole
from verl_tasks.runs.health import AbortedError
from verl_tasks.runs.run import Run, mend_tracker, prune, read_metrics, tracker
from verl_tasks.settings import SettingsError, load_settings
from verl_tasks.training import verl_config


def row(acc: float, reward: float = 0.0) -> dict:
    """What verl logs of a validation."""
    return {
        "val-core/t/acc/mean@1": acc,
        "val-aux/t/reward/mean@1": reward,
        "val-aux/num_turns/mean": 2.0,
        "critic/score/mean": 9.0,
    }


class Workers:
    """In place of the worker group: a checkpoint is a folder with empty shards."""

    def save_checkpoint(self, local_path, remote_path, step, max_ckpt_to_keep=None):
        assert max_ckpt_to_keep is None  # verl would remove the oldest
        write_shards(Path(local_path))


@pytest.fixture(scope="module")
def module():
    from verl_tasks.verl_plugins import trainer as verl_trainer  # here: importing verl takes seconds

    return verl_trainer


@pytest.fixture
def fit(module, tmp_path, monkeypatch):
    """Function: train in verl's loop; ``dev`` gives the dev accuracy of a step. Returns the run's folder."""
    from verl.trainer.ppo.v1 import trainer_base

    monkeypatch.setattr(trainer_base.tq, "kv_clear", lambda **_: None, raising=False)
    run_dir = tmp_path / "run"

    def run(dev, steps=8, start=0, step=None, **variables):
        for name, value in (VALUES | {"ARTIFACTS": str(tmp_path)} | variables).items():
            monkeypatch.setenv(name, value)
        metrics = Run.read(run_dir).next_metrics
        metrics.parent.mkdir(parents=True, exist_ok=True)
        monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(metrics))
        trainer = object.__new__(module.TaskTrainer)
        own = {
            "save_freq": variables.get("SAVE_FREQ", "100"),
            "test_freq": variables.get("TEST_FREQ", "-1"),
            "default_local_dir": run_dir / "checkpoints",
            "logger": "[file]",
            "val_before_train": False,
            "total_epochs": 100,
        }
        overrides = [f"trainer.{name}={value}" for name, value in own.items()]
        trainer.config = verl_config.compose("ppo_trainer", overrides)
        trainer.actor_rollout_wg, trainer.use_critic = Workers(), False
        trainer.train_dataloader = SimpleNamespace(state_dict=dict)
        trainer.checkpoint_manager = SimpleNamespace(update_weights=lambda step: None)
        trainer.checkpoint_callback = SimpleNamespace(on_save=lambda **_: None)
        trainer.global_steps, trainer.steps_per_epoch, trainer.total_training_steps = start, 1000, steps
        trainer._restored_tq_prompt_count = 0
        trainer._init_dump_executor()
        trained = SimpleNamespace(keys=[], partition_id="train")
        for name, value in {
            "_start_profiling": lambda self: None,
            "_stop_profiling": lambda self: None,
            "step": step or (lambda self, metrics, timing: trained),
            "_compute_metrics": lambda self, batch, metrics, timing, global_steps, epoch: metrics.update(x=1.0),
        }.items():
            monkeypatch.setattr(module.TaskTrainer, name, value)
        monkeypatch.setattr(trainer_base.PPOTrainer, "_validate", lambda self: row(dev(self.global_steps)))
        trainer.fit(None)
        return run_dir

    return run


def folders(run_dir) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir() if path.is_dir())


def test_the_best_and_the_last_stay(fit):
    dev = {1: 0.1, 2: 0.6, 3: 0.3, 4: 0.5, 5: 0.2, 6: 0.4, 7: 0.1, 8: 0.3}
    run_dir = fit(dev.get, TEST_FREQ="1", KEEP="2")
    assert [*Run.read(run_dir).steps] == [2, 4, 8]
    assert folders(run_dir) == ["global_step_2", "global_step_4", "global_step_8"]
    assert Run.read(run_dir).step("best") == 2


def test_steps_are_saved_that_are_validated_and_the_newest_stay_without(fit):
    assert [*Run.read(fit({2: 0.1, 4: 0.2, 6: 0.1, 8: 0.1}.get, TEST_FREQ="2", SAVE_FREQ="5", KEEP="1")).steps] == [
        4,
        8,
    ]


def test_each_line_of_the_metrics_is_read_once_by_the_trainer(fit, module, monkeypatch):
    """KEEP and PATIENCE had one reader of them, ABORT_ON another."""
    read, loads = [], json.loads
    monkeypatch.setattr(json, "loads", lambda text, **how: read.append(text) or loads(text, **how))

    def step(self, metrics, timing):
        metrics["actor/entropy"] = 1 / self.global_steps**3  # below health.ENTROPY from step 5 on
        return SimpleNamespace(keys=[], partition_id="train")

    monkeypatch.setattr(module.TaskTrainer, "_save_complete_step", lambda self: None)
    with pytest.raises(AbortedError, match=r"^ABORT_ON=collapse: step 5: entropy 0.0080 "):
        fit({2: 0.1, 4: 0.2}.get, TEST_FREQ="2", KEEP="1", PATIENCE="3", ABORT_ON="collapse", step=step)
    lines = [text for text in read if '"data"' in text]
    assert len(lines) == 5 == len(set(lines))


def test_without_validations_the_newest_stay(fit):
    run_dir = fit(None, SAVE_FREQ="2", KEEP="1")
    assert [*Run.read(run_dir).steps] == [6, 8]


@pytest.mark.parametrize(("seconds", "saved"), [(120, [3, 8]), (400, [1, 8]), (10, [8])])
def test_the_first_checkpoint_comes_within_five_minutes_of_the_first_step(fit, monkeypatch, seconds, saved):
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(checkpoint, "time", SimpleNamespace(monotonic=lambda: clock.now))

    def step(self, metrics, timing):
        clock.now += seconds
        return SimpleNamespace(keys=[], partition_id="train")

    assert [*Run.read(fit(None, SAVE_FREQ="100", KEEP="1", step=step)).steps] == saved


def test_patience_ends_the_run_and_more_of_it_continues(fit):
    dev = {1: 0.1, 2: 0.6, 3: 0.6, 4: 0.5, 5: 0.7, 6: 0.1, 7: 0.1, 8: 0.1}
    run_dir = fit(dev.get, TEST_FREQ="1", KEEP="1", PATIENCE="2")
    assert ([*Run.read(run_dir).steps], sorted(read_metrics(run_dir))) == ([2, 4], [1, 2, 3, 4])
    assert [Run.read(run_dir).ended_early(patience) for patience in (0, 2, 3)] == [False, True, False]
    assert validation.words(Run.read(run_dir).scores) == "dev 0.500, best 0.600 (step 2)"
    fit(dev.get, start=4, TEST_FREQ="1", KEEP="1", PATIENCE="3")  # history counts: 3, 4 and then a gain
    assert ([*Run.read(run_dir).steps], Run.read(run_dir).ended_early(3)) == ([5, 8], True)


# ---- what is on disk


def write_whole(run_dir, steps, last=None):
    for step in steps:
        write_checkpoint(run_dir / f"checkpoints/global_step_{step}")
    tracker(run_dir).write_text(str(last or max(steps)))


def test_a_warm_up_that_was_resumed_keeps_its_last_checkpoint_alone(tmp_path, monkeypatch):
    settings = replace(load_settings(VALUES), SFT_STEPS=4)
    monkeypatch.setattr(folder, "sft_dir", lambda s: tmp_path)
    write_whole(tmp_path, [2, 4])  # 2 is of the launch that was killed
    assert train.sft(settings) == "up to date: 4 steps" and folders(tmp_path) == ["global_step_4"]


def test_a_warm_up_goes_on_only_with_as_many_gpus(tmp_path, monkeypatch):
    """verl opens the shards of its own number of processes; the folder is the same for any N_GPUS."""
    four = replace(load_settings(VALUES), SFT_STEPS=8, N_GPUS=4)
    monkeypatch.setattr(folder, "sft_dir", lambda s: tmp_path)
    monkeypatch.setattr(train, "resolve_model", lambda model: 1 / 0)  # what follows the check
    saved = tmp_path / "checkpoints/global_step_4"
    write_shards(saved, 8)
    shutil.copy(saved / "model_world_size_8_rank_0.pt", saved / "data_0.pt")
    with pytest.raises(SettingsError) as error:
        train.sft(four)
    fix = f"set N_GPUS=8, or remove {tmp_path}/checkpoints"
    assert str(error.value) == f"N_GPUS=4: the warm-up stopped at step 4 with N_GPUS=8; {fix}"
    with pytest.raises(ZeroDivisionError):
        train.sft(replace(four, N_GPUS=8))
    assert train.sft(replace(four, SFT_STEPS=4)) == "up to date: 4 steps"
    shutil.rmtree(tmp_path / "checkpoints")
    with pytest.raises(ZeroDivisionError):
        train.sft(four)


def validated(run_dir, accuracies):
    (run_dir / "metrics").mkdir(parents=True)
    lines = [json.dumps({"step": step, "data": row(acc)}) + "\n" for step, acc in accuracies.items()]
    (run_dir / "metrics/000.jsonl").write_text("".join(lines))


def test_what_a_crash_left_goes_and_the_last_whole_one_never(tmp_path):
    write_whole(tmp_path, [2, 4, 6, 8, 10], last=8)
    (tmp_path / "checkpoints/global_step_10/data.pt").unlink()  # 10 was being written
    (tmp_path / "checkpoints/removed_global_step_4/actor").mkdir(parents=True)  # an earlier 4 was being removed
    validated(tmp_path, {2: 0.9, 4: 0.1, 6: 0.5, 8: 0.0, 10: 1.0})
    prune(tmp_path, 1, Run.read(tmp_path).scores)
    assert folders(tmp_path) == ["global_step_2", "global_step_8"]
    prune(tmp_path, 0, {})
    assert folders(tmp_path) == ["global_step_8"] and Run.read(tmp_path).last == 8


def test_nothing_goes_without_a_whole_checkpoint(tmp_path):
    write_whole(tmp_path, [2, 4])
    for step in (2, 4):
        (tmp_path / f"checkpoints/global_step_{step}/data.pt").write_bytes(b"PK")
    prune(tmp_path, 0, {})
    assert folders(tmp_path) == ["global_step_2", "global_step_4"]


def test_a_crash_while_one_is_removed_leaves_no_half_checkpoint(tmp_path, monkeypatch):
    write_whole(tmp_path, [2, 4, 6])

    def killed(path, ignore_errors):
        (path / "data.pt").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(shutil, "rmtree", killed)
        prune(tmp_path, 0, {})
    assert all((tmp_path / f"checkpoints/global_step_{step}/data.pt").exists() for step in Run.read(tmp_path).steps)
    assert Run.read(tmp_path).last == 6
    prune(tmp_path, 0, {})
    assert folders(tmp_path) == ["global_step_6"]


# ---- which step is the best


def test_the_best_is_by_accuracy_then_by_reward_then_the_first():
    metrics = {1: row(0.2, 0.9), 2: row(0.3, 0.1), 3: row(0.3, 0.2), 4: row(0.3, 0.2), 5: {"critic/score/mean": 9.0}}
    scores = validation.scores(metrics)
    assert validation.best(scores) == 3
    assert [validation.ends_early(scores, patience) for patience in (0, 1, 2)] == [False, True, False]
    assert validation.ranked([5, 4, 3, 2, 1], scores) == [3, 4, 2, 1, 5]
    assert validation.words(scores) == "dev 0.300, best 0.300 (step 3)"


def test_the_dev_score_is_verls_mean_whatever_else_it_logs():
    from verl.trainer.ppo.metric_utils import process_validation_metrics

    def logged(infos, sources):
        """As trainer_base.py, _val_metrics_update, names them."""
        found = {}
        for source, variables in process_validation_metrics(sources, ["a", "a", "b", "b"], infos).items():
            core = "acc" if "acc" in variables else "reward"
            for name, values in variables.items():
                section = "core" if name == core else "aux"
                found |= {f"val-{section}/{source}/{name}/{metric}": value for metric, value in values.items()}
        return found

    rewards = [1.0, 0.5, 0.5, 0.0]
    one = logged({"reward": rewards, "acc": [1.0, 0.0, 0.0, 0.0], "format": [1.0] * 4}, ["t"] * 4)
    assert validation.score(one) == pytest.approx((0.25, 0.5)) and any("best@2" in name for name in one)
    assert validation.score(logged({"reward": rewards}, ["t"] * 4)) == pytest.approx((0.5, 0.5))
    two = logged({"reward": rewards, "acc": [1.0, 1.0, 0.0, 0.0]}, ["t", "t", "u/v", "u/v"])
    assert validation.score(two) == pytest.approx((0.5, 0.5))
    assert validation.score({"val-core/t/acc/mean@1": float("nan")}) is None is validation.score({"actor/entropy": 1.0})


# ---- whole checkpoints


def files(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.fixture(params=["rl", "critic", "sft"])
def saved(request, tmp_path):
    """A checkpoint of two ranks as verl leaves it."""
    folder = tmp_path / "checkpoints/global_step_4"
    write_checkpoint(folder, 2)
    if request.param == "critic":
        write_shards(folder / "critic", 2)
    if request.param == "sft":
        for file in files(folder / "actor"):
            file.rename(folder / file.name)
        (folder / "actor").rmdir()
        (folder / "data.pt").rename(folder / "data_0.pt")
    return folder


def test_a_checkpoint_counts_only_with_every_file_and_every_file_to_its_end(saved):
    assert whole(saved) and Run.read(saved.parents[1]).last == 4
    for file in files(saved):
        kept = file.read_bytes()
        file.unlink()
        assert not whole(saved), file
        file.write_bytes(kept[:-1])
        assert not whole(saved) and Run.read(saved.parents[1]).last == 0, file
        file.write_bytes(kept)
    assert whole(saved)


def test_the_names_of_the_shards_tell_how_many_processes_wrote_them(tmp_path):
    write_shards(tmp_path / "sft", 12)
    (tmp_path / "sft/data_0.pt").touch()
    assert (ranks(tmp_path / "sft"), ranks(tmp_path), ranks(tmp_path / "absent")) == (12, 0, 0)


def test_only_empty_folders_are_no_checkpoint(tmp_path):
    (tmp_path / "actor/huggingface").mkdir(parents=True)
    (tmp_path / "actor/huggingface/config.json").touch()
    assert not whole(tmp_path) and not whole(tmp_path / "absent")


@pytest.mark.parametrize("optimizer", [("optimizer.pt",), ("optimizer.bin", "pytorch_model_fsdp.bin")])
def test_a_checkpoint_of_dpo_has_a_model_and_all_that_resumes_it(tmp_path, optimizer):
    names = ("config.json", "model.safetensors", *optimizer, "scheduler.pt", "trainer_state.json")
    for name in names:
        (tmp_path / name).touch()
    assert whole(tmp_path)
    for name in names:
        (tmp_path / name).unlink()
        assert not whole(tmp_path), name
        (tmp_path / name).touch()


def test_a_model_in_parts_is_whole_with_all_of_them(tmp_path):
    (tmp_path / "config.json").touch()
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "model-1.safetensors").touch()
    assert not has_weights(tmp_path)
    (tmp_path / "model-2.safetensors").touch()
    assert has_weights(tmp_path)


@pytest.mark.parametrize("index", ["", '{"weight_map": {"a": "mod', "[]", "{}", '{"weight_map": ["a"]}'])
def test_a_model_whose_index_cannot_be_read_is_not_whole(index, tmp_path):
    """Which of its parts are missing is not known."""
    (tmp_path / "config.json").touch()
    (tmp_path / "model-1.safetensors").touch()
    (tmp_path / "model.safetensors.index.json").write_text(index)
    assert not has_weights(tmp_path)


@pytest.mark.parametrize("said", ["", "\0", "6", "8", "4x", None])
def test_verl_resumes_from_the_last_whole_checkpoint(tmp_path, said):
    """6 was removed in part, 8 was being written: neither is whole."""
    from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path

    folder = tmp_path / "checkpoints"
    for step in (2, 4, 6, 8):
        write_checkpoint(folder / f"global_step_{step}")
    shutil.rmtree(folder / "global_step_6/actor")
    (folder / "global_step_8/data.pt").unlink()
    if said is not None:
        tracker(tmp_path).write_text(said)
    mend_tracker(Run.read(tmp_path))
    assert find_latest_ckpt_path(str(folder)) == str(folder / "global_step_4")
    assert [*Run.read(tmp_path).steps] == [2, 4]


def test_shards_of_one_and_of_two_gpus_make_no_checkpoint(tmp_path):
    """Rank 0 of one launch and rank 1 of another are no two halves."""
    write_checkpoint(folder := tmp_path / "checkpoints/global_step_2", ranks=2)
    assert [*Run.read(tmp_path).steps] == [2]
    for file in folder.glob("actor/*_world_size_2_rank_0.pt"):
        file.rename(file.with_name(file.name.replace("size_2", "size_1")))
    assert not [*Run.read(tmp_path).steps]


def test_verl_starts_anew_where_no_checkpoint_is_whole(tmp_path):
    from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path

    (tmp_path / "checkpoints/global_step_1").mkdir(parents=True)
    tracker(tmp_path).write_text("")
    mend_tracker(Run.read(tmp_path))
    assert find_latest_ckpt_path(str(tmp_path / "checkpoints")) is None


def test_a_tracker_that_names_a_whole_checkpoint_is_followed_and_kept(tmp_path):
    for step in (2, 4):
        write_checkpoint(tmp_path / f"checkpoints/global_step_{step}")
    tracker(tmp_path).write_text("2")
    mend_tracker(Run.read(tmp_path))
    assert Run.read(tmp_path).last == 2 and [*Run.read(tmp_path).steps] == [2] and tracker(tmp_path).read_text() == "2"
