"""The settings of a run: read from the environment that train.sh exports, checked, with the paths they imply."""

import functools
import hashlib
import importlib
import json
import os
import re
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HEALTH_RULES = (
    "nan",
    "collapse",
    "kl",
    "spike",
    "zero_variance",
    "truncation",
    "no_reward",
)  # tasks/common/runs/health.py
METHODS = sorted(path.stem for path in (ROOT / "tasks/common/training/methods").glob("[a-z]*.py"))


class SettingsError(ValueError):
    """A variable has a value that cannot be; the message is one line for the user."""


def _setting(help: str, check=None, default=MISSING):
    return field(default=default, metadata={"help": help, "check": check})


def _positive(value) -> str | None:
    return None if 0 < value < 1e15 else "must be greater than 0"  # false for NaN and infinity


def _not_negative(value) -> str | None:
    return None if 0 <= value < 1e15 else "must be 0 or more"


def _count_or_share(value) -> str | None:
    good = 0 <= value < 1e15 and (value < 1 or value == int(value))
    return None if good else "must be a count, or a share below 1"


def _fraction(value) -> str | None:
    return None if 0 < value <= 1 else "must be above 0 and at most 1"


def _one_of(*choices):
    return lambda value: None if value in choices else f"must be one of {', '.join(map(str, choices))}"


def _name(value: str) -> str | None:
    return (
        None if re.fullmatch(r"[A-Za-z0-9._-]{0,64}", value) and not value.startswith(".") else "must be a plain name"
    )


def _rules(value: str) -> str | None:
    unknown = [name for name in value.split(",") if name and name not in HEALTH_RULES]
    return f"{unknown[0]}: must be some of {', '.join(HEALTH_RULES)}" if unknown else None


def _not_empty(value: str) -> str | None:
    return None if value.strip() else "must not be empty"


