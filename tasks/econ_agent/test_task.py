"""tasks/econ_agent: the reward, the simulated economy, the retrieval, the data, and `simulate` with an engine that
answers by a rule."""

import itertools
import json
import math
import subprocess
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.econ_agent import evaluate, prepare_data, retrieval, simulate
from tasks.econ_agent.reward import BASKET, compute_score, decision_score, targets
from tasks.econ_agent.simulation import (
    FLOOR,
    PRICE_STEP,
    WAGE_STEP,
    Economy,
    Month,
    behave,
    gini,
    income_tax,
    indicators,
    taylor_rate,
)
from tests import stub_evaluate
from tests.helpers import PYTHON, ROOT, exported, make
from verl_tasks import answers, stage

quick = settings(max_examples=200, database=None)
share = st.floats(0, 1)
money = st.floats(0, 1e7)
truths = st.fixed_dictionaries(
    {
        "income": money,
        "savings": money,
        "price": st.floats(0.01, 1e4),
        "interest": st.floats(0, 0.5),
        "inflation": st.floats(-1, 10),
        "unemployment": share,
    }
)
KEYS = {"score", "acc", "format", "work", "consumption", "inflation", "unemployment", "interest"}


# ---- reward


def goals(truth: dict) -> tuple[float, float]:
    return targets(truth["income"], truth["savings"], truth["price"], truth["interest"])


@pytest.mark.parametrize(
    ("income", "savings", "price", "interest", "work", "consumption"),
    [
        (6000, 0, 25, 0.0, 1, 0.5),
        (1000, 0, 25, 0.0, 1, 1),  # cannot pay the essentials
        (0, 0, 25, 0.0, 0, 1),
        (3000, 3000, 25, 0.0, 1, 0.5),
        (1000, 10000, 25, 0.0, 0.1**0.7, math.sqrt(1500 / 11000)),
        (1000, 8000, 25, 0.25, 0.1**0.7, math.sqrt(1500 / 9000)),
    ],
)
def test_targets_by_hand(income, savings, price, interest, work, consumption):
    assert targets(income, savings, price, interest) == pytest.approx((work, consumption))


@quick
@given(truths)
def test_the_targets_score_1_and_are_shares(truth):
    work, consumption = map(float, goals(truth))
    assert 0 <= work <= 1
    assert 0 <= consumption <= 1
    result = compute_score("econ_agent", json.dumps({"work": work, "consumption": consumption}), truth)
    assert result["score"] == pytest.approx(1)
    assert result["acc"] == 1


@quick
@given(truths, share, share, share)
def test_nearer_to_a_target_scores_more_and_nothing_leaves_the_range(truth, work, consumption, part):
    goal = goals(truth)
    score = decision_score(work, consumption, *goal)
    nearer = decision_score(goal[0] + part * (work - goal[0]), consumption, *goal)
    assert -1 - 1e-9 <= score <= nearer + 1e-9 <= 1 + 2e-9


@quick
@given(truths, st.text() | st.dictionaries(st.sampled_from(["work", "consumption", "x"]), st.floats()).map(json.dumps))
def test_any_response_gets_the_same_keys_in_range(truth, response):
    for variant in ("strict", "lenient"):
        result = compute_score("econ_agent", response, truth, variant=variant)
        assert result.keys() == KEYS
        assert -1 <= result["score"] <= 1
        assert result["format"] in (0, 1)
        assert result["score"] == -1 or result["format"] == 1
        assert {name: result[name] for name in ("inflation", "unemployment", "interest")}.items() <= truth.items()


def test_the_economy_is_logged_and_not_rewarded():
    truth = {"income": 3000, "savings": 9000, "price": 25, "interest": 0.03, "inflation": 0.0, "unemployment": 0.0}
    other = truth | {"inflation": 0.5, "unemployment": 0.9}
    answer = '{"work": 0.4, "consumption": 0.4}'
    assert compute_score("econ_agent", answer, truth)["score"] == compute_score("econ_agent", answer, other)["score"]


@pytest.mark.parametrize(
    ("truth", "variant", "message"),
    [
        ({}, "strict", "KeyError"),
        ({"income": 1}, "strict", "KeyError: 'savings'"),
        ("no state", "strict", "TypeError"),
        (
            {"income": 1, "savings": 1, "price": 1, "interest": 0},
            "loose",
            "variant=loose .REWARD.: must be one of strict, lenient",
        ),
    ],
)
def test_a_broken_ground_truth_or_variant_is_named(truth, variant, message):
    with pytest.raises(answers.RewardError, match=message):
        compute_score("econ_agent", "{}", truth, variant=variant)


