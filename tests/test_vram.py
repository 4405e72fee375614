"""What measures memory and time, on a card whose counters are made up: every gigabyte and second is in one line, once."""

import dataclasses
import time
from types import SimpleNamespace

import bitsandbytes.functional
import pytest
import torch

import budget
import phases
import vram
from train import PRESETS

GIB = 2**30
PLAN = budget.plan(PRESETS["chapter"], budget.shape_of("qwen3-4b"), 15.46)


class FakeCard:
    """An allocator as torch has it, in GiB, and a card that holds it beside other processes and the CUDA context."""

    def __init__(self, monkeypatch):
        self.others, self.context, self.outside = 0.5, 0.7, 0.0
        self.current = self.peak = self.reserved = self.reserved_peak = 0.0
        self.card_peak = 0.0
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: round(self.current * GIB))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: round(self.reserved * GIB))
        monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", self.stats)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", self.reset)

    def used_gib(self):
        return self.others + self.context + self.outside + self.reserved

    def take(self, tensors, blocks=0.0):
        """Tensors, and what torch's blocks grow by beyond them; negative ones are given back, and their blocks are kept."""
        self.current += tensors
        self.peak = max(self.peak, self.current)
        self.reserved = max(self.reserved, self.current) if not blocks else self.reserved + max(tensors, 0) + blocks
        self.reserved_peak = max(self.reserved_peak, self.reserved)
        self.card_peak = max(self.card_peak, self.used_gib())

    def stats(self):
        def counter(current, peak):
            return {"all": {"current": round(current * GIB), "peak": round(peak * GIB)}}

        return {
            "allocated_bytes": counter(self.current, self.peak),
            "reserved_bytes": counter(self.reserved, self.reserved_peak),
        }

    def reset(self):
        self.peak, self.reserved_peak = self.current, self.reserved


@pytest.fixture
def card(monkeypatch):
    return FakeCard(monkeypatch)


def steps(card, meter, timed, logits_first=False, cache=1.0, asleep=0.0):
    """Two steps: 1 GiB of cache in generate(), 0.12 of gradients, 1.6 of activations and, above what stands by then, logits."""
    model = torch.nn.Linear(1, 1)
    for step in range(2):
        timed.begin_step()
        timed.enter("forward_backward")
        timed.enter("log_probs")
        timed.enter("generation")
        card.take(cache)
        card.take(-cache)
        timed.leave()
        card.outside -= asleep if step == 0 else 0.0
        timed.leave()
        if not logits_first:
            card.take(1.5)
        timed.enter("logits")
        card.take(0.4)
        card.take(-0.4)
        timed.leave()
        if not logits_first:
            card.take(-1.5)
        card.take(0.12)
        card.take(1.6)
        card.take(-1.6)
        meter.gradients(model)
        meter.lines["gradients"] = 0.12  # there is no tensor on a card here
        timed.leave()
        timed.enter("optimizer")
        if step == 0:
            card.take(0.06)
        card.take(-0.12)
        timed.leave()
        meter.lines["optimizer"] = 0.06
        timed.end_step()


def measured(card, vllm, logits_first=False, sleep=False):
    """The rows of a run on that card."""
    config = dataclasses.replace(PRESETS["chapter"], backend="vllm" if vllm else "unsloth", vllm_enable_sleep_mode=sleep)
    plan = budget.plan(config, budget.shape_of("qwen3-4b"), 15.46)
    timed = phases.Phases(on_gpu=True, say=print)
    peak = SimpleNamespace(start_gib=card.others)
    meter = vram.Meter(card, peak, timed, plan, print, sleeps=sleep)
    card.take(2.5)  # weights
    card.take(0.08)  # what no line knows of
    if vllm:
        card.take(2.4)
        meter.at("vllm_cache")
        card.take(0.07, blocks=0.11)  # graphs: a few tensors, their pool, and what lies outside of torch
        card.outside = 0.18
        meter.at("vllm_graphs")
        meter.lines |= {"kv_cache": 2.4, "vllm_activations": 0.25}
        meter.lines["vllm_graphs"] = meter.points["vllm_graphs"][0] - meter.points["vllm_cache"][0]
    card.take(0.2)  # the adapter
    meter.at("adapter")
    meter.lines |= {"weights": 2.5, "lora": 0.2}
    card.context = 0.8  # kernels are loaded as they are needed
    card.card_peak = max(card.card_peak, card.used_gib())
    # generate() has a cache, or vLLM activations, of which this is all that a fake card knows
    steps(card, meter, timed, logits_first, cache=0.25 if sleep else 1.0, asleep=2.4 * sleep)
    # in torch's blocks a gap stays that no tensor fills
    gap = 0.2
    card.reserved = card.reserved_peak = max(card.reserved_peak, timed.allocated / GIB + 0.11 * vllm) + gap
    card.card_peak = max(card.card_peak, card.used_gib())
    peak.peak_gib = card.card_peak
    return {row["key"]: row for row in meter.trained()}, timed


