# Needs Python 3.11 or later, make and a C++ compiler; everything else goes into .venv.
PYTHON ?= python3
PYTEST_ARGS ?=
# Files of tests run side by side, one process a core, at most eight; WORKERS=0: one after another, in this process.
WORKERS ?= auto
SIDE_BY_SIDE := -n $(WORKERS) --maxprocesses=8 --dist loadfile
BIN := .venv/bin
STAMP := .venv/.installed

# Where demo-spill leaves pages for demo-fetch: a folder, or mooncake:HOST:PORT (see mooncake-up).
STORE ?= build/spill

.PHONY: .venv demo demo-spill demo-fetch test test-long mooncake-up mooncake-down clean

.venv: $(STAMP)

$(STAMP): requirements-dev.txt pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --requirement requirements-dev.txt
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

demo: $(STAMP)
	$(BIN)/codegen build
	$(BIN)/codegen verify
	$(BIN)/python -m poolwright.runtime.integrations.demo

# A process stores the cache of a prompt and is killed; another one goes on from it.
demo-spill: $(STAMP)
	$(BIN)/python -m poolwright.runtime.integrations.spill spill --store $(STORE)

demo-fetch: $(STAMP)
	$(BIN)/python -m poolwright.runtime.integrations.spill fetch --store $(STORE)

test: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codegen build --check
	$(BIN)/pytest $(SIDE_BY_SIDE) $(PYTEST_ARGS)

test-long: $(STAMP)
	$(BIN)/pytest $(SIDE_BY_SIDE) -m "slow and not gpu" $(PYTEST_ARGS)

# A Mooncake master and one node on 127.0.0.1, for trying out storage: ready, or an error, when this returns.
mooncake-up: $(STAMP)
	$(BIN)/python -m poolwright.runtime.storage.cluster up

mooncake-down: $(STAMP)
	$(BIN)/python -m poolwright.runtime.storage.cluster down

clean:
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find codegen generated runtime tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
