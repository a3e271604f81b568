"""Run one attention case on one kernel and judge it: against the reference in float64, on poisoned memory."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from conformance.attention_cases import Case
from kernelmux.capabilities import AttentionSpec, Batch, Kernel, Request, RunExtras
from kernelmux.dispatch.attention.op import RUN_FEATURES
from kernelmux.dispatch.attention.op import request_of as request_of_batch
from kernelmux.dispatch.attention.reference import reference

# Relative L2 errors: of a whole result, typically 2e-3 (bf16), 3e-4 (fp16), 2e-2 (fp8 with its quantised weights).
TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 1.5e-3, torch.float32: 2e-5}
FP8_TOLERANCE = 6e-2
ROW_FACTOR = 6  # one row may be this much worse than the whole
LSE_TOLERANCE = 4e-3


@dataclass
class Inputs:
    """Tensors of one case. Everything that a kernel must not read is NaN; results start as NaN."""

    batch: Batch
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor | None
    extras: RunExtras | None


def request_of(case: Case) -> Request:
    """What the case asks of a kernel."""
    uses = sum(1 << i for i, name in enumerate(RUN_FEATURES) if name in case.uses)
    return request_of_batch(case.spec, _batch(case, torch.device("cpu")), uses)


def check(kernel: Kernel, case: Case, device: torch.device) -> None:
    """Raise AssertionError unless the kernel's results of the case are right."""
    if case.graph:
        return _check_replay(kernel, case, device)
    inputs = _inputs(case, device)
    runner = kernel.load()(case.spec, inputs.batch)
    for _ in range(2):  # a plan serves every layer of a model
        _poison(inputs)
        runner(inputs.q, inputs.k, inputs.v, inputs.out, inputs.lse, _scale(case), inputs.extras)
    _judge(case, inputs)
    return None


