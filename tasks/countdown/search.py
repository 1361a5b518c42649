"""Demonstrations that search, for three and four numbers: first steps are tried, dead ends are left, several styles.

    50-21=29: 99+29=128 yes            three numbers: a step, then all results of the two numbers that are left
    95+89=184: 46 95 184               four numbers: a step, the numbers that are left, and the search among these
     95-46=49: 184+49=233 184-49=135

After Stream of Search (Gandhi et al. 2024), which trains on such texts. Values stay natural and below LARGEST.
"""

import itertools
import random
from collections.abc import Iterator

LARGEST = 1999
WRONG = 2  # first steps of four numbers that lead nowhere, at most

Term = tuple[int, str]  # a value, and the expression that it came from


def results(a: Term, b: Term) -> Iterator[tuple[Term, str]]:
    """Every result of one operation on two terms, with the worked step, e.g. ``((8, "(5+3)"), "5+3=8")``."""
    (x, x_text), (y, y_text) = sorted((a, b), reverse=True)
    values = {"+": x + y, "-": x - y, "*": x * y if y > 1 else 0, "/": x // y if y > 1 and x % y == 0 else 0}
    for symbol, value in values.items():
        if 0 < value <= LARGEST:
            yield (value, f"({x_text}{symbol}{y_text})"), f"{x}{symbol}{y}={value}"


def steps(terms: list[Term]) -> Iterator[tuple[str, list[Term]]]:
    """Every step on two of ``terms``, with the terms that are left after it."""
    for i, j in itertools.combinations(range(len(terms)), 2):
        rest = [term for place, term in enumerate(terms) if place not in (i, j)]
        for term, step in results(terms[i], terms[j]):
            yield step, sorted([*rest, term])


def reaches(terms: list[Term], target: int) -> bool:
    """Whether some steps make ``target`` of all ``terms``."""
    if len(terms) == 1:
        return terms[0][0] == target
    return any(reaches(rest, target) for _, rest in steps(terms))


def searched(terms: list[Term], target: int, rng: random.Random, lines: list[str], indent: str = "") -> str | None:
    """Add the lines of a search to ``lines``; returns the expression found, or None.

    In half of the searches the order of the steps is by chance, in the others by how near the left numbers' sum is.
    """
    options = list(steps(terms))
    rng.shuffle(options)
    if rng.random() < 0.5:
        options.sort(key=lambda option: abs(sum(value for value, _ in option[1]) - target))
    wrong = rng.randint(0, WRONG)
    for step, rest in options:
        if len(rest) > 2:
            if not (good := reaches(rest, target)) and (wrong := wrong - 1) < 0:
                continue
            lines.append(f"{indent}{step}: {' '.join(str(value) for value, _ in rest)}")
            found = searched(rest, target, rng, lines, f"{indent} ")
            assert good == (found is not None)
        else:
            last = list(results(*rest))
            found = next((text for (value, text), _ in last if value == target), None)
            shown = [worked for (value, _), worked in last if found is None or value == target][: 1 if found else None]
            lines.append(f"{indent}{step}: {' '.join(shown)}{' yes' if found else ''}")
        if found:
            return found
    return None


def demonstration(numbers: list[int], target: int) -> str | None:
    """A search that ends with the answer; None where the target needs a negative, broken or larger value."""
    terms: list[Term] = sorted((number, str(number)) for number in numbers)
    lines: list[str] = []
    found = searched(terms, target, random.Random(f"{numbers} {target}"), lines)
    text = "\n".join(lines)
    return f"<think>\n{text}\n</think>\n<answer>{found[1:-1]}</answer>" if found else None
