"""All that is refused before the model loads. Each refusal names the value, the rule, and the nearest thing that works."""

import asyncio
import functools
import hashlib
import importlib.util
import inspect
import math
import numbers
import shlex
import shutil
import sys
import tempfile
import types
from pathlib import Path

# The locked torch and vLLM are built for CUDA 13: https://docs.nvidia.com/cuda/cuda-toolkit-release-notes
MIN_DRIVER = 580
# Bfloat16 arithmetic came with Ampere.
MIN_COMPUTE_CAPABILITY = (8, 0)
# Arithmetic in 8 bits came with Ada, and vLLM's Triton kernel for an 8-bit cache needs it; FlashInfer's might do with less, but
# is compiled on the spot with nvcc. To quantize a 16-bit checkpoint as it loads Unsloth wants Hopper or newer.
FP8_COMPUTE_CAPABILITY = (8, 9)
FP8_ON_LOADING_COMPUTE_CAPABILITY = (9, 0)
# The linear layers of the models that the lab knows, which can have a LoRA.
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Refused(Exception):
    """A mistake of the user's, in one or two lines; `train.py` prints it and exits with 2."""


def check_config(config) -> None:
    """Refuse a config that is wrong in itself, on any machine. Imports nothing heavy."""
    for name in ("max_steps", "max_prompt_length", "max_completion_length", "lora_r", "lora_alpha", "train_problems",
                 "per_device_train_batch_size", "gradient_accumulation_steps", "num_iterations", "save_steps"):  # fmt: skip
        if getattr(config, name) < 1:
            raise Refused(f"{flag(name)} {getattr(config, name)}: must be at least 1")
    if config.max_steps > 10**6:
        raise Refused(f"--max-steps {config.max_steps}: at most 1000000, since their problems are laid out beforehand")
    for name in ("eval_problems", "warmup_steps", "learning_rate", "weight_decay", "max_grad_norm", "beta", "top_k", "seed",
                 "sample_steps", "eval_steps", "max_operand", "worked_examples"):  # fmt: skip
        if getattr(config, name) is not None and not 0 <= getattr(config, name) < math.inf:
            raise Refused(f"{flag(name)} {getattr(config, name)}: must be 0 or a positive number")
    for name in ("temperature", "epsilon", "epsilon_high", "kv_cache_gib", "vram_limit_gib", "vllm_start_timeout"):
        if getattr(config, name) is not None and not 0 < getattr(config, name) < math.inf:
            raise Refused(f"{flag(name)} {getattr(config, name)}: must be a positive number")
    if config.kv_cache_gib > 1e5:
        raise Refused(f"--kv-cache-gib {config.kv_cache_gib:g}: no card has so much; the qwen3-4b preset's is 7.5")
    for name in ("top_p", "min_p", "gpu_memory_utilization"):
        if getattr(config, name) is not None and not 0 < getattr(config, name) <= 1:
            raise Refused(f"{flag(name)} {getattr(config, name)}: a share, above 0 and at most 1")
    for name in ("run_name", "experiment", "output_dir", "task", "model"):
        if not getattr(config, name).isprintable():  # bytes that are no UTF-8 become surrogates, which no record can hold
            raise Refused(f"{flag(name)} {ascii(getattr(config, name))}: bytes that are no text; give a name in UTF-8")
    for name in ("experiment", "output_dir"):
        if not getattr(config, name):
            raise Refused(f"{flag(name)} '': must not be empty; without the flag it is {getattr(type(config)(), name)}")
    if not config.run_name or Path(config.run_name).name != config.run_name:
        raise Refused(f"--run-name {config.run_name!r}: it becomes the name of one folder, so it is not empty and has no slash")
    if len(config.run_name.encode()) > 200:
        raise Refused(f"--run-name of {len(config.run_name.encode())} bytes: it becomes the name of a folder; at most 200")
    if config.save_total_limit is not None and config.save_total_limit < 1:
        raise Refused(f"--save-total-limit {config.save_total_limit}: must be at least 1, or None to keep all checkpoints")
    if config.eval_steps and not config.eval_problems:
        raise Refused(f"--eval-steps {config.eval_steps}: there is nothing to answer with --eval-problems 0; give it 64")
    check_batch(config)
    check_problems(config)
    if config.lora_r > 512:
        raise Refused(f"--lora-r {config.lora_r}: adapters of rank 512 are the largest that vLLM serves")
    if config.seed >= 2**32:
        raise Refused(f"--seed {config.seed}: NumPy takes seeds below 2**32 = {2**32}")
    if config.loss_type == "luspo" and config.importance_sampling_level != "sequence":
        raise Refused("--loss-type luspo works on whole sequences: add --importance-sampling-level sequence")
    if config.loss_type == "cispo" and (config.epsilon_high or 0) < 1:
        raise Refused("--loss-type cispo caps the token weight at epsilon_high itself: add --epsilon-high 5 (ScaleRL's value)")
    if not config.fast_inference:
        for name in ("vllm_importance_sampling_correction", "gpu_memory_utilization", "vllm_enable_sleep_mode"):
            if getattr(config, name):
                raise Refused(f"{flag(name)} {getattr(config, name)}: it is about vLLM; add --backend vllm or leave it away")
        if config.kv_cache_dtype != "auto":
            raise Refused(f"--kv-cache-dtype {config.kv_cache_dtype}: it is about vLLM; add --backend vllm or leave it away")
        if config.load_in == "fp8":
            raise Refused("--load-in fp8: vLLM makes these weights; add --backend vllm on a GPU, or --load-in 4bit or 16bit")
    if config.use_cuda_graph and config.backend != "paged":
        raise Refused("--use-cuda-graph: it is about --backend paged; vLLM has graphs of its own, generate() none")
    unknown = [name for name in config.target_modules if name not in PROJECTIONS]
    if unknown or not config.target_modules:
        wrong = " ".join(unknown) or "(none)"
        raise Refused(f"--target-modules {wrong}: the layers that can have a LoRA are {' '.join(PROJECTIONS)}")


