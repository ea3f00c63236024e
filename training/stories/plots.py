"""The plots: six small simulations in which every event needs what came before it.

A plot moves its hero and a thing about in a `World`, and says each event in one of a few ways. The world refuses what
cannot be, such as going to where one is already, or giving what somebody else has. The next event depends on the state:
the wind does not take a drum, a kite that is in the sea is not in a tree, and a frog does not climb.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

from llamaspec.training.stories.choices import Choices
from llamaspec.training.stories.lexicon import (
    ANIMALS,
    COLORS,
    DAYS,
    GIVERS,
    HELPER_TRAITS,
    HOMES,
    KINDS,
    NEEDS,
    PLACES,
    RELATIVES,
    SOILS,
    SPOTS,
    TRAITS,
    TREATS,
    Character,
    Dish,
    Place,
    Plant,
    Skill,
    Thing,
    Weather,
    a,
    capital,
    friend_of,
)


class Question(NamedTuple):
    """A question about a story, in several wordings, and its answer."""

    asked: tuple[str, ...]
    answer: str


COLOR_OF = (
    "What color was the {noun}?",
    "What color did the {noun} have?",
    "What color is the {noun}?",
    "What color was it?",
    "Which color was the {noun}?",
    "Which color did it have?",
    "What was the color of the {noun}?",
)
WANTED = ("What did {n} want?", "What did {n} want to do?", "What was the wish of {n}?", "What was the plan of {n}?")


class Topic(NamedTuple):
    """The subject of a story, beside its hero."""

    plot: str
    about: Thing | Dish | Plant | Weather | Skill
    color: str = ""


@dataclass
class World:
    """The state of a story: who is where, who has what, the words for it, and the text so far."""

    choices: Choices
    hero: Character
    place: str = "home"  # of the hero
    holders: dict[str, str] = field(default_factory=dict)  # of a thing: somebody's name, or where it lies
    words: dict[str, str] = field(default_factory=dict)  # what the braces in a template stand for
    sentences: list[str] = field(default_factory=list)
    questions: list[Question] = field(default_factory=list)

    def fill(self, template: str) -> str:
        """Put words into the braces of a template, and a capital letter in front."""
        return capital(template.format_map(self.words))

    def say(self, *ways: str) -> None:
        """Say one of `ways`; "" says nothing."""
        way = self.choices.pick(ways)
        if way:
            self.sentences.append(self.fill(way))

    def set(self, **words: str) -> None:
        """Set what words stand for from now on; {They} is {they} at the start of a sentence."""
        for word, meaning in words.items():
            self.words |= {word: meaning, capital(word): capital(meaning)}

    def choose(self, word: str, options: tuple[str, ...]) -> str:
        """Choose one of `options`, which `word` stands for from now on."""
        meaning = self.choices.pick(options)
        self.set(**{word: meaning})
        return meaning

    def ask(self, *ways: str, answer: str) -> None:
        """Add a question that can be asked when the story is over. Every way of asking has one answer.

        A way that names the hero is asked with a pronoun and with the hero's kind, too. No friend or helper has either.
        """
        asked = [self.fill(way) for named in ways for way in unnamed(named)]
        self.questions.append(Question(tuple(dict.fromkeys(asked)), self.fill(answer) + "."))

    def go(self, place: str) -> None:
        """Move the hero. Raises ValueError for the place where the hero is."""
        if place == self.place:
            raise ValueError(f"already there: {place}")
        self.place = place

    def put(self, thing: str, holder: str, *, taken_from: str | None) -> None:
        """Move a thing. Raises ValueError if `taken_from` does not hold it."""
        if self.holders.get(thing) != taken_from:
            raise ValueError(f"{thing}: at {self.holders.get(thing)}, not {taken_from}")
        self.holders[thing] = holder


@cache
def unnamed(asked: str) -> tuple[str, ...]:
    """Give a question about {n} in three ways: by name, by pronoun, and by kind.

    >>> unnamed("Who helped {n}?"), unnamed("Did {n} smile?")[1]
    (('Who helped {n}?', 'Who helped {them}?', 'Who helped the {kind}?'), 'Did {they} smile?')
    """
    subject = re.compile(r"\b(does|did|is|was|Did|Was|Can) \{n\}")
    pronoun = subject.sub(r"\1 {they}", asked)
    return tuple(dict.fromkeys((asked, pronoun.replace("{n}", "{them}"), asked.replace("{n}", "the {kind}"))))


def tell(choices: Choices, hero: Character, topic: Topic) -> World:
    """Tell the story of `hero` and `topic`, up to its end."""
    world = World(choices, hero)
    introduce(world)
    PLOTS[topic.plot](world, topic)
    return world


def introduce(w: World) -> None:
    """Say who the hero is and where home is."""
    hero = w.hero
    w.set(n=hero.name, kind=hero.kind, introduced=hero.introduced)
    w.set(they=hero.they, them=hero.them, their=hero.their, theirs=hero.theirs)
    w.choose("trait", TRAITS)
    w.set(someone=a(f"{w.words['trait']} {hero.kind}"))
    w.choose("home", HOMES)
    w.say(
        "Once upon a time, there was {someone} named {n}. {They} lived {home}.",
        "{n} was {someone} who lived {home}.",
        "{home} lived {someone}. {Their} name was {n}.",
        "Long ago, {someone} lived {home}. {Their} name was {n}.",
        "Do you know {n}? {n} was {someone} and lived {home}.",
        "There was once {someone} called {n}, who lived {home}.",
        "This is the story of {n}, {someone} who lived {home}.",
        "Far, far away, {home}, lived {someone} named {n}.",
    )
    w.ask(
        "Who was the story about?",
        "Who is the story about?",
        "Who is the hero of the story?",
        "Who is the hero?",
        "Who was the hero?",
        "Who was it about?",
        "Who is it about?",
        "Whose story is this?",
        "Who is the story of?",
        answer="{introduced}",
    )
    w.ask(
        "What was the name of the {kind}?",
        "What was {their} name?",
        "What is {their} name?",
        "What was the {kind} called?",
        "What is the hero called?",
        "What is the name of the hero?",
        "Do you know the name of the {kind}?",
        "Tell me {their} name.",
        answer="{n}",
    )
    w.ask(
        "Where did {n} live?",
        "Where does {n} live?",
        "Where was {their} home?",
        "Where is {their} home?",
        "Where was the house of {n}?",
        "Where did the hero live?",
        answer="{home}",
    )
    w.ask(
        "What was {n} like?",
        "How would you describe {n}?",
        "Describe {n}.",
        "Tell me about {n}.",
        "Tell me something about {n}.",
        "What kind of {kind} was {n}?",
        "What do you know about {n}?",
        answer="{they} was {trait}",
    )
    w.ask("Was {n} {trait}?", "Is {n} {trait}?", "Was {n} a {trait} {kind}?", answer="yes, {they} was {trait}")
    animal = ("What kind of animal was {n}?", "Which animal was {n}?", "What animal is {n}?", "Is {n} an animal?")
    child = ("Was {n} a boy or a girl?", "Is {n} a boy or a girl?", "Is {n} a child?")
    w.ask("What was {n}?", "What is {n}?", *(animal if hero.kind in ANIMALS else child), answer="a {kind}")
    other = KINDS[KINDS.index(hero.kind) - 1]
    w.ask(f"Was {{n}} a {other}?", f"Is {{n}} a {other}?", answer="no, {they} was a {kind}")


def become(w: World, *feelings: str, why: str) -> None:
    """Trouble, and how the hero feels about it, and the reason."""
    w.choose("sad", feelings)
    w.say(
        "{n} was very {sad}.",
        "Poor {n} felt {sad}.",
        '"Oh no!" cried {n}. {They} was {sad}.',
        "{n} did not know what to do and was {sad}.",
    )
    w.ask(
        "Why was {n} {sad}?",
        "Why did {n} feel {sad}?",
        "Why was {n} so {sad}?",
        "Why was {n} unhappy?",
        "Why was {n} not happy?",
        "What was wrong?",
        "What went wrong?",
        "What was the matter?",
        "What was the matter with {n}?",
        "What was the problem?",
        "What was the trouble?",
        "What made {n} {sad}?",
        answer=why,
    )
    w.ask(
        "Was {n} {sad}?",
        "Was {n} unhappy?",
        "Was {n} very {sad}?",
        "Did {n} feel {sad}?",
        answer="yes, " + why,
    )


def meet(w: World, helpers: tuple[str, ...], *, asked: str = "Who helped {n}?") -> None:
    """An animal that can help."""
    w.choose("helper", tuple(kind for kind in helpers if kind != w.hero.kind))
    w.choose("helping", HELPER_TRAITS)
    w.set(someone=a(f"{w.words['helping']} {w.words['helper']}"))
    w.say("Just then, {someone} came by.", "Then {someone} came along.", "Luckily, {someone} was not far away.")
    w.ask(
        "Who helped {n}?",
        "Which animal helped {n}?",
        "Which animal came by?",
        "Who came by?",
        "Who came along?",
        "Who came to help?",
        "Who came to help {n}?",
        "Who could help {n}?",
        "Who was the helper?",
        "Who was kind to {n}?",
        "Who saved the day?",
        asked,
        answer="the {helper}",
    )
    w.ask("What was the {helper} like?", "Describe the {helper}.", answer="it was {helping}")
    w.ask("Was the {helper} {helping}?", answer="yes, it was {helping}")
    w.ask(
        "Did anybody help {n}?",
        "Did somebody help {n}?",
        "Did {n} get help?",
        "Did {n} find help?",
        "Did the {helper} help {n}?",
        "Could the {helper} help {n}?",
        "Was there help for {n}?",
        answer="yes, the {helper} helped {them}",
    )


def end(w: World, *feelings: str) -> None:
    """Say how the hero feels at last."""
    w.choose("happy", feelings)
    w.say(
        "In the evening, {n} felt very {happy}.",
        "That night, {n} lay in bed and felt {happy}.",
        "{n} had never been so {happy}.",
        "{n} smiled. {They} was {happy}.",
        "That night, nobody was as {happy} as {n}.",
    )
    w.say(
        "{They} was still {happy} the next day.",
        "Even in {their} dreams, {they} was {happy}.",
        "And {they} was still {happy} when {they} fell asleep.",
    )
    w.ask(
        "How did {n} feel at the end?",
        "How did {n} feel?",
        "How did {n} feel that night?",
        "How does {n} feel now?",
        "How was {n} at the end?",
        "How does the story end?",
        "How does it end?",
        "How did it end?",
        "What was the end?",
        "What is the end of the story?",
        "What happened at the end?",
        answer="{they} felt {happy}",
    )
    w.ask(
        "Was {n} happy at the end?",
        "Was {n} {happy}?",
        "Was {n} {happy} at the end?",
        "Is {n} happy now?",
        "Does the story end well?",
        "Does it end well?",
        "Did it end well?",
        "Did it all end well?",
        "Is there a happy end?",
        "Does it have a happy end?",
        "Was everything all right at the end?",
        answer="yes, {they} felt {happy}",
    )
    w.ask(
        "Was {n} sad at the end?",
        "Was {n} unhappy at the end?",
        "Was {n} angry at the end?",
        "Is {n} still sad?",
        "Is it a sad end?",
        "Does it end badly?",
        answer="no, {they} felt {happy}",
    )


def summed_up(w: World, summary: str, *, lesson: str) -> None:
    """Ask for the whole story in one sentence, and for its lesson."""
    w.ask(
        "What was the story about?",
        "What is the story about?",
        "What was it about?",
        "What is it about?",
        "What happened in the story?",
        "What happens in the story?",
        "What happened?",
        "What happened to {n}?",
        "What did {n} do?",
        "Sum it up.",
        "Sum up the story.",
        "Can you sum it up?",
        "Give me a summary.",
        "Give me the story in one sentence.",
        "Tell me the story in short.",
        "What was that about?",
        answer=summary,
    )
    w.ask(
        "What is the moral of the story?",
        "What is the moral?",
        "What does the story teach us?",
        "What does it teach?",
        "What does the story tell us?",
        "What is the lesson?",
        "What is the lesson of the story?",
        "What do we learn?",
        "What is the message?",
        "What is the point of it?",
        answer=lesson,
    )


def went(w: World, who: str = "{n}") -> None:
    """Ask where the hero went, and whether it was there."""
    nouns, place = [place.noun for place in PLACES], w.words["place"]
    other = nouns[(nouns.index(place) if place in nouns else 0) - 1]
    w.ask(
        "Where did {n} go?",
        *((f"Where did {who} go?",) if who != "{n}" else ()),
        f"Where did {who} go that day?",
        f"To which place did {who} go?",
        "Where did it happen?",
        "Where was that?",
        answer="to the {place}",
    )
    w.ask(f"Did {who} go to the {place}?", f"Was it the {place}?", answer="yes, to the {place}")
    w.ask(f"Did {who} go to the {other}?", f"Was it the {other}?", answer="no, to the {place}")


def when(w: World, *ways: str) -> None:
    """Ask for the day."""
    w.ask(*ways, "When was it?", "When was that?", "When did it happen?", "When did that happen?", answer="{day}")


def lost(w: World, topic: Topic) -> None:
    """Something dear goes where the hero cannot reach it; but somebody else can."""
    thing, n = topic.about, w.hero.name
    assert isinstance(thing, Thing)
    w.set(noun=thing.noun, color=topic.color, thing=a(f"{topic.color} {thing.noun}"))
    w.set(use=thing.use.format_map(w.words))
    w.put(thing.noun, n, taken_from=None)
    w.choose("relative", RELATIVES)
    w.say(
        "{Their} {relative} gave {n} {thing}.",
        "{n} had {thing} from {their} {relative}.",
        "For {their} birthday, {n} got {thing} from {their} {relative}.",
    )

    place = w.choices.pick([place for place in PLACES if fitting(thing, place)])
    w.set(place=place.noun, water=place.water)
    w.go(place.noun)
    w.choose("day", DAYS)
    w.say(
        "{day}, {n} went to the {place} {use}.",
        "{day}, {n} wanted {use}, so {they} went to the {place}.",
        "{day}, {n} took the {noun} to the {place}. {They} wanted {use}.",
    )
    w.say(*thing.joys)

    spot = SPOTS[w.choices.pick(fitting(thing, place))]
    w.set(spot=spot.at.format_map(w.words))
    w.put(thing.noun, spot.at, taken_from=n)
    w.say(*thing.losses)
    w.say(*spot.landings)
    become(w, "sad", "upset", "worried", why="because the {noun} was gone")
    tried = w.choices.pick(spot.tries)
    w.say("{They} " + tried + ".")
    w.say("", *(f"Next, {{they}} {other}." for other in spot.tries if other != tried))

    meet(w, tuple(spot.helpers))
    w.say(
        '"Why are you so {sad}?" it asked. {n} told it about the {noun}.',
        '"Please help me," said {n}. "My {noun} is {spot}."',
        '"Do not cry," it said. "I can help you."',
    )
    w.put(thing.noun, w.words["helper"], taken_from=spot.at)
    w.say("The {helper} " + spot.helpers[w.words["helper"]] + ".")
    w.put(thing.noun, n, taken_from=w.words["helper"])
    w.say(
        "Soon it came back with the {color} {noun}.",
        "A moment later, {n} had the {noun} back.",
        "Then it gave the {noun} back to {n}.",
    )
    w.say(
        '"Thank you, {helper}!" said {n}.',
        '"You are a true friend," said {n}.',
        '{n} hugged the {helper}. "Thank you so much!"',
    )
    w.choose("treat", TREATS)
    w.say("{They} shared {their} {treat} with the {helper}.", "Then they sat down and ate some {treat} together.")
    w.say(
        "When {n} came home, {their} {relative} hugged {them}.",
        "At home, {n} told {their} {relative} all about it.",
        "{n} ran home and showed the {noun} to {their} {relative}.",
    )
    end(w, "happy", "glad", "thankful")
    w.say(
        "", "From that day on, {n} and the {helper} were friends.", "After that, {they} took good care of the {noun}."
    )

    w.ask("What did {n} lose?", "Which thing did {n} lose?", "What did {n} get back?", answer="the {noun}")
    w.ask("Did {n} lose the {noun}?", "Was the {noun} gone?", answer="yes, but the {helper} brought it back")
    w.ask(*COLOR_OF, answer="it was {color}")
    w.ask(
        "Who gave {n} the {noun}?",
        "Who had given {n} the {noun}?",
        "Who was the {noun} from?",
        "From whom did {n} have the {noun}?",
        "Who did {n} get the {noun} from?",
        answer="{their} {relative}",
    )
    w.ask(*WANTED, "Why did {n} go there?", "Why did {n} go to the {place}?", answer="{use}")
    went(w)
    w.ask(
        "Where was the {noun}?",
        "Where was it?",
        "What happened to the {noun}?",
        "Where did the {noun} land?",
        "Where did it land?",
        "Where did the {noun} go?",
        "Where did the {noun} end?",
        answer="it was {spot}",
    )
    w.ask(
        "Who brought the {noun} back?",
        "Who brought it back?",
        "Who found the {noun}?",
        "Who got the {noun}?",
        "Who got the {noun} back?",
        "Who rescued the {noun}?",
        answer="the {helper}",
    )
    w.ask(
        "Did {n} get the {noun} back?",
        "Did {n} have the {noun} again?",
        "Does {n} have the {noun} again?",
        "Did the {helper} bring the {noun} back?",
        "Did the {noun} come back?",
        "Was the {noun} found?",
        answer="yes, the {helper} brought it back",
    )
    w.ask(
        "How did the {helper} help?",
        "How did the {helper} help {n}?",
        "What did the {helper} do?",
        "What did the {helper} do for {n}?",
        answer="it brought the {noun} back",
    )
    when(w, "When did {n} lose the {noun}?", "When did {n} go there?")
    other = COLORS[COLORS.index(topic.color) - 1]
    w.ask(f"Was the {{noun}} {topic.color}?", f"Was it {topic.color}?", answer="yes, it was {color}")
    w.ask(f"Was the {{noun}} {other}?", f"Was it {other}?", answer="no, it was {color}")
    summed_up(
        w,
        "{n} lost {their} {noun}, and the {helper} brought it back",
        lesson="a good friend helps you when you are sad",
    )
    w.ask(
        "How did {n} feel when the {noun} was gone?", "How did {n} feel without the {noun}?", answer="{they} felt {sad}"
    )
    w.ask("What did {n} and the {helper} eat?", "What did they eat?", "What did {n} share?", answer="some {treat}")


def found(w: World, topic: Topic) -> None:
    """The hero finds something, and meets the one who misses it."""
    thing, n = topic.about, w.hero.name
    assert isinstance(thing, Thing)
    w.set(noun=thing.noun, color=topic.color, thing=a(f"{topic.color} {thing.noun}"))
    w.go(w.choose("place", tuple(place.noun for place in PLACES)))
    w.choose("day", DAYS)
    w.choose("wish", ("watch the birds", "look for feathers", "play in the sun", "have a picnic"))
    w.say(
        "{day}, {they} went to the {place} to {wish}.",
        "{day}, {they} wanted to {wish}, so {they} went to the {place}.",
    )
    w.choose("spot", ("behind a big stone", "in the long grass", "under a bush", "next to the path"))
    w.put(thing.noun, w.words["spot"], taken_from=None)
    w.say(
        "{spot}, {they} found {thing}.",
        "What was that {spot}? It was {thing}!",
        "Something {color} lay {spot}. It was " + a(thing.noun) + "!",
    )
    w.put(thing.noun, n, taken_from=w.words["spot"])
    w.say(
        '"What a fine {noun}!" said {n} and picked it up.',
        "{n} picked it up and looked at it from all sides.",
        '{n} picked it up. "I want to keep it," {they} said.',
    )

    befriend(w)
    w.choose("sad", ("sad", "upset", "worried"))
    w.say(
        "Then {n} heard a voice. It was {friend}, and {m_they} was {sad}.",
        "On the way home, {n} met {friend}, who looked {sad}.",
        "Then {friend} came along the path. {M_they} looked {sad}.",
    )
    w.say(
        '"I have lost my {noun}," said {m}. "Have you seen it?"',
        '"Have you seen my {noun}?" asked {m}. "I cannot find it."',
        '"What is the matter?" asked {n}. "My {noun} is gone," said {m}.',
    )
    honest = (
        '"Is this your {noun}?" asked {n} and gave it to {m_them}.',
        '"Here it is!" said {n} at once. "I found it {spot}."',
        "{n} wanted to keep it, but it was not {theirs}. {They} gave it back at once.",
    )
    hides = (
        "{n} said nothing and hid the {noun} behind {their} back.",
        "{n} hid the {noun} behind {their} back and looked away.",
    )
    at_once = w.choices.pick((True, False))
    if at_once:
        w.say(*honest)
    else:
        w.say(*hides)
        w.say("Then {m} began to cry, and {n} felt bad.", "A tear ran down {m_their} nose, and {n} felt bad.")
        w.say('"I am sorry," {they} said. "Here is your {noun}."', '"Wait!" cried {n}. "Here it is. I am sorry."')
    w.put(thing.noun, w.words["m"], taken_from=n)
    w.say(
        "{m} jumped up and down with joy.",
        '"My {noun}!" cried {m}. "Thank you, {n}!"',
        "{m} laughed and hugged {n}.",
    )
    w.choose("treat", TREATS)
    w.say("{M_they} gave {n} some {treat}.", "Then {m_they} shared {m_their} {treat} with {n}.")
    w.say(
        "They played with the {noun} until the sun went down.",
        '"Now we can play together," said {m}.',
        "The two of them played all afternoon.",
    )
    end(w, "happy", "glad", "proud" if at_once else "thankful")
    w.say("", "From that day on, {n} and {m} were friends.")

    w.ask("What did {n} find?", "What did {n} pick up?", "Did {n} find something?", answer="{they} found {thing}")
    w.ask(*COLOR_OF, answer="it was {color}")
    other = COLORS[COLORS.index(topic.color) - 1]
    w.ask(f"Was the {{noun}} {topic.color}?", f"Was it {topic.color}?", answer="yes, it was {color}")
    w.ask(f"Was the {{noun}} {other}?", f"Was it {other}?", answer="no, it was {color}")
    w.ask(*WANTED, "Why did {n} go there?", "Why did {n} go to the {place}?", answer="to {wish}")
    went(w)
    w.ask(
        "Where was the {noun}?",
        "Where was it?",
        "Where did {n} find the {noun}?",
        "Where did {n} find it?",
        "Where did the {noun} lie?",
        answer="it was {spot}",
    )
    w.ask("Who found the {noun}?", "Who found it?", "Who picked the {noun} up?", answer="{n}")
    w.ask(
        "Who had lost the {noun}?",
        "Who lost the {noun}?",
        "Who lost it?",
        "Whose {noun} was it?",
        "Whose was it?",
        "Who did {n} meet?",
        "Who was looking for the {noun}?",
        answer="{m}",
    )
    w.ask(
        "Why was {m} {sad}?",
        "Why did {m} look {sad}?",
        "Why was {m} unhappy?",
        "What was wrong?",
        "What was wrong with {m}?",
        "What was the matter?",
        "What was the problem?",
        answer="because the {noun} was gone",
    )
    w.ask(
        "Did {n} give the {noun} back?",
        "Did {n} give it back?",
        "Did {m} get the {noun} back?",
        "Did {n} give the {noun} to {m}?",
        "Did {n} help {m}?",
        answer="yes, {n} gave it to {m}",
    )
    w.ask(
        "Did {n} keep the {noun}?",
        "Did {n} keep it?",
        "Does {n} still have the {noun}?",
        answer="no, {n} gave it to {m}",
    )
    w.ask(
        "What did {n} do with the {noun}?",
        "Who has the {noun} now?",
        "Who got the {noun}?",
        answer="{n} gave it to {m}",
    )
    w.ask(
        "Who helped {n}?",
        "Did anybody help {n}?",
        "Did somebody help {n}?",
        "Who came to help {n}?",
        answer="nobody, but {n} helped {m}",
    )
    when(w, "When did {n} find the {noun}?", "When did {n} go there?")
    summed_up(w, "{n} found {thing} and gave it to {m}", lesson="give back what you find")
    w.ask("How did {m} feel when the {noun} was gone?", "How did {m} feel?", answer="{m_they} felt {sad}")
    w.ask("What did {m} give {n} to eat?", "What did {m} give {n}?", "What did they eat?", answer="some {treat}")


def bake(w: World, topic: Topic) -> None:
    """Something is missing in the kitchen; who has it needs help first."""
    dish, n = topic.about, w.hero.name
    assert isinstance(dish, Dish)
    w.set(noun=dish.noun, some=dish.some)
    w.set(**({"were": "were", "this_is": "these are"} if dish.many else {"were": "was", "this_is": "this is"}))
    w.choose("relative", RELATIVES)
    w.choose("day", DAYS)
    w.say(
        "{day}, {they} wanted to make {some} for {their} {relative}.",
        "{day}, {n} had a plan. {They} wanted to make {some} for {their} {relative}.",
    )
    lack = w.choose("lack", dish.lacks)
    w.set(lacked="were" if lack.endswith("s") else "was")
    w.say("But there {lacked} no {lack} in the kitchen.", "But the {lack} {lacked} all gone.")
    become(w, "sad", "upset", "worried", why="because there {lacked} no {lack}")

    giver = w.choose("giver", tuple(GIVERS[lack]))
    w.put(lack, giver, taken_from=None)
    w.set(place=GIVERS[lack][giver])
    w.go(w.words["place"])
    w.say(
        "So {they} ran to the {place} to see the {giver}.",
        "Then {they} thought of the {giver} and went to the {place}.",
    )
    w.say(
        '"May I have some {lack}, please?" asked {n}.',
        '"Can you give me some {lack}?" asked {n}.',
        '"I want to make {some}," said {n}. "Do you have any {lack}?"',
    )
    need = w.choices.pick(NEEDS)
    w.set(need=need.said, did=w.fill(need.did))
    w.say(
        '"Yes," said the {giver}, "but first I need your help. {need}."',
        '"Please help me first," said the {giver}. "{need}."',
        '"You can have some if you help me," said the {giver}. "{need}."',
    )
    w.say(need.does + ".")
    w.put(lack, n, taken_from=giver)
    w.say(
        '"How kind you are!" said the {giver} and gave {them} the {lack}.',
        "The {giver} thanked {n} and gave {them} the {lack}.",
        'The {giver} was very pleased. "Here, take the {lack}," it said.',
    )
    w.go("home")
    w.say("{n} ran home, and soon the {noun} {were} ready.", "At home, {n} worked hard until the {noun} {were} ready.")
    w.say("", "The whole house smelled sweet.", "What a sweet smell there was!")
    w.say("{Their} {relative} came to the table at once.", "{They} called {their} {relative} to the table.")
    w.say(
        '"{This_is} the best {noun} in the world!" said {n}.',
        "Everybody ate and ate and could not stop.",
        "Everybody smiled at the first bite.",
    )
    w.say("", "They kept some for the {giver}.", "The {giver} came too, and they ate together.")
    end(w, "happy", "glad", "proud")

    w.ask(
        "What did {n} want to make?",
        "What did {n} make?",
        "What did {n} bake?",
        "What did {n} cook?",
        "What did {n} want?",
        "What was the plan of {n}?",
        answer="{some}",
    )
    w.ask(
        "Who {were} the {noun} for?",
        "Who did {n} make the {noun} for?",
        "Who did {n} bake for?",
        "For whom {were} the {noun}?",
        answer="for {their} {relative}",
    )
    w.ask(
        "What was gone?",
        "What did {n} need?",
        "What did {n} not have?",
        "What did {n} look for?",
        "What did {n} ask for?",
        "What was not in the kitchen?",
        "What did the {giver} give {n}?",
        "What did {n} get from the {giver}?",
        answer="the {lack}",
    )
    went(w)
    w.ask(
        "Who gave {n} the {lack}?",
        "Who had the {lack}?",
        "Who helped {n}?",
        "Which animal helped {n}?",
        "Who came to help {n}?",
        "Who could help {n}?",
        "Who did {n} ask?",
        "Who did {n} meet?",
        "Who did {n} help?",
        answer="the {giver}",
    )
    w.ask(
        "Did {n} get the {lack}?",
        "Did {n} find the {lack}?",
        "Did the {giver} give {n} the {lack}?",
        "Did the {giver} help {n}?",
        "Did anybody help {n}?",
        "Did somebody help {n}?",
        answer="yes, the {giver} gave {them} the {lack}",
    )
    w.ask(
        "Was there {lack} in the kitchen?",
        "Did {n} have the {lack} at home?",
        answer="no, the {giver} gave {them} the {lack}",
    )
    when(w, "When did {n} make the {noun}?")
    summed_up(
        w,
        "{n} helped the {giver}, got the {lack} and made {some}",
        lesson="help others, and they will help you",
    )
    w.ask(
        "What did {n} do for the {giver}?",
        "How did {n} help the {giver}?",
        "What did the {giver} want?",
        "What did the {giver} need?",
        "How did {n} get the {lack}?",
        answer="{did}",
    )


def caught(w: World, topic: Topic) -> None:
    """Two friends are caught by the weather, far from home."""
    weather = topic.about
    assert isinstance(weather, Weather)
    befriend(w)
    w.choose("day", DAYS)
    w.go(w.choose("place", tuple(place.noun for place in PLACES if place.far)))
    w.choose("wish", ("play hide and seek", "have a picnic", "look for feathers", "watch the birds"))
    w.say(
        "{day}, {they} went to the {place} with {their} friend {friend} to {wish}.",
        "{day}, {n} and {their} friend {friend} went to the {place} to {wish}.",
        "{Their} best friend was {friend}. {Day}, they went to the {place} to {wish}.",
    )
    w.say(
        "They had so much fun that they forgot the time.",
        "They laughed and sang, and nobody looked at the sky.",
        "It was so nice there that they did not want to go home.",
    )
    w.say(*weather.comes)
    w.set(when=weather.when)
    become(w, "scared", "afraid", "worried", why="because {when}")
    w.say("", '"Stay close to me," said {m}.', '"Do not cry," said {m}. "I am here."')
    w.say(*weather.tries)

    meet(w, weather.helpers, asked="Who helped them?")
    w.say(*weather.offers)
    w.say(*weather.ways_out)
    w.go("home")
    w.choose("relative", RELATIVES)
    w.choose("treat", ("soup", "milk", "tea"))
    w.say(
        "At home, {their} {relative} gave them hot {treat}.",
        "At last they were home, and {their} {relative} gave them hot {treat}.",
        "When they came home, {their} {relative} made hot {treat}.",
    )
    end(w, "happy", "glad", "thankful")
    w.say(
        "",
        "From that day on, {they} was not " + weather.fear + ".",
        "After that, {n} and {m} never forgot the {helper}.",
    )

    w.ask(
        "Who was with {n}?",
        "Who went with {n}?",
        "Who was the friend of {n}?",
        "Who was the best friend of {n}?",
        "What was the name of the friend?",
        "Was {n} alone?",
        answer="{m}",
    )
    went(w, "they")
    w.ask("What did they want to do?", "What did they want?", "Why did they go there?", *WANTED, answer="to {wish}")
    w.ask("How did {n} feel when {when}?", "How did {n} feel far from home?", answer="{they} felt {sad}")
    w.ask(
        "What did they get at home?",
        "What did they drink?",
        "What did they have at home?",
        "What did {their} {relative} give them?",
        "What did {their} {relative} make?",
        answer="hot {treat}",
    )
    w.ask(
        "Did they get home?",
        "Did they come home?",
        "Did they find the way home?",
        "Did they find the way?",
        "Did {n} get home?",
        "Did the {helper} help them?",
        "Did anybody help them?",
        answer="yes, the {helper} helped them",
    )
    when(w, "When did they go there?")
    summed_up(
        w,
        "{n} and {m} were far from home when {when}, and the {helper} helped them",
        lesson="with a friend you need not be afraid",
    )


def grow(w: World, topic: Topic) -> None:
    """A seed does not grow, until somebody knows why."""
    plant = topic.about
    assert isinstance(plant, Plant)
    w.set(noun=plant.noun, plant=a(f"{plant.size} {plant.noun}"), large=f"{plant.size} {plant.noun}")
    w.choose("relative", RELATIVES)
    w.choose("day", DAYS)
    w.say(
        "{day}, {their} {relative} gave {n} a seed. {n} wanted to grow {plant}.",
        "{n} wanted to grow {plant}. {Day}, {they} got a seed from {their} {relative}.",
    )
    w.put("seed", w.hero.name, taken_from=None)
    spot = w.choose("spot", ("behind the house", "next to the well", "under the window", "by the fence"))
    w.put("seed", spot, taken_from=w.hero.name)
    w.say(
        "{They} planted the seed {spot}.",
        "{They} put the seed into the ground {spot}.",
        "{spot}, {they} put the seed into the ground.",
    )
    w.say(
        "{They} waited and waited, but nothing came up.",
        "Every day {they} looked, but there was not even a leaf.",
        "A week went by, but nothing came up.",
    )
    become(w, "sad", "upset", "worried", why="because nothing came up")

    soil = w.choices.pick(SOILS)
    w.set(trouble=soil.trouble, said=soil.said)
    meet(w, soil.helpers)
    w.say(
        '"I can help you," it said. "{said}."',
        'It looked at the ground. "{said}," it said.',
        '"Do not cry," said the {helper}. "{said}."',
    )
    w.say(*soil.cures)
    w.say(
        "Three days later, a green leaf came up.",
        "Soon a tiny green leaf came up.",
        "Then, one morning, there was a green leaf.",
    )
    w.say("It grew and grew, and at last there was {plant}.", "The sun was warm, and one day there was {plant}.")
    w.say('"What a {large}!" cried {n}.', '"We did it!" said {n}.', "Everybody came to see the {noun}.")
    w.say("{Their} {relative} was the first to hear of it.", "{They} ran to tell {their} {relative}.")
    w.say(*("{n} " + use + "." for use in plant.uses))
    end(w, "happy", "glad", "proud")
    w.say("", "And {they} kept a seed for the next year.", "From that day on, {n} and the {helper} were friends.")

    w.ask("What did {n} want to grow?", "What did {n} grow?", "What did {n} want?", "What came up?", answer="{plant}")
    w.ask(
        "Who gave {n} the seed?",
        "Who was the seed from?",
        "Who had the seed first?",
        "Who did {n} get the seed from?",
        answer="{their} {relative}",
    )
    w.ask(
        "Where did {n} plant the seed?",
        "Where did {n} plant it?",
        "Where did {n} put the seed?",
        "Where was the seed?",
        "Where was it?",
        answer="{they} planted it {spot}",
    )
    w.ask(
        "How was the ground?",
        "What was wrong with the ground?",
        "What did the {helper} say about the ground?",
        answer="it was {trouble}",
    )
    w.ask("How did {n} feel when nothing came up?", "How did {n} feel without a leaf?", answer="{they} felt {sad}")
    w.ask("Where did {n} go?", "Did {n} go away?", "Did {n} go to the meadow?", answer="{they} stayed at home")
    w.ask("What did {n} plant?", "What did {n} get?", "What did {n} put into the ground?", answer="a seed")
    w.ask(
        "Did the seed grow?",
        "Did the {noun} grow?",
        "Did it grow?",
        "Did the seed come up?",
        "Did {n} get {plant}?",
        answer="yes, the {helper} helped {them}",
    )
    when(w, "When did {n} get the seed?")
    summed_up(w, "{n} grew {plant}, and the {helper} helped {them}", lesson="good things take time")


def learn(w: World, topic: Topic) -> None:
    """A skill is hard to learn at first, and of use to somebody later."""
    skill = topic.about
    assert isinstance(skill, Skill)
    w.set(verb=skill.verb, place=skill.place)
    w.say(
        "All {their} friends could {verb}, but {n} could not.",
        "{n} wanted to learn to {verb}.",
        "{n} had one wish. {They} wanted to {verb}.",
    )
    w.choose("day", DAYS)
    w.go(skill.place)
    w.say(*("{day}, {they} went to the {place} and " + tried + "." for tried in skill.tries))
    become(w, "sad", "upset", "ashamed", why="because {they} could not {verb}")
    w.say("", '"I will never learn it," {they} said.')

    meet(w, skill.teachers)
    w.say('"I can teach you," it said.', '"Watch me," it said.', '"Do not give up," said the {helper}.')
    w.sentences[-1] += w.fill(' "' + w.choices.pick(skill.advice) + '."')
    w.say(
        "{n} tried again and again.", "Every morning, {they} came back and tried again.", "They worked hard all week."
    )
    w.say(*(when + " {they} " + success + "." for success in skill.successes for when in ("At last", "Then, one day,")))
    w.say('"Well done!" cried the {helper}.', "The {helper} was very pleased.")

    rescue = w.choices.pick(skill.rescues)
    w.set(who=rescue.who, trouble=rescue.trouble, rescue=w.fill(rescue.does))
    w.say(
        *(when + ", a little {who} " + rescue.trouble + "." for when in ("The next day", "A week later", "One evening"))
    )
    w.say(*(start + " " + rescue.does + "." for start in ("{n} knew what to do. {They}", "At once, {n}")))
    w.say("", "Everybody talked about {n} that day.", "Now the {who} was well again.")
    end(w, "happy", "glad", "proud")

    w.ask(
        "What did {n} want to learn?",
        "What did {n} learn?",
        "What did {n} learn to do?",
        "What can {n} do now?",
        *WANTED,
        answer="to {verb}",
    )
    went(w)
    w.ask(
        "Who taught {n} to {verb}?",
        "Who was the teacher?",
        "Who was the teacher of {n}?",
        "Who showed {n} how to {verb}?",
        "Who did {n} learn from?",
        answer="the {helper}",
    )
    w.ask(
        "Who was in trouble?",
        "Who was in trouble that day?",
        "Who needed help?",
        "Who needed the help of {n}?",
        "Who did {n} help?",
        "Who did {n} rescue?",
        answer="the {who}",
    )
    w.ask(
        "What happened to the {who}?",
        "What was wrong with the {who}?",
        "What was the matter with the {who}?",
        "Why did the {who} need help?",
        answer="it {trouble}",
    )
    w.ask("How did {n} help the {who}?", "What did {n} do for the {who}?", answer="{they} {rescue}")
    w.ask(
        "Did {n} learn to {verb}?",
        "Did {n} learn it?",
        "Can {n} {verb} now?",
        "Could {n} {verb} at the end?",
        "Did the {helper} teach {n}?",
        answer="yes, the {helper} taught {them}",
    )
    w.ask("Could {n} {verb} at first?", "Could {n} always {verb}?", answer="no, the {helper} taught {them}")
    when(w, "When did {n} go there?")
    summed_up(w, "{n} learned to {verb} and helped a {who}", lesson="do not give up")


def befriend(w: World) -> None:
    """Choose the hero's friend, and set the words for the friend."""
    friend = friend_of(w.hero, w.choices)
    w.set(m=friend.name, friend=friend.introduced, m_they=friend.they, m_them=friend.them, m_their=friend.their)


def fitting(thing: Thing, place: Place) -> list[str]:
    """List the kinds of spots where this thing can get lost at this place."""
    return [spot for spot in thing.spots if spot in place.spots]


PLOTS: Mapping[str, Callable[[World, Topic], None]] = {
    "lost": lost,
    "found": found,
    "bake": bake,
    "caught": caught,
    "grow": grow,
    "learn": learn,
}
