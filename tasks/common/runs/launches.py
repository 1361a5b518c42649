"""The record of each launch of a run: <run>/launches/000 and on, written before the trainer starts.

launch.json: settings, the trainer's command line, git's state, digests of data, task and library, date. config.yaml:
the trainer's resolved config. packages.txt: as `pip freeze` prints it. changes.diff: `git diff HEAD`. task/: the task's
code. The environment and the machine's name are left out; secrets are masked.
"""

import hashlib
import json
import os
import platform
import subprocess
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import yaml

from verl_tasks.files import folder_beside, read_json, regular, sha256, write_json, write_text
from verl_tasks.install.check import versions
from verl_tasks.runs import library
from verl_tasks.runs.folder import UNREADABLE
from verl_tasks.runs.secrets import masked, masked_values
from verl_tasks.settings import JUDGED, ROOT, Settings, SettingsError, judge_settings
from verl_tasks.text import one_line

CODE = ("*.py", "*.sh", "profiles/*.sh")  # of a task
FORM = {"date": str, "stack": str, "git": dict, "data": dict, "judge": dict}  # of a launch.json


def begin(run_dir: Path, s: Settings, command: list[str], config: dict | None = None) -> Path:
    """Write the record of the launch that is about to run ``command`` with ``s``; return its folder.

    ``config``: the trainer's, resolved; None where the trainer writes it itself (``write_config``).
    """
    folder = run_dir / f"launches/{len(launches(run_dir)):03}"
    with folder_beside(folder) as partial:
        record = now(s.task_dir)
        (partial / "packages.txt").write_text("".join(f"{line}\n" for line in record.pop("packages")))
        (partial / "changes.diff").write_text(record.pop("changes"))
        for path in (path for pattern in CODE for path in s.task_dir.glob(pattern)):
            write_text(partial / "task" / path.relative_to(s.task_dir), masked(path.read_text(errors="replace")))
        if config is not None:
            write_config(partial, config)
        record |= {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "stack": s.STACK,
            "command": [masked(word) for word in command],
            "data": data_digests(s.data_dir, s.TRAIN_FILE, s.PAIRS_FILE),
            "judge": judge_settings(),
            "settings": asdict(s),
            "library": library.state(s.STACK, s.METHOD),
        }
        write_json(partial / "launch.json", record)
    return folder


def write_config(launch: Path, config: dict) -> None:
    """Write a trainer's resolved ``config`` beside a launch's record."""
    plain = masked_values(json.loads(json.dumps(config, default=str)))
    write_text(launch / "config.yaml", yaml.safe_dump(plain, sort_keys=False, allow_unicode=True))


def launches(run_dir: Path) -> list[Path]:
    """The folders of a run's launches, the first one first."""
    return sorted(path for path in (run_dir / "launches").glob("[0-9]*") if path.is_dir())


def last(run_dir: Path) -> dict:
    """The record of a run's last launch; empty without one. Raises as ``read``."""
    return next(map(read, launches(run_dir)[-1:]), {})


def read(launch: Path) -> dict:
    """launch.json of a launch, with the lines of ``packages`` and the text of ``changes``.

    Raises SettingsError if it is not a record: a run may come from elsewhere.
    """
    record = read_json(launch / "launch.json")
    try:
        lines = regular(launch / "packages.txt").read_text(errors="replace").splitlines()
        record["packages"] = [line for line in lines if "==" in line]
        record["changes"] = regular(launch / "changes.diff").read_text(errors="replace")
        datetime.fromisoformat(record["date"]).timestamp()
        texts = [*code_of(record).values(), *record["data"].values(), *record["judge"].values()]
        wrong = [name for name, kind in FORM.items() if not isinstance(record[name], kind)]
        wrong += [text for text in texts if not isinstance(text, str)]
        wrong += record["judge"].keys() - set(JUDGED)  # they become variables of the environment
    except UNREADABLE as error:
        wrong = [f"{type(error).__name__}: {error}"]
    if wrong:
        raise SettingsError(f"{launch}/launch.json is no record of a launch ({one_line(str(wrong[0]), 80)})")
    return record


def code_of(record: dict) -> dict[str, str]:
    """Commit, uncommitted changes, Python, digests of the task's files, and packages of a record, by name."""
    git = record["git"]
    code = {
        "commit": git["commit"][:12] if "commit" in git else f"none ({git['missing']})",
        "uncommitted changes": ", ".join(git.get("uncommitted", [])) or "none",
        "changes.diff": hashlib.sha256(record["changes"].encode()).hexdigest()[:12],
        "python": record["python"],
    }
    code |= {f"task: {name}": digest[:12] for name, digest in record["task"].items()}
    return code | dict(line.split("==", 1) for line in record["packages"])


def now(task_dir: Path) -> dict:
    """The present state of code and packages, in the form of a record."""
    git, diff = git_state(ROOT)
    return {
        "python": platform.python_version(),
        "git": git,
        "changes": masked(diff),
        "task": digests(task_dir, "*.py", "train.sh"),
        "packages": packages(),
    }


def packages() -> list[str]:
    """name==version of every installed package, sorted: `pip freeze` without paths and URLs."""
    return sorted((f"{name}=={version}" for name, version in versions().items()), key=str.lower)


def git_state(root: Path) -> tuple[dict, str]:
    """State of git in ``root``: commit and uncommitted files, or why there is none; and `git diff HEAD`."""
    try:
        commit = _git(root, "rev-parse", "HEAD").strip()
        status = _git(root, "-c", "core.quotePath=false", "status", "--porcelain", "--", ".").splitlines()
        diff = _git(root, "diff", "HEAD", "--no-color", "--no-ext-diff", "--", ".")
    except FileNotFoundError:
        return {"missing": "git is not installed"}, ""
    except subprocess.CalledProcessError as error:
        return {"missing": next(iter(error.stderr.splitlines()), "git failed").removeprefix("fatal: ")}, ""
    return {"commit": commit, "uncommitted": [f"{each[3:]}{' (new)' * each.startswith('?')}" for each in status]}, diff


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", root, *arguments]
    no_lock = os.environ | {"GIT_OPTIONAL_LOCKS": "0"}  # others may be working in the repository
    return subprocess.run(command, env=no_lock, capture_output=True, text=True, errors="replace", check=True).stdout


def digests(folder: Path, *patterns: str) -> dict[str, str]:
    """sha256 of the files in ``folder``, by name."""
    return {path.name: sha256(path) for pattern in patterns for path in sorted(folder.glob(pattern))}


def data_digests(data_dir: Path, *own_files: str) -> dict[str, str]:
    """sha256 of the manifest, of each parquet file, and of ``own_files`` (TRAIN_FILE, ...).

    The manifest counts without its note (an error's words) and its fingerprint, which includes the task's code.
    """
    found = {}
    if (data_dir / "manifest.json").is_file():
        manifest = json.loads((data_dir / "manifest.json").read_text())
        counted = {name: value for name, value in manifest.items() if name not in ("note", "fingerprint")}
        found["manifest.json"] = hashlib.sha256(json.dumps(counted, sort_keys=True).encode()).hexdigest()
        found |= digests(data_dir, "*.parquet")
    own = [Path(name).expanduser() for name in own_files if name]
    return found | {str(path): sha256(path) for path in own if path.is_file()}
