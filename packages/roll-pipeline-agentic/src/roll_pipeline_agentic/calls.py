"""Arguments and results of calls of environments and agents as JSON values, see `environment_process`.

Also the seeds and states that episodes of environments and rollouts of agents share.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from roll_core.spec.agent import Session
from roll_core.spec.environment import Opening, Reply, Turn
from roll_core.types import Reward

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roll_core.spec.environment import Message, State
    from roll_core.types import Media, TokenIds

RESULTS: dict[str, tuple[type, ...]] = {
    "reset": (Opening,),
    "step": (Turn,),
    "score": (Reward, type(None)),
    "run": (Reward, str, type(None)),
    "close": (type(None),),
}
"""Valid types of the results of the methods of environments and agents."""


def wire_arguments(method: str, arguments: tuple[Any, ...]) -> list[Any]:
    """Arguments of a call as JSON values."""
    return [asdict(argument) if isinstance(argument, Reply | Session) else argument for argument in arguments]


def check_result(method: str, result: Any) -> None:
    """Raise `TypeError` for a result of the wrong type."""
    if not isinstance(result, RESULTS[method]):
        raise TypeError(_unexpected(method, type(result).__name__))


def result_from(method: str, name: str, wired: Any, *, plain: bool = False) -> Any:
    """Result from that of `environment_process`, of a class called `name`. Raises `TypeError` for another class.

    `plain`: dicts with the fields of the class are also results, and numbers are scores.
    """
    types = RESULTS[method]
    if plain and method == "score" and isinstance(wired, int | float):
        return Reward(value=float(wired))
    if (plain and isinstance(wired, dict) and method != "close") or name in {
        result_type.__name__ for result_type in types
    }:
        return types[0](**wired) if isinstance(wired, dict) else wired
    raise TypeError(_unexpected(method, name))


def _unexpected(method: str, name: str) -> str:
    return f"{method} returned {name}, expected {' or '.join(result_type.__name__ for result_type in RESULTS[method])}"


def seed_of(*parts: int | str) -> int:
    """A seed of 31 bits, as gymnasium needs, that is the same for the same parts on every machine."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little") >> 1


def digest_of(data: bytes) -> str:
    """Hex digest of 12 bytes (BLAKE2b)."""
    return hashlib.blake2b(data, digest_size=12).hexdigest()


def state_of(state: State | None, messages: Sequence[Message]) -> State:
    """The state that an environment named, or else the digest of its messages and their images."""
    if state is not None:
        return state
    return digest_of(json.dumps(list(messages), sort_keys=True, default=lambda media: media.digest).encode())


def prompt_digest(prompt_ids: TokenIds, media: Sequence[Media]) -> str:
    """Digest of a prompt. Images of one size have the same tokens."""
    return digest_of(prompt_ids.tobytes() + "".join(image.digest for image in media).encode())
