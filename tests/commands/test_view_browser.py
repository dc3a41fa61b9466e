"""The view's pages in a real browser, over a real server."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from batchkit.storage.manifest import Manifest
from tests.support.browser import assert_fits, open_browser
from tests.support.command_line import batchkit
from tests.support.dry_runs import LOG, prepare
from tests.support.made_runs import draw_tables, failure, make_run, rows
from tests.support.own_process import begin
from tests.support.view_server import Viewed, viewing
from tests.support.waiting import until

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

HOSTILE = (
    '<script>window.hacked=1</script><img src=x onerror="window.hacked=2"></script><!-- \u2028'
    " javascript:window.hacked=3\n[Final Answer]: <img src=x onerror='window.hacked=4'>"
)
RESTART = "engine died (oom) with 3 rows in flight: <b>planted</b>"
N = 121
PAGE = 50
SLOW = {"engine": {"options": {"latency_s": 0.1}}, "run": {"max_in_flight": 4}}  # 40 rows a second


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

    def sees(self, selector: str, text: str) -> None:
        """Waits until the first such element has the text."""
        self.page.locator(selector).filter(has_text=re.compile(text)).first.wait_for()

    def shows(self, row: str) -> None:
        """Waits until this row is open."""
        self.page.locator("#detail .detail-head strong").get_by_text(row, exact=True).wait_for()

    def state(self, name: str) -> None:
        self.sees("#subtitle .state", f"^{name}$")

    def facts(self) -> dict[str, str]:
        found = self.page.locator("#facts > div").evaluate_all(
            "all => all.map(one => [one.querySelector('dt').textContent,"
            " one.querySelector('dd').firstChild.textContent])"
        )
        return dict(found)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs over the same rows. In ``tables`` row 1 is hostile; 2 and 5 fail; 7 has no image;
    0, 10 … are wrong; its engine was restarted. In ``better`` these are right, and row 3 fails."""
    place = tmp_path_factory.mktemp("view")
    draw_tables(place / "image", 4)
    table = rows(N, 4)
    table[7]["FileName"] = "gone"

    def answer(index: int, row: Mapping[str, Any]) -> Any:
        text = f"Reading the table.\n[Final Answer]: {row['FinalAnswer']}"
        special: dict[int, Any] = {1: HOSTILE, 2: failure("timeout"), 5: failure("oom")}
        return special.get(index, "[Final Answer]: nothing" if index % 10 == 0 else text)

    def better(index: int, row: Mapping[str, Any]) -> Any:
        text = f"Reading the table.\n[Final Answer]: {row['FinalAnswer']}"
        return failure("server") if index == 3 else text

    _note_restart(make_run(place, table, answer, **SLOW))
    make_run(place, table, better, name="better")
    return place / "output"


def _note_restart(run: Path) -> None:
    path = run / "manifest.json"
    manifest = Manifest.model_validate_json(path.read_bytes())
    manifest.last_start.note_event(RESTART)
    path.write_text(manifest.model_dump_json(), encoding="utf-8")


@pytest.fixture(scope="module")
def server(output: Path) -> Iterator[Viewed]:
    with viewing("output", cwd=output.parent) as view:
        yield view


Open = Callable[..., Opened]


@pytest.fixture
def visit(browser: Browser) -> Iterator[Open]:
    """Opens pages, and holds at the end that none complained or asked another server."""
    opened: list[Opened] = []

    def visit(view: Viewed, path: str = "run/tables", **options: Any) -> Opened:
        options = {"viewport": {"width": 1280, "height": 900}, **options}
        page = browser.new_context(**options).new_page()
        page.set_default_timeout(60_000)  # a busy machine
        found = Opened(page, [], [])
        page.on("console", lambda message: found.complaints.append(message.text))
        page.on("pageerror", lambda error: found.complaints.append(str(error)))
        page.on("request", lambda request: found.requests.append(request.url))
        page.goto(f"{view.url}{path}")
        opened.append(found)
        return found

    yield visit
    for found in opened:
        own = found.page.url.partition("/")[2].partition("/")[2].partition("/")[0]
        elsewhere = [url for url in found.requests if f"//{own}/" not in url]
        found.page.context.close()
        assert not [text for text in found.complaints if "Failed to load resource" not in text]
        assert not [url for url in elsewhere if not url.startswith("data:")]


