"""Tasks: the text, the needle prompts, the windows and the fidelity metrics."""

import dataclasses
import re

import numpy as np
import pytest
from testing.prose import CHAT, HAYSTACK, make_tokenizer

from kvjax.evaluation.tasks import base, fidelity, needle, text
from kvjax.types import UserError


def make_examples(tokenizer=None, **changes):
    options = {"count": 8, "length": 200, "depths": (0.0, 0.5, 1.0), "seed": 0}
    options |= {"haystack": HAYSTACK} | changes
    return needle.examples(tokenizer or make_tokenizer(), **options)


# --- text ---------------------------------------------------------------------------


def test_manual_is_long_prose_without_markup():
    manual = text.haystack(None)
    paragraphs = manual.split("\n\n")
    assert len(manual) > 100_000
    assert len(set(paragraphs)) == len(paragraphs)
    assert not re.search(r"::=|>>>|={4}|\*{4}|-{4}|\n[^\n]", manual.replace("\n\n", ""))
    assert manual == text.haystack()


def test_prose_keeps_sentences_and_drops_the_rest():
    topic = (
        "Names\n*****\n\n   stmt ::= name\n\n*Names* refer to **objects** in a left-\n"
        "hand way that is easy to read.\n\n   >>> spam = eggs\n\n"
        "New in version 3.9: A sentence of many words that nobody needs here.\n"
    )
    kept = "Names refer to objects in a left-hand way that is easy to read."
    assert list(text._prose(topic)) == [kept]


def test_folder_is_read_in_order(tmp_path):
    (tmp_path / "b.txt").write_text("Second.\n")
    (tmp_path / "a.md").write_text("First.\n\n")
    (tmp_path / "c.rst").write_text("Not this one.")
    assert text.haystack(str(tmp_path)) == "First.\n\nSecond."


def test_folder_errors_name_the_folder(tmp_path):
    with pytest.raises(UserError, match="nowhere"):
        text.haystack(str(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "blank.txt").write_text(" \n")
    with pytest.raises(UserError, match="empty' holds no text"):
        text.haystack(str(tmp_path / "empty"))
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(UserError, match=r"binary\.txt"):
        text.haystack(str(tmp_path))


# --- needle -------------------------------------------------------------------------


@pytest.mark.parametrize("chat_template", [None, CHAT])
@pytest.mark.parametrize("length", [120, 500, 6000])  # the last repeats the haystack
def test_length_is_met_from_below(chat_template, length):
    tokenizer = make_tokenizer(chat_template)
    for example in make_examples(tokenizer, length=length, count=4):
        assert length - 4 <= len(example.tokens) <= length
        ids = tokenizer(example.prompt, add_special_tokens=False)["input_ids"]
        assert list(example.tokens) == ids


def test_prompt_asks_after_the_text_and_opens_the_answer():
    plain, chat = (make_examples(make_tokenizer(c))[1] for c in (None, CHAT))
    asks = "What is the secret passkey number mentioned in the text?"
    opens = "The secret passkey number is"
    assert plain.prompt.endswith(f"\n\n{asks} {opens}")
    assert chat.prompt.startswith("<|user|> There is an important piece")
    assert chat.prompt.endswith(f"{asks} <|end|> <|assistant|> {opens}")
    for example in (plain, chat):
        assert example.prompt.count(example.answer) == 2
        assert f"Remember this number: {example.answer} is" in example.prompt


def test_plain_prompt_has_bos_and_chat_prompt_only_its_template():
    assert make_examples(make_tokenizer(bos=True))[0].tokens[0] == 1
    assert 1 not in make_examples(make_tokenizer(CHAT, bos=True))[0].tokens


@pytest.mark.parametrize("depth", [0.0, 0.25, 0.5, 0.9, 1.0])
def test_needle_stands_at_its_depth_between_sentences(depth):
    for example in make_examples(length=600, depths=[depth]):
        body = example.prompt.partition("memorize it.")[2].rpartition("What is")[0]
        before, _, after = body.partition("The secret passkey number is")
        after = after.partition("is the secret passkey.")[2]
        words = len(before.split()), len(after.split())
        assert words[0] / sum(words) == pytest.approx(depth, abs=0.03)
        assert before.strip().endswith(".") or depth in (0, 1)  # 1: the text's end
        assert after.strip().startswith("Sentence") or depth == 1
        assert example.depth == depth


def test_examples_differ_and_follow_the_seed():
    examples = make_examples()
    assert len({example.answer for example in examples}) == 8
    assert len({re.search(r"s\d+", e.prompt).group() for e in examples}) == 8
    assert [e.depth for e in examples[:4]] == [0.0, 0.5, 1.0, 0.0]
    assert examples == make_examples()
    assert not {e.answer for e in examples} & {e.answer for e in make_examples(seed=1)}
    assert all(re.fullmatch(r"[1-9]\d{4}", example.answer) for example in examples)


def test_keys_are_not_in_the_haystack():
    taken = " ".join(str(key) for key in range(10_000, 99_998))
    keys = needle._keys(np.random.default_rng(0), 2, taken)
    assert sorted(keys) == ["99998", "99999"]


def test_grade_wants_the_whole_number():
    example = dataclasses.replace(make_examples()[0], answer="12345")
    assert needle.grade(example, " 12345. Remember") == 1.0
    assert needle.grade(example, "12345") == 1.0
    assert needle.grade(example, "123456") == 0.0
    assert needle.grade(example, "54321") == 0.0


def test_shortest_length_works_and_one_less_is_refused():
    with pytest.raises(UserError, match="length 10 ") as error:
        make_examples(length=10)
    least = int(re.search(r"least possible length is (\d+)", str(error.value)).group(1))
    assert all(len(e.tokens) <= least for e in make_examples(length=least))
    with pytest.raises(UserError, match=f"length {least - 1} "):
        make_examples(length=least - 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"count": 0}, "count must be at least 1, got 0"),
        ({"depths": [0.5, 1.5]}, "1.5"),
        ({"depths": []}, "depths"),
        ({"haystack": "One. Two."}, "2 sentences, too few for 8"),
        ({"haystack": ""}, "0 sentences"),
    ],
)
def test_needle_errors(changes, message):
    with pytest.raises(UserError, match=re.escape(message)):
        make_examples(**changes)


