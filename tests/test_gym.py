"""rewards/gym.py: every environment of reasoning-gym as a task, through the sandbox."""

import contextlib
import functools
import json
import os
import re
import sys
import types
from itertools import islice

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reasoning_gym.factory import DATASETS

from tests.test_template import part_of
from verl_tasks.rewards import gym
from verl_tasks.rewards.answers import last_answer
from verl_tasks.rows import DataError, Example

ALONE = [env for env in sorted(DATASETS) if env != "composite"]
NO_WORKED_ANSWER = {"boxnet", "rush_hour"}
KEYS = {"score", "acc", "format", "failed"}
WRONG = ("", "junk", "0", "1", "No", "[]", "{}", "1+1", "[[1]]", "4*6*1*1", "Integral(x, x)", "x" * 5000)


@pytest.fixture(scope="module")
def score():
    """One scorer for all environments: a composite of them, so one worker."""
    return gym.scorer("composite", {"datasets": [{"name": env} for env in ALONE]})


def answered(text: str) -> str:
    return f"<think>{text} <answer>no</answer></think>\n<answer>{text}</answer>"


def some(env: str, count: int, config: dict | None = None, seed: int = 1) -> list[Example]:
    return list(islice(gym.examples(env, config, seed), count))


@contextlib.contextmanager
def scorer(env: str, config: dict | None = None, seconds: float = 5.0):
    """gym.scorer, whose worker ends with the block."""
    yield gym.scorer(env, config, seconds)
    gym._sandbox(env, json.dumps(config or {}, sort_keys=True), seconds).close()


@functools.cache
def truth_of(env: str):
    return some(env, 1)[0].ground_truth


def test_the_cases_of_a_new_task_hold():
    made = {}
    exec(part_of("environment", "tests"), made)
    assert len(DATASETS) == 106
    with scorer("chain_sum") as score:
        assert [(response, score(response, made["TRUTH"])["score"]) for response, _ in made["CASES"]] == made["CASES"]


@pytest.mark.medium
@pytest.mark.parametrize("env", ALONE)
def test_an_environment_is_trainable(env, score):
    """Its own answers get 1 after the way through JSON to the worker, wrong ones less; each row has the same keys."""
    examples = some(env, 4)
    assert len({example.prompt for example in examples}) > 1
    wrong = []
    for example in examples:
        truth = json.dumps(example.ground_truth)
        if env in NO_WORKED_ANSWER:
            assert example.demonstration is None
        elif example.demonstration or env != "intermediate_integration":
            assert score(example.demonstration, truth) == {"score": 1.0, "acc": 1.0, "format": 1.0, "failed": 0.0}
            assert score(answered(last_answer(example.demonstration)), truth)["acc"] == 1.0
        wrong += [score(answered(text), truth) for text in WRONG]
        assert score("no answer", truth) == {"score": 0.0, "acc": 0.0, "format": 0.0, "failed": 0.0}
    assert {frozenset(row) for row in wrong} == {frozenset(KEYS)}
    assert all(0 <= value <= 1 for row in wrong for value in row.values())
    assert sum(row["score"] for row in wrong) < 0.5 * len(wrong)


def test_an_empty_answer_can_be_right(score):
    example = next(e for e in gym.examples("ab", None, 1) if e.ground_truth["answer"] == "")
    assert example.demonstration == "<answer></answer>"
    assert score(example.demonstration, example.ground_truth) == {"score": 1, "acc": 1, "format": 1, "failed": 0}


@pytest.mark.parametrize(
    ("env", "answer", "fraction"),
    [
        ("game_of_life_halting", "any text", 0.0),  # the package gives it 1
        ("puzzle24", "4*6*1*1", 0.01),  # so too: four numbers, but not these
        ("intermediate_integration", "Integral({integrand}, x)", 0.0),  # and the problem as its own answer
    ],
)
def test_what_the_package_takes_wrongly(score, env, answer, fraction):
    for example in some(env, 8):
        entry = gym._decoded(example.ground_truth)
        if sorted(entry["metadata"].get("numbers", [])) != [1, 1, 4, 6]:
            text = answer.format(integrand=entry["metadata"].get("integrand"))
            assert score(answered(text), example.ground_truth)["score"] == fraction


@pytest.mark.parametrize(
    "text", ["nan", "NaN", "-nan", "(nan)", "nanj", "nan i", "nan+nanj", "1e999+nanj", "-Infinity"]
)
@pytest.mark.parametrize("env", ["complex_arithmetic", "coin_flip", "decimal_arithmetic", "polynomial_equations"])
def test_a_number_that_is_not_finite_scores_0(score, env, text):
    for example in some(env, 4):
        assert score(answered(text), example.ground_truth)["score"] == 0.0


def test_a_word_that_looks_like_nan_is_a_word():
    source = gym.dataset("spell_backward")
    entry = {"question": "", "answer": "nan", "metadata": {"source_dataset": "spell_backward"}}
    assert gym.score_entry(source, "nan", entry) == 1.0
    assert gym.score_entry(source, "nat", entry) > 0.5


