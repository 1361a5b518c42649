"""The tables and sentences of every report, on screen and as Markdown. Text that a model wrote is made harmless."""

import os
import re
import time
from dataclasses import replace
from io import StringIO

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from verl_tasks.ends import TIMEOUT, cut_key
from verl_tasks.evaluation.statistics import Estimate
from verl_tasks.evaluation.summary import MEANING, Difference
from verl_tasks.text import one_line, printable, show

GAIN, LOSS = "a gain", "a loss"
SLOW = 0.05  # of the episodes out of time: they may move a mean by more than most gains


def sizes(summary: dict) -> str:
    """The numbers of prompts and samples of a summary, with what could not be counted."""
    of = f" of {summary['conversations']} conversations" if "conversations" in summary else ""
    fewest = f"{summary['fewest']} to " if "fewest" in summary else ""
    text = f"{summary['prompts']} prompts{of}, {fewest}{summary['samples']} samples each"
    if summary["left_out"]:
        text += f"; {summary['left_out']} prompts left out (longer than MAX_PROMPT_LENGTH)"
    if summary["errors"]:
        text += f"; {summary['errors']} completions not counted: the reward raised on them"
    return text


def all_sizes(summaries: dict[str, dict]) -> str:
    """``sizes`` of several models by label: in one where they are alike."""
    texts = {label: sizes(summary) for label, summary in summaries.items()}
    alike = len({*texts.values()}) == 1
    return texts.popitem()[1] if alike else "; ".join(f"{label}: {text}" for label, text in texts.items())


def p_text(p_value: float) -> str:
    return f"{p_value:.4f}" if p_value >= 0.0001 else "< 0.0001"


def headline(names) -> str | None:
    """The metric that stands for all ``names``: pass@1 is what RL trains, and less noisy than one greedy response."""
    return next((name for name in ("pass@1", "accuracy") if name in names), next(iter(names), None))


def verdict(change: Difference) -> str:
    """GAIN or LOSS where the 95 % interval excludes 0 and the test's p-value is below 0.05; else why it is neither. The
    percentile interval of a few prompts of one sign excludes 0 whatever their number; the test does not."""
    low, high = change.difference.low, change.difference.high
    if low == high == 0:
        return "no prompt differs"
    if low <= 0 <= high:
        return "the interval includes 0, so this may be chance"
    if change.p_value >= 0.05:
        return "too few prompts to tell"
    return GAIN if low > 0 else LOSS


def gain(pair: str, changes: dict[str, Difference] | None) -> str:
    """The headline's difference in one line, with its verdict; ``pair``: "grpo - sft". Empty without one."""
    if not changes:
        return ""
    change = changes[name := headline(changes)]
    return f"{pair}: {name} {change.difference.signed()}, p {p_text(change.p_value)} ({change.test}): {verdict(change)}"


def parts(changes: dict[str, Difference] | None) -> str:
    """Which part of the difference of pass@1 is skill and which is form, in one line: the two add up to it. Skill is
    what a lenient reader sees too; form is what such a reader had found right before. Empty where nobody asked one."""
    if not changes or not {"pass@1", "lenient", "format_loss"} <= changes.keys():
        return ""
    loss = changes["format_loss"].difference
    form = replace(changes["format_loss"], difference=Estimate(0 - loss.value, 0 - loss.high, 0 - loss.low))
    both = {"skill": changes["lenient"], "form": form}
    clear = [f"{judged} of {name}" for name, each in both.items() if (judged := verdict(each)) in (GAIN, LOSS)]
    shares = " and ".join(f"{name} {each.difference.signed()}" for name, each in both.items())
    return f"of it, {shares}: {' and '.join(clear) or 'neither is clear of chance'}"


def of_score(changes: dict[str, Difference] | None) -> str:
    """A clear difference of the score that pass@1 does not have, in one line: partial credit, or a hole. Empty without
    one, and for one sample a prompt, where two tests may differ on the same answers."""
    score, right = ((changes or {}).get(name) for name in ("score", "pass@1"))
    if not score or not right or score.test != right.test:
        return ""
    judged = verdict(score)
    if judged not in (GAIN, LOSS) or judged == verdict(right):
        return ""
    text = f"score {score.difference.signed()}: {judged}, without {judged} of right answers"
    return f"{text}; look at what else the reward pays"


