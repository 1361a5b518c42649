"""Preference pairs for DPO: read from a file of any known format, as token ids of prompt and answers."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tasks.common.data.convert import dpo_example, dpo_schema
from tasks.common.data.formats import conversation
from tasks.common.data.prepare import Example
from tasks.common.data.records import Records
from tasks.common.data.rows import DataError, decoded, messages_problem, tools_of
from tasks.common.models.chat_template import answer_ids, opens_thinking, prompt_ids


@dataclass(frozen=True)
class TokenPair:
    """A pair as token ids (int32, one dimension), each answer with what ends a turn."""

    prompt: np.ndarray
    chosen: np.ndarray
    rejected: np.ndarray

    def __len__(self) -> int:
        """Tokens of the prompt and the longer answer."""
        return len(self.prompt) + max(len(self.chosen), len(self.rejected))


def read_pairs(path: Path | str) -> Iterator[tuple[str, Example | None]]:
    """Each row of ``path`` with its place, as an Example whose ground_truth is ``{"chosen", "rejected"}``, both text;
    None where the two are the same.

    ``path`` is a parquet of our own (``dpo_schema``), or a file in any form that formats.py knows. Raises DataError
    that names file and row.
    """
    records = Records(path)
    # Of our own file the tools are taken as they are: formats.py would bring them to its form, and a prompt must be
    # what the policy was sampled on.
    pair = _own_pair if _is_own(records.path) else lambda record: dpo_example(conversation(record))
    for place, record in records.located():
        try:
            yield place, pair(record)
        except DataError as error:
            raise DataError(f"{place}: {error}") from error


def _is_own(path: Path) -> bool:
    if path.suffix.lower() != ".parquet":
        return False
    try:
        return pq.read_schema(path) in (dpo_schema(), dpo_schema(tools=True))
    except (pa.ArrowException, OSError):
        return False  # Records says what is wrong with the file


def _own_pair(record: dict) -> Example | None:
    for name in ("prompt", "chosen", "rejected"):
        if problem := messages_problem(record[name]):
            raise DataError(f"column {name}: {problem}")
    answers = {name: record[name][-1]["content"] for name in ("chosen", "rejected")}
    if any(len(record[name]) > 1 or record[name][0]["role"] != "assistant" for name in answers):
        raise DataError("columns chosen and rejected: must be one message of the assistant each")
    try:
        tools = tools_of(record)
    except ValueError as error:
        raise DataError(f"column tools: is not JSON ({error})") from error
    same = answers["chosen"] == answers["rejected"]
    return None if same else Example(decoded(record["prompt"]), answers, tools=tools)


def token_pairs(path: Path | str, tokenizer, limit: int) -> tuple[list[TokenPair], Counter]:
    """The pairs of ``path`` with at most ``limit`` tokens, rendered as in evaluation, RL and SFT (chat_template.py).

    Also how many rows are left out, by reason: same_answers, refused_by_chat_template, too_long. Raises DataError as
    ``read_pairs``.
    """
    kept: list[TokenPair] = []
    left_out: Counter = Counter()
    for _, pair in read_pairs(path):
        if pair is None:
            left_out["same_answers"] += 1
            continue
        try:
            tokens = _tokens(tokenizer, pair)
        except ValueError:
            left_out["refused_by_chat_template"] += 1
            continue
        if len(tokens) > limit:
            left_out["too_long"] += 1
        else:
            kept.append(tokens)
    return kept, left_out


def _tokens(tokenizer, pair: Example) -> TokenPair:
    prompt = prompt_ids(tokenizer, pair.messages(), pair.tools)
    opened = opens_thinking(tokenizer, prompt)
    answers = (answer_ids(tokenizer, pair.ground_truth[name], opened) for name in ("chosen", "rejected"))
    return TokenPair(*(np.array(ids, dtype=np.int32) for ids in (prompt, *answers)))
