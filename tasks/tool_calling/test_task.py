"""tasks/tool_calling: components of the reward, examples of conversations, generated dialogues, metrics."""

import copy
import json
import os
import random
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.tool_calling.dialogues import DIFFICULTIES, TOOLS, dialogues
from tasks.tool_calling.prepare_data import examples, from_file, generate
from tasks.tool_calling.reward import VARIANTS, compute_score
from verl_tasks import answers, prepare, records, tool_calls

SHARED = Path(os.environ.get("SHARED_DATA", Path(__file__).resolve().parents[3] / "shared/data")) / "tool_calls"
real_data = pytest.mark.skipif(not SHARED.is_dir(), reason="no shared data here")


def tool(name, properties, required=()):
    parameters = {"type": "object", "properties": properties, "required": list(required)}
    return {"type": "function", "function": {"name": name, "description": "", "parameters": parameters}}


WEATHER = tool("weather", {"city": {"type": "string"}, "days": {"type": "integer", "default": 1}}, ["city"])
OSLO = {"name": "weather", "arguments": {"city": "Oslo"}}
ROME = {"name": "weather", "arguments": {"city": "Rome", "days": 3}}
ONE, TWO, NONE = ({"calls": calls, "tools": [WEATHER]} for calls in ([OSLO], [OSLO, ROME], []))


def score(response, truth, variant="instruct", **extra):
    return compute_score("tool_calling", response, truth, extra, variant=variant)


# ---- the reward


@pytest.mark.parametrize(
    "response, truth, components",
    [
        (
            tool_calls.render_calls([ROME, OSLO]),
            TWO,
            {"score": 1, "acc": 1, "format": 1, "parsed": 1, "names": 1, "arguments": 1, "made": 2, "expected": 2},
        ),
        ("", TWO, {"format": 0, "parsed": 1, "missing": 2, "extra": 0, "text": 0}),
        ("It rains.", TWO, {"format": 1, "parsed": 1, "text": 1, "missing": 2, "made": 0}),
        ("<tool_call>{", TWO, {"format": 0, "parsed": 0, "names": 0, "missing": 2, "extra": 0, "made": 0}),
        (tool_calls.render_calls([OSLO]), TWO, {"format": 1, "names": 0, "arguments": 0, "missing": 1, "extra": 0}),
        (
            tool_calls.render_calls([OSLO, ROME, OSLO]),
            TWO,
            {"format": 1, "names": 0, "arguments": 0, "missing": 0, "extra": 1},
        ),
        (
            tool_calls.render_calls([OSLO, OSLO]),
            TWO,
            {"format": 1, "names": 1, "arguments": 0, "missing": 1, "extra": 1},
        ),
        (
            "Look:\n" + tool_calls.render_calls([OSLO]),
            ONE,
            {"score": 0, "format": 0, "text": 1, "names": 1, "arguments": 1},
        ),
        (f"<think>a</think>{tool_calls.render_calls([OSLO])}", ONE, {"score": 1, "thinking": 1}),
        ("No.", NONE, {"score": 1, "text": 1, "arguments": 1, "expected": 0}),
        (tool_calls.render_calls([OSLO]), NONE, {"score": 0, "format": 1, "names": 0, "extra": 1}),
    ],
)
def test_components_say_what_is_wrong(response, truth, components):
    found = score(response, truth)
    assert {name: found[name] for name in components} == components


@pytest.mark.parametrize(
    "response, opened, right",
    [
        (f"so</think>\n\n{tool_calls.render_calls([OSLO])}", True, 1.0),
        (f"so</think>\n\n{tool_calls.render_calls([OSLO])}", False, 0.0),
        (f"<think>so</think>\n\n{tool_calls.render_calls([OSLO])}", True, 0.0),
        (f"<think>so</think>\n\n{tool_calls.render_calls([OSLO])}", False, 1.0),
        (f" \n</think>\n\n{tool_calls.render_calls([OSLO])}", True, 0.0),
        (tool_calls.render_calls([OSLO]), True, 0.0),
    ],
)
def test_strict_where_the_template_has_opened_the_thinking(response, opened, right):
    assert score(response, ONE, "strict", think_opened=opened)["score"] == right
    assert score(response, ONE, "strict", think_opened=int(opened))["score"] == right


