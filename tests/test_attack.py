"""`make attack`: planted holes are found, shipped rewards give no false alarm; what guesses earn (incentive.py)."""

import functools
import importlib
import json
import os
import random
import re
import time
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest

import tasks.countdown.reward
from tasks.calculator import prepare_data as calculator
from tasks.calculator.environment import Environment
from tasks.countdown import prepare_data as countdown_data
from tasks.countdown.reward import compute_score
from tests.helpers import SINGLE_TURN, copy_of_checkout, make, task_settings
from tests.test_settings import VALUES
from verl_tasks.evaluation import attack, incentive
from verl_tasks.evaluation.exploits import THINKING, TURN, Form, Row, by_turns, library, shrunk, with_values
from verl_tasks.evaluation.sample import reward_mark
from verl_tasks.files import write_json
from verl_tasks.guarded import Guarded, Result, asks_judge
from verl_tasks.rewards import gym
from verl_tasks.rewards.answers import (
    JudgeError,
    RewardError,
    after_thinking,
    last_answer,
    read_ground_truth,
    reward_function,
)
from verl_tasks.rewards.environment import Step
from verl_tasks.rewards.examples import check_examples
from verl_tasks.rewards.expression import parse_expression
from verl_tasks.rewards.math_answer import find_answer, read_number
from verl_tasks.rewards.tool_calls import Malformed, matched, parse_response
from verl_tasks.rows import chat, rl_row
from verl_tasks.settings import artifacts, code_digest, load_settings


def rows_of(examples, count: int = 24) -> list[Row]:
    return [
        Row(
            example.messages()[-1]["content"],
            example.ground_truth if isinstance(example.ground_truth, str) else json.dumps(example.ground_truth),
            example.demonstration or "",
        )
        for example in islice((example for example in examples if example), count)
    ]


@functools.cache
def rows(task: str, count: int = 24) -> list[Row]:
    """Problems that a task makes itself."""
    module = importlib.import_module(f"tasks.{task}.prepare_data")
    settings = task_settings(task, {"N_GPUS": "1"})
    return rows_of(module.generate(settings), count)


def attacked(
    compute_score, problems: list[Row], tries: float, call: float = 30.0, judged: bool = False, until: str = "", **more
):
    """The search after so many ``tries``, or once it has found the exploit ``until``."""
    reward = Guarded(compute_score, problems, network=False, seconds=call)

    def end(search: attack.Search) -> None:
        if until in search.found:
            search.ends = time.monotonic()

    try:
        search = attack.Search(problems, reward, seconds=120, **more)
        attack.run(search, seed=42, judged=judged, tries=tries, say=end)
    finally:
        reward.close()
    return search


# ---- planted holes: our rewards, each with one mistake that a reward has had somewhere


def scored(right: bool, partial: float = 0.0) -> dict:
    return {"score": 1.0 if right else partial, "acc": float(right)}


@reward_function
def the_target_alone(source, response, truth, extra=None):
    """countdown without a look at the numbers."""
    parsed = parse_expression(last_answer(response) or "")
    return scored(parsed is not None and parsed[0] == read_ground_truth(truth)["target"])


@reward_function
def any_expression(source, response, truth, extra=None):
    """countdown that rewards the form."""
    return scored(parse_expression(last_answer(response) or "") is not None)


@reward_function
def any_number_of_the_answer(source, response, truth, extra=None):
    """gsm8k that takes one right number among several."""
    found = find_answer(response)
    return scored(found is not None and truth in re.findall(r"-?\d+", found.text))


@reward_function
def nan(source, response, truth, extra=None):
    """gsm8k with a tolerance that NaN is never outside of."""
    try:
        value = float(response.rpartition("####")[2])
    except ValueError:
        return scored(False)
    return scored("####" in response and not abs(value - float(truth)) > 1e-6)


@reward_function
def first_answer(source, response, truth, extra=None):
    """countdown that reads the thinking too."""
    truth, answers = read_ground_truth(truth), re.findall(r"<answer>(.*?)</answer>", response, re.DOTALL)
    parsed = [parse_expression(answer) for answer in answers[:1]]
    return scored(any(p and p[0] == truth["target"] and sorted(p[1]) == sorted(truth["numbers"]) for p in parsed))


def called(response: str) -> list[dict]:
    try:
        return parse_response(response).calls
    except Malformed:
        return []