def test_the_list_leads_to_a_run(server: Viewed, visit: Open) -> None:
    opened = visit(server, "")
    opened.sees("#count", "^2 runs$")
    opened.sees("#runs tbody tr", f"^tables.*finished.*{N}")
    opened.page.locator("#search").fill("tab")
    opened.sees("#count", "^1 of 2 runs$")
    opened.page.keyboard.press("Enter")
    opened.page.keyboard.press("j")
    opened.page.keyboard.press("Enter")
    opened.page.wait_for_url("**/run/tables*")
    opened.sees("h1", "^tables$")


def test_a_run_shows_what_status_says(server: Viewed, visit: Open) -> None:
    opened = visit(server)
    opened.state("finished")
    status = server.get("runs/tables")
    facts = opened.facts()
    assert facts["rows"] == str(status["ok"] + status["failed"]) == str(N)
    assert (facts["answered"], facts["failed"]) == (str(status["ok"]), "3")
    assert opened.page.locator("#progress").get_attribute("aria-valuenow") == "100"
    opened.sees("#starts tr", "start 1.*ended, some rows failed")


def test_rows_by_page_and_the_address_keeps_them(server: Viewed, visit: Open) -> None:
    opened = visit(server)
    opened.shows("q0")
    assert opened.ids() == [f"q{n}" for n in range(PAGE)]
    opened.page.get_by_role("button", name="Next page").click()
    opened.shows("q50")
    opened.page.keyboard.press("n")
    opened.shows("q100")
    assert opened.ids() == [f"q{n}" for n in range(100, N)]
    assert opened.page.get_by_role("button", name="Next page").is_disabled()
    opened.page.keyboard.press("j")
    opened.shows("q101")
    opened.page.reload()
    opened.shows("q101")
    assert opened.ids()[0] == "q100"
    opened.page.keyboard.press("p")
    opened.shows("q50")
    opened.page.keyboard.press("k")  # over the edge of the page
    opened.shows("q49")
    for _ in range(5):
        opened.page.keyboard.press("j")  # faster than the next page comes
    opened.lists("q50")
    assert opened.page.locator("#list [aria-selected=true]").count() == 1


def test_keys(server: Viewed, visit: Open) -> None:
    opened = visit(server)
    keyboard, focused = opened.page.keyboard, "document.activeElement.id"
    opened.shows("q0")
    for key, row in (("j", "q1"), ("j", "q2"), ("k", "q1")):
        keyboard.press(key)
        opened.shows(row)
    opened.page.locator("#list").focus()
    keyboard.press("End")
    opened.shows("q49")
    selected = opened.page.locator("#list [aria-selected=true]")
    assert selected.get_attribute("aria-posinset") == str(PAGE)
    keyboard.press("ArrowDown")
    opened.shows("q50")
    keyboard.press("Enter")
    assert opened.page.evaluate(focused) == "detail"
    keyboard.press("Escape")
    assert opened.page.evaluate(focused) == "list"
    keyboard.press("/")
    assert opened.page.evaluate(focused) == "search"
    keyboard.type("nothing like this")
    opened.sees("#list", "No row passes these filters")
    keyboard.press("Escape")
    assert opened.page.evaluate(focused) == "list"
    keyboard.press("Escape")
    opened.shows("q0")
    keyboard.press("?")
    assert opened.page.locator("#keys").is_visible()
    keyboard.press("Escape")
    assert not opened.page.locator("#keys").is_visible()
    opened.page.locator("#detail .pictures img").wait_for()
    keyboard.press("i")
    assert opened.page.locator("#lightbox img").is_visible()


