"""How many rows of published models fit on a device, with and without compression.

    python experiments/memory_table.py --dtype=bfloat16

Weights, bytes of keys and values per token, and the largest batch at 2k, 8k and 32k
tokens with the full cache and with |kv| = 1024, on devices of 24, 40, 80 and 141 GB, of
which 92% may be used. From shapes alone: temporaries, which `kvjax.plan` reads off the
compiled programs, come on top. Prints a table and, last, one JSON line.
"""

import json

import command_line
from absl import flags

from kvjax import policies
from kvjax.cache.config import make_config
from kvjax.cache.schedule import Schedule
from kvjax.engine.compiled import Job
from kvjax.engine.planner import state_bytes, weights_bytes
from kvjax.models import presets
from kvjax.models.weights import checked_dtype

FLAGS = flags.FLAGS
flags.DEFINE_string("dtype", "bfloat16", "of weights and pairs")
flags.DEFINE_integer("budget", 1024, "|kv| of the compressed cache")

DEVICES = (24, 40, 80, 141)  # 1e9 bytes
LENGTHS = (2048, 8192, 32768)
USABLE = 0.92


def row(name, dtype, budget):
    """Figures of one model."""
    spec = presets.spec(name)
    job = _job(spec, 1, None, dtype)
    weights = weights_bytes(job)
    figures = {"weights": weights, "kv_per_token": kv_bytes(spec, dtype)}
    figures["batch"] = {
        str(device): {
            what: max(int((device * 1e9 * USABLE - weights) // bytes_), 0)
            for what, bytes_ in _row_bytes(spec, dtype, budget).items()
        }
        for device in DEVICES
    }
    return figures


def kv_bytes(spec, dtype):
    """Keys and values of one token: the difference that a slot makes."""
    small, large = (
        max(state_bytes(_job(spec, slots, None, dtype)).values()) for slots in (1, 2)
    )
    return large - small - 4 * spec.num_layers * spec.num_kv_heads  # its positions


def _row_bytes(spec, dtype, budget):
    """State of one row: full caches of each length, and the compressed one."""
    jobs = {str(length): _job(spec, length, None, dtype) for length in LENGTHS}
    jobs[f"kv {budget}"] = _job(spec, budget, budget, dtype)
    return {name: max(state_bytes(job).values()) for name, job in jobs.items()}


def _job(spec, tokens, budget, dtype):
    """A job of one row that reads `tokens` and writes none."""
    rule = policies.average_attention() if budget else None
    schedule = Schedule() if budget else Schedule("none")
    config = make_config(spec, rule, budget, schedule)
    return Job(spec, config, 1, tokens, 0, dtype)


def table(rows):
    """Markdown."""
    names = list(next(iter(rows.values()))["batch"][str(DEVICES[0])])
    head = [f"{device} GB: {', '.join(names)}" for device in DEVICES]
    lines = [
        f"| model | weights GB | KV MiB per token | {' | '.join(head)} |",
        "|---|---|---|" + "---|" * len(DEVICES),
    ]
    for name, figures in rows.items():
        cells = [
            ", ".join(str(n) if n else "-" for n in figures["batch"][str(d)].values())
            for d in DEVICES
        ]
        weights, token = figures["weights"] / 1e9, figures["kv_per_token"] / 2**20
        lines.append(f"| {name} | {weights:.1f} | {token:.3f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(_):
    checked_dtype(FLAGS.dtype)
    rows = {name: row(name, FLAGS.dtype, FLAGS.budget) for name in presets.CONFIGS}
    print(table(rows) + "\n")
    print(json.dumps(rows))


if __name__ == "__main__":
    command_line.run(main)
