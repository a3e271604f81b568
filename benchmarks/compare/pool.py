"""Worker processes: each takes one module's cases after another; one that dies is replaced and goes on behind."""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

from compare.case import Case
from compare.worker import SICK, blank

CASE_SECONDS = 900.0  # FlashInfer's top-k takes more than 400 s to build beside others


class Pool:
    """Runs groups of cases in `jobs` processes and gives each row to `report`, until done or out of time."""

    def __init__(self, command: list[str], jobs: int, prebuild: bool, report: Callable[[dict[str, Any]], None]) -> None:
        self.command, self.jobs, self.prebuild, self.report = command, jobs, prebuild, report
        self.pending: list[list[Case]] = []
        self.lock = threading.Lock()
        self.processes: set[subprocess.Popen[bytes]] = set()
        self.stopped = False

    def run(self, groups: list[list[Case]], deadline: float) -> None:
        self.pending = [list(g[:1] if self.prebuild else g) for g in groups]
        threads = [threading.Thread(target=self._work, daemon=True) for _ in range(min(self.jobs, len(groups)))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        with self.lock:
            self.stopped = True
            for process in self.processes:
                stop(process)
        for thread in threads:
            thread.join(10)

    def _work(self) -> None:
        worker: Worker | None = None
        while True:
            with self.lock:
                if self.stopped or not self.pending:
                    break
                cases = self.pending.pop(0)
            while cases and not self.stopped:
                if worker is None:
                    worker = Worker(self.command)
                    with self.lock:
                        self.processes.add(worker.process)
                cases, alive = worker.serve(cases, self.prebuild, self._report)
                if not alive:
                    worker.close()
                    worker = None
        if worker is not None:
            worker.close()

    def _report(self, row: dict[str, Any]) -> None:
        with self.lock:
            if not self.stopped:
                self.report(row)


class Worker:
    """One process, and the pipe that its events come from."""

    def __init__(self, command: list[str]) -> None:
        self.errors = tempfile.NamedTemporaryFile(prefix="compare-", suffix=".log", delete=False)  # noqa: SIM115
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, start_new_session=True
        )
        self.buffer = b""
        self.silent = False

    def serve(
        self, cases: list[Case], prebuild: bool, report: Callable[[dict[str, Any]], None]
    ) -> tuple[list[Case], bool]:
        """Run cases; returns those left over, and whether the process lives."""
        by_id = {case.id: case for case in cases}
        try:
            self._send({"ids": list(by_id), "prebuild": prebuild})
        except OSError:
            return cases, False
        left, side, current = dict(by_id), "theirs", next(iter(by_id))
        while (event := self._event()) is not None:
            if "start" in event:
                current, side = event["start"], event["side"]
            elif "row" in event:
                row = event["row"]
                left.pop(f"{row['family']}|{row['function']}|{row['features']}")
                report(row)
            elif event.get("done"):
                return [], True
        stop(self.process)
        status = self.process.wait()
        if current in left and status != SICK:
            how = f"no answer in {CASE_SECONDS:.0f} s" if self.silent else f"its process ended with status {status}"
            report({**blank(left.pop(current)), "verdict": self._death(side, how)})
        return list(left.values()), False

    def _send(self, job: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(job).encode() + b"\n")
        self.process.stdin.flush()

    def _event(self) -> dict[str, Any] | None:
        """The next event; None when the process has ended or is silent for too long."""
        assert self.process.stdout is not None
        pipe = self.process.stdout.fileno()
        while b"\n" not in self.buffer:
            ready, _, _ = select.select([pipe], [], [], CASE_SECONDS)
            self.silent = not ready
            chunk = os.read(pipe, 65536) if ready else b""
            if not chunk:
                return None
            self.buffer += chunk
        line, self.buffer = self.buffer.split(b"\n", 1)
        event: dict[str, Any] = json.loads(line)
        return event

    def _death(self, side: str, how: str) -> str:
        with open(self.errors.name, errors="replace") as log:
            tail = " ".join(log.read()[-300:].split())
        who = "DIFFERENT: ours" if side == "ours" else "flashinfer refuses"
        return f"{who}: {how}, its log ends with: {tail}"

    def close(self) -> None:
        stop(self.process)
        self.process.wait()
        self.errors.close()


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a worker and the compilers that it started: they are one process group of our own."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        process.kill()


def command(script: str, peer: str, device: str) -> list[str]:
    return [sys.executable, script, "--worker", "--peer", peer, "--device", device]
