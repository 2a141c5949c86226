"""Load on ``atlas serve``: plans per second, latency percentiles, and the growth of the server's memory.

    python benchmarks/serve.py RUN [--clients 16] [--hostile 0] [--seconds 60] [--server "--max-batch 16"]

Starts a server on a free port. Each client is a thread that asks for a plan, waits for the answer and asks again,
with random images of the model's size. Hostile clients connect again and again and send random bytes, a message
that is too large, or a request whose answer they do not wait for. Memory is compared with that after the first
tenth of the time.
"""

import argparse
import logging
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
from websockets.exceptions import WebSocketException
from websockets.sync.client import connect

from atlas_wm.client import RemoteError, RemotePlanner, pack


def resident(pid: int) -> float:
    """MiB of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


class Load:
    """What the clients measured."""

    def __init__(self, url: str, seconds: float):
        self.url, self.end = url, time.perf_counter() + seconds
        self.latencies: list[float] = []
        self.planning: list[float] = []
        self.refused = self.attacks = 0
        self.failed: list[str] = []

    def client(self, number: int) -> None:
        try:
            with RemotePlanner(self.url, timeout=120) as planner:
                side = planner.metadata["image_size"]
                images = np.random.default_rng(number).integers(0, 256, (2, side, side, 3), dtype=np.uint8)
                seed = 0
                while (started := time.perf_counter()) < self.end:
                    try:
                        plan = planner.plan(images[0], None if seed else images[1], seed=seed)
                    except RemoteError as error:
                        if "waiting already" not in str(error):
                            raise
                        self.refused += 1
                        time.sleep(0.05)
                        continue
                    self.latencies.append(time.perf_counter() - started)
                    self.planning.append(plan.seconds["planning"])
                    seed += 1
        except Exception as error:
            self.failed.append(f"client {number}: {type(error).__name__}: {error}")

    def hostile(self, number: int) -> None:
        rng = np.random.default_rng([1, number])
        image = rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)
        messages = (rng.bytes(1000), bytes(17 * 2**20), pack({"frame": image, "goal": image}))
        while time.perf_counter() < self.end:
            for kind, message in enumerate(messages):
                try:
                    with connect(self.url, compression=None) as socket:
                        socket.recv()
                        socket.send(message)
                        self.attacks += 1
                        if kind < 2:
                            socket.recv()  # an error, or the end
                        else:
                            socket.socket.shutdown(2)  # as a process that is killed
                except (WebSocketException, OSError):  # closed, or too many clients
                    pass
                time.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--hostile", type=int, default=0, help="hostile clients besides")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--server", default="", help="more flags of atlas serve")
    arguments = parser.parse_args()
    logging.getLogger("websockets").setLevel(logging.CRITICAL)  # it reports what hostile clients do to it
    command = [sys.executable, "-m", "atlas_wm", "serve", arguments.run, "--port", "0", *arguments.server.split()]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    try:
        url = None
        while url is None:
            said = server.stderr.readline()
            if not said:
                sys.exit("the server did not start")
            url = re.search(r"ws://[\d.:]+", said)
        threading.Thread(target=server.stderr.read, daemon=True).start()
        load = Load(url[0], arguments.seconds)
        threads = [threading.Thread(target=load.client, args=(n,)) for n in range(arguments.clients)]
        threads += [threading.Thread(target=load.hostile, args=(n,)) for n in range(arguments.hostile)]
        for thread in threads:
            thread.start()
        time.sleep(arguments.seconds / 10)
        before = resident(server.pid)
        time.sleep(max(0.0, load.end - time.perf_counter()))
        after = resident(server.pid)
        for thread in threads:
            thread.join()
        took = time.perf_counter() - load.end + arguments.seconds
        server.send_signal(signal.SIGTERM)
        code = server.wait(60)
    finally:
        server.kill()
    milliseconds = 1e3 * np.array(load.latencies)
    p50, p90, p99 = np.percentile(milliseconds, [50, 90, 99])
    plans = len(milliseconds)
    print(f"{arguments.clients} clients, {took:.1f} s: {plans} plans, {plans / took:.1f} per s")
    print(f"latency, ms: p50 {p50:.0f}, p90 {p90:.0f}, p99 {p99:.0f}, most {milliseconds.max():.0f}")
    print(f"planning a batch, ms: mean {1e3 * np.mean(load.planning):.0f}")
    growth = f"{before:.0f} after a tenth of the time, {after:.0f} at the end ({after - before:+.1f})"
    print(f"server memory, MiB: {growth}")
    if arguments.hostile:
        print(f"{load.attacks} hostile messages of {arguments.hostile} clients")
    print(f"refused: {load.refused}; failed clients: {len(load.failed)}; exit status of the server: {code}")
    for line in load.failed:
        print(line)


if __name__ == "__main__":
    main()
