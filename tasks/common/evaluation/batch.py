"""`make batch`: a table of prompts in, the same table with responses and scores out."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pandas as pd

from verl_tasks.data.formats import chat_in, tool_schemas
from verl_tasks.data.records import Records, check_header
from verl_tasks.evaluation.chat import task_system
from verl_tasks.evaluation.engines import window
from verl_tasks.evaluation.rollouts import TOO_LONG, Rollout
from verl_tasks.evaluation.sample import Job, Scoring, report_errors, sampled, sampling
from verl_tasks.evaluation.spreadsheet import csv_rows, csv_text, write_xlsx
from verl_tasks.files import check_writable, write_text
from verl_tasks.rewards.episode import refusal
from verl_tasks.rows import DataError, chat, messages_problem, read_rows, rl_row, rl_schema, write_parquet
from verl_tasks.settings import Command, Settings, SettingsError, artifacts, fingerprint


def _xlsx_rows(path: Path) -> list[dict]:
    """The rows of the first sheet, as texts. Says which other sheets have rows."""
    first, *others = pd.read_excel(path, sheet_name=None, dtype=str, keep_default_na=False, header=None).items()
    if left_out := [name for name, table in others if len(table) > 1]:
        print(f"  INPUT={path}: the sheet {first[0]} alone is read, not {', '.join(left_out)}")
    header, *rows = first[1].to_numpy().tolist() or [[]]
    check_header(header)
    return [dict(zip(header, row, strict=True)) for row in rows]


READ = {**dict.fromkeys((".json", ".jsonl"), lambda path: list(Records(path))), ".csv": csv_rows, ".xlsx": _xlsx_rows}
WRITE = (".xlsx", ".json", ".jsonl", ".csv")


def paths(command: Command) -> tuple[Path, Path]:
    """INPUT and OUTPUT. Raises SettingsError, before a model is loaded, where one is missing or cannot be used, and
    where both are one file."""
    for name in ("INPUT", "OUTPUT"):
        if not getattr(command, name):
            raise SettingsError(f"{name} is empty: give INPUT=in.jsonl OUTPUT=out.xlsx")
    table, output = Path(command.INPUT).expanduser(), Path(command.OUTPUT).expanduser()
    if table.suffix.lower() not in READ:
        raise SettingsError(f"INPUT={table}: must end in {', '.join(READ)}")
    if not table.is_file():
        raise SettingsError(f"INPUT={table}: no such file")
    if output.suffix.lower() not in WRITE:
        raise SettingsError(f"OUTPUT={output}: must end in {', '.join(WRITE)}")
    try:
        check_writable(output)
    except OSError as error:
        raise SettingsError(f"OUTPUT={output}: cannot be written: {error.strerror or error}") from error
    if output.exists() and output.samefile(table):
        raise SettingsError(f"OUTPUT={output}: is INPUT, which it would replace; give the path of another file")
    return table, output


def read_table(path: Path) -> list[dict]:
    """The rows of ``path``, dicts with the column ``prompt``, perhaps ``ground_truth`` and ``tools``. Raises DataError
    for other files."""
    try:
        rows = READ[path.suffix.lower()](path)
    except Exception as error:
        raise DataError(f"INPUT={path}: cannot be read: {' '.join(str(error).split())[:200]}") from error
    if not rows:
        raise DataError(f"INPUT={path}: has no rows")
    columns = list(dict.fromkeys(name for row in rows for name in row))
    if "prompt" not in columns:
        raise DataError(f"INPUT={path}: needs a column `prompt`; it has {', '.join(map(str, columns))}")
    return [{name: dict.get(row, name) for name in columns} for row in rows]


def _messages(prompt, system: list[dict]) -> list[dict]:
    """The chat that ``prompt`` is, in a cell as JSON text; of another text after ``system``. Raises DataError."""
    if messages := chat_in(prompt):
        return messages
    if isinstance(prompt, str) and prompt.strip():
        return [*system, *chat(prompt)]
    raise DataError("is empty" if isinstance(prompt, str) else f"must be text or a chat: {messages_problem(prompt)}")


def rl_rows(table: Path, rows: list[dict], task: str, system: list[dict]) -> list[dict]:
    """The ``rows`` of ``table`` as RL rows; a text prompt gets the task's system message, a row the ``tools`` that it
    names. No ground truth: nothing to score. Raises DataError for the first row that is no prompt."""
    result = []
    for index, row in enumerate(rows):
        read = {}
        for column, convert in {"prompt": lambda prompt: _messages(prompt, system), "tools": tool_schemas}.items():
            try:
                read[column] = convert(row.get(column))
            except DataError as error:
                raise DataError(f"INPUT={table}: row {index + 1}, column {column}: {error}") from error
        truth = row.get("ground_truth")
        result.append(rl_row(task, read["prompt"], "" if truth is None else truth, "batch", index, read["tools"]))
    return result


def answers(rows: list[dict], rollouts: list[Rollout]) -> list[dict]:
    """The rows of the output: one per response, first the input's columns, then the response's and its reward's. A
    column of the input that has the name of one of these becomes "input <name>"."""
    keys = dict.fromkeys(key for r in rollouts for key in (r.reward or {}))
    several, result = any(r.sample for r in rollouts), []
    for r in rollouts:
        error = "longer than the model's window" if r.finish_reason == TOO_LONG else r.error
        new = {"response": r.response, "finish_reason": r.finish_reason, "tokens": r.tokens, "entropy": r.entropy}
        turns = {"turns": sum(message["role"] == "assistant" for message in r.messages)} if r.messages else {}
        new = ({"sample": r.sample} if several else {}) | new | keys | (r.reward or turns) | {"error": error}
        result.append({_input_name(name, rows[r.index], new): value for name, value in rows[r.index].items()} | new)
    return result


def _input_name(name: str, row: dict, new: dict) -> str:
    """The output's name of the column ``name`` of the input ``row``: neither ``new`` nor another column has it."""
    kept = name
    while kept in new or (kept != name and kept in row):
        kept = f"input {kept}"
    return kept


