"""Convert a data file to verl's parquet files: train, test and a manifest. See docs/DATA.md.

python -m tasks.common.data.convert INPUT OUTPUT_DIR [--kind rl|sft|dpo] [--prompt-column NAME] …
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

import pyarrow as pa

from tasks.common.data import prepare
from tasks.common.data.formats import KINDS, Columns, Conversation, conversation
from tasks.common.data.records import load
from tasks.common.data.split import Form, Sizes, SplitError, write_split
from tasks.common.files import write_json
from tasks.common.process import errors_in_one_line
from tasks.common.rows import (
    MESSAGES,
    TOOL_MESSAGES,
    DataError,
    encoded,
    normalized,
    rl_row,
    rl_schema,
    sft_schema,
)
from tasks.common.settings import SettingsError, given_arguments


def dpo_schema(tools: bool = False, truncated: bool = False) -> pa.Schema:
    """Schema of preference pairs for TRL's DPOTrainer: chosen and rejected are one assistant message each.

    ``truncated``: add the column ``truncated``, the names of the answers that were cut at the length limit.
    """
    columns = {"prompt": TOOL_MESSAGES if tools else MESSAGES, "chosen": MESSAGES, "rejected": MESSAGES}
    columns |= {"tools": pa.string()} if tools else {}
    return pa.schema(columns | ({"truncated": pa.list_(pa.string())} if truncated else {}))


def rl_example(found: Conversation) -> prepare.Example | None:
    """The answer for the reward: that of the record, else the last turn's text, or its calls if it has any."""
    if found.answer is not None:
        return prepare.Example(found.messages, found.answer, tools=found.tools)
    if not (example := sft_example(found)):
        return None
    calls = [call["function"] for call in example.ground_truth.get("tool_calls", [])]
    return replace(example, ground_truth=calls or example.ground_truth["content"])


def sft_example(found: Conversation) -> prepare.Example | None:
    """The answer is the last message to be learned; None where the conversation does not end with the assistant."""
    messages = found.messages
    if found.answer is not None:
        text = found.answer if isinstance(found.answer, str) else json.dumps(found.answer, ensure_ascii=False)
        messages = [*messages, {"role": "assistant", "content": text}]
    learned = [i for i, m in enumerate(messages) if m["role"] == "assistant" and i not in found.context]
    if messages[-1]["role"] != "assistant" or not any(learned):
        return None
    return prepare.Example(messages[: learned[-1]], messages[learned[-1]], tools=found.tools)


def dpo_example(found: Conversation) -> prepare.Example | None:
    """The answer is the pair."""
    if found.chosen is None:
        raise DataError("has no chosen and rejected answers; name them with --chosen-column and --rejected-column")
    if found.chosen == found.rejected:
        return None
    return prepare.Example(found.messages, {"chosen": found.chosen, "rejected": found.rejected}, tools=found.tools)


def sft_line(example: prepare.Example, split: str, index: int) -> dict:
    return {"messages": encoded([*example.prompt, example.ground_truth]), **_tools(example)}


def dpo_line(example: prepare.Example, split: str, index: int) -> dict:
    truth = example.ground_truth
    answers = {name: [{"role": "assistant", "content": truth[name]}] for name in ("chosen", "rejected")}
    cut = {"truncated": truth["truncated"]} if "truncated" in truth else {}
    return {"prompt": encoded(example.prompt), **answers, **cut, **_tools(example)}


def _tools(example: prepare.Example) -> dict:
    return {"tools": json.dumps(example.tools)} if example.tools else {}


NEXT = {  # what to do with the training rows of each kind
    "rl": "make train TASK=… TRAIN_FILE=",
    "sft": "give it to verl.trainer.sft_trainer as data.train_files=",
    "dpo": "make dpo TASK=… PAIRS_FILE=",
}


