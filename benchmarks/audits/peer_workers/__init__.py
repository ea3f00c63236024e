"""Engines, one per file. Each runs in its own process, and answers a line of JSON with a line of JSON.

An engine first prints `{"versions": {…}}`. On `{"prefill": tokens}` it reads a prompt into an empty cache, up to the
next logits, and answers `{"seconds": …}`. On `{"decode": tokens}` it draws that number of tokens greedily, after a
prompt of 8 that is not timed, and answers `{"seconds": …, "ids": […]}`. Another Python, without this repository, runs
the files of the other engines.
"""
