"""The command line of a task's evaluate.py: sample models on the task's prompts, score them with its reward, report."""

import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from tasks.common.evaluation import attack, batch, chat, compare, experiment, probe, self_samples
from tasks.common.evaluation.lenient import read as read_leniently
from tasks.common.evaluation.rollouts import Rollout, in_order, read_rollouts, rescored, write_rollouts
from tasks.common.evaluation.sample import Job, Scoring, report_errors, sampled, test_job
from tasks.common.evaluation.summary import Difference, OwnMetrics, differences, summarize
from tasks.common.evaluation.tables import GAIN, LOSS, comparison_table, headline, outcome, show_table, sizes, verdict
from tasks.common.files import read_json, write_json
from tasks.common.interrupts import interrupt_on_sigterm
from tasks.common.process import errors_in_one_line
from tasks.common.rewards.answers import JudgeError
from tasks.common.rewards.environment import Environment
from tasks.common.rows import DataError
from tasks.common.runs.folder import more_training, run_of
from tasks.common.runs.run import Run
from tasks.common.runs.validation import best
from tasks.common.settings import Command, Settings, SettingsError, artifacts, fingerprint, load_settings

STOPPED = "stopped; finished samples are kept, the same command continues"


def evaluate(s: Settings, command: Command, scoring: Scoring, models: dict[str, str]) -> int:
    """`make eval`: a table of ``models`` (label to path), the last one's difference to the warm-up, else to the first
    one, in words too, and summary.json beside each model's rollouts. Returns the number of completions on which the
    reward raised."""
    root = artifacts() / "eval" / s.TASK
    jobs = {label: test_job(s, model) for label, model in models.items()}
    all_rollouts, summaries = summarized(
        jobs, root, scoring, lambda rollouts: summarize(rollouts, scoring.own_metrics), command.STAGE == "eval"
    )
    *earlier, last = models
    before = "sft" if "sft" in earlier else next(iter(earlier), None)
    title = f"{s.TASK}: {sizes(summaries[last])}; mean [95 % interval]"
    if before is None:
        show_table(title, *comparison_table(summaries))
        print(*outcome("", summaries, None), sep="\n")
        return report_errors(all_rollouts[last])
    changes, pair = differences(all_rollouts[before], all_rollouts[last], scoring.own_metrics), f"{last} - {before}"
    paired = {"to": models[before], "metrics": {name: asdict(change) for name, change in changes.items()}}
    write_json(jobs[last].folder(root) / "summary.json", {"model": models[last], **summaries[last], "paired": paired})
    header, rows = comparison_table(summaries, changes, pair)
    show_table(title, header[:-1], [row[:-1] for row in rows])
    print(*outcome(pair, summaries, changes), sep="\n")
    if changes:
        warm_up = summaries[before]["metrics"].get("pass@1") if before == "sft" else None
        change, folder = changes[headline(changes)], run_of(models[last], s.runs_dir)
        run = Run.read(folder) if folder else None
        if last != "sft" and (tries := next_steps(s, models[before], change, warm_up, run)):
            print("\n".join(["What to try:", *(f"  {line}" for line in tries)]), flush=True)
    return report_errors([r for rollouts in all_rollouts.values() for r in rollouts])


def next_steps(s: Settings, start: str, change: Difference, warm_up: dict | None, run: Run | None) -> list[str]:
    """What to try where a training from the model ``start`` with ``s`` brought no clear gain; else nothing.

    ``warm_up``: pass@1 of the SFT warm-up, where the training started from one. ``run``: the last round, if known.
    """
    if (judged := verdict(change)) == GAIN:
        return []
    dev = run.metrics if run else {}
    top, last = best(dev), max(dev, default=0)
    if judged == LOSS:
        return _after_a_loss(s, validated=top is not None)
    file = probe.newest(s.TASK, lambda model: model == start)
    without = f"make probe TASK={s.TASK} says whether the data has signal for it"
    more = [f"{what}: the same command with {change}" for change, what in more_training(s, run)]
    if s.by_pairs:
        more[-1] += f", or a weaker pull to the start: DPO_BETA={s.DPO_BETA / 2:g}"
    rare = warm_up is not None and warm_up["value"] < probe.RARE
    rate = f"another learning rate: LR={2 * s.LR:g}, and lower if the reward falls"
    probed = f"the probe of the model it started from: {read_json(file)['conclusion'] if file else without}"
    past = top is not None and top < last  # the steps after it brought nothing
    return [
        *([f"a longer warm-up, which is right too rarely to learn from: SFT_STEPS={2 * s.SFT_STEPS}"] if rare else []),
        *([probed, rate, *more] if past else [*more, probed, rate]),
        "more test prompts: a larger TEST_SIZE narrows the interval",
    ]


