"""Data of the X-ray page: recomputing each op by its definition gives the values that `verify` expects."""

import base64
import json
import math
import os
import re
import shutil
import struct
import xml.etree.ElementTree as ElementTree
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from llamaspec.commands.text_to_walk import ModelAndTokens
from llamaspec.commands.xray import xray
from llamaspec.learn.quantizers import schemes
from llamaspec.learn.quantizers.by_inputs import METHODS
from llamaspec.learn.quantizers.schemes import SCHEMES
from llamaspec.learn.trace import Recording, definitions, layers_of_ops, record
from llamaspec.learn.xray import content, page, quantized
from llamaspec.learn.xray.arrays import CELLS, heat_map
from llamaspec.learn.xray.formulas import FORMULAS
from llamaspec.learn.xray.lines import run
from llamaspec.learn.xray.ops import Rerun, unturned
from llamaspec.model.candidates.walking import random_checkpoint, walkable
from llamaspec.model.checkpoints import codes
from llamaspec.model.insight.shapes import SHAPES
from llamaspec.model.ops.xla import XLA
from llamaspec.model.running.reference_backend import load_reference_params
from llamaspec.model.tensors import tensor_shapes
from llamaspec.reference.linear import linear
from llamaspec.reference.rmsnorm import rmsnorm
from llamaspec.reference.rope import LinearScaling, frequencies
from llamaspec.verify.judging.walk import BEYOND, CONFIGS, weights
from tests.support.processes import REPOSITORY, interrupt_within, run_llamaspec
from tests.support.refusals import mentions

TOKENS = [3, 14, 15, 9, 26]
LAYER = 0  # this layer has a window, if the model has one
WALKED = ["biases, scaled RoPE", "3 heads to 1, q/k norms, window", "experts"]


@pytest.fixture(scope="module", params=WALKED)
def walked(request) -> tuple[Recording, object]:
    config = replace(CONFIGS[request.param], layers=2)
    checkpoint = random_checkpoint(config, weights(tensor_shapes(config), seed=4))
    model = walkable(checkpoint, XLA, dtype=np.dtype("float32"), rows=len(TOKENS))
    return record(model, TOKENS, config=config, dtype="float32", layers=[LAYER]), checkpoint


def numbers(packed: str) -> np.ndarray:
    return np.array([value for (value,) in struct.iter_unpack("<f", base64.b64decode(packed))])


def script(path) -> dict:
    """Parse the JSON object that a data script assigns to a variable."""
    text = path.read_text(encoding="utf-8")
    return json.loads(text[text.index("{") : text.rindex("}") + 1])


def test_the_definitions_give_the_values_that_the_walk_was_judged_by(walked):
    recording, _ = walked
    rerun = Rerun(recording, 3)
    for (layer, op), results in recording.results.items():
        for result in results:
            expected = result.expected.value[3]
            # The same float64 operations on one token and on all tokens: matrix products sum in another order.
            np.testing.assert_allclose(rerun.values[op, result.output], expected, rtol=1e-12, atol=1e-12, err_msg=op)
        assert layer in (LAYER, None)
    made_of = layers_of_ops(recording.config)
    assert rerun.listings.keys() == made_of.keys()
    for op, listings in rerun.listings.items():
        names = [listing.name for listing in listings]
        assert set(names) >= {layer.__name__ for layer in made_of[op]}
        assert {name for name in names if name not in FORMULAS} == set()


def test_code_is_that_of_the_files_and_only_lines_that_ran_are_marked(walked):
    for listings in Rerun(walked[0], 2).listings.values():
        for listing in listings:
            source = (REPOSITORY / listing.file).read_text(encoding="utf-8").splitlines()
            assert [source[number - 1] for number in listing.numbers] == listing.lines
            assert listing.steps and listing.lines[listing.steps[-1].line].strip().startswith("return ")


def test_a_branch_that_is_not_taken_is_not_marked():
    def ran(**options) -> list[str]:
        listing = run(frequencies, 4, theta=1e4, **options)[1]
        return [listing.lines[step.line].strip() for step in listing.steps]

    assert ran()[-1] == "return fast"
    assert ran(scaling=LinearScaling(2.0))[-1] == "return fast / factor" and "return fast" not in ran()[:-1]
    listing = run(rmsnorm, np.ones((3, 4)), np.ones(4), eps=0.0)[1]
    assert [step.shapes for step in listing.steps] == [{}, {"mean_square": [3, 1]}, {}]


