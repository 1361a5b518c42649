"""Records of common data-set formats as OpenAI messages and tools.

Recognised: OpenAI ``messages`` (text or typed parts, tool calls), ShareGPT ``conversations``, Alpaca, plain prompt and
answer, and prompt, chosen and rejected. Nothing is guessed within a form: what does not fit it is a DataError.
"""

import json
import math
from dataclasses import dataclass, fields

from tasks.common.data.rows import DataError
from tasks.common.strict_json import no_constant

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
# Names of types in Python and in BFCL, and what JSON Schema calls them.
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
    """One record. ``messages`` are OpenAI messages: the whole conversation, or the prompt when there is an answer.

    ``content`` is text, "" beside tool calls; ``tool_calls[i]["function"]["arguments"]`` is an object. Reasoning stands
    as ``<think>…</think>`` before the content (``split_thinking`` takes it off). ``tools`` are OpenAI tool schemas.
    ``answer`` is text or any JSON value, ``chosen`` and ``rejected`` are text.
    """

    messages: list[dict]
    tools: list[dict] | None = None
    answer: object = None
    chosen: str | None = None
    rejected: str | None = None

    @property
    def kind(self) -> str:
        """What the record is made for: "dpo", "rl" (a prompt and its answer) or "sft" (a conversation)."""
        if self.chosen is not None:
            return "dpo"
        return "rl" if self.answer is not None else "sft"


def conversation(record: dict, columns: Columns | None = None) -> Conversation:
    """``record`` in the form that is recognized, or that ``columns`` names. Raises DataError with the mismatch;
    the reader of the file knows the row (``prepare.Examples`` puts it before)."""
    columns = columns or Columns()
    for name in (getattr(columns, field.name) for field in fields(Columns)):
        if name is not None and name not in record:
            raise DataError(f"has no column `{name}`; it has {_names(record)}")
    try:
        return _conversation(record, columns)
    except RecursionError as error:
        raise DataError("is nested too deeply") from error


def _conversation(record: dict, columns: Columns) -> Conversation:
    tools_column = columns.tools or "tools"
    tools = _at(tools_column, tool_schemas, record.get(tools_column))
    chosen_column, rejected_column = columns.chosen or "chosen", columns.rejected or "rejected"
    messages = _messages(record, columns)
    if chosen_column in record and rejected_column in record and not columns.answer:
        chosen, before = _reply(chosen_column, record[chosen_column])
        rejected, _ = _reply(rejected_column, record[rejected_column])
        messages = messages or before
        if not messages:
            raise DataError(f"has {chosen_column} and {rejected_column} but no prompt; {_advice(record)}")
        if messages[-1]["role"] not in ("user", "tool"):
            raise DataError("the prompt of chosen and rejected must end with the user's turn")
        return Conversation(messages, tools, chosen=chosen, rejected=rejected)
    if not messages:
        raise DataError(f"is of no known form; {_advice(record)}")
    answer = columns.answer
    if answer is None and messages[-1]["role"] != "assistant":
        used = columns.prompt or _prompt_column(record)
        answer = next((name for name in ANSWERS if name in record and name != used), None)
    if answer is None:
        if len(messages) == 1 and not _whole_column(record, columns):
            raise DataError(f"has a prompt but no answer; {_advice(record)}")
        return Conversation(messages, tools)
    if messages[-1]["role"] == "assistant":
        raise DataError(f"the conversation ends with the assistant's turn, and column `{answer}` is an answer too")
    if _is_alpaca(record, columns):
        return Conversation([*messages, _message({"role": "assistant", "content": record[answer]})], tools)
    return Conversation(messages, tools, answer=_at(answer, _answer, record[answer]))


def _messages(record: dict, columns: Columns) -> list[dict]:
    """The messages in any form, the system message first; [] if there are none."""
    system_column = columns.system or "system"
    system = record.get(system_column)
    if system is not None and not isinstance(system, str):
        raise DataError(f"column `{system_column}` must be text")
    whole = _whole_column(record, columns)
    prompt = columns.prompt or _prompt_column(record)
    if whole:
        messages = _at(whole, _turns, record[whole])
    elif _is_alpaca(record, columns):
        messages = _alpaca(record)
    elif prompt:
        value = record[prompt]
        listed = isinstance(value, list)
        messages = _at(prompt, _turns, value) if listed else [{"role": "user", "content": _text(prompt, value)}]
    else:
        return []
    if system and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    return messages


