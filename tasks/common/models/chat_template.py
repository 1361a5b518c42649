"""From a chat and its tools to the tokens of a prompt: the same for data, training and evaluation.

The model's chat template renders both. If it does not support tools, or no result of a call that stands as text, they
are written out in the format of Hermes and Qwen models (https://github.com/NousResearch/Hermes-Function-Calling). If it
has no system message, as Gemma 2's and Mixtral's, the user's first message begins with it, as Gemma 3's template does.
What a message says never becomes a control token (control_tokens.py).
"""

import functools
import json

from jinja2 import TemplateError

from verl_tasks.models.control_tokens import ids_of, is_control, marked

TOOLS_IN_WORDS = """You may call functions to answer. Their signatures are in <tools></tools>:
<tools>
{tools}
</tools>
For each call, write a JSON object in <tool_call></tool_call>:
<tool_call>
{{"name": <function name>, "arguments": <object of arguments>}}
</tool_call>"""
PROBE = "probe_7f3a"  # a text that stands in no template
ASKED = {"role": "user", "content": "hi"}
ANSWERED = [ASKED, {"role": "assistant", "content": PROBE}]
# What a template raises: of Jinja, and of Python where it takes for granted what is not there.
REFUSALS = (TemplateError, TypeError, ValueError)
LONGEST_TOKEN = 512  # characters; no text of more than this for each free token is tokenized


def prompt_ids(tokenizer, messages: list[dict], tools: list[dict] | None = None) -> list[int]:
    """Token ids of the chat with the generation prompt.

    ``messages``: OpenAI messages, the arguments of tool calls as objects; ``tools``: OpenAI tool schemas. Raises
    ValueError without a chat template, or when it refuses the chat or leaves out the user's messages.
    """
    if not tokenizer.chat_template:
        raise ValueError("the model has no chat template: it is no instruct model")
    mark, (messages, tools) = marked(tokenizer, messages, tools)
    if tools and not knows_tools(tokenizer):
        messages, tools = in_words(messages, tools), None
    if messages[0]["role"] == "system" and not _shows(tokenizer, "system"):
        messages = _told_by_user(messages)
    try:
        text = _rendered(tokenizer, messages, tools=tools or None)
    except REFUSALS as error:  # some refuse two turns of one side
        raise ValueError(f"the model's chat template refuses this conversation: {error}") from error
    if messages[0]["role"] == "user" and not _shows(tokenizer, "user"):
        raise ValueError("the model's chat template leaves out messages of the role user")
    return ids_of(tokenizer, text, mark)


def next_turn_ids(tokenizer, sampled: list[int], messages: list[dict], tools: list[dict] | None = None) -> list[int]:
    """Token ids that the template puts between a ``sampled`` answer and the model's next turn: the end of the turn,
    where ``sampled`` lacks it, then ``messages`` (of tools or the user) and the generation prompt.

    ``tools``: those of the prompt, which decide how it was rendered. Only ``messages`` are rendered, after a fixed
    chat: earlier turns stay as they were sampled. Raises ValueError when the template refuses or drops the fixed chat.
    """
    mark, (messages, tools) = marked(tokenizer, messages, tools)
    if tools and not knows_tools(tokenizer):
        messages, tools = _in_words(messages), None
    text, end = _after_answer(tokenizer, messages, tools), end_of_turn(tokenizer)
    end_ids = end_of_turn_ids(tokenizer)
    if list(sampled[-len(end_ids) :]) == end_ids and text.lstrip().startswith(end):
        text = text.lstrip().removeprefix(end)
    ids = ids_of(tokenizer, text, mark)
    # The model may stop at the token that opens what follows, as GLM's do: <|user|> or <|observation|>.
    return ids[1:] if ids and list(sampled[-1:]) == ids[:1] else ids


