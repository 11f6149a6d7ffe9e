"""How much attention changes the residual stream, by layer: SqueezeAttention's measure.

    python experiments/gallery/layer_similarity.py --workdir=runs/similarity

Figure 2 of Wang and Gan 2024 (arXiv 2404.04793): the cosine similarity of the residual
stream before and after the attention of every layer, for tokens of prompts that follow
each other in the reference manual that Python carries. The picture, similarity.png, has
mean and spread over all tokens by layer, with the groups that the rule `squeeze` makes,
and a map of the first prompt, layers by tokens. Also what measuring costs: the prefill
of one prompt is timed with and without it, in turn.

Prints a table and, last, one JSON line. Two minutes on two shared CPU cores.
"""

import functools
import json
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags, logging

import kvjax
from kvjax import cache
from kvjax.cache import budgets
from kvjax.cache.budgets import squeeze_attention
from kvjax.cli import command
from kvjax.engine import compiled, jobs, steps
from kvjax.evaluation.report import figures
from kvjax.evaluation.tasks import text
from kvjax.models import decoder
from kvjax.types import UserError

FLAGS = flags.FLAGS
_COLOURS = "#009E73", "#0072B2", "#D55E00"  # Okabe & Ito's, of the groups
_MARKERS = "^", "o", "s"


def define_flags() -> None:
    flags.DEFINE_string("model", "smollm2-135m-instruct", "a name kvjax.load knows")
    flags.DEFINE_integer("prompts", 3, "prompts to read", 1)
    flags.DEFINE_integer("tokens", 512, "tokens of each", 2)
    flags.DEFINE_integer("budget", 128, "pairs per head, the mean over layers", 1)
    flags.DEFINE_float("p", 0.35, "share of it that the last group keeps")
    flags.DEFINE_integer("repeats", 11, "timed pairs of prefills; 0 times nothing", 0)
    flags.DEFINE_string("workdir", "runs/similarity", "where similarity.png goes")


def main(_):
    logging.set_verbosity(logging.WARNING)
    rule = budgets.squeeze(FLAGS.p)
    model = kvjax.load(FLAGS.model)
    prompts = cut(model, FLAGS.prompts, FLAGS.tokens)
    found = np.stack([similarities(model, prompt) for prompt in prompts])
    figures_of = by_layer(found, rule, FLAGS.budget)
    out = pathlib.Path(FLAGS.workdir) / "similarity.png"
    out.parent.mkdir(parents=True, exist_ok=True)
    title = f"{model.spec.name}, {len(prompts)} x {FLAGS.tokens} tokens"
    figures.save(out, draw, found, figures_of, title)
    print(table(figures_of))
    told = {
        "model": FLAGS.model,
        "tokens": FLAGS.tokens,
        "budget": FLAGS.budget,
        "p": FLAGS.p,
        "layers": figures_of,
        "same_last_group": shared(found),
        "picture": str(out),
    }
    if FLAGS.repeats:
        took = cost(model, rule, prompts[0], FLAGS.repeats)
        told["measuring"] = took
        print(
            f"\nMeasuring adds {took['percent']}% to a prefill of {took['prefill_ms']} "
            f"ms (quartiles {took['quartiles']})"
        )
    print(json.dumps(told))


def cut(model, count: int, length: int) -> list[list[int]]:
    """`count` prompts of `length` tokens, one after the other in the text."""
    words = model.tokenizer(text.haystack(), verbose=False)["input_ids"]
    if count * length > len(words):
        raise UserError(
            f"--prompts={count} of --tokens={length}: the text has {len(words)} "
            "tokens, ask for fewer"
        )
    return [words[i * length : (i + 1) * length] for i in range(count)]


def similarities(model, prompt) -> np.ndarray:
    """Cosines f32[L, T] of one prompt, read at once."""
    return np.asarray(
        _similarities(model.params, jnp.asarray([prompt]), spec=model.spec)
    )