# ---- simulation


@pytest.mark.parametrize(
    ("income", "tax"),
    [
        (0, 0),
        (100, 10),
        (9700 / 12, 970 / 12),
        (9700 / 12 + 100, 970 / 12 + 12),
        (84200 / 12, (970 + 0.12 * 29775 + 0.22 * 44725) / 12),
        (600000 / 12, (970 + 3573 + 9839.5 + 0.24 * 76525 + 0.32 * 43375 + 0.35 * 306200 + 0.37 * 89700) / 12),
    ],
)
def test_tax_by_hand(income, tax):
    assert income_tax(np.array([income]))[0] == pytest.approx(tax)


@quick
@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=9))
def test_tax_is_progressive_and_takes_no_more_than_the_income(incomes):
    incomes = np.sort(incomes)
    tax = income_tax(incomes)
    assert np.all(tax >= 0)
    assert np.all(tax <= 0.37 * incomes + 1e-6)
    assert np.all(np.diff(incomes - tax) >= -1e-6)


@pytest.mark.parametrize(
    ("inflation", "unemployment", "rate"), [(0.02, 0.04, 0.03), (0.06, 0.04, 0.05), (0.02, 0.10, 0.0), (-0.5, 0.5, 0.0)]
)
def test_taylor_rule_by_hand(inflation, unemployment, rate):
    assert taylor_rate(inflation, unemployment) == pytest.approx(rate)


@pytest.mark.parametrize(
    ("values", "expected"), [([1, 1, 1], 0), ([0, 0, 0], 0), ([0, 0, 0, 4], 0.75), ([1, 3], 0.25), ([3, 1], 0.25)]
)
def test_gini_by_hand(values, expected):
    assert gini(np.array(values, float)) == pytest.approx(expected)


@settings(max_examples=40, database=None)
@given(
    st.integers(0, 10**9), st.integers(1, 12), st.integers(1, 30), st.sampled_from(["behave", "all", "none", "random"])
)
def test_money_and_goods_are_conserved(seed, agents, months, policy):
    economy, rng = Economy(seed, agents), np.random.default_rng(seed)
    for _ in range(months):
        savings, stock, wage, price = economy.savings.copy(), economy.stock, economy.wage.copy(), economy.price
        decisions = {
            "behave": lambda: behave(economy, rng),
            "all": lambda: (np.ones(agents), np.ones(agents)),
            "none": lambda: (np.zeros(agents), np.ones(agents)),
            "random": lambda: (rng.random(agents), rng.random(agents)),
        }[policy]()
        month = economy.step(*decisions)
        assert month.redistributed == pytest.approx(month.tax)
        assert np.all(economy.savings >= 0)
        assert economy.stock >= 0
        before = savings.sum() + month.wages + month.interest_paid
        assert economy.savings.sum() + month.spending == pytest.approx(before, rel=1e-9, abs=1e-6)
        assert economy.stock + month.spending / price == pytest.approx(stock + month.output, rel=1e-9, abs=1e-6)
        assert month.wages == pytest.approx(168 * wage[economy.worked].sum())
        assert month.output == 168 * economy.worked.sum()
        assert abs(month.inflation) <= PRICE_STEP + 1e-12
        assert np.all(np.abs(economy.wage / wage - 1) <= WAGE_STEP + 1e-12)
        assert economy.price >= FLOOR
        assert all(math.isfinite(value) for value in asdict(month).values())


def test_price_and_wages_follow_the_gap():
    for consumption, sign in ((1.0, 1), (0.0, -1)):
        economy = Economy(3)
        wage = economy.wage.copy()
        month = economy.step(np.ones(20), np.full(20, consumption))
        assert np.sign(month.inflation) == sign
        assert np.all(sign * (economy.wage - wage) >= 0)


def test_nobody_buys_when_nobody_works_and_nothing_is_in_stock():
    month = Economy(3).step(np.zeros(20), np.ones(20))
    assert (month.unemployment, month.output, month.spending, month.stock) == (1, 0, 0, 0)


def test_interest_is_paid_once_a_year_at_the_rate_that_the_taylor_rule_set():
    economy = Economy(1)
    paid = [economy.step(np.ones(20), np.full(20, 0.2)).interest_paid for _ in range(24)]
    assert [i for i, value in enumerate(paid, 1) if value > 0] == [12, 24][: sum(value > 0 for value in paid)]
    history = economy.history
    assert history[0].interest == pytest.approx(0.03)
    year = history[11].price / Economy(1).price - 1
    unemployment = np.mean([m.unemployment for m in history[:12]])
    assert history[12].interest == pytest.approx(taylor_rate(year, unemployment))
    before_interest = paid[11] / history[11].interest
    assert before_interest > 0


