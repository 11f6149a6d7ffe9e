"""Asks many questions about one document: how fast, and how many answers are right.

    python experiments/engine/shared_document.py --baseline_python=.venv/bin/python
    python experiments/engine/shared_document.py --only=speed --document=300

speed    The first document with --questions questions, with the full cache:
           one by one  a call for every question, which reads the document again
           prompts     one call, the document in front of every question
           context     `Engine.read` reads it once, all questions share it
quality  --documents documents with five keys each, read and compressed before any
         question: how many keys the answers contain, and the context's bytes. With
         --baseline_python, kvpress answers the same questions from the same tokens,
         after the same prefill; its KeyDiff press keeps the same number in all heads.

Answers have --new tokens, greedy, to the end. Prints tables and, last, one JSON line.
"""

import functools
import itertools
import json
import pathlib
import statistics
import sys

import numpy as np
from absl import flags, logging
from documents import documents
from engine_runs import define_model_flags, model_of, record, timed

import kvjax
from kvjax.cli import command
from kvjax.engine.text_stream import text_after
from kvjax.evaluation.tasks import needle, text
from kvjax.models.weights import hub

sys.path.append(str(pathlib.Path(__file__).parents[1]))

import baselines
from baselines import presses

FLAGS = flags.FLAGS
PINNED = 4, 16  # first and newest pairs that uniform sizes keep, as calibrated ones do
PARTS = "speed", "quality"
PRESSES = {"kvpress full": None, "kvpress 50%": 0.5, "kvpress 25%": 0.25}


def define_flags() -> None:
    define_model_flags()
    flags.DEFINE_integer("document", 900, "most tokens of a document", 1)
    flags.DEFINE_integer("questions", 40, "questions about the first document", 1)
    flags.DEFINE_integer("documents", 8, "documents with five questions each", 1)
    flags.DEFINE_integer("new", 8, "tokens of an answer", 1)
    flags.DEFINE_integer("rounds", 2, "turns of each way, after one to compile", 1)
    flags.DEFINE_string(
        "baseline_python", None, "an interpreter with torch and kvpress"
    )
    flags.DEFINE_string("haystack", None, "folder of prose; None is Python's manual")
    flags.DEFINE_multi_enum("only", list(PARTS), PARTS, "what to measure")


def main(_):
    logging.set_verbosity(logging.WARNING)
    model = model_of(FLAGS)
    prose = text.haystack(FLAGS.haystack)
    made = documents(
        model.tokenizer, FLAGS.documents, FLAGS.document, FLAGS.seed, prose
    )
    result = {"document_tokens": [len(each.tokens) for each in made]}
    if "speed" in FLAGS.only:
        result["speed"] = speed(model, made[0])
        show_speed(result["speed"])
    if "quality" in FLAGS.only:
        result["quality"] = []
        for row in itertools.chain(quality(model, made), pressed(model, made)):
            show_quality(row)
            result["quality"].append(row)
    names = "document", "questions", "documents", "new", "rounds", "seed", "haystack"
    settings = {name: FLAGS[name].value for name in names}
    print(json.dumps(record("shared_document", model, **settings, **result)))


def sampling():
    return kvjax.Sampling(max_new_tokens=FLAGS.new, ignore_eos=True)


def engine_of(model, cache=None, prompt_tokens=None):
    return kvjax.Engine(
        model,
        cache,
        memory_gb=FLAGS.memory_gb,
        prompt_tokens=prompt_tokens,
        show_progress=False,
    )


# --------------------------------------------------------------------------- speed


