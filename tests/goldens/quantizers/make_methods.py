"""Write methods.json: the results of each method's own tools on small matrices.

    python -m tests.goldens.quantizers.make_methods

Run it in the root of the repository, in a separate environment (Python 3.11):

    pip install torch torchao transformers compressed-tensors scikit-learn accelerate datasets termcolor
    pip install --no-deps autoawq llmcompressor hqq auto-gptq

From the last four packages we use only functions on tensors. These functions also work with newer dependencies than the
packages declare, so we install the packages without their dependencies.
"""

import importlib.util
import json
import platform
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from tests.goldens.quantizers.weights import Weights

COMMAND = "python -m tests.goldens.quantizers.make_methods"
PACKAGES = (
    *("torch", "torchao", "transformers", "compressed-tensors", "scikit-learn"),
    *("autoawq", "llmcompressor", "hqq", "auto-gptq"),
)

W = Weights("normal", seed=20)
STUDENT = Weights("student", seed=21)
TOKENS = Weights("normal", seed=22)
MIXING = Weights("normal", seed=23)


def inputs(tokens: int, cols: int) -> np.ndarray:
    """Draw correlated inputs with some larger features, as activations have."""
    mixed = TOKENS(tokens, cols) @ MIXING(cols, cols) / np.float32(np.sqrt(cols))
    return (mixed * np.exp2(np.arange(cols) % 5 - 2)).astype(np.float32)


def compressed_tensors() -> dict[str, Any]:
    """Quantize and pack with compressed-tensors: int4 and int8, per group and per channel, symmetric and asymmetric."""
    import torch  # pyright: ignore[reportMissingImports]
    from compressed_tensors.compressors.pack_quantized.helpers import (  # pyright: ignore[reportMissingImports]
        pack_to_int32,
    )
    from compressed_tensors.quantization import QuantizationArgs  # pyright: ignore[reportMissingImports]
    from compressed_tensors.quantization.lifecycle.forward import quantize  # pyright: ignore[reportMissingImports]

    from llamaspec.reference.quantizers import affine, symmetric  # only for scales and zero points

    w = STUDENT(2, 64)
    cases = []
    for bits in (4, 8):
        for strategy, group in (("group", 32), ("channel", 64)):
            for even in (True, False):
                grid: Any = (symmetric if even else affine).quantize(w, bits=bits, block=(1, group))
                zeros = np.zeros(grid.scales.shape) if even else grid.zeros.astype(np.int16) - 2 ** (bits - 1)
                args = QuantizationArgs(
                    num_bits=bits, strategy=strategy, group_size=group if strategy == "group" else None, symmetric=even
                )
                scale, zero = torch.from_numpy(grid.scales), torch.from_numpy(zeros.astype(np.int8))
                codes = quantize(torch.from_numpy(w), scale, zero, args, dtype=torch.int8)
                cases.append(
                    {
                        "bits": bits,
                        "group": group,
                        "symmetric": even,
                        "codes": codes.tolist(),
                        "packed": pack_to_int32(codes, bits).tolist(),
                    }
                )
    return {"shape": [2, 64], "cases": cases}


def fake_quantize() -> dict[str, Any]:
    """Run PyTorch's fake quantization, forward and backward.

    The scales are powers of two, so that w / s and w (1 / s) are equal.
    """
    import torch  # pyright: ignore[reportMissingImports]

    x = torch.from_numpy(W(3, 16)).requires_grad_()
    edges = torch.tensor([-128.5, -128.4, 127.4, 127.5, 127.6, 0.5, 1.5, -0.5]) / 16
    cases = []
    for values, scale, zero in ((x, 0.125, 0), (x, 0.0625, 3), (edges.requires_grad_(), 0.0625, 0)):
        y = torch.fake_quantize_per_tensor_affine(values, scale, zero, -128, 127)
        (gradient,) = torch.autograd.grad(y.sum(), values)
        cases.append(
            {
                "x": values.tolist(),
                "scale": scale,
                "zero": zero,
                "y": y.tolist(),
                "passes": gradient.bool().tolist(),
            }
        )
    return {"cases": cases}


def smoothquant() -> dict[str, Any]:
    import torch  # pyright: ignore[reportMissingImports]
    from torchao.prototype.smoothquant.core import SmoothQuantObserver  # pyright: ignore[reportMissingImports]

    factors = {}
    for alpha in (0.25, 0.5, 0.75):
        observer = SmoothQuantObserver(torch.from_numpy(W(4, 16)), alpha=alpha)
        observer(torch.from_numpy(inputs(8, 16)))
        factors[str(alpha)] = observer.calculate_qparams()[0].tolist()
    return {"rows": 4, "cols": 16, "tokens": 8, "factors": factors}


