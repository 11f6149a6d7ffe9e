"""The simulated executor beside one that runs token by token; the rows it wastes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from testing.executors import Scripted, Strict, request

from kvjax.engine.scheduler import Scheduler
from kvjax.engine.simulated import Costs, SimulatedExecutor

cases = st.fixed_dictionaries(
    {
        "rows": st.integers(1, 5),
        "read_rows": st.integers(1, 3),
        "limit": st.integers(1, 7),
        "chunk": st.integers(1, 6),
        "lengths": st.lists(st.integers(1, 15), min_size=1, max_size=8),
        "prompts": st.lists(st.integers(1, 20), min_size=8, max_size=8),
        "samples": st.lists(st.integers(1, 3), min_size=8, max_size=8),
        "cancelled": st.dictionaries(st.integers(0, 7), st.integers(0, 12)),
    }
)


def events(executor, case):
    """What a scheduler reports of a case, and the prompts' chunks and tokens."""
    run, turn, found = Scheduler(executor, limit=case["limit"]), 0, []
    for number in range(len(case["lengths"])):
        prompt, samples = case["prompts"][number], case["samples"][number]
        run.add(request(number, prompt, samples, max_new_tokens=10))
    while run.busy:
        for number, at in case["cancelled"].items():
            if at == turn:
                run.cancel(number)
        found.append(
            [
                (e.request.number, e.request.sample, e.tokens, e.finish_reason)
                for e in run.turn()
            ]
        )
        turn += 1
    return found


@settings(deadline=None, max_examples=100)
@given(cases)
def test_it_does_what_one_token_at_a_time_does(case):
    length = lambda each: case["lengths"][each.number]
    sizes = case["rows"], case["read_rows"]
    simulated = SimulatedExecutor(*sizes, length, chunk=case["chunk"])
    scripted = Scripted(*sizes, lambda each: range(length(each)), case["chunk"])
    assert events(Strict(simulated), case) == events(scripted, case)
    assert simulated.clock == sum(call.seconds for call in simulated.calls)


def noted(notes):
    """Costs that note what they are asked: of a decode step 1, a chunk 10, both 100."""

    def note(name, each, unit):
        def cost(*inputs):
            steps = inputs[-1] if name == "decode" else len(inputs[-1].chunks)
            notes.append((name, *(np.array(x).tolist() for x in each(*inputs)), steps))
            return np.full(steps, unit)

        return cost

    return Costs(
        decode=note("decode", lambda rows, steps: rows, 1.0),
        chunk=note("chunk", lambda reading: reading, 10.0),
        mixed=note("mixed", lambda rows, reading: (*rows, *reading), 100.0),
        insert=lambda prompts: notes.append(("insert", prompts.tolist())) or 1000.0,
        call=0.5,
    )


def test_the_clock_by_hand():
    notes = []
    executor = SimulatedExecutor(
        1, 2, lambda each: 6, noted(notes), chunk=4, first_chunk=2
    )
    run = Scheduler(executor)
    for number, prompt in enumerate((7, 3, 2)):
        run.add(request(number, prompt, max_new_tokens=4))
    assert len([e for e in run.run() if e.finish_reason == "length"]) == 3
    assert notes == [
        ("chunk", [7, 3], [0, 1, 2], 3),  # 2 + 4 + 1 tokens
        ("insert", [7]),
        ("decode", [7], [1], [3], 3),
        ("insert", [3]),
        ("mixed", [3], [1], [3], [2], [0], 1),
        ("decode", [3], [2], [2], 2),
        ("insert", [2]),
        ("decode", [2], [1], [3], 3),
    ]
    assert executor.clock == 3 * 10 + 3 * 1000 + 3 + 100 + 2 + 3 + 8 * 0.5
    assert [(call.steps, call.tokens) for call in executor.calls] == [
        *((0, 0), (0, 1), (3, 3), (0, 1), (1, 1), (2, 2), (0, 1), (3, 3))
    ]


def test_a_released_row_draws_no_more():
    run = Scheduler(
        executor := SimulatedExecutor(1, 1, lambda each: 50),
        lambda each, tokens: len(tokens) > 4,
        limit=2,
    )
    run.add(request(0, stop="x"))
    run.add(request(1))
    drawn = [len(e.tokens) for e in run.run() if e.request.number == 0]
    assert drawn == [1, 1, 2, 2]
    assert sum(call.tokens for call in executor.calls) == 6 + 50


def test_end_tokens_that_do_not_count():
    run = Scheduler(SimulatedExecutor(2, 1, lambda each: 3))
    run.add(request(0, max_new_tokens=7))
    run.add(request(1, max_new_tokens=7, ignore_eos=True))
    drawn = [event.request.number for event in run.run() for _ in event.tokens]
    assert (drawn.count(0), drawn.count(1)) == (3, 7)


# --- steps of the scheduler -----------------------------------------------------------


def lengths(count=512, seed=0):
    """Tokens of completions: a mean of 122, from 4 to 512."""
    drawn = np.random.default_rng(seed).lognormal(4.4, 0.9, count)
    return np.clip(drawn, 4, 512).astype(int)


def steps_over_ideal(rows, read_rows, chunks=1, count=512):
    """Steps of any kind, in units of those that decode all tokens in full rows."""
    new = lengths(count)
    length = lambda each: int(new[each.number])
    executor = SimulatedExecutor(rows, read_rows, length, chunk=8)
    run = Scheduler(executor)
    for number in range(count):
        run.add(request(number, prompt=8 * chunks, max_new_tokens=512))
    assert sum(len(event.tokens) for event in run.run()) == new.sum()
    return executor.clock * rows / new.sum()


def fixed_over_ideal(rows, count=512):
    new = lengths(count)
    longest = [new[i : i + rows].max() for i in range(0, count, rows)]
    return sum(longest) * rows / new.sum()


@pytest.mark.parametrize(("rows", "most"), [(16, 1.10), (64, 1.35)])
def test_rows_are_hardly_ever_idle(rows, most):
    assert steps_over_ideal(rows, read_rows=4) <= most
    assert fixed_over_ideal(rows) > 2.5
