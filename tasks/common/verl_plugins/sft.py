"""verl's SFT trainer (0.9.1 and 0.6.1): the order of the rows follows the seed, a resume skips no epoch, and SFT_LOSS
ends it.

`python -m tasks.common.verl_plugins.sft`, for several GPUs with torchrun, takes the overrides of verl's own.
"""

import os

from tasks.common.process import imports
from tasks.common.runs.validation import learned

with imports():
    import torch
    from verl.trainer import sft_trainer
    from verl.utils import tensordict_utils as tu

    from tasks.common.verl_plugins.expect import expect

# verl reads trainer.seed nowhere: its sampler has the seed 0.
expect(sft_trainer.SFTTrainer._build_dataloader, "self.train_sampler = DistributedSampler(")
# A loader restored at an epoch's end is empty, and fit() takes that for the whole next epoch (verl issue 7401).
expect(sft_trainer.SFTTrainer.__init__, "self.resume_global_step = self.ckpt_handler.load_checkpoint()")
expect(sft_trainer.SFTTrainer.fit, "start_epoch = global_step // self.steps_per_epoch")


class SFTTrainer(sft_trainer.SFTTrainer):
    """verl's, with its config's seed, with a new loader when a resume starts an epoch, and with an end by SFT_LOSS."""

    def __init__(self, config):
        super().__init__(config)
        if self.resume_global_step and self.resume_global_step % self.steps_per_epoch == 0:
            self._build_dataloader()
            self.ckpt_handler.train_dataloader = self.train_dataloader

    def _build_dataloader(self):
        super()._build_dataloader()
        self.train_sampler.seed = self.config.trainer.seed

    def fit(self):
        if below := float(os.environ.get("SFT_LOSS") or 0):
            self._end_below(below)
        super().fit()

    def _end_below(self, below: float) -> None:
        # Of verl 0.9.1, whose step that is under way is the last one where it reaches this number.
        expect(
            sft_trainer.SFTTrainer.fit,
            "output = self.training_client.train_batch(data=data)",
            "is_last_step = global_step >= self.total_training_steps",
        )
        train, losses = self.training_client.train_batch, []

        def train_batch(data):
            output = train(data=data)
            loss = torch.tensor(float(tu.get(output, "metrics")["loss"]), device=self.device_name)
            if torch.distributed.get_world_size() > 1:
                torch.distributed.all_reduce(loss, op=torch.distributed.ReduceOp.AVG)
            losses.append(loss.item())
            if learned(losses, below):
                self.total_training_steps = self.resume_global_step + len(losses)
            return output

        self.training_client.train_batch = train_batch


if __name__ == "__main__":
    sft_trainer.SFTTrainer = SFTTrainer
    sft_trainer.main()
