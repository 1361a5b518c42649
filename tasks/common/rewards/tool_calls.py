"""Tool calls in a model's text: split off the thinking, parse the calls, compare them with the expected ones.

Model output is hostile: JSON is read strictly and within limits, nothing is evaluated.
"""

import functools
import re
from dataclasses import dataclass

from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_bipartite_matching

from verl_tasks.models.chat_template import call_text
from verl_tasks.strict_json import DECODER, MAX_DEPTH, too_deep

__all__ = [
    # for tasks
    "OPEN",
    "Malformed",
    "Response",
    "expected_calls",
    "functions",
    "matched",
    "parse_calls",
    "parse_response",
    "render_calls",
    "same_value",
]

MAX_CHARS = 16_384  # after the thinking; more would take longer than the 5 ms that a reward may take per row
MAX_CALLS = 64

THINK, THINK_END = "<think>", "</think>"
ONCE = "<think>…</think> must stand once, at the start"
OPEN, CLOSE = "<tool_call>", "</tool_call>"
_CLOSE = re.compile(r"\s*</tool_call>")
# Mistral's and Llama's templates put these special tokens before bare JSON; decoding mostly strips them.
_MARKER = re.compile(r"\s*(?:\[TOOL_CALLS\]|<\|python_tag\|>)\s*")
_BETWEEN = re.compile(r"\s*;?\s*")  # Llama writes parallel calls as {...}; {...}
_BARE = re.compile(r"\s*(?:\[\s*)?\{\s*\"")
_NAME, _ARGUMENTS = re.compile(r'"name"\s*:'), re.compile(r'"(?:arguments|parameters)"\s*:')
# <function=name>{...}</function>: Llama 3.1's custom calls, Functionary 3.1.
_FUNCTION, _FUNCTION_END = re.compile(r"\s*<function=([\w.-]{1,200})>"), re.compile(r"\s*</function>\s*")
# Calls in forms that are not read, or in other text. As text they would be right where no call is wanted.
_NAME_CALL = r"[A-Za-z_][\w.]{0,200}\("
_UNREAD = re.compile(
    r"</?function|<\|(?:tool|recipient|plugin|action_start)|<｜(?:tool|DSML)|>>>[A-Za-z_]|<arg_key>|✿FUNCTION✿"
    r"|</?(?:\w{1,20}:|start_)?(?i:tool_?calls?|tool_?use|invoke|function_?calls?)\b|<\|(?i:start_action)\|>|```tool_code"
    r"|\bto=functions\.|^Action Input:|^Action:\s{0,9}(?:```json|[A-Za-z_]\w{0,200}\[)"
    r'|"(?:tool_calls|function_?[cC]all|tool_name|tool_call_id|action_input)"\s*:|"type"\s*:\s*"(?:function|tool_use)"'
    r'|"function"\s*:\s*"[^"]{0,200}"\s*,\s*"(?:parameters|arguments)"'
    rf"|^[ \t]{{0,9}}\[\s{{0,9}}{_NAME_CALL}\s{{0,9}}(?:\)|[A-Za-z_]\w{{0,200}}\s?=(?!=))",  # pythonic: Llama 3.2 and 4
    re.MULTILINE,
)
# Possessive: 16,000 spaces would take 2 s.
_PYTHONIC = re.compile(rf"\s*+(?:```\w{{0,20}}\s++)?\[?\s*+{_NAME_CALL}[^\n]*\)\s*+\]?\s*+(?:```\s*+)?", re.DOTALL)
_FLOATS = {"number", "float", "double"}


# How a call of any form begins: name( with an argument, name{ and name[, also "name": {, the name as a value, as a tag,
# and /name.
_CALL_OF = r"(?<![\w.-])(?:{names})(?:\(\s*+[^)\s]|[ \t]{{1,9}}\(\s*+[A-Za-z_]\w{{0,200}}\s?=(?!=)"
_CALL_OF += r"|[\"'`]?\s*+:?\s*+[{{\[]|\.call\()"
_CALL_OF += r"|\b(?:name|tool|function|action|recipient_name)[\"']?\s*+[:=]\s*+[\"'`]?(?:functions\.)?(?:{names})\b"
_CALL_OF += r"|</?(?:{names})(?:\s[^<>]{{0,999}}|/)?>|^[ \t]{{0,9}}/(?:{names})\b"


