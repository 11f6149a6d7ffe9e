"""Algorithm 1 and the rules in NumPy, one row, one head at a time, from the papers.

Independent of kvjax: it takes a model's weights as plain arrays and keeps Python lists
of pairs, and every pair remembers the weight it got from every query. Slow and obvious.

A rule is called with the heads of one layer, the position of the newest token and the
pairs that each head will keep, and gives one list of scores per head: the lowest go,
+inf stays, -inf goes whatever room there is. Formulas are written as sums over
histories, although an implementation would carry running sums.
"""

import dataclasses
import itertools

import numpy as np


@dataclasses.dataclass(eq=False)
class Pair:
    """One key-value pair of one head and what it has received.

    Attributes:
      raw: the key before rotary positions; `key` as attention sees it.
      added: [G, M], what the value adds to the residual stream under a weight of 1.
      weights: query position -> the weights [G] that it gave this pair.
    """

    position: int
    token: int
    raw: np.ndarray
    value: np.ndarray
    added: np.ndarray
    key: np.ndarray | None = None
    weights: dict = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(eq=False)
class Query:
    """The G queries of one token: as attention sees them, before RoPE, what they gave.

    Attributes:
      weights: [G, n], to all the pairs that were held and visible at the time.
    """

    position: int
    q: np.ndarray
    raw: np.ndarray
    weights: np.ndarray


@dataclasses.dataclass(eq=False)
class Head:
    """One KV head: the pairs it holds in rising order, every query it ever had.

    Attributes:
      prompt: tokens of the prompt read so far.
      at_prompt: the pairs that were held after the last of them.
      theta: base of the rotary angles.
    """

    pairs: list = dataclasses.field(default_factory=list)
    queries: list = dataclasses.field(default_factory=list)
    prompt: int = 0
    at_prompt: list = dataclasses.field(default_factory=list)
    theta: float = 10_000.0


def head_by_head(score):
    """A rule for a layer from `score(head, now, keep)` for one of its heads."""
    return lambda heads, now, keep: [
        score(head, now, n) for head, n in zip(heads, keep, strict=True)
    ]


# --- What the formulas have in common -------------------------------------------------


def mass(pair):
    """Sum of the weights received, averaged over the query heads."""
    return np.mean(list(pair.weights.values()), axis=1).sum()


def age(pair, now):
    """Tokens since the pair came, itself included: the queries that could see it."""
    return now + 1 - pair.position


def is_newest(pair, now, count):
    return age(pair, now) <= count


def softmax(x):
    e = np.exp(x - np.max(x))
    return e / e.sum()


def asked(head, window):
    """[queries, G, pairs]: weights of the last queries, over the pairs held now."""
    keys = np.array([pair.key for pair in head.pairs])
    rows = []
    for query in head.queries[-window:]:
        logits = query.q @ keys.T * keys.shape[1] ** -0.5
        for i, pair in enumerate(head.pairs):
            if pair.position > query.position:
                logits[:, i] = -np.inf
        rows.append([softmax(row) for row in logits])
    return np.array(rows)


def pooled(x, kernel, pool):
    """Of every element and its neighbours: the maximum, or the mean with zeros beyond
    the ends."""
    reach = kernel // 2
    near = [x[max(i - reach, 0) : i + reach + 1] for i in range(len(x))]
    return [max(part) if pool == "max" else sum(part) / kernel for part in near]


def pooled_where(among, x, kernel, pool):
    """`pooled` over the elements marked in `among`, the others None."""
    dense = iter(pooled([e for e, m in zip(x, among, strict=True) if m], kernel, pool))
    return [next(dense) if m else None for m in among]


def best(scores, pairs, count):
    """Indices of the `count` highest scores; among equals the newer pairs."""
    order = sorted(range(len(pairs)), key=lambda i: (scores[i], pairs[i].position))
    return set(order[len(order) - count :]) if count > 0 else set()


# --- Rules of positions ---------------------------------------------------------------


def recency():
    """The newest (Batch-Max, Algorithm 2, with a budget of 2)."""
    return head_by_head(lambda head, now, keep: [p.position for p in head.pairs])


