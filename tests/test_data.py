"""rows.py, data/held_out.py and data/split.py: parquet files written, validated, compared with what is held out, and
split by seed, filtered, cut, counted."""

import json
import random
import re
import tracemalloc

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_tasks import rows
from verl_tasks.data import held_out as held_out_module
from verl_tasks.data import split
from verl_tasks.data.held_out import check_disjoint, check_pairs
from verl_tasks.data.records import Records
from verl_tasks.data.split import Sizes, SplitError, choose, deal, key, sides_of, write_sides
from verl_tasks.rows import (
    BATCH_ROWS,
    DataError,
    Example,
    chat,
    read_rows,
    rl_row,
    rl_schema,
    sft_row,
    sft_schema,
    validate_parquet,
    write_parquet,
)


def rl_rows(count):
    return (rl_row("toy", chat(f"prompt {i} é"), {"target": i, "numbers": [i, 1]}, "train", i) for i in range(count))


def names(folder):
    return sorted(path.name for path in folder.iterdir())


# ---- write and read


@pytest.mark.parametrize("count", [1, 10, BATCH_ROWS, BATCH_ROWS + 1])
def test_rows_come_back_as_they_were_written(tmp_path, count):
    path = tmp_path / "new" / "folder" / "train.parquet"
    assert write_parquet(rl_rows(count), path, rl_schema()) == count
    assert list(read_rows(path)) == list(rl_rows(count))
    assert validate_parquet(path) == count
    assert names(path.parent) == ["train.parquet"]


def test_demonstrations_come_back_as_they_were_written(tmp_path):
    rows = [sft_row(chat(f"question {i}"), f"<think>a\nb</think>\n<answer>{i}</answer>") for i in range(5)]
    assert write_parquet(rows, tmp_path / "sft.parquet", sft_schema(), total=5) == 5
    assert list(read_rows(tmp_path / "sft.parquet")) == rows
    assert validate_parquet(tmp_path / "sft.parquet", "sft") == 5
    assert [message["role"] for message in rows[0]["messages"]] == ["user", "assistant"]


@pytest.mark.parametrize("truth", [{"target": 3, "numbers": [1, 2]}, {"a": "x"}, {}, [1, "x"], 3, 2.5, True])
def test_ground_truth_is_stored_as_json_text_of_its_own_row(tmp_path, truth):
    rows = [rl_row("toy", chat("p"), truth, "train", 0), rl_row("toy", chat("p"), {"other": {"key": []}}, "train", 1)]
    write_parquet(rows, tmp_path / "x.parquet", rl_schema())
    stored = next(read_rows(tmp_path / "x.parquet"))["reward_model"]["ground_truth"]
    assert json.loads(stored) == truth


def test_ground_truth_that_is_text_stays_as_it_is():
    assert rl_row("toy", chat("p"), "the answer", "test", 0)["reward_model"]["ground_truth"] == "the answer"


def test_read_rows_limit(tmp_path):
    write_parquet(rl_rows(20), tmp_path / "x.parquet", rl_schema())
    for limit, expected in ((None, 20), (0, 0), (1, 1), (100, 20)):
        assert list(read_rows(tmp_path / "x.parquet", limit)) == list(rl_rows(expected))


def failing(good_rows):
    yield from rl_rows(good_rows)
    raise RuntimeError("no more")


@pytest.mark.parametrize(
    ("given", "error"), [(failing(BATCH_ROWS + 3), RuntimeError), ([{"data_source": "toy", "prompt": 3}], DataError)]
)
def test_error_while_writing_leaves_the_old_file_alone(tmp_path, given, error):
    path = tmp_path / "train.parquet"
    write_parquet(rl_rows(7), path, rl_schema())
    before = path.read_bytes()
    with pytest.raises(error):
        write_parquet(given, path, rl_schema())
    assert path.read_bytes() == before and names(tmp_path) == ["train.parquet"]


def peak_of_writing(path, count):
    tracemalloc.start()
    try:
        assert write_parquet(rl_rows(count), path, rl_schema()) == count
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.medium
def test_memory_does_not_grow_with_the_number_of_rows(tmp_path):
    one_batch = peak_of_writing(tmp_path / "small.parquet", BATCH_ROWS)
    many = peak_of_writing(tmp_path / "large.parquet", 50_000)
    assert many < 3 * one_batch
    assert many < 32e6


