"""Our variables: name, type, range, default and help of each, where its value comes from, and the paths it implies.

A value comes from the first of: what is given (make's command line, the environment), the profile, the stage, the task
on this stack, the task, LoRA and the method, the stack, the table below. Profile and task say theirs in lines
``default NAME VALUE [STACK=VALUE ...]  # comment`` of tasks/TASK/profiles/PROFILE.sh and tasks/TASK/train.sh.
"""

import ast
import difflib
import functools
import hashlib
import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, asdict, dataclass, field, fields, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HEALTH_RULES = (
    "nan",
    "collapse",
    "kl",
    "spike",
    "mismatch",
    "zero_variance",
    "truncation",
    "no_reward",
)  # tasks/common/runs/health.py
METHODS = sorted(path.stem for path in (ROOT / "tasks/common/training/methods").glob("[a-z]*.py"))
STACKS = sorted(path.parent.name for path in (ROOT / "tasks/common/stacks").glob("*/__init__.py"))


class SettingsError(ValueError):
    """A variable has a value that cannot be; the message is one line for the user."""


def variable(default, help: str, check=None):
    """A variable: its shared default (a text, or a function of the other values), its help, and its check."""
    return field(metadata={"default": default, "help": help, "check": check})


def positive(value) -> str | None:
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


def _task(value: str) -> str | None:
    return _name(value) if value else "is not set: run this through `make` or the task's train.sh"


def _rules(value: str) -> str | None:
    unknown = [name for name in value.split(",") if name and name not in HEALTH_RULES]
    return f"{unknown[0]}: must be some of {', '.join(HEALTH_RULES)}" if unknown else None


def _not_empty(value: str) -> str | None:
    return None if value.strip() else "must not be empty"


def _kl_coef(values: dict[str, str]) -> str:
    """0; in self-play 0.01"""
    return "0" if values["SELF_PLAY_ROUNDS"] == "1" else "0.01"


def _batch_size(values: dict[str, str]) -> str:
    """128; dpo: 32"""
    return "32" if values["METHOD"] == "dpo" else "128"


def _same_as(name: str) -> Callable[[dict[str, str]], str]:
    """The default of a variable that follows the variable ``name``."""

    def value(values: dict[str, str]) -> str:
        return values[name]

    value.__doc__ = name  # what `make help` shows
    return value


def _visible_gpus(values: dict[str, str]) -> str:
    """all that are visible"""
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return str(len(visible.split(",")))
    if not shutil.which("nvidia-smi"):
        return "0"
    return str(len(subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout.splitlines()))


