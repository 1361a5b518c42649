"""The stage `train`: rounds of RL or DPO, each from the model that the one before made, and the checks before them.

`python -m verl_tasks.launch.rounds ARGS` is one training of an experiment with JOBS, which has the lock.
"""

import sys

from verl_tasks.launch import train
from verl_tasks.leftovers import interrupt_on_sigterm
from verl_tasks.machine import cluster
from verl_tasks.models.find import resolve_model
from verl_tasks.process import errors_in_one_line
from verl_tasks.rewards.answers import RewardError
from verl_tasks.rows import DataError
from verl_tasks.runs import folder, validation
from verl_tasks.runs.run import export, recorded
from verl_tasks.settings import Settings, SettingsError, load_settings, method
from verl_tasks.training import tracking


def check_training(s: Settings, arguments: list[str]) -> None:
    """Before anything starts, raise SettingsError for settings that would fail later, and print warnings."""
    tracking.check_loggers(s)
    *_, last_round = begun = folder.rounds(s, arguments)  # raises for a RUN of other settings
    following = s.runs_dir / f"{s.RUN}-round{len(begun) + 1}"
    complete = last_round.complete(s)
    if s.RUN and len(begun) < s.SELF_PLAY_ROUNDS and not complete and recorded(following):
        started = f"{following.name} started from {last_round.folder.name} as it is"
        raise SettingsError(f"RUN={s.RUN}: {started}; take another name")
    config = train.check_method(s, arguments)
    if problem := method(s.METHOD).models_problem(config):
        raise SettingsError(problem)
    if said := method(s.METHOD).warning(config):
        print(f"warning: {said}")
    if not complete and not s.by_pairs:
        cluster.join(s)


def start_model(s: Settings) -> str:
    """The start of RL and DPO: MODEL, or its warm-up. Raises SettingsError when there is no warm-up yet."""
    if s.INIT == "base":
        return resolve_model(s.MODEL)
    run = folder.sft_run(s)
    if not run.warmed(s):
        raise SettingsError(f"INIT=sft: there is no warm-up for these settings; run `make sft TASK={s.TASK}` first")
    return str(export(run))


def train_rounds(s: Settings, arguments: list[str], seconds: float = 0) -> str:
    """SELF_PLAY_ROUNDS trainings of STEPS, in about ``seconds`` (0: unknown). Each starts from the last result, which
    is also its reference."""
    start, said = start_model(s), ""
    for number in range(1, s.SELF_PLAY_ROUNDS + 1):
        run = folder.rl_run(s, arguments, number, start)
        if s.SELF_PLAY_ROUNDS > 1:
            print(f"  round {number} of {s.SELF_PLAY_ROUNDS}: {run.folder.name}")
        done = run.complete(s)
        if not done and s.by_pairs:
            run = train.train_on_pairs(s, arguments, number, start, run)
        elif not done:
            run = train.train(s, arguments, number, start, run, seconds / s.SELF_PLAY_ROUNDS)
        dev, steps = validation.words(run.scores), train.said_steps(run, run.wanted(s), s)
        said = f"{'up to date: ' if done else ''}{steps} in {run.folder}{f'; {dev}' if dev else ''}"
        start = str(export(run))
    return said


if __name__ == "__main__":
    interrupt_on_sigterm()
    with errors_in_one_line(SettingsError, DataError, RewardError, stopped="stopped; the same command continues"):
        print(train_rounds(load_settings(), sys.argv[1:]))
