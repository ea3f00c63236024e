"""`verify`: check ops against the reference."""

from __future__ import annotations

import itertools
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llamaspec.commands.loading import cache_folder
from llamaspec.commands.options import (
    COUNT,
    POSITIVE,
    Verb,
    adapter_option,
    devices_option,
    json_option,
    parallel_option,
)
from llamaspec.commands.output import save_text, write, write_json, write_rows
from llamaspec.commands.verify_model import verify_model, walk_random_models
from llamaspec.commands.verifying import for_terminal, interruptible, verify_progress

if TYPE_CHECKING:
    from llamaspec.verify.campaign import Campaign, CandidateJob
    from llamaspec.verify.contract import Contract
    from llamaspec.verify.mutant import Implementation


@click.command(cls=Verb)
@click.argument("names", nargs=-1, metavar="[OP]...")
@click.option(
    "--candidate",
    metavar="MODULE[:FUNCTION]",
    help="Verify this function of a module or file.py. Without :FUNCTION, verify all functions named like ops.  "
    "[default: the ops of this package]",
)
@click.option(
    "--contract",
    "contract_file",
    metavar="FILE.py",
    help="Use the contracts that FILE.py makes with llamaspec.verify.declare.",
)
@click.option(
    "--arrays",
    help="Array library of the candidate's arguments: jax, numpy, torch, cupy.  [default: jax if installed, else "
    "numpy]",
)
@click.option(
    "--dtype",
    "dtypes",
    multiple=True,
    help="Dtype of the arrays; may be repeated.  [default: all three, with most draws in float32]",
)
@click.option(
    "--loose",
    metavar="u=NAME",
    help="Declare a weaker contract: intermediate results may be rounded to the arrays' bfloat16 or float16, or "
    "float32 matrices may be multiplied by tf32x3 or bf16x3.",
)
@click.option("--device", help="Device of the candidate's arrays, as the array library calls it: cpu, gpu, cuda:1.")
@click.option(
    "--python", default=sys.executable, metavar="PATH", help="The Python that runs the candidate.  [default: this one]"
)
@click.option("--examples", type=COUNT, default=200, show_default=True, help="Draws per op and dtype.")
@click.option(
    "--time-budget",
    "seconds",
    type=POSITIVE,
    default=60.0,
    show_default=True,
    help="Time limit in seconds for each op and dtype. It also applies to --time, which runs at least two rounds.",
)
@click.option(
    "--timeout",
    type=POSITIVE,
    default=60.0,
    show_default=True,
    help="Time limit in seconds for one call of the candidate, including its compilation.",
)
@click.option(
    "--shapes", type=COUNT, help="Draw at most N different shapes, since each is compiled.  [default: 64 for jax]"
)
@click.option(
    "--set",
    "narrowed",
    multiple=True,
    metavar="DRAW=A,B",
    help="Draw only these values, such as --set dim=1,9. --list OP shows what is drawn.",
)
@click.option("--seed", type=click.IntRange(0), help="Seed of the draws.  [default: random, and printed]")
@click.option(
    "--strict",
    is_flag=True,
    help="Treat suspicious results (errors that are large but within the bound) as violations.",
)
@click.option(
    "--deterministic", is_flag=True, help="Treat results that differ in any bit between two equal calls as violations."
)
@click.option("--contiguous", is_flag=True, help="Pass only contiguous arrays, also for numpy and torch.")
@click.option(
    "--algebra",
    is_flag=True,
    help="Also compare formulas: a JAX candidate must equal the definition in exact arithmetic modulo random primes.",
)
@click.option("--time", "timed", is_flag=True, help="Also time the candidate if its results are within bounds.")
@click.option(
    "--against",
    metavar="MODULE:FUNCTION",
    help="With --time: also time this function, in alternating calls, and compare.",
)
@click.option(
    "--at",
    multiple=True,
    metavar="DRAW=A",
    help="With --time: time a draw with these sizes, such as dim=4096.  [default: the largest sizes drawn]",
)
@click.option("--replay", metavar="FILE", help="Repeat the call that a counterexample file describes.")
@click.option(
    "--replays",
    default="verify-replays",
    show_default=True,
    metavar="DIR",
    help="Write counterexamples as files to DIR.",
)
@click.option("--junit", metavar="FILE", help="Write the results to FILE as JUnit XML, for a CI system.")
@click.option(
    "--html", metavar="FILE", help="Write a page with plots of errors and bounds by magnitude, size and position."
)
@click.option("--github", is_flag=True, help="Write violations as GitHub Actions annotations to stderr.")
@click.option("--model", metavar="MODEL", help="Check a whole model instead, and print the first wrong op.")
@click.option("--kernels", default="auto", show_default=True, help="With --model: run this implementation of the ops.")
@adapter_option
@devices_option
@parallel_option
@click.option(
    "--list",
    "listing",
    is_flag=True,
    help="Print the ops by group. With an op's name, print its contract: draws, bounds, laws.",
)
@click.option(
    "--mutants", is_flag=True, help="Verify implementations that are wrong on purpose; each must be rejected."
)
@json_option
def verify(names: tuple[str, ...], listing: bool, mutants: bool, **options: Any):
    """Check ops against the reference, each within a proven bound.

    `verify kernelbench FILE` finds out which op the class Model of a KernelBench problem computes, and checks the class
    ModelNew against that op.

    verify draws inputs that tend to break kernels, and calls the candidate with the arguments of the reference (--list
    OP shows them). The exit status is 0 if all results are within bounds, 1 if not, and 2 if there is no
    verdict.
    """
    import secrets

    _store_in_the_cache()
    from llamaspec.verify.catalogue import CONTRACTS, IMPLEMENTATIONS, contract_for, in_file

    for option in click.get_current_context().command.params:
        if options.get(str(option.name)) == "":  # for example an unset variable of the shell
            raise click.UsageError(f"{option.opts[0]} is empty: give it a value, or leave the option out")
    if options["narrowed"] and (mutants or options["model"] or options["replay"]):
        raise click.UsageError(
            "--set narrows the draws of a candidate, so it does not work with --replay, --model or --mutants"
        )
    problem = names[:1] == ("kernelbench",)
    if options["loose"] and not (options["candidate"] or options["replay"] or problem):
        raise click.UsageError("--loose needs your own function: name it with --candidate")
    if options["timed"] and (options["replay"] or not (options["candidate"] or problem)):
        raise click.UsageError("--time needs your own function: name it with --candidate")
    if (options["against"] or options["at"]) and not options["timed"]:
        raise click.UsageError("--against and --at need --time")
    if options["algebra"]:
        if mutants or options["model"] or options["replay"]:
            raise click.UsageError("--algebra does not work with --replay, --model or --mutants")
        if problem or (options["arrays"] or _library()) != "jax":
            raise click.UsageError("--algebra reads the formula of a JAX function: NumPy, torch and CuPy keep none")
        if options["python"] != sys.executable:
            raise click.UsageError("--algebra traces the candidate with this Python, so it does not work with --python")
    if options["devices"] > 1 and not options["model"]:
        raise click.UsageError("--devices needs --model")
    if options["adapter"] and not options["model"]:
        raise click.UsageError("--adapter needs --model")
    if options["seed"] is None:
        options["seed"] = secrets.randbelow(2**32)
    try:
        path = options["contract_file"]
        contracts, implementations = in_file(path) if path else (CONTRACTS, IMPLEMENTATIONS)
        if names[:1] == ("kernelbench",):
            if len(names) != 2 or listing or mutants or any(options[name] for name in ("candidate", "replay", "model")):
                raise click.UsageError(
                    "verify kernelbench takes one FILE with classes Model and ModelNew, and no option that names "
                    "another candidate"
                )
            with interruptible() as check_signals:
                _verify_problem(names[1], check_signals, contracts, options)
            return
        ops = [contract_for(name, contracts).name for name in names] or list(contracts)
        if listing:
            _list_contracts(
                [contracts[op] for op in ops],
                {
                    name: [mutant.name for mutant in implementation.mutants]
                    for name, implementation in implementations.items()
                },
                in_full=bool(names or path),
                as_json=options["as_json"],
            )
        elif options["model"]:
            verify_model(**options)
        else:
            with interruptible() as check_signals:
                if mutants:
                    pairs = [(contracts[op], implementations[op]) for op in ops if op in implementations]
                    _verify_mutants(pairs, check_signals, seed=options["seed"], as_json=options["as_json"])
                else:
                    _verify(ops, check_signals, contracts=contracts, named=bool(names or path), **options)
    except (ImportError, ValueError) as error:
        raise click.UsageError(str(error)) from None


