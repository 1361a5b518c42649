"""Play an episode: a model, sampled turn by turn, in an environment. Training and evaluation both play it here.

The model's tokens stay as they were sampled; nothing is rendered again. Between turns stands what the chat template
puts around the new messages (models/chat_template.py, next_turn_ids).
"""

import asyncio
import contextlib
import copy
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import groupby

from verl_tasks import errors
from verl_tasks.ends import (
    CUT,
    DONE,
    FAILED,
    LENGTH,
    MAX_TURNS,
    OBSERVATION,
    OF_PROGRAMS,
    TIMEOUT,
    TOO_LONG,
    TURN_LENGTH,
    cut_key,
)
from verl_tasks.models.chat_template import LONGEST_TOKEN, next_turn_ids, opens_thinking, prompt_ids
from verl_tasks.rewards.answers import RewardError
from verl_tasks.rewards.environment import (
    SUCCESS,
    Asked,
    Environment,
    Start,
    Step,
    Turn,
    begun,
    closed,
    retold,
    stepped,
)


@dataclass(frozen=True)
class Limits:
    """Of an episode, in tokens: its prompt, one turn, and all turns with what stands between them. ``turns``: of the
    model. ``step_seconds``: of reset and of each step. ``window``: of prompt and turns together, 0: no bound."""

    prompt_length: int
    response_length: int
    turn_length: int
    turns: int
    step_seconds: float
    window: int = 0


@dataclass(frozen=True)
class Sampled:
    """One turn as the engine sampled it. ``log_probs``: nats, of each of ``ids``, or None. ``stopped``: it ended by
    itself, not at the limit of its length."""

    ids: list[int]
    log_probs: list[float] | None
    stopped: bool


# From the token ids of all so far, the most tokens of the turn, and where there are any the texts at which it stops, to
# the turn.
Sample = Callable[..., Awaitable[Sampled]]


@dataclass
class Sequence:
    """``response_ids``: all after the prompt. ``mask``: 1 for a token that the model sampled. ``log_probs``: of these,
    0 for the others; None where the engine gives none. ``tools``: those of the prompt."""

    prompt_ids: list[int]
    response_ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    log_probs: list[float] | None = field(default_factory=list)
    tools: list[dict] = field(default_factory=list)

    def add(self, ids: list[int], own: bool, log_probs: list[float] | None = None) -> None:
        """Append tokens: the model's ``own``, or of the template. Raises ValueError where log-probs do not align."""
        self.response_ids += ids
        self.mask += [int(own)] * len(ids)
        if own and log_probs is None:
            self.log_probs = None
        elif self.log_probs is not None:
            self.log_probs += log_probs if own else [0.0] * len(ids)
            if len(self.log_probs) != len(self.response_ids):
                raise ValueError(f"{len(ids)} sampled tokens have {len(log_probs or [])} log-probs")


@dataclass
class Episode:
    """``sequence``: what goes on; ``others``: a program's further ones. ``reward``: the sum over turns.

    ``ended``: DONE, TOO_LONG, FAILED or one of CUT. ``tool_errors``: calls that could not be carried out. ``readable``:
    as its last step says. ``messages``: what was said after the prompt, the model's texts and what it read. ``asked``:
    how the next turn is asked for. ``seconds``: that the model took, and a program (None: it is none).
    """

    sequence: Sequence
    reward: float = 0.0
    turns: int = 0
    tool_errors: int = 0
    readable: bool = True
    ended: str = ""
    messages: list[dict] = field(default_factory=list)
    others: dict[int, Sequence] = field(default_factory=dict)  # by their number
    number: int = 0  # of ``sequence``
    asked: Asked = field(default_factory=Asked)
    seconds: list[float] | None = None

    @property
    def scores(self) -> dict[str, float]:
        """What a reward.py of a single-turn task returns: ``score``, ``acc`` (success), and more to report."""
        readable = self.readable and self.ended == DONE
        found = {"score": self.reward, "acc": self.reward >= SUCCESS, "format": readable, "turns": self.turns}
        found |= {"tool_errors": self.tool_errors, "failed": self.ended == FAILED}
        found |= {cut_key(end): self.ended == end for end in CUT}
        if self.seconds:
            numbers = len(self.sequences), *self.seconds
            found |= dict(zip(OF_PROGRAMS, numbers, strict=True))
        return {name: float(value) for name, value in found.items()}

    @property
    def sequences(self) -> list[Sequence]:
        """All that have a turn of the model, in the order in which they began; without one the prompt alone."""
        found = sorted((self.others | {self.number: self.sequence}).items())
        return [each for _, each in found if each.response_ids] or [self.sequence]

    def turn_to(self, number: int, sequence: Sequence) -> None:
        """Go on with ``sequence``, keep the one that went on."""
        self.others[self.number] = self.sequence
        self.number, self.sequence = number, sequence


