"""Handing requests to engines: nothing is lost or done twice, nobody has too much, a prompt's samples stay together."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gkd.rollout.dispatch import RequestDispatcher
from gkd.types import Prompt, SampleRequest, Sampling

KINDS = ["finish", "finish", "finish", "generate", "generate", "die", "back"]


def make_requests(n_prompts: int, n: int, first: int = 0, order: float = 1) -> list[SampleRequest]:
    prompts = [Prompt(first + p, np.array([p], np.int32), "") for p in range(n_prompts)]
    return [
        SampleRequest(prompts[p], i, 0, Sampling(4), key=first * n + p * n + i, order=order)
        for p in range(n_prompts)
        for i in range(n)
    ]


@given(
    st.integers(1, 4), st.integers(1, 6), st.integers(1, 4), st.integers(0, 12),
    st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 100)), max_size=80),
)  # fmt: skip
def test_every_request_is_done_once_whatever_ends_in_between(
    engines: int, capacity: int, n: int, n_prompts: int, events: list[tuple[str, int]]
) -> None:
    requests = make_requests(n_prompts, n)
    dispatcher = RequestDispatcher(range(engines), capacity, spill=n)
    dispatcher.add(requests)
    done: list[int] = []

    def finish(which: int) -> None:
        working = [(engine, key) for engine, held in dispatcher.at_work.items() for key in held]
        if working:
            engine, key = working[which % len(working)]
            assert dispatcher.finish(engine, key) and not dispatcher.finish(engine, key)
            done.append(key)

    for kind, which in [*events, *[("finish", 0)] * len(requests)]:
        given_now = dispatcher.hand_out()
        assert all(request.key in dispatcher.at_work[engine] for engine, its in given_now.items() for request in its)
        assert max(map(dispatcher.load, dispatcher.at_work)) <= capacity
        assert not dispatcher.n_waiting or min(map(dispatcher.load, dispatcher.at_work)) == capacity
        if kind == "generate":
            for engine, held in dispatcher.at_work.items():
                dispatcher.mark_generated(engine, next(iter(held), -1))
        elif kind == "die" and len(dispatcher.at_work) > 1:
            dispatcher.remove(sorted(dispatcher.at_work)[which % len(dispatcher.at_work)])
        elif kind == "back":
            dispatcher.join(which % engines)
        else:
            finish(which)
    assert sorted(done) == [request.key for request in requests]
    assert len(dispatcher) == dispatcher.n_waiting == 0
    assert (
        not dispatcher._homes and not dispatcher._unfinished and not any(dispatcher._generated.values())
    )  # nothing grows over a run


@given(
    st.integers(1, 4), st.integers(1, 6), st.integers(1, 4), st.integers(0, 8),
    st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 100), st.booleans()), max_size=60),
)  # fmt: skip
def test_groups_that_are_rated_together_are_on_one_engine_whatever_ends_in_between(
    engines: int, capacity: int, n: int, n_prompts: int, events: list[tuple[str, int, bool]]
) -> None:
    """A group is finished when all of it is on one engine, and not before; one of the engines may be suspect."""
    requests = make_requests(n_prompts, n)
    dispatcher = RequestDispatcher(range(engines), capacity, spill=None)
    dispatcher.add(requests)
    done: list[int] = []
    for kind, which, suspect in [*events, *[("generate", 0, False), ("finish", 0, False)] * len(requests)]:
        working = sorted(dispatcher.at_work)
        dispatcher.hand_out(working[:1] if suspect and len(working) > 1 else ())
        engine_of = {key: engine for engine, held in dispatcher.at_work.items() for key in held}
        groups = [[key for key in range(first, first + n) if key in engine_of] for first in range(0, n * n_prompts, n)]
        assert all(len({engine_of[key] for key in group}) <= 1 for group in groups)
        if kind == "generate":
            for engine, held in dispatcher.at_work.items():
                for key in held:
                    dispatcher.mark_generated(engine, key)
        elif kind == "die" and len(working) > 1:
            dispatcher.remove(working[which % len(working)])
        elif kind == "back":
            dispatcher.join(which % engines)
        elif whole := [group for group in groups if len(group) == n]:
            group = whole[which % len(whole)]
            assert all(dispatcher.finish(engine_of[key], key) for key in group)
            done += group
    assert sorted(done) == [request.key for request in requests]
    assert len(dispatcher) == dispatcher.n_waiting == 0 and not dispatcher._homes


def test_a_prompts_samples_are_on_one_engine_and_loads_are_even() -> None:
    dispatcher = RequestDispatcher(range(3), capacity=100, spill=8)
    dispatcher.add(make_requests(6, 8))
    given_now = dispatcher.hand_out()
    assert {engine: len(its) for engine, its in given_now.items()} == {0: 16, 1: 16, 2: 16}
    assert [len({request.prompt.id for request in its}) for its in given_now.values()] == [2, 2, 2]


def test_the_choice_is_the_emptiest_engine_of_all() -> None:
    """Against a search through all engines at every request, for samples that come together and for single ones."""
    rng = np.random.default_rng(0)
    for n, spill in ((1, 1), (4, 4), (8, 2)):
        dispatcher, loads, homes = RequestDispatcher(range(7), 9, spill), [0] * 7, dict[int, int]()
        for engine in range(7):  # what is there already
            for _ in range(int(rng.integers(0, 9))):
                one = replace(make_requests(1, 1)[0], key=10_000 + len(dispatcher.at_work[engine]) + 100 * engine)
                dispatcher.at_work[engine][one.key] = one
            loads[engine] = len(dispatcher.at_work[engine])
        requests = make_requests(40 // n, n, first=1)
        dispatcher.add(requests)
        expected: list[int] = []
        for request in requests:
            emptiest = loads.index(min(loads))
            if loads[emptiest] >= 9:
                break
            home = homes.get(request.prompt.id, emptiest)
            home = emptiest if loads[home] >= min(9, loads[emptiest] + spill) else home
            homes[request.prompt.id] = home
            loads[home] += 1
            expected.append(home)
        engine_of = {request.key: engine for engine, its in dispatcher.hand_out().items() for request in its}
        assert [engine_of[request.key] for request in requests[: len(expected)]] == expected
        assert len(engine_of) == len(expected)


def test_a_prompt_goes_elsewhere_where_its_engine_is_full() -> None:
    dispatcher = RequestDispatcher(range(2), capacity=6, spill=8)
    dispatcher.add(make_requests(1, 8))
    assert {engine: len(its) for engine, its in dispatcher.hand_out().items()} == {0: 6, 1: 2}


def test_earlier_orders_go_first_and_what_an_engine_lost_keeps_its_place() -> None:
    dispatcher = RequestDispatcher(range(2), capacity=1, spill=1)
    dispatcher.add(make_requests(2, 1, order=7))
    dispatcher.add(make_requests(2, 1, first=10, order=3))
    assert {e: its[0].key for e, its in dispatcher.hand_out().items()} == {0: 10, 1: 11}
    dispatcher.remove(0)
    assert dispatcher.finish(1, 11)
    assert dispatcher.hand_out()[1][0].key == 10


@given(
    st.integers(1, 3), st.integers(1, 4), st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 100)), max_size=60)
)
def test_orders_that_are_apart_are_never_sampled_at_the_same_time_and_all_are_done(
    engines: int, capacity: int, events: list[tuple[str, int]]
) -> None:
    """Whatever is generated, scored or lost in between; what a higher order waits for is that it is generated."""
    dispatcher = RequestDispatcher(range(engines), capacity, spill=2, apart=True)
    orders: dict[int, float] = {}
    for order, first in ((2.5, 0), (2, 10), (3, 20)):
        own = make_requests(3, 2, first, order)
        orders |= {request.key: order for request in own}
        dispatcher.add(own)
    generated: set[int] = set()
    done: list[int] = []

    def step(kind: str, which: int) -> None:
        for chosen in dispatcher.hand_out().values():
            generated.difference_update(request.key for request in chosen)
        sampled = {key for held in dispatcher.at_work.values() for key in held} - generated
        assert len({orders[key] for key in sampled}) <= 1
        if kind in ("die", "back"):
            (dispatcher.remove if kind == "die" else dispatcher.join)(which % engines)
            return
        held = [(engine, key) for engine, keys in dispatcher.at_work.items() for key in keys]
        if held:
            engine, key = held[which % len(held)]
            if kind == "generate":
                dispatcher.mark_generated(engine, key)
                generated.add(key)
            else:
                assert dispatcher.finish(engine, key)
                done.append(key)

    for kind, which in events:
        step(kind, which)
    dispatcher.join(0)
    for _ in range(100):
        step("finish", 0)
    assert sorted(done) == sorted(orders) and not len(dispatcher)


@given(
    st.integers(1, 3),
    st.integers(1, 4),
    st.sampled_from([0.5, 2.0]),
    st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 100)), max_size=60),
)
def test_engines_get_weights_one_by_one_and_each_request_its_own_or_newer_ones(
    n_engines: int, capacity: int, order: float, events: list[tuple[str, int]]
) -> None:
    """One batch of the first weights and one of the next: an engine that is drained of the former gets these, whatever
    the others have left and whatever ends in between, and nothing is lost.

    The next is requested once an engine has its weights, and may go before the first, as a validation does.
    """
    dispatcher = RequestDispatcher(range(n_engines), capacity, spill=2)
    requests = make_requests(3, 2) + [replace(one, version=1) for one in make_requests(3, 2, first=3, order=order)]
    dispatcher.add(requests[:6])
    done: list[int] = []
    was_requested = False

    def step(kind: str, which: int) -> None:
        nonlocal was_requested
        drained = [e for e in dispatcher.at_work if not dispatcher.versions[e] and dispatcher.is_drained(e)]
        for engine in drained:
            assert was_requested or not dispatcher.n_waiting
            dispatcher.join(engine, 1)
        if not was_requested and (drained or all(dispatcher.versions.values())):
            dispatcher.add(requests[6:])
            was_requested = True
        for engine, chosen in dispatcher.hand_out().items():
            assert all(request.version <= dispatcher.versions[engine] for request in chosen)
        at_work = {engine: list(held) for engine, held in dispatcher.at_work.items() if held}
        idle = [e for e in dispatcher.at_work if not dispatcher.load(e) and not dispatcher.versions[e]]
        assert all(map(dispatcher.is_drained, idle)) or not dispatcher.n_waiting  # nobody waits for another
        if kind == "die" and len(dispatcher.at_work) > 1:
            dispatcher.remove(sorted(dispatcher.at_work)[which % len(dispatcher.at_work)])
        elif kind == "back":
            back = which % n_engines
            assert back in dispatcher.at_work or dispatcher.is_drained(back)
            dispatcher.join(back, dispatcher.versions.get(back, 1))
        elif at_work:
            engine = sorted(at_work)[which % len(at_work)]
            key = at_work[engine][which % len(at_work[engine])]
            if kind == "generate":
                dispatcher.mark_generated(engine, key)
            else:
                assert dispatcher.finish(engine, key)
                done.append(key)

    for kind, which in [*events, *[("finish", 0)] * 60]:
        step(kind, which)
    assert sorted(done) == [request.key for request in requests] and not len(dispatcher)
    assert set(dispatcher.versions) == set(dispatcher.at_work)


def test_an_engine_is_drained_whatever_the_others_have_left() -> None:
    dispatcher = RequestDispatcher(range(2), capacity=2, spill=1)
    dispatcher.add(make_requests(2, 1))
    dispatcher.add([replace(one, version=1) for one in make_requests(2, 1, first=2, order=2)])
    assert {engine: [its.key for its in given] for engine, given in dispatcher.hand_out().items()} == {0: [0], 1: [1]}
    assert not dispatcher.is_drained(0)
    dispatcher.mark_generated(0, 0)
    assert dispatcher.is_drained(0) and not dispatcher.is_drained(1) and not dispatcher.hand_out()
    dispatcher.join(0, 1)
    assert [request.key for request in dispatcher.hand_out()[0]] == [2, 3]
    dispatcher.remove(1)  # what it had left is done by an engine with newer weights
    assert not dispatcher.hand_out() and dispatcher.finish(0, 0) and dispatcher.finish(0, 2)
    assert [request.key for request in dispatcher.hand_out()[0]] == [1]


def test_an_engine_does_not_wait_for_another_with_weights_that_go_first() -> None:
    """A validation of new weights goes before a later step's batch of the old ones, and the engine that had it died."""
    dispatcher = RequestDispatcher(range(2), capacity=2, spill=1)
    dispatcher.add(make_requests(2, 1, order=3))
    dispatcher.hand_out()
    dispatcher.mark_generated(0, 0)  # it is being scored
    dispatcher.join(0, 1)
    dispatcher.add([replace(one, version=1) for one in make_requests(1, 1, first=2, order=2.5)])
    assert [request.key for request in dispatcher.hand_out()[0]] == [2]
    dispatcher.remove(0)
    dispatcher.mark_generated(1, 1)
    assert not dispatcher.hand_out() and dispatcher.is_drained(1)
    dispatcher.join(1, 1)
    assert [request.key for request in dispatcher.hand_out()[1]] == [2, 0]
