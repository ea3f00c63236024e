"""AdamW with gradient clipping, and the schedules of its learning rate.

    cosine      falls along half a cosine to 0 at the last step
    linear      falls along a line to 0 at the last step
    constant    stays
    wsd         stays for the first 80 % of the steps, then falls along a line to 0 (warm-up, stable, decay)

The rate rises along a line from 0 during the first steps of each schedule, since AdamW's averages are poor at first.
"""

import jax
import optax

SCHEDULES = ("cosine", "linear", "constant", "wsd")
DECAYED = 0.2  # share of the steps in which wsd decays


def schedule(kind: str, *, lr: float, steps: int, warm_up: int) -> optax.Schedule:
    """Make a schedule: the learning rate of each step, counted from 0.

    >>> rates = schedule("wsd", lr=1.0, steps=12, warm_up=2)
    >>> [round(float(rates(step)), 2) for step in (0, 1, 2, 9, 10, 11, 12)]
    [0.0, 0.5, 1.0, 1.0, 1.0, 0.5, 0.0]
    """
    if kind == "cosine":
        return optax.warmup_cosine_decay_schedule(0.0, lr, warm_up, max(steps, warm_up + 1))
    falling = max(1, {"linear": steps - warm_up, "constant": 0, "wsd": round(DECAYED * (steps - warm_up))}[kind])
    end = lr if kind == "constant" else 0.0
    parts = [
        optax.linear_schedule(0.0, lr, warm_up),
        optax.constant_schedule(lr),
        optax.linear_schedule(lr, end, falling),
    ]
    return optax.join_schedules(parts, [warm_up, max(warm_up, steps - falling)])


def optimizer(
    *, lr: float, steps: int, warm_up: int, decay: float, kind: str = "cosine"
) -> optax.GradientTransformation:
    """Make AdamW with gradient clipping and the schedule `kind`. Weight decay applies only to matrices."""
    rate = schedule(kind, lr=lr, steps=steps, warm_up=warm_up)
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(rate, b1=0.9, b2=0.99, weight_decay=decay, mask=lambda t: jax.tree.map(lambda a: a.ndim > 1, t)),
    )