def _after_answer(tokenizer, messages: list[dict], tools: list[dict] | None = None) -> str:
    """The text from the end of an answer to the model's next turn. Raises ValueError as ``next_turn_ids``."""
    named = isinstance(tokenizer.chat_template, dict)  # one for chats with tools, one for others, as Hermes has them
    try:
        text = _rendered(tokenizer, [*ANSWERED, *messages], tools=tools if named else None)
    except REFUSALS as error:
        raise ValueError(f"the model's chat template refuses this turn: {error}") from error
    _, found, text = text.partition(PROBE)
    if not found:
        raise ValueError("the model's chat template leaves out earlier answers; no episode can be rendered")
    return text


def opens_thinking(tokenizer, ids: list[int]) -> bool:
    """Whether the prompt ``ids`` ends in ``<think>``, so that the response starts inside the block."""
    # Without the argument transformers tells users of spaces that a BPE tokenizer does not clean up.
    return tokenizer.decode(ids[-8:], clean_up_tokenization_spaces=False).rstrip().endswith("<think>")


def answer_ids(tokenizer, response: str, think_opened: bool = False, ended: bool = True) -> list[int]:
    """Token ids of ``response`` as the answer to a rendered prompt, with its start and end by the model's template.

    ``think_opened``: the prompt ended in ``<think>``, which is not repeated; a response without thinking closes it.
    ``ended``: False for a response that was cut at the length limit and so has no end of turn.
    """
    if think_opened:
        thinks = response.lstrip().startswith("<think>")
        response = response.lstrip().removeprefix("<think>").lstrip() if thinks else f"\n</think>\n\n{response}"
    mark, (response,) = marked(tokenizer, response)
    start = "" if think_opened else own_start(tokenizer)
    return ids_of(tokenizer, start + response + (end_of_turn(tokenizer) if ended else ""), mark)


def demonstration_ids(
    tokenizer, messages: list[dict], first: int, tools: list[dict] | None = None
) -> tuple[list[int], list[int]]:
    """Token ids of a chat whose turns of the model from ``messages[first]`` on are put together turn by turn, as an
    episode's are, and the mask: 1 on these turns, each with its end."""
    ids = prompt_ids(tokenizer, messages[:first], tools)
    mask = [0] * len(ids)
    for answer, between in exchanges(messages[first:]):
        sampled = shown_ids(tokenizer, answer, between, opens_thinking(tokenizer, ids), tools)
        follows = next_turn_ids(tokenizer, sampled, between, tools) if between else []
        ids += sampled + follows
        mask += [1] * len(sampled) + [0] * len(follows)
    return ids, mask


def exchanges(turns: list[dict]) -> list[tuple[str, list[dict]]]:
    """Each answer in ``turns``, which begin with one, and the messages up to the next."""
    found: list[tuple[str, list[dict]]] = []
    for message in turns:
        if message["role"] == "assistant":
            found.append((message["content"], []))
        else:
            found[-1][1].append(message)
    return found


def shown_ids(tokenizer, answer: str, between: list[dict], think_opened: bool, tools: list[dict] | None) -> list[int]:
    """Token ids of a demonstrated ``answer``; without an end of turn it ends with the token that opens ``between``."""
    ids = answer_ids(tokenizer, answer, think_opened)
    if between and not own_end(tokenizer):
        follows = next_turn_ids(tokenizer, [], between, tools)
        ids = answer_ids(tokenizer, answer, think_opened, False) + follows[:1]
    return ids


def end_of_turn_ids(tokenizer) -> list[int]:
    """Token ids that the template puts after an answer, mostly one."""
    return tokenizer(end_of_turn(tokenizer), add_special_tokens=False)["input_ids"]


def ends_turn(tokenizer, ids: list[int]) -> bool:
    """Whether the answer ``ids`` has its end, which some tokenizers (SmolLM2's GGUF) do not have as end of sequence."""
    return bool(ids) and ids[-1] in (tokenizer.eos_token_id, *end_of_turn_ids(tokenizer)[-1:])


@functools.lru_cache(maxsize=8)
def end_of_turn(tokenizer) -> str:
    """The text that the template puts after an answer, e.g. <|im_end|>. If there is none, the special token that opens
    the user's next turn (GLM's <|user|>), or else the end-of-sequence token."""
    if end := own_end(tokenizer):
        return end
    try:
        ids = tokenizer(_after_answer(tokenizer, [ASKED]).lstrip(), add_special_tokens=False)["input_ids"]
    except ValueError:
        ids = []
    return str(tokenizer.added_tokens_decoder.get(ids[0], "") if ids else "") or tokenizer.eos_token or ""


