"""DAPO's trainer: verl's filter of groups without signal, with a bound and with counts in the metrics.

verl 0.9.1 drops a group whose samples all have the same reward and samples two other prompts for it, without a limit
(trainer/ppo/v1/replay_buffer.py): a step never ends when no prompt has signal. launch/plan.py has verl load it.

verl takes a standard deviation of 0 for "the same". NumPy's is not 0 where the mean rounds, as of three times 0.1.
"""

from types import SimpleNamespace

import numpy as np
from verl.trainer.ppo.v1 import register_trainer, replay_buffer
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

from verl_tasks.verl_plugins.expect import expect
from verl_tasks.verl_plugins.trainer import TaskTrainer

DROPPED = "training/filter_groups/evicted_samples"  # verl's names; both count prompts
SURPLUS = "training/filter_groups/discarded_surplus_samples"

expect(ReplayBuffer.sample, "refill_credit += 2 * dapo_count + failed_count", "self.refill_fn(dispatch_count)")
expect(ReplayBuffer._dapo_filtered_keys, "self.filter_groups_metric is None", "float(np.std(values)) == 0.0")
expect(ReplayBuffer._evict_terminal_groups, 'metrics[f"{prefix}/filter_groups/evicted_samples"] = len(dapo_uids)')

vars(replay_buffer)["np"] = SimpleNamespace(**vars(np) | {"std": np.ptp})  # its own import, which it alone reads


@register_trainer("dapo")
class DynamicSamplingTrainer(TaskTrainer):
    """Trains on groups with signal, of up to algorithm.filter_groups.max_num_gen_batches batches of prompts a step.

    Past that number it keeps groups without signal too, so that each step has a full batch. Metrics, in prompts:
    dapo/sampled = dapo/dropped (no signal) + dapo/surplus (signal, but not needed) + the batch; dapo/bound_hit: 1 for a
    step that kept groups without signal.
    """

    def _build_replay_buffer(self):
        buffer = super()._build_replay_buffer()
        return bounded(buffer, self.config.algorithm.filter_groups.max_num_gen_batches)


def bounded(buffer: ReplayBuffer, batches: int) -> ReplayBuffer:
    """``buffer`` with its filter off for the rest of a step once ``batches`` batches have been sampled for it.

    verl keeps as many prompts in flight as the batch lacks, so the batch then fills up. With 0 or less the filter
    stays on, as verl's config says, and a step without any signal does not end.
    """
    metric, sample, refill = buffer.filter_groups_metric, buffer.sample, buffer.refill_fn
    sampled = 0

    def counted_refill(prompts: int) -> int:
        nonlocal sampled
        if buffer.filter_groups_metric is None:  # unused quota of earlier steps
            return 0
        sampled += prompts
        if 0 < batches * buffer.train_batch_size <= sampled:
            buffer.filter_groups_metric = None
        return refill(prompts)

    def counted_sample(global_steps: int, partition_id: str, batch_size: int):
        nonlocal sampled
        if partition_id != "train":
            return sample(global_steps=global_steps, partition_id=partition_id, batch_size=batch_size)
        sampled, buffer.filter_groups_metric = batch_size, metric
        batch, metrics = sample(global_steps=global_steps, partition_id=partition_id, batch_size=batch_size)
        metrics |= {
            "dapo/sampled": sampled,
            "dapo/dropped": metrics.get(DROPPED, 0),
            "dapo/surplus": metrics.get(SURPLUS, 0),
            "dapo/bound_hit": int(buffer.filter_groups_metric is None),
        }
        buffer.filter_groups_metric = metric
        return batch, metrics

    buffer.sample, buffer.refill_fn = counted_sample, counted_refill
    return buffer
