"""tasks/*/profiles: each composes on the GPU stacks, and passes doctor's estimate of memory for its hardware."""

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tasks.common import settings
from tasks.common.launch import doctor
from tasks.common.machine import memory
from tasks.common.machine.speed import QWEN25_3B
from tasks.common.settings import load_settings
from tasks.common.training import verl_config, verl_versions
from tests.helpers import ROOT, SINGLE_TURN, TASKS, exported, make
from tests.wheels import verl_package

PROFILES = sorted(path for path in ROOT.glob("tasks/*/profiles/*.sh"))
STACKS = [name for name in ("a100", "current") if name in settings.STACKS]
A100 = 80_000 * 2**20  # of 81,920 MiB, what a driver leaves free
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
CONFIGS = {
    "Qwen/Qwen3-4B": QWEN3_4B,
    "Qwen/Qwen3-4B-Instruct-2507": QWEN3_4B,
    "Qwen/Qwen2.5-3B-Instruct": QWEN25_3B,
    "Qwen/Qwen2.5-7B-Instruct": QWEN25_7B,
}


def loaded(profile: Path, monkeypatch, **changes):
    """The settings of a profile."""
    changes = {"PROFILE": profile.stem, "STACK": STACKS[-1], **changes}
    environment = exported(profile.parents[1] / "train.sh", changes)
    return load_settings(environment)


def shapes_of(model: str, tmp_path: Path) -> memory.Shapes:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[model]))
    return memory.shapes_of(str(tmp_path))


def test_each_typical_use_has_its_profile():
    assert {path.parents[1].name for path in PROFILES} == set(SINGLE_TURN)


@pytest.mark.parametrize(
    ("config", "parameters"), [(QWEN3_4B, "4.02"), (QWEN25_3B, "3.09"), (QWEN25_7B, "7.62")], ids=["4B", "3B", "7B"]
)
def test_parameters_are_those_that_the_model_is_known_by(config, parameters):
    assert f"{memory.shapes(config).parameters / 1e9:.2f}" == parameters


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("profile", PROFILES, ids=lambda path: path.stem)
def test_a_profile_composes_and_fits_its_hardware(profile, stack, monkeypatch, tmp_path):
    s = loaded(profile, monkeypatch, STACK=stack)
    package = verl_package(verl_versions.wanted(s))  # the stack's verl, not the one that is installed
    monkeypatch.setattr(verl_config, "compose", partial(verl_config.compose, package=package))
    model, plan = shapes_of(s.MODEL, tmp_path), doctor.plan(s, [])
    assert int(profile.stem.rsplit("-", 1)[1].split("x")[0]) == s.N_GPUS  # as its name says
    assert plan.gpus == s.N_GPUS and plan.share == s.GPU_MEMORY_UTILIZATION
    assert memory.too_much(model, plan, A100, RAM) == []


def applied(plan: memory.Plan, fix: str) -> memory.Plan:
    """``plan`` with the variables of doctor's advice."""
    given = dict(re.findall(r"(\w+)=([\d.]+)", fix))
    assert fix == f"set {' '.join(f'{name}={value}' for name, value in given.items())}"
    unit = plan.sequence if plan.tokens_by == "MICRO_BATCH_SIZE" else 1
    offload = plan.weights_offloaded or given.pop("OFFLOAD", "0") == "1"
    changed = replace(
        plan,
        tensor_parallel=int(given.pop("TP", plan.tensor_parallel)),
        share=float(given.pop("GPU_MEMORY_UTILIZATION", plan.share)),
        tokens=int(given.pop(plan.tokens_by, plan.tokens // unit)) * unit,
        weights_offloaded=offload,
        optimizer_offloaded=offload,
    )
    assert not given
    return changed


QWEN2_5_32B = {
    "model_type": "qwen2",
    "hidden_size": 5120,
    "num_hidden_layers": 64,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "intermediate_size": 27648,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}


def test_advice_for_models_that_need_all_gpus_makes_them_fit():
    seven = {"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4}
    seven |= {"intermediate_size": 18944, "model_type": "qwen2", "vocab_size": 152064, "tie_word_embeddings": False}
    kinds = set()
    for config, lora_rank, gpu in ((QWEN2_5_32B, 0, 100e9), (QWEN2_5_32B, 16, 40e9), (seven, 0, 24e9)):
        model = memory.shapes(config)
        plan = memory.Plan(gpus=8, gpus_here=8, tokens=32768, sequence=5120, lora_rank=lora_rank, fused=True)
        advice = [fix for _, fix in memory.too_much(model, plan, gpu, 2e12)]
        kinds |= set(re.findall(r"[A-Z_]+(?==)", " ".join(advice)))
        assert any(f.startswith("set ") and memory.too_much(model, applied(plan, f), gpu, 2e12) == [] for f in advice)
    assert {"TP", "OFFLOAD"} <= kinds


@pytest.mark.parametrize("profile", PROFILES, ids=lambda path: path.stem)
def test_hardware_that_is_too_small_is_told_with_the_variable_to_change(profile, monkeypatch, tmp_path):
    s = loaded(profile, monkeypatch)
    model, plan = shapes_of(s.MODEL, tmp_path), doctor.plan(s, [])
    for gpu in (12e9, 8e9):
        fixes = " ".join(fix for _, fix in memory.too_much(model, plan, gpu, RAM))
        assert any(f"{name}" in fixes for name in ("N_GPUS", plan.tokens_by, "GPU_MEMORY_UTILIZATION", "MODEL")), fixes
    alone = replace(plan, gpus=1, gpus_here=1)
    for _, fix in memory.too_much(model, alone, 40e9, RAM):
        assert not fix.startswith("set ") or memory.too_much(model, applied(alone, fix), 40e9, RAM) == []
    (text, fix), *_ = memory.too_much(model, replace(plan, tokens=16 * plan.tokens), A100, RAM)
    assert "activations" in text and fix.startswith(f"lower {plan.tokens_by} to ")


@pytest.mark.parametrize("profile", PROFILES, ids=lambda path: path.stem)
def test_what_is_given_goes_before_the_profile(profile, monkeypatch):
    s = loaded(profile, monkeypatch, MODEL="some/model", N_GPUS="2")
    assert (s.MODEL, s.N_GPUS) == ("some/model", 2)


def test_an_unknown_profile_lists_the_known_ones():
    for task in TASKS:
        known = " ".join(sorted(path.stem for path in PROFILES if path.parents[1].name == task)) or "none"
        result = make("config", TASK=task, STACK="cpu", PROFILE="nosuch")
        lines = [line for line in result.stdout.splitlines() if line.startswith("error:")]
        assert result.returncode != 0
        assert lines == [f"error: PROFILE=nosuch: TASK={task} has no such profile; there are: {known}"]
