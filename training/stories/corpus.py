"""Little stories from a grammar that knows its own entropy.

`Choices.pick` makes every random choice and records its probability. The grammar is unambiguous: the text shows each
choice soon after it is made, and no two options have the same words, so different choices make different texts. The
probability of a text is therefore the product of the probabilities of its choices, and its surprisal, -log p, is
exactly `nats`. The mean of nats divided by the mean number of tokens is the entropy rate of the corpus for a given
tokenizer. No model can have a lower mean loss on new stories, and a model that has learned the grammar comes close.

A model only learns the assistant's part of a conversation. The person's words are input and do not count in the loss.
If the person asked for a hero and a topic, only the remaining choices count as the story's surprisal. An answer has no
surprisal, because it follows from the story.

Training uses even seeds and evaluation odd ones. There are about e**40 stories of 40 nats, so a held-out story was
practically never trained on.
"""

import random
from collections.abc import Set
from typing import NamedTuple

from llamaspec.training.stories.choices import Choices
from llamaspec.training.stories.lexicon import (
    COLORS,
    DISHES,
    KIND_WEIGHTS,
    KINDS,
    PLANTS,
    SKILLS,
    THINGS,
    WEATHERS,
    Dish,
    Plant,
    Skill,
    Thing,
    Weather,
    character,
    names,
)
from llamaspec.training.stories.plots import Topic, tell
from llamaspec.training.stories.world import Question

type Subject = Thing | Dish | Weather | Plant | Skill

SUBJECTS: tuple[tuple[Subject, ...], ...] = (THINGS, DISHES, WEATHERS, PLANTS, SKILLS)
SUBJECT_WEIGHTS = (2, 1, 1, 1, 1)  # things have two plots


class Story(NamedTuple):
    """A story, the questions about it, and its probability."""

    text: str
    plot: str
    facts: dict[str, str]  # the words of its world: n is the hero's name, m the friend's, noun the thing
    questions: tuple[Question, ...]
    nats: float  # -log p(text)
    trail: tuple[int, ...]  # the choices that made it, for `Replay`


class StoryRequest(NamedTuple):
    """A request for a story. A field that is None is left open, and the story chooses it."""

    kind: str | None = None
    name: str | None = None
    subject: Subject | None = None
    color: str | None = None


OPEN = StoryRequest()


def story(rng: random.Random) -> Story:
    """Tell a story with only random choices.

    >>> story(random.Random(1)).text.split(". ")[0]
    'There was once a clever girl called Nora, who lived in a pretty village'
    """
    return tell_story(Choices(rng), OPEN)


def tell_story(
    choices: Choices, plan: StoryRequest, *, plots: Set[str] = frozenset(), heroes: Set[str] = frozenset()
) -> Story:
    """Tell the story that `plan` asks for. Its surprisal counts only the choices that the plan leaves open.

    These choices avoid `plots` and names of `heroes` from earlier stories.
    """
    before = choices.nats
    kind = plan.kind or choices.pick(KINDS, KIND_WEIGHTS)
    hero = character(plan.name or choices.pick([name for name in names(kind) if name not in heroes]), kind)
    subject = plan.subject or _subject(choices, plots)
    color = plan.color or (choices.pick(COLORS) if isinstance(subject, Thing) else "")
    plot = choices.pick([plot for plot in plots_of(subject) if plot not in plots] or plots_of(subject))
    world = tell(choices, hero, Topic(plot, subject, color))
    text = " ".join(world.sentences)
    facts = {word: meaning for word, meaning in world.words.items() if word[0].islower()}
    return Story(text, plot, facts, tuple(world.questions), choices.nats - before, tuple(choices.trail))


def _subject(choices: Choices, plots: Set[str]) -> Subject:
    """Choose a subject with a plot that is not in `plots`."""
    weighted = [
        (subjects, weight)
        for subjects, weight in zip(SUBJECTS, SUBJECT_WEIGHTS, strict=True)
        if not plots >= set(plots_of(subjects[0]))
    ]
    return choices.pick(choices.pick(*map(list, zip(*weighted, strict=True))))


def plots_of(subject: Subject) -> tuple[str, ...]:
    """List the possible plots for a subject."""
    match subject:
        case Thing():
            return ("lost", "found")
        case Dish():
            return ("bake",)
        case Weather():
            return ("caught",)
        case Plant():
            return ("grow",)
        case Skill():
            return ("learn",)
