"""Health rules: on the metrics of real trainings (docs/results), and on such as each rule is about."""

import math
import time
from dataclasses import replace

import pytest

from tests.results import metrics
from tests.test_settings import VALUES
from verl_tasks.runs.health import Finding, Health, newest_by_rule, no_signal
from verl_tasks.runs.run import read_metrics
from verl_tasks.settings import Settings, load_settings
from verl_tasks.verl_plugins.answers import figures

SETTINGS = replace(load_settings(VALUES), MAX_RESPONSE_LENGTH=64, KL_COEF=0.01)
FINE = {
    "actor/entropy": 0.3,
    "actor/grad_norm": 1.0,
    "critic/score/mean": 0.4,
    "critic/score/min": 0.0,
    "critic/score/max": 1.0,
    "critic/advantages/min": -1.5,
    "critic/advantages/max": 1.5,
    "response_length/clip_ratio": 0.02,
    "response_length/max": 50.0,
}


GOOD = [f"h200-{name}" for name in ("countdown-grpo", "gsm8k-grpo", "tool_calling-grpo", "countdown-dpo")]


# What unlearned its task, what learned to guess without a thought, and what was soon sure of wrong answers.
BAD = {"h100-char_count": {"fall"}, "h200-countdown-1.5b-guess": {"short", "narrow"}}
BAD |= {"h200-countdown-1.5b-right": {"narrow"}}
BAD |= {f"h200-countdown-1.5b-{rate}": {"short", "narrow"} for rate in ("5e-6", "2e-6")}


def real(name: str, machine: str = "h200") -> dict[int, dict]:
    return metrics()[f"{machine}-{name}"]


def findings(metrics: dict[int, dict], s: Settings) -> list[Finding]:
    return Health(s).all(metrics)


def found(changes: dict[int, dict], steps: int = 20, **settings) -> list[tuple[str, int]]:
    metrics = {step: FINE | changes.get(step, {}) for step in range(1, steps + 1)}
    return [(finding.rule, finding.step) for finding in findings(metrics, replace(SETTINGS, **settings))]


# ---- real trainings


def test_a_good_training_gets_no_finding_and_a_bad_one_those_that_it_deserves():
    """With less RAM than the hosts had: those of two GPUs have 256 GB. Trainings may end sure of their answers, and
    with every group right."""
    late = {"collapse", "spike", "zero_variance"}
    for name, rows in metrics().items():
        if "step-" in name or "3b-" in name:  # benchmarks of few steps, without reward
            continue
        limited = {step: row | {"perf/cpu_memory_limit_gb": 256.0} for step, row in rows.items()}
        fired = {each.rule for each in findings(limited, replace(SETTINGS, STEPS=max(rows)))}
        allowed = set() if name in GOOD else late
        assert fired - allowed == BAD.get(name, set()), name
    assert metrics().keys() >= {*GOOD, *BAD}
    random = real("3b-ours")
    assert [each.step for each in findings(random, SETTINGS) if each.rule == "mismatch"] == [max(random)]


def test_the_longest_of_a_batch_are_not_cut_off_below_the_limit():
    """verl pads to the longest of the batch, and its clip_ratio counts those: here 63 % have all of 19 tokens."""
    metrics = real("econ_agent-grpo")
    assert metrics[11]["response_length/clip_ratio"] > 0.6 and metrics[11]["response_length/max"] == 19
    assert findings(metrics, SETTINGS) == []
    cut_off = findings(metrics, replace(SETTINGS, MAX_RESPONSE_LENGTH=19))
    assert [(finding.rule, finding.step) for finding in cut_off] == [("truncation", 12)]  # 9, 11 and 12 are above


def test_a_benchmark_without_reward_is_ill_in_three_ways():
    metrics = real("step-ours")
    ill = findings(metrics, replace(SETTINGS, MAX_RESPONSE_LENGTH=256, INIT="base"))
    by_rule = {rule: [finding.step for finding in ill if finding.rule == rule] for rule in {f.rule for f in ill}}
    steps = sorted(metrics)
    assert by_rule == {"zero_variance": steps, "truncation": steps[1:], "no_reward": steps[2:]}
    assert [finding.step for finding in newest_by_rule(ill)] == [steps[-1]] * 3
    for finding, variable in zip(newest_by_rule(ill), ("ROLLOUT_N", "MAX_RESPONSE_LENGTH=256", "INIT"), strict=True):
        assert variable in finding.text and "\n" not in finding.text