def test_reading_the_first_rows_of_a_large_file_is_lazy(tmp_path):
    path = tmp_path / "large.parquet"
    write_parquet(rl_rows(5 * BATCH_ROWS), path, rl_schema())
    data = bytearray(path.read_bytes())
    last_group = pq.ParquetFile(path).metadata.row_group(4).column(0)
    start = last_group.dictionary_page_offset or last_group.data_page_offset
    data[start : start + 64] = b"\xff" * 64  # the last rows cannot be read
    path.write_bytes(data)
    assert list(read_rows(path, 3)) == list(rl_rows(3))
    with pytest.raises(DataError):
        list(read_rows(path))


# ---- validation


def bad_rl(**changes):
    """A good RL row with some columns changed; a value of ... removes the column."""
    row = next(rl_rows(1)) | changes
    return {column: value for column, value in row.items() if value is not ...}


def write_any(path, rows, schema=None):
    pq.write_table(pa.Table.from_pylist(rows, schema), path)
    return path


USER = {"role": "user", "content": "x"}
ASSISTANT = {"role": "assistant", "content": "y"}
BAD_RL = {
    "no data_source": ("data_source", {"data_source": ...}),
    "data_source is a number": ("data_source", {"data_source": 3}),
    "empty prompt": ("prompt", {"prompt": []}),
    "prompt is text": ("prompt", {"prompt": "x"}),
    "prompt is a list of text": ("prompt", {"prompt": ["x"]}),
    "prompt is one message": ("prompt", {"prompt": USER}),
    "wrong role later": ("prompt", {"prompt": [USER, {"role": "bot", "content": "x"}]}),
    "null role": ("prompt", {"prompt": [{"role": None, "content": "x"}]}),
    "no content": ("prompt", {"prompt": [{"role": "user"}]}),
    "content is a number": ("prompt", {"prompt": [{"role": "user", "content": 3}]}),
    "empty ability": ("ability", {"ability": ""}),
    "reward_model is text": ("reward_model", {"reward_model": "rule"}),
    "no style": ("reward_model.style", {"reward_model": {"ground_truth": "3"}}),
    "no ground_truth": ("reward_model.ground_truth", {"reward_model": {"style": "rule"}}),
    "empty ground_truth": ("reward_model.ground_truth", {"reward_model": {"style": "rule", "ground_truth": ""}}),
    "extra_info is a number": ("extra_info", {"extra_info": 3}),
    "key is a number": ("extra_info.key", {"extra_info": {"key": 3}}),
}


def refusal(path, kind="rl"):
    """The message of the DataError for ``path``."""
    with pytest.raises(DataError) as error:
        validate_parquet(path, kind)
    message = str(error.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    return message


def test_the_first_ten_bad_rows_are_named_at_once(tmp_path):
    rows = [bad_rl(ability="") if place > BATCH_ROWS else bad_rl() for place in range(BATCH_ROWS + 30)]
    with pytest.raises(DataError) as error:
        validate_parquet(write_any(tmp_path / "x.parquet", rows))
    told = [str(error.value), *error.value.__notes__]
    first = BATCH_ROWS + 1
    said = "column ability: must be non-empty text"
    assert told == [f"{tmp_path}/x.parquet: row {place}, {said}" for place in range(first, first + 10)]


@pytest.mark.parametrize("column, changes", BAD_RL.values(), ids=BAD_RL)
def test_bad_rl_row_is_named(tmp_path, column, changes):
    path = write_any(tmp_path / "bad.parquet", [bad_rl(**changes)])
    assert re.search(rf": row 0, column {re.escape(column)}: \S", refusal(path))


@pytest.mark.parametrize("messages", [None, [ASSISTANT, USER], [{"role": "user", "content": None}, ASSISTANT]])
def test_bad_sft_row_is_named(tmp_path, messages):
    path = write_any(tmp_path / "bad.parquet", [{"messages": messages}])
    assert re.search(r": row 0, column messages: \S", refusal(path, "sft"))


def test_rl_data_is_not_sft_data_nor_the_reverse(tmp_path):
    write_parquet(rl_rows(2), tmp_path / "rl.parquet", rl_schema())
    write_parquet([sft_row(chat("a"), "b")], tmp_path / "sft.parquet", sft_schema())
    assert "row 0, column messages" in refusal(tmp_path / "rl.parquet", "sft")
    assert "row 0, column data_source" in refusal(tmp_path / "sft.parquet", "rl")


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt": [{"role": "system", "content": "be brief"}, USER, ASSISTANT, {"role": "tool", "content": ""}, USER]},
        {"reward_model": {"style": "rule", "ground_truth": 0}},
        {"reward_model": {"style": "rule", "ground_truth": {"target": 3, "numbers": [1, 2]}}},
        {"reward_model": {"style": "rule", "ground_truth": "3", "note": None}},
        {"extra_info": {"index": 0}},
        {"another_column": 3},
    ],
)
def test_data_of_others_is_accepted(tmp_path, changes):
    assert validate_parquet(write_any(tmp_path / "good.parquet", [bad_rl(**changes)] * 3)) == 3


