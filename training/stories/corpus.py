"""Little stories, and talk about them, from a grammar that knows its own entropy.

A text is made by choices alone, each made and priced by `Choices.pick`. The grammar is unambiguous: another choice
makes another text, since a choice is told soon after it is made, and no two ways to tell it read the same. So the
probability of a text is the product of those of its choices, and its surprisal, -log p, is exactly `nats`. The mean of
nats over the mean of tokens is the entropy rate of the corpus for a given tokenizer. No model's mean loss on new
stories can be less, and a model that has learned the grammar comes close.

A model learns the assistant's part of a conversation. The person's words are given, and cost the model nothing. A story
that was asked for by hero and topic has only the rest of its choices as its surprisal. An answer has none, since it
follows from the story.

Training takes even seeds, evaluation odd ones. A story of 40 nats is one of some e**40: no held-out one was trained on.
"""

import random
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from training.stories.choices import Choices
from training.stories.lexicon import (
    CHILDREN,
    COLOURS,
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
    a,
    capital,
    character,
    names,
)
from training.stories.plots import Question, Topic, tell

SUBJECTS = (THINGS, DISHES, WEATHERS, PLANTS, SKILLS)
SUBJECT_WEIGHTS = (2, 1, 1, 1, 1)  # things have two plots


class Story(NamedTuple):
    """A story, what can be asked about it, and its probability."""

    text: str
    facts: dict[str, str]  # the words of its world: n is the hero's name, m the friend's, noun the thing
    questions: tuple[Question, ...]
    nats: float  # -log p(text)
    trail: tuple[int, ...]  # the choices that made it, for `Replay`


class Message(NamedTuple):
    """A part of a conversation."""

    role: str  # user, assistant
    content: str
    nats: float  # -log p(content) given all before it; without meaning for a user, whose words are given


class Plan(NamedTuple):
    """A request for a story. A field that is None is left open, and the story chooses it."""

    kind: str | None = None
    name: str | None = None
    subject: Thing | Dish | Weather | Plant | Skill | None = None
    colour: str | None = None


OPEN = Plan()


def story(rng: random.Random) -> Story:
    """Tell a story, all of whose choices are random.

    >>> story(random.Random(1)).text.split(". ")[0]
    'There was once a clever girl called Nora, who lived in a pretty village'
    """
    return told(Choices(rng), OPEN)


def told(choices: Choices, plan: Plan) -> Story:
    """Tell the story that `plan` asks for; its surprisal is that of the choices that the plan left open."""
    before = choices.nats
    kind = plan.kind or choices.pick(KINDS, KIND_WEIGHTS)
    hero = character(plan.name or choices.pick(names(kind)), kind)
    subject = plan.subject or choices.pick(choices.pick(SUBJECTS, SUBJECT_WEIGHTS))
    colour = plan.colour or (choices.pick(COLOURS) if isinstance(subject, Thing) else "")
    world = tell(choices, hero, Topic(choices.pick(plots_of(subject)), subject, colour))
    text = " ".join(world.sentences)
    facts = {word: meaning for word, meaning in world.words.items() if word[0].islower()}
    return Story(text, facts, tuple(world.questions), choices.nats - before, tuple(choices.trail))


def plots_of(subject: Thing | Dish | Weather | Plant | Skill) -> tuple[str, ...]:
    """List the plots that a subject can have."""
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


SOCIAL: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (
        ("Hello!", "Hello.", "Hi!", "Hi there!", "Hey!", "Good morning!", "Good evening!"),
        ("Hello! Shall I tell you a story?", "Hello! I am happy to see you."),
    ),
    (("Who are you?", "What are you?", "What is your name?"), ("I am a small storyteller.",)),
    (("How are you?", "Are you well?"), ("I am well, thank you.",)),
    (
        ("What can you do?", "Can you help me?", "What can I ask you?"),
        ("I can tell you a story. Then you can ask me about it.",),
    ),
    (("Who found the kite?", "What colour was the ball?", "Where was it?"), ("I have not told you a story yet.",)),
)
AFTERWARDS = (
    (
        ("Thank you!", "Thank you.", "Thanks!", "Thank you for the story!", "That was a nice story.", "I like it."),
        ("You are welcome!", "I am glad that you like it."),
    ),
    (("Goodbye!", "Bye!", "See you soon!"), ("Goodbye! Come back soon.",)),
    (("Good night!", "I am tired."), ("Good night! Sleep well.",)),
)
REQUESTS = (
    "Tell me {}.",
    "Please tell me {}.",
    "Can you tell me {}?",
    "Can you tell me {}, please?",
    "I want to hear {}.",
    "I would like {}.",
    "{}, please.",
    "Do you know {}?",
)


