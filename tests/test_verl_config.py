"""The override lists of every stage, composed strictly against verl's own config tree."""

import re
import shutil
from functools import partial
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tests import composed_once
from tests.exact_kl import gradients
from tests.helpers import ROOT, task_settings
from tests.wheels import verl_package
from verl_tasks.launch.train import check_method
from verl_tasks.settings import SettingsError, load_settings, method
from verl_tasks.training import verl_checks, verl_config


def settings_of(task, **changes):
    return task_settings(task, {"N_GPUS": "1", **changes})


def composed(config_name, overrides):
    config = verl_config.compose(config_name, overrides)
    return OmegaConf.to_container(config, resolve=True)


def test_a_composition_from_what_was_read_once_is_hydras_own(monkeypatch):
    """Of composed_once.py: the same values, references and strictness, also after another composition was changed."""
    s = settings_of("countdown", METHOD="egpo", LORA_RANK="8")
    rl = ("ppo_trainer", verl_config.rl_overrides(s, "some/model", Path("/r")))
    for name, overrides in (rl, ("sft_trainer_engine", verl_config.sft_overrides(s, "some/model", Path("/r"), "/d"))):
        verl_config.compose(name, overrides).trainer.logger.append("changed")
        again = verl_config.compose(name, overrides)
        with monkeypatch.context() as patch:
            composed_once.restore(patch)
            own = verl_config.compose(name, overrides)
        assert OmegaConf.to_yaml(again) == OmegaConf.to_yaml(own) and OmegaConf.is_struct(again)
        for config in (again, own):
            with pytest.raises(AttributeError):
                config.trainer.no_such_key = 1


@pytest.mark.parametrize(("truncated", "loop"), [("counted", "episode_of_row"), ("masked", "episode_unless_truncated")])
def test_a_multi_turn_task_has_the_agent_loop_of_episodes(truncated, loop):
    changes = {"MAX_TURNS": "3", "MAX_TURN_LENGTH": "40", "STEP_SECONDS": "2.5", "TRUNCATED": truncated}
    s = settings_of("calculator", STACK="cpu", **changes)
    config = composed("ppo_trainer", verl_config.rl_overrides(s, "some/model", Path("/runs/r")))
    assert config["data"]["episode"] == {"task": "calculator", "turns": 3, "turn_length": 40, "step_seconds": 2.5}
    agent = config["actor_rollout_ref"]["rollout"]["agent"]
    assert agent["default_agent_loop"] == loop
    assert loop in [each["name"] for each in OmegaConf.load(agent["agent_loop_config_path"])]
    assert config["reward"]["custom_reward_function"]["path"] is None


def config_of(*arguments, **changes):
    s = settings_of("countdown", **changes)
    return verl_config.compose("ppo_trainer", [*verl_config.rl_overrides(s, "some/model", Path("/r")), *arguments])


@pytest.mark.parametrize(
    ("argument", "named"),
    [
        ("algorithm.kl_ctrl.kl_coef=0.05", "algorithm.kl_ctrl.kl_coef=0.05: does nothing without use_kl_in_reward"),
        ("actor_rollout_ref.actor.kl_loss_coef=0.05", "actor.kl_loss_coef=0.05: does nothing without use_kl_loss"),
    ],
)
def test_a_kl_coefficient_that_would_do_nothing_is_refused(argument, named):
    with pytest.raises(SettingsError, match=named):
        verl_checks.check_composed(config_of(argument))
    verl_checks.check_composed(config_of(argument, "algorithm.use_kl_in_reward=True", KL_COEF="0.05"))


def test_lengths_of_args_that_vllm_would_cut_are_refused():
    for name in (
        "data.max_prompt",
        "data.max_response",
        "actor_rollout_ref.rollout.prompt",
        "actor_rollout_ref.rollout.response",
    ):
        with pytest.raises(
            SettingsError, match=r"^rollout\.max_model_len=\d+: cuts sequences of \d+ tokens; set MAX_PROMPT_"
        ):
            verl_checks.check_composed(config_of(f"{name}_length=4096"))
    longer = ["data.max_response_length=4096", "actor_rollout_ref.rollout.max_model_len=8192"]
    verl_checks.check_composed(config_of(*longer))


