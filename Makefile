# make demo   the main job on a real model, with a table and two pictures
# make test   the tests
# Both make a virtual environment first if there is none. EXTRAS=test,cuda for a GPU.

PYTHON ?= python3
EXTRAS ?= test
WORKDIR ?= runs/quickstart
PY := .venv/bin/python

.PHONY: demo test lint clean

demo: .venv/installed
	$(PY) experiments/run.py --config=configs/quickstart.py --workdir=$(WORKDIR)

test: .venv/installed
	$(PY) -m pytest

lint: .venv/installed
	$(PY) -m pip install --quiet ruff
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

.venv/installed: pyproject.toml
	test -x $(PY) || $(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --editable '.[$(EXTRAS)]'
	touch $@

clean:
	rm -rf .venv runs build *.egg-info
