"""Write gguf_stories.json: stories that llama.cpp generates from the built-in model in each GGUF type that we write.

Run it from the root of the repository. In the project's environment,

    python -m tests.goldens.make_gguf_stories write FOLDER

writes the files. In an environment with llama.cpp (Python 3.11),

    pip install numpy llama-cpp-python
    python -m tests.goldens.make_gguf_stories read FOLDER

lets llama.cpp continue two beginnings of a story. In every type, each token of these continuations is clearly more
likely than any other token, so rounding activations does not change them. The tests write the files again, check their
hashes, and compare the stories.
"""

import hashlib
import json
import platform
import sys
from pathlib import Path

from tests.goldens.make_gguf import WRITTEN, Model

STORY = """\
Once upon a time, there was a little rabbit named Hazel. She lived in a pretty village. One day, her grandmother \
gave Hazel a seed. Hazel wanted to grow a fine rose. She planted the seed by the fence. Every day she looked, but \
there was not even a leaf. "Oh no!" cried Hazel. She was upset. Then a friendly snail came along. "Do not"""
PLACES = ('along. "Do', '"Do not')
COUNT = 22  # tokens after each place
CLEAR = 0.25  # smallest lead of each chosen logit over the next


def prompts() -> list[str]:
    return [STORY[: STORY.index(place) + len(place)] for place in PLACES]


def write_story(path: Path, type: str) -> str:
    """Write the built-in model with its matrices in `type`, and return the file's hash."""
    from llamaspec.model.checkpoints import open_checkpoint
    from llamaspec.model.convert import convert

    dtype, scheme = (type, None) if type in ("float32", "float16", "bfloat16") else (None, type)
    convert(open_checkpoint("stories"), path, to="gguf", dtype=dtype, quantize=scheme)
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write(folder: Path) -> None:
    folder.mkdir(parents=True)
    for type in WRITTEN:
        write_story(folder / f"{type}.gguf", type)


def read(folder: Path) -> None:
    from importlib import metadata

    versions = {"python": platform.python_version(), "llama_cpp_python": metadata.version("llama_cpp_python")}
    stories = {}
    for type in WRITTEN:
        path = folder / f"{type}.gguf"
        model, texts = Model(path), []
        for prompt in prompts():
            ids, margin = model.greedy(prompt, COUNT)
            assert margin > CLEAR, (type, prompt[-30:], margin)
            texts.append(model.text(ids)[len(" " + prompt) :])
        stories[type] = {"sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "texts": texts}
    golden = {"made": versions, "stories": stories}
    (Path(__file__).parent / "gguf_stories.json").write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    {"write": write, "read": read}[sys.argv[1]](Path(sys.argv[2]))
