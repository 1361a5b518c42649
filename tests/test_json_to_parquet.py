"""data/records.py and tasks/common/data/convert.py: files of every form read, converted, or refused."""

import csv
import json
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.helpers import PYTHON
from verl_tasks.data import records
from verl_tasks.data.convert import convert, parse
from verl_tasks.data.prepare import describe
from verl_tasks.data.records import HubUnreachable, Records, hub, load
from verl_tasks.rows import DataError, read_rows, validate_parquet
from verl_tasks.settings import ROOT

SHARED = Path(os.environ.get("SHARED_DATA", ROOT.parent / "shared/data"))

ROWS = [
    {"question": "one, \"two\"\nthree", "answer": "é 😀"},
    {"question": "x" * 5000, "answer": "2"},
    {"question": "three", "answer": "3"},
]  # fmt: skip


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def write_rows(path, rows):
    """``rows`` in the form of the file's suffix."""
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=1))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# ---- records


@pytest.mark.parametrize("suffix", records.DATA_SUFFIXES)
def test_records_come_back_and_can_be_read_again(tmp_path, suffix):
    found = Records(write_rows(tmp_path / f"x{suffix}", ROWS))
    assert list(found) == list(found) == ROWS
    first = iter(found)
    next(first)
    assert next(iter(found)) == ROWS[0]


def test_a_short_float_is_the_decimal_that_was_written(tmp_path, hub_folder):
    kind = pa.struct([("v", pa.list_(pa.float32())), ("w", pa.float16())])
    written = [{"answer": {"v": [5.8, None, 1e-7], "w": 0.1}, "d": 0.1 + 0.2}, {"answer": None, "d": 1.0}]
    schema = pa.schema({"answer": kind, "d": pa.float64()})
    pq.write_table(pa.Table.from_pylist(written, schema), tmp_path / "x.parquet")
    pq.write_table(pa.table({"answer": pa.array([5.8], pa.float32())}), hub_folder / "train.parquet")
    (hub_folder / "train.jsonl").unlink()
    (hub_folder / "test.jsonl").unlink()
    assert list(Records(tmp_path / "x.parquet")) == written
    assert list(hub(str(hub_folder))) == [{"answer": 5.8}]


def test_array_in_any_layout(tmp_path):
    rows = [*ROWS, {"a": [{"b": "]},{"}, 1.5, None, True, 2**70]}, {}]
    path = write(tmp_path / "x.json", f"\ufeff \n[ {' , '.join(json.dumps(row) for row in rows)}\n ] \n")
    assert list(Records(path)) == rows


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".csv"])
def test_the_byte_order_mark_is_left_out(tmp_path, suffix):
    path = write_rows(tmp_path / f"x{suffix}", ROWS)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert list(Records(path)) == ROWS


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_the_separator_of_a_csv_file_is_the_one_of_its_header(tmp_path, separator):
    """Excel writes semicolons where a comma is the decimal sign."""
    cells = [["Nr", "Firma, Ort", "Betrag"], ["007", 'Müller "&" Söhne; Köln\r\nRhein\tland', "1.234,50"]]
    quoted = [separator.join('"' + cell.replace('"', '""') + '"' for cell in row) for row in cells]
    path = write(tmp_path / "x.csv", "\ufeff" + "\r\n".join(quoted) + "\r\n")
    assert list(Records(path)) == [dict(zip(*cells, strict=True))]
    others = ",;\t".replace(separator, "")  # in the header, unquoted
    write(path, f"q ({others * 2}){separator}a\n1{separator}2\n")
    assert list(Records(path)) == [{f"q ({others * 2})": "1", "a": "2"}]
    write(path, f"\nNr{separator}Betrag\n1{separator}2\n{separator}\n1{2 * separator}\n")
    with pytest.raises(DataError, match=r"row 2: \(line 5\) has 3 fields, the header has 2"):
        list(Records(path))


def test_lines_in_a_json_file_and_empty_lines(tmp_path):
    path = write(tmp_path / "x.json", '{"a": 1}\n\n  \r\n{"a": 2}')
    assert list(Records(path)) == [{"a": 1}, {"a": 2}]
    assert [place for place, _ in Records(path).located()] == [f"{path}: line 1", f"{path}: line 4"]


