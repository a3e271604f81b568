"""Lengths of paged sequences, and where appended tokens go."""

import torch
from torch import Tensor

from kernelmux.capabilities import Request, dtype_name
from kernelmux.dispatch.op import PREFER, Op
from kernelmux.dispatch.page import reference


def int32(index: Tensor, name: str) -> Tensor:
    """An index tensor as kernels take it."""
    if index.ndim != 1:
        raise ValueError(f"{name} has shape {list(index.shape)}, it must have one dimension; reshape it")
    if index.dtype == torch.int32:
        return index
    if index.dtype.is_floating_point or index.dtype == torch.bool:
        raise TypeError(f"{name} is {dtype_name(index.dtype)}, it must be int32 or int64; convert it")
    return index.int()


def _check_flat(op: str, tensors: dict[str, Tensor]) -> None:
    for name, t in tensors.items():
        if t.ndim != 1:
            raise ValueError(f"{op}: {name} has shape {list(t.shape)}, it must have one dimension; reshape it")


def get_seq_lens(kv_indptr: Tensor, kv_last_page_len: Tensor, page_size: int) -> Tensor:
    """Compute the length of each paged sequence: max(pages - 1, 0) * page_size + last_page_len.

    A sequence without pages has the length that its last_page_len says: pass 0 there.

    Args:
        kv_indptr: integer [batch + 1], offsets of each sequence's pages.
        kv_last_page_len: integer [batch], tokens on the last page.
        page_size: tokens a page.

    Returns:
        [batch], of the index tensors' dtype.

    Raises:
        ValueError: when the two do not describe the same number of sequences.

    Source: FlashInfer's `get_seq_lens`.

    >>> import torch
    >>> get_seq_lens(torch.tensor([0, 3, 3, 4]), torch.tensor([5, 0, 16]), page_size=16).tolist()
    [37, 0, 16]
    """
    _check_flat("get_seq_lens", {"kv_indptr": kv_indptr, "kv_last_page_len": kv_last_page_len})
    if kv_indptr.shape[0] != kv_last_page_len.shape[0] + 1:
        raise ValueError(
            f"get_seq_lens: kv_indptr has {kv_indptr.shape[0]} offsets, kv_last_page_len {kv_last_page_len.shape[0]} "
            "lengths; give one offset more than lengths"
        )
    pages = kv_indptr[1:] - kv_indptr[:-1]
    return (pages - 1).clamp(min=0) * page_size + kv_last_page_len


def _describe(
    append_indptr: Tensor, seq_lens: Tensor, nnz: int, batch_indices: Tensor | None, positions: Tensor | None
) -> Request:
    for name, tensor in (("seq_lens", seq_lens), ("batch_indices", batch_indices), ("positions", positions)):
        if tensor is not None and tensor.device != append_indptr.device:
            where = f"{tensor.device}, append_indptr on {append_indptr.device}"
            raise ValueError(f"get_batch_indices_positions: {name} is on {where}; move one of them")
    return Request(
        op="get_batch_indices_positions",
        family="page",
        device=append_indptr.device,
        dims={"tokens": nnz, "batch": seq_lens.shape[0]},
        empty=nnz == 0,
    )


GET_BATCH_INDICES_POSITIONS = Op(
    "get_batch_indices_positions",
    "page",
    reference.get_batch_indices_positions,
    _describe,
    growing=("tokens", "batch"),
    schema="(Tensor append_indptr, Tensor seq_lens, int nnz, Tensor(a!) batch_indices, Tensor(b!) positions) -> ()",
)


def get_batch_indices_positions(
    append_indptr: Tensor,
    seq_lens: Tensor,
    nnz: int,
    batch_indices: Tensor | None = None,
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Tell of each appended token which sequence it belongs to and at which position of it.

    Appended tokens are the last ones of their sequences: token t of sequence b, append_indptr[b] <= t <
    append_indptr[b + 1], has position seq_lens[b] - append_indptr[b + 1] + t. Tokens past the last sequence, as in a
    buffer padded for a CUDA graph, get batch index -1 and position 0; the append functions drop them.

    Args:
        append_indptr: integer [batch + 1], offsets of each sequence's appended tokens.
        seq_lens: integer [batch], lengths with the appended tokens included.
        nnz: number of appended tokens, padding included.
        batch_indices, positions: int32 [nnz or more] to write into, or None.

    Returns:
        (batch_indices, positions): int32 [nnz], or the given buffers.

    Raises:
        ValueError, TypeError: for buffers too small, of another dtype, or on another device.

    Source: FlashInfer's `get_batch_indices_positions`.

    >>> import torch
    >>> b, p = get_batch_indices_positions(torch.tensor([0, 1, 3]), torch.tensor([5, 2]), nnz=4)
    >>> b.tolist(), p.tolist()
    ([0, 1, 1, -1], [4, 0, 1, 0])
    """
    _check_flat("get_batch_indices_positions", {"append_indptr": append_indptr, "seq_lens": seq_lens})
    if nnz < 0:
        raise ValueError(f"get_batch_indices_positions: nnz is {nnz}, at least 0; give the number of appended tokens")
    if append_indptr.shape[0] != seq_lens.shape[0] + 1:
        raise ValueError(
            f"get_batch_indices_positions: append_indptr has {append_indptr.shape[0]} offsets, seq_lens "
            f"{seq_lens.shape[0]} lengths; give one offset more than lengths"
        )
    _check_buffer("batch_indices", batch_indices, nnz)
    _check_buffer("positions", positions, nnz)
    append_indptr, seq_lens = int32(append_indptr, "append_indptr"), int32(seq_lens, "seq_lens")
    batch_indices = append_indptr.new_empty(nnz) if batch_indices is None else batch_indices
    positions = append_indptr.new_empty(nnz) if positions is None else positions
    if torch.compiler.is_compiling():
        torch.ops.kernelmux.get_batch_indices_positions(append_indptr, seq_lens, nnz, batch_indices, positions)
    else:
        _get_batch_indices_positions(append_indptr, seq_lens, nnz, batch_indices, positions)
    return batch_indices, positions


def _get_batch_indices_positions(
    append_indptr: Tensor, seq_lens: Tensor, nnz: int, batch_indices: Tensor, positions: Tensor
) -> None:
    op = GET_BATCH_INDICES_POSITIONS
    devices = (append_indptr.device, seq_lens.device, batch_indices.device, positions.device)
    key = (devices, op.bucket(nnz, seq_lens.shape[0]), PREFER.get())
    args = (append_indptr, seq_lens, nnz, batch_indices, positions)
    run = op.cache.get(key) or op.pick(key, args)
    run(*args)


def _check_buffer(name: str, buffer: Tensor | None, nnz: int) -> None:
    if buffer is None:
        return
    if buffer.dtype != torch.int32:
        raise TypeError(f"get_batch_indices_positions: {name} is {dtype_name(buffer.dtype)}, it must be int32")
    if buffer.ndim != 1 or buffer.shape[0] < nnz:
        raise ValueError(
            f"get_batch_indices_positions: {name} has shape {list(buffer.shape)}, nnz is {nnz}; pass a larger buffer"
        )


GET_BATCH_INDICES_POSITIONS.eager = _get_batch_indices_positions