@dataclass(frozen=True)
class Settings:
    """One field for each variable; `make help` and `make settings` print them."""

    TASK: str = variable("", "folder under tasks/", _task)
    STACK: str = variable("", "packages and hardware; default from the machine", _one_of(*STACKS))
    # model and data
    MODEL: str = variable(
        "Qwen/Qwen2.5-1.5B-Instruct", "a hub id, a folder, or `embedded` (SmolLM2-135M-Instruct)", _not_empty
    )
    INIT: str = variable("base", "start from `base`, or from an SFT warm-up (`sft`)", _one_of("base", "sft"))
    SOURCE: str = variable(
        "generate", "where the data comes from; what a task knows stands in its train.sh", _not_empty
    )
    FILE: str = variable("", "a data file (json, jsonl, csv, parquet), or a folder of them; then the source")
    MAX_SAMPLES: int = variable("0", "at most so many examples of a file or data set; 0: all", _not_negative)
    DIFFICULTY: str = variable("hard", "of generated problems: easy or hard", _one_of("easy", "hard"))
    TRAIN_SIZE: int = variable("8192", "training prompts; 0: all that a file or data set has", _not_negative)
    TEST_SIZE: float = variable(
        "512", "held-out prompts: count, share below 1, or 0: all of a test split", _count_or_share
    )
    DEV_SIZE: int = variable("128", "prompts for validation, of what would be training data; 0: none", _not_negative)
    SFT_SIZE: int = variable("2048", "demonstrations, of training prompts", _not_negative)
    SFT_SOURCE: str = variable(
        "task", "demonstrations: the `task`'s, or right `samples` of MODEL", _one_of("task", "samples")
    )
    TRAIN_FILE: str = variable("", "parquet to train on in place of train.parquet, e.g. the signal.parquet of a probe")
    PAIRS_FILE: str = variable(
        "", "dpo: parquet, json or jsonl of prompt, chosen, rejected; empty: of the policy's samples"
    )
    SAMPLED_PROMPTS: int = variable(
        "1024", "training prompts sampled for SFT_SOURCE=samples and dpo; 0: all", _not_negative
    )
    SEED: int = variable("42", "of data, sampling and shuffling", _not_negative)
    TRAIN_SEED: int = variable(_same_as("SEED"), "of RL and DPO alone: order of prompts, sampling", _not_negative)
    # optimisation
    METHOD: str = variable("grpo", f"one of {', '.join(METHODS)}", _one_of(*METHODS))
    REWARD: str = variable("", "variant of the task's reward; what a task knows stands in its train.sh", _name)
    REWARD_MODEL: str = variable("", "a sequence classifier (hub id or folder) whose score is the reward in training")
    STEPS: int = variable("100", "training steps (dpo: DPO_EPOCHS); a larger number continues the same run", positive)
    TEACHER: str = variable("", "distill: a model (hub id or folder) with MODEL's tokenizer, on a GPU of its own")
    TRUNCATED: str = variable(
        "counted",
        "responses cut off at the limit: counted, masked (no loss), or shaped (a soft penalty near the limit)",
        _one_of("counted", "masked", "shaped"),
    )
    SELF_PLAY_ROUNDS: int = variable(
        "1", "trainings of STEPS, each from, and held to, the result of the last", positive
    )
    TRAIN_BATCH_SIZE: int = variable(_batch_size, "prompts (dpo: pairs) a step", positive)
    MINI_BATCH_SIZE: int = variable("0", "prompts an optimizer step; 0: as the method wants", _not_negative)
    LR: float = variable("1e-6", "learning rate of the policy", positive)
    CRITIC_LR: float = variable("1e-5", "ppo: learning rate of the critic", positive)
    CRITIC_WARMUP: int = variable("5", "ppo: of STEPS, the first, in which the critic alone learns", _not_negative)
    KL_COEF: float = variable(_kl_coef, "weight of the KL to the start; 0: no reference model", _not_negative)
    EGPO_LAMBDA: float = variable("0.4", "egpo: weight of the entropy in the advantage; 0: GRPO", _not_negative)
    EGPO_ALPHA: float = variable("2.0", "egpo: the entropy counts up to advantage / EGPO_ALPHA", positive)
    DPO_EPOCHS: int = variable(
        "1", "dpo: times through the pairs; its steps follow from it, and STEPS is not used", positive
    )
    ROLLOUT_CORRECTION: str = variable(
        "token",
        "for the engine's other log-probs: weigh each `token`, also leave out responses (`sequence`), or `none`",
        _one_of("token", "sequence", "none"),
    )
    DPO_BETA: float = variable("0.1", "dpo: how strongly the policy is held to the start", positive)
    SFT_STEPS: int = variable("64", "optimizer steps of the warm-up", positive)
    SFT_BATCH_SIZE: int = variable("64", "demonstrations a step", positive)
    SFT_LR: float = variable("1e-5", "learning rate of the warm-up", positive)
    # rollouts and lengths
    ROLLOUT_N: int = variable("8", "samples a prompt, the group of a group advantage", positive)
    TEMPERATURE: float = variable("1.0", "of rollouts", positive)
    MAX_PROMPT_LENGTH: int = variable("256", "tokens", positive)
    MAX_RESPONSE_LENGTH: int = variable("1024", "tokens", positive)
    # hardware
    N_GPUS: int = variable(_visible_gpus, "GPUs of this machine (on the cpu stack: processes that play one)", positive)
    NNODES: int = variable("1", "machines with N_GPUS each; more than one: of the Ray cluster at RAY_ADDRESS", positive)
    MAX_TOKENS_PER_GPU: int = variable(
        "32768", "in one forward pass, padding left out; 0: MICRO_BATCH_SIZE", _not_negative
    )
    MICRO_BATCH_SIZE: int = variable("16", "dpo, MAX_TOKENS_PER_GPU=0: sequences a GPU in one forward pass", positive)
    GPU_MEMORY_UTILIZATION: float = variable("0.5", "share of GPU memory for vLLM", _fraction)
    # LoRA
    LORA_RANK: int = variable("0", "0: full fine-tuning", _not_negative)
    LORA_ALPHA: int = variable("32", "LoRA scale", positive)
    # evaluation: make eval, compare, probe, chat, batch
    N: int = variable("4", "samples a prompt", positive)
    LIMIT: int = variable("0", "the first so many prompts; 0: all", _not_negative)
    GREEDY: int = variable("1", "1: a greedy response a prompt besides the samples; 0: none", _one_of(0, 1))
    EVAL_TEMPERATURE: float = variable(
        _same_as("TEMPERATURE"), "of evaluation; 0: greedy, one response a prompt", _not_negative
    )
    TOP_P: float = variable("1.0", "of evaluation", _fraction)
    MAX_NEW_TOKENS: int = variable(_same_as("MAX_RESPONSE_LENGTH"), "tokens a response in evaluation", positive)
    EVAL_SEED: int = variable("0", "of the engine in evaluation", _not_negative)
    # run
    RUN: str = variable("", "name of the run; empty: made from the settings", _name)
    SAVE_FREQ: int = variable("20", "steps between checkpoints", positive)
    TEST_FREQ: int = variable(
        "10", "steps between validations on the dev set, each with a checkpoint; 0: none", _not_negative
    )
    KEEP: int = variable("1", "best checkpoints by the dev set that stay besides the last one", _not_negative)
    PATIENCE: int = variable("0", "validations without a gain that end the training; 0: never", _not_negative)
    ABORT_ON: str = variable("", "health rules that end the training after a checkpoint, e.g. nan,collapse", _rules)
    WANDB: int = variable("0", "1: also to Weights & Biases", _one_of(0, 1))
    LOGGER: str = variable("", "more verl loggers beside console and file, e.g. tensorboard,mlflow")

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
        values = {name: getattr(self, name) for name in names}
        return fingerprint(values | {"code": code_digest(self.task_dir / "prepare_data.py")}, *self.source_files)

    def sft_fingerprint(self) -> str:
        """Changes when the warm-up would."""
        names = ("STACK", "MODEL", "SFT_STEPS", "SFT_BATCH_SIZE", "SFT_LR", "LORA_RANK", "LORA_ALPHA")
        names += ("MAX_PROMPT_LENGTH", "MAX_RESPONSE_LENGTH")
        values = {name: getattr(self, name) for name in names} | {"data": self.data_fingerprint()}
        if self.SFT_SOURCE == "task":
            return fingerprint(values)
        names = ("SFT_SOURCE", "SAMPLED_PROMPTS", "ROLLOUT_N", "TEMPERATURE", "SEED", "REWARD", "TRAIN_FILE")
        values |= {name: getattr(self, name) for name in names} | judge_settings()
        return fingerprint(values | {"reward": code_digest(self.task_dir / "reward.py")})

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
        values["reward"] = code_digest(self.task_dir / "reward.py")
        own_files = [Path(name).expanduser() for name in (self.TRAIN_FILE, self.PAIRS_FILE) if name]
        return fingerprint(values, *filter(Path.is_file, own_files))


