"""The page of a run in a real browser: on a server, and as the file that ``report`` writes."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from batchkit.commands.report import report, write_comparison
from batchkit.runs.compare import compare
from batchkit.runs.scores import table_of
from tests.support.browser import Open, Opened, assert_fits
from tests.support.command_line import batchkit
from tests.support.dry_runs import LOG, prepare, write_job, write_rows
from tests.support.made_runs import TABLE, N, failure, golden_run, make_run
from tests.support.own_process import begin
from tests.support.view_server import Viewed, viewing
from tests.support.waiting import until

pytestmark = [pytest.mark.browser, pytest.mark.release]

RESTART = "engine died (oom) with 3 rows in flight: <b>planted</b>"
PAGE = 50
SLOW = {"engine": {"options": {"latency_s": 0.1}}, "run": {"max_in_flight": 4}}  # 40 rows a second


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs over the same rows: the golden one, whose engine was restarted, in ``tables``; in ``better`` all
    are right, and row 3 fails. ``report.html`` and ``compare.html`` are beside them."""
    place = tmp_path_factory.mktemp("view")

    def better(index: int, row: Mapping[str, Any]) -> Any:
        text = f"Reading the table.\n[Final Answer]: {row['FinalAnswer']}"
        return failure("server") if index == 3 else text

    run = golden_run(place, **SLOW)
    _note_restart(run)
    other = make_run(place, TABLE, better, name="better", budget={"max_completion_tokens": 10**6})
    report(run, place / "report.html")
    write_comparison(compare([run, other]), place / "compare.html")
    return place / "output"


