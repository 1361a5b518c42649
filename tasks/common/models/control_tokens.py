"""Text of users, tools and data files never becomes a control token, with which it could end a turn and open another.

A tokenizer takes the spelling of a control token for the token itself, wherever it stands. So such a spelling is cut
after its first character, and the parts are encoded by themselves. Text without one keeps the tokens that it has.
"""

import contextlib
import functools
import json
import re
from itertools import chain, pairwise

# What models write themselves, in demonstrations too.
OF_THE_MODEL = {"<think>", "</think>", "<tool_call>", "</tool_call>", "<answer>", "</answer>"}
# <|user|>, Gemma 4's <|turn>, and DeepSeek's <｜User｜>, which its tokenizer does not call special.
_LOOKS_LIKE_ONE = re.compile(r"<[|｜].*>|<.*[|｜]>", re.DOTALL)
_BRACKETED = re.compile(r"[<\[\]{|].*[>\]}|]", re.DOTALL)  # Gemma has added tokens of white space too
# What templates are asked to render, for the tokens that they write themselves; some refuse one or the other.
_USER, _MODEL = ({"role": role, "content": "x"} for role in ("user", "assistant"))
_TOLD, _RESULT = ({"role": role, "content": "x"} for role in ("system", "tool"))
_CHATS = [_TOLD, _USER], [_USER, _MODEL, _USER], [_USER, _MODEL, _RESULT]
_PRIVATE = (*range(0xE000, 0xF900), *range(0xF0000, 0xFFFFE))  # characters that Unicode gives no meaning


def is_control(token) -> bool:
    """Whether a tokenizer's added ``token`` (AddedToken) steers, and is no text of a model."""
    if token.content in OF_THE_MODEL:
        return False
    around = token.content.endswith("tool_response>")  # of Qwen's templates, around the result of a call
    return token.special or around or bool(_LOOKS_LIKE_ONE.fullmatch(token.content))


def _of_template(tokenizer) -> set[str]:
    """The added tokens that the chat template puts around messages: not every tokenizer calls them special."""
    text = ""
    for chat in _CHATS if tokenizer.chat_template else ():
        with contextlib.suppress(Exception):  # whatever a template raises
            text += tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    added = (token.content for token in tokenizer.added_tokens_decoder.values())
    return {token for token in added if token in text and _BRACKETED.fullmatch(token)} - OF_THE_MODEL


@functools.lru_cache(maxsize=8)
def _spellings(tokenizer) -> re.Pattern | None:
    """Finds each place where a control token of ``tokenizer`` is spelled; None without one."""
    found = {token.content for token in tokenizer.added_tokens_decoder.values() if is_control(token)}
    found |= _of_template(tokenizer)
    found = {token for token in found | set(tokenizer.all_special_tokens) if len(token) > 1}
    longest_first = sorted(map(re.escape, found), key=len, reverse=True)
    return re.compile(f"(?=(?:{'|'.join(longest_first)}))") if found else None  # ahead: one may begin inside another


def marked(tokenizer, *values) -> tuple[str, list]:
    """``values`` (texts, or what JSON can hold) with a mark at each cut, and that mark: a character that they do not
    have. The mark is empty, and the values are as they were, where nothing is to cut."""
    pattern = _spellings(tokenizer)
    texts = [text for value in values for text in _texts(value)]
    if pattern is None or not any(map(pattern.search, texts)):
        return "", list(values)
    used = set(chain.from_iterable(texts))
    escaped = "".join(texts).lower()
    free = (chr(code) for code in _PRIVATE)
    mark = next(mark for mark in free if mark not in used and _escaped(mark) not in escaped)

    def cut(value):
        if isinstance(value, str):
            places = [0, *(match.start() + 1 for match in pattern.finditer(value)), len(value)]
            return mark.join(value[start:end] for start, end in pairwise(places))
        if isinstance(value, dict):
            return {cut(key): cut(each) for key, each in value.items()}
        return [cut(each) for each in value] if isinstance(value, list) else value

    return mark, [cut(value) for value in values]


def ids_of(tokenizer, text: str, mark: str) -> list[int]:
    """Token ids of the rendered ``text``, cut at each ``mark`` (also where JSON has escaped it)."""
    parts = text.replace(_escaped(mark), mark).split(mark) if mark else [text]
    return [token for part in parts if part for token in tokenizer(part, add_special_tokens=False)["input_ids"]]


def _escaped(mark: str) -> str:
    return json.dumps(mark)[1:-1]


def _texts(value):
    """All texts in ``value``, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from _texts([*value, *value.values()])
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each)