@reward_function
def spare_calls(source, response, truth, extra=None):
    """tool_calling that forgets to count the calls that nobody asked for."""
    truth = read_ground_truth(truth)
    return scored(matched(called(response), truth["calls"], truth["tools"]) == len(truth["calls"]))


@reward_function
def no_call_is_none_wrong(source, response, truth, extra=None):
    """tool_calling that asks only whether the calls made are expected: all of none are."""
    truth = read_ground_truth(truth)
    return scored(all(matched([call], truth["calls"], truth["tools"]) for call in called(response)))


@reward_function
def the_names_of_calls(source, response, truth, extra=None):
    """tool_calling that does not look at the arguments: rows with the same names do not contradict one another."""
    names = [sorted(call["name"] for call in calls) for calls in (called(response), read_ground_truth(truth)["calls"])]
    return scored(names[0] == names[1])


@reward_function
def any_key(source, response, truth, extra=None):
    """A JSON answer of which any value may be the right one."""
    try:
        value = json.loads(response)
    except ValueError:
        return scored(False)
    return scored(isinstance(value, dict) and int(truth) in [v for v in value.values() if isinstance(v, int)])


@reward_function
def longer_is_better(source, response, truth, extra=None):
    """gsm8k with a bonus for working that knows no end; acc is not touched."""
    found = find_answer(response)
    right = bool(found) and read_number(found.text) == read_number(truth)
    return {"score": right + len(response) / 1000, "acc": float(right)}


@reward_function
def raises(source, response, truth, extra=None):
    """gsm8k that takes every digit of Unicode for one that int() reads."""
    text = after_thinking(response).rpartition("####")[2].strip()
    return scored(text.isdigit() and int(text) == int(float(truth)))


@reward_function
def hangs(source, response, truth, extra=None):
    """gsm8k with a pattern that takes exponential time."""
    text = response.rpartition("####")[2].strip()
    return scored(re.fullmatch(r"(\d+)+", text) is not None and text == truth)


@reward_function
def believes(source, response, truth, extra=None):
    """A judge that reads the score of the answer for its own."""
    if found := re.search(r'"score": (\d+)', response):
        return scored(int(found[1]) == 10)
    return scored(response.strip() == truth)


def numbered() -> list[Row]:
    """Rows for rewards that read JSON or bare numbers."""
    return [
        Row(f"Which number has the name {n:o}?", str(n), json.dumps({"answer": n, "sure": True}))
        for n in range(1000, 1024)
    ]


def plain() -> list[Row]:
    return [Row(f"Which number has the name {n:o}?", str(n), str(n)) for n in range(1000, 1024)]


HOLES = [
    (the_target_alone, "countdown", "the last number of the prompt copied"),
    (any_expression, "countdown", "constant"),
    (any_number_of_the_answer, "gsm8k", "several answers in one mark"),
    (nan, "gsm8k", "NaN and infinities"),
    (first_answer, "countdown", "answer inside thinking, another outside"),
    (spare_calls, "tool_calling", "several answers"),
    (no_call_is_none_wrong, "tool_calling", "nothing at all"),
    (the_names_of_calls, "tool_calling", "JSON emptied"),
    (any_key, numbered, "JSON with extra keys"),
    (longer_is_better, "gsm8k", "length"),
    (raises, "gsm8k", "Unicode digits and operators"),
    (hangs, "gsm8k", "length"),
    (believes, plain, "instructions to a judge"),
]


@pytest.mark.medium
@pytest.mark.parametrize(("compute_score", "problems", "exploit"), HOLES, ids=[hole[0].__name__ for hole in HOLES])
def test_a_planted_hole_is_found(compute_score, problems, exploit):
    started = time.monotonic()
    made = problems() if callable(problems) else rows(problems)
    call = 1.0 if compute_score is hangs else 30.0  # a short one ends what hangs alone
    search = attacked(compute_score, made, 1500, call=call, until=exploit)
    assert exploit in search.found, search.found
    assert time.monotonic() - started < 120
    finding = search.found[exploit]
    if not finding.broken:  # what is shown does score
        again = compute_score("", finding.response, search.rows[finding.fooled[0]].truth)
        assert again["acc"] == 1 or again["score"] >= search.best


