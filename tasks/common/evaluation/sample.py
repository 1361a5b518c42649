"""From the rows of a parquet file to a model's scored completions: what is missing is sampled by sampler.py."""

import functools
import importlib
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from verl_tasks.ends import CUT, FAILED, LENGTH, TURN_LENGTH
from verl_tasks.evaluation import endpoint
from verl_tasks.evaluation.engine_pool import Hardware
from verl_tasks.evaluation.engines import Request, Sampling
from verl_tasks.evaluation.lenient import read as read_leniently
from verl_tasks.evaluation.rollouts import (
    GREEDY,
    SAMPLED,
    TOO_LONG,
    Rollout,
    in_order,
    read_rollouts,
    rescored,
    write_rollouts,
)
from verl_tasks.evaluation.summary import OwnMetrics
from verl_tasks.files import read_json, write_json
from verl_tasks.machine import memory
from verl_tasks.models.chat_template import prompt_ids
from verl_tasks.models.merge import base_model
from verl_tasks.process import Progress, StageFailed, run
from verl_tasks.rewards.environment import Environment
from verl_tasks.rewards.episode import Limits
from verl_tasks.rewards.examples import most_stated
from verl_tasks.rows import DataError, decoded, read_rows, tools_of
from verl_tasks.settings import Command, Settings, SettingsError, code_digest, fingerprint, judge_settings
from verl_tasks.text import one_line, show

TOKENS = "tokens.txt"  # beside the rollouts while they are sampled: a line for each answer of the engine, its tokens


@dataclass(frozen=True)
class Job:
    """Sample ``model`` on the first ``limit`` (0: all) prompts of the parquet file ``rows``; ``episode``: the limits of
    a multi-turn task's episodes. ``endpoint``: the address at which ``model`` is asked, ``per_minute`` times at most;
    empty: it is sampled here."""

    model: str
    rows: str
    limit: int
    sampling: Sampling
    hardware: Hardware
    episode: Limits | None = None
    endpoint: str = ""
    per_minute: float = 0.0

    @classmethod
    def of(cls, s: Settings, model: str, rows: Path, how: Sampling, limit: int = 0) -> "Job":
        """On the GPUs of ``s``, and where its task is multi-turn in episodes. Raises SettingsError as check_window."""
        check_window(s, how, model)
        hardware = Hardware.of(s) if s.STACK == "cpu" else Hardware.of(s).shared(model)
        return cls(model, str(rows), limit, how, hardware, episode_limits(s, how) if s.multi_turn else None)

    @classmethod
    def read(cls, stored: dict) -> "Job":
        """From ``asdict``, as a JSON file has it."""
        parts = {"sampling": Sampling(**stored["sampling"]), "hardware": Hardware(**stored["hardware"])}
        return cls(**stored | parts | {"episode": stored["episode"] and Limits(**stored["episode"])})

    def fingerprint(self) -> str:
        """Changes when the completions would change. Not with ``limit``: more prompts continue the same file."""
        if not Path(self.rows).is_file():
            raise DataError(f"{self.rows}: no such file; run `make data` or give the path of a parquet file")
        left_out = ("limit", "hardware", "rows", "per_minute")
        values = {name: value for name, value in asdict(self).items() if name not in left_out}
        for name in ("episode", "endpoint"):
            if not values[name]:
                del values[name]
        folder = Path(self.model)
        kinds = (".safetensors", ".bin", ".json", ".jinja", ".model")
        files = sorted(f for f in folder.iterdir() if f.suffix in kinds) if folder.is_dir() else []
        values["files"] = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files]
        return fingerprint(values, Path(self.rows))

    def folder(self, root: Path) -> Path:
        """The folder of the completions, under ``root``."""
        return root / f"{model_name(self.model)}-{self.fingerprint()}"


