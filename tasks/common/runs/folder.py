"""Which folder holds which run: named by the settings, by RUN, or by a model that one made."""

import difflib
import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from pathlib import Path

from verl_tasks.files import read_json, write_json
from verl_tasks.models.merge import ready
from verl_tasks.runs.run import Run, record_problem, recorded, tracker
from verl_tasks.runs.secrets import masked
from verl_tasks.settings import REPORTING, Settings, SettingsError, artifacts, fingerprint, recorded_texts
from verl_tasks.text import one_line

PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")  # names of tasks and runs
# Errors of reading a folder whose files do not have our form.
UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)


@contextmanager
def readable(run_dir: Path) -> Iterator[None]:
    """Make SettingsError of what cannot be read in the folder of a run, which may come from elsewhere."""
    try:
        yield
    except SettingsError:
        raise
    except UNREADABLE as error:
        what = one_line(f"{type(error).__name__}: {error}", 200)
        raise SettingsError(f"{run_dir}: cannot be read ({what}); correct or remove it") from error


def record(
    run_dir: Path,
    kind: str,
    mark: str,
    s: Settings,
    start: str,
    arguments: list[str],
    base: str = "",
    reads: dict | None = None,
) -> None:
    """Record in ``run_dir`` its ``kind`` ("rl" or "sft"), settings, and start model.

    ``base``: with LoRA, the adapter's base model. ``reads``: the parts of its identity (settings.py).
    """
    values = {"kind": kind, "fingerprint": mark, "settings": asdict(s), "start": start, "base": base or start}
    values["reads"] = {name: masked(str(value)) for name, value in (reads or {}).items()}
    values["arguments"] = [masked(argument) for argument in arguments]
    write_json(run_dir / "settings.json", values)


def note(run: Run, kind: str, s: Settings, start: str, arguments: Sequence[str] = (), base: str = "") -> None:
    """``record`` what this command's ``run`` is trained from. Says in a line why it is none of before, and what is
    known of a changed reward already."""
    before, changed = ("", {}) if "round" in run.identity else anew(run, kind)
    if changed:
        why = f"{', '.join(changed.values())} since {before}"
        print(f"  {'train' if kind == 'rl' else kind} starts anew: {why}", flush=True)
        if "reward" in changed and not s.multi_turn:  # other models' samples are not its own (sample.py, model_name)
            stored = (artifacts() / "eval" / s.TASK).glob(f"{before}-step*/rollouts.jsonl")
            if newest := max(stored, key=lambda file: file.stat().st_mtime, default=None):
                print(f"  without a training, `make rescore TASK={s.TASK} ROLLOUTS={newest}` scores its samples again")
    record(run.folder, kind, fingerprint(run.identity), s, start, list(arguments), base, run.identity)


def anew(run: Run, kind: str) -> tuple[str, dict[str, str]]:
    """Why ``run``, which has no record yet, does not go on with the newest one of its ``kind``: that one's name, and in
    words the parts of its identity that are others there, by their names. Empty where there is no such run."""
    records = {path: recorded(path) for path in all_runs(run.folder.parent.name) if path != run.folder}
    records = {path: made for path, made in records.items() if made["kind"] == kind and made.get("reads")}
    if run.record or not records:
        return "", {}
    newest = max(records, key=lambda path: (path / "settings.json").stat().st_mtime)
    then, said = records[newest]["reads"], {}
    for name in differing(then, run.identity):
        changed = f"from {then.get(name, 'unset')} to {run.identity.get(name, 'unset')}"
        values = one_line(changed, 80) if name.isupper() else ""
        said[name] = f"{name} changed {values}".rstrip()
    return newest.name, said


def differing(then: dict, reads: dict) -> list[str]:
    """The names of the parts of an identity that are others in the recorded ``then`` than in ``reads``."""
    now = {name: masked(str(value)) for name, value in reads.items()}
    return [name for name in {**then, **now} if then.get(name) != now.get(name)]


def all_runs(task: str = "") -> list[Path]:
    """Folders of the runs of ``task`` (empty: of every task), by task and name."""
    return [run for run in _folders(task) if recorded(run)]


def broken_runs(task: str = "") -> dict[Path, str]:
    """The run folders whose settings.json is not a record, and why."""
    problems = {run: record_problem(read_json(run / "settings.json")) for run in _folders(task)}
    return {run: problem for run, problem in problems.items() if problem}


