"""The papers' tasks: their prompts against the sources', their rows, their grades."""

import hashlib
import json
import os
import pathlib
import re
import sys
import types

import numpy as np
import pytest

from kvjax.engine.text_stream import before_stop
from kvjax.evaluation import tasks
from kvjax.evaluation.tasks import bbh, data
from kvjax.evaluation.tasks.base import Task, encode
from kvjax.registry import Registry
from kvjax.types import UserError

ROOT = pathlib.Path(__file__).parents[2]
REAL = pathlib.Path(os.environ.get("KVJAX_DATA", ROOT.parent / "shared" / "data"))
LONGBENCH = json.loads((ROOT / "tests/golden/metrics.json").read_text("utf-8"))
LONGBENCH = LONGBENCH["prompts"]
# sha256 of the 500 prompts that stand first in h2o_hf/data/summarization_data/
# xsum_0shot.jsonl of github.com/FMInference/H2O at ac75c2a8, joined by a null character
H2O_XSUM = "512d1890e0ef163238833a90496e426f4821ad4210460fb0e321a0cd9d3b7e7a"


def real(folder):
    if not (REAL / folder).is_dir():
        pytest.skip(f"no data in {REAL / folder}; name its folder in KVJAX_DATA")
    return str(REAL)


def ask(name, count, data_dir, seed=0, **options):
    return tasks.get(name).examples(None, count, seed, data_dir=data_dir, **options)


def whole(example):
    return example.prompt + example.primer


def sha(text):
    return hashlib.sha256(text.encode()).hexdigest()


@pytest.fixture
def folder(tmp_path):
    """Writes rows where a task looks for them; a file's name tells its format."""

    def write(name, rows):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        jsonl = path.suffix == ".jsonl"
        lines = "\n".join(json.dumps(row) for row in rows) if jsonl else None
        path.write_text(lines or json.dumps(rows), encoding="utf-8")
        return str(tmp_path)

    return write


# --- the registry -------------------------------------------------------------------


def test_every_name_gives_its_task():
    for name in tasks.names():
        task = tasks.get(name)
        assert task.name == name
        assert task.max_new_tokens > 0
        assert task.source
    assert {"gsm8k", "bbh", "bbh/snarks", "xsum", "longbench/lcc"} <= set(tasks.names())


def test_unknown_names_are_told_the_closest():
    with pytest.raises(UserError, match="no task 'bbh/snark'; did you mean 'bbh/snark"):
        tasks.get("bbh/snark")
    with pytest.raises(UserError, match=r"no task 'zzz'; there are .*gsm8k.*, xsum"):
        tasks.get("zzz")


def quiz():
    return Task("quiz", None, None, "accuracy", 1, "a test")


def test_tasks_of_ones_own(monkeypatch):
    monkeypatch.setattr(tasks, "_registry", Registry("task", Task))
    made = quiz()
    tasks.register("quiz", made)
    tasks.register("made", quiz)
    assert tasks.get("quiz") is made and tasks.get("made") == made
    assert {"quiz", "made", "gsm8k"} <= set(tasks.names())
    assert tasks.get("test_paper_tasks:quiz") == made
    for name in ("gsm8k", "quiz", "my:quiz"):
        with pytest.raises(UserError, match=f"task '{name}' cannot be registered"):
            tasks.register(name, quiz())
    with pytest.raises(UserError, match="no function 'quizz'"):
        tasks.get("test_paper_tasks:quizz")
    with pytest.raises(UserError, match="'test_paper_tasks:count_of_all' makes a int"):
        tasks.get("test_paper_tasks:count_of_all")


def count_of_all():
    return 7


# --- what every task does -----------------------------------------------------------

ROWS = {  # numbered rows as published, for the tasks that no real data is here for
    "cnn_dailymail": lambda i: {
        "article": f"One{i}.\nTwo.",
        "highlights": "Three .\nX .",
    },
    "samsum": lambda i: {"dialogue": f"A{i}: hi\nB: no", "summary": "B declines."},
    "narrativeqa": lambda i: {
        "document": {"summary": {"text": f" Fox {i} ran.\nIt hid. "}},
        "question": {"text": "Who ran"},
        "answers": [{"text": "A fox"}, {"text": "the fox"}],
    },
    "triviaqa": lambda i: {
        "question": f"Where{i}?",
        "answer": {"value": "Rome", "aliases": ["Rome", "Roma"]},
        "entity_pages": {"wiki_context": []},
        "search_results": {"search_context": ["", " In Rome. "]},
    },
}


