# Everything a newcomer needs: `make demo` and `make test`. PYTHON chooses the interpreter the .venv is made with.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=

.PHONY: demo test check generate bench bench-quick clean

demo: $(VENV)/.demo
	@$(BIN)/moe-telemetry demo $(ARGS)

test: $(VENV)/.dev tools
	$(BIN)/python -m pytest --numprocesses=auto $(ARGS)

# What a process under telemetry runs, with the lowest and the newest versions that pyproject.toml allows.
.PHONY: test-lowest test-newest
test-lowest test-newest: test-%: tools
	@$(PYTHON) tests/lowest.py $* $(VENV)-$* $(ARGS)

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python docs/generate.py --check

generate: $(VENV)/.dev
	$(BIN)/python docs/generate.py

# Under ten minutes; writes docs/benchmarks.md.
bench: $(VENV)/.dev tools
	$(BIN)/python benchmarks/suite.py

# Under a minute, with limits twice as loose.
bench-quick: $(VENV)/.dev
	$(BIN)/python benchmarks/quick.py

clean:
	rm -rf $(VENV) $(VENV)-lowest $(VENV)-newest build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "Python 3.10 or newer is needed: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[demo]'
	@touch $@

$(VENV)/.dev: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@ $(VENV)/.demo

# Prometheus, promtool and Alertmanager, which the tests run for real.
.PHONY: tools
tools:
	@sh tests/install_tools.sh
