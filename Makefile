# `make demo` and `make test` each start from python3 and pip alone and build .venv themselves.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: help demo test test-long bench docs tutorials site hub-kernel dist clean
.DEFAULT_GOAL := help

help:
	@echo "make demo       install, then train two small translators and show what they look at"
	@echo "make test       install, then format, lint, type and behaviour checks"
	@echo "make test-long  install, then the tests that take minutes each: soaks, many kills, large files"
	@echo "make bench      install, then time every variant vs. PyTorch's SDPA on this CPU"
	@echo "make docs       install, then rewrite the tables of docs/ from code and measured points"
	@echo "make tutorials  install, then run the notebooks of docs/tutorials/ and save what they print and draw"
	@echo "make site       install MkDocs, then build the pages of docs/ as a site: open site/index.html"
	@echo "make hub-kernel build/hub-kernel, from which Hugging Face's kernels package loads the attention"
	@echo "make dist       install build and twine, then make and check the wheel and the sdist in dist/"
	@echo "make clean      remove .venv and caches"

.venv/made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "rectiformer needs Python 3.11 or newer; set PYTHON=/path/to/python3.11"; exit 2; }
	$(PYTHON) -m venv .venv
	@touch $@

PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.venv/translate: .venv/made pyproject.toml constraints.txt
	@echo "installing rectiformer[translate] into .venv: about 1.1 GB with a CPU build of torch, a minute or two"
	$(PIP) -e '.[translate]'
	@touch $@

.venv/test: .venv/made pyproject.toml constraints.txt
	@echo "installing rectiformer[test] into .venv: about 3 GB, two to four minutes"
	$(PIP) -e '.[test]'
	@touch $@ .venv/translate

demo: .venv/translate
	@$(BIN)/rectiformer demo

# Pages are tested in Debian's Chromium. Where it cannot be installed, pytest says at its end what it skipped.
.PHONY: browser
browser:
	@command -v chromium >/dev/null || { echo "installing chromium for the tests of pages"; \
	  timeout 300 sh -c "apt-get -qq update && apt-get -qq install -y --no-install-recommends chromium" >/dev/null 2>&1 \
	  || echo "chromium cannot be installed here: tests of pages are skipped"; }

test: .venv/test browser
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest -n 2 --dist loadscope --no-loadscope-reorder -rs -m "not gpu and not slow"

test-long: .venv/test browser
	$(BIN)/pytest -n 2 -rs -m "slow and not gpu"

bench: .venv/translate
	$(BIN)/python benchmarks/attention.py

docs: .venv/translate
	$(BIN)/python docs/generate.py

tutorials: .venv/test
	$(BIN)/python docs/run_tutorials.py

site: .venv/made
	$(PIP) -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "open site/index.html; for its search: $(BIN)/python -m http.server --directory site"

hub-kernel:
	$(PYTHON) tools/hub_kernel.py --out build/hub-kernel

dist: .venv/made
	$(PIP) build twine
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*

clean:
	rm -rf .venv site dist .mypy_cache .pytest_cache .ruff_cache build *.egg-info
