"""Strict JAX, eight virtual devices, tiny models, and the real one where it is."""

import argparse
import itertools
import os
import pathlib
import zlib

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

os.environ.setdefault("KVJAX_PROGRESS", "0")  # stderr is for what tests ask of it

import jax
import pytest
from jaxtyping import install_import_hook
from testing import array_hints

# Before kvjax is first imported: what annotations say of arrays is checked from now on.
install_import_hook("kvjax", f"{array_hints.__name__}.check")

import kvjax
from kvjax.cache.calibrations import files
from kvjax.engine import compiled
from kvjax.evaluation import roofline
from kvjax.models import decoder
from kvjax.types import Model, ModelSpec, UserError

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

_TESTS, _FOLDERS = itertools.count(1), itertools.count()


def often(cases, chosen, others="slow", several=False, rarely=()):
    """The cases of a parametrization: those not chosen are of another tier.

    `several`: a case is a tuple with a value for each of several arguments. `rarely`:
    those of the others that are slow, whatever the tier.
    """
    assert all(case in cases for case in (*chosen, *rarely))

    def marked(case):
        mark = pytest.mark.slow if case in rarely else getattr(pytest.mark, others)
        return pytest.param(*(case if several else (case,)), marks=mark)

    return [case if case in chosen else marked(case) for case in cases]


def tiny_spec(**changes) -> ModelSpec:
    """Two layers, two KV heads, three query heads each."""
    fields = {
        "name": "tiny",
        "num_layers": 2,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 8,
        "model_dim": 24,
        "ff_dim": 40,
        "vocab_size": 50,
        "context_length": 256,
        "rope_theta": 10_000.0,
        "norm_eps": 1e-5,
        "tie_embeddings": True,
    }
    return ModelSpec(**(fields | changes))


def tiny_model(seed: int = 0, **changes) -> Model:
    """Random weights, and no tokenizer."""
    spec = tiny_spec(**changes)
    draw = jax.jit(decoder.random_params, static_argnums=0)
    return Model(spec, draw(spec, jax.random.key(seed)), None)


def _part(given):
    index, _, parts = given.partition("/")
    if not (index.isdigit() and parts.isdigit() and 1 <= int(index) <= int(parts)):
        raise argparse.ArgumentTypeError(f"{given!r} is not I/N with 1 <= I <= N")
    return int(index), int(parts)


def pytest_addoption(parser):
    parser.addoption(
        "--part",
        type=_part,
        default="1/1",
        metavar="I/N",
        help="the I-th of N parts of the cases, those of each test spread over all",
    )


def pytest_collection_modifyitems(config, items):
    """By name, so that a case's part hangs neither on the order nor on the others."""
    index, parts = config.getoption("part")
    mine, others = [], []
    for item in items:
        part = zlib.crc32(item.nodeid.encode()) % parts + 1
        (mine if part == index else others).append(item)
    items[:] = mine
    config.hook.pytest_deselected(items=others)


@pytest.fixture(scope="session")
def tiny() -> Model:
    return tiny_model()


@pytest.fixture(scope="session")
def smollm2() -> Model:
    """The real model; skips where it is neither cached nor to be had."""
    try:
        return kvjax.load("smollm2-135m-instruct")
    except UserError as error:
        if "cannot fetch" not in str(error):
            raise  # a damaged file is a failure
        pytest.skip(f"the SmolLM2 weights are neither cached nor fetchable: {error}")


@pytest.fixture(autouse=True)
def _probes_take_no_time(monkeypatch):
    """A second beside each of some hundred batches; those of other processes stay."""
    monkeypatch.setattr(roofline, "_probe", lambda dtype: (2e9, 1e9))


@pytest.fixture(scope="module", autouse=True)
def _programs_go_with_their_module():
    """Thousands of small executables in one process exhaust its memory maps."""
    yield
    compiled.clear()


@pytest.fixture(autouse=True)
def own_calibrations(monkeypatch, tmp_path_factory):
    """A folder for each test: not the user's, nor that of another test."""
    folder = tmp_path_factory.getbasetemp() / f"calibrations{next(_FOLDERS)}"
    monkeypatch.setattr(files, "own_folder", lambda: folder)
    return folder


@pytest.fixture(autouse=True)
def _programs_go_when_there_are_many():
    """Those of one module may be too many: Linux gives a process 65,530 maps."""
    yield
    maps = pathlib.Path("/proc/self/maps")
    if next(_TESTS) % 20 == 0 and maps.exists():
        with maps.open("rb") as lines:
            if sum(1 for _ in lines) > 30_000:
                compiled.clear()
