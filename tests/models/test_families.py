"""Every family against transformers: logits, greedy tokens, and a budget that is large.

The golden files are made by golden/make_families.py.
"""

import json
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import often
from safetensors.numpy import load_file, save_file
from testing.engine import score_tokens

import kvjax
from kvjax import cache, policies
from kvjax.cache.config import make_config
from kvjax.cache.schedule import Schedule
from kvjax.engine import layerwise, steps
from kvjax.types import UserError

pytestmark = pytest.mark.e2e

FILES = sorted(
    (pathlib.Path(__file__).parents[1] / "golden" / "families").glob("*.npz")
)
CLOSE = 2e-5  # of the largest logit
OFTEN = ("falcon_7b", "gemma3_text", "llama_rope_llama3", "mixtral_window", "opt")


@pytest.fixture(params=[file.stem for file in FILES])
def golden(request, tmp_path):
    """The folder of a tiny checkpoint, and what transformers made of it."""
    file = next(file for file in FILES if file.stem == request.param)
    return written(file, tmp_path), dict(np.load(file))


def written(file, folder, **changes):
    """A golden file as a Hugging Face folder."""
    data = np.load(file)
    config = json.loads(str(data["config"])) | changes
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {k.removeprefix("w/"): data[k] for k in data.files if k.startswith("w/")}
    save_file(tensors, folder / "model.safetensors")
    return folder


def loaded(folder, data):
    """For as many tokens as there are: LongRoPE rotates short texts another way."""
    return kvjax.load(folder, context=data["tokens"].shape[1] + data["greedy"].shape[1])


def run(model, data, policy=None, block=7, implementation=None):
    """Logits after every prompt token and after every generated one, and the tokens.

    Prompt blocks do not divide the prompt, so the last one is partly filled.
    """
    spec = model.spec
    tokens = jnp.asarray(data["tokens"], jnp.int32)
    length, new = tokens.shape[1], data["greedy"].shape[1]
    schedule = Schedule("prefill_and_decode" if policy else "none", block, block)
    budget = 64 if policy else None
    config = make_config(spec, policy, budget, schedule, implementation=implementation)
    room = config.prefill_capacity(spec, length, new)
    fed = jnp.concatenate([tokens, jnp.asarray(data["greedy"], jnp.int32)], axis=1)
    state = cache.init(spec, config, len(tokens), room)
    one = jnp.full((len(tokens),), length, jnp.int32)
    padded = jnp.pad(tokens, ((0, 0), (0, -length % block)))
    state, first = steps.prefill(
        model.params, state, padded, one, spec=spec, config=config
    )
    state, rest = score_tokens(
        model.params, state, fed[:, length:-1], spec=spec, config=config
    )
    return np.concatenate([first[None], rest]).swapaxes(0, 1)


def test_logits_and_tokens(golden):
    """Prefill in blocks, then decode: transformers' logits, hence its tokens."""
    folder, data = golden
    model = loaded(folder, data)
    found = run(model, data)
    largest = np.abs(data["logits"]).max()
    np.testing.assert_allclose(found, data["next_logits"], atol=CLOSE * max(largest, 1))
    np.testing.assert_array_equal(found.argmax(-1), data["greedy"])


@pytest.mark.filterwarnings("default")  # torch's own
def test_other_tokens_live(golden):
    """Against transformers itself, where torch is installed: tokens of no file."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    transformers = pytest.importorskip("transformers")
    folder, data = golden
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    vocab = data["logits"].shape[-1]
    tokens = np.random.default_rng(5).integers(3, vocab, data["tokens"].shape)
    fed = np.random.default_rng(6).integers(3, vocab, data["greedy"].shape)
    both = torch.from_numpy(np.concatenate([tokens, fed], axis=1))
    with torch.no_grad():
        wanted = theirs(both).logits.numpy()[:, tokens.shape[1] - 1 : -1]
    found = run(loaded(folder, data), {"tokens": tokens, "greedy": fed})
    largest = max(np.abs(wanted).max(), 1)
    np.testing.assert_allclose(found, wanted, atol=CLOSE * largest)


@pytest.mark.parametrize(
    "golden", often([file.stem for file in FILES], OFTEN), indirect=True
)
def test_a_large_budget_is_the_full_cache(golden):
    folder, data = golden
    model = loaded(folder, data)
    kept = run(model, data, policies.average_attention())
    np.testing.assert_allclose(kept, run(model, data), atol=1e-5)


def file_of(name):
    return next(file for file in FILES if file.stem == name)


@pytest.mark.parametrize("name", ["gemma2", "mistral_window"])
def test_capped_scores_and_windows_in_the_kernels(tmp_path, name):
    data = dict(np.load(file_of(name)))
    model = loaded(written(file_of(name), tmp_path), data)
    found = run(model, data, implementation="pallas_tpu_interpret")
    np.testing.assert_allclose(found, data["next_logits"], atol=2e-4)
    np.testing.assert_array_equal(found.argmax(-1), data["greedy"])


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("falcon_7b", {"alibi": True}, "alibi = True, which is not supported"),
        ("qwen2", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ("qwen3", {"use_rotary": "no"}, "use_rotary = 'no', which is not supported"),
        ("mixtral_full", {"num_local_experts": 5}, r"lacks 6 tensors, .*experts\.4"),
        ("phi3", {"rope_parameters": {"rope_type": "ntk"}}, "'rope_type': 'ntk'"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional"),
        ("gemma3_text", {"layer_types": None, "sliding_window": "x"}, "be a number"),
        ("opt", {"enable_bias": False}, "enable_bias = False"),
        ("gpt_neox", {"attention_bias": False}, r"has \d+ tensors that"),
    ],
)
def test_what_is_not_understood_is_refused(tmp_path, name, changes, message):
    """One line that names the attribute, before any weight is read."""
    with pytest.raises(UserError, match=message) as error:
        kvjax.load(written(file_of(name), tmp_path, **changes))
    assert "\n" not in str(error.value)


def test_a_shorter_context_is_kept_to(tmp_path):
    folder = written(file_of("qwen2"), tmp_path)
    assert kvjax.load(folder, context=20).spec.context_length == 20
    with pytest.raises(UserError, match="context 0"):
        kvjax.load(folder, context=0)


@pytest.mark.parametrize("name", ["gemma2", "mixtral_window", "falcon_40b", "opt"])
def test_layer_by_layer_is_the_whole_model(tmp_path, name):
    """`kvjax.engine.layerwise` runs each kind of layer as the model does."""
    data = dict(np.load(file_of(name)))
    model = loaded(written(file_of(name), tmp_path), data)
    config = make_config(model.spec, None, None, Schedule("none", 7, 7))
    tokens = [row.tolist() for row in data["tokens"]]
    found = layerwise.read(model, config, tokens, 16)
    np.testing.assert_allclose(found.logits, data["next_logits"][:, 0], atol=2e-4)


def test_what_early_checkpoints_carry_besides_is_left_out(tmp_path):
    """GPT-NeoX's masks and rotary frequencies; its other name of a GELU."""
    folder = written(file_of("gpt_neox"), tmp_path, hidden_act="gelu_fast")
    tensors = load_file(folder / "model.safetensors")
    for name in (
        "attention.bias",
        "attention.masked_bias",
        "attention.rotary_emb.inv_freq",
    ):
        tensors[f"gpt_neox.layers.0.{name}"] = np.zeros((2, 2), np.float32)
    save_file(tensors, folder / "model.safetensors")
    assert kvjax.load(folder).spec.activation == "gelu_tanh"
