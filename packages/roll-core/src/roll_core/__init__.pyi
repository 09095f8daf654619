from roll_core.api import check as check
from roll_core.api import run as run
from roll_core.config import LoadedConfig as LoadedConfig
from roll_core.errors import ConfigError as ConfigError
from roll_core.errors import RollError as RollError
from roll_core.errors import RunInterruptedError as RunInterruptedError
from roll_core.runtime.run.loop import RunResult as RunResult
from roll_tools.live import LiveMetrics as LiveMetrics
from roll_tools.planning import PlannedRun as PlannedRun
from roll_tools.planning import plan as plan

__version__: str
