"""RULER, the pass key and the needle at any length, and what they refuse."""

import re
import sys

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from testing.ruler_prompts import GOLDEN, NEEDLE, TASKS, Chat, Words, prepared, write

from kvjax.evaluation.tasks import base, fit, needle, text
from kvjax.evaluation.tasks.ruler import niah, qa, words
from kvjax.types import UserError

WRITTEN = [name for name in TASKS if not name.startswith("ruler_file/")]


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return prepared(tmp_path_factory.mktemp("ruler"))


UNIT = {"needle": 20, "passkey": 1, "fwe": 8, "cwe": 8}  # words; a line or document: 32


def used(task, tokenizer, example):
    encoded = base.encode(tokenizer, task, example, 10**9)
    reserved = task.max_new_tokens if task.name.startswith("ruler") else 0
    return len(encoded.tokens) + reserved


@pytest.mark.parametrize("name", WRITTEN)
@hypothesis.settings(max_examples=3, deadline=None)
@hypothesis.given(length=st.integers(1300, 5000), seed=st.integers(0, 9))
@hypothesis.example(length=4096, seed=0)
def test_length_is_met_from_below(name, folder, length, seed):
    for tokenizer in (Words(special=2), Chat()):
        for example in write(name, folder, 2, seed, length, tokenizer):
            slack = length - used(TASKS[name], tokenizer, example)
            assert 0 <= slack < UNIT.get(name.removeprefix("ruler/"), 32)
            assert dict(example.details)["length"] == length


@pytest.mark.parametrize("name", WRITTEN)
def test_examples_follow_the_seed_and_more_go_on(name, folder):
    four = write(name, folder, 4, length=1300)
    assert write(name, folder, 2, length=1300) == four[:2]
    assert len({example.name for example in four}) == 4
    assert len({example.prompt for example in four}) == 4
    assert write(name, folder, 4, seed=1, length=1300) != four
    for example in four:
        assert TASKS[name].grade(" ".join(example.answers), example) == {
            TASKS[name].metric: 1.0
        }
        assert TASKS[name].grade("no", example) == {TASKS[name].metric: 0.0}


@pytest.mark.parametrize("name", WRITTEN)
def test_answers_stand_in_the_prompt(name, folder):
    for example in write(name, folder, 2, length=1300):
        if name == "ruler/qa_2":  # they need not: yes and no
            continue
        assert any(answer in example.prompt for answer in example.answers)


@pytest.mark.parametrize("name", WRITTEN)
def test_too_little_room_is_refused(name, folder):
    with pytest.raises(UserError, match="length 20 cannot hold"):
        write(name, folder, length=20)
    with pytest.raises(UserError, match="count must be at least 1, got 0"):
        write(name, folder, count=0)


@hypothesis.given(st.integers(0, 900), st.integers(0, 40), st.integers(0, 900))
def test_largest_finds_the_last_that_fits(last, least, start):
    last = max(last, least)
    assert fit.largest(lambda size: size <= last, least, start) == last


@pytest.mark.parametrize("name", ["ruler/niah_single_1", "ruler/niah_multikey_3"])
def test_depth_is_where_the_answer_stands(name, folder):
    examples = write(name, folder, 20, length=2000)
    depths = [dict(example.details)["depth"] for example in examples]
    for example, depth in zip(examples, depths, strict=True):
        context = example.prompt.split("\n")[1:-1]
        place = next(i for i, line in enumerate(context) if example.answers[0] in line)
        assert place / len(context) == pytest.approx(depth, abs=0.08)
    assert min(depths) < 0.2 and max(depths) > 0.8


def test_one_question_has_one_answer(folder):
    for name in niah.TASKS:
        for example in write(f"ruler/{name}", folder, 2, length=1300):
            asked = re.search(r"for (.*?) mentioned", example.primer).group(1)
            hidden = re.findall(NEEDLE, example.prompt)
            for_it = {value for key, value in hidden if key in asked}
            assert for_it == set(example.answers)


