"""Episodes in eval, probe and compare, with an engine that answers from a table: every number is known."""

import json
import os
import pickle
import re
import shutil
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tasks.calculator.environment import TOOLS, Environment
from tests import stub_evaluate
from tests.helpers import ROOT, exported
from tests.stub_evaluate import asked
from verl_tasks.evaluation import episodes, sample, sampler
from verl_tasks.evaluation.engine_pool import Hardware
from verl_tasks.evaluation.engines import Request, Sampling, TurnRequest
from verl_tasks.evaluation.episodes import Stage, play_all
from verl_tasks.evaluation.rollouts import Completion, Rollout, read_rollouts, write_rollouts
from verl_tasks.evaluation.sample import Job, Scoring, check_chat, load
from verl_tasks.evaluation.summary import summarize
from verl_tasks.evaluation.tables import sizes
from verl_tasks.files import write_json
from verl_tasks.launch import main as launch
from verl_tasks.models.chat_template import answer_ids
from verl_tasks.rewards.environment import Step, tool_message
from verl_tasks.rewards.episode import Limits
from verl_tasks.rewards.tool_calls import render_calls
from verl_tasks.rows import DataError, chat, read_rows, rl_row, rl_schema, tools_of, write_parquet
from verl_tasks.settings import SettingsError

CALL = render_calls([{"name": "calculator", "arguments": {"expression": "3 + 4"}}])
UNKNOWN = render_calls([{"name": "python", "arguments": {}}])
RIGHT, WRONG = "<answer>7</answer>", "<answer>8</answer>"
# Of each prompt: the greedy episode, and two sampled ones.
TABLE = [
    {"greedy": [CALL, RIGHT], "sampled": [[CALL, RIGHT], [RIGHT]]},
    {"greedy": [WRONG], "sampled": [[UNKNOWN, CALL, RIGHT], [CALL, WRONG]]},
    {"greedy": ["<answer>7..."], "sampled": [[CALL] * 4, ["hm..."]]},
]
TURNS = [[2, 1], [3, 2], [4, 1]]
PROMPTS = len(TABLE)


@pytest.fixture
def workplace(tmp_path, small_model):
    class Workplace(stub_evaluate.Workplace):
        def model(self, name: str, table: list) -> Path:
            folder = super().model(name, table)
            for file in (*small_model.glob("*token*"), small_model / "chat_template.jinja"):
                shutil.copy(file, folder)
            return folder

        def run(self, *arguments: str, sampled=stub_evaluate.here, **variables: str) -> subprocess.CompletedProcess:
            given = {"N": "2", "MAX_PROMPT_LENGTH": "1024", "MAX_TURNS": "4"} | variables
            given |= {"ARTIFACTS": str(self.artifacts), "MAX_RESPONSE_LENGTH": "2048", "MAX_TURN_LENGTH": "512"}
            environment = exported(ROOT / "tasks/calculator/train.sh", given)
            with stub_evaluate.answering(sampled):
                return stub_evaluate.called(stub_evaluate.evaluate_episodes, arguments, environment)

    made = Workplace(tmp_path)
    for name in ("test", "train"):
        rows = [rl_row("calculator", chat(f"{name} {i}"), {"answer": "7"}, name, i, TOOLS) for i in range(PROMPTS)]
        write_parquet(rows, made.artifacts / f"data/calculator/{name}.parquet", rl_schema(tools=True))
    return made


def test_a_model_without_a_chat_template_is_refused_in_one_line_before_sampling(workplace):
    model = workplace.model("m", TABLE)
    (model / "chat_template.jinja").unlink()
    result = workplace.run("eval", f"m={model}")
    said = f"error: {model}: has no chat template to render prompts; take an instruct model (MODEL)\n"
    assert (result.returncode, result.stdout) == (1, said)
    assert not [*workplace.artifacts.rglob("sampling.log")]


