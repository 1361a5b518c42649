"""Patches of verl 0.6.1; VERL_USE_EXTERNAL_MODULES (stacks/a100) loads them in every verl process."""

import importlib.util
import json
from pathlib import Path

import torch
import verl.utils.model as verl_model
import wrapt
from verl.experimental.agent_loop import agent_loop
from verl.experimental.reward import reward_manager
from verl.models.transformers import monkey_patch
from verl.trainer.ppo import core_algos, ray_trainer
from verl.utils import tracking
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager
from verl.workers import fsdp_workers
from verl.workers.actor import dp_actor
from verl.workers.config import model as config_model
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

import tasks.common.stacks.a100.keep_best
import tasks.common.stacks.a100.mini_batches
import tasks.common.stacks.a100.on_policy
import tasks.common.verl_plugins.whitened  # noqa: F401
from tasks.common.machine.local_store import listen_locally
from tasks.common.process import die_with_torchrun
from tasks.common.verl_plugins.expect import expect
from tasks.common.verl_plugins.exported import without_attention
from tasks.common.verl_plugins.seeded import seeded

die_with_torchrun()
listen_locally()

# ---- verl/models/transformers/monkey_patch.py:282 and utils/model.py:639 take a class from trl that trl has no more --

for _function in (monkey_patch.apply_monkey_patch, verl_model.load_valuehead_model):
    expect(_function, "is_trl_available()", "from trl import AutoModelForCausalLMWithValueHead")

_trl = importlib.util.find_spec("trl")
if _trl and "AutoModelForCausalLMWithValueHead" not in Path(_trl.origin).read_text():
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


# ---- verl/trainer/ppo/ray_trainer.py:428: a disk that is full for samples, which people only look at, ends a training

expect(ray_trainer.RayPPOTrainer._dump_generations, 'f.write("\\n".join(lines) + "\\n")')
_dump_generations = ray_trainer.RayPPOTrainer._dump_generations


def _dump_generations_or_say_why_not(self, *args, **kwargs):
    try:
        _dump_generations(self, *args, **kwargs)
    except (OSError, ValueError) as error:
        print(f"the samples of step {self.global_steps} were not written: {error}", flush=True)


ray_trainer.RayPPOTrainer._dump_generations = _dump_generations_or_say_why_not


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


# ---- verl/trainer/ppo/core_algos.py:1424 looks for the value of `low_var_kl+` under that name, which has none --------

expect(core_algos.kl_penalty, "forward_score = kl_penalty_forward(logprob, ref_logprob, kl_penalty)")
expect(
    core_algos.kl_penalty, 'if not kl_penalty.endswith("+")', "backward_score = 0.5 * (logprob - ref_logprob).square()"
)
_kl_penalty_forward = core_algos.kl_penalty_forward


def _kl_penalty_forward_without_plus(logprob, ref_logprob, kl_penalty):
    return _kl_penalty_forward(logprob, ref_logprob, kl_penalty.removesuffix("+"))


core_algos.kl_penalty_forward = _kl_penalty_forward_without_plus


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


# ---- verl/workers/fsdp_workers.py:439,1282, engine/fsdp/transformer_impl.py:418: what is drawn follows no seed -------

_builders = {
    (fsdp_workers.ActorRolloutRefWorker, "_build_model_optimizer"): "get_peft_model(actor_module, ",
    (fsdp_workers.CriticWorker, "_build_critic_model_optimizer"): "critic_module = load_valuehead_model(",
    (FSDPEngine, "_build_model_optimizer"): "module = self._build_lora_module(module)",
}
for (_class, _name), _line in _builders.items():
    expect(getattr(_class, _name), _line)
    setattr(_class, _name, seeded(getattr(_class, _name)))
# ---- verl/trainer/ppo/core_algos.py:777: seq-mean-token-sum-norm (METHOD=dr_grpo) is a sum over a micro-batch --------
# The actor weighs a micro-batch by its share of the mini-batch: a response would weigh more among more of them.

expect(core_algos.agg_loss, "loss = torch.sum(seq_losses) / loss_mask.shape[-1]  # The divisor")
expect(dp_actor.DataParallelPPOActor, "loss_scale_factor = response_mask.shape[0] / self.config.ppo_mini_batch_size")
_agg_loss = core_algos.agg_loss


def _agg_loss_mean(loss_mat: torch.Tensor, loss_mask: torch.Tensor, loss_agg_mode: str) -> torch.Tensor:
    """verl's, but the mean over sequences in seq-mean-token-sum-norm; a row is padded to MAX_RESPONSE_LENGTH."""
    if loss_agg_mode != "seq-mean-token-sum-norm":
        return _agg_loss(loss_mat, loss_mask, loss_agg_mode)
    return (loss_mat * loss_mask).sum(-1).mean() / loss_mask.shape[-1]


core_algos.agg_loss = dp_actor.agg_loss = _agg_loss_mean


# ---- verl/trainer/ppo/ray_trainer.py:1124: the metric actor/entropy follows the loss's normaliser --------------------

expect(ray_trainer.RayPPOTrainer.fit, "entropy_agg = agg_loss(")


def _entropy_of_a_token(loss_mat: torch.Tensor, loss_mask: torch.Tensor, loss_agg_mode: str) -> torch.Tensor:
    """The mean over tokens, whatever the loss's mode."""
    return _agg_loss(loss_mat, loss_mask, "token-mean")


ray_trainer.agg_loss = _entropy_of_a_token


# ---- verl/workers/rollout/vllm_rollout/vllm_async_server.py:385 samples until prompt and response fill the window ----
# What is beyond MAX_RESPONSE_LENGTH is dropped: of 256 + 256 tokens up to 450 were sampled, one round of all for each.


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
