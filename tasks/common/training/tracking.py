"""Trackers beside verl's console and file: Weights & Biases (WANDB=1) and whatever else LOGGER names.

`make monitor` needs none of them: it reads the metrics that every run writes to its own folder.
"""

import hashlib
import importlib.util
import netrc
import os
from pathlib import Path
from urllib.parse import urlsplit

from verl_tasks.settings import Settings, SettingsError, artifacts

# verl/utils/tracking.py, supported_backend of both versions; each needs the package of its name.
BACKENDS = ("wandb", "tensorboard", "trackio", "mlflow", "swanlab", "clearml")
NO_KEY_MODES = ("offline", "dryrun", "disabled")


def loggers(s: Settings) -> list[str]:
    """verl's names of the trackers that ``s`` asks for, each once."""
    named = [name.strip() for name in s.LOGGER.split(",")]
    chosen = [*named, *(["wandb"] if s.WANDB else [])]
    return [name for name in dict.fromkeys(chosen) if name not in ("", "console", "file")]


def project(s: Settings) -> str:
    """What trackers call the project: WANDB_PROJECT where it is set, else the task."""
    return os.environ.get("WANDB_PROJECT") or s.TASK


def check_loggers(s: Settings) -> None:
    """Raise SettingsError for what a tracker would stop the training with."""
    for name in loggers(s):
        if name not in BACKENDS:
            raise SettingsError(f"LOGGER={s.LOGGER}: verl has no logger {name}; it has {', '.join(BACKENDS)}")
        if not importlib.util.find_spec(name):
            raise SettingsError(f"LOGGER={s.LOGGER}: {name} is not installed; `pip install {name}`")
    if "wandb" in loggers(s) and os.environ.get("WANDB_MODE") not in NO_KEY_MODES and not _has_wandb_key():
        raise SettingsError("WANDB=1: no key; run `wandb login`, set WANDB_API_KEY or WANDB_MODE=offline")


def _has_wandb_key() -> bool:
    """In the environment, or where `wandb login` writes it."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    try:
        return bool(netrc.netrc(os.environ.get("NETRC")).authenticators(host or ""))
    except (OSError, netrc.NetrcParseError):
        return False


def writes_to(s: Settings, run_dir: Path) -> dict[str, str]:
    """Variables with which the trackers write into ``run_dir``, and continue its run on a resume."""
    variables = {}
    if "wandb" in loggers(s):
        # Its ids are unique in a project: two folders of artifacts/ may hold runs of the same name.
        mark = hashlib.blake2b(str(run_dir).encode(), digest_size=4).hexdigest()
        variables |= {"WANDB_RUN_ID": f"{run_dir.name}-{mark}", "WANDB_RESUME": "allow", "WANDB_DIR": str(run_dir)}
        variables |= {"WANDB_PROJECT": project(s)}
    if "tensorboard" in loggers(s):
        folder = str(run_dir / "tensorboard")
        variables |= {"TENSORBOARD_DIR": folder, "TENSORBOARD_LOGGING_DIR": folder}  # verl's name, transformers'
    if "trackio" in loggers(s):
        variables |= {"TRACKIO_DIR": str(artifacts() / "trackio")}
    return variables