def _whole_column(record: dict, columns: Columns) -> str | None:
    """The column that has messages, if one has."""
    if columns.messages or columns.prompt:
        return columns.messages
    return next((name for name in ("messages", "conversations", "conversation") if record.get(name) is not None), None)


def _prompt_column(record: dict) -> str | None:
    """The column that is the prompt, if one is."""
    return next((name for name in PROMPTS if name in record), None)


def _is_alpaca(record: dict, columns: Columns) -> bool:
    own = columns.prompt or columns.answer or columns.messages
    return not own and "instruction" in record and "output" in record and "messages" not in record


def _alpaca(record: dict) -> list[dict]:
    """https://github.com/tatsu-lab/stanford_alpaca; ``history`` as LLaMA-Factory has it: pairs of texts."""
    messages = []
    history = record.get("history") or []
    for pair in history if isinstance(history, list) else [None]:
        if not isinstance(pair, list) or len(pair) != 2:
            raise DataError("column `history` must be a list of [instruction, output]")
        turns = [{"role": role, "content": text} for role, text in zip(("user", "assistant"), pair, strict=True)]
        messages += map(_message, turns)
    context = record.get("input")
    if context is not None and not isinstance(context, str):
        raise DataError("column `input` must be text")
    content = "\n".join(filter(None, [_text("instruction", record["instruction"]), context]))
    return [*messages, {"role": "user", "content": content}]


def _text(name: str, value) -> str:
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"column `{name}` must be text, is {_shown(value)}")
    return value


def _answer(value):
    """A ground truth: text, or a JSON value."""
    if value is None or (isinstance(value, str) and not value.strip()):
        raise DataError(f"must be an answer, is {_shown(value)}")
    if isinstance(value, float) and not math.isfinite(value):
        raise DataError(f"must be an answer, is {value}")
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise DataError(f"must be text or a JSON value ({error})") from error
    return value


def _reply(name: str, value) -> tuple[str, list[dict]]:
    """Text of a chosen or rejected answer, and the messages before it if ``value`` has them."""
    if isinstance(value, str):
        return _text(name, value), []
    turns = _at(name, _turns, value if isinstance(value, list) else [value])
    if turns[-1]["role"] != "assistant" or not turns[-1]["content"] or turns[-1].get("tool_calls"):
        raise DataError(f"column `{name}` must be an answer in text of the assistant")
    return turns[-1]["content"], turns[:-1]


# ---- messages


def _turns(value) -> list[dict]:
    """OpenAI messages from OpenAI or ShareGPT ones, or from JSON text of them."""
    value = _parsed(value)
    if not isinstance(value, list) or not value:
        raise DataError(f"must be a non-empty list of messages, is {_shown(value)}")
    messages = []
    for index, turn in enumerate(value):
        try:
            messages.append(_message(turn))
        except DataError as error:
            raise DataError(f"message {index}: {error}") from error
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
    calls = turn.get("tool_calls")
    calls = _calls(calls) if calls else []
    if turn.get("function_call"):  # OpenAI's form before tool_calls
        calls += _calls(turn["function_call"])
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
    if role == "user" and not content.strip():
        raise DataError("the user says nothing")
    if role == "assistant" and not content.strip() and not calls:
        raise DataError("the assistant says nothing and calls nothing")
    if thinking:
        content = "\n\n".join(filter(None, [f"<think>\n{''.join(thinking).strip()}\n</think>", content]))
    message = {"role": role, "content": content}
    if calls:
        message["tool_calls"] = calls
    if role == "tool" and isinstance(name, str) and name:
        message["name"] = name
    return message


