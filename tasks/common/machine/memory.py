"""Estimate of the memory that a training needs, from the model's shapes and verl's config.

docs/DOCTOR.md compares the estimate with measurements.
"""

import contextlib
import functools
import json
import math
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise, product
from pathlib import Path

from safetensors import SafetensorError, safe_open

from verl_tasks.text import common_start

GIB = 2**30
HUB_SECONDS = 5.0
# config.json of SmolLM2-135M-Instruct, which may not be unpacked yet.
EMBEDDED_CONFIG = {
    "model_type": "llama",
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
}
PLAIN = ("llama", "qwen2", "qwen3")
PROMPTS_ONCE = "varlen_once"  # the attention of a pass of such a model with each prompt once (verl_plugins)
# Bytes per logit in the update without fused kernels, where the model computes in numbers of 2 or 4 bytes: the logits,
# their copy without padding, its log-softmax and the gradients of both (prepare_model_outputs in
# verl/workers/engine/fsdp/transformer_impl.py); in float32 there is no copy.
LOGIT_BYTES = {2: 10, 4: 12}
FUSED_CHUNK = 512  # tokens of logits at once with use_fused_kernels (verl/utils/experimental/torch_functional.py)
# Without use_remove_padding a micro-batch by tokens counts real tokens; padding then made up two thirds (countdown).
PADDED = 3
# Per GPU, measured with 0.5B on an H200 (docs/GPU.md): a trainer at rest held 7.0 GiB, 5.5 of them its weights and
# moments; the rest, CUDA's context and what the allocator keeps, is rounded up. vLLM asleep held 3.1 GiB: its context
# and CUDA graphs.
OVERHEAD, ASLEEP = 2e9, 3.3e9
PROCESSES = 6.2e9  # RAM of verl's, Ray's and vLLM's processes on the CPU; measured: docs/DOCTOR.md
MACHINE = 8  # GPUs that one machine has at most
SHARES = range(5, 95, 5)  # percent of a GPU for vLLM, that doctor advises
LEAST_SHARE = 30  # percent of what is free
TRAINER = 1.5e9  # RAM of a trainer without them


@dataclass(frozen=True)
class Shapes:
    """Sizes of a model. Widths are per token; ``linear``: inputs and outputs of a layer's matrices."""

    parameters: int
    embeddings: int  # parameters outside the layers
    layer: int  # parameters of one layer
    layers: int
    hidden: int
    intermediate: int
    queries: int
    keys: int  # width of the keys; the values have the same
    vocabulary: int
    linear: int
    tied: bool
    plain: bool = True
    heads: int = 1
    key_heads: int = 1
    window: int = 0  # tokens of the longest sequence; 0: the config does not say
    # vLLM's window is so many times as long. With YaRN verl 0.9.1 trains within ``window``. With LongRoPE transformers
    # turns all sequences of a pass otherwise where one is longer, and vLLM all where one may be.
    stretch: float = 1

    def divides(self, gpus: int) -> bool:
        """Whether each of so many GPUs can take whole heads; those of the keys may be copied."""
        return self.heads % gpus == 0 and (self.key_heads % gpus == 0 or gpus % self.key_heads == 0)

    def adapter(self, rank: int) -> int:
        """Parameters of a LoRA adapter on all linear layers: a matrix (inputs x rank) and one (rank x outputs)."""
        return rank * self.linear * self.layers


