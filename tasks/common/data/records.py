"""Records (dicts) from a JSON, JSONL, CSV or parquet file, or from the hub, one after the other.

A JSON array is read into memory as text; other files are read one record or batch at a time.
"""

import csv
import json
import os
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tasks.common.data.rows import DataError
from tasks.common.files import sha256
from tasks.common.strict_json import finite, no_constant

LONGEST = 64 << 20  # characters of one record: more is a broken file
PARQUET_ROWS = 256  # rows converted to objects at a time
SUFFIXES = (".json", ".jsonl", ".csv", ".parquet")
HUB_TIMEOUT = 5  # seconds to wait for the hub


class HubUnreachable(DataError):
    """The hub does not answer, and its data set is not in the cache."""


class Records:
    """The records of one file. ``for record in records`` reads it from the start each time.

    ``.json`` is an array of objects or, as data sets on the hub have it, one object a line; ``.csv`` has a header and
    all its values are text; text is UTF-8. ``split``: "train" or "test" when the file is such a part of a data set.
    Raises DataError that names file and row (from 0; in JSONL the line, from 1).
    """

    def __init__(self, path: Path | str, split: str | None = None):
        self.path, self.split = Path(path).expanduser(), split
        if self.path.suffix.lower() not in SUFFIXES:
            raise DataError(f"{path}: unknown kind of file; give one of {', '.join(SUFFIXES)}")
        if not self.path.is_file():
            raise DataError(f"{path}: no such file")

    def __iter__(self) -> Iterator[dict]:
        return (record for _, record in self.located())

    def located(self) -> Iterator[tuple[str, dict]]:
        """Each record with its place, "train.jsonl: line 3"."""
        reader = {".json": _json, ".jsonl": _lines, ".csv": _csv, ".parquet": _parquet}[self.path.suffix.lower()]
        found = False
        try:
            for place, record in reader(self.path):
                found = True
                yield f"{self.path}: {place}", record
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read ({error.strerror or error})") from error
        if not found:
            raise DataError(f"{self.path}: has no rows")

    def origin(self) -> dict:
        """What a manifest says of the file: path, sha256, bytes."""
        return {"file": str(self.path), "sha256": sha256(self.path), "bytes": self.path.stat().st_size}


class HubRecords:
    """The records of one split of a hub data set: see ``hub``."""

    def __init__(self, dataset, name: str, config: str | None, split: str):
        self.dataset, self.name, self.config = dataset, name, config
        self.split = {"train": "train", "test": "test"}.get(split)

    def __iter__(self) -> Iterator[dict]:
        return iter(self.dataset)

    def located(self) -> Iterator[tuple[str, dict]]:
        """Each record with its place, "openai/gsm8k: row 3"."""
        for index, record in enumerate(self.dataset):
            yield f"{self.name}: row {index}", record

    def origin(self) -> dict:
        """What a manifest says of the data set: its name, config, split, and the revision if it is known."""
        urls = " ".join(map(str, self.dataset.info.download_checksums or {}))
        revision = re.search(r"@([0-9a-f]{40})/", urls)
        origin = {"hub": self.name, "config": self.config, "split": str(self.dataset.split)}
        return origin | ({"revision": revision[1]} if revision else {})


