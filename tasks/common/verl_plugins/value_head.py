"""How verl 0.9.1 loads a critic (utils/model.py, load_valuehead_model). Test: tests/test_reward_model.py trains one.

It asks for flash_attention_2 (:649), installed or not, whatever the config says. And it takes a class from trl (:654,
as models/transformers/monkey_patch.py:352 does) that trl 1 has no more.
"""

import importlib.util
from pathlib import Path
from unittest import mock

import verl.utils.model as verl_model
from transformers import AutoModelForTokenClassification
from transformers.utils import is_flash_attn_2_available
from verl.models.transformers import monkey_patch
from verl.workers.engine.fsdp import transformer_impl

from verl_tasks.verl_plugins.expect import expect

for _function in (monkey_patch.apply_monkey_patch, verl_model.load_valuehead_model):
    expect(_function, "is_trl_available()", "from trl.experimental.ppo import AutoModelForCausalLMWithValueHead")
expect(verl_model.load_valuehead_model, 'attn_implementation="flash_attention_2"', "AutoModelForTokenClassification")
expect(transformer_impl.FSDPEngine._build_module, "from verl.utils.model import load_valuehead_model")

_trl = importlib.util.find_spec("trl")
if _trl and not Path(_trl.submodule_search_locations[0], "experimental/ppo").exists():
    monkey_patch.is_trl_available = verl_model.is_trl_available = lambda: False

_load_valuehead_model = verl_model.load_valuehead_model
_from_pretrained = AutoModelForTokenClassification.from_pretrained


def _from_pretrained_without_flash(*args, config, **kwargs):
    asked = config._attn_implementation  # of critic.model.override_config
    attention = "sdpa" if asked == "flash_attention_2" else asked
    return _from_pretrained(*args, config=config, **{**kwargs, "attn_implementation": attention})


def load_valuehead_model(*args, **kwargs):
    """verl's, with the attention of the config; sdpa where that is flash_attention_2."""
    with mock.patch.object(AutoModelForTokenClassification, "from_pretrained", _from_pretrained_without_flash):
        return _load_valuehead_model(*args, **kwargs)


if not is_flash_attn_2_available():
    verl_model.load_valuehead_model = load_valuehead_model
