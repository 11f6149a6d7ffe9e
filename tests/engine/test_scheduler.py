"""The scheduler over scripted executors: every request gets its tokens, once."""

import ast
import collections
import dataclasses
import inspect

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from testing.executors import Scripted, Strict, request

from kvjax.engine import scheduler as scheduling
from kvjax.engine.scheduler import Scheduler

END = 9  # the end token, and the last of every script that is not cut off


def script(length):
    """Of requests that end by themselves after `length` tokens, all different."""

    def tokens(each):
        about = 10_000 * (each.number + 1) + 1000 * each.sample
        return [about + i for i in range(length(each) - 1)] + [END]

    return tokens


def gathered(events):
    """Tokens and reason of every sample; nothing follows the reason."""
    tokens, reasons = collections.defaultdict(list), {}
    for event in events:
        key = event.request.number, event.request.sample
        assert key not in reasons, "an event after the last"
        tokens[key] += event.tokens
        if event.finish_reason:
            reasons[key] = event.finish_reason
    return tokens, reasons


cases = st.fixed_dictionaries(
    {
        "rows": st.integers(1, 5),
        "read_rows": st.integers(1, 3),
        "limit": st.integers(1, 7),
        "refills": st.booleans(),
        "requests": st.lists(
            st.fixed_dictionaries(
                {
                    "prompt": st.integers(1, 20),
                    "max_new_tokens": st.integers(1, 12),
                    "length": st.integers(1, 15),
                    "num_samples": st.integers(1, 4),
                    "stop_at": st.none() | st.integers(1, 12),
                    "arrives": st.integers(0, 20),
                    "cancelled": st.none() | st.integers(0, 30),
                }
            ),
            max_size=8,
        ),
    }
)


class Eager(Strict):
    """Also asks that the scheduler leaves no row idle while a prompt is ready."""

    def step(self, limit, until):
        assert not (self.ready and len(self.decoding) < self.rows)
        assert until == (1 if self.ready else max(len(self.decoding), 1))
        return super().step(limit, until)


def strict(rows=2, read_rows=1, length=lambda each: 5, chunk=4, refills=True):
    return Eager(Scripted(rows, read_rows, script(length), chunk, refills))


def made(number, case):
    fields = {name: case[name] for name in ("prompt", "max_new_tokens", "num_samples")}
    return request(number, stop=("x",) if case["stop_at"] else (), **fields)


def play(case):
    """Runs a case turn by turn; returns the executor and the events."""
    wanted = case["requests"]
    rows, refills = case["rows"], case["refills"]
    executor = strict(
        rows,
        case["read_rows"] if refills else rows,
        lambda each: wanted[each.number]["length"],
        refills=refills,
    )

    def stops(each, tokens):
        return len(tokens) >= wanted[each.number]["stop_at"]

    run = Scheduler(executor, stops, ends=[END], limit=case["limit"])
    events, turn = [], 0
    last = max((r["arrives"] for r in wanted), default=0)
    while run.busy or turn <= last:
        for number, each in enumerate(wanted):
            if each["arrives"] == turn:
                run.add(made(number, each))
            if each["cancelled"] == turn:
                run.cancel(number)
        events += run.turn()
        turn += 1
        assert turn < 5000, "it does not end"
    return executor, events


@settings(deadline=None, max_examples=150)
@given(cases)
def test_every_request_gets_its_tokens(case):
    """In any order of arrival, with samples, stop texts and cancelled requests."""
    executor, events = play(case)
    tokens, reasons = gathered(events)
    assert not executor.decoding and executor.group is None
    wanted = case["requests"]
    expected = {(i, k) for i, r in enumerate(wanted) for k in range(r["num_samples"])}
    assert set(reasons) == set(tokens) == expected
    for (number, sample), drawn in tokens.items():
        each = wanted[number]
        about = made(number, each)
        play_script = script(lambda request: wanted[request.number]["length"])
        full = play_script(dataclasses.replace(about, sample=sample))
        full = full[: each["max_new_tokens"]]
        stop = each["stop_at"] or 99
        natural = "stop" if stop <= len(full) or full[-1] == END else "length"
        assert drawn == full[: len(drawn)]
        assert len(drawn) < stop + case["limit"]
        if reasons[number, sample] == "cancelled":
            assert each["cancelled"] >= each["arrives"]
        else:
            assert len(drawn) >= min(stop, len(full))
            assert reasons[number, sample] == natural


