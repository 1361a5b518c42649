"""Each prompt once on a GPU (verl_plugins/prompts_once.py) beside verl's packed rows: numbers, seconds and memory.

    PYTHONPATH=. .venv/bin/python -m tests.benchmarks.prompts_once --model FOLDER [--out FILE.json]

Without Ray: verl's FSDP engine as STACK=current makes it, in bfloat16, in this process. First the attention alone,
beside a mask in float32. Then log-probs and the gradient of both ways, and of transformers' model in float32, which
takes each sequence alone. Then seconds and peak memory of an update without the optimizer's step. Exit 1 where
log-probs differ by more than NATS in the mean and are further from float32 than verl's own, or the gradient is. The
sequences are cut from docs/: random ids have tokens that were never trained, and their gradients are noise in bfloat16.
With --tiny on a CPU, in float32, with a random model, random ids and a reference of the kernel.
"""

import argparse
import gc
import importlib.util
import json
import os
import socket
import sys
import tempfile
import time
from pathlib import Path

import torch

NATS, SMALL, FURTHER = 1e-3, 1e-5, 1.1
DOCS = Path(__file__).parents[2] / "docs"
SECONDS = 60  # after the model is loaded; then no further round is begun
RESPONSES = 8
# Of each case the prompts, and how many tokens they and the responses have, least and most. Few responses are long: the
# lengths are exponential with the mean ``scale``, then cut.
NUMBERS = {"prompts": 6, "prompt": (100, 200), "response": (50, 512), "scale": 250}
UPDATES = {
    "short prompts": {"prompts": 64, "prompt": (100, 200), "response": (20, 512), "scale": 370},  # 280 in the mean
    "long prompts": {"prompts": 16, "prompt": (1500, 1500), "response": (200, 200), "scale": 200},
}
TINY = {"prompts": 6, "prompt": (5, 15), "response": (1, 20), "scale": 8}
# Of each row its prompts: their length, and those of their responses.
ROWS = {
    "groups of unequal length": [(150, [60, 512, 200]), (100, [33]), (1, [1, 1, 1]), (200, [300, 7])],
    "one token each": [(3, [1, 1]), (2, [1, 1])],
}
STARTED = time.monotonic()


def say(text: str) -> None:
    print(f"[{time.monotonic() - STARTED:5.1f} s] {text}", flush=True)


def prepare(tiny: bool) -> None:
    """What verl reads when it is imported, and when a process group of one is made."""
    from verl_tasks.stacks import current

    modules = current.ENVIRONMENT["VERL_USE_EXTERNAL_MODULES"]
    if tiny:
        os.environ["VERL_PLATFORM"] = "cpu"
        modules = f"verl_tasks.verl_plugins.cpu.verl_platform,{modules}"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"VERL_USE_EXTERNAL_MODULES": modules, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo")
    import verl  # noqa: F401  (loads those modules)
    from verl.utils.distributed import initialize_global_process_group

    from verl_tasks.verl_plugins import parity

    initialize_global_process_group()
    if tiny:
        torch.set_num_threads(1)
        parity.take_references()


def random_model(folder: Path) -> Path:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True, "initializer_range": 0.1}
    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(**sizes, **heads)).save_pretrained(folder)
    return folder


def text(folder: Path, tiny: bool) -> torch.Tensor:
    """The ids that sequences are cut from."""
    if tiny:
        return torch.randint(0, json.loads((folder / "config.json").read_text())["vocab_size"], (1000,))
    from transformers import AutoTokenizer

    pages = "\n".join(page.read_text() for page in sorted(DOCS.glob("*.md")))
    return torch.tensor(AutoTokenizer.from_pretrained(folder)(pages)["input_ids"])


