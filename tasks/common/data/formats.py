"""Records of common data-set formats as OpenAI messages and tools.

Recognised: OpenAI ``messages`` (text or typed parts, tool calls), ShareGPT ``conversations``, Alpaca, prompt and answer
(text or messages), and prompt, chosen and rejected. A record that does not fit its form raises DataError.
"""

import json
import re
from dataclasses import dataclass

from verl_tasks.rows import DataError, chat, normalized, truth_problem
from verl_tasks.strict_json import decoded
from verl_tasks.text import one_line

WHOLE = ("messages", "conversations", "conversation")
PROMPTS = ("prompt", "question", "query", "problem", "instruction", "input")
CONTEXTS = ("input", "context", "passage")  # of a prompt, joined to it as Alpaca's input is
CHOICES = ("choices", "options")
MARKS = ("kto_tag", "label")  # true or false: unpaired preferences
SYSTEMS = ("system", "system_prompt")
ANSWERS = ("answer", "response", "completion", "output", "solution", "target", "ground_truth")
FIELDS = ("prompt", "answer", "system", "messages", "tools", "chosen", "rejected")  # whose column a caller may name
ROLE_OF = {name: "system" for name in ("system", "developer")}
ROLE_OF |= {name: "user" for name in ("user", "human")}
ROLE_OF |= {name: "tool" for name in ("tool", "observation", "function", "function_response", "tool_response")}
CALLING = ("function_call", "tool_call")
ROLE_OF |= {name: "assistant" for name in ("assistant", "gpt", "chatgpt", "bot", "model", *CALLING)}
REASONING = ("reasoning_content", "reasoning", "thinking")  # of a turn
WEIGHTS = ("weight", "loss", "train")  # of a turn: 0 or false where it is not to be learned
OF_TURNS = ("role", "from", "content", "value", "tool_calls", "function_call", *REASONING, *WEIGHTS)
# A chat in a cell, in JSON, or as Python prints it, which is refused.
_CELL = re.compile(r"""\s*\[?\s*\{(?=.*["'](?:role|from)["']\s*:)\s*["']\w+["']\s*:.*[]}]\s*""", re.DOTALL)
# From the type names of Python and BFCL to those of JSON Schema.
TYPES = {"dict": "object", "str": "string", "int": "integer", "float": "number", "double": "number", "bool": "boolean"}
TYPES |= {"list": "array", "tuple": "array", "set": "array", "nonetype": "null", "none": "null"}


@dataclass(frozen=True)
class Conversation:
    """One record. ``messages``: OpenAI messages, the whole conversation, or the prompt when there is an answer.

    ``content`` is text, "" beside tool calls; ``tool_calls[i]["function"]["arguments"]`` is an object. Reasoning comes
    before the content as ``<think>…</think>``. ``tools``: OpenAI tool schemas. ``answer``: text or any JSON value.
    ``chosen`` and ``rejected``: text. ``context``: indices of the assistant's messages that are not to be learned
    (``weight: 0``).
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
        return "dpo" if self.chosen is not None else "rl" if self.answer is not None else "sft"

    @property
    def answer_text(self) -> str:
        """The answer as text, another value as JSON: what a cell of CSV has for it. Raises DataError without one."""
        if self.answer is None:
            todo = "name its column, or convert the file first: `make json_to_parquet ARGS='--kind rl'`"
            raise DataError(f"has no answer of its own; {todo}")
        return self.answer if isinstance(self.answer, str) else json.dumps(self.answer, ensure_ascii=False)


def conversation(record: dict, columns: dict[str, str] | None = None) -> Conversation:
    """``record`` in the recognized form. ``columns`` names those of FIELDS that are called otherwise, and are in every
    record. Raises DataError; the caller (``Records.converted``) adds the row's place."""
    for column in (columns or {}).values():
        if column not in record:
            raise DataError(f"has no column `{column}`; it has {_names(record)}")
    try:
        return _conversation(record, columns or {})
    except RecursionError as error:
        raise DataError("is nested too deeply") from error


