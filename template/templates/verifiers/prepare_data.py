"""Where the problems come from: the rows of the environment."""

{% import "imports.jinja" as imports with context %}
{% set common = ["from tasks.common.data import prepare", "from tasks.common.rewards.verifiers import examples"] %}
{{ imports.sorted(common, "environment import PACKAGE") }}

def from_verifiers(settings) -> list[prepare.Example]:
    """All rows of the environment, which is installed first."""
    return examples(PACKAGE)


if __name__ == "__main__":
    prepare.main({"verifiers": from_verifiers})
