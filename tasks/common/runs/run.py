"""A run on disk, read once: its record, its metrics and its whole checkpoints, of which the best stay. DPO writes them
as verl does."""

import json
import math
import operator
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from verl_tasks.files import NewLines, read_json, regular, write_text
from verl_tasks.models.merge import base_model, loadable
from verl_tasks.runs import validation
from verl_tasks.runs.checkpoint import whole
from verl_tasks.settings import Settings, SettingsError, artifacts
from verl_tasks.text import one_line

PARTS = ("kind", "fingerprint", "start")  # of every record: texts beside its settings and arguments
REMOVED = "removed_"  # prefix of a checkpoint's folder that is being removed
LONGEST = 4096  # of a path
ALWAYS = {"MODEL", "METHOD", "STEPS", "SFT_STEPS", "INIT", "STACK", "N_GPUS"}  # settings that every version recorded


@dataclass(frozen=True)
class Run:
    """What the folder of a run held when it was read."""

    folder: Path
    record: dict  # its settings.json; empty without one
    steps: tuple[int, ...]  # of its whole checkpoints, ascending
    metrics: dict[int, dict[str, float]]  # by step, over all launches
    launches: int = 0  # that wrote metrics
    identity: dict = field(default_factory=dict)  # of this command's run: what it reads (settings.py)

    @classmethod
    def read(cls, folder: Path) -> "Run":
        """A folder that is not there is a run without record, checkpoints and metrics."""
        launches = len(list(folder.glob("metrics/*.jsonl")))
        return cls(folder, recorded(folder), _whole_steps(folder), read_metrics(folder, strict=False), launches)

    @property
    def settings(self) -> dict:
        """The recorded settings of its last launch."""
        return self.record.get("settings", {})

    @property
    def last(self) -> int:
        """Step of the last whole checkpoint; 0 if there is none."""
        return self.steps[-1] if self.steps else 0

    @property
    def next_metrics(self) -> Path:
        """Path for the metrics of the next launch."""
        return self.folder / f"metrics/{self.launches:03}.jsonl"

    @property
    def base(self) -> str:
        """The base model of a LoRA run's adapter."""
        return self.record.get("base") or base_model(self.record.get("start", ""))

    @property
    def scores(self) -> dict[int, validation.Score]:
        """The dev score of each validated step."""
        return validation.scores(self.metrics)

    @property
    def saved(self) -> dict[int, dict[str, float]]:
        """The metrics up to the last checkpoint; later ones are of a launch that was lost."""
        return {step: row for step, row in self.metrics.items() if step <= self.last}

    def step(self, chosen: str = "") -> int:
        """The step of the checkpoint that ``chosen`` names: latest, best, or its number. Raises SettingsError.

        Empty: best where one of the checkpoints was validated, else latest. best: the highest dev score
        (validation.py); without a validation the highest mean training reward of that step, which is a noisy guide.
        """
        if not self.steps:
            raise SettingsError(f"STEP={chosen}: {self.folder} has no checkpoint yet")
        if chosen in ("", "best") and self.scores.keys() & {*self.steps}:
            return validation.ranked(list(self.steps), self.scores)[0]
        if chosen == "best":
            name = "critic/score/mean"
            rewards = {step: self.metrics[step][name] for step in self.steps if name in self.metrics.get(step, {})}
            if not rewards:
                raise SettingsError(f"STEP=best: {self.folder} has neither validations nor rewards; take STEP=latest")
            return max(rewards, key=lambda step: (rewards[step], step))
        if chosen in ("", "latest"):
            return self.last
        if chosen not in (known := [str(step) for step in self.steps]):
            there = f"has the checkpoints {', '.join(known)}; take one of them, latest or best"
            raise SettingsError(f"STEP={chosen}: {self.folder} {there}")
        return int(chosen)

    def checkpoint(self, chosen: str = "") -> Path:
        """The folder of a checkpoint that holds the policy's shards."""
        folder = self.folder / f"checkpoints/global_step_{self.step(chosen)}"
        return folder / "actor" if (folder / "actor").is_dir() else folder

    def ended_early(self, patience: int) -> bool:
        """Whether it ended at its last checkpoint because ``patience`` validations brought no gain (0: never)."""
        return validation.ends_early(validation.scores(self.saved), patience, critic_steps(self.settings))

    def warmed(self, s: Settings) -> bool:
        """Whether the warm-up with ``s`` is complete: SFT_STEPS, or a whole demonstration's loss is below SFT_LOSS at
        its last step."""
        losses = [row[validation.WHOLE] for row in self.saved.values() if validation.WHOLE in row]
        return self.last >= s.SFT_STEPS or validation.learned(losses, s.SFT_LOSS)

    def wanted(self, s: Settings) -> float:
        """STEPS; of pairs the steps that they make, as the launch that had them noted; infinite before that."""
        return self.settings.get("STEPS", math.inf) if s.by_pairs else s.STEPS

    def complete(self, s: Settings) -> bool:
        """Whether the training with ``s`` is complete."""
        return self.last >= self.wanted(s) or self.ended_early(s.PATIENCE)