# ---- each rule, at its edge


def test_metrics_that_are_fine_or_missing_are_no_finding():
    assert found({}) == [] == findings({}, SETTINGS) == findings({1: {}, 2: {"timing_s/step": 1.0}}, SETTINGS)


@pytest.mark.parametrize(
    ("rule", "ill", "fine"),
    [
        ("nan", {"actor/grad_norm": float("nan")}, {"training/rollout_actor_probs_pearson_corr": float("nan")}),
        ("nan", {"critic/score/mean": float("inf")}, {"critic/score/mean": 1.0}),
        ("nan", {"train/loss": float("nan")}, {"train/loss": 0.0}),
        ("collapse", {"actor/entropy": 0.0099}, {"actor/entropy": 0.0101}),
        ("kl", {"actor/kl_loss": 0.11}, {"actor/kl_loss": 0.09}),
        ("kl", {"actor/reward_kl_penalty": 0.11}, {"actor/reward_kl_penalty": 0.09}),
        ("spike", {"actor/grad_norm": 5.1}, {"actor/grad_norm": 4.9}),
        (
            "zero_variance",
            {"critic/advantages/min": 0.0, "critic/advantages/max": 0.0},
            {"critic/advantages/min": 0.0, "critic/advantages/max": 0.1},
        ),
    ],
)
def test_a_rule_fires_at_its_step_and_not_short_of_it(rule, ill, fine):
    assert found({12: ill}) == [(rule, 12)]
    assert found({12: fine}) == []


def test_a_policy_that_is_right_nearly_always_may_be_sure_of_it():
    """Its samples are alike because they are right: no collapse, which ABORT_ON would end."""
    sure = {"actor/entropy": 0.004}
    assert found({12: sure | {"answers/right": 0.96}}) == []
    assert found({12: sure | {"answers/right": 0.94}}) == [("collapse", 12)] == found({12: sure})
    same = {"critic/advantages/min": 0.0, "critic/advantages/max": 0.0}
    told = "100.0% of the samples are right: nothing is left to learn; take harder problems"
    for right, text in ((1.0, told), (0.5, "which teaches nothing; raise ROLLOUT_N or ")):
        *_, finding = findings({12: sure | same | {"answers/right": right}}, SETTINGS)
        assert finding.rule == "zero_variance" and text in finding.text
    assert found({12: sure | same | {"answers/right": 1.0}}) == [("zero_variance", 12)]


def test_a_step_without_a_counted_token_has_means_of_none():
    means = {"critic/advantages/mean": float("nan"), "response_length/max": 64.0}
    masked = replace(SETTINGS, TRUNCATED="masked")
    rules = [
        {finding.rule for finding in findings({1: means | {"response_length/clip_ratio": share}}, settings)}
        for share, settings in ((1.0, masked), (0.9, masked), (1.0, SETTINGS))
    ]
    assert rules == [set(), {"nan"}, {"nan"}]


def test_a_step_that_trained_nothing_has_not_diverged():
    """Episodes that all ended by MAX_TURNS (masked), or a rollout that ROLLOUT_CORRECTION=sequence rejected whole."""
    none = float("nan")
    idle = {"critic/advantages/mean": none, "critic/returns/max": none, "actor/entropy": none, "actor/grad_norm": 0.0}
    idle |= {"critic/score/mean": 0.1, "response_length/clip_ratio": 0.02}
    assert found({1: idle}) == []
    for name, value in (("actor/grad_norm", 0.1), ("critic/score/mean", none), ("critic/vf_loss", none)):
        assert ("nan", 1) in found({1: idle | {name: value}})


def test_truncation_counts_when_it_stays():
    cut, short = ({"response_length/clip_ratio": share, "response_length/max": 64.0} for share in (0.31, 0.29))
    assert found({1: cut}) == [] == found({11: cut, 12: short, 13: cut})
    assert found({11: cut, 12: cut}) == [("truncation", 12)]


