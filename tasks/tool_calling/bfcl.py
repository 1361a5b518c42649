"""evaluate models on the Python categories of BFCL, CATEGORIES=single_turn or multi_turn, offline

Questions, conversion to tools and checkers come from the PyPI package bfcl-eval; the model's own tool template
renders the prompt, and sampling is greedy. docs/BFCL.md compares the numbers with the leaderboard's
(https://gorilla.cs.berkeley.edu/leaderboard.html).
"""

import functools
import importlib
import importlib.metadata
import json
import math
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np

from tasks.tool_calling import bfcl_apis, bfcl_episodes
from tasks.tool_calling.bfcl_episodes import MULTI_TURN
from verl_tasks import answers, environment, prepare, reward_function, stage, tool_calls

VERSION = "2026.3.23"
AST = ("simple_python", "multiple", "parallel", "parallel_multiple")
SINGLE_TURN = (*AST, "irrelevance")
GROUPS = {"single_turn": SINGLE_TURN, "multi_turn": MULTI_TURN}
MEANS = {"AST mean": AST, "multi-turn mean": MULTI_TURN}
MODEL = "local"  # the checker's name of the model; the checker replaces "_" in it

# The checker imports the table of all models, and with it every provider's SDK, for one flag: whether underscores have
# replaced dots in function names, as OpenAI's API requires. The conversion to tools imports parsers of Java and
# JavaScript, and retries of API calls. None of it runs here.
STAND_INS = {
    "bfcl_eval.constants.model_config": {"MODEL_CONFIG_MAPPING": {MODEL: SimpleNamespace(underscore_to_dot=True)}},
    "bfcl_eval.model_handler.parser.java_parser": {"parse_java_function_call": None},
    "bfcl_eval.model_handler.parser.js_parser": {"parse_javascript_function_call": None},
    "tenacity": dict.fromkeys(
        ("retry", "retry_if_exception_message", "retry_if_exception_type", "wait_random_exponential")
    ),
}

USED = {
    "Language": "constants.enums",
    "ModelStyle": "constants.enums",
    "GORILLA_TO_OPENAPI": "constants.type_mappings",
    "DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_PROMPTING": "constants.default_prompts",
    "ast_checker": "eval_checker.ast_eval.ast_checker",
    "convert_to_tool": "model_handler.utils",
    "is_empty_output": "utils",
    "load_dataset_entry": "utils",
    "load_ground_truth_entry": "utils",
}


@dataclass(frozen=True)
class Variables:
    """Variables of `make bfcl`."""

    CATEGORIES: str = stage.variable("single_turn", "single_turn, multi_turn, or names of categories")
    WINDOW: int = stage.variable("32768", "tokens of a multi-turn episode, at most the model's window", stage.positive)


def chosen(text: str) -> tuple[str, ...]:
    """The categories that CATEGORIES=``text`` names, in the order of the table. Raises SettingsError."""
    known, words = (*GROUPS, *SINGLE_TURN, *MULTI_TURN), text.replace(",", " ").split()
    if unknown := [word for word in words if word not in known] or ([] if words else [text]):
        raise stage.SettingsError(f"CATEGORIES={text}: no category {unknown[0]}; there are: {', '.join(known)}")
    names = {name for word in words for name in GROUPS.get(word, (word,))}
    return tuple(category for category in (*SINGLE_TURN, *MULTI_TURN) if category in names)


@contextmanager
def _stand_ins() -> Iterator[None]:
    """STAND_INS in sys.modules, until the block ends."""
    before = {name: sys.modules[name] for name in STAND_INS if name in sys.modules}
    for name, content in STAND_INS.items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(content)
    try:
        yield
    finally:
        for name in STAND_INS:
            del sys.modules[name]
        sys.modules.update(before)


