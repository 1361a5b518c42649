"""Excel files of text that models wrote: no formulas, no characters that break the file, the same bytes each time."""

import datetime
import zipfile
from pathlib import Path

from openpyxl import Workbook
from openpyxl.cell import WriteOnlyCell
from openpyxl.cell.cell import ILLEGAL_CHARACTERS_RE
from openpyxl.styles import Alignment, Font
from openpyxl.utils import get_column_letter

from tasks.common.files import written_beside

MAX_CELL_CHARS = 32_767  # Excel's limit
EPOCH = datetime.datetime(2000, 1, 1)


def write_xlsx(path: Path, columns: list[str], rows: list[list], sheet: str) -> None:
    """Write ``rows`` under a header. Numbers stay numbers; a text is always a text, also when it begins with ``=``."""
    book = Workbook(write_only=True)
    page = book.create_sheet(sheet)
    page.freeze_panes = "A2"
    for number in range(len(columns)):
        long_text = any(isinstance(row[number], str) and len(row[number]) > 20 for row in rows)
        page.column_dimensions[get_column_letter(number + 1)].width = 50 if long_text else 14
    page.append([_cell(page, name, bold=True) for name in columns])
    for row in rows:
        page.append([_cell(page, value) for value in row])
    book.properties.created = book.properties.modified = EPOCH
    book.properties.creator = "verl tasks"
    with written_beside(path) as partial:
        book.save(partial)
        _without_dates(partial)


def _cell(page, value, bold: bool = False) -> WriteOnlyCell:
    text = isinstance(value, str)
    if text:
        value = ILLEGAL_CHARACTERS_RE.sub("", value)[:MAX_CELL_CHARS]
        value = value.encode("utf-8", "replace").decode()  # a lone surrogate is no UTF-8
    cell = WriteOnlyCell(page, value=value)
    if text:
        cell.data_type = "s"  # openpyxl takes a leading = for a formula
        cell.alignment = Alignment(vertical="top", wrap_text=True)
    if bold:
        cell.font = Font(bold=True)
    return cell


def _without_dates(path: Path) -> None:
    """Give each member of the zip file the same date, and the workbook the date of ``EPOCH``."""
    with zipfile.ZipFile(path) as old:
        members = [(info.filename, old.read(info)) for info in old.infolist()]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
        for name, content in members:
            if name == "docProps/core.xml":  # openpyxl sets the time of saving
                start = content.index(b"<dcterms:modified")
                start = content.index(b">", start) + 1
                content = content[:start] + b"2000-01-01T00:00:00Z" + content[content.index(b"<", start) :]
            new.writestr(zipfile.ZipInfo(name, (2000, 1, 1, 0, 0, 0)), content, zipfile.ZIP_DEFLATED)
