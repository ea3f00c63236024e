"""`verify kernelbench FILE` recognizes the op and judges ModelNew. NumPy stands in for torch, which is optional."""

import click
import pytest

from llamaspec.cli import llamaspec

HEAD = "import numpy as np\n\n\ndef get_init_inputs():\n    return []\n\n\n"
PRODUCT = """
def get_inputs():
    return [np.ones((4, 4), np.float32), np.ones((4, 4), np.float32)]


class Model:
    def forward(self, A, B):
        return A @ B


class ModelNew(Model):
    def forward(self, A, B):
        return (A.astype(np.float16) @ B.astype(np.float16)).astype(A.dtype)
"""
NORM = """
def get_inputs():
    return [np.ones((2, 3, 4, 4), np.float32)]


class Model:
    def __init__(self, features, eps=1e-5):
        self.eps = np.float32(eps)

    def forward(self, x):
        return x / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + self.eps)


class ModelNew(Model):
    pass
"""
ATTENTION = """
def get_inputs():
    return [np.ones((1, 2, 3, 4), np.float32)] * 3


class Model:
    def forward(self, q, k, v):
        s = q @ np.swapaxes(k, -1, -2) / np.sqrt(np.float32(q.shape[-1]))
        e = np.exp(s - s.max(axis=-1, keepdims=True))
        return e / e.sum(axis=-1, keepdims=True) @ v


class ModelNew(Model):
    pass
"""
SINE = """
def get_inputs():
    return [np.ones((4, 4, 4, 4, 4), np.float32)]


class Model:
    def forward(self, x):
        return np.sin(x)
"""
FEW = ("--arrays", "numpy", "--examples", "20", "--seed", "1")


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def run(source: str, *arguments: str, status: int = 0):
        (tmp_path / "problem.py").write_text(HEAD + source)
        try:
            llamaspec.main(["verify", "kernelbench", "problem.py", *FEW, *arguments], standalone_mode=False)
            ended = 0
        except SystemExit as error:
            ended = error.code
        assert ended == status
        return capsys.readouterr()

    return run


def test_a_product_in_float16_is_found_out(run):
    result = run(PRODUCT, status=1)
    assert result.err.startswith("problem.py: Model computes gemm\n")
    first, *_, last = result.out.splitlines()
    assert first.startswith("violated      gemm float32  kernelbench:product:problem.py:ModelNew")
    with pytest.raises(SystemExit):
        llamaspec.main([*last.split()[1:]], standalone_mode=False)


@pytest.mark.sampled(1)  # 1 and 7 s
@pytest.mark.parametrize(("source", "op"), [(NORM, "rmsnorm"), (ATTENTION, "attention")])
def test_a_right_one_is_within_bounds(run, source, op):
    """A right ModelNew is within bounds, for example a norm without a weight, or attention without a mask."""
    result = run(source)
    assert result.err.startswith(f"problem.py: Model computes {op}\n")
    assert result.out.startswith(f"within bounds {op} float32  kernelbench:")


def test_a_row_of_minus_infinity_is_a_convention(run):
    """A softmax that gives NaN for a row of only -inf, as torch's softmax does, is recognized as softmax."""
    source = """
def get_inputs():
    return [np.ones((4, 4), np.float32)]


class Model:
    def forward(self, x):
        e = np.exp(x - x.max(axis=1, keepdims=True))
        return e / e.sum(axis=1, keepdims=True)


class ModelNew(Model):
    def forward(self, x):
        return super().forward(x)[:, ::-1]
"""
    result = run(source, status=1)
    assert result.err.startswith("problem.py: Model computes softmax\n")
    assert result.out.startswith("violated      softmax float32  kernelbench:as_defined:problem.py:ModelNew")


def test_what_no_contract_knows_is_no_verdict(run):
    with pytest.raises(click.UsageError, match=r"Model.*\b1\b.*\b5\b"):
        run(SINE)
    with pytest.raises(click.UsageError, match=r"problem\.py:Model.*AttributeError"):
        run("")


def test_wrong_usage(run, tmp_path, monkeypatch):
    with pytest.raises(click.UsageError, match=r"FILE.*Model.*ModelNew"):
        run(PRODUCT, "--candidate", "problem.py:f")
    with pytest.raises(click.UsageError, match=r"none\.py"):
        llamaspec.main(["verify", "kernelbench", "none.py", *FEW], standalone_mode=False)