@dataclass(frozen=True)
class Settings:
    """One field for each variable of a train.sh config block, under the same name; `make help` prints them."""

    TASK: str = _setting("folder under tasks/", _name)
    STACK: str = _setting("packages and hardware: cpu, a100, current; default from the machine", _name)
    # model and data
    MODEL: str = _setting("a hub id, a folder, or `embedded` (SmolLM2-135M-Instruct)", _not_empty)
    INIT: str = _setting("start from `base`, or from an SFT warm-up (`sft`)", _one_of("base", "sft"))
    SOURCE: str = _setting("where the data comes from; what a task knows stands in its train.sh", _not_empty)
    FILE: str = _setting("a data file (json, jsonl, csv, parquet), or a folder of them; then the source")
    MAX_SAMPLES: int = _setting("at most so many examples of a file or data set; 0: all", _not_negative)
    DIFFICULTY: str = _setting("of generated problems: easy or hard", _one_of("easy", "hard"))
    TRAIN_SIZE: int = _setting("training prompts; 0: all that a file or data set has", _not_negative)
    TEST_SIZE: float = _setting("held-out prompts: count, share below 1, or 0: all of a test split", _count_or_share)
    DEV_SIZE: int = _setting("prompts for validation, of what would be training data; 0: none", _not_negative)
    SFT_SIZE: int = _setting("demonstrations, of training prompts", _not_negative)
    SFT_SOURCE: str = _setting("demonstrations: the `task`'s, or right `samples` of MODEL", _one_of("task", "samples"))
    TRAIN_FILE: str = _setting("parquet to train on in place of train.parquet, e.g. the signal.parquet of a probe")
    PAIRS_FILE: str = _setting(
        "dpo: parquet, json or jsonl of prompt, chosen, rejected; empty: of the policy's samples"
    )
    SAMPLED_PROMPTS: int = _setting("training prompts sampled for SFT_SOURCE=samples and dpo; 0: all", _not_negative)
    SEED: int = _setting("of data, sampling and shuffling", _not_negative)
    # optimisation
    METHOD: str = _setting(f"one of {', '.join(METHODS)}", _one_of(*METHODS))
    REWARD: str = _setting("variant of the task's reward; what a task knows stands in its train.sh", _name)
    REWARD_MODEL: str = _setting("a sequence classifier (hub id or folder) whose score is the reward in training")
    STEPS: int = _setting("training steps; a larger number continues the same run", _positive)
    SELF_PLAY_ROUNDS: int = _setting("trainings of STEPS, each from, and held to, the result of the last", _positive)
    TRAIN_BATCH_SIZE: int = _setting("prompts (dpo: pairs) a step", _positive)
    MINI_BATCH_SIZE: int = _setting("prompts an optimizer step; 0: as the method wants", _not_negative)
    LR: float = _setting("learning rate of the policy", _positive)
    CRITIC_LR: float = _setting("ppo: learning rate of the critic", _positive)
    KL_COEF: float = _setting("weight of the KL to the start; 0: no reference model", _not_negative)
    EGPO_LAMBDA: float = _setting("egpo: weight of the entropy in the advantage; 0: GRPO", _not_negative)
    EGPO_ALPHA: float = _setting("egpo: the entropy counts up to advantage / EGPO_ALPHA", _positive)
    DPO_BETA: float = _setting("dpo: how strongly the policy is held to the start", _positive)
    SFT_STEPS: int = _setting("optimizer steps of the warm-up", _positive)
    SFT_BATCH_SIZE: int = _setting("demonstrations a step", _positive)
    SFT_LR: float = _setting("learning rate of the warm-up", _positive)
    # rollouts and lengths
    ROLLOUT_N: int = _setting("samples a prompt, the group of a group advantage", _positive)
    TEMPERATURE: float = _setting("of rollouts", _positive)
    MAX_PROMPT_LENGTH: int = _setting("tokens", _positive)
    MAX_RESPONSE_LENGTH: int = _setting("tokens", _positive)
    # hardware
    N_GPUS: int = _setting("GPUs of this machine (on the cpu stack: processes that play one)", _positive)
    NNODES: int = _setting("machines with N_GPUS each; more than one: of the Ray cluster at RAY_ADDRESS", _positive)
    MAX_TOKENS_PER_GPU: int = _setting("in one forward pass, padding left out; 0: MICRO_BATCH_SIZE", _not_negative)
    MICRO_BATCH_SIZE: int = _setting("dpo, MAX_TOKENS_PER_GPU=0: sequences a GPU in one forward pass", _positive)
    GPU_MEMORY_UTILIZATION: float = _setting("share of GPU memory for vLLM", _fraction)
    # LoRA
    LORA_RANK: int = _setting("0: full fine-tuning", _not_negative)
    LORA_ALPHA: int = _setting("LoRA scale", _positive)
    # evaluation: make eval, compare, probe, chat, batch
    N: int = _setting("samples a prompt", _positive)
    LIMIT: int = _setting("the first so many prompts; 0: all", _not_negative)
    GREEDY: int = _setting("1: a greedy response a prompt besides the samples; 0: none", _one_of(0, 1))
    EVAL_TEMPERATURE: float = _setting("of evaluation; 0: greedy, one response a prompt", _not_negative)
    TOP_P: float = _setting("of evaluation", _fraction)
    MAX_NEW_TOKENS: int = _setting("tokens a response in evaluation", _positive)
    EVAL_SEED: int = _setting("of the engine in evaluation", _not_negative)
    # run
    RUN: str = _setting("name of the run; empty: made from the settings", _name)
    SAVE_FREQ: int = _setting("steps between checkpoints", _positive)
    TEST_FREQ: int = _setting("steps between validations on the dev set; 0: none", _not_negative)
    KEEP: int = _setting("best checkpoints that stay besides the last one", _not_negative)
    PATIENCE: int = _setting("validations without a gain that end the training; 0: never", _not_negative)
    ABORT_ON: str = _setting("health rules that end the training after a checkpoint, e.g. nan,collapse", _rules)
    WANDB: int = _setting("1: also to Weights & Biases", _one_of(0, 1))
    LOGGER: str = _setting("more verl loggers beside console and file, e.g. tensorboard,mlflow")

    @property
    def world_size(self) -> int:
        """GPUs that RL trains on: of all machines."""
        return self.N_GPUS * self.NNODES

    @property
    def train_file(self) -> Path:
        return Path(self.TRAIN_FILE).absolute() if self.TRAIN_FILE else self.data_dir / "train.parquet"

    @property
    def task_dir(self) -> Path:
        return ROOT / "tasks" / self.TASK

    @property
    def data_dir(self) -> Path:
        return artifacts() / "data" / self.TASK

    @property
    def runs_dir(self) -> Path:
        return artifacts() / "runs" / self.TASK

    @property
    def source_files(self) -> list[Path]:
        """FILE, or the files in it where it is a folder. Raises SettingsError when there is none."""
        path = Path(self.FILE).expanduser()
        if not self.FILE or path.is_file():
            return [path] if self.FILE else []
        files = [f for f in sorted(path.glob("*")) if f.suffix in (".json", ".jsonl", ".csv", ".parquet")]
        if not files:
            raise SettingsError(f"FILE={self.FILE}: no such file, nor a folder with json, jsonl, csv or parquet files")
        return files

    def data_fingerprint(self) -> str:
        """Changes when the data would. Not with MODEL, so that several models share the same data."""
        names = ("SOURCE", "MAX_SAMPLES", "DIFFICULTY", "TRAIN_SIZE", "TEST_SIZE", "DEV_SIZE", "SFT_SIZE", "SEED")
        names += ("REWARD", "MAX_PROMPT_LENGTH")
        other = ("reward.py", "evaluate.py")
        code = [f for f in self.task_dir.glob("*.py") if f.name not in other and not f.name.startswith("test_")]
        return fingerprint({name: getattr(self, name) for name in names}, *sorted(code), *self.source_files)

    def sft_fingerprint(self) -> str:
        """Changes when the warm-up would."""
        names = ("STACK", "MODEL", "SFT_STEPS", "SFT_BATCH_SIZE", "SFT_LR", "LORA_RANK", "LORA_ALPHA")
        names += ("MAX_PROMPT_LENGTH", "MAX_RESPONSE_LENGTH")
        values = {name: getattr(self, name) for name in names} | {"data": self.data_fingerprint()}
        if self.SFT_SOURCE == "task":
            return fingerprint(values)
        names = ("SFT_SOURCE", "SAMPLED_PROMPTS", "ROLLOUT_N", "TEMPERATURE", "SEED", "REWARD", "TRAIN_FILE")
        values |= {name: getattr(self, name) for name in names} | judge_settings()
        return fingerprint(values, self.task_dir / "reward.py")

    def rl_fingerprint(self, arguments: list[str], number: int = 1, start: str = "") -> str:
        """Changes when the training would; not with STEPS, which continues a run, nor with what only reports.

        A round of self-play beyond the first has its ``number`` and the model ``start`` that it begins with.
        """
        sft = {name for name in asdict(self) if name.startswith("SFT_")} if self.INIT == "base" else set()
        values = {
            name: value
            for name, value in asdict(self).items()
            if name not in REPORTING | sft | {"TRAIN_FILE", "FILE", "PAIRS_FILE"}
        }
        if number > 1:
            values |= {"round": number, "start": start}
        values |= {"data": self.data_fingerprint(), "arguments": arguments} | judge_settings()
        own_files = [Path(name).expanduser() for name in (self.TRAIN_FILE, self.PAIRS_FILE) if name]
        return fingerprint(values, self.task_dir / "reward.py", *filter(Path.is_file, own_files))


