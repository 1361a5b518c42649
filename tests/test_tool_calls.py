"""rewards/tool_calls.py: what parses as calls, and which calls are equal."""

import itertools
import json
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from verl_tasks.rewards.tool_calls import (
    MAX_CALLS,
    MAX_CHARS,
    MAX_DEPTH,
    Malformed,
    expected_calls,
    matched,
    parse_calls,
    parse_response,
    render_calls,
    same_call,
    same_value,
    split_thinking,
    strict_json,
)

F = {"name": "f", "arguments": {"x": 1}}
G = {"name": "g", "arguments": {}}
F_TEXT, G_TEXT = json.dumps(F), json.dumps(G)


def block(text: str) -> str:
    return f"<tool_call>\n{text}\n</tool_call>"


# ---- parsing


@pytest.mark.parametrize(
    "text, calls, outside",
    [
        ("", [], ""),
        ("  It is 12 degrees.\n", [], "It is 12 degrees."),
        (block(F_TEXT), [F], ""),
        (f"{block(F_TEXT)}\n{block(G_TEXT)}\n", [F, G], ""),
        (f"I look.\n{block(F_TEXT)} Done.", [F], "I look.\n Done."),
        (block('{"name": "f", "parameters": {"x": 1}}'), [F], ""),
        (block('{"name": "f", "arguments": "{\\"x\\": 1}"}'), [F], ""),
        (block('{"name": "f", "arguments": {"x": "</tool_call>"}}'), [{**F, "arguments": {"x": "</tool_call>"}}], ""),
        # bare JSON, as Llama 3.1 and Mistral write it
        (F_TEXT, [F], ""),
        (f" [{F_TEXT}, {G_TEXT}]", [F, G], ""),
        ('{"type": "function", "name": "f", "parameters": {"x": 1}}', [F], ""),
        (f"[TOOL_CALLS] [{F_TEXT}]", [F], ""),
        (f"<|python_tag|>{F_TEXT}; {G_TEXT}", [F, G], ""),
        (f"{F_TEXT}\n{G_TEXT}", [F, G], ""),
        # JSON that is no call, and prose
        ('{"name": "Ann", "age": 3}', [], '{"name": "Ann", "age": 3}'),
        ("[1] a source", [], "[1] a source"),
        ('{"a": 1} is JSON', [], '{"a": 1} is JSON'),
        ("[" * 10_000, [], "[" * 10_000),
    ],
)
def test_parse_calls(text, calls, outside):
    assert parse_calls(text) == (calls, outside)


@pytest.mark.parametrize(
    "text",
    [
        "</tool_call>",
        f"<tool_call>\n{F_TEXT}",
        f"{block(F_TEXT)}\n</tool_call>",
        f"{block(F_TEXT)}\n<tool_call>\n{F_TEXT}",  # one good block does not save a bad one
        block("{'name': 'f', 'arguments': {}}"),
        block(F_TEXT[:-1]),
        block(F_TEXT + F_TEXT),
        block(f"[{F_TEXT}]"),  # a block is one call
        block("null"),
        block('{"name": "f"}'),
        block('{"name": 3, "arguments": {}}'),
        block('{"name": "f", "arguments": null}'),
        block('{"name": "f", "arguments": "x=1"}'),
        block('{"name": "f", "arguments": "{\\"x\\": NaN}"}'),
        block('{"name": "f", "arguments": {}, "parameters": {}}'),
        block('{"name": "f", "arguments": {}, "more": 1}'),
        block('{"name": "f", "arguments": {"x": NaN}}'),
        block('{"name": "f", "arguments": {"x": 1e999}}'),
        block('{"name": "f", "arguments": {"x": 1, "x": 2}}'),
        block('{"name": "f", "arguments": {"x": ' + "9" * 5000 + "}}"),
        block('{"name": "f", "arguments": {"x": ' + "[" * MAX_DEPTH + "1" + "]" * MAX_DEPTH + "}}"),
        "\n".join([block(F_TEXT)] * (MAX_CALLS + 1)),
        block(json.dumps({"name": "f", "arguments": {"x": "a" * MAX_CHARS}})),
        F_TEXT + " Done.",
        f"I call {F_TEXT}",
        f"```json\n{F_TEXT}\n```",
        f'[{F_TEXT}, {{"answer": 1}}]',
        '{"name": "f", ',
        "[TOOL_CALLS] f",
        '<|python_tag|>{"answer": 1}',
    ],
)
def test_what_begins_as_a_call_and_is_none_is_malformed(text):
    with pytest.raises(Malformed):
        parse_calls(text)


