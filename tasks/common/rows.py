"""Rows in verl's format: build them, write them to parquet as a stream, validate any parquet against the schema.

verl reads ``data_source, prompt, ability, reward_model{style, ground_truth}, extra_info`` for RL
(verl/utils/dataset/rl_dataset.py) and ``messages`` for SFT (verl/utils/dataset/multiturn_sft_dataset.py).
"""

import json
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

from verl_tasks.files import written_beside

ROLES = ("system", "user", "assistant", "tool")
BATCH_ROWS = 4096
READ_ROWS = 256  # decoded at a time
# A parquet file of a kilobyte can expand to gigabytes. It is refused when its metadata or its decoded rows have more
# bytes or values than this for each of its own bytes. Tool schemas in every row, well compressed, come to some 1000.
STORED, DECODED = 1000, 10_000
FREE, FEW = 64 << 20, 1 << 20  # bytes, and values, that any file may have
AT_ONCE = 2 << 30  # bytes: rows that could come to more are not decoded together
JOINED = 4096  # training rows among which the problem of a demonstration is looked for

FUNCTION = pa.struct([("name", pa.string()), ("arguments", pa.string())])  # arguments as JSON text
CALLS = pa.list_(pa.struct([("type", pa.string()), ("function", FUNCTION)]))
MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
TOOL_MESSAGES = pa.list_(
    pa.struct([("role", pa.string()), ("content", pa.string()), ("name", pa.string()), ("tool_calls", CALLS)])
)


def rl_schema(tools: bool = False) -> pa.Schema:
    """Schema of RL rows. With ``tools`` their messages may hold calls, and extra_info has tool schemas as JSON text."""
    own = [("tools", pa.string())] if tools else []
    extra = pa.struct([("split", pa.string()), ("index", pa.int64()), ("key", pa.string()), *own])
    columns = {"data_source": pa.string(), "prompt": TOOL_MESSAGES if tools else MESSAGES, "ability": pa.string()}
    columns["reward_model"] = pa.struct([("style", pa.string()), ("ground_truth", pa.string())])
    return pa.schema(columns | {"extra_info": extra})


def sft_schema(tools: bool = False, episodes: bool = False) -> pa.Schema:
    """Schema of demonstrations. With ``tools`` their messages may hold calls, and tool schemas are a column. With
    ``episodes`` the column ``prompt_messages`` says how many messages come before the first turn to learn."""
    own = {"prompt_messages": pa.int64()} if episodes else {}
    columns = {"messages": TOOL_MESSAGES, "tools": pa.string()} if tools else {"messages": MESSAGES}
    return pa.schema(columns | own)


def dpo_schema(tools: bool = False, truncated: bool = False) -> pa.Schema:
    """Schema of preference pairs for TRL's DPOTrainer: chosen and rejected are one assistant message each.

    ``truncated``: add the column ``truncated``, the names of the answers that were cut at the length limit.
    """
    columns = {"prompt": TOOL_MESSAGES if tools else MESSAGES, "chosen": MESSAGES, "rejected": MESSAGES}
    columns |= {"tools": pa.string()} if tools else {}
    return pa.schema(columns | ({"truncated": pa.list_(pa.string())} if truncated else {}))


FIRST_PROBLEMS = 10  # problems shown per file


class DataError(ValueError):
    """Data that a stage cannot use; the message names file, row and column."""

    @classmethod
    def of(cls, problems: list[str]) -> "DataError":
        """The first of ``problems`` as message, the others as notes, which the command prints below it."""
        error = cls(problems[0])
        for other in problems[1:]:
            error.add_note(other)
        return error


def chat(prompt: str, system: str | None = None) -> list[dict]:
    """The messages of a prompt; without ``system`` the chat template inserts its default, if it has one."""
    return [*([{"role": "system", "content": system}] if system else []), {"role": "user", "content": prompt}]