@pytest.mark.parametrize("kind, schema", [("rl", rl_schema()), ("sft", sft_schema())])
def test_file_without_rows_is_refused(tmp_path, kind, schema):
    write_parquet([], tmp_path / "empty.parquet", schema)
    assert "no rows" in refusal(tmp_path / "empty.parquet", kind)


def test_missing_file_is_refused(tmp_path):
    assert "no such file" in refusal(tmp_path / "nowhere.parquet")
    assert "no such file" in refusal(tmp_path)


DAMAGED = {
    "not parquet": lambda good: b'{"prompt": "x"}\n' * 100,
    "cut at the end": lambda good: good[:-1],
    "damaged pages": lambda good: good[:4] + b"\xff" * 200 + good[204:],
    "text that is no UTF-8": lambda good: good.replace(b"prompt 1 \xc3\xa9", b"prompt 1 \xff\xa9"),
}


@pytest.mark.parametrize("damage", DAMAGED.values(), ids=DAMAGED)
def test_corrupt_file_is_refused(tmp_path, damage):
    path = tmp_path / "x.parquet"
    pq.write_table(pa.Table.from_pylist(list(rl_rows(50)), rl_schema()), path, compression="none", use_dictionary=False)
    path.write_bytes(damage(path.read_bytes()))
    refusal(path)


# ---- held-out prompts


def test_a_file_of_another_kind_is_not_to_be_removed(tmp_path):
    (tmp_path / "own.jsonl").write_text('{"prompt": "p", "answer": "a"}\n')
    message = refusal(tmp_path / "own.jsonl")
    assert "json_to_parquet" in message and "remove" not in message
    with pytest.raises(DataError, match="PAIRS_COLUMNS"):
        check_pairs(tmp_path / "own.jsonl", [])


def write_rows(path, prompts, key=None):
    rows = [rl_row("toy", chat(prompt), "1", "train", i, key=key and key(prompt)) for i, prompt in enumerate(prompts)]
    write_parquet(rows, path, rl_schema())
    return path


def test_a_training_file_with_held_out_problems_is_refused(tmp_path):
    def number(prompt):
        return prompt.split()[-1]

    held_out = [write_rows(tmp_path / "dev.parquet", ["say 1", "say 2"], number)]
    held_out += [write_rows(tmp_path / "test.parquet", ["say 3", "say 4"], number)]
    check_disjoint(
        write_rows(tmp_path / "other.parquet", ["say 5", "write 1"]), held_out
    )  # without keys: by the prompt
    for own, said in (
        (write_rows(tmp_path / "a.parquet", ["say 4", "say 9", "say 3"]), "2 of its prompts are in test.parquet;"),
        (
            write_rows(tmp_path / "b.parquet", ["write 1", "write 4", "write 7"], number),
            "1 of its prompts are in dev.parquet and 1 of its prompts are in test.parquet;",
        ),
    ):
        with pytest.raises(DataError) as error:
            check_disjoint(own, held_out)
        assert str(error.value).startswith(f"TRAIN_FILE={own}: {said}") and "\n" not in str(error.value)


