SYSTEM = 'Think step by step, then end with "#### " and the number.'


def example(question: str | list[dict], answer: str, demonstration: str | None = None) -> prepare.Example:
    """``answer``: a number or formula, or a worked solution that ends with ``#### `` and that."""
    truth = answer.rpartition("####")[2].strip()
    if compare(truth, truth) != (True, True):
        raise DataError(f"the answer {truth[:80]!r} must be a number or a formula, perhaps after a last ####")
    demonstration = demonstration or (answer if "####" in answer else f"#### {truth}")
    return prepare.Example(question, truth, demonstration, SYSTEM)
