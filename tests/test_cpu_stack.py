"""The cpu stack: what is installed is what the list says, and a patch stops when its line of verl has changed."""

import os
import subprocess
import sys
from importlib.metadata import version

import pytest

from tests.helpers import ROOT

LIST = (ROOT / "tasks/common/stacks/cpu/requirements.txt").read_text().splitlines()
PINS = [line.split("==") for line in LIST if line and not line.startswith("#")]


def in_verl(code: str) -> subprocess.CompletedProcess:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "VERL_PLATFORM": "cpu",
        "VERL_USE_EXTERNAL_MODULES": "tasks.common.stacks.cpu.verl_platform",
    }
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)


def test_every_package_is_pinned_once():
    names = [name for name, _ in PINS]
    assert len(names) == len(set(names)) > 100


@pytest.mark.parametrize(("name", "pin"), PINS)
def test_installed_version_is_the_pinned_one(name, pin):
    assert version(name).partition("+")[0] == pin


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
