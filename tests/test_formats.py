"""data/formats.py: records of other people's data sets as OpenAI messages and tools.

What a file's readers promise: the same rows give the same examples, whatever holds them, or one line says why.
"""

import csv
import json
import os
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_tasks.data.formats import conversation, tool_schemas
from verl_tasks.data.records import Records, hub
from verl_tasks.rows import DataError, messages_problem

SHARED = Path(os.environ.get("SHARED_DATA", Path(__file__).resolve().parents[2] / "shared/data"))

HI = {"role": "user", "content": "hi"}
YES = {"role": "assistant", "content": "yes"}
BE = {"role": "system", "content": "be brief"}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "2"}


def openai(arguments):
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f", **arguments}}]}


def sharegpt(*turns):
    return {"conversations": [{"from": role, "value": value} for role, value in turns]}


# ---- forms: (record, messages, answer)
FORMS = {
    "messages as JSON text": ({"messages": json.dumps([HI, YES])}, [HI, YES], None),
    "messages with system column": ({"messages": [HI, YES], "system": "be brief"}, [BE, HI, YES], None),
    "messages and an answer": ({"messages": [BE, HI], "answer": 3}, [BE, HI], 3),
    "messages that end without answer": ({"messages": [HI]}, [HI], None),
    "function_call of old": (
        {"messages": [HI, {"role": "assistant", "content": None, "function_call": CALL["function"]}, RESULT]},
        [HI, CALLED, RESULT],
        None,
    ),
    "name of a tool": ({"messages": [HI, CALLED, RESULT | {"name": "f"}]}, [HI, CALLED, RESULT | {"name": "f"}], None),
    "tool result that is an object": (
        {"messages": [HI, CALLED, {"role": "tool", "content": {"n": 2}}]},
        [HI, CALLED, {"role": "tool", "content": '{"n": 2}'}],
        None,
    ),
    "thinking of a turn": (
        {"messages": [HI, YES | {"thinking": "hm"}]},
        [HI, YES | {"content": "<think>\nhm\n</think>\n\nyes"}],
        None,
    ),
    "the same answer twice": ({"prompt": "hi", "answer": 5, "ground_truth": 5}, [HI], 5),
    "reasoning_content": (
        {"messages": [HI, YES | {"reasoning_content": "hm"}]},
        [HI, YES | {"content": "<think>\nhm\n</think>\n\nyes"}],
        None,
    ),
    "typed parts": (
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "value": "i"}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "reasoning", "value": "hm"},
                        {"type": "tool_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
                        {"type": "tool_call", "value": {"name": "f", "arguments": '{"x": 1}'}},
                    ],
                },
                {"role": "tool", "content": [{"type": "text", "value": "2"}]},
            ]
        },
        [HI, CALLED | {"content": "<think>\nhm\n</think>", "tool_calls": [CALL, CALL]}, RESULT],
        None,
    ),
    "sharegpt parallel calls": (
        sharegpt(("human", "hi"), ("function_call", json.dumps([CALL["function"]] * 2))),
        [HI, CALLED | {"tool_calls": [CALL, CALL]}],
        None,
    ),
    "alpaca with all": (
        {"instruction": "hi", "output": "yes", "system": "be brief", "history": [["hi", "yes"]]},
        [BE, HI, YES, HI, YES],
        None,
    ),
    "system of a prompt": ({"prompt": "hi", "system": "be brief", "answer": "yes"}, [BE, HI], "yes"),
    "answer that is an object": ({"prompt": "hi", "ground_truth": {"a": [1, None]}}, [HI], {"a": [1, None]}),
    "answer that looks like a message": ({"prompt": "hi", "answer": "{'value': 3}"}, [HI], "{'value': 3}"),
    "answer with a role": (
        {"prompt": "hi", "answer": {"role": "nurse", "value": 1}},
        [HI],
        {"role": "nurse", "value": 1},
    ),
    "null columns of other rows": (
        {"messages": None, "prompt": "hi", "answer": "yes", "chosen": None, "rejected": None},
        [HI],
        "yes",
    ),
    "system_prompt": ({"system_prompt": "be brief", "question": "hi", "response": "yes"}, [BE, HI], "yes"),
}
FORMS |= {
    f"{prompt} and {answer}": ({prompt: "hi", answer: "yes"}, [HI], "yes")
    for prompt in ("prompt", "question", "query")
    for answer in ("answer", "response", "completion", "output", "solution", "target", "ground_truth")
}


