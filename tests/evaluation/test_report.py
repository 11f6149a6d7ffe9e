"""The report of a run: numbers, tables, the summary and the page."""

import json

import matplotlib
import matplotlib.image
import numpy as np
import pytest
from testing.records import (
    FULL,
    RECORDS,
    SIZES,
    SPEEDS,
    make_record,
    sweep_records,
    throughput_record,
)

from kvjax.evaluation import report
from kvjax.evaluation.report import figures, grids, groups, scatters, tables


def table(records, width=None):
    return grids.markdown(tables.run_table(records), width)


def split(line):
    return [cell.strip() for cell in line.strip("|").split(" | ")]


# --- numbers and tables -------------------------------------------------------------


def test_table_lines_up_and_holds_the_numbers():
    head, rule, full, streaming, _ = table(RECORDS).split("\n")
    assert len({len(line) for line in (head, rule, full, streaming)}) == 1
    expected = [
        "StreamingLLM",
        "prefill_and_decode",
        "512",
        "18 (decode state)",
        "0.50",
    ]
    expected += ["0.300", "0.82", "1,234", "88.2", "14.4 (1.60x)", "26.0"]
    assert split(streaming) == expected
    assert split(full)[2] == "all"
    assert split(full)[9] == "9.00 (1.00x)"
    assert len(split(head)) == len(expected)


def task_records(**tasks):
    told = {
        name: {"metric": metric, "score": 0.5, "num_examples": 4}
        for name, metric in tasks.items()
    }
    return [make_record("A", tasks=told), make_record("B", budget=None, tasks=told)]


@pytest.mark.parametrize(
    ("tasks", "column", "title"),
    [
        ({}, "Needle", "Needle accuracy"),
        ({"needle": "found"}, "Needle", "Needle accuracy"),
        ({"xsum": "rougeL"}, "Score", "xsum (rougeL)"),
        ({"xsum": "rougeL", "needle": "found"}, "Score", "Mean of 2 tasks"),
    ],
)
def test_a_score_is_called_by_its_tasks(tmp_path, tasks, column, title):
    runs = task_records(**tasks)
    assert split(report.overview(runs).split("\n")[0])[4] == column
    text = report.write_report(runs, tmp_path).read_text(encoding="utf-8")
    assert f"**{column}** is " in text
    assert all(f"{name} ({tasks[name]})" in text for name in tasks if column == "Score")
    assert ("needle" not in text.lower()) == (tasks == {"xsum": "rougeL"})
    assert scatters.quality_vs_memory(runs).axes[0].get_title(loc="left") == title


def test_missing_values_show_as_dashes():
    last = table([{"method": "Bare"}]).split("\n")[-1]
    assert split(last) == ["Bare"] + ["-"] * 10
    assert "x)" not in table(RECORDS[1:])  # no full cache, no ratio


def test_bars_do_not_break_the_table():
    assert "a\\|b" in table([make_record("a|b")])


@pytest.mark.parametrize(
    ("budget", "shown"),
    [
        (1024, "1,024"),
        ([64, 64], "64"),
        ([64, 512], "64-512 (mean 288)"),
        ([[32, 608, 128], 512], "32-608 (mean 384)"),
        (None, "all"),
    ],
)
def test_budgets(budget, shown):
    assert split(table([make_record("M", budget=budget)]).split("\n")[2])[2] == (shown)


def test_sizes_of_heads():
    """The table has their range, the summary says it, whatever the budget was."""
    made = make_record("M", budget=128, budget_share=0.25, sizes=SIZES)
    assert split(table([made]).split("\n")[2])[2] == "32-256 (mean 128)"
    assert report.summary([made])["methods"]["M"]["budget_share"] == 0.25
    made = make_record("M", budget=128, sizes=None)
    assert split(table([made]).split("\n")[2])[2] == "128"


@pytest.mark.parametrize("experiment", ["quality", "throughput"])
def test_the_report_shows_sizes(tmp_path, experiment):
    made = make_record("A", sizes=SIZES, experiment=experiment, batch_rule="batch_max")
    alike = [made | {"method": "B", "sizes": None}]
    assert "head_sizes" not in report.write_report(alike, tmp_path).read_text()
    assert not (tmp_path / "head_sizes.png").exists()
    page = report.write_report([made], tmp_path).read_text()
    assert "\n\n![Slots of every KV head, for methods whose heads" in page
    assert "](head_sizes.png)\n\n## How to read it" in page
    assert (tmp_path / "head_sizes.png").exists()
    told = report.summary([made], tmp_path / "report.md")["pictures"]
    assert str(tmp_path / "head_sizes.png") in told


