"""For the reference: `decode = _DECODER.decode` of an engine's module is shown as the function that it is."""

from __future__ import annotations

from typing import Any

import griffe


class EngineDecoders(griffe.Extension):
    """Puts `engines.front.Decoder`'s two methods where the modules of `engines` assign them."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Replace the assignments, once the whole package is read."""
        if "engines" not in pkg.modules:
            return
        engines = pkg.modules["engines"]
        for module in engines.modules.values():
            for name in ("decode", "decode_batch"):
                if name in module.attributes:
                    module.set_member(name, griffe.Alias(name, target=engines["front.Decoder"][name], parent=module))
