"""A row becomes a request; whatever is wrong with a row is that row's own error."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from batchkit.errors import JobError, MediaError, RequestError, RowError, TemplateError
from batchkit.rendering.renderer import PromptRenderer
from batchkit.rendering.steps import render_or_fail
from batchkit.rendering.templates.prompt import names_in
from batchkit.types import Completion, Request, Row
from tests.support.dry_runs import job
from tests.support.images import BLUE, RED, png
from tests.support.rendering import refusal, render, renderer


def user_text(fields: Mapping[Any, Any], **tables: Any) -> Any:
    return render(fields, **tables).messages[-1]["content"]


@pytest.fixture
def media(tmp_path: Path) -> dict[str, Any]:
    """A media root that holds red.png and blue.png."""
    (tmp_path / "red.png").write_bytes(png(RED))
    (tmp_path / "blue.png").write_bytes(png(BLUE))
    return {"root": str(tmp_path)}


def outline(request: Request) -> list[Any]:
    """The last message's parts: a text as it is, an image as its color."""
    parts = request.messages[-1]["content"]
    return [part.get("text") or part["image_pil"].getpixel((0, 0)) for part in parts]


# Templates


def test_templates_are_filled_from_the_row_and_from_vars() -> None:
    prompt = {"system": "Be {{ tone }}.", "user": "{{ q }} {{ n }}\n"}
    found = render({"q": "Why?", "n": 3}, vars={"tone": "brief", "n": 1}, prompt=prompt)
    assert found.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Why? 3\n"},  # the row's n, and the newline kept
    ]
    assert (found.prompt, found.media_bytes) == (None, 0)


@pytest.mark.parametrize(
    "expression",
    [
        "{{ x.__class__ }}",
        "{{ ().__class__.__mro__ }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ '{0.__class__}'.format(x) }}",
        "{{ x['__class__'] | string }}{{ x.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{% for i in range(10 ** 12) %}{% endfor %}",
        "{{ range(10 ** 12) | list }}",
        "{{ 1 // 0 }}",
        "{{ x.missing() }}",
    ],
)
def test_what_a_template_may_not_or_cannot_do_fails_its_row(expression: str) -> None:
    assert refusal(TemplateError, {"x": "text"}, prompt={"user": expression})
    assert refusal(TemplateError, {"x": "text"}, prompt={"system": expression, "user": "u"})


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ({"system": "one\ntwo\n{% if %}"}, "prompt.system: line 3: "),
        ({"user": "one\ntwo\n{% if %}"}, "prompt.user: line 3: "),
        ({"user": "{{ x | shout }}"}, "prompt.user: line 1: No filter named 'shout'"),
        ({"images": ["{{ a }}", "{{ b | }}"]}, "prompt.images.1: "),
    ],
)
def test_a_syntax_error_is_a_job_error_that_names_its_place(
    prompt: dict[str, Any], words: str
) -> None:
    assert refusal(JobError, {}, prompt=prompt).startswith(words)


def test_templates_may_be_in_files_which_are_read_once(tmp_path: Path) -> None:
    system, user = tmp_path / "s.j2", tmp_path / "u.j2"
    system.write_bytes(b"\xef\xbb\xbfYou are {{ who }}.")
    user.write_text("{{ q }}\n", encoding="utf-8")
    made = renderer(prompt={"system_file": str(system), "user_file": str(user)})
    system.write_text("second")
    user.write_text("second")
    row = Row(0, "0", {"who": "kind", "q": "ç?"})
    later = PromptRenderer(made.job)  # as a worker does that is started again
    for found in (made.render(row), later.render(row)):
        assert found.messages == [
            {"role": "system", "content": "You are kind."},
            {"role": "user", "content": "ç?\n"},
        ]


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "can't be read"), (b"\xff\xfe", "can't be read"), (b"a\n{% if %}", "line 2")],
)
def test_template_file_that_cannot_be_used_is_named(
    tmp_path: Path, content: bytes | None, words: str
) -> None:
    path = tmp_path / "u.j2"
    if content is not None:
        path.write_bytes(content)
    message = refusal(JobError, {}, prompt={"user_file": str(path)})
    assert message.startswith(f"prompt.user_file: {path}: {words}")