def notes(config) -> list[str]:
    """What runs, but may not be what is meant, each in a line; and what several processes do together."""
    found, steps, rollout, processes = [], config.max_steps, config.steps_per_rollout, config.processes
    if processes > 1:
        batch, problems = config.effective_batch * processes, config.prompts_per_rollout * processes
        found.append(f"{processes} processes: {batch} completions a step, {problems} problems a rollout, shared out in whole "
                     f"groups; --learning-rate {config.learning_rate:g} is not scaled with their number")  # fmt: skip
    if steps % rollout:
        more = -(-steps // rollout) * rollout
        found.append(f"--max-steps {steps} ends within a rollout, so the run cannot be lengthened later; {more} uses it up")
    if config.warmup_steps > steps and config.lr_scheduler_type != "constant":
        found.append(f"--warmup-steps {config.warmup_steps:g} are more than --max-steps {steps}: the learning rate stays below "
                     f"--learning-rate {config.learning_rate:g}; 0.1 is a tenth of the run")  # fmt: skip
    return found


def check_machine(config, gpu) -> None:
    """Refuse what the machine cannot do. `gpu` is `gpu.Gpu` or None."""
    if gpu is None:
        if config.fast_inference:
            small = config.preset == "smollm2"
            optim = " --optim adamw_torch_fused" if "8bit" in config.optim else ""
            without = f"--backend unsloth{optim}"
            raise Refused(
                f"--preset {config.preset} generates with vLLM (--backend vllm), which needs a CUDA GPU; none is visible. "
                "Without one: " + (without if small else f"--preset smollm2; or {without}, if you can wait for a CPU")
            )
        if "8bit" in config.optim:
            small = "" if config.preset == "smollm2" else "; --preset smollm2 is made for one"
            raise Refused(f"--optim {config.optim}: its kernels need a GPU; --optim adamw_torch_fused runs on a CPU{small}")
        if config.vram_limit_gib:
            raise Refused(f"--vram-limit-gib {config.vram_limit_gib:g}: there is no GPU to limit; leave it away")
        if config.use_cuda_graph:
            raise Refused("--use-cuda-graph: there is no GPU; leave it away")
    else:
        check_gpu(config, gpu)


def check_problems(config) -> None:
    """Refuse fewer problems than one rollout of all processes takes."""
    of, problems = config.steps_per_generation, config.prompts_per_rollout * config.processes
    if config.train_problems < problems:
        of = f" (--steps-per-generation {of})" if of else ""
        of += f" of {config.processes} processes" if config.processes > 1 else ""
        raise Refused(
            f"--train-problems {config.train_problems}: one rollout{of} takes {problems} problems: at least that many"
        )


def check_batch(config) -> None:
    """Whole groups in every generation batch (TRL's rule), so that each process has whole ones too."""
    group, batch, steps = config.num_generations, config.per_device_train_batch_size, config.gradient_accumulation_steps
    if group < 2:
        raise Refused(f"--num-generations {group}: an advantage compares the answers of one group, so 2 is the least")
    if batch * steps % group:
        unit = group // math.gcd(group, steps)
        lower, upper = batch // unit * unit, -(-batch // unit) * unit
        near = f"{lower} or {upper}" if lower else f"{upper}"
        raise Refused(
            f"--per-device-train-batch-size {batch} x --gradient-accumulation-steps {steps} = {batch * steps} completions "
            f"a step do not split into groups of {group} (--num-generations); nearest batch sizes: {near}"
        )
    passes = config.steps_per_generation
    if passes is not None and (passes < 1 or passes % steps):
        lower = max(passes, 0) // steps * steps
        near = f"{lower} or {lower + steps}" if lower else f"{steps}"
        raise Refused(
            f"--steps-per-generation {passes}: a rollout feeds whole optimizer steps of {steps} passes "
            f"(--gradient-accumulation-steps): {near}, or None for one step"
        )


def check_gpu(config, gpu) -> None:
    """Refuse a driver older than the locked CUDA, a card without bf16, and a limit that is larger than the card."""
    without = "CUDA_VISIBLE_DEVICES= uv run python train.py trains SmolLM2 on the CPU"
    if int(gpu.driver.split(".")[0]) < MIN_DRIVER:
        raise Refused(f"driver {gpu.driver}: the locked torch needs {MIN_DRIVER} or newer (CUDA 13). Update it, or: {without}")
    if gpu.compute_capability < MIN_COMPUTE_CAPABILITY:
        have, least = (".".join(map(str, x)) for x in (gpu.compute_capability, MIN_COMPUTE_CAPABILITY))
        raise Refused(f"{gpu.name}: compute capability {have}, and bf16 needs {least} (RTX 30 series or newer). {without}")
    check_limit(config, gpu.total_gib)


def check_precision(config, shape, card: str, capability: tuple[int, int] | None) -> None:
    """Refuse weights and a cache in bits that the card has no arithmetic for, or other ones than the checkpoint's.

    `shape` is shapes.Shape or None, `capability` the card's, or None where it is not known. The rules are Unsloth's
    2026.10.9 (models/loader_utils.py, models/_utils.py) and vLLM's 0.26.0 (v1/attention/backends).
    """
    kind, ready = (shape.on_card(config.load_in), shape.quantized) if shape else (config.load_in, None)
    if config.load_in == "fp8" and ready == "bitsandbytes":
        raise Refused(f"--load-in fp8: {config.model} is in 4 bits already; --load-in 4bit, or a --model in 16 bits")
    of_4_bits = config.load_in == "4bit" and ready == "fp8"  # of a name on the hub, Unsloth takes the copy in 4 bits
    if of_4_bits and config.fast_inference and Path(config.model).is_dir():
        raise Refused(f"--load-in 4bit: {config.model} is in fp8 already, and vLLM takes it so; --load-in fp8")
    have = ".".join(map(str, capability or ()))
    if kind == "fp8" and not of_4_bits and config.fast_inference and capability:
        if not ready and capability < FP8_ON_LOADING_COMPUTE_CAPABILITY:
            other = "; or a --model that is in fp8 already" if capability >= FP8_COMPUTE_CAPABILITY else ""
            why = f"compute capability {have}, and quantizing as it loads needs 9.0 (H100, RTX 50 series or newer)"
            raise Refused(f"--load-in fp8 on {card}: {why}; --load-in 4bit{other}")
        if capability < FP8_COMPUTE_CAPABILITY:
            why = f"compute capability {have}, and its weights in fp8 need 8.9 (RTX 40 series or newer)"
            raise Refused(f"--model {config.model} on {card}: {why}; a --model in 16 bits works with --load-in 4bit")
    if config.kv_cache_dtype == "fp8" and capability and capability < FP8_COMPUTE_CAPABILITY:
        why = f"compute capability {have}, and vLLM's kernels for it need 8.9 (RTX 40 series or newer)"
        raise Refused(f"--kv-cache-dtype fp8 on {card}: {why}; --kv-cache-dtype auto")


def check_limit(config, card_gib: float) -> None:
    """Refuse a limit that is larger than the card, or too small for anything."""
    if config.vram_limit_gib and config.vram_limit_gib > card_gib:
        raise Refused(f"--vram-limit-gib {config.vram_limit_gib:g}: the card has {card_gib:.1f} GiB; at most that")
    if config.vram_limit_gib and config.vram_limit_gib < 2:
        raise Refused(f"--vram-limit-gib {config.vram_limit_gib:g}: the CUDA context alone takes 0.7 GiB; at least 2")


def command(project: Path, script: str, launcher: str = "python") -> str:
    """How to start a script of the project from the working folder, as one types it."""
    try:
        here = Path.cwd()
    except OSError:  # the working folder is gone
        here = None
    if here == project:
        return f"uv run {launcher} {script}"
    return f"uv run --project {shlex.quote(str(project))} {launcher} {shlex.quote(str(project / script))}"


def check_output_dir(path: Path) -> None:
    """Refuse an output folder that cannot be made or written, or has less than 0.5 GB for checkpoints and the adapter."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path) as probe:
            probe.write(b"x" * 4096)
    except OSError as error:
        raise Refused(f"--output-dir {path}: {error.strerror}; give a folder that can be written") from None
    free = shutil.disk_usage(path).free
    if free < 0.5e9:
        raise Refused(
            f"--output-dir {path}: {free / 1e9:.2f} GB free, and checkpoints and adapter want 0.5; give another folder"
        )


def load_task(path: str):
    """Run a task file and return it as a module, once its three names are there."""
    file = Path(path)
    if not file.is_file() or file.suffix != ".py":
        raise Refused(f"--task {path}: no such Python file; task.py is the one that comes with the lab")
    spec = importlib.util.spec_from_file_location("grpo_task", file)  # a name that hides no module of anybody's
    module = importlib.util.module_from_spec(spec)
    sys.modules["grpo_task"] = module
    sys.path.append(str(file.resolve().parent))  # so that a task can import its neighbours
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise Refused(f"--task {path}: running it raised {type(error).__name__}: {one_line(error)}") from error
    missing = [name for name in ("make_dataset", "REWARDS", "EXAMPLES") if not hasattr(module, name)]
    if missing:
        raise Refused(f"--task {path}: it lacks {', '.join(missing)}; task.py shows the three names that a task needs")
    return module


def check_rewards(task, path, train_set) -> None:
    """Run the rewards on the task's own examples, as TRL would call them, and refuse what TRL would trip over.

    An example that brings no prompt gets the data set's first, and with it the form of its completions: chat or text. Its
    token ids are zeros, one a word: there is no tokenizer yet.

    TRL accepts a None or NaN as "does not apply" and fails far from the function on a wrong length or type: here each
    reward must be a plain finite number and equal to the example's.
    """
    rewards, examples = task.REWARDS, task.EXAMPLES
    if not isinstance(rewards, (list, tuple)) or not rewards or not all(map(callable, rewards)):
        raise Refused(f"--task {path}: REWARDS is {short(rewards)}; it must be a list of at least one reward function")
    names = [getattr(reward, "__name__", None) for reward in rewards]
    if None in names or "<lambda>" in names or len(set(names)) < len(names):
        raise Refused(f"--task {path}: REWARDS are named {names}; each needs a name of its own, for its curve in the record")
    if not isinstance(examples, (list, tuple)) or not examples:
        raise Refused(f"--task {path}: EXAMPLES is {short(examples)}; it must be a list of at least one example")
    for example in examples:
        if not isinstance(example, dict) or not isinstance(example.get("completion"), str) or "rewards" not in example:
            raise Refused(f"--task {path}: example {short(example)} must be a dict with `completion` (text) and `rewards`")
        wanted = example["rewards"]
        if not isinstance(wanted, (list, tuple)) or len(wanted) != len(rewards) or not all(map(is_finite, wanted)):
            raise Refused(f"--task {path}: example {short(example)} must give `rewards` as a list of {len(rewards)}: {names}")
    columns = [key for key in examples[0] if key not in ("prompt", "completion", "rewards")]
    if lacking := set(columns) - set(train_set.column_names):
        raise Refused(f"--task {path}: the examples have {sorted(lacking)}, which the data set lacks: {train_set.column_names}")
    try:
        inputs = {key: [example[key] for example in examples] for key in columns}
    except KeyError as error:
        raise Refused(f"--task {path}: an example lacks the column {error} that the first one has") from None
    prompts = [example.get("prompt", train_set[0]["prompt"]) for example in examples]
    for i, reward in enumerate(rewards):
        try:
            texts = [example["completion"] for example in examples]
            got = call_reward(reward, prompts, texts, [[0] * len(text.split()) for text in texts], inputs)
        except Refused as refusal:
            raise Refused(f"--task {path}, on its own examples: {refusal}") from refusal
        for example, value in zip(examples, got):
            if not math.isclose(value, example["rewards"][i], abs_tol=1e-6):
                raise Refused(
                    f"--task {path}: {names[i]} gives {value} for {short(example['completion'])}, and its example says "
                    f"{example['rewards'][i]}"
                )


def call_reward(reward, prompts, texts, token_ids, columns) -> list[float]:
    """The reward's values for completions `texts`, called as TRL calls it; refuses what is not one finite number each.

    `token_ids` are the completions' (lists of int), `columns` the data set's other columns. Completions are chat messages
    where the prompts are.
    """
    name, n = reward.__name__, len(texts)
    chat = [not isinstance(prompt, str) for prompt in prompts]
    arguments = {
        "prompts": prompts,
        "completions": [[{"role": "assistant", "content": t}] if c else t for t, c in zip(texts, chat)],
        "completion_ids": token_ids,
        "trainer_state": types.SimpleNamespace(global_step=0, max_steps=0, epoch=0.0),
        "log_extra": lambda column, values: None,
        "log_metric": lambda metric, value: None,
        **columns,
    }
    try:
        got = reward(**arguments)
        if inspect.isawaitable(got):
            got = asyncio.run(await_it(got))
    except (Exception, SystemExit) as error:
        raise Refused(f"{name} raised {type(error).__name__}: {one_line(error)}") from error
    return check_values(name, got, n)


def strict(reward):
    """The reward, with its values checked in every step: TRL takes None and NaN for "does not apply", and goes on."""
    if inspect.iscoroutinefunction(reward):

        async def checked(completions, **columns):
            return check_values(reward.__name__, await reward(completions=completions, **columns), len(completions))
    else:

        def checked(completions, **columns):
            return check_values(reward.__name__, reward(completions=completions, **columns), len(completions))

    return functools.wraps(reward)(checked)


def check_values(name: str, got, n: int) -> list[float]:
    """A reward's values, once they are one finite number for each of n completions."""
    if not isinstance(got, list):
        raise Refused(f"{name} returned {short(got)}, a {type(got).__name__}; it must be a list of floats")
    if len(got) != n:
        raise Refused(f"{name} returned {len(got)} values for {n} completions: {short(got)}; it must be one each")
    for value in got:
        if not is_finite(value):
            kind = type(value).__name__
            raise Refused(f"{name} returned {short(value)} ({kind}) among its values; each must be a finite number")
    return got


def is_finite(value) -> bool:
    """Whether a value is one plain number that a float can hold."""
    try:
        return isinstance(value, numbers.Real) and math.isfinite(value)
    except OverflowError:
        return False


async def await_it(awaitable):
    return await awaitable


def digest(file: Path) -> str | None:
    """Which version of a file a run was made with: 12 hex digits of its SHA-256, or None where there is no file."""
    if not file.is_file():
        return None
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()[:12]


def flag(name: str) -> str:
    """The command-line flag of a config field."""
    return "--" + name.replace("_", "-")


def short(value) -> str:
    """A value in at most 80 characters of one line."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else text[:77] + "..."


def one_line(error) -> str:
    return " ".join(str(error).split())[:300]
