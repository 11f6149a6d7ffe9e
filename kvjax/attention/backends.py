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

from kvjax.attention import kernels, library, reference
from kvjax.attention.inputs import AttentionSpec, Pairs, Queries, Unsupported
from kvjax.attention.stored import Stored, Tensor
from kvjax.messages import warn
from kvjax.pallas.common import device
from kvjax.registry import Registry
from kvjax.tracing import run_aside
from kvjax.types import Observation, Partial, UserError

BY_NAME = 0  # priority of a backend that runs only when asked for by name


class Backend(NamedTuple):
    """An implementation of attention, with the conditions under which it runs.

    Attributes:
      name: its name in configs and calls.
      attend: (queries, pairs, spec) -> attention and observation, as
        `kvjax.attention.attend` has them; `spec.stats` are some of `ATTENTION_STATS`,
        and keys and values may be `kvjax.attention.stored.Stored`.
      attention_stats: (queries, pairs, whole, spec) -> observation, as
        `kvjax.attention.attention_stats`; `pairs.v` is None.
      write_attend: (queries, pairs, new_k, new_v, slot, spec) -> attention,
        observation, k, v, as `kvjax.attention.write_attend`; None if the layout has
        to write first.
      write_grain: keys or values -> the divisor that the number of slots must have for
        `write_attend`; None if it cannot write them as they are stored.
      platform: the only platform it runs on: tpu, gpu or cpu; None for any.
      check: (queries, pairs, spec) -> None; raises `Unsupported` where it cannot take
        them. Depends only on shapes, dtypes and the device, so it works while tracing.
      priority: (queries, pairs) -> rank when the caller names no backend: the highest
        that can run is chosen, never one of rank `BY_NAME`.
      self_test: (head dim, the keys' `TensorCodec` or None) -> description of its error
        on this device, or None. Runs once per process, before the backend is chosen
        without being named.
    """

    name: str
    attend: Callable[..., tuple[Partial, Observation]]
    attention_stats: Callable[..., Observation] = reference.attention_stats
    write_attend: Callable[..., tuple] | None = None
    write_grain: Callable[[Tensor], int | None] = lambda tensor: 1
    platform: str | None = None
    check: Callable[[Queries, Pairs, AttentionSpec], None] = lambda *_: None
    priority: Callable[[Queries, Pairs], int] = lambda *_: BY_NAME
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


def select_backend(queries: Queries, pairs: Pairs, spec: AttentionSpec) -> Backend:
    """Returns the backend that attends: the one named, or the fastest that can run.

    Depends only on shapes, dtypes and the device, so it works while tracing.

    Raises:
      UserError: the named backend is unknown or cannot run; the message says why.
    """
    name = spec.implementation
    if name is None:
        return next(
            backend
            for backend in _by_priority(queries, pairs)
            if _accepts(backend, queries, pairs, spec) and _works(backend, pairs.k)
        )
    backend = BACKENDS.make(name)
    try:
        _check(backend, queries, pairs, spec)
    except Unsupported as reason:
        raise UserError(
            f"attention implementation {name!r} cannot run: {reason}; None chooses one "
            "that does"
        ) from None
    return backend


def _by_priority(queries: Queries, pairs: Pairs) -> list[Backend]:
    """Lists the backends that need not be named, fastest for these arrays first."""
    every = [BACKENDS.make(name) for name in BACKENDS.names()]
    priority = lambda backend: backend.priority(queries, pairs)
    return sorted(filter(priority, every), key=priority, reverse=True)


def _check(
    backend: Backend, queries: Queries, pairs: Pairs, spec: AttentionSpec
) -> None:
    """Raises Unsupported if a backend cannot run."""
    needed, here = backend.platform, device().platform
    if needed and needed != here:
        raise Unsupported(f"it needs a {needed.upper()}, and this is a {here.upper()}")
    backend.check(queries, pairs, spec)


def _accepts(
    backend: Backend, queries: Queries, pairs: Pairs, spec: AttentionSpec
) -> bool:
    """Returns whether a backend can run; warns of a reason worth a warning."""
    try:
        _check(backend, queries, pairs, spec)
    except Unsupported as reason:
        if reason.warn:
            _warn_once(backend.name, str(reason))
        return False
    return True


@functools.cache
def _warn_once(name: str, reason: str) -> None:
    warn(
        f"attention implementation {name!r} cannot run: {reason}; plain XLA runs "
        "instead",
    )


def _works(backend: Backend, k: Tensor) -> bool:
    """Returns whether a backend passes its self-test on this device.

    A new compiler or device may cost speed, but must not fail a run. Ahead-of-time
    compilation for an absent device skips the test, which has nowhere to run.
    """
    ahead_of_time = bool(jax.sharding.get_abstract_mesh().abstract_device)
    return ahead_of_time or _passes_self_test(backend, k.shape[3], _codec_of_codes(k))


def _codec_of_codes(k: Tensor) -> Any:
    """Returns the codec whose codes kernels can read; None for decoded pairs."""
    inner = k.inner if isinstance(k, Stored) else None
    return inner.codec if inner and inner.codes is not None else None


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


def _tiles_first(queries: Queries, pairs: Pairs) -> int:
    """Prefers tiles on a CPU, for prompts and for pairs that must be decoded."""
    pieces = queries.q.shape[3] > 1 or isinstance(pairs.k, Stored)
    return 2 * (device().platform == "cpu" and pieces)


_TPU = kernels.Kernels("kvjax.pallas.tpu", writes=True)
_GPU = kernels.Kernels("kvjax.pallas.gpu")

for _backend in (
    Backend("reference", reference.attend, priority=lambda *_: 1),
    Backend("tiles", reference.attend_in_tiles, priority=_tiles_first),
    Backend("xla", **library.functions("xla")),
    Backend("cudnn", platform="gpu", **library.functions("cudnn")),
    Backend("pallas_tpu", platform="tpu", priority=lambda *_: 3, **_TPU.functions()),
    Backend("pallas_gpu", platform="gpu", priority=lambda *_: 3, **_GPU.functions()),
    Backend("pallas_tpu_interpret", **_TPU.interpreted().functions()),
    Backend("pallas_gpu_interpret", **_GPU.interpreted().functions()),
):
    register(_backend)
