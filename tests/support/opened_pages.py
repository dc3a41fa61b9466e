"""Pages in a browser, and what a test looks for on them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.support.waiting import until

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


class Opened(NamedTuple):
    """A page, and what went wrong or out while it was open."""

    page: Page
    complaints: list[str]
    requests: list[str]

    def ids(self) -> list[str]:
        """The rows of the list, from the top."""
        return self.page.locator("#list .item .id").all_inner_texts()

    def lists(self, *ids: str) -> None:
        """Waits until the list begins with these rows."""
        until(lambda: self.ids()[: len(ids)] == [*ids])

    def sees(self, selector: str, text: str = "") -> None:
        """Waits until the first such element has the text."""
        self.page.locator(selector).filter(has_text=re.compile(text)).first.wait_for()

    def shows(self, row: str) -> None:
        """Waits until this row is open."""
        self.page.locator("#detail > .detail-head strong").get_by_text(row, exact=True).wait_for()

    def state(self, name: str) -> None:
        self.sees("#subtitle .state", f"^{name}$")

    def set(self, **controls: str) -> None:
        """Sets these filters after clearing all."""
        self.page.get_by_role("button", name="Clear").click()
        for name, value in controls.items():
            control = self.page.locator(f"#{name}")
            if name in ("search", "low", "high"):
                control.fill(value)
            else:
                control.select_option(value)

    def facts(self) -> dict[str, str]:
        found = self.page.locator("#facts > div").evaluate_all(
            "all => all.map(one => [one.querySelector('dt').textContent,"
            " one.querySelector('dd').firstChild.textContent])"
        )
        return dict(found)


Open = Callable[..., Opened]


@contextmanager
def visits(browser: Browser) -> Iterator[Open]:
    """Opens pages, and holds at the end that none complained or asked for anything but its own server
    or its own file."""
    opened: list[Opened] = []

    def visit(url: str, **options: Any) -> Opened:
        options = {"viewport": {"width": 1280, "height": 900}, **options}
        page = browser.new_context(**options).new_page()
        page.set_default_timeout(60_000)  # a busy machine
        found = Opened(page, [], [])
        page.on("console", lambda message: found.complaints.append(message.text))
        page.on("pageerror", lambda error: found.complaints.append(str(error)))
        page.on("request", lambda request: found.requests.append(request.url))
        page.goto(url)
        opened.append(found)
        return found

    yield visit
    for found in opened:
        url = found.page.url.partition("#")[0]
        own = url if url.startswith("file:") else "/".join(url.split("/")[:3])
        elsewhere = [one for one in found.requests if not one.startswith((own, "data:"))]
        found.page.context.close()
        assert not [text for text in found.complaints if "Failed to load resource" not in text]
        assert not elsewhere
