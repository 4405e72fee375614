"""What a run records, on disk first and then in the MLflow store, which may be away for a while, or for good."""

import contextlib
import fcntl
import json
import queue
import threading
import time
from pathlib import Path

from checks import Refused, one_line

FILE = "record.jsonl"
SECONDS_BETWEEN_TRIES = 30


class Journal(threading.Thread):
    """Sends items in the background, in order, so that no step waits for the store.

    `record.jsonl` in the run's folder gets a line for each item, {"n": 7, "kind": "metrics", ...}, before it is sent, and
    {"sent": 7} once the store has it. The file is locked while the run goes on. An item that a store took without answering
    in time is sent again: rows of a table may then be there twice.
    """

    def __init__(self, folder: Path, client, run_id: str):
        super().__init__(daemon=True)
        self.client, self.run_id = client, run_id
        self.file = open(folder / FILE, "a", buffering=1)
        fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.whole = True  # the file
        self.writing = threading.Lock()
        self.queue = queue.SimpleQueue()
        self.unsent = {}  # by number
        self.count = 0
        self.waiting = []  # in the order of sending
        self.refused = []  # the store answers, but does not take these
        self.next_try = 0.0
        self.trouble = ""
        self.given_up = threading.Event()
        self.start()

    def put(self, kind: str, **item) -> None:
        """Write an item down and have it sent; the kinds are those of `deliver`."""
        item = {"n": self.count, "kind": kind, "time": int(time.time() * 1000), **item}
        self.count += 1
        self.write(item)
        self.unsent[item["n"]] = item
        self.queue.put(item)

    def write(self, line: dict) -> None:
        try:
            with self.writing:
                self.file.write(json.dumps(line, default=str) + "\n")
        except OSError as error:  # a full disk: it can still be sent
            self.whole, self.trouble = False, one_line(error)

    def run(self):
        while (item := self.queue.get()) is not None:
            self.waiting.append(item)
            self.send()
        self.waiting, self.refused, self.next_try = self.refused + self.waiting, [], 0.0
        self.send()
        with contextlib.suppress(OSError):  # the end of a line that the disk has no room for
            self.file.close()

    def send(self) -> None:
        """Send what waits, unless the store was found away less than half a minute ago."""
        if time.monotonic() < self.next_try:
            return
        while self.waiting and not self.given_up.is_set():
            item = self.waiting[0]
            try:
                deliver(self.client, self.run_id, item)
            except Exception as error:
                self.trouble = one_line(error)
                if not self.store_answers():
                    self.next_try = time.monotonic() + SECONDS_BETWEEN_TRIES
                    return
                self.refused.append(item)
            else:
                self.write({"sent": item["n"]})
                del self.unsent[item["n"]]
            del self.waiting[0]

    def store_answers(self) -> bool:
        try:
            self.client.get_run(self.run_id)
        except Exception:
            return False
        return True

    def close(self, say) -> list[dict]:
        """Send the rest, until `given_up` is set; returns the items that the store does not have."""
        self.queue.put(None)
        self.join(3)
        if self.is_alive():
            say("sending the rest of the record; Ctrl-C leaves that for later")
        while self.is_alive() and not self.given_up.is_set():
            self.join(0.2)
        return list(self.unsent.values())


def deliver(client, run_id: str, item: dict) -> None:
    """Send one item with mlflow's MlflowClient; raises whatever the store says."""
    from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, RunTag

    kind = item["kind"]
    if kind == "metrics":
        metrics = [Metric(name, value, item["time"], item["step"]) for name, value in item["values"].items()]
        client.log_batch(run_id, metrics=metrics)
    elif kind == "params":
        client.log_batch(run_id, params=[Param(name, str(value)) for name, value in item["values"].items()])
    elif kind == "tags":
        client.log_batch(run_id, tags=[RunTag(name, str(value)) for name, value in item["values"].items()])
    elif kind == "dataset":
        tags = [InputTag("mlflow.data.context", item["context"])]
        client.log_inputs(run_id, [DatasetInput(Dataset(**item["dataset"]), tags)])
    elif kind == "table":
        client.log_table(run_id, item["columns"], item["file"])
    elif kind == "text":
        client.log_text(run_id, item["text"], item["file"])
    elif kind == "figure":
        import pictures

        client.log_figure(run_id, pictures.FIGURES[item["name"]](item["data"]), item["file"])
    elif kind == "folder":
        client.log_artifacts(run_id, item["path"], item["to"])
    elif kind == "status":
        client.set_terminated(run_id, item["status"], item["time"])
    else:
        raise ValueError(f"an item of kind {kind}, of which this version knows nothing")