def drawn(case: dict, ids: torch.Tensor) -> tuple[list[torch.Tensor], list[int]]:
    """Sequences cut from ``ids``, in no order, and how long the prompt of each is."""
    generator = torch.Generator().manual_seed(1)

    def cut(count: int) -> torch.Tensor:
        begin = int(torch.randint(0, len(ids) - count, (1,), generator=generator))
        return ids[begin : begin + count]

    low, high = case["prompt"]
    rows = []
    for _ in range(case["prompts"]):
        length = int(torch.randint(low, high + 1, (1,), generator=generator))
        prompt = cut(length)
        own = torch.empty(RESPONSES).exponential_(1 / case["scale"], generator=generator)
        for count in own.clamp(*case["response"]).long().tolist():
            rows.append((torch.cat([prompt, cut(count)]), length))
    order = torch.randperm(len(rows), generator=generator).tolist()
    return [rows[n][0] for n in order], [rows[n][1] for n in order]


def positions(row: list[tuple[int, list[int]]]) -> torch.Tensor:
    """(1, tokens): those of a packed row in which each prompt stands once."""
    parts = []
    for prompt, responses in row:
        parts.append(torch.arange(prompt))
        parts += [torch.arange(prompt, prompt + count) for count in responses]
    return torch.cat(parts)[None]


def seen(row: list[tuple[int, list[int]]]) -> torch.Tensor:
    """(tokens, tokens), bool: which a token sees, from the prompts and responses that they are of."""
    group, part = [], []  # of each token; part 0 is the prompt
    for number, (prompt, responses) in enumerate(row):
        counts = [prompt, *responses]
        group += [number] * sum(counts)
        part += [each for each, count in enumerate(counts) for _ in range(count)]
    group, part = torch.tensor(group), torch.tensor(part)
    same = group[:, None] == group
    return (same & ((part == 0) | (part[:, None] == part))).tril()


def attention(row: list[tuple[int, list[int]]], device: str, dtype: torch.dtype) -> dict[str, float]:
    """How far the result and the gradients are from a mask's in float32, relative to their norms; ``sdpa``: how far
    those of a mask are in ``dtype``. As Qwen2.5-1.5B has heads."""
    from verl_tasks.verl_plugins.varlen_once import varlen_once

    where, mask = positions(row).to(device), seen(row).to(device)
    torch.manual_seed(0)
    heads = (12, 2, 2, 12)
    *inputs, wanted = (torch.randn(1, n, where.shape[1], 128, device=device).to(dtype) for n in heads)

    def by_mask(query, key, value):
        given = {"attn_mask": mask, "enable_gqa": True}
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, **given).transpose(1, 2)

    def ours(query, key, value):
        return varlen_once(None, query, key, value, None, position_ids=where)[0]

    def computed(function, of: torch.dtype) -> list[torch.Tensor]:
        leaves = [x.to(of).requires_grad_() for x in inputs]
        out = function(*leaves)
        found = [out, *torch.autograd.grad(out, leaves, wanted.to(of).transpose(1, 2))]
        return [x.detach().float() for x in found]

    right, mine, sdpa = computed(by_mask, torch.float32), computed(ours, dtype), computed(by_mask, dtype)
    names = ("result", "query", "key", "value")
    off = {n: float((a - b).norm() / b.norm()) for n, a, b in zip(names, mine, right, strict=True)}
    return off | {"sdpa": max(float((a - b).norm() / b.norm()) for a, b in zip(sdpa, right, strict=True))}


def batch(rows: list[torch.Tensor], prompts: list[int], tokens: int, device: str):
    """As a worker has it. ``weights``: of each predicting token, as a loss with advantages has them."""
    from verl_tasks.stacks import current
    from verl_tasks.verl_plugins import parity

    path = current.PATHS["packed, fused head"]
    data = parity.batch(rows, path, tokens, temperature=1.0, prompts=prompts)
    data["weights"] = torch.nested.as_nested_tensor(weights(rows, prompts), layout=torch.jagged)
    return data.to(device)


