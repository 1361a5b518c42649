"""What a real run will need, and what would break it, from its settings, its model's config.json and its data.

`make rehearse` says it (launch/rehearse.py). Nothing here starts a process or reads weights.
"""

import re
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

from tasks.common.data.pairs import pairs_columns, token_pairs
from tasks.common.data.prepare import load_tokenizer, read_manifest
from tasks.common.evaluation.engines import stop_ids
from tasks.common.files import read_json
from tasks.common.launch import doctor, memory_checks
from tasks.common.launch.finding import Finding, error, ok, warning
from tasks.common.launch.rehearsed_data import first_pairs
from tasks.common.machine import hardware, memory, speed
from tasks.common.machine.memory import gb
from tasks.common.models.chat_template import end_of_turn, knows_tools
from tasks.common.rewards.answers import JudgeError
from tasks.common.rewards.judge import Judge, read_counters
from tasks.common.rows import DataError, read_rows, tools_of
from tasks.common.settings import Command, Settings, SettingsError, method
from tasks.common.text import one_line
from tasks.common.training import verl_config

START = 180  # seconds from the start to the first step: 180 to 205 recorded (docs/GPU.md)
FEW = 0.5  # of the prompts: where fewer fit it is an error


@dataclass(frozen=True)
class Target:
    """The hardware of the real run. ``gpu``: None on the cpu stack."""

    gpu: speed.GPU | None
    count: int
    why: str = ""  # where the kind of GPU comes from

    def __str__(self) -> str:
        return f"{self.count} x {self.gpu.name}{f' ({self.why})' if self.why else ''}" if self.gpu else "a CPU"


def target_of(s: Settings, command: Command) -> Target:
    """The GPUs of the real run: GPU, else by the name of PROFILE, else the stack's."""
    if s.STACK == "cpu":
        return Target(None, s.world_size)
    count = s.world_size + method(s.METHOD).GPUS  # of a teacher
    named = re.search(r"x(\w+)$", command.PROFILE)
    if command.GPU:
        name, why = command.GPU, ""
    elif named and named[1] in speed.GPUS:
        name, why = named[1], "by the profile's name"
    else:
        name = "a100" if s.STACK == "a100" else speed.MEASURED
        why = f"assumed for STACK={s.STACK}; GPU= names another"
    return Target(speed.GPUS[name], count, why)


@dataclass(frozen=True)
class Lengths:
    """Tokens of the rehearsal's rows under the real tokenizer; ``answers`` of the demonstrations, perhaps none."""

    prompts: list[int]
    answers: list[int]


def train_file(s: Settings, data_dir: Path) -> Path:
    """TRAIN_FILE, or the rehearsal's training rows."""
    return s.train_file if s.TRAIN_FILE else data_dir / "train.parquet"


def lengths(s: Settings, tokenizer, data_dir: Path) -> Lengths:
    """Raises DataError without the data. At most doctor's PROMPTS rows of each file are measured."""
    prompts, _ = doctor.measured(tokenizer, train_file(s, data_dir))
    sft = data_dir / "sft.parquet"
    return Lengths(prompts, doctor.measured(tokenizer, sft)[0] if sft.is_file() else [])


# ---- what would break ----------------------------------------------------------------------------------------------


def before(s: Settings, arguments: list[str], target: Target, command: Command, judged: bool = False) -> list[Finding]:
    """What would break the real run, by its settings ``s``, with MODEL as a folder, and its model's small files."""
    found = []
    try:
        found += stops(s, load_tokenizer(s.MODEL, weights=False))
    except DataError as problem:
        found.append(error("tokenizer", str(problem)))
    found += [*doctor.numbers(s), *fits(s, arguments, target), *disk(s, command)]
    return found + (list(judge(s)) if judged else [])


def refused(s: Settings, arguments: list[str]) -> Iterator[Finding]:
    """What a training refuses at its start. ``s``: the settings with MODEL and TEACHER as folders that have weights."""
    if s.by_pairs:
        if s.PAIRS_FILE and not Path(s.PAIRS_FILE).expanduser().is_file():
            yield error("settings", f"PAIRS_FILE={s.PAIRS_FILE}: no such file", "correct the variable")
        return
    try:
        config = verl_config.rl_config(composed_here(s), arguments)
        problem = method(s.METHOD).problem(config)
    except SettingsError as found:
        problem = str(found)
    if problem:
        yield error("settings", problem, "correct the variable")