@dataclass(frozen=True)
class Scoring:
    """A task's parts: its reward, or the ``environment`` of a multi-turn task; its own metrics; and a version that
    changes with the reward. ``source``: where another process finds the reward or the environment, "module:name".
    ``most``: see ``most_stated``."""

    compute_score: Callable | None
    own_metrics: OwnMetrics | None
    mark: str
    environment: type[Environment] | None = None
    source: str = ""
    variant: str = ""
    most: float = 1.0

    @classmethod
    def of(cls, s: Settings, compute_score: Callable | None, own_metrics: OwnMetrics | None, environment) -> "Scoring":
        mark, most = reward_mark(s), most_stated(s.task_dir)
        if environment:
            return cls(None, own_metrics, mark, environment, f"tasks.{s.TASK}.environment:Environment", most=most)
        module = compute_score.__module__.replace("__main__", f"tasks.{s.TASK}.evaluate")
        source = f"{module}:{compute_score.__name__}"
        if s.REWARD:  # as verl calls it (reward.custom_reward_function.reward_kwargs)
            compute_score = functools.partial(compute_score, variant=s.REWARD)
        return cls(compute_score, own_metrics, mark, None, source, s.REWARD, most)

    def stored(self) -> dict:
        """What ``read`` needs, for JSON."""
        return {"mark": self.mark, "source": self.source, "variant": self.variant, "episodes": bool(self.environment)}

    @classmethod
    def read(cls, stored: dict) -> "Scoring":
        """From ``stored``, without the task's own metrics."""
        mark, source, variant = (stored[name] for name in ("mark", "source", "variant"))
        module, _, name = source.partition(":")
        part = getattr(importlib.import_module(module), name)
        if stored["episodes"]:
            return cls(None, None, mark, part, source)
        return cls(functools.partial(part, variant=variant) if variant else part, None, mark, None, source, variant)


def reward_mark(s: Settings) -> str:
    """Changes when the rewards of the same responses may change."""
    parts = {"variant": s.REWARD, "code": code_digest(s.reward_file)} | judge_settings()
    return fingerprint(parts | ({"image": s.AGENT_IMAGE} if s.AGENT_IMAGE else {}))


def sampling(s: Settings) -> Sampling:
    """How the settings sample. EVAL_TEMPERATURE=0 is greedy: one response per prompt."""
    greedy_only = s.EVAL_TEMPERATURE == 0
    return Sampling(
        n=1 if greedy_only else s.N,
        greedy=bool(s.GREEDY) and not greedy_only,
        temperature=s.EVAL_TEMPERATURE,
        top_p=s.TOP_P,
        max_prompt_tokens=s.MAX_PROMPT_LENGTH,
        max_tokens=s.MAX_NEW_TOKENS,
        seed=s.EVAL_SEED,
    )


def episode_limits(s: Settings, how: Sampling) -> Limits:
    """The limits of a multi-turn task's episodes, with the lengths of ``how``."""
    turn = min(s.MAX_TURN_LENGTH, how.max_tokens)
    return Limits(how.max_prompt_tokens, how.max_tokens, turn, s.MAX_TURNS, s.STEP_SECONDS)


def bounds(s: Settings) -> dict[str, str]:
    """What cuts off in evaluation, and its variable: as CUT, and MAX_NEW_TOKENS where that is less."""
    less = {LENGTH: s.MAX_RESPONSE_LENGTH, TURN_LENGTH: s.MAX_TURN_LENGTH}
    return CUT | {end: "MAX_NEW_TOKENS" for end, length in less.items() if length > s.MAX_NEW_TOKENS}


def check_window(s: Settings, how: Sampling, model: str) -> None:
    """Raise SettingsError where the lengths of ``how`` add up to more than the window of ``model``: vLLM says so late.

    A prompt and its response share the window; so do a prompt and all turns of an episode. An unknown window passes.
    """
    shapes = memory.shapes_of(base_model(model))
    if shapes and shapes.window and how.max_prompt_tokens + how.max_tokens > shapes.window * shapes.stretch:
        name = "MAX_RESPONSE_LENGTH" if how.max_tokens == s.MAX_RESPONSE_LENGTH else "MAX_NEW_TOKENS"
        lengths = f"MAX_PROMPT_LENGTH={how.max_prompt_tokens} + {name}={how.max_tokens}"
        text = f"{lengths}: more than {model_name(model)}'s window of {shapes.window * shapes.stretch:.0f} tokens"
        raise SettingsError(f"{text}; lower one of them, or take another MODEL")


