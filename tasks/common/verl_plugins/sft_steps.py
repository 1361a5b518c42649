"""After a step of the warm-up, with verl 0.9.1: its end by SFT_LOSS, and checkpoints by the clock.

A step takes a second where a checkpoint of 1.5B takes half a minute, so SAVE_FREQ counts no steps here.
"""

import torch
from verl.trainer import sft_trainer
from verl.utils import tensordict_utils

from verl_tasks.runs.checkpoint import FirstSave
from verl_tasks.runs.validation import WHOLE, learned
from verl_tasks.verl_plugins.expect import expect

# The step that is under way is the last one where it reaches this number, and is saved where save_freq divides it.
expect(
    sft_trainer.SFTTrainer.fit,
    "output = self.training_client.train_batch(data=data)",
    "is_last_step = global_step >= self.total_training_steps",
    "is_save_step = global_step % self.save_freq == 0",
)


def watch(trainer: sft_trainer.SFTTrainer, below: float) -> None:
    """Let ``trainer`` end after the step by which the loss of a whole demonstration is ``learned``, and save as
    ``FirstSave`` says, again and again."""
    train, every, next_save, losses = trainer.training_client.train_batch, trainer.save_freq, FirstSave(), []

    def train_batch(data):
        nonlocal next_save
        next_save.begin()
        output = train(data=data)
        metrics = tensordict_utils.get(output, "metrics")
        metrics[WHOLE] = _mean(trainer, whole(float(metrics["loss"]), data["loss_mask"]))
        losses.append(metrics[WHOLE])
        if below and learned(losses, below):
            trainer.total_training_steps = trainer.resume_global_step + len(losses)
        due = _mean(trainer, float(next_save.due())) > 0  # each process has its own clock
        trainer.save_freq = 1 if due else every
        if due:
            next_save = FirstSave()
        return output

    trainer.training_client.train_batch = train_batch


def whole(loss: float, mask: torch.Tensor) -> float:
    """Nats of a whole demonstration, from the mean ``loss`` of its tokens; ``mask``: nested, 1 on a token that is
    learned."""
    return loss * mask.values().sum().item() / mask.size(0)


def _mean(trainer: sft_trainer.SFTTrainer, value: float) -> float:
    """Of all processes."""
    shared = torch.tensor(value, device=trainer.device_name)
    if torch.distributed.get_world_size() > 1:
        torch.distributed.all_reduce(shared, op=torch.distributed.ReduceOp.AVG)
    return shared.item()