def rolled_out(seed, months=15):
    economy, rng = Economy(seed), np.random.default_rng(0)
    return [economy.step(*behave(economy, rng)) for _ in range(months)]


def test_the_same_seed_is_the_same_economy():
    assert rolled_out(7) == rolled_out(7) != rolled_out(8)


def test_luck_does_not_depend_on_the_decisions():
    first, second = Economy(5), Economy(5)
    first.step(np.ones(20), np.ones(20))
    second.step(np.zeros(20), np.zeros(20))
    assert first.rng.random() == second.rng.random()


@pytest.mark.parametrize(
    ("work", "consumption"),
    [(np.ones(3), np.ones(20)), (np.full(20, 1.1), np.ones(20)), (np.ones(20), np.full(20, np.nan))],
)
def test_decisions_that_are_no_shares_are_refused(work, consumption):
    with pytest.raises(ValueError, match=r"must be 20 numbers in \[0, 1\]"):
        Economy(0).step(work, consumption)


def test_indicators_by_hand():
    month = rolled_out(0, 1)[0]
    rows = zip([0.1, 0.2, 0.3, 0.2], [0.03, 0.02, 0.01, 0.02], [100, 90, 80, 90], strict=True)
    history = [replace(month, unemployment=u, inflation=i, output=o, gini=0.5) for u, i, o in rows]
    values = indicators(history)
    assert values["phillips"] == pytest.approx(-1)
    growth, change = [-0.1, 80 / 90 - 1, 0.125], [0.1, 0.1, -0.1]
    assert values["okun"] == pytest.approx(np.corrcoef(growth, change)[0, 1])
    assert values["okun"] < -0.9
    assert (values["gini"], values["unemployment"], values["output"]) == pytest.approx((0.5, 0.2, 90))
    assert values["inflation"] == pytest.approx((1.03 * 1.02 * 1.01 * 1.02) ** 3 - 1)
    still = indicators([replace(m, output=0.0, unemployment=1.0) for m in history])
    assert (still["phillips"], still["okun"]) == (None, None)


# ---- retrieval and data


@pytest.fixture(scope="module")
def shots():
    return retrieval.roll_out(42)


@pytest.fixture(scope="module")
def memory(shots):
    return retrieval.Memory(shots)


def generated(count, difficulty="easy", seed=42):
    return list(itertools.islice(prepare_data.generate(SimpleNamespace(SEED=seed, DIFFICULTY=difficulty)), count))


def test_good_is_a_quantile_of_the_score_within_an_employment_status(shots, memory):
    for employed in (True, False):
        scores = [shot.score for shot in shots if shot.state.employed == employed]
        good = [shot.score for shot in memory.good[employed]]
        assert len(scores) > 100
        assert len(good) == pytest.approx(0.25 * len(scores), rel=0.05)
        assert min(good) >= np.quantile(scores, 0.75)
        assert sorted(scores)[-len(good) :] == sorted(good)


def test_the_score_of_a_shot_is_the_reward_of_its_decision(shots):
    for shot in shots[::50]:
        answer = prepare_data.answer(shot.work, shot.consumption)
        assert compute_score("e", answer, shot.state.ground_truth())["score"] == pytest.approx(shot.score, abs=0.02)


def test_the_nearest_is_found_as_by_a_full_search(memory):
    for state in itertools.islice(prepare_data.states(1), 20):
        found = memory.similar(state, 3)

        def distance(shot, state=state):
            return np.linalg.norm((retrieval.features(shot.state) - retrieval.features(state)) / memory.scale)

        assert found == sorted(memory.good[state.employed], key=distance)[:3]
        assert all(shot.state.employed == state.employed for shot in found)


def test_a_state_is_never_its_own_example(memory):
    for shot in memory.good[True][:50]:
        found = memory.similar(shot.state, 3)
        assert len(found) == 3
        assert shot.state not in [other.state for other in found]


@pytest.mark.medium
def test_no_prompt_and_no_simulation_of_the_evaluation_is_in_the_memory(shots):
    known = {shot.state for shot in shots}
    asked = set(itertools.islice(prepare_data.states(42), 600))
    assert not known & asked
    evaluated = set(Economy((42, simulate.STREAM, 0)).states())
    assert not evaluated & (known | asked)
    assert len({retrieval.STREAM, prepare_data.STREAM, simulate.STREAM}) == 3


