"""The words of the stories: who there is, what they have, where they go, and what can be done there."""

from dataclasses import dataclass

from model.stories.choices import Choices


@dataclass(frozen=True)
class Character:
    """Someone with a name, whom the story calls he or she."""

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
    def introduced(self) -> str:
        """
        >>> Character("Dot", "rabbit", she=True).introduced, Character("Ben", "boy", she=False).introduced
        ('Dot the rabbit', 'Ben')
        """
        return f"{self.name} the {self.kind}" if self.kind in ANIMALS else self.name


GIRLS = ("Mia", "Lily", "Anna", "Rosa", "Emma", "Nora")
BOYS = ("Ben", "Tom", "Max", "Leo", "Sam", "Finn")
SHE_ANIMALS = ("Dot", "Luna", "Poppy", "Hazel")
HE_ANIMALS = ("Pip", "Bruno", "Toby", "Otto")

CHILDREN = ("girl", "boy")
ANIMALS = ("fox", "bear", "rabbit", "mouse", "pig", "kitten", "lamb", "puppy")
KINDS = CHILDREN + ANIMALS
KIND_WEIGHTS = (2, 2, *(1 for _ in ANIMALS))

TRAITS = ("little", "young", "kind", "clever", "curious", "cheerful", "gentle", "quiet")
HOMES = (
    "in a small house by the river",
    "in a cosy hut near the forest",
    "in an old mill behind the hill",
    "in a quiet village",
    "in a tiny cottage by the sea",
    "in a round house under a big oak",
)
DAYS = ("one sunny morning", "one day", "on a warm afternoon", "one fine day", "early one morning", "on Sunday")
COLOURS = ("red", "blue", "green", "yellow", "white", "orange", "purple", "pink")


def names(kind: str) -> tuple[str, ...]:
    """What someone of this kind may be called: the name says whether it is he or she."""
    return {"girl": GIRLS, "boy": BOYS}.get(kind, SHE_ANIMALS + HE_ANIMALS)


def character(name: str, kind: str) -> Character:
    return Character(name, kind, she=name in GIRLS + SHE_ANIMALS)


def friend_of(hero: Character, choices: Choices) -> Character:
    """Of another kind than the hero, and she where the hero is he, so that every pronoun has one meaning."""
    others = SHE_ANIMALS if not hero.she else HE_ANIMALS
    kinds = ("girl" if not hero.she else "boy", *(kind for kind in ANIMALS if kind != hero.kind))
    kind = choices.pick(kinds, (4, *(1 for _ in kinds[1:])))
    return character(choices.pick(names(kind) if kind in CHILDREN else others), kind)


def a(noun: str) -> str:
    """
    >>> a("owl"), a("red kite"), a("orange hat")
    ('an owl', 'a red kite', 'an orange hat')
    """
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


@dataclass(frozen=True)
class Thing:
    """A toy that can be lost. In the texts, N is the hero and <they>, <them>, <their> the pronouns."""

    noun: str
    use: str  # "to fly <their> kite"
    joys: tuple[str, ...]
    losses: tuple[str, ...]
    spots: tuple[str, ...]  # kinds of spots where it can end


WIND = (
    "Suddenly a strong wind came and blew the {noun} away.",
    "But then the wind took the {noun} and carried it away.",
    "Whoosh! The wind was so strong that the {noun} flew away.",
)
DROP = (
    "But then N tripped over a root and dropped the {noun}.",
    "But the {noun} slipped out of <their> hands.",
    "But N ran too fast, fell down and lost the {noun}.",
)

