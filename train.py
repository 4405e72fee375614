"""GRPO on the card you have: load a model, attach a LoRA, let it answer in groups, and record how it learns.

    uv run python train.py                       no GPU: SmolLM2-135M's real weights learn to add, in about 5 minutes
                                                 a CUDA GPU: Qwen3-4B in 4-bit, vLLM in the same process
    uv run python train.py --preset smollm2      the small model, also on a GPU
    uv run python train.py --task my_task.py     your own data set and rewards (the file is run as code)
    uv run python train.py --help                every knob, with its unit and its reason

The qwen3-4b preset is the chapter's config. Where it departs from the chapter, and why, stands in README.md.
"""

import dataclasses
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Literal

import checks
import models
import record
from console import Console
from data import build_dataset, drop_long_prompts
from gpu import PeakMemory, engine_gib, find_gpu, make_room

PROJECT = Path(__file__).resolve().parent

# unless the environment says otherwise: nothing is reported to anyone, and caches lie together
ENVIRONMENT = {
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "UNSLOTH_DISABLE_STATISTICS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "UNSLOTH_COMPILE_LOCATION": str(models.cache_folder() / "unsloth_compiled"),
}

# handed on to the task's make_dataset
TASK_OPTIONS = ("max_operand", "worked_examples", "system")

# what vLLM takes as max_lora_rank
VLLM_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)


@dataclasses.dataclass(frozen=True)
class Config:
    """GRPO with a LoRA. Names are TRL's own; the values below are the preset's, and a flag given by hand wins."""

    preset: Literal["qwen3-4b", "smollm2"] = "qwen3-4b"
    """Which set of values to start from; without it, qwen3-4b where a CUDA GPU is visible, else smollm2."""

    # the task
    task: str = "task.py"
    """Python file with make_dataset, REWARDS and EXAMPLES. It is run as code."""
    train_problems: int = 512
    """Problems to draw training prompts from."""
    eval_problems: int = 64
    """Held-out problems, answered greedily before the first step and after the last; 0 leaves both out."""
    max_operand: int | None = None
    """Handed to the task's make_dataset: the largest number to add (None: the task's own, 999)."""
    worked_examples: int | None = None
    """Handed to the task's make_dataset: answered turns before the question (None: the task's own, 0)."""
    system: str | None = None
    """Handed to the task's make_dataset: the system message (None: the task's own)."""

    # the model
    model: str = "unsloth/Qwen3-4B"
    """Hub id, folder, or smollm2-135m-instruct: the weights that are installed with the lab."""
    load_in_4bit: bool = True
    """Quantize the frozen base to NF4: a quarter of the memory."""
    lora_r: int = 16
    """LoRA rank: 33 M trainable parameters on Qwen3-4B at 16."""
    lora_alpha: int = 16
    """LoRA scale: the update is multiplied by lora_alpha / lora_r."""
    use_gradient_checkpointing: bool = True
    """Recompute activations in the backward pass (Unsloth's kind, on a GPU): less memory, about a third more time."""
    enable_thinking: bool | None = None
    """Thinking on or off (--enable-thinking, --no-enable-thinking), for templates that have it. None: the template's own."""

    # generation
    fast_inference: bool | None = True
    """Generate with vLLM, in this process (--fast-inference, --no-fast-inference). None: wherever a GPU is visible."""
    max_prompt_length: int = 256
    """Tokens. Problems with longer prompts are left out of the data set, with a word about how many."""
    max_completion_length: int = 768
    """Tokens. The longest answer: memory and time grow with it."""
    temperature: float = 1.0
    """Of sampling: the answers of one group must differ, or their advantages are all 0."""
    top_p: float = 1.0
    """Nucleus sampling; 1 turns it off."""
    top_k: int = 0
    """Sample among the k likeliest tokens; 0 turns it off."""
    kv_cache_gib: float = 2.5
    """GiB for vLLM's KV cache; its share of the card is worked out from this, the weights and the graphs."""
    gpu_memory_utilization: float | None = None
    """vLLM's share of the card (of --vram-limit-gib, where given) instead of the one that follows from kv_cache_gib."""
    vram_limit_gib: float | None = None
    """Hold the process to so much of the card, CUDA context included: a smaller card, imitated."""

    # the algorithm
    num_generations: int = 8
    """G, the answers to one problem that are compared with each other."""
    per_device_train_batch_size: int = 8
    """Completions in one forward and backward pass."""
    gradient_accumulation_steps: int = 1
    """Passes to one optimizer step; times the batch size, a multiple of num_generations."""
    num_iterations: int = 1
    """Optimizer steps on each batch of completions (mu in the paper)."""
    beta: float = 0.02
    """Weight of the KL divergence from the base model; 0 saves its forward pass, and its curve."""
    epsilon: float = 0.2
    """Clip range of the probability ratio."""
    epsilon_high: float | None = None
    """Upper clip range, where it differs (DAPO's clip-higher: 0.28). None: epsilon."""
    loss_type: Literal["grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"] = "dr_grpo"
    """How token losses are summed up; dr_grpo divides by a constant, so that length earns nothing."""
    scale_rewards: Literal["none", "group", "batch"] = "none"
    """Divide advantages by a standard deviation; the Dr. GRPO paper says none, the GRPO paper group."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """What the probability ratio is taken over; luspo needs sequence."""
    mask_truncated_completions: bool = False
    """Leave completions that hit the length limit out of the loss."""
    vllm_importance_sampling_correction: bool = False
    """Correct for vLLM's probabilities differing from the trainer's, and log by how much: one more forward pass."""

    # the optimizer
    learning_rate: float = 5e-6
    """Peak learning rate."""
    lr_scheduler_type: Literal["linear", "cosine", "constant", "constant_with_warmup"] = "linear"
    """What the learning rate does after the warm-up."""
    warmup_steps: float = 0.1
    """Steps, or a share of all steps where below 1."""
    optim: str = "adamw_8bit"
    """transformers' name of the optimizer (adamw_8bit needs a GPU; on a CPU, Unsloth takes adamw_torch_fused)."""
    weight_decay: float = 0.001
    """Pulls the adapter's matrices to 0, so the model to its base."""
    max_grad_norm: float = 1.0
    """Gradients are clipped to this norm; the norm in the record is the one before."""
    max_steps: int = 100
    """Optimizer steps."""
    seed: int = 0
    """Of the data, the adapter's start, the order and the sampling."""

    # the record
    run_name: str = "grpo-first-add"
    """Name of the MLflow run and, with the time, of its folder."""
    experiment: str = "p7-grpo"
    """MLflow experiment."""
    output_dir: str = "outputs"
    """Each run makes a folder of its own in here: checkpoints, completions, log, adapter."""
    save_steps: int = 50
    """Steps between checkpoints."""
    sample_steps: int = 10
    """Steps between samples on the screen and in the record; 0 for none."""

    @property
    def max_seq_length(self) -> int:
        """Tokens in the longest prompt with the longest completion."""
        return self.max_prompt_length + self.max_completion_length

    @property
    def effective_batch(self) -> int:
        """Completions to one optimizer step."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps

    @property
    def prompts_per_step(self) -> int:
        """Different problems in one optimizer step."""
        return self.effective_batch // self.num_generations

    @property
    def chat_template_kwargs(self) -> dict:
        """Arguments for the model's chat template."""
        return {} if self.enable_thinking is None else {"enable_thinking": self.enable_thinking}


