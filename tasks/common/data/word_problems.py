"""Word problems in GSM8K's form (Cobbe et al. 2021): a ``question``, and a worked ``answer`` that ends in ``#### 18``.

A solution marks its arithmetic: ``16-3-4=<<16-3-4=9>>9``.
"""

import re
from collections.abc import Callable
from typing import NamedTuple

from verl_tasks.data.prepare import Examples
from verl_tasks.data.records import hub
from verl_tasks.rows import DataError, Example

__all__ = ["ANNOTATION", "HUB_DATASET", "from_hub", "read"]  # for tasks

HUB_DATASET, HUB_CONFIG = "openai/gsm8k", "main"
_GROUPS = re.compile(r"(?<=\d),(?=(?:\d\d,)*\d{3}(?!\d))")  # 1,080 and 1,50,000; 1,5 stays
ANNOTATION = re.compile(r"<<([^<>=]*)[^<>]*>>")  # group 1: the expression, without its value


class WordProblem(NamedTuple):
    """``answer``: the worked solution as in the record; ``number``: what follows its last ``####``, as 1080."""

    question: str
    answer: str
    number: str


def read(record: dict) -> WordProblem:
    """The problem of one record. Raises DataError unless it has the texts ``question`` and ``answer``."""
    question, answer = record.get("question"), record.get("answer")
    if not isinstance(question, str) or not isinstance(answer, str) or not question.strip():
        raise DataError("needs the texts `question` and `answer`")
    number = _GROUPS.sub("", answer.rpartition("####")[2].strip()) if "####" in answer else ""
    return WordProblem(question.strip(), answer, number)


def from_hub(name: str, convert: Callable[[dict], list[Example]]) -> Examples:
    """The set ``name`` of the hub, or a local copy of its folder, with its own splits."""
    return Examples([hub(name, HUB_CONFIG, split) for split in ("train", "test")], convert)
