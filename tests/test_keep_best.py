"""Validation, the best checkpoints and PATIENCE in verl's own training loop; only workers and engines are stand-ins."""

from types import SimpleNamespace

import pytest

from tasks.common.runs import folder, validation
from tasks.common.training import verl_config
from tests.test_settings import VALUES


def row(acc: float, reward: float = 0.0) -> dict:
    """What verl logs of a validation."""
    return {
        "val-core/t/acc/mean@1": acc,
        "val-aux/t/reward/mean@1": reward,
        "val-aux/num_turns/mean": 2.0,
        "critic/score/mean": 9.0,
    }


class Workers:
    """In place of the worker group: a checkpoint is a folder with a file."""

    def save_checkpoint(self, local_path, remote_path, step, max_ckpt_to_keep=None):
        from pathlib import Path

        assert max_ckpt_to_keep is None  # verl would remove the oldest
        Path(local_path).mkdir(parents=True)
        (Path(local_path) / "model.pt").write_text(str(step))


@pytest.fixture(scope="module")
def module():
    from tasks.common.verl_plugins import trainer as verl_trainer  # here: importing verl takes seconds

    return verl_trainer


@pytest.fixture
def fit(module, tmp_path, monkeypatch):
    """Function: train in verl's loop; ``dev`` gives the dev accuracy of a step. Returns the run's folder."""
    from verl.trainer.ppo.v1 import trainer_base

    monkeypatch.setattr(trainer_base.tq, "kv_clear", lambda **_: None, raising=False)
    run_dir = tmp_path / "run"

    def run(dev, steps=8, start=0, **variables):
        for name, value in (VALUES | {"ARTIFACTS": str(tmp_path)} | variables).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(folder.next_metrics_file(run_dir)))
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
            "step": lambda self, metrics, timing: trained,
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
    assert folder.checkpoints(run_dir) == [2, 4, 8]
    assert folders(run_dir) == ["global_step_2", "global_step_4", "global_step_8"]
    assert folder.find_step(run_dir, "best") == 2


def test_steps_are_saved_that_are_validated_and_the_newest_stay_without(fit):
    assert folder.checkpoints(fit({2: 0.1, 4: 0.2, 6: 0.1, 8: 0.1}.get, TEST_FREQ="2", SAVE_FREQ="5", KEEP="1")) == [
        4,
        8,
    ]


def test_without_validations_the_newest_stay(fit):
    run_dir = fit(None, SAVE_FREQ="2", KEEP="1")
    assert folder.checkpoints(run_dir) == [6, 8]


def test_patience_ends_the_run_and_more_of_it_continues(fit):
    dev = {1: 0.1, 2: 0.6, 3: 0.6, 4: 0.5, 5: 0.7, 6: 0.1, 7: 0.1, 8: 0.1}
    run_dir = fit(dev.get, TEST_FREQ="1", KEEP="1", PATIENCE="2")
    assert (folder.checkpoints(run_dir), sorted(folder.read_metrics(run_dir))) == ([2, 4], [1, 2, 3, 4])
    assert [folder.ended_early(run_dir, patience) for patience in (0, 2, 3)] == [False, True, False]
    assert validation.words(folder.read_metrics(run_dir)) == "dev 0.500, best 0.600 (step 2)"
    fit(dev.get, start=4, TEST_FREQ="1", KEEP="1", PATIENCE="3")  # history counts: 3, 4 and then a gain
    assert (folder.checkpoints(run_dir), folder.ended_early(run_dir, 3)) == ([5, 8], True)
