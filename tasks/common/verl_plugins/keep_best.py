"""Validation in verl 0.9.1's trainer: a checkpoint of each validated step, the best ones kept, and PATIENCE."""

import os
from pathlib import Path

from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils.profiler import marked_timer

from verl_tasks.runs.run import Run, ends_run, prune
from verl_tasks.verl_plugins.expect import expect

expect(
    PPOTrainer.fit,
    "self.on_step_end()",
    "val_metrics: dict = self._validate()",
    "and self.global_steps <= self.total_training_steps:",
)


class KeepBest(PPOTrainer):
    """verl itself keeps the newest checkpoints (max_actor_ckpt_to_keep), and ignores the validations."""

    @property
    def run_dir(self) -> Path:
        return Path(self.config.trainer.default_local_dir).parent

    def on_step_end(self):
        every = self.config.trainer.test_freq
        if every > 0 and self.global_steps % every == 0 and Run.read(self.run_dir).last != self.global_steps:
            with marked_timer("save_checkpoint", self.timing_raw, color="green"):
                self._save_checkpoint()  # here as where verl saves, the engine sleeps
        super().on_step_end()

    def _save_checkpoint(self):
        super()._save_checkpoint()
        prune(self.run_dir, int(os.environ["KEEP"]))

    def _validate(self):
        found = super()._validate()
        if ends_run(self.run_dir, self.global_steps, found, int(os.environ["PATIENCE"])):
            self.total_training_steps = self.global_steps  # verl's loop ends when this step is logged
        return found