def sliding_window(window=4096):
    """Mistral 7B, section 2: the last W tokens and nothing else."""
    return head_by_head(
        lambda head, now, keep: [
            p.position if is_newest(p, now, window) else -np.inf for p in head.pairs
        ]
    )


def streaming(sinks=4):
    """StreamingLLM 3.2: the first tokens and the newest."""
    return head_by_head(
        lambda head, now, keep: [
            np.inf if p.position < sinks else p.position for p in head.pairs
        ]
    )


# --- Rules of attention received ------------------------------------------------------


def average_attention():
    """Batch-Max 3.2: sum of the weights over the queries that could see the pair."""
    return head_by_head(
        lambda head, now, keep: [mass(p) / age(p, now) for p in head.pairs]
    )


def h2o(recent=0.5, sinks=0):
    """H2O, Algorithm 1: a share of what is kept, or so many pairs, is the newest, then
    heavy hitters."""

    def score(head, now, keep):
        window = recent if recent > 1 else int(recent * (keep - sinks))
        pinned = lambda p: p.position < sinks or is_newest(p, now, window)
        return [np.inf if pinned(p) else mass(p) for p in head.pairs]

    return head_by_head(score)


def h2o_sinks(recent=0.5, sinks=4):
    """H2O, and the first tokens of StreamingLLM."""
    return h2o(recent, sinks)


def roco(spread=0.3, recent=10, sinks=0):
    """RoCo 4.2, EasyKV: of those with the lowest deviations, the lowest means go."""

    def score(head, now, keep):
        means, deviations = [], []
        for p in head.pairs:
            w = np.mean(list(p.weights.values()), axis=1)
            mean = w.sum() / age(p, now)
            variance = (w * w).sum() / age(p, now) - mean * mean
            known = not is_newest(p, now, recent) and p.position >= sinks
            means.append(mean)
            deviations.append(max(variance, 0) ** 0.5 if known else np.inf)
        feasible = keep - int(spread * keep) - sinks
        feasible = max(feasible, len(head.pairs) - keep)  # as many as have to go
        safe = best(deviations, head.pairs, len(head.pairs) - feasible)
        return [np.inf if i in safe else m for i, m in enumerate(means)]

    return head_by_head(score)


def tova(shared=True):
    """TOVA 3.2: the weights of the last query, over all heads of the layer."""

    def rule(heads, now, keep):
        last = [[p.weights[now].mean() for p in head.pairs] for head in heads]
        if not shared:
            return last
        mean = [sum(column) / len(heads) for column in zip(*last, strict=True)]
        return [mean for _ in heads]

    return rule


def scissorhands(history=400, recent=10):
    """Scissorhands, Algorithm 2: how often a pair got less than an even share."""

    def score(head, now, keep):
        scores = []
        for p in head.pairs:
            low = 0
            for query, w in p.weights.items():
                if query > now - history and w.mean() < 1 / (query + 1):
                    low += 1
            scores.append(np.inf if is_newest(p, now, recent) else -low)
        return scores

    return head_by_head(score)


def scissorhands_released(heavy=100, history=100, recent=10):
    """Scissorhands' code: who was among the heaviest of some recent query."""

    def score(head, now, keep):
        least = {  # the smallest of each query's `heavy` largest weights
            query.position: sorted(query.weights.mean(0))[-heavy:][0]
            for query in head.queries[-history:]
        }
        scores = []
        for p in head.pairs:
            votes = [least.get(q, np.inf) <= w.mean() for q, w in p.weights.items()]
            often = sum(votes) or -np.inf
            scores.append(np.inf if is_newest(p, now, recent) else often)
        return scores

    return head_by_head(score)


# --- Rules of the last queries --------------------------------------------------------


def snapkv(window=32, kernel=7, pool="max", group="pool_first"):
    """SnapKV, sections 3 and 4: the weights of the last queries, pooled."""

    def score(head, now, keep):
        weights = asked(head, window).mean(axis=0)  # [G, pairs]
        before = [not is_newest(p, now, window) for p in head.pairs]
        rows = weights if group == "pool_first" else [weights.mean(axis=0)]
        rows = [pooled_where(before, row, kernel, pool) for row in rows]
        return [
            sum(column) / len(rows) if old else np.inf
            for old, column in zip(before, zip(*rows, strict=True), strict=True)
        ]

    return head_by_head(score)


