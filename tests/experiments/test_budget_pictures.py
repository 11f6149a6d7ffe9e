"""Pictures of sizes by rule: what their rows say, and what they refuse."""

import json
import pathlib
import subprocess
import sys

import matplotlib.image
import numpy as np
import pytest
from testing.records import FULL, make_record

sys.path.append(str(pathlib.Path(__file__).parents[2] / "experiments" / "gallery"))

import budget_pictures

from kvjax import UserError
from kvjax.evaluation.report import groups
from kvjax.evaluation.report.records import append_record

SCRIPT = pathlib.Path(budget_pictures.__file__)
WAYS = "alike", "by head"


def of_length(record, length):
    tasks = {"needle": {"metric": "accuracy", "most_prompt_tokens": length}}
    return record | {"tasks": tasks}


def run(share, length, score, rules=("KeyDiff", "SnapKV")):
    """A run's records; the full cache's score is 0.8."""
    ways = [(rule, way) for rule in rules for way in WAYS]
    methods = [
        make_record(
            f"{rule}, {way}",
            series=rule,
            budget_share=share,
            score=score,
            kl=0.1 + i,
            loss=2.5 + i,
            reference_loss=2.25,
        )
        for i, (rule, way) in enumerate(ways)
    ]
    records = [FULL | {"score": 0.8}, *methods]
    return groups.Source("a run", [of_length(each, length) for each in records])


def test_rows_are_of_the_full_cache_of_their_run():
    rows = budget_pictures.table([run(0.25, 1000, 0.4), run(0.5, 2000, 0.8)])
    assert len(rows) == 2 * 2 * 2
    found = rows.set_index(["rule", "way", "length", "share"])["found"]
    assert found["SnapKV", "by head", 1000, 0.25] == pytest.approx(50)
    assert found["KeyDiff", "alike", 2000, 0.5] == pytest.approx(100)


@pytest.mark.parametrize("measure", ["found", "kl"])
def test_lines_have_the_values_and_gaps_where_nothing_was_run(measure):
    sources = [run(0.25, 1000, 0.4), run(0.5, 1000, 0.6), run(0.5, 2000, 0.8)]
    rows = budget_pictures.table(sources)
    told = budget_pictures.draw(rows, WAYS, measure)
    panels = told.get_axes()
    assert len(panels) == 2 * 2
    assert [panel.get_title(loc="left") for panel in panels] == [
        *("KeyDiff", "SnapKV", "", "")
    ]
    short, long = panels[1].get_lines()[1], panels[3].get_lines()[1]
    wanted = {"found": ([50, 75], [np.nan, 100]), "kl": ([3.1, 3.1], [np.nan, 3.1])}
    for line, values in zip((short, long), wanted[measure], strict=True):
        np.testing.assert_allclose(line.get_ydata(), values)
    assert [text.get_text() for text in told.legends[0].get_texts()] == [*WAYS]


def test_tables_have_all_that_was_run():
    few = run(0.5, 2000, 0.6)
    full, *_, alike, by_head = few.records
    key_diff = few.records[1]
    better = few._replace(records=[full, key_diff, alike, by_head | {"score": 0.8}])
    page = budget_pictures.as_markdown(
        budget_pictures.table([run(0.25, 1000, 0.4), better]), "Found in code"
    )
    title, _, *told = page.split("\n\n")
    assert title == "# Found in code"
    assert told[0] == "## 25% of 1,000 tokens" and told[2] == "## 50% of 2,000 tokens"
    cells = [
        [
            [cell.strip() for cell in line.split("|")[1:-1]]
            for line in table.splitlines()
        ]
        for table in (told[1], told[3])
    ]
    assert cells[0][0] == cells[1][0] == ["", "KeyDiff", "SnapKV"]
    assert cells[0][2] == ["alike", "**50%**; 0.250, 0.100", "**50%**; 2.250, 2.100"]
    assert cells[1][2:] == [
        ["alike", "75%; 0.250, 0.100", "75%; 2.250, 2.100"],  # no other way, no bold
        ["by head", "", "**100%**; 3.250, 3.100"],
    ]


def test_what_cannot_be_compared_is_refused():
    both = [run(0.25, 1000, 0.4), run(0.25, 1000, 0.6)]
    with pytest.raises(UserError, match=r"KeyDiff, alike with 25.0% of 1000 tokens"):
        budget_pictures.table(both)
    alone = groups.Source("alone", both[0].records[1:])
    with pytest.raises(UserError, match="alone has no full cache that finds"):
        budget_pictures.table([alone])
    with pytest.raises(UserError, match="no method keeps a share"):
        budget_pictures.table([groups.Source("full", both[0].records[:1])])
    timed = [{**each, "kl": None} for each in both[0].records]
    with pytest.raises(UserError, match="tells its distance from the full cache"):
        budget_pictures.table([groups.Source("timed", timed)])


@pytest.mark.e2e
def test_the_command(tmp_path):
    for record in run(0.25, 1000, 0.4).records:
        append_record(tmp_path / "records.jsonl", record)

    def asked(*options):
        command = [sys.executable, SCRIPT, tmp_path, f"--workdir={tmp_path}/out"]
        return subprocess.run([*command, *options], capture_output=True, text=True)

    done = asked("--ways=")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["methods"] == 4
    assert "## 25% of 1,000 tokens" in pathlib.Path(told["tables"]).read_text()
    fewer = asked("--rules=SnapKV", "--ways=by head")
    assert json.loads(fewer.stdout.splitlines()[-1])["methods"] == 2
    for measure in ("found", "kl"):
        assert min(matplotlib.image.imread(told[measure]).shape[:2]) > 300
    for option, told in (
        ("--ways=alike,sideways", "--ways=sideways: no run has it; these have alike"),
        ("--rules=Guess", "--rules=Guess: no run has it; these have KeyDiff, SnapKV"),
    ):
        wrong = asked(option)
        assert wrong.returncode == 2 and wrong.stderr.count("\n") == 1
        assert told in wrong.stderr
