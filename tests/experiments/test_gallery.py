"""The gallery's page: complete docstrings, and everything in its place."""

import json
import pathlib
import re
import sys

import jax
import numpy as np
import pytest
from testing.records import FULL, make_record

import kvjax
from kvjax import policies
from kvjax.evaluation.report.records import read_records

ROOT = pathlib.Path(__file__).parents[2]
sys.path.append(str(ROOT / "experiments" / "gallery"))

import gallery_pictures as pictures  # noqa: E402
import gallery_runs as runs  # noqa: E402
import gallery_words as words  # noqa: E402
import policy_gallery as gallery  # noqa: E402

pytestmark = pytest.mark.e2e

DOC = """Keeps what matters.

    score = a * b
            + c

A paragraph with `code` and
two lines.

Args:
  first, second: share one
    meaning: of two lines.
  third: has another; the paper's 4.

Needs: mass, the sums.
Source: A Paper (Somebody et al. 2024), section 2. The code
  differs.
Raises:
  UserError: sometimes.
"""


# ------------------------------------------------------------------------ docstrings


@pytest.mark.parametrize("name", policies.names())
def test_docstring_is_complete(name):
    doc = words.doc_of(name)
    assert doc.summary.endswith(".")
    assert "=" in doc.formula
    assert doc.source
    assert list(doc.args) == list(words.defaults(name))
    assert bool(doc.needs) == bool(policies.make(name).required_stats)


@pytest.mark.parametrize("name", gallery.COMBINATORS)
def test_docstring_of_combinator_is_complete(name):
    doc = words.doc_of(name)
    assert doc.summary.endswith(".")
    assert set(words.defaults(name)) - {"policy"} <= set(doc.args)


def test_parse():
    doc = words.parse(DOC)
    assert doc.summary == "Keeps what matters."
    assert doc.formula == "score = a * b\n        + c"
    assert doc.text == ("A paragraph with `code` and two lines.",)
    assert doc.args == {
        "first": "share one meaning: of two lines.",
        "second": "share one meaning: of two lines.",
        "third": "has another; the paper's 4.",
    }
    assert doc.needs == "mass, the sums."
    assert doc.source.endswith("section 2. The code differs.")
    assert doc.raises == "UserError: sometimes."
    assert gallery.short_source(doc.source) == "A Paper (Somebody et al. 2024)"
    assert words.parse("One line.").source == ""


def test_markdown_keeps_signs():
    assert gallery.markdown("a * b < c, `d * e`") == r"a \* b \< c, `d * e`"
    assert r"\|v\|" in gallery.table([{"x": "|v|"}])


# ----------------------------------------------------------------------------- costs


@pytest.mark.parametrize(
    ("name", "cost"),
    [
        ("recency", ("positions", (), 0, 0)),
        ("key_diff", ("pairs", ("keys",), 0, 0)),
        ("lag_kv", ("pairs", ("keys", "values"), 0, 0)),
        ("average_attention", ("sums", (), 4, 0)),
        ("roco", ("sums", (), 8, 0)),
        ("tova", ("row", (), 4, 0)),
        ("snapkv", ("queries", ("keys",), 0, 32 * (3 * 3 * 64 + 1) * 4)),
        ("scissorhands", ("weights", (), 4 * 13, 0)),
    ],
)
def test_cost(name, cost):
    assert words.cost_of(policies.make(name), words.Shape()) == cost


# ------------------------------------------------------------------------------ runs


def test_runs_are_those_of_kvjax(tiny, monkeypatch):
    """Beside another watcher a rule keeps and says what it does alone."""
    for name, value in (("BUDGET", 24), ("BLOCK", 8), ("NEW", 5)):
        monkeypatch.setattr(runs, name, value)
    tokens = np.random.default_rng(0).integers(0, 50, 61).tolist()
    policy = policies.snapkv(4, 3)
    _, found = runs.readings_of(tiny, [policies.roco(), policy], tokens)
    for phases, (kept, new) in found.items():
        (alone,) = kvjax.generate(
            tiny,
            [tokens],
            policy=policy,
            budget=24,
            schedule=kvjax.Schedule(phases, 8, 8),
            max_new_tokens=1,
        )
        jax.tree.map(np.testing.assert_array_equal, kept, alone.kept_positions)
        assert new[:1] == alone.tokens


def test_data_of_earlier_runs_are_read():
    data = runs.read(ROOT / "docs" / "data" / "gallery.json")
    assert tuple(data["setting"]["shape"]) == words.Shape._fields
    for each in data["policies"].values():
        assert tuple(each["runs"]) == pictures.SCHEDULES


