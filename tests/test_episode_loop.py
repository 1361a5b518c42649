"""verl_plugins/episode_loop.py with a server that answers from a list: what verl trains on."""

import asyncio
from types import SimpleNamespace

import pytest

from tasks.calculator.environment import TOOLS, Environment
from tasks.calculator.prepare_data import SYSTEM
from verl_tasks.models.chat_template import answer_ids, prompt_ids
from verl_tasks.rewards.answers import RewardError
from verl_tasks.rewards.tool_calls import render_calls
from verl_tasks.rows import chat, decoded, rl_row

CALL = render_calls([{"name": "calculator", "arguments": {"expression": "347 * 58"}}])
ANSWER = "<answer>20126</answer>"
ROW = rl_row("calculator", chat("What is 347 * 58?", SYSTEM), {"answer": "20126"}, "train", 0, TOOLS)


class Server:
    """As verl's client of the engines."""

    def __init__(self, tokenizer, *texts: str, reason: str = "completed"):
        self.turns = [answer_ids(tokenizer, text) for text in texts]
        self.reason, self.asked = reason, []

    async def generate(self, request_id, *, prompt_ids, sampling_params, priority):
        ids = self.turns[len(self.asked)]
        self.asked.append((request_id, prompt_ids, sampling_params))
        step, ids = len(self.asked), ids[: sampling_params["max_tokens"]]
        fields = {"global_steps": step, "min_global_steps": step, "max_global_steps": step}
        log_probs = [-float(step)] * len(ids)
        from verl.workers.rollout.replica import TokenOutput

        return TokenOutput(
            token_ids=ids, log_probs=log_probs, num_preempted=1, stop_reason=self.reason, extra_fields=fields
        )


def output_of(tokenizer, server: Server, cls: str = "EpisodeOfRow", prompt_length: int = 1000, **limits):
    """verl's AgentLoopOutput of the class ``cls``. Imported here: verl sets variables, which no test may leave."""
    from verl_tasks.verl_plugins import episode_loop

    loop = object.__new__(getattr(episode_loop, cls))
    of_data = {"task": "calculator", "turns": 4, "turn_length": 200, "step_seconds": 60.0} | limits
    loop.data_config = SimpleNamespace(episode=SimpleNamespace(**of_data))
    loop.rollout_config = SimpleNamespace(prompt_length=prompt_length, response_length=800)
    loop.tokenizer, loop.server_manager = tokenizer, server
    kwargs = {name: ROW[name] for name in ("data_source", "ability", "reward_model", "extra_info")}
    return asyncio.run(loop.run({"temperature": 1.0}, raw_prompt=decoded(ROW["prompt"]), uid="u", **kwargs))


def test_verl_gets_the_sampled_tokens_their_mask_and_the_reward(tokenizer):
    server = Server(tokenizer, CALL, ANSWER)
    output = output_of(tokenizer, server)
    assert output.prompt_ids == prompt_ids(tokenizer, decoded(ROW["prompt"]), TOOLS)
    own = [token for token, mine in zip(output.response_ids, output.response_mask, strict=True) if mine]
    assert own == answer_ids(tokenizer, CALL) + answer_ids(tokenizer, ANSWER)
    assert len(output.response_logprobs) == len(output.response_ids)
    assert {p for p, mine in zip(output.response_logprobs, output.response_mask, strict=True) if mine} == {-1.0, -2.0}
    assert (output.reward_score, output.num_turns, output.metrics.num_preempted) == (1.0, 4, 2)
    scores = {"score": 1.0, "acc": 1.0, "format": 1.0, "turns": 2.0, "tool_errors": 0.0, "timeout": 0.0}
    scores |= dict.fromkeys(("failed", "cut_length", "cut_turn_length", "cut_observation", "cut_turns"), 0.0)
    assert output.extra_fields["reward_extra_info"] == scores
    assert (output.extra_fields["min_global_steps"], output.extra_fields["max_global_steps"]) == (1, 2)
    (first, prompt, params), (second, context, _) = server.asked
    assert first == second and context[: len(prompt)] == prompt  # one server, which has the prefix
    assert params["max_tokens"] == 200 and params["temperature"] == 1.0
    rewards = output.as_dict()["rm_scores"]
    assert rewards.sum() == rewards[-1] == 1.0 and output.response_mask[-1] == 1


@pytest.mark.parametrize("cls", ["EpisodeOfRow", "EpisodeUnlessTruncated"])
@pytest.mark.parametrize(
    ("server", "limits", "cut"),
    [
        ({}, {"turn_length": 5}, True),
        ({}, {"turns": 1}, True),
        ({"reason": "aborted"}, {}, True),
        ({}, {}, False),
    ],
)
def test_only_cut_episodes_are_masked_where_they_should_be(tokenizer, cls, server, limits, cut):
    output = output_of(tokenizer, Server(tokenizer, CALL, ANSWER, **server), cls, **limits)
    assert (output.reward_score, sum(output.response_mask) == 0) == (
        0.0 if cut else 1.0,
        cut and cls == "EpisodeUnlessTruncated",
    )


def test_what_verl_must_not_train_on_is_an_error(tokenizer, monkeypatch):
    with pytest.raises(RewardError, match="more than MAX_PROMPT_LENGTH=10"):
        output_of(tokenizer, Server(tokenizer, ANSWER), prompt_length=10)
    monkeypatch.setattr(Environment, "step", lambda *_: 1 / 0)
    with pytest.raises(RewardError, match="step raised ZeroDivisionError"):
        output_of(tokenizer, Server(tokenizer, ANSWER))
