"""What strangers may ask of the server: whoever reaches it and does not have the worker's key.

Tokens and text from the model, and how it is. SGLang guards the routes that change weights and no others: it tells its
arguments, the key among them, to whoever asks, and takes adapters and logit processors from them, which are pickles, so
code. So here the open routes are counted, and of logit processors only ours is taken.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastapi import FastAPI

OPEN = ("/v1/", "/generate", "/tokenize", "/detokenize", "/model_info", "/ping")
"""How the paths of open routes begin; besides those about health and metrics, which SGLang always leaves open."""
BEFORE_TAKING = "sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request"
"""What `refuse_foreign_code` precedes, in the server's own process."""


def guard_routes(app: FastAPI) -> None:
    """All others want the worker's key. Called before the server is launched."""
    from sglang.srt.utils.auth import AuthLevel, auth_level

    for route in app.routes:
        endpoint = getattr(route, "endpoint", None)
        if endpoint is not None and not getattr(route, "path", "").startswith(OPEN):
            auth_level(AuthLevel.ADMIN_OPTIONAL)(endpoint)


def refuse_foreign_code(manager: Any, request: Any, *arguments: Any, **named: Any) -> None:
    """Raises `ValueError`, which SGLang answers as a mistake in the request."""
    from roll_infer_sglang.sampler import Carrier

    given = getattr(request, "custom_logit_processor", None)
    if given is not None and given != Carrier.to_str():
        raise ValueError("custom_logit_processor is code, which this server takes from nobody")
