"""Where the problems come from. FILL IN: the environment's settings (docs/REASONING_GYM.md)."""

from collections.abc import Iterator

from tasks.common import gym, prepare

ENV = "chain_sum"
CONFIG = {"max_terms": 3}


def generate(settings) -> Iterator[prepare.Example]:
    """Entries of the environment without end, different for each SEED; equal prompts are taken once."""
    return gym.examples(ENV, CONFIG, settings.SEED)


if __name__ == "__main__":
    prepare.main({"reasoning_gym": generate})
