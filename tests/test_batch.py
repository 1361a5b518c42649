"""Tables in and out of `make batch`."""

import asyncio
import csv
import json
from dataclasses import fields, replace
from pathlib import Path

import openpyxl
import pandas as pd
import pytest

from tasks.calculator.environment import TOOLS, Environment
from tests.helpers import make, task_settings
from verl_tasks.evaluation import batch
from verl_tasks.evaluation.batch import answers, paths, read_table, rl_rows, write_table
from verl_tasks.evaluation.rollouts import Rollout
from verl_tasks.evaluation.sample import Scoring
from verl_tasks.rewards.episode import refusal
from verl_tasks.rows import DataError, chat, rl_row, rl_schema, tools_of, write_parquet
from verl_tasks.settings import Command, SettingsError, load_settings


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("in.csv", "question,ground_truth\na,1\n", "needs a column `prompt`; it has question, ground_truth"),
        ("in.csv", "prompt\n", "has no rows"),
        ("in.csv", "prompt,ground_truth\na,1,\nb,2,\n", "row 0: (line 2) has 3 fields, the header has 2"),
        ("in.csv", "prompt,ground_truth\na\n", "has 1 fields, the header has 2"),
        ("in.csv", "prompt,prompt\na,b\n", "the header has an empty or repeated name"),
        ("in.csv", "prompt,x\n  ,1\n", "row 1, column prompt: is empty"),
        ("in.json", '["a"]', "row 0: must be an object"),
        ("in.json", '[{"prompt": "a"}, {"prompt": 5}]', "row 2, column prompt: must be text or a chat"),
        ("in.json", '[{"prompt": [{"role": "user"}]}]', "each message needs a text content"),
        ("in.json", '[{"prompt": "a", "tools": ["f"]}]', "row 1, column tools: is not JSON"),
        ("in.json", "[{", "cannot be read"),
        ("in.jsonl", '{"prompt": "a"}\n{"pro', "line 2: is not JSON"),
        ("in.xlsx", "no zip", "cannot be read"),
    ],
)
def test_a_bad_table_is_named_in_one_line(tmp_path, name, content, said):
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(DataError) as error:
        rl_rows(path, read_table(path), "t", [])
    assert str(path) in str(error.value) and said in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("given", "output", "said"),
    [
        ("", "out.csv", "INPUT is empty: give INPUT=in.jsonl OUTPUT=out.xlsx"),
        ("in.csv", "", "OUTPUT is empty: give INPUT=in.jsonl OUTPUT=out.xlsx"),
        ("in.txt", "out.csv", "INPUT={}/in.txt: must end in .json, .jsonl, .csv, .xlsx"),
        ("none.csv", "out.csv", "INPUT={}/none.csv: no such file"),
        ("in.csv", "out.parquet", "OUTPUT={}/out.parquet: must end in .xlsx, .json, .jsonl, .csv"),
        ("in.csv", "none/out.csv", "OUTPUT={0}/none/out.csv: cannot be written: {0}/none: no such folder"),
    ],
)
def test_tables_that_cannot_be_used_are_named(tmp_path, given, output, said):
    (tmp_path / "in.csv").write_text("prompt\na\n")
    named = {"INPUT": given and str(tmp_path / given), "OUTPUT": output and str(tmp_path / output)}
    with pytest.raises(SettingsError) as error:
        paths(load_settings(named, Command))
    assert str(error.value) == said.format(tmp_path)


@pytest.mark.parametrize("output", ["in.csv", "none/../in.csv", "link.csv"])
def test_the_input_is_not_replaced_by_the_output(tmp_path, output):
    (tmp_path / "in.csv").write_text("prompt\na\n")
    (tmp_path / "none").mkdir()
    (tmp_path / "link.csv").symlink_to("in.csv")
    output = tmp_path / output
    with pytest.raises(SettingsError) as error:
        paths(load_settings({"INPUT": str(tmp_path / "in.csv"), "OUTPUT": str(output)}, Command))
    assert str(error.value) == f"OUTPUT={output}: is INPUT, which it would replace; give the path of another file"


def test_a_home_folder_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "in.csv").write_text("prompt\na\n")
    found = paths(load_settings({"INPUT": "~/in.csv", "OUTPUT": "~/out.csv"}, Command))
    assert found == (tmp_path / "in.csv", tmp_path / "out.csv")


