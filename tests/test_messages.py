"""What stderr is told while kvjax works, and where warnings point."""

import sys
import warnings

import jax
import pytest
from conftest import tiny_model, tiny_spec

import kvjax
from kvjax import messages
from kvjax.cache.spec import make_spec


class Clock:
    """Seconds as a test has them pass."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.delenv("KVJAX_PROGRESS", raising=False)
    found = Clock()
    monkeypatch.setattr(messages, "time", found)
    return found


def test_every_stage_that_ends_has_a_line(clock, capsys):
    """In a log file; what a stage that is kept anyway took nobody needs to know."""
    with messages.progress(24) as say:
        say("compiling for a batch of 12", 0)
        clock.now += 34.04
        say("running", 0)
        assert "running" not in capsys.readouterr().err  # it has not ended
        clock.now += 7
        say("", 12)
        say("compiling again", 0)
        say("running", 0)
        clock.now += 6
        say("", 12)
        say("found", 3)
        say("writing", 0)
        clock.now += 1
    assert capsys.readouterr().err.splitlines() == [
        "kvjax: running: 7.0 s (12 of 24)",
        "kvjax: running: 6.0 s (24 of 24)",
        "kvjax: found (27 of 24)",
        "kvjax: writing: 1.0 s",
    ]


def test_a_stage_that_fails_has_no_line(clock, capsys):
    with pytest.raises(KeyError), messages.progress(0) as say:
        say("compiling", 0)
        clock.now += 3
        raise KeyError
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("told", "wanted", "terminal", "shown"),
    [
        (None, None, False, "lines"),
        (None, None, True, "bar"),
        ("1", None, False, "bar"),
        ("0", None, True, ""),
        ("0", True, False, "bar"),
        ("1", False, True, ""),
    ],
)
def test_who_wants_what(clock, monkeypatch, capsys, told, wanted, terminal, shown):
    if told is not None:
        monkeypatch.setenv("KVJAX_PROGRESS", told)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    with messages.progress(2, wanted) as say:
        say("running", 0)
        clock.now += 1
        say("", 2)
    seen = capsys.readouterr()
    assert not seen.out  # which is for results
    found = "bar" if "\r" in seen.err else "lines" if seen.err else ""
    assert found == shown


def test_generating_says_what_it_did(monkeypatch, capsys):
    """Where stderr is no terminal, as in a test."""
    monkeypatch.delenv("KVJAX_PROGRESS", raising=False)
    monkeypatch.setattr(messages, "_BRIEF", 0.0)
    model = tiny_model(vocab_size=53)
    how = {"policy": "recency", "budget": 16, "max_new_tokens": 4}
    kvjax.generate(model, [[1, 2, 3]] * 3, **how)
    compiling, running = capsys.readouterr().err.splitlines()
    assert compiling.startswith("kvjax: compiling for a batch of 3: ")
    assert running.startswith("kvjax: running 3 prompts in 3 rows: ")
    assert running.endswith(" s (3 of 3)")
    monkeypatch.setenv("KVJAX_PROGRESS", "0")
    kvjax.generate(model, [[1, 2, 3]] * 3, **how)
    assert not capsys.readouterr().err


def deep():
    """A function of the package, as far as its module's name tells."""
    names = {"__name__": "kvjax.deep", "warn": messages.warn, "jax": jax}
    exec(
        "def outer(own):\n"
        "    jax.jit(lambda x: inner(own) or x)(1.0)\n"
        "def inner(own):\n"
        "    own()\n"
        "    warn('it is late')\n",
        names,
    )
    return names["outer"]


def test_warnings_point_at_the_line_that_called():
    """Through JAX, which traces, and however many of our own functions."""
    outer = deep()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        outer(lambda: None)
        line = sys._getframe().f_lineno - 1
    assert [(w.filename, w.lineno) for w in found] == [(__file__, line)]
    assert found[0].category is UserWarning


def test_a_warning_of_a_budget_points_here():
    most = kvjax.Schedule(prefill_chunk=8, evict_size=64)
    with pytest.warns(UserWarning, match="an eviction leaves 1 of the 65") as found:
        make_spec(tiny_spec(), "recency", 65, most)
    assert found[0].filename == __file__
