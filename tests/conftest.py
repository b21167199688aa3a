"""With BATON_REQUIRE_ALL, a test that is skipped is a test that failed: nothing is missing for want of a tool."""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import TypeVar

import pytest

Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """One test, with its set-up and its end."""
    return _required((yield), item)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """A module or folder of tests."""
    return _required((yield), collector)


def _required(report: Report, node: pytest.Item | pytest.Collector) -> Report:
    if report.skipped and os.environ.get("BATON_REQUIRE_ALL"):
        report.outcome = "failed"
        report.longrepr = f"{node.nodeid}: skipped, and BATON_REQUIRE_ALL is set: {report.longrepr}"
    return report
