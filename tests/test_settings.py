"""settings.py: values, where they come from, what they imply."""

import os
import re
import shutil
import subprocess
from dataclasses import fields, replace

import pytest

from tests.helpers import MULTI_TURN, TASKS, exported
from verl_tasks import settings, visible_gpus
from verl_tasks.digest import _digest
from verl_tasks.launch.help import variables
from verl_tasks.launch.task import stack_environment
from verl_tasks.settings import (
    METHODS,
    ROOT,
    STACKS,
    Command,
    Settings,
    SettingsError,
    code_digest,
    fingerprint,
    load_settings,
    values_of,
)
from verl_tasks.training.methods import gspo


def pairs(text: str) -> dict[str, str]:
    return {name: value for name, _, value in (word.partition("=") for word in text.split())}


VALUES = pairs("""
LR_WARMUP=0 CLIP_LOW=0.1 CLIP_HIGH=0.3 TP=1 SP=1 OFFLOAD=0 TASK=countdown STACK=cpu MODEL=embedded INIT=sft
SOURCE=generate FILE= MAX_SAMPLES=0 DIFFICULTY=easy TRAIN_SIZE=64 TEST_SIZE=16 TEST_SHARE=1 DEV_SIZE=8 SFT_SIZE=32
SFT_SOURCE=task TRAIN_FILE= PAIRS_FILE= PAIRS_COLUMNS= SAMPLED_PROMPTS=16 GOLD=warn SEED=42 TRAIN_SEED=42
METHOD=grpo REWARD= REWARD_MODEL= TEACHER= TRUNCATED=counted STEPS=10 SELF_PLAY_ROUNDS=1 TRAIN_BATCH_SIZE=8
MINI_BATCH_SIZE=4 LR=3e-5 CRITIC_LR=1e-5 CRITIC_WARMUP=1 KL_COEF=0 EGPO_LAMBDA=0.4 EGPO_ALPHA=2.0
ROLLOUT_CORRECTION=token DPO_BETA=0.1 DPO_EPOCHS=1 SFT_STEPS=16 SFT_LOSS=0 SFT_BATCH_SIZE=8 SFT_LR=3e-4 ROLLOUT_N=4
TEMPERATURE=1.0 ROLLOUT_DTYPE=same ASYNC=off STALENESS=2 ROLLOUT_GPUS=0
MAX_PROMPT_LENGTH=128 MAX_RESPONSE_LENGTH=64 MAX_TURNS=4 MAX_TURN_LENGTH=32 STEP_SECONDS=10 AGENT_IMAGE= N_GPUS=1
MAX_TOKENS_PER_GPU=0 NNODES=1 MICRO_BATCH_SIZE=32 GPU_MEMORY_UTILIZATION=0.5 LORA_RANK=0 LORA_ALPHA=32 N=4 LIMIT=0
GREEDY=1 EVAL_TEMPERATURE=1.0 TOP_P=1.0 MAX_NEW_TOKENS=64 EVAL_SEED=0 RUN= SAVE_FREQ=5 TEST_FREQ=5 KEEP=1 PATIENCE=0
START_MINUTES=30 ABORT_ON= WANDB=0 LOGGER=
""")
NAMES = [f.name for f in fields(Settings)]
INTEGERS = [f.name for f in fields(Settings) if f.type is int]
FLOATS = [f.name for f in fields(Settings) if f.type is float]
ZERO_ALLOWED = pairs("""
CRITIC_WARMUP DEV_SIZE EGPO_LAMBDA EVAL_SEED EVAL_TEMPERATURE GREEDY KEEP KL_COEF LIMIT LORA_RANK LR_WARMUP
MAX_SAMPLES MAX_TOKENS_PER_GPU MINI_BATCH_SIZE OFFLOAD PATIENCE ROLLOUT_GPUS SAMPLED_PROMPTS SEED SFT_LOSS SFT_SIZE
START_MINUTES TEST_FREQ TEST_SIZE TRAIN_SEED TRAIN_SIZE WANDB
""").keys()


def load(**changes):
    """Settings of a small run with some variables changed."""
    return load_settings(VALUES | changes)


def error_of(**changes):
    """The message of the SettingsError that ``changes`` cause."""
    with pytest.raises(SettingsError) as error:
        load(**changes)
    return str(error.value)


# ---- values


def test_every_field_is_read_with_its_type():
    settings = load()
    assert set(VALUES) == set(NAMES)
    for f in fields(Settings):
        value = getattr(settings, f.name)
        assert type(value) is f.type
        assert value == f.type(VALUES[f.name])


@pytest.mark.parametrize("name", ["TASK", "STACK"])
def test_task_and_stack_have_no_default(name):
    with pytest.raises(SettingsError, match=rf"^{name}=: [^\n]*$"):
        load_settings({key: value for key, value in VALUES.items() if key != name})


@pytest.mark.parametrize(
    "name, value",
    [(name, value) for name in INTEGERS + FLOATS for value in ("abc", "-1")]
    + [("STEPS", value) for value in ("1.5", "1e3", "nan", "0x10", "08", "00", "+1", "1_0", "٤")]
    + [("LR", value) for value in ("1,5", "-1e-9", "nan", "inf", "-inf", "1e999", "1_0", "٤")]
    + [(name, "0") for name in INTEGERS + FLOATS if name not in ZERO_ALLOWED]
    + [("TEST_SIZE", "1.5"), ("GPU_MEMORY_UTILIZATION", "1.01"), ("GPU_MEMORY_UTILIZATION", "50")]
    + [("METHOD", value) for value in ("nosuch", "GRPO", "__init__", "../grpo", "grpo.py")]
    + [("TRUNCATED", "dropped")]
    + [("INIT", value) for value in ("rl", "SFT")]
    + [("DIFFICULTY", value) for value in ("medium",)]
    + [("MODEL", "  ")]
    + [
        (name, value)
        for name in ("RUN", "TASK")
        for value in ("../x", "..", "a/b", "/tmp/x", "a\\b", ".hidden", "a b", "$HOME", "*", "~", "x" * 65, "naïve")
    ],
)
def test_bad_value_is_named_in_one_line(name, value):
    message = error_of(**{name: value})
    assert f"{name}={value.strip()}" in message
    assert "\n" not in message


