"""BFCL: its possible answers are right by its own checker, what they are not is wrong, and the command counts it."""

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.tool_calling import bfcl
from tests import stub_evaluate
from tests.helpers import ROOT, exported, make
from tests.stub_evaluate import Completion
from verl_tasks import environment, prepare, stage, tool_calls

SIZES = {"simple_python": 400, "multiple": 200, "parallel": 200, "parallel_multiple": 200, "irrelevance": 240}
# Their possible answers have an argument that their function does not take; it may be left out.
FAULTY = {("parallel_multiple", 12), ("parallel_multiple", 26)}
# One call fits two of its possible answers, and the checker gives it to the first that comes.
ORDERED = {("parallel", 178)}


@pytest.fixture(scope="module", autouse=True)
def project_root(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BFCL_PROJECT_ROOT", str(tmp_path_factory.mktemp("bfcl")))
        yield


@pytest.fixture(scope="module")
def rows() -> dict[str, list[dict]]:
    return {category: bfcl.questions(category) for category in bfcl.SINGLE_TURN}


def concrete(value):
    """One value that BFCL's possible answer stands for: in objects each value is a list of choices."""
    if isinstance(value, dict):
        chosen = {key: [c for c in choices if c != ""] for key, choices in value.items()}
        return {key: concrete(choices[0]) for key, choices in chosen.items() if choices}
    return [concrete(v) if isinstance(v, dict) else v for v in value] if isinstance(value, list) else value


def answer(row: dict, optional: bool) -> list[dict]:
    """The calls of BFCL's possible answer, in its order; with or without the arguments that may be left out (those
    with "" among the choices)."""
    truth, calls = json.loads(row["reward_model"]["ground_truth"]), []
    required = {function["name"]: function["parameters"]["required"] for function in truth["function"]}
    for call in truth["possible_answer"]:
        ((name, choices),) = call.items()
        kept = {k: v for k, v in choices.items() if optional or "" not in v or k in required[name]}
        values = {k: [choice for choice in v if choice != ""] for k, v in kept.items()}
        arguments = {k: concrete(v[0]) for k, v in values.items() if v}
        calls.append({"name": name.replace(".", "_"), "arguments": arguments})
    return calls


def accuracy(row: dict, response: str) -> float:
    return bfcl.compute_score(row["data_source"], response, row["reward_model"]["ground_truth"], row["extra_info"])[
        "acc"
    ]


def test_all_questions_are_there_and_become_valid_rows(rows, tmp_path):
    assert {category: len(of_category) for category, of_category in rows.items()} == SIZES
    assert bfcl.write_questions(tmp_path / "test.parquet") == SIZES
    assert stage.validate_parquet(tmp_path / "test.parquet") == sum(SIZES.values())


def test_the_first_rows_are_the_first_questions_of_each_category(tmp_path):
    bfcl.write_questions(tmp_path / "test.parquet")
    order = [(r["data_source"], r["extra_info"]["index"]) for r in stage.read_rows(tmp_path / "test.parquet")]
    for n in (1, 7, 200, 220, 300, 400):
        first = order[: sum(min(n, size) for size in SIZES.values())]
        assert set(first) == {(category, i) for category, size in SIZES.items() for i in range(min(n, size))}


def test_tools_are_openai_schemas(rows):
    schemas = [tool for of_category in rows.values() for row in of_category for tool in environment.tools_of(row)]
    types = {"object", "array", "string", "number", "integer", "boolean"}

    def check(schema):
        assert schema["type"] in types
        for inner in [*schema.get("properties", {}).values(), *([schema["items"]] if "items" in schema else [])]:
            check(inner)

    for tool in schemas:
        assert tool["type"] == "function" and "." not in tool["function"]["name"]
        check(tool["function"]["parameters"])


@pytest.mark.parametrize("optional", [False, True])
@pytest.mark.parametrize("category", bfcl.AST)
def test_every_possible_answer_is_right_in_any_order(rows, category, optional):
    for index, row in enumerate(rows[category]):
        calls = answer(row, optional)
        assert {call["name"] for call in calls} <= {tool["function"]["name"] for tool in environment.tools_of(row)}
        place = (category, index)
        faulty = optional and place in FAULTY
        assert accuracy(row, tool_calls.render_calls(calls)) == (not faulty), place
        other_way_round = f"I call it.\n{tool_calls.render_calls(calls[::-1])}"
        assert accuracy(row, other_way_round) == (not faulty and place not in ORDERED), place


def first_argument(calls: list[dict], value) -> list[dict]:
    changed = json.loads(json.dumps(calls))
    for call in changed:
        for name in list(call["arguments"])[:1]:
            call["arguments"][name] = value
    return changed


WRONG = {
    "another function": lambda calls: [{**calls[0], "name": "no_such_function"}, *calls[1:]],
    "a call is missing": lambda calls: calls[1:],
    "a call too many": lambda calls: [*calls, calls[0]],
    "an argument too many": lambda calls: [
        {**calls[0], "arguments": {**calls[0]["arguments"], "no_such_argument": 1}},
        *calls[1:],
    ],
    "no arguments": lambda calls: [{**call, "arguments": {}} for call in calls],
    "another text": lambda calls: first_argument(calls, "no such value"),
    "another number": lambda calls: first_argument(calls, -987654321),
    "null": lambda calls: first_argument(calls, None),
}


@pytest.mark.parametrize("mutation", WRONG)
@pytest.mark.parametrize("category", bfcl.AST)
def test_an_impossible_answer_is_wrong(rows, category, mutation):
    tried = 0
    for index, row in enumerate(rows[category]):
        calls = answer(row, optional=False)
        changed = WRONG[mutation](calls)
        if changed == calls:  # a function without required arguments
            continue
        if mutation == "no arguments" and any(accuracy(row, tool_calls.render_calls([c])) for c in changed):
            continue
        tried += 1
        assert accuracy(row, tool_calls.render_calls(changed)) == 0.0, (category, index)
    assert tried > 0.9 * len(rows[category])


def test_a_name_with_its_dot_is_wrong_for_the_tool_was_offered_with_an_underscore(rows):
    row = rows["simple_python"][1]
    assert [tool["function"]["name"] for tool in environment.tools_of(row)] == ["math_factorial"]
    assert accuracy(row, tool_calls.render_calls([{"name": "math_factorial", "arguments": {"number": 5}}])) == 1.0
    assert accuracy(row, tool_calls.render_calls([{"name": "math.factorial", "arguments": {"number": 5}}])) == 0.0


CALL = '<tool_call>{"name": "determine_body_mass_index", "arguments": {"weight": 1.0, "height": 2.0}}</tool_call>'
CUT = '<tool_call>{"name": "determine_body_mass_index", "arg'


@pytest.mark.parametrize(
    ("response", "opened", "acc", "unreadable"),
    [
        ("None of the functions fits.", False, 1, 0),
        ("", False, 1, 0),
        (CALL, False, 0, 0),
        (CALL.removeprefix("<tool_call>").removesuffix("</tool_call>"), False, 0, 0),
        (f"<think>Or {CALL}?</think>No function fits.", False, 1, 0),
        (f"Or {CALL}?</think>No function fits.", True, 1, 0),
        (f"Hm.</think>{CALL}", True, 0, 0),
        (CUT, False, 1, 1),  # as in BFCL: what cannot be read is no call
    ],
)
def test_irrelevance_wants_no_call(rows, response, opened, acc, unreadable):
    row = rows["irrelevance"][0]
    extra = {**row["extra_info"], "think_opened": opened}
    score = bfcl.compute_score("irrelevance", response, row["reward_model"]["ground_truth"], extra)
    assert score == {"score": acc, "acc": acc, "unreadable": unreadable}


@pytest.mark.parametrize(
    ("response", "why"),
    [
        ("The factorial is 120.", "no call"),
        ('<tool_call>{"name": "math_factorial"', "call cannot be read"),
        (tool_calls.render_calls([{"name": "f", "arguments": {}}]), "simple_function_checker:wrong_func_name"),
        (tool_calls.render_calls([{"name": "math_factorial", "arguments": {"number": "5"}}]), "type_error:simple"),
        (tool_calls.render_calls([{"name": "math_factorial", "arguments": {"number": 6}}]), "value_error:others"),
        (tool_calls.render_calls([{"name": "math_factorial", "arguments": {"number": 5}}]), ""),
    ],
)
def test_why_an_answer_is_wrong(rows, response, why):
    truth = json.loads(rows["simple_python"][1]["reward_model"]["ground_truth"])
    assert bfcl.judge("simple_python", response, truth)[:2] == (why == "", why)


def test_an_answer_on_which_the_checker_raises_is_wrong(rows):
    """A float argument is converted by float(): too large an integer raises OverflowError in BFCL's checker."""
    for row in rows["simple_python"]:
        truth = json.loads(row["reward_model"]["ground_truth"])
        details = truth["function"][0]["parameters"]["properties"]
        calls = answer(row, optional=False)
        if floats := [k for k in calls[0]["arguments"] if details[k]["type"] == "float"]:
            calls[0]["arguments"][floats[0]] = 10**400
            assert (
                bfcl.judge("simple_python", tool_calls.render_calls(calls), truth)[1] == "checker raised OverflowError"
            )
            return
    pytest.fail("no question with a float")


TEXT = st.text("aB1 ._\"'{}<>/é\\", max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


@given(data=st.data())
def test_any_arguments_get_a_score(rows, data):
    row = data.draw(st.sampled_from([row for category in bfcl.SINGLE_TURN for row in rows[category][:60]]))
    calls = answer(row, optional=False) or [
        {"name": environment.tools_of(row)[0]["function"]["name"], "arguments": {"x": 1}}
    ]
    for call in calls:
        for name in call["arguments"]:
            if data.draw(st.booleans()):
                call["arguments"][name] = data.draw(JSON)
    text = tool_calls.render_calls(calls)
    cut = data.draw(st.integers(0, len(text)))
    for response in (text, text[:cut]):
        score = bfcl.compute_score(row["data_source"], response, row["reward_model"]["ground_truth"], row["extra_info"])
        assert score.keys() == {"score", "acc", "unreadable"} and set(score.values()) <= {0.0, 1.0}


def test_the_package_runs_without_traces(rows):
    import bfcl_eval
    from bfcl_eval.constants.eval_config import LOCK_DIR  # it was made by the first test that imported the package

    assert not [name for name in bfcl.STAND_INS if name.startswith("bfcl_eval") and name in sys.modules]
    beside = Path(bfcl_eval.__file__).parents[1]
    assert not [name for name in ("result", "score", ".file_locks") if (beside / name).exists()]
    assert LOCK_DIR.is_dir() and LOCK_DIR.parent != beside


@pytest.mark.parametrize("installed", ["2025.1.1", None])
def test_another_version_is_refused_in_one_line(monkeypatch, installed):
    def version(name):
        if installed is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(prepare.DataError, match=r"bfcl-eval 2026\.3\.23 is needed, (2025\.1\.1|none) is installed"):
        bfcl.package.__wrapped__()


def test_the_interval_of_an_unweighted_mean():
    one = stage.proportion(3, 10)
    same = bfcl.unweighted_mean([one])
    assert (same.value, same.low, same.high) == pytest.approx((one.value, one.low, one.high))
    # by hand: (0.2 + 0.6) / 2, less sqrt(0.03^2 + 0.04^2) / 2, plus sqrt(0.06^2 + 0.08^2) / 2
    mean = bfcl.unweighted_mean([stage.Estimate(0.2, 0.17, 0.26), stage.Estimate(0.6, 0.56, 0.68)])
    assert (mean.value, mean.low, mean.high) == pytest.approx((0.4, 0.375, 0.45))


class ToolEngine(stub_evaluate.TableEngine):
    def generate(self, requests, sampling):
        assert (sampling.n, sampling.temperature, sampling.greedy) == (1, 0.0, False)
        for r in requests:
            assert r.tools and all(tool["type"] == "function" for tool in r.tools)
            self._asked(r.index)
            answer = self.table[r.index]
            yield r, [Completion("", stage.TOO_LONG, 0, 0.0) if answer is None else Completion(answer, "stop", 9, 0.1)]


@pytest.fixture
def command(tmp_path):
    """Runs bfcl.py with models that answer from a table."""

    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess:
        given = {"ARTIFACTS": str(tmp_path / "artifacts"), **variables}
        with stub_evaluate.answering(engine=ToolEngine):
            return stub_evaluate.called(bfcl.main, arguments, exported(ROOT / "tasks/tool_calling/train.sh", given))

    return run


@pytest.mark.medium
def test_the_command_counts_by_category_and_goes_on_from_a_smaller_limit(command, rows, tmp_path):
    right = [
        tool_calls.render_calls(answer(rows[c][i], optional=False)) or "no" for i in range(3) for c in bfcl.SINGLE_TURN
    ]
    base = ["no call"] * 15
    trained = list(right)
    trained[1], trained[8], trained[4] = "no", None, CALL  # multiple 0, parallel_multiple 1, irrelevance 0
    for name, table in (("base", base), ("trained", trained)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "table.json").write_text(json.dumps(table))

    first = command(f"trained={tmp_path / 'trained'}", LIMIT="1")
    assert first.returncode == 0, first.stdout
    asked = tmp_path / "trained/asked.jsonl"
    assert asked.read_text().split() == list("01234")

    result = command(f"base={tmp_path / 'base'}", f"trained={tmp_path / 'trained'}", LIMIT="3")
    assert result.returncode == 0, result.stdout
    assert sorted(map(int, asked.read_text().split())) == list(range(15))  # each question once
    (path,) = (tmp_path / "artifacts/eval/bfcl").glob("trained-*/summary.json")
    summary = json.loads(path.read_text())
    assert summary["prompts"] == dict.fromkeys(bfcl.SINGLE_TURN, 3)
    assert summary["too_long"] == 1
    value = {name: estimate["value"] for name, estimate in summary["metrics"].items()}
    assert value == pytest.approx(
        {
            "simple_python": 1,
            "multiple": 2 / 3,
            "parallel": 1,
            "parallel_multiple": 2 / 3,
            "irrelevance": 2 / 3,
            "AST mean": 10 / 12,
            "unreadable": 0,
            "truncated": 0,
        }
    )
    wilson = stage.proportion(2, 3)
    assert summary["metrics"]["multiple"] == pytest.approx(vars(wilson))
    assert summary["wrong"]["multiple"] == {"no call": 1}
    assert summary["wrong"]["parallel_multiple"] == {"prompt too long": 1}
    assert summary["wrong"]["irrelevance"] == {"called a function": 1}
    lines = {line.split("│")[1].strip(): line for line in result.stdout.splitlines() if line.count("│") > 4}
    assert "+0.833" in lines["AST mean"] and "-0.333" in lines["irrelevance"]
    assert lines["prompts too long"].split("│")[4].strip() == "1"

    again = command(f"base={tmp_path / 'base'}", f"trained={tmp_path / 'trained'}", LIMIT="3")
    assert "up to date: nothing to sample" in again.stdout


def test_without_a_model_one_line_says_so(command):
    result = command()
    assert result.returncode == 1 and result.stdout == "error: no model is given: bfcl.py LABEL=MODEL ...\n"


def test_another_task_has_no_bfcl():
    result = make("bfcl", TASK="countdown", STACK="cpu", MODEL="some/model", ARTIFACTS="/nonexistent")
    assert result.returncode != 0
    assert "error: TASK=countdown: has no bfcl.py; `make bfcl` is for tool_calling" in result.stdout
