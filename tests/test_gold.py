"""The gold check: each row's own demonstration, scored by the task's reward while the data is made."""

import functools
import importlib
import itertools
import json
import multiprocessing
import os
import re
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from tasks.calculator import prepare_data as calculator
from tasks.calculator.environment import TOOLS
from tasks.calculator.environment import Environment as calculator_environment
from tasks.countdown.prepare_data import example
from tests.helpers import ROOT, SINGLE_TURN, copy_of_checkout, exported, has_ended, make, until
from tests.test_settings import VALUES
from verl_tasks import guarded
from verl_tasks.data import gold
from verl_tasks.data.prepare import Examples, _prepare, describe, load_tokenizer, prepare
from verl_tasks.data.records import load
from verl_tasks.models.chat_template import demonstration_ids
from verl_tasks.rewards.answers import reward_function
from verl_tasks.rewards.environment import Step, tool_message
from verl_tasks.rewards.tool_calls import render_calls
from verl_tasks.rows import DataError, Example, read_rows
from verl_tasks.settings import load_settings

WRONG = "<answer>1</answer>"
SHARED = Path(os.environ.get("SHARED_DATA", ROOT.parent / "shared/data"))
SMALL = {"TRAIN_SIZE": "24", "TEST_SIZE": "8", "DEV_SIZE": "4", "SFT_SIZE": "24"}
SMALL |= {"TRAIN_BATCH_SIZE": "4", "MINI_BATCH_SIZE": "4", "SOURCE": "toy", "INIT": "base", "MODEL": "/none"}


@functools.cache
def defaults(task: str) -> dict[str, str]:
    return exported(ROOT / "tasks" / task / "train.sh", {"N_GPUS": "1"})


def settings(task: str = "countdown", **changes):
    return load_settings(defaults(task) | SMALL | {"N_GPUS": "1"} | changes)


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The folder of countdown's data."""
    monkeypatch.setenv("ARTIFACTS", str(tmp_path))
    return tmp_path / "data/countdown"


def toy(s, last: int = 36):
    """As many problems as SMALL takes. The target is a sum; each fifth has a wrong demonstration, each seventh none."""
    for number in range(1, last + 1):
        made = example([number, 2000], number + 2000)
        if number % 7 == 0:
            yield replace(made, demonstration=None)
        else:
            yield replace(made, demonstration=WRONG) if number % 5 == 0 else made


def numbers(file: Path) -> list[int]:
    """Of the rows of an RL file the numbers that ``toy`` counted."""
    return [json.loads(row["reward_model"]["ground_truth"])["numbers"][0] for row in read_rows(file)]


def wrong_rows(folder: Path, side: str) -> list[str]:
    """Those of a side of ``toy`` whose demonstration is wrong."""
    rows = enumerate(numbers(folder / f"{side}.parquet"))
    return [f"row {place}" for place, number in rows if number % 5 == 0 and number % 7]


def test_rows_whose_demonstration_is_wrong_are_named(folder):
    entry = prepare(settings(), {"toy": toy})["gold"]
    # Of 1 to 36, 6 are divisible by 5 and not by 7, and 5 by 7.
    assert (entry["rows"], entry["demonstrations"], entry["right"]) == (36, 31, 25)
    assert len(entry["others"]) == 6 and "dropped" not in entry
    wrong = {side: rows for side in ("test", "dev", "train") if (rows := wrong_rows(folder, side))}
    expected = [f"{side}: {row}" for side, rows in wrong.items() for row in rows]
    assert sorted(each["place"] for each in entry["others"]) == sorted(expected)
    assert len(numbers(folder / "train.parquet")) == 24  # a warning leaves nothing out
    said = describe(json.loads((folder / "manifest.json").read_text())).splitlines()[-1]
    assert said.startswith("  gold check: 25 of 31 demonstrations get acc 1 (5 rows have none); the others: ")
    assert len(wrong["train"]) > 1 and all(f"{side}: {', '.join(rows)} (" in said for side, rows in wrong.items())


