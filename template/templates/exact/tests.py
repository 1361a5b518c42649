TRUTH = "apple bread"
CASES = [
    ("<think>so</think><answer>apple bread</answer>", 1.0),
    ("<answer>Apple bread</answer> and more text", 1.0),
    ("<answer>apple bread</answer><answer>chair</answer>", 0.1),  # the last answer counts
    ("<think><answer>apple bread</answer></think>", 0.0),  # thinking is no answer
    ("<answer></answer>", 0.0),
    ("apple bread", 0.0),
    ("", 0.0),
]
