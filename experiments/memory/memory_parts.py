"""The tables of `memory_arithmetic.py` with their notes, one function each."""

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from memory_kcache import kcache
from memory_squeeze import squeeze
from memory_table import Asked, Columns, Part

from kvjax.evaluation import arithmetic
from kvjax.models import presets
from kvjax.types import ModelSpec

LONG = 32_768  # tokens, more than the sliding window of any known model
BITS = (8, 4)  # per number of the compressed keys and values
GROUP = 64  # numbers that share a scale and a zero point
PAGES = (16, 32, 64, 128, 256)
SEQUENCES = 10_000
BEAMS = ((2, 512, 128), (4, 512, 128), (4, 2048, 128), (8, 2048, 512), (4, 100, 1000))
SWAPPED = (128, 512, 1024, 2048, 4096, 8192)
DEVICE_GB = (24, 40, 80, 141)
ROW_TOKENS = (2048, 8192, 32768)


def kv(asked: Asked) -> Part:
    """Returns the bytes of all KV pairs, by model and batch."""
    rows = [
        {
            "model": spec.name,
            "kv_heads": spec.num_kv_heads,
            "heads": spec.num_heads,
            "token_bytes": arithmetic.kv_bytes(spec, 1, 1),
            "bytes": {
                b: arithmetic.kv_bytes(spec, b, asked.tokens) for b in asked.batches
            },
            "long": arithmetic.kv_bytes(spec, 1, LONG),
            "long_rolling": arithmetic.kv_bytes(spec, 1, LONG, rolling=True),
        }
        for spec in asked.specs
    ]
    columns: Columns = {
        "model": lambda row: row["model"],
        "heads: KV, query": lambda row: f"{row['kv_heads']}, {row['heads']}",
        "KiB per token": lambda row: f"{row['token_bytes'] / 2**10:,.0f}",
    }
    for batch in asked.batches:
        columns[f"GiB, batch {batch}"] = lambda row, b=batch: _gib(row["bytes"][b])
    columns[f"1 x {LONG:,}; window"] = lambda row: (
        f"{_gib(row['long'])}; {_gib(row['long_rolling'])}"
    )
    notes = [
        "2 x layers x KV heads x head dim x 2 bytes. Published tables differ where "
        "they count query heads for KV heads, or write GB for GiB (7% less).",
        f"Window: the bytes of {LONG:,} tokens where layers with a sliding window "
        "store only the window. kvjax's full cache also has room for a prefill chunk.",
    ]
    title = f"Keys and values in 16 bits, sequences of {asked.tokens:,} tokens"
    return Part(title, rows, columns, notes)


def step(asked: Asked) -> Part:
    """Returns bytes, FLOPs and the least time of a decode step, by model and batch."""
    rates = asked.device.rates
    rows = []
    for spec in asked.specs:
        weights = arithmetic.weight_bytes(spec, "bfloat16")
        for batch in asked.batches:
            one = arithmetic.decode_step(spec, batch, asked.tokens)
            pairs = arithmetic.kv_bytes(spec, batch, asked.tokens, rolling=True)
            held = weights + pairs
            rows.append(
                {
                    "model": spec.name,
                    "batch": batch,
                    "weight_bytes": one.weights.bytes,
                    "pair_bytes": one.pairs.bytes,
                    "flops": one.work.flops,
                    "share_of_pairs": one.share_of_pairs,
                    "seconds": one.seconds(rates),
                    "waits_for": one.waits_for(rates),
                    "devices": math.ceil(held / asked.device.memory_bytes),
                }
            )
    columns: Columns = {
        "model": lambda row: row["model"],
        "batch": lambda row: str(row["batch"]),
        "weights read GB": lambda row: f"{row['weight_bytes'] / 1e9:.1f}",
        "KV pairs GB": lambda row: f"{row['pair_bytes'] / 1e9:.1f}",
        "KV pairs of bytes read": lambda row: f"{row['share_of_pairs']:.1%}",
        "TFLOP": lambda row: f"{row['flops'] / 1e12:.2f}",
        "ms": lambda row: f"{row['seconds'] * 1e3:.1f}",
        "waits for": lambda row: row["waits_for"],
        "devices": lambda row: str(row["devices"]),
        "tokens/s each": lambda row: f"{row['batch'] / row['seconds']:,.0f}",
    }
    notes = [
        "Milliseconds and tokens/s are a roofline at the rates of one device, as if "
        "everything fitted; `devices` is the smallest number that holds weights and KV "
        "pairs. With n devices, each reads and computes 1/n; communication is extra.",
    ]
    title = f"A decode step on {asked.name} at {asked.tokens:,} tokens in 16 bits"
    return Part(title, rows, columns, notes)


