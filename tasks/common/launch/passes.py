"""How long the stages of a first training take on a CPU: two small passes of MODEL, timed here, for each of its tokens.

`python -m verl_tasks.launch.passes MODEL FILE` writes the seconds by stage to FILE. The demonstrations say how long
responses are: after a warm-up they are like them, without one up to their limit.
"""

import math
import sys
import time
from dataclasses import dataclass
from itertools import islice, takewhile
from pathlib import Path

import psutil
import torch
from transformers import AutoModelForCausalLM

from verl_tasks.data.prepare import load_tokenizer
from verl_tasks.files import write_json
from verl_tasks.machine.memory import Shapes, operations, shapes
from verl_tasks.models.chat_template import demonstration_ids, prompt_ids
from verl_tasks.rows import decoded, demonstration, parquet_rows, tools_of
from verl_tasks.settings import Settings, load_settings, stack

ROWS = 64  # whose lengths are counted
LEARNED = 512  # tokens of the pass that learns
DECODED = 8  # tokens of each sequence of the pass that samples
# What a stage takes beside its work, in starts of this program, which imports and loads the same: an estimate.
STARTS = {"sft": 7.0, "train": 9.0, "eval": 3.0}
UPDATE = 1.4  # of a bare pass: an update of RL, with entropies and the optimizer; an estimate too
FORWARD = 1 / 3  # of a forward and a backward pass


@dataclass(frozen=True)
class Lengths:
    """Tokens of some rows: of their prompts, of all of each, of what the model says in it, of what all begin with."""

    prompts: list[int]
    whole: list[int]
    said: list[int]
    common: int = 0


def lengths(s: Settings, tokenizer) -> Lengths:
    """Of the demonstrations; without a warm-up of prompts with responses up to their limit."""
    if s.INIT == "sft":
        rows = islice(parquet_rows(s.data_dir / "sft.parquet"), ROWS)
        shown = [demonstration_ids(tokenizer, *demonstration(row), tools_of(row)) for row in rows]
        ids, masks = zip(*shown, strict=True)
        common = len([*takewhile(lambda column: len({*column}) == 1, zip(*ids, strict=False))])
        return Lengths([mask.index(1) for mask in masks], [*map(len, masks)], [*map(sum, masks)], common)
    rows = islice(parquet_rows(s.train_file), ROWS)
    prompts = [len(prompt_ids(tokenizer, decoded(row["prompt"]), tools_of(row))) for row in rows]
    limit = s.MAX_RESPONSE_LENGTH
    return Lengths(prompts, [prompt + limit for prompt in prompts], [limit] * len(prompts))


def mean(values) -> float:
    return sum(values) / len(values)


def powers(most: int) -> list[int]:
    """1, 2, 4 and so on up to the first that is not below ``most``."""
    return [2**power for power in range((most - 1).bit_length() + 1)]


def warm_up(model: Shapes, rows: Lengths, sequences: int) -> float:
    """Operations of a sequence in a pass of ``sequences``, each row as long as the longest: several in a row after what
    they have in common, so many that it is least (verl_plugins/cpu/shared_prompts.py)."""

    def taken(some: list[int], most: int) -> int:
        together = [some[at : at + most] for at in range(0, len(some), most)]
        common = rows.common if most > 1 else 0
        return operations(model, len(together), max(common + sum(each) - len(each) * common for each in together))

    passes = [rows.whole[at : at + sequences] for at in range(0, len(rows.whole), sequences)]
    ways = powers(sequences) if rows.common else [1]
    return sum(min(taken(some, most) for most in ways) for some in passes) / len(rows.whole)


def update(model: Shapes, prompt: float, response: float, sequences: int) -> float:
    """Operations of a response in a pass of ``sequences`` to one prompt, so many in a row that it is least."""
    ways = [(math.ceil(sequences / some), prompt + some * response) for some in powers(sequences)]
    return min(operations(model, *way) for way in ways) / sequences


def timed_update(model, length: int, said: int) -> float:
    """Seconds for each operation of a forward and a backward pass over sequences of ``length`` tokens, ``said`` of them
    in the loss: the CPU's trainers take the logits of these alone. The first pass warms up, and does not count."""
    ids = torch.randint(model.config.vocab_size, (max(1, LEARNED // length), length))
    for _ in range(2):
        began = time.monotonic()
        logits = model(input_ids=ids, logits_to_keep=said).logits.flatten(0, 1)
        torch.nn.functional.cross_entropy(logits, ids[:, -said:].flatten()).backward()
        model.zero_grad()
    return (time.monotonic() - began) / operations(shapes(model.config.to_dict()), *ids.shape)


@torch.no_grad()
def timed_sampling(model, sequences: int) -> float:
    """Seconds for each token that ``sequences`` at a time sample."""
    ids, cache = torch.zeros(sequences, 1, dtype=torch.long), None
    for step in range(DECODED + 1):
        if step == 1:
            began = time.monotonic()
        cache = model(input_ids=ids, past_key_values=cache, use_cache=True).past_key_values
    return (time.monotonic() - began) / (sequences * DECODED)


def seconds(
    s: Settings, model: Shapes, rows: Lengths, tested: int, start: float, learn: float, sample: float
) -> dict[str, float]:
    """By stage. ``tested``: prompts of the evaluation; ``start``: of this program, in seconds; ``learn``: for an
    operation, ``sample``: for a token that is sampled."""
    prompt, whole, said = map(mean, (rows.prompts, rows.whole, rows.said))
    read, heard = (FORWARD * learn * tokens * model.layer for tokens in (prompt, whole - prompt - said))
    warm = warm_up(model, rows, s.MICRO_BATCH_SIZE) * learn
    learned = UPDATE * update(model, prompt, whole - prompt, min(s.MICRO_BATCH_SIZE, s.ROLLOUT_N)) * learn
    step = s.TRAIN_BATCH_SIZE * (read + s.ROLLOUT_N * (heard + said * sample + learned))
    own = min(s.MAX_NEW_TOKENS, s.MAX_TURN_LENGTH)  # of MODEL itself, which has not learned to end
    answers = [own, said, *[said] * (s.INIT == "sft")]
    samples = s.N + s.GREEDY
    evaluated = tested * sum(read + samples * (heard + answer * sample) for answer in answers)
    work = {"sft": s.SFT_STEPS * s.SFT_BATCH_SIZE * warm, "train": s.STEPS * step, "eval": evaluated}
    return {stage: round(STARTS[stage] * start + work[stage], 1) for stage in work}


def main(name: str, file: str) -> None:
    s = load_settings()
    tokenizer = load_tokenizer(name)
    model = AutoModelForCausalLM.from_pretrained(name, dtype=getattr(torch, stack(s.STACK).DTYPE))
    start, rows = time.time() - psutil.Process().create_time(), lengths(s, tokenizer)
    learn = timed_update(model, round(mean(rows.whole)), round(mean(rows.said)))
    sample = timed_sampling(model, s.TRAIN_BATCH_SIZE * s.ROLLOUT_N)
    tested = s.LIMIT or sum(1 for _ in parquet_rows(s.data_dir / "test.parquet"))
    passes = {"start": start, "learn": learn, "sample": sample}
    found = seconds(s, shapes(model.config.to_dict()), rows, tested, **passes)
    write_json(Path(file), {"passes": passes, "seconds": found})


if __name__ == "__main__":
    main(*sys.argv[1:])
