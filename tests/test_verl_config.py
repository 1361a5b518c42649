"""The override lists of every stage, composed strictly against verl's own config tree."""

import itertools
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tasks.common.settings import METHODS, SettingsError, load_settings, method
from tasks.common.training import verl_config
from tests.helpers import ROOT, TASKS, exported, stacks

RL_METHODS = [name for name in METHODS if name != "dpo"]
STACKS = stacks()


def settings_of(task, monkeypatch, **changes):
    environment = exported(ROOT / "tasks" / task / "train.sh", {"N_GPUS": "1", **changes})
    return load_settings(environment)


def composed(config_name, overrides):
    config = verl_config.compose(config_name, overrides)
    return OmegaConf.to_container(config, resolve=True)


CHANGES = [{}, {"KL_COEF": "0.01"}, {"LORA_RANK": "8"}, {"LOGGER": "wandb,tensorboard"}]
# Each method with each of CHANGES, and each task on each stack: a composition takes half a second.
RUNS = list(itertools.product(RL_METHODS, CHANGES))
PLACES = list(itertools.product(TASKS, STACKS))
COVERING = [PLACES[i % len(PLACES)] + RUNS[i % len(RUNS)] for i in range(max(len(PLACES), len(RUNS)))]


@pytest.mark.parametrize(("task", "stack", "method", "changes"), COVERING)
def test_rl_overrides_compose(task, stack, method, changes, monkeypatch):
    s = settings_of(task, monkeypatch, STACK=stack, METHOD=method, **changes)
    config = composed("ppo_trainer", verl_config.rl_overrides(s, "some/model", Path("/runs/r")))
    actor, rollout = config["actor_rollout_ref"]["actor"], config["actor_rollout_ref"]["rollout"]
    assert config["data"]["train_batch_size"] == s.TRAIN_BATCH_SIZE
    assert actor["optim"]["lr"] == s.LR
    assert actor["ppo_mini_batch_size"] == s.MINI_BATCH_SIZE
    algorithm = config["algorithm"]
    if method == "ppo":  # the KL is taken off the reward, the others add it to the loss
        assert (algorithm["use_kl_in_reward"], algorithm["kl_ctrl"]["kl_coef"]) == (s.KL_COEF > 0, s.KL_COEF)
        assert not actor["use_kl_loss"]
    else:
        assert (actor["use_kl_loss"], actor["kl_loss_coef"]) == (s.KL_COEF > 0, s.KL_COEF)
        assert actor["kl_loss_type"] == "low_var_kl" and not algorithm["use_kl_in_reward"]
    assert rollout["name"] == "vllm"
    assert rollout["n"] == s.ROLLOUT_N
    assert rollout["response_length"] == s.MAX_RESPONSE_LENGTH
    assert config["actor_rollout_ref"]["model"]["lora_rank"] == s.LORA_RANK
    assert config["reward"]["custom_reward_function"]["path"] == str(s.task_dir / "reward.py")
    assert config["trainer"]["total_training_steps"] == s.STEPS
    assert config["trainer"]["default_local_dir"] == "/runs/r/checkpoints"
    assert config["trainer"]["device"] == ("cpu" if stack == "cpu" else "cuda")
    assert config["trainer"]["logger"] == ["console", "file", *filter(None, s.LOGGER.split(","))]


def config_of(monkeypatch, *arguments, **changes):
    s = settings_of("countdown", monkeypatch, **changes)
    return verl_config.compose("ppo_trainer", [*verl_config.rl_overrides(s, "some/model", Path("/r")), *arguments])


def test_what_each_method_sets(monkeypatch):
    grpo, gspo, egpo, ppo = (config_of(monkeypatch, METHOD=name) for name in ("grpo", "gspo", "egpo", "ppo"))
    assert [c.algorithm.adv_estimator for c in (grpo, gspo, egpo, ppo)] == ["grpo", "grpo", "grpo", "gae"]
    assert [c.trainer.v1.trainer_mode for c in (grpo, gspo, egpo, ppo)] == ["task", "task", "egpo", "task"]
    loss = gspo.actor_rollout_ref.actor
    assert (loss.policy_loss.loss_mode, loss.loss_agg_mode) == ("gspo", "seq-mean-token-mean")
    assert (loss.clip_ratio_low, loss.clip_ratio_high) == (3e-4, 4e-4)
    assert grpo.actor_rollout_ref.actor.policy_loss.loss_mode == "vanilla"
    assert (egpo.trainer.v1.egpo.egpo_lambda, egpo.trainer.v1.egpo.egpo_alpha) == (0.4, 2.0)
    assert (ppo.critic.model.path, ppo.critic.optim.lr) == ("some/model", 1e-5)
    assert ppo.critic.ppo_mini_batch_size == ppo.actor_rollout_ref.actor.ppo_mini_batch_size == 2


@pytest.mark.parametrize(
    ("argument", "named"),
    [
        ("algorithm.kl_ctrl.kl_coef=0.05", "algorithm.kl_ctrl.kl_coef=0.05: does nothing without use_kl_in_reward"),
        ("actor_rollout_ref.actor.kl_loss_coef=0.05", "actor.kl_loss_coef=0.05: does nothing without use_kl_loss"),
    ],
)
def test_a_kl_coefficient_that_would_do_nothing_is_refused(argument, named, monkeypatch):
    with pytest.raises(SettingsError, match=named):
        verl_config.check(config_of(monkeypatch, argument))
    verl_config.check(config_of(monkeypatch, argument, "algorithm.use_kl_in_reward=True", KL_COEF="0.05"))


