"""Form and skill apart: the lenient reader with every task's own reward, and the parts of a gain."""

import importlib
import json
import re
import time
from dataclasses import replace
from functools import partial

import pytest

from tasks.calculator.environment import Environment
from verl_tasks.evaluation import tables
from verl_tasks.evaluation.lenient import read, readings, reads_right
from verl_tasks.evaluation.rollouts import SAMPLED, Rollout
from verl_tasks.evaluation.statistics import Estimate
from verl_tasks.evaluation.summary import by_prompt, differences, summarize
from verl_tasks.rewards.answers import last_answer

COUNTDOWN = {"target": 17, "numbers": [8, 80, 89]}
CALLS = {"calls": [{"name": "look", "arguments": {"at": 1}}], "tools": []}
NO_CALL = {"calls": [], "tools": []}
WORKER = {"income": 5.0, "savings": 1.0, "price": 1.0, "interest": 0.0, "inflation": 0.0, "unemployment": 0.0}


def rollout(response: str, truth, score, sample=0, index=0, **more) -> Rollout:
    truth = truth if isinstance(truth, str) else json.dumps(truth)
    made = Rollout(index, SAMPLED, sample, response, "stop", 5, 0.1, [], "x", truth, {}, None, **more)
    return read([replace(made, reward=score("x", response, truth))], score, None)[0]


def reward(task: str, **kwargs):
    return partial(importlib.import_module(f"tasks.{task}.reward").compute_score, **kwargs)


RIGHT = [
    ("countdown", COUNTDOWN, "8 - 80 + 89 = 17"),
    ("countdown", COUNTDOWN, "So we get $8 + 89 - 80 = 17$, which is the target."),
    ("countdown", COUNTDOWN, "<think>hm</think><answer>8+89-80"),
    ("countdown", {"target": 40, "numbers": [5, 8]}, "The result is $5 \\times 8 = 40$."),
    ("gsm8k", "18", "She makes 9 * 2 = $18 every day."),
    ("gsm8k", "18", "<think>9 * 2 is \\boxed{18}"),
    ("char_count", "3", "There are 3 r's: the count is 3"),
    ("tool_calling", CALLS, '```json\n{"name": "look", "arguments": {"at": 1}}\n```'),
    ("tool_calling", CALLS, 'I look.\n<tool_call>\n{"name": "look", "arguments": {"at": 1}}\n</tool_call>'),
    ("econ_agent", WORKER, 'I decide: {"work": 1.0, "consumption": 1.0} - good for me.'),
]
WRONG = [
    ("countdown", COUNTDOWN, "<think>8 + 89 - 80 = 17, or is it"),  # a thought that never ends says no answer
    ("countdown", COUNTDOWN, ""),
    ("gsm8k", "18", "#### 18 or 19"),
    ("gsm8k", "18", "It is 18. No, it is 19"),
    ("char_count", "3", "s t r 1 2 3 and more: 4"),
    ("tool_calling", CALLS, '{"name": "look", "arguments": {"at": 2}}'),
    ("tool_calling", NO_CALL, "<tool_call>\n{broken\n</tool_call>"),  # text in its place would be right
    ("tool_calling", NO_CALL, '{"name": "look", "arguments": {"at": 2}} there'),
    ("econ_agent", WORKER, 'I decide: {"work": 0.0, "consumption": 0.0} - good for me.'),
]


@pytest.mark.parametrize(("task", "truth", "response"), RIGHT)
def test_a_right_answer_in_no_form_is_right_for_a_lenient_reader_alone(task, truth, response):
    found = rollout(response, truth, reward(task))
    assert found.reward["acc"] == 0 and found.lenient is True


@pytest.mark.parametrize(("task", "truth", "response"), WRONG)
def test_a_wrong_answer_is_wrong_for_a_lenient_reader_too(task, truth, response):
    found = rollout(response, truth, reward(task))
    assert found.reward["acc"] == 0 and found.lenient is False


def exact(source, text, truth, extra=None):
    said = last_answer(text)
    right = float(said is not None and said.lower() == truth)
    return {"score": right, "acc": right, "format": float(said is not None)}