def _note_restart(run: Path) -> None:
    event = {"events": [[RESTART, "2026-11-21T01:02:03.456Z"]]}
    with (run / "starts.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(event) + "\n")


@pytest.fixture(scope="module")
def server(output: Path) -> Iterator[Viewed]:
    with viewing("output", cwd=output.parent) as view:
        yield view


@pytest.fixture(scope="module")
def places(output: Path, server: Viewed) -> Mapping[str, str]:
    """Addresses by name."""
    files = {name: (output.parent / f"{name}.html").as_uri() for name in ("report", "compare")}
    return {
        "file": files["report"],
        "comparison": files["compare"],
        "server": f"{server.url}run/tables",
        "runs": server.url,
        "two runs": f"{server.url}compare?a=tables&b=better",
    }


@pytest.fixture(params=["server", "file"])
def opened(request: pytest.FixtureRequest, visit: Open, places: Mapping[str, str]) -> Opened:
    """The page of ``tables`` in each form."""
    found = visit(places[request.param])
    found.shows("q0")
    return found


# ---- in both forms


def test_numbers_at_the_top(opened: Opened, output: Path) -> None:
    status = batchkit("status", output / "tables", "--json").json
    facts = opened.facts()
    opened.state("finished")
    assert facts["rows"] == str(status["ok"] + status["failed"]) == str(N)
    assert (facts["answered"], facts["failed"], facts["unscored"]) == (str(status["ok"]), "3", "1")
    assert opened.page.locator("#progress").get_attribute("aria-valuenow") == "100"
    opened.sees("#starts tr", "start 1.*ended, some rows failed")
    opened.sees("#facts", r"in \d+(\.\d+)? s|in \d+ min")
    opened.sees("#notes li", r"^1 answers \(0.8 %\) ended at max_tokens")
    opened.sees("#origin div", "Sampling.*max_tokens 256")
    assert sections(opened) == ["scores", "failures", "rows", "charts", "engine"]
    opened.page.locator("#job-of > summary").click()
    opened.sees("#prompt div", r"prompt\.userLook\.\s+\{\{ Question \}\}")
    opened.page.locator("#job-of summary").last.click()
    opened.sees("#job", 'name = "tables"')


def sections(opened: Opened) -> list[str]:
    """What is seen of a run, from the top."""
    ids = opened.page.locator("main > section:visible").evaluate_all("all => all.map(e => e.id)")
    return [name.removesuffix("-section") for name in ids if name]


def test_score_table_says_what_the_json_says(opened: Opened, output: Path) -> None:
    table = table_of(output / "tables").to_json()
    found = {}
    for line in opened.page.locator("#scores-table tbody tr").all():
        label, *cells = [cell.inner_text().strip() for cell in line.locator("th, td").all()]
        found[label] = cells
    assert found == {
        name: [
            str(group["n"]),
            *(f"{group[scorer]:.2f}" for scorer in ("f1", "em")),
            *(str(group[count]) for count in ("unscored", "failed")),
        ]
        for name, group in {**table["metrics"], "all": table["overall"]}.items()
    }
    assert (table["failed"], table["unscored"]) == (3, 1)


def test_rows_by_page_and_the_address_keeps_them(opened: Opened) -> None:
    page = opened.page
    assert opened.ids() == [f"q{n}" for n in range(PAGE)]
    page.get_by_role("button", name="Next page").click()
    opened.shows("q50")
    page.keyboard.press("n")
    opened.shows("q100")
    assert opened.ids() == [f"q{n}" for n in range(100, N)]
    assert page.get_by_role("button", name="Next page").is_disabled()
    page.keyboard.press("j")
    opened.shows("q101")
    page.reload()
    opened.shows("q101")
    assert opened.ids()[0] == "q100"
    page.keyboard.press("p")
    opened.shows("q50")
    page.keyboard.press("k")  # over the edge of the page
    opened.shows("q49")
    for _ in range(5):
        page.keyboard.press("j")  # faster than the next page comes
    opened.lists("q50")
    assert page.locator("#list [aria-selected=true]").count() == 1


def test_keys(opened: Opened) -> None:
    keyboard, focused = opened.page.keyboard, "document.activeElement.id"
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
    opened.sees("#keys", "next, previous row")
    keyboard.press("Escape")
    assert not opened.page.locator("#keys").is_visible()
    opened.page.locator("#detail .pictures img").wait_for()
    keyboard.press("i")
    assert opened.page.locator("#lightbox img").is_visible()


WRONG = ["q0", "q1", "q8", "q10", "q20", "q30", "q40", "q50", "q60", "q70", "q80"]
FILTERS: tuple[tuple[dict[str, str], int, list[str]], ...] = (
    ({}, N, ["q0", "q1"]),  # tests/page and test_view_rows.py have each filter and order
    ({"group": "Fact Checking"}, 40, ["q1", "q4", "q7"]),
    ({"outcome": "kind:timeout"}, 1, ["q2"]),
    ({"scorer": "em", "high": "0"}, 15, WRONG),
    ({"search": "value 3", "order": "index:desc"}, 17, ["q115", "q108"]),
    ({"scorer": "f1", "order": "score:desc"}, N, ["q3", "q4", "q6"]),
)


def test_filters_and_orders(opened: Opened) -> None:
    for controls, total, ids in FILTERS:
        opened.set(**controls)
        opened.sees("#count", f"^{N} rows$" if total == N else f"^{total} of {N} rows$")
        opened.lists(*ids)
    opened.set(outcome="failed")
    opened.lists("q2", "q5", "q7")
    opened.page.reload()
    opened.shows("q2")
    assert opened.page.locator("#outcome").input_value() == "failed"


def test_a_number_leads_to_its_rows(opened: Opened) -> None:
    opened.page.locator("[data-scorer=em][data-group='Data Analysis']").click()
    opened.lists("q0", "q30")
    assert opened.page.locator("#group").input_value() == "Data Analysis"
    opened.page.locator("#scores-table [data-outcome=unscored]").last.click()
    opened.lists("q9")
    opened.sees("#failure-list li", "oom.*it was oom")
    opened.page.locator("#failure-list button").filter(has_text="oom").click()
    opened.shows("q5")
    assert opened.ids() == ["q5"]
    assert "it was oom" in opened.page.locator("#detail .error").inner_text()


def test_a_row_with_prompt_image_reference_and_scores(opened: Opened) -> None:
    image = opened.page.locator("#detail .pictures img")
    until(lambda: image.evaluate("image => image.complete && image.naturalWidth") > 300)
    detail = opened.page.locator("#detail").inner_text()
    for part in ("What is cell 0 of the table?", "value 0", "nothing", "Answer", "F1", "EM"):
        assert part in detail
    opened.page.locator("#detail summary").filter(has_text="Fields").click()
    opened.sees("#detail .fields div", "QuestionType.*Data Analysis")
    opened.sees("#list .what", "What is cell 0 of the table")
    thumbnail = opened.page.locator("#list .item img").first
    until(lambda: thumbnail.evaluate("image => image.complete && image.naturalWidth") > 100)


def test_an_image_that_is_not_there_is_named(opened: Opened) -> None:
    opened.set(outcome="kind:media")
    opened.shows("q7")
    opened.sees("#detail .missing", "gone.png")
    assert opened.page.locator("#detail .pictures img").count() == 0


def test_model_output_stays_text(opened: Opened) -> None:
    opened.set(search="window.hacked")
    opened.shows("q1")
    assert opened.ids() == ["q1"]
    assert (
        "<script>window.hacked=1</script><img src=x" in opened.page.locator("#detail").inner_text()
    )
    for part in ("#detail", "#list"):
        assert opened.page.locator(f"{part} script").count() == 0
    assert opened.page.locator("img[src='x']").count() == 0
    assert opened.page.evaluate("window.hacked") is None


def test_charts_show_what_is_under_the_pointer_and_what_happened_to_the_engine(
    opened: Opened,
) -> None:
    charts = opened.page.locator("#charts figure")
    charts.first.wait_for()
    titles = charts.locator("h3").all_inner_texts()
    assert {"Throughput", "Tokens read", "Requests", "Memory"} <= {*titles}
    assert opened.page.locator("#spreads h3").all_inner_texts() == [
        *("Latency", "Prompt tokens", "Completion tokens")
    ]
    opened.sees("#events li", f"start 1, .*{re.escape(RESTART)}")
    charts.first.scroll_into_view_if_needed()
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
    assert charts.first.locator(".loading").count() == 1


@pytest.mark.parametrize("form", ["server", "file"])
def test_steps_are_one_under_the_other(
    visit: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_rows(3)
    steps: list[dict[str, Any]] = [
        {"name": "draft", "prompt": {"user": "draft {{ q }}"}},
        {"name": "revise", "prompt": {"user": "revise {{ steps.draft.text }}"}},
        {"name": "never", "prompt": {"user": "?"}, "when": "{{ false }}"},
    ]
    write_job(prompt=None, steps=steps)
    assert batchkit("run", "job.toml").exit_code == 0
    with viewing("output/a", cwd=tmp_path) as view:
        file = report(tmp_path / "output/a").path.as_uri()
        opened = visit(file if form == "file" else f"{view.url}run/a")
        opened.shows("0")
        opened.page.keyboard.press("j")
        opened.shows("1")
        heads = opened.page.locator("#detail .step header").all_inner_texts()
        assert [head.split()[0] for head in heads] == ["draft", "revise", "never"]
        assert "skipped" in heads[2]
        opened.sees("#steps tbody tr", "^revise30")


@pytest.mark.parametrize("place", ["file", "server", "comparison", "two runs", "runs"])
def test_a_page_fits_its_window_and_all_that_can_be_used_has_a_name(
    visit: Open, places: Mapping[str, str], place: str
) -> None:
    for width, scheme in ((1440, "light"), (400, "dark")):
        opened = visit(places[place], viewport={"width": width, "height": 800}, color_scheme=scheme)
        opened.sees("#runs tbody tr, #detail .full, .two, .deltas")
        assert_fits(opened.page, width=width, scheme=scheme)
    nameless = opened.page.evaluate(
        """() => [...document.querySelectorAll(
            "a, button, input, select, [role=listbox], [role=progressbar], svg[role]")]
        .filter((e) => !(e.ariaLabel || e.labels?.length || e.textContent.trim()))
        .map((e) => e.outerHTML.slice(0, 100))"""
    )
    assert nameless == []


# ---- files alone


def test_a_comparison_as_a_file(visit: Open, places: Mapping[str, str]) -> None:
    page = visit(places["comparison"]).page
    assert page.locator("h1").inner_text() == "better against tables"
    assert re.match(r"\+\d", page.locator(".all .delta.clear").first.inner_text())
    page.locator("summary").first.click()
    assert "q10" in page.locator(".ids").first.inner_text()


# ---- a server alone


def test_the_list_leads_to_a_run(visit: Open, places: Mapping[str, str]) -> None:
    opened = visit(places["runs"])
    opened.sees("#count", "^2 runs$")
    opened.sees("#runs tbody tr", rf"^tables.*finished.*100 % of {N}.*\d\d\.\d\dF1")
    opened.sees("#runs tbody tr", r"^better.*tokens [\d,]+ of 1\.00 M")
    first = opened.page.locator("#runs tbody tr a").first
    for column, order in (("name", ["better", "tables"]), ("score", ["better", "tables"])):
        sort = opened.page.get_by_role("button", name=column)
        for key, name in zip(("Enter", "Space"), order, strict=True):
            sort.press(key)  # the second turns it around
            until(lambda name=name: first.inner_text() == name)
    assert opened.page.locator("#runs [aria-sort=ascending]").inner_text() == "score"
    opened.page.locator("#search").fill("tab")
    opened.sees("#count", "^1 of 2 runs$")
    opened.page.keyboard.press("Enter")
    opened.page.keyboard.press("j")
    opened.page.keyboard.press("Enter")
    opened.page.wait_for_url("**/run/tables*")
    opened.sees("h1", "^tables$")


def test_earlier_records_of_a_row(visit: Open, places: Mapping[str, str]) -> None:
    opened = visit(places["server"])
    opened.page.locator("#detail summary").filter(has_text="Earlier records").click()
    opened.sees("#detail details[open]", "attempt 1, ok")


def test_two_runs_side_by_side(visit: Open, places: Mapping[str, str]) -> None:
    opened = visit(places["server"])
    opened.state("finished")
    opened.page.locator("#other").select_option("better")
    opened.page.wait_for_url("**/compare?a=tables&b=better*")
    opened.sees("h1", "^better against tables$")
    opened.sees(".two", "window.hacked=1")
    assert opened.page.locator("img[src='x']").count() == 0
    opened.sees(".deltas .all .delta.clear", r"^\+\d")
    opened.sees("#notes li", "better: engine.options.latency_s: 0.1 → null")
    opened.sees(".two .asked", "What is cell 0 of the table.*Right answervalue 0")
    opened.page.locator(".two .asked .picture").first.click()
    large = opened.page.locator("#lightbox img")
    until(lambda: large.evaluate("image => image.complete && image.naturalWidth") == 900)
    opened.page.keyboard.press("Escape")
    opened.page.locator("#only").select_option("broken")
    opened.sees(".two .error", "it was server")
    heads = opened.page.locator(".two > header strong")
    until(lambda: heads.all_inner_texts() == ["q3"])
    opened.page.locator("#only").select_option("fixed")
    opened.sees(".two", "it was timeout")
    opened.page.locator(".two h3 a").first.click()
    opened.page.wait_for_url("**/run/tables#row=0")
    opened.shows("q0")


# ---- a server while something happens to its run, or to itself


@pytest.mark.usefixtures("in_an_empty_folder")
def test_a_run_is_killed_and_resumed_while_its_page_is_open(visit: Open, tmp_path: Path) -> None:
    prepare(100_000, **SLOW)
    first = begin("run", "job.toml", cwd=tmp_path)
    until(LOG.exists)
    with viewing("output", cwd=tmp_path) as view:
        opened = visit(f"{view.url}run/a")
        opened.state("running")
        until(lambda: sections(opened)[:2] == ["charts", "rows"])

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
        assert sections(opened) == ["rows", "charts", "engine"]
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


@pytest.mark.usefixtures("in_an_empty_folder")
def test_a_forecast_and_that_the_folder_or_the_server_is_gone_are_shown(
    visit: Open, tmp_path: Path
) -> None:
    prepare(40)
    forecast = batchkit("plan", "job.toml", "--rows", "8", "--json").json
    with viewing("output", cwd=tmp_path) as view:
        opened = visit(f"{view.url}run/a")
        opened.state("stopped")
        shown = opened.page.locator("#forecast dd").inner_text()
        assert f"for {forecast['left']} rows" in shown
        assert f"prompt tokens: {forecast['prompt_tokens']['expected']:.0f};" in shown
        Path("output").rename("elsewhere")
        opened.sees("#lost", "moved or deleted")
        Path("elsewhere").rename("output")
        opened.page.locator("#lost").wait_for(state="hidden")
        opened.state("stopped")
    opened.sees("#lost", "does not answer")
    with viewing("output", cwd=tmp_path, port=view.client.base_url.port or 0):
        opened.page.locator("#lost").wait_for(state="hidden")


@pytest.mark.parametrize("form", ["server", "file"])
def test_the_values_of_a_row_are_side_by_side(
    form: str, visit: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    prepare(
        4,
        input={"cross": {"adapter": ["", "b"]}},
        prompt={"user": "{{ q }}{{ adapter }}"},
        scoring={"reference": "q", "scorers": ["f1"]},
    )
    assert batchkit("run", "job.toml").exit_code == 0
    report(LOG.parent, tmp_path / "report.html")
    with viewing("output", cwd=tmp_path) as view:
        address = (tmp_path / "report.html").as_uri() if form == "file" else f"{view.url}run/a"
        opened = visit(address)
        opened.sees("#values h2", "adapter = b")
        opened.sees("#values td", r"\+0.00")
        opened.sees("#detail .step strong", "^adapter = b$")
        opened.sees("#detail .step .full", "no model answered row 1")
        opened.page.keyboard.press("j")
        opened.sees("#detail .step strong", r"^adapter = \(none\)$")