def test_budget_rules_are_told_apart():
    """In tables, and in the legends and panels of what is one series otherwise."""
    rules = (None, "uniform", "squeeze", "squeeze(p=0.3)")
    made = [make_record(f"M {i}", budget_rule=rule) for i, rule in enumerate(rules)]
    when = [split(line)[1] for line in table(made).split("\n")[2:]]
    plain = "prefill_and_decode"
    told = [plain, plain, f"{plain}, squeeze", f"{plain}, squeeze(p=0.3)"]
    assert when == told
    swept = [r | {"series": s, "method": s} for r in made[1:] for s in "AB"]
    assert list(groups.sweep(swept)["setting"].unique()) == told[1:]
    assert len(set(groups.names_of(swept))) == len(swept)
    panels = scatters.pareto(swept).axes[: len(told) - 1]
    assert [axes.get_title(loc="left") for axes in panels] == told[1:]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (9.994, "9.99"),
        (9.996, "10.0"),
        (99.96, "100"),
        (123456.0, "123,456"),
        (0, "0.00"),
    ],
)
def test_rates_have_three_digits(value, shown):
    assert tables.rate(value) == shown


def test_small_kl_is_not_shown_as_none():
    assert tables.kl(2e-4) == "<0.001"
    assert tables.kl(0.0) == "0.000"


def test_labels_tell_records_of_one_method_apart():
    runs = [make_record("A"), make_record("A", budget=256), make_record("B")]
    assert groups.names_of(runs) == ["A (512)", "A (256)", "B"]
    assert groups.names_of([FULL, FULL]) == ["Full cache", "Full cache #2"]


def test_summary_holds_ratios_and_is_json():
    found = report.summary([*RECORDS, make_record("Broken", kl=float("nan"))])
    assert found["full_cache"] == "Full cache"
    assert found["methods"]["KeyDiff"]["speedup"] == pytest.approx(1.6)
    assert found["methods"]["KeyDiff"]["kv_ratio"] == pytest.approx(26 / 48)
    assert found["methods"]["Broken"]["kl"] is None
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert report.summary(RECORDS[1:])["methods"]["KeyDiff"]["speedup"] is None


def test_summary_compares_at_as_many_new_tokens():
    """As the table does; without a full cache of as many, to nothing."""
    full = throughput_record("FKV", "full", 16, 4, 5.0, kv_bytes_peak_per_seq=52e6)
    more = throughput_record("Batch-Max", "batch_max", 16, 16, 15.0)
    records = [*SPEEDS, full, more]
    found = report.summary(records)["methods"]
    told = {
        name: found[f"Batch-Max ({name})"]["speedup"] for name in ("8 new", "16 new")
    }
    assert told == {"8 new": 20 / 8, "16 new": 15 / 5}
    assert found["Batch-Max (16 new)"]["kv_ratio"] == 0.5
    assert found["Batch-Max (32 new)"]["speedup"] is None
    for name, record in zip(found, records, strict=True):
        assert found[name]["speedup"] == groups.times(record, records, "full")


def test_summary_tells_setting_scores_and_files(tmp_path):
    task = {"metric": "accuracy", "score": 0.5, "num_examples": 4}
    task |= {"interval": [0.15, 0.85], "interval_method": "wilson", "metrics": {}}
    runs = [FULL | {"seed": 3}, make_record("A", tasks={"needle": task}, seed=3)]
    found = report.summary(runs, report.write_report(runs, tmp_path))
    setting = {"model": "tiny", "device": "cpu", "memory_bytes": 512e6, "seed": 3}
    setting |= {"prompt_tokens": 1000, "max_new_tokens": 12, "budgets": [None, 512]}
    assert {key: found[key] for key in setting} == setting
    assert found["versions"] == "numpy 2.0"
    del task["metrics"]
    assert found["methods"]["A"]["tasks"] == {"needle": task}
    files = [found["report"], *found["pictures"]]
    assert sorted(files) == sorted(map(str, tmp_path.iterdir())) and len(files) == 3
    assert report.summary(SPEEDS)["pictures"] == []


