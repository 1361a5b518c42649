"""Evaluation of {{ cookiecutter.task }}: the shared one (tasks/common/evaluate.py) and the task's own metrics."""

{% if cookiecutter.task < "common" -%}
from tasks.{{ cookiecutter.task }}.reward import compute_score
from tasks.common import evaluate
{%- else -%}
from tasks.common import evaluate
from tasks.{{ cookiecutter.task }}.reward import compute_score
{%- endif %}


def metrics(scored: list[dict]) -> dict[str, float]:
    """The task's own metrics, from the sampled completions with their rewards."""
    return {"format": sum(row["reward"]["format"] for row in scored) / len(scored)}


if __name__ == "__main__":
    evaluate.main(compute_score, metrics)
