"""Conversations with the storyteller: requests, stories, questions about them, good manners, and all other questions.

A message of the assistant has the surprisal of its own choices alone. An answer that a story decides has none.
"""

import random
import re
from collections.abc import Callable
from typing import NamedTuple

from training.stories.choices import Choices
from training.stories.corpus import SUBJECT_WEIGHTS, SUBJECTS, Plan, Story, Subject, tell_story
from training.stories.lexicon import (
    ANIMALS,
    BOYS,
    CHILDREN,
    COLORS,
    GIRLS,
    HE_ANIMALS,
    KIND_WEIGHTS,
    KINDS,
    SHE_ANIMALS,
    SPOTS,
    THINGS,
    Dish,
    Skill,
    Thing,
    a,
    capital,
    names,
)
from training.stories.outside import unknown_noun, unknown_person, unknown_question
from training.stories.plots import unnamed

NAMES = (*GIRLS, *BOYS, *SHE_ANIMALS, *HE_ANIMALS)
HELPERS = tuple(sorted({helper for spot in SPOTS.values() for helper in spot.helpers} - set(ANIMALS)))


class Message(NamedTuple):
    """A part of a conversation."""

    role: str  # user, assistant; "story" for a story by itself
    content: str
    nats: float  # -log p(content) given all before it; without meaning for a user, whose words are given
    of_story: bool = False  # whether a story decides it: an answer that is in the story, or that says it is not


OFFER = "Shall I tell you a story?"
OFFER_ANOTHER = "Shall I tell you another one?"
SOCIAL: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (
        ("Hello!", "Hello.", "Hi!", "Hi there!", "Hey!", "Good morning!", "Good evening!"),
        (f"Hello! {OFFER}", "Hello! I am happy to see you. Ask me for a story."),
    ),
    (
        ("Who are you?", "What are you?", "What is your name?", "Are you a robot?", "Are you real?", "Who made you?"),
        ("I am a small storyteller. I live in a computer.",),
    ),
    (("How are you?", "Are you well?", "How do you do?"), ("I am well, thank you. Ask me for a story.",)),
    (
        ("Who found the kite?", "What color was the ball?", "Where was it?", "Why was she sad?", "Who helped him?"),
        ("I have not told you a story yet.",),
    ),
)
ABILITIES = (
    "What can you do?",
    "What can you tell me?",
    "What do you know?",
    "What can I ask you?",
    "Can you help me?",
    "Help!",
    "Help",
    "?",
    "What should I do now?",
    "How does this work?",
    "What kind of stories do you have?",
    "What are your stories about?",
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
    "Could you tell me {}?",
    "Tell {}.",
    "Give me {}.",
    "I want {}.",
    "I want to hear {}.",
    "I would like {}.",
    "I would like to hear {}.",
    "{}, please.",
    "{}",
    "Do you know {}?",
    "Do you have {}?",
    "Now tell me {}.",
)
ANOTHER = ("another story", "another one", "one more story", "a new story", "another little story")
AGREEMENTS = ("Yes!", "Yes, please.", "Yes.", "OK.", "Please do.", "Sure!", "Go ahead.", "I would love that.")
REFUSALS = ("No.", "No, thank you.", "Not now.", "Maybe later.")
MORE = (
    "Tell me more.",
    "Tell me more about it.",
    "What happened next?",
    "What happened then?",
    "And then?",
    "Go on.",
    "Continue.",
    "Is there more?",
    "Is that all?",
    "Make it longer.",
    "Tell it again.",
    "Tell me the story again.",
    "That was too short.",
    "I did not like it.",
)
NOT_TOLD = (
    "How tall was {n}?",
    "What did {n} eat for breakfast?",
    "What did {n} dream about?",
    "What did {n} do the year before?",
    "When was {n} born?",
    "How many friends did {n} have?",
    "What color was the hair of {n}?",
    "What color was the house?",
    "What did the house look like?",
    "What is the last name of {n}?",
    "Did {n} go to school?",
    "Did {n} have a {noun}?",
    "Did {n} have a sister?",
    "Did {n} see the {noun}?",
    "Did {n} like the {noun}?",
    "Did {n} know {person}?",
    "Who was the best teacher of {n}?",
    "Who wrote the story?",
    "Who is {person} in the story?",
    "Where was the {noun}?",
    "Where did {n} buy the {noun}?",
    "Where was {n} born?",
    "What did the {noun} say?",
    "What did {person} say?",
    "Why did {n} have a {noun}?",
    "Why did {n} live there?",
    "What year was it?",
    "How long did it take?",
    "How much did it cost?",
    "How many {noun}s were there in the story?",
    "What was the name of the mother?",
    "What was the phone number of {n}?",
)
ASKED_OF_A_NAME = ("Where did {} live?", "Who helped {}?", "How did {} feel?", "What did {} want?", "Who was {}?")
ASKED_OF_A_THING = ("What color was the {}?", "Where was the {}?", "Who found the {}?", "Who gave {n} the {}?")


