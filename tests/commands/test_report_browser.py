"""The report in a real browser, opened from a file as a researcher would."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from batchkit.commands.report import write_comparison, write_report
from batchkit.runs.compare import compare
from batchkit.scoring.metrics import tabulate
from batchkit.storage.score_store import read_scored
from tests.support.browser import assert_fits, open_browser
from tests.support.made_runs import draw_tables, failure, make_run, rows

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

HOSTILE = (
    '<script>window.hacked=1</script><img src=x onerror="window.hacked=2"></script><!-- \u2028'
    " javascript:window.hacked=3\n[Final Answer]: <img src=x onerror='window.hacked=4'>"
)
N = 61
FAST_ENOUGH_S = 5.0
SMALL_ENOUGH = 40 * 2**20


class Opened(NamedTuple):
    """A page, and what went wrong or out while it was open."""

    page: Page
    complaints: list[str]
    requests: list[str]

    def ids(self) -> list[str]:
        """The rows of the list that are drawn, from the top."""
        return self.page.locator("#list .item .id").all_inner_texts()

    def count(self) -> str:
        return self.page.locator("#count").inner_text()

    def shown(self) -> str:
        return self.page.locator("#detail .detail-head strong").inner_text()

    def find(self, words: str) -> None:
        self.page.locator("#search").fill(words)
        self.page.keyboard.press("Enter")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Row 1 is hostile; 2 and 5 fail; 8 ended at max_tokens; 0, 10 … are wrong; 7 has no image."""
    place = tmp_path_factory.mktemp("report")
    draw_tables(place / "image", 4)
    table = rows(N, 4)
    table[7]["FileName"] = "gone"
    table[9]["FinalAnswer"] = ""

    def answer(index: int, row: Mapping[str, Any]) -> Any:
        text = f"Reading the table.\n[Final Answer]: {row['FinalAnswer']}"
        special: dict[int, Any] = {
            1: HOSTILE,
            2: failure("timeout"),
            5: failure("oom"),
            8: {"finish_reason": "length", "text": text, "scores": {"f1": 0.5, "em": 0.0}},
        }
        return special.get(index, "[Final Answer]: nothing" if index % 10 == 0 else text)

    return make_run(place, table, answer)


@pytest.fixture(scope="module")
def report(run: Path) -> Path:
    return write_report(run)


Open = Callable[..., Opened]


@pytest.fixture
def visit(browser: Browser) -> Iterator[Open]:
    """Opens pages, and holds at the end that none complained or asked for anything."""
    opened: list[Opened] = []

    def visit(path: Path, **options: Any) -> Opened:
        options = {"viewport": {"width": 1280, "height": 900}, **options}
        page = browser.new_context(**options).new_page()
        found = Opened(page, [], [])
        page.on("console", lambda message: found.complaints.append(message.text))
        page.on("pageerror", lambda error: found.complaints.append(str(error)))
        page.on("request", lambda request: found.requests.append(request.url))
        page.goto(path.as_uri())
        opened.append(found)
        return found

    yield visit
    for found in opened:
        outside = [url for url in found.requests if not url.startswith(("file:", "data:"))]
        files = [url for url in found.requests if url.startswith("file:")]
        found.page.context.close()
        assert not found.complaints
        assert not outside
        assert len({url.partition("#")[0] for url in files}) == 1, "only the page itself"


def test_score_table_says_what_the_json_says(run: Path, report: Path, visit: Open) -> None:
    page = visit(report).page
    table = tabulate(read_scored(run), "QuestionType").to_json()
    cells_by_label = {}
    for line in page.locator("table.scores tbody tr").all():
        label, *cells = [cell.inner_text().strip() for cell in line.locator("th, td").all()]
        cells_by_label[label] = cells
    wanted = {**table["metrics"], "all": table["overall"]}
    assert cells_by_label == {
        name: [
            str(group["n"]),
            *(f"{group[scorer]:.2f}" for scorer in ("f1", "em")),
            str(group["unscored"]),
            str(group["failed"]),
        ]
        for name, group in wanted.items()
    }
    assert table["failed"] == 3
    assert table["unscored"] == 1