PRESETS = {
    # a GRPO run on a 16 GB card, as the chapter sets it up
    "qwen3-4b": Config(),
    # the same run for two CPU cores: a prompt and an answer of a few tokens, numbers that a 135 M model can add
    "smollm2": Config(
        preset="smollm2",
        model="smollm2-135m-instruct",
        max_operand=20,
        worked_examples=1,
        system="Answer with an integer between <ans> and </ans>.",
        load_in_4bit=False,
        fast_inference=None,
        use_gradient_checkpointing=False,
        max_prompt_length=128,
        max_completion_length=20,
        kv_cache_gib=1.0,
        beta=0.0,
        learning_rate=3e-4,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=2,
        optim="adamw_torch_fused",
        max_steps=30,
    ),
}


def main() -> None:
    # config: everything that can be wrong is looked at before anything slow
    gpu, seen = find_gpu()
    c = read_config(sys.argv[1:], gpu)
    other = "smollm2 needs none" if c.preset == "qwen3-4b" else "qwen3-4b needs one with 16 GB and driver 580 or newer"
    print(f"preset {c.preset}: {seen}; {other}", flush=True)
    checks.check_config(c, gpu)
    task_file = c.task if Path(c.task).exists() else str(PROJECT / c.task)
    task = checks.load_task(task_file)
    checks.check_output_dir(Path(c.output_dir))
    models.check_model(c.model, c.load_in_4bit)
    store = record.connect(PROJECT, c.experiment)

    # data: prompts for training, and problems that training never sees
    options, presets = ({name: getattr(x, name) for name in TASK_OPTIONS} for x in (c, PRESETS[c.preset]))
    train_set = build_dataset(task, task_file, c.train_problems, c.seed, "train", options, presets)
    held_out = None
    if c.eval_problems:
        held_out = build_dataset(task, task_file, c.eval_problems, c.seed, "held-out", options, presets)

    # record: one MLflow run holds all that follows, also how it went wrong
    run_dir = Path(c.output_dir) / f"{c.run_name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    run_dir.mkdir(parents=True)
    with Console(run_dir / "train.log") as console:
        run_id = record.start(c, gpu, PROJECT, run_dir, train_set)
        status = "FAILED"
        try:
            train(c, gpu, task, train_set, held_out, run_dir, console)
            status = "FINISHED"
        except KeyboardInterrupt:
            status = "KILLED"
            raise
        except checks.Refused:
            raise
        except BaseException as error:
            traceback.print_exc()  # into the log
            console.say(f"failed: {type(error).__name__}: {checks.one_line(error)}")
            console.say(f"the whole story: {run_dir / 'train.log'}")
            sys.exit(1)
        finally:
            record.end(status)
        console.say(f"curves: {how_to_open(store)}, experiment {c.experiment}, run {run_id}")


