"""Prompts for vLLM's speech models. The model's own class builds them, as in vLLM's server."""

from __future__ import annotations

import os
from typing import Any

from batchkit.config.tables import JobConfig
from batchkit.errors import JobError, MediaError, RequestError
from batchkit.types import Audio, Request, Speech

_RULES = "batchkit.engines.vllm.timestamps:TimestampRules"
_NEW_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"  # that runner has another interface for logits processors
_ENGLISH_ONLY = (
    51864  # tokens in the vocabulary of an English-only Whisper; multilingual ones have more
)
_START, _END, _FIRST_STAMP = "<|startoftranscript|>", "<|endoftext|>", "<|0.00|>"
_NO_STAMPS = "<|notimestamps|>"
_WRONG_MARK, _MARK = "<|prev|>", "<|startofprev|>"  # vLLM's name for the token, and Whisper's


def timestamp_options(job: JobConfig, model_config: Any) -> dict[str, Any]:
    """Return the vLLM options that make the model follow Whisper's timestamp rules; {} if the rules can't or need not
    be applied."""
    if not _follows_rules(job, model_config):
        return {}
    os.environ[_NEW_RUNNER] = "0"
    return {"logits_processors": [*job.engine.options.get("logits_processors", ()), _RULES]}


def _follows_rules(job: JobConfig, model_config: Any) -> bool:
    is_whisper = job.task == "transcribe" and model_config.hf_config.model_type == "whisper"
    can = "speculative_config" not in job.engine.options and os.environ.get(_NEW_RUNNER) != "1"
    return is_whisper and job.speech.timestamps and can


class SpeechPrompts:
    """A builder of the prompts of ``task = "transcribe"`` for one model.

    Raises:
        JobError: vLLM can't transcribe with this model.
    """

    def __init__(self, job: JobConfig, model_config: Any, tokenizer: Any) -> None:
        from vllm.model_executor.model_loader import get_model_cls
        from vllm.model_executor.models import supports_transcription

        self._model_config, self._model = model_config, get_model_cls(model_config)
        if not supports_transcription(self._model):
            raise JobError(
                f'task = "transcribe": vLLM can\'t transcribe with {model_config.model}; give a speech model,'
                " for example openai/whisper-large-v3-turbo"
            )
        self._config = self._model.get_speech_to_text_config(model_config, "transcribe")
        self._marks = tokenizer.get_vocab()
        self.has_stamps = bool(getattr(self._model, "supports_segment_timestamp", False))
        self._languages = list[int]()
        if getattr(self._model, "supports_explicit_language_detection", False):
            marks = (f"<|{language}|>" for language in self._model.supported_languages)
            self._languages = [self._marks[mark] for mark in marks if mark in self._marks]
        self._is_english_only = _is_english_only(model_config)
        if self._is_english_only:
            self._languages = [self._marks["<|en|>"]] if "<|en|>" in self._marks else []
        self._rule_ids = list[int]()
        if _follows_rules(job, model_config) and {_END, _FIRST_STAMP} <= self._marks.keys():
            self._rule_ids = [self._marks[_END], self._marks[_FIRST_STAMP]]

    def limit(self, params: Any, speech: Speech) -> None:
        """Restrict ``params`` to the tokens that the request asks for: a language, or text with timestamps."""
        if self.has_stamps:
            params.skip_special_tokens = False  # timestamps may count as special tokens
        if speech.asks_language and self._languages:
            params.allowed_token_ids = self._languages
        elif speech.timestamps and self._rule_ids:
            params.extra_args = {**(params.extra_args or {}), "timestamps": self._rule_ids}

    def spoken_text(self, answer: str) -> str:
        """Return the spoken text in ``answer``, without the name of the language that some models write first."""
        spoken_text: str = self._model.post_process_output(answer)
        return spoken_text

    def prompt(self, request: Request) -> Any:
        """Return the prompt as vLLM's input. Raises RowError if the model does not support the sound or the
        language."""
        from vllm.config.speech_to_text import SpeechToTextParams

        speech, (audio,) = request.speech, request.clips
        assert speech is not None
        language = speech.language or ("en" if self._is_english_only else None)
        self._check(audio, language)
        if speech.asks_language and self._languages:
            return self._model.get_language_detection_prompt(audio.samples, self._config)
        params = SpeechToTextParams(
            audio=audio.samples,
            stt_config=self._config,
            model_config=self._model_config,
            language=language,
            request_prompt=speech.prompt,
        )
        prompt = self._model.get_generation_prompt(params)
        decoder = prompt.get("decoder_prompt") if isinstance(prompt, dict) else None
        if isinstance(decoder, dict) and isinstance(text := decoder.get("prompt"), str):
            decoder["prompt"] = self._corrected(text, speech.timestamps)
        return prompt

    def _corrected(self, text: str, with_stamps: bool) -> str:
        if text.startswith(_WRONG_MARK) and _WRONG_MARK not in self._marks:
            text = _MARK + text.removeprefix(_WRONG_MARK)
        if self._is_english_only:  # trained without the tokens for language and task
            text = text.rpartition(_START)[0] + _START + _NO_STAMPS
        if not (with_stamps and self.has_stamps):
            return text
        # Without the rules, a timestamp at the start makes the model write the other timestamps.
        can_start = not self._rule_ids and _FIRST_STAMP in self._marks
        return text.replace(_NO_STAMPS, _FIRST_STAMP if can_start else "")

    def _check(self, audio: Audio, language: str | None) -> None:
        rate, most_s = round(self._config.sample_rate), self._config.max_audio_clip_s
        if audio.sample_rate != rate:
            raise MediaError(
                f"the model expects sound at {rate} Hz, but media.audio_sample_rate is"
                f" {audio.sample_rate}; set it to {rate}"
            )
        if most_s is not None and len(audio.samples) > most_s * rate:
            raise MediaError(
                f"{audio.in_words}: the model reads only the first {most_s} s; set speech.part_seconds ="
                f" {most_s}"
            )
        if self._is_english_only and language != "en":
            raise RequestError(
                f"speech.language: found {language!r}, but {self._model_config.model} knows only English; use a"
                " multilingual Whisper, whose name does not end in .en"
            )
        try:
            self._model.validate_language(language)
        except ValueError as error:
            raise RequestError(f"speech.language: {error}") from error


def _is_english_only(model_config: Any) -> bool:
    """Return True if the model is a Whisper for English only, such as tiny.en."""
    if model_config.hf_config.model_type != "whisper":
        return False
    stated = model_config.try_get_generation_config().get("is_multilingual")
    return model_config.hf_config.vocab_size == _ENGLISH_ONLY if stated is None else not stated
