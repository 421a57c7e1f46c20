# Two commands do everything on a machine with Python 3.11 or newer and git: `make demo` and `make test`.
# Extra arguments for pip, such as another index for torch, go into PIP_ARGS.
PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
DEMO_ARGS ?=
AUDIT_ARGS ?=
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check -q -c .ci/constraints.txt $(PIP_ARGS)

.PHONY: demo test lint format audit clean

demo: $(VENV)/.demo
	$(BIN)/python scripts/demo.py $(DEMO_ARGS)

test: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 $(TEST_ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

audit: $(VENV)/.dev
	$(BIN)/python scripts/audit.py $(AUDIT_ARGS)

clean:
	rm -rf $(VENV) outputs build dist

# A stamp is older than the files that say what is to be installed: install again.
$(VENV)/.%: pyproject.toml .ci/constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) -e ".[$*]"
	touch $@