def _conversation(record: dict, named: dict[str, str]) -> Conversation:
    """``named``: the columns that the caller names, by FIELDS."""

    def has(name: str) -> bool:  # without reading it; Arrow gives a row null, CSV "", for a column of other rows
        value = dict.get(record, name)
        return bool(value.strip()) if isinstance(value, str) else value is not None

    def first(names: tuple[str, ...]) -> str | None:
        there = [name for name in names if name in record] or [None]
        found = next(filter(has, there), there[0])
        if found != there[0] and hasattr(record, "unread"):
            record.unread.add(f"{there[0]} where it is empty ({found} is read)")
        return found

    def read(name: str, convert):
        made = _at(f"column `{name}`", convert, value := record.get(name))
        if made and convert in (_turns, chat_in, _reply) and hasattr(record, "unread"):
            record.unread |= {f"{name}.{key}" for key in _unread(value)}
        return made

    tools_column, chosen, rejected = (named.get(name, name) for name in ("tools", "chosen", "rejected"))
    tools = read(tools_column, tool_schemas)
    # What the caller names for something else is no part of the prompt: it could be the answer.
    prompts, contexts = (tuple(name for name in of if name not in named.values()) for of in (PROMPTS, CONTEXTS))
    prompt, own_answer = named.get("prompt") or first(prompts), named.get("answer")
    pair = {chosen, rejected} <= record.keys() and not own_answer and (has(chosen) or has(rejected))
    whole, free = named.get("messages"), not named.keys() & {"messages", "prompt"}
    if free and not (pair and prompt and has(prompt)):
        whole = next(filter(has, WHOLE), None)
    marks = [name for name in MARKS if str(dict.get(record, name)).lower() in ("true", "false")]
    marks += ["label"] if has("label") and "completion" in record else []
    if marks and free and not own_answer:
        raise DataError(f"column `{marks[0]}` (unpaired preferences) is not understood; keep good answers without it")
    better, worse = (read(name, _reply) if pair else ("", []) for name in (chosen, rejected))
    if better[1] and worse[1] and better[1] != worse[1]:
        raise DataError(f"columns `{chosen}` and `{rejected}` answer different conversations")
    before, messages = better[1] or worse[1], []
    if whole and not (before and free):
        messages = read(whole, _turns)
    elif prompt and not whole and (chat_asked := read(prompt, chat_in)):
        messages = chat_asked
    elif prompt and not whole:
        others = [name for name in prompts if name not in (prompt, *CONTEXTS) and has(name)] if not before else []
        others = [name for name in others if dict.get(record, name) != record[prompt]] + [*filter(has, CHOICES)]
        if free and others:
            raise DataError(f"columns `{'`, `'.join([prompt, *others])}`: which is the prompt? {_advice(record)}")
        contexts = [name for name in contexts if name != prompt and has(name) and not before]
        history = read("history", _history) if free and record.get("history") else []
        messages = [*history, *chat("\n".join(read(name, _text) for name in (prompt, *contexts)))]
    if before:
        messages = _in_context(messages, before, prompt, chosen)
    system = named.get("system") or first(SYSTEMS)
    if messages and messages[0]["role"] != "system" and system and has(system):
        messages = [{"role": "system", "content": read(system, _text)}, *messages]
    if pair:
        if not messages or messages[-1]["role"] not in ("user", "tool"):
            raise DataError(f"has {chosen} and {rejected} but no prompt of the user at its end; {_advice(record)}")
        return _finished(messages, tools, chosen=better[0], rejected=worse[0])
    if not messages:
        raise DataError(f"has no known form; {_advice(record)}")
    answered = messages[-1]["role"] == "assistant"
    answer = own_answer or (None if answered else first(tuple(name for name in ANSWERS if name != prompt)))
    if answer and answered:
        raise DataError(f"the conversation ends with the assistant's turn, and column `{answer}` is an answer too")
    if not (answer or answered or whole):
        raise DataError(f"has a prompt but no answer; {_advice(record)}")
    alpaca = prompt == "instruction" and "output" in record and not (whole or named.keys() & {"prompt", "answer"})
    if answer and not (own_answer or alpaca) and has("ground_truth") and record[answer] != record["ground_truth"]:
        raise DataError(f"columns `{answer}`, `ground_truth`: which is the answer? {_advice(record)}")
    if answer and alpaca:
        messages = [*messages, {"role": "assistant", "content": read(answer, _text)}]
    elif answer and (chat_answer := read(answer, chat_in)):
        messages = [*messages, *chat_answer]
    elif answer:
        return _finished(messages, tools, answer=read(answer, _answer))
    return _finished(messages, tools)


def _finished(messages: list[dict], tools: list[dict] | None, **answers) -> Conversation:
    """Without what the messages held for us: weights, and null arguments that their function does not take."""
    context = frozenset(index for index, message in enumerate(messages) if message.pop("weight", 1) == 0)
    known = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools or []}
    for function in (call["function"] for message in messages for call in message.get("tool_calls", [])):
        schema, given = known.get(function["name"]), function["arguments"]
        if not schema:
            continue
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


