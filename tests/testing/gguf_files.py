"""Tiny checkpoints as GGUF files."""

import gguf as gguf_format
import numpy as np
import tokenizers

from kvjax.models.weights import gguf

BYTES = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())


TOKENS = ["<|end|>", "<|start|>", *BYTES, "Ġ1", "ĠĠ", "th", "the", "<tool>"]


KEYS = {
    "block_count": 2,
    "context_length": 128,
    "embedding_length": 32,
    "feed_forward_length": 64,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 500.0,
    "rope.dimension_count": 8,
    "vocab_size": 270,
}


def interleaved(array, heads):
    """What llama.cpp's converter does to query and key rows, channel by channel."""
    out = np.empty_like(array)
    depth = len(array) // heads
    for head in range(heads):
        for pair in range(depth // 2):
            for half in range(2):
                source = head * depth + half * (depth // 2) + pair
                out[head * depth + 2 * pair + half] = array[source]
    return out


def write_gguf(
    path, tensors, *, quantised=False, keys=(), tokenizer=(), arch="llama", drop=()
):
    """A GGUF file of `tensors`, with the default keys and tokenizer fields changed."""
    writer = gguf_format.GGUFWriter(path, arch)
    for key, value in {**KEYS, **dict(keys)}.items():
        kind = {
            str: writer.add_string,
            float: writer.add_float32,
            int: writer.add_uint32,
        }
        if value is not None:
            kind[type(value)](f"{arch}.{key}", value)
    types = [3, 3] + [1] * (len(TOKENS) - 3) + [4]
    fields = {
        "model": "gpt2",
        "pre": "smollm",
        "bos_token_id": 1,
        "eos_token_id": 0,
        "chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
        **dict(tokenizer),
    }
    calls = {
        "model": writer.add_tokenizer_model,
        "pre": writer.add_tokenizer_pre,
        "bos_token_id": writer.add_bos_token_id,
        "eos_token_id": writer.add_eos_token_id,
        "chat_template": writer.add_chat_template,
        "add_bos_token": writer.add_add_bos_token,
        "eot_token_id": writer.add_eot_token_id,
    }
    if fields["model"] is not None:
        writer.add_token_list(TOKENS)
        writer.add_token_types(types)
        writer.add_token_merges(["Ġ 1", "Ġ Ġ", "t h", "th e"])
        for key, value in fields.items():
            calls[key](value)
    theirs = {ours: name for name, ours in gguf._names(2).items()}
    for name, array in tensors.items():
        if name in drop:
            continue
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            array = interleaved(array, 4 if "q_proj" in name else 2)
        kind = gguf_format.GGMLQuantizationType.Q8_0
        if quantised and array.ndim == 2:
            array = gguf_format.quants.quantize(array, kind)
            writer.add_tensor(theirs[name], array, raw_dtype=kind)
        else:
            writer.add_tensor(theirs.get(name, name), array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
