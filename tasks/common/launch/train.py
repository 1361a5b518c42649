"""One training carried out: the SFT warm-up with verl, a round of RL with verl, or one of DPO with TRL."""

import contextlib
import json
import math
import os
import statistics
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq

from verl_tasks.data.pairs import pair_set
from verl_tasks.data.pairs import steps as pair_steps
from verl_tasks.data.prepare import load_tokenizer
from verl_tasks.files import NewLines, read_json
from verl_tasks.launch.plan import Plan, pairs_plan, rl_plan, sft_plan
from verl_tasks.launch.task import script
from verl_tasks.machine import cluster
from verl_tasks.models.find import resolve_model, whole_model
from verl_tasks.models.merge import adapter_config, base_model, is_adapter
from verl_tasks.process import Progress, StageFailed, run
from verl_tasks.rows import DataError
from verl_tasks.runs import folder, health, launches, validation
from verl_tasks.runs.checkpoint import ranks
from verl_tasks.runs.run import Run, mend_tracker, numbers, prune
from verl_tasks.settings import Settings, SettingsError, method
from verl_tasks.training import verl_config, verl_versions

GPU_SECONDS = 15  # between two lines of <run>/gpu.jsonl
GPU_FIELDS = {"memory.used": "memory_gib", "utilization.gpu": "load_percent", "power.draw": "power_w"}
GPU_QUERY = ["nvidia-smi", f"--query-gpu=index,{','.join(GPU_FIELDS)}", "--format=csv,noheader,nounits"]


class WithoutSignal(StageFailed):
    """The warm-up gives RL nothing to learn from."""


def check_method(s: Settings, arguments: list[str]):
    """What METHOD reads: verl's config of the training, the settings where TRL trains. Raises SettingsError for what
    METHOD cannot train with."""
    if s.by_pairs:
        config = s
        if arguments:
            raise SettingsError(f"ARGS={' '.join(arguments)}: are verl's; METHOD={s.METHOD} trains with TRL")
    elif s.ABORT_ON and not verl_versions.has_own_trainers(s):
        raise SettingsError(f"ABORT_ON={s.ABORT_ON}: STACK={s.STACK} has a verl that cannot do it; take STACK=current")
    else:
        config = verl_config.rl_config(s, arguments)
        for problem in _lost(s, config.trainer):
            raise SettingsError(problem)
        if (every := config.trainer.test_freq) > 0 and not s.DEV_SIZE:
            raise SettingsError(f"trainer.test_freq={every}: validates on the dev set; set DEV_SIZE")
    if problem := method(s.METHOD).problem(config):
        raise SettingsError(problem)
    return config


def _lost(s: Settings, trainer) -> Iterator[str]:
    """What ARGS change so that the run's folder would lack the checkpoints or metrics that all else reads there: verl's
    own trainer writes other ones, and checks no reward."""
    if "v1" in trainer and not trainer.use_v1:
        yield "ARGS: trainer.use_v1=False: has no trainer of METHOD and ASYNC; leave it out"
    if "v1" in trainer and (mode := trainer.v1.trainer_mode) != verl_config.trainer_of(s)[1]:
        yield f"ARGS: trainer.v1.trainer_mode={mode}: is not the trainer of METHOD and ASYNC; set these"
    if trainer.default_local_dir != str(s.runs_dir / "checkpoints"):
        yield f"ARGS: trainer.default_local_dir={trainer.default_local_dir}: is the run's folder; set ARTIFACTS"
    if trainer.total_training_steps != s.STEPS:
        yield f"ARGS: trainer.total_training_steps={trainer.total_training_steps}: is STEPS={s.STEPS}; set STEPS"
    if trainer.save_freq < 1:
        yield f"ARGS: trainer.save_freq={trainer.save_freq}: would save no checkpoint; set SAVE_FREQ"
    if "file" not in trainer.logger:
        yield f"ARGS: trainer.logger={trainer.logger}: would leave the run without metrics; set LOGGER"


# ---- stages --------------------------------------------------------------------------------------------------------