EXPECTED = {"weights": 2.5, "lora": 0.2, "gradients": 0.12, "optimizer": 0.06, "context": 0.8, "activations": 1.6,
            "logits": 0.4, "slack": 0.2, "other": 0.08}  # fmt: skip


@pytest.mark.parametrize("vllm", [True, False])
def test_every_gigabyte_is_in_one_line(card, vllm):
    """Logits of 0.4 GiB on top of 1.5 are 0.18 more than the training pass at its highest: so much they add to the total."""
    rows, timed = measured(card, vllm)
    wanted = {**EXPECTED, "kv_cache": 2.4 if vllm else 1.0}
    if vllm:
        wanted |= {"vllm_graphs": 0.07 + 0.11 + 0.18, "vllm_activations": 0.25}
    got = {key: row["measured_gib"] for key, row in rows.items()}
    assert got == pytest.approx({**wanted, "total": got["total"]}, abs=1e-6)
    counted = dict(wanted)
    counted["logits"] = 1.5 + 0.4 - (0.12 + 1.6)
    counted.pop("vllm_activations", None)  # gone by then
    if not vllm:
        counted.pop("kv_cache")  # of generate(): gone too
    assert got["total"] == pytest.approx(sum(counted.values()), abs=1e-6)
    assert got["total"] == pytest.approx(card.card_peak - card.others)
    assert rows["weights"]["predicted_gib"] == pytest.approx(2.47, abs=0.01) and rows["weights"]["kind"] == "computed"


def test_logits_below_the_training_pass_add_nothing(card):
    rows, _ = measured(card, vllm=True, logits_first=True)
    got = {key: row["measured_gib"] for key, row in rows.items()}
    assert got["logits"] == pytest.approx(0.4) and got["other"] == pytest.approx(0.08, abs=1e-6)
    parts = ("weights", "lora", "gradients", "optimizer", "context", "activations", "slack", "other", "kv_cache", "vllm_graphs")
    assert got["total"] == pytest.approx(sum(got[part] for part in parts), abs=1e-6)


def test_a_cache_that_sleeps_counts_where_it_is_the_highest_moment(card):
    """2.4 GiB that torch goes on counting: by NVML they are there when vLLM generates, and 1.9 of training in their place.

    The peak is in the first rollout here: no optimizer state yet, none of the gap that `measured` adds at the end, and torch's
    blocks of the graphs' pool not beside the others. `other` is less by as much than when all is there at the peak.
    """
    rows, _ = measured(card, vllm=True, sleep=True)
    got = {key: row["measured_gib"] for key, row in rows.items()}
    assert got["context"] == pytest.approx(0.8, abs=1e-6) and got["kv_cache"] == 2.4
    parts = ("weights", "lora", "optimizer", "context", "slack", "other", "kv_cache", "vllm_activations", "vllm_graphs")
    assert got["total"] == pytest.approx(sum(got[part] for part in parts), abs=1e-6)
    assert got["other"] == pytest.approx(0.08 - got["optimizer"] - got["slack"] - 0.11, abs=1e-6)


def test_the_table_says_how_far_off_the_plan_was(card):
    rows = [vram.row("base weights", "weights", 2.2, 2.0, "computed"), vram.row("KV cache", "kv_cache", 1.0, None, "computed")]
    assert vram.in_words(rows) == [
        "memory, GiB          predicted  measured  (in brackets: not there at the peak, or not all of it)",
        "base weights              2.20      2.00  +10.0 %",
        "KV cache                  1.00      0.00 ",
    ]


def test_counters_are_taken_after_each_phase_of_the_engines_start(card):
    meter = vram.Meter(card, SimpleNamespace(start_gib=card.others), phases.Phases(True, print), PLAN, print)

    def load_model(self, dummy=False):
        card.take(2.5)
        return dummy

    followed = meter.followed(load_model, "vllm_weights")
    assert followed(None, dummy="what the method returns") == "what the method returns"
    assert followed.__name__ == "load_model"
    assert meter.points == {"context": pytest.approx((0.7, 0, 0)), "vllm_weights": pytest.approx((0.7 + 2.5, 2.5, 2.5))}
    assert meter.counters()["after"] == ["context", "vllm_weights"]