@functools.cache
def package() -> SimpleNamespace:
    """The functions USED of bfcl-eval. Raises DataError unless VERSION is installed."""
    try:
        found = importlib.metadata.version("bfcl-eval")
    except importlib.metadata.PackageNotFoundError:
        found = "none"
    if found != VERSION:
        raise prepare.DataError(
            f"bfcl-eval {VERSION} is needed, {found} is installed in {sys.prefix}; "
            f"run `pip install --no-deps bfcl-eval=={VERSION}` there"
        )
    # On import it makes folders for results and locks, by default in site-packages.
    os.environ.setdefault("BFCL_PROJECT_ROOT", str(stage.artifacts() / "data/bfcl/package"))
    with _stand_ins():
        used = {name: getattr(importlib.import_module(f"bfcl_eval.{module}"), name) for name, module in USED.items()}
    return SimpleNamespace(**used)


def questions(category: str) -> list[dict]:
    """RL rows of ``category``, in the package's order. ``ground_truth``: the functions in the checker's form and BFCL's
    possible answers (none for irrelevance); of multi-turn categories as bfcl_episodes.py says."""
    bfcl = package()
    entries = bfcl.load_dataset_entry(category)  # descriptions get BFCL's hint that this is Python
    none = category == "irrelevance"
    truths = [{"ground_truth": []}] * len(entries) if none else bfcl.load_ground_truth_entry(category)
    rows = []
    for index, (entry, answer) in enumerate(zip(entries, truths, strict=True)):
        if category in MULTI_TURN:
            rows.append(bfcl_episodes.episode_row(bfcl, category, index, entry, answer["ground_truth"]))
            continue
        tools = bfcl.convert_to_tool(entry["function"], bfcl.GORILLA_TO_OPENAPI, bfcl.ModelStyle.OPENAI_COMPLETIONS)
        (messages,) = entry["question"]  # one turn
        truth = {"function": entry["function"], "possible_answer": answer["ground_truth"]}
        rows.append(environment.rl_row(category, messages, truth, "test", index, tools))
    return rows


def write_questions(path: Path, categories: tuple[str, ...] = SINGLE_TURN) -> dict[str, int]:
    """Write the questions of ``categories`` to the parquet file ``path``; return the count of each.

    The categories alternate, so that LIMIT cuts each of them and a larger LIMIT continues from a smaller one.
    """
    rows = {category: questions(category) for category in categories}
    ordered = sorted((row for category in categories for row in rows[category]), key=lambda r: r["extra_info"]["index"])
    stage.write_rows(ordered, path)
    return {category: len(rows[category]) for category in categories}


def judge(category: str, response: str, truth: dict) -> tuple[bool, str, list | None]:
    """Whether ``response`` is right; if not, why (the checker's ``error_type``); and its calls in BFCL's form
    ``[{name: {argument: value}}]``, None if they cannot be read.

    As BFCL's eval_runner.py: irrelevance expects no call and counts an unreadable one as none.
    """
    bfcl = package()
    try:
        calls = [{call["name"]: call["arguments"]} for call in tool_calls.parse_response(response).calls]
    except tool_calls.Malformed:
        calls = None
    if category not in AST:
        right = bfcl.is_empty_output(calls)
        return right, "" if right else "called a function", calls
    if not calls:
        return False, "call cannot be read" if calls is None else "no call", calls
    arguments = (truth["function"], calls, truth["possible_answer"], bfcl.Language.PYTHON, category, MODEL)
    try:
        result = bfcl.ast_checker(*arguments)
    except Exception as error:  # such as float(10 ** 400): the model's answer, so it is wrong
        return False, f"checker raised {type(error).__name__}", calls
    return result["valid"], "" if result["valid"] else result["error_type"], calls


@reward_function
def compute_score(data_source, solution_str, ground_truth, extra_info=None) -> dict:
    """``score``, ``acc``: 1.0 if BFCL's checker accepts the response; ``unreadable``: 1.0 for unreadable calls."""
    right, _, calls = judge(data_source, solution_str, json.loads(ground_truth))
    return {"score": right, "acc": right, "unreadable": calls is None}


def unweighted_mean(estimates: list[stage.Estimate]) -> stage.Estimate:
    """The mean of independent ``estimates``; its interval from theirs by MOVER (Zou and Donner 2008):
    ``mean - sqrt(sum (value - low)^2) / k`` to ``mean + sqrt(sum (high - value)^2) / k``."""
    k = len(estimates)
    value = sum(e.value for e in estimates) / k
    below = math.hypot(*(e.value - e.low for e in estimates)) / k
    above = math.hypot(*(e.high - e.value for e in estimates)) / k
    return stage.Estimate(value, value - below, value + above)


