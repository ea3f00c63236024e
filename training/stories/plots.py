"""The plots: six small simulations. Every event needs the events before it.

A plot moves its hero and a thing through a `World`, and tells each event in one of a few ways. The world refuses
impossible events: a hero cannot go to the place where the hero already is, or give away a thing that the hero does not
have. The next event depends on the state: the wind does not take a drum, a kite in the sea is not in a tree, and a frog
does not climb.
"""

from collections.abc import Callable, Mapping, Sequence
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
    Plant,
    Skill,
    StoryPlace,
    Thing,
    Weather,
    a,
    friend_of,
)
from llamaspec.training.stories.world import World


class Topic(NamedTuple):
    """The plot of a story and its subject."""

    plot: str
    about: Thing | Dish | Plant | Weather | Skill
    color: str = ""


def tell(choices: Choices, hero: Character, topic: Topic) -> World:
    """Tell the whole story of `hero` and `topic`."""
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
    w.ask_about("hero")
    w.ask_about("animal" if hero.kind in ANIMALS else "child", other_kind=before(KINDS, hero.kind))


def become(w: World, *feelings: str, why: str) -> None:
    """Say how the hero feels about the trouble."""
    w.choose("sad", feelings)
    w.say(
        "{n} was very {sad}.",
        "Poor {n} felt {sad}.",
        '"Oh no!" cried {n}. {They} was {sad}.',
        "{n} did not know what to do and was {sad}.",
    )
    w.ask_about("trouble", why=why)


def meet(w: World, helpers: tuple[str, ...], *, helped: str = "{n}") -> None:
    """Tell that a helpful animal arrives: one of `helpers`, but not of the hero's kind."""
    w.choose("helper", tuple(kind for kind in helpers if kind != w.hero.kind))
    w.choose("helping", HELPER_TRAITS)
    w.set(someone=a(f"{w.words['helping']} {w.words['helper']}"))
    w.say("Just then, {someone} came by.", "Then {someone} came along.", "Luckily, {someone} was not far away.")
    w.ask_about("helper", helped=helped)


def end(w: World, *feelings: str) -> None:
    """Say how the hero feels at the end."""
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
    w.ask_about("end")


def lost(w: World, topic: Topic) -> None:
    """The hero loses a toy where only an animal can reach it."""
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
    w.say("", *(f"Next, {{they}} {second_try}." for second_try in spot.tries if second_try != tried))

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

    w.ask_about("lost", other_color=before(COLORS, topic.color), other_place=other_place(w))


def found(w: World, topic: Topic) -> None:
    """The hero finds a toy, and meets its owner."""
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

    w.ask_about("found", other_color=before(COLORS, topic.color), other_place=other_place(w))


def bake(w: World, topic: Topic) -> None:
    """The hero lacks an ingredient. The animal that has it asks for help first."""
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
    w.set(need=need.speech, did=w.fill(need.did))
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

    w.ask_about("bake", other_place=other_place(w))


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

    meet(w, weather.helpers, helped="them")
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

    w.ask_about("caught", other_place=other_place(w))


def grow(w: World, topic: Topic) -> None:
    """A seed does not grow until an animal knows why."""
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
    w.set(trouble=soil.trouble, said=soil.speech)
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

    w.ask_about("grow")


def learn(w: World, topic: Topic) -> None:
    """The hero learns a skill with effort, and then uses it to rescue an animal."""
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

    w.ask_about("learn", other_place=other_place(w))


def befriend(w: World) -> None:
    """Choose a friend for the hero, and set the words for the friend."""
    friend = friend_of(w.hero, w.choices)
    w.set(m=friend.name, friend=friend.introduced, m_they=friend.they, m_them=friend.them, m_their=friend.their)


def fitting(thing: Thing, place: StoryPlace) -> list[str]:
    """List the kinds of spots where this thing can get lost at this place."""
    return [spot for spot in thing.spots if spot in place.spots]


def before(options: Sequence[str], option: str) -> str:
    """Choose a wrong option to ask about.

    It is the option before `option` in `options`; before the first one comes the last.
    """
    return options[options.index(option) - 1]


def other_place(w: World) -> str:
    """Choose a place where the hero did not go."""
    nouns, place = [place.noun for place in PLACES], w.words["place"]
    return before(nouns, place if place in nouns else nouns[0])


PLOTS: Mapping[str, Callable[[World, Topic], None]] = {
    "lost": lost,
    "found": found,
    "bake": bake,
    "caught": caught,
    "grow": grow,
    "learn": learn,
}
