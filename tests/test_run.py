"""Real runs of train.py on SmolLM2's real weights: what they print, what they leave, what the record holds."""

import base64
import hashlib
import json
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from mlflow.tracking import MlflowClient

from conftest import ROOT, SECRET, refused, train


def find_run(store, experiment):
    client = MlflowClient(store)
    (run,) = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
    return client, run


@pytest.fixture(scope="module")
def recorded(small_run):
    return find_run(small_run.store, "p7-grpo")


def table(client, run, name, tmp_path):
    return json.loads(open(client.download_artifacts(run.info.run_id, name, tmp_path)).read())


def test_screen_shows_one_line_a_step_and_no_chatter(small_run):
    lines = small_run.done.stdout.splitlines()
    assert lines[0].startswith("preset smollm2: no CUDA GPU is visible") and "qwen3-4b needs one" in lines[0]
    steps = [line for line in lines if line.startswith("step ")]
    number = r"\d+\.\d+"
    rewards = rf"reward {number}  correctness {number}  format {number}"
    pattern = rf"step (\d)/2  {rewards}  \d+ tok/s  {number} s  {number} GiB  eta \d+:\d\d"
    assert [re.fullmatch(pattern, line)[1] for line in steps] == ["1", "2"]
    assert sum(line.startswith("    'What is ") for line in lines) == 4  # two samples after each step
    assert re.fullmatch(r"adapter: (.+) \(largest entry of B 0\.\d+\)", lines[-5])[1] == str(small_run.adapter_dir.resolve())
    assert re.fullmatch(rf"held-out, before: correctness {number}  format {number}  \(\d+ s\)", lines[-4])
    assert re.fullmatch(rf"held-out, after:  correctness {number}  format {number}  \(\d+ s\)", lines[-3])
    assert re.fullmatch(rf"peak memory {number} GiB of RAM \(no GPU, so no VRAM\)", lines[-2])
    assert lines[-1].startswith(f"curves: uv run mlflow ui --backend-store-uri {small_run.store}")
    assert len(lines) == len(steps) + 4 + 8 and small_run.done.stderr == ""


def test_log_holds_what_the_libraries_said(small_run):
    log = (small_run.run_dir / "train.log").read_text()
    assert "Unsloth" in log and "rewards/correctness_reward/mean" in log and "step 2/2" in log


def test_record_holds_config_lock_and_machine(recorded):
    _, run = recorded
    params, tags = run.data.params, run.data.tags
    expected = {
        "lora_r": "16",
        "target_modules": "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj",
        "group": "8",
        "num_generations": "8",
        "max_completion_length": "20",
        "max_seq_length": "148",
        "beta": "0.0",
        "loss_type": "dr_grpo",
        "scale_rewards": "none",
        "epsilon_high": "0.28",
        "effective_batch": "8",
        "prompts_per_rollout": "1",
        "steps_per_rollout": "1",
        "seed": "5",
        "enable_thinking": "None",
        "backend": "unsloth",
        "driver": "none",
        "precision": "fp32",
        "dropped_problems": "0",
        "model_requested": "smollm2-135m-instruct",
        "trainable_parameters": "4884480",
        "uv_lock": hashlib.sha256((ROOT / "uv.lock").read_bytes()).hexdigest()[:12],
    }
    assert {name: params.get(name) for name in expected} == expected
    assert "smollm2-135m-instruct" in params["model"]
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    assert tags["git_commit"].startswith(commit or "none")
    assert tags["card"].startswith("none (x86_64") and tags["version.trl"] and tags["version.vllm"] == "0.26.0"
    assert (run.info.run_name, run.info.status) == ("grpo-first-add", "FINISHED")


def test_record_holds_every_step_and_both_evaluations(recorded):
    client, run = recorded

    def history(name):
        return {m.step: m.value for m in client.get_metric_history(run.info.run_id, name)}

    for name in ("reward", "reward_std", "rewards/correctness_reward/mean", "rewards/format_reward/mean", "loss",
                 "grad_norm", "learning_rate", "entropy", "completions/clipped_ratio", "completions/mean_length",
                 "frac_reward_zero_std", "clip_ratio/region_mean", "step_time"):  # fmt: skip
        assert set(history(name)) == {1, 2}, name
    parts = history("rewards/correctness_reward/mean"), history("rewards/format_reward/mean")
    assert all(history("reward")[step] == pytest.approx(parts[0][step] + parts[1][step]) for step in (1, 2))
    assert history("learning_rate")[2] == pytest.approx(2e-3)
    for name in ("correctness_reward", "format_reward", "correctness_reward/mean", "format_reward/mean", "seconds"):
        assert set(history(f"held_out/{name}")) == {0, 2}, name
    assert set(history("held_out/format_reward").values()) <= {0.0, 0.25, 0.5, 0.75, 1.0}
    assert run.data.metrics["rss_peak_gib"] > 1 and run.data.metrics["adapter_largest_b"] > 1e-4
    assert any(name.startswith("system/") for name in run.data.metrics)


