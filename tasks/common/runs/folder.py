"""A run on disk: its folder, checkpoints and metrics. DPO writes them as verl does."""

import difflib
import json
import math
import operator
import os
import re
from dataclasses import asdict, fields, replace
from pathlib import Path

from tasks.common.files import read_json, write_json, write_text
from tasks.common.models.merge import base_model, loadable, merge
from tasks.common.runs import validation
from tasks.common.runs.checkpoint import whole
from tasks.common.runs.secrets import masked
from tasks.common.settings import REPORTING, Settings, SettingsError, artifacts, recorded_texts
from tasks.common.text import one_line

PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")  # names of tasks and runs
PARTS = ("kind", "fingerprint", "start")  # of every record: texts beside its settings and arguments
ALWAYS = {"MODEL", "METHOD", "STEPS", "SFT_STEPS", "INIT", "STACK", "N_GPUS"}  # settings that every version recorded

# Errors of reading a folder whose files do not have our form.
UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)


def read_metrics(run_dir: Path, strict: bool = True) -> dict[int, dict[str, float]]:
    """The numbers among verl's metrics by step, in order, over all launches of a run.

    verl's file logger truncates its file when it starts (verl/utils/tracking.py:541), so each launch has its own,
    metrics/000.jsonl and on; for a step that was trained again after a resume the later launch counts. ``strict`` and
    errors as ``metrics_in``.
    """
    metrics: dict[int, dict[str, float]] = {}
    for file in sorted(run_dir.glob("metrics/*.jsonl")):
        metrics |= metrics_in(file, strict)
    return dict(sorted(metrics.items()))


def metrics_in(file: Path, strict: bool = True) -> dict[int, dict[str, float]]:
    """The numbers among the metrics of one launch by step; an unfinished last line does not count.

    Raises SettingsError at a line that is not JSON, as a power failure leaves them, or that has no metrics. Not
    ``strict``: skips such a line, for code inside a training, which a damaged line must not end.
    """
    metrics: dict[int, dict] = {}
    for number, line in enumerate(file.read_text(errors="replace").split("\n")[:-1], start=1):
        try:
            record = json.loads(line)
            data = {name: math.nan if value is None else value for name, value in record["data"].items()}
            step = operator.index(record["step"])
            metrics[step] = {name: float(v) for name, v in data.items() if isinstance(v, int | float)}
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            if strict:
                has_none = f"has no metrics ({type(error).__name__}: {error})"
                what = "is not JSON" if isinstance(error, ValueError | RecursionError) else has_none
                raise SettingsError(f"{file}: line {number} {what}; remove that line") from error
    return metrics


def next_metrics_file(run_dir: Path) -> Path:
    """Path for the metrics of the next launch."""
    return run_dir / f"metrics/{len(list(run_dir.glob('metrics/*.jsonl'))):03}.jsonl"


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


def recorded(run_dir: Path) -> dict:
    """The record that ``record`` wrote; empty if there is none, or if ``record_problem`` refuses it."""
    made = read_json(run_dir / "settings.json")
    return {} if record_problem(made) else made


def record_problem(made: dict) -> str:
    """Why ``made``, from a settings.json of unknown origin, is not a record; empty if it is.

    Checks only the form: another version may have variables and values that this one does not know.
    """
    texts, settings, arguments = [made.get(n) for n in PARTS], made.get("settings"), made.get("arguments")
    texts.append(made.get("base", ""))  # an older version's has none
    if not all(isinstance(text, str) for text in texts) or made["kind"] not in ("rl", "sft"):
        return f"needs the texts {', '.join(PARTS)}; kind is rl or sft"
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


def anew(run_dir: Path, kind: str, reads: dict) -> str:
    """Why ``run_dir``, which has no record yet, does not go on with the newest run of its ``kind``: the parts ``reads``
    of its identity that are others there. Empty where there is no such run."""
    runs = [run for run in all_runs(run_dir.parent.name) if run != run_dir]
    runs = [run for run in runs if recorded(run)["kind"] == kind and recorded(run).get("reads")]
    if recorded(run_dir) or not runs:
        return ""
    newest = max(runs, key=lambda run: (run / "settings.json").stat().st_mtime)
    then, said = recorded(newest)["reads"], []
    for name in differing(then, reads):
        values = one_line(f"from {then.get(name, 'unset')} to {reads.get(name, 'unset')}", 80) if name.isupper() else ""
        said.append(f"{name} changed {values}".rstrip())
    return f"{', '.join(said)} since {newest.name}"


def differing(then: dict, reads: dict) -> list[str]:
    """The names of the parts of an identity that are others in the recorded ``then`` than in ``reads``."""
    now = {name: masked(str(value)) for name, value in reads.items()}
    return [name for name in {**then, **now} if then.get(name) != now.get(name)]


