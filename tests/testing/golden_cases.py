"""Our rules and other people's: which of them keep the same pairs, and why others not.

`CASES` has a case for every choice in golden/policies_kvpress.npz and
golden/policies_authors.npz (golden/make_policies.py made them and says what they hold).
A rule gets the saved arrays alone, no model and no cache: `Replay` feeds it what
attention saw and asks it what to drop. `table()` is the comparison as Markdown.
"""

import functools
import pathlib
import types
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import policies
from kvjax.policies import Policy
from kvjax.types import Observation, View

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
T, HEADS, GROUP, DEPTH = 96, 2, 3, 8
RATIOS = ("", "@0.25")  # of pairs dropped: 0.5 where nothing is said
SHARES = (0.2, 0.24, 0.372, 0.5, 0.81, 0.9, 0.948, 0.954)


@functools.cache
def golden() -> dict[str, np.ndarray]:
    """Both files; names begin with 'kvpress/' or 'authors/'."""
    found = {}
    for source in ("kvpress", "authors"):
        with np.load(GOLDEN / f"policies_{source}.npz") as file:
            found |= {f"{source}/{name}": file[name] for name in file}
    return found


# ---------------------------------------------------------------- a rule by itself


class Layer(NamedTuple):
    """The saved layer, with a batch axis of 1; `size` is the L1 norm of v . W_o."""

    queries: np.ndarray
    pre_rope_queries: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    logits: np.ndarray
    size: np.ndarray


@functools.cache
def layer(per_query_head: bool = False) -> Layer:
    """Two KV heads with three query heads each, or those six with one each."""
    saved = golden()
    queries, raw = saved["kvpress/queries"], saved["kvpress/raw_queries"]
    keys, values = saved["kvpress/keys"], saved["kvpress/values"]
    added = np.einsum("bktd,kgdm->bkgtm", values, saved["kvpress/out"])
    size = np.abs(added).sum(-1).mean(2)
    if per_query_head:
        alone = lambda x: x.reshape(1, HEADS * GROUP, 1, T, DEPTH)
        queries, raw = alone(queries), alone(raw)
        keys, values, size = (np.repeat(x, GROUP, axis=1) for x in (keys, values, size))
    logits = np.einsum("bkgtd,bkcd->bkgtc", queries.astype(float), keys.astype(float))
    return Layer(queries, raw, keys, values, logits / DEPTH**0.5, size)


def rotate(x, positions):
    """Rotary angles, halves of the head dimension paired."""
    theta = float(golden()["kvpress/rope_theta"])
    turns = jnp.asarray(theta ** (-np.arange(0, DEPTH, 2) / DEPTH), jnp.float32)
    angle = positions[:, None, :, None].astype(jnp.float32) * turns[None, None, None]
    angle = jnp.concatenate([angle, angle], axis=-1)
    low, high = jnp.split(x, 2, axis=-1)
    return x * jnp.cos(angle) + jnp.concatenate([-high, low], -1) * jnp.sin(angle)


def _view(pos, now, keep, keys, values) -> View:
    return View(pos, now, keep, lambda: keys, lambda: values, rotate)


_jit = functools.partial(  # small arrays: compiling takes longer than running
    jax.jit, compiler_options={"xla_backend_optimization_level": 0}
)


@functools.partial(_jit, static_argnums=0)
def _observe(policy: Policy, stats, view, seen):
    return policy.observe(stats, _view(*view), Observation(**seen))


@functools.partial(_jit, static_argnums=0)
def _score(policy: Policy, stats, view):
    return policy.score(stats, _view(*view))


_evictions = _jit(policies.select_evictions)


