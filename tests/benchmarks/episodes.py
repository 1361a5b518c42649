"""Episodes of an evaluation against single turns that are asked for in the same way, in one run on one engine.

    PYTHONPATH=. .venv/bin/python tests/benchmarks/episodes.py --model MODEL [--episodes 16] [--turns 4]

Every turn has ``--tokens`` tokens: an end of sequence does not end it. All have as many turns, and as many of them live
at once. ``same_prompts``: of the tokens with which the episodes asked for each turn, which shows what playing episodes
costs. ``single_turns``: of the first prompts, which are shorter. Measured: tokens/s of episodes whose environment
answers at once, over those of each; the time of episodes whose steps take ``--seconds``, over that of the slowest one:
it waits for the engine as long as episodes at once do, and ``--seconds`` in each turn. ``programs``: the same episodes
by a program of the `openai` package (turns=endpoint), with its start. Prints the ratios; exits with 1
when that to ``same_prompts`` is below 0.8 or the last above 1.3. ``load``: of the machine, before and after.
"""

import argparse
import functools
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import torch

from verl_tasks.evaluation.engines import Request, Sampling, VLLMEngine
from verl_tasks.evaluation.episodes import Stage, play_all
from verl_tasks.models.find import resolve_model
from verl_tasks.rewards.environment import Start, Step
from verl_tasks.rewards.episode import Limits
from verl_tasks.rewards.program import environment_of
from verl_tasks.rows import chat, rl_row
from verl_tasks.stacks import cpu

PROGRAM = """
import json
from openai import OpenAI
if __name__ == "__main__":
    client, row = OpenAI(max_retries=0), json.load(open("row.json"))
    messages = row["prompt"]
    for _ in range(row["extra_info"]["turns"]):
        said = client.chat.completions.create(model="policy", messages=messages).choices[0].message.content
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "go on"}]
    json.dump(1, open("score.json", "w"))
"""
LEAST, MOST = 0.8, 1.3  # of the ratios


class NeverEnds:
    """An engine whose answers count as ended where they are stopped at their length; ``asked``: all that is."""

    def __init__(self, engine: VLLMEngine):
        self.engine, self.tokens, self.asked = engine, 0, []

    def generate(self, requests, sampling, more=list):
        self.asked += requests

        def joined() -> list[Request]:
            self.asked += (found := more())
            return found

        for request, completions in self.engine.generate(requests, sampling, joined):
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
    parser.add_argument("--episodes", type=int, default=16)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=16, help="of a turn")
    parser.add_argument("--seconds", type=float, default=1.0, help="of a step, in the second measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    given = parser.parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if not torch.cuda.is_available() and "VLLM_CPU_OMP_THREADS_BIND" not in os.environ:
        # libc and OpenMP read these at the start of a process.
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | cpu.ENVIRONMENT)
    import vllm

    load = [round(os.getloadavg()[0], 2)]
    length = 2048
    real = VLLMEngine(resolve_model(given.model), length, 0, 0.5)
    vllm.SamplingParams = functools.partial(vllm.SamplingParams, ignore_eos=True)  # vLLM's modules are imported
    limits = Limits(length, length // 2, given.tokens, given.turns, 60 + given.seconds)
    how = Sampling(1, False, 1.0, 1.0, length // 2, given.tokens, 0)
    rows = [rl_row("benchmark", chat(f"Count to {i}."), {}, "test", i) for i in range(given.episodes)]
    for row in rows:
        row["extra_info"]["turns"] = given.turns

    def timed(work: Callable[[NeverEnds], None]) -> tuple[float, NeverEnds]:
        """Seconds of ``work`` on an engine with an empty cache, and that engine."""
        engine = NeverEnds(real)
        real.llm.reset_prefix_cache()
        started = time.perf_counter()
        work(engine)
        return time.perf_counter() - started, engine

    def episodes(engine: NeverEnds, seconds: float = 0, made: type | None = None) -> None:
        requests = [Request(i, "sampled", []) for i in range(given.episodes)]
        stage, found = Stage(engine, real.tokenizer, how, limits, made or environment(given.turns, seconds)), []
        play_all(stage, rows, requests, found.extend)
        if any(rollout.reward["turns"] != given.turns for rollout in found):
            sys.exit("error: an episode was cut off: take fewer --turns or --tokens")

    def asked(engine: NeverEnds, waves: list[list[Request]]) -> None:
        for wave in waves:
            list(engine.generate(wave, how))

    folder = Path(tempfile.mkdtemp())
    (folder / "agent.py").write_text(PROGRAM)
    program = environment_of(folder / "agent.py")
    timed(lambda engine: episodes(engine, made=program))  # the `openai` package is loaded
    _, warm = timed(episodes)
    first = [[Request(row["extra_info"]["index"], "sampled", row["prompt"]) for row in rows]] * given.turns
    waves = [[each for each in warm.asked if each.turn == turn] for turn in range(given.turns)]
    works = {
        "at_once": episodes,
        "single_turns": lambda engine: asked(engine, first),
        "same_prompts": lambda engine: asked(engine, waves),
        "programs": lambda engine: episodes(engine, made=program),
        "slow_steps": lambda engine: episodes(engine, given.seconds),
    }
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(given.rounds):
        for name, work in works.items():
            took, engine = timed(work)
            if engine.tokens != warm.tokens:
                sys.exit(f"error: {name} sampled {engine.tokens} tokens, the episodes {warm.tokens}")
            seconds[name].append(round(took, 3))
            print(f"{name:<14}{took:>10.2f} s{engine.tokens / took:>10.0f} tokens/s", flush=True)
    median = {name: statistics.median(found) for name, found in seconds.items()}
    rates = {name: round(median[name] / median["at_once"], 3) for name in ("single_turns", "same_prompts")}
    of_programs = {name: round(median[name] / median["programs"], 3) for name in rates}
    of_prompts = round(median["single_turns"] / median["same_prompts"], 3)
    slow = round(median["slow_steps"] / (median["at_once"] + given.turns * given.seconds), 3)
    for name, rate in rates.items():
        print(f"episodes / {name}, tokens per second: {rate:.3f}")
    for name, rate in of_programs.items():
        print(f"programs / {name}, tokens per second: {rate:.3f}")
    print(f"same_prompts / single_turns, which no episode can exceed: {of_prompts:.3f}")
    print(f"programs: {given.episodes / median['programs']:.2f} episodes per second")
    print(f"steps of {given.seconds:g} s: all / the slowest episode: {slow:.3f}")
    if given.out:
        given.out.write_text(
            json.dumps(
                {
                    "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
                    "cores": os.cpu_count(),
                    "load": [*load, round(os.getloadavg()[0], 2)],
                    "versions": {name: version(name) for name in ("vllm", "torch", "transformers")},
                    "model": Path(real.model).name,
                    "episodes": given.episodes,
                    "turns": given.turns,
                    "tokens_per_turn": given.tokens,
                    "step_s": given.seconds,
                    "seconds": seconds,
                    "tokens": warm.tokens,
                    "rate_to": rates,
                    "programs_rate_to": of_programs,
                    "same_prompts_rate_to_single_turns": of_prompts,
                    "slow_to_slowest_episode": slow,
                },
                indent=2,
            )
            + "\n"
        )
    real.close()
    if rates["same_prompts"] < LEAST or slow > MOST:
        sys.exit(f"error: the targets are at least {LEAST} and at most {MOST}")


if __name__ == "__main__":
    main()