def test_essays_begin_again_where_they_end(folder):
    (example,) = write("ruler/niah_single_2", folder, 1, length=3000)
    body = " ".join(re.sub(NEEDLE, "", example.prompt.split("\n")[1]).split())
    essay = " ".join(GOLDEN["essay"].split())
    assert body.startswith(f"{essay} {essay[:200]}")


def test_sentences_end_as_they_do_in_english():
    cut = niah.sentences(
        'It is 3.5 miles, e.g. by foot. "Why?" she asked. He said "no." Then (at '
        "noon!) left. 7 stayed! Done..."
    )
    assert cut == [
        "It is 3.5 miles, e.g. by foot.",
        '"Why?" she asked.',
        'He said "no."',
        "Then (at noon!) left.",
        "7 stayed!",
        "Done...",
    ]


# --- needle ---------------------------------------------------------------------------


@pytest.mark.parametrize("tokenizer", [Words(special=2), Chat()])
def test_needle_task_asks_what_needle_asks(tokenizer, folder):
    task, depths = TASKS["needle"], (0.2, 0.9)
    made = write("needle", folder, 3, 5, 300, tokenizer, depths=depths)
    prose = text.haystack(str(folder / "essays"))
    for index, example in enumerate(made):
        seed = int(np.random.SeedSequence((5, index)).generate_state(1)[0])
        depth = depths[index % 2]
        (old,) = needle.examples(tokenizer, 1, 300, [depth], seed, prose)
        assert example.answers == (old.answer,)
        assert example.details == (("depth", depth), ("length", 300.0))
        assert base.encode(tokenizer, task, example, 300).tokens == old.tokens
        asked = (
            tokenizer.apply_chat_template(
                [{"role": "user", "content": example.prompt}], False, True
            )
            if tokenizer.chat_template
            else example.prompt
        )
        assert asked + example.primer == old.prompt


# --- errors ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qa_1", "qa_2"])
def test_questions_need_their_file(name, tmp_path):
    task = TASKS[f"ruler/{name}"]
    with pytest.raises(UserError, match=r"data_dir None; download it from http"):
        task.examples(Words(), 1, 0)
    with pytest.raises(UserError, match=f"{name} finds no .* in data_dir"):
        task.examples(Words(), 1, 0, data_dir=str(tmp_path))
    for content in ("[", "[1]", '{"data": [{}]}'):
        (tmp_path / qa.SOURCES[name].names[0]).write_text(content)
        with pytest.raises(UserError, match="is not in the format of"):
            task.examples(Words(), 1, 0, data_dir=str(tmp_path))


def test_too_few_questions_or_rows(folder, tmp_path):
    with pytest.raises(UserError, match="qa_2 has 8 questions"):
        write("ruler/qa_2", folder, 9)
    (tmp_path / "vt.jsonl").write_text('{"input": "a", "outputs": ["b"]}\n')
    task = TASKS["ruler_file/vt"]
    for count in (0, 2):
        with pytest.raises(UserError, match=f"count must be in 1..1.*got {count}"):
            task.examples(Words(), count, 0, data_dir=str(tmp_path))
    with pytest.raises(UserError, match=r"finds no fwe\.jsonl"):
        TASKS["ruler_file/fwe"].examples(Words(), 1, 0, data_dir=str(tmp_path))
    (tmp_path / "vt.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(UserError, match=r"row 0 of .* is not a RULER sample"):
        task.examples(Words(), 1, 0, data_dir=str(tmp_path))


def test_without_wonderwords_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "wonderwords", None)
    with pytest.raises(UserError, match=r"wonderwords is .* 'kvjax\[eval\]'"):
        words.words.__wrapped__("noun")


@pytest.mark.parametrize("depths", [(), (0.5, 1.5)])
@pytest.mark.parametrize("name", ["passkey", "needle"])
def test_depths_lie_in_the_text(name, depths, folder):
    with pytest.raises(UserError, match="depths must be"):
        write(name, folder, depths=depths)
