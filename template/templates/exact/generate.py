    while True:
        words = rng.sample(WORDS, {"easy": 3, "hard": 8}[settings.DIFFICULTY])
        answer = " ".join(sorted(words))
        demonstration = f"<think>{min(words)} first</think>\n<answer>{answer}</answer>"
        yield example(f"Sort these words: {' '.join(words)}", answer, demonstration)