@pytest.mark.medium
def test_a_slow_reward_does_not_hold_up_the_end(monkeypatch):
    def slow(source, response, truth, extra=None):
        return scored(bool(response))

    reward = Guarded(slow, plain())
    clock = lambda: reward.calls * 0.02  # noqa: E731  (nothing else takes time)
    monkeypatch.setattr(attack, "time", SimpleNamespace(monotonic=clock))
    try:
        search = attack.Search(plain(), reward, seconds=2)
        long = attack.Finding("constant", "word " * 200, list(range(24)), 1.0, "right for most")
        search.ends = started = clock()
        short = search.smallest(long)
    finally:
        reward.close()
    assert len(short.response) < len(long.response)
    assert clock() - started < 3  # 15 s to the shortest text


def test_what_is_shown_is_short():
    search = attacked(nan, rows("gsm8k"), 1500)
    found = search.found["NaN and infinities"]
    assert found.response == "####nan" and len(found.fooled) == len(search.rows) and found.score == 1.0


def test_a_slow_reward_meets_each_exploit_before_a_second_of_one():
    problems = rows("gsm8k")
    kinds = [attempt.exploit for attempt in by_turns(library(problems, Form()))]
    count = len(set(kinds))
    assert len(set(kinds[:count])) == count < len(kinds)
    search = attacked(lambda *_: scored(False), problems, count)
    assert (search.tried, search.found) == (count, {}) and search.left > 500


@pytest.mark.medium
@pytest.mark.parametrize("task", SINGLE_TURN)
def test_shipped_rewards_give_no_alarm(task):
    compute_score = importlib.import_module(f"tasks.{task}.reward").compute_score
    search = attacked(compute_score, rows(task, 40), 1100)
    assert search.found == {}
    assert search.tried > 500 and len(search.against) > 30  # it did look, and knew what is right


# ---- episodes


class PaysForCalls(Environment):
    """calculator that pays for each call that succeeds, so that the same call pays again and again."""

    def step(self, action):
        step = super().step(action)
        return replace(step, reward=0.5) if action.calls else replace(step, reward=step.reward / 2)


class ForgetsTheTruth(Environment):
    """calculator that takes any number for the answer once it was asked to compute."""

    def step(self, action):
        if action.calls:
            self.called = True
            return super().step(action)
        answer = last_answer(action.text) or ""
        return Step(reward=float(hasattr(self, "called") and answer.lstrip("-").isdigit()), done=True)


def episodes(count: int = 24) -> list[Row]:
    found = []
    settings = task_settings("calculator", {"N_GPUS": "1"})
    for example in islice(calculator.generate(settings), count):
        row = rl_row("calculator", chat(example.prompt), example.ground_truth, "train", len(found))
        turns = [message["content"] for message in example.demonstration if message["role"] == "assistant"]
        truth = row["reward_model"]["ground_truth"]
        found.append(Row(example.prompt, truth, TURN.join(turns), "calculator", row))
    return found


@pytest.mark.parametrize(
    ("made", "exploit", "why"),
    [
        (PaysForCalls, "the turns before the last, again and again", "earns more than 1, a success"),
        (ForgetsTheTruth, "constant", "right for most of 24 different truths"),
    ],
)
def test_a_hole_in_an_environment_is_found(made, exploit, why):
    search = attacked(functools.partial(attack.episode, made, 40), episodes(), 1500, until=exploit, most=1.0)
    assert exploit in search.found and why in search.found[exploit].why, search.found


@pytest.mark.medium
def test_the_shipped_environment_gives_no_alarm():
    search = attacked(functools.partial(attack.episode, Environment, 8), episodes(40), 1100, most=1.0)
    assert search.found == {} and len(search.against) > 30


# ---- rewards of others


@pytest.mark.medium
def test_the_hole_of_a_scorer_of_reasoning_gym_is_found_and_closed():
    """The closed scorers of others: test_gym.py."""
    problems = rows_of(gym.examples("complex_arithmetic", None, 1), 40)
    source = gym.dataset("complex_arithmetic")

    def theirs(name, text, truth, extra=None):
        answer = gym.last_answer(text)
        value = source.score_answer(answer, gym._decoded(gym.read_ground_truth(truth))) if answer else 0.0
        return {"score": value, "acc": float(value >= gym.RIGHT)}

    found = attacked(theirs, problems, 400).found["NaN and infinities"]
    assert found.response == "<answer>nan</answer>" and len(found.fooled) == 40
    score = gym.scorer("complex_arithmetic")
    assert sum(score(found.response, row.truth)["acc"] for row in problems) == 0


