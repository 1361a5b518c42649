"""The environment of a multi-turn task: what a task writes, and how one answer of the model is carried out in it.

A task is multi-turn when ``tasks/<task>/environment.py`` has a class ``Environment``; an episode has one of its own.
The words are Gymnasium's (https://gymnasium.farama.org/api/env/).
"""

import importlib
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Protocol

from verl_tasks.errors import said
from verl_tasks.rewards.answers import RewardError, number
from verl_tasks.rewards.tool_calls import Malformed, Response, functions, parse_response, split_thinking, without_tags
from verl_tasks.rows import decoded, messages_problem, rl_row, tools_of
from verl_tasks.text import encodable

__all__ = [
    "CallError",
    "Environment",
    "Response",
    "Start",
    "Step",
    "begun",
    "decoded",
    "replayed",
    "rl_row",
    "stepped",
    "tool_message",
    "tools_of",
]  # for tasks

SUCCESS = 1 - 1e-9  # an episode succeeds when its rewards sum to 1, up to rounding

BAD_TOOLS = "tools: must be OpenAI schemas of functions with names of their own"

WITHOUT_MODEL = 60.0  # seconds that a program has between two turns that no model takes


class CallError(ValueError):
    """A call that cannot be carried out. An environment raises it; the model reads the message, the episode goes on."""


@dataclass(frozen=True)
class Start:
    """How an episode begins: OpenAI ``messages``, and the schemas of the ``tools`` that the model may call.
    ``of_program``: a first step, before any turn, tells what the model reads (rewards/program.py)."""

    messages: list[dict]
    tools: list[dict] = field(default_factory=list)
    of_program: bool = False


@dataclass(frozen=True)
class Turn:
    """What the model said: its ``text``, which begins with the ``<think>`` that its prompt ended with. From the engine
    also the ``prompt_tokens`` before it, its ``tokens``, and where ``Asked.log_probs`` of each the text and the
    log-prob (nats), ``pieces``; None where the engine gives none. ``cut``: it ended at ``Asked.max_tokens``.
    ``refused``: why the engine was not asked.
    """

    text: str = ""
    prompt_tokens: int = 0
    tokens: int = 0
    pieces: list[tuple[str, float | None]] = field(default_factory=list)
    cut: bool = False
    refused: str = ""


@dataclass(frozen=True)
class Asked:
    """How a program asks for a turn: ``max_tokens`` at most (0: the limits alone), up to the first of ``stop``, and
    whether it reads ``log_probs``."""

    max_tokens: int = 0
    stop: tuple[str, ...] = ()
    log_probs: bool = False


@dataclass(frozen=True)
class Step:
    """What follows a message of the model: the ``messages`` that it reads next (role ``tool`` or ``user``), a
    ``reward``, and whether the episode is ``done``. Rewards of an episode add up; 1 in all is a success. ``failed``:
    calls that the environment could not carry out, where it goes on by itself. ``readable``: False where the episode
    is done because of a message without an answer that could be read. A program's step may begin another sequence of
    tokens, ``start``, or go on with the one of the number ``onto``; ``broke``: why there is no score."""

    messages: list[dict] = field(default_factory=list)
    reward: float = 0.0
    done: bool = False
    failed: int = 0
    readable: bool = True
    start: Start | None = None
    onto: int | None = None
    asked: Asked = Asked()
    broke: str = ""


class Environment(Protocol):
    """One episode. ``row``: an RL row as its parquet file has it (rows.py).

    ``action``: the model's message, with ``calls`` ``{"name", "arguments"}``, ``text`` outside of them and
    ``thinking``. Calls are of known tools; their arguments may be anything that JSON can say. Each method runs in a
    thread of its own. An environment with ``step_text(text) -> Step`` in place of ``step`` reads the model's texts
    itself, malformed ones too; one with ``step_turn(turn: Turn | None) -> Step`` gets their tokens too. ``close()``,
    where there is one, ends an episode.
    """

    def reset(self, row: dict) -> Start: ...

    def step(self, action: Response) -> Step: ...


def of_task(task: str) -> type[Environment]:
    """The class ``Environment`` of a multi-turn task. Raises RewardError when it cannot be loaded."""
    try:
        return importlib.import_module(f"tasks.{task}.environment").Environment
    except Exception as error:
        raise RewardError(f"tasks/{task}/environment.py: cannot be loaded: {said(error)}") from error


def tool_message(content: str) -> dict:
    """The result of a call."""
    return {"role": "tool", "content": content}


def begun(made: type[Environment], row: dict) -> tuple[Environment, Start]:
    """A new environment, reset to ``row``. Raises RewardError for what it raises, and for bad messages or tools."""
    try:
        environment = made()
        start = environment.reset(row)
        if not hasattr(start, "tools"):
            raise ValueError(f"reset returned {start!r:.80}, no Start")
        problem = messages_problem(start.messages)
        if problem or len(functions(start.tools)) < len(start.tools):
            raise ValueError(f"messages: {problem}" if problem else BAD_TOOLS)
        tools = json.loads(encodable(json.dumps(start.tools, ensure_ascii=False)))
        return environment, replace(start, messages=_encodable(start.messages), tools=tools)
    except RewardError:
        raise
    except BaseException as error:  # also sys.exit: it runs in a thread, which would end in silence
        raise RewardError(f"{_where(row)}: reset raised {said(error)}") from error


