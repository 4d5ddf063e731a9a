# Every target prepares its own environment in .venv; set-up runs again only when
# pyproject.toml or constraints.txt change. `make` alone lists the targets.

VENV    := .venv
BIN     := $(VENV)/bin
READY   := $(VENV)/.ready
# One process per core, one torch thread per process; more than 8 only costs memory.
WORKERS ?= auto
TESTS   ?=

.PHONY: help setup demo test check format bench docs real clean
.DEFAULT_GOAL := help

help:  ## list these targets
	@sed -n 's/^\([a-z]*\):[^#]*## \(.*\)/make \1  \2/p' $(MAKEFILE_LIST) | awk '{printf "%s %-7s", $$1, $$2; $$1=$$2=""; print $$0}'

setup: $(READY)  ## create .venv and install the package, its extras and the tools

$(READY): pyproject.toml constraints.txt scripts/setup.sh
	@sh scripts/setup.sh $(VENV)
	@touch $@

demo: $(READY)  ## write text with the embedded pair, plain and speculatively (under a minute)
	@$(BIN)/outrider demo

test: $(READY)  ## the whole test suite, slow tests too; TESTS="tests/test_x.py -k name" for a part
	@OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false \
	  $(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 8 --dist loadgroup $(TESTS)

check: $(READY)  ## lint, format, types, direction of imports, nothing machine-specific in the tree
	@$(BIN)/ruff check --quiet --output-format concise .
	@$(BIN)/ruff format --check --quiet . || { $(BIN)/ruff format --check .; exit 1; }
	@$(BIN)/mypy --no-error-summary
	@$(BIN)/lint-imports --no-cache >$(VENV)/imports.log 2>&1 || { cat $(VENV)/imports.log; exit 1; }
	@$(BIN)/python scripts/check_tree.py
	@echo "check: ok"

format: $(READY)  ## apply the formatter and the linter's safe repairs
	@$(BIN)/ruff check --quiet --fix .
	@$(BIN)/ruff format --quiet .

bench: $(READY)  ## compare with transformers; writes benchmarks/results/
	@$(BIN)/python -m benchmarks.vs_transformers

docs: $(READY)  ## redraw what is generated: the list of methods, docs/cli.md, the trace's picture, the README's results
	@$(BIN)/python -m outrider.methods.catalogue
	@$(BIN)/python -m outrider.cli.reference
	@$(BIN)/python -m outrider.cli.screenshot
	@$(BIN)/python scripts/fill_results.py

real: $(READY)  ## fetch SmolLM2-135M-Instruct, a real chat model, into runs/smollm2/model (100 MB)
	@$(BIN)/python -m recipes.smollm2

clean:  ## remove the environment, caches and build output
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
