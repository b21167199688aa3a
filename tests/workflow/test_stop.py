"""Several signals within moments are one request to stop; one that comes later is another."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from workflow.stages import stop
from workflow.stages.stop import StoppedOnRequest, StopRequest


@pytest.fixture
def request_to_stop() -> Iterator[StopRequest]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)}
    request = StopRequest()
    request.install()
    yield request
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_stage_that_polls_is_told_once_and_interrupted_by_the_second_request(request_to_stop, monkeypatch):
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGUSR2)  # from the launcher, which got it too
    assert request_to_stop.requested
    monkeypatch.setattr(stop, "ONE_REQUEST_SECONDS", 0.0)
    with pytest.raises(StoppedOnRequest, match="SIGTERM"):
        signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize("polls", [True, False])
def test_what_ends_the_stage_is_not_interrupted_by_the_same_request(request_to_stop, monkeypatch, polls):
    if polls:
        signal.raise_signal(signal.SIGTERM)
        monkeypatch.setattr(stop, "ONE_REQUEST_SECONDS", 0.0)
    else:
        request_to_stop.interrupt()
    with pytest.raises(StoppedOnRequest):
        signal.raise_signal(signal.SIGTERM)
    monkeypatch.setattr(stop, "ONE_REQUEST_SECONDS", 5.0)
    signal.raise_signal(signal.SIGTERM)  # comes while states, locks and processes are given up
