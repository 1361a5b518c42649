"""Rules over the metrics of an RL training. Each finds a bad step, names the likely cause and what to change.

The metrics are verl's, named alike in both versions, and are of the whole batch: the advantages show when no group has
variance, not how many groups have none.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import correlation, linear_regression, mean, median
from typing import NoReturn

from verl_tasks.ends import CUT, LENGTH, cut_key, readable, remedy
from verl_tasks.files import write_json
from verl_tasks.settings import HEALTH_RULES, Settings

OUTCOME = "outcome.json"  # of a run: why the trainer itself ended its last launch
WITHOUT = "no signal"  # an outcome
NO_SIGNAL = 64  # samples of the first steps
ENTROPY = 0.01  # nats per token
KL = (1e-4, 0.1)  # to the reference model
KL_STEPS = 10  # in a row below the band: at the start the policy is the reference
SPIKE = 5  # times the median gradient norm of the earlier steps
SPIKE_STEPS = 5  # earlier steps at least
BEFORE = 50  # earlier steps at most, of the median
MISMATCH = 0.01  # nats a token between the engine and the trainer; 0.0015 at most in the trainings of docs/results
MISMATCH_STEPS = 3  # in a row above it
TRUNCATED = 0.3  # share of the responses
TRUNCATION_STEPS = 2  # in a row above it: after a short warm-up, the first update teaches the policy to end
REWARD_STEPS = 3  # in a row with no reward at all, or little
FALL = 0.25  # of the best mean reward before
LUCK = 1.5  # standard errors of a step's mean, each prompt all right or all wrong: the best steps had luck too
MEMORY_STEPS = 12  # in a row in which memory grows
STEADY = 0.97  # correlation of memory and steps: what programs keep and give back goes up and down
# Of what verl measures, and its limit, which the trainer adds (verl_plugins/trainer.py).
MEMORIES = {"RAM": ("perf/cpu_memory_used_gb", "perf/cpu_memory_limit_gb")}
MEMORIES["GPU memory"] = "perf/max_memory_reserved_gb", "perf/gpu_memory_limit_gb"
FIRST = 3  # steps whose mean is the start; as many are the end
RISE, EXPLAINED = 0.1, 0.2  # of the mean reward; the least share of it that right answers must rise by
SHORT = 1 / 3  # of the start's response length
ALIKE = 0.5  # share of the prompts
SOLVED = 0.95  # share of right answers from which on samples are alike because they are right
NARROW, SURE = 0.1, 0.8  # of the start's entropy; the share of right answers from which on it may be sure, or short


@dataclass(frozen=True)
class Finding:
    """``rule`` fired at ``step``; ``text``: the observation, the likely cause and the variable to change."""

    rule: str
    step: int
    text: str

    def __str__(self) -> str:
        return f"{self.rule}: step {self.step}: {self.text}"


class Health:
    """The rules at each step of a training with ``s``, as its metrics come. It keeps the first and the last rows, at
    which the rules look, each with its ``step``, the ``best`` mean reward of REWARD_STEPS steps before, and the
    ``lowest`` and ``highest`` score so far (0 and 1 are possible ones)."""

    def __init__(self, s: Settings):
        self.s, self.rows = s, []

    def findings(self, step: int, row: dict) -> list[Finding]:
        """Findings at ``step``, the last one so far, with the metrics ``row``."""
        rows = self.rows
        while rows and rows[-1]["step"] >= step:  # trained again
            rows.pop()
        means = [each.get("critic/score/mean", -math.inf) for each in rows[-REWARD_STEPS:]]
        last = rows[-1] if rows else {"best": -math.inf, "lowest": 0.0, "highest": 1.0}
        now = {
            "step": step,
            "best": max(last["best"], mean(means)) if means else last["best"],
            "lowest": min(last["lowest"], row.get("critic/score/min", 0.0)),
            "highest": max(last["highest"], row.get("critic/score/max", 1.0)),
        }
        rows.append(row | now)
        del rows[FIRST : -BEFORE - 1]
        rules = {name: globals()[f"_{name}"](rows[-1], rows, self.s) for name in HEALTH_RULES}
        return [Finding(name, step, text) for name, texts in rules.items() for text in texts]

    def all(self, metrics: dict[int, dict]) -> list[Finding]:
        """Findings in ``metrics`` (``runs.read_metrics``: by step, in order)."""
        return [found for step, row in metrics.items() for found in self.findings(step, row)]


class AbortedError(RuntimeError):
    """A rule of ABORT_ON ended the training; the text is one line for the user."""


def no_signal(scores: list[dict], groups: list, cut: list[bool], s: Settings) -> str:
    """Why RL has nothing, or partial credit alone, to learn from the first rollouts after a warm-up; else empty.
    ``scores``: of each sample, with ``acc`` and perhaps ``format``; ``groups``: its prompt; ``cut``: cut off."""
    of = defaultdict(set)
    for group, each in zip(groups, scores, strict=True):
        of[group].add(each["score"])
    right, differ = sum(each["acc"] >= 1 for each in scores), any(len(found) > 1 for found in of.values())
    if right and (s.ROLLOUT_N == 1 or s.METHOD == "ppo" or differ):
        return ""
    lost = [(each, off) for each, off in zip(scores, cut, strict=True) if each["acc"] < 1]
    off = sum(off for _, off in lost)
    ends = Counter(end for each, _ in lost for end in CUT if each.get(cut_key(end)))
    if not ends:  # of single responses
        ends = Counter({LENGTH: off})
    counts = {"cut off": off, "unreadable": sum(not readable(each) for each, off in lost if not off)}
    counts["wrong"] = len(lost) - sum(counts.values())
    worst = max(counts, key=counts.get)
    ways = {"cut off": remedy(ends.most_common(1)[0][0]), "unreadable": f"SFT_LR={s.SFT_LR:g}"}
    way = ways.get(worst) or _easier(s) if lost else "take harder problems"
    said = ", ".join(f"{count} {name}" for name, count in counts.items() if count > 0)
    what = f"none of {len(scores)} samples is right" if not right else f"all {len(of)} groups have one reward"
    first = f"raise SFT_STEPS={s.SFT_STEPS}" if not right else "raise TEMPERATURE or ROLLOUT_N"
    lesson = "partial credit alone" if differ else "nothing"
    return f"after the warm-up {what} ({said or 'all right'}): RL has {lesson} to learn from; {first}, or {way}"


def aborted_by(found: list[Finding], s: Settings) -> Finding | None:
    """Which of the findings at a step ends the training: the first of a rule in ABORT_ON."""
    return next((each for each in found if each.rule in s.ABORT_ON.split(",")), None)


def abort(run_dir: Path, reason: str, outcome: str = "aborted") -> NoReturn:
    """End the training of ``run_dir``: write the ``reason`` to its outcome.json and raise AbortedError."""
    write_json(run_dir / OUTCOME, {"outcome": outcome, "reason": reason})
    raise AbortedError(reason)


def newest_by_rule(found: list[Finding]) -> list[Finding]:
    """The last finding of each rule, in order of the steps."""
    return sorted({finding.rule: finding for finding in found}.values(), key=lambda finding: finding.step)


# ---- rules: the problem of a step, the last of all so far


def _for_steps(count: int, rows: list[dict], holds: Callable[[dict], bool]) -> bool:
    """Whether there are ``count`` steps, and ``holds`` is true of the last ``count``."""
    return len(rows) >= count and all(map(holds, rows[-count:]))


# Means over the tokens that count. Where none does (TRUNCATED=masked, ROLLOUT_CORRECTION=sequence), nothing is trained.
_OF_TOKENS = ("critic/advantages/", "critic/returns/", "critic/values/", "critic/vf_explained_var", "actor/entropy")


def _nan(row: dict, rows: list[dict], s: Settings) -> Iterator[str]:
    if s.TRUNCATED == "masked" and row.get("response_length/clip_ratio") == 1:
        return  # no token counts
    idle = row.get("actor/grad_norm") == 0 and math.isfinite(row.get("critic/score/mean", math.nan))
    bad = [n for n, v in row.items() if isinstance(v, float) and not math.isfinite(v)]
    names = [
        n for n in bad if n.startswith(("actor/", "critic/", "train/")) and not (idle and n.startswith(_OF_TOKENS))
    ]
    if names:
        yield f"{', '.join(names[:3])}: not a finite number; the training has diverged, or a reward is NaN: lower LR"


def _collapse(row: dict, rows: list[dict], s: Settings) -> Iterator[str]:
    if (value := row.get("actor/entropy", 1.0)) < ENTROPY and row.get("answers/right", 0.0) < SOLVED:
        yield (
            f"entropy {value:.4f} < {ENTROPY}: the policy has collapsed, its samples are all alike; lower LR, set "
            "KL_COEF, or raise TEMPERATURE"
        )


def _kl_of(row: dict) -> float:
    """KL to the reference model: of the loss (GRPO and similar methods), or of the penalty on the reward (PPO).

    NaN without a KL term, because there is no reference model.
    """
    return row.get("actor/kl_loss", row.get("actor/reward_kl_penalty", math.nan))


def _kl(row: dict, rows: list[dict], s: Settings) -> Iterator[str]:
    low, high = KL
    if (value := _kl_of(row)) > high:
        yield f"KL to the start {value:.3f} > {high}: the policy has left its start; lower LR, or raise KL_COEF"
    # A step of CRITIC_WARMUP has no gradient of the policy, which stays at its start.
    if _for_steps(KL_STEPS, rows, lambda each: "actor/grad_norm" in each and abs(_kl_of(each)) < low):
        still = f"KL to the start below {low:g} for {KL_STEPS} steps: the policy hardly moves"
        yield f"{still}; raise LR, or lower KL_COEF={s.KL_COEF:g}"


def _spike(row: dict, rows: list[dict], s: Settings) -> Iterator[str]:
    norms = [each["actor/grad_norm"] for each in rows[-BEFORE - 1 : -1] if each.get("actor/grad_norm", 0.0) > 0]
    value = row.get("actor/grad_norm", 0.0)
    if len(norms) >= SPIKE_STEPS and SPIKE * median(norms) < value < math.inf:
        times = f"{value / median(norms):.1f} times its median before"
        yield f"gradient norm {value:.3g}, {times}: an unstable step; lower LR, or raise TRAIN_BATCH_SIZE"


def _mismatch(row: dict, rows: list[dict], s: Settings) -> Iterator[str]:
    key = "rollout_corr/k3_kl"
    if _for_steps(MISMATCH_STEPS, rows, lambda each: each.get(key, 0.0) > MISMATCH):
        advice = {
            "none": "set ROLLOUT_CORRECTION=token",
            "token": "try ROLLOUT_CORRECTION=sequence",
            "sequence": "ROLLOUT_CORRECTION cannot correct this",
        }
        if s.STACK == "a100":  # whose verl cannot mask sequences
            advice["token"] = advice["sequence"]
        yield (
            f"KL between the log-probs of engine and trainer {row[key]:.3g} > {MISMATCH} for {MISMATCH_STEPS} steps: "
            "the samples are another policy's, by precision, kernels or ARGS of the rollout (top_p, quantization); "
            f"{advice[s.ROLLOUT_CORRECTION]}, and lower LR"
        )


def _zero_variance(row: dict, rows: list[dict], s: Settings) -> Iterator[str]:
    # GRPO's advantages are 0 in a group whose scores are all the same. A critic's are not, nor a teacher's.
    ends = [row.get(f"critic/advantages/{end}") for end in ("min", "max")]
    if s.METHOD in ("ppo", "distill") or s.ROLLOUT_N == 1 or ends != [0, 0]:
        return
    none = "all advantages are 0: in every group the samples have the same score"
    if (right := row.get("answers/right", 0.0)) >= SOLVED:
        yield f"{none}, and {right:.1%} of the samples are right: nothing is left to learn; take harder problems"
    else:
        yield (
            f"{none}, which teaches nothing; raise ROLLOUT_N or TEMPERATURE, or train on the prompts with signal "
            "(make probe FILTER=1, TRAIN_FILE)"
        )


def _warm_up(s: Settings) -> str:
    return f"warm up longer than SFT_STEPS={s.SFT_STEPS}" if s.INIT == "sft" else "warm up with INIT=sft"


def _easier(s: Settings) -> str:
    return "take easier problems" if s.DIFFICULTY == "easy" else "take DIFFICULTY=easy"


def _cuts(row: dict) -> dict[str, float]:
    """The shares of the episodes that each of CUT ended."""
    return {end: row.get(f"episode/{cut_key(end)}", 0.0) for end in CUT}


def _truncation(row: dict, rows: list[dict], s: Settings) -> Iterator[str]:
    if "episode/turns" in row:
        if _for_steps(TRUNCATION_STEPS, rows, lambda each: sum(_cuts(each).values()) > TRUNCATED):
            cuts = sorted(((share, end) for end, share in _cuts(row).items() if share), reverse=True)
            parts = ", ".join(f"{share:.0%} by {CUT[end]}={getattr(s, CUT[end])} ({end})" for share, end in cuts)
            yield f"episodes are cut off: {parts}; {remedy(cuts[0][1])}, or {_warm_up(s)}"
        return

    def cut_off(each: dict) -> bool:
        # verl counts the responses as long as the longest of the batch; they are cut off where that is the limit.
        longest = each.get("response_length/max", 0)
        return each.get("response_length/clip_ratio", 0.0) > TRUNCATED and longest >= s.MAX_RESPONSE_LENGTH

    if _for_steps(TRUNCATION_STEPS, rows, cut_off):
        yield (
            f"{row['response_length/clip_ratio']:.0%} of the responses are cut off at MAX_RESPONSE_LENGTH="
            f"{s.MAX_RESPONSE_LENGTH}: too short, or the policy does not end; raise it, or {_warm_up(s)}"
        )


def _failed(row: dict, rows: list[dict], s: Settings) -> Iterator[str]:
    if share := row.get("episode/failed", 0):
        why = "why is in the training's log; of a program, in programs-*.log beside it"
        yield f"{share:.1%} of the episodes failed, without a score of their program or environment; {why}"


def _no_reward(row: dict, rows: list[dict], s: Settings) -> Iterator[str]:
    def none(each: dict) -> bool:
        low, high = (each.get(f"critic/score/{end}", math.nan) for end in ("min", "max"))
        return low == high and each.get("answers/right", float(high >= each["highest"])) < SOLVED

    if s.METHOD != "distill" and _for_steps(REWARD_STEPS, rows, none):
        right = row.get("answers/right")
        said = "" if right is None else f", and {right:.1%} are right"
        cause = "the task is too hard for this start, or its answers are not recognised"
        way = f"{cause}; {_warm_up(s)}, {_easier(s)}, and look at the rollouts"
        if right:
            way = "right answers earn no more than wrong ones; look at the rollouts, and mend the reward"
        yield f"every sample scored {row['critic/score/max']:g} for {REWARD_STEPS} steps{said}: {way}"


def _fall(row: dict, rows: list[dict], s: Settings) -> Iterator[str]:
    key = "critic/score/mean"
    best, worst = row["best"], row["lowest"]  # a score may be negative
    least = worst + FALL * (best - worst)
    if s.METHOD == "distill" or not worst < best < math.inf:
        return
    luck = LUCK * math.sqrt(max(0.0, (best - worst) * (row["highest"] - best)) / s.TRAIN_BATCH_SIZE)
    least = min(least, best - luck)
    if _for_steps(REWARD_STEPS, rows, lambda each: each.get(key, best) < least):
        where = f"{least:.3g}, the best ones had {best:.3g}"
        fell = f"reward {row[key]:.3g}, for {REWARD_STEPS} steps below {where}"
        yield f"{fell}: the policy has unlearned; lower LR or set LR_WARMUP=3, and start again"


def _memory(row: dict, rows: list[dict], s: Settings) -> Iterator[str]:
    for what, (key, limit) in MEMORIES.items():
        used = [each.get(f"actor/{key}", each.get(key)) for each in rows[-MEMORY_STEPS:]]
        if len(used) < MEMORY_STEPS or None in used or not all(map(math.isfinite, [*used, row.get(limit, math.nan)])):
            continue
        if len(set(used)) == 1 or correlation(range(MEMORY_STEPS), used) < STEADY:
            continue
        slope = linear_regression(range(MEMORY_STEPS), used).slope
        end = row["step"] + math.floor((row[limit] - used[-1]) / slope)
        if end < s.STEPS:
            grows = f"{what} grows by {slope:.2g} GiB a step, to {used[-1]:.0f} of {row[limit]:.0f} GiB"
            fix = f"stop after a checkpoint (SAVE_FREQ={s.SAVE_FREQ}) and run the same command again"
            yield f"{grows}: it is used up at step {end} of {s.STEPS}; {fix}"


def _ends(key: str, rows: list[dict]) -> tuple[float, float]:
    """The mean of ``key`` over the first and the last FIRST ``rows``; NaN where a step lacks it, or they overlap."""
    if len(rows) < 2 * FIRST:
        return math.nan, math.nan
    return tuple(mean(each.get(key, math.nan) for each in part) for part in (rows[:FIRST], rows[-FIRST:]))


def _hollow(row: dict, rows: list[dict], s: Settings) -> Iterator[str]:
    (first, last), (wrong, right) = (_ends(key, rows) for key in ("critic/score/mean", "answers/right"))
    # A right answer earns 1, or what the scores span where that is more. Where nearly all are right, few can become so.
    rise, more = (last - first) / (row["highest"] - row["lowest"]), right - wrong
    hollow = rise > RISE and more < EXPLAINED * min(rise, 1 - wrong)
    if hollow or (more < -RISE and rise > more / 2):
        yield (
            f"reward {'rose' if hollow else 'went'} from {first:.3g} to {last:.3g}, right answers from {wrong:.1%} to "
            f"{right:.1%}: the policy learns what the reward pays besides; look at the rollouts, run make attack, pay "
            "less partial credit"
        )


def _short(row: dict, rows: list[dict], s: Settings) -> Iterator[str]:
    def length(each: dict) -> float:  # an episode of fewer turns may think as much in each
        return each.get("response_length/mean", math.nan) / max(1.0, each.get("episode/turns", 1.0))

    def cut(each: dict) -> float:
        if "episode/turns" in each:
            return sum(_cuts(each).values())
        return each.get("response_length/clip_ratio", math.nan)

    first = mean(map(length, rows[:FIRST]))
    # Where many were cut off at the start, the policy has to learn to end. Where most are right, it gives up nothing.
    long = len(rows) >= 2 * FIRST and not mean(map(cut, rows[:FIRST])) > TRUNCATED
    long = long and row.get("answers/right", 0.0) < SURE
    if long and _for_steps(FIRST, rows, lambda each: length(each) < SHORT * first):
        yield (
            f"{'turns' if 'episode/turns' in row else 'responses'} of {length(row):.0f} tokens in the mean, "
            f"{first:.0f} at the start: the policy no longer thinks, or gives up; look at the rollouts, run make "
            "attack, pay nothing for a wrong answer, lower LR or set KL_COEF"
        )


def _alike(row: dict, rows: list[dict], s: Settings) -> Iterator[str]:
    key = "answers/alike"
    if _for_steps(FIRST, rows, lambda each: each.get(key, 0.0) > ALIKE):
        yield (
            f"of {row[key]:.0%} of the prompts all samples are the same wrong response: nothing new is tried; start "
            "again from an earlier step with a lower LR or KL_COEF, or raise TEMPERATURE"
        )


def _narrow(row: dict, rows: list[dict], s: Settings) -> Iterator[str]:
    key = "actor/entropy"
    first = _ends(key, rows)[0]
    unsure = row.get("answers/right", 1.0) < SURE
    if unsure and _for_steps(FIRST, rows, lambda each: each.get(key, first) < NARROW * first):
        yield (
            f"entropy {row[key]:.3f}, {first:.3g} at the start, with {row['answers/right']:.1%} right: the samples of "
            "a prompt become alike, which leaves nothing to learn from; lower LR, set KL_COEF, or raise TEMPERATURE"
        )