@dataclass(frozen=True)
class Example:
    """One problem: the prompt, what the reward needs, and a worked answer for SFT if there is one. In a multi-turn
    task, ``demonstration`` has the messages of an episode: the model's, calls as text, and those of tools or the user.

    ``prompt``: text of the user's turn, or OpenAI messages. ``ground_truth``: stored as JSON text unless it is text.
    ``tools``: OpenAI tool schemas for the prompt. ``split``: "train" or "test" where the source has its own split.
    ``group``: examples of one group (turns of a conversation) stay on one side of the split. ``key``: one text per
    problem, if its prompt does not tell it from others; the problem is then taken once. ``place``: of its record, for
    people; ``Examples`` sets it.
    """

    prompt: str | list[dict]
    ground_truth: dict | list | str
    demonstration: str | list[dict] | None = None
    system: str | None = None
    tools: list[dict] | None = None
    split: str | None = None
    group: str | None = None
    key: str | None = None
    place: str = field(default="", compare=False)

    def messages(self) -> list[dict]:
        """The prompt as OpenAI messages."""
        if isinstance(self.prompt, str):
            return chat(self.prompt, self.system)
        own = self.system and self.prompt[0]["role"] != "system"
        return [*([{"role": "system", "content": self.system}] if own else []), *self.prompt]


def truth_problem(value) -> str | None:
    """Why ``value`` can be no ground truth; None if it can."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        return f"must be text or a JSON value ({error}); convert it first"
    return None


def encoded(messages: list[dict]) -> list[dict]:
    """OpenAI messages for storage, calls' arguments as JSON text: parquet merges the keys of objects over all rows."""
    return [_with_calls(message, json.dumps) for message in messages]


def decoded(messages: list[dict]) -> list[dict]:
    """Stored messages as OpenAI messages: no empty fields, the arguments of tool calls as objects."""
    return [_with_calls({k: v for k, v in m.items() if v is not None}, json.loads) for m in messages]


def chat_text(messages: list[dict]) -> str:
    """One text for stored messages, to find equal ones by."""
    return json.dumps(decoded(messages), sort_keys=True)


def normalized(value):
    """``value`` with every text in it in Unicode's NFC and its white space collapsed: twins become equal."""
    if isinstance(value, str):
        return " ".join(unicodedata.normalize("NFC", value).split())
    if isinstance(value, dict):
        return {name: normalized(each) for name, each in value.items()}
    return [normalized(each) for each in value] if isinstance(value, list) else value


def posed(messages: list[dict], tools: list[dict] | None) -> str:
    """One text for all prompts that pose the same problem."""
    return json.dumps(normalized([messages, tools]), sort_keys=True)


def demonstration(row: dict) -> tuple[list[dict], int]:
    """The chat of a demonstration, and how many of its messages come before the first turn to learn."""
    messages = decoded(row["messages"])
    return messages, row.get("prompt_messages") or len(messages) - 1


def _with_calls(message: dict, convert: Callable) -> dict:
    functions = [call["function"] for call in message.get("tool_calls") or []]
    calls = [{"type": "function", "function": {**f, "arguments": convert(f["arguments"])}} for f in functions]
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    return rest | ({"tool_calls": calls} if calls else {})


def tools_of(row: dict) -> list[dict] | None:
    """The tool schemas of an RL row (extra_info.tools) or a demonstration (tools); None if it has none."""
    text = row.get("tools") or (row.get("extra_info") or {}).get("tools")
    return json.loads(text) if text else None


def rl_row(data_source: str, messages: list[dict], ground_truth, split: str, index: int, tools=None, key=None) -> dict:
    """One RL row: the ``messages`` that the model answers, the ``tools`` it may call, and what its reward needs.

    ``key``: text that is the same for rows of the same problem, even if their prompts differ. ``ground_truth`` is
    stored as JSON text unless it is text: parquet merges the keys of dicts over all rows and refuses mixed types.
    """
    if not isinstance(ground_truth, str):
        ground_truth = json.dumps(ground_truth)
    extra = {"split": split, "index": index, "key": key} | ({} if tools is None else {"tools": json.dumps(tools)})
    return {
        "data_source": data_source,
        "prompt": encoded(messages),
        "ability": data_source,
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": extra,
    }


