# The developer interface. Needs make and Python 3.10 or newer; uses uv where there
# is one. ARGS passes arguments on: make test ARGS="tests/wire -x"

PYTHON ?= python3
PEERS ?= ../shared/peers
T ?= 60
RUNS ?= 20
N ?= 1000
TARGETS ?= frames messages graphs sequences taps
BIN = .venv/bin

UV := $(shell command -v uv)
VENV = $(if $(UV),uv venv --python $(PYTHON) .venv,$(PYTHON) -m venv .venv)
INSTALL = $(if $(UV),uv pip install --python $(BIN)/python,$(BIN)/python -m pip install)

# llama.cpp's own client and server, for tests and benchmarks. Linux on x86-64 only.
PEER_WHEEL = $(wildcard $(PEERS)/llama_cpp_python-*.whl)
PEER_PACKAGES = $(if $(PEER_WHEEL),$(PEER_WHEEL) llama-cpp-py-sync==0.11739 cffi)

.PHONY: setup demo test fmt lint types layers check bench fuzz soak soak-sums clean

setup: .venv/.stamp

demo: .venv/.demo-stamp
	$(BIN)/longwire demo $(ARGS)

test: setup
	LONGWIRE_PEERS=$(abspath $(PEERS)) $(BIN)/python -m pytest $(ARGS)

fmt: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: setup
	$(BIN)/mypy

layers: setup
	$(BIN)/python tools/check_layers.py src/longwire

check: lint types layers

bench: setup
	$(BIN)/longwire bench $(or $(ARGS),hop)

# Each target for T seconds, then as long with a live server of either kind.
fuzz: .venv/.fuzz-stamp
	set -e; for target in $(TARGETS); do PYTHONPATH=tests $(BIN)/python -m fuzz $$target -max_total_time=$(T) $(ARGS); done
	set -e; for kind in serve inline; do PYTHONPATH=tests $(BIN)/python -m fuzz.live --server $$kind --seconds $(T) --seed $$(date +%s); done

# Blows at RUNS random moments; ARGS="--seed S" draws others.
soak: setup
	PYTHONPATH=tests $(BIN)/python -m soak.moments --runs $(RUNS) $(ARGS)

# N sums among servers, then ARGS="--strikes S" blows at one of them in mid-sum.
soak-sums: setup
	PYTHONPATH=tests $(BIN)/python -m soak.sums --runs $(N) $(ARGS)

clean:
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src tests tools fuzz soak -name __pycache__ -exec rm -rf {} +

.venv/.demo-stamp: pyproject.toml
	test -x $(BIN)/python || $(VENV)
	$(INSTALL) -e '.[demo]'
	touch $@

.venv/.fuzz-stamp: .venv/.stamp
	$(INSTALL) -e '.[fuzz]'
	touch $@

.venv/.stamp: .venv/.demo-stamp
	$(INSTALL) -e '.[demo,bench,dev]' $(PEER_PACKAGES)
	touch $@
