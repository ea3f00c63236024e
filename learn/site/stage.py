"""Writes the source of the site: a folder of Markdown pages, from the documents and the files that they link to.

The folder has the layout of the repository, so a link only gets a different ending. A document keeps its name, and any
other file, such as `reference/rope.py`, becomes the page `reference/rope.py.md`.
"""

import ast
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from llamaspec.learn.site import beside, line_links

LINK = re.compile(r"(!?\[[^\]]*\]\()([^)\s]+)(\))")
FENCE = re.compile(r"(^```.*?^```$)", re.M | re.S)
COPIED = (".svg", ".png")
ASSETS = Path(__file__).parent / "assets"
FIRST = "README.md"
# We put the SVG of an animated drawing into the page itself. On the page, a checkbox can stop it without a script, and
# it stands still for readers who prefer reduced motion: browsers do not apply that setting to images.
MOVING = ("docs/images/engine.svg",)
STOP = '<input type="checkbox" id="stop"> <label for="stop">Stop</label>'
# In `make docs`, `llamaspec xray` writes the page to which this page links.
XRAY = """# A text in the model

The built-in model reads a text: every token, block and op, with its equation, its code and its numbers.

[![The tower of blocks](docs/images/xray-tower.png)](xray/index.html)

[Open the page](xray/index.html)
"""
# In `make docs`, `learn.site.tab` writes the page to which this page links; it may only say why it cannot run.
TAB = """# In a browser tab

Change a line of a definition, and run it in the browser: the built-in model tells a story from your definition, and
`verify` shows the inputs for which it is wrong. All 47 exercises of the lab work there too. The page has NumPy and the
specification in about 15 MB. It needs no server, and no network after it has loaded; it takes some 10 seconds to start.

<a href="tab/index.html">Open the page</a>

It runs in [Pyodide](https://pyodide.org), Python for browsers. NumPy there has no BLAS, so the story comes a few times
more slowly than from `llamaspec story --backend reference`. Only float32 can be verified: the package with bfloat16,
ml_dtypes, does not exist for Pyodide in a registry.

## Where its NumPy comes from

The npm package of Pyodide has no NumPy, and PyPI has no NumPy for Pyodide. The npm package `@bentopdf/pymupdf-wasm`
0.11.16, which others made, has a wheel of NumPy 2.2.5, built with Pyodide's tools. `make docs` takes this wheel and no
other file of the package, and only if the wheel's SHA-256 is the one in `.ci/tab.txt`.

On 2026-11-29 we compared the wheel with NumPy's own wheel of this version for Linux, from PyPI. Of its 178 Python
files, 175 are equal, byte for byte. The others:

- `numpy/__config__.py` has the compiler and the processor for which NumPy was built, and no BLAS.
- `numpy/testing/_private/utils.py` lacks one function, and `numpy/conftest.py` imports this function from
  `numpy/_core/tests`, where Pyodide's build moved it, since its wheel has no tests. The page does not contain
  `conftest.py`.

We cannot check the 13 compiled files, since PyPI has none for WebAssembly to compare them with. We have seen that they
import functions of C, of C++ and of Python, and none of JavaScript. They run only in the browser's sandbox: in a worker
of the page, for which the page's security policy refuses every connection. The page has NumPy's license, and the
licenses of the other packages.
"""
BOOSTS = {"docs/glossary.md": 20, "docs/gpu-words.md": 10}  # a word's page comes before pages that use it often
SECTIONS = {  # the other pages; the pages of reference/ come after the first page of "Read"
    "Start": ["docs/README.md", "docs/first-steps.ipynb", "docs/models.md", "docs/starting.md"],
    "Read": [
        *("docs/reading.md", "docs/glossary.md", "docs/questions.md", "docs/positions.md"),
        *("docs/quantizers-compared.md", "docs/gallery.md", "docs/others.md"),
    ],
    "Verify": [
        *("docs/verify-your-kernel.md", "docs/verify-triton.md", "docs/contracts.md", "docs/mutants.md"),
        *("docs/sizes.md", "docs/cheats.md", "docs/proofs.md", "docs/conform.md", "docs/found.md"),
        *("docs/algebra.md", "docs/found/kernels.md"),
    ],
    "Run": [
        *("docs/quantization.md", "docs/serving.md", "docs/parallel.md", "docs/engine.md", "docs/onnx.md"),
        "docs/training.md",
    ],
    "Speed": [
        *("docs/performance-cpu.md", "docs/performance-gpu.md", "docs/lessons-gpu.md"),
        *("docs/gpu-words.md", "docs/sass.md"),
    ],
    "Project": [
        *("CONTRIBUTING.md", "CHANGELOG.md", "docs/decisions/README.md", "docs/decisions/reference.md"),
        *("docs/decisions/model.md", "docs/decisions/quantization.md", "docs/decisions/kernels.md"),
        "docs/decisions/commands.md",
    ],
}


