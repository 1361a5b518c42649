"""The command line of a task's evaluate.py: sample models on the task's prompts, score them with its reward, report."""

import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from verl_tasks.ends import CUT, advice
from verl_tasks.evaluation import attack, batch, chat, compare, experiment, probe, self_samples
from verl_tasks.evaluation.lenient import read as read_leniently
from verl_tasks.evaluation.rollouts import Rollout, in_order, read_rollouts, rescored, write_rollouts
from verl_tasks.evaluation.sample import Job, Scoring, bounds, endpoint_job, report_errors, sampled, test_job
from verl_tasks.evaluation.summary import Difference, OwnMetrics, differences, summarize
from verl_tasks.evaluation.tables import (
    GAIN,
    LOSS,
    all_sizes,
    comparison_table,
    headline,
    outcome,
    show_table,
    sizes,
    verdict,
)
from verl_tasks.files import read_json, write_json
from verl_tasks.leftovers import interrupt_on_sigterm
from verl_tasks.process import errors_in_one_line
from verl_tasks.rewards.answers import JudgeError
from verl_tasks.rewards.environment import Environment
from verl_tasks.rows import DataError
from verl_tasks.settings import Command, Settings, SettingsError, artifacts, fingerprint, load_settings
from verl_tasks.text import show

EASY = 0.9  # right before RL: what is left is less than most intervals
STOPPED = "stopped; finished samples are kept, the same command continues"


def evaluate_models(s: Settings, command: Command, scoring: Scoring, models: dict[str, str]) -> int:
    """`make eval`: a table of ``models`` (label to path), in front the endpoint BASE_URL, and the last one's difference
    to the warm-up, else to the first one, in words too; summary.json beside each model's rollouts. Returns the number
    of completions on which the reward raised."""
    root = artifacts() / "eval" / s.TASK
    asked = {command.MODEL_NAME: endpoint_job(s, command)} if command.BASE_URL else {}
    jobs = asked | {label: test_job(s, model) for label, model in models.items()}
    all_rollouts, summaries = summarized(
        jobs,
        root,
        scoring,
        lambda rollouts: summarize(rollouts, scoring.own_metrics, scoring.most),
        command.STAGE == "eval",
    )
    for name, job in asked.items():
        counted = (f"{count:,} {what}" for what, count in read_json(job.folder(root) / "usage.json").items())
        print(f"  {name} at {job.endpoint}: {', '.join(counted).replace('_', ' ')} in all")
    *earlier, last = models or asked
    before = "sft" if "sft" in earlier else next(iter(earlier), None)
    title = f"{s.TASK}: {all_sizes(summaries)}; mean [95 % interval]"
    if before is None:
        show_table(title, *comparison_table(summaries))
        show("\n".join(outcome("", summaries, None)))
        return report_errors(all_rollouts[last])
    changes, pair = differences(all_rollouts[before], all_rollouts[last], scoring.own_metrics), f"{last} - {before}"
    paired = {"to": models[before], "metrics": {name: asdict(change) for name, change in changes.items()}}
    write_json(jobs[last].folder(root) / "summary.json", {"model": models[last], **summaries[last], "paired": paired})
    header, rows = comparison_table(summaries, changes, pair)
    show_table(title, header[:-1], [row[:-1] for row in rows])
    show("\n".join(outcome(pair, summaries, changes)))
    if last != "sft" and changes:
        name = headline(changes)
        tries = next_steps(s, changes[name], all_rollouts[last], summaries[before]["metrics"][name]["value"])
        if tries:
            show("\n".join(["What to try:", *(f"  {line}" for line in tries)]))
    return report_errors([r for rollouts in all_rollouts.values() for r in rollouts])


def next_steps(s: Settings, change: Difference, rollouts: list[Rollout], start: float = 0) -> list[str]:
    """What to try where a training with ``s`` brought no clear gain, beside more of it (launch/main.py, closing).
    ``rollouts``: of the trained model; ``start``: the value, 0 to 1, from which ``change`` is counted."""
    if (judged := verdict(change)) == GAIN:
        return []
    cut = [r.finish_reason for r in rollouts if r.finish_reason in CUT]
    first = [f"first the samples that are cut off: {advice(cut, bounds(s))}"] if 2 * len(cut) > len(rollouts) else []
    if judged == LOSS:
        return [*first, f"a lower learning rate: LR={s.LR / 2:g}"]
    if start > EASY:
        warm = "a shorter warm-up (SFT_STEPS), or " if s.INIT == "sft" else ""
        return [*first, f"{warm}harder problems: {start:.0%} are right before RL, which leaves little to learn"]
    return [
        *first,
        f"another learning rate: LR={2 * s.LR:g}, and lower if the reward falls",
        f"make probe TASK={s.TASK} says whether the data has signal for the model that it started from",
        f"more test prompts: a larger {'LIMIT' if s.LIMIT else 'TEST_SIZE'} narrows the interval",
    ]