def of_data(s: Settings, data_dir: Path) -> list[Finding]:
    """What would break the real run, by the rows that the rehearsal made; nothing where it made none."""
    manifest = read_manifest(data_dir)
    if not manifest:
        return []
    try:
        tokenizer = load_tokenizer(s.MODEL, weights=False)
        found = [*rows(s, manifest), *tools(tokenizer, data_dir), *too_long(s, lengths(s, tokenizer, data_dir))]
        found += pairs(s, tokenizer) if s.by_pairs and s.PAIRS_FILE else []
    except DataError as problem:
        return [error("data", str(problem), "correct it")]
    return found + (list(doctor.gold_check(s, manifest, training=False)) if manifest.get("gold") else [])


def judge(s: Settings) -> Iterator[Finding]:
    """One request to the real judge."""
    started = time.monotonic()
    try:
        asked = Judge.from_environment()
        asked = replace(asked, JUDGE_RETRIES=0)
        asked.score(f"What is 1 + 1? ({time.time()})", "2")  # a new question: no score is kept of it
    except JudgeError as problem:
        yield error("judge", one_line(str(problem), 300), "start its server, or correct JUDGE_URL and JUDGE_MODEL")
        return
    seconds = time.monotonic() - started
    step, many = s.TRAIN_BATCH_SIZE * s.ROLLOUT_N / asked.JUDGE_CONCURRENCY * seconds, asked.JUDGE_CONCURRENCY
    text = f"JUDGE_MODEL={one_line(asked.JUDGE_MODEL, 60)} graded one answer in {seconds:.1f} s; a step's answers, "
    yield ok("judge", f"{text}JUDGE_CONCURRENCY={many} at a time, take about {step:.0f} s")


def pairs(s: Settings, tokenizer) -> Iterator[Finding]:
    """The first pairs of PAIRS_FILE under the real limits."""
    limit = s.MAX_PROMPT_LENGTH + s.MAX_RESPONSE_LENGTH
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "pairs.parquet"
        first_pairs(s.PAIRS_FILE, file, doctor.PROMPTS, pairs_columns(s))
        kept, left_out = token_pairs(file, tokenizer, limit)
    text = f"{len(kept) + left_out.total()} measured" + "".join(
        f", {count} {reason.replace('_', ' ')}" for reason, count in left_out.items()
    )
    if not kept:
        yield error("pairs", text, "raise MAX_PROMPT_LENGTH or MAX_RESPONSE_LENGTH, or correct PAIRS_FILE")
    elif left_out:
        yield warning("pairs", f"{text}; these are left out", "raise MAX_PROMPT_LENGTH or MAX_RESPONSE_LENGTH")
    else:
        yield ok("pairs", f"{text}, none left out")


def stops(s: Settings, tokenizer) -> Iterator[Finding]:
    """Does the token that ends a turn in the chat template also end a response? And do all tokens have a row?"""
    size, vocabulary = len(tokenizer), read_json(Path(s.MODEL) / "config.json").get("vocab_size", 0)
    if size > vocabulary:
        text = f"{size} tokens, and vocab_size={vocabulary} in config.json"
        yield error("vocabulary", text, "take the tokenizer that belongs to the model")
    end, stopping = end_of_turn(tokenizer), {*stop_ids(s.MODEL), tokenizer.eos_token_id} - {None}
    named = ", ".join(tokenizer.convert_ids_to_tokens(sorted(stopping)))
    ids = tokenizer(end, add_special_tokens=False)["input_ids"] if end else []
    fix = "correct eos_token_id of generation_config.json"
    if not ids:
        yield error("stop token", "the chat template ends no turn, and there is no end of sequence", fix)
    elif ids[-1] not in stopping:
        yield error("stop token", f"the chat template ends a turn with {end}, generation stops at {named}", fix)
    else:
        yield ok("stop token", f"the chat template ends a turn with {end}, which ends a response")