def sft_row(messages: list[dict], response: str | dict | list[dict], tools: list[dict] | None = None) -> dict:
    """One demonstration for SFT: ``messages`` answered by ``response``, a text, a message, or those of an episode."""
    if isinstance(response, list):
        row = {"messages": encoded([*messages, *response]), "prompt_messages": len(messages)}
    else:
        message = {"role": "assistant", "content": response} if isinstance(response, str) else response
        row = {"messages": encoded([*messages, message])}
    return row | ({} if tools is None else {"tools": json.dumps(tools)})


def dpo_row(example: Example) -> dict:
    """One preference pair: ``ground_truth`` has the texts ``chosen`` and ``rejected``, and perhaps ``truncated``."""
    pair = example.ground_truth
    answers = {name: [{"role": "assistant", "content": pair[name]}] for name in ("chosen", "rejected")}
    own = {"truncated": pair["truncated"]} if "truncated" in pair else {}
    own |= {"tools": json.dumps(example.tools)} if example.tools else {}
    return {"prompt": encoded(example.prompt)} | answers | own


def write_parquet(rows: Iterable[dict], path: Path, schema: pa.Schema, total: int | None = None) -> int:
    """Write ``rows`` to ``path`` and return their number. Memory does not grow with the number of rows.

    Raises DataError when a row does not fit ``schema``; ``path`` is then unchanged.
    """
    shown = tqdm(rows, f"  {Path(path).name}", total, unit=" rows", leave=False, mininterval=1, disable=None)
    rows, count = iter(shown), 0
    with written_beside(path) as partial, pq.ParquetWriter(partial, schema) as writer:
        while batch := list(islice(rows, BATCH_ROWS)):
            try:
                writer.write_table(pa.Table.from_pylist(batch, schema))
            except (pa.ArrowException, AttributeError, TypeError, UnicodeEncodeError) as error:
                where = f"{path}: rows {count} to {count + len(batch) - 1}"
                raise DataError(f"{where}: do not fit the schema ({str(error).splitlines()[0]})") from error
            count += len(batch)
    return count


def parquet_rows(path: Path) -> Iterator[dict]:
    """Rows of a parquet file in order, READ_ROWS of them decoded at a time.

    Raises DataError (without the path) when it expands beyond the bounds above, and pyarrow's errors.
    """
    with pq.ParquetFile(path) as file:
        own, groups = Path(path).stat().st_size, [file.metadata.row_group(i) for i in range(file.num_row_groups)]
        chunks = [group.column(index) for group in groups for index in range(group.num_columns)]
        stored = sum(chunk.total_uncompressed_size for chunk in chunks)
        values = max(sum(chunk.num_values for chunk in chunks), file.metadata.num_rows)
        if stored > STORED * own + FREE or values > STORED * own + FEW:
            raise DataError(f"its {own:,} bytes expand to {stored:,} bytes and {values:,} values: too many to read")
        # No value is larger than what is stored: where that is much for such a file, few rows are decoded at a time.
        largest = max((chunk.total_uncompressed_size for chunk in chunks), default=0)
        at_once = AT_ONCE // max(1, largest) if stored < 100 * own + FEW else FREE // stored
        decoded = 0
        for batch in file.iter_batches(max(1, min(READ_ROWS, at_once))):
            # Of its values one by one: a dictionary counts a value as often as it is used.
            plain = (c.dictionary_decode() if pa.types.is_dictionary(c.type) else c for c in batch.columns)
            decoded += sum(column.nbytes for column in plain)
            if decoded > DECODED * own + FREE:
                raise DataError(f"its {own:,} bytes expand to more than {decoded:,}: too many to read")
            yield from batch.to_pylist()


def read_rows(path: Path, limit: int | None = None) -> Iterator[dict]:
    """Rows of a parquet file in order, a batch at a time. Raises DataError if the file is missing or corrupt."""
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{path}: no such file; run `make data` or give the path of a parquet file")
    try:
        yield from islice(parquet_rows(path), limit)
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        problem = str(error).splitlines()[0]
        ours = "remove it and run `make data`"
        todo = ours if path.suffix == ".parquet" else f"`make json_to_parquet FILE={path} OUTPUT=out` writes one"
        raise DataError(f"{path}: not a readable parquet file ({problem}); {todo}") from error


