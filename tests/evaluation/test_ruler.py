"""RULER and the pass key against the authors' scripts, and files that these wrote.

golden/ruler.json is what their code wrote, see golden/make_ruler.py.
"""

import collections
import json
import os
import pathlib
import re

import numpy as np
import pytest
from testing.ruler_prompts import GOLDEN, NEEDLE, TASKS, Words, prepared, write

from kvjax.evaluation.tasks import base, passkey, ruler
from kvjax.evaluation.tasks.ruler import counting, niah, qa, tracking, words

DATA = pathlib.Path(
    os.environ.get(
        "KVJAX_DATA", pathlib.Path(__file__).parents[2].parent / "shared/data"
    )
)
SAMPLE = DATA / "ruler_4096/niah_multikey_3.jsonl"
UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return prepared(tmp_path_factory.mktemp("ruler"))


def golden(name):
    """Pairs: what the authors' script wrote, prefix included, and the row."""
    rows = GOLDEN["rows"][name]
    return [(row["input"] + row["answer_prefix"], row) for row in rows]


def niah_skeleton(whole):
    """Keys and values masked, and how many needles; an essay without its needles."""
    found = re.findall(NEEDLE, whole)
    for mark, hidden in zip("KV", zip(*found, strict=True), strict=True):
        for one in sorted(set(hidden), key=len, reverse=True):
            whole = whole.replace(one, mark)
    lines = whole.split("\n")
    without = (re.sub(NEEDLE, "", line) for line in lines)
    return [" ".join(line.split()) for line in without], len(found)


@pytest.mark.parametrize("name", list(niah.TASKS))
def test_needles_are_the_authors_but_for_what_is_drawn(name):
    config = niah.TASKS[name]
    (key,) = (key for key in GOLDEN["rows"] if key.startswith(f"{name}@"))
    for whole, row in golden(key):
        theirs, needles = niah_skeleton(whole)
        size = {
            "noise": whole.count(niah.NOISE),
            "needle": needles - 1,
            "essay": len(" ".join(theirs[1:-1]).split()),
        }[config.haystack]
        ours = niah.writer(config, GOLDEN["essay"]).write((0, 0), size)
        found, count = niah_skeleton(ours.prompt + ours.primer)
        assert collections.Counter(found) == collections.Counter(theirs)
        assert (found[0], found[-1], count) == (theirs[0], theirs[-1], needles)
        assert len(ours.answers) == len(row["outputs"])
        kinds = {"numbers": r"[1-9]\d{6}", "uuids": UUID}
        for answer in (*ours.answers, *row["outputs"]):
            assert re.fullmatch(kinds[config.values], answer)


def insertions(whole):
    """Sentences before each needle of an essay, and all without needles."""
    body = whole.split("\n")[1]
    parts = re.split(r"One of the special magic \w+ for .*? is: .*?\.", body)
    counts = [
        len(niah.sentences(part.strip())) if part.strip() else 0 for part in parts
    ]
    return np.cumsum(counts)[:-1].tolist(), sum(counts)


@pytest.mark.parametrize("name", ["niah_multikey_1", "niah_multivalue"])
def test_needles_stand_at_the_authors_depths(name, folder):
    ours = [(e.prompt, None) for e in write(f"ruler/{name}", folder, 4, length=1000)]
    for whole, _ in [*ours, *golden(f"{name}@1000")]:
        places, total = insertions(whole)
        depths = np.round(np.linspace(0, 100, 40)).astype(int)
        assert set(places) <= {int(total * depth / 100) for depth in depths}


def lines_of(whole):
    """Lines of the solved example and of the question, names and numbers masked."""
    masked = re.sub(r"\b\d{5}\b", "N", whole)
    masked = re.sub(r"\b(?!VAR\b)[A-Z]{3}\b", "SSS", masked)
    masked = re.sub(r"\b[A-Z]{5}\b", "LLLLL", masked)
    shot, question = masked.split("\n\nMemorize")
    return [collections.Counter(part.split("\n")) for part in (shot, question)]


def follow(prompt):
    """Variables in the order of the chain, if it can be read from top to bottom."""
    chain = [re.search(r"= (\d{5})\n", prompt).group(1)]
    for name, source in re.findall(r"^VAR (\w+) = (?:VAR )?(\w+)", prompt, re.M):
        assert source == chain[-1]
        chain.append(name)
    return tuple(chain[1:])


def test_variables_are_the_authors_but_for_what_is_drawn():
    for whole, row in golden("vt@1500"):
        theirs = lines_of(whole)
        ours = tracking.writer(Words(), 0).write((0, 0), theirs[1][niah.NOISE])
        assert lines_of(ours.prompt + ours.primer) == theirs
        for prompt, answers in ((ours.prompt, ours.answers), (whole, row["outputs"])):
            question = "Memorize" + prompt.split("\n\nMemorize")[1]
            assert follow(question) == tuple(answers)
        shot = ours.prompt.split("\n\nMemorize")[0]
        assert shot.endswith(f"they are:  {' '.join(follow(shot))}")


