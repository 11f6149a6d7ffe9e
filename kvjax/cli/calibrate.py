"""Measures how many KV pairs each head of a model needs.

    kvjax calibrate --model=FOLDER --texts='texts/*.txt,python'

The calibration is written to the cache folder, where `budget="25%"` finds it for these
weights; --output names a file instead, for `budgets.make("calibrated", path=FILE)`.
The texts are --num_texts windows, cut from files and from the documentation of Python's
standard library: as many of each source, from all over it. Prints the distribution of
sizes over heads and how much it depends on the texts, and as the last line on stdout
one JSON object. --picture draws the shares beside the calibration.

--fit_rounds improves that calibration, or the one of --start: every round moves slots
to the heads that miss them most under `retrieval_heads` (`kvjax.training.fit_heads`,
which describes --fit_even, --fit_chunk and --fit_passages). A round of one ratio takes
ten seconds per text, after four minutes of compiling. Rounds are appended to
CALIBRATION.rounds.jsonl; the same command continues after them.
"""

import dataclasses
import glob
import hashlib
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from absl import flags, logging

import kvjax
from kvjax import training
from kvjax.cache import calibrations
from kvjax.cache.calibrations import Calibration
from kvjax.cli import command
from kvjax.engine import calibration
from kvjax.evaluation import files
from kvjax.evaluation.report import figures
from kvjax.evaluation.report.records import append_record, provenance, read_records
from kvjax.training import head_sizes
from kvjax.types import Model, UserError, real_number, whole_number

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
_RATIOS = flags.DEFINE_list("ratios", ["0.5", "0.25", "0.125"], "Share of pairs kept.")
_TARGET = flags.DEFINE_string("target", "repetition", "What scores a pair.")
_FLOOR = flags.DEFINE_integer("floor", calibrations.FLOOR, "Least pairs of a head.")
_ROUNDS = flags.DEFINE_integer("fit_rounds", 0, "Rounds of moving slots.", 0)
_EVEN = flags.DEFINE_float("fit_even", 0.35, "First sizes: 1 is uniform.")
_CHUNK = flags.DEFINE_integer("fit_chunk", 32, "Tokens read between two evictions.")
_PASSAGES = flags.DEFINE_float("fit_passages", 0.02, "Weight of repeated passages.")
_START = flags.DEFINE_string("start", None, "A calibration to fit, none is measured.")
_OUTPUT = flags.DEFINE_string("output", None, "A file instead of the cache folder.")
_PICTURE = flags.DEFINE_bool("picture", False, "Draw the shares, beside the file.")


def start() -> None:
    """Runs the command with the flags of `sys.argv`."""
    command.run(
        _main,
        parse=command.parser(__name__),
        interrupted="interrupted: nothing was written",
    )


def _main(_: list[str]) -> None:
    logging.set_verbosity(logging.WARNING)
    output = _OUTPUT.value and pathlib.Path(_OUTPUT.value)
    if output and (output.is_dir() or not output.absolute().parent.is_dir()):
        raise UserError(f"--output={output}: name a file in a folder that is there")
    if _START.value and not _ROUNDS.value:
        raise UserError("--start goes with --fit_rounds: say how many")
    ratios = [real_number("--ratios", _number(ratio)) for ratio in _RATIOS.value]
    texts = windows(_TEXTS.value, _HALF.value, _NUM_TEXTS.value)
    found = Calibration.load(_START.value) if _START.value else None
    dtype = _DTYPE.value or native_dtype()
    model = kvjax.load(_MODEL.value, dtype)
    origin, summary = provenance()["provenance"], {}
    versions = ", ".join(f"{name} {v}" for name, v in origin["versions"].items())
    changes = {"made_by": f"{origin['command']}; {versions}"}
    if found is None:
        measured = calibration.measure(
            model,
            texts,
            ratios,
            target=_TARGET.value,
            tokens=_TOKENS.value,
            floor=_FLOOR.value,
        )
        found = dataclasses.replace(calibrations.average(measured), **changes)
        summary["stability"] = stability_of(measured)
        if not output:
            calibrations.keep(found)
    if _ROUNDS.value:
        changes |= {"target": calibrations.LOSS}
    output = output or calibrations.kept_path(dataclasses.replace(found, **changes))
    output.parent.mkdir(parents=True, exist_ok=True)
    if _ROUNDS.value:
        path = output.absolute().with_suffix(".rounds.jsonl")
        source = {"texts": _TEXTS.value, "half": _HALF.value, "num_texts": len(texts)}
        with files.locked(path.parent, f"{path.name}.lock"):
            found, summary["fitted"] = fitted(
                model,
                texts,
                found,
                ratios,
                rounds=_ROUNDS.value,
                path=path,
                source=source | {"dtype": dtype},
                even=_EVEN.value,
                chunk=_CHUNK.value,
                passages=_PASSAGES.value,
            )
    found = dataclasses.replace(found, **changes)
    found.save(output)
    summary |= {"calibration": str(output), "model": found.model}
    summary |= {"target": found.target, "sizes": sizes_of(found)}
    summary |= {"num_texts": found.num_texts, "accuracy": found.accuracy} | origin
    if _PICTURE.value:
        summary["picture"] = str(output.with_suffix(".png"))
        figures.save(summary["picture"], picture, found)
    print(table(found.tokens, summary) + "\n")
    print(json.dumps(summary))


