    while True:
        words = rng.sample(WORDS, {"easy": 3, "hard": 6}[settings.DIFFICULTY])
        *others, last = [f"the {word}" for word in words]
        demonstration = f"I saw {', '.join(others)} and {last} yesterday."
        yield example(f"Write one sentence with these words: {', '.join(words)}", "", demonstration)
