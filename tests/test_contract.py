"""What a file's readers promise: the same rows give the same examples, whatever holds them, or one line says why."""

import csv
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from verl_tasks.data.formats import conversation
from verl_tasks.data.records import Records, hub
from verl_tasks.rows import DataError


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
TOOLS = [schema("calculator", expr=TEXT), schema("weather", city=TEXT, days={"type": "integer"})]
ADD, SEE = call("calculator", expr="8+1"), call("weather", city="Oslo", days=2)
RESULTS = [{"role": "tool", "content": "9"}, {"role": "tool", "content": "rain"}]
PLAIN = [[user("8+1?"), says("", tool_calls=[ADD])], [user("Oslo?"), says("", tool_calls=[SEE])]]
BOTH = [user("8+1, Oslo?"), says("", tool_calls=[ADD, SEE]), *RESULTS, says("9, rain")]


def bare(each):
    return each["function"]


def ided(index, **given):
    return {"id": f"call0000{index}", **given}


# Rows of each public form, and the examples: (messages, answer, chosen, rejected, unused columns), or the reason.
FORMS = {
    "ShareGPT": (
        [{"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": text}]} for text in ("a", "b")],
        [([user("Hi"), says(text)], None, None, None) for text in ("a", "b")],
        [],
    ),
    "ShareGPT with calls": (
        [
            {"conversations": [{"from": "human", "value": messages[0]["content"]},
             {"from": "function_call", "value": json.dumps(bare(messages[1]["tool_calls"][0]))}],
             "tools": json.dumps(TOOLS)}
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
             says("9, rain")], "tools": TOOLS}
        ],
        [(BOTH, None, None, None)],
        [],
    ),
    "Mistral: arguments as text": (
        [
            {"messages": [user("8+1?"), says("", tool_calls=[{"id": "abcdefghi", "function": {
                "name": "calculator", "arguments": '{"expr": "8+1"}'}}])], "tools": TOOLS},
        ],
        [(PLAIN[0], None, None, None)],
        [],
    ),
    "Hermes: objects that differ": (
        [{"messages": messages, "tools": TOOLS} for messages in PLAIN],
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
@pytest.mark.parametrize("form", FORMS)
def test_the_same_rows_give_the_same_examples(tmp_path, monkeypatch, name, form):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows, expected, unused = FORMS[form]
    records = READERS[name](tmp_path / name, rows)
    if isinstance(expected, str):
        with pytest.raises(DataError, match=expected) as error:
            list(records.converted(conversation))
        assert "\n" not in str(error.value)
        return
    found = [made for _, made in records.converted(conversation)]
    answers = [json.loads(f.answer) if isinstance(f.answer, str) and f.answer[0] in "{[" else f.answer for f in found]
    assert [(f.messages, a, f.chosen, f.rejected) for f, a in zip(found, answers, strict=True)] == expected
    assert list(records.unused) == unused
    assert [sorted(f.context) for f in found] == [[1] if form == "weights" else []] * len(rows)
    assert all(f.tools in (None, TOOLS) for f in found)
