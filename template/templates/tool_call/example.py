def example(prompt: str | list[dict], calls: list[dict], tools: list[dict] | None) -> prepare.Example:
    """``calls``: ``{"name": str, "arguments": dict}`` each, all of them expected; ``tools``: OpenAI schemas."""
    return prepare.Example(prompt, {"calls": calls, "tools": tools}, render_calls(calls), tools=tools)