def _check_replay(kernel: Kernel, case: Case, device: torch.device) -> None:
    """Capture with short sequences, rewrite the buffers with the case's own, replay."""
    inputs = _inputs(case, device)
    batch = inputs.batch
    final = [t.clone() for t in _buffers(batch)]
    short = _batch(replace(case, kv_lens=tuple(n // 2 for n in case.kv_lens)), device)
    for buffer, value in zip(_buffers(batch), _buffers(short), strict=True):
        buffer[: value.numel()] = value
    batch.q_lens = batch.kv_lens = None
    runner = kernel.load()(case.spec, batch)

    def run() -> None:
        batch.update()
        runner(inputs.q, inputs.k, inputs.v, inputs.out, inputs.lse, _scale(case), inputs.extras)

    replay = replayed(run)
    for buffer, value in zip(_buffers(batch), final, strict=True):
        buffer.copy_(value)
    for _ in range(2):
        _poison(inputs)
        replay()
    batch.q_lens, batch.kv_lens = case.q_lens, case.kv_lens
    _judge(case, inputs)


def replayed(run: Callable[[], None]) -> Callable[[], None]:
    """Run once, capture, and return the replay."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def _buffers(batch: Batch) -> list[Tensor]:
    found = (batch.qo_indptr, batch.kv_indptr, batch.kv_indices, batch.last_page_len)
    return [t for t in found if t is not None]


def _scale(case: Case) -> float:
    return 0.8 / math.sqrt(case.dims[0])


def _starts(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def _batch(case: Case, device: torch.device) -> Batch:
    """Pages in random order, page 0 never among them, with ids of -1 behind those in use. In graph mode the bounds are
    wider than needed."""
    page, pages = case.page_size, _pages(case)
    indices = last = None
    if page:
        order = 1 + torch.randperm(sum(pages) + 2, generator=torch.Generator().manual_seed(sum(pages)))[: sum(pages)]
        indices = torch.cat((order, torch.full((2,), -1))).to(torch.int32)
        last = torch.tensor([(n - 1) % page + 1 if n else 0 for n in case.kv_lens], dtype=torch.int32)
    starts = _starts(pages if page else case.kv_lens)
    spare = 1 if case.graph else 0
    return Batch(
        device=device,
        size=len(case.q_lens),
        total_q=sum(case.q_lens) + (7 * spare if case.phase != "decode" else 0),
        max_q_len=max(case.q_lens) + (3 * spare if case.phase != "decode" else 0),
        max_kv_len=max(case.kv_lens) + 100 * spare,
        page_size=page,
        qo_indptr=_starts(case.q_lens).to(device),
        kv_indptr=starts.to(device),
        kv_indices=None if indices is None else indices.to(device),
        last_page_len=None if last is None else last.to(device),
        q_lens=case.q_lens,
        kv_lens=case.kv_lens,
    )


def _pages(case: Case) -> tuple[int, ...]:
    return tuple(-(-n // case.page_size) for n in case.kv_lens) if case.page_size else ()


def _inputs(case: Case, device: torch.device) -> Inputs:
    generator = torch.Generator(device).manual_seed(len(str(case)))
    batch = _batch(case, device)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    q_dtype, kv_dtype, out_dtype = case.dtypes
    (heads, kv_heads), (dim_qk, dim_vo) = case.heads, case.dims
    extra = 2 * kv_heads if case.fused_q else 0
    q = (random(batch.total_q, heads + extra, dim_qk) * 1.5).to(q_dtype)[:, :heads]
    out = torch.empty(batch.total_q, heads + extra, dim_vo, dtype=out_dtype, device=device)[:, :heads]
    k = _cache(case, batch, random, dim_qk, kv_dtype, case.hnd)
    v = _cache(case, batch, random, dim_vo, kv_dtype, case.hnd != case.kv_strides_differ)
    lse = torch.empty(batch.total_q, heads, device=device) if case.lse else None
    sinks = (random(heads) * 2).bfloat16().float() if case.sinks else None
    return Inputs(batch, q, k, v, out, lse, None if sinks is None else RunExtras(sinks=sinks))


def _cache(case: Case, batch: Batch, random: object, dim: int, dtype: torch.dtype, hnd: bool) -> Tensor:
    """Keys where the batch says that they live, NaN everywhere else."""
    kv_heads, size = case.heads[1], case.page_size
    values = random(sum(case.kv_lens), kv_heads, dim).to(dtype)  # type: ignore[operator]
    if not size:
        return torch.cat((values, _nan_like(values.new_zeros(5, kv_heads, dim))))
    pages = _pages(case)
    shape = (sum(pages) + 3, kv_heads, size, dim) if hnd else (sum(pages) + 3, size, kv_heads, dim)
    cache = _nan_like(torch.zeros(shape, dtype=dtype, device=values.device))
    cache = cache.transpose(1, 2) if hnd else cache
    assert batch.kv_indices is not None
    row, first = 0, 0
    for count, length in zip(pages, case.kv_lens, strict=True):
        at = torch.arange(length, device=values.device)
        ids = batch.kv_indices[first : first + count].long()
        cache.view(torch.uint8 if dtype.itemsize == 1 else dtype)[ids[at // size], at % size] = values[
            row : row + length
        ].view(torch.uint8 if dtype.itemsize == 1 else dtype)
        row, first = row + length, first + count
    return cache


def _nan_like(t: Tensor) -> Tensor:
    """All NaN, also in 8-bit floats."""
    return t.view(torch.uint8).fill_(0x7F).view(t.dtype) if t.dtype.itemsize == 1 else t.fill_(math.nan)


def _poison(inputs: Inputs) -> None:
    inputs.out.fill_(math.nan)
    if inputs.lse is not None:
        inputs.lse.fill_(math.nan)


def _judge(case: Case, inputs: Inputs) -> None:
    want, want_lse = _expected(case, inputs)
    got = inputs.out.double()
    assert not got.isnan().any(), f"{_rows(got.isnan())} of out are NaN"
    dead = want.abs().amax(-1) == 0
    assert (got[dead] == 0).all(), "rows without keys must be 0"
    tolerance = FP8_TOLERANCE if case.dtypes[0].itemsize == 1 else TOLERANCE[case.dtypes[2]]
    error = ((got - want).norm() / want.norm()).item()
    assert error < tolerance, f"relative error of out is {error:.2e}, at most {tolerance:.0e}"
    each = (got - want).norm(dim=-1) / want.norm(dim=-1).clamp(min=0.02 * want.norm(dim=-1).max().item())
    assert each.max() < ROW_FACTOR * tolerance, f"relative error of row {_worst(each)} of out is {each.max():.2e}"
    if inputs.lse is not None:
        _judge_lse(inputs.lse.double(), want_lse)


def _judge_lse(got: Tensor, want: Tensor) -> None:
    assert not got.isnan().any(), f"{_rows(got.isnan()[..., None])} of lse are NaN"
    assert ((got == -math.inf) == (want == -math.inf)).all(), "lse must be -inf for rows without keys and only there"
    finite = want != -math.inf
    error = (got[finite] - want[finite]).abs()
    assert error.numel() == 0 or error.max() < LSE_TOLERANCE, f"lse is off by {error.max():.2e}"


def _expected(case: Case, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """The reference in float64, on the same memory."""
    spec: AttentionSpec = replace(
        case.spec, q_dtype=torch.float64, kv_dtype=torch.float64, o_dtype=torch.float64, use_cuda_graph=False
    )
    out = torch.empty(inputs.out.shape, dtype=torch.float64, device=inputs.out.device)
    lse = torch.empty(out.shape[:2], dtype=torch.float64, device=out.device)
    q, k, v = (t.double() for t in (inputs.q, inputs.k, inputs.v))
    reference(spec, inputs.batch)(q, k, v, out, lse, _scale(case), inputs.extras)
    return out, lse


def _rows(flags: Tensor) -> str:
    rows = flags.flatten(1).any(1).nonzero().flatten().tolist()
    return f"{len(rows)} rows ({', '.join(map(str, rows[:8]))}{', …' if len(rows) > 8 else ''})"


def _worst(errors: Tensor) -> str:
    row, head = divmod(int(errors.argmax()), errors.shape[1])
    return f"{row}, head {head}"