def chat_in(value) -> list[dict] | None:
    """The OpenAI messages in ``value``, also as one message or as JSON text (a cell of CSV); None for anything else."""
    if isinstance(value, str) and _CELL.fullmatch(value):
        value = _parsed(value)
    turns = value if isinstance(value, list) else [value]
    whole = turns and all(isinstance(t, dict) and (t.keys() & {"content", "value", "tool_calls"}) for t in turns)
    return _turns(turns) if whole and all(str(t.get("role", t.get("from"))) in ROLE_OF for t in turns) else None


def _history(value) -> list[dict]:
    """Messages of LLaMA-Factory's ``history``, pairs of texts."""
    pairs = _parsed(value)
    if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise DataError("must be a list of [instruction, output]")
    roles = ("user", "assistant")
    return _turns([{"role": role, "content": text} for pair in pairs for role, text in zip(roles, pair, strict=True)])


def _in_context(prompt: list[dict], before: list[dict], column: str | None, chosen: str) -> list[dict]:
    """The messages that a pair answers: ``before`` its answers, which holds the ``prompt`` or goes on from it."""
    if before[0]["role"] not in ("assistant", "tool"):
        told = [normalized(message["content"]) for message in before]
        if any(m["role"] != "system" and normalized(m["content"]) not in told for m in prompt):
            raise DataError(f"column `{column}` is not in the messages of column `{chosen}`")
        prompt = [m for m in prompt[:1] if m["role"] == "system" != before[0]["role"]]
    return [*prompt, *before]


def _text(value) -> str:
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"must be text, is {_shown(value)}")
    return value


def _answer(value):
    """A ground truth: text, or a JSON value."""
    if value is None or isinstance(value, str):
        return _text(value)
    if problem := truth_problem(value):
        raise DataError(problem)
    return value


def _reply(value) -> tuple[str, list[dict]]:
    """Text of a chosen or rejected answer, and the messages before it if ``value`` has them."""
    turns = chat_in(value)
    if isinstance(value, str) and not turns:
        return _text(value), []
    *before, last = turns or _turns(_listed(value))
    if last["role"] != "assistant" or not last["content"] or last.get("tool_calls"):
        raise DataError("must be a text answer of the assistant")
    return last["content"], before


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
    places, turn, ids, names = [], 0, [], []
    for index, message in enumerate(messages):
        place = index - turn
        if message["role"] != "tool":
            calls = message.get("tool_calls", [])
            ids, names = [call.pop("id") for call in calls], [call["function"]["name"] for call in calls]
            turn, place = index, 0
        elif (given := message.pop("tool_call_id", None)) and len(ids) > 1 and all(ids):
            if given not in ids:
                raise DataError(f"message {index}: tool_call_id {_shown(given)} is of no call before it")
            place = 1 + ids.index(given)
        elif names.count(message.get("name")) == 1:
            place = 1 + names.index(message["name"])
        places.append((turn, place))
    return [messages[index] for index in sorted(range(len(messages)), key=places.__getitem__)]


def _message(turn) -> dict:
    if not isinstance(turn, dict):
        raise DataError(f"must be an object with role and content, is {_shown(turn)}")
    named, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
    if not isinstance(named, str) or named not in ROLE_OF:
        raise DataError(f"role must be one of {', '.join(ROLE_OF)}, is {_shown(named)}")
    role, keys = ROLE_OF[named], ("tool_calls", "function_call")  # the second is OpenAI's older form
    calls = [call for key in keys if turn.get(key) for call in _calls(turn[key])]
    if named in CALLING:
        calls, content = _calls(content), ""
    thinking = [text for key in REASONING if isinstance(text := turn.get(key), str) and text]
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
        raise DataError(f"only the assistant reasons and calls tools, not {named}")
    if role in ("user", "assistant") and not content.strip() and not calls:
        raise DataError(f"the {role} says nothing")
    if thinking:
        content = "\n\n".join(filter(None, [f"<think>\n{''.join(thinking).strip()}\n</think>", content]))
    message = {"role": role, "content": content} | ({"tool_calls": calls} if calls else {})
    if role == "assistant" and 0 in [turn[key] for key in WEIGHTS if key in turn]:
        message["weight"] = 0
    own = {key: turn.get(key) for key in ("name", "tool_call_id")} if role == "tool" else {}
    return message | {key: value for key, value in own.items() if isinstance(value, str) and value}


