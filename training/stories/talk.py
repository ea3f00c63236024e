"""Conversations with the storyteller: requests, stories, questions about them, greetings, and unrelated questions.

The surprisal of an assistant's message counts only its own choices. An answer that follows from a story has none.
"""

import random
import re
from collections.abc import Callable
from typing import NamedTuple

from llamaspec.training.stories.choices import Choices
from llamaspec.training.stories.corpus import SUBJECT_WEIGHTS, SUBJECTS, Story, StoryRequest, Subject, tell_story
from llamaspec.training.stories.lexicon import (
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
from llamaspec.training.stories.outside import BraceWords, unknown_noun, unknown_person, unknown_question
from llamaspec.training.stories.phrases import (
    ABILITIES,
    ABOUT_IT,
    AFTERWARDS,
    AGREEMENTS,
    ANOTHER,
    ASKED_OF_A_NAME,
    ASKED_OF_A_THING,
    KNOWN,
    MORE,
    NOT_TOLD,
    NOTHING_TOLD,
    OFFER,
    OFFER_ANOTHER,
    OTHER_PLOTS,
    REFUSALS,
    REMARKS,
    REQUESTS,
    SOCIAL,
    UNKNOWN,
)
from llamaspec.training.stories.world import unnamed

NAMES = (*GIRLS, *BOYS, *SHE_ANIMALS, *HE_ANIMALS)
HELPERS = tuple(sorted({helper for spot in SPOTS.values() for helper in spot.helpers} - set(ANIMALS)))


class TalkMessage(NamedTuple):
    """A part of a conversation."""

    role: str  # user, assistant; "story" for a story by itself
    content: str
    nats: float  # -log p(content | all messages before); meaningless for a user's message, which is input
    of_story: bool = False  # whether the answer follows from a story, or says that the story does not have it


class Talk:
    """A conversation under construction."""

    def __init__(self, choices: Choices):
        self.messages: list[TalkMessage] = []
        self.stories: list[Story] = []
        self._choices = choices

    def turn(self, question_text: str, answer: Callable[[], str], *, of_story: bool = False) -> None:
        """Add a person's message and the answer. Only choices in the answer count in its surprisal."""
        self.messages.append(TalkMessage("user", casually(self._choices, question_text), 0.0))
        before = self._choices.nats
        content = answer()
        self.messages.append(TalkMessage("assistant", content, self._choices.nats - before, of_story))

    def social(self, turn: tuple[tuple[str, ...], tuple[str, ...]]) -> None:
        """Add a greeting, thanks or similar, and its answer."""
        openings, answers = turn
        self.turn(self._choices.pick(openings), lambda: self._choices.pick(answers))

    def story(self) -> None:
        """Add a request, and the story."""
        pick = self._choices.pick
        plan = StoryRequest()
        if self._offered and pick((True, False)):
            question_text = pick(AGREEMENTS)
        else:
            plan, about = request(self._choices)
            # If the oldest turns were dropped, a conversation can begin with a request for another story.
            another = pick((True, False), (3, 1) if self.stories else (1, 7))
            what = pick(ANOTHER if another else KNOWN)
            question_text = capital(pick(REQUESTS).format(what + about))

        def tell() -> str:
            plots = {story.plot for story in self.stories}
            heroes = {story.facts["n"] for story in self.stories}
            self.stories.append(tell_story(self._choices, plan, plots=plots, heroes=heroes))
            return self.stories[-1].text

        self.turn(question_text, tell)

    def question(self) -> None:
        """Add a question about the last story, or some other remark."""
        kinds = ("told", "not told", "other plot", "not in it", "more", "outside", "remark", "social")
        match self._choices.pick(kinds, (18, 4, 3, 2, 1, 3, 1, 1)):
            case "told":
                open_questions = [
                    question for question in self.stories[-1].questions if question not in self._questions
                ]
                question = self._choices.pick(open_questions)
                self._questions.append(question)
                self.turn(self._choices.pick(question.wordings), lambda: question.answer, of_story=True)
            case "not told":
                self._not_told(NOT_TOLD)
            case "other plot":
                plots = [plot for plot in OTHER_PLOTS if not tells_of(self.stories[-1].plot, plot)]
                self._not_told(OTHER_PLOTS[self._choices.pick(plots)])
            case "not in it":
                self._not_in_it()
            case "more":
                question_text = self._about_the_story(MORE)
                self.turn(question_text, lambda: f"That was the whole story. {OFFER_ANOTHER}", of_story=True)
                if self._choices.pick((True, False), (1, 3)):
                    self.turn(self._choices.pick(REFUSALS), lambda: "All right. Ask me when you want to hear one.")
            case "outside":
                self.outside()
            case "remark":
                self.remark()
            case _:
                self.social(self._choices.pick((*SOCIAL, *AFTERWARDS)))

    def questions(self, least: int, most: int) -> None:
        """Add n questions or other remarks by `question`, with a random n from `least` to `most`."""
        self._questions = []
        for _ in range(self._choices.pick(range(least, most + 1))):
            self.question()

    def outside(self) -> None:
        """Add a question that no story answers, or a request that cannot be met. The answer says what to ask."""
        pick, has_story = self._choices.pick, bool(self.stories)
        kinds, weights = ("question", "story", "abilities"), (4, 2, 1)
        if has_story:
            kinds, weights = (*kinds, "about it"), (*weights, 4)
        match pick(kinds, weights):
            case "question":
                question_text, answer = unknown_question(self._choices), "I do not know that."
            case "about it":
                question_text, answer = self._about_the_story(ABOUT_IT), "I do not know that."
            case "story":
                question_text, answer = self._unknown_story(), "I do not know such a story."
            case _:
                question_text, answer = pick(ABILITIES), "I tell stories."
        self.turn(question_text, lambda: f"{answer} {self._advice()}", of_story=has_story)

    def remark(self) -> None:
        """Add a remark that is not a question. The answer says what to ask."""
        if not self._offered:
            self.turn(self._choices.pick(REMARKS), self._advice, of_story=bool(self.stories))

    def nothing_told(self) -> None:
        """Add a question about a story before there is one."""
        questions = tell_story(self._choices, StoryRequest()).questions
        self.turn(self._choices.pick(self._choices.pick(questions).wordings), lambda: NOTHING_TOLD)

    @property
    def _offered(self) -> bool:
        """True if the last answer offers a story."""
        return bool(self.messages) and self.messages[-1].content.endswith((OFFER, OFFER_ANOTHER))

    def _unknown_story(self) -> str:
        """Ask for an impossible story: with an unknown hero, with an unknown thing, or of a different kind."""
        pick, what = self._choices.pick, self._choices.pick((*KNOWN, *ANOTHER))
        unknown, known_hero = unknown_noun(self._choices), pick(KINDS)
        match pick(("hero", "subject", "kind"), (2, 1, 1)):
            case "hero":
                hero = pick((a(unknown_noun(self._choices)), unknown_person(self._choices), a(pick(HELPERS))))
                with_known = pick(("", f" and {a(pick(THINGS).noun)}", f" and {a(unknown)}"))
                what = f"{what} about {hero}{with_known}"
            case "subject":
                verb = f"{BraceWords(self._choices)['verb']} {a(unknown)}"
                subject = pick((f"and {a(unknown)}", f"and {pick(COLORS)} {unknown}s", f"who wants to {verb}"))
                what = f"{what} about {a(known_hero)} {subject}"
            case _:
                what = pick(UNKNOWN).format_map(BraceWords(self._choices))
        return capital(pick(REQUESTS).format(what))

    def _about_the_story(self, ways: tuple[str, ...]) -> str:
        """Choose one of the templates `ways`, and fill in words of the last story, or words that no story contains."""
        facts = self.stories[-1].facts
        characters = [f"the {facts[who]}" for who in ("helper", "giver", "relative", "who") if who in facts]
        own = {"lost": facts.get("noun"), "found": facts.get("noun"), "grow": "seed"}.get(
            self.stories[-1].plot, "house"
        )
        words = facts | {"someone": self._choices.pick(characters or [facts["m"]]), "own": f"the {own}"}
        words = {word: words[word] for word in ("n", "they", "them", "their", "kind", "someone", "own")}
        return capital(self._choices.pick(ways).format_map(BraceWords(self._choices, words)))

    def _not_told(self, ways: tuple[str, ...]) -> None:
        """Add a question that the last story does not answer."""
        question_text = self._about_the_story(unnamed(self._choices.pick(ways)))
        self.turn(question_text, lambda: "The story does not say.", of_story=True)

    def _advice(self) -> str:
        """Say what the person can ask: a question about the last story, or for a new story."""
        if self.stories:
            return f"Ask me about {self.stories[-1].facts['n']}, or for another story."
        kind, group = self._choices.pick(KINDS), self._choices.pick(SUBJECTS)
        return f"Ask me for a story about {a(kind)}{_about(self._choices.pick(group), '')}."

    def _not_in_it(self) -> None:
        """Add a question about a name or a thing that no story of this conversation contains.

        Some wordings of the question come from a second story that contains the name or the thing. We tell that story
        only to get these wordings.
        """
        pick, told_text = self._choices.pick, " ".join(story.text for story in self.stories)
        facts = self.stories[-1].facts
        if pick(("name", "thing")) == "name":
            absent = pick([name for name in NAMES if name not in told_text])
            kind = pick([kind for kind in KINDS if absent in names(kind)])
            plan, ways = StoryRequest(kind, absent), ASKED_OF_A_NAME
        else:
            thing = pick([thing for thing in THINGS if thing.noun not in told_text])
            absent, plan, ways = thing.noun, StoryRequest(facts["kind"], facts["n"], thing), ASKED_OF_A_THING
        absent_names = {name for name in NAMES if name not in told_text} - {absent}
        wordings = [way for question in tell_story(self._choices, plan).questions for way in question.wordings]
        wordings = [
            way for way in wordings if absent in (words := set(re.findall(r"\w+", way))) and not words & absent_names
        ]
        ways = [way.format(absent, n=facts["n"]) for way in ways]
        self.turn(
            pick([*dict.fromkeys((*wordings, *ways))]), lambda: f"There is no {absent} in the story.", of_story=True
        )


def conversation(rng: random.Random) -> list[TalkMessage]:
    """Make a conversation: mostly requests for stories, and questions about them.

    >>> for role, content, *_ in conversation(random.Random(11)):
    ...     print(f"{role}: {content[:60]}")
    user: Can you write a sweet story
    assistant: Far, far away, in a warm den between two hills, lived a litt
    user: did dot keep it
    assistant: No, Dot gave it to Ben.
    user: Tell me more
    assistant: That was the whole story. Shall I tell you another one?
    user: Where is her home?
    assistant: In a warm den between two hills.
    user: How did Ben feel?
    assistant: He felt upset.
    user: What did Dot do with the kite?
    assistant: Dot gave it to Ben.
    """
    choices = Choices(rng)
    talk = Talk(choices)
    stories = choices.pick((0, 1, 2, 3, 4), (2, 8, 3, 2, 1))
    begin = choices.pick(("story", "hello", "outside"), (4, 2, 1)) if stories else choices.pick(("hello", "outside"))
    for _ in range(0 if begin == "story" else choices.pick((1, 2, 3) if stories else (1, 2, 3, 4, 5))):
        match choices.pick(
            ("social", "outside", "remark", "nothing told"), (12, 3, 1, 2) if begin == "hello" else (3, 12, 2, 2)
        ):
            case "social":
                talk.social(choices.pick((*SOCIAL, *AFTERWARDS)))
            case "outside":
                talk.outside()
            case "remark":
                talk.remark()
            case _:
                talk.nothing_told()
    for _ in range(stories):
        talk.story()
        talk.questions(*{1: (3, 9), 2: (1, 5), 3: (0, 2), 4: (0, 0)}[stories])
    if choices.pick((True, False), (1, 2)):
        talk.social(choices.pick(AFTERWARDS))
    return talk.messages


def request(choices: Choices) -> tuple[StoryRequest, str]:
    """Choose a story to ask for.

    Returns the request, and words that can follow "a story", such as " about a fox and a red kite".
    """
    named = choices.pick(("hero and subject", "hero", "subject", "nothing"), (4, 2, 1, 2))
    plan, hero = StoryRequest(), ""
    if "hero" in named:
        kind = choices.pick(KINDS, KIND_WEIGHTS)
        name = choices.pick(names(kind)) if choices.pick((True, False)) else None
        plan = StoryRequest(kind=kind, name=name)
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
    """Describe the subject of a story, to follow the words for its hero: for example, " and a red kite"."""
    match subject:
        case Skill():
            return f" who learns to {subject.verb}"
        case Dish():
            return f" and {subject.some}"
        case _:
            return " and " + a(f"{color} {subject.noun}".strip())


def tells_of(plot: str, other_plot: str) -> bool:
    """Tell whether a story with `plot` can answer questions about stories with `other_plot`.

    A story about growing also tells of cooking.
    """
    return plot == other_plot or (plot, other_plot) == ("grow", "bake")


def casually(choices: Choices, text: str) -> str:
    """Write `text` as people type: maybe without capital letter or full stop, maybe with contractions."""
    if choices.pick((True, False), (1, 3)):
        text = re.sub(r"^(What|Who|Where) is\b", r"\1's", text).replace("I am ", "I'm ").replace("did not", "didn't")
        text = text.replace("color", "colour").replace("do not", "don't").replace("was not", "wasn't")
        text = text.replace("That is", "That's").replace("It is", "It's").replace("I would", "I'd")
        text = text.replace("favorite", "favourite").replace("you are", "you're").replace("You are", "You're")
    if choices.pick((True, False), (1, 7)) and " " in text:
        start = choices.pick(("So ", "And ", "But ", "OK, ", "Well, ", "Hm, ", "Hey, ", "Please, ", "Um, ", "Now, "))
        name = text.split()[0] in NAMES or text.startswith("I")
        text = start + (text if name else text[0].lower() + text[1:])
    bare = text.rstrip(".?!") or text
    careless = bare if bare.startswith(("I ", "OK")) else bare[0].lower() + bare[1:]
    return choices.pick(tuple(dict.fromkeys((text, bare, careless, bare.lower()))))
