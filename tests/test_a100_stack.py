"""The patches of stacks/a100 on the real verl 0.6.1, on the CPU. On a GPU: docs/GPU.md."""

import pytest

from tests.wheels import found_with

pytestmark = pytest.mark.medium


@pytest.fixture(scope="module")
def result(tmp_path_factory) -> dict:
    """What tests/verl_061.py found. All patches load with it: each looks for the lines that it answers."""
    return found_with("verl==0.6.1", "verl_061", tmp_path_factory.mktemp("runs"))


def test_prompts_go_on_in_the_same_order_after_a_resume_in_any_epoch(result):
    assert all(result["resumes"]["own"])
    # What the sampler is for: verl's own repeats the first epoch's order in the third step, of the second epoch.
    assert result["resumes"]["verl"] == [True, True, False, False, False]


@pytest.mark.parametrize("correction", ["none", "token"])
def test_a_step_of_one_update_without_the_pass_is_verls_with_it(correction, result):
    step = result[correction]
    assert step["same weights"]
    assert step["found"] == pytest.approx(step["wanted"], rel=1e-4)
    assert {"actor/entropy", "training/rollout_probs_diff_mean", "rollout_corr/k3_kl"} < set(step["wanted"])


def test_the_tokens_weights_change_the_step(result):
    metrics = result["token"]["found"]
    assert 0 < metrics["rollout_corr/rollout_is_ratio_fraction_high"] < 1
    assert result["token"]["first weights"] != pytest.approx(result["none"]["first weights"], abs=1e-6)


def test_responses_that_are_cut_off_end_no_step(result):
    """TRUNCATED=masked: none, all of one micro-batch, and all of a worker. Workers must have the same metrics."""
    none, half, every = result["cut off"]
    assert none.keys() == half.keys() == every.keys()
    assert half["actor/grad_norm"] > 0 == every["actor/grad_norm"]
    assert every["rollout_corr/kl"] == 0 < half["rollout_corr/kl"] < none["rollout_corr/kl"]


def test_a_whole_step_that_is_cut_off_is_not_measured(result):
    assert result["none counts"] == [{}, {}]


def test_engine_against_trainer_is_of_the_pass_where_there_is_one(result):
    """The update's own are of a policy that moves on, and would replace them; bypass_mode has no others."""
    passed, without_fused_kernels, bypassed = result["drift"]
    assert passed == without_fused_kernels == [] and "rollout_corr/k3_kl" in bypassed


def test_the_metric_of_the_kl_is_of_a_token_whatever_the_loss(result):
    """verl's own is divided by the number of micro-batches too."""
    assert result["kl metric"] == pytest.approx([1] * 5, rel=1e-4)


def test_mini_batches_of_several_gpus_are_of_mixed_lengths(result):
    """What the shuffling is for: verl's own order has all the long responses in the middle of the step."""
    for name, least, most in (("verl", 200, 400), ("own", 0, 60), ("next step", 0, 60)):
        lengths = result["lengths"][name]
        assert len(lengths) == 4 and least < max(lengths) - min(lengths) < most
    assert result["lengths"]["own"] != result["lengths"]["next step"]


def test_the_kl_as_a_loss_has_the_gradient_of_the_kl(result):
    exact, estimated, difference = result["kl"]["low_var_kl+"]
    assert estimated == pytest.approx(exact, abs=1e-12) and difference < 1e-12
    exact, biased, difference = result["kl"]["low_var_kl"]
    assert biased != pytest.approx(exact, abs=0.01) and difference < 1e-12


def test_equal_rewards_teach_nothing(result):
    assert result["equal rewards"] == [False, False]


def test_the_pass_is_made_where_something_wants_it(result):
    assert result["pass"] == [True] * 8


def test_each_worker_is_seeded_before_it_builds_a_model(result):
    assert result["seeds"] == [7, 7, 7]


def test_dr_grpos_loss_is_a_mean_over_responses_however_they_are_split(result):
    assert result["dr_grpo losses"] == pytest.approx([result["dr_grpo wanted"]] * 3, rel=1e-4)


def test_the_metric_of_the_entropy_is_of_a_token_whatever_the_loss(result):
    assert result["entropy"] == pytest.approx(result["entropy wanted"])


def test_a_response_ends_at_its_length_and_not_where_the_window_is_full(result):
    assert result["sampled"] == [256, 112, 452]  # the last as verl asks: 512 - 60


def test_a_trained_models_config_does_not_ask_for_flash_attention(result):
    assert result["exported"] == {"pad_token_id": 5}


def test_the_best_and_the_last_stay(result):
    assert result["trainings"]["best"] == {"kept": [2, 5, 8], "logged": [1, 2, 3, 4, 5, 6, 7, 8]}


def test_patience_ends_the_run_and_more_of_it_continues(result):
    assert result["trainings"]["patience"] == {"kept": [2, 4], "logged": [1, 2, 3, 4]}
    assert result["trainings"]["continued"] == {"kept": [5, 8], "logged": [1, 2, 3, 4, 5, 6, 7, 8]}
