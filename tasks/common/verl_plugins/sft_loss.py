"""SFT_LOSS: the warm-up ends once its demonstrations are learned, with verl 0.9.1."""

import torch
from verl.trainer import sft_trainer
from verl.utils import tensordict_utils

from tasks.common.runs.validation import learned
from tasks.common.verl_plugins.expect import expect

# The step that is under way is the last one where it reaches this number.
expect(
    sft_trainer.SFTTrainer.fit,
    "output = self.training_client.train_batch(data=data)",
    "is_last_step = global_step >= self.total_training_steps",
)


def end_below(trainer: sft_trainer.SFTTrainer, below: float) -> None:
    """Let ``trainer`` end after the step by which the loss is ``learned``: below ``below``."""
    train, losses = trainer.training_client.train_batch, []

    def train_batch(data):
        output = train(data=data)
        metrics = tensordict_utils.get(output, "metrics")
        loss = torch.tensor(float(metrics["loss"]), device=trainer.device_name)
        if torch.distributed.get_world_size() > 1:
            torch.distributed.all_reduce(loss, op=torch.distributed.ReduceOp.AVG)
        losses.append(loss.item())
        if learned(losses, below):
            trainer.total_training_steps = trainer.resume_global_step + len(losses)
        return output

    trainer.training_client.train_batch = train_batch
