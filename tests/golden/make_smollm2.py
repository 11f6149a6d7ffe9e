"""Writes smollm2.json: what transformers makes of the SmolLM2-135M-Instruct GGUF.

    python tests/golden/make_smollm2.py path/to/SmolLM2-135M-Instruct.Q4_1.gguf

Needs torch, transformers, accelerate and gguf, and nothing of kvjax: weights and
tokenizer come through transformers' own GGUF reader. Takes about a minute on a CPU.

The json holds, per prompt, its `text` (and the `messages` it was rendered from), the
token `ids`, the 32 `greedy` tokens that follow (full cache, plain argmax, no stop at
the end-of-text token), some `logits` of the last prompt position by vocabulary id, and
`margin`, the smallest gap between the best and the second logit along the greedy path:
an implementation that differs by less than half of it must choose the same tokens.
"""

import hashlib
import json
import pathlib
import pydoc_data.topics
import sys

import torch
import transformers

STEPS = 32
CODE = '''def fibonacci(n):
    """Return the first n Fibonacci numbers."""
    numbers = [0, 1]
    while len(numbers) < n:
        numbers.append('''
MESSAGES = [{"role": "user", "content": "Why is the sky blue? Answer in one sentence."}]
FIXED_IDS = (0, 2, 28, 198, 260, 1000, 20000, 49151)


def main(file: str) -> None:
    path = pathlib.Path(file)
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        path.parent, gguf_file=path.name
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()
    chat = tokenizer.apply_chat_template(
        MESSAGES, tokenize=False, add_generation_prompt=True
    )
    texts = [
        ("sentence", "The capital of France is"),
        ("chat", chat),
        ("code", CODE),
        ("paragraphs", paragraphs(tokenizer)),
        (
            "digits and unicode",
            "On 2024-07-14, 3 of 17 cafés in Zürich sold 1,250 naïve “crêpes” for "
            "€12.50 each — 日本語, Ελληνικά, Привет 🙂. The numbers 1, 2, 3, 4,",
        ),
    ]
    prompts = [dict(kind=kind, **run(model, tokenizer, text)) for kind, text in texts]
    prompts[1]["messages"] = MESSAGES
    made_with = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "attention": model.config._attn_implementation,
        "dtype": "float32",
        "gguf": path.name,
        "gguf_sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
    }
    target = pathlib.Path(__file__).with_name("smollm2.json")
    golden = {"made_with": made_with, "prompts": prompts}
    target.write_text(json.dumps(golden, indent=1, ensure_ascii=False) + "\n")
    for prompt in prompts:
        print(
            f"{prompt['kind']:20} {len(prompt['ids']):4} tokens, "
            f"margin {prompt['margin']:.4f}: "
            f"{tokenizer.decode(prompt['greedy'])!r}"
        )


def paragraphs(tokenizer) -> str:
    """The start of the Python reference on objects, about 300 tokens."""
    words = pydoc_data.topics.topics["objects"].split()
    for count in range(len(words)):
        text = " ".join(words[:count])
        if len(tokenizer(text).input_ids) >= 300:
            return text
    raise ValueError("the topic is too short")


@torch.inference_mode()
def run(model, tokenizer, text: str) -> dict:
    ids = tokenizer(text).input_ids
    out = model(torch.tensor([ids]), use_cache=True)
    first = out.logits[0, -1]
    greedy, margins = [], []
    for _ in range(STEPS):
        top = out.logits[0, -1].topk(2)
        margins.append(float(top.values[0] - top.values[1]))
        greedy.append(int(top.indices[0]))
        out = model(
            torch.tensor([greedy[-1:]]),
            past_key_values=out.past_key_values,
            use_cache=True,
        )
    shown = sorted({*FIXED_IDS, *first.topk(5).indices.tolist()})
    return {
        "text": text,
        "ids": ids,
        "greedy": greedy,
        "logits": {str(index): round(float(first[index]), 5) for index in shown},
        "margin": round(min(margins), 5),
    }


if __name__ == "__main__":
    main(sys.argv[1])
