"""`make chat` with an engine that repeats what it is asked; its episodes with one whose turns are given."""

import io
import json
import signal
from dataclasses import dataclass, field, replace
from typing import ClassVar

import pytest

from tasks.calculator.environment import TOOLS, Environment
from verl_tasks.evaluation import chat_episode
from verl_tasks.evaluation.chat import talk, task_system, typed
from verl_tasks.evaluation.chat_episode import Table
from verl_tasks.evaluation.engines import Sampling, window
from verl_tasks.evaluation.main import evaluate
from verl_tasks.evaluation.rollouts import Completion
from verl_tasks.evaluation.sample import Scoring
from verl_tasks.models.chat_template import answer_ids, prompt_ids
from verl_tasks.rewards.environment import Step
from verl_tasks.rewards.episode import Limits
from verl_tasks.rewards.tool_calls import render_calls
from verl_tasks.rows import chat, read_rows, rl_row, rl_schema, write_parquet
from verl_tasks.settings import SettingsError

HOW = Sampling(n=1, greedy=False, temperature=1.0, top_p=1.0, max_prompt_tokens=50, max_tokens=5, seed=0)
SYSTEM = [{"role": "system", "content": "be brief"}]
ROWS = [rl_row("t", [*SYSTEM, *chat("what is 3+4")], "7", "test", 0)]


class Echo:
    think_opened = False

    def __init__(self):
        self.asked, self.tools = [], []

    def stream(self, messages, how, tools=None):
        self.asked.append(list(messages))
        self.tools.append(tools)
        if "long" in messages[-1]["content"]:
            raise ValueError("the conversation has 99 tokens, 50 fit: /reset")
        yield from ("you said ", "\x1b[31m" + messages[-1]["content"])
        if "stop me" in messages[-1]["content"]:
            raise KeyboardInterrupt


def score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(ground_truth in solution_str), "acc": 0.0}


def converse(*lines: str):
    engine, screen = Echo(), io.StringIO()
    talk(engine, HOW, ROWS, SYSTEM, Scoring(score, None, ""), iter(lines), screen)
    return engine.asked, screen.getvalue()


def test_turns_are_kept_until_reset():
    asked, shown = converse("one", "two", "/reset", "three")
    assert [len(messages) for messages in asked] == [2, 4, 2]
    assert asked[1][2] == {"role": "assistant", "content": "you said \x1b[31mone"}
    assert all(messages[0] == SYSTEM[0] for messages in asked)
    assert "you said [31mone\n" in shown and "\x1b" not in shown


def test_sample_shows_a_prompt_of_the_test_set_its_reward_and_the_ground_truth():
    asked, shown = converse("/sample", "and 8?")
    assert asked[0] == ROWS[0]["prompt"] and len(asked[1]) == 4
    assert "prompt 0: what is 3+4\n" in shown and "reward: score 0, acc 0\n" in shown and "ground truth: 7\n" in shown


def test_a_sample_with_tools_is_asked_with_them_until_reset():
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    history = [*chat("first"), {"role": "assistant", "content": "", "tool_calls": [call]}, *chat("then")]
    tools = [{"type": "function", "function": {"name": "f"}}]
    engine, rows = Echo(), [rl_row("t", history, "7", "test", 0, tools)]
    talk(engine, HOW, rows, SYSTEM, Scoring(score, None, ""), iter(["/sample", "more", "/reset", "x"]), io.StringIO())
    assert engine.asked[0] == history
    assert engine.tools == [tools, tools, None]


def test_exit_unknown_commands_and_a_conversation_that_is_too_long():
    asked, shown = converse("/what", "", "a long one", "short", "/exit", "never")
    assert "/sample: a prompt" in shown and "error: the conversation has 99 tokens" in shown
    assert len(asked) == 2 and len(asked[1]) == 2  # the refused turn is not part of it


def test_ctrl_c_stops_an_answer_and_not_the_conversation():
    asked, shown = converse("stop me", "go on")
    assert "stop me [stopped]\n" in shown and len(asked) == 2 and len(asked[1]) == 4


