"""training/parity.py: the pass that a model trains by is one that computes the plain model's numbers."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tests.helpers import ROOT
from verl_tasks.launch import doctor
from verl_tasks.machine import memory
from verl_tasks.models.small import small
from verl_tasks.settings import load_settings
from verl_tasks.stacks import current
from verl_tasks.training import parity, verl_config

MODEL = "actor_rollout_ref.model"
ONCE = "packed, prompts once, fused head"


@pytest.fixture
def settings(tmp_path, monkeypatch):
    """Settings of `current` for a config with these values, whose results are kept in the test's folder."""
    monkeypatch.setenv("ARTIFACTS", str(tmp_path / "artifacts"))

    def of(**values):
        method = values.pop("METHOD", "grpo")
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"} | values))
        given = {"STACK": "current", "TASK": "gsm8k", "STAGE": "train", "N_GPUS": "1", "MODEL": str(tmp_path)}
        return load_settings(given | {"METHOD": method})

    return of


def write(s, **found) -> None:
    file = parity._file(s, parity._config(s))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(found))


def result(agrees: bool, **more) -> dict:
    return {"nats": 1e-6, "gradient": 1e-6} | more | {"agrees": agrees}


@pytest.mark.medium
def test_each_family_takes_the_first_pass_that_is_right(tmp_path):
    """Real comparisons: a head of its own, scaled logits, recurrent layers, soft caps, sinks, dropout."""
    wanted = {
        "qwen2 (2.5 7B+": ONCE,
        "granite (3.x)": "packed",
        "phimoe": "packed",
        "lfm2": "padded, sdpa",
        "gemma2 (as published)": "padded, eager",
        "seed_oss": "packed, fused head",
    }
    command = [sys.executable, "-m", "tests.benchmarks.families", "--out", str(tmp_path / "found.json"), *wanted]
    child = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr[-2000:]
    found = json.loads((tmp_path / "found.json").read_text())["families"]
    taken = {name: [p for p, each in family["paths"].items() if each["agrees"]] for name, family in found.items()}
    assert len(taken) == len(wanted)
    for name, passes in taken.items():
        assert passes == [next(right for start, right in wanted.items() if name.startswith(start))], name
    assert found["granite (3.x)"]["paths"]["packed, fused head"]["nats"] > 1  # wrong without a word
    by_name = {name.split(" ")[0]: family for name, family in found.items()}
    assert by_name["seed_oss"]["noise"] and not by_name["granite"]["noise"]
    assert by_name["qwen2"]["critic"] and not by_name["lfm2"]["critic"]


# liger-kernel's place in verl, as verl 0.9.1 imports it: its own import of a fused head, and the call for a model.
LIGER = """\
import os
import transformers.models.llama.modeling_llama as llama
MODEL_TYPE_TO_APPLY_LIGER_FN = {"llama": None}
turned = llama.apply_rotary_pos_emb
def _apply_liger_kernel_to_instance(model, fused_linear_cross_entropy, swiglu):
    assert not fused_linear_cross_entropy
    if os.environ["KERNELS"] == "raise":
        raise RuntimeError("no kernel image")
    by = 1.1 if os.environ["KERNELS"] == "differ" else 1.0
    llama.apply_rotary_pos_emb = lambda q, k, *others, **named: turned(q * by, k, *others, **named)
"""
COMPARE = """\
import contextlib, io, json, os, sys
import verl
from verl_tasks.stacks import current
from verl_tasks.verl_plugins import parity
shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 97}
def compared(kind, kernels):
    os.environ["KERNELS"] = kernels
    config = {"model_type": kind, "architectures": [{"llama": "LlamaForCausalLM", "phi": "PhiForCausalLM"}[kind]]}
    with contextlib.redirect_stdout(io.StringIO()):
        return parity.compared(config | shape, current.PATHS, True, current.LIGER)
class Missing:
    def find_spec(name, *_):
        if name == "liger_kernel":
            raise ModuleNotFoundError("No module named 'liger_kernel'", name=name)
parity.start()
sys.meta_path.insert(0, Missing)
found = {"missing": compared("llama", "")}
sys.meta_path.remove(Missing)
sys.path.insert(0, sys.argv[1])
found |= {kernels: compared("llama", kernels) for kernels in ("differ", "raise", "agree")}
found["none"] = compared("phi", "agree")
print(json.dumps(found))
os._exit(sys.stdout.flush() or 0)
"""


