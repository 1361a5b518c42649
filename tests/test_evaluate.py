"""probe, eval, compare and rescore as commands, with an engine that answers from a table: every number is known."""

import json
import math
import os
import re
import shutil
import statistics
import subprocess
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tasks.calculator import environment as calculator
from tasks.countdown import reward as countdown
from tasks.gsm8k import reward as gsm8k
from tests import stub_evaluate
from tests.helpers import PYTHON, ROOT, error_line, exported, task_settings
from tests.stub_evaluate import asked
from tests.test_runs import make_run
from tests.test_settings import VALUES
from verl_tasks.evaluation import sample
from verl_tasks.evaluation.engine_pool import Hardware
from verl_tasks.evaluation.engines import Sampling
from verl_tasks.evaluation.main import next_steps
from verl_tasks.evaluation.probe import by_prompt, partial_credit, probed, write_signal
from verl_tasks.evaluation.rollouts import Rollout, write_rollouts
from verl_tasks.evaluation.sample import Job, Scoring, sampling
from verl_tasks.evaluation.statistics import Estimate
from verl_tasks.evaluation.summary import Difference
from verl_tasks.evaluation.tables import gain
from verl_tasks.files import read_json, write_json
from verl_tasks.machine.memory import EMBEDDED_CONFIG
from verl_tasks.rows import chat, read_rows, rl_row, rl_schema, validate_parquet, write_parquet
from verl_tasks.runs.folder import more_training
from verl_tasks.runs.run import Run
from verl_tasks.settings import Command, SettingsError, load_settings

PROMPTS = 6
TRUTH = "7"


@pytest.fixture
def workplace(tmp_path):
    """Artifacts with test and training rows whose right answer is 7, and a way to write models."""

    class Workplace(stub_evaluate.Workplace):
        def run(self, *arguments: str, sampled=stub_evaluate.here, **variables: str) -> subprocess.CompletedProcess:
            given = exported(ROOT / "tasks/countdown/train.sh", {"ARTIFACTS": str(self.artifacts), **variables})
            with stub_evaluate.answering(sampled):
                return stub_evaluate.called(stub_evaluate.evaluate, arguments, given | {"PYTHONPATH": str(ROOT)})

    made = Workplace(tmp_path)
    for name in ("test", "train"):
        rows = [rl_row("countdown", chat(f"{name} {i}"), TRUTH, name, i) for i in range(PROMPTS)]
        write_parquet(rows, made.artifacts / f"data/countdown/{name}.parquet", rl_schema())
    return made


def answer(text: str, reason: str = "stop", tokens: int = 10, entropy: float = 0.5) -> list:
    return [text, reason, tokens, entropy]


def table(right: list[int], n: int, greedy_right: list[bool]) -> list:
    """right[i] of prompt i's n samples are right, the next is a wrong number, the rest are words cut at the limit."""
    entries = []
    for count, greedy in zip(right, greedy_right, strict=True):
        samples = [answer(TRUTH, tokens=20, entropy=0.25)] * count
        samples += [answer("8", tokens=20, entropy=0.25)] * min(1, n - count)
        samples += [answer("words", "length", 40, 0.75)] * (n - len(samples))
        entries.append({"greedy": answer(TRUTH if greedy else "no"), "sampled": samples})
    return entries


RIGHT = [16, 8, 4, 1, 0, 0]
GREEDY = [True, True, False, False, True, False]


def unbiased(n: int, c: int, k: int) -> float:
    return 1 - math.comb(n - c, k) / math.comb(n, k)


def test_a_model_that_answers_from_a_table_gets_the_exact_metrics_of_16_samples(workplace):
    model = workplace.model("m", table(RIGHT, 16, GREEDY))
    result = workplace.run("eval", f"m={model}", N="16")
    assert result.returncode == 0, result.stdout
    summary = json.loads(workplace.only("eval/countdown/m-*/summary.json").read_text())
    assert (summary["prompts"], summary["samples"], summary["left_out"], summary["errors"]) == (6, 16, 0, 0)
    value = {name: estimate["value"] for name, estimate in summary["metrics"].items()}
    wrong_number = [min(1, 16 - c) for c in RIGHT]
    words = [16 - c - w for c, w in zip(RIGHT, wrong_number, strict=True)]
    expected = {
        "accuracy": 3 / 6,
        **{f"pass@{k}": sum(unbiased(16, c, k) for c in RIGHT) / 6 for k in (1, 2, 4, 8, 16)},
        "wrong": sum(wrong_number) / 96,
        "unreadable": sum(words) / 96,
        "lenient": sum(RIGHT) / 96,
        "format_loss": 0,
        "score": sum(c + 0.5 * w for c, w in zip(RIGHT, wrong_number, strict=True)) / 96,
        "format": sum(c + w for c, w in zip(RIGHT, wrong_number, strict=True)) / 96,
        "tokens": (96 * 20 + 20 * sum(words)) / 96,
        "truncated": sum(words) / 96,
        "entropy": (96 * 0.25 + 0.5 * sum(words)) / 96,
        "different": 3 / 96,
    }
    assert value == pytest.approx(expected)
    assert list(value) == list(expected)
    for estimate in summary["metrics"].values():
        assert estimate["low"] <= estimate["value"] <= estimate["high"]
    for name in expected:
        assert name in result.stdout


def test_a_score_that_is_always_0_has_the_range_of_the_tasks_examples(monkeypatch):
    monkeypatch.setattr(sample, "most_stated", lambda folder: {"countdown": 10, "calculator": 3}[folder.name])
    for task, parts, most in (
        ("countdown", (countdown.compute_score, None, None), 10),
        ("calculator", (None, None, stub_evaluate.Calculator), 3),
    ):
        assert Scoring.of(task_settings(task), *parts).most == most


