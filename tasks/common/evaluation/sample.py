"""Sample a model on the rows of a parquet file, in its own process; score and store each completion."""

import functools
import gc
import json
import os
import re
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tasks.common.evaluation import episodes
from tasks.common.evaluation.engine_pool import EnginePool
from tasks.common.evaluation.engines import ENGINES, Request, Sampling
from tasks.common.evaluation.lenient import read as read_leniently
from tasks.common.evaluation.rollouts import (
    GREEDY,
    SAMPLED,
    TOO_LONG,
    Rollout,
    in_order,
    read_rollouts,
    rescored,
    scored,
    to_line,
    write_rollouts,
)
from tasks.common.evaluation.summary import OwnMetrics
from tasks.common.files import read_json, write_json
from tasks.common.machine import memory
from tasks.common.machine.hardware import nvidia, ram
from tasks.common.models.merge import base_model
from tasks.common.process import Progress, StageFailed, run
from tasks.common.rewards.environment import Environment
from tasks.common.rewards.episode import Limits
from tasks.common.rows import DataError, decoded, read_rows, tools_of
from tasks.common.settings import Settings, SettingsError, code_digest, fingerprint, judge_settings
from tasks.common.visible_gpus import gpu_groups, visible_gpus

ENGINE_SAMPLES = 512  # one more engine on the same GPU is not worth its start with fewer
MOST_SHARING = 4