def test_a_batch_without_its_table_ends_before_the_model_is_unpacked(tmp_path):
    result = make("batch", TASK="countdown", STACK="cpu", ARTIFACTS=str(tmp_path / "artifacts"), OUTPUT="out.csv")
    lines = [line for line in result.stdout.splitlines() if not line.startswith("make:")]
    assert lines == ["error: INPUT is empty: give INPUT=in.jsonl OUTPUT=out.xlsx"] and result.returncode != 0
    assert not (tmp_path / "artifacts").exists()


def test_text_prompts_get_the_tasks_system_message_and_chats_stay():
    system = [{"role": "system", "content": "s"}]
    chat = [{"role": "user", "content": "u"}]
    rows = rl_rows(Path(), [{"prompt": "a", "ground_truth": {"x": 1}}, {"prompt": chat}], "t", system)
    assert rows[0]["prompt"] == [*system, {"role": "user", "content": "a"}]
    assert json.loads(rows[0]["reward_model"]["ground_truth"]) == {"x": 1}
    assert rows[1]["prompt"] == chat and rows[1]["reward_model"]["ground_truth"] == ""


@pytest.mark.parametrize("kind", ["csv", "xlsx", "jsonl"])
def test_a_chat_that_was_written_into_a_cell_is_a_chat_again(tmp_path, kind):
    said = [{"role": "system", "content": "s"}, {"role": "user", "content": 'ü, "x"'}]
    write_table(tmp_path / f"a.{kind}", [{"prompt": said}, {"prompt": '[{"not": "a chat"}]'}])
    rows = rl_rows(Path(), read_table(tmp_path / f"a.{kind}"), "t", [])
    assert [row["prompt"] for row in rows] == [said, chat('[{"not": "a chat"}]')]


def test_each_cell_is_parsed_once(tmp_path, monkeypatch):
    parsed = []
    for name in ("chat_in", "tool_schemas"):
        convert = getattr(batch, name)
        monkeypatch.setattr(batch, name, lambda value, convert=convert: parsed.append(value) or convert(value))
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    rl_rows(Path(), read_table(tmp_path / "in.jsonl"), "t", [])
    assert parsed == ["a", None, "b", None]


def test_typed_parts_of_text_are_text_and_an_image_is_refused(tmp_path):
    parts = [{"type": "text", "text": "What?"}]
    (tmp_path / "a.json").write_text(json.dumps([{"prompt": [{"role": "user", "content": parts}]}]))
    assert rl_rows(Path(), read_table(tmp_path / "a.json"), "t", [])[0]["prompt"] == chat("What?")
    parts.append({"type": "image_url", "image_url": {"url": "x.png"}})
    (tmp_path / "a.json").write_text(json.dumps([{"prompt": [{"role": "user", "content": parts}]}]))
    with pytest.raises(DataError, match="row 1, column prompt: message 0: a content part must be a text"):
        rl_rows(Path(), read_table(tmp_path / "a.json"), "t", [])


@pytest.mark.parametrize("text", [False, True])
def test_a_model_is_told_the_tools_of_a_row(text):
    (tool,) = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}]
    rows = [{"prompt": "a", "tools": json.dumps([tool]) if text else [tool]}, {"prompt": "b", "tools": ""}]
    told, bare = map(tools_of, rl_rows(Path(), rows, "t", []))
    assert told[0]["function"]["name"] == "f" and bare is None


def test_the_sheets_that_are_not_read_are_named(tmp_path, capsys):
    with pd.ExcelWriter(tmp_path / "in.xlsx") as book:
        for name, prompts in {"one": ["a"], "two": ["b", "c"], "empty": []}.items():
            pd.DataFrame({"prompt": prompts}).to_excel(book, sheet_name=name, index=False)
    assert read_table(tmp_path / "in.xlsx") == [{"prompt": "a"}]
    assert capsys.readouterr().out == f"  INPUT={tmp_path}/in.xlsx: the sheet one alone is read, not two\n"


@pytest.mark.parametrize("second", ["prompt", None])
def test_a_sheet_has_a_name_for_each_column_as_csv_does(tmp_path, second):
    """pandas would call a second `prompt` "prompt.1", and one without a name "Unnamed: 1"."""
    pd.DataFrame([["prompt", second], ["a", "b"]]).to_excel(tmp_path / "in.xlsx", header=False, index=False)
    with pytest.raises(DataError, match="the header has an empty or repeated name: prompt, "):
        read_table(tmp_path / "in.xlsx")