# Answers made of the truth, and whether they are right.
FORMS = {
    "coin_flip": (["0", "0.", "1e-9", "0/1", "1e400", "", "٠", "9{}"], ["{}"]),
    "gsm_symbolic": (["-{}", "{}/2", "{0} or {0}1", "{}.5"], ["{}", "{} apples", "${}.00"]),
    "spell_backward": (["{0} or {0}"], ["{}"]),
}


@pytest.mark.parametrize("env", FORMS)
def test_what_is_not_the_truth_alone_is_not_right(score, env):
    for example in some(env, 8, {"min_trials": 6, "max_trials": 9} if env == "coin_flip" else None):
        for forms, acc in zip(FORMS[env], (0.0, 1.0), strict=True):
            for form in forms:
                text = form.format(example.ground_truth["answer"])
                assert score(answered(text), example.ground_truth)["acc"] == acc, text


ATTACKS = [
    "__import__('os').system('touch {new}')",
    "[open('{new}', 'w')]",
    "[[c for c in open('{new}', 'w').name]]",
    "exec('import os; os.remove(\"{old}\")')",
    "__import__('os').kill(__import__('os').getppid(), 9)",
    "__import__('os')._exit(0)",
    "[__import__('os')._exit(0)]",
    "exit(0)",
    "[0] * 10**12",
    "().__class__.__base__.__subclasses__()",
    "(lambda: __import__('os').fork())()",
    "x.__class__",
    "preview(x)",
    "sympify('__import__(chr(111))')",
    "(" * 5000 + ")" * 5000,
    "\x00\ud800",
]
EVALUATING = [
    "binary_matrix",
    "spiral_matrix",
    "string_insertion",
    "n_queens",
    "number_sorting",
    "countdown",
    "puzzle24",
    "simple_integration",
    "intermediate_integration",
    "polynomial_multiplication",
]


@pytest.mark.parametrize("env", EVALUATING)
def test_a_hostile_answer_writes_nothing_and_stops_nothing(env, tmp_path, score):
    example = next(example for example in gym.examples(env, None, 3) if example.demonstration)
    (tmp_path / "old").write_text("a")
    for attack in ATTACKS:
        attack = attack.replace("{new}", f"{tmp_path}/new").replace("{old}", f"{tmp_path}/old")
        row = score(answered(attack), example.ground_truth)
        assert row.keys() == KEYS and row["acc"] == 0.0
        assert row["failed"] == 0.0 or "exit" not in attack  # what runs it ends the worker
        assert os.listdir(tmp_path) == ["old"]
    assert score(example.demonstration, example.ground_truth)["acc"] == 1.0


def test_code_in_an_answer_is_not_run():
    """Nor could it score itself: in one process with the scorer, with ``eval``, it can."""
    dataset = gym.dataset("spiral_matrix")
    entry = dataset[0]
    cheat = "setattr(__import__('sys').modules['tests_cheat'], 'done', True)"
    sys.modules["tests_cheat"] = cheated = types.ModuleType("tests_cheat")
    try:
        with gym.answers_not_run():
            assert gym.score_entry(dataset, cheat, entry) == 0.0
        assert not hasattr(cheated, "done")
        gym.score_entry(dataset, cheat, entry)
        assert cheated.done  # the package's own scorer runs it
    finally:
        del sys.modules["tests_cheat"]


@pytest.mark.medium
def test_an_endless_computation_fails_and_the_next_answer_scores():
    example = some("countdown", 1)[0]
    with scorer("countdown", seconds=1) as score:
        assert score(answered("9**9**9"), example.ground_truth) == {"score": 0, "acc": 0, "format": 1, "failed": 1}
        assert score(example.demonstration, example.ground_truth)["acc"] == 1.0


@pytest.mark.medium
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    env=st.sampled_from(
        ["boxnet", "codeio", "complex_arithmetic", "cryptarithm", "knight_swap", "rubiks_cube", "sudoku"]
    ),
    answer=st.one_of(st.text(), st.text(alphabet="[]{}(),:\"'0123456789.eE+-ABCwB \n"), st.integers().map(str)),
    wrapped=st.booleans(),
)
def test_any_text_gets_a_score(score, env, answer, wrapped):
    row = score(answered(answer) if wrapped else answer, truth_of(env))
    assert row.keys() == KEYS
    assert all(type(value) is float and 0 <= value <= 1 for value in row.values())


@settings(max_examples=60)
@given(text=st.one_of(st.text(), st.from_regex(r"[0-9x+*/()., ^a-z_-]{0,60}")))
def test_only_expressions_reach_sympy(text):
    parsed = []
    try:
        gym.parse_expression(lambda text, local_dict: parsed.append(text), text)
    except ValueError:
        assert not parsed
    else:
        forbidden = r"__|[a-zA-Z_]\.(?!\d)|\.[a-zA-Z_]{2}|[^\x00-\x7f]|['\"\[\]{};=]"
        assert not re.search(forbidden, text.replace("..", "??"))