def awq() -> dict[str, Any]:
    """Quantize with autoawq's rounding, and unpack the words of an AWQ checkpoint.

    `make_awq_search` covers the search.
    """
    import torch  # pyright: ignore[reportMissingImports]
    from awq.quantize.quantizer import AwqQuantizer  # pyright: ignore[reportMissingImports]
    from awq.utils.packing_utils import dequantize_gemm  # pyright: ignore[reportMissingImports]

    class Settings:
        group_size, zero_point, w_bit = 16, True, 4

    w = W(8, 32)
    rounded, scales, zeros = AwqQuantizer.pseudo_quantize_tensor(Settings(), torch.from_numpy(w))  # type: ignore[arg-type]
    random = np.random.RandomState(0)
    words = {
        "qweight": random.randint(-(2**31), 2**31, (32, 1)).astype(np.int32),
        "qzeros": random.randint(-(2**31), 2**31, (2, 1)).astype(np.int32),
        "scales": (random.randint(1, 100, (2, 8)) / 64).astype(np.float16),
    }
    tensors = {name: torch.from_numpy(array) for name, array in words.items()}
    read = dequantize_gemm(tensors["qweight"], tensors["qzeros"], tensors["scales"], 4, 16)
    return {
        "shape": [8, 32],
        "group": 16,
        "rounded": rounded.tolist(),
        "scales": scales.tolist(),
        "zeros": zeros.tolist(),
        "words": {name: array.tolist() for name, array in words.items()},
        "read": read.tolist(),
    }


def gptq() -> dict[str, Any]:
    import torch  # pyright: ignore[reportMissingImports]
    from compressed_tensors.quantization import QuantizationArgs  # pyright: ignore[reportMissingImports]
    from llmcompressor.modifiers.gptq.gptq_quantize import quantize_weight  # pyright: ignore[reportMissingImports]

    from llamaspec.reference.quantizers import affine  # only for scales and zero points

    rows, cols, tokens = 4, 32, 64
    w, x = W(rows, cols), inputs(tokens, cols)
    cases = []
    for bits, group in ((4, 32), (4, 16), (3, 32), (8, 32)):
        grid = affine.quantize(w, bits=bits, block=(1, group))
        args = QuantizationArgs(num_bits=bits, strategy="group", group_size=group, symmetric=False)
        zeros = grid.zeros.astype(np.int16) - 2 ** (bits - 1)
        weights, _, failed = quantize_weight(
            torch.from_numpy(w.copy())[None],  # a copy, since the function changes it
            torch.from_numpy(x.T @ x)[None],
            torch.from_numpy(grid.scales)[None],
            torch.from_numpy(zeros.astype(np.int8))[None],
            None,
            args,
        )
        assert not failed.any()
        cases.append({"bits": bits, "group": group, "weights": weights[0].tolist()})
    return {"rows": rows, "cols": cols, "tokens": tokens, "cases": cases}