def test_a_token_holds_what_its_trace_holds(walked):
    recording, _ = walked
    trace, content_of_token = recording.at(3), content.token_content(recording, 3, text_of=str)
    for visit, drawn in zip(trace.visits, content_of_token["visits"], strict=True):
        assert (visit.op, visit.layer, visit.bytes, visit.norm) == tuple(
            drawn[k] for k in ("op", "layer", "bytes", "norm")
        )
        for output, result, entry in zip(
            visit.outputs, recording.results[visit.layer, visit.op], drawn["outputs"], strict=True
        ):
            assert (entry["reference"], entry["running"], entry["share"]) == output[3:5] + output[6:]
            values, off = (numbers(entry["map"][part]) for part in ("values", "difference"))
            assert (values == result.actual[3].ravel()).all()
            # The page stores the difference, rounded once to float32, so the definition's value is recovered up to
            # 2^-24 of the difference.
            expected = result.expected.value[3].ravel()
            assert (np.abs(values - off - expected) <= 2.0**-24 * np.abs(off) + 2.0**-53 * np.abs(expected)).all()
            assert entry["map"]["share"] is not None and math.prod(entry["map"]["shape"]) == len(values)
    heads = numbers(content_of_token["attention"][LAYER]).reshape(recording.config.heads, -1)
    assert (heads == trace.attention[LAYER].astype(np.float32)).all()
    assert (numbers(content_of_token["logits"]) == recording.results[None, "norm_logits"][0].actual[3]).all()
    assert [token["id"] for token in content_of_token["likely"][:5]] == [guess.id for guess in trace.next]


def test_rope_of_a_query_is_inverted(walked):
    recording, _ = walked
    config, layer = recording.config, recording.model.exact.layers[LAYER]
    n = rmsnorm(recording.results[LAYER, "norm_qkv"][0].input[[4]], layer.attention_norm, eps=config.eps)
    q = linear(n, *layer.q).reshape(-1, config.head_dim)
    if config.qk_norm:
        q = rmsnorm(q, layer.q_norm, eps=config.eps)
    np.testing.assert_allclose(unturned(recording, LAYER, "q", 4), q, rtol=1e-12, atol=1e-13)


def test_an_array_that_is_long_is_cut_and_says_so():
    long = heat_map("g", ("ffn",), np.arange(8192.0))
    assert long["shape"] == [8192] and (numbers(long["values"]) == np.arange(CELLS)).all()


@pytest.mark.sampled(1)  # 1 s each
def test_a_large_model_fits_the_page(tmp_path, walked, monkeypatch):
    recording, checkpoint = walked
    for name in ("llama-3.2-1b", "llama-3.1-70b"):
        config = SHAPES[name]
        assert len(content.default_layers(config)) == 3 and not content.small(config)
    size = len(json.dumps(content.token_content(recording, 4, text_of=str)))
    monkeypatch.setattr(page, "BUDGET", int(2.5 * size))
    monkeypatch.setattr(content, "SMALL", 0)
    index = page.write_page(tmp_path / "x", recording, checkpoint, name="m", text_of=str)
    model = script(page.data_of(index) / "model.js")
    assert model["chosen"] == [3, 4] and model["quantize"]["told"] is None
    assert {file.name for file in page.data_of(index).glob("token-*")} == {"token-3.js", "token-4.js"}
    monkeypatch.setattr(page, "BUDGET", 0)
    page.write_page(tmp_path / "x", recording, checkpoint, name="m", text_of=str)  # replaces the older page
    assert {file.name for file in page.data_of(index).glob("token-*")} == {"token-4.js"}
    assert {file.name for file in index.parent.iterdir()} == {"index.html", page.data_of(index).name}


