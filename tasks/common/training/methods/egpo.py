"""EGPO (Hao et al. 2025, arXiv 2508.05118): GRPO with the entropy of the reasoning in the advantage.

The term itself is in verl_plugins/egpo.py: verl hands no advantage estimator the entropy, a trainer has it.
"""

from verl_tasks.settings import Settings
from verl_tasks.training.methods import grpo

TRAINER, MODE = "verl_tasks.verl_plugins.egpo", "egpo"
ASYNC = False
warning = grpo.warning


def overrides(s: Settings) -> list[str]:
    """What EGPO sets in verl's config."""
    return [
        *grpo.overrides(s),
        f"+trainer.v1.egpo.egpo_lambda={s.EGPO_LAMBDA}",
        f"+trainer.v1.egpo.egpo_alpha={s.EGPO_ALPHA}",
    ]


def problem(config) -> str | None:
    """Why EGPO cannot train with verl's composed ``config`` (a DictConfig), in one line; None where it can."""
    if (config.algorithm.get("rollout_correction") or {}).get("bypass_mode"):
        return (
            "algorithm.rollout_correction.bypass_mode=True: skips the pass that gives METHOD=egpo the entropy; "
            "take another METHOD, or leave it off"
        )
    if not config.trainer.v1.egpo.egpo_alpha > 0:
        return f"trainer.v1.egpo.egpo_alpha={config.trainer.v1.egpo.egpo_alpha}: must be greater than 0"
    return grpo.problem(config)


def warning_after(metrics: dict[int, dict]) -> str | None:
    """What to know after a run with ``metrics`` (by step)."""
    shares = [step["egpo/no_reasoning_block"] for step in metrics.values() if "egpo/no_reasoning_block" in step]
    share = sum(shares) / max(1, len(shares))
    if not share:
        return None
    return f"METHOD=egpo: {share:.1%} of the responses have no <think> block; their whole response counted as reasoning"
