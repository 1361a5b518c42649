def from_record(record: dict) -> list[prepare.Example]:
    """The last turn to learn that calls tools is an example, all before it its prompt; none where no turn does.

    ``record``: OpenAI ``messages`` and ``tools``, or ShareGPT ``conversations``. A DataError gets the record's place
    put before. FILL IN: other turns, other columns.
    """
    found = conversation(record)
    turns = [i for i, message in enumerate(found.messages) if message.get("tool_calls") and i not in found.context]
    if not turns:
        return []
    calls = [call["function"] for call in found.messages[turns[-1]]["tool_calls"]]
    return [example(found.messages[: turns[-1]], calls, found.tools)]
