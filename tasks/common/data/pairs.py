"""Preference pairs for DPO: read from a file of any form, turned into token ids, and split off for validation."""

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from verl_tasks.data.convert import dpo_example
from verl_tasks.data.formats import FIELDS, conversation
from verl_tasks.data.prepare import prompt_text
from verl_tasks.data.records import Records
from verl_tasks.models.chat_template import answer_ids, opens_thinking, prompt_ids
from verl_tasks.rows import DataError, Example, decoded, dpo_schema, messages_problem, tools_of
from verl_tasks.settings import Settings

ANSWERS = ("chosen", "rejected")
HELD_OUT = 256  # pairs are enough: the accuracy is then known to 6 points (95 %)


@dataclass(frozen=True)
class TokenPair:
    """A pair as token ids (int32, one dimension); each answer has its end-of-turn tokens unless it was cut off.
    ``problem``: the same text for all prompts that pose the same problem."""

    prompt: np.ndarray
    chosen: np.ndarray
    rejected: np.ndarray
    problem: str

    def __len__(self) -> int:
        """Tokens of the prompt and the longer answer."""
        return len(self.prompt) + max(len(self.chosen), len(self.rejected))

    def preference(self, reverse: bool = False) -> tuple[str, bytes, bytes]:
        """What it says, for a set: the problem, then the better and the worse answer; ``reverse``: the opposite."""
        answers = self.chosen.tobytes(), self.rejected.tobytes()
        return self.problem, *(answers[::-1] if reverse else answers)


def pairs_columns(s: Settings) -> dict[str, str]:
    """The columns that PAIRS_COLUMNS names. Raises DataError where it names no field of a pair."""
    named = dict(each.partition("=")[::2] for each in s.PAIRS_COLUMNS.replace(" ", "").split(",") if each)
    known = [field for field in FIELDS if field != "answer"]
    if not named.keys() <= {*known} or not all(named.values()):
        raise DataError(f"PAIRS_COLUMNS={s.PAIRS_COLUMNS}: must be FIELD=COLUMN,… with fields {', '.join(known)}")
    return named


def read_pairs(
    path: Path | str, columns: dict[str, str] | None = None, unused: set | None = None
) -> Iterator[tuple[str, Example | None]]:
    """Each row of ``path`` with its place, as an Example whose ground_truth is ``{"chosen", "rejected"}``, both text,
    and perhaps ``truncated``, the names of those cut at the length limit. None where the two answers are the same.

    ``path``: a parquet file of ours (``dpo_schema``), or any form that formats.py knows, with ``columns`` named. To
    ``unused`` go the columns that were not read. DataError names file and row.
    """
    records = Records(path)
    # The tools of our own file stay as they are: a prompt must be the one that the policy was sampled on.
    own = _is_own(records.path)
    yield from records.converted(_own_pair if own else lambda record: dpo_example(conversation(record, columns)))
    if unused is not None and not own:
        unused.update(records.unused)


def _is_own(path: Path) -> bool:
    forms = [dpo_schema(tools, truncated) for tools in (False, True) for truncated in (False, True)]
    with suppress(pa.ArrowException, OSError):  # Records reports the file's error
        return path.suffix.lower() == ".parquet" and pq.read_schema(path) in forms
    return False


def _own_pair(record: dict) -> Example | None:
    for name in ("prompt", *ANSWERS):
        if problem := messages_problem(record[name]):
            raise DataError(f"column {name}: {problem}")
    if any(len(record[name]) > 1 or record[name][0]["role"] != "assistant" for name in ANSWERS):
        raise DataError("columns chosen and rejected: must be one message of the assistant each")
    try:
        tools = tools_of(record)
    except ValueError as error:
        raise DataError(f"column tools: is not JSON ({error})") from error
    truth = {name: record[name][0]["content"] for name in ANSWERS}
    if truth["chosen"] == truth["rejected"]:
        return None
    cut = {"truncated": record["truncated"]} if record.get("truncated") else {}
    return Example(decoded(record["prompt"]), truth | cut, tools=tools)


