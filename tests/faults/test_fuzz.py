"""Fuzzed answers through every reward of tasks/common/rewards and every shipped task: no exception, bounded time.

    FUZZED=1000000 make test-all        # answers for each reward; 20,000 by default

An answer is a mutation of a right one, of a known exploit, of a text of the tests' hostile tables, or of another
answer. The seed is a constant, so a failure comes again. The scorers of reasoning-gym and math-verify have a process of
their own and take milliseconds: they get a hundredth of FUZZED.
"""

import functools
import importlib
import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import islice

import pytest
from reasoning_gym.factory import DATASETS

from tasks.countdown.test_reward import HOSTILE as ARITHMETIC
from tests.helpers import ROOT, SINGLE_TURN
from tests.test_gym import ATTACKS
from tests.test_math_answer import HOSTILE as FORMULAS
from tests.test_own_samples import HOSTILE as TEXTS
from verl_tasks.evaluation.exploits import PAYLOADS, WRAPPERS, Form, Row, library, mutated
from verl_tasks.rewards import gym, json_answer, judge, math_answer, tool_calls
from verl_tasks.rewards.answers import after_thinking, last_answer
from verl_tasks.rewards.expression import parse_expression

pytestmark = pytest.mark.long

SEED = 23
FUZZED = int(os.environ.get("FUZZED", "20000"))
CHUNK = 2000  # answers from one seed
CPU_SECONDS = 0.5  # of one call; make bench_rewards holds ordinary answers against 5 ms
CHUNK_SECONDS = 600  # a call that never ends is ended with its process
LONGEST = 5000  # characters of an answer that others are made of
# What a reader looks for, REPEATED characters of it: a search that is quadratic in them takes seconds.
PARTS = (" ", "\n", "a", "1", "#### ", "<answer>", "<think>", "</think>", "<tool_call>", "{", "[", '{"a":', "`", "(")
PARTS += ("```json\n", "1+", "-", "\\boxed{", "answer is ", "答案", "* ", '"', "\\", "f(", "[f(a=", "1,000 ", "<|", "$")
REPEATED = 16_000
TASK = "tasks."  # before the names of the rewards of tasks


@dataclass
class Reward:
    """``score(text, row)`` of one reward, with rows whose demonstrations are right where the reward has such rows."""

    score: Callable[[str, Row], object]
    rows: list[Row]
    share: float = 1.0  # of FUZZED


