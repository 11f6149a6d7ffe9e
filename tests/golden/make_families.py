"""Writes families/NAME.npz: tiny random models of many families by transformers.

    python tests/golden/make_families.py [NAME...]

Needs torch, safetensors and transformers 5, and nothing of kvjax. Each file holds
what `save_pretrained` wrote, `config` (config.json as a string) and the tensors
as `w/` + their Hugging Face names (float32, of float16 values so that they
compress), and what the model said: `tokens` i32[2, 24], `logits` f32[2, 24, V] of
one pass over them, `greedy` i32[2, 16], what it goes on with (no stop at EOS), and
`next_logits` f32[2, 16, V], from the cache, whose argmax `greedy` is.

A seed is passed over while an argmax, or a router's choice, is nearly a tie, or
while what it goes on with is mostly the same token again. The script stops where
the cache and one pass over everything disagree, or where the saved files do not
make the same model.
"""

import pathlib
import sys
import tempfile

import numpy as np
import safetensors.torch
import torch
import transformers

PROMPT, NEW, VOCAB, SPECIAL = 24, 16, 64, 4
GAP, DISTINCT, SEEDS, TOLERANCE = 1e-3, 8, 100, 1e-4

COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# Every epsilon is large enough to be seen in the logits (OPT's cannot be set).
GQA = {"intermediate_size": 48, "num_key_value_heads": 2, "rms_norm_eps": 1e-3}
# Eight frequencies, so that a scaling has some of every kind to treat.
WIDE = {**GQA, "num_attention_heads": 2, "num_key_value_heads": 1}
MOE = {
    "intermediate_size": 24,
    "rms_norm_eps": 1e-3,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
FALCON = {"ffn_hidden_size": 48, "alibi": False, "layer_norm_epsilon": 1e-3}
NEOX = {"num_attention_heads": 2, "intermediate_size": 48, "layer_norm_eps": 1e-3}
SHORT, LONG = [1.0, 1.2, 1.5, 2.0], [1.5, 3.0, 6.0, 12.0]


def rope(rope_type: str = "default", theta: float = 10000.0, **own: object) -> dict:
    return {"rope_type": rope_type, "rope_theta": theta, **own}


# Family and own settings of each file.
CASES: dict[str, tuple[str, dict]] = {
    "llama_rope_linear": (
        "Llama",
        {**WIDE, "rope_parameters": rope("linear", factor=4.0)},
    ),
    # Within max_position_embeddings, where it is no scaling at all.
    "llama_rope_dynamic": (
        "Llama",
        {**WIDE, "rope_parameters": rope("dynamic", factor=4.0)},
    ),
    # Wavelengths 6 (kept), 20 and 63 (in between), and 199 on (divided).
    "llama_rope_llama3": (
        "Llama",
        {
            **WIDE,
            "max_position_embeddings": 512,
            "rope_parameters": rope(
                "llama3",
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=64,
            ),
        },
    ),
    "llama_rope_yarn": (
        "Llama",
        {
            **WIDE,
            "max_position_embeddings": 16384,
            "rope_parameters": rope(
                "yarn", factor=4.0, original_max_position_embeddings=4096
            ),
        },
    ),
    "llama_rope_yarn_options": (
        "Llama",
        {
            **WIDE,
            "max_position_embeddings": 128,
            "rope_parameters": rope(
                "yarn",
                theta=100.0,
                factor=4.0,
                original_max_position_embeddings=32,
                beta_fast=4.0,
                beta_slow=0.5,
                attention_factor=0.8,
                truncate=False,
            ),
        },
    ),
    "llama_bias": ("Llama", {**GQA, "attention_bias": True, "mlp_bias": True}),
    "mistral_window": ("Mistral", {**GQA, "sliding_window": 6}),
    "mistral_full": (
        "Mistral",
        {
            **GQA,
            "sliding_window": None,
            "head_dim": 16,
            "rope_parameters": rope(theta=500.0),
        },
    ),
    "mixtral_window": ("Mixtral", {**MOE, "sliding_window": 6}),
    "mixtral_full": ("Mixtral", {**MOE, "sliding_window": None}),
    "qwen2": ("Qwen2", {**GQA, "tie_word_embeddings": True}),
    "qwen2_window": (
        "Qwen2",
        {
            **GQA,
            "use_sliding_window": True,
            "max_window_layers": 1,
            "sliding_window": 6,
        },
    ),
    "qwen3": ("Qwen3", {**GQA, "head_dim": 16, "rope_parameters": rope(theta=1e6)}),
    "phi3": ("Phi3", {**GQA, "original_max_position_embeddings": 64}),
    "phi3_window": (
        "Phi3",
        {**GQA, "original_max_position_embeddings": 64, "sliding_window": 6},
    ),
    # Never longer than the original length: the short factors.
    "phi3_longrope": (
        "Phi3",
        {
            **GQA,
            "max_position_embeddings": 256,
            "original_max_position_embeddings": 64,
            "rope_parameters": rope("longrope", short_factor=SHORT, long_factor=LONG),
        },
    ),
    # Longer from the start: the long factors.
    "phi3_longrope_long": (
        "Phi3",
        {
            **GQA,
            "max_position_embeddings": 64,
            "original_max_position_embeddings": 16,
            "rope_parameters": rope("longrope", short_factor=SHORT, long_factor=LONG),
        },
    ),
    "phi3_partial": (
        "Phi3",
        {
            **GQA,
            "original_max_position_embeddings": 64,
            "partial_rotary_factor": 0.75,
            "rope_parameters": rope(theta=500.0),
        },
    ),
    # As Phi-4-mini has it: also grouped heads and a tied output.
    "phi3_partial_longrope": (
        "Phi3",
        {
            **GQA,
            "max_position_embeddings": 256,
            "original_max_position_embeddings": 64,
            "tie_word_embeddings": True,
            "partial_rotary_factor": 0.75,
            "rope_parameters": rope(
                "longrope", short_factor=SHORT[:3], long_factor=LONG[:3]
            ),
        },
    ),
    "gemma2": (
        "Gemma2",
        {
            **GQA,
            "num_hidden_layers": 4,
            "head_dim": 8,
            "query_pre_attn_scalar": 5,
            "sliding_window": 6,
            "attn_logit_softcapping": 4.0,
            "final_logit_softcapping": 1.0,
        },
    ),
    "gemma3_text": (
        "Gemma3",
        {
            **GQA,
            "num_hidden_layers": 6,
            "intermediate_size": 24,
            "head_dim": 8,
            "query_pre_attn_scalar": 5,
            "sliding_window": 6,
            "rope_parameters": {
                "sliding_attention": rope(),
                "full_attention": rope("linear", theta=1e6, factor=8.0),
            },
        },
    ),
    "falcon_7b": ("Falcon", {**FALCON, "multi_query": True, "parallel_attn": True}),
    "falcon_40b": (
        "Falcon",
        {
            **FALCON,
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
            "tie_word_embeddings": False,
        },
    ),
    "falcon_11b": (
        "Falcon",
        {
            **FALCON,
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
            "num_ln_in_parallel_attn": 1,
            "rope_parameters": rope(theta=500.0),
            "tie_word_embeddings": False,
        },
    ),
    "falcon_rw": (
        "Falcon",
        {**FALCON, "multi_query": False, "parallel_attn": False, "bias": True},
    ),
    "opt": ("OPT", {"ffn_dim": 48, "pad_token_id": 1, "bos_token_id": 2}),
    "opt_350m": (
        "OPT",
        {
            "ffn_dim": 48,
            "pad_token_id": 1,
            "bos_token_id": 2,
            "do_layer_norm_before": False,
            "word_embed_proj_dim": 16,
        },
    ),
    "gpt_neox": ("GPTNeoX", {**NEOX, "rotary_pct": 0.25, "rotary_emb_base": 500.0}),
    # 5 channels of 16: transformers rotates 6, by the frequencies of 5.
    "gpt_neox_odd": ("GPTNeoX", {**NEOX, "rotary_pct": 0.3125}),
    "gpt_neox_serial": (
        "GPTNeoX",
        {**NEOX, "rotary_pct": 1.0, "use_parallel_residual": False},
    ),
}


def build(name: str) -> torch.nn.Module:
    """The model of `name` with every weight drawn anew."""
    family, own = CASES[name]
    text = "Text" if family == "Gemma3" else ""
    settings = {**COMMON, **own, "attn_implementation": "eager"}
    config = getattr(transformers, f"{family}{text}Config")(**settings)
    if "rotary_pct" in own:
        # GPTNeoXConfig reads this name alone, and does not save it by itself.
        config.rotary_pct = own["rotary_pct"]
    model = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
    centre = 0.0 if family.startswith("Gemma") else 1.0
    # An output tied to a large embedding says the last token again and again, and
    # Gemma's embeddings are multiplied by sqrt(hidden_size).
    embedding = 0.2 if config.tie_word_embeddings else 0.5
    embedding = embedding if centre else 0.1
    for key, value in model.named_parameters():
        kind = key.split(".")[-2]
        if key.endswith("bias"):
            drawn = 0.1 * torch.randn_like(value)
        elif "norm" in kind or kind.startswith("ln_"):
            drawn = centre + 0.3 * torch.randn_like(value)
        elif kind == "embed_positions":
            drawn = 0.6 * torch.randn_like(value)
        elif "embed" in kind and kind != "embed_out":
            drawn = embedding * torch.randn_like(value)
        else:
            drawn = 1.5 * value.shape[-1] ** -0.5 * torch.randn_like(value)
        value.copy_(drawn.half().float())
    return model


def generate(model: torch.nn.Module, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """NEW tokens after `tokens`, and the logits that chose them, by the cache."""
    out = model(tokens, use_cache=True)
    greedy, logits = [], []
    for _ in range(NEW):
        logits.append(out.logits[:, -1])
        greedy.append(logits[-1].argmax(-1))
        out = model(
            greedy[-1][:, None], past_key_values=out.past_key_values, use_cache=True
        )
    return torch.stack(greedy, 1), torch.stack(logits, 1)


def narrowest(values: torch.Tensor, kept: int) -> float:
    """The least distance of the last value kept from the next one."""
    top = values.topk(kept + 1, dim=-1).values
    return float((top[..., kept - 1] - top[..., kept]).min())


def saved(model: torch.nn.Module, everything: torch.Tensor, logits: torch.Tensor):
    """config.json and the tensors that `save_pretrained` writes, read back."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        again = type(model).from_pretrained(folder, attn_implementation="eager").eval()
        error = float((again(everything, use_cache=False).logits - logits).abs().max())
        if error > TOLERANCE:
            raise SystemExit(f"the saved model is another one: {error:.1e}")
        config = pathlib.Path(folder, "config.json").read_text()
        return config, safetensors.torch.load_file(f"{folder}/model.safetensors")


@torch.inference_mode()
def make(name: str, seed: int) -> dict | None:
    """The contents of the file of `name`, or None where `seed` does not do."""
    torch.manual_seed(seed)
    model = build(name)
    tokens = torch.randint(SPECIAL, VOCAB, (2, PROMPT))
    logits = model(tokens, use_cache=False).logits
    greedy, next_logits = generate(model, tokens)
    distinct = min(len(set(row)) for row in greedy.tolist())
    if distinct < DISTINCT or narrowest(next_logits, 1) <= GAP:
        return None
    everything = torch.cat([tokens, greedy[:, :-1]], 1)
    routers = {"output_router_logits": True} if "mixtral" in name else {}
    whole = model(everything, use_cache=False, **routers)
    if routers and min(narrowest(one, 2) for one in whole.router_logits) <= GAP:
        return None
    error = float((whole.logits[:, PROMPT - 1 :] - next_logits).abs().max())
    if error > TOLERANCE:
        raise SystemExit(f"{name}: the cache disagrees with one pass: {error:.1e}")
    config, tensors = saved(model, everything, whole.logits)
    return {
        "config": config,
        "tokens": tokens.numpy().astype(np.int32),
        "logits": logits.numpy(),
        "greedy": greedy.numpy().astype(np.int32),
        "next_logits": next_logits.numpy(),
        **{f"w/{key}": value.float().numpy() for key, value in tensors.items()},
    }


def main() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    folder = pathlib.Path(__file__).with_name("families")
    folder.mkdir(exist_ok=True)
    for name in sys.argv[1:] or CASES:
        made = ((seed, make(name, seed)) for seed in range(SEEDS))
        seed, contents = next(one for one in made if one[1] is not None)
        target = folder / f"{name}.npz"
        np.savez_compressed(target, **contents)
        print(f"{target.name}: {target.stat().st_size} bytes, seed {seed}", flush=True)


if __name__ == "__main__":
    main()
