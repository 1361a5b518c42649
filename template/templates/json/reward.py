"""The reward: 0.0 no object that fits the schema, 0.1 one that does, 1.0 the right one. FILL IN: SCHEMA."""

from tasks.common.rewards.answers import read_ground_truth, reward_function
from tasks.common.rewards.json_answer import read_object, schema_problem
from tasks.common.rewards.tool_calls import same_value

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "city": {"type": "string"}},
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}


@reward_function
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs) -> dict:
    """Score one response (``solution_str``) against the ``ground_truth``, the object that is right.

    The answer is the one JSON object after any thinking; text may stand around it (``strict=True``: it may not).
    Returns the same keys for every row: ``score``, what is trained on; ``acc``, 1.0 if right; ``format``, 1.0 if there
    is an object that fits SCHEMA. More keys are logged as they are. Model output is hostile: never eval, exec or
    unpickle it.
    """
    value = read_object(solution_str, strict=False)
    well_formed = value is not None and schema_problem(value, SCHEMA) is None
    right = well_formed and same_value(value, read_ground_truth(ground_truth), SCHEMA)
    score = 1.0 if right else 0.1 if well_formed else 0.0
    return {"score": score, "acc": float(right), "format": float(well_formed)}
