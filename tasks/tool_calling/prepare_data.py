"""Tool calls to make: each turn of a conversation that calls tools is a problem, all before it is the prompt.

From a file (FILE), the public set (SOURCE=hub), or made here (SOURCE=generate, dialogues.py).
"""

import json
import random
from collections.abc import Iterator

from tasks.common.data import prepare, records
from tasks.common.data.formats import conversation, split_thinking
from tasks.common.data.rows import DataError
from tasks.common.rewards.tool_calls import Malformed, functions, parse_response, render_calls
from tasks.tool_calling.dialogues import dialogues

HUB_DATASET = "Bingguang/HardGen"


def examples(record: dict, strict: bool) -> Iterator[prepare.Example | str]:
    """An example of each of the record's turns that calls tools, or text that says why the turn, or the whole record,
    cannot be used. ``strict``: demonstrations think first; without reasoning in the data there is none."""
    try:
        found = conversation(record)
    except DataError as error:
        yield str(error)
        return
    turns = [index for index, message in enumerate(found.messages) if message.get("tool_calls")]
    if not turns:
        yield "no turn calls a tool"
    for index in turns:
        yield _example(found.messages[: index + 1], found.tools or [], strict)


def _example(messages: list[dict], tools: list[dict], strict: bool) -> prepare.Example | str:
    *before, turn = messages
    calls = [call["function"] for call in turn["tool_calls"]]
    if unknown := {call["name"] for call in calls} - functions(tools).keys():
        return f"calls {', '.join(sorted(unknown))}, which is not among its tools"
    if not before or before[-1]["role"] not in ("user", "tool"):
        return "calls a tool where it is not the assistant's turn"
    demonstration = render_calls(calls)
    if not _reads_as(demonstration, calls):
        return "has calls that are no strict JSON, too many or too long"
    if strict:
        thought, _ = split_thinking(turn["content"])
        demonstration = f"<think>\n{thought}\n</think>\n\n{demonstration}"
        if not thought or not _reads_as(demonstration, calls):
            demonstration = None
    prompt = [_without_thinking(message) for message in before]
    truth = {"calls": calls, "tools": tools}
    return prepare.Example(prompt, truth, demonstration, tools=tools, group=_beginning(prompt, tools))


def _beginning(prompt: list[dict], tools: list[dict]) -> str:
    """The same text for all turns of a conversation, and for conversations that begin alike: on the other side of the
    split, the answer to a test prompt would stand in a training prompt."""
    first = next((index for index, message in enumerate(prompt) if message["role"] == "user"), 0)
    return json.dumps([prompt[: first + 1], tools])


def _without_thinking(message: dict) -> dict:
    """As chat templates show earlier turns."""
    if message["role"] != "assistant":
        return message
    return {**message, "content": split_thinking(message["content"])[1]}


def _reads_as(response: str, calls: list[dict]) -> bool:
    try:
        return parse_response(response).calls == calls
    except (Malformed, RecursionError):
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
