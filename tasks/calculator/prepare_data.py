"""Arithmetic problems that a small model cannot compute in its head, and GSM8K's, with the episodes that solve them."""

import random
from collections.abc import Iterator

from tasks.calculator.environment import TOOLS, calculate, written
from verl_tasks import environment, math_answer, prepare, records, tool_calls, word_problems

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


def turns(text: str, problem: str) -> list[dict]:
    """The model's message of ``text`` and a call for ``problem``, and its result. Raises CallError."""
    arguments = {"expression": problem}
    call = tool_calls.render_calls([{"name": "calculator", "arguments": arguments}])
    return [{"role": "assistant", "content": f"{text}\n{call}".strip()}, environment.tool_message(calculate(arguments))]


def answered(text: str, result: str) -> dict:
    """The model's last message."""
    return {"role": "assistant", "content": f"{text}\n<answer>{result}</answer>".strip()}


def demonstration(problem: str) -> list[dict]:
    """The messages of an episode that solves ``problem`` with one call."""
    messages = turns("", problem)
    return [*messages, answered("", messages[-1]["content"])]


def generate(settings) -> Iterator[prepare.Example]:
    """Problems made here (SOURCE=generate)."""
    rng = random.Random(settings.SEED)
    while True:
        problem = expression(rng, settings.DIFFICULTY)
        truth = {"answer": calculate({"expression": problem})}
        yield prepare.Example(f"What is {problem}?", truth, demonstration(problem), SYSTEM, TOOLS)


def worked(solution: str, result: str) -> list[dict] | None:
    """The episode of a worked solution: a turn up to each of its annotations, ``<<48/2=24>>``, which is the call.

    None without an annotation, or with one that is no expression.
    """
    messages, place = [], 0
    try:
        for found in word_problems.ANNOTATION.finditer(solution):
            messages += turns(solution[place : found.start()].strip(), found[1])
            place = found.end()
    except environment.CallError:
        return None
    return [*messages, answered(solution[place:].strip(), result)] if messages else None


def from_record(record: dict) -> list[prepare.Example]:
    """The example of a word problem. Raises DataError where it is none, or its answer is no number."""
    problem = word_problems.read(record)
    if (number := math_answer.read_number(problem.number)) is None:
        raise prepare.DataError("`answer` must end with `#### ` and a number")
    result = written(number)
    solution = worked(problem.answer.rpartition("####")[0], result)
    return [prepare.Example(problem.question, {"answer": result}, solution, SYSTEM, TOOLS)]


def from_hub(settings) -> prepare.Examples:
    """GSM8K of the hub (SOURCE=gsm8k)."""
    return word_problems.from_hub(word_problems.HUB_DATASET, from_record)


def from_file(settings) -> prepare.Examples:
    """FILE: GSM8K's folder or a file of its form."""
    return prepare.Examples(records.load(settings.FILE), from_record)


if __name__ == "__main__":
    prepare.main({"generate": generate, "gsm8k": from_hub, "file": from_file})
