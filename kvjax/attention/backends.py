"""Which attention runs: the choice among the reference, our kernels and JAX's own.

    reference     plain jax.numpy, on every backend
    tiles         the same in pieces that a CPU's cache holds; for prompts
    pallas_tpu    one pass over the pairs, scores added up on the way (kvjax.pallas.tpu)
    pallas_gpu    the same for Hopper GPUs (kvjax.pallas.gpu)
    xla, cudnn    `jax.nn.dot_product_attention`: no statistics

`pallas_tpu_interpret` and `pallas_gpu_interpret` run a kernel on any machine, slowly.
"""

import functools
import importlib
import warnings
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from kvjax.pallas.common import device
from kvjax.types import Scoring, UserError

KERNELS = {"pallas_tpu": "kvjax.pallas.tpu", "pallas_gpu": "kvjax.pallas.gpu"}
PLATFORMS = {"pallas_tpu": "tpu", "pallas_gpu": "gpu", "cudnn": "gpu"}
LIBRARY = ("xla", "cudnn")
# Those whose decode kernel writes the new pair: on TPU, where XLA's own write at a slot
# that it does not know may copy the cache.
WRITERS = ("pallas_tpu", "pallas_tpu_interpret")
INTERPRETED = tuple(name + "_interpret" for name in KERNELS)
PLAIN = Scoring()
PORTABLE = ("reference", "tiles")
NAMES = (*PORTABLE, *KERNELS, *LIBRARY, *INTERPRETED)


def select_backend(
    q: Array,
    k: Array,
    needs: frozenset[str],
    implementation: str | None,
    scoring: Scoring = PLAIN,
) -> str:
    """The implementation that attends with queries `q` over keys `k`.

    Decided from shapes, dtypes and the device alone, so it may be asked while tracing.

    Args:
      q: [B, K, G, T, D].
      k: [B, K, C, D].
      needs: statistics that attention has to hand over.
      implementation: a name of this module, or None for the best that runs here.
      scoring: what happens to the products.

    Raises:
      UserError: a name that is unknown or cannot run; the message says why.
    """
    if implementation is None:
        reason = functools.partial(_reason, q=q, k=k, needs=needs, scoring=scoring)
        best = (name for name in KERNELS if reason(name) is None)
        return next((name for name in best if self_test(name)), _portable(q))
    check_name(implementation)
    reason = _reason(implementation, q, k, needs, scoring)
    if reason:
        raise UserError(
            f"attention implementation {implementation!r} cannot run: {reason}; None "
            "chooses one that does"
        )
    return implementation


def _portable(q: Array) -> str:
    """Of what runs everywhere, the faster for these queries."""
    return "tiles" if device().platform == "cpu" and q.shape[3] > 1 else "reference"


def check_name(implementation: str | None) -> None:
    """Raises UserError for a name that is no implementation's."""
    if implementation is not None and implementation not in NAMES:
        raise UserError(
            f"attention implementation {implementation!r} is unknown: use None or one "
            f"of {', '.join(NAMES)}"
        )


def kernel(name: str) -> tuple[ModuleType, bool]:
    """The kernels behind a name, and whether they are interpreted.

    Their compilers are imported where they are needed, and only there.
    """
    plain = name.removesuffix("_interpret")
    return importlib.import_module(KERNELS[plain]), plain != name


def _reason(
    name: str, q: Array, k: Array, needs: frozenset[str], scoring: Scoring
) -> str | None:
    """Why an implementation cannot run, or None."""
    if name in PORTABLE:
        return None
    if scoring != PLAIN and not name.startswith("pallas_tpu"):
        return f"it neither caps scores nor limits their reach ({scoring})"
    if name in LIBRARY and needs:
        return f"it hands over no statistics, and {sorted(needs)} are needed"
    if "attn_weights" in needs:
        return "no fused kernel hands over all the weights"
    wanted, here = PLATFORMS.get(name), device().platform
    if wanted and here != wanted:
        return f"it needs a {wanted.upper()}, and this is a {here.upper()}"
    if name in LIBRARY:
        return None
    module, interpret = kernel(name)
    return module.unsupported_reason(q, k, needs, None if interpret else device().kind)


