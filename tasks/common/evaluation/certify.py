"""The checks of `make certify`: does the trainer get what the engine sampled, as the chat template renders it?

They look at episodes that verl_plugins/certify.py has played, with no model and no engine. A response to a single-turn
task is an episode of one turn.
"""

import math
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

from verl_tasks.evaluation.sample import model_name
from verl_tasks.files import read_json
from verl_tasks.models.chat_template import demonstration_ids, end_of_turn_ids, prompt_ids
from verl_tasks.rewards.tool_calls import CLOSE, OPEN, THINK, THINK_END
from verl_tasks.runs.health import MISMATCH
from verl_tasks.settings import Settings, artifacts, fingerprint
from verl_tasks.text import common_start, one_line

OK, WARNING, FAILED = "ok", "warning", "failed"
MARKERS = (THINK, THINK_END, OPEN, CLOSE, "<answer>", "</answer>")
# Mean k3 between the log-probs of engine and trainer, nats a token: the health rule `mismatch` warns from MISMATCH on,
# where ROLLOUT_CORRECTION=sequence rejects a response. At ten times that a token is off by some 0.45 nats, and most
# weights of ROLLOUT_CORRECTION=token come near their limit of 2: the engine has another distribution than the trainer.
TOO_FAR = 10 * MISMATCH
# A block of thinking, also one that the prompt opened and the template closes, and Gemma 4's.
THINKING = re.compile(
    r"(?:<think>(?:(?!</?think>).)*)?</think>|<\|channel>thought(?:(?!<channel\|>).)*<channel\|>", re.DOTALL
)


@dataclass(frozen=True)
class Turn:
    """An answer as the engine returned it: ``context`` and ``ids`` in tokens, ``log_probs`` of the latter in nats (none
    of a scripted one). ``stopped``: it ended by itself."""

    context: list[int]
    ids: list[int]
    log_probs: list[float] = field(default_factory=list)
    stopped: bool = True


@dataclass(frozen=True)
class Played:
    """An episode, or one of its sequences: the ``turns`` of the engine, and what the agent loop made of them: the
    contexts it ``asked`` with, and what it gives to the trainer."""

    name: str
    turns: list[Turn]
    asked: list[list[int]]
    prompt_ids: list[int]
    response_ids: list[int]
    mask: list[int]
    log_probs: list[float] | None = None


def by_sequence(name: str, turns: list[Turn], asked: list[list[int]], given: list[tuple]) -> list[Played]:
    """The sequences ``given`` to the trainer (as Played has them), each with the turns that are its own: of all
    sequences it has the most of their tokens. A turn that is in none is then one that differs."""
    if len(given) == 1:
        return [Played(name, turns, asked, *given[0])]
    trained = [each[0] + each[1] for each in given]
    found = [([], []) for _ in given]
    for number in range(max(len(turns), len(asked))):
        whole = turns[number].context + turns[number].ids if number < len(turns) else asked[number]
        own = max(range(len(given)), key=lambda place: common_start([trained[place], whole]))
        found[own][0].extend(turns[number : number + 1])
        found[own][1].extend(asked[number : number + 1])
    names = (f"{name}, sequence {place}" for place in range(1, len(given) + 1))
    return [Played(each, *own, *parts) for each, own, parts in zip(names, found, given, strict=True)]


@dataclass(frozen=True)
class Chat:
    """Messages whose turns of the model from ``first`` on are learned, and the tools they may call."""

    name: str
    messages: list[dict]
    first: int
    tools: list[dict] | None = None

    def ids(self, tokenizer) -> tuple[list[int], list[int]]:
        """As chat_template.demonstration_ids."""
        return demonstration_ids(tokenizer, self.messages, self.first, self.tools)


@dataclass(frozen=True)
class Check:
    """``state``: OK, WARNING or FAILED. ``figures``: what ``text`` counts, for the certificate."""

    name: str
    state: str
    text: str
    figures: dict = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.state:<8} {self.name}: {self.text}"


def _judged(name: str, problems: list[str], text: str, **figures) -> Check:
    """FAILED with the first of ``problems``, else OK with ``text``."""
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return Check(name, FAILED if problems else OK, one_line(problems[0], 400) + more if problems else text, figures)


# ---- tokens and mask