def bits(asked: Asked) -> Part:
    """Returns the tokens/s gained by storing KV pairs in 8 or 4 bits, by batch."""
    rates, rows = asked.device.rates, []
    for spec in asked.specs:
        for batch in asked.batches:
            gains = {
                str(b): arithmetic.gain(spec, batch, asked.tokens, b, rates) - 1
                for b in BITS
            }
            grouped = arithmetic.stored_bits(4, GROUP)
            gains["4 grouped"] = (
                arithmetic.gain(spec, batch, asked.tokens, grouped, rates) - 1
            )
            alone = arithmetic.gain(spec, batch, asked.tokens, 4) - 1
            rows.append(
                {
                    "model": spec.name,
                    "batch": batch,
                    "gain": gains,
                    "bytes_alone": alone,
                }
            )
    columns: Columns = {
        "model": lambda row: row["model"],
        "batch": lambda row: str(row["batch"]),
        "INT8": lambda row: f"{row['gain']['8']:+.0%}",
        "INT4": lambda row: f"{row['gain']['4']:+.0%}",
        f"INT4, groups of {GROUP}": lambda row: f"{row['gain']['4 grouped']:+.0%}",
        "INT4 by bytes alone": lambda row: f"{row['bytes_alone']:+.0%}",
    }
    title = f"Tokens/s gained on {asked.name} at {asked.tokens:,} tokens by fewer bits"
    notes = [
        "Weights stay in 16 bits and decoding the codes is taken as free, so these are "
        "upper bounds.",
    ]
    return Part(title, rows, columns, notes)


def pages(asked: Asked) -> Part:
    """Returns the slots wasted by reserving the longest length, and by pages."""
    spec = asked.specs[0]
    token_bytes = arithmetic.kv_bytes(spec, 1, 1)
    rows = []
    for kind in ("lognormal", "uniform"):
        lengths = arithmetic.draw_lengths(kind, SEQUENCES, asked.longest, asked.seed)
        waste = arithmetic.contiguous_waste(lengths, asked.longest)
        for page in PAGES:
            cost = arithmetic.paging(lengths, page, token_bytes)
            rows.append(
                {
                    "lengths": kind,
                    "mean": float(lengths.mean()),
                    "contiguous_waste": waste,
                    "page": page,
                    "expected_empty": (page - 1) / 2,
                    **cost._asdict(),
                }
            )
    columns: Columns = {
        "lengths": lambda row: f"{row['lengths']}, mean {row['mean']:,.0f}",
        "waste of reserving": lambda row: f"{row['contiguous_waste']:.1%}",
        "page": lambda row: str(row["page"]),
        "empty tokens": lambda row: f"{row['empty']:.2f}",
        "(page - 1) / 2": lambda row: f"{row['expected_empty']:.1f}",
        "table entries": lambda row: f"{row['entries']:.1f}",
        "overhead": lambda row: f"{row['overhead']:.2%}",
    }
    notes = [
        f"{SEQUENCES:,} sequences, seed {asked.seed}. The waste is the unused share of "
        f"{asked.longest:,} slots reserved for each sequence; it depends on the "
        "distribution of lengths alone, not on the allocator. The overhead of pages is "
        f"relative to the bytes in use by {spec.name}, with 4 bytes per table entry: "
        "nearly all of it is the half-empty last page.",
    ]
    title = "Contiguous allocation and pages, per sequence"
    return Part(title, rows, columns, notes)


def beams(asked: Asked) -> Part:
    """Returns the bytes of beam search with and without sharing the prompt's pages."""
    spec, rows = asked.specs[0], []
    token_bytes = arithmetic.kv_bytes(spec, 1, 1)
    for width, prompt, output in BEAMS:
        held = arithmetic.beams(width, prompt, output, PAGES[0])
        rows.append(
            {
                "beams": width,
                "prompt": prompt,
                "output": output,
                "bytes_apart": held.apart * token_bytes,
                "bytes_shared": held.shared * token_bytes,
                "saved": 1 - held.shared / held.apart,
            }
        )
    columns: Columns = {
        "beams": lambda row: str(row["beams"]),
        "prompt": lambda row: f"{row['prompt']:,}",
        "output": lambda row: f"{row['output']:,}",
        "MiB apart": lambda row: f"{row['bytes_apart'] / 2**20:,.0f}",
        "MiB shared": lambda row: f"{row['bytes_shared'] / 2**20:,.0f}",
        "saved": lambda row: f"{row['saved']:.1%}",
    }
    notes = [
        "Beams share the full pages of the prompt and nothing of their outputs, so "
        "`saved` is a lower bound. It depends on the lengths of prompt and output.",
    ]
    title = f"Beams of {spec.name} in pages of {PAGES[0]} tokens"
    return Part(title, rows, columns, notes)


