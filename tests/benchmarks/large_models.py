"""What runs of on_a_gpu.sh with large models used, beside doctor's estimate: a row of docs/GPU.md for each.

    python -m tests.benchmarks.large_models FOLDER [FOLDER ...] [--out FILE.json]

FOLDER: what a run wrote, with its screen FOLDER.txt beside it.
"""

import argparse
import json
import re
from pathlib import Path

from verl_tasks.files import read_json
from verl_tasks.machine.memory import GIB

ESTIMATE = re.compile(r"memory: estimated: ([\d.,]+) M parameters, update ([\d.]+) GB")
AGREED = re.compile(r"vLLM has the trainer's weights after step (\d+): (\d+) tensors compared, (\d+) had changed")


def of_run(folder: Path) -> dict:
    """Settings, steps, seconds and the update's peak of memory of the newest run in ``folder``."""
    screen = folder.with_suffix(".txt").read_text(errors="replace")
    run = max(folder.glob("runs/*/*/settings.json"), key=lambda file: file.stat().st_mtime).parent
    files = sorted(run.glob("metrics/*.jsonl"))
    steps = {row["step"]: row["data"] for file in files for row in map(json.loads, file.read_text().splitlines())}
    log = "".join(file.read_text(errors="replace") for file in sorted(run.glob("logs/*.log")))
    peak = max(row["actor/perf/max_memory_reserved_gb"] for row in steps.values())  # GiB
    estimate, agreed = ESTIMATE.search(screen), AGREED.search(log)
    settings = read_json(run / "settings.json").get("settings", {})
    return {
        "run": folder.name,
        "settings": {name: settings.get(name) for name in ("N_GPUS", "LORA_RANK", "METHOD")},
        "steps": sorted(steps),
        "step_seconds": [row["timing_s/step"] for row in steps.values()],
        "k3_kl": [row.get("rollout_corr/k3_kl") for row in steps.values()],
        "grad_norm": [row.get("actor/grad_norm") for row in steps.values()],
        "update_peak_gb": peak * GIB / 1e9,
        "update_estimate_gb": float(estimate[2]) if estimate else None,
        "parameters_m": float(estimate[1].replace(",", "")) if estimate else None,
        "weights_compared_after_step": [int(number) for number in agreed.groups()] if agreed else None,
        "merged": "\n  written: " in screen or "has the whole model already" in screen,
        "evaluated": "[95 % interval]" in screen,
        "finished": bool(re.search(r"^\d+ steps, ", screen, re.MULTILINE)),
    }


def row(found: dict) -> str:
    estimate, peak = found["update_estimate_gb"], found["update_peak_gb"]
    off = f"{estimate:.1f} ({estimate / peak - 1:+.0%})" if estimate else "not asked"
    ended = [name for name in ("merged", "evaluated", "finished") if found[name]]
    return f"| {found['run']} | {len(found['steps'])} | {peak:.1f} | {off} | {', '.join(ended) or 'trained only'} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    found = [of_run(folder) for folder in given.folders]
    print("| run | steps | update's peak, GB a GPU | estimate | also |\n|---|---|---|---|---|")
    for each in found:
        print(row(each))
    if given.out:
        given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