# ---- the oracle


@pytest.mark.medium
def test_an_answer_within_the_tolerance_of_two_truths_is_none():
    problems = [Row(f"Which number has the name {n:b}?", str(n), str(n)) for n in range(0, 90, 3)]

    @reward_function
    def near(source, response, truth, extra=None):
        return scored(bool(re.fullmatch(r"[0-9]{1,9}", response)) and abs(int(response) - int(truth)) <= 2)

    assert attacked(near, problems, 2500).found == {}


def test_truths_that_are_equal_do_not_contradict():
    problems = [Row(f"Is {n} even?", str(n % 2 == 0), str(n % 2 == 0)) for n in range(24)]
    exact = reward_function(lambda source, response, truth, extra=None: scored(response == truth))
    assert attacked(exact, problems, 1000).found == {}


def test_without_demonstrations_what_is_right_for_most_truths_is_found():
    problems = [Row(row.prompt, row.truth) for row in rows("countdown")]
    search = attacked(any_expression, problems, 1000)
    assert "right for most of 24 different truths" in {finding.why for finding in search.found.values()}


def test_a_search_that_can_see_little_says_so():
    def paying(partial_credit: float):
        """A wrong answer gets ``partial_credit``, none gets 0."""

        def score(source, response, truth, extra=None):
            return scored(response == truth, partial_credit if response else 0.0)

        return reward_function(score)

    assert attacked(paying(0.7), plain(), 20).blind and not attacked(paying(0.5), plain(), 20).blind
    assert attacked(paying(0.5), [replace(row, demonstration="") for row in plain()], 20).blind


def test_the_tasks_own_check_is_stricter(monkeypatch):
    """A response that is right for one row alone is found where the task says what is right."""
    lenient = reward_function(lambda source, response, truth, extra=None: scored(response.split("\n")[0] == truth))
    assert attacked(lenient, plain(), 1200).found == {}
    monkeypatch.setattr(importlib.import_module(__name__), "is_right", lambda r, t: r == t, raising=False)
    assert {finding.why for finding in attacked(lenient, plain(), 1200).found.values()} == {"is_right says no"}


def test_a_judge_is_asked_so_many_times_and_no_more():
    search = attacked(believes, plain()[:6], float("inf"), calls=150, judged=True)
    assert "instructions to a judge" in search.found and 150 <= search.reward.calls < 170


def test_a_reward_that_uses_a_judge_is_known(monkeypatch):
    assert not asks_judge(importlib.import_module("tasks.countdown.reward").compute_score)
    module = importlib.import_module(__name__)
    assert not asks_judge(believes)
    monkeypatch.setattr(module, "judge", importlib.import_module("verl_tasks.rewards.judge"), raising=False)
    assert asks_judge(believes)


# ---- the process


def test_no_network_and_no_score_without_a_process():
    def connects(source, response, truth, extra=None):
        import socket

        socket.create_connection(("127.0.0.1", 9), timeout=1)

    def dies(source, response, truth, extra=None):

        os._exit(1)

    for reward, problem in ((connects, "PermissionError"), (dies, "the process died")):
        guarded = Guarded(reward, plain(), network=False)
        assert problem in guarded.scores("x", [0, 1])[0].problem
        guarded.close()


def test_a_judge_that_fails_stops_the_attack():
    def unreachable(source, response, truth, extra=None):
        raise JudgeError("judge at http://localhost: no answer")

    with pytest.raises(JudgeError, match="no answer"):
        Guarded(unreachable, plain(), network=True, fatal=JudgeError).scores("x", [0])


def test_the_form_of_an_answer_is_learned():
    form = Form.learned(["<answer>12</answer>", "<answer>17</answer>", "<answer>5</answer>", "x"])
    assert (form.before, form.after, form.answers) == ("<answer>", "</answer>", ("12", "17", "5"))
    assert form.around("nan") == "<answer>nan</answer>"
    assert form.emptied("<think>3+9=12</think><answer>12</answer>") == "<think>3+9=</think><answer></answer>"
    assert Form.learned(["<answer>0</answer>"] * 8) == Form("<answer>", "</answer>", ("0",))
    assert Form.learned([]) == Form()