def test_an_episodes_cuts_are_named_by_their_own_variables():
    cuts = {"episode/turns": 3.0, "episode/cut_turn_length": 0.25, "episode/cut_length": 0.06}
    rows = {step: FINE | cuts | {"response_length/clip_ratio": 0.0} for step in (1, 2)}
    (one,) = findings(rows, replace(SETTINGS, MAX_TURN_LENGTH=48))
    assert (one.rule, one.step) == ("truncation", 2)
    assert "25% by MAX_TURN_LENGTH=48 (turn_length), 6% by MAX_RESPONSE_LENGTH=64 (length); raise MAX_TURN_" in one.text
    # The longest of a batch of episodes says nothing about their limits.
    long = {"episode/turns": 3.0, "response_length/clip_ratio": 0.9, "response_length/max": 64.0}
    assert findings({1: FINE | long, 2: FINE | long}, SETTINGS) == []


def samples(**counts) -> tuple[list[dict], list[int], list[bool]]:
    """``no_signal``'s arguments: so many samples of each kind, four of a prompt."""
    kinds = {"right": (1.0, 1.0, False), "wrong": (0.0, 1.0, False), "bad": (0.0, 0.0, False), "cut": (0.0, 0.0, True)}
    kinds["long"] = (1.0, 1.0, True)  # right, and cut off after its answer
    found = [kinds[kind] for kind, count in counts.items() for _ in range(count)]
    scores = [{"score": acc, "acc": acc, "format": form} for acc, form, _ in found]
    return scores, [place // 4 for place in range(len(found))], [off for *_, off in found]


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        (
            {"wrong": 40, "cut": 24},
            "none of 64 samples is right (24 cut off, 40 wrong): RL has nothing to learn from; ",
        ),
        ({"wrong": 10, "cut": 54}, "raise SFT_STEPS=16, or raise MAX_RESPONSE_LENGTH"),
        ({"wrong": 10, "bad": 54}, "raise SFT_STEPS=16, or SFT_LR=0.0001"),
        ({"wrong": 64}, "raise SFT_STEPS=16, or take DIFFICULTY=easy"),
        (
            {"right": 64},
            "have one reward (all right): RL has nothing to learn from; raise TEMPERATURE or ROLLOUT_N, or take",
        ),
        (
            {"long": 64},
            "(all right): RL has nothing to learn from; raise TEMPERATURE or ROLLOUT_N, or take harder problems",
        ),
        ({"long": 40, "wrong": 24}, "one reward (24 wrong): "),
        ({"right": 4, "wrong": 60}, "all 16 groups have one reward"),
        ({"right": 1, "wrong": 63}, ""),
    ],
)
def test_a_warm_up_that_cannot_work_is_counted(counts, said):
    s = replace(SETTINGS, SFT_STEPS=16, SFT_LR=1e-4, DIFFICULTY="hard", ROLLOUT_N=4, METHOD="grpo")
    found = no_signal(*samples(**counts), s)
    assert said in found and bool(found) == bool(said)


def test_wrong_answers_of_different_scores_are_something_to_learn_from():
    """F1 as the score, the exact set as right."""
    scores, groups, cut = samples(wrong=64)
    graded = [each | {"score": place % 5 / 5} for place, each in enumerate(scores)]
    said = no_signal(graded, groups, cut, SETTINGS)
    assert "none of 64 samples is right (64 wrong): RL has partial credit alone to learn from; raise SFT_STEPS" in said


def test_the_cuts_of_episodes_are_named_by_their_own_variable():
    scores, groups, cut = samples(wrong=10, cut=54)
    scores = [{**each, "cut_turns": float(off)} for each, off in zip(scores, cut, strict=True)]
    assert "or raise MAX_TURNS" in no_signal(scores, groups, cut, SETTINGS)


def test_a_form_that_is_right_in_part_was_read():
    """As `answers/readable` and the evaluation count it."""
    scores, groups, cut = samples(wrong=64)
    in_part = [each | {"format": 0.5} for each in scores]
    assert "(64 wrong)" in no_signal(in_part, groups, cut, SETTINGS)
    assert figures(groups, ["x"] * 64, in_part)["answers/readable"] == 1


def test_a_spike_needs_steps_to_be_held_against():
    assert found({5: {"actor/grad_norm": 100.0}}) == [] and found({6: {"actor/grad_norm": 100.0}}) == [("spike", 6)]
    silent = {step: {"actor/grad_norm": 0.0} for step in range(1, 19)}
    assert found(silent) == []  # the first gradients after none are no spike


def test_kl_below_the_band_counts_when_it_stays_there():
    low = {step: {"actor/kl_loss": 0.00005} for step in range(1, 21)}
    assert found(low) == [("kl", step) for step in range(10, 21)]
    assert found(low | {8: {"actor/kl_loss": 0.001}}) == [("kl", step) for step in (18, 19, 20)]


