"""The environment and the data of calculator: episodes without a model."""

import os
import random
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest

from tasks.calculator.environment import TOOLS, Environment, calculate
from tasks.calculator.prepare_data import DIFFICULTIES, expression, from_file, from_record, generate, worked
from tests.helpers import ROOT
from verl_tasks import check_examples, environment, prepare, tool_calls

SHARED = Path(os.environ.get("SHARED_DATA", ROOT.parent / "shared/data"))


def test_examples_score_as_stated():
    assert check_examples(Path(__file__).parent, Environment) > 0


@pytest.mark.parametrize("difficulty", DIFFICULTIES)
def test_each_demonstration_solves_its_problem(difficulty):
    for example in islice(generate(SimpleNamespace(SEED=1, DIFFICULTY=difficulty)), 200):
        row = environment.rl_row("calculator", example.messages(), example.ground_truth, "train", 0, TOOLS)
        answers = [message["content"] for message in example.demonstration if message["role"] == "assistant"]
        assert environment.replayed(Environment, row, answers) == (1.0, 0, True)
        results = [message["content"] for message in example.demonstration if message["role"] == "tool"]
        assert results == [example.ground_truth["answer"]]


SOLUTION = "Each costs 3/4 = $<<3/4=0.75>>0.75.\nSo 4 cost $<<0.75*4=3>>3, as stated.\n#### 3"


def test_the_annotations_of_a_worked_solution_are_calls():
    (example,) = from_record({"question": " How much? ", "answer": SOLUTION})
    said = [message["content"] for message in example.demonstration if message["role"] == "assistant"]
    results = [message["content"] for message in example.demonstration if message["role"] == "tool"]
    assert example.prompt == "How much?" and results == ["0.75", "3"]
    assert [tool_calls.parse_response(text).text for text in said[:2]] == ["Each costs 3/4 = $", "0.75.\nSo 4 cost $"]
    assert said[2] == "3, as stated.\n<answer>3</answer>"
    row = environment.rl_row("calculator", example.messages(), example.ground_truth, "train", 0, TOOLS)
    assert environment.replayed(Environment, row, said) == (1.0, 0, True)


def test_a_solution_that_cannot_be_called_is_no_demonstration():
    assert worked("Ten.", "10") is None and worked("<<2**9=512>>512", "512") is None
    (example,) = from_record({"question": "How many?", "answer": "Many.\n#### 1,234.50"})
    assert (example.demonstration, example.ground_truth) == (None, {"answer": "1234.5"})
    with pytest.raises(prepare.DataError, match="must end with"):
        from_record({"question": "How many?", "answer": "Many.\n#### many"})


@pytest.mark.medium
@pytest.mark.skipif(not (SHARED / "gsm8k").is_dir(), reason="no shared data")
def test_gsm8k_is_played_with_its_own_calculations():
    examples = list(from_file(SimpleNamespace(FILE=str(SHARED / "gsm8k"))))
    without = [example.place.rpartition("/")[2] for example in examples if not example.demonstration]
    assert len(examples) == 8792 and len(without) == 116
    assert {"train.jsonl: line 395", "train.jsonl: line 4170", "train.jsonl: line 4877"} <= set(without)
    for example in examples[::20]:
        if example.demonstration:
            row = environment.rl_row("calculator", example.messages(), example.ground_truth, "train", 0, TOOLS)
            said = [message["content"] for message in example.demonstration if message["role"] == "assistant"]
            assert environment.replayed(Environment, row, said) == (1.0, 0, True), example.place


def test_problems_are_of_their_difficulty_and_the_same_for_a_seed():
    for difficulty, (counts, largest) in DIFFICULTIES.items():
        made = [expression(random.Random(seed), difficulty) for seed in range(200)]
        assert made == [expression(random.Random(seed), difficulty) for seed in range(200)]
        numbers = [[int(n) for n in text.replace("(", "").replace(")", "").split() if n.isdigit()] for text in made]
        assert {len(each) for each in numbers} == set(counts)
        assert all(11 <= n <= largest for each in numbers for n in each)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2 + 3 * 4", "14"),
        ("(2 + 3) * 4", "20"),
        ("10 - 20", "-10"),
        ("1 / 3", "1/3"),
        ("8/2", "4"),
        ("0.1 + .2", "0.3"),
        ("-1/8", "-0.125"),
        ("1/1000000 + 10.50*2", "21.000001"),
        ("+12 - -(3 + 4)", "19"),
        ("1/10000000", "1/10000000"),
    ],
)
def test_values_are_exact(text, value):
    assert calculate({"expression": text}) == value


NO_EXPRESSIONS = ["", "2**9", "1/0", "x", "9999999999", "1." + 10 * "1", "1" * 300, "5.", "1.2.3", "1_0", "1e5", "05"]


@pytest.mark.parametrize("text", [*NO_EXPRESSIONS, "len('a')", "(1", None, 5, ["1"]])
def test_what_is_no_expression_is_a_call_error(text):
    with pytest.raises(environment.CallError):
        calculate({"expression": text})
    with pytest.raises(environment.CallError):
        calculate({"expression": "1", "more": text})


def test_parallel_calls_each_get_a_result_and_an_answer_ends_the_episode():
    row = environment.rl_row("calculator", [{"role": "user", "content": "-"}], {"answer": "5"}, "test", 0)
    calls = tool_calls.render_calls(
        [{"name": "calculator", "arguments": {"expression": text}} for text in ("1+1", "2+3")]
    )
    played = Environment()
    played.reset(row)
    assert [m["content"] for m in played.step(tool_calls.parse_response(calls)).messages] == ["2", "5"]
    assert environment.replayed(Environment, row, [calls, "so <answer>5</answer>"]) == (1.0, 0, True)
    assert environment.replayed(Environment, row, ["<answer>2</answer> <answer> 5 </answer>"]) == (1.0, 0, True)
    assert environment.replayed(Environment, row, ["no idea"]) == (0.0, 0, True)
