"""What guesses earn: the incentive of partial credit, beside the exploits of make attack."""

import json
import random
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest

import tasks.countdown.reward
from tasks.countdown.prepare_data import example, problems
from tasks.countdown.reward import compute_score
from tests.test_settings import VALUES
from verl_tasks.evaluation import incentive
from verl_tasks.evaluation.exploits import THINKING, Row
from verl_tasks.evaluation.sample import reward_mark
from verl_tasks.files import write_json
from verl_tasks.guarded import Guarded
from verl_tasks.settings import artifacts, code_digest, load_settings


@pytest.fixture(scope="module")
def rows():
    made = [example(**problem) for problem in islice(problems(random.Random(3), "hard"), 24)]
    return [Row(each.prompt, json.dumps(each.ground_truth), each.demonstration) for each in made]


@pytest.fixture
def s(tmp_path, monkeypatch):
    monkeypatch.setenv("ARTIFACTS", str(tmp_path))
    return SimpleNamespace(TASK="own", REWARD="", AGENT_IMAGE="", reward_file=Path(tasks.countdown.reward.__file__))


def told(s, rows, score) -> list[tuple[str, bool]]:
    reward = Guarded(score, rows)
    try:
        return list(incentive.told(s, rows, reward, 60))
    finally:
        reward.close()


def started_at(s, score: float, model: str = "m") -> None:
    found = {"model": model, "mark": reward_mark(s), "metrics": {"score": {"value": score}}}
    write_json(artifacts() / "probe/own" / Path(model).name / "probe.json", found)


def test_the_ladder_of_countdown_pays_a_guess_more_than_the_start_earns(s, rows):
    started_at(s, 0.09)
    (earns, _), (warning, warns) = told(s, rows, partial(compute_score, variant="ladder"))
    assert warns and "no thought: 0.417 (17% right)" in earns
    assert "<answer>" in warning and "the start's own samples 0.090 (make probe: m)" in warning


def test_a_start_that_earns_more_is_not_warned_of(s, rows):
    started_at(s, 0.5)
    assert [warns for _, warns in told(s, rows, partial(compute_score, variant="ladder"))] == [False]


def test_countdowns_default_pays_a_guess_nothing(s, rows):
    ((earns, warns),) = told(s, rows, compute_score)
    assert not warns and "a guess of the row's numbers, no thought: 0.000 (17% right)" in earns
    started_at(s, 0.02)  # a thought that is the same for all has none of the row's numbers
    assert [warns for _, warns in told(s, rows, compute_score)] == [False]


def test_a_right_guess_tempts_where_demonstrations_think(s, rows):
    """With it a 1.5B that was right in 2 % unlearned all thought: results/gpu.json#h200-countdown-1.5b-guess."""

    def right_is_right(*row, **more):
        result = compute_score(*row, **more)
        return result | {"score": max(result["score"], float(result["acc"]))}

    started_at(s, 0.02)
    (_, _), (warning, warns) = told(s, rows, right_is_right)
    assert warns and "no thought" in warning and "earns 0.167 (17% right)" in warning
    bare = [replace(row, demonstration=THINKING.sub("", row.demonstration)) for row in rows]
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
    s.REWARD = "ladder"
    assert incentive.start_score(s) is None
    s.REWARD, s.reward_file = "", Path(__file__)
    assert incentive.start_score(s) is None


def test_without_samples_of_the_start_much_of_a_right_answer_is_warned_of(s, rows):
    (_, (warning, warns)) = told(s, rows, partial(compute_score, variant="ladder"))
    assert warns and "make probe TASK=own says what the start's own samples earn" in warning


def test_what_is_right_is_no_partial_credit(s):
    """Two numbers and always the same operator: often right, which nothing is wrong with."""
    found = [Row(f"{n} {n + 1}", str(2 * n + 1), f"<think>so</think>{n}+{n + 1}") for n in range(10, 30)]

    def score(source, response, truth, extra=None):
        right = float(response.rpartition(">")[2] == f"{int(truth) // 2}+{int(truth) // 2 + 1}")
        return {"score": right, "acc": right}

    ((earns, warns),) = told(s, found, score)
    assert not warns and "no thought: 1.000 (100% right)" in earns


def test_rows_without_demonstrations_tell_nothing(s):
    assert told(s, [Row("1", "1"), Row("2", "2")], compute_score) == []


def test_numbers_take_the_places_of_the_others():
    change = incentive.with_numbers
    assert change("<answer>98-73</answer>", "Numbers: 73, 98. Target: 25.", "Numbers: 5, 7. Target: 2.") == (
        "<answer>7-5</answer>"
    )
    assert change("7", "1 and 2", "3 and 4") is None is change("1", "1 and 2", "3")


def test_a_training_warns_before_it_trains(s, rows, monkeypatch, capsys):
    from verl_tasks.launch import main

    s.REWARD = "ladder"
    monkeypatch.setattr(main, "compute_score_of", lambda s: compute_score)
    monkeypatch.setattr(main.attacks, "rows_of", lambda s, count: rows)
    main._warn_of_guesses(s)
    assert capsys.readouterr().out.startswith("  warning: a guess of the row's numbers, no thought, such as '<answer>")
    s.REWARD = ""
    main._warn_of_guesses(s)
    assert capsys.readouterr().out == ""