@pytest.mark.parametrize(
    ("truth", "response", "lenient"),
    [
        # A word with a label and a full stop.
        ("yes", "Yes.", True),
        ("yes", "(yes)", True),
        ("yes", "Think.\nAnswer: **yes**.", True),
        ("yes", "The answer is: yes", True),
        ("yes", "The answer is not yes", False),
        ("yes", "yes or no", False),
        ("yes", "Answer: yes\nNo, it is no.", False),
        # A letter before its option, and a block of code.
        ("b", "The answer is B) Oslo", True),
        ("b", "So it is\n**(B) Oslo, 1905**", True),
        ("b", "Antwort: B.", True),
        ("b", "A) Rome\nB) Oslo\nIt is A) Rome", False),
        ("b", "A) Rome or B) Oslo", False),
        ("a, c", "A, C", True),
        ("select 1\nfrom x", "This query:\n```sql\nSELECT 1\nFROM x\n```", True),
        ("select 1", "```\nSELECT 2\n```\nNo:\n```\nSELECT 1\n```\nThat gives 1.", True),
        ("select 1", "```\nSELECT 1\n```\nNo:\n```\nSELECT 2\n```", False),
        # Several numbers, and Chinese.
        ("83.67 km", "The answer is 83.67 km.", True),
        ("83,67 km", "Antwort: **83,67 km**", True),
        ("14:30", "It leaves at noon.\nAnswer: 14:30", True),
        ("3, 1, 2", "Ranking: 3, 1, 2", True),
        ("3, 1, 2", "Ranking: 3, 2, 1", False),
        ("十五", "九加六，答案是十五。", True),
        ("十五", "答案：十五", True),
        ("十五", "答案：十六。", False),
    ],
)
def test_a_text_is_the_answer_in_any_of_these_forms(truth, response, lenient):
    assert rollout(response, truth, exact).lenient is lenient


@pytest.mark.parametrize("said", ["Ranking: 3, 1, 2", "3 or 4", "<answer>3 4"])
def test_of_several_numbers_the_reward_may_not_choose(said):
    def first_number(source, text, truth, extra=None):
        found = re.match(r"\d+", last_answer(text) or "")
        right = float(found is not None and found[0] == truth)
        return {"score": right, "acc": right, "format": float(found is not None)}

    assert rollout(said, "3", first_number).lenient is False
    assert rollout("The answer is 3.", "3", first_number).lenient is True


def test_what_the_reward_can_read_is_left_to_the_reward():
    said = "8+89-80 = 17\n<answer>8+80+89</answer>"  # readable, and wrong: the other expression does not count
    assert rollout(said, COUNTDOWN, reward("countdown")).lenient is False
    assert rollout("<answer>8+89-80</answer>", COUNTDOWN, reward("countdown")).lenient is True


def test_a_judge_and_an_environment_of_texts_are_not_asked(monkeypatch):
    class OfTexts:
        step_text = None

    score = reward("gsm8k")
    given = [replace(rollout("no", "18", score), lenient=None)]
    assert read(given, None, OfTexts) == given != read(given, score, None)
    monkeypatch.setattr("tasks.gsm8k.reward.judge", importlib.import_module("verl_tasks.rewards.judge"), raising=False)
    assert read(given, score, None) == given


@pytest.mark.parametrize(
    ("last", "finish", "lenient", "readable"),
    [
        ("<answer>5</answer>", "stop", True, 1.0),
        ("it is 5", "stop", True, 0.0),
        ("it is 6", "stop", False, 0.0),
        ("it is 5", "length", False, 0.0),
    ],
)
def test_the_last_message_of_an_episode_is_read_leniently(last, finish, lenient, readable):
    right = last == "<answer>5</answer>"
    call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "2+3"}}\n</tool_call>'
    said = [{"role": "assistant", "content": call}, {"role": "tool", "content": "5"}]
    said.append({"role": "assistant", "content": last})
    scores = {"score": float(right), "acc": float(right), "format": readable}
    prompt = [{"role": "user", "content": "2+3?"}]
    made = Rollout(0, SAMPLED, 0, "", finish, 9, 0.1, prompt, "calculator", '{"answer": "5"}', {}, scores, "", said)
    (found,) = read([made], None, Environment)
    assert found.lenient is lenient


