"""The tables of every report, on screen and as Markdown. Text that a model wrote is made harmless first."""

import os
import re
import time

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tasks.common.evaluation.statistics import Estimate
from tasks.common.evaluation.summary import MEANING, Difference
from tasks.common.text import one_line, printable


def meaning(name: str) -> str:
    """What a metric is; empty for a component of the reward and a task's own metrics."""
    return MEANING.get("pass@k" if name.startswith("pass@") else name, "")


def sizes(summary: dict) -> str:
    """The numbers of prompts and samples of a summary, with what could not be counted."""
    text = f"{summary['prompts']} prompts, {summary['samples']} samples each"
    if summary["left_out"]:
        text += f"; {summary['left_out']} prompts left out (longer than MAX_PROMPT_LENGTH)"
    if summary["errors"]:
        text += f"; {summary['errors']} completions not counted: the reward raised on them"
    return text


def p_text(p_value: float) -> str:
    return f"{p_value:.4f}" if p_value >= 0.0001 else "< 0.0001"


def comparison_rows(summaries: dict[str, dict], changes: dict[str, Difference] | None = None) -> list[list[str]]:
    """One row a metric: its name, its estimate for each model, and the difference with its p-value if given."""
    names = list(dict.fromkeys(name for summary in summaries.values() for name in summary["metrics"]))
    rows = []
    for name in names:
        cells = [name]
        for summary in summaries.values():
            value = summary["metrics"].get(name)
            cells.append(str(Estimate(**value)) if value else "-")
        if changes is not None:
            change = changes.get(name)
            cells += [change.estimate.signed(), f"{p_text(change.p_value)} ({change.test})"] if change else ["-", "-"]
        rows.append(cells)
    return rows


def show_table(title: str, header: list[str], rows: list[list[str]]) -> None:
    """Print a table under its title; wide enough for it where there is no terminal."""
    table = Table()
    for name in header:
        table.add_column(escape(name), overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    print(f"\n{printable(title)}", flush=True)
    Console(width=None if os.isatty(1) else 160, highlight=False).print(table)


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    """A table in GitHub's form; what a cell contains cannot end it."""
    lines = [header, ["---"] * len(header), *[[markdown_text(cell) for cell in row] for row in rows]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def markdown_text(text: str) -> str:
    """``text`` as plain text: no markup, no HTML, on one line."""
    text = re.sub(r"([\\`*_{}\[\]>#|!~])", r"\\\1", one_line(text, 300))
    return text.replace("&", "&amp;").replace("<", "&lt;")


def total_time() -> str:
    """``, 830 s in all`` since make started, installation included; empty outside make."""
    started = os.environ.get("STARTED")
    return f", {time.time() - float(started):.0f} s in all" if started else ""
