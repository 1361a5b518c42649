"""`python -m verl_tasks.install.check STACK`: compare this Python's packages with the stack's list, import them, and
run one small kernel of torch, flash-attn and vLLM.
"""

import contextlib
import importlib
import importlib.metadata
import importlib.util
import platform
import sys
import time
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from verl_tasks.places import PACKAGE

SHOWN = ("torch", "vllm", "flash-attn", "verl", "transformers", "ray")
IMPORTED = ("verl.trainer.main_ppo", "verl.workers.rollout.vllm_rollout.vllm_async_server", "vllm", "trl")


class InstallError(Exception):
    """The installation does not work; the message says why and how to repair it."""


class Package(NamedTuple):
    """A package of the list: version wanted, and version found (None: not installed)."""

    name: str
    wanted: str
    found: str | None

    @property
    def matches(self) -> bool:
        """Whether the versions are equal, apart from the build (``+cpu``, ``+cu128``)."""
        return self.found is not None and Version(Version(self.found).public) == Version(self.wanted)


def listed(stack: str) -> dict[str, str]:
    """Version by name of every package that the list of ``stack`` has for this Python."""
    path = PACKAGE / "stacks" / stack / "requirements.txt"
    pins = {}
    for line in path.read_text().splitlines():
        if line and not line.startswith(("#", " ")):
            requirement = Requirement(line.rstrip("\\ "))
            if requirement.marker is None or requirement.marker.evaluate():
                pins[canonicalize_name(requirement.name)] = str(requirement.specifier).removeprefix("==")
    return pins


def versions() -> dict[str, str]:
    """Version by name of this Python's packages; of two copies on sys.path the first, which is the one imported.

    Without vendored copies inside other packages (setuptools' ``_vendor``, Ray's ``thirdparty_files``).
    """
    every = [(one.metadata, Path(str(one.locate_file("")))) for one in importlib.metadata.distributions()]
    present = [(header, folder) for header, folder in every if {"Name", "Version"} <= {*header}]
    folders = {folder for _, folder in present}
    found: dict[str, str] = {}
    for header, folder in present:
        if folders.isdisjoint(folder.parents):
            found.setdefault(header["Name"], header["Version"])
    return found


def installed(stack: str) -> list[Package]:
    """Every package of the list of ``stack`` with the version that this Python has. Imports none of them."""
    found = {canonicalize_name(name): version for name, version in versions().items()}
    return [Package(name, wanted, found.get(name)) for name, wanted in listed(stack).items()]


def summary() -> str:
    """Python, CUDA and the main packages, in one line."""
    import torch

    found = {canonicalize_name(name): version for name, version in versions().items()}
    parts = [f"{name} {found[name]}" if name in found else f"no {name}" for name in SHOWN]
    parts.insert(1, f"CUDA {torch.version.cuda or 'none'}")
    return ", ".join([f"Python {platform.python_version()}", *parts])


# ---- kernels


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _compare(name: str, found, expected, tolerance: float) -> None:
    error = ((found.float() - expected.float()).abs().max() / expected.float().abs().max()).item()
    if not error <= tolerance:  # NaN too
        raise InstallError(f"{name}: differs from its reference by {error:.2g} of the largest value ({tolerance:.2g})")


def _torch_matmul(device: str) -> None:
    import torch

    a, b = torch.randn(64, 96, device=device).bfloat16(), torch.randn(96, 32, device=device).bfloat16()
    _compare("torch matmul", (a @ b).cpu(), a.cpu().double() @ b.cpu().double(), 0.02)


def _vllm_silu_and_mul(device: str) -> None:
    import torch
    import vllm._custom_ops  # registers torch.ops._C  # noqa: F401

    x = torch.randn(16, 256, device=device).bfloat16()
    out = torch.empty(16, 128, device=device, dtype=x.dtype)
    torch.ops._C.silu_and_mul(out, x)
    gate, up = x.cpu().double().chunk(2, dim=-1)
    _compare("vLLM silu_and_mul", out.cpu(), torch.nn.functional.silu(gate) * up, 0.02)


def _flash_attention(device: str) -> None:
    import torch
    from flash_attn import flash_attn_func

    inputs = [torch.randn(2, 32, 4, 64, device=device).bfloat16().requires_grad_() for _ in range(3)]
    references = [x.detach().cpu().double().requires_grad_() for x in inputs]
    out = flash_attn_func(*inputs, causal=True)  # (batch, length, heads, size)
    heads_first = [x.transpose(1, 2) for x in references]
    expected = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True).transpose(1, 2)
    _compare("flash-attn forward", out.cpu(), expected, 0.02)
    out.float().square().sum().backward()
    expected.square().sum().backward()
    for name, x, reference in zip("qkv", inputs, references, strict=True):
        _compare(f"flash-attn backward, d{name}", x.grad.cpu(), reference.grad, 0.03)


def kernels(device: str = "cuda") -> list[str]:
    """Run one small kernel of torch and vLLM, and of flash-attn where it is installed (GPUs only), on ``device``.

    Returns their names. Raises InstallError when one fails or differs from its reference in float64.
    """
    checks = {"torch matmul": _torch_matmul, "vLLM silu_and_mul": _vllm_silu_and_mul}
    if device != "cpu" and importlib.util.find_spec("flash_attn"):
        checks["flash-attn forward and backward"] = _flash_attention
    for name, check in checks.items():
        try:
            check(device)
        except InstallError:
            raise
        except Exception as error:
            raise InstallError(f"{name} does not run on {device}: {_first_line(error)}") from error
    return list(checks)


def main(stack: str) -> None:
    packages = installed(stack)
    wrong = [package for package in packages if not package.matches]
    if wrong:
        which = "; ".join(f"{p.name} {p.found or 'missing'}, wanted {p.wanted}" for p in wrong[:5])
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise InstallError(f"not as in stacks/{stack}/requirements.txt: {which}{more}; run `make install` again")
    print(f"  {summary()}", flush=True)
    import torch

    if stack == "cpu" and torch.version.cuda:
        raise InstallError(f"torch {torch.__version__} is a CUDA build; set TORCH_INDEX to an index of CPU builds")
    started = time.perf_counter()
    with contextlib.redirect_stdout(sys.stderr):  # what vLLM logs
        for name in (*IMPORTED, *(["flash_attn"] if "flash-attn" in listed(stack) else [])):
            try:
                importlib.import_module(name)
            except Exception as error:
                raise InstallError(f"import {name}: {type(error).__name__}: {_first_line(error)}") from error
    said = f"  all {len(packages)} as listed, imported ({time.perf_counter() - started:.0f} s)"
    if stack != "cpu" and not torch.cuda.is_available():
        print(f"{said}; torch finds no GPU, so no kernel was run")
    else:
        print(f"{said}; ran {', '.join(kernels('cpu' if stack == 'cpu' else 'cuda'))}")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except InstallError as error:
        sys.exit(f"error: {error}")
