"""The engine's parts on tiny random models: forward, paging, scheduling, sampling, loading."""

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernelmux.engine import (
    Engine,
    Layer,
    ModelConfig,
    PagePool,
    Rope,
    Sampling,
    Scheduler,
    Sequence,
    Weights,
    build_step,
    load,
    read_config,
    sample,
)
from kernelmux.engine.checkpoint import GGUF_NAMES, locate, open_checkpoint
from kernelmux.engine.loader import READERS, fuse

VOCAB, CPU = 97, torch.device("cpu")
TINY = ModelConfig(
    layers=2,
    hidden=32,
    heads=4,
    kv_heads=2,
    head_dim=16,
    eps=1e-5,
    max_positions=256,
    rope=Rope("plain", 1e4, 16),
    tied=True,
)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Two test processes with two threads each, on two cores, would wait for one another most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def weights(config: ModelConfig = TINY, seed: int = 0) -> Weights:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) / math.sqrt(shape[-1])

    width, qkv, mlp = config.hidden, (config.heads + 2 * config.kv_heads) * config.head_dim, 48
    layers = tuple(
        Layer(
            attention_norm=1 + 0.1 * random(width),
            qkv=random(qkv, width),
            out=random(width, config.heads * config.head_dim),
            mlp_norm=1 + 0.1 * random(width),
            gate_up=random(2 * mlp, width),
            down=random(width, mlp),
        )
        for _ in range(config.layers)
    )
    embedding = 4 * random(VOCAB, width)
    return Weights(embedding, layers, torch.ones(width), embedding)


def engine(config: ModelConfig = TINY, **sizes: Any) -> Engine:
    return Engine(config, weights(config), **{"page_size": 4, "cache_tokens": 512, **sizes})


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCAB, (n,), generator=generator).tolist() for n in lengths]


def run(made: Engine, sequences: list[Sequence]) -> list[list[int]]:
    for _ in made.generate(sequences):
        pass
    assert len(made.pool.unused) == made.pool.total  # every page came back
    assert all(s.finished for s in sequences)
    return [s.new_tokens for s in sequences]


def need_readers() -> None:
    for package in READERS:
        if reason := package.problem():
            pytest.skip(f"{reason.kind}: {reason}")


# -- forward --------------------------------------------------------------------------------------------------------


