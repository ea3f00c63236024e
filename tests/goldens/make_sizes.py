"""Write the table in docs/sizes.md: the range of each dimension that a contract draws.

python -m tests.goldens.make_sizes
"""

import re

from llamaspec.verify.catalogue import CONTRACTS
from llamaspec.verify.draws.reach import table
from tests.support.processes import REPOSITORY

PAGE = REPOSITORY / "docs" / "sizes.md"


def with_table(page: str) -> str:
    """Replace the only table of a page by the current table.

    Raises ValueError for a page that does not have exactly one table.
    """
    page, tables = re.subn(r"(?m)(^\|.*\n)+", "".join(f"{line}\n" for line in table(CONTRACTS)), page)
    if tables != 1:
        raise ValueError(f"expected one table, got {tables}")
    return page


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
