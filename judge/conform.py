"""Examines a server that claims to serve a checkpoint: its tokens, its numbers and its protocol."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any, Literal

from llamaspec.judge import protocol, tokens
from llamaspec.judge.arithmetic import Arithmetic, Definition, define
from llamaspec.judge.client import Answer, NoServerError, RefusedError, Server, TimeIsUpError
from llamaspec.judge.findings import Finding
from llamaspec.judge.numbers import EXPLAINED, Position, Spellings, Trace, compare, explained_by, trace_of, worst
from llamaspec.judge.suspects import name_fault
from llamaspec.model.checkpoints.checkpoint import Checkpoint
from llamaspec.model.insight.trials import TEXT
from llamaspec.model.tokenizers.tokenizer import Tokenizer, encode_text
from llamaspec.model.weights.loading import Progress, no_progress

PART = "numbers"
NEW_TOKENS = 12  # of each answer that we compare
TOP = 5  # likeliest tokens to ask for, the most that OpenAI's completions report
SAMPLES_OF_LONG = 2  # runs in rounded arithmetic for a long prompt
PROMPTS = ("Once upon a time", TEXT[:160], "Numbers: 12, 345 and 3.14159.\nna\u00efve caf\u00e9, \u65e5\u672c")
ENDINGS = (" The ball was red, and", " A fox looked at it:", " The ball was red, and")  # of prompts with one beginning
SHORT, LONG, WARM, CHAT = "short prompts", "a long prompt", "a warm prefix", "conversations"
NEW_BEGINNING = "a new beginning"  # the first request of `WARM`
UNDECIDED = 0.1  # share of undecided positions above which numbers are unclear

Outcome = Literal["conforms", "does not conform", "no verdict"]


@dataclass(frozen=True)
class Report:
    """The result of an examination."""

    url: str
    model: str  # the checkpoint
    served: str  # the name under which the server offers it
    arithmetic: str
    findings: list[Finding]
    positions: list[Position]
    requests: int
    seconds: float
    ended: str = ""  # why the examination ended early

    @property
    def outcome(self) -> Outcome:
        verdicts = [finding.verdict for finding in self.findings]
        if "wrong" in verdicts:
            return "does not conform"
        judged = any(f.part == PART and f.verdict == "right" for f in self.findings)
        return "conforms" if judged and not self.ended else "no verdict"

    @property
    def status(self) -> int:
        """The exit status of the command."""
        return {"conforms": 0, "does not conform": 1, "no verdict": 2}[self.outcome]


@dataclass(frozen=True, eq=False)
class Examination:
    """The data that all checks of an examination use."""

    server: Server
    checkpoint: Checkpoint
    tokenizer: Tokenizer
    reader: tokens.ChatReader | None  # None: the model has no chat template
    definition: Definition
    spellings: Spellings
    longest: int  # tokens of the long prompt
    at_once: int  # requests at a time
    progress: Progress

    def trace(self, name: str, prompt: Sequence[int], answer: Answer, *, samples: int | None = None) -> Trace:
        """Read an answer, and measure how far the claimed arithmetic may move each of its numbers."""
        trace = trace_of(name, prompt, answer.first, self.spellings, self.definition)
        return explained_by(replace(trace, counted=answer.prompt_tokens), self.definition, samples=samples)

    def ids(self, text: str) -> list[int]:
        """Encode a prompt."""
        return encode_text(self.tokenizer, text)


def examine(
    server: Server,
    checkpoint: Checkpoint,
    tokenizer: Tokenizer,
    reader: tokens.ChatReader | None,
    *,
    name: str,
    arithmetic: Arithmetic,
    longest: int,
    at_once: int,
    seconds: float,
    progress: Progress = no_progress,
) -> Report:
    """Examine a server. `name` is the checkpoint's name. `reader` is None if the model has no chat template.

    The examination ends early after `seconds`, or if the server no longer answers.
    """
    began = monotonic()

    def within_time(stage: str, share: float) -> object:
        if monotonic() > began + seconds:
            raise TimeIsUpError
        return progress(stage, share)

    progress("reading weights", 0.0)
    definition = define(checkpoint, arithmetic)
    shared = (server, checkpoint, tokenizer, reader, definition, Spellings(tokenizer, checkpoint.config.vocab))
    examination = Examination(*shared, longest, at_once, within_time)
    findings: list[Finding] = []
    positions: list[Position] = []
    ended = ""
    try:
        for outcome in _checks(examination):
            if isinstance(outcome, Finding):
                findings.append(outcome)
            else:
                positions.append(outcome)
    except TimeIsUpError:
        ended = f"the time limit of {seconds:g} seconds is over"
    except NoServerError as error:
        ended = str(error)
    names = (server.url, name, server.model, str(arithmetic))
    return Report(*names, findings, positions, server.requests, monotonic() - began, ended)


def _checks(examination: Examination) -> Iterator[Finding | Position]:
    yield from _attempt(
        examination, tokens.PART, "prompts", lambda: tokens.check_texts(examination.server, examination.tokenizer)
    )
    if reader := examination.reader:
        yield from _attempt(examination, tokens.PART, "chat", lambda: tokens.check_chat(examination.server, reader))
    yield from check_numbers(examination)
    yield from protocol.check_protocol(
        examination.server, examination.definition, examination.spellings, examination.ids(protocol.PROMPT),
        at_once=examination.at_once, before=lambda check: examination.progress(f"protocol: {check}", 0.9),
    )  # fmt: skip


def _attempt(examination: Examination, part: str, check: str, findings: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    """Run checks. A request that the server does not support makes the check unclear."""
    examination.progress(f"{part}: {check}", 0.0)
    try:
        yield from findings()
    except RefusedError as refusal:
        yield Finding(part, check, "unclear", str(refusal))


def check_numbers(examination: Examination) -> Iterator[Finding | Position]:
    """Compare the server's log-probabilities with the definition, in all `GROUPS` of requests."""
    groups: dict[str, list[Trace]] = {}
    for name, request in GROUPS.items():
        examination.progress(f"numbers: {name}", 0.0)
        try:
            groups[name] = [trace for trace in request(examination) if trace.entries]
        except RefusedError as refusal:
            yield Finding(PART, name, "unclear", str(refusal))
            continue
        if not groups[name] and name in (SHORT, LONG):
            yield Finding(PART, name, "unclear", "the server reports no log-probabilities of its tokens")
    judged: dict[str, list[Position]] = {}
    odd: list[Trace] = []
    for name, traces in groups.items():
        compared = [compare(trace, examination.definition) for trace in traces]
        odd += [trace for trace, positions in zip(traces, compared, strict=True) if _is_wrong(positions)]
        judged[name] = [position for positions in compared for position in positions]
        yield from judged[name]
    wrong = {name for name, positions in judged.items() if _is_wrong(positions)}
    fault = _fault(odd, wrong, examination) if odd else None
    for name, positions in judged.items():
        if positions:
            yield _numbers(name, positions, str(examination.definition.arithmetic), fault if name in wrong else None)
            if name not in wrong:  # a wrong model chooses other tokens
                yield from _greedy(name, positions)


