"""The whole plugin API: what a plugin offers (`hooks`, `providers`) and the contracts of what it offers.

A plugin imports from here and from `roll_core.{errors,types,algorithms,data,modeling,testing}`, and from nothing else
of the core.
Import the modules by name (`from roll_core.spec.train import TrainStrategy`): nothing heavy is loaded by this package.
"""

HOOK_API = 1
"""Version of the hook API. A plugin module states the one that it was written for: `ROLL_HOOK_API = 1`."""
