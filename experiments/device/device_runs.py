"""The parts of `device_day.py` that run configs, with other sizes.

An interrupted run resumes from its last recorded batch (`kvjax.evaluation.run`).
"""

import contextlib
import importlib.util
import pathlib
import runpy
import subprocess
import sys
from collections.abc import Mapping

import jax
import numpy as np
from device_sizes import Absent, Asked, Comparison, Row, Sizes

from kvjax import load
from kvjax.engine import compiled, memory
from kvjax.evaluation import run
from kvjax.evaluation.report.records import Record
from kvjax.evaluation.setting import Baseline
from kvjax.evaluation.tasks import fidelity, text
from kvjax.models import decoder, presets
from kvjax.models.weights import hub, param_cache
from kvjax.types import ModelSpec

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "experiments"))

from baselines.throughput import joined

METHODS = {  # of a part, by the prefixes of their names
    "full cache": ("FKV", "ED"),
    "Batch-Max": ("Batch-Max",),
    "staggered": ("Staggered",),
}
SHOWN = {  # a record's field, and its heading on the page
    "method": "method",
    "prompt_tokens": "prompt",
    "new_tokens": "new",
    "budget": "|kv|",
    "batch_size": "batch",
    "limited_by": "limited by",
    "prefill_tokens_per_s": "prompt tokens/s",
    "decode_tokens_per_s": "decoded/s",
    "output_tokens_per_s": "new tokens/s in all",
    "prefill_roofline": "prefill of roofline",
    "decode_roofline": "decode of roofline",
    "stepped_back": "out of memory at",
}
BYTES = "planned", "measured", "memory"


def throughput(name: str, group: str, asked: Asked) -> list[Row]:
    """Measures the methods of a group at one memory limit."""
    comparison = asked.sizes.comparisons[name]
    fields = fields_of(comparison, group)
    fields["memory_gb"] = memory_gb(comparison, fields["memory_gb"])
    spec = presets.spec(fields["model"].removeprefix("random:"))
    check_room(spec, fields["dtype"], fields["memory_gb"])
    return shown(_run(fields, _folder(asked, f"{name} {group}")))


def fields_of(comparison: Comparison, group: str) -> Row:
    """Returns the config's fields with the changes and the methods of a group."""
    fields = _config(*comparison.config) | comparison.changes
    named = lambda each: each if isinstance(each, str) else each["name"]
    methods = (*fields["methods"], *comparison.more)
    fields["methods"] = tuple(m for m in methods if named(m).startswith(METHODS[group]))
    fields["num_examples"] = comparison.prompts[group != "full cache"]
    return fields


def memory_gb(comparison: Comparison, limit: float) -> float:
    """Returns the limit, or the whole device if the comparison allows less."""
    offered = memory.device_memory() // 10**8 / 10  # the same at every call
    if limit <= offered:
        return limit
    if comparison.or_less:
        return offered
    raise Absent(f"the device offers {offered:.3g} GB of the setting's {limit:g}")


def check_room(spec: ModelSpec, dtype: str, gb: float, pairs: int = 0) -> None:
    """Raises Absent if weights and KV pairs leave less than a tenth of the memory."""
    weights = compiled.tree_bytes(decoder.param_shapes(spec, dtype))
    if (taken := (weights + pairs) / 1e9) > 0.9 * gb:
        raise Absent(f"{spec.name} in {dtype} takes {taken:.3g} GB of {gb:.3g}")


def shown(records: list[Record]) -> list[Row]:
    """Returns the page's rows for the records of a throughput run."""
    rows = [{told: each.get(key) for key, told in SHOWN.items()} for each in records]
    for row, record in zip(rows, records, strict=True):
        sizes = {key: record.get(f"{key}_bytes") for key in BYTES}
        row |= {f"{key} GB": size and size / 1e9 for key, size in sizes.items()}
    return rows


def _config(path: str, *which: str) -> Row:
    """Returns the fields of a config of the repository."""
    return runpy.run_path(str(ROOT / path))["get_config"](*which).to_dict()


def _folder(asked: Asked, name: str) -> pathlib.Path:
    return asked.workdir / name.replace(",", "").replace(" ", "_")


def _run(
    fields: Row,
    folder: pathlib.Path,
    baselines: Mapping[str, Baseline] | None = None,
) -> list[Record]:
    say = lambda what, finished: print(what, file=sys.stderr, flush=True)
    return run.run(run.from_config(fields, {}), folder, say, baselines)


# --- a real model ---------------------------------------------------------------------