def _folders(task: str) -> list[Path]:
    """With a settings.json. Only plain names: they are printed, and pasted into a shell."""
    folders = sorted(file.parent for file in (artifacts() / "runs").glob(f"{task or '*'}/*/settings.json"))
    return [run for run in folders if all(map(PLAIN.fullmatch, (run.parent.name, run.name)))]


def named(name: str, task: str = "") -> Path:
    """The run called ``name``, of ``task`` if given. Raises SettingsError with the nearest names."""
    runs = [run for run in all_runs(task) if run.name == name]
    if not runs:
        _check_records(name, task)
    if len(runs) == 1:
        return runs[0]
    if runs:
        raise SettingsError(f"RUN={name}: {' and '.join(run.parent.name for run in runs)} have one; set TASK")
    near = difflib.get_close_matches(name, {run.name for run in all_runs(task)})
    hint = f"is it {' or '.join(near)}? " if near else ""
    raise SettingsError(f"RUN={name}: no such run in {artifacts() / 'runs' / task}; {hint}`make runs` lists all")


def _check_records(name: str, task: str = "") -> None:
    """Raise SettingsError where a settings.json of the run ``name`` is not a record."""
    for run, why in broken_runs(task).items():
        if run.name == name:
            raise SettingsError(f"RUN={name}: {run / 'settings.json'} is no record of a run: {why}")


def more_training(s: Settings, run: Run | None) -> list[tuple[str, str]]:
    """What makes the same command train on: variables, and what they do, the first choice first.
    The record of its last launch says how long it was to be."""
    made = run.settings if run else {}
    steps, patience, rounds = (made.get(name, getattr(s, name)) for name in ("STEPS", "PATIENCE", "SELF_PLAY_ROUNDS"))
    own = (f"SELF_PLAY_ROUNDS={rounds + 1}", "another round, from the last one's policy")
    if s.by_pairs:
        name = f" RUN={s.RUN}-{s.DPO_EPOCHS + 1}" if s.RUN else ""
        epochs = (f"DPO_EPOCHS={s.DPO_EPOCHS + 1}{name}", "another run, with more epochs over the pairs")
        return [*([] if s.PAIRS_FILE else [own]), epochs]
    if rounds > 1:  # more STEPS would change what the later rounds start from
        return [own]
    ended = bool(run) and run.ended_early(patience)
    more = [] if ended and run.last < steps else [f"STEPS={2 * steps}"]
    return [(" ".join([*more, *(["PATIENCE=0"] if ended else [])]), "more steps of this run")]


def find_run(s: Settings, arguments: list[str], model_given: str = "") -> Run | None:
    """The run that `make eval`, compare, merge, chat and batch use; None if there is none.

    RUN if set, else the run of these very settings, else the newest with a checkpoint, RL before SFT. With
    ``model_given`` only a run that was trained from that model: any other MODEL stands for itself. Raises
    SettingsError when RUN names no run with a checkpoint.
    """
    runs = [Run.read(folder) for folder in all_runs(s.TASK)]
    runs = {run.folder: run for run in sorted(runs, key=_rank) if run.steps}
    if s.RUN:
        if s.runs_dir / s.RUN not in runs:
            _check_records(s.RUN, s.TASK)
            known = ", ".join(folder.name for folder in runs) or "none"
            raise SettingsError(f"RUN={s.RUN}: no such run with a checkpoint in {s.runs_dir}; there are: {known}")
        return runs[s.runs_dir / s.RUN]
    if (own := rounds(s, arguments)[-1].folder) in runs:
        return runs[own]
    chosen = [run for run in runs.values() if not model_given or run.settings["MODEL"] == model_given]
    return chosen[-1] if chosen else None


def _rank(run: Run) -> tuple[bool, float]:
    """RL after SFT, then by when the last checkpoint was saved."""
    file = tracker(run.folder)
    saved = file if file.exists() else file.parent
    return run.record["kind"] == "rl", saved.stat().st_mtime if saved.exists() else 0.0


def check_settings(run_dir: Path, values: dict) -> None:
    """Raise SettingsError for the ``values`` of a run's record that no variable takes."""
    try:
        recorded_texts(values)
    except SettingsError as error:
        raise SettingsError(f"RUN={run_dir.name}: its settings.json has {error}") from None


# What ends a response or an episode; an evaluation under another limit is one of the same prompts.
LIMITS = ("MAX_RESPONSE_LENGTH", "MAX_TURNS", "MAX_TURN_LENGTH", "STEP_SECONDS")


