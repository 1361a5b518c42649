"""Records of common data-set formats as OpenAI messages and tools.

Recognised: OpenAI ``messages`` (text or typed parts, tool calls), ShareGPT ``conversations``, Alpaca, prompt and answer
(text or messages), and prompt, chosen and rejected. A record that does not fit its form raises DataError.
"""

import json
import re
from dataclasses import dataclass
from itertools import chain, cycle, takewhile

from tasks.common.rows import DataError, chat, normalized
from tasks.common.strict_json import no_constant
from tasks.common.text import one_line

WHOLE = ("messages", "conversations", "conversation")
PROMPTS = ("prompt", "question", "query", "problem", "instruction", "input")
CONTEXTS = ("input", "context", "passage")  # of a prompt, joined to it as Alpaca's input is
CHOICES = ("choices", "options")
MARKS = ("kto_tag", "label")  # true or false: unpaired preferences
SYSTEMS = ("system", "system_prompt")
ANSWERS = ("answer", "response", "completion", "output", "solution", "target", "ground_truth")
KINDS = ("rl", "sft", "dpo")
ROLES = {
    "system": ("system", "developer"),
    "user": ("user", "human"),
    "assistant": ("assistant", "gpt", "chatgpt", "bot", "model", "function_call", "tool_call"),
    "tool": ("tool", "observation", "function", "function_response", "tool_response"),
}
ROLE_OF = {name: role for role, names in ROLES.items() for name in names}
WEIGHTS = ("weight", "loss", "train")  # of a turn: 0 or false where it is not to be learned
# A chat in a cell, in JSON, or as Python prints it, which is refused.
_CELL = re.compile(r"""\s*\[?\s*\{(?=.*["'](?:role|from)["']\s*:)\s*["']\w+["']\s*:.*[]}]\s*""", re.DOTALL)
# From the type names of Python and BFCL to those of JSON Schema.
TYPES = {"dict": "object", "str": "string", "int": "integer", "float": "number", "double": "number", "bool": "boolean"}
TYPES |= {"list": "array", "tuple": "array", "set": "array", "NoneType": "null", "None": "null"}
JSON_TYPES = ("object", "string", "integer", "number", "boolean", "array", "null")


@dataclass(frozen=True)
class Columns:
    """Names of columns that differ from the usual ones. A record must have each named column."""

    prompt: str | None = None
    answer: str | None = None
    system: str | None = None
    messages: str | None = None
    tools: str | None = None
    chosen: str | None = None
    rejected: str | None = None


@dataclass(frozen=True)
class Conversation:
    """One record. ``messages``: OpenAI messages, the whole conversation, or the prompt when there is an answer.

    ``content`` is text, "" beside tool calls; ``tool_calls[i]["function"]["arguments"]`` is an object. Reasoning comes
    before the content as ``<think>…</think>`` (``split_thinking`` removes it). ``tools``: OpenAI tool schemas.
    ``answer``: text or any JSON value. ``chosen`` and ``rejected``: text. ``context``: indices of the assistant's
    messages that are not to be learned (``weight: 0``).
    """

    messages: list[dict]
    tools: list[dict] | None = None
    answer: object = None
    chosen: str | None = None
    rejected: str | None = None
    context: frozenset[int] = frozenset()

    @property
    def kind(self) -> str:
        """ "dpo" (chosen and rejected), "rl" (a prompt and its answer) or "sft" (a conversation)."""
        if self.chosen is not None:
            return "dpo"
        return "rl" if self.answer is not None else "sft"


def conversation(record: dict, columns: Columns | None = None) -> Conversation:
    """``record`` in the recognized form, or in the form that ``columns`` names. Raises DataError; the caller
    (``Records.converted``) adds the row's place."""
    named = {name: column for name, column in vars(columns or Columns()).items() if column is not None}
    for column in named.values():
        if column not in record:
            raise DataError(f"has no column `{column}`; it has {_names(record)}")
    try:
        return _conversation(record, named)
    except RecursionError as error:
        raise DataError("is nested too deeply") from error


