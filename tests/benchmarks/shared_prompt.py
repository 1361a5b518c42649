"""What a GRPO update on one GPU would gain if each prompt were computed once for all its samples.

    python3 -m tests.benchmarks.shared_prompt OUT.json [--shape 3b]
    PYTHONPATH=. .venv/bin/python -m tests.benchmarks.shared_prompt OUT.json --device cpu --tiny     how, without a GPU

Times forward and backward passes of a random model with gradient checkpointing, in four ways:

- now: packed sequences, each with its own prompt, torch's varlen kernel, log-probs of all tokens: as `current`
  (stacks/current/varlen_attention.py; verl's fused kernel, verl/utils/experimental/torch_functional.py).
- now_responses: the same with log-probs of the responses alone.
- alone_flex: the same packed rows and log-probs, through compiled flex_attention.
- shared: a prompt, then its responses, each of which sees the prompt and itself; flex_attention.

Needs torch and transformers only. All responses have the same length, a multiple of flex_attention's blocks, which is
the best case for it. First a few layers are checked: how far log-probs and gradients of each way are from float32 on
each sequence alone. Writes OUT.json after each part; exit status 1 where a way is wrong or failed.
"""

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tasks.common.machine.memory import EMBEDDED_CONFIG
from tasks.common.machine.speed import QWEN25_3B
from tasks.common.stacks.current.reference_attention import reference_kernel

SHAPES = {"135m": EMBEDDED_CONFIG, "3b": QWEN25_3B}
TINY = {
    "model_type": "qwen2",
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 97,
    "tie_word_embeddings": True,
}
SAMPLES, REPEATS, CHECKED_LAYERS, CHUNK = 16, 5, 4, 512
# Seconds after which no further way is timed; without a limit for --tiny.
SECONDS = {"135m": 65, "3b": 110}
TOLERANCE = 1.5  # times as far from float32 as `now` may another way be, or ROUNDING; none more than LARGEST
ROUNDING, LARGEST = 1e-4, 0.1
PROMPT = -1  # the owner of a token that all sequences of its row see


@dataclass(frozen=True)
class Case:
    """``groups`` prompts of ``prompt`` tokens, SAMPLES responses of ``response`` tokens to each. One prompt a pass."""

    prompt: int
    response: int
    groups: int = 1


CASES = {
    "135m": {"1024 + 256": Case(1024, 256), "1024 + 1024": Case(1024, 1024, groups=4)},
    "3b": {"1024 + 256": Case(1024, 256), "1024 + 1024": Case(1024, 1024)},
    "tiny": {"20 + 6": Case(20, 6, groups=2)},
}


@dataclass(frozen=True)
class Row:
    """One row of tokens for a prompt and its responses."""

    ids: torch.Tensor  # (1, tokens)
    positions: torch.Tensor  # (1, tokens), of each token in its sequence
    owner: torch.Tensor  # (tokens,): the number of its sequence, or PROMPT
    places: torch.Tensor  # (samples x response,): the tokens that predict the responses' tokens, response by response
    labels: torch.Tensor  # (samples x response,): the tokens that they predict


def alone(prompt: torch.Tensor, responses: torch.Tensor) -> Row:
    """``responses`` (samples, length), each after its own copy of ``prompt`` (tokens)."""
    ids = torch.cat([prompt.expand(len(responses), -1), responses], dim=1)
    positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    owner = torch.arange(len(ids), device=ids.device)[:, None].expand_as(ids)
    places = torch.arange(ids.numel(), device=ids.device).view_as(ids)[:, len(prompt) - 1 : -1]
    return Row(ids.reshape(1, -1), positions.reshape(1, -1), owner.flatten(), places.flatten(), responses.flatten())


def shared(prompt: torch.Tensor, responses: torch.Tensor) -> Row:
    """``prompt`` once, then all ``responses``; positions go on behind the prompt for each."""
    samples, length = responses.shape
    after = torch.arange(len(prompt), len(prompt) + length, device=prompt.device).expand_as(responses)
    numbers = torch.arange(samples, device=prompt.device)[:, None].expand_as(responses)
    begin = len(prompt) + length * numbers[:, :1]
    places = torch.cat([torch.full_like(begin, len(prompt) - 1), begin + after[:, :-1] - len(prompt)], dim=1)
    return Row(
        ids=torch.cat([prompt, responses.flatten()])[None],
        positions=torch.cat([torch.arange(len(prompt), device=prompt.device), after.flatten()])[None],
        owner=torch.cat([torch.full_like(prompt, PROMPT), numbers.flatten()]),
        places=places.flatten(),
        labels=responses.flatten(),
    )


# ---- attention: what transformers calls is ATTENTION, set for each pass ----------------------------------------------

