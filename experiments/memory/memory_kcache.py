"""The table `kcache` of `memory_arithmetic.py`: KCache's paper beside a roofline."""

from collections.abc import Iterable

from memory_table import Asked, Columns, Part, Rows

from kvjax.cache.offload import Offload
from kvjax.cache.spec import make_spec
from kvjax.evaluation import arithmetic, roofline
from kvjax.models import presets

KCACHE_OF = "llama-2-7b"
# The paper gives its device's rates except for the link, where PCIe 4 is assumed.
KCACHE_ON = roofline.Device(roofline.Rates(1e12, 180e12, 32e9), 64e9)
KCACHE_N, KCACHE_LAYERS, KCACHE_NEW = (32, 64, 128), 1, 1024
KCACHE = {  # (prompt, batch): tokens/s of the full cache and of each N; the paper's
    (1024, 16): (485.9, 441.0, 389.7, 315.7),
    (4096, 14): (251.2, 290.8, 267.8, 231.4),
    (15_360, 3): (65.9, 76.6, 75.8, 73.7),
    (15_360, 5): (None, 102.5, 100.4, 95.1),
}


def kcache(asked: Asked) -> Part:
    """Returns decoding rates with values in host memory, published and by roofline."""
    device, spec = KCACHE_ON, presets.spec(KCACHE_OF)
    found: Rows = []
    for (prompt, batch), published in KCACHE.items():
        for top_n, rate in zip((None, *KCACHE_N), published, strict=True):
            offload = top_n and Offload(top_n, KCACHE_LAYERS)
            config = make_spec(spec, None, None, offload=offload)
            decoding = arithmetic.decoding(
                spec, config, batch, prompt, KCACHE_NEW, device
            )
            row = {"prompt": prompt, "batch": batch, "top_n": top_n}
            found.append(row | {"published": rate} | decoding._asdict())
    columns: Columns = {
        "prompt": lambda row: f"{row['prompt']:,}",
        "batch": lambda row: str(row["batch"]),
        "N": lambda row: str(row["top_n"] or "all"),
        "published tok/s": lambda row: str(row["published"] or "out of memory"),
        "roofline tok/s": lambda row: f"{row['decode_tokens_per_s']:.1f}",
        "rows that fit": lambda row: str(row["rows"]),
        "host GB": lambda row: f"{row['host_row_bytes'] * row['rows'] / 1e9:.0f}",
    }
    least = arithmetic.tokens_to_fetch_from(Offload(KCACHE_N[-1]), device.rates)
    lengths = list(dict.fromkeys(prompt for prompt, _ in KCACHE))
    covers = [arithmetic.hidden(spec, length, device.rates) for length in lengths]
    notes = [
        f"{spec.name}, {KCACHE_NEW:,} new tokens, bfloat16, values of the first "
        f"{KCACHE_LAYERS} layers on the device. The device is the paper's: "
        f"{device.memory_bytes / 1e9:g} GB, {device.rates.bytes_per_s / 1e12:g} TB/s, "
        f"{device.rates.flops_per_s / 1e12:g} TFLOP/s. The paper gives no link; "
        f"{device.rates.link_bytes_per_s / 1e9:g} GB/s are assumed.",
        f"By s / N alone, fetching {KCACHE_N[-1]} values pays from {least:,.0f} tokens "
        "on. The roofline overlaps the link with the device and takes top-N selection "
        "and gathering as free; the published rates include both, so they fall with N "
        "where the roofline does not.",
        f"In a prefill of {_joined(f'{each:,}' for each in lengths)} tokens, computing "
        f"a layer takes {_joined(f'{each:.1f}' for each in covers)} times as long as "
        "copying its values to the host: from 1 on, the copy is hidden "
        "(11 d + 2 s > FLOPS / bandwidth).",
    ]
    return Part("Values in host memory", found, columns, notes)


def _joined(words: Iterable[str]) -> str:
    return ", ".join(words)