def plain_forward(config: ModelConfig, w: Weights, tokens: list[int]) -> Tensor:
    """The same model in plain float64 torch, one sequence, no cache."""

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + config.eps).sqrt() * weight.double()

    n, d, group = len(tokens), config.head_dim, config.heads // config.kv_heads
    angles = torch.arange(n).double()[:, None] * config.rope.theta ** (-torch.arange(0, d, 2).double() / d)
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]

    def rotate(x: Tensor) -> Tensor:
        turned = torch.complex(x[..., : d // 2], x[..., d // 2 :]) * turn
        return torch.cat([turned.real, turned.imag], -1)

    x = w.embedding[tokens].double()
    seen = torch.ones(n, n, dtype=torch.bool).tril()
    if config.window_left >= 0:
        seen &= torch.ones(n, n, dtype=torch.bool).triu(-config.window_left)
    for layer in w.layers:
        qkv = (norm(x, layer.attention_norm) @ layer.qkv.double().T).view(n, -1, d)
        q, k, v = qkv.split([config.heads, config.kv_heads, config.kv_heads], 1)
        q, k, v = rotate(q), rotate(k).repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(d)
        mixed = torch.einsum("hij,jhd->ihd", scores.masked_fill(~seen, -math.inf).softmax(-1), v)
        x = x + mixed.flatten(1) @ layer.out.double().T
        gate, up = (norm(x, layer.mlp_norm) @ layer.gate_up.double().T).chunk(2, -1)
        x = x + (gate * gate.sigmoid() * up) @ layer.down.double().T
    return norm(x, w.norm) @ w.head.double().T


@pytest.mark.parametrize("window_left", [-1, 3])
@pytest.mark.parametrize("prefill", [None, 1, 5])
def test_forward_equals_the_plain_model(window_left: int, prefill: int | None) -> None:
    config = dataclasses.replace(TINY, window_left=window_left)
    batch = prompts(13, 1, 8)
    got = engine(config).forward(batch, prefill=prefill)
    for tokens, logits in zip(batch, got, strict=True):
        torch.testing.assert_close(
            logits.double(), plain_forward(config, weights(config), tokens), atol=2e-4, rtol=2e-4
        )


def test_forward_says_when_the_cache_is_too_small() -> None:
    made = engine(cache_tokens=8)
    with pytest.raises(ValueError, match=r"the cache has room for 0 more tokens, too few; raise cache_tokens"):
        made.forward(prompts(8, 1))
    assert len(made.pool.unused) == made.pool.total


def test_rope_by_factors_equals_rope_by_formula() -> None:
    """The divisors that a GGUF file carries for Llama 3.1, and its formula, rotate alike."""
    formula = Rope("llama31", 1e4, 16, scale=8.0, low=1.0, high=4.0, old_context=64)
    frequency = 1e4 ** (-torch.arange(0, 16, 2).double() / 16)
    smooth = ((64 * frequency / (2 * math.pi) - 1.0) / (4.0 - 1.0)).clamp(0, 1)
    raw = SimpleNamespace(
        model_type="llama", num_hidden_layers=2, hidden_size=32, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, rms_norm_eps=1e-5, max_position_embeddings=256, rope_theta=1e4, tie_word_embeddings=True,
        rope_factors=1 / (smooth + (1 - smooth) / 8),
    )  # fmt: skip
    batch = prompts(50, 70)
    table = read_config(raw)
    assert table.rope.kind == "table"
    for a, b in zip(
        engine(table).forward(batch), engine(dataclasses.replace(TINY, rope=formula)).forward(batch), strict=True
    ):
        torch.testing.assert_close(a, b, atol=2e-4, rtol=2e-4)


# -- scheduling -----------------------------------------------------------------------------------------------------


def alone(batch: list[list[int]], **fields: Any) -> list[list[int]]:
    return [run(engine(), [Sequence(list(tokens), **fields)])[0] for tokens in batch]


def test_tokens_do_not_depend_on_batch_chunks_or_evictions() -> None:
    batch = prompts(3, 21, 1, 9, 16, 30)
    right = alone(batch, max_new_tokens=12)
    for sizes in (
        {},
        {"max_batch": 2},
        {"step_tokens": 5, "max_batch": 4},
        {"cache_tokens": 48, "step_tokens": 7, "max_batch": 6},  # pages run out: sequences are evicted and come back
        {"page_size": 1},
        {"page_size": 128},
    ):
        made = engine(**sizes)
        assert run(made, [Sequence(list(t), max_new_tokens=12) for t in batch]) == right, sizes


def test_pages_run_out_and_sequences_wait() -> None:
    made = engine(cache_tokens=32, max_batch=4)
    sequences = [Sequence(t, max_new_tokens=16) for t in prompts(6, 6, 6, 6)]
    waited = 0
    for sequence in sequences:
        made.submit(sequence)
    while made.scheduler.running or made.scheduler.waiting:
        made.step()
        waited += any(len(s.tokens) > s.prompt_len for s in made.scheduler.waiting)  # evicted after a first token
    assert waited and all(len(s.new_tokens) == 16 for s in sequences)


def test_requests_join_and_leave_between_steps() -> None:
    early, late = prompts(10, 7)
    right = alone([early, late], max_new_tokens=6)
    made = engine()
    first, second = Sequence(list(early), max_new_tokens=6), Sequence(list(late), max_new_tokens=6)
    made.submit(first)
    for _ in range(3):
        made.step()
    made.submit(second)
    made.step()
    assert made.scheduler.running == [first, second]
    for _ in made.generate([]):
        pass
    assert [first.new_tokens, second.new_tokens] == right


def test_a_stop_token_ends_a_sequence() -> None:
    (tokens,) = prompts(5)
    (right,) = alone([tokens], max_new_tokens=8)
    stop = right[3]
    sequence = Sequence(list(tokens), max_new_tokens=8, stop=frozenset({stop}))
    assert run(engine(), [sequence])[0] == right[: right.index(stop) + 1]
    assert sequence.finished == "stop"


def test_decodes_go_before_prompt_chunks_within_the_budget() -> None:
    pool = PagePool(TINY, 256, 4, torch.float32, CPU)
    scheduler = Scheduler(pool, max_batch=4, step_tokens=8)
    old, new = Sequence([1] * 5), Sequence([1] * 20)
    scheduler.add(old)
    assert scheduler.next() == {old: 5}
    old.cached = 5
    old.tokens.append(2)
    scheduler.add(new)
    rows = scheduler.next()
    assert list(rows.items()) == [(old, 1), (new, 7)]
    step = build_step(rows, 4)
    assert step.decode == 1
    assert step.tokens.tolist() == [2] + [1] * 7
    assert step.qo_indptr.tolist() == [0, 1, 8]
    assert step.kv_indptr.tolist() == [0, 2, 4]
    assert step.kv_indices.tolist() == old.pages + new.pages
    assert step.last_page_len.tolist() == [2, 3]


@pytest.mark.parametrize(
    ("tokens", "sizes", "text"),
    [
        ([], {}, r"a prompt has 0 tokens, at least 1 is needed; write some text"),
        (
            [1] * 40,
            {"cache_tokens": 32},
            r"a prompt and its new tokens are 104, the cache holds 32; raise cache_tokens",
        ),
        ([1] * 200, {}, r"a prompt and its new tokens are 264, the model takes 256; shorten one of them"),
        ([1], {"page_size": 0}, r"page_size is 0, at least 1; raise it"),
    ],
)
def test_what_cannot_be_served_is_refused(tokens: list[int], sizes: dict[str, int], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        engine(**sizes).submit(Sequence(tokens))


# -- sampling -------------------------------------------------------------------------------------------------------


def test_greedy_takes_the_first_of_equal_maxima() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[1, [5, 50]] = 1.0
    logits[2, -1] = 1.0
    assert sample(logits, [Sampling(top_k=3, seed=9)] * 3, [0, 1, 2]) == [0, 5, VOCAB - 1]


MIXED = [
    Sampling(),
    Sampling(0.7, seed=3),
    Sampling(1.3, top_k=5, seed=4),
    Sampling(1.0, top_p=0.8, seed=5),
    Sampling(0.9, top_k=20, top_p=0.9, min_p=0.1, seed=6),
    Sampling(2.0, min_p=0.2, seed=7),
]


def test_a_row_draws_the_same_in_any_company() -> None:
    logits = 3 * torch.randn(len(MIXED), VOCAB, generator=torch.Generator().manual_seed(2))
    index = [0, 1, 2, 3, 4, 5]
    together = sample(logits, MIXED, index)
    order = [4, 2, 0, 5, 3, 1]
    shuffled = sample(logits[order], [MIXED[i] for i in order], [index[i] for i in order])
    assert shuffled == [together[i] for i in order]
    assert [sample(logits[i : i + 1], [MIXED[i]], [index[i]])[0] for i in range(len(MIXED))] == together


def test_sampled_requests_do_not_depend_on_the_batch() -> None:
    batch = prompts(4, 11, 2, 7, 5, 9)
    right = [run(engine(), [Sequence(list(t), how, max_new_tokens=10)])[0] for t, how in zip(batch, MIXED, strict=True)]
    together = [Sequence(list(t), how, max_new_tokens=10) for t, how in zip(batch, MIXED, strict=True)]
    assert run(engine(max_batch=4, cache_tokens=64), together) == right


@pytest.mark.parametrize(
    ("how", "support"),
    [
        (Sampling(1.0, top_k=2), {0, 1}),
        (Sampling(1.0, top_p=0.65), {0, 1}),
        (Sampling(1.0, min_p=0.5), {0, 1}),
        (Sampling(1.0, top_k=3, top_p=0.4), {0}),
        (Sampling(1.0, top_k=1, min_p=0.01), {0}),
        (Sampling(1.0), {0, 1, 2, 3}),
        (Sampling(0.05), {0}),
    ],
)
def test_each_filter_keeps_what_it_should(how: Sampling, support: set[int]) -> None:
    logits = torch.tensor([0.45, 0.3, 0.15, 0.1]).log().expand(400, 4)
    seeds = [dataclasses.replace(how, seed=i) for i in range(400)]
    assert set(sample(logits, seeds, [i % 7 for i in range(400)])) == support


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"temperature": -1.0}, r"temperature is -1.0, at least 0; 0 is greedy"),
        ({"temperature": math.nan}, r"temperature is nan, at least 0"),
        ({"top_k": -1}, r"top_k is -1, at least 0; 0 is off"),
        ({"top_p": 0.0}, r"top_p is 0.0, above 0 and at most 1; 1 is off"),
        ({"min_p": 1.5}, r"min_p is 1.5, 0 to 1; 0 is off"),
        ({"seed": -1}, r"seed is -1, 0 to"),
    ],
)
def test_sampling_refuses_what_means_nothing(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Sampling(**fields)


# -- loading --------------------------------------------------------------------------------------------------------

ROPES: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 64},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
]  # fmt: skip


