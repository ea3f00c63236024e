"""Failures of JAX to open a device end in a one-line error with the reason and a fix."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from llamaspec.commands.output import one_line
from llamaspec.model import device
from llamaspec.model.device import Device
from llamaspec.model.ops.choice import OpsChoice, summarize
from llamaspec.model.ops.xla import XLA
from llamaspec.model.running.jax_backend import describe_run
from llamaspec.pallas_kernels.parts.card import Card
from tests.support.processes import run_python

FULL_CARD = "RESOURCE_EXHAUSTED: Failed to allocate 2.00GiB"


@pytest.mark.parametrize("command", [["generate", "hi"], ["serve", "--port", "0"]])
@pytest.mark.parametrize("platform", ["cuda", "nonsense"])
def test_a_platform_that_jax_lacks_is_one_line(command, platform):
    script = f"import os; os.environ['JAX_PLATFORMS'] = {platform!r}\nfrom llamaspec import cli; cli.main()"
    done = run_python(script, *command)
    assert done.code == 1 and done.err.count("\n") == 1, done.err
    assert done.err.startswith(f"error: JAX_PLATFORMS is {platform}: ") and "bug of llamaspec" not in done.err


@pytest.mark.parametrize(
    ("memory", "words"),
    [
        ((3 << 30, 80 << 30), "the GPU has too little free memory to start: other processes hold 77.0 GiB"),
        (None, "the GPU has too little free memory to start"),
    ],
)
def test_a_full_card_is_no_fault_of_ours(monkeypatch, memory, words):
    monkeypatch.setattr(device, "nvidia_memory", lambda: memory)
    assert one_line(jax.errors.JaxRuntimeError(FULL_CARD)) == words
    assert "bug of llamaspec" in one_line(jax.errors.JaxRuntimeError("INTERNAL: something else"))

    def full():
        raise RuntimeError(f"Unable to initialize backend 'cuda': {FULL_CARD}")

    monkeypatch.setattr(jax, "devices", full)
    with pytest.raises(MemoryError, match=words):
        device.default_device()


@pytest.mark.parametrize(
    ("capabilities", "others"),
    [(["9.0", "9.0"], ()), (["8.6", "9.0", "8.9"], ("8.9", "9.0")), ([None], ())],
)
def test_a_device_names_other_kinds_of_cards(monkeypatch, capabilities, others):
    cards = [SimpleNamespace(platform="gpu", device_kind="card", compute_capability=some) for some in capabilities]
    monkeypatch.setattr(jax, "devices", lambda: cards)
    found = device.default_device()
    assert (found.capability, found.others) == (capabilities[0], others)


def test_what_is_known_of_the_kernels_on_a_card(monkeypatch):
    rtx, h200 = Device("gpu", "RTX 3060", "8.6", 28), Device("gpu", "NVIDIA H200", "9.0")
    assert (rtx.kernels, h200.kernels, Device("cpu", "cpu").kernels) == ("none", "measured", "none")
    assert Device("gpu", "AMD Instinct MI300X", "gfx942").kernels == "none"
    assert rtx.card == Card((8, 6), 28)
    choice = OpsChoice("pallas", XLA, ("attend",), {})
    assert describe_run(np.dtype("float32"), h200, choice) == f"float32 on NVIDIA H200; {summarize(choice)}"
    monkeypatch.setattr(device, "CHOSEN", ("8", "9"))
    words = "compiled and verified, speed not measured on this card"
    assert (rtx.kernels, h200.kernels) == (words, "measured")
    assert describe_run(np.dtype("float32"), rtx, choice) == f"float32 on RTX 3060; {summarize(choice)} ({words})"


def test_other_errors_of_jax_stay(monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setattr(jax, "devices", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        device.devices()
