"""Every stage's overrides, composed strictly against the config files of both generations of verl, not imported."""

import importlib.metadata
import re
from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tests.helpers import ROOT, SINGLE_TURN, error_line, make, task_settings
from tests.wheels import VERLS, verl_package
from verl_tasks import settings
from verl_tasks.settings import METHODS, SettingsError
from verl_tasks.training import verl_checks, verl_config, verl_versions

# A stack with each verl, and all that there are.
STACK_OF = {"0.6.1": "a100", "0.9.1": "current"}
# No stack of 0.6.1 has them.
REFUSED = ("egpo", "dapo", "cispo", "distill")
# Dynamic batches, in the names that are the same in both.
TOKENS = ["actor.use_dynamic_bsz", "actor.ppo_max_token_len_per_gpu"]
TOKENS += [
    f"{part}.log_prob_{key}" for part in ("rollout", "ref") for key in ("use_dynamic_bsz", "max_token_len_per_gpu")
]


@pytest.fixture(scope="module", params=VERLS)
def version(request):
    return request.param


def settings_of(stack: str, task: str = "countdown", **changes):
    """Settings of a task as train.sh exports them, with the STACK."""
    return task_settings(task, {"STACK": stack, "N_GPUS": "1", **changes})


def rl(s, *arguments: str) -> dict:
    overrides = [*verl_config.rl_overrides(s, "some/model", Path("/runs/r")), *arguments]
    config = verl_config.compose("ppo_trainer", overrides, verl_package(verl_versions.wanted(s)))
    verl_checks.check_composed(config)
    return OmegaConf.to_container(config, resolve=True)


def sft(s, *arguments: str) -> dict:
    overrides = [*verl_config.sft_overrides(s, "some/model", Path("/runs/r"), Path("/r/d.parquet")), *arguments]
    return OmegaConf.to_container(
        verl_config.compose("sft_trainer_engine", overrides, verl_package(verl_versions.wanted(s))), resolve=True
    )


LARGE = {"KL_COEF": "0.01", "N_GPUS": "8", "LORA_RANK": "8", "LOGGER": "wandb,tensorboard"}
ROUNDS = LARGE | {"REWARD": "strict", "SELF_PLAY_ROUNDS": "2"}
# Every task and stack, and every method once on each version.
CASES = [(stack, "grpo", changes) for stack in settings.STACKS for changes in ({}, ROUNDS)]
CASES += [
    (stack, name, LARGE) for stack in STACK_OF.values() for name in METHODS if name not in ("dpo", "grpo", *REFUSED)
]
CASES += [("current", name, LARGE) for name in REFUSED]
CASES += [("current", "grpo", {"task": task}) for task in SINGLE_TURN if task != "countdown"]


