"""Layouts for some modules of a model, as the `targets` of compressed-tensors name them.

A target is the name of a module, "re:" and a regular expression that matches the beginning of a name, or a
class: "Linear" stands for all modules that no other target names.
"""

import re
from collections.abc import Sequence

from llamaspec.model.checkpoints.huggingface.config import Fields
from llamaspec.model.checkpoints.huggingface.rule import Arrays, Part, Rule, StoredArray
from llamaspec.model.checkpoints.strict_json import short

EVERY, PREFIX = "Linear", "re:"
LONGEST, MOST_REPEATS = 1000, 3
# We refuse repeats of a group and many repeats: matching them may take too long.
PLAIN = re.compile(r"(?:\(\?:|[\w.^$|(\-]|\\[.d]|\[[\w\-]+\]|\)(?![*+?])|[*+?](?![*+?]))*")


class ByTarget(Rule):
    """Several layouts, each for its targets."""

    def __init__(self, rules: Sequence[tuple[list[str], Rule]]):
        self.rules, first = rules, rules[0][1]
        self.form, self.zeros = first.form, first.zeros
        self._of_name: dict[str, int] = {}  # places in `rules`; a file may name thousands of modules
        self._of_pattern: list[tuple[str, int]] = []
        for place, (targets, _) in enumerate(rules):
            for target in targets:
                if target.startswith(PREFIX):
                    self._of_pattern.append((target.removeprefix(PREFIX), place))
                else:
                    self._of_name.setdefault(target, place)

    def of(self, module: str) -> Rule | None:
        places = [place for pattern, place in self._of_pattern if re.match(pattern, module)]
        places += [self._of_name[module]] if module in self._of_name else []
        place = min(places) if places else self._of_name.get(EVERY)
        return None if place is None else self.rules[place][1]

    def group_of(self, cols: int) -> int:
        return self.rules[0][1].group_of(cols)

    def stored(self, rows: int, cols: int) -> dict[str, StoredArray]:
        return self.rules[0][1].stored(rows, cols)

    def part(self, arrays: Arrays, start: int, stop: int, cols: int) -> Part:
        return self.rules[0][1].part(arrays, start, stop, cols)


def read_targets(group: Fields) -> list[str]:
    """Read the targets of a group. Raises `CheckpointError` for targets that we cannot match.

    >>> read_targets(Fields({"targets": ["Linear", "re:.*down_proj$"]}, "config.json"))
    ['Linear', 're:.*down_proj$']
    """
    targets = group.values.get("targets")
    if not isinstance(targets, list) or not targets or not all(isinstance(target, str) for target in targets):
        raise group.refused(f"quantization_config: targets {short(targets)} of a group are no list of texts")
    for target in targets:
        if target.startswith(PREFIX) and not _readable(target.removeprefix(PREFIX)):
            what = f"quantization_config: target {short(target)} is not read"
            raise group.refused(f"{what}: only names, `.`, `|`, groups and {MOST_REPEATS} repeats are")
    return targets


def _readable(expression: str) -> bool:
    repeats = sum(expression.count(sign) for sign in "*+?") - expression.count("(?:")
    if len(expression) > LONGEST or repeats > MOST_REPEATS or not PLAIN.fullmatch(expression):
        return False
    try:
        re.compile(expression)
    except re.error:
        return False
    return True