def test_with_one_sample_pass_at_1_is_a_proportion_with_wilsons_interval(workplace):
    one = [1, 1, 1, 0, 0, 0]
    model = workplace.model("m", table(one, 1, GREEDY))
    assert workplace.run("eval", f"m={model}", N="1", GREEDY="0").returncode == 0
    summary = json.loads(workplace.only("eval/countdown/m-*/summary.json").read_text())
    assert "accuracy" not in summary["metrics"] and "pass@2" not in summary["metrics"]
    pass_1 = summary["metrics"]["pass@1"]
    assert (pass_1["value"], pass_1["low"], pass_1["high"]) == pytest.approx((0.5, 0.18761, 0.81239), abs=1e-5)
    assert summary["metrics"]["score"]["value"] == pytest.approx((3 + 3 * 0.5) / 6)


def test_own_metrics_that_raise_are_named_and_what_was_sampled_is_kept(workplace):
    entries = [{"greedy": answer("1"), "sampled": [answer("break the metrics")]}] * PROMPTS
    result = workplace.run("eval", f"m={workplace.model('m', entries)}", N="1")
    assert "own metrics (evaluate.py) raised KeyError: 'broken'" in error_line(result)
    assert len(workplace.only("eval/countdown/m-*/rollouts.jsonl").read_text().splitlines()) == 2 * PROMPTS


def test_keys_of_the_reward_that_are_named_like_a_metric_do_not_replace_it(workplace):
    result = workplace.run("eval", f"m={workplace.model('m', table([1] * 6, 1, [True] * 6))}", N="1", ODD_KEYS="1")
    assert result.returncode == 0, result.stdout
    metrics = json.loads(workplace.only("eval/countdown/m-*/summary.json").read_text())["metrics"]
    assert metrics["accuracy"]["value"] == 1.0 and metrics["tokens"]["value"] == 20
    assert metrics["reward accuracy"]["value"] == 0.25 and metrics["reward tokens"]["value"] == -3


def test_a_new_reward_whose_scores_cannot_be_written_scores_again_the_next_time(tmp_path, monkeypatch):
    row = rl_row("t", chat("a"), TRUTH, "test", 0)
    write_parquet([row], tmp_path / "test.parquet", rl_schema())
    job = Job("m", str(tmp_path / "test.parquet"), 0, Sampling(1, False, 1.0, 1.0, 9, 9, 0), Hardware())
    old = Rollout(0, "sampled", 0, TRUTH, "stop", 9, 0.5, row["prompt"], "t", TRUTH, {}, {"score": 0.0})
    write_rollouts(file := tmp_path / "rollouts.jsonl", [old])
    write_json(meta := tmp_path / "rollouts.meta.json", {"reward": "old"})
    new = Scoring(lambda *_: {"score": 1.0}, None, "new")

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(sample, "write_rollouts", full)
        sample.load(job, file, new)
    kept, missing = sample.load(job, file, new)
    assert ([r.reward for r in kept], missing) == ([{"score": 1.0}], []) and read_json(meta)["reward"] == "new"


def test_what_was_there_before_others_were_sampled_is_not_read_again(tmp_path, monkeypatch):
    row = rl_row("t", chat("a"), TRUTH, "test", 0)
    write_parquet([row], tmp_path / "test.parquet", rl_schema())
    how = Sampling(1, False, 1.0, 1.0, 9, 9, 0)
    jobs = {name: Job(name, str(tmp_path / "test.parquet"), 0, how, Hardware()) for name in ("old", "new")}
    rollout = Rollout(0, "sampled", 0, TRUTH, "stop", 9, 0.5, row["prompt"], "t", TRUTH, {}, {"score": 1.0})

    def sample_of(name, *_, **__):
        write_rollouts(jobs[name].folder(tmp_path) / "rollouts.jsonl", [rollout])
        write_json(jobs[name].folder(tmp_path) / "rollouts.meta.json", {"reward": "1"})

    sample_of("old")
    scoring, read, load = Scoring(lambda *_: {"score": 1.0}, None, "1"), [], sample.load
    monkeypatch.setattr(sample, "run", lambda *_, **__: sample_of("new"))
    monkeypatch.setattr(sample, "check_chat", lambda *_: None)
    monkeypatch.setattr(sample, "load", lambda job, *given: read.append(job.model) or load(job, *given))
    found = sample.sampled(jobs, tmp_path, scoring)
    assert [*found] == ["old", "new"] and all(len(rollouts) == 1 for rollouts in found.values())
    assert read == ["old", "new", "new"]


def test_greedy_evaluation_is_one_response_a_prompt(workplace):
    model = workplace.model("m", table([1, 1, 1, 0, 0, 0], 1, GREEDY))
    assert workplace.run("eval", f"m={model}", N="4", EVAL_TEMPERATURE="0").returncode == 0
    summary = json.loads(workplace.only("eval/countdown/m-*/summary.json").read_text())
    assert summary["samples"] == 1 and "accuracy" not in summary["metrics"]


@pytest.mark.parametrize("n", [1, 16])
def test_failing_rows_and_long_prompts_are_counted_and_left_out(workplace, n):
    entries = table([n, n, 0, 0, 0, 0], n, [True] * 6)
    entries[2] = None
    entries[3]["sampled"][0] = answer("raise \x1b]0;title\x07")
    model = workplace.model("m", entries)
    result = workplace.run("eval", f"m={model}", N=str(n))
    assert result.returncode == 1
    assert "reward raised on prompt 3, sampled 0: RewardError: " in result.stdout
    assert "cannot score this" in result.stdout and not re.search("\x1b|\x07", result.stdout)
    assert "error: the reward raised on 1 completions" in result.stdout
    assert "1 prompts left out (longer than MAX_PROMPT_LENGTH)" in result.stdout
    summary = json.loads(workplace.only("eval/countdown/m-*/summary.json").read_text())
    assert (summary["prompts"], summary["left_out"], summary["errors"]) == (5, 1, 1)
    assert summary["metrics"]["accuracy"]["value"] == 1.0
    # Prompt 3 has one sample less; with one sample it has none, and does not count.
    assert summary["metrics"]["pass@1"]["value"] == pytest.approx(2 / 5 if n > 1 else 2 / 4)


