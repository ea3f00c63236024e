"""Add transformers' tensors and logits to each config.json in tests/goldens/families.

    python -m tests.goldens.make_families [NAME]...

Run it in the root of the repository, in the environment of `make_logits`. To add a family, write NAME.json with only a
"config" of a small model that uses every switch of the family, and run this script. Tensors have the names and shapes
that transformers saves.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np

from tests.support.families import write_safetensors

FOLDER = Path(__file__).parent / "families"
SEQ = 24
POSITIONS = [0, 6, 7, 13, 23]  # with a window of 7, position 6 is the last that sees every token
NEW = 6  # greedy tokens


def shapes(config: dict) -> dict[str, list[int]]:
    """Return the names and shapes of the tensors that transformers saves for a model of `config`."""
    import torch  # pyright: ignore[reportMissingImports]
    from safetensors import safe_open  # pyright: ignore[reportMissingImports]
    from transformers import AutoConfig, AutoModelForCausalLM  # pyright: ignore[reportMissingImports]

    with tempfile.TemporaryDirectory() as directory:
        plain = {key: value for key, value in config.items() if key != "quantization_config"}
        (Path(directory) / "config.json").write_text(json.dumps(plain))
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory), dtype=torch.float32)
        model.save_pretrained(directory)
        with safe_open(Path(directory) / "model.safetensors", "np") as file:
            shape_by_name = {name: file.get_slice(name).get_shape() for name in sorted(file.keys())}
    return in_mxfp4(shape_by_name) if "quantization_config" in config else shape_by_name


def in_mxfp4(shapes: dict[str, list[int]]) -> dict[str, list[int]]:
    """Convert expert shapes to gpt-oss's release format: blocks of 32 codes, two per byte, and a scale per block."""
    stored = {}
    for name, shape in shapes.items():
        if name.endswith("experts.gate_up_proj") or name.endswith("experts.down_proj"):
            experts, cols, rows = shape
            stored |= {f"{name}_blocks": [experts, rows, cols // 32, 16], f"{name}_scales": [experts, rows, cols // 32]}
        else:
            stored[name] = shape
    return stored


def random_tensors(config: dict, shapes: dict[str, list[int]]) -> dict[str, np.ndarray]:
    """Draw weights with the given names and shapes, so that every part of the model affects the logits."""
    random = np.random.RandomState(0)  # NumPy keeps its streams fixed
    less_one = config["model_type"].startswith(("gemma", "nemotron"))  # these families store norm weights less 1
    tensors = {}
    for name, shape in shapes.items():
        if name.endswith(("_blocks", "_scales")):  # with exponents that give weights near 1 / 6
            low, high = (0, 256) if name.endswith("_blocks") else (122, 125)
            tensors[name] = random.randint(low, high, size=shape).astype(np.uint8)
            continue
        noise = random.standard_normal(shape)
        if "norm" in name and name.endswith(".weight"):
            values = (0 if less_one else 1) + 0.25 * noise
        elif name.endswith("bias"):
            values = 0.5 * noise
        elif "embed_tokens" in name:
            values = 0.5 * noise
        else:
            values = (2.0 if "lm_head" in name else 1.5) / np.sqrt(shape[-1]) * noise
        tensors[name] = values.astype(np.float32)
    return tensors


def write_checkpoint(directory: Path, golden: dict) -> None:
    """Write config.json and random weights for a golden file's config."""
    (directory / "config.json").write_text(json.dumps(golden["config"], indent=2))
    tensors = random_tensors(golden["config"], golden["tensors"])
    write_safetensors(directory / "model.safetensors", tensors)


def fill(golden: dict) -> None:
    """Compute all other entries of a golden file from its config."""
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    config = golden["config"]
    golden["made"] = {"torch": torch.__version__, "transformers": transformers.__version__}
    golden["tensors"] = shapes(config)
    tokens = np.random.RandomState(1).randint(golden.get("vocab", 48), size=SEQ).tolist()
    with tempfile.TemporaryDirectory() as directory:
        write_checkpoint(Path(directory), golden)
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
    assert not any(report.values()), report  # no missing, unexpected or mismatched keys
    model.eval()

    def logits(ids: list[int]) -> np.ndarray:
        with torch.no_grad():
            return model(torch.tensor([ids]), use_cache=False).logits[0].numpy()

    rows = logits(tokens)
    assert np.abs(rows[POSITIONS]).max() >= 4, f"{np.abs(rows).max()}: too small to tell one model from another"
    text = list(tokens[:8])
    for _ in range(NEW):
        last = np.sort(logits(text)[-1])
        assert last[-1] - last[-2] > 1e-3, "no clear token"
        text.append(int(np.argmax(logits(text)[-1])))
    golden["tokens"], golden["positions"], golden["greedy"] = tokens, POSITIONS, text[8:]
    golden["logits"] = [[float(np.format_float_scientific(x, unique=True)) for x in rows[at]] for at in POSITIONS]


def main() -> None:
    import torch  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(1)
    for path in sorted(FOLDER.glob("*.json")):
        if sys.argv[1:] and path.stem not in sys.argv[1:]:
            continue
        golden = json.loads(path.read_text())
        fill(golden)
        rows = ",\n".join(json.dumps(row) for row in golden.pop("logits"))
        lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in golden.items()]
        path.write_text("{\n" + ",\n".join([*lines, f'"logits": [\n{rows}]']) + "\n}\n")
        print(path.stem)


if __name__ == "__main__":
    main()
