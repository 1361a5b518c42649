"""Whether a checkpoint's folder is whole: a kill or a full disk leaves half of one, an interrupted removal too.

When a launch must write its first one.
"""

import re
import time
import zipfile
from pathlib import Path

from verl_tasks.models.merge import has_weights, is_adapter

_SHARD = re.compile(r"(model|optim|extra_state)_world_size_(\d+)_rank_(\d+)\.pt")
# What transformers needs to resume: trained whole, and in shards.
_TRAINER = ("scheduler.pt", "trainer_state.json")
_TRL = ({"optimizer.pt", *_TRAINER}, {"optimizer.bin", "pytorch_model_fsdp.bin", *_TRAINER})
FIRST_SAVE = 300  # seconds


def whole(folder: Path) -> bool:
    """Whether ``folder`` (global_step_N) has all of its trainer's files, each readable to its end.

    verl: every rank's file of each kind, and the data loader's state, its last file. DPO: a model or an adapter, and
    all or none of the trainer's state. A folder with a model alone, for evaluation, is whole too.
    """
    parts = [part for part in (folder, folder / "actor", folder / "critic") if any(part.glob("*_world_size_*.pt"))]
    loader = [*folder.glob("data.pt"), *folder.glob("data_*.pt")]
    if parts or loader:
        # A .pt file is a zip archive, whose table of contents is at its end. verl writes no critic alone.
        of_policy = any(part.name != "critic" for part in parts)
        return of_policy and bool(loader) and all(map(zipfile.is_zipfile, loader)) and all(map(_all_ranks, parts))
    policy = folder / "actor" if (folder / "actor").is_dir() else folder
    models = (policy, policy / "huggingface", policy / "merged")
    state = {name for name in set().union(*_TRL) if (folder / name).is_file()}
    return state in (set(), *_TRL) and (is_adapter(policy) or any(map(has_weights, models)))


def ranks(part: Path) -> int:
    """How many processes wrote verl's shards in ``part``, as their names tell; 0 where there are none."""
    return max((int(match[2]) for file in part.glob("*.pt") if (match := _SHARD.fullmatch(file.name))), default=0)


def _all_ranks(part: Path) -> bool:
    """Whether every kind of shard in ``part``, the model's among them, is there for all ranks and readable."""
    shards = [match for file in part.glob("*.pt") if (match := _SHARD.fullmatch(file.name))]
    there = {(match[1], int(match[3])) for match in shards}
    kinds, sizes = {"model", *(match[1] for match in shards)}, {int(match[2]) for match in shards}
    wanted = {(kind, rank) for kind in kinds for rank in range(max(sizes, default=0))}
    return len(sizes) == 1 and there == wanted and all(zipfile.is_zipfile(part / match[0]) for match in shards)


class FirstSave:
    """When a launch must write its first checkpoint whatever SAVE_FREQ is, so that a stop never costs more."""

    def __init__(self):
        self.began = self.first = 0.0  # when this step began, and the first one ended
        self.saved = False

    def begin(self) -> None:
        """A step begins."""
        self.began = time.monotonic()

    def due(self) -> bool:
        """At a step's end: whether nothing is saved, and another step like it would end FIRST_SAVE after the first."""
        now = time.monotonic()
        self.first = self.first or now
        return not self.saved and now - self.first + now - (self.began or now) > FIRST_SAVE
