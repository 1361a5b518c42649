"""The stages that train: SFT warm-up, RL with verl, DPO with TRL, and rounds of self-play over them."""

import functools
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq

from tasks.common.data import pairs as dpo_pairs
from tasks.common.data.prepare import load_tokenizer
from tasks.common.data.rows import DataError
from tasks.common.files import read_json, write_json
from tasks.common.launch.task import compute_score_of, environment, script
from tasks.common.machine import cluster
from tasks.common.machine.gpus import Sampler
from tasks.common.models.find import resolve_model, whole_model
from tasks.common.models.merge import adapter_config, base_model, is_adapter
from tasks.common.process import Progress, StageFailed, run
from tasks.common.runs import health, launches, validation
from tasks.common.runs.folder import (
    complete,
    ended_early,
    hf_folder,
    last_step,
    next_metrics_file,
    read_metrics,
    record,
    rl_dir,
    rounds,
    sft_dir,
)
from tasks.common.runs.keep import prune
from tasks.common.settings import Settings, SettingsError, method
from tasks.common.training import tracking, verl_config, verl_versions

MANY_EPOCHS = 3  # of DPO


def check(s: Settings, arguments: list[str]) -> None:
    """Say what cannot work before anything starts. Raises SettingsError; prints warnings."""
    compute_score_of(s)
    tracking.check(s)
    last_round = rounds(s, arguments)[-1]  # a wrong RUN is said now
    if s.METHOD == "dpo":
        if arguments:
            raise SettingsError(f"ARGS={' '.join(arguments)}: are verl's; METHOD=dpo trains with TRL")
        if s.PAIRS_FILE and s.SELF_PLAY_ROUNDS > 1:
            raise SettingsError("PAIRS_FILE: holds samples of another policy; leave it out with SELF_PLAY_ROUNDS")
        if s.PAIRS_FILE and not Path(s.PAIRS_FILE).expanduser().is_file():
            raise SettingsError(f"PAIRS_FILE={s.PAIRS_FILE}: no such file")
        if s.DPO_EPOCHS > MANY_EPOCHS:
            print(
                f"warning: DPO_EPOCHS={s.DPO_EPOCHS}: more than {MANY_EPOCHS} epochs over the same pairs usually "
                "learn them by heart; watch val/accuracy, or sample new pairs with SELF_PLAY_ROUNDS"
            )
        return
    if s.ABORT_ON and not verl_versions.has_own_trainers(s):
        raise SettingsError(f"ABORT_ON={s.ABORT_ON}: STACK={s.STACK} has a verl that cannot do it; take STACK=current")
    config = verl_config.compose("ppo_trainer", verl_config.rl_overrides(s, s.MODEL, s.runs_dir) + arguments)
    verl_config.check(config)
    if config.trainer.test_freq > 0 and not s.DEV_SIZE:
        raise SettingsError(f"trainer.test_freq={config.trainer.test_freq}: validates on the dev set; set DEV_SIZE")
    if problem := getattr(method(s.METHOD), "problem", lambda config: None)(config):
        raise SettingsError(problem)
    if warning := getattr(method(s.METHOD), "warning", lambda config: None)(config):
        print(f"warning: {warning}")
    if not complete(last_round, s):
        cluster.join(s)


# ---- stages --------------------------------------------------------------------------------------------------------


def sft(s: Settings) -> str:
    """The warm-up on the task's demonstrations, or on right samples of MODEL."""
    run_dir = sft_dir(s)
    if last_step(run_dir) >= s.SFT_STEPS:
        return f"up to date: {s.SFT_STEPS} steps"
    start = whole_model(resolve_model(s.MODEL))
    demonstrations = s.data_dir / "sft.parquet"
    if s.SFT_SOURCE == "samples":
        demonstrations = run_dir / "accepted.parquet"
        if not demonstrations.exists():
            script(s, "evaluate.py", "accepted", start, str(demonstrations))
    count = pq.read_metadata(demonstrations).num_rows if demonstrations.exists() else 0
    if count < s.SFT_BATCH_SIZE:
        raise DataError(
            f"INIT=sft: {demonstrations} has {count} demonstrations, less than SFT_BATCH_SIZE={s.SFT_BATCH_SIZE}; "
            "lower it, or use INIT=base"
        )
    record(run_dir, "sft", s.sft_fingerprint(), s, start, [])
    overrides = verl_config.sft_overrides(s, start, run_dir, demonstrations)
    command = [*_torchrun(s), "-m", "tasks.common.verl_plugins.sft", *verl_config.HYDRA, *overrides]
    launches.begin(run_dir, s, command, verl_config.resolved("sft_trainer_engine", overrides))
    _train("SFT", run_dir, command, s, s.SFT_STEPS, ("loss", "train/loss"))
    return f"{s.SFT_STEPS} steps on {count} demonstrations, loss {read_metrics(run_dir)[s.SFT_STEPS]['train/loss']:.3f}"


