"""`make data`: turn a task's examples into train, test and SFT parquet files with a manifest beside them."""

import hashlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from tasks.common.data import RL_SCHEMA, SFT_SCHEMA, DataError, chat, rl_row, sft_row, write_json, write_parquet
from tasks.common.settings import Settings, SettingsError, load_settings


@dataclass(frozen=True)
class Example:
    """One problem: what the model is asked, what the reward needs, and a worked answer for SFT if there is one."""

    prompt: str
    ground_truth: dict | str
    demonstration: str | None = None
    system: str | None = None


Source = Callable[[Settings], Iterable[Example]]


def distinct(examples: Iterable[Example], patience: int = 100_000) -> Iterator[Example]:
    """Each prompt once, so that train and test are disjoint. Ends when ``patience`` repeats come in a row.

    Memory: 16 bytes of digest for each prompt.
    """
    seen: set[bytes] = set()
    repeats = 0
    for example in examples:
        key = hashlib.blake2b(example.prompt.encode(), digest_size=16).digest()
        if key in seen:
            repeats += 1
            if repeats >= patience:
                return
            continue
        seen.add(key)
        repeats = 0
        yield example


def prepare(settings: Settings, sources: dict[str, Source]) -> dict:
    """Write ``train.parquet``, ``test.parquet`` and ``sft.parquet`` to ``settings.data_dir`` and return the manifest.

    The first TEST_SIZE distinct examples are the test set, the next TRAIN_SIZE train the policy, and the
    demonstrations of the first SFT_SIZE of those are the SFT set. Raises DataError when the source has too few.
    """
    source = sources.get(settings.SOURCE) or (sources.get("hub") if Path(settings.SOURCE).is_dir() else None)
    if source is None:
        raise DataError(
            f"SOURCE={settings.SOURCE}: this task knows {', '.join(sources)}, or a folder of the hub's form"
        )
    examples = distinct(source(settings))
    test = list(islice(examples, settings.TEST_SIZE))
    demonstrations: list[dict] = []

    def train() -> Iterator[dict]:
        for index, example in enumerate(islice(examples, settings.TRAIN_SIZE)):
            if example.demonstration and len(demonstrations) < settings.SFT_SIZE:
                demonstrations.append(sft_row(chat(example.prompt, example.system), example.demonstration))
            yield row(example, "train", index)

    def row(example: Example, split: str, index: int) -> dict:
        return rl_row(settings.TASK, chat(example.prompt, example.system), example.ground_truth, split, index)

    directory = settings.data_dir
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory, prefix=".partial-") as partial:
        new = Path(partial)
        rows = {
            "test": write_parquet((row(e, "test", i) for i, e in enumerate(test)), new / "test.parquet", RL_SCHEMA),
            "train": write_parquet(train(), new / "train.parquet", RL_SCHEMA, total=settings.TRAIN_SIZE),
        }
        if rows["train"] < settings.TRAIN_SIZE:
            raise DataError(
                f"SOURCE={settings.SOURCE}: has only {rows['test'] + rows['train']} different prompts for TEST_SIZE="
                f"{settings.TEST_SIZE} and TRAIN_SIZE={settings.TRAIN_SIZE}; lower them, or take another source"
            )
        if demonstrations:
            rows["sft"] = write_parquet(demonstrations, new / "sft.parquet", SFT_SCHEMA)
        manifest = {"fingerprint": settings.data_fingerprint(), "source": settings.SOURCE, "seed": settings.SEED}
        manifest["rows"] = rows
        # All is written: replace what was there. The manifest goes first and comes last: it never tells of a mixture.
        (directory / "manifest.json").unlink(missing_ok=True)
        for name in ("test", "train", "sft"):
            (directory / f"{name}.parquet").unlink(missing_ok=True)
            if name in rows:
                os.replace(new / f"{name}.parquet", directory / f"{name}.parquet")
    write_json(directory / "manifest.json", manifest)
    return manifest


def main(sources: dict[str, Source]) -> None:
    """Command line of a task's prepare_data.py: settings come from the environment (`make data`)."""
    try:
        prepare(load_settings(), sources)
    except (DataError, SettingsError, OSError) as error:
        sys.exit(f"error: {' '.join(str(error).split())}")
    except KeyboardInterrupt:
        sys.exit(130)
