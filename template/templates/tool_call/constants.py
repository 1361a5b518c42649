LABELS = ["tea", "eggs", "rice", "bread", "nap", "call", "walk", "pasta", "soup", "oven"]


def tool(name: str, description: str, **types: str) -> dict:
    """An OpenAI schema; all arguments are required."""
    properties = {argument: {"type": kind} for argument, kind in types.items()}
    parameters = {"type": "object", "properties": properties, "required": list(types)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = [
    tool("set_timer", "Ring after some minutes", minutes="integer", label="string"),
    tool("add_note", "Write a note", text="string"),
]