# The stages of `make all`, in order.
WHOLE = ("data", "model", "sft", "train", "merge", "eval", "compare")

# What a run is not known by: what continues it, or only reports.
REPORTING = {"RUN", "STEPS", "SELF_PLAY_ROUNDS", "SAVE_FREQ", "ABORT_ON", "WANDB", "LOGGER", "GPU_MEMORY_UTILIZATION"}
REPORTING |= {"TEST_FREQ", "KEEP", "PATIENCE"}
REPORTING |= {"N", "LIMIT", "GREEDY", "EVAL_TEMPERATURE", "TOP_P", "MAX_NEW_TOKENS", "EVAL_SEED"}


@dataclass(frozen=True)
class Command:
    """Variables of single commands; they stand in no config block."""

    STAGE: str = _setting("what train.sh runs", default="train")
    PROFILE: str = _setting("values for a typical use: a file of tasks/TASK/profiles, by its name", default="")
    FROM: str = _setting("all: the stage to start with, on what is there", _one_of(*WHOLE), default="data")
    METHODS: str = _setting("experiment: methods to compare, with the same data and settings", default="grpo,gspo,egpo")
    STEP: str = _setting(
        "eval, compare, merge, chat, batch: checkpoint `best`, `latest` or its step; empty: best if validated",
        default="",
    )
    BASE: str = _setting("compare: the model to compare with; the base model of an adapter", default="")
    MODEL_GIVEN: str = _setting("MODEL as it was given, before defaults", default="")
    FILTER: int = _setting("probe: 1 writes the prompts with signal to signal.parquet", _one_of(0, 1), default=0)
    FILTER_LOW: float = _setting("probe: accuracy strictly above", _not_negative, default=0.0)
    FILTER_HIGH: float = _setting("probe: accuracy strictly below", _fraction, default=1.0)
    ROLLOUTS: str = _setting("rescore: a rollouts.jsonl", default="")
    INPUT: str = _setting("batch: json, jsonl, csv or xlsx with a column prompt", default="")
    OUTPUT: str = _setting("batch: xlsx, json, jsonl or csv to write", default="")
    TEMPLATE: str = _setting(
        "batch: chat template default (the model's own), chatml or llama",
        _one_of("default", "chatml", "llama"),
        default="default",
    )
    MONTHS: int = _setting("simulate: months of the economy", _positive, default=24)
    AGENTS: int = _setting("simulate: workers, each asked every month", _positive, default=16)
    BACKEND: str = _setting("batch: vllm or transformers", _one_of("vllm", "transformers"), default="vllm")


