"""What a policy earns that does not think: partial credit for guesses may pay more than thinking earns at the start.

No single score is wrong then, so no exploit is found; but reinforcement learning takes what pays. The guesses are made
of other rows' demonstrations, so no task is known here.
"""

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import mean

from verl_tasks.evaluation import probe
from verl_tasks.evaluation.exploits import SOME, THINKING, TURN, Row, visible
from verl_tasks.evaluation.sample import reward_mark
from verl_tasks.files import read_json
from verl_tasks.guarded import Guarded
from verl_tasks.runs.folder import all_runs, run_of
from verl_tasks.runs.run import read_metrics, recorded
from verl_tasks.settings import Settings, artifacts, code_digest

MUCH = 0.2  # of what a right answer earns more than none, where no samples of the start are known
ROWS, SECONDS = 24, 5.0
_DIGITS = re.compile(r"\d+(?:\.\d+)?")


@dataclass(frozen=True)
class Guess:
    """A policy that guesses: its mean ``score`` over the rows, the share that is ``right``, and what it says to one."""

    policy: str
    score: float
    right: float
    response: str


def with_numbers(text: str, other: str, own: str) -> str | None:
    """``text``, which answers the prompt ``other``, with the numbers of the prompt ``own`` in their places. None where
    the prompts do not have as many numbers, or nothing would change."""
    theirs, ours = _DIGITS.findall(other), _DIGITS.findall(own)
    if len(theirs) != len(ours):
        return None
    places = dict(zip(reversed(theirs), reversed(ours), strict=True))  # of equal ones the first
    changed = _DIGITS.sub(lambda found: places.get(found[0], found[0]), text)
    return None if changed == text else changed


def policies(others: list[Row]) -> dict[str, Callable[[Row], str | None]]:
    """What a policy could say to any row that has seen the demonstrations of ``others`` alone: of the first, or of the
    first that fits the row."""
    whole = [row.demonstration.split(TURN)[-1] for row in others]
    thought = "".join(THINKING.findall(whole[0]))

    def guess(row: Row) -> str | None:
        shapes = zip(others, whole, strict=True)
        found = (with_numbers(visible(text), other.prompt, row.prompt) for other, text in shapes if other is not row)
        return next(filter(None, found), None)

    found = {"one answer for all, no thought": lambda row: None if row is others[0] else visible(whole[0])}
    found["a guess of the row's numbers, no thought"] = guess
    if thought:
        found["one thought for all, and such a guess"] = lambda row: (text := guess(row)) and thought + text
    return found


def guesses(rows: list[Row], reward: Guarded, seconds: float) -> list[Guess]:
    """The best guess of each policy over the ``rows``, the one that earns most first; none without demonstrations."""
    ends, best = time.monotonic() + seconds, {}
    others = [row for row in rows[:SOME] if row.demonstration]
    for place in range(len(others)):
        for name, of_row in policies([*others[place:], *others[:place]]).items():
            said = {i: text for i, row in enumerate(rows) if (text := of_row(row))}
            results = [(text, reward.scores(text, [i])[0]) for i, text in said.items() if time.monotonic() < ends]
            results = [(text, result) for text, result in results if not result.problem]
            if len(results) < len(rows) / 2:
                continue  # it has an answer to few of them
            score, right = (mean(values) for values in zip(*((r.score, r.right) for _, r in results), strict=True))
            if name not in best or best[name].score < score:
                best[name] = Guess(name, score, right, results[0][0])
    return sorted(best.values(), key=lambda each: -each.score)


def start_score(s: Settings) -> tuple[float, str] | None:
    """The mean reward of a start's own samples by the present reward, and where it is known from: the newest probe of a
    model that no RL trained, else the first step of the newest run. None without both."""

    def of_start(found: dict) -> bool:
        trained = run_of(found.get("model", ""), artifacts() / "runs" / s.TASK)
        return found.get("mark") == reward_mark(s) and (not trained or recorded(trained).get("kind") != "rl")

    if file := probe.newest(s.TASK, of_start):
        return read_json(file)["metrics"]["score"]["value"], f"make probe: {file.parent.name}"
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
    """Lines on the guesses, and whether each is a warning: a guess earns more than the start's own samples, or much of
    what a right answer does where none are known. What it earns by being right counts beside known samples where it
    leaves out the thought that the demonstrations have: such a guess was learned in place of thinking."""
    found = guesses(rows, reward, seconds)
    if not found:
        return
    shown = [f"{each.policy}: {each.score:.3f} ({each.right:.0%} right)" for each in found]
    yield f"what guesses earn: {'; '.join(shown)}", False
    known, empty = start_score(s), [reward.scores("", [i])[0] for i in range(len(rows[:SOME]))]
    low = min((each.score for each in empty if not each.problem), default=0.0)  # of some rows it may be right
    high = max(reward.scores(row.demonstration, [i])[0].score for i, row in enumerate(rows[:SOME]) if row.demonstration)

    thinks = any(THINKING.search(row.demonstration) for row in rows if row.demonstration)

    def tempting(guess: Guess) -> float:
        """What it earns beside right answers; with them where it leaves out the demonstrations' thought."""
        in_place_of_thought = known and thinks and not THINKING.search(guess.response)
        return guess.score - low - (0.0 if in_place_of_thought else guess.right * (high - low))

    most = max(found, key=tempting)
    text = f"{most.policy}, such as {most.response!r:.80}, earns {most.score:.3f} ({most.right:.0%} right)"
    advice = "the training may learn it; pay less partial credit, or only after a thought"
    if known and tempting(most) > max(0.0, known[0] - low):
        yield f"{text}, the start's own samples {known[0]:.3f} ({known[1]}): {advice}", True
    elif not known and tempting(most) > MUCH * (high - low):
        unknown = f"make probe TASK={s.TASK} says what the start's own samples earn"
        yield f"{text}, a right answer {high:.3f}: {advice} ({unknown})", True
