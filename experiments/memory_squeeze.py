"""SqueezeAttention's Table 3 in `memory_arithmetic.py`: what a roofline says of it."""

from memory_table import Asked, Columns, Part, Rows

from kvjax import policies
from kvjax.cache.config import make_config
from kvjax.cache.schedule import Schedule
from kvjax.evaluation import arithmetic, roofline
from kvjax.models import presets

# Eight A100 of 40 GB, which compute one after the other where layers are dealt out to
# them: the rates of one (NVIDIA's data sheet), the memory of all.
SQUEEZE_ON = roofline.Device(roofline.Rates(1.555e12, 312e12, 32e9), 8 * 40e9)
# Of each model: prompt and new tokens, batches, and the paper's gain at the last one.
SQUEEZE = {
    "mistral-7b": (512, 1024, (1, 32, 64, 128, 224), 2.2),
    "llama-2-70b": (256, 512, (1, 8, 16, 32, 64), 1.4),
}
SQUEEZE_SHARES = 0.3, 0.2


def squeeze(asked: Asked) -> Part:
    """Decoding with a share of the pairs, however shared out, beside all of them."""
    found: Rows = []
    for name, (prompt, new, batches, published) in SQUEEZE.items():
        spec = presets.spec(name)
        sizes = [round(share * (prompt + new)) for share in SQUEEZE_SHARES]
        full = make_config(spec, None, None)
        schedule = Schedule("decode_only", evict_size=1)
        few = [make_config(spec, policies.recency(), size, schedule) for size in sizes]
        for batch in batches:
            all_kept, *kept = (
                arithmetic.decoding(spec, config, batch, prompt, new, SQUEEZE_ON)
                for config in (full, *few)
            )
            found.append(
                {
                    "model": name,
                    "batch": batch,
                    "decode_tokens_per_s": all_kept.decode_tokens_per_s,
                    "rows": [each.rows for each in (all_kept, *kept)],
                    "gains": [
                        each.decode_tokens_per_s / all_kept.decode_tokens_per_s
                        for each in kept
                    ],
                    "published": published if batch == batches[-1] else None,
                }
            )
    columns: Columns = {
        "model": lambda row: row["model"],
        "batch": lambda row: str(row["batch"]),
        "full cache tok/s": lambda row: f"{row['decode_tokens_per_s']:,.0f}",
    }
    for index, share in enumerate(SQUEEZE_SHARES):
        columns[f"gain at {share:.0%}"] = lambda row, i=index: f"{row['gains'][i]:.2f}"
    columns |= {
        "published": lambda row: str(row["published"] or ""),
        "rows that fit": lambda row: ", ".join(f"{each:,}" for each in row["rows"]),
    }
    shares = " and ".join(f"{share:.0%}" for share in SQUEEZE_SHARES)
    notes = [
        "Prompts of 512 and 256 tokens, 1,024 and 512 new ones, 16 bits, on eight A100 "
        "of 40 GB that work one after the other; lengths and shares are our reading of "
        "the paper, its gains those of its largest batches. Rows that fit: of the full "
        f"cache and of {shares}, where the prompt decides, which is read before any "
        "pair goes. How pairs are shared out between layers changes neither.",
        "Weights are read for every step, so fewer pairs gain little before pairs "
        "outweigh them: a gain above the roofline's is a full cache that does more "
        "than read its pairs, such as making itself anew at every step.",
    ]
    return Part("SqueezeAttention: a share of the pairs", found, columns, notes)
