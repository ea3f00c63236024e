"""Write packed_files.json: matrices as autoawq, auto-round, optimum-quanto and compressed-tensors store them.

    python -m tests.goldens.quantizers.make_packed_files

Run it in the root of the repository, in a separate environment (Python 3.11):

    pip install torch transformers optimum-quanto compressed-tensors datasets py-cpuinfo
    pip install --no-deps auto-round autoawq

Tensors are in base64. For the float32 weights that a library reads back, we store the SHA-256; scales are converted to
float32 first, so that each weight is rounded only once. Only CUDA kernels read autoawq's layouts gemv and gemv_fast, so
for these layouts we compute (code - zero point) * scale by autoawq's formula for pseudo-quantized weights.
"""

import base64
import hashlib
import json
import platform
import re
import sys
from importlib import metadata, util
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from tests.goldens.quantizers.weights import Weights

COMMAND = "python -m tests.goldens.quantizers.make_packed_files"
WEIGHTS, SHAPE = Weights("student", seed=25), (32, 128)
AUTO_ROUND = {"quant_method": "auto-round", "data_type": "int", "group_size": 32}


def stored(tensors: dict[str, Any]) -> dict[str, Any]:
    """Encode torch tensors as values for JSON."""
    import torch  # pyright: ignore[reportMissingImports]

    encoded = {}
    for name, tensor in tensors.items():
        view = {torch.bfloat16: torch.int16, torch.float8_e4m3fn: torch.uint8}.get(tensor.dtype, tensor.dtype)
        array = tensor.detach().contiguous().view(view).numpy()
        data = base64.b64encode(array.astype(array.dtype.newbyteorder("<")).tobytes()).decode()
        encoded[name] = {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape), "data": data}
    return encoded


def case(config: dict[str, Any], tensors: dict[str, Any], read: Any) -> dict[str, Any]:
    sha = hashlib.sha256(np.asarray(read).astype("<f4").tobytes()).hexdigest()
    return {"config": config, "tensors": stored(tensors), "read": sha}


def linear(dtype: str = "float32") -> Any:
    """Make torch's linear layer with the weights `WEIGHTS`."""
    import torch  # pyright: ignore[reportMissingImports]

    layer = torch.nn.Linear(SHAPE[1], SHAPE[0], bias=False)
    layer.weight.data = torch.from_numpy(WEIGHTS(*SHAPE))
    return layer.to(getattr(torch, dtype))


def grid(group: int, *, bits: int, symmetric: bool = False) -> tuple[Any, Any]:
    """Return scales in float16 and zero points, [rows, groups]."""
    import torch  # pyright: ignore[reportMissingImports]

    w, last = torch.from_numpy(WEIGHTS(*SHAPE)).reshape(SHAPE[0], -1, group), 2**bits - 1
    low, high = w.amin(-1).clamp(max=0), w.amax(-1).clamp(min=0)
    if symmetric:
        scales = (torch.maximum(-low, high) * 2 / last).half()
        return scales, torch.full_like(scales, 2 ** (bits - 1))
    scales = ((high - low) / last).half()
    return scales, torch.round(-low / scales).clamp(0, last)


def autoawq() -> dict[str, Any]:
    """Pack codes with autoawq's layer classes, without importing the package's other modules."""
    found = util.find_spec("awq")
    assert found and found.submodule_search_locations
    root = Path(next(iter(found.submodule_search_locations)))
    for name in ("awq", "awq.modules", "awq.modules.linear", "awq.utils"):
        module = ModuleType(name)
        module.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = module
    from awq.modules.linear.gemv import WQLinear_GEMV  # pyright: ignore[reportMissingImports]
    from awq.modules.linear.gemv_fast import WQLinear_GEMVFast  # pyright: ignore[reportMissingImports]

    cases = {}
    for version, kind in {"gemv": WQLinear_GEMV, "gemv_fast": WQLinear_GEMVFast}.items():
        for group in (32, 64, 128):
            scales, zeros = grid(group, bits=4)
            w, wide = linear(), scales.float().repeat_interleave(group, 1)
            offsets = zeros.repeat_interleave(group, 1) * scales.repeat_interleave(group, 1)  # as in from_linear
            codes = (w.weight.data + offsets).div(scales.repeat_interleave(group, 1)).round().clamp(0, 15)
            w.weight.data = (codes - zeros.repeat_interleave(group, 1)) * wide  # so that from_linear clips nothing
            packed = kind.from_linear(w, 4, group, False, scales, zeros)
            minima = -(scales * zeros).half().float() if version == "gemv_fast" else None
            read = w.weight.data if minima is None else codes.double() * wide + minima.repeat_interleave(group, 1)
            config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": version, "zero_point": True}
            tensors = {name: getattr(packed, name) for name in ("qweight", "qzeros", "scales")}
            cases[f"awq, {version}, groups of {group}"] = case(config, tensors, read.detach().float().numpy())
    return cases