def _is_wrong(positions: Sequence[Position]) -> bool:
    return any(position.verdict == "not explained" for position in positions)


def _fault(odd: list[Trace], wrong: set[str], examination: Examination) -> str | None:
    miscounted = next((trace for trace in odd if trace.counted not in (None, trace.start)), None)
    if wrong == {WARM} and not miscounted and all(trace.name != NEW_BEGINNING for trace in odd):
        return "the prefix cache is stale: prompts are wrong when the server knows their beginning"
    if wrong == {CHAT} and examination.reader:
        for fault, reading in tokens.readings(examination.reader):
            examination.progress("naming the fault", 0.5)
            if all(_explains(reading(tokens.CONVERSATIONS[trace.name]), trace, examination) for trace in odd):
                return fault
    named = name_fault(
        odd, examination.checkpoint, examination.definition, examination.tokenizer.bos, progress=examination.progress
    )
    if named or not miscounted:
        return named
    return f"a prompt has {miscounted.counted} tokens, expected {miscounted.start}"


def _explains(ids: list[int] | None, trace: Trace, examination: Examination) -> bool:
    return bool(ids) and worst(compare(trace, examination.definition, ids=lambda prompt: ids or prompt)) <= EXPLAINED


def _numbers(name: str, positions: list[Position], arithmetic: str, fault: str | None) -> Finding:
    counts = {
        verdict: sum(position.verdict == verdict for position in positions)
        for verdict in ("explained", "undecided", "not explained")
    }
    worst = max(positions, key=lambda position: position.ratio)
    figures = {"positions": counts, "ratio": worst.ratio, "difference": worst.difference}
    off = f"differences up to {worst.difference:.2g} nats, {worst.ratio:.2g} times what {arithmetic} explains"
    if counts["not explained"]:
        share = f"{counts['not explained']} of {len(positions)} positions are not explained"
        return Finding(PART, name, "wrong", f"{fault}: {share}" if fault else f"{share}: {off}", figures)
    if counts["undecided"] > UNDECIDED * len(positions):
        what = f"{counts['undecided']} of {len(positions)} positions are undecided: {off}"
        return Finding(PART, name, "unclear", what, figures)
    return Finding(PART, name, "right", f"{len(positions)} positions: {off}", figures)


