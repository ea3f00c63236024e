"""The words of the stories: who there is, what they have, where they go, and what can be done there."""

from dataclasses import dataclass

from llamaspec.training.stories.choices import Choices


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
    def theirs(self) -> str:
        return "hers" if self.she else "his"

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
    "in a cozy hut near the forest",
    "in an old mill behind the hill",
    "in a pretty village",
    "in a tiny cottage by the sea",
    "in a round house under a big oak",
    "in a tall house at the end of the road",
    "in a warm den between two hills",
)
DAYS = (
    "one sunny morning",
    "one day",
    "on a warm afternoon",
    "one fine day",
    "early one morning",
    "one spring morning",
    "one summer day",
    "on Sunday",
)
COLORS = ("red", "blue", "green", "yellow", "white", "orange", "purple", "pink")


def names(kind: str) -> tuple[str, ...]:
    """List the names for someone of this kind: the name says whether it is he or she."""
    return {"girl": GIRLS, "boy": BOYS}.get(kind, SHE_ANIMALS + HE_ANIMALS)


def character(name: str, kind: str) -> Character:
    """Make someone of this name, which says whether it is he or she."""
    return Character(name, kind, she=name in GIRLS + SHE_ANIMALS)


def friend_of(hero: Character, choices: Choices) -> Character:
    """Choose a friend of another kind and the other pronoun than the hero, so that every pronoun has one meaning."""
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


def capital(text: str) -> str:
    """
    >>> capital("in the garden"), capital('"Oh no!" she cried')
    ('In the garden', '"Oh no!" she cried')
    """
    return text[:1].upper() + text[1:]


@dataclass(frozen=True, eq=False)
class Thing:
    """A toy that can be lost. The braces are filled from the words of a `World`."""

    noun: str
    use: str  # "to fly {their} kite"
    joys: tuple[str, ...]
    losses: tuple[str, ...]
    spots: tuple[str, ...]  # kinds of spots where it can end


WIND = (
    "Suddenly a strong wind came and blew the {noun} away.",
    "But then the wind took the {noun} and carried it away.",
    "Whoosh! The wind was so strong that the {noun} flew away.",
)
DROP = (
    "But then {n} tripped over a root and dropped the {noun}.",
    "But the {noun} slipped out of {their} hands.",
    "But {n} ran too fast, fell down and lost the {noun}.",
)

THINGS = (
    Thing(
        "kite",
        "to fly {their} kite",
        ("The kite danced in the sky.", "The kite flew higher and higher.", "The kite looked like a big bird."),
        WIND,
        ("tree", "water", "sea", "bush"),
    ),
    Thing(
        "ball",
        "to play with {their} ball",
        (
            "The ball bounced up and down.",
            "{n} threw the ball up and caught it again.",
            "The ball rolled through the grass.",
        ),
        ("But then {n} kicked the ball too hard.", "But {n} threw the ball too far.", "But the ball bounced away."),
        ("tree", "water", "sea", "bush", "hole"),
    ),
    Thing(
        "hat",
        "to wear {their} hat",
        ("The hat looked very fine.", "The birds looked at the hat and sang.", "{n} danced with the hat."),
        WIND,
        ("tree", "water", "sea", "bush"),
    ),
    Thing(
        "balloon",
        "to play with {their} balloon",
        (
            "The balloon danced in the air.",
            "{n} ran, and the balloon followed {them}.",
            "The balloon was as round as the moon.",
        ),
        ("But the string slipped out of {their} hands.", "But {n} let go of the string.", WIND[0]),
        ("tree",),
    ),
    Thing(
        "boat",
        "to sail {their} boat",
        ("The boat sailed very well.", "The boat danced on the waves.", "The boat sailed round and round."),
        ("But then a big wave came.", "But the wind was too strong for the boat.", "But the boat sailed too far."),
        ("water", "sea"),
    ),
    Thing(
        "bell",
        "to ring {their} bell",
        ("The bell went ding, ding, ding.", "The bell made a clear sound.", "{n} rang the bell three times."),
        DROP,
        ("water", "sea", "bush", "hole"),
    ),
    Thing(
        "drum",
        "to play {their} drum",
        ("The drum went boom, boom, boom.", "{n} played a merry song on the drum.", "The drum made a deep sound."),
        DROP,
        ("water", "sea", "bush"),
    ),
    Thing(
        "flute",
        "to play {their} flute",
        ("The flute made a sweet sound.", "{n} played a merry song on the flute.", "The birds sang with the flute."),
        DROP,
        ("water", "sea", "bush", "hole"),
    ),
)


