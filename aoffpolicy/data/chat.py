"""From a row's prompt to token ids: system prompt, suffix, chat template, tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from aoffpolicy.data.rows import Row
from aoffpolicy.errors import DataError


@dataclass(frozen=True, slots=True)
class PromptEncoder:
    """Turns rows into prompt tokens, in batches.

    Args:
        tokenizer: A Hugging Face tokenizer.
        chat: Apply the tokenizer's chat template.
        system_prompt: System message of chat prompts that bring none.
        suffix: Put after the text of the prompt, or after its last user message.
    """

    tokenizer: Any
    chat: bool
    system_prompt: str
    suffix: str

    def __post_init__(self) -> None:
        if self.chat and not getattr(self.tokenizer, "chat_template", None):
            raise DataError("data.chat: the model's tokenizer has no chat template; set data.chat = false")

    def encode(self, rows: Sequence[Row]) -> list[np.ndarray]:
        """Token ids of each row's prompt: int32 [P], without tokens where the prompt is empty.

        Raises:
            DataError: A prompt is a list of messages although chat is off, or the chat template refuses it.
        """
        texts = ["" if _is_empty(row["prompt"]) else self._text(row["prompt"]) for row in rows]
        token_ids = self.tokenizer(texts, add_special_tokens=not self.chat)["input_ids"]
        return [np.asarray(ids if text else [], dtype=np.int32) for text, ids in zip(texts, token_ids, strict=True)]

    def _text(self, prompt: str | Sequence[Mapping[str, str]]) -> str:
        if not self.chat:
            if not isinstance(prompt, str):
                raise DataError("data.chat: a prompt is a list of chat messages, so data.chat = false cannot be used")
            return prompt + self.suffix
        from jinja2 import TemplateError

        messages = self._messages(prompt)
        try:
            text: str = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except TemplateError as error:
            raise DataError(f"the model's chat template refuses the prompt {messages!r:.200}: {error}") from error
        return text

    def _messages(self, prompt: str | Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(m) for m in prompt]
        last_user = next((m for m in reversed(messages) if m["role"] == "user"), messages[-1])
        last_user["content"] += self.suffix
        if self.system_prompt and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self.system_prompt})
        return messages


def _is_empty(prompt: str | Sequence[Mapping[str, str]]) -> bool:
    """Whether nobody asks anything."""
    if isinstance(prompt, str):
        return not prompt.strip()
    return not any(message["content"].strip() for message in prompt if message["role"] != "system")
