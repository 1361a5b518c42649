"""data/split.py, and how prepare.py treats what can be read again: split by seed, filtered, cut, counted."""

import functools
import json
import random
import tracemalloc
from dataclasses import dataclass, replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.common.data import prepare as prepare_module
from tasks.common.data.prepare import Examples, describe, prepare
from tasks.common.data.records import HubUnreachable, Records, load
from tasks.common.data.split import Form, Sizes, SplitError, choose, key, write_split
from tasks.common.rows import DataError, Example, read_rows, validate_parquet
from tasks.common.settings import ROOT, load_settings
from tests.helpers import exported


@pytest.fixture(autouse=True)
def toy_rows_need_not_be_right(monkeypatch):
    """They are about the split; tests/test_gold.py has the refusal of data of which nothing is right."""
    monkeypatch.setattr("tasks.common.data.prepare._refuse_nothing_right", lambda settings, entry: None)


@dataclass(frozen=True)
class Item:
    """A row to be: its prompt, the rest of it, and the split that its source has."""

    prompt: str
    rest: str = ""
    split: str | None = None


SCHEMA = pa.schema([("prompt", pa.string()), ("rest", pa.string()), ("split", pa.string()), ("index", pa.int64())])
FORM = Form(
    identity=lambda item: (item.prompt, item.rest),
    row=lambda item, name, index: {"prompt": item.prompt, "rest": item.rest, "split": name, "index": index},
    schema=lambda tools: SCHEMA,
)


def items(count, **fields):
    return [Item(f"prompt {number}", **fields) for number in range(count)]


def done(given, folder, sizes=Sizes(), seed=1, form=FORM):  # noqa: B008
    """Rows of train and test, and counts of what was dropped."""
    rows, dropped = write_split(given, folder, form, sizes, seed)
    written = {name: list(read_rows(folder / f"{name}.parquet")) for name in ("train", "test")}
    assert {name: len(found) for name, found in written.items()} == rows
    assert sorted(path.name for path in folder.iterdir()) == ["test.parquet", "train.parquet"]
    for name, found in written.items():
        assert [(row["split"], row["index"]) for row in found] == [(name, index) for index in range(len(found))]
    return written["train"], written["test"], {reason: count for reason, count in dropped.items() if count}


def prompts(rows):
    return [row["prompt"] for row in rows]


@pytest.mark.parametrize(
    "count, sizes, expected",
    [
        (100, Sizes(), (95, 5, {})),
        (100, Sizes(test=7), (93, 7, {})),
        (100, Sizes(test=99), (1, 99, {})),
        (100, Sizes(test=99, share=0.1), (90, 10, {})),
        (100, Sizes(test=0.3, share=0.1), (70, 30, {})),
        (100, Sizes(limit=50, test=9, share=0.1), (45, 5, {"over_limit": 50})),
        (3, Sizes(test=2, share=0.1), (2, 1, {})),
        (100, Sizes(limit=40, test=0.25), (30, 10, {"over_limit": 60})),
        (100, Sizes(limit=40, test=10, train=20), (20, 10, {"over_limit": 70})),
        (100, Sizes(limit=1000, train=1000), (95, 5, {})),
        (2500, Sizes(), (2375, 125, {})),
    ],
)
def test_sizes(tmp_path, count, sizes, expected):
    train, test, dropped = done(items(count), tmp_path, sizes)
    assert (len(train), len(test), dropped) == expected
    assert len({*prompts(train), *prompts(test)}) == len(train) + len(test)


def dev_of(given, folder, **sizes):
    write_split(given, folder, FORM, Sizes(**sizes), 1)
    return prompts(read_rows(folder / "dev.parquet"))


def test_the_dev_set_is_of_what_would_train_and_at_most_a_tenth_of_it(tmp_path):
    test = prompts(done(items(300), tmp_path, Sizes(test=20))[1])
    dev = dev_of(items(300), tmp_path, test=20, dev=16)
    assert len(dev) == 16 and prompts(read_rows(tmp_path / "test.parquet")) == test
    assert len({*dev, *test, *prompts(read_rows(tmp_path / "train.parquet"))}) == 300
    assert len(dev_of(items(120), tmp_path, test=20, dev=16)) == 10
    assert len(dev_of(items(22), tmp_path, test=20, dev=16)) == 1
    # The same rows whatever else is asked for.
    assert dev_of(items(300), tmp_path, test=20, dev=16, train=30) == dev
    assert dev_of(random.Random(1).sample(items(300), 300), tmp_path, test=20, dev=16, limit=250) == dev


