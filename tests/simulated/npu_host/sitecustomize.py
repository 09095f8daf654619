"""Every process of this host finds the device files of its NPUs in the working directory of the test, not in `/dev`."""

import os
from pathlib import Path

from roll_platform_npu import devices

devices.DEV = Path(os.environ["NPU_HOST_DEV"])
