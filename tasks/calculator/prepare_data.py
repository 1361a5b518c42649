"""Arithmetic problems that a small model cannot compute in its head, with the episodes that solve them."""

import random
from collections.abc import Iterator

from tasks.calculator.environment import TOOLS, calculate
from tasks.common.data import prepare
from tasks.common.rewards.environment import tool_message
from tasks.common.rewards.tool_calls import render_calls

# DIFFICULTY: how many numbers, the largest number
DIFFICULTIES = {"easy": ((2,), 999), "hard": ((3, 4), 9999)}
SYSTEM = "Use the calculator, then write the result in <answer></answer>."


def expression(rng: random.Random, difficulty: str) -> str:
    """A random expression over + - *, with parentheses around a part of it where there are more than two numbers."""
    counts, largest = DIFFICULTIES[difficulty]
    text, *rest = (str(rng.randint(11, largest)) for _ in range(rng.choice(counts)))
    for number in rest:
        if not text.isdigit() and rng.random() < 0.5:
            text = f"({text})"
        text += f" {rng.choice('+-*')} {number}"
    return text


def demonstration(problem: str) -> list[dict]:
    """The messages of an episode that solves ``problem`` with one call."""
    arguments = {"expression": problem}
    result = calculate(arguments)
    call = render_calls([{"name": "calculator", "arguments": arguments}])
    answer = {"role": "assistant", "content": f"<answer>{result}</answer>"}
    return [{"role": "assistant", "content": call}, tool_message(result), answer]


def generate(settings) -> Iterator[prepare.Example]:
    """Problems made here (SOURCE=generate)."""
    rng = random.Random(settings.SEED)
    while True:
        problem = expression(rng, settings.DIFFICULTY)
        truth = {"answer": calculate({"expression": problem})}
        yield prepare.Example(f"What is {problem}?", truth, demonstration(problem), SYSTEM, TOOLS)


if __name__ == "__main__":
    prepare.main({"generate": generate})
