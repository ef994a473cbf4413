"""`benchmarks/published.py`: the planner's model puts published results in the order in which they were published."""

import dataclasses
import importlib.util
import json
import pathlib
import sys

import pytest

from overspill import zoo
from overspill.policies.activation import Placement

SCRIPT = pathlib.Path(__file__).parents[2] / "benchmarks" / "published.py"


@pytest.fixture(scope="module")
def published():
    spec = importlib.util.spec_from_file_location("published_benchmark", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def predicted(published):
    return published.predict()


@pytest.fixture(scope="module")
def values(predicted):
    return {(row.source.partition(",")[0], row.what): row.predicted for row in predicted[0]}


def test_deepseek_pipelined_offload_beats_recompute_and_that_beats_waiting(values):
    fast = values["NVIDIA", "offload, pipelined, 1024"]
    slow = values["NVIDIA", "recompute, global batch 256"]
    waiting = values["NVIDIA", "offload, not pipelined, 1024"]
    assert fast > 1.05 * slow
    assert slow > 1.01 * waiting


def test_deepseek_saved_does_not_fit_and_offloaded_does(predicted, values):
    fits = {text: holds for text, holds in predicted[2].items() if " fit" in text}
    assert len(fits) == 2 and all(fits.values())
    assert values["NVIDIA", "device memory with offload"] < 185


def test_deepseek_offload_is_offload(predicted):
    """What is chosen moves experts' activations of most layers, and never what it takes little to make."""
    chosen = predicted[3]
    assert chosen["moe.experts.gate"][Placement.HOST.value] > 29
    for path in ("attention.query", "attention.key", "attention.value"):
        assert Placement.HOST.value not in chosen[path]
        assert chosen[path][Placement.RECOMPUTE.value] > 29


@pytest.mark.parametrize("source", ["NVIDIA, Llama-3.1-405B", "Intel, Llama-3.3-70B"])
def test_llama_gains_a_few_per_cent(predicted, source):
    rows, variations, *_ = predicted
    gains = [row.predicted for row in rows if row.source == source and row.unit == "%"]
    gains += [value for name, _, unit, value in variations if name == source and unit == "%"]
    assert len(gains) > 1
    assert all(1 < gain < 6 for gain in gains)


def test_all_orders_come_out(predicted):
    assert len(predicted[2]) == 7
    assert all(predicted[2].values()), predicted[2]


def test_absolute_numbers_are_in_the_region(predicted):
    rows = [row for row in predicted[0] if row.unit == "TFLOP/s"]
    assert len(rows) == 5
    for row in rows:
        assert 0.6 < row.predicted / row.published < 1.6, row


def test_model_flops_are_those_of_the_formula(published):
    config = zoo.REGISTRY["llama-3-8b"]
    tokens, width = 4096, config.hidden_size
    weights = zoo.parameters(config).total - config.vocab_size * width  # of embeddings nothing is multiplied
    attention = 12 * config.num_hidden_layers * tokens**2 * width / 2
    found = published.Prediction(published.Run("llama-3-8b", "h200", 8, 1, tokens)).flops
    assert found == pytest.approx(6 * weights * tokens + attention, rel=0.002)


def test_experts_elsewhere_are_counted(published, monkeypatch):
    """Spread over devices, tokens travel to experts and back in both passes, and the state stays what it is."""
    config = zoo.REGISTRY["overspill-deepseek-tiny"]
    spread = config.n_routed_experts // config.num_experts_per_tok
    run = published.Run("overspill-deepseek-tiny", "gb200", 8, 2, 64)
    monkeypatch.setattr(published, "_SHORT", 64)
    near, far = (published.Prediction(dataclasses.replace(run, spread=n)) for n in (1, spread))

    def sent(prediction):
        graphs = [block.graph for block in prediction.long.assembly.blocks if "moe" in "".join(block.names)]
        return [sum(w.cost.exchanged for w in works) for g in graphs for works in (g.forward, g.backward)]

    rows = 2 * 64 * config.num_experts_per_tok
    one_way = rows * config.hidden_size * 2 * (spread - 1) / spread
    assert set(sent(near)) == {0}
    assert set(sent(far)) == {2 * one_way}
    one, other = (sum(g.forward_seconds for g in p.problem.groups) for p in (near, far))
    assert other > one
    state = [p.missing * 12 + p.long.program.bytes_in("device") for p in (near, far)]
    assert state[1] == pytest.approx(state[0], rel=1e-3)  # what is small isn't cut


def test_a_wrong_order_is_said_and_ends_in_an_error(published, predicted, monkeypatch, tmp_path, capsys):
    rows, variations, orders, chosen = predicted
    path = tmp_path / "published.json"
    monkeypatch.setattr(sys, "argv", ["published.py", "--json", str(path)])
    monkeypatch.setattr(published, "predict", lambda: predicted)
    assert published.main() == 0
    text = capsys.readouterr().out
    assert "908" in text and "Of all runs" in text and "NOT AS PUBLISHED" not in text
    written = json.loads(path.read_text())
    assert len(written["rows"]) == len(rows) and written["orders"] == orders
    wrong = {**orders, next(iter(orders)): False}
    monkeypatch.setattr(published, "predict", lambda: (rows, variations, wrong, chosen))
    assert published.main() == 1
    assert "NOT AS PUBLISHED" in capsys.readouterr().out
