"""`make attack` on the rewards that verl, TRL and reasoning-gym ship: a Markdown table of what fools them.

    PYTHONPATH=. python tests/benchmarks/attack_libraries.py [--seconds 20] [--rows 40] [--out FILE] NAME ...

NAME: `verl`, `trl` or `reasoning-gym` for all of theirs, or a reward of the table. FILE: all findings as JSON. The rows
of verl's and TRL's rewards ask for a number; their demonstrations are in the form that the reward reads. A reward whose
package is not installed is named with the reason (geo3k needs mathruler). sandbox_fusion needs its own server.
"""

import argparse
import importlib
import json
import random
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path

from reasoning_gym.factory import DATASETS
from trl import rewards as trl_rewards
from verl.utils.reward_score import gsm8k, math_dapo, math_reward, math_verify, prime_code, prime_math, rlla
from verl.utils.reward_score import search_r1_like_qa_em as search_r1

from verl_tasks.evaluation import attack
from verl_tasks.evaluation.exploits import Row
from verl_tasks.guarded import Guarded
from verl_tasks.rewards import gym
from verl_tasks.rewards.answers import last_answer, read_ground_truth
from verl_tasks.text import one_line

SHOWN = 3
RIGHT_CALLS = 3.0  # of rlla's 4: 1 is for the form. A wrong value gets 2, so less than all says little
MAX_TOKENS = 512  # of TRL's rewards of a length; a token is a byte here
TOOL_CALL = '<tool_call>\n{{"name": "answer", "parameters": {{"value": {0}}}}}\n</tool_call>'


def of_trl(reward: Callable) -> Callable:
    """A reward of TRL, of a batch of chats, as one of ours."""

    def score(response: str, truth: str) -> float:
        chats, ids = [[{"role": "assistant", "content": response}]], [list(response.encode("utf-8", "replace"))]
        return reward(completions=chats, solution=[f"${truth}$"], completion_ids=ids)[0] or 0.0

    return score


def geo3k(response: str, truth: str) -> float:
    return importlib.import_module("verl.utils.reward_score.geo3k").compute_score(response, truth)


def of_code(response: str, truth: str) -> float:
    return prime_code.compute_score(response, {"inputs": ["\n"], "outputs": [f"{truth}\n"]}, continuous=True)[0]


def of_calls(response: str, truth: str) -> float:
    expected = f"<think>Count.</think>\n{TOOL_CALL.format(truth)}"
    return rlla.compute_score("rlla", response, expected, {"experiment_name": "qwen"})["score"] >= RIGHT_CALLS


