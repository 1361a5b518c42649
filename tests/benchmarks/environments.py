"""Every environment of reasoning-gym: do its own answers score 1, how large are its rows, how long does a score take?

    PYTHONPATH=. .venv/bin/python tests/benchmarks/environments.py [--rows 100] [--seconds 20] [ENV ...]

Prints a Markdown table: milliseconds to make an entry; median and 99th percentile of a score through the sandbox, and
the median of the package's own ``score_answer`` in this process; different prompts; share of entries with a worked
answer, and the smallest score that one gets; bytes of the largest ground truth. Ends with rows/s over all of them.
"""

import argparse
import json
import os
import statistics
import time

from reasoning_gym.factory import DATASETS

from tasks.common.rewards import gym
from tasks.common.rewards.answers import last_answer


def timed(function, *arguments):
    start = time.perf_counter()
    result = function(*arguments)
    return result, 1e3 * (time.perf_counter() - start)


def examples(env: str, rows: int, seconds: float) -> tuple[list, float]:
    """At most ``rows`` examples, within about ``seconds``; and milliseconds for one."""
    start, made = time.monotonic(), []
    for example in gym.examples(env, None, 42):
        made.append(example)
        if len(made) == rows or time.monotonic() - start > seconds:
            return made, 1e3 * (time.monotonic() - start) / len(made)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("environments", nargs="*", metavar="ENV")
    parser.add_argument("--rows", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=20, help="to make the rows of an environment")
    arguments = parser.parse_args()
    names = arguments.environments or [env for env in sorted(DATASETS) if env != "composite"]
    score = gym.scorer("composite", {"datasets": [{"name": env} for env in names]})  # one worker for all
    print("| environment | ms an entry | ms a score | p99 | the package's own | prompts | answers | score | bytes |")
    print("|---|---|---|---|---|---|---|---|---|")
    all_ms = []
    for env in names:
        made, each = examples(env, arguments.rows, arguments.seconds)
        source = gym.dataset(env)
        ours, theirs, scores = [], [], []
        score("<answer>junk</answer>", json.dumps(made[0].ground_truth))  # loads what the environment needs
        for example in made:
            truth, response = json.dumps(example.ground_truth), example.demonstration or "<answer>junk</answer>"
            result, ms = timed(score, response, truth)
            entry = gym._decoded(example.ground_truth)
            with gym.answers_not_run():
                theirs.append(timed(source.score_answer, last_answer(response), entry)[1])
            ours.append(ms)
            scores += [result["score"]] if example.demonstration else []
        all_ms += ours
        p99 = sorted(ours)[int(0.99 * (len(ours) - 1))]
        prompts, size = len({e.prompt for e in made}), max(len(json.dumps(e.ground_truth)) for e in made)
        print(
            f"| {env} | {each:.1f} | {statistics.median(ours):.2f} | {p99:.2f} | {statistics.median(theirs):.2f} "
            f"| {prompts}/{len(made)} | {len(scores)}/{len(made)} | {min(scores, default=0):.2f} | {size} |",
            flush=True,
        )
    all_ms.sort()
    print(f"\n{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} (above the cores, waiting counts too)")
    p99 = all_ms[int(0.99 * (len(all_ms) - 1))]
    print(f"{len(all_ms)} rows, {1e3 * len(all_ms) / sum(all_ms):.0f} rows/s, 99 % under {p99:.2f} ms")


if __name__ == "__main__":
    main()
