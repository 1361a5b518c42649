"""A small economy of workers, a month at a time, after EconAgent (Li et al., ACL 2024, arXiv 2310.10436).

Each month a worker decides with what propensity to work and which share of all money to spend. Those who work earn and
make goods, income is taxed and the tax shared out, goods are bought while there are any, and price and wages follow the
gap between demand and supply. Once a year savings earn interest, and a Taylor rule sets the next rate.
"""

from dataclasses import asdict, dataclass, field

import numpy as np

from tasks.econ_agent.reward import targets

YEAR = 12


@dataclass(frozen=True)
class Parameters:
    """Units: $ and months unless named. "EconAgent": arXiv 2310.10436 and its config.yaml.

    ``agents``: workers. EconAgent has 100.
    ``hours``: of a month's work; EconAgent.
    ``wage_median``, ``wage_sigma``: hourly wages are lognormal. Median $18.58 and mean $24.98 (U.S. Bureau of Labor
    Statistics, OEWS May 2018) give sigma = sqrt(2 ln(24.98 / 18.58)). EconAgent draws from a Pareto distribution.
    ``savings_median``, ``savings_sigma``: savings at the start in months of a worker's income, lognormal. Ours, so that
    workers differ from the first month on; EconAgent starts from 0.
    ``productivity``: goods an hour; EconAgent. A good costs the mean hourly wage at the start, as there.
    ``price_step``, ``wage_step``: largest change a month at a gap of 1; EconAgent.
    ``floor``: of price and hourly wage, $; EconAgent.
    ``natural_interest``, ``inflation_target``, ``natural_unemployment``, ``inflation_weight``,
    ``unemployment_weight``: of the Taylor rule, rates a year; EconAgent.
    ``bracket_from``, ``bracket_rates``: monthly income tax. EconAgent's brackets, there and in AI Economist named after
    2018; the rates are those of 2018, the limits (a year's over 12) the US ones of 2019 for a single filer.
    """

    agents: int = 20
    hours: float = 168.0
    wage_median: float = 18.58
    wage_sigma: float = 0.77
    savings_median: float = 1.0
    savings_sigma: float = 2.0
    productivity: float = 1.0
    price_step: float = 0.10
    wage_step: float = 0.05
    floor: float = 1.0
    natural_interest: float = 0.01
    inflation_target: float = 0.02
    natural_unemployment: float = 0.04
    inflation_weight: float = 0.5
    unemployment_weight: float = 0.5
    bracket_from: tuple[float, ...] = tuple(x / YEAR for x in (0, 9700, 39475, 84200, 160725, 204100, 510300))
    bracket_rates: tuple[float, ...] = (0.10, 0.12, 0.22, 0.24, 0.32, 0.35, 0.37)


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
        return {name: value for name, value in asdict(self).items() if name in names}


NAMES = ("Ada", "Ben", "Carla", "David", "Elena", "Felix", "Grace", "Hugo", "Ines", "Jonas", "Kira", "Liam")
# Up to which hourly wage at the start, $
JOBS = ((12, "cook"), (15, "cashier"), (19, "driver"), (25, "clerk"), (33, "nurse"), (45, "teacher"), (65, "engineer"))
LAST_JOB = "doctor"


def income_tax(income: np.ndarray, parameters: Parameters) -> np.ndarray:
    """Tax on each monthly ``income`` (agents,), $: each bracket's rate on the part of the income within it."""
    lower = np.array(parameters.bracket_from)
    upper = np.append(lower[1:], np.inf)
    within = np.clip(np.asarray(income)[..., None], lower, upper) - lower
    return within @ np.array(parameters.bracket_rates)


def gini(values: np.ndarray) -> float:
    """Gini coefficient of values >= 0: 0 if all are equal, (n - 1) / n if one has all; 0 if nobody has anything."""
    ordered, n = np.sort(values), len(values)
    total = ordered.sum()
    return float((2 * np.arange(1, n + 1) - n - 1) @ ordered / (n * total)) if total > 0 else 0.0


def taylor_rate(inflation: float, unemployment: float, p: Parameters) -> float:
    """The interest rate a year, at least 0: ``r + t + a (inflation - t) + b (natural unemployment - unemployment)``."""
    rate = p.natural_interest + p.inflation_target + p.inflation_weight * (inflation - p.inflation_target)
    return max(rate + p.unemployment_weight * (p.natural_unemployment - unemployment), 0.0)


