"""Every patch of verl 0.6.1; VERL_USE_EXTERNAL_MODULES (stacks/a100) loads them in every verl process.

Here are those that need no file of their own: short ones, and what other files of this room mend for both versions.
tests/test_a100_stack.py loads all, and runs most.
"""

import json
from pathlib import Path

import torch
import verl.utils.model as verl_model
import wrapt
from verl.experimental.agent_loop import agent_loop
from verl.experimental.reward import reward_manager
from verl.models.transformers import monkey_patch
from verl.trainer.ppo import ray_trainer
from verl.utils import tracking
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager
from verl.workers import fsdp_workers
from verl.workers.config import model as config_model
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

import verl_tasks.verl_plugins.advantages
import verl_tasks.verl_plugins.verl_061.keep_best
import verl_tasks.verl_plugins.verl_061.losses
import verl_tasks.verl_plugins.verl_061.on_policy
import verl_tasks.verl_plugins.verl_061.order  # noqa: F401
from verl_tasks.process import die_with_torchrun
from verl_tasks.training.torchrun import listen_locally
from verl_tasks.verl_plugins.built import seeded, without_attention
from verl_tasks.verl_plugins.expect import expect

die_with_torchrun()
listen_locally()

# ---- verl/models/transformers/monkey_patch.py:282 and utils/model.py:639 take a class from trl that trl has no more --

for _function in (monkey_patch.apply_monkey_patch, verl_model.load_valuehead_model):
    expect(_function, "is_trl_available()", "from trl import AutoModelForCausalLMWithValueHead")

monkey_patch.is_trl_available = verl_model.is_trl_available = lambda: False


# ---- verl/workers/fsdp_workers.py:340 and config/model.py:142 write the attention of the training into config.json ---

_updates = "update_model_config(self.hf_config, override_config_kwargs=override_config_kwargs)"
expect(config_model.HFModelConfig.__post_init__, "attn_implementation=attn_implementation", _updates)
expect(
    fsdp_workers.ActorRolloutRefWorker._build_model_optimizer,
    "from verl.utils.model import get_generation_config, print_model_size, update_model_config",
    "attn_implementation=attn_implementation",
)
verl_model.update_model_config = without_attention(verl_model.update_model_config)
config_model.update_model_config = verl_model.update_model_config


# ---- verl/workers/fsdp_workers.py:439,1282, engine/fsdp/transformer_impl.py:418: what is drawn follows no seed -------

_builders = {
    (fsdp_workers.ActorRolloutRefWorker, "_build_model_optimizer"): "get_peft_model(actor_module, ",
    (fsdp_workers.CriticWorker, "_build_critic_model_optimizer"): "critic_module = load_valuehead_model(",
    (FSDPEngine, "_build_model_optimizer"): "module = self._build_lora_module(module)",
}
for (_class, _name), _line in _builders.items():
    expect(getattr(_class, _name), _line)
    setattr(_class, _name, seeded(getattr(_class, _name)))


# ---- verl/model_merger/base_model_merger.py:268 writes lora_alpha 0 --------------------------------------------------
# verl 0.9.1's checkpoints of an adapter have this file, which tasks/common/models/merge.py reads.

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


# ---- verl/experimental: agent_loop/agent_loop.py:281,282, reward/reward_manager.py:40 run the code of a tokenizer ----
# Whatever the config says.

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


# ---- verl/workers/rollout/vllm_rollout/vllm_async_server.py:385 drops what is too long only afterwards ---------------
# Of 256 + 256 tokens up to 450 were sampled, and all rollouts of a step wait for one another.


@wrapt.when_imported("verl.workers.rollout.vllm_rollout.vllm_async_server")
def end_at_response_length(server) -> None:
    """Let ``sampling_params["response_length"]``, in tokens, end a response (verl_plugins/dataset.py sends it)."""
    expect(
        server.vLLMHttpServerBase.generate,
        "max_tokens = self.config.max_model_len - len(prompt_ids)",
        "SamplingParams(max_tokens=max_tokens, **sampling_params)",
    )
    verls_own = server.SamplingParams

    def sampling_params(*, max_tokens: int, response_length: int | None = None, **others):
        return verls_own(max_tokens=min(max_tokens, response_length or max_tokens), **others)

    server.SamplingParams = sampling_params


# ---- verl/utils/tracking.py:243, trainer/ppo/ray_trainer.py:428: what is written for people must end no training -----
# The file of metrics keeps lines back until there are 8 kB, and fails on tensors, which are among RL's. A disk that is
# full for the samples ends the training.

expect(tracking.FileLogger.__init__, 'self.fp = open(self.filepath, "w")')
expect(tracking.FileLogger.log, 'self.fp.write(json.dumps(data) + "\\n")')
expect(ray_trainer.RayPPOTrainer._dump_generations, 'f.write("\\n".join(lines) + "\\n")')


class FileLogger(tracking.FileLogger):
    """verl's, a line at a time."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.fp.reconfigure(line_buffering=True)

    def log(self, data, step):
        self.fp.write(json.dumps({"step": step, "data": data}, default=lambda value: value.item()) + "\n")


_dump_generations = ray_trainer.RayPPOTrainer._dump_generations


def dump_generations(self, *args, **kwargs) -> None:
    """verl's; an error is a line in the log."""
    try:
        _dump_generations(self, *args, **kwargs)
    except (OSError, ValueError) as error:
        print(f"the samples of step {self.global_steps} were not written: {error}", flush=True)


tracking.FileLogger = FileLogger
ray_trainer.RayPPOTrainer._dump_generations = dump_generations
