"""The random choices of the grammar, and their probability."""

import math
import random
from collections.abc import Sequence


class Choices:
    """A record of random choices.

    `nats` is -log p of all choices so far, and `trail` lists the indices of the chosen options.

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
        """Choose one of `options` with probability proportional to its weight. A single option is not recorded.

        Raises ValueError if two options are equal, because the text would not show which one was chosen.
        """
        if len(set(options)) < len(options) or not options:
            raise ValueError(f"options must be different: {options}")
        if len(options) == 1:
            return options[0]
        weights = weights or [1] * len(options)
        chosen = self._draw(weights)
        self.nats += math.log(sum(weights) / weights[chosen])
        self.trail.append(chosen)
        return options[chosen]

    def _draw(self, weights: Sequence[int]) -> int:
        # Only random() gives the same numbers in every version of Python, so we avoid rng.choices.
        number = int(self._rng.random() * sum(weights))
        for i, weight in enumerate(weights):
            number -= weight
            if number < 0:
                return i
        raise AssertionError("random() is below 1")


class ReplayedChoices(Choices):
    """Choices that repeat a trail. After the end of the trail, they always take the first option."""

    def __init__(self, trail: Sequence[int]):
        super().__init__(random.Random(0))
        self._recorded = trail
        self.weights: list[list[int]] = []  # for each choice, the weights of its options

    def _draw(self, weights: Sequence[int]) -> int:
        self.weights.append(list(weights))
        position = len(self.trail)
        return self._recorded[position] if position < len(self._recorded) else 0