def _store_in_the_cache() -> None:
    """Make Hypothesis store its files in this user's cache, unless the environment names another folder.

    If there is no writable cache, we name a folder below the null device, so that Hypothesis stores nothing.
    """
    os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", str((cache_folder() or Path(os.devnull)) / "hypothesis"))


def _list_contracts(contracts: list[Contract], mutants: Mapping[str, list[str]], *, in_full: bool, as_json: bool):
    """Print contracts in full, or only their names by group. JSON always contains the full contracts."""
    from llamaspec.verify.reports import listing

    if as_json:
        write_json([listing.as_json(contract, mutants.get(contract.name, [])) for contract in contracts])
        return
    if not in_full:
        groups: dict[str, list[str]] = {}
        for contract in contracts:
            groups.setdefault(listing.group(contract), []).append(contract.name)
        width = max(map(len, groups))
        write_rows(*(f"{name:{width}}  {' '.join(ops)}" for name, ops in sorted(groups.items())))
        write_rows("", "llamaspec verify --list OP prints the signature of an op, its draws, its bound and its laws.")
        return
    for contract in contracts:
        write_rows(*listing.describe(contract, mutants.get(contract.name, [])), "")


def _verify_mutants(
    pairs: list[tuple[Contract, Implementation]], check_signals: Callable[[], None], *, seed: int, as_json: bool
):
    from llamaspec.verify.judging.mutation import row, table, trials

    if not pairs:
        raise ValueError("these contracts have no mutants: add some with llamaspec.verify.mutant.implementation")
    click.echo(f"seed {seed}", err=True)
    trials_run = []
    for contract, implementation in pairs:
        for trial in trials(contract, implementation, seed=seed):
            check_signals()
            trials_run.append(trial)
            if not as_json:
                by, dtype, seconds, examples, op, mutant = row(trial).values()
                write(f"{by:11} {dtype:8} {seconds:6} s {examples:5} examples  {op}: {mutant}\n")
    if as_json:
        write_json([row(trial) for trial in trials_run])
    else:
        write("\n".join(["", *table(trials_run)]) + "\n")
    killed = sum(trial.killed for trial in trials_run)
    click.echo(f"{killed} of {len(trials_run)} mutants killed", err=True)
    if killed < len(trials_run):
        sys.exit(1)


