"""The stages of a task. The Makefile runs this; settings come from the environment.

Each stage records the inputs of its result under artifacts/, and is skipped while they are unchanged.
"""

import contextlib
import fcntl
import functools
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from verl_tasks import settings
from verl_tasks.data import gold
from verl_tasks.data.held_out import check_held_out
from verl_tasks.data.prepare import describe, read_manifest
from verl_tasks.evaluation import attack as attacks
from verl_tasks.evaluation import incentive
from verl_tasks.evaluation.certify import certificate, certified
from verl_tasks.evaluation.tables import total_time
from verl_tasks.guarded import Guarded, asks_judge
from verl_tasks.launch import doctor, experiments, minutes, rehearse, serve, train
from verl_tasks.launch.plan import rl_plan
from verl_tasks.launch.rounds import check_training, start_model, train_rounds
from verl_tasks.launch.task import compute_score_of, exported, load_reward, script, stack_environment
from verl_tasks.leftovers import Launch, interrupt_on_sigterm
from verl_tasks.models.find import embedded_folder, resolve_model, whole_model
from verl_tasks.models.merge import base_of, is_adapter, merge, merge_note, whole_folder
from verl_tasks.places import PYTHON_PATH
from verl_tasks.process import Progress, errors_in_one_line, run
from verl_tasks.reports import export as exports
from verl_tasks.rewards.answers import RewardError
from verl_tasks.rows import DataError, validate_parquet
from verl_tasks.runs import folder
from verl_tasks.runs.run import Run, export
from verl_tasks.runs.secrets import masked
from verl_tasks.settings import Command, Settings, SettingsError, artifacts, given_arguments, load_settings, method
from verl_tasks.stages import STAGES, Stage, own_stages, stage_of
from verl_tasks.text import show
from verl_tasks.training import verl_versions


@dataclass(frozen=True)
class Job:
    """The work of `make GOAL`. ``arguments``: ARGS; ``model``: the given MODEL, else empty."""

    goal: str
    s: Settings
    command: Command
    arguments: list[str]
    model: str = ""
    run: Run | None = None  # the run to use; None: MODEL itself, or a training that has not started
    expected: dict[str, float] = field(default_factory=dict)  # seconds by stage, once they are known (minutes.py)

    @property
    def stage(self) -> Stage:
        return stage_of(self.goal)

    @property
    def parts(self) -> list[str]:
        """What it runs, in order."""
        parts = [*self.stage.parts, *([self.goal] if self.goal not in STAGES else [])]
        without = {"model"} if self.asks_only else set()
        without |= {"sft"} if self.s.INIT != "sft" and self.goal != "sft" else set()
        return [part for part in parts if part not in without]

    @property
    def asks_only(self) -> bool:
        """Whether the endpoint BASE_URL is all that there is to evaluate: there is no run, and no MODEL is given."""
        return self.goal == "eval" and bool(self.command.BASE_URL) and not self.model and self.run is None

    @property
    def trains(self) -> bool:
        """Whether it is one training, whose result it evaluates."""
        return "train" in self.stage.parts

    @property
    def trained(self) -> Run | None:
        """The run that a stage is about: after a training the one of these settings, as it is now."""
        return folder.rounds(self.s, self.arguments)[-1] if self.trains else self.run

    def base(self) -> str:
        """MODEL as a folder or hub id."""
        return resolve_model(self.s.MODEL, self.command.BASE)

    def checkpoint(self, of: Run) -> str:
        """The checkpoint STEP of a run."""
        return str(export(of, self.command.STEP))

    def chosen(self) -> str:
        """For chat and batch: the checkpoint STEP of the run; without a run MODEL."""
        return self.checkpoint(self.run) if self.run else self.base()


# ---- stages --------------------------------------------------------------------------------------------------------


