"""Measures how much attention changes the residual stream of each layer.

    python experiments/gallery/layer_similarity.py --workdir=runs/similarity

The budget rule `squeeze` decides by this measure: the cosine similarity of the residual
stream before and after attention (Wang and Gan 2024, arXiv 2404.04793, Figure 2), here
for tokens of consecutive passages of Python's reference manual. similarity.png shows
the mean and spread over tokens by layer, the groups of layers that `squeeze` makes, and
a map of the first prompt, layers by tokens.

Prints a table and, last, one JSON line. One minute on two shared CPU cores.
"""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags, logging

import kvjax
from kvjax import cache
from kvjax.cache import budgets
from kvjax.cache.budgets import squeeze_attention
from kvjax.cli import command
from kvjax.evaluation.report import figures, grids
from kvjax.evaluation.tasks import text
from kvjax.models import decoder
from kvjax.types import UserError

FLAGS = flags.FLAGS
_COLOURS = "#009E73", "#0072B2", "#D55E00"  # Okabe & Ito's, of the groups
_MARKERS = "^", "o", "s"


def define_flags() -> None:
    flags.DEFINE_string("model", "smollm2-135m-instruct", "a name kvjax.load knows")
    flags.DEFINE_integer("prompts", 3, "prompts to read", 1)
    flags.DEFINE_integer("tokens", 512, "tokens per prompt", 2)
    flags.DEFINE_integer("budget", 128, "slots per head, the mean over layers", 1)
    flags.DEFINE_float(
        "p", 0.35, "share of the budget that layers of the last group keep"
    )
    flags.DEFINE_string("workdir", "runs/similarity", "where similarity.png goes")


def main(_):
    logging.set_verbosity(logging.WARNING)
    rule = budgets.squeeze(FLAGS.p)
    model = kvjax.load(FLAGS.model)
    prompts = cut(model, FLAGS.prompts, FLAGS.tokens)
    found = np.stack([similarities(model, prompt) for prompt in prompts])
    layers = by_layer(found, rule, FLAGS.budget)
    out = pathlib.Path(FLAGS.workdir) / "similarity.png"
    out.parent.mkdir(parents=True, exist_ok=True)
    title = f"{model.spec.name}, {len(prompts)} x {FLAGS.tokens} tokens"
    figures.save(out, draw, found, layers, title)
    print(table(layers))
    result = {
        "model": FLAGS.model,
        "tokens": FLAGS.tokens,
        "budget": FLAGS.budget,
        "p": FLAGS.p,
        "layers": layers,
        "same_last_group": shared(found),
        "picture": str(out),
    }
    print("\n" + json.dumps(result))


def cut(model, count: int, length: int) -> list[list[int]]:
    """Returns `count` consecutive passages of the text of `length` tokens each."""
    words = model.tokenizer(text.haystack(), verbose=False)["input_ids"]
    if count * length > len(words):
        raise UserError(
            f"--prompts={count} of --tokens={length}: the text has {len(words)} "
            "tokens, ask for fewer"
        )
    return [words[i * length : (i + 1) * length] for i in range(count)]


def similarities(model, prompt) -> np.ndarray:
    """Returns the cosines f32[L, T] of one prompt, read in one chunk."""
    return np.asarray(
        _similarities(model.params, jnp.asarray([prompt]), spec=model.spec)
    )


@functools.partial(jax.jit, static_argnames="spec")
def _similarities(params, tokens, *, spec):
    length, cosines = tokens.shape[1], []
    full = cache.make_spec(spec, None, None)
    dtype = params["embed"].dtype
    state = cache.init(spec, full, 1, (length,) * spec.num_layers, dtype)
    n = jnp.full((1,), length, jnp.int32)

    def attend(index, *arrays):
        return cache.step_layer(index, *arrays, config=full, n=n, is_prefill=True)

    def measure(index, before, after, state):
        cosines.append(squeeze_attention.cosine(before, after)[0])
        return state

    here = cache.next_positions(state, length)
    decoder.forward(params, spec, tokens, here, state, attend, measure)
    return jnp.stack(cosines)


def by_layer(found: np.ndarray, rule: budgets.BudgetRule, budget: int) -> list[dict]:
    """Returns statistics, group and budget of each layer, from cosines [N, L, T]."""
    means = found.mean(2).mean(0, dtype=np.float64)
    groups = squeeze_attention.group(means)
    sizes = budgets.reallocated(rule, means, budget)
    low, high = np.quantile(found, (0.1, 0.9), axis=(0, 2))
    return [
        {
            "layer": layer,
            "mean": round(float(means[layer]), 4),
            "low": round(float(low[layer]), 4),
            "high": round(float(high[layer]), 4),
            "group": int(groups[layer]) + 1,
            "pairs": sizes[layer],
        }
        for layer in range(len(means))
    ]


def shared(found: np.ndarray) -> float:
    """Returns which share of the layers ever in the last group are in it every time."""
    last = [(g := squeeze_attention.group(each.mean(1))) == g.max() for each in found]
    return round(float(np.all(last, 0).sum() / np.any(last, 0).sum()), 3)


def table(layers: list[dict]) -> str:
    """Returns a Markdown table with a line per layer."""
    keys = ("mean", "low", "high")
    rows = [
        [
            *(str(each["layer"]), *(f"{each[key]:.3f}" for key in keys)),
            *(f"G{each['group']}", str(each["pairs"])),
        ]
        for each in layers
    ]
    head = ["layer", "cosine", "10%", "90%", "group", "slots"]
    return grids.markdown(grids.Table(head, rows, left=frozenset({4})))


def draw(found: np.ndarray, layers: list[dict], title: str):
    """Draws mean and spread by layer with the groups, and a map of the first prompt."""
    figure = figures.figure_about((11, 2 + 0.16 * len(layers)), title)
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(2, 3))
    for number, (colour, marker) in enumerate(zip(_COLOURS, _MARKERS, strict=True), 1):
        members = [each for each in layers if each["group"] == number]
        if not members:
            continue
        y, mean, low, high = (
            np.array([each[key] for each in members])
            for key in ("layer", "mean", "low", "high")
        )
        sizes = sorted({each["pairs"] for each in members})
        budgets_of = " or ".join(map(str, sizes))
        label = f"G{number}, {len(members)} of {len(layers)} layers: {budgets_of} slots"
        style = {"color": colour, "fmt": marker, "ms": 5, "lw": 1.2, "label": label}
        left.errorbar(mean, y, xerr=(mean - low, high - mean), **style)
    left.set_title("Mean, and 10% to 90% of tokens", loc="left", fontweight="bold")
    left.set_xlabel("cosine similarity before and after attention")
    left.set_ylabel("layer")
    shown = right.imshow(
        found[0], aspect="auto", cmap="cividis", interpolation="nearest", vmax=1
    )
    right.grid(False)
    right.set_title("First prompt", loc="left", fontweight="bold")
    right.set_xlabel("token")
    figure.colorbar(shown, ax=right, label="cosine similarity")
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    return figure


if __name__ == "__main__":
    define_flags()
    command.run(main)