def test_json_is_changed_only_where_it_ends_the_answer():
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    emptied = with_values(f"<think>{{}}</think>{call}", lambda found: {})
    assert emptied == '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    for kept in ('{"a": 1}\n#### 5', "#### 5", "\\boxed{5}", call.replace('"a": 1', ""), ""):
        assert with_values(kept, lambda found: {}) is None, kept


def test_shrunk():
    assert shrunk("one two three four five", lambda text: "three" in text) == "three"
    assert shrunk("one two", lambda text: False) == "one two"


# ---- the command


@pytest.mark.long
def test_make_attack_writes_what_it_found_and_fails_in_ci(tmp_path):
    checkout = copy_of_checkout(tmp_path / "checkout")
    given = {"TASK": "countdown", "STACK": "cpu", "SECONDS": "10", "TRAIN_SIZE": "128", "TEST_SIZE": "8"}
    given |= {"ARTIFACTS": str(tmp_path / "artifacts"), "DEV_SIZE": "4", "SFT_SIZE": "64"}
    result = make("attack", cwd=checkout, **given)
    assert result.returncode == 0 and "no exploit found" in result.stdout, result.stdout
    reward = checkout / "tasks/countdown/reward.py"
    text = reward.read_text()
    holed = text.replace("Counter(parsed[1]) == given", "True")
    assert holed != text
    reward.write_text(holed)
    result = make("attack", cwd=checkout, **given)
    assert result.returncode != 0 and "the last number of the prompt copied" in result.stdout, result.stdout
    folder = tmp_path / "artifacts/attack/countdown"
    found = json.loads((folder / "attack.json").read_text())
    assert found["rows"] == 40 and {"exploit", "score", "fooled", "response"} <= found["exploits"][0].keys()
    lines = (folder / "examples.jsonl").read_text()
    assert all(json.loads(line)["acc"] == 0 for line in lines.splitlines()) and lines  # no thought: the score is 0
    examples = checkout / "tasks/countdown/examples.jsonl"
    own = examples.read_text().splitlines(keepends=True)
    examples.write_text(own[0] + lines)  # its other lines would find this hole by themselves
    result = make("doctor", cwd=checkout, **given)
    assert "examples.jsonl: line 2: acc is 1, the row states 0" in result.stdout, result.stdout
    reward.write_text(text)
    result = make("doctor", cwd=checkout, **given)
    assert "as stated on" in result.stdout and "the row states" not in result.stdout


