"""Tests what the tables of KV arithmetic print, draw and refuse."""

import functools
import json
import math
import pathlib
import subprocess
import sys
import types

import pytest
from conftest import often

sys.path.append(str(pathlib.Path(__file__).parents[2] / "experiments" / "memory"))

import memory_arithmetic
import memory_table
from memory_parts import PARTS

from kvjax.evaluation import arithmetic, roofline
from kvjax.evaluation.report import figures
from kvjax.models import presets
from kvjax.types import UserError

GIVEN = {
    "models": ["llama-3-8b"],
    "device": "a100-80gb",
    "tokens": 4096,
    "batches": ["1", "32"],
    "longest": 4096,
    "seed": 0,
    "link_gb_per_s": 25.0,
    "copy_us": 10.0,
    "budget": 1024,
    "dtype": "bfloat16",
    "only": ["kv"],
}
SCRIPT = pathlib.Path(memory_arithmetic.__file__)


def asked(**changes):
    """What the script asks for without flags, of one model."""
    found, _ = memory_arithmetic.checked(types.SimpleNamespace(**GIVEN))
    return found._replace(**changes)


@functools.cache
def made(name):
    return PARTS[name](asked())


LARGE = {"squeeze", "kcache"}  # whole models are planned
NAMES = [name for name in PARTS if name != "rows"]
SMALL = [name for name in NAMES if name not in LARGE]


@pytest.mark.parametrize("name", often(NAMES, SMALL, others="e2e"))
def test_a_part_is_a_table_with_its_notes(name):
    part = made(name)
    title, table, *notes = memory_table.as_text(part).split("\n\n")
    lines = table.split("\n")
    assert title == f"## {part.title}" and len(lines) == 2 + len(part.rows)
    assert len({line.count("|") for line in lines}) == 1 and notes
    assert "nan" not in table and "None" not in table
    json.dumps(part.rows, allow_nan=False)


def test_bytes_and_shares():
    text = memory_table.as_text(made("kv"))
    assert "| llama-3-8b |            8, 32 |           128 |          0.5 |" in text
    (_, row) = made("step").rows
    assert row["share_of_pairs"] == pytest.approx(0.534, abs=1e-3)
    assert row["waits_for"] == "bytes" and row["devices"] == 1
    many = PARTS["step"](asked(batches=[119, 120])).rows
    held = [16.06 + batch * 2**29 / 1e9 for batch in (119, 120)]  # embeddings too
    assert held[0] < 80 < held[1] and [row["devices"] for row in many] == [1, 2]


def test_batches_that_fit(monkeypatch):
    """What fits is what is left over the bytes of a row, and compression fits more."""
    default, one = asked(), {"llama-2-7b": presets.CONFIGS["llama-2-7b"]}
    monkeypatch.setattr(presets, "CONFIGS", one)
    part = PARTS["rows"](default)
    (row,) = part.rows
    left = 80e9 * 0.92 - row["weights"]
    batch, positions = row["batch"][80], 4 * 32 * 32
    assert batch["2048"] == left // (2048 * (0.5 * 2**20 + positions))
    assert batch["kv 1024"] > 1.9 * batch["2048"] > 1.9 * 4 * batch["8192"] > 0
    assert row["batch"][24]["32768"] == 0
    text = memory_table.as_text(part)
    assert "| llama-2-7b |       13.5 |            0.500 |" in text
    assert " 7, 1, -, 15 | " in text


