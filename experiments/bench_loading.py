"""What loading a sharded checkpoint takes: memory of the host, and seconds.

    python experiments/bench_loading.py

Makes a checkpoint of 2 GB with random float32 weights in a temporary folder, loads it
in a fresh process per case, and prints a table and, last, one JSON line. Linux only.

The kernel keeps the most that a process had resident (VmHWM); its anonymous part (the
heap, and on a CPU the params) and its file part (pages of mapped files) are sampled
every two milliseconds. All are growth over the same process when it has loaded another,
tiny checkpoint in the same way, so that libraries do not count. The files are in the
page cache.
"""

import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time

import command_line
import jax
import numpy as np
import safetensors.numpy
from absl import flags, logging

import kvjax
from kvjax.models.families import llama
from kvjax.models.families.hf_config import Config
from kvjax.models.weights import pack

FLAGS = flags.FLAGS
flags.DEFINE_float("gb", 2.0, "bytes of the checkpoint, 1e9")
flags.DEFINE_float("shard_gb", 0.4, "most bytes of a shard, 1e9")
flags.DEFINE_integer("width", 2048, "M, a multiple of 256")
flags.DEFINE_integer("vocab", 32_000, "V")
flags.DEFINE_list("dtypes", ["bfloat16", "float32"], "of the params")
flags.DEFINE_integer("repeats", 3, "fresh processes per case")
flags.DEFINE_string("case", "", "one case as JSON: the process that loads")

STATUS = pathlib.Path("/proc/self/status")
PARTS = {"rss": "VmHWM", "anonymous": "RssAnon", "file": "RssFile"}
# In this order: the second leaves the copy that the third reads.
WAYS = {"no copy": False, "first, leaves a copy": True, "second, from the copy": True}


def main(_):
    logging.set_verbosity(logging.WARNING)  # orbax says much
    if FLAGS.case:
        print(json.dumps(load(**json.loads(FLAGS.case))))
        return
    with tempfile.TemporaryDirectory() as folder:
        made = write(
            *(f"{folder}/model", FLAGS.width, FLAGS.vocab),
            *(FLAGS.gb * 1e9, FLAGS.shard_gb * 1e9),
        )
        write(f"{folder}/tiny", 256, 64, 0, 1e9)
        cases = {dtype: race(folder, dtype) for dtype in FLAGS.dtypes}
    print(table(made, cases) + "\n")
    print(json.dumps({"checkpoint": made, "cases": cases}))


def write(folder, width, vocab, most, shard_most):
    """A Llama with as many layers as `most` bytes hold, or one.

    Returns:
      Bytes of all tensors, of the largest file and of the largest tensor.
    """
    one, two = (sum(_sizes(_shapes(width, vocab, n)).values()) for n in (1, 2))
    layers = max(1 + int((most - one) // (two - one)), 1)
    shapes = _shapes(width, vocab, layers)
    sizes, shards, total = _sizes(shapes), [[]], 0
    for name, size in sizes.items():
        if shards[-1] and total + size > shard_most:
            shards.append([])
            total = 0
        shards[-1].append(name)
        total += size
    folder, home = pathlib.Path(folder), {}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(_config(width, vocab, layers)))
    rng = np.random.default_rng(0)
    for index, names in enumerate(shards):
        file = f"model-{index + 1:05}-of-{len(shards):05}.safetensors"
        tensors = {name: rng.standard_normal(shapes[name], "f") for name in names}
        safetensors.numpy.save_file(tensors, folder / file)
        home |= dict.fromkeys(names, file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": home}))
    return {
        "bytes": sum(sizes.values()),
        "shard": max(sum(sizes[name] for name in names) for names in shards),
        "tensor": max(sizes.values()),
    }


def _config(width, vocab, layers):
    return {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": layers,
        "hidden_size": width,
        "intermediate_size": width * 11 // 4,
        "num_attention_heads": width // 64,
        "num_key_value_heads": width // 256,
        "vocab_size": vocab,
        "max_position_embeddings": 2048,
    }


def _shapes(width, vocab, layers):
    spec = llama.spec_from_hf(Config(_config(width, vocab, layers), "here"), "bench")
    return pack.tensor_shapes(spec, llama.tensor_names(spec))


def _sizes(shapes):
    return {name: 4 * int(np.prod(shape)) for name, shape in shapes.items()}


def race(folder, dtype):
    """Every way in a process of its own, the ways in turn: the most bytes of any run,
    and the median of the seconds."""
    runs = {way: [] for way in WAYS}
    for _ in range(FLAGS.repeats):
        with tempfile.TemporaryDirectory(dir=folder) as cache:
            for way, keep in WAYS.items():
                case = {"folder": folder, "dtype": dtype, "keep": keep}
                runs[way].append(_in_a_process(case, cache))
    return {
        way: {
            name: (statistics.median if name == "seconds" else max)(
                run[name] for run in found
            )
            for name in found[0]
        }
        for way, found in runs.items()
    }


def _in_a_process(case, cache):
    done = subprocess.run(
        [sys.executable, __file__, f"--case={json.dumps(case)}"],
        env=os.environ | {"KVJAX_CACHE": cache},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def load(folder, dtype, keep):
    """Loads, and says by how many bytes the process grew at most, and how fast."""
    kvjax.load(f"{folder}/tiny", dtype, cache_converted=keep)
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
    before, most, done = _status(), {}, threading.Event()

    def watch():
        while not done.wait(0.002):
            for name, value in _status().items():
                most[name] = max(most.get(name, 0), value)

    watcher = threading.Thread(target=watch)
    watcher.start()
    started = time.perf_counter()
    model = jax.block_until_ready(
        kvjax.load(f"{folder}/model", dtype, cache_converted=keep).params
    )
    seconds = time.perf_counter() - started
    done.set()
    watcher.join()
    most["rss"] = _status()["rss"]
    grown = {name: most[name] - before[name] for name in PARTS}
    return {
        "params": sum(leaf.nbytes for leaf in jax.tree.leaves(model)),
        **grown,
        "seconds": round(seconds, 2),
    }


def _status():
    """Bytes."""
    text = STATUS.read_text()
    found = {n: re.search(rf"{key}:\s+(\d+) kB", text) for n, key in PARTS.items()}
    return {name: int(match[1]) * 1024 for name, match in found.items()}


def table(made, cases):
    """Markdown, in MB of 1e6 bytes."""
    total, file, tensor = (f"{size / 1e6:.0f}" for size in made.values())
    lines = [
        f"{total} MB in float32; of the largest file {file}, of the largest tensor "
        f"{tensor}",
        "",
        "| params | load | peak RSS | above params | anonymous | mapped files | s |",
        "|---|---|---|---|---|---|---|",
    ]
    for dtype, ways in cases.items():
        for way, run in ways.items():
            sizes = (
                *(run["rss"], run["rss"] - run["params"]),
                *(run["anonymous"], run["file"]),
            )
            cells = [f"{size / 1e6:.0f}" for size in sizes]
            what = f"{dtype}, {run['params'] / 1e6:.0f} MB"
            cells = [what, way, *cells, f"{run['seconds']:.1f}"]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    command_line.run(main)
