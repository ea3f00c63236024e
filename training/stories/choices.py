"""The choices of the grammar, and their probability."""

import math
import random
from collections.abc import Sequence


class Choices:
    """Random choices so far.

    `nats` is -log p of all of them, `trail` the numbers of the chosen options.

    >>> choices = Choices(random.Random(7))
    >>> choices.pick(["a fox", "a bear", "a pig", "a lamb"])
    'a bear'
    >>> choices.trail, choices.nats == math.log(4)
    ([1], True)
    """

    def __init__(self, rng: random.Random):
        self._rng = rng
        self.nats = 0.0
        self.trail: list[int] = []

    def pick[T](self, options: Sequence[T], weights: Sequence[int] | None = None) -> T:
        """Choose one of `options`, each as likely as its weight says. One option alone is no choice, and not counted.

        Raises ValueError where two are the same: the text would not tell which was chosen.
        """
        if len(set(options)) < len(options) or not options:
            raise ValueError(f"not a choice between different things: {options}")
        if len(options) == 1:
            return options[0]
        weights = weights or [1] * len(options)
        chosen = self._draw(weights)
        self.nats += math.log(sum(weights) / weights[chosen])
        self.trail.append(chosen)
        return options[chosen]

    def _draw(self, weights: Sequence[int]) -> int:
        # We avoid rng.choices, since only random() gives the same numbers in every version of Python.
        number = int(self._rng.random() * sum(weights))
        for i, weight in enumerate(weights):
            number -= weight
            if number < 0:
                return i
        raise AssertionError("random() is below 1")


class Replay(Choices):
    """The choices of a trail, made again. Beyond its end the first option is taken each time."""

    def __init__(self, trail: Sequence[int]):
        super().__init__(random.Random(0))
        self._given = trail
        self.weights: list[list[int]] = []  # of every choice, of all its options

    def _draw(self, weights: Sequence[int]) -> int:
        self.weights.append(list(weights))
        made = len(self.trail)
        return self._given[made] if made < len(self._given) else 0