def test_a_row_without_extra_info_is_scored():
    assert compute_score("tool_calling", tool_calls.render_calls([OSLO]), json.dumps(ONE), None)["score"] == 1.0


def test_an_unknown_variant_is_refused_in_one_line():
    with pytest.raises(
        answers.RewardError, match=r"variant=lenient .REWARD.: must be one of instruct, strict"
    ) as error:
        score("", ONE, "lenient")
    assert "\n" not in str(error.value)


MARKS = ["<tool_call>", "</tool_call>", "<think>", "</think>", json.dumps(OSLO), '{"name":', "[", "{", "1e999", "NaN"]


@settings(max_examples=300)
@given(
    st.lists(st.sampled_from(MARKS) | st.text(max_size=4), max_size=10).map("".join),
    st.sampled_from([ONE, TWO, NONE]),
    st.sampled_from(VARIANTS),
    st.booleans(),
)
def test_any_response_gets_a_score_in_range(response, truth, variant, opened):
    found = score(response, truth, variant, think_opened=opened)
    assert found.keys() == score("", ONE).keys()
    assert found["score"] == found["acc"] == found["format"] * found["arguments"]
    counts = {"made", "expected", "missing", "extra"}
    assert all(value in (0.0, 1.0) for name, value in found.items() if name not in counts)
    assert found["expected"] - found["missing"] == found["made"] - found["extra"] >= 0


# ---- examples of conversations


def assistant(*calls, content=""):
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [{"type": "function", "function": call} for call in calls],
    }


USER, RESULT = {"role": "user", "content": "Weather in Oslo?"}, {"role": "tool", "content": "{}"}


@pytest.mark.parametrize("tag", ["<think>", "</think>", "<tool_call>"])
@pytest.mark.parametrize("strict", [False, True])
def test_a_tag_as_an_argument_is_data(tag, strict):
    call = {"name": "weather", "arguments": {"city": tag}}
    messages = [USER, assistant(call, content="<think>Hm.</think>" if strict else "")]
    (example,) = examples({"messages": messages, "tools": [WEATHER]}, strict)
    assert example.ground_truth["calls"] == [call]
    assert score(example.demonstration, example.ground_truth, "strict" if strict else "instruct")["score"] == 1.0


def test_a_turn_of_weight_0_is_context_alone():
    messages = [USER, assistant(ROME) | {"weight": 0}, RESULT, assistant(OSLO) | {"weight": 1}]
    for head in ([], [{"role": "system", "content": f"<tools>[{json.dumps(WEATHER)}]</tools>"}]):
        (example,) = examples({"messages": [*head, *messages], "tools": [] if head else [WEATHER]}, strict=False)
        assert example.ground_truth["calls"] == [OSLO] and len(example.prompt) == 3


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_calls_with_other_arguments_get_no_nulls(tmp_path, suffix):
    add = {"name": "add", "arguments": {"expr": "8+1"}}
    tools = [WEATHER, tool("add", {"expr": {"type": "string"}}, ["expr"])]
    rows = [
        {"messages": [USER, assistant(call), RESULT, assistant(call)], "tools": tools} for call in (add, OSLO, ROME)
    ]
    path = tmp_path / f"x{suffix}"
    if suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("\n".join(map(json.dumps, rows)))
    found = [example for record in records.load(path)[0] for example in examples(record, strict=False)]
    for example, call in zip(found, [add, add, OSLO, OSLO, ROME, ROME], strict=True):
        assert (
            example.ground_truth["calls"] == [call]
            and score(tool_calls.render_calls([call]), example.ground_truth)["score"] == 1
        )
        assert all(m.get("tool_calls", [{"function": call}])[0]["function"] == call for m in example.prompt)


