SYSTEM = "Think in <think></think>, then give the answer alone in <answer></answer>."


def example(question: str | list[dict], answer: str, demonstration: str | None = None) -> prepare.Example:
    """``answer``: a regular expression that all of a right answer matches."""
    try:
        regex.compile(answer)
    except regex.error as error:
        raise DataError(f"the answer {answer[:80]!r} must be a regular expression ({error})") from error
    return prepare.Example(question, answer, demonstration, SYSTEM)
