"""Does a stack's pass compute what the plain model computes? `python -m verl_tasks.verl_plugins.parity`.

Standard input: a JSON object with ``config`` (what config.json holds), ``paths`` (PATHS of a stack), ``liger``,
whether the stack has liger-kernel, ``critic``, whether there is one, and ``samples``, whether vLLM is asked for the
family (training/parity.py). The last line of standard output is what `compared` returns: of each path tried the largest
error of a log-prob (nats), the relative error of the gradient and of the critic's values, or why it failed, up to the
first that agrees; then the same of that path with liger-kernel.

verl's own engine takes a small random model of that config, with all sequences in a pass as the path packs or pads
them. transformers' eager model takes each sequence alone. Both are in float32 on the CPU, with a reference in place of
the GPU's attention kernel; triton's interpreter runs liger-kernel's.
"""

import contextlib
import gc
import io
import json
import operator
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from tensordict import TensorDict
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification
from verl.trainer.config.config import CheckpointConfig
from verl.utils import tensordict_utils
from verl.utils.model import get_hf_auto_model_class
from verl.workers.config.engine import FSDPEngineConfig
from verl.workers.config.model import HFModelConfig
from verl.workers.config.optimizer import FSDPOptimizerConfig
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead
from verl.workers.utils.losses import sft_loss

from verl_tasks.machine.memory import PROMPTS_ONCE, plain
from verl_tasks.models.small import small
from verl_tasks.text import one_line
from verl_tasks.verl_plugins import interpreted, varlen_attention, varlen_once
from verl_tasks.verl_plugins.reference_attention import reference_backward, reference_forward, reference_kernel

LENGTHS = (7, 13, 2, 16, 31, 5, 20, 9)
PROMPTS = (3, 1, 1, 3, 3, 1, 4, 3)  # tokens of them; those of the same length are the same
VOCABULARY, SPECIAL = 128, 32  # special tokens are among the last
TEMPERATURE = 0.7
TOKENS = 64  # of a pass: more than one
CRITICS = AutoModelForTokenClassification._model_mapping
EAGER = {"dtype": torch.float32, "attn_implementation": "eager", "trust_remote_code": False}
WIDTH = 4  # of a convolution; LFM2's have 3
NATS, RELATIVE = 1e-3, 1e-3  # float32 is within 1e-5; what was seen wrong is from 0.05 on


def write_small(values: dict, target: Path) -> dict[str, float]:
    """Write a small random model of the config with ``values``, without its ``noise``, which is returned. Raises what
    transformers raises."""
    (target / "config.json").write_text(json.dumps(values))
    config = small(AutoConfig.from_pretrained(target, trust_remote_code=False), vocabulary=VOCABULARY)
    found = noise(config)
    for name in found:
        part, _, own = name.rpartition(".")
        setattr(operator.attrgetter(part)(config) if part else config, own, 0.0)
    kind = get_hf_auto_model_class(config) if config.architectures else AutoModelForCausalLM
    torch.manual_seed(0)
    model = kind.from_config(config, **EAGER)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # zero at first: one that a path leaves out would not show
                parameter.normal_(std=0.3)
    model.save_pretrained(target)
    return found


def noise(config) -> dict[str, float]:
    """What of a config makes passes random in training, e.g. attention_dropout: the policy would not be the sampled
    one. That of a model with pictures is in the config of its text: text_config.attention_dropout."""
    own = {name: value for name, value in vars(config).items() if type(value) is float and value > 0}
    found = {name: value for name, value in own.items() if re.search(r"(?<!classifier_)dropout|pdrop|jitter", name)}
    text = config.get_text_config()
    inner = [(part, noise(its)) for part, its in vars(config).items() if its is text]
    return found | {f"{part}.{name}": value for part, of_it in inner for name, value in of_it.items()}


def sequences() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randint(3, VOCABULARY - SPECIAL, (length,), generator=generator) for length in LENGTHS]
    return [
        torch.cat([drawn[PROMPTS.index(prompt)][:prompt], row[prompt:]])
        for row, prompt in zip(drawn, PROMPTS, strict=True)
    ]


def batch(
    rows: list[torch.Tensor],
    path: dict,
    tokens: int = TOKENS,
    temperature: float = TEMPERATURE,
    prompts: tuple[int, ...] | None = None,
) -> TensorDict:
    """The sequences ``rows`` as verl's engine takes them, up to ``tokens`` of them in a pass; ``prompts``: how many
    tokens of each the others are predicted from."""
    nested = partial(torch.nested.as_nested_tensor, layout=torch.jagged)
    data = TensorDict(
        {
            "input_ids": nested(rows),
            "position_ids": nested([torch.arange(len(row)) for row in rows]),
            # The first token, which the token before would predict, is another sequence's.
            "loss_mask": nested(
                [(torch.arange(len(r)) >= n).float() for r, n in zip(rows, prompts or [1] * len(rows), strict=True)]
            ),
        },
        batch_size=len(rows),
    )
    if prompts:
        data["prompts"] = nested([row[:prompt] for row, prompt in zip(rows, prompts, strict=True)])
    tensordict_utils.assign_non_tensor(
        data,
        use_remove_padding=path["packed"],
        use_fused_kernels=path["fused"],
        use_dynamic_bsz=True,
        max_token_len_per_gpu=tokens,
        temperature=temperature,
        calculate_entropy=True,
    )
    return data


