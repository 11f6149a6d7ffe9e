"""A prefix that rows share gives what each row has with a copy of its own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import often, tiny_model
from testing import checkpoints, prefixes

from kvjax import Schedule, UserError, cache, policies
from kvjax.cache.prefix import Prefix, after, check, check_groups, rows_config
from kvjax.cache.spec import make_spec
from kvjax.engine import compiled
from kvjax.engine.forward import Pass, forward, forward_both
from kvjax.models import placement
from kvjax.parallel import meshes

DOCUMENT, QUESTION, NEW = 32, 8, 6
RNG = np.random.default_rng(0)
DOCUMENTS = RNG.integers(0, 50, (2, DOCUMENT))
QUESTIONS = RNG.integers(0, 50, (6, QUESTION))
LENGTHS = (8, 3, 5, 1, 8, 7)
FAMILIES = {
    "grouped": {},
    "one_head": {"num_kv_heads": 1, "num_heads": 3},
    "windows": {"sliding_windows": (6, 0), "local_rope_theta": 100.0},
    "softcap": {"attention_softcap": 2.0, "sliding_windows": (0, 20)},
    "learned": {"positions": "learned", "norm": "layer", "tie_embeddings": False},
}
CODECS = {
    "identity": "identity",
    "int8": "int8",
    "int4": {"name": "int4", "group": 8},
}
FULL = often(
    [(family, codec) for family in FAMILIES for codec in CODECS],
    [("windows", "identity"), ("softcap", "int8")],
    others="e2e",
    several=True,
)
SIZES = ((6, 14), (20, 10))  # of each head of each layer
COMPRESSED = {
    "key_diff": {"policy": policies.key_diff(), "budget": 12},
    "sizes": {"policy": policies.key_diff(), "budget": SIZES, "codec": "int8"},
    "snapkv": {"policy": policies.snapkv(window=4), "budget": SIZES},
    "protected": {"policy": policies.h2o(), "budget": 16, "pinned": (2, 4)},
    "compact": {"policy": policies.h2o(), "budget": 16, "eviction": "compact"},
}


def full(model, codec="identity"):
    return make_spec(model.spec, None, None, Schedule("none", 8), codec=codec)


def compressed(model, **options):
    schedule = Schedule("after_prefill", prefill_chunk=8)
    return make_spec(model.spec, schedule=schedule, **options)


def assert_same(found, expected, tolerance=1e-5):
    np.testing.assert_allclose(
        found.logits, expected.logits, rtol=tolerance, atol=tolerance
    )
    np.testing.assert_array_equal(found.tokens, expected.tokens)


@pytest.mark.parametrize(("family", "codec"), FULL)
def test_a_full_prefix_is_the_prompt_read_at_once(family, codec):
    """Two documents of three questions each; ragged questions."""
    model = tiny_model(**FAMILIES[family])
    config = full(model, CODECS[codec])
    prompts = np.zeros((6, DOCUMENT + QUESTION), np.int32)
    prompts[:, :DOCUMENT] = np.repeat(DOCUMENTS, 3, axis=0)
    prompts[:, DOCUMENT:] = QUESTIONS
    slots = (DOCUMENT + QUESTION + NEW,) * model.spec.num_layers
    empty = cache.init(model.spec, config, 6, slots)
    lengths = np.add(LENGTHS, DOCUMENT)
    whole = prefixes.go_on(model, config, empty, prompts, lengths, NEW)
    state = prefixes.read(model, config, DOCUMENTS, 0)
    found = prefixes.folded(model, config, state, QUESTIONS, LENGTHS, NEW)
    assert_same(found, whole)
    np.testing.assert_array_equal(found.state.next_pos, whole.state.next_pos)


@pytest.mark.parametrize("name", often([*COMPRESSED], ["sizes"], others="e2e"))
@pytest.mark.parametrize("family", often([*FAMILIES], ["grouped"], others="e2e"))
def test_a_compressed_prefix_is_a_copy_of_it_per_row(family, name):
    model = tiny_model(**FAMILIES[family])
    options = COMPRESSED[name]
    if model.spec.num_kv_heads == 1 and options["budget"] == SIZES:
        options = options | {"budget": (9, 14)}
    config = compressed(model, **options)
    state = prefixes.read(model, config, DOCUMENTS, QUESTION + NEW)
    copied = prefixes.copied(model, config, state, QUESTIONS, LENGTHS, NEW)
    state = prefixes.read(model, config, DOCUMENTS, 0)
    found = prefixes.folded(model, config, state, QUESTIONS, LENGTHS, NEW)
    assert_same(found, copied)


def test_a_group_is_its_prefix_alone():
    """Two groups of three rows, and each group by itself."""
    model = tiny_model(**FAMILIES["windows"])
    config = compressed(model, **COMPRESSED["sizes"])
    state = prefixes.read(model, config, DOCUMENTS, 0)
    both = prefixes.folded(model, config, state, QUESTIONS, LENGTHS, NEW)
    for group, rows in enumerate((slice(0, 3), slice(3, 6))):
        one = prefixes.read(model, config, DOCUMENTS[group : group + 1], 0)
        found = prefixes.folded(model, config, one, QUESTIONS[rows], LENGTHS[rows], NEW)
        np.testing.assert_allclose(both.logits[:, rows], found.logits, atol=1e-5)
        np.testing.assert_array_equal(both.tokens[:, rows], found.tokens)


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("groups", "shape"), [(1, "data:2,model:4"), (2, "data:2,model:4"), (1, "data:8")]
)
def test_a_mesh_gives_what_one_device_gives(groups, shape):
    """Rows, groups and heads are split; heads of several sizes, in int8."""
    model = tiny_model(
        num_kv_heads=8, num_heads=8, ff_dim=64, vocab_size=64, sliding_windows=(6, 0)
    )
    sizes = 8, (20, 10) * 4
    config = compressed(model, policy=policies.key_diff(), budget=sizes, codec="int8")
    case = np.tile(QUESTIONS[:4], (2, 1)), LENGTHS[:4] * 2, NEW
    state = prefixes.read(model, config, DOCUMENTS[:groups], 0)
    alone = prefixes.folded(model, config, state, *case)
    over = meshes.mesh(shape, model.spec.num_kv_heads)
    params = placement.split(model.spec, model.params, over)
    parted = model._replace(spec=placement.fitted(model.spec, over), params=params)
    with meshes.use(over):
        found = prefixes.folded(parted, config, state, *case)
    assert_same(found, alone)
    compiled.clear()  # programs of eight devices map eight times the memory


@pytest.mark.e2e
def test_rows_and_prompts_share_a_prefix_in_one_pass():
    """Three rows that decode, and three prompts of which a chunk is read."""
    model = tiny_model(**FAMILIES["windows"])
    config = compressed(model, **COMPRESSED["sizes"])
    prefix = Prefix(prefixes.read(model, config, DOCUMENTS[:1], 0), config)
    own = rows_config(config)
    empty = after(prefix, cache.init(model.spec, own, 3, (20, 20)))
    n, one = jnp.array([8, 3, 5]), jnp.ones(3, jnp.int32)
    token, texts = jnp.array([[7], [8], [9]]), jnp.asarray(QUESTIONS)

    @jax.jit
    def apart(params, prefix):
        run = functools.partial(forward, params, model.spec, prefix=prefix)
        ends, prompts = run(texts[3:], n, empty, own, is_prefill=True)
        _, rows = run(texts[:3], n, empty, own, is_prefill=True)
        hidden, stepped = run(token, one, rows, own)
        return rows, (hidden, ends, stepped, prompts)

    @jax.jit
    def together(params, prefix, rows):
        passes = (
            Pass(token, one, rows, False, prefix),
            Pass(texts[3:], n, empty, True, prefix),
        )
        return forward_both(params, model.spec, *passes, own)

    rows, expected = apart(model.params, prefix)
    found = together(model.params, prefix, rows)
    real = np.arange(QUESTION) < np.asarray(n)[:, None]
    close = functools.partial(np.testing.assert_allclose, atol=1e-5)
    close(found[0], expected[0])
    close(found[1][real], expected[1][real])
    jax.tree.map(close, found[2:], expected[2:])


def test_prefixes_that_do_not_fit_the_rows_are_refused():
    model = tiny_model(num_kv_heads=4, num_heads=4)
    config = compressed(model, policy=policies.key_diff(), budget=((8, 12) * 2, 9))
    shapes = functools.partial(cache.init, model.spec, config, capacity=(8, 12, 9))
    prefix = lambda groups: Prefix(jax.eval_shape(lambda: shapes(batch=groups)), config)
    check_groups(prefix(2), 6)
    with pytest.raises(UserError, match="7 rows do not divide over 2 prefixes"):
        check_groups(prefix(2), 7)
    with meshes.use(meshes.mesh("data:4,model:2", 4)):
        check_groups(prefix(1), 8)
        check_groups(prefix(4), 8)
        with pytest.raises(UserError, match="2 prefixes do not divide over the 4"):
            check_groups(prefix(2), 8)
    repeats = pytest.raises(UserError, match="sizes that repeat every 1 heads")
    with meshes.use(meshes.mesh("data:2,model:4", 4)), repeats:
        check_groups(prefix(2), 8)


@pytest.mark.parametrize(
    ("which", "options", "message"),
    [
        ("rows", {"policy": policies.h2o(), "budget": 12}, "policy 'h2o' evicts some"),
        ("rows", {"rope_positions": "cache"}, "the rows of .* rope_positions='cache'"),
        ("prefix", {"rope_positions": "cache"}, "the prefix of .* rope_positions="),
        ("rows", {"offload": 4}, "the rows of .* in host memory"),
        ("prefix", {"offload": 4}, "the prefix of .* in host memory"),
    ],
)
def test_what_cannot_be_combined_is_refused(tiny, which, options, message):
    """In one line, and also where a program is traced."""
    both = dict.fromkeys(("prefix", "rows"), make_spec(tiny.spec))
    check(both["prefix"], both["rows"])
    both[which] = make_spec(tiny.spec, **options)
    with pytest.raises(UserError, match=message) as error:
        check(both["prefix"], both["rows"])
    checkpoints.one_line(error)
    state = cache.init(tiny.spec, both["rows"], 1, (4, 4))
    prefix = Prefix(cache.init(tiny.spec, both["prefix"], 1, (4, 4)), both["prefix"])
    with pytest.raises(UserError, match=message):
        prefixes.go_on(tiny, both["rows"], state, [[1]], [1], 1, prefix)


@pytest.mark.parametrize("name", COMPRESSED)
def test_rows_have_the_full_cache_of_the_prefix_codec(tiny, name):
    config = compressed(tiny, **COMPRESSED[name])
    own = rows_config(config)
    assert own == make_spec(tiny.spec, codec=config.codec)