def sft(s: Settings, seconds: float = 0) -> str:
    """The warm-up on the task's demonstrations, or on correct samples of MODEL, in about ``seconds`` (0: unknown).

    Raises SettingsError, DataError and StageFailed.
    """
    run = folder.sft_run(s)
    if run.warmed(s):
        prune(run.folder, 0, {})
        return f"up to date: {run.last} steps"
    _check_ranks(s, run)
    if s.SFT_LOSS and not verl_versions.has_own_trainers(s):
        raise SettingsError(f"SFT_LOSS={s.SFT_LOSS:g}: STACK={s.STACK} has a verl that cannot do it; set SFT_STEPS")
    start = whole_model(resolve_model(s.MODEL))
    demonstrations = s.data_dir / "sft.parquet"
    if s.SFT_SOURCE == "samples":
        demonstrations = run.folder / "accepted.parquet"
        if not demonstrations.exists():
            script(s, "evaluate.py", "accepted", start, str(demonstrations))
    count = pq.read_metadata(demonstrations).num_rows if demonstrations.exists() else 0
    if count < s.SFT_BATCH_SIZE:
        few = f"has {count} demonstrations, less than SFT_BATCH_SIZE={s.SFT_BATCH_SIZE}"
        raise DataError(f"INIT=sft: {demonstrations} {few}; lower it, or use INIT=base")
    plan = sft_plan(s, run, start, demonstrations)
    folder.note(run, "sft", s, start)
    run = execute(plan, seconds)
    prune(run.folder, 0, {})  # a resumed trainer does not know the checkpoints of the one that was killed
    loss, whole = (run.metrics.get(run.last, {}).get(name, math.nan) for name in ("train/loss", validation.WHOLE))
    early = f", {whole:.3g} nats a demonstration: below SFT_LOSS={s.SFT_LOSS:g}" if run.last < s.SFT_STEPS else ""
    return f"{run.last} steps on {count} demonstrations, loss {loss:.3f}{early}"


def _check_ranks(s: Settings, run: Run) -> None:
    """Raise SettingsError where the warm-up would resume from shards of another number of GPUs.

    Its folder is the same for any N_GPUS, and verl opens only the shards of its own number of processes.
    """
    saved = ranks(run.checkpoint("latest")) if run.steps else 0
    if saved not in (0, s.N_GPUS):
        fix = f"set N_GPUS={saved}, or remove {run.folder / 'checkpoints'}"
        raise SettingsError(f"N_GPUS={s.N_GPUS}: the warm-up stopped at step {run.last} with N_GPUS={saved}; {fix}")


def train(s: Settings, arguments: list[str], number: int, start: str, run: Run, seconds: float = 0) -> Run:
    """Round ``number`` of RL from the model ``start``, in about ``seconds`` (0: unknown); the run after it."""
    begins = _trainer_start(s, start)
    # A teacher and a reward model may give no right answers.
    learns = s.INIT == "sft" and number == 1 and method(s.METHOD).REWARD and not s.REWARD_MODEL
    anyway = not learns or os.environ.get("ANYWAY") == "1"
    overrides = verl_config.critic_overrides(s, begins) + arguments
    plan = rl_plan(s, run, begins, overrides, number, anyway)
    nodes = cluster.join(s)
    folder.note(run, "rl", s, start, arguments, base_model(begins))
    prune(run.folder, s.KEEP, run.scores)  # also a crash's leftovers
    try:
        run = execute(plan, seconds)
    except StageFailed as error:
        raise cluster.explained(error, nodes) from error
    if said := method(s.METHOD).warning_after(run.metrics):
        print(f"  warning: {said}")
    if said := "; ".join(filter(None, (staleness(run.metrics), idle(run.metrics)))):
        print(f"  ASYNC={s.ASYNC}: {said}")
    return run


def staleness(metrics: dict[int, dict]) -> str:
    """How old the samples of a training with ``metrics`` (by step) were, in words; empty without ASYNC. The means are
    over its steps."""
    ages, most, older = (
        [step[f"staleness/{name}"] for step in metrics.values() if f"staleness/{name}" in step]
        for name in ("mean", "max", "older_tokens")
    )
    if not ages:
        return ""
    older, age = statistics.mean(older), statistics.mean(ages)
    return f"{older:.0%} of the tokens by an older policy, {age:.2f} steps old in the mean, at most {max(most):.0f}"


