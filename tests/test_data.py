"""rows.py and tasks/common/data/prepare.py: parquet files written, validated, and made from a source."""

import functools
import json
import random
import re
import tracemalloc

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tasks.common import rows
from tasks.common.data.held_out import check_disjoint, check_pairs
from tasks.common.data.prepare import describe, distinct, prepare
from tasks.common.data.records import Records
from tasks.common.rows import (
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
from tasks.common.settings import ROOT, load_settings
from tests.helpers import exported


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


# ---- prepare


def settings_for(**changes):
    """Settings from the defaults of countdown's train.sh, for a few rows of data."""
    small = {"SOURCE": "toy", "INIT": "base", "SEED": "5"}
    small |= {
        "TRAIN_SIZE": "20",
        "TEST_SIZE": "6",
        "DEV_SIZE": "4",
        "SFT_SIZE": "8",
        "TRAIN_BATCH_SIZE": "4",
        "MINI_BATCH_SIZE": "4",
    }
    return load_settings(defaults() | small | changes)


@functools.cache
def defaults():
    return exported(ROOT / "tasks/countdown/train.sh", {})


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


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The data folder of the task."""
    monkeypatch.setenv("ARTIFACTS", str(tmp_path))
    return tmp_path / "data" / "countdown"


def prompts(path):
    return [row["prompt"][0]["content"] for row in read_rows(path)]


def test_prepare_writes_the_files_and_a_manifest(folder):
    settings = settings_for()
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
    prepare(settings_for(), {"toy": toy})
    for split, first in (("test", 0), ("dev", 6), ("train", 10)):
        for index, row in enumerate(read_rows(folder / f"{split}.parquet")):
            truth = {"target": first + index, "numbers": [first + index]}
            assert row == rl_row("countdown", chat(f"say 5 {first + index}"), truth, split, index)


def test_demonstrations_are_those_of_the_first_training_prompts_that_have_one(folder):
    prepare(settings_for(), {"toy": toy})
    rows = list(read_rows(folder / "sft.parquet"))
    expected = [number for number in range(10, 30) if number % 3][:8]
    assert rows == [sft_row(chat(f"say 5 {number}"), f"<answer>{number}</answer>") for number in expected]
    assert {row["messages"][0]["content"] for row in rows} <= set(prompts(folder / "train.parquet"))


def test_prepare_is_reproducible_and_follows_the_seed(folder):
    contents = []
    for seed in ("5", "5", "6"):
        prepare(settings_for(SEED=seed), {"toy": toy})
        contents.append([list(read_rows(folder / f"{name}.parquet")) for name in ("train", "test", "sft")])
    assert contents[0] == contents[1] != contents[2]


@pytest.mark.parametrize("changes", [{"SFT_SIZE": "0"}, {"SOURCE": "plain"}])
def test_data_without_demonstrations(folder, changes):
    def plain(settings):
        return (Example(example.prompt, example.ground_truth) for example in toy(settings))

    manifest = prepare(settings_for(**changes), {"toy": toy, "plain": plain})
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
    prepare(settings_for(), {"toy": toy})
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(DataError, match=rf"^[^\n]*{message}[^\n]*$"):
        prepare(settings_for(), {"toy": source})
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_source_with_exactly_enough_prompts(folder):
    assert prepare(settings_for(TRAIN_SIZE="10"), {"toy": short})["rows"] == {
        "test": 6,
        "dev": 4,
        "train": 10,
        "sft": 7,
    }


def test_unknown_source_is_refused_and_nothing_touched(folder):
    manifest = prepare(settings_for(), {"toy": toy})
    with pytest.raises(DataError, match=r"^SOURCE=nosuch: [^\n]*toy[^\n]*short[^\n]*$"):
        prepare(settings_for(SOURCE="nosuch"), {"toy": toy, "short": short})
    assert json.loads((folder / "manifest.json").read_text()) == manifest


def test_folder_as_source_goes_to_the_hub_reader(folder, tmp_path):
    seen = []

    def hub(settings):
        seen.append(settings.SOURCE)
        return toy(settings)

    manifest = prepare(settings_for(SOURCE=str(tmp_path)), {"generate": short, "hub": hub})
    assert seen == [str(tmp_path)] == [manifest["source"]]
    with pytest.raises(DataError, match=r"^SOURCE="):
        prepare(settings_for(SOURCE=str(tmp_path)), {"generate": short})


@pytest.mark.parametrize("patience, expected", [(1, ["a"]), (2, ["a", "b"]), (3, ["a", "b", "c"])])
def test_distinct_ends_after_repeats_in_a_row(patience, expected):
    examples = (Example(prompt, "1") for prompt in "aabaacaaaadaaaa")
    assert [example.prompt for example in distinct(examples, patience)] == expected


def test_without_a_dev_set_no_file_is_written(folder):
    prepare(settings_for(), {"toy": toy})
    assert prepare(settings_for(DEV_SIZE="0"), {"toy": toy})["rows"] == {"test": 6, "train": 20, "sft": 8}
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
    prepare(settings_for(MODEL=str(small_model)), {"toy": source})
    rows = [row for name in ("train", "dev", "test") for row in read_rows(folder / f"{name}.parquet")]
    keys = [row["extra_info"]["key"] for row in rows]
    assert len(keys) == len({*keys}) == 30
    assert [row["prompt"][0]["content"].split()[1] for row in rows] == keys


def test_turns_of_a_conversation_are_on_one_side_and_the_conversations_are_counted(folder, small_model):
    def turns(settings):
        numbers = [(number, turn) for number in range(30) for turn in range(1 + number % 3)]
        return [Example(f"say {number} {turn}", "1", group=f"c{number}") for number, turn in numbers]

    manifest = prepare(settings_for(MODEL=str(small_model)), {"toy": turns})
    keys = {name: set() for name in ("train", "dev", "test")}
    for name, found in keys.items():
        for row in read_rows(folder / f"{name}.parquet"):
            found.add((row["extra_info"]["key"], row["prompt"][0]["content"].split()[1]))
    assert manifest["groups"] == {name: len(found) for name, found in keys.items()}
    assert len({key for key, _ in set.union(*keys.values())}) == sum(map(len, keys.values()))
    rows = manifest["rows"]
    assert f"{rows['test']} test (of {len(keys['test'])} conversations)" in describe(manifest)
    assert len({number for _, number in set.union(*keys.values())}) == sum(map(len, keys.values()))


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
