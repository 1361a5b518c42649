"""BFCL's multi-turn questions: the package's own answers are right, others are wrong, hostile calls do nothing."""

import functools
import importlib
import inspect
import json
import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tasks.tool_calling import bfcl, bfcl_apis
from tasks.tool_calling.bfcl_episodes import APIS, MOST_STEPS, MULTI_TURN, Environment
from tests import stub_evaluate
from tests.helpers import ROOT, exported
from verl_tasks import environment, stage, tool_calls


@functools.cache
def rows(category: str) -> list[dict]:
    return bfcl.questions(category)


def truth(row: dict) -> dict:
    return json.loads(row["reward_model"]["ground_truth"])


def answers(row: dict) -> list[str]:
    """The package's own answer as a model writes it: the calls of each of the user's turns, then a text that ends it.
    A message holds them all: alone, 33 of one turn would be more than MOST_STEPS."""
    question, found = truth(row), []
    methods = bfcl_apis.Apis(question).methods
    for turn in question["answer"]:
        calls = []
        for call in map(bfcl_apis.literal_call, turn):
            named = inspect.signature(methods[call["name"]]).bind(*call["positional"], **call["arguments"]).arguments
            calls.append({"name": call["name"], "arguments": dict(named)})
        found += [tool_calls.render_calls(calls), "Done."] if calls else ["Done."]
    return found


@pytest.mark.medium
@pytest.mark.parametrize("category", MULTI_TURN)
def test_the_packages_own_answers_are_right(category):
    wrong = [
        index
        for index, row in enumerate(rows(category))
        if environment.replayed(Environment, row, answers(row))[0] != 1.0
    ]
    assert len(rows(category)) == 200 and wrong == []


@pytest.mark.parametrize("category", MULTI_TURN)
def test_results_are_those_of_the_packages_own_execution(category, tmp_path, monkeypatch):
    """The package runs its own answers by eval(); they are no hostile text."""
    monkeypatch.setenv("BFCL_PROJECT_ROOT", str(tmp_path))
    package = importlib.import_module("bfcl_eval.eval_checker.multi_turn_eval.multi_turn_utils")
    for index, row in enumerate(rows(category)[:100]):
        question = truth(row)
        apis = bfcl_apis.Apis(question)
        where = (question["initial_config"], question["involved_classes"], "test", f"{category}_{index}")
        for turn in question["answer"]:
            found = package.execute_multi_turn_func_call(turn, *where, long_context=question["long_context"])[0]
            assert apis.results(list(map(bfcl_apis.literal_call, turn))) == found, index


@pytest.mark.parametrize("category", MULTI_TURN)
def test_an_answer_without_its_calls_or_with_half_of_them_is_wrong(category):
    row = rows(category)[0]
    right = answers(row)
    assert environment.replayed(Environment, row, ["No."] * len(truth(row)["answer"]))[0] == 0.0
    last = max(index for index, answer in enumerate(right) if answer != "Done.")
    assert environment.replayed(Environment, row, right[:last] + right[last + 1 :])[0] == 0.0


def test_a_missing_function_comes_with_a_later_turn():
    row = rows("multi_turn_miss_func")[0]
    assert "sort" not in {tool["function"]["name"] for tool in environment.tools_of(row)}
    episode, start = environment.begun(Environment, row)
    added = []
    for answer in answers(row):
        step, _ = environment.stepped(episode, row, start.tools, answer)
        added += [message["content"] for message in step.messages if '"name": "sort"' in message["content"]]
    (message,) = added
    assert message.endswith("I have updated some more functions you can choose from. What about now?")


def played(*calls: dict, category: str = "multi_turn_base", index: int = 0) -> tuple:
    """The step that follows a message with ``calls``, and how many of them failed."""
    row = rows(category)[index]
    episode, start = environment.begun(Environment, row)
    return environment.stepped(episode, row, start.tools, tool_calls.render_calls(list(calls)))