@settings(deadline=None, max_examples=50)
@given(cases)
def test_first_come_first_served(case):
    executor, _ = play(case)
    wanted = case["requests"]
    order = sorted(range(len(wanted)), key=lambda i: wanted[i]["arrives"])
    read = [r.number for call in executor.calls if call[0] == "read" for r in call[1]]
    read = list(dict.fromkeys(read))  # without refills, once for each sample
    inserted = [
        (order.index(r.number), r.sample)
        for call in executor.calls
        if call[0] == "insert"
        for r in call[3]
    ]
    skipped = [i for i in order if i not in read]
    assert read == [i for i in order if i in read]
    assert all(wanted[i]["cancelled"] is not None for i in skipped)
    assert inserted == sorted(set(inserted))


def names(executor):
    return [call[0] for call in executor.calls]


def test_the_next_prompt_is_read_while_rows_decode():
    executor = strict(rows=1, length=lambda each: 6)
    run = Scheduler(executor)
    for number in range(2):
        run.add(request(number, prompt=8))
    events = list(run.run())
    assert [len(event.tokens) for event in events] == [1, 2, 3, 1, 5]
    assert executor.calls[:5] == [
        ("read", [events[0].request]),
        ("step", 32, 1),  # two chunks
        ("insert", [0], [0], [events[0].request]),
        ("drop",),
        ("read", [events[3].request]),
    ]
    assert names(executor)[5:] == [
        *("step", "step", "finished"),  # two chunks and two tokens; the other three
        *("insert", "drop", "step", "finished"),
    ]


def test_samples_take_turns_in_few_rows():
    executor = strict(rows=2, length=lambda each: 2 + each.sample)
    run = Scheduler(executor)
    run.add(request(7, num_samples=5))
    tokens, reasons = gathered(run.run())
    assert [len(tokens[7, k]) for k in range(5)] == [2, 3, 4, 5, 6]
    assert set(reasons.values()) == {"stop"}
    assert names(executor).count("read") == names(executor).count("drop") == 1
    assert all(place == 0 for c in executor.calls if c[0] == "insert" for place in c[1])


def test_samples_are_read_apart_where_rows_are_not_refilled():
    executor = strict(rows=3, read_rows=3, refills=False)
    run = Scheduler(executor)
    run.add(request(0, num_samples=2))
    run.add(request(1, num_samples=3))
    tokens, _ = gathered(run.run())
    assert sorted(tokens) == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]
    assert [len(call[1]) for call in executor.calls if call[0] == "read"] == [3, 2]


def test_why_requests_end():
    """By length, by an end token, also as the last one allowed, or by a stop text."""
    lengths = [9, 3, 4, 9, 4]
    run = Scheduler(
        strict(rows=5, length=lambda each: lengths[each.number]),
        lambda each, tokens: len(tokens) >= 2,
        ends=[END],
    )
    for number in range(5):
        fields = {"stop": "x"} if number == 3 else {"ignore_eos": number == 4}
        run.add(request(number, max_new_tokens=4, **fields))
    _, reasons = gathered(run.run())
    assert reasons == {
        (0, 0): "length",
        (1, 0): "stop",
        (2, 0): "stop",
        (3, 0): "stop",
        (4, 0): "length",
    }