@pytest.mark.long
def test_kernels_of_liger_are_left_out_where_they_are_missing_or_differ_or_raise(tmp_path):
    """In one process: what one choice patched is undone before the next."""
    (tmp_path / "liger_kernel/transformers").mkdir(parents=True)
    for folder in ("", "transformers"):
        (tmp_path / "liger_kernel" / folder / "__init__.py").touch()
    (tmp_path / "liger_kernel/ops.py").write_text("LigerFusedLinearScaledCrossEntropyFunction = None")
    (tmp_path / "liger_kernel/transformers/monkey_patch.py").write_text(LIGER)
    environment = os.environ | parity.ENVIRONMENT | {"PYTHONPATH": parity.PYTHON_PATH}
    command = [sys.executable, "-c", COMPARE, str(tmp_path)]
    child = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr[-2000:]
    found = json.loads(child.stdout)
    passes = {name: [p for p, each in one["paths"].items() if each["agrees"]] for name, one in found.items()}
    right = {name: [ONCE] for name in ("missing", "differ", "raise", "agree")}
    assert passes == right | {"none": ["packed"]}
    liger = {name: one["liger"] for name, one in found.items()}
    assert [name for name, one in liger.items() if one["agrees"]] == ["agree"]
    assert "No module named 'liger_kernel'" in liger["missing"]["failed"]
    assert liger["differ"]["nats"] > 0.01 and liger["differ"]["values"] > 0.01
    assert "no kernel image" in liger["raise"]["failed"] and "no kernels for phi" in liger["none"]["failed"]


