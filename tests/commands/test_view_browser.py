"""The page of ``batchkit view`` while something happens to its run or its server."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.browser import open_browser
from tests.support.command_line import batchkit
from tests.support.dry_runs import LOG, prepare
from tests.support.opened_pages import Open, visits
from tests.support.own_process import begin
from tests.support.view_server import viewing
from tests.support.waiting import until

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = [pytest.mark.usefixtures("in_an_empty_folder"), pytest.mark.browser]
SLOW = {"engine": {"options": {"latency_s": 0.1}}, "run": {"max_in_flight": 4}}  # 40 rows a second


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as browser:
        yield browser


@pytest.fixture
def visit(browser: Browser) -> Iterator[Open]:
    with visits(browser) as visit:
        yield visit


def test_a_run_is_killed_and_resumed_while_its_page_is_open(visit: Open, tmp_path: Path) -> None:
    prepare(100_000, **SLOW)
    first = begin("run", "job.toml", cwd=tmp_path)
    until(LOG.exists)
    with viewing("output", cwd=tmp_path) as view:
        opened = visit(f"{view.url}run/a")
        opened.state("running")

        def n_done() -> int:
            return int(opened.facts()["rows"].replace(",", ""))

        opened.sees(
            "#detail .detail-head strong", r"^\d+$"
        )  # the first row of those that had ended
        until(lambda: n_done() > 10)
        until(lambda: opened.page.locator("#charts figure").count() >= 2)
        first.send_signal(signal.SIGKILL)
        first.communicate()
        opened.state("stopped")
        opened.sees("#starts tr", "start 1.*killed")
        before = n_done()
        second = begin("run", "job.toml", cwd=tmp_path)
        opened.state("running")
        opened.sees("#starts tr", "start 2.*still running")
        until(lambda: n_done() > before + 10)
        until(lambda: opened.page.locator("#charts .pause").count() > 0)
        opened.sees("#count", r"^\d\d+ rows$")
        second.send_signal(signal.SIGINT)
        second.communicate()
        opened.state("stopped")
        opened.sees("#starts tr", "start 2.*interrupted")


def test_a_forecast_is_shown(visit: Open, tmp_path: Path) -> None:
    prepare(40)
    forecast = batchkit("plan", "job.toml", "--rows", "8", "--json").json
    with viewing("output/a", cwd=tmp_path) as view:
        opened = visit(f"{view.url}run/a")
        opened.state("stopped")
        shown = opened.page.locator("#forecast dd").inner_text()
        assert f"for {forecast['left']} rows" in shown
        assert f"prompt tokens: {forecast['prompt_tokens']['expected']:.0f};" in shown


def test_a_folder_that_is_gone_is_named_and_its_return_noticed(visit: Open, tmp_path: Path) -> None:
    prepare(5)
    batchkit("run", "job.toml")
    with viewing("output", cwd=tmp_path) as view:
        opened = visit(f"{view.url}run/a")
        opened.state("finished")
        Path("output").rename("elsewhere")
        opened.sees("#lost", "moved or deleted")
        Path("elsewhere").rename("output")
        opened.page.locator("#lost").wait_for(state="hidden")
        opened.state("finished")


def test_the_page_goes_on_when_its_server_is_back(visit: Open, tmp_path: Path) -> None:
    prepare(5)
    batchkit("run", "job.toml")
    with viewing("output/a", cwd=tmp_path) as view:
        opened = visit(f"{view.url}run/a")
        opened.state("finished")
    opened.sees("#lost", "does not answer")
    with viewing("output/a", cwd=tmp_path, port=view.client.base_url.port or 0):
        opened.page.locator("#lost").wait_for(state="hidden")
