"""Sample from a model with vLLM's offline engine; completions are written as JSONL while they come."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

GREEDY, SAMPLED = "greedy", "sampled"


@dataclass(frozen=True)
class Completion:
    """One response. ``index``: the prompt's place in the test set; ``sample``: which of its n."""

    index: int
    mode: str
    sample: int
    response: str
    finish_reason: str
    tokens: int


def read_completions(path: Path) -> list[Completion]:
    """The completions in ``path``; none if it does not exist. A last line that was cut off is left out."""
    if not path.exists():
        return []
    lines = path.read_text().split("\n")
    return [Completion(**json.loads(line)) for line in lines[:-1]]  # what follows the last newline is incomplete


def sample(
    model: str,
    prompts: list[list[dict]],
    out: Path,
    *,
    n: int,
    temperature: float,
    max_tokens: int,
    max_model_len: int,
    seed: int,
    dtype: str = "bfloat16",
    gpu_memory_utilization: float = 0.5,
) -> list[Completion]:
    """One greedy and ``n`` sampled completions for each chat prompt, in the model's own chat template.

    Appends to ``out`` as prompts finish; prompts that are complete there already are not sampled again. Returns all
    completions sorted by prompt, mode and sample.
    """
    done = read_completions(out)
    complete = {(c.index, c.mode) for c in done}
    todo = [(i, mode) for i in range(len(prompts)) for mode in (GREEDY, SAMPLED) if (i, mode) not in complete]
    if todo:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text("".join(json.dumps(asdict(c)) + "\n" for c in done))  # drops a line that was cut off
        with out.open("a") as file:
            for completions in _generate(
                model, prompts, todo, n, temperature, max_tokens, max_model_len, seed, dtype, gpu_memory_utilization
            ):
                file.write("".join(json.dumps(asdict(c)) + "\n" for c in completions))
                file.flush()
                done.extend(completions)
    return sorted(done, key=lambda c: (c.index, c.mode, c.sample))


def _generate(
    model, prompts, todo, n, temperature, max_tokens, max_model_len, seed, dtype, gpu_memory_utilization
) -> Iterator[list[Completion]]:
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    llm = LLM(
        model,
        dtype=dtype,
        max_model_len=max_model_len,
        seed=seed,  # of the engine: on a CPU vLLM 0.30 fails on a seed of a request (gpu_model_runner.py:3723)
        enforce_eager=True,
        gpu_memory_utilization=gpu_memory_utilization,
        disable_log_stats=True,
    )
    tokenizer, engine = llm.get_tokenizer(), llm.llm_engine
    # FINAL_ONLY: one output with all n; the default gives each of the n in an output of its own, as it ends.
    common = {"max_tokens": max_tokens, "output_kind": RequestOutputKind.FINAL_ONLY}
    modes = {
        GREEDY: SamplingParams(n=1, temperature=0.0, **common),
        SAMPLED: SamplingParams(n=n, temperature=temperature, **common),
    }
    for index, mode in todo:
        ids = tokenizer.apply_chat_template(prompts[index], add_generation_prompt=True, return_dict=True)["input_ids"]
        engine.add_request(f"{index}:{mode}", {"prompt_token_ids": ids}, modes[mode])
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                index, mode = output.request_id.split(":")
                yield [
                    Completion(int(index), mode, o.index, o.text, str(o.finish_reason), len(o.token_ids))
                    for o in output.outputs
                ]
    engine.engine_core.shutdown()
