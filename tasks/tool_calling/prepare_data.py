"""Tool calls to make: each turn of the assistant in a conversation with calls is a problem, all before it its prompt.

From a file (FILE), the public set (SOURCE=hub), or made here (SOURCE=generate, dialogues.py).
"""

import random
from collections.abc import Iterator

from tasks.tool_calling.dialogues import dialogues
from verl_tasks import prepare, records, tool_calls

HUB_DATASET = "Bingguang/HardGen"
RESULT, RESULT_END = "<tool_response>", "</tool_response>"


def examples(record: dict, strict: bool) -> Iterator[prepare.Example | str]:
    """An example of each of the assistant's turns in a record with calls, or text that says why the turn, what follows
    it, or the whole record cannot be used. A turn in words expects no call. ``strict``: demonstrations think first;
    without reasoning in the data there is none."""
    try:
        found = records.conversation(_with_answers(record))
        messages, tools = _from_hermes(found.messages, found.tools or [])
    except prepare.DataError as error:
        yield str(error)
        return
    if not any(message.get("tool_calls") for message in messages):
        yield "no turn calls a tool"
        return
    shift = len(found.messages) - len(messages)  # Hermes' system message
    for index, message in enumerate(messages):
        if problem := _broken(messages, index):
            yield f"message {index}: {problem}; it and what follows are left out"
            return
        follows = messages[index + 1]["role"] if index + 1 < len(messages) else None
        # Words before a call of the same turn are no answer without a call.
        answers = message.get("tool_calls") or (message["role"] == "assistant" and follows != "assistant")
        if answers and index + shift not in found.context:
            yield _example(messages[: index + 1], tools, strict)


def _with_answers(record: dict) -> dict:
    """A record of xLAM's form, ``query`` and the calls that are its ``answers``, as messages."""
    if not isinstance(record.get("query"), str) or "answers" not in record:
        return record
    calls = {"role": "assistant", "content": "", "tool_calls": record["answers"]}
    return {"messages": [{"role": "user", "content": record["query"]}, calls], "tools": record.get("tools")}


def _from_hermes(messages: list[dict], tools: list[dict]) -> tuple[list[dict], list[dict]]:
    """``messages`` with the calls and results that Hermes writes as text in tags, and the tools of its system message,
    which is left out: the model's own template says how to call. Raises DataError for tools that are none.
    https://github.com/NousResearch/Hermes-Function-Calling"""
    first = messages[0]["content"] if messages[0]["role"] == "system" else ""
    if listed := first.rpartition("</tools>")[0].rpartition("<tools>")[2].strip():
        array = listed if listed.startswith("[") else f"[{','.join(filter(str.strip, listed.splitlines()))}]"
        messages, tools = messages[1:], tools or records.tool_schemas(array) or []
    return [_from_tags(message) for message in messages], tools


def _from_tags(message: dict) -> dict:
    if message["role"] == "tool":
        content = message["content"].strip()
        tagged = content.startswith(RESULT) and content.endswith(RESULT_END)
        return {**message, "content": content[len(RESULT) : -len(RESULT_END)].strip()} if tagged else message
    if message["role"] != "assistant" or tool_calls.OPEN not in message["content"] or message.get("tool_calls"):
        return message
    thought, text = _split_thinking(message["content"])
    try:
        calls, words = tool_calls.parse_calls(text)
    except tool_calls.Malformed:
        return message  # its turn is told to be no call, what follows to be broken
    content = f"<think>\n{thought}\n</think>\n\n{words}" if thought else words
    return {**message, "content": content, "tool_calls": [{"type": "function", "function": call} for call in calls]}


def _broken(messages: list[dict], index: int) -> str | None:
    """Why ``messages[index]`` cannot follow those before it: a call lacks its result, or a result its call."""
    before = next((i for i in range(index - 1, -1, -1) if messages[i]["role"] != "tool"), None)
    calls = messages[before].get("tool_calls") or [] if before is not None else []
    results = index - 1 - (-1 if before is None else before)
    if messages[index]["role"] == "tool":
        return None if results < len(calls) else "a result without a call"
    return "comes after a call without a result" if calls and not results else None


