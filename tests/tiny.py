"""Tiny random models with a character tokenizer, saved as ordinary Hugging Face folders."""

from __future__ import annotations

import string
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'][0] }}>{{ message['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token a printable character; <pad>, <eos>, <unk> are 0, 1, 2."""
    characters = sorted(string.digits + string.ascii_letters + " +-*/=.,:;?!<>()'\n")
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<eos>", "<unk>", *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        chat_template=CHAT_TEMPLATE,
    )


def _sizes(layers: int, hidden: int, tie: bool, positions: int = 256) -> dict[str, object]:
    return dict(
        vocab_size=96,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=positions,
        tie_word_embeddings=tie,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )


def tiny_llama(
    path: Path, *, tie: bool = False, layers: int = 2, hidden: int = 32, positions: int = 256, seed: int = 0
) -> Path:
    """Save a random float32 Llama with its tokenizer into `path`; returns `path`."""
    torch.manual_seed(seed)
    LlamaForCausalLM(LlamaConfig(**_sizes(layers, hidden, tie, positions))).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


def tiny_qwen3(
    path: Path, *, tie: bool = True, layers: int = 2, hidden: int = 32, head_dim: int = 8, seed: int = 0
) -> Path:
    """Save a random float32 Qwen3 (q/k norms) with its tokenizer into `path`; returns `path`."""
    torch.manual_seed(seed)
    Qwen3ForCausalLM(Qwen3Config(**_sizes(layers, hidden, tie), head_dim=head_dim)).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


def tiny_qwen3_moe(path: Path, *, tie: bool = False, layers: int = 2, hidden: int = 128, seed: int = 0) -> Path:
    """Save a random float32 Qwen3-MoE (4 experts, 2 a token) with its tokenizer into `path`; returns `path`."""
    torch.manual_seed(seed)
    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, decoder_sparse_step=1)
    config = Qwen3MoeConfig(**_sizes(layers, hidden, tie), **experts, head_dim=32, norm_topk_prob=True)
    Qwen3MoeForCausalLM(config).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path