def right_by_category(rollouts: list[stage.Rollout]) -> dict[str, np.ndarray]:
    """1.0 for a right response, else 0.0, in the order of the questions; shape (prompts of the category,).

    Prompts that were too long, or on which the reward raised, count as wrong: all models answer the same questions.
    """
    right = {category: [] for category in (*SINGLE_TURN, *MULTI_TURN)}
    for rollout in rollouts:
        right[rollout.data_source].append(rollout.reward["acc"] if rollout.reward else 0.0)
    return {category: np.array(values) for category, values in right.items() if values}


def why_wrong(rollouts: list[stage.Rollout]) -> dict[str, dict[str, int]]:
    """By category: counts of wrong responses by reason, the most frequent first; of episodes, how they ended."""
    counts = {rollout.data_source: Counter() for rollout in rollouts}
    for r in rollouts:
        if not r.reward:
            counts[r.data_source]["the reward raised" if r.error else "prompt too long"] += 1
        elif not r.reward["acc"] and r.data_source in MULTI_TURN:
            counts[r.data_source][r.finish_reason] += 1
        elif not r.reward["acc"]:
            response = answers.with_opened_thinking(r.response, r.extra_info)
            counts[r.data_source][judge(r.data_source, response, json.loads(r.ground_truth))[1]] += 1
    return {category: dict(count.most_common()) for category, count in counts.items()}


def summarize(rollouts: list[stage.Rollout]) -> dict:
    """``{"bfcl_eval": version, "prompts": {category: count}, "too_long": count, "metrics": {name: Estimate as dict},
    "wrong": {category: {why: count}}}``; the other metrics are of the prompts that were not too long."""
    right = right_by_category(rollouts)
    metrics = {category: stage.proportion(int(values.sum()), len(values)) for category, values in right.items()}
    for name, categories in _means(right).items():
        metrics[name] = unweighted_mean([metrics[category] for category in categories])
    answered = [r for r in rollouts if r.finish_reason != stage.TOO_LONG]
    if played := [r for r in answered if r.data_source in MULTI_TURN]:
        for name in ("turns", "tool_errors"):
            metrics[name] = stage.bootstrap_mean(np.array([r.reward[name] for r in played if r.reward] or [0.0]))
        metrics["tokens"] = stage.bootstrap_mean(np.array([r.tokens for r in played]))
        metrics["cut"] = stage.proportion(sum(r.finish_reason in stage.CUT for r in played), len(played))
    elif answered:
        unreadable = sum(bool(r.reward and r.reward["unreadable"]) for r in answered)
        metrics["unreadable"] = stage.proportion(unreadable, len(answered))
        metrics["truncated"] = stage.proportion(sum(r.finish_reason == "length" for r in answered), len(answered))
    return {
        "bfcl_eval": VERSION,
        "prompts": {category: len(values) for category, values in right.items()},
        "too_long": len(rollouts) - len(answered),
        "metrics": {name: asdict(value) for name, value in metrics.items()},
        "wrong": why_wrong(rollouts),
    }


def _means(by_category: dict) -> dict[str, tuple[str, ...]]:
    """Those of MEANS whose categories are all in ``by_category``."""
    return {name: of for name, of in MEANS.items() if by_category.keys() >= set(of)}


def changes(base: list[stage.Rollout], trained: list[stage.Rollout]) -> dict[str, stage.Estimate]:
    """Accuracy of ``trained`` minus that of ``base`` on the same questions: by category, and their means."""
    before, after = right_by_category(base), right_by_category(trained)
    result = {category: stage.bootstrap_mean(after[category] - before[category]) for category in before}
    return result | {name: unweighted_mean([result[each] for each in of]) for name, of in _means(before).items()}


