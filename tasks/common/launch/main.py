"""The stages of a task. train.sh runs this through launch.sh; settings come from the environment.

Each stage records the inputs of its result under artifacts/, and is skipped while they are unchanged.
"""

import contextlib
import fcntl
import functools
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from tasks.common import settings
from tasks.common.data import gold
from tasks.common.data.held_out import check_held_out
from tasks.common.data.prepare import describe, read_manifest
from tasks.common.evaluation import attack as attacks
from tasks.common.evaluation import incentive
from tasks.common.evaluation.certify import certificate, certified
from tasks.common.evaluation.tables import total_time
from tasks.common.guarded import Guarded, asks_judge
from tasks.common.interrupts import interrupt_on_sigterm
from tasks.common.launch import doctor, experiments, rehearse, train
from tasks.common.launch.plan import planned
from tasks.common.launch.task import compute_score_of, environment, load_reward, own_stages, script, stack_environment
from tasks.common.leftovers import Launch
from tasks.common.models.find import embedded_folder, resolve_model, whole_model
from tasks.common.models.merge import base_of, is_adapter, merge_note, whole_folder
from tasks.common.process import Progress, errors_in_one_line, run
from tasks.common.rewards.answers import RewardError
from tasks.common.rows import DataError, validate_parquet
from tasks.common.runs import folder
from tasks.common.settings import Command, Settings, SettingsError, artifacts, given_arguments, load_settings
from tasks.common.training import verl_versions

# Goals that need verl to train or to show its config.
TRAINING = ("sft", "train", "dpo", "all", "experiment", "config", "certify")
# Goals that know no episodes.
SINGLE_TURN = ("rescore", "dpo")
# Goals that use an existing model: of a run, or MODEL.
ABOUT_A_RUN = ("eval", "compare", "merge", "chat", "batch")
# The stages of each goal, in order. A stage of the task's own comes after data and model.
STAGES_OF = {
    "data": ("data",),
    "sft": ("data", "model", "sft"),
    "train": ("data", "model", "sft", "train", "eval"),
    "dpo": ("data", "model", "sft", "train", "eval"),
    "all": settings.WHOLE,
    "attack": ("data", "attack"),
    "probe": ("data", "model", "probe"),
    "certify": ("data", "model", "certify"),
    "eval": ("data", "model", "eval"),
    "compare": ("data", "model", "compare"),
    "merge": ("merge",),
    "chat": ("data", "model"),
    "batch": ("data", "model"),
}


@dataclass(frozen=True)
class Job:
    """The work of `make GOAL`. ``arguments``: ARGS; ``model``: the given MODEL, else empty."""

    goal: str
    s: Settings
    command: Command
    arguments: list[str]
    model: str = ""
    run_dir: Path | None = None  # the run to use; None: MODEL itself, or a training that has not started

    @property
    def trains(self) -> bool:
        return self.goal in ("train", "dpo", "all")

    @property
    def trained(self) -> Path | None:
        """The run that a stage is about: after a training the one of these settings."""
        return folder.rounds(self.s, self.arguments)[-1] if self.trains else self.run_dir

    def base(self) -> str:
        """MODEL as a folder or hub id."""
        return resolve_model(self.s.MODEL, self.command.BASE)

    def checkpoint(self, run_dir: Path) -> str:
        """The checkpoint STEP of a run."""
        return str(folder.hf_folder(run_dir, self.command.STEP))

    def chosen(self) -> str:
        """For chat and batch: the checkpoint STEP of the run; without a run MODEL."""
        return self.checkpoint(self.run_dir) if self.run_dir else self.base()


# ---- stages --------------------------------------------------------------------------------------------------------


