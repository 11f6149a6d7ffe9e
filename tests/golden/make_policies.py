"""Writes policies_kvpress.npz and policies_authors.npz: choices of other people's code.

    pip install torch==2.13.0 kvpress==0.5.5        # brings transformers 5.2.0
    python tests/golden/make_policies.py                        # the first file
    python tests/golden/make_policies.py --checkouts=DIR        # both

Needs nothing of kvjax. DIR holds checkouts by these names, at these commits (only the
functions named below are taken out of their files and run, on CPU; `git worktree add`
or `git archive` both do):

    EasyKV         github.com/DRSY/EasyKV                          a1d71cae
    H2O            github.com/FMInference/H2O                      ac75c2a8
    LagKV          github.com/AI-Lab-China-Merchants-Bank/LagKV    2a9d19e7
    R-KV           github.com/Zefan-Cai/R-KV                       d15c9767
    Scissorhands   github.com/lzcemma/Scissorhands                 d0bf444b
    SimLayerKV     github.com/sail-sg/SimLayerKV                   1fb6bda7
    SnapKV         github.com/FasterDecoding/SnapKV                e216ddc8
    cold-compress  github.com/AnswerDotAI/cold-compress            15bb3005

Every choice is the same on inputs disturbed by one part in a million (asserted here),
so a test may ask for equality.

policies_kvpress.npz, one layer (the second of two) of a random Llama, T=96 tokens, K=2
KV heads, G=3 query heads each (head h of transformers is [h // G, h % G]), D=8, M=48:

    tokens i32[T], rope_theta
    queries, raw_queries f32[1, K, G, T, D]   after and before RoPE
    keys (after RoPE), values f32[1, K, T, D]
    weights f32[1, K, G, T, T]                causal softmax(queries keys / sqrt(D))
    out f32[K, G, D, M]                       the output projection
    kept/<case>, kept/<case>@0.25 i32[K, n]   positions kept, sorted; 0.5 or 0.25 is
                                              the share that is dropped
    scores/<case>[@0.25] f32[K, T]            where the press has a score; @0.25 only
                                              where the score depends on the ratio
    score/simlayerkv f32, threshold/simlayerkv_{lazy,busy} f32

Cases and their settings are in `presses`.

policies_authors.npz, on the same arrays. "Mean" heads are the K KV heads with weights
averaged over G; "query" heads are the K*G query heads, each with its KV head's keys.
A trace has one entry per moment; decoding feeds positions one by one (teacher forcing:
position p brings its own query, key and value), attention is over what is held.

    trace/h2o i32[9, K, 24]             mean heads. heavy=12, recent=12, prompt of 88
                                        tokens, then after each of positions 88..95
    kept/h2o i32[K, 24]                 the same, prompt of 96
    kept/snapkv_{avg,max}pool i32[K*G, 44]  query heads. window 8, kernel 5
    trace/easykv_decoding_<policy>      mean heads. i32[40, K, 56]: prompt of 16 (always
                                        kept) and a budget of 40; what is held when
                                        positions 56..95 arrive
    trace/easykv_encoding_<policy>      mean heads. i32[7, K, 48]: budget 40, stride 8;
                                        what is held when 48, 56, .., 88 arrive and at
                                        the end; `_attention`: keep_attention=True
    visible/scissorhands bool[K*G, T, T]    query heads. lru_window=16,
                                        position_window=10, start=32: keys that query i
                                        still sees. Their threshold is itself a weight:
                                        compare with it times 1 + 1e-6
    slots/<cold-compress case>          mean heads. i32[N, K, 40]: position in each slot
                                        after the prompt and after each position
                                        decoded; 4 globals, recent 10. `scissorhands`:
                                        votes, history 16, prompt 40; `heavy_hitter`:
                                        sums, prompt 40; `heavy_hitter_88`: sums, prompt
                                        of 88 compressed first
    recovered/<fastgen case> f32[S, K], strategy/<case>@<share> i32[K],
    kept/<case>@<share> bool[K, T]      mean heads. S strategies of fastgen.yaml or
                                        hybrid.yaml, room for 128 tokens
    fastgen/special, fastgen/punctuation    the token ids that played these parts
    score/simlayerkv_decode f32         query heads, last token; 1024 set to 16
    score/simlayerkv_prefill f32[K*G, T]    query heads, per query; 512 set to 12
    kept/rkv i32[K, 40], scores/rkv, similarity/rkv, attention/rkv f32[K, 88]
                                        all queries of a KV head. budget 40, window 8
    kept/lagkv i32[K, 64]               sink 4, lag 16, ratio (kept) 0.5, all at once
    trace/lagkv_steps i32[33, K, 64]    64 tokens at once, then one by one; -1 pads
"""

