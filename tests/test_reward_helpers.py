"""rewards/answers.py, expression.py, json_answer.py: finding the answer, the ground truth, true calculations; a broken
score; what is one JSON object, and what a schema says of it."""

import json
import math
import sys

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from verl_tasks.rewards import expression
from verl_tasks.rewards.answers import RewardError, after_thinking, last_answer, read_ground_truth, reward_function
from verl_tasks.rewards.json_answer import MAX_OBJECT_CHARS, read_object, schema_problem
from verl_tasks.strict_json import MAX_DEPTH, too_deep


@pytest.mark.parametrize(
    "response, expected",
    [
        ("<answer>1+2</answer>", "1+2"),
        ("<answer> \n 1+2\t</answer>", "1+2"),
        ("<ANSWER>1+2</Answer>", "1+2"),
        ("<answer>1</answer> no, <answer>2</answer> done", "2"),
        ("<think><answer>1</answer></think><answer>2</answer>", "2"),
        ("<think>a</think><answer>1</answer><think>b</think><answer>2</answer>", "2"),
        ("<think>never closed <answer>1</answer>", "1"),
        ("<answer>1</answer><answer></answer>", ""),
        ("x" * 1_000_000 + "<answer>1</answer>", "1"),
        ("<answer>1</answer></think> no answer after the thinking", None),
        ("<answer>1</answer><think>again</think>", None),
        ("<answer>1", None),
        ("</answer>1<answer>", None),
        ("", None),
    ],
)
def test_last_answer(response, expected):
    assert last_answer(response) == expected


@pytest.mark.parametrize("value", [{"target": 3, "numbers": [1, 2]}, [1, 2], 3, "text", None, 1.5])
def test_json_text_and_object_are_the_same_ground_truth(value):
    assert read_ground_truth(json.dumps(value)) == value == read_ground_truth(value)


@pytest.mark.parametrize("opened", [True, 1, False, None])
def test_a_reward_gets_the_thinking_that_the_prompt_opened(opened):
    @reward_function
    def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
        return {"score": after_thinking(solution_str) == "", "acc": solution_str.count("<think>")}

    assert compute_score("t", "a", "", {"think_opened": opened}) == {"score": bool(opened), "acc": bool(opened)}
    assert compute_score("t", "a", "") == {"score": 0.0, "acc": 0.0}


@pytest.mark.parametrize(
    "response, answer",
    [
        ("<think>" + "x" * 200_000 + "#### 18", ""),
        ("<think>a</think>b", "b"),
        ("a</think>b<THINK>c", "b"),
        ("</think>" + "x" * 100_000 + "end", "x" * 99_997 + "end"),
    ],
)
def test_after_thinking(response, answer):
    assert after_thinking(response) == answer


def scorer(result):
    """A checked reward function that returns ``result``, or raises it if it is an exception."""

    @reward_function
    def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
        if isinstance(result, Exception):
            raise result
        return result

    return compute_score


@pytest.mark.parametrize(
    "result, reason",
    [
        (ZeroDivisionError("division by zero"), "ZeroDivisionError: division by zero"),
        (ValueError("first line\nsecond line"), "first line"),
        (RecursionError(), "RecursionError"),
        ({"score": math.nan, "acc": 0.0}, "score is nan"),
        ({"score": 1.0, "acc": -math.inf}, "acc is -inf"),
        ({"score": 0.5, "acc": 0.5}, "acc is 0.5, not 1 (right) or 0"),  # pass@1 would count it as right
        ({"score": 1.0, "acc": 1.0, "length": math.nan}, "length is nan"),
        ({"score": 1.0, "acc": None}, "acc is None"),
        ({"score": "1.0", "acc": 1.0}, "score is '1.0'"),
        ({"score": 1.0, "acc": 1.0, "note": "two\nlines"}, "note is"),
        ({"score": 10**400, "acc": 1.0}, "score"),
        ({"score": 1.0}, "`acc`"),
        ({"acc": 1.0}, "`score`"),
        ({"score": 1.0, "acc": 1.0, "output": 1.0}, "verl itself writes `output`; give this key"),
        ({"score": 1.0, "acc": 1.0, "reward": 1.0}, "verl itself writes `reward`"),
        (1.0, "must return a dict"),
        ([("score", 1.0), ("acc", 1.0)], "must return a dict"),
    ],
)
def test_broken_score_is_refused_in_one_line(result, reason):
    with pytest.raises(RewardError) as error:
        scorer(result)("some_source", "response", {"target": 7, "note": "a\nb"})
    message = str(error.value)
    assert reason in message
    assert "some_source" in message
    assert "'target': 7" in message
    assert "\n" not in message


