"""Throughput of our sampling (tokens, entropy, reward, JSONL) against plain ``LLM.generate``, in one run.

    make bench TASK=countdown [MODEL=...] [N=...] [LIMIT=...]

One engine serves three ways in turn, several rounds: ours; LLM.generate with the same sampling parameters, which
include the 20 log-probabilities that the entropy needs; LLM.generate without them. The order changes by round. Prints
tokens/s of each round and the ratios of the medians; exits with 1 when ours is below 0.95 of the same parameters.
"""

import argparse
import importlib
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import torch

from tasks.common.evaluation.engines import LOGPROBS, VLLMEngine
from tasks.common.evaluation.sample import Hardware, Job, Scoring, load, sample, sampling
from tasks.common.models.chat_template import prompt_ids
from tasks.common.models.find import resolve_model
from tasks.common.process import errors_in_one_line
from tasks.common.rows import read_rows
from tasks.common.settings import SettingsError, load_settings

LIMIT_RATIO = 0.95


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    arguments = parser.parse_args()
    s = load_settings()
    job = Job(resolve_model(s.MODEL), str(s.data_dir / "test.parquet"), s.LIMIT, sampling(s), Hardware())
    scoring = Scoring(importlib.import_module(f"tasks.{s.TASK}.reward").compute_score, None, "")
    engine = VLLMEngine(job.model, s.MAX_PROMPT_LENGTH + s.MAX_NEW_TOKENS, job.sampling.seed, s.GPU_MEMORY_UTILIZATION)
    rows = list(read_rows(Path(job.rows), s.LIMIT or None))

    def ours() -> int:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "rollouts.jsonl"
            _, missing = load(job, out, scoring)
            sample(engine, job, out, missing, scoring)
            return sum(json.loads(line)["tokens"] for line in out.read_text().splitlines())

    def plain(logprobs: int | None) -> int:
        from vllm import SamplingParams

        def how(n: int, temperature: float) -> SamplingParams:
            length = s.MAX_NEW_TOKENS
            return SamplingParams(n=n, temperature=temperature, top_p=s.TOP_P, max_tokens=length, logprobs=logprobs)

        params = [how(1, 0.0)] if job.sampling.greedy else []
        params.append(how(s.N, s.EVAL_TEMPERATURE))
        prompts = [{"prompt_token_ids": prompt_ids(engine.tokenizer, row["prompt"])} for row in rows]
        outputs = engine.llm.generate(
            [prompt for prompt in prompts for _ in params], params * len(prompts), use_tqdm=False
        )
        return sum(len(completion.token_ids) for output in outputs for completion in output.outputs)

    ways = {
        "ours": ours,
        f"LLM.generate, logprobs={LOGPROBS}": lambda: plain(LOGPROBS),
        "LLM.generate, no logprobs": lambda: plain(None),
    }
    plain(None)  # warm up: caches, kernels
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(arguments.rounds):
        names = list(ways)
        for name in names[number % 3 :] + names[: number % 3]:
            engine.llm.reset_prefix_cache()
            started = time.perf_counter()
            tokens = ways[name]()
            rates[name].append(tokens / (time.perf_counter() - started))
            print(f"round {number + 1}  {name:<32}{rates[name][-1]:>10.0f} tokens/s", flush=True)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    ratios = {name: medians["ours"] / median for name, median in medians.items() if name != "ours"}
    for name, ratio in ratios.items():
        print(f"ours / {name}: {ratio:.3f}")
    result = {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
        "cores": os.cpu_count(),
        "versions": {name: version(name) for name in ("vllm", "torch", "transformers")},
        "model": Path(job.model).name,
        "prompts": len(rows),
        "samples": s.N,
        "greedy": job.sampling.greedy,
        "max_new_tokens": s.MAX_NEW_TOKENS,
        "tokens_per_second": {name: [round(v, 1) for v in values] for name, values in rates.items()},
        "ratios_of_medians": {name: round(ratio, 3) for name, ratio in ratios.items()},
    }
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    engine.close()
    if ratios[f"LLM.generate, logprobs={LOGPROBS}"] < LIMIT_RATIO:
        sys.exit(f"error: below {LIMIT_RATIO} of LLM.generate with the same parameters")


if __name__ == "__main__":
    with errors_in_one_line(SettingsError):
        main()