def test_intervals_stand_behind_scores(tmp_path):
    """Of a task, not of several tasks' mean; nothing where a record has none."""
    needle = {"metric": "accuracy", "score": 0.75, "interval": [0.474, 0.911]}
    xsum = {"metric": "rougeL", "score": 0.2, "interval": None}
    one, two = {"needle": needle}, {"needle": needle, "xsum": xsum}
    for tasks, told in ((one, "0.75 (0.47-0.91)"), (two, "0.50")):
        score = 0.75 if tasks is one else 0.5
        runs = [FULL, make_record("A", tasks=tasks, score=score)]
        assert split(table(runs).split("\n")[3])[4] == told
        swept = [r | {"tasks": tasks, "score": score} for r in sweep_records()]
        assert split(report.overview(swept).split("\n")[3])[3] == told
        text = report.write_report(runs, tmp_path).read_text(encoding="utf-8")
        assert ("## Scores by task" in text) == (tasks is two)
    assert "| Method     | needle (accuracy) | xsum (rougeL) |" in text
    assert "| A          |  0.75 (0.47-0.91) |          0.20 |" in text
    timed = [record | {"tasks": one, "score": 0.75} for record in SPEEDS]
    assert report.overview(timed).count(" 0.75 (0.47-0.91) ") == len(SPEEDS)
    timed = [record | {"tasks": two} for record in SPEEDS]
    assert report.overview(timed).count(" 0.75 (0.47-0.91) ") == len(SPEEDS)


def test_memory_above_its_limit_is_marked(tmp_path):
    above = {"measured_bytes": 520e6}
    for records in (RECORDS, SPEEDS, sweep_records()):
        plain = [r | {"measured_bytes": 512e6} for r in records]
        text = report.write_report(plain, tmp_path).read_text(encoding="utf-8")
        assert "\u2020" not in text and "512" in text
        marked = [*plain[:-1], plain[-1] | above]
        text = report.write_report(marked, tmp_path).read_text(encoding="utf-8")
        assert text.count("520\u2020 |") == 1
        assert "\n\n\u2020 Above the memory limit. The batch is" in text


def test_a_codec_has_a_column_where_there_is_one():
    runs = [*RECORDS, make_record("KeyDiff", codec="int8")]
    assert "Codec" not in table(RECORDS)
    head, _, full, *_, last = table(runs).split("\n")
    assert split(head)[3] == "Codec"
    assert (split(full)[3], split(last)[3]) == ("identity", "int8")
    assert split(last)[0] == "KeyDiff (int8)"


@pytest.mark.parametrize("change", [{"codec": "int8"}, {"offload": {"top_n": 32}}])
def test_all_pairs_are_not_always_the_full_cache(change):
    """Those that are rounded, or of which attention reads some values only."""
    assert groups.full_cache([make_record("All", budget=None, **change), FULL]) is FULL


@pytest.mark.parametrize(("width", "parts"), [(48, 6), (80, 3), (125, 2), (400, 1)])
def test_a_wide_table_comes_in_parts(width, parts):
    """Every column is there once, in order; the keys are in every part."""
    whole = tables.run_table(RECORDS)
    drawn = grids.markdown(whole, width).split("\n\n")
    assert max(len(line) for part in drawn for line in part.split("\n")) <= width
    assert len(drawn) == parts
    found = [list(zip(*map(split, part.split("\n")), strict=True)) for part in drawn]
    methods, *columns = zip(whole.head, *whole.rows, strict=True)
    assert all((part[0][0], *part[0][2:]) == methods for part in found)
    shown = [(head, *cells) for part in found for head, _, *cells in part[1:]]
    assert shown == columns


def test_parts_repeat_all_keys_and_have_similar_widths():
    head = ["A", "B", *(f"column {i}" for i in range(6))]
    whole = grids.Table(head, [["x"] * 8], keys=2)
    parts = grids.markdown(whole, 50).split("\n\n")
    drawn = [split(part.split("\n")[0]) for part in parts]
    assert [len(each) for each in drawn] == [5, 5]
    assert all(each[:2] == ["A", "B"] for each in drawn)


def test_a_table_that_fits_is_one():
    page = table(RECORDS)
    width = len(page.split("\n")[0])
    assert grids.markdown(tables.run_table(RECORDS), width) == page
    assert "\n\n" in grids.markdown(tables.run_table(RECORDS), width - 1)
    assert report.overview(RECORDS, 80).count("| Method") == 3


def test_the_width_is_the_terminal_s(monkeypatch):
    assert report.terminal_width() is None  # as in a file
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "93")
    assert report.terminal_width() == 93


# --- a machine that others use --------------------------------------------------------


def probed(record, flops, copied):
    return record | {"probe_flops_per_s": flops, "probe_bytes_per_s": copied}


