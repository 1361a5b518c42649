"""A small economy of workers, a month at a time, after EconAgent (Li et al., ACL 2024, arXiv 2310.10436).

Each month a worker decides with what propensity to work and which share of all money to spend. Those who work earn and
make goods, income is taxed and the tax shared out, goods are bought while there are any, and price and wages follow the
gap between demand and supply. Once a year savings earn interest, and a Taylor rule sets the next rate.
"""

from dataclasses import dataclass

import numpy as np

from tasks.econ_agent.reward import targets

YEAR = 12


# Units: $ and months unless named. "EconAgent": arXiv 2310.10436 and its config.yaml.
AGENTS = 20  # workers; EconAgent has 100
HOURS = 168.0  # of a month's work; EconAgent
# Hourly wages are lognormal. Median $18.58 and mean $24.98 (U.S. Bureau of Labor Statistics, OEWS May 2018) give
# sigma = sqrt(2 ln(24.98 / 18.58)). EconAgent draws from a Pareto distribution.
WAGE_MEDIAN, WAGE_SIGMA = 18.58, 0.77
# Savings at the start in months of a worker's income, lognormal, so that workers differ from the first month on;
# EconAgent starts from 0.
SAVINGS_MEDIAN, SAVINGS_SIGMA = 1.0, 2.0
PRODUCTIVITY = 1.0  # goods an hour; EconAgent. A good costs the mean hourly wage at the start, as there
PRICE_STEP, WAGE_STEP = 0.10, 0.05  # largest change per month at a gap of 1; EconAgent
FLOOR = 1.0  # of price and hourly wage, $; EconAgent
# Of the Taylor rule, rates per year; EconAgent.
NATURAL_INTEREST, INFLATION_TARGET, NATURAL_UNEMPLOYMENT = 0.01, 0.02, 0.04
INFLATION_WEIGHT = UNEMPLOYMENT_WEIGHT = 0.5
# Monthly income tax. The limits (a year's over 12) are the US ones of 2019 for a single filer, the rates those of 2018,
# as in EconAgent and AI Economist.
BRACKET_FROM = np.array([0, 9700, 39475, 84200, 160725, 204100, 510300]) / YEAR
BRACKET_RATES = np.array([0.10, 0.12, 0.22, 0.24, 0.32, 0.35, 0.37])


@dataclass(frozen=True)
class Month:
    """What happened in one month. Money in $, ``output``, ``demand`` and ``stock`` (left at the end) in goods,
    ``inflation`` the relative change of the price in this month, ``unemployment`` and the means of the decisions
    shares, ``interest`` the rate a year that held, ``gini`` that of savings at the end."""

    month: int
    price: float
    inflation: float
    unemployment: float
    output: float
    demand: float
    stock: float
    wages: float
    tax: float
    redistributed: float
    spending: float
    interest: float
    interest_paid: float
    gini: float
    work: float
    consumption: float


@dataclass(frozen=True)
class State:
    """What one worker knows before deciding. Money in $ (``price`` in cents, the rest whole), rates as shares.

    ``pay``: of a month's work before tax, ``income``: after tax and last month's redistribution. ``earned``, ``tax``,
    ``redistribution``, ``spent``: of last month. ``inflation``: of the last year, or since the start.
    """

    name: str
    age: int
    job: str
    employed: bool
    pay: float
    income: float
    earned: float
    tax: float
    redistribution: float
    spent: float
    savings: float
    price: float
    interest: float
    inflation: float
    unemployment: float

    def ground_truth(self) -> dict[str, float]:
        """What reward.py needs: the numbers that the prompt states, as it states them."""
        names = ("income", "savings", "price", "interest", "inflation", "unemployment")
        return {name: getattr(self, name) for name in names}


NAMES = ("Ada", "Ben", "Carla", "David", "Elena", "Felix", "Grace", "Hugo", "Ines", "Jonas", "Kira", "Liam")
# Up to which hourly wage at the start, $
JOBS = ((12, "cook"), (15, "cashier"), (19, "driver"), (25, "clerk"), (33, "nurse"), (45, "teacher"), (65, "engineer"))
LAST_JOB = "doctor"


def income_tax(income: np.ndarray) -> np.ndarray:
    """Tax on each monthly ``income`` (agents,), $: each bracket's rate on the part of the income within it."""
    upper = np.append(BRACKET_FROM[1:], np.inf)
    return (np.clip(np.asarray(income)[..., None], BRACKET_FROM, upper) - BRACKET_FROM) @ BRACKET_RATES