def shapes(config: dict, parameters: int = 0) -> Shapes | None:
    """The shapes of a model by its config.json; exact for llama, qwen2 and qwen3.

    Others need the number of their ``parameters``, from the weights: a layer is then the mean of all. None where the
    config names other fields.
    """
    try:
        hidden, layers, vocabulary = config["hidden_size"], config["num_hidden_layers"], config["vocab_size"]
        heads, intermediate = config["num_attention_heads"], config["intermediate_size"]
    except KeyError:
        return None
    head = config.get("head_dim") or hidden // heads
    key_heads = config.get("num_key_value_heads") or heads
    queries, keys = heads * head, key_heads * head
    linear = (hidden + queries) * 2 + (hidden + keys) * 2 + (hidden + intermediate) * 3
    tied = bool(config.get("tie_word_embeddings", False))
    embeddings = vocabulary * hidden * (1 if tied else 2) + hidden  # with the last norm
    kind = config.get("model_type")
    if kind in PLAIN:
        layer = 2 * hidden * queries + 2 * hidden * keys + 3 * hidden * intermediate + 2 * hidden
        if kind == "qwen2" or config.get("attention_bias"):
            layer += queries + 2 * keys + (0 if kind == "qwen2" else hidden)
        layer += 2 * head if kind == "qwen3" else 0  # norms of queries and keys
        layer += 2 * intermediate + hidden if config.get("mlp_bias") else 0
        parameters = embeddings + layers * layer
    elif not parameters:
        return None
    layer = (parameters - embeddings) // layers
    widths = (hidden, intermediate, queries, keys, vocabulary, linear)
    window = int(config.get("max_position_embeddings") or 0)
    stretch = float(_turned(config).get("factor") or 1)
    if short := short_window(config):
        window, stretch = short, window / short
    more = (tied, plain(config), heads, key_heads, window, stretch)
    return Shapes(parameters, embeddings, layer, layers, *widths, *more)


def _turned(config: dict) -> dict:
    """How positions are turned; transformers 4 has another name for it."""
    return config.get("rope_parameters") or config.get("rope_scaling") or {}


def short_window(config: dict) -> int:
    """Tokens up to which LongRoPE (Phi 3.5 and 4) turns as in short texts, where the window is longer; else 0."""
    turned = _turned(config)
    short = config.get("original_max_position_embeddings") or turned.get("original_max_position_embeddings") or 0
    return int(short) if "short_factor" in turned and short < (config.get("max_position_embeddings") or 0) else 0


def plain(config: dict) -> bool:
    """Whether the layers of a model are known: attention to all tokens before, and an MLP."""
    return config.get("model_type") in PLAIN and not config.get("use_sliding_window")


def operations(model: Shapes, rows: int, tokens: int) -> int:
    """Multiplications in a layer of a plain model for ``rows`` of so many tokens, whose scores all are computed."""
    return rows * tokens * (model.layer + 2 * tokens * model.queries)


def begun_alike(sequences: list[list[int]]) -> list[int]:
    """With how many tokens each of ``sequences`` begins as the one before it does; 0 for the first."""
    return [0, *(common_start(pair) for pair in pairwise(sequences))][: len(sequences)]


def powers(most: int) -> list[int]:
    """1, 2, 4 and so on up to the first that is not below ``most``."""
    return [2**power for power in range((most - 1).bit_length() + 1)]


def least_work(model: Shapes, lengths: list[int], alike: list[int]) -> tuple[int, int]:
    """Multiplications in a layer of a plain model for sequences of ``lengths``, and how many of them stand in a row so
    that it is least. With ``alike`` tokens each begins as the one before it does: in a row these stand once."""

    def taken(most: int) -> int:
        firsts = range(0, len(lengths), most)
        longest = max(sum(lengths[at : at + most]) - sum(alike[at + 1 : at + most]) for at in firsts)
        return operations(model, len(firsts), longest)

    return min((taken(some), some) for some in powers(len(lengths)))


def shapes_of(model: str) -> Shapes | None:
    """The shapes of MODEL: a folder, `embedded`, or a hub id whose config is in the cache or can be had; else None."""
    if model == "embedded":
        return shapes(EMBEDDED_CONFIG)
    try:
        if not (file := config_file(model)):
            return None
        config = json.loads(file.read_text())
        return shapes(config, 0 if config.get("model_type") in PLAIN else _stored_parameters(file.parent))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, SafetensorError):
        return None  # the files may hold anything


def config_file(model: str, ask: bool = True) -> Path | None:
    """config.json of a folder, or of a hub id in the cache, or where we ``ask`` on the hub; None without one. Raises
    ValueError for a name that is neither."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder / "config.json"
    if "/" not in model:
        raise ValueError(f"{model}: not a hub id (owner/name)")
    from huggingface_hub import try_to_load_from_cache

    if isinstance(found := try_to_load_from_cache(model, "config.json"), str):
        return Path(found)
    return _of_the_hub(model) if ask else None


@functools.cache
def _of_the_hub(model: str) -> Path | None:
    """config.json of a hub id; None where the hub does not give it within HUB_SECONDS."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()  # it would report each retry
    files = []

    def ask():
        with contextlib.suppress(Exception):  # no network, no such model, no permission: each raises another class
            files.append(Path(hf_hub_download(model, "config.json")))

    asking = threading.Thread(target=ask, daemon=True)  # without a network it retries for half a minute
    asking.start()
    asking.join(HUB_SECONDS)
    return files[0] if files else None


