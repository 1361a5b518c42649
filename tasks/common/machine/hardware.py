"""What this machine has: GPUs (from nvidia-smi), memory, and orphaned Ray daemons."""

import contextlib
import functools
import os
import shutil
import socket
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path

import psutil

from verl_tasks.settings import SettingsError
from verl_tasks.visible_gpus import named_gpus, nvidia_smi

KV_CACHE = 0.7  # of vLLM's share of a GPU; the rest is for weights, activations and CUDA graphs
# Tokens of a block of vLLM's cache on a CPU. Prompts share full blocks only; vLLM's 128 are longer than most prompts.
CPU_BLOCK_SIZE = 32
# vLLM's CUDA graphs of decoding. torch.compile (mode 3) would start later and sample no faster (docs/GPU.md).
CUDA_GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
MIB = 2**20
RAY_DAEMONS = ("gcs_server", "raylet")


@dataclass(frozen=True)
class GPU:
    name: str
    total: int  # bytes
    free: int
    processes: tuple[tuple[int, str, int], ...] = ()  # process id, name, bytes


@dataclass(frozen=True)
class Nvidia:
    driver: str
    cuda: str  # the newest version that the driver supports
    gpus: tuple[GPU, ...]


def parse_nvidia_smi(text: str) -> Nvidia:
    """Read the output of `nvidia-smi -q -x`. Raises ValueError for any other text."""
    try:
        log = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise ValueError(f"nvidia-smi -q -x: {error}") from error
    gpus = []
    for gpu in log.findall("gpu"):
        processes = tuple(
            (int(p.findtext("pid", "0")), p.findtext("process_name", ""), _bytes(p.findtext("used_memory", "")))
            for p in gpu.findall("processes/process_info")
        )
        memory = (_bytes(gpu.findtext(f"fb_memory_usage/{name}", "")) for name in ("total", "free"))
        gpus.append(GPU(gpu.findtext("product_name", "GPU"), *memory, processes))
    return Nvidia(log.findtext("driver_version", "?"), log.findtext("cuda_version", "?"), tuple(gpus))


def _bytes(text: str) -> int:
    """Of "81559 MiB"; 0 of "N/A"."""
    number = text.split(" ")[0]
    return int(number) * MIB if number.isdigit() else 0


def nvidia() -> Nvidia | None:
    """The GPUs that a training would see, as CUDA_VISIBLE_DEVICES names them; None if the driver does not answer.

    Prints a warning when it takes too long.
    """
    try:
        found = parse_nvidia_smi(nvidia_smi("-q", "-x"))
    except SettingsError as error:
        print(f"warning: {error}", file=sys.stderr, flush=True)
        return None
    except ValueError:
        return None
    if (names := named_gpus()) is None:
        return found
    return replace(found, gpus=tuple(takewhile(bool, (_named(found.gpus, name) for name in names))))


def _named(gpus: tuple[GPU, ...], name: str) -> GPU | None:
    """The GPU of that number; the memory of a part (MIG) is not read: 0."""
    if name.startswith("MIG-"):
        return GPU(name, 0, 0)
    return next(iter(gpus[int(name) :]), None)


def shared_kv_cache(utilization: float) -> int | None:
    """Bytes of vLLM's KV cache for ``utilization`` of a GPU that other trainings use (SHARED_GPU, set by
    launch/experiments.py); None where it is not shared: vLLM then measures what is free."""
    found = nvidia() if os.environ.get("SHARED_GPU") else None
    return int(KV_CACHE * utilization * found.gpus[0].total) if found and found.gpus else None


def own_process(pid: int) -> bool:
    """Whether the process belongs to this user. Process ids of other containers mean nothing here."""
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).uids().real == os.getuid()
    return False


def ram() -> tuple[int, int]:
    """Bytes of RAM, free and in total, within the container's limit (cgroup v2)."""
    memory, group = psutil.virtual_memory(), Path("/sys/fs/cgroup")
    try:
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
    except (OSError, ValueError):  # no cgroup v2, or no limit ("max")
        return memory.available, memory.total
    return min(memory.available, max(0, limit - used)), min(memory.total, limit)


@functools.cache
def cpu_dtype(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The type in which this CPU multiplies matrices fast: "bfloat16" where it has instructions for it (x86:
    avx512_bf16, amx_bf16; ARM: bf16), else "float32": torch and vLLM emulate bfloat16 there, ten times slower."""
    try:
        words = cpuinfo.read_text(errors="replace").split()
    except OSError:
        return "float32"
    return "bfloat16" if {"avx512_bf16", "amx_bf16", "bf16"} & set(words) else "float32"


def number_bytes(on_cpu: bool) -> int:
    """Bytes per number in the forward pass: 2, or 4 on a CPU that uses float32."""
    return 4 if on_cpu and cpu_dtype() == "float32" else 2


def free_disk(path: Path) -> tuple[Path, int]:
    """The nearest existing parent folder of ``path``, and its free bytes."""
    existing = next(folder for folder in (path, *path.parents) if folder.exists())
    return existing, shutil.disk_usage(existing).free


def listens(address: str, seconds: float = 2.0) -> bool:
    """Whether something accepts connections at ``address``, host:port."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=seconds):
            return True
    except (OSError, ValueError, OverflowError):
        return False


def refuse_taken(port: int) -> None:
    """Raise SettingsError where a program listens at PORT=``port`` of this machine."""
    if listens(f"127.0.0.1:{port}"):
        raise SettingsError(f"PORT={port}: another program listens there; choose another PORT")


@dataclass(frozen=True)
class RayDaemon:
    """A process of Ray on this machine."""

    name: str
    pid: int
    address: str  # host:port of its cluster; empty if its command line does not say
    orphaned: bool  # this user's, and no program owns it: from `ray start`, or a killed run


def ray_daemons() -> list[RayDaemon]:
    """Ray's daemons on this machine, of any user."""
    found = []
    for process in psutil.process_iter(["name"]):
        with contextlib.suppress(psutil.Error):
            if process.info["name"] in RAY_DAEMONS and process.status() != psutil.STATUS_ZOMBIE:
                given = (word.partition("=") for word in process.cmdline())
                address = next((value for name, _, value in given if name == "--gcs-address"), "")
                # A run's own Ray descends from the Python that started it; an orphan is a child of init.
                owned = any(_is_python(parent) for parent in process.parents() if parent.pid != 1)
                orphaned = process.uids().real == os.getuid() and not owned
                found.append(RayDaemon(process.info["name"], process.pid, address, orphaned))
    return found


def _is_python(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.name().startswith("python") or "python" in Path((process.cmdline() or [""])[0]).name
    return False
