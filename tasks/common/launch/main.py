"""The stages of a task. Run by train.sh through launch.sh; settings are the environment.

Each stage leaves a mark of what it was made from under artifacts/, and is skipped while that is still true.
"""

import contextlib
import fcntl
import functools
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from tasks.common.data.held_out import HELD_OUT, check_disjoint
from tasks.common.data.prepare import describe
from tasks.common.data.rows import DataError, validate_parquet
from tasks.common.evaluation.tables import total_time
from tasks.common.files import read_json
from tasks.common.launch import doctor, train
from tasks.common.launch.task import compute_score_of, default_model, environment, script
from tasks.common.models.find import embedded_folder, resolve_model
from tasks.common.models.merge import base_of, is_adapter, merge, merged_folder
from tasks.common.process import StageFailed, interrupt_on_sigterm
from tasks.common.rewards.answers import RewardError
from tasks.common.runs.folder import (
    find_run,
    find_step,
    hf_folder,
    last_step,
    lineage,
    read_metrics,
    recorded,
    rl_dir,
    rounds,
    settings_of,
    sft_dir,
    shards,
)
from tasks.common.settings import WHOLE, Command, Settings, SettingsError, load_settings
from tasks.common.training import verl_config, verl_versions

# Stages that verl trains in, or says its config.
TRAINING = ("sft", "train", "dpo", "all", "experiment", "config")
# Stages that a task has by having a script of that name.
OWN_EVALUATIONS = ("bfcl", "simulate")
# What evaluates, reports or uses a model that is there: about a run, or about MODEL.
ABOUT_A_RUN = ("eval", "compare", "merge", "chat", "batch", *OWN_EVALUATIONS)

Problem = (SettingsError, DataError, RewardError, StageFailed, OSError)


# ---- stages --------------------------------------------------------------------------------------------------------


def data(s: Settings, training: bool = True) -> str:
    """Prepare the data if it is not up to date; ``training``: TRAIN_FILE is about to be used, so check it."""
    manifest = read_json(s.data_dir / "manifest.json")
    fresh = manifest.get("fingerprint") == s.data_fingerprint()
    fresh = fresh and all((s.data_dir / f"{name}.parquet").is_file() for name in manifest["rows"])
    if not fresh:
        script(s, "prepare_data.py")
        manifest = read_json(s.data_dir / "manifest.json")
    for name in manifest["rows"]:
        validate_parquet(s.data_dir / f"{name}.parquet", "sft" if name == "sft" else "rl")
    if training and s.TRAIN_FILE:
        if (own := validate_parquet(s.train_file)) < s.TRAIN_BATCH_SIZE:
            raise DataError(
                f"TRAIN_FILE={s.train_file}: has {own} prompts, less than TRAIN_BATCH_SIZE={s.TRAIN_BATCH_SIZE}"
            )
        check_disjoint(s.train_file, [s.data_dir / f"{name}.parquet" for name in manifest["rows"] if name in HELD_OUT])
    own_file = f"; training on {s.train_file}" if training and s.TRAIN_FILE else ""
    return f"{'up to date: ' if fresh else ''}{describe(manifest)}{own_file}"


def model(s: Settings, base: str = "") -> str:
    fresh = s.MODEL != "embedded" or embedded_folder().is_dir()
    return f"{'' if fresh else 'unpacked '}{resolve_model(s.MODEL, base)}"


def models_of(s: Settings, command: Command, run_dir: Path | None) -> dict[str, str]:
    """What to evaluate, by label: base, warm-up and the checkpoint STEP of ``run_dir``; without a run MODEL alone."""
    if run_dir is None:
        return {"model" if command.MODEL_GIVEN else "base": resolve_model(s.MODEL, command.BASE)}
    models = {"base": resolve_model(s.MODEL, command.BASE)}
    if recorded(run_dir)["kind"] == "sft":
        return models | {"sft": str(hf_folder(run_dir, command.STEP))}
    *earlier, last = lineage(run_dir)
    if s.INIT == "sft":
        models["sft"] = recorded([*earlier, last][0])["start"]
    models |= {f"round{number}": str(hf_folder(folder)) for number, folder in enumerate(earlier, 1)}
    name = f"round{len(earlier) + 1}" if earlier else s.METHOD
    return models | {name: str(hf_folder(last, command.STEP))}


