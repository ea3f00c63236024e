"""The sixty questions: the site's search finds the page of every answer among its first three pages."""

import re

from llamaspec.learn.site.stage import target_of
from tests.support.processes import REPOSITORY
from tests.support.site_search import search

TEXT = " ".join((REPOSITORY / "docs/questions.md").read_text(encoding="utf-8").split())
QUESTIONS = re.findall(r"(\d+)\. ([^*]+\?) \*([^*]+)\*: \[[^]]*\]\(([^)]+)\)", TEXT)


def test_there_are_sixty():
    assert [int(number) for number, *_ in QUESTIONS] == list(range(1, 61))
    assert len({question for _, question, *_ in QUESTIONS}) == 60


def test_the_search_finds_every_answer(browser):
    all_results = search(browser, [words for _, _, words, _ in QUESTIONS])
    for (_, question, _, link), results in zip(QUESTIONS, all_results, strict=True):
        path = target_of(link.removeprefix("../") if link.startswith("../") else f"docs/{link}")
        pages = list(dict.fromkeys(result.partition("#")[0] for result in results))
        assert f"{path.removesuffix('.md')}.html" in pages[:3], (question, pages)
