"""The best checkpoints and PATIENCE in the real training loop of verl 0.6.1; tests/verl_061.py asks for them.

Workers and engines are stand-ins.
"""

import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from verl import DataProto
from verl.trainer.ppo.ray_trainer import RayPPOTrainer

from tests.helpers import write_shards
from tests.test_settings import VALUES
from verl_tasks.runs.run import Run, mend_tracker, read_metrics, tracker
from verl_tasks.training import verl_config
from verl_tasks.verl_plugins.verl_061 import keep_best, patches  # noqa: F401

ROWS, PROMPT, RESPONSE = 4, 3, 5


class Batches(list):
    """The data loader: as many batches as an epoch has."""

    sampler = None

    def state_dict(self) -> dict:
        return {}

    def load_state_dict(self, state: dict) -> None:
        pass


def batches(count: int) -> Batches:
    ids = torch.ones(ROWS, PROMPT, dtype=torch.int64)
    tensors = {"input_ids": ids, "attention_mask": ids, "position_ids": ids}
    return Batches(tensors | {"raw_prompt": np.array([["p"]] * ROWS, dtype=object)} for _ in range(count))


class Rollouts:
    def generate_sequences(self, data: DataProto) -> DataProto:
        rows = len(data)
        whole = torch.ones(rows, PROMPT + RESPONSE, dtype=torch.int64)
        parts = {"prompts": whole[:, :PROMPT], "responses": whole[:, PROMPT:], "response_mask": whole[:, PROMPT:]}
        parts |= {name: whole for name in ("input_ids", "attention_mask", "position_ids")}
        return DataProto.from_dict(parts, meta_info={"timing": {}})


class Workers:
    world_size = 1

    def load_checkpoint(self, *arguments, **named) -> None:
        pass

    def save_checkpoint(self, local_path, remote_path, step, max_ckpt_to_keep=None) -> None:
        assert max_ckpt_to_keep is None  # verl would remove the oldest
        write_shards(Path(local_path))

    def compute_log_prob(self, data: DataProto) -> DataProto:
        zeros = torch.zeros(len(data), RESPONSE)
        return DataProto.from_dict({"old_log_probs": zeros, "entropys": zeros})

    def update_actor(self, data: DataProto) -> DataProto:
        return DataProto(meta_info={"metrics": {}})


def reward(data: DataProto, return_dict: bool) -> dict:
    scores = torch.zeros(len(data), RESPONSE)
    scores[:, -1] = torch.arange(len(data)) % 2
    return {"reward_tensor": scores, "reward_extra_info": {}}


def trained(run_dir: Path, dev: dict[int, float], steps: int, **variables: str) -> dict:
    """What is left of a training whose validations give ``dev``; ``run_dir`` may hold an earlier part of it."""
    metrics = Run.read(run_dir).next_metrics
    metrics.parent.mkdir(parents=True, exist_ok=True)
    os.environ.update(VALUES | variables | {"VERL_FILE_LOGGER_PATH": str(metrics)})
    own = {"save_freq": 4, "test_freq": variables["TEST_FREQ"], "default_local_dir": run_dir / "checkpoints"}
    own |= {"logger": "[file]", "val_before_train": False, "total_epochs": 100, "balance_batch": False}
    overrides = [f"trainer.{name}={value}" for name, value in own.items()]
    overrides += ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=2"]
    trainer = object.__new__(RayPPOTrainer)
    trainer.config = verl_config.compose("ppo_trainer", overrides)
    trainer.train_dataloader, trainer.train_dataset = batches(3), SimpleNamespace()
    trainer.actor_rollout_wg, trainer.async_rollout_manager, trainer.async_rollout_mode = Workers(), Rollouts(), True
    trainer.reward_fn = trainer.val_reward_fn = reward
    trainer.use_critic = trainer.use_rm = trainer.use_reference_policy = False
    trainer.resource_pool_manager = SimpleNamespace(get_n_gpus=lambda: 1)
    trainer.total_training_steps = steps
    if tracker(run_dir).exists():  # as a full disk leaves it; verl would end in int('')
        tracker(run_dir).write_text("")
    mend_tracker(Run.read(run_dir))

    def validate(self) -> dict:
        return {"val-core/t/acc/mean@1": dev[self.global_steps], "val-aux/t/reward/mean@1": 0.0}

    keep_best._validate = validate
    trainer.fit()
    return {"kept": [*Run.read(run_dir).steps], "logged": sorted(read_metrics(run_dir))}


def trainings(root: Path) -> dict[str, dict]:
    """What three trainings keep and log, of which the last goes on with the second; ``root`` is an empty folder."""
    dev = {1: 0.1, 2: 0.6, 3: 0.6, 4: 0.5, 5: 0.7, 6: 0.1, 7: 0.2, 8: 0.1}
    unwritten = SimpleNamespace(global_steps=8)  # into a folder that cannot be made: nothing is raised
    RayPPOTrainer._dump_generations(unwritten, ["q"], ["a"], ["g"], [1.0], {}, "/dev/full/rollouts")
    return {
        "best": trained(root / "a", dev, 8, TEST_FREQ="1", KEEP="2"),
        "patience": trained(root / "c", dev, 8, TEST_FREQ="1", KEEP="1", PATIENCE="2"),
        "continued": trained(root / "c", dev, 8, TEST_FREQ="1", KEEP="1", PATIENCE="3"),
    }
