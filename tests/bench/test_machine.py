"""Figures of the machine: what is counted, whatever it takes."""

import dataclasses

import pytest
import torch

from gemma_npu_compile.bench import machine


@pytest.fixture
def ran(monkeypatch):
    """Results of what is timed; everything takes two seconds."""
    found = []

    def two_seconds(run):
        found.append(run())
        return 2.0

    monkeypatch.setattr(machine, "_seconds", two_seconds)
    return found


def test_a_copy_reads_and_writes_a_sum_only_reads(ran):
    assert machine.copy_gbps(4000) == pytest.approx(2 * 4000 / 2 / 1e9)
    assert machine.read_gbps(4000) == pytest.approx(4000 / 2 / 1e9)
    assert machine.gflops(10) == pytest.approx(2 * 10**3 / 2 / 1e9)
    copied, total, product = ran
    assert (copied == 1).all()
    assert total == 1000
    assert torch.equal(product, torch.full((10, 10), 10.0))


def test_products_read_their_weight_with_the_kernel_a_step_would_take(ran, monkeypatch):
    taken = []
    monkeypatch.setattr(torch.nn.functional, "linear", lambda x, weight: taken.append(x) or x @ weight.t())
    for rows, platform in ((4, "cpu"), (65, "cpu"), (4, "ascend910b")):
        assert machine.product_gbps(rows, torch.bfloat16, platform, 3 * 2048) == pytest.approx(3 * 2048 / 2 / 1e9)
        assert torch.equal(ran[-1], torch.full((rows, 3), 1024.0, dtype=torch.bfloat16))
    assert [len(x) for x in taken] == [65, 4]
    monkeypatch.setattr(machine, "product_gbps", lambda rows, dtype, platform: rows)
    monkeypatch.setattr(machine, "attention_gbps", lambda queries, *scenario: (queries, *scenario))
    geometry = (4, 2, 16, 100)
    found = machine.rates(2, 3, geometry, torch.float32, "cpu")
    assert (found.verify, found.draft) == (8, 2)
    assert [found.attend_verify, found.attend_draft] == [(n, geometry, torch.float32, "cpu") for n in (4, 1)]


def test_attention_reads_every_key_of_as_many_rows_as_asked_for(ran):
    """4 rows of 200 keys and values: 2 heads of 16, float32, whole blocks of 128 laid out."""
    size = 2 * 256 * 2 * 16 * 4
    for platform in ("cpu", "ascend910b"):
        rate = machine.attention_gbps(3, (4, 2, 16, 200), torch.float32, platform, 4 * size)
        assert rate == pytest.approx(4 * size * 200 / 256 / 2 / 1e9)
        torch.testing.assert_close(ran[-1], torch.ones(4 * 3, 4, 16))


def test_the_middle_of_rates_is_taken_one_by_one():
    found = machine.middle([machine.Rates(*map(float, each)) for each in ([1, 5, 9] + [0] * 4, [3, 4, 7] + [2] * 4)])
    assert dataclasses.astuple(found) == (2.0, 4.5, 8.0, 1.0, 1.0, 1.0, 1.0)
    found = machine.middle([machine.Rates(*[rate, 9.0 - rate, *[1.0] * 5]) for rate in (2.0, 8.0, 3.0)])
    assert (found.copy, found.read) == (3.0, 6.0)


def test_seconds_are_a_median_behind_a_run_that_is_not_timed(monkeypatch):
    times = iter([0, 1, 10, 19, 20, 22])  # three runs of 1, 9 and 2 seconds
    monkeypatch.setattr(machine.time, "perf_counter", lambda: next(times))
    ran = []
    assert machine._seconds(lambda: ran.append(0), repeats=3) == 2
    assert len(ran) == 4


def test_the_peak_of_memory_begins_anew():
    if not machine.forget_peak():
        pytest.skip("this kernel keeps its peak")
    before = machine.resident_mb(peak=True)
    block = torch.ones(64 * 2**18)
    grown = machine.resident_mb(peak=True)
    del block
    assert grown - before == pytest.approx(64, abs=8)
    assert machine.forget_peak()
    assert machine.resident_mb(peak=True) < grown - 48


def test_a_machine_without_proc_has_no_figures(monkeypatch):
    def missing(*args, **kwargs):
        raise FileNotFoundError

    monkeypatch.setattr(machine.Path, "read_text", missing)
    monkeypatch.setattr(machine.Path, "write_text", missing)
    assert machine.resident_mb() is None
    assert machine.forget_peak() is False
    assert machine.describe()["processor"]
