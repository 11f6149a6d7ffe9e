"""Computes the bytes and times of KV caches from shapes and data sheets.

    python experiments/memory/memory_arithmetic.py --device=a100-80gb
    python experiments/memory/memory_arithmetic.py --only=rows

No model runs: the formulae of `kvjax.evaluation.arithmetic` need only a model's shape
and a device's published rates, and times are rooflines. The tables:

  kv       bytes of keys and values, per token and by batch
  step     bytes and time of a decode step by batch, and how many of them are KV pairs
  bits     tokens/s gained by KV pairs in 8 and 4 bits, by batch
  pages    slots wasted by reserving the longest length, and by pages
  beams    beam search with a copy of the prompt for each beam, and with shared pages
  swap     bringing a preempted sequence back over the link, or prefilling it again
  rows     how many rows of each known model fit on a device, full and compressed
  kcache   values in host memory: published throughput beside the roofline
  squeeze  a share of the KV pairs: published gains beside the roofline

Prints each table and, last, one JSON line; draws step.png in --workdir. Ten seconds.
"""

import json
import pathlib
from typing import Any

from absl import flags
from memory_parts import PAGES, PARTS
from memory_table import Asked, as_text

from kvjax.cli import command
from kvjax.evaluation import arithmetic, files, roofline
from kvjax.evaluation.report import figures
from kvjax.models import presets
from kvjax.models.weights import checked_dtype
from kvjax.types import UserError, real_number, whole_number

MODELS = "llama-3-8b", "mistral-7b", "llama-3-70b", "llama-3.1-405b"
BATCHES = "1", "8", "32", "64", "128", "256"


def define_flags() -> None:
    flags.DEFINE_list("models", list(MODELS), "shapes of kvjax.models.presets")
    flags.DEFINE_string("device", "a100-80gb", "a device of roofline.DEVICES")
    flags.DEFINE_integer("tokens", 4096, "length of every sequence", 1)
    flags.DEFINE_list("batches", list(BATCHES), "sequences at a time")
    flags.DEFINE_integer("longest", 4096, "slots reserved for each sequence", 1)
    flags.DEFINE_integer("seed", 0, "seed of the random lengths", 0)
    flags.DEFINE_float("link_gb_per_s", 25.0, "host to device, in 1e9 bytes/s")
    flags.DEFINE_float("copy_us", 10.0, "fixed time of each copy, microseconds")
    flags.DEFINE_integer("budget", 1024, "KV pairs per head of the compressed cache", 1)
    flags.DEFINE_string(
        "dtype", "bfloat16", "of weights and KV pairs in the table rows"
    )
    flags.DEFINE_list("only", list(PARTS), "tables to print")
    flags.DEFINE_string("workdir", "runs/memory_arithmetic", "folder for the picture")


def main(_):
    asked, names = checked(flags.FLAGS)
    folder = pathlib.Path(flags.FLAGS.workdir)
    picture = folder / "step.png" if "step" in names else None
    if picture:
        with files.on_disk(folder):
            folder.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"device": asked.name}
    for name in names:
        part = PARTS[name](asked)
        print(as_text(part) + "\n")
        result[name] = part.rows
    if picture:
        figures.save(picture, draw_step, asked)
    print(json.dumps(result | {"picture": picture and str(picture)}))


def checked(options: Any) -> tuple[Asked, list[str]]:
    """Returns the checked flags, and the names of the tables to print.

    Raises:
      UserError: an unknown model, device, dtype or table; a number out of range.
    """
    unknown = [name for name in options.only if name not in PARTS]
    if unknown:
        raise UserError(f"no table {unknown[0]!r}: --only takes {', '.join(PARTS)}")
    for name in ("models", "batches"):
        if not getattr(options, name):
            raise UserError(f"--{name} is empty: name one at least")
    link = real_number("--link_gb_per_s", options.link_gb_per_s, 1e-3) * 1e9
    copy_s = real_number("--copy_us", options.copy_us, 0) / 1e6
    asked = Asked(
        specs=[presets.spec(name) for name in options.models],
        name=options.device,
        device=roofline.device(options.device),
        tokens=options.tokens,
        batches=[_batch(text) for text in options.batches],
        longest=options.longest,
        seed=options.seed,
        link=arithmetic.Link(link, copy_s, PAGES[0]),
        budget=options.budget,
        dtype=checked_dtype(options.dtype).name,
    )
    return asked, options.only


def _batch(text: str) -> int:
    whole = int(text) if text.strip().isdecimal() else text
    return whole_number("--batches", whole, 1)


def draw_step(asked: Asked) -> Any:
    """Draws the time of a decode step, and how much of it reads KV pairs, by batch."""
    figure = figures.figure_about((9, 4.6), f"{asked.name}, {asked.tokens:,} tokens")
    left, right = figure.subplots(1, 2)
    batches = [2**i for i in range(10)]
    marks = figures.marks_of(asked.specs)
    looks = [figures.look(mark) | {"markersize": 6} for mark in marks]
    for spec, mark, look in zip(asked.specs, marks, looks, strict=True):
        steps = [arithmetic.decode_step(spec, b, asked.tokens) for b in batches]
        line = look | {"linestyle": "-", "color": mark.colour}
        left.plot(batches, [1e3 * s.seconds(asked.device.rates) for s in steps], **line)
        right.plot(batches, [100 * s.share_of_pairs for s in steps], **line)
    titles = (
        (left, "A decode step", "least time (ms)"),
        (right, "KV pairs", "% of the bytes read"),
    )
    for axes, title, label in titles:
        axes.set_title(title, loc="left", fontweight="bold")
        axes.set_xscale("log", base=2)
        axes.set_xticks(batches[::3], [str(b) for b in batches[::3]])
        axes.set_xlabel("sequences")
        axes.set_ylabel(label)
    left.set_yscale("log")
    right.set_ylim(0, 100)
    figures.legend(figure, looks, [spec.name for spec in asked.specs])
    return figure


if __name__ == "__main__":
    define_flags()
    command.run(main)
