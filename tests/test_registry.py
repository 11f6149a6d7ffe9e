"""What is made by name: one that was registered, or a function of the user's own."""

import sys

import pytest

from kvjax import policies
from kvjax.registry import Registry
from kvjax.types import UserError

RULES = """\
from kvjax import policies


def keep_digits(size=1):
    return policies.stateless(f"digits {size}", lambda view: view.positions)


digits = 7
"""


@pytest.fixture
def cups():
    registry = Registry("cup", dict)
    registry.register("plain", lambda size=1: {"size": size})
    registry.register("painted", lambda colour, size=1: {"colour": colour})
    return registry


@pytest.fixture
def rules(tmp_path, monkeypatch):
    """A folder with a module of the user's, where the process stands."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    (tmp_path / "my_rules.py").write_text(RULES)
    (tmp_path / "torn_rules.py").write_text("def keep(:\n")
    (tmp_path / "poor_rules.py").write_text("import no_such_package\n")
    yield
    for name in ("my_rules", "torn_rules", "poor_rules"):
        sys.modules.pop(name, None)


def test_makes_by_name(cups):
    assert cups.names() == ("painted", "plain")
    assert cups.make("plain", size=3) == {"size": 3}
    assert cups.make("painted", colour="red") == {"colour": "red"}


def test_the_same_again_is_no_other(cups):
    factory = cups.factory("plain")
    assert cups.register("plain", factory) is factory


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda cups: cups.make("plane"), ["'plane'", "mean 'plain'?", "painted"]),
        (lambda cups: cups.make(""), ["''", "painted, plain", "module:function"]),
        (lambda cups: cups.make("plain", weight=2), ["'plain'", "'weight'"]),
        (lambda cups: cups.make("painted"), ["'painted'", "missing", "'colour'"]),
        (lambda cups: cups.register("plain", dict), ["'plain'", "taken"]),
        (lambda cups: cups.register("a:b", dict), ["'a:b'", "colon"]),
        (lambda cups: cups.register("", dict), ["''", "give it a name"]),
    ],
)
def test_errors(cups, ask, words):
    says(words, lambda: ask(cups))


def test_makes_what_the_user_wrote(rules):
    before = list(sys.path)
    assert policies.make("my_rules:keep_digits").name == "digits 1"
    assert policies.make("my_rules:keep_digits", size=3).name == "digits 3"
    assert sys.path == before


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("no_rules:keep", {}, ["No module named 'no_rules'"]),
        ("my_rules:keep", {}, ["my_rules has no function 'keep'"]),
        ("my_rules:digits", {}, ["my_rules has no function 'digits'"]),
        ("my_rules:keep_digits", {"base": 8}, ["'base'"]),
        ("my_rules:", {}, ["module:function"]),
        (":keep", {}, ["module:function"]),
        (".rules:keep", {}, ["module:function"]),
        ("my_rules:a:b", {}, ["module:function"]),
        ("torn_rules:keep", {}, ["cannot be imported", "torn_rules.py, line 1"]),
        ("poor_rules:keep", {}, ["cannot be imported", "'no_such_package'"]),
        ("fractions:Fraction", {}, ["makes a Fraction", "Policy"]),
        ("types:SimpleNamespace", {}, ["signature"]),
    ],
)
def test_errors_of_the_user_s_own(rules, name, options, words):
    says([repr(name), *words], lambda: policies.make(name, **options))


def test_registered_policies_are_made_like_ours(monkeypatch):
    monkeypatch.setattr(policies._registry, "_factories", {"tova": policies.tova})
    policies.register("my_tova", lambda: policies.tova()._replace(name="my_tova"))
    assert policies.names() == ("my_tova", "tova")
    assert policies.make("my_tova").name == "my_tova"
    says(["'tova'", "taken"], lambda: policies.register("tova", policies.h2o))


def says(words, ask):
    """One line, with these words in it."""
    with pytest.raises(UserError) as error:
        ask()
    message = str(error.value)
    assert len(message.splitlines()) == 1
    assert all(word in message for word in words), message
