TRUTH = {"name": "Ada", "age": 36, "city": "Oslo"}
RIGHT = '{"name": "Ada", "age": 36, "city": "Oslo"}'
CASES = [
    (RIGHT, 1.0),
    (f"<think>so</think>\nHere it is: {RIGHT}", 1.0),
    (RIGHT.replace("36", "35"), 0.1),
    (RIGHT.replace("36", "36.5"), 0.0),
    (RIGHT.replace("36", "true"), 0.0),
    (RIGHT.replace("36", "NaN"), 0.0),
    (f"{RIGHT} or {RIGHT.replace('36', '35')}", 0.0),  # two answers are none
    (f"<think>{RIGHT}</think>", 0.0),  # thinking is no answer
    ("[]", 0.0),
    ("", 0.0),
]
