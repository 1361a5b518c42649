TRUTH = "12"
CASES = [
    ("5 + 7 = 12\n#### 12", 1.0),
    ("#### 12\nI am sure of it.", 1.0),
    ("The answer is **12**.", 1.0),
    ("#### 12\n#### 7", 0.1),  # the last answer counts
    ("#### 5 + 7", 0.0),  # a sum that is still to be done
    ("<think>#### 12</think>", 0.0),  # thinking is no answer
    ("12", 0.0),
    ("", 0.0),
]
