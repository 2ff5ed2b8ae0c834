"""The long campaign, for a short while; and that it would notice."""

import fuzz
import pytest


@pytest.mark.parametrize(
    ("device", "windows"),
    [("cpu", 20), pytest.param("cpu", 300, marks=pytest.mark.slow), pytest.param("cuda", 100, marks=pytest.mark.gpu)],
)
def test_a_short_campaign(device, windows):
    ran, _, wrong = fuzz.campaign(range(windows), device, 60)
    assert not wrong
    assert ran["torch"] == windows and ran["triton"] > windows // 5


def test_a_small_error_is_noticed(monkeypatch):
    real = fuzz.vtrace
    monkeypatch.setattr(fuzz, "vtrace", lambda **call: [x * 1.1 for x in real(**call)])
    assert len(fuzz.campaign(range(10), "cpu", 60)[2]) > 10


def test_a_leak_is_noticed(monkeypatch):
    real = fuzz.vtrace

    def leaky(**call):
        targets, advantages = real(**call)
        return targets + 0 * call["values"].sum(), advantages

    monkeypatch.setattr(fuzz, "vtrace", leaky)
    monkeypatch.setattr(fuzz, "INTERPRETED_ELEMENTS", 0)
    wrong = fuzz.campaign(range(100), "cpu", 60)[2]
    assert any("changed another episode" in line for line in wrong)
