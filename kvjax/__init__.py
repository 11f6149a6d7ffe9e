"""kvjax: KV-cache compression for LLM inference in JAX.

model = kvjax.load("smollm2-135m-instruct")
done = kvjax.generate(
    model, prompts, policy=kvjax.policies.key_diff(), budget=512, max_new_tokens=64
)
"""

import importlib

from kvjax import cache, policies
from kvjax.cache.offload import Offload
from kvjax.cache.schedule import Schedule
from kvjax.engine.api import Completion, generate, plan
from kvjax.engine.calibration import calibrate
from kvjax.engine.compiled import clear as clear_programs
from kvjax.engine.planner import Plan
from kvjax.models.weights import load
from kvjax.types import Model, ModelSpec, UserError

__version__ = "0.1.0"

__all__ = [
    "Completion",
    "Model",
    "ModelSpec",
    "Offload",
    "Plan",
    "Schedule",
    "UserError",
    "cache",
    "calibrate",
    "clear_programs",
    "generate",
    "load",
    "plan",
    "policies",
]


def __getattr__(name: str):
    """Imports `kvjax.evaluation` and `kvjax.training` when they are first used."""
    if name in ("evaluation", "training"):
        return importlib.import_module(f"kvjax.{name}")
    raise AttributeError(f"module 'kvjax' has no attribute {name!r}")