@pytest.mark.parametrize("name", ["gspo", "cispo"])
def test_one_mini_batch_is_warned_of_where_it_makes_the_method_another(name):
    warning = method(name).warning
    assert warning(config_of(METHOD=name)) is None
    one = warning(config_of(METHOD=name, MINI_BATCH_SIZE="8"))
    assert one.startswith(f"METHOD={name} ") and "MINI_BATCH_SIZE=2" in one
    again = config_of("actor_rollout_ref.actor.ppo_epochs=2", METHOD=name, MINI_BATCH_SIZE="8")
    assert warning(again) is None


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_a_clip_that_is_given_is_warned_of_where_nothing_is_clipped(name):
    one, warning = {"METHOD": name, "MINI_BATCH_SIZE": "8"}, method(name).warning
    assert warning(config_of(**one)) is None
    said = " with one mini-batch a step: all ratios are 1, which is plain policy gradient; MINI_BATCH_SIZE=2 makes 4"
    assert warning(config_of(CLIP_HIGH="0.3", **one)) == f"CLIP_HIGH=0.3{said}"
    both = config_of(CLIP_LOW="0.1", CLIP_HIGH="0.3", **one)
    assert warning(both) == f"CLIP_LOW=0.1 CLIP_HIGH=0.3{said}"
    assert warning(config_of(METHOD=name, CLIP_HIGH="0.3", MINI_BATCH_SIZE="2")) is None
    engines = "algorithm.rollout_correction.bypass_mode=True"  # probabilities of the engine are the old ones
    assert warning(config_of(engines, CLIP_HIGH="0.3", **one)) is None


@pytest.mark.parametrize(
    ("name", "loss", "aggregation", "clip", "estimator"),
    [
        ("grpo", "vanilla", "token-mean", (0.2, 0.2), "grpo"),
        ("egpo", "vanilla", "token-mean", (0.2, 0.2), "grpo"),
        ("ppo", "vanilla", "token-mean", (0.2, 0.2), "gae"),
        ("gspo", "gspo", "seq-mean-token-mean", (3e-4, 4e-4), "grpo"),
        ("dapo", "vanilla", "token-mean", (0.2, 0.28), "grpo"),
        ("dr_grpo", "vanilla", "seq-mean-token-sum-norm", (0.2, 0.2), "grpo"),
        ("cispo", "cispo", "token-mean", (1.0, 4.0), "grpo"),
        ("rloo", "vanilla", "token-mean", (0.2, 0.2), "rloo"),
        ("reinforce_pp", "vanilla", "token-mean", (0.2, 0.2), "reinforce_plus_plus_baseline"),
    ],
)
def test_what_each_method_sets(name, loss, aggregation, clip, estimator):
    config = config_of(METHOD=name)
    actor = config.actor_rollout_ref.actor
    assert (actor.policy_loss.loss_mode, actor.loss_agg_mode) == (loss, aggregation)
    assert (actor.clip_ratio_low, actor.clip_ratio_high) == clip
    assert config.algorithm.adv_estimator == estimator


def test_what_one_method_alone_sets():
    egpo, ppo, dapo, dr_grpo = (config_of(METHOD=name) for name in ("egpo", "ppo", "dapo", "dr_grpo"))
    assert (egpo.trainer.v1.egpo.egpo_lambda, egpo.trainer.v1.egpo.egpo_alpha) == (0.4, 2.0)
    assert (ppo.critic.model.path, ppo.critic.optim.lr) == ("some/model", 1e-5)
    assert ppo.critic.ppo_mini_batch_size == ppo.actor_rollout_ref.actor.ppo_mini_batch_size == 2
    filters = dapo.algorithm.filter_groups
    assert (filters.enable, filters.metric, filters.max_num_gen_batches) == (True, "score", 10)
    assert not dr_grpo.algorithm.norm_adv_by_std_in_grpo and dr_grpo.actor_rollout_ref.actor.loss_scale_factor == 64


def test_distillation_clips_in_a_loss_of_its_own():
    loss = config_of(METHOD="distill", CLIP_LOW="0.1", CLIP_HIGH="0.3").distillation.distillation_loss
    assert (loss.clip_ratio_low, loss.clip_ratio_high) == (0.1, 0.3)


