"""Seconds of an RL step on GPUs, predicted from a model's shapes and a step's tokens.

A few terms, each with one factor that is fitted to the runs recorded in docs/results (all on H200s). For another
GPU, peak and bandwidth are the maker's figures; the prediction for it has not been measured.
"""

import functools
import json
import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tasks.common.machine.memory import EMBEDDED_CONFIG, Plan, Shapes, estimate, shapes
from tasks.common.settings import ROOT


@dataclass(frozen=True)
class GPU:
    """The maker's figures: dense bf16 FLOP and bytes of memory per second, and bytes that a driver leaves free."""

    name: str
    peak: float
    bandwidth: float
    memory: float


# NVIDIA's data sheets: A100 (PCIe 40 GB, SXM 80 GB), H100 SXM, H200 SXM, A10, L40S; FLOP without sparsity.
GPUS = {
    "a100": GPU("A100-80G", 312e12, 2.039e12, 80_000 * 2**20),
    "a100-40g": GPU("A100-40G", 312e12, 1.555e12, 40_000 * 2**20),
    "h100": GPU("H100-80G", 989e12, 3.35e12, 80_000 * 2**20),
    "h200": GPU("H200", 989e12, 4.8e12, 142_000 * 2**20),
    "a10": GPU("A10-24G", 125e12, 0.6e12, 22_500 * 2**20),
    "l40s": GPU("L40S", 362e12, 0.864e12, 45_000 * 2**20),
}
MEASURED = "h200"  # all recorded runs
RESULTS = ROOT / "docs/results"


@dataclass(frozen=True)
class Step:
    """The properties of an RL step that decide its time. Lengths are means over responses, ``longest`` the longest."""

    model: Shapes
    gpus: int
    rollouts: int
    prompt: float  # tokens
    response: float
    longest: float
    updates: int = 1  # optimizer steps of the policy
    forward: int = 0  # passes without gradients: old log-probs, reference, values of a critic
    critic: bool = False
    tensor_parallel: int = 1
    lora: bool = False

    @property
    def tokens(self) -> float:
        return self.rollouts * (self.prompt + self.response)


PHASES = ("generation", "passes", "rest")


def terms(step: Step, gpu: GPU) -> dict[str, list[float]]:
    """The terms of each phase, in seconds or in counts: the fit gives each a factor, the same for all runs.

    Generation: decode steps follow one another; each reads the weights and the keys and values once (bandwidth), and
    has a fixed overhead; each rollout costs the processes time; 2 FLOP per parameter and token (Kaplan et al. 2020,
    arXiv 2001.08361, section 2.1). Passes: 2 FLOP forward, 4 backward, 2 for gradient checkpointing; a fixed time per
    token and per optimizer step. Rest (advantages, weights to vLLM, metrics): per rollout, and fixed.
    """
    model, tokens = step.model, step.tokens / step.gpus
    engines = step.gpus / step.tensor_parallel
    each = step.rollouts / engines  # rollouts of an engine
    read = 2 * model.parameters + 4 * model.layers * model.keys * each * (step.prompt + step.response / 2)
    decode = step.longest * read / step.tensor_parallel / gpu.bandwidth
    matrices = 2 * model.parameters / gpu.peak
    backward = 2 if step.lora else 3  # of 2 FLOP, beside the forward pass: with checkpointing 3, or 2 for a frozen base
    trained = 2 if step.critic else 1
    flops = matrices * tokens * (step.forward + trained * (1 + backward))
    passes = tokens * (step.forward + 3 * trained)
    return {
        "generation": [step.longest, each, decode + matrices * tokens],
        "passes": [flops, passes, trained * step.updates],
        "rest": [1.0, step.rollouts],
    }


# ---- the recorded runs ---------------------------------------------------------------------------------------------

