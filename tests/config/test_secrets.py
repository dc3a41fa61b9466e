"""No secret of a job, wherever it stands, reaches the run folder, stdout or stderr."""

from __future__ import annotations

import functools
import json
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import pytest
import tomlkit

from batchkit.config.masking import CONTENT, is_secret, learn_secret, masked, masked_text
from batchkit.config.tables import JobConfig, Table
from batchkit.config.terminal import MAX_LINE, MAX_MESSAGE, bounded
from tests.support.chat_server import MODEL, Refused, error, serving
from tests.support.command_line import batchkit
from tests.support.rows import write_jsonl
from tests.support.web import Files, web_server

pytestmark = pytest.mark.slow

CANARY = "c4nary-Xy7-of-a-coal-mine"
URL = f"https://me:{CANARY}@127.0.0.1:9/a.jsonl?X-Amz-Signature={CANARY}&sig={CANARY}&v=1"
RUN = Path("output/a")
NAMES = [
    "token", "hf_token", "hfToken", "HF_TOKEN", "x-amz-security-token", "secret", "client_secret",
    "password", "passwd", "credentials", "api_key", "api-key", "x-api-key", "apiKey", "X-Api-Key",
    "access_key", "secret_key", "aws_secret_access_key", "private_key", "privateKey", "bearer",
    "authorization", "Proxy-Authorization", "cookie", "cookies", "connection_string",
]  # fmt: skip
NO_SECRETS = [
    "max_tokens", "stop_token_ids", "tokenizer", "key", "primary_key", "api_key_env", "author",
    "answer_key", "keyboard", "monkey", "secretary", "prompt",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "in.jsonl", [{"q": "a"}, {"q": "b", "bad": 1}])


def leaks(*commands: tuple[str, ...]) -> list[str]:
    """Where the canary is found after these commands: what printed it, and the files that hold it."""
    found = []
    for command in commands:
        result = batchkit(*command)
        streams = {"stdout": result.stdout, "stderr": result.stderr}
        found += [f"{' '.join(command)[:60]}: {n}" for n, said in streams.items() if CANARY in said]
    files = [path for path in Path("output").rglob("*") if path.is_file()]
    return found + [str(path) for path in files if CANARY.encode() in path.read_bytes()]


def write_job(**tables: Any) -> dict[str, Any]:
    made: dict[str, Any] = {
        "name": "a",
        "input": {"path": "in.jsonl"},
        "prompt": {"user": "{{ q }}{% if bad is defined %}{{ nowhere }}{% endif %}"},
        "engine": {"kind": "dry-run"},
        **tables,
    }
    Path("job.toml").write_text(tomlkit.dumps(made), encoding="utf-8")
    return made


EVERYTHING = [
    ("validate", "job.toml"),
    ("run", "job.toml", "--dry-run"),
    ("run", "job.toml"),
    ("status", "job.toml"),
    ("status", "job.toml", "--json"),
    ("verify", "job.toml"),
    ("retry-failed", str(RUN)),
    ("retry-failed", "job.toml"),
    ("export", "job.toml", "--jsonl", "--csv", "--openai"),
    ("report", "job.toml"),
    ("run", "job.toml", "--set", "prompt.user=changed"),
]


def texts_of(table: type[Table], key: str = "") -> Iterator[str]:
    """The dotted keys of all texts that a job file can hold; ``[]`` ends the key of a list of them."""
    for name, field in table.model_fields.items():
        path = f"{key}.{name}" if key else name
        if path in CONTENT or path == "output.dir":  # which is where the run folder is
            continue
        parts = [field.annotation, *get_args(field.annotation)]
        parts += [get_args(part)[0] for part in parts if get_origin(part) is Annotated]
        tables = [part for part in parts if isinstance(part, type) and issubclass(part, Table)]
        if tables:
            yield from texts_of(tables[0], path)
        elif str in parts and field.annotation != list[str]:
            yield path
        elif field.annotation == list[str]:
            yield f"{path}[]"


@pytest.mark.parametrize("key", [*texts_of(JobConfig)])
def test_url_with_a_secret_is_masked_at_any_key(key: str) -> None:
    made = write_job()
    table: Any = made
    *parts, last = key.removesuffix("[]").split(".")
    for part in parts:
        table = table.setdefault(part, {})
    table[last] = [URL] if key.endswith("[]") else URL
    Path("job.toml").write_text(tomlkit.dumps(made), encoding="utf-8")
    setting = f"{key.removesuffix('[]')}={json.dumps(table[last])}"
    write_good = [("run", "good.toml", "--set", setting)]
    Path("good.toml").write_text(tomlkit.dumps({**made, "input": {"path": "in.jsonl"}}))
    assert leaks(("validate", "job.toml"), ("run", "job.toml"), *write_good) == []


