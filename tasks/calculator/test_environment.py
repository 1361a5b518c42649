"""The environment and the data of calculator: episodes without a model."""

import random
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest

from tasks.calculator.environment import TOOLS, Environment, calculate
from tasks.calculator.prepare_data import DIFFICULTIES, expression, generate
from tasks.common.data import prepare
from tasks.common.data.rows import rl_row
from tasks.common.rewards.environment import CallError, replayed
from tasks.common.rewards.examples import check_episodes
from tasks.common.rewards.tool_calls import parse_response, render_calls
from tasks.common.settings import load_settings
from tests.test_settings import VALUES


def test_examples_score_as_stated():
    assert check_episodes(Path(__file__).parent, Environment) > 0


@pytest.mark.parametrize("difficulty", DIFFICULTIES)
def test_each_demonstration_solves_its_problem(difficulty):
    for example in islice(generate(SimpleNamespace(SEED=1, DIFFICULTY=difficulty)), 200):
        row = rl_row("calculator", example.messages(), example.ground_truth, "train", 0, TOOLS)
        answers = [message["content"] for message in example.demonstration if message["role"] == "assistant"]
        assert replayed(Environment, row, answers) == (1.0, 0, True)
        results = [message["content"] for message in example.demonstration if message["role"] == "tool"]
        assert results == [example.ground_truth["answer"]]


def test_the_gold_check_plays_the_demonstrations(tmp_path, monkeypatch):
    def wrong_now_and_then(settings):
        for number, example in enumerate(generate(settings)):
            unfinished = replace(example, demonstration=example.demonstration[:2])  # no answer
            other = replace(example, ground_truth={"answer": "a lie"})
            yield {3: other, 5: unfinished}.get(number, example)

    monkeypatch.setenv("ARTIFACTS", str(tmp_path))
    sizes = {"TRAIN_SIZE": 8, "TEST_SIZE": 2, "DEV_SIZE": 2, "SFT_SIZE": 8, "N_SAMPLES": 12}
    s = replace(load_settings(VALUES), TASK="calculator", DIFFICULTY="easy", SOURCE="generate")
    s = replace(s, **{name: size for name, size in sizes.items() if hasattr(s, name)})
    entry = prepare._prepare(s, "generate", wrong_now_and_then, "")["gold"]
    assert (entry["demonstrations"], entry["right"]) == (12, 10)
    assert sorted(other["reason"] for other in entry["others"]) == ["score 0, acc 0", "score 0, acc 0"]


def test_problems_are_of_their_difficulty_and_the_same_for_a_seed():
    for difficulty, (counts, largest) in DIFFICULTIES.items():
        made = [expression(random.Random(seed), difficulty) for seed in range(200)]
        assert made == [expression(random.Random(seed), difficulty) for seed in range(200)]
        numbers = [[int(n) for n in text.replace("(", "").replace(")", "").split() if n.isdigit()] for text in made]
        assert {len(each) for each in numbers} == set(counts)
        assert all(11 <= n <= largest for each in numbers for n in each)


@pytest.mark.parametrize(
    ("text", "value"), [("2 + 3 * 4", "14"), ("(2 + 3) * 4", "20"), ("10 - 20", "-10"), ("1 / 3", "1/3"), ("8/2", "4")]
)
def test_values_are_exact(text, value):
    assert calculate({"expression": text}) == value


@pytest.mark.parametrize("text", ["", "2**9", "1/0", "x", "9999999999", "1" * 300, "len('a')", "(1", None, 5, ["1"]])
def test_what_is_no_expression_is_a_call_error(text):
    with pytest.raises(CallError):
        calculate({"expression": text})
    with pytest.raises(CallError):
        calculate({"expression": "1", "more": text})


def test_parallel_calls_each_get_a_result_and_an_answer_ends_the_episode():
    row = rl_row("calculator", [{"role": "user", "content": "-"}], {"answer": "5"}, "test", 0)
    calls = render_calls([{"name": "calculator", "arguments": {"expression": text}} for text in ("1+1", "2+3")])
    environment = Environment()
    environment.reset(row)
    assert [m["content"] for m in environment.step(parse_response(calls)).messages] == ["2", "5"]
    assert replayed(Environment, row, [calls, "so <answer>5</answer>"]) == (1.0, 0, True)
    assert replayed(Environment, row, ["<answer>2</answer> <answer> 5 </answer>"]) == (1.0, 0, True)
    assert replayed(Environment, row, ["no idea"]) == (0.0, 0, True)
