"""Why a response or an episode ended, with the variable that bounds it, and whether its answer could be read, for
metrics, tables and advice."""

from collections import Counter
from collections.abc import Iterable, Mapping

DONE, TOO_LONG = "stop", "prompt_too_long"  # by itself; before its first turn
LENGTH, TURN_LENGTH, OBSERVATION = "length", "turn_length", "observation"
FAILED = "failed"  # a program, or an environment of other people, ended without a score
MAX_TURNS, TIMEOUT = "max_turns", "step_timeout"
# What cuts off, and the variable to raise.
CUT = {
    LENGTH: "MAX_RESPONSE_LENGTH",
    TURN_LENGTH: "MAX_TURN_LENGTH",
    OBSERVATION: "MAX_RESPONSE_LENGTH",  # what the environment says next is longer than a whole response may be
    MAX_TURNS: "MAX_TURNS",
    TIMEOUT: "STEP_SECONDS",
}

# Keys that the scores of a program's episode have beside those of all episodes.
OF_PROGRAMS = ("sequences", "model_s", "program_s")


def cut_key(end: str) -> str:
    """The key of an episode's scores that says whether ``end``, one of CUT, ended it."""
    return "timeout" if end == TIMEOUT else f"cut_{end.removeprefix('max_')}"


def readable(reward: Mapping[str, float]) -> bool:
    """Whether the ``reward`` read an answer, by its ``format``; True without one. A fraction is an answer whose form is
    right in part: it was read."""
    return reward.get("format", 1) > 0


def advice(ends: Iterable[str], limits: Mapping[str, str] = CUT) -> str:
    """How many of ``ends`` are cuts, the most frequent first, and what to change; empty without one. ``limits``: the
    variables that bound them, as CUT."""
    counts = Counter(end for end in ends if end in CUT or end == FAILED)
    return "; ".join(f"{count} by {end}: {remedy(end, limits)}" for end, count in counts.most_common())


def remedy(end: str, limits: Mapping[str, str] = CUT) -> str:
    """What to change against the cut ``end``; ``limits`` as above."""
    if end == FAILED:
        return "read the log of the program or the environment (docs/MULTI_TURN.md)"
    return "shorten what the environment says at once" if end == OBSERVATION else f"raise {limits[end]}"


def step_metrics(scores: list[dict]) -> dict[str, float]:
    """Means of the episodes' ``scores``, for a training's metrics: turns, failed calls, share that failed, of each
    cut; of programs more."""
    names = ["turns", "tool_errors", FAILED, *map(cut_key, CUT)]
    names += [name for name in OF_PROGRAMS if scores and name in scores[0]]
    return {f"episode/{name}": sum(each[name] for each in scores) / len(scores) for name in names if scores}