def swap(asked: Asked) -> Part:
    """Returns the seconds to swap a preempted sequence in, or to prefill it again."""
    rates, rows = asked.device.rates, []
    free = asked.link._replace(copy_s=0.0)
    for spec in asked.specs:
        for tokens in (n for n in SWAPPED if n <= spec.context_length):
            rows.append(
                {
                    "model": spec.name,
                    "tokens": tokens,
                    "swap_s": arithmetic.swap_seconds(spec, tokens, free),
                    "copies_s": arithmetic.swap_seconds(spec, tokens, asked.link),
                    "recompute_s": arithmetic.recompute_seconds(spec, tokens, rates),
                    "equal_bytes_per_s": arithmetic.equal_rate(spec, tokens, rates),
                }
            )
    columns: Columns = {
        "model": lambda row: row["model"],
        "tokens": lambda row: f"{row['tokens']:,}",
        "swap ms": lambda row: f"{row['swap_s'] * 1e3:.1f}",
        f"and {_us(asked.link)} a copy": lambda row: f"{row['copies_s'] * 1e3:.1f}",
        "prefill ms": lambda row: f"{row['recompute_s'] * 1e3:.1f}",
        "equal at GB/s": lambda row: f"{row['equal_bytes_per_s'] / 1e9:.2f}",
    }
    notes = [
        "`equal at`: the rate of the link at which both take the same time. Each "
        f"layer copies keys and values of every page of {asked.link.page} tokens. With "
        "n devices that have a link each, both times are 1/n.",
    ]
    title = f"A preempted sequence: {_gb(asked.link)} from the host, or {asked.name}"
    return Part(title, rows, columns, notes)


def rows(asked: Asked) -> Part:
    """Returns how many rows of each model fit on a device, full and compressed."""
    found = [_fitting(presets.spec(name), asked) for name in presets.CONFIGS]
    head = f"{', '.join(map(str, ROW_TOKENS))}, kv {asked.budget}"
    columns: Columns = {
        "model": lambda row: row["model"],
        "weights GB": lambda row: f"{row['weights'] / 1e9:.1f}",
        "KV MiB per token": lambda row: f"{row['kv_per_token'] / 2**20:.3f}",
    }
    for size in DEVICE_GB:
        columns[f"{size} GB: {head}"] = lambda row, size=size: ", ".join(
            str(count or "-") for count in row["batch"][size].values()
        )
    notes = [
        f"{asked.dtype}; the last of each four numbers is a cache of {asked.budget} KV "
        "pairs per head. Computed from shapes for 92% of the device's memory, without "
        "temporaries. A dash: not even one row fits on one device."
    ]
    return Part("The largest batch that fits", found, columns, notes)


def _fitting(spec: ModelSpec, asked: Asked) -> dict[str, Any]:
    """Returns one model's rows by device, by length and for the compressed cache."""
    state = {
        str(tokens): arithmetic.row_bytes(spec, tokens, None, asked.dtype)
        for tokens in ROW_TOKENS
    }
    compressed = arithmetic.row_bytes(spec, asked.budget, asked.budget, asked.dtype)
    state[f"kv {asked.budget}"] = compressed
    weights = arithmetic.weight_bytes(spec, asked.dtype)
    bits = 8 * jnp.dtype(asked.dtype).itemsize
    return {
        "model": spec.name,
        "weights": weights,
        "kv_per_token": arithmetic.kv_bytes(spec, 1, 1, bits),
        "batch": {
            gb: {
                name: arithmetic.rows_that_fit(gb * 1e9, weights, row)
                for name, row in state.items()
            }
            for gb in DEVICE_GB
        },
    }


# --- text -----------------------------------------------------------------------------


def _gib(count: float) -> str:
    return f"{count / 2**30:,.3g}" if count < 1000 * 2**30 else f"{count / 2**30:,.0f}"


def _gb(link: arithmetic.Link) -> str:
    return f"{link.bytes_per_s / 1e9:g} GB/s"


def _us(link: arithmetic.Link) -> str:
    return f"{link.copy_s * 1e6:g} us"


PARTS: dict[str, Callable[[Asked], Part]] = {
    part.__name__: part
    for part in (kv, step, bits, pages, beams, swap, rows, kcache, squeeze)
}