def test_filters_and_order_are_in_the_address(server: Viewed, visit: Open) -> None:
    opened = visit(server)
    page = opened.page
    opened.shows("q0")
    page.locator("#group").select_option("Fact Checking")
    opened.sees("#count", f"^40 of {N} rows$")
    opened.lists("q1", "q4", "q7")
    page.get_by_role("button", name="Clear").click()
    opened.sees("#count", f"^{N} rows$")
    for outcome, ids in (("kind:timeout", ["q2"]), ("failed", ["q2", "q5", "q7"])):
        page.locator("#outcome").select_option(outcome)
        opened.sees("#count", f"^{len(ids)} of")
        opened.lists(*ids)
    page.reload()
    opened.shows("q2")
    assert page.locator("#outcome").input_value() == "failed"
    page.get_by_role("button", name="Clear").click()
    opened.sees("#count", f"^{N} rows$")
    page.locator("#scorer").select_option("em")
    page.locator("#high").fill("0")
    opened.sees("#count", f"^14 of {N} rows$")
    opened.lists("q0", "q1", "q10", "q20")
    page.locator("#high").fill("")
    page.locator("#order").select_option("score:asc")
    opened.sees("#count", f"^{N} rows$")
    opened.lists("q0", "q1", "q10", "q20", "q30")
    page.locator("#search").fill("value 3")
    page.locator("#order").select_option("index:desc")
    opened.sees("#count", f"^17 of {N} rows$")
    opened.lists("q115", "q108")
    opened.shows("q115")


def test_a_failure_s_kind_leads_to_its_rows(server: Viewed, visit: Open) -> None:
    opened = visit(server)
    opened.sees("#failure-list li", "oom.*it was oom")
    opened.page.locator("#failure-list button").filter(has_text="oom").click()
    opened.shows("q5")
    assert opened.ids() == ["q5"]
    assert "it was oom" in opened.page.locator("#detail .error").inner_text()


def test_a_row_with_prompt_image_reference_and_scores(server: Viewed, visit: Open) -> None:
    opened = visit(server)
    opened.shows("q0")
    image = opened.page.locator("#detail .pictures img")
    image.wait_for()
    until(lambda: image.evaluate("image => image.complete && image.naturalWidth") > 300)
    detail = opened.page.locator("#detail").inner_text()
    for part in ("What is cell 0 of the table?", "value 0", "nothing", "Answer", "F1", "EM"):
        assert part in detail
    opened.page.locator("#detail summary").filter(has_text="Earlier records").click()
    opened.sees("#detail details[open]", "attempt 1, ok")


def test_charts_show_what_is_under_the_pointer_and_what_happened_to_the_engine(
    server: Viewed, visit: Open
) -> None:
    opened = visit(server)
    charts = opened.page.locator("#charts figure")
    charts.first.wait_for()
    titles = charts.locator("h3").all_inner_texts()
    assert {"Throughput", "Tokens read", "Requests", "Memory"} <= {*titles}
    opened.sees("#events li", f"start 1, .*{re.escape(RESTART)}")
    mark = charts.first.locator(".event")
    box, plot = mark.bounding_box(), charts.first.locator(".plot").bounding_box()
    assert box is not None
    assert plot is not None
    y = plot["y"] + plot["height"] / 2
    opened.page.mouse.move(box["x"], y)
    opened.sees("#charts figcaption p", re.escape(RESTART))
    assert charts.first.locator(".plot").get_attribute("title") == RESTART
    opened.page.mouse.move(plot["x"] + 3, y)
    opened.sees("#charts figcaption p", "after ")
    opened.page.mouse.move(0, 0)
    opened.sees("#charts figcaption p", "at most$")


def test_an_image_that_is_not_there_is_named(server: Viewed, visit: Open) -> None:
    opened = visit(server, "run/tables?row=7")
    opened.shows("q7")
    opened.sees("#detail .missing", "gone.png")
    assert opened.page.locator("#detail .pictures img").count() == 0


def test_model_output_stays_text(server: Viewed, visit: Open) -> None:
    opened = visit(server, "run/tables?row=1")
    opened.shows("q1")
    for part in ("#detail", "#list"):
        place = opened.page.locator(part)
        assert "<script>window.hacked=1</script><img src=x" in place.inner_text()
        assert place.locator("script").count() == 0
    opened.page.goto(f"{server.url}compare?a=tables&b=better")
    opened.sees(".two", "window.hacked=1")
    assert opened.page.locator("img[src='x']").count() == 0
    assert opened.page.evaluate("window.hacked") is None


def test_two_runs_side_by_side(server: Viewed, visit: Open) -> None:
    opened = visit(server)
    opened.state("finished")
    opened.page.locator("#other").select_option("better")
    opened.page.wait_for_url("**/compare?a=tables&b=better*")
    opened.sees("h1", "^better against tables$")
    opened.page.locator("#only").select_option("broken")
    opened.sees(".two .error", "it was server")
    heads = opened.page.locator(".two > header strong")
    until(lambda: heads.all_inner_texts() == ["q3"])
    opened.page.locator("#only").select_option("fixed")
    opened.sees(".two", "it was timeout")
    opened.page.locator(".two h3 a").first.click()
    opened.page.wait_for_url("**/run/tables?row=*")


