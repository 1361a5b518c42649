"""tasks/countdown/prepare_data.py: the solver against an exhaustive one, and the problems that it makes."""

import random
import re
from fractions import Fraction
from functools import cache
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.countdown.prepare_data import COUNTS, combine, from_hub, from_record, generate, problems, solve
from tasks.countdown.reward import compute_score
from verl_tasks import prepare


def score(answer, numbers, target):
    """1.0 for a right answer, thought or not."""
    truth = {"target": target, "numbers": numbers}
    return compute_score("countdown", f"<answer>{answer}</answer>", truth)["acc"]


@cache
def reachable(numbers):
    """Every value of an expression over all ``numbers``: by splitting them in two in every way."""
    if len(numbers) == 1:
        return {Fraction(numbers[0])}
    values = set()
    for mask in range(1, 2 ** len(numbers) - 1):
        left = tuple(n for i, n in enumerate(numbers) if mask >> i & 1)
        right = tuple(n for i, n in enumerate(numbers) if not mask >> i & 1)
        for x in reachable(left):
            for y in reachable(right):
                values |= {x + y, x - y, x * y} | ({x / y} if y else set())
    return values


def exact(text):
    """The value of arithmetic as it is written, in exact fractions."""
    assert re.fullmatch(r"[0-9+\-*/() ]+", text)
    return eval(re.sub(r"\d+", r"Fraction(\g<0>)", text), {"Fraction": Fraction})


def assert_worked(numbers, target, steps):
    """Each step takes two terms at hand and puts their result in their place, in natural numbers; the last is left."""
    terms = list(numbers)
    for step in steps:
        x, symbol, y, result = re.fullmatch(r"(\d+)([-+*/])(\d+)=(\d+)", step).groups()
        assert exact(f"{x}{symbol}{y}") == int(result)
        terms.remove(int(x))
        terms.remove(int(y))
        terms.append(int(result))
    assert terms == [target]


def assert_searched(numbers, target, lines):
    """Each line of a search takes two numbers at hand, and is right; only the last one finds the target."""
    at_hand = {0: sorted(numbers)}
    for line in lines:
        depth = len(line) - len(line.lstrip())
        step, _, after = line.strip().partition(":")
        left = list(at_hand[depth])
        x, symbol, y, result = re.fullmatch(r"(\d+)([-+*/])(\d+)=(\d+)", step).groups()
        assert exact(f"{x}{symbol}{y}") == int(result)
        left.remove(int(x))
        left.remove(int(y))
        left = sorted([*left, int(result)])
        if "=" not in after:
            assert after.split() == [str(number) for number in left]
            at_hand[depth + 1] = left
            continue
        for each in after.removesuffix(" yes").split():
            x, symbol, y, result = re.fullmatch(r"(\d+)([-+*/])(\d+)=(\d+)", each).groups()
            assert exact(f"{x}{symbol}{y}") == int(result) and sorted([int(x), int(y)]) == left
        found = int(after.removesuffix(" yes").rpartition("=")[2]) == target
        assert after.endswith(" yes") == found == (line == lines[-1])


# ---- combine and solve


@pytest.mark.parametrize(
    "a, b, expected",
    [
        (3, 5, {"3+5=8", "3-5=-2", "5-3=2", "3*5=15", "3/5=3/5", "5/3=5/3"}),
        (4, 4, {"4+4=8", "4-4=0", "4*4=16", "4/4=1"}),
        (0, 5, {"0+5=5", "0-5=-5", "5-0=5", "0*5=0", "0/5=0"}),
        (0, 0, {"0+0=0", "0-0=0", "0*0=0"}),
    ],
)
def test_combine_gives_every_result_of_one_operation(a, b, expected):
    found = list(combine((Fraction(a), str(a)), (Fraction(b), str(b))))
    assert {step for _, step in found} == expected
    for (value, text), step in found:
        assert exact(text) == value == Fraction(step.partition("=")[2])


def test_combine_keeps_the_expressions_of_its_terms():
    found = list(combine((Fraction(8), "(3+5)"), (Fraction(2), "2")))
    assert ((Fraction(4), "((3+5)/2)"), "8/2=4") in found
    assert all(exact(text) == value for (value, text), _ in found)


@settings(max_examples=100, database=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=3), st.integers(-10, 60))
def test_solve_agrees_with_the_exhaustive_search(numbers, target):
    solution = solve(numbers, target)
    assert (solution is not None) == (target in reachable(tuple(numbers)))
    if solution:
        expression, steps = solution
        assert score(expression, numbers, target) == 1.0
        assert len(steps) == len(numbers) - 1