@pytest.mark.parametrize(("command", "models"), [("eval", "m={}"), ("probe", "{}"), ("compare", "{} {}")])
def test_when_nothing_can_be_scored_the_reason_is_the_error(workplace, command, models):
    model = workplace.model("m", [{"greedy": answer("raise"), "sampled": [answer("raise")] * 2}] * PROMPTS)
    result = workplace.run(command, *models.format(model, model).split(), N="2")
    error = error_line(result)
    assert f"none of {12 if command == 'probe' else 18} completions could be scored" in error
    assert "cannot score this" in error


@pytest.mark.medium
def test_what_was_sampled_is_kept_when_the_engine_dies_and_is_not_asked_again(workplace):
    model = workplace.model("m", table(RIGHT, 16, GREEDY))
    (model / "die").touch()
    died = workplace.run("eval", f"m={model}", N="16", sampled=stub_evaluate.beside)
    assert died.returncode == 1 and "error: RuntimeError: the engine died" in died.stdout
    rollouts = workplace.only("eval/countdown/m-*/rollouts.jsonl")
    assert len(rollouts.read_text().splitlines()) == 1
    assert {file.name for file in rollouts.parent.iterdir()} == {"rollouts.jsonl", "rollouts.meta.json"}
    rollouts.write_text(rollouts.read_text() + '{"index": 3, "mode": "gre')  # and a line was cut off
    (model / "die").unlink()
    assert workplace.run("eval", f"m={model}", N="16").returncode == 0
    assert sorted(asked(model)) == sorted([i, mode] for i in range(PROMPTS) for mode in ("greedy", "sampled"))
    assert len(rollouts.read_text().splitlines()) == PROMPTS * 17


@pytest.mark.medium
def test_a_second_run_samples_nothing_and_a_larger_limit_only_the_rest(workplace):
    model = workplace.model("m", table(RIGHT, 16, GREEDY))
    assert workplace.run("eval", f"m={model}", N="16", LIMIT="2").returncode == 0
    assert len(asked(model)) == 4
    again = workplace.run("eval", f"m={model}", N="16", LIMIT="2")
    assert "up to date" in again.stdout and len(asked(model)) == 4
    assert workplace.run("eval", f"m={model}", N="16").returncode == 0
    assert len(asked(model)) == 12
    assert json.loads(workplace.only("eval/countdown/m-*/summary.json").read_text())["prompts"] == 6


def test_rescore_repeats_the_summary_without_a_model_and_leaves_the_file(workplace):
    model = workplace.model("m", table(RIGHT, 16, GREEDY))
    workplace.run("eval", f"m={model}", N="16")
    rollouts = workplace.only("eval/countdown/m-*/rollouts.jsonl")
    stored = json.loads((rollouts.parent / "summary.json").read_text())
    changed = rollouts.read_text() * 2  # a repeated line counts once, the last one
    changed = changed.replace('"score": 1.0', '"score": 0.9').rstrip("\n") + "\n" + '{"index"'
    rollouts.write_text(changed)
    result = workplace.run("rescore", ROLLOUTS=str(rollouts))
    assert result.returncode == 0, result.stdout
    assert "102 of 204 lines repeat a prompt's sample" in result.stdout
    assert "its last line was cut off" in result.stdout and "32 of 102 completions have another reward" in result.stdout
    again = json.loads(workplace.only("eval/countdown/rescored-*/summary.json").read_text())
    assert again["metrics"] == stored["metrics"]
    assert rollouts.read_text() == changed
    rollouts.write_text(rollouts.read_text().replace('"content": "', '"content": "Now: ', 1))
    result = workplace.run("rescore", ROLLOUTS=str(rollouts))
    assert result.returncode == 1 and "has two texts: two test sets" in result.stdout


STORED = {"mode": "sampled", "response": TRUTH, "finish_reason": "stop", "tokens": 3, "entropy": 0.5}
STORED |= {"prompt": chat("p"), "data_source": "countdown", "ground_truth": TRUTH, "extra_info": {}, "reward": None}
TWO_GREEDY = "".join(json.dumps(STORED | {"index": 0, "mode": "greedy", "sample": n}) + "\n" for n in (0, 1))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "no such file of rollouts"),
        ("", "has no complete line"),
        ("{}\n", "line 1: is not a rollout"),
        ("[1, 2]\n", "line 1: is not a rollout"),
        ("not json\n{}\n", "line 1: is not a rollout"),
        ("[" * 100_000 + "\n", "line 1: is not a rollout"),
        (TWO_GREEDY, "line 2: sample must be 0 for a greedy response"),
    ],
)
def test_rescore_refuses_a_file_without_rollouts_in_one_line(workplace, tmp_path, content, said):
    file = tmp_path / "r.jsonl"
    if content is not None:
        file.write_text(content)
    result = workplace.run("rescore", ROLLOUTS=str(file))
    assert result.returncode == 1
    (line,) = result.stdout.strip().splitlines()
    assert line.startswith("error:") and said in line and str(file) in line


JUNK = [
    None,
    True,
    -1,
    10**30,
    1.5,
    math.nan,
    math.inf,
    "",
    "x",
    [],
    [1],
    [{}],
    {},
    {"key": [1]},
    {"acc": "1"},
    {"acc": 1},
]


@pytest.mark.parametrize(
    "name", sorted({*STORED, "index", "sample", "error", "messages", "lenient"} - {"ground_truth"})
)
def test_rescore_of_a_file_that_was_edited_by_hand_is_done_or_names_the_line(workplace, tmp_path, name):
    """Whatever stands in a field: it is scored, or refused in one line, and nothing is written."""
    file, refused, rows = tmp_path / "r.jsonl", [], [STORED | {"index": i, "sample": 0} for i in (0, 1)]
    written = workplace.artifacts / "eval"
    for value in JUNK:
        file.write_text("".join(json.dumps(row) + "\n" for row in [*rows, rows[1] | {name: value}]))
        result = workplace.run("rescore", ROLLOUTS=str(file))
        if result.returncode:
            (line,) = result.stdout.strip().splitlines()
            assert f"error: {file}: line 3: {name} must be" in line or (name == "prompt" and "has two texts" in line), (
                line
            )
            assert not written.exists()
            refused.append(value)
        shutil.rmtree(written, ignore_errors=True)
    assert refused
    file.write_text(json.dumps({key: value for key, value in rows[0].items() if key != name}) + "\n")
    result = workplace.run("rescore", ROLLOUTS=str(file))
    assert name in ("error", "messages", "lenient") or "line 1: is not a rollout" in error_line(result)


