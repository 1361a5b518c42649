"""Convert a data file to verl's parquet files: train, test and a manifest. See docs/DATA.md."""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path

from verl_tasks import rows
from verl_tasks.data import prepare
from verl_tasks.data.formats import FIELDS, Conversation, conversation
from verl_tasks.data.records import load
from verl_tasks.data.split import Sizes, SplitError, sides_of, write_sides
from verl_tasks.files import write_json
from verl_tasks.process import errors_in_one_line
from verl_tasks.rows import DataError, Example
from verl_tasks.settings import SettingsError, given_arguments


def rl_example(record: Conversation) -> Example | None:
    """The answer for the reward: that of the record, else the last turn's text, or its calls if it has any."""
    if record.answer is not None:
        return Example(record.messages, record.answer, tools=record.tools)
    if not (example := sft_example(record)):
        return None
    calls = [call["function"] for call in example.ground_truth.get("tool_calls", [])]
    return replace(example, ground_truth=calls or example.ground_truth["content"])


def sft_example(record: Conversation) -> Example | None:
    """The answer is the last message to be learned; None where the conversation does not end with the assistant."""
    messages = record.messages
    if record.answer is not None:
        messages = [*messages, {"role": "assistant", "content": record.answer_text}]
    learned = [i for i, m in enumerate(messages) if m["role"] == "assistant" and i not in record.context]
    if messages[-1]["role"] != "assistant" or not any(learned):
        return None
    return Example(messages[: learned[-1]], messages[learned[-1]], tools=record.tools)


def dpo_example(record: Conversation) -> Example | None:
    """The answer is the pair; None where its answers are the same."""
    if record.chosen is None:
        names = "--chosen-column and --rejected-column, of `make dpo` PAIRS_COLUMNS"
        raise DataError(f"has no chosen and rejected answers; name them: {names}")
    pair = {"chosen": record.chosen, "rejected": record.rejected}
    return Example(record.messages, pair, tools=record.tools) if len({*pair.values()}) == 2 else None


NEXT = {  # what to do with the training rows of each kind
    "rl": "make train TASK=… TRAIN_FILE=",
    "sft": "give it to verl.trainer.sft_trainer as data.train_files=",
    "dpo": "make dpo TASK=… PAIRS_FILE=",
}


def convert(options: argparse.Namespace) -> dict:
    """Write the files and return the manifest. Raises DataError; OUTPUT_DIR is then unchanged."""
    parts = load(options.input)
    columns = {field: name for field in FIELDS if (name := getattr(options, f"{field}_column")) is not None}
    kind = options.kind or next(parts[0].converted(lambda record: conversation(record, columns).kind))[1]
    make, row, schema = {
        "rl": (rl_example, lambda e, *at: rows.rl_row(name, e.prompt, e.ground_truth, *at, e.tools), rows.rl_schema),
        "sft": (sft_example, lambda e, *at: rows.sft_row(e.prompt, e.ground_truth, e.tools), rows.sft_schema),
        "dpo": (dpo_example, lambda e, *at: rows.dpo_row(e), rows.dpo_schema),
    }[kind]
    usual = 0 if any(part.split == "test" for part in parts) else 0.05
    test_size = usual if options.test_size is None else options.test_size
    name = options.data_source or Path(options.input).stem
    noted, pairs = set(), set()

    def made(record: dict) -> Iterator[Example]:
        read = conversation(record, columns)
        if kind == "sft" and read.context:
            noted.add("verl's SFT trainer learns every turn of the assistant, also those of weight 0 before the last")
        if read.chosen is not None and kind != "dpo":
            raise DataError(f"has chosen and rejected answers, which are no {kind} row; use --kind dpo")
        example = make(read)
        if kind == "dpo" and example:
            pairs.add((prepare.prompt_text(example), read.chosen, read.rejected))
        return filter(None, [example])

    examples = prepare.Examples(parts, made)

    def identity(e: Example) -> tuple[str, str]:
        return prepare.prompt_text(e), "" if kind == "rl" else rows.posed([e.ground_truth], None)

    def needs_tools(e: Example) -> bool:
        return prepare.needs_tools(e) or (kind == "sft" and "tool_calls" in e.ground_truth)

    with prepare.replaced_as_a_whole(Path(options.output_dir), ("test", "train")) as new:
        try:
            sides, dropped = sides_of(examples, identity, Sizes(options.max_samples, test_size), options.seed)
        except SplitError as error:
            raise DataError(f"{options.input}: {error}") from error
        counts = write_sides(sides, new, row, schema(any(map(needs_tools, chain(*sides.values())))))
        if opposed := sum((prompt, worse, better) in pairs for prompt, better, worse in pairs):
            noted.add(f"{opposed} pairs contradict another of their prompt, and `make dpo` leaves them out")
        manifest = {"source": "file", "kind": kind, "origin": examples.origin(), "seed": options.seed, "rows": counts}
        manifest |= {"not_used": examples.unused(), "note": "; ".join(sorted(noted))}
        manifest |= {"dropped": dropped, "test_size": test_size}
        write_json(new / "manifest.json", manifest)
    return manifest


def parse(arguments: list[str]) -> argparse.Namespace:
    """Options from a command line; exits with a message when they are wrong."""
    parser = argparse.ArgumentParser(prog="json_to_parquet", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("input", help="json, jsonl, csv or parquet file, or a folder with train.* and test.*")
    parser.add_argument("output_dir", help="gets train.parquet, test.parquet and manifest.json")
    parser.add_argument("--kind", choices=NEXT, help="kind of rows to write (default: that of the first record)")
    for field in FIELDS:
        parser.add_argument(f"--{field}-column", metavar="NAME", help="use this column instead of recognizing it")
    sizes = "test rows: a count, or a share below 1 (default 0.05; 0, the default with a test file: all of it)"
    parser.add_argument("--test-size", type=float, help=sizes)
    parser.add_argument("--max-samples", type=int, default=0, help="largest number of rows to use; 0: all")
    parser.add_argument("--seed", type=int, default=42, help="seed of the split (default 42)")
    parser.add_argument("--data-source", metavar="NAME", help="data_source of RL rows (default: the file's name)")
    options = parser.parse_args(arguments)
    size = options.test_size or 0
    if not (0 <= size < 1 or (size >= 1 and size.is_integer())):  # false for NaN
        parser.error("--test-size must be a count, or a share below 1")
    if options.max_samples < 0:
        parser.error("--max-samples must be 0 or more")
    return options


def main() -> None:
    """Command line."""
    with errors_in_one_line(DataError, SettingsError):
        options = parse([*sys.argv[1:], *given_arguments()])
        manifest = convert(options)
    print(f"{manifest['kind']} rows in {options.output_dir}: {prepare.describe(manifest)}")
    print(f"next: {NEXT[manifest['kind']]}{(Path(options.output_dir) / 'train.parquet').resolve()}")


if __name__ == "__main__":
    main()
