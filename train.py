"""GRPO on the card you have: load a model, attach a LoRA, let it answer in groups, and record how it learns.

    uv run python train.py                       no GPU: SmolLM2-135M's real weights learn to add, in 2 to 3 minutes
                                                 a CUDA GPU: Qwen3-4B in 4-bit, vLLM in the same process
    uv run python train.py --preset smollm2      the small model, also on a GPU
    uv run python train.py --task my_task.py     your own data set and rewards (the file is run as code)
    uv run python train.py --resume-from-checkpoint last    go on with what was stopped
    uv run torchrun --standalone --nproc-per-node 2 train.py    on two cards
    uv run python train.py --help                every knob, with its unit and its reason

`--preset chapter` is the chapter's schedule on its model. Where the lab departs from it, and why, stands in README.md.
"""

import contextlib
import dataclasses
import gc
import os
import sys
from pathlib import Path
from typing import Literal

import tyro

import adapter
import budget
import checkpoints
import checks
import command_line
import ending
import engine
import models
import parallel
import record
import roofline
from console import open_closed_streams
from data import build_dataset, can_think, drop_long_prompts, in_order
from stopping import Stop, Stopped
from trainer import grpo_arguments, make_ready, trainer_class

PROJECT = Path(__file__).resolve().parent

# unless the environment says otherwise, nothing is reported to anyone, caches lie together, and threads that wait for each
# other sleep soon: beside another busy process, two of them on two cores spun away most of the time (docs/pace.md)
ENVIRONMENT = {
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "UNSLOTH_DISABLE_STATISTICS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "GOMP_SPINCOUNT": "3000",
    "UNSLOTH_COMPILE_LOCATION": str(models.cache_folder() / "unsloth_compiled"),
}


