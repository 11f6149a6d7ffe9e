"""Writes llama_*.npz: logits of tiny random Llama models by transformers.

    python tests/golden/make_llama_tiny.py

Needs torch and transformers, and nothing of kvjax. Each file holds `config`
(config.json as a string), the checkpoint's tensors by their Hugging Face names
(float16, exact: the model ran on these values in float32), `ids` i32[2, 24] and
`logits` f32[2, 24, V].
"""

import pathlib

import numpy as np
import torch
import transformers

COMMON = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "vocab_size": 64,
    "max_position_embeddings": 128,
}
CONFIGS = {
    "mha": {
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
    # Heads wider than hidden_size / heads, and constants off their defaults.
    "gqa_tied": {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    },
    "mqa": {
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    },
}


@torch.inference_mode()
def main() -> None:
    for seed, (name, own) in enumerate(CONFIGS.items()):
        torch.manual_seed(seed)
        config = transformers.LlamaConfig(
            **COMMON, **own, architectures=["LlamaForCausalLM"]
        )
        model = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation="eager"
        ).eval()
        for key, value in model.named_parameters():
            center = 1.0 if "norm" in key else 0.0
            value.copy_((center + 0.4 * torch.randn_like(value)).half().float())
        ids = torch.randint(COMMON["vocab_size"], (2, 24))
        tensors = {
            key: value.numpy().astype(np.float16)
            for key, value in model.named_parameters()
        }
        target = pathlib.Path(__file__).with_name(f"llama_{name}.npz")
        np.savez_compressed(
            target,
            config=config.to_json_string(),
            ids=ids.numpy().astype(np.int32),
            logits=model(ids).logits.numpy(),
            **tensors,
        )
        print(f"{target.name}: {target.stat().st_size} bytes")


if __name__ == "__main__":
    main()
