"""Which checkpoints of a run stay on disk, and whether a validation ends it. Called by the trainers of both verls."""

import shutil
from pathlib import Path

from verl_tasks.runs.run import Run, critic_steps
from verl_tasks.runs.validation import ends_early, ranked, words

REMOVED = "removed_"  # prefix of a folder that is being removed


def prune(run_dir: Path, keep: int) -> None:
    """Remove all checkpoints except the last whole one and the ``keep`` best of the others.

    Also removes a crash's leftovers: folders after the last whole checkpoint, half-removed ones. It renames a folder
    before it removes its files, so every folder with a checkpoint's name is whole.
    """
    run, folder = Run.read(run_dir), run_dir / "checkpoints"
    if not run.steps:
        return
    _remove(folder)
    *others, last = run.steps
    kept = {last, *ranked(others, run.metrics)[:keep]}
    for path in folder.glob("global_step_*"):
        step = path.name.removeprefix("global_step_")
        if step.isdigit() and int(step) not in kept:
            path.rename(folder / f"{REMOVED}{path.name}")
    _remove(folder)


def _remove(folder: Path) -> None:
    for path in folder.glob(f"{REMOVED}*"):
        shutil.rmtree(path, ignore_errors=True)


def ends_run(run_dir: Path, step: int, validated: dict, patience: int) -> bool:
    """Whether PATIENCE ends the run with the validation of ``step``, whose metrics ``validated`` no file has yet."""
    # Later steps on disk belong to a lost launch, and are trained again.
    run = Run.read(run_dir)
    done = {number: row for number, row in run.metrics.items() if number < step} | {step: validated}
    print(f"step {step}: {words(done)}", flush=True)
    return ends_early(done, patience, critic_steps(run.settings))
