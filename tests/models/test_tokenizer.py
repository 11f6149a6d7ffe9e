"""Tokenizers of Hugging Face folders: chat templates, BOS, and the tokens that end."""

import json

import jax.numpy as jnp
import pytest
import tokenizers
from testing import checkpoints
from testing.checkpoints import one_line, write_folder

import kvjax
from kvjax.engine import api
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
    assert api.tokenize(model, texts) == wanted
    # Ids are taken as they are.
    assert api.tokenize(model, [[BOS, BOS, HI]]) == [[BOS, BOS, HI]]
    without = weights.load(add_tokenizer(folder, bos=False))
    assert api.tokenize(without, texts) == [[HI], [BOS, HI], TURNED]


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
    """generation_config.json's, else config.json's; and the tokenizer's always."""
    write_folder(folder, eos_token_id=config)
    if generation is not None:
        write(folder, "generation_config.json", generation)
    model = weights.load(add_tokenizer(folder))
    assert set(api.end_tokens(model)) == said | {END}
    without = model._replace(tokenizer=None)
    assert set(api.end_tokens(without)) == (said or set(NO_EOS))


def test_no_end_tokens_at_all(folder):
    assert api.end_tokens(weights.load(folder)) == NO_EOS


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
