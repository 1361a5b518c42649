"""What a stage of one task needs, the program ``tasks/<task>/<stage>.py``: its variables, models that answer, tables,
and errors in one line."""

import gc
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from verl_tasks.ends import CUT
from verl_tasks.evaluation.engine_pool import Hardware
from verl_tasks.evaluation.engines import Request, window
from verl_tasks.evaluation.main import STOPPED, summarized
from verl_tasks.evaluation.rollouts import SAMPLED, TOO_LONG, Rollout
from verl_tasks.evaluation.sample import Job, Scoring, check_window, report_errors, sampling
from verl_tasks.evaluation.statistics import Estimate, bootstrap_mean, proportion
from verl_tasks.evaluation.tables import comparison_table, markdown_table, show_table
from verl_tasks.files import write_json, write_text
from verl_tasks.leftovers import interrupt_on_sigterm
from verl_tasks.process import Progress, StageFailed, run
from verl_tasks.process import errors_in_one_line as _errors_in_one_line
from verl_tasks.rewards.answers import with_opened_thinking
from verl_tasks.rewards.episode import Limits
from verl_tasks.rows import DataError, read_rows, rl_schema, validate_parquet, write_parquet
from verl_tasks.settings import Settings, SettingsError, artifacts, fingerprint, load_settings, positive, variable

__all__ = [
    "CUT",
    "TOO_LONG",
    "Episodes",
    "Estimate",
    "Progress",
    "Rollout",
    "Settings",
    "SettingsError",
    "StageFailed",
    "artifacts",
    "asking",
    "bootstrap_mean",
    "comparison_table",
    "errors_in_one_line",
    "evaluated",
    "fingerprint",
    "load_settings",
    "markdown_table",
    "positive",
    "proportion",
    "read_rows",
    "report_errors",
    "run",
    "sampled_as",
    "show_table",
    "validate_parquet",
    "variable",
    "write_json",
    "write_rows",
    "write_text",
]


@contextmanager
def errors_in_one_line() -> Iterator[None]:
    """Within it a wrong variable, wrong data or a failed file ends the program with one line and exit code 1,
    and Ctrl-C or SIGTERM with 130."""
    interrupt_on_sigterm()
    with _errors_in_one_line(SettingsError, DataError, stopped=STOPPED):
        yield


def sampled_as(s: Settings) -> dict:
    """How ``asking`` samples: temperature, top_p, the most tokens of prompt and response, seed."""
    return asdict(_one_response(s))


def _one_response(s: Settings):
    return replace(sampling(s), n=1, greedy=False)


@contextmanager
def asking(s: Settings, model: str) -> Iterator[Callable[[list[list[dict]]], list[str]]]:
    """A function that asks ``model`` for a response to each of its prompts (OpenAI messages), all at once, on the GPUs
    of ``s`` and sampled as it says; each call has a seed of its own.

    A response has the ``<think>`` that its prompt opened. The function raises DataError for a prompt longer than
    MAX_PROMPT_LENGTH; a GPU that is missing raises SettingsError before.
    """
    how, calls = _one_response(s), itertools.count()
    engine = Hardware.of(s).engine(model, how.max_prompt_tokens + how.max_tokens, how.seed)

    def ask(prompts: list[list[dict]]) -> list[str]:
        of_call = replace(how, seed=how.seed * 1_000_000 + next(calls))
        responses = [""] * len(prompts)
        requests = [Request(number, SAMPLED, messages) for number, messages in enumerate(prompts)]
        for request, (completion, *_) in engine.generate(requests, of_call):
            if completion.finish_reason == TOO_LONG:
                most = how.max_prompt_tokens
                raise DataError(f"a prompt is longer than MAX_PROMPT_LENGTH={most} tokens; raise it")
            opened = {"think_opened": completion.think_opened}
            responses[request.index] = with_opened_thinking(completion.response, opened)
        return responses

    try:
        yield ask
    finally:
        engine.close()
        engine = None
        gc.collect()  # before the next one starts


def write_rows(rows: list[dict], path: Path) -> int:
    """Write ``rows`` (``environment.rl_row``), perhaps with tools, to the parquet file ``path``; return how many."""
    return write_parquet(rows, path, rl_schema(tools=True))


@dataclass(frozen=True)
class Episodes:
    """Limits of an episode: tokens of prompt and turns together, or the model's window where that is less; turns of the
    model; seconds of a step of the environment."""

    window: int
    turns: int
    step_seconds: float

    def of(self, job: Job) -> Job:
        """``job`` in episodes; MAX_NEW_TOKENS is of each turn."""
        most = job.sampling.max_tokens
        whole = window(job.model, most, self.window - most)
        limits = Limits(whole - most, whole, most, self.turns, self.step_seconds, window=whole)
        return replace(job, sampling=replace(job.sampling, max_prompt_tokens=whole - most), episode=limits)


def evaluated(
    s: Settings,
    models: dict[str, str],
    rows: Path,
    root: Path,
    scored: tuple[str, str],
    summary: Callable[[list[Rollout]], dict],
    limit: int = 0,
    episodes: Episodes | None = None,
) -> tuple[dict[str, list[Rollout]], dict[str, dict]]:
    """Rollouts and ``summary`` of each of ``models`` (label to path) on the first ``limit`` (0: all) prompts of the
    parquet file ``rows``, sampled as ``s`` says. What is under ``root`` already is not sampled again.

    ``scored``: the compute_score as "module:name", or with ``episodes`` the Environment, and a mark that changes with
    it. Raises SettingsError where a model's window is too small, DataError without ``rows``.
    """
    how = sampling(s)
    jobs = {label: Job(model, str(rows), limit, how, Hardware.of(s)) for label, model in models.items()}
    if episodes:
        jobs = {label: episodes.of(job) for label, job in jobs.items()}
    else:
        for model in models.values():
            check_window(s, how, model)
    source, mark = scored
    scoring = Scoring.read({"source": source, "mark": mark, "variant": "", "episodes": bool(episodes)})
    return summarized(jobs, root, scoring, summary)