def export(run: Run, chosen: str = "") -> Path:
    """A checkpoint as a folder that our engines and trainers load: a whole model, or a LoRA adapter. Made on the first
    call, where verl's merger may take minutes. Raises as models/merge.py."""
    return loadable(run.checkpoint(chosen), run.base)


def critic_steps(settings: dict) -> int:
    """The first steps of a run with these ``settings``, in which PPO trains its critic and the policy stays."""
    return settings.get("CRITIC_WARMUP", 0) if settings.get("METHOD") == "ppo" else 0


# ---- which checkpoints stay; called by the trainers of both verls ---------------------------------------------------


def prune(run_dir: Path, keep: int, scores: dict[int, validation.Score]) -> None:
    """Remove all checkpoints except the last whole one and the ``keep`` best of the others, by their dev ``scores``.

    Also removes a crash's leftovers: folders after the last whole checkpoint, half-removed ones. It renames a folder
    before it removes its files, so every folder with a checkpoint's name is whole.
    """
    steps, folder = _whole_steps(run_dir), run_dir / "checkpoints"
    if not steps:
        return
    _remove(folder)
    *others, last = steps
    kept = {last, *validation.ranked(others, scores)[:keep]}
    for path in folder.glob("global_step_*"):
        step = path.name.removeprefix("global_step_")
        if step.isdigit() and int(step) not in kept:
            path.rename(folder / f"{REMOVED}{path.name}")
    _remove(folder)


def _remove(folder: Path) -> None:
    for path in folder.glob(f"{REMOVED}*"):
        shutil.rmtree(path, ignore_errors=True)


def ends_run(run_dir: Path, step: int, validated: dict, patience: int, scores: dict[int, validation.Score]) -> bool:
    """Whether PATIENCE ends the run with the validation of ``step``, whose metrics ``validated`` no file has yet, after
    those with ``scores``."""
    # Later steps on disk belong to a lost launch, and are trained again.
    done = {number: score for number, score in scores.items() if number < step}
    validation.add(done, step, validated)
    print(f"step {step}: {validation.words(done)}", flush=True)
    return validation.ends_early(done, patience, critic_steps(recorded(run_dir).get("settings", {})))


class Followed:
    """A run's metrics for its trainer, which asks again and again: each line is read once, and ``look`` sees it."""

    def __init__(self, run_dir: Path, look: Callable[[int, dict], None] = lambda step, row: None):
        self.metrics, self.look, self.known = Metrics(run_dir, strict=False), look, {}

    def scores(self) -> dict[int, validation.Score]:
        """The dev scores so far."""
        for step, row in self.metrics.new():
            validation.add(self.known, step, row)
            self.look(step, row)
        return self.known


# ---- reading -------------------------------------------------------------------------------------------------------


def recorded(folder: Path) -> dict:
    """The record that folder.py wrote; empty if there is none, or if ``record_problem`` refuses it."""
    made = read_json(folder / "settings.json")
    if record_problem(made):
        return {}
    return made | {name: _here(made[name]) for name in ("start", "base") if made.get(name)}


def _here(path: str) -> str:
    """``path``, a model; where it is gone, its place below the artifacts, which were moved or copied here."""
    # Of os.path, which raises for no name of another machine: neither for one too long nor for a folder closed to us.
    parts = Path(path).parts if os.path.isabs(path) and not os.path.exists(path) else ()
    below = (artifacts().joinpath(*parts[at:]) for at, part in enumerate(parts) if part in ("runs", "models"))
    return next((str(place) for place in below if os.path.isdir(place)), path)


