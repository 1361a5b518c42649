"""Records (dicts) from a JSON, JSONL, CSV or parquet file, or from the hub: one after the other, but a JSON array."""

import csv
import io
import os
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path

import httpx
import pyarrow as pa
import pyarrow.parquet as pq

from verl_tasks.data.formats import conversation, tool_schemas
from verl_tasks.files import sha256
from verl_tasks.rows import FIRST_PROBLEMS, DataError, parquet_rows
from verl_tasks.settings import DATA_SUFFIXES
from verl_tasks.strict_json import decoded
from verl_tasks.text import one_line

__all__ = ["conversation", "hub", "load", "tool_schemas"]  # for tasks

LONGEST = 64 << 20  # bytes of a line, and characters of a CSV field; more means a broken file
SAMPLE = 1 << 20  # characters that show a CSV file's separator
# Keys of a turn, a call and a tool.
CHATS = ("role", "content"), ("from", "value"), ("type", "function"), ("name", "arguments"), ("name", "parameters")


class HubUnreachable(DataError):
    """The hub does not answer, and its data set is not in the cache."""


class Record(dict):
    """A record that remembers which of its columns were ``read`` by name, and what was not in them."""

    def __init__(self, record: dict):
        super().__init__(record)
        self.read: set[str] = set()
        self.unread: set[str] = set()  # keys of turns in these, as column.key

    def __getitem__(self, name):
        self.read.add(name)
        return super().__getitem__(name)

    def get(self, name, default=None):
        self.read.add(name)
        return super().get(name, default)


class Records:
    """The records of one file. ``for record in records`` reads it from the start each time.

    ``.json`` is an array of objects or one object per line; ``.csv`` has a header, commas, semicolons or tabs, and all
    its values are text; text is UTF-8. ``split``: "train" or "test" when the file is such a part of a data set. Raises
    DataError that names file and row (from 0; in JSONL the line, from 1) of the first record that cannot be used, and
    of the next nine.
    """

    def __init__(self, path: Path | str, split: str | None = None):
        self.path, self.split = Path(path).expanduser(), split
        self.unused: dict[str, None] = {}  # what ``converted`` did not read: columns that hold something, nulls
        self.nulls: dict[str, None] = {}
        if self.path.suffix.lower() not in DATA_SUFFIXES:
            kinds = f"give one of {', '.join(DATA_SUFFIXES)}; of a spreadsheet save a sheet as CSV"
            raise DataError(f"{path}: unknown kind of file; {kinds}")
        if not self.path.is_file():
            raise DataError(f"{path}: no such file")

    def __iter__(self) -> Iterator[dict]:
        return (record for _, record in self.converted(lambda record: record))

    def located(self) -> Iterator[tuple[str, dict | DataError]]:
        """Each record, or the error in its place, with its place, "train.jsonl: line 3". Last comes what ended the
        reading before the file's end."""
        reader = {".json": _json, ".jsonl": _lines, ".csv": _csv, ".parquet": _parquet}[self.path.suffix.lower()]
        place = problem = ""
        try:
            for place, record in reader(self.path):
                yield f"{self.path}: {place}", _own(record, self.nulls) if reader is _parquet else record
            problem = "" if place else "has no rows"
        except DataError as error:
            problem = str(error)
        except (OSError, UnicodeDecodeError, csv.Error, pa.ArrowException) as error:
            after = f"after {place}: " if place else ""
            todo = "; save it as UTF-8" if isinstance(error, UnicodeDecodeError) else ""
            problem = f"{after}not readable {self.path.suffix[1:]} ({one_line(str(error), 200)}){todo}"
        if problem:
            yield str(self.path), DataError(problem)

    def converted(self, convert: Callable[[dict], object]) -> Iterator[tuple[str, object]]:
        """``convert(record)`` of each record with its place. Raises DataError with the place of the first record that
        is none or that ``convert`` refuses; for that the rest of the file is looked through for more of them."""
        problems: list[str] = []
        for place, record in self.located():
            try:
                if not isinstance(record, dict):
                    told = isinstance(record, DataError)
                    raise record if told else DataError(f"must be an object, is {one_line(repr(record))}")
                made = convert(record := Record(record))
            except DataError as error:
                problems.append(f"{place}: {error}")
                if len(problems) == FIRST_PROBLEMS:
                    break
                continue
            except Exception as error:  # a fault of ``convert``
                error.add_note(place)
                raise
            unread = [name for name in record if name not in record.read] if made else ()  # else: read in part
            self.unused |= {name: None for name in unread if dict.get(record, name) not in (None, "", [], {})}
            self.unused |= dict.fromkeys(sorted(record.unread))
            self.unused |= {f"nulls in {name}": None for name in self.nulls if name.split(".")[0] in record.read}
            if not problems:
                yield place, made
        if problems:
            raise DataError.of(problems)

    def origin(self) -> dict:
        """The manifest's entry of the file: path, sha256, bytes."""
        return {"file": str(self.path), "sha256": sha256(self.path), "bytes": self.path.stat().st_size}


