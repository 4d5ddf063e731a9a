# Every target sets up its own environment in .venv. Set-up runs again only if pyproject.toml,
# constraints.txt or scripts/setup.sh changed. `make` without a target lists the targets.

VENV    := .venv
BIN     := $(VENV)/bin
READY   := $(VENV)/.ready
# Test processes: one per core, with one torch thread each; more than 8 would only cost memory.
WORKERS ?= auto
TESTS   ?=

.PHONY: help setup demo test check format bench reproduce quick docs real clean
.DEFAULT_GOAL := help

help:  ## list these targets
	@sed -n 's/^\([a-z]*\):[^#]*## \(.*\)/make \1  \2/p' $(MAKEFILE_LIST) | awk '{printf "%s %-9s", $$1, $$2; $$1=$$2=""; print $$0}'

setup: $(READY)  ## create .venv with the package, its extras and the development tools

$(READY): pyproject.toml constraints.txt scripts/setup.sh
	@sh scripts/setup.sh $(VENV)
	@touch $@

demo: $(READY)  ## generate with the embedded pair, with and without speculation (compiles once)
	@$(BIN)/outrider demo

test: $(READY)  ## run the whole test suite; TESTS="tests/test_x.py -k name" runs a part
	@OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false \
	  $(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 8 --dist loadscope $(TESTS)

check: $(READY)  ## check lint, format, types, import direction, and for machine-specific paths
	@$(BIN)/ruff check --quiet --output-format concise .
	@$(BIN)/ruff format --check --quiet . || { $(BIN)/ruff format --check .; exit 1; }
	@$(BIN)/mypy --no-error-summary
	@$(BIN)/lint-imports --no-cache >$(VENV)/imports.log 2>&1 || { cat $(VENV)/imports.log; exit 1; }
	@$(BIN)/python scripts/check_tree.py
	@echo "check: ok"

format: $(READY)  ## apply the formatter and the linter's safe fixes
	@$(BIN)/ruff check --quiet --fix .
	@$(BIN)/ruff format --quiet .

bench: $(READY)  ## compare with transformers; writes benchmarks/results/
	@$(BIN)/python -m benchmarks.vs_transformers

reproduce: $(READY)  ## reproduce published tables and figures (hours; resumes); writes docs/reproduce/
	@$(BIN)/python -m recipes.reproduce

quick: $(READY)  ## check the sign of each published effect on the embedded pair (minutes, untimed)
	@OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false \
	  $(BIN)/python -m recipes.reproduce --quick --dry

docs: $(READY)  ## regenerate the list of methods, docs/cli.md, the README's picture and results
	@$(BIN)/python -m outrider.methods.catalogue
	@$(BIN)/python -m outrider.cli.reference
	@$(BIN)/python -m outrider.cli.screenshot
	@$(BIN)/python scripts/fill_results.py

real: $(READY)  ## fetch SmolLM2-135M-Instruct, a real chat model, into runs/smollm2/model (100 MB)
	@$(BIN)/python -m recipes.smollm2

clean:  ## remove the environment, caches and build outputs
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
