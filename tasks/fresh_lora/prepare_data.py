"""Where the problems of fresh_lora come from. FILL IN: replace ``generate`` by your own source."""

import random
from collections.abc import Iterator

from tasks.common import prepare

PROMPT = "What is {a} + {b}? Think in <think></think>, then give the number in <answer></answer>."


def generate(settings) -> Iterator[prepare.Example]:
    """Problems without end, different for each SEED; equal prompts are taken once.

    ``ground_truth`` is what reward.py gets; ``demonstration`` is a worked answer for the SFT warm-up, or None.
    """
    rng = random.Random(settings.SEED)
    while True:
        largest = {"easy": 50, "hard": 10_000}[settings.DIFFICULTY]
        a, b = rng.randint(1, largest), rng.randint(1, largest)
        yield prepare.Example(
            prompt=PROMPT.format(a=a, b=b),
            ground_truth=str(a + b),
            demonstration=f"<think>{a} + {b} = {a + b}</think>\n<answer>{a + b}</answer>",
        )


if __name__ == "__main__":
    prepare.main({"generate": generate})
