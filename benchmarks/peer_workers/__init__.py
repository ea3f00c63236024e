"""One engine a file, each a process of its own that answers a line of JSON with a line of JSON.

Asked `{"prefill": tokens}` it reads a prompt into an empty cache, up to the logits that follow; asked `{"decode":
tokens}` it draws so many, greedily, after a prompt of 8, which is not timed. It answers `{"seconds": …}`, after
decoding `{"seconds": …, "ids": […]}`; before anything else, `{"versions": {…}}`. The other engines' files are run by
another Python, which has none of this repository.
"""