def rows(s: Settings, manifest: dict) -> Iterator[Finding]:
    """Prompts that the data stage left out, and whether enough remain for a batch."""
    dropped = {reason.replace("_", " "): count for reason, count in manifest.get("dropped", {}).items() if count}
    there = manifest["rows"]["train"]
    said = f"{there} training prompts" + "".join(f", {count} {reason}" for reason, count in dropped.items())
    if there < s.TRAIN_BATCH_SIZE:
        yield error("rows", f"{said}; TRAIN_BATCH_SIZE={s.TRAIN_BATCH_SIZE}", "lower it, or take more data")
    elif left := {reason for reason in dropped if reason in ("too long", "refused by chat template")}:
        yield warning("rows", said, "raise MAX_PROMPT_LENGTH" if "too long" in left else "see the chat template")
    else:
        yield ok("rows", said)


def too_long(s: Settings, found: Lengths) -> list[Finding]:
    """Prompts over MAX_PROMPT_LENGTH, and demonstrations over MAX_RESPONSE_LENGTH."""
    measured = {"prompts": found.prompts, "demonstrations": found.answers}
    return [doctor.fit(s, what, tokens, FEW * len(tokens)) for what, tokens in measured.items() if tokens]


def tools(tokenizer, data_dir: Path) -> Iterator[Finding]:
    """Where rows have tools: does the chat template render them?"""
    if not any(tools_of(row) for row in read_rows(data_dir / "train.parquet")):
        return
    if knows_tools(tokenizer, None):
        yield ok("tools", "the chat template renders them")
    else:
        text = "the chat template knows no tools, or no results of calls; they are written out as Hermes and Qwen do"
        yield warning("tools", text, "take a model that was trained with tools")


def fits(s: Settings, arguments: list[str], target: Target) -> Iterator[Finding]:
    """The settings as verl wants them, and the estimate of memory against the real GPUs."""
    try:
        planned = plan(s, arguments)
        warm_up = [memory_checks.plan(s, [], "sft")] if s.INIT == "sft" else []
    except SettingsError as problem:
        yield error("settings", str(problem), "correct the variable")
        return
    shapes = memory.shapes_of(s.MODEL)
    if shapes is None:
        text = f"not estimated: MODEL={s.MODEL} has no config.json here, or an unknown model type"
        yield warning("memory", text, "watch the first steps")
        return
    yield from memory_checks.window(s, shapes)
    yield from memory_checks.teacher(s, None)
    if target.gpu is None:
        return
    yield from memory_checks.heads(s, shapes, planned)
    gpu = hardware.GPU(target.gpu.name, target.gpu.memory, target.gpu.memory)
    found = memory_checks.too_much(s, "train", shapes, planned, gpu, 0)
    for each in warm_up:
        found += memory_checks.too_much(s, "train", shapes, each, gpu, 0, "SFT: ")
    yield from found or [ok("memory", f"fits on {target}")]


def plan(s: Settings, arguments: list[str]) -> memory.Plan:
    """doctor's plan of the training; only RL's reads verl's config. Raises SettingsError."""
    return memory_checks.plan(s if s.by_pairs else composed_here(s), arguments)


def composed_here(s: Settings) -> Settings:
    """``s`` for the verl that is installed here, the cpu stack's. `a100` has another, whose keys it lacks; `current`
    sets the same of what RL's memory depends on."""
    return replace(s, STACK="current") if s.STACK == "a100" else s


def parameters(s: Settings) -> int:
    """Of the real model; 0 where its config is of an unknown type."""
    shapes = memory.shapes_of(s.MODEL)
    return shapes.parameters if shapes else 0


def saved(s: Settings) -> tuple[float, str]:
    """The bytes of all checkpoints that there are at once, and in words what they are."""
    (count, size), warm_up = doctor.checkpoints(s, parameters(s)), doctor.warm_up(s, parameters(s))
    beside = f" and the warm-up's of {gb(warm_up)}" if warm_up else ""
    return count * size + warm_up, f"{count} checkpoints of {gb(size)}{beside}"


def disk(s: Settings, command: Command) -> Iterator[Finding]:
    """Room for the real model's checkpoints: DISK, or what is free here."""
    need, what = saved(s)
    free = command.DISK * 1e9 or hardware.free_disk(s.runs_dir)[1]
    where = "by DISK" if command.DISK else "on this machine; DISK= says that of the real one"
    text = f"{what} need {gb(need)}, {gb(free)} free {where}"
    if not need:
        yield warning("disk", f"checkpoints not estimated, {gb(free)} free {where}", "download MODEL here first")
    elif need <= free:
        yield ok("disk", text)
    elif command.DISK:
        yield error("disk", text, "lower KEEP, or take a larger disk")
    else:
        yield warning("disk", text, "take a larger disk there")