@dataclass(frozen=True)
class Begun:
    """What an episode is played in: its ``environment``, as reset to ``row`` it gave ``start``."""

    environment: Environment
    row: dict
    start: Start


async def begin(made: type[Environment], row: dict, step_seconds: float) -> Begun:
    """A new environment of the class ``made``, reset to the RL row ``row``. Raises RewardError for what it raises, and
    when that takes more than ``step_seconds``."""
    row = copy.deepcopy(row)  # other episodes have the same one
    try:
        environment, start = await _in_thread(step_seconds, begun, made, row)
    except TimeoutError:
        raise RewardError(f"the environment's reset took more than STEP_SECONDS={step_seconds:g}") from None
    return Begun(environment, row, start)


async def refusal(made: type[Environment], row: dict, step_seconds: float) -> str:
    """Why an environment cannot play ``row``, e.g. without its ground truth: what reset or the step of an empty text
    raises. Empty where it can."""
    try:
        await _in_thread(step_seconds, retold, made, copy.deepcopy(row), [""])
    except (RewardError, TimeoutError) as error:
        return errors.said(error)
    return ""


async def play(made: type[Environment], row: dict, tokenizer, sample: Sample, limits: Limits) -> Episode:
    """One episode of the RL row ``row`` in a new environment of the class ``made``.

    Raises RewardError for what the environment raises, and when its reset takes too long; a step that takes too long
    ends the episode. Raises ValueError when the chat template refuses.
    """
    found = await begin(made, row, limits.step_seconds)
    try:
        ids = prompt_ids(tokenizer, found.start.messages, found.start.tools)
        episode = Episode(Sequence(ids, tools=found.start.tools))
        if len(ids) > limits.prompt_length:
            episode.ended = TOO_LONG
        await play_on(episode, found, tokenizer, sample, limits)
    finally:
        with contextlib.suppress(TimeoutError):  # it goes on in its thread
            await _in_thread(limits.step_seconds, closed, found.environment, found.row)
    return episode


async def play_on(episode: Episode, found: Begun, tokenizer, sample: Sample, limits: Limits) -> None:
    """Play ``episode``, whose last tokens ask for a turn of the model, until it has ended. Raises as ``play``."""
    if found.start.of_program and not episode.ended:
        episode.seconds, episode.number = [0.0, 0.0], -1  # the row's prompt, until the program asks
        episode.ended = await _follow(episode, found, tokenizer, limits, None)
    while not episode.ended:
        episode.ended = await _turn(episode, found, tokenizer, sample, limits)


def _most(sequence: Sequence, limits: Limits) -> int:
    """Tokens that may follow its prompt."""
    in_window = limits.window - len(sequence.prompt_ids) if limits.window else limits.response_length
    return min(limits.response_length, in_window)


async def _turn(episode: Episode, found: Begun, tokenizer, sample: Sample, limits: Limits) -> str:
    """One turn of the model and what follows it; why the episode has ended, or empty."""
    sequence, asked, began = episode.sequence, episode.asked, time.monotonic()
    context = sequence.prompt_ids + sequence.response_ids
    left = _most(sequence, limits) - len(sequence.response_ids)
    most = min(limits.turn_length, left)
    fewer = min(most, asked.max_tokens or most)
    sampled = await (sample(context, fewer, asked.stop) if asked.stop else sample(context, fewer))
    if episode.seconds:
        episode.seconds[0] += time.monotonic() - began
    sequence.add(list(sampled.ids), True, sampled.log_probs)
    episode.turns += 1
    text = tokenizer.decode(sampled.ids, skip_special_tokens=True)
    places = [place for stop in asked.stop if (place := text.find(stop)) >= 0]
    text, stopped = text[: min(places, default=len(text))], sampled.stopped or bool(places)
    answer = f"<think>{text}" if opens_thinking(tokenizer, context) else text
    episode.messages.append({"role": "assistant", "content": answer})
    if not stopped and fewer == most:
        return TURN_LENGTH if most < left else LENGTH
    if not found.start.of_program:
        return await _follow(episode, found, tokenizer, limits, answer)
    pieces = _pieces(tokenizer, sampled) if asked.log_probs else []
    said = Turn(answer, len(context), len(sampled.ids), pieces, not stopped)
    return await _follow(episode, found, tokenizer, limits, said)


