"""Play an episode: a model, sampled turn by turn, in an environment. Training and evaluation both play it here.

The model's tokens stay as they were sampled; nothing is rendered again. Between turns stands what the chat template
puts around the new messages (models/chat_template.py, next_turn_ids).
"""

import asyncio
import contextlib
import copy
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from itertools import groupby

from verl_tasks import errors
from verl_tasks.ends import CUT, DONE, LENGTH, MAX_TURNS, OBSERVATION, TIMEOUT, TOO_LONG, TURN_LENGTH, cut_key
from verl_tasks.models.chat_template import LONGEST_TOKEN, next_turn_ids, opens_thinking, prompt_ids
from verl_tasks.rewards.answers import RewardError
from verl_tasks.rewards.environment import SUCCESS, Environment, Start, begun, retold, stepped


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


# From the token ids of all so far, and the most tokens of the turn, to the turn.
Sample = Callable[[list[int], int], Awaitable[Sampled]]


@dataclass
class Episode:
    """``response_ids``: all after the prompt. ``mask``: 1 for a token that the model sampled. ``log_probs``: of these,
    0 for the others; None where the engine gives none. ``reward``: the sum over turns. ``ended``: DONE, TOO_LONG or one
    of CUT. ``tool_errors``: calls that could not be carried out. ``readable``: as its last step says. ``messages``:
    what was said after the prompt, the model's texts and what it read."""

    prompt_ids: list[int]
    response_ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    log_probs: list[float] | None = field(default_factory=list)
    reward: float = 0.0
    turns: int = 0
    tool_errors: int = 0
    readable: bool = True
    ended: str = ""
    messages: list[dict] = field(default_factory=list)

    @property
    def scores(self) -> dict[str, float]:
        """What a reward.py of a single-turn task returns: ``score``, ``acc`` (success), and more to report."""
        readable = self.readable and self.ended == DONE
        found = {"score": self.reward, "acc": self.reward >= SUCCESS, "format": readable, "turns": self.turns}
        found |= {"tool_errors": self.tool_errors, **{cut_key(end): self.ended == end for end in CUT}}
        return {name: float(value) for name, value in found.items()}

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
    episode = Episode(prompt_ids(tokenizer, found.start.messages, found.start.tools))
    if len(episode.prompt_ids) > limits.prompt_length:
        episode.ended = TOO_LONG
    if limits.window:
        left = limits.window - len(episode.prompt_ids)
        limits = replace(limits, response_length=min(limits.response_length, left))
    await play_on(episode, found, tokenizer, sample, limits)
    return episode


async def play_on(episode: Episode, found: Begun, tokenizer, sample: Sample, limits: Limits) -> None:
    """Play ``episode``, whose last tokens ask for a turn of the model, until it has ended. Raises as ``play``."""
    while not episode.ended:
        episode.ended = await _turn(episode, found, tokenizer, sample, limits)


async def _turn(episode: Episode, found: Begun, tokenizer, sample: Sample, limits: Limits) -> str:
    """One turn of the model and what follows it; why the episode has ended, or empty."""
    tools = found.start.tools
    context = episode.prompt_ids + episode.response_ids
    left = limits.response_length - len(episode.response_ids)
    most = min(limits.turn_length, left)
    sampled = await sample(context, most)
    episode.add(list(sampled.ids), True, sampled.log_probs)
    episode.turns += 1
    text = tokenizer.decode(sampled.ids, skip_special_tokens=True)
    answer = f"<think>{text}" if opens_thinking(tokenizer, context) else text
    episode.messages.append({"role": "assistant", "content": answer})
    if not sampled.stopped:
        return TURN_LENGTH if most < left else LENGTH
    try:
        step, errors = await _in_thread(limits.step_seconds, stepped, found.environment, found.row, tools, answer)
    except TimeoutError:
        return TIMEOUT
    episode.reward += step.reward
    episode.tool_errors += errors
    episode.readable = step.readable
    if step.done or episode.turns == limits.turns:
        return DONE if step.done else MAX_TURNS
    room = limits.response_length - len(episode.response_ids)
    if sum(len(message["content"]) for message in step.messages) > limits.response_length * LONGEST_TOKEN:
        return OBSERVATION
    between = next_turn_ids(tokenizer, sampled.ids, step.messages, tools)
    if len(between) >= room:
        return OBSERVATION if len(between) >= limits.response_length else LENGTH
    episode.add(between, False)
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
