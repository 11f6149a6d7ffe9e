"""Model families, by the architecture that a checkpoint's config.json names."""

from kvjax.models.families import (
    falcon,
    gemma2,
    gemma3_text,
    gpt_neox,
    llama,
    mistral,
    mixtral,
    opt,
    phi3,
    qwen2,
    qwen3,
)

# Each module is named after its `model_type`, and defines
# spec_from_hf(config, name) -> ModelSpec and tensor_names(spec) -> Names.
FAMILIES = {
    "FalconForCausalLM": falcon,
    "GPTNeoXForCausalLM": gpt_neox,
    "Gemma2ForCausalLM": gemma2,
    "Gemma3ForCausalLM": gemma3_text,
    "LlamaForCausalLM": llama,
    "MistralForCausalLM": mistral,
    "MixtralForCausalLM": mixtral,
    "OPTForCausalLM": opt,
    "Phi3ForCausalLM": phi3,
    "Qwen2ForCausalLM": qwen2,
    "Qwen3ForCausalLM": qwen3,
}