def test_a_reward_that_raises_on_a_reading_is_asked_about_the_others():
    """int("-") raises: all form had counted as skill."""

    def score(source, text, truth, extra=None):
        read = "####" in text
        return {"score": 0.0, "acc": float(read and int(text.split("####")[1]) == int(truth)), "format": float(read)}

    assert rollout("it makes 18", "18", score).lenient is True
    assert rollout("it makes 17", "18", score).lenient is False
    assert rollout('{"half": "an answer"} and so 18', "18", score).lenient is True


def test_hostile_responses_take_no_long_time():
    before = time.process_time()
    for text in (
        "(" * 100_000,
        "<answer>" * 20_000,
        "{" * 100_000,
        "1+" * 50_000,
        "<think>" * 20_000,
        "$`*" * 30_000,
        ": " * 50_000,
        "```\n" * 25_001,
        "A) " * 30_000,
    ):
        assert len(readings(text)) <= 10 and reads_right(text, lambda _: False) is False
    assert time.process_time() - before < 3


# ---- what the reports say


def responses(texts: dict[int, list[str]]) -> list[Rollout]:
    score = reward("gsm8k")
    return [rollout(text, "18", score, n, index) for index, each in texts.items() for n, text in enumerate(each)]


FORM, YES, NO = "it makes 18", "#### 18", "#### 17"


def outcome(start: list[str], end: list[str], prompts: int = 20) -> str:
    before, after = (responses({i: texts for i in range(prompts)}) for texts in (start, end))
    changes = differences(before, after)
    summaries = {"sft": summarize(before), "grpo": summarize(after)}
    return "\n".join(tables.outcome("grpo - sft", summaries, changes))


def test_right_wrong_and_unreadable_are_all_samples():
    table = by_prompt(responses({0: [FORM, YES, NO, "none"], 1: [YES, YES, YES, YES]}))
    assert table.loc[0, ["pass@1", "wrong", "unreadable", "lenient", "format_loss"]].tolist() == [
        0.25,
        0.25,
        0.5,
        0.5,
        0.25,
    ]
    assert table.loc[1, ["pass@1", "wrong", "unreadable", "lenient", "format_loss"]].tolist() == [1, 0, 0, 1, 0]


def test_a_gain_of_form_is_told_from_a_gain_of_skill():
    said = outcome([FORM, NO], [YES, NO])
    assert (
        "pass@1 +0.500" in said and "skill +0.000 [0.000, 0.000] and form +0.500 [0.500, 0.500]: a gain of form" in said
    )
    assert "sft: 0.0% right, 50.0% wrong, 50.0% unreadable; grpo: 50.0% right, 50.0% wrong, 0.0% unreadable" in said
    assert outcome([NO, NO], [YES, NO]).splitlines()[1].endswith("form +0.000 [0.000, 0.000]: a gain of skill")
    assert "a gain of skill and a gain of form" in outcome([NO, FORM], [YES, YES])
    assert "a loss of skill and a gain of form" in outcome([FORM, FORM], [YES, NO])
    assert "neither is clear of chance" in outcome([YES, NO], [YES, NO])


def graded(scores: list[float], right: list[float], prompts: int = 20) -> list[Rollout]:
    rewards = [{"score": score, "acc": acc} for score, acc in zip(scores, right, strict=True)]
    rows = [(index, n, each) for index in range(prompts) for n, each in enumerate(rewards)]
    return [Rollout(i, SAMPLED, n, "", "stop", 5, 0.1, [], "x", "18", {}, reward) for i, n, reward in rows]


@pytest.mark.parametrize(
    ("start", "end", "said"),
    [
        (
            ([0.3, 0.3], [0, 0]),
            ([0.7, 0.7], [0, 0]),
            "score +0.400 [0.400, 0.400]: a gain, without a gain of right answers",
        ),
        (([0.7, 0.0], [0, 0]), ([0.3, 0.0], [0, 0]), "score -0.200 [-0.200, -0.200]: a loss, without a loss of right"),
        (([0.7, 0.0], [0, 0]), ([0.3, 0.0], [1, 0]), "score -0.200 [-0.200, -0.200]: a loss, without a loss of right"),
        (([-1.0, -1.0], [0, 0]), ([1.0, -1.0], [1, 0]), ""),
        (([0.3, 0.3], [0, 0]), ([0.3, 0.3], [0, 0]), ""),
    ],
)
def test_a_score_that_changes_without_right_answers_is_told(start, end, said):
    before, after = graded(*start), graded(*end)
    lines = tables.outcome(
        "grpo - sft", {"sft": summarize(before), "grpo": summarize(after)}, differences(before, after)
    )
    told = [line for line in lines if line.startswith("score")]
    assert told == [] if not said else told[0].startswith(said)