def evaluate(s: Settings, command: Command, run_dir: Path | None) -> str:
    models = models_of(s, command, run_dir)
    script(s, "evaluate.py", "eval", *(f"{label}={path}" for label, path in models.items()))
    return ", ".join(models)


def own_script(s: Settings, stage: str) -> str:
    """The task's script for an evaluation that only some tasks have: it has the stage's name. Raises SettingsError."""
    if not (s.task_dir / f"{stage}.py").is_file():
        having = sorted(path.parent.name for path in s.task_dir.parent.glob(f"*/{stage}.py"))
        raise SettingsError(f"TASK={s.TASK}: has no {stage}.py; `make {stage}` is for {', '.join(having)}")
    return f"{stage}.py"


def own_evaluation(s: Settings, command: Command, run_dir: Path | None) -> str:
    models = models_of(s, command, run_dir)
    script(s, own_script(s, command.STAGE), *(f"{label}={path}" for label, path in models.items()))
    return ", ".join(models)


def probe(s: Settings, command: Command) -> str:
    """MODEL, or the warm-up that RL would start from once there is one."""
    start = resolve_model(s.MODEL, command.BASE)
    if not command.MODEL_GIVEN and s.INIT == "sft" and last_step(sft_dir(s)):
        start = str(hf_folder(sft_dir(s)))
    script(s, "evaluate.py", "probe", start)
    return start


def compare(s: Settings, command: Command, run_dir: Path | None) -> str:
    """BASE (default: what the run began with, its warm-up beside it) against MODEL, or the checkpoint STEP of
    ``run_dir``."""
    warm_up = []
    if run_dir:
        base, trained = command.BASE or s.MODEL, str(hf_folder(run_dir, command.STEP))
        if not command.BASE and recorded(run_dir)["kind"] == "rl" and s.INIT == "sft":
            warm_up = [recorded(lineage(run_dir)[0])["start"]]
    elif command.MODEL_GIVEN:
        adapter = Path(command.MODEL_GIVEN).expanduser()
        trained = resolve_model(command.MODEL_GIVEN, command.BASE)
        base = command.BASE or (base_of(adapter) if is_adapter(adapter) else default_model(s))
    else:
        raise SettingsError(f"there is no trained model yet: run `make train TASK={s.TASK}`, or set MODEL")
    script(s, "evaluate.py", "compare", resolve_model(base), *warm_up, trained)
    return " -> ".join([base, *warm_up, trained])


def chosen_model(s: Settings, command: Command, run_dir: Path | None) -> str:
    """For chat and batch: the checkpoint STEP of ``run_dir``, without a run MODEL."""
    if run_dir:
        return str(hf_folder(run_dir, command.STEP))
    return resolve_model(s.MODEL, command.BASE)


def merged(s: Settings, command: Command, run_dir: Path | None) -> str:
    if is_adapter(Path(command.MODEL_GIVEN).expanduser()):
        return f"written: {resolve_model(command.MODEL_GIVEN, command.BASE)}"
    if run_dir is None:
        raise SettingsError(f"there is no checkpoint to merge yet: run `make train TASK={s.TASK}`, or set RUN")
    checkpoint = shards(run_dir, find_step(run_dir, command.STEP))
    if folder := merged_folder(checkpoint):
        return f"nothing to do: {folder} has the whole model already"
    return f"written: {merge(checkpoint)}"