def made(name, folder):
    split = "validation" if name == "triviaqa" else "test"
    folder(f"{name}/{split}.jsonl", list(map(ROWS[name], range(9))))
    return folder(f"{name}/train.json", list(map(ROWS[name], range(9, 15))))


@pytest.fixture(
    params=["gsm8k", "gsm8k/chat", "bbh", "bbh/snarks", "xsum", "multi_news", *ROWS]
)
def task_with_data(request, folder):
    name = request.param
    where = made(name, folder) if name in ROWS else real(name.partition("/")[0])
    return tasks.get(name), where


def test_examples_follow_the_seed_and_fewer_begin_more(task_with_data):
    task, where = task_with_data
    many = task.examples(None, 8, 3, data_dir=where)
    assert many == task.examples(None, 8, 3, data_dir=where)
    assert many[:5] == task.examples(None, 5, 3, data_dir=where)
    assert len({example.name for example in many}) == 8
    other = task.examples(None, 8, 4, data_dir=where)
    assert [e.name for e in many] != [e.name for e in other]


def test_a_reference_is_graded_right_and_nonsense_wrong(task_with_data):
    task, where = task_with_data
    for example in task.examples(None, 4, 0, data_dir=where):
        right = task.grade(example.answers[0], example)
        assert task.metric in right
        assert set(right.values()) == {1.0}
        wrong = task.grade("zebra crossings", example)
        assert wrong[task.metric] < 0.1


def test_too_many_rows_are_refused(task_with_data):
    task, where = task_with_data
    with pytest.raises(UserError, match="rows, so 7000 cannot be drawn"):
        task.examples(None, 7000, 0, data_dir=where)


# --- prompts ------------------------------------------------------------------------


def test_xsum_asks_word_for_word_as_h2o():
    examples = ask("xsum", 500, real("xsum"))
    examples.sort(key=lambda example: int(example.name.split("/")[-1]))
    assert sha("\0".join(map(whole, examples))) == H2O_XSUM
    assert (tasks.get("xsum").stop, tasks.get("xsum").max_new_tokens) == (("###",), 64)


def test_cnn_dailymail_shows_one_article_as_helm_does(folder):
    (example, *_) = ask("cnn_dailymail", 3, made("cnn_dailymail", folder))
    article = r"###\nArticle: One\d+\. Two\.\n\n"
    article += r"Summarize the above article in 3 sentences\.\n"
    shot = article + r"Three \. X \.\n\n"
    assert re.fullmatch(shot + article, whole(example))
    assert example.answers == ("Three . X .",)
    (bare, *_) = ask("cnn_dailymail", 3, made("cnn_dailymail", folder), shots=0)
    assert re.fullmatch(article, whole(bare))


