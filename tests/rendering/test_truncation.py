"""A prompt that is too long: which of the row's texts is cut, where, and by how much."""

from __future__ import annotations

import base64
import copy
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image

from batchkit.errors import PromptTooLongError
from batchkit.execution.processor import ProductionBatchProcessor
from batchkit.rendering.truncation import MARK, cut_at, longest_text, next_cut
from batchkit.types import Cut, Request, Row
from tests.support.chat_server import MODEL, Refused, error, serving
from tests.support.dry_runs import job
from tests.support.images import png
from tests.support.rendering import renderer

WORDS = "".join(f"w{n} " for n in range(500))
DATA_URI = "data:image/png;base64," + "A" * 9000


def too_long(prompt_tokens: int | None = 1000, max_model_len: int | None = 512) -> Any:
    error = PromptTooLongError("too long")
    error.prompt_tokens, error.max_model_len = prompt_tokens, max_model_len
    return error


# Which text


PARTS = [
    {"type": "image_url", "image_url": {"url": DATA_URI}},
    {"type": "image_url", "image_url": DATA_URI},
    {"type": "image", "image": DATA_URI},
    {"type": "text", "text": "what is it?"},
]
MESSAGES = {"messages": [{"role": "user", "content": PARTS}]}
DEEP = {"a": "short", "b": {"c": ["x", {"d": "the longest"}], "e": 7, "f": None}}


@pytest.mark.parametrize(
    ("fields", "names", "path"),
    [
        (DEEP, {"a", "b"}, ["b", "c", 1, "d"]),
        ({"text": "short", "source": WORDS}, {"text"}, ["text"]),
        ({"text": "short", "source": WORDS}, {"title"}, None),
        ({"text": 3, "list": []}, {"text", "list"}, None),
        (MESSAGES, {"messages"}, ["messages", 0, "content", 3, "text"]),
        ({"type": WORDS}, {"type"}, ["type"]),
    ],
)
def test_the_longest_text_of_the_fields_that_are_read_is_found(
    fields: Any, names: set[str], path: list[Any] | None
) -> None:
    place = longest_text(fields, names)
    assert (place and list(place.path)) == path
    text = fields
    for part in path or ():
        text = text[part]
    assert place is None or place.length == len(text)


# Where it is cut


@given(st.text(min_size=1), st.data())
def test_head_and_tail_are_kept_and_a_mark_stands_between(text: str, data: st.DataObject) -> None:
    kept = data.draw(st.integers(0, len(text)))
    cut = cut_at(text, (), kept)
    head, tail = cut[: math.ceil(kept / 2)], cut[math.ceil(kept / 2) + len(MARK) :]
    assert cut == head + MARK + tail
    assert text.startswith(head)
    assert text.endswith(tail)
    assert len(head) + len(tail) == kept
    cut.encode()


def test_cut_changes_a_copy_and_only_the_way_to_the_text() -> None:
    fields = {"meta": {"n": [1]}, "doc": {"pages": [{"text": "0123456789"}, {"text": "x"}]}}
    before = copy.deepcopy(fields)
    cut = cut_at(fields, ("doc", "pages", 0, "text"), 5)
    assert fields == before
    assert cut["doc"]["pages"] == [{"text": f"012{MARK}89"}, {"text": "x"}]
    assert cut["meta"] is fields["meta"]
    assert cut["doc"]["pages"][1] is fields["doc"]["pages"][1]


# How much