@pytest.mark.parametrize("method", RL_METHODS)
@pytest.mark.parametrize("coefficient", ["0", "0.001", "0.05"])
def test_our_own_kl_coefficient_is_accepted(method, coefficient, monkeypatch):
    verl_config.check(config_of(monkeypatch, METHOD=method, KL_COEF=coefficient))


def test_gspo_with_one_mini_batch_is_warned_of(monkeypatch):
    gspo = method("gspo")
    assert gspo.warning(config_of(monkeypatch, METHOD="gspo")) is None
    assert "MINI_BATCH_SIZE=2" in gspo.warning(config_of(monkeypatch, METHOD="gspo", MINI_BATCH_SIZE="8"))
    again = config_of(monkeypatch, "actor_rollout_ref.actor.ppo_epochs=2", METHOD="gspo", MINI_BATCH_SIZE="8")
    assert gspo.warning(again) is None


def test_rounds_of_self_play_have_a_kl_term(monkeypatch):
    assert settings_of("countdown", monkeypatch, SELF_PLAY_ROUNDS="2").KL_COEF > 0
    assert settings_of("countdown", monkeypatch, SELF_PLAY_ROUNDS="2", KL_COEF="0").KL_COEF == 0
    assert settings_of("countdown", monkeypatch).KL_COEF == 0


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("stack", STACKS)
def test_sft_overrides_compose(task, stack, monkeypatch):
    s = settings_of(task, monkeypatch, STACK=stack)
    config = composed(
        "sft_trainer_engine", verl_config.sft_overrides(s, "some/model", Path("/runs/r"), Path("/r/d.parquet"))
    )
    assert config["data"]["train_batch_size"] == s.SFT_BATCH_SIZE
    assert config["optim"]["lr"] == s.SFT_LR
    assert config["trainer"]["total_training_steps"] == s.SFT_STEPS
    assert config["model"]["path"] == "some/model"
    assert config["data"]["train_files"] == "/r/d.parquet"


@pytest.mark.parametrize("typo", ["actor_rollout_ref.actor.optim.lrr=1", "trainer.step=3", "data.nope=1", "data.seed"])
def test_a_typo_in_an_override_fails(typo):
    with pytest.raises(SettingsError):
        verl_config.compose("ppo_trainer", [typo])


def test_paths_with_any_character_survive_the_override_grammar(monkeypatch):
    s = settings_of("countdown", monkeypatch)
    run_dir = Path("/a b/it's, [x]={y}:$z/é")
    config = composed("ppo_trainer", verl_config.rl_overrides(s, "m", run_dir))
    assert config["trainer"]["default_local_dir"] == str(run_dir / "checkpoints")


def test_the_last_override_is_the_users(monkeypatch):
    s = settings_of("countdown", monkeypatch)
    overrides = [*verl_config.rl_overrides(s, "m", Path("/r")), "trainer.total_epochs=1"]
    assert composed("ppo_trainer", overrides)["trainer"]["total_epochs"] == 1


def test_the_mapping_to_verls_keys_exists_once():
    """No hydra key of verl stands in a second file but the stacks' and methods' own and the generations' table."""
    key = "actor_rollout_ref."
    files = [p for p in ROOT.glob("tasks/**/*") if p.suffix in (".py", ".sh") and key in p.read_text()]
    allowed = {"tasks/common/training/verl_config.py", "tasks/common/training/verl_versions.py"}
    allowed |= {"tasks/common/stacks", "tasks/common/training/methods"}
    strays = [f for f in files if not str(f.relative_to(ROOT)).startswith(tuple(allowed))]
    assert files and not strays


def test_stack_defaults_are_overridden_by_the_environment(monkeypatch):
    assert settings_of("countdown", monkeypatch, LR="2e-6", ROLLOUT_N="16").LR == 2e-6


@pytest.mark.parametrize(("limit", "sequences", "size"), [(32, 64, 32), (32, 48, 24), (32, 4, 4), (1, 7, 1), (5, 7, 1)])
def test_micro_batches_divide_the_sequences(limit, sequences, size):
    assert verl_config.micro_batch(limit, sequences) == size


def test_training_reads_the_file_that_is_given(monkeypatch):
    for given in ("", "/probe/signal.parquet"):
        s = settings_of("countdown", monkeypatch, TRAIN_FILE=given)
        config = composed("ppo_trainer", verl_config.rl_overrides(s, "m", Path("/r")))
        assert config["data"]["train_files"] == (given or str(s.data_dir / "train.parquet"))


@pytest.mark.parametrize("stage", ["probe", "eval", "compare", "chat", "batch"])
def test_temperature_given_to_an_evaluation_is_that_of_the_evaluation(stage, monkeypatch):
    s = settings_of("countdown", monkeypatch, STAGE=stage, TEMPERATURE="0.5")
    assert (s.EVAL_TEMPERATURE, s.TEMPERATURE) == (0.5, 1.0)
    assert settings_of("countdown", monkeypatch, STAGE="train", TEMPERATURE="0.5").TEMPERATURE == 0.5


def test_a_probe_takes_more_samples_of_fewer_prompts(monkeypatch):
    defaults = {stage: settings_of("countdown", monkeypatch, STAGE=stage) for stage in ("eval", "probe", "batch")}
    assert [(s.N, s.LIMIT) for s in defaults.values()] == [(2, 0), (16, 64), (1, 0)]
    assert settings_of("countdown", monkeypatch, STAGE="probe", N="3", LIMIT="0").N == 3
