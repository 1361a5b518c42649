"""Episodes of an evaluation against the same number of tokens in single turns, in one run on one engine.

    PYTHONPATH=. .venv/bin/python tests/benchmarks/episodes.py --model MODEL [--episodes 64] [--turns 4]

Every turn has ``--tokens`` tokens, as many as the engine samples before it is stopped. Measured: tokens/s of episodes
whose environment answers at once, over those of as many single turns; the time of episodes whose steps take
``--seconds``, over that of the slowest one: it waits for the engine as long as episodes at once do, and ``--seconds``
in each turn. Prints both ratios; exits with 1 when the first is below 0.8 or the second above 1.3.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import torch

from tasks.common.data.rows import chat, rl_row
from tasks.common.evaluation.engines import Request, Sampling, VLLMEngine
from tasks.common.evaluation.episodes import Stage, play_all
from tasks.common.models.find import resolve_model
from tasks.common.rewards.environment import Start, Step
from tasks.common.rewards.episode import Limits
from tasks.common.stacks import cpu

LEAST, MOST = 0.8, 1.3  # of the two ratios


class NeverEnds:
    """An engine whose answers count as ended where they are stopped at their length."""

    def __init__(self, engine: VLLMEngine):
        self.engine, self.tokens = engine, 0

    def generate(self, requests, sampling):
        for request, completions in self.engine.generate(requests, sampling):
            self.tokens += sum(completion.tokens for completion in completions)
            yield request, [replace(completion, finish_reason="stop") for completion in completions]


def environment(turns: int, seconds: float) -> type:
    """The class of one that says "go on" ``turns`` - 1 times, ``seconds`` after each turn."""

    class GoOn:
        def reset(self, row: dict) -> Start:
            self.left = turns
            return Start(row["prompt"])

        def step(self, action) -> Step:
            time.sleep(seconds)
            self.left -= 1
            return Step([{"role": "user", "content": "go on"}]) if self.left else Step(reward=1.0, done=True)

    return GoOn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=32, help="of a turn")
    parser.add_argument("--seconds", type=float, default=1.0, help="of a step, in the second measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    given = parser.parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if not torch.cuda.is_available() and "VLLM_CPU_OMP_THREADS_BIND" not in os.environ:
        # libc and OpenMP read these at the start of a process.
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | cpu.ENVIRONMENT)
    length = 2048
    real = VLLMEngine(resolve_model(given.model), length, 0, 0.5)
    limits = Limits(length, length // 2, given.tokens, given.turns, 60 + given.seconds)
    how = Sampling(1, False, 1.0, 1.0, length // 2, given.tokens, 0)
    rows = [rl_row("benchmark", chat(f"Count to {i}."), {}, "test", i) for i in range(given.episodes)]

    def episodes(count: int, seconds: float) -> tuple[float, int]:
        """Seconds and sampled tokens of ``count`` episodes."""
        engine, requests = NeverEnds(real), [Request(i, "sampled", []) for i in range(count)]
        stage, found = Stage(engine, real.tokenizer, how, limits, environment(given.turns, seconds)), []
        real.llm.reset_prefix_cache()
        started = time.perf_counter()
        play_all(stage, rows, requests, found.extend)
        took = time.perf_counter() - started
        if any(rollout.reward["turns"] != given.turns for rollout in found):
            sys.exit("error: an episode was cut off: take fewer --turns or --tokens")
        return took, engine.tokens

    def single_turns() -> tuple[float, int]:
        """Of as many single turns as the episodes have."""
        engine = NeverEnds(real)
        requests = [Request(i, "sampled", rows[i % given.episodes]["prompt"]) for i in range(len(rows) * given.turns)]
        real.llm.reset_prefix_cache()
        started = time.perf_counter()
        for _ in engine.generate(requests, how):
            pass
        return time.perf_counter() - started, engine.tokens

    episodes(min(8, given.episodes), 0)  # warm up
    seconds: dict[str, list[float]] = {"at once": [], "single turns": [], "slow steps": []}
    for _ in range(given.rounds):
        for name, (took, tokens) in (
            ("at once", episodes(given.episodes, 0)),
            ("single turns", single_turns()),
            ("slow steps", episodes(given.episodes, given.seconds)),
        ):
            seconds[name].append(round(took, 3))
            print(f"{name:<14}{took:>10.2f} s{tokens / took:>10.0f} tokens/s", flush=True)
    at_once, single, slow = (statistics.median(seconds[name]) for name in seconds)
    rate, slowest = single / at_once, at_once + given.turns * given.seconds
    print(f"episodes / single turns, tokens per second: {rate:.3f}")
    print(f"steps of {given.seconds:g} s: all / the slowest episode: {slow / slowest:.3f}")
    if given.out:
        given.out.write_text(
            json.dumps(
                {
                    "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
                    "cores": os.cpu_count(),
                    "versions": {name: version(name) for name in ("vllm", "torch", "transformers")},
                    "model": Path(real.model).name,
                    "episodes": given.episodes,
                    "turns": given.turns,
                    "tokens_per_turn": given.tokens,
                    "step_s": given.seconds,
                    "seconds": seconds,
                    "rate_to_single_turns": round(rate, 3),
                    "slow_to_slowest_episode": round(slow / slowest, 3),
                },
                indent=2,
            )
            + "\n"
        )
    real.close()
    if rate < LEAST or slow / slowest > MOST:
        sys.exit(f"error: the targets are at least {LEAST} and at most {MOST}")


if __name__ == "__main__":
    main()
