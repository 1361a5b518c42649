"""tasks/*/profiles: each composes on the GPU stacks, and passes doctor's estimate of memory for its hardware."""

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tests.benchmarks.qwen import QWEN25_3B
from tests.helpers import ROOT, SINGLE_TURN, exported
from tests.wheels import verl_package
from verl_tasks import settings
from verl_tasks.launch import memory_checks
from verl_tasks.machine import hardware, memory
from verl_tasks.settings import GPU_MIB, SettingsError, load_settings
from verl_tasks.training import verl_config, verl_versions

PROFILES = sorted(path for path in ROOT.glob("tasks/*/profiles/*.sh"))
STACKS = [name for name in ("a100", "current") if name in settings.STACKS]
RAM = 1000e9  # of a machine with such GPUs
# The model's shapes as its config.json states them, and what its makers say of its size.
QWEN = {"vocab_size": 151936, "tie_word_embeddings": True}
QWEN3_4B = QWEN | {
    "model_type": "qwen3",
    "hidden_size": 2560,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 9728,
}
QWEN25_7B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}
QWEN25_32B = {
    "model_type": "qwen2",
    "hidden_size": 5120,
    "num_hidden_layers": 64,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "intermediate_size": 27648,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}
QWEN25_14B = QWEN25_32B | {"num_hidden_layers": 48, "intermediate_size": 13824}
SMOLLM2 = {
    "model_type": "llama",
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}
CONFIGS = {
    "embedded": SMOLLM2,
    "Qwen/Qwen3-4B": QWEN3_4B,
    "Qwen/Qwen3-4B-Instruct-2507": QWEN3_4B,
    "Qwen/Qwen2.5-3B-Instruct": QWEN25_3B,
    "Qwen/Qwen2.5-7B-Instruct": QWEN25_7B,
    "Qwen/Qwen2.5-14B-Instruct": QWEN25_14B,
    "Qwen/Qwen2.5-32B-Instruct": QWEN25_32B,
}


def loaded(profile: Path, monkeypatch, **changes):
    """The settings of a profile."""
    changes = {"PROFILE": profile.stem, "STACK": STACKS[-1], **changes}
    environment = exported(profile.parents[1] / "train.sh", changes)
    return load_settings(environment)


def hardware_of(profile: Path) -> tuple[str, str]:
    """How many GPUs of which kind, as the profile's name says."""
    count, kind = profile.stem.rsplit("-", 1)[1].split("x", 1)
    return count, kind


def shapes_of(model: str, tmp_path: Path) -> memory.Shapes:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[model]))
    return memory.shapes_of(str(tmp_path))


def test_each_typical_use_has_its_profile():
    small = {task for task in SINGLE_TURN if "default MODEL embedded " in (ROOT / f"tasks/{task}/train.sh").read_text()}
    assert {path.parents[1].name for path in PROFILES} == set(SINGLE_TURN) - small


@pytest.mark.parametrize("profile", PROFILES, ids=lambda path: path.stem)
def test_the_table_of_settings_has_room_for_a_profiles_name(profile):
    shown = settings.table({"TASK": profile.parents[1].name, "PROFILE": profile.stem, "STACK": STACKS[-1]})
    (line,) = [line for line in shown.splitlines() if line.startswith("N_GPUS ")]
    assert f"profile {profile.stem}  GPUs" in line, line


def test_the_published_study_is_a_profile():
    s = load_settings(
        exported(ROOT / "tasks/countdown/train.sh", {"PROFILE": "study-qwen3-4b-8xa100", "STACK": "a100"})
    )
    assert (s.MODEL, s.ROLLOUT_N, s.TRAIN_BATCH_SIZE, s.LR, s.KL_COEF) == ("Qwen/Qwen3-4B", 16, 64, 2e-6, 0.01)


