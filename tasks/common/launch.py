"""The stages of a task. Run by train.sh through launch.sh; settings are the environment.

Each stage leaves a mark of what it was made from under artifacts/, and is skipped while that is still true.
"""

import contextlib
import fcntl
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from tasks.common import verl_config
from tasks.common.data import DataError, validate_parquet
from tasks.common.examples import check_examples
from tasks.common.merge import base_of, is_adapter, merge, merged_folder
from tasks.common.model import EMBEDDED, resolve_model, weights_bytes
from tasks.common.prepare import describe
from tasks.common.process import Progress, StageFailed, die_with_parent, interrupt_on_sigterm, run
from tasks.common.report import total_time
from tasks.common.reward import RewardError, variants
from tasks.common.runs import (
    find_run,
    find_step,
    hf_folder,
    last_step,
    next_metrics_file,
    read_json,
    read_metrics,
    record,
    recorded,
    rl_dir,
    settings_of,
    sft_dir,
    shards,
)
from tasks.common.settings import Command, Settings, SettingsError, artifacts, load_settings

# Stages that a task has by having a script of that name.
OWN_EVALUATIONS = ("bfcl", "simulate")

Problem = (SettingsError, DataError, RewardError, StageFailed, OSError)


# ---- stages --------------------------------------------------------------------------------------------------------


def data(s: Settings, training: bool = True) -> str:
    """Prepare the data if it is not up to date; ``training``: TRAIN_FILE is about to be used, so check it."""
    manifest = read_json(s.data_dir / "manifest.json")
    fresh = manifest.get("fingerprint") == s.data_fingerprint()
    fresh = fresh and all((s.data_dir / f"{name}.parquet").is_file() for name in manifest["rows"])
    if not fresh:
        _script(s, "prepare_data.py")
        manifest = read_json(s.data_dir / "manifest.json")
    for name in manifest["rows"]:
        validate_parquet(s.data_dir / f"{name}.parquet", "sft" if name == "sft" else "rl")
    if training and s.TRAIN_FILE and (own := validate_parquet(s.train_file)) < s.TRAIN_BATCH_SIZE:
        raise DataError(
            f"TRAIN_FILE={s.train_file}: has {own} prompts, less than TRAIN_BATCH_SIZE={s.TRAIN_BATCH_SIZE}"
        )
    own_file = f"; training on {s.train_file}" if training and s.TRAIN_FILE else ""
    return f"{'up to date: ' if fresh else ''}{describe(manifest)}{own_file}"


def model(s: Settings, base: str = "") -> str:
    fresh = s.MODEL != "embedded" or (artifacts() / "models" / EMBEDDED).is_dir()
    return f"{'' if fresh else 'unpacked '}{resolve_model(s.MODEL, base)}"


def sft(s: Settings) -> str:
    run_dir = sft_dir(s)
    if last_step(run_dir) >= s.SFT_STEPS:
        return f"up to date: {s.SFT_STEPS} steps"
    demonstrations = read_json(s.data_dir / "manifest.json")["rows"].get("sft", 0)
    if demonstrations < s.SFT_BATCH_SIZE:
        raise DataError(
            f"INIT=sft: {s.data_dir} has {demonstrations} demonstrations, less than SFT_BATCH_SIZE={s.SFT_BATCH_SIZE}; "
            "lower it, or use INIT=base"
        )
    start = resolve_model(s.MODEL)
    _check_disk(run_dir, start, checkpoints=1)
    record(run_dir, "sft", s.sft_fingerprint(), s, start, [])
    overrides = verl_config.sft_overrides(s, start, run_dir)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={s.N_GPUS}"]
    command += ["-m", "verl.trainer.sft_trainer", *verl_config.HYDRA, *overrides]
    _train("SFT", run_dir, command, s.SFT_STEPS, ("loss", "train/loss"))
    return f"{s.SFT_STEPS} steps, loss {read_metrics(run_dir)[s.SFT_STEPS]['train/loss']:.3f}"


