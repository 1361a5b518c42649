"""How verl 0.9.1 loads a critic (utils/model.py, load_valuehead_model). Test: tests/test_reward_model.py trains one.

It asks for flash_attention_2 (:649), installed or not, whatever the config says. And it takes a class from trl, as
models/transformers/monkey_patch.py:352 does, that trl 1 has no more.
"""

import verl.utils.model as verl_model
from transformers import AutoModelForTokenClassification
from verl.models.transformers import monkey_patch
from verl.workers.engine.fsdp import transformer_impl

from verl_tasks.verl_plugins.expect import expect

for _function in (monkey_patch.apply_monkey_patch, verl_model.load_valuehead_model):
    expect(_function, "is_trl_available()", "from trl.experimental.ppo import AutoModelForCausalLMWithValueHead")
expect(verl_model.load_valuehead_model, 'attn_implementation="flash_attention_2"', "AutoModelForTokenClassification")
expect(transformer_impl.FSDPEngine._build_module, "from verl.utils.model import load_valuehead_model")


def load_valuehead_model(local_path, torch_dtype, model_config, trust_remote_code):
    """As verl's, with the attention of the config."""
    how = {"dtype": torch_dtype, "config": model_config}
    return AutoModelForTokenClassification.from_pretrained(local_path, **how, trust_remote_code=trust_remote_code)


monkey_patch.is_trl_available = lambda: False
verl_model.load_valuehead_model = load_valuehead_model