def answer_room(max_tokens: int, max_model_len: int) -> int:
    """Tokens that a cut prompt is to leave free."""
    return max(1, min(max_tokens, max_model_len // 2))


class Tokens:
    """An engine that only counts: so many characters a token, and what the prompt has besides."""

    def __init__(
        self, max_model_len: int, overhead: int, per_token: Callable[[int, int], float]
    ) -> None:
        self.max_model_len, self.overhead, self.per_token = max_model_len, overhead, per_token

    def count(self, length: int, cut: Cut | None) -> int:
        """``per_token`` gives it for a character of a text of ``length``."""
        kept = length if cut is None else cut.kept
        tail = kept // 2
        text = [*range(kept - tail), *range(length - tail, length)]
        mark = 0 if cut is None else len(MARK.encode())
        return self.overhead + mark + math.ceil(sum(1 / self.per_token(n, length) for n in text))

    def tries(self, length: int, max_tokens: int) -> Iterator[Cut]:
        """Each cut that is tried, up to the one that fits or the last that does not."""
        cut, room = None, 1
        while (tokens := self.count(length, cut)) + room > self.max_model_len:
            cut = next_cut(length, cut, too_long(tokens, self.max_model_len), max_tokens)
            if cut is None:
                return
            yield cut
            room = cut.answer_tokens

    def fits(self, length: int, cut: Cut, max_tokens: int) -> bool:
        room = answer_room(max_tokens, self.max_model_len)
        return self.count(length, cut) + room <= self.max_model_len


# So little is cut that the mark takes up what was gained.
@example(length=400, max_model_len=512, overhead=0.75, per_token=3.0, max_tokens=0)
@given(
    length=st.one_of(st.integers(1, 2000), st.integers(2000, 40_000)),
    max_model_len=st.sampled_from([64, 512, 2048, 32_768]),
    overhead=st.floats(0, 1.3),
    per_token=st.floats(0.5, 8),
    max_tokens=st.one_of(st.sampled_from([0, 1, 16, 256]), st.integers(0, 10**6)),
)
def test_a_handful_of_cuts_fits_or_gives_up(
    length: int, max_model_len: int, overhead: float, per_token: float, max_tokens: int
) -> None:
    tokens = Tokens(max_model_len, round(overhead * max_model_len), lambda *_: per_token)
    whole = tokens.count(length, None)
    cuts = list(tokens.tries(length, max_tokens))
    assert len(cuts) <= 8
    assert all(cut.prompt_tokens == whole for cut in cuts)
    assert all(later.kept < earlier.kept for earlier, later in itertools.pairwise(cuts))
    assert all(0 < cut.kept < length for cut in cuts)
    room = answer_room(max_tokens, max_model_len) + 1 + max_model_len // 64
    could_keep = (max_model_len - room - tokens.overhead - len(MARK.encode())) * per_token
    if whole >= max_model_len and could_keep >= 200 and length >= 400:
        assert cuts
        assert tokens.fits(length, cuts[-1], max_tokens)
        assert cuts[-1].kept >= 0.6 * could_keep, "more was cut than need be"


UNEVEN: dict[str, Callable[[int, int], float]] = {
    "sparse middle": lambda n, length: 8 if 0.1 < n / length < 0.9 else 0.7,
    "dense middle": lambda n, length: 0.5 if 0.1 < n / length < 0.9 else 6,
    "blank middle": lambda n, length: 100 if 0.01 < n / length < 0.99 else 0.5,
    "dense first half": lambda n, length: 0.7 if n / length < 0.5 else 8,
    "sparse ends": lambda n, length: 2 if 0.02 < n / length < 0.98 else 8,
    "mixed": lambda n, length: 2 + n % 7,
}


@pytest.mark.parametrize("overhead", [0, 20, 300, 400])
@pytest.mark.parametrize("text", UNEVEN)
def test_uneven_text_is_cut_until_it_fits(text: str, overhead: int) -> None:
    tokens = Tokens(512, overhead, UNEVEN[text])
    for length in (3000, 20_000, 160_000):
        if tokens.count(length, None) < 512:
            continue
        cuts = list(tokens.tries(length, 16))
        assert tokens.fits(length, cuts[-1], 16), (length, cuts)
        assert len(cuts) <= 8


def test_no_cut_without_a_count_or_where_the_text_is_not_what_is_too_long() -> None:
    assert next_cut(1000, None, too_long(None, None), 16) is None
    assert next_cut(1000, None, too_long(700, None), 16) is None
    assert next_cut(3, None, too_long(700), 16) is None
    assert len(list(Tokens(512, 600, lambda *_: 4).tries(100_000, 16))) <= 8


@pytest.mark.parametrize("counts", [(200, 1000), (990, 1000), (10**9, 1000), (1, 10**9), (500, 1)])
@pytest.mark.parametrize("length", [40, 5000, 10**7])
def test_a_text_that_is_refused_for_ever_is_cut_ten_times_at_most(
    length: int, counts: tuple[int, int]
) -> None:
    cut, sizes = None, [length]
    while cut := next_cut(length, cut, too_long(*counts), 512):
        sizes.append(cut.kept + len(MARK))
        assert len(sizes) <= 11
    assert all(later < earlier for earlier, later in itertools.pairwise(sizes))


def test_a_prompt_that_is_refused_with_a_count_that_fits_is_made_shorter() -> None:
    """As by a server that counts the whole answer in: 200 tokens and 900 are more than 1,000."""
    cut = next_cut(800, None, too_long(200, 1000), 900)
    assert cut.kept == (800 - len(MARK)) // 2


def test_a_count_of_cut_tokens_below_zero_is_none(tmp_path: Path) -> None:
    """The refusal said 30 tokens, the answer 40."""
    seen: list[str] = []

    def refused_once(text: str, body: dict[str, Any]) -> None:
        if "w1" in text and not seen:
            seen.append(text)
            counts = {"n_prompt_tokens": 30, "n_ctx": 1000}
            raise Refused(400, error("too long", "exceed_context_size_error", **counts))

    with serving(refused_once) as server:
        engine = {"kind": "openai-server", "model": MODEL, "base_url": server.url}
        made = job(engine=engine, output={"dir": str(tmp_path)}, retry=CUT["retry"])
        summary = ProductionBatchProcessor(made, quiet=True).process([{"prompt": WORDS}])
    (record,) = summary.records()
    assert record["usage"]["prompt_tokens"] > 30
    assert record.get("truncated_tokens") is None


# A request with its text cut


CUT = {"sampling": {"max_tokens": 16}, "retry": {"on_too_long": "truncate-middle"}}


def shortened(
    fields: Mapping[str, Any], error: PromptTooLongError | None = None, **tables: Any
) -> tuple[Request, Request | None]:
    """The row's request, and what becomes of it after ``error``."""
    one = renderer(**{**CUT, **tables})
    before = copy.deepcopy({name: v for name, v in fields.items() if name != "picture"})
    request = one.render(Row(7, "q7", fields), attempt=3)
    shorter = one.shortened(request, error or too_long())
    assert all(fields[name] == value for name, value in before.items())
    return request, shorter


def cut_text(shorter: Request | None) -> str:
    """The last message's text, or the prompt, of a request that has been cut once."""
    assert shorter.cut is not None
    text = shorter.prompt
    if shorter.messages is not None:
        text = shorter.messages[-1]["content"]
    assert isinstance(text, str)
    assert text.count(MARK) == 1
    return text


def test_all_but_the_text_stays() -> None:
    request, shorter = shortened(
        {"q": WORDS, "params": {"top_k": 4, "temperature": 0.9}},
        prompt={"system": "Be brief.", "user": "Sum up: {{ q }}\nIn one line."},
        sampling={"max_tokens": 9, "sampling_column": "params"},
        retry={"temperatures": [0.1, 0.2, 0.3], "on_too_long": "truncate-middle"},
    )
    text = cut_text(shorter)
    assert shorter.row is request.row
    assert shorter.input_hash == request.input_hash
    assert shorter.attempt == request.attempt == 3
    assert shorter.sampling == request.sampling
    assert request.sampling["temperature"] == 0.3
    assert shorter.messages[0] == {"role": "system", "content": "Be brief."}
    assert text.startswith("Sum up: w0 w1 ")
    assert text.endswith("w498 w499 \nIn one line.")
    kept = len(text) - len("Sum up: \nIn one line.") - len(MARK)
    assert (shorter.cut.kept, shorter.cut.prompt_tokens) == (kept, 1000)


@pytest.mark.parametrize("own", [100.0, "100", {"a": 1}, [1], True, 10**400])
def test_a_rows_own_max_tokens_may_be_anything(own: Any) -> None:
    """A server may refuse the prompt first, or take a number with a point, as pandas writes them."""
    _, shorter = shortened(
        {"q": WORDS, "params": {"max_tokens": own}},
        prompt={"user": "{{ q }}"},
        sampling={"sampling_column": "params"},
    )
    assert cut_text(shorter).startswith("w0 w1 ")
    assert shorter.sampling["max_tokens"] == own


def test_second_cut_is_made_of_the_whole_text() -> None:
    one = renderer(**CUT, prompt={"user": "{{ q }}"})
    first = one.shortened(one.render(Row(0, "0", {"q": WORDS})), too_long(1000))
    second = one.shortened(first, too_long(600))
    assert second.cut.kept < first.cut.kept
    assert second.cut.prompt_tokens == 1000
    assert cut_text(second) == cut_at(WORDS, (), second.cut.kept)


def test_text_in_the_system_prompt_is_cut_where_it_is_the_longest() -> None:
    _, shorter = shortened(
        {"rules": WORDS, "q": "why?"}, prompt={"system": "{{ rules }}", "user": "{{ q }}"}
    )
    assert MARK in shorter.messages[0]["content"]
    assert shorter.messages[1]["content"] == "why?"


def test_the_column_of_an_image_is_not_cut() -> None:
    image = "data:image/png;base64," + base64.b64encode(png() + bytes(9 * len(WORDS))).decode()
    prompt = {"user": "{{ image }}{{ q }}", "images": ["{{ image }}"]}
    _, shorter = shortened({"image": image, "q": WORDS}, prompt=prompt)
    assert MARK in shorter.messages[0]["content"][1]["text"]


def test_the_file_of_a_text_is_cut(tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text(f"BEGIN {WORDS}END")
    prompt = {"user": "{{ file }}|{{ q }}", "texts": {"file": "long.txt"}}
    _, shorter = shortened({"q": "why?"}, prompt=prompt, media={"root": str(tmp_path)})
    assert cut_text(shorter).startswith("BEGIN w0")
    assert cut_text(shorter).endswith("END|why?")


LONGER = WORDS * 2
LATER = {"prompt": {"user": "{% if steps.a.reasoning %}{{ steps.a.text }}{% endif %}"}}


@pytest.mark.parametrize(
    ("fields", "tables"),
    [
        ({"q": WORDS}, {"prompt": {"user": "{{ q }}"}}),
        ({"q": WORDS}, {"prompt": {"user": "{{ q }}", "chat": False}}),
        ({"q": {"pages": ["x", WORDS]}}, {"prompt": {"user": "{{ q.pages | join(' ') }}"}}),
        ({"q": WORDS, "s": "x"}, {"prompt": {"system": "{{ s }}", "user": "a{{ q | trim }}"}}),
        ({"prompt": WORDS}, {"prompt": {"chat": False}}),
        ({"body": {"prompt": [WORDS]}}, {}),
        ({"q": WORDS, "html": LONGER}, {"prompt": {"user": "{{ q }}"}}),
        ({"q": {"text": WORDS, "html": LONGER}}, {"prompt": {"user": "{{ q.text }}"}}),
        ({"steps": {"a": {"reasoning": LONGER, "text": WORDS}}}, LATER),
        ({"prompt": WORDS, "body": LONGER}, {"prompt": {"system": "Be brief."}}),
        ({"messages": [{"role": "user", "content": WORDS}], "prompt": LONGER}, {}),
        ({"messages": [{"role": "user", "content": WORDS}], "body": LONGER}, {}),
        ({"body": {"prompt": WORDS, "user": LONGER}, "prompt": LONGER}, {}),
        ({"body": {"messages": [{"role": "user", "content": WORDS}], "prompt": LONGER}}, {}),
        ({"q": WORDS}, {"prompt": {"user": "{{ q }}{{ rules }}"}, "vars": {"rules": LONGER}}),
    ],
)
def test_the_rows_own_prompt_is_cut_and_no_longer_text_beside_it(
    fields: Mapping[str, Any], tables: dict[str, Any]
) -> None:
    _, shorter = shortened(fields, **tables)
    text = cut_text(shorter)
    assert "w0 w1 " in text
    assert "w498 w499" in text
    assert len(text) < len(WORDS) + (len(LONGER) if "vars" in tables else 0)


def test_arguments_of_a_tool_call_stay_json() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": f'{{"a": "{LONGER}"}}'}}
    messages = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "user", "content": WORDS},
    ]
    _, shorter = shortened({"messages": messages})
    assert cut_text(shorter)
    assert shorter.messages[0] == messages[0]


@pytest.mark.parametrize(
    ("fields", "tables"),
    [
        ({"prompt": WORDS}, {"retry": {}}),
        ({"q": WORDS}, {"prompt": {"user": "no name at all"}}),
        ({"q": 3}, {"prompt": {"user": "{{ q }}"}}),
        ({"q": "short"}, {"prompt": {"user": "{{ q }}" + WORDS}}),
        ({"q": WORDS}, {"prompt": {"user": "{{ rules }}"}, "vars": {"rules": WORDS}}),
        ({"q": f'"{WORDS}"'}, {"prompt": {"user": "{{ 1 // (q | length > 1800) | int }}"}}),
        ({"q": WORDS}, {"prompt": {"user": "{{ q }}"}, "error": PromptTooLongError("no count")}),
    ],
)
def test_none_where_nothing_can_be_cut(fields: Mapping[str, Any], tables: dict[str, Any]) -> None:
    assert shortened(fields, **tables)[1] is None


def test_images_stay_and_so_does_what_they_are_accounted_at(tmp_path: Path) -> None:
    Image.new("RGB", (40, 20), (9, 8, 7)).save(tmp_path / "a.png")
    request, shorter = shortened(
        {"q": WORDS, "file": "a.png"},
        prompt={"images": ["{{ file }}", "a.png"], "user": "{{ q }}"},
        media={"root": str(tmp_path)},
    )
    assert [image.size for image in shorter.images] == [(40, 20), (40, 20)]
    assert shorter.images[0].getpixel((0, 0)) == (9, 8, 7)
    assert shorter.media_bytes == request.media_bytes == 2 * 4 * 40 * 20
