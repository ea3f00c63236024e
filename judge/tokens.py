"""Compares the tokens that a server reads with the model's own tokenizer and chat template.

Servers report how many tokens a prompt has (`usage.prompt_tokens`), and some have an endpoint that returns the ids. A
fault is named if it explains the counts of all prompts.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from llamaspec.judge.client import RefusedError, Server
from llamaspec.judge.findings import Finding
from llamaspec.model.chat.marked_text import MarkedText, marked, plain
from llamaspec.model.chat.template import BUILT_IN_NAMES, ChatTemplate, SpecialTokens, find_template
from llamaspec.model.checkpoints.checkpoint import CheckpointError
from llamaspec.model.tokenizers.tokenizer import Tokenizer, encode_text

PART = "tokens"
TEXTS = (
    "Once upon a time",
    "Two  spaces, a\ttab,\nand a\n\nnew paragraph.",
    "na\u00efve caf\u00e9 \u65e5\u672c\u8a9e \U0001f642",
    "1234567890 and 3.14159",
)
QUESTION, ANSWER, RULE = "Tell me a story about a fox.", "Once there was a fox.", "Answer in one short sentence."
USER = {"role": "user", "content": QUESTION}
CONVERSATIONS: dict[str, list[dict[str, str]]] = {
    "a question": [USER],
    "a question with a system message": [{"role": "system", "content": RULE}, USER],
    "a second question": [USER, {"role": "assistant", "content": ANSWER}, {"role": "user", "content": "And then?"}],
}
Messages = Sequence[Mapping[str, str]]
Reading = Callable[[Messages], list[int] | None]  # how a server may read a conversation; None: it refuses


class ChatReader(NamedTuple):
    """Renders conversations as the model's template says, and encodes them."""

    tokenizer: Tokenizer
    template: ChatTemplate

    def text(self, messages: Messages, **variables: Any) -> MarkedText | None:
        """Render a conversation, or return None if the template refuses it."""
        try:
            return self.template.render(messages, **variables)
        except CheckpointError:
            return None

    def read(
        self, messages: Messages, change: Callable[[MarkedText], str] = lambda text: text, **variables: Any
    ) -> list[int] | None:
        """Apply `change` to the text of a conversation, and encode it. Returns None if the template refuses it."""
        text = self.text(messages, **variables)
        return None if text is None else SpecialTokens(self.tokenizer).encode(change(text))


def parsed(text: str) -> MarkedText:
    """Remove the marks of quoted messages, so that names of control tokens in messages become control tokens."""
    return marked(plain(text))


def check_texts(server: Server, tokenizer: Tokenizer) -> Iterator[Finding]:
    """Check the tokens of plain prompts."""
    own = {text: encode_text(tokenizer, text) for text in TEXTS}
    counts = {text: server.complete(text, max_tokens=1, temperature=0).prompt_tokens for text in TEXTS}
    known = {text: count for text, count in counts.items() if count is not None}
    if not known:
        yield Finding(PART, "prompts", "unclear", "the server's answers have no usage.prompt_tokens")
    else:
        offsets = {text: count - len(own[text]) for text, count in known.items()}
        figures = {"expected": [len(own[text]) for text in known], "got": list(known.values())}
        yield Finding(PART, "prompts", *_verdict_of(offsets, tokenizer, own), figures)
    yield from _check_endpoint(server, own, tokenizer)
    yield from _check_control_token(server, tokenizer)


def _verdict_of(offsets: Mapping[str, int], tokenizer: Tokenizer, own: Mapping[str, list[int]]) -> tuple[Any, str]:
    if not any(offsets.values()):
        return "right", f"{len(offsets)} prompts have as many tokens as the model's tokenizer says"
    if tokenizer.bos is not None and set(offsets.values()) == {1}:
        return "wrong", "BOS is doubled: each prompt has one token more than expected"
    if tokenizer.bos is not None and set(offsets.values()) == {-1}:
        return "wrong", "BOS is missing: each prompt has one token less than expected"
    text = max(offsets, key=lambda text: abs(offsets[text]))
    expected = len(own[text])
    return "wrong", f"{text!r}: expected {expected} tokens, got {expected + offsets[text]}"


def _check_endpoint(server: Server, own: Mapping[str, list[int]], tokenizer: Tokenizer) -> Iterator[Finding]:
    for text, expected in own.items():
        actual = server.tokenize(text)
        if actual is None:
            return
        if actual != expected:
            at = next((i for i, pair in enumerate(zip(actual, expected, strict=False)) if pair[0] != pair[1]), None)
            at = min(len(actual), len(expected)) if at is None else at
            got, needed = (_spelled(ids, at, tokenizer) for ids in (actual, expected))
            what = f"{text!r}: token {at} is {got}, expected {needed}"
            yield Finding(PART, "/tokenize", "wrong", what, {"expected": expected, "got": actual})
            return
    yield Finding(PART, "/tokenize", "right", f"the ids of {len(own)} prompts are the model's")


def _spelled(ids: Sequence[int], at: int, tokenizer: Tokenizer) -> str:
    if at >= len(ids):
        return "missing"
    return f"{ids[at]} ({tokenizer.piece(ids[at])!r})" if 0 <= ids[at] < tokenizer.vocab else str(ids[at])


def _control_token(tokenizer: Tokenizer) -> str | None:
    """Return the name of a control token that becomes several tokens if it is read as text, or None."""
    return next((name for name in tokenizer.special if len(tokenizer.encode(name)) > 1), None)


