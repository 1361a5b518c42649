"""simulate a small economy with each model as all workers, and with the rule of the reward's targets"""

import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from tasks.econ_agent.prepare_data import SHOTS, SYSTEM, prompt
from tasks.econ_agent.retrieval import Memory, roll_out
from tasks.econ_agent.reward import read_decision
from tasks.econ_agent.simulation import Economy, Month, indicators
from verl_tasks import stage

STREAM = 2  # of the seed: see retrieval.STREAM
RULE = "rule"  # the label of the policy that decides by the reward's targets


# Each worker's decisions in the current state, work and consumption, each (agents,); and how many gave no decision.
Policy = Callable[[Economy], tuple[np.ndarray, np.ndarray, int]]


def rule(economy: Economy) -> tuple[np.ndarray, np.ndarray, int]:
    """Everybody decides by the reward's targets."""
    return *economy.targets(), 0


def model_policy(ask: Callable, memory: Memory, difficulty: str, strict: bool) -> Policy:
    """``ask`` the model (stage.asking) for every worker, a month at once, with the task's prompt. A worker without a
    decision is counted, and neither works nor spends."""

    def decide(economy: Economy) -> tuple[np.ndarray, np.ndarray, int]:
        texts = [prompt(state, memory.similar(state, SHOTS[difficulty]), difficulty) for state in economy.states()]
        user = [[{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}] for text in texts]
        decisions = [read_decision(response, strict) for response in ask(user)]
        work, consumption = np.array([decision or (0.0, 0.0) for decision in decisions]).T
        return work, consumption, decisions.count(None)

    return decide


def simulate(policy: Policy, agents: int, months: int, seed: tuple[int, ...]) -> Iterator[tuple[Month, int]]:
    """Each month of an economy in which all ``agents`` follow ``policy``, with its number of missing decisions. The
    same seed is the same economy and luck for every policy."""
    economy = Economy(seed, agents)
    for _ in range(months):
        work, consumption, missing = policy(economy)
        yield economy.step(work, consumption), missing


@dataclass(frozen=True)
class Variables:
    """Variables of `make simulate`."""

    MONTHS: int = stage.variable("24", "months of the economy", stage.positive)
    AGENTS: int = stage.variable("16", "workers, each asked every month", stage.positive)


CHILD = "import sys; from tasks.econ_agent.simulate import sample_months; sample_months(*sys.argv[1:])"


def sample_months(folder: str, *labelled: str) -> None:
    """What ``simulate_models`` runs in a process of its own: for each model, ``LABEL.jsonl`` with a line a month."""
    out, models = Path(folder), _labels(list(labelled))
    s, own = stage.load_settings(), stage.load_settings(cls=Variables)
    memory = Memory(roll_out(s.SEED))
    for label, model in models.items():
        with stage.asking(s, model) as ask, (out / f"{label}.jsonl").open("w") as file:
            policy = model_policy(ask, memory, s.DIFFICULTY, s.REWARD != "lenient")
            for month, missing in simulate(policy, own.AGENTS, own.MONTHS, (s.SEED, STREAM, s.EVAL_SEED)):
                file.write(json.dumps({**asdict(month), "missing": missing}) + "\n")
                file.flush()


def simulate_models(models: dict[str, str]) -> None:
    """`make simulate`: a table of ``models`` (label to path) and of the rule, and simulation.json with every month."""
    s, own = stage.load_settings(), stage.load_settings(cls=Variables)
    if wrong := [label for label in models if not re.fullmatch(r"[\w-]{1,64}", label) or label == RULE]:
        raise stage.SettingsError(f"simulate: {wrong[0]}: a label has letters, digits, _ and -, and is not `{RULE}`")
    setup = {**asdict(own), "SEED": s.SEED, "DIFFICULTY": s.DIFFICULTY, "REWARD": s.REWARD}
    setup |= {"sampling": stage.sampled_as(s)}
    folder = stage.artifacts() / "eval" / s.TASK / f"simulation-{stage.fingerprint({**setup, 'models': models})}"
    working = folder / ".working"
    shutil.rmtree(working, ignore_errors=True)
    working.mkdir(parents=True)
    stage.run(
        [sys.executable, "-c", CHILD, str(working), *(f"{k}={v}" for k, v in models.items())],
        name="months",
        log=folder / "simulation.log",
        total=own.MONTHS * len(models),
        watch=lambda: _progress(working, list(models)),
        environment={"VLLM_ENABLE_V1_MULTIPROCESSING": os.environ.get("EVAL_MULTIPROCESSING", "1")},
    )
    months = {label: _read(working / f"{label}.jsonl", own.MONTHS) for label in models}
    months[RULE] = list(simulate(rule, own.AGENTS, own.MONTHS, (s.SEED, STREAM, s.EVAL_SEED)))
    shutil.rmtree(working)
    report(s.TASK, folder, setup, models, months)


def _progress(working: Path, labels: list[str]) -> stage.Progress:
    lines = {label: path.read_bytes().count(b"\n") for label in labels if (path := working / f"{label}.jsonl").exists()}
    return stage.Progress(sum(lines.values()), f" {list(lines)[-1]}" if lines else " starting the engine")


def _read(path: Path, months: int) -> list[tuple[Month, int]]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    if len(rows) < months:
        raise stage.StageFailed(f"the simulation ended after {len(rows)} of {months} months: {path}")
    return [(Month(**{k: v for k, v in row.items() if k != "missing"}), row["missing"]) for row in rows]


def report(task: str, folder: Path, setup: dict, models: dict[str, str], months: dict) -> None:
    """The table on screen and as simulation.md, and simulation.json, in ``folder``."""
    results = {}
    for label, history in months.items():
        missing = sum(count for _, count in history) / (len(history) * setup["AGENTS"])
        results[label] = {**indicators([month for month, _ in history]), "no_decision": missing}
    header = ["indicator", *results]
    rows = [[name, *(_shown(values[name]) for values in results.values())] for name in results[RULE]]
    title = f"{task}: {setup['MONTHS']} months of one economy of {setup['AGENTS']} workers, SEED={setup['SEED']}"
    stage.show_table(title, header, rows)
    stage.write_text(folder / "simulation.md", f"{title}\n\n{stage.markdown_table(header, rows)}\n")
    histories = {label: [asdict(month) for month, _ in history] for label, history in months.items()}
    stage.write_json(
        folder / "simulation.json", {"settings": setup, "models": models, "indicators": results, "months": histories}
    )
    print(f"  {folder}/simulation.json, simulation.md")


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3f}"


def main() -> None:
    """``LABEL=MODEL ...``."""
    with stage.errors_in_one_line():
        simulate_models(_labels(sys.argv[1:]))


def _labels(arguments: list[str]) -> dict[str, str]:
    if wrong := [argument for argument in arguments if "=" not in argument]:
        raise stage.SettingsError(f"simulate: {wrong[0]}: give each model as LABEL=MODEL")
    return dict(argument.split("=", 1) for argument in arguments)


if __name__ == "__main__":
    main()
