"""Our variables: name, type, range, default and help of each, where its value comes from, and the paths it implies.

A value comes from the first that has one: what is given (make's command line, the environment), the profile, the stage,
the task on this stack, the task, the method, the stack, the table below. Profiles (tasks/TASK/profiles/*.sh) and tasks
(train.sh) set theirs in lines ``default NAME VALUE [STACK=VALUE ...]  # comment``. The rates are those of all weights:
with LoRA they are multiplied by LORA_RATES, unless they are given or the profile's.
"""

import difflib
import importlib
import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import Field, asdict, dataclass, field, fields, replace
from pathlib import Path

from verl_tasks.digest import code_digest, fingerprint
from verl_tasks.errors import SettingsError
from verl_tasks.files import read_json
from verl_tasks.method import METHODS, method
from verl_tasks.places import PACKAGE, ROOT
from verl_tasks.stages import STAGES, stage_of
from verl_tasks.visible_gpus import check_visible, visible_gpus

HEALTH_RULES = ("nan", "collapse", "kl", "spike", "mismatch", "zero_variance", "truncation", "no_reward", "fall")
HEALTH_RULES += ("memory", "hollow", "short", "alike", "narrow", "failed")
# MiB that a driver leaves free of a GPU: A100 (SXM 80 GB, PCIe 40 GB), H100 and H200 SXM, A10, L40S.
GPU_MIB = {"a100": 80_000, "a100-40g": 40_000, "h100": 80_000, "h200": 142_000, "a10": 22_500, "l40s": 45_000}
DATA_SUFFIXES = (".json", ".jsonl", ".csv", ".parquet")
STACKS = sorted(path.parent.name for path in (PACKAGE / "stacks").glob("*/__init__.py"))


def variable(default, help: str, check=None):
    """A variable: its shared default (a text, or a function of the other values), its help, and its check."""
    return field(metadata={"default": default, "help": help, "check": check})


def _must(hold: Callable, problem: str) -> Callable[[object], str | None]:
    """The check that ``hold`` is true of a value; else ``problem`` says why not."""
    return lambda value: None if hold(value) else problem


positive = _must(lambda value: 0 < value < 1e15, "must be greater than 0 and below 1e15")  # false for NaN and infinity
_from_0 = _must(lambda value: 0 <= value < 1e15, "must be 0 or more and below 1e15")
_rank = _must(lambda value: 0 <= value <= 512, "must be from 0 to 512, the most that vLLM takes")
_seed = _must(lambda value: 0 <= value < 2**31, "must be 0 or more and below 2147483648")  # NumPy takes no larger ones
_count_or_share = _must(lambda n: 0 <= n < 1e15 and (n < 1 or n == int(n)), "must be from 0 to 1e15, whole from 1 on")
_fraction = _must(lambda value: 0 < value <= 1, "must be above 0 and at most 1")
_port = _must(range(1, 65536).__contains__, "must be a number from 1 to 65535")
_name = _must(re.compile(r"(?!\.)[A-Za-z0-9._-]{0,64}").fullmatch, "must be a plain name")
_image = _must(re.compile(r"([A-Za-z0-9][\w.:/@-]{0,250})?", re.ASCII).fullmatch, "must be the name of an image")
_given = _must(str.strip, "must not be empty")
# One spelling of each number: LORA_RANK=00 or SELF_PLAY_ROUNDS=01 must not count as other than 0 and 1.
_NUMBER = {
    int: re.compile(r"0|-?[1-9][0-9]{0,99}"),
    float: re.compile(r"-?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?"),
}


def _one_of(*choices):
    return _must(choices.__contains__, f"must be one of {', '.join(map(str, choices))}")


def _task(value: str) -> str | None:
    return _name(value) if value else "is not set: run this through `make` or the task's train.sh"


def _rules(value: str) -> str | None:
    unknown = [name for name in value.split(",") if name and name not in HEALTH_RULES]
    return f"{unknown[0]}: must be some of {', '.join(HEALTH_RULES)}" if unknown else None


def _rule(words: str, value: Callable[[dict[str, str]], str]) -> Callable[[dict[str, str]], str]:
    """A default that follows from the other values, and the words for it in `make help`."""
    value.__doc__ = words
    return value


def _same_as(name: str) -> Callable[[dict[str, str]], str]:
    """The default of a variable that follows the variable ``name``."""
    return _rule(name, lambda values: values[name])


_gpu = _must(("", *GPU_MIB).__contains__, f"must be one of {', '.join(GPU_MIB)}")
_kl_coef = _rule("0; in self-play 0.01", lambda values: "0" if values["SELF_PLAY_ROUNDS"] == "1" else "0.01")
_batch_size = _rule("128; dpo: 32", lambda values: str(method(values["METHOD"]).BATCH_SIZE))
_all_gpus = _rule("all that are visible", lambda values: str(len(visible_gpus())))


