"""`make data`: a task's examples as train, dev, test and SFT parquet files, with a manifest."""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import chain, count, islice
from pathlib import Path

from verl_tasks import errors
from verl_tasks.data import gold
from verl_tasks.data.records import HubRecords, HubUnreachable, Records, load
from verl_tasks.data.split import PATIENCE, Sizes, SplitError, deal, sides_of, write_sides
from verl_tasks.files import partial_of, read_json, sha256, write_json, write_text
from verl_tasks.models.chat_template import LONGEST_TOKEN, demonstration_ids, prompt_ids
from verl_tasks.models.find import resolve_model
from verl_tasks.models.merge import base_model
from verl_tasks.process import errors_in_one_line
from verl_tasks.rows import (
    FIRST_PROBLEMS,
    DataError,
    Example,
    demonstration,
    messages_problem,
    normalized,
    posed,
    rl_row,
    rl_schema,
    sft_row,
    sft_schema,
    tools_of,
    truth_problem,
    write_parquet,
)
from verl_tasks.settings import Settings, SettingsError, load_settings
from verl_tasks.text import one_line

__all__ = ["DataError", "Example", "Examples", "distinct", "main", "posed", "too_long"]  # for tasks

# A generator is read once, as far as its sides need it. A source that can be iterated again (``Examples``) is split by
# seed. None is a record without an example, which is counted.
Source = Callable[[Settings], Iterable[Example | None]]


class Examples:
    """Examples made of the records of files or of the hub; they can be iterated again.

    ``parts``: ``records.load(path)``, or ``[records.hub(name, config, split), …]``. ``convert``: the examples of a
    record, perhaps none. Text in place of an example says why a part of the record cannot be used: all such texts are
    counted, the first ten are printed. A DataError of ``convert`` ends the reading; its message names the place.
    """

    def __init__(self, parts: list[Records | HubRecords], convert: Callable[[dict], Iterable[Example | str]]):
        self.parts, self.convert, self.told = parts, convert, 0

    def __iter__(self) -> Iterator[Example | None]:
        for part in self.parts:
            for place, examples in part.converted(self._examples):
                for example in examples or [None]:
                    if isinstance(example, str):
                        if self.told < FIRST_PROBLEMS:
                            print(f"  cannot be used: {place}: {example}", flush=True)
                        self.told, example = self.told + 1, None
                    yield example and replace(example, split=part.split or example.split, place=place)

    def _examples(self, record: dict) -> list[Example | str]:
        examples = list(self.convert(record))
        for example in examples:
            if not isinstance(example, str) and (problem := _problem(example)):
                raise DataError(problem)
        return examples

    def origin(self) -> list[dict]:
        """The manifest's entries of the parts."""
        return [part.origin() for part in self.parts]

    def unused(self) -> list[str]:
        """Columns that no record's conversion read, and nulls that were left out of those that it did."""
        return list(dict.fromkeys(name for part in self.parts for name in part.unused))


def _problem(example: Example) -> str:
    """Why no file can hold ``example``; empty where one can."""
    if problem := messages_problem(example.messages()):
        return f"the prompt {problem}"
    for name, value in (("ground truth", example.ground_truth), ("tools", example.tools)):
        if problem := truth_problem(value):
            return f"the {name} {problem}"
    shown = example.demonstration
    wrong = not isinstance(shown, str | None) and messages_problem(shown)
    return f"the demonstration must be text, or messages, is {one_line(repr(shown), 80)}" if wrong else ""


def distinct(examples: Iterable[Example | None], patience: int = PATIENCE) -> Iterator[Example]:
    """Each problem once. Ends after ``patience`` consecutive repeats. Memory: 16 bytes of digest per problem."""
    seen: set[bytes] = set()
    repeats = 0
    for example in examples:
        key = example and hashlib.blake2b(prompt_text(example).encode(), digest_size=16).digest()
        if example and key not in seen:
            seen.add(key)
            repeats = 0
            yield example
        elif (repeats := repeats + 1) >= patience:
            return


def prompt_text(example: Example) -> str:
    """One text per problem: its key, or its messages and tools."""
    return normalized(example.key) if example.key else posed(example.messages(), example.tools)