def _verify_problem(
    path: str, check_signals: Callable[[], None], contracts: Mapping[str, Contract], options: dict[str, Any]
):
    """Check a KernelBench problem: the class ModelNew of the file `path`.

    The class Model of that file computes an op, and ModelNew must fulfill the contract of this op. With --time, compare
    the times of the two classes.
    """
    from llamaspec.verify.kernelbench import adapter_for

    options["arrays"] = options["arrays"] or "torch"
    options["dtypes"] = options["dtypes"] or ("float32",)  # KernelBench problems use float32
    options["contiguous"] = True  # and contiguous arrays, as get_inputs makes them
    adapter = adapter_for(path, contracts, _campaign(options, contracts), heed=check_signals)
    click.echo(f"{path}: Model computes {adapter.op}", err=True)
    if options["timed"]:
        options["against"] = options["against"] or adapter.job(path, "Model").candidate
    adapted_contracts = {**contracts, adapter.op: adapter.contract(contracts[adapter.op])}
    _verify(
        [adapter.op],
        check_signals,
        contracts=adapted_contracts,
        named=True,
        jobs=[adapter.job(path, "ModelNew")],
        **options,
    )


def _verify(
    ops: list[str],
    check_signals: Callable[[], None],
    *,
    contracts: Mapping[str, Contract],
    named: bool,
    jobs: list[CandidateJob] | None = None,
    **options: Any,
):
    from llamaspec.commands.verify_page import page
    from llamaspec.verify.campaign import again, run, run_side_by_side
    from llamaspec.verify.reports.report import WRONG, as_annotations, as_json, as_junit

    candidate, replay, as_json_text = options["candidate"], options["replay"], options["as_json"]
    campaign = _campaign(options, contracts)
    if jobs is None:
        jobs = [] if replay else _jobs(ops, candidate, contract_file=options["contract_file"], named=named)
    at_once = 1 if candidate or replay else _at_once(jobs)
    reports, printed, problem = [], [], None
    seed = None if replay else campaign.seed
    with verify_progress(len(jobs) if at_once > 1 else campaign.examples, check_signals, seed=seed) as (
        progress,
        aside,
    ):
        if replay:
            verified = (again(Path(replay), campaign, candidate=candidate, arrays=options["arrays"]) for _ in range(1))
        elif at_once > 1:
            verified = run_side_by_side(jobs, campaign, at_once=at_once, progress=progress)
        else:
            verified = run(jobs, campaign, progress=progress)
        walks = () if named or candidate or replay else walk_random_models(campaign)
        try:
            for report, lines in itertools.chain(verified, walks):
                check_signals()
                reports.append(report)
                printed.append(lines)
                if not as_json_text:
                    terminal = sys.stdout.isatty()
                    columns = shutil.get_terminal_size().columns
                    with aside():
                        write((for_terminal(lines, columns) if terminal else "\n".join(lines)) + "\n")
        except (ImportError, ValueError) as error:  # raised below, after we print the verdicts so far
            problem = error
    wrong = (*WRONG, "suspicious") if options["strict"] else WRONG
    if reports or not problem:
        if as_json_text:
            write_json(as_json(reports))
        if options["github"]:
            annotations = as_annotations(reports, printed, wrong=wrong)
            click.echo("".join(f"{line}\n" for line in annotations), nl=False, err=True)
        if options["junit"]:
            save_text(options["junit"], as_junit(reports, printed, wrong=wrong))
        if options["html"]:
            save_text(options["html"], page(reports, contracts, printed))
    if problem:
        raise problem
    if any(report.outcome in wrong for report in reports):
        sys.exit(1)