BAD = {
    "json: empty": (".json", "", "is not JSON"),
    "json: no rows": (".json", "[]", "has no rows"),
    "json: text": (".json", '"x"', "must be a JSON array of objects"),
    "json: one object on lines": (".json", '{\n "a": 1}', "one object a line; its first line is no whole object: {$"),
    "json: rows in an object": (".json", '\ufeff{"data": [\n{"a": 1}\n]}', r'line is no whole object: {"data": \[$'),
    "json: cut in text": (".json", '[{"a": 1}, {"a": "x', "is not JSON .*Unterminated.*line 1 column 18"),
    "json: comma at the end": (".json", '[{"a": 1},]', "is not JSON"),
    "json: more": (".json", '[{"a": 1}] x', "is not JSON .*Extra data"),
    "json: numbers": (".json", '[{"a": 1}, 2]', "row 1: must be an object, is 2"),
    "json: null": (".json", "[null]", "row 0: must be an object, is None"),
    "json: NaN": (".json", '[{"a": 1}, {"a": NaN}]', "NaN"),
    "json: infinity": (".json", '[{"a": 1e999}]', "1e999"),
    "json: long number": (".json", '[{"a": ' + "9" * 5000 + "}]", "is not JSON"),
    "json: half a surrogate": (".json", '[{"a": "\\ud800"}]', "surrogate"),
    "json: no UTF-8": (".json", b'[{"a": "\xe9"}]', "utf-8"),
    "json: deep": (".json", '[{"a": ' + "[" * 100_000, "recursion"),
    "json: a key twice": (".json", '[{"a": {"b": 1, "b": 2}}]', "a key stands twice"),
    "jsonl: empty": (".jsonl", "", "has no rows"),
    "jsonl: cut": (".jsonl", '{"a": 1}\n{"a": ', "line 2: is not JSON"),
    "jsonl: numbers": (".jsonl", "1\n", "line 1: must be an object"),
    "jsonl: two on a line": (".jsonl", '{"a": 1} {"a": 2}', "line 1: .*Extra data"),
    "jsonl: NaN": (".jsonl", '{"a": 1}\n{"a": -Infinity}', "line 2: .*-Infinity"),
    "jsonl: no UTF-8": (".jsonl", b'{"a": 1}\n{"a": "\xff"}', "line 2: .*utf-8"),
    "jsonl: a key twice": (".jsonl", '{"a": 1, "a": 2}', "line 1: .*a key stands twice"),
    "jsonl: half a surrogate": (".jsonl", '{"a": "\\uDFFF"}', "line 1: .*surrogate"),
    "csv: empty": (".csv", "", "has no rows"),
    "csv: header alone": (".csv", "a,b\n", "has no rows"),
    "csv: too many": (".csv", "\na,b\n\n1,2\n1,2,3\n", r"row 1: \(line 5\) has 3 fields, the header has 2"),
    "csv: too few": (".csv", "a,b\n1\n", r"row 0: \(line 2\) has 1 fields"),
    "csv: open quote": (".csv", 'a,b\n1,"2\n3,4\n', "not readable csv"),
    "csv: text after quote": (".csv", 'a,b\n1,2\n"1"x,2\n', "after row 0: not readable csv"),
    "csv: header twice": (".csv", "a,a\n1,2\n", "empty or repeated name"),
    "csv: header with nothing": (".csv", ",a\n1,2\n", "empty or repeated name: , a; .*index=False"),
    "csv: no UTF-8": (".csv", b"a,b\n1,\xe9\n", "not readable csv .*utf-8.*; save it as UTF-8"),
    "parquet: text": (".parquet", "a,b\n1,2\n", "not readable parquet"),
}


@pytest.mark.parametrize("suffix, content, message", BAD.values(), ids=BAD)
def test_bad_file_is_refused_with_file_and_row_and_nothing_is_written(tmp_path, suffix, content, message):
    path = write(tmp_path / f"x{suffix}", content)
    with pytest.raises(DataError, match=rf"^{path}: .*{message}") as error:
        list(Records(path))
    assert "\n" not in str(error.value)
    with pytest.raises(DataError):
        convert(parse([str(path), str(tmp_path / "out")]))
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


def test_the_first_ten_bad_rows_are_told_at_once(tmp_path):
    lines = ["7" if place % 2 else json.dumps({"a": place}) for place in range(40)]
    path = write(tmp_path / "x.jsonl", "\n".join(lines))
    with pytest.raises(DataError) as error:
        list(Records(path))
    told = [str(error.value), *error.value.__notes__]
    assert told == [f"{path}: line {number}: must be an object, is 7" for number in range(2, 22, 2)]

    def small(record):  # refuses records that are read well, between those that are not
        if record["a"] > 2:
            raise DataError(f"a is {record['a']}")
        return record

    seen = []
    with pytest.raises(DataError, match=rf"^{path}: line 2: must be an object") as error:
        seen += Records(path).converted(small)
    assert seen == [(f"{path}: line 1", {"a": 0})]
    assert error.value.__notes__[:2] == [f"{path}: line 4: must be an object, is 7", f"{path}: line 5: a is 4"]


