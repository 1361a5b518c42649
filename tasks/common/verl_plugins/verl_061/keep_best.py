"""As CheckedTrainer (verl_plugins/trainer.py), for verl 0.6.1: a checkpoint per validation, the best kept, PATIENCE.

patches.py loads this in every verl process.
"""

import contextlib
import functools
import os
from pathlib import Path

from verl.trainer.ppo.ray_trainer import RayPPOTrainer

from verl_tasks.runs.run import Followed, ends_run, prune
from verl_tasks.verl_plugins.expect import expect

expect(
    RayPPOTrainer.fit,
    "val_metrics: dict = self._validate()",
    "is_last_step or self.global_steps % self.config.trainer.save_freq == 0 or",
    "logger.log(data=metrics, step=self.global_steps)",
    "self.train_dataset.on_batch_end(batch=batch)",  # the end of a step, after its metrics are logged
)

_save_checkpoint, _validate, _fit = RayPPOTrainer._save_checkpoint, RayPPOTrainer._validate, RayPPOTrainer.fit


class _Ended(Exception):
    """PATIENCE is over; the step is saved and logged."""


def _run_dir(trainer) -> Path:
    return Path(trainer.config.trainer.default_local_dir).parent


@functools.wraps(_save_checkpoint)
def save_checkpoint(self) -> None:
    """verl's; then only the best ones and the last stay. verl itself keeps the newest."""
    _save_checkpoint(self)
    prune(_run_dir(self), int(os.environ["KEEP"]), self._followed.scores())


@functools.wraps(_validate)
def validate(self) -> dict:
    """verl's; it also saves the step if verl does not."""
    found, step = _validate(self), self.global_steps
    if step % self.config.trainer.save_freq and step < self.total_training_steps:
        self._save_checkpoint()
    patience, scores = int(os.environ["PATIENCE"]), self._followed.scores()
    self._ended = ends_run(_run_dir(self), step, found, patience, scores)
    return found


@functools.wraps(_fit)
def fit(self) -> None:
    """verl's; it ends after a step whose validation ended the run."""
    self._ended, self._followed = False, Followed(_run_dir(self))

    def on_batch_end(batch):
        if self._ended:
            raise _Ended

    self.train_dataset.on_batch_end = on_batch_end
    with contextlib.suppress(_Ended):
        _fit(self)


RayPPOTrainer._save_checkpoint, RayPPOTrainer._validate, RayPPOTrainer.fit = save_checkpoint, validate, fit