def _pieces(tokenizer, sampled: Sampled) -> list[tuple[str, float | None]]:
    """The text of each token and its log-prob."""
    log_probs = sampled.log_probs or [None] * len(sampled.ids)
    return [(tokenizer.decode([token]), log_prob) for token, log_prob in zip(sampled.ids, log_probs, strict=True)]


async def _follow(episode: Episode, found: Begun, tokenizer, limits: Limits, said: str | Turn | None) -> str:
    """What follows ``said``, the model's turn; why the episode has ended, or empty."""
    for _ in range(limits.turns):
        began = time.monotonic()
        try:
            given = found.environment, found.row, episode.sequence.tools, said
            step, errors = await _in_thread(limits.step_seconds, stepped, *given)
        except TimeoutError:
            return TIMEOUT
        finally:
            if episode.seconds:
                episode.seconds[1] += time.monotonic() - began
        episode.reward += step.reward
        episode.tool_errors += errors
        episode.readable = step.readable
        episode.asked = step.asked
        if step.done or episode.turns == limits.turns:
            return FAILED if step.broke else DONE if step.done else MAX_TURNS
        if not step.start:
            return _read(episode, step, tokenizer, limits)
        if not (refused := _begin_sequence(episode, step.start, tokenizer, limits)):
            if episode.number or step.start.messages != found.start.messages:  # else it is the row's prompt
                episode.messages += _new_messages(step.start)
            return ""
        said = Turn(refused=refused)
    return MAX_TURNS


def _begin_sequence(episode: Episode, start: Start, tokenizer, limits: Limits) -> str:
    """Begin another sequence with ``start``; why that cannot be, or empty."""
    try:
        if sum(len(message["content"]) for message in start.messages) > limits.prompt_length * LONGEST_TOKEN:
            return f"context_length_exceeded: MAX_PROMPT_LENGTH={limits.prompt_length} tokens"
        ids = prompt_ids(tokenizer, start.messages, start.tools)
    except ValueError as error:
        return str(error)
    if len(ids) > limits.prompt_length:
        return f"context_length_exceeded: {len(ids)} tokens, more than MAX_PROMPT_LENGTH={limits.prompt_length}"
    episode.turn_to(max([episode.number, *episode.others]) + 1, Sequence(ids, tools=start.tools))
    return ""


def _new_messages(start: Start) -> list[dict]:
    """What the model reads in ``start`` after an answer of its own."""
    before = next((i for i, m in reversed([*enumerate(start.messages)]) if m["role"] == "assistant"), -1)
    return start.messages[before + 1 :]


def _read(episode: Episode, step: Step, tokenizer, limits: Limits) -> str:
    """Append what the model reads next; why the episode has ended, or empty."""
    if step.onto is not None and step.onto != episode.number:
        episode.turn_to(step.onto, episode.others.pop(step.onto))
    sequence = episode.sequence
    most = _most(sequence, limits)
    if sum(len(message["content"]) for message in step.messages) > most * LONGEST_TOKEN:
        return OBSERVATION
    between = next_turn_ids(tokenizer, sequence.response_ids, step.messages, sequence.tools)
    if len(between) >= most - len(sequence.response_ids):
        return OBSERVATION if len(between) >= most else LENGTH
    sequence.add(between, False)
    episode.messages += step.messages
    return ""


def turn_texts(tokenizer, ids: list[int], mask: list[int]) -> list[str]:
    """What was said in turn, without special tokens: the model first, then what it read, and so on.

    ``ids`` and ``mask``: of an episode's response. Empty where the mask has no 1 (TRUNCATED=masked).
    """
    parts = [[token for token, _ in part] for _, part in groupby(zip(ids, mask, strict=True), key=lambda pair: pair[1])]
    return [tokenizer.decode(part, skip_special_tokens=True).strip() for part in parts] if any(mask) else []


async def _in_thread(seconds: float, function: Callable, *arguments):
    """What ``function`` returns or raises, run in a thread of its own; TimeoutError after ``seconds``. The thread then
    stays until ``function`` returns, and does not keep the process alive."""
    loop = asyncio.get_running_loop()
    future = loop.create_future()

    def settle(result, error: Exception | None) -> None:
        if not future.done():
            future.set_exception(error) if error else future.set_result(result)

    def work() -> None:
        try:
            result, error = function(*arguments), None
        except Exception as raised:
            result, error = None, raised
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=work, daemon=True).start()
    return await asyncio.wait_for(future, seconds)
