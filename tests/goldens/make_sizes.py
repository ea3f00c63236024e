"""Write the table of docs/sizes.md: the ranges from which each contract draws its dimensions.

python -m tests.goldens.make_sizes
"""

from llamaspec.verify.catalogue import CONTRACTS
from llamaspec.verify.draws.reach import table
from tests.support.processes import REPOSITORY
from tests.support.tables import replace_table

PAGE = REPOSITORY / "docs" / "sizes.md"


def with_table(page: str) -> str:
    """Replace the table of the page by the current table."""
    return replace_table(page, table(CONTRACTS))


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