def prepare(settings: Settings, sources: dict[str, Source]) -> dict:
    """Write train, dev, test and SFT parquet files to ``settings.data_dir`` and return the manifest.

    How many rows go where: docs/DATA.md. The SFT set has the demonstrations of the first SFT_SIZE training prompts that
    have one. Raises DataError when the source has too few rows; the old data then stays.
    """
    name, note = _resolve(settings, sources)
    try:
        return _prepare(settings, name, sources.get(name) or sources["hub"], note)
    except HubUnreachable as error:
        if settings.FILE or settings.SOURCE != "auto" or "generate" not in sources:
            raise
        note = f"generated here, for {error}"
        try:
            return _prepare(settings, "generate", sources["generate"], note)
        except DataError as second:
            raise DataError(f"{second} ({note})") from second


def _resolve(settings: Settings, sources: dict[str, Source]) -> tuple[str, str]:
    """The name of the source to use, and a note with the reason."""
    name, known = "file" if settings.FILE else settings.SOURCE, ", ".join(sources)
    if name == "file" and not settings.FILE:
        raise DataError("SOURCE=file: set FILE, the path of a data file or of a folder with train.* and test.*")
    if name == "file" and "file" not in sources:
        raise DataError(f"FILE={settings.FILE}: this task reads no files; it knows SOURCE={known}")
    if name == "auto":
        if settings.DIFFICULTY == "easy" and "generate" in sources:
            return "generate", "generated here, for DIFFICULTY=easy"
        name = next((name for name in ("hub", "generate") if name in sources), None)
        if not name:
            raise DataError(f"SOURCE=auto: this task knows {known}; for a data file set FILE")
    elif name not in sources and not ("hub" in sources and Path(name).is_dir()):
        or_folder = ", or a folder of the hub's form" if "hub" in sources else ""
        raise DataError(f"SOURCE={name}: this task knows {known}{or_folder}")
    return name, ""


def _prepare(settings: Settings, name: str, source: Source, note: str) -> dict:
    examples = source(settings)
    finite = iter(examples) is not examples
    shown = f"FILE={settings.FILE}" if name == "file" else f"SOURCE={name}"
    tokenizer = load_tokenizer(settings.MODEL) if finite else _tokenizer_here(settings.MODEL)
    with replaced_as_a_whole(settings.data_dir, ("test", "dev", "train", "sft")) as new:
        try:
            sides, details = _finite(settings, examples, tokenizer) if finite else _endless(settings, examples)
        except SplitError as error:
            raise DataError(f"{shown}: {error}") from error
        checked, sides = _gold_checked(settings, sides, tokenizer)
        if (left := len(sides["train"])) < settings.TRAIN_BATCH_SIZE:
            raise DataError(
                f"{shown}: only {left} training prompts{_because(details)}, less than "
                f"TRAIN_BATCH_SIZE={settings.TRAIN_BATCH_SIZE}; lower it, or take more data"
            )
        everything = [*chain(*sides.values())]
        rows = write_sides(sides, new, partial(_rl_row, settings), rl_schema(any(map(needs_tools, everything))))
        worked = islice((e for e in sides["train"] if e.demonstration), settings.SFT_SIZE)
        demonstrations = [sft_row(e.messages(), e.demonstration, e.tools) for e in worked]
        if demonstrations:
            tools = any("tools" in row or has_calls(row["messages"]) for row in demonstrations)
            episodes = any("prompt_messages" in row for row in demonstrations)
            rows["sft"] = write_parquet(demonstrations, new / "sft.parquet", sft_schema(tools, episodes))
        replaced = sum(bool(e.system) and e.messages()[0]["content"] != e.system for e in everything)
        own_system = f"{replaced} prompts have a system message of their own in place of the task's" if replaced else ""
        notes = "; ".join(filter(None, [note, own_system, *_smaller(settings, rows)]))
        if not isinstance(examples, Examples):
            examples = Examples(load(settings.FILE) if name == "file" else [], iter)
        manifest = {"fingerprint": settings.data_fingerprint(), "source": name, "note": notes}
        manifest |= {"origin": examples.origin(), "not_used": examples.unused(), "seed": settings.SEED, "rows": rows}
        manifest |= {**details, "gold": checked}
        groups = {side: {e.group for e in items if e.group and not e.key} for side, items in sides.items()}
        manifest["groups"] = {side: len(found) for side, found in groups.items() if found}
        # A finite source is without longer ones.
        lengths = [] if finite else [*islice(_lengths(tokenizer, everything), gold.MEASURED)]
        if long := sum(length > settings.MAX_PROMPT_LENGTH for length in lengths):
            manifest["long"] = {"model": settings.MODEL, "prompts": long, "of": len(lengths), "longest": max(lengths)}
        manifest["contents"] = {name: sha256(new / f"{name}.parquet") for name in rows}
        if longest := _longest(tokenizer, demonstrations):
            manifest["contents"][f"longest of {settings.MODEL}"] = str(longest)
        write_json(new / "manifest.json", manifest)
    return manifest


