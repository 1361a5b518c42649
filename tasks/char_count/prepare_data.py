"""Words of random letters, and how often one letter is in them: the data rule of verl-recipe's char_count."""

import random
import string
from collections.abc import Iterator

from verl_tasks import prepare

# DIFFICULTY: letters of a word; `hard` is verl-recipe's
LENGTHS = {"easy": (3, 6), "hard": (5, 20)}


def example(letter: str, letters: list[str], difficulty: str) -> prepare.Example:
    """How often ``letter`` is in the word of ``letters``. The demonstration compares letter by letter; `hard` counts at
    the end, as verl-recipe does, and `easy` as it goes, which a small model can learn."""
    word = "-".join(letters)  # a token for each letter
    count, lines = 0, []
    for each in letters:
        count += each == letter
        running = f" {count}" if each == letter and difficulty == "easy" else ""
        lines.append(f"{each} {'=' if each == letter else '!='} {letter}{running}.")
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
        yield example(letter, letters, settings.DIFFICULTY)


if __name__ == "__main__":
    prepare.main({"generate": generate})
