"""The reward of tool_calling: 1.0 where the form is right and the calls are the expected ones, else 0.0."""

from collections import Counter

from verl_tasks import read_ground_truth, reward_function, tool_calls

VARIANTS = ("instruct", "strict")


@reward_function
def compute_score(data_source, solution_str, ground_truth, extra_info=None, variant="instruct", **kwargs) -> dict:
    """Score one response.

    ``ground_truth`` is ``{"calls": [{"name": str, "arguments": dict}], "tools": [OpenAI schemas]}`` or that as JSON
    text; no calls: none is expected. A call may have BFCL's form, ``{name: {argument: [allowed values]}}``.
    ``variant`` (the setting REWARD) "strict" demands thinking, "instruct" allows it.

    Returns the same keys for every row, 0.0 or 1.0 except the counts: ``score`` and ``acc``, everything is right;
    ``format``, the form is right; ``parsed``, no malformed call or thinking; ``thinking``, not empty; ``text``, some
    outside of calls; ``names``, the right functions, each as often as expected; ``arguments``, the calls are equal,
    whatever the form; counts of calls: ``made``, ``expected``, ``missing``, ``extra``.
    """
    truth = read_ground_truth(ground_truth)
    expected, tools = tool_calls.expected_calls(truth["calls"]), truth.get("tools") or []
    try:
        response, parsed = tool_calls.parse_response(solution_str, tools), True
    except tool_calls.Malformed:
        response, parsed = tool_calls.Response(None, [], ""), False
    made = response.calls
    pairs = tool_calls.matched(made, expected, tools)
    equal = parsed and pairs == len(made) == len(expected)
    names = Counter(call["name"] for call in made) == Counter(call["name"] for call in expected)
    form = parsed and bool(response.text) != bool(made) and (bool(response.thinking) or variant != "strict")
    found = {"score": form and equal, "acc": form and equal, "format": form, "parsed": parsed}
    found |= {"thinking": bool(response.thinking), "text": bool(response.text)}
    found |= {"names": parsed and names, "arguments": equal, "made": len(made), "expected": len(expected)}
    return found | {"missing": len(expected) - pairs, "extra": len(made) - pairs}


def wrong_forms(response: str) -> list[str]:
    """What the gold check makes of a right response, none of it right: in the thinking, a spare call, text beside."""
    spare = '<tool_call>\n{"name": "spare", "arguments": {}}\n</tool_call>'
    beside = [f"{response}\nDone."] if "<tool_call>" in response else []
    return [f"<think>{response}</think>", f"{response}\n{spare}", *beside]