def test_drop_leaves_the_rows_out_of_all_files(folder):
    manifest = prepare(settings(GOLD="drop"), {"toy": toy})
    assert manifest["gold"]["dropped"] == 6 and manifest["gold"]["right"] == 25
    kept = {side: numbers(folder / f"{side}.parquet") for side in ("test", "dev", "train")}
    taught = [number for number in kept["train"] if number % 7]
    assert manifest["rows"] == {side: len(of_side) for side, of_side in kept.items()} | {"sft": len(taught)}
    left = [number for number in range(1, 37) if number % 5 or number % 7 == 0]
    assert sorted(itertools.chain(*kept.values())) == left
    assert all(row["messages"][-1]["content"] != WRONG for row in read_rows(folder / "sft.parquet"))
    assert "6 rows left out (GOLD=drop)" in describe(manifest) and not gold.failed(manifest, settings())
    assert f"TRAIN_SIZE=24: there are {len(kept['train'])}" in manifest["note"]


def test_error_writes_nothing_and_says_why_in_one_line(folder):
    with pytest.raises(DataError, match=r"^GOLD=error: 25 of 31 demonstrations get acc 1.*; train: row \d+") as error:
        prepare(settings(GOLD="error"), {"toy": toy})
    assert "\n" not in str(error.value) and list(folder.glob("*")) == []
    prepare(settings(GOLD="error"), {"toy": lambda s: (e for e in toy(s, 99) if e.demonstration != WRONG)})
    assert (folder / "train.parquet").exists()


@pytest.mark.parametrize(("task", "file"), [("countdown", "reward.py"), ("calculator", "environment.py")])
def test_drop_makes_the_data_anew_when_the_reward_changes(task, file, monkeypatch):
    s, fingerprints = settings(task, GOLD="drop"), set()
    for digest in ("one", "other"):
        monkeypatch.setattr("verl_tasks.settings.code_digest", lambda p, d=digest: d if p.name == file else "")
        fingerprints.add(s.data_fingerprint())
    assert len(fingerprints) == 2


def test_drop_does_not_write_an_empty_side(folder):
    prepare(settings(), {"toy": toy})
    tests = numbers(folder / "test.parquet")
    before = {file.name: file.read_bytes() for file in folder.glob("*.parquet")}

    def all_tests_wrong(s):
        return (replace(e, demonstration=WRONG) if e.ground_truth["numbers"][0] in tests else e for e in toy(s))

    with pytest.raises(DataError, match="GOLD=drop: leaves no test row; "):
        prepare(settings(GOLD="drop"), {"toy": all_tests_wrong})
    assert {file.name: file.read_bytes() for file in folder.glob("*.parquet")} == before