def convert(options: argparse.Namespace) -> dict:
    """Write the files and return the manifest. Raises DataError; OUTPUT_DIR is then unchanged."""
    parts = load(options.input)
    columns = Columns(**{field.name: getattr(options, f"{field.name}_column") for field in fields(Columns)})
    kind = options.kind or next(parts[0].converted(lambda record: conversation(record, columns).kind))[1]
    make = {"rl": rl_example, "sft": sft_example, "dpo": dpo_example}[kind]
    tokenizer = prepare.load_tokenizer(options.tokenizer, "--tokenizer ") if options.tokenizer else None
    own_test = any(part.split == "test" for part in parts)
    test_size = options.test_size if options.test_size is not None else 0 if own_test else 0.05
    name = options.data_source or Path(options.input).stem

    noted = set()

    def made(record: dict) -> Iterator[prepare.Example]:
        found = conversation(record, columns)
        if kind == "sft" and found.context:
            noted.add("verl's SFT trainer learns every turn of the assistant, also those of weight 0 before the last")
        if found.chosen is not None and kind != "dpo":
            raise DataError(f"has chosen and rejected answers, which are no {kind} row; use --kind dpo")
        return filter(None, [make(found)])

    def rl_line(example: prepare.Example, split: str, index: int) -> dict:
        return rl_row(name, example.prompt, example.ground_truth, split, index, example.tools)

    examples = prepare.Examples(parts, made)
    limit = options.max_prompt_tokens
    form = Form(
        identity=lambda e: (prepare.prompt_text(e), "" if kind == "rl" else json.dumps(normalized(e.ground_truth))),
        row={"rl": rl_line, "sft": sft_line, "dpo": dpo_line}[kind],
        schema={"rl": rl_schema, "sft": sft_schema, "dpo": dpo_schema}[kind],
        needs_tools=lambda e: prepare.needs_tools(e) or (kind == "sft" and "tool_calls" in e.ground_truth),
        problem=lambda e: prepare.too_long(tokenizer, limit, e.prompt, e.tools) if tokenizer else None,
        truth=lambda e: e.ground_truth,
    )
    with prepare.replaced_as_a_whole(Path(options.output_dir), ("test", "train")) as new:
        try:
            sizes = Sizes(options.max_samples, test_size)
            rows, dropped = write_split(examples, new, form, sizes, options.seed)
        except SplitError as error:
            raise DataError(f"{options.input}: {error}") from error
        manifest = {"source": "file", "kind": kind, "origin": examples.origin(), "seed": options.seed, "rows": rows}
        manifest |= {"not_used": examples.unused(), "note": "".join(noted), "dropped": dropped, "test_size": test_size}
        manifest |= {"max_samples": options.max_samples, "tokenizer": options.tokenizer, "max_prompt_tokens": limit}
        write_json(new / "manifest.json", manifest)
    return manifest


def parse(arguments: list[str]) -> argparse.Namespace:
    """Options from a command line; exits with a message when they are wrong."""
    parser = argparse.ArgumentParser(prog="json_to_parquet", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("input", help="json, jsonl, csv or parquet file, or a folder with train.* and test.*")
    parser.add_argument("output_dir", help="gets train.parquet, test.parquet and manifest.json")
    parser.add_argument("--kind", choices=KINDS, help="kind of rows to write (default: that of the first record)")
    for field in fields(Columns):
        parser.add_argument(f"--{field.name}-column", metavar="NAME", help="use this column instead of recognizing it")
    sizes = "test rows: a count, or a share below 1 (default 0.05; 0, the default with a test file: all of it)"
    parser.add_argument("--test-size", type=float, help=sizes)
    parser.add_argument("--max-samples", type=int, default=0, help="largest number of rows to use; 0: all")
    parser.add_argument("--seed", type=int, default=42, help="seed of the split (default 42)")
    parser.add_argument("--tokenizer", metavar="MODEL", help="hub id or folder of the model that measures prompts")
    parser.add_argument("--max-prompt-tokens", type=int, metavar="N", help="drop longer prompts")
    parser.add_argument("--data-source", metavar="NAME", help="data_source of RL rows (default: the file's name)")
    options = parser.parse_args(arguments)
    size = options.test_size or 0
    if not (0 <= size < 1 or (size >= 1 and size.is_integer())):  # false for NaN
        parser.error("--test-size must be a count, or a share below 1")
    if min(options.max_samples, options.max_prompt_tokens or 0) < 0:
        parser.error("--max-samples and --max-prompt-tokens must be 0 or more")
    if bool(options.tokenizer) != bool(options.max_prompt_tokens):
        parser.error("--tokenizer and --max-prompt-tokens go together")
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