@pytest.mark.parametrize(
    "place", ["vars", "engine.options", "prompt.chat_template_kwargs", "sampling"]
)
def test_secret_is_masked_by_its_name_in_every_free_table(place: str) -> None:
    shapes = [CANARY, {"user": CANARY, "more": [CANARY]}, [CANARY, {"x": CANARY}], 5]
    secrets = {name: shapes[number % 4] for number, name in enumerate(NAMES)}
    deep = {**secrets, "deep": {"list": [dict(secrets)], "url": URL}}
    deep["headers"] = [f"Authorization: Bearer {CANARY}", f"X-Api-Key: {CANARY}"]
    deep["env"] = [f"HF_TOKEN={CANARY}", f"Server=x;Password={CANARY};y=z"]
    deep["body"] = json.dumps({"api_key": CANARY})
    table: Any = deep
    for part in reversed(place.split(".")):
        table = {part: table}
    write_job(**{name: part for name, part in table.items() if name != "engine"})
    if place == "engine.options":  # the dry-run has no such options, a server has extra_body
        with serving() as server:
            options = {"extra_body": deep, "max_num_seqs": 2}
            write_job(engine={**engine(server.url), "options": options})
            assert leaks(*EVERYTHING) == []
    else:
        assert leaks(*EVERYTHING) == []
    kept = tomllib.loads((RUN / "job.toml").read_text())
    for part in place.split("."):
        kept = kept[part]
    kept = kept.get("extra_body", kept)
    assert kept["deep"]["url"] == URL.replace(CANARY, "***")
    assert kept["env"] == ["HF_TOKEN=***", "Server=x;Password=***;y=z"]


def engine(url: str) -> dict[str, Any]:
    return {"kind": "openai-server", "model": MODEL, "base_url": url, "api_key_env": "MY_LOGIN"}


def test_server_that_repeats_what_it_was_sent_gives_nothing_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    key = f'{CANARY}"x'  # JSON escapes the quote
    monkeypatch.setenv("MY_LOGIN", key)
    monkeypatch.setenv("OTHER_API_KEY", CANARY[::-1])

    def repeat(status: int, text: str, body: dict[str, Any]) -> str | None:
        raise Refused(status, error(f"{key} {CANARY[::-1]}: bad {body} {URL}"))

    for status in (400, 403, 500):
        with serving(functools.partial(repeat, status)) as server:
            options = {"extra_body": {"api-key": CANARY}, "give_up_s": 0.2}
            write_job(engine={**engine(server.url), "options": options})
            commands = EVERYTHING if status == 400 else EVERYTHING[2:3]
            assert leaks(*commands, ("run", "job.toml", "--fresh")) == []
        files = [path for path in Path("output").rglob("*") if path.is_file()]
        assert not [path for path in files if CANARY[::-1].encode() in path.read_bytes()]


@pytest.mark.parametrize("name", ["a", "cookie", "authorization"])
@pytest.mark.timeout(20)
def test_long_white_space_is_masked_in_linear_time(name: str) -> None:
    text = f"{name}:" + " " * 1_000_000
    assert masked(text) == text
    assert masked_text(text) == bounded(text)


def test_url_of_a_row_is_reported_without_its_secrets() -> None:
    urls = [URL, URL.replace("me:", "")]
    write_jsonl(Path("in.jsonl"), [{"q": "a", "url": url} for url in urls])
    media = {"allow_urls": ["127.0.0.1:9"]}
    write_job(prompt={"user": "{{ q }}", "images": ["{{ url }}"]}, media=media)
    # What a row holds is shown by report and export; what is said about it is not the place for it.
    commands = [command for command in EVERYTHING if command[0] not in ("report", "export")]
    assert leaks(*commands) == []
    write_job(prompt={"user": "{{ q }}{{ {}[url] }}"})
    assert leaks(*commands, ("run", "job.toml", "--fresh")) == []


@pytest.mark.parametrize("host", [f"[{CANARY}", f"[{CANARY}]", f"h:{CANARY}", f"h:80{CANARY}"])
def test_a_key_in_the_place_of_a_host_or_a_port_is_in_no_message(host: str) -> None:
    url = f"http://{host}/a.png?v=1"
    write_jsonl(Path("in.jsonl"), [{"q": "a", "url": url}])
    write_job(
        prompt={"user": "{{ q }}", "images": ["{{ url }}"]},
        media={"allow_urls": ["h"]},
        run={"check_rows": 0},
        output={"keep": []},
    )
    assert leaks(("run", "job.toml"), ("verify", "job.toml")) == []
    assert CANARY not in masked_text(f"can't open {url}, since {url}")