def data(job: Job) -> str:
    """Prepare the data if it is not up to date, and check TRAIN_FILE where a training reads it."""
    s, training = job.s, job.trains or job.goal in ("data", "sft", "attack", "probe", "certify", "experiment")
    manifest = read_manifest(s.data_dir)
    fresh = manifest.get("fingerprint") == s.data_fingerprint()
    fresh = fresh and all((s.data_dir / f"{name}.parquet").is_file() for name in manifest["rows"])
    checked = manifest.get("gold")
    if fresh and checked and (job.goal == "data" or s.GOLD == "error"):  # else a changed reward keeps the data
        fresh = checked["reward"] == settings.code_digest(s.reward_file)
    if not fresh:
        script(s, "prepare_data.py")
        manifest = read_manifest(s.data_dir)
    if s.GOLD == "error" and gold.failed(manifest, s):
        raise DataError(f"GOLD=error: {gold.said(manifest['gold'], s)}")
    for name in manifest["rows"]:
        validate_parquet(s.data_dir / f"{name}.parquet", "sft" if name == "sft" else "rl")
    if training:
        _check_own_files(s, manifest["rows"])
    if job.trains and not s.multi_turn and s.METHOD not in ("dpo", "distill") and not s.REWARD_MODEL:
        _warn_of_guesses(s)
    own_file = f"; training on {s.train_file}" if training and s.TRAIN_FILE else ""
    return f"{'up to date: ' if fresh else ''}{describe(manifest, s)}{own_file}"


def _warn_of_guesses(s: Settings) -> None:
    """Say where a policy that guesses would earn so much that the training may learn to."""
    compute_score = compute_score_of(s)
    if asks_judge(compute_score):
        return
    rows = attacks.rows_of(s, incentive.ROWS)
    reward = Guarded(functools.partial(compute_score, variant=s.REWARD) if s.REWARD else compute_score, rows)
    try:
        for line, warns in incentive.told(s, rows, reward):
            print(f"  warning: {line}\n" if warns else "", end="", flush=True)
    finally:
        reward.close()


def _check_own_files(s: Settings, names: Iterable[str]) -> None:
    """Raise DataError where TRAIN_FILE fills no batch, or as check_held_out."""
    if s.TRAIN_FILE and (own := validate_parquet(s.train_file)) < s.TRAIN_BATCH_SIZE:
        few = f"has {own} prompts, less than TRAIN_BATCH_SIZE={s.TRAIN_BATCH_SIZE}"
        raise DataError(f"TRAIN_FILE={s.train_file}: {few}")
    check_held_out(s, names)


def model(job: Job) -> str:
    fresh = job.s.MODEL != "embedded" or embedded_folder().is_dir()
    return f"{'' if fresh else 'unpacked '}{job.base()}"


def models_of(job: Job) -> dict[str, str]:
    """Models to evaluate, by label: base, warm-up and the checkpoint STEP of the run; without a run only MODEL."""
    run_dir = job.trained
    if run_dir is None:
        return {"model" if job.model else "base": job.base()}
    models, earlier = {"base": job.base()}, folder.lineage(run_dir)[:-1]
    if folder.recorded(run_dir)["kind"] == "sft":
        return models | {"sft": job.checkpoint(run_dir)}
    if job.s.INIT == "sft":
        models["sft"] = warm_up_of(job, run_dir)
    models |= {f"round{number}": str(folder.hf_folder(run)) for number, run in enumerate(earlier, 1)}
    return models | {f"round{len(earlier) + 1}" if earlier else job.s.METHOD: job.checkpoint(run_dir)}


def warm_up_of(job: Job, run_dir: Path) -> str:
    """The checkpoint that the first round of ``run_dir`` began with. Raises SettingsError where it is gone."""
    first = folder.lineage(run_dir)[0]
    start = folder.recorded(first)["start"]
    if Path(start).is_absolute() and not Path(start).is_dir():  # a hub id is neither
        again = f"`make sft TASK={job.s.TASK}` with the settings of that run makes it again"
        fix = again if folder.sft_dir(job.s) in Path(start).parents else "put it back"
        fix += ", or give BASE" if job.goal == "compare" else ""
        raise SettingsError(f"RUN={first.name}: the model that it began with, {start}, is gone; {fix}")
    return start


def evaluate(job: Job, name: str = "evaluate.py", *arguments: str) -> str:
    """Run a script of the task on the models."""
    models = models_of(job)
    script(job.s, name, *arguments, *labelled(models))
    return ", ".join(models)


def labelled(models: dict[str, str]) -> list[str]:
    return [f"{label}={path}" for label, path in models.items()]