def test_a_chat_that_the_template_refuses_is_named_before_an_engine_starts(small_model, tmp_path):
    """One of each form is tried: here only the second prompt begins with the model."""
    folder = tmp_path / "refuses"
    shutil.copytree(small_model, folder)
    template = folder / "chat_template.jinja"
    refusal = "{% if messages[0]['role'] == 'assistant' %}{{ raise_exception('the user first') }}{% endif %}"
    template.write_text(refusal + template.read_text())
    job = Job(str(folder), "rows.parquet", 0, Sampling(1, False, 1.0, 1.0, 9, 9, 0), Hardware())
    user = {"role": "user", "content": "hi"}
    plain = [Request(index, "sampled", [user]) for index in (0, 2)]
    check_chat(job, plain)
    with pytest.raises(DataError, match=r"refuses: prompt 1 of rows.parquet: .* the user first; take another MODEL"):
        check_chat(job, [*plain, Request(1, "sampled", [{"role": "assistant", "content": "hm"}, user])])
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 100}))
    with pytest.raises(DataError, match=r"token \d+ of its tokenizer, and its weights know 100; take the tokenizer"):
        check_chat(job, plain)


def test_episodes_get_the_exact_metrics_and_each_turn_is_one_batch(workplace):
    model = workplace.model("m", TABLE)
    result = workplace.run("eval", f"m={model}")
    assert result.returncode == 0, result.stdout
    summary = json.loads(workplace.only("eval/calculator/m-*/summary.json").read_text())
    assert (summary["prompts"], summary["samples"], summary["left_out"], summary["errors"]) == (3, 2, 0, 0)
    value = {name: estimate["value"] for name, estimate in summary["metrics"].items()}
    sampled = [text for prompt in TABLE for episode in prompt["sampled"] for text in episode]
    lengths = [len(text) - 3 if text.endswith("...") else len(text) + 1 for text in sampled]  # a byte is a token
    expected = {
        "accuracy": 1 / 3,
        "pass@1": (1 + 0.5 + 0) / 3,
        "pass@2": 2 / 3,
        "wrong": 1 / 6,
        "unreadable": 2 / 6,  # both were cut off
        "lenient": 3 / 6,
        "format_loss": 0,
        "score": 3 / 6,
        "format": 4 / 6,
        "turns": sum(map(sum, TURNS)) / 6,
        "tool_errors": 1 / 6,
        "failed": 0,
        "cut_length": 0,
        "cut_turn_length": 1 / 6,
        "cut_observation": 0,
        "cut_turns": 1 / 6,
        "timeout": 0,
        "tokens": sum(lengths) / 6,
        "truncated": 2 / 6,
        "entropy": 0.5,
    }
    assert value == pytest.approx(expected) and list(value) == list(expected)
    assert all(low <= v <= high for v, low, high in (e.values() for e in summary["metrics"].values()))
    assert summary["metrics"]["turns"]["high"] > 1
    batches = asked(model)
    assert [len(batch) for batch in batches] == [9, 5, 2, 1] and {turn for *_, turn in batches[2]} == {2}
    rollouts, cut = read_rollouts(workplace.only("eval/calculator/m-*/rollouts.jsonl"))
    assert not cut and len(rollouts) == 9
    found = {(r.index, r.mode, r.sample): r for r in rollouts}
    assert found[0, "sampled", 0].response.endswith(f"<|im_start|>assistant\n{RIGHT}<|im_end|>")
    assert "<tool_response>\n7\n</tool_response>" in found[0, "sampled", 0].response
    assert "error: no tool python; there are: calculator" in found[1, "sampled", 0].response
    assert [found[2, "sampled", n].finish_reason for n in (0, 1)] == ["max_turns", "turn_length"]
    said = [("assistant", CALL), ("tool", "7"), ("assistant", RIGHT)]
    assert found[0, "sampled", 0].messages == [{"role": role, "content": text} for role, text in said]


@pytest.mark.medium
def test_what_has_ended_is_kept_and_the_same_command_plays_the_rest(workplace):
    model = workplace.model("m", TABLE)
    (model / "die").touch()
    result = workplace.run("eval", f"m={model}", sampled=stub_evaluate.beside)
    assert result.returncode != 0 and "the engine died" in result.stdout
    (file,) = workplace.artifacts.glob("eval/calculator/m-*/rollouts.jsonl")
    # The greedy episodes of two prompts have one turn; of each prompt, one of the sampled ones goes on.
    assert {(r.index, r.mode) for r in read_rollouts(file)[0]} == {(1, "greedy"), (2, "greedy")}
    (model / "die").unlink()
    (model / "asked.jsonl").unlink()
    result = workplace.run("eval", f"m={model}")
    assert result.returncode == 0, result.stdout
    assert [each for each in asked(model)[0] if each[1] == "greedy"] == [[0, "greedy", 0, 0]]
    assert len(read_rollouts(file)[0]) == 9