@pytest.mark.parametrize(
    "text",
    [
        '{"tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{\\"x\\": 1}"}}]}',
        '{"role": "assistant", "content": null, "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]}',
        '[{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]',
        '{"type": "function", "function": "f", "parameters": {"x": 1}}',
        '<function=f>{"x": 1}</function>',
    ],
)
def test_other_forms_of_a_call_are_read(text):
    assert parse_calls(text) == ([{"name": "f", "arguments": {"x": 1}}], "")


@pytest.mark.parametrize(
    "text",
    [
        "[f(x=1)]",
        "f(x=1)",
        "f()",
        '[f(x=1), a.g(y="b")]',
        "[f(1)]",
        "```python\nf(x=1)\n```",
        "Sure:\n[f(x=1)]",
        '<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"x": 1}',
        '>>>f\n{"x": 1}',
        '<|from|>assistant\n<|recipient|>f\n<|content|>{"x": 1}',
        "<function=f><parameter=x>1</parameter></function>",
        'I call <function=f>{"x": 1}</function>',
        '<function=f>{"x": 1}',
        '{"tool_calls": []}',
        '{"tool_calls": [1]}',
        '{"content": "Hi", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}',
        'Now {"type": "function", "function": "f", "parameters": {"x": 1}}',
        # other dialects
        "<start_function_call>call:f{x:<escape>1<escape>}<end_function_call>",
        '<｜DSML｜function_calls><｜DSML｜invoke name="f">',
        '<invoke name="f"><parameter name="x">1</parameter></invoke>',
        '<minimax:tool_call><invoke name="f">',
        '<steptml:invoke name="f">',
        "f\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>",
        '<|START_ACTION|>[{"tool_call_id": "0"}]',
        '[{"tool_name": "f", "parameters": {"x": 1}}]',
        'Action: f\nAction Input: {"x": 1}',
        "Action: f[1]",
        '<|start|>assistant to=functions.f<|message|>{"x": 1}',
        'commentary to=functions.f json{"x": 1}',
        '✿FUNCTION✿: f\n✿ARGS✿: {"x": 1}',
        '<|tools_prefix|>[{"f": {"x": 1}}]<|tools_suffix|>',
        '{"action": "f", "action_input": {"x": 1}}',
        '{"type": "tool_use", "name": "f", "input": {"x": 1}}',
        '{"functionCall": {"name": "f", "args": {"x": 1}}}',
        f"<TOOLCALL>[{F_TEXT}]</TOOLCALL>",
        "I look.\n```tool_code\nf(x=1)\n```",
    ],
)
def test_a_call_in_a_form_that_is_not_read_is_malformed_and_never_text(text):
    with pytest.raises(Malformed):
        parse_calls(text)


TOOLS = [{"type": "function", "function": {"name": "get_weather"}}, {"name": "a.b-c"}]