class Replay:
    """Reads the saved tokens through one rule. The slot of a pair is its position.

    Attributes:
      shown: bool[K, T], the pairs that the rule may see and drop.
      held: bool[K, T], the pairs that attention sees.
      stats: what the rule remembers.
    """

    def __init__(self, policy: Policy, per_query_head=False, first=0, lossless=False):
        """`first`: earlier positions stay, unknown to the rule.

        `lossless`: attention goes on to see what the rule has dropped.
        """
        self.policy, self.layer = policy, layer(per_query_head)
        heads, group = self.layer.queries.shape[1:3]
        spec = types.SimpleNamespace(
            num_kv_heads=heads, queries_per_kv_head=group, head_dim=DEPTH
        )
        self.stats = policy.init(spec, 1, T)
        self.held = np.zeros((heads, T), bool)
        self.shown = self.held.copy()
        self.first, self.lossless, self.now = first, lossless, -1

    def read(self, stop: int, tell: bool = True) -> "Replay":
        """Attends from the tokens up to `stop`, and tells the rule what was seen."""
        rows = np.arange(self.now + 1, stop)
        self.now = stop - 1
        self.held[:, rows] = True
        self.shown[:, rows[rows >= self.first]] = True
        if tell:
            view = self._seen_by_rule(self.shown.sum(-1))
            self.stats = _observe(self.policy, self.stats, view, self._seen(rows))
        return self

    def score(self, keep: int | np.ndarray | None) -> np.ndarray:
        """f32[K, T], the rule's scores when `keep` pairs per head are to stay."""
        view = self._seen_by_rule(self._keep(keep))
        return np.asarray(_score(self.policy, self.stats, view))[0]

    def drop(self, keep: int | np.ndarray | None = None) -> "Replay":
        """Lets the rule choose the `keep` pairs that stay, in all heads or in each.

        None makes room for all, and only what no budget would keep goes.
        """
        pos, _, stay, *_ = self._seen_by_rule(self._keep(keep))
        drop = (pos >= 0).sum(-1, dtype=np.int32) - stay
        gone = np.asarray(_evictions(self.score(keep)[None], pos, drop))[0]
        self.shown &= ~gone
        if not self.lossless:
            self.held &= ~gone
        return self

    @property
    def kept(self) -> np.ndarray:
        """i32[K, n], sorted positions that attention sees, where heads hold as many."""
        return np.stack([np.flatnonzero(head) for head in self.held]).astype(np.int32)

    def _keep(self, keep: int | np.ndarray | None) -> np.ndarray:
        live = self.shown.sum(-1)
        return live if keep is None else np.broadcast_to(keep, live.shape)

    def _seen_by_rule(self, keep) -> tuple:
        pos = np.where(self.shown, np.arange(T), -1).astype(np.int32)
        now = np.full(1, self.now, np.int32)
        keep = keep.astype(np.int32)[None]
        return pos[None], now, keep, self.layer.keys, self.layer.values

    def _seen(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """What the rule needs of `Observation`."""
        data = self.layer
        weights = self._weights(rows)
        mean = weights.mean(2)
        every = {
            "attn_sum": mean.sum(2),
            "attn_sq_sum": (mean * mean).sum(2),
            "last_attn": mean[:, :, -1],
            "attn_weights": weights,
            "queries": data.queries[:, :, :, rows],
            "pre_rope_queries": data.pre_rope_queries[:, :, :, rows],
            "output_norm": data.size[:, :, rows],
        }
        wanted = self.policy.required_stats
        found = {name: every[name].astype(np.float32) for name in wanted & set(every)}
        if "tokens" in wanted:
            found["tokens"] = golden()["kvpress/tokens"][rows][None]
        positions = rows.astype(np.int32)[None]
        count = np.full(1, len(rows), np.int32)
        return {"num_tokens": count, "positions": positions, **found}

    def _weights(self, rows: np.ndarray) -> np.ndarray:
        """f64[1, K, G, R, T], attention over what is held."""
        causal = np.arange(T) <= rows[:, None]
        sees = self.held[None, :, None, None] & causal
        logits = np.where(sees, self.layer.logits[:, :, :, rows], -np.inf)
        powers = np.exp(logits - logits.max(-1, keepdims=True))
        return powers / powers.sum(-1, keepdims=True)


# ---------------------------------------------------------------- how each peer chooses

Make = Callable[..., Policy]  # what a case's expression leaves open -> the rule


def ratio_of(saved: str) -> float:
    """What stands behind the @: 0.5, where nothing does."""
    return float(saved.partition("@")[2] or 0.5)


def at_ratio(make: Make, saved: str) -> np.ndarray:
    """All tokens at once, then one choice of the size that a kvpress ratio asks for."""
    return Replay(make()).read(T).drop(int(T * (1 - ratio_of(saved)))).kept


def to_size(keep: int, prompt: int = T, per_query_head: bool = False) -> Callable:
    """All of a prompt at once, then `keep` pairs per head stay."""
    return lambda make, _: Replay(make(), per_query_head).read(prompt).drop(keep).kept


def best_by_their_scores(keep: int) -> Callable[[str], np.ndarray]:
    """What kvpress would keep at a budget that is not among the saved ones."""
    return lambda saved: np.sort(np.argsort(-golden()[saved], -1)[:, :keep], -1)


def trimmed(make: Make, threshold: float) -> np.ndarray:
    """bool[K, T], what stays of the prompt where there is room for everything."""
    return Replay(make(threshold=float(threshold))).read(T).drop().held


def simlayerkv_press(make: Make, saved: str) -> np.ndarray:
    held = trimmed(make, golden()[saved.replace("kept", "threshold")])
    return np.stack([np.flatnonzero(head) for head in held])


MARGIN = 1e-4  # of a threshold around the number that is compared with it


def laziness(saved: str) -> float:
    """What SimLayerKV's authors compare with their threshold."""
    score = golden()[saved]
    return float(score if score.ndim == 0 else score[:, -32:].mean())


def both_sides(make: Make, saved: str) -> np.ndarray:
    """bool[2, K, T], what stays of a layer that the authors find just lazy or not."""
    score = laziness(saved)
    return np.stack([trimmed(make, score - MARGIN), trimmed(make, score + MARGIN)])


def lazy_and_busy(recent: int) -> Callable[[str], np.ndarray]:
    """Four sinks and a window, then everything."""
    position = np.arange(T)
    lazy = (position < 4) | (position >= T - recent)
    sides = np.stack([lazy, np.ones_like(lazy)])
    return lambda _: np.repeat(sides[:, None], HEADS, axis=1)


def h2o(make: Make, saved: str) -> np.ndarray:
    """A prompt of 96 at once, or one of 88 and then one token in and one pair out."""
    if "kept" in saved:
        return to_size(24)(make, saved)
    row = Replay(make())
    return np.stack([row.read(stop).drop(24).kept for stop in range(88, T + 1)])


def easykv_decoding(make: Make, _) -> np.ndarray:
    """A prompt of 16 that always stays; the rule knows the 40 generated pairs alone."""
    row, trace = Replay(make(), first=16).read(16, tell=False), []
    for position in range(16, T):
        if row.held[0].sum() == 56:
            trace.append(row.kept)
        row.read(position + 1)
        if row.shown[0].sum() > 40:
            row.drop(40)
    return np.stack(trace)


def easykv_encoding(make: Make, saved: str) -> np.ndarray:
    """Blocks of 8 into a cache of 48; the first 48 tokens count if keep_attention."""
    row = Replay(make()).read(48, tell=saved.endswith("_attention"))
    trace = [row.kept]
    for stop in range(56, T + 1, 8):
        trace.append(row.read(stop).drop(48).kept)
    return np.stack(trace)


def scissorhands_visible(make: Make, _, lossless: bool = False) -> np.ndarray:
    """bool[K * G, T, T], the pairs that each query sees; dropping starts with 32."""
    row = Replay(make(), per_query_head=True, lossless=lossless).read(32)
    seen = np.repeat(np.tril(np.ones((1, T, T), bool)), HEADS * GROUP, axis=0)
    for query in range(32, T):
        seen[:, query, :query] = row.drop().shown[:, :query]
        row.read(query + 1)
    return seen


def cold_steps(make: Make, _) -> np.ndarray:
    """A prompt of 40, then one pair out and one token in."""
    row = Replay(make()).read(40)
    trace = [row.kept]
    for position in range(40, T):
        trace.append(row.drop(39).read(position + 1).kept)
    return np.stack(trace)


def cold_slots(saved: str) -> np.ndarray:
    """The positions in cold-compress' slots, sorted."""
    return np.sort(golden()[saved], axis=-1)


def fastgen(make: Make, saved: str) -> np.ndarray:
    """The strategy of each head, or what it keeps."""
    row = Replay(make(share=ratio_of(saved))).read(T)
    if "strategy" in saved:
        return np.asarray(row.stats.per_row)[0]
    row.policy = make(share=SHARES[0])  # once chosen, a set does not depend on it
    return row.drop().held


def as_many(make: Make, saved: str) -> np.ndarray:
    """As many pairs in each head as the other code keeps."""
    return Replay(make()).read(T).drop(golden()[saved].sum(-1)).held


def lag_kv_steps(make: Make, _) -> np.ndarray:
    """64 tokens, then one by one; sorted positions, padded with -1.

    `settled` counts the sinks and what has been kept of judged partitions.
    """
    settled, row, trace = 4, Replay(make(settled=4)), []
    for stop in range(64, T + 1):
        held = int(row.read(stop, tell=False).held[0].sum())
        judged = max((held - settled) // 16 - 1, 0)  # partitions a whole one follows
        row.policy = make(settled=settled)
        row.drop(held - 8 * judged)
        settled += 8 * judged
        padding = ((0, 0), (0, 64 - row.kept.shape[1]))
        trace.append(np.pad(row.kept, padding, constant_values=-1))
    return np.stack(trace)


# ---------------------------------------------------------------- cases


class Case(NamedTuple):
    """One comparison, a row of the table.

    Attributes:
      name: for the tests.
      policy: our rule, an expression over `kvjax.policies`.
      peer: theirs, with its settings.
      saved: names of their choices in `golden()`.
      ours: (make, saved name) -> our choice, laid out as `theirs` lays out theirs.
      identical: whether the two are equal, element by element.
      why: where not, the reason; else the terms on which they are, if there are any.
      theirs: saved name -> their choice; None for what is saved under that name.
    """

    name: str
    policy: str
    peer: str
    saved: tuple[str, ...]
    ours: Callable[[Make, str], np.ndarray]
    identical: bool = True
    why: str = ""
    theirs: Callable[[str], np.ndarray] | None = None

    def make(self, **settings) -> Policy:
        """The rule, from its expression; `settings` are names that it leaves open."""
        return eval(self.policy, vars(policies) | settings)

    def pair(self, saved: str) -> tuple[np.ndarray, np.ndarray]:
        """Our choice and theirs."""
        theirs = self.theirs or golden().__getitem__
        return self.ours(self.make, saved), theirs(saved)


def press(name: str, policy: str, peer: str, saved: str = "", why: str = "") -> Case:
    """A case of kvpress that is identical at both ratios."""
    names = tuple(f"kvpress/kept/{saved or name}{ratio}" for ratio in RATIOS)
    return Case(name, policy, f"kvpress `{peer}`", names, at_ratio, why=why)


def encoding(policy: str, *suffixes: str) -> tuple[str, ...]:
    return tuple(f"authors/trace/easykv_encoding_{policy}{each}" for each in suffixes)


def shares(case: str, *whats: str, among=SHARES) -> tuple[str, ...]:
    return tuple(f"authors/{what}/{case}@{share}" for share in among for what in whats)


SNAP = "snapkv(window=8, kernel=5, pool='average')"
SNAP_PRESS = "SnapKVPress(window_size=8, kernel_size=5)"
AHEAD = "expected_attention(future=64, sinks=4"
AHEAD_PRESS = "ExpectedAttentionPress(n_future_positions=64, n_sink=4, epsilon=0"
LAZY_PRESS = "kvpress `SimLayerKVPress(n_last=1, n_recent=16, n_initial=4)`"
LADDER = (
    "fastgen(share, sinks=4, special=(3,), punctuation=(5, 11, 17, 23), heavy=29, "
    "local=28)"
)
RELEASED = "scissorhands_released(heavy=9, history=16, recent=10)"

KVPRESS = [
    press("streaming", "streaming(sinks=4)", "StreamingLLMPress(n_sink=4)"),
    Case(
        "tova",
        "tova()",
        "kvpress `TOVAPress()`",
        ("kvpress/scores/tova",),
        to_size(27),
        identical=False,
        why="kvpress never drops the newest pair; in the paper it competes",
        theirs=best_by_their_scores(27),
    ),
    press("tova_newest", "protect(tova(), 0, 1)", "TOVAPress()", saved="tova"),
    press("snapkv", SNAP, SNAP_PRESS),
    press("observed_attention", "average_attention()", "ObservedAttentionPress()"),
    press("keydiff", "key_diff()", "KeyDiffPress()"),
    press("knorm", "key_norm()", "KnormPress()"),
    press("expected_attention", f"{AHEAD})", f"{AHEAD_PRESS})"),
    press(
        "expected_attention_mean",
        f"{AHEAD}, covariance=False, value_norm=False)",
        f"{AHEAD_PRESS}, use_covariance=False, use_vnorm=False)",
    ),
    press(
        "lagkv",
        "lag_kv(sinks=4, lag=16)",
        "LagKVPress(n_sink=4, lag_size=16)",
        why="where the budget cuts through no tie, among equal ranks or what has "
        "nothing to be judged by: kvpress breaks them arbitrarily, here the newer stay",
    ),
    press(
        "lagkv_cross",
        "lag_kv(sinks=4, lag=16, ranked=False)",
        "LagKVPress(n_sink=4, lag_size=16, cross_scoring=True)",
        why="on the same terms",
    ),
    press(
        "chunkkv_snapkv",
        f"chunked(shared_heads({SNAP}), size=8)",
        f"ChunkKVPress({SNAP_PRESS}, chunk_length=8)",
        why="where the budget is a whole number of chunks: else kvpress drops all of "
        "the chunk at the border, which is cut here",
    ),
    press(
        "chunkkv_knorm",
        "chunked(shared_heads(key_norm()), size=8)",
        "ChunkKVPress(KnormPress(), chunk_length=8)",
        why="on the same terms",
    ),
    press("criticalkv_snapkv", f"criticalkv({SNAP})", f"CriticalKVPress({SNAP_PRESS})"),
    press(
        "criticalkv_knorm", "criticalkv(key_norm())", "CriticalKVPress(KnormPress())"
    ),
    press(
        "criticalkv_expected",
        f"criticalkv({AHEAD}, value_norm=False))",
        f"CriticalKVPress({AHEAD_PRESS}, use_vnorm=False))",
    ),
    Case(
        "simlayerkv_press",
        "simlayerkv(threshold, sinks=4, recent=16, queries=1)",
        LAZY_PRESS,
        ("kvpress/kept/simlayerkv_lazy", "kvpress/kept/simlayerkv_busy"),
        simlayerkv_press,
        identical=False,
        why="of a lazy layer kvpress keeps a window of n_recent - n_last, one pair "
        "less; it compares with the threshold what falls on the 16 pairs before the "
        "newest, here the newest is one of the 16",
    ),
    Case(
        "simlayerkv_press_lazy",
        "simlayerkv(threshold=0.0, sinks=4, recent=15, queries=1)",
        LAZY_PRESS,
        ("kvpress/kept/simlayerkv_lazy",),
        lambda make, _: Replay(make()).read(T).drop().kept,
        why="of a layer that both find lazy",
    ),
]

AUTHORS = [
    Case(
        "h2o",
        "h2o()",
        "H2O, `H2OKVCache_LayerWise(hh_size=12, recent_size=12)`",
        ("authors/kept/h2o", "authors/trace/h2o"),
        h2o,
        why="weights averaged over the group first: the authors' code has no grouped "
        "queries",
    ),
    *(
        Case(
            f"snapkv_{pool}",
            SNAP.replace("average", pool),
            f"SnapKV, `SnapKVCluster(8, 44, kernel_size=5, pooling='{theirs}')`",
            (f"authors/kept/snapkv_{theirs}",),
            to_size(44, per_query_head=True),
            why="with each query head its own KV head: the authors' code chooses for "
            "query heads, here those of a group share a choice",
        )
        for pool, theirs in (("average", "avgpool"), ("max", "maxpool"))
    ),
    *(
        Case(
            f"easykv_decoding_{name}",
            policy,
            f"EasyKV, decoding, `kv_policy='{name}'`, budget 40",
            (f"authors/trace/easykv_decoding_{name}",),
            easykv_decoding,
            why="told of generated pairs alone: there the prompt always stays",
        )
        for name, policy in (
            ("roco", "roco(spread=0.3, recent=10)"),
            ("h2o_head", "h2o(recent=0.3)"),
            ("tova", "tova(shared=False)"),
        )
    ),
    Case(
        "easykv_encoding_roco",
        "roco(spread=0.1, recent=10, sinks=4)",
        "EasyKV, encoding, `kv_policy='roco'`, `keep_attention`, budget 40, stride 8",
        encoding("roco", "_attention"),
        easykv_encoding,
        why="with a budget of 48: the block that comes in has its place in it",
    ),
    Case(
        "easykv_encoding_roco_forgetful",
        "roco(spread=0.1, recent=10, sinks=4)",
        "the same without `keep_attention`",
        encoding("roco", ""),
        easykv_encoding,
        identical=False,
        why="attention counts there from the first eviction on, and so do the queries "
        "that sums are divided by; here those are a pair's age",
    ),
    Case(
        "easykv_encoding_h2o_head",
        "h2o_sinks(recent=0.1, sinks=4)",
        "EasyKV, encoding, `kv_policy='h2o_head'`, with and without `keep_attention`",
        encoding("h2o_head", "", "_attention"),
        easykv_encoding,
        why="with a budget of 48; without `keep_attention`, told of attention from the "
        "first eviction on",
    ),
    Case(
        "easykv_encoding_tova",
        "protect(tova(), 4, 4)",
        "EasyKV, encoding, `kv_policy='tova'`, with and without `keep_attention`",
        encoding("tova", "", "_attention"),
        easykv_encoding,
        why="with a budget of 48",
    ),
    Case(
        "scissorhands",
        RELEASED,
        "Scissorhands, released code, `lru_window=16, position_window=10`",
        ("authors/visible/scissorhands",),
        scissorhands_visible,
        identical=False,
        why="there a weight has to exceed what is the tenth largest before anything is "
        "dropped, and grows as others are; here it has to be among the nine largest of "
        "those that are left",
    ),
    Case(
        "cold_scissorhands",
        "protect(scissorhands(history=16, recent=10), 4, 0)",
        "cold-compress, `KVCacheHeavyHitter(history_window_size=16, "
        "attn_thresholding=True)`",
        ("authors/slots/scissorhands",),
        cold_steps,
        identical=False,
        why="there a pair's average over the whole prompt has one vote, each generated "
        "token one more, and the share to reach is one over the cache's size; here, as "
        "in the paper, every query votes, and its share is one over what it could see",
        theirs=cold_slots,
    ),
    Case(
        "cold_heavy_hitter",
        "protect(average_attention(), 4, 10)",
        "cold-compress, `KVCacheHeavyHitter(history_window_size=1, "
        "attn_thresholding=False)`",
        ("authors/slots/heavy_hitter", "authors/slots/heavy_hitter_88"),
        cold_steps,
        identical=False,
        why="there the average over the whole prompt counts as one query's weight",
        theirs=cold_slots,
    ),
    Case(
        "cold_prompt",
        "protect(snapkv(window=16, kernel=5, pool='average'), 4, 0)",
        "cold-compress, `PromptCompressorHeavyHitter` to 40 pairs",
        ("authors/slots/heavy_hitter_88",),
        to_size(40, prompt=88),
        why="on these arrays; it pools the window's weights too, and the mean at the "
        "ends is of fewer",
        theirs=lambda saved: cold_slots(saved)[0],
    ),
    Case(
        "fastgen_tokens",
        LADDER,
        "cold-compress, `KVCacheHybrid`, fastgen.yaml, heads that choose special "
        "tokens or punctuation",
        shares("fastgen", "strategy", "kept", among=(0.2, 0.24)),
        fastgen,
    ),
    Case(
        "fastgen",
        LADDER,
        "the same, all heads",
        shares("fastgen", "strategy", "kept"),
        fastgen,
        identical=False,
        why="its heavy hitters have the largest averages, ours the largest sums; it "
        "chooses them outside of the window; and what it then keeps are shares of the "
        "room (39 and 38 of 128), no longer of the prompt (29 and 28 of 96)",
    ),
    Case(
        "fastgen_hybrid_strategy",
        LADDER,
        "cold-compress, `KVCacheHybrid`, hybrid.yaml, what each head chooses",
        shares("fastgen_hybrid", "strategy"),
        fastgen,
        identical=False,
        why="its ladder goes from a window to heavy hitters, ours is the paper's",
    ),
    Case(
        "fastgen_hybrid",
        "protect(average_attention(), 4, 12)",
        "the same, what each head keeps",
        shares("fastgen_hybrid", "kept"),
        as_many,
        why="with as many pairs in each head as the choice made there allows",
    ),
    Case(
        "simlayerkv_decode",
        "simlayerkv(threshold, sinks=4, recent=16, queries=1)",
        "SimLayerKV, released code, a window of 16",
        ("authors/score/simlayerkv_decode",),
        both_sides,
        why="from sinks + window pairs on: of fewer, it counts some twice",
        theirs=lazy_and_busy(16),
    ),
    Case(
        "simlayerkv_prefill",
        "simlayerkv(threshold, sinks=4, recent=12, queries=32)",
        "SimLayerKV, the variant commented out, a window of 12",
        ("authors/score/simlayerkv_prefill",),
        both_sides,
        identical=False,
        why="there a query's window is the 12 pairs before its own, here its own is "
        "one of the 12",
        theirs=lazy_and_busy(12),
    ),
    Case(
        "rkv",
        "r_kv(weight=0.07)",
        "R-KV, `R1KV(budget=40, window_size=8)`",
        ("authors/kept/rkv",),
        to_size(40),
        why="where every key has another like it: else the authors' code forgets its "
        "cosine with the first",
    ),
    Case(
        "lagkv_once",
        "lag_kv(sinks=4, lag=16)",
        "LagKV, `LagKV(ratio=0.5, sink_size=4, lag_size=16)`, a prompt at once",
        ("authors/kept/lagkv",),
        to_size(64),
        why="with the budget that the ratio leads to",
    ),
    Case(
        "lagkv_settled",
        "lag_kv(sinks=settled, lag=16)",
        "the same, token by token",
        ("authors/trace/lagkv_steps",),
        lag_kv_steps,
        why="with what is kept of judged partitions counted as sinks",
    ),
    Case(
        "lagkv_again",
        "lag_kv(sinks=4, lag=16)",
        "the same, token by token",
        ("authors/trace/lagkv_steps",),
        lag_kv_steps,
        identical=False,
        why="there each partition is judged once; here all that is live is cut and "
        "judged again whenever something has to go",
    ),
]

CASES = {case.name: case for case in (*KVPRESS, *AUTHORS)}


def table() -> str:
    """The cases as a Markdown table."""
    lines = [
        "| our policy | peer | identical kept indices | where not, why |",
        "|---|---|---|---|",
    ]
    above = ""
    for case in CASES.values():
        policy = "the same" if case.policy == above else f"`{case.policy}`"
        above = case.policy
        verdict = "yes" if case.identical else "no"
        lines.append(f"| {policy} | {case.peer} | {verdict} | {case.why} |")
    return "\n".join(lines) + "\n"