def test_an_environment_that_raises_counts_as_a_reward_that_raises_and_long_prompts_are_left_out(workplace):
    texts = ("a", "b", "c" * 999)
    rows = [rl_row("calculator", chat(text), {"answer": "7"}, "test", i, TOOLS) for i, text in enumerate(texts)]
    write_parquet(rows, workplace.artifacts / "data/calculator/test.parquet", rl_schema(tools=True))
    table = [TABLE[0], {"greedy": ["raise"], "sampled": [["raise"], [CALL, "raise"]]}]
    model = workplace.model("m", table)
    result = workplace.run("eval", f"m={model}")
    assert result.returncode == 1, result.stdout
    assert "reward raised on prompt 1, sampled 1: environment of 'calculator'" in result.stdout
    assert "step raised ZeroDivisionError: the environment broke" in result.stdout
    assert result.stdout.count("error: ") == 1
    summary = json.loads(workplace.only("eval/calculator/m-*/summary.json").read_text())
    assert (summary["prompts"], summary["errors"], summary["left_out"]) == (1, 3, 1)
    assert all(index < 2 for batch in asked(model) for index, *_ in batch)


def test_an_evaluation_says_how_many_episodes_failed_and_where_to_read_why(workplace):
    model = workplace.model("m", [{"greedy": [RIGHT], "sampled": [[RIGHT], ["fail"]]}] * PROMPTS)
    result = workplace.run("eval", f"m={model}")
    assert result.returncode == 0 and "3 of 9 episodes failed: read programs-*.log" in result.stdout


@pytest.mark.medium
def test_probe_and_compare_play_episodes(workplace):
    better = [{"greedy": [CALL, RIGHT], "sampled": [[RIGHT], [CALL, RIGHT]]}] * PROMPTS
    base, trained = workplace.model("base", TABLE), workplace.model("trained", better)
    result = workplace.run("probe", str(base))
    assert result.returncode == 0, result.stdout
    found = json.loads(workplace.only("probe/calculator/base-*/probe.json").read_text())
    assert (found["prompts"], found["metrics"]["turns"]["value"]) == (3, pytest.approx(13 / 6))
    result = workplace.run("compare", str(base), str(trained))
    assert result.returncode == 0, result.stdout
    found = json.loads(workplace.only("compare/calculator/*/compare.json").read_text())
    assert found["gained"] == [1, 2] and found["metrics"]["turns"]["difference"]["value"] == pytest.approx(1.5 - 13 / 6)


@pytest.mark.medium
@pytest.mark.parametrize(("most", "named"), [("300", "MAX_NEW_TOKENS"), ("2048", "MAX_TURN_LENGTH")])
def test_probe_names_the_limit_that_is_of_evaluation_alone(workplace, most, named):
    cut = [{"greedy": ["hm..."], "sampled": [["hm..."]] * 2}] * PROMPTS
    result = workplace.run("probe", str(workplace.model("m", cut)), MAX_NEW_TOKENS=most)
    assert result.returncode == 0, result.stdout
    found = json.loads(workplace.only("probe/calculator/m-*/probe.json").read_text())
    assert f"raise {named})" in found["conclusion"]


