"""Parser for `CUDA_VISIBLE_DEVICES` and similar variables."""

from __future__ import annotations


def visible_devices(value: str | None, num_devices: int) -> tuple[str, ...]:
    """Devices visible to a process, in the process's order: indices on the host, or ids such as `GPU-8a44…`.

    `value` is the variable's value; None (not set) makes all `num_devices` devices visible. The rules are those of the
    drivers: entries after the first invalid one are ignored, and a duplicate entry hides all devices.
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