@pytest.mark.parametrize("record, messages, answer", FORMS.values(), ids=FORMS)
def test_form_is_recognised(record, messages, answer):
    before = json.dumps(record)
    found = conversation(record)
    assert (found.messages, found.answer, found.tools) == (messages, answer, None)
    assert messages_problem(found.messages) is None
    assert found.kind == ("sft" if answer is None else "rl")
    assert json.dumps(record) == before  # read, not changed


PAIRS = {
    "question": {"question": "hi", "chosen": "yes", "rejected": "no"},
    "sharegpt ranking": {
        "conversations": [{"from": "human", "value": "hi"}],
        "chosen": {"from": "gpt", "value": "yes"},
        "rejected": {"from": "gpt", "value": "no"},
    },
    "messages": {"messages": [HI], "chosen": YES, "rejected": YES | {"content": "no"}},
}


@pytest.mark.parametrize("record", PAIRS.values(), ids=PAIRS)
def test_pair_is_recognised(record):
    found = conversation(record)
    assert (found.kind, found.messages, found.chosen, found.rejected) == ("dpo", [HI], "yes", "no")


def test_json_with_a_role_that_is_no_chat_stays_the_text_of_an_answer():
    texts = [json.dumps({"name": "Bob", "role": role}) for role in ("engineer", "cook")]
    found = conversation({"prompt": "hi", "chosen": texts[0], "rejected": texts[1]})
    assert [found.chosen, found.rejected] == texts


@pytest.mark.parametrize(
    "record, columns, expected",
    [
        ({"a": "hi", "b": "yes"}, {"prompt": "a", "answer": "b"}, ([HI], "yes")),
        ({"a": "hi", "answer": "yes"}, {"prompt": "a"}, ([HI], "yes")),
        ({"prompt": "hi", "answer": "no", "b": 4}, {"answer": "b"}, ([HI], 4)),
        ({"prompt": "x", "input": "hi", "answer": "yes"}, {"prompt": "input"}, ([HI], "yes")),
        ({"prompt": "hi", "s": "be brief", "answer": "yes"}, {"system": "s"}, ([BE, HI], "yes")),
        ({"chat": [HI, YES]}, {"messages": "chat"}, ([HI, YES], None)),
        ({"messages": [YES], "question": "hi", "b": "yes"}, {"prompt": "question", "answer": "b"}, ([HI], "yes")),
        ({"instruction": "hi", "output": "yes"}, {"answer": "output"}, ([HI], "yes")),
        # What is named for something else is no part of the prompt.
        ({"question": "hi", "input": "yes"}, {"answer": "input"}, ([HI], "yes")),
        ({"question": "hi", "query": "yes"}, {"answer": "query"}, ([HI], "yes")),
        ({"problem": "hi", "context": "be brief", "answer": "yes"}, {"system": "context"}, ([BE, HI], "yes")),
    ],
)
def test_columns_come_before_recognition(record, columns, expected):
    found = conversation(record, columns)
    assert (found.messages, found.answer) == expected


def test_columns_of_pairs_and_tools():
    record = {"prompt": "hi", "good": "yes", "bad": "no", "functions": [{"name": "f"}]}
    found = conversation(record, {"chosen": "good", "rejected": "bad", "tools": "functions"})
    assert (found.chosen, found.rejected, found.tools[0]["function"]["name"]) == ("yes", "no", "f")


CALLS = [{"id": f"c{n}", "function": {"name": name, "arguments": {"x": n}}} for n, name in enumerate("fgf")]


def answered(calls, *results):
    messages = [HI, {"role": "assistant", "content": "", "tool_calls": calls}]
    found = conversation({"messages": [*messages, *({"role": "tool"} | each for each in results), YES]})
    assert not any(key in message for message in found.messages for key in ("tool_call_id", "weight"))
    return [message["content"] for message in found.messages[2:-1]]