def train(s: Settings, arguments: list[str]) -> str:
    run_dir = rl_dir(s, arguments)
    resumed = last_step(run_dir)
    if resumed >= s.STEPS:
        return f"up to date: {resumed} steps in {run_dir}"
    start = _start_model(s)
    _check_disk(run_dir, start, checkpoints=3)
    check_examples(s.task_dir, _compute_score(s))
    overrides = verl_config.rl_overrides(s, start, run_dir) + arguments
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *verl_config.HYDRA, *overrides]
    record(run_dir, "rl", s.rl_fingerprint(arguments), s, start, arguments)
    if resumed:
        print(f"  resuming from step {resumed}")
    _train(s.METHOD.upper(), run_dir, command, s.STEPS, ("reward", "critic/score/mean"))
    return f"{s.STEPS} steps in {run_dir}"


def models_of(s: Settings, command: Command, run_dir: Path | None) -> dict[str, str]:
    """What to evaluate, by label: base, warm-up and the checkpoint STEP of ``run_dir``; without a run MODEL alone."""
    if run_dir is None:
        return {"model" if command.MODEL_GIVEN else "base": resolve_model(s.MODEL, command.BASE)}
    models = {"base": resolve_model(s.MODEL, command.BASE)}
    made = recorded(run_dir)
    if made["kind"] == "rl" and s.INIT == "sft":
        models["sft"] = made["start"]
    models["sft" if made["kind"] == "sft" else s.METHOD] = str(hf_folder(run_dir, command.STEP))
    return models


def evaluate(s: Settings, command: Command, run_dir: Path | None) -> str:
    models = models_of(s, command, run_dir)
    _script(s, "evaluate.py", "eval", *(f"{label}={path}" for label, path in models.items()))
    return ", ".join(models)


def own_script(s: Settings, stage: str) -> str:
    """The task's script for an evaluation that only some tasks have: it has the stage's name. Raises SettingsError."""
    if not (s.task_dir / f"{stage}.py").is_file():
        having = sorted(path.parent.name for path in s.task_dir.parent.glob(f"*/{stage}.py"))
        raise SettingsError(f"TASK={s.TASK}: has no {stage}.py; `make {stage}` is for {', '.join(having)}")
    return f"{stage}.py"


def own_evaluation(s: Settings, command: Command, run_dir: Path | None) -> str:
    models = models_of(s, command, run_dir)
    _script(s, own_script(s, command.STAGE), *(f"{label}={path}" for label, path in models.items()))
    return ", ".join(models)


def probe(s: Settings, command: Command) -> str:
    """MODEL, or the warm-up that RL would start from once there is one."""
    start = resolve_model(s.MODEL, command.BASE)
    if not command.MODEL_GIVEN and s.INIT == "sft" and last_step(sft_dir(s)):
        start = str(hf_folder(sft_dir(s)))
    _script(s, "evaluate.py", "probe", start)
    return start


def compare(s: Settings, command: Command, run_dir: Path | None) -> str:
    """BASE (default: what the run began with) against MODEL, or against the checkpoint STEP of ``run_dir``."""
    if run_dir:
        base, trained = command.BASE or s.MODEL, str(hf_folder(run_dir, command.STEP))
    elif command.MODEL_GIVEN:
        adapter = Path(command.MODEL_GIVEN).expanduser()
        trained = resolve_model(command.MODEL_GIVEN, command.BASE)
        base = command.BASE or (base_of(adapter) if is_adapter(adapter) else _default_model(s))
    else:
        raise SettingsError(f"there is no trained model yet: run `make train TASK={s.TASK}`, or set MODEL")
    _script(s, "evaluate.py", "compare", resolve_model(base), trained)
    return f"{base} -> {trained}"


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


# ---- parts of stages -----------------------------------------------------------------------------------------------


def _script(s: Settings, name: str, *arguments: str) -> None:
    """Run a script of the task, with the settings as they are now. Exits as it exits: it has said why."""
    command = [sys.executable, str(s.task_dir / name), *arguments]
    with subprocess.Popen(command, env=_environment(s), preexec_fn=die_with_parent) as script:
        try:
            code = script.wait()
        except KeyboardInterrupt:
            script.send_signal(signal.SIGINT)  # of a terminal it has had it already, and is ending
            script.wait()
            raise
    if code < 0:
        raise StageFailed(f"{s.task_dir / name} was ended by signal {-code} (9 may mean: out of memory)")
    if code:
        sys.exit(code)