def all_runs(task: str = "") -> list[Path]:
    """Folders of the runs of ``task`` (empty: of every task), by task and name."""
    return [run for run in _folders(task) if recorded(run)]


def broken_runs(task: str = "") -> dict[Path, str]:
    """The run folders whose settings.json is not a record, and why."""
    found = {run: record_problem(read_json(run / "settings.json")) for run in _folders(task)}
    return {run: problem for run, problem in found.items() if problem}


def _folders(task: str) -> list[Path]:
    """With a settings.json. Only plain names: they are printed, and pasted into a shell."""
    found = sorted(file.parent for file in (artifacts() / "runs").glob(f"{task or '*'}/*/settings.json"))
    return [run for run in found if all(map(PLAIN.fullmatch, (run.parent.name, run.name)))]


def named(name: str, task: str = "") -> Path:
    """The run called ``name``, of ``task`` if given. Raises SettingsError with the nearest names."""
    found = [run for run in all_runs(task) if run.name == name]
    files = (artifacts() / "runs").glob(f"{task or '*'}/{name}/settings.json") if PLAIN.fullmatch(name) else ()
    if not found and (broken := next(iter(files), None)):
        raise SettingsError(f"RUN={name}: {broken} is no record of a run: {record_problem(read_json(broken))}")
    if len(found) == 1:
        return found[0]
    if found:
        raise SettingsError(f"RUN={name}: {' and '.join(run.parent.name for run in found)} have one; set TASK")
    near = difflib.get_close_matches(name, {run.name for run in all_runs(task)})
    hint = f"is it {' or '.join(near)}? " if near else ""
    raise SettingsError(f"RUN={name}: no such run in {artifacts() / 'runs' / task}; {hint}`make runs` lists all")


def tracker(run_dir: Path) -> Path:
    """The file that names the step from which verl resumes."""
    return run_dir / "checkpoints/latest_checkpointed_iteration.txt"


def _tracked(run_dir: Path) -> str:
    """The text of the tracker file; empty if it is missing."""
    try:
        return tracker(run_dir).read_text(errors="replace").strip()
    except FileNotFoundError:
        return ""


def _whole_steps(run_dir: Path) -> list[int]:
    """Steps of the complete folders, ascending."""
    folders = {f.name.removeprefix("global_step_"): f for f in (run_dir / "checkpoints").glob("global_step_*")}
    return sorted(int(step) for step, folder in folders.items() if step.isdecimal() and whole(folder))


def last_step(run_dir: Path) -> int:
    """Step of the last whole checkpoint; 0 if there is none.

    verl writes the tracker file after the checkpoint, but not atomically: a kill or a full disk leaves it empty. If
    it names no whole checkpoint, the newest whole one counts.
    """
    text = _tracked(run_dir)
    if text.isascii() and text.isdigit() and whole(run_dir / f"checkpoints/global_step_{int(text)}"):
        return int(text)
    return max(_whole_steps(run_dir), default=0)


def mend_tracker(run_dir: Path) -> None:
    """Let the tracker file name the last whole checkpoint: verl resumes from what it says, or fails in ``int('')``."""
    last = last_step(run_dir)
    if not last:
        tracker(run_dir).unlink(missing_ok=True)
    elif _tracked(run_dir) != str(last):
        write_text(tracker(run_dir), str(last))


def checkpoints(run_dir: Path) -> list[int]:
    """Steps of the whole checkpoints on disk, ascending."""
    last = last_step(run_dir)
    return [step for step in _whole_steps(run_dir) if step <= last]


def find_step(run_dir: Path, step: str = "") -> int:
    """The step of the checkpoint that ``step`` names: latest, best, or its number. Raises SettingsError.

    Of the checkpoints on disk. Empty: best where one of them was validated, else latest. best: the highest dev score
    (validation.py); without a validation the highest mean training reward of that step, which is a noisy guide.
    """
    steps = checkpoints(run_dir)
    if not steps:
        raise SettingsError(f"STEP={step}: {run_dir} has no checkpoint yet")
    if step in ("", "best"):
        metrics = read_metrics(run_dir, strict=False)
        if validation.scores(metrics).keys() & set(steps):
            return validation.ranked(steps, metrics)[0]
        if step and not any("critic/score/mean" in metrics.get(number, {}) for number in steps):
            raise SettingsError(f"STEP=best: {run_dir} has neither validations nor rewards; take STEP=latest")
        if step:
            return max(steps, key=lambda number: (metrics.get(number, {}).get("critic/score/mean", -math.inf), number))
    if step in ("", "latest"):
        return steps[-1]
    if step not in (known := [str(number) for number in steps]):
        there = f"has the checkpoints {', '.join(known)}; take one of them, latest or best"
        raise SettingsError(f"STEP={step}: {run_dir} {there}")
    return int(step)