def _smaller(s: Settings, rows: dict[str, int]) -> Iterator[str]:
    """Which sizes are less than what is asked for, and why; ``rows``: of each file."""
    if rows["test"] < s.TEST_SIZE:
        or_share = f" or TEST_SHARE={s.TEST_SHARE:g} of the rows" if s.TEST_SHARE < 1 else ""
        yield f"TEST_SIZE={s.TEST_SIZE:g}: {rows['test']}, all of a test split{or_share}"
    if (dev := rows.get("dev", 0)) < s.DEV_SIZE:
        yield f"DEV_SIZE={s.DEV_SIZE}: {dev}, a tenth of what can train"
    if rows["train"] < s.TRAIN_SIZE:
        yield f"TRAIN_SIZE={s.TRAIN_SIZE}: there are {rows['train']}"


def _identity(example: Example) -> tuple[str, str]:
    """Rows of one group stay on one side, else rows of one prompt."""
    return (normalized(example.group), prompt_text(example)) if example.group else (prompt_text(example), "")


def _lengths(tokenizer, examples: Iterable[Example]) -> Iterator[int]:
    """Tokens of each prompt that the template takes; none without a tokenizer."""
    for example in examples if tokenizer else ():
        with suppress(ValueError):  # the template refuses it
            yield len(prompt_ids(tokenizer, example.messages(), example.tools))


def _longest(tokenizer, rows: list[dict]) -> int:
    """Tokens of the longest of the demonstrations ``rows``; 0 where that is not known, or takes too long to say."""
    if not tokenizer or len(rows) > gold.MEASURED:
        return 0
    try:
        lengths = (len(demonstration_ids(tokenizer, *demonstration(row), tools_of(row))[0]) for row in rows)
        return max(lengths, default=0)
    except ValueError:  # the template refuses one
        return 0


def _rl_row(settings: Settings, example: Example, side: str, index: int) -> dict:
    # The same key for all rows of a group: it tells a conversation's rows apart from others'.
    group = example.group and hashlib.blake2b(example.group.encode(), digest_size=16).hexdigest()
    key = example.key or group
    return rl_row(settings.TASK, example.messages(), example.ground_truth, side, index, example.tools, key)


def _gold_row(settings: Settings, side: str, index: int, example: Example) -> gold.Row:
    row = _rl_row(settings, example, side, index)
    place = example.place or f"{side}: row {index}"
    truth, demonstration, extra = row["reward_model"]["ground_truth"], example.demonstration, row["extra_info"]
    if isinstance(demonstration, list):
        answers = [message["content"] for message in demonstration if message["role"] == "assistant"]
        demonstration, extra = json.dumps(answers), row
    return gold.Row(place, demonstration, truth, row["data_source"], extra)


def _refuse_nothing_right(settings: Settings, entry: dict) -> None:
    if entry["demonstrations"] and not entry["right"]:
        adds_up = ", where a right episode's rewards add up to 1," if settings.multi_turn else ""
        advice = f"mend {settings.reward_file.name}{adds_up} or the demonstrations"
        raise DataError(f"gold check: {gold.said(entry, settings)}; nothing is right: {advice}")


def _gold_checked(settings: Settings, sides: dict[str, list], tokenizer) -> tuple[dict, dict[str, list]]:
    """The manifest's entry of the gold check, and ``sides``, with GOLD=drop without the rows that are not right.

    Raises DataError for such rows and wrong forms that are right with GOLD=error, and where GOLD=drop leaves a side
    empty.
    """
    rows = [_gold_row(settings, side, index, item) for side in sides for index, item in enumerate(sides[side])]
    entry, wrong = gold.check(settings, rows, tokenizer)
    if settings.GOLD == "error" and gold.failed({"gold": entry}, settings):
        raise DataError(f"GOLD=error: {gold.said(entry, settings)}")
    _refuse_nothing_right(settings, entry)
    if wrong and settings.GOLD == "drop":
        place = count()  # over all sides, as the check counts
        left = {side: [item for item in items if next(place) not in wrong] for side, items in sides.items()}
        if empty := [side for side, items in sides.items() if items and not left[side]]:
            raise DataError(f"GOLD=drop: leaves no {empty[0]} row; {gold.said(entry, settings)}")
        entry, sides = entry | {"dropped": len(wrong)}, left
    return entry, sides


