"""Requests: prompts to complete, each with its own settings."""

import dataclasses

from kvjax.engine.sampling import Sampling


@dataclasses.dataclass(frozen=True)
class Request:
    """One completion to generate.

    A prompt with `sampling.num_samples` completions is one request until it is in rows;
    then every sample is a request of its own with the same number.

    Attributes:
      number: of the request in its run; with `sample` it seeds the sampling, so that a
        request draws the same tokens in any row and beside any others.
      tokens: the prompt's token ids.
      sampling: what is generated, and how tokens are chosen.
      sample: which of `sampling.num_samples` this is.
    """

    number: int
    tokens: tuple[int, ...]
    sampling: Sampling
    sample: int = 0
