"""Tests of Hugging Face folders' tokenizers: ids, chat templates, BOS, end tokens."""

import json
import sys

import jax.numpy as jnp
import pytest
import tokenizers
from testing import checkpoints
from testing.checkpoints import one_line, write_folder
from testing.gguf_files import write_gguf

import kvjax
from kvjax.engine import tokenization
from kvjax.engine.steps import NO_EOS
from kvjax.evaluation.tasks.base import Example, Task, encode
from kvjax.models import weights
from kvjax.models.weights import tokenizer as reader
from kvjax.types import UserError

WORDS = ["<unk>", "<s>", "</s>", "hi", "user:", "bot:", "<|eot|>", "<|eom|>"]
BOS, END, HI, USER, BOT, TURN, MESSAGE = range(1, 8)
CHAT = (
    "{{ bos_token }}{% for m in messages %} {{ m['role'] }}: {{ m['content'] }} <|eot|>"
    "{% endfor %}{% if add_generation_prompt %} bot:{% endif %}"
)
HELLO = [{"role": "user", "content": "hi"}]
TURNED = [BOS, USER, HI, TURN, BOT]


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "model", checkpoints.tensors())


def add_tokenizer(folder, *, bos=True, **config):
    """A tokenizer of whole words, with `config` in tokenizer_config.json."""
    vocab = {word: index for index, word in enumerate(WORDS)}
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordLevel(vocab, unk_token="<unk>")
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<s>", "</s>", "<|eot|>", "<|eom|>"])
    if bos:
        backend.post_processor = tokenizers.processors.TemplateProcessing(
            single=["<s>", "$A"], special_tokens=[("<s>", BOS)]
        )
    backend.save(str(folder / "tokenizer.json"))
    said = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        **config,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
    return folder


def write(folder, name, value):
    text = value if isinstance(value, str) else json.dumps(value)
    (folder / name).write_text(text)


CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CODE = "in 2023 it cost 650841823 euro;\n\nand (yes)  \n\n 202 caf\u00e9 \U0001f600 ."


def trained(*splitters):
    """Returns byte-level BPE of a few hundred tokens with this pre-tokenizer."""
    core = tokenizers.Tokenizer(tokenizers.models.BPE())
    core.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(list(splitters))
    core.decoder = tokenizers.decoders.ByteLevel()
    learn = tokenizers.trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<|end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator([CODE] * 30, learn)
    return core


def bytes_of(use_regex):
    byte_level = tokenizers.pre_tokenizers.ByteLevel
    return byte_level(add_prefix_space=False, use_regex=use_regex)


def add_bpe(folder, core, whole=True, **config):
    """The tokenizer in the files of GPT-2, and in tokenizer.json."""
    said = json.loads(core.to_str())["model"]
    write(folder, "vocab.json", said["vocab"])
    write(folder, "merges.txt", "\n".join(map(" ".join, said["merges"])))
    if whole:
        core.save(str(folder / "tokenizer.json"))
    ends = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|end|>")
    write(folder, "tokenizer_config.json", ends | config)
    return folder


def ids_of(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize(
    ("named", "family"),
    [
        ("GPT2Tokenizer", "llama"),  # Granite, SmolLM2
        ("GPT2Tokenizer", "phi3"),  # Phi-4
        ("GPT2Tokenizer", "opt"),
        ("Qwen2Tokenizer", "llama"),
        ("Qwen2Tokenizer", "qwen2"),
        ("LlamaTokenizer", "llama"),
        ("GemmaTokenizer", "gemma3_text"),
        ("GPTNeoXTokenizer", "gpt_neox"),
        ("PreTrainedTokenizerFast", "llama"),
        ("NobodyKnowsTokenizer", "mistral"),
        (None, "qwen2"),
    ],
)
def test_ids_are_those_of_tokenizer_json(folder, named, family):
    """tokenizer.json decides the ids, whatever class tokenizer_config.json names."""
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(CL100K), "isolated")
    core = trained(split, bytes_of(use_regex=False))
    add_bpe(folder, core, tokenizer_class=named)
    write(folder, "config.json", {"model_type": family})
    found = reader.from_folder(folder)
    raw = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert ids_of(found, CODE) == raw.encode(CODE).ids
    assert found.decode(ids_of(found, CODE)) == CODE
    assert (found.bos_token, found.eos_token) == ("<|end|>", "<|end|>")


