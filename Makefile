# make setup   .venv with everything, pinned (PYTHON=/path/to/python3 picks the interpreter)
# make story   tell a story (MODEL=, TOKENIZER=)
# make test    the tests
# make lint    format, lint, types
# make ci      all of it, as .ci/run does

BIN := .venv/bin
COMPLETE := .venv/.complete

.PHONY: setup python story test lint ci

setup: $(COMPLETE)
	@:  # a recipe, or make would say that there is nothing to do

# The last thing that a set-up does is to touch this file, so that half a set-up does not count.
$(COMPLETE): pyproject.toml constraints.txt
	@.ci/setup "$(PYTHON)"

# Print the interpreter that `make setup` would use.
python:
	@.ci/find-python "$(PYTHON)"

ifndef MODEL
ifdef LLAMASPEC_DATA
MODEL := $(LLAMASPEC_DATA)/stories260K/stories260K.bin
TOKENIZER ?= $(LLAMASPEC_DATA)/stories260K/tok512.model
endif
endif
# The question comes before the set-up: nobody should wait a minute to be told that a model is missing.
story:
	@test -n "$(MODEL)" || { echo "error: no model: make story MODEL=/path/to/a/model, or LLAMASPEC_DATA=/folder/with/stories260K" >&2; exit 1; }
	@$(MAKE) --no-print-directory setup
	@$(BIN)/llamaspec story --model "$(MODEL)" $(if $(TOKENIZER),--tokenizer "$(TOKENIZER)")

# Two workers: the tests mostly wait for compilers, and CI has two cores.
test: $(COMPLETE)
	@$(BIN)/python -m pytest -q -n 2 $(ARGS)

lint: $(COMPLETE)
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/pyright

ci: lint test