def record_problem(made: dict) -> str:
    """Why ``made``, from a settings.json of unknown origin, is not a record; empty if it is.

    Checks only the form: another version may have variables and values that this one does not know.
    """
    if not made:
        return "holds no JSON object"
    texts, settings, arguments = [made.get(n) for n in PARTS], made.get("settings"), made.get("arguments")
    texts.append(made.get("base", ""))  # an older version's has none
    if not all(isinstance(text, str) for text in texts) or made["kind"] not in ("rl", "sft"):
        return f"needs the texts {', '.join(PARTS)}; kind is rl or sft"
    if max(map(len, texts)) > LONGEST:
        return f"a text is longer than {LONGEST} characters"
    if not isinstance(arguments, list) or not all(isinstance(argument, str) for argument in arguments):
        return "arguments must be a list of texts"
    if not isinstance(settings, dict) or (missing := sorted(ALWAYS - settings.keys())):
        return f"settings must be an object{f' with {missing[0]}' if isinstance(settings, dict) else ''}"
    for name, value in settings.items():
        known = Settings.__dataclass_fields__.get(name)
        kinds = {float: (float, int)}.get(known.type, (known.type,)) if known else (str, int, float, bool)
        if type(value) not in kinds:
            return f"settings: {one_line(name, 40)}={one_line(str(value), 40)}: has a wrong type"
    return ""


def read_metrics(run_dir: Path, strict: bool = True) -> dict[int, dict[str, float]]:
    """The numbers among verl's metrics by step, in order, over all launches of a run, without the steps of a launch
    that a later one trained again. ``strict`` and errors as ``Metrics``."""
    metrics: dict[int, dict[str, float]] = {}
    for step, row in Metrics(run_dir, strict).new():
        validation.forget(metrics, step)
        metrics[step] = row
    return metrics


class Metrics:
    """The metrics of a run as they come. verl's file logger truncates its file when it starts
    (verl/utils/tracking.py:541), so each launch has its own, metrics/000.jsonl and on.

    A step at or before the one that came last is trained again: what came of it and of later ones is lost. Raises
    SettingsError at a line that is not JSON, as a power failure leaves them, or that has no metrics. Not ``strict``:
    skips such a line, for code inside a training, which a damaged line must not end.
    """

    def __init__(self, run_dir: Path, strict: bool = True):
        self.run_dir, self.strict, self.files = run_dir, strict, {}

    def new(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Step and numbers of each line since the last call."""
        for file in sorted(self.run_dir.glob("metrics/*.jsonl")):
            yield from numbers(self.files.setdefault(file, NewLines(file)), self.strict)


def numbers(lines: NewLines, strict: bool = True) -> Iterator[tuple[int, dict[str, float]]]:
    """Step and numbers of each new one of ``lines``, the metrics of one launch; as ``Metrics``."""
    for number, line in lines.read():
        try:
            record = json.loads(line)
            data = {name: math.nan if value is None else value for name, value in record["data"].items()}
            step = operator.index(record["step"])
            row = {name: float(v) for name, v in data.items() if isinstance(v, int | float)}
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            if strict:
                has_none = f"has no metrics ({type(error).__name__}: {error})"
                what = "is not JSON" if isinstance(error, ValueError | RecursionError) else has_none
                raise SettingsError(f"{lines.file}: line {number} {what}; remove that line") from error
        else:
            yield step, row


def tracker(folder: Path) -> Path:
    """The file that names the step from which verl resumes."""
    return folder / "checkpoints/latest_checkpointed_iteration.txt"


def _tracked(folder: Path) -> str:
    """The text of the tracker file; empty if it is missing."""
    try:
        return regular(tracker(folder)).read_text(errors="replace").strip()
    except FileNotFoundError:
        return ""


def _whole_steps(folder: Path) -> tuple[int, ...]:
    """Steps of the whole checkpoints up to the one that the tracker file names, ascending.

    verl writes that file after the checkpoint, but not atomically: a kill or a full disk leaves it empty. If it names
    no whole checkpoint, all whole ones count.
    """
    folders = {f.name.removeprefix("global_step_"): f for f in (folder / "checkpoints").glob("global_step_*")}
    steps = tuple(sorted(int(step) for step, path in folders.items() if step.isdecimal() and whole(path)))
    text = _tracked(folder)
    last = int(text) if text.isascii() and text.isdigit() else 0
    return tuple(step for step in steps if step <= last) if last in steps else steps


def mend_tracker(run: Run) -> None:
    """Let the tracker file name the last whole checkpoint: verl resumes from what it says, or fails in ``int('')``."""
    if not run.last:
        tracker(run.folder).unlink(missing_ok=True)
    elif _tracked(run.folder) != str(run.last):
        write_text(tracker(run.folder), str(run.last))
