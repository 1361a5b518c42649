"""Excel files of model output: no formulas, nothing that breaks the file, reproducible bytes."""

import datetime
import re
import zipfile
from pathlib import Path

import pandas as pd
from openpyxl import Workbook
from openpyxl.cell import WriteOnlyCell
from openpyxl.styles import Alignment, Font
from openpyxl.utils import get_column_letter
from openpyxl.writer.excel import ExcelWriter

from tasks.common.evaluation.spreadsheet import exact
from tasks.common.files import written_beside

MAX_CELL_CHARS = 32_767  # Excel's limit
# What XML 1.0 forbids (https://www.w3.org/TR/xml/#charsets), except half a surrogate pair.
_NOT_XML = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]")
DATE = (2000, 1, 1, 0, 0, 0)


def write_xlsx(path: Path, table: pd.DataFrame, sheet: str) -> None:
    """Write ``table`` under a header, NaN as empty cells. A text is always a text, also when it begins with ``=``."""
    book = Workbook(write_only=True)
    book.properties.created = book.properties.modified = datetime.datetime(*DATE)
    page = book.create_sheet(sheet)
    page.freeze_panes = "A2"
    for number, name in enumerate(table, 1):
        long_text = table[name].map(lambda value: isinstance(value, str) and len(value) > 20).any()
        page.column_dimensions[get_column_letter(number)].width = 50 if long_text else 14
    page.append([_cell(page, name, Font(bold=True)) for name in table])
    for row in table.astype(object).itertuples(index=False):
        page.append([_cell(page, value) for value in row])
    with written_beside(path) as partial, _Dated(partial, "w", zipfile.ZIP_DEFLATED) as archive:
        ExcelWriter(book, archive).save()  # book.save() would write the current time


def _cell(page, value, font: Font | None = None) -> WriteOnlyCell:
    value = exact(value)
    if not isinstance(value, str):
        return WriteOnlyCell(page, None if pd.isna(value) else value)
    value = _NOT_XML.sub("", value)[:MAX_CELL_CHARS]
    cell = WriteOnlyCell(page, value.encode("utf-8", "replace").decode())  # a lone surrogate is no UTF-8
    cell.data_type = "s"  # openpyxl takes a leading = for a formula
    cell.alignment = Alignment(vertical="top", wrap_text=True)
    if font:
        cell.font = font
    return cell


class _Dated(zipfile.ZipFile):
    """A zip file whose members all have the same date."""

    def writestr(self, name, data, *_) -> None:
        super().writestr(zipfile.ZipInfo(name, DATE), data, zipfile.ZIP_DEFLATED)

    def write(self, file, name, *_) -> None:
        self.writestr(name, Path(file).read_bytes())