def test_results_stand_in_the_order_of_their_calls():
    a, b, c = ({"tool_call_id": f"c{n}", "content": text} for n, text in enumerate("abc"))
    assert answered(CALLS, c, a, b) == ["a", "b", "c"] == answered(json.dumps(CALLS), b, c, a)
    assert answered(CALLS, c, b) == ["b", "c"]
    assert answered(CALLS[:1], b) == ["b"]  # one call: nothing to mistake
    with pytest.raises(DataError, match="message 3: tool_call_id 'c9' is of no call before it"):
        answered(CALLS, a, {"tool_call_id": "c9", "content": "x"})
    by_name = {"name": "g", "content": "b"}, {"name": "f", "content": "a"}
    assert answered(CALLS[:2], *by_name) == ["a", "b"] and answered(CALLS, *by_name) == ["b", "a"]


NULL = {"type": ["string", "null"]}
FUNCTION = {
    "name": "f",
    "parameters": {"properties": {"a": {"type": "string"}, "b": NULL, "c": NULL}, "required": ["a", "c"]},
}


@pytest.mark.parametrize(
    "arguments, expected",
    [
        ({"a": "x", "b": None, "c": None}, {"a": "x", "b": None, "c": None}),
        ({"a": None, "d": None, "c": "y"}, {"c": "y"}),  # a cannot be null, and there is no d
        ({"a": "x"}, {"a": "x", "c": None}),
    ],
)
def test_a_null_argument_is_one_that_its_function_takes(arguments, expected):
    called = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
    found = conversation({"messages": [HI, called], "tools": [FUNCTION]})
    assert found.messages[1]["tool_calls"][0]["function"]["arguments"] == expected


def test_a_pair_goes_on_from_its_prompt_or_holds_it():
    turns = [YES, {"role": "user", "content": "and?"}]
    for before in (turns, [HI, *turns], [BE, HI, *turns]):
        pair = {"chosen": [*before, YES], "rejected": [*before, YES | {"content": "no"}]}
        found = conversation({"prompt": "hi"} | pair)
        assert found.messages == [*([BE] if BE in before else []), HI, *turns]
    with pytest.raises(DataError, match="column `prompt` is not in the messages of column `chosen`"):
        conversation({"prompt": "ho"} | pair)


def test_column_that_is_not_there_is_named():
    with pytest.raises(DataError, match="has no column `a`; it has columns prompt, answer"):
        conversation({"prompt": "hi", "answer": "yes"}, {"prompt": "a"})