def chunk_kv(size=10, window=32):
    """ChunkKV, Algorithm 1: chunks of the text by the weights of the last queries."""

    def rule(heads, now, keep):
        weights = np.mean([asked(h, window).mean(axis=(0, 1)) for h in heads], axis=0)
        pairs = heads[0].pairs  # the same tokens in all heads, as all choose the same
        chunks = {}
        for p, w in zip(pairs, weights, strict=True):
            pinned = is_newest(p, now, window)
            chunks.setdefault(p.position // size, []).append(np.inf if pinned else w)
        scores = [np.mean(chunks[p.position // size]) for p in pairs]
        return [scores for _ in heads]

    return rule


def r_kv(window=8, kernel=7, weight=0.1, alike=0.5):
    """R-KV, section 3: importance to the last queries against redundancy of keys."""

    def score(head, now, keep):
        pairs, keys = head.pairs, np.array([p.key for p in head.pairs])
        old = [i for i, p in enumerate(pairs) if not is_newest(p, now, window)]
        if not old:
            return [np.inf] * len(pairs)
        rows = []
        for query in head.queries[-window:]:
            logits = np.max(query.q @ keys[old].T, axis=0) * keys.shape[1] ** -0.5
            rows.append(softmax(logits))
        importance = pooled(list(np.mean(rows, axis=0)), kernel, "max")
        unit = keys / np.linalg.norm(keys, axis=1, keepdims=True)
        cosine = unit @ unit.T
        for i in range(len(pairs)):
            cosine[i, i] = 0
            same = [j for j in range(len(pairs)) if cosine[i, j] > alike]
            if same:
                cosine[i, same[-1]] = 0  # the newest of the alike is no repetition
        redundancy = softmax(cosine.sum(axis=0) / len(pairs))
        scores = [np.inf] * len(pairs)
        for i, important in zip(old, importance, strict=True):
            scores[i] = weight * important - (1 - weight) * redundancy[i]
        return scores

    return head_by_head(score)


# --- Rules of keys and values ---------------------------------------------------------


def key_diff():
    """KeyDiff, section 4: minus the cosine to the mean of the normalised keys."""

    def score(head, now, keep):
        unit = [p.key / np.linalg.norm(p.key) for p in head.pairs]
        anchor = np.mean(unit, axis=0)
        return [-float(u @ anchor) / np.linalg.norm(anchor) for u in unit]

    return head_by_head(score)


def key_norm():
    """Devoto et al. 2024, section 3: small norms stay."""
    return head_by_head(
        lambda head, now, keep: [-np.linalg.norm(p.key) for p in head.pairs]
    )


def lag_kv(sinks=16, lag=128, ranked=True):
    """LagKV, section 3: what stands out from the partition that follows."""

    def spread(part, reference):
        low, high = reference.min(axis=0), reference.max(axis=0)
        return softmax(((part - low) / (high - low)).std(axis=1, ddof=1))

    def score(head, now, keep):
        scores = {p: np.inf if p.position < sinks else 1 for p in head.pairs}
        rest = [p for p in head.pairs if p.position >= sinks]
        whole = len(rest) // lag
        parts = [rest[i * lag : (i + 1) * lag] for i in range(whole)]
        for part, following in itertools.pairwise(parts):
            keys = [np.array([p.key for p in side]) for side in (part, following)]
            values = [np.array([p.value for p in side]) for side in (part, following)]
            mean = (spread(*keys) + spread(*values)) / 2
            for p, s in zip(part, mean, strict=True):
                scores[p] = sum(mean < s) / lag if ranked else s
        return [scores[p] for p in head.pairs]

    return head_by_head(score)


def expected_attention(
    future=512, sinks=4, covariance=True, value_norm=True, epsilon=0.0
):
    """Expected Attention, section 3: Gaussian queries at the next positions."""

    def score(head, now, keep):
        if now < sinks:
            return [np.inf] * len(head.pairs)
        queries = [q.raw for q in head.queries if q.position >= sinks]
        queries = np.array(queries)  # [queries, G, D]
        depth = queries.shape[2]
        turn = np.mean(
            [
                rotate(np.eye(depth, dtype=queries.dtype), now + 1 + f, head.theta)
                for f in range(future)
            ],
            axis=0,
        )
        later = [p for p in head.pairs if p.position >= sinks]
        total = np.zeros(len(later), queries.dtype)
        for g in range(queries.shape[1]):
            mean = queries[:, g].mean(axis=0)
            away = queries[:, g] - mean
            spread = turn.T @ (away.T @ away / len(away)) @ turn
            logits = []
            for p in later:
                logit = (mean @ turn) @ p.key * depth**-0.5
                if covariance:
                    logit += p.key @ spread @ p.key / (2 * depth)
                logits.append(logit)
            total += softmax(np.array(logits))
        scores = dict.fromkeys(head.pairs, np.inf)
        for p, t in zip(later, total, strict=True):
            size = np.linalg.norm(p.value) if value_norm else 1
            scores[p] = (t / queries.shape[1] + epsilon) * size
        return [scores[p] for p in head.pairs]

    return head_by_head(score)


def criticalkv(rule, first=0.5, epsilon=1e-4):
    """CriticalKV, Algorithm 1: the rule's first choices, then by size of the value."""

    def both(heads, now, keep):
        result = []
        for head, base, n in zip(heads, rule(heads, now, keep), keep, strict=True):
            pinned = best(base, head.pairs, int(first * n))
            sizes = [np.abs(p.added).sum(axis=1).mean() for p in head.pairs]
            result.append(
                [
                    np.inf if i in pinned else (s + epsilon) * size
                    for i, (s, size) in enumerate(zip(base, sizes, strict=True))
                ]
            )
        return result

    return both


# --- Rules that find out about a head or a layer first --------------------------------


def fastgen_sets(pairs, now, sinks, special, punctuation, heavy, local):
    """The sets S1 .. S4 of pairs as they are now; S5 is all of them."""
    s1 = {p for p in pairs if p.position < sinks or p.token in special}
    s2 = s1 | {p for p in pairs if p.token in punctuation}
    others = [p for p in pairs if p not in s2]
    weights = [mass(p) for p in others]
    s3 = s2 | {others[i] for i in best(weights, others, min(heavy, len(others)))}
    s4 = s3 | {p for p in pairs if is_newest(p, now, local)}
    return s1, s2, s3, s4


def fastgen_choice(head, recover, local, options):
    """FastGen, Algorithm 1: 0 .. 4, the first set that recovers enough of the prompt.

    Attention counts that queries of the prompt gave to the pairs held at its end; in
    the fourth set a query has a window of its own.
    """
    end = head.prompt

    def attention(p, queries):
        return sum(w.mean() for query, w in p.weights.items() if query < queries)

    held = [dataclasses.replace(p) for p in head.at_prompt]
    for p in held:  # what decoding added does not count
        p.weights = {query: w for query, w in p.weights.items() if query < end}
    s1, s2, s3, _ = fastgen_sets(held, end - 1, local=local, **options)
    everything = sum(attention(p, end) for p in held)
    near = sum(attention(p, p.position + local) for p in held if p not in s3)
    shares = [sum(attention(p, end) for p in s) / everything for s in (s1, s2, s3)]
    shares.append(shares[2] + near / everything)
    return next((i for i, share in enumerate(shares) if share >= recover), 4)


def fastgen(recover=0.95, sinks=4, special=(), punctuation=(), heavy=64, local=64):
    """FastGen, section 4: the cheapest cache that recovers a head's attention."""
    options = {
        "sinks": sinks,
        "special": special,
        "punctuation": punctuation,
        "heavy": heavy,
    }

    def score(head, now, keep):
        choice = fastgen_choice(head, recover, local, options)
        sets = (*fastgen_sets(head.pairs, now, local=local, **options), head.pairs)
        scores = []
        for p in head.pairs:
            average = mass(p) / age(p, now) if p in sets[choice] else -np.inf
            scores.append(np.inf if p.position < sinks else average)
        return scores

    return head_by_head(score)


def simlayerkv(threshold=0.9, sinks=4, recent=1024, queries=32, chosen=None):
    """SimLayerKV, section 3: lazy layers keep sinks and a window, the others all.

    `chosen` is a list that notes for every choice whether the layer was lazy.
    """

    def rule(heads, now, keep):
        shares = []
        for head in heads:
            weights = asked(head, queries)
            for query, rows in zip(head.queries[-queries:], weights, strict=True):
                lazily = [
                    p.position < sinks or p.position > query.position - recent
                    for p in head.pairs
                ]
                shares.extend(row[lazily].sum() for row in rows)
        lazy = np.mean(shares) > threshold
        if chosen is not None:
            chosen.append(bool(lazy))

        def score(p):
            if p.position < sinks:
                return np.inf
            return -np.inf if lazy and not is_newest(p, now, recent) else p.position

        return [[score(p) for p in head.pairs] for head in heads]

    return rule


# --- Rules made of rules --------------------------------------------------------------


def protect(rule, sinks=4, recent=32):
    """The first and the newest tokens stay."""

    def rule_too(heads, now, keep):
        pinned = lambda p: p.position < sinks or is_newest(p, now, recent)
        return [
            [np.inf if pinned(p) else s for p, s in zip(h.pairs, scores, strict=True)]
            for h, scores in zip(heads, rule(heads, now, keep), strict=True)
        ]

    return rule_too


def mix(a, b, weight=0.5):
    """weight * a + (1 - weight) * b, each stretched over 0 .. 1."""

    def unit(scores):
        finite = [s for s in scores if np.isfinite(s)]
        if not finite or min(finite) == max(finite):
            return [s if np.isinf(s) else 0.0 for s in scores]
        low, high = min(finite), max(finite)
        return [s if np.isinf(s) else (s - low) / (high - low) for s in scores]

    def join(x, y):
        if np.inf in (x, y):
            return np.inf
        return -np.inf if -np.inf in (x, y) else weight * x + (1 - weight) * y

    def both(heads, now, keep):
        return [
            [join(x, y) for x, y in zip(unit(xs), unit(ys), strict=True)]
            for xs, ys in zip(a(heads, now, keep), b(heads, now, keep), strict=True)
        ]

    return both


def smooth(rule, kernel=7, pool="average"):
    """Scores pooled over neighbours in the text (SnapKV 4.2); pins stay as they are."""

    def smoothed(scores):
        finite = [bool(np.isfinite(s)) for s in scores]
        near = pooled_where(finite, scores, kernel, pool)
        return [n if f else s for f, n, s in zip(finite, near, scores, strict=True)]

    return lambda heads, now, keep: [smoothed(s) for s in rule(heads, now, keep)]


def chunked(rule, size=10):
    """ChunkKV 3.2: the mean score of what is held of a chunk of the text."""

    def rule_too(heads, now, keep):
        result = []
        for head, scores in zip(heads, rule(heads, now, keep), strict=True):
            chunks = {}
            for p, s in zip(head.pairs, scores, strict=True):
                chunks.setdefault(p.position // size, []).append(s)
            result.append([np.mean(chunks[p.position // size]) for p in head.pairs])
        return result

    return rule_too


def shared_heads(rule):
    """One choice for all heads: the mean of their scores."""

    def rule_too(heads, now, keep):
        columns = zip(*rule(heads, now, keep), strict=True)
        mean = [sum(column) / len(heads) for column in columns]
        return [mean for _ in heads]

    return rule_too


def per_head(rule, total=0.5, floor=0.2):
    """Ada-KV, Algorithm 1: the heads' best pairs share a part of the layer's slots.

    No head holds more than its own room; where nothing has to go, all stays.
    """

    def rule_too(heads, now, keep):
        scores = rule(heads, now, keep)
        full = [n for head, n in zip(heads, keep, strict=True) if len(head.pairs) > n]
        if not full:
            return scores
        n = max(full)
        parts = [int(total * n)] * len(keep)
        safe, rivals = set(), []
        for h, head in enumerate(heads):
            ranked = sorted(
                best(scores[h], head.pairs, n),
                key=lambda i: (scores[h][i], head.pairs[i].position),
                reverse=True,
            )
            sure = int(floor * parts[h])
            safe |= {(h, i) for i in ranked[:sure]}
            rivals += [(scores[h][i], h, i) for i in ranked[sure:]]
        rivals.sort(reverse=True)
        safe |= {(h, i) for _, h, i in rivals[: sum(parts) - len(safe)]}
        return [
            [s if (h, i) in safe else -np.inf for i, s in enumerate(row)]
            for h, row in enumerate(scores)
        ]

    rule_too.of_whole_row = True
    return rule_too


# --- Algorithm 1 ----------------------------------------------------------------------


class Layer:
    """The attention of one layer for one row, under a budget.

    Args:
      rule: which pairs stay; None evicts nothing.
      budget: pairs per head, or one number for each.
      evict: pairs per head that one eviction drops.
      out: [K, G, D, M], the output projection.
      theta: base of the rotary angles.
      phases: when pairs go, in the words of `kvjax.Schedule`.
      slots: whether angles are those of positions in the cache (StreamingLLM 3.2).
      window: tokens that a query sees, itself included; 0 for all. What has left it is
        dropped after every block.
    """

    def __init__(
        self,
        rule,
        budget,
        evict,
        out,
        theta,
        phases="prefill_and_decode",
        slots=False,
        window=0,
    ):
        self.rule, self.evict, self.out, self.window = rule, evict, out, window
        self.phases, self.slots, self.seen = phases, slots, 0
        self.heads = [Head(theta=theta) for _ in out]
        self.budgets = np.broadcast_to(budget, len(out)).tolist()

    def step(self, q, k, v, tokens, prompt=True):
        """Attends and evicts for a block: q [K, G, T, D], k and v [K, T, D], before
        rotary positions; returns [K, G, T, D]."""
        phases = "prefill_and_decode", "prefill_only" if prompt else "decode_only"
        if self.rule and self.phases in phases:
            drop = []
            for head, budget in zip(self.heads, self.budgets, strict=True):
                held = len(head.pairs)
                full = held + len(tokens) > budget
                drop.append(held - (budget - self.evict) if full else 0)
            self._drop(drop)
        result = [
            self._attend(head, *parts, tokens)
            for head, *parts in zip(self.heads, q, k, v, self.out, strict=True)
        ]
        self.seen += len(tokens)
        for head in self.heads:
            if self.window:  # no later query sees the others
                head.pairs = [
                    p for p in head.pairs if is_newest(p, self.seen - 1, self.window)
                ]
            if prompt:
                head.prompt, head.at_prompt = self.seen, list(head.pairs)
        return np.array(result)

    def compact(self):
        """Between prompt and decoding: to what the schedule lets into decoding."""
        drop = []
        for head, budget in zip(self.heads, self.budgets, strict=True):
            held = len(head.pairs)
            most = budget - self.evict * (self.phases == "decode_only")
            over = held >= budget if self.phases == "decode_only" else held > most
            drop.append(held - most if over else 0)
        self._drop(drop, always=True)

    def kept(self):
        return [[pair.position for pair in head.pairs] for head in self.heads]

    def _drop(self, drop, always=False):
        """Each head loses its lowest scores, the older of equals first, and -inf.

        A head with nothing to lose keeps its -inf, unless the rule is of whole rows.
        """
        if not any(drop) and not always:
            return
        always = always or getattr(self.rule, "of_whole_row", False)
        keep = [len(h.pairs) - d for h, d in zip(self.heads, drop, strict=True)]
        scores = self.rule(self.heads, self.seen - 1, keep)
        for head, row, d in zip(self.heads, scores, drop, strict=True):
            if d == 0 and not always:
                continue
            worst = sorted(
                range(len(row)), key=lambda i: (row[i], head.pairs[i].position)
            )[:d]
            head.pairs = [
                pair
                for i, pair in enumerate(head.pairs)
                if i not in worst and row[i] != -np.inf
            ]

    def _attend(self, head, q, k, v, out, tokens):
        first = len(head.pairs)
        for t, token in enumerate(tokens):
            added = v[t] @ out
            pair = Pair(self.seen + t, int(token), k[t], v[t], added)
            head.pairs.append(pair)
        angles = [i if self.slots else p.position for i, p in enumerate(head.pairs)]
        for pair, angle in zip(head.pairs, angles, strict=True):
            pair.key = rotate(pair.raw, angle, head.theta)
        result = np.zeros_like(q)
        for t in range(len(tokens)):
            near = self.window or self.seen + t + 1
            visible = head.pairs[: first + t + 1]
            visible = [p for p in visible if is_newest(p, self.seen + t, near)]
            query = rotate(q[:, t], angles[first + t], head.theta)
            keys = np.array([pair.key for pair in visible])
            logits = query @ keys.T * keys.shape[1] ** -0.5
            w = np.array([softmax(row) for row in logits])
            result[:, t] = w @ np.array([pair.value for pair in visible])
            head.queries.append(Query(self.seen + t, query, q[:, t], w))
            for i, pair in enumerate(visible):
                pair.weights[self.seen + t] = w[:, i]
        return result


class Decoder:
    """A Llama in float64 that evicts by Algorithm 1, for one prompt.

    `cosines` has, for every layer and token, that of the stream around attention.

    Args:
      budget: pairs per head: one number, or one for each head of each layer.
    """

    def __init__(self, spec, params, rule, budget, p):
        self.spec, self.params = spec, _float64(params)
        self.first, self.p = budget and np.min(budget), p
        sizes = budget if np.iterable(budget) else [budget] * spec.num_layers
        self.layers = [
            Layer(rule, *how, spec.rope_theta, window=spec.sliding_window(index))
            for index, how in enumerate(
                (size, p, self._out(layer))
                for size, layer in zip(sizes, self.params["layers"], strict=True)
            )
        ]
        self.cosines = [[] for _ in self.layers]

    def _out(self, layer):
        """[K, G, D, M]"""
        spec = self.spec
        shape = spec.num_kv_heads, spec.queries_per_kv_head, spec.head_dim, -1
        return layer["out"].T.reshape(shape)

    def prefill(self, tokens):
        """Algorithm 1: the first |kv| tokens fill the smallest head's cache, then p."""
        logits = self.step(tokens[: self.first])
        for start in range(self.first or len(tokens), len(tokens), self.p):
            logits = self.step(tokens[start : start + self.p])
        return logits

    def step(self, tokens):
        """Feeds a block; returns the logits after its last token."""
        x, eps = self.params["embed"][np.asarray(tokens)], self.spec.norm_eps
        for cache, layer, cosines in zip(
            self.layers, self.params["layers"], self.cosines, strict=True
        ):
            before, h = x, _rms(x, layer["attn_norm"], eps)
            shape = (
                len(h),
                self.spec.num_kv_heads,
                self.spec.queries_per_kv_head + 2,
                -1,
            )
            parts = np.einsum("tkpd->kptd", (h @ layer["qkv"].T).reshape(shape))
            mixed = cache.step(parts[:, :-2], parts[:, -2], parts[:, -1], tokens)
            x = x + np.einsum("kgtd,kgdm->tm", mixed, self._out(layer))
            cosines += [
                a @ b / np.sqrt((a @ a) * (b @ b))
                for a, b in zip(before, x, strict=True)
            ]
            h = _rms(x, layer["mlp_norm"], eps)
            gate, up = np.split(h @ layer["gate_up"].T, 2, axis=-1)
            x = x + (gate / (1 + np.exp(-gate)) * up) @ layer["down"].T
        x = _rms(x, self.params["final_norm"], eps)
        return x[-1] @ self.params["embed"].T

    def kept(self):
        return [layer.kept() for layer in self.layers]


def rotate(x, position, theta):
    """The last axis of x turned by the angles of one position (Su et al. 2021)."""
    half = x.shape[-1] // 2
    angle = position * theta ** (-np.arange(half) / half)
    cos, sin = np.cos(angle).astype(x.dtype), np.sin(angle).astype(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def _float64(tree):
    if isinstance(tree, dict):
        return {key: _float64(value) for key, value in tree.items()}
    if isinstance(tree, tuple):
        return tuple(_float64(value) for value in tree)
    return np.asarray(tree, np.float64)


def _rms(x, weight, eps):
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps) * weight
