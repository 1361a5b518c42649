"""tasks/common/data/prepare.py: train, dev, test and SFT files from a generator, a file or the hub."""

import functools
import json
import re
import sys
from dataclasses import replace
from datetime import date
from decimal import Decimal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tasks.countdown import prepare_data as countdown
from tests.helpers import exported, task_settings
from verl_tasks.data import prepare as prepare_module
from verl_tasks.data.prepare import Examples, describe, distinct, prepare
from verl_tasks.data.records import HubUnreachable, Records, load
from verl_tasks.rows import DataError, Example, chat, read_rows, rl_row, sft_row, validate_parquet
from verl_tasks.settings import ROOT, load_settings


@pytest.fixture(autouse=True)
def toy_rows_need_not_be_right(monkeypatch):
    """They are about the split; tests/test_gold.py has the refusal of data of which nothing is right."""
    monkeypatch.setattr("verl_tasks.data.prepare._refuse_nothing_right", lambda settings, entry: None)


def settings_for(**changes):
    """Settings of countdown for a few rows of data."""
    small = {"SOURCE": "toy", "INIT": "base", "SEED": "5", "FILE": "", "MAX_SAMPLES": "0", "MODEL": "/none"}
    small |= {
        "DEV_SIZE": "0",
        "TRAIN_SIZE": "20",
        "TEST_SIZE": "6",
        "TEST_SHARE": "1",
        "SFT_SIZE": "8",
        "TRAIN_BATCH_SIZE": "4",
        "MINI_BATCH_SIZE": "4",
    }
    return load_settings(defaults() | small | {name: str(value) for name, value in changes.items()})


@functools.cache
def defaults():
    return exported(ROOT / "tasks/countdown/train.sh", {})


class Fixed:
    """A source that can be read again."""

    def __init__(self, examples):
        self.examples = examples

    def __call__(self, settings):
        return self

    def __iter__(self):
        return iter(self.examples)


def examples(count, **fields):
    return [Example(f"say {number}", str(number), f"it is {number}", **fields) for number in range(count)]


def endless(settings):
    return (Example(f"make {number}", str(number)) for number in range(10**9))


