"""The tables of `memory_arithmetic.py`: what each has, and what is to be said of it."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from memory_kcache import kcache
from memory_squeeze import squeeze
from memory_table import Asked, Columns, Part, Rows

from kvjax.evaluation import arithmetic, roofline
from kvjax.models import presets
from kvjax.types import ModelSpec

LONG = 32_768  # tokens, where sliding windows show
PUBLISHED = {8: 0.26, 4: 0.43}  # gains that a survey's table has, by bits
PUBLISHED_OF = "llama-3-70b", 256  # the model and the batch that it has them for
GROUP = 64  # numbers that share a scale and a zero
PAGES = (16, 32, 64, 128, 256)
SEQUENCES = 10_000
BEAMS = ((2, 512, 128), (4, 512, 128), (4, 2048, 128), (8, 2048, 512), (4, 100, 1000))
SWAPPED = (128, 512, 1024, 2048, 4096, 8192)
SLOW_LINKS = (0.5e9, 2.5e9)  # bytes/s
GRID = 32  # tokens between the lengths that are tried
DEVICE_GB = (24, 40, 80, 141)
ROW_TOKENS = (2048, 8192, 32768)


# --- the parts ------------------------------------------------------------------------


def kv(asked: Asked) -> Part:
    """Bytes of the pairs; and the two slips that make tables differ."""
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
        "2 x layers x KV heads x head dim x 2 bytes. Query heads in the place of KV "
        "heads count too much by their ratio; who writes GB for GiB, too little by 7%.",
        f"Window: what {LONG:,} tokens need where layers see a sliding window only. "
        "kvjax's own full cache keeps the window, and room for a block of the prompt.",
    ]
    title = f"Keys and values in 16 bits, sequences of {asked.tokens:,} tokens"
    return Part(title, rows, columns, notes)


def step(asked: Asked) -> Part:
    """A decode step by batch."""
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
        "pairs GB": lambda row: f"{row['pair_bytes'] / 1e9:.1f}",
        "pairs' share": lambda row: f"{row['share_of_pairs']:.1%}",
        "TFLOP": lambda row: f"{row['flops'] / 1e12:.2f}",
        "ms": lambda row: f"{row['seconds'] * 1e3:.1f}",
        "waits for": lambda row: row["waits_for"],
        "devices": lambda row: str(row["devices"]),
        "tokens/s each": lambda row: f"{row['batch'] / row['seconds']:,.0f}",
    }
    notes = [
        "Milliseconds and tokens/s are for the rates of one device, as if all fitted; "
        "`devices` is the least number that holds weights and pairs. Over n of them "
        "each has an n-th of the bytes and FLOPs, and what they exchange comes on top.",
    ]
    title = f"A decode step on {asked.name} at {asked.tokens:,} tokens in 16 bits"
    return Part(title, rows, columns, notes)


def bits(asked: Asked) -> Part:
    """Gains of pairs in 8 and 4 bits, and where the published ones hold."""
    rates, rows = asked.device.rates, []
    for spec in asked.specs:
        for batch in asked.batches:
            gains = {
                str(b): arithmetic.gain(spec, batch, asked.tokens, b, rates) - 1
                for b in PUBLISHED
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
    return Part(title, rows, columns, [_UNPACKING])


def claims(asked: Asked) -> Part:
    """Where the published gains hold: by bytes alone, and on devices."""
    name, batch = PUBLISHED_OF
    spec = presets.spec(name)
    names = dict.fromkeys((asked.name, "a100-80gb", "h100-sxm", "h200"))
    rates = {"bytes alone": arithmetic.BYTES_ALONE}
    rates |= {name: roofline.device(name).rates for name in names}
    rows = [
        {
            "rates": where,
            "tokens": {
                b: arithmetic.length_of_gain(spec, batch, b, 1 + least, each)
                for b, least in PUBLISHED.items()
            },
            "least_batch": _least_batch(spec, each),
            "most": {
                b: arithmetic.gain(spec, batch, spec.context_length, b, each) - 1
                for b in PUBLISHED
            },
        }
        for where, each in rates.items()
    ]
    columns: Columns = {"rates": lambda row: row["rates"]}
    for b, least in PUBLISHED.items():
        columns[f"{least:+.0%} by INT{b} at tokens"] = lambda row, b=b: _count(
            row["tokens"][b]
        )
    columns["both at one length"] = lambda row: "yes" if agree(row["tokens"]) else "no"
    columns["least batch"] = lambda row: _count(row["least_batch"])
    columns[f"INT8, INT4 at {spec.context_length:,}"] = lambda row: ", ".join(
        f"{most:+.0%}" for most in row["most"].values()
    )
    title = (
        f"Where {name} gains {_shares()} at batch {batch}, as a survey's table has it"
    )
    return Part(title, rows, columns, claim_notes(spec, rows))


def agree(tokens: dict[int, int | None]) -> bool:
    """Whether lengths are one, to a tenth: gains are published in whole percents."""
    known = [length for length in tokens.values() if length]
    return len(known) == len(tokens) and max(known) <= 1.1 * min(known)


def claim_notes(spec: ModelSpec, rows: Rows) -> list[str]:
    """What the rows say of the published figures."""
    batch, limit = PUBLISHED_OF[1], spec.context_length
    ridges = ", ".join(
        f"{row['rates']} {rates.flops_per_s / rates.bytes_per_s:.0f}"
        for row in rows[1:]
        for rates in [roofline.device(row["rates"]).rates]
    )
    most = rows[0]["most"][8]
    grouped = {
        b: arithmetic.length_of_gain(
            spec, batch, arithmetic.stored_bits(b, GROUP), 1 + least
        )
        for b, least in PUBLISHED.items()
    }
    lengths = " and ".join(map(_count, grouped.values()))
    return [
        f"Batch {batch} alone says nothing: by bytes INT8 gains anything from 0 to "
        f"{most:.0%} between 1 and {limit:,} tokens. Both figures are arithmetic of "
        f"bytes at the lengths of the first row; with a scale and a zero for every "
        f"{GROUP} numbers at {lengths}.",
        "They cannot be arithmetic where FLOPs are waited for. A step multiplies each "
        f"16-bit weight with {batch} rows, {batch} FLOPs per byte, and devices do so "
        f"many per byte: {ridges}. Above that fewer bits end at the FLOPs' time, and "
        "`no` means that no one length gives both figures.",
        "`least batch`: below it (of powers of two) INT8's figure is not reached in "
        f"the model's {limit:,} tokens. More rows in the memory that is freed are "
        "another gain, which these figures do not have.",
        _UNPACKING,
    ]


def _least_batch(spec: ModelSpec, rates: roofline.Rates) -> int | None:
    """The least power of two that reaches the first published gain in the context."""
    b, least = next(iter(PUBLISHED.items()))
    fit = (
        batch
        for batch in (2**i for i in range(12))
        if arithmetic.gain(spec, batch, spec.context_length, b, rates) >= 1 + least
    )
    return next(fit, None)


def pages(asked: Asked) -> Part:
    """Reserving the longest length, and pages."""
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
        "waste of the longest": lambda row: f"{row['contiguous_waste']:.1%}",
        "page": lambda row: str(row["page"]),
        "empty tokens": lambda row: f"{row['empty']:.2f}",
        "(page - 1) / 2": lambda row: f"{row['expected_empty']:.1f}",
        "table entries": lambda row: f"{row['entries']:.1f}",
        "overhead": lambda row: f"{row['overhead']:.2%}",
    }
    notes = [
        f"{SEQUENCES:,} sequences, seed {asked.seed}; the waste is a share of what is "
        f"reserved at {asked.longest:,} tokens each. It is a property of the lengths: "
        "a waste without their distribution says nothing of an allocator. The overhead "
        f"is of the bytes used, of {spec.name}, with 4 bytes per entry: these are "
        "nothing beside half a page.",
    ]
    title = "Contiguous allocation and pages, per sequence"
    return Part(title, rows, columns, notes)


def beams(asked: Asked) -> Part:
    """Copies for every beam, and copy on write."""
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
        "Shared: the prompt's full pages; outputs are taken to share nothing, so this "
        "is the least that is saved. It depends on the prompt's share of the length: a "
        "saving without both lengths says little.",
    ]
    title = f"Beams of {spec.name} in pages of {PAGES[0]} tokens"
    return Part(title, rows, columns, notes)


def swap(asked: Asked) -> Part:
    """A preempted sequence brought back over the link, or read again."""
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
        "read again ms": lambda row: f"{row['recompute_s'] * 1e3:.1f}",
        "equal at GB/s": lambda row: f"{row['equal_bytes_per_s'] / 1e9:.2f}",
    }
    notes = [
        "`equal at`: the link whose time is that of reading again. Keys and values of "
        f"a layer's page of {asked.link.page} tokens are a copy each. Over n devices "
        "with a link each, both times are an n-th."
    ]
    title = f"A preempted sequence: {_gb(asked.link)} from the host, or {asked.name}"
    return Part(title, rows, columns, notes)


def crossing(asked: Asked) -> Part:
    """The lengths at which reading again takes less than the link."""
    free = asked.link._replace(copy_s=0.0)
    links = [free._replace(bytes_per_s=rate) for rate in SLOW_LINKS]
    links += [free, *(free._replace(copy_s=n * asked.link.copy_s) for n in (1, 2))]
    links = list(dict.fromkeys(links))
    rows = []
    for spec in asked.specs:
        lengths = range(GRID, min(max(SWAPPED), spec.context_length) + 1, GRID)
        rows.append(
            {
                "model": spec.name,
                "read_again": {
                    _link(link): arithmetic.faster_to_recompute(
                        spec, lengths, asked.device.rates, link
                    )
                    for link in links
                },
            }
        )
    columns: Columns = {"model": lambda row: row["model"]}
    for name in map(_link, links):
        columns[name] = lambda row, name=name: _stretches(row["read_again"][name])
    notes = [
        f"Lengths in steps of {GRID} up to {max(SWAPPED):,}, read in blocks of 512. "
        "There is no one length up to which reading again wins: a short sequence, or a "
        "short last block, waits for the weights to be read, a long one for FLOPs that "
        "grow with the square. What decides is the link's rate per FLOP of the device "
        "and what every small copy costs: a claim without them says nothing."
    ]
    title = f"Lengths in tokens that {asked.name} reads again faster, by link"
    return Part(title, rows, columns, notes)


def rows(asked: Asked) -> Part:
    """How many rows of every known shape fit on devices, full and compressed."""
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
        f"{asked.dtype}; the last of each four is a cache of {asked.budget} pairs per "
        "head. In 92% of the device, from shapes: temporaries come on top. A dash: not "
        "one row fits on one device."
    ]
    return Part("The largest batch that fits", found, columns, notes)


def _fitting(spec: ModelSpec, asked: Asked) -> dict[str, Any]:
    """Figures of one model: rows by device, by length and for the compressed cache."""
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


PARTS: dict[str, Callable[[Asked], Part]] = {
    part.__name__: part
    for part in (
        kv,
        step,
        bits,
        claims,
        pages,
        beams,
        swap,
        crossing,
        rows,
        kcache,
        squeeze,
    )
}
_UNPACKING = (
    "Weights stay in 16 bits, and to unpack fewer bits takes no time here: a device's "
    "gain is at most this."
)


# --- text -----------------------------------------------------------------------------


def _gib(count: float) -> str:
    return f"{count / 2**30:,.3g}" if count < 1000 * 2**30 else f"{count / 2**30:,.0f}"


def _count(value: int | None) -> str:
    return "never" if value is None else f"{value:,}"


def _shares() -> str:
    return " and ".join(f"{gain:.0%} by INT{b}" for b, gain in PUBLISHED.items())


def _link(link: arithmetic.Link) -> str:
    return f"{_gb(link)}, {_us(link)} a copy" if link.copy_s else _gb(link)


def _gb(link: arithmetic.Link) -> str:
    return f"{link.bytes_per_s / 1e9:g} GB/s"


def _us(link: arithmetic.Link) -> str:
    return f"{link.copy_s * 1e6:g} us"


def _stretches(found: Sequence[tuple[int, int]]) -> str:
    return "; ".join(f"{first:,} to {last:,}" for first, last in found) or "never"
