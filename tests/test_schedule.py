"""Tickets: the bound on staleness holds whatever happens, and every prompt is trained once, also after a resume."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from gkd.schedule import Ticket, TicketSchedule


class Prompts:
    """Prompts in order, from where a checkpoint left off."""

    def __init__(self, drawn: int = 0) -> None:
        self.drawn = drawn

    def draw(self, n: int) -> list[int]:
        self.drawn += n
        return list(range(self.drawn - n, self.drawn))


@given(st.integers(1, 5), st.integers(0, 4), st.integers(1, 12), st.lists(st.booleans(), max_size=40), st.data())
def test_every_step_trains_its_tickets_within_the_bound_however_often_a_run_is_killed(
    batch: int, staleness: int, total: int, kills: list[bool], data: st.DataObject
) -> None:
    """A run that is killed anywhere goes on with what its last checkpoint has."""
    checkpoint = (0, 0, dict[int, list[int]]())  # steps trained, prompts drawn, what is ahead
    trained: dict[int, list[Ticket]] = {}
    killed = iter(kills)
    while checkpoint[0] < total:
        done, drawn, ahead = checkpoint
        prompts = Prompts(drawn)
        schedule = TicketSchedule(batch, staleness, total, prompts.draw, done, ahead)
        sampled_by: dict[int, int] = {}
        tickets: dict[int, list[Ticket]] = {}
        for step in range(done + 1, total + 1):
            for admitted in schedule.admit(version=step - 1):
                of = admitted[0].step
                assert of not in sampled_by and [ticket.place for ticket in admitted] == list(range(batch))
                sampled_by[of], tickets[of] = step - 1, admitted
            assert max(sampled_by) <= min(total, step + staleness)
            assert 0 <= (step - 1) - sampled_by[step] <= staleness
            if next(killed, False):
                break
            trained[step] = tickets[step]
            after = schedule.steps_ahead(step)
            assert len(after) == min(staleness, total - step)
            if data.draw(st.booleans()):
                checkpoint = step, prompts.drawn, after
        else:
            checkpoint = total, prompts.drawn, {}
    assert sorted(trained) == list(range(1, total + 1))
    # Without replacements the order of prompts is that of a run that nobody killed: nothing lost, nothing twice.
    assert [t.prompt for step in sorted(trained) for t in trained[step]] == list(range(total * batch))


@given(st.integers(1, 4), st.integers(0, 3), st.lists(st.integers(0, 3), min_size=8, max_size=8), st.integers(0, 7))
def test_replacements_are_for_the_same_step_and_no_prompt_is_another_ones(
    batch: int, staleness: int, n_replaced: list[int], resumed_after: int
) -> None:
    prompts = Prompts()
    schedule = TicketSchedule(batch, staleness, len(n_replaced), prompts.draw)
    seen: Counter[int] = Counter()
    for step, n in enumerate(n_replaced, 1):
        for admitted in schedule.admit(step - 1):
            seen.update(t.prompt for t in admitted if t.step <= resumed_after or step > resumed_after)
        further = schedule.replace(step, min(n, batch))
        assert all(ticket.step == step and batch <= ticket.place < 2 * batch for ticket in further)
        seen.update(ticket.prompt for ticket in further)
        if step == resumed_after:  # what was admitted and not trained is admitted again, with the same prompts
            schedule = TicketSchedule(batch, staleness, len(n_replaced), prompts.draw, step, schedule.steps_ahead(step))
    assert set(seen.values()) == {1}
    assert sorted(seen) == list(range(prompts.drawn))


def test_a_resume_admits_no_more_than_the_bound_lets_it() -> None:
    prompts = Prompts(70)
    schedule = TicketSchedule(10, 2, 100, prompts.draw, trained=5, ahead={6: [*range(50, 60)], 7: [*range(60, 70)]})
    batches = schedule.admit(5)
    assert [(b[0].step, b[0].prompt) for b in batches] == [(6, 50), (7, 60), (8, 70)]
    assert schedule.admit(5) == []
    assert [b[0].step for b in schedule.admit(6)] == [9]


def test_places_of_replacements_depend_on_how_often_there_were_some() -> None:
    """And not on how many: seeds follow from places."""
    schedule = TicketSchedule(4, 0, 1, Prompts().draw)
    schedule.admit(0)
    assert [[ticket.place for ticket in schedule.replace(1, n)] for n in (1, 2)] == [[4], [8, 9]]