def test_what_truncated_sets():
    counted, masked, shaped = (
        config_of(METHOD="gspo", TRUNCATED=how, MAX_RESPONSE_LENGTH="100") for how in ("counted", "masked", "shaped")
    )
    loops = [c.actor_rollout_ref.rollout.agent.default_agent_loop for c in (counted, masked, shaped)]
    assert loops == ["single_turn_of_row", "single_turn_unless_truncated", "single_turn_of_row"]
    assert [c.reward.reward_manager.name for c in (counted, masked, shaped)] == ["naive", "naive", "dapo"]
    kwargs = shaped.reward.reward_kwargs
    assert (kwargs.max_resp_len, kwargs.overlong_buffer_cfg.len, kwargs.overlong_buffer_cfg.enable) == (100, 20, True)
    assert config_of(METHOD="dapo").reward.reward_manager.name == "dapo"  # its default
    assert config_of(METHOD="dapo", TRUNCATED="counted").reward.reward_manager.name == "naive"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"METHOD": "distill", "TRUNCATED": "shaped"}, "TRUNCATED=shaped: METHOD=distill learns from no reward"),
        ({"REWARD_MODEL": "some/model", "TRUNCATED": "shaped"}, "TRUNCATED=shaped: REWARD_MODEL is the whole reward"),
    ],
)
def test_a_truncated_that_would_do_nothing_is_refused(changes, said):
    with pytest.raises(SettingsError, match=said):
        settings_of("countdown", **changes)


GROUPS = ("grpo", "dapo", "egpo")
BYPASS = "algorithm.rollout_correction.bypass_mode"


@pytest.mark.parametrize(
    ("name", "argument", "said"),
    [
        *((name, "actor_rollout_ref.rollout.n=1", "ROLLOUT_N=1: METHOD compares the samples") for name in GROUPS),
        ("rloo", "actor_rollout_ref.rollout.n=1", "ROLLOUT_N=1: METHOD compares the samples"),
        ("dapo", "reward.reward_model.enable=True", "METHOD=dapo: drops groups by the task's reward"),
        ("egpo", f"{BYPASS}=True", f"{BYPASS}=True: skips the pass"),
        ("distill", "actor_rollout_ref.rollout.temperature=0.9", "TEMPERATURE=0.9: METHOD=distill"),
        ("distill", "actor_rollout_ref.actor.use_kl_loss=True", "KL_COEF: METHOD=distill is held to the teacher"),
        ("distill", "data.seed=1", "TEACHER is empty: METHOD=distill learns from a model"),
    ],
)
def test_what_a_method_cannot_train_with_is_named(name, argument, said):
    found = method(name).problem(config_of(argument, METHOD=name))
    assert found.startswith(said) and "\n" not in found and re.search("; (take|set|leave) ", found)  # what to do


def test_a_teacher_with_another_tokenizer_is_refused(small_model, tmp_path):
    from transformers import AutoTokenizer

    def problem(teacher: Path) -> str | None:
        s = settings_of("countdown", METHOD="distill", TEACHER=str(teacher))
        overrides = verl_config.rl_overrides(s, small_model, Path("/r"))
        return method("distill").models_problem(verl_config.compose("ppo_trainer", overrides))

    assert problem(small_model) is None
    other = tmp_path / "other"
    shutil.copytree(small_model, other)
    tokenizer = AutoTokenizer.from_pretrained(other)
    tokenizer.add_tokens(["<more>"])
    tokenizer.save_pretrained(other)
    found = problem(other)
    assert found.startswith(f"TEACHER={other}: has another tokenizer than MODEL={small_model}")
    with pytest.raises(SettingsError, match=r"^TEACHER=/no/such: no such folder"):
        settings = settings_of("countdown", METHOD="distill", TEACHER="/no/such")
        verl_config.rl_overrides(settings, small_model, Path("/r"))


def test_rounds_of_self_play_have_a_kl_term():
    assert settings_of("countdown", SELF_PLAY_ROUNDS="2").KL_COEF > 0
    assert settings_of("countdown", SELF_PLAY_ROUNDS="2", KL_COEF="0").KL_COEF == 0
    assert settings_of("countdown").KL_COEF == 0


def test_paths_with_any_character_survive_the_override_grammar():
    s = settings_of("countdown")
    for folder in (r"/a b/it's, [x]={y}:$z/é", r"/a\b", r"/a\\b", r"/a\'b", "/a\\", "/a\nb"):
        config = composed("ppo_trainer", verl_config.rl_overrides(s, folder, Path(folder)))
        assert config["trainer"]["default_local_dir"] == str(Path(folder) / "checkpoints")
        assert config["actor_rollout_ref"]["model"]["path"] == folder