def test_infinities_and_markup_come_through(tmp_path, walked, monkeypatch):
    recording, checkpoint = walked
    monkeypatch.setattr(content, "SMALL", 0)
    assert page._json({"a": [math.inf, 1.0], "b": (math.nan,)}) == '{"a":[null,1.0],"b":[null]}'
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "write_text", interrupt_within)
        page.write_page(tmp_path / "x", recording, checkpoint, name="m", text_of=str)
    assert not list(tmp_path.iterdir())
    index = page.write_page(tmp_path / "x", recording, checkpoint, name="m", text_of=lambda id: "</script>\u2028\ud7ff")
    assert script(page.data_of(index) / "model.js")["tokens"][0]["text"] == "</script>\u2028\ud7ff"


def page_files(index: Path) -> dict[str, bytes]:
    """Read all files that a browser may load for a page, by name."""
    return {file.name: file.read_bytes() for file in page.data_of(index).iterdir()}


def test_a_page_that_a_newer_one_replaces_is_whole_until_then(tmp_path, monkeypatch):
    """Killing a writer at any step leaves the older or the newer page complete, and a second writer can continue."""
    index = tmp_path / "index.html"
    pages = [{"model": name} for name in "abcdefg"]
    page._fill(tmp_path, pages[0])
    older, killed = page_files(index), 0
    assert older["model.js"] == b"a\n" and set(re.findall('"data-1/(.*?)"', index.read_text())) <= set(older)

    for step, scripts in enumerate(pages[1:-1], 1):
        steps_left = step

        def dies(call, *arguments, **options):
            nonlocal steps_left
            steps_left -= 1
            if not steps_left:
                raise KeyboardInterrupt
            return call(*arguments, **options)

        with monkeypatch.context() as patch:
            for module, name in ((os, "replace"), (shutil, "rmtree")):
                patch.setattr(module, name, partial(dies, getattr(module, name)))
            patch.setattr("llamaspec.model.checkpoints.staging._remove", lambda staged: None)  # as if killed
            with suppress(KeyboardInterrupt):
                page._fill(tmp_path, scripts)
                break
        killed += 1
        newer = older | {"model.js": scripts["model"].encode() + b"\n"}
        assert page_files(index) in (older, newer)
        page.check_folder(tmp_path)
        older = page_files(index)
    assert killed >= 3
    page._fill(tmp_path, pages[-1])
    assert page_files(index) == older | {"model.js": b"g\n"}
    assert {file.name for file in tmp_path.iterdir()} == {"index.html", page.data_of(index).name}


def test_leftovers_of_a_killed_process_are_replaced(tmp_path):
    page._fill(tmp_path, {"model": "a"})
    (tmp_path / "index.html").rename(tmp_path / ".index.html.01234567.partial")
    (tmp_path / ".data-1.89abcdef.partial").mkdir()
    page.check_folder(tmp_path)
    page._fill(tmp_path, {"model": "b"})
    assert {file.name for file in tmp_path.iterdir()} == {"index.html", "data-1"}
    for name in page.DATA:
        own = tmp_path / "own" / name
        own.mkdir(parents=True)
        with pytest.raises(FileExistsError) as caught:
            page.check_folder(own.parent)
        assert mentions(str(caught.value), f"{own.parent} xray different folder")
        own.rmdir()


def test_the_group_of_a_head_is_a_whole_number():
    assert "<mo>⌊</mo><mi>h</mi>" in FORMULAS["attention"] and "<mo>⌋</mo>" in FORMULAS["attention"]


def test_formulas_are_mathml_and_name_what_the_definitions_name():
    for name, formula in FORMULAS.items():
        root = ElementTree.fromstring(f"<all>{formula}</all>")
        assert {element.tag for element in root.iter()} <= {
            *("all", "math", "mrow", "mi", "mo", "mn", "mtext", "mspace", "msub", "msup", "mfrac", "msqrt", "munder")
        }
        assert len(root) and all(child.tag == "math" for child in root), name
    beside = {"rope_halves": ["frequencies"], "attention": ["attention_weights"]}  # the same file defines these
    for layer in {layer for config in CONFIGS.values() for layers in definitions(config).values() for layer in layers}:
        formulas = "".join(FORMULAS[name] for name in (layer.name, *beside.get(layer.name, [])))
        letters = {element.text for element in ElementTree.fromstring(f"<all>{formulas}</all>").iter("mi")}
        assert {*re.findall(r"(?<![a-zA-Z])[a-zA-Z](?![a-zA-Z])", " ".join(layer.formula))} <= letters, layer.name