def test_a_cache_made_in_the_first_step_is_no_part_of_its_peaks(card, on_card):
    """Continuous batching's: 0.3 GiB (here some numbers on a meta device) that come in the first rollout, and stay."""
    config = dataclasses.replace(PRESETS["chapter"], backend="paged", eval_problems=0)
    plan = budget.plan(config, budget.shape_of("qwen3-4b"), 15.46)
    timed, peak = phases.Phases(on_gpu=True, say=print), SimpleNamespace(start_gib=card.others)
    meter = vram.Meter(card, peak, timed, plan, print)
    meter.lines |= {"weights": 2.5, "lora": 0.2, "gradients": 0.12}
    card.take(2.7)
    keys = torch.empty(round(0.3 * GIB / 2), dtype=torch.bfloat16, device="meta")
    for step in range(2):
        timed.begin_step()
        timed.enter("forward_backward")
        timed.enter("generation")
        if step == 0:
            card.take(0.3)
            meter.cache([keys])
        card.take(0.1)
        card.take(-0.1)
        timed.leave()
        card.take(1.72)
        card.take(-1.6)
        timed.leave()
        timed.enter("optimizer")
        card.take(-0.12)
        timed.leave()
        timed.end_step()
    peak.peak_gib = card.card_peak
    got = {row["key"]: row["measured_gib"] for row in meter.trained()}
    expected = {"kv_cache": 0.3, "activations": 1.6, "context": 0.7, "slack": 0.0, "other": 0.0}
    assert {key: got[key] for key in expected} == pytest.approx(expected, abs=1e-6)
    assert got["total"] == pytest.approx(2.7 + 0.3 + 1.72 + 0.7, abs=1e-6)


# tensors


