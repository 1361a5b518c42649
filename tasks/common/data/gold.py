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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tqdm import tqdm

from tasks.common.data.rows import DataError
from tasks.common.guarded import CALL_SECONDS, Guarded, Result, asks_judge
from tasks.common.process import die_with_parent
from tasks.common.settings import Settings, code_digest
from tasks.common.text import one_line

SHOWN = 10  # wrong demonstrations that are named
FORMS_SHOWN = 3  # wrong forms in the line
CHUNK = 512  # rows that a process scores at a time; fewer rows take one process
MOST_PROCESSES = 16
MOST_SLOW = 3  # demonstrations that take too long before the check ends


@dataclass(frozen=True)
class Row:
    """What a row's reward gets; ``place``: where the row comes from, for people. Of a multi-turn task ``demonstration``
    is the JSON list of the model's messages, and ``extra`` the whole RL row."""

    place: str
    demonstration: str | None
    truth: str
    source: str
    extra: dict


def check(s: Settings, rows: Sequence[Row]) -> tuple[dict, set[int]]:
    """Score the demonstrations of ``rows``. Returns the manifest's entry, and the indices of those that are not right.

    The entry: ``rows``, ``demonstrations`` (rows that have one), ``right`` (``acc`` 1, or a score of 1 where the reward
    has no ``acc``), ``others`` (the first SHOWN others: ``place`` and ``reason``), ``note`` (why not all were checked),
    ``reward`` (its digest); where the reward's module has ``wrong_forms``, ``forms`` (how many of right demonstrations
    were scored) and ``taken`` (the first SHOWN that are right too: ``place`` and ``form``).
    """
    entry = {"reward": code_digest(s.reward_file), "rows": len(rows), "demonstrations": 0, "right": 0, "others": []}
    entry |= {"note": "", "forms": 0, "taken": []}
    try:
        module = importlib.import_module(f"tasks.{s.TASK}.{s.reward_file.stem}")
        compute_score = module.Environment if s.multi_turn else module.compute_score
    except Exception as error:  # `make data` has refused it before
        return entry | {"note": f"not checked: {s.reward_file.name} cannot be loaded ({type(error).__name__})"}, set()
    if asks_judge(compute_score):
        return entry | {"note": "not checked: the reward asks a judge"}, set()
    forms = getattr(module, "wrong_forms", lambda demonstration: ())
    if s.multi_turn:
        compute_score, forms = functools.partial(_episode, compute_score), functools.partial(_of_messages, forms)
    elif s.REWARD:
        compute_score = functools.partial(compute_score, variant=s.REWARD)
    wrong: dict[int, str] = {}  # why, by index
    slow = 0
    for index, scored in enumerate(_scores(compute_score, rows, forms)):
        if scored is None:
            continue
        result = scored.result
        entry["demonstrations"] += 1
        entry["forms"] += scored.forms
        if scored.taken and len(entry["taken"]) < SHOWN:
            entry["taken"].append({"place": rows[index].place, "form": _end(scored.taken)})
        if result.right:
            entry["right"] += 1
            continue
        wrong[index] = _reason(result)
        slow += _slow(result)
        if slow == MOST_SLOW:
            entry["note"] = f"ended at row {index + 1} of {len(rows)}: {slow} took longer than {CALL_SECONDS:g} s"
            break
    if not entry["demonstrations"]:
        entry["note"] = "not checked: no demonstrations"
    others = ({"place": rows[index].place, "reason": reason} for index, reason in wrong.items())
    return entry | {"others": heapq.nsmallest(SHOWN, others, key=_in_file)}, set(wrong)


def _episode(made: type, source: str, demonstration: str, truth: str, row: dict) -> dict:
    """A reward's result for the episode of ``demonstration``; right only where it ends with its last message."""
    # By name, as a task's own reward: rewards/ is above this room.
    environment = importlib.import_module("tasks.common.rewards.environment")
    reward, _, done = environment.replayed(made, row, json.loads(demonstration))
    return {"score": reward, "acc": float(done and reward >= environment.SUCCESS)}