def test_a_memory_without_one_status_gives_no_examples(shots):
    memory = retrieval.Memory([shot for shot in shots if shot.state.employed][:3])
    unemployed = next(shot.state for shot in shots if not shot.state.employed)
    assert memory.similar(unemployed, 2) == []
    assert len(memory.similar(next(s.state for s in shots[200:] if s.state.employed), 9)) <= 3


@pytest.mark.medium
@pytest.mark.parametrize("difficulty", ["easy", "hard"])
def test_examples(difficulty):
    rows = generated(200, difficulty)
    assert rows[:20] == generated(20, difficulty) != generated(20, difficulty, seed=43)
    assert len({row.prompt for row in rows}) == 200
    for row in rows:
        result = compute_score("econ_agent", row.demonstration, row.ground_truth)
        assert result["score"] > 0.97  # steps of 0.01
        assert f"${row.ground_truth['savings']:.0f}" in row.prompt
        assert f"${row.ground_truth['income']:.0f}" in row.prompt
        assert row.prompt.count("Good: {") == prepare_data.SHOTS[difficulty]
    if difficulty == "hard":
        assert f"you need {BASKET:.0f} goods" in rows[0].prompt


@pytest.mark.medium
def test_the_best_constant_decision_and_copying_the_example_are_far_below_the_targets():
    rows = generated(500)
    copied = [row.prompt.split("Good: ")[1].splitlines()[0] for row in rows]  # the decision of the example
    assert np.mean([compute_score("e", c, r.ground_truth)["score"] for c, r in zip(copied, rows, strict=True)]) < 0.75
    goal = np.array([goals(row.ground_truth) for row in rows]).T
    grid = np.linspace(0, 1, 51)
    best = max((decision_score(w, c, *goal).mean(), w, c) for w in grid for c in grid)
    assert decision_score(*goal, *goal).mean() == pytest.approx(1)
    assert best[0] < 0.5
    assert (decision_score(best[1], best[2], *goal) >= 0.8).mean() < 0.15
    assert goal.std(1).min() > 0.2


# ---- evaluation


def scored(response):
    truth = {"income": 6000, "savings": 0, "price": 25, "interest": 0.0, "inflation": 0.0, "unemployment": 0.0}
    return {"response": response, "reward": compute_score("econ_agent", response, truth)}


def test_metrics_by_hand():
    rows = [scored(f'{{"work": {w}, "consumption": {c}}}') for w, c in ((0, 0), (1, 0.5))]
    rows += [scored('{"work": 2, "consumption": 0}'), scored('so {"work": 1, "consumption": 0}'), scored("words")]
    assert evaluate.metrics(rows) == pytest.approx(
        {
            "json": 0.8,
            "minus_one": 0.8,
            "work_mean": 0.5,
            "work_std": 0.5,
            "consumption_mean": 0.25,
            "consumption_std": 0.25,
        }
    )
    assert evaluate.metrics([scored("words")])["work_std"] == 0


def test_a_collapsed_policy_has_no_deviation():
    values = evaluate.metrics([scored('{"work": 0.7, "consumption": 0.4}')] * 9)
    assert (values["work_std"], values["consumption_std"]) == pytest.approx((0, 0))


def test_all_rule_based_workers_need_no_model():
    history = list(simulate.simulate(simulate.rule, agents=30, months=24, seed=(0, 2, 0)))
    assert [missing for _, missing in history] == [0] * 24
    values = indicators([month for month, _ in history])
    assert 0 < values["unemployment"] < 0.8
    assert 0 < values["gini"] < 1


class Engine:
    """Answers with the texts of a list in turn."""

    def __init__(self, model, *how):
        self.answers = itertools.cycle(json.loads(Path(model).read_text()))

    def generate(self, requests, sampling):
        assert sampling.n == 1
        assert len({r.messages[-1]["content"] for r in requests}) == len(requests)
        for request in reversed(requests):  # not in order, as an engine answers
            assert request.messages[0]["role"] == "system"
            text = next(self.answers)
            yield request, [stub_evaluate.Completion(text or "", stage.TOO_LONG if text is None else "stop", 9, 0.1)]

    def close(self):
        pass


