"""Write dpo.json: DPO's loss and rewards of 20 drawn batches, by the formulas of TRL's DPOTrainer.

TRL and torch are not needed: this script computes the formulas of trl/trainer/dpo_trainer.py (commit f2cd577) in
decimal arithmetic of 50 digits. It does not use the code under test:

    logits  = (policy_chosen - policy_rejected) - (ref_chosen - ref_rejected)
    losses  = -logsigmoid(beta * logits)                                     (loss_type sigmoid, no label smoothing)
    rewards = beta * (policy - ref), for chosen and for rejected answers
    loss    = losses.mean(), margins = (rewards_chosen - rewards_rejected).mean()
    accuracy = (rewards_chosen > rewards_rejected).mean()

    python tests/goldens/make_dpo.py
"""

import json
import random
from decimal import Decimal, getcontext
from pathlib import Path

getcontext().prec = 50
BATCHES, PAIRS = 20, 4


def batch(rng: random.Random) -> dict[str, object]:
    """Draw the log probabilities of some pairs of answers, and compute the loss and rewards by TRL's formulas."""
    beta = Decimal(str(rng.choice([0.01, 0.1, 0.5, 2.0])))
    names = ("chosen", "rejected", "frozen_chosen", "frozen_rejected")
    drawn = {name: [round(rng.uniform(-300, -1), 3) for _ in range(PAIRS)] for name in names}
    rows = list(zip(*([Decimal(str(x)) for x in drawn[name]] for name in names), strict=True))
    margins = [beta * ((chosen - rejected) - (own - other)) for chosen, rejected, own, other in rows]
    losses = [(1 + (-margin).exp()).ln() for margin in margins]
    return {
        "beta": float(beta),
        **drawn,
        "loss": float(sum(losses) / PAIRS),
        "margin": float(sum(margins) / PAIRS),
        "accuracy": sum(margin > 0 for margin in margins) / PAIRS,
    }


if __name__ == "__main__":
    rng = random.Random(0)
    path = Path(__file__).with_name("dpo.json")
    path.write_text(json.dumps([batch(rng) for _ in range(BATCHES)], indent=1) + "\n")
