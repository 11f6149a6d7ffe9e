"""GSM8K and BIG-Bench Hard from local files, as the tasks beside this file read them.

The folder is `--metadata data_dir=...`, else the environment's KVJAX_DATA: it holds
`gsm8k/{train,test}.jsonl` of openai/grade-school-math, and `bbh/tasks/*.json` and
`bbh/cot_prompts/*.txt` of suzgunmirac/BIG-Bench-Hard.

A row's `prompt` is the whole text that the model is given, shots included, and `target`
what counts as right, so that whoever makes rows differently changes this file alone.
"""

import json
import os
import pathlib

import datasets

_SHOTS = 8


def gsm8k(data_dir=None, **_):
    """Eight shots, the first of the training set with their reasoning."""
    folder = _folder(data_dir) / "gsm8k"
    shots = [
        f"Question: {row['question']}\nAnswer: {row['answer']}"
        for row in _lines(folder / "train.jsonl")[:_SHOTS]
    ]
    return _test(
        {
            "prompt": "\n\n".join([*shots, f"Question: {row['question']}\nAnswer:"]),
            "target": row["answer"].rpartition("#### ")[2].replace(",", ""),
        }
        for row in _lines(folder / "test.jsonl")
    )


def bbh(subtask, data_dir=None, **_):
    """Three shots with chains of thought, as the authors wrote them."""
    text = _folder(data_dir) / "bbh" / "cot_prompts" / f"{subtask}.txt"
    shots = text.read_text("utf-8").partition("-----\n")[2].strip()  # below a notice
    return _test(
        {
            "prompt": f"{shots}\n\nQ: {row['input']}\nA: Let's think step by step.\n",
            "target": row["target"],
        }
        for row in _questions(subtask, data_dir)
    )


def bbh_choice(subtask, data_dir=None, **_):
    """Three shots, the first questions, with bare answers; the others are asked."""
    rows = _questions(subtask, data_dir)
    shots = [f"Q: {row['input']}\nA: {row['target']}" for row in rows[:3]]
    return _test(
        {
            "prompt": "\n\n".join([*shots, f"Q: {row['input']}\nA:"]),
            "target": row["target"],
        }
        for row in rows[3:]
    )


def _questions(subtask, data_dir):
    path = _folder(data_dir) / "bbh" / "tasks" / f"{subtask}.json"
    return json.loads(path.read_text("utf-8"))["examples"]


def _folder(data_dir):
    named = data_dir or os.environ.get("KVJAX_DATA")
    if not named:
        raise ValueError("no data folder: give --metadata data_dir=... or KVJAX_DATA")
    return pathlib.Path(named)


def _lines(path):
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def _test(rows):
    return {"test": datasets.Dataset.from_list(list(rows))}