@dataclasses.dataclass(frozen=True)
class Config:
    """GRPO with a LoRA. Names are TRL's own; the values below are the preset's, and a flag given by hand wins."""

    preset: Literal["qwen3-4b", "chapter", "smollm2"] = "qwen3-4b"
    """Which set of values to start from; without it, qwen3-4b where a CUDA GPU is visible, else smollm2."""

    # the task
    task: str = str(PROJECT / "task.py")
    """Python file with make_dataset, REWARDS and EXAMPLES. It is run as code."""
    train_problems: int = 512
    """Problems to draw training prompts from."""
    eval_problems: int = 64
    """Held-out problems, answered greedily before the first step and after the last; 0 skips both."""
    eval_steps: int = 0
    """Steps between further evaluations; the adapter that solves most is kept as best-adapter. 0 for none."""
    max_operand: int | None = None
    """Handed to the task's make_dataset: the largest number to add (None: the task's own, 999)."""
    worked_examples: int | None = None
    """Handed to the task's make_dataset: answered turns before the question (None: the task's own, 0)."""
    system: str | None = None
    """Handed to the task's make_dataset: the system message (None: the task's own)."""

    # the model
    model: str = "unsloth/Qwen3-4B"
    """Hub id, folder, or smollm2-135m-instruct: the weights that are installed with the lab."""
    load_in: Literal["4bit", "fp8", "16bit"] = "4bit"
    """The frozen base: NF4, a quarter of the memory; fp8, half of it (vLLM on an H100, RTX 50 series or newer); 16 bits."""
    lora_r: int = 16
    """LoRA rank: 33 M trainable parameters on Qwen3-4B at 16."""
    target_modules: tuple[str, ...] = checks.PROJECTIONS
    """The projections that get a LoRA."""
    lora_alpha: int = 16
    """LoRA scale: the update is multiplied by lora_alpha / lora_r."""
    gradient_checkpointing: bool = True
    """Recompute activations in the backward pass (Unsloth's kind, on a GPU): less memory, about a third more time."""
    enable_thinking: bool | None = None
    """Thinking on or off (--enable-thinking, --no-enable-thinking), for templates that have it. None: the template's own."""

    # generation
    backend: Literal["vllm", "unsloth", "paged", "trl"] = "vllm"
    """What generates. vllm: in this process, through Unsloth (smollm2's too wherever a GPU is visible); unsloth: Unsloth
    without vLLM; trl: plain TRL and PEFT with generate(); paged: the same with transformers' continuous batching."""
    max_prompt_length: int = 256
    """Tokens. Problems with longer prompts are left out of the data set, and the count is printed."""
    max_completion_length: int = 768
    """Tokens. The longest answer: memory and time grow with it."""
    temperature: float = 1.0
    """Of sampling: the answers of one group must differ, or their advantages are all 0."""
    top_p: float = 1.0
    """Nucleus sampling; 1 turns it off."""
    top_k: int = 0
    """Sample among the k likeliest tokens; 0 turns it off."""
    min_p: float | None = None
    """Sample among tokens at least so likely, as a share of the likeliest one's probability."""
    kv_cache_gib: float = 7.5
    """GiB for vLLM's KV cache; its share of the card is worked out from this, the weights and the graphs."""
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """fp8 halves a token's bytes (RTX 40 series or newer); it samples from slightly other probabilities than the trainer's."""
    vllm_enable_sleep_mode: bool = False
    """vLLM gives its KV cache back while nothing is generated, so that a training pass can have the memory."""
    lean_decode: bool = True
    """Set vLLM up for this run alone: each 4-bit layer as one matrix with plain scales (decode.py), graphs for the batches
    that occur, nothing compiled. Off: as Unsloth does."""
    gpu_memory_utilization: float | None = None
    """vLLM's share of the card (of --vram-limit-gib, where given) instead of the one that follows from kv_cache_gib."""
    vllm_start_timeout: float = 600
    """Seconds for loading the model and starting vLLM, downloads not counted; a start that hangs is ended then."""
    vram_limit_gib: float | None = None
    """Hold the process to so much of the card, CUDA context included: a smaller card, imitated."""
    use_cuda_graph: bool = False
    """With paged, on a GPU: decode in CUDA graphs."""
    torch_compile: bool = False
    """Compile the training forward pass (transformers' flag)."""
    force: bool = False
    """Start although the memory plan (budget.py) says that it cannot fit."""

    # the algorithm
    num_generations: int = 8
    """G, the answers to one problem that are compared with each other."""
    per_device_train_batch_size: int = 8
    """Completions in one forward and backward pass."""
    gradient_accumulation_steps: int = 1
    """Passes to one optimizer step; times the batch size, a multiple of num_generations."""
    steps_per_generation: int | None = 8
    """Passes that one rollout feeds: their answers decode together, but later steps meet a policy that has moved on
    (clip_ratio and kl say how far). A multiple of gradient_accumulation_steps. None: each step has its own rollout."""
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
    optim: Literal["adamw_8bit", "paged_adamw_8bit", "adamw_torch", "adamw_torch_fused", "adafactor", "sgd"] = "adamw_8bit"
    """transformers' name of the optimizer (those with 8bit need a GPU)."""
    weight_decay: float = 0.001
    """Pulls the adapter's matrices to 0, so the model to its base."""
    max_grad_norm: float = 1.0
    """Gradients are clipped to this norm; the norm in the record is the one before."""
    max_steps: int = 104
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
    resume_from_checkpoint: str | None = None
    """Go on with a checkpoint, a run's folder, or `last`; the config is the checkpoint's, and flags given by hand win."""
    save_steps: int = 50
    """Steps between checkpoints."""
    save_total_limit: int | None = 2
    """Checkpoints that are kept, the latest ones (None: all)."""
    sample_steps: int = 10
    """Steps between samples on the screen and in the record; 0 for none."""
    processes: tyro.conf.Suppress[int] = 1
    """How many a launcher has started, a card for each: no flag. What follows is of one of them alone."""

    @property
    def fast_inference(self) -> bool:
        """Whether vLLM generates (Unsloth's name for it)."""
        return self.backend == "vllm"

    @property
    def plain(self) -> bool:
        """Whether model and trainer are TRL's and PEFT's, without Unsloth."""
        return self.backend in ("paged", "trl")

    @property
    def max_seq_length(self) -> int:
        """Tokens in the longest prompt with the longest completion."""
        return self.max_prompt_length + self.max_completion_length

    @property
    def effective_batch(self) -> int:
        """Completions to one optimizer step."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps

    @property
    def rollout_batch(self) -> int:
        """Completions that are generated at once."""
        return self.per_device_train_batch_size * (self.steps_per_generation or self.gradient_accumulation_steps)

    @property
    def prompts_per_rollout(self) -> int:
        """Different problems in one rollout."""
        return self.rollout_batch // self.num_generations

    @property
    def steps_per_rollout(self) -> int:
        """Optimizer steps from one rollout to the next."""
        return self.rollout_batch // self.effective_batch * self.num_iterations

    @property
    def chat_template_kwargs(self) -> dict:
        """Arguments for the model's chat template."""
        return {} if self.enable_thinking is None else {"enable_thinking": self.enable_thinking}