def rollout(index: int, response: str, reward: dict | None) -> Rollout:
    return Rollout(index, "sampled", 0, response, "stop", 3, 0.5, [], "t", "", {}, reward)


def test_columns_of_the_input_that_are_named_like_those_of_the_output_are_kept():
    reward = {"score": 1.0}
    (row,) = once = answers([{"prompt": "a", "score": 5, "error": "e", "sample": 7}], [rollout(0, "x", reward)])
    assert (row["input score"], row["input error"], row["sample"], row["score"], row["error"]) == (5, "e", 7, 1.0, "")
    assert list(row)[:4] == ["prompt", "input score", "input error", "sample"]
    (again,) = answers(once, [rollout(0, "y", reward | {"score": 0.5})])  # the output as the next input
    assert (again["input score"], again["input input score"], again["score"]) == (5, 1.0, 0.5)
    several = [rollout(0, "x", reward), replace(rollout(0, "y", reward), sample=1)]
    rows = answers([{"prompt": "a", "sample": 7}], several)
    assert [(row["input sample"], row["sample"]) for row in rows] == [(7, 0), (7, 1)]


def test_an_episode_without_a_ground_truth_has_its_turns():
    said = [{"role": role, "content": "x"} for role in ("assistant", "tool", "assistant")]
    played = [replace(rollout(0, "x", None), messages=said), rollout(1, "y", {"score": 1.0, "turns": 3.0})]
    bare, scored = answers([{"prompt": "a"}, {"prompt": "b", "ground_truth": "1"}], played)
    assert (bare["turns"], bare["score"], scored["turns"]) == (2, None, 3.0)


LARGE = 1234567890123456789


@pytest.mark.parametrize("given", ["json", "jsonl", "xlsx", "csv"])
@pytest.mark.parametrize("kind", ["json", "jsonl", "csv", "xlsx"])
def test_integers_keep_their_digits(tmp_path, given, kind):
    text = given in ("xlsx", "csv")  # all their values are
    rows = [
        {"prompt": "a", "year": 2024, "id": str(LARGE) if text else LARGE},
        {"prompt": "b", "year": None, "id": None},
    ]
    write_table(tmp_path / f"in.{given}", rows)
    read = read_table(tmp_path / f"in.{given}")
    write_table(tmp_path / f"out.{kind}", answers(read, [rollout(0, "x", None), rollout(1, "y", {"score": 1.0})]))
    if kind == "xlsx":
        _, *cells = openpyxl.load_workbook(tmp_path / "out.xlsx").active.iter_rows(values_only=True)
        assert cells[0][1:3] == ("2024" if text else 2024, str(LARGE)) and not any(cells[1][1:3])
    elif kind == "csv":
        assert [row["year"] for row in csv.DictReader((tmp_path / "out.csv").open())] == ["2024", ""]
        assert f'"{LARGE}"' in (tmp_path / "out.csv").read_text()
    else:
        text_of = (tmp_path / f"out.{kind}").read_text()
        assert str(LARGE) in text_of and "2024.0" not in text_of


BAD = "=1+1 \x00 ü 漢"


@pytest.mark.parametrize("kind", ["json", "jsonl", "csv", "xlsx"])
def test_every_kind_of_table_is_written_with_score_columns(tmp_path, kind):
    path = tmp_path / f"out.{kind}"
    rows = answers(
        [{"prompt": "a", "id": 7}, {"prompt": "b", "id": 8}],
        [rollout(0, BAD, {"score": 1.0, "acc": 1.0}), rollout(1, "no", None)],
    )
    columns = list(rows[0])
    assert columns == ["prompt", "id", "response", "finish_reason", "tokens", "entropy", "score", "acc", "error"]
    write_table(path, rows)
    if kind == "xlsx":
        sheet = openpyxl.load_workbook(path).active
        values = list(sheet.iter_rows(values_only=True))
        assert values[0] == tuple(columns) and values[1][2] == BAD.replace("\x00", "") and values[2][6] is None
        assert sheet["C2"].data_type == "s" and values[1][1] == 7
    elif kind == "csv":
        assert list(pd.read_csv(path)["score"].fillna(-1)) == [1.0, -1.0]
    else:
        text = path.read_text()
        written = json.loads(text) if kind == "json" else [json.loads(line) for line in text.splitlines()]
        assert written[0]["response"] == BAD and written[1]["score"] is None and written[0]["id"] == 7


