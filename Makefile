# make setup   .venv with everything, pinned (PYTHON=/path/to/python3 picks the interpreter)
# make story   tell a story (MODEL=, TOKENIZER=)
# make test    the tests
# make lint    format, lint, types
# make verify  ops and mutants against their contracts, thoroughly (SEED=, EXAMPLES=); verify-long: for hours
# make test-jax011        the tests of the kernels, on the oldest jax that they run on
# make test-gpu-compile   what the compiler makes of the kernels on an H200; needs no GPU (-jax011: by the oldest jax)
# make gates   the last two, of two models
# make bench-gpu          all that is to be seen on an H200, kept in benchmarks/results/ (needs one, and the extra gpu)
# make bench-gpu-models   whole models alone
# make bench-gpu-kernels, bench-gpu-variants  the rest of the kernels, which it has no time for
# make ci      all of it, as .ci/run does

BIN := .venv/bin
COMPLETE := .venv/.complete

.PHONY: setup python story test lint test-jax011 test-gpu-compile test-gpu-compile-jax011 gates bench-gpu ci verify
.PHONY: bench-gpu-models bench-gpu-kernels bench-gpu-variants verify-long

setup: $(COMPLETE)
	@:  # a recipe, or make would say that there is nothing to do

# The last thing that a set-up does is to touch this file, so that half a set-up does not count.
$(COMPLETE): pyproject.toml constraints.txt
	@.ci/setup "$(PYTHON)"

# Print the interpreter that `make setup` would use.
python:
	@.ci/find-python "$(PYTHON)"

story: $(COMPLETE)
	@$(BIN)/llamaspec story $(if $(MODEL),--model "$(MODEL)") $(if $(TOKENIZER),--tokenizer "$(TOKENIZER)")

# Two workers: the tests mostly wait for compilers, and CI has two cores.
test: $(COMPLETE)
	@$(BIN)/python -m pytest -q -n 2 $(ARGS)

lint: $(COMPLETE)
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/pyright

KERNEL_TABLE ?= whole
test-jax011:
	@.ci/setup "$(PYTHON)" jax011
	@KERNEL_TABLE=$(KERNEL_TABLE) .venv-jax011/bin/python -m pytest -q -n 2 tests/kernels $(ARGS)

# In environments of their own: beside the plugin, the interpreter that the tests run kernels in aborts at random.
test-gpu-compile test-gpu-compile-jax011: test-%:
	@.ci/setup "$(PYTHON)" $*; case $$? in \
	    0) .venv-$*/bin/python -m benchmarks.gpu_compile $(if $(findstring jax011,$*),--no-keep) $(ARGS) ;; \
	    75) echo "test-$*: skipped, since jax's CUDA plugin cannot be installed here" >&2 ;; \
	    *) exit 1 ;; \
	esac

bench-gpu: $(COMPLETE)
	@$(BIN)/llamaspec bench --suite gpu --json benchmarks/results/gpu.json --plot benchmarks/results/gpu.svg

bench-gpu-models bench-gpu-kernels bench-gpu-variants: bench-gpu-%: $(COMPLETE)
	@$(BIN)/llamaspec bench --suite $* --json benchmarks/results/gpu-$*.json

# What two of the ten models have of test-jax011 and test-gpu-compile; a change to the kernels wants all of them.
gates:
	@$(MAKE) test-jax011 KERNEL_TABLE=sample
	@$(MAKE) test-gpu-compile ARGS="--sample --no-keep"

ci: lint test gates

# Every mutant must be found out, and every op of ours accepted.
EXAMPLES ?= 1000
verify: $(COMPLETE)
	@$(BIN)/llamaspec verify --mutants $(if $(SEED),--seed $(SEED))
	@$(BIN)/llamaspec verify --dtype float32 --dtype bfloat16 --examples $(EXAMPLES) --time-budget 240 \
	    $(if $(SEED),--seed $(SEED))

# Hours: no false alarm in thousands of draws an op. Goes on where it was stopped.
verify-long: $(COMPLETE)
	@$(BIN)/python -m benchmarks.no_false_alarms numpy xla kernels $(ARGS)
