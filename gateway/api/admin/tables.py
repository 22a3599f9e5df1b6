"""Answers as CSV, for spreadsheets."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from datetime import date, datetime
from typing import Literal, NamedTuple

from aiohttp import web

CSV = "text/csv"
Format = Literal["json", "csv"]
Cell = str | int | float | date | datetime | None
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""What a spreadsheet would take for the beginning of a formula (OWASP, "CSV Injection")."""


class Table(NamedTuple):
    """``name`` is the file's, without its ending."""

    name: str
    header: Sequence[str]
    rows: Iterable[Sequence[Cell]]


def wants_csv(request: web.Request) -> bool:
    """``format=csv``, or a client that takes nothing else."""
    return request.query.get("format") == "csv" or request.headers.get("Accept", "").strip() == CSV


def csv_response(table: Table) -> web.Response:
    headers = {"Cache-Control": "no-store", "Content-Disposition": f'attachment; filename="{table.name}.csv"'}
    return web.Response(body=csv_text(table).encode(), content_type=CSV, charset="utf-8", headers=headers)


def csv_text(table: Table) -> str:
    """As RFC 4180 has it."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(table.header)
    writer.writerows([inert(cell) for cell in row] for row in table.rows)
    return text.getvalue()


def inert(cell: Cell) -> Cell:
    """A text that no spreadsheet runs; numbers and times stay as they are."""
    if isinstance(cell, date):
        return cell.isoformat()
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(_FORMULA) else cell