def data(job: Job) -> str:
    """Prepare the data if it is not up to date, and check TRAIN_FILE where a training reads it."""
    s, training = job.s, not job.stage.about_a_run
    manifest = s.made()
    fresh = bool(manifest) and all((s.data_dir / f"{name}.parquet").is_file() for name in manifest["rows"])
    checked = manifest.get("gold")
    # After an edit of the reward rows from elsewhere stay: to read them again may take long.
    again = job.goal == "data" or s.GOLD == "error" or (training and manifest.get("source") in settings.GENERATORS)
    if fresh and checked and again:
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
    if job.trains and not s.multi_turn and method(s.METHOD).REWARD and not s.REWARD_MODEL:
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
    trained = job.trained
    if job.asks_only:
        return {}
    if trained is None:
        return {"model" if job.model else "base": job.base()}
    if trained.record["kind"] == "sft":
        return {"base": job.base(), "sft": job.checkpoint(trained)}
    models, rounds = {"base": job.base()}, folder.lineage(trained)
    if job.s.INIT == "sft":
        models["sft"] = warm_up_of(job, rounds[0])
    models |= {f"round{number}": str(export(each)) for number, each in enumerate(rounds[:-1], 1)}
    return models | {f"round{len(rounds)}" if rounds[1:] else job.s.METHOD: job.checkpoint(trained)}


def warm_up_of(job: Job, first: Run) -> str:
    """The checkpoint that the round ``first`` began with. Raises SettingsError where it is gone."""
    start = first.record["start"]
    if Path(start).is_absolute() and not Path(start).is_dir():  # a hub id is neither
        again = f"`make sft TASK={job.s.TASK}` with the settings of that run makes it again"
        fix = again if folder.sft_dir(job.s) in Path(start).parents else "put it back"
        fix += ", or give BASE" if job.goal == "compare" else ""
        raise SettingsError(f"RUN={first.folder.name}: the model that it began with, {start}, is gone; {fix}")
    return start


def evaluate(job: Job, name: str = "evaluate.py", *arguments: str) -> str:
    """Run a script of the task on the models."""
    models = models_of(job)
    script(job.s, name, *arguments, *labelled(models))
    return ", ".join(models) or job.command.MODEL_NAME


def labelled(models: dict[str, str]) -> list[str]:
    return [f"{label}={path}" for label, path in models.items()]


def start_of(job: Job) -> str:
    """MODEL, or the warm-up that RL would start from once there is one."""
    s = job.s
    if not job.model and s.INIT == "sft":
        if (warm_up := Run.read(folder.sft_dir(s))).steps:
            return str(export(warm_up))
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
        [sys.executable, "-m", "verl_tasks.verl_plugins.certify", start, str(file)],
        name="certify",
        log=file.with_name("certify.log"),
        total=1,
        watch=lambda: Progress(int(file.is_file()), " playing episodes"),
        environment=exported(s) | multiprocessing,
    )
    return certified(file)


def attack(job: Job) -> str:
    """Exits with 1 when the reward can be fooled."""
    script(job.s, "evaluate.py", "attack")
    return "nothing found"


def compare(job: Job) -> str:
    """BASE (default: what the run began with, beside its warm-up) against MODEL, or the run's checkpoint STEP."""
    s, base, of, warm_up = job.s, job.command.BASE, job.trained, []
    if of:
        trained = job.checkpoint(of)
        if not base and of.record["kind"] == "rl" and s.INIT == "sft":
            warm_up = [warm_up_of(job, folder.lineage(of)[0])]
        base = base or s.MODEL
    elif job.model:
        trained, adapter = job.base(), Path(job.model).expanduser()
        unnamed = {name: value for name, value in os.environ.items() if name != "MODEL"}
        base = base or (base_of(adapter) if is_adapter(adapter) else settings.values_of(unnamed)["MODEL"].text)
    else:
        raise SettingsError(f"there is no trained model yet: run `make train TASK={s.TASK}`, or set MODEL")
    start = resolve_model(base, variable="BASE" if job.command.BASE else "MODEL")
    script(s, "evaluate.py", "compare", start, *warm_up, trained)
    return " -> ".join([base, *warm_up, trained])


def merged(job: Job) -> str:
    trained = job.trained
    if is_adapter(Path(job.model).expanduser()):
        model = Path(whole_model(resolve_model(job.model, job.command.BASE)))
    elif trained is None:
        raise SettingsError(f"there is no checkpoint to merge yet: run `make train TASK={job.s.TASK}`, or set RUN")
    elif model := whole_folder(checkpoint := trained.checkpoint(job.command.STEP)):
        return f"nothing to do: {model} has the whole model already{merge_note(model)}"
    else:
        model = merge(checkpoint, trained.base)
    return f"written: {model}{merge_note(model)}"


