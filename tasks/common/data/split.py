"""Split rows by seed and write them to parquet: no row is held, a row costs 8 bytes while the data is read.

Two passes over a source that can be read again. The first takes a key of 64 bits of each row, sorts the keys and
chooses by them: the smallest are the test set, the next train. So it depends on a row's prompt and the seed, not on the
row's place or on the other rows, to which side it goes and where it stands. The second pass writes the chosen rows.
"""

import hashlib
import tempfile
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

from tasks.common.data.rows import DataError
from tasks.common.files import written_beside

PROMPT_BITS = 40  # the upper bits of a key tell prompts apart, all 64 tell rows apart
BATCH = 1024  # rows in memory as objects
BATCH_BYTES = 16 << 20  # or so many bytes of their keys
BUCKET_BYTES = 16 << 20  # of keys: what is sorted in memory at a time
MOST_BUCKETS = 256  # files open at a time


@dataclass(frozen=True)
class Sizes:
    """How many rows, in the order in which they are cut.

    ``limit``: of all, 0: no limit. ``test``: a count, a share if below 1, 0: all of the source's own test split.
    ``train``: at most, 0: all there are.
    """

    limit: int = 0
    test: float = 0.05
    train: int = 0


@dataclass(frozen=True)
class Form:
    """How items become rows.

    ``identity``: texts of an item, its prompt and what tells it from other rows with the same prompt; rows of one
    prompt go to one side. ``problem``: why an item cannot be used (a name for the count), or None. ``row``: of an item,
    split and place in it. ``schema``: of the file, or with ``tools`` when an item needs it: see ``needs_tools``.
    """

    identity: Callable[[object], tuple[str, str]]
    row: Callable[[object, str, int], dict]
    schema: Callable[[bool], pa.Schema]
    needs_tools: Callable[[object], bool] = lambda item: False
    problem: Callable[[object], str | None] = lambda item: None


class SplitError(DataError):
    """The rows are too few, or cannot be split as asked; the message lacks the name of the source."""