@pytest.mark.parametrize(
    "text",
    [
        'get_weather{"city": "Paris"}',
        '[{"get_weather": {"city": "Paris"}}]',
        "{'name': 'get_weather', 'arguments': {'city': 'Paris'}}",
        "name: get_weather\narguments:\n  city: Paris",
        '{"tool": "get_weather", "args": {"city": "Paris"}}',
        '{"name": "get_weather"}',
        'I would call get_weather(city="Paris") for you.',
        "get_weather[Paris]",
        "I call get_weather.call(city=1)",
        '{"recipient_name": "functions.get_weather"}',
        "It is a.b-c(1).",
        'get_weather (city = "Paris")',
        "<get_weather><city>Paris</city></get_weather>",
        '<get_weather city="Paris"/>',
        "Sure.\n/get_weather Paris",
    ],
)
def test_a_call_of_a_known_tool_is_never_text(text):
    assert parse_response(text).calls == []
    with pytest.raises(Malformed):
        parse_response(text, TOOLS)


@pytest.mark.parametrize(
    "text",
    [
        "I cannot use get_weather without a city. Which one?",
        "`get_weather()` needs a city, my_get_weather(x) does not.",
        "get_weather (of the service) is down.",
        "See the path https://host/get_weather for get_weather (a tool); x < get_weather > y.",
        '{"name": "Paris", "weather": "rain"}',
    ],
)
def test_a_tool_may_be_named_in_a_text(text):
    assert parse_response(text, TOOLS).text == text


@pytest.mark.parametrize(
    "text", ["f(x) is a function.", "[the docs](http://a)", '{"a": 1}', "Use:\n```\nplot(x=1)\n```\nto plot.", "[1, 2]"]
)
def test_text_that_looks_a_little_like_a_call_is_text(text):
    assert parse_calls(text) == ([], text)


BFCL_CALL = {"f": {"x": [1, 2], "unit": ["m", ""], "at": [{"city": ["a", "b"]}, ""], "l": [[1], [2], ""]}}


@pytest.mark.parametrize(
    "arguments, right",
    [
        ({"x": 1}, True),
        ({"x": 2, "unit": "m", "at": {"city": "b"}, "l": [2]}, True),
        ({"x": 3}, False),
        ({"x": "1"}, False),
        ({}, False),
        ({"x": 1, "unit": "km"}, False),
        ({"x": 1, "at": {"city": "c"}}, False),
        ({"x": 1, "l": [1, 2]}, False),
        ({"x": 1, "y": 1}, False),
        ({"x": [1, 2]}, False),
    ],
)
def test_a_truth_with_several_allowed_values(arguments, right):
    (expected,) = expected_calls([BFCL_CALL])
    assert same_call({"name": "f", "arguments": arguments}, expected, {}) is right
    assert not same_call({"name": "g", "arguments": arguments}, expected, {})


@pytest.mark.parametrize(
    "response, opened, expected",
    [
        ("", False, (None, "")),
        ("<think>a</think>b", False, ("a", "b")),
        ("\n<think>\n a \n</think>\n\nb", False, ("a", "\n\nb")),
        ("a</think>b", True, ("a", "b")),
    ],
)
def test_split_thinking(response, opened, expected):
    assert split_thinking("<think>" * opened + response) == expected


@pytest.mark.parametrize(
    "response, opened",
    [
        ("<think>a", False),
        ("</think>a<think>", False),
        ("b<think>a</think>", False),
        ("<think>a</think>b</think>", False),
        ("<think>a</think><think>b</think>", False),
        ("b", True),
        ("<think>a</think>b", True),  # the prompt has opened it: that makes two
    ],
)
def test_thinking_stands_once_at_the_start(response, opened):
    with pytest.raises(Malformed):
        parse_response("<think>" * opened + response)


CALL_OF_A_TAG = [
    '<tool_call>\n{{"name": "f", "arguments": {{"x": "{tag}"}}}}\n</tool_call>',
    '{{"name": "f", "parameters": {{"x": "{tag}"}}}}',
    '[TOOL_CALLS] [{{"name": "f", "arguments": {{"x": "{tag}"}}}}]',
    '<function=f>{{"x": "{tag}"}}</function>',
]


