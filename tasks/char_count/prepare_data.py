"""Words of random letters, and how often one letter is in them: the data rule of verl-recipe's char_count."""

import random
import string
from collections.abc import Iterator

from tasks.common.data import prepare

# DIFFICULTY: letters of a word; `hard` is verl-recipe's
LENGTHS = {"easy": (5, 10), "hard": (5, 20)}


def example(letter: str, letters: list[str]) -> prepare.Example:
    word = "-".join(letters)  # a token for each letter
    count = letters.count(letter)
    lines = [f"{each} {'=' if each == letter else '!='} {letter}." for each in letters]
    demonstration = "\n".join([*lines, f"\\boxed{{{count}}} {letter} in {word}."])
    return prepare.Example(f"How many {letter} are there in word {word}?", str(count), demonstration)


def generate(settings) -> Iterator[prepare.Example]:
    """Problems without end, different for each SEED. Each length and each count above 0 is as likely as any other."""
    rng = random.Random(settings.SEED)
    while True:
        length = rng.randint(*LENGTHS[settings.DIFFICULTY])
        letter, count = rng.choice(string.ascii_lowercase), rng.randint(1, length)
        others = string.ascii_lowercase.replace(letter, "")
        letters = [letter] * count + rng.choices(others, k=length - count)
        rng.shuffle(letters)
        yield example(letter, letters)


if __name__ == "__main__":
    prepare.main({"generate": generate})
