"""Prompts of econ_agent: the state of one worker in a simulated economy, with similar states and good decisions."""

import itertools
import json
from collections.abc import Iterator

from tasks.econ_agent.retrieval import Memory, Shot, roll_out
from tasks.econ_agent.reward import BASKET, targets
from tasks.econ_agent.simulation import State, rolled_out
from verl_tasks import prepare

MONTHS = 36  # a state comes from one of the first MONTHS months
STREAM = 1  # of the seed: see retrieval.STREAM
SHOTS = {"easy": 1, "hard": 3}

SYSTEM = (
    "You are a worker. Decide for this month how much to work and which share of your money to spend, each from 0 to 1."
    " Work less the more months of income you have saved. Spend a larger share the nearer your money is to the cost of"
    ' the essentials. Answer with JSON only: {"work": w, "consumption": c}'
)


def answer(work: float, consumption: float) -> str:
    """A decision as the JSON that the reward reads, in steps of 0.01."""
    return json.dumps({"work": round(float(work), 2), "consumption": round(float(consumption), 2)})


def in_brief(state: State) -> str:
    """What the decision depends on, and little else."""
    worked = "worked" if state.employed else "did not work"
    return (
        f"Savings ${state.savings:.0f}. Work pays ${state.income:.0f} after tax. "
        f"Essentials cost ${BASKET * state.price:.0f}. Interest {state.interest:.1%}. "
        f"{worked.capitalize()} last month."
    )


def in_words(state: State) -> str:
    """Everything the worker knows, in the style of EconAgent's prompts."""
    if state.employed:
        past = f"Last month you worked and earned ${state.earned:.0f}, paid ${state.tax:.0f} of tax"
    else:
        past = "Last month you did not work and earned nothing, paid no tax"
    return (
        f"You are {state.name}, {state.age} years old, {state.job}. {past}, got ${state.redistribution:.0f} of"
        f" redistributed tax and spent ${state.spent:.0f} on goods. You have savings of ${state.savings:.0f}. If you"
        f" work this month, you earn ${state.pay:.0f} before tax and have ${state.income:.0f} after tax and"
        f" redistribution. A good costs ${state.price:.2f}, and you need {BASKET:.0f} goods a month. Prices changed by"
        f" {state.inflation:.1%} in the last year, savings earn {state.interest:.1%} a year, and"
        f" {state.unemployment:.0%} of all workers did not work last month."
    )


def prompt(state: State, shots: list[Shot], difficulty: str) -> str:
    """The user's turn: similar states with good decisions, then the worker's own state."""
    lines = [f"Similar: {in_brief(shot.state)}\nGood: {answer(shot.work, shot.consumption)}" for shot in shots]
    if difficulty == "hard":
        return "\n\n".join([*lines, f"{in_words(state)} What do you decide?"])
    person = f"{state.name}, {state.age}, {state.job}."
    economy = f"Inflation {state.inflation:.1%}, unemployment {state.unemployment:.0%}."
    return "\n\n".join([*lines, f"{person} {in_brief(state)} {economy} Decide."])


def states(seed: int) -> Iterator[State]:
    """Endless: one worker in one month of each simulation, so that no two prompts share an economy."""
    for number in itertools.count():
        economy, rng = rolled_out((seed, STREAM, number), MONTHS)
        yield economy.states()[rng.integers(economy.agents)]


def example(state: State, memory: Memory, difficulty: str) -> prepare.Example:
    """The prompt, the numbers that the reward needs, and the targets as a demonstration."""
    truth = state.ground_truth()
    best = targets(truth["income"], truth["savings"], truth["price"], truth["interest"])
    text = prompt(state, memory.similar(state, SHOTS[difficulty]), difficulty)
    return prepare.Example(text, truth, answer(*best), SYSTEM)


def generate(settings) -> Iterator[prepare.Example]:
    """States rolled out here (SOURCE=generate)."""
    memory = Memory(roll_out(settings.SEED))
    return (example(state, memory, settings.DIFFICULTY) for state in states(settings.SEED))


if __name__ == "__main__":
    prepare.main({"generate": generate})
