"""Rules: matching, and errors that name file, rule and key."""

import re
from pathlib import Path

import pytest
import torch

import kernelmux
from kernelmux.capabilities import PRESETS, Limit, Request, RuleError
from kernelmux.dispatch.explain import explain
from kernelmux.dispatch.op import Op
from kernelmux.dispatch.state import rules
from kernelmux.policies import Rule, load, packaged
from kernelmux.testing import installed, stub

GOOD = '[[rule]]\nname = "r"\nop = "scratch"\norder = ["b"]\nwhy = "measured"\n'


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "policy.toml"
    path.write_text(text)
    return path


def test_a_rule_file_loads(tmp_path: Path) -> None:
    text = GOOD + (
        'phase = "decode"\ndevice = "cuda"\narch = { one_of = [90] }\n'
        "when = { batch = { max = 8 }, page_size = 16 }\n"
        'features = ["causal"]\nwithout = ["sinks"]\ndtypes = { q = "bfloat16" }\n'
        '[rule.evidence]\ngpu = "NVIDIA H200"\n'
    )
    (rule,) = load(write(tmp_path, text))
    assert rule.when == {"batch": Limit(max=8), "page_size": Limit(one_of=(16,))}
    assert rule.evidence == {"gpu": "NVIDIA H200"}

    def asks(**kwargs: object) -> Request:
        plain = {"dims": {"batch": 4, "page_size": 16}, "dtypes": {"q": torch.bfloat16}, "features": {"causal"}}
        return Request("scratch", "stub", "decode", **{**plain, **kwargs})  # type: ignore[arg-type]

    assert rule.matches(asks(), PRESETS["H100"])
    assert not rule.matches(asks(), PRESETS["B200"])
    assert not rule.matches(asks(), PRESETS["CPU"])
    assert not rule.matches(asks(dims={"batch": 9, "page_size": 16}), PRESETS["H100"])
    assert not rule.matches(asks(dims={"page_size": 16}), PRESETS["H100"])
    assert not rule.matches(asks(features={"causal", "sinks"}), PRESETS["H100"])
    assert not rule.matches(asks(features=()), PRESETS["H100"])
    assert not rule.matches(asks(dtypes={"q": torch.float16}), PRESETS["H100"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[rule]\n", "policy.toml: not TOML"),
        ("[rules]\n", "policy.toml: unknown table 'rules', only [[rule]] tables are allowed"),
        ("rule = 3\n", "'rule' must be an array of tables"),
        (GOOD + 'oder = ["a"]\n', "policy.toml: rule 'r': unknown key 'oder', did you mean 'order'?"),
        (GOOD.replace('why = "measured"\n', ""), "rule 'r': key 'why' is missing or empty"),
        (GOOD.replace('name = "r"\n', ""), "rule 'number 1': key 'name' is missing or empty"),
        (GOOD.replace('["b"]', '"b"'), "rule 'r': key 'order' is 'b', it must be a list of names"),
        (
            GOOD + "when = { batch = { maximum = 8 } }\n",
            "rule 'r': key 'when.batch.maximum' is unknown, did you mean 'max'",
        ),
        (
            GOOD + 'when = { batch = "many" }\n',
            "rule 'r': key 'when.batch' is 'many', it must be an integer or a table",
        ),
        (GOOD + "when = { batch = { max = 1.5 } }\n", "key 'when.batch.max' is 1.5, it must be an integer"),
        (GOOD + "when = { batch = { multiple_of = 0 } }\n", "key 'when.batch.multiple_of' is 0, it must be at least 1"),
        (GOOD + "when = { batch = { min = 3, max = 2 } }\n", "key 'when.batch' has min 3 above max 2"),
        (GOOD + "when = 3\n", "key 'when' is 3, it must be a table"),
        (GOOD + 'device = "gpu"\n', "key 'device' is 'gpu', one of 'cuda', 'cpu'"),
        (GOOD + "phase = 3\n", "key 'phase' is 3, it must be a string"),
        (GOOD + 'dtypes = { q = "bf17" }\n', "key 'dtypes.q': dtype is 'bf17'"),
        (GOOD + GOOD, "two rules are named 'r'"),
    ],
)
def test_a_bad_file_names_file_rule_and_key(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(RuleError, match=re.escape(message)):
        load(write(tmp_path, text))


def test_an_unreadable_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuleError, match=r"none\.toml: No such file or directory; give a readable TOML file"):
        load(tmp_path / "none.toml")


def test_the_users_policy_comes_before_the_packaged_rules(
    op: Op, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KERNELMUX_POLICY", str(write(tmp_path, GOOD)))
    kernelmux.reload()
    with installed(stub("a"), stub("b")):
        decision = explain(Request("scratch", "stub", dtypes={"x": torch.float32}, dims={"rows": 2, "width": 3}))
        assert (decision.kernel.id, decision.source, decision.why) == (
            "b:scratch",
            "user policy",
            "user policy r: measured",
        )


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ('["b"]', '["nobody"]', "order"),
        ("scratch", "nothing", "op"),
        ("why", 'phase = "decod"\nwhy', "phase"),
        ("why", "when = { raws = { min = 1 } }\nwhy", "when"),
        ("why", 'features = ["odd"]\nwhy', "features"),
        ("why", 'dtypes = { q = "bfloat16" }\nwhy', "dtypes"),
    ],
)
def test_unknown_names_in_a_users_policy_are_errors(
    op: Op, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, old: str, new: str, key: str
) -> None:
    monkeypatch.setenv("KERNELMUX_POLICY", str(write(tmp_path, GOOD.replace(old, new))))
    kernelmux.reload()
    with installed(stub("b")), pytest.raises(RuleError, match=f"user policy 'r': key '{key}' names"):
        rules()


def test_packaged_rules_are_known_and_carry_their_reason() -> None:
    assert rules() == packaged()
    for rule in packaged():
        assert len(rule.why) > 10, rule.name
        if rule.arch != Limit():
            assert {"gpu", "versions", "date", "command"} <= set(rule.evidence), rule.name


def test_limits_of_rules_enter_the_keys(op: Op) -> None:
    from unittest import mock

    from kernelmux.dispatch import state

    rule = Rule("r", "scratch", ("b",), "w", when={"rows": Limit(min=100, max=200)})
    with installed(stub("b")), mock.patch.object(state, "packaged_rules", lambda: (rule,)):
        kernelmux.reload()
        assert op.bucket(99) != op.bucket(100) == op.bucket(200) != op.bucket(201)