def _finite(s: Settings, examples: Iterable[Example | None], tokenizer) -> tuple[dict[str, list[Example]], dict]:
    """Split by seed. Returns the examples of each side, and further fields of the manifest."""
    sizes = Sizes(s.MAX_SAMPLES, s.TEST_SIZE, s.TRAIN_SIZE, s.DEV_SIZE, s.TEST_SHARE)

    def problem(e: Example) -> str | None:
        return too_long(tokenizer, s.MAX_PROMPT_LENGTH, e.messages(), e.tools)

    sides, dropped = sides_of(examples, _identity, sizes, s.SEED, problem)
    return sides, {"dropped": dropped, "tokenizer": s.MODEL, "max_prompt_tokens": s.MAX_PROMPT_LENGTH}


def _endless(settings: Settings, examples: Iterator[Example]) -> tuple[dict[str, list[Example]], dict]:
    """Deal as many as the sizes say. Returns as ``_finite``."""
    sizes = f"TEST_SIZE={settings.TEST_SIZE:g}, DEV_SIZE={settings.DEV_SIZE}, TRAIN_SIZE={settings.TRAIN_SIZE}"
    share = settings.TEST_SIZE if settings.TEST_SIZE < 1 else 0
    total = settings.MAX_SAMPLES or round(settings.TRAIN_SIZE / (1 - share))
    test = max(1, round(share * total)) if share else int(settings.TEST_SIZE)
    train = settings.TRAIN_SIZE
    if settings.MAX_SAMPLES:
        train = min(train or total, total - test - settings.DEV_SIZE)
    if settings.MAX_SAMPLES and train < 1 <= test:
        needed = f"TEST_SIZE + DEV_SIZE ({test} + {settings.DEV_SIZE} prompts)"
        raise SplitError(f"MAX_SAMPLES={settings.MAX_SAMPLES} must exceed {needed}")
    if test < 1 or train < 1:
        sizes = f"{sizes}, MAX_SAMPLES={settings.MAX_SAMPLES}"
        raise SplitError(f"a generator needs a number of prompts, {sizes} give none; set TEST_SIZE and TRAIN_SIZE")
    counts = {"test": test, "dev": settings.DEV_SIZE, "train": train}
    try:
        return deal(distinct(_counted(examples)), _identity, counts, settings.SEED), {}
    except SplitError as error:
        raise SplitError(f"{error} for {sizes}; lower them, or take another source") from error


def _counted(examples: Iterator[Example | None]) -> Iterator[Example | None]:
    """``examples``; what their generator raises gets a note of how many came before. Raises DataError for what is no
    Example."""
    made = 0
    try:
        for made, example in enumerate(examples, 1):
            if not isinstance(example, Example | None):
                raise DataError(f"example {made} is no prepare.Example, but {one_line(repr(example), 80)}")
            if example and (problem := _problem(example)):
                raise DataError(f"example {made}: {problem}")
            yield example
    except (DataError, SettingsError):
        raise
    except (Exception, SystemExit) as error:
        error.add_note(f"in example {made + 1}")
        raise


# ---- shared with json_to_parquet


def needs_tools(example: Example) -> bool:
    """Whether the prompt has tools, or messages that call them."""
    return bool(example.tools) or has_calls(example.messages())


def has_calls(messages: list[dict]) -> bool:
    """Whether a message has more than a role and a text."""
    return any(message.keys() - {"role", "content"} for message in messages)


def load_tokenizer(model: str, weights: bool = True, download: bool = True):
    """The tokenizer of MODEL; without ``weights`` of a folder that may have none; without ``download`` one that is on
    this machine. Raises DataError without one or its chat template."""
    from transformers import AutoTokenizer

    try:
        folder = base_model(resolve_model(model)) if weights else model
        # trust_remote_code=None asks whether to run its code.
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=not download, trust_remote_code=False)
    except Exception as error:  # it reads the config too, and raises any class
        raise DataError(f"MODEL={model}: no tokenizer to count prompt tokens ({one_line(str(error), 300)})") from error
    if not tokenizer.chat_template:
        raise DataError(f"MODEL={model}: has no chat template to render prompts; take an instruct model")
    return tokenizer