def test_rows_of_one_prompt_are_not_divided_between_dev_and_train(tmp_path):
    given = [Item(f"prompt {number % 50}", f"answer {number}") for number in range(1000)]
    dev = dev_of(given, tmp_path, test=20, dev=30)
    assert len(dev) == 40 and not {*dev} & {*prompts(read_rows(tmp_path / "train.parquet"))}


def test_split_depends_on_prompt_and_seed_and_not_on_the_place(tmp_path):
    given = items(300)
    first = done(given, tmp_path)
    shuffled = random.Random(3).sample(given, len(given))
    assert done(shuffled, tmp_path) == first  # the rows stand in the same order, too
    assert done(given, tmp_path, seed=2) != first
    assert prompts(first[0]) != sorted(prompts(first[0]), key=prompts_number)


def prompts_number(prompt):
    return int(prompt.split()[-1])


def test_a_row_keeps_its_side_when_others_come_and_go(tmp_path):
    _, test, _ = done(items(400), tmp_path, Sizes(test=0.5))
    _, fewer, _ = done(items(400)[100:], tmp_path, Sizes(test=0.5))
    kept = [prompt for prompt in prompts(test) if prompts_number(prompt) >= 100]
    assert len({*kept} & {*prompts(fewer)}) > 0.9 * len(kept)


def test_a_count_of_test_rows_is_the_same_whatever_the_limit(tmp_path):
    tests = [prompts(done(items(300), tmp_path, Sizes(limit=limit, test=20))[1]) for limit in (0, 50, 200)]
    assert tests[0] == tests[1] == tests[2]


def test_duplicates_are_taken_once_and_counted(tmp_path):
    train, test, dropped = done([*items(100), *items(60), *items(10)], tmp_path)
    assert (len(train) + len(test), dropped) == (100, {"duplicates": 70})


def test_rows_of_one_prompt_go_to_one_side(tmp_path):
    given = [Item(f"prompt {number % 50}", f"answer {number}") for number in range(1000)]
    train, test, dropped = done([*given, *given[:30]], tmp_path, Sizes(test=15))
    assert (len(train), len(test), dropped) == (980, 20, {"duplicates": 30})
    assert not {*prompts(train)} & {*prompts(test)}


def test_test_split_of_the_source_stays_its_own(tmp_path):
    given = [*items(50, split="train"), *[Item(f"prompt {number}", split="test") for number in range(45, 60)]]
    train, test, dropped = done(given, tmp_path, Sizes(test=0))
    assert {*prompts(test)} == {f"prompt {number}" for number in range(45, 60)}
    assert {*prompts(train)} == {f"prompt {number}" for number in range(45)}
    assert dropped == {"with_a_prompt_of_the_test_split": 5}
    _, test, dropped = done(given, tmp_path, Sizes(test=4))
    assert (len(test), dropped) == (4, {"with_a_prompt_of_the_test_split": 5, "over_limit": 11})
    assert done([*given, *given[:48]], tmp_path, Sizes(test=0))[2] == {
        "duplicates": 48,
        "with_a_prompt_of_the_test_split": 5,
    }
    train, test, dropped = done(given, tmp_path, Sizes(limit=30, test=0))
    assert (len(train) + len(test), dropped) == (
        30,
        {"with_a_prompt_of_the_test_split": 5, "over_limit": 30},
    )
    assert {*prompts(test)} <= {f"prompt {number}" for number in range(45, 60)}


def test_a_small_limit_keeps_a_row_of_the_own_test_split(tmp_path):
    given = [*items(500, split="train"), Item("test", split="test")]
    for seed in range(5):
        train, test, _ = done(given, tmp_path, Sizes(limit=10, test=0), seed)
        assert (len(train), prompts(test)) == (9, ["test"])


