"""ASYNC=colocate: verl's trainer that keeps the engine full (verl/trainer/ppo/v1/trainer_colocate_async.py).

A step adds a batch of prompts to one that is under way, and trains on the first batch that is complete. The update
interrupts the other responses, which go on with the new weights. launch/plan.py has every verl process load it.
"""

import transfer_queue as tq
from verl.trainer.ppo.v1 import PPOTrainerColocateAsync, register_trainer
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from verl_tasks.verl_plugins.expect import expect
from verl_tasks.verl_plugins.staleness import VERSIONS, VersionedClient, figures
from verl_tasks.verl_plugins.trainer import CheckedTrainer

expect(PPOTrainer._reissue_inflight_prompts, 'tag.get("status") in ("pending", "running")')
expect(PPOTrainer._save_checkpoint, "tq.save_checkpoint(")


@register_trainer("task_async")
class AsyncTrainer(CheckedTrainer, PPOTrainerColocateAsync):
    """Metrics beside those of a synchronous training: ``staleness.figures``."""

    MODE = "colocate_async"

    def get_llm_client(self):
        return self.llm_server_manager.get_client(client_cls=VersionedClient)

    def _compute_metrics(self, batch, metrics, timing_raw, global_steps, epoch):
        super()._compute_metrics(batch, metrics, timing_raw, global_steps, epoch)
        rows = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["extra_fields"])
        of = {
            key.rpartition("_")[0]: extra.get(VERSIONS, [])  # sequences of one episode have the same
            for key, extra, tag in zip(batch.keys, rows["extra_fields"], batch.tags, strict=True)
            if not tag.get("is_padding", False)
        }
        metrics.update(figures(of.values(), global_steps - 1))

    def _rewind(self, data):
        """A checkpoint has the prompts that are under way; a resume samples them again, with those that failed."""
        failed = [*self.replay_buffer.failure_keys["train"]]
        if failed:
            tag = {"is_prompt": True, "status": "pending", "global_steps": self.global_steps}
            tq.kv_batch_put(keys=failed, partition_id="train", tags=[tag] * len(failed))
