"""Mutants of speculation: each has a bug that other engines had in theirs."""

from inspect import unwrap

from llamaspec.model.forward import verify
from llamaspec.model.generation import Generation
from llamaspec.model.running.session import Session
from llamaspec.verify.mutant import implementation

VERIFY = implementation(
    unwrap(verify),  # without the check of shapes around it
    """
the token after an accepted draft is dropped
    - return drawn, steps, DecodeState
    + return drawn, jnp.maximum(steps - 1, 1), DecodeState
the cache is not rolled back after a rejected token
    - Cache(now.layers, cache.lengths + steps)
    + Cache(now.layers, cache.lengths + count + 1)
the newest token is counted as cached
    - Cache(now.layers, cache.lengths + steps)
    + Cache(now.layers, cache.lengths + steps + 1)
positions of random numbers are off by one
    - position = cache.lengths + step + 1
    + position = cache.lengths + step
all tokens of a draft are drawn with one random number
    - position = cache.lengths + step + 1
    + position = cache.lengths + 1
penalties count tokens of the draft before they are accepted
    - jnp.zeros_like(tokens), text.seen, text.done
    + jnp.zeros_like(tokens), text.seen | jnp.any(draft[:, None] == ids, axis=0), text.done
penalties do not count accepted tokens
    - seen, done = _updated(seen, done, tokens, ids, stops)
    + _, done = _updated(seen, done, tokens, ids, stops)
a stop token inside the draft does not end the text
    - & ~done[0]
    + & True
a stop token inside the draft is not remembered
    - seen, done = _updated(seen, done, tokens, ids, stops)
    + seen, _ = _updated(seen, done, tokens, ids, stops)
the draft is accepted unseen
    - & (tokens[0] == expected)
    + & True
a token is compared with the draft's next token
    - jnp.minimum(step, len(draft) - 1)
    + jnp.minimum(step + 1, len(draft) - 1)
the padding of a short draft is accepted
    - accepted = (step < count)
    + accepted = (step < len(draft))
the draft's own token is kept in place of the one that was drawn
    - drawn = lax.dynamic_update_slice(drawn, tokens, (step,))
    + drawn = lax.dynamic_update_slice(drawn, jnp.where(step < count, tokens * 0 + draft[step], tokens), (step,))
the logits of the next position are used
    - lax.dynamic_slice_in_dim(logits, step, 1)
    + lax.dynamic_slice_in_dim(logits, step + 1, 1)
keys and values of the draft are lost
    - Cache(now.layers, cache.lengths + steps)
    + Cache(cache.layers, cache.lengths + steps)
the next draft begins after the old newest token
    - DecodeState(newest, seen, done)
    + DecodeState(text.tokens, seen, done)
""",
)
SESSION = implementation(
    Session,
    """
a draft runs past the end of the context
    - speculation.draft(min(remaining, room) - 1)
    + speculation.draft(remaining - 1)
a draft runs past max_new_tokens
    - speculation.draft(min(remaining, room) - 1)
    + speculation.draft(room - 1)
no room is left for the token after the draft
    - speculation.draft(min(remaining, room) - 1)
    + speculation.draft(min(remaining, room))
rejected tokens count as text in the cache
    - [*ids, token, *drawn[:-1]], beyond
    + [*ids, token, *(draft or drawn[:-1])], beyond
the token after the draft is not fed next
    - token, remaining = drawn[-1], remaining
    + token, remaining = (draft or drawn)[-1], remaining
""",
)
GENERATION = implementation(
    Generation,
    """
a stop string is only noticed at the end of a draft
    - if self._text.stopped:
    -                     self.finish_reason
    + if self._text.stopped and i == len(drawn) - 1:
    +                     self.finish_reason
""",
)
