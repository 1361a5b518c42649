"""rewards/json_answer.py: what is one JSON object, and what a schema says of it."""

import json
import math

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from verl_tasks.rewards.answers import RewardError
from verl_tasks.rewards.json_answer import MAX_OBJECT_CHARS, read_object, schema_problem
from verl_tasks.strict_json import MAX_DEPTH

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
