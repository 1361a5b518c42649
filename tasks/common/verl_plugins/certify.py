"""`make certify`: play episodes with evaluation's engine and training's agent loop, and write the certificate.

`python -m verl_tasks.verl_plugins.certify MODEL FILE`, in a process of its own. Sampled episodes are played once, by
evaluation. The agent loop then gets these turns instead of an engine's, and must send the same tokens.
Scripted ones are the task's demonstrations; the engine also samples a turn at each of their turns.
The checks: evaluation/certify.py.
"""

import asyncio
import itertools
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import yaml

from verl_tasks.data.prepare import load_tokenizer
from verl_tasks.evaluation import certify as checks
from verl_tasks.evaluation.certify import FAILED, Chat, Check, Played, Turn
from verl_tasks.evaluation.engine_pool import Hardware
from verl_tasks.evaluation.engines import Request, Sampling, TurnRequest, request_ids, stop_ids
from verl_tasks.evaluation.episodes import Stage, play_all
from verl_tasks.evaluation.rollouts import SAMPLED, Rollout
from verl_tasks.evaluation.sample import episode_limits
from verl_tasks.files import write_json
from verl_tasks.machine.hardware import cpu_dtype
from verl_tasks.models.attention import attention
from verl_tasks.models.chat_template import exchanges, opens_thinking, shown_ids
from verl_tasks.models.merge import base_model, is_adapter
from verl_tasks.process import die_with_parent
from verl_tasks.rewards.answers import RewardError
from verl_tasks.rewards.environment import of_task
from verl_tasks.rows import decoded, demonstration, read_rows, solved, tools_of
from verl_tasks.settings import Settings, load_settings
from verl_tasks.training import verl_config

VERSIONS = ("verl", "vllm", "transformers", "torch")


class Recorded:
    """An engine that records the sampled turns of each request index."""

    def __init__(self, engine):
        self.engine, self.turns = engine, defaultdict(list)

    def generate(self, requests: list[TurnRequest], sampling: Sampling, *more) -> Iterator:
        for request, completions in self.engine.generate(requests, sampling, *more):
            for found in completions:
                stopped = found.finish_reason == "stop"
                turn = Turn(list(request.ids), list(found.ids), list(found.log_probs), stopped)
                self.turns[request.index].append(turn)
            yield request, completions


class Server:
    """In place of verl's client of the engines: ``answer`` gives the turn that follows the tokens it is asked with."""

    def __init__(self, answer: Callable[[int, list[int]], Turn]):
        self.answer, self.asked, self.turns = answer, [], []

    async def generate(self, request_id, *, prompt_ids, sampling_params, **_):
        from verl.workers.rollout.replica import TokenOutput

        turn = self.answer(len(self.asked), list(prompt_ids))
        self.asked.append(list(prompt_ids))
        self.turns.append(turn)
        return TokenOutput(token_ids=turn.ids, log_probs=turn.log_probs or None, stop_reason="completed")


def played(
    s: Settings, config, tokenizer, row: dict, name: str, server: Server, turns: list[Turn] | None
) -> list[Played]:
    """The agent loop of a training on the RL ``row``: the sequences of the episode. ``turns``: of evaluation; None:
    those of the ``server``."""
    from hydra.utils import get_class
    from verl.experimental.agent_loop.agent_loop import DictConfigWrap

    loops = yaml.safe_load((verl_config.PLUGINS / "agent_loops.yaml").read_text())
    target = next(loop["_target_"] for loop in loops if loop["name"] == verl_config.agent_loop(s))
    columns = {column: row[column] for column in ("data_source", "ability", "reward_model", "extra_info")}

    async def run():
        whole, data = DictConfigWrap(config), DictConfigWrap(config.data)
        loop = get_class(target)(whole, server, tokenizer, None, None, data)
        return await loop.run({"temperature": s.TEMPERATURE}, raw_prompt=decoded(row["prompt"]), **columns)

    found = asyncio.run(run())
    given = [
        (each.prompt_ids, each.response_ids, each.response_mask, each.response_logprobs)
        for each in (found if isinstance(found, list) else [found])
    ]
    return checks.by_sequence(name, server.turns if turns is None else turns, server.asked, given)


def sampled_turns(s: Settings, engine: Recorded, tokenizer, rows: list[dict], how: Sampling) -> dict[int, list[Turn]]:
    """The turns of an evaluation of ``rows`` by place; of prompts that are too long none. Raises RewardError."""
    requests = [Request(index, SAMPLED, decoded(row["prompt"]), tools_of(row)) for index, row in enumerate(rows)]
    if s.multi_turn:
        rollouts: list[Rollout] = []
        stage = Stage(engine, tokenizer, how, episode_limits(s, how), of_task(s.TASK))
        play_all(stage, rows, requests, rollouts.extend)
        if broken := next((rollout.error for rollout in rollouts if rollout.error), ""):
            raise RewardError(broken)
    else:
        asked = [(request, request_ids(tokenizer, request, how)) for request in requests]
        turns = [TurnRequest(r.index, SAMPLED, [], None, tuple(ids), how.max_tokens) for r, ids in asked if ids]
        list(engine.generate(turns, how))
    return {index: list(turns) for index, turns in sorted(engine.turns.items())}


def scripted(s: Settings, limit: int | None) -> list[tuple[dict, Chat]]:
    """The RL rows and chats of the first ``limit`` demonstrations; none without demonstrations."""
    found = solved(s.data_dir / "train.parquet", s.data_dir / "sft.parquet", limit)
    return [(row, Chat(f"demonstration {place}", *demonstration(own), tools_of(own))) for place, row, own in found]


