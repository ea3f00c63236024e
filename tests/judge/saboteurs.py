"""Servers that are wrong in one known way, and the words with which `conform` must name the fault."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

import numpy as np

from llamaspec.judge.arithmetic import UNITS, Rounded, RoundedConfig, arithmetic, cache_class, define, mapped
from llamaspec.judge.conform import CHAT, LONG, SHORT, WARM
from llamaspec.judge.suspects import suspects
from llamaspec.judge.tokens import parsed, readings
from llamaspec.model.tokenizers.tokenizer import encode_text
from llamaspec.reference.config import Config
from llamaspec.reference.llama import Cache, LayerCache, empty_cache
from tests.judge.small_server import READER, Engine, checkpoint, definition
from tests.serving.serving_site import TOKENIZER


class Saboteur(NamedTuple):
    """A wrong server."""

    part: str  # of the examination: tokens, numbers or protocol
    engine: Callable[[], Engine]
    words: str  # in the message of a finding
    verdict: str = "wrong"
    groups: tuple[str, ...] = (SHORT,)  # the requests, or the checks of the protocol, that the test makes


class DoublesBos(Engine):
    def text_ids(self, text: str) -> list[int]:
        return [1, *super().text_ids(text)]


class LacksBos(Engine):
    def text_ids(self, text: str) -> list[int]:
        return super().text_ids(text)[1:]


class DoublesBosInSecret(DoublesBos):
    """Counts the tokens of a prompt, and then adds a second BOS."""

    def usage(self, prompt: int, completion: int) -> dict[str, int]:
        return super().usage(prompt - 1, completion)


class ParsesPrompts(Engine):
    def text_ids(self, text: str) -> list[int]:
        before, name, after = text.partition("<s>")
        return [*super().text_ids(before), *([1, *encode_text(TOKENIZER, after, bos=False)] if name else [])]


class OtherWords(Engine):
    def text_ids(self, text: str) -> list[int]:
        return super().text_ids(" ".join(text.split()))


class ParsesMessages(Engine):
    def chat_ids(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        ids = READER.read(messages, parsed)
        assert ids is not None
        return ids


def reads_chats(fault: str) -> Callable[[], Engine]:
    """Make a server that renders conversations wrongly. `fault` names one of the wrong ways in `readings`."""
    reading = dict(readings(READER))[fault]

    class Misreads(Engine):
        def chat_ids(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
            ids = reading(messages)
            assert ids is not None
            return ids

    return Misreads


def computes(fault: str) -> Callable[[], Engine]:
    """Make a server that computes the model wrongly. `fault` names one of the faults in `suspects`."""

    def build() -> Engine:
        engine = Engine()
        engine.definition = next(
            suspect for suspect in suspects(definition(), "gguf-v3", 1) if suspect.what == fault
        ).definition
        return engine

    return build


class RoundsRandomly(Engine):
    """Computes in coarser arithmetic than it claims."""

    def __init__(self, name: str, cache: str | None = None):
        super().__init__()
        claimed = arithmetic(name, cache)
        rng = np.random.default_rng(9)
        rounded = define(checkpoint(), claimed)
        values = {field.name: getattr(rounded.config, field.name) for field in fields(Config)}
        params = mapped(rounded.rounded, lambda weights: Rounded.of(weights, UNITS[claimed.dtype], rng))
        self.definition = replace(rounded, params=params, config=RoundedConfig(**values, rng=rng))
        self._cache = cache_class(claimed.cache)

    def start(self, ids: Sequence[int]) -> tuple[np.ndarray, Any]:
        return self.extend([self._cache(*layer) for layer in empty_cache(self.definition.config)], ids)

    def rounded(self, logits: np.ndarray) -> np.ndarray:
        return super().rounded(np.asarray(logits))


class StaleCache(Engine):
    """Keeps the keys and values of the latest prompt, and reuses one token more than the prompts have in common."""

    def __init__(self) -> None:
        super().__init__()
        self._ids: list[int] = []
        self._cached: Cache = []

    def start(self, ids: Sequence[int]) -> tuple[np.ndarray, Any]:
        pairs = zip(ids, self._ids, strict=False)
        common = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ids), len(self._ids)))
        reused = min(common + 1, len(ids) - 1, len(self._ids)) if common > 9 else 0
        if reused == 0:
            logits, cache = super().start(ids)
        else:
            logits, cache = self.extend([LayerCache(k[:reused], v[:reused]) for k, v in self._cached], ids[reused:])
        self._ids, self._cached = list(ids), cache
        return logits, cache


class LateForgetfulness(Engine):
    """Forgets the beginning of prompts with more than 40 tokens."""

    def start(self, ids: Sequence[int]) -> tuple[np.ndarray, Any]:
        return super().start(ids[-40:])


class ReportsTopK(Engine):
    """Reports log-probabilities of the 20 likeliest tokens only, as if there were no others."""

    def reported(self, logits: np.ndarray, body: Mapping[str, Any]) -> np.ndarray:
        filtered = np.where(logits >= np.sort(logits)[-20], logits, -9999.0)
        return filtered - np.logaddexp.reduce(filtered)


class Draws(Engine):
    """Draws from a different distribution than a request asks for."""

    def __init__(self, **options: float):
        super().__init__()
        self._options = options

    def chances(self, logits: np.ndarray, body: Mapping[str, Any]) -> np.ndarray:
        return super().chances(logits, body if body.get("temperature") == 0 else {**body, **self._options})


class DrawsAtZero(Engine):
    def chances(self, logits: np.ndarray, body: Mapping[str, Any]) -> np.ndarray:
        return super().chances(logits, {**body, "temperature": body["temperature"] or 0.9})


class HeatedNumbers(Engine):
    def reported(self, logits: np.ndarray, body: Mapping[str, Any]) -> np.ndarray:
        return super().reported(logits / (body["temperature"] or 1.0), body)


class PositiveNumbers(Engine):
    """Reports logits as log-probabilities."""

    def reported(self, logits: np.ndarray, body: Mapping[str, Any]) -> np.ndarray:
        return logits - logits.mean()


class LosesSeed(Engine):
    def seed_of(self, body: Mapping[str, Any], index: int) -> Any:
        return None


class OneSeed(Engine):
    def seed_of(self, body: Mapping[str, Any], index: int) -> Any:
        return 0


class OneChoice(Engine):
    def count_of(self, body: Mapping[str, Any]) -> int:
        return 1


class NoBias(Engine):
    def biased(self, logits: np.ndarray, body: Mapping[str, Any]) -> np.ndarray:
        return logits


class LeaksStop(Engine):
    def cut(self, text: str, stop: str) -> str:
        return text[: text.index(stop) + len(stop)]


class IgnoresStop(Engine):
    def answer(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return super().answer(path, {**body, "stop": []})


class OneMore(Engine):
    def length_of(self, body: Mapping[str, Any]) -> int:
        return super().length_of(body) + 1


class Miscounts(Engine):
    def usage(self, prompt: int, completion: int) -> dict[str, int]:
        return super().usage(prompt, completion + 3)


class LosesChunks(Engine):
    def chunks(self, text: str) -> list[str]:
        return super().chunks(text)[:-1]


class MixesRequests(Engine):
    """Puts the previous request's prompt in front of each prompt."""

    def __init__(self) -> None:
        super().__init__()
        self._prompts: list[str] = []

    def text_ids(self, text: str) -> list[int]:
        self._prompts.append(text)
        return super().text_ids(" ".join(self._prompts[-2:]))


