"""``batchkit view`` over HTTP: rows by page, filter, order and words; one row; two runs."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from batchkit.commands.report import report
from tests.support.command_line import batchkit
from tests.support.made_runs import (
    TABLE,
    N,
    draw_tables,
    failure,
    golden_run,
    make_run,
    rows,
    told,
)
from tests.support.pages import data_in
from tests.support.paths import ROOT
from tests.support.rows import write_jsonl
from tests.support.view_server import Viewed, viewing

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("view")
    golden_run(place)
    return place


@pytest.fixture(scope="module")
def view(place: Path) -> Iterator[Viewed]:
    with viewing("output", cwd=place) as view:
        yield view


def newest(place: Path) -> dict[int, dict[str, Any]]:
    """The newest record of each row, by index: what the log says."""
    lines = (place / "output/tables/results.jsonl").read_text().splitlines()
    return {record["index"]: record for record in map(json.loads, lines)}


def test_a_request_by_another_name_is_refused(view: Viewed) -> None:
    others = ("evil.example", "evil.example:8484", "127.0.0.1.evil.example", "", "localhost.evil")
    for path in ("/", "/api/runs", "/assets/page.css"):
        for host in others:
            assert view.client.get(path, headers={"host": host}).status_code == 403
    for own in ("localhost", "127.0.0.1:80", "[::1]:9", "LOCALHOST:1"):
        assert view.client.get("/api/runs", headers={"host": own}).status_code == 200


def test_every_answer_has_the_headers_that_protect_a_page(view: Viewed) -> None:
    for path in ("/api/runs", "/assets/page.css", "/api/no", "/assets/no", "/"):
        answer = view.client.get(path)
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-store"


@pytest.mark.parametrize(
    "path",
    [
        *("/assets/..%2fserver.py", "/assets/server.py", "/assets/../../etc/passwd"),
        *("/run/%2e%2e", "/api/runs/..%2F..%2Fetc", "/api/runs/a%2F..%2Fa"),
        *("/api/runs/a%00", "/api/runs/%2e%2e"),
    ],
)
def test_no_path_leads_out(view: Viewed, path: str) -> None:
    request = httpx.Request("GET", view.url)
    request.url = request.url.copy_with(raw_path=path.encode())
    answer = view.client.send(request)
    assert answer.status_code == 404
    assert "error" in answer.json()


def test_rows_by_page(view: Viewed, place: Path) -> None:
    records = newest(place)
    found = view.rows("tables", offset=50, limit=9)
    assert (found["total"], found["offset"], found["next"]) == (N, 50, 59)
    assert [row["index"] for row in found["rows"]] == [*range(50, 59)]
    for row in found["rows"]:
        record = records[row["index"]]
        for name in ("id", "status", "text", "prediction", "scores", "usage", "attempt"):
            assert row[name] == record[name]
        assert row["group"] == record["fields"]["QuestionType"]
    assert view.rows("tables", offset=N - 1)["next"] is None
    assert view.rows("tables", offset=999)["rows"] == []


@pytest.mark.parametrize(
    ("params", "wanted"),
    [
        ({"status": "failed"}, [2, 5, 7]),
        ({"status": "cut"}, [8]),
        ({"status": "unscored"}, [9]),
        ({"kind": "timeout"}, [2]),
        ({"kind": "media"}, [7]),
        ({"kind": "unheard of"}, []),
        ({"group": "Fact Checking", "limit": 3}, [1, 4, 7]),
        ({"group": "nothing"}, []),
        ({"scorer": "f1", "min": 0.3, "max": 0.7}, [8]),
        ({"scorer": "f1", "min": 0.5, "max": 0.5}, [8]),
        ({"scorer": "em", "max": 0}, [0, 1, 8, *range(10, N, 10)]),
        ({"scorer": "none", "max": 0}, []),
        ({"group": "Data Analysis", "scorer": "f1", "max": 0}, [*range(0, N, 30)]),
        ({"text": "final answer", "group": "Fact Checking", "limit": 3}, [1, 4, 10]),
        ({"order": "desc", "limit": 3}, [N - 1, N - 2, N - 3]),
        ({"sort": "score", "scorer": "f1", "order": "desc", "limit": 2}, [3, 4]),
        ({"sort": "score", "scorer": "f1", "min": 0.1, "limit": 2}, [8, 3]),
        ({"sort": "length", "status": "ok", "limit": 2}, [9, 0]),
        ({"sort": "length", "order": "desc", "limit": 1}, [1]),
        ({"sort": "latency", "order": "desc", "limit": 3}, [4, 9, 14]),
        ({"sort": "tokens", "order": "desc", "limit": 1}, [1]),
    ],
    ids=str,
)
def test_filters_and_orders(view: Viewed, params: dict[str, Any], wanted: list[int]) -> None:
    assert view.indexes("tables", **params) == wanted


def test_a_search_finds_what_it_finds_in_a_file(tmp_path: Path) -> None:
    """node --test runs the same searches over the rows that a report holds."""
    cases = json.loads((ROOT / "tests/page/searches.json").read_text(encoding="utf-8"))
    given = [row["record"] for row in cases["rows"]]
    table = [
        {**row, "id": f"r{index}", **case["fields"]}
        for index, (row, case) in enumerate(zip(rows(len(given), 1), cases["rows"], strict=True))
    ]
    tables: dict[str, Any] = {
        "prompt": {"images": []},
        "output": {"keep": ["topic"]},
        "scoring": {"extract": "text", "reference": "", "scorers": [], "group_by": ""},
    }
    run = make_run(tmp_path, table, lambda index, row: given[index], **tables)
    with viewing("output", cwd=tmp_path) as view:
        for text, wanted in cases["searches"]:
            assert view.indexes("tables", text=text) == wanted, text
    for held, case in zip(data_in(report(run).path)["rows"], cases["rows"], strict=True):
        assert held["kept"] == ["topic"]
        assert held["record"]["status"] == case["record"].get("status", "ok")


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"min": "x", "scorer": "f1"}, "min=x"),
        ({"min": "nan", "scorer": "f1"}, "min=nan"),
        ({"min": "1"}, "scorer is missing"),
        ({"sort": "score"}, "scorer is missing"),
        ({"sort": "size"}, "sort=size: Input should be 'index', 'score'"),
        ({"order": "up"}, "order=up"),
        ({"status": "bad"}, "status=bad"),
        ({"limit": "100000"}, "limit=100000"),
    ],
    ids=str,
)
def test_a_wrong_parameter_is_named(view: Viewed, params: dict[str, Any], words: str) -> None:
    assert words in view.get("runs/tables/rows", 400, **params)["error"]


def test_the_status_says_by_what_rows_can_be_chosen(view: Viewed) -> None:
    found = view.get("runs/tables")
    assert found["groups"] == ["Data Analysis", "Fact Checking", "Numerical Reasoning"]
    assert found["group_by"] == "QuestionType"
    scorers = {"f1": ("F1", 100), "em": ("EM", 100)}
    assert {s["name"]: (s["head"], s["scale"]) for s in found["scorers"]} == scorers
    assert {each["kind"] for each in found["failures"]} == {"timeout", "oom", "media"}
    timeout = {"kind": "timeout", "count": 1, "message": "it was timeout", "index": 2}
    assert timeout in found["failures"]
    assert found["problem"] is None


def test_a_row_with_its_prompt_its_images_and_its_attempts(view: Viewed, place: Path) -> None:
    found = view.get("runs/tables/rows/4")
    assert found["record"] == newest(place)[4]
    assert found["reference"] == TABLE[4]["FinalAnswer"]
    assert found["answers"] == [found["record"]["text"]]
    (older,) = found["attempts"]
    assert older["index"] == 4
    assert older["text"] != found["record"]["text"]
    (message,) = found["prompt"]["messages"]
    assert message == {"role": "user", "content": "[image]Look.\nWhat is cell 4 of the table?"}
    (url,) = found["prompt"]["images"]
    image = view.client.get(url)
    assert image.headers["content-type"] == "image/webp"
    assert Image.open(io.BytesIO(image.content)).size == (900, 600)
    assert view.client.get(url[:-1] + "1").status_code == 404
    assert view.client.get(url[:-1] + "x").status_code == 404


def test_what_stands_beside_answers_in_a_list(view: Viewed) -> None:
    found = view.get("runs/tables/prompts", rows="4,7,999")
    assert {*found} == {"4", "7"}
    assert found["7"] == {"asked": TABLE[7]["Question"], "reference": TABLE[7]["FinalAnswer"]}
    image = Image.open(io.BytesIO(base64.b64decode(found["4"]["image"].partition(",")[2])))
    assert max(image.size) == 240
    for wrong in ("", "x", "4,", "-1"):
        assert "rows" in view.get("runs/tables/prompts", 400, rows=wrong)["error"]


def test_a_row_without_its_image_says_so(view: Viewed) -> None:
    found = view.get("runs/tables/rows/7")
    (url,) = found["prompt"]["images"]
    answer = view.client.get(url)
    assert answer.status_code == 404
    assert "gone.png" in answer.json()["error"]


def test_a_row_that_has_no_record(view: Viewed) -> None:
    assert "row 999 has no record" in view.get("runs/tables/rows/999", 404)["error"]
    assert view.get("runs/tables/rows/x", 404)["error"]


def test_scores_that_came_later_count(tmp_path: Path) -> None:
    run = golden_run(tmp_path)
    with viewing("output", cwd=tmp_path) as view:
        right = view.indexes("tables", scorer="em", min=1, limit=500)
        assert 8 not in right
        before = view.get("runs")[0]["score"]["mean"]
        batchkit("score", run).ok()
        assert view.indexes("tables", scorer="em", min=1, limit=500) == sorted([*right, 8])
        (row,) = view.rows("tables", text="q8", sort="index", limit=1)["rows"]
        assert row["scores"] == {"f1": 1.0, "em": 1.0}
        assert view.get("runs")[0]["score"]["mean"] > before
        assert view.get("runs/tables/rows/8")["record"]["scores"] == {"f1": 1.0, "em": 1.0}
        whole = (run / "scores.jsonl").read_bytes()
        for damaged in (b"{}\n", whole + b"x\n", whole.replace(b'"index":8', b'"index":null')):
            (run / "scores.jsonl").write_bytes(damaged)
            assert len(view.indexes("tables", limit=500)) == N
            problem = view.get("runs/tables")["problem"]
            assert "scores.jsonl line" in problem
            assert "`batchkit score` writes this file again" in problem
        (run / "scores.jsonl").unlink()
        assert view.indexes("tables", scorer="em", min=1, limit=500) == right
        assert view.get("runs/tables")["problem"] is None


def test_two_runs_side_by_side(tmp_path: Path) -> None:
    golden_run(tmp_path)

    def better(index: int, row: Mapping[str, Any]) -> Any:
        """Row 2 is answered, 10 right, 11 wrong, 3 fails, and 1 has other words."""
        changed = {2: told(3, row), 10: told(3, row), 11: told(10, row), 1: "other words"}
        return failure("oom") if index == 3 else changed.get(index) or told(index, row)

    make_run(tmp_path, TABLE[:40], better, name="other")
    with viewing("output", cwd=tmp_path) as view:
        found = view.get("compare", a="tables", b="other")
        ids = [row["id"] for row in found["rows"]]
        assert ids == ["q1", "q2", "q3", "q10", "q11"]
        assert found["counts"] == {
            "changed": 5,
            "fixed": 2,
            "broken": 2,
            "all": N,
            "only_a": N - 40,
            "only_b": 0,
        }
        assert found["rows"][2]["b"]["kind"] == "oom"
        fixed = view.get("compare", a="tables", b="other", only="fixed")
        assert [row["id"] for row in fixed["rows"]] == ["q2", "q10"]
        everything = view.get("compare", a="other", b="tables", only="all", offset=38, limit=4)
        assert [row["id"] for row in everything["rows"]] == ["q38", "q39", "q40", "q41"]
        assert everything["rows"][3]["a"] is None
        assert view.get("compare", a="tables", b="gone", code=404)["error"]


def test_a_row_that_brings_its_own_messages_and_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw_tables(tmp_path / "image", 1)
    parts = [
        {"type": "text", "text": "See"},
        {"type": "image_url", "image_url": {"url": "table0.png"}},
        {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/x.png"}},
    ]
    call = {"id": "a", "function": {"name": "clock", "arguments": '{"zone": "UTC"}'}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "One moment.", "tool_calls": [call]},
        {"role": "assistant", "tool_calls": [call]},
    ]
    wrong = [{"role": "assistant", "content": None, "tool_calls": ["clock"]}]
    write_jsonl(tmp_path / "in.jsonl", [{"messages": messages}, {"messages": wrong}])
    (tmp_path / "job.toml").write_text("""
name = "a"
input.path = "in.jsonl"
engine.kind = "dry-run"
media.root = "image"
media.allow_urls = ["127.0.0.1"]
""")
    monkeypatch.chdir(tmp_path)
    batchkit("run", "job.toml")
    with viewing("job.toml", cwd=tmp_path) as view:
        prompt, refused = (view.get(f"runs/a/rows/{row}")["prompt"] for row in (0, 1))
        here, there = (view.client.get(url) for url in prompt["images"])
        beside = view.get("runs/a/prompts", rows="0,1")
    file = data_in(report(tmp_path / "output/a").path)
    assert (beside["0"]["asked"], beside["1"]["asked"]) == ("See", None)
    assert "image" in beside["0"]
    called = 'clock({"zone": "UTC"})'
    for shown in (prompt, file["rows"][0]["prompt"]):
        contents = [message["content"] for message in shown["messages"]]
        assert contents == ["Be brief.", "See[image][image]", f"One moment. {called}", called]
    assert "tool call" in refused["error"]
    assert here.status_code == 200
    assert there.status_code == 404
    for problem in (there.json()["error"], file["pictures"][1]["problem"]):
        assert "reading a run downloads nothing" in problem
