# `make demo` and `make test` work on a fresh machine that has python3 (>= 3.11, with venv) and make.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-slow lint gpu clean

demo: .venv/demo-installed
	$(BIN)/python train.py -m 'strategy=glob(*)'

# Two or more files of tests at once; a file stays in one process, so that its server is started once.
test: .venv/dev-installed
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile

test-slow: .venv/dev-installed
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile -m 'slow and not gpu'

lint: .venv/dev-installed
	$(BIN)/ruff check .
	$(BIN)/mypy

# On a machine with a CUDA device: the GPU tests and a short benchmark. Uses PYTHON as it is, with its own torch.
gpu:
	$(PYTHON) -m pytest -m gpu
	$(PYTHON) benchmarks/gpu.py

.venv/demo-installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	touch $@

.venv/dev-installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@ .venv/demo-installed

clean:
	rm -rf .venv outputs multirun