@pytest.mark.parametrize("name", ["MODEL", "STEPS", "RUN", "FILE", "ARTIFACTS"])
def test_a_value_that_is_not_utf8_is_named_in_one_line(name, monkeypatch):
    value = os.fsdecode(b"caf\xe9")
    monkeypatch.setenv("ARTIFACTS", value if name == "ARTIFACTS" else "/a")
    with pytest.raises(SettingsError, match=rf"^{name}=caf\\xe9: is not UTF-8$"):
        _ = load(**({} if name == "ARTIFACTS" else {name: value})).runs_dir


@pytest.mark.parametrize(
    ("given", "folder"),
    [("", ROOT / "artifacts"), ("~/a", "/home/me/a"), ("~", "/home/me"), ("/x/~", "/x/~"), ("x", ROOT / "x")],
)
def test_where_artifacts_are(given, folder, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("ARTIFACTS", given)
    assert str(settings.artifacts()) == str(folder)


def test_a_home_folder_of_nobody_is_named(monkeypatch):
    monkeypatch.setenv("ARTIFACTS", "~nobody-at-all/x")
    with pytest.raises(SettingsError, match=r"^ARTIFACTS=~nobody-at-all/x: there is no user of that name$"):
        settings.artifacts()


@pytest.mark.parametrize("name", ["STEPS", "SEED", "SFT_SIZE"])
def test_number_beyond_any_float_is_no_crash(name):
    for zeros in (400, 5000):  # Python itself refuses an int of 4300 digits
        assert name in error_of(**{name: "1" + "0" * zeros})
    assert " and below " in error_of(**{name: str(10**30)})


def test_an_adapter_that_vllm_cannot_hold_is_refused():
    """verl says it only once its engine starts (get_vllm_max_lora_rank)."""
    assert error_of(LORA_RANK="513").startswith("LORA_RANK=513: must be from 0 to 512, the most that vLLM takes")
    assert load(LORA_RANK="512").LORA_RANK == 512


@pytest.mark.parametrize(
    "changes, names",
    [
        ({"MINI_BATCH_SIZE": "3"}, ("MINI_BATCH_SIZE=3", "TRAIN_BATCH_SIZE=8")),
        ({"MINI_BATCH_SIZE": "16"}, ("MINI_BATCH_SIZE=16", "TRAIN_BATCH_SIZE=8")),
        ({"TRAIN_SIZE": "7"}, ("TRAIN_BATCH_SIZE=8", "TRAIN_SIZE=7")),
        ({"N_GPUS": "3"}, ("N_GPUS=3", "MINI_BATCH_SIZE", "ROLLOUT_N")),
        ({"SFT_SIZE": "7"}, ("SFT_BATCH_SIZE=8", "SFT_SIZE=7")),
        ({"DEV_SIZE": "0"}, ("TEST_FREQ=5", "DEV_SIZE")),
        ({"PATIENCE": "2", "TEST_FREQ": "0"}, ("PATIENCE=2", "TEST_FREQ")),
        ({"LR_WARMUP": "10"}, ("LR_WARMUP=10", "STEPS=10", "set it lower")),
        ({"METHOD": "ppo", "LR_WARMUP": "9"}, ("LR_WARMUP=9", "STEPS=10 after CRITIC_WARMUP=1")),
    ],
)
def test_values_that_do_not_fit_together_are_named_in_one_line(changes, names):
    message = error_of(**changes)
    assert all(name in message for name in names)
    assert "\n" not in message


@pytest.mark.parametrize("name", ["SEED", "TRAIN_SEED", "EVAL_SEED"])
def test_a_seed_that_numpy_refuses_is_refused_at_once(name):
    assert f"{name}=20261127120000: must be 0 or more and below 2147483648" in error_of(**{name: "20261127120000"})
    assert getattr(load(**{name: str(2**31 - 1)}), name) == 2**31 - 1


def test_a_command_is_not_held_to_what_it_does_not_use():
    three = {
        "STACK": "current",
        "N_GPUS": "3",
        "TRAIN_BATCH_SIZE": "48",
        "MINI_BATCH_SIZE": "48",
        "SFT_BATCH_SIZE": "64",
    }
    assert load(**three, INIT="base").N_GPUS == 3
    for other in ({"INIT": "sft"}, {"INIT": "base", "STAGE": "sft"}):
        assert "N_GPUS=3: must divide SFT_BATCH_SIZE=64" in error_of(**three, **other)
    one = {"STACK": "current", "N_GPUS": "1", "SP": "2", "MAX_TOKENS_PER_GPU": "1000"}
    assert load(**one, STAGE="eval").SP == 2 and "SP=2: must divide N_GPUS=1" in error_of(**one)


def test_the_rate_may_rise_until_the_last_step():
    load(LR_WARMUP="9")
    load(METHOD="dpo", LR_WARMUP="10")  # its steps follow from the pairs
    load(STAGE="eval", LR_WARMUP="10")  # of a run with more steps


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"ABORT_ON": "nan,collapse"}, "ABORT_ON=nan,collapse: of METHOD=dpo only nan can be seen; leave collapse out"),
        ({"PAIRS_FILE": "p.jsonl", "SELF_PLAY_ROUNDS": "2"}, "PAIRS_FILE: holds samples of another policy; leave it"),
        ({"REWARD_MODEL": "some/classifier"}, "REWARD_MODEL=some/classifier: is for the RL methods; METHOD=dpo learns"),
        ({"TRUNCATED": "masked"}, "TRUNCATED=masked: is for the RL methods; METHOD=dpo learns from pairs; leave"),
        ({"STACK": "a100", "NNODES": "2", "INIT": "base"}, "NNODES=2: is for the RL methods; METHOD=dpo trains on one"),
        ({"STACK": "current", "N_GPUS": "4", "SP": "2"}, "SP=2: is for the RL methods; METHOD=dpo trains on whole"),
        ({"STACK": "a100", "OFFLOAD": "1"}, "OFFLOAD=1: is for the RL methods; METHOD=dpo does not sample"),
        ({"PATIENCE": "2", "TEST_FREQ": "1"}, "PATIENCE=2: is for the RL methods; METHOD=dpo has no validations"),
        ({"N_GPUS": "3", "ROLLOUT_N": "3", "SFT_BATCH_SIZE": "9"}, "N_GPUS=3: must divide TRAIN_BATCH_SIZE=8"),
    ],
)
def test_what_dpo_cannot_train_with_is_refused(changes, said):
    assert error_of(METHOD="dpo", **changes).startswith(said)
    assert error_of(TEACHER="some/model").startswith("TEACHER=some/model: is for METHOD=distill")