def table_rows(summaries: dict[str, dict], change: dict[str, stage.Estimate] | None) -> list[list[str]]:
    """A row per metric: name, number of prompts, each model's estimate, the change from the previous model."""
    first = next(iter(summaries.values()))
    estimates = {name: cells for name, *cells in stage.comparison_table(summaries)[1]}
    rows = []
    order = (*AST, "AST mean", "irrelevance", *MULTI_TURN, "multi-turn mean")
    for name in sorted(estimates, key=lambda name: order.index(name) if name in order else len(order)):
        cells = [name, str(first["prompts"].get(name, "")), *estimates[name]]
        if change is not None:
            by = change.get(name)
            cells.append(f"{by.value:+.3f} [{by.low:.3f}, {by.high:.3f}]" if by else "-")
        rows.append(cells)
    longest = [str(summary["too_long"]) for summary in summaries.values()]
    rows.append(["prompts too long", "", *longest, *(["-"] if change is not None else [])])
    return rows


def evaluate(s: stage.Settings, own: Variables, models: dict[str, str]) -> int:
    """`make bfcl`: a table of ``models`` (label to path) for the single-turn and one for the multi-turn categories, and
    summary.json beside each model's rollouts. LIMIT is per category. Returns on how many the reward raised."""
    if not models:
        raise stage.SettingsError("no model is given: bfcl.py LABEL=MODEL ...")
    categories, errors = chosen(own.CATEGORIES), 0
    for group in GROUPS.values():
        if of_group := tuple(category for category in group if category in categories):
            errors += _evaluated(s, own, of_group, models)
    return errors


def _evaluated(s: stage.Settings, own: Variables, categories: tuple[str, ...], models: dict[str, str]) -> int:
    episodes = categories[0] in MULTI_TURN
    root = stage.artifacts() / "eval/bfcl"
    data = stage.artifacts() / "data/bfcl" / ("episodes.parquet" if episodes else "test.parquet")
    sizes = write_questions(data, categories)
    limit = sum(min(s.LIMIT, size) for size in sizes.values())
    greedy = replace(s, EVAL_TEMPERATURE=0.0, TOP_P=1.0)
    played = limits(s, own) if episodes else None
    rollouts, summaries = stage.evaluated(greedy, models, data, root, scored(episodes), summarize, limit, played)
    labels = list(models)
    change = changes(rollouts[labels[-2]], rollouts[labels[-1]]) if len(labels) > 1 else None
    header = ["category", "prompts", *labels, *([f"{labels[-1]} - {labels[-2]}, paired"] if change else [])]
    stage.show_table(
        f"BFCL, greedy, bfcl-eval {VERSION}: share right [95 % interval]", header, table_rows(summaries, change)
    )
    return stage.report_errors([r for of_model in rollouts.values() for r in of_model])


def limits(s: stage.Settings, own: Variables) -> stage.Episodes:
    """Those of an episode; MAX_NEW_TOKENS is of each turn of the model. Raises SettingsError."""
    if own.WINDOW <= s.MAX_NEW_TOKENS:
        raise stage.SettingsError(f"WINDOW={own.WINDOW}: must be more than MAX_NEW_TOKENS={s.MAX_NEW_TOKENS}, a turn")
    turns = 10 * (bfcl_episodes.MOST_STEPS + 1)  # at most 8 turns of the user
    return stage.Episodes(own.WINDOW, turns, bfcl_episodes.STEP_SECONDS)


def scored(episodes: bool) -> tuple[str, str]:
    """Where the reward of single-turn questions is, or the environment of ``episodes``; and the mark of all that
    decides."""
    code = [Path(module.__file__) for module in (tool_calls, bfcl_apis, bfcl_episodes)]
    mark = stage.fingerprint({"bfcl-eval": VERSION}, Path(__file__).resolve(), *code)
    return f"tasks.tool_calling.{'bfcl_episodes:Environment' if episodes else 'bfcl:compute_score'}", mark


def main() -> None:
    """Run ``LABEL=MODEL ...``; the settings come from the environment."""
    with stage.errors_in_one_line():
        models = dict(pair.split("=", 1) for pair in sys.argv[1:])
        if errors := evaluate(stage.load_settings(), stage.load_settings(cls=Variables), models):
            sys.exit(f"error: the reward raised on {errors} completions, which count as wrong; all else was done")


if __name__ == "__main__":
    main()