def test_each_turn_becomes_an_example_of_all_before_it():
    text = {**ROME, "arguments": json.dumps(ROME["arguments"])}  # arguments as JSON text, as OpenAI has them
    messages = [
        USER,
        assistant(OSLO, content="<think>Oslo it is.</think>"),
        RESULT,
        {"role": "assistant", "content": "Cold."},
        {"role": "user", "content": "And in Rome, and again Oslo?"},
        assistant(text, OSLO),
    ]
    first, words, second = examples({"messages": messages, "tools": [WEATHER]}, strict=False)
    assert replace(first, group=None) == prepare.Example([USER], ONE, tool_calls.render_calls([OSLO]), tools=[WEATHER])
    assert [m["role"] for m in words.prompt] == ["user", "assistant", "tool"]
    assert words.ground_truth == {"calls": [], "tools": [WEATHER]} and words.demonstration == "Cold."
    assert [m["role"] for m in second.prompt] == ["user", "assistant", "tool", "assistant", "user"]
    assert second.prompt[1]["content"] == "" and second.prompt[1]["tool_calls"]  # without the thinking
    assert second.ground_truth == {"calls": [ROME, OSLO], "tools": [WEATHER]}
    first, words, second = examples({"messages": messages, "tools": json.dumps([WEATHER])}, strict=True)
    assert first.demonstration == f"<think>\nOslo it is.\n</think>\n\n{tool_calls.render_calls([OSLO])}"
    assert second.demonstration is None  # strict, and the data has no thinking


def test_sharegpt_turns_are_read():
    turns = [
        {"from": "human", "value": "Weather in Oslo?"},
        {"from": "function_call", "value": json.dumps(OSLO)},
        {"from": "observation", "value": "{}"},
        {"from": "gpt", "value": "Cold."},
    ]
    record = {"conversations": turns, "tools": json.dumps([WEATHER["function"]]), "system": "Be brief."}  # APIGen-MT
    found, words = examples(record, strict=False)
    assert found.prompt == [{"role": "system", "content": "Be brief."}, USER]
    assert (found.ground_truth, found.demonstration) == (ONE, tool_calls.render_calls([OSLO]))
    assert (words.ground_truth["calls"], words.demonstration) == ([], "Cold.")


def test_hermes_turns_are_read():
    block, other = f"<tool_call>\n{json.dumps(OSLO)}\n</tool_call>", tool("f", {})
    turns = [
        {"from": "system", "value": f"You call functions.\n<tools>{json.dumps([WEATHER])}</tools>"},
        {"from": "human", "value": "Weather in Oslo?"},
        {"from": "gpt", "value": f"<think>Oslo.</think>\n{block}"},
        {"from": "tool", "value": '<tool_response>\n{"t": 3}\n</tool_response>'},
        {"from": "gpt", "value": "Cold."},
    ]
    found, words = examples({"conversations": turns}, strict=True)
    assert found.prompt == [USER] and found.ground_truth == ONE and found.tools == [WEATHER]
    assert found.demonstration == f"<think>\nOslo.\n</think>\n\n{tool_calls.render_calls([OSLO])}"
    assert words.prompt[2]["content"] == '{"t": 3}' and words.prompt[1]["content"] == ""
    # A line for each tool, as Qwen's template writes them.
    turns[0]["value"] = (
        f"Signatures are in <tools></tools>:\n<tools>\n{json.dumps(WEATHER)}\n{json.dumps(other)}\n</tools>"
    )
    assert next(examples({"conversations": turns}, strict=False)).tools == [WEATHER, other]
    turns[2]["value"] = block[:-20]  # a call that cannot be read
    assert list(examples({"conversations": turns}, strict=False)) == ["no turn calls a tool"]
    turns[0]["value"] = "<tools>no JSON</tools>"
    (found,) = examples({"conversations": turns}, strict=False)
    assert "not JSON" in found


def test_a_record_of_xlam_is_read():
    record = {"query": USER["content"], "answers": json.dumps([OSLO]), "tools": json.dumps([WEATHER["function"]])}
    (found,) = examples(record, strict=False)
    assert replace(found, group=None) == prepare.Example([USER], ONE, tool_calls.render_calls([OSLO]), tools=[WEATHER])