PRESETS = {
    # a GRPO run on a 16 GB card, eight groups to a rollout
    "qwen3-4b": Config(),
    # the same as the chapter has it: a rollout for each step, vLLM as Unsloth sets it up
    "chapter": Config(
        preset="chapter",
        steps_per_generation=None,
        kv_cache_gib=2.5,
        lean_decode=False,
        max_steps=100,
    ),
    # the same run for two CPU cores: a prompt and an answer of a few tokens, numbers that a 135 M model can add
    "smollm2": Config(
        preset="smollm2",
        model="smollm2-135m-instruct",
        max_operand=20,
        worked_examples=1,
        system="Answer with an integer between <ans> and </ans>.",
        load_in="16bit",
        backend="unsloth",
        gradient_checkpointing=False,
        max_prompt_length=128,
        max_completion_length=20,
        kv_cache_gib=1.0,
        steps_per_generation=None,
        beta=0.0,
        learning_rate=3e-4,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=2,
        optim="adamw_torch_fused",
        max_steps=30,
        save_steps=10,
    ),
}


def main(arguments: list[str] | None = None) -> None:
    """One run, from the command line's arguments. Raises Refused, or SystemExit with the code that README.md explains."""
    # config: everything that can be wrong is looked at before anything slow
    os.environ.update({**ENVIRONMENT, **os.environ, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"})  # NVML counts cards in that order
    world = parallel.find()
    cards = parallel.cards(world)
    gpu, seen = cards[world.rank]
    config = command_line.parse(Config, PRESETS, sys.argv[1:] if arguments is None else arguments, gpu)
    config = dataclasses.replace(config, processes=world.size)
    other = "smollm2 needs none" if config.preset != "smollm2" else "qwen3-4b needs one with 16 GB and driver 580 or newer"
    world.say(f"preset {config.preset}: {seen}; {other}")
    checks.check_config(config)
    for note in checks.notes(config):
        world.say(note)
    for card, _ in cards:
        checks.check_machine(config, card)
    checks.check_output_dir(Path(config.output_dir))
    models.check_model(config.model, config.load_in)
    if plan := [engine.look_at(config, card) for card, _ in cards][0]:
        world.say("\n".join(budget.table(plan)))
    origin = checkpoints.origin_of(config) if config.resume_from_checkpoint else None

    # data: prompts for training, problems that training never sees, and rewards that pass their own examples
    task = checks.load_task(config.task)
    preset = PRESETS[config.preset]
    train_set = build_dataset(task, config, preset, config.train_problems, "train")
    held_out = build_dataset(task, config, preset, config.eval_problems, "held-out") if config.eval_problems else None
    checks.check_rewards(task, config.task, train_set)

    # record: one MLflow run holds all that follows, also how it went wrong
    store = record.connect(PROJECT, config.experiment) if world.is_main else ""
    run_dir = Path(config.output_dir) / f"{config.run_name}-{world.stamp()}"
    world.make(run_dir)
    with ending.one_run(config, world, gpu, PROJECT, store, run_dir, origin) as (stop, console, run, peak):
        train(config, world, gpu, task, train_set, held_out, run_dir, console, run, peak, stop, origin)


def train(config: Config, world, gpu, task, train_set, held_out, run_dir: Path, console, run, peak, stop: Stop, origin) -> None:
    """Load, evaluate, train, save, evaluate what was saved."""
    # Unsloth comes first, since it patches what the others import; on a CPU plain TRL needs one of its patches too
    console.say(f"loading {config.model}, a minute or two; the libraries talk to {run_dir / 'train.log'}")
    if origin:
        console.say(f"going on from {config.resume_from_checkpoint}; changed: {', '.join(origin['changes']) or 'nothing'}")
        if origin["step"] >= config.max_steps:
            console.say(f"all {config.max_steps} steps are done: only saving and the evaluation are left")
    console.doing = "loading the libraries"
    if gpu:
        os.environ.update(engine.environment(config))
    os.environ.update(world.environment(gpu))  # one process, one card
    if not (gpu and config.plain):
        import unsloth  # noqa: F401, isort: skip

    import torch
    from transformers import set_seed
    from trl import GRPOConfig

    from held_out import HeldOut
    from phases import Phases
    from progress import Progress
    from vram import Meter

    world.join(gpu is not None, console.say)
    if not gc.isenabled():
        gc.freeze()  # what is imported stays; vLLM looks at it once more, and freezes it again
        gc.enable()
    phases = Phases(gpu is not None, console.say)
    stop.raise_if_asked()
    if gpu and not torch.cuda.is_available():
        raise checks.Refused(f"{gpu.name} is there, but torch cannot use it; CUDA_VISIBLE_DEVICES= trains on the CPU")

    # data: problems with prompts that fit, in the order of training
    console.doing = "loading the model"
    name = models.resolve_model(config.model, config.load_in, gpu is not None, config.plain)
    tokenizer = models.read_tokenizer(name)
    drawn, needed = len(train_set), config.prompts_per_rollout * config.processes
    train_set = drop_long_prompts(train_set, tokenizer, config, "training", needed, console)
    if held_out:
        held_out = drop_long_prompts(held_out, tokenizer, config, "held-out", 1, console)
    run.training_data(train_set, drawn - len(train_set), config.task)

    # model: the frozen base, with vLLM beside it where wanted, and a LoRA on its seven projections
    shape, plan = engine.memory_plan(config, gpu, name, peak.free_gib) if gpu else (None, None)  # of the very copy that loads
    run.plan(plan)
    meter = Meter(gpu, peak, phases, plan, console.say, sleeps=config.vllm_enable_sleep_mode)
    if config.fast_inference:
        meter.watch_engine()
    with engine.bounded_start(console, run, config.vllm_start_timeout) if config.fast_inference else contextlib.nullcontext():
        model, tokenizer = load_model(config, gpu, name, shape, plan)
    if config.fast_inference and (fewer := engine.fewer_seats(model.vllm_engine, config)):
        console.say(fewer)
    meter.at("model")
    stop.raise_if_asked()
    model = attach_lora(config, model)
    run.loaded(model)
    meter.loaded(model)

    # trainer: TRL's own, which Unsloth has patched to sample from the engine above
    facts = checkpoints.facts_of_run(config, run.run_id, run_dir, origin)
    evaluation = None
    if held_out and world.is_main:
        evaluation = HeldOut(config, task, model, tokenizer, held_out, run_dir, run, console, facts)
    progress = Progress(config, task, world, console, peak, run_dir, run, stop, facts, evaluation,
                        can_think(config, tokenizer), phases, meter, roofline.pace(config, shape, gpu))  # fmt: skip
    trainer = trainer_class(config, gpu)(
        model=model,
        processing_class=tokenizer,
        reward_funcs=[checks.strict(reward) for reward in task.REWARDS],
        args=GRPOConfig(**grpo_arguments(config, run_dir, on_gpu=gpu is not None)),
        train_dataset=in_order(train_set, config),
        callbacks=[progress],
    )
    make_ready(config, trainer, gpu, world)
    phases.attach(trainer, config.processes)
    if evaluation:
        evaluation.point = phases.timed("evaluation", evaluation.point)
    if config.backend == "paged":
        trainer.on_cache = meter.cache
    run.trainer_arguments(trainer.args)
    run.figures = progress.figures(trainer)

    # training, between two evaluations on problems that it never sees; the second reads the adapter back from disk
    adapter_dir = run_dir / "final-adapter"
    if evaluation:
        evaluation.before()
    world.check_the_same(model)  # and wait for the evaluation
    set_seed(config.seed + world.rank)  # each its own answers
    with stop.training(config.steps_per_rollout):
        try:
            if origin and origin["step"] >= config.max_steps:
                checkpoints.take_back(Path(config.resume_from_checkpoint), trainer)
            else:
                trainer.train(resume_from_checkpoint=config.resume_from_checkpoint)
        except Stopped:  # said twice: at once
            raise
        except BaseException:
            checkpoints.delete_unfinished(run_dir)
            if (step := trainer.state.global_step) and world.is_main:
                adapter.rescue(model, adapter_dir, step, console, run)
            raise
        console.doing = "saving the adapter" if world.is_main else "waiting for process 0"
        if world.is_main:
            adapter.keep(model, adapter_dir, name, trainer.state.log_history, config, console, run)
    stop.raise_if_asked()
    if evaluation:
        evaluation.after(trainer.state.global_step, adapter_dir)
    if summary := run.memory(peak, phases, config.vllm_enable_sleep_mode):
        console.say(summary)
    world.wait()


def load_model(config: Config, gpu, name: str, shape, plan):
    """The frozen base and its tokenizer, with vLLM in this process where wanted, and no more of the card than is allowed."""
    import torch

    if gpu:
        engine.use_one_thread()
    if gpu and config.vram_limit_gib:
        engine.hold_to(config.vram_limit_gib, plan)
    if config.plain:
        import plain

        return plain.load_model(config, gpu, name)
    from unsloth import FastLanguageModel

    vllm = engine.set_up(config, shape, plan, gpu) if config.fast_inference else {}
    model, tokenizer = FastLanguageModel.from_pretrained(
        model_name=name,
        max_seq_length=config.max_seq_length,
        load_in_4bit=config.load_in == "4bit",
        dtype=torch.bfloat16 if gpu else torch.float32,
        **vllm,
    )
    if vllm:
        engine.check(model.vllm_engine, config)
    return model, tokenizer


def attach_lora(config: Config, model):
    """The model with its trainable part, which begins as no change at all: B is 0."""
    if config.plain:
        import plain

        return plain.attach_lora(config, model)
    from unsloth import FastLanguageModel

    return FastLanguageModel.get_peft_model(
        model,
        r=config.lora_r,
        lora_alpha=config.lora_alpha,
        lora_dropout=0.0,
        bias="none",
        target_modules=list(config.target_modules),
        use_gradient_checkpointing="unsloth" if config.gradient_checkpointing else False,
        random_state=config.seed,
    )


if __name__ == "__main__":
    gc.disable()  # until all is imported: of 600,000 new objects hardly one is garbage, and looking for it takes seconds
    open_closed_streams()
    try:
        main()
    except checks.Refused as refusal:
        print(f"train.py: {parallel.let_the_first_speak()}{refusal}", file=sys.stderr)
        sys.exit(2)
    except (KeyboardInterrupt, Stopped) as stopped:
        print("train.py: stopped before training", file=sys.stderr)
        sys.exit(128 + getattr(stopped, "signum", 2))
    except BrokenPipeError:  # --help | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(1)