def test_a_row_of_a_file_is_named_by_its_line(folder, tmp_path, small_model):
    path = tmp_path / "own.jsonl"
    rows = [{"text": f"{n}", "truth": "?" if n in (3, 40) else {"numbers": [n, 1], "target": n + 1}} for n in range(60)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def one(record):
        return [Example(record["text"], record["truth"], f"<answer>{record['text']}+1</answer>")]

    s = settings(FILE=str(path), MODEL=str(small_model), TRAIN_SIZE="0")
    manifest = prepare(s, {"file": lambda s: Examples(load(s.FILE), one)})
    assert manifest["gold"]["right"] == 58
    assert [other["place"] for other in manifest["gold"]["others"]] == [f"{path}: line 4", f"{path}: line 41"]
    assert all(
        "TypeError: " in other["reason"] and "/reward.py:" in other["reason"] for other in manifest["gold"]["others"]
    )


# ---- a reward that hangs, dies, asks a judge


def rows(count: int, demonstration: str | None = "right") -> list[gold.Row]:
    return [gold.Row(f"x: row {i}", demonstration, str(i), "countdown", {}) for i in range(count)]


@pytest.fixture
def reward(monkeypatch):
    """Sets countdown's reward."""
    return lambda score: monkeypatch.setattr("tasks.countdown.reward.compute_score", score)


@pytest.mark.parametrize("count", [7, 3 * gold.CHUNK + 5])
def test_every_row_is_scored_in_its_place(count, reward):
    reward(lambda source, text, truth, extra=None: {"score": 0.9, "acc": int(truth) % 3 > 0})
    entry, wrong = gold.check(settings(), rows(count))
    assert wrong == set(range(0, count, 3)) and entry["right"] == count - len(wrong)
    assert [other["place"] for other in entry["others"]] == [f"x: row {i}" for i in range(0, count, 3)][: gold.SHOWN]


def test_the_variant_and_what_verl_passes_arrive(reward):
    seen = {"source": "countdown", "extra": {"split": "dev", "index": 3}, "variant": "strict"}

    def score(source, text, truth, extra_info=None, variant=None):
        return float({"source": source, "extra": extra_info, "variant": variant} == seen)  # a score without acc

    reward(score)
    entry, _ = gold.check(settings(REWARD="strict"), [replace(rows(1)[0], extra=seen["extra"])])
    assert entry["right"] == 1
    assert gold.check(settings(), rows(1))[0]["others"] == [{"place": "x: row 0", "reason": "score 0"}]


def test_a_row_that_breaks_the_reward_does_not_break_the_check(reward):
    def score(source, text, truth, extra=None):
        if truth == "0":
            os._exit(1)
        if truth == "1":
            raise SystemExit("no")
        if truth == "2":
            return {"score": float("nan")}
        return {"score": 1.0}

    reward(score)
    entry, wrong = gold.check(settings(), rows(6))
    assert wrong == {0, 1, 2} and entry["note"] == ""
    reasons = [other["reason"] for other in entry["others"]]
    assert reasons[0].startswith("the process died") and reasons[2] == "score nan"
    assert reasons[1].startswith("SystemExit: no (tests/test_gold.py:")


def test_one_fault_of_the_reward_is_told_once(reward):
    reward(reward_function(lambda *given, **more: None))
    entry, _ = gold.check(settings(), rows(3))
    reason = "RewardError: compute_score must return a dict with `score` and `acc`, not None"
    assert gold.said(entry) == f"0 of 3 demonstrations get acc 1; the others: x: row 0, row 1, row 2 ({reason})"


@pytest.fixture
def short(monkeypatch):
    """Let the limits of a call be short where ``hangs`` says so of its text and its row's truth. All other calls have
    the time that a busy machine needs."""

    def shortened(hangs) -> None:
        monkeypatch.setattr(gold, "CALL_SECONDS", 0.3)
        monkeypatch.setattr(guarded, "FIRST_SECONDS", 0.6)
        exchange = guarded.Guarded._exchange

        def patient(self, text, indices, seconds):
            assert seconds in (gold.CALL_SECONDS, guarded.FIRST_SECONDS)
            ends = any(hangs(text, self.rows[index].truth) for index in indices)
            return exchange(self, text, indices, seconds if ends else 60)

        monkeypatch.setattr(guarded.Guarded, "_exchange", patient)

    return shortened


@pytest.mark.medium
def test_rows_on_which_the_reward_hangs_end_the_check(reward, short):
    hanging = (0, 5, 8, 9)
    short(lambda text, truth: int(truth) in hanging)

    def score(source, text, truth, extra=None):
        if int(truth) in hanging:
            time.sleep(600)
        return {"score": 1.0}

    reward(score)
    started = time.monotonic()
    entry, wrong = gold.check(settings(), rows(2 * gold.CHUNK))
    assert time.monotonic() - started < 60  # each would take 600
    assert wrong == {0, 5, 8} and (entry["demonstrations"], entry["right"]) == (9, 6)
    assert entry["note"].startswith(f"ended at row 9 of {2 * gold.CHUNK}: 3 took longer than")
    assert entry["note"] in gold.said(entry)


def test_a_reward_may_have_processes_which_end_with_the_check(reward, tmp_path):
    def score(source, text, truth, extra=None):
        if truth == "0":
            child = multiprocessing.Process(target=time.sleep, args=(600,))
            child.start()
            (tmp_path / "pid").write_text(str(child.pid))
        return 1.0

    reward(score)
    assert gold.check(settings(), rows(3))[0]["right"] == 3
    until(lambda: has_ended(int((tmp_path / "pid").read_text())))


def test_no_demonstrations_and_a_judge_are_not_checked_and_said(reward):
    entry, _ = gold.check(settings(GOLD="error"), rows(3, None))
    assert gold.said(entry) == "not checked: no demonstrations"
    from verl_tasks.rewards import judge

    def score(*arguments, **named):
        raise AssertionError("a call")

    score.__module__ = judge.__name__
    reward(score)
    entry, wrong = gold.check(settings(), rows(3))
    assert gold.said(entry) == "not checked: the reward asks a judge" and not wrong


# ---- wrong forms


def test_a_wrong_form_that_is_right_is_named(reward, monkeypatch):
    reward(lambda source, text, truth, extra=None: {"score": 1.0, "acc": float("#" in text)})

    def forms(text):
        return [text.replace("#", ""), f"<think>{text}</think>"] if text[-1] in "13" else []

    monkeypatch.setattr("tasks.countdown.reward.wrong_forms", forms)
    made = [replace(row, demonstration=f"# {row.truth}") for row in rows(5)]
    entry, wrong = gold.check(settings(), made)
    assert (entry["right"], entry["forms"], wrong) == (5, 4, set()) and gold.failed({"gold": entry}, settings())
    assert entry["taken"] == [{"place": f"x: row {i}", "form": f"<think># {i}</think>"} for i in (1, 3)]
    assert gold.said(entry) == (
        "5 of 5 demonstrations get acc 1; wrong forms that get it too: "
        "x: row 1 (<think># 1</think>); x: row 3 (<think># 3</think>)"
    )


@pytest.mark.medium
def test_wrong_forms_on_which_the_reward_hangs_end_the_check(reward, short, monkeypatch):
    short(lambda text, truth: text.endswith("!"))
    monkeypatch.setattr("tasks.countdown.reward.wrong_forms", lambda text: [text + "!"])
    reward(lambda source, text, truth, extra=None: time.sleep(600) if text.endswith("!") else 1.0)
    entry, wrong = gold.check(settings(), rows(20))
    assert wrong == {0, 1, 2} and "a wrong form: took longer than 0.3 s" in entry["others"][0]["reason"]
    assert entry["note"].startswith("ended at row 3 of 20")


def test_error_takes_no_reward_that_calls_a_wrong_form_right(folder, monkeypatch):
    def right(s):
        return (e for e in toy(s, 99) if e.demonstration and e.demonstration != WRONG)

    prepare(settings(GOLD="error"), {"toy": right})  # countdown's own wrong forms are not right
    monkeypatch.setattr("tasks.countdown.reward.wrong_forms", lambda text: [text + " "])
    with pytest.raises(DataError, match=r"^GOLD=error: 36 of 36 .*; wrong forms that get it too: test: row 0"):
        prepare(settings(GOLD="error"), {"toy": right})


# ---- the shipped tasks


@pytest.mark.medium
@pytest.mark.parametrize("difficulty", ["easy", "hard"])
@pytest.mark.parametrize("task", SINGLE_TURN)
def test_every_demonstration_of_the_shipped_tasks_is_right(task, difficulty):
    module = importlib.import_module(f"tasks.{task}.prepare_data")
    variants = getattr(importlib.import_module(f"tasks.{task}.reward"), "VARIANTS", ("",))
    for variant in variants:
        s = settings(task, DIFFICULTY=difficulty, REWARD=variant)
        entry, wrong = gold.check(s, [row_of(task, e) for e in islice(module.generate(s), 200)])
        assert (entry["demonstrations"], wrong, entry["taken"]) == (200, set(), []), entry
        assert entry["forms"] >= 400


def row_of(task: str, e: Example) -> gold.Row:
    truth = e.ground_truth if isinstance(e.ground_truth, str) else json.dumps(e.ground_truth)
    return gold.Row(e.place, e.demonstration, truth, task, {})


@pytest.mark.parametrize("difficulty", ["easy", "hard"])
def test_every_episode_of_calculator_is_right(difficulty, folder):
    small = {"DIFFICULTY": difficulty, "SOURCE": "generate", "TRAIN_SIZE": "150", "SFT_SIZE": "9"}
    entry = prepare(settings("calculator", **small), {"generate": calculator.generate})["gold"]
    assert (entry["demonstrations"], entry["right"], entry["forms"], entry["taken"]) == (162, 162, 324, []), entry


# ---- episodes: what they need, and calls that are repeated


def stock(s, turns: int = 4, last: int = 45):
    """As many sums of several calls as EPISODES takes; each third has one more."""
    for number in range(1, last + 1):
        calls = [f"{number} + {step}" for step in range(turns - 1 + (number % 3 == 0))]
        shown = []
        for text in calls:
            call = render_calls([{"name": "calculator", "arguments": {"expression": text}}])
            shown += [{"role": "assistant", "content": call}, tool_message(str(number + int(text.split()[-1])))]
        answer = {"role": "assistant", "content": f"<answer>{number}</answer>"}
        yield Example(f"what is {number}?", {"answer": str(number)}, [*shown, answer], tools=TOOLS)


EPISODES = {"SOURCE": "toy", "TEST_SIZE": "9", "DEV_SIZE": "6", "TRAIN_SIZE": "30", "SFT_SIZE": "30"}


def test_demonstrations_are_played_under_the_tasks_limits(folder, small_model):
    long = {"MAX_PROMPT_LENGTH": "4096", "MAX_TURN_LENGTH": "512", "MAX_RESPONSE_LENGTH": "4096"}  # a byte is a token
    s = settings("calculator", **EPISODES, MODEL=str(small_model), MAX_TURNS="4", **long)
    manifest = prepare(s, {"toy": stock})
    said = "15 of 45 demonstrations cannot be played to their end: 15 need more than MAX_TURNS=4; set MAX_TURNS=5"
    assert manifest["gold"]["right"] == 45 and said in describe(manifest, s) and gold.failed(manifest, s)
    assert not gold.failed(manifest, replace(s, MAX_TURNS=5)) and "cannot" not in describe(
        manifest, replace(s, MAX_TURNS=5)
    )
    with pytest.raises(DataError, match=r"GOLD=error: 45 of 45 .*; set MAX_TURNS=5$"):
        prepare(replace(s, GOLD="error"), {"toy": stock})
    needs = manifest["gold"]["needs"]
    assert {need[1] for need in needs} == {4, 5} and sum(need[-1] for need in needs) == 45
    # The tokens are those of the episode's own demonstration.
    tokenizer = load_tokenizer(str(small_model))
    shown = next(iter(stock(s))).messages(), next(iter(stock(s))).demonstration
    _, mask = demonstration_ids(tokenizer, [*shown[0], *shown[1]], 1, TOOLS)
    longest = max(len([*run]) for mine, run in itertools.groupby(mask) if mine)
    assert any(need[:4] == [mask.index(1), 4, longest, len(mask) - mask.index(1)] for need in needs)
    tight = replace(s, MAX_TURNS=5, MAX_TURN_LENGTH=longest - 1, MAX_RESPONSE_LENGTH=len(mask) - mask.index(1))
    wanted = max(need[2] for need in needs), max(need[3] for need in needs)
    assert gold.said(manifest["gold"], tight).endswith(
        f"set MAX_TURN_LENGTH={wanted[0]} MAX_RESPONSE_LENGTH={wanted[1]}"
    )


def test_a_response_is_measured_too(folder, small_model):
    s = settings(MODEL=str(small_model), MAX_RESPONSE_LENGTH="4")
    manifest = prepare(s, {"toy": toy})
    assert re.search(r"31 of 31 demonstrations cannot .* MAX_RESPONSE_LENGTH=4; set MAX_RES", describe(manifest, s))
    assert not gold.too_small(prepare(settings(), {"toy": toy})["gold"], s)  # no tokenizer here


def by_call(self, action):
    """Half for each call, half for the answer."""
    done = not action.calls
    return Step([] if done else [tool_message("0")], reward=0.5, done=done)


def by_calls_alone(self, action):
    """A quarter for each call up to 1, the whole for the answer."""
    self.calls = getattr(self, "calls", 0) + bool(action.calls)
    done = not action.calls
    rest = 1 - 0.25 * min(self.calls, 4)
    return Step([] if done else [tool_message("0")], reward=rest if done else 0.25 * (self.calls <= 4), done=done)


@pytest.mark.parametrize(
    ("step", "said"), [(by_call, "each call made twice: 1.5"), (by_calls_alone, "first call 8 times, no answer: 1")]
)
def test_calls_that_earn_more_each_time_are_named(folder, monkeypatch, step, said):
    monkeypatch.setattr(calculator_environment, "step", step)
    monkeypatch.delattr("tasks.calculator.environment.wrong_forms")
    s = settings("calculator", **EPISODES)
    one_call = {"toy": lambda s: (e for e in stock(s, 2, 99) if len(e.demonstration) == 3)}
    entry = prepare(s, one_call)["gold"]
    assert {each["form"] for each in entry["taken"]} == {said}
    assert gold.failed({"gold": entry}, s) and gold.said(entry).count(said) == 1


def test_an_episode_whose_rewards_never_add_up_to_1_says_so(folder, monkeypatch):
    monkeypatch.setattr(calculator_environment, "step", lambda self, action: Step(reward=0.1, done=not action.calls))
    monkeypatch.delattr("tasks.calculator.environment.wrong_forms")
    with pytest.raises(DataError, match="where a right episode's rewards add up to 1, or"):
        prepare(settings("calculator", **EPISODES), {"toy": stock})


def test_an_environment_that_fails_names_its_line_and_nothing_right_is_an_error(folder, monkeypatch):
    def step(self, action):
        return self.sen.add(action)

    monkeypatch.setattr(calculator_environment, "step", step)
    with pytest.raises(DataError, match="nothing is right") as error:
        prepare(settings("calculator", **EPISODES), {"toy": stock})
    line = step.__code__.co_firstlineno + 1
    assert f"AttributeError: 'Environment' object has no attribute 'sen' (tests/test_gold.py:{line}, in step)" in str(
        error.value
    )
    assert "self.sen.add" in (folder.with_name("calculator") / gold.LOG).read_text()


@pytest.mark.medium
@pytest.mark.skipif(not (SHARED / "gsm8k").is_dir(), reason="no shared data")
def test_every_demonstration_of_gsm8k_is_right():
    found = importlib.import_module("tasks.gsm8k.prepare_data").from_file(settings("gsm8k", FILE=str(SHARED / "gsm8k")))
    entry, wrong = gold.check(settings("gsm8k"), [row_of("gsm8k", e) for e in found])
    assert (entry["demonstrations"], wrong, entry["taken"]) == (8792, set(), []), entry


# ---- the commands


@pytest.mark.medium
def test_make_data_says_it_and_checks_again_after_the_reward_was_changed(tmp_path):
    checkout = copy_of_checkout(tmp_path / "checkout")
    given = {"TASK": "countdown", "STACK": "cpu", "ARTIFACTS": str(tmp_path / "artifacts"), "TRAIN_SIZE": "32"}
    given |= {"TEST_SIZE": "8", "DEV_SIZE": "4", "SFT_SIZE": "32"}
    reward = checkout / "tasks/countdown/reward.py"
    right = reward.read_text()
    odd = right.replace("if correct else", "if False else")
    reward.write_text(odd.replace('"acc": correct', '"acc": correct and truth["target"] % 2'))
    result = make("data", cwd=checkout, **given)
    assert result.returncode == 0 and re.search(r"gold check: [12]\d of 44 demonstrations", result.stdout)
    result = make("doctor", cwd=checkout, **given)
    assert re.search(r"warning  gold check: [12]\d of 44", result.stdout) and "set GOLD=drop" in result.stdout
    reward.write_text(right)
    assert "gold check: reward.py has changed since" in make("doctor", cwd=checkout, **given, GOLD="error").stdout
    result = make("data", cwd=checkout, **given, GOLD="error")
    assert result.returncode == 0 and "gold check: 44 of 44 demonstrations get acc 1" in result.stdout
    assert "up to date" not in result.stdout


def test_the_demonstrations_of_the_calculator_are_played(tmp_path, monkeypatch):
    def wrong_now_and_then(settings):
        for number, problem in enumerate(calculator.generate(settings)):
            unfinished = replace(problem, demonstration=problem.demonstration[:2])  # no answer
            other = replace(problem, ground_truth={"answer": "a lie"})
            yield {3: other, 5: unfinished}.get(number, problem)

    monkeypatch.setenv("ARTIFACTS", str(tmp_path))
    sizes = {"TRAIN_SIZE": 8, "TEST_SIZE": 2, "DEV_SIZE": 2, "SFT_SIZE": 8, "N_SAMPLES": 12}
    s = replace(load_settings(VALUES), TASK="calculator", DIFFICULTY="easy", SOURCE="generate")
    s = replace(s, **{name: size for name, size in sizes.items() if hasattr(s, name)})
    entry = _prepare(s, "generate", wrong_now_and_then, "")["gold"]
    assert (entry["demonstrations"], entry["right"]) == (12, 10)
    assert sorted(other["reason"] for other in entry["others"]) == ["score 0, acc 0", "score 0, acc 0"]