def test_a_folder_and_a_gguf_file_have_the_same_ids(folder, tmp_path):
    """SmolLM2's, whose folder names GPT-2's class, and whose digits stand alone."""
    path = write_gguf(tmp_path / "m.gguf", checkpoints.tensors())
    gguf = weights.load(path, cache_converted=False).tokenizer
    add_bpe(folder, gguf.backend_tokenizer, tokenizer_class="GPT2Tokenizer")
    write(folder, "config.json", {"model_type": "opt"})
    for text in ("the  12 keys", "  12\n34", "x\n\n\ny 7 the"):
        assert ids_of(reader.from_folder(folder), text) == ids_of(gguf, text)


@pytest.mark.filterwarnings("ignore:Deprecated in 0.9.0:DeprecationWarning")
def test_without_tokenizer_json_the_class_decides(folder):
    """tokenizer.json adds BOS, as in OPT's folders, whose class adds it too."""
    core = trained(bytes_of(use_regex=True))
    said = {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True}
    add_bpe(folder, core, whole=False, **said)
    found = reader.from_folder(folder)
    assert found(CODE)["input_ids"] == [found.bos_token_id, *core.encode(CODE).ids]


def test_sentencepiece_alone_is_read_right_or_refused(folder):
    """Decoding keeps spaces, which some versions of transformers remove."""
    sentencepiece = pytest.importorskip("sentencepiece")
    write(folder, "text", "\n".join([CODE, "def f(x):", "    return x"] * 9))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text"),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=330,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=9,
    )
    write(folder, "tokenizer_config.json", {"tokenizer_class": "LlamaTokenizer"})
    path = str(folder / "tokenizer.model")
    own = sentencepiece.SentencePieceProcessor(model_file=path)
    try:
        found = reader.from_folder(folder)
    except UserError as error:
        assert "its tokens are not those of tokenizer.model" in str(error)
    else:
        assert ids_of(found, "  a b") == own.encode("  a b")