def test_pack():
    held = np.random.default_rng(0).random(77) < 0.5
    np.testing.assert_array_equal(pictures.unpack(pictures.pack(held), 77), held)


# ------------------------------------------------------------------------------ page


def fake_data(names):
    rng = np.random.default_rng(0)

    def run():
        kept = rng.random((3, 3, 60)) < 0.4
        return {
            "found": bool(rng.random() < 0.5),
            "text": " 12345",
            "pairs": 24.0,
            "needle": 0.4,
            "density": [40] * 6,
            "kept": [[pictures.pack(head) for head in layer] for layer in kept],
        }

    return {
        "setting": {
            "model": "fake",
            "shape": words.Shape()._asdict(),
            "num_layers": 3,
            "layers": [1, 2, 3],
            "budget": 24,
            "block": 8,
            "tokens": 60,
            "answer": "12345",
            "needle": [10, 20],
            "question": [50, 55],
        },
        "full": {"found": True, "text": " 12345"},
        "policies": {
            name: {"call": f"{name}()", "runs": {p: run() for p in pictures.SCHEDULES}}
            for name in names
        },
    }


def fake_sweep(docs):
    records = [
        make_record(
            policy,
            schedule="after_prefill",
            budget=budget,
            batch_size=4,
            score=1.0 if policy == "tova" else 0.5,
            kl=0.25 if policy == "tova" else 0.125,
            output_tokens_per_s=10.0 if policy == "tova" else 20.0,
        )
        for policy in ("tova", "recency", "streaming")
        for budget in (64, 128)
    ]
    lines = [json.dumps(each) for each in [FULL, *records]]
    (docs / "data" / "policy_sweep.jsonl").write_text("\n".join(lines))
    (docs / "data" / "policy_sweep_reading.md").write_text("Words about the sweep.\n")
    (docs / "policies" / "pareto.png").write_bytes(b"")


@pytest.fixture
def docs(tmp_path):
    for folder in ("data", "policies"):
        (tmp_path / folder).mkdir()
    return tmp_path


def test_page(docs, capsys):
    data = fake_data(("tova", "key_diff"))
    gallery.draw(["tova", "key_diff"], data, docs)
    runs.save(data, docs / "data" / "gallery.json")
    fake_sweep(docs)
    page = gallery.page(runs.read(docs / "data" / "gallery.json"), docs)
    headings = re.findall(r"^## (.*)", page, re.M)
    assert headings[:3] == ["All policies", "Combinators", "Which is best"]
    assert headings[-1] == "Gallery"
    sections = re.findall(r"^### `(.*)`", page, re.M)
    assert tuple(sections) == (*gallery.COMBINATORS, *policies.names())
    for name in policies.names():
        assert f"| [`{name}`](#{name}) |" in page
    drawn = re.findall(r"!\[.*?\]\((.*?)\)", page)
    assert len(drawn) == 4
    assert all((docs / picture).exists() for picture in drawn)
    assert "Words about the sweep." in page
    assert "| `after_prefill` | 128 | `tova`: 1.00 | `recency`, `streaming`: 0." in page
    assert "padding" not in page.lower()
    left_out = capsys.readouterr().err
    assert "left out: the picture of h2o" in left_out and "'Padding'" in left_out


def test_page_without_pictures_and_sweep(docs, capsys):
    page = gallery.page(fake_data(()), docs)
    assert "![" not in page and "Which is best" not in page
    assert "time" not in re.search(r"^\| policy .*", page, re.M)[0]
    assert "the sweep" in capsys.readouterr().err


def test_relative_times(docs):
    fake_sweep(docs)
    records = read_records(docs / "data" / "policy_sweep.jsonl")
    base, times = gallery.relative_times(records)
    assert base == "recency"
    assert times == {"tova": 2.0, "recency": 1.0, "streaming": 1.0}
    assert gallery.relative_times([]) == ("", {})


def test_pictures_are_small(docs):
    gallery.draw(["tova"], fake_data(("tova",)), docs)
    for name in ("tova", "overview"):
        assert (docs / "policies" / f"{name}.png").stat().st_size < 60_000


def test_the_committed_page_is_made_of_the_committed_data():
    """Every section: none may drop out because its maker has moved."""
    data = runs.read(ROOT / "docs" / "data" / "gallery.json")
    made = gallery.page(data, ROOT / "docs")
    assert made == (ROOT / "docs" / "policies.md").read_text()
