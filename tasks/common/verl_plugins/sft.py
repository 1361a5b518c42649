"""verl's SFT trainer (0.9.1 and 0.6.1): the order of the rows follows the seed, a resume skips no epoch, and with 0.9.1
SFT_LOSS ends it.

`python -m verl_tasks.verl_plugins.sft`, for several GPUs with torchrun, takes the overrides of verl's own.
"""

import os

from verl_tasks.process import imports

with imports():
    from verl.trainer import sft_trainer

    from verl_tasks.verl_plugins.expect import expect

    if OF_091 := hasattr(sft_trainer, "TrainingWorker"):
        from verl_tasks.verl_plugins.sft_steps import watch  # here: below, the name SFTTrainer is ours

# verl reads trainer.seed nowhere: its sampler has the seed 0.
expect(sft_trainer.SFTTrainer._build_dataloader, "self.train_sampler = DistributedSampler(")
# A loader restored at an epoch's end is empty, and fit() takes that for the whole next epoch (verl issue 7401).
expect(sft_trainer.SFTTrainer.__init__, "self.resume_global_step = self.ckpt_handler.load_checkpoint()")
expect(sft_trainer.SFTTrainer.fit, "start_epoch = global_step // self.steps_per_epoch")


class SFTTrainer(sft_trainer.SFTTrainer):
    """verl's, with its config's seed, and with a new loader when a resume starts an epoch."""

    def __init__(self, config):
        super().__init__(config)
        if self.resume_global_step and self.resume_global_step % self.steps_per_epoch == 0:
            self._build_dataloader()
            self.ckpt_handler.train_dataloader = self.train_dataloader

    def _build_dataloader(self):
        super()._build_dataloader()
        self.train_sampler.seed = self.config.trainer.seed

    def fit(self):
        if OF_091:
            watch(self, float(os.environ.get("SFT_LOSS") or 0))
        super().fit()


if __name__ == "__main__":
    sft_trainer.SFTTrainer = SFTTrainer
    sft_trainer.main()