def rows_of(task: str) -> list[Row]:
    """The rows of a task's examples.jsonl, each with its response as the demonstration."""
    lines = (ROOT / "tasks" / task / "examples.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    truths = [row["ground_truth"] for row in found]
    truths = [truth if isinstance(truth, str) else json.dumps(truth) for truth in truths]
    return [Row("Say 1, 2 or 3.", truth, row["response"], task) for truth, row in zip(truths, found, strict=True)]


def of_task(task: str, variant: str) -> Reward:
    """A task's reward, with its own check of what it returns (``reward_function`` raises for no finite numbers)."""
    compute_score, opened = (
        importlib.import_module(f"tasks.{task}.reward").compute_score,
        [None, {"think_opened": True}],
    )
    how = {"variant": variant} if variant else {}
    keys = compute_score(task, "", rows_of(task)[0].truth, **how).keys()

    def score(text: str, row: Row) -> None:
        found = compute_score(task, text, row.truth, opened[len(text) % 2], **how)
        assert found.keys() == keys, f"keys {list(found)}"
        assert -1 <= found["score"] <= 1 and found["acc"] in (0, 1), found

    return Reward(score, rows_of(task))


def of_environment() -> Reward:
    """All environments of reasoning-gym in one worker."""
    names = [name for name in sorted(DATASETS) if name != "composite"]
    score = gym.scorer("composite", {"datasets": [{"name": name} for name in names]})
    made = [next(gym.examples(name, None, SEED)) for name in names]
    rows = [Row(str(e.prompt), json.dumps(e.ground_truth), e.demonstration or "<answer>1</answer>") for e in made]

    def checked(text: str, row: Row) -> None:
        found = score(text if "<answer>" in text else f"<answer>{text}</answer>", row.truth)
        assert found.keys() == {"score", "acc", "format", "failed"} and 0 <= found["score"] <= 1, found

    return Reward(checked, rows, share=0.01)


def math_verify(text: str, row: Row) -> None:
    well_formed, right = math_answer.compare(text[: math_answer.MAX_ANSWER_CHARS], row.truth)
    assert well_formed or not right


def reads_calls(text: str, row: Row) -> None:
    truth = json.loads(row.truth)
    try:
        found = tool_calls.parse_response(text)
    except tool_calls.Malformed:
        return
    assert tool_calls.matched(found.calls, truth["calls"], truth.get("tools") or []) <= len(found.calls)


def reads_object(text: str, row: Row) -> None:
    for strict in (True, False):
        value = json_answer.read_object(text, strict)
        assert value is None or isinstance(json_answer.schema_problem(value, {"type": "object"}), str | None)


def reads_verdict(text: str, row: Row) -> None:
    value = judge.parse_score(text)
    assert value is None or 0 <= value <= 1
    asked = judge.messages("1 + 1?", text, row.truth)
    assert [message["role"] for message in asked] == ["system", "user"]


def reads_answer(text: str, row: Row) -> None:
    assert isinstance(after_thinking(text), str)
    if (answer := last_answer(text)) is not None:
        parse_expression(answer)
    parse_expression(text)


def reads_number(text: str, row: Row) -> None:
    for flexible in (False, True):
        math_answer.find_answer(text, flexible)
    math_answer.read_number(text)
    math_answer.read_number(math_answer.tidy(text))


READERS = {
    "answers, expression": (reads_answer, "countdown"),
    "json_answer": (reads_object, "econ_agent"),
    "judge": (reads_verdict, "gsm8k"),
    "math_answer": (reads_number, "gsm8k"),
    "tool_calls": (reads_calls, "tool_calling"),
}


def names() -> list[str]:
    found = []
    for task in SINGLE_TURN:
        variants = getattr(importlib.import_module(f"tasks.{task}.reward"), "VARIANTS", ("",))
        found += [f"{TASK}{task}{f' {variant}' if variant else ''}" for variant in variants]
    return [*found, *READERS, "math_answer, math-verify", "gym"]


@functools.cache
def reward(name: str) -> Reward:
    if name.startswith(TASK):
        return of_task(*f"{name.removeprefix(TASK)} ".split(" ")[:2])
    if name == "gym":
        return of_environment()
    if name in READERS:
        score, task = READERS[name]
        return Reward(score, rows_of(task))
    return Reward(math_verify, rows_of("gsm8k"), share=0.01)


@functools.cache
def parents(name: str) -> list[str]:
    """What answers are made of: right ones, exploits of this reward's rows, and hostile texts."""
    rows = reward(name).rows
    right = [row.demonstration for row in rows]
    form = Form("<answer>", "</answer>")
    known = [attempt.text for attempt in library(rows[:8], form) if attempt.of_row is None]
    verdicts = ['{"reason": "right", "score": 10}', '<think>8</think>```json\n{"score": 3}\n```']
    tables = [*ARITHMETIC.values(), *FORMULAS, *TEXTS, *ATTACKS, *verdicts]
    long = [part * (REPEATED // len(part)) for part in PARTS]
    long += [f"{text}!" for text in long] + [f"<think>{text}</think>{right[0]}" for text in long]
    return [*dict.fromkeys([*right, *tables, *known, *long])]


def noise(rng: random.Random) -> str:
    """Characters of any plane, half of a surrogate pair among them, and marks that a reader knows."""
    marks = [*WRAPPERS, *PAYLOADS["constant"], "<think>", "</think>", "<|im_end|>", "\\", "\0", "\ud800", "\u2028"]
    parts = [
        rng.choice(marks) if rng.random() < 0.3 else chr(rng.randrange(0x110000)) for _ in range(rng.randrange(40))
    ]
    return "".join(parts)


def answers(name: str, number: int) -> Iterator[str]:
    """The answers of chunk ``number`` without an end; the first chunk begins with the parents themselves."""
    rng = random.Random(f"{SEED} {name} {number}")
    if number == 0:
        yield from parents(name)
    pool = [text for text in parents(name) if len(text) <= LONGEST]
    while True:
        parent, mate = rng.choice(pool), rng.choice(pool)
        for _ in range(rng.choice((1, 1, 2, 4))):
            parent = mutated(parent, mate, rng) if rng.random() < 0.9 else parent + noise(rng)
        if len(parent) <= LONGEST:
            pool[rng.randrange(len(pool))] = parent
        yield parent


def fuzzed(name: str, number: int, count: int) -> tuple[int, float, str, str]:
    """Score ``count`` answers of chunk ``number``: how many, the CPU seconds of the slowest call and its text, and the
    first problem, empty without one."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(CHUNK_SECONDS)
    score, rows = reward(name).score, reward(name).rows
    rng, slowest, slow_text = random.Random(number), 0.0, ""
    score("", rows[0])  # starts what is started once
    for done, text in enumerate(islice(answers(name, number), count)):
        row, started = rng.choice(rows), time.thread_time()
        try:
            score(text, row)
        except Exception as error:
            return done, slowest, slow_text, f"{type(error).__name__}: {error}\n  answer: {text[:300]!r}"
        if (taken := time.thread_time() - started) > slowest:
            slowest, slow_text = taken, f"{len(text)} characters, {text[:60]!r}"
    signal.alarm(0)
    return count, slowest, slow_text, ""


@pytest.mark.parametrize("name", names())
def test_a_reward_raises_for_no_answer_and_takes_no_long_time(name):
    count = max(1, round(FUZZED * reward(name).share))
    sizes = [min(CHUNK, count - start) for start in range(0, count, CHUNK)]
    parents(name)
    with ProcessPoolExecutor(min(len(sizes), os.cpu_count())) as pool:
        found = [pool.submit(fuzzed, name, number, size) for number, size in enumerate(sizes)]
        results = [future.result() for future in found]
    assert not (problems := [result[3] for result in results if result[3]]), f"{len(problems)}: {problems[0]}"
    assert sum(result[0] for result in results) == count
    slowest = max(results, key=lambda result: result[1])
    print(f"\n{name}: {count:,} answers, slowest {1e3 * slowest[1]:.1f} ms of CPU ({slowest[2]})")
    assert slowest[1] < CPU_SECONDS, slowest
