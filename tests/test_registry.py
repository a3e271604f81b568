"""The registry: folders, entry points, duplicates."""

from importlib.metadata import EntryPoint

import pytest

from kernelmux.capabilities import Backend, Kernel, RegistryError, Support
from kernelmux.capabilities.verified import verified
from kernelmux.dispatch import registry, state
from kernelmux.testing import stub


def test_every_folder_under_backends_is_found_by_its_name() -> None:
    found = registry.backends()
    assert {"cudnn", "flash_attn_3", "torch"} <= set(found)
    assert all(name == backend.name for name, backend in found.items())
    assert not any(name.startswith("_") for name in found)


def test_every_kernel_serves_an_op_that_exists() -> None:
    for backend in registry.backends().values():
        for kernel in backend.kernels:
            assert kernel.op in state.OPS, kernel.id


def test_two_backends_of_one_name_are_refused() -> None:
    with pytest.raises(RegistryError, match="two backends are named 'a'; rename or uninstall one of them"):
        registry.collect([stub("a"), stub("a")])


def test_two_kernels_of_one_id_are_refused() -> None:
    kernel = Kernel("x", "m:f", Support())
    with pytest.raises(RegistryError, match="backend a declares a:x twice; give one of them another variant"):
        registry.collect([Backend("a", "A", (kernel, kernel))])


@pytest.mark.parametrize("name", ["auto", "reference", "two words"])
def test_reserved_and_odd_names_are_refused(name: str) -> None:
    with pytest.raises(RegistryError, match="backend name is"):
        registry.collect([stub(name)])


def test_entry_points_bring_backends_and_broken_ones_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [
        EntryPoint("good", "kernelmux.testing:stub_backend_for_tests", registry.GROUP),
        EntryPoint("bad", "no_such_module:BACKEND", registry.GROUP),
    ]
    monkeypatch.setattr("kernelmux.testing.stub_backend_for_tests", stub("good"), raising=False)
    monkeypatch.setattr(registry.metadata, "entry_points", lambda group: points)
    good, bad = registry._outside()
    assert good.kernels[0].id == "good:scratch"
    assert str(bad.problem()) == (
        "entry point no_such_module:BACKEND: ModuleNotFoundError: No module named 'no_such_module'"
    )


def test_an_entry_point_that_is_no_backend_harms_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [EntryPoint(name, "kernelmux.testing:SCRATCH", registry.GROUP) for name in ("torch", "my-backend")]
    monkeypatch.setattr(registry.metadata, "entry_points", lambda group: points)
    found = registry.collect([*registry._own(), *registry._outside()])
    assert {"outside_torch", "outside_my_backend", "torch"} <= set(found)
    assert "TypeError: it gives a str, it must be a Backend" in str(found["outside_torch"].problem())


def test_a_kernel_is_verified_only_by_a_record_of_its_present_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    from kernelmux.capabilities import verified as module

    kernel = stub("a").kernels[0]
    now = module.source_hash(kernel.target)
    entry = {"gpu": "G", "versions": {}, "date": "2026-12-01"}
    for source, expected in ((now, ["sm90"]), ("of yesterday", [])):
        kernels = {kernel.id: {"source": source, "cases": 3}}
        monkeypatch.setattr(module, "records", lambda kernels=kernels: {"sm90": {**entry, "kernels": kernels}})
        assert list(verified(kernel)) == expected
