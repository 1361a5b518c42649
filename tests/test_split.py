"""data/split.py: split by seed, filtered, cut, counted."""

import random
import tracemalloc

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_tasks.data import split
from verl_tasks.data.split import Form, Sizes, SplitError, choose, deal, key, write_split
from verl_tasks.rows import Example, read_rows


def row_of(prompt, rest="", **fields):
    """A row to be: its prompt, the rest of it, and perhaps the split that its source has."""
    return Example(prompt, rest, **fields)


SCHEMA = pa.schema([("prompt", pa.string()), ("rest", pa.string()), ("split", pa.string()), ("index", pa.int64())])
FORM = Form(
    identity=lambda item: (item.prompt, item.ground_truth),
    row=lambda item, name, index: {"prompt": item.prompt, "rest": item.ground_truth, "split": name, "index": index},
    schema=lambda tools: SCHEMA,
)


def items(count, **fields):
    return [row_of(f"prompt {number}", **fields) for number in range(count)]


def done(given, folder, sizes=Sizes(), seed=1, form=FORM):  # noqa: B008
    """Rows of train and test, and counts of what was dropped."""
    rows, dropped = write_split(given, folder, form, sizes, seed)
    written = {name: list(read_rows(folder / f"{name}.parquet")) for name in ("train", "test")}
    assert {name: len(found) for name, found in written.items()} == rows
    assert sorted(path.name for path in folder.iterdir()) == ["test.parquet", "train.parquet"]
    for name, found in written.items():
        assert [(row["split"], row["index"]) for row in found] == [(name, index) for index in range(len(found))]
    return written["train"], written["test"], {reason: count for reason, count in dropped.items() if count}


def prompts(rows):
    return [row["prompt"] for row in rows]


@pytest.mark.parametrize(
    "count, sizes, expected",
    [
        (100, Sizes(), (95, 5, {})),
        (100, Sizes(test=7), (93, 7, {})),
        (100, Sizes(test=99), (1, 99, {})),
        (100, Sizes(test=99, share=0.1), (90, 10, {})),
        (100, Sizes(test=0.3, share=0.1), (70, 30, {})),
        (100, Sizes(limit=50, test=9, share=0.1), (45, 5, {"over_limit": 50})),
        (3, Sizes(test=2, share=0.1), (2, 1, {})),
        (100, Sizes(limit=40, test=0.25), (30, 10, {"over_limit": 60})),
        (100, Sizes(limit=40, test=10, train=20), (20, 10, {"over_limit": 70})),
        (100, Sizes(limit=1000, train=1000), (95, 5, {})),
        (2500, Sizes(), (2375, 125, {})),
    ],
)
def test_sizes(tmp_path, count, sizes, expected):
    train, test, dropped = done(items(count), tmp_path, sizes)
    assert (len(train), len(test), dropped) == expected
    assert len({*prompts(train), *prompts(test)}) == len(train) + len(test)


def dev_of(given, folder, **sizes):
    write_split(given, folder, FORM, Sizes(**sizes), 1)
    return prompts(read_rows(folder / "dev.parquet"))


def test_the_dev_set_is_of_what_would_train_and_at_most_a_tenth_of_it(tmp_path):
    test = prompts(done(items(300), tmp_path, Sizes(test=20))[1])
    dev = dev_of(items(300), tmp_path, test=20, dev=16)
    assert len(dev) == 16 and prompts(read_rows(tmp_path / "test.parquet")) == test
    assert len({*dev, *test, *prompts(read_rows(tmp_path / "train.parquet"))}) == 300
    assert len(dev_of(items(120), tmp_path, test=20, dev=16)) == 10
    assert len(dev_of(items(22), tmp_path, test=20, dev=16)) == 1
    # The same rows whatever else is asked for.
    assert dev_of(items(300), tmp_path, test=20, dev=16, train=30) == dev
    assert dev_of(random.Random(1).sample(items(300), 300), tmp_path, test=20, dev=16, limit=250) == dev


def test_rows_of_one_prompt_are_not_divided_between_dev_and_train(tmp_path):
    given = [row_of(f"prompt {number % 50}", f"answer {number}") for number in range(1000)]
    dev = dev_of(given, tmp_path, test=20, dev=30)
    assert len(dev) == 40 and not {*dev} & {*prompts(read_rows(tmp_path / "train.parquet"))}


