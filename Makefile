# `make test` is all a fresh machine needs: it makes .venv, installs into it and runs every check.
# A torch that is already in .venv is left alone; make PYTHON=python3.12 test picks the interpreter.

.DEFAULT_GOAL := help
.PHONY: help quickstart test lint types sanitize clean

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.set-up
PIP    := $(BIN)/python -m pip --disable-pip-version-check

# With no NVIDIA GPU the newest torch would still bring gigabytes of CUDA on some package indexes,
# and a tested version is worth more there than a new one.
CPU_TORCH := torch==2.13.0

# Their compiled form is part of the installation.
NATIVE := $(wildcard src/kdn/ops/native/*.cpp src/kdn/ops/native/*.h src/kdn/ops/native/CMakeLists.txt)

help:
	@echo "make quickstart  set up .venv if needed, train two small models, leave a page about them"
	@echo "make test    set up .venv if needed, then lint, types and every test"
	@echo "make sanitize  the CPU kernels under sanitizers, on random shapes and strides"
	@echo "make lint    ruff: rules and format"
	@echo "make types   mypy on src/kdn"
	@echo "make clean   remove .venv, caches and build output"

quickstart: $(STAMP)
	@$(BIN)/python -m kdn quickstart

test: lint types sanitize
	@echo "==> tests: pytest, two workers with one thread each"
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

# Addresses and undefined behaviour, over a fuzz of shapes, strides and types (tests/native/fuzz.cpp).
SANITIZED := build/sanitize
NATIVE_SRC := src/kdn/ops/native
CHECKED := -std=c++17 -O1 -g -ffp-contract=fast -Wno-psabi -pthread -I$(NATIVE_SRC) \
           -fsanitize=address,undefined -fno-sanitize-recover=all
X86 := $(filter x86_64 AMD64,$(shell uname -m))
FLAGS_isa_avx2 := -mavx2 -mfma
FLAGS_isa_avx512 := -mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma
PARTS := dispatch threads isa_baseline $(if $(X86),isa_avx2 isa_avx512)

$(SANITIZED)/%.o: $(NATIVE_SRC)/%.cpp $(NATIVE)
	@mkdir -p $(@D)
	@$(CXX) $(CHECKED) $(if $(X86),-DKDN_X86) $(FLAGS_$*) -c $< -o $@

$(SANITIZED)/fuzz: tests/native/fuzz.cpp $(PARTS:%=$(SANITIZED)/%.o)
	@$(CXX) $(CHECKED) $^ -o $@

sanitize:
	@echo "==> sanitizers: the CPU kernels on random shapes and strides"
	@$(MAKE) --no-print-directory -j 2 $(SANITIZED)/fuzz
	@$(SANITIZED)/fuzz 60

lint: $(STAMP)
	@echo "==> lint: ruff check, ruff format --check"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(STAMP)
	@echo "==> types: mypy"
	@$(BIN)/mypy

# Everything below runs once, and again when one of these files has changed.
$(STAMP): pyproject.toml $(NATIVE)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	    echo "kdn needs Python 3.11 or newer, name one: make PYTHON=/path/to/python test" \
	         "('$(PYTHON)' says: $$($(PYTHON) -V 2>&1 | head -n 1))" >&2; \
	    exit 1; \
	}
	@if ! $(PIP) --version >/dev/null 2>&1; then \
	    echo "==> set-up: virtual environment in $(VENV) ($$($(PYTHON) -V))"; \
	    $(PYTHON) -m venv $(VENV); \
	fi
	@if $(BIN)/python -c 'import importlib.metadata as m; m.version("torch")' 2>/dev/null; then \
	    echo "==> set-up: keeping the torch that is in $(VENV)"; \
	elif nvidia-smi -L >/dev/null 2>&1; then \
	    echo "==> set-up: NVIDIA GPU found, torch comes with its CUDA libraries"; \
	else \
	    echo "==> set-up: no NVIDIA GPU found, installing $(CPU_TORCH)"; \
	    $(PIP) install -q $(CPU_TORCH); \
	fi
	@echo "==> set-up: installing kdn, editable, with its test and dev tools"
	@$(PIP) install -q -e '.[test,dev]'
	@touch $@

clean:
	@echo "==> removing $(VENV), caches and build output"
	@rm -rf $(VENV) .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
