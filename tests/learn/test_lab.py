"""The judge refuses every broken kernel of the lab and accepts the repaired one.

If the learner must write a function, the judge refuses the empty function and accepts a right one.
"""

import hashlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

from llamaspec.learn.lab.check import SOLVED, check, is_solved, solution
from llamaspec.learn.lab.exercise import Broken
from llamaspec.learn.lab.folder import ALL, KERNEL, function_of, kernel, name_of, narrowings, readme, write
from llamaspec.reference import attention, llama, rmsnorm, rope, sentencepiece_bpe, softmax
from llamaspec.verify.bounds.precision import precision
from llamaspec.verify.candidates.candidate import Direct
from llamaspec.verify.candidates.worker import load_file
from llamaspec.verify.catalogue import contract_for
from llamaspec.verify.judging.runner import verify
from llamaspec.verify.mutants import quantized
from tests.support.processes import REPOSITORY, interrupt_within, run_llamaspec

BROKEN = [exercise for exercise in ALL.values() if isinstance(exercise, Broken)]


def outcome(exercise, text, tmp_path, examples):
    """Judge a kernel's source code by the exercise's contract, in this process; return the verdict.

    A kernel that needs a name which it neither imports nor defines fails the test.
    """
    file = tmp_path / KERNEL
    file.write_text(text, encoding="utf-8")
    function = getattr(load_file(str(file)), function_of(exercise))
    report = verify(
        contract_for(exercise.op),
        Direct(function, arrays="numpy", name="lab"),
        precision=precision("float32"),
        examples=examples,
        seed=0,
        only=narrowings(exercise),
    )
    assert report.worst.finding is None or "NameError" not in report.worst.finding.message
    return report.outcome


def test_there_are_forty_in_five_chapters_and_no_two_alike():
    assert [exercise.number for exercise in BROKEN] == list(range(1, 41))
    assert len({exercise.chapter for exercise in BROKEN}) == 5
    assert len({exercise.title for exercise in BROKEN}) == 40
    assert len({(exercise.op, exercise.mutant) for exercise in BROKEN}) == 40
    assert set(ALL) == set(range(1, 48))
    assert all(
        re.search(r"\. https://github.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+$", exercise.seen) for exercise in BROKEN
    )


def test_an_exercise_appears_whole_or_not_at_all(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "write_text", interrupt_within)
    with pytest.raises(KeyboardInterrupt):
        write(ALL[1], tmp_path / "lab-01")
    assert not list(tmp_path.iterdir())


@pytest.mark.sampled(2)  # 2 s each, some 14 s
@pytest.mark.parametrize("exercise", BROKEN, ids=lambda exercise: str(exercise.number))
def test_broken_is_refused_and_mended_is_accepted(exercise, tmp_path):
    assert outcome(exercise, kernel(exercise), tmp_path, 1000) == "violated"
    assert outcome(exercise, kernel(exercise, solved=True), tmp_path, 20) == "within bounds"
    assert (
        not any(word in exercise.hint for word in ("line ", exercise.change.old.strip()))
        and exercise.mutant not in exercise.title
    )
    assert any(line.startswith("+") for line in solution(exercise))


RIGHT = {
    "softmax": lambda x: softmax.softmax(x).astype(x.dtype),
    "rmsnorm": lambda x, weight, *, eps: rmsnorm.rmsnorm(x, weight, eps=eps).astype(x.dtype),
    "rope_halves": lambda x, at, turns: rope.rope_halves(x, at, turns).astype(x.dtype),
    "attention": lambda q, k, v, mask: attention.attention(q, k, v, mask).astype(q.dtype),
    "ggml_encode": quantized.ggml_encode,
    "encode": sentencepiece_bpe.encode,
    "forward": lambda params, tokens, *, config: llama.forward(
        params, tokens, llama.empty_cache(config), config=config
    )[0],
}
OWN = [exercise for exercise in ALL.values() if not isinstance(exercise, Broken)]


@pytest.mark.sampled(2)  # 1 s each
@pytest.mark.parametrize("exercise", OWN, ids=function_of)
def test_an_empty_function_is_refused_and_a_right_one_accepted(exercise, tmp_path):
    write(exercise, tmp_path / name_of(exercise.number))
    refused = check(exercise, tmp_path / name_of(exercise.number))
    assert not refused.solved and "NotImplementedError" in "\n".join(refused.lines)
    if exercise.op:
        right = verify(
            contract_for(exercise.op),
            Direct(RIGHT[exercise.name], arrays="numpy", name="right"),
            precision=precision("float32"),
            examples=20,
            seed=0,
            only=narrowings(exercise),
        )
        assert right.outcome == "within bounds"
    else:
        assert exercise.judge is not None and exercise.judge(RIGHT[exercise.name]) is None