def summarized(
    jobs: dict[str, Job], root: Path, scoring: Scoring, summary: Callable[[list[Rollout]], dict], shown: bool = True
) -> tuple[dict[str, list[Rollout]], dict[str, dict]]:
    """Rollouts and ``summary`` of each job, by label. Writes summaries beside the rollouts; ``shown``: prints where."""
    rollouts = sampled(jobs, root, scoring)
    summaries = {label: summary(rollouts[label]) for label in jobs}
    for label, job in jobs.items():
        write_json(job.folder(root) / "summary.json", {"model": job.model, **summaries[label]})
        if shown:
            show(f"  {label}: {job.model}\n    {job.folder(root)}")
    return rollouts, summaries


def rescore(s: Settings, command: Command, scoring: Scoring) -> int:
    """`make rescore ROLLOUTS=file`: score stored rollouts again, without a model; the file itself stays as it is."""
    if not command.ROLLOUTS:
        raise SettingsError("ROLLOUTS is empty: give a rollouts.jsonl (under artifacts/eval, artifacts/probe)")
    source = Path(command.ROLLOUTS)
    stored, cut = read_rollouts(source)
    if not stored:
        raise DataError(f"{source}: has no complete line")
    if cut:
        print(f"  {source}: its last line was cut off and is skipped")
    last = {(r.index, r.mode, r.sample): r for r in stored}
    if other := next((r for r in stored if r.prompt != last[r.index, r.mode, r.sample].prompt), None):
        raise DataError(f"{source}: prompt {other.index} has two texts: two test sets; rescore each alone")
    if repeated := len(stored) - len(last):
        print(f"  {source}: {repeated} of {len(stored)} lines repeat a prompt's sample; the last of each counts")
    stored = in_order(last.values())
    rollouts = read_leniently([rescored(each, scoring.compute_score) for each in stored], scoring.compute_score, None)
    changed = sum(old.reward != new.reward for old, new in zip(stored, rollouts, strict=True))
    summary = summarize(rollouts, scoring.own_metrics, scoring.most)
    folder = artifacts() / "eval" / s.TASK / f"rescored-{fingerprint({'file': str(source.resolve())})}"
    write_rollouts(folder / "rollouts.jsonl", rollouts)
    write_json(folder / "summary.json", {"model": f"rollouts of {source}", **summary})
    show_table(f"{s.TASK}: {sizes(summary)}", *comparison_table({"mean [95 % interval]": summary}))
    show(f"{changed} of {len(rollouts)} completions have another reward than stored; written to {folder}")
    return report_errors(rollouts)


def evaluate(
    compute_score: Callable | None = None,
    own_metrics: OwnMetrics | None = None,
    environment: type[Environment] | None = None,
) -> None:
    """Run one command: ``probe MODEL``, ``eval LABEL=MODEL ...``, ``compare BASE MODEL``, ``rescore``,
    ``attack``, ``chat MODEL``, ``batch MODEL``, ``pairs MODEL OUT`` or ``accepted MODEL OUT``. A multi-turn task
    gives its ``environment`` in place of ``compute_score``, and has all but ``rescore`` and ``pairs``. Settings come
    from the environment. Exits with 1 after one line that says why, also when the reward raised on some completion."""
    interrupt_on_sigterm()
    name, *arguments = sys.argv[1:] or [""]
    stopped = "" if name in ("attack", "chat") else STOPPED
    with errors_in_one_line(SettingsError, DataError, JudgeError, stopped=stopped):
        s, command = load_settings(), load_settings(cls=Command)
        scoring = Scoring.of(s, compute_score, own_metrics, environment)
        models = dict(each.split("=", 1) for each in arguments) if name in ("eval", "experiment") else {}
        commands: dict[str, Callable[[], int]] = {
            "probe": lambda: probe.probe(s, command, scoring, *arguments),
            "eval": lambda: evaluate_models(s, command, scoring, models),
            "compare": lambda: compare.compare(s, scoring, *arguments),
            "experiment": lambda: experiment.experiment(s, scoring, models),
            "rescore": lambda: rescore(s, command, scoring),
            "attack": lambda: attack.attack(s, command, scoring.compute_score, environment),
            "chat": lambda: chat.chat(s, scoring, *arguments),
            "batch": lambda: batch.batch(s, command, scoring, *arguments),
            "pairs": lambda: self_samples.write_pairs(s, scoring, *arguments),
            "accepted": lambda: self_samples.write_accepted(s, scoring, *arguments),
        }
        if name not in commands:
            words = ", ".join(commands)
            raise SettingsError(f"{' '.join(sys.argv[:2])}: the first word must be one of {words}; make gives it")
        if errors := commands[name]():
            sys.exit(f"error: the reward raised on {errors} completions, which count in no metric; all else was done")
