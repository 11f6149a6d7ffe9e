"""Every family against transformers: logits and greedy tokens, also with a budget.

The golden files are made by golden/make_families.py.
"""

import dataclasses
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
from kvjax.cache.schedule import Schedule
from kvjax.cache.spec import make_spec
from kvjax.engine import layerwise, steps
from kvjax.models import decoder
from kvjax.models.families import FAMILIES
from kvjax.models.families.hf_config import Config
from kvjax.models.weights import pack
from kvjax.types import UserError

pytestmark = pytest.mark.e2e

FILES = sorted(
    (pathlib.Path(__file__).parents[1] / "golden" / "families").glob("*.npz")
)
CLOSE = 2e-5  # of the largest logit
OFTEN = ("falcon_7b", "gemma3_text", "llama_rope_llama3", "mixtral_window", "opt")


@pytest.fixture(params=[file.stem for file in FILES])
def golden(request, tmp_path):
    """The folder of a tiny checkpoint, and transformers' outputs for it."""
    file = next(file for file in FILES if file.stem == request.param)
    return written(file, tmp_path), dict(np.load(file))


def written(file, folder, **changes):
    """Writes a golden file as a Hugging Face folder."""
    data = np.load(file)
    config = json.loads(str(data["config"])) | changes
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {k.removeprefix("w/"): data[k] for k in data.files if k.startswith("w/")}
    save_file(tensors, folder / "model.safetensors")
    return folder


def loaded(folder, data):
    """Loads with the test's context: LongRoPE has other frequencies for short texts."""
    return kvjax.load(folder, context=data["tokens"].shape[1] + data["greedy"].shape[1])


def run(model, data, policy=None, block=7, implementation=None):
    """Returns logits after every prompt and generated token, and the tokens.

    Prompt blocks do not divide the prompt, so the last one is partly filled.
    """
    spec = model.spec
    tokens = jnp.asarray(data["tokens"], jnp.int32)
    length, new = tokens.shape[1], data["greedy"].shape[1]
    schedule = Schedule("prefill_and_decode" if policy else "none", block, block)
    budget = 64 if policy else None
    config = make_spec(spec, policy, budget, schedule, implementation=implementation)
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
        ("gemma3_text", {"layer_types": None, "sliding_window": "x"}, "a whole number"),
        ("opt", {"enable_bias": False}, "enable_bias = False"),
        ("gpt_neox", {"attention_bias": False}, r"has \d+ tensors that"),
    ],
)
def test_what_is_not_understood_is_refused(tmp_path, name, changes, message):
    """The error is one line that names the attribute; no weight is read before it."""
    with pytest.raises(UserError, match=message) as error:
        kvjax.load(written(file_of(name), tmp_path, **changes))
    assert "\n" not in str(error.value)


def test_a_shorter_context_is_kept_to(tmp_path):
    folder = written(file_of("qwen2"), tmp_path)
    assert kvjax.load(folder, context=20).spec.context_length == 20
    for context, message in (
        (0, "context 0: must be"),
        ("20", "context is '20': give a whole number"),
        (20.5, r"context is 20\.5: give a whole number"),
        (65, "context 65: .* reads 64 tokens at most"),
    ):
        with pytest.raises(UserError, match=message):
            kvjax.load(folder, context=context)


def test_a_shorter_context_of_learned_positions(tmp_path):
    model = kvjax.load(written(file_of("opt"), tmp_path), context=20)
    assert model.spec.context_length == 20
    assert model.params["positions"].shape[0] == 20
    with pytest.raises(UserError, match=r"exceeds the context of .* 20 tokens"):
        kvjax.generate(model, [[3] * 17], max_new_tokens=4)


