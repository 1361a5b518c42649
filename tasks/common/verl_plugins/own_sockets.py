"""The two ends of the socket over which verl 0.9.1's trainer hands new weights to vLLM, for this launch alone.

verl's is /tmp/rl-colocate-zmq-JOB-..., where JOB is 01000000 in every Ray that a training starts itself. Two trainings
at once would take each other's weights, and any user of the machine could send pickles there.
"""

import os

import torch
from verl.workers.rollout.vllm_rollout import ServerAdapter
from verl.workers.rollout.vllm_rollout.utils import VLLM_LORA_INT_ID, vLLMColocateWorkerExtension

from verl_tasks.alive import launch_folder, waits_for
from verl_tasks.verl_plugins import weight_sync
from verl_tasks.verl_plugins.expect import expect

_VERLS = "ipc:///tmp/"

for _function in (ServerAdapter.__init__, vLLMColocateWorkerExtension._get_zmq_handle):
    expect(_function, f'f"{_VERLS}rl-colocate-zmq-{{job_id}}-')


def own(handle: str) -> str:
    """verl's address in the launch's folder, which no other user may enter; as it is on another node of a cluster."""
    return handle.replace(_VERLS, f"ipc://{folder}/") if (folder := launch_folder()) else handle


class OwnSocketAdapter(ServerAdapter):
    """The trainer's end; patches.py lets verl make it."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.zmq_handle = own(self.zmq_handle)
        self._agreement = weight_sync.Agreement()

    async def update_weights(self, weights, global_steps=None, **kwargs):
        """verl's; until an update was seen to arrive, vLLM's weights are compared with what was sent."""
        waits_for(f"the weights of step {global_steps} to reach vLLM", f"weights-{self.replica_rank}")
        text = self.model_config.hf_config.get_text_config()
        if getattr(text, "tie_word_embeddings", False):
            # vLLM's Gemma 2 has no head of its own, and refuses one.
            weights = ((name, weight) for name, weight in weights if not name.endswith("lm_head.weight"))
        weights = weight_sync.as_published(weights, text)
        sent: dict = {}
        if compares := self._agreement.due:
            adapter = kwargs.get("peft_config") or {}
            scaling = adapter.get("lora_alpha", 1) / adapter.get("r", 1)
            dtype = getattr(torch, str(self.config.dtype).removeprefix("torch."), torch.bfloat16)
            weights = weight_sync.passing(weights, dtype, scaling, sent)
        await super().update_weights(weights, global_steps=global_steps, **kwargs)
        if compares and self._has_server:
            await self._execute_method("tell_weights", kwargs={"adapter": any("lora_" in name for name in sent)})
            sums = {name: (count, int(each)) for name, (count, each) in sent.items()}
            if said := self._agreement.check(sums, weight_sync.told(self.replica_rank), global_steps):
                print(said, flush=True)
        waits_for("", f"weights-{self.replica_rank}")


class OwnSocketExtension(vLLMColocateWorkerExtension):
    """vLLM's end, a base of the stacks' worker extensions."""

    def _get_zmq_handle(self) -> str:
        return own(super()._get_zmq_handle())

    def tell_weights(self, adapter: bool) -> None:
        """Write down what this worker samples with: its own weights, or those of the ``adapter``."""
        if adapter:
            registered = self.model_runner.lora_manager._adapter_manager.get_adapter(VLLM_LORA_INT_ID)
            sums = weight_sync.of_adapter(registered.loras if registered else {})
        else:
            sums = weight_sync.of_model(self.model_runner.model)
        weight_sync.write(sums, os.environ.get("VERL_REPLICA_RANK", "0"), self.local_rank)
