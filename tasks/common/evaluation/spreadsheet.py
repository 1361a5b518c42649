"""CSV and Excel files of model output: text that a spreadsheet would run is made harmless; digits stay."""

import csv
import io
import re
from collections.abc import Iterator
from pathlib import Path

import pandas as pd

from verl_tasks.data.records import Records
from verl_tasks.files import written_beside
from verl_tasks.text import encodable

# A cell of a CSV file that a spreadsheet would take for a formula (https://owasp.org/www-community/attacks/CSV_Injection).
_FORMULA = re.compile(r"'*[=+\-@\t\r\n＝＋－＠]")
_NUMBER = re.compile(r"[+-]?[\d.,]+([eE][+-]?\d+)? ?%?")
# What XML 1.0 forbids (https://www.w3.org/TR/xml/#charsets), except half a surrogate pair.
_NOT_XML = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]")
MAX_CELL_CHARS = 32_767  # Excel's limit


def csv_text(table: pd.DataFrame) -> str:
    """``table`` as CSV: text that a spreadsheet would run gets an apostrophe in front, which ``csv_rows`` removes."""
    text = io.StringIO()
    writer = csv.writer(text, quoting=csv.QUOTE_NONNUMERIC, lineterminator="\n")
    writer.writerows([_harmless(value) for value in row] for row in _rows(table))
    return text.getvalue()


def _rows(table: pd.DataFrame) -> Iterator[list]:
    """The header and the rows: "" for what is missing, and for an integer that spreadsheets would round its digits."""
    rows = table.astype(object).where(table.notna(), "").itertuples(index=False, name=None)
    for row in (table.columns, *rows):
        yield [str(value) if isinstance(value, int) and abs(value) > 2**53 else value for value in row]


def _harmless(value):
    runs = isinstance(value, str) and _FORMULA.match(value) and not _NUMBER.fullmatch(value)
    return f"'{value}" if runs else value


def csv_rows(path: Path) -> list[dict]:
    """The rows of a CSV file as texts, without the apostrophes that ``csv_text`` put in. Raises DataError."""
    return [{_original(name): _original(value) for name, value in row.items()} for row in Records(path)]


def _original(value):
    return value[1:] if isinstance(value, str) and value[:1] == "'" and _FORMULA.match(value) else value


def write_xlsx(path: Path, table: pd.DataFrame, sheet: str) -> None:
    """Write ``table`` under a header, nothing for what is missing. A text is always a text, also when it begins with
    ``=``. Says how many texts are cut at Excel's limit."""
    from openpyxl import Workbook  # for this alone
    from openpyxl.styles import Alignment

    book = Workbook()
    page = book.active
    page.title, page.freeze_panes = sheet, "A2"
    cut = 0
    for row in _rows(table):
        cells = [_in_xml(value) for value in row]
        cut += sum(isinstance(cell, str) and len(cell) > MAX_CELL_CHARS for cell in cells)
        page.append([cell[:MAX_CELL_CHARS] or None if isinstance(cell, str) else cell for cell in cells])
    for column in page.columns:
        texts = [cell for cell in column if isinstance(cell.value, str)]
        for cell in texts:
            cell.data_type, cell.alignment = "s", Alignment(vertical="top", wrap_text=True)  # no formula
        long_text = any(len(cell.value) > 20 for cell in texts[1:])
        page.column_dimensions[column[0].column_letter].width = 50 if long_text else 14
    with written_beside(path) as partial:
        book.save(partial)
    if cut:
        print(f"  {path}: {cut} texts are cut at {MAX_CELL_CHARS:,} characters, Excel's limit; a jsonl has them whole")


def _in_xml(value):
    """``value`` as Excel can hold it."""
    return encodable(_NOT_XML.sub("", value)) if isinstance(value, str) else value
