"""Speed of GRPO steps with our settings, with those of verl's example, with naive ones, and of TRL, in one run.

    make bench_training TASK=countdown [MODEL=...] [N_GPUS=...] [ARGS="--steps 4 --out file.json"]

Each trains the same model on the same prompts, TRAIN_BATCH_SIZE x ROLLOUT_N rollouts a step, with the same method,
one after the other on the same GPUs. The first step of each is left out (compilation); of the others the median.

- ours: what STACK and the task's train.sh set. verl's MFU also counts the backward that responses without an advantage
  do not have here (verl_plugins/zero_advantage.py)
- example: verl's examples/grpo_trainer/run_qwen3_8b_fsdp.sh (0.9.1) or run_qwen3-8b.sh (0.6.1), with verl's own trainer
  and agent loop. The first one's flash_attention_2 is not there for torch 2.11: it is given our attention, so that
  padding is left out as it wants. The second runs with flash-attn, as it is meant to; its 32 sequences a pass
- naive: sdpa with padding, eager rollouts, MICRO_BATCH_SIZE sequences a pass, verl's own trainer and agent loop
- by_token: ours without whole responses (verl_plugins/whole_responses.py)
- eager: ours without liger-kernel's kernels in the layers
- trl: TRL's GRPOTrainer with vLLM in its process, on one GPU, with MINI_BATCH_SIZE=TRAIN_BATCH_SIZE (trl_grpo.py). Not
  among the default variants: only the newer stacks have that TRL

All are without a KL term, which the examples have. ``a100``'s have many_sequences.py: without it vLLM 0.11.0 ends. All
of verl start as the stack's trainings do, on `current` as forks.
"""

import argparse
import json
import os
import statistics
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import torch

from tests.benchmarks import random_model
from verl_tasks.launch.plan import rl_plan
from verl_tasks.models.find import resolve_model
from verl_tasks.process import Progress, StageFailed, errors_in_one_line, run
from verl_tasks.runs.run import Run
from verl_tasks.settings import Settings, SettingsError, artifacts, load_settings
from verl_tasks.training import parity, verl_config, verl_versions

PHASES = ("gen", "reward", "old_log_prob", "adv", "update_actor", "update_weights", "step")
PEAK = ("actor/perf/max_memory_allocated_gb", "perf/max_memory_allocated_gb")  # of verl 0.9.1 and 0.6.1
# What ours sets, as verl has it; in the names of 0.9.1.
VERLS_OWN = [
    "trainer.v1.trainer_mode=sync",
    "actor_rollout_ref.rollout.agent.default_agent_loop=single_turn_agent",
    "actor_rollout_ref.rollout.max_num_batched_tokens=8192",
    "actor_rollout_ref.model.use_fused_kernels=False",
    "actor_rollout_ref.actor.strategy=fsdp",
    "actor_rollout_ref.ref.strategy=fsdp",
]
# The same of what only one stack sets.
OF_CURRENT = [
    "actor_rollout_ref.model.use_liger=False",
    "actor_rollout_ref.rollout.max_num_seqs=256",
    "++actor_rollout_ref.rollout.engine_kwargs.vllm.max_cudagraph_capture_size=null",
    "++actor_rollout_ref.rollout.engine_kwargs.vllm.scheduler_cls=null",
    "++actor_rollout_ref.rollout.engine_kwargs.vllm.compilation_config=null",
]
OF_A100 = ["++actor_rollout_ref.rollout.engine_kwargs.vllm.cuda_graph_sizes=null"]
METRICS = "metrics/000.jsonl"
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")  # TRL sets them for its one process


