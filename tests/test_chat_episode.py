"""Episodes in `make chat`, with an engine whose turns are given."""

import io
import json
from dataclasses import dataclass, field, replace
from typing import ClassVar

from tasks.calculator.environment import TOOLS, Environment
from verl_tasks.evaluation.chat_episode import Table, talk
from verl_tasks.evaluation.engines import Sampling
from verl_tasks.evaluation.rollouts import Completion
from verl_tasks.models.chat_template import answer_ids, prompt_ids
from verl_tasks.rewards.environment import Step
from verl_tasks.rewards.episode import Limits
from verl_tasks.rewards.tool_calls import render_calls
from verl_tasks.rows import chat, rl_row

HOW = Sampling(n=1, greedy=False, temperature=1.0, top_p=1.0, max_prompt_tokens=9, max_tokens=9, seed=0)
LIMITS = Limits(prompt_length=2048, response_length=2048, turn_length=512, turns=4, step_seconds=60)
SYSTEM = "be brief"
ROW = rl_row("calculator", chat("What is 3 + 4?", SYSTEM), {"answer": "7"}, "test", 0, TOOLS)
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


def converse(tokenizer, turns: list[str], *lines: str, made=Environment, window=4096, limits=LIMITS):
    engine, screen = Engine(tokenizer, turns), io.StringIO()
    talk(Table(engine, HOW, [ROW], made, limits, window, screen), iter(lines))
    assert engine.closed == len(engine.asked)
    return engine, screen.getvalue()


def test_a_test_prompt_is_played_and_each_turn_is_shown_with_results_and_reward(tokenizer):
    engine, shown = converse(tokenizer, [CALL, ANSWER], "/next")
    places = [
        shown.index(text) for text in ("prompt 0: What is 3 + 4?", CALL, "  | 7\n", ANSWER, "reward: score 1, acc 1")
    ]
    assert places == sorted(places) and 'ground truth: {"answer": "7"}' in shown
    assert engine.asked[0] == (prompt_ids(tokenizer, chat("What is 3 + 4?", SYSTEM), TOOLS), 512)
    assert engine.asked[1][0][: len(engine.asked[0][0])] == engine.asked[0][0]


def test_a_call_that_fails_is_shown_as_the_model_reads_it(tokenizer):
    _, shown = converse(tokenizer, [render_calls([{"name": "python", "arguments": {}}]), "x"], "/sample")
    assert "error: no tool python; there are: calculator" in shown and "tool_errors 1" in shown


def test_the_users_own_question_has_no_reward_and_goes_on_until_reset(tokenizer):
    engine, shown = converse(tokenizer, [CALL, "Seven.", "Yes.", "No."], "How much is 3 + 4?", "sure?", "/reset", "x")
    assert "reward" not in shown and shown.count("(new conversation)") == 1
    own = prompt_ids(tokenizer, chat("How much is 3 + 4?", SYSTEM), TOOLS)
    contexts = [ids for ids, _ in engine.asked]
    assert contexts[0] == own and contexts[2][: len(contexts[1])] == contexts[1]
    assert "sure?" in tokenizer.decode(contexts[2]) and contexts[3] == prompt_ids(tokenizer, chat("x", SYSTEM), TOOLS)


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
    engine, shown = converse(tokenizer, [ANSWER, CALL, "Yes.", "No."], "/next", "sure?", "and?", made=Once)
    assert engine.asked[1][0] == prompt_ids(tokenizer, chat("sure?", SYSTEM), TOOLS)
    assert Once.begun == ['{"answer": "7"}'] * 3 and "it is over" not in shown and "episode is over" in shown
    last = tokenizer.decode(engine.asked[3][0])
    assert "sure?" in last and "Yes." in last and "and?" in last and ANSWER not in last


def test_the_users_own_question_has_no_rows_ground_truth(tokenizer):
    Once.begun.clear()
    engine, _ = converse(tokenizer, ["Yes.", "No."], "who?", "sure?", made=Once)
    assert {*Once.begun} == {""} and len(engine.asked) == 2

    class Needs(Environment):
        def step(self, action):
            return Step(reward=json.loads(self.truth), done=True)

    engine, shown = converse(tokenizer, ["7", "7"], "who?", "/next", "who?", made=Needs)
    assert "error: the environment needs a row's ground truth (JSONDecodeError: " in shown and len(engine.asked) == 2
    assert "reward: score 7" in shown


def test_ctrl_c_ends_a_turn_and_leaves_the_conversation_as_it_was(tokenizer):
    engine, shown = converse(tokenizer, ["one", "stop me", "three"], "a", "b", "c")
    last = tokenizer.decode(engine.asked[2][0])
    assert "[stopped]" in shown and "stop me" not in last and "one" in last


def test_what_goes_wrong_is_one_line_and_the_chat_goes_on(tokenizer):
    class Broken(Environment):
        def step(self, action):
            raise ZeroDivisionError("no\nluck")

    _, shown = converse(tokenizer, [CALL, "\x1b[31mred"], "/next", "/what", "x", "/exit", "never", made=Broken)
    assert "error: environment of 'calculator'" in shown and "ZeroDivisionError: no luck" in shown
    assert "/next (or /sample)" in shown and "\x1b" not in shown
    engine, shown = converse(tokenizer, [], "x", window=300)
    assert not engine.asked and "error: the conversation has" in shown
    engine, shown = converse(tokenizer, ["y" * 600], "x")
    assert "(turn_length: raise MAX_TURN_LENGTH)" in shown


def test_a_turn_that_fills_the_conversation_says_so_and_names_no_limit_of_an_episode(tokenizer):
    _, shown = converse(tokenizer, [CALL] * 20, "x", window=1200, limits=replace(LIMITS, turns=20))
    assert "(length: the conversation fills its 1200 tokens; /reset)" in shown and "raise" not in shown
