"""Write the table of docs/mutants.md: for each op, how many mutants its contract finds, and how soon.

python -m tests.goldens.make_mutants

This verifies every mutant as `llamaspec verify --mutants --seed 0` does, which takes minutes. The seconds in the table
depend on the machine, so write the machine's name above the table.
"""

from llamaspec.verify.catalogue import CONTRACTS, IMPLEMENTATIONS
from llamaspec.verify.judging.mutation import table, trials
from tests.support.processes import REPOSITORY
from tests.support.tables import replace_table

PAGE = REPOSITORY / "docs" / "mutants.md"


if __name__ == "__main__":
    results = [trial for op, contract in CONTRACTS.items() for trial in trials(contract, IMPLEMENTATIONS[op], seed=0)]
    PAGE.write_text(replace_table(PAGE.read_text(encoding="utf-8"), table(results)), encoding="utf-8")
