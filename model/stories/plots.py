"""What can happen: six plots, each a small simulation in which every event needs what came before it.

A plot moves people and things about in a `World`, which refuses what cannot be (to use what is lost, to give what
somebody else has), and says each event in one of a few ways. A choice is made when the text tells it, never earlier.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from model.stories.choices import Choices
from model.stories.lexicon import (
    COLOURS,
    DAYS,
    DISHES,
    GIVERS,
    HELPER_TRAITS,
    HOMES,
    PLACES,
    PLANTS,
    RELATIVES,
    SKILLS,
    SPOTS,
    THINGS,
    TRAITS,
    TREATS,
    Character,
    Dish,
    Place,
    Plant,
    Skill,
    Thing,
    a,
    friend_of,
)

NOBODY = "nobody"  # has what is lost


class Question(NamedTuple):
    """What can be asked about a story, in one of several ways, and the answer."""

    asked: tuple[str, ...]
    answer: str


class Topic(NamedTuple):
    """What a story is about, beside its hero."""

    plot: str
    about: Thing | Dish | Plant | Skill | str
    colour: str = ""

    @property
    def named(self) -> str:
        """As a request names it: "a red kite", "baking a cake"."""
        match self.about:
            case Thing(noun=noun):
                return a(f"{self.colour} {noun}")
            case Dish(some=some):
                return some
            case Plant(noun=noun):
                return a(noun)
            case Skill(verb=verb):
                return f"learning to {verb}"
            case str(weather):
                return weather


@dataclass
class World:
    """Who is where, who has what, how the hero feels; and the text so far."""

    choices: Choices
    hero: Character
    place: str = "home"  # where the hero is, and with them everybody who has been met and has not been left
    holder: dict[str, str] = field(default_factory=dict)  # of a thing: a name, "the owl", a spot, or NOBODY
    facts: dict[str, str] = field(default_factory=dict)
    sentences: list[str] = field(default_factory=list)
    questions: list[Question] = field(default_factory=list)

    def say(self, *ways: str) -> None:
        """One of `ways`, as a sentence or two; "" says nothing."""
        said = self.choices.pick(ways)
        if said:
            self.sentences.append(said[0].upper() + said[1:])

    def know(self, fact: str, value: str, *asked: str, answer: str = "") -> None:
        """A fact, and the question that it answers."""
        self.facts[fact] = value
        if asked:
            answer = answer or value
            self.questions.append(Question(asked, answer[0].upper() + answer[1:] + "."))

    def go(self, place: str) -> None:
        assert place != self.place, f"already at {place}"
        self.place = place

    def find(self, thing: str, holder: str) -> None:
        """A thing that has not been heard of."""
        assert thing not in self.holder, f"there is a {thing} already"
        self.holder[thing] = holder

    def give(self, thing: str, giver: str, taker: str) -> None:
        assert self.holder[thing] == giver, f"{self.holder[thing]} has the {thing}, not {giver}"
        self.holder[thing] = taker

    def feel(self, *feelings: str) -> str:
        self.facts["mood"] = feeling = self.choices.pick(feelings)
        return feeling

    def end(self, feeling: str) -> None:
        """The feeling that a story ends with."""
        self.know("end", feeling, f"How did {self.hero.name} feel at the end?", f"How did {self.hero.name} feel?")

    @property
    def text(self) -> str:
        return " ".join(self.sentences)


def tell(choices: Choices, hero: Character, topic: Topic) -> World:
    """A story of `hero` and `topic`."""
    world = World(choices, hero)
    introduce(world)
    PLOTS[topic.plot](world, topic)
    return world


def introduce(w: World) -> None:
    """Six openings. Each names the kind before any other choice is told, or the name."""
    n, they, their = w.hero.name, w.hero.they, w.hero.their
    kind = a(f"{w.choices.pick(TRAITS)} {w.hero.kind}")
    home = w.choices.pick(HOMES)
    w.say(
        f"Once upon a time, there was {kind} named {n}. {they.capitalize()} lived {home}.",
        f"{n} was {kind} who lived {home}.",
        f"{home} lived {kind}. {their.capitalize()} name was {n}.",
        f"Long ago, {kind} lived {home}. {their.capitalize()} name was {n}.",
        f"Do you know {n}? {n} was {kind} and lived {home}.",
        f"There was once {kind} called {n}, who lived {home}.",
        f"This is the story of {n}, {kind} who lived {home}.",
        f"Far, far away, {home}, lived {kind} named {n}.",
    )
    w.know("hero", n, "Who was the story about?", answer=w.hero.introduced)
    w.know("name", n, f"What was the name of the {w.hero.kind}?")
    w.know("home", home, f"Where did {n} live?")


def lost(w: World, topic: Topic) -> None:
    """Something dear goes where the hero cannot reach it, but somebody else can."""
    thing, colour, hero = topic.about, topic.colour, w.hero
    assert isinstance(thing, Thing)
    n, they, them, their, noun = hero.name, hero.they, hero.them, hero.their, thing.noun
    relative = w.choices.pick((*RELATIVES, ""))
    w.find(noun, n)
    w.say(
        f"{n} had {a(f'{colour} {noun}')} from {their} {relative} and loved it very much."
        if relative
        else f"{n} had {a(f'{colour} {noun}')} and loved it more than anything.",
    )

    places = [place for place in PLACES if fitting(thing, place)]
    place = w.choices.pick(places)
    w.go(place.noun)
    use = pronouns(thing.use, hero)
    day = w.choices.pick(DAYS)
    w.say(
        f"{day}, {n} went to the {place.noun} {use}.",
        f"{day}, {n} wanted {use}, so {they} went to the {place.noun}.",
        f"{day}, {n} took the {noun} to the {place.noun}. {they} wanted {use}.".replace(f" {they}", f" {they.title()}"),
    )
    w.say(*(pronouns(joy, hero) for joy in thing.joys))

    spot_kind = w.choices.pick(fitting(thing, place))
    spot = SPOTS[spot_kind]
    words = {"noun": noun, "water": place.water}
    w.give(noun, n, spot.at)
    w.say(*(pronouns(loss, hero).format(**words) for loss in thing.losses))
    w.say(*(landing.format(**words) for landing in spot.landings))
    sad = w.feel("sad", "upset", "worried")
    w.say(f"{n} was very {sad}.", f"Poor {n} felt {sad}.", f'"Oh no!" cried {n}. {they.title()} was {sad}.')

    tried = w.choices.pick(spot.tries)
    w.say(f"{they} {tried}.".format(**words).replace("<they>", they))
    again = w.choices.pick(("", *(other for other in spot.tries if other != tried)))
    if again:
        w.say(f"Then {they} {again}.".format(**words).replace("<they>", they))

    helper = w.choices.pick([kind for kind in spot.helpers if kind != hero.kind])
    someone = a(f"{w.choices.pick(HELPER_TRAITS)} {helper}")
    w.say(f"Just then, {someone} came by.", f"{someone} heard {n} and came to see.", f"{someone} had seen it all.")
    w.say(
        f'"Why are you so {sad}?" asked the {helper}. {n} told it about the {noun}.',
        f'"Please help me," said {n}. "My {noun} is {spot.at.format(**words)}."',
        f'"Do not cry," said the {helper}. "I can help you."',
    )
    w.say(f"The {helper} {spot.helpers[helper].format(**words)}.")
    w.give(noun, spot.at, f"the {helper}")
    w.give(noun, f"the {helper}", n)
    w.say(
        f"Soon it came back with the {colour} {noun}.",
        f"A moment later, {n} had the {noun} back.",
        f"Then it gave the {noun} back to {n}.",
    )

    w.say(
        f'"Thank you, {helper}!" said {n}.',
        f'"You are a true friend," said {n}.',
        f'{n} hugged the {helper}. "Thank you so much!"',
    )
    treat = w.choices.pick(TREATS)
    w.say(f"{they} shared {their} {treat} with the {helper}.", f"Then they sat down and ate some {treat} together.")
    happy = w.feel("happy", "glad", "thankful")
    w.go("home")
    w.say(
        f"In the evening, {n} went home with the {noun} and felt {happy}.",
        f"{n} was {happy} and held the {noun} tightly all the way home.",
        f"That night, {n} fell asleep with the {noun} in {their} arms, {happy} again.",
    )
    w.say("", f"From that day on, {n} and the {helper} were friends.", f"After that, {n} took better care of the {noun}.")

    w.know("thing", noun, f"What did {n} lose?", answer=f"The {noun}")
    w.know("colour", colour, f"What colour was the {noun}?")
    w.know("wish", use, f"What did {n} want?", f"What did {n} want to do?")
    w.know("place", place.at, f"Where did {n} go?", answer=f"To the {place.noun}")
    w.know("spot", spot.at.format(**words), f"Where was the {noun}?")
    w.know("helper", helper, f"Who found the {noun}?", f"Who helped {n}?", answer=f"The {helper}")
    w.know("sad", sad, f"How did {n} feel when the {noun} was lost?")
    w.know("treat", treat, f"What did {n} and the {helper} eat?")
    w.end(happy)


def found(w: World, topic: Topic) -> None:
    """The hero finds something, and meets the one who misses it."""
    thing, colour, hero = topic.about, topic.colour, w.hero
    assert isinstance(thing, Thing)
    n, they, them, their, noun = hero.name, hero.they, hero.them, hero.their, thing.noun
    place = w.choices.pick(PLACES)
    w.go(place.noun)
    wish = w.choices.pick(("watch the birds", "pick some flowers", "play in the sun", "look for nuts"))
    day = w.choices.pick(DAYS)
    w.say(
        f"{day}, {n} went to the {place.noun} to {wish}.",
        f"{day}, {n} wanted to {wish}, so {they} went to the {place.noun}.",
        f"{day}, {n} was {place.at}. {they.title()} wanted to {wish}.",
    )
    spot = w.choices.pick(("behind a big stone", "in the long grass", "under a bush", "next to the path"))
    w.find(noun, spot)
    w.say(
        f"{spot}, {they} found {a(f'{colour} {noun}')}.",
        f"What was that {spot}? It was {a(f'{colour} {noun}')}!",
        f"Something {colour} lay {spot}. It was {a(noun)}!",
    )
    w.give(noun, spot, n)
    w.say(
        f'"What a fine {noun}!" said {n} and picked it up.',
        f"{n} picked it up and looked at it from all sides.",
        f'{n} picked it up. "I want to keep it," {they} said.',
    )

    friend = friend_of(hero, w.choices)
    m = friend.name
    sad = w.choices.pick(("sad", "upset", "worried"))
    w.say(
        f"Then {n} heard someone cry. It was {friend.introduced}, and {friend.they} was {sad}.",
        f"On the way home, {n} met {friend.introduced}, who looked very {sad}.",
        f"Then {friend.introduced} came along the path. {friend.they.title()} looked {sad}.",
    )
    w.say(
        f'"I have lost my {noun}," said {m}. "Have you seen it?"',
        f'"Have you seen my {noun}?" asked {m}. "I cannot find it."',
        f'"What is the matter?" asked {n}. "My {noun} is gone," said {m}.',
    )
    honest = w.choices.pick((True, False))
    if honest:
        w.say(
            f'"Is this your {noun}?" asked {n} and gave it to {friend.them}.',
            f'"Here it is!" said {n} at once. "I found it {spot}."',
            f"{n} wanted to keep the {noun}, but it was not {hero.theirs}. {they.title()} gave it back at once.",
        )
    else:
        w.say(
            f'{n} hid the {noun} behind {their} back. "No," {they} said.',
            f'"No, I have not," said {n} and hid the {noun} behind {their} back.',
        )
        w.say(
            f"Then {m} began to cry, and {n} felt bad.",
            f"{m} turned to go, and a tear ran down {friend.their} nose. {n} felt bad.",
        )
        w.say(
            f'"I am sorry," said {n}. "Here is your {noun}."',
            f'"Wait!" cried {n}. "I have your {noun}. I am sorry."',
        )
    w.give(noun, n, m)
    w.say(
        f"{m} was so happy that {friend.they} jumped up and down.",
        f'"My {noun}!" cried {m}. "Thank you, {n}!"',
        f"{m} laughed and hugged {n}.",
    )
    treat = w.choices.pick(TREATS)
    w.say(
        f"{friend.they} gave {n} some {treat}.",
        f'"Come to my house," said {m}, and they ate {treat} together.',
        f"Then {m} shared {friend.their} {treat} with {n}.",
    )
    w.say(
        f"They played with the {noun} until the sun went down.",
        f"All afternoon, they played with the {noun}.",
        f'"Now we can play with the {noun} together," said {m}.',
    )
    happy = w.feel("happy", "glad", "proud")
    w.place = "home"
    w.say(
        f"In the evening, {n} went home and felt {happy}.",
        f"{n} was {happy}, for now {they} had a new friend.",
        f"That night, {n} lay in bed and was {happy}.",
    )

    w.know("thing", noun, f"What did {n} find?", answer=f"{a(f'{colour} {noun}')}")
    w.know("colour", colour, f"What colour was the {noun}?")
    w.know("wish", wish, f"What did {n} want?", f"What did {n} want to do?", answer=f"To {wish}")
    w.know("place", place.at, f"Where did {n} go?", answer=f"To the {place.noun}")
    w.know("spot", spot, f"Where was the {noun}?", f"Where did {n} find the {noun}?")
    w.know("finder", n, f"Who found the {noun}?")
    w.know("owner", m, f"Who had lost the {noun}?", f"Whose {noun} was it?", answer=m)
    w.know("sad", sad, f"How did {m} feel when the {noun} was lost?")
    w.know("treat", treat, f"What did {m} give {n} to eat?")
    w.end(happy)


def fitting(thing: Thing, place: Place) -> tuple[str, ...]:
    """The kinds of spots where this can get lost there."""
    return tuple(spot for spot in thing.spots if spot in place.spots)


def pronouns(text: str, hero: Character) -> str:
    return text.replace("<they>", hero.they).replace("<them>", hero.them).replace("<their>", hero.their)
