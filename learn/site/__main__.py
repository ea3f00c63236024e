"""Make the source of the site or its page with Python, check the built site, or renumber links to lines.

python -m llamaspec.learn.site stage FOLDER    write FOLDER/mkdocs.yml and FOLDER/source
python -m llamaspec.learn.site tab FOLDER      write FOLDER/tab, the page that runs Python
python -m llamaspec.learn.site check FOLDER    exit with 1 if an address in FOLDER/html has no target
python -m llamaspec.learn.site lines           renumber the links of docs/ to lines of source files
"""

import sys
from pathlib import Path

from llamaspec.learn.site.crawl import faults
from llamaspec.learn.site.line_links import renumbered
from llamaspec.learn.site.stage import stage
from llamaspec.learn.site.tab.pack import write_page

ROOT = Path(__file__).parents[3]


def main(arguments: list[str]) -> int:
    """Run the command that the arguments name, and return the exit status."""
    match arguments:
        case ["stage", folder]:
            stage(ROOT, Path(folder) / "source")
            return 0
        case ["tab", folder]:
            print(write_page(ROOT, Path(folder) / "tab"), file=sys.stderr)
            return 0
        case ["lines"]:
            for document in sorted((ROOT / "docs").glob("*.md")):
                document.write_text(renumbered(document, ROOT), encoding="utf-8")
            return 0
        case ["check", folder]:
            problems = faults(Path(folder) / "html")
            print("\n".join(problems) or f"every address has a target: {Path(folder) / 'html/index.html'}")
            return int(bool(problems))
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