@dataclass(frozen=True)
class Hardware:
    """``engines`` at once, each on ``tensor_parallel`` GPUs. ``sharing`` of them have the same GPUs and divide vLLM's
    share of their memory."""

    engines: int = 1
    tensor_parallel: int = 1
    gpu_memory_utilization: float = 0.5
    sharing: int = 1

    @classmethod
    def of(cls, s: Settings) -> "Hardware":
        return cls(max(1, s.N_GPUS // s.TP), s.TP, s.GPU_MEMORY_UTILIZATION)

    def shared(self, model: str) -> "Hardware":
        """With several engines on each GPU where ``model`` is small: vLLM's scheduler takes longer for a step than the
        GPU does. Each has a GPU's memory for four times the weights, four cores and 8 GB of RAM."""
        found = None if os.environ.get("SHARED_GPU") or self.tensor_parallel > 1 else nvidia()
        weights = sum(file.stat().st_size for file in Path(base_model(model)).glob("*.safetensors"))
        if not found or not found.gpus or not weights:
            return self
        fitting = int(self.gpu_memory_utilization * found.gpus[0].total / (4 * weights))
        served = min(len(os.sched_getaffinity(0)) // 4, ram()[0] // 8_000_000_000) // self.engines
        sharing = max(1, min(MOST_SHARING, fitting, served))
        return replace(self, engines=self.engines * sharing, sharing=sharing)

    def enough(self, prompts: int, samples: int) -> "Hardware":
        """Without engines that would have no prompt, or on a shared GPU fewer than ENGINE_SAMPLES ``samples``."""
        if self.engines <= min(prompts, samples // ENGINE_SAMPLES):
            return self
        return replace(self, engines=max(1, min(self.engines // self.sharing, prompts)), sharing=1)

    def engine(self, backend: str, *arguments):
        """One engine, or all as one, with the ``arguments`` model, max_model_len and seed."""
        if self.tensor_parallel > 1 and not gpu_groups(self.tensor_parallel, 1):
            raise SettingsError(f"TP={self.tensor_parallel}: visible GPUs: {len(visible_gpus())}; set TP lower")
        arguments = (*arguments, self.gpu_memory_utilization / self.sharing)
        if self.engines > 1:
            return EnginePool(
                self.engines, backend, *arguments, tensor_parallel=self.tensor_parallel, sharing=self.sharing
            )
        return ENGINES[backend](*arguments, tensor_parallel=self.tensor_parallel)


@dataclass(frozen=True)
class Job:
    """Sample ``model`` on the first ``limit`` (0: all) prompts of the parquet file ``rows``; ``episode``: the limits of
    a multi-turn task's episodes."""

    model: str
    rows: str
    limit: int
    sampling: Sampling
    hardware: Hardware
    backend: str = "vllm"
    episode: Limits | None = None

    @classmethod
    def of(cls, s: Settings, model: str, rows: Path, how: Sampling, limit: int = 0, backend: str = "vllm") -> "Job":
        """On the GPUs of ``s``, and where its task is multi-turn in episodes. Raises SettingsError as check_window."""
        check_window(s, how, model)
        hardware = Hardware.of(s)
        if backend == "vllm" and s.STACK != "cpu":
            hardware = hardware.shared(model)
        return cls(model, str(rows), limit, how, hardware, backend, episode_limits(s, how) if s.multi_turn else None)

    def fingerprint(self) -> str:
        """Changes when the completions would change. Not with ``limit``: more prompts continue the same file."""
        if not Path(self.rows).is_file():
            raise DataError(f"{self.rows}: no such file; run `make data` or give the path of a parquet file")
        left_out = ("limit", "hardware", "rows")
        values = {name: value for name, value in asdict(self).items() if name not in left_out}
        if not self.episode:
            del values["episode"]
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
    changes with the reward."""

    compute_score: Callable | None
    own_metrics: OwnMetrics | None
    mark: str
    environment: type[Environment] | None = None

    @classmethod
    def of(cls, s: Settings, compute_score: Callable | None, own_metrics: OwnMetrics | None, environment) -> "Scoring":
        mark = fingerprint({"variant": s.REWARD, "code": code_digest(s.reward_file)} | judge_settings())
        if s.REWARD and compute_score:  # as verl calls it (reward.custom_reward_function.reward_kwargs)
            compute_score = functools.partial(compute_score, variant=s.REWARD)
        return cls(compute_score, own_metrics, mark, environment)


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


def test_job(s: Settings, model: str, rows: Path | None = None) -> Job:
    """Sample ``model`` on the task's held-out prompts, or on those of the file ``rows``."""
    return Job.of(s, model, rows or s.data_dir / "test.parquet", sampling(s), s.LIMIT)


def report_errors(rollouts: list[Rollout]) -> int:
    """Print the first five completions on which the reward raised; return how many there are."""
    errors = [r for r in rollouts if r.error]
    for rollout in errors[:5]:
        print(f"  reward raised on prompt {rollout.index}, {rollout.mode} {rollout.sample}: {rollout.error}")
    if len(errors) > 5:
        print(f"  ... and on {len(errors) - 5} more")
    if errors:
        print("  the tracebacks of the first are in sampling.log, beside the folders of rollouts")
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


def sample(engine, job: Job, out: Path, missing: list[Request], scoring: Scoring) -> None:
    """Append the completions of the ``missing`` requests to ``out``, each scored and written as it ends."""
    rows = list(read_rows(Path(job.rows), job.limit or None))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.touch()  # its time stamp tells the progress display that sampling begins
    with out.open("a", encoding="utf-8") as file, ThreadPoolExecutor(job.sampling.n) as pool:

        def write(group: list[Rollout]) -> None:
            file.write("".join(map(to_line, group)))
            file.flush()

        if scoring.environment:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(base_model(job.model))
            stage = episodes.Stage(engine, tokenizer, job.sampling, job.episode, scoring.environment)
            return episodes.play_all(stage, rows, missing, write)
        # Threads, as verl scores: a judge is asked about the samples of a prompt at once.
        for request, completions in engine.generate(missing, job.sampling):
            place = [rows[request.index], request.index, request.mode]
            futures = [pool.submit(scored, *place, i, c, scoring.compute_score) for i, c in enumerate(completions)]
            write([future.result() for future in futures])


def _samples(requests: list[Request], sampling: Sampling) -> int:
    return sum(1 if request.mode == GREEDY else sampling.n for request in requests)


def sample_here(arguments: list[str], scoring: Scoring) -> int:
    """The child of ``sampled``: complete each job (as JSON, with its file ``out``), one after the other.

    Models of one kind share an engine, because starting one takes half a minute.
    """
    engine, last = None, None
    for argument in arguments:
        values = json.loads(argument)
        out, limits = Path(values.pop("out")), values.pop("episode")
        own = {"sampling": Sampling(**values.pop("sampling")), "hardware": Hardware(**values.pop("hardware"))}
        job = Job(**values, **own, episode=limits and Limits(**limits))
        _, missing = load(job, out, scoring)
        tokens = job.sampling.max_prompt_tokens + job.sampling.max_tokens
        hardware = job.hardware.enough(len(missing), _samples(missing, job.sampling))
        made_for = [job.backend, tokens, hardware]
        if engine is None or made_for != last or not engine.load(job.model):
            if engine:
                engine.close()
                del engine
                gc.collect()  # before the next one starts
            engine = hardware.engine(job.backend, job.model, tokens, job.sampling.seed)
        last = made_for
        sample(engine, job, out, missing, scoring)
    # The end of this process ends an engine in it, 5 s sooner than close() does.
    if hardware.engines > 1 or os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") != "0":
        engine.close()
    return 0


class _Tail:
    """Progress of a file of rollouts that another process writes: lines, and tokens per second since sampling began."""

    def __init__(self, label: str, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.label, self.file, self.tokens, self.started = label, path.open("a+b"), 0, 0.0
        self.file.seek(0)
        self.lines, self.first = self.file.read().count(b"\n"), path.stat().st_mtime_ns

    def read(self) -> None:
        """Count the lines written since the last call."""
        if self.started or os.fstat(self.file.fileno()).st_mtime_ns != self.first:
            self.started = self.started or time.monotonic()
            new = self.file.read()
            self.lines += new.count(b"\n")
            self.tokens += sum(map(int, re.findall(rb'"tokens": (\d+)', new)))  # in a text, its quotes are escaped


def _progress(tails: list[_Tail]) -> Progress:
    for tail in tails:
        tail.read()
    note = " starting the engine"
    if current := [tail for tail in tails if tail.started]:
        speed = current[-1].tokens / (time.monotonic() - current[-1].started + 0.1)
        note = f" {current[-1].label}, {speed:.0f} tokens/s"
    return Progress(sum(tail.lines for tail in tails), note)


def sampled(jobs: dict[str, Job], root: Path, scoring: Scoring) -> tuple[dict[str, list[Rollout]], bool]:
    """All rollouts of each of ``jobs`` (by label), in order, and whether any had to be sampled.

    ``job.folder(root)/rollouts.jsonl`` keeps them. A child process samples: the script that runs now, with the command
    ``sample``. Its end frees the memory. Raises DataError, or StageFailed when the engine fails.
    """
    files = {label: job.folder(root) / "rollouts.jsonl" for label, job in jobs.items()}
    found = {label: load(job, files[label], scoring) for label, job in jobs.items()}
    todo = {label: jobs[label] for label, (_, missing) in found.items() if missing}
    if todo:
        tails = [_Tail(label, files[label]) for label in todo]
        missing = sum(_samples(found[label][1], job.sampling) for label, job in todo.items())
        arguments = [json.dumps({**asdict(job), "out": str(files[label])}) for label, job in todo.items()]
        run(
            [sys.executable, sys.argv[0], "sample", *arguments],
            name="sampling",
            log=root / "sampling.log",
            total=sum(tail.lines for tail in tails) + missing,
            watch=lambda: _progress(tails),
            environment={"VLLM_ENABLE_V1_MULTIPROCESSING": os.environ.get("EVAL_MULTIPROCESSING", "1")},
        )
        found = {label: load(job, files[label], scoring) for label, job in jobs.items()}
        if still := {label: len(missing) for label, (_, missing) in found.items() if missing}:
            raise StageFailed(f"sampling ended, but prompts are missing: {still}\n  log: {root}/sampling.log")
    return {label: rollouts for label, (rollouts, _) in found.items()}, bool(todo)
