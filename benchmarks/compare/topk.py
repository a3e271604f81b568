"""top_k and the page-table and ragged transforms of sparse attention indexers."""

from functools import partial
from typing import Any

import torch
from compare.case import Case, Results, Side
from torch import Tensor


def scores(side: Side, rows: int, width: int, dtype: torch.dtype, distinct: bool = True) -> Tensor:
    """Distinct values as far as the type can hold them apart, so that one set of indices is right."""
    if not distinct:
        return side.rand(rows, width, seed=2).mul(2).round().to(dtype)
    order = [torch.randperm(width, generator=torch.Generator().manual_seed(r)) for r in range(rows)]
    return (torch.stack(order).float() - width / 2).to(dtype).to(side.device)


def top_k(
    side: Side,
    k: int,
    width: int = 4096,
    dtype: torch.dtype = torch.float32,
    distinct: bool = True,
    tie: str = "",
    **kw: Any,
) -> Results:
    x = scores(side, 5, width, dtype, distinct)
    if tie:
        kw["tie_break"] = getattr(side.TopKTieBreak, tie)
    values, indices = side.top_k(x, k, **kw)
    gathered = x.gather(1, indices.long())
    found = {"values sorted": values.float().sort(-1, descending=True).values, "values belong": (gathered == values)}
    if kw.get("sorted"):
        found["values"] = values
    if distinct or tie:
        found["indices as a set"] = indices.sort(-1).values
    return found


def lengths(side: Side) -> Tensor:
    return side.ints([700, 16, 5, 0, 333, 17])


def page_table(
    side: Side, k: int = 16, page_size: int = 1, starts: bool = False, row_to_batch: bool = False
) -> Results:
    x = scores(side, 6, 768, torch.float32)
    table = torch.stack([torch.randperm(4000, generator=torch.Generator().manual_seed(50 + b))[:768] for b in range(6)])
    options: dict[str, Any] = {}
    if starts:
        options["row_starts"] = side.ints([0, 32, 64, 5, 300, 700])
        if page_size > 1:
            options["page_table_row_starts"] = side.ints([0, 2, 4, 0, 9, 11])
    if row_to_batch:
        options["row_to_batch"] = side.ints([2, 2, 0, 1, 1, 3])
    if page_size > 1:
        options["page_size"] = page_size
    raw = torch.full((6, k), -7, dtype=torch.int32, device=side.device)
    made = side.top_k_page_table_transform(
        x, table.to(torch.int32).to(side.device), lengths(side), k, **options, out_raw_indices=raw
    )
    return {
        "out as a set": made.sort(-1).values,
        "raw as a set": raw.sort(-1).values,
        "short row": made[2],
        "empty row": made[3],
    }


def ragged(side: Side, k: int = 16, starts: bool = False) -> Results:
    x = scores(side, 6, 768, torch.float32)
    options = {"row_starts": side.ints([0, 32, 64, 5, 300, 700])} if starts else {}
    made = side.top_k_ragged_transform(x, side.ints([0, 1000, 7, 7, 123456, 9]), lengths(side), k, **options)
    return {"out as a set": made.sort(-1).values, "short row": made[2], "empty row": made[3]}


def cases() -> list[Case]:
    def case(name: str, features: str, run: partial) -> Case:
        return Case(name, features, "topk", "exact", run)

    pages, spans = "top_k_page_table_transform", "top_k_ragged_transform"
    bf16, fp16 = torch.bfloat16, torch.float16
    return [
        case("top_k", "fp32, k 50", partial(top_k, k=50)),
        case("top_k", "fp32, k 2048 of 65536, sorted", partial(top_k, k=2048, width=65536, sorted=True)),
        case("top_k", "fp32, k 1", partial(top_k, k=1)),
        case("top_k", "bf16, ties, sorted", partial(top_k, k=50, dtype=bf16, distinct=False, sorted=True)),
        case("top_k", "fp16, deterministic", partial(top_k, k=50, width=1000, dtype=fp16, deterministic=True)),
        case("top_k", "ties, the smaller index", partial(top_k, k=50, distinct=False, tie="SMALL")),
        case("top_k", "ties, the larger index", partial(top_k, k=50, distinct=False, tie="LARGE")),
        case("top_k", "k is the width", partial(top_k, k=64, width=64)),
        case(pages, "page 1", partial(page_table)),
        case(pages, "page 1, row_to_batch", partial(page_table, row_to_batch=True)),
        case(pages, "page 1, row_starts", partial(page_table, starts=True)),
        case(pages, "page 64", partial(page_table, page_size=64)),
        case(pages, "page 64, row_starts", partial(page_table, page_size=64, starts=True)),
        case(spans, "plain", partial(ragged)),
        case(spans, "row_starts", partial(ragged, starts=True)),
    ]