def test_pairs_on_held_out_prompts_are_refused(tmp_path):
    held_out = [write_rows(tmp_path / "test.parquet", ["say 3", "say 4"])]
    pairs = [{"prompt": f"say {number}", "chosen": "a", "rejected": "b"} for number in (3, 5, 5, 3)]
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    with pytest.raises(DataError, match=r"^PAIRS_FILE=\S+: 2 of its prompts are in test\.parquet; remove them"):
        check_pairs(file, held_out)
    file.write_text("".join(json.dumps(pair) + "\n" for pair in pairs[1:3]))
    check_pairs(file, held_out)


def test_pairs_without_the_system_message_of_a_held_out_prompt_are_refused(tmp_path):
    held_out = tmp_path / "test.parquet"
    write_parquet([rl_row("toy", chat("say 3", "Be brief."), "1", "test", 0)], held_out, rl_schema())
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps({"prompt": "say 3", "chosen": "a", "rejected": "b"}))
    with pytest.raises(DataError, match=r"1 of its prompts are in test\.parquet; remove them"):
        check_pairs(file, [held_out])
    with pytest.raises(DataError, match=r"1 of its prompts are in test\.parquet; remove them"):
        check_disjoint(write_rows(tmp_path / "own.parquet", ["say 3"]), [held_out])
    file.write_text(json.dumps({"prompt": "say 3", "system": "Shout.", "chosen": "a", "rejected": "b"}))
    check_pairs(file, [held_out])  # another task's row may differ in that alone


def test_a_held_out_row_without_a_system_message_is_digested_once(tmp_path, monkeypatch):
    digested = []
    posed = held_out_module.posed
    monkeypatch.setattr(held_out_module, "posed", lambda *told: digested.append(told) or posed(*told))
    held_out = tmp_path / "test.parquet"
    rows = [rl_row("toy", chat(f"say {n}", system), "1", "test", n) for n, system in enumerate(["Be brief.", None])]
    write_parquet(rows, held_out, rl_schema())
    check_disjoint(write_rows(tmp_path / "own.parquet", ["say 5"]), [held_out])
    assert len(digested) == 1 + 2 + 1  # of the file, of the row with a system message and without it, of the other


TWINS = ["say  caf\u00e9", "say cafe\u0301", " say caf\u00e9\r\n", "say\u00a0caf\u00e9"]


@pytest.mark.parametrize("twin", TWINS)
def test_a_twin_of_a_held_out_prompt_is_refused(tmp_path, twin):
    held_out = write_rows(tmp_path / "test.parquet", ["say caf\u00e9"])
    with pytest.raises(DataError, match=r"1 of its prompts are in test\.parquet"):
        check_disjoint(write_rows(tmp_path / "own.parquet", [twin]), [held_out])
    check_disjoint(write_rows(tmp_path / "other.parquet", ["say cafe"]), [held_out])


def test_a_row_of_another_file_poses_the_same_problem_whatever_its_fields_order(tmp_path):
    held_out = write_rows(tmp_path / "test.parquet", ["say 1"])
    row = bad_rl(prompt=[{"content": "say 1", "role": "user", "name": None}])
    with pytest.raises(DataError, match=r"1 of its prompts are in test\.parquet"):
        check_disjoint(write_any(tmp_path / "own.parquet", [row]), [held_out])


def bombs() -> dict[str, pa.Table]:
    """Files of kilobytes: a long value, many values of nothing, a long value that a dictionary repeats."""
    index = pa.DictionaryArray.from_arrays(pa.array([0] * 1000, pa.int32()), pa.array(["x" * 900_000]))
    empty = pa.ListArray.from_arrays(pa.array([0, 20_000_000], pa.int32()), pa.nulls(20_000_000, pa.int8()))
    return {
        "value": pa.table({"question": ["x" * (100 << 20)]}),
        "list": pa.table({"question": empty}),
        "dictionary": pa.table({"question": index}),
    }


