"""The dump: what the page and the files say of a step with known layers, folding, and the page's own integrity."""

import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from torch.fx import Graph, GraphModule

from gemma_npu_compile.dump import current, dump_to
from gemma_npu_compile.dump.listing import Listing, clean, ranges, together
from gemma_npu_compile.dump.tables import size
from gemma_npu_compile.engine import Engine
from gemma_npu_compile.options import Options

S, F = "sliding_attention", "full_attention"
VOID = {"meta", "br", "hr", "img", "link", "input"}


class Page(HTMLParser):
    """Checks that every tag closes, and collects ids, links and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            elif name in ("href", "src"):
                self.links.append(value or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.fixture(scope="module")
def folder(make_pair, tmp_path_factory) -> Iterator[Path]:
    """The dump of a step whose target has four sliding layers and a full one."""
    target, assistant = make_pair(layer_types=(S, S, S, S, F))
    out = tmp_path_factory.mktemp("dump") / "folder"
    options = Options(disable_passes=("candidate_argmax",))
    with dump_to(out, about={"model": "<b>a & b</b>"}) as written:
        engine = Engine(target, assistant, 1, max_rows=6, max_model_len=256, options=options)
        engine.warm_up()
        engine.prefill([torch.tensor([1, 2, 3])])
        assert current() is written
    assert current() is None
    return out


@pytest.fixture(scope="module")
def facts(folder) -> dict:
    (graph,) = json.loads((folder / "plan.json").read_text())["graphs"]
    return graph


def test_the_page_is_whole_and_needs_nothing_from_outside(folder):
    text = (folder / "index.html").read_text()
    page = Page(text)
    assert len(page.ids) == len(set(page.ids))
    for link in page.links:
        if link.startswith("#"):
            assert link[1:] in page.ids
        else:
            assert (folder / link).is_file(), link
    addresses = set(re.findall(r"https?://[^\"' <]+", text))
    assert addresses <= {"http://www.w3.org/2000/svg"}
    assert "<script" not in text
    assert "@import" not in text
    assert "url(" not in text
    assert "<b>a & b</b>" in page.text  # escaped, so it arrives as text


def test_the_markdown_links_to_files_that_exist(folder):
    text = (folder / "index.md").read_text()
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert links
    assert all((folder / link).is_file() for link in links)


def test_equal_layers_are_folded(facts, folder):
    places = {tuple(each["paths"]): each["nodes"] for each in facts["places"]}
    layer = "target.model.layers."
    assert (layer + "1", layer + "2") in places  # the first makes what the others share, the last is read elsewhere
    assert places[(layer + "4",)] > 20
    total = sum(len(paths) * nodes for paths, nodes in places.items())
    inputs = len(facts["inputs"]) + len(facts["host_parameters"])
    assert total == facts["nodes"] - inputs
    assert "target.model.layers.{1-2}" in (folder / "index.html").read_text()


def test_attention_is_listed_with_what_it_depends_on(facts):
    found = [(a["phase"], a["layer"], a["window"], a["group"], a["lengths"]) for a in facts["attention"]]
    assert found == [
        ("draft.0", "assistant.layers.0", 25, "g0", "fixed 256"),
        ("draft.0", "assistant.layers.1", None, "g1", "bucket"),
        *(("verify", f"target.layers.{i}", 24, "g0", "fixed 256") for i in range(4)),
        ("verify", "target.layers.4", None, "g1", "bucket"),
    ]
    assert {(a["layout"], a["heads"], a["scale"], a["kv_len_source"]) for a in facts["attention"]} == {
        ("BNSD", 4, 1.0, "args[2]")
    }
    names = {i["name"] for i in facts["inputs"]}
    assert all(a["block_table"] in names for a in facts["attention"])


def test_inputs_have_an_address_class_and_bytes(facts):
    inputs = {i["label"]: i for i in facts["inputs"] if i["layer"] is None}
    assert [inputs[f"args[{i}]"]["address"] for i in range(3)] == ["buffer"] * 3
    assert [inputs[f"args[{i}]"]["bytes"] for i in range(3)] == [6 * 8, 6 * 64 * 4, 6 * 4]
    pool = inputs["cache.key_pools[0]"]
    assert (pool["role"], pool["address"], pool["buffer"]) == ("cache", "fixed", None)
    assert pool["bytes"] == 4 * torch.Size(pool["shape"]).numel()
    assert facts["memory"]["caches"] == sum(i["bytes"] for i in inputs.values() if i["role"] == "cache")
    tables = {i["buffer"]: i["bytes"] for i in facts["inputs"] if i["role"] == "block_table"}
    assert set(tables) == {"block_table.g0", "block_table.g1"}
    (mirror,) = (i for i in inputs.values() if i["role"] == "host")
    assert (mirror["address"], mirror["bytes"]) == ("buffer", 6 * 4)
    assert facts["memory"]["stable_inputs"] == sum(tables.values()) + 6 * 8 + 6 * 64 * 4 + 6 * 4 + 6 * 4


def test_capture_sizes_say_what_they_serve(facts):
    assert facts["sizes"] == [1, 2, 4, 6]
    assert [(c["from_rows"], c["rows"]) for c in facts["captures"]] == [(1, 1), (2, 2), (3, 4), (5, 6)]
    peaks = [c["intermediate_bytes"] for c in facts["captures"]]
    assert peaks == sorted(peaks)
    assert facts["memory"]["intermediates"] == peaks[-1]


def test_each_pass_has_its_file_and_those_that_changed_something_a_diff(facts, folder):
    files = sorted(p.name for p in (folder / "graphs" / "0").glob("*.py"))
    names = [p["name"] for p in facts["passes"]]
    assert files == [f"{i:02d}_{name}.py" for i, name in enumerate(["traced", *names])]
    assert "candidate_argmax" not in names
    page = Page((folder / "index.html").read_text())
    anchors = {i.removeprefix("g0-") for i in page.ids if i.startswith("g0-")}
    assert anchors == {p["name"] for p in facts["passes"] if p["changed"]}
    text = "".join(page.text)
    assert "+rms_norm_default: f32[" in text
    assert "-pow_1: f32[" in text


def test_counts_of_the_run_arrive_in_the_dump(facts):
    assert (facts["replays"], facts["eager_calls"], facts["fallbacks"], facts["recompile"]) == (1, 0, {}, False)


def _graph(*layers: int) -> GraphModule:
    """A chain of layers, each two nodes in a module of its own; the second has no record of where it comes from."""
    graph = Graph()
    value = graph.placeholder("x")
    value.meta["label"] = "args[1]"
    for index in layers:
        stack = {"1": ("L['self']", None), "2": (f"L['self'].stack._modules['{index}'].norm", None)}
        new = graph.call_function(torch.ops.aten.neg.default, (value,))
        value = graph.call_function(torch.ops.aten.mul.Tensor, (new, value))
        value.meta["nn_module_stack"] = stack
    graph.output((value,))
    return GraphModule(torch.nn.Module(), graph)


def test_a_node_without_a_record_belongs_to_its_users_place():
    listing = Listing(_graph(0, 1, 2))
    assert [(p.path, len(p.shown)) for p in listing.places.values()][:3] == [(f"stack.{i}", 2) for i in range(3)]
    # layer 1 reads what layer 0 made, layer 0 reads an input whose name has a 1 in it: not the number of a layer
    assert [together(f.paths) for f in listing.fold()][:2] == ["stack.0", "stack.{1-2}"]


def test_places_that_changed_alike_share_a_diff():
    before, after = _graph(0, 1, 2, 3), _graph(0, 1, 2, 3)
    for node in list(after.graph.nodes):
        if node.target is torch.ops.aten.neg.default and node.all_input_nodes[0].op != "placeholder":
            node.target = torch.ops.aten.abs.default
    change, *rest = Listing(after).changes(Listing(before))
    assert rest == []
    assert change.paths == ("stack.1", "stack.2", "stack.3")
    assert [line[:1] for line in change.diff] == ["@", "-", "+", " "]


def test_names_and_numbers_for_people():
    assert clean("L['fn']._modules['target'].layers._modules['0']._parameters['w']") == "target.layers.0.w"
    assert clean("L['x']") == "x"
    assert ranges([5, 0, 1, 2, 4, 8]) == "0-2, 4-5, 8"
    paths = [f"draft.{i}/a.layers.{j}" for i in range(3) for j in range(4)]
    assert together([*paths, "verify/t.layers.5"]) == "draft.{0-2}/a.layers.{0-3}, verify/t.layers.5"
    assert [size(n) for n in (None, 5, 1536, 200 * 2**20, 3 * 2**40)] == ["", "5 B", "1.5 KiB", "200 MiB", "3.0 TiB"]