def _conversation(record: dict, named: dict[str, str]) -> Conversation:
    """``named``: the columns that the caller names, by their field in Columns."""

    def has(name: str) -> bool:  # without reading it; Arrow gives a row null, CSV "", for a column of other rows
        return dict.get(record, name) not in (None, "")

    def first(names: tuple[str, ...]) -> str | None:
        return next(filter(has, names), next((name for name in names if name in record), None))

    tools_column, chosen, rejected = (named.get(name, name) for name in ("tools", "chosen", "rejected"))
    tools = _at(f"column `{tools_column}`", tool_schemas, record.get(tools_column))
    prompt = named.get("prompt") or first(PROMPTS)
    pair = {chosen, rejected} <= record.keys() and "answer" not in named and (has(chosen) or has(rejected))
    whole, free = named.get("messages"), not named.keys() & {"messages", "prompt"}
    if free and not (pair and prompt and has(prompt)):
        whole = next(filter(has, WHOLE), None)
    if free and "answer" not in named and (mark := next(filter(lambda name: _marks(record, name), MARKS), None)):
        raise DataError(f"column `{mark}` (unpaired preferences) is not understood; keep the good answers without it")
    better, worse = (_reply(name, record[name]) if pair else ("", []) for name in (chosen, rejected))
    if better[1] and worse[1] and better[1] != worse[1]:
        raise DataError(f"columns `{chosen}` and `{rejected}` answer different conversations")
    before = better[1] or worse[1]
    alpaca = prompt == "instruction" and "output" in record and not whole and not named.keys() & {"prompt", "answer"}
    messages = []
    if whole and not (before and whole not in named.values()):
        messages = _at(f"column `{whole}`", _turns, record[whole])
    elif prompt and not whole and _at(f"column `{prompt}`", _chat_in, record[prompt]):
        messages = _at(f"column `{prompt}`", _turns, record[prompt])
    elif prompt and not whole:
        others = [name for name in PROMPTS if name not in (prompt, *CONTEXTS) and has(name)]
        others = [name for name in others if dict.get(record, name) != record[prompt]] if free and not before else []
        others += filter(has, CHOICES if free else ())
        if others:
            raise DataError(f"columns `{'`, `'.join([prompt, *others])}`: which is the prompt? {_advice(record)}")
        asked = [_text(prompt, record[prompt])]
        asked += [_text(name, record[name]) for name in CONTEXTS if name != prompt and has(name) and not before]
        messages = [*(_history(record) if free else []), *chat("\n".join(asked))]
    if before:
        messages = _in_context(messages, before, prompt, chosen)
    system_column = named.get("system") or first(SYSTEMS) or "system"
    system = record.get(system_column)
    if system is not None and not isinstance(system, str):
        raise DataError(f"column `{system_column}` must be text")
    if system and messages and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    if pair:
        if not messages or messages[-1]["role"] not in ("user", "tool"):
            problem = f"has {chosen} and {rejected} but no prompt that ends with the user's turn"
            raise DataError(f"{problem}; {_advice(record)}")
        return _finished(messages, tools, chosen=better[0], rejected=worse[0])
    if not messages:
        raise DataError(f"has no known form; {_advice(record)}")
    answered, answer = messages[-1]["role"] == "assistant", named.get("answer")
    if not answered:
        answer = answer or first(tuple(name for name in ANSWERS if name != prompt))
    if answer is None:
        if not (answered or whole):
            raise DataError(f"has a prompt but no answer; {_advice(record)}")
        return _finished(messages, tools)
    if answered:
        raise DataError(f"the conversation ends with the assistant's turn, and column `{answer}` is an answer too")
    if (
        turns := [{"role": "assistant", "content": record[answer]}]
        if alpaca
        else _at(f"column `{answer}`", _chat_in, record[answer])
    ):
        return _finished([*messages, *_at(f"column `{answer}`", _turns, turns)], tools)
    return _finished(messages, tools, answer=_at(f"column `{answer}`", _answer, record[answer]))


def _finished(messages: list[dict], tools: list[dict] | None, **answers) -> Conversation:
    """Without what the messages held for us: weights, and null arguments that their function does not take."""
    context = frozenset(index for index, message in enumerate(messages) if message.pop("weight", 1) == 0)
    known = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools or []}
    for function in (call["function"] for message in messages for call in message.get("tool_calls", [])):
        if function["name"] not in known:
            continue
        schema, given = known[function["name"]], function["arguments"]
        taken = {name for name, own in schema.get("properties", {}).items() if _takes_null(own)}
        function["arguments"] = {name: value for name, value in given.items() if value is not None or name in taken}
        # One that is required and can be null was null, where Arrow shows no difference.
        required = schema["required"] if isinstance(schema.get("required"), list) else []
        function["arguments"] |= {name: None for name in sorted(taken - given.keys()) if name in required}
    return Conversation(messages, tools, **answers, context=context)


