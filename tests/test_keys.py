"""Equal keys give equal decisions: growing dims enter by bucket and residue, everything else exactly."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kernelmux.capabilities import PRESETS, Limit, Request
from kernelmux.dispatch.op import Op
from kernelmux.dispatch.resolve import AllInstalled, Candidates, resolve
from kernelmux.dispatch.settings import Settings
from kernelmux.policies import Rule
from kernelmux.testing import installed, scratch_op, stub

number = st.integers(0, 40)
limits = st.builds(
    Limit,
    min=st.none() | number,
    max=st.none() | number,
    multiple_of=st.none() | st.integers(1, 6),
    one_of=st.lists(number, max_size=2).map(tuple),
)


def decide(op: Op, rows: int, rules: list[Rule]) -> list[str]:
    request = Request("scratch", "stub", dims={"rows": rows, "width": 1}, features=frozenset())
    candidates = Candidates(op.candidates().kernels, op.reference)
    decision = resolve(request, PRESETS["H100"], candidates, rules, Settings(), AllInstalled())
    return [k.id for k in decision.ranked] + [decision.source]


@settings(max_examples=150, deadline=None)
@given(
    of_kernels=st.lists(limits, min_size=1, max_size=3), of_rule=limits, rows=st.lists(number, min_size=2, max_size=8)
)
def test_equal_keys_give_equal_decisions(of_kernels: list[Limit], of_rule: Limit, rows: list[int]) -> None:
    from unittest import mock

    from kernelmux.dispatch import state

    backends = [stub(f"k{i}", dims={"rows": limit}) for i, limit in enumerate(of_kernels)]
    rules = [Rule("r", "scratch", (f"k{len(backends) - 1}",), "w", when={"rows": of_rule})]
    with scratch_op() as op, installed(*backends), mock.patch.object(state, "packaged_rules", lambda: tuple(rules)):
        state.reload()
        seen: dict[object, list[str]] = {}
        for n in [*rows, *range(42)]:
            outcome = decide(op, n, rules)
            assert seen.setdefault(op.bucket(n), outcome) == outcome


def test_zero_has_a_bucket_of_its_own() -> None:
    with scratch_op() as op, installed():
        assert op.bucket(0) != op.bucket(1) == op.bucket(7)


def test_what_a_further_check_reads_is_exact() -> None:
    reading = stub("a", also=lambda request, device: (), also_reads=("rows",))
    with scratch_op() as op, installed(reading):
        assert op.bucket(6) != op.bucket(7)