def test_episodes_are_played_again_when_the_environment_changes(tmp_path):
    row = rl_row("calculator", chat("a"), {"answer": "7"}, "test", 0, TOOLS)
    write_parquet([row], tmp_path / "test.parquet", rl_schema(tools=True))
    rollout = Rollout(0, "sampled", 0, RIGHT, "stop", 9, 0.5, [], "calculator", "7", {}, {"score": 1.0})
    stored = [replace(rollout, sample=n, lenient=False) for n in (0, 1)]
    write_rollouts(file := tmp_path / "rollouts.jsonl", stored)
    write_json(tmp_path / "rollouts.meta.json", {"reward": "mark"})
    how = Sampling(2, False, 1.0, 1.0, 9, 9, 0)
    job = Job("m", str(tmp_path / "test.parquet"), 0, how, Hardware(), episode=Limits(9, 9, 9, 2, 1.0))
    assert load(job, file, Scoring(None, None, "mark", Environment)) == (stored, [])
    kept, missing = load(job, file, Scoring(None, None, "changed", Environment))
    assert (kept, len(missing), file.read_text()) == ([], 1, "")


def test_the_screen_counts_turns_before_an_episode_has_ended_and_claims_no_0(workplace, tmp_path):
    model, rows = workplace.model("m", TABLE), str(workplace.artifacts / "data/calculator/test.parquet")
    how = Sampling(2, False, 1.0, 1.0, 1024, 2048, 0)
    job = Job(str(model), rows, 0, how, Hardware(), episode=Limits(1024, 2048, 512, 4, 60))
    scoring, out = Scoring(None, None, "mark", Environment), tmp_path / "out/rollouts.jsonl"
    tail = sample._Tail("m", out)
    shown = [sample._progress([tail])]

    class Watched(stub_evaluate.TableEngine):
        def generate(self, requests, sampling, more=list):
            shown.append(sample._progress([tail]))
            for number, answer in enumerate(super().generate(requests, sampling)):
                yield answer
                if not (number or requests[0].turn):
                    shown.append(sample._progress([tail]))

    sampler.sample(Watched(str(model)), job, out, load(job, out, scoring)[1], scoring)
    shown.append(sample._progress([tail]))
    notes = [re.sub(r"[1-9]\d* tokens", "some tokens", progress.note) for progress in shown]
    assert notes[:2] == [" starting the engine", " m, no answer has ended yet"]
    assert set(notes[2:]) == {" m, some tokens/s"} and (shown[2].done, shown[-1].done) == (0, 6)
    assert tail.tokens == sum(rollout.tokens for rollout in load(job, out, scoring)[0]) > 0


def test_limits_count_for_episodes_alone(tmp_path):
    (tmp_path / "rows").touch()
    job = Job("m", str(tmp_path / "rows"), 0, Sampling(2, True, 1.0, 1.0, 9, 9, 0), Hardware())
    limits = Limits(9, 9, 9, 2, 1.0)
    marks = {replace(job, episode=each).fingerprint() for each in (None, limits, replace(limits, turns=3))}
    assert len(marks) == 3


@pytest.mark.medium
def test_batch_plays_the_rows_of_a_table_and_scores_those_with_a_ground_truth(workplace, tmp_path):
    table, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    prompts = [{"prompt": "3 + 4?", "ground_truth": {"answer": "7"}}, {"prompt": "3 + 5?"}]
    table.write_text("".join(json.dumps(row) + "\n" for row in prompts))
    model = workplace.model("m", [{"sampled": [[CALL, RIGHT]]}] * 2)
    (model / "config.json").write_text('{"model_type": "llama", "max_position_embeddings": 4096}')
    given = {"INPUT": str(table), "OUTPUT": str(output), "N": "1", "MAX_NEW_TOKENS": "1024"}
    result = workplace.run("batch", str(model), **given)
    assert result.returncode == 0, result.stdout
    first, second = map(json.loads, output.read_text().splitlines())
    assert (first["score"], first["turns"], second["score"]) == (1.0, 2.0, None)
    assert "<tool_response>\n7\n</tool_response>" in second["response"] and second["finish_reason"] == "stop"


def test_right_episodes_become_demonstrations_with_each_turn(workplace, tmp_path):
    model = workplace.model("m", TABLE)
    result = workplace.run("accepted", str(model), str(tmp_path / "run/accepted.parquet"), ROLLOUT_N="2")
    assert result.returncode == 0, result.stdout
    assert "3 prompts, 2 samples each, 3 accepted" in result.stdout
    rows = list(read_rows(tmp_path / "run/accepted.parquet"))
    assert [row["prompt_messages"] for row in rows] == [1, 1, 1]
    said = [(message["role"], message["content"]) for message in rows[0]["messages"]]
    assert said == [("user", "train 0"), ("assistant", CALL), ("tool", "7"), ("assistant", RIGHT)]
    assert rows[2]["messages"][2]["content"].startswith("error: no tool python") and tools_of(rows[0]) == TOOLS


