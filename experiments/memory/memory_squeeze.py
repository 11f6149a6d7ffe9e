"""The table `squeeze` of `memory_arithmetic.py`: SqueezeAttention beside a roofline."""

from typing import NamedTuple

from memory_table import Asked, Columns, Part, Rows

from kvjax import policies
from kvjax.cache.schedule import Schedule
from kvjax.cache.spec import make_spec
from kvjax.evaluation import arithmetic, roofline
from kvjax.models import presets

# Eight A100 of 40 GB with the layers split between them, so that they compute in turn:
# the rates of one (NVIDIA's data sheet), the memory of all.
SQUEEZE_ON = roofline.Device(roofline.Rates(1.555e12, 312e12, 32e9), 8 * 40e9)
OUT_OF_MEMORY = "out of memory"


class Setting(NamedTuple):
    """A model in Wang and Gan 2024 (arXiv 2404.04793), Table 3.

    Attributes:
      prompt, new: tokens.
      share: of the KV pairs of prompt and new tokens that is kept.
      batches: rows, as in the table.
      published: by batch, the largest gain over the full cache, and where the full
        cache was out of memory.
    """

    prompt: int
    new: int
    share: float
    batches: tuple[int, ...]
    published: dict[int, float | str]


SQUEEZE = {
    "mistral-7b": Setting(
        512, 1024, 0.2, (1, 32, 64, 128, 224), {64: 2.2, 224: OUT_OF_MEMORY}
    ),
    "llama-2-70b": Setting(
        256, 512, 0.3, (1, 8, 16, 32, 64), {32: 1.4, 64: OUT_OF_MEMORY}
    ),
}


def squeeze(asked: Asked) -> Part:
    """Returns decoding rates with a share of the KV pairs, beside the full cache."""
    found: Rows = []
    for name, setting in SQUEEZE.items():
        spec = presets.spec(name)
        size = round(setting.share * (setting.prompt + setting.new))
        schedule = Schedule("decode_only", evict_size=1)
        configs = (
            make_spec(spec, None, None),
            make_spec(spec, policies.recency(), size, schedule),
        )
        for batch in setting.batches:
            full, few = (
                arithmetic.decoding(
                    spec, config, batch, setting.prompt, setting.new, SQUEEZE_ON
                )
                for config in configs
            )
            found.append(
                {
                    "model": name,
                    "share": setting.share,
                    "batch": batch,
                    "decode_tokens_per_s": full.decode_tokens_per_s,
                    "rows": [full.rows, few.rows],
                    "gain": few.decode_tokens_per_s / full.decode_tokens_per_s,
                    "published": setting.published.get(batch),
                }
            )
    columns: Columns = {
        "model": lambda row: row["model"],
        "kept": lambda row: f"{row['share']:.0%}",
        "batch": lambda row: str(row["batch"]),
        "full cache tok/s": lambda row: f"{row['decode_tokens_per_s']:,.0f}",
        "gain": lambda row: f"{row['gain']:.2f}",
        "published": lambda row: str(row["published"] or ""),
        "rows that fit": lambda row: ", ".join(f"{each:,}" for each in row["rows"]),
    }
    notes = [
        "Prompts of 512 and 256 tokens, 1,024 and 512 new ones, 16 bits, on eight A100 "
        "of 40 GB that compute in turn. Published: the largest gain over the full "
        "cache, and where that was out of memory. Rows that fit: with the full cache, "
        "and with the share, which holds the whole prompt before it evicts. How the "
        "budget is split between layers changes neither.",
        "Every step reads the weights, so fewer KV pairs gain little while weights "
        "dominate. A published gain above the roofline's means that the full cache did "
        "more than read its pairs, such as copying itself at every step. By its bytes "
        "the full cache fits at every batch of the table.",
    ]
    return Part("SqueezeAttention: a share of the pairs", found, columns, notes)
