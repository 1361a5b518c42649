"""The stages that train: SFT warm-up, RL with verl, DPO with TRL, and rounds of self-play over them."""

import functools
import math
import os
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq

from tasks.common.data import pairs as dpo_pairs
from tasks.common.data.prepare import load_tokenizer
from tasks.common.files import read_json, write_json
from tasks.common.launch.plan import Plan, planned
from tasks.common.launch.task import load_reward, script
from tasks.common.machine import cluster
from tasks.common.machine.gpus import Sampler
from tasks.common.models.find import resolve_model, whole_model
from tasks.common.models.merge import adapter_config, base_model, is_adapter
from tasks.common.process import Progress, StageFailed, run
from tasks.common.rows import DataError, read_rows
from tasks.common.runs import folder, health, launches, validation
from tasks.common.runs.checkpoint import begun_step, ranks
from tasks.common.runs.keep import prune
from tasks.common.settings import Settings, SettingsError, artifacts, fingerprint, method
from tasks.common.training import tracking, verl_config, verl_versions

MANY_EPOCHS = 3  # of DPO
DIGESTS = "demonstrations.json"  # of a warm-up


class WithoutSignal(StageFailed):
    """The warm-up gives RL nothing to learn from."""


def check(s: Settings, arguments: list[str]) -> None:
    """Before anything starts, raise SettingsError for settings that would fail later, and print warnings."""
    load_reward(s)
    tracking.check(s)
    *_, last_round = begun = folder.rounds(s, arguments)  # raises for a RUN of other settings
    following = s.runs_dir / f"{s.RUN}-round{len(begun) + 1}"
    left = len(begun) < s.SELF_PLAY_ROUNDS and not folder.complete(last_round, s)
    if s.RUN and left and folder.recorded(following):
        raise SettingsError(f"RUN={s.RUN}: {following.name} started from {last_round.name} as it is; take another name")
    config = check_method(s, arguments)
    if s.METHOD == "dpo":
        if s.DPO_EPOCHS > MANY_EPOCHS:
            many = f"more than {MANY_EPOCHS} epochs over the same pairs usually overfit"
            print(f"warning: DPO_EPOCHS={s.DPO_EPOCHS}: {many}; watch val/accuracy, or set SELF_PLAY_ROUNDS")
        return
    if problem := of_method(s, "models_problem", config):
        raise SettingsError(problem)
    if warning := of_method(s, "warning", config):
        print(f"warning: {warning}")
    if not folder.complete(last_round, s):
        cluster.join(s)


def of_method(s: Settings, name: str, argument) -> str | None:
    """What METHOD's function ``name`` says of ``argument``; None where it has none."""
    return getattr(method(s.METHOD), name, lambda argument: None)(argument)


def check_method(s: Settings, arguments: list[str]):
    """verl's config of the training, None with METHOD=dpo. Raises SettingsError for what METHOD cannot train with."""
    if s.METHOD == "dpo":
        _check_dpo(s, arguments)
        return None
    if s.ABORT_ON and not verl_versions.has_own_trainers(s):
        raise SettingsError(f"ABORT_ON={s.ABORT_ON}: STACK={s.STACK} has a verl that cannot do it; take STACK=current")
    config = verl_config.rl_config(s, arguments)
    if config.trainer.test_freq > 0 and not s.DEV_SIZE:
        raise SettingsError(f"trainer.test_freq={config.trainer.test_freq}: validates on the dev set; set DEV_SIZE")
    if problem := of_method(s, "problem", config):
        raise SettingsError(problem)
    return config


def _check_dpo(s: Settings, arguments: list[str]) -> None:
    """Raise SettingsError for settings that METHOD=dpo cannot train with."""
    if arguments:
        raise SettingsError(f"ARGS={' '.join(arguments)}: are verl's; METHOD=dpo trains with TRL")
    if s.PAIRS_FILE and s.SELF_PLAY_ROUNDS > 1:
        raise SettingsError("PAIRS_FILE: holds samples of another policy; leave it out with SELF_PLAY_ROUNDS")
    if s.PAIRS_FILE and not Path(s.PAIRS_FILE).expanduser().is_file():
        raise SettingsError(f"PAIRS_FILE={s.PAIRS_FILE}: no such file")
    if others := [name for name in s.ABORT_ON.split(",") if name not in ("", "nan")]:
        raise SettingsError(f"ABORT_ON={s.ABORT_ON}: of METHOD=dpo only nan can be seen; leave {others[0]} out")