REFUSED = {
    "nothing": ({}, "no columns"),
    "unknown": ({"text": "hi"}, "columns text.*`make json_to_parquet` takes others \\(--prompt-column"),
    "prompt alone": ({"prompt": "hi"}, "no answer"),
    "answer alone": ({"answer": "hi"}, "no known form"),
    "null prompt": ({"prompt": None, "answer": "x"}, "`prompt`: must be text, is null"),
    "null answer": ({"prompt": "hi", "answer": None}, "`answer`: .*null"),
    "empty answer": ({"prompt": "hi", "answer": ""}, "`answer`"),
    "NaN answer": ({"prompt": "hi", "answer": float("nan")}, "`answer`: .*JSON"),
    "two answers": ({"problem": "hi", "solution": "2 + 3 is 5.", "ground_truth": "5"}, "which is the answer"),
    "system is a list": ({"prompt": "hi", "answer": "x", "system": []}, "`system`: must be text"),
    "messages is text": ({"messages": "hi"}, "`messages`: is not JSON"),
    "no messages": ({"messages": []}, "non-empty list"),
    "unknown role": ({"messages": [{"role": "bard", "content": "x"}]}, "message 0: role.*'bard'"),
    "no content": ({"messages": [HI, {"role": "assistant"}]}, "message 1: content must be text, is null"),
    "empty assistant turn": ({"messages": [HI, {"role": "assistant", "content": ""}]}, "says nothing"),
    "late system": ({"messages": [HI, BE, YES]}, "system message after"),
    "image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "a content part must be a text, reasoning or tool_call",
    ),
    "part is text": (
        {"messages": [{"role": "user", "content": ["hi"]}]},
        "a content part must be a text, reasoning or tool_call",
    ),
    "part without text": (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "a content part must be a text, reasoning or tool_call",
    ),
    "type is a list": (
        {"messages": [{"role": "user", "content": [{"type": []}]}]},
        "a content part must be a text, reasoning or tool_call",
    ),
    "user calls": ({"messages": [HI | {"tool_calls": [CALL]}]}, "only the assistant"),
    "call without name": ({"messages": [HI, {"role": "assistant", "tool_calls": [{"function": {}}]}]}, "tool call"),
    "call is text": (sharegpt(("human", "hi"), ("function_call", "f(1)")), "message 1: is not JSON"),
    "no call": (sharegpt(("human", "hi"), ("function_call", "[]")), "empty"),
    "arguments are a list": ({"messages": [HI, openai({"arguments": "[1]"})]}, "arguments of the call of f"),
    "arguments are cut": ({"messages": [HI, openai({"arguments": '{"x": '})]}, "is not JSON"),
    "arguments have NaN": ({"messages": [HI, openai({"arguments": '{"x": NaN}'})]}, "is not JSON.*NaN"),
    "a key twice": ({"messages": [HI, openai({"arguments": '{"x": 1, "x": 2}'})]}, "a key stands twice"),
    "arguments have half a sign": ({"messages": [HI, openai({"arguments": '{"x": "\\ud83d"}'})]}, "surrogates"),
    "tools is text": ({"messages": [HI, YES], "tools": "f"}, "`tools`: is not JSON"),
    "tool without name": ({"messages": [HI, YES], "tools": [{}]}, "`tools`: a tool must"),
    "tool parameters": ({"messages": [HI, YES], "tools": [{"name": "f", "parameters": [1]}]}, "parameters of f"),
    "chosen is null": ({"prompt": "hi", "chosen": None, "rejected": "x"}, "`chosen`"),
    "pair without prompt": ({"chosen": "a", "rejected": "b"}, "no prompt"),
    "pair after the assistant": (
        {"messages": [HI, YES], "chosen": "a", "rejected": "b"},
        "no prompt of the user at its end",
    ),
    "instruction is null": ({"instruction": None, "output": "x"}, "`instruction`"),
    "output is null": ({"instruction": "hi", "output": None}, "`output`: must be text, is null"),
    "history is text": ({"instruction": "hi", "output": "x", "history": "h"}, "`history`: is not JSON"),
    "chat as Python prints it": ({"prompt": str([HI]), "completion": "x"}, "`prompt`: is not JSON"),
    "history has one": ({"instruction": "hi", "output": "x", "history": [["h"]]}, "`history`"),
}