SMALL = "smollm2-135m-instruct"
PRECISIONS = {  # dtype, and JAX's matmul precision
    "float32, exact": ("float32", "highest"),
    "float32": ("float32", None),
    "bfloat16": ("bfloat16", None),
}


def real_model(asked: Asked) -> str:
    """Returns the model for `kvjax.load`: --gguf, or the name of a cached file.

    Raises:
      Absent: neither exists.
    """
    cached = param_cache.cache_dir() / hub.NAMED[SMALL].file
    if asked.gguf or cached.exists():
        return asked.gguf or SMALL
    raise Absent(f"{cached} is not there: give {SMALL}'s file with --gguf")


def precision(name: str, asked: Asked) -> list[Row]:
    """Counts needles found in one precision, and compares it with exact float32."""
    dtype, products = PRECISIONS[name]
    fields = precision_fields(asked.sizes, real_model(asked), dtype)
    exactly = jax.default_matmul_precision(products) if products else None
    with exactly or contextlib.nullcontext():
        records = _run(fields, _folder(asked, name))
    kept = [_folder(asked, each) / "reference.npy" for each in (*PRECISIONS, name)]
    apart = divergence(fields, kept[0], kept[-1])
    return [
        {
            "precision": name,
            "method": record["method"],
            "needles found": record["score"],
            "of": record["num_examples"],
            "nats/token to its full cache": record["kl"],
            **({} if record["policy"] else apart),
        }
        for record in records
    ]


def precision_fields(sizes: Sizes, model: str, dtype: str) -> Row:
    """Returns the quickstart's fields with some of its methods."""
    known = _config("configs/quickstart.py")
    fields = known | sizes.precision | {"model": model, "dtype": dtype}
    names = fields["methods"]
    fields["methods"] = tuple(m for m in known["methods"] if m["name"] in names)
    return fields


def divergence(fields: Row, exact: pathlib.Path, other: pathlib.Path) -> Row:
    """Compares the predictions of two full caches on the same texts.

    Args:
      fields: of the runs.
      exact, other: files of f32[windows, continuation, V].
    """
    if not exact.exists():
        raise Absent(f"{exact} is not there: exact float32 was not measured")
    asked, words = fields["fidelity"], text.haystack(fields["haystack"] or None)
    sizes = ("num_windows", "prompt_tokens", "continuation_tokens")
    tokenizer = load(fields["model"]).tokenizer
    given = (*(asked[key] for key in sizes), fields["seed"], words)
    windows = fidelity.windows(tokenizer, *given)
    targets = np.array([each.continuation for each in windows]).reshape(-1)
    logits = [np.load(path).reshape(len(targets), -1) for path in (exact, other)]
    found = fidelity.compare(*logits, targets)
    return {
        "nats/token to exact": found["kl"],
        "top-1 as exact": found["top1_agreement"],
    }


# --- other libraries ------------------------------------------------------------------

PACKAGES = "torch", "transformers", "gguf", "kvpress"


def rivals(asked: Asked) -> list[Row]:
    """Times transformers and kvpress with the prompts and memory of kvjax."""
    python = asked.baseline_python or sys.executable
    missing = lacking(python)
    if set(missing) - {"kvpress"}:
        raise Absent(
            f"{python} lacks {', '.join(missing)}: name another with --baseline_python"
        )
    dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    fields = rival_fields(asked.sizes, real_model(asked), dtype, missing)
    others = joined(python, fields["model"], dtype, fields["baselines"])
    rows = shown(_run(fields, _folder(asked, "rivals"), others))
    return [*rows, *({"method": f"{name} is not installed"} for name in missing)]


def rival_fields(sizes: Sizes, model: str, dtype: str, missing: list[str]) -> Row:
    """Returns the CPU comparison's fields, without presses if kvpress is missing."""
    fields = _config("configs/batch_max/smollm2_cpu.py") | sizes.rivals
    fields |= {"model": model, "dtype": dtype}
    if missing:
        fields["baselines"] = tuple(b for b in fields["baselines"] if not b["policy"])
    return fields


def lacking(python: str) -> list[str]:
    """Returns those of `PACKAGES` that an interpreter lacks."""
    if python == sys.executable:
        return [name for name in PACKAGES if not importlib.util.find_spec(name)]
    code = "import importlib.util, sys; print(*(n for n in sys.argv[1:] if not "
    code += "importlib.util.find_spec(n)))"
    asked = [python, "-c", code, *PACKAGES]
    try:
        return subprocess.check_output(asked, text=True).split()
    except (OSError, subprocess.CalledProcessError) as error:
        raise Absent(f"--baseline_python={python} does not run: {error}") from None