def idle(metrics: dict[int, dict]) -> str:
    """How long each side of ASYNC=separate waited for the other, in words; empty without it."""
    steps = [step for step in metrics.values() if {"idle/trainer", "idle/sampler", "timing_s/step"} <= step.keys()]
    if not (total := sum(step["timing_s/step"] for step in steps)):
        return ""
    trainer, sampler = (sum(step[f"idle/{side}"] for step in steps) for side in ("trainer", "sampler"))
    waited = f"of {total:.0f} s the trainer waited {trainer:.0f} s for samples"
    return f"{waited}, and vLLM was without a request {sampler:.0f} s"


def train_on_pairs(s: Settings, arguments: list[str], number: int, start: str, run: Run) -> Run:
    """Round ``number`` from the model ``start`` on PAIRS_FILE, or on pairs of its own samples; the run after it."""
    begins, file = _trainer_start(s, start), Path(s.PAIRS_FILE).expanduser()
    if not s.PAIRS_FILE and not (file := run.folder / "pairs.parquet").exists():
        script(s, "evaluate.py", "pairs", start, str(file), str(number))
    seeded = replace(s, SEED=s.TRAIN_SEED + number - 1)  # the trainer splits them by it too
    pairs = pair_set(seeded, file, load_tokenizer(base_model(start)))
    s = replace(s, STEPS=pair_steps(s, pairs))
    if s.LR_WARMUP >= s.STEPS:
        never = f"the rate reaches LR in none of {s.STEPS} steps"
        raise SettingsError(f"LR_WARMUP={s.LR_WARMUP}: {never}; set it lower")
    print(f"  {pairs.said}: {s.STEPS} steps of {s.TRAIN_BATCH_SIZE} in DPO_EPOCHS={s.DPO_EPOCHS}")
    plan = pairs_plan(s, run, begins, file, number)
    folder.note(run, "rl", s, start, arguments, base_model(begins))
    return execute(plan)


def _trainer_start(s: Settings, start: str) -> str:
    """``start`` for the trainer: an adapter where the training continues it, else a whole model.

    verl's reference model is the policy without its adapter, which is not ``start``: with KL_COEF the adapter is
    merged, and a new one is trained. TRL keeps a copy of the adapter as its reference.
    """
    if not is_adapter(Path(start)):
        return start
    config = adapter_config(Path(start))
    same = (config["r"], config["lora_alpha"]) == (s.LORA_RANK, s.LORA_ALPHA)
    return start if same and (s.by_pairs or not s.KL_COEF) else whole_model(start)


def said_steps(run: Run, wanted: float, s: Settings) -> str:
    """The steps of a complete run, in words."""
    ended = f" of {wanted} steps, ended by PATIENCE={s.PATIENCE}"
    return f"{run.last} steps" if run.last >= wanted else f"{run.last}{ended}"


# ---- a plan carried out --------------------------------------------------------------------------------------------


def execute(plan: Plan, seconds: float = 0) -> Run:
    """Train as ``plan`` says, in about ``seconds`` (0: unknown), with a record of the launch; the run after that.

    Raises StageFailed when the trainer fails, aborts, or ends without its last checkpoint.
    """
    run_dir, s, bar = plan.run.folder, plan.settings, Bar(plan)
    gpus = GPUSampler(run_dir / "gpu.jsonl")
    if plan.run.last:
        print(f"  resuming from step {plan.run.last}")
    launches.begin(run_dir, s, plan.command, plan.config)
    mend_tracker(plan.run)
    plan.metrics.parent.mkdir(exist_ok=True)

    def watch() -> Progress:
        gpus.sample()
        return bar.progress()

    outcome = run_dir / health.OUTCOME
    outcome.unlink(missing_ok=True)
    try:
        how = {"name": plan.name, "log": plan.log, "total": plan.steps, "environment": plan.environment}
        how |= {"minutes": s.START_MINUTES if verl_versions.has_own_trainers(s) else 0, "seconds": seconds}
        run(plan.command, **how, watch=watch)
    except StageFailed as error:
        ended = read_json(outcome)
        if ended.get("outcome") == health.WITHOUT:
            raise WithoutSignal(f"{ended['reason']}\n  log: {plan.log}") from error
        if reason := ended.get("reason"):  # the trainer's own: ABORT_ON
            raise StageFailed(f"{reason}; {_goes_on(run_dir)}\n  log: {plan.log}") from error
        raise StageFailed(str(error).replace("the same command continues", _goes_on(run_dir))) from error
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"stopped; {_goes_on(run_dir)}") from None
    after = Run.read(run_dir)
    early = after.warmed(s) if plan.name == "SFT" else after.ended_early(s.PATIENCE)
    if after.last < plan.steps and not early:
        raise StageFailed(f"{plan.name} ended without a checkpoint of step {plan.steps}\n  log: {plan.log}")
    bar.progress()
    for finding in health.newest_by_rule(bar.broken):
        times = sum(finding.rule == each.rule for each in bar.broken)
        print(f"  warning: step {finding.step}{f' and {times - 1} before' if times > 1 else ''}: {finding.text}")
    return after