def conversation(rng: random.Random) -> list[Message]:
    """Make some turns: mostly a story that was asked for, and questions about it.

    >>> for role, content, _ in conversation(random.Random(171)):
    ...     print(f"{role}: {content[:39]}")
    user: Tell me a story
    assistant: This is the story of Otto, a young lamb
    user: who gave Otto the flute
    assistant: His father.
    user: Who brought the flute back
    assistant: The crab.
    user: What did Otto lose
    assistant: The flute.
    user: how did Otto feel
    assistant: He felt happy.
    """
    choices = Choices(rng)
    messages: list[Message] = []
    if choices.pick(("story", "social"), (5, 1)) == "social":
        for turn in some(choices, SOCIAL, most=3):
            messages += social(choices, turn)
        return messages
    if choices.pick(("story", "hello"), (3, 1)) == "hello":
        messages += social(choices, choices.pick(SOCIAL))
    messages += about_a_story(choices, "a story", most=8)
    if choices.pick(("enough", "another"), (4, 1)) == "another":
        messages += about_a_story(choices, "another story", most=6)
    if choices.pick(("silence", "thanks"), (2, 1)) == "thanks":
        messages += social(choices, choices.pick(AFTERWARDS))
    return messages


def about_a_story(choices: Choices, what: str, *, most: int) -> Iterable[Message]:
    """Make a request, the story, and four questions or more about it, up to `most`."""
    plan, wanted = request(choices)
    asked = capital(choices.pick(REQUESTS).format(what + wanted))
    yield Message("user", casually(choices, asked), 0.0)
    tale = told(choices, plan)
    yield Message("assistant", tale.text, tale.nats)
    for question in some(choices, tale.questions, least=4, most=most):
        yield Message("user", casually(choices, choices.pick(question.asked)), 0.0)
        yield Message("assistant", question.answer, 0.0)


def request(choices: Choices) -> tuple[Plan, str]:
    """Choose a plan, and the words that ask for it after "a story": " about a fox and a red kite"."""
    named = choices.pick(("hero and subject", "hero", "subject", "nothing"), (4, 2, 1, 1))
    plan, hero, subject = OPEN, "someone", ""
    if "hero" in named:
        kind = choices.pick(KINDS, KIND_WEIGHTS)
        name = choices.pick(names(kind)) if choices.pick((True, False)) else None
        plan = Plan(kind=kind, name=name)
        hero = f"{a(kind)} named {name}" if name else a(kind)
        if name and kind in CHILDREN:
            hero = choices.pick((hero, name))
    if "subject" in named:
        about = choices.pick(choices.pick(SUBJECTS, SUBJECT_WEIGHTS))
        colour = choices.pick((*COLOURS, "")) if isinstance(about, Thing) else ""
        plan = plan._replace(subject=about, colour=colour or None)
        if isinstance(about, Skill):
            return plan, f" about {hero} who learns to {about.verb}"
        subject = about.some if isinstance(about, Dish) else a(f"{colour} {about.noun}".strip())
    words = " and ".join(word for word in (hero if "hero" in named else "", subject) if word)
    return plan, f" about {words}" if words else ""


def social(choices: Choices, turn: tuple[tuple[str, ...], tuple[str, ...]]) -> Iterable[Message]:
    """Make a turn of good manners: something to say, and an answer to it."""
    asked, answers = turn
    yield Message("user", casually(choices, choices.pick(asked)), 0.0)
    before = choices.nats
    answer = choices.pick(answers)
    yield Message("assistant", answer, choices.nats - before)


def casually(choices: Choices, text: str) -> str:
    """Write `text` as people type: with or without a capital letter and a full stop. Names keep their capitals."""
    careless = text[0].lower() + text[1:].rstrip(".?!") if not text.startswith("I ") else text.rstrip(".?!")
    return choices.pick((text, text.rstrip(".?!"), careless) if careless != text.rstrip(".?!") else (text, careless))


def some[T](choices: Choices, options: Sequence[T], *, least: int = 1, most: int) -> Iterable[T]:
    """Choose from `least` to `most` of `options`, none twice."""
    left = list(options)
    for _ in range(choices.pick(range(least, most + 1))):
        option = choices.pick(left)
        left.remove(option)
        yield option
