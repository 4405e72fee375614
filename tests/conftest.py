"""What the tests share: the script as a subprocess, and two real runs of it, each made once."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

import checks

ROOT = Path(__file__).resolve().parent.parent
if "PYTEST_XDIST_WORKER" in os.environ:  # two trainings at once on two cores
    os.environ.setdefault("OMP_NUM_THREADS", "1")
# where a machine forbids to keep compiled modules, each start of the script compiles them anew: 12 of 21 s to import Unsloth
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
ENVIRONMENT = dict(os.environ)  # before any test imports unsloth, which sets variables of its own
SECRET = "s3cret-pässword"

# files in the order in which they are begun: the longest first, so that no worker is left with one of them at the end
LOOK_AT_THE_SMALL_RUN = ["test_run.py", "test_ui.py", "test_pictures.py"]
LONGEST = ["test_nothing_lost.py", *LOOK_AT_THE_SMALL_RUN, "test_compare.py", "test_knobs.py", "test_config.py"]
LAST = ["test_paged.py"]  # it imports Unsloth's tables of names, which patches TRL for a GPU: what follows would train by that


def pytest_xdist_auto_num_workers(config) -> int:
    """Two files at a time; one where a GPU is, whose memory the tests measure, and where one file is asked for."""
    alone = len(config.args) == 1 and ".py" in config.args[0]
    return 0 if alone or Path("/dev/nvidiactl").exists() else 2


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """--dist loadfile, with those that look at the small run as one file: a worker makes it once, and the other never."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            return "the small run" if Path(file).name in LOOK_AT_THE_SMALL_RUN else file

    return Scheduling(config, log)


def train(*arguments, cwd, timeout=300, **environment) -> SimpleNamespace:
    """Run train.py as a user would, without a GPU, recording into `cwd`; returns its code, stdout, stderr and seconds."""
    store = f"sqlite:///{cwd / 'mlflow.db'}"
    env = {**ENVIRONMENT, "CUDA_VISIBLE_DEVICES": "", "MLFLOW_TRACKING_URI": store, **environment}
    start = time.perf_counter()
    done = subprocess.run([sys.executable, str(ROOT / "train.py"), *map(str, arguments)], cwd=cwd, env=env,
                          capture_output=True, text=True, timeout=timeout)  # fmt: skip
    return SimpleNamespace(code=done.returncode, stdout=done.stdout, stderr=done.stderr, seconds=time.perf_counter() - start)


def refused(*arguments, cwd, **environment) -> str:
    """The message of a run that has to be refused: exit code 2, one or two lines, no traceback, nothing left behind."""
    done = train(*arguments, cwd=cwd, timeout=60, **environment)
    assert done.code == 2, done.stdout + done.stderr
    assert not list(cwd.glob("outputs/*")) and not (cwd / "mlflow.db").exists()
    assert 1 <= len(done.stderr.splitlines()) <= 2, done.stderr
    assert done.stderr.startswith("train.py: ") and "Traceback" not in done.stderr
    return done.stderr


def refused_in_this_process(*arguments, cwd) -> str:
    """The same from a call of train.main, which spares 3 seconds of imports."""
    import train as script

    environment = {"CUDA_VISIBLE_DEVICES": "", "MLFLOW_TRACKING_URI": f"sqlite:///{cwd / 'mlflow.db'}"}
    with contextlib.chdir(cwd), mock.patch.dict(os.environ, environment), pytest.raises(checks.Refused) as refusal:
        script.main(list(arguments))
    assert not list(cwd.glob("outputs/*")) and not (cwd / "mlflow.db").exists()
    assert 1 <= len(str(refusal.value).splitlines()) <= 2
    return str(refusal.value)