@pytest.mark.medium
@pytest.mark.parametrize(
    ("kind", "store_schema"), [("value", False), ("list", False), ("dictionary", False), ("dictionary", True)]
)
def test_a_small_parquet_that_expands_to_gigabytes_is_refused(kind, store_schema, tmp_path):
    path = tmp_path / "bomb.parquet"
    encoded = {"use_dictionary": kind != "value", "dictionary_pagesize_limit": 1 << 30, "store_schema": store_schema}
    pq.write_table(bombs()[kind], path, compression="zstd", **encoded)
    assert path.stat().st_size < 20_000
    for read in (read_rows, Records):
        with pytest.raises(DataError, match=r"^[^:]*bomb\.parquet: its [\d,]+ bytes expand to [^\n]*too many to read$"):
            next(iter(read(path)))


def test_rows_of_long_values_that_a_file_repeats_are_decoded_a_few_at_a_time(tmp_path, monkeypatch):
    """256 of them at once would be 2 GB here."""
    repeated = pa.DictionaryArray.from_arrays(pa.array([0] * 300, pa.int32()), pa.array(["x" * (8 << 20)]))
    table = pa.table({"question": repeated, "noise": [random.Random(1).randbytes(1 << 20).hex(), *[""] * 299]})
    encoded = {"use_dictionary": ["question"], "dictionary_pagesize_limit": 1 << 30}
    pq.write_table(table, tmp_path / "x.parquet", compression="zstd", **encoded)
    monkeypatch.setattr(rows, "AT_ONCE", 64 << 20)
    tracemalloc.start()
    assert len(next(iter(read_rows(tmp_path / "x.parquet")))["question"]) == 8 << 20
    assert tracemalloc.get_traced_memory()[1] < 200 << 20
    tracemalloc.stop()


@pytest.mark.medium
def test_tool_schemas_in_every_row_are_not_too_much(tmp_path):
    questions = [f"What is {i * 7919 % 10007} + {i * 104729 % 99991}?" for i in range(20_000)]
    table = pa.table({"question": questions, "tools": ["schema " * 1000] * 20_000})
    for repeated in (True, False):
        pq.write_table(table, tmp_path / "x.parquet", compression="zstd", use_dictionary=repeated)
        assert sum(1 for _ in Records(tmp_path / "x.parquet")) == 20_000


def row_of(prompt, rest="", **fields):
    """A row to be: its prompt, the rest of it, and perhaps the split that its source has."""
    return Example(prompt, rest, **fields)


SCHEMA = pa.schema([("prompt", pa.string()), ("rest", pa.string()), ("split", pa.string()), ("index", pa.int64())])


def identity(item):
    return item.prompt, item.ground_truth


def row(item, name, index):
    return {"prompt": item.prompt, "rest": item.ground_truth, "split": name, "index": index}


def items(count, **fields):
    return [row_of(f"prompt {number}", **fields) for number in range(count)]


def done(given, folder, sizes=Sizes(), seed=1, **problem):  # noqa: B008
    """Rows of train and test, and counts of what was dropped."""
    sides, dropped = sides_of(given, identity, sizes, seed, **problem)
    rows = write_sides(sides, folder, row, SCHEMA)
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
    write_sides(sides_of(given, identity, Sizes(**sizes), 1)[0], folder, row, SCHEMA)
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


def test_duplicates_are_taken_once_and_counted(tmp_path):
    train, test, dropped = done([*items(100), *items(60), *items(10)], tmp_path)
    assert (len(train) + len(test), dropped) == (100, {"duplicates": 70})


def test_rows_of_one_prompt_go_to_one_side(tmp_path):
    given = [row_of(f"prompt {number % 50}", f"answer {number}") for number in range(1000)]
    train, test, dropped = done([*given, *given[:30]], tmp_path, Sizes(test=15))
    assert (len(train), len(test), dropped) == (980, 20, {"duplicates": 30})
    assert not {*prompts(train)} & {*prompts(test)}
    dev = dev_of(given, tmp_path, test=20, dev=30)
    assert len(dev) == 40 and not {*dev} & {*prompts(read_rows(tmp_path / "train.parquet"))}


def test_test_split_of_the_source_stays_its_own(tmp_path):
    given = [*items(50, split="train"), *[row_of(f"prompt {number}", split="test") for number in range(45, 60)]]
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
    assert (len(train) + len(test), dropped) == (30, {"with_a_prompt_of_the_test_split": 5, "over_limit": 30})
    assert {*prompts(test)} <= {f"prompt {number}" for number in range(45, 60)}


