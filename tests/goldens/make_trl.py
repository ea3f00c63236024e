"""Write trl.json: losses and gradients of TRL's DPOTrainer and GRPOTrainer for 20 drawn batches each.

    pip install trl==1.16.0        (in a separate environment, with torch)
    python tests/goldens/make_trl.py

We call the trainers' own `_compute_loss` with stand-ins for the model and for the trainer's state. The stand-in for the
model returns drawn log-probabilities of tokens. TRL computes the advantages of GRPO within a long method that also
generates answers, so this script repeats the three lines that compute them (`scale_rewards="none"`).
"""

import json
import random
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

BATCHES, PAIRS, GROUPS, GROUP, TOKENS = 20, 3, 2, 4, 5


def drawn(rng: random.Random, rows: int) -> list[list[float]]:
    """Draw log-probabilities of the tokens of some answers."""
    return [[round(rng.uniform(-6, -0.01), 3) for _ in range(TOKENS)] for _ in range(rows)]


def counted(rng: random.Random, rows: int) -> list[list[int]]:
    """Draw how many of the first tokens count; the others are padding."""
    return [[int(at < length) for at in range(TOKENS)] for length in rng.choices(range(1, TOKENS + 1), k=rows)]


def rounded(gradient: Any) -> list[list[float]]:
    """Round the numbers of a torch tensor, so that the file stays small."""
    return [[round(slope, 9) + 0.0 for slope in row] for row in gradient.tolist()]


def state(**fields: object) -> SimpleNamespace:
    """Make an object in place of a trainer, for one process and one batch per step."""
    accelerator = SimpleNamespace(
        device="cpu", num_processes=1, gather=lambda x: x, gather_for_metrics=lambda x: x, reduce=lambda x, reduction: x
    )
    return SimpleNamespace(
        accelerator=accelerator, model=SimpleNamespace(training=True), _metrics=defaultdict(lambda: defaultdict(list)),
        aux_loss_enabled=False, _total_train_tokens=0, _tp_size=1, current_gradient_accumulation_steps=1, **fields,
    )  # fmt: skip


def preference(rng: random.Random) -> dict[str, object]:
    """Draw some pairs of answers, and compute DPO's loss, its gradient and the reported values."""
    import torch  # pyright: ignore[reportMissingImports]
    from trl import DPOTrainer  # pyright: ignore[reportMissingImports]

    beta = rng.choice([0.01, 0.1, 0.5, 2.0])
    logps, mask = drawn(rng, 2 * PAIRS), counted(rng, 2 * PAIRS)
    frozen = [[round(rng.uniform(-20, -1), 3) for _ in range(PAIRS)] for _ in range(2)]
    leaf = torch.tensor(logps, dtype=torch.float64, requires_grad=True)
    of_answers = torch.tensor(mask)
    masked = leaf * of_answers  # a token outside the answer has the label -100, and so a log-probability of 0
    zeros = torch.zeros_like(masked)
    outputs = SimpleNamespace(log_probs=masked, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())
    trainer = state(
        beta=beta, ld_alpha=None, precompute_ref_logps=True, f_divergence_type="reverse_kl", loss_types=["sigmoid"],
        loss_weights=[1.0], use_weighting=False,
    )  # fmt: skip
    prompt = torch.zeros(2 * PAIRS, 1, dtype=torch.long)  # one token of prompt before each answer
    inputs = {
        "input_ids": torch.cat([prompt, of_answers], 1), "attention_mask": torch.ones(2 * PAIRS, TOKENS + 1),
        "completion_mask": torch.cat([prompt, of_answers], 1),
        "ref_chosen_logps": torch.tensor(frozen[0], dtype=torch.float64),
        "ref_rejected_logps": torch.tensor(frozen[1], dtype=torch.float64),
    }  # fmt: skip
    loss = DPOTrainer._compute_loss(trainer, lambda **_: outputs, inputs, False)
    loss.backward()
    reported = {name: trainer._metrics["train"][f"rewards/{name}"][0] for name in ("margins", "accuracies")}
    numbers = {"beta": beta, "logps": logps, "counted": mask, "frozen": frozen}
    return numbers | {"loss": loss.item(), "slopes": rounded(leaf.grad), **reported}


def rewards(rng: random.Random) -> dict[str, object]:
    """Draw groups of answers with rewards, and compute the gradient of GRPO's loss without its KL term.

    The loss is `dr_grpo`, which divides by the number of answers times `max_completion_length`; here this product is 1.
    """
    import torch  # pyright: ignore[reportMissingImports]
    from trl import GRPOTrainer  # pyright: ignore[reportMissingImports]

    rows = GROUPS * GROUP
    logps, mask = drawn(rng, rows), counted(rng, rows)
    own = [rng.choice([0.0, 1.0, round(rng.uniform(-2, 2), 2)]) for _ in range(rows)]
    leaf = torch.tensor(logps, dtype=torch.float64, requires_grad=True)
    values = torch.tensor(own, dtype=torch.float64)
    mean_grouped_rewards = values.view(-1, GROUP).mean(dim=1).repeat_interleave(GROUP)
    trainer = state(
        beta=0.0, top_entropy_quantile=1.0, off_policy_mask_threshold=None, importance_sampling_level="token",
        loss_type="dr_grpo", epsilon_low=0.2, epsilon_high=0.2, args=SimpleNamespace(delta=None), use_vllm=False,
        max_completion_length=1 / rows, _entropy_bonus_enabled=False,
        _get_per_token_logps_and_entropies=lambda *_, **__: (leaf, torch.zeros_like(leaf), None),
    )  # fmt: skip
    ids = torch.zeros(rows, TOKENS, dtype=torch.long)
    inputs = {
        "prompt_ids": ids, "prompt_mask": ids, "completion_ids": ids, "completion_mask": torch.tensor(mask),
        "advantages": values - mean_grouped_rewards,
    }  # fmt: skip
    GRPOTrainer._compute_loss(trainer, None, inputs).backward()
    return {"logps": logps, "counted": mask, "rewards": own, "group": GROUP, "slopes": rounded(leaf.grad)}


if __name__ == "__main__":
    import torch  # pyright: ignore[reportMissingImports]
    import trl  # pyright: ignore[reportMissingImports]

    rng = random.Random(0)
    versions = {package.__name__: package.__version__ for package in (trl, torch)}
    dpo = [preference(rng) for _ in range(BATCHES)]
    grpo = [rewards(rng) for _ in range(BATCHES)]
    text = json.dumps({"versions": versions, "dpo": dpo, "grpo": grpo}).replace("}, {", "},\n{")
    Path(__file__).with_name("trl.json").write_text(text + "\n")
