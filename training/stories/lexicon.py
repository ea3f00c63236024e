"""The words of the stories: characters, their things, their places, and what happens there. The data: lexicon.toml."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llamaspec.training.stories.choices import Choices
from llamaspec.training.stories.tables import read_table

_TABLE = read_table("lexicon")


def _shared(row: Mapping[str, Any], *fields: str) -> dict[str, Any]:
    """Replace names of shared lists in a row's `fields` by the lists themselves."""
    return {**row} | {field: _TABLE["shared"][row[field]] for field in fields if isinstance(row[field], str)}


@dataclass(frozen=True)
class Character:
    """A character with a name and a pronoun, he or she."""

    name: str
    kind: str
    she: bool

    @property
    def they(self) -> str:
        return "she" if self.she else "he"

    @property
    def them(self) -> str:
        return "her" if self.she else "him"

    @property
    def their(self) -> str:
        return "her" if self.she else "his"

    @property
    def theirs(self) -> str:
        return "hers" if self.she else "his"

    @property
    def introduced(self) -> str:
        """
        >>> Character("Dot", "rabbit", she=True).introduced, Character("Ben", "boy", she=False).introduced
        ('Dot the rabbit', 'Ben')
        """
        return f"{self.name} the {self.kind}" if self.kind in ANIMALS else self.name


GIRLS: tuple[str, ...] = _TABLE["girls"]
BOYS: tuple[str, ...] = _TABLE["boys"]
SHE_ANIMALS: tuple[str, ...] = _TABLE["she_animals"]
HE_ANIMALS: tuple[str, ...] = _TABLE["he_animals"]

CHILDREN: tuple[str, ...] = _TABLE["children"]
ANIMALS: tuple[str, ...] = _TABLE["animals"]
KINDS = CHILDREN + ANIMALS
KIND_WEIGHTS = (2, 2, *(1 for _ in ANIMALS))

TRAITS: tuple[str, ...] = _TABLE["traits"]
HOMES: tuple[str, ...] = _TABLE["homes"]
DAYS: tuple[str, ...] = _TABLE["days"]
COLORS: tuple[str, ...] = _TABLE["colors"]
HELPER_TRAITS: tuple[str, ...] = _TABLE["helper_traits"]
TREATS: tuple[str, ...] = _TABLE["treats"]
RELATIVES: tuple[str, ...] = _TABLE["relatives"]


def names(kind: str) -> tuple[str, ...]:
    """List the names for a character of this kind. The name determines the pronoun."""
    return {"girl": GIRLS, "boy": BOYS}.get(kind, SHE_ANIMALS + HE_ANIMALS)


def character(name: str, kind: str) -> Character:
    """Make a character. The name determines the pronoun."""
    return Character(name, kind, she=name in GIRLS + SHE_ANIMALS)


def friend_of(hero: Character, choices: Choices) -> Character:
    """Choose a friend of a different kind and with a different pronoun, so that every pronoun is unambiguous."""
    animal_names = SHE_ANIMALS if not hero.she else HE_ANIMALS
    kinds = ("girl" if not hero.she else "boy", *(kind for kind in ANIMALS if kind != hero.kind))
    kind = choices.pick(kinds, (4, *(1 for _ in kinds[1:])))
    return character(choices.pick(names(kind) if kind in CHILDREN else animal_names), kind)


def a(noun: str) -> str:
    """
    >>> a("owl"), a("red kite"), a("orange hat")
    ('an owl', 'a red kite', 'an orange hat')
    """
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def capital(text: str) -> str:
    """
    >>> capital("in the garden"), capital('"Oh no!" she cried')
    ('In the garden', '"Oh no!" she cried')
    """
    return text[:1].upper() + text[1:]


@dataclass(frozen=True, eq=False)
class Thing:
    """A toy that can be lost. A `World` replaces the {braces} in its phrases by words."""

    noun: str
    use: str  # "to fly {their} kite"
    joys: tuple[str, ...]
    losses: tuple[str, ...]
    spots: tuple[str, ...]  # kinds of spots where it can land


THINGS = tuple(Thing(**_shared(row, "losses")) for row in _TABLE["things"])


@dataclass(frozen=True, eq=False)
class StoryPlace:
    """A place to go to, and the kinds of spots there."""

    noun: str
    far: bool  # from home
    spots: tuple[str, ...]
    water: str = ""


PLACES = tuple(StoryPlace(**row) for row in _TABLE["places"])


@dataclass(frozen=True, eq=False)
class Spot:
    """The spot where a lost thing lies, why the hero cannot reach it, and which animals can."""

    at: str
    landings: tuple[str, ...]
    tries: tuple[str, ...]
    helpers: dict[str, str]  # animals, and how each reaches the thing


SPOTS = {kind: Spot(**row) for kind, row in _TABLE["spots"].items()}


@dataclass(frozen=True, eq=False)
class Dish:
    """A dish, and the ingredients that can be missing."""

    noun: str
    some: str  # "a cake", "some pancakes"
    many: bool
    lacks: tuple[str, ...]


DISHES = tuple(Dish(**row) for row in _TABLE["dishes"])
GIVERS: dict[str, dict[str, str]] = _TABLE["givers"]  # for each ingredient, the animals that have it and their places


@dataclass(frozen=True, eq=False)
class Plant:
    """A plant that grows from a seed, and its uses."""

    noun: str
    size: str
    uses: tuple[str, ...]  # {helper} is the animal that helped


PLANTS = tuple(Plant(**row) for row in _TABLE["plants"])


@dataclass(frozen=True, eq=False)
class Soil:
    """A reason why a seed does not grow."""

    trouble: str
    speech: str
    cures: tuple[str, ...]
    helpers: tuple[str, ...]


SOILS = tuple(Soil(**row) for row in _TABLE["soils"])


@dataclass(frozen=True, eq=False)
class Weather:
    """Bad weather for two friends on their way."""

    noun: str
    when: str
    comes: tuple[str, ...]
    tries: tuple[str, ...]
    helpers: tuple[str, ...]
    offers: tuple[str, ...]
    ways_out: tuple[str, ...]
    fear: str


WEATHERS = tuple(Weather(**_shared(row, "tries", "ways_out")) for row in _TABLE["weathers"])


@dataclass(frozen=True, eq=False)
class Need:
    """A favor that the giver asks for first."""

    speech: str
    does: str
    did: str  # the answer to a question about the favor


NEEDS = tuple(Need(**row) for row in _TABLE["needs"])


@dataclass(frozen=True, eq=False)
class Rescue:
    """An animal in trouble, and how the hero helps with the new skill."""

    who: str
    trouble: str
    does: str


@dataclass(frozen=True, eq=False)
class Skill:
    """A skill to learn: failed attempts, possible teachers, and its use."""

    verb: str
    place: str
    tries: tuple[str, ...]
    teachers: tuple[str, ...]
    advice: tuple[str, ...]
    successes: tuple[str, ...]
    rescues: tuple[Rescue, ...]


SKILLS = tuple(
    Skill(**{**row, "rescues": tuple(Rescue(**rescue) for rescue in row["rescues"])}) for row in _TABLE["skills"]
)