def _unread(turns) -> set[str]:
    """Keys of ``turns``, as ``chat_in`` takes them, that hold something and that ``_message`` does not read."""
    turns = _parsed(turns) if isinstance(turns, str) and _CELL.fullmatch(turns) else turns
    turns = [turn for turn in (turns if isinstance(turns, list) else [turns]) if isinstance(turn, dict)]
    found: set[str] = set()
    for turn in turns:
        of_tool = ROLE_OF.get(str(turn.get("role", turn.get("from")))) == "tool"
        known = {*OF_TURNS, *(("id", "name", "tool_call_id") if of_tool else ())}
        found |= {key for key, value in turn.items() if key not in known and value not in (None, "", [], {})}
    return found


def _parts(parts: list, thinking: list[str], calls: list[dict]) -> str:
    """Text of typed content parts. Reasoning is appended to ``thinking``, tool calls to ``calls``."""
    texts: list[str] = []
    for part in parts:
        kind = str(part.get("type")) if isinstance(part, dict) else ""
        value = part.get("value", part.get(kind, part.get("text"))) if kind else None
        if kind in CALLING:
            calls += _calls(value)
        elif kind not in ("text", "reasoning", "thinking") or not isinstance(value, str):
            raise DataError(f"a content part must be a text, reasoning or tool_call, is {_shown(part)}")
        else:
            (texts if kind == "text" else thinking).append(value)
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
        function = {"name": function["name"], "arguments": arguments}
        calls.append({"type": "function", "function": function, "id": call.get("id")})
    if not calls:
        raise DataError("a tool call is empty")
    return calls


def tool_schemas(value) -> list[dict] | None:
    """OpenAI tool schemas from one tool or a list, or JSON text of it, with or without ``function`` around; None for
    none. Types get their JSON Schema names, ``parameters`` becomes an object with ``properties``."""
    return [_tool(tool) for tool in _listed(value)] or None if value not in (None, "") else None


def _tool(tool) -> dict:
    function = _function("tool", tool)
    name, description = function["name"], function.get("description")
    parameters = _parsed(function.get("parameters", function.get("input_schema"))) or {}
    if not isinstance(parameters, dict):
        raise DataError(f"parameters of {name} must be an object, are {_shown(parameters)}")
    if not isinstance(parameters.get("properties"), dict):
        # Nothing, or the properties alone: {"city": {"type": "str", "description": "…"}}
        parameters = {"properties": {key: value for key, value in parameters.items() if isinstance(value, dict)}}
    if isinstance(function.get("required"), list):
        parameters = {"required": function["required"], **parameters}
    schema = {"type": "object", **_schema(parameters)}
    described = {"name": name, "description": description if isinstance(description, str) else ""}
    return {"type": "function", "function": described | {"parameters": schema}}


def _schema(schema):
    """``schema`` with JSON Schema's names of types, at every level, and without the nulls that Arrow fills in."""
    if isinstance(schema, list):
        return [_schema(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    data = ("default", "const", "enum", "examples")
    made = {k: v if k in data else _schema(v) for k, v in schema.items() if v is not None or k in data[:2]}
    if isinstance(properties := schema.get("properties"), dict):  # whose names may be those of data, or `type`
        made["properties"] = {name: _schema(own) for name, own in properties.items() if own is not None}
    if not isinstance(named := made.get("type"), dict | None):
        types = [known for each in (named if isinstance(named, list) else [named]) if (known := _type(each))]
        del made["type"]
        made |= {"type": types if isinstance(named, list) else types[0]} if types else {}
    return made


def _type(named) -> str | None:
    """JSON Schema's name of a type; None (any type) for an unknown name, such as "any"."""
    name = named.split(",")[0].split("[")[0].strip() if isinstance(named, str) else ""  # "str, optional", "List[int]"
    name = TYPES.get(name, TYPES.get(name.lower(), name.lower()))
    return name if name in TYPES.values() else None


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
        return decoded(value)
    except ValueError as error:
        raise DataError(f"is not JSON ({error}): {_shown(value)}") from error


def _shown(value) -> str:
    """``value`` for a message: short, on one line."""
    return "null" if value is None else one_line(repr(value[:80] if isinstance(value, str | list) else value)[:200], 80)


def _names(record: dict) -> str:
    return f"columns {', '.join(map(str, record))}"[:300] if record else "no columns"


def _advice(record: dict) -> str:
    known = "messages; conversations; instruction and output; prompt and answer; prompt, chosen and rejected"
    others = "`make json_to_parquet` takes others (--prompt-column, --answer-column, …), `make dpo` with PAIRS_COLUMNS"
    return f"it has {_names(record)}. Known: {known}. {others}"
