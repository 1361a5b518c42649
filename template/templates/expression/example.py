SYSTEM = "Make the target from the numbers with + - * / and parentheses, each number once. Answer in <answer></answer>."


def example(numbers: list[int], target: int, demonstration: str | None = None) -> prepare.Example:
    """Reach ``target`` with all ``numbers``; sorted, for in any order it is the same problem, taken once."""
    numbers = sorted(numbers)
    prompt = f"Numbers: {', '.join(map(str, numbers))}. Target: {target}."
    return prepare.Example(prompt, {"target": target, "numbers": numbers}, demonstration, SYSTEM)