def _library() -> str:
    """Return the array library for a candidate: jax if it is installed, otherwise numpy."""
    from importlib.util import find_spec

    return "numpy" if find_spec("jax") is None else "jax"


def _at_once(jobs: list[CandidateJob]) -> int:
    from llamaspec.model.system import usable_cpus

    return min(len(jobs), len(usable_cpus()), 4)


def _campaign(options: dict[str, Any], contracts: Mapping[str, Contract]) -> Campaign:
    from llamaspec.verify.campaign import Campaign
    from llamaspec.verify.catalogue import CONTRACTS
    from llamaspec.verify.draws.domain import choices
    from llamaspec.verify.loose import dtypes_for, unit_of

    names = (
        *(
            "contract_file",
            "device",
            "python",
            "examples",
            "seed",
            "seconds",
            "timeout",
            "shapes",
            "deterministic",
            "contiguous",
        ),
        *("timed", "against", "algebra"),
    )
    dtypes, loose = options["dtypes"], options["loose"] and unit_of(options["loose"])
    if loose:
        dtypes = dtypes_for(loose, dtypes)
    return Campaign(
        **{name: options[name] for name in names},
        own=None if contracts is CONTRACTS else contracts,
        loose=loose,
        dtypes=dtypes or ("float32",),
        extra_dtypes=() if dtypes else ("bfloat16", "float16"),
        arrays=options["arrays"] or _library(),
        only=choices(options["narrowed"]),
        at=choices(options["at"]),
        folder=Path(options["replays"]),
    )


def _jobs(ops: list[str], candidate: str | None, *, contract_file: str | None, named: bool) -> list[CandidateJob]:
    """Make a job for each of `ops`, with the candidate's function. Without a candidate, use this package's functions.

    In that case, prints on stderr which of `ops` this package does not implement.
    """
    from llamaspec.verify.campaign import jobs_for, jobs_of

    if candidate:
        if not named and ":" not in candidate:
            raise ValueError(f"--candidate {candidate} names a module: also give the ops to verify, or MODULE:FUNCTION")
        return jobs_for(ops, candidate)
    if contract_file:
        raise ValueError("--contract needs your own function: name it with --candidate")
    from llamaspec.model.candidates.table import CANDIDATES

    jobs = jobs_of(ops, CANDIDATES)
    if missing := [op for op in ops if not any(job.op == op for job in jobs)]:
        line = f"this package does not implement {', '.join(missing)}"
        if not jobs:
            raise ValueError(f"{line}: name your own function with --candidate")
        click.echo(line, err=True)
    return jobs
