"""Draws the pictures of the policy gallery: positions that each policy keeps."""

import base64
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

Data = dict[str, Any]
SCHEDULES = "prefill_and_decode", "after_prefill"

# Okabe & Ito's palette, as in `kvjax.evaluation.report.figures`: the colours of a kept
# and of an evicted position.
_PLAIN = "#0072B2", "#E9ECEF"
_NEEDLE = "#D55E00", "#FAD9BF"
_QUESTION = "#009E73", "#C4E6DB"
_GREY = "#595959"
_STYLE = {
    "axes.edgecolor": _GREY,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "text.usetex": False,
    "xtick.color": _GREY,
    "ytick.color": _GREY,
}
_DPI = 200
_PX, _ROW, _GAP, _SPLIT = 2, 13, 2, 7  # pixels: a token, a head, between heads, layers
_LEFT, _RIGHT, _HEAD, _FOOT = 190, 180, 46, 86


def draw_policy(name: str, data: Data, path: pathlib.Path) -> None:
    """Draws two strips, one per schedule, of the positions that three layers keep."""
    import matplotlib

    shared, runs = data["setting"], data["policies"][name]["runs"]
    strips = {phases: _strip(runs[phases]["kept"], shared) for phases in SCHEDULES}
    height, width = next(iter(strips.values())).shape[:2]
    size = (_LEFT + width + _RIGHT, len(strips) * (_HEAD + height) + _FOOT)
    with matplotlib.rc_context(_STYLE):
        figure = _figure(size)
        for number, (phases, strip) in enumerate(strips.items()):
            top = number * (_HEAD + height) + _HEAD
            axes = _axes(figure, size, (_LEFT, top, width, height))
            _fill(axes, strip, shared, runs[phases])
            _above(axes, phases, shared, runs[phases], first=number == 0)
            last = number == len(strips) - 1
            axes.tick_params(axis="x", labelbottom=last, length=3 if last else 0)
        axes.set_xlabel("position in the prompt", color=_GREY, labelpad=2)
        _write(figure, path, colours=48)


def _strip(kept: Sequence[Sequence[str]], shared: Data) -> np.ndarray:
    """Returns the pixels of three layers, one line per head."""
    count = shared["tokens"]
    look = np.array([[_rgb(evicted), _rgb(kept)] for kept, evicted in _looks(shared)])
    layers = []
    for layer in kept:
        for head in layer:
            held = unpack(head, count).astype(int)
            line = look[np.arange(count), held]
            layers.append(np.repeat(line[None], _ROW, axis=0))
            layers.append(np.full((_GAP, count, 3), 255))
        layers[-1] = np.full((_SPLIT, count, 3), 255)
    pixels = np.concatenate(layers[:-1])
    return np.repeat(pixels, _PX, axis=1).astype(np.uint8)


def _looks(shared: Data) -> list[tuple[str, str]]:
    """Returns the colours of each position when it is kept and when it is evicted."""
    looks = [_PLAIN] * shared["tokens"]
    for key, look in (("needle", _NEEDLE), ("question", _QUESTION)):
        start, end = shared[key]
        looks[start:end] = [look] * (end - start)
    return looks


def _rgb(colour: str) -> tuple[int, ...]:
    return tuple(int(colour[i : i + 2], 16) for i in (1, 3, 5))


def _fill(axes: Any, strip: np.ndarray, shared: Data, run: Data) -> None:
    """Draws a strip, with layer names at the left and needle shares at the right."""
    count, layers = shared["tokens"], shared["layers"]
    axes.imshow(
        strip, extent=(0, count, len(layers), 0), aspect="auto", interpolation="none"
    )
    middles = [i + 0.5 for i in range(len(layers))]
    axes.set_yticks(middles, [f"layer {layer}" for layer in layers])
    axes.tick_params(axis="y", length=0)
    axes.spines[["left", "bottom"]].set_visible(False)
    start, end = shared["needle"]
    for y, layer in zip(middles, run["kept"], strict=True):
        share = np.mean([unpack(head, count)[start:end] for head in layer])
        place = {"xy": (1, y), "xycoords": ("axes fraction", "data")}
        offset = {"xytext": (6, 0), "textcoords": "offset points"}
        style = {"va": "center", "color": _NEEDLE[0], "annotation_clip": False}
        axes.annotate(f"{share:.0%}", **place, **offset, **style)