def _greedy(name: str, positions: list[Position]) -> Iterator[Finding]:
    if odd := [position for position in positions if not position.is_greedy]:
        worst = max(odd, key=lambda position: position.behind)
        what = f"at temperature 0, {len(odd)} of {len(positions)} tokens are not the likeliest; one is "
        yield Finding(PART, f"greedy, {name}", "wrong", f"{what}{worst.behind:.2g} nats behind")


def _short_prompts(examination: Examination) -> Iterator[Trace]:
    for i, prompt in enumerate(PROMPTS):
        ids = examination.ids(prompt)
        if len(ids) + NEW_TOKENS <= examination.checkpoint.config.context:
            yield examination.trace(f"prompt {i + 1}", ids, _greedy_answer(examination, prompt))


def _long_prompt(examination: Examination) -> Iterator[Trace]:
    length = min(examination.longest, examination.checkpoint.config.context - NEW_TOKENS)
    text, words = "", f"{TEXT} ".split(" ")
    while len(examination.ids(longer := f"{text} {' '.join(words[:5])}".strip())) <= length:
        text, words = longer, words[5:] + words[:5]
    if text:
        answer = _greedy_answer(examination, text)
        yield examination.trace("long prompt", examination.ids(text), answer, samples=SAMPLES_OF_LONG)


def _warm_prefix(examination: Examination) -> Iterator[Trace]:
    beginning = TEXT[161:360]
    for name, ending in zip((NEW_BEGINNING, "the beginning again", "the prompt again"), ENDINGS, strict=True):
        ids = examination.ids(beginning + ending)
        if len(ids) + NEW_TOKENS <= examination.checkpoint.config.context:
            answer = _greedy_answer(examination, beginning + ending)
            yield examination.trace(name, ids, answer)


def _conversations(examination: Examination) -> Iterator[Trace]:
    for name, messages in tokens.CONVERSATIONS.items():
        ids = examination.reader and examination.reader.read(messages)
        if ids and len(ids) + NEW_TOKENS <= examination.checkpoint.config.context:
            fields = {"max_tokens": NEW_TOKENS, "temperature": 0, "logprobs": True, "top_logprobs": TOP}
            yield examination.trace(name, ids, examination.server.chat(messages, **fields))


def _greedy_answer(examination: Examination, prompt: str) -> Answer:
    return examination.server.complete(prompt, max_tokens=NEW_TOKENS, temperature=0, logprobs=TOP)


GROUPS: dict[str, Callable[[Examination], Iterator[Trace]]] = {
    SHORT: _short_prompts,
    LONG: _long_prompt,
    WARM: _warm_prefix,
    CHAT: _conversations,
}