@functools.cache
def self_test(name: str) -> bool:
    """Whether a kernel gives the right answer here, on a small case, once a process.

    A new compiler or device must cost speed, never a run. Where the program is for a
    device that is not there, nothing can be tried.
    """
    if jax.sharding.get_abstract_mesh().abstract_device:
        return True
    try:
        with jax.ensure_compile_time_eval():
            module = kernel(name)[0]
            worst = max(_error(module, length) for length in (1, 24))
            if name in WRITERS:
                worst = max(worst, _write_error(module))
    except Exception as error:  # whatever a compiler may say
        worst = str(error).splitlines()[0]
    if isinstance(worst, float) and worst < 0.05:
        return True
    warnings.warn(
        f"attention implementation {name!r} does not work on "
        f"{jax.devices()[0].device_kind} ({worst}): the reference runs instead",
        stacklevel=2,
    )
    return False


def _error(module: ModuleType, length: int) -> float:
    """The largest difference from NumPy's output and weights, in bfloat16.

    The slots are no whole number of tiles, and the empty ones hold NaN.
    """
    slots, depth, last = 328, 128, 299  # of them 300 are live
    draw = np.random.default_rng(0).normal
    array = lambda *shape: np.array(jnp.asarray(draw(size=shape), jnp.bfloat16))
    q, k, v = array(2, 4, length, depth), array(2, slots, depth), array(2, slots, depth)
    pos = np.where(np.arange(slots) <= last, np.arange(slots), -1)
    q_pos = last - np.arange(length)[::-1]
    seen = (pos >= 0) & (pos <= q_pos[:, None])
    exact = [x.astype(np.float64) for x in (q, k, v)]
    weights = np.einsum("kgtd,kcd->kgtc", *exact[:2]) / np.sqrt(depth)
    weights = np.where(seen, np.exp(weights), 0)
    weights /= weights.sum(-1, keepdims=True)
    k[:, last + 1 :], v[:, last + 1 :] = np.nan, np.nan
    row = lambda x: jnp.asarray(x)[None]
    got = module.attend(
        *(row(q), row(k), row(v)),
        row(np.broadcast_to(pos, (2, slots)).astype(np.int32)),
        row(q_pos.astype(np.int32)),
        jnp.full((1,), length, jnp.int32),
        stats=frozenset({"attn_sum"}),
    )
    out = np.asarray(got.out / got.denominator[..., None], np.float64)[0]
    wrong = out - np.einsum("kgtc,kcd->kgtd", weights, exact[2])
    missed = np.asarray(got.attn_sum, np.float64)[0] - weights.mean(1).sum(1)
    return float(max(np.max(np.abs(wrong)), np.max(np.abs(missed))))


def _write_error(module: ModuleType) -> float:
    """How far the caches are from what they should be after a fused write."""
    draw = np.random.default_rng(1).normal
    array = lambda *shape: jnp.asarray(draw(size=shape), jnp.bfloat16)
    k, v, new_k, new_v = (
        array(1, 2, 128, 128),
        array(1, 2, 128, 128),
        *array(2, 1, 2, 128),
    )
    one, zeros = jnp.ones((1,), jnp.int32), jnp.zeros((1, 2, 128), jnp.int32)
    slot = jnp.asarray([[37, 128]], jnp.int32)  # the second head's goes nowhere
    q = array(1, 2, 4, 1, 128)
    _, *found = module.write_attend(
        q, new_k, new_v, slot, k, v, zeros, one[:, None], one
    )[:3]
    wanted = k.at[0, 0, 37].set(new_k[0, 0]), v.at[0, 0, 37].set(new_v[0, 0])
    gap = lambda a, b: np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64))
    return float(max(gap(a, b).max() for a, b in zip(found, wanted, strict=True)))