@functools.partial(jax.jit, static_argnames="spec")
def _similarities(params, tokens, *, spec):
    length, seen = tokens.shape[1], []
    full = cache.make_spec(spec, None, None)
    dtype = params["embed"].dtype
    state = cache.init(spec, full, 1, (length,) * spec.num_layers, dtype)
    n = jnp.full((1,), length, jnp.int32)

    def attend(index, *given):
        return cache.step_layer(index, *given, config=full, n=n, is_prefill=True)

    def measure(index, before, after, state):
        seen.append(squeeze_attention.cosine(before, after)[0])
        return state

    here = cache.next_positions(state, length)
    decoder.forward(params, spec, tokens, here, state, attend, measure)
    return jnp.stack(seen)


def by_layer(found: np.ndarray, rule: budgets.BudgetRule, budget: int) -> list[dict]:
    """What the rule makes of cosines [N, L, T] of N prompts: a dict per layer."""
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
    """Of the layers in the last group of any prompt, the share that is in all's."""
    last = [(g := squeeze_attention.group(each.mean(1))) == g.max() for each in found]
    return round(float(np.all(last, 0).sum() / np.any(last, 0).sum()), 3)


def table(layers: list[dict]) -> str:
    """Markdown, a line per layer."""
    lines = [
        "| layer | cosine | 10% | 90% | group | pairs |",
        "|--:|--:|--:|--:|:--|--:|",
    ]
    for each in layers:
        numbers = f"{each['mean']:.3f} | {each['low']:.3f} | {each['high']:.3f}"
        end = f"G{each['group']} | {each['pairs']}"
        lines.append(f"| {each['layer']} | {numbers} | {end} |")
    return "\n".join(lines)


def draw(found: np.ndarray, layers: list[dict], title: str):
    """Means and spreads by layer with their groups, and a map of the first prompt."""
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
        told = " or ".join(map(str, sizes))
        label = f"G{number}, {len(members)} of {len(layers)} layers: {told} pairs"
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


def cost(model, rule: budgets.BudgetRule, prompt, repeats: int) -> dict:
    """What measuring adds to the prefill of one prompt, in percent of its time.

    Runs with and without it take turns; the median of the ratios of pairs, and their
    quartiles. The first pair is not counted.
    """
    runs = [_prefill(model, rule, prompt), _prefill(model, budgets.uniform(), prompt)]
    pairs = []
    for number in range(repeats + 1):
        order = (0, 1) if number % 2 else (1, 0)
        times = {which: runs[which]() for which in order}
        pairs.append((times[0], times[1]))
    measured, plain = np.array(pairs[1:]).T
    low, middle, high = np.quantile(measured / plain - 1, (0.25, 0.5, 0.75))
    return {
        "percent": round(100 * float(middle), 2),
        "quartiles": [round(100 * float(low), 2), round(100 * float(high), 2)],
        "prefill_ms": round(1e3 * float(np.median(plain)), 1),
        "pairs_of_runs": repeats,
    }


def _prefill(model, rule: budgets.BudgetRule, prompt):
    """A call that reads the prompt and returns the seconds it took."""
    schedule = kvjax.Schedule("after_prefill")
    config = cache.make_spec(model.spec, "recency", 64, schedule, budget_rule=rule)
    length = jobs.bucket(model.spec, config, len(prompt), 1)
    job = jobs.job_of(model, config, length, 1)
    tokens = np.zeros((1, length), np.int32)
    tokens[0, : len(prompt)] = prompt
    given = jnp.asarray(tokens), jnp.asarray([len(prompt)], jnp.int32)

    def run():
        state = compiled.init_state(job, is_prefill=True)
        jax.block_until_ready(state)
        start = time.perf_counter()
        done = steps.prefill(
            model.params, state, *given, spec=model.spec, config=config
        )
        jax.block_until_ready(done)
        return time.perf_counter() - start

    return run


if __name__ == "__main__":
    define_flags()
    command.run(main)
