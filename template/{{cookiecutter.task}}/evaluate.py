"""Evaluation of {{ cookiecutter.task }}: the shared one (tasks/common/evaluate.py) and the task's own metrics."""

{% if cookiecutter.task < "common" -%}
from tasks.{{ cookiecutter.task }}.reward import compute_score
from tasks.common import evaluate
from tasks.common.reward import last_answer
{%- else -%}
from tasks.common import evaluate
from tasks.common.reward import last_answer
from tasks.{{ cookiecutter.task }}.reward import compute_score
{%- endif %}


def metrics(scored: list[dict]) -> dict[str, float]:
    """The task's own metrics, from the sampled completions; every key of the reward is reported without them.

    ``different_answers``: answers that differ within all; a policy that collapsed comes near 0.
    """
    return {"different_answers": len({last_answer(row["response"]) for row in scored}) / len(scored)}


if __name__ == "__main__":
    evaluate.main(compute_score, metrics)
