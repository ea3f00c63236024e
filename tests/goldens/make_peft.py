"""Write two adapters by PEFT (peft_plain/, peft_rslora/), and PEFT's logits with these and our adapters (peft.json).

    FOLDER=$(mktemp -d)
    python -m tests.goldens.make_peft $FOLDER           writes a small model and our adapters into FOLDER
    pip install peft==0.21.2 transformers torch         in a separate environment
    python tests/goldens/make_peft.py $FOLDER compute   reads them with PEFT, and writes the results here

The last command does not import our package. The model is `random_checkpoint(SMALL, seed=1)`, and the logits are
computed in float64. `digests` identify the tensors of our adapters, which the test writes again.
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

IDS = [3, 1, 4, 1, 5, 9, 2, 6]
OWN = {"ours": {}, "ours with rslora": {"rslora": True}}  # fields of the adapters
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PEFTS = {
    "peft_plain": {"r": 2, "lora_alpha": 3, "target_modules": ALL},
    "peft_rslora": {"r": 4, "lora_alpha": 2, "use_rslora": True, "target_modules": ["q_proj", "v_proj"]},
}
HERE = Path(__file__).parent


def write_own(folder: Path) -> dict[str, str]:
    """Write our adapters into subfolders of `folder`. Returns a digest of each adapter's tensors."""
    from safetensors.numpy import load_file

    from llamaspec.model.checkpoints.adapter import WEIGHTS, write_adapter
    from tests.support.random_models import SMALL, random_adapter

    digests = {}
    for name, fields in OWN.items():
        (folder / name).mkdir()
        adapter = random_adapter(SMALL, seed=7, parts=("q", "k", "v", "o", "gate", "up", "down"), **fields)
        write_adapter(adapter, folder / name, SMALL, base="base")
        tensors = sorted(load_file(folder / name / WEIGHTS).items())
        digests[name] = hashlib.sha256(b"".join(key.encode() + array.tobytes() for key, array in tensors)).hexdigest()
    return digests


def compute(folder: Path) -> None:
    """Let PEFT write adapters, and compute logits with all adapters."""
    import peft  # pyright: ignore[reportMissingImports]
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    def base() -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float64)

    def logits(model: Any) -> list[list[float]]:
        with torch.no_grad():
            rows = model.eval()(torch.tensor([IDS])).logits[0]
        return [[round(value, 7) for value in row] for row in rows.tolist()]

    results: dict[str, Any] = {}
    for name in OWN:
        model = peft.PeftModel.from_pretrained(base(), folder / name)
        results[name] = {"applied": logits(model), "merged": logits(model.merge_and_unload())}
    torch.manual_seed(0)
    for name, options in PEFTS.items():
        model = peft.get_peft_model(base(), peft.LoraConfig(**options, init_lora_weights=False, task_type="CAUSAL_LM"))
        model.float()  # the adapters are saved in float32, as after most trainings
        model.peft_config["default"].base_model_name_or_path = "base"
        model.save_pretrained(HERE / name)
        (HERE / name / "README.md").unlink()
        results[name] = {"applied": logits(peft.PeftModel.from_pretrained(base(), HERE / name))}
    versions = {package.__name__: package.__version__ for package in (peft, transformers, torch)}
    digests = json.loads((folder / "digests.json").read_text())
    text = json.dumps({"versions": versions, "digests": digests, "logits": results})
    (HERE / "peft.json").write_text(text.replace("[[", "[\n[").replace("], [", "],\n[") + "\n")


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    if sys.argv[2:] == ["compute"]:
        compute(folder)
    else:
        from llamaspec.model.checkpoints.huggingface.write import write_huggingface
        from tests.support.random_models import SMALL, random_checkpoint

        write_huggingface(random_checkpoint(SMALL, seed=1), folder / "base")
        (folder / "digests.json").write_text(json.dumps(write_own(folder)))