class Slow(Environment):
    """A step takes ``seconds`` where the row's truth says so."""

    def step(self, action):
        time.sleep(float(self.truth))
        return Step([tool_message("go on")]) if action.calls else Step(reward=1.0, done=True)


class Engine:
    """Each turn takes SECONDS for all that are asked at once; it notes when each is asked."""

    SECONDS = 0.05

    def __init__(self, tokenizer, turns: int):
        self.tokenizer, self.turns, self.asked, self.started = tokenizer, turns, [], time.monotonic()

    def generate(self, requests, sampling, more=list):
        self.asked.append((time.monotonic() - self.started, [(r.index, r.turn) for r in requests]))
        time.sleep(self.SECONDS)
        for request in requests:
            ids = answer_ids(self.tokenizer, CALL if request.turn < self.turns - 1 else RIGHT)
            yield request, [Completion("", "stop", len(ids), 0.5, ids=tuple(ids))]


def played(small_model, seconds: list[float], turns: int, engine=Engine, environment=Slow, step_seconds: float = 30):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(small_model)
    rows = [rl_row("x", chat("hi"), {"answer": str(each)}, "test", i, TOOLS) for i, each in enumerate(seconds)]
    requests = [Request(i, "sampled", []) for i in range(len(rows))]
    made, found = engine(tokenizer, turns), []
    how = Sampling(1, False, 1.0, 1.0, 4096, 4096, 0)
    started = time.monotonic()
    stage = Stage(made, tokenizer, how, Limits(4096, 4096, 4096, turns, step_seconds), environment)
    play_all(stage, rows, requests, lambda group: found.extend((time.monotonic() - started, r) for r in group))
    return made, found


@pytest.mark.slow
def test_a_slow_environment_holds_no_other_episode(small_model):
    engine, found = played(small_model, [2.0, *[0.0] * 7], turns=3)
    ended = {rollout.index: seconds for seconds, rollout in found}
    assert len(ended) == 8 and all(rollout.reward["acc"] == 1 for _, rollout in found)
    assert max(ended[i] for i in range(1, 8)) < 2 < 6 < ended[0]
    assert len(engine.asked[0][1]) == 8


@pytest.mark.medium
def test_steps_of_all_episodes_run_at_once(small_model):
    all_are_here = threading.Barrier(16, timeout=20)

    class Together(Slow):
        def step(self, action):
            all_are_here.wait()
            return super().step(action)

    _, found = played(small_model, [0.0] * 16, turns=3, environment=Together)
    assert [rollout.reward["acc"] for _, rollout in found] == [1] * 16


@pytest.mark.medium
def test_a_step_that_hangs_ends_its_episode_alone(small_model):
    free = threading.Event()

    class Hangs(Slow):
        def step(self, action):
            if self.truth == "0.01" and not action.calls:
                free.wait(60)
            return replace(super().step(action), reward=0.25)

    engine, found = played(small_model, [0.01, 0.0, 0.0], turns=2, environment=Hangs, step_seconds=3)
    free.set()
    ended = {rollout.index: (seconds, rollout) for seconds, rollout in found}
    hung = ended[0][1]
    assert (hung.finish_reason, hung.error, hung.messages[-1]["role"]) == ("step_timeout", "", "assistant")
    expected = {
        "score": 0.25,
        "acc": 0.0,
        "format": 0.0,
        "turns": 2.0,
        "tool_errors": 0.0,
        "failed": 0.0,
        "timeout": 1.0,
    }
    assert {name: value for name, value in hung.reward.items() if not name.startswith("cut_")} == expected
    assert [ended[i][1].finish_reason for i in (1, 2)] == ["stop", "stop"]
    assert max(3, ended[1][0], ended[2][0]) < ended[0][0] < 20
    assert [turn for _, asked in engine.asked for turn in asked].count((0, 1)) == 1