def test_model_output_stays_text(report: Path, visit: Open) -> None:
    opened = visit(report)
    opened.find("window.hacked")
    assert opened.ids() == ["q1"]
    detail = opened.page.locator("#detail")
    # A paragraph separator apart, which inner_text gives as a newline.
    assert "<script>window.hacked=1</script><img src=x" in detail.inner_text()
    assert detail.locator("script").count() == 0
    assert opened.page.locator("img[src='x']").count() == 0
    assert opened.page.evaluate("window.hacked") is None


def test_filter_by_type_outcome_and_score(report: Path, visit: Open) -> None:
    opened = visit(report)
    page = opened.page
    assert opened.count() == f"{N} rows"
    page.locator("#group").select_option("Fact Checking")
    assert opened.ids()[:3] == ["q1", "q4", "q7"]
    assert opened.count() == f"20 of {N} rows"
    page.get_by_role("button", name="Clear").click()
    for outcome, ids in (
        ("kind:timeout", ["q2"]),
        ("failed", ["q2", "q5", "q7"]),
        ("unscored", ["q9"]),
        ("cut", ["q8"]),
    ):
        page.locator("#outcome").select_option(outcome)
        assert opened.ids() == ids
    page.get_by_role("button", name="Clear").click()
    page.locator("#scorer").select_option("em")
    page.locator("#high").fill("0")
    assert opened.ids() == ["q0", "q1", "q8", "q10", "q20", "q30", "q40", "q50", "q60"]
    page.locator("#scorer").select_option("f1")
    page.locator("#low").fill("50")
    page.locator("#high").fill("50")
    assert opened.ids() == ["q8"]


def test_search_looks_into_question_answer_and_id(report: Path, visit: Open) -> None:
    opened = visit(report)
    opened.find("CELL 17 ")
    assert opened.ids() == ["q17"]
    opened.find("it was oom")
    assert opened.ids() == ["q5"]
    opened.find("no such words anywhere")
    assert opened.ids() == []
    assert "No row passes" in opened.page.locator("#list").inner_text()


def test_order_by_score_puts_unscored_rows_last(report: Path, visit: Open) -> None:
    opened = visit(report)
    opened.page.locator("#order").select_option("up:f1")
    assert opened.ids()[:3] == ["q0", "q1", "q10"]
    opened.page.locator("#order").select_option("down:f1")
    assert opened.ids()[:3] == ["q3", "q4", "q6"]
    opened.page.locator("#list").focus()
    opened.page.keyboard.press("End")
    assert opened.shown() in ("q2", "q5", "q7", "q9")


def test_keys(report: Path, visit: Open) -> None:
    opened = visit(report)
    keyboard = opened.page.keyboard
    assert opened.shown() == "q0"
    for key, row in (("j", "q1"), ("j", "q2"), ("k", "q1")):
        keyboard.press(key)
        assert opened.shown() == row
    opened.page.locator("#list").focus()
    keyboard.press("End")
    assert opened.shown() == f"q{N - 1}"
    selected = opened.page.locator("#list [aria-selected=true]")
    assert selected.get_attribute("aria-posinset") == str(N)
    keyboard.press("ArrowUp")
    assert opened.shown() == f"q{N - 2}"
    keyboard.press("/")
    assert opened.page.evaluate("document.activeElement.id") == "search"
    keyboard.type("cell q12 ")  # not 12: the temporary folder in row 7's message may have it
    keyboard.press("ArrowDown")
    assert opened.ids() == ["q12"]
    keyboard.press("Escape")
    assert opened.count() == f"{N} rows"
    keyboard.press("?")
    assert opened.page.locator("#keys").is_visible()
    keyboard.press("Escape")
    assert not opened.page.locator("#keys").is_visible()
    keyboard.press("i")
    assert opened.page.locator("#lightbox img").is_visible()


def test_number_in_the_table_shows_its_rows(report: Path, visit: Open) -> None:
    opened = visit(report)
    opened.page.locator("[data-scorer=em][data-group='Data Analysis']").click()
    assert opened.ids()[:2] == ["q0", "q30"]
    assert opened.page.locator("#group").input_value() == "Data Analysis"
    opened.page.locator("[data-outcome='kind:oom']").click()
    assert opened.ids() == ["q5"]


def test_reload_keeps_filters_and_row(report: Path, visit: Open) -> None:
    opened = visit(report)
    opened.page.locator("#group").select_option("Fact Checking")
    opened.page.keyboard.press("j")
    opened.page.keyboard.press("j")
    opened.page.reload()
    assert opened.page.locator("#group").input_value() == "Fact Checking"
    assert opened.shown() == "q7"


