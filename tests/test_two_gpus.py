"""The benchmarks on two GPUs (tests/benchmarks/two_gpus.sh): which GPUs they take, and what their results name."""

import json
import os
import subprocess

import pytest

from tasks.common.machine.hardware import GPU, Nvidia
from tests.benchmarks import two_gpus
from tests.helpers import ROOT


@pytest.mark.parametrize(
    ("given", "taken"), [(None, ["0", "1"]), ("2,3", ["2", "3"]), ("5, 4,7", ["4", "5"]), ("2", ["", "2"])]
)
def test_one_gpu_each_takes_the_first_and_the_second_of_those_given(given, taken, tmp_path):
    """Where only one is given, the second training sees none, and its settings are refused."""
    (tmp_path / "make").write_text(f'#!/bin/sh\necho "$CUDA_VISIBLE_DEVICES" >>"{tmp_path}/taken"\n')
    (tmp_path / "make").chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    environment |= {"MAKE": str(tmp_path / "make"), "STACK": "current", "ARTIFACTS": str(tmp_path)}
    environment |= {} if given is None else {"CUDA_VISIBLE_DEVICES": given}
    script = ["bash", str(ROOT / "tests/benchmarks/two_gpus.sh"), "--inside", "scale1"]
    subprocess.run(script, env=environment, check=True)
    assert sorted((tmp_path / "taken").read_text().splitlines()) == taken


@pytest.mark.parametrize("names", [["NVIDIA H200", "NVIDIA H200"], []])
def test_a_result_names_the_gpu(names, tmp_path, monkeypatch):
    gpus = tuple(GPU(name, 0, 0) for name in names)
    monkeypatch.setattr(two_gpus, "nvidia", lambda: Nvidia("1", "13", gpus) if names else None)
    two_gpus.write(tmp_path / "out.json", {"speedup": 1.9})
    found = json.loads((tmp_path / "out.json").read_text())
    assert found.get("gpu") == (names[0] if names else None)
    assert found["speedup"] == 1.9 and found["versions"]["torch"]
