"""The rooms of the house: which of them may import which, and nothing in circles."""

import ast
import contextlib
import inspect
import pathlib

import pytest

import kvjax
from kvjax import training

ROOT = pathlib.Path(__file__).parents[1]
MAY = {  # from the ground up: a room imports itself and those named here
    "types": set(),
    "messages": set(),
    "registry": {"types"},
    "tracing": set(),
    "folders": set(),
    "parallel": {"types", "messages", "tracing"},
    "pallas": {"types"},
    "policies": {"types", "registry"},
    "attention": {"types", "messages", "registry", "tracing", "pallas"},
    "models": {"types", "messages", "folders", "parallel"},
    "cache": {
        *("types", "messages", "registry", "folders", "parallel", "policies"),
        "attention",
    },
    "engine": {
        *("types", "messages", "registry", "parallel", "policies", "attention"),
        *("cache", "models"),
    },
    "training": {
        *("types", "messages", "policies", "attention", "cache", "models", "engine"),
    },
    "evaluation": {
        *("types", "messages", "registry", "parallel", "policies", "attention"),
        *("cache", "models", "engine"),
    },
    "cli": {  # the commands, which nothing imports
        *("types", "messages", "parallel", "policies", "cache", "engine", "training"),
        "evaluation",
    },
}
WITHOUT_JAX = ("evaluation/tasks", "evaluation/report", "evaluation/metrics.py")


def imported(path):
    """Modules that a file imports anywhere in it, by their full names."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def files_of(room):
    place = ROOT / "kvjax" / room
    return sorted(place.rglob("*.py")) if place.is_dir() else [place.with_suffix(".py")]


def where_it_belongs(room, wanted):
    """What somebody is to do who imports against the table."""
    floors = list(MAY)
    homes = [name for name in floors if room in MAY[name] and wanted in MAY[name]]
    above = f"a room that may import both ({', '.join(homes)})" if homes else "neither"
    return (
        f"kvjax.{room} may not import kvjax.{wanted}: what needs both goes to {above}"
    )


def against_the_table(room, path):
    """A line for every room that a file of `room` imports but may not."""
    ours = {name.split(".")[1] for name in imported(path) if name.startswith("kvjax.")}
    wrong = sorted(ours - MAY[room] - {room})
    return [f"{path.name}: {where_it_belongs(room, wanted)}" for wanted in wrong]


@pytest.mark.parametrize("room", sorted(MAY))
def test_imports(room):
    assert not [line for f in files_of(room) for line in against_the_table(room, f)]


def test_a_forbidden_import_is_told_where_it_belongs(tmp_path):
    path = tmp_path / "dense.py"
    path.write_text("import jax\nfrom kvjax.engine import steps\nimport kvjax.types\n")
    assert against_the_table("evaluation", path) == []
    assert against_the_table("cache", path) == [
        "dense.py: kvjax.cache may not import kvjax.engine: what needs both goes to a "
        "room that may import both (training, evaluation, cli)"
    ]


def test_every_room_is_in_the_table():
    package = ROOT / "kvjax"
    there = {p.stem for p in package.iterdir() if p.suffix == ".py" or p.is_dir()}
    assert there - {"__init__", "__main__", "__pycache__", "py", "configs"} == set(MAY)
    assert len(MAY) <= 15


def test_warnings_are_of_the_user_s_line():
    """`kvjax.messages.warn` finds it; a `stacklevel` counts frames that change."""
    files = (ROOT / "kvjax").rglob("*.py")
    told = [path.name for path in files if "warnings.warn(" in path.read_text()]
    assert not told


def test_nothing_is_imported_in_circles():
    """Module by module, at any depth of the package."""
    modules = {}
    for path in (ROOT / "kvjax").rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        modules[".".join(parts).removesuffix(".__init__")] = path
    needs = {
        module: {
            name if name in modules else name.rpartition(".")[0]
            for name in imported(path)
            if name.startswith("kvjax.")
        }
        - {module}
        for module, path in modules.items()
    }
    while free := [
        module for module, wanted in needs.items() if not wanted & set(needs)
    ]:
        for module in free:
            del needs[module]
    assert not needs, f"imports in a circle: {needs}"


@pytest.mark.parametrize("place", WITHOUT_JAX)
def test_tasks_and_reports_do_without_jax(place):
    for path in files_of(place):
        assert not {name.split(".")[0] for name in imported(path)} & {"jax", "flax"}


def test_models_know_nothing_of_compression():
    for path in files_of("models"):
        names = {
            n.id
            for n in ast.walk(ast.parse(path.read_text()))
            if isinstance(n, ast.Name)
        }
        assert not names & {"Policy", "CacheSpec", "KVState", "budget"}


def test_no_function_hides_its_module():
    """`import kvjax.a.b` is what it says, whatever the packages above export."""
    import importlib
    import types

    for path in (ROOT / "kvjax").rglob("*.py"):
        *parents, name = path.relative_to(ROOT).with_suffix("").parts
        if name.startswith("__"):
            continue
        package = importlib.import_module(".".join(parents))
        found = getattr(package, name, None)
        assert found is None or isinstance(found, types.ModuleType), (package, name)


def test_configs_import_nothing_of_ours():
    for path in (ROOT / "configs").rglob("*.py"):
        assert {name.split(".")[0] for name in imported(path)} <= {"ml_collections"}
        assert ast.get_docstring(ast.parse(path.read_text()))


def test_help_shows_no_addresses():
    """Of functions in what arguments and fields are by default."""
    public = [training.fit_heads]
    for module in (kvjax, kvjax.cache, kvjax.policies):
        public += [getattr(module, name) for name in module.__all__]
    for each in filter(callable, public):
        with contextlib.suppress(ValueError):  # some have no signature
            assert " at 0x" not in str(inspect.signature(each)), each
    assert repr(kvjax.policies.h2o()) == "Policy('h2o')"
    assert repr(kvjax.cache.codecs.identity) == "Codec('identity')"
