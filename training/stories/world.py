"""The state of a story while it is told: its facts, its sentences, and the questions that it answers."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

from llamaspec.training.stories.choices import Choices
from llamaspec.training.stories.lexicon import Character, capital
from llamaspec.training.stories.tables import read_table


class Question(NamedTuple):
    """A question about a story, in several wordings, and its answer."""

    wordings: tuple[str, ...]
    answer: str


@dataclass
class World:
    """The state of a story: where the hero is, who has which thing, the words for templates, and the text so far."""

    choices: Choices
    hero: Character
    place: str = "home"  # where the hero is
    holders: dict[str, str] = field(default_factory=dict)  # for each thing, its owner's name or the place where it lies
    words: dict[str, str] = field(default_factory=dict)  # the meanings of the braces in a template
    sentences: list[str] = field(default_factory=list)
    questions: list[Question] = field(default_factory=list)

    def fill(self, template: str) -> str:
        """Replace the braces of a template by words, and begin with a capital letter."""
        return capital(template.format_map(self.words))

    def say(self, *ways: str) -> None:
        """Add one of these sentences to the text. An empty one adds nothing."""
        way = self.choices.pick(ways)
        if way:
            self.sentences.append(self.fill(way))

    def set(self, **words: str) -> None:
        """Set the texts that replace words in braces. A text for `{they}` also gives one for `{They}`, capitalized."""
        for word, meaning in words.items():
            self.words |= {word: meaning, capital(word): capital(meaning)}

    def choose(self, word: str, options: tuple[str, ...]) -> str:
        """Choose the text that replaces `word` in braces: one of `options`. Returns the text."""
        meaning = self.choices.pick(options)
        self.set(**{word: meaning})
        return meaning

    def ask(self, *ways: str, answer: str) -> None:
        """Add a question for the end of the story, in several wordings with one answer.

        A wording that names the hero is also asked with a pronoun and with the hero's kind. This is unambiguous,
        because friends and helpers have a different pronoun and a different kind.
        """
        wordings = [self.fill(way) for named in ways for way in unnamed(named)]
        self.questions.append(Question(tuple(dict.fromkeys(wordings)), self.fill(answer) + "."))

    def ask_about(self, section: str, **replacements: str) -> None:
        """Add the questions in a section of questions.toml.

        `replacements` maps names in braces to the templates that replace them.
        """

        def replaced(template: str) -> str:
            for name, replacement in replacements.items():
                template = template.replace(f"{{{name}}}", replacement)
            return template

        for ways, answer in questions_of(section):
            self.ask(*map(replaced, ways), answer=replaced(answer))

    def go(self, place: str) -> None:
        """Move the hero. Raises ValueError if the hero is there already."""
        if place == self.place:
            raise ValueError(f"already there: {place}")
        self.place = place

    def put(self, thing: str, holder: str, *, taken_from: str | None) -> None:
        """Move a thing. Raises ValueError if `taken_from` does not hold it."""
        if self.holders.get(thing) != taken_from:
            raise ValueError(f"{thing}: expected the holder {taken_from}, got {self.holders.get(thing)}")
        self.holders[thing] = holder


@cache
def questions_of(section: str) -> tuple[Question, ...]:
    """Read a section of questions.toml, with its shared wordings inserted."""
    table = read_table("questions")

    def expanded(ways: tuple[str, ...]) -> Iterator[str]:
        for way in ways:
            if way.startswith("+"):
                yield from table["shared"][way[1:]]
            else:
                yield way

    return tuple(Question(tuple(expanded(entry["wordings"])), entry["answer"]) for entry in table[section])


@cache
def unnamed(question: str) -> tuple[str, ...]:
    """Return three wordings of a question about {n}: by name, by pronoun, and by kind.

    >>> unnamed("Who helped {n}?"), unnamed("Did {n} smile?")[1]
    (('Who helped {n}?', 'Who helped {them}?', 'Who helped the {kind}?'), 'Did {they} smile?')
    """
    subject = re.compile(r"\b(does|did|is|was|Did|Was|Can) \{n\}")
    pronoun = subject.sub(r"\1 {they}", question)
    return tuple(dict.fromkeys((question, pronoun.replace("{n}", "{them}"), question.replace("{n}", "the {kind}"))))
