"""Compare the results of the two sides and give a verdict."""

import math
from dataclasses import dataclass, field

import torch
from compare.case import Case, Results
from torch import Tensor

# kind -> dtype -> (largest relative L2 error, largest absolute error as a share of the largest value).
# Half precision rounds to 2^-9 (bf16) or 2^-12 (fp16) of a value; one flipped rounding in a hundred values gives a
# relative L2 error of a tenth of that. Attention kernels also round the weights before they multiply the values.
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_fp8 = {E4M3: (1.2e-2, 0.15), E5M2: (2.5e-2, 0.3)}
TOLERANCES: dict[str, dict[torch.dtype, tuple[float, float]]] = {
    "attention": {BF16: (6e-3, 2e-2), FP16: (2e-3, 5e-3), FP32: (1e-3, 2e-3)},
    "attention approx": {BF16: (2e-2, 6e-2), FP16: (1e-2, 3e-2), FP32: (4e-3, 1e-2)},  # rounded rotations, fast tanh
    "attention fp8": {BF16: (6e-2, 1.5e-1), FP16: (6e-2, 1.5e-1), FP32: (1e-2, 3e-2)},  # weights in fp8
    "elementwise": {BF16: (6e-4, 8e-3), FP16: (1e-4, 1e-3), FP32: (5e-6, 2e-5), **_fp8},
    "rope": {BF16: (4e-3, 2e-2), FP16: (2e-3, 1e-2), FP32: (2e-3, 1e-2), **_fp8},  # fast sine and power functions
    "gemm": {BF16: (2e-3, 1e-2), FP16: (5e-4, 2e-3), FP32: (1e-4, 1e-3)},
    "exact": {},
}
MIN_COUNT = 20  # a token drawn so often by one side and never by the other is in one support only
MAX_Z = 5.0  # of the two-sample chi-square statistic


@dataclass(slots=True)
class Outcome:
    max_abs: float = 0.0  # distributions: total variation distance
    rel_l2: float = 0.0  # distributions: z of chi-square
    differing: float = 0.0  # share of elements that are not bit-equal
    problems: list[str] = field(default_factory=list)


def judge(case: Case, ours: Results, theirs: Results) -> tuple[str, Outcome]:
    """The verdict, and the worst numbers over all results."""
    worst = Outcome()
    if ours.keys() != theirs.keys():
        worst.problems.append(f"results {sorted(ours)} and {sorted(theirs)}")
    for name in sorted(ours.keys() & theirs.keys()):
        if name.startswith("samples"):
            one = compare_samples(ours[name], theirs[name])
        else:
            one = compare_values(ours[name], theirs[name], TOLERANCES[case.kind])
        worst.max_abs = max(worst.max_abs, one.max_abs)
        worst.rel_l2 = max(worst.rel_l2, one.rel_l2)
        worst.differing = max(worst.differing, one.differing)
        worst.problems += [f"{name}: {text}" for text in one.problems]
    if not worst.problems:
        return "equal", worst
    text = "; ".join(worst.problems)
    return (f"explained: {case.explained} ({text})" if case.explained else f"DIFFERENT: {text}"), worst


def compare_values(ours: Tensor, theirs: Tensor, tolerances: dict[torch.dtype, tuple[float, float]]) -> Outcome:
    if ours.shape != theirs.shape:
        return Outcome(math.inf, math.inf, 1.0, [f"shape {list(ours.shape)}, theirs {list(theirs.shape)}"])
    problems = []
    if ours.dtype != theirs.dtype:
        problems.append(f"{ours.dtype}, theirs {theirs.dtype}".replace("torch.", ""))
    a, b = ours.detach().double().cpu(), theirs.detach().double().cpu()
    if a.numel() == 0:
        return Outcome(problems=problems)
    same = (a == b) | (a.isnan() & b.isnan())
    finite = a.isfinite() & b.isfinite()
    misplaced = int((~finite & ~same).sum())
    if misplaced:
        problems.append(f"{misplaced} of {a.numel()} not finite on one side, {_first(~finite & ~same, a, b)}")
    error = (a - b).where(finite, 0)
    size = float(b.where(finite, 0).norm())
    found = Outcome(float(error.abs().max()), 0.0, float((~same).double().mean()), problems)
    norm = float(error.norm())
    found.rel_l2 = norm / size if size else (math.inf if norm else 0.0)
    peak = max(float(b.where(finite, 0).abs().max()), 1e-30)
    rel, largest = tolerances.get(theirs.dtype, (0.0, 0.0))
    if found.rel_l2 > rel or found.max_abs > largest * peak:
        text = f"rel L2 {found.rel_l2:.1e} (limit {rel:.0e}), max {found.max_abs:.2e} of {peak:.2e}"
        problems.append(f"{text}, {found.differing:.1%} differ, {_first(error.abs() == error.abs().max(), a, b)}")
    return found


def _first(where: Tensor, a: Tensor, b: Tensor) -> str:
    at = tuple(where.nonzero()[0].tolist())
    return f"at {list(at)} ours {float(a[at]):.5g} theirs {float(b[at]):.5g}"


def compare_samples(ours: Tensor, theirs: Tensor) -> Outcome:
    """Two-sample chi-square over the drawn values, and their supports."""
    a, b = ours.flatten().long().cpu(), theirs.flatten().long().cpu()
    problems = []
    if ours.dtype != theirs.dtype:
        problems.append(f"{ours.dtype}, theirs {theirs.dtype}".replace("torch.", ""))
    low = int(min(a.min(), b.min()))
    width = int(max(a.max(), b.max())) - low + 1
    count_a = torch.bincount(a - low, minlength=width).double()
    count_b = torch.bincount(b - low, minlength=width).double()
    only_a = (count_a >= MIN_COUNT) & (count_b == 0)
    only_b = (count_b >= MIN_COUNT) & (count_a == 0)
    for who, tokens in (("ours", only_a), ("theirs", only_b)):
        if tokens.any():
            problems.append(f"only {who} draws {(tokens.nonzero().flatten()[:6] + low).tolist()}")
    distance = 0.5 * float((count_a / len(a) - count_b / len(b)).abs().sum())
    used = count_a + count_b >= 2 * MIN_COUNT / 4
    z = _chi_square_z(count_a[used], count_b[used])
    if z > MAX_Z:
        problems.append(f"distributions differ, chi-square z {z:.1f}, total variation {distance:.3f}")
    return Outcome(distance, max(z, 0.0), 0.0, problems)


def _chi_square_z(a: Tensor, b: Tensor) -> float:
    """Standard normal score of the statistic (Wilson and Hilferty's cube-root form)."""
    free = len(a) - 1
    if free < 1 or not float(a.sum()) or not float(b.sum()):
        return 0.0
    ratio = math.sqrt(float(b.sum()) / float(a.sum()))
    statistic = float(((a * ratio - b / ratio) ** 2 / (a + b)).sum())
    shift = 2 / (9 * free)
    return ((statistic / free) ** (1 / 3) - (1 - shift)) / math.sqrt(shift)
