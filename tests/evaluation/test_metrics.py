"""Every metric against its authors' own code (golden/make_metrics.py), and edges."""

import decimal
import functools
import json
import pathlib
import re

import pytest
import yaml

from kvjax.evaluation import metrics

ROOT = pathlib.Path(__file__).parents[2]
GOLDEN = json.loads((ROOT / "tests/golden/metrics.json").read_text("utf-8"))["cases"]
TRIVIA = {"normal": metrics.normal_trivia}
CHECKED = {
    name: getattr(metrics, name) for name in GOLDEN if not name.endswith("_trivia")
} | {
    "normal_trivia": metrics.normal_trivia,
    "token_f1_trivia": functools.partial(metrics.token_f1, **TRIVIA),
    "exact_match_trivia": functools.partial(metrics.exact_match, **TRIVIA),
}


@pytest.mark.parametrize("name", sorted(set(GOLDEN) - {"final_number"}))
def test_metric_gives_what_its_authors_code_gives(name):
    for *arguments, value in GOLDEN[name]:
        found = CHECKED[name](*arguments)
        exact = isinstance(value, str)
        assert found == (value if exact else pytest.approx(value, abs=1e-6)), arguments
        if isinstance(found, float):
            assert 0 <= found <= 1


def test_golden_cases_tell_right_from_wrong():
    for name, cases in GOLDEN.items():
        assert len({str(value) for *_, value in cases}) > 1, name


def test_final_number_as_by_openai_and_the_harness():
    for text, value in GOLDEN["final_number"]:
        expected = None if value is None else decimal.Decimal(value)
        assert metrics.final_number(text) == expected, text


def test_the_harness_s_task_finds_the_same_final_number():
    """lm_eval takes the last match, and of it the group that is not empty."""
    path = ROOT / "experiments/harness/gsm8k.yaml"
    asked = yaml.load(path.read_text(), yaml.BaseLoader)
    pattern = asked["filter_list"][0]["filter"][0]["regex_pattern"]
    ignored = "|".join(asked["metric_list"][0]["regexes_to_ignore"])
    more = ["#### 18\n\nThere are 3 more", "2 #### 4 #### 5", "#### no, 7"]
    for text in [text for text, _ in GOLDEN["final_number"]] + more:
        found = [next(filter(None, groups)) for groups in re.findall(pattern, text)]
        number = decimal.Decimal(re.sub(ignored, "", found[-1])) if found else None
        assert number == metrics.final_number(text), text


@pytest.mark.parametrize(
    ("text", "references", "grade"),
    [
        ("#### 18", ["18"], 1),
        ("#### 18.00", ["18"], 1),  # numbers are compared, not their spelling
        ("#### $1,800", ["1800"], 1),
        ("it is 18", ["-18"], 0),
        ("eighteen", ["18"], 0),
        ("#### 5\nQuestion: 6", ["6"], 0),
    ],
)
def test_number_match(text, references, grade):
    assert metrics.number_match(text, references) == grade


def test_answer_match_ends_with_its_line_and_knows_bare_letters():
    assert metrics.answer_match("the answer is B.\nThat was all.", ["(B)"]) == 1
    assert metrics.answer_match("the answer is 12.\nNow 13.", ["12"]) == 1
    assert metrics.answer_match("the answer is Both", ["(B)"]) == 0


def test_rouge_takes_the_best_reference_of_each_measure():
    alone = [metrics.rouge("b c d e", [r]) for r in ("e b x d", "c d q")]
    both = metrics.rouge("b c d e", ["e b x d", "c d q"])
    assert both == {name: max(one[name] for one in alone) for name in both}
    assert alone[0]["rouge1"] > alone[1]["rouge1"]
    assert alone[0]["rouge2"] < alone[1]["rouge2"]


def test_first_line_skips_empty_ones():
    assert metrics.first_line("\n\n yes\nno") == " yes"
    assert metrics.first_line("") == ""
