"""evaluation/statistics.py against independent computations: formulas written out, and enumerations of all outcomes."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.common.evaluation import statistics
from tasks.common.evaluation.statistics import (
    bootstrap_mean,
    bootstrap_p_value,
    bootstrap_statistics,
    mcnemar,
    pass_at_k,
    proportion,
)

counts = st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n)))


@given(counts)
def test_proportion_is_the_wilson_interval(case):
    k, n = case
    p, z = k / n, 1.959963984540054
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    estimate = proportion(k, n)
    assert estimate.value == p
    assert (estimate.low, estimate.high) == pytest.approx((max(0, centre - half), min(1, centre + half)), abs=1e-9)


@given(st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
@settings(deadline=None)
def test_pass_at_k_is_the_share_of_all_draws_of_k_samples_that_hold_a_right_one(case):
    n, correct, k = case
    samples = [True] * correct + [False] * (n - correct)
    draws = list(itertools.combinations(samples, k))
    assert pass_at_k([n], [correct], k)[0] == pytest.approx(sum(map(any, draws)) / len(draws))


def test_pass_at_k_of_prompts_with_different_numbers_of_samples():
    values = pass_at_k(np.array([4, 200, 16]), np.array([0, 3, 16]), 4)
    assert values == pytest.approx([0, 1 - math.comb(197, 4) / math.comb(200, 4), 1])


@pytest.mark.parametrize(("n", "correct", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0)])
def test_pass_at_k_refuses_what_cannot_be(n, correct, k):
    with pytest.raises(ValueError, match="pass@"):
        pass_at_k([n], [correct], k)


@given(st.integers(0, 12), st.integers(0, 12))
def test_mcnemar_is_the_share_of_sign_patterns_at_least_as_one_sided(gained, lost):
    n = gained + lost
    extreme = abs(gained - lost)
    patterns = sum(math.comb(n, k) for k in range(n + 1) if abs(2 * k - n) >= extreme)
    assert mcnemar(gained, lost) == pytest.approx(patterns / 2**n)


def resampled_means(values) -> np.ndarray:
    return np.array([np.mean(resample) for resample in itertools.product(values, repeat=len(values))])


@given(st.lists(st.sampled_from([-1.0, -0.3, 0.0, 0.1, 0.5, 1.0]), min_size=4, max_size=6))
@settings(max_examples=30, deadline=None)
def test_bootstrap_agrees_with_the_enumeration_of_all_resamples(values):
    means = resampled_means(values)
    estimate = bootstrap_mean(np.array(values))
    assert estimate.value == pytest.approx(np.mean(values))
    # Between two resamples a quantile may fall on either: compare the shares that lie outside.
    assert np.mean(means < estimate.low - 1e-9) <= 0.035 and np.mean(means > estimate.high + 1e-9) <= 0.035
    assert np.mean(means <= estimate.low + 1e-9) >= 0.015 and np.mean(means >= estimate.high - 1e-9) >= 0.015


@given(st.lists(st.sampled_from([-1.0, -0.25, 0.0, 0.5, 1.0]), min_size=4, max_size=6))
@settings(max_examples=30, deadline=None)
def test_bootstrap_p_value_agrees_with_the_enumeration(values):
    if np.ptp(values) == 0:
        return
    means = resampled_means(values)
    exact = min(1.0, 2 * min(np.mean(means <= 0), np.mean(means >= 0)))
    exact = max(exact, 2.0 ** (1 - np.count_nonzero(values)))
    assert bootstrap_p_value(np.array(values)) == pytest.approx(exact, abs=0.03)


def test_bootstrap_p_value_at_its_ends():
    assert bootstrap_p_value(np.zeros(5)) == 1.0
    assert bootstrap_p_value(np.ones(5)) == 1 / 16 and bootstrap_p_value(np.arange(1, 4)) == 1 / 4
    assert bootstrap_p_value(np.ones(50)) == bootstrap_p_value(np.arange(1, 51)) == 2 / (statistics.RESAMPLES + 1)
    assert bootstrap_p_value(np.array([1.0])) == 1.0


def test_the_same_values_give_the_same_interval_and_equal_values_no_width():
    values = np.random.default_rng(0).random(50)
    assert bootstrap_mean(values) == bootstrap_mean(values)
    assert bootstrap_mean(np.ones(9)).low == bootstrap_mean(np.ones(9)).high == 1


def test_bootstrap_covers_the_mean_about_as_often_as_it_says():
    rng = np.random.default_rng(3)
    hits = 0
    for _ in range(200):
        estimate = bootstrap_mean(rng.random(60) ** 2)
        hits += estimate.low <= 1 / 3 <= estimate.high
    assert 0.88 <= hits / 200 <= 0.99


def test_bootstrap_statistics_of_a_mean_agree_with_the_bootstrap_of_the_mean():
    values = np.random.default_rng(1).random(40)
    groups = [[{"x": value}] for value in values]
    resampled = bootstrap_statistics(groups, lambda rows: {"mean": np.mean([row["x"] for row in rows])}, 2000)["mean"]
    estimate = bootstrap_mean(values)
    assert np.percentile(resampled, [2.5, 97.5]) == pytest.approx((estimate.low, estimate.high), abs=0.02)
