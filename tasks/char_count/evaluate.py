"""Evaluation of the task: the shared one (tasks/common/evaluation/main.py) and the task's own metrics."""

from tasks.char_count.reward import compute_score
from tasks.common.evaluation.main import main


def metrics(scored: list[dict]) -> dict[str, float]:
    """The task's own metrics, from the sampled completions; every key of the reward is reported without them.

    ``different_answers``: answers (without thinking) that differ within all; a policy that collapsed comes near 0.
    """
    answers = {row["response"].rpartition("</think>")[2].strip() for row in scored}
    return {"different_answers": len(answers) / len(scored)}


if __name__ == "__main__":
    main(compute_score, metrics)