def _environment(s: Settings) -> dict[str, str]:
    # Some environments of reasoning-gym draw from sets: the same data again needs the same hashes.
    return os.environ | {name: str(value) for name, value in asdict(s).items()} | {"PYTHONHASHSEED": "0"}


def _default_model(s: Settings) -> str:
    """The MODEL that the task's train.sh has when none is given."""
    environment = {name: value for name, value in os.environ.items() if name != "MODEL"} | {"STAGE": "default_model"}
    command = ["bash", str(s.task_dir / "train.sh")]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()


def _compute_score(s: Settings) -> Callable[..., dict]:
    try:
        compute_score = importlib.import_module(f"tasks.{s.TASK}.reward").compute_score
    except Exception as error:
        raise RewardError(f"{s.task_dir}/reward.py: cannot be loaded: {type(error).__name__}: {error}") from error
    if s.REWARD and s.REWARD not in variants(compute_score):
        known = ", ".join(variants(compute_score)) or "none: it has one reward"
        raise SettingsError(f"REWARD={s.REWARD}: TASK={s.TASK} knows {known}")
    return compute_score


def _start_model(s: Settings) -> str:
    if s.INIT == "base":
        return resolve_model(s.MODEL)
    run_dir = sft_dir(s)
    if not last_step(run_dir):
        raise SettingsError("INIT=sft: there is no warm-up for these settings; run `make sft` first")
    return str(hf_folder(run_dir))


def _train(name: str, run_dir: Path, command: list[str], total: int, shown: tuple[str, str]) -> None:
    """Run verl to step ``total``; the progress line shows ``shown``: a name and verl's metric."""
    metrics = next_metrics_file(run_dir)
    log = run_dir / f"logs/{name.lower()}-{metrics.stem}.log"
    start = last_step(run_dir)
    run(
        command,
        name=name,
        log=log,
        total=total,
        watch=lambda: _progress(metrics, start, *shown),
        environment={"VERL_FILE_LOGGER_PATH": str(metrics)},
    )
    if last_step(run_dir) < total:
        raise StageFailed(f"{name} ended without a checkpoint of step {total}\n  log: {log}")


def _progress(metrics: Path, start: int, name: str, key: str) -> Progress:
    """The last step that verl logged, with its metric ``key`` shown as ``name``."""
    lines = metrics.read_bytes().split(b"\n")[:-1] if metrics.exists() else []
    if not lines:
        return Progress(start, " starting the engines")
    record = json.loads(lines[-1])
    return Progress(record["step"], f" {name} {record['data'][key]:.3f}")


def _check_disk(run_dir: Path, start: str, checkpoints: int) -> None:
    """fp32 weights, two Adam moments and an exported copy are 16 bytes a parameter; weights on disk have 2 or 4."""
    need = (weights_bytes(start) or 0) * 8 * checkpoints
    existing = next(p for p in (run_dir, *run_dir.parents) if p.exists())
    free = shutil.disk_usage(existing).free
    if free < need:
        raise SettingsError(
            f"{existing}: {free / 1e9:.1f} GB free, {checkpoints} checkpoints need about {need / 1e9:.1f} GB; "
            "free some space, or set ARTIFACTS to a folder on a larger disk"
        )


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


def run_stages(stages: dict[str, Callable[[], str]], before: int = 0) -> None:
    """Run ``stages`` in order, saying which of how many; ``before`` counts those that make ran already (install)."""
    for number, (name, stage) in enumerate(stages.items(), before + 1):
        print(f"[{number}/{before + len(stages)}] {name}", flush=True)
        started = time.monotonic()
        print(f"  {stage()} ({time.monotonic() - started:.0f} s)", flush=True)


