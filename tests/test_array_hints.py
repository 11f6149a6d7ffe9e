"""What annotations say of arrays holds while these tests run."""

import jax.numpy as jnp
import jaxtyping
import pytest

from kvjax import policies


@pytest.mark.parametrize(
    ("what", "changes"),
    [
        ("positions", {"positions": jnp.zeros((2, 3, 5), jnp.int32)}),  # C is 4
        ("num_evict", {"num_evict": jnp.zeros((1,), jnp.int32)}),  # B is 2
        ("scores", {"scores": jnp.zeros((2, 3, 4), jnp.int32)}),  # not float
    ],
)
def test_an_array_against_its_annotation_is_refused(what, changes):
    arrays = {
        "scores": jnp.zeros((2, 3, 4)),
        "positions": jnp.zeros((2, 3, 4), jnp.int32),
        "num_evict": jnp.zeros((2,), jnp.int32),
    }
    policies.select_evictions(**arrays)
    with pytest.raises(jaxtyping.TypeCheckError, match=f"parameter '{what}'"):
        policies.select_evictions(**arrays | changes)


def test_other_annotations_are_left_to_the_type_checker():
    with pytest.raises(ValueError, match="from 0 to 1"):
        policies.h2o(recent="half")