@pytest.fixture
def simulated(tmp_path, monkeypatch):
    """Run `simulate` with models that give the answers of a list in turn; the result and what it wrote."""

    def here(command, **_):
        code, *arguments = command[2:]
        assert code == simulate.CHILD
        simulate.sample_months(*arguments)

    def run(models: dict[str, list], *more: str, **variables: str):
        for label, said in models.items():
            (tmp_path / f"{label}.json").write_text(json.dumps(said))
        given = {"ARTIFACTS": str(tmp_path / "artifacts"), "MONTHS": "6", "AGENTS": "4", **variables}
        arguments = (*(f"{label}={tmp_path}/{label}.json" for label in models), *more)
        monkeypatch.setattr(stage, "run", here)
        monkeypatch.setattr(stub_evaluate.engines, "VLLMEngine", Engine)
        result = stub_evaluate.called(simulate.main, arguments, exported(ROOT / "tasks/econ_agent/train.sh", given))
        files = sorted((tmp_path / "artifacts/eval/econ_agent").glob("*/simulation.json"))
        return result, [json.loads(file.read_text()) for file in files]

    return run


WORKS = '{"work": 1.0, "consumption": 0.3}'


def test_simulate_shows_each_model_beside_the_rule(simulated, tmp_path):
    result, (written,) = simulated({"base": [WORKS, "no idea"], "grpo": [WORKS]})
    assert result.returncode == 0, result.stdout
    values = written["indicators"]
    assert list(values) == ["base", "grpo", "rule"]
    assert (values["base"]["no_decision"], values["grpo"]["no_decision"], values["rule"]["no_decision"]) == (0.5, 0, 0)
    assert values["base"]["unemployment"] == 0.5  # an answer without a decision does not work
    assert values["base"]["work"] == pytest.approx(0.5)
    assert values["base"]["consumption"] == pytest.approx(0.15)
    assert values["grpo"]["unemployment"] == 0
    assert values["grpo"]["okun"] is None
    assert values["rule"] == {
        **indicators([m for m, _ in simulate.simulate(simulate.rule, 4, 6, (42, simulate.STREAM, 0))]),
        "no_decision": 0,
    }
    assert [len(months) for months in written["months"].values()] == [6, 6, 6]
    Month(**written["months"]["base"][0])
    (table,) = tmp_path.glob("artifacts/eval/econ_agent/*/simulation.md")
    assert "| okun | " in table.read_text()
    for name in ("no_decision", "phillips", "gini", "base", "grpo", "rule"):
        assert name in result.stdout
    assert not list(Path(table.parent).glob(".*"))


@pytest.mark.medium
def test_lenient_reads_a_decision_within_text(simulated):
    _, (strict,) = simulated({"m": [f"So: {WORKS}"]})
    _, results = simulated({"m": [f"So: {WORKS}"]}, REWARD="lenient")
    assert strict["indicators"]["m"]["no_decision"] == 1
    assert [r["indicators"]["m"]["no_decision"] for r in results if r["settings"]["REWARD"] == "lenient"] == [0]


@pytest.mark.medium
@pytest.mark.parametrize(
    ("models", "more", "variables", "message"),
    [
        ({"m": [None]}, [], {}, "a prompt is longer than MAX_PROMPT_LENGTH"),
        ({"m": [WORKS]}, ["model"], {}, "error: simulate: model: give each model as LABEL=MODEL"),
        ({"m": [WORKS]}, ["../x=y"], {}, "error: simulate: ../x: a label has letters"),
        ({"rule": [WORKS]}, [], {}, "error: simulate: rule: a label has letters"),
        ({"m": [WORKS]}, [], {"MONTHS": "0"}, "error: MONTHS=0: must be greater than 0"),
        ({"m": [WORKS]}, [], {"AGENTS": "many"}, "error: AGENTS=many: must be a whole number"),
    ],
)
def test_a_simulation_that_cannot_run_gives_an_error(simulated, models, more, variables, message):
    result, written = simulated(models, *more, **variables)
    assert result.returncode == 1
    assert message in result.stdout
    assert written == []


def test_the_process_that_samples_reads_its_models(tmp_path):
    command = [PYTHON, "-c", simulate.CHILD, str(tmp_path), "model"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 1 and "SettingsError: simulate: model: give each model as" in result.stderr


def test_another_task_has_no_simulate():
    result = make("simulate", TASK="countdown", STACK="cpu", MODEL="some/model", ARTIFACTS="/nonexistent")
    assert result.returncode != 0
    assert "error: TASK=countdown: has no simulate.py; `make simulate` is for econ_agent" in result.stdout