@pytest.mark.parametrize("shots", [8, 16])
def test_gsm8k_shows_worked_train_rows(shots):
    where = real("gsm8k")
    (example, other, *_) = ask("gsm8k", 3, where, shots=shots)
    *shown, asked = whole(example).split("\n\nQuestion: ")
    assert len(shown) == shots
    assert asked.endswith("\nAnswer:")
    train = data.read(REAL / "gsm8k/train.jsonl")
    solved = [f"Question: {r['question']}\nAnswer: {r['answer']}" for r in train]
    assert shown[0] in solved
    assert {f"Question: {shot}" for shot in shown[1:]} < set(solved)
    assert whole(other).startswith("\n\nQuestion: ".join(shown))
    fewer = ask("gsm8k", 1, where, shots=shots // 2)[0]
    assert whole(example).startswith("\n\nQuestion: ".join(shown[: shots // 2]))
    assert fewer.name == example.name


class Conversation:
    """A tokenizer whose tokens are the bytes of its messages as JSON."""

    chat_template = "yes"

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        assert add_generation_prompt and not tokenize
        return json.dumps(messages)

    def __call__(self, text, add_special_tokens, verbose):
        return {"input_ids": text.encode()}

    def decode(self, ids):
        return bytes(ids).decode()


def test_gsm8k_shows_worked_train_rows_as_turns(folder):
    rows = [{"question": f"{i} + 1?", "answer": f"<<{i}+1=9>>9\n#### 9"} for i in "135"]
    folder("gsm8k/train.jsonl", rows[:2])
    where, tokenizer = folder("gsm8k/test.jsonl", rows[2:]), Conversation()
    (example,) = ask("gsm8k/chat", 1, where, shots=2)
    task, order = tasks.get("gsm8k/chat"), [asked for asked, _ in example.turns]
    assert sorted(order) == ["1 + 1?", "3 + 1?"]
    said = [("user", order[0]), ("assistant", "9\n#### 9")]
    said += [("user", order[1]), ("assistant", "9\n#### 9"), ("user", "5 + 1?")]
    whole = encode(tokenizer, task, example, 999)
    told = json.loads(bytes(whole.tokens))
    assert told == [{"role": role, "content": text} for role, text in said]
    shorter = encode(tokenizer, task, example, len(whole.tokens) - 2)
    assert json.loads(bytes(shorter.tokens))[:4] == told[:4] and shorter.cut == 2
    tokenizer.chat_template = None
    with pytest.raises(UserError, match="no chat template for them"):
        encode(tokenizer, task, example, 999)


def test_gsm8k_grades_its_own_solutions_right():
    task, examples = tasks.get("gsm8k"), ask("gsm8k", 660, real("gsm8k"), shots=0)
    rows = data.read(REAL / "gsm8k/test.jsonl")
    for example in examples:
        row = rows[int(example.name.split("/")[-1])]
        for said in (row["answer"], f"So it is ${example.answers[0]}."):
            said = before_stop(f" {said}\n\nQuestion: 1 + 1?", task.stop)
            assert task.grade(said, example) == {"exact_match": 1.0}


@pytest.mark.parametrize("subtask", bbh.SUBTASKS)
def test_bbh_asks_as_gear_does(subtask):
    """`lib_prompt/NAME.txt` + "\\n\\nQ: " + input + "\\nA: Let's think step by step."

    So its evaluation_bbh_cot.py (github.com/opengear-project/GEAR at efe0bfe2); its
    prompts are the authors', less the canary of two lines.
    """
    where = real("bbh")
    prompt = (REAL / f"bbh/cot_prompts/{subtask}.txt").read_text("utf-8")
    header, _, prompt = prompt.partition("-----\n")
    assert header.count("\n") == 1
    rows = data.read(REAL / f"bbh/tasks/{subtask}.json")
    for example in ask(f"bbh/{subtask}", 5, where):
        row = rows[int(example.name.split("/")[-1])]
        asked = f"\n\nQ: {row['input']}\nA: Let's think step by step."
        assert whole(example) == prompt + asked
        assert whole(example).count("the answer is") >= 3
        assert "canary" not in example.prompt
        said = (
            f" We think. So the answer is {row['target']}.\n\nQ: More? the answer is 1."
        )
        task = tasks.get(f"bbh/{subtask}")
        assert task.grade(before_stop(said, task.stop), example) == {"exact_match": 1.0}


def test_bbh_mixes_all_subtasks_in_turn():
    examples = ask("bbh", 6511, real("bbh"))
    first = [example.name.split("/")[1] for example in examples[:27]]
    assert first == list(bbh.SUBTASKS)
    assert len({example.name for example in examples}) == 6511
    alone = ask("bbh", 3, real("bbh"), subtask="snarks")
    assert alone == [e for e in examples if e.name.startswith("bbh/snarks/")][:3]


def test_bbh_names_what_is_missing(folder):
    with pytest.raises(UserError, match="no subtask 'snark'; it has boolean"):
        ask("bbh", 1, None, subtask="snark")
    where = folder("bbh/snarks.json", {"examples": [{"input": "?", "target": "(A)"}]})
    with pytest.raises(UserError, match=r"prompt of bbh/snarks: .*BIG-Bench-Hard"):
        ask("bbh/snarks", 1, where)


def test_narrativeqa_asks_as_helm_does(folder):
    (example, *_) = ask("narrativeqa", 3, made("narrativeqa", folder))
    passage = r"Passage: Fox \d+ ran\.\nIt hid\.\nQuestion: Who ran\?\nAnswer:"
    shot = passage + " A fox\n"
    assert re.fullmatch(shot + shot + passage, whole(example))
    assert example.answers == ("A fox", "the fox")


def test_narrativeqa_counts_pairs_of_words(folder):
    """The best reference counts; a shared word without its neighbour does not."""
    task = tasks.get("narrativeqa")
    (example, *_) = ask("narrativeqa", 3, made("narrativeqa", folder))
    found = task.grade("A red fox", example)
    assert (found["rouge2"], found["rougeL"]) == pytest.approx((0, 0.8))
    assert task.grade("So the fox", example)["rouge2"] == pytest.approx(2 / 3)


def test_triviaqa_reads_evidence_and_grades_by_aliases(folder):
    task = tasks.get("triviaqa")
    (example, *_) = ask("triviaqa", 3, made("triviaqa", folder))
    assert whole(example).count("Passage:\nIn Rome.\nQuestion:\nWhere") == 3
    assert whole(example).endswith("Answer:\n")
    assert task.grade("\n roma!\nPassage: x", example)["exact_match"] == 1


def test_multi_news_reads_both_published_layouts(folder):
    split = {"document": "First. ||||| Second. |||||", "summary": "- Both."}
    joined = {"document": "Passage 1:\nFirst.\nPassage 2:\nSecond.", "summary": "Both."}
    where = folder("multi_news/test.jsonl", [split, joined])
    one, two = (whole(example) for example in ask("multi_news", 2, where))
    assert one == two
    assert (
        sha(one.replace(joined["document"], "{context}")) == LONGBENCH["multi_news"][0]
    )


def test_samsum_and_triviaqa_open_as_longbench_does(folder):
    for name in ("samsum", "triviaqa"):
        (example, *_) = ask(name, 1, made(name, folder))
        opening = example.prompt.partition("examples.\n\n")
        opening = opening[0] + opening[1]
        assert sha(opening + "{context}\n\n{input}") == LONGBENCH[name][0]


@pytest.mark.parametrize("name", sorted(LONGBENCH))
def test_longbench_prompts_and_lengths_are_the_published_ones(name, folder):
    right = "3" if name == "passage_count" else "Paragraph 3"
    row = {"context": "{context}", "input": "{input}", "answers": [right]}
    row["all_classes"] = ["Paragraph 3", "zebra"] if name == "trec" else None
    where = folder(f"longbench/{name}.jsonl", [row])
    task = tasks.get(f"longbench/{name}")
    (example,) = ask(task.name, 1, where)
    assert [sha(whole(example)), task.max_new_tokens] == LONGBENCH[name]
    assert task.grade(right, example) == {task.metric: pytest.approx(1)}
    assert task.grade("none", example)[task.metric] < 0.5


def test_longbench_grades_the_first_line_after_few_shots(folder):
    row = {"context": "c", "input": "i", "answers": ["City"]}
    row["all_classes"] = ["City", "Country"]
    folder("longbench/trec.jsonl", [row])
    where = folder("longbench/hotpotqa.jsonl", [row | {"all_classes": None}])
    said = "\nCity\nType: Country"
    few, plain = (tasks.get(f"longbench/{name}") for name in ("trec", "hotpotqa"))
    assert few.grade(said, ask(few.name, 1, where)[0]) == {"accuracy": 1.0}
    assert plain.grade(said, ask(plain.name, 1, where)[0])["f1"] == pytest.approx(0.5)
    assert not few.chat
    assert plain.chat


# --- where rows come from -----------------------------------------------------------

SOURCE = data.Source("news", ("them/news", "en"), "their_news")


def stub(monkeypatch, name, **functions):
    monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(**functions))


def absent(monkeypatch, *names):
    for name in names:
        monkeypatch.setitem(sys.modules, name, None)


def test_files_come_first(folder, monkeypatch):
    stub(monkeypatch, "datasets", load_dataset=pytest.fail)
    where = folder("news/test.jsonl", [{"a": 1}, {"a": "\u2028 line"}])
    assert data.rows(SOURCE, "test", where) == [{"a": 1}, {"a": "\u2028 line"}]


def test_the_hub_is_asked_next(tmp_path, monkeypatch):
    asked = []

    def load_dataset(*names, split):
        asked.append((names, split))
        return [{"a": 1}]

    stub(monkeypatch, "datasets", load_dataset=load_dataset)
    assert data.rows(SOURCE, "test", str(tmp_path)) == [{"a": 1}]
    assert asked == [(("them/news", "en"), "test")]


def test_tensorflow_datasets_is_asked_last_and_decoded(monkeypatch):
    asked = []

    def data_source(name, split):
        asked.append((name, split))
        return [{"a": "é".encode(), "b": {"c": np.array([b"x", b"y"], object)}, "n": 3}]

    def unreachable(*names, split):
        raise ConnectionError("no way there")

    stub(monkeypatch, "datasets", load_dataset=unreachable)
    stub(monkeypatch, "tensorflow_datasets", data_source=data_source)
    rows = data.rows(SOURCE, "test")
    assert len(rows) == 1
    assert rows[0] == {"a": "é", "b": {"c": ["x", "y"]}, "n": 3}
    assert asked == [("their_news", "test")]


def test_the_error_says_what_was_tried(tmp_path, monkeypatch):
    absent(monkeypatch, "datasets", "tensorflow_datasets")
    with pytest.raises(UserError) as error:
        data.rows(SOURCE, "test", str(tmp_path))
    for part in ("'test' of 'news'", "news/test.jsonl", "no package datasets", "pip "):
        assert part in str(error.value)

    def broken(*names, split):
        raise RuntimeError("scripts are gone\nmore")

    stub(monkeypatch, "datasets", load_dataset=broken)
    with pytest.raises(UserError, match="hub: RuntimeError: scripts are gone; no pack"):
        data.rows(SOURCE, "test")


def test_damaged_files_are_named(folder, tmp_path):
    with pytest.raises(UserError, match="'nowhere' is not a folder"):
        data.rows(SOURCE, "test", "nowhere")
    where = folder("news/test.json", {"rows": [1]})
    with pytest.raises(UserError, match=r"test.json' holds no list of objects"):
        data.rows(SOURCE, "test", where)
    (tmp_path / "news/test.jsonl").write_text('{"a": 1}\n{"a"')
    with pytest.raises(UserError, match=r"test.jsonl' is not JSON in UTF-8"):
        data.rows(SOURCE, "test", where)


def test_missing_fields_and_answers_are_named(folder):
    where = folder("xsum/test.jsonl", [{"text": "?", "summary": "!"}])
    with pytest.raises(UserError, match=r"no field 'article' or 'document'.*'text'"):
        ask("xsum", 1, where)
    row = {"summary": "s", "question": "q", "answers": []}
    folder("narrativeqa/train.jsonl", [row | {"answers": ["x"]}] * 2)
    where = folder("narrativeqa/test.jsonl", [row])
    with pytest.raises(UserError, match="narrativeqa/test/0 has no reference answers"):
        ask("narrativeqa", 1, where)


@pytest.mark.parametrize(
    "name", ["cnn_dailymail", "xsum", "multi_news", "samsum", "triviaqa", "gsm8k"]
)
@pytest.mark.filterwarnings("default")  # TensorFlow's own
def test_rows_of_tensorflow_datasets_have_the_fields_we_read(name, monkeypatch):
    tfds = pytest.importorskip("tensorflow_datasets")
    pytest.importorskip("tensorflow")
    absent(monkeypatch, "datasets")
    with tfds.testing.mock_data(num_examples=20):
        for example in tasks.get(name).examples(None, 3, 0):
            assert example.prompt
            assert all(example.answers)
