"""What a variable such as `CUDA_VISIBLE_DEVICES` leaves of a host's devices."""

from __future__ import annotations


def visible_devices(value: str | None, num_devices: int) -> tuple[str, ...]:
    """The devices that a process sees, in its order: their numbers on the host, or ids such as `GPU-8a44…`.

    `value` is the variable's; None where it is not set, which leaves all. As the drivers read it: entries behind the
    first that is no device of this host do not count, and one that comes twice leaves nothing.
    """
    if value is None:
        return tuple(str(index) for index in range(num_devices))
    seen: list[str] = []
    for entry in (each.strip() for each in value.split(",")):
        is_number = entry.isascii() and entry.isdigit()
        if is_number and int(entry) >= num_devices:
            break
        if not is_number and not entry.startswith(("GPU-", "MIG-")):
            break
        device = str(int(entry)) if is_number else entry
        if device in seen:
            return ()
        seen.append(device)
    return tuple(seen)
