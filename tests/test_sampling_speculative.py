"""chain_speculative_sampling: what it emits, what it counts, and that the target's distribution comes out."""

import math
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from kernelmux.dispatch.sampling import chain_speculative_sampling, sampling_from_probs
from kernelmux.dispatch.sampling.philox import uniform

naive = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("naive_sampling.py"))))


def problem(batch: int, n: int, vocab: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    draft = torch.softmax(torch.randn(batch, n, vocab, generator=generator), -1)
    target = torch.softmax(torch.randn(batch, n + 1, vocab, generator=generator), -1)
    ids = sampling_from_probs(draft.view(-1, vocab), seed=seed + 1, offset=0).view(batch, n)
    return draft, ids, target


def by_hand(draft: Tensor, ids: Tensor, target: Tensor, seed: int, offset: int) -> tuple[list, list, list]:
    batch, n, vocab = draft.shape
    u = uniform(seed, offset, range(batch), batch, n + 1, draft).tolist()
    p, q = draft.double().tolist(), target.double().tolist()
    out, accepted, emitted = [], [], []
    for b in range(batch):
        passed = [u[b][i] * p[b][i][t] < q[b][i][t] for i, t in enumerate(ids[b].tolist())]
        position = passed.index(False) if False in passed else n
        rest = [max(y - (p[b][position][v] if position < n else 0), 0.0) for v, y in enumerate(q[b][position])]
        goal, running = u[b][n] * math.fsum(rest), 0.0
        for token in range(vocab):
            running += rest[token]
            if running > goal:
                break
        out.append([*ids[b, :position].tolist(), token, *[-1] * (n - position)])
        accepted.append(sum(passed))
        emitted.append(position)
    return out, accepted, emitted


@pytest.mark.parametrize("n", [0, 1, 4])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_equals_plain_python(n: int, dtype: torch.dtype) -> None:
    draft, ids, target = problem(50, n, 11)
    out, accepted, emitted = chain_speculative_sampling(draft, ids.to(dtype), target, seed=5, offset=3)
    assert out.dtype == accepted.dtype == emitted.dtype == torch.int32
    assert [out.tolist(), accepted.tolist(), emitted.tolist()] == list(by_hand(draft, ids, target, 5, 3))


def test_emitted_tokens_have_the_targets_distribution() -> None:
    """Draft tokens drawn from the draft model: each emitted token is a sample of the target, whatever the draft."""
    batch, vocab = 8000, 6
    draft, _, target = (t[:1].expand(batch, *t.shape[1:]) for t in problem(1, 2, vocab, seed=3))
    ids = torch.stack([sampling_from_probs(draft[:, i], seed=10 + i, offset=0) for i in range(2)], 1)
    out, accepted, emitted = chain_speculative_sampling(draft, ids, target, seed=99, offset=0)
    for place in range(3):
        reached = out[:, place] >= 0
        assert torch.equal(reached, emitted >= place)
        naive.assert_distributed(out[reached, place], target[0, place].tolist())
    rate = torch.minimum(draft[0], target[0, :2]).sum(-1).sum()
    assert abs(accepted.float().mean() - rate) < 0.03


def test_counters() -> None:
    draft, ids, target = problem(9, 3, 7)
    _, accepted, emitted = chain_speculative_sampling(draft, ids, target, seed=1, offset=0)
    counted, sent = torch.full((9,), 10, dtype=torch.int32), torch.full((9,), 20, dtype=torch.int64)
    _, a, e = chain_speculative_sampling(draft, ids, target, counted, sent, seed=1, offset=0)
    assert a is counted
    assert torch.equal(counted, accepted + 10)
    assert torch.equal(e, emitted + 20)
    assert e.dtype == torch.int32
    assert (sent == 20).all()


def test_certain_cases() -> None:
    one = torch.eye(4)
    draft = torch.stack((one[[0, 1]], one[[0, 1]], one[[0, 1]]))
    target = torch.stack((one[[0, 1, 2]], one[[0, 3, 2]], one[[3, 1, 2]]))
    ids = torch.tensor([[0, 1], [0, 1], [0, 1]])
    out, accepted, emitted = chain_speculative_sampling(draft, ids, target, seed=1, offset=0)
    assert out.tolist() == [[0, 1, 2], [0, 3, -1], [3, -1, -1]]
    assert accepted.tolist() == [2, 1, 1]
    assert emitted.tolist() == [2, 1, 0]


def test_drafts_that_are_no_proposal_leave_the_target() -> None:
    """Padding ids, and tokens that neither model gives a chance while the models agree."""
    batch = 4000
    row = torch.tensor([0.5, 0.25, 0.25, 0.0])
    probs = row.expand(batch, 2, 4)
    target = row.expand(batch, 3, 4)
    for token in (-1, 3, 4, 2**31 - 1):
        out, accepted, emitted = chain_speculative_sampling(
            probs, torch.full((batch, 2), token), target, seed=8, offset=0
        )
        naive.assert_distributed(out[:, 0], row.tolist())
        assert not accepted.any()
        assert not emitted.any()
        assert (out[:, 1:] == -1).all()


def test_rows_without_a_distribution() -> None:
    draft, ids, target = problem(4, 2, 7)
    target[1] = math.nan
    target[2] = 0
    draft[3] = math.nan
    out, _, emitted = chain_speculative_sampling(draft, ids, target, seed=1, offset=0)
    assert out[1:].tolist() == [[0, -1, -1]] * 3
    assert emitted[1:].tolist() == [0, 0, 0]


def test_batch_independence_strides_and_empties() -> None:
    draft, ids, target = problem(8, 3, 9)
    whole = chain_speculative_sampling(draft, ids, target, seed=4, offset=0)[0]
    part = chain_speculative_sampling(draft[:3], ids[:3], target[:3], seed=4, offset=0)[0]
    assert torch.equal(whole[:3], part)
    wide = torch.full((8, 4, 18), math.nan)
    wide[:, :, ::2] = target
    tall = torch.full((8, 9, 3), math.nan).transpose(1, 2).copy_(draft)
    columns = ids.T.contiguous().T
    again = chain_speculative_sampling(tall, columns, wide[:, :, ::2], seed=4, offset=0)[0]
    assert torch.equal(whole, again)
    seeds, offsets = torch.arange(8), 4 * torch.arange(8)
    own = chain_speculative_sampling(draft, ids, target, seed=seeds, offset=offsets)[0]
    alone = chain_speculative_sampling(draft[5:6], ids[5:6], target[5:6], seed=seeds[5:6], offset=offsets[5:6])[0]
    assert torch.equal(own[5:6], alone)
    out, accepted, _ = chain_speculative_sampling(draft[:0], ids[:0], target[:0])
    assert out.shape == (0, 4)
    assert accepted.shape == (0,)


def test_generator() -> None:
    args = problem(30, 3, 9)
    torch.manual_seed(2)
    first, second = chain_speculative_sampling(*args)[0], chain_speculative_sampling(*args)[0]
    assert not torch.equal(first, second)
    torch.manual_seed(2)
    assert torch.equal(first, chain_speculative_sampling(*args)[0])


def test_wrong_arguments() -> None:
    draft, ids, target = problem(2, 3, 5)
    with pytest.raises(ValueError, match=r"target_probs has shape \[2, 3, 5\], draft_probs asks for \[2, 4, 5\]"):
        chain_speculative_sampling(draft, ids, target[:, 1:])
    with pytest.raises(ValueError, match=r"draft_token_ids has shape \[2, 2\], draft_probs asks for \[2, 3\]"):
        chain_speculative_sampling(draft, ids[:, 1:], target)
    with pytest.raises(ValueError, match=r"draft_probs has shape \[3, 5\], it must be \[batch, n, vocab\]"):
        chain_speculative_sampling(draft[0], ids, target)
    with pytest.raises(TypeError, match="draft_token_ids is float32, int32 or int64"):
        chain_speculative_sampling(draft, ids.float(), target)
    with pytest.raises(TypeError, match="target_probs is int64"):
        chain_speculative_sampling(draft, ids, target.long())
    with pytest.raises(ValueError, match="target_probs is on meta, draft_probs on cpu; move it"):
        chain_speculative_sampling(draft, ids, target.to("meta"), seed=1, offset=0)
    with pytest.raises(ValueError, match=r"maybe_output_accepted_token_num has shape \[3\], it must be \[2\]"):
        chain_speculative_sampling(draft, ids, target, torch.zeros(3))


def test_compiled_calls_equal_eager_ones() -> None:
    args = problem(5, 2, 9)

    def run(counter: Tensor) -> tuple[Tensor, ...]:
        return chain_speculative_sampling(*args, counter, seed=torch.tensor([3]), offset=torch.tensor([0]))

    counters = [torch.ones(5, dtype=torch.int32) for _ in range(2)]
    eager = run(counters[0])
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")(counters[1])
    for a, b in zip(eager, compiled, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(*counters)