# ---- what it will need ---------------------------------------------------------------------------------------------


def step_of(s: Settings, shapes: memory.Shapes, prompt: float, response: float, longest: float) -> speed.Step:
    """An RL step of the real run with responses of these lengths."""
    updates = s.TRAIN_BATCH_SIZE // s.MINI_BATCH_SIZE
    # The old log-probs of a step of one update are its own (verl_plugins/on_policy.py), with these exceptions.
    rollouts, critic = s.TRAIN_BATCH_SIZE * s.ROLLOUT_N, s.METHOD == "ppo"
    again = updates > 1 or s.METHOD in ("egpo", "distill") or s.ROLLOUT_CORRECTION == "sequence"
    forward = int(again or (critic and s.KL_COEF > 0)) + int(s.KL_COEF > 0) + int(critic)
    lengths = prompt, response, longest
    return speed.Step(shapes, s.world_size, rollouts, *lengths, updates, forward, critic, s.TP, s.LORA_RANK > 0)


@dataclass(frozen=True)
class Time:
    """Seconds of the real run: of a step by phase, of the SFT warm-up, of all validations and checkpoints."""

    step: dict[str, float]
    sft: float
    validations: float
    saves: float
    steps: int

    @property
    def hours(self) -> float:
        return (START + self.sft + self.validations + self.saves + self.steps * sum(self.step.values())) / 3600


def time_of(s: Settings, gpu: speed.GPU, found: Lengths, response: float, longest: float) -> Time:
    """The time of the real run with responses of these lengths."""
    shapes, prompt = memory.shapes_of(s.MODEL), mean(found.prompts)
    step = step_of(s, shapes, prompt, response, longest)
    validated = replace(step, rollouts=s.DEV_SIZE, updates=0, forward=0)
    warm_up = replace(step, rollouts=s.SFT_BATCH_SIZE, response=mean(found.answers or [response]), updates=1, forward=0)
    at = range(1, s.STEPS + 1)
    tested = sum(s.TEST_FREQ > 0 and number % s.TEST_FREQ == 0 for number in at)
    saved = sum(number % s.SAVE_FREQ == 0 or (s.TEST_FREQ and number % s.TEST_FREQ == 0) for number in at)
    saving = speed.saving_seconds(doctor.checkpoints(s, parameters(s))[1])
    return Time(
        speed.predicted(step, gpu),
        speed.predicted(warm_up, gpu)["passes"] * s.SFT_STEPS if s.INIT == "sft" else 0.0,
        tested * speed.predicted(validated, gpu)["generation"] if tested else 0.0,
        saved * saving,
        s.STEPS,
    )


def cases(s: Settings, found: Lengths) -> dict[str, tuple[float, float]]:
    """Mean and longest response to reckon with: those of the demonstrations, and all at the limit."""
    limit = s.MAX_RESPONSE_LENGTH
    said = {f"responses at MAX_RESPONSE_LENGTH={limit}": (float(limit), float(limit))}
    if not found.answers:
        return said
    cut = [min(count, limit) for count in found.answers]
    return {f"responses as long as the demonstrations ({mean(cut):.0f} tokens)": (mean(cut), max(cut))} | said


def words(s: Settings, arguments: list[str], data_dir: Path, target: Target, command: Command) -> Iterator[str]:
    """The real run's needs, a line each, with the error that the same predictor had on the recorded runs."""
    shapes = memory.shapes_of(s.MODEL)
    if shapes is None:
        yield "not predicted: config.json is of an unknown model type"
        return
    try:
        planned = plan(s, arguments)
        yield from _of_memory(memory.estimate(shapes, planned, target.gpu.memory if target.gpu else 0))
    except SettingsError:
        yield "memory: not estimated, the settings are wrong"
    need, what = saved(s)
    yield f"disk: {gb(need)}, {what}"
    if reason := unpredicted(s, target, data_dir):
        yield f"seconds per step, hours, cost: not predicted, {reason}"
        return
    found = lengths(s, load_tokenizer(s.MODEL, weights=False), data_dir)
    for case, (response, longest) in cases(s, found).items():
        yield _of_time(time_of(s, target.gpu, found, response, longest), case, target, command.PRICE)
    if not command.PRICE:
        yield f"  cost: not said; PRICE= of a GPU hour, times {target.count} GPUs"
    yield from _error_of_time(s, shapes, target)


