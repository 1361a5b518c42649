COLUMNS = Columns(prompt="{{ columns[0] }}", answer="{{ columns[1] }}")  # FILL IN: those of your data


def from_record(record: dict) -> list[prepare.Example]:
    """The examples of one record, perhaps none; a DataError gets the record's place put before."""
    found = conversation(record, COLUMNS)
    return [example(found.messages, {{ "found.answer" if cookiecutter.reward == "json" else "str(found.answer)" }}, record.get("demonstration"))]
