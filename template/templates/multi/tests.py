"""Tests of this task's environment, without a model; `make test` runs them."""

from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest

{% import "imports.jinja" as imports with context %}
{% set common = ["from tasks.common.rows import rl_row", "from tasks.common.rewards.environment import CallError, replayed", "from tasks.common.rewards.examples import check_episodes", "from tasks.common.rewards.tool_calls import render_calls"] %}
{{ imports.sorted(common, "environment import TOOLS, Environment, look_up\nfrom tasks." ~ cookiecutter.task ~ ".prepare_data import DIGITS, example, generate") }}
STOCK = {"shelf": 417, "pieces": 58}
CALL = render_calls([{"name": "look_up", "arguments": {"shelf": 417}}])


def row_of(problem) -> dict:
    return rl_row("test", problem.messages(), problem.ground_truth, "test", 0, TOOLS)


def test_examples_get_the_scores_that_they_state():
    assert check_episodes(Path(__file__).parent, Environment) > 0


@pytest.mark.parametrize("difficulty", DIGITS)
def test_each_demonstration_is_right_and_its_prompt_does_not_show_the_answer(difficulty):
    for problem in islice(generate(SimpleNamespace(SEED=0, DIFFICULTY=difficulty)), 200):
        answers = [message["content"] for message in problem.demonstration if message["role"] == "assistant"]
        assert replayed(Environment, row_of(problem), answers) == (1.0, 0, True)
        assert str(problem.ground_truth["pieces"]) not in problem.prompt.rstrip("?").split()


@pytest.mark.parametrize(
    ("answers", "found"),  # reward, calls that failed, whether the episode is done
    [
        ([CALL, "<answer>58</answer>"], (1.0, 0, True)),
        ([CALL], (0.0, 0, False)),
        ([CALL.replace("417", "418"), "<answer>58</answer>"], (1.0, 1, True)),
        ([CALL.replace("look_up", "count"), "<answer>58</answer>"], (1.0, 1, True)),
        ([CALL, "<answer>417</answer>"], (0.0, 0, True)),
        (["<think><answer>58</answer></think>"], (0.0, 0, True)),  # thinking is no answer
        ([""], (0.0, 0, True)),
    ],
)
def test_an_episode_gets_its_reward(answers, found):
    assert replayed(Environment, row_of(example(**STOCK)), answers) == found


@pytest.mark.parametrize("arguments", [{}, {"shelf": "417"}, {"shelf": True}, {"shelf": 417, "more": 1}, {"shelf": 1}])
def test_a_call_that_cannot_be_carried_out_is_an_error_that_the_model_reads(arguments):
    with pytest.raises(CallError):
        look_up(STOCK, arguments)