def save(folder: Path, rope: dict[str, Any], tied: bool, kind: str = "llama") -> Any:
    """A tiny random checkpoint of transformers with a word tokenizer; the model itself comes back."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    fields = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
        "tie_word_embeddings": tied,
        "eos_token_id": [7, 8], "bos_token_id": 1, "pad_token_id": 0, "initializer_range": 0.3,
        "attn_implementation": "eager", "rope_theta": 5000.0,
    }  # fmt: skip
    if int(transformers.__version__.split(".")[0]) >= 5:
        fields["rope_parameters"] = {**rope, "rope_theta": fields.pop("rope_theta")}
    elif rope["rope_type"] != "default":
        fields["rope_scaling"] = rope
    torch.manual_seed(0)
    if kind == "mistral":
        model = transformers.MistralForCausalLM(transformers.MistralConfig(**fields, sliding_window=6))
    else:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**fields))
    model.eval().save_pretrained(folder, max_shard_size="20KB")
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w9").save_pretrained(folder)
    return model


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope["rope_type"])
@pytest.mark.parametrize(("tied", "kind"), [(True, "llama"), (False, "llama"), (False, "mistral")])
def test_a_checkpoint_folder_gives_the_logits_of_transformers(
    tmp_path: Path, rope: dict[str, Any], tied: bool, kind: str
) -> None:
    need_readers()
    model = save(tmp_path, rope, tied, kind)
    seen: dict[str, tuple[int, int]] = {}
    read = load(tmp_path, torch.float32, CPU, lambda what, done, total: seen.update({what: (done, total)}))
    assert seen and all(done == total or done == 0 for done, total in seen.values())
    assert read.stop == {7, 8, 9}
    assert read.encode("w3 w5") == [3, 5]
    assert (read.weights.head is read.weights.embedding) == tied
    batch = prompts(40, 3, 90)
    made = Engine(read.config, read.weights, page_size=4)
    for prefill in (None, 2):
        for tokens, logits in zip(batch, made.forward(batch, prefill), strict=True):
            with torch.inference_mode():
                right = model(torch.tensor([tokens])).logits[0]
            torch.testing.assert_close(logits, right, atol=1e-3, rtol=1e-3)


def write_gguf(path: Path, tensors: dict[str, Tensor], facts: dict[str, Any], factors: Tensor | None) -> None:
    """A GGUF file as llama.cpp writes it: its own names, q and k with their halves interleaved, fp16 matrices."""
    from gguf import GGUFWriter

    names = {ours: theirs for theirs, ours in GGUF_NAMES.items()}
    writer = GGUFWriter(path, "llama")
    for key, value in facts.items():
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(f"llama.{key}", value)
    for name, value in tensors.items():
        parts = name.removesuffix(".weight").split(".")
        prefix = f"blk.{parts[2]}." if "layers" in parts else ""
        part = names[".".join(parts[3:]) if prefix else ".".join(parts)]
        if part in ("attn_q", "attn_k"):
            value = value.unflatten(0, (-1, 2, 8)).transpose(1, 2).reshape(value.shape)
        data = value.half() if value.ndim == 2 else value
        writer.add_tensor(f"{prefix}{part}.weight", data.contiguous().numpy())
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("factors", [None, torch.linspace(1, 8, 8)])
def test_a_gguf_file_gives_the_tensors_of_its_folder(tmp_path: Path, tied: bool, factors: Tensor | None) -> None:
    need_readers()
    model = save(tmp_path, ROPES[0], tied)
    folder = load(tmp_path, torch.float32, CPU)
    facts = {
        "block_count": 2, "context_length": 256, "embedding_length": 32, "attention.head_count": 4,
        "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": model.config.rms_norm_eps,
        "rope.dimension_count": 16, "rope.freq_base": 5000.0,
    }  # fmt: skip
    tensors = {n: t for n, t in model.state_dict().items() if not (tied and n == "lm_head.weight")}
    write_gguf(tmp_path / "tiny.gguf", tensors, facts, factors)
    raw, read = open_checkpoint(tmp_path / "tiny.gguf")
    config = read_config(raw)
    got = fuse({name: tensor for name, tensor, _ in read()}, config, CPU, lambda *_: None)
    assert config.rope.kind == ("plain" if factors is None else "table")
    for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "max_positions", "tied", "window_left"):
        assert getattr(config, name) == getattr(folder.config, name), name
    assert config.eps == pytest.approx(folder.config.eps) and config.rope.theta == folder.config.rope.theta
    for mine, theirs in zip(got.layers, folder.weights.layers, strict=True):
        for name, value in vars(theirs).items():
            torch.testing.assert_close(getattr(mine, name), value.half().float() if value.ndim == 2 else value)
    torch.testing.assert_close(got.head, folder.weights.head.half().float())


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model_type": "gpt2"}, r"model_type is 'gpt2', one of llama, mistral; use such a model"),
        ({"hidden_act": "gelu"}, r"hidden_act is 'gelu', only 'silu' is written here; use another model"),
        ({"attention_bias": True}, r"attention_bias is True, only False is written here; use another model"),
        ({"rope_scaling": {"type": "dynamic"}}, r"rope_type is 'dynamic', one of default, linear, llama3, yarn"),
    ],
)
def test_a_model_of_another_kind_is_refused(changes: dict[str, Any], text: str) -> None:
    facts = {
        "model_type": "llama", "num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2,
        "num_key_value_heads": 1, "rms_norm_eps": 1e-5, "max_position_embeddings": 8, "tie_word_embeddings": True,
    }  # fmt: skip
    with pytest.raises(ValueError, match=text):
        read_config(SimpleNamespace(**facts | changes))


def test_a_path_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model is .*nothing', no such folder or .gguf file; download a checkpoint"):
        locate(tmp_path / "nothing")
    with pytest.raises(ValueError, match=r"neither config.json nor a .gguf in it; download a checkpoint"):
        locate(tmp_path)
    (tmp_path / "a.gguf").touch()
    assert locate(tmp_path) == tmp_path / "a.gguf"
    (tmp_path / "b.gguf").touch()
    with pytest.raises(ValueError, match=r"a folder with 2 GGUF files; name one: a.gguf, b.gguf"):
        locate(tmp_path)


def test_a_checkpoint_with_a_tensor_missing_is_refused(tmp_path: Path) -> None:
    need_readers()
    save(tmp_path, ROPES[0], tied=True)
    next(iter(sorted(tmp_path.glob("*.safetensors")))).unlink()
    with pytest.raises(ValueError, match=r"the checkpoint has no tensor 'model\..*'; use a complete"):
        load(tmp_path, torch.float32, CPU)
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(ValueError, match=r"without a .safetensors file; convert its weights to safetensors"):
        load(tmp_path, torch.float32, CPU)
