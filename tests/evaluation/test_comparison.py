"""Runs joined: groups, tables, pages and the command."""

import json
import os
import pathlib
import re
import subprocess
import sys

import matplotlib.image
import pandas as pd
import pytest
from testing.records import SPEEDS, sweep_records, task_record, task_run, write_runs

from kvjax.evaluation import report
from kvjax.evaluation.report import grids, groups, scatters, tables
from kvjax.types import UserError

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def workdirs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return write_runs()


def rows_of(grid):
    return {(row[0], row[2]): row for row in grid.rows}


# --- joining ------------------------------------------------------------------------


def test_tasks_of_several_runs_stand_in_one_table(workdirs):
    (group,) = groups.quality_groups(report.read(workdirs))
    grid = tables.score_table(group)
    assert grid.head == ["Method", "Schedule", "Budget", "xsum", "needle", "Mean Δ"]
    assert [row[0] for row in grid.rows] == ["Full cache", "good", "poor", "good"]
    found = rows_of(grid)
    assert found["Full cache", "all"][3:] == ["50.0", "100.0", "-"]
    # (0.4 - 0.5 + 0.75 - 1.0) / 2 and (0.3 - 0.5 + 0.5 - 1.0) / 2
    assert found["good", "50%"][3:] == ["40.0", "75.0", "-17.5"]
    assert found["poor", "50%"][3:] == ["30.0", "50.0", "-35.0"]
    assert found["good", "25%"][3:] == ["20.0", "-", "-30.0 (1 of 2)"]
    assert grid.bold == {(1, 3), (1, 4), (1, 5)}  # alone at 25%, the last has no rival
    assert grid.breaks == {1, 3}


def test_intervals_stand_behind_scores_in_whole_points(tmp_path):
    """In all three files; nothing where a record has none."""
    made = task_run("xsum", 0.5, 0.412, 0.3)
    made[1]["tasks"]["xsum"]["interval"] = [0.096, 0.997]
    made[2]["tasks"]["xsum"]["interval"] = None
    report.write_comparison([groups.Source("a", made)], tmp_path)
    told = {"report.md": "**41.2 (10-100)**", "tables.tex": r"\textbf{41.2 (10-100)}"}
    told["report.html"] = "<strong>41.2 (10-100)</strong>"
    for name, cell in told.items():
        assert cell in (tmp_path / name).read_text()
    tex = (tmp_path / "tables.tex").read_text()
    assert r"in points of 100; in brackets, 95\% intervals.}" in tex
    page = (tmp_path / "report.md").read_text()
    assert " 50.0 |" in page and " 30.0 |" in page


def test_equals_are_not_marked_as_best(tmp_path):
    source = groups.Source("a", task_run("xsum", 0.5, 0.4, 0.4001), False)
    (group,) = groups.quality_groups([source])
    assert not tables.score_table(group).bold  # nor by a digit that is not shown
    assert [row[0] for row in tables.rank_table(group).rows] == ["-", "1", "1"]


def test_ranks_and_shares_of_memory(workdirs):
    (group,) = groups.quality_groups(report.read(workdirs))
    grid = tables.rank_table(group)
    ranks = [(row[0], row[1], row[3]) for row in grid.rows]
    assert ranks == [
        ("-", "Full cache", "all"),
        ("1", "good", "50%"),
        ("2", "poor", "50%"),
        ("-", "good", "25%"),
    ]
    # budgets of 80 and 120 slots, 1e4 bytes each, of 8e6
    assert grid.rows[1][5:] == ["2", "12%", "100%"]


def test_tasks_are_told_apart_by_what_was_asked(workdirs):
    short = task_run("needle", 1.0, 0.5, 0.5, prompt_tokens=500)
    sources = [*report.read(workdirs), groups.Source("x", short)]
    (group,) = groups.quality_groups(sources)
    assert group.columns == ["xsum", "needle 1,000", "needle 500"]
    head, rows = tables.task_table(group)[:2]
    assert head[6:8] == ["|kv| at 50%", "|kv| at 25%"]
    assert [row[6] for row in rows] == ["80", "120", "120"]
    assert [row[-1] for row in rows] == ["1", "2", "3"]


def test_a_task_is_asked_as_itself_not_as_the_longest_of_its_run():
    """Needles of 500 and 1,000 tokens, each beside a pass key of 2,000."""

    def source(path, length):
        made = task_run("needle", 1.0, 0.5, 0.5, prompt_tokens=2000)
        for each in made:
            each["tasks"]["needle"] |= {"most_prompt_tokens": length}
        return groups.Source(path, made, False)

    (group,) = groups.quality_groups([source("a", 500), source("b", 1000)])
    assert group.columns == ["needle 500", "needle 1,000"]