def test_an_error_names_the_line_of_the_users_own_file():
    with pytest.raises(
        RewardError, match=r"compute_score raised KeyError: 'x' \(tests/test_reward_helpers\.py:\d+, in "
    ):
        scorer(KeyError("x"))("source", "response", "x")


def test_a_reward_that_exits_is_an_error_too():
    for leave in (sys.exit, exit):  # the second raises in a file of Python's own, "<frozen _sitebuiltins>"
        with pytest.raises(RewardError, match=r"compute_score raised SystemExit: 3 \(tests/test_reward_helpers\.py:"):
            reward_function(lambda *given, leave=leave, **more: leave(3))("source", "response", "x")


def test_long_ground_truth_is_cut_in_the_message():
    with pytest.raises(RewardError) as error:
        scorer(None)("source", "response", "x" * 100_000)
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize(
    "result, expected",
    [
        ({"score": 0.5, "acc": 0}, {"score": 0.5, "acc": 0.0}),
        ({"score": np.float32(1), "acc": np.bool_(True)}, {"score": 1.0, "acc": 1.0}),
        ({"score": -2.0, "acc": False, "extra": 3}, {"score": -2.0, "acc": 0.0, "extra": 3.0}),
    ],
)
def test_good_score_is_returned_as_floats(result, expected):
    returned = scorer(result)("source", "response", "truth")
    assert returned == expected
    assert {type(value) for value in returned.values()} == {float}


def test_arguments_and_name_reach_the_function():
    @reward_function
    def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
        seen.append((data_source, solution_str, ground_truth, extra_info, kwargs))
        return {"score": 0.0, "acc": 0.0}

    seen = []
    compute_score(data_source="a", solution_str="b", ground_truth="c", extra_info={"index": 1}, other=2)
    compute_score("a", "b", "c")
    assert seen == [("a", "b", "c", {"index": 1}, {"other": 2}), ("a", "b", "c", None, {})]
    assert compute_score.__name__ == "compute_score"


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("5*3=15, 15-4=11", [[5, 3], [15, 4]]),
        ("3-8=(-5), 3-8=-5", [[3, 8], [3, 8]]),
        (r"so \( 16 \times 26 = 416 \), and (2+2=4)", [[16, 26], [2, 2]]),
        ("1/3=(1/3)", [[1, 3]]),
        ("3-8=5; 12=12; 3+4=-7; 2+2=45", []),
        ("2+2=4 " + "a" * expression.READ, []),
        ("1+1=2 " * 30, [[1, 1]] * expression.MOST_STEPS),
    ],
)
def test_only_true_calculations_count(text, numbers):
    assert list(expression.calculations(text)) == numbers


quick = settings(max_examples=300, database=None)


def nested(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": 1}', {"a": 1}),
        (' \n{"a": [1, {"b": null}]}\t\n', {"a": [1, {"b": None}]}),
        ('{"a": 1e-400, "b": -0.0}', {"a": 0.0, "b": 0.0}),
        ('{"a": ' + "9" * 18 + "}", {"a": 10**18 - 1}),
        ('{"a": -' + "9" * 18 + "}", {"a": 1 - 10**18}),
        ('{"a": ' + "9" * 19 + "}", None),
        ('{"a": 1, "a": 1}', None),
        ('{"a": NaN}', None),
        ('{"a": Infinity}', None),
        ('{"a": 1e999}', None),
        ("[1]", None),
        ("", None),
        ("{'a': 1}", None),
        ('{"a": 1}.', None),
        ('So: {"a": 1}', None),
        ('\ufeff{"a": 1}', None),
        ('{"a": "\x00"}', None),
        (nested(MAX_DEPTH), json.loads(nested(MAX_DEPTH))),
        (nested(MAX_DEPTH + 1), None),
        ('{"a": ' + "[" * 9000 + "}", None),
        ('{"a": "' + "x" * MAX_OBJECT_CHARS + '"}', None),
    ],
)
def test_strict(text, value):
    assert read_object(text) == value