def engine(
    kind: type,
    folder: Path,
    path: dict,
    *,
    role: str = "language_model",
    shared: int = 1,
    dtype: str = "fp32",
    rank: int = 0,
):
    """verl's engine of ``kind`` for the model in ``folder``; ``shared``: GPUs a sequence, ``rank``: of an adapter."""
    made = kind(
        model_config=HFModelConfig(
            path=str(folder),
            load_tokenizer=False,
            override_config={"attn_implementation": path["attention"]},
            use_remove_padding=path["packed"],
            use_fused_kernels=path["fused"],
            fused_kernel_options={"impl_backend": "torch"},
            use_liger=path.get("liger", False),
            model_type=role,
            lora_rank=rank,
            lora_alpha=2 * rank or 16,
            target_modules="all-linear",
        ),
        engine_config=FSDPEngineConfig(
            strategy="fsdp2",
            ulysses_sequence_parallel_size=shared,
            use_torch_compile=False,
            mixed_precision={"param_dtype": dtype, "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
        ),
        optimizer_config=FSDPOptimizerConfig(lr=1e-3, total_training_steps=1),
        checkpoint_config=CheckpointConfig(),
    )
    made.initialize()
    return made


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def of_engine(folder: Path, path: dict) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probs of every token after a prompt, and the gradient of verl's SFT loss by parameter."""
    made, data = engine(FSDPEngineWithLMHead, folder, path), batch(sequences(), path, prompts=PROMPTS)
    # As a reference model: made where the first has patched transformers' module.
    reference = engine(FSDPEngineWithLMHead, folder, path)
    with reference.eval_mode():
        log_probs = reference.infer_batch(data)["model_output"]["log_probs"]
    with made.train_mode():
        made.forward_backward_batch(data, partial(sft_loss, None))
        found = {n: whole(p.grad).clone() for n, p in made.module.named_parameters() if p.grad is not None}
    rows = zip(log_probs.unbind(), PROMPTS, strict=True)
    return torch.cat([row[prompt - 1 : -1] for row, prompt in rows]).float(), found


def of_plain(folder: Path) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The same of transformers' eager model, which sees one sequence at a time."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    kind = get_hf_auto_model_class(config)
    model = kind.from_pretrained(folder, **EAGER).train()
    found = []
    for row, prompt in zip(sequences(), PROMPTS, strict=True):
        logits = model(input_ids=row[None], use_cache=False).logits[0, prompt - 1 : -1].float() / TEMPERATURE
        found.append(logits.log_softmax(-1).gather(-1, row[prompt:, None])[:, 0])
    log_probs = torch.cat(found)
    (-log_probs.mean()).backward()
    return log_probs.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def of_critic(folder: Path, path: dict) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The critic's value of every token, and its weights."""
    torch.manual_seed(0)
    path = path | {"fused": False}  # it has another head
    made = engine(FSDPEngineWithValueHead, folder, path, role="value_model")
    with made.eval_mode():
        values = torch.cat(list(made.infer_batch(batch(sequences(), path))["model_output"]["values"].unbind()))
    return values.flatten(), {name: whole(value) for name, value in made.module.state_dict().items()}


def of_plain_critic(folder: Path, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    """The values of transformers' eager model with those ``weights``, which sees one sequence at a time."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    config.num_labels, config.classifier_dropout, config.hidden_dropout = 1, 0.0, "0"
    plain = AutoModelForTokenClassification.from_config(config, **EAGER).eval()
    plain.load_state_dict(weights)
    with torch.no_grad():
        return torch.cat([plain(input_ids=row[None], use_cache=False).logits[0, :, 0] for row in sequences()])


def tried(folder: Path, path: dict, right: tuple, critic: bool) -> dict:
    """What came of ``path``: its errors, or ``failed``, in one line."""
    try:
        if path.get("liger"):
            _check_liger(folder)
        with undone(folder):
            log_probs, gradient = of_engine(folder, path)
            values, weights = of_critic(folder, path) if critic else (None, {})
        want, want_gradient = right
        result = {"nats": float((log_probs - want).abs().max())}
        names = want_gradient.keys() & gradient.keys()
        off = sum(float((gradient[n] - want_gradient[n]).double().square().sum()) for n in names)
        missing = want_gradient.keys() ^ gradient.keys()
        lost = sum(float({**want_gradient, **gradient}[n].double().square().sum()) for n in missing)
        size = sum(float(g.double().square().sum()) for g in want_gradient.values())
        result["gradient"] = ((off + lost) / size) ** 0.5
        if critic:
            alone = of_plain_critic(folder, weights)
            result["values"] = float((values - alone).abs().max() / alone.std())  # relative to their spread
    except Exception as error:
        return {"failed": _line(error)}
    finally:
        gc.collect()
    return result


def _check_liger(folder: Path) -> None:
    """Raise ValueError for a family without kernels, which verl would train without them and without a word."""
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    kind = AutoConfig.from_pretrained(folder, trust_remote_code=False).model_type
    if kind not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise ValueError(f"liger-kernel has no kernels for {kind}")


@contextlib.contextmanager
def undone(folder: Path) -> Iterator[None]:
    """At the end transformers' classes and module of the model are as before: verl gives fused heads to the class, and
    liger-kernel its kernels to the module, one also to torch."""
    names = json.loads((folder / "config.json").read_text()).get("architectures") or []
    kinds = [getattr(transformers, name) for name in names if hasattr(transformers, name)]
    spaces = [*kinds, *(sys.modules[kind.__module__] for kind in kinds), torch.nn.functional]
    before = [dict(vars(space)) for space in spaces]
    try:
        yield
    finally:
        for space, kept in zip(spaces, before, strict=True):
            for name in [name for name, value in vars(space).items() if kept.get(name) is not value]:
                setattr(space, name, kept[name]) if name in kept else delattr(space, name)


def agrees(result: dict) -> bool:
    """Whether a path's numbers are the plain model's; NaN is none."""
    limits = {"nats": NATS, "gradient": RELATIVE, "values": RELATIVE}
    return "failed" not in result and all(result[name] <= limits[name] for name in result)


def compared(values: dict, paths: dict[str, dict], critic: bool, liger: bool = False) -> dict:
    """Of each path tried its result and whether it ``agrees``, the config's ``noise``, and with ``liger`` what came of
    the path with liger-kernel; or ``unknown``, why the model cannot be made small; or ``refused``, why there is no
    critic."""
    with tempfile.TemporaryDirectory() as name:
        folder, found = Path(name), {}
        try:
            random = write_small(values, folder)
            right = of_plain(folder)
        except Exception as error:  # a family may fail anywhere
            return {"unknown": _line(error)}
        if critic and type(config := AutoConfig.from_pretrained(folder, trust_remote_code=False)) not in CRITICS:
            return {
                "refused": f"METHOD=ppo needs a critic, and transformers has no token classifier of {config.model_type}"
            }
        for path in paths:
            if paths[path]["attention"] == PROMPTS_ONCE and not plain(values):
                continue  # it would be the next one (prompts_once.py)
            result = tried(folder, paths[path], right, critic)
            found[path] = result | {"agrees": agrees(result)}
            if agrees(result):
                break
        faster = {}
        if liger and found[path]["agrees"]:
            result = tried(folder, paths[path] | {"liger": True}, right, critic)
            faster = {"liger": result | {"agrees": agrees(result)}}
    return {"paths": found, "noise": random} | faster


def unsampled(values: dict) -> str:
    """Why the vLLM that is installed cannot load the family of a config with ``values``; empty where it can."""
    from vllm import ModelRegistry

    # A CPU without these instructions does not pack it (model_executor/layers/utils.py:472).
    if (width := values.get("conv_L_cache") or WIDTH) != WIDTH and torch.cpu._is_avx512_bf16_supported():
        return f"on this CPU vLLM packs no convolution of width {width} (conv_L_cache), but of {WIDTH} alone"
    for name in values.get("architectures") or []:
        if known := ModelRegistry.models.get(name):  # any other runs on transformers' own layers
            try:
                known.inspect_model_cls()
            except Exception as error:  # it imports the family's module in a process
                last = str(error).strip().splitlines()[-1:]
                return f"this vLLM cannot load {name} ({one_line(''.join(last), 200)})"
    return ""


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {one_line(str(error), 200)}"


def start() -> None:
    """A process group of this process alone, the reference kernel, and what triton's interpreter lacks."""
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    torch.set_num_threads(1)
    take_references()
    with contextlib.suppress(ImportError):  # without triton liger-kernel is not imported either, which is said
        interpreted.complete()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def take_references() -> None:
    """References in place of the GPU's attention kernels."""
    varlen_attention.varlen_attn = reference_kernel
    varlen_once.flash_forward, varlen_once.flash_backward = reference_forward, reference_backward


def main() -> None:
    request = json.load(sys.stdin)
    with contextlib.redirect_stdout(io.StringIO()):
        start()
        if request["samples"] and (why := unsampled(request["config"])):
            found = {"unsampled": why}
        else:
            found = compared(request["config"], request["paths"], request["critic"], request["liger"])
    print(json.dumps(found), flush=True)
    os._exit(0)  # engines leave threads that end slowly


if __name__ == "__main__":
    main()