class HubRecords(Records):
    """The records of one split of a hub data set: see ``hub``."""

    def __init__(self, dataset, name: str, config: str | None, split: str):
        self.dataset, self.name, self.config = dataset, name, config
        self.split, self.unused, self.nulls = split if split in ("train", "test") else None, {}, {}

    def located(self) -> Iterator[tuple[str, dict]]:
        """Each record with its place, "openai/gsm8k: row 3"."""
        rows = enumerate(_written_rows(self.dataset, self.dataset.features.arrow_schema))
        return ((f"{self.name}: row {at}", _own(record, self.nulls)) for at, record in rows)

    def origin(self) -> dict:
        """The manifest's entry of the data set: name, config, split, and the revision if it is known."""
        revision = re.search(r"@([0-9a-f]{40})/", " ".join(map(str, self.dataset.info.download_checksums or {})))
        origin = {"hub": self.name, "config": self.config, "split": str(self.dataset.split)}
        return origin | ({"revision": revision[1]} if revision else {})


def load(path: Path | str) -> list[Records]:
    """A data file, or a folder's files named train* and test*, which are then the two splits of a data set.

    Raises DataError when the folder has no file whose name begins with train.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        return [Records(path)]
    there = sorted(folder.iterdir())
    files = [file for file in there if file.suffix.lower() in DATA_SUFFIXES and file.is_file()]
    parts = [Records(file, split) for split in ("train", "test") for file in files if file.name.startswith(split)]
    kinds = ", ".join(DATA_SUFFIXES)
    if not any(part.split == "train" for part in parts):
        raise DataError(f"{path}: the folder has no training file (train* of {kinds})")
    data = {file for file in there if file in files or file.name.startswith(("train", "test"))}
    if left := sorted(file.name for file in data - {part.path for part in parts}):
        print(f"  {path}: only train* and test* of {kinds} are read, not {', '.join(left)}"[:300], flush=True)
    return parts


def hub(name: str, config: str | None = None, split: str = "train") -> HubRecords:
    """A split of the data set ``name`` (a hub id, or a local folder of a hub data set's form), through its cache.

    Raises HubUnreachable within seconds when there is no hub (HF_HUB_OFFLINE=1 or no network) and nothing in the
    cache, DataError when there is no such data set, config or split.
    """
    folder = Path(name).is_dir()
    offline = not folder and not _hub_answers()
    import datasets
    from huggingface_hub import constants
    from huggingface_hub.utils import logging

    if offline:  # else each request is tried five times
        constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    logging.set_verbosity_error()  # a folder has no card
    datasets.disable_progress_bars()
    where = f"{name}{f' ({config})' if config else ''}, split {split}"
    try:
        if folder and config not in datasets.get_dataset_config_names(name):
            config = None  # a folder without a card has no configs
        return HubRecords(datasets.load_dataset(name, config, split=split), name, config, split)
    except Exception as error:  # a dozen classes of datasets, huggingface_hub, fsspec and httpx
        if offline or (isinstance(error, ConnectionError) and not folder):
            raise HubUnreachable(f"{where}: the hub cannot be reached, and the cache has no copy") from error
        raise DataError(f"{where}: cannot be loaded ({type(error).__name__}: {one_line(str(error), 300)})") from error


def _hub_answers() -> bool:
    """Whether the hub (HF_ENDPOINT) answers over HTTP, through the proxy if there is one."""
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        return False
    try:
        httpx.head(os.environ.get("HF_ENDPOINT") or "https://huggingface.co", timeout=5)
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, ImportError):  # ImportError: a SOCKS proxy
        return False
    return True


# ---- readers: (path) -> (place, record) of each row, or (place, DataError) where the next row can still be read


def _json(path: Path) -> Iterator[tuple[str, dict]]:
    content = path.read_bytes()
    wanted = "must be a JSON array of objects, or one object a line"
    if first := re.match(rb"(?:\xef\xbb\xbf)?\s*(\{[^\r\n]*)", content):
        if not first[1].rstrip().endswith(b"}"):
            shown = one_line(first[1][:200].decode("utf-8", "replace"))
            raise DataError(f"{wanted}; its first line is no whole object: {shown}")
        return _lines(path)
    rows = _decoded(content)
    if not isinstance(rows, list):
        raise DataError(wanted)
    return ((f"row {index}", row) for index, row in enumerate(rows))


def _lines(path: Path) -> Iterator[tuple[str, dict | DataError]]:
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(LONGEST), b""), 1):
            if len(line) == LONGEST:
                raise DataError(f"line {number}: longer than {LONGEST >> 20} MiB")
            if not line.strip():
                continue
            try:
                record = _decoded(line)
            except DataError as error:
                record = error
            yield f"line {number}", record


def _decoded(content: bytes) -> object:
    try:
        return decoded(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"is not JSON ({one_line(str(error), 200)})") from error


def _csv(path: Path) -> Iterator[tuple[str, dict | DataError]]:
    csv.field_size_limit(LONGEST)
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, delimiter=_separator(file.read(SAMPLE)), strict=True)
        file.seek(0)
        rows = filter(None, reader)  # without empty lines
        header = next(rows, [])
        check_header(header)
        for index, row in enumerate(rows):
            wrong = f"(line {reader.line_num}) has {len(row)} fields, the header has {len(header)}"
            fits = len(row) == len(header)
            yield f"row {index}", dict(zip(header, row, strict=True)) if fits else DataError(wrong)


def check_header(header: list[str]) -> None:
    """Raises DataError where a column of a table has no name of its own."""
    if len(set(header)) < len(header) or "" in header:
        names = f"{', '.join(header)[:200]}; name each column once (pandas: index=False)"
        raise DataError(f"the header has an empty or repeated name: {names}")


def _separator(start: str) -> str:
    """What divides the first two rows of a CSV file into as many fields, and most of them. Excel writes semicolons
    where a comma is the decimal sign."""

    def fits(separator: str) -> tuple[bool, int]:
        rows = filter(None, csv.reader(io.StringIO(start, newline=""), delimiter=separator))
        first, *others = map(len, islice(rows, 2))
        return first > 1 and others == [first], first

    return max(",;\t", key=fits) if start.strip() else ","


def _parquet(path: Path) -> Iterator[tuple[str, dict]]:
    rows = enumerate(_written_rows(parquet_rows(path), pq.read_schema(path)))
    return ((f"row {index}", record) for index, record in rows)


def _written_rows(rows: Iterable[dict], schema: pa.Schema) -> Iterable[dict]:
    """``rows`` with each float of 32 or 16 bits as the decimal that was written: 5.8, for which Arrow gives
    5.800000190734863. Where no column has such, they are as they came."""
    kind = pa.struct(schema)
    return (_written(row, kind) for row in rows) if "float" in str(kind) else rows


def _written(value, kind: pa.DataType):
    if isinstance(value, dict):
        return {name: _written(each, kind.field(name).type) for name, each in value.items()}
    if isinstance(value, list) and hasattr(kind, "value_type"):
        return [_written(each, kind.value_type) for each in value]
    return float(str(kind.to_pandas_dtype()(value))) if isinstance(value, float) else value


def _own(value, nulls: dict[str, None], place: str | None = None):
    """``value``, first a record, without the null fields that Arrow gives its objects for the keys of other rows'. Into
    ``nulls`` go their places, but for chats, calls and tools, whose readers know which null is meant."""
    if isinstance(value, list):
        return [_own(each, nulls, place) for each in value]
    if not isinstance(value, dict):
        return value
    if place is None:
        return {name: _own(each, nulls, name) for name, each in value.items()}
    place = "" if any(value.keys() >= {*keys} for keys in CHATS) else place
    nulls |= {f"{place}.{name}": None for name, each in value.items() if each is None and place}
    return {name: _own(each, nulls, place and f"{place}.{name}") for name, each in value.items() if each is not None}