def train(c: Config, gpu, task, train_set, held_out, run_dir: Path, console) -> None:
    """Load, evaluate, train, save, evaluate what was saved."""
    # Unsloth comes first, since it patches what the others import
    console.say(f"loading {c.model}, a minute or two; the libraries talk to {run_dir / 'train.log'}")
    for variable, value in ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    peak = None
    if gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu.cuda_name  # one process, one card
        peak = PeakMemory(gpu)
    from unsloth import FastLanguageModel  # isort: skip

    import torch
    from transformers import AutoTokenizer, set_seed
    from trl import GRPOConfig, GRPOTrainer

    from evaluate import evaluate
    from progress import Progress

    if gpu and not torch.cuda.is_available():
        raise checks.Refused(f"{gpu.name} is there, but torch cannot use it; CUDA_VISIBLE_DEVICES= trains on the CPU")

    # model: the frozen base with a LoRA on its seven projections
    room = make_room(c.vram_limit_gib, gpu, peak.start_gib) if gpu else None
    name = models.resolve_model(c.model, c.load_in_4bit, gpu)
    tokenizer = AutoTokenizer.from_pretrained(name)
    train_set = drop_long_prompts(train_set, tokenizer, c, "training", c.prompts_per_step, console)
    if held_out:
        held_out = drop_long_prompts(held_out, tokenizer, c, "held-out", 1, console)
    model, tokenizer = FastLanguageModel.from_pretrained(
        model_name=name,
        max_seq_length=c.max_seq_length,
        load_in_4bit=c.load_in_4bit,
        dtype=torch.bfloat16 if gpu else torch.float32,
        **(vllm_arguments(c, gpu, name, room) if c.fast_inference else {}),
    )
    model = FastLanguageModel.get_peft_model(
        model,
        r=c.lora_r,
        lora_alpha=c.lora_alpha,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        use_gradient_checkpointing="unsloth" if c.use_gradient_checkpointing else False,
        random_state=c.seed,
    )
    record.loaded(model)

    # trainer: TRL's own, which Unsloth has patched to sample from the engine above
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=task.REWARDS,
        args=GRPOConfig(**grpo_arguments(c, run_dir, on_gpu=gpu is not None)),
        train_dataset=train_set,
        callbacks=[Progress(c, console, peak, run_dir)],
    )
    record.trainer_arguments(trainer.args)

    # training, between two evaluations on problems that it never sees; the second reads the adapter back from disk
    adapter_dir = run_dir / "final-adapter"
    before = None
    if held_out:
        before, answers = evaluate(c, task, model, tokenizer, held_out)
        record.held_out(before, held_out, answers, step=0)
        console.say(f"held-out, before: {in_words(before)}")
    set_seed(c.seed)
    trainer.train()
    model.save_pretrained(str(adapter_dir))
    record.adapter(adapter_dir)
    if held_out:
        after, answers = evaluate(c, task, model, tokenizer, held_out, adapter_dir)
        record.held_out(after, held_out, answers, step=c.max_steps)
        console.say(f"held-out, before: {in_words(before)}")
        console.say(f"held-out, after:  {in_words(after)}")
    console.say(record.memory(peak))
    if torch.distributed.is_initialized():  # vLLM's
        torch.distributed.destroy_process_group()
    console.say(f"adapter: {adapter_dir.resolve()}")