def test_windows_are_those_of_the_model(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "max_position_embeddings": 2048}')
    assert window(str(tmp_path), 64) == 2048
    (tmp_path / "config.json").write_text('{"model_type": "llama", "max_position_embeddings": 32768}')
    assert window(str(tmp_path), 8192) == 4096 + 8192
    for model, tokens, said in ((tmp_path, 40000, "has a window of 32768 tokens"), (tmp_path / "none", 5, "MODEL=")):
        with pytest.raises(SettingsError, match=said):
            window(str(model), tokens)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_position_embeddings": None},
        {"hidden_size": 64.0},
        {"num_attention_heads": 0},
        {"dtype": "float7"},
        {"model_type": "new_kind", "auto_map": {"AutoConfig": "own.Config"}},
    ],
)
def test_a_config_that_transformers_refuses_is_one_line(wrong, small_model, tmp_path, monkeypatch):
    """Of a value's type it raises a class of its own. Of a model's own code it would ask, and the chat would wait."""
    monkeypatch.setattr("builtins.input", lambda *question: pytest.fail("asked"))
    config = json.loads((small_model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | wrong))
    with pytest.raises(SettingsError, match=f"MODEL={tmp_path}: "):
        window(str(tmp_path), 64)


def test_a_longrope_models_window_is_its_short_one(tmp_path):
    """Phi-4-mini: beyond it vLLM turns the tokens of all texts otherwise than the training."""
    turned = {"type": "longrope", "short_factor": [1.0] * 16, "long_factor": [4.0] * 16}
    config = {"model_type": "phi3", "hidden_size": 64, "num_attention_heads": 2, "rope_scaling": turned}
    config |= {"max_position_embeddings": 131072, "original_max_position_embeddings": 4096, "pad_token_id": 0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert window(str(tmp_path), 1024) == 4096
    with pytest.raises(SettingsError, match="has a window of 4096 tokens; lower it"):
        window(str(tmp_path), 4096)
    assert window(str(tmp_path), 1024, before=16384) == 16384 + 1024  # long texts are what the caller wants


def test_the_tasks_system_message_comes_from_its_data(tmp_path):
    write_parquet(ROWS, tmp_path / "a.parquet", rl_schema())
    write_parquet([rl_row("t", chat("x"), "7", "test", 0)], tmp_path / "b.parquet", rl_schema())
    assert task_system(read_rows(tmp_path / "a.parquet")) == SYSTEM
    assert task_system(read_rows(tmp_path / "b.parquet")) == task_system([]) == []


def test_bytes_that_are_no_text_do_not_end_the_chat(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\nna\xc3\xafve\n"), encoding="utf-8"))
    assert [*typed(io.StringIO())] == ["caf\ufffd\n", "naïve\n"]


@pytest.mark.parametrize(("command", "kept"), [("chat", False), ("batch", True)])
def test_a_chat_that_is_stopped_promises_no_samples(command, kept, monkeypatch, capsys):
    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("sys.argv", ["evaluate.py", command, "m"])
    monkeypatch.setattr("verl_tasks.evaluation.main.load_settings", stopped)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        evaluate(lambda *_, **__: {"score": 0.0})
    signal.signal(signal.SIGTERM, before)
    assert ended.value.code == 130
    assert ("kept" in capsys.readouterr().err) is kept


TURNS = Sampling(n=1, greedy=False, temperature=1.0, top_p=1.0, max_prompt_tokens=9, max_tokens=9, seed=0)
LIMITS = Limits(prompt_length=2048, response_length=2048, turn_length=512, turns=4, step_seconds=60)
BRIEF = "be brief"
ROW = rl_row("calculator", chat("What is 3 + 4?", BRIEF), {"answer": "7"}, "test", 0, TOOLS)
CALL = render_calls([{"name": "calculator", "arguments": {"expression": "3 + 4"}}])
ANSWER = "<answer>7</answer>"


@dataclass
class Engine:
    tokenizer: object
    turns: list[str]
    asked: list[tuple[list[int], int]] = field(default_factory=list)
    closed: int = 0

    def stream_ids(self, ids, sampling):
        self.asked.append((list(ids), sampling.max_tokens))
        text = self.turns.pop(0)
        try:
            sampled = answer_ids(self.tokenizer, text)
            yield Completion(text[:3], "", 3, 0.0, ids=tuple(sampled[:3]))
            if text == "stop me":
                raise KeyboardInterrupt
            reason = "stop" if len(sampled) <= sampling.max_tokens else "length"
            yield Completion(text[3:], reason, 0, 0.0, ids=tuple(sampled[3 : sampling.max_tokens]))
        finally:
            self.closed += 1


def played(tokenizer, turns: list[str], *lines: str, made=Environment, window=4096, limits=LIMITS):
    engine, screen = Engine(tokenizer, turns), io.StringIO()
    chat_episode.talk(Table(engine, TURNS, [ROW], made, limits, window, screen), iter(lines))
    assert engine.closed == len(engine.asked)
    return engine, screen.getvalue()


def test_a_test_prompt_is_played_and_each_turn_is_shown_with_results_and_reward(tokenizer):
    engine, shown = played(tokenizer, [CALL, ANSWER], "/next")
    places = [
        shown.index(text) for text in ("prompt 0: What is 3 + 4?", CALL, "  | 7\n", ANSWER, "reward: score 1, acc 1")
    ]
    assert places == sorted(places) and 'ground truth: {"answer": "7"}' in shown
    assert engine.asked[0] == (prompt_ids(tokenizer, chat("What is 3 + 4?", BRIEF), TOOLS), 512)
    assert engine.asked[1][0][: len(engine.asked[0][0])] == engine.asked[0][0]


def test_a_call_that_fails_is_shown_as_the_model_reads_it(tokenizer):
    _, shown = played(tokenizer, [render_calls([{"name": "python", "arguments": {}}]), "x"], "/sample")
    assert "error: no tool python; there are: calculator" in shown and "tool_errors 1" in shown


def test_the_users_own_question_has_no_reward_and_goes_on_until_reset(tokenizer):
    engine, shown = played(tokenizer, [CALL, "Seven.", "Yes.", "No."], "How much is 3 + 4?", "sure?", "/reset", "x")
    assert "reward" not in shown and shown.count("(new conversation)") == 1
    own = prompt_ids(tokenizer, chat("How much is 3 + 4?", BRIEF), TOOLS)
    contexts = [ids for ids, _ in engine.asked]
    assert contexts[0] == own and contexts[2][: len(contexts[1])] == contexts[1]
    assert "sure?" in tokenizer.decode(contexts[2]) and contexts[3] == prompt_ids(tokenizer, chat("x", BRIEF), TOOLS)


class Once(Environment):
    """An environment that tells which row it is of, and is over after an answer."""

    begun: ClassVar[list[str]] = []

    def reset(self, row):
        self.over = False
        self.begun.append(row["reward_model"]["ground_truth"])
        return super().reset(row)

    def step(self, action):
        assert not self.over, "it is over"
        found = super().step(action)
        self.over = found.done
        return found


def test_after_a_test_prompt_a_new_episode_begins_in_its_environment(tokenizer):
    Once.begun.clear()
    engine, shown = played(tokenizer, [ANSWER, CALL, "Yes.", "No."], "/next", "sure?", "and?", made=Once)
    assert engine.asked[1][0] == prompt_ids(tokenizer, chat("sure?", BRIEF), TOOLS)
    assert Once.begun == ['{"answer": "7"}'] * 3 and "it is over" not in shown and "episode is over" in shown
    last = tokenizer.decode(engine.asked[3][0])
    assert "sure?" in last and "Yes." in last and "and?" in last and ANSWER not in last


def test_the_users_own_question_has_no_rows_ground_truth(tokenizer):
    Once.begun.clear()
    engine, _ = played(tokenizer, ["Yes.", "No."], "who?", "sure?", made=Once)
    assert {*Once.begun} == {""} and len(engine.asked) == 2

    class Needs(Environment):
        def step(self, action):
            return Step(reward=json.loads(self.truth), done=True)

    engine, shown = played(tokenizer, ["7", "7"], "who?", "/next", "who?", made=Needs)
    assert "error: the environment needs a row's ground truth (JSONDecodeError: " in shown and len(engine.asked) == 2
    assert "reward: score 7" in shown


def test_ctrl_c_ends_a_turn_and_leaves_the_conversation_as_it_was(tokenizer):
    engine, shown = played(tokenizer, ["one", "stop me", "three"], "a", "b", "c")
    last = tokenizer.decode(engine.asked[2][0])
    assert "[stopped]" in shown and "stop me" not in last and "one" in last


def test_what_goes_wrong_is_one_line_and_the_chat_goes_on(tokenizer):
    class Broken(Environment):
        def step(self, action):
            raise ZeroDivisionError("no\nluck")

    _, shown = played(tokenizer, [CALL, "\x1b[31mred"], "/next", "/what", "x", "/exit", "never", made=Broken)
    assert "error: environment of 'calculator'" in shown and "ZeroDivisionError: no luck" in shown
    assert "/next (or /sample)" in shown and "\x1b" not in shown
    engine, shown = played(tokenizer, [], "x", window=300)
    assert not engine.asked and "error: the conversation has" in shown
    engine, shown = played(tokenizer, ["y" * 600], "x")
    assert "(turn_length: raise MAX_TURN_LENGTH)" in shown


def test_a_turn_that_fills_the_conversation_says_so_and_names_no_limit_of_an_episode(tokenizer):
    _, shown = played(tokenizer, [CALL] * 20, "x", window=1200, limits=replace(LIMITS, turns=20))
    assert "(length: the conversation fills its 1200 tokens; /reset)" in shown and "raise" not in shown