def test_lines_after_a_broken_one_are_read_and_a_long_one_ends_the_reading(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "LONGEST", 100)
    path = write(tmp_path / "x.jsonl", b'{"a": 1}\n\xff\n{"a": 2}\n"' + b"x" * 350 + b'"\n{"a": 3}\n')
    *read, last = [(place.partition(": ")[2], record) for place, record in Records(path).located()]
    assert [place for place, _ in read] == ["line 1", "line 2", "line 3"] and "line 4: longer than" in str(last[1])
    assert [record for _, record in read[::2]] == [{"a": 1}, {"a": 2}] and isinstance(read[1][1], DataError)


def test_what_ends_the_reading_is_told_last(tmp_path):
    path = write(tmp_path / "x.csv", 'a,b\n1\n1,2\n"1"x,2\n')
    with pytest.raises(DataError, match=r"row 0: \(line 2\) has 1 fields") as error:
        list(Records(path))
    (last,) = error.value.__notes__
    assert last.startswith(f"{path}: after row 1: not readable csv")


def test_a_field_without_end_is_refused_before_it_fills_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "LONGEST", 10_000)
    with pytest.raises(DataError, match="after row 0: "):
        list(Records(write_rows(tmp_path / "x.csv", [{"a": "1"}, {"a": "x" * 200_000}])))


def test_csv_with_long_fields(tmp_path):
    assert list(Records(write_rows(tmp_path / "x.csv", [{"a": "x" * 500_000}]))) == [{"a": "x" * 500_000}]


@pytest.mark.parametrize("name, message", [("no.json", "no such file"), ("x.xlsx", "a sheet as CSV"), ("", "unknown")])
def test_file_that_cannot_be(tmp_path, name, message):
    with pytest.raises(DataError, match=message):
        Records(tmp_path / name)


def test_folder_needs_a_training_file(tmp_path, capsys):
    write_rows(tmp_path / "test.jsonl", ROWS)
    with pytest.raises(DataError, match="no training file"):
        load(tmp_path)
    write_rows(tmp_path / "train-00001-of-00002.parquet", ROWS)
    write_rows(tmp_path / "train-00000-of-00002.parquet", ROWS)
    write(tmp_path / "README.md", "x")
    assert [(part.path.name[:11], part.split) for part in load(tmp_path)] == [
        ("train-00000", "train"),
        ("train-00001", "train"),
        ("test.jsonl", "test"),
    ]
    assert capsys.readouterr().out == ""
    write_rows(tmp_path / "validation.jsonl", ROWS)
    write(tmp_path / "train-2.jsonl.gz", "x")
    assert len(load(tmp_path)) == 3
    kinds = ".json, .jsonl, .csv, .parquet"
    said = f"only train* and test* of {kinds} are read, not train-2.jsonl.gz, validation.jsonl\n"
    assert said in capsys.readouterr().out


def peak_of_reading(path):
    tracemalloc.start()
    try:
        return sum(1 for _ in Records(path)), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_memory_of_reading_does_not_grow_with_the_rows(tmp_path, suffix):
    rows = [{"a": f"{number} {'x' * 500}"} for number in range(2000)]
    count, few = peak_of_reading(write_rows(tmp_path / f"few{suffix}", rows))
    assert count == 2000
    count, many = peak_of_reading(write_rows(tmp_path / f"many{suffix}", rows * 5))
    assert count == 10_000
    assert many < 1.5 * few + 100_000


# ---- the hub


@pytest.mark.medium
def test_hub_that_cannot_be_reached():
    code = "from verl_tasks.data.records import hub; hub('openai/gsm8k', 'main', 'test')"
    for offline in ("0", "1"):
        result = run_python(code, HF_HUB_OFFLINE=offline, HF_ENDPOINT="http://127.0.0.1:9", HF_HOME="/nonexistent")
        assert "HubUnreachable: openai/gsm8k (main), split test: the hub cannot be reached" in result.stderr
        assert "Retrying" not in result.stderr


def run_python(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code], env=os.environ | environment, cwd=ROOT, capture_output=True, text=True
    )


