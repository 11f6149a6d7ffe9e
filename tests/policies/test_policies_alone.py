"""The attention layer of docs/policies_alone.md, run as it stands there."""

import functools
import pathlib
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import often, tiny_spec

from kvjax import policies
from kvjax.cache.spec import make_spec
from kvjax.types import OBSERVABLE, Observation, View

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "policies_alone.md"
BLOCKS = re.findall(
    r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE
)

LEAVE_ROOM = {"fastgen", "simlayerkv"}  # rules that keep fewer pairs in some heads
LENGTHS = (40, 25, 12)  # the last has fewer tokens than the budget
BUDGET, WINDOW, KERNEL, NEW, WIDTH = 16, 8, 7, 3, 12


def page(blocks: int) -> types.SimpleNamespace:
    """What the page's first code blocks define."""
    names = {}
    for block in BLOCKS[:blocks]:
        exec(compile(block, PAGE.name, "exec"), names)
    return types.SimpleNamespace(**names)


@pytest.fixture(scope="module", autouse=True)
def _compiled_in_a_hurry():
    """Small programs that run once: compiling takes longer than running."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def layer():
    return page(2)


@pytest.fixture(scope="module")
def data(layer):
    """Weights, prompts padded with noise, their ids and lengths, tokens to come."""
    heads, group, depth = vars(layer.SHAPE).values()
    rng = np.random.default_rng(0)

    def normal(*shape, scale=1.0):
        return jnp.asarray(rng.normal(scale=scale, size=shape), jnp.float32)

    w = {
        "q": normal(WIDTH, heads, group, depth, scale=0.6),
        "k": normal(WIDTH, heads, depth, scale=0.6),
        "v": normal(WIDTH, heads, depth, scale=0.3),
        "o": normal(heads, group, depth, WIDTH, scale=0.3),
    }
    x = normal(len(LENGTHS), max(LENGTHS), WIDTH)
    tokens = jnp.asarray(rng.integers(0, 20, x.shape[:2]), jnp.int32)
    return w, x, tokens, jnp.asarray(LENGTHS), normal(len(LENGTHS), NEW, WIDTH)


@pytest.fixture(scope="module")
def done(layer, data):
    """Outputs for the prompts and for the new tokens, and the cache at the end."""
    return layer.run(*data)


def test_blocks_are_short():
    assert len(BLOCKS[0].splitlines()) <= 60
    assert max(len(line) for block in BLOCKS for line in block.splitlines()) <= 88


def test_keeps_what_snapkv_keeps(data, done):
    w, x, *_ = data
    pos = np.asarray(done[2][2])
    for row, length in enumerate(LENGTHS):
        q, k, _ = numpy_layer(w, x[row, :length])
        for head in range(pos.shape[1]):
            kept = {int(p) for p in pos[row, head] if p >= 0}
            new = set(range(length, length + NEW))
            assert kept - new == numpy_snapkv(q[head], k[head])
            assert new <= kept


def test_attends_to_what_it_kept(data, done):
    """Every output is full attention, restricted to the positions that were held."""
    w, x, _, _, new = data
    prompt_out, new_out, (_, _, pos) = done
    for row, length in enumerate(LENGTHS):
        tokens = np.concatenate([x[row, :length], new[row]])
        q, k, v = numpy_layer(w, tokens)
        for t in range(length + NEW):
            held = np.zeros((len(k), len(tokens)), bool)
            held[:, : t + 1] = True
            if t >= length:
                for head in range(len(k)):
                    held[head] &= np.isin(np.arange(len(tokens)), pos[row, head])
            logits = np.einsum("kgd,ktd->kgt", q[:, :, t], k) * k.shape[-1] ** -0.5
            weights = softmax(np.where(held[:, None], logits, -np.inf))
            want = np.einsum("kgt,ktd,kgdm->m", weights, v, np.asarray(w["o"]))
            out = prompt_out[row, t] if t < length else new_out[row, t - length]
            np.testing.assert_allclose(out, want, rtol=0, atol=2e-5)


def test_a_row_gets_what_it_gets_alone(layer, data, done):
    w, *given = data
    row, length = 1, LENGTHS[1]
    x, tokens, n, new = (each[row : row + 1] for each in given)
    alone = layer.run(w, x[:, :length], tokens[:, :length], n, new)
    for got, want in zip(alone[:2], done[:2], strict=True):
        want = want[row : row + 1, : got.shape[1]]
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-6)
    assert held(alone[2][2][0]) == held(done[2][2][row])


@pytest.fixture(scope="module")
def other():
    return page(len(BLOCKS))


def test_observed_is_what_other_rules_need(other, data):
    w, x, tokens, n, _ = data

    @jax.jit
    def observe():
        at = jnp.broadcast_to(jnp.arange(x.shape[1])[None], x.shape[:2])
        q, k, v = other.project(w, x, at)
        pos = jnp.broadcast_to(at[:, None], k.shape[:3])
        _, weights = other.attend(w, q, at, k, v, pos)
        return other.observed(w, x, tokens, n, at, q, weights)

    seen = observe()
    assert not [name for name in OBSERVABLE if getattr(seen, name) is None]
    assert seen.tokens is tokens or np.array_equal(seen.tokens, tokens)
    for row, length in enumerate(LENGTHS):
        q, k, v = numpy_layer(w, x[row, :length])
        for head in range(len(k)):
            weights = numpy_weights(q[head], k[head])
            mean = weights.mean(axis=0)  # [T, T]
            added = np.einsum("td,gdm->gtm", v[head], np.asarray(w["o"])[head])
            found = {
                "attn_sum": mean.sum(0),
                "attn_sq_sum": (mean**2).sum(0),
                "last_attn": mean[-1],
                "output_norm": np.abs(added).sum(-1).mean(0),
            }
            for name, want in found.items():
                got = getattr(seen, name)[row, head, :length]
                np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
            got = seen.attn_weights[row, head, :, :length, :length]
            np.testing.assert_allclose(got, weights, rtol=0, atol=1e-5)
            turned_back = turned(np.asarray(seen.pre_rope_queries)[row, head])
            np.testing.assert_allclose(turned_back[:, :length], q[head], atol=1e-5)


QUICK = ["h2o", "tova", "key_diff", "average_attention", "fastgen"]


@pytest.mark.parametrize("name", often(policies.names(), QUICK, others="e2e"))
def test_other_rules(name, other, data):
    outs, (_, _, pos) = other.run(*data, policy=policies.make(name))[1:]
    w, x, *_ = data
    assert np.isfinite(outs).all()
    for row, length in enumerate(LENGTHS):
        most = min(length, BUDGET) + NEW
        counts = [len(head) for head in held(pos[row])]
        assert counts == [most] * len(counts) or name in LEAVE_ROOM
        assert max(counts) <= most
        q, k, _ = numpy_layer(w, x[row, :length])
        pairs = zip(q, k, strict=True)
        weights = np.stack([numpy_weights(*pair).mean(axis=0) for pair in pairs])
        kept = held(pos[row], below=length)
        if name == "h2o":
            score = weights.sum(axis=1)
            score[:, length - min(length, BUDGET) // 2 :] = np.inf
            assert kept == [best(head) for head in score]
        if name == "tova":
            assert kept == [best(weights[:, -1].mean(axis=0))] * len(k)


def test_own_rule(other, data):
    """The page's example, beside the same in NumPy: differences in the text's order."""
    outs, (_, _, pos) = other.run(*data, policy=other.turns)[1:]
    assert np.isfinite(outs).all()
    for row, length in enumerate(LENGTHS):
        loud = np.linalg.norm(np.asarray(data[1][row, :length], np.float64), axis=-1)
        change = np.abs(np.diff(loud, prepend=loud[0]))
        change[-4:] = np.inf
        assert held(pos[row], below=length) == [best(change)] * len(pos[row])


def test_own_rules_go_into_a_cache(other):
    spec = tiny_spec()
    make_spec(spec, other.turns, 128)
    weights = [jnp.ones((spec.model_dim, spec.num_kv_heads))] * spec.num_layers
    make_spec(spec, policies.with_params(other.linear, weights), 128)


def test_learned_rule(other, data):
    """The page's rule scores each pair by what attention read when it came."""
    w, x, _, n, _ = data
    at = jnp.broadcast_to(jnp.arange(x.shape[1])[None], x.shape[:2])
    weights = w["k"][..., 0]  # [M, K]
    policy = policies.with_params(other.linear, [weights])

    @functools.partial(jax.jit, static_argnames="policy")
    def scores(policy, layers):
        pos = jnp.broadcast_to(at[:, None], (len(x), weights.shape[1], x.shape[1]))
        view = View(pos, n - 1, jnp.sum(pos >= 0, axis=-1), params=layers[0])
        stats = policy.init(other.SHAPE, len(x), x.shape[1])
        stats = policy.observe(stats, view, Observation(n, at, hidden=x))
        return policy.score(stats, view)

    got = scores(policy, policy.params.layers)
    for row, length in enumerate(LENGTHS):
        want = np.asarray(x[row, :length]) @ np.asarray(weights)
        np.testing.assert_allclose(got[row, :, :length], want.T, rtol=0, atol=1e-5)
        assert not np.any(got[row, :, length:])  # of tokens that are none


