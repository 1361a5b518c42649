"""What a policy earns that does not think, or does not answer: partial credit for guesses may pay more than thinking
earns at the start, and no answer more than wrong ones.

No single score is wrong then, so no exploit is found; but reinforcement learning takes what pays. The guesses are made
of other rows' demonstrations, so no task is known here.
"""

import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import mean

from verl_tasks.evaluation.exploits import SOME, THINKING, TURN, Row, visible
from verl_tasks.evaluation.sample import reward_mark
from verl_tasks.files import read_json
from verl_tasks.guarded import Guarded, Result
from verl_tasks.rewards.answers import last_answer
from verl_tasks.runs.folder import all_runs, run_of
from verl_tasks.runs.run import read_metrics, recorded
from verl_tasks.settings import Settings, artifacts, code_digest

OFTEN = 0.4  # share of rows for which one answer may be right
MUCH = 0.2  # of what a right answer earns more than none, where no samples of the start are known
ROWS, SECONDS = 24, 5.0
POLICIES, LEAST = 3, 2  # how many ``policies`` has; rows that a mean is of at least
ALIKE = "one answer for all, no thought"
_DIGITS, _BETWEEN = re.compile(r"\d+(?:\.\d+)?"), re.compile(r"\s*[,;|\n]\s*")


@dataclass(frozen=True)
class Guess:
    """A policy that guesses: its mean ``score`` over the rows, the share that is ``right``, what it says to one, and
    the mean score of what is ``wrong``, None where nothing is."""

    policy: str
    score: float
    right: float
    response: str
    wrong: float | None

    @classmethod
    def of(cls, policy: str, found: list[tuple[str, Result]]) -> "Guess":
        """From what the policy said to each row, and the reward of that."""
        score, right = (mean(values) for values in zip(*((r.score, r.right) for _, r in found), strict=True))
        wrong = [r.score for _, r in found if not r.right]
        return cls(policy, score, right, found[0][0], mean(wrong) if wrong else None)


def with_numbers(text: str, other: str, own: str) -> str | None:
    """``text``, which answers the prompt ``other``, with the numbers of the prompt ``own`` in their places. None where
    the prompts do not have as many numbers, or nothing would change."""
    theirs, ours = _DIGITS.findall(other), _DIGITS.findall(own)
    if len(theirs) != len(ours):
        return None
    places = dict(zip(reversed(theirs), reversed(ours), strict=True))  # of equal ones the first
    changed = _DIGITS.sub(lambda found: places.get(found[0], found[0]), text)
    return None if changed == text else changed


def with_all_parts(texts: list[str]) -> str | None:
    """The one of ``texts`` whose answer has the most parts, with those of all answers: every label at once. None where
    no answer has several."""
    answers = {text: (last_answer(text) or text).strip("[] \n") for text in texts}
    parts = dict.fromkeys(part for answer in answers.values() for part in _BETWEEN.split(answer) if part)
    text = max(texts, key=lambda text: len(_BETWEEN.findall(answers[text])))
    if not (between := _BETWEEN.search(answers[text])):
        return None
    before, _, after = text.rpartition(answers[text])
    return before + between[0].join(parts) + after


def policies(others: list[Row]) -> dict[str, Callable[[Row], str | None]]:
    """What a policy could say to any row that has seen the demonstrations of ``others`` alone: of the first, or of the
    first that fits the row."""
    whole = [row.demonstration.split(TURN)[-1] for row in others]
    thought = "".join(THINKING.findall(whole[0]))

    def guess(row: Row) -> str | None:
        shapes = zip(others, whole, strict=True)
        found = (with_numbers(visible(text), other.prompt, row.prompt) for other, text in shapes if other is not row)
        return next(filter(None, found), None)

    found = {ALIKE: lambda row: None if row is others[0] else visible(whole[0])}
    found["a guess of the row's numbers, no thought"] = guess
    if thought:
        found["one thought for all, and such a guess"] = lambda row: (text := guess(row)) and thought + text
    return found


