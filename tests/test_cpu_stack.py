"""The cpu stack: verl runs on our platform and engines, and a patch stops when its line of verl has changed."""

import os
import subprocess
import sys

import pytest

from tests.helpers import ROOT


def in_verl(code: str) -> subprocess.CompletedProcess:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "VERL_PLATFORM": "cpu",
        "VERL_USE_EXTERNAL_MODULES": "tasks.common.stacks.cpu.verl_platform",
    }
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)


def test_verl_runs_on_our_platform_and_engines():
    result = in_verl(
        "import verl, torch\n"
        "from verl.plugin.platform import get_platform\n"
        "from verl.workers.engine.base import EngineRegistry\n"
        "x = get_platform().current_device()\n"
        "print(torch.ones(1).to(x).device, f'cpu:{x}', get_platform().is_ipc_supported())\n"
        "print(EngineRegistry.get_engine_cls('language_model', 'fsdp2').__module__)"
    )
    assert result.stdout.splitlines() == ["cpu cpu:0 False", "tasks.common.stacks.cpu.verl_platform"], result.stderr


def test_a_patch_stops_in_one_line_when_its_line_of_verl_has_changed():
    result = in_verl(
        "import verl, verl.utils.model as m\n"
        "from tasks.common.stacks.cpu.verl_platform import expect\n"
        "expect(m.load_valuehead_model, 'a line that verl never had')"
    )
    assert result.returncode != 0
    last = result.stderr.strip().splitlines()[-1]
    assert "verl.utils.model.load_valuehead_model no longer contains `a line that verl never had`" in last


def test_log_probs_of_verl_are_taken_in_one_operation():
    result = in_verl(
        "import torch\n"
        "from verl.utils import torch_functional as f\n"
        "torch.manual_seed(0)\n"
        "logits = 5 * torch.randn(2, 7, 50)\n"
        "labels = torch.randint(0, 50, (2, 7))\n"
        "found = f.logprobs_from_logits(logits, labels)\n"
        "exact = logits.double().log_softmax(-1).gather(-1, labels[..., None])[..., 0]\n"
        "print(f.logprobs_from_logits_v2.__module__, tuple(found.shape), (found - exact).abs().max().item() < 1e-6)"
    )
    assert result.stdout.splitlines()[-1:] == ["tasks.common.stacks.cpu.verl_platform (2, 7) True"], result.stderr


@pytest.mark.parametrize("shape", [(2, 7), (3, 256), (700,)])
def test_the_entropy_of_verl_is_taken_in_parts(shape):
    result = in_verl(
        "import torch\n"
        "from verl.utils import torch_functional as f\n"
        "torch.manual_seed(0)\n"
        f"logits = (5 * torch.randn(*{shape}, 50)).requires_grad_()\n"
        "found = f.entropy_from_logits(logits)\n"
        "exact = torch.distributions.Categorical(logits=logits.double()).entropy()\n"
        "(gradient,), (wanted,) = (torch.autograd.grad(e.sum(), logits) for e in (found, exact))\n"
        "print(f.entropy_from_logits.__module__, found.shape == exact.shape)\n"
        "print((found - exact).abs().max().item() < 1e-5, (gradient - wanted).abs().max().item() < 1e-5)"
    )
    assert result.stdout.splitlines()[-2:] == ["tasks.common.stacks.cpu.verl_platform True", "True True"], result.stderr