@pytest.mark.parametrize("record, message", REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_gives_a_one_line_error(record, message):
    with pytest.raises(DataError, match=message) as error:
        conversation(record)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 700


def test_explicit_answer_beside_an_answered_conversation_is_refused():
    with pytest.raises(DataError, match="`b` is an answer too"):
        conversation({"messages": [HI, YES], "b": "x"}, {"answer": "b"})


@pytest.mark.parametrize("record", [{"messages": [HI, YES]}, {"prompt": "p", "chosen": "a", "rejected": "b"}])
def test_what_has_no_answer_of_its_own_gives_no_text_of_one(record):
    with pytest.raises(DataError, match="has no answer of its own"):
        _ = conversation(record).answer_text


def deep(levels):
    value = {}
    for _ in range(levels):
        value = {"type": "array", "items": value}
    return value


def test_deep_nesting_is_refused():
    with pytest.raises(DataError, match="nested too deeply"):
        conversation({"messages": [HI, YES], "tools": [{"name": "f", "parameters": {"properties": {"a": deep(9000)}}}]})
    with pytest.raises(DataError, match=r"nested too deeply|is not JSON"):
        conversation({"messages": [HI, openai({"arguments": "[" * 100_000})]})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
ROLE = st.sampled_from(["user", "assistant", "tool", "system", "gpt", "human", "function_call", "observation"]) | JSON
PART = st.fixed_dictionaries({"type": st.sampled_from(["text", "reasoning", "tool_call"]) | JSON, "value": JSON})
TURN = st.fixed_dictionaries(
    {}, optional={"role": ROLE, "from": ROLE, "content": st.lists(PART, max_size=2) | JSON, "value": JSON}
    | {"tool_calls": st.lists(st.fixed_dictionaries({"function": JSON}), max_size=2) | JSON, "name": JSON},
)  # fmt: skip
COLUMNS = ("messages", "conversations", "prompt", "input", "instruction", "output", "answer", "chosen", "rejected")
RECORD = st.dictionaries(
    st.sampled_from([*COLUMNS, "system", "tools", "history"]), st.lists(TURN, max_size=3) | TURN | JSON, max_size=5
)


@pytest.mark.medium
@settings(max_examples=300)
@given(RECORD)
def test_any_record_is_read_or_refused(record):
    try:
        found = conversation(record)
    except DataError as error:
        assert str(error).isprintable() or "\n" not in str(error)
        return
    assert messages_problem(found.messages) is None
    assert found.kind in ("rl", "sft", "dpo")
    for message in found.messages:
        for call in message.get("tool_calls", []):
            assert isinstance(call["function"]["arguments"], dict)


# ---- tools

STRING = {"type": "object", "properties": {"a": {"type": "string"}}}
TOOLS = {
    "openai": ({"type": "function", "function": {"name": "f", "parameters": STRING}}, STRING),
    "bare": ({"name": "f", "parameters": STRING}, STRING),
    "parameters as text": ({"name": "f", "parameters": json.dumps(STRING)}, STRING),
    "names of Python": ({"name": "f", "parameters": {"type": "dict", "properties": {"a": {"type": "str"}}}}, STRING),
    "properties alone": ({"name": "f", "parameters": {"a": {"type": "str"}}}, STRING),
    "optional": ({"name": "f", "parameters": {"a": {"type": "str, optional"}}}, STRING),
    "no parameters": ({"name": "f"}, {"type": "object", "properties": {}}),
    "null parameters": ({"name": "f", "parameters": None}, {"type": "object", "properties": {}}),
    "required beside parameters": (
        {"name": "f", "parameters": STRING, "required": ["a"]},
        {**STRING, "required": ["a"]},
    ),
    "nulls of parquet": ({"name": "f", "parameters": {**STRING, "required": None}}, STRING),
    "a property called type": (
        {"name": "f", "parameters": {"type": "dict", "properties": {"type": {"type": "int"}}}},
        {"type": "object", "properties": {"type": {"type": "integer"}}},
    ),
    "nested": (
        {"name": "f", "parameters": {"a": {"type": "List[int]", "items": {"type": "float"}}, "b": {"type": "any"}}},
        {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "number"}}, "b": {}}},
    ),
    "several types": (
        {"name": "f", "parameters": {"a": {"type": ["str", "NoneType"]}, "b": {"anyOf": [{"type": "bool"}]}}},
        {"type": "object", "properties": {"a": {"type": ["string", "null"]}, "b": {"anyOf": [{"type": "boolean"}]}}},
    ),
}


@pytest.mark.parametrize("tool, parameters", TOOLS.values(), ids=TOOLS)
@pytest.mark.parametrize("form", [list, json.dumps], ids=["list", "text"])
def test_tools_become_openai_schemas(tool, parameters, form):
    expected = {"type": "function", "function": {"name": "f", "description": "", "parameters": parameters}}
    assert tool_schemas(form([tool])) == [expected]
    assert tool_schemas([expected]) == [expected]  # what is right stays


def test_no_tools():
    assert [tool_schemas(value) for value in (None, "", [], "[]")] == [None] * 4


def test_a_property_may_have_the_name_of_a_word_of_the_schema():
    named = {name: {"type": "str"} for name in ("type", "default", "enum", "properties")}
    (tool,) = tool_schemas({"name": "f", "parameters": {"type": "dict", "properties": named | {"const": None}}})
    assert tool["function"]["parameters"]["properties"] == {name: {"type": "string"} for name in named}


