"""Words that no story contains, and questions that no story answers. The data: outside.toml.

The loss does not count the person's words, so they vary as much as possible: nouns that no story has, invented words,
numbers, and many kinds of questions around them.
"""

from collections.abc import Mapping

from llamaspec.training.stories.choices import Choices
from llamaspec.training.stories.phrases import DEEDS, HOW, KNOWN_HOW
from llamaspec.training.stories.tables import read_table

_TABLE = read_table("outside")
NOUNS: tuple[str, ...] = _TABLE["nouns"]
PLACES: tuple[str, ...] = _TABLE["places"]
PEOPLE: tuple[str, ...] = _TABLE["people"]
LANGUAGES: tuple[str, ...] = _TABLE["languages"]
ADJECTIVES: tuple[str, ...] = _TABLE["adjectives"]
VERBS: tuple[str, ...] = _TABLE["verbs"]
SYLLABLES: tuple[str, ...] = _TABLE["syllables"]
ENDINGS: tuple[str, ...] = _TABLE["endings"]
QUESTIONS: tuple[str, ...] = _TABLE["questions"]


def unknown_question(choices: Choices) -> str:
    """Make a question that no story answers."""
    return choices.pick(QUESTIONS).format_map(BraceWords(choices))


def unknown_noun(choices: Choices) -> str:
    """Choose a noun that no story contains, or make one up."""
    return choices.pick(NOUNS) if choices.pick((True, False), (3, 1)) else made_up(choices)


def unknown_person(choices: Choices) -> str:
    """Choose a name that no story contains, or make one up."""
    if choices.pick((True, False), (3, 1)):
        return choices.pick(PEOPLE)
    return made_up(choices).capitalize()


def made_up(choices: Choices) -> str:
    """Make up a word of one to three syllables."""
    syllables = "".join(choices.pick(SYLLABLES) for _ in range(choices.pick((1, 2, 3))))
    return syllables + choices.pick(ENDINGS[1:])


class BraceWords(dict):
    """A dict from the names in a question's {braces} to words. Chooses a word at random for a name not in `words`."""

    def __init__(self, choices: Choices, words: Mapping[str, str] | None = None):
        super().__init__(words or {})
        self._choices = choices

    def __missing__(self, word: str) -> str:
        pick = self._choices.pick
        match word:
            case "noun":
                return unknown_noun(self._choices)
            case "a" | "b":
                noun = unknown_noun(self._choices)
                described = f"{pick(ADJECTIVES)} {noun}" if pick((True, False)) else noun
                return f"an {described}" if described[0] in "aeiou" else f"a {described}"
            case "made":
                return made_up(self._choices)
            case "person":
                return unknown_person(self._choices)
            case "deed":
                return pick(DEEDS).format_map(self)
            case "how":
                return pick(HOW)
            case "known":
                return pick(KNOWN_HOW)
            case "number":
                return str(pick(range(1, 10 ** pick((1, 2, 3)))))
            case "year":
                return str(pick(range(1000, 2100)))
            case _:
                lists = {"place": PLACES, "language": LANGUAGES, "adjective": ADJECTIVES, "verb": VERBS}
                return pick(lists[word])