@pytest.mark.parametrize(
    ("flops", "copied", "apart"),
    [
        (109e9, 9.1e9, False),
        (91e9, 10.9e9, False),
        (111e9, 10e9, True),
        (89e9, 10e9, True),
        (100e9, 8.9e9, True),
        (None, None, False),  # nobody knows
    ],
)
def test_rates_of_another_machine_are_not_compared(flops, copied, apart):
    full = probed(FULL, 100e9, 10e9)
    records = [full, probed(make_record("A"), flops, copied)]
    ratio, probe = "14.4" if apart else "14.4 (1.60x)", "Probe GFLOP/s / GB/s"
    head, _, first, second, *_ = report.overview(records).split("\n")
    place = split(head).index(probe)
    assert split(head)[place - 1] == "End-to-end tok/s"
    assert split(second)[place - 1] == ratio
    assert split(first)[place - 1 : place + 1] == ["9.00 (1.00x)", "100 / 10.0"]
    assert split(second)[place].endswith("\u2021") == apart
    assert report.summary(records)["methods"]["A"]["speedup"] == (
        None if apart else pytest.approx(1.6)
    )
    note = "\n\n\u2021 Something else used the machine"
    assert (note in report.overview(records)) == apart


def test_the_report_says_what_probes_are(tmp_path):
    records = [probed(FULL, 100e9, 10e9), probed(make_record("A"), 50e9, 10e9)]
    page = report.write_report(records, tmp_path).read_text(encoding="utf-8")
    assert page.count("\u2021 Something else used") == page.count("**Probe** is") == 1


def test_throughput_is_compared_on_the_same_machine_only():
    """ED's machine was free, and the full cache's as busy as the last row's."""
    shares = zip(SPEEDS[:3], (1.0, 0.8, 0.8), strict=True)
    rows = [probed(record, 50e9 * share, 9e9) for record, share in shares]
    head, _, *lines = report.overview(rows).split("\n")
    cells = [dict(zip(split(head), split(row), strict=True)) for row in lines[:3]]
    assert [c["x ED"] for c in cells] == ["1.00", "-", "-"]
    assert [c["x FKV"] for c in cells] == ["-", "1.00", "2.50"]
    told = [c["Probe GFLOP/s / GB/s"] for c in cells]
    assert told == ["50.0 / 9.00\u2021", "40.0 / 9.00\u2021", "40.0 / 9.00\u2021"]
    assert "there is no ratio" in " ".join(lines[3:])


def test_records_without_probes_have_no_column():
    assert "Probe" not in report.overview(RECORDS) + report.overview(SPEEDS)


# --- sweeps -------------------------------------------------------------------------


def test_a_sweep_is_one_of_budgets_or_schedules():
    assert groups.is_sweep(sweep_records())
    assert not groups.is_sweep(RECORDS)
    assert not groups.is_sweep([make_record("A"), make_record("A", budget=256), FULL])


def test_the_best_of_each_setting_comes_first():
    head, _, full, *best = report.overview(sweep_records()).split("\n")
    assert split(head)[:5] == [
        "Method",
        "Schedule",
        "KV slots",
        "Needle",
        "As many",
    ]
    assert split(full)[0] == "Full cache"
    assert [split(line)[:3] for line in best] == [
        ["good", phases, budget]
        for phases in ("prefill_and_decode", "after_prefill")
        for budget in ("768", "1,152")
    ]
    tied = report.overview(sweep_records(score=1.0, kl=0.1)).split("\n")[3]
    assert split(tied)[4] == "1"


def test_a_sweeps_report_has_its_pictures(tmp_path):
    records = sweep_records()
    text = report.write_report(records, tmp_path).read_text(encoding="utf-8")
    assert report.overview(records, grids.PAGE) in text
    assert table(records, grids.PAGE) in text
    assert "26.5 / 53.0" in text and "frees nothing" in text
    assert text.index("heat_map.png") < text.index(table(records, grids.PAGE))
    assert sorted(path.name for path in tmp_path.glob("*.png")) == [
        "heat_map.png",
        "pareto.png",
    ]
    bare = [record | {"kl": None} for record in records[1:]]
    report.write_report(bare, tmp_path)
    for figure in (figures.heat_map, scatters.pareto):
        assert len(figure(bare).axes) == len(figure(records).axes) / 2