@dataclass(frozen=True, eq=False)
class Place:
    """Somewhere to go, and the kinds of spots there."""

    noun: str
    far: bool  # from home
    spots: tuple[str, ...]
    water: str = ""


PLACES = (
    Place("garden", False, ("tree", "water", "bush", "hole"), "pond"),
    Place("park", False, ("tree", "water", "bush", "hole"), "pond"),
    Place("forest", True, ("tree", "water", "bush", "hole"), "stream"),
    Place("meadow", True, ("tree", "water", "bush", "hole"), "stream"),
    Place("beach", True, ("sea",), "sea"),
    Place("hill", True, ("tree", "bush", "hole")),
)


@dataclass(frozen=True, eq=False)
class Spot:
    """The place where a lost thing lies, why the hero cannot get at it, and who can."""

    at: str
    landings: tuple[str, ...]
    tries: tuple[str, ...]
    helpers: dict[str, str]  # and how they do it


SPOTS = {
    "tree": Spot(
        "in a tall tree",
        ("The {noun} got stuck in a tall tree.", "The {noun} landed at the top of a tall tree."),
        (
            "jumped as high as {they} could, but the tree was too tall",
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
    "sea": Spot(
        "in the sea",
        ("The {noun} fell into the sea.", "Splash! The {noun} was far out in the sea."),
        (
            "reached out with a stick, but the stick was too short",
            "put one foot into the water, but it was too cold",
            "waited and waited, but the {noun} did not come back",
        ),
        {
            "seal": "swam out as fast as it could",
            "turtle": "swam slowly through the waves",
            "crab": "went into the water without a sound",
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
            "mouse": "ran down and down",
        },
    ),
}
HELPER_TRAITS = ("old", "friendly", "small", "wise")
TREATS = ("cookies", "berries", "bread", "cheese", "cake")
RELATIVES = ("grandmother", "grandfather", "mother", "father")


@dataclass(frozen=True, eq=False)
class Dish:
    """Something to cook, and what can be missing for it."""

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


@dataclass(frozen=True, eq=False)
class Plant:
    """Something that grows from a seed, and its uses."""

    noun: str
    size: str
    uses: tuple[str, ...]  # what is done with it, {helper} being the one who helped


PLANTS = (
    Plant("pumpkin", "big", ("made a pot of hot soup for the {helper}", "made a pumpkin pie for the {helper}")),
    Plant("sunflower", "tall", ("sat in its shade with the {helper}", "danced round it with the {helper}")),
    Plant("rose", "fine", ("showed it to the {helper}", "danced round it with the {helper}")),
    Plant("carrot", "long", ("made a pot of hot soup for the {helper}", "shared it with the {helper}")),
    Plant("melon", "sweet", ("shared it with the {helper}", "cut it and gave a big piece to the {helper}")),
)


@dataclass(frozen=True, eq=False)
class Soil:
    """Why a seed does not grow."""

    trouble: str
    said: str
    cures: tuple[str, ...]
    helpers: tuple[str, ...]


SOILS = (
    Soil(
        "too dry",
        "The ground is too dry. Your seed is thirsty",
        ("So {n} brought water from the well every morning.", "They brought water from the stream together."),
        ("frog", "snail"),
    ),
    Soil(
        "too hard",
        "The ground is too hard. Your seed cannot move",
        ("It dug and dug until the ground was soft.", "They dug together until the ground was soft."),
        ("worm", "mole"),
    ),
    Soil(
        "too cold",
        "The ground is too cold. Your seed needs a blanket",
        ("So they put dry leaves on the ground.", "It gave {n} a soft blanket for the seed."),
        ("sheep", "goose"),
    ),
)


@dataclass(frozen=True, eq=False)
class Weather:
    """Weather that two friends are caught in."""

    noun: str
    when: str
    comes: tuple[str, ...]
    tries: tuple[str, ...]
    helpers: tuple[str, ...]
    offers: tuple[str, ...]
    ways_out: tuple[str, ...]
    fear: str


ASTRAY = (
    "They looked for the path, but they came back to the same stone.",
    "They went to the left and to the right, but they could not find the path.",
    "They called for help, but nobody came.",
)
FOLLOW = (
    "The {helper} went first, and they followed it step by step.",
    "It was a long way, but the {helper} did not leave them alone.",
)
WEATHERS = (
    Weather(
        "storm",
        "it began to rain",
        (
            "Then a big storm came, and it began to rain.",
            "Suddenly there was a storm, and it began to rain.",
            "But a storm was near, and it began to rain.",
        ),
        (
            "They stood under a tree, but the rain came through the leaves.",
            "They wanted to run home, but the path was full of water.",
            "They crept under a bush, but it was cold and wet there.",
        ),
        ("badger", "beaver", "donkey"),
        (
            '"Come with me," said the {helper}. "My house is warm and dry."',
            '"You are all wet," said the {helper}. "Come to my house!"',
            '"I have a warm fire at home," said the {helper}. "Come and see!"',
        ),
        (
            "They sat by the fire until the rain stopped.",
            "The {helper} gave them a blanket, and they waited until the rain stopped.",
        ),
        "afraid of storms",
    ),
    Weather(
        "fog",
        "the fog came",
        (
            "Then a thick fog came, and they could not see the path.",
            "Suddenly there was thick fog all around them.",
            "But the fog came, and everything was white.",
        ),
        ASTRAY,
        ("goat", "donkey", "goose"),
        (
            '"Come with me," said the {helper}. "I know every path."',
            '"I live here," said the {helper}. "I can show you the way."',
        ),
        FOLLOW,
        "afraid of fog",
    ),
    Weather(
        "dark night",
        "it was dark",
        (
            "Then the sun went down, and soon it was dark.",
            "Suddenly it was dark, and they could not see the path.",
            "But the sun went down, and it was dark.",
        ),
        ASTRAY,
        ("owl", "cat", "bat"),
        (
            '"Come with me," said the {helper}. "I can see in the dark."',
            '"The dark is my friend," said the {helper}. "I can show you the way."',
        ),
        FOLLOW,
        "afraid of the dark",
    ),
)


@dataclass(frozen=True, eq=False)
class Need:
    """A wish that somebody has before they give."""

    said: str
    does: str
    did: str  # the answer to what the hero did


NEEDS = (
    Need("My bed is hard and cold", "{n} brought dry leaves and made a soft bed", "{They} made a soft bed"),
    Need("I am very thirsty", "{n} ran to the stream and brought fresh water", "{They} brought fresh water"),
    Need("A stone lies on my path", "{n} pushed and pushed until it rolled away", "{They} pushed the stone away"),
    Need("I feel lonely today", "{n} sat down and sang a merry song", "{They} sang a song"),
)


@dataclass(frozen=True, eq=False)
class Rescue:
    """Somebody in trouble, and what a hero does who has learned to help."""

    who: str
    trouble: str
    does: str


@dataclass(frozen=True, eq=False)
class Skill:
    """A skill to learn: what goes wrong at first, who can teach it, and its use."""

    verb: str
    place: str
    tries: tuple[str, ...]
    teachers: tuple[str, ...]
    advice: tuple[str, ...]
    successes: tuple[str, ...]
    rescues: tuple[Rescue, ...]


SKILLS = (
    Skill(
        "swim",
        "pond",
        ("jumped in, but the water was too deep", "tried to swim, but the water got into {their} nose"),
        ("duck", "frog", "turtle"),
        ("Kick with both legs", "Take a deep breath"),
        ("swam from one side of the pond to the other", "swam all the way round the pond"),
        (
            Rescue("chick", "fell into the pond", "swam out and brought the chick back"),
            Rescue("beetle", "was on a leaf in the middle of the pond", "swam out and pushed the leaf to the grass"),
        ),
    ),
    Skill(
        "sing",
        "park",
        ("opened {their} mouth, but no sound came out", "tried to sing, but it sounded like an old door"),
        ("robin", "sparrow", "cricket"),
        ("Listen to the wind", "Take a deep breath"),
        ("sang a whole song", "sang so well that the birds stopped to listen"),
        (
            Rescue("chick", "could not sleep", "sang until it closed its eyes"),
            Rescue("beetle", "was lost in the fog", "sang until it found the way home"),
        ),
    ),
    Skill(
        "jump",
        "meadow",
        ("jumped over a stone, but fell on {their} nose", "tried to jump, but landed in the mud"),
        ("frog", "cricket", "goat"),
        ("Bend your legs", "Look far ahead"),
        ("jumped over a big stone", "jumped from one side of the stream to the other"),
        (
            Rescue("chick", "was alone behind a high wall", "jumped over the wall and brought the chick back"),
            Rescue("beetle", "got stuck on the other side of the stream", "jumped over and brought the beetle back"),
        ),
    ),
    Skill(
        "climb",
        "forest",
        ("climbed a tree, but a branch broke", "tried to climb, but landed in the mud"),
        ("squirrel", "goat", "lizard"),
        ("Hold on tightly", "Do not look down"),
        ("climbed to the top of a tall tree", "climbed from branch to branch"),
        (
            Rescue("chick", "fell out of its nest", "climbed the tree and put the chick back"),
            Rescue("beetle", "got stuck on a high branch", "climbed up and brought the beetle down"),
        ),
    ),
)