def test_a_solved_exercise_is_remembered_until_its_kernel_changes(tmp_path):
    folder = tmp_path / name_of(3)
    write(ALL[3], folder)
    lines = check(ALL[3], folder).lines
    assert any("by convention, this contract expects zeros" in line for line in lines)
    assert not any("--" in line for line in lines) and not is_solved(folder)
    (folder / KERNEL).write_text(kernel(ALL[3], solved=True), encoding="utf-8")
    assert not is_solved(folder)
    (folder / SOLVED).write_text(hashlib.sha256((folder / KERNEL).read_bytes()).hexdigest())
    assert is_solved(folder)
    (folder / KERNEL).write_text(kernel(ALL[3]), encoding="utf-8")
    assert not is_solved(folder) and not is_solved(tmp_path)


def test_a_right_layer_is_marked_as_solved(tmp_path):
    [exercise] = [exercise for exercise in OWN if exercise.name == "encode"]
    (tmp_path / KERNEL).write_text("from llamaspec.reference.sentencepiece_bpe import encode\n", encoding="utf-8")
    assert check(exercise, tmp_path).solved and is_solved(tmp_path)


def test_an_exercise_folder_states_the_contract_without_the_solution():
    texts = {exercise.name: readme(exercise) + kernel(exercise) for exercise in OWN}
    assert "In this exercise, the contract draws only these values: `name` is Q4_0" in texts["ggml_encode"]
    for exercise in OWN:
        if exercise.judge:
            docstring = inspect.getdoc(exercise.judge)
            assert docstring and docstring in texts[exercise.name]
    assert "params.head are arrays" in texts["forward"]
    assert not any("reference/" in kernel(exercise) for exercise in OWN)


def test_a_folder_says_what_each_helper_of_its_kernel_does():
    for exercise in (exercise for exercise in ALL.values() if isinstance(exercise, Broken)):
        imported = re.findall(r"^from llamaspec.verify.mutant import (.*)$", kernel(exercise), re.M)
        for name in ", ".join(imported).split(", ") if imported else []:
            assert f"\n- `{name}(" in readme(exercise)


def test_a_llama_with_one_slip_is_told_how_far_its_story_came():
    [exercise] = [exercise for exercise in OWN if exercise.name == "forward"]

    def slip(params, tokens, *, config):
        logits = RIGHT["forward"](params, tokens, config=config)
        logits[5:] += 1e-3
        return logits

    assert exercise.judge is not None
    assert "the logits after token 5 are wrong by" in str(exercise.judge(slip))


@pytest.mark.slow  # 17 s
def test_an_exercise_is_begun_checked_and_solved_in_a_terminal(tmp_path):
    def lab(*arguments):
        return run_llamaspec("lab", *arguments, "--into", str(tmp_path))

    listed = run_llamaspec("lab", "list").out.splitlines()
    assert len(listed) == 47 and listed[1].split()[0] == "2" and max(map(len, listed)) <= 80
    missing = lab("check", "2")
    assert missing.code == 2 and "make it with llamaspec lab start 2" in missing.err
    begun = lab("start", "2")
    assert begun.code == 0 and Path(begun.out.strip()) == tmp_path / "lab-02"
    assert f"llamaspec lab check 2 --into {tmp_path}" in begun.err
    again = lab("start", "2")
    assert again.code == 2 and "may hold your work" in again.err
    wrong = lab("check", "2")
    assert wrong.code == 1 and "The error bound was violated" in wrong.out and "lab hint 2" in wrong.err
    (tmp_path / "lab-02" / KERNEL).write_text(kernel(ALL[2], solved=True), encoding="utf-8")
    solved = lab("check", "2")
    assert solved.code == 0 and "Solved" in solved.out
    marked = lab("list")
    assert [line[:3] for line in marked.out.splitlines() if "*" in line[:3]] == [" 2*"]
    assert marked.err.endswith("1 of 47 solved\n")
    assert run_llamaspec("lab", "hint", "2").out.strip() == ALL[2].hint
    assert "+            total = total * np.exp" in run_llamaspec("lab", "solution", "2").out
    assert run_llamaspec("lab", "hint", "48").code == 2


@pytest.mark.slow  # 8 and 2 s
@pytest.mark.parametrize("number", [7, 46])
def test_the_test_in_the_folder_says_the_same(number, tmp_path):
    folder = tmp_path / name_of(number)
    write(ALL[number], folder)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)]
    done = subprocess.run(command, cwd=folder, env={"PYTHONPATH": str(REPOSITORY)}, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout
    if number == 7:
        (folder / KERNEL).write_text(kernel(ALL[number], solved=True), encoding="utf-8")
        done = subprocess.run(command, cwd=folder, env={"PYTHONPATH": str(REPOSITORY)}, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