class Talk:
    """A conversation as it is made."""

    def __init__(self, choices: Choices):
        self.messages: list[Message] = []
        self.stories: list[Story] = []
        self._choices = choices

    def turn(self, asked: str, answer: Callable[[], str], *, of_story: bool = False) -> None:
        """Add what the person says, and the answer, whose choices alone are priced."""
        self.messages.append(Message("user", casually(self._choices, asked), 0.0))
        before = self._choices.nats
        content = answer()
        self.messages.append(Message("assistant", content, self._choices.nats - before, of_story))

    def social(self, turn: tuple[tuple[str, ...], tuple[str, ...]]) -> None:
        """Add a turn of good manners."""
        asked, answers = turn
        self.turn(self._choices.pick(asked), lambda: self._choices.pick(answers))

    def story(self) -> None:
        """Add a request, and the story."""
        pick = self._choices.pick
        offered = bool(self.messages) and self.messages[-1].content.endswith((OFFER, OFFER_ANOTHER))
        plan = Plan()
        if offered and pick((True, False)):
            asked = pick(AGREEMENTS)
        else:
            plan, about = request(self._choices)
            # A conversation whose oldest turns were forgotten can begin with another story.
            another = pick((True, False), (3, 1) if self.stories else (1, 7))
            what = "a story"
            if another:
                what = pick(ANOTHER)
            asked = capital(pick(REQUESTS).format(what + about))

        def tell() -> str:
            plots = {story.plot for story in self.stories}
            heroes = {story.facts["n"] for story in self.stories}
            self.stories.append(tell_story(self._choices, plan, plots=plots, heroes=heroes))
            return self.stories[-1].text

        self.turn(asked, tell)

    def question(self) -> None:
        """Add a question about the last story, or anything else that people say."""
        kind = self._choices.pick(("told", "not told", "not in it", "more", "outside"), (16, 2, 2, 1, 2))
        match kind:
            case "told":
                left = [question for question in self.stories[-1].questions if question not in self._asked]
                question = self._choices.pick(left)
                self._asked.append(question)
                self.turn(self._choices.pick(question.asked), lambda: question.answer, of_story=True)
            case "not told":
                words = {"noun": unknown_noun(self._choices), "person": unknown_person(self._choices)}
                asked = self._choices.pick(unnamed(self._choices.pick(NOT_TOLD)))
                self.turn(
                    asked.format_map(self.stories[-1].facts | words), lambda: "The story does not say.", of_story=True
                )
            case "not in it":
                self._not_in_it()
            case "more":
                self.turn(self._choices.pick(MORE), lambda: f"That was the whole story. {OFFER_ANOTHER}", of_story=True)
                if self._choices.pick((True, False), (1, 3)):
                    self.turn(self._choices.pick(REFUSALS), lambda: "All right. Ask me when you want to hear one.")
            case _:
                self.outside()

    def questions(self, least: int, most: int) -> None:
        """Add `least` to `most` questions."""
        self._asked = []
        for _ in range(self._choices.pick(range(least, most + 1))):
            self.question()

    def outside(self) -> None:
        """Add a question that no story answers, or a story that cannot be told; the answer says what can be asked."""
        pick = self._choices.pick
        if pick(("question", "story"), (3, 1)) == "story":
            hero = pick((unknown_noun(self._choices), unknown_person(self._choices), pick(HELPERS)))
            hero = hero if hero[0].isupper() else a(hero)
            with_known = pick(("", f" and {a(pick(THINGS).noun)}", f" and {a(unknown_noun(self._choices))}"))
            what = pick(("a story", *ANOTHER))
            asked = capital(pick(REQUESTS).format(f"{what} about {hero}{with_known}"))
            self.turn(asked, lambda: f"I do not know such a story. {self._advice()}", of_story=bool(self.stories))
        elif pick((True, False), (1, 6)):
            self.turn(pick(ABILITIES), lambda: f"I tell stories. {self._advice()}", of_story=bool(self.stories))
        else:
            self.turn(
                unknown_question(self._choices),
                lambda: f"I do not know that. {self._advice()}",
                of_story=bool(self.stories),
            )

    def _advice(self) -> str:
        """Say what can be asked: about the story, or for one."""
        if self.stories:
            return f"Ask me about {self.stories[-1].facts['n']}, or for another story."
        kind, group = self._choices.pick(KINDS), self._choices.pick(SUBJECTS)
        return f"Ask me for a story about {a(kind)}{_about(self._choices.pick(group), '')}."

    def _not_in_it(self) -> None:
        """Add a question about a name or a thing that no story so far has."""
        pick, said = self._choices.pick, " ".join(story.text for story in self.stories)
        if pick(("name", "thing")) == "name":
            who = pick([name for name in NAMES if name not in said])
            self.turn(pick(ASKED_OF_A_NAME).format(who), lambda: f"There is no {who} in the story.", of_story=True)
        else:
            what = pick([thing.noun for thing in THINGS if thing.noun not in said])
            asked = pick(ASKED_OF_A_THING).format(what, n=self.stories[-1].facts["n"])
            self.turn(asked, lambda: f"There is no {what} in the story.", of_story=True)