def _after_a_loss(s: Settings, validated: bool) -> list[str]:
    """What to try where the training made the model worse. ``validated``: so this is its best checkpoint already."""
    rate = f"a lower learning rate: LR={s.LR / 2:g}"
    if s.by_pairs:
        fewer = [f"fewer epochs over the pairs: DPO_EPOCHS={s.DPO_EPOCHS - 1}"] if s.DPO_EPOCHS > 1 else []
        return [f"{rate}, or a stronger pull to the start: DPO_BETA={2 * s.DPO_BETA:g}", *fewer]
    earlier = "an earlier checkpoint: validate (TEST_FREQ), keep more (KEEP) and take STEP=best"
    return [
        rate if s.METHOD == "distill" else f"{rate}, or KL_COEF={2 * s.KL_COEF or 0.01:g}",
        *([] if validated else [earlier]),
    ]


def summarized(
    jobs: dict[str, Job], root: Path, scoring: Scoring, summary: Callable[[list[Rollout]], dict], shown: bool = True
) -> tuple[dict[str, list[Rollout]], dict[str, dict]]:
    """Rollouts and ``summary`` of each job, by label. Writes summaries beside the rollouts; ``shown``: prints where."""
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
        raise DataError(f"{source}: has no complete line")
    if cut:
        print(f"  {source}: its last line was cut off and is skipped")
    stored = in_order({(r.index, r.mode, r.sample): r for r in stored}.values())  # the last of repeated ones
    rollouts = read_leniently([rescored(each, scoring.compute_score) for each in stored], scoring.compute_score, None)
    changed = sum(old.reward != new.reward for old, new in zip(stored, rollouts, strict=True))
    summary = summarize(rollouts, scoring.own_metrics)
    folder = artifacts() / "eval" / s.TASK / f"rescored-{fingerprint({'file': str(source.resolve())})}"
    write_rollouts(folder / "rollouts.jsonl", rollouts)
    write_json(folder / "summary.json", {"model": f"rollouts of {source}", **summary})
    show_table(f"{s.TASK}: {sizes(summary)}", *comparison_table({"mean [95 % interval]": summary}))
    print(f"{changed} of {len(rollouts)} completions have another reward than stored; written to {folder}")
    return report_errors(rollouts)


def main(
    compute_score: Callable | None = None,
    own_metrics: OwnMetrics | None = None,
    environment: type[Environment] | None = None,
) -> None:
    """Run one command: ``probe MODEL``, ``eval LABEL=MODEL ...``, ``compare BASE MODEL``, ``rescore``,
    ``attack``, ``chat MODEL``, ``batch MODEL``, ``pairs MODEL OUT`` or ``accepted MODEL OUT``. A multi-turn task
    gives its ``environment`` in place of ``compute_score``, and has all but ``rescore`` and ``pairs``. Settings come
    from the environment. Exits with 1 after one line that says why, also when the reward raised on some completion."""
    interrupt_on_sigterm()
    name, *arguments = sys.argv[1:]
    with errors_in_one_line(SettingsError, DataError, JudgeError, stopped="" if name == "attack" else STOPPED):
        s, command = load_settings(), load_settings(cls=Command)
        scoring = Scoring.of(s, compute_score, own_metrics, environment)
        models = dict(each.split("=", 1) for each in arguments) if name in ("eval", "experiment") else {}
        commands: dict[str, Callable[[], int]] = {
            "probe": lambda: probe.probe(s, command, scoring, *arguments),
            "eval": lambda: evaluate(s, command, scoring, models),
            "compare": lambda: compare.compare(s, scoring, *arguments),
            "experiment": lambda: experiment.experiment(s, scoring, models),
            "rescore": lambda: rescore(s, command, scoring),
            "attack": lambda: attack.attack(s, command, scoring.compute_score, environment),
            "chat": lambda: chat.chat(s, scoring, *arguments),
            "batch": lambda: batch.batch(s, command, scoring, *arguments),
            "pairs": lambda: self_samples.write_pairs(s, scoring, *arguments),
            "accepted": lambda: self_samples.write_accepted(s, scoring, *arguments),
        }
        if errors := commands[name]():
            sys.exit(f"error: the reward raised on {errors} completions, which count in no metric; all else was done")