@pytest.mark.medium
@pytest.mark.parametrize(("stack", "method", "changes"), CASES)
def test_rl_composes_against_the_verl_of_the_stack(stack, method, changes):
    s = settings_of(stack, METHOD=method, **changes)
    version = verl_versions.wanted(s)
    config = rl(s)
    actor, rollout = config["actor_rollout_ref"]["actor"], config["actor_rollout_ref"]["rollout"]
    assert config["data"]["train_batch_size"] == s.TRAIN_BATCH_SIZE
    assert actor["ppo_mini_batch_size"] == s.MINI_BATCH_SIZE and actor["optim"]["lr"] == s.LR
    algorithm = config["algorithm"]
    if method == "distill":  # KL_COEF is refused
        assert not actor["use_kl_loss"] and not algorithm["use_kl_in_reward"]
    elif method in ("ppo", "rloo"):  # the KL is taken off the reward, the others add it to the loss
        assert (algorithm["use_kl_in_reward"], algorithm["kl_ctrl"]["kl_coef"]) == (s.KL_COEF > 0, s.KL_COEF)
        assert not actor["use_kl_loss"]
    else:
        assert (actor["use_kl_loss"], actor["kl_loss_coef"]) == (s.KL_COEF > 0, s.KL_COEF)
        assert actor["kl_loss_type"] == "low_var_kl+" and not algorithm["use_kl_in_reward"]
    trainer = config["trainer"]
    assert trainer["n_gpus_per_node"] == s.N_GPUS and trainer["total_training_steps"] == s.STEPS
    assert trainer["default_local_dir"] == "/runs/r/checkpoints"
    assert trainer["device"] == ("cpu" if stack == "cpu" else "cuda")
    assert trainer["logger"] == ["console", "file", *filter(None, s.LOGGER.split(","))]
    assert (trainer["test_freq"], trainer["max_actor_ckpt_to_keep"]) == (s.TEST_FREQ or -1, None)
    assert config["data"]["val_files"] == str(s.data_dir / "dev.parquet")  # the test set chooses nothing
    assert (rollout["val_kwargs"]["n"], rollout["val_kwargs"]["do_sample"]) == (1, False)
    assert (rollout["name"], rollout["n"], rollout["response_length"]) == ("vllm", s.ROLLOUT_N, s.MAX_RESPONSE_LENGTH)
    assert config["actor_rollout_ref"]["model"]["lora_rank"] == s.LORA_RANK
    assert config["data"]["custom_cls"]["name"] == "Prompts" and config["data"]["return_raw_chat"]
    assert rollout["calculate_log_probs"]
    assert rollout["mode"] == "async" and rollout["agent"]["default_agent_loop"] == "single_turn_of_row"
    if version == "0.6.1":
        assert s.TRAIN_BATCH_SIZE * s.ROLLOUT_N % rollout["agent"]["num_workers"] == 0
        assert rollout["load_format"] == ("safetensors" if s.LORA_RANK else "dummy")
        assert rollout["layered_summon"] == bool(s.LORA_RANK)
        assert config["data"]["sampler"]["class_name"] == "Shuffled" and config["data"]["dataloader_num_workers"] == 0
        assert "v1" not in config["trainer"]
    else:
        assert config["trainer"]["v1"]["trainer_mode"] == (method if method in ("egpo", "dapo") else "task")
    reward = config if version == "0.6.1" else config["reward"]
    function = reward["custom_reward_function"]
    assert (function["path"], function["name"]) == (str(s.task_dir / "reward.py"), "compute_score")
    assert function.get("reward_kwargs") == ({"variant": s.REWARD} if s.REWARD else None)
    padded = stack == "cpu"
    used = actor["use_remove_padding"], config["actor_rollout_ref"]["model"]["use_remove_padding"]
    assert used == (not padded, not padded)
    assert rollout["max_model_len"] == s.MAX_PROMPT_LENGTH + s.MAX_RESPONSE_LENGTH  # of vLLM's memory
    tokens = (actor["ppo_max_token_len_per_gpu"], rollout["log_prob_max_token_len_per_gpu"])
    assert actor["use_dynamic_bsz"] == rollout["log_prob_use_dynamic_bsz"] == (stack != "cpu")
    assert stack == "cpu" or tokens == (s.MAX_TOKENS_PER_GPU, s.MAX_TOKENS_PER_GPU)


def test_a_training_of_several_at_a_time_has_few_workers(version, monkeypatch):
    s = settings_of(STACK_OF[version])
    before = rl(s)["actor_rollout_ref"]["rollout"]["agent"]["num_workers"]
    monkeypatch.setenv("SHARED_GPU", "4")  # launch/experiments.py
    config = rl(s)
    assert (before, config["actor_rollout_ref"]["rollout"]["agent"]["num_workers"]) == (8, 2)
    assert version == "0.6.1" or config["reward"]["num_workers"] == 2
    # Those of 0.6.1 share a batch evenly or not at all.
    odd = replace(s, TRAIN_BATCH_SIZE=9, MINI_BATCH_SIZE=9, ROLLOUT_N=5)
    monkeypatch.setenv("SHARED_GPU", "2")
    assert rl(odd)["actor_rollout_ref"]["rollout"]["agent"]["num_workers"] == (3 if version == "0.6.1" else 4)