@pytest.mark.parametrize("changes", [{"N_GPUS": "3"}, {"N_GPUS": "3", "METHOD": "dpo", "ROLLOUT_N": "3"}])
def test_the_gpus_of_an_evaluation_need_divide_no_batch(changes):
    assert "N_GPUS=3: must divide" in error_of(**changes)
    for stage in ("eval", "compare", "merge", "simulate"):
        assert load(STAGE=stage, **changes).N_GPUS == 3
    for stage in ("data", "doctor", "train", "all"):
        assert "N_GPUS=3: must divide" in error_of(STAGE=stage, **changes)


@pytest.mark.parametrize(
    "name, value",
    [(name, "0") for name in sorted(ZERO_ALLOWED - {"SFT_SIZE", "MINI_BATCH_SIZE", "DEV_SIZE"})]
    + [("GPU_MEMORY_UTILIZATION", "1"), ("RUN", "a.b_c-1"), ("RUN", "x" * 64), ("LOGGER", "wandb,tensorboard")]
    + [("METHOD", method) for method in METHODS],
)
def test_value_at_the_edge_is_accepted(name, value):
    settings = load(**{name: value})
    assert getattr(settings, name) == type(getattr(settings, name))(value)


@pytest.mark.parametrize(
    ("method", "prompts", "mini"),
    [("grpo", 8, 8), ("gspo", 8, 2), ("gspo", 9, 3), ("gspo", 49, 49), ("gspo", 62, 31), ("cispo", 1, 1)],
)
def test_the_method_chooses_its_mini_batches(method, prompts, mini):
    chosen = load(METHOD=method, TRAIN_BATCH_SIZE=str(prompts), MINI_BATCH_SIZE="0")
    assert mini == chosen.MINI_BATCH_SIZE


def test_a_run_is_not_known_by_its_rounds_but_a_round_is_by_its_start():
    marks = [fingerprint(load(SELF_PLAY_ROUNDS=rounds).rl_parts([])) for rounds in ("1", "3")]
    assert marks[0] == marks[1]
    own_rule = {name: value for name, value in VALUES.items() if name != "KL_COEF"} | {"METHOD": "dpo"}
    marks_of_dpo = {fingerprint(load_settings(own_rule | {"SELF_PLAY_ROUNDS": n}).rl_parts([])) for n in ("1", "3")}
    assert len(marks_of_dpo) == 1  # KL_COEF is not 0.01 in its rounds
    starts = {fingerprint(load().rl_parts([], number, start)) for number, start in ((2, "a"), (2, "b"), (3, "a"))}
    assert len({*starts, marks[0]}) == 4


def test_own_samples_are_in_the_name_of_a_warm_up_only_when_it_learns_from_them():
    task, samples = load(SFT_SOURCE="task"), load(SFT_SOURCE="samples")
    assert task.sft_fingerprint() == load(SFT_SOURCE="task", ROLLOUT_N="8").sft_fingerprint()
    assert samples.sft_fingerprint() != load(SFT_SOURCE="samples", ROLLOUT_N="8").sft_fingerprint()
    assert task.sft_fingerprint() != samples.sft_fingerprint()
    assert load(SFT_SOURCE="samples", SFT_SIZE="0").INIT == "sft"  # the task need not have demonstrations
    assert load(INIT="base", SFT_SIZE="0").SFT_SIZE == 0


@pytest.mark.parametrize(("given", "share", "source"), [({}, "0.1", "default"), ({"TEST_SIZE": "9"}, "1", "TEST_SIZE")])
def test_a_count_of_test_prompts_that_is_given_is_held_to_no_share(given, share, source):
    values = values_of({"TASK": "countdown", "STACK": "cpu"} | given)
    assert (values["TEST_SHARE"].text, values["TEST_SHARE"].source) == (share, source)
    assert values_of({"TASK": "countdown", "STACK": "cpu", "TEST_SHARE": "0.5"} | given)["TEST_SHARE"].text == "0.5"


def test_the_share_counts_where_the_source_is_finite():
    assert changed(TEST_SHARE="0.5") == set()
    one, other = (load(SOURCE="hub", TEST_SHARE=share) for share in ("0.1", "1"))
    assert one.data_fingerprint() != other.data_fingerprint() and one.rl_parts([]) != other.rl_parts([])


# ---- fingerprints