THINGS = (
    Thing(
        "kite",
        "to fly <their> kite",
        ("The kite danced in the sky.", "The kite flew higher and higher."),
        WIND,
        ("tree", "water", "bush"),
    ),
    Thing(
        "ball",
        "to play with <their> ball",
        ("The ball bounced up and down.", "N threw the ball up and caught it again."),
        ("But then N kicked the ball too hard.", "But N threw the ball too far.", "But the ball bounced away."),
        ("tree", "water", "bush", "hole"),
    ),
    Thing(
        "hat",
        "to wear <their> hat",
        ("The hat looked very fine.", "The birds looked at the hat and sang."),
        WIND,
        ("tree", "water", "bush"),
    ),
    Thing(
        "balloon",
        "to play with <their> balloon",
        ("The balloon danced in the air.", "N ran, and the balloon followed <them>."),
        ("But the string slipped out of <their> hands.", "But N let go of the string.", WIND[0]),
        ("tree",),
    ),
    Thing(
        "boat",
        "to sail <their> boat",
        ("The boat sailed very well.", "The boat danced on the waves."),
        ("But then a big wave came.", "But the wind was too strong for the boat.", "But the boat sailed too far."),
        ("water",),
    ),
    Thing(
        "bell",
        "to ring <their> bell",
        ("The bell went ding, ding, ding.", "The bell made a clear sound."),
        DROP,
        ("water", "bush", "hole"),
    ),
    Thing(
        "drum",
        "to play <their> drum",
        ("The drum went boom, boom, boom.", "N played a merry song on the drum."),
        DROP,
        ("water", "bush"),
    ),
    Thing(
        "flute",
        "to play <their> flute",
        ("The flute made a sweet sound.", "N played a merry song on the flute."),
        DROP,
        ("water", "bush", "hole"),
    ),
)


@dataclass(frozen=True)
class Place:
    """Somewhere to go: "in the park", "to the park"."""

    noun: str
    at: str
    spots: tuple[str, ...]
    water: str = ""


PLACES = (
    Place("garden", "in the garden", ("tree", "water", "bush", "hole"), "pond"),
    Place("park", "in the park", ("tree", "water", "bush", "hole"), "pond"),
    Place("forest", "in the forest", ("tree", "water", "bush", "hole"), "stream"),
    Place("meadow", "in the meadow", ("tree", "water", "bush", "hole"), "stream"),
    Place("beach", "on the beach", ("water", "hole"), "sea"),
    Place("hill", "on the hill", ("tree", "bush", "hole")),
)


@dataclass(frozen=True)
class Spot:
    """Where a lost thing lies, why the hero cannot get at it, and who can. {noun} is the thing, {water} the pond."""

    at: str
    landings: tuple[str, ...]
    tries: tuple[str, ...]
    helpers: dict[str, str]  # and how they do it


SPOTS = {
    "tree": Spot(
        "in a tall tree",
        ("The {noun} got stuck in a tall tree.", "The {noun} landed at the top of a tall tree."),
        (
            "jumped as high as <they> could, but the tree was too tall",
            "shook the tree, but the {noun} did not fall down",
            "tried to climb the tree, but the branches were too thin",
        ),
        {
            "owl": "spread its wings and flew to the top of the tree",
            "crow": "flew up and up",
            "squirrel": "ran up the tree as fast as it could",
        },
    ),
    "water": Spot(
        "in the {water}",
        ("The {noun} landed in the middle of the {water}.", "Splash! The {noun} was far out in the {water}."),
        (
            "reached out with a stick, but the stick was too short",
            "put one foot into the water, but it was too cold",
            "waited and waited, but the {noun} did not come back",
        ),
        {
            "duck": "swam out as fast as it could",
            "frog": "jumped into the {water} with a big splash",
            "turtle": "swam slowly through the {water}",
        },
    ),
    "bush": Spot(
        "in a thorny bush",
        ("The {noun} landed in a thorny bush.", "The {noun} got stuck in a thorny bush."),
        (
            "pulled and pulled, but the {noun} did not move",
            "reached into the bush, but the thorns were too sharp",
            "shook the bush, but the {noun} did not fall out",
        ),
        {
            "hedgehog": "crept under the sharp thorns",
            "sparrow": "hopped between the sharp thorns",
            "goat": "was not afraid of thorns and ate its way into the bush",
        },
    ),
    "hole": Spot(
        "in a deep hole",
        ("The {noun} rolled into a deep hole.", "The {noun} fell into a deep hole in the ground."),
        (
            "reached into the hole, but it was too deep",
            "looked into the hole, but it was too dark",
            "tried to reach the {noun} with a stick, but the stick was too short",
        ),
        {
            "mole": "crawled into the dark hole",
            "snake": "went down into the hole without a sound",
            "ferret": "crawled down and down",
        },
    ),
}
HELPER_TRAITS = ("old", "friendly", "small", "wise")
TREATS = ("cookies", "berries", "bread", "cheese", "cake")
RELATIVES = {"grandmother": "her", "grandfather": "him", "mother": "her", "father": "him"}