def experiment(s: Settings, command: Command, arguments: list[str], before: dict[str, Callable[[], str]]) -> None:
    """`make experiment`: train with each of METHODS on the same data, with the same settings, and compare them."""
    names = list(dict.fromkeys(filter(None, command.METHODS.split(","))))
    chosen = [load_settings(os.environ | {"METHOD": name}) for name in names]
    if len(chosen) < 2:
        raise SettingsError(f"METHODS={command.METHODS}: name two or more, separated by commas")
    # The same for all: as many optimizer steps as the one that wants most.
    mini = min(each.MINI_BATCH_SIZE for each in chosen)
    chosen = [replace(each, MINI_BATCH_SIZE=mini, RUN=f"{s.RUN}-{each.METHOD}" if s.RUN else "") for each in chosen]
    for each in chosen:
        train.check(each, arguments)

    def compared() -> str:
        runs = {each.METHOD: rounds(each, arguments)[-1] for each in chosen}
        models = {"start": train.start_model(s)} | {name: str(hf_folder(run)) for name, run in runs.items()}
        script(chosen[0], "evaluate.py", "experiment", *(f"{label}={path}" for label, path in models.items()))
        return ", ".join(models)

    stages = before | ({"sft": lambda: train.sft(s)} if s.INIT == "sft" else {})
    stages |= {each.METHOD: functools.partial(train.train, each, arguments) for each in chosen}
    run_stages(stages | {"compare": compared})


