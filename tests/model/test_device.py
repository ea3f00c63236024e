"""Failures of JAX to open a device end in a one-line error with the reason and a fix."""

import jax
import pytest

from llamaspec.commands.output import one_line
from llamaspec.model import device
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


def test_other_errors_of_jax_stay(monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setattr(jax, "devices", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        device.devices()