ATTENTION: Callable[..., torch.Tensor] | None = None  # of (rows, heads, tokens, size) to the same


def attend(module, query, key, value, attention_mask, *, scaling=None, **_) -> tuple[torch.Tensor, None]:
    """A function of transformers' AttentionInterface; returns (rows, tokens, heads, size)."""
    return ATTENTION(query, key, value, scaling).transpose(1, 2).contiguous(), None


AttentionInterface.register("shared_prompt_benchmark", attend)


def repeated(query: torch.Tensor, *others: torch.Tensor) -> list[torch.Tensor]:
    """Keys and values with as many heads as ``query``."""
    return [x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in others]


def sdpa(query, key, value, scaling) -> torch.Tensor:
    """Of whole sequences, one a row, in any dtype."""
    key, value = repeated(query, key, value)
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)


def varlen(row: Row) -> Callable[..., torch.Tensor]:
    """Of packed sequences, as stacks/current/varlen_attention.py."""
    starts = (row.positions[0] == 0).nonzero().flatten()
    offsets = torch.cat([starts, starts.new_tensor([row.positions.numel()])]).to(torch.int32)
    longest = int(offsets.diff().max())
    kernel = varlen_attn if row.ids.is_cuda else reference_kernel

    def of(query, key, value, scaling):
        packed = [x[0].transpose(0, 1).contiguous() for x in (query, key, value)]
        out = kernel(*packed, offsets, offsets, longest, longest, scale=scaling, window_size=(-1, 0))
        return out.transpose(0, 1)[None]

    return of


def sees(owner: torch.Tensor) -> Callable[..., torch.Tensor]:
    """flex_attention's mask: a token sees what stands before it of its own sequence and of the prompt."""

    def mask(batch, head, query, key):
        return (query >= key) & ((owner[query] == owner[key]) | (owner[key] == PROMPT))

    return mask


@dataclass
class Flex:
    """How flex_attention is called: the next of ``options`` where one fails. There is no backward pass on a CPU, which
    takes sdpa with the same mask, written out."""

    options: list[dict] = field(
        default_factory=lambda: [
            {"dynamic": None, "enable_gqa": True},
            {"dynamic": False, "enable_gqa": True},
            {"dynamic": False, "enable_gqa": False},
        ]
    )
    compiled: Callable | None = None

    def next(self) -> None:
        self.options.pop(0)
        self.compiled = None
        torch._dynamo.reset()

    def __call__(self, row: Row) -> Callable[..., torch.Tensor]:
        tokens, device = row.ids.numel(), row.ids.device
        if device.type == "cpu":
            mask = create_mask(sees(row.owner), 1, 1, tokens, tokens, device=device)
            kernel = torch.nn.functional.scaled_dot_product_attention
            return lambda q, k, v, scaling: kernel(q, k, v, attn_mask=mask, scale=scaling, enable_gqa=True)
        blocks = create_block_mask(sees(row.owner), None, None, tokens, tokens, device=device)
        # fullgraph: an error where it would compute all scores without a kernel.
        self.compiled = self.compiled or torch.compile(
            flex_attention, fullgraph=True, dynamic=self.options[0]["dynamic"]
        )
        gqa = self.options[0]["enable_gqa"]

        def of(query, key, value, scaling):
            key, value = (key, value) if gqa else repeated(query, key, value)
            return self.compiled(query, key, value, block_mask=blocks, scale=scaling, enable_gqa=gqa)

        return of


FLEX = Flex()
WAYS = {  # how rows are made; their attention; whether log-probs are of all tokens
    "now": (alone, varlen, True),
    "shared": (shared, FLEX, False),
    "alone_flex": (alone, FLEX, False),
    "now_responses": (alone, varlen, False),
}


# ---- log-probs -------------------------------------------------------------------------------------------------------


class LogProbs(torch.autograd.Function):
    """Log-probs of ``labels`` (tokens) from ``hidden`` (tokens, size) and ``weight`` (vocabulary, size), CHUNK tokens
    at once, and the entropy, which has no gradient here; as verl's FusedLinearForPPO."""

    @staticmethod
    def forward(context, hidden, weight, labels):
        log_probs, entropy = [], []
        for part, wanted in zip(hidden.split(CHUNK), labels.split(CHUNK), strict=True):
            logits = (part @ weight.t()).float()
            probs = logits.softmax(-1)
            entropy.append(logits.logsumexp(-1) - (probs * logits).sum(-1))
            log_probs.append(logits.log_softmax(-1).gather(-1, wanted[:, None])[:, 0])
        context.save_for_backward(hidden, weight, labels)
        entropy = torch.cat(entropy)
        context.mark_non_differentiable(entropy)
        return torch.cat(log_probs), entropy

    @staticmethod
    def backward(context, gradient, _):
        hidden, weight, labels = context.saved_tensors
        of_hidden, of_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        for start in range(0, len(hidden), CHUNK):
            part, of_part = hidden[start : start + CHUNK], gradient[start : start + CHUNK, None]
            probs = (part @ weight.t()).float().softmax(-1)
            one = torch.zeros_like(probs).scatter_(-1, labels[start : start + CHUNK, None], 1)
            of_logits = (of_part * (one - probs)).to(hidden.dtype)
            of_hidden[start : start + CHUNK] = of_logits @ weight
            of_weight += of_logits.t() @ part
        return of_hidden, of_weight, None


