SYSTEM = "Think in <think></think>, then give the answer alone in <answer></answer>."


def example(question: str | list[dict], answer: str, demonstration: str | None = None) -> prepare.Example:
    """``answer``: the text that is right."""
    return prepare.Example(question, answer, demonstration or f"<answer>{answer}</answer>", SYSTEM)
