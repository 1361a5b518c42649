"""Every patch of verl 0.6.1; VERL_USE_EXTERNAL_MODULES (stacks/a100) loads them in every verl process.

Here are those that need no file of their own: what other files of this room mend for both versions.
"""

import importlib.util
from pathlib import Path

import verl.utils.model as verl_model
from verl.models.transformers import monkey_patch
from verl.workers import fsdp_workers
from verl.workers.config import model as config_model
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

import verl_tasks.verl_plugins.equal_rewards
import verl_tasks.verl_plugins.verl_061.files
import verl_tasks.verl_plugins.verl_061.keep_best
import verl_tasks.verl_plugins.verl_061.lora_alpha
import verl_tasks.verl_plugins.verl_061.losses
import verl_tasks.verl_plugins.verl_061.on_policy
import verl_tasks.verl_plugins.verl_061.order
import verl_tasks.verl_plugins.verl_061.own_code
import verl_tasks.verl_plugins.verl_061.response_length
import verl_tasks.verl_plugins.whitened  # noqa: F401
from verl_tasks.machine.local_store import listen_locally
from verl_tasks.process import die_with_torchrun
from verl_tasks.verl_plugins.expect import expect
from verl_tasks.verl_plugins.exported import without_attention
from verl_tasks.verl_plugins.seeded import seeded

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


# ---- verl/workers/fsdp_workers.py:439,1282, engine/fsdp/transformer_impl.py:418: what is drawn follows no seed -------

_builders = {
    (fsdp_workers.ActorRolloutRefWorker, "_build_model_optimizer"): "get_peft_model(actor_module, ",
    (fsdp_workers.CriticWorker, "_build_critic_model_optimizer"): "critic_module = load_valuehead_model(",
    (FSDPEngine, "_build_model_optimizer"): "module = self._build_lora_module(module)",
}
for (_class, _name), _line in _builders.items():
    expect(getattr(_class, _name), _line)
    setattr(_class, _name, seeded(getattr(_class, _name)))