def _above(axes: Any, phases: str, shared: Data, run: Data, first: bool) -> None:
    """Draws a strip's heading; the first one also names the marked ranges."""

    def put(x, words, coords="data", **style):
        axes.annotate(
            words,
            (x, 1),
            xycoords=(coords, "axes fraction"),
            xytext=(0, 4),
            textcoords="offset points",
            annotation_clip=False,
            **style,
        )

    found = "key found" if run["found"] else "key not found"
    title = f"{phases}: {found}"
    put(0, title, "axes fraction", fontweight="bold", color="black")
    if first:
        put(sum(shared["needle"]) / 2, "needle", ha="center", color=_NEEDLE[0])
        put(shared["question"][1], "question", ha="right", color=_QUESTION[0])
        put(1.004, "of needle", "axes fraction", color=_NEEDLE[0])


def draw_overview(names: Sequence[str], data: Data, path: pathlib.Path) -> None:
    """Draws for all policies which share of the heads keeps each part of the prompt."""
    import matplotlib

    with matplotlib.rc_context(_STYLE):
        size = (1900, 170 + 40 * len(names))
        figure = _figure(size)
        for number, phases in enumerate(SCHEDULES):
            box = (355 + 770 * number, 60, 610, 40 * len(names))
            axes = _axes(figure, size, box)
            runs = [data["policies"][name]["runs"][phases] for name in names]
            image = _heat(axes, data["setting"], runs)
            axes.set_title(phases, loc="left", fontweight="bold", fontsize=11)
            axes.set_yticks(range(len(names)), names if number == 0 else [])
        top = 60 + 40 * len(names) + 62
        bar = figure.colorbar(
            image,
            cax=_axes(figure, size, (355, top, 300, 12)),
            orientation="horizontal",
            ticks=[0, 50, 100],
            format="%d%%",
        )
        bar.outline.set_visible(False)
        bar.ax.tick_params(length=2, labelsize=8)
        note = "of all heads of all layers keep it;  between the lines: the needle"
        bar.ax.text(1.06, 0.5, note, transform=bar.ax.transAxes, va="center")
        _write(figure, path, colours=128)


def _heat(axes: Any, shared: Data, runs: Sequence[Data]) -> Any:
    """Draws rows of densities; at the right the needle's share, and a dot if found."""
    density = np.array([run["density"] for run in runs])
    count, rows = shared["tokens"], len(runs)
    image = axes.imshow(
        density,
        extent=(0, count, rows - 0.5, -0.5),
        aspect="auto",
        interpolation="nearest",
        cmap="Blues",
        vmin=0,
        vmax=100,
    )
    for y in range(1, rows):
        axes.axhline(y - 0.5, color="white", lw=1.5)
    for edge in shared["needle"]:
        axes.axvline(edge, color=_NEEDLE[0], lw=1.2)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", length=3)
    axes.spines[["left", "bottom"]].set_visible(False)
    for y, run in enumerate(runs):
        style = {"va": "center", "clip_on": False, "fontsize": 9.5}
        colour = _NEEDLE[0] if run["found"] else _GREY
        axes.text(1.085 * count, y, f"{run['needle']:.0%}", color=colour, **style)
        if run["found"]:
            axes.plot(1.05 * count, y, "o", color=colour, ms=5, clip_on=False)
    axes.set_xlim(0, count)
    return image


def _figure(size: tuple[int, int]) -> Any:
    """Returns a figure of `size` pixels that pyplot does not manage."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(size[0] / _DPI, size[1] / _DPI), dpi=_DPI)
    FigureCanvasAgg(figure)
    return figure


def _axes(figure: Any, size: tuple[int, int], box: tuple[int, int, int, int]) -> Any:
    """Adds axes on the pixels (left, top, width, height)."""
    left, top, width, height = box
    x, y = size
    return figure.add_axes((left / x, 1 - (top + height) / y, width / x, height / y))


def _write(figure: Any, path: pathlib.Path, colours: int) -> None:
    """Writes a PNG with a palette, a third of the size of one without."""
    from PIL import Image

    figure.canvas.draw()
    pixels = Image.fromarray(np.asarray(figure.canvas.buffer_rgba())[..., :3])
    path.parent.mkdir(parents=True, exist_ok=True)
    quantized = pixels.quantize(colours, dither=Image.Dither.NONE)
    quantized.save(path, optimize=True, dpi=(_DPI, _DPI))


def pack(held: np.ndarray) -> str:
    """Returns bool[N] as base64 text."""
    return base64.b64encode(np.packbits(held).tobytes()).decode()


def unpack(packed: str, count: int) -> np.ndarray:
    """The inverse of `pack`."""
    bits = np.frombuffer(base64.b64decode(packed), np.uint8)
    return np.unpackbits(bits, count=count).astype(bool)