# The stages of `make all`, in order.
WHOLE = ("data", "model", "sft", "train", "merge", "eval", "compare")

# What a run is not known by: what continues it, or only reports.
REPORTING = {"RUN", "STEPS", "SELF_PLAY_ROUNDS", "SAVE_FREQ", "ABORT_ON", "WANDB", "LOGGER", "GPU_MEMORY_UTILIZATION"}
REPORTING |= {"N", "LIMIT", "GREEDY", "EVAL_TEMPERATURE", "TOP_P", "MAX_NEW_TOKENS", "EVAL_SEED"}
REPORTING |= {"TEST_FREQ", "KEEP", "PATIENCE"}


@dataclass(frozen=True)
class Command:
    """Variables of single commands; they stand in no config block."""

    STAGE: str = variable("train", "what train.sh runs")
    PROFILE: str = variable("", "values for a typical use: a file of tasks/TASK/profiles, by its name")
    FROM: str = variable("data", "train, all: the stage to start with, on what is there", _one_of(*WHOLE))
    METHODS: str = variable("grpo,gspo,egpo", "experiment: methods to compare, with the same data and settings")
    SEEDS: int = variable("1", "experiment: trainings of each method, with TRAIN_SEED and on", positive)
    LRS: str = variable("", "experiment: rates to train each method with, e.g. 1e-6,3e-6; empty: LR")
    JOBS: int = variable("1", "experiment: trainings at a time, on the same GPUs", positive)
    STEP: str = variable(
        "", "eval, compare, merge, chat, batch: checkpoint `best`, `latest` or its step; empty: best if validated"
    )
    BASE: str = variable("", "compare: the model to compare with; the base model of an adapter")
    FILTER: int = variable("0", "probe: 1 writes the prompts with signal to signal.parquet", _one_of(0, 1))
    FILTER_LOW: float = variable("0.0", "probe: accuracy strictly above", _not_negative)
    FILTER_HIGH: float = variable("1.0", "probe: accuracy strictly below", _fraction)
    SECONDS: float = variable("120", "attack: how long to search", positive)
    ATTACK_CALLS: int = variable("200", "attack: of a reward that asks a judge, at most so many calls", positive)
    ROLLOUTS: str = variable("", "rescore: a rollouts.jsonl")
    INPUT: str = variable("", "batch: json, jsonl, csv or xlsx with a column prompt")
    OUTPUT: str = variable("", "batch: xlsx, json, jsonl or csv to write")
    TEMPLATE: str = variable(
        "default",
        "batch: chat template default (the model's own), chatml or llama",
        _one_of("default", "chatml", "llama"),
    )
    BACKEND: str = variable("vllm", "batch: vllm or transformers", _one_of("vllm", "transformers"))


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