@pytest.fixture
def hub_folder(tmp_path, monkeypatch):
    """A folder of a hub data set's form."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "set"
    folder.mkdir()
    for name in ("train", "test"):
        write_rows(folder / f"{name}.jsonl", [{"question": f"{name} {n}", "answer": str(n)} for n in range(5)])
    return folder


def test_folder_of_the_hub_s_form(hub_folder):
    assert len(list(hub(str(hub_folder), "main", "train"))) == 5  # without configs it stands for any
    found = hub(str(hub_folder), split="test")
    assert [record["question"] for record in found] == [f"test {n}" for n in range(5)]
    assert next(iter(found.located())) == (f"{hub_folder}: row 0", {"question": "test 0", "answer": "0"})
    assert found.split == "test"
    assert found.origin() == {"hub": str(hub_folder), "config": None, "split": "test"}


def test_split_that_is_not_there_is_one_line(hub_folder):
    with pytest.raises(DataError, match=r"cannot be loaded.*nosuch") as error:
        hub(str(hub_folder), split="nosuch")
    assert not isinstance(error.value, HubUnreachable) and "\n" not in str(error.value)


# ---- json_to_parquet

USER = {"role": "user", "content": "hi"}


def plain(count):
    return [{"question": f"what is {n}?", "answer": n} for n in range(count)]


def chats(count):
    return [
        {"conversations": [{"from": "human", "value": f"hi {n}"}, {"from": "gpt", "value": "yes"}]}
        for n in range(count)
    ]


def pairs(count):
    return [{"prompt": f"hi {n}", "chosen": "yes", "rejected": "no"} for n in range(count)]


def converted(path, output, *options):
    """Manifest, train and test."""
    manifest = convert(parse([str(path), str(output), *options]))
    assert sorted(file.name for file in output.iterdir()) == ["manifest.json", "test.parquet", "train.parquet"]
    assert json.loads((output / "manifest.json").read_text()) == manifest
    train, test = (list(read_rows(output / f"{name}.parquet")) for name in ("train", "test"))
    assert manifest["rows"] == {"train": len(train), "test": len(test)}
    return manifest, train, test


def test_rl_rows(tmp_path):
    path = write_rows(tmp_path / "sums.csv", plain(100))
    manifest, train, test = converted(path, tmp_path / "out")
    assert (manifest["kind"], len(train), len(test)) == ("rl", 95, 5)
    assert validate_parquet(tmp_path / "out/train.parquet") == 95
    assert {row["prompt"][0]["content"]: row["reward_model"]["ground_truth"] for row in [*train, *test]} == {
        f"what is {n}?": str(n) for n in range(100)
    }
    assert {row["data_source"] for row in train} == {"sums"}
    assert manifest["origin"] == [Records(path).origin()]


def test_pairs_that_contradict_one_another_are_counted(tmp_path):
    """`make dpo` leaves them out; here they had been rows like the others."""
    rows = [{"prompt": f"p {i}", "chosen": "a", "rejected": "b"} for i in range(8)]
    rows += [{"prompt": "p 0", "chosen": "b", "rejected": "a"}, {"prompt": "p 1", "chosen": "c", "rejected": "a"}]
    file = write_rows(tmp_path / "x.jsonl", rows)
    manifest = convert(parse([str(file), str(tmp_path / "out")]))
    assert sum(manifest["rows"].values()) == 10
    assert "2 pairs contradict another of their prompt, and `make dpo` leaves them out" in describe(manifest)
    manifest = convert(parse([str(write_rows(file, rows[:8])), str(tmp_path / "out")]))
    assert "contradict another" not in describe(manifest)


def test_dpo_rows(tmp_path):
    rows = [*pairs(40), *pairs(3), {"prompt": "hi", "chosen": "same", "rejected": "same"}]
    manifest, train, _ = converted(write_rows(tmp_path / "x.json", rows), tmp_path / "out")
    assert manifest["kind"] == "dpo"
    assert {reason: count for reason, count in manifest["dropped"].items() if count} == {"unusable": 1, "duplicates": 3}
    assert train[0]["chosen"] == [{"role": "assistant", "content": "yes"}]
    assert train[0]["rejected"] == [{"role": "assistant", "content": "no"}]


CALL = {"name": "f", "arguments": {"x": 1}}
CALLING = {
    "messages": [USER, {"role": "assistant", "content": None, "tool_calls": [{"function": CALL}]}],
    "tools": [{"name": "f"}],
}


def test_calls_and_tools_are_kept(tmp_path):
    path = write_rows(tmp_path / "x.jsonl", [CALLING, *chats(20)])
    for kind, messages in (("sft", "messages"), ("rl", "prompt")):
        _, train, test = converted(path, tmp_path / kind, "--kind", kind)
        (row,) = [row for row in [*train, *test] if row[messages][0]["content"] == "hi"]
        tools = row["tools"] if kind == "sft" else row["extra_info"]["tools"]
        assert json.loads(tools)[0]["function"]["name"] == "f"
        if kind == "sft":
            function = row["messages"][1]["tool_calls"][0]["function"]
            assert (function["name"], json.loads(function["arguments"])) == ("f", {"x": 1})
        else:
            assert json.loads(row["reward_model"]["ground_truth"]) == [CALL]


@pytest.mark.parametrize("rows, kind", [(plain(20), "sft"), (chats(20), "rl"), (chats(20), "")])
def test_kind_can_be_chosen(tmp_path, rows, kind):
    path = write_rows(tmp_path / "x.jsonl", rows)
    manifest, _, _ = converted(path, tmp_path / "out", *(["--kind", kind] if kind else []))
    assert manifest["kind"] == (kind or "sft")
    assert validate_parquet(tmp_path / "out/train.parquet", manifest["kind"]) == 19


def test_twins_are_one_prompt(tmp_path):
    twins = [{"question": text, "answer": "1"} for text in ("what\r\nis  caf\u00e9?", " what is cafe\u0301? ")]
    path = write_rows(tmp_path / "x.jsonl", [*plain(20), {"question": "what is caf\u00e9?", "answer": "1"}, *twins])
    assert converted(path, tmp_path / "out")[0]["dropped"]["duplicates"] == 2
    (tmp_path / "own").mkdir()
    write_rows(tmp_path / "own/test.jsonl", [{"question": "what is caf\u00e9?", "answer": "1"}])
    write_rows(tmp_path / "own/train.jsonl", [*plain(20), twins[1]])
    assert converted(tmp_path / "own", tmp_path / "out")[0]["dropped"]["with_a_prompt_of_the_test_split"] == 1


def test_columns_that_are_not_used_are_named(tmp_path):
    rows = [row | {"source": "web", "empty": None} | ({"level": 3} if n else {}) for n, row in enumerate(plain(20))]
    manifest, _, _ = converted(write_rows(tmp_path / "x.jsonl", rows), tmp_path / "out")
    assert manifest["not_used"] == ["source", "level"] and "not used: source, level" in describe(manifest)


@pytest.mark.parametrize("kind", ["sft", "rl"])
def test_a_turn_of_weight_0_is_no_truth(tmp_path, kind):
    turns = [("user", 1), ("assistant", 0), ("user", 1), ("assistant", 1), ("user", 1), ("assistant", 0)]
    rows = [
        {"messages": [{"role": role, "content": f"{role} {n} {i}", "weight": w} for i, (role, w) in enumerate(turns)]}
        for n in range(20)
    ]
    rows.append({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0}]})
    manifest, _, train = converted(write_rows(tmp_path / "x.jsonl", rows), tmp_path / "out", "--kind", kind)
    assert manifest["dropped"]["unusable"] == 1
    assert ("those of weight 0" in describe(manifest)) == (kind == "sft")
    for row in train:
        *prompt, last = row["messages"] if kind == "sft" else [*row["prompt"], row["reward_model"]["ground_truth"]]
        assert len(prompt) == 3 and (last["content"] if kind == "sft" else last).endswith(" 3")


def test_conversation_without_last_answer_is_counted(tmp_path):
    path = write_rows(tmp_path / "x.jsonl", [*chats(20), {"messages": [USER]}])
    manifest, _, _ = converted(path, tmp_path / "out")
    assert manifest["dropped"]["unusable"] == 1
    assert "dropped: 1 unusable" in describe(manifest)


def test_columns_seed_and_sizes(tmp_path):
    rows = [{"q": f"what {n}", "a": n, "prompt": "other", "s": "be brief"} for n in range(50)]
    path = write_rows(tmp_path / "x.jsonl", rows)
    options = ["--prompt-column", "q", "--answer-column", "a", "--system-column", "s", "--max-samples", "20"]
    _, train, test = converted(path, tmp_path / "out", *options, "--test-size", "4", "--seed", "1")
    assert (len(train), len(test)) == (16, 4)
    assert [message["role"] for message in train[0]["prompt"]] == ["system", "user"]
    assert converted(path, tmp_path / "out", *options, "--test-size", "4", "--seed", "1")[1:] == (train, test)
    assert converted(path, tmp_path / "out", *options, "--test-size", "4", "--seed", "2")[1:] != (train, test)


def test_folder_keeps_its_own_split(tmp_path):
    folder = tmp_path / "sums"
    folder.mkdir()
    write_rows(folder / "train.jsonl", plain(30))
    write_rows(folder / "test.csv", plain(40)[25:])
    manifest, train, test = converted(folder, tmp_path / "out")
    assert (len(train), len(test)) == (25, 15)
    assert "dropped: 5 with a prompt of the test split" in describe(manifest)


ODD = {
    "unknown form": (
        [{"a": 1}],
        [],
        "line 1: has no known form; it has columns a.*`make json_to_parquet` takes others .*--prompt",
    ),
    "a column that goes": ([*plain(3), {"question": "x"}], [], "line 4: has a prompt but no answer"),
    "another type": ([*plain(3), {"question": 3, "answer": 1}], [], "line 4: column `question`: must be text"),
    "no such column": (plain(3), ["--prompt-column", "q"], "line 1: has no column `q`"),
    "pairs as rl": (pairs(3), ["--kind", "rl"], "line 1: has chosen and rejected.*--kind dpo"),
    "no pairs": (plain(3), ["--kind", "dpo"], "line 1: has no chosen and rejected"),
    "one row": (plain(1), [], "only 1 different rows"),
    "no test split": (plain(5), ["--test-size", "0"], "no test split of its own"),
}


@pytest.mark.parametrize("rows, options, message", ODD.values(), ids=ODD)
def test_rows_that_do_not_fit_are_refused_and_old_files_stay(tmp_path, rows, options, message):
    converted(write_rows(tmp_path / "good.jsonl", plain(20)), tmp_path / "out")
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    path = write_rows(tmp_path / "x.jsonl", rows)
    with pytest.raises(DataError, match=rf"^{path}: .*{message}") as error:
        convert(parse([str(path), str(tmp_path / "out"), *options]))
    assert "\n" not in str(error.value)
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


@pytest.mark.parametrize(
    "options",
    [
        ["--test-size", "1.5"],
        ["--test-size", "nan"],
        ["--test-size", "-1"],
        ["--max-samples", "-1"],
        ["--seed", "x"],
        ["--kind", "ppo"],
        ["--prompt", "q"],
    ],
)
def test_wrong_options_are_refused(options):
    with pytest.raises(SystemExit) as error:
        parse(["a", "b", *options])
    assert error.value.code == 2


def command(*arguments):
    arguments = [PYTHON, "-m", "verl_tasks.data.convert", *map(str, arguments)]
    return subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True)


def test_command_line(tmp_path):
    result = command(write_rows(tmp_path / "x.jsonl", [*plain(40), *plain(2)]), tmp_path / "out")
    assert (result.returncode, result.stderr) == (0, "")
    assert "rl rows" in result.stdout and "38 train" in result.stdout and "dropped: 2 duplicates" in result.stdout
    assert f"TRAIN_FILE={tmp_path}/out/train.parquet" in result.stdout
    result = command(tmp_path / "no.json", tmp_path / "out")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == f"error: {tmp_path}/no.json: no such file\n"


@pytest.mark.medium
@pytest.mark.skipif(not SHARED.is_dir(), reason="no shared data")
@pytest.mark.parametrize(
    "name, kind, rows, duplicates",
    [
        ("gsm8k", "rl", {"train": 7473, "test": 1319}, 0),
        ("gsm8k/train.jsonl", "rl", {"train": 7099, "test": 374}, 0),
        ("tool_calls/glaive_toolcall_en_demo.json", "sft", {"train": 252, "test": 13}, 35),
        ("tool_calls/reason_tool_use_demo_50.jsonl", "sft", {"train": 48, "test": 2}, 0),
        ("preferences/dpo_en_demo.json", "dpo", {"train": 280, "test": 15}, 5),
    ],
)
def test_real_files(tmp_path, name, kind, rows, duplicates):
    manifest, _, _ = converted(SHARED / name, tmp_path / "out")
    assert (manifest["kind"], manifest["rows"], manifest["dropped"]["duplicates"]) == (kind, rows, duplicates)
    if kind != "dpo":
        assert validate_parquet(tmp_path / "out/train.parquet", kind) == rows["train"]