def gini(values: np.ndarray) -> float:
    """Gini coefficient of values >= 0: 0 if all are equal, (n - 1) / n if one has all; 0 if nobody has anything."""
    ordered, n = np.sort(values), len(values)
    total = ordered.sum()
    return float((2 * np.arange(1, n + 1) - n - 1) @ ordered / (n * total)) if total > 0 else 0.0


def taylor_rate(inflation: float, unemployment: float) -> float:
    """The interest rate a year, at least 0: ``r + t + a (inflation - t) + b (natural unemployment - unemployment)``."""
    rate = NATURAL_INTEREST + INFLATION_TARGET + INFLATION_WEIGHT * (inflation - INFLATION_TARGET)
    return max(rate + UNEMPLOYMENT_WEIGHT * (NATURAL_UNEMPLOYMENT - unemployment), 0.0)


class Economy:
    """The workers (arrays of shape (agents,)) and their market between two months. ``seed``: an integer or several;
    the random numbers of a month do not depend on what is decided, so policies meet the same luck."""

    def __init__(self, seed: int | tuple[int, ...], agents: int = AGENTS):
        self.agents, self.rng = agents, np.random.default_rng(seed)
        self.wage = np.maximum(FLOOR, WAGE_MEDIAN * np.exp(WAGE_SIGMA * self.rng.standard_normal(agents)))
        months = SAVINGS_MEDIAN * np.exp(SAVINGS_SIGMA * self.rng.standard_normal(agents))
        self.savings = months * HOURS * self.wage
        self.name, self.age = self.rng.integers(len(NAMES), size=agents), self.rng.integers(20, 65, agents)
        self.first_wage = self.wage.copy()
        self.price = max(FLOOR, float(self.wage.mean()))
        self.stock = 0.0
        self.interest = NATURAL_INTEREST + INFLATION_TARGET
        self.prices = [self.price]
        self.history: list[Month] = []
        self.worked = self.rng.random(agents) >= NATURAL_UNEMPLOYMENT
        self.spent = np.zeros(agents)
        self._pay()

    def _pay(self) -> None:
        """Income, tax and redistribution of those who worked; savings are not touched."""
        self.earned = np.where(self.worked, HOURS * self.wage, 0.0)
        self.tax = income_tax(self.earned)
        self.redistribution = float(self.tax.sum()) / self.agents

    @property
    def unemployment(self) -> float:
        """Share that did not work last month."""
        return 1 - float(self.worked.mean())

    @property
    def inflation(self) -> float:
        """Of the price over the last 12 months, or since the start."""
        return self.price / self.prices[max(0, len(self.prices) - 1 - YEAR)] - 1

    def income(self) -> np.ndarray:
        """What a month's work would bring each worker (agents,), after tax and last month's redistribution, $."""
        pay = HOURS * self.wage
        return pay - income_tax(pay) + self.redistribution

    def targets(self) -> tuple[np.ndarray, np.ndarray]:
        """The reward's targets of work and consumption, each (agents,)."""
        return targets(self.income(), self.savings, self.price, self.interest)

    def states(self) -> list[State]:
        """What each worker knows now."""
        shared = {
            "redistribution": float(round(self.redistribution)),
            "price": round(self.price, 2),
            "interest": round(self.interest, 3),
            "inflation": round(self.inflation, 3),
            "unemployment": round(self.unemployment, 3),
        }
        own = {"pay": HOURS * self.wage, "income": self.income(), "earned": self.earned, "tax": self.tax}
        own |= {"spent": self.spent, "savings": self.savings}
        return [
            State(
                name=NAMES[self.name[i]],
                age=int(self.age[i]) + len(self.history) // YEAR,
                job=next((job for limit, job in JOBS if self.first_wage[i] < limit), LAST_JOB),
                employed=bool(self.worked[i]),
                **{name: float(round(values[i])) for name, values in own.items()},
                **shared,
            )
            for i in range(self.agents)
        ]

    def step(self, work: np.ndarray, consumption: np.ndarray) -> Month:
        """One month in which each worker works with propensity ``work`` and offers the share ``consumption`` of savings
        and income for goods, both (agents,) in [0, 1]. Raises ValueError for other shapes and values."""
        agents, rng = self.agents, self.rng
        work, consumption = np.asarray(work, float), np.asarray(consumption, float)
        for name, share in (("work", work), ("consumption", consumption)):
            if share.shape != (agents,) or not np.all((share >= 0) & (share <= 1)):
                raise ValueError(f"{name} must be {agents} numbers in [0, 1]")
        luck, order = rng.random(agents), rng.permutation(agents)
        wage_luck, price_luck = rng.random(agents), rng.random()

        self.worked = luck < work
        self._pay()
        self.savings = self.savings + self.earned - self.tax + self.redistribution
        output = HOURS * PRODUCTIVITY * float(self.worked.sum())
        supply = self.stock + output

        demand = consumption * self.savings / self.price
        before = np.empty(agents)  # goods that those ahead in the random order ask for
        before[order] = np.cumsum(demand[order]) - demand[order]
        bought = np.clip(supply - before, 0.0, demand)
        self.spent = np.minimum(bought * self.price, self.savings)
        self.savings = self.savings - self.spent
        self.stock = max(0.0, supply - float(bought.sum()))

        wanted = float(demand.sum())
        gap = (wanted - supply) / max(wanted, supply, 1e-9)  # in [-1, 1]
        self.wage = np.maximum(FLOOR, self.wage * (1 + wage_luck * WAGE_STEP * gap))
        last_price = self.price
        self.price = max(FLOOR, self.price * (1 + price_luck * PRICE_STEP * gap))
        self.prices.append(self.price)

        rate, interest_paid = self.interest, 0.0
        if len(self.prices) % YEAR == 1:  # twelve months are over
            interest_paid = rate * float(self.savings.sum())
            self.savings = self.savings * (1 + rate)
            year = [m.unemployment for m in self.history[1 - YEAR :]] + [self.unemployment]
            self.interest = taylor_rate(self.inflation, float(np.mean(year)))

        month = Month(
            month=len(self.history) + 1,
            price=self.price,
            inflation=self.price / last_price - 1,
            unemployment=self.unemployment,
            output=output,
            demand=wanted,
            stock=self.stock,
            wages=float(self.earned.sum()),
            tax=float(self.tax.sum()),
            redistributed=self.redistribution * agents,
            spending=float(self.spent.sum()),
            interest=rate,
            interest_paid=interest_paid,
            gini=gini(self.savings),
            work=float(work.mean()),
            consumption=float(consumption.mean()),
        )
        self.history.append(month)
        return month