QWEN25_3B = {  # https://huggingface.co/Qwen/Qwen2.5-3B/blob/main/config.json: the shape of the runs h200-3b-*
    "model_type": "qwen2",
    "hidden_size": 2048,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "intermediate_size": 11008,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class Recorded:
    """A run in docs/results with today's settings of STACK=current, with one program on the GPU (docs/GPU.md).

    ``like``: runs of one name differ in nothing that the predictor sees, so leave-one-out leaves them out together.
    """

    name: str
    like: str
    config: dict
    gpus: int = 1
    updates: int = 1
    forward: int = 1
    critic: bool = False


RECORDED = (
    Recorded("h200-3b-1gpu", "3b", QWEN25_3B),
    Recorded("h200-3b-ours", "3b", QWEN25_3B),
    Recorded("h200-3b-2gpu", "3b, 2 GPUs", QWEN25_3B, gpus=2),
    Recorded("h200-3b-4gpu", "3b, 4 GPUs", QWEN25_3B, gpus=4),
    Recorded("h200-3b-one-update", "3b, one update", QWEN25_3B, forward=0),
    Recorded("h200-step-ours", "small", EMBEDDED_CONFIG),
    Recorded("h200-step-one-update", "small, one update", EMBEDDED_CONFIG, forward=0),
    Recorded("h200-countdown-learning", "countdown", EMBEDDED_CONFIG, updates=4),
    Recorded("h200-countdown-lr-1e-5", "countdown", EMBEDDED_CONFIG, updates=4),
    Recorded("h200-countdown-lr-5e-6", "countdown", EMBEDDED_CONFIG, updates=4),
    Recorded("h200-countdown-two-numbers", "two numbers", EMBEDDED_CONFIG),
    Recorded("h200-countdown-two-numbers-again", "two numbers", EMBEDDED_CONFIG),
    Recorded("h200-countdown-egpo", "egpo", EMBEDDED_CONFIG),
    Recorded("h200-countdown-gspo", "gspo", EMBEDDED_CONFIG, updates=4),
    Recorded("h200-countdown-ppo", "ppo", EMBEDDED_CONFIG, updates=4, forward=2, critic=True),
)
OF_PASSES = ("old_log_prob", "update_actor", "update_critic", "values", "ref")
BESIDES = ("save_checkpoint", "testing")  # in verl's timing_s/step, and not in every step


@dataclass(frozen=True)
class Measured:
    """A recorded run: its step, and the median seconds of each phase after the first step."""

    run: Recorded
    step: Step
    seconds: dict[str, float]
    saving: float  # seconds of a checkpoint; 0: none was saved
    memory: float  # bytes, the most that the trainer's allocator had

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


def measured(run: Recorded, folder: Path = RESULTS) -> Measured:
    """Read the metrics of a recorded run. Raises OSError without its file."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    _, *rows = [record["data"] for record in records if record["run"] == run.name]  # the first step compiles

    median = statistics.median

    def taken(row: dict, *names: str) -> float:
        return sum(row.get(f"timing_s/{name}", 0.0) for name in names)

    generation = median(taken(row, "gen") for row in rows)
    passes = median(taken(row, *OF_PASSES) for row in rows)
    rest = median(taken(row, "step") - taken(row, "gen", *OF_PASSES, *BESIDES) for row in rows)
    prompt, response, longest = (
        median(row[name] for row in rows)
        for name in ("prompt_length/mean", "response_length/mean", "response_length/max")
    )
    rollouts = round(median(row["perf/total_num_tokens"] for row in rows) / (prompt + response))
    step = Step(shapes(run.config), run.gpus, rollouts, prompt, response, longest, run.updates, run.forward, run.critic)
    saves = [taken(row, "save_checkpoint") for row in rows if taken(row, "save_checkpoint")]
    memory = max(row["actor/perf/max_memory_allocated_gb"] for row in rows) * 2**30
    seconds = {"generation": generation, "passes": passes, "rest": rest}
    return Measured(run, step, seconds, median(saves) if saves else 0.0, memory)


@functools.cache
def recorded() -> tuple[Measured, ...]:
    """All recorded runs; empty where this copy of the project lacks docs/results."""
    try:
        return tuple(map(measured, RECORDED))
    except OSError:
        return ()


# ---- the fit -------------------------------------------------------------------------------------------------------


def fitted(runs: Iterable[Measured]) -> dict[str, np.ndarray]:
    """The factors of each phase's terms, none below 0, with the least squares of relative errors."""
    from scipy.optimize import nnls

    runs, factors = list(runs), {}
    for phase in PHASES:
        seconds = np.array([run.seconds[phase] for run in runs])
        of_runs = np.array([terms(run.step, GPUS[MEASURED])[phase] for run in runs])
        factors[phase] = nnls(of_runs / seconds[:, None], np.ones(len(runs)))[0]
    return factors


def predicted(step: Step, gpu: GPU, factors: dict[str, np.ndarray] | None = None) -> dict[str, float]:
    """Seconds of each phase of ``step``; by default with the factors of all recorded runs."""
    factors = factors or fitted(recorded())
    return {phase: float(np.dot(factors[phase], values)) for phase, values in terms(step, gpu).items()}


def left_out(runs: Iterable[Measured]) -> dict[str, float]:
    """The relative error of each run's step, predicted by the runs that are not like it."""
    runs, errors = list(runs), {}
    for run in runs:
        factors = fitted(other for other in runs if other.run.like != run.run.like)
        found = sum(predicted(run.step, GPUS[MEASURED], factors).values())
        errors[run.run.name] = found / run.total - 1
    return errors


@functools.cache
def error() -> tuple[float, float, int]:
    """Mean and largest absolute relative error of leave-one-out, and the number of runs."""
    sizes = [abs(value) for value in left_out(recorded()).values()]
    return statistics.mean(sizes), max(sizes), len(sizes)


MAX_TOKENS = 32768  # MAX_TOKENS_PER_GPU of the recorded runs


def memory_off(run: Measured) -> float:
    """The relative error of the estimate of memory (machine/memory.py, which is not fitted) against the most that the
    trainer's allocator had. verl balances the passes of an optimizer step, so each has fewer tokens than the limit."""
    step = run.step
    tokens = step.tokens / step.updates / step.gpus
    largest = round(tokens / math.ceil(tokens / MAX_TOKENS))
    plan = Plan(gpus=step.gpus, gpus_here=step.gpus, tokens=largest, share=0, fused=True, critic=step.critic)
    parts = estimate(step.model, plan).update
    return (sum(parts.values()) - parts["contexts"]) / run.memory - 1  # the allocator does not know of contexts


@functools.cache
def memory_error() -> tuple[float, float, int]:
    """Mean and largest absolute relative error of the estimate of memory, and the number of runs."""
    sizes = [abs(memory_off(run)) for run in recorded()]
    return statistics.mean(sizes), max(sizes), len(sizes)


def saving_seconds(size: float) -> float:
    """Of a checkpoint of ``size`` bytes, at the median rate of the recorded runs (of a small model, on local disks)."""
    rates = [16 * run.step.model.parameters / run.saving for run in recorded() if run.saving]
    return size / statistics.median(rates)