def fitted(
    model: Model,
    texts: Sequence[Any],
    start: Calibration,
    ratios: Sequence[float],
    rounds: int,
    path: pathlib.Path,
    source: dict[str, Any],
    **options: Any,
) -> tuple[Calibration, list[dict[str, Any]]]:
    """Returns the fitted calibration, and the losses of every round.

    Args:
      model, texts, start, ratios, rounds, options: of `kvjax.training.fit_heads`.
      path: a file of rounds, to which new ones are appended. Rounds that it has are
        not run again.
      source: of the texts and weights. A file with rounds of another source, start or
        other options is a UserError.
    """
    fields = head_sizes.Round._fields
    digest = hashlib.sha256(repr(start).encode()).hexdigest()
    asked = source | options | {"start": digest}
    lines = read_records(path, lambda line: ("asked", *fields))
    if any(line["asked"] != asked for line in lines):
        raise UserError(
            f"{path} has rounds of other texts or of another dtype, start or fit: "
            "repeat the command that it is of, or delete it"
        )
    known = [head_sizes.Round(*(line[field] for field in fields)) for line in lines]
    arrays = [_with_arrays(each, np.array) for each in known]

    def keep(found):
        known.append(found)
        lists = _with_arrays(found, np.ndarray.tolist)
        append_record(path, {"asked": asked} | lists._asdict())

    found = training.fit_heads(
        model,
        texts,
        start,
        ratios,
        rounds=rounds,
        known=arrays,
        on_round=keep,
        **options,
    )
    return found, [
        {
            "ratio": each.ratio,
            "round": each.number,
            "text": round(each.text, 4),
            "passages": round(each.passages, 4),
        }
        for each in known
    ]


def _with_arrays(found, convert):
    """Returns a round with its arrays converted."""
    return found._replace(sizes=convert(found.sizes), worth=convert(found.worth))


def windows(sources, half, count):
    """Returns texts of about equal length from all over each source's documents.

    Every source gives as many, the first ones one more if `count` does not divide. A
    window begins with a word.
    """
    if not sources:
        raise UserError("--texts is empty: name files by a pattern, or python")
    whole_number("--num_texts", count, len(sources))
    found = []
    for index, source in enumerate(sources):
        documents = documents_of(source)
        middle = len(documents) // 2
        parts = {"first": slice(middle), "second": slice(middle, None)}
        number = (count + len(sources) - 1 - index) // len(sources)
        some = documents[parts.get(half, slice(None))]
        found += calibration.windows(some, number)
    return found


def documents_of(source):
    """Returns the texts of a source, in the order of their names."""
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
    """Returns quartiles of the pairs that heads keep of a text, for every ratio."""
    return {
        str(ratio): np.round(
            np.quantile(rows, (0, 0.25, 0.5, 0.75, 1)) * found.tokens
        ).tolist()
        for ratio, rows in zip(found.ratios, found.shares, strict=True)
    }


def stability_of(measured):
    """Returns `calibrations.stability` in pairs, by ratio and number of texts."""
    count = len(measured.shares)
    counts = sorted({n for n in (2, 4, 8, 16, 32) if n < count} | {count - count % 2})
    apart = calibrations.stability(measured.shares, [n for n in counts if n])
    return {
        str(ratio): {
            n: round(float(a[i]) * measured.tokens, 1) for n, a in apart.items()
        }
        for i, ratio in enumerate(measured.ratios)
    }


def table(tokens, summary):
    """Returns Markdown: a line per ratio, and one per round of fitting."""
    apart = summary.get("stability", {})
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
        for ratio, sizes in summary["sizes"].items()
    ]
    lines += ["", *_markdown(names + [f"{n} texts" for n in counts], rows)]
    if "fitted" in summary:
        rows = [[f"{value:g}" for value in each.values()] for each in summary["fitted"]]
        lines += ["", "KL to the full cache's predictions, nats per token.", ""]
        lines += _markdown(list(summary["fitted"][0]), rows)
    return "\n".join(lines)


def _markdown(names, rows):
    cells = [names, ["---"] * len(names), *rows]
    return [f"| {' | '.join(row)} |" for row in cells]


def picture(found):
    """Returns a figure with a panel per ratio: shares by layer and head."""
    from matplotlib.figure import Figure

    across = max(1.8, 0.7 + 0.25 * found.num_kv_heads)
    size = 1.5 + across * len(found.ratios), 1.6 + 0.18 * found.num_layers
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(1, len(found.ratios), sharey=True, squeeze=False)[0]
    for axes, ratio, rows in zip(panels, found.ratios, found.shares, strict=True):
        shown = axes.imshow(
            rows,
            cmap="cividis",
            vmin=0,
            vmax=1,
            aspect="auto",
            interpolation="nearest",
        )
        axes.grid(False)
        axes.set_title(f"{ratio:.4g} of all pairs", loc="left", fontsize=10)
        axes.set_xlabel("KV head")
        axes.set_xticks(range(0, found.num_kv_heads, 1 + found.num_kv_heads // 8))
    panels[0].set_ylabel("layer")
    figure.colorbar(shown, ax=list(panels), label="share of the head's pairs kept")
    return figure


def native_dtype():
    """Returns bfloat16 if the machine multiplies it natively, else float32."""
    device = jax.devices()[0]
    if device.platform == "cpu":  # only matrix units are faster: docs/decisions/cpu.md
        file = pathlib.Path("/proc/cpuinfo")
        native = file.exists() and "amx_bf16" in file.read_text()
    else:  # GPUs from Ampere on, and every TPU
        native = float(getattr(device, "compute_capability", "8")) >= 8
    return "bfloat16" if native else "float32"


def _number(text):
    """Returns a flag's text as a number if it is one."""
    try:
        return float(text)
    except ValueError:
        return text
