    largest = {"easy": 50, "hard": 10_000}[settings.DIFFICULTY]
    while True:
        a, b = rng.randint(1, largest), rng.randint(1, largest)
        yield example(f"What is {a} + {b}?", f"{a} + {b} = {a + b}\n#### {a + b}")