# ---- stages --------------------------------------------------------------------------------------------------------


def sft(s: Settings) -> str:
    """The warm-up on the task's demonstrations, or on correct samples of MODEL.

    Raises SettingsError, DataError and StageFailed.
    """
    run_dir = folder.sft_dir(s)
    if folder.warmed(run_dir, s):
        prune(run_dir, 0)
        _note_if_killed(run_dir, steps := f"{folder.last_step(run_dir)} steps")
        return f"up to date: {steps}"
    _check_ranks(s, run_dir)
    if s.SFT_LOSS and not verl_versions.has_own_trainers(s):
        raise SettingsError(f"SFT_LOSS={s.SFT_LOSS:g}: STACK={s.STACK} has a verl that cannot do it; set SFT_STEPS")
    start = whole_model(resolve_model(s.MODEL))
    demonstrations = s.data_dir / "sft.parquet"
    if s.SFT_SOURCE == "samples":
        demonstrations = run_dir / "accepted.parquet"
        if not demonstrations.exists():
            script(s, "evaluate.py", "accepted", start, str(demonstrations))
    count = pq.read_metadata(demonstrations).num_rows if demonstrations.exists() else 0
    if count < s.SFT_BATCH_SIZE:
        few = f"has {count} demonstrations, less than SFT_BATCH_SIZE={s.SFT_BATCH_SIZE}"
        raise DataError(f"INIT=sft: {demonstrations} {few}; lower it, or use INIT=base")
    _tell_anew(s, run_dir, "sft", s.sft_parts(), demonstrations)
    folder.record(run_dir, "sft", s.sft_fingerprint(), s, start, [], reads=s.sft_parts())
    metrics = execute(planned("sft", s, run_dir, start, data=demonstrations))
    prune(run_dir, 0)  # a resumed trainer does not know the checkpoints of the one that was killed
    loss = metrics.get(last := folder.last_step(run_dir), {}).get("train/loss", math.nan)
    early = f", below SFT_LOSS={s.SFT_LOSS:g}" if last < s.SFT_STEPS else ""
    return f"{last} steps on {count} demonstrations, loss {loss:.3f}{early}"


def _tell_anew(s: Settings, run_dir: Path, kind: str, parts: dict, demonstrations: Path | None = None) -> None:
    """Say in a line why a stage does not go on with the newest run, and what is known of a changed reward already.
    Leaves the digests of the ``demonstrations``, to count those that change."""
    name, now = {"sft": "sft", "rl": "train"}[kind], []
    if demonstrations:
        now = [fingerprint(row) for row in read_rows(demonstrations)]
    if why := folder.anew(run_dir, kind, parts):
        then = read_json(s.runs_dir / why.rpartition(" ")[2] / DIGESTS).get("demonstrations")
        if now and then and "demonstrations changed" in why:
            why = why.replace("demonstrations changed", f"{len({*now} - {*then})} demonstrations changed")
        print(f"  {name} starts anew: {why}", flush=True)
        if "reward changed" in why and not s.multi_turn:
            found = sorted(
                (artifacts() / "eval" / s.TASK).glob("*/rollouts.jsonl"), key=lambda file: file.stat().st_mtime
            )
            for file in found[-1:]:
                print(f"  without a training, `make rescore TASK={s.TASK} ROLLOUTS={file}` scores its samples again")
    if now:
        write_json(run_dir / DIGESTS, {"demonstrations": now})


def _check_ranks(s: Settings, run_dir: Path) -> None:
    """Raise SettingsError where the warm-up would resume from shards of another number of GPUs.

    ``run_dir`` is the same for any N_GPUS, and verl opens only the shards of its own number of processes.
    """
    step = folder.last_step(run_dir)
    saved = ranks(folder.shards(run_dir, step))
    if saved not in (0, s.N_GPUS):
        fix = f"set N_GPUS={saved}, or remove {run_dir / 'checkpoints'}"
        raise SettingsError(f"N_GPUS={s.N_GPUS}: the warm-up stopped at step {step} with N_GPUS={saved}; {fix}")