def test_schemes_generate_and_diverge_as_quantized_models_do():
    config = replace(CONFIGS["7 heads to 1"], layers=1)
    checkpoint = random_checkpoint(config, weights(tensor_shapes(config), seed=1))
    few = {name: SCHEMES[name] for name in ("q8", "q4", "GGUF Q4_0")}
    tellings = list(quantized.tellings(checkpoint, TOKENS, stops=frozenset(), schemes=few))
    assert [name for name, _, _ in tellings] == ["", *few] and tellings[0][2] == 0
    assert len(tellings[0][1]) == quantized.CONTINUATION
    divergence = {name: kl for name, _, kl in tellings[1:]}
    assert 0 < divergence["q8"] < divergence["q4"] < 1
    coded = load_reference_params(codes.quantized(checkpoint, "q4")).layers[0]
    rounded = load_reference_params(schemes.rounded(checkpoint, SCHEMES["q4"].rounded)).layers[0]
    np.testing.assert_array_equal(rounded.q.weight, coded.q.weight)


@pytest.mark.sampled(1)  # 1 s each
def test_every_scheme_has_a_row_of_every_matrix(walked):
    recording, _ = walked
    layer, config = recording.model.exact.layers[LAYER], recording.config
    x = quantized.inputs(recording, LAYER)
    tables = quantized.schemes(layer, config, x=x, text=lambda name: {})
    assert tables["names"] == [*SCHEMES, *METHODS] and tables["left_out"] == []
    assert quantized.schemes(layer, config, x=None, text=lambda name: {})["left_out"] == [*METHODS]
    matrices = quantized.rows(layer, config)
    assert tables["matrices"].keys() == matrices.keys() == x.keys()
    for name, scheme in SCHEMES.items():
        for matrix, w in matrices.items():
            row = tables["schemes"][name]["rows"][matrix]
            np.testing.assert_array_equal(numbers(row["restored"]), scheme.rounded(w)[0].astype(np.float32))
    for name in METHODS:
        for matrix, w in matrices.items():
            row = tables["schemes"][name]["rows"][matrix]
            assert len(row["codes"]) == len(w[0]) and (row["guaranteed"] is None) == (name == "gptq")
            if row["guaranteed"]:
                # Both are rounded to float32.
                assert (np.abs(numbers(row["error"])) <= numbers(row["guaranteed"]) * (1 + 2.0**-22)).all()


def test_inputs_are_what_the_matrices_were_given(walked):
    recording, _ = walked
    layer = recording.model.exact.layers[LAYER]
    x = quantized.inputs(recording, LAYER)
    expected = recording.results[LAYER, "norm_qkv"][2].expected.value  # v, to which RoPE is not applied
    np.testing.assert_allclose(linear(x["v"], *layer.v), expected.reshape(len(expected), -1), rtol=1e-12, atol=1e-12)
    assert x["o"].shape == (len(TOKENS), layer.o.weight.shape[1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["Once", "--out", "{x}/new", "--layer", "10"], "--layer 10 0 9"),
        (["Once", "--out", "{x}/full"], "full folder"),
    ],
)
def test_the_command_refuses_what_it_cannot_do(arguments, message, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "index.html").write_text("<p>mine")
    failed = run_llamaspec("xray", *(argument.format(x=tmp_path) for argument in arguments))
    assert failed.code == 2 and mentions(failed.err, message) and failed.out == ""
    assert (tmp_path / "full" / "index.html").read_text() == "<p>mine"


def test_the_command_names_the_switches_that_pages_do_not_draw(tmp_path, monkeypatch):
    checkpoint = random_checkpoint(BEYOND["LayerNorm, GELU without a gate"], {})
    monkeypatch.setattr("llamaspec.commands.xray.read", lambda *_, **__: ModelAndTokens(checkpoint, [1], str))
    with pytest.raises(ValueError, match="activation, gated, layer norm"):
        xray.main(["Once", "--out", str(tmp_path / "page")], standalone_mode=False)