def test_record_holds_where_the_time_of_each_step_went(recorded, small_run):
    client, run = recorded

    def history(name):
        return {m.step: m.value for m in client.get_metric_history(run.info.run_id, name)}

    in_training_step = ("generation", "rewards", "log_probs", "forward_backward")  # as TRL's own step_time has it
    parts = {name: history(f"seconds/{name}") for name in (*in_training_step, "optimizer", "rest")}
    for step in (1, 2):
        assert sum(parts[name][step] for name in in_training_step) == pytest.approx(history("step_time")[step], rel=0.05)
        assert all(part[step] >= 0 for part in parts.values()) and parts["generation"][step] > 0 < parts["optimizer"][step]
        generated = history("completions/mean_length")[step] * 8
        assert history("tokens_per_second/generated")[step] == pytest.approx(generated / parts["generation"][step])
        trained = history("num_tokens")[step] - history("num_tokens").get(step - 1, 0)
        assert history("tokens_per_second/trained")[step] == pytest.approx(trained / parts["forward_backward"][step])
        assert trained > generated  # prompts, too
        seconds = sum(part[step] for part in parts.values())
        assert history("tokens_per_second/overall")[step] == pytest.approx(generated / seconds, rel=0.05)
    start = [run.data.metrics[f"start_seconds/{part}"] for part in ("imports", "to_first_step")]
    assert start[0] > 1 and start[1] > parts["generation"][1] and sum(start) < small_run.done.seconds
    # there is no card to measure, and no bandwidth to hold the speed against
    assert [name for name in run.data.metrics if name.startswith("vram") or name == "roofline_share"] == []
    drawn = {file.path for file in client.list_artifacts(run.info.run_id)}
    for name, there in (("step_time.png", True), ("reward_curve.png", True), ("memory.png", False), ("memory_plan.txt", False)):
        assert (name in drawn) is there, name
    assert (small_run.run_dir / "step_time.png").read_bytes().startswith(b"\x89PNG")
    assert not (small_run.run_dir / "memory.png").exists()


def test_record_holds_data_samples_and_adapter(recorded, small_run, tmp_path):
    client, run = recorded
    (dataset,) = run.inputs.dataset_inputs
    assert dataset.dataset.name == "task" and json.loads(dataset.dataset.profile)["num_rows"] == 512
    samples = table(client, run, "samples.json", tmp_path)
    assert samples["columns"] == ["step", "prompt", "completion", "correctness_reward", "format_reward", "advantage"]
    assert [row[0] for row in samples["data"]] == [1] * 8 + [2] * 8
    assert all(re.fullmatch(r"What is \d+ \+ \d+\?", row[1]) for row in samples["data"])
    answers = table(client, run, "held_out.json", tmp_path)
    assert [row[0] for row in answers["data"]] == [0] * 4 + [2] * 4
    arguments = table(client, run, "trainer_arguments.json", tmp_path)
    assert arguments["epsilon_high"] == "0.28" and arguments["loss_type"] == "dr_grpo" and arguments["seed"] == "5"
    stored = {file.path: file.file_size for file in client.list_artifacts(run.info.run_id, "lora")}
    here = small_run.adapter_dir / "adapter_model.safetensors"
    assert stored["lora/adapter_model.safetensors"] == here.stat().st_size > 10**7
    assert "lora/adapter_config.json" in stored


def test_checkpoint_and_completions_are_there(small_run):
    assert (small_run.run_dir / "checkpoints" / "checkpoint-2" / "adapter_model.safetensors").is_file()
    assert len(list((small_run.run_dir / "completions").glob("*.parquet"))) == 2


def test_adapter_changes_what_the_model_says(small_run):
    """Loaded by PEFT in the way that the README shows; the same model without it says something else."""
    import torch
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoTokenizer

    model = AutoPeftModelForCausalLM.from_pretrained(small_run.adapter_dir, dtype=torch.float32)
    base = model.peft_config["default"].base_model_name_or_path
    tokenizer = AutoTokenizer.from_pretrained(base)
    assert (tokenizer.eos_token, model.generation_config.eos_token_id) == ("<|im_end|>", tokenizer.eos_token_id)
    assert any(p.abs().max() > 0 for name, p in model.named_parameters() if "lora_B" in name)
    batch = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Tell me about the sea."}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )

    def answer():
        tokens = model.generate(**batch, max_new_tokens=40, do_sample=False)
        return tokenizer.decode(tokens[0, batch["input_ids"].shape[1] :])

    with torch.inference_mode():
        with_adapter, logits = answer(), model(**batch).logits
        with model.disable_adapter():
            without, base_logits = answer(), model(**batch).logits
    assert (logits - base_logits).abs().max() > 0.1
    assert with_adapter != without


