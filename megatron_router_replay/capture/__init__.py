"""Record which experts a PyTorch MoE uses while it generates -> one RoutingTrace a sequence.

For programs that report no routes: `transformers`, or a loop of your own. `generate()` needs two lines:

    with mrr.capture.watch(model) as seen:
        sequences = model.generate(ids, attention_mask=mask, do_sample=True, max_new_tokens=64)
    trace = seen.trace(sequences, mask, pad_token_id=0)  # one sample a row

In a sampling loop of your own, name the request of each token in a forward:

    capturer = Capturer(model, max_num_tokens=4096)
    capturer.add_request("a", num_prompt_tokens=len(prompt))
    with capturer.forward(["a"], token_positions(attention_mask)):  # prefill; then one token a step: forward(["a"], [7])
        model(...)
    trace = capturer.finish("a", prompt + output)

Every router writes into one device buffer, also from compiled code and CUDA graphs. After the forward one copy brings
the step to the host, where its rows are sorted into the requests. A model without a capturer has no hook.

Each announcement is compared with its forward: the tokens and calls of every router, the shape of input_ids, attention_mask,
and every token of the finished sequence. A batch padded or reordered otherwise than announced raises CaptureError.

Source: the design of vLLM 0.21's routed experts replay and of SGLang's capturer; the code is our own.
"""

import sys
from types import ModuleType
from typing import Any

from megatron_router_replay.capture.capturer import Capturer
from megatron_router_replay.capture.forward import token_positions
from megatron_router_replay.capture.routers import CaptureError, RouterSite
from megatron_router_replay.capture.watched import watch

__all__ = ["CaptureError", "Capturer", "RouterSite", "token_positions", "watch"]


class _Module(ModuleType):
    """The module, which a user may call in place of `watch`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("mrr.capture is a module: with mrr.capture.watch(model) as seen: model.generate(...)")


sys.modules[__name__].__class__ = _Module
