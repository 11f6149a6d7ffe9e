"""Writes beams.json: transformers' beam search on the tiny model of llama_gqa_tied.npz.

    python tests/golden/make_beams.py [path/to/SmolLM2-135M-Instruct.Q4_1.gguf]

With the path of a checkpoint it writes beams_smollm2.json, of two prompts of
smollm2.json. Needs torch and transformers 5, for the checkpoint also accelerate and
gguf, and nothing of kvjax.

The json holds `prompts`, of several lengths, `new`, the most tokens of a sequence, and
`cases`, each with `num_beams`, `length_penalty`, `eos` and, per prompt, the `sequences`
(tokens, score), the best first, of
`generate(num_beams=W, num_return_sequences=W, do_sample=False)`. Prompts run one by
one, so that none is padded. End tokens are those that beams without any draw most.
"""

import collections
import json
import pathlib
import sys

import numpy as np
import torch
import transformers

FOLDER = pathlib.Path(__file__).parent
MODEL, LENGTHS, NEW = "llama_gqa_tied", (5, 9, 14, 23), 12
BEAMS, PENALTIES = (2, 3, 5), (0.0, 1.0, 2.0)
SHORT = ("sentence", "code")  # prompts of smollm2.json


def load() -> transformers.PreTrainedModel:
    data = dict(np.load(FOLDER / f"{MODEL}.npz"))
    config = transformers.LlamaConfig(**json.loads(str(data["config"])))
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    tensors = {k: torch.from_numpy(v).float() for k, v in data.items() if "." in k}
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert set(missing) <= {"lm_head.weight"} and not unexpected
    model.tie_weights()
    return model


def search(
    model: transformers.PreTrainedModel,
    prompt: list[int],
    num_beams: int,
    length_penalty: float,
    eos: list[int],
    new: int = NEW,
) -> list[tuple[list[int], float]]:
    """Returns tokens and score of the W sequences that transformers finds."""
    ids = torch.tensor([prompt])
    found = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        num_beams=num_beams,
        num_return_sequences=num_beams,
        do_sample=False,
        max_new_tokens=new,
        length_penalty=length_penalty,
        eos_token_id=eos or None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    lengths = (found.beam_indices >= 0).sum(1)
    return [
        (row[len(prompt) : len(prompt) + length].tolist(), round(float(score), 6))
        for row, length, score in zip(
            found.sequences, lengths, found.sequences_scores, strict=True
        )
    ]


def of_tiny_model() -> dict:
    model, rng = load(), np.random.default_rng(3)
    vocab = model.config.vocab_size
    prompts = [rng.integers(0, vocab, length).tolist() for length in LENGTHS]
    drawn = collections.Counter(
        token
        for prompt in prompts
        for tokens, _ in search(model, prompt, 5, 1.0, [])
        for token in set(tokens[:-1])
    )
    ends = [token for token, _ in drawn.most_common(2)]
    cases = []
    for num_beams in BEAMS:
        for length_penalty in PENALTIES:
            for eos in (ends[:1], ends):
                case = {
                    "num_beams": num_beams,
                    "length_penalty": length_penalty,
                    "eos": eos,
                }
                found = [search(model, prompt, **case) for prompt in prompts]
                cases.append({**case, "sequences": found})
                lengths = [[len(tokens) for tokens, _ in each] for each in found]
                print(case, lengths)
    return {"model": MODEL, "new": NEW, "prompts": prompts, "cases": cases}


def of_smollm2(path: pathlib.Path) -> dict:
    """The searches of two short prompts, a text and a program, 20 tokens each."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()
    known = json.loads((FOLDER / "smollm2.json").read_text())["prompts"]
    prompts = [prompt["ids"] for prompt in known if prompt["kind"] in SHORT]
    case = {"num_beams": 3, "length_penalty": 1.0, "eos": [model.config.eos_token_id]}
    found = [search(model, prompt, **case, new=20) for prompt in prompts]
    case["sequences"] = found
    return {"model": path.name, "new": 20, "prompts": prompts, "cases": [case]}


def main(*paths: str) -> None:
    name = "beams_smollm2.json" if paths else "beams.json"
    found = of_smollm2(pathlib.Path(paths[0])) if paths else of_tiny_model()
    target = FOLDER / name
    made_with = {"torch": torch.__version__, "transformers": transformers.__version__}
    target.write_text(json.dumps({"made_with": made_with, **found}) + "\n")
    print(f"{target.name}: {target.stat().st_size} bytes")


if __name__ == "__main__":
    main(*sys.argv[1:])
