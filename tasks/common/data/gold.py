"""The gold check: does the task's reward, or environment, call each row's own demonstration right, and none of the
wrong forms that the task makes of it? See docs/DATA.md.

The reward runs in processes of its own (guarded.py): a row of a data file may make it hang or die.
"""

import contextlib
import functools
import heapq
import importlib
import json
import multiprocessing
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice

from tqdm import tqdm

from verl_tasks import errors
from verl_tasks.files import write_text
from verl_tasks.guarded import CALL_SECONDS, Guarded, Result, asks_judge
from verl_tasks.models.chat_template import answer_ids, demonstration_ids
from verl_tasks.process import die_with_parent
from verl_tasks.rewards.answers import RewardError
from verl_tasks.rewards.environment import SUCCESS, retold, reward_of
from verl_tasks.rows import DataError
from verl_tasks.settings import Settings, code_digest
from verl_tasks.text import one_line

OF_PROGRAM = 16  # rows whose demonstrations a program plays
SHOWN = 10  # wrong demonstrations that are named
FORMS_SHOWN = 3  # wrong forms in the line
CHUNK = 512  # rows that a process scores at a time; fewer rows take one process
MOST_PROCESSES = 16
MOST_SLOW = 3  # demonstrations that take too long before the check ends
MEASURED = 4096  # demonstrations whose turns and tokens are counted
REPEATED = 64  # demonstrations of a chunk whose calls are repeated
TIMES = 8  # that a call is made in place of an answer
# What ``needs`` counts of a demonstration, in this order: the variables that bound it.
NEEDS = ("MAX_PROMPT_LENGTH", "MAX_TURNS", "MAX_TURN_LENGTH", "MAX_RESPONSE_LENGTH")
LOG = "gold.log"  # beside the data


@dataclass(frozen=True)
class Row:
    """What a row's reward gets; ``place``: where the row comes from, for people. Of a multi-turn task ``demonstration``
    is the JSON list of the model's messages, and ``extra`` the whole RL row."""

    place: str
    demonstration: str | None
    truth: str
    source: str
    extra: dict


def check(s: Settings, rows: Sequence[Row], tokenizer=None) -> tuple[dict, set[int]]:
    """Score the demonstrations of ``rows``, and count with ``tokenizer`` what they need. Returns the manifest's entry,
    and the indices of those that are not right.

    The entry: ``rows``, ``demonstrations`` (rows that have one), ``right`` (``acc`` 1, or a score of 1 where the reward
    has no ``acc``), ``others`` (the first SHOWN others: ``place`` and ``reason``), ``note`` (why not all were checked),
    ``reward`` (its digest); where the reward's module has ``wrong_forms``, ``forms`` (how many of right demonstrations
    were scored) and ``taken`` (the first SHOWN that are right too: ``place`` and ``form``). ``needs``: of those that
    were measured, a number for each of NEEDS (0: unknown), and how many have these numbers. ``traces``: how many
    tracebacks are in LOG.
    """
    entry = {"reward": code_digest(s.reward_file), "rows": len(rows), "demonstrations": 0, "right": 0, "others": []}
    entry |= {"note": "", "forms": 0, "taken": [], "needs": [], "traces": 0}
    try:
        module = importlib.import_module(f"tasks.{s.TASK}.{s.reward_file.stem}")
        of_task = module.Environment if s.multi_turn else module.compute_score
    except Exception as error:  # `make data` has refused it before
        return entry | {"note": f"not checked: {s.reward_file.name} cannot be loaded ({type(error).__name__})"}, set()
    if asks_judge(of_task):
        return entry | {"note": "not checked: the reward asks a judge"}, set()
    own = {row.demonstration for row in islice(filter(lambda row: row.demonstration, rows), MEASURED)}
    compute_score, forms = _scorer(s, module, tokenizer, own)
    if program := hasattr(getattr(module, "Environment", None), "at_once"):  # each episode takes seconds
        rows = rows[:OF_PROGRAM]
        entry |= {"rows": len(rows), "note": f"a program plays the first {OF_PROGRAM} alone"}
    (s.data_dir / LOG).unlink(missing_ok=True)
    wrong: dict[int, str] = {}  # why, by index
    slow, needs, traces = 0, Counter(), {}
    for index, scored in enumerate(_scores(compute_score, rows, forms, s.multi_turn and not program, program)):
        if scored is None:
            continue
        result = scored.result
        entry["demonstrations"] += 1
        entry["forms"] += scored.forms
        if scored.taken and len(entry["taken"]) < SHOWN:
            entry["taken"].append({"place": rows[index].place, "form": _end(scored.taken)})
        if result.needs:
            needs[tuple(result.needs)] += 1
        if result.right:
            entry["right"] += 1
            continue
        if result.trace and len(traces) < SHOWN:
            traces.setdefault(result.trace, rows[index].place)
        wrong[index] = _reason(result)
        slow += _slow(result)
        if slow == MOST_SLOW:
            entry["note"] = f"ended at row {index + 1} of {len(rows)}: {slow} took longer than {CALL_SECONDS:g} s"
            break
    if not entry["demonstrations"]:
        entry["note"] = "not checked: no demonstrations"
    if traces:
        write_text(s.data_dir / LOG, "\n".join(f"{place}\n{trace}" for trace, place in traces.items()))
    entry |= {"needs": sorted([*need, count] for need, count in needs.items()), "traces": len(traces)}
    others = ({"place": rows[index].place, "reason": reason} for index, reason in wrong.items())
    return entry | {"others": heapq.nsmallest(SHOWN, others, key=_in_file)}, set(wrong)


