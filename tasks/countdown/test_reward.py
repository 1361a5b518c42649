"""Tests of this task; `make test` runs them."""

import json
import random
import re
import statistics
import time
from fractions import Fraction
from itertools import islice, permutations, product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.countdown import evaluate as evaluation
from tasks.countdown.prepare_data import problems
from tasks.countdown.reward import compute_score
from verl_tasks import answers, check_examples, last_answer

TRUTH = {"target": 11, "numbers": [3, 4, 5]}


def test_examples_get_the_scores_that_they_state():
    assert check_examples(Path(__file__).parent, compute_score) > 0


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("<think>5*3=15</think><answer>(5*3)-4</answer>", 1.0),
        ("<think>5*4=20, 5−3=2</think><answer>5×3−4 = 11</answer>", 1.0),
        ("<answer>5*3-4</answer>", 0.0),  # right, a guess all the same
        ("<think>so</think><answer>5*3-4</answer>", 0.0),
        ("<think>1+1=2</think><answer>5*3-4</answer>", 0.0),  # a calculation of other numbers
        ("<think>3*3=9</think><answer>5*3-4</answer>", 0.0),  # 3 is given once
        ("<think>1+1=2, 5*3=15</think><answer>5*3-4</answer>", 1.0),
        ("<answer>3+4+5</answer>", 0.0),  # a guess
        ("<think>3+4=7, 7+5=12</think><answer>3+4+5</answer>", 0.0),
        ("<think>3+4=7, 7+5=12</think><answer>3+4</answer>", 0.0),  # not the given numbers
        ("<think>hm</think><answer>3+4+5</answer>", 0.0),
        ("<think>3+4+5=11</think><answer>3+4+5</answer>", 0.0),  # no such calculation
        ("<think>12=12</think><answer>3+4+5</answer>", 0.0),
        ("<think>(5-3)/4=1/2</think><answer>3+4+5</answer>", 0.0),
        ("3+4+5=12 <answer>3+4+5</answer>", 0.0),  # outside of a thought
        ("<think>5*3=15</think><answer>5*3-4</answer><answer>3+4+5</answer>", 0.0),  # the last answer counts
        ("<think><answer>5*3-4</answer></think>", 0.0),  # thinking is no answer
        ("5*3-4", 0.0),
        ("", 0.0),
    ],
)
def test_score(response, score):
    assert compute_score("countdown", response, TRUTH)["score"] == score


@pytest.mark.parametrize("kind", [str, float, lambda number: f" {number}"])
def test_numbers_of_an_own_file_may_be_texts_or_floats(kind):
    truth = {"target": kind(11), "numbers": [kind(number) for number in TRUTH["numbers"]]}
    thought = "<think>5*3=15</think>"
    for stored in (truth, json.dumps(truth)):
        assert compute_score("countdown", f"{thought}<answer>5*3-4</answer>", stored)["score"] == 1.0
        assert compute_score("countdown", f"{thought}<answer>3+4+5</answer>", stored)["score"] == 0.0
    for target in ("eleven", "1e20000000", "9" * 5000):  # the second would take 19 s as a fraction
        with pytest.raises(answers.RewardError, match="compute_score raised ValueError"):
            compute_score("countdown", f"{thought}<answer>5*3-4</answer>", TRUTH | {"target": target})


def test_a_guess_earns_nothing():
    """A policy that writes the numbers with any signs; now and then it is right."""
    rng, right = random.Random(0), 0.0
    for problem in islice(problems(rng, "hard"), 200):
        guess = "".join(f"{rng.choice('+-*')}{n}" for n in problem["numbers"])[1:]
        found = compute_score("countdown", f"<answer>{guess}</answer>", problem)
        assert found["score"] == 0.0 and found["numbers"] == 1.0
        right += found["acc"]
    assert right > 0