@functools.cache
def code_digest(program: Path) -> str:
    """Of what ``program`` computes: its code and that of what it imports, without comments and docstrings.

    Of tasks/common the rooms count that make data and rewards; the others do not change what comes out.
    """
    digest, seen, left = hashlib.sha256(), set(), [program]
    while left:
        file = left.pop()
        if file in seen or not file.is_file():
            continue
        seen.add(file)
        try:
            tree = ast.parse(file.read_bytes())
        except (SyntaxError, ValueError):  # said where it is run
            digest.update(file.read_bytes())
            continue
        for node in ast.walk(tree):
            documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            if documented and ast.get_docstring(node, clean=False) is not None:
                del node.body[0]
        left += sorted(_imported(tree, file), reverse=True)
        digest.update(ast.dump(tree).encode())
    return digest.hexdigest()


def _imported(tree: ast.AST, file: Path) -> set[Path]:
    """The files of the task, and of the rooms data and rewards, that a syntax tree imports."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    counted = (f"tasks.{file.parent.name}.", "tasks.common.data.", "tasks.common.rewards.")
    files = {ROOT / f"{name.replace('.', '/')}.py" for name in names if name.startswith(counted)}
    return {each for each in files if each.is_file()}


def method(name: str):
    """The module of a method."""
    return importlib.import_module(f"tasks.common.training.methods.{name}")


def stack(name: str):
    """The module of a stack."""
    return importlib.import_module(f"tasks.common.stacks.{name}")


# ---- values --------------------------------------------------------------------------------------------------------

# Of single stages, before the task's: more samples of fewer prompts for a probe, one answer for a table of prompts.
STAGE_DEFAULTS = {"probe": {"N": "16", "LIMIT": "256"}, "batch": {"N": "1"}, "dpo": {"METHOD": "dpo"}}
EVALUATING = ("probe", "eval", "compare", "chat", "batch")
COMPLETE = "SETTINGS_COMPLETE"  # set where the environment has every variable: nothing else is read then
LORA_RATES = 10  # times the rates of a full fine-tuning (Schulman et al. 2025, "LoRA Without Regret")


@dataclass(frozen=True)
class Value:
    """A variable's ``text``, and ``source``: where it comes from, in a few words."""

    text: str
    source: str


def read_defaults(file: Path) -> dict[str, dict[str, str]]:
    """The `default` lines of ``file`` as {STACK, or "" for all: {NAME: VALUE}}. Raises SettingsError.

    A value is plain text, in quotes where it has spaces; $ROOT stands for the repository.
    """
    found: dict[str, dict[str, str]] = {"": {}} | {stack: {} for stack in STACKS}
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
            if of not in found:
                raise SettingsError(f"{file}: default {name}: {of}: no such stack; there are: {', '.join(STACKS)}")
            text = text.replace("$ROOT", str(file.resolve().parents[2]))
            if "$" in text or "`" in text:
                raise SettingsError(f"{file}: default {name}: {text}: a value is plain text, bash does not read it")
            found[of][name] = text
    return found


def profile_file(task_dir: Path, name: str) -> Path:
    """The file of a profile. Raises SettingsError when the task has no such profile."""
    known = sorted(path.stem for path in task_dir.glob("profiles/*.sh"))
    if name not in known:
        there = f"there are: {', '.join(known) or 'none'}"
        raise SettingsError(f"PROFILE={name}: TASK={task_dir.name} has no such profile; {there}")
    return task_dir / f"profiles/{name}.sh"


