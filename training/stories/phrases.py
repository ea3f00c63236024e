"""Phrases for talking with the storyteller. The data: phrases.toml.

The loss does not count the people's messages, so many different phrases do not make the stories harder to learn.
"""

from llamaspec.training.stories.tables import read_table

_TABLE = read_table("phrases")
OFFER: str = _TABLE["offer"]
OFFER_ANOTHER: str = _TABLE["offer_another"]
NOTHING_TOLD: str = _TABLE["nothing_told"]

ABILITIES: tuple[str, ...] = _TABLE["abilities"]
REMARKS: tuple[str, ...] = _TABLE["remarks"]
REQUESTS: tuple[str, ...] = _TABLE["requests"]
KNOWN: tuple[str, ...] = _TABLE["known"]
ANOTHER: tuple[str, ...] = _TABLE["another"]
UNKNOWN: tuple[str, ...] = _TABLE["unknown"]
AGREEMENTS: tuple[str, ...] = _TABLE["agreements"]
REFUSALS: tuple[str, ...] = _TABLE["refusals"]
MORE: tuple[str, ...] = _TABLE["more"]
NOT_TOLD: tuple[str, ...] = _TABLE["not_told"]
HOW: tuple[str, ...] = _TABLE["how"]
KNOWN_HOW: tuple[str, ...] = _TABLE["known_how"]
DEEDS: tuple[str, ...] = _TABLE["deeds"]
ASKED_OF_A_NAME: tuple[str, ...] = _TABLE["asked_of_a_name"]
ASKED_OF_A_THING: tuple[str, ...] = _TABLE["asked_of_a_thing"]
ABOUT_IT: tuple[str, ...] = _TABLE["about_it"]
OTHER_PLOTS: dict[str, tuple[str, ...]] = _TABLE["other_plots"]

type Turn = tuple[tuple[str, ...], tuple[str, ...]]  # what people say, and the replies
SOCIAL: tuple[Turn, ...] = tuple((turn["says"], turn["replies"]) for turn in _TABLE["social"])
AFTERWARDS: tuple[Turn, ...] = tuple((turn["says"], turn["replies"]) for turn in _TABLE["afterwards"])
