"""GSM8K's evaluation: the shared one, the mark of the answer, and answers without a solution."""

import functools
import re

from tasks.gsm8k.reward import compute_score
from verl_tasks import answers, evaluate

_CALCULATION = re.compile(r"\d[^\n=]{0,80}=[^\n=\d]{0,4}\d")


@functools.cache  # the bootstrap asks for the same completions again and again
def _signs(response: str, well_formed: float) -> tuple[float, float]:
    """Of one completion: has ``####``; has a final answer without a calculation."""
    return float("####" in answers.after_thinking(response)), float(well_formed and not _CALCULATION.search(response))


def metrics(scored: list[dict]) -> dict[str, float]:
    """Shares of the sampled completions. ``hashes``: with a ``####``, readable or not. ``no_working``: with a final
    answer, and no calculation (``... = number``) in the whole response."""
    responses = [answers.with_opened_thinking(row["response"], row.get("extra_info")) for row in scored]
    signs = [_signs(text, row["reward"]["format"]) for text, row in zip(responses, scored, strict=True)]
    hashes, bare = (sum(values) / len(scored) for values in zip(*signs, strict=True))
    return {"hashes": hashes, "no_working": bare}


if __name__ == "__main__":
    evaluate(compute_score, metrics)