@dataclass(frozen=True)
class Settings:
    """One field for each variable; `make help` and `make settings` print them."""

    # task, model and data
    TASK: str = variable("", "folder under tasks/", _task)
    STACK: str = variable("", "packages and hardware; default from the machine", _one_of(*STACKS))
    MODEL: str = variable("Qwen/Qwen2.5-1.5B-Instruct", "hub id, folder or `embedded` (SmolLM2-135M-Instruct)", _given)
    INIT: str = variable("base", "start from `base`, or from an SFT warm-up (`sft`)", _one_of("base", "sft"))
    SOURCE: str = variable("generate", "source of the data, one of train.sh's", _given)
    FILE: str = variable("", "a data file (json, jsonl, csv, parquet) or folder as the source")
    MAX_SAMPLES: int = variable("0", "most examples of a file or data set; 0: all", _from_0)
    DIFFICULTY: str = variable("hard", "of generated problems: easy or hard", _one_of("easy", "hard"))
    TRAIN_SIZE: int = variable("8192", "training prompts; 0: all", _from_0)
    TEST_SIZE: float = variable("512", "test prompts: count, share, or 0: the test split", _count_or_share)
    TEST_SHARE: float = variable("0.1", "most that a default TEST_SIZE takes of a file without test split", _fraction)
    DEV_SIZE: int = variable("128", "validation prompts, from the training data; 0: none", _from_0)
    SFT_SIZE: int = variable("2048", "demonstrations", _from_0)
    SFT_SOURCE: str = variable(
        "task", "demonstrations: the `task`'s, or correct `samples` of MODEL", _one_of("task", "samples")
    )
    TRAIN_FILE: str = variable("", "parquet in place of train.parquet, e.g. a probe's signal.parquet")
    PAIRS_FILE: str = variable("", "dpo: file of prompt, chosen, rejected; empty: own samples")
    PAIRS_COLUMNS: str = variable(
        "", "dpo: columns of PAIRS_FILE with other names: prompt=question,chosen=good,rejected=bad"
    )
    SAMPLED_PROMPTS: int = variable("1024", "prompts that SFT_SOURCE=samples and dpo sample; 0: all", _from_0)
    GOLD: str = variable(
        "warn", "rows whose demonstration is not right: `warn`, `drop` or `error`", _one_of("drop", "warn", "error")
    )
    SEED: int = variable("42", "seed of data, sampling and shuffling", _seed)
    TRAIN_SEED: int = variable(_same_as("SEED"), "seed of RL and DPO only", _seed)
    # optimisation
    METHOD: str = variable("grpo", f"one of {', '.join(METHODS)}", _one_of(*METHODS))
    REWARD: str = variable("", "variant of the task's reward, one of train.sh's", _name)
    REWARD_MODEL: str = variable("", "sequence classifier whose score is the reward in training")
    STEPS: int = variable("100", "training steps; a larger number continues the run", positive)
    TEACHER: str = variable("", "distill: model with MODEL's tokenizer, on its own GPU")
    TRUNCATED: str = variable(
        "counted",
        "responses cut off: counted, masked (no loss), or shaped (a penalty near the limit)",
        _one_of("counted", "masked", "shaped"),
    )
    SELF_PLAY_ROUNDS: int = variable("1", "trainings of STEPS, each from the last one's policy", positive)
    TRAIN_BATCH_SIZE: int = variable(_batch_size, "prompts (dpo: pairs) per step", positive)
    MINI_BATCH_SIZE: int = variable("0", "prompts per optimizer step; 0: the method's default", _from_0)
    LR: float = variable("1e-6", "learning rate of the policy", positive)
    LR_WARMUP: int = variable("0", "steps in which the rate rises to LR", _from_0)
    CLIP_LOW: float = variable("0.2", "ratios are clipped below 1 - CLIP_LOW", positive)
    CLIP_HIGH: float = variable("0.2", "ratios are clipped above 1 + CLIP_HIGH", positive)
    CRITIC_LR: float = variable("1e-5", "ppo: the critic's learning rate", positive)
    CRITIC_WARMUP: int = variable("5", "ppo: first steps, for the critic alone", _from_0)
    KL_COEF: float = variable(_kl_coef, "weight of the KL to the start; 0: none", _from_0)
    EGPO_LAMBDA: float = variable("0.4", "egpo: weight of the entropy; 0: GRPO", _from_0)
    EGPO_ALPHA: float = variable("2.0", "egpo: entropy term at most advantage / EGPO_ALPHA", positive)
    DPO_EPOCHS: int = variable("1", "dpo: epochs over the pairs, in place of STEPS", positive)
    ROLLOUT_CORRECTION: str = variable(
        "token",
        "for the engine's log-probs: weight each `token`, also reject responses (`sequence`), or `none`",
        _one_of("token", "sequence", "none"),
    )
    DPO_BETA: float = variable("0.1", "dpo: beta, the pull to the start", positive)
    SFT_STEPS: int = variable("64", "warm-up: optimizer steps", positive)
    SFT_LOSS: float = variable(
        "0", "warm-up: loss of a whole demonstration, in nats, that ends it before SFT_STEPS; 0: none", _from_0
    )
    SFT_BATCH_SIZE: int = variable("64", "demonstrations per step", positive)
    SFT_LR: float = variable("1e-5", "learning rate of the warm-up", positive)
    # rollouts and lengths
    ROLLOUT_N: int = variable("8", "samples per prompt: a group", positive)
    TEMPERATURE: float = variable("1.0", "sampling temperature of rollouts", positive)
    ROLLOUT_DTYPE: str = variable(
        "same", "`fp8`: vLLM samples in 8 bits; `same`: in the trainer's precision", _one_of("same", "fp8")
    )
    ASYNC: str = variable(
        "off",
        "`colocate`: the next prompts are sampled too while a step waits for its longest responses; "
        "`separate`: GPUs of their own sample; `off`",
        _one_of("off", "colocate", "separate"),
    )
    STALENESS: int = variable("2", "async: a sample is at most so many steps older than the policy it trains", positive)
    MAX_PROMPT_LENGTH: int = variable("256", "tokens", positive)
    MAX_RESPONSE_LENGTH: int = variable("1024", "tokens; multi-turn: of a whole episode", positive)
    MAX_TURNS: int = variable("8", "multi-turn: the model's turns per episode", positive)
    MAX_TURN_LENGTH: int = variable(_same_as("MAX_RESPONSE_LENGTH"), "multi-turn: tokens per turn", positive)
    STEP_SECONDS: float = variable("30", "multi-turn: a longer step ends the episode", positive)
    AGENT_IMAGE: str = variable(
        "", "a task's program: image of its containers, by podman or docker; empty: none", _image
    )
    # hardware
    N_GPUS: int = variable(_all_gpus, "GPUs per machine (cpu stack: processes)", positive)
    ROLLOUT_GPUS: int = variable("0", "async separate: of N_GPUS, those that sample; 0: half", _from_0)
    NNODES: int = variable("1", "machines with N_GPUS each, of the cluster at RAY_ADDRESS", positive)
    TP: int = variable("1", "GPUs that share a model while it samples", positive)
    SP: int = variable("1", "GPUs that share a sequence in the update (Ulysses)", positive)
    OFFLOAD: int = variable("0", "1: the trainer waits in CPU memory while vLLM samples", _one_of(0, 1))
    MAX_TOKENS_PER_GPU: int = variable("32768", "tokens per pass; 0: MICRO_BATCH_SIZE", _from_0)
    MICRO_BATCH_SIZE: int = variable("16", "sequences per pass, for dpo and MAX_TOKENS_PER_GPU=0", positive)
    GPU_MEMORY_UTILIZATION: float = variable("0.5", "share of GPU memory for vLLM", _fraction)
    # LoRA
    LORA_RANK: int = variable("0", "0: full fine-tuning", _rank)
    LORA_ALPHA: int = variable("32", "LoRA scale", positive)
    # evaluation: make eval, compare, probe, chat, batch
    N: int = variable("4", "samples per prompt", positive)
    LIMIT: int = variable("0", "only the first prompts; 0: all", _from_0)
    GREEDY: int = variable("1", "1: also a greedy response per prompt", _one_of(0, 1))
    EVAL_TEMPERATURE: float = variable(_same_as("TEMPERATURE"), "in evaluation; 0: one greedy response", _from_0)
    TOP_P: float = variable("1.0", "in evaluation", _fraction)
    MAX_NEW_TOKENS: int = variable(_same_as("MAX_RESPONSE_LENGTH"), "tokens per response in evaluation", positive)
    EVAL_SEED: int = variable("0", "seed of the engine in evaluation", _seed)
    # run
    RUN: str = variable("", "name of the run; empty: made from the settings", _name)
    SAVE_FREQ: int = variable("20", "RL steps between checkpoints; the warm-up has one every five minutes", positive)
    TEST_FREQ: int = variable("10", "steps between validations, each with a checkpoint; 0: none", _from_0)
    KEEP: int = variable("1", "best checkpoints to keep, besides the last", _from_0)
    PATIENCE: int = variable("0", "validations without gain that end the training; 0: never", _from_0)
    START_MINUTES: float = variable("30", "minutes without a sign of life that end a training; 0: never", _from_0)
    ABORT_ON: str = variable("", "health rules that end the training, e.g. nan,collapse", _rules)
    WANDB: int = variable("0", "1: also to Weights & Biases", _one_of(0, 1))
    LOGGER: str = variable("", "more of verl's loggers, e.g. tensorboard,mlflow")

    @property
    def sampling_gpus(self) -> int:
        """GPUs of a machine that RL only samples on; 0: it samples on those that train."""
        if self.ASYNC != "separate":
            return 0
        return self.ROLLOUT_GPUS or max(1, self.N_GPUS // 2)

    @property
    def training_gpus(self) -> int:
        """GPUs of a machine that RL trains on."""
        return self.N_GPUS - self.sampling_gpus

    @property
    def all_gpus(self) -> int:
        """GPUs of all machines, those that only sample with the others."""
        return self.N_GPUS * self.NNODES

    @property
    def world_size(self) -> int:
        """GPUs that RL trains on: of all machines."""
        return self.training_gpus * self.NNODES

    @property
    def train_file(self) -> Path:
        return Path(self.TRAIN_FILE).expanduser().absolute() if self.TRAIN_FILE else self.data_dir / "train.parquet"

    @property
    def task_dir(self) -> Path:
        return ROOT / "tasks" / self.TASK

    @property
    def multi_turn(self) -> bool:
        """Whether the task's prompts begin episodes: it has an environment.py instead of a reward.py."""
        return (self.task_dir / "environment.py").is_file()

    @property
    def by_pairs(self) -> bool:
        """Whether METHOD learns from pairs: it samples nothing in training, and they make its steps."""
        return method(self.METHOD).PAIRS

    @property
    def needs_verl(self) -> bool:
        """Whether verl trains: TRL does from pairs, after a warm-up by verl."""
        return self.INIT == "sft" or not self.by_pairs

    @property
    def reward_file(self) -> Path:
        """The task's file that makes rewards."""
        return self.task_dir / ("environment.py" if self.multi_turn else "reward.py")

    @property
    def data_dir(self) -> Path:
        return artifacts() / "data" / self.TASK

    @property
    def runs_dir(self) -> Path:
        return artifacts() / "runs" / self.TASK

    @property
    def source_files(self) -> list[Path]:
        """FILE, or the files in it if it is a folder. Raises SettingsError when there is none."""
        path = Path(self.FILE).expanduser()
        if not self.FILE or path.is_file():
            return [path] if self.FILE else []
        files = [f for f in sorted(path.glob("*")) if f.suffix.lower() in DATA_SUFFIXES and f.is_file()]
        if not files:
            raise SettingsError(f"FILE={self.FILE}: no such file, nor a folder with json, jsonl, csv or parquet files")
        return files

    def _values(self, names: str) -> dict:
        return {name: getattr(self, name) for name in names.split()}

    def data_fingerprint(self) -> str:
        """Changes when the data would change. Not with MODEL, so that several models share the same data."""
        values = self._values("SOURCE MAX_SAMPLES DIFFICULTY TRAIN_SIZE TEST_SIZE DEV_SIZE SFT_SIZE SEED REWARD")
        values |= self._values("MAX_PROMPT_LENGTH") | {"code": code_digest(self.task_dir / "prepare_data.py")}
        if self.FILE or self.SOURCE not in GENERATORS:
            values |= self._values("TEST_SHARE")
        if self.GOLD == "drop":  # which rows there are depends on the reward
            values |= {"gold": code_digest(self.reward_file)}
        return fingerprint(values, *self.source_files)

    def contents(self) -> dict[str, str]:
        """Digest of each file of the data, by its name: ``train``, ``dev``, ``test``, ``sft``. Where they were not made
        with these settings, what they would be made with stands for each."""
        return self.made().get("contents") or dict.fromkeys(("train", "dev", "test", "sft"), self.data_fingerprint())

    def made(self) -> dict:
        """The manifest of the data that are there, made with these settings; empty where none are."""
        manifest = read_json(self.data_dir / "manifest.json")
        whole = isinstance(manifest.get("rows"), dict) and manifest.get("fingerprint") == self.data_fingerprint()
        return manifest if whole else {}

    def sft_parts(self) -> dict:
        """What the warm-up reads, by name: it starts anew where one changes."""
        values = self._values("STACK MODEL SEED SFT_STEPS SFT_LOSS SFT_BATCH_SIZE SFT_LR LORA_RANK LORA_ALPHA")
        contents, length = self.contents(), self.MAX_PROMPT_LENGTH + self.MAX_RESPONSE_LENGTH
        values["demonstrations"] = contents.get("sft")
        # Longer ones are left out: the length counts where there are some, or it is not known.
        longest = contents.get(f"longest of {self.MODEL}", length + 1)
        values |= {"MAX_PROMPT_LENGTH + MAX_RESPONSE_LENGTH": length} if int(longest) > length else {}
        if self.SFT_SOURCE == "samples":
            values |= self._values("SFT_SOURCE SAMPLED_PROMPTS ROLLOUT_N TEMPERATURE REWARD TRAIN_FILE")
            values |= judge_settings() | {"train": contents.get("train"), "reward": code_digest(self.reward_file)}
        return values

    def sft_fingerprint(self) -> str:
        """Changes when the warm-up would change."""
        return fingerprint(self.sft_parts())

    def rl_parts(self, arguments: list[str], number: int = 1, start: str = "") -> dict:
        """What the training reads, by name: it starts anew where one changes. STEPS continues a run, and reporting
        variables do not count. A later round also counts its ``number`` and the model ``start``."""
        left_out = {*REPORTING, *OF_DATA, "TRAIN_FILE", "FILE", "PAIRS_FILE"}  # files count by their contents
        # Runs from before them go on.
        left_out |= set() if self.sampling_gpus else {"ROLLOUT_GPUS"}
        left_out |= {"ROLLOUT_DTYPE"} if self.ROLLOUT_DTYPE == "same" else set()
        values = {k: v for k, v in asdict(self).items() if k not in left_out and not k.startswith("SFT_")}
        values |= {"warm-up": self.sft_fingerprint()} if self.INIT == "sft" else {}
        values |= {"round": number, "start": start} if number > 1 else {}
        contents = self.contents()
        values |= {"train": contents.get("train"), "dev": contents.get("dev"), "ARGS": arguments} | judge_settings()
        own = {
            name: Path(value).expanduser() for name in ("TRAIN_FILE", "PAIRS_FILE") if (value := getattr(self, name))
        }
        values |= {name: fingerprint({}, file) for name, file in own.items() if file.is_file()}
        return values | {"reward": code_digest(self.reward_file)}


# Values of SOURCE without a fixed size: TEST_SHARE does not apply to them.
GENERATORS = ("generate", "reasoning_gym")

# Variables that do not define a run: they continue it, or only change reports.
REPORTING = {"RUN", "STEPS", "SELF_PLAY_ROUNDS", "SAVE_FREQ", "TEST_FREQ", "KEEP", "PATIENCE", "START_MINUTES"}
REPORTING |= {"ABORT_ON", "WANDB", "LOGGER", "GPU_MEMORY_UTILIZATION", "TP", "SP", "OFFLOAD", "GOLD"}
REPORTING |= {"N", "LIMIT", "GREEDY", "EVAL_TEMPERATURE", "TOP_P", "MAX_NEW_TOKENS", "EVAL_SEED"}

OF_RL = {"CLIP_LOW", "CLIP_HIGH", "KL_COEF", "MINI_BATCH_SIZE", "ROLLOUT_CORRECTION", "ROLLOUT_DTYPE"}  # of its methods
OF_EPISODES = {"MAX_TURNS", "MAX_TURN_LENGTH", "STEP_SECONDS", "AGENT_IMAGE"}
# Variables that change the data alone; a training counts these by their contents.
OF_DATA = {"SOURCE", "MAX_SAMPLES", "DIFFICULTY", "TRAIN_SIZE", "TEST_SIZE", "TEST_SHARE", "DEV_SIZE"}


@dataclass(frozen=True)
class Command:
    """Variables of single commands; no task or profile sets them."""

    STAGE: str = variable("train", "what train.sh runs")
    PROFILE: str = variable("", "values for a typical use: a file of tasks/TASK/profiles")
    FROM: str = variable("data", "train, all: the first stage to run", _one_of(*STAGES["all"].parts))
    ANYWAY: int = variable("0", "train, all: 1 trains also where no sample of the warm-up is right", _one_of(0, 1))
    METHODS: str = variable("grpo,gspo,egpo", "experiment: methods to compare")
    SEEDS: int = variable("1", "experiment: seeds of each method, from TRAIN_SEED on", positive)
    LRS: str = variable("", "experiment: learning rates, e.g. 1e-6,3e-6; empty: LR")
    JOBS: int = variable("1", "experiment: trainings at a time, N_GPUS each", positive)
    STEP: str = variable("", "checkpoint to use: `best`, `latest` or its step; empty: best if validated")
    BASE: str = variable("", "compare: model to compare with; an adapter's base model; export: its hub id")
    FILTER: int = variable("0", "probe: 1 writes prompts whose scores differ to signal.parquet", _one_of(0, 1))
    FILTER_LOW: float = variable("0.0", "probe: least accuracy", _from_0)
    FILTER_HIGH: float = variable("1.0", "probe: largest accuracy", _fraction)
    SECONDS: float = variable("120", "attack: how long to search", positive)
    GPU: str = variable("", f"rehearse: GPU of the real run, one of {', '.join(GPU_MIB)}", _gpu)
    DISK: float = variable("0", "rehearse: GB free on the real machine; 0: not known", _from_0)
    ROLLOUTS: str = variable("", "rescore: a rollouts.jsonl")
    MERGE: int = variable("0", "export: 1 writes an adapter merged into its base model", _one_of(0, 1))
    PUSH: str = variable("", "export: owner/name on the hub to upload to, after a question")
    HOST: str = variable("127.0.0.1", "serve: address to listen at; any but this machine's own wants a key")
    PORT: int = variable("8000", "serve, monitor (7860): port to listen at", _port)
    BASE_URL: str = variable("", "eval: an OpenAI-compatible endpoint to evaluate, beside the models here")
    MODEL_NAME: str = variable("", "eval: the model's name at BASE_URL")
    REQUESTS_PER_MINUTE: float = variable("0", "eval: most requests to BASE_URL in a minute; 0: no limit", _from_0)
    INPUT: str = variable("", "batch: json, jsonl, csv or xlsx with a column prompt")
    OUTPUT: str = variable("", "batch: xlsx, json, jsonl or csv to write; export: a new folder")


def artifacts() -> Path:
    """Where everything that a run writes goes: ARTIFACTS, else artifacts/ of the project. Raises SettingsError."""
    given = os.environ.get("ARTIFACTS") or str(ROOT / "artifacts")
    _check_utf8("ARTIFACTS", given)
    try:
        return Path(given).expanduser().absolute()  # workers of a cluster run elsewhere
    except RuntimeError:
        raise SettingsError(f"ARTIFACTS={given}: there is no user of that name") from None


def given_arguments() -> list[str]:
    """The words of ARGS, split at spaces outside of quotes as a shell would; nothing in them is expanded or run.

    Raises SettingsError.
    """
    text = os.environ.get("ARGS", "")
    try:
        return shlex.split(text)
    except ValueError as error:
        raise SettingsError(f"ARGS={' '.join(text.split())[:80]}: {str(error).lower()}") from None


JUDGED = ("JUDGE_MODEL", "JUDGE_SAMPLING")


def judge_settings() -> dict[str, str]:
    """The variables of a judge (tasks/common/rewards/judge.py) that change its scores; empty without one."""
    return {name: os.environ[name] for name in JUDGED if os.environ.get(name)}


def teacher_gpus(runs: Iterable[Settings]) -> int:
    """The most GPUs that the method of one of ``runs`` takes beside N_GPUS, for a teacher."""
    return max(method(s.METHOD).GPUS for s in runs)


def stack(name: str):
    """The module of a stack."""
    return importlib.import_module(f"verl_tasks.stacks.{name}")


# ---- values --------------------------------------------------------------------------------------------------------

COMPLETE = "SETTINGS_COMPLETE"  # set if the environment has every variable; then nothing else is read
LORA_RATES = 10  # factor on the rates of full fine-tuning (Schulman et al. 2025, "LoRA Without Regret")


@dataclass(frozen=True)
class Value:
    """A variable's ``text``, and ``source``: where it comes from, in a few words."""

    text: str
    source: str


def read_defaults(file: Path) -> dict[str, dict[str, str]]:
    """The `default` lines of ``file`` as {STACK, or "" for all: {NAME: VALUE}}. Raises SettingsError.

    A value is plain text, in quotes where it has spaces; $ROOT stands for the project.
    """
    defaults: dict[str, dict[str, str]] = {"": {}} | {stack: {} for stack in STACKS}
    for line in file.read_text().splitlines():
        if not re.match(r"\s*default\s", line):
            continue
        try:
            _, name, value, *own = shlex.split(line, comments=True)
        except ValueError:
            raise SettingsError(f"{file}: {line.strip()[:80]}: must be default NAME VALUE [STACK=VALUE ...]") from None
        if name not in Settings.__dataclass_fields__:
            raise SettingsError(f"{file}: default {name}: {unknown(name, Settings.__dataclass_fields__)}")
        for of, _, text in (("", "", value), *(pair.partition("=") for pair in own)):
            if of not in defaults:
                raise SettingsError(f"{file}: default {name}: {of}: no such stack; there are: {', '.join(STACKS)}")
            text = text.replace("$ROOT", str(file.resolve().parents[2]))
            if "$" in text or "`" in text:
                raise SettingsError(f"{file}: default {name}: {text}: a value is plain text, bash does not read it")
            defaults[of][name] = text
    return defaults


def profile_file(task_dir: Path, name: str) -> Path:
    """The file of a profile. Raises SettingsError when the task has no such profile."""
    known = sorted(path.stem for path in task_dir.glob("profiles/*.sh"))
    if name not in known:
        there = f"there are: {', '.join(known) or 'none'}"
        raise SettingsError(f"PROFILE={name}: TASK={task_dir.name} has no such profile; {there}")
    return task_dir / f"profiles/{name}.sh"


def values_of(environ: Mapping[str, str]) -> dict[str, Value]:
    """The value of every variable of Settings as text, and where it comes from. Raises SettingsError."""
    given = {name: environ[name] for name in Settings.__dataclass_fields__ if environ.get(name)}
    stage, complete = environ.get("STAGE", "train"), environ.get(COMPLETE)
    if stage_of(stage).evaluates and "TEMPERATURE" in given and not complete:  # of the evaluation, then
        given.setdefault("EVAL_TEMPERATURE", given["TEMPERATURE"])
        del given["TEMPERATURE"]
    name, none = given.get("STACK", ""), {}
    module, profile, own = (stack(name) if name in STACKS else None), none, none
    if given.get("TASK") and not complete:
        folder = ROOT / "tasks" / given["TASK"]
        own = read_defaults(folder / "train.sh") if (folder / "train.sh").exists() else none
        profile = read_defaults(profile_file(folder, environ["PROFILE"])) if environ.get("PROFILE") else none
    of_profile = [(f"profile {environ.get('PROFILE')}", profile.get(of, none)) for of in (name, "")]
    layers = [
        *of_profile,
        ("TEST_SIZE", {"TEST_SHARE": "1"} if "TEST_SIZE" in given else none),  # a default alone is held to a share
        (f"make {stage}", getattr(module, "STAGE_DEFAULTS", {}).get(stage, {})),
        (f"make {stage}", stage_of(stage).defaults),
        (f"train.sh, {name}", own.get(name, none)),
        ("train.sh", own.get("", none)),
    ]
    below = [(f"stack {name}", getattr(module, "DEFAULTS", {}))]
    shared = {name: f.metadata["default"] for name, f in Settings.__dataclass_fields__.items()}

    def first(name: str, layers: list) -> Value | None:
        return next((Value(layer[name], source) for source, layer in layers if layer.get(name)), None)

    early = first("METHOD", [("", given), *layers, *below])
    if (chosen := early.text if early else shared["METHOD"]) in METHODS:
        layers.append((f"METHOD={chosen}", method(chosen).DEFAULTS))
    typed, values = environ.get("GIVEN", "").split(), {}
    for name, default in shared.items():
        if name in given:
            values[name] = Value(given[name], "command line" if name in typed else "environment")
        else:
            values[name] = first(name, [*layers, *below]) or Value(default, "default")
    if values["LORA_RANK"].text != "0":
        for name in ("LR", "SFT_LR"):
            text, source = values[name].text, values[name].source
            if name not in given and not first(name, of_profile) and _NUMBER[float].fullmatch(text):
                values[name] = Value(f"{LORA_RATES * float(text):g}", f"{source}, x {LORA_RATES} for LoRA")
    for name, value in values.items():
        if callable(value.text):  # it follows from others
            values[name] = Value(value.text({name: each.text for name, each in values.items()}), "default")
    return values


def load_settings(environ: Mapping[str, str] | None = None, cls: type = Settings):
    """``cls`` (Settings, or a dataclass of a command's variables) from ``environ`` (default: the process environment).

    Raises SettingsError for the first bad value.
    """
    environ = os.environ if environ is None else environ
    if cls is Settings:
        texts = {name: value.text for name, value in values_of(environ).items()}
        # Not where settings are COMPLETE: Ray hides the GPUs from processes of a training that use none.
        if texts["N_GPUS"] == "0" or (stage_of(os.environ.get("STAGE", "")).gpu and not os.environ.get(COMPLETE)):
            check_visible(texts["STACK"], texts["N_GPUS"])
    else:
        texts = {f.name: environ.get(f.name) or f.metadata["default"] for f in fields(cls)}
    settings = cls(**{f.name: _checked(f, texts[f.name]) for f in fields(cls)})
    if cls is Settings:
        if not settings.MINI_BATCH_SIZE:
            prompts, steps = settings.TRAIN_BATCH_SIZE, method(settings.METHOD).MINI_BATCHES
            counts = [count for count in range(1, 2 * steps) if prompts % count == 0]  # more are further than 1
            nearest = min(counts, key=lambda count: abs(count - steps))  # of equally near ones the fewer
            settings = replace(settings, MINI_BATCH_SIZE=prompts // nearest)
        typed, stage = environ.get("GIVEN", "").split(), environ.get("STAGE", "train")
        for problem in problems(settings, stage):
            raise SettingsError(problem)
        # An evaluation is as the run was, and an experiment has several methods.
        trains = stage_of(stage).plans and stage != "experiment"
        for name, what in unread(settings).items():
            if name in typed and environ.get(name) and (trains or name in OF_EPISODES):
                raise SettingsError(f"{name}={texts[name]}: is for {what}; leave {name} out")
    return settings


def unread(s: Settings) -> dict[str, str]:
    """What a variable is for that a training with ``s`` does not read, by its name: those of episodes, of RL, and those
    whose help begins with another method or `async`."""
    found = {}
    for f in fields(s):
        of = f.metadata["help"].partition(":")[0]
        if f.name in OF_EPISODES and not s.multi_turn:
            found[f.name] = f"multi-turn tasks; TASK={s.TASK} has single responses"
        elif f.name in OF_RL and s.by_pairs:
            found[f.name] = f"the RL methods; this is METHOD={s.METHOD}"
        elif of in METHODS and of != s.METHOD:
            found[f.name] = f"METHOD={of}; this is METHOD={s.METHOD}"
        elif of == "async" and s.ASYNC == "off":
            found[f.name] = "ASYNC=colocate or separate; this is ASYNC=off"
    return found


def _checked(f: Field, text: str):
    """``text`` as a value of the variable ``f``. Raises SettingsError."""
    shown = " ".join(text.split())[:80] if text == text.strip() else repr(text[:80])
    _check_utf8(f.name, text)
    if f.type in _NUMBER and not _NUMBER[f.type].fullmatch(text):
        kind = {int: "a whole number, such as 1", float: "a number, such as 0.5"}[f.type]
        raise SettingsError(f"{f.name}={shown}: must be {kind} ({f.metadata['help']})")
    value = f.type(text)
    check = f.metadata["check"]
    if check and (problem := check(value)):
        if not problem.startswith("must be one of"):  # the help lists the choices already
            problem += f" ({f.metadata['help']})"
        raise SettingsError(f"{f.name}={shown}: {problem}")
    return value


def _check_utf8(name: str, text: str) -> None:
    """Raise SettingsError if the environment's value is not UTF-8: no JSON or parquet file could hold it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        shown = ascii(os.fsencode(text))[2:-1]
        raise SettingsError(f"{name}={shown}: is not UTF-8") from None


def recorded_texts(values: Mapping[str, object]) -> dict[str, str]:
    """The ``values`` of a run's record as texts for the environment. The run may come from elsewhere: treat it as data.

    Raises SettingsError for a name that is no variable of Settings, and for a value that its variable does not take.
    """
    known, texts = {f.name: f for f in fields(Settings)}, {}
    for name, value in values.items():
        if name not in known:
            raise SettingsError(f"{name[:80]!r}: {unknown(name[:80], known)}")
        if type(value) not in (str, int, float) or not str(value).isprintable():
            raise SettingsError(f"{name}={str(value)[:80]!r}: must be a number or one line of text")
        _checked(known[name], str(value))
        texts[name] = str(value)
    return texts


def batch_problems(
    prompts: int, mini: int, samples: int, gpus: int, nodes: int, called: str = "N_GPUS"
) -> Iterator[str]:
    """Why verl would refuse to train on ``samples`` of ``prompts`` in mini-batches of ``mini`` prompts, in words.
    ``called``: what ``gpus`` is."""
    if prompts % mini:
        yield f"MINI_BATCH_SIZE={mini}: must divide TRAIN_BATCH_SIZE={prompts}"
    if mini * samples % (gpus * nodes):  # verl/workers/engine_workers.py, train_mini_batch
        machines = f" x NNODES={nodes}" if nodes > 1 else ""
        yield f"{called}={gpus}{machines}: must divide MINI_BATCH_SIZE x ROLLOUT_N = {mini * samples}"


def token_problems(tokens: int, shared: int, prompt: int, response: int) -> Iterator[str]:
    """Why a pass of ``tokens`` on each of ``shared`` GPUs cannot take a sequence (verl/utils/seqlen_balancing.py,
    rearrange_micro_batches)."""
    if tokens * shared < prompt + response:
        lengths = f"MAX_PROMPT_LENGTH + MAX_RESPONSE_LENGTH = {prompt + response}"
        among = f" x SP={shared}" if shared > 1 else ""
        yield f"MAX_TOKENS_PER_GPU={tokens}{among}: less than {lengths}, one sequence"


def _parallel_problems(s: Settings, stage: str) -> Iterator[str]:
    """Why models or sequences cannot be shared among the GPUs in this way."""
    if s.OFFLOAD and s.STACK == "cpu":
        yield "OFFLOAD=1: is for GPUs; leave OFFLOAD out"
    for name, value in (("TP", s.TP), ("SP", s.SP)):
        if value > 1 and s.STACK == "cpu":
            yield f"{name}={value}: is for GPUs; leave {name} out"
        if s.N_GPUS % value and (name == "TP" or stage_of(stage).plans):  # an evaluation shares no sequences
            yield f"{name}={value}: must divide N_GPUS={s.N_GPUS}"
    problem = getattr(stack(s.STACK), "SP_PROBLEM", "")
    if s.SP > 1 and problem and stage_of(stage).plans and stage != "sft":
        yield f"SP={s.SP}: {problem}"
    if s.SP > 1 and not s.MAX_TOKENS_PER_GPU:
        yield f"SP={s.SP}: shares sequences without padding; set MAX_TOKENS_PER_GPU"


def _multi_turn_problems(s: Settings) -> Iterator[str]:
    """What a multi-turn task cannot do."""
    if problem := getattr(stack(s.STACK), "MULTI_TURN_PROBLEM", ""):
        yield f"TASK={s.TASK}: {problem}"
    for name, single, fix in (
        ("METHOD", not method(s.METHOD).EPISODES, "take another METHOD"),
        ("TRUNCATED", s.TRUNCATED == "shaped", "take TRUNCATED=masked or counted"),
    ):
        if single:
            yield f"{name}={getattr(s, name)}: is for single-turn tasks; TASK={s.TASK} has episodes; {fix}"
    for name in ("REWARD", "REWARD_MODEL"):
        if getattr(s, name):
            yield f"{name}={getattr(s, name)}: TASK={s.TASK} has the rewards of its environment.py; leave {name} out"
    if s.MAX_TURN_LENGTH > s.MAX_RESPONSE_LENGTH:
        yield f"MAX_TURN_LENGTH={s.MAX_TURN_LENGTH}: more than MAX_RESPONSE_LENGTH={s.MAX_RESPONSE_LENGTH}, all turns"


def _async_problems(s: Settings) -> Iterator[str]:
    """What cannot learn from samples of an older policy, or has not been tried."""
    chosen = f"ASYNC={s.ASYNC}"
    if problem := getattr(stack(s.STACK), "ASYNC_PROBLEM", ""):
        yield f"{chosen}: {problem}"
    if not method(s.METHOD).ASYNC:
        able = ", ".join(name for name in METHODS if method(name).ASYNC)
        yield f"{chosen}: METHOD={s.METHOD} learns from its present policy's samples; take one of {able}, or ASYNC=off"
    if s.ROLLOUT_CORRECTION == "none":
        yield f"{chosen}: older samples need weights; take ROLLOUT_CORRECTION=token"
    if s.REWARD_MODEL:
        yield f"{chosen}: REWARD_MODEL scores whole batches on the same GPUs; leave one out"
    if s.SELF_PLAY_ROUNDS > 1:
        yield f"{chosen}: a round of self-play begins with samples of its own policy; leave one out"
    if s.ASYNC == "separate":
        yield from _separate_problems(s)


def _separate_problems(s: Settings) -> Iterator[str]:
    """Why GPUs cannot be parted into those that train and those that sample (ASYNC=separate)."""
    chosen, train, sample = "ASYNC=separate", s.training_gpus, s.sampling_gpus
    if s.N_GPUS < 2:
        yield f"{chosen}: N_GPUS={s.N_GPUS}, and one trains while another samples; take 2 or more, or ASYNC=colocate"
    elif train < 1:
        yield f"ROLLOUT_GPUS={s.ROLLOUT_GPUS}: leaves none of N_GPUS={s.N_GPUS} to train; set it lower"
    elif sample % s.TP:
        yield f"TP={s.TP}: must divide ROLLOUT_GPUS={sample}"
    elif train % s.SP:
        yield f"SP={s.SP}: must divide N_GPUS - ROLLOUT_GPUS = {train}"
    if s.NNODES > 1:
        yield f"{chosen}: has not been tried on several machines; leave NNODES out, or take ASYNC=colocate"
    if s.LORA_RANK:  # verl 0.9.1 sends the base model without its adapter (engine_workers.py, update_weights)
        yield f"{chosen}: verl would sample without the adapter that it trains; leave LORA_RANK out, or ASYNC=colocate"
    if s.OFFLOAD:
        yield f"{chosen}: OFFLOAD=1 makes room for vLLM, which has GPUs of its own; leave OFFLOAD out"


def _fp8_problems(s: Settings) -> Iterator[str]:
    """What cannot sample in 8 bits (verl's block-wise fp8), or has not been tried."""
    chosen = f"ROLLOUT_DTYPE={s.ROLLOUT_DTYPE}"
    if problem := getattr(stack(s.STACK), "FP8_PROBLEM", ""):
        yield f"{chosen}: {problem}"
    if s.ROLLOUT_CORRECTION == "none":
        yield f"{chosen}: samples of another precision need weights; take ROLLOUT_CORRECTION=token"
    if s.LORA_RANK:
        yield f"{chosen}: has not been tried with an adapter; leave LORA_RANK out"


def _training_problems(s: Settings, stage: str) -> Iterator[str]:
    """Why the GPUs cannot share the batches of a training, or its steps are too few."""
    called = "N_GPUS - ROLLOUT_GPUS" if s.sampling_gpus else "N_GPUS"
    if s.training_gpus > 0 and not s.by_pairs:
        prompts, mini = s.TRAIN_BATCH_SIZE, s.MINI_BATCH_SIZE
        yield from batch_problems(prompts, mini, s.ROLLOUT_N, s.training_gpus, s.NNODES, called)
    if (s.INIT == "sft" or stage == "sft") and s.SFT_BATCH_SIZE % s.N_GPUS:
        yield f"N_GPUS={s.N_GPUS}: must divide SFT_BATCH_SIZE={s.SFT_BATCH_SIZE}"
    if s.MAX_TOKENS_PER_GPU and s.needs_verl:
        yield from token_problems(s.MAX_TOKENS_PER_GPU, s.SP, s.MAX_PROMPT_LENGTH, s.MAX_RESPONSE_LENGTH)
    if s.METHOD == "ppo" and s.CRITIC_WARMUP >= s.STEPS:
        yield f"CRITIC_WARMUP={s.CRITIC_WARMUP}: leaves none of STEPS={s.STEPS} to the policy; set it lower"
    of_policy = s.STEPS - (s.CRITIC_WARMUP if s.METHOD == "ppo" else 0)
    if not s.by_pairs and of_policy <= s.LR_WARMUP:
        after = f" after CRITIC_WARMUP={s.CRITIC_WARMUP}" if of_policy < s.STEPS else ""
        yield f"LR_WARMUP={s.LR_WARMUP}: the rate reaches LR in none of STEPS={s.STEPS}{after}; set it lower"


def problems(s: Settings, stage: str) -> Iterator[str]:
    """Values that do not fit together, one line each; only for a training must a batch fit the GPUs."""
    if s.multi_turn:
        yield from _multi_turn_problems(s)
    if stage_of(stage).plans:
        yield from method(s.METHOD).refusals(s)
        if s.ASYNC != "off":
            yield from _async_problems(s)
        if s.ROLLOUT_DTYPE != "same" and not s.by_pairs:
            yield from _fp8_problems(s)
        yield from _training_problems(s, stage)
    yield from _parallel_problems(s, stage)
    if 0 < s.TRAIN_SIZE < s.TRAIN_BATCH_SIZE:
        yield f"TRAIN_BATCH_SIZE={s.TRAIN_BATCH_SIZE}: larger than TRAIN_SIZE={s.TRAIN_SIZE}"
    if s.TEST_FREQ and not s.DEV_SIZE:
        yield f"TEST_FREQ={s.TEST_FREQ}: validates on the dev set; set DEV_SIZE, or TEST_FREQ=0"
    if s.PATIENCE and not s.TEST_FREQ:
        yield f"PATIENCE={s.PATIENCE}: counts validations; set TEST_FREQ, or PATIENCE=0"
    learns = method(s.METHOD).REWARD or s.by_pairs
    if s.TRUNCATED == "shaped" and s.METHOD != "dapo" and (not learns or s.REWARD_MODEL):
        what = "REWARD_MODEL is the whole reward" if s.REWARD_MODEL else f"METHOD={s.METHOD} learns from no reward"
        yield f"TRUNCATED=shaped: {what}; take TRUNCATED=masked or counted"
    if s.ROLLOUT_GPUS and s.ASYNC != "separate":
        yield f"ROLLOUT_GPUS={s.ROLLOUT_GPUS}: is for ASYNC=separate; leave ROLLOUT_GPUS out"
    if s.TEACHER and s.METHOD != "distill":
        yield f"TEACHER={s.TEACHER}: is for METHOD=distill; METHOD={s.METHOD} has none"
    if s.INIT == "sft" and s.SFT_SOURCE == "task" and s.SFT_SIZE < s.SFT_BATCH_SIZE:
        yield f"SFT_BATCH_SIZE={s.SFT_BATCH_SIZE}: larger than SFT_SIZE={s.SFT_SIZE}"


# ---- for people ----------------------------------------------------------------------------------------------------


def unknown(name: str, known: Iterable[str]) -> str:
    """Why an unknown variable is refused, with the nearest known name."""
    near = difflib.get_close_matches(name.upper(), known, 1, 0.5)
    if inside := [other for other in known if len(name) > 1 and name.upper().endswith(f"_{other}")]:
        near = inside  # LEARNING_RATE has no near name, MY_LR has
    near = {"LEARNING_RATE": ["LR"], "BATCH_SIZE": ["TRAIN_BATCH_SIZE"]}.get(name.upper(), near)
    return f"no such variable{f'; did you mean {near[0]}?' if near else ', see `make help`'}"


def shown_default(f: Field) -> str:
    """A variable's default for people: its value, or the rule it follows."""
    default = f.metadata["default"]
    return (default.__doc__ if callable(default) else default) or "-"


def table(environ: Mapping[str, str]) -> str:
    """`make settings`: every variable with its value, where that comes from, and its help. Raises SettingsError."""
    values, settings = values_of(environ), load_settings(environ)
    texts = {name: value.text or "-" for name, value in values.items()}
    texts["MINI_BATCH_SIZE"] = str(settings.MINI_BATCH_SIZE)
    wide, sources = max(map(len, texts.values())) + 2, max(len(value.source) for value in values.values()) + 2
    return "\n".join(
        f"{f.name:<24}{texts[f.name]:<{wide}}{values[f.name].source:<{sources}}{f.metadata['help']}"
        for f in fields(Settings)
    )