def ended_early(run_dir: Path, patience: int) -> bool:
    """Whether the run ended at its last checkpoint because ``patience`` validations brought no gain (0: never)."""
    last = last_step(run_dir)
    metrics = read_metrics(run_dir, strict=False)
    done = {step: row for step, row in metrics.items() if step <= last}
    return validation.ends_early(done, patience, critic_steps(run_dir))


def warmed(run_dir: Path, s: Settings) -> bool:
    """Whether the warm-up with ``s`` is complete: SFT_STEPS, or its loss is below SFT_LOSS at its last checkpoint."""
    last = last_step(run_dir)
    rows = read_metrics(run_dir, strict=False) if s.SFT_LOSS and last else {}
    losses = [row["train/loss"] for step, row in rows.items() if step <= last and "train/loss" in row]
    return last >= s.SFT_STEPS or validation.learned(losses, s.SFT_LOSS)


def critic_steps(run_dir: Path) -> int:
    """The run's first steps, in which PPO trains its critic and the policy stays as it is."""
    made = recorded(run_dir).get("settings", {})
    return made.get("CRITIC_WARMUP", 0) if made.get("METHOD") == "ppo" else 0


def more_training(s: Settings, run_dir: Path | None) -> list[tuple[str, str]]:
    """What makes the same command train on: variables, and what they do, the first choice first.
    The record of its last launch says how long it was to be."""
    made = recorded(run_dir).get("settings", {}) if run_dir else {}
    steps, patience, rounds = (made.get(name, getattr(s, name)) for name in ("STEPS", "PATIENCE", "SELF_PLAY_ROUNDS"))
    own = (f"SELF_PLAY_ROUNDS={rounds + 1}", "another round, from the last one's policy")
    if s.METHOD == "dpo":
        name = f" RUN={s.RUN}-{s.DPO_EPOCHS + 1}" if s.RUN else ""
        epochs = (f"DPO_EPOCHS={s.DPO_EPOCHS + 1}{name}", "another run, with more epochs over the pairs")
        return [*([] if s.PAIRS_FILE else [own]), epochs]
    if rounds > 1:  # more STEPS would change what the later rounds start from
        return [own]
    ended = bool(run_dir) and ended_early(run_dir, patience)
    more = [] if ended and last_step(run_dir) < steps else [f"STEPS={2 * steps}"]
    return [(" ".join([*more, *(["PATIENCE=0"] if ended else [])]), "more steps of this run")]


def wanted_steps(run_dir: Path, s: Settings) -> float:
    """STEPS; for DPO the steps that its pairs make, as the launch that had them noted; infinite before that."""
    return recorded(run_dir).get("settings", {}).get("STEPS", math.inf) if s.METHOD == "dpo" else s.STEPS


def complete(run_dir: Path, s: Settings) -> bool:
    """Whether the training with ``s`` is complete."""
    return last_step(run_dir) >= wanted_steps(run_dir, s) or ended_early(run_dir, s.PATIENCE)


def shards(run_dir: Path, step: int) -> Path:
    """The folder of a checkpoint that holds the policy's shards."""
    folder = run_dir / f"checkpoints/global_step_{step}"
    return folder / "actor" if (folder / "actor").is_dir() else folder


def hf_folder(run_dir: Path, step: str = "") -> Path:
    """A checkpoint as a folder that our engines and trainers load: a whole model, or a LoRA adapter."""
    return loadable(shards(run_dir, find_step(run_dir, step)), _base(run_dir))


def merged_folder(run_dir: Path, step: str = "") -> Path:
    """A checkpoint as a whole model; an adapter is merged."""
    return merge(shards(run_dir, find_step(run_dir, step)), _base(run_dir))


def _base(run_dir: Path) -> str:
    """The base model of a LoRA run's adapter."""
    made = recorded(run_dir)
    return made.get("base") or base_model(made.get("start", ""))


def find_run(s: Settings, arguments: list[str], model_given: str = "") -> Path | None:
    """The run that `make eval`, compare, merge, chat and batch use; None if there is none.

    RUN if set, else the run of these very settings, else the newest with a checkpoint, RL before SFT. With
    ``model_given`` only a run that was trained from that model: any other MODEL stands for itself. Raises
    SettingsError when RUN names no run with a checkpoint.
    """
    runs = [run for run in all_runs(s.TASK) if last_step(run)]
    runs.sort(key=lambda run: (recorded(run)["kind"] == "rl", _saved_at(run)))
    if s.RUN:
        run_dir = s.runs_dir / s.RUN
        if run_dir not in runs:
            known = ", ".join(run.name for run in runs) or "none"
            raise SettingsError(f"RUN={s.RUN}: no such run with a checkpoint in {s.runs_dir}; there are: {known}")
        return run_dir
    if (run_dir := rounds(s, arguments)[-1]) in runs:
        return run_dir
    if model_given:
        runs = [run for run in runs if recorded(run)["settings"]["MODEL"] == model_given]
    return runs[-1] if runs else None