@pytest.mark.medium
def test_an_episode_goes_on_while_the_long_turn_of_another_is_sampled(small_model):
    class Long(Engine):
        """The turn of episode 0 ends after all of the others have ended."""

        def generate(self, requests, sampling, more=list):
            yield from super().generate([each for each in requests if each.index], sampling)
            while sum(turn == self.turns - 1 for _, batch in self.asked for index, turn in batch if index) < 3:
                assert time.monotonic() < self.started + 20
                time.sleep(0.01)
                if joined := more():
                    yield from super().generate(joined, sampling)
            yield from super().generate([each for each in requests if not each.index], sampling)

    _, found = played(small_model, [0.0] * 4, turns=3, engine=Long)
    assert len(found) == 4 and found[-1][1].index == 0


@pytest.mark.medium
def test_who_is_answered_last_has_time_for_a_step_before_the_next_batch(small_model, monkeypatch):
    """The first to be answered asks again while the others are sampled; GRACE counts from the end of the batch."""
    monkeypatch.setattr(episodes, "GRACE", 0.25)

    class OneByOne(Engine):
        def generate(self, requests, sampling, more=list):
            for found in super().generate(requests, sampling):
                yield found
                time.sleep(0.3)

    engine, found = played(small_model, [0.0] * 3, turns=3, engine=OneByOne)
    assert len(found) == 3 and [len(asked) for _, asked in engine.asked] == [3, 3, 3]


def test_an_engine_that_fails_ends_the_evaluation_with_its_error(small_model):
    class Dies(Engine):
        def generate(self, requests, sampling, more=list):
            for found in super().generate(requests, sampling):
                if len(self.asked) > 1:
                    raise RuntimeError("the engine died")
                yield found

    with pytest.raises(RuntimeError, match="the engine died"):
        played(small_model, [0.0] * 3, turns=3, engine=Dies)


def test_a_template_that_refuses_ends_the_evaluation_with_its_error(small_model):
    class Refuses(Engine):
        def __init__(self, tokenizer, turns):
            super().__init__(tokenizer, turns)
            tokenizer.chat_template = "{{ raise_exception('no tools here') }}"

    with pytest.raises(ValueError, match="no tools here"):
        played(small_model, [0.0] * 3, turns=3, engine=Refuses)


def test_each_turn_has_a_seed_of_its_own():
    places = [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (10, 0, 0), (0, 10, 0)]
    turns = [TurnRequest(index, "sampled", [], None, (1,), 9, sample, turn) for index, sample, turn in places]
    seeds = {turn.seed(3) for turn in [*turns, Request(0, "sampled", [])]}
    assert len(seeds) == 7 and pickle.loads(pickle.dumps(turns)) == turns


@pytest.mark.parametrize(
    ("goal", "given", "said"),
    [
        ("rescore", {}, "has episodes of several turns; `make rescore` is for single-turn tasks"),
        ("dpo", {}, "METHOD=dpo: is for single-turn tasks; TASK=calculator has episodes; take another METHOD"),
        ("train", {"STACK": "a100", "N_GPUS": "1"}, "is multi-turn, which STACK=a100 (verl 0.6.1) cannot train"),
    ],
)
def test_what_knows_no_episodes_is_refused_before_anything_starts(goal, given, said, tmp_path, monkeypatch):
    given = {"TASK": "calculator", "STACK": "cpu", "ARTIFACTS": str(tmp_path), "STAGE": goal, **given}
    monkeypatch.setattr(os, "environ", {name: os.environ[name] for name in ("PATH", "HOME")} | given)
    with pytest.raises(SettingsError, match=re.escape(said)):
        launch.main(goal, [])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "keys, said", [("aab", "3 prompts of 2 conversations, 1 samples each"), ("abc", "3 prompts, 1 samples each")]
)
def test_the_title_says_how_many_conversations_the_prompts_are_of(keys, said):
    reward = {"score": 1.0, "acc": 1.0}
    rollouts = [
        Rollout(i, "sampled", 0, "", "stop", 5, 0.1, chat("a"), "t", "{}", {"key": key}, reward)
        for i, key in enumerate(keys)
    ]
    assert sizes(summarize(rollouts)) == said