def _scorer(s: Settings, module, tokenizer, own: set[str]) -> tuple[Callable, Callable]:
    """What scores a demonstration and measures those in ``own``, and what makes its wrong forms."""
    forms = getattr(module, "wrong_forms", lambda demonstration: ())
    if s.multi_turn:
        return functools.partial(_episode, module.Environment, tokenizer, own), functools.partial(_of_messages, forms)
    given = {"variant": s.REWARD} if s.REWARD else {}
    return functools.partial(_response, module.compute_score, tokenizer, own, given), forms


def _response(
    score: Callable, tokenizer, own: set[str], given: dict, source: str, text: str, truth: str, extra: dict
) -> dict:
    """A reward's result for ``text``, with what it needs if it is one of ``own``."""
    result = score(source, text, truth, extra, **given)
    result = result if isinstance(result, dict) else {"score": result}
    return result | {"needs": [0, 1, 0, len(answer_ids(tokenizer, text))] if tokenizer and text in own else None}


def _episode(made: type, tokenizer, own: set[str], source: str, demonstration: str, truth: str, row: dict) -> dict:
    """A reward's result for the episode of ``demonstration``, with what it needs if it is one of ``own``; right only
    where it ends with its last message. ``{"repeated": messages}`` may end before."""
    answers, spare = json.loads(demonstration), False
    if isinstance(answers, dict):
        answers, spare = answers["repeated"], True
    start, turns = retold(made, row, answers, spare)
    reward, done = reward_of(turns), bool(turns) and turns[-1][1].done
    if demonstration in own and turns and (why := turns[-1][1].broke):
        raise RewardError(why)
    needs = _needs(tokenizer, start, turns) if demonstration in own else None
    return {"score": reward, "acc": float(done and reward >= SUCCESS), "needs": needs}


def _needs(tokenizer, start, turns: list) -> list[int]:
    """What an episode needs: as NEEDS; without a tokenizer its turns alone."""
    if not tokenizer:
        return [0, len(turns), 0, 0]
    messages = [*start.messages]
    for place, (answer, step, _) in enumerate(turns, 1):
        messages += [{"role": "assistant", "content": answer}, *(step.messages if place < len(turns) else [])]
    _, mask = demonstration_ids(tokenizer, messages, len(start.messages), start.tools)
    prompt, longest = mask.index(1), max(len([*own]) for mine, own in groupby(mask) if mine)
    return [prompt, len(turns), longest, len(mask) - prompt]


def _of_messages(forms: Callable, demonstration: str) -> list[str]:
    """``wrong_forms`` of an episode: of the model's messages."""
    return [json.dumps(messages) for messages in forms(json.loads(demonstration))]