# ---- probe


def two_each(rewards: list[dict]) -> list[Rollout]:
    """Two samples of each prompt with these rewards."""
    return [
        Rollout(i // 2, "sampled", i % 2, "", "stop", 1, 0.5, [], "t", "7", {}, reward)
        for i, reward in enumerate(rewards)
    ]


def partial(scores: list[list[float]], right: list[int]) -> float:
    """The share of all absolute advantages that is in groups without a right answer, by its definition."""
    pulls = []
    for values in scores:
        mean, deviation = statistics.mean(values), statistics.pstdev(values)
        pulls.append(sum(abs(value - mean) / deviation for value in values) if deviation else 0.0)
    return sum(pull for pull, count in zip(pulls, right, strict=True) if not count) / sum(pulls)


@pytest.mark.parametrize(
    ("credit", "share"),
    [(0.0, 0.0), (0.1, 0.5), (0.9, 0.5)],  # however small it is
)
def test_partial_credit_pulls_as_a_right_answer_does(credit, share):
    """One prompt has a right sample and a wrong one, the other one that earns the credit and one that does not."""
    rewards = [{"score": score, "acc": float(score == 1)} for score in (1.0, 0.0, credit, 0.0)]
    assert partial_credit(by_prompt(two_each(rewards))) == pytest.approx(share)


@pytest.mark.parametrize(
    ("scores", "right", "value", "good", "said"),
    [
        ((0.1, 0.1, 0.0, 0.0), (), 0.0, False, "no signal: the samples of each prompt score alike"),
        ((0.1, 0.0, 0.1, 0.0), (), 1.0, False, "no sample is right, so partial credit is all there is: do SFT first"),
        ((0.0, -1.0, 1.0, -1.0), (2,), 0.5, False, "pay right answers alone"),
        ((1.0, 0.0, 0.5, 0.5), (0,), 0.0, True, "good: prompts with right answers give most"),
        ((0.0, 0.0, 0.0, 0.0), (0,), 0.0, False, "no signal"),  # right, but the reward does not pay it
    ],
)
def test_the_verdict_on_partial_credit_fits_what_there_is(scores, right, value, good, said):
    rollouts = two_each([{"score": score, "acc": i in right} for i, score in enumerate(scores)])
    verdict = probed(rollouts, by_prompt(rollouts))["verdicts"][4]
    assert (verdict["value"], verdict["good"]) == (pytest.approx(value), good) and said in verdict["words"]


@pytest.mark.parametrize(
    ("scores", "variance_good", "words", "conclusion"),
    [
        ((0.1, 0.0, 0.1, 0.0), False, "small, but of most prompts the samples differ", "train: the data has signal"),
        ((0.1, 0.0, 0.0, 0.0), False, "low: the samples of a prompt score alike", "weak signal: reward variance"),
        ((1.0, 0.0, 1.0, 0.0), True, "good: the samples of a prompt differ", "train: the data has signal"),
        ((1.0, -1.0, -1.0, 1.0), False, "right samples earn no more than wrong ones", "mend the reward: right samples"),
        ((0.0, 1.0, 0.1, 0.4), False, "right samples earn no more than wrong ones", "mend the reward: right samples"),
        ((-1.0,) * 4, False, "right samples earn no more than wrong ones", "mend the reward: right samples"),
    ],
)
def test_the_verdict_on_variance_knows_small_scores_and_a_reward_upside_down(scores, variance_good, words, conclusion):
    """Two prompts, of which each has a right sample, then a wrong one."""
    rollouts = two_each([{"score": score, "acc": 1 - i % 2} for i, score in enumerate(scores)])
    found = probed(rollouts, by_prompt(rollouts))
    verdict = found["verdicts"][1]
    assert verdict["good"] is variance_good and words in verdict["words"]
    assert found["conclusion"].startswith(conclusion)


@pytest.mark.medium
def test_probe_gives_the_exact_signal_of_each_prompt_and_the_verdict(workplace):
    model = workplace.model("m", table(RIGHT, 16, GREEDY))
    result = workplace.run("probe", str(model), N="16", LIMIT="0", FILTER="1")
    assert result.returncode == 0, result.stdout
    folder = workplace.only("probe/countdown/m-*")
    found = json.loads((folder / "probe.json").read_text())
    rows = {row["index"]: row for row in found["by_prompt"]}
    assert [rows[i]["accuracy"] for i in range(6)] == [c / 16 for c in RIGHT]
    scores = [[1.0] * c + [0.5] * min(1, 16 - c) + [0.0] * (15 - c) for c in RIGHT]
    for index, values in enumerate(scores):
        mean = sum(values) / 16
        assert rows[index]["variance"] == pytest.approx(sum((v - mean) ** 2 for v in values) / 16)
    accuracy = sum(RIGHT) / 96
    assert found["distributions"]["accuracy"]["value"] == pytest.approx(accuracy)
    assert found["zero_variance_groups"] == pytest.approx(1 / 6)  # all right; one wrong number differs from words
    verdict = {v["name"]: v for v in found["verdicts"]}
    assert verdict["accuracy"]["value"] == pytest.approx(accuracy) and verdict["accuracy"]["good"]
    assert sum(found["accuracy_histogram"]["prompts"]) == 6
    assert verdict["signal without a right answer"]["value"] == pytest.approx(partial(scores, RIGHT))
    assert "=> train: the data has signal" in result.stdout
    assert (folder / "probe.png").read_bytes().startswith(b"\x89PNG")
    # All but prompt 0, whose samples are all right.
    assert validate_parquet(folder / "signal.parquet") == 5
    kept = [row["prompt"][0]["content"] for row in read_rows(folder / "signal.parquet")]
    assert kept == [f"train {i}" for i in range(1, 6)]
    assert f"TRAIN_FILE={folder}/signal.parquet" in result.stdout


@pytest.mark.parametrize(
    ("bounds", "kept"),
    [({}, [1, 3, 5]), ({"FILTER_LOW": "0.5"}, [3, 5]), ({"FILTER_LOW": "0.5", "FILTER_HIGH": "0.9"}, [3])],
)
def test_the_filter_keeps_what_grpo_learns_from(workplace, bounds, kept):
    """F1 as the score: it differs where no sample is exactly right, and may be one where all are wrong or right."""
    scores = (0.2, 0.2, 0.2, 0.6, 0.0, 0.0, 1.0, 0.6, 1.0, 1.0, 1.0, 0.9)
    right = (0, 0, 0, 0, 0, 0, 1, 0, 1, 1, 1, 1)
    rollouts = two_each([{"score": score, "acc": acc} for score, acc in zip(scores, right, strict=True)])
    data, found = workplace.artifacts / "data/countdown/train.parquet", workplace.artifacts / "signal.parquet"
    s = replace(task_settings("countdown"), TRAIN_FILE=str(data))
    write_signal(s, load_settings(bounds | {"STAGE": "probe"}, cls=Command), by_prompt(rollouts), found)
    assert [row["prompt"][0]["content"] for row in read_rows(found)] == [f"train {i}" for i in kept]


def test_a_reward_may_return_a_key_that_is_called_like_a_column_of_the_probe():
    same = {"index": 1.0, "samples": 9.0, "variance": 9.0}
    found = by_prompt(two_each([{"score": i / 4, "acc": float(i > 2)} | same for i in range(4)]))
    assert found[["samples", "accuracy", "score"]].to_numpy().tolist() == [[2, 0, 0.125], [2, 0.5, 0.625]]
    assert found["variance"].tolist() == pytest.approx([1 / 64, 1 / 64])


@pytest.mark.medium
@pytest.mark.parametrize(
    ("right", "said"),
    [(0, "most samples are cut off (90 by length"), (16, "take harder data"), (1, "weak signal"), (8, "train:")],
)
def test_probe_says_what_to_do(workplace, right, said):
    model = workplace.model("m", table([right] * 6, 16, GREEDY))
    result = workplace.run("probe", str(model), N="16")
    assert result.returncode == 0, result.stdout
    assert f"=> {said}" in result.stdout


@pytest.mark.medium
def test_a_filter_that_leaves_nothing_says_so_and_writes_no_parquet(workplace):
    model = workplace.model("m", table([16] * 6, 16, GREEDY))
    result = workplace.run("probe", str(model), N="16", FILTER="1")
    assert result.returncode == 1 and "error: FILTER=1: no prompt has samples of different scores" in result.stdout
    folder = workplace.only("probe/countdown/m-*")
    assert (folder / "probe.json").is_file() and not (folder / "signal.parquet").exists()


# ---- compare


@pytest.mark.medium
def test_compare_pairs_the_prompts_and_tests_the_difference(workplace):
    base = workplace.model("base", table([0, 2, 4, 4, 0, 16], 16, [False, False, False, False, False, True]))
    trained = workplace.model("trained", table([16, 16, 8, 4, 0, 0], 16, [True, True, True, True, False, False]))
    result = workplace.run("compare", str(base), str(trained), N="16")
    assert result.returncode == 0, result.stdout
    folder = workplace.only("compare/countdown/*")
    found = json.loads((folder / "compare.json").read_text())
    accuracy = found["metrics"]["accuracy"]
    assert accuracy["test"] == "exact McNemar"
    assert accuracy["difference"]["value"] == pytest.approx(4 / 6 - 1 / 6)
    assert found["gained"] == [0, 1, 2, 3] and found["lost"] == [5]
    assert accuracy["p_value"] == found["mcnemar"]["p_value"] == pytest.approx(12 / 32)  # 4 of 5, both sides
    pass_1 = found["metrics"]["pass@1"]
    assert pass_1["test"] == "paired bootstrap"
    assert pass_1["difference"]["value"] == pytest.approx((16 + 14 + 4 + 0 + 0 - 16) / 96)
    assert pass_1["difference"]["low"] < pass_1["difference"]["value"] < pass_1["difference"]["high"]
    assert found["metrics"]["different"]["base"]["value"] == pytest.approx(3 / 96)
    text = (folder / "compare.md").read_text()
    assert "## Prompts gained (4)" in text and "- 5: test 5" in text and "exact McNemar" in text
    import openpyxl

    sheet = openpyxl.load_workbook(folder / "compare.xlsx").active
    rows = list(sheet.iter_rows(values_only=True))
    assert len(rows) == 1 + PROMPTS and rows[0][:4] == ("index", "prompt", "ground_truth", "change")
    assert [row[3] for row in rows[1:]] == ["gained"] * 4 + [None, "lost"]
    assert "│ 0.167 [0.030, 0.564] │ 0.667" in result.stdout
    assert "trained - base: pass@1 +0.188 [" in result.stdout and "so this may be chance" in result.stdout


@pytest.mark.medium
def test_compare_pairs_the_trained_model_with_its_warm_up_and_shows_the_base(workplace):
    base = workplace.model("base", table([0] * 6, 16, [False] * 6))
    warm = workplace.model("warm", table([8] * 6, 16, [True, True, True, False, False, False]))
    trained = workplace.model("trained", table([9, 9, 9, 9, 9, 10], 16, [True, True, True, True, False, False]))
    result = workplace.run("compare", str(base), str(warm), str(trained), N="16")
    assert result.returncode == 0, result.stdout
    folder = workplace.only("compare/countdown/*")
    found = json.loads((folder / "compare.json").read_text())
    assert found["against"] == "warm-up" and found["gained"] == [3] and found["lost"] == []
    accuracy = found["metrics"]["accuracy"]
    assert [accuracy[label]["value"] for label in ("base", "warm-up", "trained")] == pytest.approx([0, 3 / 6, 4 / 6])
    assert accuracy["difference"]["value"] == pytest.approx(1 / 6)
    gain = found["metrics"]["pass@1"]["difference"]
    assert gain["value"] == pytest.approx(7 / 96) and gain["low"] > 0
    line = "trained - warm-up: pass@1 +0.073 ["
    assert line in result.stdout and result.stdout.index("): a gain") > result.stdout.index(line)
    assert "of it, skill +0.073 [" in result.stdout and "warm-up: 50.0% right, " in result.stdout
    text = (folder / "compare.md").read_text()
    assert (
        "of it, skill +0.073" in text
        and "| metric | base | warm-up | trained | trained - warm-up [95 % interval] | p | meaning |" in text
    )
    import openpyxl

    rows = list(openpyxl.load_workbook(folder / "compare.xlsx").active.iter_rows(values_only=True))
    assert {"base response", "warm-up response", "trained response"} <= {*rows[0]} and len(rows) == 1 + PROMPTS
    # The same model twice is sampled once.
    result = workplace.run("compare", str(base), str(warm), str(warm), N="16")
    assert result.returncode == 0 and "pass@1 +0.000 [0.000, 0.000], p 1.0000" in result.stdout


# ---- the closing table's words


@pytest.mark.medium
@pytest.mark.parametrize(
    ("right", "said", "tries"),
    [
        ([10, 6, 8, 9, 7, 9], "the interval includes 0, so this may be chance", ["LR=2e-05", "make probe"]),
        ([12, 12, 13, 12, 12, 14], "a gain", []),
        ([4, 4, 3, 4, 4, 5], "a loss", ["LR=5e-06"]),
    ],
)
def test_a_difference_is_explained_with_what_to_try(workplace, right, said, tries):
    models = {"base": [0] * 6, "sft": [8] * 6, "grpo": right}
    models = {label: workplace.model(label, table(counts, 16, [True] * 6)) for label, counts in models.items()}
    result = workplace.run("eval", *(f"{k}={v}" for k, v in models.items()), N="16", LR="1e-5")
    assert result.returncode == 0 and re.search(rf"grpo - sft: pass@1 [+-].*: {said}\n", result.stdout), result.stdout
    told = result.stdout.partition("What to try:")[2]
    assert all(words in told for words in tries) and bool(told) == bool(tries)
    stored = json.loads(workplace.only("eval/countdown/grpo-*/summary.json").read_text())["paired"]
    change = stored["metrics"]["pass@1"]["difference"]
    assert stored["to"] == str(models["sft"]) and change["value"] == pytest.approx((sum(right) - 48) / 96)
    assert "paired" not in json.loads(workplace.only("eval/countdown/sft-*/summary.json").read_text())


def test_the_last_round_of_self_play_is_paired_with_the_warm_up(workplace):
    """As RL's own difference, and as `make compare` does; the round before has most of the gain."""
    models = {"base": [0] * 6, "sft": [4] * 6, "round1": [12] * 6, "round2": [12, 12, 13, 12, 12, 12]}
    models = {label: workplace.model(label, table(right, 16, [True] * 6)) for label, right in models.items()}
    for labels, to in ((("base", "sft", "round1", "round2"), "sft"), (("base", "round1", "round2"), "base")):
        result = workplace.run("eval", *(f"{label}={models[label]}" for label in labels), N="16")
        assert result.returncode == 0 and f"round2 - {to}: pass@1 +0." in result.stdout and "): a gain" in result.stdout
        stored = json.loads(workplace.only("eval/countdown/round2-*/summary.json").read_text())["paired"]
        assert stored["to"] == str(models[to])


@pytest.mark.parametrize(
    ("interval", "p_value", "said"),
    [
        ((0.25, 0.25, 0.25), 1.0, "too few prompts to tell"),
        ((0.3, 0.1, 0.5), 0.05, "too few prompts to tell"),
        ((-0.3, -0.5, -0.1), 0.0625, "too few prompts to tell"),
        ((0.3, 0.1, 0.5), 0.049, "a gain"),
        ((-0.3, -0.5, -0.1), 0.049, "a loss"),
        ((0.3, 0.0, 0.5), 0.049, "the interval includes 0, so this may be chance"),
        ((-0.3, -0.5, 0.0), 0.049, "the interval includes 0, so this may be chance"),
    ],
)
def test_a_gain_or_a_loss_is_one_by_its_interval_and_its_test(interval, p_value, said):
    """The percentile interval alone says "a gain" of a single prompt. The advice agrees with the verdict."""
    change = Difference(Estimate(*interval), p_value, "paired bootstrap")
    assert gain("grpo - base", {"pass@1": change}).endswith(f" (paired bootstrap): {said}")
    tries = "\n".join(next_steps(replace(load_settings(VALUES), LR=1e-5), change, []))
    assert (tries == "", "LR=5e-06" in tries, "LR=2e-05" in tries) == (
        said == "a gain",
        said == "a loss",
        said not in ("a gain", "a loss"),
    )


def test_more_prompts_come_from_the_setting_that_bounds_them():
    same = Difference(Estimate(0.0, -0.1, 0.1), 0.9, "t")
    tries = [next_steps(replace(load_settings(VALUES), LIMIT=limit), same, [])[-1] for limit in (0, 16)]
    assert "a larger TEST_SIZE" in tries[0] and "a larger LIMIT" in tries[1]


@pytest.mark.parametrize(("cut", "said"), [(3, "first the samples that are cut off: 3 by max_turns"), (2, "")])
def test_where_most_samples_are_cut_off_that_comes_before_the_rate(cut, said):
    ends = ["max_turns"] * cut + ["stop"] * (5 - cut)
    rollouts = [Rollout(n, "sampled", 0, "", end, 1, 0.1, [], "", "", {}, {"score": 0.0}) for n, end in enumerate(ends)]
    for interval in ((0.0, 0.0, 0.0), (-0.3, -0.5, -0.1)):
        first = next_steps(load_settings(VALUES), Difference(Estimate(*interval), 0.01, "t"), rollouts)[0]
        assert first.startswith(said) if said else "cut off" not in first


@pytest.mark.parametrize(("init", "said"), [("sft", "a shorter warm-up (SFT_STEPS), or harder"), ("base", "harder")])
def test_where_the_start_is_right_already_no_rate_is_advised(init, said):
    same = Difference(Estimate(0.0, -0.1, 0.1), 1.0, "t")
    (only,) = next_steps(replace(load_settings(VALUES), INIT=init), same, [], 0.97)
    assert only == f"{said} problems: 97% are right before RL, which leaves little to learn"
    assert "LR=" in next_steps(load_settings(VALUES), same, [], 0.5)[0]


@pytest.mark.parametrize(
    ("steps", "patience", "wanted"),
    [(10, 2, "PATIENCE=0"), (4, 2, "STEPS=8 PATIENCE=0"), (4, 3, "STEPS=8"), (4, 0, "STEPS=8")],
)
def test_a_run_that_patience_ended_is_told_what_continues_it(steps, patience, wanted, tmp_path, monkeypatch):
    monkeypatch.setenv("ARTIFACTS", str(tmp_path))
    s = replace(load_settings(VALUES), STEPS=steps, PATIENCE=patience, TEST_FREQ=1)
    dev = {step: {"val-core/x/acc/mean@1": value} for step, value in {1: 0.1, 2: 0.3, 3: 0.2, 4: 0.3}.items()}
    run_dir = make_run(s, "mine", metrics=dev)
    assert more_training(s, Run.read(run_dir)) == [(wanted, "more steps of this run")]  # its own record counts


@pytest.mark.medium
def test_the_same_rollouts_give_the_same_reports_byte_for_byte(workplace):
    base = workplace.model("base", table([0, 2, 4, 4, 0, 16], 16, GREEDY))
    trained = workplace.model("trained", table(RIGHT, 16, GREEDY))
    contents = []
    for _ in range(2):
        assert workplace.run("compare", str(base), str(trained), N="16").returncode == 0
        assert workplace.run("probe", str(trained), N="16", FILTER="1").returncode == 0
        folders = [workplace.only("compare/countdown/*"), workplace.only("probe/countdown/trained-*")]
        files = [file for folder in folders for file in folder.iterdir() if not file.name.startswith("rollouts")]
        # A spreadsheet holds a date.
        contents.append({file.name: file.read_bytes() for file in files if file.suffix != ".xlsx"})
        for file in files:
            file.unlink()
    names = {"compare.json", "compare.md", "compare.png", "probe.json", "probe.png", "signal.parquet"}
    assert contents[0] == contents[1] and contents[0].keys() == names


@pytest.mark.medium
def test_what_a_model_wrote_stays_text_in_every_report(workplace):
    bad = '=HYPERLINK("http://x")\x00\x1b]0;title\x07[bold]</td><script>|`'
    entries = [{"greedy": answer(bad), "sampled": [answer(bad)]}] * PROMPTS
    base, trained = workplace.model("base", entries), workplace.model("trained", table([1] * 6, 1, [True] * 6))
    result = workplace.run("compare", str(base), str(trained), N="1")
    assert result.returncode == 0, result.stdout
    assert "\x1b]0" not in result.stdout
    import openpyxl

    sheet = openpyxl.load_workbook(workplace.only("compare/countdown/*") / "compare.xlsx").active
    cells = [cell for row in sheet.iter_rows() for cell in row if str(cell.value).startswith("=HYPERLINK")]
    assert cells and all(cell.data_type == "s" for cell in cells)


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"N": "0"}, "N=0: must be greater than 0"),
        ({"FILTER": "yes"}, "FILTER=yes: must be a whole number"),
        ({"FILTER": "1", "FILTER_LOW": "0.9", "FILTER_HIGH": "0.1"}, "FILTER_LOW=0.9: must be less than FILTER_HIGH"),
        ({"N": "1"}, "N=1: a probe looks at how samples differ"),
        ({"EVAL_TEMPERATURE": "0"}, "EVAL_TEMPERATURE=0: a probe looks at how samples differ"),
        ({"TRAIN_FILE": "/no/such.parquet"}, "/no/such.parquet: no such file"),
    ],
)
def test_bad_values_are_refused_in_one_line(workplace, variables, said):
    result = workplace.run("probe", "/no/model", **variables)
    assert result.returncode != 0
    (line,) = result.stdout.strip().splitlines()
    assert line.startswith("error:") and said in line