def weights(rows: list[torch.Tensor], prompts: list[int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    advantages = torch.randn(len(rows), generator=generator)
    total = sum(map(len, rows)) - sum(prompts)
    found = []
    for row, prompt, advantage in zip(rows, prompts, advantages, strict=True):
        own = torch.zeros(len(row))
        own[prompt - 1 : -1] = advantage / total
        found.append(own)
    return found


def loss(model_output, data, dp_group):
    return (model_output["log_probs"].values() * data["weights"].values()).sum(), {}


def gradients(module) -> list[torch.Tensor]:
    from verl_tasks.verl_plugins import parity

    return [parity.whole(p.grad).detach().float().clone() for _, p in sorted(module.named_parameters())]


def in_float32(folder: Path, rows: list[torch.Tensor], prompts: list[int], device: str) -> dict:
    """Log-probs and gradient of transformers' model, which takes each sequence alone."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").to(device)
    found = []
    for row, prompt, own in zip(rows, prompts, weights(rows, prompts), strict=True):
        row = row.to(device)
        logits = model(input_ids=row[None], use_cache=False).logits[0, prompt - 1 : -1]
        log_probs = logits.log_softmax(-1).gather(-1, row[prompt:, None])[:, 0]
        (log_probs * own[prompt - 1 : -1].to(device)).sum().backward()
        found.append(log_probs.detach())
    return {"log_probs": torch.cat(found), "gradients": gradients(model)}


class Engine:
    """verl's engine, and both ways through it, by the name of the attention."""

    def __init__(self, folder: Path, tiny: bool):
        from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

        from verl_tasks.machine.memory import PROMPTS_ONCE
        from verl_tasks.stacks import current
        from verl_tasks.verl_plugins import parity

        # Where it is installed, a training with a plain model has it.
        self.liger = current.LIGER and not tiny and importlib.util.find_spec("liger_kernel") is not None
        path = current.PATHS["packed, fused head"] | {"liger": self.liger}
        self.ways = {"ordinary": path["attention"], "once": PROMPTS_ONCE}
        self.made = parity.engine(FSDPEngineWithLMHead, folder, path, dtype="fp32" if tiny else "bf16")
        self.passed: list[int] = []
        self.made.module.get_decoder().register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, module, given, named):
        self.passed.append(named["input_ids"].shape[1])

    def take(self, way: str) -> None:
        self.made.module.config._attn_implementation = self.ways[way]
        self.passed.clear()

    def numbers(self, way: str, data, prompts: list[int]) -> dict:
        self.take(way)
        with self.made.eval_mode():
            found = self.made.infer_batch(data)["model_output"]["log_probs"].unbind()
        log_probs = [row[prompt - 1 : -1] for row, prompt in zip(found, prompts, strict=True)]
        with self.made.train_mode():
            self.made.forward_backward_batch(data, loss)
            own = gradients(self.made.module)
        return {"log_probs": torch.cat(log_probs).float(), "gradients": own}

    def update(self, way: str, data) -> dict:
        """Seconds, peak memory and passes of an update of the batch, without the optimizer's step."""
        on_gpu = torch.cuda.is_available()
        self.take(way)
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        with self.made.train_mode():
            begin = time.perf_counter()
            self.made.forward_backward_batch(data, loss)
            if on_gpu:
                torch.cuda.synchronize()
            seconds = time.perf_counter() - begin
        peak = torch.cuda.max_memory_allocated() / 1e9 if on_gpu else None
        return {"seconds": seconds, "peak_gb": peak, "tokens": sum(self.passed), "passes": len(self.passed)}


def distance(one: dict, other: dict) -> dict[str, float]:
    """Of log-probs in nats; of the gradient relative to the norm of ``other``'s."""
    off = (one["log_probs"] - other["log_probs"]).abs()
    pairs = [*zip(one["gradients"], other["gradients"], strict=True)]
    apart = sum(float((a - b).square().sum(dtype=torch.float64)) for a, b in pairs) ** 0.5
    size = sum(float(b.square().sum(dtype=torch.float64)) for _, b in pairs) ** 0.5
    return {"mean": float(off.mean()), "max": float(off.max()), "gradient": apart / size}


def compared(engine: Engine, exact: dict, rows: list[torch.Tensor], prompts: list[int], tokens: int, device: str):
    """Distances of the two ways from each other and from float32, and whether they hold."""
    data = batch(rows, prompts, tokens, device)
    found = {way: engine.numbers(way, data, prompts) for way in engine.ways}
    pairs = {"once from ordinary": ("once", "ordinary"), "ordinary from float32": ("ordinary", "float32")}
    pairs["once from float32"] = ("once", "float32")
    found["float32"] = exact
    result = {name: distance(found[one], found[other]) for name, (one, other) in pairs.items()}
    for name, each in result.items():
        say(f"{name}: " + ", ".join(f"{what} {value:.2e}" for what, value in each.items()))
    mine, verls = result["once from float32"], result["ordinary from float32"]
    near = result["once from ordinary"]["mean"] <= NATS or mine["mean"] <= FURTHER * verls["mean"]
    return result | {"holds": near and mine["gradient"] <= max(SMALL, FURTHER * verls["gradient"])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    parser.add_argument("--tokens", type=int, default=32768, help="of a pass, as MAX_TOKENS_PER_GPU")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tiny", action="store_true", help="on a CPU, with a random model")
    given = parser.parse_args()
    prepare(given.tiny)
    from tests.recipes import machine

    device, tokens = ("cpu", 120) if given.tiny else ("cuda", given.tokens)
    result = {"attention": {}}
    for name, row in ROWS.items():
        off = attention(row, device, torch.float32 if given.tiny else torch.bfloat16)
        say(f"attention, {name}: " + ", ".join(f"{what} {value:.1e}" for what, value in off.items()))
        result["attention"][name] = off
    folder = random_model(Path(tempfile.mkdtemp())) if given.tiny else given.model
    ids = text(folder, given.tiny)
    rows, prompts = drawn(TINY if given.tiny else NUMBERS, ids)
    say(f"{len(rows)} sequences in float32, each alone")
    exact = in_float32(folder, rows, prompts, device)  # first: verl changes the classes of transformers
    gc.collect()
    torch.cuda.empty_cache()
    say("verl's engine")
    engine, loaded = Engine(folder, given.tiny), time.monotonic()
    say(f"both ways, liger-kernel: {engine.liger}")
    result |= {"model": given.model and given.model.name, "tokens_of_a_pass": tokens, "liger": engine.liger}
    result["numbers"] = compared(engine, exact, rows, prompts, tokens, device)
    del exact
    gc.collect()
    torch.cuda.empty_cache()
    result["updates"] = {}
    for name, case in ({"tiny": TINY} if given.tiny else UPDATES).items():
        rows, prompts = drawn(case, ids)
        data, mean = batch(rows, prompts, tokens, device), sum(map(len, rows)) / len(rows) - sum(prompts) / len(prompts)
        rounds: dict[str, list[dict]] = {way: [] for way in engine.ways}
        for number in range(given.rounds):
            if number and time.monotonic() - loaded > SECONDS:
                break
            for way in rounds if number % 2 else reversed(rounds):
                rounds[way].append(engine.update(way, data))
                say(f"{name}, {way}: {rounds[way][-1]}")
        least = {way: min(each["seconds"] for each in found) for way, found in rounds.items()}
        result["updates"][name] = {"case": case | {"responses": RESPONSES, "mean": mean}, "rounds": rounds}
        result["updates"][name]["times as fast"] = least["ordinary"] / least["once"]
        say(f"{name}: once is {least['ordinary'] / least['once']:.2f} times as fast")
    result |= machine()
    if given.out:
        given.out.write_text(json.dumps(result, indent=1) + "\n")
    say("the numbers hold" if result["numbers"]["holds"] else "THE NUMBERS DIFFER")
    os._exit(sys.stdout.flush() or not result["numbers"]["holds"])  # engines leave threads that end slowly


if __name__ == "__main__":
    main()
