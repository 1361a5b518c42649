"""Split examples by seed and write them to parquet.

A row's key is a 64-bit digest of its prompt and the seed. The smallest keys are the test set, the next the dev set, the
next train. So a row's side and order depend neither on its place in the source nor on other rows. Of an endless source
the key says the side, and the source the order (``deal``).
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
from tqdm import tqdm

from verl_tasks.rows import DataError, Example, write_parquet

PROMPT_BITS = 40  # the upper bits of a key identify the prompt, all 64 the row
REST_BITS = 64 - PROMPT_BITS
SHARES = {"test": 0.15, "dev": 0.05, "train": 0.8}  # of an endless source: near what tasks ask for, so little is unused
PATIENCE = 100_000  # items in a row that are repeats, or that no side needs: such a source is at its end


@dataclass(frozen=True)
class Sizes:
    """``limit``: of all rows, 0: none. ``test``: a count, a share if below 1, 0: all of the source's own test split.
    ``share``: without such a split, a count takes at most this share of the rows. ``train``: at most, 0: all.
    ``dev``: taken from the training rows, at most a tenth of them."""

    limit: int = 0
    test: float = 0.05
    train: int = 0
    dev: int = 0
    share: float = 1


# An item's prompt, and text that tells it from others of that prompt; items of one prompt go to one side.
Identity = Callable[[Example], tuple[str, str]]


class SplitError(DataError):
    """The rows are too few, or cannot be split as asked; the message lacks the name of the source."""


def key(seed: int, prompt: str, rest: str = "") -> int:
    """The key of a row: 40 bits of the prompt's digest, 24 of the row's."""
    salt = str(seed).encode()[:16]
    upper = hashlib.blake2b(prompt.encode(), digest_size=8, salt=salt).digest()
    lower = hashlib.blake2b(rest.encode(), digest_size=8, salt=salt, key=upper).digest()
    return int.from_bytes(upper[: PROMPT_BITS // 8] + lower[: 8 - PROMPT_BITS // 8])


def choose(own_test: list[int], others: list[int], sizes: Sizes) -> tuple[list[int], list[int], list[int], int]:
    """Keys of the test, dev and training rows, and how many rows were dropped because the test split has their prompt.

    ``own_test`` and ``others``: sorted and distinct. Raises SplitError when a side stays empty.
    """
    test_prompts = {key >> REST_BITS for key in own_test}
    train = [key for key in others if key >> REST_BITS not in test_prompts]
    leaked = len(others) - len(train)
    if leaked and not train:
        raise SplitError(f"all {leaked} training rows have a prompt of the test split; take other training rows")
    total = len(own_test) + len(train)
    if sizes.limit and sizes.limit < total:
        total = sizes.limit
        first_out = sorted(own_test + train)[total]
        own_test = [key for key in own_test if key < first_out] or own_test[:1]  # at least one, or there is no test set
        train = train[: total - len(own_test)]
    count = int(sizes.test) if sizes.test >= 1 else max(1, round(sizes.test * total)) if sizes.test else 0
    if own_test:
        test = own_test[: count or None]
    elif not count:
        raise SplitError("has no test split of its own: set TEST_SIZE, a count or a share below 1")
    else:
        if sizes.test >= 1 and sizes.share < 1:
            count = min(count, max(1, round(sizes.share * total)))
        test, train = _cut(train, count)
    dev, train = _cut(train, min(sizes.dev, max(1, len(train) // 10)) if len(train) > 1 else 0)
    train = train[: sizes.train or None]
    if not test or not train:
        raise SplitError(
            f"has only {total} different rows: {len(test)} for the test set, {len(train)} to train on; "
            "lower TEST_SIZE, raise MAX_SAMPLES, or take another source"
        )
    return test, dev, train, leaked


def _cut(keys: list[int], count: int) -> tuple[list[int], list[int]]:
    """The first ``count`` keys, or more where rows of one prompt stay together, and the rest."""
    while 0 < count < len(keys) and keys[count - 1] >> REST_BITS == keys[count] >> REST_BITS:
        count += 1
    return keys[:count], keys[count:]


def deal(items: Iterable[Example], identity: Identity, sizes: dict[str, int], seed: int) -> dict[str, list[Example]]:
    """The items of each side, "test", "dev" and "train", as many as ``sizes`` says. ``items``: distinct, maybe endless.

    An item's key gives it to a side, by SHARES. A side takes the first of its own, so no other side's size moves them.
    Where the items end before, a side that lacks some takes those that others leave. Test and train stay the same then,
    too; of the dev set as much as can. Raises SplitError with the number of items where there are too few.
    """
    own: dict[str, list[Example]] = {name: [] for name in SHARES}
    unneeded = 0
    for item in items:
        place = key(seed, identity(item)[0]) / 2**64
        name = "test" if place < SHARES["test"] else "dev" if place < SHARES["test"] + SHARES["dev"] else "train"
        unneeded = 0 if len(own[name]) < sizes[name] else unneeded + 1
        own[name].append(item)
        if unneeded >= PATIENCE or all(len(own[side]) >= sizes[side] for side in own):
            break
    line = [*own["test"], *own["dev"], *reversed(own["train"])]  # test grows from the left, train from the right
    if len(line) < sum(sizes.values()):
        raise SplitError(f"has only {len(line)} different prompts")
    first, last = len(own["test"]), len(own["test"]) + len(own["dev"])
    between = sorted(range(sizes["test"], len(line) - sizes["train"]), key=lambda place: not first <= place < last)
    dev = [line[place] for place in between[: sizes["dev"]]]
    return {"test": line[: sizes["test"]], "dev": dev, "train": line[::-1][: sizes["train"]]}


def sides_of(
    items: Iterable[Example | None],
    identity: Identity,
    sizes: Sizes,
    seed: int,
    problem: Callable[[Example], str | None] = lambda item: None,
) -> tuple[dict[str, list[Example]], dict[str, int]]:
    """The items of each side, "test", "dev" and "train", and counts of those that were dropped.

    An item's ``split`` is "train", "test" or None; None instead of an item is a record that gave none. ``problem``: why
    an item cannot be used (a name for the count), or None. Memory holds the distinct items. Raises SplitError when test
    or train stays empty, and what ``items`` raises.
    """
    contradicting, leaked_rows = "of_them_with_another_ground_truth", "with_a_prompt_of_the_test_split"
    reasons = ("unusable", "too_long", "duplicates", contradicting, leaked_rows, "over_limit")  # as they are printed
    dropped: Counter = Counter(dict.fromkeys(reasons, 0))
    own_test: dict[int, Example] = {}  # by key
    others: dict[int, Example] = {}
    usable = 0
    for item in tqdm(items, "  reading", unit=" rows", leave=False, mininterval=1, disable=None):
        if why := "unusable" if item is None else problem(item):
            dropped[why] += 1
            continue
        usable += 1
        side = own_test if item.split == "test" else others
        first = side.setdefault(key(seed, *identity(item)), item)
        dropped[contradicting] += first is not item and first.ground_truth != item.ground_truth
    if not usable:
        left = ", ".join(f"{count} {reason.replace('_', ' ')}" for reason, count in dropped.items() if count)
        todo = "; raise MAX_PROMPT_LENGTH" if dropped["too_long"] else ""
        raise SplitError(f"has no usable row{f' ({left})' if left else ''}{todo}")
    test, dev, train, leaked = choose(sorted(own_test), sorted(others), sizes)
    distinct = len(own_test) + len(others)
    dropped["duplicates"], dropped[leaked_rows] = usable - distinct, leaked
    dropped["over_limit"] = distinct - leaked - len(test) - len(dev) - len(train)
    test_side = own_test or others
    sides = {"test": [test_side[key] for key in test], "dev": [others[key] for key in dev]}
    sides["train"] = [others[key] for key in train]
    return sides, dict(dropped)


def write_sides(
    sides: dict[str, list[Example]], folder: Path, row: Callable[[Example, str, int], dict], schema: pa.Schema
) -> dict[str, int]:
    """Write ``SIDE.parquet`` to ``folder`` for each side that is not empty; return their numbers of rows by name.
    ``row``: makes a row of an item, its side and its place there."""
    rows = {}
    for name, items in sides.items():
        if items:
            made = (row(item, name, place) for place, item in enumerate(items))
            rows[name] = write_parquet(made, folder / f"{name}.parquet", schema, len(items))
    return rows
