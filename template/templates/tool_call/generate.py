    while True:
        minutes, label = rng.randint(1, {"easy": 90, "hard": 600}[settings.DIFFICULTY]), rng.choice(LABELS)
        calls = [{"name": "set_timer", "arguments": {"minutes": minutes, "label": label}}]
        text = f"Set a timer for the {label}: {minutes} minutes."
        if settings.DIFFICULTY == "hard":
            calls.append({"name": "add_note", "arguments": {"text": rng.choice(LABELS)}})
            text += f" And note: {calls[1]['arguments']['text']}."
        yield example(text, calls, TOOLS)