@pytest.mark.medium
@pytest.mark.parametrize("command", ["eval", "probe"])
def test_a_table_ends_quietly_where_its_reader_has_seen_enough(workplace, command):
    """As `make runs | head` does: what the command writes is there, and no error is said."""
    base, trained = (workplace.model(name, table(RIGHT, 16, GREEDY)) for name in ("base", "trained"))
    arguments = [command, *([f"base={base}", f"trained={trained}"] if command == "eval" else [str(base)])]
    variables = {"N": "16", "FILTER": "1"}
    assert workplace.run(*arguments, **variables).returncode == 0  # sampled before: nothing but the tables is left
    names = ("summary.json", "signal.parquet")
    files = [file for file in workplace.artifacts.rglob("*") if file.name in names]
    for file in files:
        file.unlink()
    given = exported(ROOT / "tasks/countdown/train.sh", {"ARTIFACTS": str(workplace.artifacts), **variables})
    code = "from tests import stub_evaluate as stub\nwith stub.answering(): stub.evaluate()"
    reader, writer = os.pipe()
    os.close(reader)
    ran = [PYTHON, "-c", code, *arguments]
    environment = given | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(ran, env=environment, stdout=writer, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    os.close(writer)
    assert (result.returncode, result.stderr) == (0, "")
    assert files and all(file.exists() for file in files)


# ---- the model's window


def with_window(model: Path, tokens: int | None) -> Path:
    """``model`` with the config of one whose window has so many ``tokens``; None: the config does not say."""
    (model / "config.json").write_text(json.dumps(EMBEDDED_CONFIG | {"max_position_embeddings": tokens}))
    return model


@pytest.mark.parametrize(
    ("arguments", "variables", "lengths"),
    [
        ("eval large={large} m={m}", {"MAX_NEW_TOKENS": "8065"}, "MAX_NEW_TOKENS=8065"),
        ("eval m={m}", {"MAX_RESPONSE_LENGTH": "8065"}, "MAX_RESPONSE_LENGTH=8065"),
        ("probe {m}", {"MAX_NEW_TOKENS": "8065"}, "MAX_NEW_TOKENS=8065"),
        ("compare {large} {m}", {"MAX_NEW_TOKENS": "8065"}, "MAX_NEW_TOKENS=8065"),
        ("pairs {m} {out}", {"MAX_RESPONSE_LENGTH": "8065", "MAX_NEW_TOKENS": "64"}, "MAX_RESPONSE_LENGTH=8065"),
        ("accepted {m} {out}", {"MAX_RESPONSE_LENGTH": "8065", "MAX_NEW_TOKENS": "64"}, "MAX_RESPONSE_LENGTH=8065"),
    ],
)
def test_lengths_beyond_the_models_window_are_refused_before_sampling(
    workplace, tmp_path, arguments, variables, lengths
):
    m, large = (with_window(workplace.model(name, []), size) for name, size in (("m", 8192), ("large", 9000)))
    given = arguments.format(m=m, large=large, out=tmp_path / "out.parquet").split()
    result = workplace.run(*given, **variables, N="2")
    said = f"error: MAX_PROMPT_LENGTH=128 + {lengths}: more than m's window of 8192 tokens; "
    assert (result.returncode, result.stdout) == (1, f"{said}lower one of them, or take another MODEL\n")
    assert not [*workplace.artifacts.rglob("sampling.log")]


@pytest.mark.parametrize("task", ["countdown", "calculator"])  # calculator: the turns of an episode share the window
def test_the_window_is_that_of_an_adapters_base_model_and_an_unknown_one_passes(task, tmp_path):
    def job(model: Path, tokens: int) -> Job:
        return Job.of(s, str(model), tmp_path / "rows", replace(sampling(s), max_prompt_tokens=128, max_tokens=tokens))

    for name in ("base", "adapter", "unknown"):
        (tmp_path / name).mkdir()
    base, adapter, unknown = with_window(tmp_path / "base", 8192), tmp_path / "adapter", tmp_path / "unknown"
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base), "r": 8}))
    s = task_settings(task)
    for model in (base, adapter):
        assert job(model, 8192 - 128).sampling.max_tokens == 8064
        with pytest.raises(SettingsError, match=f"more than {model.name}'s window of 8192 tokens"):
            job(model, 8192 - 127)
    config = json.loads((base / "config.json").read_text())
    for name in ("rope_scaling", "rope_parameters"):  # of transformers 4 and 5
        (tmp_path / name).mkdir()
        yarn = config | {name: {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}}
        (tmp_path / name / "config.json").write_text(json.dumps(yarn))
        assert job(tmp_path / name, 32768 - 128).sampling.max_tokens == 32640
        with pytest.raises(SettingsError, match="window of 32768 tokens"):
            job(tmp_path / name, 32768 - 127)
    for model in (unknown, with_window(unknown, None), tmp_path / "none"):
        assert job(model, 9000).sampling.max_tokens == 9000