def check_chat(job: Job, requests: list[Request]) -> None:
    """Raise DataError where the model of ``job`` cannot render or read ``requests``, before an engine starts: one of
    each form is tried. What else is wrong with its tokenizer is the engine's to say."""
    from transformers import AutoTokenizer

    if job.endpoint:
        return
    try:
        tokenizer = AutoTokenizer.from_pretrained(base_model(job.model), trust_remote_code=False)
    except Exception:  # its config is read too, and a damaged tokenizer.json raises anything
        return
    if not tokenizer.chat_template:
        raise DataError(f"{job.model}: has no chat template to render prompts; take an instruct model (MODEL)")
    forms = {(*(each["role"] for each in r.messages), bool(r.tools)): r for r in reversed(requests)}
    shapes = memory.shapes_of(base_model(job.model))
    for request in forms.values():
        where = f"{job.model}: prompt {request.index} of {job.rows}"
        try:
            largest = max(prompt_ids(tokenizer, request.messages, request.tools))
        except ValueError as error:
            fix = "take another MODEL, or change the prompts"
            raise DataError(f"{where}: {one_line(str(error), 300)}; {fix}") from error
        if shapes and largest >= shapes.vocabulary:
            what = f"token {largest} of its tokenizer, and its weights know {shapes.vocabulary}"
            raise DataError(f"{where}: {what}; take the tokenizer that belongs to the weights")


def test_job(s: Settings, model: str, rows: Path | None = None) -> Job:
    """Sample ``model`` on the task's held-out prompts, or on those of the file ``rows``."""
    return Job.of(s, model, rows or s.data_dir / "test.parquet", sampling(s), s.LIMIT)


def endpoint_job(s: Settings, command: Command) -> Job:
    """Ask MODEL_NAME at BASE_URL for the task's held-out prompts. Raises SettingsError."""
    endpoint.check(command.BASE_URL, command.MODEL_NAME)
    if s.multi_turn:
        raise SettingsError(
            f"BASE_URL: TASK={s.TASK} has episodes of several turns; an endpoint is asked for one answer"
        )
    rows = str(s.data_dir / "test.parquet")
    at = {"endpoint": command.BASE_URL, "per_minute": command.REQUESTS_PER_MINUTE}
    return Job(command.MODEL_NAME, rows, s.LIMIT, sampling(s), Hardware(), **at)


def report_errors(rollouts: list[Rollout]) -> int:
    """Print the first five completions on which the reward raised, how many episodes failed, and which keys not every
    reward has; return how many there are of the first."""
    errors = [r for r in rollouts if r.error]
    for rollout in errors[:5]:
        show(f"  reward raised on prompt {rollout.index}, {rollout.mode} {rollout.sample}: {rollout.error}")
    if len(errors) > 5:
        show(f"  ... and on {len(errors) - 5} more")
    if errors:
        show("  the tracebacks of the first are in sampling.log, beside the folders of rollouts")
    if failed := sum(rollout.finish_reason == FAILED for rollout in rollouts):
        why = "read programs-*.log, of environments of other people sampling.log, beside the folders of rollouts"
        show(f"  {failed} of {len(rollouts)} episodes failed: {why}")
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    for key, count in Counter(key for reward in rewards for key in reward).items():
        if count < len(rewards):
            show(f"  the reward's key {key} is in {count} of {len(rewards)} responses; its mean is theirs alone")
    return len(errors)


def model_name(model: str) -> str:
    """A short name for a model: the run and step of one of our checkpoints, else the last part of its path or id."""
    found = re.search(r"([^/]+)/checkpoints/global_step_([^/]+)", model)
    return f"{found[1]}-step{found[2]}" if found else Path(model).name


def load(job: Job, out: Path, scoring: Scoring) -> tuple[list[Rollout], list[Request]]:
    """The rollouts of ``job`` in ``out``, in order, and the requests that are missing: those without all their lines.

    Rollouts scored with another version of the reward are scored again; episodes are played again.
    """
    rows = list(read_rows(Path(job.rows), job.limit or None))
    if not rows:
        raise DataError(f"{job.rows}: has no rows to sample")
    stored, cut = read_rollouts(out) if out.exists() else ([], 0)
    meta = out.with_name("rollouts.meta.json")
    current = read_json(meta).get("reward") == scoring.mark
    usable = stored if current or not scoring.environment else []
    groups: dict[tuple[int, str], dict[int, Rollout]] = {}
    for rollout in usable:
        groups.setdefault((rollout.index, rollout.mode), {})[rollout.sample] = rollout
    size = {GREEDY: 1, SAMPLED: job.sampling.n}
    groups = {
        key: group
        for key, group in groups.items()
        if len(group) == size.get(key[1]) or any(r.finish_reason == TOO_LONG for r in group.values())
    }
    kept = [rollout for group in groups.values() for rollout in group.values()]
    if not current:
        kept = [rescored(rollout, scoring.compute_score) for rollout in kept]
    kept = read_leniently(kept, scoring.compute_score, scoring.environment)
    if cut or kept != stored:
        write_rollouts(out, kept)
    if not current:  # after the scores that it marks: if they cannot be written, the old mark stays
        write_json(meta, {"reward": scoring.mark, **asdict(job)})
    missing = [
        Request(index, mode, decoded(row["prompt"]), tools_of(row))
        for index, row in enumerate(rows)
        for mode in ([GREEDY, SAMPLED] if job.sampling.greedy else [SAMPLED])
        if (index, mode) not in groups
    ]
    return in_order(rollout for rollout in kept if rollout.index < len(rows)), missing


