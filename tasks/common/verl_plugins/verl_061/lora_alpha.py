"""A checkpoint of an adapter says its lora_alpha: verl 0.6.1's merger writes 0 (model_merger/base_model_merger.py:268).

verl 0.9.1's fsdp_checkpoint_manager.py writes this file, which tasks/common/models/merge.py reads.
tests/test_a100_stack.py loads it.
"""

import json
from pathlib import Path

import torch
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

from verl_tasks.verl_plugins.expect import expect

expect(FSDPCheckpointManager.save_checkpoint, "hf_local_path")
_save_checkpoint = FSDPCheckpointManager.save_checkpoint


def save_checkpoint(self, local_path, *args, **kwargs) -> None:
    """verl's, and lora_train_meta.json."""
    _save_checkpoint(self, local_path, *args, **kwargs)
    module = getattr(self.model, "_fsdp_wrapped_module", self.model)
    if self.rank == 0 and local_path and (adapters := getattr(module, "peft_config", None)):
        adapter = adapters["default"]
        values = {"r": adapter.r, "lora_alpha": adapter.lora_alpha, "task_type": "CAUSAL_LM"}
        Path(local_path, "lora_train_meta.json").write_text(json.dumps(values))
    torch.distributed.barrier()


FSDPCheckpointManager.save_checkpoint = save_checkpoint
