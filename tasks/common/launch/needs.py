"""What a real run needs, and what would break it, from its settings, its model's config.json and its data.

`make rehearse` says it (launch/rehearse.py). Nothing here starts a process or reads weights.
"""

import math
import re
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from verl_tasks.data.pairs import pairs_columns, token_pairs
from verl_tasks.data.prepare import load_tokenizer, read_manifest
from verl_tasks.evaluation.engines import stop_ids
from verl_tasks.files import read_json
from verl_tasks.launch import doctor, memory_checks
from verl_tasks.launch.finding import Finding, error, ok, warning
from verl_tasks.launch.stand_ins import first_pairs
from verl_tasks.machine import hardware
from verl_tasks.machine.memory import gb
from verl_tasks.models.chat_template import end_of_turn, end_of_turn_ids, knows_tools
from verl_tasks.rewards.answers import JudgeError
from verl_tasks.rewards.judge import Judge
from verl_tasks.rows import DataError, read_rows, tools_of
from verl_tasks.settings import GPU_MIB, Command, Settings, teacher_gpus
from verl_tasks.text import one_line

FEW = 0.5  # of the prompts: where fewer fit it is an error


@dataclass(frozen=True)
class Target:
    """The hardware of the real run. ``gpu``: None on the cpu stack; ``count``: of all machines, with a teacher's."""

    gpu: hardware.GPU | None
    count: int
    why: str = ""  # where the kind of GPU comes from

    def __str__(self) -> str:
        return f"{self.count} x {self.gpu.name}{f' ({self.why})' if self.why else ''}" if self.gpu else "a CPU"


def target_of(s: Settings, command: Command) -> Target:
    """The GPUs of the real run: GPU, else by the name of PROFILE, else the stack's."""
    named = re.search(r"x(\w+)$", command.PROFILE)
    if s.STACK == "cpu":
        return Target(None, s.all_gpus)
    if command.GPU:
        name, why = command.GPU, ""
    elif named and named[1] in GPU_MIB:
        name, why = named[1], "by the profile's name"
    else:
        name, why = "a100" if s.STACK == "a100" else "h200", f"assumed for STACK={s.STACK}; GPU= names another"
    size = GPU_MIB[name] * hardware.MIB
    return Target(hardware.GPU(name, size, size), s.all_gpus + teacher_gpus([s]), why)


def train_file(s: Settings, data_dir: Path) -> Path:
    """TRAIN_FILE, or the rehearsal's training rows."""
    return s.train_file if s.TRAIN_FILE else data_dir / "train.parquet"


# ---- before anything is played -------------------------------------------------------------------------------------


def before(s: Settings, composed: Settings, arguments: list[str], target: Target, command: Command) -> list[Finding]:
    """What would break the real run, by its settings ``s``, and the small files of MODEL and TEACHER, which are
    folders. ``composed``: ``s`` for the verl that is installed here, with models that have weights."""
    try:
        found = [*tokens(s, load_tokenizer(s.MODEL, weights=False))]
    except DataError as problem:
        found = [error("tokenizer", str(problem))]
    there = (target.gpu,) * (s.N_GPUS + teacher_gpus([s])) if target.gpu else ()
    real = replace(s, WANDB=0, LOGGER="")  # what is installed here says nothing of them
    machine = {"found": hardware.Nvidia("", "", there), "ram": (math.inf, 0), "composed": composed}
    found += memory_checks.batches_and_memory(real, arguments, "train", **machine)
    return [*found, *doctor.untrainable(s, arguments), *doctor.numbers(s), disk(s, arguments, command)]


def tokens(s: Settings, tokenizer) -> Iterator[Finding]:
    """Does the token that ends a turn in the chat template also end a response? And do all tokens have a row? An added
    one that ends no turn needs none: Gemma 3 1B's for images."""
    config = read_json(Path(s.MODEL) / "config.json")
    vocabulary = (config.get("text_config") or config).get("vocab_size", math.inf)  # inf: the family's own
    reached = max([tokenizer.vocab_size - 1, *end_of_turn_ids(tokenizer)])
    if reached >= vocabulary:
        text = f"token {reached} is used, and vocab_size={vocabulary} in config.json"
        yield error("vocabulary", text, "take the tokenizer that belongs to the model")
    end, stopping = end_of_turn(tokenizer), {*stop_ids(s.MODEL), tokenizer.eos_token_id} - {None}
    if stopping.intersection(end_of_turn_ids(tokenizer)[-1:]):
        yield ok("stop token", f"the chat template ends a turn with {end}, which ends a response")
    else:
        named = ", ".join(tokenizer.convert_ids_to_tokens(sorted(stopping)))
        text = f"the chat template ends a turn with {end or 'nothing'}, generation stops at {named}"
        yield error("stop token", text, "correct eos_token_id of generation_config.json")


