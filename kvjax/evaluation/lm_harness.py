"""Registers kvjax as a model of EleutherAI's lm-evaluation-harness.

    pip install 'kvjax[harness]'
    python -m kvjax.evaluation.lm_harness --tasks gsm8k --model kvjax \\
        --model_args pretrained=smollm2-135m-instruct,policy=key_diff,budget=512

Arguments after the module's name are those of the harness's command line, `lm_eval`.
`lm_eval` knows only the models of its own package, so this module registers kvjax and
then calls it. docs/harness.md lists the model's arguments.
"""

import dataclasses
import functools
import sys
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import jax
from tqdm import tqdm

from kvjax.cache.spec import checked
from kvjax.engine import jobs, likelihood
from kvjax.engine.engine import Engine
from kvjax.engine.memory import device_memory
from kvjax.engine.requests import Request
from kvjax.engine.sampling import Sampling
from kvjax.evaluation import lm_arguments
from kvjax.messages import warn
from kvjax.models.weights import load
from kvjax.types import Model, UserError

MAX_NEW = 256  # tokens to generate if a task sets no number; the harness's default
_NEW = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_SAMPLING = ("do_sample", "temperature", "top_k", "top_p")


class Requests:
    """Answers the harness's requests; `model_class` adds the harness's base class.

    Args:
      pretrained: a model, or an argument of `kvjax.load`.
      policy: one of `kvjax.policies.names()`, or `module:function` for a policy of the
        user's; None or `full` is the full cache.
      budget: KV pairs per head; or a list with one number, or one per head, for every
        layer; or a share of `prompt_tokens`, such as "25%".
      budget_rule: divides the budget between heads, see `kvjax.cache.budgets`: a name,
        or `module:function`.
      prompt_tokens: length of the longest prompt, for budgets that depend on it.
      schedule: the phases of `kvjax.Schedule`.
      prefill_chunk, evict_size: of `kvjax.Schedule`.
      dtype, context: of `kvjax.load`.
      memory_gb: see `kvjax.engine.memory.device_memory`; batches fill this memory.
      pinned, codec, layout, eviction, rope_positions, implementation: of
        `kvjax.CacheConfig`.
      offload: N of `kvjax.Offload`; None keeps values on the device.
      seed: of the sampling.
      batch_size: an argument of the harness. 1 (its default) and `auto` mean as many
        prompts as fit; another number is the largest batch.
      max_batch_size: the largest batch.
      device: an argument of the harness, ignored. JAX chooses the device; set the
        environment variable JAX_PLATFORMS to change it.
      **options: of the policy (`policy.NAME`), the budget rule (`budget_rule.NAME`),
        the codec (`codec.NAME`), and other fields of the offload (`offload.NAME`).

    Raises:
      UserError: the arguments are not valid or do not fit. Most errors are raised
        before the model is loaded.
    """

    cache_hook: Any = None  # the harness sets its cache of answers here

    def __init__(
        self,
        pretrained: str | Model,
        policy: str | None = None,
        budget: int | str | Sequence[int | Sequence[int]] | None = None,
        budget_rule: str | None = None,
        prompt_tokens: int | None = None,
        schedule: str = "prefill_and_decode",
        prefill_chunk: int | None = None,
        evict_size: int | None = None,
        dtype: str = "float32",
        context: int | None = None,
        memory_gb: float | None = None,
        pinned: Sequence[int] | None = None,
        codec: str = "identity",
        layout: str = "dense",
        offload: int | None = None,
        eviction: str | None = None,
        rope_positions: str = "original",
        implementation: str | None = None,
        seed: int = 0,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        **options: Any,
    ):
        super().__init__()
        fields = {
            "policy": policy,
            "budget": budget,
            "budget_rule": budget_rule,
            "schedule": schedule,
            "prefill_chunk": prefill_chunk,
            "evict_size": evict_size,
            "pinned": pinned,
            "codec": codec,
            "layout": layout,
            "offload": offload,
            "eviction": eviction,
            "rope_positions": rope_positions,
            "implementation": implementation,
        }
        config = lm_arguments.cache_config(fields, options)
        lm_arguments.check_length(config, prompt_tokens)
        named = not isinstance(pretrained, tuple)
        model = load(pretrained, dtype, context) if named else pretrained
        if model.tokenizer is None:
            raise UserError(
                f"{model.spec.name} has no tokenizer: the harness needs one"
            )
        if (
            model.tokenizer.bos_token_id is None
            and model.tokenizer.eos_token_id is None
        ):
            raise UserError(
                f"the tokenizer of {model.spec.name} has neither BOS nor EOS, one of "
                "which stands for an empty context"
            )
        self.model, self.seed = model, seed
        self.config = checked(model.spec, config, prompt_tokens)
        self.memory = device_memory(memory_gb)
        self.most = lm_arguments.most(batch_size, max_batch_size)
        self.engine = Engine(
            model,
            config,
            memory_gb=memory_gb,
            max_rows=self.most,
            prompt_tokens=prompt_tokens,
            show_progress=False,
        )
        self.template: str | None = None

    # --- the harness's interface to the tokenizer -----------------------------------

    @property
    def tokenizer(self) -> Any:
        return self.model.tokenizer

    @property
    def tokenizer_name(self) -> str:
        """Returns the name that separates cached requests of different tokenizers."""
        name = getattr(self.tokenizer, "name_or_path", "") or self.model.spec.name
        return name.replace("/", "__")

    @property
    def max_length(self) -> int:
        return self.model.spec.context_length

    @property
    def max_gen_toks(self) -> int:
        return MAX_NEW

    @property
    def eot_token_id(self) -> int | None:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """Returns the token that stands for an empty context: BOS, or else EOS."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Returns token ids; adds no special tokens if the text begins with the prefix.

        The prefix is the text of `prefix_token_id`.
        """
        if add_special_tokens is None:
            prefix = self.tokenizer.decode([self.prefix_token_id])
            add_special_tokens = not string.startswith(prefix)
        encoded = self.tokenizer(
            string, add_special_tokens=add_special_tokens, verbose=False
        )
        return list(encoded["input_ids"])

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Sets and returns the template that `--apply_chat_template` names.

        Raises:
          UserError: the tokenizer has no chat template, or none of that name.
        """
        if not chat_template:
            return None
        known = self.tokenizer.chat_template
        if not known:
            raise UserError(
                f"{self.model.spec.name} has no chat template: leave out "
                "--apply_chat_template"
            )
        if isinstance(known, dict):
            name = "default" if chat_template is True else chat_template
            if name not in known:
                raise UserError(
                    f"chat template {name!r}: {self.model.spec.name} has "
                    + ", ".join(sorted(known))
                )
            known = known[name]
        elif chat_template is not True:
            raise UserError(
                f"chat template {chat_template!r}: {self.model.spec.name} has only "
                "one, which has no name; leave the name out"
            )
        self.template = known
        return known

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Returns the messages as one text.

        If the template refuses a system message, the message is left out with a
        warning. Without a generation prompt, the last message is left open, so that the
        model continues it.
        """
        from jinja2.exceptions import TemplateError

        write = functools.partial(
            self.tokenizer.apply_chat_template,
            chat_template=self.template,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        try:
            return write(chat_history)
        except TemplateError as error:
            others = [turn for turn in chat_history if turn["role"] != "system"]
            if len(others) == len(chat_history):
                raise
            warn(f"the chat template refuses a system message, left out: {error}")
            return write(others)

    # --- the three kinds of requests ------------------------------------------------

    def loglikelihood(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Returns each continuation's log-probability, and whether greedy generates it.

        Each request is (context, continuation), tokenized as one text. A context that
        is too long loses its beginning.

        Raises:
          UserError: a continuation adds no token to its context, or is longer than the
            model's context.
        """
        texts = [request.args for request in requests]
        pairs, cut = [], []
        for context, continuation in texts:
            pair = self._encoded(context, continuation)
            pairs.append(self._shortened(*pair))
            cut.append(len(pair[0]) - len(pairs[-1][0]))
        self._warn_of_cuts("contexts", cut)
        found = self._likelihoods("loglikelihood", pairs, disable_tqdm)
        for args, answer in zip(texts, found, strict=True):
            self._remember("loglikelihood", args, answer)
        return found

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Returns each text's log-probability, in windows of the model's context.

        Each request is (text,). The prefix token precedes the text as the tokenizer
        encodes it. If the tokenizer adds BOS, the first window therefore begins with
        two of them, and the second is scored. An empty text has log-probability 0.

        Raises:
          UserError: a text that is not empty has no tokens.
        """
        if self.config.policy and not self.config.schedule.evicts_in_decode:
            warn(
                f"schedule {self.config.schedule.phases!r} compresses only prompts, "
                "and rolling windows are nearly all continuation: expect the full "
                "cache's results"
            )
        texts = [request.args for request in requests]
        pairs, owners = [], []
        for owner, (text,) in enumerate(texts):
            tokens = self.tok_encode(text)
            if text and not tokens:
                raise UserError(
                    f"text {text!r:.80} has no tokens to score: leave it out"
                )
            cuts = likelihood.windows(tokens, self.prefix_token_id, self.max_length)
            pairs.extend(cuts)
            owners.extend([owner] * len(cuts))
        totals = [0.0] * len(texts)
        found = self._likelihoods("loglikelihood_rolling", pairs, disable_tqdm)
        for owner, (logprob, _) in zip(owners, found, strict=True):
            totals[owner] += logprob
        for args, total in zip(texts, totals, strict=True):
            self._remember("loglikelihood_rolling", args, total)
        return totals

    def generate_until(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[str]:
        """Returns the generated texts, each up to its first stop text.

        Each request is (context, gen_kwargs).
        """
        groups, asked, cut = defaultdict(list), [], []
        for index, (context, gen_kwargs) in enumerate(r.args for r in requests):
            sampling = self._generation(gen_kwargs)
            whole = self.tok_encode(context) or [self.prefix_token_id]
            prompt = tuple(whole[-(self.max_length - sampling.max_new_tokens) :])
            cut.append(len(whole) - len(prompt))
            request = Request(index, prompt, sampling)
            groups[jobs.size_class(self.config, len(prompt))].append(request)
            asked.append(request)
        self._warn_of_cuts("contexts", cut)
        texts: dict[int, str] = {}
        with tqdm(
            total=len(asked), desc="kvjax: generate_until", disable=disable_tqdm
        ) as bar:
            # Longest first, so that prompts that do not fit fail before long work.
            for _, group in sorted(groups.items(), reverse=True):
                for piece in self.engine.run(group):
                    if piece.completion is not None:
                        text = texts[piece.prompt] = piece.completion.text
                        args = requests[piece.prompt].args
                        self._remember("generate_until", args, text)
                        bar.update()
        return [texts[index] for index in range(len(asked))]

    def get_model_info(self) -> dict[str, Any]:
        """Returns fields that the harness writes to its results."""
        schedule, rule = self.config.schedule, self.config.budget_rule
        offload = self.config.offload
        sizes = schedule.prefill_chunk, schedule.evict_size
        return {
            "model_num_parameters": sum(
                leaf.size for leaf in jax.tree.leaves(self.model.params)
            ),
            "model_dtype": str(self.model.params["embed"].dtype),
            "kv_policy": self.config.policy.name if self.config.policy else None,
            "kv_budget": self.config.budget,
            "kv_budget_rule": rule.name if rule else None,
            "kv_codec": self.config.codec.name,
            "kv_offload": offload and dataclasses.asdict(offload),
            "kv_schedule": ", ".join(map(str, (schedule.phases, *sizes))),
        }

    def _encoded(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Returns both as token ids, split as the harness's own models split them.

        White space between them belongs to the continuation. A token that spans both
        belongs to the context.
        """
        if context:
            head = self.tok_encode(context.rstrip())
            tail = self.tok_encode(context + continuation)[len(head) :]
        else:
            tail = self.tok_encode(continuation, add_special_tokens=False)
            has_prefix = tail[:1] == [self.prefix_token_id]
            head, tail = tail[:has_prefix], tail[has_prefix:]
        if not tail:
            raise UserError(
                f"continuation {continuation!r:.80} of a context that ends in "
                f"{context[-40:]!r} has no token of its own to score: it is empty, or "
                "one token spans both; begin it with a space, or leave it out"
            )
        return head or [self.prefix_token_id], tail

    def _shortened(
        self, context: list[int], continuation: list[int]
    ) -> tuple[list[int], list[int]]:
        """Cuts the context's beginning so that both fit the model's context.

        One token more than the context fits: the last one is predicted, but never read.
        """
        if len(continuation) > self.max_length:
            raise UserError(
                f"a continuation of {len(continuation)} tokens exceeds the context of "
                f"{self.model.spec.name}, {self.max_length} tokens"
            )
        return context[-(self.max_length + 1 - len(continuation)) :], continuation

    def _likelihoods(self, what: str, pairs, quiet: bool) -> list[tuple[float, bool]]:
        with tqdm(total=len(pairs), desc=f"kvjax: {what}", disable=quiet) as bar:
            found = likelihood.likelihoods(
                self.model,
                self.config,
                pairs,
                self.memory,
                most=self.most,
                done=bar.update,
            )
        return [tuple(one) for one in found]

    def _generation(self, gen_kwargs: dict[str, Any]) -> Sampling:
        """Returns a request's sampling, with the end token's text among its stops."""
        until = gen_kwargs.get("until") or ()
        until = (until,) if isinstance(until, str) else tuple(until)
        lengths = [gen_kwargs[k] for k in _NEW if gen_kwargs.get(k) is not None]
        new = int(lengths[0]) if lengths else MAX_NEW
        if not 1 <= new < self.max_length:
            raise UserError(
                f"max_gen_toks {new}: 1 or more, and less than the {self.max_length} "
                f"tokens of the context of {self.model.spec.name}"
            )
        unknown = sorted(set(gen_kwargs) - {"until", *_NEW, *_SAMPLING})
        if unknown:
            warn(f"gen_kwargs {', '.join(unknown)}: not known to kvjax, left out")
        stop = tuple(filter(None, (*until, self.tokenizer.eos_token)))
        sampling = lm_arguments.sampling(gen_kwargs, new, self.seed)
        return dataclasses.replace(sampling, stop=stop)

    def _warn_of_cuts(self, what: str, cut: list[int]) -> None:
        """Warns if the beginnings of contexts were cut off."""
        lost = [tokens for tokens in cut if tokens]
        if lost:
            warn(
                f"{len(lost)} of {len(cut)} {what} were too long for "
                f"{self.model.spec.name} ({self.max_length} tokens) and lost up to "
                f"{max(lost)} tokens of their beginning"
            )

    def _remember(self, kind: str, args: tuple, answer: Any) -> None:
        if self.cache_hook is not None:
            self.cache_hook.add_partial(kind, args, answer)


@functools.cache
def model_class() -> type:
    """Returns the harness's model: `Requests` with the harness's base class.

    Raises:
      UserError: the harness is not installed.
    """
    try:
        from lm_eval.api.model import LM
    except ImportError:
        raise UserError(
            "lm_eval is not installed: pip install 'kvjax[harness]'"
        ) from None
    return type("KvjaxLM", (Requests, LM), {"__doc__": Requests.__doc__})


def register() -> None:
    """Registers the model `kvjax` with the harness; may be called repeatedly."""
    model = model_class()
    import lm_eval.models  # noqa: F401  (fills the registry if it is empty)
    from lm_eval.api.registry import model_registry

    model_registry.register("kvjax", target=model)


def main() -> None:
    """Runs the harness's command line with kvjax registered."""
    register()
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