def stage(root: Path, out: Path) -> list[str]:
    """Empty `out`, write the source of the site of the repository `root` into it, and return the list of its pages.

    Raises FileNotFoundError for a missing page of SECTIONS, and ValueError for a document that SECTIONS does not name.
    """
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(ASSETS, out / "assets", ignore=shutil.ignore_patterns("*.yml"))
    order = [FIRST, *(path for section in SECTIONS.values() for path in section)]
    documents = {
        path.relative_to(root).as_posix() for ext in ("md", "ipynb") for path in (root / "docs").rglob(f"*.{ext}")
    }
    if missing := documents - set(order):
        raise ValueError(f"SECTIONS in learn/site/stage.py does not name these documents: {', '.join(sorted(missing))}")
    definitions = reading_order(root)
    todo, staged = [*order, "reference", *definitions], set()
    while todo:
        path = todo.pop()
        if path not in staged:
            staged.add(path)
            todo += _write(root, path, out)
    (out / "xray.md").write_text(XRAY, encoding="utf-8")
    (out / "tab.md").write_text(TAB, encoding="utf-8")
    _configure(out, definitions)
    return sorted(staged)


def reading_order(root: Path) -> list[str]:
    """Return the files of reference/ in the order of docs/reading.md.

    A folder in that document stands for its files, sorted.
    """
    text = (root / "docs/reading.md").read_text(encoding="utf-8")
    named = [target.removeprefix("../") for _, target, _ in LINK.findall(text) if target.startswith("../reference/")]
    order: list[str] = []
    for path in named:
        folder = root / path
        order += [path] if folder.is_file() else [f"{path}{file.name}" for file in sorted(folder.glob("*.py"))]
    # A file that docs/reading.md names takes the place of its name, not the place of its folder.
    files = [path for path in named if (root / path).is_file()]
    first = dict.fromkeys(files[: files.index("reference/quantizers/blocks.py")] if files else [])
    return [path for path in dict.fromkeys([*first, *order]) if not path.endswith("__init__.py")]


def target_of(path: str) -> str:
    """Return the path, within the site, of the page for a file or folder of the repository.

    >>> target_of("reference/rope.py"), target_of("docs/reading.md"), target_of("model/families")
    ('reference/rope.py.md', 'docs/reading.md', 'model/families/index.md')
    """
    if path.endswith((".md", *COPIED)):
        return path
    if "." not in path.rpartition("/")[2] and path != "LICENSE":
        return f"{path}/index.md"
    return f"{path}.md"


