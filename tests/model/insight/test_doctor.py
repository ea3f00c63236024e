"""`doctor` on a simulated GPU states for each op why it does not run as a kernel."""

import pytest

from llamaspec.model.insight import doctor
from llamaspec.model.insight.doctor import H200, plain_ops
from llamaspec.model.ops.table import Ops


def test_a_cpu_has_no_kernels_to_miss():
    assert plain_ops("stories") == {}


def test_each_plain_op_of_the_built_in_model_has_a_reason(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "default_device", lambda: H200)
    plain = plain_ops("stories")
    assert plain["attend"] == "attention_decode takes a head_dim of 64 or 128, got 32"
    assert "multiples of 256" in plain["norm_qkv"]
    assert "down_add" not in plain and plain.keys() <= {*Ops._fields, "attend_prompt"}
