"""Is an answer that the reward cannot read right all the same? That tells a gain of form from a gain of skill.

A lenient reader takes what a response says last (a marked answer, an arithmetic expression, a number, a line, an
option's letter, a block of code, a JSON object, tool calls), puts it into the forms that rewards read, and asks the
task's own reward. So it knows no task.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace

from verl_tasks.ends import readable
from verl_tasks.evaluation.rollouts import Rollout
from verl_tasks.guarded import asks_judge
from verl_tasks.rewards.answers import after_thinking, in_ascii, with_opened_thinking
from verl_tasks.rewards.environment import SUCCESS, replayed
from verl_tasks.rewards.episode import DONE
from verl_tasks.rewards.json_answer import braced
from verl_tasks.rewards.math_answer import find_answer

LONGEST = 200  # characters of an answer
READ = 16_384  # characters of a response, the last ones
_ARITHMETIC = re.compile(r"[0-9+\-*/() .]+")
_LABEL = re.compile(r"(?i)^.*(?:\banswer is\s|:\s|：|答案[是为])\s*")
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
_OPTION = re.compile(r"(?<!\w)([A-Z])[).:](?=\s|$)")  # B) Oslo
_FENCED = re.compile(r"```\w*\n(.*?)```", re.DOTALL)
_MARKUP = re.compile(r"</?\w{1,20}>|[*_`$#]+")


def _arithmetic(text: str) -> str:
    """The last arithmetic expression of ``text`` with an operator between two numbers; empty without one."""
    found = (each.strip(" .+*/-") for each in _ARITHMETIC.findall(re.sub("[$`]", "", in_ascii(text))))
    return ([each for each in found if re.search(r"[0-9)] *[-+*/] *[0-9(]", each)] or [""])[-1]


def _answers(response: str) -> Iterator[str]:
    """What ``response`` may mean as its answer. Of a thought that never ends only what it marks."""
    said = after_thinking(response).strip()
    text = said or re.sub("(?i)<think>", "", response)
    _, opened, marked = text.rpartition("<answer>")
    if opened:
        yield marked.partition("</answer>")[0]
    for flexible in (False, True) if said else (False,):
        if found := find_answer(text, flexible):
            yield found.text
    if said:
        yield _arithmetic(said)
        yield from _FENCED.findall(said)[-1:]
        yield (line := _MARKUP.sub("", said.splitlines()[-1]))
        yield _LABEL.sub("", line).strip(" .!()[]'\"。")
        if len(options := set(_OPTION.findall(line))) == 1:
            yield from options


def _form(thought: str, answer: str) -> str:
    return f"{thought}\\boxed{{{answer}}}\n<answer>{answer}</answer>\n#### {answer}"


def readings(response: str) -> list[str]:
    """``response`` (with the ``<think>`` that its prompt opened) as a lenient reader understands it: at most ten
    texts in the forms that rewards read, each with one answer."""
    end = response.lower().rfind("</think>")
    thought, response = response[: end + 8] + "\n" if end >= 0 else "", response[-READ:]
    objects = list(braced(after_thinking(response)))
    calls = [each for each in objects if re.search(r'"name"\s*:', each) and '"arguments"' in each]
    found = [thought + "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in calls)] if calls else []
    found += objects[-1:]
    answers = (each.strip() for each in _answers(response))
    return list(dict.fromkeys([*found, *(_form(thought, each) for each in answers if 0 < len(each) <= LONGEST)]))


def reads_right(response: str, right: Callable[[str], bool]) -> bool:
    """Whether a reading of ``response`` is ``right``, and not because an answer that says nothing would be too, or
    one of its several numbers alone. A reading on which ``right`` raises is not right."""

    def safely(text: str) -> bool:
        try:
            return right(text)
        except Exception:
            return False

    def hedges(text: str) -> bool:  # of several numbers a reward may take the first
        _, form, answer = text.rpartition("\n#### ")
        numbers = dict.fromkeys(_NUMBER.findall(answer)) if form else ()
        return len(numbers) > 1 and any(safely(text.replace(answer, each)) for each in numbers)

    return any(safely(text) and not hedges(text) for text in readings(response)) and not safely(_form("", "-"))


def read(rollouts: list[Rollout], compute_score: Callable | None, environment: type | None) -> list[Rollout]:
    """``rollouts`` with ``lenient``: whether a lenient reader finds the answer right. Where the reward found it right,
    or could read it, this is what the reward says.

    None where it is not known: no reward, a judge, an environment that reads the model's texts itself.
    """
    if asks_judge(environment or compute_score) or hasattr(environment, "step_text"):
        return rollouts

    def of(rollout: Rollout) -> bool:
        reward, extra = rollout.reward, rollout.extra_info or {}
        if reward.get("acc", 0) > 0 or ("format" in reward and readable(reward)):
            return reward.get("acc", 0) > 0
        if not environment:
            later = {name: value for name, value in extra.items() if name != "think_opened"}

            def right(text: str) -> bool:
                return compute_score(rollout.data_source, text, rollout.ground_truth, later).get("acc", 0) > 0

            return reads_right(with_opened_thinking(rollout.response, extra), right)
        *before, last = [each["content"] for each in rollout.messages if each["role"] == "assistant"] or [""]
        row = {"prompt": rollout.prompt, "data_source": rollout.data_source, "extra_info": extra}
        row |= {"reward_model": {"ground_truth": rollout.ground_truth}}
        ended = rollout.finish_reason == DONE and not hasattr(environment, "at_once")  # a program: it takes seconds
        return ended and reads_right(
            last, lambda text: replayed(environment, row, [*before, text], spare=True)[0] >= SUCCESS
        )

    return [replace(r, lenient=of(r)) if r.lenient is None and r.reward is not None else r for r in rollouts]