def rolled_out(seed: tuple[int, ...], months: int) -> tuple[Economy, np.random.Generator]:
    """An economy after up to ``months`` months of ``behave``, and the generator that drew its decisions."""
    economy, rng = Economy(seed), np.random.default_rng((*seed, 1))
    for _ in range(rng.integers(months)):
        economy.step(*behave(economy, rng))
    return economy, rng


def behave(economy: Economy, rng: np.random.Generator):
    """Decisions that roll out states, ``(work, consumption)``: the targets with normal noise of standard deviation
    0.15, and a fifth of the workers decides anything."""
    decisions = []
    for target in economy.targets():
        noisy = np.clip(target + 0.15 * rng.standard_normal(target.shape), 0, 1)
        decisions.append(np.where(rng.random(target.shape) < 0.2, rng.random(target.shape), noisy))
    return decisions[0], decisions[1]


SHOWN = ("unemployment", "inflation", "output", "work", "consumption")


def _correlation(x: np.ndarray, y: np.ndarray) -> float | None:
    """Pearson's; None with fewer than three values, or where one never changes."""
    if len(x) < 3 or np.ptp(x) < 1e-12 or np.ptp(y) < 1e-12:
        return None
    return float(np.corrcoef(x, y)[0, 1])


def indicators(history: list[Month]) -> dict[str, float | None]:
    """What a simulation shows: means over months, but ``gini`` (of savings) at the end and ``inflation`` a year over
    all of it.

    ``phillips``: correlation of a month's inflation and unemployment. ``okun``: of the growth of output (real GDP) from
    the month before and the change in unemployment, over months with output before them. None where a correlation has
    no value.
    """
    columns = {name: np.array([getattr(month, name) for month in history]) for name in SHOWN}
    unemployment, inflation, output = (columns[name] for name in ("unemployment", "inflation", "output"))
    made = output[:-1] > 0
    growth = output[1:][made] / output[:-1][made] - 1
    return {
        "gini": history[-1].gini,
        **{name: float(values.mean()) for name, values in columns.items()},
        "inflation": float(np.prod(1 + inflation) ** (YEAR / len(history)) - 1),
        "phillips": _correlation(inflation, unemployment),
        "okun": _correlation(growth, np.diff(unemployment)[made]),
    }
