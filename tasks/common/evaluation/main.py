"""The command line of a task's evaluate.py: sample models on the task's prompts, score, report.

The reward that trains is the reward that reports. A task's evaluate.py calls ``main`` with its own ``compute_score``
and, if it has any, its own metrics.
"""

import sys
from collections.abc import Callable
from pathlib import Path

from tasks.common.data.rows import DataError
from tasks.common.evaluation import attack, batch, chat, compare, experiment, probe, self_samples
from tasks.common.evaluation.rollouts import Rollout, in_order, read_rollouts, rescored, write_rollouts
from tasks.common.evaluation.sample import Job, Scoring, report_errors, sample_here, sampled, test_job
from tasks.common.evaluation.summary import OwnMetrics, changes_as_dicts, differences, summarize
from tasks.common.evaluation.tables import comparison_rows, show_table, sizes
from tasks.common.evaluation.verdict import gain, headline, next_steps
from tasks.common.files import write_json
from tasks.common.process import errors_in_one_line, interrupt_on_sigterm
from tasks.common.rewards.answers import JudgeError, of_variant
from tasks.common.settings import (
    Command,
    Settings,
    SettingsError,
    artifacts,
    code_digest,
    fingerprint,
    judge_settings,
    load_settings,
)

STOPPED = "stopped; what was sampled is kept, the same command goes on from there"


def evaluate(s: Settings, command: Command, scoring: Scoring, models: dict[str, str]) -> int:
    """`make eval`: a table of ``models`` (label to path), the last one's difference to the one before it, in words too,
    and summary.json beside each model's rollouts. Returns the number of completions on which the reward raised."""
    root = artifacts() / "eval" / s.TASK
    jobs = {label: test_job(s, model) for label, model in models.items()}
    all_rollouts, summaries = summarized(
        jobs, root, scoring, lambda rollouts: summarize(rollouts, scoring.own_metrics), command.STAGE == "eval"
    )
    labels, changes = list(models), None
    if len(labels) > 1:
        before, last = labels[-2:]
        changes = differences(all_rollouts[before], all_rollouts[last], scoring.own_metrics)
        paired = {"paired": {"to": models[before], "metrics": changes_as_dicts(changes)}}
        write_json(jobs[last].folder(root) / "summary.json", {"model": models[last], **summaries[last], **paired})
    rows = [row[:-1] if changes else row for row in comparison_rows(summaries, changes)]
    header = ["metric", *labels, *([f"{labels[-1]} - {labels[-2]}, paired"] if changes else [])]
    title = f"{s.TASK}: {sizes(summaries[labels[-1]])}; mean [95 % interval]"
    show_table(title, header, rows)
    if changes and (name := headline(changes)):
        print(gain(f"{last} - {before}", name, changes[name]))
        if last != "sft" and (tries := next_steps(s, models[before], changes[name])):
            print("\n".join(["What to try:", *(f"  {line}" for line in tries)]), flush=True)
    return report_errors([r for rollouts in all_rollouts.values() for r in rollouts])


def summarized(
    jobs: dict[str, Job], root: Path, scoring: Scoring, summary: Callable[[list[Rollout]], dict], shown: bool = True
) -> tuple[dict[str, list[Rollout]], dict[str, dict]]:
    """Rollouts and ``summary`` of each job, by label; the summary is written beside the rollouts. ``shown``: print
    where."""
    rollouts, any_sampled = sampled(jobs, root, scoring)
    summaries = {label: summary(rollouts[label]) for label in jobs}
    for label, job in jobs.items():
        write_json(job.folder(root) / "summary.json", {"model": job.model, **summaries[label]})
        if shown:
            print(f"  {label}: {job.model}\n    {job.folder(root)}")
    if not any_sampled:
        print("  up to date: nothing to sample")
    return rollouts, summaries


def rescore(s: Settings, command: Command, scoring: Scoring) -> int:
    """`make rescore ROLLOUTS=file`: score stored rollouts again, without a model; the file itself stays as it is."""
    if not command.ROLLOUTS:
        raise SettingsError("ROLLOUTS is empty: give a rollouts.jsonl (under artifacts/eval, artifacts/probe)")
    source = Path(command.ROLLOUTS)
    stored, cut = read_rollouts(source)
    if not stored:
        raise DataError(f"{source}: has no whole line")
    if cut:
        print(f"  {source}: its last line was cut off and is left out")
    unique = {(r.index, r.mode, r.sample): r for r in stored}  # the last of repeated ones
    rollouts = in_order(rescored(rollout, scoring.compute_score) for rollout in unique.values())
    before = {key: rollout.reward for key, rollout in unique.items()}
    changed = sum(before[(r.index, r.mode, r.sample)] != r.reward for r in rollouts)
    summary = summarize(rollouts, scoring.own_metrics)
    folder = artifacts() / "eval" / s.TASK / f"rescored-{fingerprint({'file': str(source.resolve())})}"
    write_rollouts(folder / "rollouts.jsonl", rollouts)
    write_json(folder / "summary.json", {"model": f"rollouts of {source}", **summary})
    show_table(f"{s.TASK}: {sizes(summary)}", ["metric", "mean [95 % interval]"], comparison_rows({"": summary}))
    print(f"{changed} of {len(rollouts)} completions have another reward than stored; written to {folder}")
    return report_errors(rollouts)


def main(compute_score: Callable, own_metrics: OwnMetrics | None = None) -> None:
    """Run one command: ``probe MODEL``, ``eval LABEL=MODEL ...``, ``compare BASE MODEL``, ``rescore``, ``attack``,
    ``chat MODEL``, ``batch MODEL``, ``pairs MODEL OUT``, ``accepted MODEL OUT`` or, called by these, ``sample JOB``.
    All else comes from the environment that train.sh exports.

    Exits with 1 after one line that says why, also when the reward raised on some completion.
    """
    interrupt_on_sigterm()
    name, *arguments = sys.argv[1:]
    with errors_in_one_line(
        SettingsError, DataError, JudgeError, stopped="" if name in ("sample", "attack") else STOPPED
    ):
        s, command = load_settings(), load_settings(cls=Command)
        mark = fingerprint({"variant": s.REWARD, "code": code_digest(s.task_dir / "reward.py")} | judge_settings())
        scoring = Scoring(of_variant(compute_score, s.REWARD), own_metrics, mark)
        commands: dict[str, Callable[[], int]] = {
            "probe": lambda: probe.probe(s, command, scoring, *arguments),
            "eval": lambda: evaluate(s, command, scoring, dict(pair.split("=", 1) for pair in arguments)),
            "compare": lambda: compare.compare(s, scoring, *arguments),
            "experiment": lambda: experiment.experiment(s, scoring, dict(pair.split("=", 1) for pair in arguments)),
            "rescore": lambda: rescore(s, command, scoring),
            "attack": lambda: attack.attack(s, command, scoring.compute_score),
            "chat": lambda: chat.chat(s, scoring, *arguments),
            "batch": lambda: batch.batch(s, command, scoring, *arguments),
            "pairs": lambda: self_samples.write_pairs(s, scoring, *arguments),
            "accepted": lambda: self_samples.write_accepted(s, scoring, *arguments),
            "sample": lambda: sample_here(arguments, scoring),
        }
        if errors := commands[name]():
            sys.exit(f"error: the reward raised on {errors} completions, which count in no metric; all else was done")
