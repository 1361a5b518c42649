SYSTEM = 'Think step by step, then end with "#### " and the number.'


def example(question: str | list[dict], answer: str, demonstration: str | None = None) -> prepare.Example:
    """``answer``: the number, or a worked solution that ends with ``#### `` and the number."""
    truth = answer.rpartition("####")[2].strip()
    demonstration = demonstration or (answer if "####" in answer else f"#### {truth}")
    return prepare.Example(question, truth, demonstration, SYSTEM)
