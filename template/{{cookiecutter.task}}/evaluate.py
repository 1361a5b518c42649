{% if cookiecutter.turns == "multi" %}
{% include "multi/evaluate.py" %}
{% else %}
"""Evaluation of the task: the shared one (tasks/common/evaluation/main.py) and the task's own metrics."""

from collections import Counter

{% import "imports.jinja" as imports with context %}
{{ imports.sorted(["from tasks.common.evaluation.main import main"], "reward import compute_score") }}

def metrics(scored: list[dict]) -> dict[str, float]:
    """The task's own metrics, from the sampled completions; every key of the reward is reported without them.

    ``commonest_answer``: share of the most frequent answer (without thinking); a policy that collapsed comes near 1.
    """
    answers = Counter(row["response"].rpartition("</think>")[2].strip() for row in scored)
    return {"commonest_answer": max(answers.values()) / len(scored)}


if __name__ == "__main__":
    main(compute_score, metrics)
{% endif %}