# --- fidelity -----------------------------------------------------------------------


def make_windows(tokenizer=None, **changes):
    options = {"count": 5, "prompt_tokens": 40, "continuation_tokens": 10, "seed": 0}
    options |= {"haystack": HAYSTACK} | changes
    return fidelity.windows(tokenizer or make_tokenizer(), **options)


def places(windows):
    """Where each window starts in the haystack's tokens; it must stand there."""
    ids = make_tokenizer()(HAYSTACK)["input_ids"]
    found = []
    for window in windows:
        whole = [*window.prompt, *window.continuation]
        starts = range(len(ids) - len(whole) + 1)
        found.append(next(i for i in starts if ids[i : i + len(whole)] == whole))
    return found


def test_windows_are_disjoint_stretches_of_the_text():
    windows = make_windows()
    assert {(len(w.prompt), len(w.continuation)) for w in windows} == {(40, 10)}
    assert (np.diff(places(windows)) >= 50).all()
    assert windows == make_windows()
    assert windows != make_windows(seed=1)


def test_windows_overlap_evenly_when_the_text_is_short():
    total = len(make_tokenizer()(HAYSTACK)["input_ids"])
    steps = np.diff(places(make_windows(prompt_tokens=total // 2, count=4)))
    assert (steps > 0).all()
    assert np.ptp(steps) <= 1


def test_windows_start_with_bos_if_texts_do():
    window = make_windows(make_tokenizer(bos=True))[0]
    assert len(window.prompt) == 40
    assert window.prompt[0] == 1
    assert 1 not in window.prompt[1:] + window.continuation


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"count": 0}, "count must be at least 1, got 0"),
        ({"prompt_tokens": 0}, "prompt_tokens"),
        ({"continuation_tokens": -1}, "continuation_tokens"),
        ({"prompt_tokens": 10**6}, "at least 1000014 are needed"),
    ],
)
def test_window_errors(changes, message):
    with pytest.raises(UserError, match=message):
        make_windows(**changes)


def test_compare_by_hand():
    # Probabilities (1/2, 1/4, 1/4) against (1/4, 1/4, 1/2); the target is token 0.
    reference, method = np.log([[2.0, 1.0, 1.0]]), np.log([[1.0, 1.0, 2.0]]) + 5
    found = fidelity.compare(reference, method, np.array([0]))
    assert found["reference_loss"] == pytest.approx(np.log(2))
    assert found["loss"] == pytest.approx(np.log(4))
    assert found["kl"] == pytest.approx(0.25 * np.log(2))
    assert found["top1_agreement"] == 0.0


def test_compare_matches_the_plain_formulas():
    rng = np.random.default_rng(0)
    reference, method = rng.normal(size=(2, 7, 11)).astype(np.float32)
    targets = rng.integers(0, 11, 7)
    p, q = (np.exp(x) / np.exp(x).sum(1, keepdims=True) for x in (reference, method))
    found = fidelity.compare(reference, method, targets)
    rows = np.arange(7)
    assert found["loss"] == pytest.approx(-np.log(q[rows, targets]).mean(), rel=1e-5)
    assert found["kl"] == pytest.approx((p * np.log(p / q)).sum(1).mean(), rel=1e-5)
    assert found["top1_agreement"] == np.mean(p.argmax(1) == q.argmax(1))


def test_compare_identical_and_extreme_logits():
    logits = np.array([[3e4, 0.0, -np.inf], [-3e4, 3e4, 0.0]], np.float32)
    found = fidelity.compare(logits, logits, np.array([0, 1]))
    expected = {"loss": 0.0, "reference_loss": 0.0, "kl": 0.0, "top1_agreement": 1.0}
    assert found == expected


def test_compare_errors():
    logits = np.zeros((2, 3))
    with pytest.raises(UserError, match=r"\(2, 3\).*\(2, 4\)"):
        fidelity.compare(logits, np.zeros((2, 4)), np.zeros(2, int))
    with pytest.raises(UserError, match="targets"):
        fidelity.compare(logits, logits, np.zeros(3, int))
    with pytest.raises(UserError, match="no targets"):
        fidelity.compare(logits[:0], logits[:0], np.zeros(0, int))


# --- options --------------------------------------------------------------------------


def own_task(examples):
    return base.Task("quiz", examples, lambda text, example: {}, "said", 4, "a test")


def test_options_of_a_task_of_one_s_own():
    """Annotated options are checked; an unknown option's error lists the known."""
    quiz = own_task(lambda tokenizer, count, seed, topic="all": [])
    base.check_options(quiz, {"topic": 3})

    def examples(tokenizer, count, seed, share: float = 0.5):
        return []

    base.check_options(own_task(examples), {"share": 1})
    with pytest.raises(UserError, match="quiz: share is 'half': give a number"):
        base.check_options(own_task(examples), {"share": "half"})
    bare = own_task(lambda tokenizer, count, seed: [])
    with pytest.raises(UserError, match="quiz has no option 'topic': it has none"):
        base.check_options(bare, {"topic": 3})