@pytest.mark.parametrize("path", ["/a/${b}", "/a/\\${oc.env:HOME}", "${"])
def test_a_path_that_verls_config_would_read_as_a_reference_is_refused(path):
    s = settings_of("countdown")
    for model, folder in ((path, "/r"), ("m", path)):
        with pytest.raises(SettingsError, match=r"`\$\{` is a reference in verl's config; take another path$"):
            verl_config.rl_overrides(s, model, Path(folder))


@pytest.mark.parametrize(
    ("argument", "variable"),
    [
        ("trainer.default_local_dir=/elsewhere", "ARTIFACTS"),
        ("trainer.total_training_steps=3", "STEPS"),
        ("trainer.save_freq=-1", "SAVE_FREQ"),
        ("trainer.logger=[console,wandb]", "LOGGER"),
        ("actor_rollout_ref.model.path=/another", "MODEL"),
        ("actor_rollout_ref.model.lora_rank=8", "LORA_RANK"),
        ("actor_rollout_ref.model.lora_alpha=8", "LORA_ALPHA"),
    ],
)
def test_arguments_that_leave_a_run_without_metrics_or_of_another_model_are_refused(argument, variable):
    """The training would take its hours, and end without what it is continued and evaluated from."""
    with pytest.raises(SettingsError) as error:
        check_method(settings_of("countdown"), [argument])
    name = argument.partition("=")[0].removeprefix("actor_rollout_ref.")
    assert str(error.value).startswith(f"ARGS: {name}=") and str(error.value).endswith(f"; set {variable}")


@pytest.mark.parametrize("given", [{"METHOD": "egpo"}, {"METHOD": "dapo"}, {"ASYNC": "colocate"}, {}])
def test_arguments_do_not_choose_another_trainer(given):
    """verl's own checks no reward, keeps no best checkpoint, and gives EGPO no entropy."""
    s = settings_of("countdown", **given)
    for argument in ("trainer.v1.trainer_mode=sync", "trainer.use_v1=False"):
        with pytest.raises(SettingsError, match=rf"^ARGS: {re.escape(argument)}: "):
            check_method(s, [argument])
    assert check_method(s, [f"trainer.v1.trainer_mode={verl_config.trainer_of(s)[1]}"])


def test_arguments_may_save_more_often():
    assert check_method(settings_of("countdown"), ["trainer.save_freq=1", "trainer.logger=[file,console]"])


ACTOR = "actor_rollout_ref.actor"
NOT_NULL = ["trainer.save_freq", "trainer.test_freq", "trainer.logger", "data.train_batch_size"]
NOT_NULL += ["algorithm.kl_ctrl.kl_coef", "actor_rollout_ref.rollout.gpu_memory_utilization"]
NOT_NULL += [f"{ACTOR}.kl_loss_coef", f"{ACTOR}.use_dynamic_bsz"]
OTHER_ENGINES = ["++model_engine = 'megatron'", "actor@actor_rollout_ref.actor='veomni_actor'"]
OTHER_ENGINES += ["critic=torchtitan_critic", "+engine@actor_rollout_ref.ref.fsdp_config=megatron"]


