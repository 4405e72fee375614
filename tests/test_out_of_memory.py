"""What is said when memory runs out: synthetic errors with the libraries' own texts and functions, and no card."""

import ast
import dataclasses
import errno
import importlib.metadata
import math
from pathlib import Path
from types import SimpleNamespace

import pytest

import out_of_memory
from checks import check_batch, check_config, check_machine
from gpu import Gpu
from out_of_memory import ORDER, Memory, explain, in_words, knobs, phase_of
from train import PRESETS

QWEN, EIGHT, SMOL = PRESETS["chapter"], PRESETS["qwen3-4b"], PRESETS["smollm2"]  # EIGHT: groups a rollout
LIMITED = dataclasses.replace(QWEN, vram_limit_gib=15.0)
BY_HAND = dataclasses.replace(QWEN, gpu_memory_utilization=0.4)
# a card of 16 GiB that this process has filled
FULL = Memory(total_gib=16, card_used_gib=15.8, others_gib=0.2, torch_gib=12.1, torch_reserved_gib=13.4, kv_cache_gib=2.5)
EMPTY = dataclasses.replace(FULL, card_used_gib=1.0, torch_gib=0.0, torch_reserved_gib=0.1, kv_cache_gib=0)
OutOfMemoryError = type("OutOfMemoryError", (RuntimeError,), {})  # torch's, by its name
CUDA = "CUDA out of memory. Tried to allocate 1.16 GiB. GPU 0 has a total capacity of 15.99 GiB of which 203.50 MiB is free."
CPU = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "4294967296 bytes. Error code 12 (Cannot allocate memory)"
)


def source(package, file):
    """The text of an installed library's file, by the distribution: without a GPU unsloth hides vllm from imports."""
    return Path(importlib.metadata.distribution(package).locate_file(f"{package}/{file}")).read_text()


def run_function(file, name, *arguments, **names):
    """Run one function of vLLM's, cut out of its file, and return the ValueError that it raises."""
    tree = ast.parse(source("vllm", file))
    function = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)
    for argument in function.args.args:
        argument.annotation = None
    function.returns = None
    names["format_gib"] = lambda size: f"{round(size / 2**30, 2)}"  # vllm/utils/mem_utils.py
    exec(compile(ast.Module([function], []), file, "exec"), names)
    with pytest.raises(ValueError) as raised:
        names[name](*arguments)
    return raised.value


def no_cache():
    return run_function("v1/core/kv_cache_utils.py", "_check_enough_kv_cache_memory", -(2**28), None, 1024, None)


def short_cache(left, needed=0.14, tokens=1024):
    check = "_check_enough_kv_cache_memory"
    sizes = int(left * 2**30), lambda: int(needed * 2**30), tokens, lambda memory: int(tokens * left / needed)
    return run_function("v1/core/kv_cache_utils.py", check, *sizes)


def not_free(free, total, share):
    snapshot = SimpleNamespace(free_memory=int(free * 2**30), total_memory=int(total * 2**30), device_="cuda:0")
    cache = SimpleNamespace(gpu_memory_utilization=share)
    return run_function("v1/worker/utils.py", "request_memory", snapshot, cache, math=math)


def raised(error, functions):
    """The error with a traceback through functions of these names, the outermost first."""
    names = {"error": error}
    for inner, name in zip([None, *reversed(functions)], reversed(functions)):
        exec(f"def {name}():\n    {f'previous_{inner}()' if inner else 'raise error'}\nprevious_{name} = {name}", names)
    with pytest.raises(type(error)) as caught:
        names[functions[0]]()
    return caught.value


def wrapped(error):
    """As Unsloth's load_vllm raises it again: the text in a RuntimeError, the first as its context."""
    try:
        try:
            raise error
        except Exception as first:
            raise RuntimeError(str(first))  # noqa: B904
    except RuntimeError as second:
        return second


# which errors


