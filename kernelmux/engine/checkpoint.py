"""Read tensors and sizes from a folder of safetensors or from a GGUF file, both under transformers' names."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

Tensors = Iterator[tuple[str, Tensor, int]]  # name, tensor, how many there are in all

GGUF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def locate(path: Path) -> Path:
    """The folder with config.json, or the .gguf file, that `path` means."""
    if (path.is_file() and path.suffix == ".gguf") or (path / "config.json").is_file():
        return path
    found = sorted(path.glob("*.gguf")) if path.is_dir() else []
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(f.name for f in found)
        raise ValueError(f"model is {str(path)!r}, a folder with {len(found)} GGUF files; name one: {names}")
    what = "neither config.json nor a .gguf in it" if path.is_dir() else "no such folder or .gguf file"
    raise ValueError(f"model is {str(path)!r}, {what}; download a checkpoint and give its path")


def open_checkpoint(path: Path) -> tuple[Any, Callable[[], Tensors]]:
    """The config, with the attributes of a transformers config, and a function that goes through the tensors."""
    return _open_gguf(path) if path.suffix == ".gguf" else _open_folder(path)


def _open_folder(path: Path) -> tuple[Any, Callable[[], Tensors]]:
    from safetensors import safe_open
    from transformers import AutoConfig, GenerationConfig

    config = AutoConfig.from_pretrained(path)
    with contextlib.suppress(OSError):  # generation_config.json is optional; its end tokens come before the config's
        config.eos_token_id = GenerationConfig.from_pretrained(path).eos_token_id or config.eos_token_id
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ValueError(f"model is {str(path)!r}, without a .safetensors file; convert its weights to safetensors")

    def tensors() -> Tensors:
        with contextlib.ExitStack() as stack:
            opened = [stack.enter_context(safe_open(f, framework="pt")) for f in files]
            total = sum(len(file.keys()) for file in opened)
            for file in opened:
                for name in file.keys():  # noqa: SIM118 - not a dict
                    yield name, file.get_tensor(name), total

    return config, tensors


def _open_gguf(path: Path) -> tuple[Any, Callable[[], Tensors]]:
    from gguf import GGUFReader, dequantize

    reader = GGUFReader(path)
    facts = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("tokenizer.")}
    arch = facts["general.architecture"]
    config = _gguf_config(arch, {key.removeprefix(arch + "."): value for key, value in facts.items()})
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}

    def tensors() -> Tensors:
        for tensor in reader.tensors:
            *where, part, _ = tensor.name.split(".")  # blk.3.attn_q.weight
            value = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
            if part in heads:  # stored for interleaved rotation; back to the two halves
                value = value.unflatten(0, (heads[part], -1, 2)).transpose(1, 2).reshape(value.shape)
            prefix = f"model.layers.{where[1]}." if where else ""
            yield f"{prefix}{GGUF_NAMES.get(part, part)}.weight", value, len(reader.tensors)

    config.tie_word_embeddings = all(t.name != "output.weight" for t in reader.tensors)
    config.rope_factors = next(
        (torch.from_numpy(t.data.copy()) for t in reader.tensors if "rope_freqs" in t.name), None
    )
    return config, tensors


def _gguf_config(arch: str, facts: dict[str, Any]) -> SimpleNamespace:
    heads, width = facts.get("attention.head_count", 1), facts.get("embedding_length", 0)
    rope = {"rope_type": facts.get("rope.scaling.type", "default"), "factor": facts.get("rope.scaling.factor", 1.0)}
    rope["rope_type"] = {"none": "default", "yarn": "yarn from GGUF"}.get(rope["rope_type"], rope["rope_type"])
    return SimpleNamespace(
        model_type=arch,
        num_hidden_layers=facts.get("block_count"),
        hidden_size=width,
        num_attention_heads=heads,
        num_key_value_heads=facts.get("attention.head_count_kv", heads),
        head_dim=facts.get("attention.key_length") or facts.get("rope.dimension_count") or width // heads,
        rms_norm_eps=facts.get("attention.layer_norm_rms_epsilon"),
        max_position_embeddings=facts.get("context_length"),
        sliding_window=facts.get("attention.sliding_window"),
        rope_parameters={**rope, "rope_theta": facts.get("rope.freq_base", 10000.0)},
        eos_token_id=None,  # the tokenizer knows
    )