def start_of(job: Job) -> str:
    """MODEL, or the warm-up that RL would start from once there is one."""
    s = job.s
    if not job.model and s.INIT == "sft":
        if folder.last_step(folder.sft_dir(s)):
            return str(folder.hf_folder(folder.sft_dir(s)))
        print(f"  no warm-up yet, so this is {s.MODEL}; make sft TASK={s.TASK} trains one", flush=True)
    return job.base()


def probe(job: Job) -> str:
    start = start_of(job)
    script(job.s, "evaluate.py", "probe", start)
    return start


def certify(job: Job) -> str:
    """Exits with 1 when a check failed."""
    s, start = job.s, start_of(job)
    file = certificate(s, start)
    file.unlink(missing_ok=True)
    multiprocessing = {"VLLM_ENABLE_V1_MULTIPROCESSING": os.environ.get("EVAL_MULTIPROCESSING", "1")}
    run(
        [sys.executable, "-m", "tasks.common.verl_plugins.certify", start, str(file)],
        name="certify",
        log=file.with_name("certify.log"),
        total=1,
        watch=lambda: Progress(int(file.is_file()), " playing episodes"),
        environment=environment(s) | multiprocessing,
    )
    return certified(file)


def attack(job: Job) -> str:
    """Exits with 1 when the reward can be fooled."""
    script(job.s, "evaluate.py", "attack")
    return "nothing found"


def compare(job: Job) -> str:
    """BASE (default: what the run began with, beside its warm-up) against MODEL, or the run's checkpoint STEP."""
    s, base, run_dir, warm_up = job.s, job.command.BASE, job.trained, []
    if run_dir:
        trained = job.checkpoint(run_dir)
        if not base and folder.recorded(run_dir)["kind"] == "rl" and s.INIT == "sft":
            warm_up = [warm_up_of(job, run_dir)]
        base = base or s.MODEL
    elif job.model:
        trained, adapter = job.base(), Path(job.model).expanduser()
        base = base or (base_of(adapter) if is_adapter(adapter) else default_model())
    else:
        raise SettingsError(f"there is no trained model yet: run `make train TASK={s.TASK}`, or set MODEL")
    start = resolve_model(base, variable="BASE" if job.command.BASE else "MODEL")
    script(s, "evaluate.py", "compare", start, *warm_up, trained)
    return " -> ".join([base, *warm_up, trained])


def default_model() -> str:
    """The MODEL of this task and stack when none is given."""
    return settings.values_of({name: value for name, value in os.environ.items() if name != "MODEL"})["MODEL"].text


def merged(job: Job) -> str:
    run_dir = job.trained
    if is_adapter(Path(job.model).expanduser()):
        found = Path(whole_model(resolve_model(job.model, job.command.BASE)))
    elif run_dir is None:
        raise SettingsError(f"there is no checkpoint to merge yet: run `make train TASK={job.s.TASK}`, or set RUN")
    elif found := whole_folder(folder.shards(run_dir, folder.find_step(run_dir, job.command.STEP))):
        return f"nothing to do: {found} has the whole model already{merge_note(found)}"
    else:
        found = folder.merged_folder(run_dir, job.command.STEP)
    return f"written: {found}{merge_note(found)}"


def trained_rl(job: Job) -> str:
    """RL; where the warm-up gives it nothing to learn from, `make all` on a terminal asks whether to go on."""
    try:
        return train.train(job.s, job.arguments)
    except train.WithoutSignal as error:
        if job.goal != "all" or not sys.stdin.isatty():
            raise
        print(f"  {error}")
        if input("  train all the same? [y/N] ").strip().lower() not in ("y", "yes"):
            raise
        os.environ["ANYWAY"] = "1"
        return train.train(job.s, job.arguments)


STAGES: dict[str, Callable[[Job], str]] = {
    "data": data,
    "model": model,
    "sft": lambda job: train.sft(job.s),
    "train": trained_rl,
    "merge": merged,
    "eval": lambda job: evaluate(job, "evaluate.py", "eval"),
    "attack": attack,
    "probe": probe,
    "certify": certify,
    "compare": compare,
}