@pytest.mark.parametrize(
    ("config", "parameters"),
    [(QWEN3_4B, "4.02"), (QWEN25_3B, "3.09"), (QWEN25_7B, "7.62"), (QWEN25_14B, "14.77"), (QWEN25_32B, "32.76")],
)
def test_parameters_are_those_that_the_model_is_known_by(config, parameters):
    assert f"{memory.shapes(config).parameters / 1e9:.2f}" == parameters


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("profile", PROFILES, ids=lambda path: path.stem)
def test_a_profile_and_its_warm_up_compose_and_fit_their_hardware(profile, stack, monkeypatch, tmp_path):
    s = loaded(profile, monkeypatch, STACK=stack)
    package = verl_package(verl_versions.wanted(s))  # the stack's verl, not the one that is installed
    monkeypatch.setattr(verl_config, "compose", partial(verl_config.compose, package=package))
    model, plan = shapes_of(s.MODEL, tmp_path), memory_checks.plan(s, [])
    gpus, kind = hardware_of(profile)
    assert int(gpus) == s.N_GPUS == plan.gpus and plan.share == s.GPU_MEMORY_UTILIZATION
    for each in (plan, memory_checks.plan(s, [], "sft")):
        assert memory.too_much(model, each, (1 - memory_checks.SPARE) * GPU_MIB[kind] * hardware.MIB, RAM) == []
    assert list(memory_checks.heads(s, model, plan)) == []
    # Validation and one optimizer step a step, as everywhere on GPUs.
    assert s.TEST_FREQ > 0 and s.DEV_SIZE > 0


