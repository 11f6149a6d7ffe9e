"""kvjax's own GSM8K and BIG-Bench Hard, as rows for the tasks beside this file.

The folder is `--metadata data_dir=...`, else the environment's KVJAX_DATA, and holds
what `gsm8k` and `bbh` of `kvjax.evaluation.tasks` look for. Prompts, shots and the
order of the rows are theirs with seed 0, so `--limit 20` asks what `num_examples: 20`
asks in a config of ours. A row's `prompt` is the whole text that the model is given,
and `target` what counts as right; stops and metrics are in the YAML files.
"""

import os

import datasets

from kvjax.evaluation import tasks
from kvjax.evaluation.tasks import bbh as bbh_rows
from kvjax.evaluation.tasks import data

SEED = 0


def gsm8k(data_dir=None, **_):
    """Returns GSM8K: eight shots with their reasoning."""
    return _test(_asked("gsm8k", data_dir))


def bbh(subtask, data_dir=None, **_):
    """Returns a BBH subtask: three shots with chains of thought."""
    return _test(_asked(f"bbh/{subtask}", data_dir))


def bbh_choice(subtask, data_dir=None, **_):
    """Returns a BBH subtask whose first rows are shots with bare answers."""
    rows = list(data.rows(bbh_rows.source(subtask), "test", _folder(data_dir)))
    shots = [f"Q: {row['input']}\nA: {row['target']}" for row in rows[:3]]
    return _test(
        {
            "prompt": "\n\n".join([*shots, f"Q: {row['input']}\nA:"]),
            "target": row["target"],
        }
        for row in rows[3:]
    )


def _asked(name, data_dir):
    for each in tasks.get(name).examples(None, None, SEED, data_dir=_folder(data_dir)):
        yield {"prompt": each.prompt + each.primer, "target": each.answers[0]}


def _folder(data_dir):
    named = data_dir or os.environ.get("KVJAX_DATA")
    if not named:
        raise ValueError("no data folder: give --metadata data_dir=... or KVJAX_DATA")
    return named


def _test(rows):
    return {"test": datasets.Dataset.from_list(list(rows))}
