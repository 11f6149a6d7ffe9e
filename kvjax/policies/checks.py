"""What is wrong with a rule, told before anything is compiled.

A rule's functions are traced on arrays that have shapes and hold nothing. Rows, slots
and tokens come in numbers that no other axis has, so that none stands in for another;
K, G, D and M are the model's, of which some may be equal.
"""

import functools
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array

from kvjax.policies.base import Policy
from kvjax.types import OBSERVABLE, Observation, PyTree, Stats, UserError, View

_AXES = {  # of what an observation may hold
    "attn_sum": "BKC",
    "attn_sq_sum": "BKC",
    "last_attn": "BKC",
    "attn_weights": "BKGTC",
    "queries": "BKGTD",
    "pre_rope_queries": "BKGTD",
    "output_norm": "BKT",
    "tokens": "BT",
    "hidden": "BTM",
}


def check_rule(policy: Policy, spec, capacity: int, in_decode: bool) -> None:
    """Raises UserError unless a rule's three functions go together.

    Traces them once for each kind of weights that the layers have, and once more as of
    a small head where the rule asks how many pairs a head may hold; what was found
    right is remembered.

    Args:
      policy: the rule.
      spec: the model's shape, a `ModelSpec`.
      capacity: slots per head; more, if that is the length of another axis.
      in_decode: whether it observes generated tokens too.

    Raises:
      UserError: a function of the rule raises, reads what its `required_stats` do not
        name, or weights that it does not have; `init` gives no `Stats`, or leaves that
        do not lead with [B, K, C] or [B]; `observe` changes structure, shapes or dtypes
        of the stats; `score` gives anything but numbers [B, K, C], or looks across
        heads without `needs_all_heads`.
    """
    kinds = {}
    for layer, params in enumerate(policy.params.layers if policy.params else [None]):
        leaves, structure = jax.tree.flatten(params)
        shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves)
        kinds.setdefault((structure, shapes), layer)
    bare = policy._replace(params=None)  # what is remembered must not hold weights
    for kind, layer in kinds.items():
        _check(bare, spec, capacity, in_decode, layer, *kind)


@functools.lru_cache(maxsize=256)
def _check(policy, spec, capacity, in_decode, layer, structure, shapes) -> None:
    params = jax.tree.unflatten(structure, shapes)
    trial = _Trial(policy, spec, capacity, layer, params)
    stats = trial.init(spec)
    trial.step(stats, in_decode)
    if trial.asks_budget:
        trial.budget = capacity
        trial.step(stats, in_decode)