def solved(train: Path, demonstrations: Path, most: int | None = None) -> Iterator[tuple[int, dict, dict]]:
    """Of the first ``most`` of ``demonstrations`` those whose prompt has one of the first JOINED rows of ``train``, and
    no other: the place of that row, the row, and the demonstration. None without the file."""
    rows = defaultdict(list)
    for place, row in enumerate(read_rows(train, JOINED) if demonstrations.is_file() else ()):
        rows[chat_text(row["prompt"])].append((place, row))
    for shown in read_rows(demonstrations, most) if rows else ():
        _, first = demonstration(shown)
        if len(own := rows[chat_text(shown["messages"][:first])]) == 1:  # else it is not known which one it solves
            yield *own[0], shown


def messages_problem(messages) -> str | None:
    """The problem with a chat; None if it is valid."""
    if not isinstance(messages, list) or not messages:
        return "must be a non-empty list of {role, content}"
    for message in messages:
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            return f"each message needs a role among {', '.join(ROLES)}"
        if not isinstance(message.get("content"), str):
            return "each message needs a text content"
        if message.get("tool_calls") and (problem := _calls_problem(message["tool_calls"])):
            return problem
    return None


def _calls_problem(calls) -> str | None:
    try:
        for call in calls:
            arguments = call["function"]["arguments"]
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
            if not isinstance(call["function"]["name"], str) or not isinstance(arguments, dict):
                raise TypeError
    except (ValueError, TypeError, KeyError):
        return "each of tool_calls must be {function: {name, arguments}}, the arguments an object or its JSON text"
    return None


def _tools_problem(text) -> str | None:
    try:
        tools = json.loads(text) if text else []
        named = isinstance(tools, list) and all(isinstance(tool["function"]["name"], str) for tool in tools)
    except (ValueError, TypeError, KeyError):
        named = False
    return None if named else "must be JSON text, a list of {type, function: {name, ...}}"


def _rl_problem(row: dict) -> tuple[str, str] | None:
    model, extra = row.get("reward_model"), row.get("extra_info")
    texts = {"data_source": row.get("data_source"), "ability": row.get("ability")}
    texts |= {"reward_model.style": model.get("style")} if isinstance(model, dict) else {}
    for column, text in texts.items():
        if not isinstance(text, str) or not text:
            return column, "must be non-empty text"
    if problem := messages_problem(row.get("prompt")):
        return "prompt", problem
    if not isinstance(model, dict):
        return "reward_model", "must be {style, ground_truth}"
    if model.get("ground_truth") in (None, ""):
        return "reward_model.ground_truth", "is missing"
    if not isinstance(extra, dict):
        return "extra_info", "must be a dict"
    if not isinstance(extra.get("key"), str | None):
        return "extra_info.key", "must be text"
    problem = _tools_problem(extra.get("tools"))
    return ("extra_info.tools", problem) if problem else None


def _sft_problem(row: dict) -> tuple[str, str] | None:
    problem = messages_problem(row.get("messages"))
    if problem is None and row["messages"][-1]["role"] != "assistant":
        problem = "the last message must be the assistant's"
    return ("messages", problem) if problem else None


def validate_parquet(path: Path, kind: str = "rl", most: int | None = None) -> int:
    """Check every row of ``path``, or the first ``most``, as ``kind`` ("rl" or "sft"); return how many were checked.

    Raises DataError naming the row (from 0) and the column of the first problem, and of the next nine.
    """
    find_problem = {"rl": _rl_problem, "sft": _sft_problem}[kind]
    count, problems = 0, []
    for count, row in enumerate(read_rows(path, most), 1):
        if found := find_problem(row):
            column, problem = found
            problems.append(f"{path}: row {count - 1}, column {column}: {problem}")
            if len(problems) == FIRST_PROBLEMS:
                break
    if problems:
        raise DataError.of(problems)
    if not count:
        raise DataError(f"{path}: has no rows")
    return count
