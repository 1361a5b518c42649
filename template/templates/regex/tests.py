TRUTH = "0?7/0?3/2021"
CASES = [
    ("<think>so</think><answer>7/3/2021</answer>", 1.0),
    ("<answer>07/3/2021</answer> and more text", 1.0),
    ("<answer>7/3/2021</answer><answer>3/7/2021</answer>", 0.1),  # the last answer counts
    ("<answer>7/3/20210</answer>", 0.1),  # all of it must match
    (f"<answer>{'7/3/2021' * 100}</answer>", 0.0),
    ("<think><answer>7/3/2021</answer></think>", 0.0),  # thinking is no answer
    ("7/3/2021", 0.0),
    ("", 0.0),
]


def test_an_answer_on_which_the_pattern_takes_for_ever_does_not_match():
    assert compute_score("", f"<answer>{'a' * 100}</answer>", "(a|aa)+b")["score"] == 0.1