class _Trial:
    """One rule, and what it did while it was traced.

    Attributes:
      sizes: lengths of the axes, by their letters.
      missed: fields of the observation that it read and had not asked for.
      gathers: whether it asked for the other heads.
      asks_budget: whether it asked how many pairs a head may hold.
      budget: the answer, far below the mean; None where nobody says.
    """

    def __init__(self, policy: Policy, spec, capacity: int, layer: int, params: PyTree):
        self.policy, self.layer, self.params = policy, layer, params
        self.sizes = _sizes(spec, capacity)
        self.missed: set[str] = set()
        self.gathers = self.asks_budget = False
        self.budget: int | None = None

    def init(self, spec) -> Stats:
        """Shapes of what the rule remembers, each with its axes in front."""
        rows, slots = self.sizes["B"], self.sizes["C"]
        stats = self.traced("init", lambda: self.policy.init(spec, rows, slots))
        if not isinstance(stats, Stats):
            raise self.error(f"init gives {_told(stats)}: it has to give a Stats")
        for field, axes in (("per_slot", "BKC"), ("per_row", "B")):
            want = self.shape(axes)
            for leaf in jax.tree.leaves(getattr(stats, field)):
                if leaf.shape[: len(want)] != want:
                    raise self.error(
                        f"init gives {field} {_told(leaf)}: its arrays have to lead "
                        f"with [{', '.join(axes)}]"
                    )
        return stats

    def step(self, stats: Stats, in_decode: bool) -> None:
        """Raises UserError unless the rule observes and scores as it has to."""
        self.observe(stats, is_prefill=True)
        if in_decode:
            self.observe(stats, is_prefill=False)
        self.score(stats)

    def observe(self, stats: Stats, is_prefill: bool) -> None:
        """Raises UserError unless the stats stay what they are."""

        def run(stats, params):
            seen = self.observation(is_prefill)
            return self.policy.observe(stats, self.view(params), seen)

        after = self.traced("observe", run, stats, self.params)
        if _told(after) != _told(stats):
            if self.missed:
                raise self.unasked()
            raise self.error(
                f"observe makes {_told(after)} of {_told(stats)}: structure, shapes "
                "and dtypes have to stay"
            )

    def score(self, stats: Stats) -> None:
        """Raises UserError unless every slot gets a number."""

        def run(stats, params):
            return self.policy.score(stats, self.view(params))

        self.missed.clear()
        self.gathers = False
        score = self.traced("score", run, stats, self.params)
        shape, dtype = (getattr(score, name, None) for name in ("shape", "dtype"))
        real = any(jnp.issubdtype(dtype, kind) for kind in (jnp.floating, jnp.integer))
        if shape != self.shape("BKC") or not real:
            raise self.error(
                f"score gives {_told(score)}: it has to give numbers [B, K, C]"
            )
        if self.gathers and not self.policy.needs_all_heads:
            raise self.error(
                "score calls view.gather_heads, for which the policy needs "
                "needs_all_heads=True"
            )

    def view(self, params: PyTree) -> View:
        trial = self

        class Watched(View):
            """Notes when the size of a head is read."""

            def __getattribute__(self, name):
                trial.asks_budget |= name in ("budget", "mean_budget")
                return super().__getattribute__(name)

        def gather_heads(x):
            self.gathers = True
            return x

        def pairs():
            return jnp.zeros(self.shape("BKCD"), jnp.float32)

        return Watched(
            *(jnp.zeros(self.shape(axes), jnp.int32) for axes in ("BKC", "B", "BK")),
            keys=pairs,
            values=pairs,
            apply_rope=lambda x, positions: x,
            layer=self.layer,
            params=params,
            gather_heads=gather_heads,
            budget=self.budget,
            mean_budget=self.budget and 16.0 * self.budget,
        )

    def observation(self, is_prefill: bool) -> Observation:
        """What the rule asked for, of a block of tokens or of one."""
        missed = self.missed

        class Watched(Observation):
            """Notes when something is read that nobody has asked for."""

            def __getattribute__(self, name):
                value = super().__getattribute__(name)
                if value is None and name in OBSERVABLE:
                    missed.add(name)
                return value

        count = {} if is_prefill else {"T": 1}

        def zeros(name, axes) -> Array:
            whole = name in ("num_tokens", "positions", "tokens")
            shape = self.shape(axes, **count)
            return jnp.zeros(shape, jnp.int32 if whole else jnp.float32)

        always = {"num_tokens": "B", "positions": "BT"}
        wanted = {name: _AXES[name] for name in self.policy.required_stats}
        arrays = {name: zeros(name, axes) for name, axes in (always | wanted).items()}
        return Watched(is_prefill=is_prefill, **arrays)

    def shape(self, axes: str, **others: int) -> tuple[int, ...]:
        return tuple((self.sizes | others)[axis] for axis in axes)

    def traced(self, step: str, run: Callable, *given: PyTree) -> PyTree:
        """Shapes of what a function of the rule gives; what it raises, as one line."""
        try:
            return jax.eval_shape(run, *given)
        except UserError:
            raise
        except Exception as error:  # of any kind: the rule is somebody else's
            if self.missed:
                raise self.unasked() from error
            told = str(error).strip().partition("\n")[0]
            if self.params is None and "None" in told:
                told += "; if it reads view.params, policies.with_params gives weights"
            raise self.error(f"{step} raises {type(error).__name__}: {told}") from error

    def unasked(self) -> UserError:
        names = ", ".join(sorted(self.missed))
        return self.error(f"observe reads {names}: name it in required_stats")

    def error(self, what: str) -> UserError:
        sizes = ", ".join(f"{axis}={size}" for axis, size in self.sizes.items())
        return UserError(f"policy {self.policy.name!r}: {what} (tried with {sizes})")


def _sizes(spec, capacity: int) -> dict[str, int]:
    """Lengths of the axes: the model's, and others that none of them has."""
    sizes = {
        "K": spec.num_kv_heads,
        "G": spec.queries_per_kv_head,
        "D": spec.head_dim,
        "M": spec.model_dim,
    }
    for axis, least in (("C", capacity), ("B", 2), ("T", 2)):
        taken = set(sizes.values())
        sizes[axis] = next(n for n in itertools.count(least) if n not in taken)
    return {axis: sizes[axis] for axis in "BKGCTDM"}


def _told(tree: PyTree) -> str:
    """A pytree of arrays by their dtypes and shapes."""

    def leaf(x) -> str:
        return f"{x.dtype}[{','.join(map(str, x.shape))}]"

    return str(jax.tree.map(leaf, tree)).replace("'", "")