def in_words(items: list[dict]) -> str:
    """What a list of items holds, for people: `metrics of steps 3 to 9, samples.json, lora, status FINISHED`."""
    steps = sorted({item["step"] for item in items if item["kind"] == "metrics"})
    spans = []
    for step in steps:
        if spans and step == spans[-1][1] + 1:
            spans[-1][1] = step
        else:
            spans.append([step, step])
    spans = [f"{first} to {last}" if first < last else f"{first}" for first, last in spans]
    parts = [f"metrics of steps {', '.join(spans)}"] if spans else []
    names = {"params": "params", "tags": "tags", "dataset": "data set"}
    for item in items:
        parts.append(names.get(item["kind"]) or item.get("file") or item.get("to") or f"status {item.get('status')}")
    return ", ".join(part for part in dict.fromkeys(parts) if part != "status None")


def has_ended(folder: Path) -> bool:
    """Whether a run says how it ended."""
    try:
        with open(folder / FILE) as lines:
            return any(line.get("kind") == "status" for line in parsed(lines))
    except OSError:
        return False


def end_for_another(folder: Path, error: str, story: str) -> None:
    """Write down that a run whose process has died FAILED, unless it says already how it ended. Raises OSError.

    The file's last line may have been cut off, and lines that the disk had no room for may have been sent. The lock of a
    process that was killed can outlive it for a moment.
    """
    with open(folder / FILE, "a+") as file:
        for tries in reversed(range(20)):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not tries:
                    raise
                time.sleep(0.1)
        file.seek(0)
        lines = parsed(file)
        if any(line.get("kind") == "status" for line in lines):
            return
        after = 1 + max((line.get("n", line.get("sent", -1)) for line in lines), default=-1)
        items = [
            {"kind": "tags", "values": {"error": error}},
            {"kind": "text", "text": story, "file": "failure.txt"},
            {"kind": "status", "status": "FAILED"},
        ]
        for n, item in enumerate(items, after):
            file.write("\n" + json.dumps({"n": n, "time": int(time.time() * 1000), **item}) + "\n")


def parsed(lines) -> list[dict]:
    """The lines that are whole: a full disk, and a kill, cut them off."""
    found = []
    for line in lines:
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found


def read(folder: Path) -> tuple[dict[str, set[int]], dict, list[dict]]:
    """A run's journal: the runs that it has become, each with the numbers of the items it holds; its head; its items.

    The head has the first run's run_id, run_name and experiment; another run was made by an upload into another store.
    Refuses a folder that is no run's, and a run that still goes on.
    """
    file = folder / FILE
    if not file.is_file():
        raise Refused(f"{folder}: no {FILE} in there; give the folder of a run, such as outputs/grpo-first-add-...")
    with open(file) as lines:
        try:
            fcntl.flock(lines, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Refused(f"{folder}: this run still goes on, and sends by itself") from None
        found = parsed(lines)
    if not found or "run_name" not in found[0]:
        raise Refused(f"{file}: its first line names no run; it was not written by this lab, or is not whole")
    runs = {found[0]["run_id"]: set()}
    for line in found:
        if "sent" in line:
            runs.setdefault(line.get("run_id", found[0]["run_id"]), set()).add(line["sent"])
    return runs, found[0], [line for line in found if "kind" in line]
