"""Algorithm 1 and the rules in NumPy, one row, one head at a time, from the papers.

Independent of kvjax: it takes a model's weights as plain arrays and keeps Python lists
of pairs. Slow and obvious.
"""

import dataclasses

import numpy as np


@dataclasses.dataclass
class Pair:
    """One key-value pair of one head and what it has received."""

    position: int
    key: np.ndarray
    value: np.ndarray
    mass: float = 0.0


def average_attention(pairs, now, keep):
    """Batch-Max 3.2: sum of the weights over the queries that saw the pair."""
    return [pair.mass / (now + 1 - pair.position) for pair in pairs]


def h2o(pairs, now, keep):
    """H2O: the newest half of what is kept stays, then the heaviest hitters."""
    newest = {pair.position for pair in pairs if pair.position > now - keep // 2}
    return [np.inf if p.position in newest else p.mass for p in pairs]


def streaming(pairs, now, keep):
    """StreamingLLM: four sinks and the newest."""
    return [np.inf if pair.position < 4 else pair.position for pair in pairs]


def recency(pairs, now, keep):
    return [pair.position for pair in pairs]


def key_diff(pairs, now, keep):
    """KeyDiff: minus the cosine to the mean of the normalised keys."""
    unit = [pair.key / np.linalg.norm(pair.key) for pair in pairs]
    anchor = np.mean(unit, axis=0)
    return [-float(u @ anchor) / np.linalg.norm(anchor) for u in unit]


class Decoder:
    """A Llama in float64 that evicts by Algorithm 1, for one prompt."""

    def __init__(self, spec, params, rule, budget, p):
        self.spec, self.rule, self.budget, self.p = spec, rule, budget, p
        self.params = _float64(params)
        heads = range(spec.num_kv_heads)
        self.cache = [[[] for _ in heads] for _ in range(spec.num_layers)]
        self.seen = 0

    def prefill(self, tokens):
        for start in range(0, len(tokens), self.p):
            logits = self.step(tokens[start : start + self.p])
        return logits

    def step(self, tokens):
        """Feeds a block; returns the logits after its last token."""
        positions = np.arange(self.seen, self.seen + len(tokens))
        x = self.params["embed"][np.asarray(tokens)]
        for index, layer in enumerate(self.params["layers"]):
            h = _rms(x, layer["attn_norm"], self.spec.norm_eps)
            x = x + self._attention(index, layer, h, positions)
            h = _rms(x, layer["mlp_norm"], self.spec.norm_eps)
            gate, up = h @ layer["gate_up"][:, 0], h @ layer["gate_up"][:, 1]
            x = x + (gate / (1 + np.exp(-gate)) * up) @ layer["down"]
        self.seen += len(tokens)
        x = _rms(x, self.params["final_norm"], self.spec.norm_eps)
        return x[-1] @ self.params["embed"].T

    def kept(self):
        return [
            [sorted(pair.position for pair in head) for head in layer]
            for layer in self.cache
        ]

    def _attention(self, index, layer, h, positions):
        out = 0.0
        group, depth = self.spec.group, self.spec.head_dim
        for head in range(self.spec.num_kv_heads):
            pairs = self.cache[index][head]
            if self.budget and len(pairs) + len(positions) > self.budget:
                pairs = self.cache[index][head] = self._evict(pairs)
            weights = layer["qkv"][:, head]
            keys = _rotate(h @ weights[:, group], positions, self.spec.rope_theta)
            values = h @ weights[:, group + 1]
            pairs.extend(
                Pair(int(p), k, v)
                for p, k, v in zip(positions, keys, values, strict=True)
            )
            where = np.array([pair.position for pair in pairs])
            all_keys = np.array([pair.key for pair in pairs])
            all_values = np.array([pair.value for pair in pairs])
            for g in range(group):
                q = _rotate(h @ weights[:, g], positions, self.spec.rope_theta)
                scores = q @ all_keys.T / np.sqrt(depth)
                scores[where[None, :] > positions[:, None]] = -np.inf
                w = np.exp(scores - scores.max(-1, keepdims=True))
                w /= w.sum(-1, keepdims=True)
                out = out + (w @ all_values) @ layer["out"][head, g]
                for pair, received in zip(pairs, w.sum(0), strict=True):
                    pair.mass += received / group
        return out

    def _evict(self, pairs):
        """Drops the p lowest scores; among equals the older goes first."""
        now = max(pair.position for pair in pairs)
        scores = self.rule(pairs, now, len(pairs) - self.p)
        order = sorted(range(len(pairs)), key=lambda i: (scores[i], pairs[i].position))
        return [pairs[i] for i in sorted(order[self.p :])]


def _float64(tree):
    if isinstance(tree, dict):
        return {key: _float64(value) for key, value in tree.items()}
    if isinstance(tree, tuple):
        return tuple(_float64(value) for value in tree)
    return np.asarray(tree, np.float64)


def _rms(x, weight, eps):
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps) * weight


def _rotate(x, positions, theta):
    half = x.shape[-1] // 2
    angle = positions[:, None] * theta ** (-np.arange(half) / half)[None, :]
    a, b = x[:, :half], x[:, half:]
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
