"""What needs changing in verl 0.6.1. Loaded in every verl process by VERL_USE_EXTERNAL_MODULES (stacks/a100)."""

import importlib.util
import json
from pathlib import Path

import torch
import verl.utils.model as verl_model
from verl.experimental.agent_loop import agent_loop
from verl.experimental.reward import reward_manager
from verl.models.transformers import monkey_patch
from verl.utils import tracking
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

import tasks.common.stacks.a100.on_policy  # noqa: F401
from tasks.common.process import die_with_torchrun
from tasks.common.verl_plugins.expect import expect

die_with_torchrun()

# ---- verl/models/transformers/monkey_patch.py:282 and utils/model.py:639 take a class from trl that trl has no more --

for _function in (monkey_patch.apply_monkey_patch, verl_model.load_valuehead_model):
    expect(_function, "is_trl_available()", "from trl import AutoModelForCausalLMWithValueHead")

_trl = importlib.util.find_spec("trl")
if _trl and "AutoModelForCausalLMWithValueHead" not in Path(_trl.origin).read_text():
    monkey_patch.is_trl_available = verl_model.is_trl_available = lambda: False


# ---- verl/utils/tracking.py:243 keeps lines back until there are 8 kB, and fails on tensors, which are among RL's ----

expect(tracking.FileLogger.__init__, 'self.fp = open(self.filepath, "w")')
expect(tracking.FileLogger.log, 'self.fp.write(json.dumps(data) + "\\n")')


class _FileLogger(tracking.FileLogger):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.fp.reconfigure(line_buffering=True)

    def log(self, data, step):
        self.fp.write(json.dumps({"step": step, "data": data}, default=lambda value: value.item()) + "\n")


tracking.FileLogger = _FileLogger


# ---- verl/experimental/agent_loop/agent_loop.py:281,282 and reward/reward_manager.py:40 run a tokenizer's own code ---

expect(
    agent_loop.AgentLoopWorkerBase.__init__,
    "hf_tokenizer(local_path, trust_remote_code=True)",
    "hf_processor(local_path, trust_remote_code=True)",
)
expect(
    reward_manager.RewardManagerWorker.__ray_metadata__.modified_class._init_reward_fn,
    "hf_tokenizer(input_tokenizer_local_path, trust_remote_code=True)",
)


def _without_code(load):
    return lambda path, **kwargs: load(path, **{**kwargs, "trust_remote_code": False})


agent_loop.hf_tokenizer = reward_manager.hf_tokenizer = _without_code(agent_loop.hf_tokenizer)
agent_loop.hf_processor = _without_code(agent_loop.hf_processor)


# ---- verl/model_merger/base_model_merger.py:268 writes lora_alpha 0: nothing in a checkpoint says it -----------------
# 0.9.1's fsdp_checkpoint_manager.py writes this file, from which tasks/common/models/merge.py takes it.

expect(FSDPCheckpointManager.save_checkpoint, "hf_local_path")
_save_checkpoint = FSDPCheckpointManager.save_checkpoint


def _save_checkpoint_with_alpha(self, local_path, *args, **kwargs):
    _save_checkpoint(self, local_path, *args, **kwargs)
    module = getattr(self.model, "_fsdp_wrapped_module", self.model)
    if self.rank == 0 and local_path and (adapters := getattr(module, "peft_config", None)):
        adapter = adapters["default"]
        values = {"r": adapter.r, "lora_alpha": adapter.lora_alpha, "task_type": "CAUSAL_LM"}
        Path(local_path, "lora_train_meta.json").write_text(json.dumps(values))
    torch.distributed.barrier()


FSDPCheckpointManager.save_checkpoint = _save_checkpoint_with_alpha