def train(s: Settings, arguments: list[str]) -> str:
    """SELF_PLAY_ROUNDS trainings of STEPS, each from the result of the one before, which is its reference too."""
    start, said = start_model(s), ""
    for number in range(1, s.SELF_PLAY_ROUNDS + 1):
        run_dir = rl_dir(s, arguments, number, start)
        if s.SELF_PLAY_ROUNDS > 1:
            print(f"  round {number} of {s.SELF_PLAY_ROUNDS}: {run_dir.name}")
        # Other prompts and samples in each round.
        said = _round(replace(s, SEED=s.TRAIN_SEED + number - 1), s, arguments, number, start, run_dir)
        start = str(hf_folder(run_dir))
    return said


def _round(seeded: Settings, s: Settings, arguments: list[str], number: int, start: str, run_dir: Path) -> str:
    resumed = last_step(run_dir)
    if complete(run_dir, s):
        return f"up to date: {_steps(run_dir, s)}"
    begins = _trainer_start(s, start)
    if s.METHOD == "dpo":
        pairs = _pairs(s, number, start, run_dir)
        found = dpo_pairs.pair_set(seeded, pairs, load_tokenizer(base_model(start)))
        s, seeded = (replace(each, STEPS=dpo_pairs.steps(s, found)) for each in (s, seeded))
        print(f"  {found.said}: {s.STEPS} steps of {s.TRAIN_BATCH_SIZE} in DPO_EPOCHS={s.DPO_EPOCHS}")
    mark = s.rl_fingerprint(arguments, number, start)
    record(run_dir, "rl", mark, s, start, arguments, base_model(begins))
    if resumed:
        print(f"  resuming from step {resumed}")
    noted = replace(seeded, SEED=s.SEED, TRAIN_SEED=seeded.SEED)  # the data keep their seed
    if s.METHOD == "dpo":
        command = [*_torchrun(s), "-m", "tasks.common.training.trl_dpo", begins, str(pairs), str(run_dir)]
        launches.begin(run_dir, noted, command)
        _train("DPO", run_dir, command, s, s.STEPS, ("loss", "train/loss"), environment(seeded))
    else:
        prune(run_dir, s.KEEP)  # what a crash left, too
        extra = trainer_module(s) | tracking.environment(s, run_dir)
        extra |= {"VERL_FILE_LOGGER_PATH": str(next_metrics_file(run_dir)), "SEED": str(seeded.SEED)}
        extra |= {"KEEP": str(s.KEEP), "PATIENCE": str(s.PATIENCE)}  # verl has no such keys
        overrides = verl_config.rl_overrides(seeded, begins, run_dir) + verl_config.critic_overrides(s, begins)
        overrides += arguments
        overrides = verl_config.sent_environment(environment(seeded) | extra) + overrides
        command = [sys.executable, "-m", "verl.trainer.main_ppo", *verl_config.HYDRA, *overrides]
        nodes = cluster.join(s)
        launches.begin(run_dir, noted, command, verl_config.resolved("ppo_trainer", overrides))
        try:
            _train(s.METHOD.upper(), run_dir, command, s, s.STEPS, ("reward", "critic/score/mean"), extra)
        except StageFailed as error:
            raise cluster.explained(error, nodes) from error
        if warning := getattr(method(s.METHOD), "warning_after", lambda metrics: None)(read_metrics(run_dir)):
            print(f"  warning: {warning}")
    found = health.findings(read_metrics(run_dir), s)
    for finding in health.newest_by_rule(found):
        times = sum(finding.rule == each.rule for each in found)
        print(f"  warning: step {finding.step}{f' and {times - 1} before' if times > 1 else ''}: {finding.text}")
    return _steps(run_dir, s)


def _steps(run_dir: Path, s: Settings) -> str:
    """How far a complete run has come, and what its validations said."""
    last = last_step(run_dir)
    early = f" of {s.STEPS}" if last < s.STEPS else ""
    why = f", ended by PATIENCE={s.PATIENCE}" if last < s.STEPS else ""
    said = validation.words(read_metrics(run_dir))
    return f"{last}{early} steps{why} in {run_dir}{f'; {said}' if said else ''}"


def start_model(s: Settings) -> str:
    """What RL and DPO begin with: MODEL, or its warm-up. Raises SettingsError when there is no warm-up yet."""
    if s.INIT == "base":
        return resolve_model(s.MODEL)
    run_dir = sft_dir(s)
    if last_step(run_dir) < s.SFT_STEPS:
        raise SettingsError(f"INIT=sft: there is no warm-up for these settings; run `make sft TASK={s.TASK}` first")
    return str(hf_folder(run_dir))


