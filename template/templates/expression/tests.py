TRUTH = {"target": 11, "numbers": [3, 4, 5]}
CASES = [
    ("<think>so</think><answer>(5*3)-4</answer>", 1.0),
    ("<answer>5×3−4 = 11</answer>", 1.0),
    ("<answer>3+4+5</answer>", 0.1),
    ("<answer>5*3-4</answer><answer>7</answer>", 0.0),  # the last answer counts
    ("<think><answer>5*3-4</answer></think>", 0.0),  # thinking is no answer
    ("<answer>__import__('os')</answer>", 0.0),
    ("5*3-4", 0.0),
    ("", 0.0),
]
