"""ASYNC=colocate: verl's trainer that keeps the engine full (verl/trainer/ppo/v1/trainer_colocate_async.py).

A step adds a batch of prompts to one that is under way, and trains on the first batch that is complete. The update
interrupts the other responses, which go on with the new weights. launch/plan.py has every verl process load it.
"""

from pathlib import Path

import transfer_queue as tq
from verl.trainer.ppo.v1 import PPOTrainerColocateAsync, register_trainer
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

import verl_tasks.verl_plugins.admitted  # noqa: F401
from verl_tasks.verl_plugins.expect import expect
from verl_tasks.verl_plugins.staleness import VersionedClient, figures, in_time
from verl_tasks.verl_plugins.trainer import CheckedTrainer

expect(PPOTrainer._reissue_inflight_prompts, 'tag.get("status") in ("pending", "running")')
expect(PPOTrainer.fit, "tq.kv_clear(keys=batch.keys, partition_id=batch.partition_id)")
expect(PPOTrainer._load_checkpoint, "self._restored_tq_prompt_count = ")
expect(PPOTrainer.prepare_step, "self._add_batch_to_generate()")
expect(PPOTrainer._save_checkpoint, 'if self.trainer_mode != "sync":', '(local_global_step_folder, "transfer_queue")')
expect(ReplayBufferAsync.wait_for_sampleable, "self._has_enough_samples(global_steps, partition_id, target_count, s")
expect(ReplayBuffer._select_prompt_uids, "prompt_global_steps_snapshot.get(key, 0)", "ordered_keys[:batch_size]")


class OlderSamples(CheckedTrainer):
    """No sample older than STALENESS steps, and metrics beside those of a synchronous training: ``staleness.figures``.

    verl waits for prompts under way that are that old. Where a step cannot train them all, some would become older."""

    def _answers(self, samples):
        found = super()._answers(samples)
        return found | figures((each.versions for each in samples), self.global_steps - 1)

    def _build_replay_buffer(self):
        buffer = super()._build_replay_buffer()
        enough = buffer._has_enough_samples

        def enough_in_time(step, partition, size, complete):
            if not enough(step, partition, size, complete):
                return False
            under_way = buffer.pending_keys[partition] | buffer.running_keys[partition]
            if partition == "val" or buffer.max_off_policy_threshold is None or not under_way:
                return True

            def room(key):
                """In the draws that follow, up to the last one that may have ``key``."""
                steps = buffer.prompt_global_steps[partition][key] + buffer.max_off_policy_threshold - step
                return size * (steps * self.parameter_sync_step - self.local_trigger_step - 1)

            return in_time(map(room, complete), map(room, under_way), size)

        buffer._has_enough_samples = enough_in_time
        return buffer

    def _reissue_inflight_prompts(self, partition_id="train"):
        """A checkpoint has the prompts that are under way; a resume samples them again, with those that failed. It also
        has the responses of its own step, which verl clears later: they are trained."""
        tags = (tq.kv_list(partition_id) or {}).get(partition_id, {})
        prompts = {key: tag["status"] for key, tag in tags.items() if tag.get("is_prompt")}
        if trained := [key for key in tags if key.split("_")[0] not in prompts]:
            tq.kv_clear(keys=trained, partition_id=partition_id)
        failed = [key for key, status in prompts.items() if status == "failure"]
        if failed:
            tq.kv_batch_put(keys=failed, partition_id=partition_id, tags=[{"status": "pending"} for _ in failed])
        return super()._reissue_inflight_prompts(partition_id)

    def _add_batch_to_generate(self):
        """verl's, unless the checkpoint is that of a failed step, and so has the step's prompts already."""
        restored, self._restored_tq_prompt_count = self._restored_tq_prompt_count, 0
        ahead = self.config.trainer.v1[self.MODE].num_warmup_batches
        if restored < (ahead + 1) * self.config.data.train_batch_size:
            super()._add_batch_to_generate()

    def _save_checkpoint(self):
        """verl's, with the prompts under way first: a kill, or a full disk, would leave all but them."""
        folder = Path(self.config.trainer.default_local_dir, f"global_step_{self.global_steps}")
        tq.save_checkpoint(folder / "transfer_queue", metadata={"global_steps": self.global_steps})
        self.MODE = "sync"  # verl's way of leaving them out
        try:
            super()._save_checkpoint()
        finally:
            del self.MODE

    def _rewind(self, data):
        """Nothing was drawn that the checkpoint has not."""


@register_trainer("task_async")
class AsyncTrainer(OlderSamples, PPOTrainerColocateAsync):
    """verl's asynchronous trainer on the GPUs that sample."""

    MODE = "colocate_async"

    def get_llm_client(self):
        return self.llm_server_manager.get_client(client_cls=VersionedClient)
