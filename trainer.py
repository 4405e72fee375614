"""TRL's trainer for the machine at hand, and its arguments for a config."""

from pathlib import Path


def trainer_class(config, gpu):
    """TRL's trainer for a back end: as Unsloth has patched it on a GPU; on a CPU with passes and generation made for one."""
    if config.backend == "paged":
        from paged import PagedTrainer

        return PagedTrainer
    if gpu or config.backend == "trl":
        from trl import GRPOTrainer

        return GRPOTrainer
    from cpu_trainer import CPUTrainer

    return CPUTrainer


def make_ready(config, trainer, gpu, world) -> None:
    """What a new trainer still lacks: with Unsloth on a GPU, passes that a rollout fits into; with a beta, one adapter alone;
    with a parallel.World of several processes, their gradients.

    TRL adds a copy of the untrained adapter as the reference. The base model is the same, without a second LoRA, and a
    checkpoint that held both would resume with the wrong one. Without Unsloth, TRL casts the adapter of a 4-bit model to 16
    bits, in which small steps of the optimizer get lost: it is trained in 32, as with Unsloth.
    """
    if gpu and not config.plain:
        import scoring

        scoring.in_training_batches(trainer)
    if config.plain:
        for parameter in trainer.model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
    if "ref" in trainer.model.peft_config:
        trainer.model.delete_adapter("ref")
    world.share_gradients(trainer)


def grpo_arguments(config, run_dir: Path, on_gpu: bool) -> dict:
    """TRL's arguments, every one that matters: Unsloth's defaults differ from TRL's, and on a GPU from those on a CPU.

    On a GPU Unsloth packs the completions of a batch into one pass. Where that is too much it goes back to mini batches, a
    number of passes, which by itself follows from the whole card's free memory: here there is one completion in each. It also
    goes back where a packed log-prob differs from a row's by 0.7. Log-probs are of logits over the temperature, and differed by
    0.12 at 1: below a temperature of 0.2 there is one pass for all, which the budget has room for.
    """
    same = """
        run_name num_generations per_device_train_batch_size gradient_accumulation_steps max_completion_length temperature top_p
        top_k chat_template_kwargs num_iterations beta epsilon loss_type scale_rewards importance_sampling_level
        mask_truncated_completions vllm_importance_sampling_correction learning_rate lr_scheduler_type warmup_steps optim
        weight_decay max_grad_norm max_steps gradient_checkpointing seed save_steps min_p torch_compile
    """
    by_backend = {}
    if config.backend == "paged":
        from paged import engine_arguments

        by_backend = {
            "use_transformers_continuous_batching": True,
            "transformers_continuous_batching_config": engine_arguments(config),
        }
    elif on_gpu and not config.plain:
        by_backend = {"unsloth_grpo_mini_batch": config.per_device_train_batch_size if config.temperature >= 0.2 else 1}
    # Unsloth's own generate() captures CUDA graphs in each rollout, and torch keeps the memory of those that are gone
    leaves_graphs = on_gpu and config.backend == "unsloth"
    return dict(
        {name: getattr(config, name) for name in same.split()},
        output_dir=str(run_dir),
        report_to="none",
        steps_per_generation=config.steps_per_generation or config.gradient_accumulation_steps,
        repetition_penalty=1.0,
        epsilon_high=config.epsilon if config.epsilon_high is None else config.epsilon_high,
        adam_beta1=0.9,
        adam_beta2=0.999,
        adam_epsilon=1e-8,
        use_cpu=not on_gpu,
        bf16=on_gpu,
        fp16=False,
        data_seed=config.seed,
        shuffle_dataset=False,
        torch_empty_cache_steps=config.steps_per_rollout if leaves_graphs else None,
        logging_steps=1,
        log_completions=True,
        num_completions_to_print=1,
        disable_tqdm=True,
        **by_backend,
    )