def spread(calls: int, demonstrations: int, rows: int) -> tuple[int, int]:
    """From how many of the ``demonstrations`` guesses are made, and on how many ``rows``, for so many ``calls``: all
    policies, then SOME rows, then all demonstrations, then all rows."""
    count = min(rows, max(SOME, calls // (POLICIES * demonstrations)))
    made = min(demonstrations, calls // (POLICIES * count))
    return (made, count) if made else (1, calls // POLICIES)


def guesses(rows: list[Row], others: list[Row], made: int, reward: Guarded, ends: float) -> list[Guess]:
    """The best guess of each policy over the ``rows``, the one that earns most first, from the demonstrations of
    ``others``, each of the first ``made`` in turn before the rest. ``ends``: when the time is over (time.monotonic)."""
    best = {}
    tried = [policies([*others[place:], *others[:place]]) for place in range(made)]
    if every := with_all_parts([visible(row.demonstration.split(TURN)[-1]) for row in others]):
        tried = [{"every part of an answer, no thought": lambda row: every}, *tried]
    for said in tried:
        results = {name: [] for name in said}
        for i, row in enumerate(rows):
            if time.monotonic() >= ends:
                break
            for name, of_row in said.items():  # all on the same rows, however slow the reward is
                if text := of_row(row):
                    results[name] += [(text, each) for each in reward.scores(text, [i]) if not each.problem]
        for name, found in results.items():
            if len(found) < len(rows) / 2:
                continue  # it has an answer to few of them
            guess = Guess.of(name, found)
            if name not in best or best[name].score < guess.score:
                best[name] = guess
    return sorted(best.values(), key=lambda each: -each.score)


def start_score(s: Settings) -> tuple[float, str] | None:
    """The mean reward of a start's own samples by the present reward, and where it is known from: the newest probe of a
    model that no RL trained, else the first step of the newest run. None without both."""

    def of_start(found: dict) -> bool:
        trained = run_of(found.get("model", ""), artifacts() / "runs" / s.TASK)
        return found.get("mark") == reward_mark(s) and (not trained or recorded(trained).get("kind") != "rl")

    probes = {file: read_json(file) for file in (artifacts() / "probe" / s.TASK).glob("*/probe.json")}
    if starts := [file for file, found in probes.items() if of_start(found)]:
        file = max(starts, key=lambda file: file.stat().st_mtime)
        return probes[file]["metrics"]["score"]["value"], f"make probe: {file.parent.name}"
    made = {run: recorded(run) for run in all_runs(s.TASK)}
    code = code_digest(s.reward_file)
    runs = [
        run
        for run, of in made.items()
        if of["kind"] == "rl"
        and of.get("reads", {}).get("reward") == code
        and of["settings"].get("REWARD", "") == s.REWARD
    ]
    for run in sorted(runs, key=lambda run: -run.stat().st_mtime):
        for metrics in read_metrics(run, strict=False).values():
            if "critic/score/mean" in metrics:
                return metrics["critic/score/mean"], f"first step of {run.name}"
    return None


def told(s: Settings, rows: list[Row], reward: Guarded, seconds: float = SECONDS) -> Iterator[tuple[str, bool]]:
    """Lines on the guesses, and whether each is a warning: a guess, or no answer at all, earns more than the start's
    own samples, or much of what a right answer does where none are known; or one answer is OFTEN right. What a guess
    earns by being right counts beside known samples where it leaves out the thought that the demonstrations have: such
    a guess was learned in place of thinking."""
    if not (others := [row for row in rows[:SOME] if row.demonstration]):
        return
    reward.scores("", [0])  # it may load libraries
    began, empty, answered = time.monotonic(), [], []
    for i, row in enumerate(rows[:SOME]):
        if answered and time.monotonic() - began > seconds / 8:
            break
        empty += [("", each) for each in reward.scores("", [i]) if not each.problem]
        answered += reward.scores(row.demonstration, [i]) if row.demonstration else []
    low = min((each.score for _, each in empty), default=0.0)  # of some rows it may be right
    high = max(each.score for each in answered)

    call, ends = (time.monotonic() - began) / len([*empty, *answered]), began + seconds
    calls = max(0, int((ends - time.monotonic()) / call)) if call else sys.maxsize
    made, count = spread(calls, len(others), len(rows))
    why = f"a call of the reward takes {call:.2f} s, a larger SECONDS of make attack looks at more"
    if count < LEAST:
        yield f"what guesses earn was not looked at: {why}", False
        return
    if not (found := guesses(rows[:count], others, made, reward, ends)):
        return
    silent = Guess.of("no answer at all", empty) if empty else None
    # Where a wrong answer of every form costs more than none, what it earns is the least.
    low = min(low, max((each.wrong for each in found if each.wrong is not None), default=low))
    found += [silent] if silent else []
    all_of_it = (made, count) == (len(others), len(rows))
    part = f" (from {made} of {len(others)} demonstrations on {count} of {len(rows)} prompts, {why})"
    shown = [f"{each.policy}: {each.score:.3f} ({each.right:.0%} right)" for each in found]
    yield f"what guesses earn{'' if all_of_it else part}: {'; '.join(shown)}", False
    known = start_score(s)
    start = known[0] if known else low
    thinks = any(THINKING.search(row.demonstration) for row in rows if row.demonstration)

    def tempting(guess: Guess) -> float:
        """What it earns beside right answers; with them where it leaves out the demonstrations' thought."""
        in_place_of_thought = known and thinks and guess.response and not THINKING.search(guess.response)
        return guess.score - low - (0.0 if in_place_of_thought else guess.right * (high - low))

    most = max(found, key=tempting)
    text = f"{most.policy}, such as {most.response!r:.80}, earns {most.score:.3f} ({most.right:.0%} right)"
    advice = "the training may learn it; pay less partial credit, or only after a thought"
    if most is silent:
        text = f"{most.policy} earns {most.score:.3f} ({most.right:.0%} right), a wrong one {low:.3f}"
        advice = "the training may learn to say nothing; let a wrong answer earn no less than none"
    if known and tempting(most) > max(0.0, known[0] - low):
        yield f"{text}, the start's own samples {known[0]:.3f} ({known[1]}): {advice}", True
    elif not known and tempting(most) > MUCH * (high - low):
        unknown = f"make probe TASK={s.TASK} says what the start's own samples earn"
        yield f"{text}, a right answer {high:.3f}: {advice} ({unknown})", True
    elif often := [each for each in found if each.policy == ALIKE and each.right >= OFTEN and each.score > start]:
        text = f"{ALIKE}, such as {often[0].response!r:.80}, is right for {often[0].right:.0%} of the prompts"
        yield f"{text}: the training may learn it alone; balance the answers, or ask for more than a choice", True
