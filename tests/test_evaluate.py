"""Metrics, stored completions and summaries, on values that are known."""

import itertools
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.common.evaluate import paired_difference, score_completions, summarize
from tasks.common.metrics import bootstrap_mean, by_prompt, proportion
from tasks.common.sample import GREEDY, SAMPLED, Completion, read_completions
from tasks.countdown.reward import compute_score

RIGHT, WRONG = "<answer>5*3-4</answer>", "<answer>3+4+5</answer>"
ROW = {
    "data_source": "countdown",
    "reward_model": {"ground_truth": '{"target": 11, "numbers": [3, 4, 5]}'},
    "extra_info": {},
}


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_proportion_is_the_wilson_interval(case):
    k, n = case
    p, z = k / n, 1.959963984540054
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    estimate = proportion(k, n)
    assert estimate.value == p
    assert (estimate.low, estimate.high) == pytest.approx((max(0, centre - half), min(1, centre + half)), abs=1e-9)


def test_bootstrap_agrees_with_the_enumeration_of_all_resamples():
    values = np.array([0.0, 0.1, 0.3, 1.0, 1.0])
    means = [np.mean(resample) for resample in itertools.product(values, repeat=len(values))]
    low, high = np.percentile(means, [2.5, 97.5])
    estimate = bootstrap_mean(values)
    assert estimate.value == pytest.approx(0.48)
    assert (estimate.low, estimate.high) == pytest.approx((low, high), abs=0.03)


def test_the_same_values_give_the_same_interval_and_equal_values_no_width():
    values = np.random.default_rng(0).random(50)
    assert bootstrap_mean(values) == bootstrap_mean(values)
    assert bootstrap_mean(np.ones(9)).low == bootstrap_mean(np.ones(9)).high == 1


def test_by_prompt_takes_the_mean_of_each_prompt():
    assert by_prompt(np.array([1.0, 0.0, 0.5]), np.array([2, 2, 0])).tolist() == [0.5, 0.5]


def fixed_table(right_of_four: list[int]) -> list[dict]:
    """A greedy and four sampled completions a prompt; right_of_four[i] are right, the greedy one if all are."""
    completions = []
    for index, right in enumerate(right_of_four):
        completions.append(Completion(index, GREEDY, 0, RIGHT if right == 4 else WRONG, "stop", 10))
        for sample in range(4):
            reason = "length" if sample == 3 else "stop"
            completions.append(Completion(index, SAMPLED, sample, RIGHT if sample < right else WRONG, reason, 20))
    return score_completions(completions, [ROW] * len(right_of_four), compute_score)


def test_a_model_that_answers_from_a_fixed_table_gets_the_exact_metrics():
    summary = summarize(fixed_table([4, 2, 0, 0]), lambda rows: {"rows": float(len(rows))})
    assert summary["prompts"] == 4
    assert summary["accuracy"]["value"] == 0.25
    assert summary["pass@1"]["value"] == pytest.approx(6 / 16)
    assert summary["score"]["value"] == pytest.approx((6 * 1.0 + 10 * 0.3) / 16)
    assert summary["truncated"] == 0.25 and summary["tokens"] == 20
    assert summary["own"] == {"rows": 16.0}


def test_paired_difference_is_taken_prompt_by_prompt():
    base, model = fixed_table([0, 1, 2, 3] * 8), fixed_table([1, 2, 3, 4] * 8)
    difference = paired_difference(base, model, "acc")
    assert (difference.value, difference.low, difference.high) == pytest.approx((0.25, 0.25, 0.25))


def test_completions_that_were_cut_in_a_line_are_read_up_to_it(tmp_path):
    path = tmp_path / "c.jsonl"
    whole = json.dumps(
        {"index": 0, "mode": GREEDY, "sample": 0, "response": "a\nb", "finish_reason": "stop", "tokens": 2}
    )
    path.write_text(whole + "\n" + whole[:30])
    assert read_completions(path) == [Completion(0, GREEDY, 0, "a\nb", "stop", 2)]
    assert read_completions(tmp_path / "none.jsonl") == []
