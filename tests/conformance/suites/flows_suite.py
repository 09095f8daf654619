"""The strategies for module programs of roll-wrong under their group of the kit."""

from __future__ import annotations

from roll_wrong.plugin import FLOWS

from roll_testing.module_programs import ModuleProgramTests


class Suite(ModuleProgramTests):
    """In this process; two ranks only where ranks are what is wrong."""

    isolate = False
    world_sizes = (1,)
    preload = (*ModuleProgramTests.preload, "roll_wrong.flows", "roll_testing.tiny_flow")


for name in FLOWS:
    title = f"Test_{name}"
    sizes = {"world_sizes": (1, 2)} if name in ("right_flow", "mean_of_replicas") else {}
    globals()[title] = type(title, (Suite,), {"name": name, "__module__": __name__, **sizes})