def test_own_task_runs_and_is_recorded_by_a_server(own_task_run):
    client, run = find_run(own_task_run.store, "own")
    assert (run.info.run_name, run.info.status) == ("mine", "FINISHED")
    assert run.inputs.dataset_inputs[0].dataset.name == "my_task"
    rewards = [name for name in run.data.metrics if name.startswith("rewards/") and name.endswith("/mean")]
    assert rewards == ["rewards/length_reward/mean"] and "held_out/length_reward" in run.data.metrics
    assert "lora/adapter_model.safetensors" in {f.path for f in client.list_artifacts(run.info.run_id, "lora")}
    assert own_task_run.done.stdout.splitlines()[-1].startswith(f"curves: {own_task_run.store}, experiment own")


def test_credentials_stay_out_of_everything(own_task_run, tmp_path):
    client, run = find_run(own_task_run.store, "own")
    shown = [own_task_run.done.stdout, own_task_run.done.stderr, str(run.to_dictionary())]
    files = [p for p in own_task_run.folder.rglob("*") if p.is_file()]
    artifacts = client.download_artifacts(run.info.run_id, "", tmp_path)
    files += [p for p in type(own_task_run.folder)(artifacts).rglob("*") if p.is_file()]
    assert len(files) > 10
    for text in [*shown, *(p.read_bytes().decode(errors="replace") for p in files)]:
        assert SECRET not in text and "p%C3%A4ssword" not in text


@pytest.fixture
def guarded():
    """A server that lets nobody in, and what it was shown."""
    shown = []

    class Guard(BaseHTTPRequestHandler):
        def do_GET(self):
            shown.append(self.headers.get("Authorization"))
            self.send_error(401)

        do_POST = do_GET

        def log_message(self, *arguments):
            pass

    server = HTTPServer(("127.0.0.1", 0), Guard)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_port}", shown
    server.shutdown()


def test_credentials_reach_the_server_and_no_message(guarded, tmp_path):
    address, shown = guarded
    message = refused(cwd=tmp_path, MLFLOW_TRACKING_URI=f"http://somebody:{SECRET}@{address}")
    assert shown[0] == "Basic " + base64.b64encode(f"somebody:{SECRET}".encode()).decode()
    assert f"MLFLOW_TRACKING_URI http://{address}: " in message and "401" in message and SECRET not in message


STORES = {  # that are down, and how each is shown
    "http://somebody:{}@127.0.0.1:9/mlflow": "http://127.0.0.1:9/mlflow",
    "postgresql://somebody:{}@127.0.0.1:9/db": "postgresql://127.0.0.1:9/db",
    "postgresql://127.0.0.1:9/db?user=somebody&password={}": "postgresql://127.0.0.1:9/db?user=somebody&password=***",
    "http://somebody:pa/ss{}@127.0.0.1:9": "http://127.0.0.1:9",
    "somebody:{}@127.0.0.1:9": "127.0.0.1:9",
}


def test_a_store_that_is_down_is_refused_in_seconds(tmp_path):
    uri, shown = next(iter(STORES.items()))
    done = train(cwd=tmp_path, MLFLOW_TRACKING_URI=uri.format(SECRET))
    assert done.code == 2 and done.seconds < 15 and SECRET not in done.stdout + done.stderr
    assert len(done.stderr.splitlines()) == 1 and f"MLFLOW_TRACKING_URI {shown}: " in done.stderr
    assert not list(tmp_path.glob("outputs/*"))


def test_no_refusal_of_a_store_has_its_password():
    """In a process of its own, since MLflow keeps an address for good."""
    script = """
import os, sys
from pathlib import Path
import checks, record
for uri in sys.argv[1:]:
    os.environ["MLFLOW_TRACKING_URI"] = uri
    try:
        record.connect(Path("."), "p7-grpo")
    except checks.Refused as refusal:
        print(refusal)
"""
    uris = [uri.format(SECRET) for uri in STORES]
    done = subprocess.run([sys.executable, "-c", script, *uris], cwd=ROOT, capture_output=True, text=True, timeout=60)
    said = done.stdout.splitlines()
    assert len(said) == len(STORES) and SECRET not in done.stdout + done.stderr, done.stderr
    for line, shown in zip(said, STORES.values()):
        assert f"MLFLOW_TRACKING_URI {shown}: " in line


def test_a_store_without_a_scheme_is_refused(tmp_path):
    message = refused(cwd=tmp_path, MLFLOW_TRACKING_URI="127.0.0.1:5000")
    assert "MLFLOW_TRACKING_URI 127.0.0.1:5000: no scheme; http://127.0.0.1:5000 for a server" in message