def _encodable(messages: list[dict]) -> list[dict]:
    return [{**message, "content": encodable(message["content"])} for message in messages]


def stepped(environment: Environment, row: dict, tools: list[dict], answer: str | Turn | None) -> tuple[Step, int]:
    """The step that follows the text ``answer`` of the model, and the number of calls that failed.

    ``answer`` begins with the ``<think>`` that its prompt ended with; it is None before the first turn of a program. A
    malformed call, one of an unknown tool and a CallError do not end the episode: the model reads why. Raises
    RewardError for all else that the environment raises, and for a step that is none.
    """
    step, failed = _stepped(environment, row, tools, answer)
    values = {"reward": number(step.reward), "done": bool(step.done), "readable": bool(step.readable)}
    return replace(step, messages=_encodable(step.messages), **values), failed


def _stepped(environment: Environment, row: dict, tools: list[dict], answer: str | Turn | None) -> tuple[Step, int]:
    act, action = getattr(environment, "step_turn", None), answer
    if act is None:
        act = getattr(environment, "step_text", None)
        action = answer = answer.text if isinstance(answer, Turn) else answer
    elif isinstance(answer, str):
        action = Turn(answer)
    if act is None:
        act = environment.step
        try:
            action = _parsed(answer, tools)
        except Malformed as error:
            return _refused(f"malformed: {error}", tools), 1
        unknown = {call["name"][:80] for call in action.calls} - functions(tools).keys()
        if unknown:
            there = ", ".join(functions(tools))
            return _refused(f"no tool {', '.join(sorted(unknown)[:3])}; there are: {there}", tools), len(action.calls)
    try:
        step = act(action)
        if problem := _step_problem(step):
            raise ValueError(problem)
    except CallError as error:
        return _refused(str(error), tools), 1
    except RewardError:
        raise
    except BaseException as error:
        raise RewardError(f"{_where(row)}: step raised {said(error)}") from error
    return step, step.failed


def _parsed(answer: str, tools: list[dict]) -> Response:
    if tools:
        return parse_response(answer)
    thinking, text = split_thinking(answer)
    return Response(thinking, [], without_tags(text).strip())


def _refused(why: str, tools: list[dict]) -> Step:
    return Step([{"role": "tool" if tools else "user", "content": f"error: {why}"}])


def _step_problem(step: Step) -> str | None:
    if not hasattr(step, "done"):
        return f"step returned {step!r:.80}, no Step"
    problem = messages_problem(step.messages) if step.messages else None
    if problem or not (step.messages or step.done or step.start):
        return f"messages: {problem or 'none, and the episode is not done'}"
    if number(step.reward) is None:
        return f"reward: {step.reward!r:.50} is not a finite number"
    if any(message["role"] in ("assistant", "system") for message in step.messages):
        return "messages: must be of the role tool or user"
    of_numpy = str(getattr(step.done, "dtype", "")) in ("bool", "torch.bool")
    return None if isinstance(step.done, bool) or of_numpy else "done: must be true or false"


def _where(row: dict) -> str:
    truth = str((row.get("reward_model") or {}).get("ground_truth"))
    return f"environment of {row.get('data_source')!r} on ground_truth={truth[:200]!r}"


def replayed(
    made: type[Environment], row: dict, answers: Iterable[str], spare: bool = False
) -> tuple[float, int, bool]:
    """An episode without a model: its reward, how many calls failed, whether it was done. Raises as ``retold``."""
    _, turns = retold(made, row, answers, spare)
    return reward_of(turns), sum(failed for _, _, failed in turns), bool(turns) and turns[-1][1].done


def reward_of(turns: list[tuple[str, Step, int]]) -> float:
    """The sum of the rewards of an episode."""
    return math.fsum(step.reward for _, step, _ in turns)


def retold(
    made: type[Environment], row: dict, answers: Iterable[str], spare: bool = False
) -> tuple[Start, list[tuple[str, Step, int]]]:
    """An episode without a model, of the texts ``answers``: how it begins, and of each turn the answer, the step that
    follows and the number of calls that failed.

    Raises RewardError, also for answers after the end, unless they may be ``spare``.
    """
    environment, start = begun(made, row)
    turns: list[tuple[str, Step, int]] = []
    try:
        if start.of_program:
            environment.patience = WITHOUT_MODEL
            first, failed = stepped(environment, row, [], None)
            start = first.start or start
            if first.done:  # it asked for nothing
                turns.append(("", first, failed))
        for answer in answers:
            if turns and turns[-1][1].done:
                if spare:
                    break
                early = f"{_where(row)}: was done before the answer {answer[:80]!r}"
                raise RewardError(turns[-1][1].broke or early)
            turns.append((answer, *stepped(environment, row, start.tools, answer)))
    finally:
        closed(environment, row)
    return start, turns


def closed(environment: Environment, row: dict) -> None:
    """End the episode of ``environment``, where it has anything to end. Raises RewardError for what that raises."""
    try:
        getattr(environment, "close", lambda: None)()
    except BaseException as error:
        raise RewardError(f"{_where(row)}: close raised {said(error)}") from error
