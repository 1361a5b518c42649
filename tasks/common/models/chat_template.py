"""From a chat and its tools to the tokens of a prompt: the same for data, training and evaluation.

The model's chat template renders both. If it does not support tools, they are written out in the format of Hermes and
Qwen models (https://github.com/NousResearch/Hermes-Function-Calling).
"""

import functools
import json
from itertools import takewhile

from jinja2 import TemplateError

TOOLS_IN_WORDS = """You may call functions to answer. Their signatures are in <tools></tools>:
<tools>
{tools}
</tools>
For each call, write a JSON object in <tool_call></tool_call>:
<tool_call>
{{"name": <function name>, "arguments": <object of arguments>}}
</tool_call>"""
PROBE = "probe_7f3a"  # a text that stands in no template
LONGEST_TOKEN = 512  # characters; no text of more than this for each free token is tokenized


def prompt_ids(tokenizer, messages: list[dict], tools: list[dict] | None = None, chat_template=None) -> list[int]:
    """Token ids of the chat with the generation prompt.

    ``messages``: OpenAI messages, the arguments of tool calls as objects; ``tools``: OpenAI tool schemas;
    ``chat_template``: Jinja that replaces the model's. Raises ValueError without a chat template, or when it refuses
    the chat.
    """
    if not chat_template and not tokenizer.chat_template:
        raise ValueError("the model has no chat template: it is no instruct model (`make batch` can take TEMPLATE=)")
    if tools and not knows_tools(tokenizer, chat_template):
        messages, tools = in_words(messages, tools), None
    try:
        encoded = tokenizer.apply_chat_template(
            messages, tools=tools or None, add_generation_prompt=True, return_dict=True, chat_template=chat_template
        )
    except TemplateError as error:  # some refuse a system message, or two turns of one side
        raise ValueError(f"the model's chat template refuses this conversation: {error}") from error
    return list(encoded["input_ids"])


def next_turn_ids(tokenizer, sampled: list[int], messages: list[dict], tools: list[dict] | None = None) -> list[int]:
    """Token ids that the template puts between a ``sampled`` answer and the model's next turn: the end of the turn,
    where ``sampled`` lacks it, then ``messages`` (of tools or the user) and the generation prompt.

    ``tools``: those of the prompt, which decide how it was rendered. Only ``messages`` are rendered, after a fixed
    chat: earlier turns stay as they were sampled. Raises ValueError when the template refuses or drops the fixed chat.
    """
    if tools and not knows_tools(tokenizer, None):
        messages = _in_words(messages)
    fixed = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": PROBE}]
    try:
        text = tokenizer.apply_chat_template([*fixed, *messages], add_generation_prompt=True, tokenize=False)
    except TemplateError as error:
        raise ValueError(f"the model's chat template refuses this turn: {error}") from error
    _, found, text = text.partition(PROBE)
    if not found:
        raise ValueError("the model's chat template leaves out earlier answers; no episode can be rendered")
    end_ids = end_of_turn_ids(tokenizer)
    if list(sampled[-len(end_ids) :]) == end_ids:
        text = text.removeprefix(end_of_turn(tokenizer))
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def opens_thinking(tokenizer, ids: list[int]) -> bool:
    """Whether the prompt ``ids`` ends in ``<think>``, so that the response starts inside the block."""
    return tokenizer.decode(ids[-8:]).rstrip().endswith("<think>")


def answer_ids(tokenizer, response: str, think_opened: bool = False, ended: bool = True) -> list[int]:
    """Token ids of ``response`` as the answer to a rendered prompt, with the end of turn of the model's template.

    ``think_opened``: the prompt ended in ``<think>``, which is not repeated; a response without thinking closes it.
    ``ended``: False for a response that was cut at the length limit and so has no end of turn.
    """
    if think_opened:
        thinks = response.lstrip().startswith("<think>")
        response = response.lstrip().removeprefix("<think>").lstrip() if thinks else f"\n</think>\n\n{response}"
    end = end_of_turn(tokenizer) if ended else ""
    return tokenizer(response + end, add_special_tokens=False)["input_ids"]