def test_a_policy_that_waits_for_its_critic_is_not_below_the_band():
    critic_alone = {step: {"actor/reward_kl_penalty": 0.0} for step in range(1, 11)}  # CRITIC_WARMUP=10
    trained = {step: {"actor/reward_kl_penalty": 0.0, "actor/grad_norm": 1.0} for step in range(11, 21)}
    assert [each.step for each in findings(critic_alone | trained, SETTINGS) if each.rule == "kl"] == [20]


def test_a_mismatch_counts_when_it_lasts():
    high = {step: {"rollout_corr/k3_kl": 0.011} for step in (4, 5, 6, 7)}
    assert found(high) == [("mismatch", 6), ("mismatch", 7)]
    assert found(high | {6: {"rollout_corr/k3_kl": 0.009}}) == [] == found(high | {6: {}})


def test_a_mismatch_names_the_correction_that_is_left():
    high = {step: {"rollout_corr/k3_kl": 0.5} for step in (1, 2, 3)}
    for chosen, said in (("none", "set ROLLOUT_CORRECTION=token"), ("token", "try ROLLOUT_CORRECTION=sequence")):
        (finding,) = findings(high, replace(SETTINGS, ROLLOUT_CORRECTION=chosen))
        assert said in finding.text and "another policy" in finding.text and "\n" not in finding.text
    (finding,) = findings(high, replace(SETTINGS, STACK="a100", ROLLOUT_CORRECTION="token"))
    assert "ROLLOUT_CORRECTION cannot correct this" in finding.text  # its verl cannot mask sequences


def test_no_reward_counts_when_it_lasts_and_the_same_score_for_all_is_not_none():
    none = {"critic/score/min": 0.0, "critic/score/max": 0.0, "critic/score/mean": 0.0}
    assert found({4: none, 5: none}) == [] and found({4: none, 5: none, 6: none})[0] == ("no_reward", 6)
    all_right = {"critic/score/min": 1.0, "critic/score/max": 1.0, "critic/score/mean": 1.0}
    assert found({step: all_right for step in (4, 5, 6)}) == []
    right = none | {"answers/right": 1.0}  # -1 is for a wrong answer
    assert found({step: right for step in range(1, 21)}) == []


@pytest.mark.parametrize("method", ["grpo", "ppo"])
@pytest.mark.parametrize(
    ("score", "right", "said"),
    [
        (-1.0, 0.0, "every sample scored -1 for 3 steps, and 0.0% are right: the task is too hard"),
        (-1.0, None, "every sample scored -1 for 3 steps: the task is too hard"),
        (0.3, 0.0, "every sample scored 0.3 for 3 steps, and 0.0% are right: the task is too hard"),
        (0.0, 0.25, "every sample scored 0 for 3 steps, and 25.0% are right: right answers earn no more than"),
        (1.0, 0.25, "every sample scored 1 for 3 steps, and 25.0% are right: right answers earn no more than"),
        (1.0, 0.99, ""),  # solved
        (10.0, None, ""),  # a reward above 1, without `acc`
    ],
)
def test_the_same_score_for_right_and_wrong_is_no_reward(score, right, said, method):
    """A constant -1 had passed without a word where there are no groups."""
    row = {f"critic/score/{end}": score for end in ("min", "max", "mean")}
    row |= {} if right is None else {"answers/right": right}
    told = newest_by_rule(findings({step: row for step in (1, 2, 3)}, replace(SETTINGS, METHOD=method)))
    texts = [each.text for each in told if each.rule == "no_reward"]
    assert texts[0].startswith(said) if said else not texts


def test_a_policy_that_unlearns_falls():
    score = {step: {"critic/score/mean": value} for step, value in enumerate((0.4, 0.3, 0.09, 0.09, 0.11, 0.09), 1)}
    assert found(score) == []
    assert found(score | {step: {"critic/score/mean": 0.09} for step in (5, 6)}) == [("fall", 5), ("fall", 6)]