def model_folder(job: Job) -> str:
    exports.check(job.command, job.run)
    return exports.export(job.s, job.command, job.run.folder, job.chosen())


def trained_rl(job: Job) -> str:
    """RL; where the warm-up gives it nothing to learn from, `make all` on a terminal asks whether to go on."""
    try:
        return train_rounds(job.s, job.arguments, job.expected.get("train", 0))
    except train.WithoutSignal as error:
        if job.goal != "all" or not sys.stdin.isatty():
            raise
        print(f"  {error}")
        if input("  train all the same? [y/N] ").strip().lower() not in ("y", "yes"):
            raise
        os.environ["ANYWAY"] = "1"
        return train_rounds(job.s, job.arguments)


PARTS: dict[str, Callable[[Job], str]] = {
    "data": data,
    "model": model,
    "sft": lambda job: train.sft(job.s, job.expected.get("sft", 0)),
    "train": trained_rl,
    "merge": merged,
    "export": model_folder,
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
        check_training(each, arguments)
    for each in runs.values():
        begun = folder.rl_run(each, arguments)
        if begun.last > begun.wanted(each):
            longer = f"STEPS={each.STEPS}: {begun.folder.name} has {begun.last} steps already, which would be compared"
            raise SettingsError(f"{longer}; take STEPS={begun.last}, or another RUN")

    def compared() -> str:
        trained = {label: folder.rounds(each, arguments)[-1] for label, each in runs.items()}
        models = {"start": start_model(s)} | {label: str(export(each)) for label, each in trained.items()}
        gpus = s.N_GPUS * len(experiments.gpu_groups([*runs.values()], job.command.JOBS))
        os.environ["STAGE"] = "compare"  # these GPUs share no batch
        script(replace(s, N_GPUS=gpus), "evaluate.py", "experiment", *labelled(models))
        return f"{len(models)} models"

    stages = {name: functools.partial(PARTS[name], job) for name in job.parts}
    if job.command.JOBS > 1:
        stages |= {"train": lambda: experiments.train_at_once(runs, arguments, job.command.JOBS)}
    else:
        stages |= {label: functools.partial(train_rounds, each, arguments) for label, each in runs.items()}
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
        said = f"  {stage()} ({time.monotonic() - started:.0f} s)"
        show(said) if number == len(stages) else print(said, flush=True)


def closing(s: Settings, rounds: list[Run], step: str = "") -> None:
    """After the table of the checkpoint STEP=``step``: which it is, the time, the folder and the next commands."""
    last = rounds[-1]
    seconds = sum(row.get("timing_s/step", 0.0) for each in rounds for row in each.metrics.values())
    if last.steps and last.step(step) != last.last:
        print(f"the table is of the {chosen_step(last, step)}")
    launches = sum(each.launches for each in rounds)
    earlier = f" in {launches} launches" if launches > len(rounds) else ""  # the time in all is of this one
    times = f"{seconds:.0f} s of training{earlier}{total_time(bool(earlier))}"
    print(f"{sum(each.last for each in rounds)} steps, {times}; all of it in {last.folder}")
    print("\nNext:")
    change, what = folder.more_training(s, last)[0]
    print(f"  the same command with {change}    # {what}")
    this = f"TASK={s.TASK} RUN={last.folder.name}"  # without RUN a run of the default settings comes first
    print(f"  make compare {this}    # base, warm-up and trained with tests, prompts gained and lost; files")
    print(f"  make chat {this}    # talk to it")
    print("  make new TASK=my_task    # a task of your own")


def _shared_data(s: Settings, first: str) -> None:
    """Raise SettingsError unless the data that FROM skips exists, made with these settings. Checks TRAIN_FILE
    and PAIRS_FILE as the stage of the data does."""
    if not (manifest := s.made()):
        what = "was made with other settings" if read_manifest(s.data_dir) else "is not there"
        raise SettingsError(f"FROM={first}: {s.data_dir} {what}; run `make data TASK={s.TASK}`, or leave FROM out")
    if first in ("model", "sft", "train"):
        _check_own_files(s, manifest["rows"])


def print_config(job: Job) -> None:
    """`make config`: the plan of the training, or of its current round, and verl's resolved config. Raises
    SettingsError for what METHOD cannot train with."""
    from omegaconf import OmegaConf

    s = job.s
    if s.by_pairs:
        steps = f"DPO_EPOCHS={s.DPO_EPOCHS} x (pairs / TRAIN_BATCH_SIZE={s.TRAIN_BATCH_SIZE}) steps"
        raise SettingsError(f"METHOD={s.METHOD}: has no config of verl; it trains with TRL: {steps}, STEPS is not used")
    train.check_method(s, job.arguments)
    *before, current = folder.rounds(s, job.arguments)
    first = s.MODEL if s.INIT == "base" else str(folder.sft_dir(s))  # the warm-up may not exist yet
    start = str(export(before[-1])) if before else first
    plan = rl_plan(s, current, start, job.arguments, number=len(before) + 1)
    show(f"{plan.comments()}\n{OmegaConf.to_yaml(OmegaConf.create(plan.config))}")


def benchmark(job: Job) -> None:
    """In place of this process."""
    program = [sys.executable, str(settings.ROOT / "tests/benchmarks/training.py"), *job.arguments]
    os.execve(sys.executable, program, exported(job.s))


def chat(job: Job) -> None:
    """In place of this process, so that Ctrl-C reaches it alone."""
    s = job.s
    program = [sys.executable, str(s.task_dir / "evaluate.py"), "chat", job.chosen()]
    launch = Launch(artifacts() / "chat" / s.TASK / str(os.getpid()))  # a killed engine leaves sockets
    os.execve(sys.executable, program, exported(s) | launch.environment)


def rescore(job: Job) -> None:
    compute_score_of(job.s)
    script(job.s, "evaluate.py", "rescore")


# What takes no lock and has no parts.
AT_ONCE: dict[str, Callable[[Job], None]] = {
    "config": print_config,
    "settings": lambda job: show(settings.table(os.environ)),
    "doctor": lambda job: doctor.report(job.s, job.arguments),
    "rescore": rescore,
}
# What follows its parts, in place of this process.
LAST: dict[str, Callable[[Job], None]] = {
    "chat": chat,
    "serve": lambda job: serve.serve(job.s, job.command, job.chosen(), job.arguments),
    "bench_training": benchmark,
}


def say_environment() -> None:
    """Print the variables that come from the shell, not from make's command line: they change the run."""
    if "GIVEN" not in os.environ:
        return  # without make everything comes from the environment
    names = {*Settings.__dataclass_fields__, *Command.__dataclass_fields__} - {"STAGE", "TASK", "STACK"}
    given = [name for name in sorted(names - set(os.environ["GIVEN"].split())) if os.environ.get(name)]
    if given:
        said = ", ".join(f"{name}={os.environ[name]}" for name in given)
        print(f"from your environment: {masked(said)}", file=sys.stderr, flush=True)


def about(job: Job) -> Job:
    """``job`` with the run that an evaluation uses, and that run's settings."""
    # The models are given, so no run is used.
    given = job.model and (job.goal in ("chat", "batch", "serve") or (job.goal == "compare" and job.command.BASE))
    if given or not job.stage.about_a_run:
        return job
    if run_used := folder.find_run(job.s, job.arguments, job.model):
        print(f"run {run_used.folder.name}, {chosen_step(run_used, job.command.STEP)}")
        made = folder.settings_of(run_used, job.s)
        given = [name for name in os.environ.get("GIVEN", "").split() if name in Settings.__dataclass_fields__]
        if own := [f"{name}={getattr(made, name)}" for name in given if getattr(made, name) != getattr(job.s, name)]:
            print(f"  the run's {', '.join(own)}, not what is given: an evaluation is as the training was")
        then = run_used.settings
        limits = [name for name in folder.LIMITS if os.environ.get(name) and then.get(name) != getattr(made, name)]
        if limits:
            taken = ", ".join(f"{name}={getattr(made, name)} (trained with {then.get(name)})" for name in limits)
            print(f"  as given: {taken}")
        return replace(job, s=made, run=run_used)
    return job


def chosen_step(of: Run, given: str) -> str:
    """The checkpoint STEP=``given`` of a run, in words."""
    step = of.step(given)
    why = "" if given or step == of.last else f", the best of its validations (STEP=latest: {of.last})"
    return f"checkpoint of step {step}{why}"


def refuse(job: Job) -> None:
    """Raise SettingsError for a stage that this task, method or stack does not have."""
    s, goal = job.s, job.goal
    if goal not in (*STAGES, *own_stages(s.task_dir)):
        having = [path.parent.name for path in sorted(s.task_dir.parent.glob(f"*/{goal}.py"))]
        if not having:
            raise SettingsError(f"STAGE={goal}: no such stage; there are: {', '.join(sorted(STAGES))}")
        raise SettingsError(f"TASK={s.TASK}: has no {goal}.py; `make {goal}` is for {', '.join(having)}")
    if s.multi_turn and not job.stage.episodes:
        raise SettingsError(f"TASK={s.TASK}: has episodes of several turns; `make {goal}` is for single-turn tasks")
    if goal == "certify" and s.by_pairs:
        raise SettingsError(f"METHOD={s.METHOD}: samples nothing in training; `make certify` is for the RL methods")
    if goal == "certify" and not verl_versions.has_own_trainers(s):
        differs = f"STACK={s.STACK}: has verl {verl_versions.wanted(s)}, whose agent loop differs"
        raise SettingsError(f"{differs}; `make certify` plays that of verl 0.9.1, with STACK=cpu")
    if job.stage.verl and s.needs_verl:
        verl_versions.check_installed(s)


def main(goal: str, arguments: list[str]) -> None:
    if goal == "rehearse":  # the settings of another machine's run
        say_environment()
        rehearse.main(arguments)
        return
    # An experiment's TEACHER is for one of METHODS; ``planned`` gives it to that one.
    alone = goal == "experiment" and os.environ.get("METHOD") != "distill"
    s, command = load_settings(os.environ | ({"TEACHER": ""} if alone else {})), load_settings(cls=Command)
    paths = {"ARTIFACTS": str(artifacts()), "PYTHONPATH": PYTHON_PATH}  # processes run in other folders
    os.environ.update(stack_environment(s, os.environ) | paths)
    job = Job(goal, s, command, arguments, os.environ.get("MODEL", ""))
    say_environment()
    os.environ["AGENT_IMAGE"] = s.AGENT_IMAGE  # for programs, in this process and in verl's (rewards/program.py)
    refuse(job)
    if goal in AT_ONCE:
        AT_ONCE[goal](job)
        return
    if goal == "batch":
        from verl_tasks.evaluation import batch

        batch.paths(command)
    if goal == "serve":
        serve.check(command)
    job = about(job)
    s = job.s
    if goal not in ("merge", "export", "serve"):
        load_reward(s)  # a broken reward.py ends the command before anything starts
    with _locked(s):
        first = command.FROM if job.trains else "data"
        if first != "data":
            _shared_data(s, first)
        if job.trains:
            check_training(s, arguments)
        runs = experiments.planned(s, command) if goal == "experiment" else {}
        if "sft" in job.stage.parts:  # something is trained
            doctor.before_training(s, arguments, goal, list(runs.values()), command.JOBS)
        if goal == "experiment":
            experiment(job, runs)
        else:
            own = functools.partial(evaluate, name=f"{goal}.py")  # a stage of the task's own
            parts = {name: functools.partial(PARTS.get(name, own), job) for name in job.parts}
            run_stages(minutes.kept(s, arguments, parts, job.expected) if job.trains else parts, first)
        if job.trains:
            closing(s, folder.rounds(s, arguments), command.STEP)
        if goal == "batch":
            script(s, "evaluate.py", "batch", job.chosen())
    if goal in LAST:  # the lock is free again
        LAST[goal](job)


if __name__ == "__main__":
    interrupt_on_sigterm()
    said = "stopped" + "; the same command continues" * ("sft" in stage_of(sys.argv[1]).parts)
    with errors_in_one_line(SettingsError, DataError, RewardError, stopped=said):
        main(sys.argv[1], sys.argv[2:] or given_arguments())
