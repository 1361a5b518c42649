"""Which checkpoints of a run stay on disk, and whether a validation ends it. Called by the trainers of both verls."""

import shutil
from pathlib import Path

from tasks.common.runs.folder import checkpoints, critic_steps, last_step, read_metrics
from tasks.common.runs.validation import ends_early, ranked, words

REMOVED = "removed_"  # prefix of a folder that is being removed


def prune(run_dir: Path, keep: int) -> None:
    """Remove all checkpoints except the last whole one and the ``keep`` best of the others.

    Also removes a crash's leftovers: folders after the last whole checkpoint, half-removed ones. It renames a folder
    before it removes its files, so every folder with a checkpoint's name is whole.
    """
    last, folder = last_step(run_dir), run_dir / "checkpoints"
    if not last:
        return
    _remove(folder)
    others = [step for step in checkpoints(run_dir) if step != last]
    kept = {last, *ranked(others, read_metrics(run_dir, strict=False))[:keep]}
    for path in folder.glob("global_step_*"):
        step = path.name.removeprefix("global_step_")
        if step.isdigit() and int(step) not in kept:
            path.rename(folder / f"{REMOVED}{path.name}")
    _remove(folder)


def _remove(folder: Path) -> None:
    for path in folder.glob(f"{REMOVED}*"):
        shutil.rmtree(path, ignore_errors=True)


def ends_run(run_dir: Path, step: int, found: dict, patience: int) -> bool:
    """Whether PATIENCE ends the run with the validation of ``step``, whose metrics ``found`` are not on disk yet."""
    # Later steps on disk belong to a lost launch, and are trained again.
    metrics = read_metrics(run_dir, strict=False)
    done = {number: row for number, row in metrics.items() if number < step} | {step: found}
    print(f"step {step}: {words(done)}", flush=True)
    return ends_early(done, patience, critic_steps(run_dir))
