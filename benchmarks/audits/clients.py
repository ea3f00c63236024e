"""Uses our server through the clients of other projects, and reports which of their calls work.

python -m llamaspec.benchmarks.audits.clients [--python PYTHON] [--node FOLDER]

`--python` names a Python with openai, litellm, langchain-openai and pydantic-ai-slim. `--node` names a folder in which
npm has installed openai, ai, @ai-sdk/openai-compatible and zod. The server serves the built-in model with a chat
template that knows tools. The model is too small to choose a tool, so calls are forced; grammars make them valid.
Prints a Markdown table, and exits with 1 if a check fails. The programs are in `client_workers`.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import click

from llamaspec.benchmarks.suites.serve_suite import our_command, served

WORKERS = Path(__file__).parent / "client_workers"
MODEL = "stories"
SECONDS = 300  # for all checks of one client
TEMPLATE = """\
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- for message in messages %}
    {{- message.role + ': ' + (message.content or '') }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson }}
        {{- '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '\\n' }}
{%- endfor %}
{{- 'assistant: ' }}
"""


@click.command()
@click.option("--python", type=click.Path(exists=True, dir_okay=False), help="A Python that has the Python clients.")
@click.option("--node", type=click.Path(exists=True, file_okay=False), help="A folder that has the JavaScript clients.")
def main(python: str | None, node: str | None):
    """Start a server, run all named clients, and print a table."""
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        template = Path(folder) / "tools.jinja"
        template.write_text(TEMPLATE)
        with served([*our_command(MODEL, width=4), "--template", str(template)]) as server:
            print("| client | check | outcome |\n|---|---|---|")
            for command in commands(python, node, Path(folder)):
                wrong += report(command, server.url)
    sys.exit(wrong > 0)


def commands(python: str | None, node: str | None, folder: Path) -> list[list[str]]:
    """Return the commands that run the clients, without the server's address."""
    clients = [[python, str(file)] for file in sorted(WORKERS.glob("*_client.py"))] if python else []
    if node:  # Node.js looks for packages next to the program
        programs = [str(shutil.copy(file, folder)) for file in sorted(WORKERS.glob("*.mjs"))]
        (folder / "node_modules").symlink_to(Path(node).resolve() / "node_modules")
        clients += [["node", "--preserve-symlinks", file] for file in programs if file.endswith("_client.mjs")]
    return clients


def report(command: list[str], url: str) -> int:
    """Run one client, and print a row for each check. Returns the number of checks that failed."""
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run([*command, url, MODEL], capture_output=True, text=True, timeout=SECONDS, env=environment)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    client = next((row["versions"] for row in rows if "versions" in row), Path(command[-1]).stem)
    outcomes = [(row["check"], row["outcome"]) for row in rows if "check" in row]
    if done.returncode:
        outcomes.append(("the program", done.stderr.strip().rpartition("\n")[2] or f"exit {done.returncode}"))
    for check, outcome in outcomes:
        cell = " ".join(outcome.split()).replace("|", "\\|")
        print(f"| {client} | {check} | {cell} |", flush=True)
    return sum(outcome != "ok" for _, outcome in outcomes)


if __name__ == "__main__":
    main()