def test_a_system_message_in_place_of_the_tasks_is_said(folder):
    """The task's says the form of the answer, and the prompt lacks it then."""
    own = [Example(chat(f"say {n}", "You are kind." if n < 7 else None), str(n), system="Be brief.") for n in range(26)]
    said = "7 prompts have a system message of their own in place of the task's"
    assert said in prepare(settings_for(), {"toy": lambda s: iter(own)})["note"]
    assert "system" not in prepare(settings_for(), {"toy": lambda s: iter(own[7:] + examples(40))})["note"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The data folder of the task."""
    monkeypatch.setenv("ARTIFACTS", str(tmp_path / "artifacts"))
    return tmp_path / "artifacts/data/countdown"


def generated(**changes):
    """The same with a dev set."""
    return settings_for(**{"DEV_SIZE": 4} | changes)


def prompts(path):
    return [row["prompt"][-1]["content"] for row in read_rows(path)]


def names(folder):
    return sorted(path.name for path in folder.iterdir())


# ---- a generator


def toy(settings):
    """Endless examples, each prompt twice, every third without a demonstration."""
    number = 0
    while True:
        demonstration = f"<answer>{number}</answer>" if number % 3 else None
        truth = {"target": number, "numbers": [number]}
        example = Example(f"say {settings.SEED} {number}", truth, demonstration)
        yield example
        yield example
        number += 1


def short(settings):
    """Twenty different prompts."""
    for index, example in enumerate(toy(settings)):
        if index == 40:
            return
        yield example


def broken(settings):
    yield from short(settings)
    raise DataError("toy: row 40: needs a column")


def test_prepare_writes_the_files_and_a_manifest(folder):
    settings = generated()
    manifest = prepare(settings, {"other": short, "toy": toy})
    assert names(folder) == ["dev.parquet", "manifest.json", "sft.parquet", "test.parquet", "train.parquet"]
    assert json.loads((folder / "manifest.json").read_text()) == manifest
    assert manifest["fingerprint"] == settings.data_fingerprint()
    assert (manifest["source"], manifest["seed"]) == ("toy", 5)
    assert manifest["rows"] == {"test": 6, "dev": 4, "train": 20, "sft": 8}
    for name, count in manifest["rows"].items():
        assert validate_parquet(folder / f"{name}.parquet", "sft" if name == "sft" else "rl") == count
    sides = (prompts(folder / f"{name}.parquet") for name in ("train", "dev", "test"))
    assert len(set().union(*sides)) == 30


def test_prepare_fills_the_rows(folder):
    prepare(generated(), {"toy": toy})
    for split in ("test", "dev", "train"):
        numbers = [int(prompt.split()[-1]) for prompt in prompts(folder / f"{split}.parquet")]
        assert numbers == sorted(numbers)  # as they were made
        for index, row in enumerate(read_rows(folder / f"{split}.parquet")):
            truth = {"target": numbers[index], "numbers": [numbers[index]]}
            assert row == rl_row("countdown", chat(f"say 5 {numbers[index]}"), truth, split, index)


def test_demonstrations_are_those_of_the_first_training_prompts_that_have_one(folder):
    prepare(generated(), {"toy": toy})
    rows = list(read_rows(folder / "sft.parquet"))
    training = [int(prompt.split()[-1]) for prompt in prompts(folder / "train.parquet")]
    expected = [number for number in training if number % 3][:8]
    assert rows == [sft_row(chat(f"say 5 {number}"), f"<answer>{number}</answer>") for number in expected]
    assert {row["messages"][0]["content"] for row in rows} <= set(prompts(folder / "train.parquet"))


def test_prepare_is_reproducible_and_follows_the_seed(folder):
    contents = []
    for seed in ("5", "5", "6"):
        prepare(generated(SEED=seed), {"toy": toy})
        contents.append([list(read_rows(folder / f"{name}.parquet")) for name in ("train", "test", "sft")])
    assert contents[0] == contents[1] != contents[2]


@pytest.mark.parametrize(
    ("name", "more", "changed"),
    [("TEST_SIZE", 9, {"test"}), ("DEV_SIZE", 9, {"dev"}), ("TRAIN_SIZE", 40, {"train"}), ("SFT_SIZE", 11, {"sft"})],
)
@pytest.mark.parametrize("source", ["toy", "countdown"])
def test_a_size_changes_its_own_side_alone_which_keeps_its_first_rows(folder, source, name, more, changed):
    sources = {"toy": toy, "countdown": countdown.generate}
    sides = []
    for changes in ({}, {name: more}):
        rows = prepare(generated(SOURCE=source, DIFFICULTY="easy", **changes), sources)["rows"]
        sides.append({side: list(read_rows(folder / f"{side}.parquet")) for side in rows})
    small, large = sides
    assert {side for side in small if small[side] != large[side]} == changed
    assert all(large[side][: len(small[side])] == small[side] for side in small)
    assert {side: len(large[side]) for side in changed} == {side: more for side in changed}


@pytest.mark.parametrize("changes", [{"SFT_SIZE": "0"}, {"SOURCE": "plain"}])
def test_data_without_demonstrations(folder, changes):
    def plain(settings):
        return (Example(example.prompt, example.ground_truth) for example in toy(settings))

    manifest = prepare(generated(**changes), {"toy": toy, "plain": plain})
    assert manifest["rows"] == {"test": 6, "dev": 4, "train": 20}
    assert names(folder) == ["dev.parquet", "manifest.json", "test.parquet", "train.parquet"]


@pytest.mark.parametrize(
    "source, message",
    [
        (short, "SOURCE=toy: has only 20 different prompts for TEST_SIZE=6, DEV_SIZE=4, TRAIN_SIZE=20"),
        (broken, "needs a column"),
    ],
)
def test_source_that_ends_early_is_refused_and_the_old_data_stay(folder, source, message):
    prepare(generated(), {"toy": toy})
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(DataError, match=rf"^[^\n]*{message}[^\n]*$"):
        prepare(generated(), {"toy": source})
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_source_with_exactly_enough_prompts(folder):
    assert prepare(generated(TRAIN_SIZE="10"), {"toy": short})["rows"] == {"test": 6, "dev": 4, "train": 10, "sft": 7}


def test_folder_as_source_goes_to_the_hub_reader(folder, tmp_path):
    seen = []

    def hub(settings):
        seen.append(settings.SOURCE)
        return toy(settings)

    manifest = prepare(generated(SOURCE=str(tmp_path)), {"generate": short, "hub": hub})
    assert seen == [str(tmp_path)] == [manifest["source"]]
    with pytest.raises(DataError, match=r"^SOURCE="):
        prepare(generated(SOURCE=str(tmp_path)), {"generate": short})


@pytest.mark.parametrize("patience, expected", [(1, ["a"]), (2, ["a", "b"]), (3, ["a", "b", "c"])])
def test_distinct_ends_after_repeats_in_a_row(patience, expected):
    examples = (Example(prompt, "1") for prompt in "aabaacaaaadaaaa")
    assert [example.prompt for example in distinct(examples, patience)] == expected


def test_without_a_dev_set_no_file_is_written(folder):
    prepare(generated(), {"toy": toy})
    assert prepare(generated(DEV_SIZE="0"), {"toy": toy})["rows"] == {"test": 6, "train": 20, "sft": 8}
    assert names(folder) == ["manifest.json", "sft.parquet", "test.parquet", "train.parquet"]


# ---- the same problem in other words


def reworded(settings):
    """Each problem twice, in other words."""
    for number in range(1000):
        for words in ("say", "write"):
            yield Example(f"{words} {number}", str(number), key=str(number))


@pytest.mark.parametrize("again", [False, True])
def test_a_problem_is_taken_once_whatever_its_prompt(folder, small_model, again):
    source = (lambda s: list(reworded(s))) if again else reworded
    prepare(generated(MODEL=str(small_model)), {"toy": source})
    rows = [row for name in ("train", "dev", "test") for row in read_rows(folder / f"{name}.parquet")]
    keys = [row["extra_info"]["key"] for row in rows]
    assert len(keys) == len({*keys}) == 30
    assert [row["prompt"][0]["content"].split()[1] for row in rows] == keys


def test_turns_of_a_conversation_are_on_one_side_and_the_conversations_are_counted(folder, small_model):
    def turns(settings):
        numbers = [(number, turn) for number in range(30) for turn in range(1 + number % 3)]
        return [Example(f"say {number} {turn}", "1", group=f"c{number}") for number, turn in numbers]

    manifest = prepare(generated(MODEL=str(small_model)), {"toy": turns})
    keys = {name: set() for name in ("train", "dev", "test")}
    for name, found in keys.items():
        for row in read_rows(folder / f"{name}.parquet"):
            found.add((row["extra_info"]["key"], row["prompt"][0]["content"].split()[1]))
    assert manifest["groups"] == {name: len(found) for name, found in keys.items()}
    assert len({key for key, _ in set.union(*keys.values())}) == sum(map(len, keys.values()))
    rows = manifest["rows"]
    assert f"{rows['test']} test (of {len(keys['test'])} conversations)" in describe(manifest)
    assert len({number for _, number in set.union(*keys.values())}) == sum(map(len, keys.values()))


# ---- what can be read again: split by seed, filtered, cut, counted


def test_finite_source_gives_what_there_is(folder, small_model):
    manifest = prepare(settings_for(MODEL=small_model, TRAIN_SIZE=50), {"toy": Fixed(examples(30))})
    assert manifest["rows"] == {"test": 6, "train": 24, "sft": 8}
    assert manifest["note"] == "TRAIN_SIZE=50: there are 24"
    assert manifest["note"] in describe(manifest)
    for name, count in manifest["rows"].items():
        assert validate_parquet(folder / f"{name}.parquet", "sft" if name == "sft" else "rl") == count
    sft = [row["messages"][0]["content"] for row in read_rows(folder / "sft.parquet")]
    assert sft == prompts(folder / "train.parquet")[:8]
    assert json.loads((folder / "manifest.json").read_text()) == manifest


@pytest.mark.parametrize(
    ("given", "rows", "note"),
    [
        (
            {},
            {"test": 17, "dev": 15, "train": 138, "sft": 8},
            "TEST_SIZE=128: 17, all of a test split or TEST_SHARE=0.1",
        ),
        ({"TEST_SIZE": "0.2"}, {"test": 34, "dev": 13, "train": 123, "sft": 8}, ""),
        ({"TEST_SIZE": "100"}, {"test": 100, "dev": 7, "train": 63, "sft": 8}, ""),
    ],
)
def test_the_test_set_of_a_small_file_on_small_hardware(folder, small_model, given, rows, note):
    chosen = {"SOURCE": "toy", "MODEL": str(small_model), "SFT_SIZE": "8", "INIT": "base"}
    settings = task_settings("countdown", chosen | given)
    manifest = prepare(settings, {"toy": Fixed(examples(170))})
    assert manifest["rows"] == rows and manifest["note"].startswith(note)
    assert ("TEST_SIZE" in describe(manifest)) == bool(note)
    assert f"{rows['test']} test, {rows['dev']} dev, {rows['train']} train" in describe(manifest).splitlines()[0]


def test_all_that_a_finite_source_has(folder, small_model):
    settings = settings_for(MODEL=small_model, TRAIN_SIZE=0, TEST_SIZE=0.1)
    manifest = prepare(settings, {"toy": Fixed([*examples(30), *examples(4), None])})
    assert manifest["rows"] == {"test": 3, "train": 27, "sft": 8}
    assert {reason: count for reason, count in manifest["dropped"].items() if count} == {"unusable": 1, "duplicates": 4}
    assert "dropped: 1 unusable, 4 duplicates" in describe(manifest)
    assert len(describe(manifest).splitlines()) == 3  # the last: the gold check


def test_duplicates_with_another_ground_truth_are_counted_apart(folder, small_model):
    repeated = [replace(example, ground_truth="other") for example in examples(3)]
    manifest = prepare(settings_for(MODEL=small_model), {"toy": Fixed([*examples(26), *examples(4), *repeated])})
    assert "dropped: 7 duplicates, 3 of them with another ground truth" in describe(manifest).splitlines()[1]


def test_long_prompts_are_dropped_by_the_model_s_own_tokens(folder, small_model):
    given = [*examples(20), *[Example(f"say {number} " + "x" * 100, "1") for number in range(5)]]
    # 24 tokens are special or of the template, the rest is a token a byte
    manifest = prepare(settings_for(MODEL=small_model, MAX_PROMPT_LENGTH=60), {"toy": Fixed(given)})
    assert (manifest["dropped"]["too_long"], manifest["rows"]["train"]) == (5, 14)
    assert (manifest["tokenizer"], manifest["max_prompt_tokens"]) == (str(small_model), 60)


def test_long_prompts_of_a_generator_are_counted(folder, small_model):
    def some(settings):
        yield from (Example(f"say {number}{' more' * (number % 5 == 0)}", "1") for number in range(100, 900))

    s = settings_for(MODEL=small_model, MAX_PROMPT_LENGTH=48)
    manifest = prepare(s, {"toy": some})
    rows = [row for name in ("train", "test") for row in read_rows(folder / f"{name}.parquet")]
    long = sum(row["prompt"][0]["content"].endswith("more") for row in rows)
    said = f"{long} of 26 prompts are longer than MAX_PROMPT_LENGTH=48 and are left out; set MAX_PROMPT_LENGTH=53"
    assert long and said in describe(manifest, s).splitlines()[1]
    roomy = replace(s, MAX_PROMPT_LENGTH=53)
    assert "longer" not in describe(prepare(roomy, {"toy": some}), roomy)
    assert "longer" not in describe(manifest, replace(s, MODEL="/none"))  # it has other tokens


def test_length_at_the_limit_stays(folder, small_model):
    tokenizer = prepare_module.load_tokenizer(str(small_model))
    messages = [{"role": "user", "content": "hello"}]
    length = len(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"])
    assert prepare_module.too_long(tokenizer, length, messages, None) is None
    assert prepare_module.too_long(tokenizer, length - 1, messages, None) == "too_long"


def test_a_model_without_tokenizer_is_named_where_one_is_needed(folder):
    assert prepare(settings_for(MODEL="/nowhere"), {"toy": endless})["rows"] == {"test": 6, "train": 20}
    with pytest.raises(DataError, match=r"^MODEL=/nowhere: no tokenizer[^\n]*$"):
        prepare(settings_for(MODEL="/nowhere"), {"toy": Fixed(examples(30))})


@pytest.mark.parametrize(
    "changes, given, message",
    [
        ({"TEST_SIZE": 6}, examples(8), r"only 2 training prompts, less than TRAIN_BATCH_SIZE=4"),
        ({"TEST_SIZE": 6}, examples(6), r"6 for the test set, 0 to train on"),
        ({"MAX_PROMPT_LENGTH": 5}, examples(30), r"no usable row \(30 too long\); raise MAX_PROMPT_LENGTH"),
    ],
)
def test_too_little_is_refused_and_the_old_data_stays(folder, small_model, changes, given, message):
    def data() -> dict[str, bytes]:  # the log is of the last check
        return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".log"}

    before = prepare(settings_for(MODEL=small_model), {"toy": Fixed(examples(40))})
    kept = data()
    with pytest.raises(DataError, match=rf"^SOURCE=toy: [^\n]*{message}[^\n]*$"):
        prepare(settings_for(MODEL=small_model, **changes), {"toy": Fixed(given)})
    assert data() == kept
    assert before["rows"]["train"] == 20


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({"TRAIN_SIZE": 40, "TEST_SIZE": 0.2}, (40, 10)),
        ({"TRAIN_SIZE": 0, "TEST_SIZE": 0.05, "MAX_SAMPLES": 100}, (95, 5)),
        ({"TRAIN_SIZE": 40, "TEST_SIZE": 5, "MAX_SAMPLES": 30}, (25, 5)),
        ({"TRAIN_SIZE": 10, "TEST_SIZE": 5, "MAX_SAMPLES": 30}, (10, 5)),
    ],
)
def test_sizes_of_a_generator(folder, changes, expected):
    rows = prepare(settings_for(**changes), {"toy": endless})["rows"]
    assert (rows["train"], rows["test"]) == expected


@pytest.mark.parametrize(
    "changes, needed",
    [
        ({"TEST_SIZE": 16, "DEV_SIZE": 4, "MAX_SAMPLES": 19}, "16 \\+ 4"),
        ({"TEST_SIZE": 0.5, "DEV_SIZE": 16, "MAX_SAMPLES": 20, "TRAIN_SIZE": 0}, "10 \\+ 16"),
    ],
)
def test_generator_needs_more_samples_than_are_held_out(folder, changes, needed):
    message = (
        rf"^SOURCE=toy: MAX_SAMPLES={changes['MAX_SAMPLES']} must exceed TEST_SIZE \+ DEV_SIZE \({needed} prompts\)$"
    )
    with pytest.raises(DataError, match=message):
        prepare(settings_for(**changes), {"toy": endless})


@pytest.mark.parametrize("changes", [{"TRAIN_SIZE": 0}, {"TEST_SIZE": 0, "MAX_SAMPLES": 9}])
def test_generator_has_no_all(folder, changes):
    with pytest.raises(DataError, match=r"^SOURCE=toy: a generator needs a number[^\n]*set TEST_SIZE and TRAIN_SIZE$"):
        prepare(settings_for(**changes), {"toy": endless})


TOOL = {"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "f", "arguments": {}}}
CALLED = [
    {"role": "user", "content": "call"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "2"},
]


@pytest.mark.parametrize("finite", [True, False])
@pytest.mark.parametrize("place", [0, 15])
def test_tools_are_kept_wherever_they_come_first(folder, small_model, finite, place):
    given = examples(40)
    given[place] = Example(CALLED, "1", tools=[TOOL])
    source = Fixed(given) if finite else lambda settings: iter(given)
    prepare(settings_for(MODEL=small_model, TEST_SIZE=1, TRAIN_SIZE=39, MAX_PROMPT_LENGTH=5000), {"toy": source})
    rows = [row for name in ("train", "test") for row in read_rows(folder / f"{name}.parquet")]
    (row,) = [row for row in rows if len(row["prompt"]) == 3]
    assert json.loads(row["extra_info"]["tools"]) == [TOOL]
    assert row["prompt"][1]["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}


# ---- prepare: which source


def unreachable(settings):
    raise HubUnreachable("openai/x, split train: the hub cannot be reached (no network)")


class Later(Fixed):
    """Fails only when it is read."""

    def __iter__(self):
        yield from unreachable(None)


SOURCES = {"hub": Fixed(examples(40)), "generate": endless, "file": Fixed(examples(40))}


@pytest.mark.parametrize(
    "changes, sources, expected",
    [
        ({"SOURCE": "auto", "DIFFICULTY": "hard"}, SOURCES, ("hub", "")),
        ({"SOURCE": "auto", "DIFFICULTY": "easy"}, SOURCES, ("generate", "DIFFICULTY=easy")),
        ({"SOURCE": "auto", "FILE": "x.jsonl"}, SOURCES, ("file", "")),
        ({"SOURCE": "generate"}, SOURCES, ("generate", "")),
        ({"SOURCE": "auto", "DIFFICULTY": "hard"}, SOURCES | {"hub": unreachable}, ("generate", "no network")),
        ({"SOURCE": "auto", "DIFFICULTY": "hard"}, SOURCES | {"hub": Later([])}, ("generate", "no network")),
        ({"SOURCE": "auto", "DIFFICULTY": "hard"}, {"generate": endless}, ("generate", "")),
        ({"SOURCE": "auto", "DIFFICULTY": "easy"}, {"hub": Fixed(examples(40))}, ("hub", "")),
    ],
)
def test_source_that_is_taken(folder, small_model, tmp_path, changes, sources, expected):
    if "FILE" in changes:
        changes = changes | {"FILE": write_lines(tmp_path / "x.jsonl", [{"question": "q"}])}
    settings = settings_for(MODEL=small_model, **changes)
    manifest = prepare(settings, sources)
    assert manifest["source"] == expected[0]
    assert expected[1] in manifest["note"] and bool(manifest["note"]) == bool(expected[1])
    assert expected[1] in describe(manifest)


@pytest.mark.parametrize(
    "changes, sources, message",
    [
        ({"SOURCE": "hub"}, SOURCES | {"hub": unreachable}, "the hub cannot be reached"),
        ({"SOURCE": "auto", "DIFFICULTY": "hard"}, {"hub": unreachable}, "the hub cannot be reached"),
        (
            {"SOURCE": "auto", "DIFFICULTY": "hard", "TRAIN_SIZE": 0},
            SOURCES | {"hub": unreachable},
            r"SOURCE=generate: .*set TEST_SIZE and TRAIN_SIZE \(generated here, for openai/x",
        ),
        ({"FILE": "x.jsonl"}, {"generate": endless}, "FILE=x.jsonl: this task reads no files"),
        ({"SOURCE": "file"}, SOURCES, "SOURCE=file: set FILE"),
        ({"SOURCE": "auto", "DIFFICULTY": "hard"}, {"file": endless}, "for a data file set FILE"),
        ({"SOURCE": "x"}, SOURCES, "SOURCE=x: this task knows hub, generate, file, or a folder of the hub's form"),
        ({"SOURCE": "/"}, {"generate": endless, "file": endless}, "SOURCE=/: this task knows generate, file$"),
    ],
)
def test_source_that_cannot_be_taken(folder, small_model, changes, sources, message):
    with pytest.raises(DataError, match=rf"^[^\n]*{message}[^\n]*$"):
        prepare(settings_for(MODEL=small_model, **changes), sources)
    assert not (folder / "manifest.json").exists()


def convert(record):
    """Two examples of a record, none where it has no answer."""
    if not isinstance(record.get("question"), str):
        raise DataError("needs the text `question`")
    if record.get("answer"):
        yield Example(record["question"], record["answer"])
        yield Example(record["question"] + " again", record["answer"])


def write_lines(path, records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def from_file(settings):
    return Examples(load(settings.FILE), convert)


def test_file_with_its_manifest(folder, tmp_path, small_model):
    path = write_lines(tmp_path / "x.jsonl", [{"question": f"q{n}", "answer": "1" if n > 1 else ""} for n in range(40)])
    manifest = prepare(settings_for(MODEL=small_model, FILE=path, TRAIN_SIZE=0), {"file": from_file})
    assert manifest["rows"] == {"test": 6, "train": 70}
    assert manifest["dropped"]["unusable"] == 2
    assert manifest["origin"] == [Records(path).origin()]
    assert manifest["origin"][0]["bytes"] == path.stat().st_size
    assert f"{path} (sha256 {manifest['origin'][0]['sha256'][:12]})" in describe(manifest)


def test_columns_that_a_task_does_not_read_are_named(folder, tmp_path, small_model):
    rows = [
        {"question": f"q{n}", "answer": "1" if n else "", "context": f"c{n}", "source": "web", "x": ""}
        for n in range(40)
    ]
    for path in (write_lines(tmp_path / "x.jsonl", rows), tmp_path / "x.parquet"):
        if path.suffix == ".parquet":
            pq.write_table(pa.Table.from_pylist(rows), path)
        manifest = prepare(settings_for(MODEL=small_model, FILE=path, TRAIN_SIZE=0), {"file": from_file})
        assert manifest["not_used"] == ["context", "source"] and "not used: context, source" in describe(manifest)


def test_nulls_that_parquet_cannot_tell_from_missing_keys_are_named(folder, tmp_path, small_model):
    answers = [{"rows": [{"from": n, "sum": n or None}]} for n in range(40)]
    rows = [{"question": f"q{n}", "answer": answer, "x": {"y": None}} for n, answer in enumerate(answers)]
    pq.write_table(pa.Table.from_pylist(rows), path := tmp_path / "x.parquet")
    manifest = prepare(settings_for(MODEL=small_model, FILE=path, TRAIN_SIZE=0), {"file": from_file})
    assert "not used: nulls in answer.rows.sum" in describe(manifest)
    truths = [json.loads(row["reward_model"]["ground_truth"]) for row in read_rows(folder / "train.parquet")]
    assert {"rows": [{"from": 1, "sum": 1}]} in truths


def test_record_that_a_task_cannot_use_is_named(folder, tmp_path, small_model):
    path = write_lines(tmp_path / "x.jsonl", [{"question": "q", "answer": "1"}, {"question": 3}])
    with pytest.raises(DataError, match=rf"^{path}: line 2: needs the text `question`$"):
        prepare(settings_for(MODEL=small_model, FILE=path), {"file": from_file})
    assert not (folder / "manifest.json").exists()


def main_said(monkeypatch, sources, **changes) -> str:
    """What prepare_data.py ends with, with exit code 1."""
    monkeypatch.setattr(prepare_module, "load_settings", lambda: settings_for(**changes))
    with pytest.raises(SystemExit) as error:
        prepare_module.main(sources)
    return str(error.value)


@pytest.mark.parametrize(
    ("fails", "said"),
    [
        (lambda: {}["zebra"], "KeyError: 'zebra'"),
        (lambda: sys.exit(3), "SystemExit: 3"),
        (lambda: sys.exit(), "SystemExit"),
    ],
)
def test_what_a_generator_raises_is_one_line_with_its_place_and_its_example(folder, monkeypatch, fails, said):
    def generate(settings):
        yield examples(1)[0]
        fails()

    told = main_said(monkeypatch, {"toy": generate})
    assert re.fullmatch(rf"error: {said} \(tests/test_prepare.py:\d+, in \S+\); in example 2; traceback: \S+", told)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        *(
            ({"ground_truth": {"v": [value]}}, r"the ground truth must be text or a JSON value \(.*; convert it first$")
            for value in (Decimal("1.50"), date(2024, 1, 2), b"x", float("nan"))  # as parquet and pandas have them
        ),
        ({"tools": [{"name": "ls", "parameters": {1}}]}, "the tools must be text or a JSON value"),
        ({"demonstration": [{"role": "tool", "content": None}]}, "the demonstration must be text, or messages"),
        *(({"demonstration": five}, "the demonstration must be text, or messages, is .*5") for five in (5, ["5"])),
        ({"prompt": [{"role": "user", "content": None}]}, "the prompt each message needs a text content"),
        ({"prompt": [{"role": "x", "content": "y"}]}, "the prompt each message needs a role"),
    ],
)
def test_an_example_that_no_file_can_hold_is_named(folder, tmp_path, fields, said):
    bad = replace(Example("q", "1", "a"), **fields)
    with pytest.raises(DataError, match=f"x.jsonl: line 1: {said}"):
        list(Examples(load(write_lines(tmp_path / "x.jsonl", [{}])), lambda _: [bad]))
    with pytest.raises(DataError, match=f"^example 2: {said}"):
        prepare(settings_for(), {"toy": lambda _: iter([Example("p", "1"), bad, *examples(9)])})


def test_what_is_no_example_is_named(folder, monkeypatch):
    told = main_said(monkeypatch, {"toy": lambda settings: iter([*examples(2), "text"])})
    assert told == "error: example 3 is no prepare.Example, but 'text'"


def test_what_raises_on_a_record_is_told_with_the_records_place(folder, monkeypatch, tmp_path, small_model):
    path = write_lines(tmp_path / "x.jsonl", [{"question": "q", "answer": "1"}, {"question": "r"}])

    def source(settings):
        return Examples(load(path), lambda record: [Example(record["question"], {}[record["answer"]])])

    told = main_said(monkeypatch, {"file": source}, MODEL=small_model, FILE=path)
    assert f"; {path}: line 1; traceback: " in told and "KeyError: '1' (tests/test_prepare.py:" in told
