"""The process that samples: `python -m verl_tasks.evaluation.sampler FILE` completes the jobs of FILE (sample.py)."""

import gc
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TextIO

from verl_tasks.evaluation import episodes
from verl_tasks.evaluation.endpoint import EndpointEngine
from verl_tasks.evaluation.engines import Request, Sampling
from verl_tasks.evaluation.rollouts import Rollout, scored, to_line
from verl_tasks.evaluation.sample import TOKENS, Job, Scoring, load, samples
from verl_tasks.files import read_json, write_json
from verl_tasks.models.merge import base_model
from verl_tasks.rows import read_rows


class _Counted:
    """``engine``, of whose answers ``file`` gets the tokens as they end: for the progress display."""

    def __init__(self, engine, file: TextIO):
        self.engine, self.file = engine, file

    def generate(self, requests: list[Request], sampling: Sampling, *more) -> Iterator:
        for request, completions in self.engine.generate(requests, sampling, *more):
            print(sum(completion.tokens for completion in completions), file=self.file, flush=True)
            yield request, completions


def sample(engine, job: Job, out: Path, missing: list[Request], scoring: Scoring) -> None:
    """Append the completions of the ``missing`` requests to ``out``, each scored and written as it ends."""
    rows = list(read_rows(Path(job.rows), job.limit or None))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.touch()  # its time stamp tells the progress display that sampling begins
    counts = out.with_name(TOKENS)
    with out.open("a", encoding="utf-8") as file, counts.open("a") as made, ThreadPoolExecutor(job.sampling.n) as pool:
        engine = _Counted(engine, made)

        def write(group: list[Rollout]) -> None:
            file.write("".join(map(to_line, group)))
            file.flush()

        if scoring.environment:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(base_model(job.model), trust_remote_code=False)
            stage = episodes.Stage(engine, tokenizer, job.sampling, job.episode, scoring.environment)
            return episodes.play_all(stage, rows, missing, write)
        # Threads, as verl scores: a judge is asked about the samples of a prompt at once.
        for request, completions in engine.generate(missing, job.sampling):
            place = [rows[request.index], request.index, request.mode]
            futures = [pool.submit(scored, *place, i, c, scoring.compute_score) for i, c in enumerate(completions)]
            write([future.result() for future in futures])


def ask(job: Job, out: Path, missing: list[Request], scoring: Scoring) -> None:
    """``sample`` from an endpoint. usage.json, beside ``out``, counts the tokens of all its launches."""
    engine, usage = EndpointEngine(job.endpoint, job.model, job.per_minute), out.with_name("usage.json")
    try:
        sample(engine, job, out, missing, scoring)
    finally:
        engine.close()
        write_json(usage, dict(Counter(read_json(usage)) + engine.used))


def complete(jobs: dict[Path, Job], scoring: Scoring) -> None:
    """Sample what is missing of each job, one after the other, into its file. Models of one kind share an engine,
    because starting one takes half a minute."""
    engine, last = None, None
    for out, job in jobs.items():
        _, missing = load(job, out, scoring)
        if job.endpoint:
            ask(job, out, missing, scoring)
            continue
        tokens = job.sampling.max_prompt_tokens + job.sampling.max_tokens
        hardware = job.hardware.enough(len(missing), samples(missing, job.sampling))
        if engine is None or (tokens, hardware) != last or not engine.load(job.model):
            if engine:
                engine.close()
                del engine
                gc.collect()  # before the next one starts
            engine = hardware.engine(job.model, tokens, job.sampling.seed)
        last = tokens, hardware
        sample(engine, job, out, missing, scoring)
    # The end of this process ends an engine in it, 5 s sooner than close() does.
    if engine and (hardware.engines > 1 or os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") != "0"):
        engine.close()


def main(file: str) -> None:
    """Complete the jobs that ``sample.sampled`` wrote to ``file``."""
    asked = json.loads(Path(file).read_text())
    complete({Path(out): Job.read(values) for out, values in asked["jobs"].items()}, Scoring.read(asked["scoring"]))


if __name__ == "__main__":
    main(sys.argv[1])