def readme_block(after: str) -> str:
    """The first code block of the README after the given words."""
    return re.search(re.escape(after) + r".*?```\w*\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]


@pytest.fixture(scope="session")
def small_run(tmp_path_factory):
    """Two steps on SmolLM2's real weights, with a learning rate that shows, recorded in a SQLite file."""
    folder = tmp_path_factory.mktemp("small_run")
    done = train("--max-steps", 2, "--eval-problems", 4, "--learning-rate", 2e-3, "--warmup-steps", 0, "--save-steps", 2,
                 "--sample-steps", 1, "--epsilon-high", 0.28, "--seed", 5, cwd=folder)  # fmt: skip
    assert done.code == 0, done.stdout + done.stderr
    (run_dir,) = (folder / "outputs").iterdir()
    store = f"sqlite:///{folder / 'mlflow.db'}"
    return SimpleNamespace(done=done, store=store, run_dir=run_dir, adapter_dir=run_dir / "final-adapter")


class Server:
    """A real `mlflow server` on loopback, with its log in `folder`; it can be killed and started again.

    Without `store` its database lies there too, and without further `arguments` its artifacts.
    """

    def __init__(self, folder, *arguments, verb="server", store=None):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.folder, self.address = folder, f"http://127.0.0.1:{self.port}"
        folder.mkdir(exist_ok=True)
        self.command = [sys.executable, "-m", "mlflow", verb, "--port", str(self.port), "--workers", "1",
                        "--backend-store-uri", store or f"sqlite:///{folder / 'server.db'}",
                        *(arguments or ("--artifacts-destination", str(folder / "artifacts")))]  # fmt: skip
        self.start()

    def start(self):
        with open(self.folder / "log", "w") as log:
            env = {**ENVIRONMENT, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}  # 4 s less to start
            self.process = subprocess.Popen(
                self.command, cwd=self.folder, env=env, stdout=log, stderr=log, start_new_session=True
            )
        for _ in range(240):
            try:
                urllib.request.urlopen(f"{self.address}/health", timeout=1)
                return
            except OSError:
                assert self.process.poll() is None, (self.folder / "log").read_text()
                time.sleep(0.25)
        pytest.fail((self.folder / "log").read_text())

    def kill(self):
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """A real `mlflow server` on loopback; yields its address."""
    server = Server(tmp_path_factory.mktemp("server"))
    yield server.address
    server.kill()


@pytest.fixture(scope="session")
def own_task_run(tmp_path_factory, server):
    """One step of the README's own task, recorded by a server whose address carries a user and a password."""
    folder = tmp_path_factory.mktemp("own_task")
    (folder / "my_task.py").write_text(readme_block("## Your own task"))
    uri = server.replace("http://", f"http://somebody:{SECRET}@")
    done = train("--task", "my_task.py", "--max-steps", 1, "--num-generations", 2, "--per-device-train-batch-size", 2,
                 "--max-completion-length", 8, "--eval-problems", 2, "--run-name", "mine", "--experiment", "own",
                 cwd=folder, MLFLOW_TRACKING_URI=uri, PYTHONIOENCODING="ascii")  # fmt: skip
    assert done.code == 0, done.stdout + done.stderr
    (run_dir,) = (folder / "outputs").iterdir()
    return SimpleNamespace(done=done, store=server, folder=folder, run_dir=run_dir)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A random two-layer model with SmolLM2's tokenizer."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    import models

    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = AutoTokenizer.from_pretrained(models.embedded_folder())
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    shape = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=16384, **shape)).save_pretrained(folder)
    return folder


def pytest_collection_modifyitems(items):
    """Files get their order. GPU tests are skipped, with the reason, where no GPU is visible."""
    between = sorted({item.path.name for item in items} - {*LONGEST, *LAST})
    items.sort(key=lambda item: [*LONGEST, *between, *LAST].index(item.path.name))
    on_gpu = [item for item in items if "gpu" in item.keywords]
    if on_gpu:
        from gpu import find_gpu

        gpu, seen = find_gpu()
        for item in on_gpu if gpu is None else []:
            item.add_marker(pytest.mark.skip(reason=seen))
