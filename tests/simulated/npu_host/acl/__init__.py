"""Stand-in for CANN's Python module: what Ray calls in it."""

import os


class rt:
    @staticmethod
    def get_device_count() -> tuple[int, int]:
        return int(os.environ["NPU_HOST_DEVICES"]), 0


def get_soc_name() -> str:
    return "Ascend910B"