# ---- data that was not made here


@pytest.mark.skipif(not SHARED.is_dir(), reason="no shared data")
@pytest.mark.parametrize(
    "name, kinds, with_tools, calls",
    [
        ("gsm8k/test.jsonl", {"rl": 1319}, 0, 0),
        ("tool_calls/glaive_toolcall_en_demo.json", {"sft": 300}, 191, 211),
        ("tool_calls/reason_tool_use_demo_50.jsonl", {"sft": 50}, 48, 68),
        ("preferences/dpo_en_demo.json", {"dpo": 300}, 0, 0),
    ],
)
def test_real_rows_are_recognised(name, kinds, with_tools, calls):
    found = [conversation(record) for record in Records(SHARED / name)]
    assert Counter(each.kind for each in found) == kinds
    assert sum(bool(each.tools) for each in found) == with_tools
    assert sum(len(m.get("tool_calls", [])) for each in found for m in each.messages) == calls
    assert not any(messages_problem(each.messages) for each in found)


def user(text):
    return {"role": "user", "content": text}


def says(text, **more):
    return {"role": "assistant", "content": text, **more}


def call(name, **arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def schema(name, **properties):
    return {"type": "function", "function": {"name": name, "description": "", "parameters": {
        "type": "object", "properties": properties, "required": list(properties)}}}  # fmt: skip


TEXT = {"type": "string"}
OFFERED = [schema("calculator", expr=TEXT), schema("weather", city=TEXT, days={"type": "integer"})]
ADD, SEE = call("calculator", expr="8+1"), call("weather", city="Oslo", days=2)
RESULTS = [{"role": "tool", "content": "9"}, {"role": "tool", "content": "rain"}]
PLAIN = [[user("8+1?"), says("", tool_calls=[ADD])], [user("Oslo?"), says("", tool_calls=[SEE])]]
BOTH = [user("8+1, Oslo?"), says("", tool_calls=[ADD, SEE]), *RESULTS, says("9, rain")]


def bare(each):
    return each["function"]


def ided(index, **given):
    return {"id": f"call0000{index}", **given}


# Rows of each public form, and the examples: (messages, answer, chosen, rejected, unused columns), or the reason.
HELD = {
    "ShareGPT": (
        [{"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": text}]} for text in ("a", "b")],
        [([user("Hi"), says(text)], None, None, None) for text in ("a", "b")],
        [],
    ),
    "ShareGPT with calls": (
        [
            {"conversations": [{"from": "human", "value": messages[0]["content"]},
             {"from": "function_call", "value": json.dumps(bare(messages[1]["tool_calls"][0]))}],
             "tools": json.dumps(OFFERED)}
            for messages in PLAIN
        ],
        [(messages, None, None, None) for messages in PLAIN],
        [],
    ),
    "Alpaca": (
        [
            {"instruction": "Add.", "input": "8+1", "output": "9", "text": "t"},
            {"instruction": "Hi", "input": "", "output": "Hello", "text": "t"},
        ],
        [([user("Add.\n8+1"), says("9")], None, None, None), ([user("Hi"), says("Hello")], None, None, None)],
        ["text"],
    ),
    "Dolly": (
        [
            {"instruction": "Who?", "context": "Ann won.", "response": "Ann", "category": "qa"},
            {"instruction": "Who?", "context": "Ben won.", "response": "Ben", "category": "qa"},
            {"instruction": "Hi", "context": "", "response": "Hello", "category": "chat"},
        ],
        [
            ([user("Who?\nAnn won.")], "Ann", None, None),
            ([user("Who?\nBen won.")], "Ben", None, None),
            ([user("Hi")], "Hello", None, None),
        ],
        ["category"],
    ),
    "OpenAI messages": (
        [
            {"messages": [{"role": "system", "content": "s"}, user("Hi"), says("a")], "id": 2**60},
            {"messages": [user("Hi"), says("b")], "id": 1},
        ],
        [
            ([{"role": "system", "content": "s"}, user("Hi"), says("a")], None, None, None),
            ([user("Hi"), says("b")], None, None, None),
        ],
        ["id"],
    ),
    "OpenAI with calls and a result": (
        [
            {"messages": [user("8+1, Oslo?"), says("", tool_calls=[ided(1, **ADD), ided(2, **SEE)]),
             ided(2, **RESULTS[1]) | {"tool_call_id": "call00002"}, RESULTS[0] | {"tool_call_id": "call00001"},
             says("9, rain")], "tools": OFFERED}
        ],
        [(BOTH, None, None, None)],
        [],
    ),
    "Mistral: arguments as text": (
        [
            {"messages": [user("8+1?"), says("", tool_calls=[{"id": "abcdefghi", "function": {
                "name": "calculator", "arguments": '{"expr": "8+1"}'}}])], "tools": OFFERED},
        ],
        [(PLAIN[0], None, None, None)],
        [],
    ),
    "Hermes: objects that differ": (
        [{"messages": messages, "tools": OFFERED} for messages in PLAIN],
        [(messages, None, None, None) for messages in PLAIN],
        [],
    ),
    "weights": (
        [{"messages": [user("Hi"), says("bad", weight=0), user("Again"), says("good", weight=1)]}],
        [([user("Hi"), says("bad"), user("Again"), says("good")], None, None, None)],
        [],
    ),
    "TRL: language modeling": ([{"text": "The sky is blue."}], "has no known form; it has columns text", []),
    "TRL: prompt only": ([{"prompt": [user("Hi")]}], "has a prompt but no answer; it has columns prompt", []),
    "TRL: prompt and completion": (
        [{"prompt": "The sky is", "completion": "blue."}],
        [([user("The sky is")], "blue.", None, None)],
        [],
    ),
    "TRL: prompt and completion as messages": (
        [{"prompt": [user(q)], "completion": [says(a)]} for q, a in (("5+3?", "Eight."), ("1+1?", "Two."))],
        [([user("5+3?"), says("Eight.")], None, None, None), ([user("1+1?"), says("Two.")], None, None, None)],
        [],
    ),
    "TRL: preference": (
        [{"prompt": [user("Hi")], "chosen": [says("good")], "rejected": [says("bad")]}],
        [([user("Hi")], None, "good", "bad")],
        [],
    ),
    "TRL: preference with an implicit prompt": (
        [{"chosen": [user("Hi"), says("good")], "rejected": [user("Hi"), says("bad")]}],
        [([user("Hi")], None, "good", "bad")],
        [],
    ),
    "TRL: unpaired preference": (
        [{"prompt": "Hi", "completion": "good", "label": True}],
        "column `label` .unpaired preferences. is not understood",
        [],
    ),
    "TRL: stepwise supervision": (
        [{"prompt": "Hi", "completions": ["a", "b"], "labels": [True, False]}],
        "has a prompt but no answer; it has columns prompt, completions, labels",
        [],
    ),
    "KTO": (
        [{"messages": [user("Hi"), says("good")], "kto_tag": False}],
        "column `kto_tag` .unpaired preferences. is not understood",
        [],
    ),
    "UltraFeedback": (
        [
            {"prompt": "Hi", "prompt_id": "f0", "chosen": [user("Hi"), says("good")],
             "rejected": [user("Hi"), says("bad")], "messages": [user("Hi"), says("good")],
             "score_chosen": 8.5, "score_rejected": 3.0}
        ],
        [([user("Hi")], None, "good", "bad")],
        ["prompt_id", "messages", "score_chosen", "score_rejected"],
    ),
    "ORPO": (
        [
            {"source": "s", "prompt": "And?", "question": "And?",
             "chosen": [user("Hi"), says("Hello"), user("And?"), says("good")],
             "rejected": [user("Hi"), says("Hello"), user("And?"), says("bad")]}
        ],
        [([user("Hi"), says("Hello"), user("And?")], None, "good", "bad")],
        ["source", "question"],
    ),
    "pairs after different turns": (
        [{"chosen": [user("Hi"), says("a"), user("b"), says("c")],
          "rejected": [user("Hi"), says("x"), user("b"), says("d")]}],
        "columns `chosen` and `rejected` answer different conversations",
        [],
    ),
    "MMLU": (
        [{"question": "2+2?", "subject": "math", "choices": ["3", "4"], "answer": 1}],
        "columns `question`, `choices`: which is the prompt",
        [],
    ),
    "two prompts": (
        [{"prompt": "Hi", "question": "Who?", "answer": "Ann"}],
        "columns `prompt`, `question`: which is the prompt",
        [],
    ),
    "objects as answers": (
        [{"question": "A?", "answer": {"name": "Ann", "age": 3}}, {"question": "B?", "answer": {"city": "Oslo"}}],
        [([user("A?")], {"name": "Ann", "age": 3}, None, None), ([user("B?")], {"city": "Oslo"}, None, None)],
        [],
    ),
}  # fmt: skip