class Malformed(ValueError):
    """Text that looks like thinking or a tool call, but is malformed; the message says why."""


@dataclass(frozen=True)
class Response:
    """``thinking`` (None without tags) and ``text`` (outside of calls) are stripped. A call is
    ``{"name": str, "arguments": dict}``."""

    thinking: str | None
    calls: list[dict]
    text: str


def parse_response(response: str, tools: list[dict] | None = None) -> Response:
    """Thinking, calls and other text of ``response``, which begins with the ``<think>`` that its prompt ended with
    (answers.with_opened_thinking).

    Calls count only after ``</think>``. Raises Malformed, also for a text that calls one of ``tools`` (OpenAI schemas)
    in any form that is not read.
    """
    thinking, answer = split_thinking(response)
    calls, text = parse_calls(answer)
    names = tuple(name for name in functions(tools or []) if name in text)
    if names and (found := _calls_of(names).search(text)):
        raise Malformed(f"a call in a form that is not read: {found[0][:40]!r}")
    return Response(thinking, calls, text)


@functools.lru_cache(maxsize=1024)
def _calls_of(names: tuple[str, ...]) -> re.Pattern:
    return re.compile(_CALL_OF.format(names="|".join(map(re.escape, names))), re.MULTILINE)


def split_thinking(text: str) -> tuple[str | None, str]:
    """The stripped text in ``<think>…</think>`` (None where ``text`` does not begin with it) and what follows.

    Raises Malformed for a second ``<think>`` before ``</think>``, or none to close it.
    """
    if not text.lstrip().startswith(THINK):
        return None, text
    thinking, end, answer = text.lstrip().removeprefix(THINK).partition(THINK_END)
    if not end or THINK in thinking:
        raise Malformed(ONCE)
    return thinking.strip(), answer


def without_tags(text: str) -> str:
    """``text`` outside of calls. Raises Malformed where a tag of thinking is in it; an argument may hold one."""
    if THINK in text or THINK_END in text:
        raise Malformed(ONCE)
    return text


def parse_calls(text: str) -> tuple[list[dict], str]:
    """The calls in ``text``, in order, and the stripped text outside of them.

    The forms are ``<tool_call>{"name": …, "arguments": {…}}</tool_call>`` blocks (Hermes, Qwen), or else bare JSON and
    nothing more: such objects in a row or a list, with ``arguments`` or ``parameters`` (Llama 3.1, Mistral), OpenAI's
    ``tool_calls``, ``{"function": name, "parameters": {…}}`` (Llama 3.2), and ``<function=name>{…}</function>``. Raises
    Malformed for a broken call, for other forms (pythonic, Kimi, Functionary), for more than 64 calls
    and more than 16,384 characters.
    """
    if len(text) > MAX_CHARS:
        raise Malformed(f"longer than {MAX_CHARS} characters")
    calls, outside = _in_form(text)
    without_tags(outside)
    if _UNREAD.search(outside) or _PYTHONIC.fullmatch(outside):
        raise Malformed("a call in a form that is not read")
    if len(calls) > MAX_CALLS:
        raise Malformed(f"more than {MAX_CALLS} calls")
    return calls, outside.strip()


def _in_form(text: str) -> tuple[list[dict], str]:
    """The calls and other text in the form of what stands first: an argument may hold the tags of another form."""
    if _FUNCTION.match(text):
        return _functions(text), ""
    if OPEN in text and not ((_BARE.match(text) or _MARKER.match(text)) and _alone(text)):
        return _blocks(text)
    return _bare(text)


def _alone(text: str) -> bool:
    """Whether bare calls are all of ``text``."""
    try:
        return bool(_bare(text)[0])
    except Malformed:
        return False


