"""A job: the shape of a batch, and what is done to it."""

import dataclasses
import math
from typing import NamedTuple

from jax.sharding import Mesh

from kvjax.cache import head_groups
from kvjax.cache.spec import CacheSpec
from kvjax.engine.sampling import SamplingSpec
from kvjax.engine.steps import GREEDY, NO_EOS
from kvjax.models import placement
from kvjax.parallel import axes
from kvjax.types import Model, ModelSpec, UserError

_GRAIN = 128  # prompts are padded to multiples of this many tokens


class PrefixShape(NamedTuple):
    """The static description of a prefix that rows share, see `kvjax.cache.prefix`.

    Attributes:
      config: the configuration that it was compressed under.
      capacity: its slots per head, one number per head group of every layer.
    """

    config: CacheSpec
    capacity: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Job:
    """The static description of a batch, which decides its programs; hashable.

    Attributes:
      spec: the model's shape.
      config: configuration of the KV cache.
      batch: B, rows that decode together.
      max_prompt_len: most prompt tokens per row, see `bucket`.
      max_new_tokens: most tokens to generate or to score per row; 0 for a job that only
        reads and compresses prompts.
      dtype: of weights and stored pairs, a name ("float32").
      sampling: whether rows sample, and what is returned beside tokens.
      eos: tokens that end a row, if its request says so.
      mesh: the devices it runs on, see `kvjax.cache.sharded`; None is the default
        device.
      decode_chunk: most tokens that one call of `decode` draws, so that the host can
        look for stop texts in between; None for all.
      scored: whether new tokens are given and scored, instead of drawn.
      keep_logits: whether a scored job returns all logits.
      prefill_batch: rows whose prompts are read together; None for all. If fewer,
        prompts are read group by group into a pool of `batch` rows (staggered prefill).
      continuous: whether rows of the pool that have ended are replaced while the others
        decode.
      prefix: the shape of what all rows go on after; None for nothing.
    """

    spec: ModelSpec
    config: CacheSpec
    batch: int
    max_prompt_len: int
    max_new_tokens: int
    dtype: str = "float32"
    sampling: SamplingSpec = GREEDY
    eos: tuple[int, ...] = NO_EOS
    mesh: Mesh | None = None
    decode_chunk: int | None = None
    scored: bool = False
    keep_logits: bool = False
    prefill_batch: int | None = None
    continuous: bool = False
    prefix: "PrefixShape | None" = None

    def __post_init__(self):
        if self.batch % self.data_parallel:
            raise UserError(
                f"a batch of {self.batch} does not divide over the "
                f"{self.data_parallel} groups of devices that the mesh's data axis "
                "makes: take a multiple"
            )
        if self.mesh:
            head_groups.check_split(self.config.budget, self.mesh.shape[axes.HEADS])

    @property
    def data_parallel(self) -> int:
        """The number of device groups that the rows are divided over."""
        return self.mesh.shape[axes.DATA] if self.mesh else 1

    @property
    def prefill_capacity(self) -> tuple[int, ...]:
        sizes = self.max_prompt_len, self.max_new_tokens
        return self.config.prefill_capacity(self.spec, *sizes)

    @property
    def decode_capacity(self) -> tuple[int, ...]:
        sizes = self.max_prompt_len, self.max_new_tokens
        return self.config.decode_capacity(self.spec, *sizes)

    @property
    def group(self) -> "Job":
        """The job of the rows whose prompts are read together."""
        batch = self.prefill_batch or self.batch
        return dataclasses.replace(
            self, batch=batch, prefill_batch=None, continuous=False
        )

    @property
    def is_staggered(self) -> bool:
        """True if prompts are read into a pool, group by group."""
        return self.prefill_batch is not None and self.prefill_batch < self.batch

    @property
    def has_pool(self) -> bool:
        """True if prompts that have been read are copied to rows of a pool."""
        return self.is_staggered or self.continuous

    @property
    def mixes(self) -> bool:
        """True if prompts can be read in the steps that decode other rows."""
        one_width = self.config.first_chunk <= self.config.schedule.prefill_chunk
        return self.continuous and one_width

    @property
    def steps(self) -> int:
        """The most tokens per row that one call of `decode` draws."""
        return max(1, self.decode_chunk or self.max_new_tokens - 1)


def job_of(
    model: Model,
    config: CacheSpec,
    prompt: int,
    new: int,
    sampling: SamplingSpec = GREEDY,
    eos: tuple[int, ...] = NO_EOS,
) -> Job:
    """Returns the smallest batch of a model, on its devices and in its dtype."""
    over, dtype = placement.of(model.params), str(model.params["embed"].dtype)
    rows = over.shape[axes.DATA] if over else 1
    return Job(model.spec, config, rows, prompt, new, dtype, sampling, eos, over)


def bucket(spec: ModelSpec, config: CacheSpec, longest: int, new: int) -> int:
    """Returns the prompt length that a program is compiled for.

    If the state's capacity does not depend on the prompt, one program serves every
    prompt that the model can read. Otherwise lengths are rounded up to multiples of 128
    tokens, or of an eighth of their length.

    Raises:
      UserError: prompt and new tokens together exceed the model's context.
    """
    if longest + new > spec.context_length:
        raise UserError(
            f"a prompt of {longest} tokens and {new} new ones exceed the context of "
            f"{spec.name}, {spec.context_length} tokens: shorten the prompt"
        )
    if config.schedule.evicts_in_prefill:
        return spec.context_length
    return rounded(longest, _GRAIN)


def rounded(number: int, grain: int = 1) -> int:
    """Returns a number rounded up, to a multiple of `grain` or of an eighth of it.

    So few programs serve all numbers, each with at most an eighth to spare.
    """
    grain = max(grain, 1 << max((number - 1).bit_length() - 3, 0))
    return math.ceil(number / grain) * grain


def size_class(config: CacheSpec, longest: int) -> int:
    """Returns the power of two that prompts of this length share a batch in.

    There is one class if the state's capacity does not depend on the prompt.
    """
    if config.schedule.evicts_in_prefill:
        return 0
    return max(longest - 1, _GRAIN - 1).bit_length()