def test_how_deep_is_too_deep_is_the_callers_to_say():
    depths = (63, 64, 65)
    assert [too_deep(json.loads("[" * depth + "]" * depth), 64) for depth in depths] == [False, False, True]
    assert [too_deep(json.loads('{"a":' * depth + "1" + "}" * depth), 64) for depth in depths] == [False, False, True]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": 1}', {"a": 1}),
        ('I decide: {"a": 1}. Good?', {"a": 1}),
        ('```json\n{"a": 1}\n```', {"a": 1}),
        ('It\'s "so": {"a": "}"} "', {"a": "}"}),
        ('{"a": "\\"}"} ok', {"a": '"}'}),
        ('{no json} {"a": 1}', {"a": 1}),
        ('<think>{"b": 2}</think>{"a": 1}', {"a": 1}),
        ('{"b": 2}</THINK>{"a": 1}', {"a": 1}),
        ('{"a": 1}<think>{"b": 2}', {"a": 1}),
        ('{"a": "<think>"}', {"a": "<think>"}),
        ('<think>x</think> So: {"a": "</think> b"}.', {"a": "</think> b"}),
        ('{"a": "</think>"}</think>', None),
        ('<think>{"a": "</think>"}', None),
        ('<think>x</think><think>{"a": 1}', None),
        ('{"a": 1} or {"a": 2}', None),
        ('{ {"a": 1}', None),
        ("x" * MAX_OBJECT_CHARS + '{"a": 1}', None),
        ("<think>" + "x" * 50_000 + '</think>{"a": 1}', {"a": 1}),
        ("{" * 100_000, None),
        ('{"' * 50_000, None),
    ],
)
def test_lenient(text, value):
    assert read_object(text, strict=False) == value


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**17), 10**17)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@pytest.mark.medium
@quick
@given(st.dictionaries(st.text(), plain, max_size=4), st.sampled_from(["", "So ", "<think>{</think>"]), st.booleans())
def test_what_json_writes_is_read_back(value, before, ascii_only):
    text = json.dumps(value, ensure_ascii=ascii_only)
    assert read_object(text) == value
    assume("think>" not in text.lower())  # a tag ends or begins a thought wherever it stands
    assert read_object(f"{before}{text} .", strict=False) == value


def finite(value) -> bool:
    if isinstance(value, dict | list):
        return all(finite(item) for item in (value.values() if isinstance(value, dict) else value))
    return not isinstance(value, float) or math.isfinite(value)


PIECES = [*'{}"\\[]:,1- ', "e9", "NaN", "<think>", "</think>", '"a":']
pieces = st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=40).map("".join)


@quick
@given(pieces, st.booleans())
def test_any_text_gives_none_or_a_finite_object(text, strict):
    value = read_object(text, strict)
    assert value is None or (isinstance(value, dict) and finite(value))
    if strict and value is not None:
        assert json.loads(text) == value


SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "number", "minimum": 0}, "s": {"enum": ["x", "y"]}},
    "required": ["n"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ({"n": 1}, None),
        ({"n": True}, "$.n: True is not of type 'number'"),
        ({"n": -1}, "$.n: -1 is less than the minimum of 0"),
        ({}, "$: 'n' is a required property"),
        ({"n": 1, "z": 1}, "$: Additional properties are not allowed ('z' was unexpected)"),
        ({"n": 1, "s": "z"}, "$.s: 'z' is not one of ['x', 'y']"),
    ],
)
def test_schema_problem(value, problem):
    assert schema_problem(value, SCHEMA) == problem


def test_a_problem_is_one_short_line():
    problem = schema_problem({"n": "a\x1b[2J\n" * 999}, SCHEMA)
    assert len(problem) <= 200
    assert problem.isprintable()


def test_a_broken_schema_gives_a_one_line_error():
    with pytest.raises(RewardError, match=r"no JSON Schema: \$\.type: 'objekt' is not valid"):
        schema_problem({}, {"type": "objekt"})


def test_a_reference_to_elsewhere_is_not_fetched(monkeypatch):
    asked = []
    monkeypatch.setattr("urllib.request.urlopen", asked.append)
    with pytest.raises(RewardError, match=r"\$ref"):
        schema_problem({"a": 1}, {"$ref": "http://127.0.0.1:1/schema.json"})
    assert not asked
