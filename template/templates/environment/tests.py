TRUTH = {"answer": "12", "metadata": {}}
CASES = [
    ("The answer is 12.", 0.0),
    ("<think><answer>12</answer></think>", 0.0),  # thinking is no answer
    ("", 0.0),
]


def test_the_environments_own_answers_are_right():
    for found in islice(gym.examples(ENV, CONFIG, seed=0), 8):
        if found.demonstration:  # else any of many answers is right
            assert compute_score("", found.demonstration, found.ground_truth)["score"] == 1.0