def test_a_comma_in_a_name_is_no_budget():
    comma = task_record("Batch-Max, KeyDiff", "xsum", 0.4, 64, "prefill_and_decode")
    comma["series"] = None
    slots = task_record(
        "slots", "xsum", 0.4, 48, "prefill_and_decode", method="slots 48"
    )
    (group,) = groups.quality_groups([groups.Source("a", [comma, slots])])
    assert [row[0] for row in group.rows] == ["Batch-Max, KeyDiff", "slots"]
    assert [row[2] for row in group.rows] == ["64", "48"]


def test_shares_that_round_to_one_percentage_are_two_budgets():
    made = [task_record("a", "xsum", 0.4, 64, share=s) for s in (0.125, 0.12)]
    (group,) = groups.quality_groups([groups.Source("a", made)])
    assert [row[2] for row in group.rows] == ["12.5%", "12%"]
    made = [each | {"loss": 2.0, "series": "a"} for each in made]
    assert tables.perplexity_table(made).head[2:] == ["12.5%", "12%"]


def test_methods_that_differ_in_name_only_keep_their_names():
    made = [
        task_record("a", "xsum", 0.4, 64),
        task_record("a", "xsum", 0.2, 64, method="b"),
    ]
    (group,) = groups.quality_groups([groups.Source("s", made)])
    assert [row[0] for row in group.rows] == ["a", "b"]


def test_codecs_are_told_apart_where_there_are_any():
    made = task_run("xsum", 0.5, 0.4, 0.3)
    made.append(task_record("Full cache", "xsum", 0.45, codec="int8"))
    (group,) = groups.quality_groups([groups.Source("s", made)])
    assert group.full[3] == "identity"  # what others are compared with
    table = tables.score_table(group)
    assert table.head[:4] == ["Method", "Schedule", "Budget", "Codec"]
    assert [row[3] for row in table.rows] == ["identity", "int8"] + ["identity"] * 2
    assert table.rows[1][-1] == "-5.0"
    names = [t.get_text() for t in scatters.task_scores(group).legends[0].get_texts()]
    assert names[:2] == ["Full cache", "Full cache, int8"]


def test_models_and_devices_are_not_mixed(workdirs):
    other = task_run("xsum", 0.1, 0.1, 0.1, device="gpu")
    sources = [*report.read(workdirs), groups.Source("gpu", other)]
    found = groups.quality_groups(sources)
    assert [(g.device, len(g.columns)) for g in found] == [("cpu", 2), ("gpu", 1)]
    assert "## Quality: tiny on gpu" in report.leaderboard(sources)


def test_a_sweep_joins_too(tmp_path):
    (group,) = groups.quality_groups([groups.Source("s", sweep_records())])
    assert [row[2] for row in group.rows[:2]] == ["all", "1,152"]
    assert len(group.rows) == 9 and group.columns == ["needle"]


def test_other_engines_stand_beside_ours():
    peer = SPEEDS[3] | {"model": "tiny.Q8", "device": "AMD"}
    more = SPEEDS[0] | {"method": "other memory", "memory_bytes": 1}
    source = groups.Source("s", [*SPEEDS[:3], peer, more], False)
    first, second = groups.throughput_groups([source])
    assert [r["method"] for r in first.records] == ["ED", "FKV", "Batch-Max", "kvpress"]
    assert [r["method"] for r in second.records] == ["other memory"]
    assert groups.quality_groups([source]) == []


# --- mistakes -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "holds no records.jsonl"),
        ("", "holds no records: no method has finished"),
        ('{"method": "A"', "holds no records"),
        ('{"a"\n{}\n', "line 1 is not a record in JSON: repair or remove it"),
        ('{"format": 2, "method": "A"}\n', "line 1 lacks 'experiment': repair"),
        ("[1]\n{}\n", "line 1 is not a record"),
    ],
)
def test_what_is_no_run(tmp_path, content, message):
    if content is not None:
        (tmp_path / "records.jsonl").write_text(content)
    with pytest.raises(UserError, match=message) as error:
        report.read([tmp_path])
    assert str(tmp_path) in str(error.value) and "\n" not in str(error.value)


def test_no_run_at_all(tmp_path):
    with pytest.raises(UserError, match="no runs named"):
        report.read([])
    with pytest.raises(UserError, match="is not there"):
        report.read([tmp_path / "nothing"])


def test_one_answer_twice(workdirs):
    sources = report.read([*workdirs, "one/records.jsonl", "./one"])
    assert len(sources) == 3  # one file under three names
    full, other, *_ = sources[0].records
    twin = groups.Source("twin", [full, other], False)
    with pytest.raises(UserError, match=rf"{other['method']} on xsum is in both one"):
        groups.quality_groups([*sources, twin])
    worse = full | {"tasks": {"xsum": full["tasks"]["xsum"] | {"score": 0.0}}}
    twin = groups.Source("twin", [worse], False)
    with pytest.raises(UserError, match=r"Full cache on xsum is in both one.*and twin"):
        groups.quality_groups([*sources, twin])
    twin = groups.Source("twin", SPEEDS, False)
    with pytest.raises(UserError, match="ED with 8 new tokens is in both"):
        groups.throughput_groups([*sources, twin])


