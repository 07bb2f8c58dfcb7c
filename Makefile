# `make demo` and `make test` each start from python3 and pip alone and build .venv themselves.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: help demo test test-long bench docs clean
.DEFAULT_GOAL := help

help:
	@echo "make demo       install, then train two small translators and show what they look at"
	@echo "make test       install, then format, lint, type and behaviour checks"
	@echo "make test-long  install, then the tests that take minutes each: soaks, many kills, large files"
	@echo "make bench      install, then time every variant beside PyTorch's SDPA on this CPU"
	@echo "make docs       install, then rewrite the tables of docs/variants.md from the code"
	@echo "make clean      remove .venv and caches"

.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "rectiformer needs Python 3.11 or newer; set PYTHON=/path/to/python3.11"; exit 2; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	@touch $@

demo: .venv/installed
	@$(BIN)/rectiformer demo

# Pages are tested in Debian's Chromium. Where it cannot be installed, pytest says at its end what it skipped.
.PHONY: browser
browser:
	@command -v chromium >/dev/null || { echo "installing chromium for the tests of pages"; \
	  timeout 300 sh -c "apt-get -qq update && apt-get -qq install -y --no-install-recommends chromium" >/dev/null 2>&1 \
	  || echo "chromium cannot be installed here: tests of pages are skipped"; }

test: .venv/installed browser
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest -n 2 --dist loadscope --no-loadscope-reorder -rs -m "not gpu and not slow"

test-long: .venv/installed browser
	$(BIN)/pytest -n 2 -rs -m "slow and not gpu"

bench: .venv/installed
	$(BIN)/python benchmarks/attention.py

docs: .venv/installed
	$(BIN)/python docs/generate.py

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache build *.egg-info