def grpo_arguments(c: Config, run_dir: Path, on_gpu: bool) -> dict:
    """TRL's arguments, every one that matters: Unsloth's defaults differ from TRL's, and on a GPU from those on a CPU.

    Unsloth's mini batch is given too, since by itself it would be taken from the whole card's free memory.
    """
    return dict(
        output_dir=str(run_dir),
        run_name=c.run_name,
        report_to="mlflow",
        num_generations=c.num_generations,
        per_device_train_batch_size=c.per_device_train_batch_size,
        gradient_accumulation_steps=c.gradient_accumulation_steps,
        steps_per_generation=c.gradient_accumulation_steps,
        max_completion_length=c.max_completion_length,
        temperature=c.temperature,
        top_p=c.top_p,
        top_k=c.top_k,
        chat_template_kwargs=c.chat_template_kwargs,
        num_iterations=c.num_iterations,
        beta=c.beta,
        epsilon=c.epsilon,
        epsilon_high=c.epsilon if c.epsilon_high is None else c.epsilon_high,
        loss_type=c.loss_type,
        scale_rewards=c.scale_rewards,
        importance_sampling_level=c.importance_sampling_level,
        mask_truncated_completions=c.mask_truncated_completions,
        vllm_importance_sampling_correction=c.vllm_importance_sampling_correction,
        learning_rate=c.learning_rate,
        lr_scheduler_type=c.lr_scheduler_type,
        warmup_steps=c.warmup_steps,
        optim=c.optim,
        weight_decay=c.weight_decay,
        adam_beta1=0.9,
        adam_beta2=0.999,
        adam_epsilon=1e-8,
        max_grad_norm=c.max_grad_norm,
        max_steps=c.max_steps,
        bf16=on_gpu,
        fp16=False,
        gradient_checkpointing=c.use_gradient_checkpointing,
        seed=c.seed,
        data_seed=c.seed,
        logging_steps=1,
        save_steps=c.save_steps,
        log_completions=True,
        num_completions_to_print=1,
        disable_tqdm=True,
        **({"unsloth_grpo_mini_batch": c.per_device_train_batch_size} if on_gpu else {}),
    )


def vllm_arguments(c: Config, gpu, name: str, room: float) -> dict:
    """What turns Unsloth's loader into a loader with vLLM: its share of the card, and how many sequences it decodes.

    `room` is in GiB. Unsloth multiplies the share by the memory that is free, so it is handed over as a share of that.
    """
    import torch

    if c.gpu_memory_utilization:
        wanted = c.gpu_memory_utilization * (c.vram_limit_gib or gpu.total_gib)
    else:
        wanted = engine_gib(name, c.load_in_4bit, c.kv_cache_gib)
    if wanted > room:
        raise checks.Refused(
            f"vLLM needs {wanted:.1f} GiB and {room:.1f} are free: a smaller --kv-cache-gib (now {c.kv_cache_gib:g}), "
            "--load-in-4bit, or a smaller model"
        )
    return {
        "fast_inference": True,
        "max_lora_rank": next(rank for rank in VLLM_LORA_RANKS if rank >= c.lora_r),
        "gpu_memory_utilization": wanted / (torch.cuda.mem_get_info()[0] / 2**30),
        "max_num_seqs": max(16, c.effective_batch),
    }


def read_config(arguments: list[str], gpu) -> Config:
    """The preset's values with the command line's on top. A switch may also be written as --switch and --no-switch."""
    import tyro

    switches = {"enable-thinking", "fast-inference"}
    words = []
    for word in arguments:
        name = word.removeprefix("--").removeprefix("no-")
        words += [f"--{name}", str(not word.startswith("--no-"))] if word.startswith("--") and name in switches else [word]
    preset = "smollm2" if gpu is None else "qwen3-4b"
    for word, value in zip(words, words[1:] + [""]):
        if word.startswith("--preset"):
            preset = word.removeprefix("--preset=") if "=" in word else value
    c = tyro.cli(Config, args=words, default=PRESETS.get(preset, PRESETS["smollm2"]), prog="train.py")
    return dataclasses.replace(c, fast_inference=gpu is not None) if c.fast_inference is None else c


def in_words(scores: dict[str, float]) -> str:
    """Scores of one evaluation on one line; a share is of the problems whose reward is above 0."""
    shares = [f"{name.removesuffix('_reward')} {v:.3f}" for name, v in scores.items() if "/" not in name and name != "seconds"]
    return "  ".join([*shares, f"({scores['seconds']:.0f} s)"])


def how_to_open(store: str) -> str:
    """The command or address that shows the curves."""
    if store.startswith("http"):
        return store
    default = store == f"sqlite:///{PROJECT / 'mlflow.db'}"
    return f"cd {PROJECT} && uv run mlflow ui" if default else f"uv run mlflow ui --backend-store-uri {store}"


if __name__ == "__main__":
    try:
        main()
    except checks.Refused as refusal:
        print(f"train.py: {refusal}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("train.py: interrupted", file=sys.stderr)
        sys.exit(130)
