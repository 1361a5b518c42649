"""What many_gpus.sh and on_a_gpu.sh compute: `python -m tests.benchmarks.many_gpus PART ...`."""

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from unittest import mock

from verl_tasks.evaluation.engine_pool import Hardware
from verl_tasks.evaluation.engines import GRAPHS, Sampling
from verl_tasks.evaluation.rollouts import read_rollouts
from verl_tasks.evaluation.sample import Job, Scoring, load
from verl_tasks.evaluation.sampler import sample
from verl_tasks.machine.hardware import nvidia
from verl_tasks.models.find import resolve_model
from verl_tasks.runs.run import read_metrics
from verl_tasks.settings import stack
from verl_tasks.visible_gpus import gpu_numbers

SAMPLES, LENGTH = 16, 256  # a prompt's, and the tokens of each
ENGINE_TARGET = 0.9  # of as many times the samples as there are GPUs
SCALE_TARGETS = {2: 0.92, 4: 0.88, 8: 0.80}  # a whole step, beside the fewest GPUs


def write(out: Path, result: dict) -> None:
    """``result`` as JSON, with the day, the GPU if there is one, and the versions, to ``out``."""
    found = nvidia()  # torch would tell the name too, but take memory of the GPU that is measured
    gpu = {"gpu": found.gpus[0].name} if found and found.gpus else {}
    versions = {name: version(name) for name in ("torch", "transformers")}
    out.write_text(
        json.dumps({"date": time.strftime("%Y-%m-%d"), **gpu, "versions": versions, **result}, indent=1) + "\n"
    )


def sp(out: str) -> None:
    """SP=2 beside SP=1 (tests/sequence_parallel.py)."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    sys.exit(subprocess.run([*torchrun, "-m", "tests.sequence_parallel", out]).returncode)


def engines(most: str, rows: str, out: str) -> None:
    """Samples per second of the same job with one engine and with ``most``, and how many responses are the same."""
    result: dict = {"model": os.environ["MODEL"], "samples of a prompt": SAMPLES, "tokens": LENGTH}
    one, many = _engines(1, rows, out, result), _engines(int(most), rows, out, result)
    same = sum(one[key] == many[key] for key in one)
    speed = [result[f"{count} engines"]["samples_per_second"] for count in (1, int(most))]
    result |= {"speedup": speed[1] / speed[0], "same_responses": same / len(one), "target": ENGINE_TARGET * int(most)}
    write(Path(out), result)
    print(f"{speed[0]:.1f} and {speed[1]:.1f} samples/s, {speed[1] / speed[0]:.2f} x, same responses: {same}")


def _engines(count: int, rows: str, out: str, result: dict) -> dict:
    """The responses of ``count`` engines; their times go to ``result``, and so far to ``out``."""
    responses, result[f"{count} engines"] = _sampled(
        Hardware(count), rows, Path(out).with_name(f"engines-{count}.jsonl")
    )
    write(Path(out), result)
    return responses


def shared(rows: str, out: str) -> None:
    """Samples per second of the same job with one engine on a GPU, without CUDA graphs and with them, then with two and
    four on the same GPU; how many responses are the same as the first's."""
    result: dict = {"model": os.environ["MODEL"], "samples of a prompt": SAMPLES, "tokens": LENGTH}
    result["cores"] = len(os.sched_getaffinity(0))
    first, ours = {}, {"GRAPHS": GRAPHS}
    for name, count, other in (
        ("1, without graphs", 1, {"GRAPHS": GRAPHS | {"cudagraph_mode": "NONE"}}),
        ("1", 1, ours),
        ("2", 2, ours),
        ("4", 4, ours),
    ):
        with mock.patch.multiple("verl_tasks.evaluation.engines", **other):  # a pool's processes do not see it
            found, result[name] = _sampled(
                Hardware(count, sharing=count), rows, Path(out).with_suffix(f".{count}.jsonl")
            )
        first = first or found
        result[name]["same_responses"] = sum(first[key] == found[key] for key in first) / len(first)
        write(Path(out), result)
    print(
        ", ".join(f"{name}: {each['tokens_per_second']:.0f}" for name, each in result.items() if isinstance(each, dict))
    )