def applied(plan: memory.Plan, fix: str) -> memory.Plan:
    """``plan`` with the variables of doctor's first advice, all of which must be known here."""
    given = dict(re.findall(r"(\w+)=([\d.]+)", fix.split(" or ")[0]))
    assert fix.split(" or ")[0] == f"set {' '.join(f'{name}={value}' for name, value in given.items())}"
    unit = plan.sequence if plan.tokens_by == "MICRO_BATCH_SIZE" else 1
    offload = given.pop("OFFLOAD", "0") == "1" or plan.weights_offloaded
    here = int(given.pop("N_GPUS", plan.gpus_here))
    changed = replace(
        plan,
        gpus_here=here,
        gpus=here * plan.machines,
        lora_rank=int(given.pop("LORA_RANK", plan.lora_rank)),
        tensor_parallel=int(given.pop("TP", plan.tensor_parallel)),
        sequence_parallel=int(given.pop("SP", plan.sequence_parallel)),
        share=float(given.pop("GPU_MEMORY_UTILIZATION", plan.share)),
        tokens=int(given.pop(plan.tokens_by, plan.tokens // unit)) * unit,
        weights_offloaded=offload,
        optimizer_offloaded=offload,
    )
    assert not given
    return changed


ADVISED = {  # what the advice of each must name
    (0, 8, 100, "32B"): "OFFLOAD GPU_MEMORY_UTILIZATION",
    (0, 8, 80, "32B"): "LORA_RANK OFFLOAD",
    (0, 6, 80, "32B"): "LORA_RANK OFFLOAD",
    (16, 8, 40, "32B"): "TP OFFLOAD",
    (16, 1, 80, "32B"): "N_GPUS SP OFFLOAD MAX_TOKENS_PER_GPU",
    (0, 4, 80, "14B"): "OFFLOAD",
    (0, 2, 80, "14B"): "N_GPUS",
    (0, 8, 24, "7B"): "OFFLOAD GPU_MEMORY_UTILIZATION",
    (16, 1, 24, "7B"): "N_GPUS OFFLOAD",
}


@pytest.mark.parametrize(("lora_rank", "gpus", "gpu", "name"), ADVISED)
def test_advice_for_a_model_that_does_not_fit_makes_it_fit(lora_rank, gpus, gpu, name):
    model = memory.shapes({"7B": QWEN25_7B, "14B": QWEN25_14B, "32B": QWEN25_32B}[name])
    plan = memory.Plan(gpus=gpus, gpus_here=gpus, tokens=16384, tokens_by="MAX_TOKENS_PER_GPU", sequence=5120)
    plan = replace(plan, lora_rank=lora_rank, fused=True, batched_tokens=16384, sequences=1024)
    advice = [fix for _, fix in memory.too_much(model, plan, gpu * 1e9, 2e12)]
    made = [applied(plan, fix) for fix in advice if fix.startswith("set ")]
    assert any(memory.too_much(model, changed, gpu * 1e9, 2e12) == [] for changed in made), advice
    assert all(model.divides(changed.tensor_parallel) and model.divides(changed.sequence_parallel) for changed in made)
    assert any(set(ADVISED[lora_rank, gpus, gpu, name].split()) <= set(re.findall(r"\w+(?==)", fix)) for fix in advice)


def test_dpo_of_7b_with_all_weights_fits_eight_gpus_in_shards_and_not_one(monkeypatch):
    model, gpu = memory.shapes(QWEN25_7B), GPU_MIB["a100"] * hardware.MIB
    given = {"STACK": "a100", "METHOD": "dpo", "N_GPUS": "8"}
    s = load_settings(exported(ROOT / "tasks/countdown/train.sh", given))
    plan = memory_checks.plan(s, [])
    assert memory.too_much(model, plan, (1 - memory_checks.SPARE) * gpu, RAM) == []
    held = memory.training_state(model, plan)
    assert sum(held.values()) == 20 * model.parameters / 8  # 16 of the policy, 4 of the reference
    assert memory.estimate(model, plan, gpu).ram["loading"] == 2 * 8 * 4 * model.parameters
    ((_, fix),) = memory.too_much(model, replace(plan, gpus=1, gpus_here=1), gpu, RAM)
    assert re.match(r"set N_GPUS=[248]", fix) and "NNODES" not in fix and "TP" not in fix and "OFFLOAD" not in fix
    lora = memory_checks.plan(replace(s, LORA_RANK=8), [])
    assert not lora.sharded and lora.loaded == 1
    current = memory_checks.plan(replace(s, STACK="current"), [])
    assert not plan.fused and current.fused  # TRL 1.16 computes no whole logits


def test_heads_that_gpus_cannot_share_are_told():
    seven = memory.shapes(QWEN25_7B)  # 28 heads, 4 of keys
    assert [n for n in range(1, 9) if seven.divides(n)] == [1, 2, 4]
    s = replace(
        load_settings(exported(ROOT / "tasks/gsm8k/train.sh", {"STACK": STACKS[-1], "N_GPUS": "8"})), TP=8, SP=8
    )
    found = list(memory_checks.heads(s, seven, memory.Plan()))
    assert [f.state for f in found] == ["error"] * 2
    said = "TP=8: MODEL has 28 heads and 4 of keys, which cannot be shared so; set TP to one of [1, 2, 4]"
    assert str(found[0]) == f"heads: {said}"
    assert not list(memory_checks.heads(replace(s, TP=4, SP=2), seven, memory.Plan()))
    by_arguments = memory.Plan(tensor_parallel=8, sequence_parallel=2)
    assert [str(f) for f in memory_checks.heads(replace(s, TP=4, SP=2), seven, by_arguments)] == [f"heads: {said}"]


SIZES = ("study-qwen3-4b-8xa100", "smollm2-search-1xh200", "qwen2.5-32b-lora-8xa100")


@pytest.mark.parametrize("profile", [each for each in PROFILES if each.stem in SIZES], ids=lambda path: path.stem)
def test_hardware_that_is_too_small_is_told_with_the_variable_to_change(profile, monkeypatch, tmp_path):
    s = loaded(profile, monkeypatch)
    model, plan = shapes_of(s.MODEL, tmp_path), memory_checks.plan(s, [])
    for gpu in (12e9, 8e9) if s.MODEL != "embedded" else (8e9, 4e9):
        fixes = " ".join(fix for _, fix in memory.too_much(model, plan, gpu, RAM))
        assert any(f"{name}" in fixes for name in ("N_GPUS", plan.tokens_by, "GPU_MEMORY_UTILIZATION", "MODEL")), fixes
    alone = replace(plan, gpus=1, gpus_here=1)
    for _, fix in memory.too_much(model, alone, 40e9, RAM):
        assert not fix.startswith("set ") or memory.too_much(model, applied(alone, fix), 40e9, RAM) == [], fix
    own = GPU_MIB[hardware_of(profile)[1]] * hardware.MIB
    (text, fix), *_ = memory.too_much(model, replace(plan, tokens=64 * plan.tokens), own, RAM)
    assert "activations" in text and fix.startswith(f"set {plan.tokens_by}=")


def test_what_is_given_goes_before_the_profile(monkeypatch):
    s = loaded(PROFILES[0], monkeypatch, MODEL="some/model", N_GPUS="2", TP="2")
    assert (s.MODEL, s.N_GPUS, s.TP) == ("some/model", 2, 2)


def test_an_unknown_profile_lists_the_known_ones():
    for task, known in (("tool_calling", "qwen3-4b-instruct-8xa100"), ("char_count", "none")):
        with pytest.raises(SettingsError) as refused:
            load_settings({"TASK": task, "STACK": "cpu", "PROFILE": "nosuch"})
        assert str(refused.value) == f"PROFILE=nosuch: TASK={task} has no such profile; there are: {known}"
