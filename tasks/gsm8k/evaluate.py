"""GSM8K's evaluation: the shared one, what the form of the answer costs, and answers without a solution."""

import functools
import re

from tasks.common.evaluation.main import main
from tasks.common.rewards.answers import after_thinking, with_opened_thinking
from tasks.gsm8k.reward import compute_score

_CALCULATION = re.compile(r"\d[^\n=]{0,80}=[^\n=\d]{0,4}\d")


@functools.cache  # the bootstrap asks for the same completions again and again
def _signs(response: str, truth: str) -> tuple[float, float, float]:
    """Of one completion: has ``####``, is right under "flexible" alone, has a final answer without a calculation."""
    strict = compute_score("gsm8k", response, truth)
    flexible = compute_score("gsm8k", response, truth, variant="flexible")
    bare = strict["format"] and not _CALCULATION.search(response)
    return float("####" in after_thinking(response)), flexible["acc"] - strict["acc"], float(bare)


def metrics(scored: list[dict]) -> dict[str, float]:
    """Shares of the sampled completions. ``hashes``: with a ``####``, readable or not. ``format_loss``: wrong under
    "strict", right under "flexible". ``no_working``: with a final answer, and no calculation (``... = number``) in the
    whole response."""
    responses = [with_opened_thinking(row["response"], row.get("extra_info")) for row in scored]
    signs = [_signs(text, str(row["ground_truth"])) for text, row in zip(responses, scored, strict=True)]
    means = [sum(values) / len(scored) for values in zip(*signs, strict=True)]
    return dict(zip(("hashes", "format_loss", "no_working"), means, strict=True))


if __name__ == "__main__":
    main(compute_score, metrics)
