"""The stages of a task: data, model, sft, train, eval. Run by train.sh through launch.sh; settings are the environment.

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
from tasks.common.data import DataError, validate_parquet, written_beside
from tasks.common.examples import check_examples
from tasks.common.model import EMBEDDED, resolve_model, weights_bytes
from tasks.common.process import Progress, StageFailed, run
from tasks.common.report import print_report
from tasks.common.reward import RewardError
from tasks.common.runs import hf_folder, last_step, next_metrics_file, read_json, read_metrics, rl_dir, sft_dir
from tasks.common.settings import Settings, SettingsError, artifacts, load_settings

Problem = (SettingsError, DataError, RewardError, StageFailed)


# ---- stages --------------------------------------------------------------------------------------------------------


def data(s: Settings) -> str:
    manifest = read_json(s.data_dir / "manifest.json")
    fresh = manifest.get("fingerprint") == s.data_fingerprint()
    fresh = fresh and all((s.data_dir / f"{name}.parquet").is_file() for name in manifest["rows"])
    if not fresh:
        _script(s, "prepare_data.py")
        manifest = read_json(s.data_dir / "manifest.json")
    for name in manifest["rows"]:
        validate_parquet(s.data_dir / f"{name}.parquet", "sft" if name == "sft" else "rl")
    rows = ", ".join(f"{count} {name}" for name, count in manifest["rows"].items())
    return f"{'up to date: ' if fresh else ''}{rows} ({manifest['source']})"


def model(s: Settings) -> str:
    fresh = s.MODEL != "embedded" or (artifacts() / "models" / EMBEDDED).is_dir()
    return f"{'' if fresh else 'unpacked '}{resolve_model(s.MODEL)}"


def sft(s: Settings, arguments: list[str]) -> str:
    run_dir = sft_dir(s, arguments)
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
    overrides = verl_config.sft_overrides(s, start, run_dir) + arguments
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={s.N_GPUS}"]
    command += ["-m", "verl.trainer.sft_trainer", *verl_config.HYDRA, *overrides]
    _train(s, "SFT", run_dir, command, s.SFT_STEPS, _sft_progress)
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
    run_dir.mkdir(parents=True, exist_ok=True)
    with written_beside(run_dir / "settings.json") as partial:
        record = {"fingerprint": s.rl_fingerprint(arguments), "settings": asdict(s), "arguments": arguments}
        partial.write_text(json.dumps(record, indent=2) + "\n")
    if resumed:
        print(f"  resuming from step {resumed}")
    _train(s, s.METHOD.upper(), run_dir, command, s.STEPS, _rl_progress)
    return f"{s.STEPS} steps in {run_dir}"


def evaluate(s: Settings, arguments: list[str]) -> str:
    """Evaluate base, warm-up and trained model; what was evaluated before with the same settings is reused."""
    from tasks.common.evaluate import evaluation_fingerprint

    run_dir = rl_dir(s, arguments)
    out = run_dir / "eval"
    models = _models(s, arguments)
    marks = {label: evaluation_fingerprint(s, path) for label, path in models.items()}
    todo = {
        label: path for label, path in models.items() if read_json(out / f"{label}.json").get("mark") != marks[label]
    }
    if todo:
        files = {label: out / f"{label}-{marks[label]}.jsonl" for label in todo}
        command = [sys.executable, str(s.task_dir / "evaluate.py"), "--out", str(out)]
        command += [f"{label}={path}" for label, path in todo.items()]

        def watch() -> Progress:
            current = [label for label, file in files.items() if file.exists()]
            return Progress(sum(_count_lines(f) for f in files.values()), f" {current[-1]}" if current else "")

        run(
            command,
            name="eval",
            log=run_dir / "logs/eval.log",
            total=len(todo) * s.TEST_SIZE * (1 + s.EVAL_N),
            watch=watch,
            environment={"VLLM_ENABLE_V1_MULTIPROCESSING": os.environ.get("EVAL_MULTIPROCESSING", "1")},
        )
    return ("" if todo else "up to date: ") + f"{', '.join(models)} on {s.TEST_SIZE} held-out prompts"


# ---- parts of stages -----------------------------------------------------------------------------------------------


def _script(s: Settings, name: str) -> None:
    if code := subprocess.run([sys.executable, str(s.task_dir / name)]).returncode:
        sys.exit(code)  # the script has said why


def _compute_score(s: Settings) -> Callable[..., dict]:
    try:
        return importlib.import_module(f"tasks.{s.TASK}.reward").compute_score
    except Exception as error:
        raise RewardError(f"{s.task_dir}/reward.py: cannot be loaded: {type(error).__name__}: {error}") from error


def _start_model(s: Settings) -> str:
    if s.INIT == "base":
        return resolve_model(s.MODEL)
    run_dir = sft_dir(s, [])
    if not last_step(run_dir):
        raise SettingsError("INIT=sft: there is no warm-up for these settings; run `make sft` first")
    return str(hf_folder(run_dir, "sft"))


def _models(s: Settings, arguments: list[str]) -> dict[str, str]:
    models = {"base": resolve_model(s.MODEL)}
    if s.INIT == "sft" and last_step(sft_dir(s, [])):
        models["sft"] = str(hf_folder(sft_dir(s, []), "sft"))
    if last_step(rl_dir(s, arguments)):
        models[s.METHOD] = str(hf_folder(rl_dir(s, arguments), "rl"))
    return models


def _train(s: Settings, name: str, run_dir: Path, command: list[str], total: int, progress: Callable) -> None:
    metrics = next_metrics_file(run_dir)
    log = run_dir / f"logs/{name.lower()}-{metrics.stem}.log"
    start = last_step(run_dir)
    run(
        command,
        name=name,
        log=log,
        total=total,
        watch=lambda: progress(metrics, start),
        environment={"VERL_FILE_LOGGER_PATH": str(metrics)},
    )
    if last_step(run_dir) < total:
        raise StageFailed(f"{name} ended without a checkpoint of step {total}\n  log: {log}")


def _last_record(metrics: Path) -> dict:
    lines = metrics.read_bytes().split(b"\n")[:-1] if metrics.exists() else []
    return json.loads(lines[-1]) if lines else {}


def _rl_progress(metrics: Path, start: int) -> Progress:
    if record := _last_record(metrics):
        return Progress(record["step"], f" reward {record['data']['critic/score/mean']:.3f}")
    return Progress(start, " starting Ray, FSDP and vLLM")


def _sft_progress(metrics: Path, start: int) -> Progress:
    if record := _last_record(metrics):
        return Progress(record["step"], f" loss {record['data']['train/loss']:.3f}")
    return Progress(start, " starting")


def _count_lines(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0


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


def run_stages(s: Settings, stages: dict[str, Callable[[], str]], before: int = 0) -> None:
    """Run ``stages`` in order, saying which of how many; ``before`` counts those that make ran already (install)."""
    for number, (name, stage) in enumerate(stages.items(), before + 1):
        print(f"[{number}/{before + len(stages)}] {name}", flush=True)
        started = time.monotonic()
        print(f"  {stage()} ({time.monotonic() - started:.0f} s)", flush=True)


def main(stage: str, arguments: list[str]) -> None:
    s = load_settings()
    everything: dict[str, Callable[[], str]] = {
        "data": lambda: data(s),
        "model": lambda: model(s),
        "sft": lambda: sft(s, []),
        "train": lambda: train(s, arguments),
        "eval": lambda: evaluate(s, arguments),
    }
    if s.INIT == "base":
        del everything["sft"]
    if stage == "config":
        from omegaconf import OmegaConf

        start = resolve_model(s.MODEL) if s.INIT == "base" else hf_folder(sft_dir(s, []), "sft")
        overrides = verl_config.rl_overrides(s, start, rl_dir(s, arguments)) + arguments
        print(OmegaConf.to_yaml(verl_config.compose("ppo_trainer", overrides), resolve=True))
        return
    with _locked(s):
        if stage == "train":
            rl_dir(s, arguments)  # a wrong RUN is said before anything starts
            verl_config.compose("ppo_trainer", verl_config.rl_overrides(s, s.MODEL, s.runs_dir) + arguments)
            run_stages(s, everything, before=1)
            print_report(s, rl_dir(s, arguments))
        else:
            before = {"data": [], "sft": ["data", "model"], "eval": ["data", "model"]}[stage]
            everything["sft"] = lambda: sft(s, [])
            run_stages(s, {name: everything[name] for name in [*before, stage]})


def _interrupted(signum, frame):
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _interrupted)
    try:
        main(sys.argv[1], sys.argv[2:])
    except Problem as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        print("\nstopped; the same command continues from the last checkpoint", file=sys.stderr)
        sys.exit(130)