# ---- parts ---------------------------------------------------------------------------------------------------------


def _trainer_start(s: Settings, start: str) -> str:
    """``start`` as the trainer begins with it: an adapter where the training goes on with it, else a whole model.

    verl's reference model is the policy without its adapter, which is not ``start``: with KL_COEF the adapter is
    merged, and a new one is trained. DPO keeps a copy of the adapter as its reference.
    """
    if not is_adapter(Path(start)):
        return start
    config = adapter_config(Path(start))
    same = (config["r"], config["lora_alpha"]) == (s.LORA_RANK, s.LORA_ALPHA)
    return start if same and (s.METHOD == "dpo" or not s.KL_COEF) else whole_model(start)


def _pairs(s: Settings, number: int, start: str, run_dir: Path) -> Path:
    """PAIRS_FILE, or pairs of samples of ``start`` on the prompts of round ``number``, made once."""
    if s.PAIRS_FILE:
        return Path(s.PAIRS_FILE).expanduser()
    pairs = run_dir / "pairs.parquet"
    if not pairs.exists():
        script(s, "evaluate.py", "pairs", start, str(pairs), str(number))
    return pairs


def _torchrun(s: Settings) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={s.N_GPUS}"]


def trainer_module(s: Settings) -> dict[str, str]:
    """The environment in which every verl process loads the trainer of the method, where verl lets one choose it."""
    own = method(s.METHOD).TRAINER if verl_versions.has_own_trainers(s) else None
    modules = [os.environ.get("VERL_USE_EXTERNAL_MODULES"), own]
    return {"VERL_USE_EXTERNAL_MODULES": ",".join(filter(None, modules))}


def _train(
    name: str,
    run_dir: Path,
    command: list[str],
    s: Settings,
    total: int,
    shown: tuple[str, str],
    extra: dict | None = None,
) -> None:
    """Run a trainer to step ``total``; the progress line shows ``shown``: a name and the trainer's metric."""
    metrics = next_metrics_file(run_dir)
    log = run_dir / f"logs/{name.lower()}-{metrics.stem}.log"
    start, gpus = last_step(run_dir), Sampler(run_dir / "gpu.jsonl")

    def watch() -> Progress:
        gpus.sample()
        return _progress(metrics, start, s, *shown)

    own = tracking.environment(s, run_dir) | {"VERL_FILE_LOGGER_PATH": str(metrics)}
    outcome = run_dir / health.OUTCOME
    outcome.unlink(missing_ok=True)
    try:
        run(command, name=name, log=log, total=total, watch=watch, environment={**(extra or {}), **own})
    except StageFailed as error:
        if reason := read_json(outcome).get("reason"):  # the trainer ended itself
            kept = f"the checkpoint of step {last_step(run_dir)} is kept, and the same command goes on from it"
            raise StageFailed(f"{reason}; {kept}\n  log: {log}") from error
        write_json(outcome, {"outcome": "failed", "reason": str(error).splitlines()[0]})
        raise
    if last_step(run_dir) < total and not ended_early(run_dir, s.PATIENCE):
        raise StageFailed(f"{name} ended without a checkpoint of step {total}\n  log: {log}")
    ended = f", ended by PATIENCE={s.PATIENCE}" if last_step(run_dir) < total else ""
    write_json(outcome, {"outcome": "finished", "reason": f"{last_step(run_dir)} steps{ended}"})


def _progress(metrics: Path, start: int, s: Settings, name: str, key: str) -> Progress:
    """The last step that was logged, with its metric ``key`` shown as ``name``, and what is ill by then."""
    lines = metrics.read_bytes().split(b"\n")[:-1] if metrics.exists() else []
    if not lines:
        return Progress(start, " starting the engines")
    step = json.loads(lines[-1])
    value = step["data"][key]
    shown = "nan" if value is None else f"{value:.3f}"  # verl writes NaN as null
    return Progress(step["step"], f" {name} {shown}{_said(metrics.parents[1], step['step'], s)}")


@functools.lru_cache(1)  # asked twice a second, for the same step
def _said(run_dir: Path, last: int, s: Settings) -> str:
    """The last validation and the best, and the newest finding in two words, up to the step ``last``."""
    done = {step: data for step, data in read_metrics(run_dir).items() if step <= last}
    found = health.findings(done, s)
    ill = f"{found[-1].rule.replace('_', ' ')} (step {found[-1].step})" if found else ""
    return "".join(f", {words}" for words in (validation.words(done), ill) if words)