def samples(requests: list[Request], how: Sampling) -> int:
    """How many responses the ``requests`` ask for."""
    return sum(1 if request.mode == GREEDY else how.n for request in requests)


class _Tail:
    """Progress of a file of rollouts that another process writes: lines, and tokens per second since sampling began.
    Beside it the process counts the tokens of each answer: an episode has many before its line."""

    def __init__(self, label: str, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.label, self.file, self.tokens, self.started = label, path.open("a+b"), 0, 0.0
        self.made = path.with_name(TOKENS).open("w+b")
        self.file.seek(0)
        self.lines, self.first = self.file.read().count(b"\n"), path.stat().st_mtime_ns

    def read(self) -> None:
        """Count what was written since the last call."""
        if self.started or os.fstat(self.file.fileno()).st_mtime_ns != self.first:
            self.started = self.started or time.monotonic()
            self.lines += self.file.read().count(b"\n")
            self.tokens += sum(map(int, self.made.read().split()))


def _progress(tails: list[_Tail]) -> Progress:
    for tail in tails:
        tail.read()
    note = " starting the engine"
    if current := [tail for tail in tails if tail.started]:
        speed = current[-1].tokens / (time.monotonic() - current[-1].started + 0.1)
        note = f" {current[-1].label}, {f'{speed:.0f} tokens/s' if speed else 'no answer has ended yet'}"
    return Progress(sum(tail.lines for tail in tails), note)


def sampled(jobs: dict[str, Job], root: Path, scoring: Scoring) -> dict[str, list[Rollout]]:
    """All rollouts of each of ``jobs`` (by label), in order. Says so where nothing is missing.

    ``job.folder(root)/rollouts.jsonl`` keeps them. A process of its own samples: its end frees the memory. Raises
    DataError, or StageFailed when the engine fails.
    """
    files = {label: job.folder(root) / "rollouts.jsonl" for label, job in jobs.items()}
    found = {label: load(job, files[label], scoring) for label, job in jobs.items()}
    todo = {label: jobs[label] for label, (_, missing) in found.items() if missing}
    for label, job in todo.items():
        check_chat(job, found[label][1])
    if todo:
        missing = sum(samples(found[label][1], job.sampling) for label, job in todo.items())
        asked = {"scoring": scoring.stored(), "jobs": {str(files[label]): asdict(job) for label, job in todo.items()}}
        try:
            tails = [_Tail(label, files[label]) for label in todo]
            write_json(root / "sampling.json", asked)
            run(
                [sys.executable, "-m", "verl_tasks.evaluation.sampler", str(root / "sampling.json")],
                name="sampling",
                log=root / "sampling.log",
                total=sum(tail.lines for tail in tails) + missing,
                watch=lambda: _progress(tails),
                environment={"VLLM_ENABLE_V1_MULTIPROCESSING": os.environ.get("EVAL_MULTIPROCESSING", "1")},
            )
        finally:
            for label in todo:
                files[label].with_name(TOKENS).unlink(missing_ok=True)
        found |= {label: load(job, files[label], scoring) for label, job in todo.items()}
        if still := {label: len(missing) for label, (_, missing) in found.items() if missing}:
            raise StageFailed(f"sampling ended, but prompts are missing: {still}\n  log: {root}/sampling.log")
    else:
        show("  up to date: nothing to sample")
    return {label: rollouts for label, (rollouts, _) in found.items()}