@pytest.mark.medium
@pytest.mark.parametrize(
    ("argument", "said"),
    [
        (f"{ACTOR}.optim.lr=abc", f"ARGS: {ACTOR}.optim.lr=abc: must be a number, as 1e-05 is"),
        ("trainer.save_freq=true", "ARGS: trainer.save_freq=True: must be a number, as 4 is"),
        (f"{ACTOR}.use_kl_loss=no", f"ARGS: {ACTOR}.use_kl_loss=no: must be true or false, as False is"),
        (f"{ACTOR}.loss_agg_mode=true", f"ARGS: {ACTOR}.loss_agg_mode=True: must be text or a list, as token-mean is"),
        ("trainer.logger=console", ""),
        ("data.train_files=[a,b]", ""),
        (f"{ACTOR}.use_kl_loss=1", ""),
        (f"{ACTOR}.entropy_coeff=0.01", ""),  # 0 in verl's yaml
        ("trainer.default_hdfs_dir=/x", ""),  # null there
        (f"{ACTOR}.ppo_micro_batch_size=null", ""),  # null there too
        *((f"{key}=null", f"ARGS: {key}=None: must be ") for key in NOT_NULL),
        ("~trainer.save_freq", "ARGS: ~trainer.save_freq: verl reads its keys, so none is deleted"),
        ("trainer=null", "ARGS: trainer=None: must be a group of keys"),
        ("data=null", "verl's config refuses an override (ARGS?): Config group override must be"),
        (f"{ACTOR}.optim.lr=nan", f"ARGS: {ACTOR}.optim.lr=nan: must be a number"),
        ("+data.own=x", ""),
        ("trainer.experiment_name=${trainer.project_name}", ""),
        (
            "trainer.experiment_name=${no.such}",
            "verl's config refuses an override (ARGS?): Interpolation key 'no.such'",
        ),
        ("trainer=5", "ARGS: trainer=5: must be a group of keys, as {"),
        *((a, f"ARGS: {a}: all stacks train with FSDP") for a in OTHER_ENGINES),
        ("model_engine='dp'", ""),
        ("ref@actor_rollout_ref.ref=dp_ref", ""),
        ("data=legacy_data", ""),
    ],
)
def test_an_argument_of_another_type_than_its_default_is_refused(argument, said):
    ours = verl_config.rl_overrides(settings_of("countdown"), "some/model", Path("/r"))
    if not said:
        verl_config.compose("ppo_trainer", ours, arguments=[argument])
        return
    with pytest.raises(SettingsError) as error:
        verl_config.compose("ppo_trainer", ours, arguments=[argument])
    assert str(error.value).startswith(said) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "argument",
    [
        "trainer.n_gpus_per_node=0",
        "actor_rollout_ref.rollout.n=0",
        "actor_rollout_ref.rollout.n=1.5",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=-1",
        "actor_rollout_ref.rollout.max_model_len=8192.5",
        f"{ACTOR}.ulysses_sequence_parallel_size=0",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=0",
        "data.max_response_length=-8",
        "actor_rollout_ref.rollout.agent.num_workers=0",
        "trainer.total_epochs=0",
    ],
)
def test_a_count_of_nothing_is_refused(argument):
    refused(argument, f"{argument}: must be a whole number above 0")


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("rollout.temperature=-1", "must be above 0"),
        ("rollout.temperature=0", "must be above 0"),
        ("rollout.top_p=0", "must be above 0, at most 1"),
        ("rollout.gpu_memory_utilization=2", "must be above 0, at most 1"),
        ("rollout.val_kwargs.top_p=1.5", "must be above 0, at most 1"),
        ("rollout.val_kwargs.temperature=-1", "must be 0 or above"),
        ("actor.optim.lr=-1", "must be above 0"),
        ("rollout.name=sglang", "all stacks sample with vLLM; leave it out"),
    ],
)
def test_a_value_that_only_an_engine_would_refuse_is_refused_at_once(argument, said):
    named = f"ARGS: {argument}" if "sglang" in argument else f"actor_rollout_ref.{argument}"
    refused(f"actor_rollout_ref.{argument}", f"{named}: {said}")


def refused(argument: str, said: str) -> None:
    ours = verl_config.rl_overrides(settings_of("countdown"), "some/model", Path("/r"))
    config = verl_config.compose("ppo_trainer", ours, arguments=[argument])
    with pytest.raises(SettingsError, match=f"^{re.escape(said)}$"):
        verl_checks.check_composed(config)


SHARED = "ulysses_sequence_parallel_size"
TWO = {"STACK": "current", "N_GPUS": "2"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        *(
            ([f"{name}.{SHARED}=3"], f"{name}.{SHARED}=3: must divide N_GPUS x NNODES = 2")
            for name in (ACTOR, f"{ACTOR}.fsdp_config", "actor_rollout_ref.ref", "critic", "critic.fsdp")
        ),
        (
            [f"{ACTOR}.{SHARED}=2", "actor_rollout_ref.model.use_remove_padding=False"],
            f"{ACTOR}.{SHARED}=2: is for sequences without padding; leave use_remove_padding on",
        ),
        (
            [f"critic.fsdp.{SHARED}=2", "critic.model.use_remove_padding=False"],
            f"critic.fsdp.{SHARED}=2: is for sequences without padding; leave use_remove_padding on",
        ),
        (
            [f"{ACTOR}.{SHARED}=2", "actor_rollout_ref.model.override_config.attn_implementation=sdpa"],
            f"{ACTOR}.{SHARED}=2: attn_implementation=sdpa does not share a sequence; leave that out",
        ),
    ],
)
def test_gpus_that_would_not_share_a_sequence_are_refused(arguments, said):
    with pytest.raises(SettingsError, match=f"^{re.escape(said)}$"):
        verl_checks.check_composed(config_of(*arguments, **TWO))
    verl_checks.check_composed(config_of(SP="2", **TWO))
    verl_checks.check_composed(config_of(*arguments[1:], **TWO))