@contextlib.contextmanager
def _locked(s: Settings) -> Iterator[None]:
    """One run of a task at a time; the lock goes with the process, however that ends."""
    s.runs_dir.mkdir(parents=True, exist_ok=True)
    with (s.runs_dir / ".lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise SettingsError(f"TASK={s.TASK}: is already running (process {lock.read().strip()})") from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


# ---- command line --------------------------------------------------------------------------------------------------


def run_stages(stages: dict[str, Callable[[], str]], before: int = 0, first: str = "data") -> None:
    """Run ``stages`` in order from ``first`` on, saying which of how many; ``before`` counts those that make ran
    already (install)."""
    left_out = list(stages)[: list(stages).index(first)] if first in stages else []
    for number, (name, stage) in enumerate(stages.items(), before + 1):
        print(f"[{number}/{before + len(stages)}] {name}", flush=True)
        if name in left_out:
            print(f"  left out (FROM={first})", flush=True)
            continue
        started = time.monotonic()
        print(f"  {stage()} ({time.monotonic() - started:.0f} s)", flush=True)


def closing(s: Settings, run_dirs: list[Path]) -> None:
    """After the table: how long it took, where it is, what to type next."""
    seconds = sum(step["timing_s/step"] for run_dir in run_dirs for step in read_metrics(run_dir).values())
    steps = sum(map(last_step, run_dirs))
    print(f"{steps} steps, {seconds:.0f} s of training{total_time()}; all of it in {run_dirs[-1]}\n\nNext:")
    print(f"  the same command with STEPS={2 * s.STEPS}    # continues this run")
    print(f"  make compare TASK={s.TASK}    # base -> trained with tests, prompts gained and lost; files")
    print(f"  make chat TASK={s.TASK}    # talk to it")
    print("  make new TASK=my_task    # a task of your own")


def _shared_data(s: Settings, first: str) -> None:
    """Raise SettingsError unless the data that FROM leaves out is there, made with these settings."""
    made = read_json(s.data_dir / "manifest.json").get("fingerprint")
    if made != s.data_fingerprint():
        what = "was made with other settings" if made else "is not there"
        raise SettingsError(f"FROM={first}: {s.data_dir} {what}; run `make data TASK={s.TASK}`, or leave FROM out")


def main(stage: str, arguments: list[str]) -> None:
    s, command = load_settings(), load_settings(cls=Command)
    # DPO trains with TRL; its warm-up with verl.
    if stage in TRAINING and not (s.METHOD == "dpo" and s.INIT == "base"):
        verl_versions.check_installed(s)
    if stage == "config":
        from omegaconf import OmegaConf

        if s.METHOD == "dpo":
            raise SettingsError(
                "METHOD=dpo: has no config of verl; it trains with TRL (tasks/common/training/trl_dpo.py)"
            )
        start = s.MODEL if s.INIT == "base" else sft_dir(s)  # the warm-up need not be there yet
        overrides = verl_config.rl_overrides(s, start, rl_dir(s, arguments)) + arguments
        print(OmegaConf.to_yaml(verl_config.compose("ppo_trainer", overrides), resolve=True))
        return
    if stage == "doctor":
        doctor.report(s, arguments)
        return
    if stage == "rescore":
        compute_score_of(s)
        script(s, "evaluate.py", "rescore")
        return
    if stage in OWN_EVALUATIONS:
        own_script(s, stage)
    run_dir = None
    # What is given in full is not about a run.
    given = command.MODEL_GIVEN and (stage in ("chat", "batch") or (stage == "compare" and command.BASE))
    if stage in ABOUT_A_RUN and not given:
        run_dir = find_run(s, arguments, command.MODEL_GIVEN)
        if run_dir:
            s = settings_of(run_dir, s)
            step, last = find_step(run_dir, command.STEP), last_step(run_dir)
            why = "" if command.STEP or step == last else f", the best of its validations (STEP=latest: {last})"
            print(f"run {run_dir.name}, checkpoint of step {step}{why}")
    if stage in ("data", "sft", "probe", "eval", "compare", "chat", "batch"):
        compute_score_of(s)  # a reward.py that cannot be loaded is said before anything starts
    trains = stage in ("train", "dpo", "all")

    def trained() -> Path | None:
        """The run that a stage is about: after a training the one of these settings."""
        return rounds(s, arguments)[-1] if trains else run_dir

    with _locked(s):
        if trains:
            train.check(s, arguments)
        if trains or stage in ("sft", "experiment"):
            doctor.before_training(s, arguments, stage)
        training_data = trains or stage in ("data", "sft", "probe")
        before: dict[str, Callable[[], str]] = {
            "data": lambda: data(s, training_data),
            "model": lambda: model(s, command.BASE),
        }
        stages: dict[str, Callable[[], str]] = {
            "sft": lambda: train.sft(s),
            "train": lambda: train.train(s, arguments),
            "eval": lambda: evaluate(s, command, trained()),
            **{name: lambda: own_evaluation(s, command, run_dir) for name in OWN_EVALUATIONS},
            "probe": lambda: probe(s, command),
            "compare": lambda: compare(s, command, trained()),
            "merge": lambda: merged(s, command, trained()),
        }
        if trains:
            wanted = WHOLE if stage == "all" else ("data", "model", "sft", "train", "eval")
            every = before | stages
            if stage == "all" and command.FROM != "data":
                _shared_data(s, command.FROM)
            run_stages(
                {name: every[name] for name in wanted if name != "sft" or s.INIT == "sft"}, before=1, first=command.FROM
            )
            closing(s, rounds(s, arguments))
        elif stage == "experiment":
            experiment(s, command, arguments, before)
        elif stage == "data":
            run_stages({"data": before["data"]})
        elif stage == "merge":
            run_stages({"merge": stages["merge"]})
        elif stage in stages:
            run_stages(before | {stage: stages[stage]})
        else:
            run_stages(before)
        if stage == "batch":
            script(s, "evaluate.py", "batch", chosen_model(s, command, run_dir))
    if stage == "chat":  # in place of this process, so that Ctrl-C reaches it alone; the lock is free again
        command_line = [sys.executable, str(s.task_dir / "evaluate.py"), "chat", chosen_model(s, command, run_dir)]
        os.execve(sys.executable, command_line, environment(s))


if __name__ == "__main__":
    interrupt_on_sigterm()
    try:
        main(sys.argv[1], sys.argv[2:])
    except Problem as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        print("\nstopped; the same command continues from the last checkpoint", file=sys.stderr)
        sys.exit(130)