def test_the_luck_of_a_few_prompts_is_no_best_step():
    """Eight prompts a step, each right in all samples or in none, one of ten: steps differ by chance alone."""
    lucky = [0.125, 0.0, 0.25, 0.375, 0.0, 0.125, 0.0, 0.0, 0.0, 0.125, 0.25, 0.0]
    assert [rule for rule, _ in found(curve("critic/score/mean", lucky), 12, TRAIN_BATCH_SIZE=8)] == []
    lost = curve("critic/score/mean", [0.6, 0.5, 0.6, 0.0, 0.0, 0.0])
    assert found(lost, 6, TRAIN_BATCH_SIZE=8) == [("fall", 6)]
    above_1 = curve("critic/score/mean", [4.0, 4.0, 4.0, 0.1, 0.1, 0.1], "critic/score/max", [math.nan] * 6)
    assert ("fall", 6) in found(above_1, 6)  # a highest score that is not known


def test_a_reward_that_may_be_negative_falls_from_its_worst_score_on():
    """Near 0 a quarter of the best mean would be noise."""
    near, lost = [-0.5, -0.4, 0.001, -0.1, -0.05, -0.02], [-0.5, -0.1, -0.2, -0.9, -0.9, -0.9]
    for values, fired in ((near, []), (lost, [("fall", 6)])):
        assert found(curve("critic/score/mean", values, "critic/score/min", [-1.0] * 6), 6) == fired


def test_a_critics_advantages_and_a_sample_alone_have_no_groups():
    zero = {3: {"critic/advantages/min": 0.0, "critic/advantages/max": 0.0}}
    assert found(zero, METHOD="ppo") == [] == found(zero, ROLLOUT_N=1)


def test_a_run_from_a_warm_up_is_told_to_make_it_longer_and_not_to_have_one():
    none = {"critic/score/min": 0.0, "critic/score/max": 0.0}
    cut = {"response_length/clip_ratio": 0.5, "response_length/max": 64}
    for own in (none | cut, none | {"episode/turns": 1.0, "episode/cut_turns": 1.0}):
        steps = {step: FINE | own for step in (1, 2, 3)}
        for init, warm_up in (("base", "warm up with INIT=sft"), ("sft", "warm up longer than SFT_STEPS=")):
            told = newest_by_rule(findings(steps, replace(SETTINGS, INIT=init, DIFFICULTY="easy")))
            texts = [each.text for each in told if each.rule in ("truncation", "no_reward")]
            assert len(texts) == 2 and all(warm_up in text for text in texts) and "DIFFICULTY" not in " ".join(texts)


def test_distillation_needs_no_reward():
    none = {f"critic/{what}/{end}": 0.0 for what in ("score", "advantages") for end in ("min", "max", "mean")}
    steps = {step: none for step in range(4, 8)}
    assert {rule for rule, _ in found(steps)} == {"zero_variance", "no_reward", "fall"}
    assert found(steps, METHOD="distill") == []


def test_the_null_that_verl_writes_for_nan_is_found(tmp_path):
    (tmp_path / "metrics").mkdir()
    (tmp_path / "metrics/000.jsonl").write_text('{"step": 1, "data": {"actor/grad_norm": null}}\n')
    (finding,) = findings(read_metrics(tmp_path), SETTINGS)
    assert (finding.rule, finding.step) == ("nan", 1) and "actor/grad_norm" in finding.text


def test_ten_thousand_steps_are_looked_through_at_once():
    """The progress line does so at each step of a training."""
    before = time.process_time()
    findings({step: FINE for step in range(1, 10_001)}, SETTINGS)
    assert time.process_time() - before < 4


GROWS = range(20, 48, 2)  # fourteen steps


def memory(values, key: str = "actor/perf/cpu_memory_used_gb", limit: str = "perf/cpu_memory_limit_gb", steps=1000):
    """Findings of a training of ``steps`` whose memory was ``values`` of 100 GiB."""
    metrics = {step: {key: float(value), limit: 100.0} for step, value in enumerate(values, 1)}
    return findings(metrics, replace(SETTINGS, STEPS=steps))


def test_memory_that_grows_to_its_limit_names_the_step_at_which_it_ends():
    ill = memory(GROWS)
    assert [(finding.rule, finding.step) for finding in ill] == [("memory", 12), ("memory", 13), ("memory", 14)]
    assert "RAM grows by 2 GiB a step, to 46 of 100 GiB: it is used up at step 41 of 1000" in ill[-1].text
    gpu = memory(GROWS, "actor/perf/max_memory_reserved_gb", "perf/gpu_memory_limit_gb")
    assert "GPU memory grows" in str(gpu[-1])
    assert memory(GROWS, "perf/cpu_memory_used_gb")  # verl 0.6.1's name


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_memory_that_is_no_number_is_unknown(value):
    assert memory([*GROWS[:11], value], "perf/cpu_memory_used_gb") == []
    grows = {step: {"perf/cpu_memory_used_gb": float(step), "perf/cpu_memory_limit_gb": value} for step in GROWS}
    assert findings(grows, replace(SETTINGS, STEPS=1000)) == []


