"""Tables of Markdown pages that a command writes and a test compares."""

import re
from collections.abc import Sequence


def replace_table(page: str, lines: Sequence[str]) -> str:
    """Replace the only table of a page. Raises ValueError for a page that does not have exactly one table."""
    page, tables = re.subn(r"(?m)(^\|.*\n)+", lambda _: "".join(f"{line}\n" for line in lines), page)
    if tables != 1:
        raise ValueError(f"expected one table, got {tables}")
    return page


def table_rows(page: str) -> list[list[str]]:
    """Return the cells of each row of a page's tables, without the headings.

    >>> table_rows("| op | mutants |\\n|---|---|\\n| add | 12 |\\n")
    [['add', '12']]
    """
    _, *tables = re.split(r"(?m)^\|[-|]+\|\n", page)
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for text in tables
        for line in text.splitlines()
        if line.startswith("|")
    ]
