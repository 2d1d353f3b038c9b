"""The prompts that the rollout benchmarks share."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from transformers import AutoTokenizer

from aoffpolicy.samples import Prompt


def make_prompts(path: Path, count: int) -> tuple[Prompt, ...]:
    """Chat prompts of about 45 tokens: one sum each."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    numbers = np.random.default_rng(0).integers(1, 1000, (count, 2)).tolist()
    prompts = []
    for uid, (left, right) in enumerate(numbers):
        chat = [{"role": "user", "content": f"What is {left} + {right}? Answer with the number only."}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
        prompts.append(Prompt(uid=uid, token_ids_P=np.array(ids, dtype=np.int32)))
    return tuple(prompts)