@pytest.mark.parametrize("name", [f"{ACTOR}.fsdp_config", "critic"])
def test_arguments_share_no_sequence_where_the_stack_cannot(name, monkeypatch):
    monkeypatch.setattr(verl_config, "compose", partial(verl_config.compose, package=verl_package("0.6.1")))
    s = settings_of("countdown", STACK="a100", N_GPUS="2")
    with pytest.raises(SettingsError, match=rf"^{re.escape(name)}\.{SHARED}=2: STACK=a100 .* take STACK=current$"):
        verl_config.rl_config(s, [f"{name}.{SHARED}=2"])
    verl_config.rl_config(s, [f"{name}.{SHARED}=1"])


@pytest.mark.parametrize("name", ["actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic"])
def test_another_trainer_than_fsdp_is_refused(name):
    said = rf"^ARGS: {name.split('.')[-1]}\.strategy=veomni: all stacks train with FSDP; leave it out$"
    with pytest.raises(SettingsError, match=said):
        verl_checks.check_composed(config_of(f"{name}.strategy=veomni"))
    verl_checks.check_composed(config_of(f"{name}.strategy=fsdp"))


def test_the_mapping_to_verls_keys_exists_once():
    """No hydra key of verl stands in a second file but the stacks' and methods' own and the generations' table."""
    key = "actor_rollout_ref."
    files = [p for p in ROOT.glob("tasks/**/*") if p.suffix in (".py", ".sh") and key in p.read_text()]
    allowed = {f"tasks/common/training/verl_{name}.py" for name in ("config", "checks", "versions")}
    allowed |= {"tasks/common/stacks", "tasks/common/training/methods", "tasks/common/verl_plugins/verl_061"}
    strays = [f for f in files if not str(f.relative_to(ROOT)).startswith(tuple(allowed))]
    assert files and not strays


@pytest.mark.parametrize(("limit", "sequences", "size"), [(32, 64, 32), (32, 48, 24), (32, 4, 4), (1, 7, 1), (5, 7, 1)])
def test_micro_batches_divide_the_sequences(limit, sequences, size):
    assert verl_config.micro_batch(limit, sequences) == size


def test_training_reads_the_file_that_is_given():
    for given in ("", "/probe/signal.parquet"):
        s = settings_of("countdown", TRAIN_FILE=given)
        config = composed("ppo_trainer", verl_config.rl_overrides(s, "m", Path("/r")))
        assert config["data"]["train_files"] == (given or str(s.data_dir / "train.parquet"))


@pytest.mark.parametrize("stage", ["probe", "batch"])
def test_temperature_given_to_an_evaluation_is_that_of_the_evaluation(stage):
    s = settings_of("countdown", STAGE=stage, TEMPERATURE="0.5")
    assert (s.EVAL_TEMPERATURE, s.TEMPERATURE) == (0.5, 1.0)
    assert settings_of("countdown", STAGE="train", TEMPERATURE="0.5").TEMPERATURE == 0.5


def test_a_probe_takes_more_samples_of_fewer_prompts():
    defaults = {stage: settings_of("countdown", STAGE=stage) for stage in ("eval", "probe", "batch")}
    assert [(s.N, s.LIMIT) for s in defaults.values()] == [(2, 0), (16, 64), (1, 0)]
    assert settings_of("countdown", STAGE="probe", N="3", LIMIT="0").N == 3


