"""Every patch of verl 0.9.1; VERL_USE_EXTERNAL_MODULES (stacks) loads them in every verl process.

Here are those that need no file of their own: what other files of this room mend, and an entry of verl's registry.
"""

from unittest import mock

from verl.experimental.reward_loop import reward_loop
from verl.workers.config import model as config_model
from verl.workers.engine.fsdp import transformer_impl
from verl.workers.rollout import base as rollout_base

import verl_tasks.verl_plugins.advantages
import verl_tasks.verl_plugins.distilled
import verl_tasks.verl_plugins.head
import verl_tasks.verl_plugins.nested
import verl_tasks.verl_plugins.prompts_once
import verl_tasks.verl_plugins.value_head
import verl_tasks.verl_plugins.waits
import verl_tasks.verl_plugins.zero_advantage  # noqa: F401
from verl_tasks.process import die_with_torchrun
from verl_tasks.training.torchrun import listen_locally
from verl_tasks.verl_plugins.built import seeded, without_attention
from verl_tasks.verl_plugins.expect import expect
from verl_tasks.verl_plugins.weight_sync import changes

die_with_torchrun()
listen_locally()


# ---- verl/workers/rollout/base.py:90: the trainer's end of the weights' socket; the class imports vLLM, SFT needs none

expect(rollout_base.get_rollout_class, "fqdn = _ROLLOUT_REGISTRY[(rollout_name, mode)]")
rollout_base._ROLLOUT_REGISTRY["vllm", "async"] = "verl_tasks.verl_plugins.own_sockets.OwnSocketAdapter"


# ---- verl/workers/config/model.py:220 writes the attention of the training into config.json

expect(
    config_model.HFModelConfig.__post_init__,
    "attn_implementation=attn_implementation,",
    "update_model_config(self.hf_config, override_config_kwargs=override_config_kwargs)",
)
config_model.update_model_config = without_attention(config_model.update_model_config)


# ---- verl/workers/engine/fsdp/transformer_impl.py:592,599 seed nothing without full_determinism ---------------------

expect(
    transformer_impl.FSDPEngine._build_model_optimizer,
    "module = self._build_module()",
    "module = self._build_lora_module(module)",
)
expect(transformer_impl.FSDPEngine.__init__, "enable_full_determinism(seed=self.engine_config.seed)")

transformer_impl.FSDPEngine._build_model_optimizer = seeded(transformer_impl.FSDPEngine._build_model_optimizer)


# ---- verl/workers/engine/fsdp/transformer_impl.py:1036 cuts all experts as Qwen's checkpoints do --------------------

expect(transformer_impl.FSDPEngine.get_per_tensor_param, "unfuse_moe_params(per_tensor_param, self.model_config.hf_con")
_unfuse_moe_params = transformer_impl.unfuse_moe_params


def unfuse_moe_params(weights, model_type=None):
    """verl's, but experts of a family that as_published knows stay whole: it names and cuts them."""
    return weights if changes(model_type) else _unfuse_moe_params(weights, model_type)


transformer_impl.unfuse_moe_params = unfuse_moe_params


# ---- verl/experimental/reward_loop/reward_loop.py:125,129 run a tokenizer's code; test: tests/test_records.py ----

expect(
    reward_loop.RewardLoopWorker._init_reward_fn,
    "hf_tokenizer(input_tokenizer_local_path, trust_remote_code=True)",
    "hf_tokenizer(reward_model_tokenizer_local_path, trust_remote_code=True)",
)
_init_reward_fn, _hf_tokenizer = reward_loop.RewardLoopWorker._init_reward_fn, reward_loop.hf_tokenizer


def init_reward_fn(self) -> None:
    """As verl's, but only the policy's tokenizer may bring code, and only where the policy's config allows it."""
    policy = self.config.actor_rollout_ref
    trusted = policy.model.get("trust_remote_code", False)
    rewarding = self.config.reward.reward_model.model_path

    def tokenizer(path, trust_remote_code):
        return _hf_tokenizer(path, trust_remote_code=trusted and path != rewarding)

    with mock.patch.object(reward_loop, "hf_tokenizer", tokenizer):
        _init_reward_fn(self)


reward_loop.RewardLoopWorker._init_reward_fn = init_reward_fn
