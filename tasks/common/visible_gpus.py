"""The NVIDIA GPUs that this process and its programs see: nvidia-smi's, as CUDA_VISIBLE_DEVICES names them."""

import os
import re
import shutil
import subprocess
from itertools import takewhile

from verl_tasks.errors import SettingsError

ANSWERS_WITHIN = 60  # seconds, nvidia-smi: without persistence mode each call starts the driver of every GPU


def nvidia_smi(*arguments: str) -> str:
    """What nvidia-smi prints; empty without it. Raises SettingsError when it takes more than ANSWERS_WITHIN seconds."""
    if not shutil.which("nvidia-smi"):
        return ""
    command = ["nvidia-smi", *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=ANSWERS_WITHIN).stdout
    except subprocess.TimeoutExpired:
        fix = "turn on persistence mode: nvidia-smi -pm 1, or set STACK=cpu"
        raise SettingsError(f"nvidia-smi does not answer within {ANSWERS_WITHIN} s; {fix}") from None


def _listed_gpus() -> list[tuple[str, str]]:
    """Number and UUID of each GPU, in the order of the PCI bus; none without nvidia-smi."""
    # Parts (MIG) are indented below theirs.
    return re.findall(r"^GPU ([0-9]+):(?:.*\(UUID: (GPU-.+)\)$)?", nvidia_smi("-L"), re.MULTILINE)


def named_gpus() -> list[str] | None:
    """The GPUs of CUDA_VISIBLE_DEVICES, up to the first entry that names none, e.g. -1: CUDA stops there. None where it
    is not set; empty, or with a GPU twice, it hides all. The digits that an entry begins with are its number. A UUID,
    or the beginning of one, is the number that nvidia-smi has for it."""
    if (given := os.environ.get("CUDA_VISIBLE_DEVICES")) is None:
        return None
    names = [name.strip() for name in given.split(",")]
    listed = _listed_gpus() if any(name.startswith("GPU-") for name in names) else []
    for place, name in enumerate(names):
        numbers = [number for number, uuid in listed if name.startswith("GPU-") and uuid.startswith(name)]
        name = numbers[0] if len(numbers) == 1 else name  # of several that begin so CUDA takes none
        digits = re.match(r"\+?0*([0-9]+)", name)
        names[place] = digits[1] if digits else name
    names = list(takewhile(re.compile(r"[0-9]|MIG-").match, names))
    return names if len(set(names)) == len(names) else []


def visible_gpus() -> list[str]:
    """The NVIDIA GPUs that a training sees: numbers, and parts (MIG) as CUDA_VISIBLE_DEVICES names them. They end at
    the first number that nvidia-smi does not list, if it lists any."""
    names, listed = named_gpus(), [number for number, _ in _listed_gpus()]
    if names is None or not listed:
        return names or listed
    return list(takewhile(lambda name: name in listed or name.startswith("MIG-"), names))


def gpu_numbers() -> dict[str, str]:
    """What programs get in place of UUIDs in CUDA_VISIBLE_DEVICES: vLLM 0.11.0 takes numbers only, and 0.24.0 no
    beginning of a UUID. nvidia-smi's numbers are in the order of the PCI bus, CUDA's own begin with the fastest."""
    by_uuid = re.search(r"(^|,) *GPU-", os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    return {"CUDA_VISIBLE_DEVICES": ",".join(named_gpus()), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"} if by_uuid else {}


def check_visible(stack: str, gpus: str) -> None:
    """Raise SettingsError where a stack needs a GPU and sees none: CUDA_VISIBLE_DEVICES hides all of this machine, or
    it has none to count for N_GPUS, ``gpus``."""
    if stack == "cpu" or (named_gpus() != [] and (gpus != "0" or visible_gpus())):
        return
    if os.environ.get("RAY_ADDRESS", "local") not in ("", "local"):
        if gpus == "0":
            fix = "set it to the GPUs per machine of the cluster at RAY_ADDRESS"
            raise SettingsError(f"N_GPUS=0: this machine has no GPU to count; {fix}")
    elif (given := os.environ.get("CUDA_VISIBLE_DEVICES")) is None:
        raise SettingsError("nvidia-smi finds no GPU; install NVIDIA's driver, or set STACK=cpu")
    else:
        fix = "name GPUs of this machine, unset it, or set STACK=cpu"
        shown = " ".join(given.split())[:80]
        raise SettingsError(f"CUDA_VISIBLE_DEVICES={shown}: no GPU is visible, it hides them; {fix}")


def gpu_groups(size: int, most: int) -> list[list[str]]:
    """The visible GPUs in groups of ``size``, at most ``most`` groups."""
    visible = visible_gpus()
    return [visible[number * size : (number + 1) * size] for number in range(min(most, len(visible) // size))]