def _of_messages(forms: Callable, demonstration: str) -> list[str]:
    """``wrong_forms`` of an episode: of the model's messages."""
    return [json.dumps(messages) for messages in forms(json.loads(demonstration))]


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
        return one_line(result.problem, 120)
    parts = {"score": result.score, "acc": result.acc, "format": result.format}
    return ", ".join(f"{name} {value:g}" for name, value in parts.items() if value is not None)


def said(entry: dict) -> str:
    """The manifest's entry in one line."""
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
        text += "; wrong forms that get it too: "
        text += "; ".join(f"{each['place']} ({each['form']})" for each in taken[:FORMS_SHOWN])
    left_out = f"{entry['dropped']} rows left out (GOLD=drop)" if entry.get("dropped") else ""
    return "; ".join(filter(None, [text, left_out, entry["note"]]))


def _grouped(others: list[dict]) -> str:
    """The places of each file and reason together: data.jsonl: line 3, line 9 (score 0, acc 0)."""
    places: dict[tuple[str, str], list[str]] = {}
    for other in others:
        file, _, place = other["place"].rpartition(": ")
        places.setdefault((file, other["reason"]), []).append(place)
    return "; ".join(f"{file}: {', '.join(found)} ({reason})" for (file, reason), found in places.items())


def failed(manifest: dict) -> bool:
    """Whether the files of ``manifest`` hold rows whose demonstration is not right, or of which a wrong form is."""
    entry = manifest.get("gold") or {}
    wrong = entry.get("right", 0) + entry.get("dropped", 0) < entry.get("demonstrations", 0)
    return wrong or bool(entry.get("taken"))


# ---- processes


@dataclass(frozen=True)
class _Scored:
    """A demonstration's ``result``, how many wrong forms of it were scored, and the first that is right."""

    result: Result
    forms: int = 0
    taken: str = ""


def _scores(compute_score: Callable, rows: Sequence[Row], forms: Callable) -> Iterator[_Scored | None]:
    """The score of each row's demonstration in order, None without one; over all cores where there are many rows."""
    chunks = [range(start, min(start + CHUNK, len(rows))) for start in range(0, len(rows), CHUNK)]
    cores = min(len(os.sched_getaffinity(0)), MOST_PROCESSES, len(chunks))
    fork = multiprocessing.get_context("fork")  # so that the rows need not be sent
    workers = []
    bar = tqdm(total=len(rows), desc="  gold check", unit=" rows", leave=False, mininterval=1, disable=None)
    try:
        for first in range(cores):
            ours, theirs = fork.Pipe(duplex=False)
            process = fork.Process(target=_work, args=(compute_score, rows, forms, chunks[first::cores], theirs))
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


def _work(compute_score: Callable, rows: Sequence[Row], forms: Callable, chunks: list[range], pipe) -> None:
    """Send the scores of each of ``chunks``, which end after MOST_SLOW demonstrations that took too long. A guarded
    process that hangs or dies is replaced; the new one first scores a demonstration that went well."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    guarded, loaded = Guarded(compute_score, rows, seconds=CALL_SECONDS), False
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
                scored.append(_forms_scored(guarded, index, result, forms) if result.right else _Scored(result))
                if sum(each is not None and _slow(each.result) for each in scored) == MOST_SLOW:
                    break
            pipe.send(scored)


def _forms_scored(guarded: Guarded, index: int, result: Result, forms: Callable) -> _Scored:
    """``result``, of a right demonstration, with the scores of its wrong forms up to the first that is right."""
    try:
        for number, form in enumerate(made := list(forms(guarded.rows[index].demonstration)), 1):
            found = guarded.scores(form, [index])[0]
            if found.problem:
                return _Scored(Result(problem=f"a wrong form: {found.problem}"), number)
            if found.right:
                return _Scored(result, number, form)
    except Exception as error:
        return _Scored(Result(problem=f"wrong_forms: {type(error).__name__}: {error}"))
    return _Scored(result, len(made))


def _slow(result: Result) -> bool:
    return "took longer than" in result.problem
