"""Recognition and masking of secrets in jobs and messages.

``masked`` works on a table. It finds secrets by the names of their keys, and inside texts with URLs, headers and
``NAME=value`` pairs. ``masked_text`` works on a message of unknown origin. It removes the whole query of each URL, and
masks every secret that ``learn`` found in jobs and in the environment of this process.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any

from batchkit.config.regular_file import exists
from batchkit.config.terminal import bounded

MASK = "***"
Mask = Callable[[str], str]
FINGERPRINT = re.compile(re.escape(MASK) + "[0-9a-f]{0,6}")  # a secret's form in a manifest
# Keys whose values are text for the model or row values, never secrets.
CONTENT = frozenset(
    [
        "input.where",
        *(f"prompt.{key}" for key in (
            "system", "user", "texts", "tools", "tool_choice")),
        "sampling.structured_outputs",
        *("engine.options.chat_template", "engine.chat_template_text"),
        *("pair.query", "pair.documents"),
        *("retry.reask", "retry.reask_note"),
        "output.keep",
        *("scoring.extract", "scoring.choices", "scoring.rules"),
        *("steps.when", "steps.extract", "steps.choices"),
    ]
)  # fmt: skip

_WORDS = (
    r"(?:token|secret|password|passwd|passphrase|pwd|credential|authorization|auth|bearer|cookie|jwt"
    r"|dsn|connection[_-]?string|conn[_-]?str"
    r"|(?:api|access|secret|private|account|auth|signing|encryption|subscription|shared|master)"
    r"[_-]?key(?:[_-]?id)?)s?"
)
_NAME = re.compile(rf"(?:^|_){_WORDS}$|(?:api|access|secret|private)_?key(?:_?id)?s?$")
# A name such as max_tokens. It names a secret only if its value is text other than a number or a template.
_COUNT = re.compile(r"(?:^|_)tokens$")
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_IN_QUERIES = re.compile(
    r"(?:^|_)(?:sig|signature|key|code|hmac|policy|key_pair_id|google_?access_?id)$"
)
_PATH = re.compile(r"(?:/|%2F)|\.[a-z]\w{1,4}$", re.IGNORECASE)  # ?key=few-shot/example-0001.png
_OF_STEP = (
    re.compile(  # key of a step in a job, or in a run's identity, where the step's name is added
        r"steps\.(?:(?!prompt\.|sampling\.)\w+\.)?((?:prompt|sampling|retry|output)\..*|[^.]+)"
    )
)
_OF_ENGINE = re.compile(r"engines\.[^.]+(.*)")
_RANDOM = re.compile(r"(?=.*[a-z])(?=.*[A-Z])(?=.*\d)[\w+/=%.~-]{20,}", re.ASCII)

_SCHEME = r"(?<![a-z0-9+.-])([a-z][a-z0-9+.-]{0,30})://?"  # one slash: Path() turns // into /
# User info ends at the last @, because a password may contain any character. But the text after the colon is a port
# in host:8000/…, and a further URL in a::b (a chain of URLs).
_USER_INFO = re.compile(
    rf"{_SCHEME}([^/\s:@?#]*)(?::(?!:|\d{{1,5}}[^\w@])([^\s<>]{{0,2048}}))?@", re.IGNORECASE
)
# The text is one URL.
_ONE_URL = re.compile(_USER_INFO.pattern.replace(r"[^\s<>]", "."), re.IGNORECASE)
# Elsewhere user info is a user or a container.
_TOKEN_SCHEMES = ("http", "https", "git+http", "git+https")
_PAIR = re.compile(r"((?:^|[?&;])([\w.%-]+)=)([^&;#\s\"'<>]*)")
_JSON_PAIR = re.compile(r'("([\w.-]{1,64})"\s*:\s*")([^"]*)')
_HEADER = re.compile(r"(([\w-]+):\s*+(?:(?:Bearer|Basic)\s++)?)(\S.*)")
_BEARER = re.compile(r"(\bBearer\s+)([\w.~+/=-]{8,})")

_URL = re.compile(rf"{_SCHEME}[^\s\"'<>]*", re.IGNORECASE)
_BAD_HOST = re.compile(  # text in place of a port or an IPv6 address may be a misplaced key
    r"(^https?://(?:\[(?=[^/?#@]*[g-z])|(?:[^/:@?#\[]*|\[[\da-f:.]*\]):(?=\d*[a-z])))[^/?#@{]{8,}(?=[/?#]|$)",
    re.IGNORECASE,
)
_SAID = re.compile(
    rf"((?<![\w.-])([\"']?)([\w.-]{{0,64}}?{_WORDS})\2(\s?[=:]\s*)(?:Bearer\s+|Basic\s+)?)"
    r"(\"[^\"]*\"|'[^']*'|[^\s,;&\"')\]}]+)",
    re.IGNORECASE,
)
_WORD = re.compile(r"[A-Za-z]+[.:]?")
_COOKIE = re.compile(r"(\bcookie:\s*+)([^\r\n\"']+)", re.IGNORECASE)
_IN_EACH = re.compile(  # a quick test: _SAID and _COOKIE match only texts with one of these words
    r"token|secret|passw|passphrase|pwd|credential|auth|bearer|cookie|jwt|dsn|conn|key"
)
_SHORTEST = 8  # characters; a shorter secret would also match ordinary words in messages

_known: set[str] = set()


def is_secret(name: str, value: Any = 0) -> bool:
    """Return True if ``name`` names a secret: ``api_key``, ``x-api-key``, ``hfToken``, ``HF_TOKEN``. A name that ends
    in ``tokens`` is usually a token count. It names a secret only if ``value`` (or, for a list, a text in it) is
    neither a number nor a template."""
    is_count, is_named = _kinds_of_name(name)
    if is_count:
        texts = value if isinstance(value, list | tuple) else [value]
        texts = [text for text in texts if isinstance(text, str) and "{{" not in text]
        return not all(text.strip().isdecimal() for text in texts)
    return is_named


@lru_cache(4096)  # called many times for each key of the job and of the environment
def _kinds_of_name(name: str) -> tuple[bool, bool]:
    """Return two booleans: whether ``name`` may be a token count, and whether it names a secret."""
    plain = _CAMEL.sub("_", name).replace("-", "_").replace(".", "_").replace(" ", "_").lower()
    return _COUNT.search(plain) is not None, _NAME.search(plain) is not None


def without_user_info(url: str, mask: Mask = lambda _: MASK) -> str:
    """Return ``url`` (or a text that contains URLs) with passwords and tokens in front of host names masked."""
    pattern = _ONE_URL if _URL.match(url) and "\n" not in url else _USER_INFO
    return pattern.sub(lambda found: _without_user_info(found, mask), url)


@lru_cache(4096)
def home_of(key: str) -> str:
    """Return the top-level key with the same meaning as ``key``, so that one rule covers both keys:
    ``engines.big.model`` gives ``engine.model``, ``steps.draft.prompt.user`` gives ``prompt.user``. Other keys are
    returned unchanged."""
    if found := _OF_ENGINE.fullmatch(key):
        return f"engine{found[1]}"
    if found := _OF_STEP.fullmatch(key):
        return found[1] if "." in found[1] else f"steps.{found[1]}"
    return key


def masked(
    value: Any, key: str = "", mask: Mask = lambda _: MASK, mask_part: Mask = lambda _: MASK
) -> Any:
    """Return ``value``, found at the dotted ``key`` of a job, with its secrets masked. If a key names a secret,
    ``mask`` gets its whole value and returns the replacement. In a URL, a header or ``NAME=value``, only the secret
    part is replaced: by ``mask_part``, or by ``mask`` if the part only looks like a secret."""
    is_own = any(is_secret(name, value) for name in home_of(key).split("."))
    return _masked(value, key, is_own, mask, mask_part)


def secrets_in(value: Any, key: str = "") -> list[str]:
    """Return all texts in ``value`` that ``masked`` would mask. A secret that is already masked is returned as
    ``***``."""
    found: list[str] = []

    def note(secret: str) -> str:
        found.append(secret)
        return MASK

    masked(value, key, note, note)
    return found


def masked_keys(value: Any, key: str = "") -> Iterator[str]:
    """Yield the dotted keys below ``value`` that contain masked secrets."""
    if isinstance(value, Mapping):
        for name, part in value.items():
            yield from masked_keys(part, f"{key}.{name}" if key else str(name))
    elif MASK in secrets_in(value, key):
        yield key


def without_masked(value: Any, key: str) -> Any:
    """Return ``value`` without the table and list entries that contain a masked secret, because a masked value is
    useless."""
    if isinstance(value, Mapping):
        below = {name: (part, f"{key}.{name}") for name, part in value.items()}
        return {n: without_masked(*part) for n, part in below.items() if not _is_masked(*part)}
    if isinstance(value, list):
        return [without_masked(part, key) for part in value if not _is_masked(part, key)]
    return value


def _is_masked(value: Any, key: str) -> bool:
    return isinstance(value, str) and MASK in secrets_in(value, key)


def learn(*tables: Mapping[str, Any]) -> None:
    """Collect the secrets in ``tables`` (the environment, or a job), so that ``masked_text`` masks these secrets in
    this process."""
    for table in tables:
        for secret in secrets_in(table):
            if not secret.isalpha() and not ("/" in secret and exists(secret)):
                learn_secret(secret)


def learn_secret(secret: str) -> None:
    """Make ``masked_text`` mask ``secret``, unless it is shorter than 8 characters."""
    if len(secret) >= _SHORTEST:
        _known.add(secret)


def masked_text(text: str) -> str:
    """Return a message or log line with all known secrets masked, and all texts that look like secrets. Long text is
    shortened."""
    return bounded(_without_secrets(text))  # mask before cutting: half a secret is not recognized


def _without_secrets(text: str) -> str:
    for secret in sorted([one for one in [*_known] if one in text], key=len, reverse=True):
        text = text.replace(secret, MASK)
    if ":" not in text and "=" not in text and "Bearer" not in text:
        return text  # it can contain no URL, header or pair
    text = _URL.sub(lambda url: _without_query(url[0]), text)
    text = _in_text(text, lambda _: MASK, lambda _: MASK)
    if _IN_EACH.search(text.casefold()) is None:
        return text
    text = _COOKIE.sub(rf"\1{MASK}", text)
    return _SAID.sub(_say_without, text)


def _without_query(url: str) -> str:
    url = _BAD_HOST.sub(rf"\1{MASK}", url)
    path, mark, query = url.partition("?")
    return f"{path}?…" if mark and "=" in query else url


def _say_without(said: re.Match[str]) -> str:
    head, quote, name, sign = said[1], said[2], said[3], said[4]
    value = said[5]
    # "unexpected token: x", "sampling.max_token: vLLM has no such parameter"
    is_about = not set("-_.") & set(name) or _WORD.fullmatch(value) is not None
    is_sentence = not quote and "=" not in sign and is_about
    if not is_secret(name) or (is_sentence and name.lower() != "authorization"):
        return said[0]
    return head + (value[0] + MASK + value[0] if value[0] in "\"'" else MASK)


def _masked(value: Any, key: str, is_own: bool, mask: Mask, mask_part: Mask) -> Any:
    if home_of(key) in CONTENT:
        return value
    if isinstance(value, Mapping):
        return {
            name: _masked(
                part,
                f"{key}.{name}" if key else str(name),
                is_own or (key != "engines" and is_secret(str(name), part)),
                mask,
                mask_part,
            )
            for name, part in value.items()
        }
    if isinstance(value, list | tuple):
        return [_masked(part, key, is_own, mask, mask_part) for part in value]
    if is_own and isinstance(value, str | int | float) and not isinstance(value, bool):
        return mask(str(value)) if value != "" else value
    return _in_text(value, mask_part, mask) if isinstance(value, str) else value


def _in_text(text: str, mask: Mask, mask_alike: Mask) -> str:
    """Return ``text`` with secrets in URLs, headers and ``NAME=value`` pairs replaced by ``mask``, and values that only
    look like secrets replaced by ``mask_alike``."""
    if "\n" not in text and (header := _HEADER.fullmatch(text)) and is_secret(header[2]):
        return header[1] + mask(header[3])
    if "@" in text:
        text = without_user_info(text, mask)
    if "=" in text:
        text = _PAIR.sub(lambda found: _without_value(found, mask, mask_alike), text)
    if '"' in text:
        text = _JSON_PAIR.sub(
            lambda found: found[1] + (mask(found[3]) if is_secret(found[2]) else found[3]), text
        )
    return _BEARER.sub(lambda found: found[1] + mask(found[2]), text) if "Bearer" in text else text


def _without_user_info(found: re.Match[str], mask: Mask) -> str:
    scheme, user, password = found[1].lower(), found[2], found[3]
    head = found[0][: found.start(2) - found.start()]
    if password and scheme != "github":  # github://org:repo@ref
        return f"{head}{user}:{mask(password)}@"
    if user and password is None and scheme in _TOKEN_SCHEMES:
        return f"{head}{mask(user)}@"
    return found[0]


def _without_value(found: re.Match[str], mask: Mask, mask_alike: Mask) -> str:
    head, name, value = found[1], found[2], found[3]
    if not value or value.startswith(("{", "$")):  # a template or shell placeholder
        return found[0]
    in_query = head[0] in "?&"
    plain = _CAMEL.sub("_", name).replace("-", "_").lower()
    if is_secret(name) or (in_query and _IN_QUERIES.search(plain) is not None):
        may_be_path = plain.endswith(("key", "code")) and not is_secret(name)
        return head + (mask_alike if may_be_path and _PATH.search(value) else mask)(value)
    looks_secret = FINGERPRINT.fullmatch(value) or _RANDOM.fullmatch(value)
    return head + mask_alike(value) if in_query and looks_secret else found[0]