@pytest.mark.e2e
def test_a_share_gains_by_its_bytes():
    """SqueezeAttention's Table 3: its settings, and gains by the bytes of a step.

    Mistral at 64: 14.2 GB of weights, and pairs of 2^17 bytes, 1,024 of a row on
    average and 307 of them; the 70B at 32: 137 GB, 5 * 2^16 bytes, 512 and 230.
    """
    part = made("squeeze")
    published = {
        (row["model"], row["batch"]): row["published"]
        for row in part.rows
        if row["published"]
    }
    assert published == {
        ("mistral-7b", 64): 2.2,
        ("mistral-7b", 224): "out of memory",
        ("llama-2-70b", 32): 1.4,
        ("llama-2-70b", 64): "out of memory",
    }
    gains = {(row["model"], row["batch"]): row["gain"] for row in part.rows}
    for case, weights, pair, tokens, kept, rounded in (
        (("mistral-7b", 64), 14.22e9, 2**17, 1024, 307, 1.36),
        (("llama-2-70b", 32), 137.4e9, 5 * 2**16, 512, 230, 1.02),
    ):
        full, few = (weights + case[1] * pair * each for each in (tokens, kept))
        assert gains[case] == pytest.approx(full / few, rel=0.005)
        assert round(gains[case], 2) == rounded
    shares = {row["model"]: part.columns["kept"](row) for row in part.rows}
    assert shares == {"mistral-7b": "20%", "llama-2-70b": "30%"}
    text = memory_table.as_text(part)
    assert "512 and 256 tokens, 1,024 and 512 new" in text
    assert all(row["batch"] < min(row["rows"]) for row in part.rows)
    for model in shares:
        by_batch = [row["gain"] for row in part.rows if row["model"] == model]
        assert by_batch == sorted(by_batch)


def test_picture(tmp_path):
    import matplotlib

    path = tmp_path / "x.png"
    figures.save(path, memory_arithmetic.draw_step, asked())
    assert min(matplotlib.image.imread(path).shape[:2]) > 800


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"device": "a100"}, "no rates of 'a100': one of a100-80gb, "),
        ({"models": ["gpt-4"]}, "no shape of 'gpt-4': one of falcon-7b, "),
        ({"models": []}, "--models is empty: name one at least"),
        ({"batches": ["1", "0"]}, "--batches 0: must be at least 1"),
        ({"batches": ["1", "x"]}, "--batches is 'x': give a whole number"),
        ({"only": ["beam"]}, "no table 'beam': --only takes kv, "),
        ({"link_gb_per_s": 0.0}, "--link_gb_per_s 0.0: must be at least"),
        ({"copy_us": math.nan}, "--copy_us is nan: give a number"),
        ({"dtype": "int3"}, "dtype is 'int3': give one of "),
    ],
)
def test_slips(change, told):
    with pytest.raises(UserError, match=told) as caught:
        memory_arithmetic.checked(types.SimpleNamespace(**(GIVEN | change)))
    assert "\n" not in str(caught.value)


def test_flags_become_what_is_asked():
    found, tables = memory_arithmetic.checked(types.SimpleNamespace(**GIVEN))
    assert (found.link, found.batches) == (arithmetic.Link(25e9, 10e-6, 16), [1, 32])
    assert found.device == roofline.device("a100-80gb") and tables == ["kv"]
    assert found.specs == [presets.spec("llama-3-8b")]


def test_a_folder_that_cannot_be(tmp_path):
    """One line, before any table."""
    (tmp_path / "file").touch()
    given = [sys.executable, SCRIPT, "--only=step", f"--workdir={tmp_path}/file/x"]
    done = subprocess.run(given, capture_output=True, text=True)
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith(f"error: {tmp_path}/file/x cannot be written: ")
    assert done.stderr.count("\n") == 1


def test_the_command(tmp_path):
    done = subprocess.run(
        [
            *(sys.executable, SCRIPT, f"--workdir={tmp_path}", "--device=tpu-v5e"),
            *("--models=llama-3-8b,mistral-7b", "--batches=8", "--only=kv,step"),
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    told = json.loads(done.stdout.splitlines()[-1])
    assert [row["bytes"]["8"] / 2**30 for row in told["kv"]] == [4, 4]
    assert told["device"] == "tpu-v5e" and "bits" not in told
    assert told["picture"] == str(tmp_path / "step.png")
    assert pathlib.Path(told["picture"]).exists()