def test_a_long_thought_is_read_at_once():
    started = time.perf_counter()
    for part in ("(", "1+", "1 ", "((1+1)", "1=", "9-" * 30 + "="):
        thinking = part * (1_000_000 // len(part))
        assert compute_score("countdown", f"<think>{thinking}</think><answer>3+4+5</answer>", TRUTH)["score"] == 0.0
    assert time.perf_counter() - started < 1


SIGNS = ["（3+4）", "３＋４", "$3+4$", "`3+4`", r"\(3+4\)", "3\u200b+4", "3 ﹢ 4", "$$3+4$$", "3＋4＝7"]


@pytest.mark.parametrize("answer", SIGNS)
def test_a_sum_in_signs_of_other_scripts_is_right(answer):
    assert compute_score("countdown", f"<answer>{answer}</answer>", {"target": 7, "numbers": [3, 4]})["acc"] == 1.0


@pytest.mark.parametrize(
    "answer, target",
    [("3⋅6", 18), ("3×6", 18), (r"$3 \times 6$", 18), ("6－3", 3), ("6−3", 3), ("6／3", 2), (r"6\div 3", 2)],
)
def test_other_signs_are_read_as_numbers_are(answer, target):
    assert compute_score("countdown", f"<answer>{answer}</answer>", {"target": target, "numbers": [3, 6]})["acc"] == 1.0


@pytest.mark.parametrize("answer", ["3**6", "6//3", "`3`+`6`", "3 6", "3²+6", "٣+6"])
def test_what_is_no_arithmetic_stays_none(answer):
    assert compute_score("countdown", f"<answer>{answer}</answer>", {"target": 9, "numbers": [3, 6]})["format"] == 0.0


# ---- what the reward reads of an answer, against an evaluator and an exhaustive solver of our own


SCORES = {0.0, 0.1, 0.3, 1.0}
SPELLINGS = {"+": "+", "-": "-−", "*": "*×", "/": "/÷"}
quick = settings(max_examples=200, database=None)


def score(answer, numbers, target, wrap="<answer>{}</answer>"):
    """``score`` is how far it got: 1.0 correct, 0.3 the given numbers, 0.1 an expression."""
    found = compute_score("countdown", wrap.replace("{}", answer), {"target": target, "numbers": numbers})
    return found | {"score": 1.0 if found["acc"] else 0.3 if found["numbers"] else 0.1 * found["format"]}


# ---- an evaluator of our own: expression trees, rendered to text, and a parser by recursive descent


def apply(symbol, x, y):
    """The exact value, None where an operand is None or the divisor is 0."""
    if x is None or y is None or (symbol == "/" and y == 0):
        return None
    return {"+": lambda: x + y, "-": lambda: x - y, "*": lambda: x * y, "/": lambda: x / y}[symbol]()


def value_of(tree):
    return Fraction(tree) if isinstance(tree, int) else apply(tree[0], value_of(tree[1]), value_of(tree[2]))


def leaves(tree):
    return [tree] if isinstance(tree, int) else leaves(tree[1]) + leaves(tree[2])


def precedence(tree):
    return 3 if isinstance(tree, int) else 2 if tree[0] in "*/" else 1


def render(tree, rng):
    """The tree as text, with random spaces, spellings of the operators and superfluous parentheses."""
    if isinstance(tree, int):
        text = str(tree)
    else:
        symbol, left, right = tree
        left_text, right_text = render(left, rng), render(right, rng)
        if precedence(left) < precedence(tree):
            left_text = f"({left_text})"
        if precedence(right) <= precedence(tree):
            right_text = f"({right_text})"
        space = " " * rng.randint(0, 1)
        text = f"{left_text}{space}{rng.choice(SPELLINGS[symbol])}{' ' * rng.randint(0, 1)}{right_text}"
    return f"({text})" if rng.random() < 0.1 else text


def evaluate(text):
    """(value, numbers) of an infix expression of numbers with at most 9 digits; None if it is none, or divides by 0."""
    for symbol, spelling in SPELLINGS.items():
        text = re.sub(f"[{re.escape(spelling)}]", symbol, text)
    tokens = re.findall(r"\d+|[-+*/()]|[^\s]", text)
    numbers = []

    def chain(symbols, operand):
        result = operand()
        while tokens and tokens[0] in symbols:
            result = apply(tokens.pop(0), result, operand())
        return result

    def factor():
        token = tokens.pop(0)
        if token == "(":
            result = chain("+-", lambda: chain("*/", factor))
            if tokens.pop(0) != ")":
                raise IndexError
            return result
        if not re.fullmatch(r"[1-9][0-9]{0,8}", token):
            raise IndexError
        numbers.append(int(token))
        return Fraction(int(token))

    try:
        result = chain("+-", lambda: chain("*/", factor))
    except IndexError:
        return None
    return None if tokens or result is None else (result, numbers)


trees = st.recursive(st.integers(1, 99), lambda part: st.tuples(st.sampled_from("+-*/"), part, part), max_leaves=6)


@quick
@given(trees, st.randoms(use_true_random=False))
def test_every_expression_is_scored_by_its_exact_value(tree, rng):
    text, value, numbers = render(tree, rng), value_of(tree), leaves(tree)
    given_numbers = rng.sample(numbers, len(numbers))
    if value is None:
        assert score(text, given_numbers, 1)["score"] == 0.0
        return
    target = int(value) if value.denominator == 1 else 0
    assert score(text, given_numbers, target)["score"] == (1.0 if value == target else 0.3)
    assert score(f"{text} = {target}", given_numbers, target)["score"] == (1.0 if value == target else 0.3)
    assert score(text, given_numbers, target + 1)["score"] == 0.3
    assert score(text, [*given_numbers, 7], target)["score"] == 0.1
    assert score(text, given_numbers[1:], target)["score"] == 0.1


@quick
@given(trees, st.randoms(use_true_random=False), st.text("0123456789+-*/()−×÷ x.,_=\0٣", max_size=3))
def test_damaged_expression_is_scored_like_our_evaluator(tree, rng, noise):
    text = render(tree, rng)
    start = rng.randint(0, len(text))
    text = text[:start] + noise + text[start + rng.randint(0, 2) :]
    result = score(text, leaves(tree), 24)["score"]
    expected = evaluate(text)
    if "=" in text or re.search(r"\b0", text):  # left to the tests below
        assert result in SCORES
    elif expected is None:
        assert result == 0.0
    elif sorted(expected[1]) != sorted(leaves(tree)):
        assert result == 0.1
    else:
        assert result == (1.0 if expected[0] == 24 else 0.3)


@quick
@given(st.text(max_size=300), st.sampled_from(["{}", "<answer>{}</answer>", "<think></think><answer>{}</answer>x"]))
def test_any_text_has_a_score(text, wrap):
    result = score(text, [1, 5, 4], 24, wrap)
    assert result["score"] in SCORES
    assert result["score"] < 1.0 or evaluate(re.sub("=.*", "", text.strip())) == (24, [1, 5, 4])


def every_expression(numbers):
    """(value, text) of every expression over three numbers, from both tree shapes."""
    for (a, b, c), p, q in product(permutations(numbers), "+-*/", "+-*/"):
        yield value_of((q, (p, a, b), c)), f"({a}{p}{b}){q}{c}"
        yield value_of((p, a, (q, b, c))), f"{a}{p}({b}{q}{c})"


@pytest.mark.parametrize("numbers", [[1, 5, 4], [2, 2, 8], [3, 7, 10]])
def test_every_expression_of_three_numbers(numbers):
    expressions = list(every_expression(numbers))
    assert len(expressions) == 192
    for value, text in expressions:
        integer = value is not None and value.denominator == 1
        expected = 0.0 if value is None else 1.0 if integer else 0.3
        assert score(text, numbers, int(value) if integer else 0)["score"] == expected, text


# ---- what is in the answer, and around it


@pytest.mark.parametrize(
    "answer, expected",
    [
        ("5*4+1", (0.3, 0, 1, 1)),
        ("(5+1)*4", (1.0, 1, 1, 1)),
        ("4 × (5 + 1)", (1.0, 1, 1, 1)),
        ("4*(5+1) = 24", (1.0, 1, 1, 1)),
        ("4*(5+1)=24", (1.0, 1, 1, 1)),
        ("5*4", (0.1, 0, 1, 0)),
        ("5*4+1+1", (0.1, 0, 1, 0)),
        ("6*4", (0.1, 0, 1, 0)),
        ("24", (0.1, 0, 1, 0)),
        ("54-1", (0.1, 0, 1, 0)),
        ("5/(4-4)", (0.0, 0, 0, 0)),
        ("4*(5+1", (0.0, 0, 0, 0)),
        ("4*(5+1) = 24 = 24", (0.0, 0, 0, 0)),
        ("4*(5+1) = the target", (0.0, 0, 0, 0)),
        ("= 24", (0.0, 0, 0, 0)),
        ("4 5 1", (0.0, 0, 0, 0)),
        ("", (0.0, 0, 0, 0)),
    ],
)
def test_what_is_read_of_an_answer(answer, expected):
    result = score(answer, [1, 5, 4], 24)
    assert (result["score"], result["acc"], result["format"], result["numbers"]) == expected
    assert {type(value) for value in result.values()} == {float}


def test_division_is_exact():
    assert score("8/(3-8/3)", [3, 3, 8, 8], 24)["score"] == 1.0
    assert score("1/3*3", [1, 3, 3], 1)["score"] == 1.0
    assert score("999999999*999999999-1", [999999999, 999999999, 1], 999999998000000000)["score"] == 1.0
    assert score("999999999*999999999-1", [999999999, 999999999, 1], 999999998000000001)["score"] == 0.3


@pytest.mark.parametrize(
    "response, expected",
    [
        ("<think>4*5</think><answer>4*(5+1)</answer>", 1.0),
        ("<answer>5</answer> or <answer>4*(5+1)</answer>", 1.0),
        ("<answer>4*(5+1)</answer> or <answer>5</answer>", 0.1),
        ("<think><answer>4*(5+1)</answer></think>", 0.0),
        ("<think><answer>4*(5+1)</answer></think><answer>5</answer>", 0.1),
        ("<answer>\n4*(5\n+1)\n</answer>", 1.0),
        ("<answer>4*(5+1)", 0.0),
        ("4*(5+1)", 0.0),
    ],
)
def test_place_of_the_answer(response, expected):
    assert score("", [1, 5, 4], 24, response)["score"] == expected


@pytest.mark.parametrize(
    "truth", [{"target": 24, "numbers": [1, 5, 4]}, {"numbers": [4, 5, 1], "target": 24, "x": None}]
)
def test_ground_truth_as_object_or_json_text(truth):
    response = "<think>5+1=6</think><answer>4*(5+1)</answer>"
    results = [compute_score("countdown", response, t) for t in (truth, json.dumps(truth))]
    assert results[0] == results[1]
    assert results[0]["score"] == 1.0


def test_same_keys_for_every_row():
    responses = ["", "<answer>x</answer>", "<answer>5</answer>", "<answer>5*4+1</answer>", "<answer>4*(5+1)</answer>"]
    results = [score("", [1, 5, 4], 24, response) for response in responses]
    assert sorted(result["score"] for result in results) == [0.0, 0.0, 0.1, 0.3, 1.0]
    assert {tuple(result) for result in results} == {("score", "acc", "format", "numbers", "thinking")}


# ---- hostile answers: no exception, no reward, no time

HOSTILE = {
    "power": "2**3",
    "floor division": "7//2",
    "decimal": "1.5*4",
    "glued digits": "154",
    "glued digits of a product": "15*4",
    "underscore in a number": "1_5*4",
    "exponent": "1e5*4",
    "hexadecimal": "0x5*4*1",
    "complex": "5j*4*1",
    "leading zero": "05*4*1",
    "unary": "--4*5*1",
    "bits": "4<<5|1",
    "modulo": "5%4*1",
    "comparison": "4*(5+1)==24",
    "assignment expression": "(x:=4*(5+1))",
    "name": "target",
    "dunder": "().__class__.__bases__[0]",
    "call": "__import__('os').system('echo')",
    "call of a number": "5(4)(1)",
    "call of sum": "sum([1,5,4])",
    "tuple": "1,5,4",
    "text": "'1'*5*4",
    "f-string": "f'{24}'",
    "lambda": "lambda: 24",
    "conditional": "4*5 if 1 else 24",
    "tower": "9**9**9",
    "tower in parentheses": "(9**9)**(9**9)",
    "unicode digits": "٤*(٥+١)",
    "superscript": "4²+5+1",
    "fraction character": "½*4",
    "null byte": "4*(5+1)\0",
    "only a null byte": "\0",
    "surrogate": "4*(5+1)\ud800",
    "right-to-left mark": "\u202e4*(5+1)",
    "comment": "4*(5+1) # 24",
    "two expressions": "4*(5+1);4*(5+1)",
    "long sum": "1+" * 4999 + "1",
    "10,000 digits": "9" * 10_000,
    "10,000 spaces": "4*(5+1)" + " " * 10_000 + "*1",
    "10,000 parentheses": "(" * 5000 + "1" + ")" * 5000,
    "10,000 open parentheses": "(" * 10_000,
    "10,000 letters": "a" * 10_000,
    "10,000 equals signs": "=" * 10_000,
    "deep nesting": "(" * 99 + "1" + ")" * 99,
    "open parentheses": "(" * 200,
    "nested calls": "1(" * 100,
    "nested sums, not closed": "(1+" * 66,
    "many operators": "*" * 200,
    "many minus signs": "-" * 199 + "1",
    "large product": "999999999*" * 19 + "1",
    "large quotient": "999999999/" * 19 + "1",
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("answer", HOSTILE.values(), ids=HOSTILE)
def test_hostile_answer(answer):
    times = []
    for _ in range(15):
        start = time.perf_counter()
        result = score(answer, [1, 5, 4], 24)
        times.append(time.perf_counter() - start)
        assert result["score"] <= 0.1
        assert result["acc"] == 0.0
    assert statistics.median(times) < 1e-3


@pytest.mark.parametrize(
    "answer, numbers, target",
    [
        ("2**3", [2, 3], 8),
        ("7//2", [7, 2], 3),
        ("7/÷2", [7, 2], 3),
        ("7%2", [7, 2], 1),
        ("4|1", [4, 1], 5),
        ("1.5*4", [1, 5, 4], 6),
        ("1.5*4", [1.5, 4], 6),
        ("5.0-1", [5, 1], 4),
        ("5e0-1", [5, 1], 4),
        ("05-01", [5, 1], 4),
        ("٥-١", [5, 1], 4),
        ("5(1)", [5, 1], 5),
        ("(5,1)[0]", [5, 1], 5),
        ("abs(1-5)", [5, 1], 4),
        ("True*5", [1, 5], 5),
        ("5-1#", [5, 1], 4),
    ],
)
def test_other_arithmetic_is_not_well_formed_even_where_its_value_is_right(answer, numbers, target):
    assert score(answer, numbers, target)["score"] == 0.0


@pytest.mark.parametrize(
    "answer, numbers", [("15*4", [1, 5, 4]), ("154", [1, 5, 4]), ("51-4", [5, 1, 4]), ("5 14", [5, 14])]
)
def test_digits_are_not_glued_together(answer, numbers):
    target = evaluate(answer)[0] if evaluate(answer) else 514
    assert score(answer, numbers, int(target))["score"] <= 0.1


HUGE = {
    "letters": "a",
    "null bytes": "\0",
    "digits": "1",
    "open tags": "<answer>",
    "close tags": "</answer>",
    "half tags": "<answer",
    "angle brackets": "<",
    "ends of thinking": "</think>",
    "pairs of tags": "<answer></answer>",
    "answers": "<answer>1</answer>",
    "tags and thinking": "<answer></think>",
    "right answers, then thinking": "<answer>4*(5+1)</answer></think>",
}


@pytest.mark.parametrize("part", HUGE.values(), ids=HUGE)
@pytest.mark.parametrize(
    "wrap", ["{}", "<answer>{}</answer>", "<answer>{}"], ids=["bare", "in an answer", "not closed"]
)
def test_huge_response(part, wrap):
    text = part * (1_000_000 // len(part))
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        result = score(text, [1, 5, 4], 24, wrap)
        best = min(best, time.perf_counter() - start)
        if best > 1:  # far too slow: do not measure it again
            break
    assert result["score"] <= 0.1
    assert best < 0.1


def test_right_answer_after_a_megabyte_of_thinking():
    rng = random.Random(0)
    thinking = "".join(rng.choice("0123456789 +-*/()\n") for _ in range(1000)) * 1000
    assert score("4*(5+1)", [1, 5, 4], 24, f"<think>{thinking}</think><answer>{{}}</answer>")["score"] == 1.0


def test_own_metrics_read_a_completion_once(monkeypatch):
    """The bootstrap asks for each hundreds of times; to read a long search takes as long as many others."""
    read = []
    monkeypatch.setattr(evaluation, "last_answer", lambda response: read.append(response) or last_answer(response))
    texts = [
        "<answer>1 + 2</answer>",
        "<answer>3 * 4</answer>",
        "<answer>5 * 6 = 30</answer>",
        "<answer>7 + 8 * 9</answer>",
    ]
    texts += ["none", "<answer>what</answer>"]
    scored = [{"response": text, "reward": {"format": 1.0, "numbers": float(i < 3)}} for i, text in enumerate(texts)]
    evaluation._operators.cache_clear()
    for _ in range(3):
        assert evaluation.metrics(scored) == {"one_operator": 0.5, "wrong_numbers": 0.5}
    assert sorted(read) == sorted(texts)
