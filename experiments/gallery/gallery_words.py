"""Parses policies' docstrings for the gallery, and works out what a policy costs."""

import inspect
import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kvjax import policies
from kvjax.engine import compiled
from kvjax.types import View


class Doc(NamedTuple):
    """The parts of a docstring, each empty if absent.

    Attributes:
      summary: the first paragraph.
      formula: the first indented block.
      text: the other paragraphs before the sections.
      args: what each parameter means.
      needs, source, raises: those sections.
    """

    summary: str
    formula: str
    text: tuple[str, ...]
    args: dict[str, str]
    needs: str
    source: str
    raises: str


def parse(doc: str) -> Doc:
    """Parses a docstring."""
    sections = {"": []}
    name = ""
    for line in inspect.cleandoc(doc).splitlines():
        head = re.match(r"(Args|Needs|Source|Raises):\s*(.*)", line)
        if head:
            name, line = head.groups()
            sections[name] = []
        sections[name].append(line)
    blocks = re.split(r"\n\s*\n", "\n".join(sections.pop("")).strip())
    indented = [block for block in blocks[1:] if block.startswith("    ")]
    joined = {name: _joined("\n".join(lines)) for name, lines in sections.items()}
    return Doc(
        summary=_joined(blocks[0]),
        formula=textwrap.dedent(indented[0]) if indented else "",
        text=tuple(_joined(block) for block in blocks[1:] if block not in indented),
        args=_args(sections.get("Args", [])),
        needs=joined.get("Needs", ""),
        source=joined.get("Source", ""),
        raises=joined.get("Raises", ""),
    )


def _args(lines: Iterable[str]) -> dict[str, str]:
    found, names = {}, ()
    for line in lines:
        entry = re.match(r"  (\w[\w, *]*): (.*)", line)
        if entry:
            names, line = entry[1].split(", "), entry[2]
        for name in names:
            found[name] = f"{found.get(name, '')} {line.strip()}".strip()
    return found


def _joined(block: str) -> str:
    return " ".join(block.split())


def doc_of(name: str) -> Doc:
    """Returns the parsed docstring of a policy's or combinator's factory."""
    return parse(inspect.getdoc(getattr(policies, name)) or "")


def defaults(name: str) -> dict[str, Any]:
    """Returns the default of each parameter, or `inspect.Parameter.empty`."""
    signature = inspect.signature(getattr(policies, name))
    return {key: each.default for key, each in signature.parameters.items()}


# ----------------------------------------------------------------------------- costs

COSTS = {
    "positions": "free: positions only",
    "pairs": "reads keys or values at each eviction",
    "sums": "column sums of attention",
    "row": "one row of attention per call",
    "queries": "stores queries, computes scores at eviction",
    "weights": "all attention weights: no fused kernel",
}


class Cost(NamedTuple):
    """The cost of a policy.

    Attributes:
      kind: a key of `COSTS`.
      reads: which of "keys" and "values" its score reads.
      pair_bytes: bytes of statistics per KV pair.
      row_bytes: bytes of statistics per row and layer.
    """

    kind: str
    reads: tuple[str, ...]
    pair_bytes: int
    row_bytes: int


class Shape(NamedTuple):
    """The fields of a model's shape that policies use; by default SmolLM2-135M's."""

    num_kv_heads: int = 3
    queries_per_kv_head: int = 3
    head_dim: int = 64


def cost_of(policy: policies.Policy, spec: Any, slots: int = 384) -> Cost:
    """Returns a policy's cost, found by tracing its functions without computing."""
    heads, reads = spec.num_kv_heads, []
    stats = jax.eval_shape(lambda: policy.init(spec, 1, slots))

    def read(what: str) -> jax.Array:
        reads.append(what)
        return jnp.zeros((1, heads, slots, spec.head_dim))

    def score(stats, pos, now, keep):
        view = View(
            positions=pos,
            query_position=now,
            num_keep=keep,
            keys=lambda: read("keys"),
            values=lambda: read("values"),
            apply_rope=lambda x, positions: x,
        )
        return policy.score(stats, view)

    whole = jax.ShapeDtypeStruct((1, heads, slots), jnp.int32)
    now = jax.ShapeDtypeStruct((1,), jnp.int32)
    keep = jax.ShapeDtypeStruct((1, heads), jnp.int32)
    jax.eval_shape(score, stats, whole, now, keep)
    return Cost(
        kind=_kind(policy.required_stats, reads),
        reads=tuple(sorted(set(reads))),
        pair_bytes=compiled.tree_bytes(stats.per_slot) // (heads * slots),
        row_bytes=compiled.tree_bytes(stats.per_row),
    )


def _kind(required_stats: frozenset[str], reads: Sequence[str]) -> str:
    if "attn_weights" in required_stats:
        return "weights"
    if required_stats & {"queries", "pre_rope_queries"}:
        return "queries"
    if "last_attn" in required_stats:
        return "row"
    if required_stats:
        return "sums"
    return "pairs" if reads else "positions"


def by_cost(spec: Any) -> list[str]:
    """Returns the names of all policies, ordered by the class of their cost."""
    order = list(COSTS)
    kinds = {name: cost_of(policies.make(name), spec).kind for name in policies.names()}
    return sorted(kinds, key=lambda name: (order.index(kinds[name]), name))


def padding_table(records: Sequence[dict[str, Any]], labels: dict[str, str]) -> str:
    """Returns records of padding in two libraries as a Markdown table.

    A line per policy. Where kvpress' figure depends on the padding token, the cell has
    one figure per token, in the order of the header.
    """
    pads = dict.fromkeys(r["pad"].strip("<|>") for r in records if "pad" in r)
    header = ["Policy"]
    for figure in (
        "Padding among the kept",
        "Kept as alone",
        "Rows that write as alone",
    ):
        header += [f"{figure}: kvpress, {' / '.join(pads)}", "kvjax"]
    lines = [header, ["---", *["--:"] * (len(header) - 1)]]
    for name in dict.fromkeys(record["policy"] for record in records):
        cells = [labels[name]]
        for key in ("pads_kept_share", "agreement", "same_tokens"):
            for library in ("kvpress", "kvjax"):
                found = [
                    f"{record[key]} of {record['rows']}"
                    if key == "same_tokens"
                    else _percent(record[key])
                    for record in records
                    if (record["policy"], record["library"]) == (name, library)
                ]
                cells.append(" / ".join(dict.fromkeys(found)))
        lines.append(cells)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _percent(share: float) -> str:
    """Returns a percentage that is 0% or 100% only where the share is exactly so."""
    return f"{share:.0%}" if share in (0, 1) else f"{min(max(share, 0.01), 0.99):.0%}"


# ---------------------------------------------------------------------- kvjax