def token_pairs(
    path: Path | str, tokenizer, limit: int, columns: dict[str, str] | None = None, unused: set | None = None
) -> tuple[list[TokenPair], Counter]:
    """The pairs of ``path`` with at most ``limit`` tokens, rendered as in evaluation, RL and SFT (chat_template.py).

    Also counts of dropped rows by reason: same_answers, refused_by_chat_template, empty_answer, too_long, and
    contradicting: the prompt has the same answers the other way round too, and nothing says which is meant.
    """
    kept: list[TokenPair] = []
    left_out: Counter = Counter()
    for _, pair in read_pairs(path, columns, unused):
        if pair is None:
            left_out["same_answers"] += 1
            continue
        try:
            tokens = _tokens(tokenizer, pair)
        except ValueError:
            left_out["refused_by_chat_template"] += 1
            continue
        if not (len(tokens.chosen) and len(tokens.rejected)):  # cut off, and with special tokens only
            left_out["empty_answer"] += 1
        elif len(tokens) > limit:
            left_out["too_long"] += 1
        else:
            kept.append(tokens)
    preferred = {pair.preference() for pair in kept}
    clear = [pair for pair in kept if pair.preference(reverse=True) not in preferred]
    if len(clear) < len(kept):
        left_out["contradicting"] = len(kept) - len(clear)
    return clear, left_out


def _tokens(tokenizer, pair: Example) -> TokenPair:
    prompt = prompt_ids(tokenizer, pair.messages(), pair.tools)
    opened = opens_thinking(tokenizer, prompt)
    cut = pair.ground_truth.get("truncated", ())
    answers = (answer_ids(tokenizer, pair.ground_truth[name], opened, name not in cut) for name in ANSWERS)
    return TokenPair(*(np.array(ids, dtype=np.int32) for ids in (prompt, *answers)), prompt_text(pair))


@dataclass(frozen=True)
class PairSet:
    """The pairs of a training. ``held_out``: pairs of other prompts, for margin and accuracy; ``said``: the counts."""

    train: list[TokenPair]
    held_out: list[TokenPair]
    said: str


def pair_set(s: Settings, path: Path | str, tokenizer) -> PairSet:
    """The pairs of ``path`` for a training with ``s``: a tenth of the prompts is held out, chosen by SEED.

    Raises DataError as ``read_pairs``, and when fewer pairs than TRAIN_BATCH_SIZE are left.
    """
    limit = s.MAX_PROMPT_LENGTH + s.MAX_RESPONSE_LENGTH
    unused: set[str] = set()
    kept, left_out = token_pairs(path, tokenizer, limit, pairs_columns(s) if s.PAIRS_FILE else None, unused)
    train, held_out = _split(kept, s.SEED, s.N_GPUS)
    reasons = ", ".join(f"{count} {reason}" for reason, count in left_out.items()) or "none left out"
    if len(train) < s.TRAIN_BATCH_SIZE:
        more = "PAIRS_FILE needs more pairs" if s.PAIRS_FILE else "raise SAMPLED_PROMPTS"
        advice = "raise MAX_PROMPT_LENGTH or MAX_RESPONSE_LENGTH" if left_out["too_long"] else more
        raise DataError(
            f"{path}: {len(kept)} pairs ({reasons}; {len(held_out)} held out; limit MAX_PROMPT_LENGTH + "
            f"MAX_RESPONSE_LENGTH = {limit} tokens) are less than TRAIN_BATCH_SIZE={s.TRAIN_BATCH_SIZE}; {advice}, "
            "or lower TRAIN_BATCH_SIZE"
        )
    reasons += f"; not used: {', '.join(sorted(unused))}" if unused else ""
    return PairSet(train, held_out, f"{len(train)} pairs, {len(held_out)} held out ({reasons})")


def steps(s: Settings, pairs: PairSet) -> int:
    """Optimizer steps of DPO_EPOCHS epochs; the rest of an epoch that fills no batch is left out."""
    return s.DPO_EPOCHS * (len(pairs.train) // s.TRAIN_BATCH_SIZE)


def _split(kept: list[TokenPair], seed: int, processes: int) -> tuple[list[TokenPair], list[TokenPair]]:
    """Pairs to train on, and those that are held out: a tenth of the prompts, evenly among ``processes``.

    Fewer prompts where these have HELD_OUT pairs. All pairs of a prompt stay together. With fewer than ten prompts none
    is held out.
    """
    counts = Counter(pair.problem for pair in kept)
    order, prompts = np.random.default_rng(seed).permutation(len(counts)), list(counts)
    tenth = [prompts[index] for index in order[: len(prompts) // 10]]
    before = accumulate((counts[prompt] for prompt in tenth), initial=0)
    apart = {prompt for prompt, pairs in zip(tenth, before, strict=False) if pairs < HELD_OUT}
    held_out = [pair for pair in kept if pair.problem in apart]
    held_out = held_out[: len(held_out) // processes * processes]
    return [pair for pair in kept if pair.problem not in apart], held_out
