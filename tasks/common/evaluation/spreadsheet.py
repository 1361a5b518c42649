"""CSV files of model output: text that a spreadsheet would run gets an apostrophe; digits stay."""

import csv
import io
import re
from pathlib import Path

import pandas as pd

from tasks.common.data.records import Records

# A cell of a CSV file that a spreadsheet would take for a formula (https://owasp.org/www-community/attacks/CSV_Injection).
_FORMULA = re.compile(r"'*[=+\-@\t\r\n＝＋－＠]")
_NUMBER = re.compile(r"[+-]?[\d.,]+([eE][+-]?\d+)? ?%?")


def csv_text(table: pd.DataFrame) -> str:
    """``table`` as CSV: text that a spreadsheet would run gets an apostrophe in front, numbers do not.

    ``csv_rows`` removes it.
    """
    text = io.StringIO()
    rows = table.astype(object).where(table.notna(), "").itertuples(index=False, name=None)
    writer = csv.writer(text, quoting=csv.QUOTE_NONNUMERIC, lineterminator="\n")
    writer.writerows([_harmless(value) for value in row] for row in (table.columns, *rows))
    return text.getvalue()


def _harmless(value):
    value = exact(value)
    runs = isinstance(value, str) and _FORMULA.match(value) and not _NUMBER.fullmatch(value)
    return f"'{value}" if runs else value


def exact(value):
    """``value``, an integer that spreadsheets would round as text."""
    return str(value) if isinstance(value, int) and abs(value) > 2**53 else value


def csv_rows(path: Path) -> list[dict]:
    """The rows of a CSV file as texts, without the apostrophes that ``csv_text`` put in. Raises DataError."""
    return [{_original(name): _original(value) for name, value in row.items()} for row in Records(path)]


def _original(value):
    return value[1:] if isinstance(value, str) and value[:1] == "'" and _FORMULA.match(value) else value
