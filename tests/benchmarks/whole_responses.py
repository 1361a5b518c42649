"""Tokens per second of vLLM's server with its own scheduler and with whole_responses.py, in one run.

    python -m tests.benchmarks.whole_responses [--model FOLDER] [--out file.json]

As verl asks for rollouts: many requests at once, log-probs of the sampled tokens, no text. Without MODEL it is a random
Llama of one layer: the time is that of the processes around the model. Both servers are there and answer in turn.
"""

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

from vllm import AsyncEngineArgs, SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from tests.recipes import machine

WAYS = {"vllm": None, "whole": "verl_tasks.verl_plugins.whole_responses.WholeResponses"}


def random_model(folder: Path) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, num_key_value_heads=2, **sizes)).save_pretrained(folder)
    return folder


def server(model: Path, scheduler: str | None, requests: int) -> AsyncLLM:
    return AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=str(model),
            skip_tokenizer_init=True,
            max_model_len=1024,
            max_num_seqs=requests,
            gpu_memory_utilization=0.3,
            scheduler_cls=scheduler,
            disable_log_stats=True,
        )
    )


async def answered(engine: AsyncLLM, name: str, params: SamplingParams) -> int:
    """The tokens of one response."""
    prompt = {"prompt_token_ids": [1 + hash(name) % 400] * 8}
    async for output in engine.generate(prompt, params, name):
        last = output.outputs[0]
    assert len(last.logprobs) == len(last.token_ids)
    return len(last.token_ids)


async def measured(engines: dict[str, AsyncLLM], rounds: int, requests: int, tokens: int) -> dict[str, list[dict]]:
    """Of each round the tokens per second, and the microseconds of a core that this process, the caller, took for each
    token. The first round is not counted."""
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=0)
    params.output_kind = RequestOutputKind.FINAL_ONLY
    found = {way: [] for way in engines}
    for number in range(rounds + 1):
        for way in engines if number % 2 else reversed(engines):
            begin, used = time.monotonic(), time.process_time()
            names = [f"{number}-{each}" for each in range(requests)]
            done = sum(await asyncio.gather(*(answered(engines[way], name, params) for name in names)))
            speed, caller = done / (time.monotonic() - begin), 1e6 * (time.process_time() - used) / done
            print(f"{way:<6} {speed:8.0f} tokens/s, {caller:6.1f} us of the caller a token", flush=True)
            found[way] += [{"tokens_per_second": speed, "caller_us": caller}] * bool(number)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--requests", type=int, default=1024, help="at once")
    parser.add_argument("--tokens", type=int, default=128, help="of each response")
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    arguments = parser.parse_args()

    async def run(model: Path) -> dict[str, list[dict]]:
        engines = {way: server(model, scheduler, arguments.requests) for way, scheduler in WAYS.items()}
        try:
            return await measured(engines, arguments.rounds, arguments.requests, arguments.tokens)
        finally:
            for engine in engines.values():
                engine.shutdown()

    with tempfile.TemporaryDirectory() as folder:
        rounds = asyncio.run(run(arguments.model or random_model(Path(folder))))
    median = {
        way: {name: statistics.median(one[name] for one in found) for name in found[0]} for way, found in rounds.items()
    }
    for way, figures in median.items():
        print(f"median of {way}: {', '.join(f'{name} {value:.1f}' for name, value in figures.items())}")
    if arguments.out:
        shape = {"model": arguments.model and arguments.model.name, "requests": arguments.requests}
        shape |= {"tokens": arguments.tokens, "rounds": rounds, "median": median}
        arguments.out.write_text(json.dumps(shape | machine(), indent=1) + "\n")


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    main()
