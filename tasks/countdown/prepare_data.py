"""Countdown problems: reach a target with all the given numbers. Generated here, or the public set (SOURCE=hub)."""

import itertools
import random
from collections.abc import Iterator
from fractions import Fraction

import numpy as np

from tasks.countdown import search
from verl_tasks import expression, prepare, records

HUB_DATASET = "Jiayi-Pan/Countdown-Tasks-3to4"
COUNTS = {"easy": (2,), "hard": (3, 4)}  # DIFFICULTY: how many numbers
LARGEST_NUMBER, LARGEST_TARGET = 99, 999
MOST_NUMBERS = 5  # of a row of the public set: with five the solver takes up to a second, with six over a minute

SYSTEM = (
    "Make the target from the numbers with + - * / and parentheses, each number once. "
    "Think in <think></think>, answer in <answer></answer>."
)
# Of three or four numbers: without it a 1.5B does not search (README.md).
SEARCH = (
    " For example, numbers 4, 6, 25 and target 49:\n<think>25*4=100, too large. 25+4=29, 29+6=35, no. 25*6=150, no. "
    "4*6=24, 24+25=49, yes.</think>\n<answer>4*6+25</answer>"
)
PROMPT = "Numbers: {numbers}. Target: {target}."

Term = tuple[Fraction, str]


def combine(a: Term, b: Term) -> Iterator[tuple[Term, str]]:
    """Every result of one operation on two terms, with the worked step, e.g. ``((8, "(3+5)"), "3+5=8")``."""
    for (x, x_text), (y, y_text) in ((a, b), (b, a)):
        for symbol, value in (("+", x + y), ("-", x - y), ("*", x * y), ("/", x / y if y else None)):
            if value is None or (symbol in "+*" and (x, x_text) > (y, y_text)):
                continue  # + and * once, not in both orders
            yield (value, f"({x_text}{symbol}{y_text})"), f"{_text(x)}{symbol}{_text(y)}={value}"


def _text(value: Fraction) -> str:
    return str(value) if value.denominator == 1 and value >= 0 else f"({value})"


def solve(numbers: list[int], target: int) -> tuple[str, list[str]] | None:
    """An expression over all ``numbers`` that equals ``target``, and its steps; None if there is none.

    Exhaustive search over pairs; steps stay within the non-negative integers when such a solution exists.
    """
    terms: list[Term] = [(Fraction(n), str(n)) for n in numbers]
    for natural in (True, False):
        found = _search(terms, Fraction(target), [], natural)
        if found:
            return found
    return None


def _search(terms: list[Term], target: Fraction, steps: list[str], natural: bool) -> tuple[str, list[str]] | None:
    if len(terms) == 1:
        value, text = terms[0]
        return (text[1:-1] if text.startswith("(") else text, steps) if value == target else None
    for i, j in itertools.combinations(range(len(terms)), 2):
        rest = [term for k, term in enumerate(terms) if k not in (i, j)]
        for term, step in combine(terms[i], terms[j]):
            if natural and (term[0] < 0 or term[0].denominator != 1):
                continue
            if found := _search([*rest, term], target, [*steps, step], natural):
                return found
    return None


def problems(rng: random.Random, difficulty: str) -> Iterator[dict]:
    """An endless stream of solvable problems ``{numbers, target}``.

    Numbers are sorted, so that the same problem is the same prompt, which ``prepare`` takes only once.
    """
    while True:
        numbers = sorted(rng.randint(1, LARGEST_NUMBER) for _ in range(rng.choice(COUNTS[difficulty])))
        target = _random_target(rng, numbers)
        if 0 < target <= LARGEST_TARGET:
            yield {"numbers": numbers, "target": target}


def _random_target(rng: random.Random, numbers: list[int]) -> int:
    """Value of a random expression over all ``numbers``: solvable by construction, a natural number at each step."""
    terms = [(Fraction(n), str(n)) for n in numbers]
    while len(terms) > 1:
        a, b = (terms.pop(rng.randrange(len(terms))) for _ in range(2))
        natural = [term for term, _ in combine(a, b) if term[0] >= 0 and term[0].denominator == 1]
        terms.append(rng.choice(natural))
    return int(terms[0][0])


def example(numbers: list[int], target: int) -> prepare.Example:
    """The prompt, the ground truth, and a demonstration from our own solver: with three or four numbers a search."""
    demonstration = search.demonstration(numbers, target) if len(numbers) in (3, 4) else None
    if demonstration is None and (solution := solve(numbers, target)):
        expression, steps = solution
        demonstration = f"<think>{', '.join(steps)}</think>\n<answer>{expression}</answer>"
    prompt = PROMPT.format(numbers=", ".join(map(str, numbers)), target=target)
    key = f"{sorted(numbers)} {target}"
    system = SYSTEM + SEARCH if len(numbers) > 2 else SYSTEM
    return prepare.Example(prompt, {"target": target, "numbers": numbers}, demonstration, system, key=key)


def generate(settings) -> Iterator[prepare.Example]:
    """Problems made here (SOURCE=generate)."""
    return (example(**problem) for problem in problems(random.Random(settings.SEED), settings.DIFFICULTY))


def whole(value) -> int | None:
    """A number as the reward reads it, as an int; None where it is not whole, also for a bool."""
    try:
        number = expression.as_number(value)
        return int(number) if float(number).is_integer() and not isinstance(number, bool | np.bool_) else None
    except (TypeError, ValueError, OverflowError):
        return None


def from_record(record: dict) -> list[prepare.Example | str]:
    """The example of a row of the public set, or text that says why the row cannot be used. Raises DataError for a row
    without the columns."""
    if not record.keys() >= {"nums", "target"}:
        raise prepare.DataError("needs columns `nums` (integers) and `target` (integer)")
    nums, target = record["nums"], whole(record["target"])
    numbers = list(map(whole, nums)) if isinstance(nums, list | tuple | np.ndarray) else [None]
    if None in numbers or min(numbers, default=0) < 0:  # the reward takes no sign before a number
        return ["`nums` must be a list of whole numbers"]
    if target is None:
        return ["`target` must be a whole number"]
    if not 2 <= len(numbers) <= MOST_NUMBERS:  # one number leaves nothing to calculate, and a thought must
        return [f"{len(numbers)} numbers; the solver takes 2 to {MOST_NUMBERS}"]
    made = example(sorted(numbers), target)  # in any order it is the same problem, taken once
    return [made if made.demonstration else "no expression over all numbers gives the target"]


def from_hub(settings) -> prepare.Examples:
    """The public set, or a local folder of its form (columns ``nums``, ``target``)."""
    name = HUB_DATASET if settings.SOURCE == "hub" else settings.SOURCE
    return prepare.Examples([records.hub(name, None, "train")], from_record)


if __name__ == "__main__":
    prepare.main({"generate": generate, "hub": from_hub})
