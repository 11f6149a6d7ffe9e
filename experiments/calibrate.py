"""Measures which share of a text's pairs each head of a model needs.

    python experiments/calibrate.py --model=FOLDER --texts='texts/*.txt,python'

The calibration is kept in the cache folder, where `budget="25%"` finds it for these
weights; --output names a file instead, for `budgets.make("calibrated", path=FILE)`.
Texts are cut out of files, and of the documentation of Python's standard library:
--num_texts windows, as many of each source and from all over it. Prints how sizes
spread over the heads and how far they depend on the texts, and as the last line on
stdout one JSON object. --picture draws the shares beside the calibration.

--fit_rounds moves pairs on, from there or from the calibration of --start, to the heads
that miss them most under `retrieval_heads` (`kvjax.training.fit_heads`, where what
--fit_even, --fit_chunk and --fit_passages say is told): every round of a ratio takes
ten seconds a text, after four minutes of compiling. Rounds are kept in
CALIBRATION.rounds.jsonl, and the same command goes on after them.
"""

import dataclasses
import glob
import hashlib
import json
import pathlib

import command_line
import jax
import numpy as np
from absl import flags, logging

import kvjax
from kvjax import training
from kvjax.cache import calibrations
from kvjax.engine import calibration
from kvjax.evaluation import files
from kvjax.evaluation.report import figures
from kvjax.evaluation.report.records import append_record, provenance, read_records
from kvjax.training import head_sizes
from kvjax.types import UserError, real_number, whole_number

_MODEL = flags.DEFINE_string("model", "smollm2-135m-instruct", "A name to load.")
_DTYPE = flags.DEFINE_string(
    "dtype",
    None,
    "Of the weights; by default bfloat16 where the machine multiplies that, "
    "else float32.",
)
_TEXTS = flags.DEFINE_list("texts", ["python"], "Patterns of files, or python.")
_HALF = flags.DEFINE_enum(
    "half", "all", ["all", "first", "second"], "Of each source's files, or topics."
)
_NUM_TEXTS = flags.DEFINE_integer(
    "num_texts", calibration.NUM_TEXTS, "Windows of all sources together."
)
_TOKENS = flags.DEFINE_integer("tokens", 960, "Tokens of each window.")
_RATIOS = flags.DEFINE_list("ratios", ["0.5", "0.25", "0.125"], "Kept of all pairs.")
_TARGET = flags.DEFINE_string("target", "repetition", "What scores a pair.")
_FLOOR = flags.DEFINE_integer("floor", calibrations.FLOOR, "Pairs of every head.")
_FIT = flags.DEFINE_integer("fit_rounds", 0, "Of moving pairs by the loss.", 0)
_EVEN = flags.DEFINE_float("fit_even", 0.35, "First sizes: 1 is all heads alike.")
_CHUNK = flags.DEFINE_integer("fit_chunk", 32, "Tokens read and dropped at a time.")
_PASSAGES = flags.DEFINE_float("fit_passages", 0.02, "Weight of repeating passages.")
_START = flags.DEFINE_string("start", None, "A calibration; nothing is measured then.")
_OUTPUT = flags.DEFINE_string("output", None, "A file instead of the cache folder.")
_PICTURE = flags.DEFINE_bool("picture", False, "Draw the shares, beside the file.")


def main(_):
    logging.set_verbosity(logging.WARNING)  # checkpoint libraries are talkative
    output = _OUTPUT.value and pathlib.Path(_OUTPUT.value)
    if output and (output.is_dir() or not output.absolute().parent.is_dir()):
        raise UserError(f"--output={output}: name a file in a folder that is there")
    if _START.value and not _FIT.value:
        raise UserError("--start goes with --fit_rounds: say how many")
    ratios = [real_number("--ratios", _number(ratio)) for ratio in _RATIOS.value]
    texts = windows(_TEXTS.value, _HALF.value, _NUM_TEXTS.value)
    start = calibrations.Calibration.load(_START.value) if _START.value else None
    dtype = _DTYPE.value or multiplied_dtype()
    model = kvjax.load(_MODEL.value, dtype)
    made, told = provenance()["provenance"], {}
    versions = ", ".join(f"{name} {v}" for name, v in made["versions"].items())
    how_made = {"made_by": f"{made['command']}; {versions}"}
    if start is None:
        how = _TARGET.value, _TOKENS.value, _FLOOR.value
        measured = calibration.measure(model, texts, ratios, *how)
        found = dataclasses.replace(calibrations.average(measured), **how_made)
        told["stability"] = stability_of(measured)
        if not output:
            calibrations.keep(found)
    else:
        found = start
    if _FIT.value:
        how_made |= {"target": calibrations.LOSS}
    output = output or calibrations.kept_path(dataclasses.replace(found, **how_made))
    output.parent.mkdir(parents=True, exist_ok=True)
    if _FIT.value:
        asked = {"texts": _TEXTS.value, "half": _HALF.value, "num_texts": len(texts)}
        asked |= {"dtype": dtype}
        how = {"even": _EVEN.value, "chunk": _CHUNK.value, "passages": _PASSAGES.value}
        path = output.absolute().with_suffix(".rounds.jsonl")
        given = model, texts, found, ratios, _FIT.value
        with files.locked(path.parent, f"{path.name}.lock"):
            found, every = fitted(*given, path, asked, **how)
        told["fitted"] = every
    found = dataclasses.replace(found, **how_made)
    found.save(output)
    told |= {"calibration": str(output), "model": found.model}
    told |= {"target": found.target, "sizes": sizes_of(found)}
    told |= {"num_texts": found.num_texts, "accuracy": found.accuracy} | made
    if _PICTURE.value:
        told["picture"] = str(output.with_suffix(".png"))
        figures.save(told["picture"], picture, found)
    print(table(found.tokens, told) + "\n")
    print(json.dumps(told))