def settings_of(run: Run, s: Settings) -> Settings:
    """The settings of ``run``'s training, with the evaluation settings, the GPUs and the given LIMITS of ``s``.

    With other data settings, test prompts could be among its training prompts. Unless they are given, an engine gets
    the GPUs of the training's, or the most of them that divide N_GPUS, and no less of their memory than by default.
    """
    own = {f.name for f in fields(Settings)} - REPORTING - {"N_GPUS"} | {"TP", "GPU_MEMORY_UTILIZATION"}
    own -= {name for name in ("TP", "GPU_MEMORY_UTILIZATION", *LIMITS) if os.environ.get(name)}
    if run.settings.get("MAX_TURN_LENGTH") == run.settings.get("MAX_RESPONSE_LENGTH"):  # by default one follows
        own -= {"MAX_TURN_LENGTH"} if os.environ.get("MAX_RESPONSE_LENGTH") else set()
    values = {name: value for name, value in run.settings.items() if name in own}
    check_settings(run.folder, values)
    merged = replace(s, **values | {"TASK": s.TASK})
    share = max(merged.GPU_MEMORY_UTILIZATION, s.GPU_MEMORY_UTILIZATION)  # trainings at once had a part of it
    merged = replace(merged, TP=math.gcd(merged.TP, merged.N_GPUS), GPU_MEMORY_UTILIZATION=share)
    for name, followed in (("MAX_NEW_TOKENS", "MAX_RESPONSE_LENGTH"), ("EVAL_TEMPERATURE", "TEMPERATURE")):
        if getattr(s, name) == getattr(s, followed):
            merged = replace(merged, **{name: getattr(merged, followed)})
    return merged


def sft_dir(s: Settings) -> Path:
    """Folder of the warm-up."""
    return s.runs_dir / f"sft-{s.sft_fingerprint()}"


def sft_run(s: Settings) -> Run:
    """The warm-up, as it is now."""
    return replace(Run.read(sft_dir(s)), identity=s.sft_parts())


def rl_run(s: Settings, arguments: list[str], number: int = 1, start: str = "") -> Run:
    """The run of round ``number``, which starts from the model ``start``, as it is now.

    Raises SettingsError when RUN names one that was made with other settings.
    """
    identity = s.rl_parts(arguments, number, start)
    mark = fingerprint(identity)
    name = (s.RUN or f"{s.METHOD}-{mark}") + (f"-round{number}" if number > 1 else "")
    run = replace(Run.read(s.runs_dir / name), identity=identity)
    if run.record and run.record["fingerprint"] != mark:
        then = run.record.get("reads")
        changed = differing(then, identity) if then else ["an older version's"]
        if not s.made():  # its contents may come out the same
            changed = [name for name in changed if name not in ("train", "dev", "warm-up")]
            if not changed:
                return run
        said = f"exists with other settings ({', '.join(changed) or 'ARGS'})"
        raise SettingsError(f"RUN={run.folder.name}: {said}; take another name")
    return run


def rounds(s: Settings, arguments: list[str]) -> list[Run]:
    """The rounds up to SELF_PLAY_ROUNDS that have begun, always with the first."""
    begun = [rl_run(s, arguments)]
    while len(begun) < s.SELF_PLAY_ROUNDS and begun[-1].complete(s):
        start = ready(begun[-1].checkpoint())  # made when the next round began
        following = rl_run(s, arguments, len(begun) + 1, str(start)) if start else None
        if not following or not following.steps:
            break
        begun.append(following)
    return begun


def run_of(model: str, runs_dir: Path) -> Path | None:
    """The folder of the run under ``runs_dir`` that made ``model``; None if none there did."""
    path = Path(model)
    return runs_dir / path.relative_to(runs_dir).parts[0] if runs_dir in path.parents else None


def lineage(run: Run) -> list[Run]:
    """``run`` and the rounds before it, the first one first."""
    rounds = [run]
    while True:
        first = rounds[0]
        path = run_of(first.record["start"], run.folder.parent)
        before = Run.read(path) if path and first.record["start"] != first.settings["MODEL"] else None
        if not before or before.record.get("kind") != "rl":
            return rounds
        if path in (each.folder for each in rounds):  # only in a record written by hand
            raise SettingsError(f"RUN={path.name}: its settings.json says that it began with a round after it")
        rounds.insert(0, before)