def _blocks(text: str) -> tuple[list[dict], str]:
    calls, outside, start = [], "", 0
    while (opened := text.find(OPEN, start)) >= 0:
        value, end = _decode(text, opened + len(OPEN))
        closed = _CLOSE.match(text, end)  # after the JSON: a string in it may hold the tag
        if not closed:
            raise Malformed(f"no {CLOSE} after a call")
        calls.append(_call(_named(value)))
        outside += text[start:opened]
        start = closed.end()
    return calls, outside + text[start:]


def _functions(text: str) -> list[dict]:
    calls, start = [], 0
    while start < len(text):
        opened = _FUNCTION.match(text, start)
        value, end = _decode(text, opened.end()) if opened else (None, start)
        closed = _FUNCTION_END.match(text, end)
        if not closed:
            raise Malformed("<function=name>{…}</function> must stand alone")
        calls.append(_call({"name": opened[1], "arguments": value}))
        start = closed.end()
    return calls


def _bare(text: str) -> tuple[list[dict], str]:
    marker = _MARKER.match(text)
    values, problem, start = [], None, marker.end() if marker else 0
    if marker or _BARE.match(text):
        try:
            while not values or start < len(text):
                value, start = _decode(text, start)
                values += value if isinstance(value, list) else [value]
                start = _BETWEEN.match(text, start).end()
        except Malformed as error:
            problem = error
    if len(values) == 1 and isinstance(values[0], dict) and isinstance(values[0].get("tool_calls"), list):
        if values[0].get("content") or not values[0].keys() <= {"role", "content", "tool_calls"}:
            raise Malformed("tool_calls must stand alone")
        values = values[0]["tool_calls"]
    values = [_named(value) for value in values]
    shaped = all(isinstance(v, dict) and "name" in v and ("arguments" in v or "parameters" in v) for v in values)
    if values and not problem and (marker or shaped):
        return [_call(value) for value in values], ""
    # Prose, and JSON that is no call, are text. A broken call must not pass as text.
    if marker or (_NAME.search(text) and (problem or _ARGUMENTS.search(text))):
        raise Malformed(str(problem or "a call must stand alone or between its tags"))
    return [], text


def _named(value):
    """A call of OpenAI (``function`` holds name and arguments) or Llama 3.2 (it is the name) in the form of others."""
    inner = value.get("function") if isinstance(value, dict) and "name" not in value else None
    if isinstance(inner, dict) and value.keys() <= {"id", "type", "index", "function"}:
        return inner
    if isinstance(inner, str):
        return {"name": inner} | {key: value[key] for key in value.keys() - {"function"}}
    return value


def _call(value) -> dict:
    """``value`` as ``{"name", "arguments"}``; ``id`` and ``type``, which some models write, are left out."""
    if not isinstance(value, dict) or not value.keys() <= {"name", "arguments", "parameters", "id", "type"}:
        raise Malformed("a call is an object with name and arguments")
    if not isinstance(value.get("name"), str) or ("arguments" in value) == ("parameters" in value):
        raise Malformed("a call has a name and arguments, each once")
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        arguments = strict_json(arguments)
    if not isinstance(arguments, dict):
        raise Malformed("arguments must be an object")
    return {"name": value["name"], "arguments": arguments}


def strict_json(text: str):
    """The value of JSON text. Raises Malformed, also for NaN, Infinity, floats out of range, repeated keys, more than
    32 levels and anything after the value."""
    value, end = _decode(text, 0)
    if text[end:].strip():
        raise Malformed("text after the JSON")
    return value


def _decode(text: str, start: int):
    """The JSON value that begins at ``start`` (white space is skipped) and where it ends."""
    while start < len(text) and text[start] in " \t\r\n":
        start += 1
    try:
        value, end = DECODER.raw_decode(text, start)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"not JSON ({str(error)[:80]})") from None
    if too_deep(value):
        raise Malformed(f"nested deeper than {MAX_DEPTH} levels")
    return value, end


def render_calls(calls: list[dict]) -> str:
    """``calls`` as Hermes and Qwen write them: a ``<tool_call>`` block each."""
    return "\n".join(map(call_text, calls))


def functions(tools: list[dict]) -> dict[str, dict]:
    """Name to function schema of OpenAI ``tools``, with or without the ``{"type": "function"}`` around."""
    found = [tool.get("function", tool) if isinstance(tool, dict) else None for tool in tools]
    return {f["name"]: f for f in found if isinstance(f, dict) and isinstance(f.get("name"), str)}


