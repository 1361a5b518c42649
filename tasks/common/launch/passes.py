"""How long the stages of a first training take on a CPU, from small passes of MODEL that are timed here.

`python -m verl_tasks.launch.passes MODEL FILE` writes the seconds by stage to FILE. The passes learn as the trainers do
(FSDP2, master weights in float32, AdamW) and sample. The demonstrations say how long responses are: after a warm-up
they are like them, without one up to their limit.
"""

import math
import sys
import time
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from statistics import fmean

import psutil
import torch
from torch import distributed
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM

from verl_tasks.data.prepare import load_tokenizer
from verl_tasks.evaluation.engines import CPU_SEQUENCES
from verl_tasks.files import write_json
from verl_tasks.machine.memory import Shapes, begun_alike, least_work, operations, powers, shapes
from verl_tasks.models.chat_template import demonstration_ids, prompt_ids
from verl_tasks.rows import decoded, demonstration, parquet_rows, tools_of
from verl_tasks.settings import Settings, load_settings, stack

ROWS = 64  # whose lengths are counted
LEARNED = 512  # tokens of the pass that learns
FEW = 8  # tokens of one that does little but move the weights
DECODED = 8  # tokens of each sequence of the pass that samples
# What a stage takes beside its work, in starts of this program, which imports and loads the same: an estimate.
STARTS = {"sft": 4.5, "train": 9.0, "eval": 3.0}
FORWARD = 1 / 3  # of a forward and a backward pass
# Of a response after a warm-up, what no other one to its prompt begins with and is computed for it alone: an estimate.
OWN = 0.5


@dataclass(frozen=True)
class Timed:
    """Seconds that were measured here."""

    start: float  # of this program
    weights: float  # a pass that learns, beside its operations: the weights are gathered, cast, and their gradients
    learn: float  # an operation of it
    optimize: float  # a step of the optimizer
    decode: float  # a token of a sequence that is sampled alone
    sample: float  # a token of each other one that is sampled with it


@dataclass(frozen=True)
class Lengths:
    """Tokens of some rows: of their prompts, of all of each, of what the model says; a warm-up's ids."""

    prompts: list[int]
    whole: list[int]
    said: list[int]
    ids: list[list[int]] = field(default_factory=list)


def lengths(s: Settings, tokenizer) -> Lengths:
    """Of the demonstrations; without a warm-up of prompts with responses up to their limit."""
    if s.INIT == "sft":
        rows = islice(parquet_rows(s.data_dir / "sft.parquet"), ROWS)
        shown = [demonstration_ids(tokenizer, *demonstration(row), tools_of(row)) for row in rows]
        ids, masks = zip(*shown, strict=True)
        return Lengths([mask.index(1) for mask in masks], [*map(len, masks)], [*map(sum, masks)], [*ids])
    rows = islice(parquet_rows(s.train_file), ROWS)
    prompts = [len(prompt_ids(tokenizer, decoded(row["prompt"]), tools_of(row))) for row in rows]
    limit = s.MAX_RESPONSE_LENGTH
    return Lengths(prompts, [prompt + limit for prompt in prompts], [limit] * len(prompts))


def warm_up(model: Shapes, rows: Lengths, sequences: int) -> float:
    """Operations of a sequence in a pass of ``sequences`` (verl_plugins/cpu/shared_prompts.py)."""
    passes = [sorted(rows.ids[at : at + sequences]) for at in range(0, len(rows.ids), sequences)]
    return fmean([least_work(model, [*map(len, some)], begun_alike(some))[0] / len(some) for some in passes] or [0])


def update(model: Shapes, prompt: float, response: float, sequences: int) -> float:
    """Operations of a response in a pass of ``sequences`` to one prompt, so many in a row that it is least."""
    ways = [(math.ceil(sequences / some), prompt + some * response) for some in powers(sequences)]
    return min(operations(model, *way) for way in ways) / sequences


def sharded(model, dtype: torch.dtype) -> None:
    """``model`` in float32 as verl's trainers have it, which compute in ``dtype``."""
    if not distributed.is_initialized():
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    mesh = distributed.device_mesh.init_device_mesh("cpu", (1,))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    layers = [part for part in model.modules() if type(part).__name__ in (model._no_split_modules or ())]
    for part in (*layers, model):
        fully_shard(part, mesh=mesh, mp_policy=policy)


