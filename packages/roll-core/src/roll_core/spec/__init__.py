"""The complete plugin API: what a plugin offers (`hooks`, `providers`), and the interfaces that its classes implement.

A plugin imports only from here and from `roll_core.{errors,types,algorithms,data}`, no other part of the core. Import
the modules by name (`from roll_core.spec.train import TrainStrategy`): this package loads nothing heavy.
"""

HOOK_API = 1
"""Version of the hook API. A plugin module states the version it was written for: `ROLL_HOOK_API = 1`."""
