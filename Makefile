# make setup      .venv with everything, pinned (PYTHON=/path/to/python3 picks the interpreter)
# make story      tell a story (MODEL=, TOKENIZER=, SEED=)
# make xray       the X-ray page of a text on its way through the built-in model, in docs/xray (TEXT=, OUT=)
# make test       the tests that find most, in a few minutes
# make test-all   every test
# make test-browser       the tests of the pages and of the site, which it builds, in Chromium
# make lint       format, lint, types
# make verify     ops and mutants against their contracts, thoroughly (SEED=, EXAMPLES=); verify-long: for hours
# make test-jax011        tests of the kernels on the oldest supported jax
# make test-gpu-compile   what the compiler makes of the kernels on an H200; needs no GPU (-jax011: by the oldest jax)
# make gates      the last two, for two models
# make docs       the site, in build/site/html: open its index.html (needs no server, no network)
# make bench-gpu          the suite `gpu` on an H200, and its summary in benchmarks/results/ (needs the extra gpu)
# make bench-gpu-models, bench-gpu-kernels, bench-gpu-variants   the other suites of the GPU
# make release    the wheel and the source distribution in dist/, tried in empty environments
# make test-cards  what the compiler makes of the kernels on other cards (CARDS="a100 l4 ..."; SAMPLE= for all cases)
# make ci         lint, docs, test-all and gates, as .ci/run does

BIN := .venv/bin
COMPLETE := .venv/.complete
RESULTS := benchmarks/results

.PHONY: setup python story xray test test-all test-browser lint test-jax011 test-gpu-compile test-gpu-compile-jax011
.PHONY: test-cards gates ci bench-gpu bench-gpu-models bench-gpu-kernels bench-gpu-variants verify verify-long docs release

setup: $(COMPLETE)
	@:  # without a recipe, make would print that there is nothing to do

# A set-up touches this file last, so an unfinished set-up does not count.
$(COMPLETE): pyproject.toml constraints.txt
	@.ci/setup "$(PYTHON)"

# Print the interpreter that `make setup` would use.
python:
	@.ci/find-python "$(PYTHON)"

story: $(COMPLETE)
	@$(BIN)/llamaspec story $(if $(MODEL),--model "$(MODEL)") $(if $(TOKENIZER),--tokenizer "$(TOKENIZER)") \
	    $(if $(SEED),--seed $(SEED))

TEXT ?= Once upon a time, a little fox found a
OUT ?= docs/xray
xray: $(COMPLETE)
	@$(BIN)/llamaspec xray "$(TEXT)" --out "$(OUT)"

# Two workers: the tests mostly wait for compilers, and CI has two cores. Each begins with half of the files, since what
# a file has compiled is compiled again where its tests are shared out.
PYTEST := $(BIN)/python -m pytest -q -n 2 --dist worksteal

# Fewer examples of each property than `make test-all` draws, and not the tests that are marked as slow.
test: $(COMPLETE)
	@HYPOTHESIS_PROFILE=$${HYPOTHESIS_PROFILE:-brief} $(PYTEST) -m "not slow" $(ARGS)

test-all: $(COMPLETE)
	@$(PYTEST) $(ARGS)

test-browser: docs
	@$(PYTEST) --dist loadfile tests/learn/test_xray_page.py tests/serving/test_serving_page.py tests/learn/test_site_page.py tests/learn/test_tab.py $(ARGS)

lint: $(COMPLETE)
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/pyright

KERNEL_TABLE ?= whole
test-jax011:
	@.ci/setup "$(PYTHON)" jax011
	@KERNEL_TABLE=$(KERNEL_TABLE) .venv-jax011/bin/python -m pytest -q -n 2 tests/kernels $(ARGS)

# The plugin needs an environment of its own: beside it, the interpreter that runs kernels in tests aborts at random.
test-gpu-compile test-gpu-compile-jax011: test-%:
	@.ci/setup "$(PYTHON)" $*; case $$? in \
	    0) .venv-$*/bin/python -m llamaspec.benchmarks.gates $(ARGS) ;; \
	    75) echo "test-$*: skipped, since jax's CUDA plugin cannot be installed here" >&2 ;; \
	    *) exit 1 ;; \
	esac

# The same for cards on which nothing is measured: a few cases each, or with SAMPLE= the whole table.
CARDS ?= rtx-3060 a100
SAMPLE ?= --sample
test-cards:
	@set -e; for card in $(CARDS); do $(MAKE) test-gpu-compile ARGS="--card $$card $(SAMPLE)"; done

bench-gpu: $(COMPLETE)
	@mkdir -p $(RESULTS)/raw
	@$(BIN)/llamaspec bench --suite gpu --json $(RESULTS)/raw/gpu.json --plot $(RESULTS)/gpu.svg
	@$(BIN)/python -m llamaspec.benchmarks.summary $(RESULTS)/raw/gpu.json

bench-gpu-models bench-gpu-kernels bench-gpu-variants: bench-gpu-%: $(COMPLETE)
	@mkdir -p $(RESULTS)/raw
	@$(BIN)/llamaspec bench --suite $* --json $(RESULTS)/raw/gpu-$*.json
	@$(BIN)/python -m llamaspec.benchmarks.summary $(RESULTS)/raw/gpu-$*.json

# The sample is a case of each kind, and the oldest jax runs what `make test` does. A change to the kernels needs
# test-jax011 and test-gpu-compile in full.
gates:
	@HYPOTHESIS_PROFILE=brief $(MAKE) test-jax011 KERNEL_TABLE=sample ARGS='-m "not slow"'
	@$(MAKE) test-gpu-compile ARGS="--sample"
	@$(MAKE) test-cards

# The site first: tests open it in a browser.
ci: lint docs test-all gates

# A link that leads nowhere fails, also those that mkdocs does not look at. The page with Python in a browser tab is
# packed while mkdocs runs, which empties its folder first.
SITE := build/site
docs: $(COMPLETE)
	@.ci/setup "$(PYTHON)" docs
	@$(BIN)/python -m llamaspec.learn.site stage $(SITE)
	@$(BIN)/python -m llamaspec xray "$(TEXT)" --out $(SITE)/source/xray
	@$(BIN)/python -m llamaspec.learn.site tab $(SITE) & tab=$$!; \
	    NO_MKDOCS_2_WARNING=1 .venv-docs/bin/python -m mkdocs build --strict --quiet \
	    --config-file $(SITE)/mkdocs.yml; built=$$?; wait $$tab && exit $$built
	@mv $(SITE)/tab $(SITE)/html/tab
	@$(BIN)/python -m llamaspec.learn.site check $(SITE)

# Every mutant must be found, and every op of ours accepted.
EXAMPLES ?= 1000
verify: $(COMPLETE)
	@$(BIN)/llamaspec verify --mutants $(if $(SEED),--seed $(SEED))
	@$(BIN)/llamaspec verify --dtype float32 --dtype bfloat16 --examples $(EXAMPLES) --time-budget 240 \
	    $(if $(SEED),--seed $(SEED))

# Hours: no false alarm in thousands of draws an op. A stopped run continues where it was.
verify-long: $(COMPLETE)
	@$(BIN)/python -m llamaspec.benchmarks.audits.no_false_alarms numpy xla kernels $(ARGS)

release: $(COMPLETE)
	@.ci/release
