"""The cost model: arithmetic on made-up costs, and what is refused because nobody published it."""

import json

import pytest
import sympy

from gemma_npu_compile.bench import estimate
from gemma_npu_compile.bench.costs import CONTEXT, DRAFTS, ROWS, Costs, Formula
from gemma_npu_compile.bench.steady import _runner
from gemma_npu_compile.cli import main
from gemma_npu_compile.engine import Engine
from gemma_npu_compile.options import Options


def formula(expr) -> Formula:
    return Formula("f", "bytes", sympy.sympify(expr), {})


# 8 GB of weights and 1 GB a draft, 1 MB a token kept, half of it read, 1 TFLOP a row
COSTS = Costs(
    weights=formula(8 * 10**9 + 10**9 * DRAFTS),
    kv=formula(5 * 10**5 * ROWS * CONTEXT),
    flops=formula(10**12 * ROWS),
    attention=formula(0),
    stored=12 * 10**9,
    kept=formula(10**6 * ROWS * CONTEXT),
)
DEVICE = {estimate.BANDWIDTH: 1e12, estimate.PEAK: 2e14, estimate.TASKS: 500, estimate.TASK: 4e-6}


def lines(**changes):
    found = estimate.table(COSTS, {**DEVICE, **changes}, 16e9, 2, (1000,), (1.5,))
    return {line["rows"]: line for line in found}


def test_a_step_is_its_bytes_or_its_products_and_its_launches():
    found = lines()
    assert list(found) == [1, 2, 4, 8, 16, 32, 64]
    one, many = found[1], found[64]
    assert (one["weight_bytes"], one["kv_bytes"], one["flops"]) == (10 * 10**9, 5 * 10**8, 10**12)
    assert one["launch_ms"] == pytest.approx(2.0)
    assert one["step_ms"] == pytest.approx(10.5 + 2)  # bytes: 10.5 ms, products: 5 ms
    assert one["tokens_per_second"] == [pytest.approx(2.5 / 12.5e-3)]
    assert many["step_ms"] == pytest.approx(320 + 2)  # bytes: 42 ms, products: 320 ms
    assert many["tokens_per_second"] == [pytest.approx(64 * 2.5 / 322e-3)]


def test_what_does_not_fit_is_said():
    found = lines()
    assert found[4]["memory_bytes"] == 16 * 10**9
    assert [line["fits"] for line in found.values()] == [True, True, True, False, False, False, False]
    unknown = estimate.table(COSTS, DEVICE, None, 2, (1000,), (1.5,))
    assert {line["fits"] for line in unknown} == {None}


def test_every_number_has_its_source_and_the_users_come_first():
    published = {each.name: each for each in estimate.inputs_of("ascend910b", None, None, None, 70, True)}
    assert (published["bandwidth"].value, published["bandwidth"].source) == (1600, estimate.GUIDE)
    assert (published["tasks"].value, published["tasks"].source) == (70, "launches of the traced step")
    assert published["task"].value == 0
    assert "no source is known" in published["task"].source
    mixed = estimate.inputs_of("ascend910b", 900.0, None, None, 70, True)
    assert [(each.value, each.source) for each in mixed[:2]] == [(900.0, "--bandwidth"), (353.9, estimate.GUIDE)]
    own = {each.name: each for each in estimate.inputs_of("ascend910_93", 900.0, 200.0, 3.0, 70, False)}
    assert {name: (each.value, each.source) for name, each in own.items()} == {
        "bandwidth": (900.0, "--bandwidth"),
        "peak": (200.0, "--tflops"),
        "tasks": (70, "--tasks"),
        "task": (3.0, "--task-us"),
    }
    assert estimate.numbers(list(own.values())) == {
        estimate.BANDWIDTH: 900e9,
        estimate.PEAK: 200e12,
        estimate.TASKS: 70,
        estimate.TASK: pytest.approx(3e-6),
    }


def call(capsys, *arguments: str) -> tuple[int, str, str]:
    code = main(["bench", "--estimate", *arguments])
    return code, *capsys.readouterr()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--estimate needs --shapes"),
        (("--shapes", "gemma-4-32b"), "did you mean 'gemma-4-31b'?"),
        (("--shapes", "e2b", "--soc", "ascend910c"), "--soc is 'ascend910c' (did you mean"),
        (
            ("--shapes", "e2b", "--soc", "ascend910_93"),
            "no published bandwidth of ascend910_93 is known here: give --band",
        ),
        (("--shapes", "e2b", "--soc", "ascend910_93", "--bandwidth", "1000"), "no published peak"),
        (("--shapes", "e2b", "--scenario", "tiny"), "--scenario and --estimate: give one of them"),
    ],
)
def test_refusals(capsys, arguments, message):
    code, out, err = call(capsys, *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_json_and_page_of_an_estimate(capsys):
    flags = ("--shapes", "e2b", "--tasks", "1000", "--task-us", "2", "--context", "4096", "--accepted", "2.5")
    code, out, _ = call(capsys, *flags, "--json")
    answer = json.loads(out)
    assert (code, answer["estimate"], answer["shapes"], answer["soc"]) == (0, True, "e2b", "ascend910b")
    assert {each["name"] for each in answer["formulas"]} == {
        "weights",
        "keys and values",
        "arithmetic",
        "keys and values kept",
        "step",
        "tokens",
    }
    first = answer["table"][0]
    assert (first["rows"], first["context"], first["launch_ms"]) == (1, 4096, pytest.approx(2.0))
    seconds = max(
        (first["weight_bytes"] + first["kv_bytes"]) / 1600e9,
        first["flops"] / 353.9e12,
    )
    assert first["step_ms"] == pytest.approx(1e3 * seconds + 2.0)
    assert first["tokens_per_second"] == [pytest.approx(3.5e3 / first["step_ms"])]
    assert [each["source"] for each in answer["inputs"] if each["name"] == "bandwidth"] == [estimate.GUIDE]
    code, out, _ = call(capsys, *flags)
    assert code == 0
    assert out.startswith("ESTIMATE, nothing was measured: e2b on ascend910b, 3 drafts\n")
    assert "bytes_per_element*(W_assistant*drafts + W_target)" in out
    assert f"{first['step_ms']:.2f}" in out


@pytest.mark.slow
def test_tasks_are_those_of_a_capture(pair):
    options = Options(platform="ascend910b")
    engine = Engine(*pair, 1, max_rows=2, max_model_len=1024, options=options)
    engine.warm_up()
    captured = [graph for binding in _runner(engine)._bindings for graph in binding.graphs.values()]
    assert [len(graph.tasks) for graph in captured] == [estimate.count_tasks(*pair, 1, "ascend910b")] * 2
