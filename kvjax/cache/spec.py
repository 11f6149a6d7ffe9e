"""`CacheSpec`: a cache configuration checked for one model, static in programs."""

import dataclasses
import math
from typing import Any

import numpy as np

from kvjax import policies
from kvjax.cache import budgets, codecs, head_groups, layouts, sizing
from kvjax.cache import offload as offloading
from kvjax.cache.config import CacheConfig
from kvjax.cache.schedule import Schedule
from kvjax.policies import base, checks
from kvjax.types import ModelSpec, UserError, build, whole_number


@dataclasses.dataclass(frozen=True)
class CacheSpec:
    """A cache configuration for one model; hashable, a static argument of programs.

    `checked` makes it from a `CacheConfig`, and checks that the parts fit each other.

    Attributes:
      policy: ranks the cached tokens, pinned pairs included; None for the full cache.
      schedule: when pairs are evicted, with all of its sizes set.
      budget: KV pairs per head: for every layer one int, or one for each of its heads
        where they differ; None for the full cache.
      codec: how pairs are stored.
      layer_codecs: the codec of every layer, where they differ.
      offload: which values lie in host memory; None for none.
      layout: where pairs lie.
      budget_rule: the rule that `budget` came from. It may change `budget` once the
        prompt is read.
      mean_budget: the mean of `budget` over all heads of the model, where they differ.
      eviction: how a layer makes room. `in_place` marks evicted slots empty, and new
        pairs move into them; `compact` gathers the kept pairs at the front. The same
        pairs are kept either way.
      rope_positions: which position a key is rotated by. `original` is that in the
        text; keys are stored rotated. `cache` is that among the kept pairs, counted
        from 0 (StreamingLLM, section 3.2); keys are stored unrotated and are rotated at
        every use. `eviction` is `compact` then, which keeps slots in order.
      rows_per_eviction: rows whose evictions are computed together while decoding.
        Rows of a ragged batch fill up at different steps. Handling only the full ones,
        a few at a time, makes the cost of a row's evictions independent of the other
        rows. None is an eighth of the batch, at least 4.
      implementation: the attention backend, see `kvjax.attention.backends`; None is the
        first that supports the call.
      windows: tokens that each layer's queries see (`ModelSpec.sliding_windows`), 0 for
        all, empty for all in all layers. Whatever the policy, a layer drops the pairs
        that have left its window, and is allocated its window and one block at most.
    """

    policy: policies.Policy | None
    schedule: Schedule
    budget: tuple[head_groups.Sizes, ...] | None
    codec: codecs.Codec = codecs.identity
    layout: layouts.Layout = layouts.DEFAULT
    budget_rule: budgets.BudgetRule | None = None
    mean_budget: float | None = None
    eviction: str = "in_place"
    rope_positions: str = "original"
    rows_per_eviction: int | None = None
    implementation: str | None = None
    windows: tuple[int, ...] = ()
    layer_codecs: tuple[codecs.Codec, ...] = ()
    offload: offloading.Offload | None = None

    def required_stats(self, is_prefill: bool) -> frozenset[str]:
        """Returns the statistics that attention must compute for the policy."""
        if not self.policy or not (is_prefill or self.schedule.evicts_in_decode):
            return frozenset()
        return self.policy.required_stats

    @property
    def first_chunk(self) -> int:
        """Prompt tokens in the first prefill chunk; later ones have `prefill_chunk`.

        The tokens read before the first eviction then fill |kv| exactly, as in
        Algorithm 1; or the chunk is |kv| itself, see `Schedule.first_chunk`. Where
        heads differ, |kv| is that of the smallest head that fills up.
        """
        chunk = self.schedule.prefill_chunk
        if not self.schedule.evicts_in_prefill:
            return chunk
        least = min(self.fillable or {chunk})
        if self.schedule.first_chunk != "budget":
            return least % chunk or chunk
        smallest = min(head_groups.distinct_sizes(self.budget))  # a window's, perhaps
        over = max(least - smallest, 0)
        return least - math.ceil(over / chunk) * chunk

    def heads(self, spec: ModelSpec) -> tuple[tuple[head_groups.Heads, ...], ...]:
        """Returns the head groups of every layer, see `kvjax.cache.head_groups`."""
        return tuple(
            map(head_groups.of_sizes, self.budget or (None,) * spec.num_layers)
        )

    def of_group(self, index: int, heads: head_groups.Heads) -> "CacheSpec":
        """Returns the spec of a model that has only those heads of that layer."""
        budget = self.budget and (head_groups.size_of(self.budget[index], heads),)
        return dataclasses.replace(self.of_layer(index), budget=budget)

    def of_layer(self, index: int) -> "CacheSpec":
        """Returns the spec of a model that has only that layer."""
        alone = slice(index, index + 1)
        budget = self.budget and self.budget[alone]
        return dataclasses.replace(
            self,
            budget=budget,
            budget_rule=None,
            windows=self.windows[alone],
            codec=self.codec_of(index),
            layer_codecs=(),
        )

    @property
    def reading(self) -> "CacheSpec":
        """The spec during prefill: codecs that encode after the prompt do not yet."""
        if not self.codec.after_prompt:
            return self
        plain = {"codec": codecs.identity, "layer_codecs": (), "offload": None}
        return dataclasses.replace(self, **plain)

    def codec_of(self, index: int) -> codecs.Codec:
        """Returns the codec of a layer."""
        return self.layer_codecs[index] if self.layer_codecs else self.codec

    def recalls(self, index: int) -> bool:
        """Returns whether a layer fetches a few values at a time from host memory."""
        return self.codec_of(index).value.on_host

    @property
    def compacts(self) -> bool:
        """Whether something happens to the state between prefill and decode."""
        return self.schedule.compacts or self.codec.after_prompt

    def window(self, index: int) -> int:
        """Returns the length of a layer's sliding window in tokens; 0 for none."""
        return self.windows[index] if self.windows else 0

    @property
    def fillable(self) -> set[int]:
        """Sizes of the heads that fill up, so that the policy chooses what to evict.

        The other heads hold their sliding window and one incoming block, and only drop
        pairs that have left the window.
        """
        return {
            size
            for index, sizes in enumerate(self.budget)
            for size in head_groups.distinct_sizes((sizes,))
            if not self.window(index) or size < self._most(index)
        }

    def head_budgets(self, spec: ModelSpec) -> tuple[int, ...]:
        """Returns the budgets of all heads of all layers, [L * K]."""
        return tuple(
            size
            for sizes in self.budget
            for size in head_groups.sizes_per_head(sizes, spec.num_kv_heads)
        )

    @property
    def measures(self) -> bool:
        """Whether layers are measured while the prompt is read."""
        return self.budget_rule is not None and self.budget_rule.measure is not None

    def prefill_capacity(
        self, spec: ModelSpec, prompt: int, new: int
    ) -> tuple[int, ...]:
        """Returns slots per head of every head group during prefill."""
        if self.schedule.evicts_in_prefill:
            return self._slots(spec)
        return self._slots(spec, prompt if self.compacts else prompt + new)

    def decode_capacity(
        self, spec: ModelSpec, prompt: int, new: int
    ) -> tuple[int, ...]:
        """Returns slots per head of every head group during decode."""
        if self.schedule.evicts_in_decode:
            return self._slots(spec)
        if self.schedule.compacts:
            return self._slots(spec, more=new)
        return self._slots(spec, prompt + new)

    def _slots(
        self, spec: ModelSpec, tokens: int | None = None, more: int = 0
    ) -> tuple[int, ...]:
        """Returns slots for `tokens` or the budget, plus `more`; limited by windows."""
        return tuple(
            min(
                (tokens or head_groups.size_of(self.budget[i], heads)) + more,
                self._most(i),
            )
            for i, layer in enumerate(self.heads(spec))
            for heads in layer
        )

    def _most(self, index: int) -> float:
        """Returns the most pairs that a head can hold: its window and one block."""
        window = self.window(index)
        return window + self.schedule.prefill_chunk if window else math.inf