def experiment(job: Job, runs: dict[str, Settings]) -> None:
    """`make experiment`: train ``runs``, each of METHODS, LRS and SEEDS on the same data, and compare the results."""
    s, arguments = job.s, job.arguments
    if few := experiments.few_cores(runs, job.command.JOBS):
        print(f"warning: {few}", flush=True)
    for each in {each.METHOD: each for each in runs.values()}.values():
        train.check(each, arguments)
    for each in runs.values():
        steps = folder.last_step(run_dir := folder.rl_dir(each, arguments))
        if steps > folder.wanted_steps(run_dir, each):
            longer = f"STEPS={each.STEPS}: {run_dir.name} has {steps} steps already, which would be compared"
            raise SettingsError(f"{longer}; take STEPS={steps}, or another RUN")

    def compared() -> str:
        folders = {label: folder.rounds(each, arguments)[-1] for label, each in runs.items()}
        models = {"start": train.start_model(s)} | {label: str(folder.hf_folder(run)) for label, run in folders.items()}
        gpus = s.N_GPUS * len(experiments.gpu_groups([*runs.values()], job.command.JOBS))
        os.environ["STAGE"] = "compare"  # these GPUs share no batch
        script(replace(s, N_GPUS=gpus), "evaluate.py", "experiment", *labelled(models))
        return f"{len(models)} models"

    names = ("data", "model", "sft") if s.INIT == "sft" else ("data", "model")
    stages = {name: functools.partial(STAGES[name], job) for name in names}
    if job.command.JOBS > 1:
        stages |= {"train": lambda: experiments.train_at_once(runs, arguments, job.command.JOBS)}
    else:
        stages |= {label: functools.partial(train.train, each, arguments) for label, each in runs.items()}
    run_stages(stages | {"compare": compared})


