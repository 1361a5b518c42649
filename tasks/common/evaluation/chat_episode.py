"""`make chat` of a multi-turn task: episodes in its environment, with a person as the user."""

import asyncio
import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TextIO

from tasks.common.data.ends import TOO_LONG
from tasks.common.evaluation.engines import Sampling
from tasks.common.models.chat_template import next_turn_ids, prompt_ids
from tasks.common.rewards.answers import RewardError
from tasks.common.rewards.environment import Environment
from tasks.common.rewards.episode import Begun, Episode, Limits, Sampled, begin, play_on
from tasks.common.text import one_line, printable

HELP = "a text: your own question, then what you say next; /next (or /sample): an episode of a test prompt with its "
HELP += "reward, /reset: a new conversation, /exit"


@dataclass(frozen=True)
class Table:
    """What all episodes of a chat share. ``limits``: of a prompt's episode; ``window``: tokens of a conversation."""

    engine: object
    how: Sampling
    rows: list[dict]
    made: type[Environment]
    limits: Limits
    window: int
    screen: TextIO

    def say(self, text: str) -> None:
        self.screen.write(printable(text) + "\n")


def talk(table: Table, lines: Iterator[str]) -> None:
    """Carry out the user's ``lines`` until they end or say /exit."""
    choose, place = random.Random(table.how.seed), None  # place: the episode to go on with, and what it is played in
    for line in map(str.strip, lines):
        if line == "/exit":
            return
        if line == "/reset":
            place = None
            table.say("(new conversation)")
        elif line in ("/next", "/sample"):
            index = choose.randrange(len(table.rows))
            place = _played(table, _of_row(table, index), None)
        elif line.startswith("/"):
            table.say(HELP)
        elif line:
            place = _played(table, _said(table, place, line), place)


def _played(table: Table, playing, before):
    """What ``playing`` comes to; ``before`` where it fails or is stopped (Ctrl-C)."""
    try:
        return asyncio.run(playing)
    except (ValueError, RewardError) as error:
        table.say(f"error: {one_line(str(error), 300)}; /reset")
    except KeyboardInterrupt:
        table.say(" [stopped]")
    return before


async def _of_row(table: Table, index: int) -> tuple[Episode, Begun]:
    """An episode of a test prompt, played and scored as evaluation does it."""
    found = await begin(table.made, table.rows[index], table.limits.step_seconds)
    tokenizer = table.engine.tokenizer
    episode = Episode(prompt_ids(tokenizer, found.start.messages, found.start.tools))
    table.say(f"prompt {index}: {found.start.messages[-1]['content']}")
    if len(episode.prompt_ids) > table.limits.prompt_length:
        raise ValueError(f"{TOO_LONG}: {len(episode.prompt_ids)} tokens, more than {table.limits.prompt_length}")
    await play_on(episode, found, tokenizer, _sample(table, episode), table.limits)
    table.say(f"reward: {', '.join(f'{name} {value:g}' for name, value in episode.scores.items())}; {episode.ended}")
    table.say(f"ground truth: {found.row['reward_model']['ground_truth']}")
    return episode, found


async def _said(table: Table, place: tuple[Episode, Begun] | None, text: str) -> tuple[Episode, Begun]:
    """The episode that follows what the user said, in a new conversation or after ``place``. It has no reward."""
    tokenizer, said = table.engine.tokenizer, {"role": "user", "content": text}
    if place is None:
        found = await begin(table.made, table.rows[0], table.limits.step_seconds)
        system = [message for message in found.start.messages[:1] if message["role"] == "system"]
        episode = Episode(prompt_ids(tokenizer, [*system, said], found.start.tools))
    else:
        old, found = place
        between = next_turn_ids(tokenizer, old.response_ids, [said], found.start.tools)
        episode = Episode(old.prompt_ids + old.response_ids + between)
    room = table.window - len(episode.prompt_ids)
    if room <= table.limits.turn_length:
        raise ValueError(f"the conversation has {len(episode.prompt_ids)} of {table.window} tokens")
    limits = replace(table.limits, response_length=room)
    await play_on(episode, found, tokenizer, _sample(table, episode), limits)
    if episode.ended != "stop":
        table.say(f"({episode.ended})")
    return episode, found


def _sample(table: Table, episode: Episode):
    """The turn that play_on asks for, streamed to the screen, after what the environment said to the one before."""
    shown = len(episode.prompt_ids)

    async def sample(ids: list[int], most: int) -> Sampled:
        nonlocal shown
        if between := table.engine.tokenizer.decode(ids[shown:], skip_special_tokens=True).strip():
            table.say("\n".join(f"  | {line}" for line in between.splitlines()))
        found, reason = [], ""
        with contextlib.closing(table.engine.stream_ids(ids, replace(table.how, max_tokens=most))) as pieces:
            for piece in pieces:
                found += piece.ids
                reason = piece.finish_reason or reason
                table.screen.write(printable(piece.response))
                table.screen.flush()
                await asyncio.sleep(0)  # where Ctrl-C ends it
        table.say("")
        shown = len(ids) + len(found)
        return Sampled(found, None, reason == "stop")

    return sample