def load(path: Path | str) -> list[Records]:
    """A data file, or a folder's files named train* and test*, which are then the two splits of a data set.

    Raises DataError when the folder has no file whose name begins with train.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        return [Records(path)]
    files = sorted(file for file in folder.iterdir() if file.suffix.lower() in SUFFIXES and file.is_file())
    parts = [Records(file, split) for split in ("train", "test") for file in files if file.name.startswith(split)]
    if not any(part.split == "train" for part in parts):
        wanted = ", ".join(f"train{suffix}" for suffix in SUFFIXES)
        raise DataError(f"{path}: the folder has no training file ({wanted}); give a file, or a folder with one")
    return parts


def hub(name: str, config: str | None = None, split: str = "train") -> HubRecords:
    """A split of the data set ``name`` (a hub id, or a local folder of a hub data set's form), through its cache.

    Raises HubUnreachable within seconds when there is no hub (HF_HUB_OFFLINE=1 or no network) and nothing in the
    cache, DataError when there is no such data set, config or split.
    """
    folder = Path(name).is_dir()
    offline = not folder and not _hub_answers()
    if offline:
        os.environ["HF_HUB_OFFLINE"] = "1"  # before the first import, or each request is tried five times
    import datasets
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()  # a folder has no card
    datasets.disable_progress_bars()
    where = f"{name}{f' ({config})' if config else ''}, split {split}"
    try:
        if folder and config not in datasets.get_dataset_config_names(name):
            config = None  # a folder without a card has no configs
        return HubRecords(datasets.load_dataset(name, config, split=split), name, config, split)
    except Exception as error:  # a dozen classes of datasets, huggingface_hub, fsspec and httpx
        problem = " ".join(str(error).split())[:300]
        if not folder and (offline or isinstance(error, ConnectionError)):
            what = "" if isinstance(error, ConnectionError) else f" ({type(error).__name__}: {problem})"
            raise HubUnreachable(f"{where}: the hub cannot be reached, and the cache has no copy{what}") from error
        raise DataError(f"{where}: cannot be loaded ({type(error).__name__}: {problem})") from error


def _hub_answers() -> bool:
    """Whether the hub (HF_ENDPOINT) speaks HTTP to us, through the proxy if there is one."""
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        return False
    request = urllib.request.Request(os.environ.get("HF_ENDPOINT") or "https://huggingface.co", method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=HUB_TIMEOUT):
            return True
    except urllib.error.HTTPError:
        return True
    except (OSError, ValueError):
        return False


# ---- readers: (path) -> (place, record) of each row


def _json(path: Path) -> Iterator[tuple[str, dict]]:
    """Objects of an array, decoded one by one: as objects, all of them would take several times their text."""
    content = path.read_bytes()
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}: line {line}: is not UTF-8 ({error.reason})") from error
    del content

    def skip(place: int) -> tuple[int, str]:
        """Place of the next character that is not white space, and that character; "" at the end."""
        place = _SPACE.match(text, place).end()
        return place, text[place : place + 1]

    place, character = skip(0)
    if character == "{":
        yield from _lines(path)
        return
    if character != "[":
        raise DataError(f"{path}: {'is not a JSON array of objects' if character else 'is empty'}")
    place, character = skip(place + 1)
    index, more = 0, character != "]"
    while more:
        if not character:
            raise DataError(f"{path}: {f'after row {index - 1}: ' if index else ''}ends within the array")
        if character != "{":
            raise DataError(f"{path}: row {index}: must be an object, begins with {character!r}")
        try:
            record, end = _decode(text, place)
            if end - place > LONGEST:
                raise DataError(f"longer than {LONGEST >> 20} MiB")
        except DataError as error:
            hint = "; is the file complete?" if isinstance(error.__cause__, json.JSONDecodeError) else ""
            raise DataError(f"{path}: row {index}: {error}{hint}") from error
        yield f"row {index}", record
        place, separator = skip(end)
        if separator not in (",", "]"):
            raise DataError(f"{path}: after row {index}: must be `,` or `]`, is {separator or 'the end'!r}")
        index, more = index + 1, separator == ","
        place, character = skip(place + 1)
    if not index:
        place, character = skip(place + 1)
    if character:
        raise DataError(f"{path}: after row {index - 1}: more after the array, from {character!r}")


def _lines(path: Path) -> Iterator[tuple[str, dict]]:
    with path.open("rb") as file:
        number = 0
        while line := file.readline(LONGEST + 1):
            number += 1
            place = f"line {number}"
            if len(line) > LONGEST:
                raise DataError(f"{path}: {place}: longer than {LONGEST >> 20} MiB")
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
            except UnicodeDecodeError as error:
                raise DataError(f"{path}: {place}: is not UTF-8 ({error.reason})") from error
            if not text:
                continue
            if not text.startswith("{"):
                raise DataError(f"{path}: {place}: must be an object, begins with {text[0]!r}")
            try:
                record, end = _decode(text, 0)
            except DataError as error:
                hint = "; .json is an array, or one object a line" if path.suffix.lower() == ".json" else ""
                raise DataError(f"{path}: {place}: {error}{hint}") from error
            if end < len(text):
                raise DataError(f"{path}: {place}: more after the object, from {text[end:].strip()[:20]!r}")
            yield place, record


def _csv(path: Path) -> Iterator[tuple[str, dict]]:
    csv.field_size_limit(LONGEST)
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.reader(file, strict=True)
        index, header = 0, None
        while True:
            place = "the header" if header is None else f"row {index}"
            try:
                row = next(rows, None)
            except csv.Error as error:
                raise DataError(f"{path}: {place} (line {rows.line_num}): is not CSV ({error})") from error
            except UnicodeDecodeError as error:
                raise DataError(f"{path}: {place}, or soon after: is not UTF-8 ({error.reason})") from error
            if row is None:
                return
            if not row:  # an empty line
                continue
            if header is None:
                header = row
                if len(set(header)) < len(header) or "" in header:
                    raise DataError(f"{path}: the header has an empty or repeated name: {', '.join(header)[:200]}")
                continue
            if len(row) != len(header):
                where = f"{place} (line {rows.line_num})"
                raise DataError(f"{path}: {where}: has {len(row)} fields, the header has {len(header)}")
            yield place, dict(zip(header, row, strict=True))
            index += 1


def _parquet(path: Path) -> Iterator[tuple[str, dict]]:
    index = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(PARQUET_ROWS):
                for record in batch.to_pylist():
                    yield f"row {index}", record
                    index += 1
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        problem = str(error).splitlines()[0]
        raise DataError(f"{path}: row {index}, or soon after: not readable parquet ({problem})") from error


# ---- JSON

_SPACE = re.compile(r"[ \t\r\n]*")
_HALF = re.compile(r"\\u[dD][89a-fA-F]")
_DECODER = json.JSONDecoder(parse_constant=no_constant, parse_float=finite)


def _decode(text: str, position: int) -> tuple[dict, int]:
    """The object that begins at ``position``, and where it ends. Raises DataError with the reason."""
    try:
        record, end = _DECODER.raw_decode(text, position)
        if _HALF.search(text, position, end):
            json.dumps(record, ensure_ascii=False).encode()
        return record, end
    except json.JSONDecodeError as error:
        raise DataError(f"is not JSON ({error.msg})") from error
    except UnicodeEncodeError as error:
        raise DataError("has half a surrogate pair, which is no text") from error
    except ValueError as error:  # NaN, Infinity, an integer of more than 4300 digits
        raise DataError(f"is not JSON ({error})") from error
    except RecursionError as error:
        raise DataError("is nested too deeply") from error