import __future__

import abc
import argparse
import ast
import collections
import functools
import itertools
import math
import pathlib
import types

import kvpress
import numpy as np
import torch
import torch.nn.functional as F
import transformers
from kvpress.utils import get_prerope_query_states
from torch import nn
from transformers.models.llama import modeling_llama

HERE = pathlib.Path(__file__).parent
T, K, G, D, M = 96, 2, 3, 8, 48
HEADS = K * G
SHARED = ("queries", "keys", "values")
SEED = 866  # of the tokens: no near ties, and none at all where pooling makes them
NOISE = 1e-6  # relative; choices must not change under it
GAP = 1e-4  # relative; between the last score kept and the first dropped

# ---------------------------------------------------------------- kvpress


def build_model(noise: float = 0.0) -> transformers.LlamaForCausalLM:
    config = transformers.LlamaConfig(
        hidden_size=M,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=K,
        head_dim=D,
        vocab_size=50,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager"
    ).eval()
    for name, value in model.named_parameters():
        sharp = 1.6 if "q_proj" in name or "k_proj" in name else 1.0
        scale = 0.3 if "norm" in name else sharp / math.sqrt(value.shape[-1])
        center = 1.0 if "norm" in name else 0.0
        value.copy_(center + scale * torch.randn_like(value))
    torch.manual_seed(8)
    for value in model.parameters():
        value.mul_(1 + noise * torch.randn_like(value))
    return model


class Recorder(kvpress.ScorerPress):
    """Drops nothing and remembers what the last layer's hook was given."""

    def compress(self, module, hidden_states, keys, values, attentions, kwargs):
        self.seen = (module, hidden_states, keys, values, attentions, kwargs)
        return keys, values


def prefill(model, press, tokens: torch.Tensor) -> torch.Tensor:
    """The second layer's keys after a forward pass with the press on the model."""
    cache = transformers.DynamicCache()
    chunked = isinstance(press, kvpress.ChunkKVPress)  # refuses attention weights
    model.set_attn_implementation("sdpa" if chunked else "eager")
    with press(model):
        model(tokens[None], past_key_values=cache)
    return cache.layers[1].keys[0]


def match(kept: torch.Tensor, keys: torch.Tensor) -> np.ndarray:
    """Sorted positions of the rows of `kept` [K, n, D] among `keys` [K, T, D]."""
    same = (kept[:, :, None] - keys[:, None]).abs().amax(-1) < 1e-4
    assert (same.sum(-1) == 1).all()
    return np.sort(same.int().argmax(-1).numpy().astype(np.int32), -1)


def presses(ratio: float) -> dict:
    """The presses that drop a share `ratio` of the pairs, by case."""
    snap = lambda: kvpress.SnapKVPress(ratio, window_size=8, kernel_size=5)
    norm = lambda: kvpress.KnormPress(ratio)
    expected = functools.partial(
        kvpress.ExpectedAttentionPress,
        ratio,
        n_future_positions=64,
        n_sink=4,
        epsilon=0.0,
    )
    lag = functools.partial(kvpress.LagKVPress, ratio, n_sink=4, lag_size=16)
    chunk = functools.partial(kvpress.ChunkKVPress, chunk_length=8)
    critical = functools.partial(
        kvpress.CriticalKVPress, epsilon=1e-4, first_stage_ratio=0.5
    )
    return {
        "streaming": kvpress.StreamingLLMPress(ratio, n_sink=4),
        "tova": kvpress.TOVAPress(ratio),
        "snapkv": snap(),
        "observed_attention": kvpress.ObservedAttentionPress(ratio),
        "keydiff": kvpress.KeyDiffPress(ratio),
        "knorm": norm(),
        "expected_attention": expected(use_covariance=True, use_vnorm=True),
        "expected_attention_mean": expected(use_covariance=False, use_vnorm=False),
        "lagkv": lag(cross_scoring=False),
        "lagkv_cross": lag(cross_scoring=True),
        "chunkkv_snapkv": chunk(snap()),
        "chunkkv_knorm": chunk(norm()),
        "criticalkv_snapkv": critical(snap()),
        "criticalkv_knorm": critical(norm()),
        "criticalkv_expected": critical(expected(use_vnorm=False)),
    }


