"""kvjax: KV-cache compression for LLM inference in JAX.

model = kvjax.load("smollm2-135m-instruct")
done = kvjax.generate(
    model, prompts, policy=kvjax.policies.key_diff(), budget=512, max_new_tokens=64
)
"""

from kvjax import policies
from kvjax.completions import Completion, generate
from kvjax.plan import Plan, plan
from kvjax.types import Model, ModelSpec, Schedule, UserError
from kvjax.weights import load

__version__ = "0.1.0"

__all__ = [
    "Completion",
    "Model",
    "ModelSpec",
    "Plan",
    "Schedule",
    "UserError",
    "generate",
    "load",
    "plan",
    "policies",
]
