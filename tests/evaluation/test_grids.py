"""Tables as Markdown and LaTeX."""

from kvjax.evaluation.report.grids import Table, markdown
from kvjax.evaluation.report.page import escaped, latex

TABLE = Table(
    head=("Method", "a_b", "50%"),
    rows=[["Full|cache", "1.0", "2.0"], ["KeyDiff", "10.0", "-"]],
    bold=frozenset({(1, 1)}),
    breaks=frozenset({1}),
)


def test_markdown_lines_up_and_marks():
    lines = markdown(TABLE).split("\n")
    assert lines[0] == "| Method      |      a_b | 50% |"
    assert lines[1] == "| ----------- | -------: | --: |"
    assert lines[2] == "| Full\\|cache |      1.0 | 2.0 |"
    assert lines[3] == "| KeyDiff     | **10.0** |   - |"


def test_latex_is_escaped_and_has_its_rules():
    lines = [
        line.strip() for line in latex([("Model a on b.", TABLE, "of a&b")]).split("\n")
    ]
    assert "% Model a on b." in lines
    assert r"\caption{of a\&b}" in lines
    assert r"\begin{tabular}{lrr}" in lines
    assert r"Method & a\_b & 50\% \\" in lines
    assert r"KeyDiff & \textbf{10.0} & - \\" in lines
    rules = [line for line in lines if "rule" in line]
    assert rules == [r"\toprule", r"\midrule", r"\midrule", r"\bottomrule"]
    assert lines.index(r"KeyDiff & \textbf{10.0} & - \\") == 1 + max(
        i for i, line in enumerate(lines) if line == r"\midrule"
    )


def test_no_special_sign_is_left():
    assert escaped(r"\{}$&#%_^~<>|") == (
        r"\textbackslash{}\{\}\$\&\#\%\_\textasciicircum{}\textasciitilde{}"
        r"\textless{}\textgreater{}\textbar{}"
    )
