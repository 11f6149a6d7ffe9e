"""Batch-Max (Metel et al. 2024), arXiv 2412.05693."""

from jaxtyping import Array, Float

from kvjax.policies.attention_sums import attention_sum_policy, num_queries
from kvjax.policies.base import Policy, memoized
from kvjax.types import View


@memoized
def average_attention() -> Policy:
    """Keeps the pairs with the highest average attention weight.

        score = (sum of the weights received) / age
        age   = number of queries that have seen the pair

    A sum favours old pairs, which more queries have seen; the average does not. Weights
    are averaged over the G query heads of a KV head. The paper's curr_id is the newest
    token that was read: while decoding, the cache evicts before the next token attends,
    so that token does not count in the age.

    Needs: attn_sum, the column sums of the attention weights.
    Source: Batch-Max (Metel et al. 2024), arXiv 2412.05693, section 3.2.
    """

    def score(attn_sum: Float[Array, "B K C"], view: View) -> Array:
        return attn_sum / num_queries(view)

    return attention_sum_policy("average_attention", score)
