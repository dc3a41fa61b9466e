"""The tables ``[prompt]`` and ``[media]``."""

from __future__ import annotations

from typing import Any

from pydantic import (
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from batchkit.config.tables.base import Free, Identity, Table
from batchkit.config.tool_definitions import check_parameters, check_tools, choice_of


class PromptTable(Table):
    """How a row becomes a prompt. Templates are Jinja2. A row fails if its template uses an unknown name. `row` holds
    all columns: write `{{ row["my column"] }}` for a column whose name is not an identifier."""

    system: Identity[str | None] = None
    """Template of the system message."""
    system_file: Identity[str | None] = None
    """File that holds the template of the system message, instead of `system`."""
    user: Identity[str | None] = None
    """Template of the user message."""
    user_file: Identity[str | None] = None
    """File that holds the template of the user message, instead of `user`."""
    allow_constant: Free[bool] = False
    """Allow a prompt that uses no column and is therefore the same for all rows."""
    images: Identity[list[str]] = Field([])
    """One template per image. Each gives a path under `media.root`, a data: URI or an http(s) URL. `{{ column }}`
    alone may name a column with image bytes or with a list of images. `{{ image }}` in `user` marks where an image is
    inserted. Images without a mark are inserted before the text."""
    videos: Identity[list[str]] = Field([])
    """One template per video, written like `images`. `{{ video }}` marks its place. Videos without a mark are inserted
    before the text, after the images."""
    audios: Identity[list[str]] = Field([])
    """One template per audio clip, written like `videos`. `{{ audio }}` marks its place. Of a video file, the sound is
    used."""
    texts: Identity[dict[str, str]] = Field({})
    """Text files that templates can use, by name. Each value is a template of a path under `media.root`. A row fails
    if its file is missing."""
    chat: Identity[bool] = True
    """Apply the model's chat template. With `false`, `user` is sent as it is. The default is `false` for the pooling
    tasks if the prompt has no images, videos or audio clips."""
    chat_template_kwargs: Identity[dict[str, Any]] = Field({})
    """Variables passed to the model's chat template, for example `enable_thinking = false`."""
    tools: Identity[str | list[dict[str, Any]] | None] = None
    """Functions that the model may call, in OpenAI's format: a JSON file with a list, the list itself
    (`[[prompt.tools]]`), or `{{ column }}` for a list (or its JSON text) in each row. An empty value means no
    tools."""
    tool_choice: Identity[str | dict[str, Any] | None] = None
    """Which function the model calls: `auto` (the default), `none`, `required`, or a function's name. vLLM enforces
    `required` and a name with a grammar and needs `engine.tool_call_parser` for both."""

    lora: Identity[str | None] = None
    """Template that gives the row's LoRA adapter: a name from `[engine.loras]`, for example `{{ adapter }}`. An empty
    result selects the base model. With `openai-server`, it gives the model name to use instead of `engine.model`."""

    @property
    def has_media(self) -> bool:
        return bool(self.images or self.videos or self.audios)

    @property
    def marks(self) -> frozenset[str]:
        """Names in `user` that mark the place of an image, a video or a sound. They are not columns of the row."""
        kinds = ("image", "video", "audio")
        return frozenset(kind for kind in kinds if self.chat and getattr(self, f"{kind}s"))

    @field_validator("tools")
    @classmethod
    def _are_definitions(cls, tools: Any) -> Any:
        if isinstance(tools, list):
            check_tools(tools)
            check_parameters(tools)
        return tools

    @field_validator("tool_choice")
    @classmethod
    def _is_a_choice(cls, choice: Any) -> Any:
        return choice if isinstance(choice, str) else choice_of(choice, None)

    @model_validator(mode="after")
    def _coherent(self) -> PromptTable:
        for name in ("system", "user"):
            if getattr(self, name) is not None and getattr(self, f"{name}_file") is not None:
                raise ValueError(f"{name} and {name}_file are both given; keep one")
        if not self.chat and (self.system or self.system_file or self.images or self.tools):
            raise ValueError("chat = false sends plain text: leave out system, images and tools")
        if self.tool_choice is not None and self.tools is None:
            raise ValueError(
                f"tool_choice is {self.tool_choice!r}, but there are no tools: set prompt.tools"
            )
        if isinstance(self.tools, list):
            try:
                choice_of(self.tool_choice, self.tools)
            except ValueError as error:
                raise ValueError(f"tool_choice: {error}") from None
        return self


class MediaTable(Table):
    """Which images, sounds and videos may be opened, and how large they may be."""

    root: Free[str] = "."
    """Folder or fsspec URL (`s3://bucket/images`, `gs://`, `hf://`) that holds the images and texts. Paths outside it
    are refused; symbolic links are resolved first. Put the keys and passwords of a store into the environment. If the
    rows are files outside the default root, their folder is used."""
    allow_urls: Free[list[str]] = Field([])
    """Hosts that images may be downloaded from, as `host` (ports 80 and 443) or `host:port`. A host name must resolve
    to public addresses; an IP address in the list is always allowed."""
    max_bytes: Free[PositiveInt] = 64 * 2**20
    """Maximum size of a file or download, in bytes."""
    max_pixels: Identity[PositiveInt] = 1605632
    """Maximum number of pixels. Larger images are scaled down; the aspect ratio is kept."""
    min_pixels: Identity[NonNegativeInt] = 0
    """Minimum number of pixels. Smaller images are scaled up."""
    factor: Identity[PositiveInt | None] = None
    """Round both sides to multiples of this number, by the rule of Qwen-VL's `smart_resize`: 32 for Qwen3-VL, 28 for
    Qwen2-VL and Qwen2.5-VL. The model then sees the same size as its own processor would produce from the full
    image."""
    pdf_dpi: Identity[PositiveInt] = 150
    """Resolution for rendering PDF pages, in dots per inch. `max_pixels` applies to the result."""
    num_frames: Identity[PositiveInt] = 32
    """Number of frames taken from a video, evenly spaced from first to last. `max_pixels` applies to each frame."""
    fps: Identity[PositiveFloat | None] = None
    """Number of frames taken per second of video, instead of `num_frames` per video."""
    max_video_seconds: Free[PositiveFloat] = 3600
    """Maximum length of a video, in seconds. The rows of longer videos fail."""
    audio_sample_rate: Identity[PositiveInt] = 16000
    """Sample rate in Hz. Sound is resampled to this rate and mixed to one channel. Most models expect 16,000 Hz."""
    max_audio_seconds: Free[PositiveFloat] = 7200
    """Maximum length of a sound, in seconds. The rows of longer sounds fail."""
    max_decode_bytes: Free[PositiveInt] = 2**30
    """Maximum memory for decoding one image or clip, in bytes. Rows that need more fail."""
    max_memory_bytes: Free[PositiveInt] = 2**30
    """Maximum memory for decoded pixels and samples of all rows in progress, in bytes."""

    @model_validator(mode="after")
    def _ordered(self) -> MediaTable:
        if self.min_pixels > self.max_pixels:
            raise ValueError(
                f"min_pixels {self.min_pixels} is over max_pixels {self.max_pixels}; lower min_pixels or raise max_pixels"
            )
        if self.fps is not None and "num_frames" in self.model_fields_set:
            raise ValueError("num_frames and fps are both given; keep one")
        return self