@pytest.mark.medium
@pytest.mark.skipif(not (find_spec("triton") and find_spec("liger_kernel")), reason="needs triton and liger-kernel")
def test_the_real_kernels_agree(tmp_path):
    """In triton's interpreter."""
    command = [sys.executable, "-m", "tests.benchmarks.families", "--out", str(tmp_path / "found.json")]
    child = subprocess.run([*command, "tied", "llama (3", "phimoe"], cwd=ROOT, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr[-2000:]
    found = json.loads((tmp_path / "found.json").read_text())["families"]
    agreed = {name.split(" ")[0]: each["liger"]["agrees"] for name, each in found.items()}
    assert agreed == {"qwen2": True, "qwen3": True, "llama": True, "phimoe": False}


@pytest.mark.medium
def test_a_model_is_played_once_and_a_family_without_a_critic_is_refused_for_ppo(settings, capsys):
    shape = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    lfm2 = {"model_type": "lfm2", "architectures": ["Lfm2ForCausalLM"], "vocab_size": 500} | shape
    s = settings(**lfm2, METHOD="ppo")
    (finding,) = doctor.numbers(s)
    assert finding.state == "error" and "no token classifier of lfm2" in finding.text
    assert "comparing" in capsys.readouterr().out
    assert [*doctor.numbers(s)] == [finding] and "comparing" not in capsys.readouterr().out


@pytest.mark.medium
def test_what_cannot_be_compared_is_said(settings):
    (finding,) = doctor.numbers(settings(model_type="nothing_known"))
    assert finding.state == "warning" and "not compared" in finding.text and "nothing_known" in finding.text


@pytest.mark.parametrize(
    ("name", "state"), [(ONCE, "ok"), ("packed, fused head", "warning"), ("packed", "warning"), ("", "error")]
)
def test_the_finding_names_the_pass_that_is_taken(settings, name, state):
    paths = {}
    for path in current.PATHS:
        paths[path] = result(path == name, nats=1e-6 if path == name else 4.2)
        if path == name:
            break
    s = settings()
    write(s, paths=paths, noise={})
    (finding,) = doctor.numbers(s)
    assert finding.state == state
    assert ("4.2 nats" in str(finding)) == (state != "ok") and (not name or f"`{name}`" in str(finding))


def test_the_finding_says_whether_the_kernels_of_liger_are_taken(settings):
    s, right = settings(), {"packed, fused head": result(True)}
    write(s, paths=right, liger=result(True, nats=2e-6), noise={})
    (finding,) = doctor.numbers(s)
    assert finding.state == "ok" and "with liger-kernel agrees" in str(finding) and "2e-06 nats" in str(finding)
    for wrong in ({"failed": "ModuleNotFoundError: No module named 'liger_kernel'", "agrees": False}, result(False)):
        write(s, paths=right, liger=wrong, noise={})
        finding, without = doctor.numbers(s)
        assert finding.state == "ok" and "liger" not in str(finding)
        assert without.state == "warning" and wrong.get("failed", "is wrong") in str(without)


@pytest.mark.parametrize("agrees", [None, False, True])
def test_the_kernels_of_liger_are_in_all_models_where_they_agree(settings, agrees):
    s = settings()
    write(s, paths={"packed": result(True)}, noise={}, **({} if agrees is None else {"liger": result(agrees)}))
    config = verl_config.rl_config(s)
    ours = verl_config.sft_overrides(s, "m", Path("r"), Path("d"))
    warm_up = verl_config.resolved("sft_trainer_engine", ours)["model"]
    assert config.actor_rollout_ref.model.use_liger == config.critic.model.use_liger == warm_up["use_liger"]
    assert warm_up["use_liger"] == bool(agrees)
    off = verl_config.rl_config(s, ["actor_rollout_ref.model.use_liger=False"])
    assert not off.actor_rollout_ref.model.use_liger and not off.critic.model.use_liger


def test_a_prompt_is_computed_once_where_that_was_compared_and_not_turned_off(settings):
    s, key = settings(), f"{MODEL}.override_config.attn_implementation"
    assert parity.decided(s).attention == "varlen"
    write(s, paths={ONCE: result(True)}, noise={})
    for given, taken in (([], memory.PROMPTS_ONCE), ([f"{key}=varlen"], "varlen")):
        assert OmegaConf.select(verl_config.rl_config(s, given), key) == taken


@pytest.mark.parametrize("stack", ["cpu", "a100"])
def test_other_stacks_do_not_have_liger(stack):
    s = load_settings({"STACK": stack, "TASK": "gsm8k", "STAGE": "train", "N_GPUS": "1", "MODEL": "embedded"})
    overrides = verl_config.rl_overrides(s, "m", Path("r"))
    assert not parity.liger(s) and not any("use_liger=True" in each for each in overrides)


@pytest.mark.parametrize("name", current.PATHS)
def test_all_trainers_take_the_pass(settings, name):
    s, path = settings(), current.PATHS[name]
    before = verl_config.rl_config(s).actor_rollout_ref.model
    assert before.use_fused_kernels and before.use_remove_padding  # the stack's best
    assert not before.use_liger  # not compared
    write(s, paths={name: result(True)}, noise={"attention_dropout": 0.1})
    config = verl_config.rl_config(s)
    ours = verl_config.sft_overrides(s, "m", Path("r"), Path("d"))
    sft = verl_config.resolved("sft_trainer_engine", ours)
    policy, critic, warm_up = config.actor_rollout_ref.model, config.critic.model, sft["model"]
    for model in (policy, critic, warm_up):
        assert model["override_config"]["attn_implementation"] == path["attention"]
        assert model["override_config"]["attention_dropout"] == 0.0
        assert model["use_remove_padding"] == path["packed"]
    assert policy.use_fused_kernels == warm_up["use_fused_kernels"] == path["fused"]
    plan = verl_config.memory_plan(config)
    assert plan.fused == path["fused"] and plan.padded == (not path["packed"])


def test_dpo_without_a_warm_up_uses_no_pass_of_verls(settings):
    s = settings(METHOD="dpo")
    write(s, paths={"packed": result(False)}, noise={})
    assert not [*doctor.numbers(s)] and [*doctor.numbers(replace(s, INIT="sft"))]


@pytest.mark.parametrize("model", ["/no/such.folder/at-all", "nothing", "owner/unknown"])
def test_a_model_that_is_not_here_takes_the_stacks_best_pass_without_asking_the_hub(settings, model, monkeypatch):
    monkeypatch.setattr(memory, "_of_the_hub", lambda model: pytest.fail("asked the hub"))
    s = replace(settings(), MODEL=model)
    assert parity.decided(s) == parity.Pass("varlen", packed=True, fused=True) and verl_config.rl_config(s)


def test_dropout_is_said_to_be_off(settings):
    s = settings()
    write(s, paths={"packed": result(True)}, noise={"attention_dropout": 0.1})
    assert any("attention_dropout=0.1" in str(finding) for finding in doctor.numbers(s))


NESTED = """\
import json, sys, tempfile
from pathlib import Path
from transformers import AutoConfig
from verl.utils.model import update_model_config
from verl_tasks.verl_plugins import parity
layers = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 97}
layers |= {"intermediate_size": 96, "num_key_value_heads": 2, "head_dim": 16, "attention_dropout": 0.1}
encoder = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
values = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "text_config": layers}
folder = Path(tempfile.mkdtemp(dir=sys.argv[1]))
print(json.dumps([parity.write_small(values | {"vision_config": encoder}, folder)]))
config = AutoConfig.from_pretrained(folder)
assert config.text_config.attention_dropout == 0
config.text_config.attention_dropout = 0.1
update_model_config(config, {"text_config": {"attention_dropout": 0.0}})
assert config.text_config.attention_dropout == 0
"""


def test_dropout_of_the_text_part_is_turned_off_too(settings, tmp_path):
    """Gemma 3's config, and others of models with pictures, has its layers in text_config."""
    environment = os.environ | parity.ENVIRONMENT | {"PYTHONPATH": parity.PYTHON_PATH}
    command = [sys.executable, "-c", NESTED, str(tmp_path)]
    child = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr[-2000:]
    (noise,) = json.loads(child.stdout.splitlines()[-1])
    assert noise == {"text_config.attention_dropout": 0.1}
    write(s := settings(), paths={ONCE: result(True)}, noise=noise)
    for model in (verl_config.rl_config(s).actor_rollout_ref.model, verl_config.rl_config(s).critic.model):
        assert model["override_config"]["text_config"] == {"attention_dropout": 0.0}


def test_other_methods_configs_and_stacks_have_results_of_their_own(settings):
    s = settings()
    write(s, paths={"padded, sdpa": result(True)}, noise={})
    assert parity.decided(s) == parity.Pass("sdpa", packed=False, fused=False)
    for other in (settings(METHOD="ppo"), settings(hidden_size=128)):
        assert parity.decided(other) == parity.Pass("varlen", packed=True, fused=True)
    given = {"STACK": "a100", "TASK": "gsm8k", "STAGE": "train", "N_GPUS": "1"}
    assert parity.decided(load_settings(given)) is None and not [*doctor.numbers(load_settings(given))]


def on_cpu(s):
    return load_settings({"STACK": "cpu", "TASK": "gsm8k", "STAGE": "train", "MODEL": s.MODEL})


def test_on_a_cpu_a_plain_model_takes_transformers_own_pass_at_once_and_others_the_first_that_is_right(
    settings, monkeypatch
):
    asked, kinds = [], ("qwen3", "gemma2")
    soft_cap = {"padded, sdpa": result(False, nats=4.2), "padded, eager": result(True)}
    monkeypatch.setattr(parity, "_asked", lambda request: asked.append(request) or {"paths": soft_cap, "noise": {}})
    taken = []
    for s in (on_cpu(settings(model_type=kind)) for kind in kinds):
        found = [finding.state for finding in doctor.numbers(s)]
        config = verl_config.rl_config(s).actor_rollout_ref.model
        taken.append((found, config.override_config.attn_implementation, config.use_remove_padding))
    assert taken == [([], "sdpa", False), (["warning"], "eager", False)]
    assert [(request["config"]["model_type"], request["samples"]) for request in asked] == [("gemma2", True)]


def test_a_family_that_vllm_cannot_load_is_refused(settings, monkeypatch):
    why = "this vLLM cannot load X (No module named 'torchvision')"
    monkeypatch.setattr(parity, "_asked", lambda request: {"unsampled": why})
    (finding,) = doctor.numbers(on_cpu(settings(model_type="gemma3")))
    assert finding.state == "error" and why in finding.text


MANY = [{"num_experts": 4}, {"text_config": {"num_local_experts": 4}}, {"moe_num_experts": 64}, {"num_experts": [4, 4]}]


@pytest.mark.parametrize("values", MANY)
def test_experts_are_refused_on_a_cpu(settings, values):
    """After an update 1.3 nats a token (k3) lay between vLLM and the trainer of a small random Qwen3-MoE."""
    (finding,) = doctor.numbers(on_cpu(settings(model_type="qwen3_moe", **values)))
    assert finding.state == "error" and "experts" in finding.text


@pytest.mark.parametrize("values", [{"num_local_experts": 0}, {"num_experts": 1}, {"num_experts": None}])
def test_a_dense_model_of_a_family_with_experts_is_none(settings, monkeypatch, values):
    """Granite 4 and Hunyuan have one config for both."""
    monkeypatch.setattr(parity, "_asked", lambda request: {"paths": {"padded, sdpa": result(True)}, "noise": {}})
    (finding,) = doctor.numbers(on_cpu(settings(model_type="granitemoehybrid", **values)))
    assert finding.state == "ok"


@pytest.mark.long
def test_vllm_is_asked_whether_it_can_load_a_family(tmp_path):
    """The module of one is a stub that lacks a package, as qwen3_5's does without torchvision."""
    program = """
import json, sys, torch
from vllm.model_executor.models import registry
from verl_tasks.verl_plugins.parity import unsampled
missing = registry._LazyRegisteredModel(module_name="no_such_package", class_name="X")
registry.ModelRegistry.models["XForCausalLM"] = missing
said = [unsampled({"architectures": [name]}) for name in ("XForCausalLM", "LlamaForCausalLM", "UnknownForCausalLM")]
torch.cpu._is_avx512_bf16_supported = lambda: True
said += [unsampled({"architectures": ["Lfm2ForCausalLM"], "conv_L_cache": width}) for width in (3, 4)]
print(json.dumps(said))
"""
    environment = os.environ | parity.ENVIRONMENT | {"PYTHONPATH": parity.PYTHON_PATH}
    child = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr[-2000:]
    lacks, *others, narrow, wide = json.loads(child.stdout.splitlines()[-1])
    assert "convolution of width 3" in narrow and not wide
    assert "cannot load XForCausalLM" in lacks and "no_such_package" in lacks and others == ["", ""]


# ---- the small model


def of(kind: str, **values):
    from transformers import AutoConfig

    return AutoConfig.for_model(kind, **values)


def test_a_small_config_keeps_what_makes_the_family():
    large = of(
        "granite", logits_scaling=8.0, attention_multiplier=0.1, num_key_value_heads=8, tie_word_embeddings=False
    )
    made = small(large, vocabulary=128)
    assert (made.logits_scaling, made.attention_multiplier, made.tie_word_embeddings) == (8.0, 0.1, False)
    assert made.num_key_value_heads < made.num_attention_heads and made.num_hidden_layers == 2
    assert made.vocab_size == 128 and large.num_hidden_layers == 32


@pytest.mark.parametrize(
    ("kind", "values", "wanted"),
    [
        (
            "qwen3_next",
            {"layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 4, "num_hidden_layers": 16},
            2,
        ),
        ("gemma3_text", {"layer_types": ["sliding_attention"] * 5 + ["full_attention"], "num_hidden_layers": 6}, 2),
        ("bamba", {"attn_layer_indices": [3, 9], "num_hidden_layers": 12}, 2),
        ("jamba", {"num_hidden_layers": 32, "attn_layer_period": 8, "attn_layer_offset": 4}, 8),
    ],
)
def test_a_small_model_has_every_kind_of_layer(kind, values, wanted):
    made = small(of(kind, **values), vocabulary=128)
    kinds = made.layer_types if kind != "jamba" else made.layers_block_type
    assert made.num_hidden_layers == len(kinds) == wanted and len(set(kinds)) == 2


def test_special_tokens_stay_apart_in_a_small_vocabulary():
    made = small(of("qwen2", bos_token_id=151643, eos_token_id=151645, pad_token_id=151643), vocabulary=128)
    assert made.bos_token_id == made.pad_token_id != made.eos_token_id
    assert max(made.bos_token_id, made.eos_token_id) < 128