def test_chat_false_sends_the_text_as_it_is() -> None:
    found = render({"q": "Once"}, prompt={"user": "{{ q }} upon", "chat": False})
    assert (found.messages, found.prompt) == (None, "Once upon")
    found = render({"prompt": "{{ not a template }}"}, prompt={"chat": False})
    assert found.prompt == "{{ not a template }}"


# Images


TWO = ["{{ a }}.png", "{{ image }}"]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ({"user": "Compare.", "images": TWO}, [RED, BLUE, "Compare."]),
        ({"user": "Look:{{ image }}", "images": TWO}, [BLUE, "Look:", RED]),
        (
            {"user": "{{ a }}:{{ image }}After:{{image}}Compare.", "images": TWO},
            ["red:", RED, "After:", BLUE, "Compare."],
        ),
        (  # rendered in a process of its own
            {"user": "{% for n in row.numbers %}{{ image }}{{ n }}{% endfor %}", "images": TWO},
            [RED, "1", BLUE, "2"],
        ),
        ({"user": "{{ row.image }}: {{ image }}", "images": ["{{ image }}"]}, ["blue.png: ", BLUE]),
        ({"user": "{{ image }} or {{ image }}", "images": ["{{ all }}"]}, [RED, " or ", BLUE]),
    ],
)
def test_images_are_where_the_prompt_says(
    prompt: dict[str, Any], expected: list[Any], media: dict[str, Any]
) -> None:
    fields = {"a": "red", "image": "blue.png", "all": ["red.png", "blue.png"], "numbers": [1, 2]}
    found = render(fields, prompt=prompt, media=media)
    assert outline(found) == expected
    images = [part for part in expected if not isinstance(part, str)]
    assert [image.getpixel((0, 0)) for image in found.images] == images


@pytest.mark.parametrize("prompt", [{}, {"system": "{{ image }}", "images": ["{{ image }}"]}])
def test_a_column_called_image_is_a_column_outside_of_a_user_message_with_images(
    prompt: dict[str, Any], media: dict[str, Any]
) -> None:
    user = {"user": "Describe it." if prompt else "{{ image }}"}
    found = render({"image": "red.png"}, prompt={**user, **prompt}, media=media)
    assert (found.messages or ())[0]["content"] == "red.png"


@pytest.mark.parametrize(
    "template", ["{{ photo }}", " {{photo}} ", "{{- photo -}}", "{{ photo -}}"]
)
def test_lone_column_keeps_its_bytes(template: str) -> None:
    found = render({"photo": png(BLUE)}, prompt={"user": "u", "images": [template]})
    assert outline(found) == [BLUE, "u"]


def test_lone_column_may_hold_a_list_of_images(media: dict[str, Any]) -> None:
    photos = [png(BLUE), "red.png", {"bytes": png(RED), "path": None}]
    found = render({"photos": photos}, prompt={"images": ["{{ photos }}"]}, media=media)
    assert outline(found) == [BLUE, RED, RED]
    found = render({"photos": photos}, prompt={"images": ["{{ photos[1:] }}"]}, media=media)
    assert outline(found) == [RED, RED]


@pytest.mark.parametrize("column", ["self", "args", "loop", "range", "with space"])
def test_row_may_have_columns_of_any_name(column: str, media: dict[str, Any]) -> None:
    fields = {column: "x", "a": "red.png"}
    assert outline(render(fields, prompt={"images": ["{{ a }}"]}, media=media)) == [RED]


# Rows that bring their own messages