def closing(s: Settings, run_dir: Path) -> None:
    """After the table: how long it took, where it is, what to type next."""
    seconds = sum(step["timing_s/step"] for step in read_metrics(run_dir).values())
    print(f"{last_step(run_dir)} steps, {seconds:.0f} s of training{total_time()}; all of it in {run_dir}\n\nNext:")
    print(f"  make train TASK={s.TASK} STEPS={2 * s.STEPS}    # continue this run")
    print(f"  make compare TASK={s.TASK}    # base -> trained with tests, prompts gained and lost; files")
    print(f"  make chat TASK={s.TASK}    # talk to it")
    print("  make new TASK=my_task    # a task of your own")


def main(stage: str, arguments: list[str]) -> None:
    s, command = load_settings(), load_settings(cls=Command)
    if stage == "config":
        from omegaconf import OmegaConf

        start = resolve_model(s.MODEL) if s.INIT == "base" else hf_folder(sft_dir(s))
        overrides = verl_config.rl_overrides(s, start, rl_dir(s, arguments)) + arguments
        print(OmegaConf.to_yaml(verl_config.compose("ppo_trainer", overrides), resolve=True))
        return
    if stage == "rescore":
        _compute_score(s)
        _script(s, "evaluate.py", "rescore")
        return
    if stage in OWN_EVALUATIONS:
        own_script(s, stage)
    run_dir = None
    # What is given in full is not about a run.
    given = command.MODEL_GIVEN and (stage in ("chat", "batch") or (stage == "compare" and command.BASE))
    if stage in ("eval", "compare", "merge", "chat", "batch", *OWN_EVALUATIONS) and not given:
        run_dir = find_run(s, arguments, command.MODEL_GIVEN)
        if run_dir:
            s = settings_of(run_dir, s)
            print(f"run {run_dir.name}, checkpoint of step {find_step(run_dir, command.STEP)}")
    if stage in ("data", "sft", "probe", "eval", "compare", "chat", "batch"):
        _compute_score(s)  # a reward.py that cannot be loaded is said before anything starts
    with _locked(s):
        if stage == "train":
            _compute_score(s)
            rl_dir(s, arguments)  # a wrong RUN is said before anything starts
            verl_config.compose("ppo_trainer", verl_config.rl_overrides(s, s.MODEL, s.runs_dir) + arguments)
        training = stage in ("data", "sft", "train", "probe")
        before: dict[str, Callable[[], str]] = {
            "data": lambda: data(s, training),
            "model": lambda: model(s, command.BASE),
        }
        stages: dict[str, Callable[[], str]] = {
            "sft": lambda: sft(s),
            "train": lambda: train(s, arguments),
            "eval": lambda: evaluate(s, command, rl_dir(s, arguments) if stage == "train" else run_dir),
            **{name: lambda: own_evaluation(s, command, run_dir) for name in OWN_EVALUATIONS},
            "probe": lambda: probe(s, command),
            "compare": lambda: compare(s, command, run_dir),
            "merge": lambda: merged(s, command, run_dir),
        }
        if stage == "train":
            wanted = [name for name in ("sft", "train", "eval") if name != "sft" or s.INIT == "sft"]
            run_stages(before | {name: stages[name] for name in wanted}, before=1)
            closing(s, rl_dir(s, arguments))
        elif stage == "data":
            run_stages({"data": before["data"]})
        elif stage == "merge":
            run_stages({"merge": stages["merge"]})
        elif stage in stages:
            run_stages(before | {stage: stages[stage]})
        else:
            run_stages(before)
        if stage == "batch":
            _script(s, "evaluate.py", "batch", chosen_model(s, command, run_dir))
    if stage == "chat":  # in place of this process, so that Ctrl-C reaches it alone; the lock is free again
        command_line = [sys.executable, str(s.task_dir / "evaluate.py"), "chat", chosen_model(s, command, run_dir)]
        os.execve(sys.executable, command_line, _environment(s))


if __name__ == "__main__":
    interrupt_on_sigterm()
    try:
        main(sys.argv[1], sys.argv[2:])
    except Problem as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        print("\nstopped; the same command continues from the last checkpoint", file=sys.stderr)
        sys.exit(130)
