"""Train the demo speech model, a small Whisper that hears the digits of `batchkit demo digits`.

    python scripts/train_speech_model.py FOLDER [--seconds 900] [--threads 2]

Takes minutes on a CPU. FOLDER gets the model in the hub's layout, in bfloat16; every hundred steps the share of held-out
recordings that are heard right is printed. The same command continues from `last.pt`, which is kept there.

The model hears 8 seconds. Its time stamps begin with the embedding that the encoder adds to the frame of that time, so
that it has to learn only where to look.
"""

from __future__ import annotations

import argparse
import re
import time
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np
import torch
from tokenizers.pre_tokenizers import ByteLevel
from torch import nn
from torch.nn import functional as F
from transformers import (
    GenerationConfig,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperProcessor,
    WhisperTokenizer,
)

from batchkit.commands.demo_digits import SAMPLE_RATE, DigitRecording, make_recording

WINDOW_S = 8
MARKS = ["<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|translate|>", "<|transcribe|>"]
MARKS += ["<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"]
STAMPS = [f"<|{n / 50:.2f}|>" for n in range(50 * WINDOW_S + 1)]
START = "<|startoftranscript|><|en|><|transcribe|>"
MOST_TOKENS = 96
BATCH = 24


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=900)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    tokenizer, extractor = make_tokenizer(), make_extractor()
    torch.manual_seed(0)
    model = make_model(tokenizer)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    last = arguments.folder / "last.pt"
    step = train(model, tokenizer, extractor, arguments.seconds, last)
    print(f"{step} steps, {sum(its.numel() for its in model.parameters()):,} parameters")
    print(f"heard right: {right(model, tokenizer, extractor, 200):.3f}")
    save(model, tokenizer, extractor, arguments.folder)


def make_tokenizer() -> WhisperTokenizer:
    letters = {letter: n for n, letter in enumerate(sorted(ByteLevel.alphabet()))}
    return WhisperTokenizer(vocab=letters, merges=[], additional_special_tokens=[*MARKS, *STAMPS])


def make_extractor() -> WhisperFeatureExtractor:
    return WhisperFeatureExtractor(chunk_length=WINDOW_S)


def make_model(tokenizer: WhisperTokenizer) -> WhisperForConditionalGeneration:
    end, start = tokenizer.convert_tokens_to_ids(MARKS[:2])
    ends = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
    config = WhisperConfig(
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,  # vLLM on a CPU needs 32 numbers a head
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        max_source_positions=50 * WINDOW_S,
        max_target_positions=MOST_TOKENS,
        vocab_size=len(tokenizer),
        decoder_start_token_id=start,
        attn_implementation="eager",
        suppress_tokens=None,
        begin_suppress_tokens=None,
        **ends,
    )
    model = WhisperForConditionalGeneration(config)
    model.generation_config = GenerationConfig(**ends, decoder_start_token_id=start)
    first = tokenizer.convert_tokens_to_ids(STAMPS[0])
    with torch.no_grad():
        places = model.model.encoder.embed_positions.weight
        model.model.decoder.embed_tokens.weight[first : first + len(places)] = 0.3 * places
    return model


def train(
    model: WhisperForConditionalGeneration,
    tokenizer: WhisperTokenizer,
    extractor: WhisperFeatureExtractor,
    seconds: float,
    last: Path,
) -> int:
    probe = nn.Linear(64, 11)
    both = nn.ModuleList([model, probe])
    optimizer = torch.optim.AdamW(both.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.01)
    step, spent, random = 0, 0.0, Random("training")
    if last.exists():
        state = torch.load(last)
        both.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step, spent, random = state["step"], state["spent"], Random(f"training {state['step']}")
    losses, began = [], time.monotonic() - spent
    while (spent := time.monotonic() - began) < seconds:
        rate = 3e-3 * min(1, (step + 1) / 100, 1.05 - spent / seconds)
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss, of_answers = loss_of(model, probe, make_batch(random, tokenizer, extractor))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(both.parameters(), 1.0)
        optimizer.step()
        losses.append(of_answers)
        step += 1
        if step % 100 == 0:
            heard = right(model, tokenizer, extractor, 24)
            print(
                f"{step} {spent:.0f} s loss {np.mean(losses[-100:]):.3f} right {heard:.2f}",
                flush=True,
            )
            state = {"model": both.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "step": step, "spent": spent}, last)
    return step


class Batch(NamedTuple):
    """A training batch. ``features``: mel spectrograms. ``tokens``: input of the decoder;
    ``labels``: the token that follows each. ``digits``: the digit of each frame of the encoder, 10
    for none. ``seen``: for each token, the frames that the next token is about; if there are none,
    the attention is not trained."""

    features: torch.Tensor
    tokens: torch.Tensor
    labels: torch.Tensor
    digits: torch.Tensor
    seen: torch.Tensor