def list_of(numbered):
    """The words of "1. lip 2. wisdom"; a word may hold blanks."""
    found = re.findall(r"(\d+)\. (.*?)(?= \d+\. |$)", numbered)
    assert [int(place) for place, _ in found] == list(range(1, len(found) + 1))
    return [word for _, word in found]


def common_parts(whole):
    """The text without lists, and the three lists: shot, its solution, question."""
    lists = [match for match in re.findall(r"1\. .*", whole) if " 2. " in match]
    for one in lists:
        whole = whole.replace(one, "LIST")
    return whole, [list_of(one) for one in lists]


def spectrum(listed):
    """Returns a Counter: the number of words that occur n times, by n."""
    return collections.Counter(collections.Counter(listed).values())


@pytest.mark.parametrize("length", [1000, 4096])
def test_common_words_are_the_authors_but_for_what_is_drawn(length):
    for whole, row in golden(f"cwe@{length}"):
        frame, theirs = common_parts(whole)
        draft = counting.common_words(length).write((0, 0), len(set(theirs[2])))
        ours_frame, ours = common_parts(draft.prompt + draft.primer)
        assert ours_frame == frame
        assert [spectrum(one) for one in ours] == [spectrum(one) for one in theirs]
        for lists, answers in ((theirs, row["outputs"]), (ours, draft.answers)):
            for listed, solution in ((lists[0], lists[1]), (lists[2], answers)):
                often = collections.Counter(listed).most_common(10)
                assert {word for word, _ in often} == set(solution)


def frequent_parts(whole):
    head, _, rest = whole.partition("coded words. ")
    coded, _, tail = rest.partition("\n")
    return head + tail, coded.split()


def test_frequent_words_are_the_authors_but_for_what_is_drawn():
    for whole, row in golden("fwe@600"):
        frame, theirs = frequent_parts(whole)
        writer = counting.frequent_words(600, 50)
        drafts = (writer.write((0, 0), n) for n in range(len(theirs), 2 * len(theirs)))
        draft = next(
            draft
            for draft in drafts
            if spectrum(frequent_parts(draft.prompt)[1]) == spectrum(theirs)
        )
        ours_frame, ours = frequent_parts(draft.prompt + draft.primer)
        assert ours_frame == frame
        for coded, answers in ((ours, draft.answers), (theirs, row["outputs"])):
            often = collections.Counter(coded).most_common(5)
            assert [word for word, _ in often[:4]] == ["...", *answers]
            assert often[3][1] > often[4][1]
            assert all(re.fullmatch(r"[a-z]{6}", word) for word, _ in often[1:])


def documents_of(whole):
    found = re.findall(r"Document (\d+):\n(.*?)\n\n(?=Document|Answer)", whole, re.S)
    frame = re.sub(r"Document 1:.*?(?=\n\nAnswer)", "", whole, flags=re.S)
    assert [int(place) for place, _ in found] == list(range(1, len(found) + 1))
    return frame, [document for _, document in found]


@pytest.mark.parametrize(("name", "own"), [("qa_1", 1), ("qa_2", 4)])
def test_questions_are_the_authors_in_their_order(name, own, folder):
    writer = qa.writer(name, str(folder), 2)
    for index, (whole, row) in enumerate(golden(f"{name}@600")):
        frame, theirs = documents_of(whole)
        draft = writer.write((0, index), len(theirs) - own)
        ours_frame, ours = documents_of(draft.prompt + draft.primer)
        assert (ours_frame, draft.answers) == (frame, tuple(row["outputs"]))
        assert collections.Counter(ours) == collections.Counter(theirs)  # they are all


def test_questions_come_with_their_documents_then_those_of_the_article(folder):
    squad, hotpotqa = (qa.writer(f"qa_{i}", str(folder), 1) for i in (1, 2))
    paragraphs = GOLDEN["squad"]["data"][0]["paragraphs"]
    article = [paragraph["context"] for paragraph in paragraphs]
    assert documents_of(squad.write((0, 0), 0).prompt)[1] == article[:1]
    assert set(documents_of(squad.write((0, 0), 2).prompt)[1]) == set(article)
    some = documents_of(squad.write((0, 0), 9).prompt)[1]
    assert set(article) < set(some) and len(set(some)) == 10
    context = {t + "\n" + "".join(p) for t, p in GOLDEN["hotpotqa"][0]["context"]}
    assert set(documents_of(hotpotqa.write((0, 0), 0).prompt)[1]) == context


@pytest.mark.parametrize("row", GOLDEN["grades"])
def test_grades_are_the_authors(row):
    example = base.Example("", "", tuple(row["refs"]))
    for name, key in (("vt", "all"), ("qa_1", "part")):
        task = TASKS[f"ruler/{name}"]
        graded = task.grade(row["pred"], example)
        assert set(graded) == {task.metric}
        assert 100 * graded[task.metric] == pytest.approx(row[key], abs=0.005)


