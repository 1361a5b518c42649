PARAMETERS = {"type": "object", "properties": {"minutes": {"type": "integer"}}, "required": ["minutes"]}
TOOLS = [{"type": "function", "function": {"name": "set_timer", "parameters": PARAMETERS}}]
TRUTH = {"calls": [{"name": "set_timer", "arguments": {"minutes": 7}}], "tools": TOOLS}
RIGHT = '<tool_call>\n{"name": "set_timer", "arguments": {"minutes": 7}}\n</tool_call>'
CASES = [
    (RIGHT, 1.0),
    (f"<think>so</think>{RIGHT}", 1.0),
    (RIGHT.replace("7", "8"), 0.1),
    (RIGHT.replace("7", '"7"'), 0.1),
    (RIGHT + RIGHT, 0.1),  # an extra call
    (RIGHT.replace("}}", "}"), 0.0),
    (f"I do it. {RIGHT}", 0.0),
    (f"<think>{RIGHT}</think>", 0.0),  # thinking is no answer
    ("The timer is set.", 0.0),
    ("", 0.0),
]


def test_no_call_where_none_is_expected():
    truth = {"calls": [], "tools": TOOLS}
    assert compute_score("", "I cannot do that.", truth)["score"] == 1.0
    assert compute_score("", RIGHT, truth)["score"] == 0.0
