"""Where the problems come from. FILL IN: replace ``generate`` by your own."""

import random
from collections.abc import Iterator

{% import "imports.jinja" as imports with context %}
{% set common = ["from tasks.common.data import prepare", "from tasks.common.rewards.environment import tool_message", "from tasks.common.rewards.tool_calls import render_calls"] %}
{{ imports.sorted(common, "environment import TOOLS, look_up") }}
# DIFFICULTY: digits of a shelf's number
DIGITS = {"easy": 3, "hard": 6}
SYSTEM = "Look it up, then write the number in <answer></answer>."


def demonstration(stock: dict) -> list[dict]:
    """The messages of an episode that is right, for the SFT warm-up; calls are text."""
    arguments = {"shelf": stock["shelf"]}
    call = {"role": "assistant", "content": render_calls([{"name": "look_up", "arguments": arguments}])}
    answer = {"role": "assistant", "content": f"<answer>{stock['pieces']}</answer>"}
    return [call, tool_message(look_up(stock, arguments)), answer]


def example(shelf: int, pieces: int) -> prepare.Example:
    """A problem: its prompt, what the environment needs, a demonstration. The prompt does not show the answer."""
    stock = {"shelf": shelf, "pieces": pieces}
    return prepare.Example(f"How many pieces are on shelf {shelf}?", stock, demonstration(stock), SYSTEM, TOOLS)


def generate(settings) -> Iterator[prepare.Example]:
    """Problems without end, different for each SEED; equal prompts are taken once."""
    rng = random.Random(settings.SEED)
    digits = DIGITS[settings.DIFFICULTY]
    while True:
        yield example(rng.randrange(10 ** (digits - 1), 10**digits), rng.randint(10, 99))


if __name__ == "__main__":
    prepare.main({"generate": generate})