def test_sentencepiece_has_to_be_there_for_its_file(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    write(folder, "tokenizer.model", "x")
    with pytest.raises(UserError, match=r"sentencepiece.* tokenizer\.json among them"):
        reader.from_folder(folder)


def test_decoding_leaves_spaces_where_they_are(folder):
    add_tokenizer(folder, clean_up_tokenization_spaces=True)
    found = reader.from_folder(folder)
    found.add_tokens([".", ","])
    assert found.decode(found("hi , hi .")["input_ids"][1:]) == "hi , hi ."


@pytest.mark.parametrize("config", [False, True, None])
def test_tokenizer_json_says_whether_there_is_bos(folder, config):
    said = {} if config is None else {"add_bos_token": config}
    for bos in (True, False):
        found = reader.from_folder(add_tokenizer(folder, bos=bos, **said))
        assert found("hi")["input_ids"] == [BOS, HI][not bos :]


NAMED = [{"name": "default", "template": CHAT}, {"name": "rag", "template": "rag"}]


@pytest.mark.parametrize(
    ("config", "files"),
    [
        ({"chat_template": CHAT}, {}),
        ({"chat_template": NAMED}, {}),
        ({}, {"chat_template.jinja": CHAT}),
        ({}, {"chat_template.json": {"chat_template": CHAT}}),
        ({"chat_template": "old"}, {"chat_template.jinja": CHAT}),
        ({"chat_template": CHAT}, {"chat_template.json": {"chat_template": "old"}}),
    ],
    ids=["one", "named", "jinja", "json", "jinja first", "json last"],
)
def test_chat_templates(folder, config, files):
    add_tokenizer(folder, **config)
    for name, value in files.items():
        write(folder, name, value)
    found = reader.from_folder(folder)
    ids = found.apply_chat_template(HELLO, add_generation_prompt=True)["input_ids"]
    assert ids == TURNED
    task = Task("t", None, None, "m", 1, "none")
    assert list(encode(found, task, Example("e", "hi", ()), 99).tokens) == TURNED


def test_no_chat_template(folder):
    found = reader.from_folder(add_tokenizer(folder))
    assert found.chat_template is None
    task = Task("t", None, None, "m", 1, "none")
    assert encode(found, task, Example("e", "hi", ()), 99).tokens == (BOS, HI)


def test_named_templates_are_called_by_name(folder):
    found = reader.from_folder(add_tokenizer(folder, chat_template=NAMED))
    text = found.apply_chat_template(HELLO, chat_template="rag", tokenize=False)
    assert text == "rag"


@pytest.mark.parametrize("value", ["{", {"template": "x"}])
def test_a_chat_template_that_cannot_be_read(folder, value):
    write(add_tokenizer(folder), "chat_template.json", value)
    with pytest.raises(UserError, match="cannot read the tokenizer") as error:
        weights.load(folder)
    assert str(folder) in one_line(error)


def test_a_tokenizer_that_cannot_be_read(folder):
    assert weights.load(folder).tokenizer is None
    write(folder, "tokenizer.json", "{")
    with pytest.raises(UserError, match="cannot read the tokenizer") as error:
        weights.load(folder)
    assert str(folder) in one_line(error)


def test_one_bos_and_no_more(folder):
    """tokenizer.json says whether texts get one; a text may bring its own."""
    model = weights.load(add_tokenizer(folder, chat_template=CHAT))
    chat = model.tokenizer.apply_chat_template
    texts = ["hi", "<s> hi", chat(HELLO, tokenize=False, add_generation_prompt=True)]
    wanted = [[BOS, HI], [BOS, HI], TURNED]
    assert tokenization.tokenize(model, texts) == wanted
    # Ids are taken as they are.
    assert tokenization.tokenize(model, [[BOS, BOS, HI]]) == [[BOS, BOS, HI]]
    without = weights.load(add_tokenizer(folder, bos=False))
    assert tokenization.tokenize(without, texts) == [[HI], [BOS, HI], TURNED]


@pytest.mark.parametrize(
    ("generation", "config", "said"),
    [
        ({"eos_token_id": [END, TURN, MESSAGE]}, ..., {END, TURN, MESSAGE}),
        ({"eos_token_id": TURN}, [MESSAGE], {TURN}),
        ({"eos_token_id": None}, [TURN], {TURN}),
        ({}, MESSAGE, {MESSAGE}),
        (None, TURN, {TURN}),
        (None, -1, set()),
        (None, ..., set()),
    ],
)
def test_tokens_that_end_a_completion(folder, generation, config, said):
    """generation_config.json takes precedence; the tokenizer's end token is added."""
    write_folder(folder, eos_token_id=config)
    if generation is not None:
        write(folder, "generation_config.json", generation)
    model = weights.load(add_tokenizer(folder))
    assert set(tokenization.end_tokens(model)) == said | {END}
    without = model._replace(tokenizer=None)
    assert set(tokenization.end_tokens(without)) == (said or set(NO_EOS))


def test_no_end_tokens_at_all(folder):
    assert tokenization.end_tokens(weights.load(folder)) == NO_EOS


@pytest.mark.parametrize("said", ["</s>", [1, "2"], 2.0, True])
def test_end_tokens_that_are_no_numbers(folder, said):
    write(folder, "generation_config.json", {"eos_token_id": said})
    with pytest.raises(UserError, match="has eos_token_id = ") as error:
        weights.load(folder)
    assert "generation_config.json" in one_line(error)


def test_every_end_token_ends_a_completion(folder):
    """Greedy tokens of random weights: cut after whichever comes first."""
    model = weights.load(folder, jnp.float32)
    ask = lambda model: kvjax.generate(model, [[3, 4, 5]], max_new_tokens=12)[0].tokens
    free = ask(model)
    later, first = free[5], free[2]
    assert free.index(first) == 2 and free.index(later) == 5
    assert ask(model._replace(end_tokens=(later,))) == free[:6]
    assert ask(model._replace(end_tokens=(later, first))) == free[:3]
