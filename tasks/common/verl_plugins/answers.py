"""What became of a step's answers, as metrics: verl logs their rewards alone."""

from collections import defaultdict
from collections.abc import Sequence
from statistics import mean


def figures(prompts: Sequence, responses: Sequence, rewards: Sequence[dict]) -> dict[str, float]:
    """Metrics of samples: of each its prompt's id, its response and what its reward returned.

    ``answers/right`` and ``answers/readable``: shares of the samples (``acc``, ``format``); ``answers/alike``: share of
    the prompts with several samples whose samples are all one response, which is not right. Without what a reward does
    not return.
    """
    found = {}
    for name, key in (("right", "acc"), ("readable", "format")):
        if rewards and all(key in reward for reward in rewards):
            found[f"answers/{name}"] = mean(float(reward[key] > 0) for reward in rewards)
    groups = defaultdict(list)
    for prompt, response, reward in zip(prompts, responses, rewards, strict=True):
        groups[prompt].append((response, reward.get("acc", 0) > 0))
    several = [group for group in groups.values() if len(group) > 1]
    if several and "answers/right" in found:
        alike = [len({response for response, _ in group}) == 1 and not group[0][1] for group in several]
        found["answers/alike"] = mean(map(float, alike))
    return found