def test_what_cannot_be_used_is_counted_by_reason(tmp_path):
    form = Form(FORM.identity, FORM.row, FORM.schema, problem=lambda i: "too_long" if i.prompt.endswith("7") else None)
    given = [None, *items(100), None, *items(8)]
    assert done(given, tmp_path, form=form)[2] == {"unusable": 2, "too_long": 11, "duplicates": 7}


@pytest.mark.parametrize(
    "given, sizes, message",
    [
        ([None, None], Sizes(), r"no usable row \(2 unusable\)"),
        (items(1), Sizes(), "only 1 different rows: 1 for the test set, 0 to train on"),
        (items(10), Sizes(test=10), "only 10 different rows: 10 for the test set, 0 to train on"),
        (items(10), Sizes(test=0), "no test split of its own: set TEST_SIZE"),
        (items(10, split="test"), Sizes(test=0), "0 to train on"),
        (
            [*items(10, split="train"), *items(12, split="test")],
            Sizes(test=5),
            "^all 10 training rows have a prompt of the test split; take other training rows$",
        ),
        ([Item("same", str(number)) for number in range(9)], Sizes(), "9 for the test set, 0 to train on"),
    ],
)
def test_too_few_rows_are_refused_and_leave_nothing(tmp_path, given, sizes, message):
    with pytest.raises(SplitError, match=message):
        write_split(given, tmp_path, FORM, sizes, 1)
    assert list(tmp_path.iterdir()) == []


PROMPT_NUMBERS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 3), st.booleans()), min_size=1, max_size=120)


@settings(max_examples=150)
@given(
    PROMPT_NUMBERS, st.integers(0, 60), st.sampled_from([0, 0.05, 0.5, 1, 5, 30]), st.integers(0, 30), st.integers(0, 9)
)
def test_choice_is_disjoint_and_within_its_sizes(numbers, limit, test_size, train_size, dev_size):
    rows = [(key(1, str(prompt), str(rest)), own) for prompt, rest, own in numbers]
    own, others = (sorted({k for k, own in rows if own is of_test}) for of_test in (True, False))
    try:
        test, dev, train, leaked = choose(own, others, Sizes(limit, test_size, train_size, dev_size))
    except SplitError:
        return
    assert test and train
    of_sides = [{k >> 24 for k in side} for side in (test, dev, train)]
    assert sum(map(len, of_sides)) == len(set.union(*of_sides))
    assert {*test, *dev, *train} <= {*own, *others}
    assert len(test) + len(dev) + len(train) <= len(own) + len(others) - leaked
    assert not train_size or len(train) <= train_size
    assert len(of_sides[1]) <= dev_size
    assert not limit or len(test) + len(dev) + len(train) <= limit
    if own:
        assert {*test} <= {*own}
        assert test_size < 1 or len(test) <= test_size


def peak(count, folder):
    """Bytes that Python has at most while ``count`` rows are split."""

    class Made:
        def __iter__(self):
            return (Item(f"prompt {number} {'x' * 200}") for number in range(count))

    tracemalloc.start()
    try:
        write_split(Made(), folder, FORM, Sizes(), 1)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.medium
def test_a_row_takes_little_more_memory_than_its_text(tmp_path):
    few, many = peak(10_000, tmp_path), peak(60_000, tmp_path)
    assert (many - few) / 50_000 < 600  # bytes a row: its text has 270


# ---- prepare