def test_split_depends_on_prompt_and_seed_and_not_on_the_place(tmp_path):
    given = items(300)
    first = done(given, tmp_path)
    shuffled = random.Random(3).sample(given, len(given))
    assert done(shuffled, tmp_path) == first  # the rows stand in the same order, too
    assert done(given, tmp_path, seed=2) != first
    assert prompts(first[0]) != sorted(prompts(first[0]), key=prompts_number)


def prompts_number(prompt):
    return int(prompt.split()[-1])


def test_a_row_keeps_its_side_when_others_come_and_go(tmp_path):
    _, test, _ = done(items(400), tmp_path, Sizes(test=0.5))
    _, fewer, _ = done(items(400)[100:], tmp_path, Sizes(test=0.5))
    kept = [prompt for prompt in prompts(test) if prompts_number(prompt) >= 100]
    assert len({*kept} & {*prompts(fewer)}) > 0.9 * len(kept)


def test_duplicates_are_taken_once_and_counted(tmp_path):
    train, test, dropped = done([*items(100), *items(60), *items(10)], tmp_path)
    assert (len(train) + len(test), dropped) == (100, {"duplicates": 70})


def test_rows_of_one_prompt_go_to_one_side(tmp_path):
    given = [row_of(f"prompt {number % 50}", f"answer {number}") for number in range(1000)]
    train, test, dropped = done([*given, *given[:30]], tmp_path, Sizes(test=15))
    assert (len(train), len(test), dropped) == (980, 20, {"duplicates": 30})
    assert not {*prompts(train)} & {*prompts(test)}


def test_test_split_of_the_source_stays_its_own(tmp_path):
    given = [*items(50, split="train"), *[row_of(f"prompt {number}", split="test") for number in range(45, 60)]]
    train, test, dropped = done(given, tmp_path, Sizes(test=0))
    assert {*prompts(test)} == {f"prompt {number}" for number in range(45, 60)}
    assert {*prompts(train)} == {f"prompt {number}" for number in range(45)}
    assert dropped == {"with_a_prompt_of_the_test_split": 5}
    _, test, dropped = done(given, tmp_path, Sizes(test=4))
    assert (len(test), dropped) == (4, {"with_a_prompt_of_the_test_split": 5, "over_limit": 11})
    assert done([*given, *given[:48]], tmp_path, Sizes(test=0))[2] == {
        "duplicates": 48,
        "with_a_prompt_of_the_test_split": 5,
    }
    train, test, dropped = done(given, tmp_path, Sizes(limit=30, test=0))
    assert (len(train) + len(test), dropped) == (
        30,
        {"with_a_prompt_of_the_test_split": 5, "over_limit": 30},
    )
    assert {*prompts(test)} <= {f"prompt {number}" for number in range(45, 60)}


def test_a_small_limit_keeps_a_row_of_the_own_test_split(tmp_path):
    train, test, _ = done([*items(500, split="train"), row_of("test", split="test")], tmp_path, Sizes(limit=10, test=0))
    assert (len(train), prompts(test)) == (9, ["test"])


def test_what_cannot_be_used_is_counted_by_reason(tmp_path):
    form = Form(FORM.identity, FORM.row, FORM.schema, problem=lambda i: "too_long" if i.prompt.endswith("7") else None)
    given = [None, *items(100), None, *items(8)]
    assert done(given, tmp_path, form=form)[2] == {"unusable": 2, "too_long": 11, "duplicates": 7}


@pytest.mark.parametrize(
    "given, sizes, message",
    [
        ([None, None], Sizes(), r"no usable row \(2 unusable\)"),
        (items(1), Sizes(), "only 1 different rows: 1 for the test set, 0 to train on"),
        (items(10), Sizes(test=10), "only 10 different rows: 10 for the test set, 0 to train on"),
        (items(10), Sizes(test=0), "no test split of its own: set TEST_SIZE"),
        (items(10, split="test"), Sizes(test=0), "0 to train on"),
        (
            [*items(10, split="train"), *items(12, split="test")],
            Sizes(test=5),
            "^all 10 training rows have a prompt of the test split; take other training rows$",
        ),
        ([row_of("same", str(number)) for number in range(9)], Sizes(), "9 for the test set, 0 to train on"),
    ],
)
def test_too_few_rows_are_refused_and_leave_nothing(tmp_path, given, sizes, message):
    with pytest.raises(SplitError, match=message):
        write_split(given, tmp_path, FORM, sizes, 1)
    assert list(tmp_path.iterdir()) == []


PROMPT_NUMBERS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 3), st.booleans()), min_size=1, max_size=120)