@pytest.mark.parametrize(
    "tag", ["<think>", "</think>", "a </think> b <think>", "<tool_call>", "</tool_call>", "</answer>"]
)
@pytest.mark.parametrize("form", CALL_OF_A_TAG)
@pytest.mark.parametrize("thinking", [None, "hm"])
def test_a_tag_in_an_argument_is_data(form, tag, thinking):
    response = (f"<think>{thinking}</think>\n" if thinking else "") + form.format(tag=tag)
    expected = [{"name": "f", "arguments": {"x": tag}}]
    found = parse_response(response)
    assert (found.thinking, found.calls, found.text) == (thinking, expected, "")


@pytest.mark.parametrize(
    "response", [f"a</think>{CALL_OF_A_TAG[0]}", f"<think>{CALL_OF_A_TAG[0]}", f"{CALL_OF_A_TAG[0]}</think>"]
)
def test_a_tag_in_an_argument_ends_no_thinking(response):
    with pytest.raises(Malformed):
        parse_response(response.format(tag="</think>"))


def test_calls_in_the_thinking_do_not_count():
    found = parse_response(f"<think>{block(F_TEXT)} or {F_TEXT[:-1]}?</think>{block(G_TEXT)}")
    assert found.calls == [G] and found.text == ""


@pytest.mark.parametrize("text", ['{"a": 1} x', "", "NaN", '{"a": {"b": 1, "b": 1}}', "[1e400]", "nul"])
def test_strict_json_refuses(text):
    with pytest.raises(Malformed):
        strict_json(text)


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4), max_leaves=12
)
CALLS = st.lists(
    st.fixed_dictionaries({"name": st.text(), "arguments": st.dictionaries(st.text(), VALUES, max_size=4)}), max_size=4
)


@pytest.mark.medium
@given(CALLS)
def test_what_is_rendered_is_parsed_and_equal_in_any_order(calls):
    parsed, outside = parse_calls(render_calls(calls))
    assert parsed == calls and outside == ""
    assert matched(parsed[::-1], calls, []) == len(calls)


PIECES = ["<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "<|python_tag|>", F_TEXT, G_TEXT]
PIECES += [*'{}[]"\\,;:\nA\ud800', '{"name":', '"arguments":', "NaN", "1e999"]


@pytest.mark.medium
@settings(max_examples=500)
@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=12).map("".join), st.booleans())
@example("{" * 10_000, False)
@example('{"name":' * 1500, False)
def test_any_text_is_parsed_or_malformed(text, opened):
    try:
        found = parse_response("<think>" * opened + text)
    except Malformed:
        return
    assert all(call.keys() == {"name", "arguments"} for call in found.calls)
    json.dumps(found.calls, allow_nan=False)


# ---- equality

INTEGER, NUMBER = {"type": "integer"}, {"type": "number"}