def answers(summaries: dict[str, dict]) -> str:
    """What became of each model's samples, as far as it is known, in one line. Empty for a stage's own metrics."""
    texts, words = [], {"pass@1": "right", "wrong": "wrong", "unreadable": "unreadable"}
    for label, summary in summaries.items():
        known = {word: summary["metrics"][name]["value"] for name, word in words.items() if name in summary["metrics"]}
        if "right" in known:
            texts.append(f"{label}: {', '.join(f'{value:.1%} {word}' for word, value in known.items())}")
    return "; ".join(texts)


def out_of_time(summaries: dict[str, dict]) -> str:
    """Whose episodes ended because a tool or program took too long, in one line: that is of the machine, no skill.
    Empty where it is at most SLOW."""
    shares = {label: summary["metrics"].get(cut_key(TIMEOUT)) for label, summary in summaries.items()}
    slow = [f"{share['value']:.0%} of {label}'s" for label, share in shares.items() if share and share["value"] > SLOW]
    if not slow:
        return ""
    whose = " and ".join(slow)
    return f"warning: {whose} episodes ran out of time: the difference may be the machine's; raise STEP_SECONDS"


def outcome(pair: str, summaries: dict[str, dict], changes: dict[str, Difference] | None) -> list[str]:
    """The lines below a table of models: the difference, its parts, what else the score says, and all answers."""
    differ = [gain(pair, changes), parts(changes), of_score(changes)]
    return list(filter(None, [*differ, answers(summaries), out_of_time(summaries)]))


def gained_text(test: dict) -> str:
    """The prompts gained and lost of compare.json, with their test where it has one."""
    text = f"{test['gained']} prompts gained, {test['lost']} lost"
    return text if test["p_value"] is None else f"{text}: exact McNemar p {p_text(test['p_value'])}"


def comparison_table(
    summaries: dict[str, dict], changes: dict[str, Difference] | None = None, pair: str = "", meanings: bool = False
) -> tuple[list[str], list[list[str]]]:
    """Header and a row per metric: each model's estimate, the difference of ``pair`` and its p-value, the meaning."""
    header = ["metric", *summaries, *([f"{pair} [95 % interval]", "p"] if changes is not None else [])]
    rows = []
    for name in dict.fromkeys(name for summary in summaries.values() for name in summary["metrics"]):
        values = [summary["metrics"].get(name) for summary in summaries.values()]
        row = [name, *(str(Estimate(**value)) if value else "-" for value in values)]
        if changes is not None:
            change = changes.get(name)
            row += [change.difference.signed(), f"{p_text(change.p_value)} ({change.test})"] if change else ["-", "-"]
        if meanings:
            row.append(MEANING.get("pass@k" if name.startswith("pass@") else name, ""))
        rows.append(row)
    return [*header, *(["meaning"] if meanings else [])], rows


def show_table(title: str, header: list[str], rows: list[list[str]]) -> None:
    """Print a table under its title; wide enough for it where there is no terminal."""
    table = Table()
    for name in header:
        table.add_column(escape(name), overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    screen, text = os.isatty(1), StringIO()
    Console(file=text, force_terminal=screen, width=None if screen else 160, highlight=False).print(table)
    show(f"\n{printable(title)}\n{text.getvalue()[:-1]}")


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    """A table in GitHub's form; what a cell contains cannot end it."""
    lines = [header, ["---"] * len(header), *[[markdown_text(cell) for cell in row] for row in rows]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def markdown_text(text: str) -> str:
    """``text`` as plain text: no markup, no HTML, on one line."""
    text = re.sub(r"([\\`*_{}\[\]>#|!~])", r"\\\1", one_line(text, 300))
    return text.replace("&", "&amp;").replace("<", "&lt;")


def total_time(resumed: bool = False) -> str:
    """``, 830 s in all`` since make started, installation included; empty outside make. ``resumed``: in this one."""
    started = os.environ.get("STARTED")
    return f", {time.time() - float(started):.0f} s {'in this command' if resumed else 'in all'}" if started else ""
