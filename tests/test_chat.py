"""The conversation of `make chat`, with an engine that repeats what it is asked."""

import io

import pytest

from verl_tasks.evaluation.chat import talk, task_system, typed
from verl_tasks.evaluation.engines import Sampling
from verl_tasks.evaluation.sample import Scoring
from verl_tasks.rows import chat, rl_row, rl_schema, write_parquet

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
    from verl_tasks.evaluation.engines import window
    from verl_tasks.settings import SettingsError

    (tmp_path / "config.json").write_text('{"model_type": "llama", "max_position_embeddings": 2048}')
    assert window(str(tmp_path), 64) == 2048
    (tmp_path / "config.json").write_text('{"model_type": "llama", "max_position_embeddings": 32768}')
    assert window(str(tmp_path), 8192) == 4096 + 8192
    for model, tokens, said in ((tmp_path, 40000, "has a window of 32768 tokens"), (tmp_path / "none", 5, "MODEL=")):
        with pytest.raises(SettingsError, match=said):
            window(str(model), tokens)


def test_the_tasks_system_message_comes_from_its_data(tmp_path):
    write_parquet(ROWS, tmp_path / "a.parquet", rl_schema())
    write_parquet([rl_row("t", chat("x"), "7", "test", 0)], tmp_path / "b.parquet", rl_schema())
    assert task_system(tmp_path / "a.parquet") == SYSTEM and task_system(tmp_path / "b.parquet") == []


def test_bytes_that_are_no_text_do_not_end_the_chat(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\nna\xc3\xafve\n"), encoding="utf-8"))
    assert [*typed(io.StringIO())] == ["caf\ufffd\n", "naïve\n"]
