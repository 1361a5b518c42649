"""Records of common data-set formats as OpenAI messages and tools.

Recognised: OpenAI ``messages`` (text or typed parts, tool calls), ShareGPT ``conversations``, Alpaca, plain prompt and
answer, and prompt, chosen and rejected. A record that does not fit its form raises DataError.
"""

import json
from dataclasses import dataclass
from itertools import chain, cycle

from tasks.common.data.rows import DataError, chat
from tasks.common.strict_json import no_constant
from tasks.common.text import one_line

WHOLE = ("messages", "conversations", "conversation")
PROMPTS = ("prompt", "question", "query", "problem", "instruction", "input")
ANSWERS = ("answer", "response", "completion", "output", "solution", "target", "ground_truth")
KINDS = ("rl", "sft", "dpo")
ROLES = {
    "system": ("system", "developer"),
    "user": ("user", "human"),
    "assistant": ("assistant", "gpt", "chatgpt", "bot", "model", "function_call", "tool_call"),
    "tool": ("tool", "observation", "function", "function_response", "tool_response"),
}
ROLE_OF = {name: role for role, names in ROLES.items() for name in names}
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
    ``answer``: text or any JSON value. ``chosen`` and ``rejected``: text.
    """

    messages: list[dict]
    tools: list[dict] | None = None
    answer: object = None
    chosen: str | None = None
    rejected: str | None = None

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
    tools_column, chosen, rejected = (named.get(name, name) for name in ("tools", "chosen", "rejected"))
    tools = _at(f"column `{tools_column}`", tool_schemas, record.get(tools_column))
    prompt = named.get("prompt") or next((name for name in PROMPTS if name in record), None)
    whole = named.get("messages")
    if not named.keys() & {"messages", "prompt"}:
        whole = next((name for name in WHOLE if record.get(name) is not None), None)
    alpaca = record.keys() >= {"instruction", "output"} and "messages" not in record
    alpaca = alpaca and not named.keys() & {"messages", "prompt", "answer"}
    messages = []
    if whole or (prompt and not alpaca and isinstance(record[prompt], list)):
        messages = _at(f"column `{whole or prompt}`", _turns, record[whole or prompt])
    elif alpaca:
        messages = _alpaca(record)
    elif prompt:
        messages = chat(_text(prompt, record[prompt]))
    system = record.get(named.get("system", "system"))
    if system is not None and not isinstance(system, str):
        raise DataError(f"column `{named.get('system', 'system')}` must be text")
    if system and messages and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    if chosen in record and rejected in record and "answer" not in named:
        better, before = _reply(chosen, record[chosen])
        worse, _ = _reply(rejected, record[rejected])
        messages = messages or before
        if not messages or messages[-1]["role"] not in ("user", "tool"):
            problem = f"has {chosen} and {rejected} but no prompt that ends with the user's turn"
            raise DataError(f"{problem}; {_advice(record)}")
        return Conversation(messages, tools, chosen=better, rejected=worse)
    if not messages:
        raise DataError(f"has no known form; {_advice(record)}")
    answered, answer = messages[-1]["role"] == "assistant", named.get("answer")
    if not answered:
        answer = answer or next((name for name in ANSWERS if name in record and name != prompt), None)
    if answer is None:
        if len(messages) == 1 and not whole:
            raise DataError(f"has a prompt but no answer; {_advice(record)}")
        return Conversation(messages, tools)
    if answered:
        raise DataError(f"the conversation ends with the assistant's turn, and column `{answer}` is an answer too")
    if alpaca:
        return Conversation([*messages, _message({"role": "assistant", "content": record[answer]})], tools)
    return Conversation(messages, tools, answer=_at(f"column `{answer}`", _answer, record[answer]))


def _alpaca(record: dict) -> list[dict]:
    """https://github.com/tatsu-lab/stanford_alpaca; ``history`` as in LLaMA-Factory: pairs of texts."""
    history, context = record.get("history") or [], record.get("input")
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise DataError("column `history` must be a list of [instruction, output]")
    if context is not None and not isinstance(context, str):
        raise DataError("column `input` must be text")
    turns = zip(cycle(("user", "assistant")), chain.from_iterable(history), strict=False)
    content = "\n".join(filter(None, [_text("instruction", record["instruction"]), context]))
    return [*(_message({"role": role, "content": text}) for role, text in turns), *chat(content)]


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
    if isinstance(value, str):
        return _text(name, value), []
    turns = _at(f"column `{name}`", _turns, value if isinstance(value, list) else [value])
    if turns[-1]["role"] != "assistant" or not turns[-1]["content"] or turns[-1].get("tool_calls"):
        raise DataError(f"column `{name}` must be a text answer of the assistant")
    return turns[-1]["content"], turns[:-1]


def _turns(value) -> list[dict]:
    """OpenAI messages from OpenAI or ShareGPT ones, or from JSON text of them."""
    value = _parsed(value)
    if not isinstance(value, list) or not value:
        raise DataError(f"must be a non-empty list of messages, is {_shown(value)}")
    messages = [_at(f"message {index}", _message, turn) for index, turn in enumerate(value)]
    if any(message["role"] == "system" for message in messages[1:]):
        raise DataError("has a system message after the first")
    return messages


def _message(turn) -> dict:
    if not isinstance(turn, dict):
        raise DataError(f"must be an object with role and content, is {_shown(turn)}")
    role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
    if not isinstance(role, str) or role not in ROLE_OF:
        raise DataError(f"role must be one of {', '.join(ROLE_OF)}, is {_shown(role)}")
    if role in ("function_call", "tool_call"):
        return {"role": "assistant", "content": "", "tool_calls": _calls(content)}
    name, role = turn.get("name"), ROLE_OF[role]
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
    named = {"name": name} if role == "tool" and isinstance(name, str) and name else {}
    return {"role": role, "content": content} | ({"tool_calls": calls} if calls else {}) | named


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
    for function in (_function("tool call", call) for call in _listed(value)):
        given = function.get("arguments", function.get("parameters"))
        arguments = _parsed(given) if given not in (None, "") else {}
        if not isinstance(arguments, dict):
            raise DataError(f"arguments of the call of {function['name']} must be a JSON object, are {_shown(given)}")
        calls.append({"type": "function", "function": {"name": function["name"], "arguments": arguments}})
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
        "(--prompt-column, --answer-column, --messages-column, …)"
    )
