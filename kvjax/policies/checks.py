"""Checks of a policy's functions before anything is compiled.

The functions are traced on shapes alone. The lengths of the axes B, C and T differ from
all others, so that a mixed-up axis shows; K, G, D and M are the model's, and some of
them may be equal.
"""

import functools
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array

from kvjax.policies.base import Policy
from kvjax.types import OBSERVABLE, Observation, PyTree, Stats, UserError, View

_AXES = {  # of the optional fields of an observation
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


def check_policy(policy: Policy, spec, capacity: int, in_decode: bool) -> None:
    """Raises UserError unless a policy's three functions fit each other.

    Traces them once for every distinct structure of the layers' weights, and once more
    with a small budget if the policy reads `View.budget`. Passed checks are cached.

    Args:
      policy: to check.
      spec: the model's shape, a `ModelSpec`.
      capacity: slots per head; increased if another axis has that length.
      in_decode: whether the policy observes generated tokens too.

    Raises:
      UserError: a function of the policy raises, reads a statistic that its
        `required_stats` does not name, or weights that it does not have; `init` returns
        no `Stats`, or leaves that do not lead with [B, K, C] or [B]; `observe` changes
        structure, shapes or dtypes of the stats; `score` returns anything but numbers
        [B, K, C], or calls `View.gather_heads` without `needs_all_heads`.
    """
    kinds = {}
    for layer, params in enumerate(policy.params.layers if policy.params else [None]):
        leaves, structure = jax.tree.flatten(params)
        shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves)
        kinds.setdefault((structure, shapes), layer)
    bare = policy._replace(params=None)  # so that the cache holds no weights
    for kind, layer in kinds.items():
        _check(bare, spec, capacity, in_decode, layer, *kind)


@functools.lru_cache(maxsize=256)
def _check(policy, spec, capacity, in_decode, layer, structure, shapes) -> None:
    params = jax.tree.unflatten(structure, shapes)
    trial = _Trial(policy, spec, capacity, layer, params)
    stats = trial.init(spec)
    trial.step(stats, in_decode)
    if trial.reads_budget:
        trial.budget = capacity
        trial.step(stats, in_decode)


