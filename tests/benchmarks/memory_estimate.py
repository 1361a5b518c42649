"""The estimate of memory (tasks/common/machine/memory.py) beside what was measured.

    PYTHONPATH=. python tests/benchmarks/memory_estimate.py                     # recorded runs, and the profiles
    PYTHONPATH=. python tests/benchmarks/memory_estimate.py make train TASK=countdown STACK=cpu STEPS=2 ...

Prints Markdown tables. With a command: the memory of all its processes (PSS: what they share counts once) at its peak,
0.4 s apart, by program.
"""

import collections
import contextlib
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil

from tests.helpers import QWEN25_3B, exported
from tests.results import metrics
from tests.test_profiles import CONFIGS, PROFILES, hardware_of
from verl_tasks.launch import memory_checks
from verl_tasks.machine import hardware
from verl_tasks.machine.memory import EMBEDDED_CONFIG, Plan, estimate, shapes
from verl_tasks.settings import GPU_MIB, load_settings

GB = 1e9


def recorded() -> None:
    """docs/GPU.md's run: batches of 32 rows, padded to the longest, SmolLM2-135M, one H200, without fused kernels."""
    print("| rows of at most | allocator's peak, GB | estimate, GB | off by |\n|---|---|---|---|")
    longest = 0
    for number, step in metrics()["h200-countdown-grpo"].items():
        longer = max(longest, int(step["prompt_length/max"] + step["response_length/max"]))
        if longer == longest:
            continue
        longest = longer
        parts = estimate(shapes(EMBEDDED_CONFIG), Plan(tokens=32 * longest, sequence=192, share=0)).update
        del parts["contexts"]  # the allocator does not know of them
        if number == 1:
            del parts["optimizer"]  # its moments come after the first peak
        found, measured = sum(parts.values()) / GB, step["actor/perf/max_memory_allocated_gb"] * 2**30 / GB
        print(f"| {longest} tokens | {measured:.2f} | {found:.2f} | {found / measured - 1:+.0%} |")
    model = shapes(QWEN25_3B)
    for gpus in (1, 2, 4):  # fused kernels, 32,768 tokens a pass; the last step, with Adam's moments
        plan = Plan(gpus=gpus, gpus_here=gpus, tokens=32768, sequence=512, share=0, fused=True)
        parts = estimate(model, plan).update
        del parts["contexts"]
        steps = metrics()[f"h200-3b-{gpus}gpu"]
        measured = steps[max(steps)]["actor/perf/max_memory_allocated_gb"] * 2**30 / GB
        found = sum(parts.values()) / GB
        print(f"| Qwen2.5-3B's shape, {gpus} GPUs | {measured:.2f} | {found:.2f} | {found / measured - 1:+.0%} |")
    naive = estimate(shapes(EMBEDDED_CONFIG), Plan(tokens=65536, sequence=512, share=0, padded=True)).update
    print(f"\n65,536 tokens a batch, without fused kernels and with padding: {sum(naive.values()) / GB:.0f} GB\n")


def profiles() -> None:
    print("| profile | parameters | update, GB a GPU | sampling, GB a GPU | RAM, GB |\n|---|---|---|---|---|")
    for profile in PROFILES:
        environment = exported(profile.parents[1] / "train.sh", {"STACK": "current", "PROFILE": profile.stem})
        s = load_settings(environment)
        model = shapes(CONFIGS[s.MODEL])
        needs = estimate(model, memory_checks.plan(s, []), GPU_MIB[hardware_of(profile)[1]] * hardware.MIB)
        sums = [sum(part.values()) / GB for part in (needs.update, needs.sampling, needs.ram)]
        row = [f"`{profile.stem}`", f"{model.parameters / 1e9:.2f} B", *(f"{size:.0f}" for size in sums)]
        print(f"| {' | '.join(row)} |")


def peak(command: list[str]) -> None:
    child, highest, at_peak = subprocess.Popen(command), 0, {}
    while child.poll() is None:
        now = collections.Counter()
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error, OSError):
                rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
                now[_program(process)] += int(re.search(r"^Pss: +(\d+)", rollup, re.M)[1]) * 1024
        if sum(now.values()) > highest:
            highest, at_peak = sum(now.values()), now
        time.sleep(0.4)
    print(f"\n| program | GB at the peak of {highest / GB:.1f} |\n|---|---|")
    for name, size in at_peak.most_common():
        if size >= 5e7:
            print(f"| {name} | {size / GB:.2f} |")


def _program(process: psutil.Process) -> str:
    """Ray's and vLLM's processes by the names they give themselves; others by their module or file."""
    words = process.cmdline() or [process.name()]
    if len(words) == 1 or words[0].startswith(("ray::", "VLLM::")):
        return words[0][:60]
    if "-m" in words[:-1]:
        return words[words.index("-m") + 1]
    return Path(next((word for word in words if word.endswith(".py")), words[0])).name


if __name__ == "__main__":
    if len(sys.argv) > 1:
        peak(sys.argv[1:])
    else:
        recorded()
        profiles()