def shared_arrays(model, seen) -> dict[str, torch.Tensor]:
    module, hidden, keys, values, weights, kwargs = seen
    raw = get_prerope_query_states(module, hidden)
    cos, sin = kwargs["position_embeddings"]
    queries, _ = modeling_llama.apply_rotary_pos_emb(raw, raw, cos, sin)
    grouped = lambda x: x.reshape(1, K, G, *x.shape[2:])
    return {
        "queries": grouped(queries),
        "raw_queries": grouped(raw),
        "keys": keys,
        "values": values,
        "weights": grouped(weights),
        "out": module.o_proj.weight.T.reshape(K, G, D, M),
    }


def check_gap(case: str, scores: torch.Tensor, n: int) -> None:
    """Refuses near ties between the last pair kept and the first dropped."""
    ranked = scores.sort(-1, descending=True).values
    last, first = ranked[:, n - 1], ranked[:, n]
    gap = ((last - first) / torch.maximum(last.abs(), first.abs())).min()
    assert gap > GAP, f"{case}: gap {gap:.1e}"


def run_presses(model, tokens, seen) -> dict[str, np.ndarray]:
    found = {}
    for ratio, suffix in ((0.5, ""), (0.25, "@0.25")):
        for case, press in presses(ratio).items():
            kept = match(prefill(model, press, tokens), seen[2][0])
            found[f"kept/{case}{suffix}"] = kept
            if hasattr(press, "score"):
                scores = press.score(*seen)[0]
                if case != "lagkv":  # ranks; lagkv_cross has what they rank
                    check_gap(case + suffix, scores, kept.shape[1])
                known = found.get(f"scores/{case}")
                if known is None or not np.array_equal(known, scores):
                    found[f"scores/{case}{suffix}"] = scores.numpy()
    return found


def run_simlayerkv(model, tokens, seen) -> dict[str, np.ndarray]:
    """Both sides of the threshold, and the number that is compared with it."""
    module, hidden, keys, *_, kwargs = seen
    weights = kvpress.SnapKVPress.compute_window_attention(
        module, hidden, keys, 1, kwargs["position_embeddings"]
    ).mean((0, 1, 2))
    score = (weights[:4].sum() + weights[-16:].sum()).item()
    found = {"score/simlayerkv": np.float32(score)}
    for case, threshold in (("lazy", score - 1e-3), ("busy", score + 1e-3)):
        press = kvpress.SimLayerKVPress(threshold, n_last=1, n_recent=16, n_initial=4)
        kept = match(prefill(model, press, tokens), keys[0])
        assert (kept.shape[1] == T) == (case == "busy")
        found[f"kept/simlayerkv_{case}"] = kept
        found[f"threshold/simlayerkv_{case}"] = np.float32(threshold)
    return found


def kvpress_vectors(noise: float = 0.0) -> dict[str, np.ndarray]:
    model = build_model(noise)
    tokens = torch.randint(50, (T,), generator=torch.Generator().manual_seed(SEED))
    recorder = Recorder()
    prefill(model, recorder, tokens)
    arrays = shared_arrays(model, recorder.seen)
    return {
        "tokens": tokens.numpy().astype(np.int32),
        "rope_theta": np.float32(10000.0),
        **{name: value.numpy() for name, value in arrays.items()},
        **run_presses(model, tokens, recorder.seen),
        **run_simlayerkv(model, tokens, recorder.seen),
    }


# ---------------------------------------------------------------- authors' code


class Data(types.SimpleNamespace):
    """queries [K, G, T, D], keys and values [K, T, D], tokens [T]."""


def load_data(noise: float = 0.0) -> Data:
    with np.load(HERE / "policies_kvpress.npz") as file:
        arrays = {name: torch.tensor(file[name][0]) for name in SHARED}
        tokens = torch.tensor(file["tokens"]).long()
    torch.manual_seed(10)
    for value in arrays.values():
        value.mul_(1 + noise * torch.randn_like(value))
    return Data(**arrays, tokens=tokens)