def settings_for(**changes):
    """Settings of countdown for a few rows of data."""
    small = {"SOURCE": "toy", "INIT": "base", "SEED": "5", "FILE": "", "MAX_SAMPLES": "0"}
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


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The data folder of the task."""
    monkeypatch.setenv("ARTIFACTS", str(tmp_path / "artifacts"))
    return tmp_path / "artifacts/data/countdown"


def said(path):
    return [row["prompt"][-1]["content"] for row in read_rows(path)]


def test_finite_source_gives_what_there_is(folder, small_model):
    manifest = prepare(settings_for(MODEL=small_model, TRAIN_SIZE=50), {"toy": Fixed(examples(30))})
    assert manifest["rows"] == {"test": 6, "train": 24, "sft": 8}
    assert manifest["note"] == "TRAIN_SIZE=50: there are 24"
    assert manifest["note"] in describe(manifest)
    for name, count in manifest["rows"].items():
        assert validate_parquet(folder / f"{name}.parquet", "sft" if name == "sft" else "rl") == count
    sft = [row["messages"][0]["content"] for row in read_rows(folder / "sft.parquet")]
    assert sft == said(folder / "train.parquet")[:8]
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
    settings = load_settings(exported(ROOT / "tasks/countdown/train.sh", chosen | given))
    manifest = prepare(settings, {"toy": Fixed(examples(170))})
    assert manifest["rows"] == rows and manifest["note"].startswith(note)
    assert ("TEST_SIZE" in describe(manifest)) == bool(note)
    assert f"{rows['test']} test, {rows['dev']} dev, {rows['train']} train" in describe(manifest).splitlines()[0]


def test_a_test_split_of_its_own_counts_whole(folder, small_model):
    chosen = {"SOURCE": "toy", "MODEL": str(small_model), "TRAIN_BATCH_SIZE": "4"}
    settings = load_settings(exported(ROOT / "tasks/countdown/train.sh", chosen))
    own = [Example(f"ask {number}", str(number), split="test") for number in range(40)]
    assert prepare(settings, {"toy": Fixed([*examples(40), *own])})["rows"]["test"] == 40


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


def test_length_at_the_limit_stays(folder, small_model):
    tokenizer = prepare_module.load_tokenizer(str(small_model))
    messages = [{"role": "user", "content": "hello"}]
    length = len(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"])
    assert prepare_module.too_long(tokenizer, length, messages, None) is None
    assert prepare_module.too_long(tokenizer, length - 1, messages, None) == "too_long"


def test_generator_needs_no_tokenizer(folder):
    assert prepare(settings_for(MODEL="/nowhere"), {"toy": endless})["rows"] == {"test": 6, "train": 20}


def test_model_without_tokenizer_is_named(folder, tmp_path):
    with pytest.raises(DataError, match=r"^MODEL=/nowhere: no tokenizer[^\n]*$"):
        prepare(settings_for(MODEL="/nowhere"), {"toy": Fixed(examples(30))})


def test_turns_of_a_group_go_to_one_side(folder, small_model):
    given = [Example(f"say {number}", "1", group=f"conversation {number // 5}") for number in range(50)]
    manifest = prepare(settings_for(MODEL=small_model, TRAIN_SIZE=0, TEST_SIZE=10), {"toy": Fixed(given)})
    sides = [{int(text.split()[1]) // 5 for text in said(folder / f"{name}.parquet")} for name in ("train", "test")]
    assert not sides[0] & sides[1]
    assert manifest["rows"] == {"test": 10, "train": 40}


@pytest.mark.parametrize(
    "changes, given, message",
    [
        ({"TEST_SIZE": 6}, examples(8), r"only 2 training prompts, less than TRAIN_BATCH_SIZE=4"),
        ({"TEST_SIZE": 6}, examples(6), r"6 for the test set, 0 to train on"),
        ({"MAX_PROMPT_LENGTH": 5}, examples(30), r"no usable row \(30 too long\); raise MAX_PROMPT_LENGTH"),
    ],
)
def test_too_little_is_refused_and_the_old_data_stays(folder, small_model, changes, given, message):
    before = prepare(settings_for(MODEL=small_model), {"toy": Fixed(examples(40))})
    kept = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(DataError, match=rf"^SOURCE=toy: [^\n]*{message}[^\n]*$"):
        prepare(settings_for(MODEL=small_model, **changes), {"toy": Fixed(given)})
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == kept
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


def test_record_that_a_task_cannot_use_is_named(folder, tmp_path, small_model):
    path = write_lines(tmp_path / "x.jsonl", [{"question": "q", "answer": "1"}, {"question": 3}])
    with pytest.raises(DataError, match=rf"^{path}: line 2: needs the text `question`$"):
        prepare(settings_for(MODEL=small_model, FILE=path), {"file": from_file})
    assert not (folder / "manifest.json").exists()


def test_prompt_that_is_no_chat_is_named(tmp_path):
    path = write_lines(tmp_path / "x.jsonl", [{"question": "q"}])
    with pytest.raises(DataError, match=r"line 1: the prompt each message needs a role"):
        list(Examples(load(path), lambda record: [Example([{"role": "x", "content": "y"}], "1")]))