def tokens(tokenizer, episodes: list[Played]) -> Check:
    """The trainer gets the engine's tokens. Counts turns whose text would be encoded to other tokens."""
    problems = [problem for episode in episodes for problem in _token_problems(episode)]
    turns = [turn for episode in episodes for turn in episode.turns]
    texts = (tokenizer.decode(turn.ids) for turn in turns)
    encoded = (list(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts)
    changed = sum(ids != turn.ids for turn, ids in zip(turns, encoded, strict=True))
    text = f"{len(turns)} turns are trained as sampled; decoded and encoded again, {changed} would have other tokens"
    return _judged("tokens", problems, text, episodes=len(episodes), turns=len(turns), changed_by_encoding=changed)


def _token_problems(episode: Played) -> Iterator[str]:
    if len(episode.asked) != len(episode.turns):
        asked = f"training asks for {len(episode.asked)} turns, evaluation for {len(episode.turns)}"
        yield f"{episode.name}: {asked} (does the environment answer at random?)"
    trained, end = episode.prompt_ids + episode.response_ids, 0
    for number, (turn, asked) in enumerate(zip(episode.turns, episode.asked, strict=False), 1):
        where, start = f"{episode.name}, turn {number}", len(turn.context)
        end = start + len(turn.ids)
        if asked != turn.context:
            place = common_start([asked, turn.context])
            yield f"{where}: training asks with other tokens than evaluation, from token {place} on"
        elif trained[:start] != turn.context:
            place = common_start([trained, turn.context])
            yield f"{where}: the trainer gets other tokens before it than the engine read, from token {place} on"
        elif trained[start:end] != turn.ids:
            place = common_start([trained[start:], turn.ids])
            yield f"{where}: the trained tokens are not the sampled ones, from token {place} of the turn on"
    if len(trained) > end:
        yield f"{episode.name}: {len(trained) - end} tokens follow the last turn"


def expected_mask(episode: Played) -> list[int]:
    """1 at the tokens of the engine's turns in the response."""
    mask = [0] * len(episode.response_ids)
    for turn in episode.turns:
        start = len(turn.context) - len(episode.prompt_ids)
        mask[start : start + len(turn.ids)] = [1] * len(turn.ids)
    return mask[: len(episode.response_ids)]


def masks(episodes: list[Played], may_be_empty: bool) -> Check:
    """The loss covers the model's tokens. ``may_be_empty``: TRUNCATED=masked leaves whole episodes out."""
    problems, empty, own = [], 0, 0
    for episode in episodes:
        expected = expected_mask(episode)
        own += sum(expected)
        if may_be_empty and episode.mask and not any(episode.mask):
            empty += 1
        elif episode.mask != expected:
            place = common_start([episode.mask, expected])
            what = "leaves out a token of the model" if expected[place : place + 1] == [1] else "covers another token"
            problems.append(f"{episode.name}: the mask {what}, the response's token {place}")
    total = sum(len(episode.response_ids) for episode in episodes)
    text = f"covers the model's {own} of {total} response tokens ({own / max(1, total):.0%}), and no other"
    text += f"; TRUNCATED=masked leaves out {empty} of {len(episodes)} episodes" if may_be_empty else ""
    return _judged("mask", problems, text, model_tokens=own, response_tokens=total, left_out=empty)


# ---- the template


def template(tokenizer, chats: list[Chat]) -> Check:
    """Each prompt of a later turn, rendered as a whole, begins with what was put together turn by turn. A template that
    rewrites earlier turns fails; where only thinking or white space differs, it is a warning. Raises ValueError as
    prompt_ids."""
    found = [rewritten(tokenizer, chat) for chat in chats]
    problems, thoughts = ([each[place] for each in found if each[place]] for place in (0, 1))
    answers = (sum(message["role"] == "assistant" for message in chat.messages[chat.first :]) for chat in chats)
    later = sum(max(0, count - 1) for count in answers)
    if not later:
        return Check("template", OK, "one turn: nothing is rendered after it")
    if not problems and not thoughts and "think" in str(tokenizer.chat_template):
        thoughts = [each for c in chats for each in rewritten(tokenizer, _with_thinking(c)) if each]
    if thoughts and not problems:
        kept = "training and evaluation keep the sampled tokens; a chat server that renders anew shows others"
        text = f"rewrites thinking or white space: {one_line(thoughts[0], 300)}; {kept}"
        return Check("template", WARNING, text, {"later": later})
    text = f"appends: {later} prompts of later turns are rendered to the tokens that were put together"
    return _judged("template", problems, text, later=later)


def cut_by(s: Settings, mask: list[int]) -> list[str]:
    """The limits of ``s`` that cut a demonstration; ``mask``: 1 on the turns of the model."""
    turns = runs(mask)
    prompt, longest = turns[0][0], max(end - start for start, end in turns)
    needs = {"MAX_PROMPT_LENGTH": prompt, "MAX_RESPONSE_LENGTH": len(mask) - prompt}
    needs |= {"MAX_TURN_LENGTH": longest, "MAX_TURNS": len(turns)} if s.multi_turn else {}
    return [f"{name}={getattr(s, name)} (needs {need})" for name, need in needs.items() if need > getattr(s, name)]


def limits(cuts: dict[str, list[str]]) -> Check:
    """No limit cuts the demonstrations; ``cuts``: what ``cut_by`` says of each, by name. Such a one is not played."""
    cut = {name: found for name, found in cuts.items() if found}
    if not cut:
        return Check("limits", OK, f"{len(cuts)} demonstrations fit", {"cut": 0, "demonstrations": len(cuts)})
    first, found = next(iter(cut.items()))
    text = f"{len(cut)} of {len(cuts)} demonstrations are cut off, and not played: {first} by {', '.join(found)}"
    state = FAILED if len(cut) == len(cuts) else WARNING
    return Check("limits", state, text, {"cut": len(cut), "demonstrations": len(cuts)})


def _with_thinking(chat: Chat) -> Chat:
    def thought(message: dict) -> dict:
        return {**message, "content": f"{THINK}\nhm\n{THINK_END}\n\n{message['content']}"}

    turns = [thought(m) if m["role"] == "assistant" else m for m in chat.messages[chat.first :]]
    return replace(chat, name=f"{chat.name} with thinking", messages=chat.messages[: chat.first] + turns)


def runs(mask: list[int]) -> list[tuple[int, int]]:
    """Start and end of each run of 1."""
    edges = [place for place, (a, b) in enumerate(zip([0, *mask], [*mask, 0], strict=True)) if a != b]
    return list(zip(edges[::2], edges[1::2], strict=True))


def rewritten(tokenizer, chat: Chat) -> tuple[str, str]:
    """The message that the template renders differently once others follow, and one of which only thinking or
    white space differs; empty where there is none."""
    together, mask = chat.ids(tokenizer)
    turns, thought = runs(mask), ""
    places = [i for i, m in enumerate(chat.messages) if m["role"] == "assistant" and i >= chat.first]
    for number, ((start, _), message) in enumerate(zip(turns, places, strict=True), 1):
        whole = prompt_ids(tokenizer, chat.messages[:message], chat.tools)
        if whole == together[:start]:
            continue
        place = common_start([whole, together])
        before = sum(begin <= place for begin, _ in turns)
        inside = before and place < turns[before - 1][1]
        which = f"turn {before} of the model" if inside else f"what follows turn {before}" if before else "the prompt"
        now, then = (tokenizer.decode(ids[place : place + 12]) for ids in (whole, together[:start]))
        told = f"{chat.name}: {which} is {now!r} in the prompt of turn {number}, and was {then!r}"
        if _without_thinking(tokenizer.decode(whole)) != _without_thinking(tokenizer.decode(together[:start])):
            return told, thought
        thought = thought or told
    return "", thought


def _without_thinking(text: str) -> str:
    """``text`` without blocks of thinking and white space."""
    return "".join(THINKING.sub("", text).split())


def ends(tokenizer, stops: set[int], episodes: list[Played], chats: list[Chat]) -> Check:
    """Turns end with a token at which the engine stops, also those that SFT learns."""
    end, problems = end_of_turn_ids(tokenizer), []
    shown = ", ".join(repr(tokenizer.decode([stop])) for stop in sorted(stops))
    if not stops.intersection(end[-1:]):  # Command-R7B's has two tokens; the engine stops at the last
        problems.append(f"the template ends a turn with {tokenizer.decode(end)!r}, the engine stops at {shown}")
    turns = [(episode.name, turn) for episode in episodes for turn in episode.turns]
    for name, turn in turns:
        if turn.stopped and turn.ids[-1:] and turn.ids[-1] not in stops:
            problems.append(f"{name}: a turn ends with {tokenizer.decode(turn.ids[-1:])!r}, not with {shown}")
    learned = 0
    for chat in chats:
        ids, mask = chat.ids(tokenizer)
        for _, after in runs(mask):
            learned += 1
            if ids[after - 1] not in stops:
                last = tokenizer.decode(ids[after - 1 : after])
                problems.append(f"{chat.name}: SFT learns a turn that ends with {last!r}, not with {shown}")
    stopped = sum(turn.stopped for _, turn in turns)
    text = f"{stopped} of {len(turns)} turns ended by themselves with {shown}; SFT learns the end of {learned} turns"
    return _judged("stop", problems, text, stopped=stopped, turns=len(turns), learned=learned)


def markers(tokenizer, episodes: list[Played], chats: list[Chat]) -> Check:
    """The reward reads text without special tokens: markers must survive that, and so must demonstrations."""
    problems = []
    for marker in MARKERS:
        ids = tokenizer(marker, add_special_tokens=False)["input_ids"]
        if marker not in tokenizer.decode(ids, skip_special_tokens=True):
            problems.append(f"{marker} is a special token: the reward does not see it")
    for chat in chats:
        ids, mask = chat.ids(tokenizer)
        answers = [m["content"] for m in chat.messages[chat.first :] if m["role"] == "assistant"]
        for content, (start, end) in zip(answers, runs(mask), strict=True):
            text = tokenizer.decode(ids[start:end], skip_special_tokens=True)
            if content.strip().removeprefix(THINK).strip() not in text:
                problems.append(f"{chat.name}: {one_line(content, 80)!r} is {one_line(text, 80)!r} to the reward")
    for episode in episodes:
        for turn in episode.turns:
            whole, read = (tokenizer.decode(turn.ids, skip_special_tokens=skip) for skip in (False, True))
            if lost := [marker for marker in MARKERS if whole.count(marker) != read.count(marker)]:
                problems.append(f"{episode.name}: {lost[0]} of a turn does not reach the reward")
    return _judged("markers", problems, f"{' '.join(MARKERS)} reach the reward")


def sft(tokenizer, chats: list[Chat], episodes: list[Played]) -> Check:
    """SFT learns the tokens and the mask that the same answers have in a training; ``episodes``: of ``chats``."""
    problems = []
    for chat, episode in zip(chats, episodes, strict=True):
        ids, mask = chat.ids(tokenizer)
        trained, own = episode.prompt_ids + episode.response_ids, [0] * len(episode.prompt_ids) + expected_mask(episode)
        if ids != trained:
            place = common_start([ids, trained])
            problems.append(f"{chat.name}: SFT has other tokens than its episode, from token {place} on")
        elif mask != own:
            problems.append(f"{chat.name}: SFT learns other tokens than RL, from token {common_start([mask, own])}")
    if not chats:
        return Check("sft", WARNING, "there are no demonstrations: no scripted episode was played")
    return _judged("sft", problems, f"{len(chats)} demonstrations have the tokens and mask of their episodes")


# ---- log-probs


def log_probs(episodes: list[Played], pairs: list[tuple[Turn, list[float]]]) -> Check:
    """``pairs``: turns with the trainer's log-probs of their tokens. The trainer must get the engine's as they are."""
    problems = []
    for episode in episodes:
        engine = list(chain.from_iterable(turn.log_probs for turn in episode.turns))
        handed = [p for p, own in zip(episode.log_probs or [], expected_mask(episode), strict=False) if own]
        if handed != engine:
            problems.append(f"{episode.name}: the trainer does not get the engine's log-probs")
    differences = [ours - theirs for turn, own in pairs for ours, theirs in zip(own, turn.log_probs, strict=True)]
    if not differences:
        return _judged("log_probs", problems or ["no turn was sampled"], "")
    mean = sum(map(abs, differences)) / len(differences)
    most = max(map(abs, differences))
    k3 = sum(math.expm1(min(d, 700)) - d for d in differences) / len(differences)
    text = f"engine and trainer differ by {mean:.2g} nats a token, at most {most:.2g}; mean k3 {k3:.2g}"
    figures = {"tokens": len(differences), "mean": mean, "max": most, "k3": k3, "warns": MISMATCH, "fails": TOO_FAR}
    if not k3 < TOO_FAR:  # also NaN
        problems.append(f"{text}, from {TOO_FAR:g} on they are different distributions")
    if not problems and k3 > MISMATCH:
        return Check("log_probs", WARNING, f"{text}, above {MISMATCH:g}: see ROLLOUT_CORRECTION", figures)
    return _judged("log_probs", problems, text, **figures)


# ---- the certificate


def verdict(checks: list[Check]) -> str:
    """The worst state of all checks."""
    states = {check.state for check in checks}
    return next((state for state in (FAILED, WARNING) if state in states), OK)


def certificate(s: Settings, model: str) -> Path:
    """The file for ``model`` and the settings that its episodes depend on."""
    names = ("MAX_PROMPT_LENGTH", "MAX_RESPONSE_LENGTH", "MAX_TURN_LENGTH", "MAX_TURNS", "TEMPERATURE", "TRUNCATED")
    mark = fingerprint({"model": model} | {name: getattr(s, name) for name in names})
    return artifacts() / "certify" / s.TASK / f"{model_name(model)}-{mark}" / "certificate.json"


def certified(file: Path) -> str:
    """Print the checks of a certificate. Exits with 1 when one failed."""
    found = read_json(file)
    checks = [Check(**check) for check in found["checks"]]
    print("\n".join(map(str, checks)))
    states = [check.state for check in checks]
    counts = f"{len(checks)} checks, {states.count(WARNING)} warnings, {states.count(FAILED)} failed; {file}"
    if found["verdict"] == FAILED:
        print(f"=> not certified: {counts}", flush=True)
        sys.exit(1)
    return f"=> certified: {counts}"