def make_batch(
    random: Random, tokenizer: WhisperTokenizer, extractor: WhisperFeatureExtractor
) -> Batch:
    made = [spoken(random) for _ in range(BATCH)]
    start = tokenizer(START, add_special_tokens=False).input_ids
    first = tokenizer.convert_tokens_to_ids(STAMPS[0])
    end, letter = tokenizer.eos_token_id, tokenizer("0", add_special_tokens=False).input_ids[0]
    longest = len(start) + 2 + 3 * max(len(it.digits) for it in made)
    tokens = torch.full((BATCH, longest), end)
    labels = torch.full((BATCH, longest), -100)
    digits = torch.full((BATCH, 50 * WINDOW_S), 10)
    seen = torch.zeros(BATCH, longest, 50 * WINDOW_S)
    for row, its in enumerate(made):
        prompt = [*start, first] if random.random() < 0.2 else start  # vLLM's server begins so
        ids, frames = [*prompt], []
        for heard in its.digits:
            a, b = (min(round(at * 50), 50 * WINDOW_S) for at in heard[1:])
            ids += [first + a, letter + int(heard.digit), first + b]
            frames += [(a - 1, a + 3), (a + 1, b - 1), (b - 3, b + 1)]
            digits[row, a:b] = int(heard.digit)
        tokens[row, : len(ids)] = torch.tensor(ids)
        labels[row, len(prompt) - 1 : len(ids)] = torch.tensor([*ids[len(prompt) :], end])
        for n, (a, b) in enumerate(frames, len(prompt) - 1):
            seen[row, n, max(a, 0) : b] = 1
    return Batch(mel([it.samples for it in made], extractor), tokens, labels, digits, seen)


def loss_of(
    model: WhisperForConditionalGeneration, probe: nn.Linear, its: Batch
) -> tuple[torch.Tensor, float]:
    """Return the loss. Besides the answers, it trains the digit that the encoder finds in each
    frame, and the frames to which the decoder attends, because learning these from answers alone
    would take hours."""
    made = model(
        input_features=its.features,
        decoder_input_ids=its.tokens,
        labels=its.labels,
        output_attentions=True,
    )
    frames = F.cross_entropy(
        probe(made.encoder_last_hidden_state).flatten(0, 1), its.digits.flatten()
    )
    trained = its.seen.any(-1)
    looks = [
        -((layer[:, 0] * its.seen).sum(-1)[trained] + 1e-6).log().mean()
        for layer in made.cross_attentions
    ]
    return made.loss + frames + 0.3 * sum(looks), made.loss.item()


def spoken(random: Random) -> DigitRecording:
    made = make_recording(
        random, WINDOW_S if random.random() < 0.5 else random.uniform(0.5, WINDOW_S)
    )
    return made._replace(samples=made.samples * 10 ** random.uniform(-0.5, 0.1))


def mel(recordings: list[np.ndarray], extractor: WhisperFeatureExtractor) -> torch.Tensor:
    """Return the mel spectrograms of all ``recordings``, equal to those of ``extractor``."""
    whole = np.zeros((len(recordings), WINDOW_S * SAMPLE_RATE), np.float32)
    for row, samples in zip(whole, recordings, strict=True):
        row[: len(samples)] = samples[: len(row)]
    window = torch.hann_window(extractor.n_fft)
    stft = torch.stft(
        torch.from_numpy(whole),
        extractor.n_fft,
        extractor.hop_length,
        window=window,
        return_complex=True,
    )
    power = stft[..., :-1].abs() ** 2
    filters = torch.from_numpy(extractor.mel_filters).float()
    logs = torch.clamp(filters.T @ power, min=1e-10).log10()
    logs = torch.maximum(logs, logs.amax(dim=(1, 2), keepdim=True) - 8.0)
    return (logs + 4.0) / 4.0


@torch.no_grad()
def right(model, tokenizer, extractor, count: int) -> float:
    """Return the fraction of held-out recordings in which the model finds each digit once, within
    0.1 s."""
    random, heard = Random("held out"), 0
    model.eval()
    for _ in range(0, count, BATCH):
        made = [make_recording(random, WINDOW_S) for _ in range(BATCH)]
        features = mel([it.samples for it in made], extractor)
        start = tokenizer(START, add_special_tokens=False).input_ids
        states = model.model.encoder(features).last_hidden_state
        tokens = torch.tensor([start] * BATCH)
        for _ in range(MOST_TOKENS - len(start)):
            hidden = model.model.decoder(
                input_ids=tokens, encoder_hidden_states=states
            ).last_hidden_state
            following = model.proj_out(hidden[:, -1]).argmax(-1, keepdim=True)
            tokens = torch.cat([tokens, following], 1)
            if (tokens == tokenizer.eos_token_id).any(1).all():
                break
        heard += sum(
            map(is_right, made, ["".join(tokenizer.convert_ids_to_tokens(its)) for its in tokens])
        )
    model.train()
    return heard / BATCH / -(-count // BATCH)


def is_right(made, text: str) -> bool:
    found = re.findall(r"<\|([\d.]+)\|>(\d)<\|([\d.]+)\|>", text.split("<|endoftext|>")[0])
    if [digit for _, digit, _ in found] != [it.digit for it in made.digits]:
        return False
    pairs = zip(found, made.digits, strict=True)
    return all(
        abs(float(a) - it.start) < 0.1 and abs(float(b) - it.end) < 0.1 for (a, _, b), it in pairs
    )


def save(model, tokenizer, extractor, folder: Path) -> None:
    model.to(torch.bfloat16).save_pretrained(folder)
    WhisperProcessor(extractor, tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main()