def test_a_small_limit_keeps_a_row_of_the_own_test_split(tmp_path):
    train, test, _ = done([*items(500, split="train"), row_of("test", split="test")], tmp_path, Sizes(limit=10, test=0))
    assert (len(train), prompts(test)) == (9, ["test"])


def test_what_cannot_be_used_is_counted_by_reason(tmp_path):
    problem = lambda item: "too_long" if item.prompt.endswith("7") else None  # noqa: E731
    given = [None, *items(100), None, *items(8)]
    assert done(given, tmp_path, problem=problem)[2] == {"unusable": 2, "too_long": 11, "duplicates": 7}


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
        ([row_of("same", str(number)) for number in range(9)], Sizes(), "9 for the test set, 0 to train on"),
    ],
)
def test_too_few_rows_are_refused(given, sizes, message):
    with pytest.raises(SplitError, match=message):
        sides_of(given, identity, sizes, 1)


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
            return (row_of(f"prompt {number} {'x' * 200}") for number in range(count))

    tracemalloc.start()
    try:
        write_sides(sides_of(Made(), identity, Sizes(), 1)[0], folder, row, SCHEMA)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.medium
def test_a_row_takes_little_more_memory_than_its_text(tmp_path):
    few, many = peak(10_000, tmp_path), peak(60_000, tmp_path)
    assert (many - few) / 50_000 < 600  # bytes a row: its text has 270


# ---- an endless source


def dealt(given, test, dev, train, seed=1):
    sides = deal(iter(given), identity, {"test": test, "dev": dev, "train": train}, seed)
    assert [len(sides[name]) for name in ("test", "dev", "train")] == [test, dev, train]
    return [[item.prompt for item in sides[name]] for name in ("test", "dev", "train")]


@settings(max_examples=200, database=None)
@given(st.integers(0, 60), st.integers(0, 30), st.integers(0, 30), st.integers(0, 30), st.integers(0, 3))
def test_sides_are_disjoint_and_no_size_moves_the_test_or_training_rows(count, test, dev, train, seed):
    """Also where the source ends, and a side takes what others leave."""
    if test + dev + train > count:
        with pytest.raises(SplitError, match=f"^has only {count} different prompts$"):
            dealt(items(count), test, dev, train, seed)
        return
    sides = dealt(items(count), test, dev, train, seed)
    assert len({prompt for side in sides for prompt in side}) == test + dev + train
    assert sides[0] == dealt(items(count), test, 0, 0, seed)[0]
    assert sides[2] == dealt(items(count), 0, 0, train, seed)[2]
    assert dealt(items(count), count, 0, 0, seed)[0][:test] == sides[0]
    assert dealt(items(count), 0, 0, count, seed)[2][:train] == sides[2]


def test_a_source_without_an_end_is_read_as_far_as_its_sides_need():
    read = (row_of(f"prompt {number}") for number in range(10**9))
    sides = dealt(read, 150, 50, 800)
    assert prompts_number(next(read).prompt) < 1300
    assert sides == dealt((row_of(f"prompt {number}") for number in range(5000)), 150, 50, 800)
    assert sides != dealt(items(5000), 150, 50, 800, seed=2)
    assert not {*sides[0], *sides[1]} & {*dealt(items(5000), 0, 0, 3000)[2]}  # nor with many more training rows


def test_a_group_is_on_one_side_and_one_without_an_end_ends(monkeypatch):
    of_group = lambda item: (item.group, item.prompt)  # noqa: E731
    given = [row_of(f"prompt {number}", group=f"group {number % 40}") for number in range(4000)]
    sides = deal(iter(given), of_group, {"test": 60, "dev": 20, "train": 300}, 1)
    groups = [{item.group for item in side} for side in sides.values()]
    assert all(groups) and sum(map(len, groups)) == len(set.union(*groups))
    monkeypatch.setattr(split, "PATIENCE", 50)
    endless = (row_of(f"prompt {number}", group="one") for number in range(10**9))
    assert len(deal(endless, of_group, {"test": 5, "dev": 2, "train": 9}, 1)["test"]) == 5
    assert prompts_number(next(endless).prompt) <= 60
