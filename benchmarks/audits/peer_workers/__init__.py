"""Engines, one per file. Each runs in its own process, reads requests as lines of JSON and answers with lines of JSON.

An engine first prints `{"versions": {…}}`. The request `{"prefill": tokens}` times a prompt in an empty cache, up to
the next logits; the answer is `{"seconds": …}`. The request `{"decode": tokens}` times greedy decoding of that number
of tokens after an untimed prompt of 8 tokens; the answer is `{"seconds": …, "ids": […]}`. Engines other than ours run
in a separate Python, without this repository.
"""
