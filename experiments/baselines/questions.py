"""Answers questions about documents with kvpress, for `engine/shared_document.py`.

    python -m baselines.questions

Every request after the model is

    {"policy", "ratio", "documents", "questions", "new"}

A document is read once, and compressed before any question is known. Its questions are
then answered one after the other, each from a copy of the document's cache. `policy` is
None for the full cache. Returns the seconds, the tokens of every answer by document,
and the numbers of KV pairs kept.
"""

import copy
import time

import baselines
from baselines import presses


def answer(model, request):
    press = None
    if request["policy"]:
        press = presses.make(request["policy"], request["ratio"])
    kept, tokens, start = set(), [], time.perf_counter()
    pairs = zip(request["documents"], request["questions"], strict=True)
    for document, questions in pairs:
        read = _read(model, document, press)
        kept.update(layer.get_seq_length() for layer in read.cache.layers)
        tokens.append([_answer(model, read, one, request["new"]) for one in questions])
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "tokens": tokens, "kept": sorted(kept)}


def _read(model, document, press):
    import torch

    from baselines import decoding

    ids = torch.tensor([document], device=model.device)
    return decoding.prefill(model, ids, press)


def _answer(model, read, question, new):
    """Reads a question after the document, and decodes greedily."""
    import torch

    from baselines import decoding

    ids = torch.tensor([question], device=model.device)
    positions = read.positions + torch.arange(len(question), device=model.device)
    cache = copy.deepcopy(read.cache)
    out = model(
        ids,
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    token = out.logits[:, -1:].argmax(dim=-1)
    read = decoding.Read(cache, token, positions[:, -1:] + 1)
    return decoding.decode(model, read, new)[0]


if __name__ == "__main__":
    baselines.serve(("torch", "transformers"), answer)
