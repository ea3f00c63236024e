"""The table of releases in docs/models.md agrees with the code."""

import pytest

from tests.goldens.make_releases import PAGE, releases, table, with_table


@pytest.mark.slow  # 15 s
def test_the_table_of_releases_is_up_to_date():
    page = PAGE.read_text()
    assert with_table(page, table()) == page, "make it anew: python -m tests.goldens.make_releases"


def test_every_release_is_listed_once():
    names = [name for entry in releases() for name in entry["names"]]
    assert len(names) == len(set(names)) > 50