@pytest.mark.parametrize(
    ("env", "config", "problem"),
    [
        ("chain_summ", {}, "chain_summ.*did you mean chain_sum"),
        ("", {}, "no environment ''; it has"),
        ("chain_sum", {"min_term": 2}, "'min_term'; did you mean min_terms"),
        ("chain_sum", {"min_terms": "2"}, "min_terms='2'.*valid integer, such as"),
        ("chain_sum", {"min_terms": True}, "valid integer"),
        ("chain_sum", {"min_terms": -1}, "CONFIG of chain_sum"),
        ("chain_sum", {"min_terms": 9, "max_terms": 2}, "CONFIG of chain_sum.*max"),
        ("chain_sum", {"seed": 1}, "seed comes from SEED"),
        ("chain_sum", [1], "must be a JSON object"),
        ("word_sorting", {"transformation": "upside"}, "transformation='upside'.*should be 'lowercase'"),
        ("time_intervals", {"min_date": "soon"}, "min_date='soon'"),
        ("composite", {}, "at least one dataset"),
        ("composite", {"datasets": [{"name": "gdc"}]}, "gdc.*did you mean gcd"),
        ("composite", {"datasets": [{"name": "gcd", "config": {"min_number": 1}}]}, "did you mean.*min_numbers"),
        ("composite", {"datasets": ["gcd"]}, "must be .*name"),
    ],
)
def test_a_bad_setting_is_one_line_that_helps(env, config, problem):
    with pytest.raises(DataError, match=problem) as raised:
        next(gym.examples(env, config, 1))
    assert "\n" not in str(raised.value)


@pytest.mark.medium
def test_the_scorer_names_a_bad_setting_and_a_ground_truth_of_another_kind():
    with pytest.raises(RuntimeError, match=r"DataError.*did you mean chain_sum"):
        gym.scorer("chain_summ")(answered("1"), {"answer": "1", "metadata": {}})
    with pytest.raises(DataError, match="make data"):
        gym.scorer("chain_sum")(answered("1"), "12")


CONFIGS = {
    "chain_sum": {"min_terms": 5, "max_terms": 5, "min_digits": 1},
    "word_sorting": {"transformation": "uppercase"},
    "time_intervals": {"min_date": "2000-01-01", "max_date": "2010-12-31", "task_types": ["date"]},
    "polynomial_multiplication": {"variables": ["a", "b"]},
    "arc_agi": {"board_format_opts": {"alphabet": ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j"]}},
}


def test_settings_reach_the_questions():
    for env, config in CONFIGS.items():
        assert some(env, 1, config)[0].prompt not in {other.prompt for other in some(env, 1)}, env


@pytest.mark.medium
def test_settings_reach_the_scorer():
    parts = [{"name": name, "config": config} for name, config in CONFIGS.items()] + [{"name": "lcm", "weight": 2}]
    config = {"datasets": parts}
    examples = some("composite", 12, config)
    assert len({example.ground_truth["metadata"]["source_dataset"] for example in examples}) > 3
    with scorer("composite", config) as score:
        assert all(score(example.demonstration, example.ground_truth)["acc"] == 1.0 for example in examples)


@pytest.mark.parametrize("env", ["chain_sum", "list_functions"])  # the second draws from the global generator
def test_examples_depend_on_the_seed_and_go_on(env, monkeypatch):
    monkeypatch.setattr(gym, "CHUNK", 5)
    examples = some(env, 12)
    assert len({example.prompt for example in examples}) == 12
    assert examples == some(env, 12)
    assert not {example.prompt for example in examples} & {example.prompt for example in some(env, 12, seed=2)}


def test_an_environment_without_examples_is_named(monkeypatch):
    monkeypatch.setattr(gym, "dataset", lambda *arguments: {})
    with pytest.raises(DataError, match="word_ladder: makes no entry"):
        next(gym.examples("word_ladder", None, 1))


VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.fractions()),
    lambda inner: st.one_of(
        st.lists(inner),
        st.lists(inner).map(tuple),
        st.dictionaries(st.text(), inner),
        st.dictionaries(st.one_of(st.integers(), st.tuples(st.integers(), st.text())), inner),
        st.sets(st.integers()),
        st.frozensets(st.text()),
    ),
    max_leaves=10,
)


@given(value=VALUES)
def test_what_is_stored_comes_back_with_its_types(value):
    back = gym._decoded(json.loads(json.dumps(gym._encoded(value))))
    assert (back, repr(type(back))) == (value, repr(type(value)))
    assert repr(back) == repr(value) or isinstance(value, set | frozenset | dict | list | tuple)


def test_numpy_is_stored_as_plain_numbers():
    import numpy

    value = {"a": numpy.int64(3), "b": numpy.array([[1, 2]]), "c": numpy.str_("x"), "d": numpy.bool_(True)}
    assert gym._encoded(value) == {"a": 3, "b": [[1, 2]], "c": "x", "d": True}
    with pytest.raises(DataError, match="complex"):
        gym._encoded([1j])