def _write(root: Path, path: str, out: Path) -> list[str]:
    """Write the page of one path, and return the paths to which it links."""
    file, target = root / path, out / target_of(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    if path.endswith(COPIED):
        shutil.copy(file, target)
        return []
    linked: list[str] = []
    if file.is_dir():
        text = _listing(root, path, linked)
    elif path.endswith((".md", ".ipynb")):
        text = file.read_text(encoding="utf-8") if path.endswith(".ipynb") else line_links.renumbered(file, root)
        text = _redirected(_notebook(text) if path.endswith(".ipynb") else text, root, path, linked)
        text = _front_matter(path) + text
    elif path.startswith("reference/"):
        text = beside.page(file.read_text(encoding="utf-8"), file.stem, _names(root, path))
    else:
        text = _listed(file.read_text(encoding="utf-8"), path)
    target.write_text(text, encoding="utf-8")
    return linked


def _front_matter(path: str) -> str:
    """Return the settings of a document's page: what it hides, and how much its words count in the site's search."""
    settings = "hide: [navigation]\n" if path == FIRST else ""
    boost = 0.2 if path.startswith(("benchmarks/", "model/")) else BOOSTS.get(path)
    settings += f"search:\n  boost: {boost}\n" if boost else ""
    return f"---\n{settings}---\n\n" if settings else ""


def _redirected(text: str, root: Path, path: str, linked: list[str]) -> str:
    """Change the links of a document to pages of the site, and add their targets to `linked`."""

    def redirect(match: re.Match) -> str:
        address, _, anchor = match[2].partition("#")
        if "://" in address or not address:
            return match[0]
        goal = os.path.normpath(os.path.join(os.path.dirname(path), address))
        if (root / goal / "README.md").is_file():
            goal = f"{goal}/README.md"
        linked.append(goal)
        if goal in MOVING:
            drawing = (root / goal).read_text(encoding="utf-8").strip()
            return f'<div class="moving" data-search-exclude>\n{STOP}\n{drawing}\n</div>'
        if re.fullmatch(r"L\d+", anchor):
            anchor = line_links.anchor((root / goal).read_text(encoding="utf-8"), goal, int(anchor[1:]))
        leads = os.path.relpath(target_of(goal), os.path.dirname(path) or ".")
        return f"{match[1]}{leads}{'#' * bool(anchor)}{anchor}{match[3]}"

    return _outside_of_code(text, lambda part: LINK.sub(redirect, part))


def _outside_of_code(text: str, change: Callable[[str], str]) -> str:
    return "".join(part if part.startswith("```") else change(part) for part in FENCE.split(text))


def _names(root: Path, path: str) -> dict[str, str]:
    """For each name that docstrings use for a file of reference/, return the address of the file's page.

    Addresses are relative to the page of `path`.
    """
    here, names = os.path.dirname(path), {}
    for file in sorted((root / "reference").rglob("*.py")):
        goal = file.relative_to(root).as_posix()
        if goal != path and file.stem != "__init__":
            leads = os.path.relpath(f"{goal}.html", here)
            names[goal] = names[goal.removesuffix(".py").replace("/", ".")] = leads
            if os.path.dirname(goal) == here:
                names[file.stem] = leads
    return names


def _listing(root: Path, path: str, linked: list[str]) -> str:
    """Return a page that lists the files of a folder, each with the first line of its docstring."""
    init = root / path / "__init__.py"
    source = init.read_text(encoding="utf-8") if init.is_file() else ""
    rows = []
    for file in sorted((root / path).glob("*.py")):
        if file.stem != "__init__":
            docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
            rows.append(f"| [{file.stem}]({file.name}.md) | {_plain(docstring.partition(chr(10))[0])} |")
            linked.append(f"{path}/{file.name}")
    head = beside.page(source, path, _names(root, f"{path}/__init__.py")) if source else f"# {path}\n"
    return head + "\n| file | what it holds |\n|---|---|\n" + "\n".join(rows) + "\n"


def _plain(text: str) -> str:
    """Escape the characters that have a special meaning in Markdown."""
    return re.sub(r"([\\*_|<>\[\]])", r"\\\1", text)


def _listed(text: str, path: str) -> str:
    language = {"py": "python"}.get(path.rpartition(".")[2], path.rpartition(".")[2])
    return f"---\ntitle: {path}\nsearch:\n  exclude: true\n---\n\n# {path}\n\n~~~~{language}\n{text.rstrip()}\n~~~~\n"


def _notebook(text: str) -> str:
    """Write the cells of a notebook in Markdown, each with its output after its code."""
    parts = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
        else:
            parts.append(f"```python\n{source}\n```")
            for output in cell["outputs"]:
                printed = output.get("text") or output["data"]["text/plain"]
                parts.append(f"```text\n{''.join(printed).rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def _configure(out: Path, definitions: list[str]) -> None:
    """Write mkdocs.yml from the settings in assets/ and the order of the pages."""
    lines = [(ASSETS / "mkdocs.yml").read_text(encoding="utf-8"), "nav:", f"  - {target_of(FIRST)}"]
    for section, paths in SECTIONS.items():
        lines.append(f"  - {section}:")
        lines += [f"      - {target_of(path)}" for path in paths[: 1 if section == "Read" else None]]
        if section == "Read":
            lines += ["      - reference:", "          - reference/index.md"]
            lines += [f"          - {target_of(path)}" for path in definitions if path.count("/") == 1]
            for folder in dict.fromkeys(path.split("/")[1] for path in definitions if path.count("/") == 2):
                lines += [f"          - {folder}:", f"              - reference/{folder}/index.md"]
                lines += [
                    f"              - {target_of(p)}" for p in definitions if p.startswith(f"reference/{folder}/")
                ]
            lines += [f"      - {target_of(path)}" for path in paths[1:]]
            lines += ["      - xray.md", "      - tab.md"]
    (out.parent / "mkdocs.yml").write_text("\n".join(lines) + "\n", encoding="utf-8")