def _by_sequences(s: Settings, most: int) -> list[str]:
    """Overrides for passes of at most ``most`` sequences, in place of tokens."""
    micro = verl_config.micro_batch(most, s.MINI_BATCH_SIZE * s.ROLLOUT_N // s.N_GPUS)
    return [
        "actor_rollout_ref.actor.use_dynamic_bsz=False",
        f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={micro}",
        f"actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu={micro}",
    ]


def variants(s: Settings) -> dict[str, list[str]]:
    """Overrides after ours, in the names of the verl that is installed."""
    newer = verl_versions.has_own_trainers(s)
    verls_own = [*VERLS_OWN, *(OF_CURRENT if newer else OF_A100)]
    example = ["actor_rollout_ref.rollout.gpu_memory_utilization=0.6"]
    if newer:
        example += ["actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24576"]
    else:
        example += [*_by_sequences(s, 32), "actor_rollout_ref.rollout.calculate_log_probs=False"]
    naive = [
        "++actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        "actor_rollout_ref.model.use_remove_padding=False",
        "actor_rollout_ref.rollout.enforce_eager=True",
        *_by_sequences(s, s.MICRO_BATCH_SIZE),
    ]
    every = {"ours": [], "example": [*verls_own, *example], "naive": [*verls_own, *naive]}
    if newer:
        every["by_token"] = ["++actor_rollout_ref.rollout.engine_kwargs.vllm.scheduler_cls=null"]
        every["eager"] = ["actor_rollout_ref.model.use_liger=False"]
    return {name: verl_versions.renamed(overrides, "ppo_trainer", s) for name, overrides in every.items()}


def train(s: Settings, model: str, out: Path, steps: int, extra: list[str]) -> dict[int, dict]:
    """Metrics by step of ``steps`` GRPO steps. Raises StageFailed when the training fails."""
    own = [f"trainer.total_training_steps={steps}", "trainer.save_freq=-1", "trainer.test_freq=-1"]
    arguments = [*extra, *own, "trainer.rollout_data_dir=null"]
    of_model = replace(s, MODEL=model)
    parity.play(of_model)
    plan = rl_plan(of_model, Run.read(out), model, arguments)
    return watched(plan.command, out, steps, plan.environment)


def train_with_trl(model: str, out: Path, steps: int) -> dict[int, dict]:
    """The same of TRL's trainer, which takes one GPU that it sees."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    environ = {"CUDA_VISIBLE_DEVICES": seen, "HF_HUB_DISABLE_TELEMETRY": "1", "MASTER_ADDR": "127.0.0.1"}
    alone = ["env", *(f"--unset={name}" for name in LAUNCHER), sys.executable, "-m", "tests.benchmarks.trl_grpo"]
    return watched([*alone, model, str(steps), str(out)], out, steps, environ)


def watched(command: list[str], out: Path, steps: int, environ: dict[str, str]) -> dict[int, dict]:
    """The metrics of ``command`` by step, from where verl's runs have them. Raises StageFailed when it fails."""
    metrics = out / METRICS
    metrics.parent.mkdir(parents=True)

    def watch() -> Progress:
        return Progress(len(metrics.read_text().splitlines()) if metrics.exists() else 0)

    run(command, name=out.name, log=out / "log", total=steps, watch=watch, environment=environ)
    return {line["step"]: line["data"] for line in map(json.loads, metrics.read_text().splitlines())}


@contextmanager
def peak_of_gpus(count: int):
    """A dict whose ``peak_gb_of_gpu`` is, at the end, the most memory that was in use on a GPU, of all programs."""
    found, done = {}, threading.Event()

    def look() -> None:
        while not done.wait(0.2):
            for gpu in range(count):
                free, total = torch.cuda.mem_get_info(gpu)
                found["peak_gb_of_gpu"] = max(found.get("peak_gb_of_gpu", 0.0), (total - free) / 2**30)

    looking = threading.Thread(target=look, daemon=True)
    if torch.cuda.is_available():
        looking.start()
    try:
        yield found
    finally:
        done.set()
        if looking.is_alive():
            looking.join()


def summary(metrics: dict[int, dict]) -> dict[str, float]:
    """Medians over the steps after the first."""
    later = [step for number, step in sorted(metrics.items()) if number > 1]

    def median(key: str) -> float | None:
        values = [step[key] for step in later if key in step]
        return statistics.median(values) if values else None

    figures = {f"seconds_{name}": median(f"timing_s/{name}") for name in PHASES}
    figures |= {
        "tokens_per_second_per_gpu": median("perf/throughput"),
        "tokens": median("perf/total_num_tokens"),
        "response_length": median("response_length/mean"),
        "share_of_bf16_peak_in_update": median("perf/mfu/actor"),
        "peak_gb_of_trainer": max((step[key] for step in later for key in PEAK if key in step), default=None),
        "score": median("critic/score/mean"),
    }
    return {name: value for name, value in figures.items() if value is not None}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--variants", default="naive,example,ours", help="of these and trl")
    parser.add_argument("--steps", type=int, default=4, help="of each; the first is left out")
    parser.add_argument("--random-3b", action="store_true", help="a Qwen2.5-3B with random weights in place of MODEL")
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    arguments, extra = parser.parse_known_args()
    if arguments.steps < 2:
        raise SettingsError(f"--steps {arguments.steps}: give 2 or more, the first is left out")
    s = load_settings()
    chosen, overrides = arguments.variants.split(","), variants(s)
    known = [*overrides, "trl"]
    if unknown := [name for name in chosen if name not in known]:
        raise SettingsError(f"--variants {unknown[0]}: there are: {', '.join(known)}")
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
    work = artifacts() / "bench" / time.strftime("%Y%m%d-%H%M%S")
    model = str(resolve_model(s.MODEL))
    if arguments.random_3b:
        random_model.main("qwen3b", model, str(folder := artifacts() / "bench/random-qwen2.5-3b"))
        model = str(folder)
    packages = ["verl", "vllm", "torch", "transformers", *(["trl"] if "trl" in chosen else [])]
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "gpus": s.N_GPUS,
        "versions": {name: version(name) for name in packages},
        "model": "random Qwen2.5-3B"
        if arguments.random_3b
        else Path(s.MODEL).name
        if Path(s.MODEL).is_dir()
        else s.MODEL,
        "rollouts": f"{s.TRAIN_BATCH_SIZE} x {s.ROLLOUT_N}, lengths {s.MAX_PROMPT_LENGTH} + {s.MAX_RESPONSE_LENGTH}",
        "overrides": extra,
        "variants": {},
    }
    failed = []
    for name in chosen:
        started = time.monotonic()
        try:
            with peak_of_gpus(s.N_GPUS) as peak:
                if name == "trl":
                    metrics = train_with_trl(model, work / name, arguments.steps)
                else:
                    metrics = train(s, model, work / name, arguments.steps, overrides[name] + extra)
        except StageFailed as error:  # the others take minutes each, and may end well
            print(f"{name}: {error}", flush=True)
            failed.append(name)
            continue
        figures = summary(metrics) | peak | {"seconds_in_all": time.monotonic() - started}
        result["variants"][name] = figures
        steps = {other: its["seconds_step"] for other, its in result["variants"].items()}
        if "ours" in steps and len(steps) > 1:
            result["faster_than"] = {other: steps[other] / steps["ours"] for other in steps if other != "ours"}
        if arguments.out:  # after each: the next may be killed
            arguments.out.write_text(json.dumps(result, indent=1) + "\n")
        print(name, " ".join(f"{key}={value:.4g}" for key, value in figures.items()), flush=True)
    if "faster_than" in result:
        print("ours is faster by", result["faster_than"])
    if failed:
        raise SystemExit(f"error: failed: {', '.join(failed)}")


if __name__ == "__main__":
    with errors_in_one_line(SettingsError):
        main()