def values_of(environ: Mapping[str, str], root: Path = ROOT) -> dict[str, Value]:
    """The value of every variable of Settings as text, and where it comes from, with the tasks of ``root``.

    Raises SettingsError.
    """
    given = {name: environ[name] for name in Settings.__dataclass_fields__ if environ.get(name)}
    stage = environ.get("STAGE", "train")
    complete = environ.get(COMPLETE)
    if stage in EVALUATING and "TEMPERATURE" in given and not complete:  # of the evaluation, then
        given.setdefault("EVAL_TEMPERATURE", given["TEMPERATURE"])
        del given["TEMPERATURE"]
    typed = environ.get("GIVEN", "").split()
    name, task, none = given.get("STACK", ""), given.get("TASK", ""), {}
    module, profile, own = (stack(name) if name in STACKS else None), none, none
    if task and not complete:
        folder = root / "tasks" / task
        own = read_defaults(folder / "train.sh") if (folder / "train.sh").exists() else none
        profile = read_defaults(profile_file(folder, environ["PROFILE"])) if environ.get("PROFILE") else none
    layers = [
        *((f"profile {environ.get('PROFILE')}", profile.get(of, none)) for of in (name, "")),
        (f"make {stage}", getattr(module, "STAGE_DEFAULTS", {}).get(stage, {})),
        (f"make {stage}", STAGE_DEFAULTS.get(stage, {})),
        (f"train.sh, {name}", own.get(name, none)),
        ("train.sh", own.get("", none)),
    ]
    below = [(f"stack {name}", getattr(module, "DEFAULTS", {}))]
    shared = {name: f.metadata["default"] for name, f in Settings.__dataclass_fields__.items()}

    def first(name: str, layers: list) -> Value | None:
        return next((Value(layer[name], source) for source, layer in layers if layer.get(name)), None)

    def early(name: str) -> str:
        """A variable that decides on layers, without them."""
        found = first(name, [("", given), *layers, *below])
        return found.text if found else shared[name]

    if (chosen := early("METHOD")) in METHODS:
        layers.append((f"METHOD={chosen}", getattr(method(chosen), "DEFAULTS", {})))
    if early("LORA_RANK") not in ("", "0"):
        rates = {name: (first(name, below) or Value(shared[name], "")).text for name in ("LR", "SFT_LR")}
        layers.append(("LORA_RANK", {name: f"{LORA_RATES * float(rate):g}" for name, rate in rates.items()}))
    values: dict[str, Value] = {}
    for name, default in shared.items():
        if name in given:
            values[name] = Value(given[name], "command line" if name in typed else "environment")
        else:
            values[name] = first(name, [*layers, *below]) or Value(default, "default")
    for name, value in values.items():  # those that follow from others
        if callable(value.text):
            values[name] = Value(value.text({name: each.text for name, each in values.items()}), "default")
    return values