def write_table(path: Path, rows: list[dict]) -> None:
    """Write ``rows`` in the form that the ending of ``path`` names; a list of messages becomes JSON text in a cell."""
    kind = path.suffix.lower()
    if kind == ".json":
        text = json.dumps(rows, indent=2, ensure_ascii=False)
    elif kind == ".jsonl":
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    else:
        cells = [{name: _cell(value) for name, value in row.items()} for row in rows]
        table = pd.DataFrame(cells, dtype=object)
        if kind == ".xlsx":
            return write_xlsx(path, table, "batch")
        text = csv_text(table)
    write_text(path, text)


def _cell(value):
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict) else value


def batch(s: Settings, command: Command, scoring: Scoring, model: str) -> int:
    """Answer each row of INPUT with ``model`` and write OUTPUT. Returns on how many the reward raised."""
    table, output = paths(command)
    rows = read_table(table)
    prompts = rl_rows(table, rows, s.TASK, task_system(read_rows(s.data_dir / "test.parquet", 1)))[: s.LIMIT or None]
    bare = next((row for row in prompts if not row["reward_model"]["ground_truth"]), None)
    if scoring.environment and bare and (why := asyncio.run(refusal(scoring.environment, bare, s.STEP_SECONDS))):
        number = bare["extra_info"]["index"] + 1
        raise DataError(f"INPUT={table}: row {number} has no ground_truth, which the environment needs: {why}")
    file = artifacts() / "batch" / s.TASK / f"{fingerprint({'rows': prompts})}.parquet"
    write_parquet(prompts, file, rl_schema(tools=True))  # a chat may hold calls
    # Not MAX_PROMPT_LENGTH: these are not the task's prompts.
    room = window(model, s.MAX_NEW_TOKENS) - s.MAX_NEW_TOKENS
    how = replace(sampling(s), greedy=False, max_prompt_tokens=room)
    job = Job.of(s, model, file, how)
    rollouts = sampled({"batch": job}, artifacts() / "batch" / s.TASK, scoring)["batch"]
    write_table(output, answers(rows, rollouts))
    scores = [r.reward["score"] for r in rollouts if r.reward]
    too_long = sum(r.finish_reason == TOO_LONG for r in rollouts)
    text = f"{len(rollouts) - too_long} responses to {len(prompts)} prompts"
    text += f" ({too_long} of more tokens than the model's window)" if too_long else ""
    text += f", mean score {sum(scores) / len(scores):.3f} of {len(scores)}" if scores else ""
    print(f"  {text}: {output}")
    return report_errors(rollouts)
