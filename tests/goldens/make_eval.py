"""Write eval.json: transformers' losses of stories260K on a text, and divergences computed by torch.

Run it from the root of the repository, with LLAMASPEC_DATA set. In the project's environment,

    python -m tests.goldens.make_eval write FOLDER

writes the model twice: unchanged, and with the weights that `q4` decodes to. In a separate environment,

    pip install torch transformers safetensors
    python tests/goldens/make_eval.py read FOLDER

evaluates both models with transformers, with the sliding window shown in transformers' documentation. A loss is the
mean over the labels that are not -100, without the first label of each row.
"""

import json
import os
import platform
import sys
from pathlib import Path

TEXT = """\
Once upon a time, there was a little girl named Lily. She had a red ball that she liked very much. One day, the ball \
rolled into the pond. "Oh no!" said Lily. A big green frog looked at her and said, "Do not be sad. I can swim." The \
frog jumped into the water and pushed the ball back to the grass.
Lily was so happy that she gave the frog a piece of her cake. From that day on, they played together every morning, \
and when it rained, they sat under the old tree and told each other stories.
"""
WINDOWS = [(512, 256), (64, 32), (64, 1), (50, 49)]  # context and stride
MODELS = {"model": None, "q4": "q4"}


def write(folder: Path) -> None:
    from llamaspec.model.checkpoints.codes import quantized
    from llamaspec.model.checkpoints.huggingface.write import write_huggingface
    from llamaspec.model.checkpoints.open import open_checkpoint
    from llamaspec.model.insight.evaluation_by_tensor import decoded
    from llamaspec.model.tokenizers.load import load_tokenizer
    from llamaspec.model.tokenizers.tokenizer import encode_text

    folder.mkdir(parents=True)
    place = Path(os.environ["LLAMASPEC_DATA"]) / "stories260K"
    checkpoint = open_checkpoint(place / "stories260K.bin")
    for name, scheme in MODELS.items():
        write_huggingface(decoded(quantized(checkpoint, scheme) if scheme else checkpoint), folder / name)
    ids = encode_text(load_tokenizer(place / "tok512.model"), TEXT)
    (folder / "ids.json").write_text(json.dumps(ids))


def read(folder: Path) -> None:
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(1)
    ids = torch.tensor([json.loads((folder / "ids.json").read_text())])
    models = {
        name: transformers.AutoModelForCausalLM.from_pretrained(
            folder / name, dtype=torch.float32, attn_implementation="eager"
        )
        for name in MODELS
    }

    def loss(name: str, context: int, stride: int) -> float:
        total, counted, previous = 0.0, 0, 0
        for begin in range(0, ids.shape[1], stride):
            end = min(begin + context, ids.shape[1])
            labels = ids[:, begin:end].clone()
            labels[:, : previous - begin] = -100
            count = int((labels[:, 1:] != -100).sum())
            with torch.no_grad():
                total += count * float(models[name](ids[:, begin:end], labels=labels, use_cache=False).loss)
            counted, previous = counted + count, end
            if end == ids.shape[1]:
                break
        assert counted == ids.shape[1] - 1
        return total / counted

    with torch.no_grad():
        logits = {name: model(ids, use_cache=False).logits[0, :-1].double() for name, model in models.items()}
    p, q = (logits[name].log_softmax(-1) for name in ("model", "q4"))
    divergences = torch.nn.functional.kl_div(q, p, log_target=True, reduction="none").sum(-1)
    golden = {
        "made": {
            "command": "python tests/goldens/make_eval.py",
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "text": TEXT,
        "ids": ids[0].tolist(),
        "largest_logit": max(float(rows.abs().max()) for rows in logits.values()),
        "losses": [
            {"context": context, "stride": stride, **{name: loss(name, context, stride) for name in MODELS}}
            for context, stride in WINDOWS
        ],
        "divergence": {
            "mean": float(divergences.mean()),
            "median": float(divergences.quantile(0.5)),
            "p99": float(divergences.quantile(0.99)),
            "most": float(divergences.max()),
            "same_top": float((p.argmax(-1) == q.argmax(-1)).double().mean()),
        },
    }
    text = json.dumps(golden).replace(', "', ',\n"').replace("}, {", "},\n{")
    (Path(__file__).parent / "eval.json").write_text(text + "\n")


if __name__ == "__main__":
    {"write": write, "read": read}[sys.argv[1]](Path(sys.argv[2]))
