"""How Sphinx makes the site of these pages: `make docs`, into build/docs."""

import functools
import importlib
import pathlib
import sys
import types

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(HERE))

from sphinx.domains.python import PyObject

import kvjax

project = "kvjax"
author = copyright = "The kvjax authors"
version = release = kvjax.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "docstrings",
]
exclude_patterns = ["data"]
templates_path = ["templates"]
html_theme = "furo"
html_title = "kvjax"

myst_heading_anchors = 4
nb_execution_mode = "off"  # the tests run the notebooks

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_attr_annotations = False  # the signature above has the fields' types
python_maximum_signature_line_length = 80
default_role = "py:obj"  # a name in single backticks becomes a link where there is one


def link(name: str, target: str) -> None:
    """Lets pages outside this folder be read as if they lay in it."""
    path = HERE / name
    if not path.is_symlink():
        path.symlink_to(pathlib.Path("..") / target, target_is_directory=True)


link("notebooks", "colab")


@functools.cache
def homes() -> dict[int, str]:
    """The first name, from the top down, under which a package offers an object."""
    found = {}
    files = (ROOT / "kvjax").rglob("__init__.py")
    for path in sorted(files, key=lambda path: (len(path.parts), path)):
        name = ".".join(path.relative_to(ROOT).parent.parts)
        package = importlib.import_module(name)
        for offered in getattr(package, "__all__", ()):
            found.setdefault(id(getattr(package, offered)), f"{name}.{offered}")
    return found


def elsewhere(name: str) -> list[tuple[str, str]]:
    """What a module has and another's page describes: names, and their full names.

    So that every object is described once, where its users import it from.
    """
    module = importlib.import_module(name)
    own = [n for n, v in vars(module).items() if getattr(v, "__module__", "") == name]
    there = []
    for member in getattr(module, "__all__", own):
        value = getattr(module, member)
        here = f"{name}.{member}"
        home = homes().get(id(value), here)
        if home != here and not isinstance(value, types.ModuleType):
            there.append((member, home))
    return there


autosummary_context = {"elsewhere": elsewhere}
suppress_warnings = ["config.cache"]  # that function cannot be kept between builds


def skip_fields(app, what, name, obj, skip, options):
    """A NamedTuple's fields: the class says what they are under Attributes."""
    return True if type(obj).__name__ == "_tuplegetter" else None


def shorten(app, what, name, obj, options, signature, returned):
    """jaxtyping writes `Float[jaxlib._jax.Array, 'B K C']`."""
    short = lambda text: text and text.replace("jaxlib._jax.", "")
    return short(signature), short(returned)


def setup(app):
    for field in PyObject.doc_field_types:
        field.label = "Attributes" if field.name == "variable" else field.label
    app.connect("autodoc-skip-member", skip_fields)
    app.connect("autodoc-process-signature", shorten)
