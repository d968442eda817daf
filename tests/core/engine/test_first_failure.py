"""Collectives and messages see one disaster each in its own way; the group has one failure."""

from __future__ import annotations

import numpy as np
import pytest

from sealring._native import Failure, FailureCode, FirstFailure
from sealring.core.engine.collective import DType, ReduceKind
from sealring.core.engine.failures import failure_of
from sealring.core.schedule import Algorithm, Operation
from sealring.errors import GroupClosed, GroupError, TamperedRecord
from tests.core.engine.attacker import Flip
from tests.core.engine.cases import Case, tensors_of
from tests.core.engine.local_world import LocalMail, LocalWorld, receive, send, slot

SUM = Case(Operation.ALL_REDUCE, Algorithm.DIRECT, 12, DType.FLOAT32, ReduceKind.SUM)
BEFORE = Failure(FailureCode.CLOSED, "what the other half saw", 2)


def test_the_first_stays() -> None:
    first = FirstFailure()
    assert first.settle(BEFORE) == BEFORE
    assert first.settle(Failure(FailureCode.CLOSED, "about another", 1)) == BEFORE


def test_the_same_may_be_said_in_more_words() -> None:
    first = FirstFailure()
    first.settle(BEFORE)
    longer = Failure(FailureCode.CLOSED, "what the other half saw, and more", 2)
    assert first.settle(longer) == longer


def facts(error: BaseException | None) -> tuple[object, ...]:
    assert isinstance(error, GroupError)
    return type(error), error.peer, error.collective, error.reported_by


def test_collectives_end_with_what_messages_saw_first_and_tell_it() -> None:
    with LocalWorld(3, middle={(1, 0): Flip(100, 1)}) as world:
        world.engines[0].first_failure.settle(BEFORE)
        for _ in range(2):
            errors = world.run([each.collective() for each in tensors_of(SUM, 3)])
    own, *others = map(facts, errors)
    assert own == (GroupClosed, 2, None, None)
    assert others == [(GroupClosed, 2, None, 0)] * 2


def test_without_it_they_tell_what_they_saw() -> None:
    with LocalWorld(3, middle={(1, 0): Flip(100, 1)}) as world:
        for _ in range(2):
            errors = world.run([each.collective() for each in tensors_of(SUM, 3)])
    own, *others = map(facts, errors)
    assert own == (TamperedRecord, 1, 1, None)
    assert others == [(TamperedRecord, 1, 1, 0)] * 2


@pytest.mark.parametrize("settled", [True, False])
def test_messages_end_with_what_collectives_saw_first_and_tell_it(settled: bool) -> None:
    sent, got = np.zeros(64, np.uint8), np.zeros(64, np.uint8)
    with LocalMail(3, middle={(1, 0): Flip(100, 1)}) as mail:
        zero, one, two = mail.mailboxes
        if settled:
            zero.first_failure.settle(BEFORE)
        send(one, 0, 1, slot(sent), 20.0)
        submitted = receive(two, 0, 2, slot(got), 20.0)
        with pytest.raises(GroupError) as seen:
            zero.wait(receive(zero, 1, 1, slot(got), 20.0))
        with pytest.raises(GroupError) as heard:
            two.wait(submitted)
    kind, about = (GroupClosed, 2) if settled else (TamperedRecord, 1)
    assert facts(seen.value) == (kind, about, None, None)
    assert facts(heard.value) == (kind, about, None, 0)


def test_a_text_that_is_not_utf_8_reaches_the_others() -> None:
    """A file's name may be such a text. If the failure could not be sent, the others would wait."""
    told = failure_of(GroupClosed("cannot open 'a\udcff'"))
    assert told.text == r"cannot open 'a\udcff'"