def test_prompt_row_is_sent_as_a_user_message() -> None:
    assert user_text({"prompt": "{{ as it is }}"}) == "{{ as it is }}"
    found = render({"prompt": "hi"}, prompt={"system": "Be brief."})
    assert [message["role"] for message in found.messages or ()] == ["system", "user"]


def test_messages_row_is_sent_with_its_images_loaded(media: dict[str, Any]) -> None:
    uri = "data:image/png;base64," + base64.b64encode(png(BLUE)).decode()
    system = {"role": "system", "content": "s"}
    content = [
        {"type": "text", "text": "What?"},
        {"type": "image_url", "image_url": {"url": uri, "detail": "low"}},
        {"type": "image_url", "image_url": "red.png"},
        {"type": "image", "image": png(BLUE)},
    ]
    found = render({"messages": [system, {"role": "user", "content": content}]}, media=media)
    assert outline(found) == ["What?", BLUE, RED, BLUE]
    assert found.messages[0] == system
    assert content[1]["type"] == "image_url", "the row itself stays as it was"


# OpenAI bodies


CHAT = {"model": "gpt", "messages": [{"role": "user", "content": "x"}], "stream": False}


@pytest.mark.parametrize(
    ("body", "sampling"),
    [
        ({}, {}),
        ({"temperature": 1, "top_p": 0.5, "n": 2}, {"temperature": 1, "top_p": 0.5, "n": 2}),
        ({"max_completion_tokens": 9}, {"max_tokens": 9}),
        ({"max_tokens": 9}, {"max_tokens": 9}),
        ({"max_completion_tokens": 9, "max_tokens": 5}, {"max_tokens": 9}),
        ({"max_completion_tokens": None, "max_tokens": 5}, {"max_tokens": 5}),
        ({"top_p": float("nan"), "max_tokens": 9}, {"max_tokens": 9}),
        ({"seed": None, "stop": ["a"]}, {"stop": ["a"]}),
        ({"logprobs": True, "top_logprobs": 5}, {"logprobs": 5}),
        ({"logprobs": True}, {"logprobs": 0}),
        ({"logprobs": False, "top_logprobs": 5}, {}),
        ({"user": "u", "metadata": {}, "store": True, "tools": [], "tools_": None}, {}),
        ({"prompt_cache_key": "k", "prompt_cache_retention": "24h"}, {}),
        ({"response_format": {"type": "text"}}, {}),
        (
            {"response_format": {"type": "json_object"}},
            {"structured_outputs": {"json_object": True}},
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"a": 1}}}},
            {"structured_outputs": {"json": {"a": 1}}},
        ),
    ],
)
def test_chat_body_speaks_vllms_words(body: dict[str, Any], sampling: dict[str, Any]) -> None:
    found = render({"custom_id": "a", "body": {**CHAT, **body}, "url": "/v1/chat/completions"})
    assert found.messages == CHAT["messages"]
    assert found.prompt is None
    assert found.sampling == {"temperature": 0.0, "max_tokens": 256, **sampling}


def test_completions_body_sends_plain_text() -> None:
    found = render({"body": {"model": "m", "prompt": "Once", "logprobs": 2, "max_tokens": 3}})
    assert (found.messages, found.prompt) == (None, "Once")
    assert found.sampling == {"temperature": 0.0, "max_tokens": 3, "logprobs": 2}
    assert render({"body": {"prompt": ["Once"]}}).prompt == "Once"


@pytest.mark.parametrize("tables", [{}, {"prompt": {"system": "Be kind."}}])
def test_a_column_called_body_beside_the_rows_own_prompt_sets_nothing(tables: Any) -> None:
    own = {"prompt": "hi"} if tables else {"messages": [{"role": "user", "content": "hi"}]}
    found = render({**own, "body": {"seed": 4, "tools": "hammer", "instruction": "x"}}, **tables)
    assert "seed" not in found.sampling
    assert (found.tools, found.chat_template_kwargs) == (None, {})


