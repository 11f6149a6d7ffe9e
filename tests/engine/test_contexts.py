"""Documents are read once, kept in files, and answer as if each row had read them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from conftest import often, tiny_model
from testing import checkpoints, prefixes

import kvjax
from kvjax import CacheConfig, Schedule, UserError, cache, policies
from kvjax.cache import budgets
from kvjax.cache.description import describe
from kvjax.cache.spec import make_spec
from kvjax.engine import compiled, context_files
from kvjax.engine.contexts import Context, load_context, read_context
from kvjax.models import placement
from kvjax.models.weights import tensors
from kvjax.parallel import meshes

LENGTH, NEW = 30, 5
RNG = np.random.default_rng(0)
DOCUMENT = RNG.integers(0, 50, LENGTH).tolist()
CASE = RNG.integers(0, 50, (3, 6)), (6, 2, 4), NEW  # questions, their lengths
AFTER = Schedule("after_prefill", prefill_chunk=8)
SIZES = ((6, 14), (20, 10))  # of each head of each layer
KEPT = {"policy": "key_diff", "budget": SIZES, "schedule": AFTER}
KIVI = {"name": "kivi", "group": 8, "residual_length": 8}
CODECS = {
    "identity": "identity",
    "int8": "int8",
    "int4": {"name": "int4", "group": 8},
    "fp8": "fp8",
    "kivi": {"name": "after_prompt", "codec": KIVI},  # with a residual
}
CONFIGS = {
    "full": {},
    "compressed": KEPT,
    "while_reading": {"policy": "h2o", "budget": 16},
    "share": {
        "policy": {"name": "snapkv", "window": 4},
        "budget": "50%",
        "budget_rule": "uniform",
        "schedule": AFTER,
    },
}
FILES = often(
    [
        *(("compressed", codec) for codec in ("identity", "int8", "int4", "fp8")),
        *(("full", "int4"), ("while_reading", "int8"), ("share", "kivi")),
    ],
    [("compressed", "identity"), ("compressed", "int8"), ("full", "int4")],
    others="e2e",
    several=True,
)
ROWS = often(
    [("compressed", "int8"), ("full", "identity"), ("full", "int4"), ("share", "int4")],
    [("compressed", "int8")],
    others="e2e",
    several=True,
)


def config_of(model, name="compressed", **changes):
    return cache.checked(model.spec, CacheConfig(**CONFIGS[name] | changes), LENGTH)


def assert_equal(found: Context, expected: Context):
    assert found.config == expected.config
    for field in ("tokens", "model", "fingerprint", "length", "nbytes"):
        assert getattr(found, field) == getattr(expected, field)
    left, right = found.state, expected.state
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
    jax.tree.map(
        np.testing.assert_array_equal, found.kept_positions, expected.kept_positions
    )


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def context(model):
    return read_context(model, config_of(model), DOCUMENT)


@pytest.mark.parametrize(("name", "codec"), ROWS)
def test_rows_after_a_context_have_read_its_document(model, name, codec):
    config = config_of(model, name, codec=CODECS[codec])
    context = read_context(model, config, DOCUMENT)
    state = prefixes.read(model, config, [DOCUMENT], 6 + NEW)
    assert context.length == int(context.state.next_pos[0]) == LENGTH
    kept = context.kept_positions, cache.kept_positions(state)[0]
    jax.tree.map(np.testing.assert_array_equal, *kept)
    assert sum(map(np.size, jax.tree.leaves(kept[0]))) > 0
    found = prefixes.folded(model, config, context.state, *CASE)
    expected = prefixes.copied(model, config, state, *CASE)
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    np.testing.assert_allclose(found.logits, expected.logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("name", "codec"), FILES)
def test_a_file_holds_exactly_the_context(model, tmp_path, name, codec):
    written = read_context(model, config_of(model, name, codec=CODECS[codec]), DOCUMENT)
    written.save(tmp_path / "a.safetensors")

    def asked(length):
        assert length == LENGTH
        return written.config

    for config in (asked, written.config):
        assert_equal(load_context(tmp_path / "a.safetensors", model, config), written)
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]


def test_a_file_holds_few_bytes(model, context, tmp_path):
    """Of the pairs that are kept, and not of the document."""
    context.save(tmp_path / "a")
    positions = 4 * sum(map(sum, SIZES))
    size = (tmp_path / "a").stat().st_size
    assert context.nbytes == 2 * 4 * 8 * sum(map(sum, SIZES))
    assert context.nbytes + positions < size < context.nbytes + positions + 4096
    assert repr(context) == "Context(30 tokens read by tiny, 0.0032 MB)"


@pytest.mark.e2e
def test_a_file_holds_short_floats(tmp_path):
    model = tiny_model()
    halved = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), model.params)
    short = model._replace(params=halved)
    written = read_context(short, config_of(short), DOCUMENT)
    written.save(tmp_path / "a")
    assert_equal(load_context(tmp_path / "a", short, written.config), written)
    with pytest.raises(UserError, match=r"read in bfloat16, and .* loaded in float32"):
        load_context(tmp_path / "a", model, written.config)


@pytest.mark.e2e
def test_a_file_holds_the_sizes_that_a_rule_measured(model, tmp_path):
    rule = budgets.squeeze(0.5)
    config = make_spec(
        model.spec, "key_diff", 12, AFTER, budget_rule=rule, length=LENGTH
    )
    written = read_context(model, config, DOCUMENT)
    assert written.config.budget != config.budget
    written.save(tmp_path / "a")
    assert_equal(load_context(tmp_path / "a", model, config), written)


QUESTIONS = [RNG.integers(0, 50, length).tolist() for length in (6, 1, 4, 9, 2)]


RANDOM = {"temperature": 1.0, "num_samples": 3, "seed": 1}


@pytest.mark.parametrize("fields", often([{}, RANDOM], [{}], others="e2e"))
def test_an_engine_answers_as_if_each_prompt_had_the_document(model, fields):
    """More prompts than rows; drawn greedily, and at random with several samples."""
    engine = kvjax.Engine(model, memory_gb=0.1, max_rows=2)
    sampling = kvjax.Sampling(max_new_tokens=7, **fields)
    found = engine.generate(QUESTIONS, sampling, context=engine.read(DOCUMENT))
    whole = [DOCUMENT + question for question in QUESTIONS]
    expected = engine.generate(whole, sampling)
    assert len(found) == len(QUESTIONS) * sampling.num_samples
    assert [each.tokens for each in found] == [each.tokens for each in expected]


@pytest.mark.e2e
def test_an_engine_answers_from_a_compressed_document(model):
    config = config_of(model, codec="int8")
    engine = kvjax.Engine(model, memory_gb=0.1, codec="int8", **KEPT)
    context = engine.read(DOCUMENT)
    assert context.config == config
    questions, lengths, new = CASE
    prompts = [q[:n].tolist() for q, n in zip(questions, lengths, strict=True)]
    found = engine.generate(prompts, context=context, max_new_tokens=new)
    state = prefixes.read(model, config, [DOCUMENT], 6 + NEW)
    expected = prefixes.copied(model, config, state, *CASE)
    assert [each.tokens for each in found] == expected.tokens.T.tolist()


def test_an_engine_takes_its_files_back(model, tmp_path):
    """The share is of the prompts that the engine expects, not of the document."""
    share = CONFIGS["share"] | {"budget": "25%", "policy": "key_diff"}
    engine = kvjax.Engine(model, memory_gb=0.1, prompt_tokens=60, **share)
    written = engine.read(DOCUMENT)
    assert written.config.budget == (15, 15)
    written.save(tmp_path / "a")
    assert_equal(engine.load_context(tmp_path / "a"), written)


@pytest.mark.e2e
@pytest.mark.parametrize("shape", ["data:2,model:4", "data:8"])
def test_a_context_of_a_mesh_is_that_of_one_device(tmp_path, shape):
    """In both directions through a file."""
    alone = tiny_model(num_kv_heads=8, num_heads=8, ff_dim=64, vocab_size=64)
    over = meshes.mesh(shape, 8)
    params = placement.split(alone.spec, alone.params, over)
    spec = placement.fitted(alone.spec, over)
    parted = alone._replace(spec=spec, params=params)
    config = config_of(alone, budget=(8, (20, 10) * 4), codec="int8")
    contexts = [read_context(each, config, DOCUMENT) for each in (alone, parted)]
    for which, context in enumerate(contexts):
        context.save(tmp_path / str(which))
        assert not which or len(context.state.layers[0].positions.devices()) == 8
    for reader in (alone, parted):
        found = [load_context(tmp_path / name, reader, config) for name in "01"]
        assert_equal(*found)
    with meshes.use(over):
        answers = prefixes.folded(
            parted, config, found[0].state, np.tile(CASE[0][:2], (4, 1)), (6, 2) * 4, 3
        )
    expected = prefixes.folded(alone, config, contexts[0].state, CASE[0][:2], (6, 2), 3)
    np.testing.assert_array_equal(answers.tokens[:, :2], expected.tokens)
    split = make_spec(alone.spec, "key_diff", (8, (20, 10, 10, 20) * 2), AFTER)
    if "model:4" in shape:
        read_context(alone, split, DOCUMENT).save(tmp_path / "2")
        with pytest.raises(UserError, match="sizes that repeat every 2 heads"):
            load_context(tmp_path / "2", parted, split)
    compiled.clear()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policy": "recency"}, "policy key_diff.* and policy recency"),
        ({"policy": policies.streaming(2)}, r"policy streaming\(.*sinks=2\) is asked"),
        ({"budget": 12}, r"budget \(\(6, 14\), \(20, 10\)\), and budget \(12, 12\)"),
        ({"codec": "int8"}, "codec identity .* and codec int8"),
        ({"schedule": Schedule("decode_only", 8)}, "schedule after_prefill, 8"),
        ({"schedule": Schedule("after_prefill", 4)}, "and schedule after_prefill, 4"),
        ({"eviction": "compact"}, "eviction in_place, and eviction compact"),
    ],
)
def test_another_configuration_is_refused(model, context, tmp_path, changes, message):
    context.save(tmp_path / "a")
    with pytest.raises(UserError, match=message) as error:
        load_context(tmp_path / "a", model, config_of(model, **changes))
    checkpoints.one_line(error)
    faster = dataclasses.replace(
        context.config, implementation="reference", rows_per_eviction=2
    )
    load_context(tmp_path / "a", model, faster)


def test_another_model_is_refused(model, context, tmp_path):
    other = tiny_model(seed=1)
    context.save(tmp_path / "a")
    context.check(model, context.config)
    for refused in (
        lambda: load_context(tmp_path / "a", other, context.config),
        lambda: context.check(other, context.config),
    ):
        with pytest.raises(UserError, match=r"was read by tiny .weights") as error:
            refused()
        checkpoints.one_line(error)


def damage(path, how):
    data = bytearray(path.read_bytes())
    if how == "empty":
        data = b""
    elif how.startswith("cut"):
        data = data[: int(len(data) * float(how[3:]))]
    elif how == "longer":
        data += b"0"
    elif how == "other_bytes":
        data = bytes(100)
    elif how == "flipped_array":
        data[-100] ^= 1
    elif how == "flipped_text":
        at = data.index(b"capacities")
        data[data.index(b"14", at) + 1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "how",
    [
        *("empty", "cut0.001", "cut0.3", "cut0.7", "cut0.999", "longer"),
        *("other_bytes", "flipped_array", "flipped_text"),
    ],
)
def test_a_damaged_file_is_refused(model, context, tmp_path, how):
    path = tmp_path / "a"
    context.save(path)
    damage(path, how)
    with pytest.raises(UserError, match="truncated or damaged") as error:
        load_context(path, model, context.config)
    assert str(path) in checkpoints.one_line(error)


def test_other_files_are_refused(model, context, tmp_path, monkeypatch):
    def refused(path, message):
        with pytest.raises(UserError, match=message) as error:
            load_context(path, model, context.config)
        checkpoints.one_line(error)

    refused(tmp_path / "none", "there is no context .*none")
    refused(tmp_path, "there is no context")
    safetensors.numpy.save_file({"a": np.zeros(3)}, tmp_path / "weights")
    refused(tmp_path / "weights", "weights is no context")
    monkeypatch.setattr(context_files, "VERSION", 2)
    context.save(tmp_path / "later")
    monkeypatch.undo()
    refused(tmp_path / "later", "has version 2 of the format, and .* version 1")


def test_a_file_is_whole_or_as_it_was(model, context, tmp_path, monkeypatch):
    path = tmp_path / "a"
    context.save(path)

    def stop(file, *_):
        file.write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(tensors, "write", stop)
    for target in (path, tmp_path / "b"):
        with pytest.raises(UserError, match=r"cannot write .*: No space left"):
            context.save(target)
    monkeypatch.undo()
    with pytest.raises(UserError, match=r"cannot write the context .*No such file"):
        context.save(tmp_path / "missing" / "a")
    assert [found.name for found in tmp_path.iterdir()] == ["a"]
    assert_equal(load_context(path, model, context.config), context)


def test_what_rows_cannot_share_is_not_read(model):
    for message, options in (
        ("rope_positions='cache'", {"rope_positions": "cache"}),
        ("in host memory", {"offload": 4}),
    ):
        config = make_spec(model.spec, **options)
        with pytest.raises(UserError, match=message):
            read_context(model, config, DOCUMENT)
    config = make_spec(model.spec)
    with pytest.raises(UserError, match="the document is empty"):
        read_context(model, config, [])
    with pytest.raises(UserError, match="exceed the context of tiny, 256 tokens"):
        read_context(model, config, [1] * 257)


def test_policies_are_described_by_their_options():
    def text(policy):
        spec = tiny_model().spec
        schedule = Schedule("after_prefill")
        return describe(make_spec(spec, policy, 60, schedule))["policy"]

    window = text(policies.snapkv(window=8))
    assert window == "snapkv(group=pool_first, kernel=7, pool=max, window=8)"
    assert text(policies.snapkv(window=8)) == window != text(policies.snapkv(window=9))
    pinned = [text(policies.protect(policies.h2o(), 2, n)) for n in (3, 4)]
    assert pinned[0] != pinned[1]
    layers = [{"weight": np.full(2, each, np.float32)} for each in (1, 2)]
    learned = [
        text(policies.with_params(policies.key_diff(), chosen))
        for chosen in (layers, layers[::-1], layers)
    ]
    assert learned[0] == learned[2] != learned[1]
