"""Makes tokenizers from the fields of a GGUF file or from a Hugging Face folder."""

import contextlib
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from kvjax.types import ModelSpec, UserError

_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WHOLE = "tokenizer.json"  # the complete tokenizer, independent of its class
_PIECES = "tokenizer.model"  # SentencePiece's own file
_FOLDER_FILES = (_WHOLE, _PIECES, "tokenizer_config.json")
_PROBES = "A b c.", "  def f(x):\n    return 12", "caf\u00e9 \U0001f600\t end \n"


def from_gguf(fields: Mapping[str, Any], source: pathlib.Path, spec: ModelSpec):
    """Builds the tokenizer that a GGUF file describes.

    Supports byte-level BPE with the pre-tokenizers 'smollm', 'llama-bpe' and 'gpt-2'.
    A file with 'default' or none was converted without recording its pre-tokenizer, and
    gets GPT-2's.

    Args:
      fields: the file's fields by key.
      source: the file, for messages.
      spec: the model's shape.

    Returns:
      A `transformers.PreTrainedTokenizerFast`, or None for a file without one.

    Raises:
      UserError: another kind of tokenizer or pre-tokenizer, or more tokens than V.
    """
    import tokenizers

    def field(key, default=None):
        return fields.get(f"tokenizer.ggml.{key}", default)

    model, rule = field("model"), field("pre", "default")
    if model is None:
        return None
    if model != "gpt2":
        raise UserError(
            f"{source} has tokenizer.ggml.model {model!r}: only 'gpt2', byte-level "
            "BPE, is known, use the model's Hugging Face folder"
        )
    tokens = field("tokens", [])
    if len(tokens) > spec.vocab_size:
        raise UserError(
            f"{source} has {len(tokens)} tokens for an embedding of {spec.vocab_size} "
            "rows: fetch it again"
        )
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[tuple(merge.split(" ", 1)) for merge in field("merges", [])],
            ignore_merges=rule == "llama-bpe",
        )
    )
    backend.pre_tokenizer = _splitter(rule, source)
    backend.decoder = tokenizers.decoders.ByteLevel()
    types = field("token_type", [])
    for kind, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        chosen = [
            token for token, found in zip(tokens, types, strict=False) if found == kind
        ]
        backend.add_tokens(
            [
                tokenizers.AddedToken(token, special=special, normalized=False)
                for token in chosen
            ]
        )
    named = {
        argument: tokens[field(f"{key}_token_id")]
        for argument, key in (
            ("bos_token", "bos"),
            ("eos_token", "eos"),
            ("unk_token", "unknown"),
            ("pad_token", "padding"),
        )
        if field(f"{key}_token_id") is not None
    }
    # By default, llama.cpp adds BOS only under Llama 3's pre-tokenizer.
    first = field("add_bos_token", rule == "llama-bpe") and named.get("bos_token")
    last = field("add_eos_token", False) and named.get("eos_token")
    if first or last:
        ends = [(token, tokens.index(token)) for token in (first, last) if token]
        around = [first] if first else [], [last] if last else []
        backend.post_processor = tokenizers.processors.TemplateProcessing(
            single=[*around[0], "$A", *around[1]], special_tokens=ends
        )
    return _fast_class()(
        tokenizer_object=backend,
        chat_template=fields.get("tokenizer.chat_template"),
        model_max_length=spec.context_length,
        clean_up_tokenization_spaces=False,
        **named,
    )


def from_folder(path: pathlib.Path):
    """Returns the tokenizer of a Hugging Face folder, None without tokenizer files.

    tokenizer.json alone decides the tokens of a text, BOS and EOS included. The class
    named in tokenizer_config.json is ignored: AutoTokenizer would apply that class's
    rules, which differ from the file's (Phi-4, OLMo 2 and SmolLM2 name GPT-2's).
    Without tokenizer.json, the class is used; if there is a tokenizer.model, its tokens
    of some texts are compared with SentencePiece's.

    Decoding keeps spaces in front of punctuation, and ignores
    `clean_up_tokenization_spaces`, which would remove some from code.

    The chat template comes from the first of chat_template.jinja, tokenizer_config.json
    (one, or several by name) and chat_template.json that has one.

    Raises:
      UserError: files that cannot be read, or from which transformers makes other
        tokens than SentencePiece.
    """
    if not any((path / name).exists() for name in _FOLDER_FILES):
        return None
    try:
        found = restore(path) if (path / _WHOLE).exists() else _by_class(path)
        found.clean_up_tokenization_spaces = False
        # transformers reads this file only for multimodal processors.
        template = path / "chat_template.json"
        if found.chat_template is None and template.exists():
            found.chat_template = json.loads(template.read_text())["chat_template"]
        return found
    except Exception as error:
        # transformers raises many types here, some of them for a missing package.
        text = str(error).strip().split("\n")[0]
        raise UserError(
            f"cannot read the tokenizer in {path} ({type(error).__name__}: {text}): "
            f"fetch its files again, {_WHOLE} among them, or remove them to load the "
            "model without one"
        ) from error


def restore(folder: pathlib.Path):
    """Returns the tokenizer that a folder's tokenizer.json describes."""
    return _fast_class().from_pretrained(folder, local_files_only=True)


def _by_class(folder: pathlib.Path):
    with _no_advice():
        from transformers import AutoTokenizer

    if pieces := (folder / _PIECES).exists():
        from sentencepiece import SentencePieceProcessor
    found = AutoTokenizer.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False
    )
    if pieces:
        encode = SentencePieceProcessor(model_file=str(folder / _PIECES)).encode
        for text in _PROBES:
            if found(text, add_special_tokens=False)["input_ids"] != encode(text):
                raise ValueError(f"its tokens are not those of {_PIECES}")
    return found


def _splitter(rule: str, source: pathlib.Path):
    from tokenizers import Regex, pre_tokenizers

    def byte_level(use_regex):
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)

    if rule == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, byte_level(True)])
    if rule == "llama-bpe":
        words = pre_tokenizers.Split(Regex(_LLAMA3), behavior="isolated")
        return pre_tokenizers.Sequence([words, byte_level(False)])
    if rule in ("gpt-2", "default"):
        return byte_level(True)
    raise UserError(
        f"{source} has tokenizer.ggml.pre {rule!r}: only smollm, llama-bpe, gpt-2 and "
        "default are known, use the model's Hugging Face folder"
    )


def _fast_class():
    with _no_advice():
        from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast


@contextlib.contextmanager
def _no_advice():
    """Imports transformers without its advice to install PyTorch."""
    key = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
    before = os.environ.get(key)
    os.environ[key] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[key]
        else:
            os.environ[key] = before