def passed(
    model: PreTrainedModel, row: Row, weights: torch.Tensor, whole: bool, rows: int = 1, exact: bool = False
) -> torch.Tensor:
    """The responses' log-probs, after a backward pass of their sum with ``weights``.

    ``whole``: log-probs of all tokens are computed, and those of the responses taken. ``rows``: how many rows the
    tokens stand in, for sdpa. ``exact``: torch's own log-probs.
    """
    ids, positions = row.ids.view(rows, -1), row.positions.view(rows, -1)
    hidden = model.model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state.flatten(0, 1)
    labels = row.ids[0].roll(-1) if whole else row.labels
    if whole:  # behind the last token of a response stands another sequence
        labels = labels.index_copy(0, row.places, row.labels)
    else:
        hidden = hidden[row.places]
    if exact:
        found = (hidden @ model.lm_head.weight.t()).log_softmax(-1).gather(-1, labels[:, None])[:, 0]
    else:
        found, _ = LogProbs.apply(hidden, model.lm_head.weight, labels)
    found = found[row.places] if whole else found
    (found * weights).sum().backward()
    return found.detach()


# ---- the check, and the times ----------------------------------------------------------------------------------------


def computed(device: str) -> torch.dtype:
    return torch.float32 if device == "cpu" else torch.bfloat16


def made(config: dict, device: str, dtype: torch.dtype) -> PreTrainedModel:
    """A random model of ``config`` in training mode. Its weights let attention move log-probs: the products of queries
    and keys, and the logits, have a spread of about 1."""
    torch.manual_seed(0)
    spread = 1.2 / math.sqrt(config["hidden_size"])
    whole = AutoConfig.for_model(**config, initializer_range=spread, max_position_embeddings=32768)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(whole, dtype=dtype, attn_implementation="shared_prompt_benchmark")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def drawn(case: Case, vocabulary: int, device: str) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], torch.Tensor]:
    """Prompts with their responses, and the weights of a response's tokens in the loss: an advantage for each."""
    generator = torch.Generator().manual_seed(1)
    groups = []
    for _ in range(case.groups):
        prompt = torch.randint(0, vocabulary, (case.prompt,), generator=generator)
        responses = torch.randint(0, vocabulary, (SAMPLES, case.response), generator=generator)
        groups.append((prompt.to(device), responses.to(device)))
    advantages = torch.randn(SAMPLES, generator=generator).repeat_interleave(case.response)
    return groups, (advantages / len(advantages)).to(device)


def values(model: PreTrainedModel, row: Row, attention: Callable, weights: torch.Tensor, **options) -> dict:
    """Log-probs (about their mean) and gradients of one pass, float32."""
    global ATTENTION
    model.zero_grad()
    ATTENTION = attention
    found = passed(model, row, weights, **options).float()
    gradients = torch.cat([p.grad.flatten().float() for p in model.parameters()])
    return {"log_probs": found - found.mean(), "gradients": gradients}


def distance(some: dict, right: dict) -> dict[str, float]:
    """Norm of the difference, relative to the norm of ``right``."""
    return {name: float((some[name] - right[name]).norm() / right[name].norm()) for name in right}


def check(config: dict, case: Case, device: str) -> dict:
    """How far each way is from exact, float32 on whole sequences, and from `now`; and whether it ``holds``."""
    config = config | {"num_hidden_layers": min(CHECKED_LAYERS, config["num_hidden_layers"])}
    (group, *_), weights = drawn(case, config["vocab_size"], device)
    row = alone(*group)
    model, exact = made(config, device, computed(device)), made(config, device, torch.float32)
    exact.load_state_dict(model.state_dict())  # the same rounded weights
    right = values(exact, row, sdpa, weights, whole=False, rows=SAMPLES, exact=True)
    result: dict = {"layers": config["num_hidden_layers"], "tolerance": TOLERANCE, "from exact": {}, "from now": {}}
    errors, now = result["from exact"], None
    for name, (make_row, attention, whole) in WAYS.items():
        try:
            row = make_row(*group)
            found = tried(attention, partial(one_pass, model, row, attention, weights, whole))
        except Exception as error:  # the others are still of use
            result.setdefault("errors", {})[name] = f"{type(error).__name__}: {str(error)[:1000]}"
            continue
        now = found if name == "now" else now
        errors[name] = distance(found, right)
        if now:
            result["from now"][name] = distance(found, now)
    result["holds"] = len(errors) == len(WAYS) and all(map(partial(near, errors["now"]), errors.values()))
    return result