def _goes_on(run_dir: Path) -> str:
    """Where the same command goes on after a stop."""
    step = Run.read(run_dir).last
    begins = "the same command begins at step 1, as there is no checkpoint yet"
    return f"the same command continues from the checkpoint of step {step}" if step else begins


class Bar:
    """What the screen shows of a training. It is asked twice a second, and looks at new steps alone."""

    def __init__(self, plan: Plan):
        before = plan.run.saved
        self.plan, self.lines, self.health = plan, NewLines(plan.metrics), health.Health(plan.settings)
        self.scores = validation.scores(before)
        self.broken = self.health.all(before)
        self.value, self.steps, self.seconds = "-", 0, 0.0
        self.shown = Progress(plan.run.last)

    def progress(self) -> Progress:
        """The last logged step, its metric, the last and best validation and the newest finding; no note before the
        first."""
        (name, key), last = self.plan.shown, None
        for last, row in numbers(self.lines, strict=False):
            self.broken += self.health.findings(last, row)
            validation.add(self.scores, last, row)
            self.value = f"{row[key]:.3f}" if key in row else self.value  # a step may have logged a validation alone
            self.steps, self.seconds = self.steps + ("timing_s/step" in row), self.seconds + row.get("timing_s/step", 0)
        if last is not None:
            newest = f"{self.broken[-1].rule.replace('_', ' ')} (step {self.broken[-1].step})" if self.broken else ""
            more = "".join(f", {words}" for words in (validation.words(self.scores), newest) if words)
            self.shown = Progress(last, f" {name} {self.value}{more}", self.seconds / max(1, self.steps))
        return self.shown


def gpu_state(output: str) -> dict[str, float]:
    """``gpu/<index>/memory_gib`` (GiB in use), ``load_percent``, ``power_w`` from the output of GPU_QUERY, if the GPU
    reports them (else "[N/A]")."""
    found = {}
    for line in output.splitlines():
        index, *values = (part.strip() for part in line.split(","))
        for name, value in zip(GPU_FIELDS.values(), values, strict=True):
            try:
                found[f"gpu/{index}/{name}"] = float(value) / (1024 if name == "memory_gib" else 1)
            except ValueError:
                continue
    return found


class GPUSampler:
    """Appends memory, load and power of the GPUs to ``path`` while a run trains, at most every GPU_SECONDS; without
    nvidia-smi it does nothing."""

    def __init__(self, path: Path):
        self.path, self.due, self.missing = path, 0.0, False

    def sample(self) -> None:
        if self.missing or time.monotonic() < self.due:
            return
        self.due = time.monotonic() + GPU_SECONDS
        try:
            seen = os.environ.get("CUDA_VISIBLE_DEVICES")
            query = [*GPU_QUERY, f"--id={seen}"] if seen else GPU_QUERY
            state = gpu_state(subprocess.run(query, capture_output=True, text=True, check=True, timeout=5).stdout)
        except subprocess.TimeoutExpired:
            return  # a busy driver
        except (OSError, subprocess.SubprocessError, ValueError):
            self.missing = True
            return
        with contextlib.suppress(OSError), self.path.open("a") as file:  # a full disk: try again, never end the run
            file.write(json.dumps({"time": time.time()} | state) + "\n")