@pytest.mark.parametrize(
    "made, expected, schema, equal",
    [
        (1, 1, {}, True),
        (1, "1", {}, False),
        ("1", 1, {"type": "string"}, False),
        (True, 1, {}, False),
        (True, 1.0, NUMBER, False),
        (None, None, {}, True),
        (None, 0, {}, False),
        ("a", "A", {}, False),
        # an int may stand where a float is expected
        (1, 1.0, {}, True),
        (1, 1.0, INTEGER, True),
        (10**400, 1e300, NUMBER, False),
        # a float where an int is expected only if the schema takes any number
        (1.0, 1, {}, False),
        (1.0, 1, NUMBER, True),
        (1.5, 1, NUMBER, False),
        (1.0, 1, {"type": ["number", "null"]}, True),
        (1.0, 1, {"anyOf": [{"type": "null"}, {"type": "number"}]}, True),
        (1.0, 1, {"type": {"odd": 1}, "anyOf": 3}, False),
        (0.1 + 0.2, 0.3, NUMBER, False),
        # lists, in order
        ([1, 2], [1, 2], {}, True),
        ([2, 1], [1, 2], {}, False),
        ([1], [1, 1], {}, False),
        ([1.0], [1], {"items": NUMBER}, True),
        ([True], [1], {"items": NUMBER}, False),
        # objects
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, {}, True),
        ({"a": {"b": 1.0}}, {"a": {"b": 1}}, {"properties": {"a": {"properties": {"b": NUMBER}}}}, True),
        ({"a": 1.0}, {"a": 1}, {"additionalProperties": NUMBER}, True),
        # optional arguments that equal their default
        ({}, {"a": 1}, {"properties": {"a": {"default": 1}}}, True),
        ({"a": 1}, {}, {"properties": {"a": {"default": 1}}}, True),
        ({}, {"a": 2}, {"properties": {"a": {"default": 1}}}, False),
        ({"a": True}, {}, {"properties": {"a": {"default": 1}}}, False),
        ({"a": None}, {}, {"properties": {"a": {"type": "string"}}}, False),
        ({}, {"a": 1}, {"properties": {"a": {"default": 1}}, "required": ["a"]}, False),
        ({}, {"a": 1.0}, {"properties": {"a": {"default": 1, "type": "number"}}}, True),
        ({"o": {}}, {"o": {"a": 1}}, {"properties": {"o": {"properties": {"a": {"default": 1}}}}}, True),
        # schemas that are none
        ({"a": 1}, {"a": 1}, {"properties": 3, "required": 5}, True),
        ({"a": 1}, {"a": 1}, "object", True),
        ({"a": 1}, {}, {"properties": {"a": 3}}, False),
    ],
)
def test_same_value(made, expected, schema, equal):
    assert same_value(made, expected, schema) is equal


def call(x):
    return {"name": "f", "arguments": {"x": x}}


def test_matching_is_maximal_where_taking_the_first_partner_is_not():
    # 1 and 1.0 may stand for 1.0, only 1 for 1: the first of `made` must leave 1.0 to the second.
    assert matched([call(1), call(1.0)], [call(1.0), call(1)], []) == 2
    assert matched([call(1.0), call(1)], [call(1.0), call(1)], []) == 2
    assert matched([call(1.0), call(1.0)], [call(1.0), call(1)], []) == 1


@pytest.mark.parametrize(
    "made, expected, pairs",
    [([], [F], 0), ([F, F], [F], 1), ([F, G], [G, F], 2), ([F, F], [F, G], 1), ([{**F, "name": "F"}], [F], 0)],
)
def test_matched(made, expected, pairs):
    assert matched(made, expected, [{"type": "function", "function": {"name": "f"}}]) == pairs


NUMBERS = st.lists(st.sampled_from([0, 0.0, 1, 1.0, 2]), max_size=4)


@given(NUMBERS, NUMBERS)
def test_matched_agrees_with_trying_every_order(made, expected):
    made, expected = [call(x) for x in made], [call(x) for x in expected]
    short, long = sorted((made, expected), key=len)
    best = 0
    for order in itertools.permutations(long, len(short)):
        pairs = zip(short, order, strict=True) if short is made else zip(order, short, strict=True)
        best = max(best, sum(same_value(a, b, {}) for a, b in pairs))
    assert matched(made, expected, []) == best


def test_tools_may_come_without_the_function_around_them():
    function = {"name": "f", "parameters": {"properties": {"x": {"default": 1}}}}
    for tools in ([function], [{"type": "function", "function": function}], [None, 3, {"name": []}, function]):
        assert matched([{"name": "f", "arguments": {}}], [F], tools) == 1


@pytest.mark.parametrize("space", [" ", "\n", "\t"])
@pytest.mark.parametrize("text", ["{}!", "```json{}!", "f(){}!", "[ f(x){}] {}!"])
def test_many_spaces_take_no_quadratic_time(text, space):
    """Where a call may stand among them; 16,000 took 2 s."""
    text = text.replace("{}", space * 8000)[:MAX_CHARS]
    started = time.thread_time()
    assert parse_calls(text) == ([], text.strip())
    assert time.thread_time() - started < 0.1
