"""AdamW with gradient clipping."""

import jax
import optax


def optimizer(*, lr: float, steps: int, warm_up: int, decay: float) -> optax.GradientTransformation:
    """Make AdamW with gradient clipping. Weight decay applies only to matrices.

    The learning rate rises to `lr` during the first `warm_up` steps, and then falls along a cosine to 0 at `steps`.
    """
    rate = optax.warmup_cosine_decay_schedule(0.0, lr, warm_up, max(steps, warm_up + 1))
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(rate, b1=0.9, b2=0.99, weight_decay=decay, mask=lambda t: jax.tree.map(lambda a: a.ndim > 1, t)),
    )