def _takes_null(schema) -> bool:
    if not isinstance(schema, dict) or (schema.get("default", 0) is None or schema.get("nullable") is True):
        return True
    types = schema.get("type", "null" if not schema.keys() & {"anyOf", "oneOf", "enum"} else "")
    choices = [each for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list) for each in schema[key]]
    return "null" in (types if isinstance(types, list) else [types]) or any(map(_takes_null, choices))


def _marks(record: dict, name: str) -> bool:
    """Whether the column says if the answer is a good one."""
    value = dict.get(record, name)
    of_completion = name == "label" and "completion" in record and value not in (None, "")
    return of_completion or str(value).lower() in ("true", "false")


def _chat_in(value) -> list | None:
    """The messages in ``value``, also as one message or as JSON text (a cell of CSV); None for anything else."""
    if isinstance(value, str) and _CELL.fullmatch(value):
        value = _parsed(value)
    turns = value if isinstance(value, list) else [value]
    whole = turns and all(isinstance(t, dict) and (t.keys() & {"content", "value", "tool_calls"}) for t in turns)
    return turns if whole and all(str(t.get("role", t.get("from"))) in ROLE_OF for t in turns) else None


def _history(record: dict) -> list[dict]:
    """``history`` as in LLaMA-Factory: pairs of texts."""
    history = _at("column `history`", _parsed, record.get("history") or [])
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise DataError("column `history` must be a list of [instruction, output]")
    turns = zip(cycle(("user", "assistant")), chain.from_iterable(history), strict=False)
    return [_message({"role": role, "content": text}) for role, text in turns]


def _in_context(prompt: list[dict], before: list[dict], column: str | None, chosen: str) -> list[dict]:
    """The messages that a pair answers: ``before`` its answers, which holds the ``prompt`` or goes on from it."""
    if before[0]["role"] in ("assistant", "tool"):
        return [*prompt, *before]
    told = [normalized(message["content"]) for message in before]
    if any(m["role"] != "system" and normalized(m["content"]) not in told for m in prompt):
        raise DataError(f"column `{column}` is not in the messages of column `{chosen}`")
    own = prompt[:1] if prompt and prompt[0]["role"] == "system" != before[0]["role"] else []
    return [*own, *before]


def _text(name: str, value) -> str:
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"column `{name}` must be text, is {_shown(value)}")
    return value


def _answer(value):
    """A ground truth: text, or a JSON value."""
    if value is None or (isinstance(value, str) and not value.strip()):
        raise DataError(f"must be an answer, is {_shown(value)}")
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise DataError(f"must be text or a JSON value ({error})") from error
    return value


def _reply(name: str, value) -> tuple[str, list[dict]]:
    """Text of a chosen or rejected answer, and the messages before it if ``value`` has them."""
    chat = _at(f"column `{name}`", _chat_in, value)
    if isinstance(value, str) and not chat:
        return _text(name, value), []
    turns = _at(f"column `{name}`", _turns, chat or (value if isinstance(value, list) else [value]))
    if turns[-1]["role"] != "assistant" or not turns[-1]["content"] or turns[-1].get("tool_calls"):
        raise DataError(f"column `{name}` must be a text answer of the assistant")
    return turns[-1]["content"], turns[:-1]


def _turns(value) -> list[dict]:
    """OpenAI messages from OpenAI or ShareGPT ones, or from JSON text of them."""
    value = _parsed(value)
    if not isinstance(value, list) or not value:
        raise DataError(f"must be a non-empty list of messages, is {_shown(value)}")
    messages = _ordered([_at(f"message {index}", _message, turn) for index, turn in enumerate(value)])
    if any(message["role"] == "system" for message in messages[1:]):
        raise DataError("has a system message after the first")
    return messages


