"""Access control of the server for clients without the worker's key.

Such clients may generate, tokenize, and query health and metrics. By default SGLang protects only the routes that
change weights. It returns its arguments, including the key, to any client. It also accepts adapters and logit
processors from any client; logit processors are pickles and thus arbitrary code. Therefore this module opens a fixed
list of routes without the key, and accepts no logit processor but our own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastapi import FastAPI

OPEN = ("/v1/", "/generate", "/tokenize", "/detokenize", "/model_info", "/ping")
"""Path prefixes of routes that need no key; SGLang always leaves its health and metrics routes open too."""
BEFORE_TAKING = "sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request"
"""SGLang method before which the hook `refuse_foreign_code` runs, in the server process."""


def guard_routes(app: FastAPI) -> None:
    """Require the worker's key for all routes that are not in `OPEN`. Call before the server is launched."""
    from sglang.srt.utils.auth import AuthLevel, auth_level

    for route in app.routes:
        endpoint = getattr(route, "endpoint", None)
        if endpoint is not None and not getattr(route, "path", "").startswith(OPEN):
            auth_level(AuthLevel.ADMIN_OPTIONAL)(endpoint)


def refuse_foreign_code(manager: Any, request: Any, *arguments: Any, **named: Any) -> None:
    """Raise `ValueError` for logit processors other than our own; SGLang returns it as a client error."""
    from roll_infer_sglang.sampler import Carrier

    given = getattr(request, "custom_logit_processor", None)
    if given is not None and given != Carrier.to_str():
        raise ValueError("custom_logit_processor is code, which this server takes from nobody")