def conversation(rng: random.Random) -> list[Message]:
    """Make some turns: mostly stories that were asked for, and questions about them.

    >>> for role, content, *_ in conversation(random.Random(73)):
    ...     print(f"{role}: {content[:60]}")
    user: I want to hear a story about a bear.
    assistant: Do you know Poppy? Poppy was a kind bear and lived in a pret
    user: Help
    assistant: I tell stories. Ask me about Poppy, or for another story.
    user: why did she live there
    assistant: The story does not say.
    user: How did the bear feel at the end?
    assistant: She felt happy.
    """
    choices = Choices(rng)
    talk = Talk(choices)
    stories = choices.pick((0, 1, 2, 3, 4), (2, 8, 3, 2, 1))
    begin = choices.pick(("story", "hello", "outside"), (4, 2, 1)) if stories else choices.pick(("hello", "outside"))
    for _ in range(0 if begin == "story" else choices.pick((1, 2, 3) if stories else (1, 2, 3, 4, 5))):
        if choices.pick((True, False), (4, 1) if begin == "hello" else (1, 4)):
            talk.social(choices.pick(SOCIAL))
        else:
            talk.outside()
    for _ in range(stories):
        talk.story()
        talk.questions(*{1: (3, 9), 2: (1, 5), 3: (0, 2), 4: (0, 0)}[stories])
    if choices.pick((True, False), (1, 2)):
        talk.social(choices.pick(AFTERWARDS))
    return talk.messages


def request(choices: Choices) -> tuple[Plan, str]:
    """Choose a plan, and the words that ask for it after "a story": " about a fox and a red kite"."""
    named = choices.pick(("hero and subject", "hero", "subject", "nothing"), (4, 2, 1, 2))
    plan, hero = Plan(), ""
    if "hero" in named:
        kind = choices.pick(KINDS, KIND_WEIGHTS)
        name = choices.pick(names(kind)) if choices.pick((True, False)) else None
        plan = Plan(kind=kind, name=name)
        hero = f"{a(kind)} named {name}" if name else a(kind)
        if name and kind in CHILDREN:
            hero = choices.pick((hero, name))
    if "subject" not in named:
        return plan, f" about {hero}" if hero else ""
    about = choices.pick(choices.pick(SUBJECTS, SUBJECT_WEIGHTS))
    color = choices.pick((*COLORS, "")) if isinstance(about, Thing) else ""
    plan = plan._replace(subject=about, color=color or None)
    if hero or isinstance(about, Skill):
        return plan, f" about {hero or 'someone'}{_about(about, color)}"
    return plan, " about" + _about(about, color).removeprefix(" and")


def _about(subject: Subject, color: str) -> str:
    """Say what a story is about beside its hero."""
    match subject:
        case Skill():
            return f" who learns to {subject.verb}"
        case Dish():
            return f" and {subject.some}"
        case _:
            return " and " + a(f"{color} {subject.noun}".strip())


def casually(choices: Choices, text: str) -> str:
    """Write `text` as people type: with or without a capital letter, a full stop, and full words."""
    if choices.pick((True, False), (1, 3)):
        text = re.sub(r"^(What|Who|Where) is\b", r"\1's", text).replace("I am ", "I'm ").replace("did not", "didn't")
        text = text.replace("color", "colour")
    bare = text.rstrip(".?!") or text
    careless = bare if bare.startswith("I ") else bare[0].lower() + bare[1:]
    return choices.pick(tuple(dict.fromkeys((text, bare, careless))))
