"""One real run full of bad rows: each fails for its own reason, and every neighbour is answered."""

from __future__ import annotations

import base64
import io
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from PIL import Image

from batchkit.storage.log import RESULTS
from batchkit.storage.newest_lines import read_newest
from tests.support.forks import Fork
from tests.support.own_process import batchkit

pytestmark = pytest.mark.vllm

GOOD: dict[str, Any] = {"q": "what is it?", "file": "good.png"}


class Bad(NamedTuple):
    """A line of the input, or fields laid over a good row; the error's kind, and words of it."""

    line: bytes | dict[str, Any]
    kind: str
    words: str


def _png() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (64, 48), (200, 30, 90)).save(buffer, "PNG")
    return buffer.getvalue()


def _uri(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


BAD = [
    # lines
    Bad(b'{"id": "a", "q": "cut o', "invalid_request", "not valid JSON"),
    Bad(b"[1, 2]", "invalid_request", "object"),
    Bad(b'"just text"', "invalid_request", "object"),
    Bad(b'{"id": "b", "q": "\xff\xfe"}', "invalid_request", "UTF-8"),
    Bad(b"{'id': 'c'}", "invalid_request", "not valid JSON"),
    Bad(b'{"q": "no id", "file": "good.png"}', "invalid_request", "id"),
    Bad(b'{"id": null, "q": "null id", "file": "good.png"}', "invalid_request", "null"),
    # templates
    Bad({"q": None, "file": "good.png", "extra": 1}, "template", "shout"),
    Bad({"mode": "undefined"}, "template", "'nowhere' is undefined"),
    Bad({"mode": "attribute"}, "template", "no attribute"),
    Bad({"mode": "divide"}, "template", "ZeroDivisionError"),
    Bad({"mode": "filter"}, "template", ""),
    Bad({"mode": "escape"}, "template", "unsafe"),
    Bad({"mode": "endless"}, "template", "Range too big"),
    # media
    Bad({"file": "missing.png"}, "media", "missing.png"),
    Bad({"file": "../outside.png"}, "media", "media.root"),
    Bad({"file": "/etc/hostname"}, "media", "media.root"),
    Bad({"file": "link.png"}, "media", "media.root"),
    Bad({"file": "folder"}, "media", "folder"),
    Bad({"file": "pipe.png"}, "media", "pipe.png"),
    Bad({"file": "empty.png"}, "media", "empty"),
    Bad({"file": "truncated.png"}, "media", "truncated.png"),
    Bad({"file": "text.png"}, "media", "text.png"),
    Bad({"file": "huge.png"}, "media", "max_decode_bytes"),
    Bad({"file": "heavy.png"}, "media", "max_bytes"),
    Bad({"file": ""}, "media", "no image"),
    Bad({"file": "http://example.com/a.png"}, "media", "allow_urls"),
    Bad({"file": "http://127.0.0.1:1/a.png"}, "media", "allow_urls"),
    Bad({"file": "file:///etc/hostname"}, "media", "media.root"),
    Bad({"file": "data:image/png;base64,@@@"}, "media", "base64"),
    Bad({"file": "data:text/plain,hello"}, "media", "base64"),
    Bad({"file": _uri(b"")}, "media", "empty"),
    Bad({"file": _uri(b"not an image")}, "media", "image"),
    Bad({"file": _uri(_png()[:60])}, "media", ""),
    Bad({"file": "thin.png"}, "media", "aspect ratio"),
    # length
    Bad({"q": "tea " * 700}, "prompt_too_long", "512"),
    Bad({"q": "tea " * 40000}, "prompt_too_long", "512"),
    # parameters
    Bad({"params": {"temperature": -1}}, "invalid_request", "temperature"),
    Bad({"params": {"temperature": "warm"}}, "invalid_request", "temperature"),
    Bad({"params": {"max_tokens": 0}}, "invalid_request", "max_tokens"),
    Bad({"params": {"max_tokens": "all"}}, "invalid_request", "max_tokens"),
    Bad({"params": {"maxtokens": 3}}, "invalid_request", "did you mean 'max_tokens'"),
    Bad({"params": {"top_p": 2}}, "invalid_request", "top_p"),
    Bad({"params": {"n": 2}}, "invalid_request", "greedy"),
    Bad({"params": {"seed": "x"}}, "invalid_request", "seed"),
    Bad({"params": {"structured_outputs": {"regex": "(("}}}, "invalid_request", "regex"),
    Bad({"params": {"structured_outputs": {"choice": []}}}, "invalid_request", ""),
    Bad(
        {"params": {"structured_outputs": {"grammar": "root ::= root"}}},
        "invalid_request",
        "no next token",
    ),
    Bad({"params": "{broken"}, "invalid_request", "sampling parameters"),
    Bad({"params": [1]}, "invalid_request", "sampling parameters"),
]

USER = """{{ q.upper() if q is not none else q.shout() }}
{%- if mode is defined %}
{%- if mode == "undefined" %}{{ nowhere }}{% endif %}
{%- if mode == "attribute" %}{{ q.no_such_thing }}{% endif %}
{%- if mode == "divide" %}{{ 1 / 0 }}{% endif %}
{%- if mode == "filter" %}{{ q | round }}{% endif %}
{%- if mode == "escape" %}{{ q.__class__.__mro__ }}{% endif %}
{%- if mode == "endless" %}{% for n in range(1000000000) %}{{ n }}{% endfor %}{% endif %}
{%- endif %}"""

JOB = """
name = "bad"
[input]
path = "rows.jsonl"
id = "id"
[prompt]
user_file = "user.j2"
images = ["{{ file }}"]
[media]
root = "pictures"
max_pixels = 16384
max_bytes = 200000
max_decode_bytes = 50000000
[engine]
model = "MODEL"
[engine.options]
dtype = "float32"
enforce_eager = true
max_model_len = 512
max_num_seqs = 16
limit_mm_per_prompt = { image = 1, video = 0 }
[sampling]
max_tokens = 6
sampling_column = "params"
"""


def _pictures(folder: Path) -> None:
    folder.mkdir()
    (folder / "good.png").write_bytes(_png())
    (folder.parent / "outside.png").write_bytes(_png())
    (folder / "link.png").symlink_to(folder.parent / "outside.png")
    (folder / "folder").mkdir()
    os.mkfifo(folder / "pipe.png")
    (folder / "empty.png").touch()
    (folder / "truncated.png").write_bytes(_png()[:70])
    (folder / "text.png").write_text("this is not a picture")
    Image.new("L", (9000, 9000)).save(folder / "huge.png")
    (folder / "heavy.png").write_bytes(_png() + bytes(300_000))
    Image.new("RGB", (10, 6000)).save(folder / "thin.png")


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> list[dict[str, Any]]:
    """A good row before and behind each bad one, through the command line."""
    folder = tmp_path_factory.mktemp("bad")
    _pictures(folder / "pictures")
    lines: list[bytes] = []
    for number, bad in enumerate(BAD):
        lines.append(json.dumps({"id": f"before-{number}", **GOOD}).encode())
        if isinstance(bad.line, bytes):
            lines.append(bad.line)
        else:
            lines.append(json.dumps({"id": f"bad-{number}", **GOOD, **bad.line}).encode())
    lines.append(json.dumps({"id": "last", **GOOD}).encode())
    (folder / "rows.jsonl").write_bytes(b"\n".join(lines))
    (folder / "user.j2").write_text(USER)
    (folder / "job.toml").write_text(JOB.replace("MODEL", str(demo_model)))
    done = batchkit("run", "job.toml", cwd=folder, start=Fork)
    assert done.returncode == 3, done.stderr
    assert "Traceback" not in done.stderr
    summary = json.loads(done.stdout)
    assert summary["failed"] == len(BAD)
    assert summary["ok"] == len(BAD) + 1
    return list(read_newest(folder / "output/bad" / RESULTS))


@pytest.mark.parametrize("number", range(len(BAD)))
def test_a_bad_row_fails_alone_and_says_why(records: list[dict[str, Any]], number: int) -> None:
    before, failed, after = records[2 * number : 2 * number + 3]
    bad = BAD[number]
    assert failed["status"] == "failed"
    assert failed["text"] is None
    assert failed["error"]["kind"] == bad.kind, failed["error"]
    assert bad.words in failed["error"]["message"], failed["error"]
    for neighbour in (before, after):
        assert neighbour["status"] == "ok"
        assert neighbour["text"] == records[0]["text"], "the same question has the same answer"