def make_spec(
    spec: ModelSpec,
    policy: Any = None,
    budget: Any = None,
    schedule: Any = None,
    *,
    length: int | None = None,
    **fields: Any,
) -> CacheSpec:
    """Returns `checked(spec, CacheConfig(policy, budget, ...), length)`.

    Raises:
      UserError: see `checked`; a budget for the full cache.
    """
    if policy is None and budget is not None:
        raise UserError(
            f"policy=None is the full cache, without a budget: got budget {budget}; "
            "name a policy, or leave the budget out"
        )
    fields |= {"policy": policy, "budget": budget, "schedule": schedule}
    config = build(CacheConfig, fields, "a cache configuration")
    return checked(spec, config, length)


def checked(
    spec: ModelSpec, config: CacheConfig, length: int | None = None
) -> CacheSpec:
    """Checks a cache configuration for a model; returns what programs are compiled for.

    Args:
      spec: the model's shape.
      config: what a user says of the cache.
      length: tokens of the longest prompt to come, which a share such as "25%" is of,
        and which some budget rules ask for.

    Raises:
      UserError: a budget of 0, not larger than one block, or filled by pinned pairs; a
        number of budgets other than the layers or heads; heads of different sizes
        under a policy that compares heads; a policy without a budget, or with functions
        that do not go together, see `kvjax.policies.checks`; a codec that does not fit
        the layout or the model's heads; `rope_positions="cache"` under a policy that
        compares keys with past queries, since keys are rotated anew under them.
    """
    if length is not None:
        length = whole_number("length", length, 1)
    options = _stored(spec, config) | config.options()
    policy, schedule = config.made_policy(), config.schedule
    if policy is None:
        made = _full_cache(spec, schedule, options)
        _check_groups(made, spec)
        return made
    schedule = schedule or Schedule()
    if schedule.phases == "none" or config.budget is None:
        raise UserError(
            f"policy {policy.name!r} needs a budget (got {config.budget}) and a "
            f"schedule that evicts (got {schedule.phases!r})"
        )
    base.validate(policy)
    base.check_params(policy, spec.num_layers)
    policy, rule, per_layer = sizing.of_layers(
        spec,
        policy,
        schedule,
        budget=config.budget,
        rule=config.made_rule(),
        pinned=config.pinned,
        length=length,
    )
    possible = budgets.possible(rule, per_layer)
    schedule = schedule.of_budget(min(possible))
    later = possible - head_groups.distinct_sizes(per_layer)
    is_mean = isinstance(config.budget, str) or config.budget_rule is not None
    per_layer = sizing.within_windows(
        spec, per_layer, schedule.prefill_chunk, (length or math.inf) if is_mean else 0
    )
    options |= {"windows": spec.sliding_windows}
    made = CacheSpec(policy, schedule, per_layer, budget_rule=rule, **options)
    for size in (fillable := made.fillable | later):
        sizing.check_budget(size, policy, schedule)
    least = min(fillable or head_groups.distinct_sizes(per_layer))
    if len(head_groups.distinct_sizes(per_layer)) > 1:
        mean = float(np.mean(made.head_budgets(spec)))
        made = dataclasses.replace(made, mean_budget=mean)
    _check_rotation(made)
    _check_heads(made)
    _check_residual(made, least)
    _check_groups(made, spec)
    checks.check_policy(policy, spec, least, schedule.evicts_in_decode)
    return made