@contextlib.contextmanager
def _locked(s: Settings) -> Iterator[None]:
    """One run of a task at a time; the lock ends with the process."""
    s.runs_dir.mkdir(parents=True, exist_ok=True)
    with (s.runs_dir / ".lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            holder = lock.read().strip() or "unknown"
            other = "wait for it, or give this one other ARTIFACTS"
            raise SettingsError(f"TASK={s.TASK}: is already running (process {holder}); {other}") from None
        lock.truncate(0)
        with contextlib.suppress(OSError):  # a full disk: the lock holds without the number
            os.write(lock.fileno(), str(os.getpid()).encode())
        yield


# ---- command line --------------------------------------------------------------------------------------------------


def run_stages(stages: dict[str, Callable[[], str]], first: str = "data") -> None:
    """Run ``stages`` in order from ``first``, each with its number."""
    skipped = list(stages)[: list(stages).index(first)] if first in stages else []
    for number, (name, stage) in enumerate(stages.items(), 1):
        print(f"[{number}/{len(stages)}] {name}", flush=True)
        if name in skipped:
            print(f"  skipped (FROM={first})", flush=True)
            continue
        started = time.monotonic()
        print(f"  {stage()} ({time.monotonic() - started:.0f} s)", flush=True)


def closing(s: Settings, run_dirs: list[Path], step: str = "") -> None:
    """After the table of the checkpoint STEP=``step``: which it is, the time, the folder and the next commands."""
    rows = [row for run_dir in run_dirs for row in folder.read_metrics(run_dir, strict=False).values()]
    seconds = sum(row.get("timing_s/step", 0.0) for row in rows)
    steps = sum(map(folder.last_step, run_dirs))
    if (last := folder.last_step(run_dirs[-1])) and folder.find_step(run_dirs[-1], step) != last:
        print(f"the table is of the {chosen_step(run_dirs[-1], step)}")
    launched = sum(len(list(run_dir.glob("metrics/*.jsonl"))) for run_dir in run_dirs)
    earlier = f" in {launched} launches" if launched > len(run_dirs) else ""  # the time in all is of this one
    print(
        f"{steps} steps, {seconds:.0f} s of training{earlier}{total_time(bool(earlier))}; all of it in {run_dirs[-1]}"
    )
    print("\nNext:")
    change, what = folder.more_training(s, run_dirs[-1])[0]
    print(f"  the same command with {change}    # {what}")
    print(f"  make compare TASK={s.TASK}    # base, warm-up and trained with tests, prompts gained and lost; files")
    print(f"  make chat TASK={s.TASK}    # talk to it")
    print("  make new TASK=my_task    # a task of your own")


def _shared_data(s: Settings, first: str) -> None:
    """Raise SettingsError unless the data that FROM skips exists, made with these settings. Checks TRAIN_FILE
    and PAIRS_FILE as the stage of the data does."""
    manifest = read_manifest(s.data_dir)
    made = manifest.get("fingerprint")
    if made != s.data_fingerprint():
        what = "was made with other settings" if made else "is not there"
        raise SettingsError(f"FROM={first}: {s.data_dir} {what}; run `make data TASK={s.TASK}`, or leave FROM out")
    if first in ("model", "sft", "train"):
        _check_own_files(s, manifest["rows"])


def print_config(job: Job) -> None:
    """`make config`: the plan of the training, or of its current round, and verl's resolved config."""
    from omegaconf import OmegaConf

    s = job.s
    if s.METHOD == "dpo":
        steps = f"DPO_EPOCHS={s.DPO_EPOCHS} x (pairs / TRAIN_BATCH_SIZE={s.TRAIN_BATCH_SIZE}) steps"
        raise SettingsError(f"METHOD=dpo: has no config of verl; it trains with TRL: {steps}, STEPS is not used")
    *before, run_dir = folder.rounds(s, job.arguments)
    first = s.MODEL if s.INIT == "base" else str(folder.sft_dir(s))  # the warm-up may not exist yet
    start = str(folder.hf_folder(before[-1])) if before else first
    plan = planned(s.METHOD, s, run_dir, start, number=len(before) + 1, overrides=job.arguments)
    print(f"{plan.comments()}\n{OmegaConf.to_yaml(OmegaConf.create(plan.config))}")


def benchmark(job: Job, file: str) -> None:
    """In place of this process."""
    program = [sys.executable, str(settings.ROOT / "tests/benchmarks" / file), *job.arguments]
    os.execve(sys.executable, program, environment(job.s))


def rescore(job: Job) -> None:
    compute_score_of(job.s)
    script(job.s, "evaluate.py", "rescore")


# Goals that take no lock and no stage.
AT_ONCE: dict[str, Callable[[Job], None]] = {
    "config": print_config,
    "settings": lambda job: print(settings.table(os.environ)),
    "doctor": lambda job: doctor.report(job.s, job.arguments),
    "rescore": rescore,
    "one_of_many": lambda job: print(train.train(job.s, job.arguments)),  # of an experiment, which has the lock
    "bench": lambda job: benchmark(job, "sampling.py"),
    "bench_training": lambda job: benchmark(job, "training.py"),
}


def say_environment() -> None:
    """Print the variables that come from the shell, not from make's command line: they change the run."""
    if "GIVEN" not in os.environ:
        return  # without make everything comes from the environment
    names = {*Settings.__dataclass_fields__, *Command.__dataclass_fields__} - {"STAGE", "TASK", "STACK"}
    exported = [name for name in sorted(names - set(os.environ["GIVEN"].split())) if os.environ.get(name)]
    if exported:
        said = ", ".join(f"{name}={os.environ[name]}" for name in exported)
        print(f"from your environment: {said}", file=sys.stderr, flush=True)


def about(job: Job) -> Job:
    """``job`` with the run that an evaluation uses, and that run's settings."""
    # The models are given, so no run is used.
    given = job.model and (job.goal in ("chat", "batch") or (job.goal == "compare" and job.command.BASE))
    if given or job.goal not in (*ABOUT_A_RUN, *own_stages(job.s.task_dir)):
        return job
    if run_dir := folder.find_run(job.s, job.arguments, job.model):
        print(f"run {run_dir.name}, {chosen_step(run_dir, job.command.STEP)}")
        return replace(job, s=folder.settings_of(run_dir, job.s), run_dir=run_dir)
    return job


def chosen_step(run_dir: Path, given: str) -> str:
    """The checkpoint STEP=``given`` of a run, in words."""
    step, last = folder.find_step(run_dir, given), folder.last_step(run_dir)
    why = "" if given or step == last else f", the best of its validations (STEP=latest: {last})"
    return f"checkpoint of step {step}{why}"


def main(goal: str, arguments: list[str]) -> None:
    if goal == "rehearse":  # the settings of another machine's run
        say_environment()
        rehearse.main(arguments)
        return
    # An experiment's TEACHER is for one of METHODS; ``planned`` gives it to that one.
    alone = goal == "experiment" and os.environ.get("METHOD") != "distill"
    s, command = load_settings(os.environ | ({"TEACHER": ""} if alone else {})), load_settings(cls=Command)
    os.environ.update(stack_environment(s, os.environ) | {"ARTIFACTS": str(artifacts())})
    job = Job(goal, s, command, arguments, os.environ.get("MODEL", ""))
    say_environment()
    if s.multi_turn and goal in SINGLE_TURN:
        raise SettingsError(f"TASK={s.TASK}: has episodes of several turns; `make {goal}` is for single-turn tasks")
    if goal == "certify" and s.METHOD == "dpo":
        raise SettingsError("METHOD=dpo: samples nothing in training; `make certify` is for the RL methods")
    if goal == "certify" and not verl_versions.has_own_trainers(s):
        found = f"STACK={s.STACK}: has verl {verl_versions.wanted(s)}, whose agent loop differs"
        raise SettingsError(f"{found}; `make certify` plays that of verl 0.9.1, with STACK=cpu")
    # DPO trains with TRL; its warm-up with verl.
    if goal in TRAINING and not (s.METHOD == "dpo" and s.INIT == "base"):
        verl_versions.check_installed(s)
    if goal in AT_ONCE:
        AT_ONCE[goal](job)
        return
    if goal not in (*STAGES_OF, "experiment", *own_stages(s.task_dir)):
        having = [path.parent.name for path in sorted(s.task_dir.parent.glob(f"*/{goal}.py"))]
        if not having:
            known = {*STAGES_OF, "experiment", "rehearse", *AT_ONCE} - {"one_of_many"}
            raise SettingsError(f"STAGE={goal}: no such stage; there are: {', '.join(sorted(known))}")
        raise SettingsError(f"TASK={s.TASK}: has no {goal}.py; `make {goal}` is for {', '.join(having)}")
    if goal == "batch":
        from tasks.common.evaluation import batch

        batch.paths(command)
    job = about(job)
    s = job.s
    if goal in STAGES_OF and goal != "merge":
        load_reward(s)  # a broken reward.py ends the command before anything starts
    with _locked(s):
        if job.trains and command.FROM != "data":
            _shared_data(s, command.FROM)
        if job.trains:
            train.check(s, arguments)
        runs = experiments.planned(s, command) if goal == "experiment" else {}
        if job.trains or goal in ("sft", "experiment"):
            doctor.before_training(s, arguments, goal, list(runs.values()), command.JOBS)
        if goal == "experiment":
            experiment(job, runs)
        else:
            names = STAGES_OF.get(goal, ("data", "model"))
            stages = {name: functools.partial(STAGES[name], job) for name in names}
            if job.trains and s.INIT == "base":
                del stages["sft"]
            if goal not in STAGES_OF:
                stages[goal] = functools.partial(evaluate, job, f"{goal}.py")
            run_stages(stages, command.FROM if job.trains else "data")
        if job.trains:
            closing(s, folder.rounds(s, arguments), command.STEP)
        if goal == "batch":
            script(s, "evaluate.py", "batch", job.chosen())
    if goal == "chat":  # in place of this process, so that Ctrl-C reaches it alone; the lock is free again
        program = [sys.executable, str(s.task_dir / "evaluate.py"), "chat", job.chosen()]
        launch = Launch(artifacts() / "chat" / s.TASK / str(os.getpid()))  # a killed engine leaves sockets
        launch.outlives_exec()
        os.execve(sys.executable, program, environment(s) | launch.environment)


if __name__ == "__main__":
    interrupt_on_sigterm()
    trains = sys.argv[1] in ("sft", "train", "dpo", "all", "experiment")
    said = "stopped" + "; the same command continues" * trains
    with errors_in_one_line(SettingsError, DataError, RewardError, stopped=said):
        main(sys.argv[1], sys.argv[2:] or given_arguments())
