"""econ_agent's reward: -1.0 without exactly one JSON object with work and consumption in [0, 1], else in [-1, 1] by how
near both are to the targets of the worker's own state."""

import numpy as np

from verl_tasks import json_answer, read_ground_truth, reward_function

SHARE = {"type": "number", "minimum": 0, "maximum": 1}
SCHEMA = {
    "type": "object",
    "properties": {"work": SHARE, "consumption": SHARE},
    "required": ["work", "consumption"],
    "additionalProperties": False,
}
VARIANTS = ("strict", "lenient")  # lenient: text and thinking may stand around the object
INVALID = -1.0
RIGHT = 0.8  # acc: the errors of work and consumption are, on average, at most a tenth of the largest possible
BASKET = 60.0  # essential goods a month; a good is an hour's work of the mean worker at the start
WORK_EXPONENT = 0.7
CONSUMPTION_EXPONENT = 0.5
# Logged, not rewarded: no decision of one worker changes last month's economy.
MACRO = ("inflation", "unemployment", "interest")


def targets(income, savings, price, interest):
    """What a worker should decide, ``(work, consumption)``, each in [0, 1]; for floats or arrays of one shape.

    ``work = min(1, (income / (savings (1 + interest))) ** 0.7)``: who has saved less than a month's income works.
    ``consumption = min(1, (60 price / (savings + income)) ** 0.5)``: who can just pay the essentials spends all.
    These are the rules of Lengnick (2013) as EconAgent states them (Li et al., ACL 2024, arXiv 2310.10436, baseline
    LEN), with the essentials of a month in place of one good, and exponents of 0.7 and 0.5 for its 0.1, which puts
    nearly all workers at nearly the same decision.

    ``income``: of a month's work, after tax and redistribution, $. ``savings``: $. ``price``: of one good, $.
    ``interest``: a year, 0.03 for 3 %.
    """
    tiny = 1e-9
    work = (income / np.maximum(savings * (1 + interest), tiny)) ** WORK_EXPONENT
    consumption = (BASKET * price / np.maximum(savings + income, tiny)) ** CONSUMPTION_EXPONENT
    return np.minimum(1.0, work), np.minimum(1.0, consumption)


def decision_score(work, consumption, work_target, consumption_target):
    """In [-1, 1]: the mean of ``1 - 2 |x - target| / max(target, 1 - target)`` over work and consumption.

    1 at the targets, -1 where both are as far off as a decision in [0, 1] can be; nowhere flat.
    """

    def score(x, target):
        return 1 - 2 * np.abs(x - target) / np.maximum(target, 1 - target)

    return (score(work, work_target) + score(consumption, consumption_target)) / 2


def read_decision(response: str, strict: bool = True) -> tuple[float, float] | None:
    """``(work, consumption)`` of a response that is exactly one JSON object with these two keys, numbers in [0, 1];
    None of any other. ``strict=False``: text and thinking may stand around the object."""
    value = json_answer.read_object(response, strict)
    if value is None or json_answer.schema_problem(value, SCHEMA):
        return None
    return float(value["work"]), float(value["consumption"])


@reward_function
def compute_score(data_source, solution_str, ground_truth, extra_info=None, variant="strict", **kwargs) -> dict:
    """Score one response.

    ``ground_truth``: ``{"income", "savings", "price", "interest", "inflation", "unemployment"}`` (see ``targets``; the
    last two a year and a share) or that as JSON text. ``variant``: "strict", or "lenient", which allows text and
    thinking around the object. Returns the same keys for every row: ``score`` in [-1, 1]; ``acc``, 1.0 where it is at
    least 0.8; ``format``; ``work`` and ``consumption``, 0.0 where there is no decision; and the state of the economy.
    """
    truth = read_ground_truth(ground_truth)
    goals = targets(truth["income"], truth["savings"], truth["price"], truth["interest"])
    decision = read_decision(solution_str, strict=variant == "strict")
    score = INVALID if decision is None else float(decision_score(*decision, *goals))
    work, consumption = decision or (0.0, 0.0)
    found = {"score": score, "acc": score >= RIGHT, "format": decision is not None}
    return found | {"work": work, "consumption": consumption} | {name: truth[name] for name in MACRO}


def wrong_forms(response: str) -> list[str]:
    """What the gold check makes of a right response, none of it right: in the thinking, twice, with one more key."""
    return [f"<think>{response}</think>", response + response, response.replace("{", '{"note": 1, ', 1)]