def _stored(spec: ModelSpec, config: CacheConfig) -> dict[str, Any]:
    """Returns the fields of `CacheSpec` on how and where pairs are stored, checked."""
    codec, layout, offload = config.made_codec(), config.made_layout(), config.offload
    if offload and layout.exchange_values is None:
        raise UserError(
            f"layout {layout.name!r} keeps no values in host memory: leave offload "
            "out, or take another"
        )
    layer_codecs = _layer_codecs(spec, codec, offload)
    for each in {codec, *layer_codecs}:
        layout.check(each)
        codecs.check(each, spec.head_dim)
    stored = {"codec": codec, "layout": layout, "offload": offload}
    return stored | {"layer_codecs": layer_codecs}


def _full_cache(
    spec: ModelSpec, schedule: Schedule | None, options: dict[str, Any]
) -> CacheSpec:
    schedule = schedule or Schedule("none")
    if schedule.phases != "none":
        raise UserError(
            "policy=None is the full cache, with the schedule 'none': got "
            f"{schedule.phases!r}; name a policy"
        )
    schedule = schedule.of_budget(None)
    return CacheSpec(None, schedule, None, windows=spec.sliding_windows, **options)


def _layer_codecs(
    spec: ModelSpec, codec: codecs.Codec, offload: offloading.Offload | None
) -> tuple[codecs.Codec, ...]:
    """Returns every layer's codec; nothing where all layers have the same."""
    if codec.of_layer is None and offload is None:
        return ()
    layers, count = range(spec.num_layers), spec.num_layers
    found = [codec.of_layer(i, count) if codec.of_layer else codec for i in layers]
    if offload is not None:
        offloading.check(offload, spec)
        found = [offloading.codec_of(each, i, offload) for i, each in enumerate(found)]
    return tuple(
        each._replace(after_prompt=codec.after_prompt, of_layer=None) for each in found
    )