def _check_control_token(server: Server, tokenizer: Tokenizer) -> Iterator[Finding]:
    """Check whether the name of a control token in a prompt is read as text. Engines differ here."""
    if not (name := _control_token(tokenizer)):
        return
    text = f"We say {name} here"
    expected = len(encode_text(tokenizer, text))
    actual = server.complete(text, max_tokens=1, temperature=0).prompt_tokens
    if actual == expected:
        yield Finding(PART, "control tokens", "right", f"{name} in a prompt is read as text")
    elif actual is not None:
        what = f"{name} in a prompt is not read as text: expected {expected} tokens, got {actual}; many engines do this"
        yield Finding(PART, "control tokens", "note", what, {"expected": expected, "got": actual})


def check_chat(server: Server, reader: ChatReader) -> Iterator[Finding]:
    """Check the tokens of conversations, and name the difference between the templates."""
    expected, actual = {}, {}
    for name, messages in CONVERSATIONS.items():
        if (ids := reader.read(messages)) is None:
            continue
        try:
            count = server.chat(messages, max_tokens=1, temperature=0).prompt_tokens
        except RefusedError as refusal:
            yield Finding(PART, "chat", "unclear", f"{name} is refused: {refusal}")
            return
        if count is not None:
            expected[name], actual[name] = len(ids), count
    if not actual:
        yield Finding(PART, "chat", "unclear", "no answer has usage.prompt_tokens")
        return
    figures = {"expected": list(expected.values()), "got": list(actual.values())}
    if actual == expected:
        yield Finding(PART, "chat", "right", f"{len(actual)} conversations have the template's tokens", figures)
    else:
        name = next(name for name in actual if actual[name] != expected[name])
        what = f"{name}: expected {expected[name]} tokens, got {actual[name]}"
        if faults := differences(actual, reader):
            what = f"{', or '.join(faults)} ({what})"
        yield Finding(PART, "chat", "wrong", what, figures)
    yield from _check_injection(server, reader)


def differences(counts: Mapping[str, int], reader: ChatReader) -> list[str]:
    """Name the wrong ways to read conversations that give the server's counts."""
    faults = []
    for fault, reading in readings(reader):
        lengths = {name: len(ids) for name in counts if (ids := reading(CONVERSATIONS[name])) is not None}
        if lengths == counts:
            faults.append(fault)
    return faults


def readings(reader: ChatReader) -> Iterator[tuple[str, Reading]]:
    """Yield wrong ways to read a conversation, each with its name."""
    tokenizer, bos = reader.tokenizer, reader.tokenizer.bos

    def changed(change: Callable[[list[int]], list[int]]) -> Reading:
        return lambda messages: None if (ids := reader.read(messages)) is None else change(ids)

    def texts(change: Callable[[str], str]) -> Reading:
        return lambda messages: reader.read(messages, lambda text: change(plain(text)))

    if bos is not None:
        yield "BOS is doubled", changed(lambda ids: [bos, *ids])
        yield "BOS is missing", changed(lambda ids: ids[ids[:1] == [bos] :])
    yield "the system message is dropped", lambda messages: reader.read([m for m in messages if m["role"] != "system"])
    yield "the system message is put into the question", lambda messages: reader.read(_merged(messages))
    yield "only the last message is read", lambda messages: reader.read(messages[-1:])
    yield (
        "the prompt that begins the answer is missing",
        lambda messages: reader.read(messages, add_generation_prompt=False),
    )
    yield "the last newline of the prompt is missing", texts(lambda text: text.removesuffix("\n"))
    yield "a newline is added to the prompt", texts(lambda text: text + "\n")
    yield "the newlines of the template are missing", texts(lambda text: text.replace("\n", ""))
    for switch in ("enable_thinking", "thinking"):
        for value in (False, True) if reader.template.reads(switch) else ():
            variables: dict[str, Any] = {switch: value}
            yield (
                f"the template runs with {switch}={value}",
                lambda messages, variables=variables: reader.read(messages, **variables),
            )
    for name in BUILT_IN_NAMES:
        template = replace(find_template(tokenizer, template=name), workers=reader.template.workers)
        candidate = reader._replace(template=template)
        yield f"the template is {name}'s", candidate.read
    yield (
        "the messages are joined without a template",
        lambda messages: encode_text(tokenizer, "\n".join(message["content"] for message in messages)),
    )


def _merged(messages: Messages) -> Messages:
    if messages[0]["role"] != "system":
        return messages
    system, question, *later = messages
    return [{**question, "content": f"{system['content']}\n\n{question['content']}"}, *later]


def _check_injection(server: Server, reader: ChatReader) -> Iterator[Finding]:
    """Check whether a user can write control tokens."""
    if not (name := _control_token(reader.tokenizer)):
        return
    messages = [{"role": "user", "content": f"We say {name} here."}]
    text, control = reader.read(messages), reader.read(messages, parsed)
    actual = server.chat(messages, max_tokens=1, temperature=0).prompt_tokens
    if text is None or control is None or actual is None or len(text) == len(control):
        return
    if actual == len(text):
        yield Finding(PART, "injection", "right", f"{name} in a message is read as text")
    elif actual == len(control):
        what = f"{name} in a user's message becomes a control token, so users can write turns; many engines do this"
        yield Finding(PART, "injection", "note", what)
