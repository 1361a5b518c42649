"""Which pass of a stack computes MODEL's own numbers: the choice, and where it is kept.

A stack's PATHS, best first, say how the trainers pass sequences through a model: the attention, packed into one row or
padded, log-probs by a fused head or from the logits. verl takes any model through any of them, and some come out wrong
without a word: state of a recurrent layer leaks between packed sequences, a fused head leaves out what a model does to
its logits. `play` compares each path with the plain model on a small copy (verl_plugins/parity.py), until one agrees.
Where the stack has liger-kernel (LIGER), it compares that path with its kernels too: RMSNorm, SwiGLU and rotary
positions in one kernel each. They are taken where they agree.
"""

import functools
import hashlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from verl_tasks.files import read_json, write_json
from verl_tasks.machine import memory
from verl_tasks.models.merge import base_model
from verl_tasks.places import PACKAGE, PYTHON_PATH, installed
from verl_tasks.process import die_with_parent
from verl_tasks.settings import Settings, artifacts, stack
from verl_tasks.text import one_line

PROGRAM = "verl_tasks.verl_plugins.parity"
SECONDS = 300  # it takes 20
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")  # how many, as families name it
PACKAGES = ("verl", "transformers", "torch", "triton", "liger-kernel")
# On a CPU, whatever stack is played.
MODULES = "verl_tasks.verl_plugins.cpu.verl_platform,verl_tasks.verl_plugins.patches"
ENVIRONMENT = {"VERL_PLATFORM": "cpu", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
ENVIRONMENT |= {"VERL_USE_EXTERNAL_MODULES": f"{MODULES},verl_tasks.verl_plugins.varlen_attention"}
ENVIRONMENT |= {"TRITON_INTERPRET": "1"}


def paths(s: Settings) -> dict[str, dict]:
    """The stack's passes by name, best first; none where they are not compared."""
    return getattr(stack(s.STACK), "PATHS", {})


def liger(s: Settings) -> bool:
    """Whether the stack's list has liger-kernel."""
    return getattr(stack(s.STACK), "LIGER", False)


@dataclass(frozen=True)
class Pass:
    """How sequences pass through a model in training."""

    attention: str
    packed: bool  # into one row, without padding
    fused: bool  # log-probs by a fused head
    liger: bool = False  # liger-kernel's kernels in the layers
    noise: tuple[str, ...] = ()  # what of the model's config is random in a pass, and is set to 0


def decided(s: Settings) -> Pass | None:
    """The pass to train with: the first that agreed when `play` compared them, with liger-kernel if that agreed too;
    else the stack's best, without it; None where the stack has none to choose. A prompt is computed once only where
    that was compared."""
    config = _config(s)
    kept = read_json(_file(s, config)) if config else {}
    names = [name for name, result in kept.get("paths", {}).items() if result["agrees"]]
    names += [name for name, known in paths(s).items() if known["attention"] != memory.PROMPTS_ONCE]
    if not names:
        return None
    faster = kept.get("liger", {}).get("agrees", False)
    return Pass(**paths(s)[names[0]], liger=faster, noise=tuple(kept.get("noise", ())))


def play(s: Settings) -> dict:
    """Compare the stack's passes with the plain model, once for each config, version and method with a critic.

    Returns ``paths``, of each one tried its result and whether it ``agrees``, ``liger``, the same of the last one with
    liger-kernel, and ``noise``, what of MODEL's config is random in a pass and is turned off; or ``unknown``,
    ``refused`` or ``unsampled``, why none was compared; empty for a stack without PATHS, and for a plain model where
    the best pass is transformers' own.
    """
    if not paths(s):
        return {}
    if not (config := _config(s, ask=True)):
        return {"unknown": f"MODEL={s.MODEL} has no config.json here or in the hub's cache"}
    if s.STACK == "cpu" and memory.plain(config):
        return {}
    if s.STACK == "cpu" and _experts(config) > 1:  # a dense model of such a family says 0 or 1
        return {"unsampled": "vLLM 0.30 on a CPU samples wrongly from experts that got new weights"}
    file = _file(s, config)
    if not file.is_file():
        print("comparing the passes of the training with the plain model (20 s) ...", flush=True)
        request = {"config": config, "paths": paths(s), "liger": liger(s), "critic": s.METHOD == "ppo"}
        request["samples"] = s.STACK == "cpu"  # a GPU's vLLM may not import without one
        answer = _asked(request)
        if "broken" in answer:
            return {"unknown": answer["broken"]}
        write_json(file, answer)
    return read_json(file)


def _config(s: Settings, ask: bool = False) -> dict | None:
    """MODEL's config.json; ``ask``: also of the hub, not of its cache alone."""
    if not paths(s):
        return None
    model = base_model(s.MODEL)
    if model == "embedded":
        return memory.EMBEDDED_CONFIG
    try:
        file = memory.config_file(model, ask)
    except ValueError:  # neither a folder nor a hub id, which others say
        return None
    return (read_json(file) or None) if file else None


def _experts(config: dict) -> int:
    """How many experts a layer chooses from; some families list it by layer."""
    found = [(config.get("text_config") or config).get(name) for name in EXPERTS]
    counts = [count for each in found for count in (each if isinstance(each, list) else [each])]
    return max((count for count in counts if isinstance(count, int)), default=0)


@functools.cache
def _code() -> list:
    """What else a result depends on: our own code, and the packages."""
    own = [PACKAGE / "models/small.py", *sorted((PACKAGE / "verl_plugins").glob("*.py"))]
    return [file.read_text() for file in own] + [installed(name) for name in PACKAGES]


def _file(s: Settings, config: dict) -> Path:
    known = json.dumps([config, paths(s), liger(s), s.METHOD == "ppo", _code()], sort_keys=True)
    return artifacts() / "parity" / f"{hashlib.sha256(known.encode()).hexdigest()[:12]}.json"


def _asked(request: dict) -> dict:
    """The program's answer, or ``broken``: why there is none."""
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": PYTHON_PATH}
    try:
        child = subprocess.run(
            [sys.executable, "-m", PROGRAM],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            env=environment,
            timeout=SECONDS,
            preexec_fn=die_with_parent,
        )
    except subprocess.TimeoutExpired:
        return {"broken": f"it took more than {SECONDS} s"}
    try:
        return json.loads(child.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        lines = child.stderr.strip().splitlines() or [f"exit code {child.returncode}"]
        return {"broken": one_line(lines[-1], 200)}