def test_words_before_a_call_of_the_same_turn_are_no_answer():
    says = {"role": "assistant", "content": "I look it up."}
    found = list(examples({"messages": [USER, says, assistant(OSLO), RESULT, says], "tools": [WEATHER]}, strict=False))
    assert found[0] == "calls a tool where it is not the assistant's turn"
    assert [len(example.prompt) for example in found[1:]] == [4]


@pytest.mark.parametrize(
    "messages, usable, reason",
    [
        ([USER, assistant(OSLO), USER, assistant(OSLO)], 1, "message 2: comes after a call without a result"),
        ([USER, RESULT, assistant(OSLO)], 0, "message 1: a result without a call"),
        ([USER, assistant(OSLO), RESULT, RESULT, assistant(ROME)], 1, "message 3: a result without a call"),
        ([USER, {"role": "assistant", "content": "Hm."}, RESULT, assistant(OSLO)], 1, "message 2: a result without"),
        ([USER, assistant({**OSLO, "name": "w"}), RESULT, assistant(OSLO)], 1, "calls w, which is not among its tools"),
        ([USER, assistant(OSLO), RESULT, {"role": "assistant", "content": "{broken <tool_call>"}], 1, "read as a call"),
        ([USER, assistant({**OSLO, "arguments": {"city": "a" * 10_000_000}}), RESULT, assistant(OSLO)], 1, "too long"),
    ],
    ids=["no result", "no call", "two results", "result of words", "unknown tool", "broken words", "10 MB"],
)
def test_a_broken_turn_is_told_and_what_can_be_used_is_kept(messages, usable, reason):
    found = list(examples({"messages": messages, "tools": [WEATHER]}, strict=False))
    (problem,) = [each for each in found if isinstance(each, str)]
    assert reason in problem and len(problem) < 200
    assert len(found) == usable + 1


def test_a_prompt_of_10_mb_is_left_out_without_tokenizing_it():
    messages = [USER, assistant({**OSLO, "arguments": {"city": "a " * 5_000_000}}), RESULT, assistant(OSLO)]
    *_, last = examples({"messages": messages, "tools": [WEATHER]}, strict=False)
    assert prepare.too_long(None, 4096, last.messages(), last.tools) == "too_long"


def test_the_first_of_parallel_calls_may_have_the_only_result():
    messages = [USER, assistant(OSLO, ROME), RESULT, {"role": "assistant", "content": "Cold."}]
    calls, words = examples({"messages": messages, "tools": [WEATHER]}, strict=False)
    assert len(calls.ground_truth["calls"]) == 2 and words.ground_truth["calls"] == []


@pytest.mark.parametrize(
    "record, reason",
    [
        ({"messages": [USER, {"role": "assistant", "content": "No."}], "tools": [WEATHER]}, "no turn calls a tool"),
        ({"messages": [USER, assistant(OSLO)]}, "calls weather, which is not among its tools"),
        ({"messages": [USER, assistant({**OSLO, "name": "w"})], "tools": [WEATHER]}, "calls w, which is not"),
        ({"messages": [assistant(OSLO)], "tools": [WEATHER]}, "not the assistant's turn"),
        ({"messages": [USER, assistant(*[OSLO] * 65)], "tools": [WEATHER]}, "too many"),
        ({"messages": [USER, assistant({**OSLO, "arguments": "city=Oslo"})], "tools": [WEATHER]}, "not JSON"),
        ({"messages": [USER, assistant({**OSLO, "arguments": {"x": "a" * 40_000}})], "tools": [WEATHER]}, "too long"),
        ({"messages": 3}, "must be a non-empty list of messages"),
        ({}, "has no columns"),
    ],
)
def test_what_cannot_be_used_is_told(record, reason):
    (found,) = examples(record, strict=False)
    assert isinstance(found, str) and reason in found


def conversation_file(path, count):
    with path.open("w") as file:
        for i in range(count):
            first = {"role": "user", "content": f"Weather in city {i}?"}
            turns = [first, assistant(OSLO), RESULT, {"role": "assistant", "content": "Cold."}, USER, assistant(OSLO)]
            file.write(json.dumps({"messages": turns, "tools": [WEATHER]}) + "\n")
            file.write(json.dumps({"messages": [USER, {"role": "assistant", "content": "No."}]}) + "\n")


