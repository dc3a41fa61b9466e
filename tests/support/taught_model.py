"""A tiny Qwen2 that has learned by heart what to answer, so that parsers read what a model generated.

It knows each question of ``LESSONS`` and answers it in the format of a model family. ``main`` is a
program that makes it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.support.forks import Fork

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"the {name} of a town",
            "parameters": {"type": "object", "properties": {"town": {"type": "string"}}},
        },
    }
    for name in ("weather", "price")
]
HERMES = '<tool_call>\n{"name": "weather", "arguments": {"town": "north"}}\n</tool_call>'
XML = "<tool_call>\n<function=price>\n<parameter=town>\nsouth\n</parameter>\n</function>\n</tool_call>"
MISTRAL = '[TOOL_CALLS][{"name": "weather", "arguments": {"town": "north"}}]'
LLAMA = '<|python_tag|>{"name": "price", "parameters": {"town": "south"}}'
GRANITE = '<|tool_call|>[{"name": "weather", "arguments": {"town": "north"}}]'
LESSONS = {
    "bread": "<think>\nthe old baker opens his shop\n</think>\n\nin the north and in the south",
    "cake": f"<think>\nthe garden is full of birds\n</think>\n\n{HERMES}",
    "tea": f"<think>\nsome years are better\n</think>\n\nthe lake is white\n{HERMES}\n{HERMES}",
    "coffee": f"<think>\nrain on the roof\n</think>\n\n{XML}",
    "stone": "a child reads a letter</think>the answer is yes, no",
    "wood": f"a column for every month</think>{LLAMA}",
    "glass": f"{MISTRAL}",
    "music": "Here is my thought process: rain on the roof. Here is my response: nine children",
    "stars": f"{GRANITE}",
    "snow": "the night market closes late",
}
SPECIAL = ("[TOOL_CALLS]", "<|python_tag|>", "<|tool_call|>")
PLAIN = ("<think>", "</think>", "<tool_call>", "</tool_call>")  # as in Qwen3, text like any other
TEMPLATE = """\
{%- if tools %}{% for tool in tools %}{{ tool.function.name }} {% endfor %}{% endif -%}
{%- for message in messages %}
    {{- '<|im_start|>' + message.content + '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>' }}{% endif %}
{%- if enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
"""
_STEPS, _RATE, _GOOD_ENOUGH = 400, 1e-2, 0.002


def build_taught_model(folder: Path) -> None:
    """Made by this program, in a process that has imported what that takes."""
    with Fork([sys.executable, "-m", __name__, str(folder)], text=True) as process:
        assert process.wait(timeout=240) == 0


def main() -> None:
    from batchkit.commands.demo_model import build_demo_model

    folder = Path(sys.argv[1])
    build_demo_model(folder, text_only=True)
    _teach(folder)


def _teach(folder: Path) -> None:
    import torch
    from tokenizers import AddedToken
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in PLAIN])
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.apply(model._init_weights)
    model.resize_token_embeddings(-(-len(tokenizer) // 64) * 64)
    texts = [
        (_prompt(tokenizer, question, tools), answer + tokenizer.eos_token)
        for question, answer in LESSONS.items()
        for tools in (None, TOOLS)
    ]
    ids = [[tokenizer.encode(part) for part in pair] for pair in texts]
    longest = max(len(prompt) + len(answer) for prompt, answer in ids)
    tokens = torch.full((len(ids), longest), tokenizer.pad_token_id)
    labels = torch.full((len(ids), longest), -100)
    for n, (prompt, answer) in enumerate(ids):
        tokens[n, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        labels[n, len(prompt) : len(prompt) + len(answer)] = torch.tensor(answer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE, weight_decay=0.0)
    for step in range(_STEPS):
        for group in optimizer.param_groups:
            group["lr"] = _RATE * min(1.0, (step + 1) / 20) * (1 - step / _STEPS)
        loss = model(input_ids=tokens, labels=labels).loss
        if loss.item() < _GOOD_ENOUGH:
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["tokenizer_class"] = "Qwen2Tokenizer"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def _prompt(tokenizer: Any, question: str, tools: Any) -> str:
    text: str = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}],
        tools=tools,
        add_generation_prompt=True,
        tokenize=False,
    )
    return text


if __name__ == "__main__":
    main()
