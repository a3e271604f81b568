"""Choosing: sources and their order, explicit choices, rules, flags, refusals at run time."""

import warnings

import pytest
import torch

import kernelmux
from kernelmux.capabilities import (
    PRESETS,
    FallbackWarning,
    Limit,
    NoKernelError,
    Package,
    Reason,
    Request,
    SettingError,
)
from kernelmux.dispatch.explain import explain
from kernelmux.dispatch.op import Op
from kernelmux.dispatch.resolve import AllInstalled, Candidates, resolve
from kernelmux.dispatch.settings import Choice, Settings
from kernelmux.policies import Rule
from kernelmux.testing import call, installed, stub

X = torch.ones(2, 3)
H100 = PRESETS["H100"]


def request(**kwargs: object) -> Request:
    return Request("scratch", "stub", dtypes={"x": torch.float32}, dims={"rows": 2, "width": 3}, **kwargs)  # type: ignore[arg-type]


def value(op: Op, backend: str = "auto") -> float:
    return call(op, X, backend)[0, 0].item()


def test_reference_is_the_normal_choice_on_a_cpu_without_a_warning(op: Op) -> None:
    with installed(), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert value(op) == 2


def test_unlisted_able_kernels_rank_by_id_before_the_reference(op: Op) -> None:
    with installed(stub("zeta", "quadruple"), stub("alpha", "triple")):
        decision = explain(request())
        assert [k.id for k in decision.ranked] == ["alpha:scratch", "zeta:scratch", "reference:scratch"]
        assert value(op) == 3


