"""What is kept of a KV cache, and how: parts that are checked and joined."""

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
    """What is kept of a KV cache, and how; hashable, a static argument.

    `CacheConfig.spec` makes it, and checks that the parts fit each other.

    Attributes:
      policy: which pairs stay; None only for the full cache.
      schedule: when pairs go, its sizes chosen.
      budget: |kv|, pairs per head: for every layer one int, or one for each of its
        heads where they differ; None only for the full cache.
      codec: how pairs are stored.
      layer_codecs: of every layer, where they differ.
      offload: which values lie in host memory; None for none.
      layout: where they lie.
      budget_rule: what `budget` came from, and may change it once the prompt is read.
      mean_budget: of `budget` over all heads of the model, where they differ.
      eviction: how a layer makes room. `in_place` marks victims empty and lets new
        pairs move into their slots; `compact` moves the kept pairs to the front. The
        same pairs stay either way.
      rope_positions: where a key stands for its rotary angle. `original`: where it
        stood in the text; keys are stored rotated. `cache`: where it stands among the
        pairs kept, counted from 0, as StreamingLLM has it (section 3.2); keys are
        stored as they come and rotated at every use, and `eviction` has to be
        `compact`, which keeps slots in order.
      rows_per_eviction: rows whose evictions are worked out together while decoding.
        Rows of a ragged batch fill up at different steps; handling only those that are
        full, a few at a time, makes the cost of a row's evictions independent of the
        others. None is an eighth of the batch, or 4 rows where that is less.
      implementation: which attention runs, see `kvjax.attention.backends`; None is the
        best there is.
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
        """What attention must hand over; nothing once no more evictions come."""
        if not self.policy or not (is_prefill or self.schedule.evicts_in_decode):
            return frozenset()
        return self.policy.required_stats

    @property
    def first_chunk(self) -> int:
        """Prompt tokens that are read first, before `prefill_chunk` at a time.

        So many that what is read before the first eviction fills |kv| exactly, as in
        Algorithm 1, or |kv| itself, see `Schedule.first_chunk`; |kv| of the smallest
        head that fills up, where they differ.
        """
        chunk = self.schedule.prefill_chunk
        if not self.schedule.evicts_in_prefill:
            return chunk
        least = min(self.fillable or {chunk})
        if self.schedule.first_chunk != "budget":
            return least % chunk or chunk
        over = max(
            least - min(head_groups.distinct_sizes(self.budget)), 0
        )  # of some window
        return least - math.ceil(over / chunk) * chunk

    def heads(self, spec: ModelSpec) -> tuple[tuple[head_groups.Heads, ...], ...]:
        """Heads of every part of every layer, see `kvjax.cache.head_groups`."""
        return tuple(
            map(head_groups.of_sizes, self.budget or (None,) * spec.num_layers)
        )

    def of_group(self, index: int, heads: head_groups.Heads) -> "CacheSpec":
        """What is kept of a model with those heads of that layer alone."""
        budget = self.budget and (head_groups.size_of(self.budget[index], heads),)
        return dataclasses.replace(self.of_layer(index), budget=budget)

    def of_layer(self, index: int) -> "CacheSpec":
        """What is kept of a model with that layer alone."""
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
        """The same while the prompt is read, which some codecs wait for the end of."""
        if not self.codec.after_prompt:
            return self
        plain = {"codec": codecs.identity, "layer_codecs": (), "offload": None}
        return dataclasses.replace(self, **plain)

    def codec_of(self, index: int) -> codecs.Codec:
        """How a layer's pairs are stored."""
        return self.layer_codecs[index] if self.layer_codecs else self.codec

    def recalls(self, index: int) -> bool:
        """Whether a layer's values are fetched from host memory, a few at a time."""
        return self.codec_of(index).value.on_host

    @property
    def compacts(self) -> bool:
        """Whether something happens to the state between prefill and decode."""
        return self.schedule.compacts or self.codec.after_prompt

    def window(self, index: int) -> int:
        """Tokens that a layer's queries see; 0 for all."""
        return self.windows[index] if self.windows else 0

    @property
    def fillable(self) -> set[int]:
        """Sizes of the heads in which the policy chooses.

        Others have room for their window and the block that comes in before what it
        hides is dropped.
        """
        return {
            size
            for index, sizes in enumerate(self.budget)
            for size in head_groups.distinct_sizes((sizes,))
            if not self.window(index) or size < self._most(index)
        }

    def head_budgets(self, spec: ModelSpec) -> tuple[int, ...]:
        """[L * K], pairs of every head of every layer."""
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
        """Slots per head of every part while prompts of up to `prompt` are read."""
        if self.schedule.evicts_in_prefill:
            return self._slots(spec)
        return self._slots(spec, prompt if self.compacts else prompt + new)

    def decode_capacity(
        self, spec: ModelSpec, prompt: int, new: int
    ) -> tuple[int, ...]:
        """Slots per head of every part while `new` tokens are generated."""
        if self.schedule.evicts_in_decode:
            return self._slots(spec)
        if self.schedule.compacts:
            return self._slots(spec, more=new)
        return self._slots(spec, prompt + new)

    def _slots(
        self, spec: ModelSpec, tokens: int | None = None, more: int = 0
    ) -> tuple[int, ...]:
        """Slots for so many tokens, or the budget and some more; windows limit both."""
        return tuple(
            min(
                (tokens or head_groups.size_of(self.budget[i], heads)) + more,
                self._most(i),
            )
            for i, layer in enumerate(self.heads(spec))
            for heads in layer
        )

    def _most(self, index: int) -> float:
        """Pairs that a head of a layer can hold: its window's, and one block's."""
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
    """Fields of `CacheSpec` on how and where pairs are stored, checked."""
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
    """How every layer's pairs are stored; empty where all are alike."""
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
    """Raises UserError for heads apart under a policy that looks across them."""
    apart = any(not isinstance(sizes, int) for sizes in config.budget)
    if apart and config.policy.needs_all_heads:
        raise UserError(
            f"policy {config.policy.name!r} looks across the heads of a layer, which "
            "cannot keep different numbers of pairs then: give one size per layer, or "
            "use another policy"
        )


def _check_groups(config: CacheSpec, spec: ModelSpec) -> None:
    """Raises UserError for keys encoded together of which single ones are dropped."""
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
    """Raises UserError for pairs that cannot be evicted, or more than are kept."""
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
