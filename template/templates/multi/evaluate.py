"""Evaluation of the task: the shared one (tasks/common/evaluation/main.py), which plays episodes."""

{% import "imports.jinja" as imports with context %}
{{ imports.sorted(["from tasks.common.evaluation.main import main"], "environment import Environment") }}
if __name__ == "__main__":
    main(environment=Environment)
