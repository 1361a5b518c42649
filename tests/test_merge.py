"""LoRA adapters: taken out of verl's checkpoints, merged in float32, and gone on with."""

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tests.adapters import adapted, saved
from tests.helpers import write_checkpoint
from tests.test_settings import VALUES
from tests.wheels import verl_package
from verl_tasks.launch.train import _trainer_start
from verl_tasks.models.find import resolve_model, whole_model
from verl_tasks.models.merge import (
    adapter_config,
    base_model,
    loadable,
    lost_in_bfloat16,
    max_rank,
    merge,
    merge_adapter,
    merge_note,
    sampled_as_adapter,
)
from verl_tasks.settings import ROOT, STACKS, load_settings, stack
from verl_tasks.training import verl_config


@pytest.fixture(autouse=True)
def artifacts(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("ARTIFACTS", str(tmp_path / "artifacts"))
    return tmp_path / "artifacts"


def changed(adapter: Path, **values) -> Path:
    (adapter / "adapter_config.json").write_text(json.dumps(adapter_config(adapter) | values))
    return adapter


# ---- merging


@pytest.mark.parametrize("spread", [0.2, 1e-5])
def test_a_merged_model_is_the_sum_in_float32_and_says_what_bfloat16_loses(small_model, tmp_path, spread):
    import torch
    from transformers import AutoModelForCausalLM

    adapter = saved(small_model, tmp_path / "adapter", spread)
    folder = merge_adapter(adapter, str(small_model), tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    start = AutoModelForCausalLM.from_pretrained(small_model, dtype="float32").state_dict()
    model = adapted(small_model, spread)
    changes, kept = [], []
    for name, module in model.named_modules():
        if hasattr(module, "get_delta_weight"):
            weight = f"{name.removeprefix('base_model.model.')}.weight"
            change = module.get_delta_weight("default").detach()
            assert torch.equal(merged.state_dict()[weight], start[weight] + change)
            in_bfloat16 = (start[weight] + change).to(torch.bfloat16).float() - start[weight]  # W is bfloat16
            changes.append(change.flatten())
            kept.append(in_bfloat16.flatten())
    assert merged.dtype == torch.float32 and len(changes) == 14
    lost = float((torch.cat(changes) - torch.cat(kept)).norm() / torch.cat(changes).norm())
    assert lost_in_bfloat16(model) == pytest.approx(lost, rel=1e-4)
    assert merge_note(folder) == (
        f"; in float32: loaded in bfloat16 it loses {lost:.0%} of the adapter's change (relative norm)"
    )
    assert lost < 0.05 if spread == 0.2 else lost > 0.2


def test_an_adapter_that_changes_nothing_loses_nothing(small_model):
    assert lost_in_bfloat16(adapted(small_model, 0)) == 0


# ---- what is sampled as an adapter


def test_an_adapter_stays_one_and_names_the_base_that_is_given(small_model, tmp_path, artifacts):
    adapter = changed(saved(small_model, tmp_path / "mine"), base_model_name_or_path="gone/base")
    found = Path(resolve_model(str(adapter), str(small_model)))
    assert found.parent == artifacts / "models" and base_model(str(found)) == str(small_model)
    assert max_rank(found) == 8 and max_rank(changed(found, r=33)) == 64
    assert adapter_config(adapter)["base_model_name_or_path"] == "gone/base"


@pytest.mark.parametrize(
    "values",
    [
        {"use_dora": True},
        {"modules_to_save": ["lm_head"]},
        {"bias": "all"},
        {"rank_pattern": {"q_proj": 4}},
        {"target_modules": ["c_attn"]},
        {"target_modules": "all-linear"},
        {"r": 1000},
    ],
)
def test_an_adapter_that_vllm_does_not_apply_is_told_from_one_that_it_does(small_model, tmp_path, values):
    adapter = saved(small_model, tmp_path / "adapter")
    assert sampled_as_adapter(adapter)
    assert not sampled_as_adapter(changed(adapter, **values))


@pytest.mark.parametrize(("family", "applied"), [("llama", True), ("stablelm", False)])
def test_a_family_whose_class_in_vllm_takes_no_adapter_is_told_by_its_base(small_model, tmp_path, family, applied):
    adapter, base = saved(small_model, tmp_path / "adapter"), tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text(json.dumps({"model_type": family}))
    assert sampled_as_adapter(changed(adapter, base_model_name_or_path=str(base))) == applied
    assert sampled_as_adapter(changed(adapter, base_model_name_or_path=str(tmp_path / "gone")))


def test_an_adapter_that_vllm_does_not_apply_is_merged(small_model, tmp_path):
    adapter = changed(saved(small_model, tmp_path / "adapter"), bias="all")
    folder = Path(resolve_model(str(adapter)))
    assert (folder / "config.json").is_file() and merge_note(folder)


# ---- checkpoints of verl


def checkpoint_of(small_model: Path, folder: Path) -> Path:
    """As verl 0.9.1 writes one of LoRA with one process: shards, what it trained, the config."""
    import torch
    from transformers import AutoConfig, AutoTokenizer

    model = adapted(small_model)
    folder.mkdir()
    torch.save(model.state_dict(), folder / "model_world_size_1_rank_0.pt")
    (folder / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": 1}))
    (folder / "lora_train_meta.json").write_text(json.dumps({"r": 8, "lora_alpha": 16, "task_type": "CAUSAL_LM"}))
    AutoConfig.from_pretrained(small_model).save_pretrained(folder / "huggingface")
    AutoTokenizer.from_pretrained(small_model).save_pretrained(folder / "huggingface")
    return folder


@pytest.mark.slow
def test_a_checkpoint_gives_its_adapter_in_float32_by_verls_own_merger(small_model, tmp_path):
    from safetensors.torch import load_file

    checkpoint = checkpoint_of(small_model, tmp_path / "global_step_2")
    adapter = loadable(checkpoint, str(small_model))
    assert adapter == checkpoint / "adapter" and base_model(str(adapter)) == str(small_model)
    # verl 0.6.1 cannot save an adapter again that it loaded without one (fsdp_workers.py:1055).
    assert json.loads((adapter / "adapter_config.json").read_text())["task_type"] == "CAUSAL_LM"
    found = load_file(adapter / "adapter_model.safetensors")
    wanted = load_file(saved(small_model, tmp_path / "wanted") / "adapter_model.safetensors")
    assert found.keys() == wanted.keys() and all(found[name].equal(wanted[name]) for name in wanted)
    assert not list(checkpoint.glob("*merged*")) and not list(checkpoint.glob(".*"))
    folder = merge(checkpoint, str(small_model))
    assert folder == checkpoint / "merged" and merge(checkpoint, "gone/base") == folder


# ---- going on with an adapter


@pytest.mark.parametrize("name", STACKS)
def test_verl_goes_on_with_an_adapter_on_its_base(small_model, tmp_path, name):
    adapter, s = saved(small_model, tmp_path / "adapter"), load_settings(VALUES | {"LORA_RANK": "8", "STACK": name})
    package = verl_package(stack(name).VERL)
    overrides = verl_config.rl_overrides(s, adapter, tmp_path)
    model = verl_config.compose("ppo_trainer", overrides, package).actor_rollout_ref.model
    assert (model.path, model.lora_adapter_path, model.lora_rank) == (str(small_model), str(adapter), 8)
    overrides = verl_config.rl_overrides(s, small_model, tmp_path)
    model = verl_config.compose("ppo_trainer", overrides, package).actor_rollout_ref.model
    assert (model.path, model.lora_adapter_path) == (str(small_model), None)


def test_a_critic_begins_as_the_policy_and_not_as_its_base(small_model, tmp_path):
    adapter = saved(small_model, tmp_path / "adapter")
    s = load_settings(VALUES | {"LORA_RANK": "8", "METHOD": "ppo"})
    found = verl_config.critic_overrides(s, str(adapter))
    config = verl_config.compose(
        "ppo_trainer", verl_config.rl_overrides(s, adapter, tmp_path) + found, verl_package("0.9.1")
    )
    assert config.critic.model.path == whole_model(str(adapter)) != str(adapter)
    assert verl_config.critic_overrides(s, str(small_model)) == []
    assert verl_config.critic_overrides(replace(s, METHOD="grpo"), str(adapter)) == []


def test_a_reference_that_is_not_the_base_takes_a_merged_start(small_model, tmp_path):
    adapter = str(saved(small_model, tmp_path / "adapter"))
    s = replace(load_settings(VALUES), LORA_RANK=8, LORA_ALPHA=16, KL_COEF=0.0)
    assert _trainer_start(s, str(small_model)) == str(small_model)
    assert _trainer_start(s, adapter) == adapter
    # DPO has a copy of the adapter as its reference.
    assert _trainer_start(replace(s, METHOD="dpo", KL_COEF=0.1), adapter) == adapter
    for changes in ({"KL_COEF": 0.01}, {"LORA_RANK": 4}, {"LORA_ALPHA": 8}, {"LORA_RANK": 0}):
        assert _trainer_start(replace(s, **changes), adapter) == whole_model(adapter) != adapter


@pytest.mark.medium
def test_a_merge_ends_with_the_process_that_was_killed(tmp_path):
    """verl's merger is another process, which takes seconds to start."""
    write_checkpoint(tmp_path / "global_step_1")
    code = "import sys; from pathlib import Path; from verl_tasks.models.merge import merge; merge(Path(sys.argv[1]))"
    merging = subprocess.Popen([sys.executable, "-c", code, tmp_path / "global_step_1/actor"], cwd=ROOT)
    deadline = time.monotonic() + 60
    # A child that is not yet another program may not have asked the kernel yet to end with this process.
    while not (mergers := [c for c in psutil.Process(merging.pid).children() if "verl.model_merger" in c.cmdline()]):
        assert merging.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    for merger in mergers:
        merger.suspend()  # it does not end by itself, however long it is waited for
    merging.kill()
    merging.wait()
    left = psutil.wait_procs(mergers, timeout=30)[1]
    for merger in left:
        merger.kill()
    assert left == []
