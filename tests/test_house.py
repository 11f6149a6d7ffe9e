"""The rooms of the house: which module may import which."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[1]
POLICIES = {"types", "axes", "policies"}
REPORTS = {  # from records to a report: nothing here knows how they came about
    "records",
    "cells",
    "grids",
    "tables",
    "throughput_report",
    "throughput_pictures",
    "pictures",
    "sweep_pictures",
}
MAY = {
    "types": set(),
    "axes": {"types"},
    "pallas": {"pallas"},
    "implementations": {"types", "pallas"},
    "attention": {"types", "implementations", "pallas"},
    "codecs": {"types"},
    "sampling": {"types"},
    "nn": {"types", "axes"},
    "models": {"types", "axes", "nn", "models"},
    "layouts": {"types", "attention", "codecs"},
    "policies": POLICIES,
    "compression": {"types", "codecs", "implementations", "policies"},
    "cache": {
        "types",
        "axes",
        "attention",
        "codecs",
        "compression",
        "layouts",
        "policies",
    },
    "metrics": set(),
    "tasks": {"types", "metrics", "tasks"},
    "records": {"types"},
    "cells": {"records"},
    "grids": set(),
    "tables": {"records", "cells", "grids"},
    "throughput_report": {"records", "cells", "grids", "tables"},
    "throughput_pictures": {"records", "cells", "pictures"},
    "pictures": {"records", "cells"},
    "sweep_pictures": {"records", "cells", "pictures"},
    "report": REPORTS,
    "survivors": set(),
    "comparison": {*REPORTS, "types", "survivors", "comparison"},
    "meshes": {"types", "axes", "models"},
    "weights": {"types", "meshes", "models", "weights"},
    "sharding": {"types", "axes", "cache", "compression", "models"},
    "generate": {
        "types",
        "axes",
        "cache",
        "compression",
        "sampling",
        "sharding",
        "models",
    },
    "programs": {
        "types",
        "axes",
        "cache",
        "compression",
        "meshes",
        "sampling",
        "sharding",
        "models",
        "generate",
        "weights",
    },
    "plan": {"types", "axes", "cache", "compression", "meshes", "policies", "programs"},
    "layerwise": {"types", "cache", "compression", "models", "policies", "generate"},
    "staggered": {"types", "cache", "compression", "plan", "programs", "completions"},
    "memory": set(),
    "protocols": {"types", "memory", "plan", "programs", "completions", "staggered"},
    "roofline": {"types", "models", "plan", "programs"},
    "likelihood": {
        "types",
        "axes",
        "cache",
        "compression",
        "completions",
        "meshes",
        "plan",
        "programs",
    },
}


def imported(path):
    """Modules that a file imports anywhere in it, by their full names."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def files_of(room):
    package = ROOT / "kvjax" / room
    return (
        sorted(package.rglob("*.py"))
        if package.is_dir()
        else [package.with_suffix(".py")]
    )


@pytest.mark.parametrize("room", sorted(MAY))
def test_imports(room):
    for path in files_of(room):
        ours = {
            name.split(".")[1] for name in imported(path) if name.startswith("kvjax.")
        }
        assert ours <= MAY[room], f"{path.name} imports {sorted(ours - MAY[room])}"


def test_tasks_and_reports_do_without_jax():
    for path in [
        f for room in ("tasks", "metrics", "report", *REPORTS) for f in files_of(room)
    ]:
        assert not {name.split(".")[0] for name in imported(path)} & {"jax", "flax"}


def test_models_know_nothing_of_compression():
    for path in [*files_of("models"), *files_of("nn")]:
        names = {
            n.id
            for n in ast.walk(ast.parse(path.read_text()))
            if isinstance(n, ast.Name)
        }
        assert not names & {"Policy", "Compression", "KVState", "budget"}


def test_configs_import_nothing_of_ours():
    for path in (ROOT / "configs").rglob("*.py"):
        assert {name.split(".")[0] for name in imported(path)} <= {"ml_collections"}
        assert ast.get_docstring(ast.parse(path.read_text()))