def gptq_words() -> dict[str, Any]:
    """Pack codes from RandomState(bits) as a version 1 GPTQ checkpoint.

    No zero point is 0: auto-gptq subtracts 1, and -1 would overflow into the neighboring fields.
    """
    import torch  # pyright: ignore[reportMissingImports]

    # We load the file by path, because its package imports names that transformers 5 no longer has.
    package = importlib.util.find_spec("auto_gptq")
    assert package and package.submodule_search_locations
    path = Path(package.submodule_search_locations[0]) / "nn_modules" / "qlinear" / "qlinear_cuda_old.py"
    spec = importlib.util.spec_from_file_location("qlinear_cuda_old", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    rows, cols, group = 32, 32, 16
    cases = []
    for bits in (2, 3, 4, 8):
        random = np.random.RandomState(bits)
        codes = random.randint(0, 2**bits, (rows, cols))
        zeros = random.randint(1, 2**bits, (rows, cols // group)).astype(np.float32)
        scales = np.exp2(random.randint(-4, 4, zeros.shape)).astype(np.float32)
        layer = torch.nn.Linear(cols, rows, bias=False)
        weight = np.repeat(scales, group, axis=1) * (codes - np.repeat(zeros, group, axis=1))
        layer.weight.data = torch.from_numpy(weight.astype(np.float32))
        packed = module.QuantLinear(bits, group, cols, rows, False, weight_dtype=torch.float32)
        packed.pack(layer, torch.from_numpy(scales), torch.from_numpy(zeros.copy()), None)
        words = {name: getattr(packed, name).tolist() for name in ("qweight", "qzeros", "scales", "g_idx")}
        cases.append({"bits": bits, **words})
    return {"rows": rows, "cols": cols, "group": group, "cases": cases}


def hqq() -> dict[str, Any]:
    """Run one step of hqq's optimization, and all of its steps.

    For all steps we store only the final sum of errors, because hqq decides for all groups at once when to stop.
    """
    import torch  # pyright: ignore[reportMissingImports]
    from hqq.core import optimize as hqq_steps  # pyright: ignore[reportMissingImports]
    from hqq.core.quantize import Quantizer  # pyright: ignore[reportMissingImports]

    w = STUDENT(16, 128)
    sums = {}
    for name, optimize in (("plain", False), ("fitted", True)):
        q, meta = Quantizer.quantize(
            torch.from_numpy(w), nbits=4, group_size=64, axis=1, device="cpu", optimize=optimize, bitpack=False
        )
        read = (q.float() - meta["zero"].float()) * meta["scale"].float()
        sums[name] = float(np.sum(np.abs(w - read.reshape(w.shape).numpy()) ** 0.7))
    # With few bits and large weights, errors are large enough for the shrinkage to remove some.
    groups = torch.from_numpy(4 * W(4, 64))
    low, high = (a[0] for a in (groups.min(dim=1, keepdim=True), groups.max(dim=1, keepdim=True)))
    inverse = 3 / (high - low)
    step = hqq_steps.optimize_weights_proximal_legacy_step
    _, _, zeros, _ = step(groups, inverse, -low * inverse, [0, 3], 10.0, 0.7, 1)
    return {"shape": [16, 128], "bits": 4, "group": 64, **sums, "zeros": zeros[:, 0].tolist()}


def kmeans() -> dict[str, Any]:
    from sklearn.cluster import KMeans  # pyright: ignore[reportMissingImports]

    row = W(1, 200)[0].astype(np.float64)
    cases = []
    for bits in (1, 2, 4):
        k = 1 << bits
        start = np.sort(row)[np.searchsorted(np.arange(1, 201) / 200, (np.arange(k) + 0.5) / k)]
        fit = KMeans(k, init=start[:, None], n_init=1, tol=0, max_iter=10_000).fit(row[:, None])
        cases.append({"bits": bits, "levels": np.sort(fit.cluster_centers_[:, 0]).tolist(), "inertia": fit.inertia_})
    return {"cols": 200, "cases": cases}


def bitnet() -> dict[str, Any]:
    import torch  # pyright: ignore[reportMissingImports]
    from transformers.integrations.bitnet import (  # pyright: ignore[reportMissingImports]
        ActQuant,
        WeightQuant,
        pack_weights,
    )

    torch.compiler.set_stance("force_eager")
    w, x = STUDENT(8, 16), inputs(3, 16)
    codes = np.random.RandomState(1).randint(-1, 2, (8, 6))
    return {
        "weights": WeightQuant.apply(torch.from_numpy(w)).tolist(),
        "tokens": ActQuant.apply(torch.from_numpy(x)).tolist(),
        "codes": codes.tolist(),
        "packed": pack_weights(torch.from_numpy(codes.copy())).tolist(),
    }


def main() -> None:
    makers: list[Callable[[], dict[str, Any]]] = [
        compressed_tensors, fake_quantize, smoothquant, awq, gptq, gptq_words, hqq, kmeans, bitnet,
    ]  # fmt: skip
    versions = {"command": COMMAND, "python": platform.python_version(), "numpy": np.__version__}
    versions |= {package: metadata.version(package) for package in PACKAGES}
    goldens = {"made": versions} | {maker.__name__: maker() for maker in makers}
    text = ",\n".join(f"{json.dumps(name)}: {json.dumps(shortened(value))}" for name, value in goldens.items())
    (Path(__file__).parent / "methods.json").write_text("{" + text + "}\n")


def shortened(value: Any) -> Any:
    """Round-trip float32 numbers through the shortest decimal strings that identify them."""
    if isinstance(value, dict):
        return {key: shortened(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shortened(item) for item in value]
    if isinstance(value, float) and value == float(np.float32(value)):
        return float(np.format_float_scientific(np.float32(value), unique=True))
    return value


if __name__ == "__main__":
    main()
