# make demo      the main job on a real model, with a table and pictures
# make test      the tests that every change needs (6 to 8 minutes)
# make test-all  those of kernels and of whole runs; PART=1/3 for a third of the cases
# make compiled  TPU kernels and whole steps, compiled for TPUs that are not there;
#                TPU=v6e for that one alone; for an H200 where the CUDA compiler is
# make newest    the kernels' tests with PYTHON=python3.12 and the newest JAX
# make check     the linter, the formatter and the type checker; make format mends
# make docs      the site, into build/docs
# make leaderboard   docs/leaderboard.md from the records in docs/data/leaderboard
# All make a virtual environment first if there is none. EXTRAS=test,cuda for a GPU,
# JAX='jax==0.10.*' for another JAX than the newest.

PYTHON ?= python3
EXTRAS ?= test
JAX ?=
WORKDIR ?= runs/quickstart
TPU ?= tpu
PART ?= 1/1
PY := .venv/bin/python
PIP := $(PY) -m pip install --quiet

.PHONY: demo test test-all compiled newest check format docs leaderboard clean

demo: .venv/installed
	$(PY) experiments/run.py --config=configs/quickstart.py --workdir=$(WORKDIR)

test: .venv/installed
	$(PY) -m pytest

test-all: .venv/installed
	$(PY) -m pytest -m '(kernels or e2e) and not compiled and not slow' \
	  --part=$(PART)

# libtpu lies beside the environment: found there, it would look for a TPU at every start.
compiled: .venv/installed
	$(PIP) --upgrade --no-deps --target .venv/libtpu "$$($(PY) \
	  -c 'import importlib.metadata as m; print(next(r.split(";")[0] for r in m.requires("jax") if r.startswith("libtpu")))')"
	PYTHONPATH=.venv/libtpu JAX_PLATFORMS=cpu $(PY) -m pytest \
	  -m 'compiled and not slow' -k '$(TPU)' --part=$(PART)
	$(PY) -m pytest -m 'compiled and not slow' --part=$(PART) \
	  tests/pallas/test_compiled_gpu.py

newest:
	test -x .venv-newest/bin/python || $(PYTHON) -m venv .venv-newest
	.venv-newest/bin/python -m pip install --quiet --upgrade --editable '.[test]' jax
	.venv-newest/bin/python -c 'import jax, sys; print("jax", jax.__version__, sys.version)'
	.venv-newest/bin/python -m pytest -m 'kernels and not compiled and not slow'

check: .venv/checked
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m pyrefly check --output-format min-text

format: .venv/checked
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

docs: .venv/documented
	rm -rf docs/api
	$(PY) -m sphinx -b html -W --keep-going -q -d build/doctrees docs build/docs
	@echo "the site is in build/docs/index.html"

leaderboard: .venv/installed
	$(PY) experiments/report.py docs/data/leaderboard --leaderboard=docs/leaderboard.md

.venv/installed: pyproject.toml
	test -x $(PY) || $(PYTHON) -m venv .venv
	$(PIP) --editable '.[$(EXTRAS)]' $(JAX)
	touch $@

.venv/checked: .venv/installed
	$(PIP) --editable '.[check]' $(JAX)
	touch $@

.venv/documented: .venv/installed
	$(PIP) --editable '.[docs]' $(JAX)
	touch $@

clean:
	rm -rf .venv .venv-newest runs build docs/api docs/notebooks *.egg-info