@settings(max_examples=20, database=None)
@given(st.lists(st.integers(1, 10), min_size=4, max_size=4), st.integers(1, 999))
def test_solve_agrees_with_the_exhaustive_search_of_four_numbers(numbers, target):
    solution = solve(numbers, target)
    assert (solution is not None) == (target in reachable(tuple(numbers)))
    assert solution is None or score(solution[0], numbers, target) == 1.0


@pytest.mark.parametrize(
    "numbers, target, solvable",
    [
        ([5], 5, True),
        ([5], 6, False),
        ([2, 3], 4, False),
        ([2, 3], 6, True),
        ([1, 3], -2, True),
        ([1, 1, 1, 1], 24, False),
        ([3, 3, 8, 8], 24, True),
        ([1, 5, 5, 5], 24, True),
        ([97, 89, 83, 79], 998, False),
    ],
)
def test_solve_of_known_problems(numbers, target, solvable):
    solution = solve(numbers, target)
    assert (solution is not None) == solvable
    assert not solvable or exact(solution[0]) == target


@pytest.mark.parametrize("numbers, target", [([3, 3, 8, 8], 24), ([1, 5, 5, 5], 24), ([1, 3], -2), ([2, 6, 8], -4)])
def test_steps_with_fractions_and_negative_numbers_are_true_as_written(numbers, target):
    _, steps = solve(numbers, target)
    for step in steps:
        left, _, right = step.partition("=")
        assert exact(left) == exact(right), step


# ---- problems and examples


@pytest.mark.parametrize("difficulty", COUNTS)
def test_problems_are_solvable_and_within_bounds(difficulty):
    found = list(islice(problems(random.Random(1), difficulty), 200))
    assert {len(problem["numbers"]) for problem in found} == set(COUNTS[difficulty])
    for problem in found:
        numbers, target = problem["numbers"], problem["target"]
        assert all(type(n) is int and 1 <= n <= 99 for n in numbers)
        assert type(target) is int and 1 <= target <= 999
        expression, steps = solve(numbers, target)
        assert score(expression, numbers, target) == 1.0
        assert_worked(numbers, target, steps)
    for problem in found[:40]:
        assert problem["target"] in reachable(tuple(problem["numbers"]))


@pytest.mark.parametrize("difficulty", COUNTS)
def test_problems_depend_on_the_seed_alone(difficulty):
    first, again, other = (list(islice(problems(random.Random(s), difficulty), 50)) for s in (7, 7, 8))
    assert first == again
    assert first != other


@pytest.mark.parametrize("difficulty", COUNTS)
def test_generated_examples(difficulty):
    source = SimpleNamespace(SEED=3, DIFFICULTY=difficulty)
    examples = list(islice(prepare.distinct(generate(source)), 300))
    assert examples == list(islice(prepare.distinct(generate(source)), 300))
    seen = {(tuple(sorted(e.ground_truth["numbers"])), e.ground_truth["target"]) for e in examples}
    assert len(seen) == 300  # the same problem is the same prompt: train and test stay disjoint
    for example in examples:
        numbers, target = example.ground_truth["numbers"], example.ground_truth["target"]
        assert sorted(map(int, re.findall(r"\d+", example.prompt))) == sorted([*numbers, target])
        assert "<answer></answer>" in example.system
        assert compute_score("countdown", example.demonstration, example.ground_truth)["score"] == 1.0
        thinking = re.match(r"<think>(.*)</think>", example.demonstration, re.S).group(1)
        if "\n" in thinking:
            assert_searched(numbers, target, thinking.strip("\n").split("\n"))
        else:
            assert_worked(numbers, target, thinking.split(", "))
    searches = [example for example in examples if example.demonstration.startswith("<think>\n")]
    assert len(searches) == 0 if difficulty == "easy" else len(searches) > 280
    if difficulty == "hard":  # dead ends are in many, and the order of the steps is not always the same
        assert 50 < sum(example.demonstration.count("\n") > 5 for example in searches) < 250


# ---- a local folder in the form of the public set


def write_hub_folder(folder, rows):
    folder.mkdir()
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    return SimpleNamespace(SOURCE=str(folder), SEED=1)