def test_perplexities_of_a_sweep(tmp_path):
    """Budgets rise, all pairs come last, and what did not run is a dash."""
    runs = [
        make_record("Full cache", budget=None, schedule="none", loss=0.0),
        make_record("A, 50%", series="A", budget=500, budget_share=0.5, loss=1.0),
        make_record("B, 50%", series="B", budget=500, budget_share=0.5, loss=2.0),
        make_record("A, 20%", series="A", budget=200, budget_share=0.2, loss=6.0),
        make_record("B, 20%", series="B", budget=200, budget_share=0.2, loss=None),
    ]
    made = tables.perplexity_table(runs)
    assert made.head == ["Method", "Schedule", "20%", "50%", "all"]
    assert [row[2:] for row in made.rows] == [
        ["-", "-", "1.00"],
        ["403", "2.72", "-"],
        ["-", "7.39", "-"],
    ]
    page = report.write_report(runs, tmp_path).read_text()
    assert grids.markdown(made) in page
    assert "Perplexity" in tables.memory_table(runs).head
    bare = [record | {"loss": None} for record in runs]
    assert "## Perplexity" not in report.write_report(bare, tmp_path).read_text()


def test_pareto_fronts():
    points = np.array([[1, 0.5], [1, 0.5], [2, 0.4], [3, 0.9], [3, 0.2], [np.nan, 1]])
    assert scatters.front(points, 1) == [0, 1, 3]
    assert scatters.front(points, -1) == [0, 1, 2, 4]
    assert scatters.front(points[-1:], 1) == []


# --- the page -----------------------------------------------------------------------


def test_report_is_written(tmp_path):
    before = dict(matplotlib.rcParams)
    path = report.write_report(RECORDS, tmp_path)
    assert dict(matplotlib.rcParams) == before
    text = path.read_text(encoding="utf-8")
    assert table(RECORDS, grids.PAGE) in text
    assert "Model tiny on cpu with a memory limit of 512 MB" in text
    assert "numpy 2.0" in text
    assert (
        "the number of prompts that fit at a time" in text
        and "first of every\n" in text
    )
    for name in ("quality_vs_memory.png", "throughput_vs_memory.png"):
        assert f"({name})" in text
        pixels = matplotlib.image.imread(tmp_path / name)
        assert 1700 < pixels.shape[1] < 1900
        assert (pixels[0, 0, :3] == 1).all()  # white
        assert pixels[..., :3].min() < 0.1


def test_no_picture_of_times_that_nobody_took(tmp_path):
    untimed = [record | {"output_tokens_per_s": None} for record in RECORDS]
    path = report.write_report(untimed, tmp_path)
    assert {p.name for p in tmp_path.glob("*.png")} == {"quality_vs_memory.png"}
    assert "throughput_vs_memory" not in path.read_text(encoding="utf-8")
    assert len(report.summary(untimed, path)["pictures"]) == 1


def test_report_survives_what_is_missing(tmp_path):
    bare = [
        {"method": "Bare"},
        make_record("No KL", kl=None, kv_bytes_peak_per_seq=None),
    ]
    assert report.write_report(bare, tmp_path).exists()
    with pytest.raises(ValueError, match="no records"):
        report.write_report([], tmp_path)


# --- throughput ---------------------------------------------------------------------


def test_throughput_is_told_as_ratios_to_ed_and_to_the_full_cache():
    head, _, *lines = report.overview(SPEEDS).split("\n")
    columns = [split(head).index(name) for name in ("Engine", "x ED", "x FKV")]
    told = [[split(line)[i] for i in columns] for line in lines]
    assert told[2] == ["kvjax", "2.00", "2.50"]
    assert told[3] == ["kvpress", "0.50", "0.62"]
    assert told[5] == ["kvjax", "1.50", "-"]
    assert "Engine" not in report.overview(SPEEDS[:2])


def test_scores_stand_beside_the_rates_of_the_same_answers(tmp_path):
    told = {
        "xsum": {"metric": "rougeL", "score": 0.25},
        "needle": {"metric": "accuracy", "score": 0.75},
    }
    records = [record | {"tasks": told} for record in SPEEDS[:2]]
    head, _, first, _ = report.overview(records).split("\n")
    found = dict(zip(split(head), split(first), strict=True))
    assert (found["xsum (rougeL)"], found["needle (accuracy)"]) == ("0.25", "0.75")
    assert found["End-to-end tok/s"] == "10.0"
    assert "xsum (rougeL)" in report.write_report(records, tmp_path).read_text()
    assert "Needle" in split(report.overview(SPEEDS).split("\n")[0])


def test_throughput_survives_what_is_missing(tmp_path):
    bare = [{"experiment": "throughput", "method": "A"}]
    (label,) = scatters.throughput_vs_batch(bare).axes[0].texts
    assert label.get_text() == "not measured"
    assert report.write_report(bare, tmp_path).exists()
