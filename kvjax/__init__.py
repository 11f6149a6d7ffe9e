"""kvjax: KV-cache compression for LLM inference in JAX.

model = kvjax.load("smollm2-135m-instruct")
done = kvjax.generate(
    model, prompts, policy=kvjax.policies.key_diff(), budget=512, max_new_tokens=64
)
"""

import pkgutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvjax import cache as cache
    from kvjax import evaluation as evaluation
    from kvjax import policies as policies
    from kvjax import training as training
    from kvjax.cache.config import CacheConfig as CacheConfig
    from kvjax.cache.offload import Offload as Offload
    from kvjax.cache.schedule import Schedule as Schedule
    from kvjax.engine.api import generate as generate
    from kvjax.engine.api import plan as plan
    from kvjax.engine.calibration import calibrate as calibrate
    from kvjax.engine.compiled import clear as clear_programs
    from kvjax.engine.completions import Completion as Completion
    from kvjax.engine.engine import Engine as Engine
    from kvjax.engine.planner import Plan as Plan
    from kvjax.engine.sampling import Sampling as Sampling
    from kvjax.models.weights import load as load
    from kvjax.types import Model as Model
    from kvjax.types import ModelSpec as ModelSpec
    from kvjax.types import UserError as UserError

__version__ = "0.1.0"

# Where each name is, imported when the name is first used: `from kvjax import policies`
# imports neither the engine nor the readers of weights.
_HOMES = {
    "CacheConfig": "kvjax.cache.config:CacheConfig",
    "Completion": "kvjax.engine.completions:Completion",
    "Engine": "kvjax.engine.engine:Engine",
    "Model": "kvjax.types:Model",
    "ModelSpec": "kvjax.types:ModelSpec",
    "Offload": "kvjax.cache.offload:Offload",
    "Plan": "kvjax.engine.planner:Plan",
    "Sampling": "kvjax.engine.sampling:Sampling",
    "Schedule": "kvjax.cache.schedule:Schedule",
    "UserError": "kvjax.types:UserError",
    "cache": "kvjax.cache",
    "calibrate": "kvjax.engine.calibration:calibrate",
    "clear_programs": "kvjax.engine.compiled:clear",
    "evaluation": "kvjax.evaluation",
    "generate": "kvjax.engine.api:generate",
    "load": "kvjax.models.weights:load",
    "plan": "kvjax.engine.api:plan",
    "policies": "kvjax.policies",
    "training": "kvjax.training",
}

__all__ = [
    "CacheConfig",
    "Completion",
    "Engine",
    "Model",
    "ModelSpec",
    "Offload",
    "Plan",
    "Sampling",
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
    if name not in _HOMES:
        raise AttributeError(f"module 'kvjax' has no attribute {name!r}")
    globals()[name] = found = pkgutil.resolve_name(_HOMES[name])
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