def _ordered(messages: list[dict]) -> list[dict]:
    """``messages`` with the results of parallel calls in the order of these, by id, else by name; without the ids."""
    messages, index = list(messages), 0
    while index < len(messages):
        calls, start = messages[index].get("tool_calls", []), index + 1
        results = list(takewhile(lambda message: message["role"] == "tool", messages[start:]))
        ids, given = [call.pop("id", None) for call in calls], [result.pop("tool_call_id", None) for result in results]
        names = [call["function"]["name"] for call in calls]
        if len(set(ids)) < len(calls) or None in (*ids, *given):
            ids, given = names, [result.get("name") for result in results]
        elif unknown := set(given) - set(ids) if len(calls) > 1 else ():
            raise DataError(f"message {start}: tool_call_id {_shown(min(unknown))} is of no call before it")
        if len(set(ids)) == len(calls) > 1 and set(given) <= set(ids):
            results = [
                result for _, result in sorted(zip(map(ids.index, given), results, strict=True), key=lambda r: r[0])
            ]
        messages[start : start + len(results)] = results
        index = start + len(results)
    return messages


def _message(turn) -> dict:
    if not isinstance(turn, dict):
        raise DataError(f"must be an object with role and content, is {_shown(turn)}")
    role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
    if not isinstance(role, str) or role not in ROLE_OF:
        raise DataError(f"role must be one of {', '.join(ROLE_OF)}, is {_shown(role)}")
    name, own = turn.get("name"), {"weight": 0} if 0 in [turn[key] for key in WEIGHTS if key in turn] else {}
    if role in ("function_call", "tool_call"):
        return {"role": "assistant", "content": "", "tool_calls": _calls(content)} | own
    role = ROLE_OF[role]
    keys = ("tool_calls", "function_call")  # the second is OpenAI's older form
    calls = [call for key in keys if turn.get(key) for call in _calls(turn[key])]
    thinking = [text for key in ("reasoning_content", "reasoning") if isinstance(text := turn.get(key), str) and text]
    typed = isinstance(content, list) and all(isinstance(part, dict) and "type" in part for part in content)
    if role == "tool" and content is not None and not isinstance(content, str) and not typed:
        content = json.dumps(content, ensure_ascii=False)  # a result that is not text
    elif isinstance(content, list):
        content = _parts(content, thinking, calls)
    elif content is None and (calls or thinking):
        content = ""
    if not isinstance(content, str):
        raise DataError(f"content must be text, is {_shown(content)}")
    if (calls or thinking) and role != "assistant":
        raise DataError(f"only the assistant reasons and calls tools, not {role}")
    if role in ("user", "assistant") and not content.strip() and not calls:
        raise DataError(f"the {role} says nothing")
    if thinking:
        content = "\n\n".join(filter(None, [f"<think>\n{''.join(thinking).strip()}\n</think>", content]))
    if role == "tool":
        own = {"name": name} if isinstance(name, str) and name else {}
        own |= {"tool_call_id": id} if isinstance(id := turn.get("tool_call_id"), str) and id else {}
    return (
        {"role": role, "content": content} | ({"tool_calls": calls} if calls else {}) | (own if role != "user" else {})
    )


def _parts(parts: list, thinking: list[str], calls: list[dict]) -> str:
    """Text of typed content parts. Reasoning is appended to ``thinking``, tool calls to ``calls``."""
    texts = []
    for part in parts:
        if not isinstance(part, dict):
            raise DataError(f"a content part must be an object with a type, is {_shown(part)}")
        kind = part.get("type")
        value = part.get("value", part.get(kind) if isinstance(kind, str) else None)
        if kind in ("tool_call", "function_call"):
            calls += _calls(value)
        elif kind in ("text", "reasoning", "thinking"):
            value = part.get("text") if value is None else value
            if not isinstance(value, str):
                raise DataError(f"a content part of type {kind} must have text, has {_shown(value)}")
            (texts if kind == "text" else thinking).append(value)
        else:
            raise DataError(f"a content part is of type {_shown(kind)}; only text, reasoning and tool_call are known")
    return "".join(texts)


def _calls(value) -> list[dict]:
    """OpenAI tool calls from one call or a list, each as object or JSON text, with or without ``function`` around."""
    calls = []
    for call in map(_parsed, _listed(value)):
        function = _function("tool call", call)
        given = function.get("arguments", function.get("parameters"))
        arguments = _parsed(given) if given not in (None, "") else {}
        if not isinstance(arguments, dict):
            raise DataError(f"arguments of the call of {function['name']} must be a JSON object, are {_shown(given)}")
        made = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
        calls.append(made | ({"id": call["id"]} if isinstance(call.get("id"), str) and call["id"] else {}))
    if not calls:
        raise DataError("a tool call is empty")
    return calls


