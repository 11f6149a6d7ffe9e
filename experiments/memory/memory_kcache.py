"""KCache's table of `memory_arithmetic.py`: its paper beside the roofline."""

from collections.abc import Iterable

from memory_table import Asked, Columns, Part, Rows

from kvjax.cache.offload import Offload
from kvjax.cache.spec import make_spec
from kvjax.evaluation import arithmetic, roofline
from kvjax.models import presets

KCACHE_OF = "llama-2-7b"
# The paper describes its device by all but the link, for which PCIe 4 stands.
KCACHE_ON = roofline.Device(roofline.Rates(1e12, 180e12, 32e9), 64e9)
KCACHE_N, KCACHE_LAYERS, KCACHE_NEW = (32, 64, 128), 1, 1024
KCACHE = {  # (prompt, batch): tokens/s of the full cache and of each N; the paper's
    (1024, 16): (485.9, 441.0, 389.7, 315.7),
    (4096, 14): (251.2, 290.8, 267.8, 231.4),
    (15_360, 3): (65.9, 76.6, 75.8, 73.7),
    (15_360, 5): (None, 102.5, 100.4, 95.1),
}


def kcache(asked: Asked) -> Part:
    """KCache's table: values in host memory, as published and by the roofline."""
    device, spec = KCACHE_ON, presets.spec(KCACHE_OF)
    found: Rows = []
    for (prompt, batch), published in KCACHE.items():
        for top_n, told in zip((None, *KCACHE_N), published, strict=True):
            offload = top_n and Offload(top_n, KCACHE_LAYERS)
            config = make_spec(spec, None, None, offload=offload)
            given = spec, config, batch, prompt, KCACHE_NEW, device
            made = arithmetic.decoding(*given)
            found.append(
                {"prompt": prompt, "batch": batch, "top_n": top_n, "published": told}
                | made._asdict()
            )
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
        f"{device.rates.flops_per_s / 1e12:g} TFLOP/s; of its link the paper says "
        f"nothing, and {device.rates.link_bytes_per_s / 1e9:g} GB/s are ours.",
        f"By s / N alone fetching {KCACHE_N[-1]} pairs would pay from {least:,.0f} "
        "tokens on. The roofline lets the link work beside the device and takes "
        "choosing and gathering as free; what is published pays for both, so it falls "
        "with N where the roofline does not.",
        f"While {_joined(f'{each:,}' for each in lengths)} tokens are read at once, a "
        f"layer's arithmetic takes {_joined(f'{each:.1f}' for each in covers)} times "
        "as long as its values take to the host: from 1 on that is hidden "
        "(11 d + 2 s > FLOPS / bandwidth).",
    ]
    return Part("Values in host memory", found, columns, notes)


def _joined(words: Iterable[str]) -> str:
    return ", ".join(words)
