"""The table of attention backends, and the choice among them.

    reference     plain jax.numpy, on every platform
    tiles         the same in pieces that fit a CPU's cache; for prompts and coded pairs
    xla, cudnn    `jax.nn.dot_product_attention`: no statistics
    pallas_tpu    one pass over the KV pairs, which also sums the statistics
    pallas_gpu    the same for Hopper GPUs

`pallas_tpu_interpret` and `pallas_gpu_interpret` run a kernel on any machine, slowly.
`register` adds one more.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jaxtyping import Array

from kvjax.attention import kernels, library, reference
from kvjax.attention.reference import PLAIN
from kvjax.attention.stored import Pairs, Stored
from kvjax.messages import warn
from kvjax.pallas.common import device, not_hopper
from kvjax.registry import Registry
from kvjax.tracing import run_aside
from kvjax.types import Observation, Partial, Scoring, UserError

BY_NAME = 0  # priority of a backend that runs only when asked for by name


class Backend(NamedTuple):
    """An implementation of attention, with the conditions under which it runs.

    Attributes:
      name: its name in configs and calls.
      attend: (q, k, v, pos, q_pos, n, stats, scoring) -> attention and observation, as
        `kvjax.attention.attend` has them; `stats` are some of `ATTENTION_STATS`, and k
        and v may be `kvjax.attention.stored.Stored`.
      attention_stats: (q, k, pos, q_pos, n, whole, stats, scoring) -> observation, as
        `kvjax.attention.attention_stats`.
      write_attend: (q, new_k, new_v, slot, k, v, pos, q_pos, n, stats, scoring) ->
        attention, observation, k, v, as `kvjax.attention.write_attend`; None if the
        layout has to write first.
      write_grain: keys or values -> the divisor that the number of slots must have for
        `write_attend`; None if it cannot write them as they are stored.
      platform: the only platform it runs on: tpu, gpu or cpu; None for any.
      device_reason: device kind -> why it cannot run on this kind of its platform, or
        None. Reported once per process, when another backend runs instead.
      unsupported_reason: (q, k, stats, scoring) -> why it cannot take them, or None.
        Depends only on shapes, dtypes and the device, so it works while tracing.
      priority: (q, k) -> rank when the caller names no backend: the highest that can
        run is chosen, never one of rank `BY_NAME`.
      self_test: (head dim, the keys' `TensorCodec` or None) -> description of its error
        on this device, or None. Runs once per process, before the backend is chosen
        without being named.
    """

    name: str
    attend: Callable[..., tuple[Partial, Observation]]
    attention_stats: Callable[..., Observation] = reference.attention_stats
    write_attend: Callable[..., tuple] | None = None
    write_grain: Callable[[Pairs], int | None] = lambda pairs: 1
    platform: str | None = None
    device_reason: Callable[[str], str | None] = lambda kind: None
    unsupported_reason: Callable[
        [Array, Array, frozenset[str], Scoring], str | None
    ] = lambda *_: None
    priority: Callable[[Array, Pairs], int] = lambda q, k: BY_NAME
    self_test: Callable[[int, Any], str | None] = lambda *_: None


BACKENDS = Registry("attention implementation")


def register(backend: Backend) -> Backend:
    """Adds a backend to the table under its name, and returns it.

    Raises:
      UserError: the name is taken, or contains a colon.
    """
    BACKENDS.register(backend.name, lambda: backend)
    return backend


def check_name(implementation: str | None) -> None:
    """Raises UserError if no backend has this name."""
    if implementation is not None:
        BACKENDS.factory(implementation)


def select_backend(
    q: Array,
    k: Pairs,
    stats: frozenset[str],
    implementation: str | None,
    scoring: Scoring = PLAIN,
) -> Backend:
    """Returns the backend for queries `q` and keys `k`.

    Depends only on shapes, dtypes and the device, so it works while tracing.

    Args:
      q: [B, K, G, T, D].
      k: [B, K, C, D].
      stats: statistics that attention must return.
      implementation: a backend's name, or None for the fastest that can run.
      scoring: soft cap and sliding window.

    Raises:
      UserError: the named backend is unknown or cannot run; the message says why.
    """
    if implementation is None:
        return next(
            backend
            for backend in _by_priority(q, k)
            if _runs_here(backend)
            and not backend.unsupported_reason(q, k, stats, scoring)
            and _works(backend, k)
        )
    backend = BACKENDS.make(implementation)
    if reason := _unsupported(backend, q, k, stats, scoring):
        raise UserError(
            f"attention implementation {implementation!r} cannot run: {reason}; None "
            "chooses one that does"
        )
    return backend


def _by_priority(q: Array, k: Pairs) -> list[Backend]:
    """Lists the backends that need not be named, fastest for these arrays first."""
    every = [BACKENDS.make(name) for name in BACKENDS.names()]
    priority = lambda backend: backend.priority(q, k)
    return sorted(filter(priority, every), key=priority, reverse=True)


def _unsupported(
    backend: Backend, q: Array, k: Array, stats: frozenset[str], scoring: Scoring
) -> str | None:
    """Returns why a backend cannot run, or None."""
    platform, here = backend.platform, device()
    if platform and here.platform != platform:
        return f"it needs a {platform.upper()}, and this is a {here.platform.upper()}"
    return backend.device_reason(here.kind) or backend.unsupported_reason(
        q, k, stats, scoring
    )


def _runs_here(backend: Backend) -> bool:
    """Returns whether a backend runs on this device; warns if its kind cannot."""
    platform, kind = device()
    if backend.platform not in (None, platform):
        return False
    reason = backend.device_reason(kind)
    if reason:
        _warn_once(backend.name, reason)
    return not reason


@functools.cache
def _warn_once(name: str, reason: str) -> None:
    warn(
        f"attention implementation {name!r} cannot run: {reason}; plain XLA runs "
        "instead",
    )


def _works(backend: Backend, k: Pairs) -> bool:
    """Returns whether a backend passes its self-test on this device.

    A new compiler or device may cost speed, but must not fail a run. Ahead-of-time
    compilation for an absent device skips the test, which has nowhere to run.
    """
    ahead_of_time = bool(jax.sharding.get_abstract_mesh().abstract_device)
    return ahead_of_time or _passes_self_test(backend, k.shape[3], _codec_of_codes(k))


def _codec_of_codes(k: Pairs) -> Any:
    """Returns the codec whose codes kernels can read; None for decoded pairs."""
    pairs = k.inner if isinstance(k, Stored) else None
    return pairs.codec if pairs and pairs.codes is not None else None


@functools.cache
def _passes_self_test(backend: Backend, head_dim: int, codec: Any) -> bool:
    try:
        failure = run_aside(lambda: backend.self_test(head_dim, codec))
    except Exception as error:  # compilers raise many types
        failure = f"{type(error).__name__}: {error}".splitlines()[0]
    if failure:
        warn(
            f"attention implementation {backend.name!r} does not work on "
            f"{jax.devices()[0].device_kind} with head dim {head_dim}"
            f"{f' and keys in {codec.name}' if codec else ''} ({failure}): another one "
            "runs instead",
        )
    return not failure


def _tiles_first(q: Array, k: Pairs) -> int:
    """Prefers tiles on a CPU, for prompts and for pairs that must be decoded."""
    pieces = q.shape[3] > 1 or isinstance(k, Stored)
    return 2 * (device().platform == "cpu" and pieces)


_TPU = kernels.Kernels("kvjax.pallas.tpu", writes=True)
_GPU = kernels.Kernels("kvjax.pallas.gpu")

for _backend in (
    Backend("reference", reference.attend, priority=lambda q, k: 1),
    Backend(
        "tiles",
        reference.attend_in_tiles,
        priority=_tiles_first,
    ),
    Backend("xla", **library.functions("xla")),
    Backend("cudnn", platform="gpu", **library.functions("cudnn")),
    Backend("pallas_tpu", platform="tpu", priority=lambda q, k: 3, **_TPU.functions()),
    Backend(
        "pallas_gpu",
        platform="gpu",
        device_reason=not_hopper,
        priority=lambda q, k: 3,
        **_GPU.functions(),
    ),
    Backend("pallas_tpu_interpret", **_TPU.interpreted().functions()),
    Backend("pallas_gpu_interpret", **_GPU.interpreted().functions()),
):
    register(_backend)
