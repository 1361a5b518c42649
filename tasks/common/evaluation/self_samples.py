"""What a policy's own samples are good for besides RL: pairs for DPO, and right responses to learn from by SFT.

SFT on right samples is rejection sampling (RFT; Yuan et al. 2023, arXiv 2308.01825); the pair of the best and the worst
of several samples is that of best-vs-worst DPO (e.g. Yuan et al. 2024, arXiv 2401.10020).
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from verl_tasks.data.prepare import needs_tools
from verl_tasks.evaluation.rollouts import SAMPLED, Rollout
from verl_tasks.evaluation.sample import Job, Scoring, report_errors, sampled, sampling
from verl_tasks.files import written_beside
from verl_tasks.rows import (
    DataError,
    Example,
    decoded,
    dpo_row,
    dpo_schema,
    sft_row,
    sft_schema,
    tools_of,
    write_parquet,
)
from verl_tasks.settings import Settings, SettingsError, artifacts

MOST_ACCEPTED = 4  # responses per prompt, so that easy prompts do not crowd out the others


def scored_by_prompt(rollouts: list[Rollout]) -> list[list[Rollout]]:
    """Of each prompt, in order, the sampled responses that have a reward, each text once."""
    prompts: dict[int, dict[str, Rollout]] = {}
    for rollout in rollouts:
        texts = prompts.setdefault(rollout.index, {})
        if rollout.mode == SAMPLED and rollout.reward is not None:
            texts.setdefault(rollout.response, rollout)
    return [list(texts.values()) for texts in prompts.values()]


def best_against_worst(rollouts: list[Rollout]) -> tuple[list[Example], int, int]:
    """For each prompt the response with the highest score against the one with the lowest, ``{"chosen", "rejected"}``
    as ground_truth; and the numbers of prompts left out: those whose responses all scored the same, and those with
    fewer than two different scored ones. The better one must have ended by itself. The worse one may be truncated;
    ``truncated`` then says so."""
    groups, examples = scored_by_prompt(rollouts), []
    several = [group for group in groups if len(group) > 1]
    for group in several:
        best = max((r for r in group if r.finish_reason == "stop"), key=_score, default=None)
        worst = min(group, key=_score)
        if best and _score(best) > _score(worst):
            cut = ["rejected"] if worst.finish_reason != "stop" else []
            examples.append(_example(best, {"chosen": _text(best), "rejected": _text(worst), "truncated": cut}))
    return examples, len(several) - len(examples), len(groups) - len(several)


def right_responses(rollouts: list[Rollout]) -> list[Example]:
    """Per prompt the first MOST_ACCEPTED different responses or episodes that are right (acc 1) and not cut off."""
    accepted = []
    for group in scored_by_prompt(rollouts):
        right = [r for r in group if r.reward["acc"] == 1 and r.finish_reason == "stop"]
        accepted += [_example(r, {}, r.messages or _text(r)) for r in right[:MOST_ACCEPTED]]
    return accepted


def _score(rollout: Rollout) -> float:
    return rollout.reward["score"]


def _text(rollout: Rollout) -> str:
    """The response as an assistant's message: with the ``<think>`` that the prompt ended in."""
    return ("<think>\n" if rollout.extra_info.get("think_opened") else "") + rollout.response


def _example(rollout: Rollout, ground_truth: dict, demonstration: str | list[dict] | None = None) -> Example:
    tools = tools_of({"extra_info": rollout.extra_info})
    return Example(decoded(rollout.prompt), ground_truth, demonstration, tools=tools)


def write_pairs(s: Settings, scoring: Scoring, model: str, out: str, number: str = "1") -> int:
    """``pairs MODEL OUT.parquet ROUND``: what `make train METHOD=dpo` trains on without PAIRS_FILE.

    Returns the number of completions on which the reward raised. Raises DataError, without OUT, when there is no pair.
    """
    if s.ROLLOUT_N < 2:
        raise SettingsError(f"ROLLOUT_N={s.ROLLOUT_N}: pairs of own samples need at least 2 samples per prompt")
    rollouts = _samples(s, scoring, model, Path(out), s.TRAIN_SEED, int(number))
    found, ties, unscored = best_against_worst(rollouts)
    counts = f"{len({r.index for r in rollouts})} prompts, {len(found)} pairs of the best and the worst of "
    counts += f"{s.ROLLOUT_N} samples, {ties} ties dropped"
    counts += f", {unscored} with fewer than two different scored samples" if unscored else ""
    if not found:
        raise DataError(
            f"{model}: no pair in its own samples ({counts}); raise SAMPLED_PROMPTS, ROLLOUT_N or MAX_RESPONSE_LENGTH, "
            "take easier data, or give PAIRS_FILE"
        )
    schema = dpo_schema(any(map(needs_tools, found)), truncated=True)
    write_parquet(map(dpo_row, found), Path(out), schema)
    print(f"  {counts}: {out}")
    return report_errors(rollouts)


def write_accepted(s: Settings, scoring: Scoring, model: str, out: str) -> int:
    """``accepted MODEL OUT.parquet``: demonstrations for SFT_SOURCE=samples. Returns and raises as ``write_pairs``."""
    rollouts = _samples(s, scoring, model, Path(out), s.SEED)
    found = right_responses(rollouts)
    counts = f"{len({r.index for r in rollouts})} prompts, {s.ROLLOUT_N} samples each, {len(found)} accepted"
    if not found:
        raise DataError(
            f"{model}: none of its own samples is right and complete ({counts}); raise SAMPLED_PROMPTS, ROLLOUT_N or "
            "MAX_RESPONSE_LENGTH, take easier data, or use SFT_SOURCE=task"
        )
    rows = (sft_row(example.messages(), example.demonstration, example.tools) for example in found)
    write_parquet(rows, Path(out), sft_schema(any(map(needs_tools, found)), episodes=bool(scoring.environment)))
    print(f"  {counts}: {out}")
    return report_errors(rollouts)


def chosen_prompts(count: int, wanted: int, number: int, seed: int) -> np.ndarray:
    """Which of ``count`` prompts round ``number`` (from 1) samples: ``wanted`` (0: all), ascending. Rounds have
    different prompts until all of them were sampled; then a new order begins."""
    if not 0 < wanted < count:
        return np.arange(count)
    generator = np.random.default_rng(seed)
    order, place = divmod(number - 1, count // wanted)
    orders = [generator.permutation(count) for _ in range(order + 1)]
    return np.sort(orders[-1][place * wanted : (place + 1) * wanted])


def _samples(s: Settings, scoring: Scoring, model: str, out: Path, seed: int, number: int = 1) -> list[Rollout]:
    """ROLLOUT_N responses of ``model`` to each training prompt of round ``number``, sampled as RL samples."""
    table = pq.read_table(s.train_file)
    prompts = out.with_name("prompts.parquet")
    with written_beside(prompts) as partial:
        pq.write_table(table.take(chosen_prompts(len(table), s.SAMPLED_PROMPTS, number, seed)), partial)
    how = replace(sampling(s), n=s.ROLLOUT_N, greedy=False, temperature=s.TEMPERATURE, top_p=1.0)
    how = replace(how, max_tokens=s.MAX_RESPONSE_LENGTH, seed=seed + number - 1)
    return sampled({"samples": Job.of(s, model, prompts, how)}, artifacts() / "samples" / s.TASK, scoring)["samples"]