@settings(max_examples=150)
@given(
    PROMPT_NUMBERS, st.integers(0, 60), st.sampled_from([0, 0.05, 0.5, 1, 5, 30]), st.integers(0, 30), st.integers(0, 9)
)
def test_choice_is_disjoint_and_within_its_sizes(numbers, limit, test_size, train_size, dev_size):
    rows = [(key(1, str(prompt), str(rest)), own) for prompt, rest, own in numbers]
    own, others = (sorted({k for k, own in rows if own is of_test}) for of_test in (True, False))
    try:
        test, dev, train, leaked = choose(own, others, Sizes(limit, test_size, train_size, dev_size))
    except SplitError:
        return
    assert test and train
    of_sides = [{k >> 24 for k in side} for side in (test, dev, train)]
    assert sum(map(len, of_sides)) == len(set.union(*of_sides))
    assert {*test, *dev, *train} <= {*own, *others}
    assert len(test) + len(dev) + len(train) <= len(own) + len(others) - leaked
    assert not train_size or len(train) <= train_size
    assert len(of_sides[1]) <= dev_size
    assert not limit or len(test) + len(dev) + len(train) <= limit
    if own:
        assert {*test} <= {*own}
        assert test_size < 1 or len(test) <= test_size


def peak(count, folder):
    """Bytes that Python has at most while ``count`` rows are split."""

    class Made:
        def __iter__(self):
            return (row_of(f"prompt {number} {'x' * 200}") for number in range(count))

    tracemalloc.start()
    try:
        write_split(Made(), folder, FORM, Sizes(), 1)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.medium
def test_a_row_takes_little_more_memory_than_its_text(tmp_path):
    few, many = peak(10_000, tmp_path), peak(60_000, tmp_path)
    assert (many - few) / 50_000 < 600  # bytes a row: its text has 270


# ---- an endless source


def dealt(given, test, dev, train, seed=1):
    sides = deal(iter(given), FORM.identity, {"test": test, "dev": dev, "train": train}, seed)
    assert [len(sides[name]) for name in ("test", "dev", "train")] == [test, dev, train]
    return [prompts_of(sides[name]) for name in ("test", "dev", "train")]


def prompts_of(side):
    return [item.prompt for item in side]


@settings(max_examples=200, database=None)
@given(st.integers(0, 60), st.integers(0, 30), st.integers(0, 30), st.integers(0, 30), st.integers(0, 3))
def test_sides_are_disjoint_and_no_size_moves_the_test_or_training_rows(count, test, dev, train, seed):
    """Also where the source ends, and a side takes what others leave."""
    if test + dev + train > count:
        with pytest.raises(SplitError, match=f"^has only {count} different prompts$"):
            dealt(items(count), test, dev, train, seed)
        return
    sides = dealt(items(count), test, dev, train, seed)
    assert len({prompt for side in sides for prompt in side}) == test + dev + train
    assert sides[0] == dealt(items(count), test, 0, 0, seed)[0]
    assert sides[2] == dealt(items(count), 0, 0, train, seed)[2]
    assert dealt(items(count), count, 0, 0, seed)[0][:test] == sides[0]
    assert dealt(items(count), 0, 0, count, seed)[2][:train] == sides[2]


def test_a_source_without_an_end_is_read_as_far_as_its_sides_need():
    read = (row_of(f"prompt {number}") for number in range(10**9))
    sides = dealt(read, 150, 50, 800)
    assert prompts_number(next(read).prompt) < 1300
    assert sides == dealt((row_of(f"prompt {number}") for number in range(5000)), 150, 50, 800)
    assert sides != dealt(items(5000), 150, 50, 800, seed=2)
    assert not {*sides[0], *sides[1]} & {*dealt(items(5000), 0, 0, 3000)[2]}  # nor with many more training rows


def test_a_group_is_on_one_side_and_one_without_an_end_ends(monkeypatch):
    identity = lambda item: (item.group, item.prompt)  # noqa: E731
    given = [row_of(f"prompt {number}", group=f"group {number % 40}") for number in range(4000)]
    sides = deal(iter(given), identity, {"test": 60, "dev": 20, "train": 300}, 1)
    groups = [{item.group for item in side} for side in sides.values()]
    assert all(groups) and sum(map(len, groups)) == len(set.union(*groups))
    monkeypatch.setattr(split, "PATIENCE", 50)
    endless = (row_of(f"prompt {number}", group="one") for number in range(10**9))
    assert len(deal(endless, identity, {"test": 5, "dev": 2, "train": 9}, 1)["test"]) == 5
    assert prompts_number(next(endless).prompt) <= 60
