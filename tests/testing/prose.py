"""A small text, and a tokenizer of its words."""

import re

import numpy as np
import tokenizers
import transformers

CHAT = (
    "{% for m in messages %}<|user|> {{ m.content }} <|end|> {% endfor %}"
    "{% if add_generation_prompt %}<|assistant|> {% endif %}"
)


def make_tokenizer(chat_template=None, bos=False):
    """Every word, sign and digit is a token of its own, all of them unknown but few."""
    vocab = {"[UNK]": 0, "<s>": 1}
    vocab |= {word: i + 2 for i, word in enumerate(HAYSTACK_WORDS)}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="[UNK]"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Whitespace(),
            tokenizers.pre_tokenizers.Digits(individual_digits=True),
        ]
    )
    if bos:
        core.post_processor = tokenizers.processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 1)]
        )
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="[UNK]", bos_token="<s>"
    )
    fast.chat_template = chat_template
    return fast


def make_haystack(sentences=400):
    rng = np.random.default_rng(7)
    return " ".join(
        f"Sentence s{i} has {' '.join(rng.choice(WORDS, rng.integers(3, 9)))}."
        for i in range(sentences)
    )


WORDS = ["rain", "stone", "cloud", "river", "field", "light"]


HAYSTACK = make_haystack()


HAYSTACK_WORDS = sorted(set(re.findall(r"\w+|[^\w\s]+", HAYSTACK)))
