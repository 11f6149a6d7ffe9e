"""Pictures: what stands where, how it looks, and that it can be read."""

import numpy as np
import pytest
from testing.records import (
    FULL,
    RECORDS,
    SIZES,
    SPEEDS,
    make_record,
    task_record,
    task_run,
    write_runs,
)

from kvjax.evaluation import report
from kvjax.evaluation.report import figures, groups, scatters

# --- of one run ---------------------------------------------------------------------


def drawn_sizes(records):
    figure = figures.head_sizes(records)
    *panels, bar = [axes for axes in figure.axes if axes.axison]
    return panels, [label.get_text() for label in bar.get_yticklabels()]


def test_a_panel_for_each_set_of_sizes_whose_heads_differ():
    """With its numbers; one for records that differ in new tokens or methods alone."""
    even = [[100, 150], [200, 350]]
    records = [
        FULL,
        make_record("A", sizes=SIZES, budget=128, new_tokens=8),
        make_record("A", sizes=SIZES, budget=128, new_tokens=16),
        make_record("B", sizes=even, budget=200),
        make_record("C", sizes=SIZES, budget=128),
    ]
    panels, ticks = drawn_sizes(records)
    titles = [axes.get_title(loc="left").split("\n") for axes in panels]
    assert titles[0] == ["A; C", "slots: 32-256 (mean 128)"] and titles[1][0] == "B"
    for axes, sizes in zip(panels, (SIZES, even), strict=True):
        assert axes.images[0].get_array().tolist() == sizes
        assert (axes.get_xlabel(), axes.get_ylabel()) == ("KV head", "layer")
    assert {"32", "64", "128", "256"} <= {*ticks}
    _, ticks = drawn_sizes(records[3:4])
    assert {"100", "200", "300"} <= {*ticks}


def test_panels_are_as_wide_over_one_another_as_side_by_side():
    made = [make_record(f"{n}", sizes=[[n, 2 * n]] * 30) for n in range(40, 58)]
    few, many = figures.head_sizes(made[:3]), figures.head_sizes(made)
    widths = []
    for figure in (few, many):
        figure.canvas.draw()
        widths.append(figure.axes[0].get_window_extent().width)
    assert widths[1] > 0.9 * widths[0]


@pytest.mark.parametrize(
    "picture", [scatters.quality_vs_memory, scatters.throughput_vs_memory]
)
def test_pictures_start_at_zero_and_say_what_they_are_of(picture):
    figure = picture(RECORDS)
    assert figure.get_suptitle() == "tiny, memory limit 512 MB"
    assert all(axes.get_xlim()[0] == 0 for axes in figure.axes)
    assert scatters.throughput_vs_memory(RECORDS).axes[0].get_ylim()[0] == 0
    other = picture([*RECORDS, make_record("A", memory_bytes=None, model="b")])
    assert other.get_suptitle() == "tiny, memory limit 512 / - MB"


def test_a_heat_map_has_a_panel_per_measure_and_setting():
    records = [
        make_record(f"{series} {slots}{rule}", series=series, budget=slots, **more)
        for rule in (None, "squeeze(p=0.3)")
        for slots in (8, 16)
        for series, more in (
            ("M", {"budget_rule": rule}),
            ("N", {"budget_rule": rule, "score": 0.75}),
        )
    ]
    panels = figures.heat_map(records).axes
    titles = [" ".join(axes.get_title(loc="left").split()) for axes in panels]
    assert [title.endswith("squeeze(p=0.3)") for title in titles] == [False, True] * 2
    assert [title.startswith("KL") for title in titles] == [False] * 2 + [True] * 2
    assert [t.get_text() for t in panels[0].get_yticklabels()] == ["N", "M"]
    assert [t.get_text() for t in panels[0].texts] == ["0.75", "0.75", "0.50", "0.50"]
    assert [t.get_text() for t in panels[3].get_xticklabels()] == ["8", "16"]


def test_a_run_without_kl_has_one_panel():
    assert len(scatters.quality_vs_memory([make_record("A", kl=None)]).axes) == 1
    left, right = scatters.quality_vs_memory(RECORDS).axes
    assert right.get_ylabel() == "KL (nats per token)" != left.get_ylabel()


def test_zero_kl_has_a_place_on_the_log_axis():
    axes = scatters.quality_vs_memory(RECORDS).axes[1]
    star = next(line for line in axes.lines if line.get_marker() == "*")
    assert axes.get_yticks()[0] == pytest.approx(star.get_ydata()[0])
    assert axes.get_yticklabels()[0].get_text() == "0"