class _Trial:
    """One traced policy, and what it read.

    Attributes:
      sizes: lengths of the axes, by their letters.
      undeclared: fields of the observation that it read without declaring them.
      gathers: whether it called `View.gather_heads`.
      reads_budget: whether it read `View.budget` or `View.mean_budget`.
      budget: of the view, far below the mean; None for an unknown one.
    """

    def __init__(self, policy: Policy, spec, capacity: int, layer: int, params: PyTree):
        self.policy, self.layer, self.params = policy, layer, params
        self.sizes = _sizes(spec, capacity)
        self.undeclared: set[str] = set()
        self.gathers = self.reads_budget = False
        self.budget: int | None = None

    def init(self, spec) -> Stats:
        """Returns the shapes of the policy's statistics, checked."""
        rows, slots = self.sizes["B"], self.sizes["C"]
        stats = self.traced("init", lambda: self.policy.init(spec, rows, slots))
        if not isinstance(stats, Stats):
            raise self.error(f"init gives {_shapes(stats)}: it has to give a Stats")
        for field, axes in (("per_slot", "BKC"), ("per_row", "B")):
            want = self.shape(axes)
            for leaf in jax.tree.leaves(getattr(stats, field)):
                if leaf.shape[: len(want)] != want:
                    raise self.error(
                        f"init gives {field} {_shapes(leaf)}: its arrays have to lead "
                        f"with [{', '.join(axes)}]"
                    )
        return stats

    def step(self, stats: Stats, in_decode: bool) -> None:
        """Raises UserError unless `observe` and `score` are right."""
        self.observe(stats, is_prefill=True)
        if in_decode:
            self.observe(stats, is_prefill=False)
        self.score(stats)

    def observe(self, stats: Stats, is_prefill: bool) -> None:
        """Raises UserError unless the stats keep structure, shapes and dtypes."""

        def run(stats, params):
            observation = self.observation(is_prefill)
            return self.policy.observe(stats, self.view(params), observation)

        after = self.traced("observe", run, stats, self.params)
        if _shapes(after) != _shapes(stats):
            if self.undeclared:
                raise self.undeclared_error()
            raise self.error(
                f"observe makes {_shapes(after)} of {_shapes(stats)}: structure, "
                "shapes and dtypes have to stay"
            )

    def score(self, stats: Stats) -> None:
        """Raises UserError unless `score` returns a number for every slot."""

        def run(stats, params):
            return self.policy.score(stats, self.view(params))

        self.undeclared.clear()
        self.gathers = False
        score = self.traced("score", run, stats, self.params)
        shape, dtype = (getattr(score, name, None) for name in ("shape", "dtype"))
        real = any(jnp.issubdtype(dtype, kind) for kind in (jnp.floating, jnp.integer))
        if shape != self.shape("BKC") or not real:
            raise self.error(
                f"score gives {_shapes(score)}: it has to give numbers [B, K, C]"
            )
        if self.gathers and not self.policy.needs_all_heads:
            raise self.error(
                "score calls view.gather_heads, for which the policy needs "
                "needs_all_heads=True"
            )

    def view(self, params: PyTree) -> View:
        trial = self

        class Watched(View):
            """Records that the size of a head is read."""

            def __getattribute__(self, name):
                trial.reads_budget |= name in ("budget", "mean_budget")
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
        """Returns what the policy declared, for a block of tokens or for one token."""
        undeclared = self.undeclared

        class Watched(Observation):
            """Records reads of fields that the policy has not declared."""

            def __getattribute__(self, name):
                value = super().__getattribute__(name)
                if value is None and name in OBSERVABLE:
                    undeclared.add(name)
                return value

        count = {} if is_prefill else {"T": 1}

        def zeros(name, axes) -> Array:
            whole = name in ("num_tokens", "positions", "tokens")
            shape = self.shape(axes, **count)
            return jnp.zeros(shape, jnp.int32 if whole else jnp.float32)

        always = {"num_tokens": "B", "positions": "BT"}
        declared = {name: _AXES[name] for name in self.policy.required_stats}
        arrays = {name: zeros(name, axes) for name, axes in (always | declared).items()}
        return Watched(is_prefill=is_prefill, **arrays)

    def shape(self, axes: str, **others: int) -> tuple[int, ...]:
        return tuple((self.sizes | others)[axis] for axis in axes)

    def traced(self, step: str, run: Callable, *args: PyTree) -> PyTree:
        """Returns the shapes of a function's result; UserError if it raises."""
        try:
            return jax.eval_shape(run, *args)
        except UserError:
            raise
        except Exception as error:  # of any kind: the policy is a user's code
            if self.undeclared:
                raise self.undeclared_error() from error
            reason = str(error).strip().partition("\n")[0]
            if self.params is None and "None" in reason:
                reason += (
                    "; if it reads view.params, policies.with_params gives weights"
                )
            kind = type(error).__name__
            raise self.error(f"{step} raises {kind}: {reason}") from error

    def undeclared_error(self) -> UserError:
        names = ", ".join(sorted(self.undeclared))
        return self.error(f"observe reads {names}: name it in required_stats")

    def error(self, what: str) -> UserError:
        sizes = ", ".join(f"{axis}={size}" for axis, size in self.sizes.items())
        return UserError(f"policy {self.policy.name!r}: {what} (tried with {sizes})")


def _sizes(spec, capacity: int) -> dict[str, int]:
    """Returns the lengths of the axes; those of B, C and T differ from all others."""
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


def _shapes(tree: PyTree) -> str:
    """Returns the dtypes and shapes of a pytree's arrays, as text."""

    def leaf(x) -> str:
        return f"{x.dtype}[{','.join(map(str, x.shape))}]"

    return str(jax.tree.map(leaf, tree)).replace("'", "")