def _stored_parameters(folder: Path) -> int:
    """Numbers in the safetensors files of ``folder``, by their headers; 0 without any. Of several copies of the weights
    those count that transformers loads. Raises OSError where the index names a file that is missing."""
    count, whole, index = 0, folder / "model.safetensors", folder / "model.safetensors.index.json"
    files = [whole] if whole.is_file() else folder.glob("*.safetensors")
    if not whole.is_file() and index.is_file():
        files = [folder / name for name in {*json.loads(index.read_text())["weight_map"].values()}]
    for file in files:
        with safe_open(file, "numpy") as tensors:
            count += sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
    return count


@dataclass(frozen=True)
class Plan:
    """Settings of a training that decide its memory (training/verl_config.py reads them from verl's config)."""

    gpus: int = 1  # of the training
    gpus_here: int = 1  # of them in this machine
    samplers: int = 0  # other GPUs of this machine, on which vLLM is; 0: it is on those of the training
    tokens: int = 8192  # at most in one forward pass on a GPU
    sequence: int = 1024  # tokens of a prompt and its response
    response: int = 0  # of them in the response
    group: int = 1  # rows of one prompt that may stand in one pass
    tokens_by: str = "MICRO_BATCH_SIZE"  # the variable that sets tokens
    lora_rank: int = 0
    fused: bool = False
    padded: bool = False  # micro-batches by tokens, with padding
    checkpointing: bool = True
    weights_offloaded: bool = False
    optimizer_offloaded: bool = False
    sharded: bool = True
    critic: bool = False
    reference: bool = False
    reference_offloaded: bool = True
    share: float = 0.5  # of a GPU's memory for vLLM; 0: no vLLM
    tensor_parallel: int = 1
    sequence_parallel: int = 1  # GPUs that share a sequence, of which each takes ``tokens``
    loaded: int = 0  # models that each process of TRL (DPO) loads into RAM; 0: as verl
    batched_tokens: int = 8192  # of vLLM in one pass
    sequences: int = 256  # of vLLM at once
    on_cpu: bool = False
    number: int = 2  # bytes of a number that the model computes with
    cache_bytes: float = 0  # of vLLM on a CPU
    served: int = 0  # parameters of a teacher or a reward model, which has a vLLM of its own on that CPU

    @property
    def machines(self) -> int:
        """How many machines share the training."""
        return max(1, self.gpus // self.gpus_here)


@dataclass(frozen=True)
class Estimate:
    """Bytes by purpose. On a CPU everything is RAM."""

    ram: dict[str, float]  # of this machine
    update: dict[str, float] = field(default_factory=dict)  # of each GPU while the weights are updated
    sampling: dict[str, float] = field(default_factory=dict)  # of each GPU while vLLM samples
    engine: dict[str, float] = field(default_factory=dict)  # what vLLM's share must hold at least


def _trained(model: Shapes, plan: Plan) -> int:
    """Parameters that get gradients."""
    return model.adapter(plan.lora_rank) if plan.lora_rank else model.parameters


def _critic(model: Shapes, plan: Plan) -> int:
    """Parameters of the critic, which has no output head of its own; 0 without one."""
    return plan.critic * (model.parameters - (0 if model.tied else model.vocabulary * model.hidden))


def training_state(model: Shapes, plan: Plan) -> dict[str, float]:
    """Bytes per GPU of what stays from step to step.

    Mixed precision with Adam: fp32 weights 4 bytes a parameter, gradients 4, two moments 8 (Rajbhandari et al. 2020,
    arXiv 1910.02054, section 3.1), sharded over the GPUs by FSDP2. verl loads the actor and the critic in fp32, and
    so a frozen base model too (fsdp_config.model_dtype; verl/workers/engine/fsdp/transformer_impl.py, _build_module).
    The critic is trained in full. The reference lies in RAM (CPUOffloadPolicy there, forward_only), and with LoRA
    it is the model without its adapter.
    """
    over, trained = plan.gpus if plan.sharded else 1, _trained(model, plan)
    whole = model.parameters + (trained if plan.lora_rank else 0)
    state = {"weights": 4 * whole / over, "gradients": 4 * trained / over, "optimizer": 8 * trained / over}
    if plan.critic:
        state["critic"] = 16 * _critic(model, plan) / over
    if plan.reference and not plan.reference_offloaded and not plan.lora_rank:
        state["reference"] = 4 * model.parameters / over
    return state


def resting(model: Shapes, plan: Plan) -> dict[str, float]:
    """Bytes per GPU of the training state while vLLM samples: without gradients and without what is offloaded."""
    state = training_state(model, plan)
    if plan.critic:  # OFFLOAD is the critic's too
        state["critic"] *= (4 * (not plan.weights_offloaded) + 8 * (not plan.optimizer_offloaded)) / 16
    gone = {"gradients": True, "weights": plan.weights_offloaded, "optimizer": plan.optimizer_offloaded}
    return {name: size for name, size in state.items() if not gone.get(name)}


def passed(model: Shapes, plan: Plan) -> tuple[int, int]:
    """Tokens of the largest pass, and those of them with logits. On a CPU a plain model gets each prompt once where
    that is less work, and logits of the response alone (verl_plugins/cpu/shared_prompts.py)."""
    tokens = plan.tokens * (PADDED if plan.padded else 1)
    if not (plan.on_cpu and model.plain and plan.response) or plan.padded:
        return tokens, tokens
    rows = max(1, plan.tokens // plan.sequence)
    most = 1 if plan.critic else min(plan.group, rows)
    ways = {min(some, most) for some in powers(most)}
    choices = [(math.ceil(rows / some), plan.sequence + (some - 1) * plan.response) for some in sorted(ways)]
    groups, longest = min(choices, key=lambda shape: operations(model, *shape))
    return groups * longest if (groups, longest) != choices[0] else tokens, rows * plan.response


def working(model: Shapes, plan: Plan) -> dict[str, float]:
    """Bytes per GPU that only the update needs: logits, activations, and weights while they are gathered.

    Logits: tokens x vocabulary x LOGIT_BYTES; with fused kernels of FUSED_CHUNK tokens at once. Activations: with
    gradient checkpointing the input of each layer and all of one layer (Chen et al. 2016, arXiv 1604.06174),
    without it all of every layer, counted over a llama block: four norms and sums, in fp32 too, queries, keys and
    values before and after their rotation, four of the MLP; attention itself stores none of its scores (sdpa or flash).
    Gathered: FSDP2 has embeddings and two layers (the next is fetched ahead) at once.
    """
    (tokens, predicted), number = passed(model, plan), plan.number
    logits = FUSED_CHUNK * 16 if plan.fused else predicted * LOGIT_BYTES[number]
    block = (20 + number) * model.hidden + 2 * number * (model.queries + 2 * model.keys)
    block += 4 * number * model.intermediate
    kept = number * model.hidden * model.layers + block if plan.checkpointing else block * model.layers
    return {
        "logits": logits * model.vocabulary,
        "activations": tokens * kept,
        "gathered weights": number * (model.embeddings + 2 * model.layer),
    }


def engine(model: Shapes, plan: Plan) -> dict[str, float]:
    """Bytes per GPU that vLLM needs at least: weights, keys and values of one full-length sequence (2 x layers x
    width of the keys x bytes of a number; Kwon et al. 2023, arXiv 2309.06180, section 3.1), and a pass of
    max_num_batched_tokens with the fp32 logits of max_num_seqs."""
    parts = plan.tensor_parallel
    return {
        "weights": plan.number * model.parameters / parts,
        "one sequence": 2 * plan.number * model.layers * model.keys * plan.sequence / parts,
        "one pass": plan.batched_tokens * 2 * (2 * model.intermediate + 4 * model.hidden)
        + plan.sequences * model.vocabulary * 8,
    }


def estimate(model: Shapes, plan: Plan, gpu_bytes: float = 0) -> Estimate:
    """The memory that ``plan`` needs with ``model``, on GPUs of ``gpu_bytes`` in all (of which vLLM takes its share).

    The update's peak is its working set, or Adam's step, whose intermediate results take once more the trained weights
    (torch.optim.AdamW, "foreach"). While vLLM samples the gradients are gone and the rest of the training state stays;
    while the weights are updated vLLM sleeps (free_cache_engine). RAM: each process loads the whole model in fp32, only
    the first of them where embeddings are not tied (transformer_impl.py, use_meta_tensor); vLLM asleep keeps weights
    there when it serves an adapter.
    """
    state, work, vllm = training_state(model, plan), working(model, plan), engine(model, plan) if plan.share else {}
    if (step := state["weights"] if not plan.lora_rank else state["gradients"]) > sum(work.values()):
        work = {"Adam's step": step}
    own_reference = plan.reference and not plan.lora_rank  # with LoRA it is the model without its adapter
    if plan.on_cpu:
        ram = {name: bytes_ * plan.gpus for name, bytes_ in (state | work).items()}
        ram["processes"] = PROCESSES if plan.share else TRAINER * plan.gpus
        if own_reference:
            ram["reference"] = 4 * model.parameters
        if plan.share:
            ram["vLLM's weights"] = vllm["weights"] * (plan.samplers or plan.gpus)
            ram["vLLM's cache"] = plan.cache_bytes * (plan.samplers or plan.gpus)
        if plan.served:
            ram["teacher or reward model"] = plan.number * plan.served + plan.cache_bytes
        return Estimate(ram=ram)
    loaded = plan.loaded * plan.gpus_here or (plan.gpus_here if model.tied else 1)
    ram = {"loading": 4 * model.parameters * loaded}
    if own_reference and plan.reference_offloaded:
        ram["reference"] = 4 * model.parameters / plan.machines
    if plan.weights_offloaded:
        ram["offloaded weights"] = 4 * (model.parameters + _critic(model, plan)) / plan.machines
    if plan.optimizer_offloaded:
        ram["offloaded optimizer"] = 8 * (_trained(model, plan) + _critic(model, plan)) / plan.machines
    if plan.lora_rank and plan.share:
        ram["vLLM asleep"] = vllm["weights"] * plan.gpus_here
    beside = {} if plan.samplers else resting(model, plan)
    sampling = beside | {"vLLM": plan.share * gpu_bytes, "contexts": OVERHEAD} if plan.share else {}
    asleep = ASLEEP if plan.share and not plan.samplers else 0
    return Estimate(ram, state | work | {"contexts": OVERHEAD + asleep}, sampling, vllm)


def checkpoint_bytes(whole: int, contents: Iterable[str], adapter: int, base_too: bool, critic: Iterable[str]) -> float:
    """Bytes of a checkpoint of a model of ``whole`` parameters that has ``contents`` (verl's save_contents): fp32
    weights, two moments of Adam, an exported copy.

    With LoRA of ``adapter`` parameters: the adapter's weights and moments, and where ``base_too`` the base's weights.
    ``critic``: what it has of a critic.
    """
    each = {"model": 4 * whole, "optimizer": 8 * whole, "hf_model": 4 * whole}
    policy = each | {"model": 4 * (adapter + whole * base_too), "optimizer": 8 * adapter} if adapter else each
    return sum(policy.get(part, 0) for part in contents) + sum(each.get(part, 0) for part in critic)


# ---- what does not fit ---------------------------------------------------------------------------------------------


def too_much(
    model: Shapes,
    plan: Plan,
    gpu_bytes: float,
    ram_bytes: float,
    whole: float = 0,
    spare: float = 0,
    takes: Callable[[dict[str, float]], bool] = lambda changes: True,
    there: int = 0,
) -> list[tuple[str, str]]:
    """What of ``plan`` does not fit into ``gpu_bytes`` of each GPU and ``ram_bytes`` (0: not checked): pairs of the
    problem and what to change. ``whole``: bytes of a GPU, of which vLLM takes its share; 0: all are free. The change is
    one of variables that ``takes`` accepts, on at most the GPUs ``there`` of a machine (0: not known), and leaves the
    part ``spare`` of a GPU."""
    whole = whole or gpu_bytes
    if not (found := _problems(model, plan, gpu_bytes, ram_bytes, whole)):
        return []
    fix = _remedy(model, plan, ((1 - spare) * gpu_bytes, ram_bytes, (1 - spare) * whole), takes, there)
    return [(text, fix) for text in found]


def _problems(model: Shapes, plan: Plan, gpu_bytes: float, ram_bytes: float, whole: float) -> list[str]:
    """What does not fit, in words."""
    found, needs, vllm = [], estimate(model, plan, whole), plan.share * whole
    ram, update, sampling, least = (sum(p.values()) for p in (needs.ram, needs.update, needs.sampling, needs.engine))
    if ram_bytes and ram > ram_bytes:
        found.append(f"RAM: about {gb(ram)} of {gb(ram_bytes)} ({words_of(needs.ram)})")
    if update > gpu_bytes:
        found.append(f"update: about {gb(update)} of {gb(gpu_bytes)} on each GPU ({words_of(needs.update)})")
    if vllm < least and not plan.on_cpu:
        found.append(
            f"vLLM: GPU_MEMORY_UTILIZATION={plan.share:g} is {gb(vllm)}, and its weights with "
            f"one sequence of {plan.sequence} tokens take about {gb(least)}"
        )
    elif sampling > gpu_bytes:
        found.append(f"sampling: about {gb(sampling)} of {gb(gpu_bytes)} on each GPU ({words_of(needs.sampling)})")
    return found


def _remedy(model: Shapes, plan: Plan, sizes: tuple[float, float, float], takes: Callable, there: int) -> str:
    """What makes ``plan`` fit on its GPUs; else another number of GPUs of a machine, an adapter, shorter texts or a
    smaller model."""

    def first_that_fits(plans: Iterable[Plan]) -> list[str]:
        changed = filter(
            None, (_that_fits(model, each, *sizes, lambda new: takes(_changes(plan, new))) for each in plans)
        )
        changes = [_changes(plan, each) for each in islice(changed, 1)]
        return ["set " + " ".join(f"{name}={value}" for name, value in each.items()) for each in changes]

    if here := first_that_fits([plan]):
        return here[0]
    lacks_ram = sizes[1] and sum(estimate(model, plan).ram.values()) > sizes[1]
    may_grow = plan.sharded and not plan.on_cpu and not plan.samplers  # N_GPUS counts these too
    counts = [n for n in (2, 4, 8) if may_grow and plan.gpus_here < n <= (there or MACHINE)]
    if lacks_ram and not plan.samplers:  # each process may load the whole model
        counts = [n for n in range(plan.gpus_here - 1, 0, -1) if plan.gpus_here % n == 0] + counts
    others = [replace(plan, gpus=n * plan.machines, gpus_here=n) for n in counts]
    unsharded = {"sharded": False, "loaded": 1} if plan.loaded else {}  # training/methods/dpo.py
    adapters = [] if plan.lora_rank else [replace(each, lora_rank=16, **unsharded) for each in (plan, *others)]
    on_others, larger = first_that_fits(others), [] if plan.on_cpu else ["take more GPUs"]
    ways = on_others + first_that_fits(adapters)
    shorter = replace(plan, sequence=plan.sequence // 2)
    if not ways and _that_fits(model, shorter, *sizes, lambda changed: True):
        ways = ["lower MAX_PROMPT_LENGTH or MAX_RESPONSE_LENGTH"]
    larger = [] if on_others else ["take a machine with more RAM"] if lacks_ram and not plan.on_cpu else larger
    return " or ".join([*ways, *larger, "take a smaller MODEL"])


def _that_fits(
    model: Shapes, plan: Plan, gpu_bytes: float, ram_bytes: float, whole: float, taken: Callable[[Plan], bool]
) -> Plan | None:
    """``plan`` with fewer tokens in a pass, another share for vLLM, the model or a sequence over more GPUs, or the
    training state in RAM while vLLM samples or no longer there, so that it fits and is ``taken``."""
    engines = plan.samplers or plan.gpus_here
    tps = _shared(model, plan, plan.tensor_parallel, engines) if plan.share else [plan.tensor_parallel]
    by_tokens = plan.tokens_by == "MAX_TOKENS_PER_GPU"
    sps = _shared(model, plan, plan.sequence_parallel, plan.gpus_here) if by_tokens else [plan.sequence_parallel]
    away = not (plan.weights_offloaded and plan.optimizer_offloaded)
    other = {"weights_offloaded": away, "optimizer_offloaded": away}
    states = [{}, other] if plan.share and plan.sharded and not plan.on_cpu and not plan.samplers else [{}]
    shares = {plan.share, *(share / 100 for share in SHARES if share * whole >= LEAST_SHARE * gpu_bytes)}
    shares = sorted(shares, key=lambda share: abs(share - plan.share))  # the nearest first
    for sp, tp, state in product(sps, tps, states):
        among = replace(plan, sequence_parallel=sp, tensor_parallel=tp, **state)
        for tokens, share in product(_halved(among), shares if plan.share and not plan.on_cpu else [plan.share]):
            changed = replace(among, tokens=tokens, share=share)
            if not _problems(model, changed, gpu_bytes, ram_bytes, whole) and taken(changed):
                return changed
    return None


def _halved(plan: Plan) -> list[int]:
    """The tokens of a pass, and half of them, down to one sequence, DPO's pair, or a GPU's part of a sequence."""
    counts, least = [plan.tokens], plan.sequence * (2 if plan.loaded else 1)
    if plan.tokens_by == "MAX_TOKENS_PER_GPU":
        least = math.ceil(least / plan.sequence_parallel)
    while counts[-1] > least:
        counts.append(max(least, counts[-1] // 2))
    return counts


def _shared(model: Shapes, plan: Plan, least: int, gpus: int) -> list[int]:
    """Numbers of ``gpus`` from ``least`` on that may share a model or a sequence."""
    if plan.on_cpu:
        return [least]
    return [n for n in range(least, gpus + 1) if gpus % n == 0 and model.divides(n)]


def _changes(plan: Plan, changed: Plan) -> dict[str, float]:
    """The variables that make ``changed`` of ``plan``. On fewer GPUs the same MICRO_BATCH_SIZE may give larger passes
    (verl_config.micro_batch), so it is named."""
    unit = plan.sequence if plan.tokens_by == "MICRO_BATCH_SIZE" else 1
    kept = changed.gpus_here >= plan.gpus_here or plan.tokens_by != "MICRO_BATCH_SIZE"
    found = {
        "N_GPUS": (changed.gpus_here, plan.gpus_here),
        "LORA_RANK": (changed.lora_rank, plan.lora_rank),
        "TP": (changed.tensor_parallel, plan.tensor_parallel),
        "SP": (changed.sequence_parallel, plan.sequence_parallel),
        "OFFLOAD": (int(changed.weights_offloaded), int(plan.weights_offloaded)),
        "GPU_MEMORY_UTILIZATION": (changed.share, plan.share),
        plan.tokens_by: (changed.tokens // unit, plan.tokens // unit if kept else 0),
    }
    return {name: value for name, (value, before) in found.items() if value != before}


def gb(count: float) -> str:
    """Bytes in GB, for people."""
    return f"{count / 1e9:.1f} GB" if count < 100e9 else f"{count / 1e9:.0f} GB"


def words_of(parts: dict[str, float]) -> str:
    """Bytes by purpose, for people; what is next to nothing is left out."""
    return ", ".join(f"{name} {gb(value)}" for name, value in parts.items() if value >= 5e7)


def summary(model: Shapes, plan: Plan, gpu_bytes: float) -> str:
    """The estimate in one line, as ``estimate``."""
    needs = estimate(model, plan, gpu_bytes)
    trains, samples = (" on each GPU that trains", " on each that samples") if plan.samplers else ("", " on each GPU")
    parts = (("update", needs.update, trains), ("sampling", needs.sampling, samples), ("RAM", needs.ram, ""))
    sizes = [f"{name} {gb(sum(part.values()))}{where}" for name, part, where in parts if part]
    return ", ".join([f"{model.parameters / 1e6:,.1f} M parameters", *sizes])