def test_methods_keep_their_look_and_batches_are_named():
    left, right = (
        scatters.quality_vs_memory(RECORDS),
        scatters.throughput_vs_memory(RECORDS),
    )
    looks = [
        [(h.get_markerfacecolor(), h.get_marker()) for h in f.legends[0].legend_handles]
        for f in (left, right)
    ]
    assert looks[0] == looks[1]
    assert len(set(looks[0])) == len(RECORDS)
    texts = [text.get_text() for text in right.legends[0].get_texts()]
    assert texts[0] == "Full cache, batch 8"


def test_points_that_cover_one_another_stand_side_by_side():
    """Two records of one memory and score; their KL differs."""
    records = [FULL, make_record("A"), make_record("B", kl=0.001)]
    figure = scatters.quality_vs_memory(records)
    figure.draw_without_rendering()
    shown = [
        [
            line.get_transform().transform(line.get_xydata()[0])
            for line in axes.lines[-3:]
        ]
        for axes in figure.axes
    ]
    (_, a, b), (_, far, away) = shown
    assert b - a == pytest.approx([0.14 * figure.dpi, 0])
    middle = figure.axes[0].transData.transform((26, 0.5))
    assert (a + b) / 2 == pytest.approx(middle)
    assert far[0] == away[0] and far[1] != away[1]


def test_a_score_of_one_task_has_its_interval():
    record = task_record("A", "xsum", 0.5, 64)
    record["tasks"]["xsum"]["interval"] = [0.2, 0.7]
    left, right = scatters.quality_vs_memory([record]).axes
    (line,) = left.collections
    assert line.get_segments()[0].tolist() == [[8, 0.2], [8, 0.7]]
    assert not right.collections


def test_predictions_stand_behind_measurements():
    first, second = scatters.throughput_vs_batch(SPEEDS).axes
    measured, predicted = ([bar.get_width() for bar in c] for c in first.containers)
    assert measured == [10, 8, 20, 5]
    assert predicted[:3] == [20, 16, 40] and np.isnan(predicted[3])
    names = [label.get_text() for label in first.get_yticklabels()]
    assert names == [
        *("ED, batch 4", "FKV, batch 4"),
        *("Batch-Max, batch 16", "kvpress, batch 3"),
    ]
    assert second.get_title(loc="left") == "32 new tokens"


def test_series_on_a_front_have_marks():
    records = [
        FULL | {"kv_bytes_decode": 48e6},
        *(
            make_record(
                f"{name} {size}",
                series=name,
                budget=size,
                kv_bytes_decode=size * 1e6,
                score=score,
                kl=1 - score,
            )
            for name, score in (("best", 0.75), ("worse", 0.5), ("other", 0.25))
            for size in (8, 16)
            for more in [
                {"score": score, "kl": 1 - score, "kv_bytes_decode": size * 1e6}
            ]
        ),
    ]
    figure = scatters.pareto(records)
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ["full cache", "best"]
    assert figure.axes[0].lines[0].get_xydata().tolist()[:2] == [[8, 0.75], [8, 0.5]]


# --- of several ---------------------------------------------------------------------


@pytest.fixture
def workdirs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return write_runs()


def test_quality_stands_over_memory(workdirs):
    (group,) = groups.quality_groups(report.read(workdirs))
    xsum, needle = scatters.task_scores(group).axes[:2]
    assert (xsum.get_title(loc="left"), needle.get_title(loc="left")) == (
        "xsum",
        "needle",
    )
    lines = [line.get_xydata().tolist() for line in xsum.lines]
    assert [[8.0, 50.0]] in lines  # the full cache, in MB and points
    assert [[0.4, 20.0], [0.8, 40.0]] in lines  # good, at both budgets
    faces = {line.get_markerfacecolor() for line in xsum.lines}
    assert "white" in faces  # poor compresses after the prompt


def test_sizes_are_drawn_where_heads_differ(tmp_path):
    known = task_run("a/b", 0.5, 0.4, 0.3)
    known[1]["sizes"] = [[20, 60], [50, 30]]
    report.write_comparison([groups.Source("a", known)], tmp_path)
    assert (tmp_path / "head_sizes_1.png").exists()
    assert "](head_sizes_1.png)" in (tmp_path / "report.md").read_text()


def test_a_task_that_a_method_lacks_leaves_the_panels_in_shape(workdirs, tmp_path):
    part = task_run("bbh/boolean_expressions", 0.1, 0.2, 0.0)[:2]
    more = [groups.Source(n, task_run(n, 0.1, 0.2, 0.0), False) for n in ("a", "b")]
    sources = [
        *report.read(workdirs),
        groups.Source("part", part, False),
        *more,
    ]
    (group,) = groups.quality_groups(sources)
    figure = scatters.task_scores(group)
    figure.draw_without_rendering()
    boxes = [axes.get_position() for axes in figure.axes[: len(group.columns)]]
    assert min(box.width for box in boxes) > 0.2 and min(b.height for b in boxes) > 0.2