@pytest.mark.parametrize(
    "words",
    [
        f"env HF_TOKEN={CANARY} serve",
        f"serve --api-key {CANARY}",
        f"serve --x-api-key={CANARY}",
        f"serve --header 'Authorization: Bearer {CANARY}'",
        f"serve -H 'X-Api-Key: {CANARY}'",
        f"bash -c 'VLLM_API_KEY={CANARY} serve'",
        f"serve --model https://me:{CANARY}@host/x",
        f"serve --model 'https://host/x?sig={CANARY}'",
        f"serve 'HF_TOKEN={CANARY}",
    ],
)
def test_server_command_with_a_secret_is_refused(words: str) -> None:
    server = {"command": f"{words} --port {{port}}"}
    write_job(engine={"kind": "openai-server", "model": MODEL, "server": server})
    assert leaks(*EVERYTHING) == []
    ended = batchkit("run", "job.toml")
    assert ended.exit_code == 2
    assert "engine.server.command" in ended.stderr


@pytest.mark.parametrize(
    "args",
    [
        ("--set", f"vars.api_key={CANARY}"),
        ("--set", f"vars.api_key.x={CANARY}"),
        ("--set", f"vars.credentials.user={CANARY}"),
        ("--set", f'vars.a={{api-key = "{CANARY}", b = [{{cookie = "{CANARY}"}}]}}'),
        ("--set", f"vars.url={URL}"),
        ("--set", f"run.seed={URL}"),
        ("--set", f"engine.options.api-key={CANARY}"),
        ("--set", f"name={URL}"),
        (f"vars.api_key={CANARY}",),
        ("--api-key", CANARY),
    ],
    ids=range(10),
)
def test_secret_on_the_command_line_is_not_repeated(args: tuple[str, ...]) -> None:
    write_job(vars={"api_key": "x"})
    assert leaks(("run", "job.toml", *args), ("run", "job.toml")) == []
    assert leaks(("retry-failed", "job.toml", *args), ("report", "job.toml")) == []


# A secret that is gone, or another


def test_masked_secret_is_asked_for_and_never_used() -> None:
    write_job(vars={"home": URL})
    batchkit("run", "job.toml")
    found = batchkit("run", str(RUN / "job.toml"))
    assert found.exit_code == 2
    assert "vars.home: a secret" in found.stderr
    found = batchkit("retry-failed", str(RUN), "--set", "vars.nowhere=x")
    assert found.exit_code == 0
    assert "vars.home: this retry runs without the value, which is a secret" in found.stderr


def test_retry_by_the_job_file_has_its_secrets() -> None:
    def check(text: str, body: dict[str, Any]) -> str | None:
        if body["auth"] != {"api-key": CANARY}:
            raise Refused(400, error("no key"))
        return None

    with serving(check) as server:
        options = {"extra_body": {"auth": {"api-key": CANARY}}}
        write_job(engine={**engine(server.url), "options": options})
        assert batchkit("run", "job.toml").exit_code == 3
        found = batchkit("retry-failed", "job.toml", "--set", "vars.nowhere=x")
        assert found.exit_code == 0, found.stderr
        write_jsonl(Path("in.jsonl"), [{"q": "a"}, {"q": "b", "bad": 1}])
        assert leaks(("run", "job.toml")) == []


def test_run_notices_another_secret_and_does_not_show_it() -> None:
    write_job(vars={"login": {"api-key": CANARY}, "n": 1})
    batchkit("run", "job.toml")
    write_job(vars={"login": {"api-key": f"{CANARY}-2"}, "n": 1})
    found = batchkit("run", "job.toml")
    assert found.exit_code == 2
    assert "vars.login" in found.stderr
    assert leaks(("run", "job.toml")) == []


class Signed(Files):
    """Gives a file only to those whose signature begins as it should."""

    def do_GET(self) -> None:
        if f"sig={CANARY}" in self.path:
            super().do_GET()
        else:
            self.send_error(403, f"bad signature in {self.path}")

    do_HEAD = do_GET


@pytest.fixture
def signed(tmp_path: Path) -> Iterator[str]:
    """The URL of in.jsonl, up to its signature."""
    with web_server(functools.partial(Signed, directory=str(tmp_path))) as url:
        yield f"{url}/in.jsonl?v=1&sig="