def train(s: Settings, arguments: list[str]) -> str:
    """SELF_PLAY_ROUNDS trainings of STEPS; each starts from the last result, which is also its reference."""
    start, said = start_model(s), ""
    for number in range(1, s.SELF_PLAY_ROUNDS + 1):
        run_dir = folder.rl_dir(s, arguments, number, start)
        if s.SELF_PLAY_ROUNDS > 1:
            print(f"  round {number} of {s.SELF_PLAY_ROUNDS}: {run_dir.name}")
        done = folder.complete(run_dir, s)
        if not done:
            _round(s, arguments, number, start, run_dir)
        dev = validation.words(folder.read_metrics(run_dir, strict=False))
        steps = _steps(run_dir, folder.wanted_steps(run_dir, s), s)
        _note_if_killed(run_dir, steps)
        said = f"{'up to date: ' if done else ''}{steps} in {run_dir}{f'; {dev}' if dev else ''}"
        start = str(folder.hf_folder(run_dir))
    return said


def _round(s: Settings, arguments: list[str], number: int, start: str, run_dir: Path) -> None:
    begins, pairs, overrides, nodes = _trainer_start(s, start), None, [], []
    if s.METHOD == "dpo":
        pairs = _pairs(s, number, start, run_dir)
        seeded = replace(s, SEED=s.TRAIN_SEED + number - 1)  # the trainer splits them by it too
        found = dpo_pairs.pair_set(seeded, pairs, load_tokenizer(base_model(start)))
        s = replace(s, STEPS=dpo_pairs.steps(s, found))
        if s.LR_WARMUP >= s.STEPS:
            raise SettingsError(
                f"LR_WARMUP={s.LR_WARMUP}: the rate reaches LR in none of {s.STEPS} steps; set it lower"
            )
        print(f"  {found.said}: {s.STEPS} steps of {s.TRAIN_BATCH_SIZE} in DPO_EPOCHS={s.DPO_EPOCHS}")
    else:
        prune(run_dir, s.KEEP)  # also a crash's leftovers
        overrides = verl_config.critic_overrides(s, begins) + arguments
        nodes = cluster.join(s)
    made, parts = s.rl_fingerprint(arguments, number, start), s.rl_parts(arguments, number, start)
    if number == 1:
        _tell_anew(s, run_dir, "rl", parts)
    folder.record(run_dir, "rl", made, s, start, arguments, base_model(begins), parts)
    # A teacher and a reward model may give no right answers.
    learns = s.INIT == "sft" and number == 1 and s.METHOD != "distill" and not s.REWARD_MODEL
    anyway = not learns or os.environ.get("ANYWAY") == "1"
    plan = planned(s.METHOD, s, run_dir, begins, number=number, data=pairs, overrides=overrides, anyway=anyway)
    try:
        metrics = execute(plan)
    except StageFailed as error:
        raise cluster.explained(error, nodes) from error
    if warning := of_method(s, "warning_after", metrics):
        print(f"  warning: {warning}")


def start_model(s: Settings) -> str:
    """The start of RL and DPO: MODEL, or its warm-up. Raises SettingsError when there is no warm-up yet."""
    if s.INIT == "base":
        return resolve_model(s.MODEL)
    run_dir = folder.sft_dir(s)
    if not folder.warmed(run_dir, s):
        raise SettingsError(f"INIT=sft: there is no warm-up for these settings; run `make sft TASK={s.TASK}` first")
    return str(folder.hf_folder(run_dir))


