"""Chooses the layout of each module by the `targets` in a config.json of compressed-tensors.

A target has one of three forms: the name of a module; "re:" and a regular expression that matches the beginning of a
module's name; or a class. The class "Linear" means all modules that match no other target.
"""

import re
from collections.abc import Sequence

from llamaspec.model.checkpoints.huggingface.config import Fields
from llamaspec.model.checkpoints.huggingface.rule import Arrays, Part, Rule, StoredArray
from llamaspec.model.checkpoints.strict_json import short

EVERY, PREFIX = "Linear", "re:"
LONGEST, MOST_REPEATS = 1000, 3
# The regular expressions that we accept. We refuse a repeated group and more than `MOST_REPEATS` repeats, since
# matching such an expression may take too long.
PLAIN = re.compile(r"(?:\(\?:|[\w.^$|(\-]|\\[.d]|\[[\w\-]+\]|\)(?![*+?])|[*+?](?![*+?]))*")


class ByTarget(Rule):
    """Several layouts; each applies to the modules that match its targets. None: these modules are not quantized."""

    def __init__(self, rules: Sequence[tuple[list[str], Rule | None]]):
        self.rules, self.first = rules, next(rule for _, rule in rules if rule)
        self.form, self.zeros = self.first.form, self.first.zeros
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
        return self.first.group_of(cols)

    def stored(self, rows: int, cols: int) -> dict[str, StoredArray]:
        return self.first.stored(rows, cols)

    def part(self, arrays: Arrays, start: int, stop: int, cols: int) -> Part:
        return self.first.part(arrays, start, stop, cols)


def read_targets(group: Fields) -> list[str]:
    """Read the targets of one of the config_groups. Raises `CheckpointError` if a target is not supported.

    >>> read_targets(Fields({"targets": ["Linear", "re:.*down_proj$"]}, "config.json"))
    ['Linear', 're:.*down_proj$']
    """
    targets = group.values.get("targets")
    if not isinstance(targets, list) or not targets or not all(isinstance(target, str) for target in targets):
        raise group.refused(f"quantization_config: targets is {short(targets)}, expected a list of strings")
    for target in targets:
        check_target(target, group)
    return targets


def check_target(target: str, fields: Fields, *, patterns: bool = True) -> None:
    """Raise `CheckpointError` about the file of `fields` if `target` is a regular expression that we do not accept.

    With `patterns` False, we accept no regular expression at all, because in some formats a target is always a name.
    """
    if target.startswith(PREFIX) and not (patterns and _readable(target.removeprefix(PREFIX))):
        what = f"quantization_config: target {short(target)} is not supported"
        known = f"names, `.`, `|`, groups and at most {MOST_REPEATS} repeats" if patterns else "names"
        raise fields.refused(f"{what} (only {known})")


def _readable(expression: str) -> bool:
    repeats = sum(expression.count(sign) for sign in "*+?") - expression.count("(?:")
    if len(expression) > LONGEST or repeats > MOST_REPEATS or not PLAIN.fullmatch(expression):
        return False
    try:
        re.compile(expression)
    except re.error:
        return False
    return True
