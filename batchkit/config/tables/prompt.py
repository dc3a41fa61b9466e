"""``[prompt]`` and ``[media]``."""

from __future__ import annotations

from typing import Any, Literal

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
    """How a row becomes a prompt. Templates are Jinja2; an unknown name fails the row. `row` is all of its
    columns: `{{ row["my column"] }}` for a name that is no plain word."""

    system: Identity[str | None] = None
    """System message."""
    system_file: Identity[str | None] = None
    """… or a file that holds it."""
    user: Identity[str | None] = None
    """User message."""
    user_file: Identity[str | None] = None
    """… or a file that holds it."""
    allow_constant: Free[bool] = False
    """Run even if the prompt uses no column, so that it is the same for all rows."""
    images: Identity[list[str]] = Field([])
    """One template per image: a path under `media.root`, a data: URI, an http(s) URL, or `{{ column
    }}` alone for a column of bytes (or a list of images)."""
    videos: Identity[list[str]] = Field([])
    """One template per video, as `images`. `{{ video }}` in `user` is the place of a video in the text;
    those that have none come before it, behind the images."""
    audios: Identity[list[str]] = Field([])
    """One template per clip of sound, as `videos`; `{{ audio }}` is its place. Of a video, its sound."""
    captions: Identity[list[str]] = Field([])
    """A text before each image, one per image."""
    texts: Identity[dict[str, str]] = Field({})
    """Text files, by their names in the templates: one path template each, under `media.root`. A
    file that is missing fails its row."""
    order: Identity[Literal["images-first", "text-first"]] = "images-first"
    """What comes first in the user message."""
    chat: Identity[bool] = True
    """`false` sends `user` as it is, without the model's chat template. That is the default of the
    tasks `embed` and `classify` if the prompt has no images."""
    chat_template_kwargs: Identity[dict[str, Any]] = Field({})
    """Names for the model's chat template, for example `enable_thinking = false`."""
    tools: Identity[str | list[dict[str, Any]] | None] = None
    """The functions that the model may call, as OpenAI defines them: a JSON file with a list of
    them, the list itself (`[[prompt.tools]]`), or `{{ column }}` for a row's own, a list or its
    JSON text; an empty value means none."""
    tool_choice: Identity[str | dict[str, Any] | None] = None
    """`auto` (default), `none`, `required`, or the name of the function to call. vLLM's grammars
    enforce the last two, for which it needs `engine.tool_call_parser`."""

    lora: Identity[str | None] = None
    """The row's adapter: a template that gives a name of `[engine.loras]`, for example `{{ adapter
    }}`; an empty one means the model alone. With `openai-server`, the model that the row asks for
    instead of `engine.model`."""

    @property
    def has_media(self) -> bool:
        return bool(self.images or self.videos or self.audios)

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
        if self.captions and len(self.captions) != len(self.images):
            raise ValueError(
                f"{len(self.captions)} captions for {len(self.images)} images;"
                " give one per image or none"
            )
        if not self.chat and (self.system or self.system_file or self.images or self.tools):
            raise ValueError("chat = false sends plain text: leave out system, images and tools")
        if self.tool_choice is not None and self.tools is None:
            raise ValueError(
                f"tool_choice is {self.tool_choice!r}, and there are no tools: give them"
            )
        if isinstance(self.tools, list):
            try:
                choice_of(self.tool_choice, self.tools)
            except ValueError as error:
                raise ValueError(f"tool_choice: {error}") from None
        return self


class MediaTable(Table):
    """What may be opened as an image, sound or video, and how large it may be."""

    root: Free[str] = "."
    """Folder, or fsspec URL (`s3://bucket/images`, `gs://`, `hf://`), that images and texts are
    looked up in; what is outside is refused; a folder's symbolic links are resolved. A store's keys
    and passwords belong in the environment. If the rows are files outside of the default, it is
    their folder."""
    allow_urls: Free[list[str]] = Field([])
    """Hosts that images may be fetched from, as `host` (ports 80 and 443) or `host:port`. A name
    must resolve to public addresses; an IP address is allowed as it is."""
    max_bytes: Free[PositiveInt] = 64 * 2**20
    """Largest file or download."""
    max_pixels: Identity[PositiveInt] = 1605632
    """Larger images are downscaled to it, their aspect kept."""
    min_pixels: Identity[NonNegativeInt] = 0
    """Smaller images are upscaled to it."""
    factor: Identity[PositiveInt | None] = None
    """Both sides become multiples of it, by the rule of Qwen-VL's own `smart_resize`: 32 for
    Qwen3-VL, 28 for Qwen2-VL and Qwen2.5-VL. Then the model sees the very size that its processor
    would have made of the whole image."""
    pdf_dpi: Identity[PositiveInt] = 150
    """Pages of PDFs are drawn at it; `max_pixels` holds for them, too."""
    video_frames: Identity[PositiveInt] = 32
    """Frames that the model sees of a video, evenly from the first to the last, each within `max_pixels`."""
    video_fps: Identity[PositiveFloat | None] = None
    """… or so many for each second of it."""
    max_video_seconds: Free[PositiveFloat] = 3600
    """Longer videos are refused."""
    audio_sample_rate: Identity[PositiveInt] = 16000
    """Sound is resampled to it, and mixed to one channel. Most models hear 16,000 samples a second."""
    max_audio_seconds: Free[PositiveFloat] = 7200
    """Longer sound is refused."""
    max_decode_bytes: Free[PositiveInt] = 2**30
    """An image or a clip that would need more memory while decoding is refused."""
    max_memory_bytes: Free[PositiveInt] = 2**30
    """Decoded pixels and samples held at a time, from opening an image or a clip to its row's record."""

    @model_validator(mode="after")
    def _ordered(self) -> MediaTable:
        if self.min_pixels > self.max_pixels:
            raise ValueError(f"min_pixels {self.min_pixels} is over max_pixels {self.max_pixels}")
        if self.video_fps is not None and "video_frames" in self.model_fields_set:
            raise ValueError("video_frames and video_fps are both given; keep one")
        return self
