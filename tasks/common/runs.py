"""What is on disk of a run: its folder, checkpoints and metrics."""

import json
from dataclasses import asdict
from pathlib import Path

from tasks.common.merge import is_lora, merge_lora
from tasks.common.process import StageFailed
from tasks.common.settings import Settings, SettingsError


def read_json(path: Path) -> dict:
    """The JSON object in ``path``; empty if the file is missing or unreadable."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}


def read_metrics(run_dir: Path) -> dict[int, dict]:
    """verl's metrics by step, over all launches of a run.

    verl's file logger truncates its file when it starts (verl/utils/tracking.py:541), so each launch has its own,
    metrics/000.jsonl and on; for a step that was trained again after a resume the later launch counts.
    """
    metrics: dict[int, dict] = {}
    for file in sorted((run_dir / "metrics").glob("*.jsonl")):
        for line in file.read_text().split("\n")[:-1]:
            record = json.loads(line)
            metrics[record["step"]] = record["data"]
    return metrics


def next_metrics_file(run_dir: Path) -> Path:
    """Path for the metrics of the coming launch."""
    folder = run_dir / "metrics"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{len(list(folder.glob('*.jsonl'))):03}.jsonl"


def last_step(run_dir: Path) -> int:
    """Step of the last whole checkpoint; 0 if there is none. verl writes the tracker file after the checkpoint."""
    tracker = run_dir / "checkpoints/latest_checkpointed_iteration.txt"
    step = int(tracker.read_text()) if tracker.exists() else 0
    return step if (run_dir / f"checkpoints/global_step_{step}").is_dir() else 0


def hf_folder(run_dir: Path, kind: str) -> Path:
    """The last checkpoint as a folder that vLLM and transformers load; ``kind`` is "rl" or "sft"."""
    checkpoint = run_dir / f"checkpoints/global_step_{last_step(run_dir)}" / ("actor" if kind == "rl" else "")
    try:
        return merge_lora(checkpoint) if is_lora(checkpoint) else checkpoint / "huggingface"
    except RuntimeError as error:
        raise StageFailed(str(error)) from error


def sft_dir(s: Settings, arguments: list[str]) -> Path:
    return s.runs_dir / f"sft-{s.sft_fingerprint(arguments)}"


def rl_dir(s: Settings, arguments: list[str]) -> Path:
    """Folder of the run; raises SettingsError when RUN names one that was made with other settings."""
    mark = s.rl_fingerprint(arguments)
    run_dir = s.runs_dir / (s.RUN or f"{s.METHOD}-{mark}")
    made_with = read_json(run_dir / "settings.json")
    if made_with and made_with["fingerprint"] != mark:
        changed = [k for k, v in asdict(s).items() if made_with["settings"].get(k) != v] or ["data, reward.py or ARGS"]
        raise SettingsError(f"RUN={run_dir.name}: exists with other settings ({', '.join(changed)}); take another name")
    return run_dir