def file_settings(path):
    return SimpleNamespace(FILE=str(path), REWARD="instruct")


def test_what_cannot_be_used_is_counted_and_the_first_ten_are_shown(tmp_path, capsys):
    path = tmp_path / "data.jsonl"
    conversation_file(path, 20)
    found = from_file(file_settings(path))
    for _ in range(2):  # it can be read again
        assert [example is None for example in found].count(True) == 20
    assert capsys.readouterr().out.count("  cannot be used: ") == 10
    assert found.origin()[0]["file"] == str(path)


def test_turns_of_a_conversation_are_one_group(tmp_path):
    path = tmp_path / "data.jsonl"
    conversation_file(path, 20)
    groups = {}
    for example in filter(None, from_file(file_settings(path))):
        groups.setdefault(example.prompt[0]["content"], []).append(example.group)
    assert len(groups) == 20 and {len(group) for group in groups.values()} == {3}
    assert {len(set(group)) for group in groups.values()} == {1}
    assert len({group[0] for group in groups.values()}) == 20


def test_the_same_prompt_is_of_the_same_group_whatever_follows():
    messages = [{"role": "system", "content": "Be brief."}, USER, assistant(OSLO)]
    (one,) = examples({"messages": messages, "tools": [WEATHER]}, strict=False)
    two, _ = examples({"messages": [*messages, RESULT, assistant(ROME)], "tools": [WEATHER]}, strict=False)
    (other,) = examples({"messages": messages, "tools": [WEATHER, tool("f", {})]}, strict=False)
    assert one.prompt == two.prompt and one.group == two.group != other.group


def test_a_folder_with_its_own_split_keeps_it(tmp_path):
    for name in ("train", "test"):
        conversation_file(tmp_path / f"{name}.jsonl", 20)
    found = [example.split for example in from_file(file_settings(tmp_path)) if example]
    assert found == ["train"] * 60 + ["test"] * 60


# ---- dialogues made here


def made(difficulty, count, seed=42, reward="instruct"):
    source = generate(SimpleNamespace(SEED=seed, DIFFICULTY=difficulty, REWARD=reward))
    return list(islice(prepare.distinct(source), count))


@pytest.mark.medium
@pytest.mark.parametrize("reward", VARIANTS)
@pytest.mark.parametrize("difficulty, count", [("easy", 640), ("hard", 8192 + 512)])
def test_there_are_enough_dialogues_and_each_demonstration_is_right(difficulty, count, reward):
    found = made(difficulty, count, reward=reward)
    assert len(found) == count
    level = DIFFICULTIES[difficulty]
    for example in found[:1000]:
        truth = example.ground_truth
        assert score(example.demonstration, json.dumps(truth), reward)["score"] == 1.0
        assert len(truth["calls"]) <= level.calls and 1 <= len(example.tools) <= level.tools
        assert example.prompt[-1]["role"] in ("user", "tool")
        assert ("<think>" in example.demonstration) == (reward == "strict")


def test_dialogues_depend_on_the_seed_alone():
    assert made("hard", 50) == made("hard", 50) != made("hard", 50, seed=43)


@pytest.mark.parametrize("difficulty", DIFFICULTIES)
def test_no_prompt_is_the_beginning_of_another(difficulty):
    found = [example.prompt for example in made(difficulty, 2000)]
    whole = {json.dumps(prompt) for prompt in found}
    begun = {json.dumps(prompt[:end]) for prompt in found for end in range(1, len(prompt))}
    assert whole and begun and not whole & begun


def test_every_kind_of_dialogue_occurs():
    found = made("hard", 500)
    counts = {len(e.ground_truth["calls"]) for e in found}
    assert counts == {0, 1, 2, 3}
    assert {e.prompt[-1]["role"] for e in found if e.ground_truth["calls"]} == {"user", "tool"}
    names = [[call["name"] for call in e.ground_truth["calls"]] for e in found if len(e.ground_truth["calls"]) == 2]
    assert {len(set(pair)) for pair in names} == {1, 2}  # of one function, of two
    assert {name for e in found for name in [t["function"]["name"] for t in e.tools]} == {t.name for t in TOOLS}