def test_a_head_of_its_own_reads_what_the_embedding_would(tmp_path):
    """OPT projects back to the embeddings' width before either of them."""
    folder = written(file_of("opt_350m"), tmp_path)
    tied = kvjax.load(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.decoder.embed_tokens.weight"] * 2
    written(file_of("opt_350m"), folder, tie_word_embeddings=False)
    save_file(tensors, folder / "model.safetensors")
    own = kvjax.load(folder)
    hidden = jnp.asarray(np.random.default_rng(0).normal(size=(2, 32)), jnp.float32)
    one, other = (decoder.logits(m.params, hidden, m.spec) for m in (tied, own))
    np.testing.assert_allclose(other, 2 * one, rtol=1e-6)


def test_only_what_rotates_needs_even_heads():
    spec = dataclasses.replace(spec_of("opt"), head_dim=5)
    pack.check_heads(spec, "tiny")
    with pytest.raises(UserError, match=r"head_dim 5: .* even for rotary positions"):
        pack.check_heads(dataclasses.replace(spec, positions="rotary"), "tiny")
    with pytest.raises(UserError, match="head_dim 0: it must be 1 or more"):
        pack.check_heads(dataclasses.replace(spec, head_dim=0), "tiny")


def spec_of(name, **changes):
    """Returns the spec of a golden file with changes to its config."""
    return spec_from(config_of(name) | changes)


def config_of(name):
    return json.loads(str(np.load(file_of(name))["config"]))


def spec_from(values):
    """Returns the spec of a config.json; raises for attributes that are not read."""
    config = Config(values, "tiny")
    config.ignore("model_type")
    spec = FAMILIES[values["architectures"][0]].spec_from_hf(config, "tiny")
    config.finish()
    return spec


def scaled(kind, **said):
    return {"rope_parameters": {"rope_type": kind, **said}}


@pytest.mark.parametrize(
    ("name", "changes", "context"),
    [
        ("llama_bias", scaled("linear", factor=4.0), 256),  # of 64
        ("llama_bias", scaled("dynamic", factor=4.0), 64),
        ("llama_bias", scaled("yarn", factor=4.0), 256),
        (
            "llama_bias",
            scaled("yarn", factor=4.0, original_max_position_embeddings=16),
            64,
        ),
        ("llama_bias", scaled("yarn", original_max_position_embeddings=16), 64),
        ("falcon_7b", scaled("linear", factor=2.0), 128),
        ("gemma3_text", {}, 64),
        ("gemma3_text", scaled("linear", factor=8.0), 64),
    ],
)
def test_contexts_that_are_scaled(name, changes, context):
    assert spec_of(name, **changes).context_length == context


def test_yarn_without_a_factor_is_by_the_two_lengths():
    said = {"original_max_position_embeddings": 16, "factor": None}
    assert spec_of("llama_bias", **scaled("yarn", **said)).rope.factor == 4


def test_what_is_absent_is_what_transformers_has():
    data = config_of("gemma2")
    assert data["attn_logit_softcapping"] and data["final_logit_softcapping"]
    spec = spec_of("gemma2", attn_logit_softcapping=None, final_logit_softcapping=None)
    assert (spec.attention_softcap, spec.logit_softcap) == (0, 0)
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        del data[key]
    spec = spec_from(data)
    assert (spec.attention_softcap, spec.logit_softcap) == (50, 30)
    data = config_of("phi3_longrope")
    del data["original_max_position_embeddings"]
    assert spec_from(data).rope.original == 4096


WINDOWS = {"use_sliding_window": True, "max_window_layers": 1, "layer_types": None}


@pytest.mark.filterwarnings("default")  # transformers' own
@pytest.mark.parametrize("name", [file.stem for file in FILES])
def test_what_is_absent_is_what_transformers_fills_in(tmp_path, name):
    """Every attribute in turn: refused, or as in the whole file that transformers has.

    But for one that transformers 5 neither saves nor reads from its own folders:
    GPT-NeoX's rotary_pct, beside the factor that says the same.
    """
    transformers = pytest.importorskip("transformers")
    given, read = config_of(name), []
    if "use_sliding_window" in given:
        given |= WINDOWS
    for key in given.keys() - {"architectures", "model_type", "rotary_pct"}:
        part = {k: value for k, value in given.items() if k != key}
        (tmp_path / "config.json").write_text(json.dumps(part))
        try:
            ours = spec_from(part)
        except UserError:
            continue
        theirs = transformers.AutoConfig.from_pretrained(tmp_path).to_dict()
        assert ours == spec_from(theirs | {"architectures": given["architectures"]}), (
            key
        )
        read.append(key)
    assert len(read) > len(given) / 2


def test_windows_of_which_no_size_is_given():
    """Of transformers' 4,096; null is no window, and so is one that is not used."""
    data = config_of("qwen2_window") | WINDOWS
    del data["sliding_window"]
    assert spec_from(data).sliding_windows == (0, 4096)
    assert spec_from(data | {"sliding_window": None}).sliding_windows == ()
    assert spec_from(data | {"use_sliding_window": False}).sliding_windows == ()


FULL, LOCAL = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    ("name", "kinds", "wrong"),
    [
        ("llama_bias", [FULL, FULL], [FULL, LOCAL]),
        ("opt", [FULL, FULL], [LOCAL, LOCAL]),
        ("falcon_7b", [FULL, FULL], [LOCAL, LOCAL]),
        ("gpt_neox", [FULL, FULL], [LOCAL, LOCAL]),
        ("mistral_window", [LOCAL, LOCAL], [FULL, FULL]),
        ("mistral_full", [FULL, FULL], [LOCAL, FULL]),
        ("mixtral_window", [LOCAL, LOCAL], [FULL, LOCAL]),
        ("phi3_window", [LOCAL, LOCAL], [FULL, LOCAL]),
        ("qwen2", [FULL, FULL], [LOCAL, LOCAL]),
    ],
)
def test_kinds_of_layers_that_repeat_what_others_say(name, kinds, wrong):
    assert spec_of(name, layer_types=kinds) == spec_of(name, layer_types=None)
    with pytest.raises(UserError, match=r"layer_types = .* by its other attributes"):
        spec_of(name, layer_types=wrong)