def as_json(path, rows):
    path.write_text(json.dumps(rows))
    return Records(path)


def as_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Records(path)


def as_csv(path, rows):
    """Cells that are no text as JSON."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        cells = ({k: v if isinstance(v, str) else json.dumps(v) for k, v in row.items()} for row in rows)
        writer.writerows(cells)
    return Records(path)


def as_parquet(path, rows):
    pq.write_table(pa.Table.from_pylist(rows), path)
    return Records(path)


def as_folder(write, suffix):
    def written(path, rows):
        path.mkdir()
        write(path / f"train{suffix}", rows)
        return hub(str(path))

    return written


READERS = {
    "x.json": as_json,
    "x.jsonl": as_lines,
    "x.csv": as_csv,
    "x.parquet": as_parquet,
    "lines": as_folder(as_lines, ".jsonl"),
    "tables": as_folder(as_parquet, ".parquet"),
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("form", HELD)
def test_the_same_rows_give_the_same_examples(tmp_path, monkeypatch, name, form):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows, expected, unused = HELD[form]
    records = READERS[name](tmp_path / name, rows)
    if isinstance(expected, str):
        with pytest.raises(DataError, match=expected) as error:
            list(records.converted(conversation))
        assert "\n" not in str(error.value)
        return
    found = [made for _, made in records.converted(conversation)]
    answers = [json.loads(f.answer) if isinstance(f.answer, str) and f.answer[0] in "{[" else f.answer for f in found]
    assert [(f.messages, a, f.chosen, f.rejected) for f, a in zip(found, answers, strict=True)] == expected
    assert [each for each in records.unused if form != "objects as answers" or "nulls in answer." not in each] == unused
    assert [sorted(f.context) for f in found] == [[1] if form == "weights" else []] * len(rows)
    assert all(f.tools in (None, OFFERED) for f in found)


def test_a_column_in_place_of_an_empty_one_is_said(tmp_path):
    """Without an answer of its own, a row's worked solution becomes the text that a response must equal."""
    rows = [{"question": "a", "answer": "7", "solution": "So 7."}, {"question": "b", "answer": "", "solution": "So 8."}]
    records = as_lines(tmp_path / "in.jsonl", rows)
    assert [made.answer for _, made in records.converted(conversation)] == ["7", "So 8."]
    assert [*records.unused] == ["solution", "answer where it is empty (solution is read)"]


@pytest.mark.parametrize("of", [lambda turns: turns, json.dumps], ids=["objects", "JSON text"])
def test_what_a_turn_holds_beside_its_text_is_said(tmp_path, of):
    turns = [
        {"role": "user", "name": "Bo", "content": "hi", "images": []},
        {"from": "gpt", "value": "yo", "audio": "x"},
    ]
    tool = {"role": "tool", "name": "f", "tool_call_id": "1", "content": "3"}
    rows = [{"messages": of(turns)}, {"prompt": of([turns[0] | {"cut": True}, *turns[1:], tool]), "answer": "3"}]
    (tmp_path / "own.jsonl").write_text("\n".join(map(json.dumps, rows)))
    list((records := Records(tmp_path / "own.jsonl")).converted(conversation))
    assert [*records.unused] == ["messages.audio", "messages.name", "prompt.audio", "prompt.cut", "prompt.name"]
