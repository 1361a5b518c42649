{% if cookiecutter.source in ("verifiers", "openenv") %}
{% set part = "prepare_data" %}
{% include "verifiers.jinja" %}
{% elif cookiecutter.turns != "single" %}
{% set part = "prepare_data" %}
{% include "multi.jinja" %}
{% else %}
{% set reward, source = cookiecutter.reward, cookiecutter.source %}
{% set from_records = source in ("file", "hub") %}
{% set own_columns = reward in ("expression", "tool_call") %}
{% set hub_sets = {
  "math": ("openai/gsm8k", "main", ["train", "test"], ("question", "answer")),
  "exact": ("SetFit/sst2", none, ["train", "test"], ("text", "label_text")),
  "expression": ("Jiayi-Pan/Countdown-Tasks-3to4", none, ["train"], ()),
  "tool_call": ("Bingguang/HardGen", none, ["train"], ()),
  "judge": ("databricks/databricks-dolly-15k", none, ["train"], ("instruction", "response")),
} %}
{% set hub_set = hub_sets.get(reward, ("owner/name", none, ["train"], ("question", "answer"))) %}
{% set columns = hub_set[3] if source == "hub" else ("question", "answer") %}
"""Where the problems come from. FILL IN: {{ {
  "generate": "replace ``generate`` by your own.",
  "hub": "the data set and how a record of it becomes a problem.",
  "file": "your own data.jsonl, or FILE=, and how a record becomes a problem.",
  "reasoning_gym": "the environment's settings (docs/REASONING_GYM.md).",
}[source] }}"""

{% if reward == "json" %}
import json
{% endif %}
{% if source == "generate" %}
import random
{% endif %}
{% if not from_records %}
from collections.abc import Iterator
{% elif reward == "expression" %}
from operator import index
{% elif reward != "tool_call" %}
from dataclasses import replace
{% endif %}
{% if reward != "tool_call" or not from_records %}

{% endif %}
{% if reward == "regex" %}
import regex

{% endif %}
{% import "imports.jinja" as imports with context %}
{% set ours = ["prepare"] %}
{% if from_records %}
{% set ours = ours + ["records"] %}
{% endif %}
{% set ours = ours + (["gym"] if source == "reasoning_gym" else []) + (["math_answer"] if reward == "math" else []) %}
{% set ours = ours + (["tool_calls"] if reward == "tool_call" else []) %}
{% set ours = ours + (["read_ground_truth"] if reward == "expression" and from_records else []) %}
{{ imports.ours(ours) }}
{% if source == "reasoning_gym" %}
ENV = "{{ cookiecutter.env }}"
CONFIG = {{ cookiecutter.config | literal }}
{% elif source == "hub" %}
HUB_DATASET, HUB_CONFIG, HUB_SPLITS = "{{ hub_set[0] }}", {{ '"' ~ hub_set[1] ~ '"' if hub_set[1] else "None" }}, [{{ '"' ~ hub_set[2] | join('", "') ~ '"' }}]  # FILL IN
{% elif source == "generate" %}
{% set part = "constants" %}
{% include reward ~ ".jinja" %}
{% endif %}
{% if reward in ("tool_call", "judge", "environment") %}{## a function comes next: two empty lines before it ##}
{% if source in ("generate", "hub", "reasoning_gym") %}

{% endif %}

{% endif %}
{% if reward != "environment" %}
{% set part = "example" %}
{% include reward ~ ".jinja" %}


{% endif %}
{% if source == "generate" %}
def generate(settings) -> Iterator[prepare.Example]:
    """Problems without end, different for each SEED; equal prompts are taken once."""
    rng = random.Random(settings.SEED)
{% set part = "generate" %}
{% include reward ~ ".jinja" %}
{% elif source == "reasoning_gym" %}
{% if reward == "environment" %}
def generate(settings) -> Iterator[prepare.Example]:
    """Entries of the environment without end, different for each SEED; equal prompts are taken once."""
    return gym.examples(ENV, CONFIG, settings.SEED)
{% else %}
def generate(settings) -> Iterator[prepare.Example | None]:
    """Entries of the environment without end, different for each SEED; None where it accepts more than one answer."""
    for found in gym.examples(ENV, CONFIG, settings.SEED):
        question, answer = found.prompt.removesuffix(gym.ANSWER_FORM).strip(), found.ground_truth["answer"]
        yield example(question, answer) if isinstance(answer, str) else None
{% endif %}
{% else %}
{% if own_columns %}
{% set part = "record" %}
{% include reward ~ ".jinja" %}
{% else %}
COLUMNS = {"prompt": "{{ columns[0] }}", "answer": "{{ columns[1] }}"}  # FILL IN: those of your data


def from_record(record: dict) -> list[prepare.Example]:
    """The examples of one record, perhaps none; a DataError gets the record's place put before."""
    found = records.conversation(record, COLUMNS)
{% if reward == "regex" %}
    if isinstance(found.answer, list | dict):
        raise prepare.DataError(f"the answer {found.answer_text[:80]} must be one regular expression, such as A|C")
{% endif %}
    return [replace(example(found.messages, found.answer_text, record.get("demonstration")), tools=found.tools)]
{% endif %}


{% if source == "hub" %}
def from_hub(settings) -> prepare.Examples:
    """The public set, or a local folder of its form (SOURCE=folder)."""
    name = HUB_DATASET if settings.SOURCE == "hub" else settings.SOURCE
    return prepare.Examples([records.hub(name, HUB_CONFIG, split) for split in HUB_SPLITS], from_record)
{% else %}
def from_file(settings) -> prepare.Examples:
    """FILE: a file that is split by SEED, or a folder with train.* and test.*."""
    return prepare.Examples(records.load(settings.FILE), from_record)
{% endif %}
{% endif %}


if __name__ == "__main__":
    prepare.main({"{{ source }}": {{ {"hub": "from_hub", "file": "from_file"}.get(source, "generate") }}})
{% endif %}