DATA = {"SOURCE": "hub", "DIFFICULTY": "hard", "TRAIN_SIZE": "65", "TEST_SIZE": "17", "SFT_SIZE": "33", "SEED": "43"}
DATA |= {"DEV_SIZE": "9", "MAX_SAMPLES": "99", "REWARD": "strict", "MAX_PROMPT_LENGTH": "129", "GOLD": "drop"}
WARM_UP = pairs("""
STACK=current MODEL=other SFT_STEPS=17 SFT_LOSS=0.1 SFT_BATCH_SIZE=9 SFT_LR=1e-4 LORA_RANK=8 LORA_ALPHA=16
MAX_RESPONSE_LENGTH=65
""")
TRAINING = pairs("""
INIT=base TRAIN_BATCH_SIZE=16 MINI_BATCH_SIZE=8 LR=1e-6 KL_COEF=0.01 ROLLOUT_N=8 TEMPERATURE=0.7
""")
REPORTING = pairs("""
RUN=name STEPS=20 LOGGER=wandb WANDB=1 ABORT_ON=nan SAVE_FREQ=6 TEST_FREQ=3 KEEP=2 PATIENCE=4 N=8 LIMIT=9 GREEDY=0
EVAL_TEMPERATURE=0 TOP_P=0.5 MAX_NEW_TOKENS=5 EVAL_SEED=3 GOLD=error
""")


def fingerprints(**changes):
    settings = load(**changes)
    return settings.data_fingerprint(), settings.sft_fingerprint(), fingerprint(settings.rl_parts([]))


def changed(**changes):
    """Which of the three fingerprints change."""
    pairs = zip(("data", "sft", "rl"), fingerprints(), fingerprints(**changes), strict=True)
    return {name for name, before, after in pairs if before != after}


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        *((*pair, {"data", "sft", "rl"}) for pair in DATA.items()),
        *((*pair, {"sft", "rl"}) for pair in WARM_UP.items()),
        *((*pair, {"rl"}) for pair in TRAINING.items()),
        *((*pair, set()) for pair in REPORTING.items()),
    ],
)
def test_a_variable_changes_the_fingerprints_of_what_reads_it(name, value, wanted):
    assert changed(**{name: value}) == wanted


@pytest.mark.parametrize("name", ["SFT_STEPS", "SFT_LOSS", "SFT_BATCH_SIZE", "SFT_LR"])
def test_warm_up_does_not_matter_to_a_training_from_base(name):
    assert load(INIT="base").rl_parts([]) == load(INIT="base", **{name: WARM_UP[name]}).rl_parts([])


def test_arguments_change_the_fingerprint_of_what_they_go_to():
    settings = load()
    assert fingerprint(settings.rl_parts(["a=1"])) != fingerprint(settings.rl_parts([]))
    assert fingerprint(settings.rl_parts(["a=1"])) != fingerprint(settings.rl_parts(["a=2"]))


def test_fingerprint_of_values_and_files(tmp_path):
    file = tmp_path / "reward.py"
    file.write_text("a")
    before = fingerprint({"x": 1, "y": 2}, file)
    assert re.fullmatch("[0-9a-f]{8}", before)
    assert fingerprint({"y": 2, "x": 1}, file) == before
    assert fingerprint({"x": 1, "y": 3}, file) != before
    file.write_text("b")  # during a process a file counts as it was when first read
    assert fingerprint({"x": 1, "y": 2}, file) == before
    _digest.cache_clear()
    assert fingerprint({"x": 1, "y": 2}, file) != before


# ---- where a value comes from


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """Function: value and source of each variable on the cpu stack, with these lines of train.sh and of a profile."""

    monkeypatch.setattr(settings, "ROOT", tmp_path)

    def run(train_sh: str = "", profile: str = "", **given: str) -> dict[str, tuple[str, str]]:
        folder = tmp_path / "tasks/mine"
        (folder / "profiles").mkdir(parents=True, exist_ok=True)
        (folder / "train.sh").write_text(train_sh)
        (folder / "profiles/big.sh").write_text(profile)
        environ = {"TASK": "mine", "STACK": "cpu", **({"PROFILE": "big"} if profile else {}), **given}
        return {name: (value.text, value.source) for name, value in values_of(environ).items()}

    return run


def test_the_first_of_the_sources_that_has_a_value_gives_it(sources):
    task, profile = "default STEPS 3 cpu=2 a100=4  # steps", "default STEPS 1"
    assert sources(task, profile, STEPS="9", GIVEN="STEPS")["STEPS"] == ("9", "command line")
    assert sources(task, profile, STEPS="9")["STEPS"] == ("9", "environment")
    assert sources(task, profile)["STEPS"] == ("1", "profile big")
    assert sources(task)["STEPS"] == ("2", "train.sh, cpu")
    assert sources(task, STACK="current", N_GPUS="1")["STEPS"] == ("3", "train.sh")
    assert sources()["STEPS"] == ("8", "stack cpu")
    assert sources(STACK="a100")["STEPS"] == ("100", "default")
    assert sources('default STEPS ""')["STEPS"] == ("8", "stack cpu")  # an empty value is none
    assert sources(task, profile, SETTINGS_COMPLETE="1")["STEPS"] == ("8", "stack cpu")
    assert sources('default FILE "$ROOT/a b.jsonl"')["FILE"][0].endswith("/a b.jsonl")


def test_the_method_goes_before_the_stack_and_after_the_task(sources, monkeypatch):
    monkeypatch.setattr(gspo, "DEFAULTS", {"LR": "7e-6"})
    assert sources(METHOD="gspo")["LR"] == ("7e-6", "METHOD=gspo")
    assert sources("default METHOD gspo")["LR"] == ("7e-6", "METHOD=gspo")
    assert sources("default LR 1e-7", METHOD="gspo")["LR"] == ("1e-7", "train.sh")
    assert sources()["LR"] == ("1e-5", "stack cpu")


