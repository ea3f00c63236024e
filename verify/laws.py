"""Laws that many ops obey."""

from llamaspec.verify.contract import Claim, Law, Trial


def alone(what: str, *names: str) -> Law:
    """A law of ops that work entry by entry on the first axis of arguments `names`. It compares the first output."""

    def check(trial: Trial) -> Claim:
        last = len(trial.arguments[names[0]]) - 1
        one = slice(last, last + 1)
        again = trial.again(**{name: trial.arguments[name][one] for name in names})
        return Claim(again[0], trial.outputs[0][one], 2 * trial.bounds[0][one])

    return Law(f"{what} alone gives what it gives among others", check)