def fitted(model, texts, start, ratios, rounds, path, asked, **how):
    """The calibration with pairs moved, and what every round came to.

    Rounds that `path` has are not run again; `asked` and `how` tell theirs from others.
    """
    start_is = hashlib.sha256(repr(start).encode()).hexdigest()
    fields, asked = head_sizes.Round._fields, asked | how | {"start": start_is}
    lines = read_records(path, lambda line: ("asked", *fields))
    if any(line["asked"] != asked for line in lines):
        raise UserError(
            f"{path} has rounds of other texts or of another dtype, start or fit: "
            "repeat the command that it is of, or delete it"
        )
    known = [head_sizes.Round(*(line[field] for field in fields)) for line in lines]
    arrays = [_with(np.array, each) for each in known]

    def told(found):
        known.append(found)
        append_record(
            path, {"asked": asked} | _with(np.ndarray.tolist, found)._asdict()
        )

    how |= {"rounds": rounds, "known": arrays, "told": told}
    found = training.fit_heads(model, texts, start, ratios, **how)
    return found, [
        {
            "ratio": each.ratio,
            "round": each.number,
            "text": round(each.text, 4),
            "passages": round(each.passages, 4),
        }
        for each in known
    ]


def _with(change, found):
    """A round with its arrays changed."""
    return found._replace(sizes=change(found.sizes), worth=change(found.worth))


def windows(sources, half, count):
    """Texts of about equal length from all over each source's documents.

    The first sources give one more where the count does not divide. A window begins
    with a word.
    """
    if not sources:
        raise UserError("--texts is empty: name files by a pattern, or python")
    whole_number("--num_texts", count, len(sources))
    found = []
    for index, source in enumerate(sources):
        documents = documents_of(source)
        middle = len(documents) // 2
        parts = {"first": slice(middle), "second": slice(middle, None)}
        wanted = (count + len(sources) - 1 - index) // len(sources)
        some = documents[parts.get(half, slice(None))]
        found += calibration.windows(some, wanted)
    return found


def documents_of(source):
    """A source's texts, in the order of their names."""
    if source == "python":
        return calibration.python_documentation()
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
    """Markdown: a line per ratio, and one per round of moving pairs."""
    apart = told.get("stability", {})
    counts = list(next(iter(apart.values()), {}))
    lines = [f"Pairs of {tokens} tokens that heads keep."]
    if counts:
        lines[0] = lines[0][:-1] + (
            "; then, by how many the means of two halves of so many texts differ."
        )
    names = ["ratio", "least", "quarter", "median", "three quarters", "most"]
    rows = [
        [ratio, *(f"{size:.0f}" for size in sizes)]
        + [f"{each:.1f}" for each in apart.get(ratio, {}).values()]
        for ratio, sizes in told["sizes"].items()
    ]
    lines += ["", *_markdown(names + [f"{n} texts" for n in counts], rows)]
    if "fitted" in told:
        rows = [[f"{value:g}" for value in each.values()] for each in told["fitted"]]
        lines += ["", "KL to the full cache's predictions, nats per token.", ""]
        lines += _markdown(list(told["fitted"][0]), rows)
    return "\n".join(lines)


def _markdown(names, rows):
    cells = [names, ["---"] * len(names), *rows]
    return [f"| {' | '.join(row)} |" for row in cells]


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


def multiplied_dtype():
    """bfloat16 where the machine multiplies it in one instruction, else float32."""
    device = jax.devices()[0]
    if device.platform == "cpu":  # only matrix units are faster: docs/decisions/cpu.md
        file = pathlib.Path("/proc/cpuinfo")
        native = file.exists() and "amx_bf16" in file.read_text()
    else:  # GPUs from Ampere on, and every TPU
        native = float(getattr(device, "compute_capability", "8")) >= 8
    return "bfloat16" if native else "float32"


def _number(text):
    """What a flag says, as a number if it is one."""
    try:
        return float(text)
    except ValueError:
        return text


if __name__ == "__main__":
    command_line.run(main, interrupted="interrupted: nothing was written")