def test_prompts_of_unequal_numbers_of_samples_are_said_to_be_so():
    few, more = graded([1.0, 0.0], [1, 0], 2), graded([1.0, 0.0, 0.0, 0.0], [1, 0, 0, 0], 3)
    assert tables.sizes(summarize([*few, *more[8:]])) == "3 prompts, 2 to 4 samples each"
    assert tables.sizes(summarize(more)) == "3 prompts, 4 samples each"
    raised = [replace(more[0], reward=None, error="boom"), *more[1:]]
    assert tables.sizes(summarize(raised)).startswith("3 prompts, 3 to 4 samples each; 1 completions not counted")


def test_the_title_of_several_models_has_the_errors_of_each():
    """Those of the last model alone had stood there."""
    fine = graded([1.0, 0.0], [1, 0], 3)
    raised = [replace(fine[0], reward=None, error="boom"), *fine[1:]]
    both = {"sft": summarize(raised), "grpo": summarize(fine)}
    assert tables.all_sizes(both) == (
        "sft: 3 prompts, 1 to 2 samples each; 1 completions not counted: the reward raised on them; "
        "grpo: 3 prompts, 2 samples each"
    )
    assert tables.all_sizes({"sft": both["grpo"], "grpo": both["grpo"]}) == "3 prompts, 2 samples each"


def test_no_difference_at_all_is_no_chance():
    assert outcome([YES, NO], [YES, NO]).splitlines()[0].endswith("p 1.0000 (paired bootstrap): no prompt differs")


def test_a_reward_without_format_calls_unreadable_what_a_lenient_reader_alone_finds_right():
    def score(source, text, truth, extra=None):
        right = float("#### 18" in text)
        return {"score": right, "acc": right}

    table = by_prompt([rollout(text, "18", score, n) for n, text in enumerate([FORM, "17"])])
    assert table.loc[0, ["wrong", "unreadable", "format_loss"]].tolist() == [0.5, 0.5, 0.5]


def test_without_a_lenient_reader_nothing_is_said_of_form():
    plain = [replace(each, lenient=None) for each in responses({0: [YES, NO], 1: [NO, NO]})]
    changes = differences(plain, plain)
    assert "lenient" not in changes and tables.parts(changes) == "" and "format_loss" not in summarize(plain)["metrics"]
    assert tables.answers({"base": {"metrics": {}}}) == ""


def test_without_format_and_a_lenient_reader_no_share_is_called_unreadable():
    """0.0% had been shown, where nothing says which wrong answers could be read."""
    plain = graded([1.0, 0.0], [1, 0])
    assert not {"wrong", "unreadable"} & {*by_prompt(plain), *differences(plain, plain)}
    assert tables.answers({"base": summarize(plain)}) == "base: 50.0% right"
    read_all = [replace(each, reward=each.reward | {"format": 1.0}) for each in plain]
    assert tables.answers({"base": summarize(read_all)}) == "base: 50.0% right, 50.0% wrong, 0.0% unreadable"


def test_a_difference_that_is_nearly_0_has_no_sign():
    for value in (-0.0004, -1e-17, 0.0004):
        assert Estimate(value, -0.0004, 0.0004).signed() == "+0.000 [0.000, 0.000]"
    assert Estimate(-20.04, -30.04, -0.04).signed() == "-20.0 [-30.0, 0.0]"


def test_episodes_that_ran_out_of_time_are_named_beside_a_gain():
    """A slow machine ends episodes of one model and not of the other: no gain of the policy."""
    shares = {"base": 0.6, "sft": 0.05, "grpo": 0.0}
    summaries = {label: {"metrics": {"timeout": {"value": share}}} for label, share in shares.items()}
    assert tables.outcome("grpo - sft", summaries, None) == [
        "warning: 60% of base's episodes ran out of time: the difference may be the machine's; raise STEP_SECONDS"
    ]
    del summaries["base"]
    assert tables.outcome("grpo - sft", summaries, None) == []