def split_thinking(content: str) -> tuple[str, str]:
    """The text of ``<think>…</think>`` at the start of an assistant's content, and the rest; ("", content) without."""
    head, closed, rest = content.partition("</think>")
    if not closed or not head.lstrip().startswith("<think>"):
        return "", content
    return head.lstrip().removeprefix("<think>").strip(), rest.lstrip("\n")


def tool_schemas(value) -> list[dict] | None:
    """OpenAI tool schemas from one tool or a list, or JSON text of it, with or without ``function`` around; None for
    none. Types get their JSON Schema names, ``parameters`` becomes an object with ``properties``."""
    return [_tool(tool) for tool in _listed(value)] or None if value not in (None, "") else None


def _tool(tool) -> dict:
    function = _function("tool", tool)
    parameters = _parsed(function.get("parameters", function.get("input_schema"))) or {}
    if not isinstance(parameters, dict):
        raise DataError(f"parameters of {function['name']} must be an object, are {_shown(parameters)}")
    if not isinstance(parameters.get("properties"), dict):
        # Nothing, or the properties alone: {"city": {"type": "str", "description": "…"}}
        properties = {key: value for key, value in parameters.items() if isinstance(value, dict)}
        parameters = {"type": "object", "properties": properties}
    if "required" not in parameters and isinstance(function.get("required"), list):
        parameters = {**parameters, "required": function["required"]}
    description = function.get("description")
    described = {"name": function["name"], "description": description if isinstance(description, str) else ""}
    return {"type": "function", "function": {**described, "parameters": {"type": "object", **_schema(parameters)}}}


def _schema(schema):
    """``schema`` with JSON Schema's names of types, at every level."""
    if not isinstance(schema, dict):
        return schema
    # A parquet file fills the keys that some other row has with null.
    schema = {key: value for key, value in schema.items() if value is not None or key in ("default", "const")}
    if "type" in schema:
        named = schema.pop("type")
        known = [name for each in (named if isinstance(named, list) else [named]) if (name := _type(each))]
        schema |= {"type": known if isinstance(named, list) else known[0]} if known else {}
    if isinstance(schema.get("properties"), dict):
        properties = schema["properties"].items()
        schema["properties"] = {name: _schema(value) for name, value in properties if value is not None}
    for key in {"items", "additionalProperties", "anyOf", "oneOf", "allOf"} & schema.keys():
        value = schema[key]
        schema[key] = [_schema(part) for part in value] if isinstance(value, list) else _schema(value)
    return schema


def _type(named) -> str | None:
    """JSON Schema's name of a type; None (any type) for an unknown name, such as "any"."""
    name = named.split(",")[0].split("[")[0].strip() if isinstance(named, str) else ""  # "str, optional", "List[int]"
    name = TYPES.get(name, TYPES.get(name.lower(), name.lower()))
    return name if name in JSON_TYPES else None


def _at(place: str, convert, value):
    try:
        return convert(value)
    except DataError as error:
        raise DataError(f"{place}: {error}") from error


def _function(what: str, value) -> dict:
    """The object with a name: ``value`` itself, or its ``function``; ``value`` may be JSON text."""
    value = _parsed(value)
    function = value.get("function", value) if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise DataError(f"a {what} must be an object with a name, is {_shown(value)}")
    return function


def _listed(value) -> list:
    value = _parsed(value)
    return value if isinstance(value, list) else [value]


def _parsed(value):
    """``value``, parsed if it is text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value, parse_constant=no_constant)
    except ValueError as error:
        raise DataError(f"is not JSON ({error}): {_shown(value)}") from error


def _shown(value) -> str:
    """``value`` for a message: short, on one line."""
    return "null" if value is None else one_line(repr(value[:80] if isinstance(value, str | list) else value)[:200], 80)


def _names(record: dict) -> str:
    return f"columns {', '.join(map(str, record))}"[:300] if record else "no columns"


def _advice(record: dict) -> str:
    return (
        f"it has {_names(record)}. Known: messages; conversations; instruction and output; prompt and answer; prompt, "
        "chosen and rejected. `make json_to_parquet` takes others "
        "(--prompt-column, --answer-column, --messages-column, …), `make dpo` with PAIRS_COLUMNS"
    )