@pytest.mark.parametrize(
    "error",
    [
        OutOfMemoryError(CUDA),
        RuntimeError("CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA`"),
        RuntimeError("CUDA driver error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("CUDA out of memory occurred when warming up sampler with 16 dummy requests."),
        MemoryError("Unsloth: Your GPU ran out of memory loading vLLM with standby mode enabled."),
        ValueError("Some modules are dispatched on the CPU or the disk. Make sure you have enough GPU RAM to fit the model."),
    ],
)
def test_the_card_ran_out(error):
    said = explain(error, QWEN, "loading the model", FULL)
    assert said.startswith("out of memory in loading the model: 15.8 of 16.0 GiB in use")
    assert "--kv-cache-gib 1.25 (now 2.5); --backend unsloth (now vllm); a smaller --model (now unsloth/Qwen3-4B)" in said
    assert explain(wrapped(error), QWEN, "loading the model", FULL) is not None


@pytest.mark.parametrize("error", [RuntimeError(CPU), MemoryError(), OSError(errno.ENOMEM, "Cannot allocate memory")])
def test_the_machine_ran_out(error):
    first, *rest = explain(error, SMOL, "training, step 3", None).splitlines()
    assert first.startswith("out of RAM in training, step 3: ") and "GiB held at the peak" in first
    assert ("4 GiB more asked for" in first) == (str(error) == CPU)
    checkpointing, batch, shorter = rest[0].removeprefix("what helps most: ").split("; ")
    assert checkpointing == "--gradient-checkpointing" and shorter == "--max-completion-length 10 (now 20)"
    assert batch == "--per-device-train-batch-size 4 (now 8) --gradient-accumulation-steps 2 (now 1)"


@pytest.mark.parametrize(
    "error",
    [ValueError("no such file"), RuntimeError("CUDA error: an illegal memory access was encountered"), KeyboardInterrupt(),
     OSError(errno.ENOSPC, "No space left on device"), RuntimeError("Triton: out of resource: shared memory")],
)  # fmt: skip
def test_other_errors_are_left_alone(error):
    assert explain(error, QWEN, "training, step 3", FULL) is None


def test_an_error_is_found_behind_others():
    first, second, third = OutOfMemoryError(CUDA), KeyError("x"), ValueError("y")
    second.__context__, third.__cause__ = first, second
    assert explain(third, QWEN, "loading the model", None).startswith("out of memory in loading the model, 1.2 GiB more")
    first.__context__ = third  # a circle ends
    assert explain(third, QWEN, "loading the model", None) and phase_of(third) is None


# where, and who


@pytest.mark.parametrize(
    ("functions", "phase"),
    [
        ("training_step _prepare_inputs _generate_and_score_completions _generate _generate_single_turn generate step",
         "generation"),
        ("training_step _generate_and_score_completions _calculate_rewards good", "the reward functions"),
        ("training_step _generate_and_score_completions _get_per_token_logps_and_entropies forward", "the log-prob pass"),
        ("training_step compute_loss _compute_loss _get_per_token_logps_and_entropies forward", "the forward pass"),  # TRL
        ("training_step _unsloth_training_step compute_loss grpo_accumulated_loss backward", "the forward pass"),  # Unsloth
        ("training_step _unsloth_training_step backward backward forward", "the backward pass"),
        ("_run_epoch _clip_grad_norm clip_grad_norm_", "the optimizer step"),
        ("_run_epoch step wrapper step", "the optimizer step"),
        ("evaluate answer_with_vllm generate step", None),
    ],
)  # fmt: skip
def test_phase_of(functions, phase):
    if phase and "_run_epoch" not in functions:
        functions = f"train _inner_training_loop _run_epoch {functions}"
    inner = functions.split()
    unique = [name for i, name in enumerate(inner) if name not in inner[:i]]
    error = raised(OutOfMemoryError("CUDA out of memory."), unique)
    assert phase_of(error) == phase
    said = explain(error, QWEN, "training, step 3", FULL)
    assert said.startswith(f"out of memory in {phase} (training, step 3): " if phase else "out of memory in training, step 3: ")


def test_all_of_it():
    error = raised(OutOfMemoryError(CUDA), ["_run_epoch", "training_step", "backward"])
    config = dataclasses.replace(LIMITED, gradient_checkpointing=False)
    memory = Memory(total_gib=24, card_used_gib=15.1, others_gib=0.2, torch_gib=12.1, torch_reserved_gib=13.0, kv_cache_gib=2.5)
    assert explain(error, config, "training, step 3", memory) == (
        "out of memory in the backward pass (training, step 3): 14.9 of 15.0 GiB in use, 1.2 GiB more asked for\n"
        "torch holds 12.1 GiB (of them vLLM's KV cache 2.5) and 0.9 in reserve, other processes 0.2, CUDA context, libraries "
        "and graphs 1.9\n"
        "what helps most: --gradient-checkpointing; --per-device-train-batch-size 4 (now 8) --gradient-accumulation-steps 2 "
        "(now 1); --vram-limit-gib 18.7 (now 15.0)"
    )
    assert explain(error, QWEN, "training, step 3", None) == (
        "out of memory in the backward pass (training, step 3), 1.2 GiB more asked for\n"
        "what helps most: --per-device-train-batch-size 4 (now 8) --gradient-accumulation-steps 2 (now 1); "
        "--kv-cache-gib 1.25 (now 2.5); --max-completion-length 384 (now 768)"
    )


def test_others_who_fill_the_card_come_first():
    crowded = dataclasses.replace(FULL, card_used_gib=15.9, others_gib=6.0, torch_gib=7.0, torch_reserved_gib=8.0)
    said = explain(OutOfMemoryError(CUDA), QWEN, "loading the model", crowded)
    assert "what helps most: end what else runs on the card (nvidia-smi lists it); --kv-cache-gib" in said
    # also those that came later, and not where a limit left room on the card
    later = dataclasses.replace(FULL, torch_gib=5.0, torch_reserved_gib=6.0)
    said = explain(OutOfMemoryError(CUDA), QWEN, "loading the model", later)
    assert "graphs, with what others took since, 9.6" in said and "nvidia-smi" in said
    assert "nvidia-smi" not in explain(
        OutOfMemoryError(CUDA), LIMITED, "loading the model", dataclasses.replace(crowded, total_gib=140)
    )


def test_measure_never_raises(monkeypatch):
    assert out_of_memory.measure(None, None) is None
    card = Gpu("GPU-1", "0", "a card", "580.65", 16.0, (9, 0))
    cuda = SimpleNamespace(memory_allocated=lambda: 3 * 2**30, memory_reserved=lambda: 4 * 2**30)
    monkeypatch.setitem(out_of_memory.sys.modules, "torch", SimpleNamespace(cuda=cuda))
    assert out_of_memory.measure(card, SimpleNamespace(start_gib=1.0)) is None  # NVML is not there
    monkeypatch.setattr(Gpu, "used_gib", lambda self: 9.0)
    assert out_of_memory.measure(card, SimpleNamespace(start_gib=1.0), 2.5) == Memory(16.0, 9.0, 1.0, 3.0, 4.0, 2.5)
    # vLLM's cache of 2.5 GiB is in torch's 4: awake, or asleep, when the card holds less than those and a context
    used = [5.7, 3.5, 3.5]
    monkeypatch.setattr(Gpu, "used_gib", lambda self: used.pop(0))
    assert out_of_memory.measure(card, SimpleNamespace(start_gib=1.0), 2.5, True) == Memory(16.0, 5.7, 1.0, 3.0, 4.0, 2.5)
    assert out_of_memory.measure(card, SimpleNamespace(start_gib=1.0), 2.5, True) == Memory(16.0, 3.5, 1.0, 0.5, 1.5, 0.0)
    assert out_of_memory.measure(card, SimpleNamespace(start_gib=1.0), 2.5) == Memory(16.0, 3.5, 1.0, 3.0, 4.0, 2.5)


# vLLM's refusals, raised by its own functions


def test_vllm_has_nothing_left_for_its_cache():
    for error in (no_cache(), wrapped(no_cache())):
        said = explain(error, QWEN, "loading the model", EMPTY)
        assert said.startswith("vLLM cannot start: its share is too small: weights and graphs take all of it")
        assert "what helps most: --kv-cache-gib 5 (now 2.5); --backend unsloth (now vllm); a smaller --model" in said
    by_hand = dataclasses.replace(QWEN, gpu_memory_utilization=0.16)
    said = explain(wrapped(no_cache()), by_hand, "loading the model", EMPTY)
    assert "most: --gpu-memory-utilization 0.32 (now 0.16); no --gpu-memory-utilization (now 0.16); --backend uns" in said
    # what others take while it measures counts as vLLM's own
    said = explain(no_cache(), QWEN, "loading the model", dataclasses.replace(EMPTY, card_used_gib=9.0))
    assert said.startswith("vLLM cannot start: other processes took memory") and "too small" not in said


def test_vllm_cannot_hold_one_sequence():
    said = explain(wrapped(short_cache(left=0.1)), QWEN, "loading the model", None)
    assert "too small: 1024 tokens take 0.14 GiB of KV cache, and weights and graphs leave 0.1\n" in said
    assert "most: --kv-cache-gib 2.64 (now 2.5); --max-completion-length 475 (now 768); --backend unsloth (now vllm)" in said
    assert "--max-completion-length" not in explain(short_cache(left=0.02), QWEN, "loading the model", None)


def test_a_card_that_others_fill_is_no_share_that_is_too_large():
    said = explain(wrapped(not_free(free=3.2, total=15.7, share=0.4)), QWEN, "loading the model", None)
    assert said.startswith("vLLM cannot start: others fill the card: vLLM wants 6.28 GiB of the card's 15.7, and 3.2 are free")
    assert "what helps most: end what else runs on the card (nvidia-smi lists it); --backend unsloth (now vllm)" in said
    said = explain(not_free(free=14.6, total=15.7, share=0.95), QWEN, "loading the model", None)
    assert said.startswith("vLLM cannot start: its share is too large: vLLM wants 14.92 GiB")
    assert "what helps most: --kv-cache-gib 1.88 (now 2.5); --backend unsloth (now vllm)" in said
    said = explain(not_free(free=14.6, total=16.0, share=0.95), BY_HAND, "loading the model", EMPTY)
    assert "what helps most: --gpu-memory-utilization 0.34 (now 0.4); --backend unsloth (now vllm)" in said


def test_a_race_is_no_shortage():
    said = explain(AssertionError("Error in memory profiling. Initial free memory 9.1 GiB"), QWEN, "loading the model", None)
    assert "another process gave memory back" in said and "start again" in said and "--" not in said


# knobs that the lab accepts


CONFIGS = [
    dataclasses.replace(
        base, num_generations=group, per_device_train_batch_size=batch, gradient_accumulation_steps=steps,
        steps_per_generation=rollout and rollout * steps, **{"train_problems": 512, **more},
    )
    for base in (QWEN, SMOL, BY_HAND, LIMITED)
    for rollout in (None, 1, 3, 8)
    for group, batch, steps in [(8, 8, 1), (8, 1, 8), (4, 3, 4), (2, 1, 2), (3, 9, 2), (5, 5, 3), (2, 2, 1), (16, 64, 2)]
    for more in ({}, {"max_completion_length": 1, "eval_problems": 0, "kv_cache_gib": 0.6}, {"train_problems": 64})
]  # fmt: skip


@pytest.mark.parametrize("memory", [None, FULL, dataclasses.replace(FULL, total_gib=140)])
@pytest.mark.parametrize("on_card", [True, False])
def test_every_knob_obeys_the_rules(memory, on_card):
    card = Gpu("GPU-1", "0", "a card", "580.65", 140.0, (9, 0))
    for config in CONFIGS:
        for names in ORDER.values():
            proposed = knobs(config, names, memory, on_card)
            assert len(proposed) <= 3 and all(proposed)
            for change in proposed:
                changed = dataclasses.replace(config, **{k: v for k, v in change.items() if k != "model"})
                check_batch(changed)
                check_config(dataclasses.replace(changed, optim="sgd"))
                check_machine(dataclasses.replace(changed, optim="sgd"), card)
                assert changed != config or "model" in change
                cache = changed.kv_cache_gib if changed.fast_inference else math.inf
                assert change.keys() != {"kv_cache_gib"} or cache >= changed.max_seq_length * 0.5 / 1024
                if "gradient_accumulation_steps" in change and "answers" not in names:
                    assert (changed.effective_batch, changed.rollout_batch) == (config.effective_batch, config.rollout_batch)
                if change.keys() == {"steps_per_generation"}:
                    assert changed.rollout_batch < config.rollout_batch and changed.effective_batch == config.effective_batch
                assert in_words(change, config).count("--") == len(change)


def test_a_share_given_by_hand_shrinks_with_the_cache_it_left():
    assert knobs(BY_HAND, "cache", FULL) == [{"gpu_memory_utilization": 0.32}]  # 1.25 of 16 GiB
    assert knobs(BY_HAND, "cache", None) == knobs(BY_HAND, "cache", EMPTY) == []
    off = {"backend": "unsloth", "gpu_memory_utilization": None}
    assert knobs(BY_HAND, "no_vllm", FULL) == [off]
    in_8_bits = dataclasses.replace(QWEN, load_in="fp8", kv_cache_dtype="fp8")
    assert knobs(in_8_bits, "no_vllm", FULL) == [{"backend": "unsloth", "kv_cache_dtype": "auto", "load_in": "4bit"}]
    assert knobs(in_8_bits, "four_bit", FULL) == [{"load_in": "4bit"}]


def test_what_vllm_generates_lies_in_its_cache():
    error = raised(OutOfMemoryError(CUDA), ["_generate_single_turn"])
    assert "--kv-cache-gib 1.25" in explain(error, QWEN, "training, step 3", FULL).splitlines()[-1]
    said = explain(error, dataclasses.replace(QWEN, backend="unsloth"), "training, step 3", FULL).splitlines()[-1]
    assert "--num-generations 4 (now 8) --per-device-train-batch-size 4 (now 8); --max-completion-length 384 (now 768)" in said


@pytest.mark.parametrize(
    ("steps", "passes", "expected"),
    [
        (1, 8, {"steps_per_generation": 4}),
        (1, 3, {"steps_per_generation": 1}),
        (4, 12, {"steps_per_generation": 4}),  # half of it, 6, would be a step and a half
        (4, 8, {"steps_per_generation": 4}),
        (2, 10, {"steps_per_generation": 4}),
        # one step a rollout: half of its problems, or of its one group
        (4, 4, {"gradient_accumulation_steps": 2, "steps_per_generation": 2}),
        (1, 1, {"num_generations": 4, "per_device_train_batch_size": 4}),
        (1, None, {"num_generations": 4, "per_device_train_batch_size": 4}),
    ],
)
def test_fewer_answers_are_first_those_of_fewer_groups_a_rollout(steps, passes, expected):
    config = dataclasses.replace(EIGHT, gradient_accumulation_steps=steps, steps_per_generation=passes)
    assert out_of_memory.fewer_answers(config) == expected
    check_config(dataclasses.replace(config, **expected))


def test_a_pass_that_is_split_leaves_the_rollout_as_it_was():
    error = raised(OutOfMemoryError(CUDA), ["_run_epoch", "training_step", "backward"])
    assert (
        "what helps most: --per-device-train-batch-size 4 (now 8) --gradient-accumulation-steps 2 (now 1) "
        "--steps-per-generation 16 (now 8); --kv-cache-gib 3.75 (now 7.5)"
    ) in explain(error, EIGHT, "training, step 3", None)


# what was read is still there


@pytest.mark.parametrize(
    ("package", "file", "text"),
    [
        ("vllm", "v1/worker/gpu_worker.py", '"Error in memory profiling. "'),
        ("unsloth_zoo", "vllm_utils.py", 'engine_args["gpu_memory_utilization"] *= 0.85'),
        ("unsloth_zoo", "vllm_utils.py", "raise RuntimeError(error)"),
        ("unsloth_zoo", "vllm_utils.py", 'f"Unsloth: Your GPU ran out of memory'),
        ("transformers", "quantizers/quantizer_bnb_4bit.py", "Make sure you have enough GPU RAM"),
        ("trl", "trainer/grpo_trainer.py", "def _generate_single_turn("),
        ("trl", "trainer/grpo_trainer.py", "def _calculate_rewards("),
        ("trl", "trainer/grpo_trainer.py", "def _generate_and_score_completions("),
        ("trl", "trainer/grpo_trainer.py", "def _get_per_token_logps_and_entropies("),
        ("trl", "trainer/grpo_trainer.py", "def compute_loss("),
        ("trl", "trainer/grpo_trainer.py", "def training_step("),
        ("unsloth", "models/rl_replacements.py", "    def compute_loss("),
        ("unsloth", "models/rl_replacements.py", "    def _get_per_token_logps_and_entropies("),
        ("unsloth_zoo", "rl_replacements.py", "packing capped below T="),  # a batch in one pass, and its second try
        ("transformers", "trainer.py", "def _run_epoch("),
        ("transformers", "trainer.py", "def _clip_grad_norm("),
        ("transformers", "trainer.py", "self.accelerator.backward(loss"),
        ("transformers", "trainer.py", "self.optimizer.step()"),
    ],
)
def test_the_libraries_are_as_they_were_read(package, file, text):
    assert text in source(package, file)