# --- The same in NumPy: one row, no padding, no slots ---------------------------------


def numpy_layer(w, x):
    """q [K, G, T, D], k and v [K, T, D] of one row, in float64."""
    w = {name: np.asarray(weight, np.float64) for name, weight in w.items()}
    x = np.asarray(x, np.float64)
    q = np.einsum("tm,mkgd->kgtd", x, w["q"])
    k = np.einsum("tm,mkd->ktd", x, w["k"])
    return turned(q), turned(k), np.einsum("tm,mkd->ktd", x, w["v"])


def turned(x):
    """Rotary positions, as multiplication by complex numbers."""
    half = x.shape[-1] // 2
    angle = np.arange(x.shape[-2])[:, None] * 10_000.0 ** (-np.arange(half) / half)
    z = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)
    return np.concatenate([z.real, z.imag], axis=-1)


def numpy_weights(q, k):
    """Causal attention weights [G, T, T] of one KV head."""
    logits = q @ k.T * k.shape[-1] ** -0.5
    return softmax(np.where(np.tri(len(k), dtype=bool), logits, -np.inf))


def numpy_snapkv(q, k):
    """SnapKV, sections 3 and 4: the positions that one KV head keeps."""
    length = len(k)
    if length <= BUDGET:
        return set(range(length))
    votes = numpy_weights(q, k)[:, -WINDOW:, :-WINDOW].mean(axis=1)  # [G, T - window]
    reach = KERNEL // 2
    pooled = [
        votes[:, max(i - reach, 0) : i + reach + 1].max(axis=1).mean()
        for i in range(length - WINDOW)
    ]
    chosen = np.argsort(pooled, kind="stable")[WINDOW - BUDGET :]  # ties: the newer
    return {*chosen.tolist(), *range(length - WINDOW, length)}


def softmax(x):
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def best(score):
    """Positions of the `BUDGET` highest."""
    return np.sort(np.argsort(score, kind="stable")[-BUDGET:]).tolist()


def held(pos, below=10**6):
    """Per head, the positions held, in rising order."""
    return [sorted(int(p) for p in head if 0 <= p < below) for head in pos]
