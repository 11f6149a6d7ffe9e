"""One module per paper; `kvjax.policies` exports the policy factories."""
