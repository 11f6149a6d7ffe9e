"""The arithmetic of KV caches: what tables in surveys say, reckoned from shapes.

    python experiments/memory/memory_arithmetic.py --device=a100-80gb
    python experiments/memory/memory_arithmetic.py --only=rows

No model is run: everything follows from shapes and a device's published rates by the
formulae of `kvjax.evaluation.arithmetic`, and times are rooflines. The parts:

  kv       bytes of keys and values, per token and by batch
  step     bytes and time of a decode step by batch, and the pairs' share of the bytes
  bits     what pairs of 8 and 4 bits gain, by batch
  claims   at which lengths a survey's figures of such gains hold, and where they cannot
  pages    what reserving the longest length wastes, and what pages cost
  beams    copies of a prompt for every beam, and copy on write
  swap     a preempted sequence brought back over the link, or read again
  crossing the lengths at which the second is faster
  rows     how many rows of every known shape fit on devices, full and compressed
  kcache   values in host memory: a paper's rates, and the roofline's
  squeeze  a share of the pairs: a paper's gains, and the roofline's

Prints a table for each, draws step.png and claims.png in --workdir, and last prints one
JSON line. Ten seconds.
"""

import json
import pathlib
from collections.abc import Callable
from typing import Any

from absl import flags
from memory_parts import PAGES, PARTS, PUBLISHED, PUBLISHED_OF
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
    flags.DEFINE_integer("longest", 4096, "tokens that are reserved for a sequence", 1)
    flags.DEFINE_integer("seed", 0, "of the lengths that are drawn", 0)
    flags.DEFINE_float("link_gb_per_s", 25.0, "host to device, in 1e9 bytes/s")
    flags.DEFINE_float("copy_us", 10.0, "what every copy takes beside its bytes")
    flags.DEFINE_integer("budget", 1024, "pairs per head of the compressed cache", 1)
    flags.DEFINE_string("dtype", "bfloat16", "of weights and pairs, for the part rows")
    flags.DEFINE_list("only", list(PARTS), "parts to print")
    flags.DEFINE_string("workdir", "runs/memory_arithmetic", "where pictures go")


def main(_):
    asked, wanted = checked(flags.FLAGS)
    folder = pathlib.Path(flags.FLAGS.workdir)
    drawn = {name: folder / f"{name}.png" for name in PICTURES if name in wanted}
    if drawn:
        with files.on_disk(folder):
            folder.mkdir(parents=True, exist_ok=True)
    told: dict[str, Any] = {"device": asked.name}
    for name in wanted:
        part = PARTS[name](asked)
        print(as_text(part) + "\n")
        told[name] = part.rows
    for name, path in drawn.items():
        figures.save(path, PICTURES[name], asked)
    print(json.dumps(told | {"pictures": list(map(str, drawn.values()))}))


def checked(given: Any) -> tuple[Asked, list[str]]:
    """What was asked for, and of which parts.

    Raises:
      UserError: an unknown model, device, dtype or part; a number out of range.
    """
    unknown = [name for name in given.only if name not in PARTS]
    if unknown:
        raise UserError(f"no part {unknown[0]!r}: --only takes {', '.join(PARTS)}")
    for name in ("models", "batches"):
        if not getattr(given, name):
            raise UserError(f"--{name} is empty: name one at least")
    link = real_number("--link_gb_per_s", given.link_gb_per_s, 1e-3) * 1e9
    copy_s = real_number("--copy_us", given.copy_us, 0) / 1e6
    asked = Asked(
        specs=[presets.spec(name) for name in given.models],
        name=given.device,
        device=roofline.device(given.device),
        tokens=given.tokens,
        batches=[_batch(text) for text in given.batches],
        longest=given.longest,
        seed=given.seed,
        link=arithmetic.Link(link, copy_s, PAGES[0]),
        budget=given.budget,
        dtype=checked_dtype(given.dtype).name,
    )
    return asked, given.only


def _batch(text: str) -> int:
    whole = int(text) if text.strip().isdecimal() else text
    return whole_number("--batches", whole, 1)


# --- pictures -------------------------------------------------------------------------


def draw_step(asked: Asked) -> Any:
    """Time and the pairs' share of a decode step, by batch."""
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
        (right, "Pairs in what is read", "% of bytes"),
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


def draw_claims(asked: Asked) -> Any:
    """Gains of fewer bits by length, by bytes alone and on the device."""
    name, batch = PUBLISHED_OF
    spec = presets.spec(name)
    figure = figures.figure_about((7.5, 4.6), f"{name}, batch {batch}")
    axes = figure.subplots()
    ticks = [2**i for i in range(6, 14)]
    lengths = [round(2 ** (i / 4)) for i in range(4 * 6, 4 * 13 + 1)]
    ways = {"bytes alone": arithmetic.BYTES_ALONE, asked.name: asked.device.rates}
    marks = figures.marks_of(PUBLISHED)
    for mark, (b, published) in zip(marks, PUBLISHED.items(), strict=True):
        look = {"color": mark.colour, "marker": mark.shape}
        look |= {"markersize": 5, "markevery": 4}
        for (where, rates), dash in zip(ways.items(), ("--", "-"), strict=True):
            gains = [arithmetic.gain(spec, batch, n, b, rates) for n in lengths]
            percents = [100 * (each - 1) for each in gains]
            label = f"INT{b}, {where}"
            axes.plot(lengths, percents, linestyle=dash, label=label, **look)
        axes.axhline(100 * published, color=mark.colour, lw=0.8)
        told = f"published, INT{b}: {published:+.0%}"
        axes.annotate(told, (lengths[0], 100 * published + 2), color=mark.colour)
    axes.set_title("Tokens/s gained by fewer bits", loc="left", fontweight="bold")
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{n:,}" for n in ticks])
    axes.set_xlabel("tokens of each sequence")
    axes.set_ylabel("gain (%)")
    figure.legend(loc="outside lower center", ncols=2)
    return figure


PICTURES: dict[str, Callable[[Asked], Any]] = {"step": draw_step, "claims": draw_claims}


if __name__ == "__main__":
    define_flags()
    command.run(main)