def test_an_adapter_learns_at_ten_times_the_rate(sources):
    adapter, own = sources("default LORA_RANK 8"), "default LORA_RANK 8\ndefault LR 3e-5 cpu=2e-5"
    assert (adapter["LR"], adapter["SFT_LR"]) == (
        ("0.0001", "stack cpu, x 10 for LoRA"),
        ("0.003", "stack cpu, x 10 for LoRA"),
    )
    assert sources(own)["LR"] == ("0.0002", "train.sh, cpu, x 10 for LoRA")
    assert sources(own, STACK="a100")["LR"] == ("0.0003", "train.sh, x 10 for LoRA")
    assert sources(own, LORA_RANK="0")["LR"] == ("2e-5", "train.sh, cpu")
    # Whoever gives a rate, or writes a profile, gives the adapter's.
    assert sources(own, LR="7e-5")["LR"] == ("7e-5", "environment")
    assert sources(own, "default LR 5e-5")["LR"] == ("5e-5", "profile big")
    assert sources(own, "default STEPS 5")["LR"][0] == "0.0002"
    assert sources(LORA_RANK="0")["LR"] == ("1e-5", "stack cpu")
    assert sources("default LORA_RANK 8\ndefault LR fast")["LR"][0] == "fast"  # refused with the other values


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("default MODLE x", "train.sh: default MODLE: no such variable; did you mean MODEL?"),
        ("default STEPS 3 cpuu=2", "default STEPS: cpuu: no such stack; there are: a100, cpu, current"),
        ("default STEPS", "default STEPS: must be default NAME VALUE"),
        ("default N_GPUS $(nproc)", "a value is plain text, bash does not read it"),
    ],
)
def test_a_line_of_train_sh_that_says_nothing_is_refused(line, said, sources):
    with pytest.raises(SettingsError) as error:
        sources(line)
    assert said in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("stack", ["cpu", "a100"])
def test_each_train_sh_is_short_and_every_line_of_it_takes_effect(task, stack, tmp_path):
    train_sh = (ROOT / "tasks" / task / "train.sh").read_text()
    block = re.findall(r"^default (\w+) (\S+)(?: cpu=(\S+))?", train_sh, re.MULTILINE)
    assert 5 < len(block) <= 15
    found = exported(ROOT / "tasks" / task / "train.sh", {"STACK": stack, "N_GPUS": "1"})
    for name, value, small in block:
        wanted = small if stack == "cpu" and small else value
        if name in ("LR", "SFT_LR") and found["LORA_RANK"] != "0":
            wanted = f"{settings.LORA_RATES * float(wanted):g}"
        shared = Settings.__dataclass_fields__[name].metadata["default"]
        assert found[name] == (shared if wanted == '""' else wanted)  # "": no default of its own
    if task not in MULTI_TURN or stack != "a100":  # which refuses it
        assert task == load_settings(found).TASK


MULTI_TURN_REFUSED = [
    ({"STACK": "a100"}, "TASK=calculator: is multi-turn, which STACK=a100 (verl 0.6.1) cannot train; take STACK="),
    ({"METHOD": "dpo"}, "METHOD=dpo: is for single-turn tasks; TASK=calculator has episodes"),
    ({"METHOD": "distill", "TEACHER": "a/b"}, "METHOD=distill: is for single-turn tasks; TASK=calculator has episodes"),
    ({"METHOD": "dapo", "TRUNCATED": "shaped"}, "TRUNCATED=shaped: is for single-turn tasks; "),
    ({"REWARD": "x"}, "REWARD=x: TASK=calculator has the rewards of its environment.py; leave REWARD out"),
    ({"REWARD_MODEL": "a/b"}, "REWARD_MODEL=a/b: TASK=calculator has the rewards of its environment.py; leave "),
    ({"MAX_TURN_LENGTH": "65"}, "MAX_TURN_LENGTH=65: more than MAX_RESPONSE_LENGTH=64, all turns"),
]


@pytest.mark.parametrize(("changes", "said"), MULTI_TURN_REFUSED)
def test_what_a_multi_turn_task_cannot_do_is_refused(changes, said):
    assert error_of(**{"TASK": "calculator"} | changes).startswith(said)
    if "MAX_TURN_LENGTH" in changes:
        load(**changes)  # without effect for a single-turn task


@pytest.mark.parametrize("name", ["MAX_TURNS", "MAX_TURN_LENGTH", "STEP_SECONDS", "AGENT_IMAGE"])
def test_what_is_for_episodes_alone_is_refused_of_a_single_turn_task_where_it_is_typed(name):
    said = f"{name}=9: is for multi-turn tasks; TASK=countdown has single responses; leave {name} out"
    assert error_of(GIVEN=f"LR {name}", **{name: "9"}) == said
    assert load(GIVEN="LR", **{name: "9"}).MAX_PROMPT_LENGTH == 128  # e.g. of a shell with several tasks
    assert str(getattr(load(TASK="calculator", GIVEN=name, **{name: "9"}), name)).startswith("9")


@pytest.mark.parametrize(
    ("name", "value", "of"),
    [("CRITIC_LR", "1e-4", "ppo"), ("EGPO_LAMBDA", "0.9", "egpo"), ("PAIRS_FILE", "p", "dpo")],
)
def test_what_is_of_another_method_is_refused_where_it_is_typed(name, value, of):
    given = {"GIVEN": name, name: value}
    assert error_of(**given) == f"{name}={value}: is for METHOD={of}; this is METHOD=grpo; leave {name} out"
    assert of == load(METHOD=of, **given).METHOD
    for stage in ("experiment", "eval"):  # which may have that method too; as the run was
        assert load(STAGE=stage, **given).METHOD == "grpo"
    assert load(**{name: value}).METHOD == load(GIVEN=name, **{name: ""}).METHOD == "grpo"  # of a shell; of nobody


@pytest.mark.parametrize("name", ["CLIP_HIGH", "KL_COEF", "MINI_BATCH_SIZE"])
def test_what_is_of_rl_is_refused_of_dpo_where_it_is_typed(name):
    said = f"{name}=1: is for the RL methods; this is METHOD=dpo; leave {name} out"
    assert error_of(METHOD="dpo", GIVEN=f"LR {name}", **{name: "1"}) == said
    assert load(METHOD="dpo", GIVEN="LR", **{name: "1"}).by_pairs  # e.g. of a profile
    assert getattr(load(GIVEN=name, **{name: "1"}), name) == 1