def disk(s: Settings, arguments: list[str], command: Command) -> Finding:
    """The room that the real model's checkpoints need, against DISK."""
    if not (need := sum(doctor.checkpoint_sizes(s, arguments=arguments))):
        return warning("disk", "checkpoints not estimated", "download MODEL here first")
    text, room = f"checkpoints need about {gb(need)}", command.DISK * 1e9
    if not room:
        return ok("disk", f"{text}; DISK= compares it with the real machine's")
    if need <= room:
        return ok("disk", f"{text}, DISK={command.DISK:g}")
    return error("disk", f"{text}, DISK={command.DISK:g}", "lower KEEP, or take a larger disk")


def judge() -> Finding:
    """One request to the real judge."""
    try:
        asked = replace(Judge.from_environment(), JUDGE_RETRIES=0)
        asked.score(f"What is 1 + 1? ({time.time()})", "2")  # a new question: no score is kept of it
    except JudgeError as problem:
        return error("judge", one_line(str(problem), 300), "start its server, or correct JUDGE_URL and JUDGE_MODEL")
    return ok("judge", f"JUDGE_MODEL={one_line(asked.JUDGE_MODEL, 60)} graded one answer")


# ---- the rows that the rehearsal made ------------------------------------------------------------------------------


def of_data(s: Settings, data_dir: Path) -> list[Finding]:
    """What would break the real run, by the rows that the rehearsal made; nothing where it made none."""
    if not (manifest := read_manifest(data_dir)):
        return []
    try:
        tokenizer = load_tokenizer(s.MODEL, weights=False)
        found = [rows(s, manifest), *tools(tokenizer, data_dir), *lengths(s, tokenizer, data_dir)]
        found += [pairs(s, tokenizer)] if s.by_pairs and s.PAIRS_FILE else []
    except DataError as problem:
        return [error("data", str(problem), "correct it")]
    return found + (list(doctor.gold_check(s, manifest, training=False)) if manifest.get("gold") else [])


def rows(s: Settings, manifest: dict) -> Finding:
    """Prompts that the data stage left out, and whether enough remain for a batch."""
    dropped = {reason: count for reason, count in manifest.get("dropped", {}).items() if count}
    text = f"{manifest['rows']['train']} training prompts"
    text += "".join(f", {count} {reason.replace('_', ' ')}" for reason, count in dropped.items())
    if manifest["rows"]["train"] < s.TRAIN_BATCH_SIZE:
        return error("rows", f"{text}; TRAIN_BATCH_SIZE={s.TRAIN_BATCH_SIZE}", "lower it, or take more data")
    if "too_long" in dropped:
        return warning("rows", text, "raise MAX_PROMPT_LENGTH")
    return (warning if "refused_by_chat_template" in dropped else ok)("rows", text)


def lengths(s: Settings, tokenizer, data_dir: Path) -> Iterator[Finding]:
    """Prompts over MAX_PROMPT_LENGTH, and demonstrations over MAX_RESPONSE_LENGTH. Raises DataError."""
    for what, file in (("prompts", train_file(s, data_dir)), ("demonstrations", data_dir / "sft.parquet")):
        if file.is_file() and (counts := doctor.measured(tokenizer, file)[0]):
            yield doctor.fit(s, what, counts, FEW * len(counts))


def tools(tokenizer, data_dir: Path) -> Iterator[Finding]:
    """Where rows have tools: does the chat template render them?"""
    if any(tools_of(row) for row in read_rows(data_dir / "train.parquet")) and not knows_tools(tokenizer):
        text = "the chat template knows no tools, or no results of calls; they are written out as Hermes and Qwen do"
        yield warning("tools", text, "take a model that was trained with tools")


def pairs(s: Settings, tokenizer) -> Finding:
    """The first pairs of PAIRS_FILE under the real limits."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "pairs.parquet"
        first_pairs(s.PAIRS_FILE, file, doctor.PROMPTS, pairs_columns(s))
        kept, left_out = token_pairs(file, tokenizer, s.MAX_PROMPT_LENGTH + s.MAX_RESPONSE_LENGTH)
    text = f"{len(kept) + left_out.total()} measured, {left_out.total()} left out"
    if not left_out:
        return ok("pairs", text)
    return (warning if kept else error)("pairs", text, "raise MAX_PROMPT_LENGTH or MAX_RESPONSE_LENGTH")
