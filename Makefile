# Two commands do everything on a machine with Python 3.11 or newer and git: `make demo` and `make test`.
# Extra arguments for pip, such as another index for torch, go into PIP_ARGS.
PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
CONSTRAINTS ?= .ci/constraints.txt
DEMO_ARGS ?=
# Processes that run tests, and how they do.
WORKERS ?= 2
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest
PARALLEL = -n $(WORKERS) --dist worksteal
# Parts of `make test-slow`: PARTS="slow triton" runs two of them.
PARTS ?= slow thorough $(if $(filter Linux,$(shell uname)),triton)
AUDIT_ARGS ?=
RELEASE_ARGS ?=
BIN := $(VENV)/bin
# Modules are compiled when they are first imported: most never are, and to compile them all took most of the time.
unexport PYTHONDONTWRITEBYTECODE
PIP := $(BIN)/python -m pip install --no-compile --disable-pip-version-check -q $(CONSTRAINTS:%=-c %) $(PIP_ARGS)

.PHONY: demo test test-slow .slow .thorough .triton test-hf test-gpu test-oldest test-newest lint format docs pictures notebooks dist release-check audit clean

# Tests of the Hub have a server of their own, on this machine.
test .slow test-hf: export HF_HUB_OFFLINE = 0
# A file whose tests are all skipped is an error, but for those that tests/helpers/every_file.py names.
test: export EVERY_FILE_RUNS = 1

# Again and again into its own folder, but over no model in another one.
demo: $(VENV)/.demo
	$(BIN)/python scripts/demo.py $(if $(findstring --output_dir,$(DEMO_ARGS)),,--overwrite_output_dir) $(DEMO_ARGS)

test: $(VENV)/.dev
	$(PYTEST) $(PARALLEL) $(TEST_ARGS)

# What takes seconds each or needs more packages.
test-slow: $(PARTS:%=.%)

# Chromium, which the page is tested in, is the system's: `apt-get install chromium`.
.slow: $(VENV)/.dev $(VENV)/.browser
	$(PYTEST) $(PARALLEL) -m slow $(TEST_ARGS)

# Twenty times as many random examples.
.thorough: $(VENV)/.dev
	$(PYTEST) $(PARALLEL) --hypothesis-profile thorough tests/properties $(TEST_ARGS)

# The Triton kernels: first in Triton's interpreter against the product by definition, then compiled for GPUs that need
# not be here.
.triton: $(VENV)/.dev $(VENV)/.gpu
	TRITON_INTERPRET=1 $(PYTEST) $(PARALLEL) tests/unit/test_toeplitz_triton.py tests/unit/test_loss_triton.py $(TEST_ARGS)
	$(PYTEST) tests/unit/test_triton_compiles.py $(TEST_ARGS)

# The tests that transformers runs over its own models; the first run fetches them.
test-hf: $(VENV)/.dev
	$(BIN)/python tests/hf/upstream/fetch.py
	$(PYTEST) $(PARALLEL) -c tests/hf/upstream/pytest.ini tests/hf/upstream $(TEST_ARGS)

# What only a GPU can prove, on a machine that has one: less than eight minutes.
test-gpu: $(VENV)/.dev
	$(BIN)/python -m pytest tests/gpu $(TEST_ARGS)

# The usual tests with the oldest releases that pyproject.toml allows, and with the newest there are.
test-oldest:
	$(MAKE) test VENV=$(VENV)-oldest CONSTRAINTS=.ci/oldest.txt

test-newest:
	rm -f $(VENV)-newest/.dev
	$(MAKE) test VENV=$(VENV)-newest CONSTRAINTS= PIP_ARGS="--upgrade --upgrade-strategy eager $(PIP_ARGS)"

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The site, in build/site, of the pages as they are: mkdocs alone, in seconds.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --config-file docs/site/mkdocs.yml

# Pages and tables that follow from the code and from figures, and all pictures, are written anew.
pictures: $(VENV)/.dev
	$(BIN)/python docs/site/generate.py
	$(BIN)/python docs/research/page_tables.py
	$(BIN)/python docs/research/draw.py

# The notebooks of docs/notebooks, executed, in build/notebooks.
notebooks: $(VENV)/.dev $(VENV)/.notebooks
	mkdir -p build/notebooks
	for source in docs/notebooks/*.py; do \
	  $(BIN)/jupytext --to ipynb --set-kernel python3 --execute --output build/notebooks/$$(basename $$source .py).ipynb $$source || exit 1; done

# Wheel and source archive in dist/, from the last commit alone: the same commit gives the same files. The links of the
# README lead to the repository, because PyPI shows it without the other files.
dist: export SOURCE_DATE_EPOCH = $(shell git log -1 --format=%ct)
dist: $(VENV)/.release
	rm -rf dist build/export
	mkdir -p build/export
	git archive HEAD | tar -x -C build/export
	$(BIN)/python docs/site/links.py build/export/README.md
	$(BIN)/python -m build --outdir dist build/export
	$(BIN)/python .ci/repack.py dist/*.tar.gz
	$(BIN)/twine check --strict dist/*

# Everything of a release but the upload, in fresh environments; RELEASE_ARGS="--skip hub links audit" without a network.
release-check: dist
	PIP_ARGS="$(PIP_ARGS)" $(BIN)/python .ci/release_check.py $(RELEASE_ARGS)

audit: $(VENV)/.dev
	$(BIN)/python -m pip_audit --strict --skip-editable $(AUDIT_ARGS)

clean:
	rm -rf $(VENV) $(VENV)-oldest $(VENV)-newest outputs build dist

# The site needs neither PyTorch nor this package.
$(VENV)/.docs: pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	$(PIP) $$($(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')
	touch $@

# A stamp is older than the files that say what is to be installed: install again.
$(VENV)/.%: pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) -e ".[$*]"
	touch $@
