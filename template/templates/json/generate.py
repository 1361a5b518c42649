    while True:
        name, age, city = rng.choice(NAMES), rng.randint(18, 80), rng.choice(CITIES)
        text = f"{name} is {age} and lives in {city}."
        if settings.DIFFICULTY == "hard":
            text = f"Now in {city}, where {rng.choice(NAMES)} was born, {name} turns {age + 1} next year."
        yield example(text, {"name": name, "age": age, "city": city})