def _example(messages: list[dict], tools: list[dict], strict: bool) -> prepare.Example | str:
    *before, turn = messages
    calls = [call["function"] for call in turn.get("tool_calls") or []]
    if unknown := {call["name"] for call in calls} - tool_calls.functions(tools).keys():
        return f"calls {', '.join(sorted(unknown))[:200]}, which is not among its tools"
    if not before or before[-1]["role"] not in ("user", "tool"):
        return f"{'calls a tool' if calls else 'answers'} where it is not the assistant's turn"
    thought, text = _split_thinking(turn["content"])
    demonstration = tool_calls.render_calls(calls) if calls else text.strip()
    if not _reads_as(demonstration, calls, tools):
        return "has calls that are no strict JSON, too many or too long" if calls else "has words that read as a call"
    if strict:
        demonstration = f"<think>\n{thought}\n</think>\n\n{demonstration}"
        if not thought or not _reads_as(demonstration, calls, tools):
            demonstration = None
    # Earlier turns without thinking, as chat templates show them.
    prompt = [{**m, "content": _split_thinking(m["content"])[1]} if m["role"] == "assistant" else m for m in before]
    truth = {"calls": calls, "tools": tools}
    return prepare.Example(prompt, truth, demonstration, tools=tools, group=_beginning(prompt, tools))


def _split_thinking(content: str) -> tuple[str, str]:
    """The text of ``<think>…</think>`` at the start of an assistant's content, and the rest; ("", content) without."""
    head, closed, rest = content.partition("</think>")
    if not closed or not head.lstrip().startswith("<think>"):
        return "", content
    return head.lstrip().removeprefix("<think>").strip(), rest.lstrip("\n")


def _beginning(prompt: list[dict], tools: list[dict]) -> str:
    """The same text for all turns of a conversation, and for conversations that begin alike: on the other side of the
    split, the answer to a test prompt would stand in a training prompt."""
    first = next((index for index, message in enumerate(prompt) if message["role"] == "user"), 0)
    return prepare.posed(prompt[: first + 1], tools)


def _reads_as(response: str, calls: list[dict], tools: list[dict]) -> bool:
    """Whether the reward reads ``calls`` in ``response``; of no calls, also words."""
    try:
        read = tool_calls.parse_response(response, tools)
        return read.calls == calls and bool(read.text) != bool(calls)
    except (tool_calls.Malformed, RecursionError):
        return False


def from_file(settings) -> prepare.Examples:
    """A file, or a folder with train.* and test.* (FILE), of OpenAI ``messages`` or ShareGPT ``conversations``."""
    return _from(records.load(settings.FILE), settings)


def from_hub(settings) -> prepare.Examples:
    """The public set, or a local folder of a hub data set's form."""
    name = HUB_DATASET if settings.SOURCE in ("hub", "auto") else settings.SOURCE
    return _from([records.hub(name)], settings)


def _from(parts: list, settings) -> prepare.Examples:
    return prepare.Examples(parts, lambda record: examples(record, settings.REWARD == "strict"))


def generate(settings) -> Iterator[prepare.Example]:
    """Dialogues made here; only the last turn of each is an example, so that none is on both sides of the split."""
    strict = settings.REWARD == "strict"
    for made in dialogues(random.Random(settings.SEED), settings.DIFFICULTY):
        if strict and settings.DIFFICULTY == "easy" and len(made.calls) > 1:
            continue  # two calls after thinking do not fit into 64 tokens of SmolLM2
        truth = {"calls": made.calls, "tools": made.tools}
        yield prepare.Example(made.messages, truth, made.demonstration(strict), tools=made.tools)


if __name__ == "__main__":
    prepare.main({"generate": generate, "file": from_file, "hub": from_hub})