@dataclass(frozen=True)
class Dish:
    noun: str
    some: str  # "a cake", "some pancakes"
    many: bool
    lacks: tuple[str, ...]


DISHES = (
    Dish("cake", "a cake", False, ("eggs", "milk", "honey")),
    Dish("pie", "a pie", False, ("berries", "milk", "eggs")),
    Dish("pancakes", "some pancakes", True, ("eggs", "milk", "berries")),
    Dish("cookies", "some cookies", True, ("eggs", "honey", "nuts")),
)
GIVERS = {  # of what a cook lacks: who has it, and where
    "eggs": {"hen": "farm", "goose": "farm"},
    "milk": {"cow": "meadow", "goat": "farm"},
    "honey": {"bee": "garden", "badger": "forest"},
    "berries": {"hedgehog": "forest", "robin": "garden"},
    "nuts": {"squirrel": "forest", "crow": "park"},
}


@dataclass(frozen=True)
class Plant:
    noun: str
    size: str
    uses: tuple[str, ...]  # what is done with it, {helper} being the one who helped


PLANTS = (
    Plant("pumpkin", "big", ("made a pot of hot soup for {helper}", "made a pumpkin pie for {helper}")),
    Plant("sunflower", "tall", ("sat in its shade with {helper}", "danced round the sunflower with {helper}")),
    Plant("rose", "fine", ("showed the rose to {helper}", "danced round the rose with {helper}")),
    Plant("carrot", "long", ("made a pot of hot soup for {helper}", "shared the carrot with {helper}")),
    Plant("melon", "sweet", ("shared the melon with {helper}", "cut the melon and gave a piece to {helper}")),
)


@dataclass(frozen=True)
class Skill:
    """Something to learn: who can teach it, what goes wrong first, and what it is good for."""

    verb: str
    where: str
    tries: tuple[str, ...]
    teachers: tuple[str, ...]
    advice: tuple[str, ...]
    success: tuple[str, ...]
    needs: tuple[tuple[str, str, str], ...]  # who is in trouble, how, and what the hero does


SKILLS = (
    Skill(
        "swim",
        "in the pond",
        ("jumped into the pond, but the water was too deep", "tried, but the water got into <their> nose"),
        ("duck", "frog", "turtle"),
        ("Kick your legs slowly", "Take a deep breath"),
        ("swam all the way across the pond", "swam round the pond three times"),
        (
            ("chick", "fell into the pond", "swam out and carried the chick to the shore"),
            ("beetle", "sat on a leaf in the middle of the pond", "swam out and pushed the leaf to the shore"),
        ),
    ),
    Skill(
        "sing",
        "in the park",
        ("opened <their> mouth, but no sound came out", "tried, but it sounded like an old door"),
        ("robin", "lark", "cricket"),
        ("Listen to the wind", "Take a deep breath"),
        ("sang a song from the first word to the last", "sang so well that the trees listened"),
        (
            ("chick", "was crying and could not sleep", "sang until the chick closed its eyes"),
            ("beetle", "was lost in the fog", "sang until the beetle found the way home"),
        ),
    ),
    Skill(
        "jump",
        "in the meadow",
        ("jumped over a stone, but fell on <their> nose", "tried, but landed in the mud"),
        ("frog", "cricket", "goat"),
        ("Bend your legs", "Look far ahead"),
        ("jumped over the stream", "jumped over a big stone"),
        (
            ("chick", "was alone on the other side of the stream", "jumped over the stream and brought the chick back"),
            ("beetle", "lay on its back behind a high wall", "jumped over the wall and turned the beetle round"),
        ),
    ),
    Skill(
        "climb",
        "in the forest",
        ("climbed a tree, but a branch broke", "tried, but slipped and landed in the mud"),
        ("squirrel", "goat", "lizard"),
        ("Hold on tightly", "Do not look down"),
        ("climbed to the top of a tall tree", "climbed the highest rock in the forest"),
        (
            ("chick", "fell out of its nest", "climbed up and put the chick back into the nest"),
            ("beetle", "got stuck on a high branch", "climbed up and carried the beetle down"),
        ),
    ),
)