def test_tokens_to_generate_are_the_papers():
    tokens = {"niah": 128, "vt": 30, "cwe": 120, "fwe": 50, "qa": 32}
    for name, task in ruler.TASKS.items():
        kind = name.split("/")[1].split("_")[0]
        assert task.max_new_tokens == tokens[kind]


@pytest.mark.parametrize("row", GOLDEN["passkey"])
def test_passkey_is_the_authors(row):
    depth = len(row["prompt"].split("\n")[1]) / max(row["garbage"], 1)
    draft = passkey._write((depth,), (0, 0), row["garbage"])
    ours = (draft.prompt + draft.primer).replace(draft.answers[0], str(row["key"]))
    assert ours == row["prompt"]


def test_passkey_wants_the_first_number():
    grade = lambda made: TASKS["passkey"].grade(made, base.Example("", "", ("123",)))
    assert grade(" 123. Remember 7")["accuracy"] == 1.0
    assert grade(" 1234")["accuracy"] == 0.0
    assert grade(" 7 or 123")["accuracy"] == 0.0
    assert grade(" unknown")["accuracy"] == 0.0


def test_more_common_words_than_there_are_words_become_pairs():
    many = len(words.every_word()) + 5
    draft = counting.common_words(4096).write((0, 0), many)
    _, lists = common_parts(draft.prompt)
    assert spectrum(lists[2]) == {30: 10, 3: many - 10}
    assert all("-" in answer for answer in draft.answers)


# --- files ----------------------------------------------------------------------------


def test_rows_of_the_authors_are_read(tmp_path):
    rows = GOLDEN["rows"]["niah_multiquery@1000"]
    (tmp_path / "niah_multiquery").mkdir()
    path = tmp_path / "niah_multiquery/validation.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = TASKS["ruler_file/niah_multiquery"]
    examples = task.examples(Words(), 2, 0, data_dir=str(tmp_path))
    for example, row in zip(examples, rows, strict=True):
        assert (example.prompt, example.primer) == (row["input"], row["answer_prefix"])
        assert example.answers == tuple(row["outputs"])
        assert task.grade(" ".join(row["outputs"]), example)[task.metric] == 1.0


@pytest.mark.parametrize("key", list(GOLDEN["rows"]))
def test_rows_that_end_in_the_primer_are_cut_there(key, tmp_path):
    """Files of RULER versions whose rows have no `answer_prefix`."""
    name = key.partition("@")[0]
    old = [{"input": whole, "outputs": row["outputs"]} for whole, row in golden(key)]
    path = tmp_path / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in old))
    examples = TASKS[f"ruler_file/{name}"].examples(
        Words(), 2, 0, data_dir=str(tmp_path)
    )
    for example, (_, row) in zip(examples, golden(key), strict=True):
        assert (example.prompt, example.primer) == (row["input"], row["answer_prefix"])


def sample():
    if not SAMPLE.is_file():
        pytest.skip(f"no RULER sample at {SAMPLE}; set KVJAX_DATA to its folder")
    rows = [json.loads(line) for line in SAMPLE.read_text().splitlines()]
    task = TASKS["ruler_file/niah_multikey_3"]
    return rows, task.examples(Words(), len(rows), 0, data_dir=str(SAMPLE.parent))


def test_sample_of_the_authors_is_what_we_would_write():
    rows, theirs = sample()
    writer = niah.writer(niah.TASKS["niah_multikey_3"])
    for index, (row, example) in enumerate(zip(rows, theirs, strict=True)):
        assert example.prompt + example.primer == row["input"]
        assert example.answers == tuple(row["outputs"])
        draft = writer.write((0, index), 50)
        ours = niah_skeleton(draft.prompt + draft.primer)
        assert ours == niah_skeleton(row["input"])
        for key_or_value in np.ravel(re.findall(NEEDLE, row["input"] + draft.prompt)):
            assert re.fullmatch(UUID, key_or_value)


@pytest.mark.model
def test_sample_of_the_authors_is_as_long_as_ours(smollm2):
    """Equally many needles take equally many tokens, at uniform depths."""
    _, theirs = sample()
    writer = niah.writer(niah.TASKS["niah_multikey_3"])
    ours = [writer.write((0, i), 50) for i in range(len(theirs))]
    count = lambda e: len(smollm2.tokenizer(e.prompt + e.primer)["input_ids"])
    tokens = np.array([[count(a), count(b)] for a, b in zip(ours, theirs, strict=True)])
    mean, spread = tokens.mean(0), tokens.std(0)
    assert abs(mean[0] - mean[1]) < 4 * spread.max() / np.sqrt(len(theirs))
    assert 0.6 < spread[0] / spread[1] < 1.6
    depths = [[d for k, d in e.details if k == "depth"] for e in theirs]
    for some in ([draft.depth for draft in ours], np.ravel(depths)):
        assert abs(np.mean(some) - 0.5) < 0.15
        assert np.std(some) == pytest.approx(12**-0.5, abs=0.06)  # uniform
