"""`make chat` of a multi-turn task: episodes in its environment, with a person as the user."""

import asyncio
import contextlib
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TextIO

from verl_tasks.ends import CUT, DONE, LENGTH, TOO_LONG, remedy
from verl_tasks.evaluation.engines import Sampling
from verl_tasks.models.chat_template import next_turn_ids, prompt_ids
from verl_tasks.rewards.answers import RewardError
from verl_tasks.rewards.environment import Environment, closed
from verl_tasks.rewards.episode import Begun, Episode, Limits, Sampled, Sequence, begin, play_on, refusal
from verl_tasks.rows import decoded, rl_row, tools_of
from verl_tasks.text import one_line, printable

HELP = "a text: your own question (after /next in that prompt's environment), then what you say next; /next (or "
HELP += "/sample): an episode of a test prompt with its reward, /reset: a new conversation, /exit"


@dataclass(frozen=True)
class Table:
    """What all episodes of a chat share. ``limits``: of a prompt's episode, ``bounds``: their variables (ends.py);
    ``window``: tokens of a conversation."""

    engine: object
    how: Sampling
    rows: list[dict]
    made: type[Environment]
    limits: Limits
    window: int
    screen: TextIO
    bounds: Mapping[str, str] = field(default_factory=lambda: CUT)

    def say(self, text: str) -> None:
        self.screen.write(printable(text) + "\n")


@dataclass(frozen=True)
class Place:
    """Where a chat goes on: the ``episode`` so far, and what it is played in. ``row``: of its environment; ``test``:
    it is a test prompt's own episode, which is over."""

    episode: Episode
    found: Begun
    row: dict
    test: bool = False


def talk(table: Table, lines: Iterator[str]) -> None:
    """Carry out the user's ``lines`` until they end or say /exit."""
    choose, place = random.Random(table.how.seed), None
    for line in map(str.strip, lines):
        if line == "/exit":
            return
        if line == "/reset":
            place = None
            table.say("(new conversation)")
        elif line in ("/next", "/sample"):
            place = _played(table, _of_row(table, choose.randrange(len(table.rows))), None)
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


async def _of_row(table: Table, index: int) -> Place:
    """An episode of a test prompt, played and scored as evaluation does it."""
    row = table.rows[index]
    found = await begin(table.made, row, table.limits.step_seconds)
    tokenizer = table.engine.tokenizer
    ids = prompt_ids(tokenizer, found.start.messages, found.start.tools)
    episode = Episode(Sequence(ids, tools=found.start.tools))
    table.say(f"prompt {index}: {found.start.messages[-1]['content']}")
    if len(ids) > table.limits.prompt_length:
        raise ValueError(f"{TOO_LONG}: {len(ids)} tokens, more than {table.limits.prompt_length}")
    await _play_on(table, episode, found, table.limits)
    table.say(f"reward: {', '.join(f'{name} {value:g}' for name, value in episode.scores.items())}; {episode.ended}")
    table.say(f"ground truth: {found.row['reward_model']['ground_truth']}")
    return Place(episode, found, row, True)


async def _said(table: Table, place: Place | None, text: str) -> Place:
    """The episode that follows what the user said: a new one, or that of ``place`` if it is the user's own. It has no
    reward. An environment whose episode is over is not stepped again: it begins anew."""
    tokenizer, said = table.engine.tokenizer, {"role": "user", "content": text}
    if place and place.found.start.of_program:  # it is over with its last answer
        place = None
    if place is None or place.test:
        row, found, messages = await _begun(table, place, said)
        sequence = Sequence(prompt_ids(tokenizer, messages, found.start.tools), tools=found.start.tools)
    else:
        row, old, found = place.row, place.episode.sequence, place.found
        if place.episode.ended == DONE:
            found = await begin(table.made, row, table.limits.step_seconds)
        between = next_turn_ids(tokenizer, old.response_ids, [said], found.start.tools)
        sequence = Sequence(old.prompt_ids + old.response_ids + between, tools=old.tools)
    room = table.window - len(sequence.prompt_ids)
    if room <= table.limits.turn_length:
        raise ValueError(f"the conversation has {len(sequence.prompt_ids)} of {table.window} tokens")
    episode, limits = Episode(sequence), replace(table.limits, response_length=room)
    await _play_on(table, episode, found, limits)
    if episode.ended == LENGTH:  # of all that was said, not of one episode
        table.say(f"({LENGTH}: the conversation fills its {table.window} tokens; /reset)")
    elif episode.ended != DONE:
        table.say(f"({episode.ended}: {remedy(episode.ended, table.bounds)})")
    return Place(episode, found, row)


async def _play_on(table: Table, episode: Episode, found: Begun, limits: Limits) -> None:
    """As episode.play_on; a program ends with its episode."""
    try:
        await play_on(episode, found, table.engine.tokenizer, _sample(table, episode), limits)
    finally:
        if found.start.of_program:
            closed(found.environment, found.row)


async def _begun(table: Table, place: Place | None, said: dict) -> tuple[dict, Begun, list[dict]]:
    """For the user's own question a row, an environment that is reset to it, and the prompt. After a test prompt it is
    that prompt's environment, else one without a ground truth. Raises ValueError where that cannot be played."""
    seconds, first = table.limits.step_seconds, table.rows[0]
    if place:
        table.say("(that episode is over; a new one begins in the environment of its prompt)")
        found = await begin(table.made, place.row, seconds)
        return place.row, found, [*system_of(found.start.messages), said]
    messages = [*system_of(first["prompt"]), said]
    row = rl_row(first["data_source"], messages, "", "chat", 0, tools_of(first))
    if why := await refusal(table.made, row, seconds):
        raise ValueError(f"the environment needs a row's ground truth ({why}); after /next it has that prompt's")
    return row, await begin(table.made, row, seconds), messages


def system_of(messages: list[dict]) -> list[dict]:
    """The system message of a stored prompt, if any, in a list."""
    return [message for message in decoded(messages[:1]) if message["role"] == "system"]


def _sample(table: Table, episode: Episode):
    """The turn that play_on asks for, streamed to the screen, after what the environment said to the one before."""
    shown = len(episode.sequence.prompt_ids)

    async def sample(ids: list[int], most: int, stop: tuple[str, ...] = ()) -> Sampled:
        nonlocal shown
        if between := table.engine.tokenizer.decode(ids[shown:], skip_special_tokens=True).strip():
            table.say("\n".join(f"  | {line}" for line in between.splitlines()))
        found, reason = [], ""
        answer = table.engine.stream_ids(ids, replace(table.how, max_tokens=most), *filter(None, [stop]))
        with contextlib.closing(answer) as pieces:
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