@dataclass
class Economy:
    """The workers (arrays of shape (agents,)) and their market between two months. ``seed``: an integer or several;
    the random numbers of a month do not depend on what is decided, so policies meet the same luck."""

    seed: int | tuple[int, ...]
    parameters: Parameters = field(default_factory=Parameters)

    def __post_init__(self):
        p, self.rng = self.parameters, np.random.default_rng(self.seed)
        self.wage = np.maximum(p.floor, p.wage_median * np.exp(p.wage_sigma * self.rng.standard_normal(p.agents)))
        months = p.savings_median * np.exp(p.savings_sigma * self.rng.standard_normal(p.agents))
        self.savings = months * p.hours * self.wage
        self.name, self.age = self.rng.integers(len(NAMES), size=p.agents), self.rng.integers(20, 65, p.agents)
        self.first_wage = self.wage.copy()
        self.price = max(p.floor, float(self.wage.mean()))
        self.stock = 0.0
        self.interest = p.natural_interest + p.inflation_target
        self.prices = [self.price]
        self.history: list[Month] = []
        self.worked = self.rng.random(p.agents) >= p.natural_unemployment
        self.spent = np.zeros(p.agents)
        self._pay()

    def _pay(self) -> None:
        """Income, tax and redistribution of those who worked; savings are not touched."""
        p = self.parameters
        self.earned = np.where(self.worked, p.hours * self.wage, 0.0)
        self.tax = income_tax(self.earned, p)
        self.redistribution = float(self.tax.sum()) / p.agents

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
        pay = self.parameters.hours * self.wage
        return pay - income_tax(pay, self.parameters) + self.redistribution

    def targets(self) -> tuple[np.ndarray, np.ndarray]:
        """The reward's targets of work and consumption, each (agents,)."""
        return targets(self.income(), self.savings, self.price, self.interest)

    def states(self) -> list[State]:
        """What each worker knows now."""
        p = self.parameters
        pay, income = p.hours * self.wage, self.income()
        shared = {
            "redistribution": float(round(self.redistribution)),
            "price": round(self.price, 2),
            "interest": round(self.interest, 3),
            "inflation": round(self.inflation, 3),
            "unemployment": round(self.unemployment, 3),
        }
        own = {"pay": pay, "income": income, "earned": self.earned, "tax": self.tax}
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
            for i in range(p.agents)
        ]

    def step(self, work: np.ndarray, consumption: np.ndarray) -> Month:
        """One month in which each worker works with propensity ``work`` and offers the share ``consumption`` of savings
        and income for goods, both (agents,) in [0, 1]. Raises ValueError for other shapes and values."""
        p, rng = self.parameters, self.rng
        work, consumption = np.asarray(work, float), np.asarray(consumption, float)
        for name, share in (("work", work), ("consumption", consumption)):
            if share.shape != (p.agents,) or not np.all((share >= 0) & (share <= 1)):
                raise ValueError(f"{name} must be {p.agents} numbers in [0, 1]")
        luck, order = rng.random(p.agents), rng.permutation(p.agents)
        wage_luck, price_luck = rng.random(p.agents), rng.random()

        self.worked = luck < work
        self._pay()
        self.savings = self.savings + self.earned - self.tax + self.redistribution
        output = p.hours * p.productivity * float(self.worked.sum())
        supply = self.stock + output

        demand = consumption * self.savings / self.price
        before = np.empty(p.agents)  # goods that those ahead in the random order ask for
        before[order] = np.cumsum(demand[order]) - demand[order]
        bought = np.clip(supply - before, 0.0, demand)
        self.spent = np.minimum(bought * self.price, self.savings)
        self.savings = self.savings - self.spent
        self.stock = max(0.0, supply - float(bought.sum()))

        wanted = float(demand.sum())
        gap = (wanted - supply) / max(wanted, supply, 1e-9)  # in [-1, 1]
        self.wage = np.maximum(p.floor, self.wage * (1 + wage_luck * p.wage_step * gap))
        last_price = self.price
        self.price = max(p.floor, self.price * (1 + price_luck * p.price_step * gap))
        self.prices.append(self.price)

        rate, interest_paid = self.interest, 0.0
        if len(self.prices) % YEAR == 1:  # twelve months are over
            interest_paid = rate * float(self.savings.sum())
            self.savings = self.savings * (1 + rate)
            year = [m.unemployment for m in self.history[1 - YEAR :]] + [self.unemployment]
            self.interest = taylor_rate(self.inflation, float(np.mean(year)), p)

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
            redistributed=self.redistribution * p.agents,
            spending=float(self.spent.sum()),
            interest=rate,
            interest_paid=interest_paid,
            gini=gini(self.savings),
            work=float(work.mean()),
            consumption=float(consumption.mean()),
        )
        self.history.append(month)
        return month


def behave(economy: Economy, rng: np.random.Generator, noise: float = 0.15, random: float = 0.2):
    """Decisions that roll out states, ``(work, consumption)``: the targets with normal noise of standard deviation
    ``noise``, and a share ``random`` of the workers decides anything."""
    decisions = []
    for target in economy.targets():
        noisy = np.clip(target + noise * rng.standard_normal(target.shape), 0, 1)
        decisions.append(np.where(rng.random(target.shape) < random, rng.random(target.shape), noisy))
    return decisions[0], decisions[1]


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
    unemployment = np.array([m.unemployment for m in history])
    inflation = np.array([m.inflation for m in history])
    output = np.array([m.output for m in history])
    made = output[:-1] > 0
    growth = output[1:][made] / output[:-1][made] - 1
    return {
        "gini": history[-1].gini,
        "unemployment": float(unemployment.mean()),
        "inflation": float(np.prod(1 + inflation) ** (YEAR / len(history)) - 1),
        "output": float(output.mean()),
        "work": float(np.mean([m.work for m in history])),
        "consumption": float(np.mean([m.consumption for m in history])),
        "phillips": _correlation(inflation, unemployment),
        "okun": _correlation(growth, np.diff(unemployment)[made]),
    }
