"""`router-replay request`."""

from __future__ import annotations

import json
import shlex
from enum import Enum
from typing import Annotated, Any

import typer

from megatron_router_replay.cli.output import Json, Out, bad_input, check_out, emit


class Server(str, Enum):
    """Which engine serves."""

    vllm = "vllm"
    sglang = "sglang"


_NOTES = {
    "vllm": (
        "start the server with: vllm serve MODEL --enable-return-routed-experts",
        "return_token_ids makes the reply name its tokens, so that a shift by one cannot pass",
        "streams of completions and chats never carry routes: leave stream out",
    ),
    "sglang": (
        "start the server with: python -m sglang.launch_server --model-path MODEL --enable-return-routed-experts",
        "/generate carries the routes of every reply; the OpenAI endpoints carry those of the first one only",
        "send input_ids where you have them: the reply names its output ids, not its prompt's",
    ),
}


def request(
    engine: Annotated[Server, typer.Option(help="Whose server is asked: vllm or sglang.", metavar="NAME")],
    url: Annotated[str, typer.Option(help="Where the server listens.", metavar="URL")] = "",
    model: Annotated[str, typer.Option(help="The served model's name, of vLLM.", metavar="NAME")] = "MODEL",
    prompt: Annotated[str, typer.Option(help="The prompt.", metavar="TEXT")] = "The capital of France is",
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate.", metavar="N", min=1)] = 16,
    as_json: Json = False,
    out: Out = None,
) -> None:
    """Print the request that makes a server return its routes, as a curl command.

    What comes back is read with `router-replay convert response.json trace.safetensors --engine NAME --model PATH`.
    """
    with bad_input():
        check_out(out)
    address, body = _request(engine.value, url, model, prompt, max_tokens)
    # Quoted for a shell; control characters of a prompt are escaped by JSON already.
    command = (
        f"curl -s {shlex.quote(address)} -H 'Content-Type: application/json' \\\n"
        f"  -d {shlex.quote(json.dumps(body))} > response.json"
    )
    values = {"url": address, "body": body, "notes": list(_NOTES[engine.value])}
    text = "\n".join([*(f"# {note}" for note in _NOTES[engine.value]), command])
    emit(text, values, as_json=as_json, out=out, fold=False)


def _request(engine: str, url: str, model: str, prompt: str, max_tokens: int) -> tuple[str, dict[str, Any]]:
    if engine == "vllm":
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "logprobs": 1,
            "return_token_ids": True,
        }
        return (url or "http://localhost:8000").rstrip("/") + "/v1/completions", body
    sampling = {"max_new_tokens": max_tokens}
    body = {"text": prompt, "sampling_params": sampling, "return_logprob": True, "return_routed_experts": True}
    return (url or "http://localhost:30000").rstrip("/") + "/generate", body