def _parts(parts: list, thinking: list[str], calls: list[dict]) -> str:
    """Text of typed content parts; what they reason and call goes to ``thinking`` and ``calls``."""
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
    value = _parsed(value)
    calls = []
    for call in value if isinstance(value, list) else [value]:
        call = _parsed(call)
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise DataError(f"a tool call must be an object with name and arguments, is {_shown(call)}")
        given = function.get("arguments", function.get("parameters"))
        arguments = _parsed(given) if given not in (None, "") else {}
        if not isinstance(arguments, dict):
            raise DataError(f"arguments of the call of {function['name']} must be a JSON object, are {_shown(given)}")
        calls.append({"type": "function", "function": {"name": function["name"], "arguments": arguments}})
    if not calls:
        raise DataError("a tool call is empty")
    return calls


def split_thinking(content: str) -> tuple[str, str]:
    """``<think>…</think>`` at the start of an assistant's content, without the tags, and the rest; ("", content) if it
    has none."""
    head, closed, rest = content.partition("</think>")
    if not closed or not head.lstrip().startswith("<think>"):
        return "", content
    return head.lstrip().removeprefix("<think>").strip(), rest.lstrip("\n")


# ---- tools


def tool_schemas(value) -> list[dict] | None:
    """OpenAI tool schemas from a list of tools or JSON text of one, with or without ``function`` around; None for none.

    Types get their JSON Schema names, ``parameters`` becomes an object with ``properties``.
    """
    value = _parsed(value) if value not in (None, "") else []
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list):
        raise DataError(f"must be a list of tools, is {_shown(value)}")
    return [_tool(_parsed(tool)) for tool in value] or None


def _tool(tool) -> dict:
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise DataError(f"a tool must be an object with a name, is {_shown(tool)}")
    parameters = _parsed(function.get("parameters", function.get("input_schema"))) or {}
    if not isinstance(parameters, dict):
        raise DataError(f"parameters of {function['name']} must be an object, are {_shown(parameters)}")
    if not isinstance(parameters.get("properties"), dict):
        # Nothing, or the properties alone: {"city": {"type": "str", "description": "…"}}
        properties = {key: value for key, value in parameters.items() if isinstance(value, dict)}
        parameters = {"type": "object", "properties": properties}
    if "required" not in parameters and isinstance(function.get("required"), list):
        parameters = {**parameters, "required": function["required"]}
    parameters = {"type": "object", **_schema(parameters)}
    description = function.get("description")
    described = {"name": function["name"], "description": description if isinstance(description, str) else ""}
    return {"type": "function", "function": {**described, "parameters": parameters}}


def _schema(schema):
    """``schema`` with JSON Schema's names of types, all the way down."""
    if not isinstance(schema, dict):
        return schema
    # A parquet file fills the keys that some other row has with null.
    schema = {key: value for key, value in schema.items() if value is not None or key in ("default", "const")}
    if "type" in schema:
        schema |= _types(schema.pop("type"))
    if isinstance(schema.get("properties"), dict):
        properties = schema["properties"].items()
        schema["properties"] = {name: _schema(value) for name, value in properties if value is not None}
    for key in {"items", "additionalProperties", "anyOf", "oneOf", "allOf"} & schema.keys():
        value = schema[key]
        schema[key] = [_schema(part) for part in value] if isinstance(value, list) else _schema(value)
    return schema


def _types(named) -> dict:
    """``{"type": …}`` of a type's name or names; {} (all types) for a name that JSON Schema lacks ("any")."""
    if isinstance(named, list):
        known = [types["type"] for name in named if (types := _types(name))]
        return {"type": known} if known else {}
    if not isinstance(named, str):
        return {}
    name = named.split(",")[0].split("[")[0].strip()  # "str, optional", "List[int]"
    name = TYPES.get(name, TYPES.get(name.lower(), name.lower()))
    return {"type": name} if name in JSON_TYPES else {}


# ---- parts


def _at(column: str, convert, value):
    try:
        return convert(value)
    except DataError as error:
        raise DataError(f"column `{column}`: {error}") from error


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
    shown = repr(value[:80] if isinstance(value, str | list) else value)[:80]
    return "null" if value is None else " ".join(shown.split())


def _names(record: dict) -> str:
    return f"columns {', '.join(map(str, record))}"[:300] if record else "no columns"


def _advice(record: dict) -> str:
    return (
        f"it has {_names(record)}. Known: messages; conversations; instruction and output; prompt and answer; prompt, "
        "chosen and rejected. Name the columns (--prompt-column, --answer-column, --messages-column, …)"
    )
