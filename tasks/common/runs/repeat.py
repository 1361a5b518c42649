"""`make repeat RUN=name`: train again with the recorded settings of a run (launches.py), under a new name.

It checks stack and data, and warns of changes since then.
"""

import json
import os
import re
import subprocess
import sys
from dataclasses import asdict
from itertools import count
from pathlib import Path

from verl_tasks.places import PYTHON_PATH
from verl_tasks.process import die_with_parent, errors_in_one_line
from verl_tasks.runs import launches
from verl_tasks.runs.folder import check_settings, lineage, named
from verl_tasks.runs.run import Run, recorded
from verl_tasks.runs.secrets import MASK
from verl_tasks.settings import COMPLETE, JUDGED, ROOT, Command, Settings, SettingsError, load_settings
from verl_tasks.text import one_line

# Keys of verl, vLLM, Ray and hydra that name code to load, files and folders to write to, a server to send to, or a
# cluster to join.
_CODE = re.compile(
    r"path|_dir\b|(?<!pro)file|url|address|cls|class|_target_|external_lib|backend_module|_impl\b|remote_code"
    r"|ray_kwargs|engine_kwargs|hydra",
    re.IGNORECASE,
)


def check(run_dir: Path) -> tuple[dict, dict]:
    """A run's settings.json, and the record of its last launch. Raises SettingsError where there is none, or where the
    training cannot be repeated under another name. A run may come from elsewhere: its record is data, never code."""
    made, found = recorded(run_dir), launches.launches(run_dir)
    problem = ""
    check_settings(run_dir, made["settings"])
    if not found:
        problem = f"has no record in {run_dir}/launches"
    elif made["kind"] == "sft":
        problem = "is a warm-up, which its settings name; repeat the run that began with it"
    elif (first := lineage(Run.read(run_dir))[0].folder) != run_dir:
        problem = f"is a round of RUN={first.name}; repeat that"
    elif any(MASK in argument for argument in made["arguments"]):
        problem = "had a secret among its ARGS, which is not in its record; train with the same variables again"
    elif made["settings"].get("TASK") != run_dir.parent.name:
        problem = f"its settings.json is of TASK={made['settings'].get('TASK')}, its folder is {run_dir.parent.name}"
    elif unsafe := [argument for argument in made["arguments"] if not _harmless(argument)]:
        problem = f"has ARGS that can run code: {one_line(unsafe[0])}; if you trust them, take make train ARGS='...'"
    if problem:
        raise SettingsError(f"RUN={run_dir.name}: {problem}")
    return made, launches.read(found[-1])


def _harmless(argument: str) -> bool:
    """Whether an argument only sets a value: no option of hydra, no interpolation, no key that loads code."""
    key, _, value = argument.partition("=")
    keys = f"{key} {value}" if "{" in value else key
    return bool(re.fullmatch(r"[+]{0,2}[\w.@]+", key)) and not _CODE.search(keys) and "${" not in value


def variables(made: dict, judge: dict[str, str], environ: dict[str, str]) -> dict[str, str]:
    """The environment of the training: ``environ`` with the recorded settings and judge, without a name.

    Raises SettingsError when ``environ`` has another value than the record.
    """
    recorded_values = {key: str(value) for key, value in made["settings"].items()}
    for key, value in {**recorded_values, **{key: judge.get(key, "") for key in JUDGED}}.items():
        given = environ.get(key, "")
        if key not in ("RUN", "TASK") and given and not _same(given, value):
            hint = f"make repeat STACK={value} does" if key == "STACK" else "leave it out, or use make train"
            raise SettingsError(f"{key}={given}: the run had {key}={value or '(none)'}; {hint}")
    if environ.get("ARGS"):
        raise SettingsError(f"ARGS={environ['ARGS']}: the run has its own; leave it out, or use make train")
    # Not the variables of single commands, a PROFILE among them, nor make's own.
    left_out = {*Command.__dataclass_fields__, "MAKEFLAGS", "MFLAGS", "MAKELEVEL", "GIVEN"}
    kept = {key: value for key, value in environ.items() if key not in left_out}
    return kept | recorded_values | judge | {"RUN": "", COMPLETE: "1"}


def _same(given: str, value: str) -> bool:
    try:
        return given == value or float(given) == float(value)
    except ValueError:
        return False


def next_name(run_dir: Path, s: Settings) -> str:
    """name-repeat-1, or the first such name that has no complete run with ``s``: an interrupted one continues."""
    base = re.sub(r"-repeat-\d+$", "", run_dir.name)
    for number in count(1):
        suffix = f"-repeat-{number}"
        name = base[: 64 - len(suffix)] + suffix  # names have at most 64 characters
        last = f"{name}-round{s.SELF_PLAY_ROUNDS}" if s.SELF_PLAY_ROUNDS > 1 else name
        if name != run_dir.name and not Run.read(run_dir.with_name(last)).complete(s):
            return name


def changed(then: dict[str, str], now: dict[str, str]) -> str:
    """The names whose value has changed, in one line; empty without one."""
    return one_line(", ".join(name for name in then | now if then.get(name) != now.get(name)), 300)


def main() -> None:
    name = os.environ.get("RUN", "")
    if not name:
        raise SettingsError("RUN is empty: name the run to repeat; `make runs` lists all")
    run_dir = named(name, os.environ.get("TASK", ""))
    made, launch = check(run_dir)
    environ = variables(made, launch["judge"], dict(os.environ))
    task_dir = ROOT / "tasks" / run_dir.parent.name
    if not (task_dir / "train.sh").is_file():
        raise SettingsError(f"RUN={name}: its task is gone: there is no {task_dir}/train.sh")
    s = load_settings(environ)  # a record is data: its values are checked before anything runs
    environ["RUN"] = next_name(run_dir, s)
    if names := changed(launches.code_of(launch), launches.code_of(launches.now(task_dir))):
        print(f"warning: changed since that run: {names}; `make diff` of the two says how")
    if unknown := sorted(asdict(s).keys() - made["settings"].keys()):
        print(f"warning: not in its record, so as by default: {', '.join(unknown)}")
    print(f"RUN={name} again, as RUN={environ['RUN']}", flush=True)
    stage = [sys.executable, "-m", "verl_tasks.launch.main"]  # not train.sh: the record has every variable
    environ |= {"PYTHONPATH": PYTHON_PATH, "PYTHONUNBUFFERED": "1"}
    data = subprocess.run([*stage, "data"], env=environ | {"STAGE": "data"}, preexec_fn=die_with_parent)
    if code := data.returncode:
        sys.exit(code)
    now = launches.data_digests(s.data_dir, s.TRAIN_FILE, s.PAIRS_FILE)
    found = ({name: of[name] for name in of if name != "manifest.json"} for of in (launch["data"], now))
    if names := changed(*found):  # not the manifest: it has the reward's digest, a change of the code
        raise SettingsError(f"RUN={name}: was trained on different data ({names} differ)")
    os.execve(sys.executable, [*stage, "train", *made["arguments"]], environ | {"STAGE": "train"})


if __name__ == "__main__":
    with errors_in_one_line(SettingsError, json.JSONDecodeError):
        main()