def _sampled(hardware: Hardware, rows: str, out: Path) -> tuple[dict, dict]:
    """The responses of all ``rows`` by prompt and sample, written to ``out`` on ``hardware``, and the times."""
    from tasks.countdown.reward import compute_score

    sampling = Sampling(SAMPLES, False, 1.0, 1.0, max_prompt_tokens=256, max_tokens=LENGTH, seed=0)
    job = Job(str(resolve_model(os.environ["MODEL"])), rows, 0, sampling, hardware)
    scoring = Scoring(compute_score, None, "")
    out.unlink(missing_ok=True)
    started = time.monotonic()
    engine = job.hardware.engine(job.model, 512, sampling.seed)
    ready = time.monotonic()
    _, missing = load(job, out, scoring)
    sample(engine, job, out.with_suffix(".first"), missing[: len(missing) // 8], scoring)  # caches, kernels
    warm = time.monotonic()
    sample(engine, job, out, missing, scoring)
    seconds = time.monotonic() - warm
    engine.close()
    rollouts, _ = read_rollouts(out)
    figures = {
        "seconds": seconds,
        "seconds_to_start": ready - started,
        "samples": len(rollouts),
        "samples_per_second": len(rollouts) / seconds,
        "tokens_per_second": sum(r.tokens for r in rollouts) / seconds,
        "mean_score": sum((r.reward or {}).get("score", 0.0) for r in rollouts) / len(rollouts),
    }
    print(f"{hardware}: {figures}", flush=True)
    return {(r.index, r.sample): r.response for r in rollouts}, figures


def dpo(runs: str, out: str) -> None:
    """The losses of the runs `whole` (one GPU) and `shards` (two) of the folder ``runs``, and their peaks of memory."""
    metrics = {name: read_metrics(Path(runs) / name) for name in ("whole", "shards")}
    losses = {name: [step["train/loss"] for step in steps.values()] for name, steps in metrics.items()}
    write(Path(out), {"model": os.environ["MODEL"], "losses": losses, "metrics": metrics})
    apart = max(abs(a - b) for a, b in zip(losses["whole"], losses["shards"], strict=True))
    print(f"{len(losses['whole'])} steps, losses {losses}, at most {apart:.2g} apart")
    if not all(map(math.isfinite, losses["shards"])) or len(losses["shards"]) < 4:
        sys.exit("error: fewer than 4 steps, or a loss that is no number")


def scale(folder: str, part: str, out: str) -> None:
    """Tokens per second and GPU on each number of GPUs beside the fewest, with the same rollouts a step, of the files
    PART-GPUS-ROLLOUTS.json in ``folder``."""
    result: dict = {"targets": SCALE_TARGETS}
    files = {tuple(map(int, file.stem.split("-")[1:])): file for file in Path(folder).glob(f"{part}-*-*.json")}
    for rollouts in sorted({rollouts for _, rollouts in files}):
        runs = {gpus: json.loads(file.read_text()) for (gpus, of), file in sorted(files.items()) if of == rollouts}
        figures = {gpus: run["variants"]["ours"] for gpus, run in runs.items()}
        fewest, speed = min(figures), {gpus: each["tokens_per_second_per_gpu"] for gpus, each in figures.items()}
        phases = [name for name in figures[fewest] if name.startswith("seconds_") and name != "seconds_in_all"]
        result[f"{rollouts} rollouts"] = {
            "gpu": runs[fewest]["gpu"],
            "tokens_per_second_per_gpu": speed,
            "efficiency": {gpus: each / speed[fewest] for gpus, each in speed.items()},
            "phases": {gpus: {name: each.get(name) for name in phases} for gpus, each in figures.items()},
            "share_of_bf16_peak_in_update": {
                gpus: each.get("share_of_bf16_peak_in_update") for gpus, each in figures.items()
            },
        }
        print(f"{rollouts} rollouts a step: efficiency {result[f'{rollouts} rollouts']['efficiency']}")
    write(Path(out), result)


PARTS: dict[str, Callable] = {"sp": sp, "engines": engines, "shared": shared, "dpo": dpo, "scale": scale}

if __name__ == "__main__":
    os.environ |= stack(os.environ["STACK"]).ENVIRONMENT | gpu_numbers()
    # A fork of this process hangs once torch's threads ran here, to unpack the model.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    PARTS[sys.argv[1]](*sys.argv[2:])