def test_stop_texts_are_looked_for_every_few_steps():
    looks = []

    def stops(each, tokens):
        looks.append((each.number, len(tokens)))
        return len(tokens) >= 6

    executor = strict(rows=2, length=lambda each: 20)
    run = Scheduler(executor, stops, limit=3)
    run.add(request(0, stop="x", max_new_tokens=20))
    run.add(request(1, max_new_tokens=20))
    tokens, reasons = gathered(run.run())
    assert [n for number, n in looks] == [1, 2, 5, 8]  # one beside the other's chunk
    assert {number for number, _ in looks} == {0}
    assert len(tokens[0, 0]) == 8 and reasons[0, 0] == "stop"
    assert len(tokens[1, 0]) == 20
    assert ("release", [0]) in executor.calls


def test_cancelled_in_every_state():
    """Waiting, being read, ready and decoding; others go on."""
    for turns in range(8):
        executor = strict(rows=1, length=lambda each: 30)
        run = Scheduler(executor, limit=2)
        for number in range(4):
            run.add(request(number, prompt=8, max_new_tokens=40))
        events = [event for _ in range(turns) for event in run.turn()]
        run.cancel(0), run.cancel(1), run.cancel(3), run.cancel(99)
        tokens, reasons = gathered(events + list(run.run()))
        assert [reasons[i, 0] for i in range(4)] == [
            *("cancelled", "cancelled", "stop", "cancelled")
        ]
        assert len(tokens[2, 0]) == 30
        assert not run.busy and run.turn() == []


def test_what_heads_keep_comes_with_the_last_event():
    run = Scheduler(strict(rows=2), limit=2)
    for number in range(3):
        run.add(request(number))
    run.cancel(2)
    for event in run.run():
        ends = event.finish_reason in ("stop", "length")
        assert event.kept == (event.request if ends else None)


def test_requests_run_that_are_added_meanwhile_and_afterwards():
    run = Scheduler(strict())
    run.add(request(0))
    ended = []
    for event in run.run():
        if event.finish_reason:
            ended.append(event.request.number)
            if event.request.number < 3:
                run.add(request(event.request.number + 1))
    run.add(request(9))
    ended += [event.request.number for event in run.run() if event.finish_reason]
    assert ended == [0, 1, 2, 3, 9]


Logprobs = collections.namedtuple("Logprobs", ["chosen", "top"])


def test_log_probabilities_are_of_the_event_s_tokens():
    class WithLogprobs(Scripted):
        def _with(self, drawn):
            chosen = drawn.tokens / 8
            return drawn._replace(logprobs=Logprobs(chosen, chosen[..., None]))

        def step(self, limit, until):
            return self._with(super().step(limit, until))

        def insert(self, places, rows, requests):
            return self._with(super().insert(places, rows, requests))

    run = Scheduler(WithLogprobs(2, 1, script(lambda each: 3 + each.number)))
    for number in range(3):
        run.add(request(number))
    for event in run.run():
        assert event.logprobs.chosen.tolist() == [t / 8 for t in event.tokens]
        assert event.logprobs.top.shape == (len(event.tokens), 1)


def test_what_ended_before_an_error_has_been_yielded():
    class Broken(Scripted):
        def finished(self, rows):
            if self._requests[rows[0]].number == 1:
                raise ValueError("the cache overflowed")
            return super().finished(rows)

    run = Scheduler(Broken(1, 1, script(lambda each: 5)))
    for number in range(3):
        run.add(request(number))
    events = []
    with pytest.raises(ValueError, match="overflowed"):
        for event in run.run():
            events.append(event)
    tokens, reasons = gathered(events)
    assert reasons == {(0, 0): "stop"} and len(tokens[0, 0]) == 5


def test_the_scheduler_needs_no_jax():
    tree = ast.parse(inspect.getsource(scheduling))
    imported = {
        name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in [getattr(node, "module", None) or node.names[0].name]
    }
    assert not {name for name in imported if name.split(".")[0] in ("jax", "flax")}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda e: e.read([request(0)] * 3), "too many"),
        (lambda e: e.insert([0], [0], [request(0)]), "nothing has been read"),
        (lambda e: e.step(1, 1), "nothing to do"),
        (lambda e: e.release([0]), "not asked"),
    ],
)
def test_the_strict_executor_notices(wrong, said):
    with pytest.raises(AssertionError, match=said):
        wrong(strict())
