"""Tests of this task's reward; `make test` runs them. More of them: test_task.py, tests/test_tool_calls.py."""

import json
from pathlib import Path

import pytest

from tasks.tool_calling.reward import VARIANTS, compute_score
from verl_tasks import check_examples

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
CALL = {"name": "weather", "arguments": {"city": "Oslo"}}
TRUTH, NO_CALL = {"calls": [CALL], "tools": TOOLS}, {"calls": [], "tools": TOOLS}
BLOCK = f"<tool_call>\n{json.dumps(CALL)}\n</tool_call>"


def test_examples_get_the_scores_that_they_state():
    assert check_examples(Path(__file__).parent, compute_score) > 0


@pytest.mark.parametrize(
    ("response", "truth", "instruct", "strict"),
    [
        (BLOCK, TRUTH, 1.0, 0.0),
        (f"<think>so</think>\n{BLOCK}", TRUTH, 1.0, 1.0),
        (f"<think>\n\n</think>\n\n{BLOCK}", TRUTH, 1.0, 0.0),  # empty thinking is none
        (f"<think>so\n{BLOCK}", TRUTH, 0.0, 0.0),
        (f"<think>{BLOCK}</think>", TRUTH, 0.0, 0.0),  # thinking is no call
        (f"<think>so</think>\n{BLOCK}\n{BLOCK}", TRUTH, 0.0, 0.0),
        (f"<think>so</think>\nHere:\n{BLOCK}", TRUTH, 0.0, 0.0),  # the calls and nothing else
        ("<think>so</think>\nIt is cold.", TRUTH, 0.0, 0.0),
        ("<think>so</think>\nNo tool does that.", NO_CALL, 1.0, 1.0),
        ("No tool does that.", NO_CALL, 1.0, 0.0),
        (f"<think>so</think>\n{BLOCK}", NO_CALL, 0.0, 0.0),
        ("<think>so</think>\n<tool_call>", NO_CALL, 0.0, 0.0),
        ("<think>so</think>", NO_CALL, 0.0, 0.0),  # an answer must be given
        ("", NO_CALL, 0.0, 0.0),
    ],
)
def test_score(response, truth, instruct, strict):
    scores = {variant: compute_score("tool_calling", response, truth, variant=variant)["score"] for variant in VARIANTS}
    assert scores == {"instruct": instruct, "strict": strict}


def test_every_response_gets_the_same_keys():
    keys = {frozenset(compute_score("tool_calling", response, TRUTH)) for response in ("", BLOCK, "<tool_call>")}
    assert len(keys) == 1