def _trainer_start(s: Settings, start: str) -> str:
    """``start`` for the trainer: an adapter where the training continues it, else a whole model.

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


def _steps(run_dir: Path, wanted: float, s: Settings) -> str:
    """The steps of a complete run, in words."""
    last = folder.last_step(run_dir)
    return f"{last} steps" if last >= wanted else f"{last} of {wanted} steps, ended by PATIENCE={s.PATIENCE}"


# ---- a plan carried out --------------------------------------------------------------------------------------------


def execute(plan: Plan) -> dict[int, dict[str, float]]:
    """Train as ``plan`` says, with a record of the launch and of its outcome; the run's metrics by step.

    Raises StageFailed when the trainer fails, aborts, or ends without its last checkpoint.
    """
    run_dir, s, gpus = plan.run_dir, plan.settings, Sampler(plan.run_dir / "gpu.jsonl")
    if plan.resumed:
        print(f"  resuming from step {plan.resumed}")
    launches.begin(run_dir, s, plan.command, plan.config)
    folder.mend_tracker(run_dir)
    plan.metrics.parent.mkdir(exist_ok=True)

    def watch() -> Progress:
        gpus.sample()
        return _progress(plan, plan.metrics.stat().st_size if plan.metrics.exists() else 0, begun_step(plan.metrics))

    outcome = run_dir / health.OUTCOME
    outcome.unlink(missing_ok=True)
    try:
        how = {"name": plan.name, "log": plan.log, "total": plan.steps, "environment": plan.environment}
        run(plan.command, **how, watch=watch, minutes=s.START_MINUTES if verl_versions.has_own_trainers(s) else 0)
    except StageFailed as error:
        ended = read_json(outcome)
        if ended.get("outcome") == health.WITHOUT:
            raise WithoutSignal(f"{ended['reason']}\n  log: {plan.log}") from error
        if reason := ended.get("reason"):  # the trainer's own: ABORT_ON
            raise StageFailed(f"{reason}; {_goes_on(run_dir)}\n  log: {plan.log}") from error
        _note(outcome, "failed", str(error).splitlines()[0])
        raise StageFailed(str(error).replace("the same command continues", _goes_on(run_dir))) from error
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"stopped; {_goes_on(run_dir)}") from None
    early = folder.warmed(run_dir, s) if plan.name == "SFT" else folder.ended_early(run_dir, s.PATIENCE)
    if folder.last_step(run_dir) < plan.steps and not early:
        raise StageFailed(f"{plan.name} ended without a checkpoint of step {plan.steps}\n  log: {plan.log}")
    done = f"{folder.last_step(run_dir)} steps" if plan.name == "SFT" else _steps(run_dir, plan.steps, s)
    _note(outcome, "finished", done)
    metrics = folder.read_metrics(run_dir, strict=False)
    found = health.findings(metrics, s)
    for finding in health.newest_by_rule(found):
        times = sum(finding.rule == each.rule for each in found)
        print(f"  warning: step {finding.step}{f' and {times - 1} before' if times > 1 else ''}: {finding.text}")
    return metrics


def _goes_on(run_dir: Path) -> str:
    """Where the same command goes on after a stop."""
    step = folder.last_step(run_dir)
    begins = "the same command begins at step 1, as there is no checkpoint yet"
    return f"the same command continues from the checkpoint of step {step}" if step else begins


def _note(file: Path, outcome: str, reason: str) -> None:
    """Write how the launch ended; a full disk must not hide it."""
    try:
        write_json(file, {"outcome": outcome, "reason": reason})
    except OSError as error:
        print(f"  warning: {file}: cannot be written ({error.strerror})")


def _note_if_killed(run_dir: Path, reason: str) -> None:
    """Write how the last launch of a complete run ended, where a kill after its last checkpoint left that out."""
    if not (run_dir / health.OUTCOME).exists():
        _note(run_dir / health.OUTCOME, "finished", reason)


@functools.lru_cache(1)  # called twice a second
def _progress(plan: Plan, size: int, begun: int = 0) -> Progress:
    """The last logged step, its metric, the last and best validation and the newest finding.

    ``size``: bytes of the metrics file, which show whether there is news. ``begun``: the step that is under way.
    """
    here = folder.metrics_in(plan.metrics, strict=False) if size else {}
    if not here:
        starting = "loading the model" if plan.name in ("SFT", "DPO") else "starting the engines"
        return Progress(plan.resumed, f" step {begun}" if begun else f" {starting}")
    (name, key), last = plan.shown, max(here)
    done = {step: row for step, row in folder.read_metrics(plan.run_dir, strict=False).items() if step <= last}
    found = health.findings(done, plan.settings)
    newest = f"{found[-1].rule.replace('_', ' ')} (step {found[-1].step})" if found else ""
    more = "".join(f", {words}" for words in (validation.words(done), newest) if words)
    measured = [row[key] for row in here.values() if key in row]  # a step may have logged a validation alone
    value = f"{measured[-1]:.3f}" if measured else "-"
    return Progress(last, f" {name} {value}{more}")