def _check_heads(config: CacheSpec) -> None:
    """Raises UserError if heads differ in size under a policy that compares heads."""
    differ = any(not isinstance(sizes, int) for sizes in config.budget)
    if differ and config.policy.needs_all_heads:
        raise UserError(
            f"policy {config.policy.name!r} compares the heads of a layer, so "
            "they cannot keep different numbers of pairs: give one size per layer, or "
            "use another policy"
        )


def _check_groups(config: CacheSpec, spec: ModelSpec) -> None:
    """Raises UserError for a codec of several keys where single keys are dropped."""
    schedule, every = config.schedule, config.layer_codecs or (config.codec,)
    codec = next((codec for codec in every if codec.key.group_size > 1), None)
    if codec is None:
        return
    if any(config.windows):
        raise UserError(
            f"codec {codec.name!r} encodes {codec.key.group_size} keys together, and "
            f"{spec.name} drops single pairs that leave its sliding windows: use int2, "
            "or another codec that takes tokens one by one"
        )
    if config.policy and (schedule.evicts_in_decode or not codec.after_prompt):
        raise UserError(
            f"codec {codec.name!r} encodes {codec.key.group_size} keys together, and "
            f"policy {config.policy.name!r} evicts single pairs under the schedule "
            f"{schedule.phases!r}: take after_prompt({codec.name!r}) with the schedule "
            "'after_prefill' or 'prefill_only', or a codec such as int2"
        )


def _check_residual(config: CacheSpec, budget: int) -> None:
    """Raises UserError for a residual that is longer than the budget."""
    every = config.layer_codecs or (config.codec,)
    codec = max(every, key=lambda codec: codec.residual_length)
    if codec.residual_length > budget:
        raise UserError(
            f"codec {codec.name!r} leaves the newest {codec.residual_length} pairs as "
            f"they are, and a head keeps {budget}: lower residual_length or raise the "
            "budget"
        )


def _check_rotation(made: CacheSpec) -> None:
    """Raises UserError for a policy that compares past queries with keys that move."""
    past = made.required_stats(is_prefill=True) & {"queries", "pre_rope_queries"}
    if past and made.rope_positions == "cache":
        raise UserError(
            f"rope_positions='cache' moves the keys under past queries, which policy "
            f"{made.policy.name!r} compares with them: use rope_positions='original'"
        )