def _of_memory(needs: memory.Estimate) -> Iterator[str]:
    for name, parts, where in (
        ("update", needs.update, " on each GPU"),
        ("sampling", needs.sampling, " on each GPU"),
        ("RAM", needs.ram, ""),
    ):
        if parts:
            yield f"memory, {name}: {gb(sum(parts.values()))}{where}: {memory.words_of(parts)}"
    if speed.recorded() and needs.update:
        average, most, runs = speed.memory_error()
        off = f"{average:.0%} on average, {most:.0%} at most, on {runs} recorded runs"
        yield f"  the estimate of the update was off by {off}"


def of_teacher(folder: Path) -> str:
    """The memory of TEACHER, whose config.json is in ``folder``."""
    shapes = memory.shapes_of(str(folder))
    return f"memory, TEACHER: {gb(2 * shapes.parameters) if shapes else 'unknown'} of weights on a GPU of its own"


def of_judge(s: Settings, counters: Path) -> str:
    """Calls of the judge in the real run, and their price, by the tokens that the thin judge counted."""
    calls = s.STEPS * s.TRAIN_BATCH_SIZE * s.ROLLOUT_N
    own = read_counters(counters).get("thin", {})
    text = f"judge: {calls:,} calls in {s.STEPS} steps, without validations and evaluation"
    if not own.get("calls"):
        return text
    tokens = own["tokens_in"] / own["calls"]
    text += f"; prompts of {tokens:.0f} tokens on average here, where answers are short"
    price = Judge.from_environment().JUDGE_PRICE_IN
    return text + (f": {calls * tokens * price / 1e6:,.2f} at JUDGE_PRICE_IN={price:g}" if price else "")


def _of_time(time: Time, case: str, target: Target, price: float) -> str:
    phases = ", ".join(f"{name} {seconds:.0f}" for name, seconds in time.step.items())
    text = f"a step: {sum(time.step.values()):.0f} s ({phases}); {time.steps} steps: {time.hours:.1f} hours"
    if price:
        text += f", {time.hours * target.count * price:,.0f} at PRICE={price:g} x {target.count} GPUs"
    return f"{text}; {case}"


def _error_of_time(s: Settings, shapes: memory.Shapes, target: Target) -> Iterator[str]:
    average, most, runs = speed.error()
    yield f"  ±{average:.0%} on average, {most:.0%} at most, on {runs} recorded runs, leave-one-out, lengths given"
    sizes = sorted({run.step.model.parameters for run in speed.recorded()})
    beyond = []
    if target.gpu != speed.GPUS[speed.MEASURED]:
        beyond.append(f"scaled to {target.gpu.name} by its published peak and bandwidth")
    if shapes.parameters > 1.5 * sizes[-1]:
        beyond.append(f"a larger model than the {sizes[-1] / 1e9:.1f} B that was recorded")
    if s.world_size > max(run.step.gpus for run in speed.recorded()):
        beyond.append("more GPUs than the 4 that were recorded")
    beyond += ["LoRA"] * (s.LORA_RANK > 0) + ["OFFLOAD=1"] * s.OFFLOAD
    beyond += [f"{name}={getattr(s, name)}" for name in ("TP", "SP", "NNODES") if getattr(s, name) > 1]
    beyond += ["the environment's own time left out"] * s.multi_turn
    beyond += ["the teacher's time left out"] * (s.METHOD == "distill")
    beyond += ["without groups that are sampled again"] * (s.METHOD == "dapo")
    if beyond:
        yield f"  not measured: {'; '.join(beyond)}"
    yield f"  hours count {START} s until the first step, validations and checkpoints, not the evaluation at the end"


def unpredicted(s: Settings, target: Target, data_dir: Path) -> str:
    """Why the time cannot be predicted; empty where it can."""
    if target.gpu is None:
        return "STACK=cpu: there is no GPU; the real run's first steps say it"
    if s.by_pairs:
        return f"no run with METHOD={s.METHOD} and today's settings is recorded"
    if not speed.recorded():
        return "docs/results is not there"
    if not (data_dir / "train.parquet").is_file():
        return "the data stage broke"
    return ""