@pytest.mark.parametrize("name", ["llama_bias", "opt", "gemma3_text"])
def test_attributes_that_change_no_logits(name):
    """Those of sampling, which transformers drops, and of all its configurations."""
    transformers = pytest.importorskip("transformers")
    sampling = transformers.GenerationConfig._get_default_generation_params()
    everywhere = transformers.PreTrainedConfig().to_dict()
    shaping = {"is_encoder_decoder", "architectures", "transformers_version"}
    said = dict.fromkeys((everywhere.keys() | sampling.keys()) - shaping, "said")
    assert len(said) > 30
    assert spec_of(name, **(said | config_of(name))) == spec_of(name)


def test_phi_4_mini_says_what_others_do_not(tmp_path):
    said = {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False}
    kvjax.load(written(file_of("phi3_partial_longrope"), tmp_path, **said))
    with pytest.raises(UserError, match="full_attn_mod = 2, which is not supported"):
        spec_of("phi3", full_attn_mod=2)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("opt", {"num_attention_heads": 0}, "num_attention_heads = 0: .* 1 or more"),
        ("falcon_7b", {"num_attention_heads": 0}, "num_attention_heads = 0"),
        ("qwen2", {"num_attention_heads": 0}, "num_attention_heads = 0"),
        ("qwen2", {"num_hidden_layers": 2.5}, r"num_hidden_layers = 2\.5: .* whole"),
        ("qwen2", {"num_hidden_layers": -1}, "num_hidden_layers = -1"),
        ("qwen2", {"vocab_size": 0}, "vocab_size = 0"),
        ("qwen2", {"rms_norm_eps": float("nan")}, "rms_norm_eps = nan"),
        ("phi3", {"rope_scaling": [1]}, r"rope_scaling = \[1\]"),
        ("gpt_neox", {"rope_parameters": [1]}, r"rope_parameters = \[1\]"),
        ("llama_bias", scaled("linear", factor="x"), "factor = 'x': .* above 0"),
        ("llama_bias", scaled("linear"), "rope_parameters without factor"),
        (
            "llama_bias",
            scaled("llama3", low_freq_factor=1.0, high_freq_factor=4.0),
            "rope_parameters without factor",
        ),
        ("llama_bias", scaled([]) | {"rope_scaling": {"type": ["x"]}}, r"\['x'\]"),
        (
            "phi3_longrope",
            scaled("longrope", long_factor=[1.0, 2.0]),
            r"long_factor = \[1\.0, 2\.0\]: .* a list of 4 numbers",
        ),
        ("phi3", {"rope_parameters": {"partial_rotary_factor": 1.5}}, "rotates 12"),
        (
            "phi3_longrope",
            scaled("longrope", partial_rotary_factor=0.4),
            "rotates 3 channels: .* fewer than 8, an even number in longrope",
        ),
        ("llama_bias", {"partial_rotary_factor": 0.5}, r"0\.5, which transformers ign"),
        ("qwen3", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "vLLM does not"),
        ("qwen2_window", {"sliding_window": "8"}, "sliding_window = '8'"),
        (
            "qwen2_window",
            {"max_window_layers": "0", "layer_types": None},
            "max_window_layers = '0'",
        ),
        ("gemma2", {"layer_types": ["full_attention"]}, "a list of 4 of full_attent"),
        ("gemma2", {"layer_types": ["chunked_attention"] * 4}, "layer_types = "),
        ("qwen2_window", {"layer_types": ["full_attention"]}, "a list of 2 of"),
        ("mixtral_full", {"num_experts_per_tok": 9}, "9 for . num_local_experts"),
    ],
)
def test_damaged_configurations_are_refused(name, changes, message):
    with pytest.raises(UserError, match=message) as error:
        spec_of(name, **changes)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "name", ["gemma2", "gemma3_text", "mixtral_window", "falcon_40b", "opt"]
)
def test_layer_by_layer_is_the_whole_model(tmp_path, name):
    """`kvjax.engine.layerwise` runs each kind of layer as the model does."""
    data = dict(np.load(file_of(name)))
    model = loaded(written(file_of(name), tmp_path), data)
    config = make_spec(model.spec, None, None, Schedule("none", 7, 7))
    tokens = [row.tolist() for row in data["tokens"]]
    found = layerwise.prefill(model, config, tokens, 16)
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