def demonstration_ids(
    tokenizer, messages: list[dict], first: int, tools: list[dict] | None = None
) -> tuple[list[int], list[int]]:
    """Token ids of a chat whose turns of the model from ``messages[first]`` on are put together turn by turn, as an
    episode's are, and the mask: 1 on these turns, each with its end."""
    ids, turns = prompt_ids(tokenizer, messages[:first], tools), messages[first:]
    mask = [0] * len(ids)
    while turns:
        answer, *turns = turns
        sampled = answer_ids(tokenizer, answer["content"], opens_thinking(tokenizer, ids))
        between = list(takewhile(lambda message: message["role"] != "assistant", turns))
        turns = turns[len(between) :]
        follows = next_turn_ids(tokenizer, sampled, between, tools) if between else []
        ids += sampled + follows
        mask += [1] * len(sampled) + [0] * len(follows)
    return ids, mask


def end_of_turn_ids(tokenizer) -> list[int]:
    """Token ids that the template puts after an answer; one for an instruct model."""
    return tokenizer(end_of_turn(tokenizer), add_special_tokens=False)["input_ids"]


def ends_turn(tokenizer, ids: list[int]) -> bool:
    """Whether the answer ``ids`` has its end, which some tokenizers (SmolLM2's GGUF) do not have as end of sequence."""
    return bool(ids) and ids[-1] in (tokenizer.eos_token_id, *end_of_turn_ids(tokenizer)[-1:])


@functools.lru_cache(maxsize=8)
def end_of_turn(tokenizer) -> str:
    """The text that the template puts after an answer, e.g. <|im_end|>; if none, the end-of-sequence token."""
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": PROBE}]
    text = tokenizer.apply_chat_template(chat, tokenize=False)
    return text.rpartition(PROBE)[2].strip() or tokenizer.eos_token or ""


@functools.lru_cache(maxsize=8)
def knows_tools(tokenizer, chat_template: str | None) -> bool:
    """Whether the template renders tools."""
    tool = {"type": "function", "function": {"name": PROBE, "description": "", "parameters": {}}}
    chat = [{"role": "user", "content": "hi"}]
    try:
        text = tokenizer.apply_chat_template(chat, tools=[tool], tokenize=False, chat_template=chat_template)
    except (TemplateError, TypeError, ValueError):
        return False
    return PROBE in text


def in_words(messages: list[dict], tools: list[dict]) -> list[dict]:
    """The same chat with ``tools``, ``tool_calls`` and the role ``tool`` written out as text."""
    words = TOOLS_IN_WORDS.format(tools="\n".join(json.dumps(tool) for tool in tools))
    system = [m["content"] for m in messages[:1] if m["role"] == "system"]
    chat = [{"role": "system", "content": "\n\n".join([*filter(None, system), words])}]
    return [*chat, *_in_words(messages[len(system) :])]


def _in_words(messages: list[dict]) -> list[dict]:
    """``messages`` with ``tool_calls`` and the role ``tool`` written out as text."""
    chat = []
    for message in messages:
        if message["role"] == "tool":
            result = f"<tool_response>\n{message['content']}\n</tool_response>"
            if chat and chat[-1].get("results"):  # results of parallel calls are one turn
                chat[-1]["content"] += "\n" + result
            else:
                chat.append({"role": "user", "content": result, "results": True})
        else:
            functions = [call["function"] for call in message.get("tool_calls") or []]
            calls = [call_text({"name": f["name"], "arguments": f["arguments"]}) for f in functions]
            text = "\n".join(filter(None, [message.get("content"), *calls]))
            chat.append({"role": message["role"], "content": text})
    return [{"role": message["role"], "content": message["content"]} for message in chat]


def call_text(call: dict) -> str:
    """A call ``{"name", "arguments"}`` as Hermes and Qwen models write it."""
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"