def _tokenizer_here(model: str):
    """The tokenizer of ``model`` where it is on this machine; else None: nothing is downloaded to count tokens."""
    with suppress(DataError):  # none, or a broken one, which the model's stage reports
        return load_tokenizer(model, download=False)
    return None


def too_long(tokenizer, limit: int, messages: list[dict], tools: list[dict] | None) -> str | None:
    """Why a prompt cannot be used: "too_long" with over ``limit`` tokens, "refused_by_chat_template", or None."""
    if len(json.dumps(messages)) > limit * LONGEST_TOKEN:
        return "too_long"
    try:
        return "too_long" if len(prompt_ids(tokenizer, messages, tools)) > limit else None
    except ValueError:
        return "refused_by_chat_template"


@contextmanager
def replaced_as_a_whole(directory: Path, names: tuple[str, ...]) -> Iterator[Path]:
    """Yield a folder whose ``names``.parquet and manifest.json replace those of ``directory`` at the end. After an
    error ``directory`` is unchanged."""
    with partial_of(directory / "data") as new:
        yield new
        # The manifest is removed first and written last: it never describes a mixture.
        (directory / "manifest.json").unlink(missing_ok=True)
        for name in (*(f"{name}.parquet" for name in names), "manifest.json"):
            (directory / name).unlink(missing_ok=True)
            if (new / name).exists():
                os.replace(new / name, directory / name)


def read_manifest(data_dir: Path) -> dict:
    """The manifest in ``data_dir``; empty if it is missing or not valid."""
    manifest = read_json(data_dir / "manifest.json")
    return manifest if isinstance(manifest.get("rows"), dict) else {}


def describe(manifest: dict, s: Settings | None = None) -> str:
    """A manifest in one to four lines: rows and source, what was dropped or not used, prompts that are too long for
    ``s``, the gold check under its limits."""
    of = {name: f" (of {count} conversations)" for name, count in manifest.get("groups", {}).items()}
    rows = ", ".join(f"{count} {name}{of.get(name, '')}" for name, count in manifest["rows"].items())
    parts = [manifest["source"]]
    for part in manifest.get("origin") or []:
        if "file" in part:
            parts.append(f"{part['file']} (sha256 {part['sha256'][:12]})")
        else:
            details = [part["config"], part["split"], part.get("revision", "")[:12]]
            parts.append(f"{part['hub']} ({', '.join(filter(None, details))})")
    unused = f"not used: {', '.join(manifest['not_used'])}" if manifest.get("not_used") else ""
    extra = "; ".join(filter(None, [_because(manifest).strip(" ()"), unused, manifest.get("note")]))
    checked = f"gold check: {gold.said(manifest['gold'], s)}" if manifest.get("gold") else ""
    long = _too_long(manifest.get("long"), s) if "MAX_PROMPT_LENGTH" not in checked else ""  # said of demonstrations
    lines = [f"{rows} from {', '.join(parts)}, seed {manifest['seed']}", extra, long, checked]
    return "\n  ".join(filter(None, lines))


def _too_long(long: dict | None, s: Settings | None) -> str:
    """How many prompts are too long for ``s``, by the manifest's ``long`` of its MODEL; nothing where none is."""
    if not (long and s and long["model"] == s.MODEL):
        return ""
    text = f"{long['prompts']} of {long['of']} prompts are longer than MAX_PROMPT_LENGTH={s.MAX_PROMPT_LENGTH}"
    return f"{text} and are left out; set MAX_PROMPT_LENGTH={long['longest']}"


def _because(details: dict) -> str:
    """(dropped: 3 duplicates, 2 too long) or nothing."""
    counts = [f"{count} {reason.replace('_', ' ')}" for reason, count in details.get("dropped", {}).items() if count]
    return f" (dropped: {', '.join(counts)})" if counts else ""


def main(sources: dict[str, Source]) -> None:
    """Command line of a task's prepare_data.py: settings come from the environment (`make data`)."""
    with errors_in_one_line(DataError, SettingsError):
        s = load_settings()
        try:
            prepare(s, sources)
        except (DataError, SettingsError):
            raise
        except (Exception, SystemExit) as error:  # also sys.exit, which would end in silence
            if not errors.own_place(error):
                raise
            write_text(log := s.data_dir / "prepare_data.log", errors.whole(error))
            told = "; ".join([errors.said(error), *getattr(error, "__notes__", ())])
            raise DataError(f"{told}; traceback: {log}") from error