@pytest.fixture
def datasets_here(tmp_path, monkeypatch):
    """The datasets library with its cache in a temporary folder, and without its pause of 5 s after each stream."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "SLEEP_TIME_ON_THREADS_SHUTDOWN", 0)


def test_examples_from_a_local_folder(tmp_path, datasets_here, capsys):
    rows = [{"target": 10 + n, "nums": [4, 6, n]} for n in range(1, 21)] + [{"target": 4, "nums": [2, 3, 99]}]
    source = write_hub_folder(tmp_path / "set", rows)
    *examples, unsolvable = from_hub(source)
    assert unsolvable is None  # it can never score 1; None is counted as unusable
    reason = "no expression over all numbers gives the target"
    assert capsys.readouterr().out == f"  cannot be used: {tmp_path}/set: row 20: {reason}\n"
    assert [*examples, None] == list(from_hub(source))
    assert sorted(e.ground_truth["target"] for e in examples) == sorted(row["target"] for row in rows[:-1])
    for example in examples:
        assert str(example.ground_truth["target"]) in example.prompt
        assert compute_score("countdown", example.demonstration, example.ground_truth)["score"] == 1.0


def test_target_that_is_infinite_is_no_traceback(tmp_path, datasets_here, capsys):
    source = write_hub_folder(tmp_path / "set", [{"target": 7.0, "nums": [3, 4]}, {"target": np.inf, "nums": [3, 4]}])
    example, infinite = from_hub(source)
    assert (example.ground_truth, infinite) == ({"target": 7, "numbers": [3, 4]}, None)
    assert capsys.readouterr().out == f"  cannot be used: {tmp_path}/set: row 1: `target` must be a whole number\n"


@pytest.mark.parametrize("nums", [[4, 3], (3, 4), ["3", 4.0], np.array([3, 4]), np.array([3.0, 4.0]), ["4", "3"]])
@pytest.mark.parametrize("target", [7, 7.0, "7", np.int64(7), np.float64(7)])
def test_whole_numbers_are_taken_in_every_form(nums, target):
    (example,) = from_record({"nums": nums, "target": target})
    assert example.ground_truth == {"target": 7, "numbers": [3, 4]}
    assert {type(n) for n in (example.ground_truth["target"], *example.ground_truth["numbers"])} == {int}


NUMBERS, TARGET = "`nums` must be a list of whole numbers", "`target` must be a whole number"


@pytest.mark.parametrize(
    "row, reason",
    [
        ({"nums": [1.5, 2], "target": 3}, NUMBERS),
        ({"nums": [-1, 2], "target": 1}, NUMBERS),
        ({"nums": "12", "target": 3}, NUMBERS),
        ({"nums": 3, "target": 3}, NUMBERS),
        ({"nums": None, "target": 3}, NUMBERS),
        ({"nums": {"1": 2}, "target": 1}, NUMBERS),
        ({"nums": [True, 2], "target": 3}, NUMBERS),
        ({"nums": [None, 2], "target": 3}, NUMBERS),
        ({"nums": [[1], 2], "target": 3}, NUMBERS),
        ({"nums": ["1.0", 2], "target": 3}, NUMBERS),
        ({"nums": ["²", 2], "target": 4}, NUMBERS),
        ({"nums": ["9" * 5000, 2], "target": 4}, NUMBERS),
        ({"nums": np.array([1.5, 2]), "target": 3}, NUMBERS),
        ({"nums": np.array([[1, 2]]), "target": 3}, NUMBERS),
        ({"nums": [3, 4], "target": 7.9}, TARGET),
        ({"nums": [3, 4], "target": float("inf")}, TARGET),
        ({"nums": [3, 4], "target": float("nan")}, TARGET),
        ({"nums": [3, 1], "target": True}, TARGET),
        ({"nums": [3, 4], "target": "seven"}, TARGET),
        ({"nums": [1, 2], "target": 1000}, "no expression over all numbers gives the target"),
        ({"nums": [], "target": 0}, "0 numbers; the solver takes 2 to 5"),
        ({"nums": [1, 2, 3, 4, 5, 6], "target": 21}, "6 numbers; the solver takes 2 to 5"),
        ({"nums": [7], "target": 7}, "1 numbers; the solver takes 2 to 5"),
    ],
)
def test_row_that_cannot_be_used_says_why(row, reason):
    assert from_record(row) == [reason]


@pytest.mark.parametrize("row", [{"target": 7, "numbers": [3, 4]}, {"nums": [3, 4]}])
def test_folder_of_another_form_is_refused_in_one_line(tmp_path, datasets_here, row):
    source = write_hub_folder(tmp_path / "set", [row])
    with pytest.raises(prepare.DataError) as error:
        list(from_hub(source))
    message = str(error.value)
    assert str(tmp_path / "set") in message and "row 0" in message and "nums" in message
    assert "\n" not in message
