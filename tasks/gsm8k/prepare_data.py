"""GSM8K: grade school word problems. The hub set, its original files, or problems generated here."""

import random
from collections.abc import Iterator

from verl_tasks import math_answer, prepare, records, word_problems

INSTRUCTION = 'Reason step by step, then end with "#### " and the answer as a number.'

# Templates of reasoning-gym's gsm_symbolic with two or three short steps: prompt and demonstration fit into 192 and 96
# tokens of SmolLM2. After a short warm-up it is right at times in each; where it never is, RL has nothing to reinforce.
EASY = (6, 10, 31, 43, 58, 62)


def from_record(record: dict) -> list[prepare.Example]:
    """The example of a row of the public set. The ground truth is what follows ``####``, without commas; the
    demonstration is ``answer`` without its calculator annotations. Raises DataError unless the row has the texts
    ``question`` and ``answer``, and a number after a ``####``."""
    problem = word_problems.read(record)
    if math_answer.read_number(problem.number) is None:
        raise prepare.DataError("`answer` must end with `#### ` and a number")
    prompt = f"{problem.question}\n{INSTRUCTION}"
    return [prepare.Example(prompt, problem.number, word_problems.ANNOTATION.sub("", problem.answer).strip())]


def generate(settings) -> Iterator[prepare.Example]:
    """Endless problems of reasoning-gym's gsm_symbolic (Mirzadeh et al. 2024), with its worked solutions. Its templates
    that are known to be broken, and problems whose answer is negative or not whole, are left out."""
    from reasoning_gym.arithmetic.gsm_symbolic import gsm_symbolic

    config = gsm_symbolic.GSMSymbolicDatasetConfig(seed=settings.SEED, size=1)
    templates = gsm_symbolic.GSMSymbolicDataset(config).generators
    chosen = EASY if settings.DIFFICULTY == "easy" else gsm_symbolic.tasks_ok
    rng = random.Random(settings.SEED)
    while True:
        problem = templates[rng.choice(chosen)](random.Random(rng.getrandbits(64)), 1.0)
        solution, _, stated = problem["metadata"]["answer_cot"].rpartition("####")
        answer = problem["answer"]
        if answer.isdecimal() and math_answer.read_number(stated) == int(answer):
            yield from from_record({"question": problem["question"], "answer": f"{solution.strip()}\n#### {answer}"})


def from_hub(settings) -> prepare.Examples:
    """The public set, or a local copy of its folder, with its own splits: 7,473 train, 1,319 test."""
    name = word_problems.HUB_DATASET if settings.SOURCE in ("auto", "hub") else settings.SOURCE
    return word_problems.from_hub(name, from_record)


def from_file(settings) -> prepare.Examples:
    """FILE: a folder with the original train.jsonl and test.jsonl, or one file of such rows, to be split by seed."""
    return prepare.Examples(records.load(settings.FILE), from_record)


if __name__ == "__main__":
    prepare.main({"generate": generate, "file": from_file, "hub": from_hub})