@pytest.mark.parametrize(
    ("task", "variables", "given"),
    [
        ("gsm8k", {"REWARD": "flexible"}, (gsm8k.compute_score, None, None)),
        ("calculator", {}, (None, None, calculator.Environment)),
    ],
)
def test_the_process_that_samples_has_the_same_job_and_reward(task, variables, given, tmp_path):
    s = task_settings(task, variables)
    job, scoring = Job.of(s, "m", tmp_path / "rows", sampling(s)), Scoring.of(s, *given)
    stored = json.loads(json.dumps([asdict(job), scoring.stored()]))
    there = Scoring.read(stored[1])
    assert Job.read(stored[0]) == job and (there.mark, there.environment) == (scoring.mark, given[2])
    if not s.multi_turn:
        assert (there.compute_score.func, there.compute_score.keywords) == (given[0], {"variant": "flexible"})


def test_empty_data_is_named(workplace):
    write_parquet([], workplace.artifacts / "data/countdown/test.parquet", rl_schema())
    result = workplace.run("eval", f"m={workplace.model('m', [])}")
    assert result.returncode == 1 and "test.parquet: has no rows to sample" in result.stdout


def test_an_evaluation_needs_no_package_that_it_does_not_use():
    code = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("openpyxl", "matplotlib"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Missing())
import verl_tasks.evaluation.main
"""
    subprocess.run([PYTHON, "-c", code], check=True, cwd=ROOT)


def test_a_key_that_not_every_reward_has_is_named(capsys):
    rewards = [{"score": 1.0, "acc": 1.0, "many": 5.0}, {"score": 0.0, "acc": 0.0}, None]
    rollouts = [Rollout(i, "sampled", 0, "", "stop", 1, 0.5, [], "t", "", {}, each) for i, each in enumerate(rewards)]
    assert sample.report_errors(rollouts) == 0
    assert capsys.readouterr().out == "  the reward's key many is in 1 of 2 responses; its mean is theirs alone\n"
    assert sample.report_errors(rollouts[:1]) == 0 and capsys.readouterr().out == ""


@pytest.mark.parametrize("words", [(), ("evla",)])
def test_a_program_that_make_did_not_start_says_what_its_first_word_must_be(words, workplace):
    refused = workplace.run(*words)
    said = f"error: {' '.join(['evaluate.py', *words])}: the first word must be one of probe, eval, compare"
    assert refused.returncode == 1 and refused.stdout.strip().startswith(said), refused.stdout
    assert len(refused.stdout.strip().splitlines()) == 1
