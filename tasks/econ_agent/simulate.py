"""simulate a small economy with each model as all workers, and with the rule of the reward's targets"""

import gc
import itertools
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from tasks.econ_agent.prepare_data import SHOTS, SYSTEM, prompt
from tasks.econ_agent.retrieval import Memory, roll_out
from tasks.econ_agent.reward import read_decision
from tasks.econ_agent.simulation import Economy, Month, indicators
from verl_tasks import DataError, with_opened_thinking
from verl_tasks.evaluation import engines
from verl_tasks.evaluation.engine_pool import Hardware
from verl_tasks.evaluation.rollouts import SAMPLED, TOO_LONG
from verl_tasks.evaluation.sample import sampling
from verl_tasks.evaluation.tables import markdown_table, show_table
from verl_tasks.files import write_json, write_text
from verl_tasks.interrupts import interrupt_on_sigterm
from verl_tasks.process import Progress, StageFailed, errors_in_one_line, run
from verl_tasks.rows import chat
from verl_tasks.settings import Settings, SettingsError, artifacts, fingerprint, load_settings, positive, variable

STREAM = 2  # of the seed: see retrieval.STREAM
RULE = "rule"  # the label of the policy that decides by the reward's targets


# Each worker's decisions in the current state, work and consumption, each (agents,); and how many gave no decision.
Policy = Callable[[Economy], tuple[np.ndarray, np.ndarray, int]]


def rule(economy: Economy) -> tuple[np.ndarray, np.ndarray, int]:
    """Everybody decides by the reward's targets."""
    return *economy.targets(), 0


def model_policy(engine, how: engines.Sampling, memory: Memory, difficulty: str, strict: bool) -> Policy:
    """Ask the model for every worker, a month at once, with the task's prompt. A worker without a decision is counted,
    and neither works nor spends. Raises DataError for a prompt longer than MAX_PROMPT_LENGTH."""

    months = itertools.count()

    def decide(economy: Economy) -> tuple[np.ndarray, np.ndarray, int]:
        requests, of_month = [], replace(how, seed=how.seed * 1_000_000 + next(months))
        for number, state in enumerate(economy.states()):
            text = prompt(state, memory.similar(state, SHOTS[difficulty]), difficulty)
            requests.append(engines.Request(number, SAMPLED, chat(text, SYSTEM)))
        work, consumption, missing = np.zeros(len(requests)), np.zeros(len(requests)), len(requests)
        for request, (completion, *_) in engine.generate(requests, of_month):
            if completion.finish_reason == TOO_LONG:
                raise DataError(f"a prompt is longer than MAX_PROMPT_LENGTH={how.max_prompt_tokens} tokens; raise it")
            response = with_opened_thinking(completion.response, {"think_opened": completion.think_opened})
            if decision := read_decision(response, strict):
                work[request.index], consumption[request.index] = decision
                missing -= 1
        return work, consumption, missing

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

    MONTHS: int = variable("24", "months of the economy", positive)
    AGENTS: int = variable("16", "workers, each asked every month", positive)


CHILD = "import sys; from tasks.econ_agent.simulate import sample_months; sample_months(*sys.argv[1:])"


def sample_months(folder: str, *labelled: str) -> None:
    """What ``simulate_models`` runs in a process of its own: for each model, ``LABEL.jsonl`` with a line a month."""
    out, models = Path(folder), _labels(list(labelled))
    s, own = load_settings(), load_settings(cls=Variables)
    memory, how = Memory(roll_out(s.SEED)), _sampling(s)
    for label, model in models.items():
        limit = how.max_prompt_tokens + how.max_tokens
        engine = Hardware.of(s).engine(model, limit, how.seed)
        policy = model_policy(engine, how, memory, s.DIFFICULTY, s.REWARD != "lenient")
        with (out / f"{label}.jsonl").open("w") as file:
            for month, missing in simulate(policy, own.AGENTS, own.MONTHS, (s.SEED, STREAM, s.EVAL_SEED)):
                file.write(json.dumps({**asdict(month), "missing": missing}) + "\n")
                file.flush()
        engine.close()
        del engine, policy
        gc.collect()  # before the next one starts


def _sampling(s: Settings) -> engines.Sampling:
    return replace(sampling(s), n=1, greedy=False)


def simulate_models(models: dict[str, str]) -> None:
    """`make simulate`: a table of ``models`` (label to path) and of the rule, and simulation.json with every month."""
    s, own = load_settings(), load_settings(cls=Variables)
    if wrong := [label for label in models if not re.fullmatch(r"[\w-]{1,64}", label) or label == RULE]:
        raise SettingsError(f"simulate: {wrong[0]}: a label has letters, digits, _ and -, and is not `{RULE}`")
    setup = {**asdict(own), "SEED": s.SEED, "DIFFICULTY": s.DIFFICULTY, "REWARD": s.REWARD}
    setup |= {"sampling": asdict(_sampling(s))}
    folder = artifacts() / "eval" / s.TASK / f"simulation-{fingerprint({**setup, 'models': models})}"
    working = folder / ".working"
    shutil.rmtree(working, ignore_errors=True)
    working.mkdir(parents=True)
    run(
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


def _progress(working: Path, labels: list[str]) -> Progress:
    lines = {label: path.read_bytes().count(b"\n") for label in labels if (path := working / f"{label}.jsonl").exists()}
    return Progress(sum(lines.values()), f" {list(lines)[-1]}" if lines else " starting the engine")


def _read(path: Path, months: int) -> list[tuple[Month, int]]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    if len(rows) < months:
        raise StageFailed(f"the simulation ended after {len(rows)} of {months} months: {path}")
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
    show_table(title, header, rows)
    write_text(folder / "simulation.md", f"{title}\n\n{markdown_table(header, rows)}\n")
    histories = {label: [asdict(month) for month, _ in history] for label, history in months.items()}
    write_json(
        folder / "simulation.json", {"settings": setup, "models": models, "indicators": results, "months": histories}
    )
    print(f"  {folder}/simulation.json, simulation.md")


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3f}"


def main() -> None:
    """``LABEL=MODEL ...``."""
    interrupt_on_sigterm()
    with errors_in_one_line(SettingsError, DataError):
        simulate_models(_labels(sys.argv[1:]))


def _labels(arguments: list[str]) -> dict[str, str]:
    if wrong := [argument for argument in arguments if "=" not in argument]:
        raise SettingsError(f"simulate: {wrong[0]}: give each model as LABEL=MODEL")
    return dict(argument.split("=", 1) for argument in arguments)


if __name__ == "__main__":
    main()