def test_memory_that_does_not_grow_step_by_step_to_its_limit_is_fine():
    once, up_and_down = [20] * 7 + [60] * 7, [20, 30, 22, 32, 24, 34, 26, 36, 28, 38, 30, 40, 32]
    slowly = [20 + step / 100 for step in range(20)]
    for values in (range(20, 42, 2), once, up_and_down, range(60, 20, -2), slowly):  # the first: eleven steps
        assert memory(values, steps=60) == []
    assert memory(GROWS, steps=41) == [] == memory(GROWS, limit="unknown")


def curve(key: str, values: list[float], other: str = "", more: list[float] = ()) -> dict[int, dict]:
    found = {step: {key: value} for step, value in enumerate(values, 1)}
    for step, value in enumerate(more, 1):
        found[step][other] = value
    return found


def test_failed_programs_are_told():
    assert found({1: {"episode/failed": 0.25}, 2: {"episode/failed": 0.0}}) == [("failed", 1)]
    (few,) = findings({1: FINE | {"episode/failed": 1 / 512}}, SETTINGS)
    assert few.text.startswith("0.2% of the episodes")


def test_a_reward_that_rises_without_right_answers_is_hollow():
    """Countdown with 0.3 for the right numbers, without a thought: the reward rises, right answers hardly."""
    reward, hollow, sound = [0.09, 0.1, 0.1, 0.2, 0.3, 0.3, 0.3], [0.05] * 7, [0.05, 0.05, 0.05, 0.1, 0.2, 0.2, 0.2]
    rose = found(curve("critic/score/mean", reward, "answers/right", hollow), 7)
    assert rose == [("hollow", 6), ("hollow", 7)]  # after five steps the start and the end overlap
    assert found(curve("critic/score/mean", reward, "answers/right", sound), 7) == []
    assert found(curve("critic/score/mean", reward), 7) == []  # a100: verl does not tell
    assert found(curve("critic/score/mean", [0.1] * 3 + [0.19] * 4, "answers/right", hollow), 7) == []


def test_right_answers_that_fall_while_the_reward_does_not_are_hollow():
    right = [0.5, 0.5, 0.5, 0.4, 0.2, 0.2, 0.2]
    stays = found(curve("critic/score/mean", [0.5] * 7, "answers/right", right), 7)
    assert stays == [("hollow", 6), ("hollow", 7)]
    rows = {step + 1: FINE | {"critic/score/mean": 0.5, "answers/right": each} for step, each in enumerate(right)}
    *_, said = findings(rows, SETTINGS)
    assert said.text.startswith("reward went from 0.5 to 0.5, right answers from 50.0% to 20.0%")
    falls = [0.5 + 0.7 * (each - 0.5) for each in right]  # a wrong answer earns 0.3: the reward falls with them
    assert found(curve("critic/score/mean", falls, "answers/right", right), 7) == []


def test_a_reward_of_more_than_1_and_a_start_that_is_nearly_always_right_are_not_hollow():
    """With 10 for a right answer 0.4 more right answers earn 4. From 0.96 right on, form is what is left to learn."""
    reward, right = [1.0] * 3 + [5.0] * 3, [0.1] * 3 + [0.5] * 3
    ten = {step: row | {"critic/score/max": 10.0} for step, row in curve("critic/score/mean", reward).items()}
    sound = {step: row | {"answers/right": right[step - 1]} for step, row in ten.items()}
    assert found(sound, 6) == []
    assert found({step: row | {"answers/right": 0.1} for step, row in ten.items()}, 6) == [("hollow", 6)]
    form = [0.6] * 3 + [0.98] * 3
    assert found(curve("critic/score/mean", form, "answers/right", [0.96] * 3 + [0.98] * 3), 6) == []
    assert found(curve("critic/score/mean", form, "answers/right", [0.5] * 3 + [0.52] * 3), 6) == [("hollow", 6)]


