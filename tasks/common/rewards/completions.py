"""The protocol of a program's turns: OpenAI's chat completions, from a request to messages, and from a turn to a reply.

What stands in ``SAMPLING`` is the training's, or the evaluation's: it is read and not used. What cannot be done is
refused. A turn is sampled as a whole, so a stream has it in one piece.
"""

import json
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

from verl_tasks.rewards.environment import BAD_TOOLS, Asked, Turn
from verl_tasks.rewards.tool_calls import Malformed, functions, parse_response, split_thinking
from verl_tasks.rows import messages_problem
from verl_tasks.strict_json import too_deep

MODEL = "policy"
SAMPLING = {"temperature", "top_p", "seed", "user", "metadata", "store", "reasoning_effort", "safety_identifier"}
SAMPLING |= {"prompt_cache_key", "prompt_cache_retention", "service_tier", "verbosity"}
DEEPEST = 64  # of what stands in lists and objects of a request: a template renders them by recursion
# Accepted with these values alone.
ONLY = {
    "n": (1,),
    "tool_choice": ("auto",),
    "response_format": ({"type": "text"},),
    "parallel_tool_calls": (True,),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "top_logprobs": (0,),
}
READ = {"model", "messages", "tools", "max_tokens", "max_completion_tokens", "stop"}
READ |= {"stream", "stream_options", "logprobs"}


class Refused(ValueError):
    """A request that is answered with status 400 and this message."""


@dataclass(frozen=True)
class Request:
    """``messages`` and ``tools`` as chat_template.py takes them. ``stream``, ``usage``: of the reply."""

    messages: list[dict]
    tools: list[dict]
    asked: Asked
    stream: bool = False
    usage: bool = False


def read(body: bytes) -> Request:
    """The request in ``body``. Raises Refused."""
    try:
        # A half of a surrogate pair, which JSON can say, no tokenizer takes.
        given = json.loads(json.dumps(json.loads(body), ensure_ascii=False).encode("utf-8", "replace"))
        given = {name: value for name, value in given.items() if value is not None}
    except (ValueError, AttributeError, RecursionError):
        raise Refused("the body must be a JSON object") from None
    for name, value in given.items():
        if name in ONLY and value not in ONLY[name]:
            raise Refused(f"{name}: only {json.dumps(ONLY[name][0])} is served, not {json.dumps(value)[:80]}")
        if name not in READ | SAMPLING | ONLY.keys():
            raise Refused(f"{name[:80]}: is not served")
    if too_deep(given, DEEPEST):
        raise Refused(f"the body has more than {DEEPEST} lists and objects in each other")
    if given.get("model") != MODEL:
        raise Refused(f"model: there is {MODEL!r} alone, not {str(given.get('model'))[:80]!r}")
    tools = given.get("tools", [])
    if not isinstance(tools, list) or len(functions(tools)) < len(tools):
        raise Refused(BAD_TOOLS)
    # `strict` is of a sampler that keeps to a schema; the model does not read it.
    schemas = [{key: value for key, value in tool.items() if key != "strict"} for tool in functions(tools).values()]
    tools = [{"type": "function", "function": schema} for schema in schemas]
    stop = given.get("stop", [])
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(text, str) and text for text in stop):
        raise Refused("stop: must be texts")
    most = given.get("max_completion_tokens", given.get("max_tokens", 0))
    if type(most) is not int or most < 0:
        raise Refused("max_tokens: must be a whole number above 0")
    options = given.get("stream_options", {})
    usage = isinstance(options, dict) and bool(options.get("include_usage"))
    asked = Asked(most, tuple(stop), bool(given.get("logprobs")))
    return Request(_messages(given.get("messages")), tools, asked, bool(given.get("stream")), usage)


def _messages(given) -> list[dict]:
    """``given`` with what a template renders, and no more: role, content, the calls without their ids."""
    try:
        found = [message(**each) for each in given]
    except ValueError as error:
        raise Refused(f"messages: {error}") from None
    except (TypeError, KeyError, AttributeError):
        raise Refused("messages: must be a list of messages as OpenAI's chat completions have them") from None
    if problem := messages_problem(found):
        raise Refused(f"messages: {problem}")
    return found


def message(role: str, content=None, tool_calls=None, **_) -> dict:
    """A message as it is compared and rendered. Raises ValueError for content that is no text."""
    if isinstance(content, list):
        if any(part.get("type") != "text" for part in content):
            raise ValueError("only parts of type text are served")
        content = "".join(part["text"] for part in content)
    found = {"role": "system" if role == "developer" else role, "content": content or ""}
    calls = [
        {"name": c["function"]["name"], "arguments": _object(c["function"]["arguments"])} for c in tool_calls or []
    ]
    return found | ({"tool_calls": [{"type": "function", "function": call} for call in calls]} if calls else {})


def _object(arguments) -> dict:
    try:
        found = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or too_deep(found, DEEPEST):
        raise ValueError(f"the arguments of a call must be an object of at most {DEEPEST} levels")
    return found


def answer(turn: Turn, request: Request) -> tuple[dict, bool]:
    """The assistant's message of ``turn`` as OpenAI has it, and whether it is malformed: then it is all text. Calls are
    read where the request has tools; thinking stands in ``reasoning_content``."""
    try:
        if request.tools:
            found = parse_response(turn.text)
            thinking, calls, text = found.thinking, found.calls, found.text
        else:
            (thinking, text), calls = split_thinking(turn.text), []
    except Malformed:
        return {"role": "assistant", "content": turn.text}, True
    told = {"role": "assistant", "content": text or (None if calls else "")}
    if thinking is not None:
        told["reasoning_content"] = thinking
    if calls:
        told["tool_calls"] = [
            {
                "id": f"call_{uuid.uuid4().hex[:24]}",
                "type": "function",
                "function": {"name": call["name"], "arguments": json.dumps(call["arguments"], ensure_ascii=False)},
            }
            for call in calls
        ]
    return told, False


def reply(turn: Turn, told: dict, request: Request) -> dict:
    """The completion with the message ``told``."""
    reason = "length" if turn.cut else "tool_calls" if told.get("tool_calls") else "stop"
    logprobs = None
    if request.asked.log_probs:
        logprobs = {"content": [_token(*piece) for piece in turn.pieces], "refusal": None}
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": MODEL,
        "choices": [{"index": 0, "message": told, "logprobs": logprobs, "finish_reason": reason}],
        "usage": {
            "prompt_tokens": turn.prompt_tokens,
            "completion_tokens": turn.tokens,
            "total_tokens": turn.prompt_tokens + turn.tokens,
        },
    }


def _token(text: str, log_prob: float | None) -> dict:
    return {"token": text, "logprob": log_prob, "bytes": [*text.encode()], "top_logprobs": []}


def chunks(whole: dict, usage: bool) -> Iterator[str]:
    """The completion ``whole`` as the events of a stream."""
    (choice,) = whole["choices"]
    told = dict(choice["message"])
    if calls := told.get("tool_calls"):
        told["tool_calls"] = [{"index": place, **call} for place, call in enumerate(calls)]
    shared = {**whole, "object": "chat.completion.chunk"}
    del shared["usage"]
    first = {"index": 0, "delta": told, "logprobs": choice["logprobs"], "finish_reason": None}
    last = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": choice["finish_reason"]}
    events = [{**shared, "choices": [first]}, {**shared, "choices": [last]}]
    events += [{**shared, "choices": [], "usage": whole["usage"]}] if usage else []
    yield from (f"data: {json.dumps(event)}\n\n" for event in events)
    yield "data: [DONE]\n\n"
