"""Compares fixed batches with continuous batching where answers differ in length.

    python experiments/engine/mixed_lengths.py
    python experiments/engine/mixed_lengths.py --model=tiny --requests=16 --longest=64

Requests with prompts of one length generate between --shortest and --longest tokens,
lognormal, and ignore end tokens. Both ways run the same programs in the same number of
rows, which is what --memory_gb holds (or --rows):

  fixed       as many requests as there are rows; the next ones start when all have
              ended
  continuous  a row takes the next request as soon as its own has ended, and its prompt
              is read in the steps that decode the other rows

Every way runs once to compile, then --rounds times in turn. Prints a table and, last,
one JSON line: tokens/s (medians, over all new tokens and the reading of prompts),
decode steps, the least steps that the rows could take, and whether all tokens are
equal.
"""

import json
import statistics

import numpy as np
from absl import flags, logging
from engine_runs import (
    counted_steps,
    define_model_flags,
    model_of,
    passages,
    record,
    timed,
)

import kvjax
from kvjax.cli import command
from kvjax.types import UserError

FLAGS = flags.FLAGS


def define_flags() -> None:
    define_model_flags()
    flags.DEFINE_integer("requests", 64, "requests", 1)
    flags.DEFINE_integer("rows", 16, "the most requests that decode together", 1)
    flags.DEFINE_integer("prompt", 128, "tokens of every prompt", 1)
    flags.DEFINE_integer("shortest", 4, "fewest new tokens", 1)
    flags.DEFINE_integer("longest", 512, "most new tokens", 1)
    flags.DEFINE_float("sigma", 1.0, "of the logarithm of the lengths", 0)
    flags.DEFINE_integer("rounds", 3, "turns of each way, after one to compile", 1)
    flags.DEFINE_string("policy", None, "of the cache; None keeps all pairs")
    flags.DEFINE_string("budget", "25%", "of the policy")


def main(_):
    logging.set_verbosity(logging.WARNING)
    if FLAGS.shortest > FLAGS.longest:
        raise UserError(
            f"--shortest={FLAGS.shortest} is above --longest={FLAGS.longest}: swap them"
        )
    model = model_of(FLAGS)
    prompts = passages(model, FLAGS.requests, FLAGS.prompt)
    lengths = lognormal_lengths(
        FLAGS.requests, FLAGS.shortest, FLAGS.longest, FLAGS.sigma, FLAGS.seed
    )
    samplings = [
        kvjax.Sampling(max_new_tokens=length, ignore_eos=True) for length in lengths
    ]
    ways = {"fixed": fixed, "continuous": continuous}
    runs = {name: [] for name in ways}
    tokens = {}
    for turn in range(1 + FLAGS.rounds):
        for name, way in ways.items():
            with counted_steps() as steps:
                done = timed(lambda way=way: way(engine_of(model), prompts, samplings))
            tokens[name] = [each.tokens for each in done.result]
            if turn:
                runs[name].append((done.seconds, sum(steps)))
    result = summary(runs, tokens, lengths, FLAGS.rows)
    show(result)
    print(json.dumps(record("mixed_lengths", model, **settings(), **result)))


def engine_of(model):
    """Returns an engine; its programs stay compiled between engines."""
    cache = kvjax.CacheConfig()
    if FLAGS.policy:
        cache = kvjax.CacheConfig(policy=FLAGS.policy, budget=FLAGS.budget)
    return kvjax.Engine(
        model,
        cache,
        memory_gb=FLAGS.memory_gb,
        max_rows=FLAGS.rows,
        prompt_tokens=FLAGS.prompt,
        show_progress=False,
    )


def fixed(engine, prompts, samplings):
    """Completes as many requests as there are rows, then the next ones."""
    done = []
    for start in range(0, len(prompts), FLAGS.rows):
        batch = slice(start, start + FLAGS.rows)
        done += engine.generate(prompts[batch], samplings[batch])
    return done


def continuous(engine, prompts, samplings):
    return engine.generate(prompts, samplings)


def lognormal_lengths(count, shortest, longest, sigma, seed):
    """Draws lengths around the geometric mean of both ends, clipped to them."""
    rng = np.random.default_rng(seed)
    mean = (np.log(shortest) + np.log(longest)) / 2
    drawn = np.exp(rng.normal(mean, sigma, count))
    return np.clip(np.rint(drawn), shortest, longest).astype(int).tolist()


def summary(runs, tokens, lengths, rows):
    """Returns rates and steps of each way, and whether their tokens are equal."""
    total = sum(lengths)
    found = {}
    for name, each in runs.items():
        seconds = statistics.median(seconds for seconds, _ in each)
        found[name] = {
            "seconds": round(seconds, 3),
            "tokens_per_s": round(total / seconds, 1),
            "steps": each[0][1],
        }
    first, *others = tokens.values()
    return {
        "new_tokens": total,
        "ways": found,
        "least_steps": max(max(lengths), -(-total // rows)),
        "speedup": round(found["fixed"]["seconds"] / found["continuous"]["seconds"], 3),
        "tokens_equal": all(each == first for each in others),
    }


def settings():
    names = "requests", "rows", "prompt", "shortest", "longest", "sigma", "rounds"
    more = "policy", "budget", "memory_gb", "seed"
    return {name: FLAGS[name].value for name in (*names, *more)}


def show(result):
    print(f"{'way':<12}{'tokens/s':>10}{'steps':>8}{'seconds':>10}")
    for name, row in result["ways"].items():
        rate, seconds = row["tokens_per_s"], row["seconds"]
        print(f"{name:<12}{rate:>10,.1f}{row['steps']:>8,}{seconds:>10,.2f}")
    equal = "equal" if result["tokens_equal"] else "NOT equal"
    least = result["least_steps"]
    print(
        f"{result['speedup']:.2f} times as fast; least steps {least:,}; tokens {equal}"
    )


if __name__ == "__main__":
    define_flags()
    command.run(main)
