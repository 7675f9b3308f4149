"""The options: one list in the library, from which everything else follows."""

import pathlib
import sys

import pytest
import torch

import group_muon
from group_muon import GroupMuon
from group_muon.options import OPTIONS, StepOptions, as_text, shared

sys.path.append(str(pathlib.Path(__file__).parents[2] / "tools"))
import generate

_ops = torch.ops.group_muon


def test_signatures_and_the_page_are_up_to_date():
    for name, text in generate.generated().items():
        assert (generate.ROOT / name).read_text() == text, f"{name}: call ./run generate"


def test_generating_notices_every_change(monkeypatch):
    first, *rest = _ops.options()
    monkeypatch.setattr(torch.ops.group_muon, "options", lambda: [[*first[:4], "new help"], *rest])
    changed = [
        n for n, text in generate.generated().items() if (generate.ROOT / n).read_text() != text
    ]
    assert changed == [generate.OPTIMIZER, generate.PAGE]


def test_pythons_defaults_are_the_librarys():
    group = GroupMuon([torch.randn(4, 4)]).param_groups[0]
    for name, option in OPTIONS.items():
        if name in generate.ONLY_CPP or name in ("partitions", "layout", "full_lr"):
            continue
        text = as_text({name: group[name]}).split("=")[1]
        assert text == option.default or float(text) == float(option.default), name


def test_every_option_has_help_and_a_place():
    assert {option.part for option in OPTIONS.values()} == {"orthogonalize", "step", "weight"}
    assert all(len(option.help) > 10 for option in OPTIONS.values())
    assert [*StepOptions.__annotations__, "custom_coefficients"] == sorted(
        [n for n, o in OPTIONS.items() if o.part != "weight"],
        key=[*StepOptions.__annotations__, "custom_coefficients"].index,
    )


@pytest.mark.parametrize(
    "text, words",
    [
        ("momentun=0.9", "there is no option 'momentun' here; did you mean 'momentum'"),
        ("lr=0.1", "there is no option 'lr' here"),  # each weight has its own
        ("momentum=fast", "momentum should be a number, not 'fast'"),
        ("momentum=1", r"momentum should be in \[0, 1\), not 1"),
        ("nesterov=yes", "nesterov should be true or false, not 'yes'"),
        ("nesterov", "'nesterov' in 'nesterov' should have a value, as in nesterov=true"),
        ("steps=2.5", "steps should be a whole number, not '2.5'"),
        ("steps=101", "steps should be from 0 to 100, not 101"),
        ("tail_steps=-1", "tail_steps should be from 0 to 100, not -1"),
        ("restarts=1,,3", "restarts should be a whole number, not ''"),
        ("custom_coefficients=1,2", "should be triples a, b, c, not 2 numbers"),
        ("transfer=big", "unknown scale 'big'"),
        ("rank_tolerance=nan", "rank_tolerance should be in"),
        ("eps=inf", "eps should be at most"),
    ],
)
def test_a_wrong_text_is_refused_in_words(text, words):
    x = torch.randn(4, 4)
    with pytest.raises(ValueError, match=words):
        _ops.scaled_update(x, "rows", "", 0, 1.0, text)


def test_orthogonalize_refuses_options_of_a_step():
    with pytest.raises(ValueError, match="there is no option 'momentum' here"):
        _ops.orthogonalize(torch.randn(4, 4), "momentum=0.9")


@pytest.mark.parametrize("value", [0.1, 1e-300, 1 / 3, 0.95, 5e-324, 0.1 + 0.2])
def test_numbers_survive_the_text_exactly(value):
    """relative to momentum: look_ahead of a unit gradient and momentum is 1 + μ(μ + 1) or μ + 1."""
    gradient, buffer = torch.zeros(1, 1).double(), torch.ones(1, 1).double()
    text = as_text({"momentum": value, "nesterov": False})
    assert _ops.look_ahead(gradient, buffer, text).item() == value


@pytest.mark.parametrize(
    "options, error, words",
    [
        ({"momentum": "0.9"}, TypeError, "momentum should be a number, not '0.9'"),
        ({"nesterov": "no"}, TypeError, "nesterov should be True or False, not 'no'"),
        ({"method": "newton schulz"}, ValueError, "method should be one word, not 'newton schulz'"),
    ],
)
def test_values_of_the_wrong_type_are_refused_by_name(options, error, words):
    with pytest.raises(error, match=words):
        GroupMuon([torch.randn(4, 4)], **options)


def test_a_group_of_options_is_one_text():
    group = GroupMuon(
        [torch.randn(4, 4)], coefficients=[(3, -3.2, 1.2)] * 2, restarts=[1]
    ).param_groups[0]
    text = as_text(shared(group))
    assert "custom_coefficients=3.0,-3.2,1.2,3.0,-3.2,1.2 " in text and "restarts=1 " in text
    expected = group_muon.orthogonalize(
        torch.eye(4), coefficients=[(3, -3.2, 1.2)] * 2, restarts=[1]
    )
    assert torch.isfinite(expected).all()