HOSTILE = {
    "dunder": {"name": "__init__", "arguments": {}},
    "private": {"name": "_load_scenario", "arguments": {"scenario": {}}},
    "attribute": {"name": "cd.__globals__", "arguments": {}},
    "builtin": {"name": "eval", "arguments": {"x": "1"}},
    "code as a name": {"name": "__import__('os').system('touch hacked')", "arguments": {}},
    "self": {"name": "cd", "arguments": {"self": 1, "folder": "document"}},
    "code as the name of an argument": {"name": "cd", "arguments": {"folder=__import__('os').getcwd()": 1}},
    "another class's method": {"name": "add_to_watchlist", "arguments": {"stock": "A"}},
}


@pytest.mark.parametrize("call", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_call_is_an_error_that_the_model_reads(call):
    step, failed = played(call)
    assert failed == 1 and not step.done
    assert step.messages[0]["content"].startswith("Error during execution:")


def test_a_nested_call_in_an_argument_stays_text():
    text = "__import__('os').getcwd() or pwd()"
    step, failed = played({"name": "mkdir", "arguments": {"dir_name": text}}, {"name": "ls", "arguments": {}})
    assert failed == 0 and text in step.messages[1]["content"]


def math_row() -> int:
    return next(i for i, row in enumerate(rows("multi_turn_base")) if "MathAPI" in truth(row)["involved_classes"])


@pytest.mark.medium
@pytest.mark.parametrize(
    "call",
    [
        {"name": "power", "arguments": {"base": 9, "exponent": 10**10}},  # takes for ever
        {"name": "logarithm", "arguments": {"value": 2, "base": 10, "precision": 10**9}},
        {"name": "power", "arguments": {"base": [0] * 1000, "exponent": 10**9}},  # an error of types
    ],
    ids=["power", "precision", "type"],
)
def test_a_call_beyond_the_limits_ends_in_bounded_time(call, monkeypatch):
    monkeypatch.setattr(APIS, "_seconds", 2.0)
    began = time.monotonic()
    step, failed = played(call, index=math_row())
    assert time.monotonic() - began < 60 and failed <= 1
    assert step.reward == 0.0 and (step.done or step.messages)
    assert played({"name": "add", "arguments": {"a": 1, "b": 2}}, index=math_row())[0].messages == [
        {"role": "tool", "content": '{"result": 3}'}
    ]


def test_arguments_of_10_mb_are_malformed():
    row = rows("multi_turn_base")[0]
    episode, start = environment.begun(Environment, row)
    call = {"name": "echo", "arguments": {"content": "x" * 10_000_000}}
    step, failed = environment.stepped(episode, row, start.tools, tool_calls.render_calls([call]))
    assert failed == 1 and step.messages == truth(row)["later"][0]


def test_a_loop_of_the_same_call_ends_after_the_packages_number_of_steps():
    row = rows("multi_turn_base")[0]
    episode, start = environment.begun(Environment, row)
    answer = tool_calls.render_calls([{"name": "ls", "arguments": {}}])
    done = [environment.stepped(episode, row, start.tools, answer)[0].done for _ in range(MOST_STEPS + 1)]
    assert done == [False] * MOST_STEPS + [True]
    prompts = importlib.import_module("bfcl_eval.constants.default_prompts")
    assert prompts.MAXIMUM_STEP_LIMIT == MOST_STEPS


def test_results_that_are_too_long_for_the_sandbox_are_cut():
    calls = [{"name": "cat", "arguments": {"file_name": "f"}}] * 3
    state = {"root": {"a": {"type": "directory", "contents": {"f": {"type": "file", "content": "é" * 40_000}}}}}
    question = {"involved_classes": ["GorillaFileSystem"], "initial_config": {"GorillaFileSystem": state}}
    found = APIS.call("results", question | {"long_context": False}, [calls])
    assert [len(text) > 1_000 for text in found] == [True] * 3


def test_rows_are_written_and_read(tmp_path):
    assert bfcl.write_questions(tmp_path / "rows.parquet", ("multi_turn_miss_func",)) == {"multi_turn_miss_func": 200}
    assert stage.validate_parquet(tmp_path / "rows.parquet") == 200


def test_categories_are_groups_or_names():
    assert bfcl.chosen("multi_turn") == MULTI_TURN
    assert bfcl.chosen("multi_turn_base, multiple") == ("multiple", "multi_turn_base")
    with pytest.raises(stage.SettingsError, match="CATEGORIES=live: no category live; there are: single_turn, multi"):
        bfcl.chosen("live")
    with pytest.raises(stage.SettingsError, match="CATEGORIES=,: no category ,;"):
        bfcl.chosen(",")


def test_a_window_that_no_turn_fits_into_is_refused():
    settings = SimpleNamespace(MAX_NEW_TOKENS=64)
    with pytest.raises(stage.SettingsError, match="WINDOW=64: must be more than MAX_NEW_TOKENS=64, a turn"):
        bfcl.limits(settings, bfcl.Variables("multi_turn", 64))


def rollout(index: int, category: str, acc: float | None, ended: str = "stop") -> stage.Rollout:
    reward = acc is not None and {"score": acc, "acc": acc, "turns": 4.0, "tool_errors": 1.0, "timeout": 0.0}
    return stage.Rollout(index, "sampled", 0, "", ended, 50, 0.0, [], category, "{}", {}, reward or None)


def test_the_summary_has_shares_with_intervals_means_and_how_episodes_ended():
    found = [rollout(i, category, float(i == 0)) for i in range(2) for category in MULTI_TURN]
    found += [rollout(2, "multi_turn_base", 0.0, "length"), rollout(3, "multi_turn_base", None, stage.TOO_LONG)]
    summary = bfcl.summarize(found)
    assert summary["metrics"]["multi_turn_base"] == pytest.approx(vars(stage.proportion(1, 4)))
    assert summary["metrics"]["multi-turn mean"]["value"] == pytest.approx((0.25 + 3 * 0.5) / 4)
    assert summary["metrics"]["cut"] == pytest.approx(vars(stage.proportion(1, 9)))
    assert summary["metrics"]["turns"]["value"] == 4 and summary["too_long"] == 1
    assert summary["wrong"]["multi_turn_base"] == {"stop": 1, "length": 1, "prompt too long": 1}
    names = [row[0] for row in bfcl.table_rows({"model": summary}, None)]
    assert names[:5] == [*MULTI_TURN, "multi-turn mean"] and "AST mean" not in names


@pytest.mark.slow
def test_the_command_plays_the_questions_to_its_table(tmp_path, small_model):
    shutil.copytree(small_model, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((tmp_path / "model/config.json").read_text())
    (tmp_path / "model/config.json").write_text(json.dumps(config | {"max_position_embeddings": 10**6}))
    first, second = rows("multi_turn_base")[:2]
    texts = [answers(first), ["No."] * len(truth(second)["answer"]), ["I..."]]
    table = [{"greedy": [], "sampled": [each]} for each in texts]
    (tmp_path / "model/table.json").write_text(json.dumps(table))
    given = {"ARTIFACTS": str(tmp_path / "artifacts"), "CATEGORIES": "multi_turn_base", "WINDOW": "500000"}
    variables = exported(ROOT / "tasks/tool_calling/train.sh", given | {"LIMIT": "3"})
    with stub_evaluate.answering():
        result = stub_evaluate.called(bfcl.main, (f"model={tmp_path / 'model'}",), variables)
    assert result.returncode == 0 and "multi_turn_base" in result.stdout, result.stdout
    (path,) = (tmp_path / "artifacts/eval/bfcl").glob("model-*/summary.json")
    summary = json.loads(path.read_text())
    assert summary["metrics"]["multi_turn_base"] == pytest.approx(vars(stage.proportion(1, 3)))
    assert summary["metrics"]["cut"] == pytest.approx(vars(stage.proportion(1, 3)))
    assert summary["wrong"] == {"multi_turn_base": {"stop": 1, "turn_length": 1}}


def test_the_sandbox_leaves_nothing_beside_the_package():
    beside = Path(importlib.import_module("bfcl_eval").__file__).parents[1]
    assert not [name for name in ("result", "score", ".file_locks") if (beside / name).exists()]
    assert not os.path.exists("hacked")
