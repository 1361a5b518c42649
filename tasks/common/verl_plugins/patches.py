"""Patches of verl 0.9.1 for every stack; VERL_USE_EXTERNAL_MODULES (stacks) loads them in every verl process."""

import importlib.util
from pathlib import Path
from unittest import mock

import torch
import verl.utils.model as verl_model
from transformers import AutoModelForTokenClassification
from transformers.utils import is_flash_attn_2_available
from verl.experimental.reward_loop import reward_loop
from verl.models.transformers import monkey_patch
from verl.trainer.distillation import losses as distillation
from verl.utils.metric import Metric
from verl.workers.config import model as config_model
from verl.workers.engine.fsdp import transformer_impl
from verl.workers.rollout import base as rollout_base

import tasks.common.verl_plugins.head
import tasks.common.verl_plugins.nested
import tasks.common.verl_plugins.waits
import tasks.common.verl_plugins.whitened  # noqa: F401
from tasks.common.machine.local_store import listen_locally
from tasks.common.process import die_with_torchrun
from tasks.common.verl_plugins.expect import expect
from tasks.common.verl_plugins.exported import without_attention
from tasks.common.verl_plugins.on_policy import without_a_token
from tasks.common.verl_plugins.seeded import seeded

die_with_torchrun()
listen_locally()


# ---- verl/workers/rollout/base.py:90: the trainer's end of the weights' socket; the class imports vLLM, SFT needs none

expect(rollout_base.get_rollout_class, "fqdn = _ROLLOUT_REGISTRY[(rollout_name, mode)]")
rollout_base._ROLLOUT_REGISTRY["vllm", "async"] = "tasks.common.verl_plugins.own_sockets.OwnSocketAdapter"


# ---- verl/workers/config/model.py:220 writes the attention of the training into config.json

expect(
    config_model.HFModelConfig.__post_init__,
    "attn_implementation=attn_implementation,",
    "update_model_config(self.hf_config, override_config_kwargs=override_config_kwargs)",
)
config_model.update_model_config = without_attention(config_model.update_model_config)


# ---- verl/models/transformers/monkey_patch.py:352 and utils/model.py:654 take a class from trl that trl 1 has no more

for _function in (monkey_patch.apply_monkey_patch, verl_model.load_valuehead_model):
    expect(_function, "is_trl_available()", "from trl.experimental.ppo import AutoModelForCausalLMWithValueHead")

_trl = importlib.util.find_spec("trl")
if _trl and not Path(_trl.submodule_search_locations[0], "experimental/ppo").exists():
    monkey_patch.is_trl_available = verl_model.is_trl_available = lambda: False


# ---- verl/utils/model.py:649 loads the critic with flash_attention_2, installed or not, whatever its config says ----

expect(verl_model.load_valuehead_model, 'attn_implementation="flash_attention_2"', "AutoModelForTokenClassification")
expect(transformer_impl.FSDPEngine._build_module, "from verl.utils.model import load_valuehead_model")

_load_valuehead_model = verl_model.load_valuehead_model
_from_pretrained = AutoModelForTokenClassification.from_pretrained


def _from_pretrained_without_flash(*args, config, **kwargs):
    asked = config._attn_implementation  # of critic.model.override_config
    attention = "sdpa" if asked == "flash_attention_2" else asked
    return _from_pretrained(*args, config=config, **{**kwargs, "attn_implementation": attention})


def _load_valuehead_model_without_flash(*args, **kwargs):
    with mock.patch.object(AutoModelForTokenClassification, "from_pretrained", _from_pretrained_without_flash):
        return _load_valuehead_model(*args, **kwargs)


if not is_flash_attn_2_available():
    verl_model.load_valuehead_model = _load_valuehead_model_without_flash


# ---- verl/workers/engine/fsdp/transformer_impl.py:592,599 seed nothing without full_determinism ---------------------

expect(
    transformer_impl.FSDPEngine._build_model_optimizer,
    "module = self._build_module()",
    "module = self._build_lora_module(module)",
)
expect(transformer_impl.FSDPEngine.__init__, "enable_full_determinism(seed=self.engine_config.seed)")

transformer_impl.FSDPEngine._build_model_optimizer = seeded(transformer_impl.FSDPEngine._build_model_optimizer)


# ---- verl/experimental/reward_loop/reward_loop.py:125,129 run the code that comes with a tokenizer ------------------

expect(
    reward_loop.RewardLoopWorker._init_reward_fn,
    "hf_tokenizer(input_tokenizer_local_path, trust_remote_code=True)",
    "hf_tokenizer(reward_model_tokenizer_local_path, trust_remote_code=True)",
)
_init_reward_fn = reward_loop.RewardLoopWorker._init_reward_fn
_hf_tokenizer = reward_loop.hf_tokenizer


def _init_reward_fn_without_code(self):
    """As verl's, but only the policy's tokenizer may bring code, and only where the policy's config allows it."""
    policy = self.config.actor_rollout_ref
    trusted = policy.model.get("trust_remote_code", False)
    rewarding = self.config.reward.reward_model.model_path

    def tokenizer(path, trust_remote_code):
        return _hf_tokenizer(path, trust_remote_code=trusted and path != rewarding)

    with mock.patch.object(reward_loop, "hf_tokenizer", tokenizer):
        _init_reward_fn(self)


reward_loop.RewardLoopWorker._init_reward_fn = _init_reward_fn_without_code


# ---- verl/trainer/distillation/losses.py:281 multiplies the loss, which is padded, by nested importance weights -----
# And :118 takes the smallest loss of a micro-batch's tokens, where TRUNCATED=masked may leave none.

expect(
    distillation.distillation_loss,
    'rollout_is_weights = data.get("rollout_is_weights", None)',
    "compute_distillation_loss_range(distillation_losses=distillation_losses, response_mask=response_mask)",
)
expect(distillation.distillation_ppo_loss, "distillation_loss(config, distillation_config, model_output, data)")

_distillation_loss = distillation.distillation_loss


def _distillation_loss_of_any(config, distillation_config, model_output, data):
    """verl's with padded weights. Without a token that counts: 0, and as many metrics, which verl wants of each GPU."""
    without_a_token(data)
    weights, counted = data.get("rollout_is_weights", None), data["response_mask"]
    none = not counted.values().any()
    data = data.copy()  # its other users take nested weights, and this mask
    if weights is not None and weights.is_nested:
        data["rollout_is_weights"] = weights.to_padded_tensor(0.0)
    if none:
        data["response_mask"] = torch.ones_like(counted)
    loss, metrics = _distillation_loss(config, distillation_config, model_output, data)
    if not none:
        return loss, metrics
    zeros = {name: Metric(m.aggregation, 0.0) if isinstance(m, Metric) else 0.0 for name, m in metrics.items()}
    return loss * 0, zeros


distillation.distillation_loss = _distillation_loss_of_any