def scripted_episode(s: Settings, config, tokenizer, row: dict, chat: Chat) -> list[Played]:
    """The agent loop, with the demonstration's answers for what an engine samples."""
    shown = exchanges(chat.messages[chat.first :])

    def answer(number: int, context: list[int]) -> Turn:
        text, between = shown[number] if number < len(shown) else ("", [])
        return Turn(context, shown_ids(tokenizer, text, between, opens_thinking(tokenizer, context), chat.tools))

    return played(s, config, tokenizer, row, chat.name, Server(answer), None)


def policy_of(model: str):
    """``model`` in transformers, on a GPU if there is one, in the dtype that training computes in."""
    import torch
    from transformers import AutoModelForCausalLM

    device, dtype = ("cuda", "bfloat16") if torch.cuda.is_available() else ("cpu", cpu_dtype())
    how = {"dtype": dtype, "attn_implementation": attention(base_model(model)), "trust_remote_code": False}
    policy = AutoModelForCausalLM.from_pretrained(base_model(model), **how)
    if is_adapter(Path(model)):
        from peft import PeftModel

        policy = PeftModel.from_pretrained(policy, model)
    return policy.to(device).eval()


def trainer_log_probs(model: str, turns: list[Turn]) -> list[tuple[Turn, list[float]]]:
    """``turns`` with the log-probs of their tokens by transformers."""
    import torch

    policy, found = policy_of(model), []
    for turn in turns:
        ids = torch.tensor([turn.context + turn.ids], device=policy.device)
        with torch.inference_mode():
            logits = policy(ids).logits[0, len(turn.context) - 1 : -1].float().log_softmax(-1)
        own = logits.gather(1, ids[0, len(turn.context) :, None])[:, 0]
        found.append((turn, own.tolist()))
    return found


def certified(s: Settings, model: str, engine_of: Callable[[], object]) -> list[Check]:
    """All checks; ``engine_of`` starts evaluation's engine. Where the template refuses a chat, that check alone."""
    tokenizer = load_tokenizer(base_model(model), weights=False)
    rows = list(read_rows(s.train_file, s.LIMIT or None))
    try:
        pairs = scripted(s, s.LIMIT or None)
        cuts = {chat.name: checks.cut_by(s, chat.ids(tokenizer)[1]) for _, chat in pairs}
        pairs = [(row, chat) for row, chat in pairs if not cuts[chat.name]]
        chats = [chat for _, chat in pairs]
        first = checks.template(tokenizer, chats + ([_two_turns(rows[0])] if s.multi_turn else []))
    except ValueError as error:
        return [Check("template", FAILED, str(error))]
    config = verl_config.compose("ppo_trainer", verl_config.rl_overrides(s, model, Path("certify")))
    how = Sampling(1, False, s.TEMPERATURE, 1.0, s.MAX_PROMPT_LENGTH, s.MAX_RESPONSE_LENGTH, s.EVAL_SEED)
    engine = Recorded(engine_of())
    turns = sampled_turns(s, engine, tokenizer, rows, how)
    scripts = [scripted_episode(s, config, tokenizer, row, chat) for row, chat in pairs]
    shown = [sequence for episode in scripts for sequence in episode]
    contexts = [turn.context for episode in shown for turn in episode.turns]
    most = episode_limits(s, how).turn_length if s.multi_turn else s.MAX_RESPONSE_LENGTH
    probes = [TurnRequest(-1, SAMPLED, [], None, tuple(ids), most, number) for number, ids in enumerate(contexts)]
    list(engine.generate(probes, how))
    engine.engine.close()
    episodes = []
    for index, own in turns.items():
        rest = itertools.chain(own, itertools.repeat(Turn([], [], stopped=False)))  # an end where evaluation ended
        server = Server(lambda number, context, rest=rest: next(rest))
        episodes += played(s, config, tokenizer, rows[index], f"row {index}", server, own)
    sampled = [turn for own in engine.turns.values() for turn in own if turn.ids]
    stops, together = {*stop_ids(base_model(model)), tokenizer.eos_token_id}, episodes + shown
    return [
        checks.tokens(tokenizer, together),
        checks.masks(together, s.TRUNCATED == "masked"),
        first,
        checks.ends(tokenizer, stops, together, chats),
        checks.markers(tokenizer, together, chats),
        checks.limits(cuts),
        checks.sft(tokenizer, chats, [first for first, *_ in scripts]),
        checks.log_probs(together, trainer_log_probs(model, sampled)),
    ]


def _two_turns(row: dict) -> Chat:
    """A chat of two turns, for a task whose demonstrations have one."""
    prompt, tools = decoded(row["prompt"]), tools_of(row)
    follows = {"role": "tool" if tools else "user", "content": "ok"}
    answer = {"role": "assistant", "content": "yes"}
    return Chat("a chat of two turns", [*prompt, answer, follows, answer], len(prompt), tools)


def main(model: str, file: str) -> None:
    s = load_settings()
    length = s.MAX_PROMPT_LENGTH + s.MAX_RESPONSE_LENGTH
    hardware = Hardware(1, s.TP, s.GPU_MEMORY_UTILIZATION)
    found = certified(s, model, lambda: hardware.engine(model, length, s.EVAL_SEED))
    about = {"task": s.TASK, "model": model, "stack": s.STACK, "versions": {name: version(name) for name in VERSIONS}}
    result = {**about, "verdict": checks.verdict(found), "checks": [asdict(check) for check in found]}
    write_json(Path(file), result)


if __name__ == "__main__":
    die_with_parent()
    main(*sys.argv[1:])