def _saved_at(run_dir: Path) -> float:
    """When the last checkpoint was saved."""
    file = tracker(run_dir)
    return (file if file.exists() else file.parent).stat().st_mtime


def check_settings(run_dir: Path, values: dict) -> None:
    """Raise SettingsError for the ``values`` of a run's record that no variable takes."""
    try:
        recorded_texts(values)
    except SettingsError as error:
        raise SettingsError(f"RUN={run_dir.name}: its settings.json has {error}") from None


def settings_of(run_dir: Path, s: Settings) -> Settings:
    """The settings of ``run_dir``'s training, with the evaluation settings and the GPUs of ``s``.

    With other data settings, test prompts could be among its training prompts. Unless they are given, an engine gets
    the GPUs of the training's, or the most of them that divide N_GPUS, and no less of their memory than by default.
    """
    own = {f.name for f in fields(Settings)} - REPORTING - {"N_GPUS"}
    own |= {name for name in ("TP", "GPU_MEMORY_UTILIZATION") if not os.environ.get(name)}
    values = {name: value for name, value in recorded(run_dir)["settings"].items() if name in own}
    check_settings(run_dir, values)
    found = replace(s, **values | {"TASK": s.TASK})
    share = max(found.GPU_MEMORY_UTILIZATION, s.GPU_MEMORY_UTILIZATION)  # trainings at once had a part of it
    found = replace(found, TP=math.gcd(found.TP, found.N_GPUS), GPU_MEMORY_UTILIZATION=share)
    for name, followed in (("MAX_NEW_TOKENS", "MAX_RESPONSE_LENGTH"), ("EVAL_TEMPERATURE", "TEMPERATURE")):
        if getattr(s, name) == getattr(s, followed):
            found = replace(found, **{name: getattr(found, followed)})
    return found


def sft_dir(s: Settings) -> Path:
    return s.runs_dir / f"sft-{s.sft_fingerprint()}"


def rl_dir(s: Settings, arguments: list[str], number: int = 1, start: str = "") -> Path:
    """Folder of the run's round ``number``, which starts from the model ``start``.

    Raises SettingsError when RUN names one that was made with other settings.
    """
    mark = s.rl_fingerprint(arguments, number, start)
    run_dir = s.runs_dir / ((s.RUN or f"{s.METHOD}-{mark}") + (f"-round{number}" if number > 1 else ""))
    made_with = recorded(run_dir)
    if made_with and made_with["fingerprint"] != mark:
        changed = [k for k, v in asdict(s).items() if made_with["settings"].get(k) != v and k not in REPORTING]
        if isinstance(then := made_with.get("reads"), dict) and then:
            changed = differing(then, s.rl_parts(arguments, number, start))
            if not s.data_is_made():  # its contents may come out the same
                changed = [name for name in changed if name not in ("train", "dev", "warm-up")]
                if not changed:
                    return run_dir
        changed = ", ".join(changed) or "data, reward.py, ARGS or the round before"
        raise SettingsError(f"RUN={run_dir.name}: exists with other settings ({changed}); take another name")
    return run_dir


def rounds(s: Settings, arguments: list[str]) -> list[Path]:
    """Folders of the rounds up to SELF_PLAY_ROUNDS that have begun, always with the first."""
    found = [rl_dir(s, arguments)]
    while len(found) < s.SELF_PLAY_ROUNDS and complete(found[-1], s):
        following = rl_dir(s, arguments, len(found) + 1, str(hf_folder(found[-1])))
        if not last_step(following):
            break
        found.append(following)
    return found


def run_of(model: str, runs_dir: Path) -> Path | None:
    """The folder of the run under ``runs_dir`` that made ``model``; None if none there did."""
    path = Path(model)
    return runs_dir / path.relative_to(runs_dir).parts[0] if runs_dir in path.parents else None


def lineage(run_dir: Path) -> list[Path]:
    """``run_dir`` and the rounds before it, the first one first."""
    found = [run_dir]
    while True:
        made = recorded(found[0])
        before = run_of(made["start"], run_dir.parent)
        if not before or made["start"] == made["settings"]["MODEL"] or recorded(before).get("kind") != "rl":
            return found
        if before in found:  # only in a record written by hand
            raise SettingsError(f"RUN={before.name}: its settings.json says that it began with a round after it")
        found.insert(0, before)