def load_settings(environ: Mapping[str, str] | None = None, cls: type = Settings):
    """``cls`` (Settings, or a dataclass of a command's variables) from ``environ`` (default: the process environment).

    Raises SettingsError for the first bad value.
    """
    environ = os.environ if environ is None else environ
    if cls is Settings:
        texts = {name: value.text for name, value in values_of(environ).items()}
    else:
        texts = {f.name: environ.get(f.name) or f.metadata["default"] for f in fields(cls)}
    settings = cls(**{f.name: _checked(f, texts[f.name]) for f in fields(cls)})
    if cls is Settings:
        if not settings.MINI_BATCH_SIZE:
            prompts, steps = settings.TRAIN_BATCH_SIZE, method(settings.METHOD).MINI_BATCHES
            mini = max(size for size in range(1, max(1, prompts // steps) + 1) if prompts % size == 0)
            settings = replace(settings, MINI_BATCH_SIZE=mini)
        _check_together(settings)
    return settings


def _checked(f: Field, text: str):
    """The value that ``text`` says for the variable ``f``. Raises SettingsError."""
    shown = " ".join(text.split())[:80]
    try:
        value = f.type(text)
    except ValueError:
        kind = {int: "a whole number", float: "a number"}[f.type]
        raise SettingsError(f"{f.name}={shown}: must be {kind} ({f.metadata['help']})") from None
    check = f.metadata["check"]
    if check and (problem := check(value)):
        raise SettingsError(f"{f.name}={shown}: {problem} ({f.metadata['help']})")
    return value


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
    if settings.METHOD == "ppo" and settings.CRITIC_WARMUP >= settings.STEPS:
        raise SettingsError(
            f"CRITIC_WARMUP={settings.CRITIC_WARMUP}: leaves none of STEPS={settings.STEPS} to the policy; set it lower"
        )
    if settings.METHOD == "dpo" and settings.NNODES > 1:
        raise SettingsError(f"NNODES={settings.NNODES}: METHOD=dpo trains on one machine; leave NNODES out")
    if settings.METHOD == "dpo" and settings.TRAIN_BATCH_SIZE % settings.N_GPUS:
        raise SettingsError(f"N_GPUS={settings.N_GPUS}: must divide TRAIN_BATCH_SIZE={settings.TRAIN_BATCH_SIZE}")
    if settings.TRUNCATED != "counted" and settings.METHOD == "dpo":
        raise SettingsError(f"TRUNCATED={settings.TRUNCATED}: is for the RL methods; METHOD=dpo learns from pairs")
    if settings.TRUNCATED == "shaped" and (settings.METHOD == "distill" or settings.REWARD_MODEL):
        what = "REWARD_MODEL is the whole reward" if settings.REWARD_MODEL else "METHOD=distill learns from no reward"
        raise SettingsError(f"TRUNCATED=shaped: {what}; take TRUNCATED=masked or counted")
    if settings.TEACHER and settings.METHOD != "distill":
        raise SettingsError(f"TEACHER={settings.TEACHER}: is for METHOD=distill; METHOD={settings.METHOD} has none")
    if settings.METHOD == "dpo" and settings.REWARD_MODEL:
        raise SettingsError("REWARD_MODEL: is for the RL methods; METHOD=dpo learns from pairs")
    if settings.SFT_BATCH_SIZE % settings.N_GPUS:
        raise SettingsError(f"N_GPUS={settings.N_GPUS}: must divide SFT_BATCH_SIZE={settings.SFT_BATCH_SIZE}")
    if settings.INIT == "sft" and settings.SFT_SOURCE == "task" and settings.SFT_SIZE < settings.SFT_BATCH_SIZE:
        raise SettingsError(f"SFT_BATCH_SIZE={settings.SFT_BATCH_SIZE}: larger than SFT_SIZE={settings.SFT_SIZE}")


# ---- for people ----------------------------------------------------------------------------------------------------


def unknown(name: str, known: Iterable[str]) -> str:
    """Why a variable is refused: nothing knows it; with the nearest name that there is."""
    near = difflib.get_close_matches(name.upper(), known, 1, 0.5)
    if inside := [other for other in known if len(name) > 1 and name.upper().endswith(f"_{other}")]:
        near = inside  # LEARNING_RATE has no near name, MY_LR has
    near = {"LEARNING_RATE": ["LR"], "BATCH_SIZE": ["TRAIN_BATCH_SIZE"]}.get(name.upper(), near)
    return f"no such variable{f'; did you mean {near[0]}?' if near else ', see `make help`'}"


def shown_default(f: Field) -> str:
    """A variable's default for people: its value, or the rule it follows."""
    default = f.metadata["default"]
    return (default.__doc__ if callable(default) else default) or "-"


def help_text() -> str:
    """One line for each variable: name, shared default, help."""

    def lines(cls: type) -> list[str]:
        return [f"  {f.name:<24}{shown_default(f):<28}{f.metadata['help']}" for f in fields(cls) if f.name != "STAGE"]

    return "\n".join([*lines(Settings), "", "Variables of single commands:", *lines(Command)])


def table(environ: Mapping[str, str]) -> str:
    """`make settings`: every variable with its value, where that comes from, and its help. Raises SettingsError."""
    values, settings = values_of(environ), load_settings(environ)
    shown = {name: value.text or "-" for name, value in values.items()} | {
        "MINI_BATCH_SIZE": str(settings.MINI_BATCH_SIZE)
    }
    rows = [(f.name, shown[f.name], values[f.name].source, f) for f in fields(Settings)]
    wide = max(len(text) for _, text, _, _ in rows)
    return "\n".join(f"{name:<24}{text:<{wide + 2}}{source:<20}{f.metadata['help']}" for name, text, source, f in rows)


if __name__ == "__main__":
    print(help_text())
