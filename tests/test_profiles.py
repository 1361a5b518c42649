"""tasks/*/profiles: each composes on the GPU stacks, and passes doctor's estimate of memory for its hardware."""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tests.helpers import QWEN25_3B, ROOT, SINGLE_TURN, TASKS, task_settings
from tests.wheels import verl_package
from verl_tasks import settings
from verl_tasks.launch import memory_checks
from verl_tasks.machine import hardware, memory
from verl_tasks.settings import GPU_MIB, SettingsError, load_settings
from verl_tasks.training import verl_config, verl_versions

PROFILES = [path for task in TASKS for path in sorted((ROOT / "tasks" / task / "profiles").glob("*.sh"))]
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
CONFIGS = {
    "embedded": memory.EMBEDDED_CONFIG,
    "Qwen/Qwen3-4B": QWEN3_4B,
    "Qwen/Qwen3-4B-Instruct-2507": QWEN3_4B,
    "Qwen/Qwen2.5-3B-Instruct": QWEN25_3B,
    "Qwen/Qwen2.5-7B-Instruct": QWEN25_7B,
    "Qwen/Qwen2.5-14B-Instruct": QWEN25_14B,
    "Qwen/Qwen2.5-32B-Instruct": QWEN25_32B,
}


def loaded(profile: Path, **changes):
    """The settings of a profile."""
    return task_settings(profile.parents[1].name, {"PROFILE": profile.stem, "STACK": STACKS[-1], **changes})


def hardware_of(profile: Path) -> tuple[str, str]:
    """How many GPUs of which kind, as the profile's name says."""
    count, kind = profile.stem.rsplit("-", 1)[1].split("x", 1)
    return count, kind


def test_each_typical_use_has_its_profile():
    small = {task for task in SINGLE_TURN if "default MODEL embedded " in (ROOT / f"tasks/{task}/train.sh").read_text()}
    assert {path.parents[1].name for path in PROFILES} == set(SINGLE_TURN) - small


@pytest.mark.parametrize("profile", PROFILES, ids=lambda path: path.stem)
def test_the_table_of_settings_has_room_for_a_profiles_name(profile):
    shown = settings.table({"TASK": profile.parents[1].name, "PROFILE": profile.stem, "STACK": STACKS[-1]})
    (line,) = [line for line in shown.splitlines() if line.startswith("N_GPUS ")]
    assert f"profile {profile.stem}  GPUs" in line, line


@pytest.mark.parametrize(
    ("config", "parameters"),
    [(QWEN3_4B, "4.02"), (QWEN25_3B, "3.09"), (QWEN25_7B, "7.62"), (QWEN25_14B, "14.77"), (QWEN25_32B, "32.76")],
)
def test_parameters_are_those_that_the_model_is_known_by(config, parameters):
    assert f"{memory.shapes(config).parameters / 1e9:.2f}" == parameters


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("profile", PROFILES, ids=lambda path: path.stem)
def test_a_profile_and_its_warm_up_compose_and_fit_their_hardware(profile, stack, monkeypatch):
    s = loaded(profile, STACK=stack)
    package = verl_package(verl_versions.wanted(s))  # the stack's verl, not the one that is installed
    monkeypatch.setattr(verl_config, "compose", partial(verl_config.compose, package=package))
    model, plan = memory.shapes(CONFIGS[s.MODEL]), memory_checks.plan(s, [])
    gpus, kind = hardware_of(profile)
    assert int(gpus) == s.N_GPUS == plan.gpus and plan.share == s.GPU_MEMORY_UTILIZATION
    for each in (plan, memory_checks.plan(s, [], "sft")):
        assert memory.too_much(model, each, (1 - memory_checks.SPARE) * GPU_MIB[kind] * hardware.MIB, RAM) == []
    assert list(memory_checks.heads(s, model, plan)) == []
    # Validation and one optimizer step a step, as everywhere on GPUs.
    assert s.TEST_FREQ > 0 and s.DEV_SIZE > 0


def test_dpo_of_7b_with_all_weights_fits_eight_gpus_in_shards_and_not_one():
    model, gpu = memory.shapes(QWEN25_7B), GPU_MIB["a100"] * hardware.MIB
    given = {"STACK": "a100", "METHOD": "dpo", "N_GPUS": "8"}
    s = task_settings("countdown", given)
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
    s = replace(task_settings("gsm8k", {"STACK": STACKS[-1], "N_GPUS": "8"}), TP=8, SP=8)
    found = list(memory_checks.heads(s, seven, memory.Plan()))
    assert [f.state for f in found] == ["error"] * 2
    said = "TP=8: MODEL has 28 heads and 4 of keys, which cannot be shared so; set TP to one of [1, 2, 4]"
    assert str(found[0]) == f"heads: {said}"
    assert not list(memory_checks.heads(replace(s, TP=4, SP=2), seven, memory.Plan()))
    by_arguments = memory.Plan(tensor_parallel=8, sequence_parallel=2)
    assert [str(f) for f in memory_checks.heads(replace(s, TP=4, SP=2), seven, by_arguments)] == [f"heads: {said}"]


def test_an_unknown_profile_lists_the_known_ones():
    for task, known in (("tool_calling", "qwen3-4b-instruct-8xa100"), ("char_count", "none")):
        with pytest.raises(SettingsError) as refused:
            load_settings({"TASK": task, "STACK": "cpu", "PROFILE": "nosuch"})
        assert str(refused.value) == f"PROFILE=nosuch: TASK={task} has no such profile; there are: {known}"
