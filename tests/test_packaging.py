"""The package as it is installed: the core without extras, its imports, the command."""

import os
import pathlib
import subprocess
import sys
import tomllib

import pytest
from packaging.requirements import Requirement

import kvjax

ROOT = pathlib.Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
# The top-level modules of what `pip install kvjax` does not bring.
OPTIONAL = (
    *("datasets", "flax", "lm_eval", "markdown_it", "matplotlib"),
    *("ml_collections", "optax", "orbax", "pandas", "rouge", "rouge_score"),
    *("tensorflow_datasets", "treescope", "wonderwords"),
)
WITHOUT = """\
import sys

sys.modules.update(dict.fromkeys({absent}))  # to import one is a ModuleNotFoundError
{body}
"""
GENERATE = """\
import jax
import kvjax
from kvjax.models import decoder

spec = kvjax.ModelSpec(
    name="tiny", num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, model_dim=16,
    ff_dim=16, vocab_size=32, context_length=64, rope_theta=1e4, norm_eps=1e-5,
    tie_embeddings=True,
)
model = kvjax.Model(spec, decoder.random_params(spec, jax.random.key(0)), None)
done = kvjax.generate(
    model, [list(range(24))], policy="key_diff", budget=8, max_new_tokens=3
)
print(len(done[0].tokens))
"""
POLICIES = """\
from kvjax import policies

policies.key_diff()
packages = {name.partition(".")[0] for name in sys.modules}
print(*sorted(packages & {"transformers", "tokenizers", "safetensors", "tqdm", "gguf"}))
print(*sorted(name for name in sys.modules if name.startswith("kvjax.")))
"""


def without_extras(body: str) -> subprocess.CompletedProcess:
    """Runs code in a process that finds no package of the extras."""
    return subprocess.run(
        [sys.executable, "-c", WITHOUT.format(absent=OPTIONAL, body=body)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
    )


def test_the_core_generates_without_extras():
    done = without_extras(GENERATE)
    assert done.stdout == "3\n", done.stderr


@pytest.mark.parametrize("module", ["kvjax.pallas.gpu", "kvjax.pallas.tpu"])
def test_kernels_import_without_extras(module):
    assert without_extras(f"import {module}").returncode == 0


def test_policies_import_nothing_else_of_the_package():
    done = without_extras(POLICIES)
    packages, modules = done.stdout.splitlines()
    assert packages == ""
    others = [name for name in modules.split() if ".policies" not in name]
    assert others == ["kvjax.registry", "kvjax.types"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("import kvjax.evaluation.report", "pip install 'kvjax[eval]'"),
        (
            "sys.argv = ['kvjax', 'run']\nfrom kvjax import cli; cli.main()",
            "error: ml_collections",
        ),
    ],
)
def test_a_missing_extra_is_named(body, message):
    done = without_extras(body)
    assert done.returncode and message in done.stderr.splitlines()[-1], done.stderr


def test_every_optional_package_is_of_an_extra_only():
    core = {Requirement(line).name for line in PROJECT["dependencies"]}
    brought = {Requirement(line).name for line in EXTRAS["eval"]}
    assert not core & brought
    assert not {name.replace("_", "-") for name in OPTIONAL} & core


def test_extras_name_extras_that_there_are():
    for line in (line for lines in EXTRAS.values() for line in lines):
        required = Requirement(line)
        assert required.name != "kvjax" or required.extras <= set(EXTRAS), line


def test_versions_agree():
    citation = (ROOT / "CITATION.cff").read_text()
    assert kvjax.__version__ == PROJECT["version"]
    assert f"version: {kvjax.__version__}" in citation


def test_lazy_names_are_all_there():
    assert set(kvjax.__all__) <= set(dir(kvjax))
    for name in set(dir(kvjax)) - {"TYPE_CHECKING"}:
        getattr(kvjax, name)
    with pytest.raises(AttributeError, match="no attribute 'generat'"):
        kvjax.generat  # noqa: B018


def command(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "kvjax", *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )


def test_the_command_lists_its_commands():
    done = command()
    assert done.returncode == 0
    for name in ("run", "report", "calibrate"):
        assert f"    {name} " in done.stdout
    assert command("--version").stdout == f"{kvjax.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ruin"], "there is no command 'ruin': use one of run, report, calibrate"),
        (["run", "--config=quickstrat"], "did you mean 'quickstart'?"),
        (["run", "--config=quickstart"], "--workdir is missing"),
        (["report"], "no runs named"),
    ],
)
def test_mistakes_of_the_command_are_one_line(arguments, message):
    if arguments != ["ruin"]:
        pytest.importorskip("pandas", reason="needs the extra eval")
    done = command(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and message in done.stderr
    assert done.stderr.count("\n") == 1