def _repeats(demonstration: str) -> Iterator[tuple[str, str, bool]]:
    """Of an episode's messages: what is repeated in words, the messages, and whether a right answer ends them."""
    *before, last = json.loads(demonstration)
    if before:
        twice = [message for message in before for _ in range(2)]
        yield "each call made twice", json.dumps({"repeated": [*twice, last]}), True
        yield f"first call {TIMES} times, no answer", json.dumps({"repeated": before[:1] * TIMES}), False


def _end(text: str) -> str:
    """The end of ``text`` in one line: what was changed mostly stands there."""
    text = one_line(text, len(text))
    return f"…{text[-40:]}" if len(text) > 40 else text


def _in_file(other: dict) -> tuple[str, int]:
    """By file and number: line 9 comes before line 10."""
    text, _, number = other["place"].rpartition(" ")
    return (text, int(number)) if number.isdecimal() else (other["place"], 0)


def _reason(result: Result) -> str:
    """Why a demonstration is not right: the error, or its score by part."""
    if result.problem:
        return one_line(result.problem, 600)
    parts = {"score": result.score, "acc": result.acc, "format": result.format}
    return ", ".join(f"{name} {value:g}" for name, value in parts.items() if value is not None)


def said(entry: dict, s: Settings | None = None) -> str:
    """The manifest's entry in one line; with ``s`` also which limits are too small, and where tracebacks are."""
    if not entry["demonstrations"]:
        return entry["note"]
    text = f"{entry['right']} of {entry['demonstrations']} demonstrations get acc 1"
    without = entry["rows"] - entry["demonstrations"]
    if without and not entry["note"]:
        text += f" ({without} rows have none)"
    if others := _grouped(entry["others"]):
        many = entry["demonstrations"] - entry["right"] > len(entry["others"])
        text += f"; {f'the first {SHOWN} others' if many else 'the others'}: {others}"
    if taken := entry.get("taken"):
        places: dict[str, list[str]] = {}
        for each in taken:
            places.setdefault(each["form"], []).append(each["place"])
        shown = [f"{', '.join(rows)} ({form})" for form, rows in islice(places.items(), FORMS_SHOWN)]
        text += f"; wrong forms that get it too: {'; '.join(shown)}"
    if s and entry.get("traces"):
        text += f"; tracebacks: {s.data_dir / LOG}"
    if s and (limits := too_small(entry, s)):
        text += f"; {limits}"
    left_out = f"{entry['dropped']} rows left out (GOLD=drop)" if entry.get("dropped") else ""
    return "; ".join(filter(None, [text, left_out, entry["note"]]))


def too_small(entry: dict, s: Settings) -> str:
    """Of the demonstrations in ``entry`` how many need more than the limits of ``s``, of each, and what fits all; empty
    where all fit."""
    needs, wanted, parts = entry.get("needs") or [], [], []
    bounds = [getattr(s, name) for name in NEEDS]
    for place, (name, bound) in enumerate(zip(NEEDS, bounds, strict=True)):
        if more := sum(need[-1] for need in needs if need[place] > bound):
            parts.append(f"{more} need more than {name}={bound}")
            wanted.append(f"{name}={max(need[place] for need in needs)}")
    over = sum(need[-1] for need in needs if any(n > bound for n, bound in zip(need, bounds, strict=False)))
    total = sum(need[-1] for need in needs)
    said = f"{over} of {total} demonstrations cannot be played to their end: {', '.join(parts)}"
    return f"{said}; set {' '.join(wanted)}" if parts else ""


def _grouped(others: list[dict]) -> str:
    """The places of each file and reason together: data.jsonl: line 3, line 9 (score 0, acc 0)."""
    places: dict[tuple[str, str], list[str]] = {}
    for other in others:
        file, _, place = other["place"].rpartition(": ")
        places.setdefault((file, other["reason"]), []).append(place)
    return "; ".join(f"{file}: {', '.join(rows)} ({reason})" for (file, reason), rows in places.items())


