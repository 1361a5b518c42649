"""Where the problems of {{ cookiecutter.task }} come from. FILL IN: replace ``generate`` by your own source."""

import random
from collections.abc import Iterator

from tasks.common import prepare

{% if cookiecutter.reward == "number" -%}
PROMPT = "What is {a} + {b}? Think in <think></think>, then give the number in <answer></answer>."
{%- else -%}
WORDS = ["apple", "bread", "chair", "dream", "eagle", "flame", "grape", "house", "ivory", "joker", "knife", "lemon"]
PROMPT = "Sort these words: {words}. Think in <think></think>, then give them in <answer></answer>."
{%- endif %}


def generate(settings) -> Iterator[prepare.Example]:
    """Problems without end, different for each SEED; equal prompts are taken once.

    ``ground_truth`` is what reward.py gets; ``demonstration`` is a worked answer for the SFT warm-up, or None.
    """
    rng = random.Random(settings.SEED)
    while True:
{%- if cookiecutter.reward == "number" %}
        largest = {"easy": 50, "hard": 10_000}[settings.DIFFICULTY]
        a, b = rng.randint(1, largest), rng.randint(1, largest)
        yield prepare.Example(
            prompt=PROMPT.format(a=a, b=b),
            ground_truth=str(a + b),
            demonstration=f"<think>{a} + {b} = {a + b}</think>\n<answer>{a + b}</answer>",
        )
{%- else %}
        words = rng.sample(WORDS, {"easy": 3, "hard": 8}[settings.DIFFICULTY])
        answer = " ".join(sorted(words))
        yield prepare.Example(
            prompt=PROMPT.format(words=" ".join(words)),
            ground_truth=answer,
            demonstration=f"<think>{words[0]} or {min(words)} first</think>\n<answer>{answer}</answer>",
        )
{%- endif %}


if __name__ == "__main__":
    prepare.main({"generate": generate})