@pytest.mark.parametrize("trait", ["codec", "budget_rule", "schedule"])
def test_rules_have_a_colour_each_and_stand_together(trait):
    """Whatever sets a rule's methods apart is their shape, alike for all rules."""
    ways = {"schedule": ("prefill_only", "prefill_and_decode")}.get(
        trait, ("int8", "int4")
    )
    made = [
        task_record(f"{rule} {way}", "xsum", 0.4, 64, policy=rule, **{trait: way})
        for way in ways
        for rule in ("h2o", "tova")
    ]
    whole = groups.Source("s", [*made, task_record("Full cache", "xsum", 0.5)])
    (group,) = groups.quality_groups([whole])
    lines = scatters.task_scores(group).legends[0].get_lines()
    full, *looks = [(line.get_markerfacecolor(), line.get_marker()) for line in lines]
    assert full == ("black", "*")
    (h2o, one), (same, other), (tova, alike), (last, least) = looks
    assert h2o == same != tova == last and one == alike != other == least
    names = [line.get_label() for line in lines]
    assert [name.split()[0] for name in names] == ["Full", "h2o", "h2o", "tova", "tova"]


def test_who_holds_the_whole_prompt_is_hollow():
    phases = "prefill_and_decode", "after_prefill", "decode_only"
    made = [task_record(each, "xsum", 0.4, 64, each) for each in phases]
    (group,) = groups.quality_groups([groups.Source("s", made)])
    lines = scatters.task_scores(group).legends[0].get_lines()
    hollow = {line.get_label(): line.get_markerfacecolor() == "white" for line in lines}
    assert hollow == dict(zip(phases, (False, True, True), strict=True))


@pytest.mark.parametrize(("rules", "codecs"), [(6, 11), (7, 2), (2, 12), (3, 1)])
def test_colours_by_rule_only_where_they_tell_all_apart(rules, codecs):
    """6 colours, 11 shapes, and more methods than rules."""
    made = [
        {"policy": f"{r}", "codec": f"{c}"} for r in range(rules) for c in range(codecs)
    ]
    marks = figures.marks_by_policy(made, None)
    by_rule = {
        (each["policy"], mark.colour) for each, mark in zip(made, marks, strict=True)
    }
    assert (len(by_rule) == rules < len(made)) == ((rules, codecs) == (6, 11))
    assert len(set(marks)) == len(made)


def test_octaves_of_memory_where_caches_are_of_several_sizes(workdirs):
    alike = task_run("xsum", 0.5, 0.4, 0.3, kv_bytes_decode=2e6)
    small = task_record("tiny", "xsum", 0.2, 16, kv_bytes_decode=1e5)
    runs = (groups.Source("x", each, False) for each in (alike, [*alike, small]))
    near, far = (group for run in runs for group in groups.quality_groups([run]))
    scales = [scatters.task_scores(g).axes[0].get_xscale() for g in (near, far)]
    assert scales == ["linear", "log"]


def test_names_over_maps_stay_within_their_column(workdirs):
    words = "of very many words, " * 4
    needles = task_run("needle", 1.0, 0.75, 0.5)
    long = [r | {"series": r["series"] + words, "method": words} for r in needles]
    (group,) = groups.quality_groups([groups.Source("x", long, False)])
    figure = figures.needle_map(group, "needle")
    figure.draw_without_rendering()
    panels = [axes for axes in figure.axes if axes.get_title(loc="left")]
    assert len(panels) == 3
    width = figure.bbox.width / len(panels)
    for axes in panels:
        assert axes.get_position().width > 0.5 / len(panels)
        assert axes._left_title.get_window_extent().width < width


def test_needles_of_several_lengths_share_a_map(workdirs):
    short = task_run("needle", 0.5, 0.25, 0.0, prompt_tokens=500)
    sources = [*report.read(workdirs), groups.Source("x", short)]
    (group,) = groups.quality_groups(sources)
    panels = figures.needle_map(group, "needle").axes
    assert [t.get_text() for t in panels[0].get_xticklabels()] == ["500", "1,000"]
    assert [t.get_text() for t in panels[0].texts[:2]] == ["50%", "100%"]
    assert [t.get_text() for t in panels[1].texts[:2]] == ["25%", "75%"]