def take(path: pathlib.Path, names: str, constants=None, **env) -> dict:
    """Runs the named top-level definitions of a file and returns their namespace.

    `constants` are swapped in their source, `env` stands in for their imports.
    """
    wanted = names.split()
    tree = ast.parse(path.read_text())
    tree.body = [node for node in tree.body if getattr(node, "name", 0) in wanted]
    assert len(tree.body) == len(wanted), path
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node.value in (constants or {}):
            node.value = constants[node.value]
    env = {"torch": torch, "nn": nn, "F": F, "math": math, "print": quiet} | env
    flags = __future__.annotations.compiler_flag
    exec(compile(tree, str(path), "exec", flags=flags), env)
    return env


def quiet(*_, **__) -> None:
    """Stands in for print."""


def attend(data: Data, rows: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
    """Causal weights [K, G, R, C] of queries `rows` [R] on positions `held` [K, C]."""
    keys = data.keys.gather(1, held[..., None].expand(-1, -1, D))
    logits = torch.einsum("kgrd,kcd->kgrc", data.queries[:, :, rows], keys)
    seen = held[:, None, None] <= rows[:, None]
    return (logits / math.sqrt(D)).masked_fill(~seen, -torch.inf).softmax(-1)


def tag(held: torch.Tensor) -> torch.Tensor:
    """Stand-ins for keys or values [1, K, C, D] that carry their positions."""
    return held[None, ..., None].expand(-1, -1, -1, D).float()


def tagged(pairs: torch.Tensor) -> np.ndarray:
    """Sorted positions that `tag` wrote."""
    return np.sort(pairs[0, ..., 0].numpy().astype(np.int32), -1)


def positions(start: int, stop: int) -> torch.Tensor:
    return torch.arange(start, stop).repeat(K, 1)


def query_heads(data: Data) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys [1, K*G, T, D], each query head with its own copy of keys."""
    queries = data.queries.reshape(1, HEADS, T, D)
    return queries, data.keys.repeat_interleave(G, 0)[None]


def h2o(root: pathlib.Path, data: Data) -> dict:
    path = root / "H2O/h2o_hf/utils_real_drop/modify_llama.py"
    make = take(path, "H2OKVCache_LayerWise")["H2OKVCache_LayerWise"]

    def run(prompt: int) -> np.ndarray:
        cache, held, trace = make(hh_size=12, recent_size=12), positions(0, 0), []
        for start, stop in [(0, prompt), *((p, p + 1) for p in range(prompt, T))]:
            held = torch.cat([held, positions(start, stop)], 1)
            weights = attend(data, torch.arange(start, stop), held).mean(1)
            kept, _ = cache((tag(held), tag(held)), weights[None])
            trace.append(tagged(kept))
            held = torch.tensor(trace[-1]).long()
        return np.stack(trace)

    return {"trace/h2o": run(88), "kept/h2o": run(T)[0]}


def snapkv(root: pathlib.Path, data: Data) -> dict:
    path = root / "SnapKV/snapkv/monkeypatch/snapkv_utils.py"
    make = take(path, "SnapKVCluster")["SnapKVCluster"]
    queries, keys = query_heads(data)
    found = {}
    for pooling in ("avgpool", "maxpool"):
        cluster = make(8, max_capacity_prompt=44, kernel_size=5, pooling=pooling)
        every = tag(torch.arange(T).repeat(HEADS, 1))
        _, kept = cluster.update_kv(keys, queries, every, None, 1)
        found[f"kept/snapkv_{pooling}"] = tagged(kept)
    return found


class Replay:
    """A stand-in for a model of one layer that attends over the shared arrays."""

    device = "cpu"
    config = types.SimpleNamespace(
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        num_key_value_heads=K,
        architectures=["Llama"],
    )
    tokenizer = types.SimpleNamespace(
        eos_token_id=-1,
        convert_ids_to_tokens=lambda ids: ids,
        decode=lambda ids, **_: "",
    )

    def __init__(self, data: Data):
        self.data, self.trace = data, []

    def __call__(self, input_ids, past_key_values=None, position_ids=None, **_):
        count = input_ids.shape[1]
        rows = torch.arange(count) if position_ids is None else position_ids[0]
        held = rows.repeat(K, 1)
        if past_key_values is not None:
            self.trace.append(tagged(past_key_values[0][0]))
            held = torch.cat([past_key_values[0][0][0, ..., 0].long(), held], 1)
        rows, inside = rows.clamp(max=T - 1), held.clamp(max=T - 1)
        weights = attend(self.data, rows, inside).reshape(1, HEADS, count, -1)
        return types.SimpleNamespace(
            past_key_values=((tag(held), tag(held)),),
            logits=torch.zeros(1, count, 2),
            attentions=(weights,),
        )


EASYKV = (
    "generate h2o_head_score process_for_mqa_gqa logits_adapter entropy "
    "truncate_kv_cache truncate_kv_cache_silo truncate_kv_cache_liso"
)


def easykv(root: pathlib.Path, data: Data) -> dict:
    code = take(
        root / "EasyKV/easykv/easykv.py",
        EASYKV,
        constants={"cuda": "cpu"},
        statistics=types.SimpleNamespace(mean=quiet),
        partial=functools.partial,
        modify_method_of_instance=quiet,
        llama_forward=quiet,
    )

    def run(mode: str, prompt: int, stride: int, size: int, **options) -> np.ndarray:
        model = Replay(data)
        tokens = data.tokens[None, :prompt]
        code["generate"](model, tokens, options, kv_mode=mode, stride=stride)
        return np.stack([held for held in model.trace if held.shape[1] == size])

    found = {}
    for policy in ("roco", "h2o_head", "tova"):
        options = {"kv_policy": policy, "budget": 40}
        found[f"trace/easykv_decoding_{policy}"] = run(
            "decoding", 16, 1, 56, max_new_tokens=T - 16, **options
        )
        for keep, suffix in ((False, ""), (True, "_attention")):
            found[f"trace/easykv_encoding_{policy}{suffix}"] = run(
                "encoding", T, 8, 48, keep_attention=keep, max_new_tokens=1, **options
            )
    return found


class Fixed(nn.Module):
    """A projection that answers with given heads [1, H, T, D] laid side by side."""

    def __init__(self, heads: torch.Tensor):
        super().__init__()
        self.answer = heads.transpose(1, 2).reshape(1, heads.shape[2], -1)

    def forward(self, _):
        return self.answer


def scissorhands(root: pathlib.Path, data: Data) -> dict:
    base = type("OPTAttention", (nn.Module,), {})
    path = root / "Scissorhands/Decentralized_FM_alpha/modules/hf_opt_dropkv.py"
    layer = take(path, "OPTAttention", _OPTAttention=base)["OPTAttention"](M, HEADS)
    queries, keys = query_heads(data)
    layer.q_proj, layer.k_proj = Fixed(queries), Fixed(keys)
    layer.v_proj, layer.out_proj = Fixed(keys), nn.Identity()
    layer.compress_flag, layer.start_compress_length = True, 32
    layer.lru_window, layer.position_window = 16, 10
    layer.keep_ratio, layer.lru_keep_ratio = [], []
    mask = torch.full((1, 1, T, T), torch.finfo(torch.float32).min).triu(1)
    _, weights, _ = layer(
        torch.zeros(1, T, M), attention_mask=mask, output_attentions=True
    )
    return {"visible/scissorhands": (weights[0] > 0).numpy()}


COLD_CACHES = (
    "create_window_attention_mask KVCache KVCacheHeadSpecific KVCacheHeavyHitter "
    "KVCacheHybrid"
)
COLD_PROMPTS = (
    "PromptCompressor PromptCompressorHeadSpecific PromptCompressorHeavyHitter"
)


def cold_compress(root: pathlib.Path) -> dict:
    stubs = {"ABC": abc.ABC, "abstractmethod": abc.abstractmethod}
    path = root / "cold-compress/cache.py"
    counter = collections.Counter
    caches = take(path, COLD_CACHES, Counter=counter, **stubs)
    path = root / "cold-compress/prompt_compression.py"
    return caches | {
        "Prompt": take(path, COLD_PROMPTS, **stubs)[COLD_PROMPTS.split()[2]]
    }


def heavy_hitter(code: dict, data: Data, prompt: int, **options) -> np.ndarray:
    """Positions in the slots, after the prompt and after each position decoded."""
    common = {"max_cache_length": 40, "global_tokens": 4, "recent_window": 10}
    cache = code["KVCacheHeavyHitter"](
        1, K, D, torch.float32, cache_bits=None, **common, **options
    )
    if options["attn_thresholding"]:  # its bool buffer refuses its own int votes
        cache.attn_history_num = cache.attn_history_num.int()
    here, pairs = torch.arange(prompt), tag(positions(0, prompt))
    weights = attend(data, here, positions(0, prompt)).mean(1)[None]
    if prompt > 40:
        compressor = code["Prompt"](head_specific=True, **common)
        here, pairs, _, weights = compressor(here, pairs, pairs, attn=weights)
    cache.update_kv(here, pairs, pairs, True)
    cache.update_state(here, pairs, pairs, True, weights)
    slots = [cache.pos[0].clone()]
    for position in range(prompt, T):
        here, pair = torch.tensor([position]), tag(positions(position, position + 1))
        cache.update_kv(here, pair, pair, False)
        weights = attend(data, here, cache.pos[0].long()).mean(1)[None]
        cache.update_state(here, pair, pair, False, weights)
        slots.append(cache.pos[0].clone())
    return torch.stack(slots).numpy()


def heavy_hitters(root: pathlib.Path, data: Data) -> dict:
    code = cold_compress(root)
    run = functools.partial(heavy_hitter, code, data)
    votes = {"history_window_size": 16, "attn_thresholding": True}
    sums = {"history_window_size": 1, "attn_thresholding": False}
    return {
        "slots/scissorhands": run(40, **votes),
        "slots/heavy_hitter": run(40, **sums),
        "slots/heavy_hitter_88": run(88, **sums),
    }


FASTGEN = {
    "fastgen": [
        {"strategy": "special"},
        {"strategy": "special_punc"},
        {"strategy": "special_punc_heavy_hitter", "heavy_hitter_frac": 0.3},
        {
            "strategy": "special_punc_heavy_hitter_window",
            "recent_window": 0.3,
            "heavy_hitter_frac": 0.3,
        },
        {"strategy": "full"},
    ],
    "fastgen_hybrid": [
        {"strategy": "window", "recent_window": 0.1},
        {
            "strategy": "window_heavy_hitter",
            "heavy_hitter_frac": 0.25,
            "recent_window": 0.1,
        },
        {
            "strategy": "window_heavy_hitter",
            "heavy_hitter_frac": 0.5,
            "recent_window": 0.1,
        },
        {"strategy": "full"},
    ],
}
SPECIAL, PUNCTUATION = 3, (5, 11, 17, 23)
SHARES = 0.2, 0.24, 0.372, 0.5, 0.81, 0.9, 0.948, 0.954  # heads differ at some


def fastgen(root: pathlib.Path, data: Data) -> dict:
    make, every = cold_compress(root)["KVCacheHybrid"], torch.arange(T)
    weights = attend(data, every, positions(0, T)).mean(1)[None]
    found = {
        "fastgen/special": np.int32([SPECIAL]),
        "fastgen/punctuation": np.int32(PUNCTUATION),
    }
    for case, strategies in FASTGEN.items():
        cache = make(
            1,
            K,
            D,
            torch.float32,
            max_cache_length=128,
            cache_bits=None,
            global_tokens=4,
            token_ids={"special": [[SPECIAL]], "punctuation": list(PUNCTUATION)},
            hybrid_strategies=strategies,
        )
        for share in SHARES:
            cache.min_recovery_frac = share
            choice, special, punctuation, kept, sums = cache.profile_attn_heads(
                every, weights, input_ids=data.tokens[None]
            )
            found[f"strategy/{case}@{share}"] = choice.numpy().astype(np.int32)
            found[f"kept/{case}@{share}"] = kept.numpy()
        masks = cache.build_masks(sums, special, punctuation, total_len=T)
        recovered = (weights * masks).sum(-1).mean(-1)
        found[f"recovered/{case}"] = recovered.numpy()
    return found


def simlayerkv(root: pathlib.Path, data: Data) -> dict:
    code = take(
        root / "SimLayerKV/LongBench/SimLayerKV_attention_llama.py",
        "ori_forward scaled_dot_product_attention compute_attention_sink_weights",
        constants={1024: 16, 512: 12},
        apply_rotary_pos_emb=modeling_llama.apply_rotary_pos_emb,
        repeat_kv=modeling_llama.repeat_kv,
    )
    queries, _ = query_heads(data)
    keys = data.keys[None]
    layer = types.SimpleNamespace(
        q_proj=Fixed(queries[:, :, -1:]),
        k_proj=Fixed(keys[:, :, -1:]),
        v_proj=Fixed(keys[:, :, -1:]),
        o_proj=nn.Identity(),
        num_heads=HEADS,
        num_key_value_heads=K,
        num_key_value_groups=G,
        head_dim=D,
        layer_idx=0,
        training=False,
    )
    still = torch.ones(1, 1, D), torch.zeros(1, 1, D)  # queries are rotated already
    cache = types.SimpleNamespace(update=lambda *_: (keys, keys))
    *_, score = code["ori_forward"](
        layer,
        torch.zeros(1, 1, M),
        past_key_value=cache,
        position_embeddings=still,
    )
    weights = attend(data, torch.arange(T), positions(0, T)).reshape(1, HEADS, T, T)
    rows = code["compute_attention_sink_weights"](weights)[0]
    return {
        "score/simlayerkv_decode": np.float32(score.item()),
        "score/simlayerkv_prefill": rows.numpy(),
    }


def rkv(root: pathlib.Path, data: Data) -> dict:
    pooled = []

    def max_pool1d(*args, **kwargs):
        pooled.append(F.max_pool1d(*args, **kwargs))
        return pooled[-1]

    names = "compute_attention_scores cal_similarity"
    code = take(root / "R-KV/rkv/utils.py", names)
    code = take(
        root / "R-KV/rkv/compression/r1_kv.py",
        "R1KV",
        **{name: code[name] for name in names.split()},
    )
    code["F"] = types.SimpleNamespace(max_pool1d=max_pool1d)
    queries, _ = query_heads(data)
    method = code["R1KV"](budget=40, window_size=8)
    keys, every = data.keys[None], tag(positions(0, T))
    _, kept = method.update_kv(keys, queries[:, :, -8:], every)
    similar = code["cal_similarity"](keys)[:, :-8]
    scores = pooled[0][0] * method.mix_lambda - similar * (1 - method.mix_lambda)
    return {
        "kept/rkv": tagged(kept),
        "scores/rkv": scores.numpy(),
        "attention/rkv": pooled[0][0].numpy(),
        "similarity/rkv": similar.numpy(),
    }


class OldCache:
    """The part of transformers 4's DynamicCache that LagKV builds on."""

    def __init__(self, _=None):
        self.key_cache, self.value_cache, self._seen_tokens = [], [], 0


def lagkv(root: pathlib.Path, data: Data) -> dict:
    make = take(root / "LagKV/lag_kv.py", "LagKV", DynamicCache=OldCache)["LagKV"]

    def run(*cuts: int) -> list[np.ndarray]:
        cache, trace = make(ratio=0.5, sink_size=4, lag_size=16), []
        for start, stop in itertools.pairwise(cuts):
            new = (x[None, :, start:stop].clone() for x in (data.keys, data.values))
            cache.update(*new, 0)
            trace.append(match(cache.key_cache[0][0], data.keys))
        return trace

    steps = run(0, *range(64, T + 1))
    width = max(held.shape[1] for held in steps)
    pad = lambda held: ((0, 0), (0, width - held.shape[1]))
    padded = [np.pad(held, pad(held), constant_values=-1) for held in steps]
    return {"kept/lagkv": run(0, T)[0], "trace/lagkv_steps": np.stack(padded)}


AUTHORS = (
    h2o,
    snapkv,
    easykv,
    scissorhands,
    heavy_hitters,
    fastgen,
    simlayerkv,
    rkv,
    lagkv,
)


def author_vectors(root: pathlib.Path, noise: float = 0.0) -> dict[str, np.ndarray]:
    data, found = load_data(noise), {}
    for run in AUTHORS:
        found |= run(root, data)
    return found


# ---------------------------------------------------------------- both


def save(name: str, make) -> None:
    """Writes what `make` returns, if disturbed inputs lead to the same choices."""
    found = make(0.0)
    for key, other in make(NOISE).items():
        if found[key].dtype.kind != "f":
            assert np.array_equal(found[key], other), f"{key} hangs on rounding"
    target = HERE / name
    np.savez_compressed(target, **found)
    print(f"{name}: {target.stat().st_size} bytes, {len(found)} arrays")


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkouts", type=pathlib.Path, help="see the docstring")
    args = parser.parse_args()
    torch.set_num_threads(1)
    save("policies_kvpress.npz", kvpress_vectors)
    if args.checkouts:
        save("policies_authors.npz", functools.partial(author_vectors, args.checkouts))


if __name__ == "__main__":
    main()