@pytest.fixture
def on_card(monkeypatch):
    """Every tensor says that it lies on a card."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)


def quantized(n):
    """n weights in 4 bits, as bitsandbytes makes them, scales and all."""
    weight, state = bitsandbytes.functional.quantize_4bit(torch.randn(n), compress_statistics=True, quant_type="nf4")
    weight.quant_state = state
    return weight


def test_a_quantized_weight_brings_its_scales(on_card):
    weight = quantized(64 * 256 * 4)
    found = list(vram.tensors([weight]))
    state = weight.quant_state
    for tensor in (weight, state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code):
        assert any(tensor is one for one in found)
    codes = 4 * (16 + 256) + 4  # of both levels, and the offset
    assert vram.size([weight]) * GIB == 64 * 256 * 4 * (1 / 2 + 1 / 64 + 4 / (64 * 256)) + codes
    engines = weight.data  # vLLM keeps the states of a layer's parts by index
    engines.bnb_quant_state = {0: state, 1: state}
    assert vram.size([engines]) == vram.size([weight])


def test_storage_that_is_shared_counts_once_and_other_memory_not_at_all(monkeypatch):
    base = torch.zeros(1000)
    assert vram.size([base]) == 0  # it lies in RAM
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    assert vram.size([base, base[10:20], {"view": (base.view(10, 100), None)}, "no tensor", 3]) * GIB == 4000
    assert vram.size([base, torch.zeros(50, dtype=torch.bfloat16)]) * GIB == 4100


def test_lines_of_a_loaded_model_come_from_its_tensors(card, on_card):
    model = torch.nn.Sequential(torch.nn.Linear(100, 100, bias=False), torch.nn.Linear(100, 16, bias=False))
    model[0].weight.requires_grad_(False)
    model.register_buffer("rope", torch.zeros(50))
    slots = torch.nn.Linear(1, 1)
    slots.lora_a_stacked, slots.lora_b_stacked = (torch.zeros(30), torch.zeros(10)), (torch.zeros(60),)
    cache = SimpleNamespace(kv_cache_tensors=[SimpleNamespace(size=GIB), SimpleNamespace(size=GIB // 2)])
    runner = SimpleNamespace(model=slots, kv_cache_config=cache)
    worker = SimpleNamespace(worker=SimpleNamespace(model_runner=runner, peak_activation_memory=GIB // 4))
    executor = SimpleNamespace(driver_worker=worker)
    meter = vram.Meter(card, SimpleNamespace(start_gib=card.others), phases.Phases(True, print), PLAN, print)
    meter.loaded(model)
    assert meter.lines == {"weights": 4 * (100 * 100 + 50) / GIB, "lora": 4 * 100 * 16 / GIB}
    meter.points |= {"vllm_cache": (3.0, 2.0, 2.1), "vllm_graphs": (3.5, 2.2, 2.4)}
    object.__setattr__(model, "vllm_engine", SimpleNamespace(llm_engine=SimpleNamespace(model_executor=executor)))
    meter.loaded(model)
    assert meter.lines == {"weights": 4 * (100 * 100 + 50) / GIB, "lora": 4 * (100 * 16 + 100) / GIB, "kv_cache": 1.5,
                           "vllm_activations": 0.25, "vllm_graphs": 0.5}  # fmt: skip


def test_gradients_and_optimizer_are_measured_in_the_first_step(card, on_card):
    model = torch.nn.Linear(100, 10)
    model.bias.requires_grad_(False)
    optimizer = torch.optim.AdamW([model.weight], lr=0.1)
    meter = vram.Meter(card, SimpleNamespace(start_gib=card.others), phases.Phases(True, print), PLAN, print)
    model(torch.ones(100)).sum().backward()
    meter.gradients(model)
    optimizer.step()
    meter.optimizer(optimizer)
    assert meter.lines == {"gradients": 4 * 1000 / GIB, "optimizer": (8 * 1000 + 4) / GIB}  # and its count of steps
    model.weight.grad = None
    meter.gradients(model)
    assert meter.lines["gradients"] == 4 * 1000 / GIB


# time


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands until it is set."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(phases, "time", SimpleNamespace(perf_counter=lambda: clock.now, time=time.time))
    return clock


def test_nested_parts_have_the_time_that_is_theirs_alone(clock):
    def spend(seconds, then=None):
        def method():
            clock.now += seconds
            if then:
                getattr(trainer, then)()
            clock.now += seconds
            return seconds

        return method

    trainer = SimpleNamespace(training_step=spend(10, "_prepare_inputs"), _prepare_inputs=spend(1, "both"),
                              both=lambda: (trainer._generate(), trainer._calculate_rewards()),
                              _generate=spend(3), _calculate_rewards=spend(0.5))  # fmt: skip
    timed = phases.Phases(on_gpu=False, say=print)
    timed.attach(trainer)
    for _ in range(2):  # a step begins at 0 again
        timed.begin_step()
        clock.now += 2
        assert trainer.training_step() == 10
        timed.enter("optimizer")
        clock.now += 4
        timed.leave()
        clock.now += 0.25
        assert timed.end_step() == {"generation": 6, "rewards": 1, "log_probs": 2, "forward_backward": 20, "optimizer": 4,
                                    "rest": 2.25}  # fmt: skip
    assert timed.peaks == {} and timed.open == []


def test_logits_have_memory_of_their_own_and_no_time(card, clock):
    timed = phases.Phases(on_gpu=True, say=print)
    card.take(1.0)
    timed.begin_step()
    timed.enter("forward_backward")
    clock.now += 1
    card.take(0.5)
    timed.enter("logits")
    clock.now += 2
    card.take(0.25)
    card.take(-0.25)
    timed.leave()
    clock.now += 4
    timed.leave()
    assert timed.end_step() == {"generation": 0, "rewards": 0, "log_probs": 0, "forward_backward": 7, "optimizer": 0, "rest": 0}
    assert timed.peaks == {"forward_backward": 0.5 * GIB, "logits": 0.25 * GIB} and timed.highest == 0.75 * GIB
    assert timed.allocated == 1.75 * GIB
    # outside of any part nothing counts but the run's own peaks
    card.take(8.0)
    card.take(-8.0)
    timed.settle()
    assert timed.highest == 0.75 * GIB and timed.allocated == timed.reserved == 9.5 * GIB


def test_a_part_that_raises_is_closed(clock):
    def fail():
        clock.now += 3
        raise ValueError("a reward that raises")

    timed = phases.Phases(on_gpu=False, say=print)
    timed.begin_step()
    rewards = timed.timed("rewards", fail)
    with pytest.raises(ValueError, match="a reward that raises"):
        timed.timed("forward_backward", rewards)()
    clock.now += 5
    assert timed.open == []
    assert timed.end_step()["rewards"] == 3 and timed.end_step()["rest"] == 5


def test_a_measurement_that_fails_is_said_once_and_stops_nothing(card, capsys):
    """A release of a library that moves what is measured, or NVML that goes away, must not end a run."""
    timed = phases.Phases(on_gpu=True, say=print)
    meter = vram.Meter(card, SimpleNamespace(start_gib=card.others), timed, PLAN, print)
    assert meter.trained() is None  # no step was taken
    assert meter.trained() is None and meter.loaded(None) is None
    assert capsys.readouterr().out == "warning: measuring stops (KeyError: 'generation'); training goes on\n"
    trainer = SimpleNamespace(training_step=lambda: 7)  # and none of the other methods
    timed.attach(trainer)
    timed.begin_step()
    assert trainer.training_step() == 7
    assert "warning: measuring stops (AttributeError: " in capsys.readouterr().out


def test_nothing_is_measured_without_a_plan():
    meter = vram.Meter(None, None, phases.Phases(on_gpu=False, say=print), None, print)
    assert meter.trained() is None and meter.points == {}