@functools.lru_cache(maxsize=8)
def own_start(tokenizer) -> str:
    """The text before an answer that the generation prompt lacks, so that the model writes it: gpt-oss's
    <|channel|>final<|message|>, Command-R7B's <|START_RESPONSE|>. Empty without a control token, as Qwen3's empty
    thought."""
    try:
        opened, shown = _rendered(tokenizer, [ASKED]), _rendered(tokenizer, ANSWERED, turn=False)
    except REFUSALS:
        return ""
    start, found, _ = shown.removeprefix(opened).partition(PROBE)
    steers = any(is_control(token) and token.content in start for token in tokenizer.added_tokens_decoder.values())
    return start if found and shown.startswith(opened) and steers else ""


@functools.lru_cache(maxsize=8)
def own_end(tokenizer) -> str:
    """The text after an answer, at the end of a chat and before the user's next turn alike: Phi-3's template puts an
    end of sequence at the end of a chat only. Empty where the template puts nothing there."""
    eos = tokenizer.eos_token or ""
    try:
        _, found, last = _rendered(tokenizer, ANSWERED, turn=False).rpartition(PROBE)
    except REFUSALS:
        return ""
    last = last.lstrip() if found else ""
    try:
        then = _after_answer(tokenizer, [ASKED]).lstrip()
    except ValueError:  # it takes no second turn
        then = last
    # Command-R's goes on with the model's next turn, after the end of sequence.
    end = last[: last.index(eos) + len(eos)] if eos and eos in last else last
    if not then.startswith(end):
        while not (_begins(tokenizer, last, end) and _begins(tokenizer, then, end)):
            end = end[:-1]
    # gpt-oss ends a chat with the end of sequence, and earlier turns with another token
    return end.strip() or (eos if last.startswith(eos) else "")


def _begins(tokenizer, text: str, start: str) -> bool:
    """Whether the tokens of ``text`` begin with those of ``start``."""
    whole, part = (tokenizer(each, add_special_tokens=False)["input_ids"] for each in (text, start))
    return whole[: len(part)] == part


@functools.lru_cache(maxsize=8)
def knows_tools(tokenizer) -> bool:
    """Whether the template renders tools, and the result of a call that stands in an answer's text."""
    tool = {"type": "function", "function": {"name": PROBE, "description": "", "parameters": {}}}
    answer, result = {"role": "assistant", "content": "hm"}, {"role": "tool", "content": PROBE}
    try:
        shown = _rendered(tokenizer, [ASKED], tools=[tool])
        told = _rendered(tokenizer, [ASKED, answer, result])
        opened, bare = (_rendered(tokenizer, [ASKED], turn) for turn in (True, False))
    except REFUSALS:
        return False
    opening = opened.removeprefix(bare) if opened.startswith(bare) else ""
    return PROBE in shown and PROBE in told and told.endswith(opening)


def _rendered(tokenizer, messages: list[dict], turn: bool = True, tools=None) -> str:
    """The text of a chat; ``turn``: with the generation prompt."""
    return tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=turn, tokenize=False)


@functools.lru_cache(maxsize=8)
def _shows(tokenizer, role: str) -> bool:
    """Whether the template renders messages of the ``role``: some know no system, those for images no plain text."""
    chat = [{"role": role, "content": PROBE}, *([ASKED] if role == "system" else [])]
    try:
        return PROBE in _rendered(tokenizer, chat)
    except REFUSALS:
        return False


def _told_by_user(messages: list[dict]) -> list[dict]:
    """``messages`` with the text of the system message at the beginning of the user's first."""
    system, *rest = messages
    if not rest or rest[0]["role"] != "user":
        return [{**system, "role": "user"}, *rest]
    return [{**rest[0], "content": f"{system['content']}\n\n{rest[0]['content']}"}, *rest[1:]]


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