def by_fault(part: str, make: Callable[[str], Callable[[], Engine]], *faults: str) -> dict[str, Saboteur]:
    """Make a saboteur for each of `faults`, which are also the words that `conform` must use."""
    return {fault: Saboteur(part, make(fault), fault) for fault in faults}


SABOTEURS = {
    "BOS doubled": Saboteur("tokens", DoublesBos, "BOS is doubled"),
    "BOS missing": Saboteur("tokens", LacksBos, "BOS is missing"),
    "BOS doubled, and not counted": Saboteur("numbers", DoublesBosInSecret, "BOS is doubled"),
    "control tokens in prompts": Saboteur("tokens", ParsesPrompts, "is not read as text", "note"),
    "white space normalized": Saboteur("tokens", OtherWords, "new paragraph.': expected"),
    "control tokens in messages": Saboteur("tokens", ParsesMessages, "becomes a control token", "note"),
    **by_fault(
        "tokens",
        reads_chats,
        "the system message is dropped",
        "only the last message is read",
        "the messages are joined without a template",
        "the template is llama2's",
    ),
    **by_fault(
        "numbers",
        computes,
        "RoPE pairs other features of q and k than the model does",
        "the weights of norms are off by 1",
        "the embedding is used as the head",
        "eps is 1e-05, and the model's is 1e-06",
        "theta is 10000, and the model's is 100000",
        "the model's scaling is ignored",
        "layer 1 is skipped",
        "the weights are rounded to Q8_0",
    ),
    "no window": Saboteur(
        "numbers", computes("the model's windows is ignored"), "the model's windows is ignored", groups=(LONG,)
    ),
    "no prompt of the answer": Saboteur(
        "numbers",
        reads_chats("the prompt that begins the answer is missing"),
        "the prompt that begins the answer is missing",
        groups=(CHAT,),
    ),
    "bfloat16 claimed as float32": Saboteur(
        "numbers", lambda: RoundsRandomly("bfloat16"), "the server computes in bfloat16, not in float32"
    ),
    "float16 claimed as float32": Saboteur(
        "numbers", lambda: RoundsRandomly("float16"), "the server computes in float16, not in float32"
    ),
    "an int8 cache": Saboteur(
        "numbers", lambda: RoundsRandomly("float32", "int8"), "computes in float32 with a KV cache in int8"
    ),
    "a stale cache": Saboteur("numbers", StaleCache, "the prefix cache is stale", groups=(SHORT, WARM)),
    "long prompts cut": Saboteur("numbers", LateForgetfulness, "positions are not explained", groups=(LONG,)),
    "top-k": Saboteur(
        "protocol", lambda: Draws(top_k=20), "only the 20 likeliest tokens are drawn", groups=("sampling",)
    ),
    "top-p": Saboteur(
        "protocol", lambda: Draws(top_p=0.8), "unlikely tokens are never drawn (top-p 0.8)", groups=("sampling",)
    ),
    "temperature ignored": Saboteur(
        "protocol", lambda: Draws(temperature=1.0), "the temperature is ignored, and 1 is", groups=("sampling",)
    ),
    "always greedy": Saboteur(
        "protocol", lambda: Draws(temperature=0.0), "the likeliest token is chosen", groups=("sampling",)
    ),
    "temperature 0 draws": Saboteur(
        "protocol", DrawsAtZero, "at temperature 0 gives another text", groups=("temperature 0",)
    ),
    "log-probabilities after the temperature": Saboteur(
        "protocol", HeatedNumbers, "those after the temperature", groups=("sampling",)
    ),
    "logits as log-probabilities": Saboteur("protocol", PositiveNumbers, "add up to", groups=("logprobs",)),
    "seed ignored": Saboteur("protocol", LosesSeed, "the same seed gives different texts", groups=("seed",)),
    "one seed for all": Saboteur("protocol", OneSeed, "different seeds give the same text", groups=("seed",)),
    "n ignored": Saboteur("protocol", OneChoice, "n is ignored", groups=("n",)),
    "logit_bias ignored": Saboteur("protocol", NoBias, "logit_bias is ignored", groups=("logit_bias",)),
    "stop string leaked": Saboteur("protocol", LeaksStop, "the stop string is part of the answer", groups=("stop",)),
    "stop string ignored": Saboteur("protocol", IgnoresStop, "the stop string is ignored", groups=("stop",)),
    "one token more": Saboteur(
        "protocol", OneMore, "max_tokens is 1, but the answer has 2 tokens", groups=("max_tokens",)
    ),
    "usage wrong": Saboteur("protocol", Miscounts, "completion_tokens is", groups=("usage",)),
    "end of a stream lost": Saboteur("protocol", LosesChunks, "a streamed answer is another text", groups=("stream",)),
    "requests mixed": Saboteur("protocol", MixesRequests, "more gives another text", groups=("company",)),
    "top-k in log-probabilities": Saboteur("numbers", ReportsTopK, "as after top-k or top-p"),
}