TYPES = {"string": str, "integer": int, "number": (int, float), "boolean": bool, "array": list}


@pytest.mark.parametrize("one", TOOLS, ids=lambda one: one.name)
def test_what_is_asked_fits_the_schema_and_stands_in_the_words(one):
    rng = random.Random(0)
    parameters = one.schema()["function"]["parameters"]
    for _ in range(200):
        words, arguments = one.ask(rng)
        assert set(parameters["required"]) <= arguments.keys() <= parameters["properties"].keys()
        for name, value in arguments.items():
            assert isinstance(value, TYPES[parameters["properties"][name]["type"]])
            assert isinstance(value, bool) or all(
                str(part) in words for part in (value if isinstance(value, list) else [value])
            )
            assert value != parameters["properties"][name].get("default")


def test_a_chained_call_takes_its_arguments_from_the_result():
    chained = [d for d in islice(dialogues(random.Random(0), "hard"), 300) if d.messages[-1]["role"] == "tool"]
    assert len(chained) > 20
    for dialogue in chained:
        result = json.loads(dialogue.messages[-1]["content"])
        assert set(result.values()) <= set(dialogue.calls[0]["arguments"].values())


# ---- real rows


def real_examples():
    for name, strict in (("glaive_toolcall_en_demo.json", False), ("reason_tool_use_demo_50.jsonl", True)):
        for part in records.load(SHARED / name):
            for record in part:
                for found in examples(record, strict):
                    if not isinstance(found, str):
                        yield found, "strict" if strict else "instruct"


def mutations(calls):
    """Each call of ``calls`` changed in one way: what a right reward refuses."""
    yield calls[:-1]
    yield [*calls, calls[0]]
    yield [{**calls[0], "name": calls[0]["name"] + "_"}, *calls[1:]]
    for name, value in calls[0]["arguments"].items():
        others = [None, [value], {"x": value}, str(value) + "_", not value]
        if isinstance(value, int | float):
            others += [str(value), value + 1, bool(value)]
        for other in others:
            changed = copy.deepcopy(calls)
            changed[0]["arguments"][name] = other
            if type(other) is not type(value) or other != value:
                yield changed
    changed = copy.deepcopy(calls)
    changed[0]["arguments"]["never_heard_of"] = 1
    yield changed


@real_data
def test_real_demonstrations_are_right_and_every_mutation_is_wrong():
    seen = words = 0
    for example, variant in real_examples():
        truth = json.dumps(example.ground_truth)
        calls = example.ground_truth["calls"]
        head = example.demonstration.removesuffix(tool_calls.render_calls(calls))
        assert score(example.demonstration, truth, variant)["score"] == 1.0
        if not calls:
            call = tool_calls.render_calls([{"name": example.tools[0]["function"]["name"], "arguments": {}}])
            assert score(call, truth, variant)["score"] == score("", truth, variant)["score"] == 0.0
            words += 1
            continue
        assert score(head + tool_calls.render_calls(calls[::-1]), truth, variant)["score"] == 1.0
        for changed in mutations(calls):
            found = score(head + tool_calls.render_calls(changed), truth, variant)
            assert found["score"] == 0.0, (changed, calls)
        seen += 1
    assert seen > 250 and words > 300


# ---- metrics


def test_metrics():
    from tasks.tool_calling.evaluate import metrics

    def rows(*pairs):
        return [{"reward": score(response, truth)} for response, truth in pairs]

    wrong = tool_calls.render_calls([{**OSLO, "arguments": {"city": "Rome"}}])
    found = metrics(
        rows(
            (tool_calls.render_calls([OSLO]), ONE),
            (wrong, ONE),
            ("Hm.", ONE),
            ("<tool_call>", ONE),
            (wrong, NONE),
            ("No.", NONE),
        )
    )
    assert found == {"over_calling": 1 / 2, "no_call": 1 / 4, "wrong_arguments": 1 / 2}
    assert metrics(rows(("No.", NONE))) == {"over_calling": 0.0, "no_call": 0.0, "wrong_arguments": 0.0}