PATHS = ("", "run/tables?row=1", "compare?a=tables&b=better")


@pytest.mark.parametrize("path", PATHS, ids=["runs", "run", "compare"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1440, 400])
def test_pages_fit_their_window_in_both_schemes(
    server: Viewed, visit: Open, scheme: str, width: int, path: str
) -> None:
    opened = visit(server, path, viewport={"width": width, "height": 800}, color_scheme=scheme)
    opened.sees("#runs tbody tr, #detail .full, .two", "")
    assert_fits(opened.page, width=width, scheme=scheme)


@pytest.mark.parametrize("path", PATHS, ids=["runs", "run", "compare"])
def test_everything_to_use_has_a_name(server: Viewed, visit: Open, path: str) -> None:
    opened = visit(server, path)
    opened.sees("#runs tbody tr, #detail .full, .two", "")
    nameless = opened.page.evaluate(
        """() => [...document.querySelectorAll(
            "a, button, input, select, [role=listbox], [role=progressbar], svg[role]")]
        .filter((e) => !(e.ariaLabel || e.labels?.length || e.textContent.trim()))
        .map((e) => e.outerHTML.slice(0, 100))"""
    )
    assert nameless == []


def test_a_run_is_killed_and_resumed_while_its_page_is_open(
    visit: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    prepare(100_000, **SLOW)
    first = begin("run", "job.toml", cwd=tmp_path)
    until(LOG.exists)
    with viewing("output", cwd=tmp_path) as view:
        opened = visit(view, "run/a")
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


def test_steps_stand_one_under_the_other(
    visit: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    prepare(3)
    draft, revise = "draft {{ q }}", "revise {{ steps.draft.text }}"
    Path("job.toml").write_text(
        'name = "a"\ninput.path = "in.jsonl"\nengine.kind = "dry-run"\n'
        f'[[steps]]\nname = "draft"\nprompt.user = "{draft}"\n'
        f'[[steps]]\nname = "revise"\nprompt.user = "{revise}"\n'
    )
    with begin("run", "job.toml", cwd=tmp_path) as run:
        run.communicate()
    with viewing("output/a", cwd=tmp_path) as view:
        opened = visit(view, "run/a?row=1")
        opened.shows("1")
        titles = opened.page.locator("#detail h3").all_inner_texts()
    assert [title.partition(",")[0] for title in titles] == [
        *("Prompt: user", "Answer", "Step draft", "Step revise")
    ]


def test_a_forecast_is_shown(visit: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    prepare(40)
    forecast = batchkit("plan", "job.toml", "--rows", "8", "--json").json
    with viewing("output/a", cwd=tmp_path) as view:
        opened = visit(view, "run/a")
        opened.state("stopped")
        shown = opened.page.locator("#forecast dd").inner_text()
        assert f"for {forecast['left']} rows" in shown
        assert f"prompt tokens: {forecast['prompt_tokens']['expected']:.0f};" in shown


def test_a_folder_that_is_gone_is_named_and_its_return_noticed(
    visit: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    prepare(5)
    with begin("run", "job.toml", cwd=tmp_path) as run:
        run.communicate()
    with viewing("output", cwd=tmp_path) as view:
        opened = visit(view, "run/a")
        opened.state("finished")
        Path("output").rename("elsewhere")
        opened.sees("#lost", "moved or deleted")
        Path("elsewhere").rename("output")
        opened.page.locator("#lost").wait_for(state="hidden")
        opened.state("finished")


def test_the_page_goes_on_when_its_server_is_back(
    visit: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    prepare(5)
    with begin("run", "job.toml", cwd=tmp_path) as run:
        run.communicate()
    with viewing("output/a", cwd=tmp_path) as view:
        opened = visit(view, "run/a")
        opened.state("finished")
    opened.sees("#lost", "does not answer")
    with viewing("output/a", cwd=tmp_path, port=view.client.base_url.port or 0):
        opened.page.locator("#lost").wait_for(state="hidden")