def timed_update(model, length: int, said: int, dtype: torch.dtype) -> tuple[float, float, float]:
    """Seconds of a pass beside its operations, of each of these, and of a step of the optimizer.

    The passes are over sequences of ``length`` tokens, ``said`` of them in the loss: the CPU's trainers take the logits
    of these alone, their log-probs and entropies. The first of each kind warms up, and does not count.
    """
    sharded(model.float(), dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    large, small, took = (max(1, LEARNED // length), length), (1, FEW), {}
    for shape in (large, large, small, small):
        ids, kept = torch.randint(model.config.vocab_size, shape), min(said, shape[1])
        began = time.monotonic()
        with torch.autocast("cpu", dtype, enabled=dtype is not torch.float32):
            logits = model(input_ids=ids, use_cache=False, logits_to_keep=kept).logits.flatten(0, 1)
            with torch.no_grad():
                (logits.softmax(-1) * logits).sum(-1) - logits.logsumexp(-1)
            torch.nn.functional.cross_entropy(logits, ids[:, -kept:].flatten()).backward()
        took[shape] = time.monotonic() - began
        began = time.monotonic()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        took["step"] = time.monotonic() - began
    work = operations(shapes(model.config.to_dict()), *large)
    return min(took[small], took[large]), max(0.0, took[large] - took[small]) / work, took["step"]


@torch.no_grad()
def timed_sampling(model, sequences: int) -> float:
    """Seconds in which ``sequences`` sample a token each."""
    ids, cache = torch.zeros(sequences, 1, dtype=torch.long), None
    for step in range(DECODED + 1):
        if step == 1:
            began = time.monotonic()
        cache = model(input_ids=ids, past_key_values=cache, use_cache=True).past_key_values
    return (time.monotonic() - began) / DECODED


def seconds(s: Settings, model: Shapes, rows: Lengths, tested: int, timed: Timed) -> dict[str, float]:
    """By stage. ``tested``: prompts of the evaluation.

    A step of RL samples until the last response ends. Among so many one is as long as the limit, whatever the mean: it
    is sampled alone then. An evaluation begins another one where one ends.
    """
    prompt, whole, said = map(fmean, (rows.prompts, rows.whole, rows.said))
    read, heard = (FORWARD * timed.learn * tokens * model.layer for tokens in (prompt, whole - prompt - said))
    warm = s.SFT_BATCH_SIZE * warm_up(model, rows, s.MICRO_BATCH_SIZE) * timed.learn
    warm += math.ceil(s.SFT_BATCH_SIZE / s.MICRO_BATCH_SIZE) * timed.weights + timed.optimize
    responses, updates = s.TRAIN_BATCH_SIZE * s.ROLLOUT_N, s.TRAIN_BATCH_SIZE // s.MINI_BATCH_SIZE
    own_tokens = (whole - prompt) * (OWN if s.INIT == "sft" else 1)
    learned = responses * update(model, prompt, own_tokens, min(s.MICRO_BATCH_SIZE, s.ROLLOUT_N)) * timed.learn
    learned += math.ceil(responses / s.MICRO_BATCH_SIZE) * timed.weights
    learned *= 1 + FORWARD * ((updates > 1) + (s.KL_COEF > 0))  # log-probs from before a step, and of the reference
    sampled = s.TRAIN_BATCH_SIZE * read + responses * (heard + said * timed.sample)
    sampled += s.MAX_RESPONSE_LENGTH * timed.decode
    step = sampled + learned + updates * timed.optimize + timed.weights  # which the engine gets
    own = min(s.MAX_NEW_TOKENS, s.MAX_TURN_LENGTH)  # of MODEL itself, which has not learned to end
    answers = [own, said, *[said] * (s.INIT == "sft")]
    samples, token = s.N + s.GREEDY, timed.decode / CPU_SEQUENCES + timed.sample
    evaluated = tested * sum(read + samples * (heard + answer * token) for answer in answers)
    work = {"sft": s.SFT_STEPS * warm, "train": s.STEPS * step, "eval": evaluated}
    return {stage: round(STARTS[stage] * timed.start + work[stage], 1) for stage in work}


def main(name: str, file: str) -> None:
    s = load_settings()
    tokenizer = load_tokenizer(name)
    dtype = getattr(torch, stack(s.STACK).DTYPE)
    model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, trust_remote_code=False)
    start, rows = time.time() - psutil.Process().create_time(), lengths(s, tokenizer)
    decode, together = timed_sampling(model, 1), timed_sampling(model, CPU_SEQUENCES)
    learned = timed_update(model, round(fmean(rows.whole)), round(fmean(rows.said)), dtype)
    timed = Timed(start, *learned, decode, max(0.0, together - decode) / (CPU_SEQUENCES - 1))
    tested = s.LIMIT or sum(1 for _ in parquet_rows(s.data_dir / "test.parquet"))
    found = seconds(s, shapes(model.config.to_dict()), rows, tested, timed)
    write_json(Path(file), {"passes": asdict(timed), "seconds": found})


if __name__ == "__main__":
    main(*sys.argv[1:])
