SYSTEM = 'Answer with one JSON object: {"name": text, "age": whole number, "city": text}.'


def example(question: str | list[dict], answer: dict | str, demonstration: str | None = None) -> prepare.Example:
    """``answer``: the object that is right, or its JSON text. It must fit the SCHEMA of reward.py."""
    text = answer if isinstance(answer, str) else json.dumps(answer)
    return prepare.Example(question, text, demonstration or text, SYSTEM)