def key(seed: int, prompt: str, rest: str = "") -> int:
    """The key of a row: 40 bits of the prompt's digest, 24 of the row's."""
    salt = str(seed).encode()[:16]
    upper = hashlib.blake2b(prompt.encode(), digest_size=8, salt=salt).digest()
    lower = hashlib.blake2b(rest.encode(), digest_size=8, salt=salt, key=upper).digest()
    return int.from_bytes(upper[: PROMPT_BITS // 8] + lower[: 8 - PROMPT_BITS // 8])


def choose(own_test: np.ndarray, others: np.ndarray, sizes: Sizes) -> tuple[np.ndarray, np.ndarray, int]:
    """Keys of the test and of the training rows, sorted, and how many of the training rows have a test prompt.

    ``own_test`` and ``others``: sorted, distinct uint64. Raises SplitError when there are none of one side.
    """
    before = len(others)
    if len(own_test):
        at = np.searchsorted(own_test >> np.uint64(64 - PROMPT_BITS), others >> np.uint64(64 - PROMPT_BITS))
        at[at == len(own_test)] = 0
        others = others[own_test[at] >> np.uint64(64 - PROMPT_BITS) != others >> np.uint64(64 - PROMPT_BITS)]
    leaked = before - len(others)
    has_own = len(own_test) > 0
    total = len(own_test) + len(others)
    if sizes.limit and sizes.limit < total:
        total = sizes.limit
        first_out = np.partition(np.concatenate([own_test, others]), total)[total]
        kept = max(int(np.searchsorted(own_test, first_out)), int(has_own))  # one at least, or there is no test set
        own_test, others = own_test[:kept], others[: total - kept]
    count = int(sizes.test) if sizes.test >= 1 else max(1, round(sizes.test * total)) if sizes.test else 0
    if has_own:
        test, train = own_test[: count or None], others
    elif not count:
        raise SplitError("has no test split of its own: set TEST_SIZE, a count or a share below 1")
    else:
        count = _end_of_prompt(others, count)
        test, train = others[:count], others[count:]
    train = train[: sizes.train or None]
    if not len(test) or not len(train):
        raise SplitError(
            f"has only {total} different rows: {len(test)} for the test set, {len(train)} to train on; "
            "lower TEST_SIZE, raise MAX_SAMPLES, or take another source"
        )
    return test, train, leaked


def _end_of_prompt(keys: np.ndarray, count: int) -> int:
    """``count``, or more if the row there has the same prompt as the one before."""
    while 0 < count < len(keys) and int(keys[count - 1]) >> 24 == int(keys[count]) >> 24:
        count += 1
    return count


class _Side:
    """The chosen rows of one split, each once."""

    def __init__(self, keys: np.ndarray):
        self.keys, self.taken = keys, np.zeros(len(keys), bool)

    def take(self, key: int) -> int | None:
        """The place of the row with ``key``; None if it is not chosen, or was taken already."""
        place = int(self.keys.searchsorted(np.uint64(key)))
        if place == len(self.keys) or int(self.keys[place]) != key or self.taken[place]:
            return None
        self.taken[place] = True
        return place


def _distinct(keys: array) -> np.ndarray:
    """Sorted and each once; ``keys`` is sorted in place."""
    values = np.frombuffer(keys, np.uint64) if len(keys) else np.empty(0, np.uint64)
    values.sort()
    first = np.ones(len(values), bool)
    np.not_equal(values[1:], values[:-1], out=first[1:])
    return values if first.all() else values[first]


def write_split(items: Iterable, folder: Path, form: Form, sizes: Sizes, seed: int) -> tuple[dict, dict]:
    """Write ``train.parquet`` and ``test.parquet`` to ``folder``; return their rows and counts of what was dropped.

    ``items`` can be iterated again and has the same items each time; an item's ``split`` is "train", "test" or None,
    and None in place of an item is a record that gave none. Memory: about 20 bytes a row, besides one batch and one
    bucket. Raises SplitError when a side stays empty, and what ``items`` raises.
    """
    dropped: Counter = Counter(unusable=0, too_long=0, duplicates=0, over_limit=0)
    own_test, others, tools, size = array("Q"), array("Q"), False, 0
    for item in _shown(items, "reading"):
        if item is None:
            dropped["unusable"] += 1
        elif problem := form.problem(item):
            dropped[problem] += 1
        else:
            prompt, rest = form.identity(item)
            (own_test if item.split == "test" else others).append(key(seed, prompt, rest))
            tools = tools or form.needs_tools(item)
            size += len(prompt) + len(rest)
    usable = len(own_test) + len(others)
    if not usable:
        left = ", ".join(f"{count} {reason.replace('_', ' ')}" for reason, count in dropped.items() if count)
        raise SplitError(f"has no row that can be used{f' ({left})' if left else ''}")
    has_own_test = bool(own_test)
    test_keys, other_keys = _distinct(own_test), _distinct(others)
    distinct = len(test_keys) + len(other_keys)
    test_keys, train_keys, leaked = choose(test_keys, other_keys, sizes)
    dropped["duplicates"] = usable - distinct + leaked
    dropped["over_limit"] = distinct - leaked - len(test_keys) - len(train_keys)
    del own_test, others, other_keys
    sides = {"test": _Side(test_keys), "train": _Side(train_keys)}
    share = (len(test_keys) + len(train_keys)) / usable
    with ExitStack() as stack:
        schema = form.schema(tools)
        writers = {
            name: stack.enter_context(_InOrder(folder / f"{name}.parquet", schema, len(side.keys), share * size))
            for name, side in sides.items()
        }
        for item in _shown(items, "writing", usable):
            if item is None:
                continue
            prompt, rest = form.identity(item)
            row_key = key(seed, prompt, rest)
            names = ("test", "train") if not has_own_test else ("test",) if item.split == "test" else ("train",)
            for name in names:
                if (place := sides[name].take(row_key)) is not None:
                    writers[name].add(place, form.row(item, name, place), len(prompt) + len(rest))
                    break
        if not all(side.taken.all() for side in sides.values()):
            raise SplitError("changed while it was read; run it again")
        for writer in writers.values():
            writer.finish()
    return {name: len(side.keys) for name, side in sides.items()}, dict(dropped)


class _InOrder:
    """Writes rows, that come in any order, to a parquet file in the order of their places 0 to ``count`` - 1.

    Rows go to files by ranges of places, which are then sorted one after the other in memory; ``size``: bytes, roughly.
    """

    def __init__(self, path: Path, schema: pa.Schema, count: int, size: float):
        self.path, self.count = path, count
        self.schema = schema.append(pa.field("place", pa.int64()))
        self.buckets = min(MOST_BUCKETS, 1 + int(size / BUCKET_BYTES))
        self.rows: list[dict] = []
        self.bytes = 0

    def __enter__(self):
        self.stack = ExitStack()
        self.folder = Path(self.stack.enter_context(tempfile.TemporaryDirectory(dir=self.path.parent, prefix=".sort-")))
        self.writers: dict[int, pa.ipc.RecordBatchFileWriter] = {}
        return self

    def __exit__(self, *error):
        for writer in self.writers.values():
            writer.close()
        self.stack.close()

    def add(self, place: int, row: dict, size: int) -> None:
        self.rows.append(row | {"place": place})
        self.bytes += size
        if len(self.rows) >= BATCH or self.bytes >= BATCH_BYTES:
            self._flush()

    def _flush(self) -> None:
        try:
            table = pa.Table.from_pylist(self.rows, self.schema)
        except (pa.ArrowException, AttributeError, TypeError, UnicodeEncodeError, OverflowError) as error:
            raise DataError(
                f"{self.path.name}: a row does not fit the schema ({str(error).splitlines()[0]})"
            ) from error
        self.rows.clear()
        self.bytes = 0
        bucket = table["place"].to_numpy() * self.buckets // max(self.count, 1)
        for number in np.unique(bucket):
            if number not in self.writers:
                self.writers[number] = pa.ipc.new_file(self.folder / f"{number}.arrow", self.schema)
            self.writers[number].write_table(table.filter(pa.array(bucket == number)))

    def finish(self) -> None:
        """Write the parquet file."""
        if self.rows:
            self._flush()
        for writer in self.writers.values():
            writer.close()
        with (
            written_beside(self.path) as partial,
            pq.ParquetWriter(partial, self.schema.remove(len(self.schema) - 1)) as writer,
        ):
            for number in sorted(self.writers):
                with pa.memory_map(str(self.folder / f"{number}.arrow")) as file:
                    table = pa.ipc.open_file(file).read_all()
                    order = np.argsort(table["place"].to_numpy())
                    writer.write_table(table.take(pa.array(order)).drop_columns("place"))
        self.writers.clear()


def _shown(items: Iterable, what: str, total: int | None = None) -> Iterator:
    return iter(tqdm(items, f"  {what}", total, unit=" rows", leave=False, mininterval=1, disable=None))
