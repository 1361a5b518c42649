{% if cookiecutter.turns != "single" %}
{% set part = "evaluate" %}
{% include "multi.jinja" %}
{% else %}
"""Evaluation of the task: the shared one (tasks/common/evaluation/main.py) and the task's own metrics."""

{% set math = cookiecutter.reward == "math" %}
{% if math %}
import functools
{% endif %}
from collections import Counter

{% import "imports.jinja" as imports with context %}
{% set reader = ["math_answer"] if math else [] %}
{{ imports.sorted(["evaluate"] + reader, "reward import compute_score") }}

{% if math %}
@functools.cache  # the bootstrap asks for the same completions again and again
def _answer(response: str) -> str:
    found = math_answer.find_answer(response)
    return found.text if found else ""


{% endif %}
def metrics(scored: list[dict]) -> dict[str, float]:
    """The task's own metrics, from the sampled completions; every key of the reward is reported without them.

    ``commonest_answer``: share of the most frequent answer{{ "" if math else " (without thinking)" }}; a policy that collapsed comes near 1.
    """
{% if math %}
    answers = Counter(_answer(row["response"]) for row in scored)
{% else %}
    answers = Counter(row["response"].rpartition("</think>")[2].strip() for row in scored)
{% endif %}
    return {"commonest_answer": max(answers.values()) / len(scored)}


if __name__ == "__main__":
    evaluate(compute_score, metrics)
{% endif %}