def test_a_profile_for_rl_stops_no_dpo():
    given = {"METHOD": "dpo", "TRAIN_BATCH_SIZE": "8", "GIVEN": "METHOD TRAIN_BATCH_SIZE"}
    assert load(**given, MINI_BATCH_SIZE="6", ROLLOUT_DTYPE="fp8").by_pairs  # DPO reads neither


def test_staleness_is_of_async():
    given = {"GIVEN": "STALENESS", "STALENESS": "3"}
    assert error_of(**given) == "STALENESS=3: is for ASYNC=colocate or separate; this is ASYNC=off; leave STALENESS out"
    assert load(ASYNC="colocate", **given).STALENESS == 3


def test_a_task_is_multi_turn_by_its_environment():
    assert load(TASK="calculator").multi_turn and not load().multi_turn
    assert load(TASK="calculator").reward_file.name == "environment.py" and load().reward_file.name == "reward.py"


@pytest.mark.parametrize("stack", STACKS)
def test_defaults_of_a_stack_are_variables(stack):
    module = settings.stack(stack)
    of_stages = [values for values in getattr(module, "STAGE_DEFAULTS", {}).values()]
    for values in [getattr(module, "DEFAULTS", {}), *of_stages]:
        assert values.keys() <= set(NAMES) - {"TASK", "STACK"}
        assert all(type(value) is str for value in values.values())


@pytest.fixture
def smi(monkeypatch, tmp_path):
    """Makes nvidia-smi a shell script with the given body."""

    def write(body: str) -> None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)

    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return write


@pytest.fixture
def four_gpus(smi):
    """A machine with four GPUs, of which two have UUIDs that begin in the same way."""
    uuids = ("GPU-0c4f", "GPU-1c4f", "GPU-2c4f", "GPU-2d00")
    lines = "".join(f"GPU {n}: NVIDIA H200 (UUID: {uuid}-0a7d-11ef)\n" for n, uuid in enumerate(uuids))
    smi(f"[ $1 = -L ] && echo '{lines}' | grep GPU")


def test_all_gpus_that_are_visible_are_used(four_gpus, sources, monkeypatch):
    assert sources(STACK="current")["N_GPUS"] == ("4", "default")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,3")
    assert sources(STACK="current")["N_GPUS"][0] == "2"
    assert sources(STACK="current", N_GPUS="3")["N_GPUS"] == ("3", "environment")