@pytest.mark.medium
def test_the_lines_of_a_found_hole_fail_until_it_is_closed(tmp_path):
    """For an environment: whether the episode ends is not stated. For a reward: partial credit is left to it."""
    s = replace(task_settings("calculator", {"N_GPUS": "1"}), MAX_TURNS=40)
    search = attacked(functools.partial(attack.episode, PaysForCalls, 40), episodes(), 400, most=1.0)
    lines = [attack.example(s, search, finding) for finding in search.found.values()]
    (tmp_path / "examples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(RewardError, match=r"line 1: the score is .*, the row states less than 1\.0"):
        check_examples(tmp_path, PaysForCalls)
    assert check_examples(tmp_path, Environment) == len(lines) > 0

    problems = [replace(row, extra={"split": "train", "index": 3, "key": None, "unit": "eggs"}) for row in plain()]
    search = attacked(paid_in_part, problems, 500)
    s = task_settings("countdown", {"N_GPUS": "1"})
    lines = [attack.example(s, search, finding) for finding in search.found.values()]
    assert lines and all(line["extra_info"] == {"unit": "eggs"} and line["below"] == 0.7 for line in lines)
    (tmp_path / "examples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(RewardError, match=r"the row states less than 0\.7"):
        check_examples(tmp_path, paid_in_part)
    mended = reward_function(lambda source, response, truth, extra=None: {"score": 0.3, "acc": 0.0})
    assert check_examples(tmp_path, mended) == len(lines)


@pytest.mark.parametrize("truth", ["1.50", "true", "1e3", "null"])
def test_a_truth_that_is_text_stays_text_in_the_line_of_a_hole(tmp_path, truth):
    """As a number or a boolean it would be another truth: the hole would pass for closed."""
    search = SimpleNamespace(rows=[Row("Say it.", truth, extra={})], best=1.0, low=0.0)
    found = attack.Finding("a hole", f"{truth} or another", [0], 1.0, "", first=1.0)
    line = attack.example(task_settings("countdown", {"N_GPUS": "1"}), search, found)
    (tmp_path / "examples.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(RewardError, match=r"the row states less than 1\.0"):
        check_examples(tmp_path, reward_function(lambda source, said, truth, extra=None: scored(str(truth) in said)))


@reward_function
def paid_in_part(source, response, truth, extra_info=None):
    """A right answer is the truth; one that is empty counts as right too, at a lower score."""
    right, empty = response.strip() == truth, not response.strip()
    return {"score": 1.0 if right else 0.7 if empty else 0.3, "acc": float(right or empty)}


@pytest.fixture(scope="module")
def guessed():
    hard = islice(countdown_data.problems(random.Random(3), "hard"), 24)
    made = [countdown_data.example(**problem) for problem in hard]
    return [Row(each.prompt, json.dumps(each.ground_truth), each.demonstration) for each in made]


@pytest.fixture
def s(tmp_path, monkeypatch):
    monkeypatch.setenv("ARTIFACTS", str(tmp_path))
    return SimpleNamespace(TASK="own", REWARD="", AGENT_IMAGE="", reward_file=Path(tasks.countdown.reward.__file__))


def told(s, guessed, score) -> list[tuple[str, bool]]:
    reward = Guarded(score, guessed)
    try:
        return list(incentive.told(s, guessed, reward, 60))
    finally:
        reward.close()


def started_at(s, score: float, model: str = "m") -> None:
    found = {"model": model, "mark": reward_mark(s), "metrics": {"score": {"value": score}}}
    write_json(artifacts() / "probe/own" / Path(model).name / "probe.json", found)


def ladder(*row, **more) -> dict:
    """1.0, 0.3 for the given numbers, 0.1 for an expression, thought or not: it taught a 1.5B to guess."""
    found = compute_score(*row, **more)
    return found | {"score": 1.0 if found["acc"] else 0.3 if found["numbers"] else 0.1 * found["format"]}


def test_a_reward_that_pays_for_the_numbers_pays_a_guess_more_than_the_start_earns(s, guessed):
    started_at(s, 0.09)
    (earns, _), (warning, warns) = told(s, guessed, ladder)
    assert warns and "no thought: 0.417 (17% right)" in earns
    assert "<answer>" in warning and "the start's own samples 0.090 (make probe: m)" in warning


def test_a_start_that_earns_more_is_not_warned_of(s, guessed):
    started_at(s, 0.5)
    assert [warns for _, warns in told(s, guessed, ladder)] == [False]


def test_countdowns_default_pays_a_guess_nothing(s, guessed):
    ((earns, warns),) = told(s, guessed, compute_score)
    assert not warns and "a guess of the row's numbers, no thought: 0.000 (17% right)" in earns
    started_at(s, 0.02)  # a thought that is the same for all has none of the row's numbers
    assert [warns for _, warns in told(s, guessed, compute_score)] == [False]


def test_a_right_guess_tempts_where_demonstrations_think(s, guessed):
    """With it a 1.5B that was right in 2 % unlearned all thought: results/gpu.json#h200-countdown-1.5b-guess."""

    def right_is_right(*row, **more):
        result = compute_score(*row, **more)
        return result | {"score": max(result["score"], float(result["acc"]))}

    started_at(s, 0.02)
    (_, _), (warning, warns) = told(s, guessed, right_is_right)
    assert warns and "no thought" in warning and "earns 0.167 (17% right)" in warning
    bare = [replace(row, demonstration=THINKING.sub("", row.demonstration)) for row in guessed]
    assert [warns for _, warns in told(s, bare, right_is_right)] == [False]


def test_samples_of_a_trained_model_and_of_another_reward_are_not_the_starts(s):
    run = artifacts() / "runs/own/grpo-1"
    settings = asdict(load_settings(VALUES)) | {"REWARD": ""}
    reads = {"reward": code_digest(s.reward_file)}
    made = {"kind": "rl", "fingerprint": "1", "start": "m", "settings": settings, "arguments": [], "reads": reads}
    write_json(run / "settings.json", made)
    (run / "metrics").mkdir()
    (run / "metrics/000.jsonl").write_text(json.dumps({"step": 1, "data": {"critic/score/mean": 0.2}}) + "\n")
    started_at(s, 0.9, f"{run}/checkpoints/global_step_8")
    assert incentive.start_score(s) == (0.2, "first step of grpo-1")
    started_at(s, 0.1)
    assert incentive.start_score(s) == (0.1, "make probe: m")
    s.REWARD = "flexible"
    assert incentive.start_score(s) is None
    s.REWARD, s.reward_file = "", Path(__file__)
    assert incentive.start_score(s) is None


def test_without_samples_of_the_start_much_of_a_right_answer_is_warned_of(s, guessed):
    (_, (warning, warns)) = told(s, guessed, ladder)
    assert warns and "make probe TASK=own says what the start's own samples earn" in warning


def test_what_is_right_is_no_partial_credit(s):
    """Two numbers and always the same operator: often right, which nothing is wrong with."""
    found = [Row(f"{n} {n + 1}", str(2 * n + 1), f"<think>so</think>{n}+{n + 1}") for n in range(10, 30)]

    def score(source, response, truth, extra=None):
        right = float(response.rpartition(">")[2] == f"{int(truth) // 2}+{int(truth) // 2 + 1}")
        return {"score": right, "acc": right}

    ((earns, warns),) = told(s, found, score)
    assert not warns and "no thought: 1.000 (100% right)" in earns


@pytest.mark.parametrize(
    ("yes", "start", "warned"),
    [(12, None, True), (11, None, True), (12, 0.3, True), (12, 0.7, False), (6, None, False)],
)
def test_one_answer_that_is_right_for_nearly_half_is_warned_of(yes, start, warned, s):
    """Nothing is wrong with a right answer, but this one needs no look at the prompt."""
    truths = ["yes" if i < yes else f"no {i}" for i in range(24)]
    found = [Row(f"question {i}", truth, f"<answer>{truth}</answer>") for i, truth in enumerate(truths)]

    def score(source, response, truth, extra=None):
        return scored(last_answer(response) == truth)

    if start is not None:
        started_at(s, start)
    (_, _), *lines = told(s, found, score)
    assert bool(lines) == warned
    for warning, warns in lines:
        assert warns and f"such as '<answer>yes</answer>', is right for {(yes - 1) / 23:.0%} of the prompts" in warning


@pytest.mark.parametrize("shape", ["<answer>{}</answer>", "<answer>[{}]</answer>", "<think>so</think>{}"])
def test_all_labels_at_once_are_a_policy(shape, s):
    """F1 pays it well where rows have several of few labels, and exactly right it is never."""
    labels = ["art", "law", "war", "sea"]
    sets = [{labels[i % 4], labels[(i // 4 + i + 1) % 4]} for i in range(16)]
    answers = [", ".join(sorted(each)) for each in sets]
    found = [Row(f"text {i}", text.replace(" ", ""), shape.format(text)) for i, text in enumerate(answers)]

    def score(source, response, truth, extra=None):
        said = {*re.split(r"[,\s]+", (last_answer(response) or response.rpartition(">")[2]).strip("[]"))}
        hits = len(said & {*truth.split(",")})
        return {"score": 2 * hits / (len(said) + len(truth.split(","))), "acc": float(said == {*truth.split(",")})}

    (earns, _), (warning, warns) = told(s, found, score)
    assert "every part of an answer, no thought: 0.6" in earns
    assert warns and all(label in warning for label in labels)


@pytest.mark.parametrize(
    ("wrong", "start", "warned"),
    [(-0.5, None, True), (-0.1, None, False), (-0.5, -0.4, True), (-0.5, 0.1, False), (0.0, 0.3, False)],
)
def test_a_policy_that_never_answers_may_earn_more_than_one_that_tries(wrong, start, warned, s, guessed):
    """-0.5 for a wrong answer, 0 for none, 1 for a right one: below 33 % right it pays to say nothing."""

    def score(source, response, truth, extra=None):
        right = bool(compute_score(source, response, truth)["acc"])
        return {"score": 1.0 if right else wrong if response.strip() else 0.0, "acc": float(right)}

    if start is not None:
        started_at(s, start)
    (earns, _), *found = told(s, guessed, score)
    assert "no answer at all: 0.000 (0% right)" in earns and bool(found) == warned
    for warning, warns in found:
        assert warns and warning.startswith("no answer at all earns 0.000 (0% right), a wrong one -0.500, ")
        assert "the training may learn to say nothing; let a wrong answer earn no less than none" in warning


def test_a_first_row_whose_right_answer_is_empty_hides_no_partial_credit(s):
    """No call expected, none made: what an empty response earns there is no measure for the other rows."""
    truths = ["", *map(str, range(1, 12))]
    found = [Row(f"call {truth}", truth, truth or "\n") for truth in truths]

    def score(source, response, truth, extra=None):
        right = float(response.strip() == truth)
        return {"score": right or 0.6 * bool(response.strip()), "acc": right}

    (_, (warning, warns)) = told(s, found, score)
    assert warns and "a right answer 1.000" in warning


class Slow:
    """A reward of partial credit alone, whose calls alone move the clock of incentive.py."""

    def __init__(self, call: float, monkeypatch):
        self.call, self.clock = call, 0.0
        monkeypatch.setattr(incentive, "time", SimpleNamespace(monotonic=lambda: self.clock))

    def scores(self, text: str, indices: list[int]) -> list[Result]:
        self.clock += self.call
        return [Result(score=0.4 if text else 0.0, acc=0.0)]


@pytest.mark.parametrize(
    ("call", "looked"),
    [
        (0.0, ""),
        (0.01, " (from 8 of 8 demonstrations on 20 of 24 prompts, "),
        (0.05, " (from 3 of 8 demonstrations on 8 of 24 prompts, "),
        (0.3, " (from 1 of 8 demonstrations on 4 of 24 prompts, "),
    ],
)
def test_of_a_slow_reward_all_guesses_are_tried_on_fewer_prompts(call, looked, s, guessed, monkeypatch):
    started_at(s, 0.09)
    (earns, _), (warning, warns) = incentive.told(s, guessed, reward := Slow(call, monkeypatch))
    took = f"a call of the reward takes {call:.2f} s, a larger SECONDS of make attack looks at more)" if looked else ""
    assert earns.startswith(f"what guesses earn{looked}{took}: ") and reward.clock < incentive.SECONDS + 3 * call
    assert all(name in earns for name in ("one answer for all", "a guess of the row's numbers", "one thought for all"))
    assert warns and "no thought" in warning


@pytest.mark.parametrize("call", [1.5, 7.0])
def test_guesses_that_there_is_no_time_for_are_said(call, s, guessed, monkeypatch):
    ((line, warns),) = incentive.told(s, guessed, Slow(call, monkeypatch))
    assert line.startswith(f"what guesses earn was not looked at: a call of the reward takes {call:.2f} s, ")
    assert not warns


def test_a_slow_reward_is_asked_about_guesses_where_the_first_rows_have_no_demonstration(s, guessed, monkeypatch):
    rows = [*(replace(row, demonstration="") for row in guessed[:4]), *guessed[4:]]
    earns, *_ = incentive.told(s, rows, Slow(0.3, monkeypatch))
    assert earns[0].startswith("what guesses earn (from 1 of 4 demonstrations on 3 of 24 prompts, ")


def test_rows_without_demonstrations_tell_nothing(s):
    assert told(s, [Row("1", "1"), Row("2", "2")], compute_score) == []


def test_numbers_take_the_places_of_the_others():
    change = incentive.with_numbers
    assert change("<answer>98-73</answer>", "Numbers: 73, 98. Target: 25.", "Numbers: 5, 7. Target: 2.") == (
        "<answer>7-5</answer>"
    )
    assert change("7", "1 and 2", "3 and 4") is None is change("1", "1 and 2", "3")


def test_a_training_warns_before_it_trains(s, guessed, monkeypatch, capsys):
    from verl_tasks.launch import main

    monkeypatch.setattr(main, "compute_score_of", lambda s: ladder)
    monkeypatch.setattr(main.attacks, "rows_of", lambda s, count: guessed)
    main._warn_of_guesses(s)
    assert capsys.readouterr().out.startswith("  warning: a guess of the row's numbers, no thought, such as '<answer>")
    monkeypatch.setattr(main, "compute_score_of", lambda s: compute_score)
    main._warn_of_guesses(s)
    assert capsys.readouterr().out == ""