def test_argument_beats_context_beats_environment_beats_rule(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    with installed(stub("a", "triple"), stub("b", "quadruple")):
        monkeypatch.setenv("KERNELMUX_BACKEND_STUB", "b")
        kernelmux.reload()
        assert value(op) == 4
        assert explain(request()).source == "KERNELMUX_BACKEND_STUB"
        with kernelmux.prefer("reference"):
            assert value(op) == 2
            assert explain(request()).source == "context"
            assert value(op, backend="a") == 3
            with kernelmux.prefer("a", scope="stub_scratch"):
                assert value(op) == 3
        assert value(op) == 4


def test_the_narrowest_variable_wins(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    with installed(stub("a", "triple"), stub("b", "quadruple")):
        monkeypatch.setenv("KERNELMUX_BACKEND", "b")
        monkeypatch.setenv("KERNELMUX_BACKEND_STUB", "reference")
        monkeypatch.setenv("KERNELMUX_BACKEND_STUB_SCRATCH", "a")
        kernelmux.reload()
        assert explain(request()).source == "KERNELMUX_BACKEND_STUB_SCRATCH"
        monkeypatch.delenv("KERNELMUX_BACKEND_STUB_SCRATCH")
        kernelmux.reload()
        assert value(op) == 2


def test_a_general_variable_binds_only_ops_that_the_backend_serves(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    with installed(stub("a", op="other"), stub("b")):
        monkeypatch.setenv("KERNELMUX_BACKEND", "a")
        kernelmux.reload()
        decision = explain(request())
        assert decision.kernel.id == "b:scratch"
        assert decision.notes == ("KERNELMUX_BACKEND does not bind scratch: a declare no kernel for it",)
        monkeypatch.delenv("KERNELMUX_BACKEND")
        monkeypatch.setenv("KERNELMUX_BACKEND_STUB_SCRATCH", "a")
        kernelmux.reload()
        with pytest.raises(NoKernelError, match="KERNELMUX_BACKEND_STUB_SCRATCH asks for it by name"):
            explain(request())


def test_a_list_is_an_order_and_auto_allows_the_rest(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    small = Limit(max=1)
    with installed(stub("a", dims={"rows": small}), stub("b", dims={"rows": small}), stub("c", "quadruple")):
        monkeypatch.setenv("KERNELMUX_BACKEND", "a,b")
        kernelmux.reload()
        with pytest.raises(NoKernelError) as caught:
            value(op)
        assert str(caught.value).splitlines()[1:] == [
            "  a:scratch: rows is 2, at most 1",
            "  b:scratch: rows is 2, at most 1",
            "would work: c:scratch, reference:scratch",
        ]
        monkeypatch.setenv("KERNELMUX_BACKEND", "a,b,auto")
        kernelmux.reload()
        assert value(op) == 4


def test_an_excluded_backend_is_chosen_only_when_named_more_strongly(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    with installed(stub("a", "triple"), stub("b", "quadruple")):
        monkeypatch.setenv("KERNELMUX_BACKEND", "!a")
        kernelmux.reload()
        assert value(op) == 4
        assert "a is excluded by KERNELMUX_BACKEND" in str(explain(request()))
        assert value(op, backend="a") == 3


def test_the_first_matching_rule_orders_and_the_unlisted_follow(op: Op) -> None:
    backends = (stub("a"), stub("b"), stub("c", dims={"rows": Limit(max=1)}))
    rules = [
        Rule("other-op", "nothing", ("a",), "w"),
        Rule("big", "scratch", ("a",), "w", when={"rows": Limit(min=100)}),
        Rule("first", "scratch", ("c", "b"), "because", evidence={"gpu": "g"}),
        Rule("second", "scratch", ("a",), "w"),
    ]
    candidates = Candidates([k for b in backends for k in b.kernels], op.reference)
    decision = resolve(request(), H100, candidates, rules, Settings(), AllInstalled())
    assert [k.id for k in decision.ranked] == ["b:scratch", "a:scratch", "reference:scratch"]
    assert decision.rule is rules[2]
    assert decision.why == "packaged rule first: because; not c:scratch: rows is 2, at most 1 on sm90"
    only_unable = resolve(
        request(), H100, candidates, [Rule("c-only", "scratch", ("c",), "w"), rules[3]], Settings(), AllInstalled()
    )
    assert (only_unable.kernel.id, only_unable.source) == ("a:scratch", "default"), "not the next rule"


def test_the_same_inputs_give_the_same_decision(op: Op) -> None:
    candidates = Candidates(list(stub("a").kernels), op.reference)
    one, two = (resolve(request(), H100, candidates, (), Settings(), AllInstalled()) for _ in range(2))
    assert str(one) == str(two)


@pytest.mark.parametrize("name", ["deterministic", "batch_invariant"])
def test_demanded_properties_exclude_kernels_that_do_not_declare_them(op: Op, name: str) -> None:
    candidates = Candidates(list(stub("a", **{name: False}).kernels), op.reference)
    decision = resolve(request(), PRESETS["CPU"], candidates, (), Settings(**{name: True}), AllInstalled())  # type: ignore[arg-type]
    assert decision.kernel.id == "reference:scratch"
    assert f"KERNELMUX_{name.upper()}=1" in str(decision)


def test_no_compile_excludes_kernels_that_compile(op: Op) -> None:
    candidates = Candidates(list(stub("a", compiles=True).kernels), op.reference)
    decision = resolve(request(), H100, candidates, (), Settings(no_compile=True), AllInstalled())
    assert "KERNELMUX_NO_COMPILE=1: this kernel compiles at its first call" in str(decision)


def test_strict_forbids_the_reference_on_cuda_but_not_on_a_cpu(op: Op) -> None:
    candidates = Candidates([], op.reference)
    strict = Settings(strict=True)
    assert resolve(request(), PRESETS["CPU"], candidates, (), strict, AllInstalled()).kernel is op.reference
    with pytest.raises(NoKernelError, match="KERNELMUX_STRICT=1: the reference is slow on CUDA tensors"):
        resolve(request(), H100, candidates, (), strict, AllInstalled())
    named = [Choice(("reference",), auto=False, source="context")]
    assert resolve(request(), H100, candidates, (), strict, AllInstalled(), named).kernel is op.reference


def test_a_slow_build_is_held_back_until_asked_for_or_captured(op: Op) -> None:
    class Cold(AllInstalled):
        def warm(self, kernel: object, request: object) -> bool:
            return False

    candidates = Candidates(list(stub("a", slow_build="kernelmux.testing:never_warm").kernels), op.reference)
    decision = resolve(request(), H100, candidates, (), Settings(), Cold())
    assert decision.kernel is op.reference
    assert "a:scratch: able, held back: its graph for these shapes is not built yet" in str(decision)
    candidates = Candidates([*candidates.kernels, *stub("b").kernels], op.reference)
    decision = resolve(request(), H100, candidates, [Rule("r", "scratch", ("a", "b"), "w")], Settings(), Cold())
    assert decision.kernel.id == "b:scratch"
    assert decision.why.startswith("packaged rule r: w; a is held back: its graph for these shapes is not built yet")
    graph = request(features=frozenset({"cuda_graph"}))
    able = Candidates(list(stub("a", slow_build="x:y", features=frozenset({"cuda_graph"})).kernels), op.reference)
    assert resolve(graph, H100, able, (), Settings(), Cold()).kernel.id == "a:scratch"
    with installed(stub("a", slow_build="kernelmux.testing:never_warm")):
        assert value(op) == 2
        assert value(op, backend="a") == 3


def test_a_kernel_that_cannot_be_captured_is_out_in_graph_mode(op: Op) -> None:
    graph = request(features=frozenset({"cuda_graph"}))
    candidates = Candidates(list(stub("a", graph_safe=False, features=frozenset({"cuda_graph"})).kernels), op.reference)
    assert "cuda_graph: this kernel synchronises with the host" in str(
        resolve(graph, H100, candidates, (), Settings(), AllInstalled())
    )


def test_a_refusal_at_run_time_is_noted_warned_of_once_and_passed_on(op: Op) -> None:
    with installed(stub("a", "refuses_many_rows")):
        assert value(op) == 3
        with pytest.warns(FallbackWarning, match="a:scratch: refused at run time: NOT_SUPPORTED beyond 512 rows"):
            assert call(op, torch.ones(4096, 3))[0, 0] == 2
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert call(op, torch.ones(4096, 3))[0, 0] == 2


def test_a_refusal_of_an_explicit_choice_raises_with_the_reason(op: Op) -> None:
    with (
        installed(stub("a", "refuses_many_rows")),
        pytest.warns(FallbackWarning),
        pytest.raises(NoKernelError, match="NOT_SUPPORTED beyond 512 rows"),
    ):
        call(op, torch.ones(4096, 3), backend="a")


def test_a_failed_compilation_is_a_refusal_when_automatic_and_an_error_when_asked_for(op: Op) -> None:
    with installed(stub("a", "fails_to_compile")):
        with pytest.warns(FallbackWarning, match=r"No such file; log: build\.log"):
            assert value(op) == 2
        with pytest.raises(kernelmux.CompileError):
            value(op, backend="a")


def test_other_exceptions_pass_through(op: Op) -> None:
    with installed(stub("a", "crashes")), pytest.raises(ZeroDivisionError, match="a bug in the kernel"):
        value(op)


def test_a_kernel_with_other_parameters_than_the_reference_is_refused(op: Op) -> None:
    with installed(stub("a", "other_parameters")), pytest.raises(kernelmux.RegistryError, match=r"a:scratch takes"):
        value(op)


def test_broken_packages_are_listed_before_mismatches(op: Op) -> None:
    broken = Package(("torch",), "torch", flags=lambda: Reason("broken", "torch was built for another CUDA"))
    with installed(stub("a", dtypes=frozenset(), roles=("x",)), stub("b", package=broken)):
        text = str(explain(request()))
    assert text.index("b:scratch: torch was built for another CUDA") < text.index("a:scratch: x is float32")


def test_nothing_to_do_is_answered_above_the_backends(op: Op) -> None:
    with installed(stub("a", "crashes")):
        assert call(op, torch.ones(0, 3)).shape == (0, 3)


def test_gradients_go_to_a_differentiable_kernel_or_raise(op: Op) -> None:
    x = torch.ones(2, 3, requires_grad=True)
    with installed(stub("a")):
        assert call(op, x)[0, 0].item() == 2, "the stub does not declare grad"
        with pytest.raises(NoKernelError, match="grad: this kernel is not differentiable"):
            call(op, x, backend="a")
    with installed(stub("a", features=frozenset({"grad"}))):
        call(op, x).sum().backward()
        assert x.grad is not None and x.grad[0, 0] == 3


@pytest.mark.parametrize("bad", ["INVALID", "FA2", "", "a,nothing", "auto,a"])
def test_a_bad_backend_argument_lists_the_valid_names(op: Op, bad: str) -> None:
    with installed(stub("a"), stub("flash_attn_2")), pytest.raises(SettingError, match="argument backend"):
        value(op, backend=bad)


def test_a_preference_for_an_unknown_scope_or_name_raises(op: Op) -> None:
    with (
        pytest.raises(SettingError, match="prefer\\(\\) scope is 'nowhere', one of"),
        kernelmux.prefer(scope="nowhere"),
    ):
        pass
    with (
        pytest.raises(SettingError, match="context names 'nobody', no backend of that name"),
        kernelmux.prefer("nobody"),
    ):
        pass


def test_explain_of_an_unknown_op_lists_ops() -> None:
    with pytest.raises(SettingError, match="op is 'nothing', one of"):
        explain(Request("nothing", "x"))


def test_a_bucket_decided_warm_builds_nothing_for_another_length(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both row counts share a key; what is built serves only one of them."""
    monkeypatch.setattr("kernelmux.testing.warm_for_two", lambda request: request.dims["rows"] == 2, raising=False)
    with installed(stub("a", slow_build="kernelmux.testing:warm_for_two")):
        assert op.bucket(2) == op.bucket(5)
        assert [call(op, torch.ones(n, 3))[0, 0].item() for n in (2, 5, 2)] == [3, 2, 3]
        assert call(op, torch.ones(5, 3), backend="a")[0, 0].item() == 3, "asked for by name, it is built"


def test_an_outside_kernel_that_cannot_be_loaded_is_passed_over(op: Op) -> None:
    with installed(stub("a", "no_such_function"), stub("b", "quadruple")):
        with pytest.warns(FallbackWarning, match="a:scratch: refused at run time: AttributeError"):
            assert value(op) == 4
        with pytest.warns(FallbackWarning), pytest.raises(NoKernelError, match="AttributeError"):
            value(op, backend="a")


def test_a_check_that_raises_is_a_reason(op: Op) -> None:
    def also(request: Request, device: object) -> list[Reason]:
        raise ZeroDivisionError("a bug in a declaration")

    with installed(stub("a", also=also)):
        assert value(op) == 2
        assert "also: ZeroDivisionError: a bug in a declaration" in str(explain(request()))


def test_a_probe_of_warmth_that_raises_means_cold(op: Op) -> None:
    with installed(stub("a", slow_build="no_such_module:warm")):
        assert value(op) == 2


def test_a_failed_compilation_falls_through_where_others_are_allowed(op: Op) -> None:
    with installed(stub("a", "fails_to_compile"), stub("b", "quadruple")):
        for names in (("a", "auto"), ("a", "b")):
            with kernelmux.prefer(*names), pytest.warns(FallbackWarning, match="No such file"):
                assert value(op) == 4


def test_a_kernel_id_binds_its_own_op_only(op: Op) -> None:
    two = (stub("a"), stub("b", op="other"))
    with installed(*two), kernelmux.prefer("b:other"):
        assert value(op) == 3
    with installed(*two), pytest.raises(SettingError, match=r"names 'a:scrtch'.*did you mean 'a:scratch'"):
        kernelmux.prefer("a:scrtch", "auto").__enter__()


def test_a_rule_may_put_the_reference_first(op: Op) -> None:
    candidates = Candidates(list(stub("a").kernels), op.reference)
    rule = Rule("r", "scratch", ("reference",), "small work")
    decision = resolve(request(), PRESETS["CPU"], candidates, [rule], Settings(), AllInstalled())
    assert (decision.kernel, decision.why) == (op.reference, "packaged rule r: small work")


def test_a_broad_exclusion_holds_beside_a_narrower_variable(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    with installed(stub("a"), stub("b", "quadruple")):
        monkeypatch.setenv("KERNELMUX_BACKEND", "!a")
        monkeypatch.setenv("KERNELMUX_BACKEND_STUB", "b,auto")
        kernelmux.reload()
        assert "a:scratch" not in [k.id for k in explain(request()).ranked]