def test_input_may_be_a_signed_url_and_is_the_same_when_it_is_signed_anew(signed: str) -> None:
    pytest.importorskip("aiohttp")
    write_job(input={"path": signed + CANARY})
    assert leaks(*EVERYTHING) == []
    assert json.loads(batchkit("run", "job.toml").stdout)["ok"] == 1
    found = batchkit("retry-failed", str(RUN), "--set", "vars.nowhere=x")
    assert found.exit_code == 2
    assert "input.path: a secret, which a run folder stores only as ***" in found.stderr
    again = f"input.path={signed}{CANARY}-anew"
    found = batchkit("retry-failed", str(RUN), "--set", "vars.nowhere=x", "--set", again)
    assert found.exit_code == 0, found.stderr
    assert batchkit("retry-failed", "job.toml").stdout.startswith("nothing to retry")
    assert leaks(("run", "job.toml", "--set", again), ("report", "job.toml")) == []
    wrong = f"input.path={signed}wrong-{CANARY}"
    assert batchkit("run", "job.toml", "--set", wrong).exit_code == 2
    assert leaks(("run", "job.toml", "--set", wrong)) == []


# What is a secret, and what is none


def test_names_of_secrets() -> None:
    assert [name for name in NAMES if not is_secret(name)] == []
    assert [name for name in NO_SECRETS if is_secret(name)] == []


TEXTS = [
    "https://host/a.jsonl?v=1&id=squad_v2",
    "sftp://me@host/a",
    "abfs://container@account.host/a",
    "github://org:repo@main/a.csv",
    "https://host/{{ file }}?sig={{ signature }}",
    "hf://datasets/a/b@main/c",
    "[x] a: b; token is what an `a=b` is",
    "http://localhost:8000/@scope/x",
    "https://host/@user/a",
]
MESSAGES = [
    "http://127.0.0.1:8000/v1: no answer; http://localhost:8000; https://[::1]:8080/",
    "found by Prometheus at http://127.0.0.1:PORT/metrics; http://{host}:{port_of_it}/v1",
    "zip://a.zip::s3://bucket/x, s3://bucket:directory/x",
    "expected token 'end of print statement', got 'b'",
    "line 3: unexpected token: x",
    "scoring.extract.regex.pattern: '(?=a)b' is not a valid regular expression",
    "sampling.max_tokens=5: too many",
    "sampling.max_token: vLLM's SamplingParams has no such parameter",
    "engine.api_key: unknown key; did you mean 'api_key_env'?",
    "see https://docs.vllm.ai/en/latest/ for more",
]


@pytest.mark.parametrize(
    ("text", "mask"),
    [*((text, masked) for text in TEXTS), *((text, masked_text) for text in MESSAGES)],
)
def test_what_has_no_secret_stays_as_it_is(text: str, mask: Callable[[str], str]) -> None:
    assert mask(text) == text


@pytest.mark.parametrize("sign", ["/", "?", "#", " ", "@", "\\", '"', "%2F", "/x?y@"])
def test_password_is_masked_up_to_the_last_at(sign: str) -> None:
    for url in (f"http://me:pa{sign}{CANARY}@host/a", f"sftp:/me:{CANARY}{sign}x@host/a"):
        hidden = masked({"vars": {"url": url}})["vars"]["url"]
        assert hidden == f"{url.partition('me:')[0]}me:***@host/a"
        assert CANARY not in masked_text(url)
        assert CANARY not in masked_text(f"can't open {url.replace(' ', '')}, no such file")
        write_job(input={"path": url})
        found = batchkit("run", "job.toml")
        assert found.exit_code == 2
        assert found.stderr.startswith("batchkit: error: input.path: ")
        assert leaks(("run", "job.toml"), ("validate", "job.toml")) == []


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ({"tokens": CANARY}, {"tokens": "***"}),
        ({"auth_tokens": [CANARY]}, {"auth_tokens": ["***"]}),
        ({"max_tokens": 5, "n_tokens": "64"}, {"max_tokens": 5, "n_tokens": "64"}),
        ({"tokens": [1, 2]}, {"tokens": [1, 2]}),
    ],
)
def test_tokens_are_a_count_only_as_a_number(table: dict[str, Any], expected: Any) -> None:
    free = masked({"engine": {"options": {"extra_body": table}}})
    assert free == {"engine": {"options": {"extra_body": expected}}}


def test_masking_twice_is_masking_once() -> None:
    table = {"url": URL, "list": [{"x-api-key": CANARY}], "h": f"Cookie: {CANARY}"}
    assert masked(masked(table)) == masked(table)
    assert CANARY not in str(masked(table))
    for text in (URL, "x" * 2_000, "\n".join(["x" * 2_000] * 50)):
        assert masked_text(masked_text(text)) == masked_text(text)


def test_no_message_is_longer_than_its_limit_and_no_part_of_a_secret_is_left() -> None:
    secret = "k3" * 300
    learn_secret(secret)
    text = masked_text(f"{'a' * 400}{secret}{'b' * 800}\n" * 100)
    assert len(text) <= MAX_MESSAGE
    assert max(map(len, text.split("\n"))) <= MAX_LINE
    assert "k3" not in text