def auto_round() -> dict[str, Any]:
    import torch  # pyright: ignore[reportMissingImports]
    from auto_round.export.export_to_autoround.export import (  # pyright: ignore[reportMissingImports]
        dynamic_import_quant_linear_for_packing,
    )

    cases = {}
    for packing in ("auto_round:auto_gptq", "auto_round:exllamav2", "auto_round:gptqmodel"):
        kinds = ((4, True), (4, False), (2, False), (3, False), (8, False))
        for bits, symmetric in kinds if packing != "auto_round:gptqmodel" else kinds[:1]:
            scales, zeros = grid(32, bits=bits, symmetric=symmetric)
            zeros = zeros.clamp(min=1)  # version 1 cannot store 0
            kind = dynamic_import_quant_linear_for_packing(packing, bits, 32, symmetric)
            layer = kind(bits, 32, SHAPE[1], SHAPE[0], False)
            layer.device = torch.device("cpu")
            layer.pack(linear(), scales, zeros.clone(), None, device="cpu")
            tensors = {name: getattr(layer, name) for name in ("qweight", "qzeros", "scales")}
            tensors |= {"g_idx": layer.g_idx} if hasattr(layer, "g_idx") else {}
            encoded = {name: tensor.clone() for name, tensor in tensors.items()}
            layer.scales = layer.scales.float()
            read = layer(torch.eye(SHAPE[1])).T.contiguous()
            config = {**AUTO_ROUND, "packing_format": packing, "bits": bits, "sym": symmetric}
            name = f"auto-round, {packing.partition(':')[2]}, {bits} bits{', symmetric' if symmetric else ''}"
            cases[name] = case(config, encoded, read.detach().numpy())
    return cases


def quanto() -> dict[str, Any]:
    import torch  # pyright: ignore[reportMissingImports]
    from optimum.quanto import freeze, quantization_map, quantize  # pyright: ignore[reportMissingImports]
    from optimum.quanto.tensor import WeightQBitsTensor, WeightQBytesTensor  # pyright: ignore[reportMissingImports]

    cases = {}
    for kind in ("qint8", "qfloat8", "qint4", "qint2"):
        model = torch.nn.ModuleDict({"m": linear("float16")})
        quantize(model, weights=kind)
        freeze(model)
        tensors = {name.removeprefix("m."): tensor for name, tensor in model.state_dict().items()}
        w = model["m"].weight
        if isinstance(w, WeightQBytesTensor):
            read = w._data.float() * w._scale.float()
        else:
            wide = (w._scale.float(), w._shift.float())
            read = WeightQBitsTensor(w.qtype, 0, w._group_size, w.size(), w.stride(), w._data, *wide).dequantize()
        config = {"quant_method": "quanto", **quantization_map(model)}
        cases[f"quanto, {kind}"] = case(config, tensors, read.detach().numpy())
    return cases


def compressed_tensors() -> dict[str, Any]:
    import torch  # pyright: ignore[reportMissingImports]
    from compressed_tensors.compressors import BaseCompressor  # pyright: ignore[reportMissingImports]
    from compressed_tensors.compressors.nvfp4.helpers import (  # pyright: ignore[reportMissingImports]
        unpack_fp4_from_uint8,
    )
    from compressed_tensors.quantization import (  # pyright: ignore[reportMissingImports]
        QuantizationArgs,
        QuantizationScheme,
    )
    from compressed_tensors.quantization.lifecycle.forward import dequantize  # pyright: ignore[reportMissingImports]
    from compressed_tensors.quantization.utils import calculate_qparams  # pyright: ignore[reportMissingImports]

    cases = {}
    settings: dict[str, dict[str, Any]] = {
        "nvfp4-pack-quantized": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
        "mxfp4-pack-quantized": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32},
        "mxfp8-quantized": {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32},
    }
    for form, weights in settings.items():
        args = QuantizationArgs(**weights, **({"scale_dtype": torch.uint8} if form.startswith("mx") else {}))
        group, w = weights["group_size"], linear().weight.data
        blocks = w.reshape(SHAPE[0], -1, group)
        whole = {"global_scale": (448 * 6 / w.abs().max()).reshape(1)} if form.startswith("nv") else {}
        scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), args, **whole)
        scheme = QuantizationScheme(targets=["Linear"], weights=args)
        state = {"weight": w, "weight_scale": scale} | {f"weight_{name}": value for name, value in whole.items()}
        compressor = BaseCompressor.get_value_from_registry(form)
        packed = compressor.compress(dict(state), scheme)
        if whole:  # decompress() rounds to bfloat16
            codes = unpack_fp4_from_uint8(packed["weight_packed"], *SHAPE, dtype=torch.float32)
            read = dequantize(codes, packed["weight_scale"].float(), args=args, dtype=torch.float32, **whole)
            read = read + 0  # we read the code of -0 as 0
        else:
            read = compressor.decompress(dict(packed), scheme)["weight"].float()
        group_config = {"targets": ["Linear"], "weights": json.loads(args.model_dump_json())}
        config = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group_config}}
        cases[f"compressed-tensors, {form}"] = case(config, packed, read.detach().numpy())
    return cases


def main() -> None:
    import torch  # pyright: ignore[reportMissingImports]

    torch.manual_seed(0)
    packages = ("torch", "autoawq", "auto-round", "optimum-quanto", "compressed-tensors")
    versions = {"command": COMMAND, "python": platform.python_version(), "numpy": np.__version__}
    versions |= {package: metadata.version(package) for package in packages}
    cases = autoawq() | auto_round() | quanto() | compressed_tensors()
    goldens = {"made": versions, "shape": SHAPE, "cases": cases}
    lines = re.sub(r"\[[^\[\]{}]*\]", lambda numbers: " ".join(numbers[0].split()), json.dumps(goldens, indent=1))
    (Path(__file__).parent / "packed_files.json").write_text(lines + "\n")


if __name__ == "__main__":
    main()
