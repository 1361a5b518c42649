"""Memory, load and power of a run's GPUs while it trains: a line of <run>/gpu.jsonl every SECONDS."""

import contextlib
import json
import os
import subprocess
import time
from pathlib import Path

SECONDS = 15
FIELDS = {"memory.used": "memory_gib", "utilization.gpu": "load_percent", "power.draw": "power_w"}
QUERY = ["nvidia-smi", f"--query-gpu=index,{','.join(FIELDS)}", "--format=csv,noheader,nounits"]


def parse(output: str) -> dict[str, float]:
    """``gpu/<index>/memory_gib`` (GiB in use), ``load_percent``, ``power_w`` from the output of QUERY, if the GPU
    reports them (else "[N/A]")."""
    found = {}
    for line in output.splitlines():
        index, *values = (part.strip() for part in line.split(","))
        for name, value in zip(FIELDS.values(), values, strict=True):
            try:
                found[f"gpu/{index}/{name}"] = float(value) / (1024 if name == "memory_gib" else 1)
            except ValueError:
                continue
    return found


class Sampler:
    """Appends the state of the GPUs to ``path``, at most every SECONDS; without nvidia-smi it does nothing."""

    def __init__(self, path: Path):
        self.path, self.due, self.missing = path, 0.0, False

    def sample(self) -> None:
        if self.missing or time.monotonic() < self.due:
            return
        self.due = time.monotonic() + SECONDS
        try:
            seen = os.environ.get("CUDA_VISIBLE_DEVICES")
            query = [*QUERY, f"--id={seen}"] if seen else QUERY
            state = parse(subprocess.run(query, capture_output=True, text=True, check=True, timeout=5).stdout)
        except subprocess.TimeoutExpired:
            return  # a busy driver
        except (OSError, subprocess.SubprocessError, ValueError):
            self.missing = True
            return
        with contextlib.suppress(OSError), self.path.open("a") as file:  # a full disk: try again, never end the run
            file.write(json.dumps({"time": time.time()} | state) + "\n")