FORMULAS = ["=1+1", "+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", "\t=1", "＝1+1", "'=1", "''=1"]
TEXTS = ["-5", "+5", "-1.5e3", "-1,000", "-.5 %", "'tis so", "5-3", " =1", "", "a\n=1", "漢 'x'"]


def test_a_csv_holds_no_formula_and_is_read_back_as_it_was(tmp_path):
    rows = [{"prompt": text, "=HYPERLINK(1)": text, "n": -5} for text in FORMULAS + TEXTS]
    write_table(tmp_path / "out.csv", rows)
    with (tmp_path / "out.csv").open(newline="") as file:
        header, *cells = csv.reader(file)
    assert header == ["prompt", "'=HYPERLINK(1)", "n"]
    assert [row[0] for row in cells] == [f"'{text}" for text in FORMULAS] + TEXTS
    assert {row[2] for row in cells} == {"-5"} and list(pd.read_csv(tmp_path / "out.csv")["n"]) == [-5] * len(rows)
    rows = [row for row in rows if row["prompt"].strip()]  # an empty prompt is refused
    write_table(tmp_path / "in.csv", rows)
    assert read_table(tmp_path / "in.csv") == [row | {"n": "-5"} for row in rows]


@pytest.mark.parametrize("bad", ["\ufffe", "\uffff", "\x00", "\x0b", "\x1b", "\ud800", "\x7f", "\U0001fffe"])
def test_no_character_makes_an_xlsx_unreadable(tmp_path, bad):
    name = "name" if bad == "\ud800" else f"name{bad}"  # pandas takes no half of a surrogate pair for a name
    write_table(tmp_path / "out.xlsx", [{"prompt": "a", name: f"x{bad}y"}, {"prompt": "=1+1"}])
    sheet = openpyxl.load_workbook(tmp_path / "out.xlsx").active
    assert sheet["B1"].value.startswith("name") and sheet["B2"].value.replace(bad, "").replace("?", "") == "xy"
    assert (sheet["A3"].value, sheet["A3"].data_type) == ("=1+1", "s")


@pytest.mark.parametrize("kind", ["csv", "xlsx"])
def test_a_chat_in_a_cell_can_be_read_by_people(tmp_path, kind):
    write_table(tmp_path / f"out.{kind}", [{"prompt": [{"role": "user", "content": "你好"}]}])
    read = {"csv": pd.read_csv, "xlsx": pd.read_excel}[kind](tmp_path / f"out.{kind}")
    assert read["prompt"][0] == '[{"role": "user", "content": "你好"}]'


def test_what_an_xlsx_cannot_hold_is_said(tmp_path, capsys):
    write_table(tmp_path / "out.xlsx", [{"prompt": "a", "response": "x" * 32_767}])
    assert capsys.readouterr().out == ""
    write_table(tmp_path / "out.xlsx", [{"prompt": "a", "response": "x" * 32_768}])
    said = "1 texts are cut at 32,767 characters, Excel's limit; a jsonl has them whole"
    assert capsys.readouterr().out == f"  {tmp_path}/out.xlsx: {said}\n"
    assert openpyxl.load_workbook(tmp_path / "out.xlsx").active["B2"].value == "x" * 32_767


class Needs(Environment):
    """An environment that cannot play a row without its ground truth."""

    def step(self, action):
        return super().step(action) if self.truth["answer"] else None


def test_a_row_without_a_ground_truth_that_is_needed_is_named_before_a_model_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setenv("ARTIFACTS", str(tmp_path))
    prompt = [rl_row("calculator", chat("1 + 1", "be brief"), {"answer": "2"}, "test", 0, TOOLS)]
    write_parquet(prompt, tmp_path / "data/calculator/test.parquet", rl_schema(tools=True))
    rows = [{"prompt": "1 + 2", "ground_truth": {"answer": "3"}}, {"prompt": "2 + 2"}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    s = task_settings("calculator", {"N_GPUS": "1", "ARTIFACTS": str(tmp_path)})
    command = Command(**{f.name: f.metadata["default"] for f in fields(Command)})
    command = replace(command, INPUT=str(tmp_path / "in.jsonl"), OUTPUT=str(tmp_path / "out.jsonl"))
    said = r"row 2 has no ground_truth, which the environment needs: TypeError: .* \(tests/test_batch\.py:\d+, in step"
    with pytest.raises(DataError, match=said):
        batch.batch(s, command, Scoring(None, None, "", Needs), "/none")
    assert asyncio.run(refusal(Environment, rl_row("calculator", chat("1"), "", "batch", 0), 9)) == ""
