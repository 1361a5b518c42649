"""rows.py and data/held_out.py: parquet files written, validated, and compared with what is held out."""

import json
import random
import re
import tracemalloc

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from verl_tasks import rows
from verl_tasks.data.held_out import check_disjoint, check_pairs
from verl_tasks.data.records import Records
from verl_tasks.rows import (
    BATCH_ROWS,
    DataError,
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
    ("given", "error"),
    [
        (failing(BATCH_ROWS + 3), RuntimeError),
        ([{"data_source": "toy", "prompt": 3}], DataError),
    ],
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


@pytest.mark.parametrize(
    "messages",
    [
        None,
        [ASSISTANT, USER],
        [{"role": "user", "content": None}, ASSISTANT],
    ],
)
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