def one_pass(model: PreTrainedModel, row: Row, attention: Callable, weights: torch.Tensor, whole: bool) -> dict:
    """``values`` with the attention of ``row`` that ``attention`` makes."""
    return values(model, row, attention(row), weights, whole=whole)


def near(of_now: dict[str, float], errors: dict[str, float]) -> bool:
    """Whether a way's ``errors`` are about those of `now`, or are rounding."""
    return all(errors[name] <= min(max(TOLERANCE * of_now[name], ROUNDING), LARGEST) for name in of_now)


def tried(attention: Callable, run: Callable[[], dict]) -> dict:
    """What ``run`` returns; where ``attention`` is flex_attention, with the first of its options that works."""
    while True:
        try:
            return run()
        except Exception as error:
            print(f"{FLEX.options[0]}: {type(error).__name__}: {str(error)[:400]}", flush=True)
            if attention is not FLEX or len(FLEX.options) == 1:
                raise
        FLEX.next()


def seconds(run: Callable[[], None], device: str) -> float:
    """How long ``run`` takes."""
    if device == "cpu":
        started = time.perf_counter()
        run()
        return time.perf_counter() - started
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    events[0].record()
    run()
    events[1].record()
    torch.cuda.synchronize()
    return events[0].elapsed_time(events[1]) / 1000


def timed(model: PreTrainedModel, case: Case, name: str, device: str) -> dict:
    """Median seconds of a forward and backward pass over all groups of ``case``, and its tokens and memory."""
    make_row, attention, whole = WAYS[name]
    groups, weights = drawn(case, model.config.vocab_size, device)
    rows = [make_row(*group) for group in groups]
    masks: list[Callable] = []

    def prepare() -> None:
        masks[:] = map(attention, rows)

    def run() -> None:
        global ATTENTION
        for row, mask in zip(rows, masks, strict=True):
            ATTENTION = mask
            passed(model, row, weights, whole)

    def warm() -> dict:
        model.zero_grad()
        prepare()
        return {"seconds_of_warm_up": seconds(run, device)}

    result: dict = {"prompts": case.groups, "tokens": sum(row.ids.numel() for row in rows), **tried(attention, warm)}
    result["seconds_of_masks"] = seconds(prepare, device)
    if device != "cpu":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(REPEATS):
        model.zero_grad()
        times.append(seconds(run, device))
    result |= {"seconds": statistics.median(times), "all_seconds": times}
    if device != "cpu":
        result["peak_memory_gb"] = torch.cuda.max_memory_allocated() / 1e9
    return result


def main() -> None:
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="135m")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a very small model and short sequences")
    args = parser.parse_args()
    config = TINY if args.tiny else SHAPES[args.shape]
    cases = CASES["tiny" if args.tiny else args.shape]
    limit = math.inf if args.tiny else SECONDS[args.shape]
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
        "versions": {name: version(name) for name in ("torch", "transformers")},
        "model": config,
        "samples": SAMPLES,
        "check": {},
        "cases": {name: {} for name in cases},
        "failed": [],
    }

    def part(where: dict, key: str, run: Callable[[], dict]) -> None:
        if time.monotonic() - began > limit:
            where[key] = {"left out": f"{limit} s had passed"}
        else:
            try:
                where[key] = run()
            except Exception as error:
                where[key] = {"error": f"{type(error).__name__}: {str(error)[:1000]}"}
                result["failed"].append(key)
        result["flex_attention"] = FLEX.options[0]
        result["seconds_in_all"] = time.monotonic() - began
        args.out.write_text(json.dumps(result, indent=1) + "\n")
        print(f"{result['seconds_in_all']:.0f} s: {key}: {where[key]}", flush=True)

    part(result, "check", lambda: check(config, next(iter(cases.values())), args.device))
    model = made(config, args.device, computed(args.device))
    for name, case in cases.items():
        for way in WAYS:
            part(result["cases"][name], way, lambda case=case, way=way: timed(model, case, way, args.device))
        median = {way: found["seconds"] for way, found in result["cases"][name].items() if "seconds" in found}
        print(f"{name}: {', '.join(f'{way} {value:.3f} s' for way, value in median.items())}")
    sys.exit(bool(result["failed"]) or not result["check"].get("holds"))


if __name__ == "__main__":
    main()