@pytest.mark.parametrize("stack", settings.STACKS)
@pytest.mark.parametrize("changes", [{}, {"N_GPUS": "8", "LORA_RANK": "8"}])
def test_sft_composes_against_the_verl_of_the_stack(stack, changes):
    s = settings_of(stack, **changes)
    version = verl_versions.wanted(s)
    config = sft(s)
    assert (config["data"]["train_batch_size"], config["optim"]["lr"]) == (s.SFT_BATCH_SIZE, s.SFT_LR)
    assert config["data"]["custom_cls"]["name"] == "Demonstrations"
    assert config["model"]["lora_rank"] == s.LORA_RANK and config["trainer"]["seed"] == s.SEED
    assert (config["trainer"]["total_training_steps"], config["model"]["path"]) == (s.SFT_STEPS, "some/model")
    assert config["data"]["train_files"] == "/r/d.parquet"
    # 0.6.1 removes the only checkpoint before it writes the next.
    assert config["trainer"]["max_ckpt_to_keep"] == (2 if version == "0.6.1" else 1)
    assert config["model"]["use_remove_padding"] == (stack != "cpu")
    if version == "0.6.1":
        longest = s.MAX_PROMPT_LENGTH + s.MAX_RESPONSE_LENGTH
        assert config["data"]["use_dynamic_bsz"]
        assert config["data"]["max_token_len_per_gpu"] == s.MICRO_BATCH_SIZE * longest


def test_an_unknown_key_fails(version, monkeypatch):
    s = settings_of(STACK_OF[version])
    for key in ("actor_rollout_ref.actor.optim.lrr=1", "data.nope=1", "trainer.v2.mode=x"):
        with pytest.raises(SettingsError, match=re.escape(key.partition("=")[0].rpartition(".")[2])):
            rl(s, key)
    with pytest.raises(SettingsError, match="nope"):
        sft(s, "engine.nope=1")
    # Also where a stack has it.
    monkeypatch.setattr(settings.stack(s.STACK), "RL_OVERRIDES", ["actor_rollout_ref.rollout.nope=1"])
    with pytest.raises(SettingsError, match="nope"):
        rl(s)


def test_without_the_table_the_other_verl_refuses_our_names():
    """What the table is for: each of its entries is one that verl 0.6.1 refuses, or would do otherwise."""
    untranslated = verl_config.rl_overrides(settings_of("current"), "some/model", Path("/r"))
    with pytest.raises(SettingsError):
        verl_config.compose("ppo_trainer", untranslated, verl_package("0.6.1"))


@pytest.mark.parametrize("chosen", ["token", "none", "sequence"])
def test_rollout_correction_is_done_or_refused(version, chosen):
    s = settings_of(STACK_OF[version], ROLLOUT_CORRECTION=chosen)
    if (chosen, version) == ("sequence", "0.6.1"):
        said = r"^ROLLOUT_CORRECTION=sequence: STACK=a100 has verl 0\.6\.1, .* take STACK=current$"
        with pytest.raises(SettingsError, match=said):
            rl(s)
        return
    config = rl(s)
    correction = config["algorithm"]["rollout_correction"]
    assert config["actor_rollout_ref"]["rollout"]["calculate_log_probs"]
    assert correction["rollout_is"] == (None if chosen == "none" else "token")
    assert correction["rollout_is_threshold"] == 2.0
    assert correction["rollout_rs"] == ("seq_mean_k3" if chosen == "sequence" else None)


def test_the_stacks_of_verl_091_weigh_tokens_by_default():
    chosen = {stack: settings_of(stack).ROLLOUT_CORRECTION for stack in settings.STACKS}
    assert chosen == {"a100": "none", "current": "token", "cpu": "token"}


def test_the_critics_warm_up_is_in_both(version):
    for steps, key in (("0", 0), ("1", 2), ("5", 6)):  # verl's is the first step that trains the policy
        s = settings_of(STACK_OF[version], METHOD="ppo", CRITIC_WARMUP=steps, STEPS="9")
        assert rl(s)["trainer"]["critic_warmup"] == key
    assert rl(settings_of(STACK_OF[version]))["trainer"]["critic_warmup"] == 0  # without a critic
    with pytest.raises(SettingsError, match=r"^CRITIC_WARMUP=2: leaves none of STEPS=2 to the policy; set it lower$"):
        settings_of(STACK_OF[version], METHOD="ppo", CRITIC_WARMUP="2", STEPS="2")
    trainer = verl_package(version) / f"trainer/ppo/{'ray_trainer' if version == '0.6.1' else 'v1/trainer_base'}.py"
    assert "if self.config.trainer.critic_warmup <= self.global_steps:\n" in trainer.read_text()


