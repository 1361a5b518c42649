"""Refuse a training file with problems of the dev or the test set."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from tasks.common.data.rows import DataError, decoded, read_rows, tools_of

HELD_OUT = ("dev", "test")  # files of the data folder


def _digests(row: dict) -> Iterator[bytes]:
    """Digests of the row's prompt and tools, and of its key, which rows of other sources may lack."""
    texts = [json.dumps([decoded(row["prompt"]), tools_of(row)], sort_keys=True), row["extra_info"].get("key")]
    return (hashlib.blake2b(text.encode(), digest_size=16).digest() for text in texts if text)


def check_disjoint(train_file: Path, held_out: Iterable[Path]) -> None:
    """Raise DataError when rows of ``train_file`` pose a problem of the ``held_out`` files.

    Reads each file once. Memory: 32 bytes per held-out row.
    """
    where = {digest: path.name for path in held_out for row in read_rows(path) for digest in _digests(row)}
    found: dict[str, int] = {}
    for row in read_rows(train_file):
        for name in {where[digest] for digest in _digests(row) if digest in where}:
            found[name] = found.get(name, 0) + 1
    if found:
        counts = " and ".join(f"{count} of its prompts are in {name}" for name, count in sorted(found.items()))
        raise DataError(f"TRAIN_FILE={train_file}: {counts}; remove them: results on these prompts would be invalid")