def speed(model, document):
    """Returns seconds and tokens/s of each way, and whether their tokens are equal."""
    asked = document.questions * -(-FLAGS.questions // len(document.questions))
    questions = [each.tokens for each in asked[: FLAGS.questions]]
    prompts = [document.tokens + tokens for tokens in questions]
    engine = engine_of(model)
    ways = {
        "one by one": lambda: one_by_one(engine, prompts),
        "prompts": lambda: engine.generate(prompts, sampling()),
        "context": lambda: from_context(engine, document, questions),
    }
    seconds = {name: [] for name in ways}
    tokens = {}
    for turn in range(1 + FLAGS.rounds):
        for name, way in ways.items():
            done = timed(way)
            tokens[name] = [each.tokens for each in done.result]
            if turn:
                seconds[name].append(done.seconds)
    first, *others = tokens.values()
    total = FLAGS.new * len(questions)
    return {
        "ways": {
            name: {
                "seconds": round(statistics.median(each), 3),
                "tokens_per_s": round(total / statistics.median(each), 2),
            }
            for name, each in seconds.items()
        },
        "tokens_equal": all(each == first for each in others),
    }


def one_by_one(engine, prompts):
    return [engine.generate([prompt], sampling())[0] for prompt in prompts]


def from_context(engine, document, questions):
    context = engine.read(document.tokens)
    return engine.generate(questions, sampling(), context=context)


# ------------------------------------------------------------------------- quality


def caches(length):
    """Returns cache configurations by name, for documents of up to `length` tokens."""
    blind = functools.partial(
        kvjax.CacheConfig, policy="key_diff", schedule="prefill_only"
    )
    return {
        "full": kvjax.CacheConfig(),
        "int8": kvjax.CacheConfig(codec="int8"),
        "50% calibrated": blind(budget="50%"),
        "25% calibrated": blind(budget="25%"),
        "25% uniform": blind(budget=length // 4, pinned=PINNED),
    }


def quality(model, made):
    """Yields the number of keys that were found under each cache."""
    length = max(len(each.tokens) for each in made)
    for name, cache in caches(length).items():
        engine = engine_of(model, cache, length)
        done = timed(functools.partial(answers, engine, made))
        texts, sizes = done.result
        yield {
            "method": name,
            **graded(made, texts),
            "context_bytes": int(np.mean(sizes)),
            "seconds_with_compilation": round(done.seconds, 1),
        }


def answers(engine, made):
    """Returns the answers' texts by document, and the contexts' bytes."""
    texts, sizes = [], []
    for document in made:
        context = engine.read(document.tokens)
        questions = [each.tokens for each in document.questions]
        done = engine.generate(questions, sampling(), context=context)
        texts.append([each.text for each in done])
        sizes.append(context.nbytes)
    return texts, sizes


def graded(made, texts):
    keys = [question.key for document in made for question in document.questions]
    every = [text for document in texts for text in document]
    found = sum(map(needle.found, keys, every))
    return {"found": int(found), "questions": len(keys)}


def pressed(model, made):
    """Yields the same of kvpress, if an interpreter with it was named."""
    if not FLAGS.baseline_python:
        return
    path = pathlib.Path(hub.fetch(FLAGS.model))
    worker = FLAGS.baseline_python, "-m", "baselines.questions"
    with baselines.Baseline(*worker) as baseline:
        baseline.load(path, device="best")
        for name, share in PRESSES.items():
            parts = [press_of(baseline, each, share) for each in made]
            texts = [
                texts_of(model, document, done["tokens"][0])
                for document, done in zip(made, parts, strict=True)
            ]
            yield {
                "method": name,
                **graded(made, texts),
                "kept": sorted({n for done in parts for n in done["kept"]}),
                "seconds": round(sum(done["seconds"] for done in parts), 1),
                "versions": baseline.versions,
            }


def press_of(baseline, document, share):
    """Returns kvpress' answers about one document."""
    length, ratio = len(document.tokens), 0.0
    if share:
        ratio = presses.ratio(int(share * length), length)
    return baseline.ask(
        {
            "policy": "key_diff" if share else None,
            "ratio": ratio,
            "documents": [document.tokens],
            "questions": [[each.tokens for each in document.questions]],
            "new": FLAGS.new,
        }
    )


def texts_of(model, document, answers):
    decode = functools.partial(text_after, model.tokenizer, skip_special_tokens=True)
    questions = [each.tokens for each in document.questions]
    return list(map(decode, questions, answers))


def show_speed(found):
    print(f"{'way':<16}{'tokens/s':>10}{'seconds':>10}")
    for name, row in found["ways"].items():
        print(f"{name:<16}{row['tokens_per_s']:>10,.2f}{row['seconds']:>10,.2f}")
    equal = "tokens equal" if found["tokens_equal"] else "tokens NOT equal"
    print(f"{equal}\n", flush=True)


def show_quality(row):
    line = f"{row['method']:<16}{row['found']:>4} of {row['questions']}"
    if size := row.get("context_bytes"):
        line += f"{size / 1e6:>10,.2f} MB"
    print(line, flush=True)


if __name__ == "__main__":
    define_flags()
    command.run(main, mistakes=(baselines.BaselineError,))