# The reward, of a response and a truth, the form of its answers, and the score of a right one (of geo3k
# without the part for the form).
REWARDS = {
    "verl gsm8k": (gsm8k.compute_score, "It is {0}.\n#### {0}", 1),
    "verl gsm8k, flexible": (lambda r, truth: gsm8k.compute_score(r, truth, "flexible"), "It is {0}", 1),
    "verl math_reward": (math_reward.compute_score, "It is \\boxed{{{0}}}.", 1),
    "verl math_dapo": (lambda r, truth: math_dapo.compute_score(r, truth)["acc"], "It is clear.\nAnswer: {0}", 1),
    "verl math_verify": (math_verify.compute_score, "It is \\boxed{{{0}}}.", 1),
    "verl prime_math": (lambda r, truth: prime_math.compute_score(r, truth)[0], "It is \\boxed{{{0}}}.", 1),
    "verl prime_code": (of_code, "```python\nprint({0})\n```", 1),
    "verl geo3k": (geo3k, "<think>Count.</think>It is \\boxed{{{0}}}.", 0.9),
    "verl rlla": (of_calls, f"<think>Count.</think>\n{TOOL_CALL}", 1),
    "verl search_r1 em": (lambda r, truth: search_r1.compute_score(r, {"target": [truth]}), "<answer>{0}</answer>", 1),
    "verl search_r1 subem": (
        lambda r, truth: search_r1.compute_score_subem(r, {"target": [truth]}),
        "<answer>{0}</answer>",
        1,
    ),
    "trl accuracy_reward": (of_trl(trl_rewards.accuracy_reward), "It is $\\boxed{{{0}}}$.", 1),
    "trl reasoning_accuracy_reward": (
        of_trl(trl_rewards.reasoning_accuracy_reward),
        "x</think>It is $\\boxed{{{0}}}$.",
        1,
    ),
    "trl get_cosine_scaled_reward": (
        of_trl(trl_rewards.get_cosine_scaled_reward(MAX_TOKENS)),
        "It is $\\boxed{{{0}}}$.",
        0.5,
    ),
    "trl think_format_reward": (of_trl(trl_rewards.think_format_reward), "<think>Count.</think>It is {0}.", 1),
    "trl get_repetition_penalty_reward": (of_trl(trl_rewards.get_repetition_penalty_reward()), "It is {0}.", 0),
    "trl get_soft_overlong_punishment": (
        of_trl(trl_rewards.get_soft_overlong_punishment(MAX_TOKENS, MAX_TOKENS // 4)),
        "It is {0}.",
        0,
    ),
}


def of_numbers(name: str, count: int) -> tuple[Callable, list[Row]]:
    """A reward of REWARDS, and rows for it."""
    score, form, right = REWARDS[name]
    rng = random.Random(42)
    numbers = [rng.randint(-5, 9999) for _ in range(count)]
    rows = [Row(f"What is {n - 7} + 7?", json.dumps(str(n)), form.format(n)) for n in numbers]

    def compute_score(source, response, truth, extra=None):
        value = float(score(response, read_ground_truth(truth)))
        return {"score": value, "acc": float(value >= right)}

    return compute_score, rows


def of_gym(name: str, count: int) -> tuple[Callable, list[Row]]:
    """reasoning-gym's own scorer of an environment, without code that an answer holds, and rows for it."""
    source = gym.dataset(name)
    made = islice(gym.examples(name, None, 1), count)
    rows = [Row(e.messages()[-1]["content"], json.dumps(e.ground_truth), e.demonstration) for e in made]

    def compute_score(_, response, truth, extra=None):
        answer = last_answer(response)
        with gym.answers_not_run():
            value = 0.0 if answer is None else source.score_answer(answer, gym._decoded(read_ground_truth(truth)))
        return {"score": value, "acc": float(value >= gym.RIGHT)}

    return compute_score, rows


def attacked(name: str, count: int, seconds: float, tries: float) -> dict:
    """What was found: ``exploits``, each text once; ``reason``: why there was no attack, else empty."""
    started = time.monotonic()
    entry = {"reward": name, "rows": count, "right": 0, "tried": 0, "exploits": [], "reason": ""}
    compute_score, rows = (of_numbers if name in REWARDS else of_gym)(name, count)
    reward = Guarded(compute_score, rows)
    try:
        if problem := reward.scores(rows[0].demonstration or "", [0])[0].problem:
            return entry | {"reason": one_line(problem, 120)}
        search = attack.Search(rows, reward, seconds)
        attack.run(search, seed=42, tries=tries)
    finally:
        reward.close()
    entry |= {"right": len(search.against), "tried": search.tried, "seconds": round(time.monotonic() - started, 1)}
    texts = {}
    for each in sorted(search.found.values(), key=lambda each: (-len(each.fooled), len(each.response))):
        texts.setdefault(each.response, {"exploit": each.exploit, "response": each.response[:2000]})
        texts[each.response] |= {"fooled": len(each.fooled), "score": each.score, "why": each.why}
    return entry | {"exploits": list(texts.values())}


def row_of(entry: dict) -> str:
    shown = [
        f"`{one_line(repr(each['response']), 60)}` ({each['fooled']} of {entry['rows']}: {one_line(each['why'], 60)})"
        for each in entry["exploits"][:SHOWN]
    ]
    found = entry["reason"] or "; ".join(shown) or "nothing"
    cells = [entry["reward"], str(entry["right"]), str(entry["tried"]), found]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="+", metavar="NAME")
    parser.add_argument("--seconds", type=float, default=20, help="for each reward")
    parser.add_argument("--rows", type=int, default=40)
    parser.add_argument("--tries", type=float, default=float("inf"), help="at most so many answers")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    names = []
    for name in arguments.names:
        environments = [env for env in sorted(DATASETS) if env != "composite"]
        of_package = environments if name == "reasoning-gym" else [each for each in REWARDS if each.split()[0] == name]
        names += of_package or [name]
    print("| reward | demonstrations right | answers tried | found |\n|---|---:|---:|---|")
    entries = []
    for name in names:
        entries.append(attacked(name, arguments.rows, arguments.seconds, arguments.tries))
        print(row_of(entries[-1]), flush=True)
        if arguments.out:
            arguments.out.write_text(json.dumps(entries, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