def test_runs_share_their_baseline(workdirs):
    """Methods of two runs beside the full cache that both measured."""
    sources = report.read(workdirs)
    full, *others = sources[0].records
    apart = [
        groups.Source("first", [full, others[0]], False),
        groups.Source("second", [full, *others[1:]], False),
    ]
    (both,) = groups.quality_groups(apart)
    (whole,) = groups.quality_groups(sources[:1])
    pd.testing.assert_frame_equal(both.scores, whole.scores)


def test_a_torn_line_is_told(workdirs):
    with open("one/records.jsonl", "a") as file:
        file.write('{"method": "cut')
    text = report.leaderboard(report.read(workdirs))
    assert text.count("its last line was cut short and is left out") == 1


# --- pages --------------------------------------------------------------------------


def test_every_table_says_where_it_is_from(workdirs):
    sources = report.read(workdirs)
    (group,) = groups.quality_groups(sources)
    text = report.leaderboard(sources)
    after = text[text.index(grids.markdown(tables.score_table(group))) :]
    quality, rates = after.split("## Throughput")
    assert "Model tiny on cpu" in quality and "Model tiny on cpu" in rates
    command = "`python experiments/run.py --config=a_b.py`"
    assert f"1. `one/records.jsonl`: {command}; seed 3; numpy 2.0" in quality
    assert "2. `two/records.jsonl`" in quality and "speed/" not in quality
    assert "1. `speed/records.jsonl`: command not recorded; seed unknown" in rates


def test_report_has_all_its_parts(workdirs):
    told = report.write_comparison(report.read(workdirs), "out")
    assert json.loads(json.dumps(told, allow_nan=False)) == told
    assert told["quality"][0]["methods"]["good prefill_and_decode 50%"]["tasks"] == 2
    assert told["throughput"][0]["methods"]["Batch-Max (8 new)"]["times_ed"] == 2
    names = ["needle_1.png", "quality_1.png", "throughput_1.png", "xsum_1.png"]
    assert sorted(path.name for path in pathlib.Path("out").glob("*.png")) == names
    text = pathlib.Path("out/report.md").read_text()
    assert all(f"]({name})" in text for name in names)
    for name in names:
        assert matplotlib.image.imread(f"out/{name}")[..., :3].min() < 0.1
    tex = pathlib.Path("out/tables.tex").read_text()
    assert (
        tex.count(r"\toprule") == 2 and r"good & prefill\_and\_decode & 50\% &" in tex
    )
    assert "% 1. `one/records.jsonl`" in tex


def test_html_needs_nothing_else(workdirs):
    report.write_comparison(report.read(workdirs), "out")
    text = pathlib.Path("out/report.html").read_text()
    sources = re.findall(r'(?:src|href)="([^"]{1,30})', text)
    assert len(sources) == 4
    assert all(each.startswith("data:image/png;base64,") for each in sources)
    assert "<strong>40.0</strong>" in text and "<h2>Quality: tiny on cpu</h2>" in text
    assert "http" not in re.sub(r'src="[^"]*"', "", text)


def test_markup_in_names_does_no_harm(tmp_path):
    made = task_run("xsum", 0.5, 0.4, 0.3, model="<script>x</script>")
    report.write_comparison([groups.Source("a", made)], tmp_path)
    assert "<script>" not in (tmp_path / "report.html").read_text()


# --- the command, and the committed page --------------------------------------------


def command(*arguments):
    return subprocess.run(
        [sys.executable, str(ROOT / "experiments" / "report.py"), *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )


def test_the_command(workdirs):
    done = command(*workdirs, "--workdir=joined")
    assert done.returncode == 0, done.stderr
    *_, last = done.stdout.strip().split("\n")
    told = json.loads(last)
    assert told["report"] == "joined/report.md" and len(told["runs"]) == 3
    assert "**40.0**" in done.stdout and pathlib.Path("joined/report.html").exists()
    done = command("one", "--leaderboard=board.md")
    assert json.loads(done.stdout)["leaderboard"] == "board.md"
    assert pathlib.Path("board.md").read_text().startswith("# Leaderboard")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [([], "no runs named"), (["."], "holds no records"), (["--x"], "flags: Unknown")],
)
def test_the_command_says_what_is_wrong(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    done = command(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and message in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_committed_leaderboard_is_what_the_committed_records_give(monkeypatch):
    monkeypatch.chdir(ROOT)
    made = report.leaderboard(report.read(["docs/data/leaderboard"]))
    kept = pathlib.Path("docs/leaderboard.md").read_text(encoding="utf-8")
    assert made == kept, "run make leaderboard"