def test_the_kl_as_a_loss_has_the_gradient_of_the_kl():
    """By verl's own function; its estimator without the plus, k3, has another. For verl 0.6.1: test_a100_stack.py."""
    from verl.trainer.ppo.core_algos import kl_penalty

    kind = config_of(KL_COEF="0.01").actor_rollout_ref.actor.kl_loss_type
    exact, estimated, difference = gradients(kl_penalty, kind)
    assert estimated.tolist() == pytest.approx(exact.tolist(), abs=1e-12) and difference < 1e-12
    exact, biased, _ = gradients(kl_penalty, "low_var_kl")
    assert biased.tolist() != pytest.approx(exact.tolist(), abs=0.01)


@pytest.mark.parametrize(("chosen", "preset"), [("token", "token_is"), ("sequence", "k3_rs_token_tis")])
@pytest.mark.parametrize("method", ["grpo", "ppo"])
def test_rollout_correction_is_a_preset_of_verl(method, chosen, preset):
    from verl.trainer.config import RolloutCorrectionConfig

    config = config_of(METHOD=method, ROLLOUT_CORRECTION=chosen)
    verls = getattr(RolloutCorrectionConfig, f"decoupled_{preset}")()
    for name, value in config.algorithm.rollout_correction.items():
        assert value == getattr(verls, name), name
    verl_checks.check_composed(config)


def test_a_correction_that_bypass_mode_would_leave_out_is_refused():
    bypass = "algorithm.rollout_correction.bypass_mode=True"
    with pytest.raises(SettingsError, match=r"bypass_mode=True: rollout_is=token then does nothing; set ROLLOUT_COR"):
        verl_checks.check_composed(config_of(bypass))
    verl_checks.check_composed(config_of(bypass, ROLLOUT_CORRECTION="none"))


def test_mini_batches_are_shuffled_the_critics_too():
    config = config_of(METHOD="ppo")
    assert config.actor_rollout_ref.actor.shuffle and config.critic.shuffle


# ---- what a GPU training would wait for, for ever


def of_current(*arguments: str, **changes):
    given = {"STACK": "current", "TASK": "gsm8k", "STAGE": "train", "N_GPUS": "1", "MODEL": "embedded"}
    return verl_config.rl_config(load_settings(given | changes), arguments)


def test_vllm_reads_the_base_of_an_adapter_itself():
    """verl would send it as float32 tensors on the CPU, of which one above the bucket never arrives."""
    assert of_current(LORA_RANK="8").actor_rollout_ref.rollout.load_format == "auto"
    assert of_current().actor_rollout_ref.rollout.load_format == "dummy"
    source = (verl_package("0.9.1") / "workers/engine_workers.py").read_text()
    assert 'self.base_sync_done: bool = "dummy" not in self.config.rollout.load_format' in source


def test_vllm_compiles_nothing_where_all_prompts_come_at_once():
    """With its default of verl's, full and piecewise graphs, mode 0 would have no graph at all."""
    graphs = of_current().actor_rollout_ref.rollout.engine_kwargs.vllm.compilation_config
    assert graphs == {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    for other in ({"ASYNC": "colocate"}, {"TASK": "calculator"}):
        assert "compilation_config" not in of_current(**other).actor_rollout_ref.rollout.engine_kwargs.vllm


@pytest.mark.parametrize(("gpus", "cores", "cpus"), [("1", 4, 12), ("2", 4, 15), ("8", 8, 33), ("1", 64, 64)])
def test_a_training_has_the_cpus_of_ray_that_it_holds(gpus, cores, cpus, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    assert of_current(N_GPUS=gpus).ray_kwargs.ray_init.num_cpus == cpus


def test_fewer_cpus_of_ray_than_a_training_holds_are_refused():
    few, units = "ray_kwargs.ray_init.num_cpus=8", "transfer_queue.backend.SimpleStorage.num_data_storage_units"
    with pytest.raises(SettingsError, match="num_cpus=8: a training holds 12 of Ray's CPUs, and would wait"):
        of_current(few)
    with pytest.raises(SettingsError, match="holds 15"):
        of_current("ray_kwargs.ray_init.num_cpus=14", METHOD="distill", TEACHER="owner/teacher")
    assert of_current(few, f"{units}=4").ray_kwargs.ray_init.num_cpus == 8


def test_eight_bits_are_verls_quantization_of_the_rollout():
    same = config_of(STACK="current", N_GPUS="1")
    assert same.actor_rollout_ref.rollout.quantization is None
    config = config_of(STACK="current", N_GPUS="1", ROLLOUT_DTYPE="fp8")
    assert config.actor_rollout_ref.rollout.quantization == "fp8"