def artifacts() -> Path:
    """Where everything that a run writes goes."""
    return Path(os.environ.get("ARTIFACTS", ROOT / "artifacts")).absolute()  # workers of a cluster run elsewhere


def judge_settings() -> dict[str, str]:
    """What of a judge (tasks/common/rewards/judge.py) changes its scores; empty without one."""
    return {name: os.environ[name] for name in ("JUDGE_MODEL", "JUDGE_SAMPLING") if os.environ.get(name)}


def fingerprint(values: dict, *files: Path) -> str:
    """Eight hex digits of a digest of ``values`` and of the contents of ``files``."""
    digest = hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=4)
    for file in files:
        digest.update(_digest(file))
    return digest.hexdigest()


@functools.cache
def _digest(file: Path) -> bytes:
    """Taken once in a process: a file that is edited during a run must not change what the run is called."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").digest()


def method(name: str):
    """The module of a method."""
    return importlib.import_module(f"tasks.common.training.methods.{name}")


def load_settings(environ: dict[str, str] | None = None, cls: type = Settings):
    """``cls`` (Settings or Command) from ``environ`` (default: the process environment). Raises SettingsError for the
    first bad value, and for a variable that is missing and has no default."""
    environ = os.environ if environ is None else environ
    values = {}
    for f in fields(cls):
        text = environ.get(f.name)
        if not text and f.default is not MISSING:
            continue
        shown = " ".join((text or "").split())[:80]
        if text is None:
            raise SettingsError(f"{f.name} is not set: run this through `make` or the task's train.sh")
        try:
            value = f.type(text)
        except ValueError:
            kind = {int: "a whole number", float: "a number"}[f.type]
            raise SettingsError(f"{f.name}={shown}: must be {kind} ({f.metadata['help']})") from None
        check = f.metadata["check"]
        if check and (problem := check(value)):
            raise SettingsError(f"{f.name}={shown}: {problem} ({f.metadata['help']})")
        values[f.name] = value
    settings = cls(**values)
    if cls is Settings:
        if not settings.MINI_BATCH_SIZE:
            prompts, steps = settings.TRAIN_BATCH_SIZE, method(settings.METHOD).MINI_BATCHES
            mini = max(size for size in range(1, max(1, prompts // steps) + 1) if prompts % size == 0)
            settings = replace(settings, MINI_BATCH_SIZE=mini)
        _check_together(settings)
    return settings


def _check_together(settings: Settings) -> None:
    if settings.TRAIN_BATCH_SIZE % settings.MINI_BATCH_SIZE:
        raise SettingsError(
            f"MINI_BATCH_SIZE={settings.MINI_BATCH_SIZE}: must divide TRAIN_BATCH_SIZE={settings.TRAIN_BATCH_SIZE}"
        )
    if 0 < settings.TRAIN_SIZE < settings.TRAIN_BATCH_SIZE:
        raise SettingsError(
            f"TRAIN_BATCH_SIZE={settings.TRAIN_BATCH_SIZE}: larger than TRAIN_SIZE={settings.TRAIN_SIZE}"
        )
    if settings.TEST_FREQ and not settings.DEV_SIZE:
        raise SettingsError(f"TEST_FREQ={settings.TEST_FREQ}: validates on the dev set; set DEV_SIZE, or TEST_FREQ=0")
    if settings.PATIENCE and not settings.TEST_FREQ:
        raise SettingsError(f"PATIENCE={settings.PATIENCE}: counts validations; set TEST_FREQ, or PATIENCE=0")
    if 0 < settings.MAX_TOKENS_PER_GPU < settings.MAX_PROMPT_LENGTH + settings.MAX_RESPONSE_LENGTH:
        raise SettingsError(
            f"MAX_TOKENS_PER_GPU={settings.MAX_TOKENS_PER_GPU}: less than MAX_PROMPT_LENGTH + MAX_RESPONSE_LENGTH = "
            f"{settings.MAX_PROMPT_LENGTH + settings.MAX_RESPONSE_LENGTH}, one sequence"
        )
    if settings.MINI_BATCH_SIZE * settings.ROLLOUT_N % settings.world_size:
        machines = f" x NNODES={settings.NNODES}" if settings.NNODES > 1 else ""
        raise SettingsError(f"N_GPUS={settings.N_GPUS}{machines}: must divide MINI_BATCH_SIZE x ROLLOUT_N")
    if settings.METHOD == "dpo" and settings.NNODES > 1:
        raise SettingsError(f"NNODES={settings.NNODES}: METHOD=dpo trains on one machine; leave NNODES out")
    if settings.METHOD == "dpo" and settings.TRAIN_BATCH_SIZE % settings.N_GPUS:
        raise SettingsError(f"N_GPUS={settings.N_GPUS}: must divide TRAIN_BATCH_SIZE={settings.TRAIN_BATCH_SIZE}")
    if settings.METHOD == "dpo" and settings.REWARD_MODEL:
        raise SettingsError("REWARD_MODEL: is for the RL methods; METHOD=dpo learns from pairs")
    if settings.SFT_BATCH_SIZE % settings.N_GPUS:
        raise SettingsError(f"N_GPUS={settings.N_GPUS}: must divide SFT_BATCH_SIZE={settings.SFT_BATCH_SIZE}")
    if settings.INIT == "sft" and settings.SFT_SOURCE == "task" and settings.SFT_SIZE < settings.SFT_BATCH_SIZE:
        raise SettingsError(f"SFT_BATCH_SIZE={settings.SFT_BATCH_SIZE}: larger than SFT_SIZE={settings.SFT_SIZE}")


def help_text() -> str:
    """One line for each variable."""
    lines = [f"  {f.name:<24}{f.metadata['help']}" for f in fields(Settings)]
    own = [f"  {f.name:<24}{f.metadata['help']}" for f in fields(Command) if f.name not in ("STAGE", "MODEL_GIVEN")]
    return "\n".join([*lines, "", "Variables of single commands:", *own])


if __name__ == "__main__":
    print(help_text())