def test_templates_win_over_what_the_row_brings() -> None:
    fields = {"body": {**CHAT, "temperature": 1}, "messages": [], "q": "mine"}
    found = render(fields, prompt={"user": "{{ q }}"})
    assert found.messages == [{"role": "user", "content": "mine"}]
    assert found.sampling["temperature"] == 0.0


# What is wrong with a row is its own error

IMAGES = {"prompt": {"user": "u", "images": ["{{ a }}"]}}
OWN = {"prompt": {"user": "u"}, "sampling": {"sampling_column": "params"}}
SCHEMA = {"type": "json_schema"}
OF_TEMPLATES: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (
        {"title": "x", "body_text": "y"},
        {"prompt": {"user": "{{ titel }}"}},
        "'titel' is undefined; the row has title, body_text; did you mean 'title'?",
    ),
    ({}, {"prompt": {"user": "{{ x }}"}}, "no fields"),
    ({"x": {"a": 1}}, {"prompt": {"user": "{{ x.b }}"}}, "'dict object' has no attribute 'b'"),
    ({"b": "x"}, IMAGES, "prompt.images.0: '{{ a }}' is undefined; the row has b"),
    ({"question": "x"}, {}, "nothing to send: set prompt.user, or give each row"),
    ({"question": "x"}, {}, "the row has question"),
]
OF_MEDIA: list[tuple[Any, str]] = [
    *((nothing, "no image") for nothing in (None, "", [])),
    ("no.png", "no.png"),
]
NO_MESSAGES: list[Any] = [
    None,
    [],
    "hello",
    ["hello"],
    [{"content": "x"}],
    [{"role": 1, "content": "x"}],
    [{"role": "user"}],
    [{"role": "user", "content": 3}],
    [{"role": "user", "content": ["x"]}],
    [{"role": "user", "content": [{"type": "text"}]}],
    [{"role": "user", "content": [{"type": "gesture", "gesture": "x"}]}],
    [{"role": "user", "content": [{"type": ["image"]}]}],
]
NO_BODIES: list[tuple[Any, str]] = [
    (5, "found int"),
    ({}, "neither messages nor a prompt that is one text"),
    ({"prompt": ["a", "b"]}, "neither messages nor a prompt that is one text"),
    ({"prompt": [1, 2]}, "neither messages nor a prompt that is one text"),
    ({**CHAT, "tools": [{}]}, "body.tools: [0].function: is missing"),
    ({**CHAT, "functions": [{}]}, "body.functions: not supported"),
    ({"prompt": "x", "best_of": 3}, "body.best_of: not supported"),
    ({"prompt": "x", "echo": True}, "body.echo: not supported"),
    ({**CHAT, "response_format": "json"}, "body.response_format"),
    ({**CHAT, "response_format": {"type": "yaml"}}, "found type 'yaml'"),
    ({**CHAT, "response_format": SCHEMA}, "body.response_format"),
    ({**CHAT, "response_format": {**SCHEMA, "json_schema": "x"}}, "body.response_format"),
]


@pytest.mark.parametrize(
    ("kind", "fields", "tables", "words"),
    [
        *((TemplateError, *case) for case in OF_TEMPLATES),
        *((MediaError, {"a": image}, IMAGES, words) for image, words in OF_MEDIA),
        *((RequestError, {"messages": wrong}, {}, "messages: ") for wrong in NO_MESSAGES),
        *((RequestError, {"body": {"messages": wrong}}, {}, "") for wrong in NO_MESSAGES),
        *((RequestError, {"body": wrong}, {}, words) for wrong, words in NO_BODIES),
        *(
            (RequestError, {"params": own}, OWN, f"params: found {own!r}, expected an object")
            for own in ("{", "[1]", "hot", 3, ["a"], True)
        ),
    ],
)
def test_what_is_wrong_with_a_row_is_its_own_error(
    kind: type[RowError],
    fields: dict[str, Any],
    tables: dict[str, Any],
    words: str,
    media: dict[str, Any],
) -> None:
    assert words in refusal(kind, fields, media=media, **tables)