def failed(manifest: dict, s: Settings) -> bool:
    """Whether the files of ``manifest`` hold rows whose demonstration is not right or does not fit the limits of ``s``,
    or of which a wrong form is right."""
    entry = manifest.get("gold") or {}
    wrong = entry.get("right", 0) + entry.get("dropped", 0) < entry.get("demonstrations", 0)
    return wrong or bool(entry.get("taken")) or bool(too_small(entry, s))


# ---- processes


@dataclass(frozen=True)
class _Scored:
    """A demonstration's ``result``, how many wrong forms of it were scored, and the first that is right."""

    result: Result
    forms: int = 0
    taken: str = ""


def _scores(
    compute_score: Callable, rows: Sequence[Row], forms: Callable, repeats: bool, program: bool
) -> Iterator[_Scored | None]:
    """The score of each row's demonstration in order, None without one; over all cores where there are many rows."""
    chunks = [range(start, min(start + CHUNK, len(rows))) for start in range(0, len(rows), CHUNK)]
    cores = min(len(os.sched_getaffinity(0)), MOST_PROCESSES, len(chunks))
    fork = multiprocessing.get_context("fork")  # so that the rows need not be sent
    workers = []
    bar = tqdm(total=len(rows), desc="  gold check", unit=" rows", leave=False, mininterval=1, disable=None)
    try:
        for first in range(cores):
            ours, theirs = fork.Pipe(duplex=False)
            given = compute_score, rows, forms, repeats, program, chunks[first::cores], theirs
            process = fork.Process(target=_work, args=given)
            process.start()
            theirs.close()
            workers.append((process, ours))
        for number, chunk in enumerate(chunks):
            yield from workers[number % cores][1].recv()
            bar.update(len(chunk))
    except EOFError as error:
        raise DataError("a process of the gold check died (out of memory?)") from error
    finally:
        bar.close()
        for process, pipe in workers:
            process.terminate()
            process.join()
            pipe.close()


def _work(
    compute_score: Callable, rows: Sequence[Row], forms: Callable, repeats: bool, program: bool, chunks: list, pipe
) -> None:
    """Send the scores of each of ``chunks``, which end after MOST_SLOW demonstrations that took too long. A guarded
    process that hangs or dies is replaced; the new one first scores a demonstration that went well."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    guarded, loaded = Guarded(compute_score, rows, network=program, seconds=CALL_SECONDS), False
    with contextlib.closing(guarded):
        for chunk in chunks:
            scored: list[_Scored | None] = []
            for index in chunk:
                if not (text := rows[index].demonstration):
                    scored.append(None)
                    continue
                if not loaded:
                    guarded.known = index
                result = guarded.scores(text, [index])[0]
                loaded = loaded or not result.problem
                again = repeats and len(scored) < REPEATED
                formed = _forms_scored(guarded, index, result, forms, again) if result.right else _Scored(result)
                scored.append(formed)
                if sum(each is not None and _slow(each.result) for each in scored) == MOST_SLOW:
                    break
            pipe.send(scored)


def _forms_scored(guarded: Guarded, index: int, result: Result, forms: Callable, repeats: bool) -> _Scored:
    """``result``, of a right demonstration, with the scores of its wrong forms up to the first that is right. With
    ``repeats``, of an episode, also of repeated calls: they must not earn more than it, nor 1 without an answer."""
    try:
        for number, form in enumerate(made := list(forms(guarded.rows[index].demonstration)), 1):
            scored = guarded.scores(form, [index])[0]
            if scored.problem:
                return _Scored(Result(problem=f"a wrong form: {scored.problem}"), number)
            if scored.right:
                return _Scored(result, number, form)
    except Exception as error:
        return _Scored(Result(problem=f"wrong_forms: {errors.said(error)}", trace=errors.whole(error)))
    for what, form, answered in _repeats(guarded.rows[index].demonstration) if repeats else ():
        scored = guarded.scores(form, [index])[0]
        if scored.problem:
            return _Scored(Result(problem=f"{what}: {scored.problem}", trace=scored.trace), len(made))
        if scored.score > result.score + 1e-6 or (not answered and scored.score > 1 - 1e-6):
            return _Scored(result, len(made), f"{what}: {scored.score:g}")
    return _Scored(result, len(made))


def _slow(result: Result) -> bool:
    return "took longer than" in result.problem