def matched(made: list[dict], expected: list[dict], tools: list[dict]) -> int:
    """Size of the maximum matching (Hopcroft and Karp 1973) of equal calls in ``made`` and ``expected``, in any order.

    Taking the first equal call is not enough: 1 and 1.0 match an expected 1.0, only 1 matches an expected 1.
    """
    if not made or not expected:
        return 0
    known = functions(tools)
    pairs = csr_array([[same_call(call, other, known) for other in expected] for call in made])
    return int((maximum_bipartite_matching(pairs) >= 0).sum())


def expected_calls(calls: list[dict]) -> list[dict]:
    """``calls`` of a ground truth, with ``{"name", "allowed"}`` for those in BFCL's form ``{name: {argument: [values
    that are right]}}``; "" among the values: the argument may be left out."""
    found = []
    for call in calls:
        bfcl = len(call) == 1 and isinstance(next(iter(call.values())), dict)
        found += [{"name": name, "allowed": allowed} for name, allowed in call.items()] if bfcl else [call]
    return found


def _permits(made: dict, allowed: dict, schema) -> bool:
    """Whether each argument of ``made`` has one of its ``allowed`` values, and no other argument is there."""
    properties = _dict(_dict(schema).get("properties"))
    if not made.keys() <= allowed.keys():
        return False
    for name, values in allowed.items():
        own = properties.get(name)
        if not any(_permitted(made[name], value, own) if name in made else value == "" for value in values):
            return False
    return True


def _permitted(made, value, schema) -> bool:
    """``value`` is one that is allowed: an object in it again holds lists of allowed values."""
    if isinstance(made, dict) and isinstance(value, dict) and all(isinstance(v, list) for v in value.values()):
        return _permits(made, value, schema)
    if isinstance(made, list) and isinstance(value, list) and len(made) == len(value):
        items = _dict(schema).get("items")
        return all(_permitted(a, b, items) for a, b in zip(made, value, strict=True))
    return same_value(made, value, schema)


def same_call(made: dict, expected: dict, known: dict[str, dict]) -> bool:
    """Whether ``made`` is the ``expected`` call; ``known``: name to function schema, for types and defaults."""
    if made["name"] != expected["name"]:
        return False
    schema = known.get(expected["name"], {}).get("parameters")
    if "allowed" in expected:
        return _permits(made["arguments"], expected["allowed"], schema)
    return same_value(made["arguments"], expected["arguments"], schema)


def same_value(made, expected, schema) -> bool:
    """Whether two JSON values are equal, types included: 1 is not "1", true is not 1.

    An int may replace a float. A float may replace an equal int only where ``schema`` (JSON Schema) has type number.
    An object's optional member may be missing on either side if the other has its ``default``. Lists keep their order.
    """
    schema = _dict(schema)
    if isinstance(made, dict) and isinstance(expected, dict):
        properties, required = _dict(schema.get("properties")), schema.get("required")
        required = required if isinstance(required, list) else []
        for name in made.keys() | expected.keys():
            own = _dict(properties.get(name, schema.get("additionalProperties")))
            if not (name in made and name in expected) and (name in required or "default" not in own):
                return False
            default = own.get("default")
            if not same_value(made.get(name, default), expected.get(name, default), own):
                return False
        return True
    if isinstance(made, list) and isinstance(expected, list):
        items = schema.get("items")
        return len(made) == len(expected) and all(same_value(a, b, items) for a, b in zip(made, expected, strict=True))
    if type(made) is type(expected) or (type(made) is int and type(expected) is float):
        return made == expected
    return type(made) is float and type(expected) is int and made == expected and _takes_float(schema)


def _takes_float(schema: dict) -> bool:
    choices = [c for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list) for c in schema[key]]
    types = [_dict(choice).get("type") for choice in (schema, *choices)]
    names = [name for each in types for name in (each if isinstance(each, list) else [each])]
    return any(name in _FLOATS for name in names if isinstance(name, str))


def _dict(value) -> dict:
    return value if isinstance(value, dict) else {}