# Sampling


@pytest.mark.parametrize(
    "own", [{"temperature": 0.9, "seed": 1}, '{"temperature": 0.9, "seed": 1}']
)
def test_row_may_bring_its_own_sampling(own: Any) -> None:
    tables = {"prompt": {"user": "u"}, "sampling": {"sampling_column": "params", "top_k": 3}}
    jobs = {"temperature": 0.0, "max_tokens": 256, "top_k": 3}
    found = [render({"params": params}, **tables).sampling for params in (own, None, "")]
    assert found == [{**jobs, "temperature": 0.9, "seed": 1}, jobs, jobs]


def test_a_number_that_pandas_lacks_in_a_rows_own_sampling_leaves_the_jobs() -> None:
    own = pd.DataFrame({"temperature": [0.5, None], "top_p": [None, 0.9]}).to_dict("records")
    tables = {"prompt": {"user": "u"}, "sampling": {"sampling_column": "params", "max_tokens": 9}}
    found = [render({"params": params}, **tables).sampling for params in [*own, float("nan")]]
    jobs = {"temperature": 0.0, "max_tokens": 9}
    assert found == [{**jobs, "temperature": 0.5}, {**jobs, "top_p": 0.9}, jobs]


def test_an_adjustment_in_place_stays_with_its_row() -> None:
    def adjust(sampling: Any) -> Any:
        sampling["max_tokens"] *= 2
        sampling["stop"].append("x")
        return sampling

    sampling = {"sampling_column": "params", "max_tokens": 8, "stop": ["."]}
    row = {"params": {"top_k": 3}}
    made = job(prompt={"user": "u"}, sampling=sampling)
    renderer = PromptRenderer(made, adjust_sampling=adjust)
    for index in range(3):
        found = renderer.render(Row(index, str(index), row)).sampling
        assert (found["max_tokens"], found["stop"]) == (16, [".", "x"])


# Threads


def test_threads_may_share_a_renderer(media: dict[str, Any]) -> None:
    shared = renderer(
        vars={"tone": "brief"},
        prompt={
            "system": "{{ tone }}",
            "user": "{{ n }}{{ image }}{% for w in words %}{{ w }} {% endfor %}{{ n + 1 }}",
            "images": ["{{ photo }}"],
        },
        media=media,
    )
    photos = ["red.png", png(BLUE), "no.png"]
    fields = ({"n": n, "words": ["w"] * (n % 50), "photo": photos[n % 3]} for n in range(400))
    rows = [Row(n, str(n), its) for n, its in enumerate(fields)]

    def seen(row: Row) -> Any:
        found = render_or_fail(shared, row)
        return str(found.error) if isinstance(found, Completion) else outline(found)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(seen, rows)) == [seen(row) for row in rows]


def test_rows_that_share_an_opened_picture_all_see_the_whole_of_it(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (600, 600, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "x.png")
    shared = renderer(prompt={"user": "q", "images": ["{{ image }}"]})
    for _ in range(5):
        opened = Image.open(tmp_path / "x.png")  # decoded at first use
        ready = Barrier(4)

        def rendered(n: int, image: Image.Image = opened, ready: Barrier = ready) -> Request:
            ready.wait()
            return shared.render(Row(n, str(n), {"image": image}))

        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(rendered, range(4)))
        assert len({request.input_hash for request in found}) == 1
        assert all(np.array_equal(np.asarray(request.images[0]), pixels) for request in found)


def test_names_in_distinguishes_fields_from_functions_that_are_called() -> None:
    user = "{{ range }}{% for i in range(2) %}{{ dict(a=i) }}{% endfor %}"
    made = job(prompt={"user": user})
    assert names_in(made, made.prompt, ["{{ joiner }}"]) == {"range", "joiner"}
