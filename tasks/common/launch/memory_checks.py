"""doctor's checks of the settings against a machine: batch sizes, heads, the model's window, memory; and its advice."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from verl_tasks.launch import experiments, train
from verl_tasks.launch.finding import Finding, error, ok, warning
from verl_tasks.machine import hardware, memory
from verl_tasks.machine.memory import gb
from verl_tasks.models.merge import base_model
from verl_tasks.runs import folder
from verl_tasks.runs.run import Run
from verl_tasks.settings import Settings, SettingsError, method, problems, teacher_gpus
from verl_tasks.training import tracking, verl_config
from verl_tasks.training.methods import distill, dpo

SPARE = 0.05  # of a GPU: the estimate is no closer


@dataclass(frozen=True)
class Jobs:
    """The trainings of an experiment that run at a time (experiments.train_at_once)."""

    count: int = 1
    groups: int = 1  # of GPUs, over which they are spread
    size: int = 0  # GPUs of a group, with those of a teacher

    @property
    def sharing(self) -> int:
        """How many of them share a group, at most."""
        return experiments.sharing(self.count, self.groups)

    def gpus(self, s: Settings, gpus: Sequence[hardware.GPU]) -> dict[int, hardware.GPU]:
        """Of ``gpus`` those that train, by their number: the first N_GPUS of each group."""
        numbers = [first * self.size + number for first in range(self.groups) for number in range(s.N_GPUS)]
        return {number: gpus[number] for number in numbers if number < len(gpus)}

    def teachers(self, s: Settings, gpus: Sequence[hardware.GPU]) -> list[hardware.GPU]:
        """Of ``gpus`` those that a teacher has: after those that train."""
        numbers = [first * self.size + s.N_GPUS for first in range(self.groups)]
        return [gpus[number] for number in numbers if number < len(gpus)]


ALONE = Jobs()


def jobs_of(s: Settings, runs: Sequence[Settings], jobs: int) -> Jobs:
    """``jobs`` of ``runs`` at a time; without runs one training of ``s``."""
    count = min(jobs, len(runs)) or 1
    groups = len(experiments.gpu_groups(runs, count)) if runs else 1
    return Jobs(count, groups, s.N_GPUS + teacher_gpus(runs or [s]))


def plan(s: Settings, arguments: list[str], stage: str = "train", config=None) -> memory.Plan:
    """The values that decide the memory; for RL from verl's ``config``, else composed and checked here. Raises
    SettingsError."""
    sequence = s.MAX_PROMPT_LENGTH + s.MAX_RESPONSE_LENGTH
    own = {"gpus": s.N_GPUS, "gpus_here": s.N_GPUS, "sequence": sequence, "lora_rank": s.LORA_RANK, "share": 0}
    on_cpu = s.STACK == "cpu"
    own |= {"on_cpu": on_cpu, "checkpointing": not on_cpu, "number": hardware.number_bytes(on_cpu)}
    own |= {"response": s.MAX_RESPONSE_LENGTH}
    if stage == "sft":
        rows = s.data_dir / "sft.parquet"
        overrides = verl_config.sft_overrides(s, s.MODEL, s.runs_dir, rows)
        given = dict(override.lstrip("+").split("=", 1) for override in overrides)  # SFT takes no ARGS
        by_tokens, fused = s.MAX_TOKENS_PER_GPU and s.STACK != "a100", given.get("model.use_fused_kernels") == "True"
        tokens = int(given.get("data.max_token_len_per_gpu") or int(given["data.micro_batch_size_per_gpu"]) * sequence)
        named = "MAX_TOKENS_PER_GPU" if by_tokens else "MICRO_BATCH_SIZE"
        return memory.Plan(**own, fused=fused, sequence_parallel=s.SP, tokens=tokens, tokens_by=named)
    if s.by_pairs:  # TRL: each process loads the policy and the reference
        pairs = verl_config.micro_batch(max(1, s.MICRO_BATCH_SIZE // 2), s.TRAIN_BATCH_SIZE // s.N_GPUS)
        held = {"response": 0, "sharded": dpo.sharded(s), "reference": True, "reference_offloaded": False}
        # TRL 0.29.1 computes all logits, 1.16 never (trl/trainer/dpo_trainer.py, add_fused_lm_head).
        held |= {"loaded": 1 if s.LORA_RANK else 2, "fused": s.STACK != "a100"}
        return memory.Plan(**own | held, tokens=2 * pairs * sequence)
    found = verl_config.memory_plan(config or verl_config.rl_config(s, arguments))
    others = [memory.shapes_of(each) for each in (s.TEACHER, s.REWARD_MODEL) if each and on_cpu]
    return replace(found, served=sum(each.parameters for each in others if each))


def window(s: Settings, shapes: memory.Shapes) -> Iterator[Finding]:
    """No sequence may be longer than the model's window: verl 0.9.1 and vLLM's engine of the evaluation refuse it."""
    name = "MAX_NEW_TOKENS" if s.MAX_NEW_TOKENS > s.MAX_RESPONSE_LENGTH else "MAX_RESPONSE_LENGTH"
    longest = s.MAX_PROMPT_LENGTH + (response := getattr(s, name))
    if shapes.window and longest > shapes.window:
        lengths = f"MAX_PROMPT_LENGTH={s.MAX_PROMPT_LENGTH} + {name}={response}"
        text = f"{lengths}: more than MODEL's window of {shapes.window} tokens"
        text += ", which only vLLM can stretch" if shapes.stretch > 1 else ""
        yield error("lengths", text, "lower one of them, or take another MODEL")


def heads(s: Settings, shapes: memory.Shapes, planned: memory.Plan) -> Iterator[Finding]:
    """Each of the GPUs that share a model or a sequence takes whole heads (vLLM; verl's apply_monkey_patch). ARGS may
    have other numbers in ``planned``."""
    shared = {("TP", s.TP), ("SP", s.SP), ("TP", planned.tensor_parallel), ("SP", planned.sequence_parallel)}
    for name, count in sorted(shared, reverse=True):
        if not shapes.divides(count):
            text = f"{name}={count}: MODEL has {shapes.heads} heads and {shapes.key_heads} of keys"
            among = (planned.samplers if name == "TP" else planned.gpus_here) if planned.samplers else s.N_GPUS
            fits = [n for n in range(1, among + 1) if among % n == 0 and shapes.divides(n)]
            yield error("heads", f"{text}, which cannot be shared so", f"set {name} to one of {fits}")


def batches_and_memory(
    s: Settings,
    arguments: list[str],
    stage: str,
    found: hardware.Nvidia | None,
    jobs: Jobs = ALONE,
    ram: tuple[float, float] | None = None,
    composed: Settings | None = None,
) -> Iterator[Finding]:
    """Batch sizes as verl wants them, and the estimate of memory against what is free, also of a warm-up to come.

    Of another machine's run (launch/needs.py): ``ram``, bytes free and in all, default this machine's; ``composed``,
    ``s`` for the verl that is installed here."""
    config = None
    try:
        if stage != "sft":
            tracking.check_loggers(s)
            config = train.check_method(composed or s, arguments)
        plans = {each: plan(s, arguments, each, config) for each in stages(s, stage)}
    except SettingsError as problem:
        yield error("settings", str(problem), "correct the variable")
        return
    if s.by_pairs and stage != "sft":
        text = f"DPO_EPOCHS={s.DPO_EPOCHS} of the pairs, {s.TRAIN_BATCH_SIZE} per step; STEPS is not used"
    else:
        text = f"{s.TRAIN_BATCH_SIZE} x {s.ROLLOUT_N}, mini-batches of {s.MINI_BATCH_SIZE}: verl takes them"
    yield ok("settings", text)
    if stage == "doctor" and (text := method(s.METHOD).warning(config)):  # a training says it itself
        yield warning("settings", text)
    shapes = memory.shapes_of(base_model(s.MODEL))
    if shapes is None:
        text = f"not estimated: MODEL={s.MODEL} has no config.json in the hub's cache, or an unknown model type"
        yield warning("memory", text, f"download it (`hf download {s.MODEL}`), or watch the first steps")
        return
    if stage != "sft" or s.SFT_SOURCE == "samples":
        yield from window(s, shapes)
    yield from heads(s, shapes, plans[stage])
    yield from teacher(s, found, jobs)
    gpus = jobs.gpus(s, found.gpus).values() if found and s.STACK != "cpu" else ()
    if s.STACK != "cpu" and not gpus:
        return
    if untold := [gpu.name for gpu in gpus if not gpu.total]:  # of a part (MIG), or the machine's, e.g. a GB10
        text = f"not estimated: nvidia-smi does not tell that of {untold[0]}"
        yield warning("memory", text, "watch the first steps")
        return
    gpu = min(gpus, key=lambda gpu: gpu.free, default=hardware.GPU("", 0, 0))
    free, total = ram or hardware.ram()
    there = len(found.gpus) - teacher_gpus([s]) if gpus else 0
    for each, planned in plans.items():
        ram, of = sum(memory.estimate(shapes, planned).ram.values()), "SFT: " if each == "sft" else ""
        at_once = jobs if each == stage else ALONE  # the warm-up is trained before them
        if short := too_much(s, stage, shapes, planned, gpu, total, of, there, at_once):
            yield from short
        elif at_once.count * ram > free:
            need = f"{of}needs about {gb(at_once.count * ram)} RAM, {gb(free)} is free"
            yield warning("memory", need, "end other programs")
        else:
            yield ok("memory", f"{of}estimated: {memory.summary(shapes, planned, gpu.total)}")


def beside(
    s: Settings, shapes: memory.Shapes, planned: memory.Plan, gpu: hardware.GPU, sharing: int
) -> tuple[memory.Plan, float]:
    """``planned`` as one of ``sharing`` trainings on ``gpu`` (experiments.train_at_once), and the bytes that the others
    hold there: their state between the passes, and their part of vLLM's share. ARGS give each the whole share."""
    share = planned.share / (sharing if planned.share == s.GPU_MEMORY_UTILIZATION else 1)
    state, vllm = sum(memory.resting(shapes, planned).values()), share * gpu.total
    each = memory.OVERHEAD + (max(state, vllm) if planned.samplers else state + vllm)
    return replace(planned, share=share), (sharing - 1) * each


def together(shapes: memory.Shapes, each: memory.Plan, gpu: hardware.GPU, sharing: int) -> list[str]:
    """Why ``sharing`` trainings may not fit on a GPU; empty where they do.

    Each counts with its update and with vLLM awake, an upper bound: six ran out of memory with more in use than either
    phase takes by itself (docs/GPU.md)."""
    update, vllm = sum(memory.estimate(shapes, each, gpu.total).update.values()), each.share * gpu.total
    one = max(update, vllm) if each.samplers else update + vllm  # vLLM may have GPUs of its own
    if sharing == 1 or sharing * one <= gpu.free:
        return []
    parts = f"{gb(one)} each, update {gb(update)}, vLLM {gb(vllm)}"
    return [f"{sharing} trainings on a GPU take up to {gb(sharing * one)} of {gb(gpu.free)} ({parts})"]


def teacher(s: Settings, found: hardware.Nvidia | None, jobs: Jobs = ALONE) -> Iterator[Finding]:
    """An error where TEACHER's weights in bf16 do not fit into its part of the GPU after those of the training, which
    the teachers of ``jobs`` share, or its window is too short for a prompt, its response and one token more."""
    if not (shapes := memory.shapes_of(s.TEACHER) if s.TEACHER else None):
        return
    longest = s.MAX_PROMPT_LENGTH + s.MAX_RESPONSE_LENGTH + 1
    if shapes.window and longest > shapes.window:
        short = f"TEACHER={s.TEACHER}: its window of {shapes.window} tokens is less than the {longest} of a sequence"
        yield error("lengths", short, "lower MAX_RESPONSE_LENGTH, or take another TEACHER")
    gpus = [gpu for gpu in jobs.teachers(s, found.gpus if found else ()) if gpu.total]
    parts = [min(gpu.free, distill.SHARE * gpu.total) for gpu in gpus]
    need, room = 2 * shapes.parameters, min(parts, default=math.inf)
    shared = min([room, *(distill.SHARE * gpu.total / jobs.sharing for gpu in gpus)])
    if need > shared:
        too_large = f"TEACHER={s.TEACHER}: weights of {gb(need)}, and its GPU has {gb(shared)} for it"
        fix = "end what is on that GPU" if need > room else "lower JOBS"
        yield error("memory", too_large, f"take a smaller TEACHER, or {fix}")


def stages(s: Settings, stage: str) -> list[str]:
    """``stage`` and, where it first trains the warm-up, sft."""
    to_come = stage != "sft" and s.INIT == "sft" and not Run.read(folder.sft_dir(s)).warmed(s)
    return [stage, "sft"] if to_come else [stage]


def too_much(
    s: Settings,
    stage: str,
    shapes: memory.Shapes,
    planned: memory.Plan,
    gpu: hardware.GPU,
    ram_bytes: float,
    of: str = "",
    there: int = 0,
    jobs: Jobs = ALONE,
) -> list[Finding]:
    """What does not fit, as memory.too_much; where all fits, what of the GPUs leaves less than SPARE. ``of``: before
    each text. ``there``: GPUs of this machine for the training; 0: not known. What is advised, the ``stage`` of ``s``
    takes. Where fewer JOBS help, one line advises the most that do; where none do, it is what is said of one
    training."""

    def takes(changes: dict[str, float]) -> bool:
        return not any(problems(replace(s, **changes), stage))

    def check(at_once: int) -> list[Finding]:
        sharing = replace(jobs, count=at_once).sharing
        each, held = beside(s, shapes, planned, gpu, sharing)
        free, ram = max(0, gpu.free - held), ram_bytes / at_once
        if short := memory.too_much(shapes, each, free, ram, gpu.total, SPARE, takes, there):
            return [error("memory", f"{of}{text}", fix) for text, fix in short]
        less = (1 - SPARE) * free, ram, (1 - SPARE) * gpu.total
        tight = memory.too_much(shapes, each, *less, takes=takes, there=there)
        found = [warning("memory", f"{of}less than {SPARE:.0%} to spare: {text}", fix) for text, fix in tight]
        crowded = [] if found else together(shapes, each, gpu, sharing)
        return found + [warning("memory", f"{of}{text}", "lower JOBS") for text in crowded]

    def state(found: list[Finding]) -> str:
        return found[0].state if found else "ok"

    alone = check(1)
    found = check(jobs.count) if jobs.count > 1 else alone
    if state(found) == state(alone):
        return alone
    most = max(fewer for fewer in range(1, jobs.count) if state(check(fewer)) == state(alone))
    return [replace(found[0], text=f"with JOBS={jobs.count}: {found[0].text}", fix=f"set JOBS={most}")]


def fewer_gpus(runs: list[Settings], most: int) -> str:
    """What to set where ``runs`` get at most ``most`` GPUs: a number with which their settings hold."""
    for n in range(most, 0, -1):
        if not any(chain.from_iterable(problems(replace(run, N_GPUS=n), "train") for run in runs)):
            return f"set N_GPUS={n}"
    return "take a machine with more"


def of_each_method(s: Settings, runs: Sequence[Settings]) -> list[Settings]:
    """Of the trainings of an experiment one of each method: ppo has a critic beside the policy. Without them ``s``."""
    return list({run.METHOD: run for run in runs}.values()) or [s]
