"""The reward: 0.0 no call where one is expected (or the reverse), 0.1 a call, 1.0 the right calls."""

from tasks.common.rewards.answers import read_ground_truth, reward_function
from tasks.common.rewards.tool_calls import Malformed, expected_calls, matched, parse_response


@reward_function
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs) -> dict:
    """Score one response (``solution_str``) against the ``ground_truth``.

    That is ``{"calls": [{"name": str, "arguments": dict}], "tools": [OpenAI schemas]}``; parallel calls may come in any
    order. Returns the same keys for every row: ``score``, what is trained on; ``acc``, 1.0 if right; ``format``, 1.0 if
    there are calls alone where calls are expected, text alone where none is. More keys are logged as they are. Model
    output is hostile: never eval, exec or unpickle it.
    """
    truth = read_ground_truth(ground_truth)
    expected, tools = expected_calls(truth["calls"]), truth.get("tools") or []
    well_formed = right = False
    try:
        response = parse_response(solution_str, tools)
        well_formed = bool(response.calls) == bool(expected) != bool(response.text)
        right = well_formed and matched(response.calls, expected, tools) == len(response.calls) == len(expected)
    except Malformed:
        pass
    score = 1.0 if right else 0.1 if well_formed else 0.0
    return {"score": score, "acc": float(right), "format": float(well_formed)}