@pytest.mark.parametrize(
    ("lines", "names"),
    [
        (["GPU 0: H100 (UUID: GPU-0)", "  MIG 3g.40gb Device 0: (UUID: MIG-1)", "  MIG 3g.40gb Device 1: x"], ["0"]),
        (["GPU 0: H100 (UUID: GPU-0)", "  MIG 3g.40gb Device 0: x", "GPU 1: H100 (UUID: GPU-1)"], ["0", "1"]),
        (["No devices found."], []),
    ],
)
def test_parts_of_a_gpu_are_not_counted_as_gpus(lines, names, smi, tmp_path):
    (tmp_path / "list").write_text("\n".join(lines))
    smi(f"cat '{tmp_path}/list'")
    assert settings.visible_gpus() == names


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ("", []),
        ("0,-1,2", ["0"]),
        ("0, 1", ["0", "1"]),
        ("GPU-1c,MIG-2f", ["1", "MIG-2f"]),
        ("GPU-2c4f-0a7d-11ef, GPU-0", ["2", "0"]),
        ("GPU-0,GPU-2,GPU-1", ["0"]),  # two begin with GPU-2
        ("GPU-7", []),
        ("0,0", []),
        ("0,00", []),
        ("GPU-1c,1", []),
        ("MIG-2f,MIG-2f", []),
        ("1gpu2, +2ampere", ["1", "2"]),
        ("0,5,1", ["0"]),  # there is no GPU 5
        ("0,MIG-2f,5", ["0", "MIG-2f"]),
    ],
)
def test_the_visible_gpus_end_where_cuda_stops(value, names, four_gpus, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert settings.visible_gpus() == names


def test_without_a_list_of_gpus_the_named_ones_are_kept(smi, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,5,MIG-2f")
    smi("echo No devices found.")
    assert settings.visible_gpus() == ["0", "5", "MIG-2f"]
    monkeypatch.setenv("PATH", "")
    assert settings.visible_gpus() == ["0", "5", "MIG-2f"]


def test_an_nvidia_smi_that_hangs_is_an_error(smi, monkeypatch):
    smi("exec sleep 5")
    monkeypatch.setattr(visible_gpus, "ANSWERS_WITHIN", 0.2)
    said = "nvidia-smi does not answer within 0.2 s; turn on persistence mode: nvidia-smi -pm 1, or set STACK=cpu"
    assert error_of(STACK="current", N_GPUS="") == said
    assert load(STACK="cpu", N_GPUS="").N_GPUS == 1


@pytest.mark.parametrize("timeout", [True, False])
def test_the_stack_is_chosen_where_nvidia_smi_hangs(timeout, smi, tmp_path):
    """One question that hangs is enough. Without the command timeout there is no limit."""
    smi(f"echo >>'{tmp_path}/asked'; exec sleep {60 if timeout else 0.1}")
    for name in ("bash", "grep", "sort", "head", "sleep"):
        (tmp_path / name).symlink_to(shutil.which(name))
    if timeout:  # for `timeout --foreground 1 true` and `timeout --foreground 60 nvidia-smi ...`
        limited = f'shift 2; exec {shutil.which("timeout")} 1 "$@"'
        (tmp_path / "timeout").write_text(f"#!/bin/bash\n[ $3 = true ] && exit\n{limited}\n")
        (tmp_path / "timeout").chmod(0o755)
    script = [tmp_path / "bash", ROOT / "tasks/common/install/choose_stack.sh"]
    result = subprocess.run(script, env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=True)
    answered = "a100: an NVIDIA GPU, whose driver does not tell its compute capability\n"
    hangs = "cpu: nvidia-smi does not answer within 60 s; turn on persistence mode: nvidia-smi -pm 1\n"
    assert (result.stdout, result.stderr) == (hangs if timeout else answered, "")
    assert len((tmp_path / "asked").read_text()) == (1 if timeout else 3)


def test_a_stack_of_gpus_is_refused_where_there_is_none(smi, monkeypatch):
    smi("echo No devices found.; exit 6")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for stack in ("current", "a100"):
        changes = {"STACK": stack, "METHOD": "grpo", "N_GPUS": ""}
        said = "nvidia-smi finds no GPU; install NVIDIA's driver, or set STACK=cpu"
        assert error_of(**changes) == said
        given = exported(ROOT / "tasks/countdown/train.sh", {"STACK": stack})
        with pytest.raises(SettingsError, match=f"^{said}$"):
            load_settings(given)
        monkeypatch.setenv("RAY_ADDRESS", "auto")
        fix = "set it to the GPUs per machine of the cluster at RAY_ADDRESS"
        assert error_of(**changes) == f"N_GPUS=0: this machine has no GPU to count; {fix}"
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        assert error_of(**changes) == f"N_GPUS=0: this machine has no GPU to count; {fix}"
        assert load(**changes | {"N_GPUS": "2"}).N_GPUS == 2
        monkeypatch.delenv("RAY_ADDRESS")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")


@pytest.mark.parametrize(
    ("given", "left", "order"),
    [
        ("GPU-2c,GPU-0", "2,0", "PCI_BUS_ID"),
        ("GPU-2c,GPU-7,GPU-0", "2", "PCI_BUS_ID"),
        ("MIG-1c4f", "MIG-1c4f", "FASTEST_FIRST"),
        ("MIG-GPU-1c4f/1/0", "MIG-GPU-1c4f/1/0", "FASTEST_FIRST"),
        ("2,0", "2,0", "FASTEST_FIRST"),
    ],
)
def test_vllm_gets_numbers_in_place_of_uuids(given, left, order, four_gpus, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    s = load_settings({"TASK": "countdown", "STACK": "current", "N_GPUS": "1"})
    found = os.environ | stack_environment(s, {})
    assert (found["CUDA_VISIBLE_DEVICES"], found["CUDA_DEVICE_ORDER"]) == (left, order)


@pytest.mark.parametrize("value", ["", "-1", "NoDevFiles,0", "GPU-7", "0,0"])
def test_a_stack_of_gpus_is_refused_where_all_are_hidden(value, four_gpus, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    given = {"TASK": "countdown", "STACK": "current"}
    said = f"^CUDA_VISIBLE_DEVICES={value}: no GPU is visible, it hides them; name GPUs of this machine, unset it, or"
    with pytest.raises(SettingsError, match=said):
        load_settings(given)
    for stage in ("train", "eval", "doctor"):
        monkeypatch.setenv("STAGE", stage)
        with pytest.raises(SettingsError, match=said):
            load_settings(given | {"STAGE": stage, "N_GPUS": "2"})
        assert load_settings(given | {"STACK": "cpu"}).N_GPUS == 1
    monkeypatch.setenv("SETTINGS_COMPLETE", "1")  # a process of Ray without a GPU
    assert load_settings(given | {"N_GPUS": "2"}).N_GPUS == 2
    monkeypatch.delenv("SETTINGS_COMPLETE")
    monkeypatch.setenv("STAGE", "rehearse")
    assert load_settings(given | {"STAGE": "train", "N_GPUS": "2"}).N_GPUS == 2
    monkeypatch.setenv("STAGE", "train")
    monkeypatch.setenv("RAY_ADDRESS", "auto")  # the GPUs are of other machines
    assert load_settings(given | {"N_GPUS": "2"}).N_GPUS == 2


def test_help_has_one_line_for_each_variable():
    lines = [*variables(Settings), *variables(Command)]
    commands = [f.name for f in fields(Command) if f.name != "STAGE"]
    assert [line.split()[0] for line in lines] == NAMES + commands
    assert all(len(line.split()) > 2 for line in lines)
    assert [line.split()[1] for line in lines if line.split()[0] == "LR"] == ["1e-6"]


def test_variables_of_commands_have_defaults_and_are_checked():
    assert load_settings({}, cls=Command).STEP == ""
    assert load_settings({"STEP": "4", "FILTER": "1"}, cls=Command).STEP == "4"
    for name, value in {"FILTER": "2", "FILTER_HIGH": "1.1", "FILTER_LOW": "-1"}.items():
        with pytest.raises(SettingsError, match=f"{name}={value}: must be"):
            load_settings({name: value}, cls=Command)


def test_only_what_code_does_changes_its_digest(tmp_path):
    """Of a task's program and what it imports of the task: comments, docstrings and blank lines do not count."""
    program, helper = tmp_path / "prepare_data.py", tmp_path / "made.py"

    def digest(text: str, imported: str = "x = 1\n") -> str:
        program.write_text(text)
        helper.write_text(imported)
        code_digest.cache_clear()
        return code_digest(program)

    before = digest("def f():\n    return 1\n")
    assert digest('"""What."""\n\n\ndef f():  # why\n    """Says."""\n    return 1\n') == before
    assert digest("def f():\n    return 2\n") != before


def test_a_changed_table_that_a_reward_reads_changes_its_digest(tmp_path):
    reward, table, other = (tmp_path / name for name in ("reward.py", "words.json", "notes.json"))
    reward.write_text('WORDS = json.loads(Path(__file__).with_name("words.json").read_text())\n')

    def digest(text: str) -> str:
        table.write_text(text)
        code_digest.cache_clear()
        _digest.cache_clear()
        return code_digest(reward)

    before = digest('["a"]')
    assert digest('["b"]') != before
    other.write_text("{}")
    assert digest('["a"]') == before


def test_a_changed_program_of_an_environment_changes_its_digest(tmp_path):
    """environment.py does not import it; the program imports what stands beside it, as `python agent.py` does."""
    environment, agent, beside = (tmp_path / name for name in ("environment.py", "agent.py", "shelf.py"))
    environment.write_text(
        'Environment = program.environment_of(Path(__file__).with_name("agent.py"), python="a/b.c")\n'
    )
    environment.with_name("agent.js").write_text("1")

    def digest(text: str = "import shelf\n", helper: str = "x = 1\n") -> str:
        agent.write_text(text)
        beside.write_text(helper)
        code_digest.cache_clear()
        _digest.cache_clear()
        return code_digest(environment)

    before = digest()
    assert digest("import shelf  # why\n") == before
    assert len({before, digest("import shelf, json\n"), digest(helper="x = 2\n")}) == 3
    environment.write_text('Environment = program.environment_of("node", Path(__file__).with_name("agent.js"))\n')
    before = digest()
    environment.with_name("agent.js").write_text("2")
    assert digest() != before


def test_a_folder_of_data_counts_what_is_read_of_it(tmp_path):
    file = tmp_path / "train.JSONL"
    (tmp_path / "test.json").mkdir()
    file.write_text("1")
    first = load(FILE=str(tmp_path)).data_fingerprint()
    _digest.cache_clear()
    file.write_text("2")
    assert load(FILE=str(tmp_path)).data_fingerprint() != first


def test_another_training_file_is_another_run(tmp_path):
    file = tmp_path / "signal.parquet"
    file.write_bytes(b"one")
    assert load(TRAIN_FILE=str(file)).train_file == file
    assert load().train_file == load().data_dir / "train.parquet"
    first = fingerprint(load(TRAIN_FILE=str(file)).rl_parts([]))
    assert first != fingerprint(load().rl_parts([]))
    _digest.cache_clear()
    file.write_bytes(b"two")
    assert fingerprint(load(TRAIN_FILE=str(file)).rl_parts([])) != first


@pytest.mark.parametrize(
    "stack, method, batch", [("current", "grpo", "128"), ("current", "dpo", "32"), ("cpu", "dpo", "8")]
)
def test_dpo_has_a_batch_of_its_own_where_the_stack_has_none(stack, method, batch):
    values = values_of({"TASK": "countdown", "STACK": stack, "METHOD": method, "N_GPUS": "1"})
    assert values["TRAIN_BATCH_SIZE"].text == batch


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"STACK": "a100", "N_GPUS": "4", "TP": "3"}, "TP=3: must divide N_GPUS=4"),
        ({"STACK": "a100", "N_GPUS": "4", "SP": "3"}, "SP=3: must divide N_GPUS=4"),
        ({"STACK": "a100", "N_GPUS": "4", "SP": "2"}, "SP=2: STACK=a100 (verl 0.6.1) has wrong labels"),
        ({"STACK": "current", "N_GPUS": "4", "SP": "2", "MAX_TOKENS_PER_GPU": "0"}, "set MAX_TOKENS_PER_GPU"),
        ({"TP": "2"}, "TP=2: is for GPUs"),
        ({"OFFLOAD": "1"}, "OFFLOAD=1: is for GPUs"),
        ({"STACK": "a100", "MAX_TOKENS_PER_GPU": "100"}, "MAX_TOKENS_PER_GPU=100: less than"),
        ({"STACK": "a100", "MAX_TOKENS_PER_GPU": "100", "METHOD": "dpo"}, "MAX_TOKENS_PER_GPU=100: less than"),
    ],
)
def test_gpus_that_cannot_share_a_model_or_a_sequence(changes, said):
    assert said in error_of(**changes)


