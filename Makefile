PYTHON ?= python3
VENV ?= .venv
# Another package index for torch alone, for instance one that serves CPU or CUDA builds.
TORCH_INDEX ?=
# For the tests where torch brings none: Triton's interpreter and both compilers need no GPU.
TRITON := triton==3.6.0
NVRTC := cuda-bindings==13.5.0 nvidia-cuda-nvrtc==13.5.37
T ?=
# Processes that share the tests, file by file.
WORKERS ?= 2
# Processes that share one GPU's tests: each has a context of its own there, and compiles what the others have not.
GPU_WORKERS ?= 4

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
TORCH := $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))

.DEFAULT_GOAL := help

help: ## show this help
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.serve: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) install $(TORCH) -c constraints.txt torch
	$(PIP) install -c constraints.txt -e .
	@touch $@

$(VENV)/.test: $(VENV)/.serve
	@$(BIN)/python -c 'import triton' 2>/dev/null || $(PIP) install -c constraints.txt $(TRITON)
	@$(BIN)/python -c 'import cuda.bindings.nvrtc' 2>/dev/null || $(PIP) install -c constraints.txt $(NVRTC)
	$(PIP) install -c constraints.txt -e '.[test]'
	@touch $@

install: $(VENV)/.serve ## create .venv with the pinned dependencies

serve: $(VENV)/.serve ## fetch the demo model, enrol the demo adapters, start gateway and engine (MODEL, HOST, PORT, DATA)
	@exec $(BIN)/stencilpress serve $(if $(MODEL),--model $(MODEL)) $(if $(HOST),--host $(HOST)) $(if $(PORT),--port $(PORT)) $(if $(DATA),--data $(DATA))

check: $(VENV)/.test ## format, lint, types, import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy stencilpress tests bench
	$(BIN)/lint-imports

test: $(VENV)/.test ## the test suite: CPU only, no Docker (T=path for a part)
	@$(BIN)/python -m tests.demo_base
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(T)

test-gpu: $(VENV)/.test ## kernels on an NVIDIA GPU against float32
	$(BIN)/python -m pytest -n $(GPU_WORKERS) --dist loadgroup tests/gpu

parity: $(VENV)/.test ## greedy tokens of base and shipped adapters against transformers + PEFT, computed live
	$(BIN)/python -m bench parity

bench-cpu: $(VENV)/.test ## throughput on this CPU beside transformers and PEFT
	$(BIN)/python -m bench cpu

bench-gateway: $(VENV)/.test ## the gateway on one core before a fake engine; needs two quiet cores (DATA, ARGS="--record")
	$(BIN)/python -m bench gateway $(if $(DATA),--data $(DATA)) $(ARGS)

screenshots: $(VENV)/.test ## every page of the console into docs/images/console; needs Chromium (T=page for some)
	$(BIN)/python -m tests.browser.screenshots $(T)

format: $(VENV)/.test ## rewrite the code in the project's format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## remove what make built in this folder
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache

.PHONY: help install serve check test test-gpu parity bench-cpu bench-gateway screenshots format clean
