# make demo   the main job on a real model, with a table and two pictures
# make test   the tests
# make leaderboard   docs/leaderboard.md from the records in docs/data/leaderboard
# make compiled   TPU kernels and whole steps, compiled for TPUs that are not there;
#                 TPU=v6e for that one alone
# make newest     the kernels' tests with PYTHON=python3.12 and the newest JAX
# All make a virtual environment first if there is none. EXTRAS=test,cuda for a GPU.

PYTHON ?= python3
EXTRAS ?= test
WORKDIR ?= runs/quickstart
TPU ?= tpu
PY := .venv/bin/python

.PHONY: demo test leaderboard compiled newest lint clean

demo: .venv/installed
	$(PY) experiments/run.py --config=configs/quickstart.py --workdir=$(WORKDIR)

test: .venv/installed
	$(PY) -m pytest

leaderboard: .venv/installed
	$(PY) experiments/report.py docs/data/leaderboard --leaderboard=docs/leaderboard.md

# libtpu lies beside the environment: found there, it would look for a TPU at every start.
compiled: .venv/installed
	$(PY) -m pip install --quiet --upgrade --no-deps --target .venv/libtpu "$$($(PY) \
	  -c 'import importlib.metadata as m; print(next(r.split(";")[0] for r in m.requires("jax") if r.startswith("libtpu")))')"
	PYTHONPATH=.venv/libtpu JAX_PLATFORMS=cpu $(PY) -m pytest tests/test_compiled_tpu.py \
	  -k '$(TPU)'

newest:
	test -x .venv-newest/bin/python || $(PYTHON) -m venv .venv-newest
	.venv-newest/bin/python -m pip install --quiet --upgrade --editable '.[test]' jax
	.venv-newest/bin/python -c 'import jax, sys; print("jax", jax.__version__, sys.version)'
	.venv-newest/bin/python -m pytest tests/test_kernels_tpu.py tests/test_kernels_gpu.py \
	  tests/test_compiled_gpu.py tests/test_attention.py tests/test_backends.py

lint: .venv/installed
	$(PY) -m pip install --quiet ruff
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

.venv/installed: pyproject.toml
	test -x $(PY) || $(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --editable '.[$(EXTRAS)]'
	touch $@

clean:
	rm -rf .venv .venv-newest runs build *.egg-info
