"""Which attention runs: a table of backends, and the choice among them.

    reference     plain jax.numpy, on every platform
    tiles         the same in pieces that a CPU's cache holds; for prompts and codes
    xla, cudnn    `jax.nn.dot_product_attention`: no statistics
    pallas_tpu    one pass over the pairs, statistics added up on the way
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

BY_NAME = 0  # the priority of a backend that is never chosen unless it is named


class Backend(NamedTuple):
    """One way to attend. What it cannot do, `unsupported_reason` says.

    Attributes:
      name: what configs and callers call it.
      attend: (q, k, v, pos, q_pos, n, stats, scoring) -> attention and observation, as
        `kvjax.attention.attend` has them; `stats` are some of `ATTENTION_STATS`, and k
        and v may be `kvjax.attention.stored.Stored`.
      attention_stats: (q, k, pos, q_pos, n, whole, stats, scoring) -> observation, as
        `kvjax.attention.attention_stats`.
      write_attend: (q, new_k, new_v, slot, k, v, pos, q_pos, n, stats, scoring) ->
        attention, observation, k, v, as `kvjax.attention.write_attend`; None where the
        layout is to write first.
      write_grain: keys or values -> what the number of slots has to be a multiple of
        for `write_attend`; None where it cannot write them as they are stored.
      platform: the only one that it runs on: tpu, gpu or cpu; None for any.
      device_reason: device kind -> why it cannot run on such a device of its platform,
        or None. Told once a process where another runs instead.
      unsupported_reason: (q, k, stats, scoring) -> why it cannot take them, or None.
        Decided from shapes, dtypes and the device alone, while tracing.
      priority: (q, k) -> its rank where nobody is named: of those that can run, the
        highest does. `BY_NAME` is never chosen.
      self_test: (head dim, the keys' `TensorCodec` or None) -> what is wrong with its
        answers on this device, or None. Asked once a process, before it is chosen
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
    """Lets callers and configs ask for a backend by its name; returns it.

    Raises:
      UserError: the name is taken, or holds a colon.
    """
    BACKENDS.register(backend.name, lambda: backend)
    return backend


def check_name(implementation: str | None) -> None:
    """Raises UserError for a name that is no backend's."""
    if implementation is not None:
        BACKENDS.factory(implementation)


def select_backend(
    q: Array,
    k: Pairs,
    stats: frozenset[str],
    implementation: str | None,
    scoring: Scoring = PLAIN,
) -> Backend:
    """The backend that attends with queries `q` over keys `k`.

    Decided from shapes, dtypes and the device alone, so it may be asked while tracing.

    Args:
      q: [B, K, G, T, D].
      k: [B, K, C, D].
      stats: statistics that attention has to hand over.
      implementation: a backend's name, or None for the best that runs here.
      scoring: what happens to the products.

    Raises:
      UserError: a name that is unknown or cannot run; the message says why.
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
    """Those that may run without being named, the best for these arrays first."""
    every = [BACKENDS.make(name) for name in BACKENDS.names()]
    priority = lambda backend: backend.priority(q, k)
    return sorted(filter(priority, every), key=priority, reverse=True)


def _unsupported(
    backend: Backend, q: Array, k: Array, stats: frozenset[str], scoring: Scoring
) -> str | None:
    """Why a backend cannot run, or None."""
    wanted, here = backend.platform, device()
    if wanted and here.platform != wanted:
        return f"it needs a {wanted.upper()}, and this is a {here.platform.upper()}"
    return backend.device_reason(here.kind) or backend.unsupported_reason(
        q, k, stats, scoring
    )


def _runs_here(backend: Backend) -> bool:
    """Whether the device is one of a backend's; tells if but for its kind it were."""
    platform, kind = device()
    if backend.platform not in (None, platform):
        return False
    reason = backend.device_reason(kind)
    if reason:
        _tell_once(backend.name, reason)
    return not reason


@functools.cache
def _tell_once(name: str, reason: str) -> None:
    warn(
        f"attention implementation {name!r} cannot run: {reason}; plain XLA runs "
        "instead",
    )


def _works(backend: Backend, k: Pairs) -> bool:
    """Whether a backend gives right answers here.

    A new compiler or device must cost speed, never a run. Where the program is for a
    device that is not there, nothing can be tried.
    """
    elsewhere = bool(jax.sharding.get_abstract_mesh().abstract_device)
    return elsewhere or _tried(backend, k.shape[3], _codec_read(k))


def _codec_read(k: Pairs) -> Any:
    """The codec whose codes kernels may read; None where they get numbers."""
    pairs = k.inner if isinstance(k, Stored) else None
    return pairs.codec if pairs and pairs.codes is not None else None


@functools.cache
def _tried(backend: Backend, head_dim: int, codec: Any) -> bool:
    try:
        wrong = run_aside(lambda: backend.self_test(head_dim, codec))
    except Exception as error:  # whatever a compiler may say
        wrong = f"{type(error).__name__}: {error}".splitlines()[0]
    if wrong:
        warn(
            f"attention implementation {backend.name!r} does not work on "
            f"{jax.devices()[0].device_kind} with head dim {head_dim}"
            f"{f' and keys in {codec.name}' if codec else ''} ({wrong}): another one "
            "runs instead",
        )
    return not wrong


def _tiles_first(q: Array, k: Pairs) -> int:
    """On a CPU for prompts, and where pairs have to be decoded."""
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