def test_a_correction_that_would_do_nothing_is_refused(version):
    s = settings_of(STACK_OF[version])
    is_ = "algorithm.rollout_correction.rollout_is=token"
    assert rl(s, is_)["algorithm"]["rollout_correction"]["rollout_is"] == "token"
    with pytest.raises(
        SettingsError, match=r"^algorithm\.rollout_correction\.rollout_is=token: does nothing without .*$"
    ):
        rl(s, is_, "actor_rollout_ref.rollout.calculate_log_probs=False")


def test_truncated_and_dr_grpo_in_the_names_of_the_version(version):
    s = settings_of(STACK_OF[version], METHOD="dr_grpo", TRUNCATED="shaped", MAX_RESPONSE_LENGTH="100")
    config = rl(s)
    reward = config["reward_model" if version == "0.6.1" else "reward"]
    manager = reward["reward_manager"] if version == "0.6.1" else reward["reward_manager"]["name"]
    assert manager == "dapo" and reward["reward_kwargs"]["max_resp_len"] == 100
    assert reward["reward_kwargs"]["overlong_buffer_cfg"]["len"] == 20
    actor = config["actor_rollout_ref"]["actor"]
    assert actor["loss_agg_mode"] == "seq-mean-token-sum-norm"
    assert actor.get("loss_scale_factor") == (None if version == "0.6.1" else 100)
    masked = settings_of(STACK_OF[version], TRUNCATED="masked")
    agent = rl(masked)["actor_rollout_ref"]["rollout"]["agent"]
    assert agent["default_agent_loop"] == "single_turn_unless_truncated"


def test_what_shares_a_model_or_a_sequence_among_gpus_is_in_both(version):
    given = {"N_GPUS": "4", "TP": "2", "SP": "2", "OFFLOAD": "1", "LR_WARMUP": "7", "CLIP_HIGH": "0.28"}
    s = settings_of(STACK_OF[version], METHOD="ppo", STAGE="sft", **given)  # with SP it trains no RL
    config = rl(s)
    assert sft(s)["engine"]["ulysses_sequence_parallel_size"] == 2
    policy, critic = config["actor_rollout_ref"], config["critic"]
    assert policy["rollout"]["tensor_model_parallel_size"] == 2
    assert policy["actor"]["ulysses_sequence_parallel_size"] == policy["ref"]["ulysses_sequence_parallel_size"] == 2
    shared = critic if version == "0.6.1" else critic["fsdp"]  # of the one that its engine reads
    assert shared["ulysses_sequence_parallel_size"] == 2
    engines = [policy["actor"]["fsdp_config"], critic["fsdp"] if version == "0.9.1" else critic["model"]["fsdp_config"]]
    assert all(engine["param_offload"] and engine["optimizer_offload"] for engine in engines)
    assert policy["actor"]["optim"]["lr_warmup_steps"] == 7
    assert (policy["actor"]["clip_ratio_low"], policy["actor"]["clip_ratio_high"]) == (0.2, 0.28)
    gspo = rl(settings_of(STACK_OF[version], METHOD="gspo", CLIP_LOW="1e-3"))["actor_rollout_ref"]
    assert (gspo["actor"]["clip_ratio_low"], gspo["actor"]["clip_ratio_high"]) == (1e-3, 4e-4)


def test_the_users_arguments_are_not_translated():
    s = settings_of("a100")
    assert rl(s, "critic.model.fsdp_config.fsdp_size=2")["critic"]["model"]["fsdp_config"]["fsdp_size"] == 2
    with pytest.raises(SettingsError, match=r"critic\.fsdp"):
        rl(s, "critic.fsdp.fsdp_size=2")


