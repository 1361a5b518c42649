"""The reward of tool_calling: 1.0 where the form is right and the calls are the expected ones, else 0.0."""

from collections import Counter

from tasks.common.rewards.answers import read_ground_truth, reward_function
from tasks.common.rewards.tool_calls import Malformed, Response, matched, parse_response

VARIANTS = ("instruct", "strict")


@reward_function
def compute_score(data_source, solution_str, ground_truth, extra_info=None, variant="instruct", **kwargs) -> dict:
    """Score one response.

    ``ground_truth`` is ``{"calls": [{"name": str, "arguments": dict}], "tools": [OpenAI schemas]}`` or that as JSON
    text; no calls: none is expected. ``variant`` (the setting REWARD) "strict" demands thinking, "instruct" allows it.
    ``extra_info["think_opened"]``: the model's template has put ``<think>`` into the prompt.

    Returns the same keys for every row, floats in [0, 1] except the counts: ``score`` and ``acc``, 1.0 if all is
    right; ``format``, of the form; ``parsed``, no malformed call or thinking; ``thinking``, not empty; ``text``, some
    outside of calls; ``names``, the right functions, each as often as expected; ``arguments``, the calls are equal,
    whatever the form; counts of calls: ``made``, ``expected``, ``missing``, ``extra``.
    """
    if variant not in VARIANTS:
        raise ValueError(f"REWARD={variant}: must be one of {', '.join(VARIANTS)}")
    truth = read_ground_truth(ground_truth)
    expected, tools = truth["calls"], truth.get("tools") or []
    try:
        response = parse_response(solution_str, bool((extra_info or {}).get("think_opened")))
        parsed = True
    except Malformed:
        response, parsed = Response(None, [], ""), False
    made = response.calls
    pairs = matched(made, expected, tools)
    equal = parsed and pairs == len(made) == len(expected)
    names = Counter(call["name"] for call in made) == Counter(call["name"] for call in expected)
    form = parsed and bool(response.text) != bool(made) and (bool(response.thinking) or variant != "strict")
    right = form and equal
    return {
        "score": float(right),
        "acc": float(right),
        "format": float(form),
        "parsed": float(parsed),
        "thinking": float(bool(response.thinking)),
        "text": float(bool(response.text)),
        "names": float(parsed and names),
        "arguments": float(equal),
        "made": float(len(made)),
        "expected": float(len(expected)),
        "missing": float(len(expected) - pairs),
        "extra": float(len(made) - pairs),
    }
