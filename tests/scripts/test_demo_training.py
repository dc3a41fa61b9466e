"""The demo model's training: what it computes is what a chat of its own computes."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import train_demo_model as training

pytestmark = pytest.mark.release


@pytest.fixture(scope="module")
def reader() -> Any:
    """Random weights, as they would be after a round through bfloat16."""
    torch.manual_seed(0)
    reader = training.DemoReader(training.make_tokenizer())
    with torch.no_grad():
        for weight in reader.parameters():
            weight += 0.02 * torch.randn_like(weight)
            weight.copy_(weight.bfloat16())
        patches = reader.visual.patch_embed.linear.weight
        patches.copy_((patches / 6).bfloat16() * 6)
    return reader


def test_questions_beside_each_other_are_answered_as_in_chats_of_their_own(
    reader: Any, tmp_path: Path
) -> None:
    from transformers import AutoModelForImageTextToText, AutoProcessor

    tokenizer = training.make_tokenizer()
    table = training.make_table(Random(0), (5, 2))
    asked = list(islice(training.questions(Random(0), table), 6))
    pictures = training.make_pictures([table], [training.own_picture(table)])
    chats = training.make_chats(tokenizer, pictures, [asked])
    with torch.no_grad():
        _, together = training.losses(reader, pictures, chats)

    training.write_folder(tmp_path / "model", tokenizer, reader)
    processor = AutoProcessor.from_pretrained(tmp_path / "model")
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "model", dtype=torch.float32)
    image = training.draw(table).convert("RGB")
    alone = []
    for question in asked:
        content = [{"type": "image"}, {"type": "text", "text": question.text}]
        prompt = processor.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True
        )
        answer = question.answer + "<|im_end|>"
        inputs = processor(text=[prompt + answer], images=[image], return_tensors="pt")
        length = len(tokenizer.encode(answer).ids)
        with torch.no_grad():
            alone.append(model(**inputs).logits[0, -length - 1 : -1])
    assert torch.cat(alone).std() > 0.1
    torch.testing.assert_close(together, torch.cat(alone), atol=0.02, rtol=0)
