"""What a rehearsal's training is played on: rows whose demonstrations the thin model has learned, or a file's first
pairs."""

import json
from collections import defaultdict
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tasks.common.data.convert import dpo_line, dpo_schema
from tasks.common.data.pairs import read_pairs
from tasks.common.data.prepare import needs_tools
from tasks.common.data.rows import decoded, read_rows, tools_of, write_parquet
from tasks.common.models import thin
from tasks.common.models.chat_template import demonstration_ids
from tasks.common.settings import Settings

READ = 4096  # training rows and demonstrations in which it looks


def _text(messages: list[dict]) -> str:
    return json.dumps(decoded(messages), sort_keys=True)


def _longest_turn(mask: list[int]) -> int:
    """Tokens of the longest turn of the model."""
    return max(map(len, "".join(map(str, mask)).split("0")))


def demonstrated(s: Settings, train: Path, demonstrations: Path, tokenizer, most: int) -> list[tuple]:
    """Up to ``most`` training prompts whose demonstration no limit of ``s`` cuts: the place in ``train``, the token ids
    of the demonstration, and its mask. Raises DataError and ValueError as what reads them."""
    places = defaultdict(list)
    for place, row in enumerate(read_rows(train, READ)):
        places[_text(row["prompt"])].append(place)
    found = []
    for row in read_rows(demonstrations, READ):
        messages = decoded(row["messages"])
        first = row.get("prompt_messages") or len(messages) - 1
        own = places[_text(row["messages"][:first])]
        if len(own) != 1:  # else it is not known which one it solves
            continue
        ids, mask = demonstration_ids(tokenizer, messages, first, tools_of(row))
        prompt, turn = mask.index(1), s.MAX_TURN_LENGTH if s.multi_turn else s.MAX_RESPONSE_LENGTH
        if prompt <= s.MAX_PROMPT_LENGTH and len(ids) - prompt <= s.MAX_RESPONSE_LENGTH and _longest_turn(mask) <= turn:
            found.append((own[0], ids, mask))
            if len(found) == most:
                break
    return found


def taught(
    s: Settings, train: Path, demonstrations: Path, tokenizer, model: Path, out: Path, wanted: range
) -> tuple[int, float]:
    """Teach the thin model ``model`` the demonstrations of some rows of ``train``, and write these rows to ``out``, a
    parquet file. ``s``: the settings that are played. ``wanted``: how many rows, from the least to the most.

    Returns how many it was taught, and the mean probability with which it samples one; 0 and 0.0, and without ``out``,
    where there are too few rows.
    """
    found = demonstrated(s, train, demonstrations, tokenizer, wanted[-1]) if demonstrations.is_file() else []
    if len(found) < wanted[0]:
        return 0, 0.0
    right = thin.teach(model, [(ids, mask) for _, ids, mask in found], s.SEED)
    pq.write_table(pq.read_table(train).take(pa.array([place for place, *_ in found])), out)
    return len(found), right


def first_pairs(source: str, out: Path, most: int) -> int:
    """Write the first ``most`` pairs of PAIRS_FILE to ``out`` as our own file; their number. Raises DataError."""
    pairs = [pair for _, pair in islice(read_pairs(Path(source).expanduser()), 2 * most) if pair][:most]
    lines = (dpo_line(pair, "train", index) for index, pair in enumerate(pairs))
    return write_parquet(lines, out, dpo_schema(any(map(needs_tools, pairs)), truncated=True))
