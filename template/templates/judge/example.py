def example(question: str | list[dict], answer: str, demonstration: str | None = None) -> prepare.Example:
    """``answer``: what the judge is shown as reference, "" for none."""
    text = question if isinstance(question, str) else question[-1]["content"]
    return prepare.Example(question, {"question": text, "reference": answer}, demonstration or answer or None)