def test_image_is_shown_and_a_missing_one_is_named(report: Path, visit: Open) -> None:
    opened = visit(report)
    image = opened.page.locator("#detail .pictures img")
    image.wait_for()
    assert image.evaluate("image => image.complete && image.naturalWidth") > 300
    opened.find("cell 7 ")
    assert "gone.png" in opened.page.locator("#detail .error").inner_text()
    assert opened.page.locator("#detail .pictures").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1440, 380])
def test_page_fits_its_window_in_both_schemes(
    report: Path, visit: Open, scheme: str, width: int
) -> None:
    opened = visit(report, viewport={"width": width, "height": 800}, color_scheme=scheme)
    assert_fits(opened.page, width=width, scheme=scheme)


def top_of(page: Page, selector: str) -> float:
    box = page.locator(selector).bounding_box()
    assert box is not None
    return box["y"]


def test_in_a_narrow_window_the_rows_come_before_the_charts(report: Path, visit: Open) -> None:
    narrow = visit(report, viewport={"width": 400, "height": 800}).page
    tops = [top_of(narrow, part) for part in ("h1", ".scores", "#rows", ".charts", ".about")]
    assert tops == sorted(tops)
    wide = visit(report, viewport={"width": 1200, "height": 800}).page
    assert top_of(wide, ".charts") < top_of(wide, "#rows")


def test_a_comparison_shows_its_difference_first_and_keeps_the_names_in_sight(
    run: Path, visit: Open, tmp_path: Path
) -> None:
    path = write_comparison(compare([run, run]), tmp_path / "compare.html")
    page = visit(path, viewport={"width": 400, "height": 800}).page
    delta, name = page.locator("td.delta").first, page.locator("tbody th").first
    assert inside(delta, 400)
    page.locator(".wide").first.evaluate("element => element.scrollLeft = 200")
    assert inside(name, 400)
    assert not inside(delta, 400)


def inside(element: Locator, width: int) -> bool:
    box = element.bounding_box()
    assert box is not None
    return box["x"] >= 0 and box["x"] + box["width"] <= width


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_score_bars_can_be_seen(report: Path, visit: Open, scheme: str) -> None:
    page = visit(report, color_scheme=scheme).page
    meter = page.locator(".scores .meter").first
    box = meter.bounding_box()
    assert box is not None
    assert box["height"] >= 8
    track, fill = (
        colour(meter.locator(part).evaluate("rect => getComputedStyle(rect).fill"))
        for part in (".track", ".fill")
    )
    assert abs(sum(track) - sum(fill)) > 150


def colour(text: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", text)[:3]]


def test_everything_to_use_has_a_name(report: Path, visit: Open) -> None:
    page = visit(report).page
    nameless = page.evaluate(
        """() => [...document.querySelectorAll("button, input, select, [role=listbox], svg[role]")]
        .filter((e) => !(e.ariaLabel || e.labels?.length || e.textContent.trim()))
        .map((e) => e.outerHTML.slice(0, 100))"""
    )
    assert nameless == []


def test_whole_benchmark_opens_at_once(visit: Open, tmp_path: Path) -> None:
    """3,071 rows over 60 images, with answers as long as a model's."""
    draw_tables(tmp_path / "image", 60, (540, 360))
    reasoning = "Step: read the header, find the row, add the cells.\n" * 40
    run = make_run(
        tmp_path, rows(3071, 60), lambda _, row: f"{reasoning}[Final Answer]: {row['FinalAnswer']}"
    )
    path = write_report(run)
    assert path.stat().st_size < SMALL_ENOUGH
    started = time.perf_counter()
    opened = visit(path)
    opened.page.locator("#list .item").first.wait_for()
    assert opened.count() == "3,071 rows"
    loaded = time.perf_counter()
    assert loaded - started < FAST_ENOUGH_S
    opened.find("cell 3070 ")
    assert opened.ids() == ["q3070"]
    opened.page.keyboard.press("Escape")
    opened.page.keyboard.press("End")
    assert opened.shown() == "q3070"
    assert len(opened.ids()) < 60, "only what is seen is in the page"
    assert time.perf_counter() - loaded < FAST_ENOUGH_S
    size_mb = path.stat().st_size / 1e6
    print(json.dumps({"rows": 3071, "mb": round(size_mb, 1), "load_s": round(loaded - started, 2)}))
