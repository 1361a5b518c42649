"""For every task's reward.py: read the response, and refuse a broken score.

verl calls ``compute_score`` once per rollout (verl/experimental/reward_loop/reward_manager/naive.py) and logs every key
of the dict that it returns.
"""

import functools
import json
import math
import re
import sys
from collections.abc import Callable

from verl_tasks.errors import said

__all__ = [
    "RewardError",
    "after_thinking",
    "last_answer",
    "read_ground_truth",
    "reward_function",
    "thought",
    "with_opened_thinking",
]  # for tasks

MAX_RESPONSE_CHARS = 100_000
_THINK, _THINK_END = re.compile(r"<think>", re.IGNORECASE), re.compile(r"</think>", re.IGNORECASE)
_ANSWER = re.compile(r"<(/?)answer>", re.IGNORECASE)
# One table for every reader of numbers and arithmetic: signs of other scripts and keyboards as ASCII.
SPELLING = str.maketrans(
    "！＂＃＄％＆＇（）＊＋，－．／０１２３４５６７８９：；＜＝＞？～", "!\"#$%&'()*+,-./0123456789:;<=>?~"
)
SPELLING |= str.maketrans(
    {"￥": "¥", "￡": "£"}
    | dict.fromkeys("−–‐‑‒﹣➖", "-")
    | dict.fromkeys("﹢➕", "+")
    | dict.fromkeys("×·⋅∙∗•✕✖", "*")
    | dict.fromkeys("÷∕⁄➗", "/")
    | dict.fromkeys("\t\u00a0\u2009\u202f\u3000", " ")
    | dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff", "")  # characters without a width
)
_SIGNS = (re.compile(r"\\(?:times|cdot|ast)(?![a-zA-Z])"), "*"), (re.compile(r"\\div(?![a-zA-Z])"), "/")
# LaTeX and Markdown around a formula, and spaces in it, which change nothing.
_MARKUP = re.compile(r"\\[()\[\]]|\\[,!;: ]|\\(?:left|right|displaystyle|euro|pounds)(?![a-zA-Z])")


# What verl writes beside a reward's keys (trainer/ppo/ray_trainer.py, _write_generations): of two of one name one is
# lost, with `output` the response of a validation.
VERLS = ("reward", "input", "output", "gts", "step", "uid")


class RewardError(RuntimeError):
    """A reward function raised, or returned something that is not a score."""


class JudgeError(RewardError):
    """The judge gave no score. The response is not at fault, so the run stops; the response never scores 0."""


def number(value) -> float | None:
    """``value`` as a finite number: of Python, NumPy or torch, a bool too. None for anything else, a text too."""
    try:
        found = float(value) if hasattr(value, "__float__") or hasattr(value, "__index__") else math.nan
    except Exception:  # an array of several, a huge integer
        return None
    return found if math.isfinite(found) else None


def read_ground_truth(ground_truth) -> object:
    """The ground truth as an object: JSON text is parsed, anything else is returned as it is."""
    try:
        return json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
    except ValueError:
        return ground_truth


def with_opened_thinking(response: str, extra_info: dict | None) -> str:
    """``response`` with the ``<think>`` that its prompt ended with (``extra_info["think_opened"]``, which
    verl_plugins/dataset.py sets): without it, a response that never stops thinking looks like one that never began."""
    return f"<think>{response}" if (extra_info or {}).get("think_opened") else response


def in_ascii(text: str) -> str:
    """``text`` with the signs of ``SPELLING`` and LaTeX's operators as ASCII, without LaTeX's delimiters and spaces."""
    text = text.translate(SPELLING)
    for sign, plain in _SIGNS:
        text = sign.sub(plain, text)
    return _MARKUP.sub("", text)


def after_thinking(response: str) -> str:
    """The text after the last ``</think>``, up to an open ``<think>``; at most its last 100,000 characters."""
    return _THINK.split(_THINK_END.split(response)[-1], 1)[0][-MAX_RESPONSE_CHARS:]


def thought(response: str) -> str:
    """The text before the last ``</think>`` of its last 100,000 characters; empty without one."""
    return "".join(_THINK_END.split(response[-MAX_RESPONSE_CHARS:])[:-1])


def last_answer(response: str) -> str | None:
    """The text of the last ``<answer>…</answer>`` after any ``</think>``, stripped; None if there is none.

    Only the last 100,000 characters are read: a response is model output and may have any length.
    """
    # Texts with "" or "/" between them, in one pass: a search for pairs takes quadratic time on open tags.
    parts = _ANSWER.split(_THINK_END.split(response[-MAX_RESPONSE_CHARS:])[-1])
    for opening, text, closing in reversed([*zip(parts[1::2], parts[2::2], parts[3::2], strict=False)]):
        if (opening, closing) == ("", "/"):
            return text.strip()
    return None


def variants(compute_score: Callable[..., dict]) -> tuple[str, ...]:
    """The values of REWARD in a task's reward.py: its VARIANTS, the default first; empty without variants."""
    return getattr(sys.modules[compute_score.__module__], "VARIANTS", ())


def reward_function(compute_score: Callable[..., dict]) -> Callable[..., dict]:
    """Decorator for a task's ``compute_score``: it must return ``{"score": float, "acc": 0 or 1, ...}``, all finite.

    ``compute_score`` gets the response with the ``<think>`` that the prompt opened, and a ``variant`` that is one of
    its module's VARIANTS.

    Anything else, and what the function raises, becomes a RewardError of one line with the ground truth: an advantage
    computed from NaN would ruin the policy in silence.
    """

    @functools.wraps(compute_score)
    def checked(data_source, solution_str, ground_truth, extra_info=None, **kwargs) -> dict:
        where = f"reward of {str(data_source)!r} on ground_truth={str(ground_truth)[:200]!r}"
        try:
            known, variant = compute_score.__globals__.get("VARIANTS"), kwargs.get("variant")
            if known and variant and variant not in known:
                raise ValueError(f"variant={str(variant)[:40]} (REWARD): must be one of {', '.join(known)}")
            response = with_opened_thinking(solution_str, extra_info)
            result = compute_score(data_source, response, ground_truth, extra_info, **kwargs)
        except RewardError:
            raise
        except (Exception, SystemExit) as error:  # an exit would end a worker of verl without a word
            raise RewardError(f"{where}: compute_score raised {said(error)}") from error
        try:
            return _numbers(result)
        except RewardError as error:
            raise RewardError(f"{where}: {error}") from error

    checked.refuses = True  # of ``is_checked``
    return checked


def _numbers(result) -> dict[str, float]:
    """What a compute_score returned. Raises RewardError, the same for every row, if it is no score."""
    if not isinstance(result, dict) or not {"score", "acc"} <= result.keys():
        raise RewardError(f"compute_score must return a dict with `score` and `acc`, not {result!r:.300}")
    if taken := [key for key in VERLS if key in result]:
        raise RewardError(f"verl itself writes `{taken[0]}`; give this key of the dict another name")
    numbers = {key: number(value) for key, value in result.items()}
    for key, value in result.items():
        if numbers[key] is None:
            shown = "a huge integer" if isinstance(value, int) else repr(value)[:50]
            raise RewardError(f"{key} is {shown}, not a finite number")
    if numbers["acc"] not in (0, 1):
        raise RewardError(f"acc is {numbers['acc']:g}, not 1 (right) or 0; partial credit is for `score`")
    return numbers


def is_checked(compute_score: Callable) -> bool:
    """Whether ``compute_score`` has the decorator ``reward_function``."""
    return getattr(compute_score, "refuses", False)