def test_the_tokens_of_a_pass_are_checked_where_a_training_takes_them():
    few = {"STACK": "a100", "MAX_TOKENS_PER_GPU": "100"}
    load(METHOD="dpo", INIT="base", **few)  # TRL takes sequences
    load(STAGE="eval", **few)  # of a run with SP=2


@pytest.mark.parametrize(("stack", "stage"), [("a100", "sft"), ("current", "train")])
def test_a_sequence_may_be_longer_than_the_tokens_of_one_of_the_gpus_that_share_it(stack, stage):
    lengths = {"MAX_TOKENS_PER_GPU": "100", "MAX_PROMPT_LENGTH": "48", "MAX_RESPONSE_LENGTH": "48"}
    s = load(STACK=stack, STAGE=stage, N_GPUS="4", SP="2", **lengths)
    assert s.SP * s.MAX_TOKENS_PER_GPU > 192 > s.MAX_TOKENS_PER_GPU


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"STACK": "cpu"}, "is for GPUs; leave ROLLOUT_DTYPE out"),
        ({"STACK": "a100"}, "an A100 has no 8-bit products"),
        ({"STACK": "current", "ROLLOUT_CORRECTION": "none"}, "take ROLLOUT_CORRECTION=token"),
        ({"STACK": "current", "LORA_RANK": "8"}, "has not been tried with an adapter"),
    ],
)
def test_eight_bits_are_refused_where_they_cannot_be_right(changes, problem):
    with pytest.raises(SettingsError, match=f"ROLLOUT_DTYPE=fp8: .*{problem}"):
        load(ROLLOUT_DTYPE="fp8", **changes)


def test_a_run_from_before_eight_bits_goes_on():
    s = load(STACK="current")
    assert "ROLLOUT_DTYPE" not in s.rl_parts([])
    assert replace(s, ROLLOUT_DTYPE="fp8").rl_parts([])["ROLLOUT_DTYPE"] == "fp8"