def test_a_stacks_overrides_are_translated(version, monkeypatch):
    s = settings_of(STACK_OF[version])
    own = ["critic.fsdp.fsdp_size=2", "+critic.fsdp.own=3", "reward.reward_manager.name=dapo"]
    monkeypatch.setattr(settings.stack(s.STACK), "RL_OVERRIDES", own)
    config = rl(s)
    fsdp = config["critic"]["model"]["fsdp_config"] if version == "0.6.1" else config["critic"]["fsdp"]
    assert (fsdp["fsdp_size"], fsdp["own"]) == (2, 3)
    manager = (
        config["reward_model"]["reward_manager"] if version == "0.6.1" else config["reward"]["reward_manager"]["name"]
    )
    assert manager == "dapo"


def test_what_verl_061_cannot_do_is_refused_in_one_line(small_model, monkeypatch):
    def error(**changes) -> str:
        s = settings_of("a100", **changes)
        with pytest.raises(SettingsError) as raised:
            rl(s)
        return str(raised.value)

    monkeypatch.setattr(verl_config.reward_model, "check", lambda s: None)  # the small model is no classifier
    for method in REFUSED:
        said = rf"METHOD={method}\b.*: STACK=a100 has verl 0\.6\.1, .* take STACK=current"
        assert re.fullmatch(said, error(METHOD=method))
    assert error(REWARD_MODEL=str(small_model)).startswith("REWARD_MODEL: STACK=a100 has verl 0.6.1, ")
    s = settings_of("current", REWARD_MODEL=str(small_model))
    assert rl(s)["reward"]["reward_model"]["model_path"] == str(small_model)


def test_the_keys_of_dynamic_batches_are_in_both(version):
    s = settings_of(STACK_OF[version], METHOD="ppo", KL_COEF="0.01")
    rl(s, *(f"actor_rollout_ref.{key}={key.endswith('bsz') or 65536}" for key in TOKENS))
    sft(s, "data.use_dynamic_bsz=True", "data.max_token_len_per_gpu=65536")


# ---- which verl


@pytest.mark.parametrize("stack", settings.STACKS)
def test_a_stack_names_the_verl_of_its_list(stack):
    version = settings.stack(stack).VERL
    assert version in verl_versions.DIFFERENCES
    pinned = ROOT / "tasks/common/stacks" / stack / "requirements.txt"
    if pinned.exists():
        assert re.findall(r"^verl==([\d.]+)", pinned.read_text(), re.MULTILINE) == [version]


@pytest.mark.parametrize(("stack", "installed"), [("a100", "0.9.1"), ("current", "0.6.1"), ("cpu", None)])
def test_a_verl_other_than_the_stacks_is_named(stack, installed, monkeypatch):
    s = settings_of(stack)
    wanted = verl_versions.wanted(s)

    def version(name):
        if installed is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(SettingsError) as raised:
        verl_versions.check_installed(s)
    text = str(raised.value)
    assert text.startswith(f"STACK={stack}: needs verl {wanted}, ") and f"has {installed or 'none'}; " in text
    assert f"`make install STACK={stack}`" in text and "PYTHON" in text and "\n" not in text
    installed = wanted
    verl_versions.check_installed(s)


@pytest.mark.parametrize("goal", ["train", "sft", "config", "experiment"])
def test_a_stack_with_another_verl_ends_before_anything_is_made(goal, tmp_path):
    """With the real verl of the Python that runs the tests."""
    other = "a100" if importlib.metadata.version("verl") == "0.9.1" else "current"
    folder = tmp_path / "artifacts"
    result = make(goal, TASK="countdown", STACK=other, N_GPUS="1", MODEL="some/model", ARTIFACTS=str(folder))
    assert error_line(result).startswith(f"error: STACK={other}: needs verl ") and not folder.exists()


def test_only_the_verl_that_has_them_loads_the_trainers(version):
    from verl_tasks.launch.plan import trainer_module

    given = {"VERL_USE_EXTERNAL_MODULES": "some.module"}
    modules = trainer_module(settings_of(STACK_OF[version]), given)["VERL_USE_EXTERNAL_MODULES"]
    assert modules == ("some.module" if version == "0.6.1" else "some.module,verl_tasks.verl_plugins.trainer")
