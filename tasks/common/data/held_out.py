"""Refuse a training file with problems of the dev or the test set."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from verl_tasks.data.pairs import pairs_columns, read_pairs
from verl_tasks.rows import DataError, decoded, normalized, posed, read_rows, tools_of
from verl_tasks.settings import Settings

HELD_OUT = ("dev", "test")  # files of the data folder


def check_held_out(s: Settings, names: Iterable[str]) -> None:
    """Raise DataError where TRAIN_FILE or DPO's PAIRS_FILE poses a problem of those data files ``names`` that are for
    tests. Reads the files to the end."""
    held_out = [s.data_dir / f"{name}.parquet" for name in names if name in HELD_OUT]
    if s.TRAIN_FILE:
        check_disjoint(s.train_file, held_out)
    if s.by_pairs and s.PAIRS_FILE:
        check_pairs(Path(s.PAIRS_FILE).expanduser(), held_out, pairs_columns(s))


def check_disjoint(train_file: Path, held_out: Iterable[Path]) -> None:
    """Raise DataError when rows of ``train_file`` pose a problem of the ``held_out`` files.

    Reads each file once. Memory: 32 bytes per held-out row.
    """
    _check(f"TRAIN_FILE={train_file}", (_digests(*_told(row)) for row in read_rows(train_file)), held_out)


def check_pairs(pairs_file: Path, held_out: Iterable[Path], columns: dict[str, str] | None = None) -> None:
    """The same of the prompts of PAIRS_FILE."""
    pairs = (pair for _, pair in read_pairs(pairs_file, columns) if pair)
    _check(f"PAIRS_FILE={pairs_file}", (_digests(posed(pair.messages(), pair.tools)) for pair in pairs), held_out)


def _check(file: str, problems: Iterable[Iterable[bytes]], held_out: Iterable[Path]) -> None:
    where = {}
    for path in held_out:
        for row in read_rows(path):
            # Files of others seldom have the task's system message.
            bare = [message for message in row["prompt"] if message["role"] != "system"]
            texts = _told(row) + (_told(row | {"prompt": bare})[:1] if len(bare) < len(row["prompt"]) else [])
            where |= dict.fromkeys(_digests(*texts), path.name)
    counts = Counter(name for digests in problems for name in {where[digest] for digest in digests if digest in where})
    if counts:
        told = " and ".join(f"{count} of its prompts are in {name}" for name, count in sorted(counts.items()))
        raise DataError(f"{file}: {told}; remove them: results on these prompts would be invalid")


def _told(row: dict) -> list[str | None]:
    """The row's prompt with its tools, and its key, which rows of other sources may lack."""
    return [posed(decoded(row["prompt"]), tools_of(row)), normalized(row["extra_info"].get("key"))]


def _digests(*texts: str | None) -> Iterator[bytes]:
    return (hashlib.blake2b(text.encode(), digest_size=16).digest() for text in texts if text)
