"""Measures which share of a text's pairs each head of a model needs.

    python experiments/calibrate.py --model=smollm2-135m-instruct \\
        --texts='texts/*.txt,python' --ratios=0.5,0.25,0.125 --output=budgets.json

Texts are cut out of files, and of the documentation of Python's standard library:
--num_texts windows, as many of each source and from all over it. Prints how sizes
spread over the heads and how far they depend on the texts, and as the last line on
stdout one JSON object. --picture draws the shares beside the output.
"""

import dataclasses
import glob
import itertools
import json
import pathlib

import command_line
import numpy as np
from absl import flags, logging

import kvjax
from kvjax.cache import calibrations
from kvjax.engine import calibration
from kvjax.evaluation.report import figures
from kvjax.evaluation.report.records import provenance
from kvjax.types import UserError, real_number, whole_number

_MODEL = flags.DEFINE_string("model", "smollm2-135m-instruct", "A name to load.")
_DTYPE = flags.DEFINE_string("dtype", "float32", "Of the weights.")
_TEXTS = flags.DEFINE_list("texts", [], "Sources: patterns of files, or python.")
_HALF = flags.DEFINE_enum(
    "half", "all", ["all", "first", "second"], "Of each source's files, or topics."
)
_NUM_TEXTS = flags.DEFINE_integer("num_texts", 16, "Windows of all sources together.")
_TOKENS = flags.DEFINE_integer("tokens", 960, "Tokens of each window.")
_RATIOS = flags.DEFINE_list("ratios", ["0.5", "0.25", "0.125"], "Kept of all pairs.")
_TARGET = flags.DEFINE_string("target", "repetition", "What scores a pair.")
_FLOOR = flags.DEFINE_integer("floor", calibrations.FLOOR, "Pairs of every head.")
_OUTPUT = flags.DEFINE_string("output", None, "Where the JSON goes.")
_PICTURE = flags.DEFINE_bool("picture", False, "Draw the shares, beside the output.")


def main(_):
    logging.set_verbosity(logging.WARNING)  # checkpoint libraries are talkative
    if not _OUTPUT.value:
        raise UserError("--output is missing: name the file for the calibration")
    output = pathlib.Path(_OUTPUT.value)
    if output.is_dir() or not output.absolute().parent.is_dir():
        raise UserError(f"--output={output}: name a file in a folder that is there")
    ratios = [real_number("--ratios", _number(ratio)) for ratio in _RATIOS.value]
    texts = windows(_TEXTS.value, _HALF.value, _NUM_TEXTS.value)
    model = kvjax.load(_MODEL.value, _DTYPE.value)
    how = _TARGET.value, _TOKENS.value, _FLOOR.value
    measured = calibration.measure(model, texts, ratios, *how)
    made = provenance()["provenance"]
    versions = ", ".join(f"{name} {v}" for name, v in made["versions"].items())
    found = dataclasses.replace(
        calibrations.average(measured), made_by=f"{made['command']}; {versions}"
    )
    found.save(output)
    told = {"calibration": str(output), "model": found.model, "target": found.target}
    told |= {"num_texts": found.num_texts, "accuracy": found.accuracy}
    told |= {"sizes": sizes_of(found), "stability": stability_of(measured)} | made
    if _PICTURE.value:
        told["picture"] = str(output.with_suffix(".png"))
        figures.save(told["picture"], picture, found)
    print(table(found.tokens, told) + "\n")
    print(json.dumps(told))


def windows(sources, half, count):
    """Texts of about equal length from all over each source's documents.

    The first sources give one more where the count does not divide. A window begins
    with a word.
    """
    if not sources:
        raise UserError("--texts is missing: name files by a pattern, or python")
    whole_number("--num_texts", count, len(sources))
    found = []
    for index, source in enumerate(sources):
        documents = documents_of(source)
        middle = len(documents) // 2
        parts = {"first": slice(middle), "second": slice(middle, None)}
        text = " " + "\n\n".join(documents[parts.get(half, slice(None))])
        wanted = (count + len(sources) - 1 - index) // len(sources)
        cuts = [len(text) * i // wanted for i in range(wanted + 1)]
        found += [
            text[start:end].partition(" ")[2] for start, end in itertools.pairwise(cuts)
        ]
    return found


def documents_of(source):
    """A source's texts, in the order of their names."""
    if source == "python":
        from pydoc_data.topics import topics

        return [topics[name] for name in sorted(topics)]
    paths = sorted(glob.glob(source, recursive=True))
    if not paths:
        raise UserError(f"--texts={source}: there is no such file")
    try:
        return [pathlib.Path(path).read_text(encoding="utf-8") for path in paths]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--texts={source}: {error}: name texts in UTF-8") from None


def sizes_of(found):
    """Pairs of a text that heads keep, for every ratio."""
    return {
        str(ratio): np.round(
            np.quantile(rows, (0, 0.25, 0.5, 0.75, 1)) * found.tokens
        ).tolist()
        for ratio, rows in zip(found.ratios, found.shares, strict=True)
    }


def stability_of(measured):
    """For every ratio and number of texts, in pairs; see `calibrations.stability`."""
    count = len(measured.shares)
    counts = sorted({n for n in (2, 4, 8, 16, 32) if n < count} | {count - count % 2})
    apart = calibrations.stability(measured.shares, [n for n in counts if n])
    return {
        str(ratio): {
            n: round(float(a[i]) * measured.tokens, 1) for n, a in apart.items()
        }
        for i, ratio in enumerate(measured.ratios)
    }


def table(tokens, told):
    """Markdown: a line per ratio."""
    counts = list(next(iter(told["stability"].values())))
    names = ["ratio", "least", "quarter", "median", "three quarters", "most"]
    names += [f"{n} texts" for n in counts]
    lines = [
        f"Pairs of {tokens} tokens that heads keep; then, by how many the means of two "
        "halves of so many texts differ.",
        "",
        f"| {' | '.join(names)} |",
        "|---" * len(names) + "|",
    ]
    for ratio, sizes in told["sizes"].items():
        cells = [f"{size:.0f}" for size in sizes]
        cells += [f"{apart:.1f}" for apart in told["stability"][ratio].values()]
        lines.append(f"| {ratio} | {' | '.join(cells)} |")
    return "\n".join(lines)


def picture(found):
    """A panel per ratio: shares by layer and head."""
    from matplotlib.figure import Figure

    across = max(1.8, 0.7 + 0.25 * found.num_kv_heads)
    size = 1.5 + across * len(found.ratios), 1.6 + 0.18 * found.num_layers
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(1, len(found.ratios), sharey=True, squeeze=False)[0]
    for axes, ratio, rows in zip(panels, found.ratios, found.shares, strict=True):
        shown = axes.imshow(
            *(rows, "cividis"), vmin=0, vmax=1, aspect="auto", interpolation="nearest"
        )
        axes.grid(False)
        axes.set_title(f"{ratio:.4g} of all pairs", loc="left", fontsize=10)
        axes.set_xlabel("KV head")
        axes.set_xticks(range(0, found.num_kv_heads, 1 + found.num_kv_heads // 8))
    panels[0].set_ylabel("layer")
    figure.colorbar(shown, ax=list(panels), label="share of the head's pairs kept")
    return figure


def _number(text):
    """What a flag says, as a number if it is one."""
    try:
        return float(text)
    except ValueError:
        return text


if __name__ == "__main__":
    command_line.run(main, interrupted="interrupted: nothing was written")