def test_a_reward_below_0_is_not_hollow_as_its_right_answers_rise():
    """With -10 for a wrong answer 0.15 more right answers earn 1.5."""
    row = {"critic/score/min": -10.0, "critic/score/max": 0.0}
    reward = curve("critic/score/mean", [-9.0] * 3 + [-7.5] * 3, "answers/right", [0.1] * 3 + [0.25] * 3)
    assert found({step: each | row for step, each in reward.items()}, 6) == []
    form = {step: each | row | {"answers/right": 0.1} for step, each in reward.items()}
    assert found(form, 6) == [("hollow", 6)]


def test_what_changes_slowly_is_held_against_the_start_of_the_whole_training():
    """In fifty steps each of these changes too little for its rule."""
    slowly = [step / 200 for step in range(201)]
    rules = {
        "short": curve("response_length/mean", [300.0 * 10**-share for share in slowly]),
        "hollow": curve("critic/score/mean", [0.1 + 0.3 * share for share in slowly], "answers/right", [0.05] * 201),
        "fall": curve("critic/score/mean", [0.5 * 8**-share for share in slowly]),
    }
    for rule, rows in rules.items():
        fired = [step for name, step in found(rows, 201) if name == rule]
        assert fired and fired == [*range(fired[0], 202)] and fired[0] > 60, rule


def test_responses_that_fall_to_a_fraction_are_told():
    lengths = [300.0, 280.0, 320.0, 200.0, 99.0, 99.0, 99.0]
    assert found(curve("response_length/mean", lengths), 7) == [("short", 7)]
    assert found(curve("response_length/mean", [*lengths[:4], 99.0, 101.0, 99.0]), 7) == []
    cut_off = curve("response_length/mean", lengths, "response_length/clip_ratio", [0.5] * 3)
    assert found(cut_off, 7) == []  # it learned to end
    right = curve("response_length/mean", lengths, "answers/right", [0.3] * 3 + [0.81] * 4)
    assert found(right, 7) == []  # of a length penalty: it gives up nothing
    guesses = curve("response_length/mean", lengths, "answers/right", [0.3] * 3 + [0.6] * 4)
    assert found(guesses, 7) == [("short", 7)]


def test_an_episode_of_fewer_turns_is_no_shorter_thought():
    lengths, few = [300.0] * 3 + [80.0] * 3, [8.0] * 3 + [2.0] * 3
    assert found(curve("response_length/mean", lengths, "episode/turns", few), 6) == []
    assert found(curve("response_length/mean", lengths, "episode/turns", [2.0] * 6), 6) == [("short", 6)]
    cut_off = curve("response_length/mean", lengths, "episode/cut_turns", [0.6] * 3 + [0.0] * 3)
    learned_to_end = found({step: row | {"episode/turns": 2.0} for step, row in cut_off.items()}, 6)
    assert {rule for rule, _ in learned_to_end} == {"truncation"}


def test_a_policy_that_is_sure_of_wrong_answers_is_told():
    entropies = [0.40, 0.38, 0.42, 0.1, 0.039, 0.039, 0.039]
    assert found(curve("actor/entropy", entropies, "answers/right", [0.7] * 7), 7) == [("narrow", 7)]
    assert found(curve("actor/entropy", [*entropies[:4], 0.039, 0.041, 0.039], "answers/right", [0.7] * 7), 7) == []
    assert found(curve("actor/entropy", entropies, "answers/right", [0.9] * 7), 7) == []  # it may be sure
    assert found(curve("actor/entropy", entropies), 7) == []  # of a reward without right answers nothing is known


def test_one_wrong_response_for_all_samples_is_told():
    assert found(curve("answers/alike", [0.6, 0.6, 0.4, 0.6, 0.6, 0.51]), 6) == [("alike", 6)]


def test_the_answers_of_a_step_are_measured():
    right, wrong = {"acc": 1.0, "format": 1.0}, {"acc": 0.0, "format": 1.0}
    unread = {"acc": 0.0, "format": 0.0}
    rewards = [wrong, wrong, right, right, unread, wrong, wrong]
    prompts, responses = ["a", "a", "b", "b", "c", "c", "alone"], [(1,), (1,), (2,), (2,), (3,), (4,), (5,)]
    measured = figures(prompts, responses, rewards)
    assert measured == pytest.approx({"answers/right": 2 / 7, "answers/readable": 6 / 7, "answers/alike": 1 / 3})
    assert figures(prompts, responses, [{}] * 7) == {} == figures([], [], [])
